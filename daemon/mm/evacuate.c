/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Emptying an extent, so that its memory can go to another class or back to the
 * host.
 *
 * The extent touched longest ago goes, of those that hold nothing that cannot
 * be taken: no OPEN or pinned frame, no load on its way, and no I/O; where each
 * has some, I/O may be. It is closed (nothing
 * new comes in), and its pages leave: clean ones at once, whatever hangs on
 * them here, since the copy below keeps their children's parent alive; dirty
 * ones after they were written; those that nobody takes when they have no child.
 * What got pinned meanwhile is waited for, within shrink_ack; then the extent is
 * opened again and nothing is lost but the pages that have gone. What kept it may
 * do so for long, as a page does whose children lie elsewhere and are pinned: so
 * the next ones to be tried are others, where there are others.
 *
 * Where an extent is not wanted by another class but by the host, the same is done
 * for as long as it lacks memory: mm_host_short().
 *
 * Ages are sampled: an extent is as young as the youngest of a few of its pages.
 */
#include <stdlib.h>

#include "daemon/mm/tier.h"

#define SAMPLES		16u
#define TRIES		4u	/* extents looked at frame by frame */
#define RETRY_NS	NSEC_PER_MSEC
#define LOOK_NS		(20 * NSEC_PER_MSEC)
#define STAYS_NS	(10 * NSEC_PER_SEC)

/**
 * struct evac - an extent being emptied
 * @at:		frame to go on with, within the extent
 * @moved:	something happened since it was last at 0
 * @give_up_ns:	then it is opened again
 */
struct evac {
	struct mm_pool	*pool;
	uint32_t	no;
	uint32_t	at;
	bool		moved;
	uint64_t	give_up_ns;
};

/* Which extents will do, from the best to what is left. */
#define PATIENT		1u	/* those that are busy with I/O, too */
#define AGAIN		2u	/* those that could not be emptied, too */
#define ALL		3u

/*
 * When was it used? UINT64_MAX: it holds what cannot be taken. With PATIENT what
 * is busy with I/O can: it is over in a moment, where a node is full of dirty
 * pages there is some in every extent, and then a space that comes new would find
 * no room.
 */
static uint64_t frame_age(const struct mm_pool *p, uint32_t f,
			  unsigned int how)
{
	switch (frame_word_state(frame_word_of(p, f))) {
	case FRAME_FREE:
		return 0;
	case FRAME_READY:
		if (how & PATIENT ? frame_pins(p, f) != 0 : frame_busy(p, f))
			return UINT64_MAX;
		return page_copy(p->meta[f].page, p->nd)->pol.touched_ns;
	default:
		return UINT64_MAX;
	}
}

static uint64_t extent_age(const struct mm_pool *p, uint32_t no, uint32_t step,
			   unsigned int how)
{
	uint64_t youngest = 0;
	uint32_t i;

	for (i = 0; i < p->per_extent; i += step) {
		uint64_t ns = frame_age(p, no * p->per_extent + i, how);

		youngest = max(youngest, ns);
		if (ns == UINT64_MAX)
			break;
	}
	return youngest;
}

/* The oldest extent with an age above @than (a try that failed); 0: none. */
static uint32_t extent_oldest(const struct mm_pool *p, uint64_t *than,
			      unsigned int how)
{
	uint32_t step = max(p->per_extent / SAMPLES, 1u);
	uint64_t best_ns = UINT64_MAX, now = p->nd->mm->now_ns;
	uint32_t best = 0, no;

	for (no = 1; no <= p->max_extents; no++) {
		uint64_t ns;

		if (!p->extent[no].ext || p->extent[no].going)
			continue;
		if (!(how & AGAIN) && now < p->extent[no].stays_ns)
			continue;
		ns = extent_age(p, no, step, how);
		if (ns < *than || ns >= best_ns)
			continue;
		best = no;
		best_ns = ns;
	}
	*than = best_ns + 1;
	return best;
}

/* The extent to empty; 0: none can be. */
static uint32_t extent_to_empty(const struct mm_pool *p, unsigned int how)
{
	uint64_t than = 0;
	unsigned int i;
	uint32_t no;

	for (i = 0; i < TRIES; i++) {
		no = extent_oldest(p, &than, how);
		if (!no || extent_age(p, no, 1, how) != UINT64_MAX)
			return no;
	}
	return 0;
}

int pool_evacuate(struct mm_pool *p)
{
	struct mm *mm = p->nd->mm;
	struct evac *ev;
	uint32_t no = 0;
	unsigned int how;

	if (p->nd->evac || mm->now_ns < p->look_ns)
		return -EBUSY;
	if (p->nr_extents == p->extents_going)
		return -ENOENT;
	for (how = 0; !no && how <= ALL; how++)
		no = extent_to_empty(p, how);
	if (!no) {
		/* all of them were looked at, and those who wait ask on and on */
		p->look_ns = mm->now_ns + LOOK_NS;
		return -EBUSY;
	}
	ev = calloc(1, sizeof(*ev));
	if (!ev)
		return -ENOMEM;
	ev->pool = p;
	ev->no = no;
	ev->give_up_ns = mm->now_ns + mm->o.shrink_ack_ns;
	p->nd->evac = ev;
	extent_close(p, no);
	mm->next_reclaim_ns = 0;
	return 0;
}

static void evac_end(struct mm_node *nd)
{
	free(nd->evac);
	nd->evac = NULL;
}

void evacuate_forget(struct mm_pool *p)
{
	if (p->nd->evac && p->nd->evac->pool == p)
		evac_end(p->nd);
}

/* Take one frame's page away, or begin to. True: something happened. */
static bool evac_frame(struct mm_pool *p, uint32_t f)
{
	struct mm_node *nd = p->nd, *lo = node_lower(nd);
	struct page *pg = p->meta[f].page;
	int n;

	if (frame_word_state(frame_word_of(p, f)) != FRAME_READY ||
	    frame_busy(p, f))
		return false;
	if (pg->flags & PAGE_BAD)
		return copy_evict(pg, nd);
	if (page_has_below(pg, nd))
		return copy_drop_clean(pg, nd);
	if (lo && node_takes(lo) &&
	    !(page_copy(pg, nd)->flags & COPY_WFAIL)) {
		if (pool_pauses(p, lo))
			return false;
		n = page_writeback(pg, nd, NODE_PRIO_WRITEBACK);
		if (n > 0)
			return true;
		if (n == -EBUSY || n == -EALREADY || n == -ENOMEM)
			return false;	/* until what is under way is over */
	}
	if (copy_drop_last(pg, nd))
		return true;
	return tree_reclaim(pg, nd, TIER_BATCH);
}

/* Returns when to come again; UINT64_MAX: it is over. */
static uint64_t evac_slice(struct mm_node *nd, uint64_t now)
{
	struct evac *ev = nd->evac;
	struct mm_pool *p = ev->pool;
	unsigned int i;

	for (i = 0; i < TIER_BATCH && p->extent[ev->no].nr_used; i++) {
		if (ev->at == p->per_extent) {
			bool moved = ev->moved;

			ev->at = 0;
			ev->moved = false;
			return moved ? now : now + RETRY_NS;
		}
		ev->moved |= evac_frame(p, ev->no * p->per_extent + ev->at++);
	}
	return now;
}

static void extent_stays(struct mm_pool *p, uint32_t no, uint64_t now)
{
	p->stays_ns = now + STAYS_NS;
	p->extent[no].stays_ns = p->stays_ns;
}

/* -- for the host ------------------------------------------------------------- */

/* The pool used longest ago that was used after @than; NULL: there is none. */
static struct mm_pool *pool_oldest(struct mm_node *nd, uint64_t than)
{
	struct mm_pool *p, *best = NULL;

	list_for_each_entry(p, &nd->pools, node_link) {
		uint32_t keep = p->space->nr_clients ? 1 : 0;

		if (p->ending || p->used_ns < than ||
		    p->nr_extents - p->extents_going <= keep)
			continue;
		if (!best || p->used_ns < best->used_ns)
			best = p;
	}
	return best;
}

/* Returns when to look again; UINT64_MAX: an extent is being emptied. */
static uint64_t node_give_back(struct mm_node *nd, uint64_t now)
{
	uint64_t than = 0;
	struct mm_pool *p;

	while (!nd->evac && (p = pool_oldest(nd, than))) {
		than = p->used_ns + 1;
		pool_evacuate(p);
	}
	return nd->evac ? UINT64_MAX : now + LOOK_NS;
}

void mm_host_short(struct mm *mm, uint64_t bytes)
{
	mm->host_lacks = bytes;
	mm->host_short = bytes;
	if (bytes)
		mm->next_reclaim_ns = 0;
}

uint64_t evacuate_run(struct mm *mm, uint64_t now)
{
	uint64_t next = UINT64_MAX, at;
	unsigned int i;

	for (i = 0; mm->host_short && i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i];

		if (!nd->mem || nd->kind != KVMM_NODE_HOST)
			continue;
		at = node_give_back(nd, now);
		next = min(next, at);
	}

	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i];
		struct evac *ev = nd->evac;

		if (!ev)
			continue;
		at = evac_slice(nd, now);
		if (!ev->pool->extent[ev->no].nr_used) {
			extent_down(ev->pool, ev->no);
			evac_end(nd);
			continue;
		}
		if (now >= ev->give_up_ns) {
			extent_stays(ev->pool, ev->no, now);
			extent_reopen(ev->pool, ev->no);
			evac_end(nd);
			continue;
		}
		next = min(next, at);
	}
	return next;
}
