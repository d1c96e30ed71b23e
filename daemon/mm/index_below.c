/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The writer of an index's words, see ipc/index.h: what lives on nodes that cannot
 * be mapped.
 *
 * A word goes to the emptier of its two buckets. If both are full one of the
 * sixteen occupants is moved to its other bucket, which follows from its tag; what
 * still finds no place pushes another one out: that page is a miss until it is set
 * again, and is counted. At two thirds of the words in use, from where on the table
 * grows, that happens to one page in many millions.
 *
 * Two pages with one tag in one bucket cannot be told apart by it, and need not be:
 * each has a word; what either is told is true of one of them, and the daemon knows
 * better when it is asked.
 *
 * Growth. A tag says too little to find the place in a larger table, so that is
 * filled from the pages themselves.
 */
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"

typedef _Atomic uint64_t word;

static word *words_of(struct index *ix)
{
	return (word *)&ix->line[ix->nr_lines];
}

static uint64_t peek(const word *w)
{
	return atomic_load_explicit(w, memory_order_relaxed);
}

/* Relaxed: whatever a reader sees of it, it sees all of it. */
static void poke(word *w, uint64_t val)
{
	atomic_store_explicit(w, val, memory_order_relaxed);
}

static struct index_below hash_of(const struct index *ix, const struct page *pg)
{
	return index_below(ix->nr_words, ix->seed, pg->key, pg->group);
}

static word *word_find(struct index *ix, struct index_below h)
{
	word *w = words_of(ix);
	unsigned int i;

	for (i = 0; i < 2 * INDEX_WORDS; i++) {
		word *at = &w[(i < INDEX_WORDS ? h.home : h.other) +
			      i % INDEX_WORDS];

		if ((peek(at) & INDEX_USED) &&
		    peek(at) >> INDEX_TAG_SHIFT == h.tag)
			return at;
	}
	return NULL;
}

/* The first free word of a bucket, and how many there are. */
static unsigned int bucket_free(word *bucket, word **first)
{
	unsigned int i, n = 0;

	*first = NULL;
	for (i = 0; i < INDEX_WORDS; i++) {
		if (peek(&bucket[i]) & INDEX_USED)
			continue;
		if (!n++)
			*first = &bucket[i];
	}
	return n;
}

/* Let one of a full bucket go to its other one; the place that it leaves. */
static word *bucket_move(word *w, uint64_t bucket)
{
	unsigned int i;

	for (i = 0; i < INDEX_WORDS; i++) {
		word *from = &w[bucket + i], *to;
		uint64_t val = peek(from);

		if (!bucket_free(&w[index_below_other(bucket, (uint32_t)
					(val >> INDEX_TAG_SHIFT))], &to))
			continue;
		poke(to, val);
		return from;
	}
	return NULL;
}

static word *place(struct index *ix, struct index_below h)
{
	word *w = words_of(ix), *home, *other;
	unsigned int n = bucket_free(&w[h.home], &home);

	if (n == INDEX_WORDS)
		return home;
	if (bucket_free(&w[h.other], &other) > n)
		return other;
	if (n)
		return home;
	home = bucket_move(w, h.home);
	return home ? home : bucket_move(w, h.other);
}

static uint64_t word_of(const struct page *pg, uint32_t tag,
			const struct below *b)
{
	return index_word(tag, INDEX_USED | (b->pending ? INDEX_PENDING : 0),
			  (uint16_t)b->nodes, b->source, pg->cost_us);
}

static void word_add(struct mm_space *sp, struct index *ix,
		     const struct page *pg, const struct below *b)
{
	struct index_below h = hash_of(ix, pg);
	word *at = place(ix, h);

	if (at) {
		sp->below_used++;
	} else {
		at = &words_of(ix)[h.home];
		sp->index_pushed++;
	}
	poke(at, word_of(pg, h.tag, b));
}

void index_below_fill(struct mm_space *sp, struct index *ix)
{
	const struct page *pg;
	uint64_t i;

	sp->below_used = 0;
	for (i = 0; i < sp->hash_size; i++) {
		for (pg = sp->hash[i].first; pg; pg = pg->hnext) {
			struct below b = page_below(pg);

			if (!(pg->flags & PAGE_BAD) && (b.nodes || b.pending))
				word_add(sp, ix, pg, &b);
		}
	}
}

static bool full(const struct mm_space *sp)
{
	return sp->below_used >= sp->index->nr_words - sp->index->nr_words / 3;
}

void index_below_add(struct mm_space *sp, const struct page *pg,
		     const struct below *b)
{
	uint64_t nr = max(2 * sp->index->nr_words, (uint64_t)INDEX_WORD_SPAN);

	if (full(sp) && !index_grow(sp, sp->index->nr_lines, nr) &&
	    word_find(sp->index, hash_of(sp->index, pg)))
		return;		/* filled from the pages, and so from @pg */
	if (sp->index->nr_words)
		word_add(sp, sp->index, pg, b);
}

void index_below_set(struct mm_space *sp, const struct page *pg,
		     const struct below *b)
{
	struct index_below h;
	word *at;

	if (sp->index->nr_words) {
		h = hash_of(sp->index, pg);
		at = word_find(sp->index, h);
		if (at) {
			poke(at, word_of(pg, h.tag, b));
			return;
		}
	}
	index_below_add(sp, pg, b);
}

void index_below_clear(struct mm_space *sp, const struct page *pg)
{
	word *at = sp->index->nr_words ?
		   word_find(sp->index, hash_of(sp->index, pg)) : NULL;

	if (!at)
		return;		/* it was pushed out, or never there */
	poke(at, 0);
	sp->below_used--;
}

void index_below_prefetch(const struct mm_space *sp, const uint64_t key[4],
			  uint16_t group)
{
	const struct index *ix = sp->index;
	const _Atomic uint64_t *w;
	struct index_below h;

	if (!ix->nr_words)
		return;
	h = index_below(ix->nr_words, ix->seed, key, group);
	w = index_words(ix, ix->nr_lines);
	__builtin_prefetch((const void *)&w[h.home], 1);
	__builtin_prefetch((const void *)&w[h.other], 1);
}
