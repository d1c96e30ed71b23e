/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hot path: find pages and pin them, without a system call and without the
 * daemon. It costs four cache misses a page (index line, frame word, pin, key),
 * and what is done here is mostly to have them at the same time:
 *
 *   pass 1	hash the keys, prefetch their home lines
 *   pass 2	where the home line is another page's, prefetch the other line
 *   pass 3	read the lines, prefetch the frames' words and pins
 *   pass 4	count all pins
 *   pass 5	load all words and compare them
 *
 * Each prefetch misses the TLB, too, and stays in the core's pipeline until its
 * page walk is done. So prefetches stand in loops of their own, over a block of
 * keys, where as many as the core can walk are under way at once (with a key's
 * hash and another one's line between two prefetches it took four times as
 * long); and while one block is in pass 3, the next is in pass 2 and the one
 * after it in pass 1, so that no pass waits for what the one before it asked for;
 * pins are a block behind for the same reason.
 *
 * The other half of the time is instructions. A loop over a whole block has a
 * constant for its end, and what does not change in it is in local variables,
 * since the compiler cannot know that the stores of a pass do not change it.
 *
 * The pin protocol (ipc/frame.h): the increment and the load are seq_cst, and
 * so are the daemon's exchange of the word and its loads of the pins. In their
 * total order either our increment is before the daemon's load, and it keeps
 * the frame, or its exchange is before our load, and we see ISOLATED or a later
 * generation and undo.
 */
#include "libkvmm/lib.h"

/*
 * Keys of a block. A chain that is not there has cost three blocks of pass 1
 * and two of pass 2. Larger blocks were measured to be no faster.
 */
#define BLOCK		8
#define RING		(4 * BLOCK)	/* three blocks under way */

/* -- pins -------------------------------------------------------------------- */

void kvmm_pin(struct kvmm_view *v, uint32_t frame)
{
	if (lib_broken(BREAK_PINBARRIER)) {
		uint32_t n = atomic_load_explicit(&v->pins[frame],
						  memory_order_relaxed);

		atomic_store_explicit(&v->pins[frame], n + 1,
				      memory_order_relaxed);
		return;
	}
	atomic_fetch_add(&v->pins[frame], 1);	/* seq_cst: see the top */
}

void kvmm_unpin(struct kvmm_view *v, uint32_t frame)
{
	/* release: our reads of the page are before the daemon reuses it */
	atomic_fetch_sub_explicit(&v->pins[frame], 1, memory_order_release);
}

/* Is @word what a hit with @want needs? */
static inline bool word_good(uint64_t word, uint64_t want)
{
	if (unlikely(lib_broken(BREAK_GENERATION)))
		return frame_word_state(word) == FRAME_READY;
	if (unlikely(lib_broken(BREAK_READY)))
		return frame_word_gen(word) == frame_word_gen(want);
	return word == want;
}

static inline uint64_t word_load(const struct kvmm_view *v, uint32_t frame)
{
	if (unlikely(lib_broken(BREAK_PINBARRIER)))
		return atomic_load_explicit(&v->word[frame],
					    memory_order_relaxed);
	return atomic_load(&v->word[frame]);	/* seq_cst: see the top */
}

/* -- lookup ------------------------------------------------------------------- */

static bool node_serves(const struct kvmm_hdr *hdr, unsigned int node)
{
	return node < KVMM_MAX_NODES &&
	       atomic_load_explicit(&hdr->node[node].state,
				    memory_order_relaxed) < 2;
}

static void page_is(struct kvmm_page *p, const struct index_hit *h,
		    uint8_t state, uint8_t node)
{
	p->frame = 0;
	p->cost_us = h->cost_us;
	p->raw_bytes = h->raw_bytes;
	p->state = state;
	p->node = node;
}

/* The line of the asked node: a hit, if the frame is mapped here. */
static inline void page_found(struct kvmm_mset *m, const struct kvmm_mgroup *g,
			      struct kvmm_page *p, const struct index_hit *h)
{
	const struct kvmm_view *v = g->view;

	p->cost_us = h->cost_us;
	p->raw_bytes = h->raw_bytes;
	p->node = m->node;
	p->frame = h->frame;
	p->fword = h->fword;
	p->state = KVMM_HIT;
	if (unlikely(!v))
		return;			/* a peek without a window */
	if (likely(kvmm_view_mapped(v, h->frame) &&
		   kvmm_view_shared(v, h->frame)))
		return;
	p->frame = 0;
	p->state = KVMM_PENDING;
	m->sync_wanted = true;
}

/* Not on the asked node: is it on another one? */
static void page_elsewhere(struct kvmm_att *a, const struct kvmm_ixmap *x,
			   const struct kvmm_mset *m,
			   const struct kvmm_mgroup *g, const uint64_t key[4],
			   struct kvmm_page *p)
{
	const struct kvmm_info *info = &a->era->info;
	const struct kvmm_hdr *hdr = a->era->hdr;
	struct index_hit h;
	unsigned int i;

	p->state = KVMM_MISS;
	p->frame = 0;
	if (x->nr_words &&
	    index_find_below(x->words, index_below(x->nr_words, x->seed, key,
						   g->group), &h)) {
		const struct desc *d = &a->sp->desc;
		unsigned int from = h.frame;

		h.raw_bytes = d->cls[d->group[g->group].class_ix].page_bytes;

		/* the daemon's choice may have failed since */
		for (i = 0; !node_serves(hdr, from) && i < KVMM_MAX_NODES; i++)
			if (h.fword >> i & 1)
				from = i;
		if (node_serves(hdr, from)) {
			page_is(p, &h, h.flags & INDEX_PENDING ?
				       KVMM_PENDING : KVMM_LOWER, from);
			return;
		}
		if (h.flags & INDEX_PENDING) {
			page_is(p, &h, KVMM_PENDING, m->node);
			return;
		}
	}
	for (i = 0; i < info->nr_nodes; i++) {
		if (i == m->node || (info->node[i].kind != KVMM_NODE_HOST &&
				     info->node[i].kind != KVMM_NODE_CUDA))
			continue;
		if (index_find(x->ix, index_hash(x->nr_lines, x->seed, key,
						 g->group, i),
			       key, g->group, i, &h)) {
			page_is(p, &h, KVMM_LOWER, i);
			return;
		}
	}
}

static inline const struct kvmm_ixmap *att_index(struct kvmm_att *a)
{
	/* seq_cst: see the top of lib.h */
	return atomic_load(&a->index);
}

/* On neither of its two lines. */
static __attribute__((noinline)) void
look_on(struct kvmm_att *a, const struct kvmm_ixmap *x, struct kvmm_mset *m,
	const struct kvmm_mgroup *g, uint32_t i)
{
	const uint64_t *key = m->key[i];
	struct index_hit h;

	if (index_find(x->ix, index_hash(x->nr_lines, x->seed, key, g->group,
					 m->node),
		       key, g->group, m->node, &h))
		page_found(m, g, &m->page[i], &h);
	else
		page_elsewhere(a, x, m, g, key, &m->page[i]);
}

/**
 * struct look - keys on their way through the passes
 * @n:		how many
 * @hashed:	through pass 1, in blocks
 * @turned:	through pass 2
 * @done:	through pass 3
 * @at:		of those under way: the line to read
 * @other:	the page's other line
 */
struct look {
	const struct kvmm_ixmap *x;
	const struct kvmm_mgroup *g;
	uint64_t	(*key)[4];
	struct kvmm_page *page;
	uint8_t		node;
	uint32_t	n;
	uint32_t	hashed;
	uint32_t	turned;
	uint32_t	done;
	const struct index_line *at[RING];
	const struct index_line *other[RING];
};

static inline uint32_t look_count(const struct look *l, uint32_t from)
{
	return min(l->n - from, (uint32_t)BLOCK);
}

static __always_inline void look_prefetch(const struct index_line **at,
					  uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		__builtin_prefetch(at[i], 0, 3);
}

static __always_inline void __look_hash(struct look *l, uint32_t n)
{
	const struct index_line **at = &l->at[l->hashed % RING];
	const struct index_line **other = &l->other[l->hashed % RING];
	const struct kvmm_ixmap *x = l->x;
	const struct index_line *line = x->ix->line;
	uint64_t seed[2] = { x->seed[0], x->seed[1] };
	uint64_t nr_lines = x->nr_lines;
	uint64_t (*key)[4] = l->key + l->hashed;
	uint16_t group = l->g->group;
	uint8_t node = l->node;
	uint32_t i;

	for (i = 0; i < n; i++) {
		struct index_hash h = index_hash(nr_lines, seed, key[i], group,
						 node);

		at[i] = &line[h.home];
		other[i] = &line[h.other];
	}
	look_prefetch(at, n);
	l->hashed += n;
}

/* Pass 1 for the next block. */
static void look_hash(struct look *l)
{
	uint32_t n = look_count(l, l->hashed);

	if (likely(n == BLOCK))
		__look_hash(l, BLOCK);
	else
		__look_hash(l, n);
}

/*
 * If the page is not at home, its other line is worth prefetching. A guess from
 * one word, read without the version; reading decides. No branch: one page in
 * four is not at home in a table half full.
 */
static __always_inline void __look_turn(struct look *l, uint32_t n)
{
	const struct index_line **at = &l->at[l->turned % RING];
	const struct index_line **other = &l->other[l->turned % RING];
	uint64_t (*key)[4] = l->key + l->turned;
	uint32_t i;

	for (i = 0; i < n; i++) {
		const struct index_line *home = at[i], *away = other[i];
		uint64_t there = atomic_load_explicit(&home->key[0],
						      memory_order_relaxed);

		at[i] = there == key[i][0] ? home : away;
	}
	look_prefetch(at, n);
	l->turned += n;
}

/* Pass 2. The second prefetch costs nothing where the page is at home. */
static void look_turn(struct look *l)
{
	uint32_t n = look_count(l, l->turned);

	if (likely(n == BLOCK))
		__look_turn(l, BLOCK);
	else
		__look_turn(l, n);
}

static void look_begin(struct look *l, struct kvmm_att *a, struct kvmm_mset *m,
		       const struct kvmm_mgroup *g, uint32_t lo, uint32_t hi)
{
	l->x = att_index(a);
	l->g = g;
	l->key = m->key + g->first + lo;
	l->page = m->page + g->first + lo;
	l->node = m->node;
	l->n = hi - lo;
	l->hashed = 0;
	l->turned = 0;
	l->done = 0;
	look_hash(l);
	if (l->hashed < l->n)
		look_hash(l);
	look_turn(l);
}

/* Frame 0, which no page has, where there is none: cheaper than a branch. */
static __always_inline void look_frames(const struct kvmm_view *v,
					const struct kvmm_page *p, uint32_t n)
{
	const _Atomic uint64_t *word = v->word;
	const _Atomic uint32_t *pins = v->pins;
	uint32_t i;

	for (i = 0; i < n; i++)
		__builtin_prefetch((const void *)&word[p[i].frame], 0, 3);
	for (i = 0; i < n; i++)
		__builtin_prefetch((const void *)&pins[p[i].frame], 1, 3);
}

/*
 * Pass 3. Flat: what is called for each page must not be a call. With @stop it
 * ends at the first page that is nowhere. Returns how many were read.
 */
static __attribute__((flatten)) uint32_t
look_read(struct look *l, struct kvmm_att *a, struct kvmm_mset *m, bool stop)
{
	const struct index_line **at = &l->at[l->done % RING];
	struct kvmm_page *p = &l->page[l->done];
	uint64_t (*key)[4] = &l->key[l->done];
	const struct kvmm_mgroup *g = l->g;
	uint16_t group = g->group;
	uint8_t node = l->node;
	uint32_t i, n = look_count(l, l->done);

	for (i = 0; i < n; i++) {
		struct index_hit h;

		if (p[i].state != PAGE_UNKNOWN)
			continue;
		if (likely(index_read_line(at[i], key[i], group, node, &h)))
			page_found(m, g, &p[i], &h);
		else
			look_on(a, l->x, m, g, &p[i] - m->page);
		if (unlikely(p[i].state == KVMM_MISS && stop))
			return i + 1;
	}
	return n;
}

/*
 * One more block through to the end, and the two after it one pass on. Returns
 * false when that was the last, or, with @stop, had a page that is nowhere.
 */
static bool look_block(struct look *l, struct kvmm_att *a, struct kvmm_mset *m,
		       bool stop)
{
	const struct kvmm_view *v = l->g->view;
	uint32_t done;

	if (l->hashed < l->n)
		look_hash(l);
	if (l->turned < l->n)
		look_turn(l);
	done = look_read(l, a, m, stop);
	if (likely(v && done == BLOCK))
		look_frames(v, &l->page[l->done], BLOCK);
	else if (v)
		look_frames(v, &l->page[l->done], done);
	l->done += done;
	if (stop && l->page[l->done - 1].state == KVMM_MISS)
		return false;
	return l->done < l->n;
}

void kvmm_look(struct kvmm_att *a, struct kvmm_mset *m, struct kvmm_mgroup *g,
	       uint32_t lo, uint32_t hi)
{
	struct look l;

	if (lo >= hi)
		return;
	look_begin(&l, a, m, g, lo, hi);
	while (look_block(&l, a, m, false))
		;
}

uint32_t kvmm_look_lead(struct kvmm_att *a, struct kvmm_mset *m,
			struct kvmm_mgroup *g, uint32_t hi, bool pin)
{
	uint32_t pinned = 0, to;
	struct look l;
	bool more;

	if (!hi)
		return 0;
	look_begin(&l, a, m, g, 0, hi);
	do {
		to = l.done;
		more = look_block(&l, a, m, true);
		if (!more)
			to = l.done;
		if (pin)
			pin = kvmm_pin_range(a, m, g, pinned, to) == to;
		pinned = to;
	} while (more);
	return l.done;
}

/* -- pinning ---------------------------------------------------------------------- */

bool kvmm_pin_word(struct kvmm_view *v, uint32_t frame, uint64_t word)
{
	kvmm_pin(v, frame);
	if (word_good(word_load(v, frame), word))
		return true;
	kvmm_unpin(v, frame);
	return false;
}

static bool pin_one(struct kvmm_view *v, struct kvmm_page *p)
{
	return kvmm_pin_word(v, p->frame, p->fword);
}

/*
 * The word was not what the line had said. The line may have moved on since
 * (demoted, loaded again): read it once more. A line that still says the same
 * is being changed, or its frame is isolated for the moment: PENDING.
 */
static bool pin_retry(struct kvmm_att *a, struct kvmm_mset *m,
		      struct kvmm_mgroup *g, uint32_t i)
{
	struct kvmm_page *p = &m->page[i];

	m->races++;
	look_on(a, att_index(a), m, g, i);
	if (p->state != KVMM_HIT)
		return false;
	if (pin_one(g->view, p))
		return true;
	p->state = KVMM_PENDING;
	p->frame = 0;
	return false;
}

static inline bool wants_pin(const struct kvmm_page *p)
{
	return p->state == KVMM_HIT && !(p->flags & PAGE_PINNED);
}

uint32_t kvmm_pin_range(struct kvmm_att *a, struct kvmm_mset *m,
			struct kvmm_mgroup *g, uint32_t lo, uint32_t hi)
{
	struct kvmm_page *p = &m->page[g->first];
	struct kvmm_view *v = g->view;
	uint32_t i, j, n = 0;

	while (lo < hi && (p[lo].flags & PAGE_PINNED))
		lo++;			/* as a rule, all of it */
	for (i = lo; i < hi && p[i].state == KVMM_HIT; i++)
		if (wants_pin(&p[i]))
			kvmm_pin(v, p[i].frame);
	hi = i;
	for (i = lo; i < hi; i++) {
		if (!wants_pin(&p[i]))
			continue;
		if (unlikely(!word_good(word_load(v, p[i].frame),
					p[i].fword))) {
			kvmm_unpin(v, p[i].frame);
			if (!pin_retry(a, m, g, g->first + i))
				break;
		}
		p[i].flags |= PAGE_PINNED;
		n++;
	}
	/* undo what was counted after the first that failed */
	for (j = i + 1; j < hi; j++)
		if (wants_pin(&p[j]))
			kvmm_unpin(v, p[j].frame);
	m->nr_pins += n;
	return i;
}

/*
 * First all decrements, then all flags: an atomic one waits for the stores
 * before it.
 */
void kvmm_unpin_range(struct kvmm_mset *m, struct kvmm_mgroup *g, uint32_t lo,
		      uint32_t hi)
{
	struct kvmm_page *p = &m->page[g->first];
	struct kvmm_view *v = g->view;
	uint32_t i, n = 0;

	for (i = lo; i < hi; i++) {
		if (!(p[i].flags & PAGE_PINNED))
			continue;
		kvmm_unpin(v, p[i].frame);
		n++;
	}
	for (i = lo; n && i < hi; i++)
		p[i].flags &= ~PAGE_PINNED;
	m->nr_pins -= n;
}

void kvmm_mset_unpin(struct kvmm_mset *m)
{
	unsigned int i;

	for (i = 0; m->nr_pins && i < m->ngroups; i++)
		kvmm_unpin_range(m, &m->g[i], 0, m->g[i].n);
}
