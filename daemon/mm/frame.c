/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames of a memory pool: words, records, free stacks, isolation.
 *
 * ipc/frame.h has the states and the pin protocol. What this file keeps:
 *
 *   - the generation advances when a frame is sealed, and at no other time;
 *     its top 16 bits are the daemon's epoch, so that it never starts again
 *   - a record is written, checksum last, before the word turns READY, and made
 *     invalid after the word has left READY: a daemon that adopts the memory
 *     never believes a record of other bytes
 *   - isolation exchanges the word first and loads the list of windows and
 *     their pins after it, all seq_cst. A client that pinned before the
 *     exchange is seen; one that pins after it sees ISOLATED
 *
 * Free frames are stacked by extent, so that an extent can be closed at once,
 * and the lowest-numbered extent is used first: higher ones run empty and can
 * be given back.
 */
#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"

static void word_store(struct mm_pool *p, uint32_t f, uint64_t word)
{
	/*
	 * release: a client that loads READY (acquire or seq_cst) sees the
	 * bytes of the page, the record and everything else before it
	 */
	atomic_store_explicit(&p->table->word[f], word, memory_order_release);
}

void frame_word_set(struct mm_pool *p, uint32_t f, uint64_t word)
{
	word_store(p, f, word);
}

uint64_t frame_word_of(const struct mm_pool *p, uint32_t f)
{
	/* the daemon is the only writer */
	return atomic_load_explicit(&p->table->word[f], memory_order_relaxed);
}

static enum frame_state state_of(const struct mm_pool *p, uint32_t f)
{
	return frame_word_state(frame_word_of(p, f));
}

void *frame_part(const struct mm_pool *p, uint32_t f, uint32_t rank)
{
	char *base = p->extent[f / p->per_extent].ext->addr;

	return base + rank * pool_part_bytes(p) +
	       (size_t)(f % p->per_extent) * p->stride;
}

struct image frame_image(const struct mm_pool *p, uint32_t f, uint32_t len)
{
	struct image im = { .sh = p->shape, .len = len };
	uint32_t rank;

	for (rank = 0; rank < p->parts; rank++)
		im.part[rank] = frame_part(p, f, rank);
	return im;
}

/* -- free stacks ----------------------------------------------------------- */

static uint32_t stack_pop(struct mm_pool *p, struct mm_extent *e)
{
	uint32_t f = p->free[(size_t)e->no * p->per_extent + --e->nr_free];

	e->nr_used++;
	p->nr_free--;
	if (!e->nr_free)
		bitmap_clear(p->free_map, e->no);
	return f;
}

static void stack_push(struct mm_pool *p, uint32_t f)
{
	struct mm_extent *e = &p->extent[f / p->per_extent];

	p->free[(size_t)e->no * p->per_extent + e->nr_free++] = f;
	e->nr_used--;
	if (e->going)
		return;
	p->nr_free++;
	bitmap_set(p->free_map, e->no);
}

/* A word on its way from FREE; the generation stays. */
static void word_take(struct mm_pool *p, uint32_t f, enum frame_state st)
{
	word_store(p, f, frame_word(p->meta[f].gen, st));
	if (st == FRAME_LOADING)
		p->nr_loading++;
	else
		p->nr_open++;
}

uint32_t frame_take(struct mm_pool *p, enum frame_use use, enum frame_state st)
{
	uint32_t keep = use == FRAME_FOR_LOAD ? 0 : p->reserve;
	size_t e;
	uint32_t f;

	if (p->nr_free <= keep)
		return 0;
	e = bitmap_next_set(p->free_map, p->max_extents + 1, 0);
	f = stack_pop(p, &p->extent[e]);
	word_take(p, f, st);
	p->used_ns = p->space->mm->now_ns;
	return f;
}

/* Before the word turns OPEN, whose release orders it. */
static void owner_set(struct mm_pool *p, uint32_t f, uint64_t owner)
{
	atomic_store_explicit(&p->owner[f], owner, memory_order_relaxed);
}

void frame_freed(struct mm_pool *p, uint32_t f, uint64_t step)
{
	uint64_t owner = atomic_load_explicit(&p->owner[f],
					      memory_order_relaxed);

	*keep_freed_step(&p->record[f]) = step;
	/* release: who finds the flag after our death finds the step */
	atomic_store_explicit(&p->owner[f], owner | KEEP_FREED,
			      memory_order_release);
}

uint32_t frame_take_open(struct mm_pool *p, struct mm_win *w, uint32_t *out,
			 uint32_t n)
{
	size_t words = BITMAP_WORDS(p->max_extents + 1), i;
	uint32_t got = 0;

	for (i = 0; i < words && got < n; i++) {
		uint64_t bits = p->free_map[i];

		if (bits)
			bits &= win_mapped(w, i);
		while (bits && got < n) {
			size_t no = i * 64 + (size_t)__builtin_ctzll(bits);
			struct mm_extent *e = &p->extent[no];

			bits &= bits - 1;
			while (e->nr_free && got < n) {
				uint32_t f = stack_pop(p, e);

				owner_set(p, f, keep_owner(w->keep, w->mag_tail +
								    got));
				word_take(p, f, FRAME_OPEN);
				mm_point();
				p->meta[f].owner = w->engine;
				p->meta[f].win = w;
				out[got++] = f;
			}
		}
	}
	w->nr_open += got;
	w->engine->nr_open += got;
	if (got)
		p->used_ns = p->space->mm->now_ns;
	return got;
}

/* An OPEN frame leaves its engine's hands. */
static void frame_disown(struct mm_pool *p, struct frame_meta *m)
{
	p->nr_open--;
	if (m->owner)
		m->owner->nr_open--;
	if (m->win)
		m->win->nr_open--;
	m->owner = NULL;
	m->win = NULL;
	m->flags = 0;
}

void frame_forget(struct mm_pool *p, uint32_t f)
{
	struct frame_record *r = &p->record[f];

	if (!r->gen)
		return;
	r->gen = 0;
	r->crc = ~r->crc;
}

void frame_put(struct mm_pool *p, uint32_t f)
{
	struct frame_meta *m = &p->meta[f];

	switch (state_of(p, f)) {
	case FRAME_OPEN:
		frame_disown(p, m);
		break;
	case FRAME_LOADING:
		p->nr_loading--;
		break;
	case FRAME_QUARANTINE:
		p->nr_quarantine--;
		m->owner->nr_quarantine--;
		break;
	default:
		break;
	}
	*m = (struct frame_meta){ .gen = m->gen };
	mm_point();
	word_store(p, f, frame_word(m->gen, FRAME_FREE));
	mm_point();
	frame_forget(p, f);
	stack_push(p, f);
}

void frame_quarantine(struct mm_pool *p, uint32_t f)
{
	struct frame_meta *m = &p->meta[f];
	struct mm_engine *owner = m->owner;

	frame_disown(p, m);
	m->owner = owner;
	owner->nr_quarantine++;
	p->nr_quarantine++;
	word_store(p, f, frame_word(m->gen, FRAME_QUARANTINE));
}

/* -- references ------------------------------------------------------------ */

void frame_ref(struct mm_pool *p, uint32_t f)
{
	p->meta[f].refs++;
}

void frame_unref(struct mm_pool *p, uint32_t f)
{
	struct frame_meta *m = &p->meta[f];

	if (!m->refs)
		return;		/* its window was closed meanwhile */
	if (--m->refs == 0 && state_of(p, f) == FRAME_QUARANTINE)
		frame_zero(p, f);
}

/* -- sealing --------------------------------------------------------------- */

static void record_write(struct mm_pool *p, uint32_t f, const struct page *pg,
			 uint64_t gen)
{
	struct frame_record *r = &p->record[f];

	memset(r, 0, sizeof(*r));
	memcpy(r->key, pg->key, sizeof(r->key));
	if (pg->parent)
		memcpy(r->parent, pg->parent->key, sizeof(r->parent));
	memcpy(r->space_id, p->space->id, sizeof(r->space_id));
	r->gen = gen;
	r->raw_bytes = pg->raw_bytes;
	r->stored_bytes = pg->raw_bytes;
	r->cost_us = pg->cost_us;
	r->pos = pg->pos;
	r->group = pg->group;
	if (pg->flags & PAGE_CRC) {
		r->data_crc = pg->crc;
		r->flags |= FRAME_REC_CRC;
	}
	if (pg->flags & PAGE_ROOT)
		r->flags |= FRAME_REC_ROOT;
	if (pg->flags & PAGE_BOUND)
		r->flags |= FRAME_REC_BOUND;
	mm_point();
	r->crc = kvmm_crc32c(0, r, offsetof(struct frame_record, crc));
}

static uint64_t next_gen(const struct mm *mm, uint64_t gen)
{
	uint64_t base = (mm->o.epoch & 0xffff) << FRAME_GEN_EPOCH_SHIFT;

	if (mm_broken(mm, MM_BREAK_GENERATION))
		return base + 1;
	return max(gen, base) + 1;
}

void frame_seal(struct mm_pool *p, uint32_t f, struct page *pg)
{
	struct frame_meta *m = &p->meta[f];
	struct mm_node *nd = p->nd;
	uint64_t gen = next_gen(p->space->mm, m->gen);

	if (state_of(p, f) == FRAME_OPEN)
		frame_disown(p, m);
	else
		p->nr_loading--;
	record_write(p, f, pg, gen);
	m->page = pg;
	m->gen = gen;
	mm_point();
	word_store(p, f, frame_word(gen, FRAME_READY));
	mm_point();
	page_copy(pg, nd)->frame = f;
	copy_set_state(pg, nd, COPY_READY);
}

/* -- isolation ------------------------------------------------------------- */

uint64_t frame_pins(const struct mm_pool *p, uint32_t f)
{
	uint64_t sum = 0;
	struct mm_win *w;

	/* seq_cst: pairs with the client's increment, see frame_isolate() */
	list_for_each_entry(w, &p->windows, pool_link)
		sum += atomic_load_explicit(&w->pins[f], memory_order_seq_cst);
	return sum;
}

bool frame_busy(const struct mm_pool *p, uint32_t f)
{
	const struct frame_meta *m = &p->meta[f];

	if (m->refs || (m->page && page_copy(m->page, p->nd)->refs))
		return true;
	return frame_pins(p, f);
}

/* Word first, pins after: a pin that this sum misses sees ISOLATED. */
static uint64_t isolate_and_sum(struct mm_pool *p, uint32_t f)
{
	uint64_t isolated = frame_word(p->meta[f].gen, FRAME_ISOLATED);
	uint64_t pins;

	if (mm_broken(p->space->mm, MM_BREAK_BARRIER)) {
		pins = frame_pins(p, f);
		atomic_store_explicit(&p->table->word[f], isolated,
				      memory_order_relaxed);
		return pins;
	}
	/* seq_cst: pairs with the client's load of the word after its pin */
	atomic_exchange_explicit(&p->table->word[f], isolated,
				 memory_order_seq_cst);
	mm_point();
	return frame_pins(p, f);
}

bool frame_isolate(struct mm_pool *p, uint32_t f)
{
	struct frame_meta *m = &p->meta[f];
	struct page *pg = m->page;

	if (m->refs || page_copy(pg, p->nd)->refs)
		return false;
	/* nearly always it goes, and then these two are wanted */
	index_prefetch(p->space, pg->key, pg->group, p->nd->ix);
	page_prefetch(p->space, pg->group, pg->key);
	if (isolate_and_sum(p, f)) {
		word_store(p, f, frame_word(m->gen, FRAME_READY));
		p->nd->c.isolate_pinned++;
		return false;
	}
	m->page = NULL;
	copy_set_state(pg, p->nd, COPY_NONE);
	return true;
}
