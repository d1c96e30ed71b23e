/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages and their copies.
 *
 * A page is found through a private hash of its space (clients have the index,
 * which is smaller and may lose a line). It is made by a publish and lives as
 * long as some node has a copy of it. A copy changes its state in one place,
 * copy_set_state(), because everything that is counted hangs on it: children,
 * dirty copies, bytes, the policy's lists, the lines that clients read.
 *
 * Pages are small and many, so they come from slabs (slab.h).
 *
 * Most look-ups are for pages that are not there (a publish), and most of the
 * time that they take would go to reading other pages of the same chain. So a
 * chain's head knows, by a bit for each 64th of the hash, what cannot be in it.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"

#define HASH_MIN	1024u
#define HASH_HUGE	((size_t)2 << 20)
#define HASH_LOAD	2u		/* pages a chain, at most, on average */

/* -- memory ---------------------------------------------------------------- */

const struct copy copy_none = {
	.link = { (struct list *)(uintptr_t)&copy_none.link,
		  (struct list *)(uintptr_t)&copy_none.link },
};

void page_layout(struct mm *mm)
{
	size_t off = sizeof(struct page);
	unsigned int pass, i;

	for (pass = 0; pass < 2; pass++) {
		for (i = 0; i < mm->nr_nodes; i++) {
			struct mm_node *nd = &mm->node[i];

			if (nd->mem != pass)
				continue;
			nd->copy_off = (uint32_t)off;
			off += nd->mem ? sizeof(struct copy *) :
					 sizeof(struct copy);
		}
	}
	slabs_init(&mm->pages, off);
	slabs_init(&mm->copies, sizeof(struct copy));
}

size_t page_bytes(const struct mm *mm)
{
	return mm->pages.size;
}

static struct copy **copy_place(struct page *pg, const struct mm_node *nd)
{
	return (struct copy **)((char *)pg + nd->copy_off);
}

struct copy *copy_get(struct page *pg, struct mm_node *nd)
{
	struct copy **place = copy_place(pg, nd), *c = *place;
	const struct page *child;

	if (c)
		return c;
	c = slab_get(&nd->mm->copies);
	if (!c)
		return NULL;
	c->page = pg;
	list_init(&c->link);
	if (pg->nr_bound)
		list_for_each_entry(child, &pg->children, sibling)
			c->nr_bound += page_bound(child) &&
				       page_copy(child, nd)->state != COPY_NONE;
	*place = c;
	return c;
}

void copy_put(struct page *pg, struct mm_node *nd)
{
	struct copy **place = copy_place(pg, nd), *c = *place;

	if (!c || c->state != COPY_NONE || c->flight || c->refs)
		return;
	*place = NULL;
	slab_put(&nd->mm->copies, c);
}

static void page_free(struct page *pg)
{
	struct mm *mm = pg->space->mm;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		if (mm->node[i].mem)
			copy_put(pg, &mm->node[i]);
	slab_put(&mm->pages, pg);
}

/* -- the private hash ------------------------------------------------------ */

static uint64_t hash_of(const struct mm_space *sp, uint16_t group,
			const uint64_t key[4])
{
	return key_mix(key, sp->mm->seed[0], sp->mm->seed[1], group);
}

/*
 * BAD pages, which nobody looks for, lie anywhere: by key, a client that
 * publishes, pins and reports the same one over and over would make one chain
 * of them, and every look-up of that key walk it.
 */
static uint64_t hash_of_page(const struct page *pg)
{
	uint64_t key[4];

	if (!(pg->flags & PAGE_BAD))
		return hash_of(pg->space, pg->group, pg->key);
	memcpy(key, pg->key, sizeof(key));
	key[0] ^= (uintptr_t)pg;
	return hash_of(pg->space, pg->group, key);
}

static struct page_chain *hash_chain(const struct mm_space *sp, uint64_t h)
{
	return &sp->hash[h & (sp->hash_size - 1)];
}

/* Of the top six bits, which choose no chain. */
static uint64_t hash_bit(uint64_t h)
{
	return BIT(h >> 58);
}

static void hash_add(struct page *pg)
{
	uint64_t h = hash_of_page(pg);
	struct page_chain *chain = hash_chain(pg->space, h);

	pg->hnext = chain->first;
	chain->first = pg;
	chain->may_have |= hash_bit(h);
}

/* A large one in huge pages: nearly each look misses the TLB otherwise. */
static struct page_chain *hash_alloc(uint64_t size)
{
	size_t bytes = size * sizeof(struct page_chain);
	void *mem;

	if (bytes < HASH_HUGE)
		return calloc(size, sizeof(struct page_chain));
	mem = aligned_alloc(HASH_HUGE, bytes);
	if (!mem)
		return NULL;
	madvise(mem, bytes, MADV_HUGEPAGE);
	return memset(mem, 0, bytes);
}

/* Stays as it is, only slower, when there is no memory. */
static bool hash_resize(struct mm_space *sp, uint64_t size)
{
	uint64_t old_size = sp->hash_size, i;
	struct page_chain *old = sp->hash;
	struct page *pg;

	sp->hash = hash_alloc(size);
	if (!sp->hash) {
		sp->hash = old;
		return old_size;
	}
	sp->hash_size = size;
	for (i = 0; i < old_size; i++) {
		while ((pg = old[i].first)) {
			old[i].first = pg->hnext;
			hash_add(pg);
		}
	}
	free(old);
	return true;
}

static bool hash_grow(struct mm_space *sp)
{
	return hash_resize(sp, sp->hash_size ? 2 * sp->hash_size : HASH_MIN);
}

void page_reserve(struct mm_space *sp, uint64_t nr_pages)
{
	uint64_t size = roundup_pow2(max(nr_pages / HASH_LOAD,
					 (uint64_t)HASH_MIN));

	if (size > sp->hash_size)
		hash_resize(sp, size);
}

static void hash_del(struct page *pg)
{
	uint64_t h = hash_of_page(pg);
	struct page_chain *chain = hash_chain(pg->space, h);
	struct page **pp = &chain->first;

	while (*pp != pg)
		pp = &(*pp)->hnext;
	*pp = pg->hnext;
	/* a bit of a page that left a longer chain stays: it only costs time */
	if (!chain->first)
		chain->may_have = 0;
}

static bool key_equal(const uint64_t a[4], const uint64_t b[4])
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

struct page *page_find(struct mm_space *sp, uint16_t group,
		       const uint64_t key[4])
{
	uint64_t h = hash_of(sp, group, key);
	const struct page_chain *chain;
	struct page *pg;

	if (!sp->hash_size)
		return NULL;
	chain = hash_chain(sp, h);
	if (!(chain->may_have & hash_bit(h)))
		return NULL;
	for (pg = chain->first; pg; pg = pg->hnext)
		if (key_equal(pg->key, key) && pg->group == group &&
		    !(pg->flags & PAGE_BAD))
			return pg;
	return NULL;
}

void page_prefetch(const struct mm_space *sp, uint16_t group,
		   const uint64_t key[4])
{
	if (sp->hash_size)
		__builtin_prefetch(hash_chain(sp, hash_of(sp, group, key)), 1);
}

void page_prefetch_first(const struct mm_space *sp, uint16_t group,
			 const uint64_t key[4])
{
	if (sp->hash_size)
		__builtin_prefetch(hash_chain(sp, hash_of(sp, group,
							  key))->first);
}

/* -- life ------------------------------------------------------------------ */

struct page *page_create(struct mm_space *sp, uint16_t group,
			 const uint64_t key[4], struct page *parent,
			 uint8_t flags)
{
	const struct desc_group *g = &sp->desc.group[group];
	struct page *pg;

	if (sp->nr_pages >= HASH_LOAD * sp->hash_size && !hash_grow(sp))
		return NULL;
	pg = slab_get(&sp->mm->pages);
	if (!pg)
		return NULL;
	memcpy(pg->key, key, sizeof(pg->key));
	pg->space = sp;
	pg->group = (uint8_t)group;
	pg->flags = flags;
	if (g->rule == KVMM_FULL && !(flags & PAGE_ROOT))
		pg->flags |= PAGE_BOUND;
	pg->raw_bytes = sp->desc.cls[g->class_ix].page_bytes;
	list_init(&pg->children);
	list_init(&pg->sibling);
	if (parent) {
		pg->parent = parent;
		parent->nr_bound += page_bound(pg);
		list_add_tail(&parent->children, &pg->sibling);
	}

	hash_add(pg);
	sp->nr_pages++;
	return pg;
}

static void page_orphan(struct page *pg)
{
	list_del(&pg->sibling);
	pg->parent = NULL;
	if ((pg->flags & PAGE_BOUND) && !(pg->flags & PAGE_BAD))
		pg->flags |= PAGE_ORPHAN;
}

void page_put(struct page *pg)
{
	if (pg->nr_copies)
		return;
	wreck_note(pg);
	while (!list_empty(&pg->children))
		page_orphan(list_first(&pg->children, struct page, sibling));
	if (pg->parent) {
		pg->parent->nr_bound -= page_bound(pg);
		list_del(&pg->sibling);
	}
	hash_del(pg);
	pg->space->nr_pages--;
	page_free(pg);
}

struct mm_pool *page_pool(const struct page *pg, const struct mm_node *nd)
{
	const struct mm_space *sp = pg->space;

	return sp->pool[sp->desc.group[pg->group].class_ix][nd->ix];
}

/* -- what clients read of it ----------------------------------------------- */

struct below page_below(const struct page *pg)
{
	const struct mm *mm = pg->space->mm;
	struct below b = { .source = 0 };
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		const struct mm_node *nd = &mm->node[i];
		const struct copy *c = page_copy(pg, nd);

		if (c->state == COPY_LOADING) {
			b.pending = true;
		} else if (!nd->mem && copy_good(c)) {
			if (!b.nodes)
				b.source = i;
			b.nodes |= BIT(i);
		}
	}
	return b;
}

static void below_update(struct page *pg, const struct below *was)
{
	struct below is = page_below(pg);

	if (pg->flags & PAGE_BAD)
		return;
	if (is.nodes == was->nodes && is.pending == was->pending)
		return;
	if (!is.nodes && !is.pending)
		index_below_clear(pg->space, pg);
	else if (was->nodes || was->pending)
		index_below_set(pg->space, pg, &is);
	else
		index_below_add(pg->space, pg, &is);
}

void page_crc_agree(struct page *pg, bool has, uint32_t crc)
{
	if (!has || crc != pg->crc)
		pg->flags &= ~PAGE_CRC;
}

void page_set_bad(struct page *pg)
{
	struct mm *mm = pg->space->mm;
	unsigned int i;

	if (pg->flags & PAGE_BAD)
		return;
	for (i = 0; i < mm->nr_nodes; i++)
		if (mm->node[i].mem && copy_at(pg, i)->state == COPY_READY) {
			index_clear(pg->space, pg, i);
			/* pinned, it may stay; the next daemon is not to find it */
			frame_forget(page_pool(pg, &mm->node[i]),
				     copy_at(pg, i)->frame);
		}
	index_below_clear(pg->space, pg);
	hash_del(pg);
	pg->flags |= PAGE_BAD;
	pg->flags &= ~PAGE_ORPHAN;
	hash_add(pg);
}

/* -- copies ---------------------------------------------------------------- */

bool page_has_below(const struct page *pg, const struct mm_node *nd)
{
	const struct mm *mm = pg->space->mm;
	unsigned int hops, i = nd->below;

	for (hops = 0; i < mm->nr_nodes && hops < mm->nr_nodes; hops++) {
		const struct copy *c = copy_at(pg, i);

		if (c->state == COPY_READY && !(c->flags & COPY_DOOMED))
			return true;
		i = mm->node[i].below;
	}
	return false;
}

struct mm_node *page_source(const struct page *pg, const struct mm_node *to)
{
	struct mm *mm = pg->space->mm;
	struct mm_node *best = NULL;
	uint32_t best_us = 0;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		const struct copy *c = copy_at(pg, i);
		struct mm_node *nd = &mm->node[i];
		uint32_t us;

		if (nd == to || c->state != COPY_READY ||
		    (c->flags & COPY_DOOMED))
			continue;
		us = nd->mem ? 0 : node_estimate_us(nd->node, NODE_READ,
						    pg->raw_bytes);
		if (!best || us < best_us) {
			best = nd;
			best_us = us;
		}
	}
	return best;
}

/* Which READY copies in memory have nothing below them. */
static void dirty_update(struct page *pg)
{
	struct mm *mm = pg->space->mm;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i];
		struct copy *c = page_copy(pg, nd);
		struct mm_pool *p;
		bool was, is;

		if (!nd->mem)
			continue;
		was = !list_empty(&c->link);
		is = c->state == COPY_READY && !page_has_below(pg, nd);
		if (is == was)
			continue;
		p = page_pool(pg, nd);
		if (is) {
			list_add_tail(&p->dirty, &c->link);
			p->nr_dirty++;
		} else {
			list_del(&c->link);
			p->nr_dirty--;
			admit_forget(p, c);
		}
	}
}

static void copy_ready(struct page *pg, struct mm_node *nd, struct copy *c)
{
	const struct kvmm_policy_facts facts = {
		.pos = pg->pos, .cost_us = pg->cost_us,
	};
	struct mm_pool *p = page_pool(pg, nd);

	p->nr_pages++;
	nd->bytes_pages += pg->raw_bytes;
	c->pol.touched_ns = pg->space->mm->now_ns;
	c->pol.expect_ms = 0;
	memset(c->pol.priv, 0, sizeof(c->pol.priv));
	pool_policy(p)->add(p->policy, &c->pol, &facts);
}

static void copy_unready(struct page *pg, struct mm_node *nd, struct copy *c)
{
	struct mm_pool *p = page_pool(pg, nd);

	p->nr_pages--;
	nd->bytes_pages -= pg->raw_bytes;
	pool_policy(p)->remove(p->policy, &c->pol);
}

static void copy_count(struct page *pg, struct mm_node *nd, int by)
{
	struct copy *up;

	pg->nr_copies += by;
	if (!page_bound(pg))
		return;
	/* one that comes later counts by itself: copy_get() */
	up = page_copy(pg->parent, nd);
	if (up != &copy_none)
		up->nr_bound += by;
}

void copy_set_state(struct page *pg, struct mm_node *nd, enum copy_state st)
{
	struct copy *c = page_copy(pg, nd);
	enum copy_state was = c->state;
	struct below below;

	if (st == was)
		return;
	below = page_below(pg);
	if (was == COPY_READY)
		copy_unready(pg, nd, c);
	if (was == COPY_NONE)
		copy_count(pg, nd, 1);

	c->state = st;
	if (st == COPY_READY)
		copy_ready(pg, nd, c);
	if (st == COPY_NONE) {
		copy_count(pg, nd, -1);
		c->pol.flags = 0;
		c->pol.uses = 0;
	}
	dirty_update(pg);
	if (st == COPY_NONE)
		c->flags = 0;

	if (nd->mem && !(pg->flags & PAGE_BAD)) {
		/* what was not READY has no line */
		if (st == COPY_READY)
			index_add(pg->space, pg, nd->ix, INDEX_USED,
				  frame_word_of(page_pool(pg, nd), c->frame),
				  c->frame);
		else if (was == COPY_READY)
			index_clear(pg->space, pg, nd->ix);
	}
	below_update(pg, &below);
	if (nd->mem && st == COPY_NONE)
		copy_put(pg, nd);
}

void copy_doom(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);
	struct below below = page_below(pg);

	if (c->flags & COPY_DOOMED)
		return;
	c->flags |= COPY_DOOMED;
	persist_del(pg, nd);
	dirty_update(pg);
	below_update(pg, &below);
}
