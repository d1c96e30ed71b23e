/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory manager as a whole: beginning, running, end.
 *
 * Nothing here waits but the end, which waits for I/O and workers that use
 * memory, and for the nodes to take their extents back; what is still in use
 * when its time is over is left alone and said so.
 */
#include <stdlib.h>
#include <sys/random.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/tier.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define EXTENT_MIN_BYTES (UINT64_C(32) << 20)
#define EXTENT_MAX_BYTES (UINT64_C(1) << 30)
#define ESTIMATE_NS	(20 * NSEC_PER_MSEC)	/* how stale a match may see it */
#define PUMP_NS		NSEC_PER_MSEC

/* -- beginning ---------------------------------------------------------------- */

static int node_init(struct mm *mm, unsigned int ix, struct errmsg *e)
{
	const struct mm_node_opts *o = &mm->o.node[ix];
	struct mm_node *nd = &mm->node[ix];

	if (!o->node)
		return errmsg_set(e, -EINVAL, "node %u: there is none", ix);
	if (o->below != KVMM_NODE_NONE &&
	    (o->below >= mm->nr_nodes || o->below == ix))
		return errmsg_set(e, -EINVAL, "node %u: below is %u", ix,
				  o->below);
	nd->mm = mm;
	nd->node = o->node;
	nd->ix = ix;
	nd->kind = o->kind;
	nd->below = o->below;
	nd->mem = o->node->kind == NODE_MEM;
	nd->gang = o->gang;
	nd->scrub_bytes_s = o->scrub_bytes_s;
	if (nd->gang && (!nd->mem || nd->gang < 2 || nd->gang > KVMM_MAX_GANG))
		return errmsg_set(e, -EINVAL,
			"node %u: gang %u; nodes of memory may be gangs of 2 to %u",
			ix, nd->gang, KVMM_MAX_GANG);
	nd->size_max = max(o->size_max, o->node->capacity);
	nd->extent_bytes = o->extent_bytes ? o->extent_bytes :
		clamp(o->node->capacity / 1024, EXTENT_MIN_BYTES,
		      EXTENT_MAX_BYTES);
	list_init(&nd->pools);
	return 0;
}

/* A page's way down must end, and pages are written to block nodes only. */
static int nodes_check(const struct mm *mm, struct errmsg *e)
{
	unsigned int ix, at, hops;

	for (ix = 0; ix < mm->nr_nodes; ix++) {
		at = mm->node[ix].below;
		if (at != KVMM_NODE_NONE && mm->node[ix].mem &&
		    mm->node[at].mem)
			return errmsg_set(e, -EINVAL,
				"node %s: below must be a block node, %s is memory",
				mm->node[ix].node->name,
				mm->node[at].node->name);
		at = ix;
		for (hops = 0; at != KVMM_NODE_NONE; hops++) {
			if (hops > mm->nr_nodes)
				return errmsg_set(e, -EINVAL,
					"node %u: its way down is a circle",
					ix);
			at = mm->node[at].below;
		}
	}
	return 0;
}

static unsigned int breaks_wanted(void)
{
	unsigned int mask = 0;
#ifdef KVMM_TEST_BUILD
	static const char *const name[] = {
		"barrier", "generation", "closure", "fence", "ledger", "crc",
	};
	const char *s = getenv("KVMM_BREAK");
	unsigned int i;

	for (i = 0; s && i < ARRAY_SIZE(name); i++) {
		const char *at = strstr(s, name[i]);
		size_t len = strlen(name[i]);

		if (at && (at == s || at[-1] == ',') &&
		    (!at[len] || at[len] == ','))
			mask |= 1u << i;
	}
#endif
	return mask;
}

static void estimates_publish(struct mm *mm);

int mm_create(const struct mm_opts *o, struct mm **ret, struct errmsg *e)
{
	struct mm *mm;
	unsigned int i;
	int err;

	if (!o->hdr || !o->policy || !o->ops || !o->nr_nodes ||
	    o->nr_nodes > KVMM_MAX_NODES)
		return errmsg_set(e, -EINVAL,
			"no header, policy, answers or nodes");
	mm = calloc(1, sizeof(*mm));
	if (!mm)
		return errmsg_set(e, -ENOMEM, "out of memory");
	mm->o = *o;
	mm->hdr = o->hdr;
	mm->ops = o->ops;
	mm->nr_nodes = o->nr_nodes;
	mm->breaks = breaks_wanted();
	mm->now_ns = now_ns();
	list_init(&mm->spaces);
	list_init(&mm->engines);
	list_init(&mm->closed);
	list_init(&mm->pub_ready);
	list_init(&mm->pub_loading);
	for (i = 0; i < o->nr_nodes; i++) {
		err = node_init(mm, i, e);
		if (err)
			goto out_free;
	}
	err = nodes_check(mm, e);
	if (err)
		goto out_free;
	page_layout(mm);
	if (getrandom(mm->seed, sizeof(mm->seed), 0) != sizeof(mm->seed)) {
		err = errmsg_set(e, -EIO, "no random numbers");
		goto out_free;
	}
	if (o->keep) {
		mm->keep = calloc(1, sizeof(*mm->keep));
		if (!mm->keep) {
			err = errmsg_set(e, -ENOMEM, "out of memory");
			goto out_free;
		}
		mm->keep->ops = o->keep;
		mm->keep->shm = (struct shm)SHM_INIT;
		keep_stores_init(mm->keep);
	}
	err = persist_init(mm);
	if (err) {
		errmsg_set(e, err, "out of memory");
		goto out_free;
	}
	tier_init(mm);
	estimates_publish(mm);
	*ret = mm;
	return 0;

out_free:
	persist_fini(mm);
	free(mm->keep);
	free(mm);
	return err;
}

/* -- running ---------------------------------------------------------------------- */

static uint32_t hdr_state(const struct node *n)
{
	switch (n->state) {
	case NODE_ONLINE:
		return 0;
	case NODE_DEGRADED:
		return 1;
	case NODE_FAILED:
		return 2;
	default:
		return 3;
	}
}

/*
 * What a match weighs loading against recomputing with: a straight line through
 * the node's own estimates for a small and a large page, and beside it what is
 * queued, which is there whatever the page's size.
 */
static void estimate_publish(struct mm *mm, unsigned int ix)
{
	const struct node *n = mm->node[ix].node;
	struct kvmm_hdr_node *h = &mm->hdr->node[ix];
	uint32_t small, large, base, per_kib = 0, queue = 0;

	/* relaxed: numbers to go by, nothing hangs on their order */
	atomic_store_explicit(&h->state, hdr_state(n), memory_order_relaxed);
	if (mm->node[ix].mem)
		return;
	small = node_estimate_us(n, NODE_READ, 4096);
	large = node_estimate_us(n, NODE_READ, 1u << 20);
	base = n->stats.dir[NODE_READ].lat_ns / 1000;
	if (small == UINT32_MAX || large == UINT32_MAX) {
		base = UINT32_MAX;
	} else {
		if (large > small)
			per_kib = (large - small) * UINT64_C(1000) / 1020;
		base = base ? min(base, small) : small;
		queue = small - base;
	}
	atomic_store_explicit(&h->load_base_us, base, memory_order_relaxed);
	atomic_store_explicit(&h->load_ns_per_kib, per_kib,
			      memory_order_relaxed);
	atomic_store_explicit(&h->queue_us, queue, memory_order_relaxed);
}

static void estimates_publish(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		estimate_publish(mm, i);
}

uint64_t mm_run(struct mm *mm, uint64_t now_ns)
{
	uint64_t due;

	mm->now_ns = now_ns;
	due = engines_run(mm, now_ns);
	due = min(due, publish_run(mm, now_ns));
	due = min(due, fetch_run(mm, now_ns));
	due = min(due, reclaim_run(mm, now_ns));
	due = min(due, scrub_run(mm, now_ns));
	due = min(due, windows_run(mm, now_ns));
	due = min(due, pools_run(mm, now_ns));
	due = min(due, spaces_run(mm, now_ns));
	due = min(due, adopt_run(mm, now_ns));
	if (now_ns >= mm->next_estimate_ns) {
		estimates_publish(mm);
		mm->next_estimate_ns = now_ns + ESTIMATE_NS;
	}
	return due;
}

/* -- the end ------------------------------------------------------------------------ */

static void pump(struct mm *mm)
{
	unsigned int i;

	if (mm->o.pool)
		work_poll(mm->o.pool, 0);
	for (i = 0; i < mm->nr_nodes; i++)
		node_poll(mm->node[i].node, 0);
}

static bool pump_until(struct mm *mm, uint64_t deadline_ns,
		       bool (*done)(struct mm *mm))
{
	struct timespec ts = ns_to_timespec(PUMP_NS);

	for (;;) {
		pump(mm);
		mm->now_ns = now_ns();
		if (done(mm))
			return true;
		if (mm->now_ns >= deadline_ns)
			return false;
		nanosleep(&ts, NULL);
	}
}

static bool io_over(struct mm *mm)
{
	return tier_stop(mm) && !mm->nr_jobs;
}

static void clients_leave(struct mm *mm)
{
	struct mm_engine *e;
	struct mm_client *c;

	list_for_each_entry(e, &mm->engines, link)
		list_for_each_entry(c, &e->members, engine_link)
			mm_client_disconnect(c);
}

/* Frames and slots go with their nodes' memory; only what is counted matters. */
static void space_drop_pages(struct mm_space *sp)
{
	uint64_t i;

	for (i = 0; i < sp->hash_size; i++) {
		struct page *pg;

		for (pg = sp->hash[i].first; pg; pg = pg->hnext) {
			unsigned int n;

			/* nobody reads the index any more */
			pg->flags |= PAGE_BAD;
			for (n = 0; n < sp->mm->nr_nodes; n++)
				copy_set_state(pg, &sp->mm->node[n],
					       COPY_NONE);
		}
	}
	memset(sp->hash, 0, sp->hash_size * sizeof(*sp->hash));
	sp->nr_pages = 0;
}

static bool pools_gone(struct mm *mm)
{
	bool gone = true;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_pool *p;

		list_for_each_entry(p, &mm->node[i].pools, node_link)
			gone &= pool_abandon(p);
	}
	return gone;
}

int mm_drain(struct mm *mm, uint64_t deadline_ns)
{
	mm->stopping = true;
	aheads_end(mm);
	return pump_until(mm, deadline_ns, io_over) ? 0 : -ETIMEDOUT;
}

int mm_destroy(struct mm *mm, uint64_t deadline_ns)
{
	struct mm_space *sp;

	if (!mm)
		return 0;
	mm->stopping = true;
	aheads_end(mm);
	clients_leave(mm);
	if (!pump_until(mm, deadline_ns, io_over))
		return -ETIMEDOUT;
	engines_fini(mm);
	persist_fini(mm);	/* it is to find what is dropped here again */
	list_for_each_entry(sp, &mm->spaces, link)
		if (sp->hash_size)
			space_drop_pages(sp);
	if (!pump_until(mm, deadline_ns, pools_gone))
		return -EBUSY;
	while ((sp = list_first(&mm->spaces, struct mm_space, link)))
		space_free(sp);
	ghost_forget(mm);
	adopt_fini(mm);
	keep_end(mm);
	tier_fini(mm);
	slabs_fini(&mm->pages);
	slabs_fini(&mm->copies);
	free(mm);
	return 0;
}
