/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/lib/mm_rig.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/clock.h"
#include "tests/lib/unit.h"

#define RIG_WAIT_NS	(10 * NSEC_PER_SEC)

/* -- what the server does ----------------------------------------------------- */

static struct rig_client *of(const struct mm_client *c)
{
	return mm_client_arg(c);
}

static void on_complete(struct mm_client *c, struct mm_win *win,
			const struct ring_cqe *cqe,
			const struct ring_result *res)
{
	struct rig *r = of(c)->rig;
	struct rig_done *d = calloc(1, sizeof(*d) + cqe->n * sizeof(*res));

	assert_non_null(d);
	assert_true(r->nr_done < RIG_DONE);
	d->win = win;
	d->tag = cqe->tag;
	d->result = cqe->result;
	d->op = cqe->op;
	d->n = cqe->n;
	if (cqe->n)
		memcpy(d->res, res, cqe->n * sizeof(*res));
	r->done[r->nr_done++] = d;
}

static void on_index_grew(struct mm_space *sp)
{
	((struct rig *)mm_space_arg(sp))->index_grown++;
}

static void on_member(struct mm_client *c, struct mm_client *peer, bool gone)
{
	if (gone)
		of(c)->gone_members++;
	else
		of(c)->new_members++;
}

static void on_kick(struct mm_client *c)
{
	of(c)->kicks++;
}

static void on_evict(struct mm_client *c, const char *why)
{
	of(c)->evicted = true;
	snprintf(of(c)->why, sizeof(of(c)->why), "%s", why);
}

static const struct mm_ops mr_ops = {
	.complete	= on_complete,
	.index_grew	= on_index_grew,
	.member		= on_member,
	.kick_client	= on_kick,
	.evict_client	= on_evict,
};

/* -- life ------------------------------------------------------------------------ */

void mr_open(struct rig *r, const struct rig_opts *o)
{
	struct host_opts h = {
		.name = "dram0", .bytes = o->bytes ? o->bytes : 16u << 20,
		.numa = -1, .threads = 1,
	};
	struct mm_opts m = {
		.ops = &mr_ops, .ops_arg = r,
		.epoch = 7, .direct_reclaim_ns = 5 * NSEC_PER_MSEC,
		.fetch_ns = 2 * NSEC_PER_SEC,
		.shrink_ack_ns = 50 * NSEC_PER_MSEC,
		.pin_limit_pct = o->pin_limit_pct, .nr_nodes = 1,
	};
	struct errmsg e;

	memset(r, 0, sizeof(*r));
	if (o->hdr_fd)
		assert_int_equal(shm_adopt(&r->hdr_shm, dup(o->hdr_fd),
					   sizeof(struct kvmm_hdr), 0), 0);
	else
		assert_int_equal(shm_create(&r->hdr_shm, "rig-header",
					    sizeof(struct kvmm_hdr), 0), 0);
	r->hdr = r->hdr_shm.addr;
	assert_int_equal(work_create("rig", 1, &r->pool), 0);
	assert_int_equal(host_create(&h, &r->host), 0);
	r->lower = o->lower;
	m.hdr = r->hdr;
	assert_int_equal(mm_policy_load("lru", &m.policy, &e), 0);
	m.pool = o->sync_work ? NULL : r->pool;
	m.node[0] = (struct mm_node_opts){
		.node = r->host, .kind = KVMM_NODE_HOST,
		.below = r->lower ? 1 : KVMM_NODE_NONE,
		.size_max = 2 * h.bytes, .extent_bytes = o->extent_bytes,
	};
	if (r->lower) {
		m.node[1] = (struct mm_node_opts){
			.node = r->lower, .kind = KVMM_NODE_NVME,
			.below = KVMM_NODE_NONE,
		};
		m.nr_nodes = 2;
	}
	r->keep = m.keep = o->keep;
	if (mm_create(&m, &r->mm, &e))
		fail_msg("mm_create: %s", e.text);
	if (o->keep && mm_adopt(r->mm, o->share_pct ? o->share_pct : 100,
				&r->adopted, &e))
		fail_msg("mm_adopt: %s", e.text);
}

void mr_close(struct rig *r)
{
	unsigned int i;

	for (i = 0; i < r->nr_done; i++)
		free(r->done[i]);
	r->nr_done = 0;
	assert_int_equal(mm_destroy(r->mm, now_ns() + RIG_WAIT_NS), 0);
	if (r->lower)
		assert_int_equal(node_destroy(r->lower,
					      now_ns() + RIG_WAIT_NS), 0);
	assert_int_equal(node_destroy(r->host, now_ns() + RIG_WAIT_NS), 0);
	assert_int_equal(work_destroy(r->pool, now_ns() + RIG_WAIT_NS), 0);
	for (i = 0; i < RIG_CLIENTS; i++)
		if (r->client[i].ledger)
			shm_fini(&r->client[i].ledger_shm);
	shm_fini(&r->hdr_shm);
}

void mr_run(struct rig *r)
{
	work_poll(r->pool, 0);
	node_poll(r->host, 0);
	if (r->lower)
		node_poll(r->lower, 0);
	mm_run(r->mm, now_ns());
}

void mr_until(struct rig *r, bool (*fn)(void *arg), void *arg)
{
	struct timespec ts = { .tv_nsec = 200000 };
	uint64_t end = now_ns() + RIG_WAIT_NS;

	for (;;) {
		mr_run(r);
		if (fn(arg))
			return;
		if (now_ns() >= end)
			fail_msg("nothing came of it in 10 s");
		nanosleep(&ts, NULL);
	}
}

static bool settled(void *arg)
{
	struct rig *r = arg;
	const struct mm_pool *p;

	if (r->mm->nr_jobs || work_pending(r->pool))
		return false;
	list_for_each_entry(p, &r->mm->node[0].pools, node_link)
		if (p->extents_coming || p->extents_putting)
			return false;
	return true;
}

void mr_settle(struct rig *r)
{
	mr_until(r, settled, r);
}

void mr_check(struct rig *r)
{
	struct errmsg e = { "" };

	if (mm_check(r->mm, &e))
		fail_msg("%s", e.text);
}

/* -- clients ----------------------------------------------------------------------- */

struct rig_client *mr_client(struct rig *r, unsigned int i, uint32_t rights)
{
	struct rig_client *c = &r->client[i];
	struct mm_client_opts o = {
		.tenant = "default", .name = "rig", .socket = 0,
		.rights = rights, .mode = KVMM_MODE_ON, .pid = 1000 + i,
		.no = i, .ledger = &c->ledger_shm, .arg = c,
	};
	char name[32];

	if (!c->ledger) {
		assert_int_equal(shm_create(&c->ledger_shm, "rig-ledger",
					    sizeof(struct ledger), 0), 0);
		c->ledger = c->ledger_shm.addr;
	}
	c->rig = r;
	c->space = NULL;
	c->win = NULL;
	c->have_seq = 0;
	c->mag_head = 0;
	c->evicted = c->exited = false;
	c->kicks = c->gone_members = c->new_members = 0;
	atomic_store(&c->ledger->step, 0);
	if (r->keep) {
		snprintf(name, sizeof(name), "ledger.%u", i);
		r->keep->put(r, c->ledger_shm.fd, name);
	}
	assert_int_equal(mm_client_create(r->mm, &o, &c->mc), 0);
	return c;
}

static void on_exit_done(void *arg)
{
	struct rig_client *c = arg;

	c->mc = NULL;
	c->win = NULL;
	c->exited = true;
}

/* Answers that it will not read any more: their references go. */
void mr_forget(struct rig_client *c)
{
	struct rig *r = c->rig;
	unsigned int i, k;

	for (i = 0; i < r->nr_done; i++) {
		struct rig_done *d = r->done[i];

		if (!d->win || d->win->client != c->mc)
			continue;
		for (k = 0; k < d->n; k++)
			if (d->res[k].frame)
				mm_handover_put(d->win, d->res[k].frame);
		d->win = NULL;
	}
}

void mr_exit(struct rig_client *c)
{
	mr_forget(c);
	mm_client_disconnect(c->mc);
	mm_client_exit(c->mc, on_exit_done, c);
}

void mr_join(struct rig_client *c, uint8_t token, uint32_t rank,
	      uint32_t world, uint32_t flags)
{
	uint8_t t[16] = { token };
	struct errmsg e;

	if (mm_client_join(c->mc, t, rank, world, flags, &e))
		fail_msg("join: %s", e.text);
}

size_t mr_desc(uint8_t *buf, const char *name, const struct rig_group *g,
		unsigned int n)
{
	struct kvmm_seg seg[KVMM_MAX_CLASSES];
	struct kvmm_class cls[KVMM_MAX_CLASSES];
	struct kvmm_group group[KVMM_MAX_GROUPS];
	char names[KVMM_MAX_CLASSES][16];
	struct kvmm_desc d = {
		.size = sizeof(d), .model = name, .world = 1,
		.nclasses = n, .ngroups = n, .classes = cls, .groups = group,
	};
	struct errmsg e;
	unsigned int i;
	int len;

	for (i = 0; i < n; i++) {
		snprintf(names[i], sizeof(names[i]), "c%u", i);
		seg[i] = (struct kvmm_seg){
			.bytes = g[i].page_bytes, .align = 1,
			.what = KVMM_SEG_KV, .shard = KVMM_MIRROR,
		};
		cls[i] = (struct kvmm_class){
			.name = names[i], .page_bytes = g[i].page_bytes,
			.nsegs = 1, .segs = &seg[i],
		};
		group[i] = (struct kvmm_group){
			.class_ix = i, .rule = g[i].rule, .block_tokens = 16,
			.window_pages = g[i].rule == KVMM_WINDOW ? 4 : 0,
		};
	}
	len = desc_encode(&d, buf, &e);
	if (len < 0)
		fail_msg("descriptor: %s", e.text);
	return len;
}

void mr_attach(struct rig_client *c, const char *name, uint32_t page_bytes)
{
	struct rig_group g = { KVMM_FULL, page_bytes };
	uint8_t buf[DESC_MAX_BYTES];
	size_t len = mr_desc(buf, name, &g, 1);
	struct errmsg e;

	if (mm_attach(c->mc, buf, len, 0, &c->space, &e))
		fail_msg("attach: %s", e.text);
}

void mr_win(struct rig_client *c, unsigned int cls)
{
	struct errmsg e;

	if (mm_win_open(c->mc, c->space, cls, 0, 0, &c->win, &e))
		fail_msg("window: %s", e.text);
	c->have_seq = 0;
	c->mag_head = 0;
	mr_settle(c->rig);
	mr_sync(c);
}

void mr_sync(struct rig_client *c)
{
	struct mm_extent_change ch[7];
	unsigned int n, i, skip = 0;
	uint64_t seq;

	do {
		n = mm_win_sync(c->win, c->have_seq, skip, ch, 7, &seq);
		for (i = 0; i < n; i++) {
			if (ch[i].up)
				bitmap_shared_set(c->win->bitmap, ch[i].no);
			else
				bitmap_shared_clear(c->win->bitmap, ch[i].no);
		}
		skip += n;
	} while (n == 7);
	c->have_seq = seq;
	/* as the next call of the client would say */
	mm_win_sync(c->win, c->have_seq, 0, ch, 7, &seq);
}

uint32_t mr_pop(struct rig_client *c, uint32_t *frames, uint32_t max)
{
	struct mm_win *w = c->win;
	uint32_t tail = atomic_load(&w->wl->mag_tail), n = 0;

	while (n < max && c->mag_head != tail)
		frames[n++] = atomic_load(&w->mag[c->mag_head++ &
						  (w->mag_entries - 1)]);
	atomic_store(&w->wl->mag_head, c->mag_head);
	return n;
}

struct alloc_wait {
	struct rig_client *c;
	uint32_t	*frames;
	uint32_t	got, n;
};

static bool alloc_got(void *arg)
{
	struct alloc_wait *a = arg;

	a->got += mr_pop(a->c, a->frames + a->got, a->n - a->got);
	if (a->got == a->n)
		return true;
	mr_sync(a->c);
	mm_refill(a->c->win, a->n - a->got);
	return false;
}

void mr_alloc(struct rig_client *c, uint32_t *frames, uint32_t n)
{
	struct alloc_wait a = { .c = c, .frames = frames, .n = n };

	mr_until(c->rig, alloc_got, &a);
}

void mr_pin(struct rig_client *c, uint32_t frame, int by)
{
	atomic_fetch_add(&c->win->pins[frame], by);
}

void mr_step(struct rig_client *c, uint64_t step)
{
	atomic_store(&c->ledger->step, step);
	mm_step_done(c->mc);
}

/* -- publishing --------------------------------------------------------------------- */

void mr_key(uint8_t key[32], uint32_t chain, uint32_t i)
{
	memset(key, 0, 32);
	memcpy(key, &chain, 4);
	memcpy(key + 4, &i, 4);
	key[31] = 1;
}

struct ring_pub mr_pub(uint32_t chain, uint32_t i, uint32_t frame)
{
	struct ring_pub p = { .frame = frame, .pos = i * 16 };

	mr_key(p.key, chain, i);
	if (i)
		mr_key(p.parent, chain, i - 1);
	return p;
}

struct page *mr_page(struct rig_client *c, uint32_t chain, uint32_t i)
{
	uint64_t key[4];

	mr_key((uint8_t *)key, chain, i);
	return page_find(c->space, 0, key);
}

const struct rig_done *mr_answer(struct rig *r, uint64_t tag)
{
	unsigned int i;

	for (i = 0; i < r->nr_done; i++)
		if (r->done[i]->tag == tag)
			return r->done[i];
	return NULL;
}

const struct rig_done *mr_publish(struct rig_client *c,
				   const struct ring_pub *pub, uint32_t n,
				   uint64_t tag)
{
	struct ring_sqe sqe = { .op = RING_PUBLISH, .n = n, .tag = tag };

	mm_publish(c->win, &sqe, pub);
	return mr_answer(c->rig, tag);
}

struct answer_wait {
	struct rig	*r;
	uint64_t	tag;
};

static bool answered(void *arg)
{
	struct answer_wait *a = arg;

	return mr_answer(a->r, a->tag);
}

const struct rig_done *mr_wait(struct rig *r, uint64_t tag)
{
	struct answer_wait a = { r, tag };

	mr_until(r, answered, &a);
	return mr_answer(r, tag);
}

void mr_take(struct rig *r, uint64_t tag)
{
	unsigned int i, k;

	for (i = 0; i < r->nr_done && r->done[i]->tag != tag; i++)
		;
	assert_true(i < r->nr_done);
	for (k = 0; k < r->done[i]->n; k++)
		if (r->done[i]->res[k].frame)
			mm_handover_put(r->done[i]->win,
					r->done[i]->res[k].frame);
	free(r->done[i]);
	r->done[i] = r->done[--r->nr_done];
}

void mr_put(struct rig_client *c, uint32_t chain, uint32_t from, uint32_t to)
{
	uint64_t tag = UINT64_C(0xf00d) << 32;
	const struct rig_done *d;
	uint32_t i;

	for (i = from; i < to; i++) {
		struct ring_pub p;
		uint32_t f;

		mr_alloc(c, &f, 1);
		p = mr_pub(chain, i, f);
		d = mr_publish(c, &p, 1, tag);
		assert_non_null(d);
		assert_int_equal(d->res[0].result, 0);
		assert_int_equal(d->res[0].frame, f);
		mr_take(c->rig, tag);
	}
}
