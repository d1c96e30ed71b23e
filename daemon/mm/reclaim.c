/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reclaim: frames and slots for those who need them.
 *
 * A pool's policy offers pages, coldest first; what may leave is decided here.
 * In memory:
 *
 *	pinned, referenced	stays; a pinned one is told to the policy as used
 *	a page is bound to it	stays: leaves leave first
 *	READY below		isolated and dropped, no I/O: clean
 *	being written		stays until that is over; a later pass drops it
 *	else			is written, and stays READY meanwhile: dirty
 *	nobody takes it		dropped for good if none is bound to it
 *
 * Nobody takes it: there is no node below, it is failing, full of what cannot
 * go, or read-only; it does not admit the page, or has no write left for it today
 * (admit.c); the medium refused this very page; or so much is on its way
 * down already that an allocation has waited for it too long (scan_lower()). A
 * cache that is filled faster than it can be written forgets; engines would have
 * to preempt requests for what nobody may ever ask for again.
 *
 * So nothing here waits: a pass takes what is clean, begins writes for what is
 * not, and says what it did. Isolation is the last thing that happens to a page
 * and never spans I/O. On a block node only leaves of its own tree leave.
 *
 * Background: a pool whose free frames fall below low is reclaiming until they
 * reach high, in slices of TIER_BATCH pages or TIER_SLICE_NS from mm_run();
 * without success it waits a millisecond or for the end of a write.
 *
 * Nothing that cannot leave may hide what can. Pinned pages go to the warm end
 * as they are met. Pages with children can stand at the cold end too, when a
 * chain was published and never touched (its parents came first): a pass that
 * took nothing climbs from a leaf below them, and if that does not help either
 * it sends what stood in its way to the warm end.
 */
#include "daemon/mm/tier.h"

#define RECLAIM_SCAN	512u	/* pages a slice looks at; guessed */
#define RETRY_NS	NSEC_PER_MSEC
#define BURY_NS		(10 * NSEC_PER_MSEC)
#define BURY_MAX	16u
#define CLIMBS		4u	/* non-leaves that a pass climbs under */
#define LOOK_AT_CLOCK	16u	/* pages between two looks at the clock */

/**
 * struct scan - one pass over a pool
 * @lo:		the node below that takes pages, NULL when none does
 * @stuck:	met, and cannot go because of their children here
 * @dirty:	met, and have to be written first
 */
struct scan {
	struct reclaim_control *rc;
	struct mm_node	*lo;
	unsigned int	nr_stuck, nr_dirty;
	struct page	*stuck[TIER_BATCH];
	struct page	*dirty[TIER_BATCH];
};

static void policy_touch(struct mm_pool *p, struct page *pg)
{
	pool_policy(p)->touch(p->policy, &page_copy(pg, p->nd)->pol);
}

static bool has_child_here(const struct page *pg, const struct mm_node *nd)
{
	return !(pg->flags & PAGE_BAD) && page_copy(pg, nd)->nr_bound &&
	       !mm_broken(nd->mm, MM_BREAK_CLOSURE);
}

/* -- dropping ---------------------------------------------------------------- */

/* The node below @nd whose copy makes the one on @nd clean; NULL: none. */
static struct mm_node *heir_of(const struct page *pg, const struct mm_node *nd)
{
	struct mm *mm = nd->mm;
	unsigned int i, hops;

	for (i = nd->below, hops = 0; i < mm->nr_nodes && hops < mm->nr_nodes;
	     i = mm->node[i].below, hops++)
		if (copy_good(copy_at(pg, i)))
			return &mm->node[i];
	return NULL;
}

/*
 * The copy that stays inherits its use: it is the page now, and goes to the warm
 * end. Those of pages that live above age meanwhile, so that a node that is
 * short gives them up first: they cost a write, not a page.
 */
static void copy_inherit(struct page *pg, struct mm_node *heir,
			 const struct kvmm_policy_page *pol)
{
	struct copy *c = page_copy(pg, heir);

	c->pol.touched_ns = pol->touched_ns;
	c->pol.expect_ms = pol->expect_ms;
	c->pol.uses = (uint16_t)min(c->pol.uses + (uint32_t)pol->uses,
				    (uint32_t)UINT16_MAX);
	c->pol.flags = pol->flags;
	policy_touch(page_pool(pg, heir), pg);
}

bool copy_drop_clean(struct page *pg, struct mm_node *nd)
{
	struct mm_node *heir = heir_of(pg, nd);
	struct kvmm_policy_page pol = page_copy(pg, nd)->pol;
	bool dropped;

	/* it must not go between this look and the drop */
	page_copy(pg, heir)->refs++;
	dropped = copy_evict(pg, nd);
	if (dropped) {
		nd->c.pgdrop++;
		copy_inherit(pg, heir, &pol);
	}
	copy_unref(pg, heir);
	return dropped;
}

/* On another node of memory, say, beside or above this one. */
static bool lives_elsewhere(const struct page *pg, const struct mm_node *nd)
{
	unsigned int i;

	for (i = 0; i < nd->mm->nr_nodes; i++)
		if (i != nd->ix && copy_good(copy_at(pg, i)))
			return true;
	return false;
}

bool copy_drop_last(struct page *pg, struct mm_node *nd)
{
	bool elsewhere = lives_elsewhere(pg, nd);

	if (!elsewhere && pg->nr_bound &&
	    !mm_broken(nd->mm, MM_BREAK_CLOSURE))
		return false;
	if (!elsewhere && pg->nr_copies > 1)
		return false;	/* one that is going has to be gone first */
	if (!copy_evict(pg, nd))
		return false;
	if (elsewhere)
		nd->c.pgdrop++;
	else
		nd->c.pgdrop_gone++;
	return true;
}

bool slot_evictable(const struct page *pg, const struct mm_node *nd)
{
	const struct copy *c = page_copy(pg, nd);

	if (!copy_good(c) || c->refs || has_child_here(pg, nd))
		return false;
	return pg->nr_copies > 1 || !pg->nr_bound ||
	       mm_broken(nd->mm, MM_BREAK_CLOSURE);
}

/* -- one page ---------------------------------------------------------------- */

static enum kvmm_policy_answer stays(struct scan *s, struct page *pg)
{
	if (s->nr_stuck < TIER_BATCH)
		s->stuck[s->nr_stuck++] = pg;
	return KVMM_POLICY_REFUSED;
}

/* A pin came between the look and the isolation, or has been there. */
static enum kvmm_policy_answer pinned(struct mm_pool *p, struct page *pg)
{
	policy_touch(p, pg);
	return KVMM_POLICY_REFUSED;
}

static enum kvmm_policy_answer consider_dirty(struct scan *s,
					      struct mm_pool *p,
					      struct page *pg)
{
	struct mm_node *lo = node_lower(p->nd);

	if (lo && page_copy(pg, lo)->state == COPY_WRITING) {
		s->rc->writing++;
		return KVMM_POLICY_REFUSED;
	}
	if (!s->lo || (page_copy(pg, p->nd)->flags & COPY_WFAIL) ||
	    !admit_page(pg, p->nd, s->lo))
		return copy_drop_last(pg, p->nd) ? KVMM_POLICY_TAKEN :
						   stays(s, pg);
	if (!s->rc->clean_only && s->nr_dirty < TIER_BATCH)
		s->dirty[s->nr_dirty++] = pg;
	return KVMM_POLICY_REFUSED;
}

static enum kvmm_policy_answer consider_frame(struct scan *s,
					      struct mm_pool *p,
					      struct page *pg)
{
	struct copy *c = page_copy(pg, p->nd);

	if (p->meta[c->frame].refs || c->refs) {
		struct mm_node *lo = node_lower(p->nd);

		s->rc->writing += lo &&
				  page_copy(pg, lo)->state == COPY_WRITING;
		return KVMM_POLICY_REFUSED;
	}
	if (frame_pins(p, c->frame))
		return pinned(p, pg);
	if (has_child_here(pg, p->nd))
		return stays(s, pg);
	if (pg->flags & PAGE_BAD)
		return copy_evict(pg, p->nd) ? KVMM_POLICY_TAKEN :
					       pinned(p, pg);
	if (!page_has_below(pg, p->nd))
		return consider_dirty(s, p, pg);
	return copy_drop_clean(pg, p->nd) ? KVMM_POLICY_TAKEN : pinned(p, pg);
}

static enum kvmm_policy_answer consider_slot(struct scan *s, struct mm_pool *p,
					     struct page *pg)
{
	if (!slot_evictable(pg, p->nd))
		return has_child_here(pg, p->nd) ? stays(s, pg) :
						   KVMM_POLICY_REFUSED;
	if (pg->nr_copies > 1)
		p->nd->c.pgdrop++;
	else
		p->nd->c.pgdrop_gone++;
	copy_release(pg, p->nd);
	return KVMM_POLICY_TAKEN;
}

static enum kvmm_policy_answer consider(struct scan *s, struct mm_pool *p,
					struct page *pg)
{
	enum kvmm_policy_answer a = p->nd->mem ? consider_frame(s, p, pg) :
						 consider_slot(s, p, pg);

	if (a == KVMM_POLICY_TAKEN)
		s->rc->freed++;
	return a;
}

/* -- one pass ---------------------------------------------------------------- */

static enum kvmm_policy_answer scan_offer(struct mm_pool *p, struct page *pg,
					  void *arg)
{
	struct scan *s = arg;

	if (s->rc->scanned++ % LOOK_AT_CLOCK == LOOK_AT_CLOCK - 1 &&
	    s->rc->deadline_ns && deadline_past(s->rc->deadline_ns))
		return KVMM_POLICY_ENOUGH;
	return consider(s, p, pg);
}

/* Down to a leaf that is READY here, then up as far as pages can go. */
static unsigned int climb(struct scan *s, struct mm_pool *p, struct page *pg,
			  unsigned int max)
{
	const struct mm_node *nd = p->nd;
	struct page *child;
	unsigned int n = 0;

	for (;;) {
		struct page *down = NULL;

		list_for_each_entry(child, &pg->children, sibling) {
			if (!page_bound(child) ||
			    page_copy(child, nd)->state != COPY_READY)
				continue;
			down = child;
			break;
		}
		if (!down)
			break;
		pg = down;
	}
	while (pg && n < max && page_copy(pg, nd)->state == COPY_READY) {
		struct page *parent = page_bound(pg) ? pg->parent : NULL;

		if (consider(s, p, pg) != KVMM_POLICY_TAKEN)
			break;
		pg = parent;
		n++;
	}
	return n;
}

/* Begin the writes of what was met; what nobody takes may go after all. */
static unsigned int scan_write(struct scan *s, struct mm_pool *p)
{
	enum node_prio prio = NODE_PRIO_WRITEBACK;
	unsigned int i, begun = 0;

	if (s->lo && pool_pauses(p, s->lo)) {
		/* not in use: they can be written in a moment */
		s->rc->writing += s->nr_dirty;
		return 0;
	}
	for (i = 0; i < s->nr_dirty; i++) {
		int n = page_writeback(s->dirty[i], p->nd, prio);

		if (n > 0)
			begun += n;
		else if (n == -EALREADY)
			s->rc->writing++;
		else if (n == -EBUSY || n == -ENOMEM) {
			s->rc->writing += s->nr_dirty - i;
			break;
		} else if (copy_drop_last(s->dirty[i], p->nd))
			s->rc->freed++;
	}
	s->rc->writing += begun;
	return begun;
}

/* See "Clean ahead" in writeback.c. */
static void boost_adapt(struct mm_pool *p, unsigned int nr_dirty,
			uint32_t freed)
{
	if (nr_dirty)
		p->wb_boost = min(p->wb_boost + nr_dirty, p->nr_pages);
	else if (freed && p->wb_boost)
		p->wb_boost -= p->wb_boost / 8 + 1;
}

/* Free frames, and those that cost no more than asking the node. */
static uint64_t pool_avail(const struct mm_pool *p)
{
	return p->nr_free + pool_room(p) +
	       (uint64_t)p->extents_coming * p->per_extent;
}

/*
 * The node that dirty pages are written to, NULL: they may be forgotten. That is
 * so, too, when somebody has waited for half the time that an allocation may
 * wait and the node below has all it can swallow, or refuses what it is given.
 */
static struct mm_node *scan_lower(struct mm_pool *p)
{
	struct mm_node *lo = node_lower(p->nd);
	const struct mm *mm = p->nd->mm;

	if (!lo || !node_takes(lo))
		return NULL;
	if (p->want &&
	    (pool_full_of_writes(p, lo) || pool_pauses(p, lo)) &&
	    pool_squeezed(p) >= mm->o.direct_reclaim_ns / 2)
		return NULL;
	return lo;
}

void pool_reclaim(struct mm_pool *p, struct reclaim_control *rc)
{
	struct mm_counters *ct = &p->nd->c;
	struct scan s = { .rc = rc };
	uint32_t scanned = rc->scanned, freed = rc->freed;
	unsigned int i;

	if (!p->nr_pages)
		return;
	s.lo = p->nd->mem ? scan_lower(p) : NULL;
	pool_select(p, rc->want, rc->max_scan, scan_offer, &s);
	if (rc->freed == freed && !s.nr_dirty) {
		unsigned int n = min(s.nr_stuck, CLIMBS);

		for (i = 0; i < n && rc->freed == freed && !s.nr_dirty; i++)
			climb(&s, p, s.stuck[i], rc->want);
	}
	if (p->nd->mem)
		boost_adapt(p, s.nr_dirty, rc->freed - freed);
	scan_write(&s, p);
	if (rc->freed == freed && !rc->writing)
		for (i = 0; i < s.nr_stuck; i++)
			policy_touch(p, s.stuck[i]);

	if (rc->direct) {
		ct->pgscan_direct += rc->scanned - scanned;
		ct->pgsteal_direct += rc->freed - freed;
	} else {
		ct->pgscan_kreclaimd += rc->scanned - scanned;
		ct->pgsteal_kreclaimd += rc->freed - freed;
	}
}

unsigned int tree_reclaim(struct page *pg, struct mm_node *nd,
			  unsigned int max)
{
	struct mm_pool *p = page_pool(pg, nd);
	struct reclaim_control rc = { .want = max };
	struct scan s = { .rc = &rc, .lo = scan_lower(p) };
	unsigned int n = climb(&s, p, pg, max);

	scan_write(&s, p);
	nd->c.pgsteal_kreclaimd += n;
	return n;
}

/* -- in the background -------------------------------------------------------- */

/* Between low and high: hysteresis; @want counts as free frames that lack. */
static bool pool_short(struct mm_pool *p, uint64_t *lack)
{
	uint64_t avail = pool_avail(p);
	uint64_t high = (uint64_t)p->wmark_high + p->want;

	if (avail >= high)
		p->reclaiming = false;
	else if (avail < p->wmark_low || p->want)
		p->reclaiming = true;
	*lack = p->reclaiming ? high - avail : 0;
	return p->reclaiming;
}

/* Bad pages that were pinned: see page_zombie() in drop.c. True: some are left. */
static bool bury(struct mm_pool *p)
{
	unsigned int looked = 0;
	struct list *l, *next;
	bool left = false;

	for (l = p->dirty.next; l != &p->dirty && looked < BURY_MAX; l = next) {
		struct page *pg = copy_page(list_entry(l, struct copy, link),
					    p->nd);
		struct copy *c = page_copy(pg, p->nd);

		next = l->next;
		looked++;
		if (!(pg->flags & PAGE_BAD))
			break;
		if (frame_busy(p, c->frame) || !copy_evict(pg, p->nd))
			left = true;
	}
	return left;
}

/* One slice for one pool. True: there is more that could be done at once. */
static bool pool_slice(struct mm_pool *p, uint64_t deadline, uint64_t *next)
{
	struct reclaim_control rc = {
		.max_scan	= RECLAIM_SCAN,
		.deadline_ns	= deadline,
	};
	uint64_t lack, now = p->nd->mm->now_ns;

	if (bury(p))
		*next = min(*next, now + BURY_NS);
	if (p->ending || !pool_short(p, &lack))
		return false;
	rc.want = min(lack, (uint64_t)TIER_BATCH);
	pool_reclaim(p, &rc);
	if (rc.freed) {
		pool_feed(p);
		return pool_short(p, &lack);
	}
	*next = min(*next, now + RETRY_NS);
	return false;
}

/* Round robin, going on where the last slice ended. */
static bool node_slice(struct mm_node *nd, uint64_t deadline, uint64_t *next)
{
	struct list *l = nd->next_pool ? &nd->next_pool->node_link :
					 nd->pools.next;
	unsigned long left = list_count(&nd->pools);
	bool more = false;

	nd->next_pool = NULL;
	for (; left; left--, l = l->next) {
		if (l == &nd->pools)
			l = l->next;
		more |= pool_slice(list_entry(l, struct mm_pool, node_link),
				   deadline, next);
		if (!deadline_past(deadline))
			continue;
		l = l->next == &nd->pools ? nd->pools.next : l->next;
		nd->next_pool = list_entry(l, struct mm_pool, node_link);
		break;
	}
	return more;
}

uint64_t reclaim_run(struct mm *mm, uint64_t now)
{
	uint64_t next = UINT64_MAX, at;
	unsigned int i;
	bool more;

	mm->now_ns = now;
	if (mm->stopping)
		return UINT64_MAX;
	more = wrecks_run(mm);
	if (!more && now < mm->next_reclaim_ns)
		return mm->next_reclaim_ns;
	for (i = 0; i < mm->nr_nodes; i++)
		if (mm->node[i].mem && !list_empty(&mm->node[i].pools))
			more |= node_slice(&mm->node[i],
					   now_ns() + TIER_SLICE_NS, &next);
	at = evacuate_run(mm, now);
	next = min(next, at);
	at = writeback_run(mm, now);
	next = min(next, at);
	at = stage_run(mm, now);
	next = min(next, at);
	/* what left may have been a part of something: see drop.c */
	if (more || mm->wrecks)
		next = now;
	/* without need, the next call looks again: the check is cheap */
	mm->next_reclaim_ns = next == UINT64_MAX ? 0 : next;
	return next;
}
