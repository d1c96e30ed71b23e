/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots of a block node: which page lies where, and who leaves a full node.
 *
 * Where a node is full, the slots that are needed least are freed; nothing waits
 * for them, since a slot is free when its page is dropped. Slots of one size lie
 * together in segments, so room for another size is a segment that is emptied.
 */
#include <stdlib.h>

#include "daemon/mm/tier.h"

#define SLOT_LISTS		(UINT64_C(1) << 20)
#define SLOT_LIST_MIN		(UINT64_C(1) << 20)
#define SLOT_LOOK		512u	/* pages looked at for one that leaves */
#define SLOT_VICTIMS		4u	/* freed at once when a node is full */
#define SLOT_SEGMENTS		4u	/* segments tried for another size */
#define SLOT_TREE_MAX		4096u	/* pages that may go with a segment */
#define SLOT_PAUSE_NS		(10 * NSEC_PER_MSEC)
#define PEEK_SCAN		32u

/*
 * Copies on a block node by the offset of their slots: which pages lie in a
 * segment that is to change its size class. A list holds what lies in some MiB,
 * which is little, and is linked one way only: there may be many millions of
 * copies. Made with the first slot, since the node knows its capacity only when it
 * is online.
 */
static bool slot_lists(struct mm_node *nd)
{
	uint64_t n = nd->node->capacity / SLOT_LIST_MIN;

	if (nd->slots)
		return true;
	n = clamp(n, (uint64_t)1, SLOT_LISTS);
	nd->slots = calloc(n, sizeof(*nd->slots));
	if (!nd->slots)
		return false;
	nd->nr_slot_lists = n;
	nd->slot_list_bytes = div_round_up(nd->node->capacity, n);
	return true;
}

uint64_t slot_list_ix(const struct mm_node *nd, uint64_t off)
{
	return min(off / nd->slot_list_bytes, nd->nr_slot_lists - 1);
}

/**
 * struct peek - looking for the page that a pool would give up first
 * @leaf_ns:	when it was used
 * @inner_ns:	when one was that it would be, but for what hangs on it here
 */
struct peek {
	uint64_t	leaf_ns;
	uint64_t	inner_ns;
};

static enum kvmm_policy_answer peek_offer(struct mm_pool *p, struct page *pg,
					  void *arg)
{
	const struct copy *c = page_copy(pg, p->nd);
	struct peek *pk = arg;

	if (slot_evictable(pg, p->nd)) {
		pk->leaf_ns = c->pol.touched_ns;
		return KVMM_POLICY_ENOUGH;
	}
	if (c->nr_bound && pk->inner_ns == UINT64_MAX)
		pk->inner_ns = c->pol.touched_ns;
	return KVMM_POLICY_REFUSED;
}

/*
 * UINT64_MAX: it has nothing to give. When what was used longest ago is heads of
 * chains only, as after a restart, it is what hangs on them that would leave:
 * pool_reclaim() climbs to it.
 */
static uint64_t pool_coldest(struct mm_pool *p)
{
	struct peek pk = { UINT64_MAX, UINT64_MAX };

	if (p->nr_pages)
		pool_select(p, 1, PEEK_SCAN, peek_offer, &pk);
	return pk.leaf_ns != UINT64_MAX ? pk.leaf_ns : pk.inner_ns;
}

/*
 * The pool on @nd that holds what was used longest ago. Another one than @own
 * must be worth it: twice as old, or @own has nothing to give.
 */
static struct mm_pool *coldest_pool(struct mm_node *nd, struct mm_pool *own)
{
	uint64_t now = nd->mm->now_ns, best_ns = pool_coldest(own);
	uint64_t limit = best_ns;
	struct mm_pool *p, *best = best_ns == UINT64_MAX ? NULL : own;

	if (best && now > best_ns)
		limit = best_ns - min(best_ns, now - best_ns);
	list_for_each_entry(p, &nd->pools, node_link) {
		uint64_t ns = p == own ? UINT64_MAX : pool_coldest(p);

		if (ns >= limit)
			continue;
		limit = ns;
		best = p;
	}
	return best;
}

uint32_t slots_evict(struct mm_pool *p)
{
	struct reclaim_control rc = {
		.want		= SLOT_VICTIMS,
		.max_scan	= SLOT_LOOK,
		.deadline_ns	= now_ns() + TIER_SLICE_NS,
	};

	pool_reclaim(p, &rc);
	return rc.freed;
}

static bool slot_within(const struct copy *c, const struct node_range *r)
{
	return c->slot.off >= r->off && c->slot.off < r->end;
}

/*
 * How many pages would go with the segment, with all that hangs on them? What
 * hangs on another page of it is counted with that one. UINT32_MAX: more than
 * @most, or not all of them can go.
 */
static uint32_t segment_cost(struct mm_node *nd, const struct node_range *r,
			     uint32_t most)
{
	uint64_t i, last = slot_list_ix(nd, r->end - 1);
	uint32_t left = most;
	struct copy *c;

	for (i = slot_list_ix(nd, r->off); i <= last; i++)
		for (c = nd->slots[i]; c; c = c->slot_next) {
			struct page *pg = copy_page(c, nd);

			if (!slot_within(c, r) ||
			    (page_bound(pg) &&
			     slot_within(page_copy(pg->parent, nd), r)))
				continue;
			if (!copy_tree_may_go(pg, nd, &left))
				return UINT32_MAX;
		}
	return most - left;
}

/* Of the segments with the fewest slots in use the one that costs least. */
static bool segment_choose(struct mm_node *nd, uint32_t len,
			   struct node_range *best)
{
	uint32_t least = SLOT_TREE_MAX + 1;
	struct node_range r;
	unsigned int nth;

	for (nth = 0; least && nth < SLOT_SEGMENTS; nth++) {
		uint32_t cost;

		if (node_slot_victim(nd->node, len, nth, &r))
			break;
		cost = segment_cost(nd, &r, least - 1);
		if (cost >= least)
			continue;
		least = cost;
		*best = r;
	}
	return least <= SLOT_TREE_MAX;
}

/* The first copy in the segment; NULL when it is empty. */
static struct copy *segment_first(struct mm_node *nd,
				  const struct node_range *r)
{
	uint64_t i, last = slot_list_ix(nd, r->end - 1);
	struct copy *c;

	for (i = slot_list_ix(nd, r->off); i <= last; i++)
		for (c = nd->slots[i]; c; c = c->slot_next)
			if (slot_within(c, r))
				return c;
	return NULL;
}

/* A segment changes its size class by being emptied; nothing is moved. */
static bool evict_segment(struct mm_node *nd, uint32_t len)
{
	struct node_range r;
	struct copy *c;
	uint32_t left;

	if (!segment_choose(nd, len, &r))
		return false;
	/* each round takes one or more away: segment_cost() */
	for (left = r.nr_used; left; left--) {
		c = segment_first(nd, &r);
		if (!c)
			break;
		if (copy_page(c, nd)->nr_copies > 1)
			nd->c.pgdrop++;
		else
			nd->c.pgdrop_gone++;
		copy_drop_tree(copy_page(c, nd), nd);
	}
	return true;
}

/*
 * Room for another size. When no segment can go, or too much hangs on each, the
 * next page would find the same and search as long; none does for a while. What
 * is @coldest goes bit by bit meanwhile, so that one can in the end.
 */
static bool segment_room(struct mm_node *nd, uint32_t len,
			 struct mm_pool *coldest)
{
	uint64_t now = nd->mm->now_ns;

	if (now < nd->segment_after_ns)
		return false;
	if (evict_segment(nd, len))
		return true;
	nd->segment_after_ns = now + SLOT_PAUSE_NS;
	return coldest && slots_evict(coldest);
}

/*
 * The node has no free slot of this size. What was used longest ago goes: of the
 * own class, or of another whose slots have the same size; a class of another
 * size gives a whole segment. Copies of pages that also live above come first
 * by themselves: only what is the last copy is told to the policy of this node
 * as used (copy_inherit()).
 */
static bool slot_room(struct page *pg, struct mm_node *nd)
{
	struct mm_pool *own = page_pool(pg, nd);
	struct mm_pool *p = coldest_pool(nd, own);

	if (p && round_up(p->page_bytes, NODE_ALIGN) ==
		 round_up(pg->raw_bytes, NODE_ALIGN) && slots_evict(p))
		return true;
	if (p != own && segment_room(nd, pg->raw_bytes, p))
		return true;
	return p && p != own && slots_evict(own);
}

static struct copy **slot_list(struct mm_node *nd, const struct copy *c)
{
	return &nd->slots[slot_list_ix(nd, c->slot.off)];
}

bool slot_link(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd), **at;

	if (!slot_lists(nd))
		return false;
	at = slot_list(nd, c);
	c->slot_next = *at;
	*at = c;
	return true;
}

void slot_unlink(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd), **at = slot_list(nd, c);

	while (*at != c)
		at = &(*at)->slot_next;
	*at = c->slot_next;
	c->slot_next = NULL;
}

int slot_get(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);
	int tries = 3, err;

	if (!slot_lists(nd))
		return -ENOMEM;
	do {
		err = node_slot_alloc(nd->node, pg->raw_bytes, &c->slot);
	} while (err == -ENOSPC && tries-- && slot_room(pg, nd));
	if (!err)
		slot_link(pg, nd);
	/* more was said of slots than is on the medium: nobody is to give up for it */
	return err == -EAGAIN ? -EBUSY : err;
}

void slot_put(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);

	slot_unlink(pg, nd);
	node_slot_free(nd->node, &c->slot);
}
