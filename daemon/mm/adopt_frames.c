/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking over frames, and making pages of them again (model: tests/model/adopt.pml).
 *
 * The word says what the last daemon was about, the record whose bytes they are:
 *
 *	READY, good record	a page
 *	ISOLATED, good record	the last daemon died between its exchange and its
 *				decision: a page, and if nobody pins it reclaim
 *				will find it again
 *	LOADING, good record	a page whose parent was waited for (STRAY_ORPHAN)
 *	READY, ISOLATED		of no use; not reused before its last unpin
 *	LOADING			the last daemon's I/O may still write to it: not
 *				reused before that is over (keep_store.c)
 *	OPEN			its window's, if it ever got there; else free
 *	FREE, QUARANTINE	free: whoever wrote to the latter is dead
 *
 * Generations go on from the words, also of frames that are nobody's.
 *
 * Pages come in three passes, since a parent may lie anywhere: all are made; each
 * finds its parent; then each that is of use is linked and may be found. One that
 * is bound and has lost its parent is of no use, and nor is what hangs on it; if
 * there is a block node its parent may come from there, so they wait.
 */
#include <string.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/tier.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"

#define EXPECT_NS	(300 * NSEC_PER_MSEC)	/* to make an index ready, at most */

/* -- records --------------------------------------------------------------------- */

bool record_good(const struct mm_pool *p, const struct frame_record *r,
		 uint64_t gen)
{
	const struct desc *d = &p->space->desc;

	return r->gen == gen && r->gen &&
	       r->crc == kvmm_crc32c(0, r, offsetof(struct frame_record, crc)) &&
	       !memcmp(r->space_id, p->space->id, sizeof(r->space_id)) &&
	       r->group < d->ngroups && d->group[r->group].class_ix == p->cls &&
	       r->raw_bytes == p->page_bytes && !r->format;
}

uint8_t record_page_flags(const struct frame_record *r)
{
	uint8_t flags = 0;

	if (r->flags & FRAME_REC_ROOT)
		flags |= PAGE_ROOT;
	if (r->flags & FRAME_REC_BOUND)
		flags |= PAGE_BOUND;
	if (r->flags & FRAME_REC_CRC)
		flags |= PAGE_CRC;
	return flags;
}

struct page *record_page(struct mm_space *sp, const struct frame_record *r,
			 struct page *parent)
{
	struct page *pg;
	uint64_t key[4];

	memcpy(key, r->key, sizeof(key));
	pg = page_create(sp, r->group, key, parent, record_page_flags(r));
	if (!pg)
		return NULL;
	pg->pos = r->pos;
	pg->cost_us = r->cost_us;
	pg->crc = r->data_crc;
	return pg;
}

static bool has_parent(const struct frame_record *r)
{
	uint64_t k[4];

	memcpy(k, r->parent, sizeof(k));
	return (k[0] | k[1] | k[2] | k[3]) && !(r->flags & FRAME_REC_ROOT);
}

/* -- first: every frame ---------------------------------------------------------- */

static void frame_free(struct mm_pool *p, struct mm_extent *x, uint32_t f,
		       uint64_t gen)
{
	if (frame_word_of(p, f) != frame_word(gen, FRAME_FREE))
		frame_word_set(p, f, frame_word(gen, FRAME_FREE));
	frame_forget(p, f);
	p->meta[f] = (struct frame_meta){ .gen = gen };
	p->free[(size_t)x->no * p->per_extent + x->nr_free++] = f;
	x->nr_used--;
}

/*
 * The window that an OPEN frame is with; NULL: it never got there. It may be void:
 * its client may still write to what it has been given, as long as it lives.
 */
static struct mm_win *frame_holder(const struct mm_pool *p, uint64_t owner)
{
	uint32_t handle = keep_owner_handle(owner), ahead;
	struct mm_win *w = NULL;

	if (handle && handle <= KEEP_WINS)
		w = p->space->mm->keep->holder[handle - 1];
	if (!w || w->pool != p)
		return NULL;
	/* it was taken for a place that the tail has not passed */
	ahead = (uint32_t)owner - w->mag_tail;
	return ahead < p->max_frames ? NULL : w;
}

static bool frame_take_over(struct mm_pool *p, uint32_t f)
{
	uint64_t owner = atomic_load_explicit(&p->owner[f],
					      memory_order_relaxed);
	struct frame_meta *m = &p->meta[f];
	struct mm_win *w = frame_holder(p, owner);

	if (!w)
		return false;
	m->owner = w->engine;
	m->win = w;
	w->nr_open++;
	w->engine->nr_open++;
	p->nr_open++;
	p->space->mm->adopted.open++;
	return true;
}

/* Of no use: free, unless somebody pins it. */
static bool frame_let_go(struct mm_pool *p, uint32_t f, uint64_t gen)
{
	/* seq_cst, and the pins after it: see isolate_and_sum() in frame.c */
	atomic_exchange_explicit(&p->table->word[f],
				 frame_word(gen, FRAME_ISOLATED),
				 memory_order_seq_cst);
	return !frame_pins(p, f);
}

/* A page's frame; the page has no parent and no copy yet. False: it is no good. */
static bool frame_page(struct mm_pool *p, uint32_t f)
{
	const struct frame_record *r = &p->record[f];
	struct mm_space *sp = p->space;
	struct page *pg;
	struct copy *c;
	uint64_t key[4];
	bool made;

	memcpy(key, r->key, sizeof(key));
	pg = page_find(sp, r->group, key);
	made = !pg;
	if (made) {
		pg = record_page(sp, r, NULL);
		if (!pg)
			return false;
		pg->flags |= PAGE_ADOPT;
	}
	c = copy_get(pg, p->nd);
	if (!c && made)
		page_put(pg);
	if (!c || c->frame)
		return false;		/* it is in another frame already */
	page_crc_agree(pg, r->flags & FRAME_REC_CRC, r->data_crc);
	c->frame = f;
	pg->strikes++;			/* frames that it has, for now */
	p->meta[f].page = pg;
	return true;
}

/* True: what becomes of it is decided; else it is free. */
static bool frame_look(struct mm_pool *p, uint32_t f, uint64_t word, bool keep)
{
	uint64_t gen = frame_word_gen(word);
	enum frame_state st = frame_word_state(word);

	switch (st) {
	case FRAME_OPEN:
		return frame_take_over(p, f);
	case FRAME_LOADING:
	case FRAME_READY:
	case FRAME_ISOLATED:
		break;
	default:
		return false;
	}
	if (record_good(p, &p->record[f], gen)) {
		if (!keep && st != FRAME_LOADING && frame_let_go(p, f, gen)) {
			p->space->mm->adopted.lost++;
			return false;
		}
		if (frame_page(p, f))
			return true;
	}
	if (st == FRAME_LOADING) {
		stray_add(p, f, STRAY_IO);
		return true;
	}
	p->space->mm->adopted.lost++;
	if (frame_let_go(p, f, gen))
		return false;
	stray_add(p, f, STRAY_PINNED);
	return true;
}

/*
 * Nearly all of the time goes to memory that is in no cache: a record, the place
 * of its key in the hash, and so on. It is fetched some frames ahead, each by what
 * was fetched before it.
 */
#define AHEAD_RECORD	24u
#define AHEAD_KEY	12u

static void record_prefetch(const struct mm_pool *p, uint32_t f)
{
	__builtin_prefetch(&p->record[f]);
	__builtin_prefetch((const char *)&p->record[f] + 64);
}

static void key_prefetch(const struct mm_pool *p, uint32_t f)
{
	const struct frame_record *r = &p->record[f];
	uint64_t key[4];

	if (r->group >= p->space->desc.ngroups)
		return;
	memcpy(key, r->key, sizeof(key));
	page_prefetch(p->space, r->group, key);
}

/* What is looked at frame by frame costs a fault for a few of them each time. */
static void extent_map(const struct mm_pool *p, uint32_t no)
{
	size_t first = (size_t)no * p->per_extent, n = p->per_extent;

	ahead_map(&p->record[first], n * sizeof(*p->record), false);
	ahead_map(&p->meta[first], n * sizeof(*p->meta), true);
}

/* From the top, so that the lowest is the first to be handed out. */
static void extent_scan(struct mm_pool *p, uint32_t no, bool keep)
{
	struct mm_extent *x = &p->extent[no];
	uint32_t f = (no + 1) * p->per_extent, first = no * p->per_extent;

	extent_map(p, no);
	while (f-- > first) {
		uint64_t word = frame_word_of(p, f);

		if (f >= first + AHEAD_RECORD)
			record_prefetch(p, f - AHEAD_RECORD);
		if (f >= first + AHEAD_KEY)
			key_prefetch(p, f - AHEAD_KEY);
		p->meta[f].gen = frame_word_gen(word);
		if (!frame_look(p, f, word, keep))
			frame_free(p, x, f, frame_word_gen(word));
	}
}

/* Words of @p that may be pages'. */
static uint64_t pool_expects(const struct mm_pool *p)
{
	uint64_t n = 0;
	uint32_t no, f, end;

	for (no = 1; no <= p->max_extents; no++) {
		if (!p->extent[no].ext)
			continue;
		f = no * p->per_extent;
		for (end = f + p->per_extent; f < end; f++)
			n += frame_word_state(frame_word_of(p, f)) ==
			     FRAME_READY;
	}
	return n;
}

static void pool_scan(struct mm_pool *p, unsigned int share_pct)
{
	uint32_t left = ((uint64_t)p->nr_extents * share_pct + 99) / 100, no;

	for (no = 1; no <= p->max_extents; no++) {
		if (!p->extent[no].ext)
			continue;
		extent_scan(p, no, left);
		left -= left > 0;
		/* what windows were told to unmap had nothing in it */
		extent_adopted(p, no, p->extent[no].down_seq);
	}
}

/* -- second: parents ------------------------------------------------------------- */

typedef void frame_fn(struct mm_pool *p, uint32_t f, struct page *pg);

/* All frames of @p that have a page; @ahead is called some before @fn. */
static void for_each_page_frame(struct mm_pool *p, frame_fn *ahead,
				frame_fn *fn)
{
	uint32_t no, f, end;

	for (no = 1; no <= p->max_extents; no++) {
		if (!p->extent[no].ext || !p->extent[no].nr_used)
			continue;
		f = no * p->per_extent;
		for (end = f + p->per_extent; f < end; f++) {
			uint32_t next = f + AHEAD_KEY;

			if (f + AHEAD_RECORD < end &&
			    p->meta[f + AHEAD_RECORD].page)
				__builtin_prefetch(p->meta[f + AHEAD_RECORD]
						   .page, 1);
			if (next < end && p->meta[next].page)
				ahead(p, next, p->meta[next].page);
			if (p->meta[f].page)
				fn(p, f, p->meta[f].page);
		}
	}
}

static void for_each_pool(struct mm *mm, void (*fn)(struct mm_pool *p))
{
	struct mm_pool *p;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		list_for_each_entry(p, &mm->node[i].pools, node_link)
			if (p->adopted)
				fn(p);
}

static bool is_key(const struct page *pg, const struct frame_record *r)
{
	return pg && pg->group == r->group &&
	       !memcmp(pg->key, r->parent, sizeof(r->parent));
}

/* Pages of a chain often lie side by side; then there is nothing to look for. */
static struct page *beside(const struct mm_pool *p, uint32_t f)
{
	return f % p->per_extent ? p->meta[f - 1].page : NULL;
}

static void parent_ahead(struct mm_pool *p, uint32_t f, struct page *pg)
{
	const struct frame_record *r = &p->record[f];
	uint64_t key[4];

	if (is_key(beside(p, f), r))
		return;
	memcpy(key, r->parent, sizeof(key));
	page_prefetch_first(p->space, r->group, key);
}

static void parent_find(struct mm_pool *p, uint32_t f, struct page *pg)
{
	const struct frame_record *r = &p->record[f];
	uint64_t key[4];

	if (f + AHEAD_RECORD < p->max_frames)
		record_prefetch(p, f + AHEAD_RECORD);
	if (pg->parent || !has_parent(r))
		return;
	memcpy(key, r->parent, sizeof(key));
	pg->parent = beside(p, f);
	if (!is_key(pg->parent, r))
		pg->parent = page_find(p->space, r->group, key);
	if (!pg->parent && (pg->flags & PAGE_BOUND))
		pg->flags |= PAGE_ORPHAN;
}

static void parents_find(struct mm_pool *p)
{
	for_each_page_frame(p, parent_ahead, parent_find);
}

/* -- third: which are of use ----------------------------------------------------- */

/*
 * Is all that @pg is bound to there? Each page is decided once: the way up ends at
 * the first that is, and all on it get the same answer.
 */
static bool page_settle(struct page *pg)
{
	uint64_t left = pg->space->nr_pages + 1;
	struct page *top = pg, *next;
	bool orphan;

	while ((top->flags & PAGE_ADOPT) && !(top->flags & PAGE_ORPHAN) &&
	       page_bound(top) && left--)
		top = top->parent;
	orphan = (top->flags & PAGE_ORPHAN) || left == UINT64_MAX;
	for (; pg != top; pg = next) {
		next = pg->parent;
		pg->flags &= ~PAGE_ADOPT;
		pg->flags |= orphan ? PAGE_ORPHAN : 0;
	}
	top->flags &= ~PAGE_ADOPT;
	return !orphan;
}

static void page_link(struct page *pg)
{
	struct page *up = pg->parent;

	if (!up || !list_empty(&pg->sibling))
		return;
	if (!page_bound(pg) && !page_settle(up)) {
		pg->parent = NULL;
		return;
	}
	up->nr_bound += page_bound(pg);
	list_add_tail(&up->children, &pg->sibling);
}

static void enter_ahead(struct mm_pool *p, uint32_t f, struct page *pg)
{
	index_prefetch(p->space, pg->key, pg->group, p->nd->ix);
	if (pg->parent)
		__builtin_prefetch(pg->parent, 1);
}

static void page_enter(struct mm_pool *p, uint32_t f, struct page *pg)
{
	struct frame_meta *m = &p->meta[f];

	if (!page_settle(pg))
		return;			/* third and a half: page_leave() */
	page_link(pg);
	pg->strikes = 0;
	if (frame_word_of(p, f) != frame_word(m->gen, FRAME_READY))
		frame_word_set(p, f, frame_word(m->gen, FRAME_READY));
	copy_set_state(pg, p->nd, COPY_READY);
	p->space->mm->adopted.frames++;
}

static void pages_enter(struct mm_pool *p)
{
	for_each_page_frame(p, enter_ahead, page_enter);
}

static void page_leave(struct mm_pool *p, uint32_t f, struct page *pg)
{
	if (!(pg->flags & PAGE_ORPHAN))
		return;
	p->meta[f].page = NULL;
	pg->parent = NULL;
	stray_add(p, f, STRAY_ORPHAN);
	if (!--pg->strikes)
		page_put(pg);
}

static void no_ahead(struct mm_pool *p, uint32_t f, struct page *pg)
{
}

static void pages_leave(struct mm_pool *p)
{
	for_each_page_frame(p, no_ahead, page_leave);
}

/* -- frames that were freed after a step ----------------------------------------- */

static void free_again(struct mm_pool *p)
{
	uint32_t no, f, end;

	for (no = 1; p->nr_open && no <= p->max_extents; no++) {
		if (!p->extent[no].ext || !p->extent[no].nr_used)
			continue;
		f = no * p->per_extent;
		for (end = f + p->per_extent; f < end; f++) {
			struct mm_win *w = p->meta[f].win;
			uint64_t owner;

			if (!w)
				continue;
			owner = atomic_load_explicit(&p->owner[f],
						     memory_order_relaxed);
			if (owner & KEEP_FREED)
				mm_free(w, &f, 1,
					*keep_freed_step(&p->record[f]));
		}
	}
}

/* -- all of it ------------------------------------------------------------------- */

/* Room for what will come to @sp; how many. */
static uint64_t space_expect(struct mm_space *sp)
{
	uint64_t n = 0;
	unsigned int c, i;

	for (c = 0; c < sp->desc.nclasses; c++)
		for (i = 0; i < sp->mm->nr_nodes; i++)
			if (sp->pool[c][i] && sp->pool[c][i]->adopted)
				n += pool_expects(sp->pool[c][i]);
	page_reserve(sp, n);
	index_expect(sp, n);
	return n;
}

int adopt_frames(struct mm *mm, unsigned int share_pct, struct errmsg *e)
{
	struct mm_space *sp;
	struct mm_pool *p;
	uint64_t n = 0;
	unsigned int i;

	list_for_each_entry(sp, &mm->spaces, link)
		n += space_expect(sp);
	/* nobody else wants the worker yet */
	ahead_begin(mm, &mm->pages_ahead, &mm->pages, n, SIZE_MAX);
	ahead_begin(mm, &mm->copies_ahead, &mm->copies, n, SIZE_MAX);
	for (i = 0; i < mm->nr_nodes; i++)
		list_for_each_entry(p, &mm->node[i].pools, node_link)
			if (p->adopted)
				pool_scan(p, share_pct);
	aheads_end(mm);
	for_each_pool(mm, parents_find);
	list_for_each_entry(sp, &mm->spaces, link)
		index_expected(sp, deadline_in(EXPECT_NS));
	for_each_pool(mm, pages_enter);
	for_each_pool(mm, pages_leave);
	for_each_pool(mm, free_again);
	for_each_pool(mm, pool_publish_avail);
	stray_begin(mm);
	return 0;
}
