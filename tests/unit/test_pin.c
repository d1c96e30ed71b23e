/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that match against a reclaimer that reuses frames, in one process
 * over one mapping, so that the thread sanitizer sees both sides. Each frame's
 * content says whose page it is: a client that holds a pin on a page must find
 * its own there, for as long as it holds it.
 *
 * The reclaimer is slow on purpose where the protocol allows it to be: between
 * summing the pins and changing the content, and between that and taking the
 * old page's line away. So each of the unprotected variants fails soon.
 */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/unit.h"

#define FRAMES	48		/* numbers 64 .. 64 + FRAMES - 1 */
#define FIRST	64
#define KEYS	64
#define LINES	1024
#define CLIENTS	2

struct rig {
	struct kvmm	k;
	struct kvmm_era	era;
	struct kvmm_space sp;
	struct kvmm_att	att;
	struct kvmm_ixmap x;
	struct kvmm_view v;
	struct kvmm_hdr	*hdr;
	struct ledger	*l;
	struct index	*ix;
	struct frame_table *t;
	_Atomic uint32_t pins[FIRST + FRAMES];
	_Atomic uint32_t content[FIRST + FRAMES];
	uint64_t	gen[FIRST + FRAMES];	/* the reclaimer's */
	uint32_t	owner[FIRST + FRAMES];
	uint32_t	frame_of[KEYS];		/* 0: the page is nowhere */
	_Atomic bool	stop;
	_Atomic uint64_t wrong, checked, reclaimed, kept;
};

static struct rig *r;

static void *zalloc(size_t bytes)
{
	void *p = aligned_alloc(64, round_up(bytes, 64));

	memset(p, 0, round_up(bytes, 64));
	return p;
}

static void key_words(uint32_t id, uint64_t key[4])
{
	key[0] = id * UINT64_C(0x9e3779b97f4a7c15);
	key[1] = id;
	key[2] = ~(uint64_t)id;
	key[3] = 7;
}

static int setup(void **state)
{
	static const _Atomic uint32_t alive = 1;

	r = zalloc(sizeof(*r));
	r->hdr = zalloc(sizeof(*r->hdr));
	r->l = zalloc(1 << 16);
	r->ix = zalloc(index_bytes(LINES, 0));
	r->t = zalloc(frame_table_bytes(FIRST + FRAMES));
	r->k.alive = &alive;
	kvmm_mutex_init(&r->k.ops_lock, LOCK_OPS);
	r->era.k = &r->k;
	r->era.refs = 1;
	r->era.hdr = r->hdr;
	r->era.ledger = r->l;
	r->l->req_off = 4096;
	r->k.era = &r->era;
	r->sp.k = &r->k;
	r->sp.desc.ngroups = r->sp.desc.nclasses = r->sp.desc.world = 1;
	r->sp.desc.group[0] = (struct desc_group){ 0, KVMM_FULL, 16, 0 };
	r->ix->nr_lines = r->x.nr_lines = LINES;
	r->ix->seed[0] = r->x.seed[0] = 3;
	r->ix->seed[1] = r->x.seed[1] = 4;
	r->x.ix = r->ix;
	r->att.refs = 1;
	r->att.era = &r->era;
	r->att.sp = &r->sp;
	r->att.index = &r->x;
	r->v.att = &r->att;
	r->v.table = r->t;
	r->v.word = r->t->word;
	r->v.pins = r->pins;
	r->v.max_frames = FIRST + FRAMES;
	r->v.dense = FIRST + FRAMES;
	r->v.fpe = FIRST;
	r->v.fpe_inv = UINT64_MAX / FIRST + 1;
	r->v.refs = 1;
	r->att.view[0][0] = &r->v;
	return 0;
}

static int teardown(void **state)
{
	kvmm_breaks = 0;
	free(r->hdr);
	free(r->l);
	free(r->ix);
	free(r->t);
	free(r);
	return 0;
}

/* -- the reclaimer ------------------------------------------------------------------ */

static struct index_line *line_of(uint32_t id)
{
	struct index_line *free = NULL;
	struct index_hash h;
	struct index_hit hit;
	uint64_t key[4];
	unsigned int i;

	key_words(id, key);
	h = index_hash(LINES, r->ix->seed, key, 0, 0);
	for (i = 0; i < INDEX_PROBES; i++) {
		struct index_line *l = &r->ix->line[index_probe(h, i)];

		if (index_read_line(l, key, 0, 0, &hit))
			return l;
		if (!free && !(l->word0 >> 56 & INDEX_USED))
			free = l;
	}
	return free;
}

static void line_write(uint32_t id, uint32_t frame, uint8_t flags)
{
	struct index_line *l = line_of(id);
	uint32_t v = (uint32_t)l->word0;
	uint64_t key[4];
	int i;

	key_words(id, key);
	atomic_store_explicit(&l->word0, index_word0(v + 1, 0, 0, 0),
			      memory_order_relaxed);
	for (i = 0; i < 4; i++)
		atomic_store_explicit(&l->key[i], key[i], memory_order_release);
	atomic_store_explicit(&l->fword,
			      frame_word(r->gen[frame], FRAME_READY),
			      memory_order_release);
	atomic_store_explicit(&l->frame, frame, memory_order_release);
	atomic_store_explicit(&l->word0, index_word0(v + 2, 0, 0, flags),
			      memory_order_release);
}

static void seal(uint32_t id, uint32_t f)
{
	atomic_store_explicit(&r->content[f], id, memory_order_relaxed);
	r->gen[f]++;
	r->owner[f] = id;
	r->frame_of[id] = f;
	line_write(id, f, INDEX_USED);
	atomic_store_explicit(&r->t->word[f],
			      frame_word(r->gen[f], FRAME_READY),
			      memory_order_release);
}

static bool isolate(uint32_t f)
{
	atomic_exchange(&r->t->word[f],
			frame_word(r->gen[f], FRAME_ISOLATED));
	if (!atomic_load(&r->pins[f]))
		return true;
	atomic_store(&r->t->word[f], frame_word(r->gen[f], FRAME_READY));
	return false;
}

static void reclaim_one(struct rng *rng)
{
	uint32_t f = FIRST + rng_below(rng, FRAMES);
	uint32_t old = r->owner[f], id = rng_below(rng, KEYS);

	if (r->frame_of[id])
		return;
	if (!isolate(f)) {
		r->kept++;
		return;
	}
	if (rng_below(rng, 4) == 0)
		sched_yield();
	r->frame_of[old] = 0;
	seal(id, f);
	if (rng_below(rng, 4) == 0)
		sched_yield();
	line_write(old, f, 0);
	r->reclaimed++;
}

static void *reclaimer(void *arg)
{
	struct rng rng;

	rng_seed(&rng, test_seed());
	while (!r->stop)
		reclaim_one(&rng);
	return NULL;
}

/* -- clients ------------------------------------------------------------------------ */

static void check(uint32_t id, const struct kvmm_hit *hit)
{
	if (hit->state != KVMM_HIT)
		return;
	r->checked++;
	if (atomic_load_explicit(&r->content[hit->frame],
				 memory_order_relaxed) != id)
		r->wrong++;
}

static void *client(void *arg)
{
	struct kvmm_req *rq = zalloc(sizeof(*rq));
	struct rng rng;

	rng_seed(&rng, test_seed() + (uintptr_t)arg);
	kvmm_mutex_init(&rq->lock, LOCK_REQUESTS);
	list_init(&rq->blobs);
	rq->k = &r->k;
	rq->sp = &r->sp;
	rq->att = &r->att;
	rq->refs = 1;
	while (!r->stop) {
		uint32_t id = rng_below(&rng, KEYS);
		struct kvmm_match m = { .size = sizeof(m) };
		struct kvmm_hit hit;
		struct kvmm_key key;
		uint64_t w[4];

		key_words(id, w);
		memcpy(key.b, w, sizeof(key.b));
		kvmm_match(rq, &(struct kvmm_keys){ .k = &key, .n = 1 }, 1, 0,
			   &hit, &m);
		check(id, &hit);
		if (rng_below(&rng, 8) == 0)
			sched_yield();
		check(id, &hit);
		kvmm_trim(rq, 0, 0);
	}
	free(rq->m[0].key);
	free(rq->m[0].page);
	free(rq->m[1].key);
	free(rq->m[1].page);
	free(rq);
	return NULL;
}

static uint32_t pins_left(void)
{
	uint32_t i, n = 0;

	for (i = 0; i < FIRST + FRAMES; i++)
		n += r->pins[i];
	return n;
}

/* Run until @matches were checked, something was wrong, or time is up. */
static void race(uint64_t checks, uint64_t ms)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);
	pthread_t t[CLIENTS + 1];
	uintptr_t i;

	for (i = 0; i < FRAMES; i++)
		seal(i, FIRST + i);
	assert_int_equal(pthread_create(&t[0], NULL, reclaimer, NULL), 0);
	for (i = 1; i <= CLIENTS; i++)
		assert_int_equal(pthread_create(&t[i], NULL, client, (void *)i),
				 0);
	while (r->checked < checks && !r->wrong && !deadline_past(deadline))
		sched_yield();
	r->stop = true;
	for (i = 0; i <= CLIENTS; i++)
		pthread_join(t[i], NULL);
}

static void a_pinned_page_stays_what_it_is(void **state)
{
	race(test_long() ? 20000000 : 1000000, test_long() ? 600000 : 20000);
	print_message("# %llu checks, %llu reclaimed, %llu kept\n",
		      (unsigned long long)r->checked,
		      (unsigned long long)r->reclaimed,
		      (unsigned long long)r->kept);
	assert_int_equal(r->wrong, 0);
	assert_int_equal(pins_left(), 0);
	/* or it was no race */
	assert_true(r->checked > 1000);
	assert_true(r->reclaimed > 100);
}

static void unprotected(unsigned int what)
{
	kvmm_breaks = what;
	race(UINT64_MAX, 30000);
	if (!r->wrong && !pins_left())
		fail_msg("%llu checks and %llu reclaimed, and nothing went wrong",
			 (unsigned long long)r->checked,
			 (unsigned long long)r->reclaimed);
}

/* Lost updates of the counter, and loads that overtake it. */
static void without_atomic_pins_pages_change_under_them(void **state)
{
	unprotected(BREAK_PINBARRIER);
}

static void without_generations_another_page_is_taken_for_it(void **state)
{
	unprotected(BREAK_GENERATION);
}

static void without_states_an_isolated_page_is_taken(void **state)
{
	unprotected(BREAK_READY);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(without_atomic_pins_pages_change_under_them),
		T(without_generations_another_page_is_taken_for_it),
		T(without_states_an_isolated_page_is_taken),
		T(a_pinned_page_stays_what_it_is),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
