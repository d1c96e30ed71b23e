/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every law of mm_types.h, counted anew from the objects themselves.
 *
 * Slow: it looks at every page, every frame and every line of every index. For
 * tests, and for the admin request of that name.
 */
#include <stdlib.h>

#include "daemon/mm/tier.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"

#define broken(e, ...)	errmsg_set(e, -EUCLEAN, __VA_ARGS__)
#define llu(x)		((unsigned long long)(x))

/* Eight digits of a key, enough to find it in a dump. */
#define KEY_FMT		"page %02x%02x%02x%02x of group %u"
#define KEY_ARGS(pg)	((const uint8_t *)(pg)->key)[0],		\
			((const uint8_t *)(pg)->key)[1],		\
			((const uint8_t *)(pg)->key)[2],		\
			((const uint8_t *)(pg)->key)[3], (pg)->group

/* -- pages ------------------------------------------------------------------------ */

/* What the pages of one space add up to, per pool. */
struct tally {
	uint64_t	pages[KVMM_MAX_CLASSES][KVMM_MAX_NODES];
	uint64_t	dirty[KVMM_MAX_CLASSES][KVMM_MAX_NODES];
	uint64_t	refused[KVMM_MAX_CLASSES][KVMM_MAX_NODES];
	uint64_t	bytes[KVMM_MAX_NODES];
	uint64_t	lines, words;
	uint64_t	nr_pages;
};

static bool copy_there(const struct copy *c)
{
	return c->state != COPY_NONE;
}

static int check_children(const struct page *pg, struct errmsg *e)
{
	const struct mm *mm = pg->space->mm;
	uint32_t n = 0, here[KVMM_MAX_NODES] = { 0 };
	const struct page *child;
	unsigned int i;

	list_for_each_entry(child, &pg->children, sibling) {
		if (child->parent != pg)
			return broken(e, KEY_FMT ": a child has another parent",
				      KEY_ARGS(pg));
		if (!page_bound(child))
			continue;
		n++;
		for (i = 0; i < mm->nr_nodes; i++)
			here[i] += copy_there(copy_at(child, i));
	}
	if (n != pg->nr_bound)
		return broken(e, KEY_FMT ": %u bound children, counted as %u",
			      KEY_ARGS(pg), n, pg->nr_bound);
	for (i = 0; i < mm->nr_nodes; i++)
		if (copy_at(pg, i) != &copy_none &&
		    here[i] != copy_at(pg, i)->nr_bound)
			return broken(e,
				KEY_FMT ": %u bound children on node %u, counted as %u",
				KEY_ARGS(pg), here[i], i,
				copy_at(pg, i)->nr_bound);
	return 0;
}

/* Closure: of what is bound to its parent; and of a persistent node by itself. */
static int check_closure(const struct page *pg, struct errmsg *e)
{
	const struct mm *mm = pg->space->mm;
	unsigned int i;

	if (!(pg->flags & PAGE_BOUND) || (pg->flags & PAGE_BAD))
		return 0;
	if (pg->flags & PAGE_ORPHAN)
		return broken(e, KEY_FMT ": its parent was freed before it",
			      KEY_ARGS(pg));
	if (!pg->parent)
		return 0;
	if (!pg->parent->nr_copies)
		return broken(e, KEY_FMT ": its parent is in no node",
			      KEY_ARGS(pg));
	for (i = 0; i < mm->nr_nodes; i++) {
		enum copy_state up = copy_at(pg->parent, i)->state;
		enum copy_state st = copy_at(pg, i)->state;

		if (mm->node[i].mem || st == COPY_NONE ||
		    (copy_at(pg, i)->flags & COPY_DOOMED))
			continue;
		if (up != COPY_READY &&
		    !(st == COPY_WRITING && up == COPY_WRITING))
			return broken(e,
				KEY_FMT ": on block node %u without its parent",
				KEY_ARGS(pg), i);
	}
	return 0;
}

static int check_frame_of(const struct page *pg, const struct mm_node *nd,
			  struct errmsg *e)
{
	const struct copy *c = page_copy(pg, nd);
	const struct mm_pool *p = page_pool(pg, nd);
	uint64_t word;

	if (!c->frame && c->state == COPY_LOADING)
		return 0;		/* waits for one */
	if (!frame_live(p, c->frame))
		return broken(e, KEY_FMT ": frame %u of node %u does not exist",
			      KEY_ARGS(pg), c->frame, nd->ix);
	word = frame_word_of(p, c->frame);
	if (frame_word_state(word) != (c->state == COPY_READY ?
				       FRAME_READY : FRAME_LOADING))
		return broken(e, KEY_FMT ": copy state %u, but frame %u is %u",
			      KEY_ARGS(pg), c->state, c->frame,
			      frame_word_state(word));
	if (p->meta[c->frame].page != pg)
		return broken(e, KEY_FMT ": frame %u belongs to another page",
			      KEY_ARGS(pg), c->frame);
	return 0;
}

static int check_record(const struct page *pg, const struct mm_node *nd,
			struct errmsg *e)
{
	const struct mm_pool *p = page_pool(pg, nd);
	uint32_t f = page_copy(pg, nd)->frame;
	const struct frame_record *r = &p->record[f];

	if (r->crc != kvmm_crc32c(0, r, offsetof(struct frame_record, crc)))
		return broken(e, KEY_FMT ": the record of frame %u is torn",
			      KEY_ARGS(pg), f);
	if (memcmp(r->key, pg->key, sizeof(r->key)) ||
	    r->group != pg->group ||
	    r->gen != frame_word_gen(frame_word_of(p, f)))
		return broken(e, KEY_FMT ": the record of frame %u is of another",
			      KEY_ARGS(pg), f);
	return 0;
}

/* Clients find what is there, unless its line was pushed out. */
static int check_line(const struct page *pg, unsigned int node, bool want,
		      uint64_t fword, struct tally *t, struct errmsg *e)
{
	const struct mm_space *sp = pg->space;
	struct index_hit hit;
	bool found = index_find(sp->index,
				index_hash(sp->index->nr_lines, sp->index->seed,
					   pg->key, pg->group, node),
				pg->key, pg->group, node, &hit);

	if (pg->flags & PAGE_BAD)
		return 0;		/* a line would be another page's */
	t->lines += found;
	if (found && !want)
		return broken(e, KEY_FMT ": line for node %u, but not there",
			      KEY_ARGS(pg), node);
	if (!found && want && !sp->index_pushed)
		return broken(e, KEY_FMT ": on node %u, but without a line",
			      KEY_ARGS(pg), node);
	if (found && hit.fword != fword)
		return broken(e, KEY_FMT ": line for node %u names another frame",
			      KEY_ARGS(pg), node);
	return 0;
}

/* The same of the word that says where it is below. */
static int check_word(const struct page *pg, struct tally *t, struct errmsg *e)
{
	const struct mm_space *sp = pg->space;
	struct below b = page_below(pg);
	bool want = b.nodes || b.pending, found;
	struct index_hit hit;

	if (pg->flags & PAGE_BAD)
		return 0;
	found = index_look_below(sp->index, pg->key, pg->group, &hit);
	t->words += found;
	if (found && !want)
		return broken(e, KEY_FMT ": found below, but not there",
			      KEY_ARGS(pg));
	if (!found && want && !sp->index_pushed)
		return broken(e, KEY_FMT ": below, but not found there",
			      KEY_ARGS(pg));
	if (found && (hit.fword != b.nodes ||
		      b.pending != !!(hit.flags & INDEX_PENDING)))
		return broken(e, KEY_FMT ": found on other nodes below",
			      KEY_ARGS(pg));
	return 0;
}

static int check_lines(const struct page *pg, struct tally *t,
		       struct errmsg *e)
{
	const struct mm *mm = pg->space->mm;
	unsigned int i;
	int err;

	for (i = 0; i < mm->nr_nodes; i++) {
		const struct copy *c = copy_at(pg, i);
		bool ready = c->state == COPY_READY;

		if (!mm->node[i].mem)
			continue;
		err = check_line(pg, i, ready, ready ?
			frame_word_of(page_pool(pg, &mm->node[i]), c->frame) : 0,
			t, e);
		if (err)
			return err;
	}
	return check_word(pg, t, e);
}

/* What can be found again, and what must not be. */
static int check_kept(const struct page *pg, const struct mm_node *nd,
		      struct errmsg *e)
{
	const struct copy *c = page_copy(pg, nd);
	bool want = copy_good(c) && (pg->space->labelled & BIT(nd->ix));

	if (nd->mem || want == !!(c->flags & COPY_KEPT))
		return 0;
	return broken(e, KEY_FMT ": on node %u, %s record", KEY_ARGS(pg),
		      nd->ix, want ? "without a" : "with a");
}

static int check_copies(const struct page *pg, struct tally *t,
			struct errmsg *e)
{
	const struct mm_space *sp = pg->space;
	unsigned int cls = sp->desc.group[pg->group].class_ix;
	unsigned int i, there = 0;
	int err;

	for (i = 0; i < sp->mm->nr_nodes; i++) {
		const struct mm_node *nd = &sp->mm->node[i];
		const struct copy *c = copy_at(pg, i);

		there += copy_there(c);
		if (copy_there(c) && !page_pool(pg, nd))
			return broken(e, KEY_FMT ": on node %u, which does not serve its space",
				      KEY_ARGS(pg), i);
		if (nd->mem && copy_there(c)) {
			err = check_frame_of(pg, nd, e);
			if (err)
				return err;
		}
		err = check_kept(pg, nd, e);
		if (err)
			return err;
		if (c->state != COPY_READY)
			continue;
		t->pages[cls][i]++;
		t->bytes[i] += pg->raw_bytes;
		if (!nd->mem)
			continue;
		err = pg->flags & PAGE_BAD ? 0 : check_record(pg, nd, e);
		if (err)
			return err;
		if (page_has_below(pg, nd) != list_empty(&c->link))
			return broken(e, KEY_FMT ": on node %u, listed as %s",
				      KEY_ARGS(pg), i,
				      list_empty(&c->link) ? "clean" : "dirty");
		t->dirty[cls][i] += !list_empty(&c->link);
		t->refused[cls][i] += !!(c->flags & COPY_REFUSED);
	}
	if (!there || there != pg->nr_copies)
		return broken(e, KEY_FMT ": %u copies, counted as %u",
			      KEY_ARGS(pg), there, pg->nr_copies);
	return 0;
}

static int check_page(const struct page *pg, struct tally *t, struct errmsg *e)
{
	int err = check_copies(pg, t, e);

	if (!err)
		err = check_children(pg, e);
	if (!err)
		err = check_closure(pg, e);
	if (!err)
		err = check_lines(pg, t, e);
	t->nr_pages++;
	return err;
}

/* -- frames ------------------------------------------------------------------------- */

/* What the frames of one pool add up to. */
struct frame_tally {
	uint32_t	free, open, loading, ready, quarantine;
};

static int check_frame(const struct mm_pool *p, uint32_t f,
		       struct frame_tally *t, struct errmsg *e)
{
	const struct frame_meta *m = &p->meta[f];
	enum frame_state st = frame_word_state(frame_word_of(p, f));

	if ((m->flags & FMETA_COPY) && (st != FRAME_OPEN || !m->refs))
		return broken(e, "frame %u in state %u is to be copied into, with %u references",
			      f, st, m->refs);
	switch (st) {
	case FRAME_FREE:
		t->free++;
		if (m->page || m->owner || m->win || m->refs)
			return broken(e, "frame %u is free and somebody's", f);
		return 0;
	case FRAME_OPEN:
		t->open++;
		if (!m->owner || m->page || m->owner->ended)
			return broken(e, "frame %u is OPEN and %s", f,
				      m->page ? "a page's" : "nobody's");
		return 0;
	case FRAME_QUARANTINE:
		t->quarantine++;
		if (!m->owner || m->page || !m->owner->ended)
			return broken(e,
				"frame %u is in quarantine, but its engine is not dead",
				f);
		return 0;
	case FRAME_LOADING:
		t->loading++;
		break;
	case FRAME_READY:
		t->ready++;
		if (m->page && page_copy(m->page, p->nd)->frame != f)
			return broken(e, "frame %u: its page is in frame %u", f,
				      page_copy(m->page, p->nd)->frame);
		break;
	default:
		return broken(e, "frame %u is in state %u outside of a call", f,
			      st);
	}
	if ((!m->page && !(st == FRAME_LOADING && m->flags & FMETA_READ)) ||
	    m->owner)
		return broken(e, "frame %u in state %u is no page's", f, st);
	return 0;
}

/* A free stack holds each free frame of its extent once, and no other. */
static int check_stack(const struct mm_pool *p, const struct mm_extent *x,
		       uint32_t nr_free, struct errmsg *e)
{
	const uint32_t *stack = &p->free[(size_t)x->no * p->per_extent];
	uint64_t *seen;
	uint32_t i;
	int err = 0;

	if (x->nr_free != nr_free || x->nr_free + x->nr_used != p->per_extent)
		return broken(e,
			"extent %u: %u free frames, %u on its stack, %u used, of %u",
			x->no, nr_free, x->nr_free, x->nr_used, p->per_extent);
	seen = calloc(BITMAP_WORDS(p->per_extent), sizeof(*seen));
	if (!seen)
		return errmsg_set(e, -ENOMEM, "out of memory");
	for (i = 0; i < x->nr_free && !err; i++) {
		uint32_t f = stack[i];

		if (f / p->per_extent != x->no ||
		    bitmap_test_set(seen, f % p->per_extent) ||
		    frame_word_state(frame_word_of(p, f)) != FRAME_FREE)
			err = broken(e, "extent %u: frame %u on its free stack",
				     x->no, f);
	}
	free(seen);
	return err;
}

static int check_extent(const struct mm_pool *p, const struct mm_extent *x,
			struct frame_tally *t, uint64_t *nr_free,
			struct errmsg *e)
{
	uint32_t f = x->no * p->per_extent, end = f + p->per_extent;
	uint32_t before = t->free;
	int err;

	for (; f < end; f++) {
		err = check_frame(p, f, t, e);
		if (err)
			return err;
	}
	err = check_stack(p, x, t->free - before, e);
	if (err)
		return err;
	if (bitmap_test(p->free_map, x->no) != (!x->going && x->nr_free))
		return broken(e, "extent %u: %u free frames, going %d, bit %d",
			      x->no, x->nr_free, x->going,
			      bitmap_test(p->free_map, x->no));
	if (!x->going)
		*nr_free += x->nr_free;
	return 0;
}

static int check_wins(const struct mm_pool *p, struct errmsg *e)
{
	const struct mm_win *w;
	uint64_t want = 0;

	list_for_each_entry(w, &p->refill_wait, refill_link)
		want += w->want;
	if (want > p->want)
		return broken(e, "windows want %llu frames, counted as %u",
			      llu(want), p->want);
	if (!p->want != !p->squeezed_ns)
		return broken(e, "%u frames are wanted, since %llu", p->want,
			      llu(p->squeezed_ns));
	return 0;
}

static int check_memory_pool(const struct mm_pool *p, uint64_t *bytes,
			     struct errmsg *e)
{
	struct frame_tally t = { 0 };
	uint32_t no, nr = 0, going = 0, held = 0;
	uint64_t nr_free = 0;
	int err;

	for (no = 1; no <= p->max_extents; no++) {
		if (!p->extent[no].ext)
			continue;
		nr++;
		going += p->extent[no].going;
		held += p->extent[no].held;
		*bytes += p->extent[no].ext->bytes;
		err = check_extent(p, &p->extent[no], &t, &nr_free, e);
		if (err)
			return err;
	}
	*bytes += p->extents_coming * pool_extent_bytes(p);
	if (nr != p->nr_extents || going != p->extents_going ||
	    held != p->extents_held || p->nr_frames != nr * p->per_extent)
		return broken(e, "%u extents, %u going, %u held; counted as %u, %u, %u and %u frames",
			      nr, going, held, p->nr_extents, p->extents_going,
			      p->extents_held, p->nr_frames);
	if (nr_free != p->nr_free || t.open != p->nr_open ||
	    t.loading != p->nr_loading || t.ready != p->nr_pages ||
	    t.quarantine != p->nr_quarantine)
		return broken(e,
			"frames free %llu open %u loading %u ready %u quarantine %u; counted as %u %u %u %llu %u",
			llu(nr_free), t.open, t.loading, t.ready, t.quarantine,
			p->nr_free, p->nr_open, p->nr_loading,
			llu(p->nr_pages), p->nr_quarantine);
	return check_wins(p, e);
}

/* -- spaces, nodes, engines ------------------------------------------------------------- */

static int check_pools_of(const struct mm_space *sp, const struct tally *t,
			  struct errmsg *e)
{
	unsigned int c, n;

	for (c = 0; c < sp->desc.nclasses; c++) {
		for (n = 0; n < sp->mm->nr_nodes; n++) {
			const struct mm_pool *p = sp->pool[c][n];

			if (!p)
				continue;
			if (p->nr_pages != t->pages[c][n])
				return broken(e,
					"class %u, node %u: %llu pages, counted as %llu",
					c, n, llu(t->pages[c][n]),
					llu(p->nr_pages));
			if (p->nr_dirty != t->dirty[c][n] ||
			    list_count(&p->dirty) != p->nr_dirty)
				return broken(e,
					"class %u, node %u: %llu dirty pages, counted as %llu, listed %lu",
					c, n, llu(t->dirty[c][n]),
					llu(p->nr_dirty),
					list_count(&p->dirty));
			if (p->nr_refused != t->refused[c][n] ||
			    p->nr_refused > p->nr_dirty)
				return broken(e,
					"class %u, node %u: %llu pages not admitted below, counted as %llu",
					c, n, llu(t->refused[c][n]),
					llu(p->nr_refused));
		}
	}
	return 0;
}

/* Each used line and word is found from its own key, and none is left over. */
static int check_index(const struct mm_space *sp, const struct tally *t,
		       struct errmsg *e)
{
	const _Atomic uint64_t *w8 = index_words(sp->index,
						 sp->index->nr_lines);
	uint64_t i, used = 0, words = 0;

	for (i = 0; i < sp->index->nr_lines; i++) {
		uint64_t w = atomic_load_explicit(&sp->index->line[i].word0,
						  memory_order_relaxed);

		if (w & 1)
			return broken(e, "line %llu is being written for ever",
				      llu(i));
		used += w >> 56 & INDEX_USED;
	}
	if (used != sp->index_used || used != t->lines)
		return broken(e,
			"index of space %u: %llu lines in use, %llu belong to a page, counted as %llu",
			sp->ix, llu(used), llu(t->lines), llu(sp->index_used));
	for (i = 0; i < sp->index->nr_words; i++)
		words += atomic_load_explicit(&w8[i], memory_order_relaxed) &
			 INDEX_USED;
	if (words != sp->below_used || words != t->words)
		return broken(e,
			"index of space %u: %llu words in use, %llu belong to a page, counted as %llu",
			sp->ix, llu(words), llu(t->words), llu(sp->below_used));
	return 0;
}

static int check_space(const struct mm_space *sp, uint64_t bytes[],
		       struct errmsg *e)
{
	struct tally *t = calloc(1, sizeof(*t));
	const struct page *pg;
	unsigned int n;
	uint64_t i;
	int err = 0;

	if (!t)
		return errmsg_set(e, -ENOMEM, "out of memory");
	for (i = 0; i < sp->hash_size && !err; i++)
		for (pg = sp->hash[i].first; pg && !err; pg = pg->hnext)
			err = check_page(pg, t, e);
	if (!err && t->nr_pages != sp->nr_pages)
		err = broken(e, "space %u: %llu pages, counted as %llu", sp->ix,
			     llu(t->nr_pages), llu(sp->nr_pages));
	if (!err)
		err = check_pools_of(sp, t, e);
	if (!err && sp->index)
		err = check_index(sp, t, e);
	for (n = 0; n < sp->mm->nr_nodes; n++)
		bytes[n] += t->bytes[n];
	free(t);
	return err;
}

static int check_node(const struct mm_node *nd, uint64_t bytes_pages,
		      struct errmsg *e)
{
	const struct mm_pool *p;
	unsigned int putting = 0;
	uint64_t bytes = 0;
	int err;

	if (nd->bytes_pages != bytes_pages)
		return broken(e, "node %u: %llu bytes of pages, counted as %llu",
			      nd->ix, llu(bytes_pages), llu(nd->bytes_pages));
	if (!node_check(nd->node))
		return broken(e, "node %u: its own laws do not hold", nd->ix);
	if (!nd->mem)
		return 0;
	list_for_each_entry(p, &nd->pools, node_link) {
		struct errmsg why;

		err = check_memory_pool(p, &bytes, &why);
		if (err)
			return errmsg_set(e, err, "space %u, class %u, node %u: %.180s",
					  p->space->ix, p->cls, nd->ix,
					  why.text);
		putting += p->extents_putting;
	}
	/* what is on its way back is charged until the node says so */
	if (putting ? nd->node->used < bytes : nd->node->used != bytes)
		return broken(e, "node %u: %llu bytes in extents, charged %llu",
			      nd->ix, llu(bytes), llu(nd->node->used));
	return 0;
}

static int check_engine(struct mm *mm, const struct mm_engine *en,
			struct errmsg *e)
{
	uint64_t open = 0, quarantine = 0;
	unsigned int i;
	uint32_t no, f, end;

	for (i = 0; i < mm->nr_nodes; i++) {
		const struct mm_pool *p;

		if (!mm->node[i].mem)
			continue;
		list_for_each_entry(p, &mm->node[i].pools, node_link) {
			for (no = 1; no <= p->max_extents; no++) {
				if (!p->extent[no].ext)
					continue;
				f = no * p->per_extent;
				end = f + p->per_extent;
				for (; f < end; f++) {
					if (p->meta[f].owner != en)
						continue;
					if (frame_word_state(frame_word_of(p, f))
					    == FRAME_OPEN)
						open++;
					else
						quarantine++;
				}
			}
		}
	}
	if (open != en->nr_open || quarantine != en->nr_quarantine)
		return broken(e,
			"engine %u: %llu OPEN frames, %llu in quarantine; counted as %llu, %llu",
			en->no, llu(open), llu(quarantine), llu(en->nr_open),
			llu(en->nr_quarantine));
	return 0;
}

int mm_check(struct mm *mm, struct errmsg *e)
{
	uint64_t bytes[KVMM_MAX_NODES] = { 0 };
	const struct mm_engine *en;
	const struct mm_space *sp;
	unsigned int i;
	int err;

	list_for_each_entry(sp, &mm->spaces, link) {
		err = check_space(sp, bytes, e);
		if (err)
			return err;
	}
	for (i = 0; i < mm->nr_nodes; i++) {
		err = check_node(&mm->node[i], bytes[i], e);
		if (err)
			return err;
	}
	list_for_each_entry(en, &mm->engines, link) {
		err = check_engine(mm, en, e);
		if (err)
			return err;
	}
	return check_io(mm, e);
}
