/* SPDX-License-Identifier: Apache-2.0 */
/* A store with very many pages; see many.h. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/mm/persist_format.h"
#include "ipc/base/bits.h"
#include "ipc/base/err.h"
#include "ipc/base/rand.h"
#include "ipc/desc.h"
#include "tests/bench/many.h"

#define TENANT		"default"
#define NR_CHAINS	(MANY_PAGES / MANY_CHAIN)
#define AT_A_TIME	8u		/* chains that are written side by side */
#define RECORDS		(MANY_PAGES + MANY_PAGES / 16)
#define WAIT_NS		(120 * NSEC_PER_SEC)
#define COLLECT_PART	1024u

/**
 * struct many - while it is made
 * @id:		of each chain: what its keys are made from; 0: there is none now
 * @slot:	of each page, by chain
 */
struct many {
	struct bench	*b;
	struct work_pool *pool;
	struct node	*n;
	struct node_owner owner;
	uint32_t	label;
	uint64_t	last_id;
	uint64_t	id[NR_CHAINS];
	struct node_slot slot[NR_CHAINS][MANY_CHAIN];
};

void many_opts(struct nvme_opts *o, const char *path)
{
	*o = (struct nvme_opts){
		.name		= "nvme0",
		.path		= path,
		.id		= 1,
		.bytes		= MANY_BYTES,
		.records	= RECORDS,
		.sparse		= true,
		.engine		= NVME_ENGINE_URING,
		.io_timeout_ns	= WAIT_NS,
		.queue_timeout_ns = WAIT_NS,
	};
}

/* ---- the owner ------------------------------------------------------------------ */

static void page_key(uint64_t chain, uint32_t i, uint8_t key[32])
{
	uint64_t s = chain * MANY_CHAIN + i;
	uint64_t w[4];
	unsigned int k;

	for (k = 0; k < ARRAY_SIZE(w); k++)
		w[k] = splitmix64(&s);
	memcpy(key, w, sizeof(w));
}

static void record_fill(const struct many *m, uint32_t c, uint32_t i,
			struct node_record *rec)
{
	struct page_meta pm = {
		.label		= m->label,
		.raw_len	= MANY_PAGE_BYTES,
		.pos		= i * 16,
		.cost_us	= 100,
		.flags		= META_BOUND | (i ? 0 : META_ROOT),
		.format		= FORMAT_RAW,
	};

	page_key(m->id[c], i, pm.key);
	if (i)
		page_key(m->id[c], i - 1, pm.parent);
	rec->slot = m->slot[c][i];
	rec->len = MANY_PAGE_BYTES;
	rec->crc = (uint32_t)rec->slot.seq;
	memcpy(rec->meta, &pm, sizeof(pm));
}

/* Chains that are whole; what is being written is in the journal. */
static bool collect(struct node *n, uint64_t *cursor, void *arg)
{
	const struct many *m = arg;
	uint64_t end = min(*cursor + COLLECT_PART, (uint64_t)MANY_PAGES);

	for (; *cursor < end; ++*cursor) {
		uint32_t c = (uint32_t)(*cursor / MANY_CHAIN);
		struct node_record rec;

		/* the node knows which of them have a record */
		if (!m->id[c])
			continue;
		record_fill(m, c, *cursor % MANY_CHAIN, &rec);
		node_record_again(n, &rec);
	}
	return *cursor == MANY_PAGES;
}

/* ---- making --------------------------------------------------------------------- */

static void turn(struct many *m)
{
	struct pollfd p[2] = {
		{ .fd = node_fd(m->n), .events = POLLIN },
		{ .fd = work_fd(m->pool), .events = POLLIN },
	};

	work_poll(m->pool, 0);
	node_poll(m->n, 0);
	if (!work_sleep(m->pool, true))
		poll(p, 2, min(deadline_left_ms(node_next_deadline(m->n)),
			       100));
	work_sleep(m->pool, false);
}

static void page_add(struct many *m, uint32_t c, uint32_t i)
{
	uint64_t deadline = deadline_in(WAIT_NS);
	struct node_record rec;
	int err;

	while ((err = node_slot_alloc(m->n, MANY_PAGE_BYTES,
				      &m->slot[c][i])) == -EAGAIN) {
		if (deadline_past(deadline))
			break;
		turn(m);
	}
	if (err)
		bench_die(m->b, "a slot", err);
	record_fill(m, c, i, &rec);
	node_record_add(m->n, &rec);
}

/* New chains at @c, side by side. */
static void chains_write(struct many *m, const uint32_t c[AT_A_TIME])
{
	uint32_t i, k;

	for (k = 0; k < AT_A_TIME; k++) {
		/* what it had is not there any more */
		memset(m->slot[c[k]], 0, sizeof(m->slot[c[k]]));
		m->id[c[k]] = ++m->last_id;
	}
	for (i = 0; i < MANY_CHAIN; i++)
		for (k = 0; k < AT_A_TIME; k++)
			page_add(m, c[k], i);
	turn(m);
}

static void chain_free(struct many *m, uint32_t c)
{
	uint32_t i = MANY_CHAIN;

	m->id[c] = 0;
	while (i-- > 0)
		if (node_slot_free(m->n, &m->slot[c][i]))
			bench_die(m->b, "a slot that is free already", -EINVAL);
}

static void chains_make(struct many *m)
{
	uint64_t rand = 1;
	uint32_t c[AT_A_TIME], i, k;

	for (i = 0; i < NR_CHAINS; i += AT_A_TIME) {
		for (k = 0; k < AT_A_TIME; k++)
			c[k] = i + k;
		chains_write(m, c);
	}
	for (i = 0; i < NR_CHAINS / 4; i += AT_A_TIME) {
		/* one of each eighth: they are different */
		for (k = 0; k < AT_A_TIME; k++) {
			c[k] = k * (NR_CHAINS / AT_A_TIME) +
			       (uint32_t)(bench_rand(&rand) %
					  (NR_CHAINS / AT_A_TIME));
			chain_free(m, c[k]);
		}
		chains_write(m, c);
	}
}

static void label_put(struct many *m)
{
	struct kvmm_seg seg = {
		.bytes = MANY_PAGE_BYTES, .align = 64, .what = KVMM_SEG_KV,
		.shard = KVMM_MIRROR,
	};
	struct kvmm_class cls = {
		.name = "kv", .page_bytes = MANY_PAGE_BYTES, .nsegs = 1,
		.segs = &seg,
	};
	struct kvmm_group group = { .rule = KVMM_FULL, .block_tokens = 16 };
	struct kvmm_desc d = {
		.size = sizeof(d), .model = "bench", .world = 1,
		.nclasses = 1, .ngroups = 1, .classes = &cls,
		.groups = &group,
	};
	struct space_label l = {
		.magic = LABEL_MAGIC, .version = LABEL_VERSION,
		.tenant_len = (uint16_t)strlen(TENANT),
	};
	static uint8_t buf[sizeof(l) + sizeof(TENANT) + DESC_MAX_BYTES];
	struct errmsg e;
	size_t at = sizeof(l) + l.tenant_len;
	int len = desc_encode(&d, buf + at, &e), err;

	if (len < 0)
		bench_die(m->b, e.text, len);
	l.desc_len = (uint32_t)len;
	memcpy(buf, &l, sizeof(l));
	memcpy(buf + sizeof(l), TENANT, l.tenant_len);
	err = node_label_put(m->n, buf, at + (size_t)len, &m->label);
	if (err)
		bench_die(m->b, "a label", err);
}

static void flushed(int err, void *arg)
{
	*(int *)arg = err;
}

/* Everything is on the medium, and no checkpoint under way is cut off. */
static void end(struct many *m)
{
	uint64_t deadline = deadline_in(WAIT_NS);
	int told = 1, err = node_record_flush(m->n, flushed, &told);

	while (!err && told == 1 && !deadline_past(deadline))
		turn(m);
	if (err || told)
		bench_die(m->b, "the journal", err ? err : -EIO);
	err = node_destroy(m->n, deadline);
	if (!err)
		err = work_destroy(m->pool, deadline);
	if (err)
		bench_die(m->b, "the end of the store", err);
}

void many_make(struct bench *b, const char *path)
{
	uint64_t deadline = deadline_in(WAIT_NS);
	struct many *m = calloc(1, sizeof(*m));
	struct nvme_opts o;
	int err;

	if (!m)
		bench_die(b, "memory", -ENOMEM);
	m->b = b;
	m->owner = (struct node_owner){ .collect = collect, .arg = m };
	many_opts(&o, path);
	err = work_create("bench", 1, &m->pool);
	if (!err)
		err = nvme_create(&o, m->pool, &m->n);
	if (err)
		bench_die(b, "a store", err);
	node_set_owner(m->n, &m->owner);
	while (m->n->state == NODE_STARTING && !deadline_past(deadline))
		turn(m);
	if (m->n->state != NODE_ONLINE) {
		bench_say("%s", m->n->why);
		bench_die(b, "a store", -EIO);
	}
	label_put(m);
	chains_make(m);
	bench_say("  store of %u pages: %llu checkpoints, %.1f MB of journal in use",
		  MANY_PAGES, (unsigned long long)m->n->stats.ckpts,
		  (double)m->n->stats.journal_used * 1e-6);
	end(m);
	free(m);
}
