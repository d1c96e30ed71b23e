/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the daemon learns what was used: a request that ends names its tail, and
 * the parents lead to the rest. Nothing is told while it runs; its pins say
 * enough.
 *
 * Pages are touched tail to head, so that the head is the one used last: it is
 * needed by more requests than anything behind it.
 */
#include "daemon/mm/tier.h"

static uint16_t end_flags(uint8_t how)
{
	switch (how) {
	case KVMM_ENDED:
		return KVMM_POLICY_ENDED;
	case KVMM_CONTINUES:
		return KVMM_POLICY_CONTINUES;
	default:
		return 0;
	}
}

/**
 * struct touch - what the end of a request says of each of its pages
 */
struct touch {
	uint64_t	now_ns;
	uint32_t	expect_ms;
	uint16_t	flags;
};

static void copy_touch(struct page *pg, struct mm_pool *p,
		       const struct touch *t)
{
	struct copy *c = page_copy(pg, p->nd);

	if (c->state != COPY_READY)
		return;
	c->pol.touched_ns = t->now_ns;
	c->pol.expect_ms = t->expect_ms;
	if (c->pol.uses < UINT16_MAX)
		c->pol.uses++;
	c->pol.flags = t->flags;
	pool_policy(p)->touch(p->policy, &c->pol);
	p->nd->c.pgtouch++;
	c->flags &= ~COPY_WFAIL;
	admit_touch(p, c);
	if (!list_empty(&c->link) && !(pg->flags & PAGE_BAD))
		list_move_tail(&p->dirty, &c->link);
}

/* The page that the entry names, if it is still what the client saw. */
static struct page *touch_tail(const struct mm_win *w,
			       const struct ring_sqe *sqe)
{
	struct mm_pool *p = w->pool;
	struct page *pg;

	if (!sqe->frame || !frame_live(p, sqe->frame))
		return NULL;
	if (frame_word_of(p, sqe->frame) != sqe->arg ||
	    frame_word_state(sqe->arg) != FRAME_READY)
		return NULL;
	pg = p->meta[sqe->frame].page;
	return pg && pg->group == sqe->group ? pg : NULL;
}

void mm_touch(struct mm_win *w, const struct ring_sqe *sqe)
{
	struct page *pg = touch_tail(w, sqe);
	uint32_t left = min(sqe->n, MM_TOUCH_MAX);
	struct touch t = {
		.now_ns	= now_ns(),
		.expect_ms = sqe->expect_ms,
		.flags	= end_flags(sqe->how),
	};

	for (; pg && left; left--, pg = pg->parent)
		copy_touch(pg, w->pool, &t);
}

/*
 * Would the page have been found when it was asked for? Others of the batch may
 * have been published by the very request that ends: only what was there before
 * counts. Pages of a time before the space was observed are there still.
 */
static bool would_hit(struct mm_space *sp, const struct ring_key *key,
		      uint32_t asked_ms)
{
	uint64_t k[4];

	memcpy(k, key->key, sizeof(k));
	return ghost_known(sp, key->group, k, asked_ms) ||
	       page_find(sp, key->group, k);
}

/* Whoever wants to know what is asked for, found or not, gets it here. */
int mm_asked(struct mm_space *sp, const struct ring_sqe *sqe,
	     const struct ring_key *key)
{
	uint32_t i, n = sqe->nr_keys;

	for (i = 0; i < n; i++)
		if (key[i].group >= sp->desc.ngroups)
			return -EINVAL;
	sp->seen.asked += n;
	if (mm_space_mode(sp) != KVMM_MODE_OBSERVE)
		return 0;
	sp->seen.ghost_asked += n;
	for (i = 0; i < n; i++)
		sp->seen.ghost_hits += would_hit(sp, &key[i], sqe->asked_ms);
	return 0;
}

static void count_verdict(struct page *pg, bool bad)
{
	struct mm *mm = pg->space->mm;
	unsigned int i;

	pg->strikes += bad;
	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_counters *ct = &mm->node[i].c;

		if (copy_at(pg, i)->state == COPY_NONE)
			continue;
		ct->pgreport += bad;
		ct->pgundo += !bad;
	}
}

/* A chain of a FULL group is worth something up to any page; a blob is not. */
static struct page *whole(struct page *pg)
{
	if (pg->space->desc.group[pg->group].rule == KVMM_FULL)
		return pg;
	while (page_bound(pg))
		pg = pg->parent;
	return pg;
}

uint64_t mm_report(struct mm_client *c, struct mm_space *sp,
		   const struct ring_key *key, uint64_t verdict)
{
	struct page *pg;
	uint64_t k[4];

	if (verdict != KVMM_BAD &&
	    (verdict != RING_UNDO || c->o.rights != KVMM_RW))
		return 0;
	if (key->group >= sp->desc.ngroups)
		return 0;
	memcpy(k, key->key, sizeof(k));
	pg = page_find(sp, key->group, k);
	if (!pg)
		return 0;
	count_verdict(pg, verdict == KVMM_BAD);
	return page_drop_all(whole(pg));
}
