/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The hot path: find pages and pin them, without a system call and without the
 * daemon. It costs four cache misses a page (index line, frame word, pin, key),
 * and what is done here is mostly to have them at the same time:
 *
 *   pass 1	hash the keys, prefetch their home lines
 *   pass 2	where the home line is another page's, prefetch the other line
 *   pass 3	prefetch the frames' words and pins
 *   pass 4	read the lines
 *   pass 5	count all pins
 *   pass 6	load all words and compare them
 *
 * all over a block of keys at a time. Each prefetch misses the TLB, too, and
 * stays in the pipeline until its page walk is done: so they stand in loops of
 * their own, where as many as the core can walk are under way at once. (A
 * software pipeline, with a key's hash and another one's line between two
 * prefetches, took four times as long.)
 *
 * The pin protocol (ipc/frame.h): the increment and the load are seq_cst, and
 * so are the daemon's exchange of the word and its loads of the pins. In their
 * total order either our increment is before the daemon's load, and it keeps
 * the frame, or its exchange is before our load, and we see ISOLATED or a later
 * generation and undo.
 */
#include "libkvmm/lib.h"

/*
 * Keys of a block: enough to have many misses at once, few enough that what was
 * fetched is still in the first cache when it is used. A chain that is not
 * there ends in its first block, which is smaller.
 */
#define BLOCK		64
#define FIRST_BLOCK	16

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

uint32_t kvmm_load_us(const struct kvmm_hdr *hdr, unsigned int node,
		      uint32_t bytes)
{
	const struct kvmm_hdr_node *n = &hdr->node[node];
	uint64_t us;

	us = (uint64_t)atomic_load_explicit(&n->load_ns_per_kib,
					    memory_order_relaxed) *
	     div_round_up(bytes, 1024) / 1000;
	us += atomic_load_explicit(&n->load_base_us, memory_order_relaxed);
	return us < UINT32_MAX ? us : UINT32_MAX;
}

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
	if (likely(kvmm_view_mapped(v, h->frame)))
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
	if (index_find(x->ix, index_hash(x->nr_lines, x->seed, key, g->group,
					 INDEX_NODE_BELOW),
		       key, g->group, INDEX_NODE_BELOW, &h)) {
		unsigned int from = h.frame;

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
 * struct look - a block of keys on its way through the passes
 * @at:		@at.home is the line to read
 * @frame:	as that line says, which is a guess until the line is read
 */
struct look {
	struct index_hash at[BLOCK];
	uint32_t	frame[BLOCK];
};

/* Passes 1 and 2. */
static void look_lines(const struct kvmm_ixmap *x, uint64_t (*key)[4],
		       uint16_t group, uint8_t node, uint32_t n,
		       struct look *b)
{
	const struct index_line *line = x->ix->line;
	uint32_t i;

	for (i = 0; i < n; i++)
		b->at[i] = index_hash(x->nr_lines, x->seed, key[i], group,
				      node);
	for (i = 0; i < n; i++)
		__builtin_prefetch(&line[b->at[i].home], 0, 3);
	for (i = 0; i < n; i++)
		b->at[i] = index_turn(x->ix, b->at[i], key[i]);
	/* costs nothing where the page is at home */
	for (i = 0; i < n; i++)
		__builtin_prefetch(&line[b->at[i].home], 0, 3);
}

/* Pass 3: where is the frame, if the line is the page's? */
static void look_frames(const struct kvmm_ixmap *x, const struct kvmm_view *v,
			uint32_t n, struct look *b)
{
	uint32_t i;

	for (i = 0; i < n; i++) {
		uint32_t f = (uint32_t)atomic_load_explicit(
					&x->ix->line[b->at[i].home].frame,
					memory_order_relaxed);

		/* without a branch, which would be a guess wrong too often */
		b->frame[i] = f < v->max_frames ? f : 0;
	}
	for (i = 0; i < n; i++)
		__builtin_prefetch((const void *)&v->word[b->frame[i]], 0, 3);
	for (i = 0; i < n; i++)
		__builtin_prefetch((const void *)&v->pins[b->frame[i]], 1, 3);
}

/*
 * One block of at most %BLOCK pages, passes 1 to 4. Flat: what is called for
 * each page must not be a call.
 */
static __attribute__((flatten)) uint32_t
look_block(struct kvmm_att *a, const struct kvmm_ixmap *x, struct kvmm_mset *m,
	   const struct kvmm_mgroup *g, uint32_t lo, uint32_t n, bool stop)
{
	struct kvmm_page *p = &m->page[g->first + lo];
	uint64_t (*key)[4] = m->key + g->first + lo;
	struct look b;
	uint32_t i;

	look_lines(x, key, g->group, m->node, n, &b);
	if (g->view)
		look_frames(x, g->view, n, &b);
	for (i = 0; i < n; i++) {
		struct index_hit h;

		if (p[i].state != PAGE_UNKNOWN)
			continue;
		if (likely(index_read_line(&x->ix->line[b.at[i].home],
					   key[i], g->group, m->node, &h)))
			page_found(m, g, &p[i], &h);
		else
			look_on(a, x, m, g, g->first + lo + i);
		if (stop && p[i].state == KVMM_MISS)
			return i + 1;
	}
	return n;
}

void kvmm_look(struct kvmm_att *a, struct kvmm_mset *m, struct kvmm_mgroup *g,
	       uint32_t lo, uint32_t hi)
{
	uint32_t n;

	for (; lo < hi; lo += n) {
		n = min(hi - lo, (uint32_t)BLOCK);
		look_block(a, att_index(a), m, g, lo, n, false);
	}
}

uint32_t kvmm_look_lead(struct kvmm_att *a, struct kvmm_mset *m,
			struct kvmm_mgroup *g, uint32_t hi, bool pin)
{
	uint32_t lo, n, want = FIRST_BLOCK, got;

	for (lo = 0; lo < hi; lo += got, want = BLOCK) {
		n = min(hi - lo, want);
		got = look_block(a, att_index(a), m, g, lo, n, true);
		if (pin)
			pin = kvmm_pin_range(a, m, g, lo, lo + got) ==
			      lo + got;
		if (m->page[g->first + lo + got - 1].state == KVMM_MISS)
			return lo + got;
	}
	return hi;
}

/* -- pinning ---------------------------------------------------------------------- */

static bool pin_one(struct kvmm_view *v, struct kvmm_page *p)
{
	kvmm_pin(v, p->frame);
	if (word_good(word_load(v, p->frame), p->fword))
		return true;
	kvmm_unpin(v, p->frame);
	return false;
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

void kvmm_unpin_range(struct kvmm_mset *m, struct kvmm_mgroup *g, uint32_t lo,
		      uint32_t hi)
{
	struct kvmm_page *p = &m->page[g->first];
	uint32_t i;

	for (i = lo; i < hi; i++) {
		if (!(p[i].flags & PAGE_PINNED))
			continue;
		kvmm_unpin(g->view, p[i].frame);
		p[i].flags &= ~PAGE_PINNED;
		m->nr_pins--;
	}
}

void kvmm_mset_unpin(struct kvmm_mset *m)
{
	unsigned int i;

	for (i = 0; m->nr_pins && i < m->ngroups; i++)
		kvmm_unpin_range(m, &m->g[i], 0, m->g[i].n);
}
