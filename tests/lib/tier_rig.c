/* SPDX-License-Identifier: Apache-2.0 */
/* mm with two nodes and a client, see tier_rig.h. */
#include <stdio.h>
#include <string.h>

#include "daemon/mm/tier.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/clock.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

/* -- answers ----------------------------------------------------------------- */

static void ops_complete(struct mm_client *c, struct mm_win *win,
			 const struct ring_cqe *cqe,
			 const struct ring_result *res)
{
	struct rig *r = mm_client_arg(c);
	struct rig_answer *a;

	assert_true(r->nr_answers < RIG_ANSWERS);
	assert_true(cqe->n <= ARRAY_SIZE(a->res));
	a = &r->answer[r->nr_answers++];
	a->tag = cqe->tag;
	a->result = cqe->result;
	a->n = cqe->n;
	a->win = win;
	if (cqe->n)
		memcpy(a->res, res, cqe->n * sizeof(*res));
}

static void ops_index_grew(struct mm_space *sp)
{
}

static void ops_member(struct mm_client *c, struct mm_client *peer, bool gone)
{
}

static void ops_kick(struct mm_client *c)
{
}

static void ops_evict(struct mm_client *c, const char *why)
{
	fail_msg("the client was to be evicted: %s", why);
}

static int ops_found(void *arg, const char *tenant)
{
	struct rig *r = arg;

	return r->o.found ? r->o.found(tenant) : KVMM_MODE_ON;
}

static void ops_said(void *arg, bool bad, const char *sentence)
{
	struct rig *r = arg;

	snprintf(r->said, sizeof(r->said), "%s", sentence);
}

static const struct mm_ops rig_ops = {
	.complete	= ops_complete,
	.index_grew	= ops_index_grew,
	.member		= ops_member,
	.kick_client	= ops_kick,
	.evict_client	= ops_evict,
	.found		= ops_found,
	.said		= ops_said,
};

bool rig_answer(struct rig *r, uint64_t tag, unsigned int ms,
		struct rig_answer *a)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);
	unsigned int i;

	do {
		for (i = 0; i < r->nr_answers; i++) {
			if (r->answer[i].tag != tag)
				continue;
			*a = r->answer[i];
			r->answer[i] = r->answer[--r->nr_answers];
			return true;
		}
		rig_poll(r);
	} while (!deadline_past(deadline));
	return false;
}

void rig_answer_put(struct rig *r, const struct rig_answer *a)
{
	uint32_t i;

	for (i = 0; i < a->n; i++)
		if (a->res[i].frame)
			mm_handover_put(a->win, a->res[i].frame);
}

/* -- beginning and end --------------------------------------------------------- */

static size_t rig_describe(const struct rig *r, uint8_t *buf)
{
	uint32_t q = r->o.page_bytes / 4;
	/* a gang has something of everything */
	struct kvmm_seg seg[3] = {
		{ .bytes = 2 * q, .align = 64, .what = KVMM_SEG_K,
		  .shard = KVMM_STRIPE },
		{ .bytes = q, .align = 64, .what = KVMM_SEG_KV,
		  .shard = KVMM_MIRROR },
		{ .bytes = q, .align = 64, .what = KVMM_SEG_V,
		  .shard = KVMM_STRIPE },
	};
	struct kvmm_seg big = {
		.bytes = r->o.big_bytes, .align = 64, .what = KVMM_SEG_KV,
		.shard = r->o.gang ? KVMM_STRIPE : KVMM_MIRROR,
	};
	struct kvmm_class cls[2] = {
		{ .name = "kv", .page_bytes = r->o.page_bytes, .nsegs = 3,
		  .segs = seg },
		{ .name = "big", .page_bytes = r->o.big_bytes, .nsegs = 1,
		  .segs = &big },
	};
	struct kvmm_group group[3] = {
		{ .class_ix = 0, .rule = KVMM_FULL, .block_tokens = 16 },
		{ .class_ix = 0, .rule = KVMM_WINDOW, .block_tokens = 16,
		  .window_pages = 4 },
		{ .class_ix = 1, .rule = KVMM_FULL, .block_tokens = 16 },
	};
	struct kvmm_desc d = {
		.size = sizeof(d), .model = "m", .revision = "1",
		.kv_dtype = "bf16", .scale_format = "none", .layout = "nhd",
		.abi_tag = "t", .salt = "", .world = r->o.gang ? r->o.gang : 1, .nclasses = 2,
		.ngroups = 3, .classes = cls, .groups = group,
	};
	struct errmsg e;
	int len;

	len = desc_encode(&d, buf, &e);
	if (len < 0)
		fail_msg("%s", e.text);
	return len;
}

/* Small segments; patient, since disks are shared, but quick to recover. */
static void rig_nvme(struct rig *r)
{
	struct nvme_opts no = {
		.name = "nvme0", .path = r->o.nvme_path, .id = 1,
		.engine = r->o.nvme_engine,
		.bytes = r->o.nvme_bytes, .seg_bytes = 1 << 20,
		.io_timeout_ns = NSEC_PER_SEC,
		.recover_ns = 200 * NSEC_PER_MSEC,
		.probe_ns = 20 * NSEC_PER_MSEC,
	};

	assert_int_equal(nvme_create(&no, r->pool, &r->nvme), 0);
	assert_int_equal(node_pair(r->host, r->nvme), 0);
}

/* Not before mm is there, whom it tells what it finds. */
static void rig_nvme_online(struct rig *r)
{
	uint64_t deadline = deadline_in(10 * NSEC_PER_SEC);

	while (r->nvme->state == NODE_STARTING && !deadline_past(deadline)) {
		work_poll(r->pool, 0);
		node_poll(r->nvme, 0);
	}
	if (r->nvme->state != NODE_ONLINE)
		fail_msg("%s", r->nvme->why);
}

static void rig_nodes(struct rig *r, struct mm_opts *mo)
{
	struct host_opts ho = {
		.name = "dram0", .bytes = r->o.dram_bytes, .numa = -1,
		.threads = 1,
	};

	assert_int_equal(host_create(&ho, &r->host), 0);
	mo->nr_nodes = 1;
	mo->node[0] = (struct mm_node_opts){
		.node = r->host, .kind = KVMM_NODE_HOST,
		.below = KVMM_NODE_NONE, .size_max = r->o.dram_bytes,
		.extent_bytes = r->o.extent_bytes, .gang = r->o.gang,
	};
	if (r->o.no_nvme)
		return;
	if (r->o.nvme_path) {
		rig_nvme(r);
	} else {
		uint32_t max_len = max(r->o.page_bytes, 1u << 20);

		r->blk = r->o.disk ? fake_blk_open(r->o.disk, max_len) :
			 fake_blk_create(r->o.nvme_bytes, max_len);
		assert_non_null(r->blk);
		r->blk->hold_recovery = r->o.hold;
		r->nvme = &r->blk->n;
	}
	mo->nr_nodes = 2;
	mo->node[0].below = 1;
	mo->node[1] = (struct mm_node_opts){
		.node = r->nvme, .kind = KVMM_NODE_NVME,
		.below = KVMM_NODE_NONE, .size_max = r->o.nvme_bytes,
		.second_touch = r->o.second_touch,
		.scrub_bytes_s = r->o.scrub_bytes_s,
		.day_permille = r->o.day_permille,
	};
	if (!r->o.far_bytes)
		return;
	ho.name = "dram1";
	ho.bytes = r->o.far_bytes;
	assert_int_equal(host_create(&ho, &r->far), 0);
	mo->nr_nodes = 3;
	mo->node[2] = (struct mm_node_opts){
		.node = r->far, .kind = KVMM_NODE_HOST, .below = 1,
		.size_max = r->o.far_bytes,
		.extent_bytes = r->o.extent_bytes,
	};
}

static void rig_client(struct rig *r)
{
	struct mm_client_opts co = {
		.tenant = "default", .name = "test", .rights = KVMM_RW,
		.mode = KVMM_MODE_ON, .pid = 1, .ledger = &r->ledger,
		.arg = r,
	};
	static uint8_t desc[DESC_MAX_BYTES];
	size_t len = rig_describe(r, desc);
	struct errmsg e = { "" };
	unsigned int i;

	assert_int_equal(shm_create(&r->ledger, "ledger",
				    sizeof(struct ledger), 0), 0);
	assert_int_equal(mm_client_create(r->mm, &co, &r->c), 0);
	if (r->o.gang)
		assert_int_equal(mm_client_join(r->c, (const uint8_t[16]){ 1 },
						0, r->o.gang, KVMM_LEADER, &e),
				 0);
	if (mm_attach(r->c, desc, len, 0, &r->sp, &e))
		fail_msg("%s", e.text);
	for (i = 0; i < 2; i++) {
		if (mm_win_open(r->c, r->sp, i, RIG_DRAM, KVMM_RW, &r->w[i],
				&e))
			fail_msg("%s", e.text);
		r->mag_head[i] = 0;
	}
	if (r->far && mm_win_open(r->c, r->sp, 0, RIG_FAR, KVMM_RW, &r->w_far,
				  &e))
		fail_msg("%s", e.text);
}

void rig_start(struct rig *r, const struct rig_opts *o)
{
	struct mm_opts mo = {
		.ops = &rig_ops, .ops_arg = r, .epoch = 1,
		.shrink_ack_ns = 200 * NSEC_PER_MSEC,
	};
	struct errmsg e = { "" };

	memset(r, 0, sizeof(*r));
	r->o = *o;
	if (!r->o.page_bytes)
		r->o.page_bytes = 4096;
	if (!r->o.big_bytes)
		r->o.big_bytes = 16384;
	if (!r->o.extent_bytes)
		r->o.extent_bytes = 8 * r->o.page_bytes;
	r->ledger = (struct shm)SHM_INIT;
	r->next_tag = 1;
	r->answer = calloc(RIG_ANSWERS, sizeof(*r->answer));
	r->hdr = aligned_alloc(64, sizeof(*r->hdr));
	assert_true(r->answer && r->hdr);
	memset(r->hdr, 0, sizeof(*r->hdr));
	assert_int_equal(work_create("rig", 1, &r->pool), 0);
	rig_nodes(r, &mo);
	mo.hdr = r->hdr;
	mo.pool = r->pool;
	mo.direct_reclaim_ns = o->direct_reclaim_ns ? o->direct_reclaim_ns :
						      5 * NSEC_PER_MSEC;
	mo.fetch_ns = o->fetch_ns ? o->fetch_ns : 2 * NSEC_PER_SEC;
	mo.policy = o->policy;
	if (!mo.policy)
		assert_int_equal(mm_policy_load("lru", &mo.policy, &e), 0);
	if (mm_create(&mo, &r->mm, &e))
		fail_msg("%s", e.text);
	if (r->o.nvme_path)
		rig_nvme_online(r);
	if (!r->o.no_client)
		rig_attach(r);
}

void rig_attach(struct rig *r)
{
	unsigned int i;

	rig_client(r);
	/* both classes have their first extent */
	for (i = 0; i < 2; i++) {
		uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);

		while (!r->w[i]->pool->nr_extents && !deadline_past(deadline))
			rig_poll(r);
		assert_true(r->w[i]->pool->nr_extents);
	}
	rig_poll(r);
}

void rig_recover(struct rig *r)
{
	uint64_t deadline = deadline_in(10 * NSEC_PER_SEC);

	r->blk->hold_recovery = false;
	while (r->nvme->state == NODE_STARTING && !deadline_past(deadline)) {
		rig_poll(r);
		rig_check(r);
	}
	assert_int_equal(r->nvme->state, NODE_ONLINE);
	if (!r->sp)
		r->sp = list_first(&r->mm->spaces, struct mm_space, link);
}

void rig_die(struct rig *r, struct rng *rng)
{
	fake_blk_die(r->blk, rng);
	rig_stop(r);
}

void rig_client_exit(struct rig *r)
{
	if (!r->c)
		return;
	mm_client_disconnect(r->c);
	mm_client_exit(r->c, NULL, NULL);
	r->c = NULL;
}

void rig_stop(struct rig *r)
{
	uint64_t deadline = deadline_in(10 * NSEC_PER_SEC);

	if (!r->mm)
		return;
	if (r->blk) {
		/* what is started and held would never end */
		r->blk->hold[NODE_READ] &= r->blk->unstarted;
		r->blk->hold[NODE_WRITE] &= r->blk->unstarted;
		r->blk->rng = NULL;
	}
	assert_int_equal(mm_destroy(r->mm, deadline), 0);
	assert_int_equal(node_destroy(r->nvme, deadline), 0);
	assert_int_equal(node_destroy(r->host, deadline), 0);
	assert_int_equal(node_destroy(r->far, deadline), 0);
	assert_int_equal(work_destroy(r->pool, deadline), 0);
	shm_fini(&r->ledger);
	free(r->hdr);
	free(r->answer);
	memset(r, 0, sizeof(*r));
}

/* -- the loop ------------------------------------------------------------------ */

/* The client maps at once whatever comes, and unmaps what must go. */
static void rig_sync(struct rig *r, struct mm_win *w)
{
	struct mm_extent_change ch[16];
	unsigned int n, i;
	uint64_t seq;

	if (!r->c || !w || w->synced_seq ==
	    atomic_load(&w->pool->table->extent_seq))
		return;
	n = mm_win_sync(w, w->synced_seq, 0, ch, 16, &seq);
	for (i = 0; i < n; i++) {
		if (ch[i].up)
			bitmap_shared_set(w->bitmap, ch[i].no);
		else
			bitmap_shared_clear(w->bitmap, ch[i].no);
	}
	if (n < 16)
		mm_win_sync(w, seq, 0, ch, 16, &seq);
}

void rig_poll(struct rig *r)
{
	struct timespec ts = { .tv_nsec = 20000 };
	uint64_t next;

	work_poll(r->pool, 0);
	node_poll(r->host, 0);
	if (r->nvme)
		node_poll(r->nvme, 0);
	if (r->far)
		node_poll(r->far, 0);
	rig_sync(r, r->w[0]);
	rig_sync(r, r->w[1]);
	rig_sync(r, r->w_far);
	next = mm_run(r->mm, now_ns());
	if (next > now_ns())
		nanosleep(&ts, NULL);
}

void rig_run(struct rig *r, unsigned int ms)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);

	do
		rig_poll(r);
	while (!deadline_past(deadline));
}

void rig_settle(struct rig *r, unsigned int ms)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);
	unsigned int quiet = 0;

	do {
		rig_poll(r);
		if (list_empty(&r->mm->flights) &&
		    list_empty(&r->mm->wbacks) && !work_pending(r->pool))
			quiet++;
		else
			quiet = 0;
	} while (quiet < 20 && !deadline_past(deadline));
}

void rig_check(struct rig *r)
{
	struct errmsg e = { "" };

	if (mm_check(r->mm, &e))
		fail_msg("%s", e.text);
	assert_true(node_check(r->host));
	if (r->nvme)
		assert_true(node_check(r->nvme));
}

/* -- names ---------------------------------------------------------------------- */

void rig_key(uint32_t chain, uint32_t i, uint8_t key[32])
{
	uint64_t w[4] = { chain + UINT64_C(1), i, ~(uint64_t)chain, ~0ull - i };

	memcpy(key, w, sizeof(w));
}

struct page *rig_page(struct rig *r, unsigned int group, uint32_t chain,
		      uint32_t i)
{
	uint64_t k[4];

	rig_key(chain, i, (uint8_t *)k);
	return page_find(r->sp, group, k);
}

enum copy_state rig_state(struct rig *r, unsigned int group, uint32_t chain,
			  uint32_t i, unsigned int node)
{
	struct page *pg = rig_page(r, group, chain, i);

	return pg ? copy_at(pg, node)->state : COPY_NONE;
}

struct mm_pool *rig_pool(struct rig *r, unsigned int group, unsigned int node)
{
	return r->sp->pool[rig_class(group)][node];
}

const struct mm_counters *rig_count(struct rig *r, unsigned int node)
{
	return &r->mm->node[node].c;
}
