/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How copies end, and what ends with them.
 *
 * A memory copy ends by isolation only: pinned or referenced, it stays. A block
 * copy ends when no I/O uses its slot; until then it is COPY_DOOMED: nobody
 * reads from it or counts on it, and whoever drops the last use of it
 * (copy_unref(), the release of a write) lets it go.
 *
 * Closure. A block copy that is lost takes the copies of its descendants on that
 * node with it: what hangs on a page that is not there could not be hit after a
 * restart. A page that is nowhere any more takes its descendants with it
 * everywhere. Those that are pinned cannot go; they turn PAGE_BAD, which nobody
 * finds, and go at the first look after their last unpin (reclaim.c). That is
 * the price of an unreadable head, and it is paid at once and in one piece: such
 * a tree is lost together or not at all.
 *
 * Wrecks. The parts of a blob hang in one row and are worth nothing one by one.
 * When one of them has gone those that it hung on are of no use any more, and
 * would be written down, or keep others out, until reclaim got to them. They are
 * noted by name, and dropped a slice at a time, from the loose end to the root.
 *
 * Trees are walked children first by the links that pages have anyway; no stack,
 * no memory, no depth that a client could choose.
 */
#include "daemon/mm/tier.h"

#define EIO_STRIKES	2u

/* -- walking a tree ---------------------------------------------------------- */

typedef bool tree_fn(struct page *pg, struct mm_node *nd, void *arg);

/*
 * Does the walk go on to @pg, a child? If it is bound to its parent; @nd NULL:
 * everywhere, else where it has a copy. What is BAD has been condemned before,
 * and all below it, since nothing is ever published under it: a chain that is
 * pinned, and reported page by page from its leaf, is walked once, not each time.
 */
static bool tree_takes(const struct page *pg, const struct mm_node *nd)
{
	if (!page_bound(pg))
		return false;
	return nd ? page_copy(pg, nd)->state != COPY_NONE :
		    !(pg->flags & PAGE_BAD);
}

/* The first child at or behind @l that the walk goes to. */
static struct page *tree_child(struct page *parent, struct list *l,
			       const struct mm_node *nd)
{
	for (; l != &parent->children; l = l->next) {
		struct page *pg = list_entry(l, struct page, sibling);

		if (tree_takes(pg, nd))
			return pg;
	}
	return NULL;
}

static struct page *tree_leaf(struct page *pg, const struct mm_node *nd)
{
	struct page *child;

	while ((child = tree_child(pg, pg->children.next, nd)))
		pg = child;
	return pg;
}

/*
 * Call @fn for @root and all below it, children first. @fn may free the page it
 * is called for, and no other. It ends the walk with false.
 */
static bool tree_walk(struct page *root, struct mm_node *nd, tree_fn *fn,
		      void *arg)
{
	struct page *pg = tree_leaf(root, nd);

	for (;;) {
		struct page *parent = pg->parent, *next = NULL;
		bool last = pg == root;

		if (!last)
			next = tree_child(parent, pg->sibling.next, nd);
		if (!fn(pg, nd, arg))
			return false;
		if (last)
			return true;
		pg = next ? tree_leaf(next, nd) : parent;
	}
}

/* -- one copy ---------------------------------------------------------------- */

/* Its slot is free, its state NONE. The page stays, even without a copy. */
static void block_end(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);

	if (c->state == COPY_WRITING)
		wback_free(c);
	slot_put(pg, nd);
	copy_set_state(pg, nd, COPY_NONE);
}

static bool block_in_use(const struct copy *c)
{
	return c->refs || (c->state == COPY_WRITING && !wback_over(c));
}

/* Isolated, put: the state is NONE. The page stays, even without a copy. */
static bool memory_end(struct page *pg, struct mm_node *nd)
{
	struct mm_pool *p = page_pool(pg, nd);
	uint32_t f = page_copy(pg, nd)->frame;

	if (!frame_isolate(p, f))
		return false;
	frame_put(p, f);
	return true;
}

/* End a copy, or see to it that it ends. True when it is NONE. */
static bool copy_end(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);

	if (c->state == COPY_NONE)
		return true;
	if (nd->mem && c->state == COPY_READY)
		return memory_end(pg, nd);
	if (nd->mem || block_in_use(c)) {
		copy_doom(pg, nd);
		return false;
	}
	block_end(pg, nd);
	return true;
}

/* Has it a copy that is there or coming, and not about to go? */
static bool page_alive(const struct page *pg)
{
	unsigned int i;

	for (i = 0; i < pg->space->mm->nr_nodes; i++)
		if (copy_at(pg, i)->state != COPY_NONE &&
		    !(copy_at(pg, i)->flags & COPY_DOOMED))
			return true;
	return false;
}

/* -- whole trees ------------------------------------------------------------- */

/*
 * A pinned page that nobody finds any more: to the front of its pool's dirty
 * list, where reclaim looks for it (bury() in reclaim.c).
 */
static void page_zombie(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);

	if (nd->mem && !list_empty(&c->link))
		list_move(&page_pool(pg, nd)->dirty, &c->link);
}

/* Counts itself in @arg unless it is the root of all, for which that is NULL. */
static bool condemn_one(struct page *pg, struct mm_node *unused, void *arg)
{
	struct mm *mm = pg->space->mm;
	uint64_t *below = arg;
	unsigned int i;

	page_set_bad(pg);
	if (below)
		++*below;
	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i];

		if (page_copy(pg, nd)->state == COPY_NONE)
			continue;
		if (copy_end(pg, nd) && below)
			nd->c.pgdrop_orphan++;
	}
	/* now that what lay below is gone or doomed, the rest is dirty */
	for (i = 0; i < mm->nr_nodes; i++)
		page_zombie(pg, &mm->node[i]);
	page_put(pg);
	return true;
}

/*
 * @pg is nowhere, or as good as: its descendants go everywhere. Returns how many
 * there were.
 */
static uint64_t condemn_children(struct page *pg)
{
	struct list *l, *next;
	uint64_t below = 0;

	for (l = pg->children.next; l != &pg->children; l = next) {
		struct page *child = list_entry(l, struct page, sibling);

		next = l->next;
		if (tree_takes(child, NULL))
			tree_walk(child, NULL, condemn_one, &below);
	}
	return below;
}

static void page_gone(struct page *pg)
{
	if (pg->nr_copies)
		return;
	condemn_children(pg);
	page_put(pg);
}

uint64_t page_drop_all(struct page *pg)
{
	uint64_t below = condemn_children(pg);

	condemn_one(pg, NULL, NULL);
	return below + 1;
}

void page_drop_breach(struct page *pg, struct mm_node *nd)
{
	nd->c.pgbreach++;
	page_drop_all(pg);
}

/* One page of a tree on a block node; @arg is the root, which is not counted. */
static bool drop_one(struct page *pg, struct mm_node *nd, void *arg)
{
	if (pg != arg)
		nd->c.pgdrop_orphan++;
	if (copy_end(pg, nd)) {
		page_gone(pg);
	} else if (!page_alive(pg)) {
		condemn_children(pg);
		wreck_note(pg);
		page_set_bad(pg);
	}
	return true;
}

void copy_drop_tree(struct page *pg, struct mm_node *nd)
{
	if (page_copy(pg, nd)->state == COPY_NONE)
		return;
	tree_walk(pg, nd, drop_one, pg);
}

struct may_go {
	const struct page *root;
	uint32_t	budget;
};

/* Could it go now, and would nothing be lost but what hangs on it here? */
static bool may_go(struct page *pg, struct mm_node *nd, void *arg)
{
	const struct copy *c = page_copy(pg, nd);
	struct may_go *mg = arg;

	if (c->state != COPY_READY || c->refs || !mg->budget)
		return false;
	mg->budget--;
	/* it would be nowhere: then no child may be anywhere else ... */
	if (pg->nr_copies == 1)
		return pg->nr_bound == c->nr_bound;
	/* ... in memory, say, as this one is */
	return pg == mg->root || pg->parent->nr_copies > 1;
}

bool copy_tree_may_go(struct page *pg, struct mm_node *nd, uint32_t *budget)
{
	struct may_go mg = { .root = pg, .budget = *budget };
	bool ok = tree_walk(pg, nd, may_go, &mg);

	*budget = mg.budget;
	return ok;
}

/* -- wrecks ------------------------------------------------------------------ */

#define WRECK_SLICE	64u		/* pages a call */

static struct wreck *wreck_of(struct mm_space *sp, const struct page *pg)
{
	unsigned int i;

	for (i = 0; i < sp->nr_wrecks; i++)
		if (sp->wreck[i].group == pg->group &&
		    !memcmp(sp->wreck[i].key, pg->key, sizeof(pg->key)))
			return &sp->wreck[i];
	return NULL;
}

/* Whoever condemned a page has seen to what it was a part of. */
void wreck_note(const struct page *pg)
{
	struct mm_space *sp = pg->space;
	struct wreck *w;

	if (!page_bound(pg) || (pg->flags & PAGE_BAD) || sp->ending ||
	    sp->desc.group[pg->group].rule == KVMM_FULL)
		return;
	w = wreck_of(sp, pg);
	if (!w && sp->nr_wrecks < WRECKS)
		w = &sp->wreck[sp->nr_wrecks++];
	if (!w) {
		sp->mm->node[0].c.wreck_lost++;
		return;
	}
	memcpy(w->key, pg->parent->key, sizeof(w->key));
	w->group = pg->group;
	sp->mm->wrecks = true;
}

/* Does anything hang on it that may still be found? */
static bool carries(const struct page *pg)
{
	const struct page *child;

	list_for_each_entry(child, &pg->children, sibling)
		if (page_bound(child) && !(child->flags & PAGE_BAD))
			return true;
	return false;
}

static void count_orphans(const struct page *pg)
{
	struct mm *mm = pg->space->mm;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		mm->node[i].c.pgdrop_orphan += copy_good(copy_at(pg, i));
}

/* Up to @max pages of it; false: that was all. */
static bool wreck_drop(struct mm_space *sp, struct wreck *w, unsigned int *max)
{
	struct page *pg;
	bool more = true;

	for (; more && *max; --*max) {
		pg = page_find(sp, w->group, w->key);
		if (!pg || carries(pg))
			return false;
		more = page_bound(pg);
		if (more)
			memcpy(w->key, pg->parent->key, sizeof(w->key));
		count_orphans(pg);
		page_drop_all(pg);
	}
	return more;
}

static void feed_all(struct mm_space *sp)
{
	unsigned int c, n;

	for (c = 0; c < sp->desc.nclasses; c++)
		for (n = 0; n < sp->mm->nr_nodes; n++)
			if (sp->pool[c][n] && sp->mm->node[n].mem)
				pool_feed(sp->pool[c][n]);
}

bool wrecks_run(struct mm *mm)
{
	unsigned int left = WRECK_SLICE;
	struct mm_space *sp;

	if (!mm->wrecks || mm->stopping)
		return false;
	mm->wrecks = false;
	list_for_each_entry(sp, &mm->spaces, link) {
		bool any = sp->nr_wrecks;

		while (sp->nr_wrecks && left) {
			struct wreck *w = &sp->wreck[sp->nr_wrecks - 1];

			if (wreck_drop(sp, w, &left))
				break;
			sp->nr_wrecks--;
		}
		mm->wrecks |= sp->nr_wrecks;
		if (any && !sp->ending)
			feed_all(sp);
	}
	return mm->wrecks;
}

/* -- calls ------------------------------------------------------------------- */

bool copy_evict(struct page *pg, struct mm_node *nd)
{
	if (!memory_end(pg, nd))
		return false;
	page_put(pg);
	return true;
}

void copy_release(struct page *pg, struct mm_node *nd)
{
	block_end(pg, nd);
	page_gone(pg);
}

void copy_unref(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);
	struct mm *mm = pg->space->mm;
	unsigned int i;

	if (--c->refs || !(c->flags & COPY_DOOMED) || block_in_use(c))
		return;
	block_end(pg, nd);
	if (pg->flags & PAGE_BAD)
		for (i = 0; i < mm->nr_nodes; i++)
			page_zombie(pg, &mm->node[i]);
	page_gone(pg);
}

/*
 * Wrong bytes are the end of it. An I/O error is so the second time: a device that
 * fails for some seconds must not cost the whole tier.
 */
bool copy_judge(struct page *pg, struct mm_node *nd, int result)
{
	if (result == -EBADMSG)
		nd->c.pgcrc_fail++;
	else if (result != -EIO || ++pg->strikes < EIO_STRIKES)
		return false;
	if (!copy_good(page_copy(pg, nd)))
		return false;
	if (pg->nr_copies == 1)
		nd->c.pgdrop_gone++;
	else
		nd->c.pgdrop++;
	copy_drop_tree(pg, nd);
	return true;
}

void page_drop_copy(struct page *pg, struct mm_node *nd)
{
	if (!nd->mem)
		copy_drop_tree(pg, nd);
	else if (copy_end(pg, nd))
		page_gone(pg);
}
