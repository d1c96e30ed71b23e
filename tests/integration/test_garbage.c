/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that write garbage into what they share with kvmmd: rings, arena, the
 * rest of the ledger. What libkvmm could not have written ends the connection
 * with a counted reason; the rest is answered or means nothing. In either case
 * nobody else is hurt: a healthy client works all the while, the laws hold, and
 * kvmmd holds afterwards what it held before.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/healthy.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define BAD		0		/* which child it is */

/* -- what a bad one has -------------------------------------------------------------- */

static struct kvmm_era *era(void)
{
	return kvmm_era_now(fx_c()->k);
}

static struct kvmm_att *att(void)
{
	return atomic_load(&fx_c()->sp->att);
}

static struct kvmm_view *view(void)
{
	return kvmm_att_view(att(), 0, fx_c()->node);
}

static void bell(void)
{
	uint64_t one = 1;

	T_EQ(write(era()->doorbell, &one, sizeof(one)), 8);
}

/* An entry as it is; the library's cursors go along. */
static void push(const struct ring_sqe *sqe)
{
	struct kvmm_era *e = era();

	e->sq[e->sq_tail & (LEDGER_SQ_ENTRIES - 1)] = *sqe;
	e->sq_tail++;
	atomic_store(&e->ledger->sq.tail, e->sq_tail);
	bell();
}

/* An entry with an array, at the place in the arena where it belongs. */
static void push_array(struct ring_sqe *sqe, const void *array, uint32_t bytes)
{
	struct kvmm_era *e = era();
	uint32_t room = (bytes + 63) & ~63u;
	uint64_t off = e->arena_tail % LEDGER_ARENA_BYTES;
	uint64_t pad = off + room > LEDGER_ARENA_BYTES ?
		       LEDGER_ARENA_BYTES - off : 0;

	T_WAIT(LONG_WAIT, e->arena_tail + pad + room -
	       atomic_load(&e->ledger->arena_head) <= LEDGER_ARENA_BYTES &&
	       e->sq_tail - atomic_load(&e->ledger->sq.head) <
	       LEDGER_SQ_ENTRIES - 8);
	sqe->arena_pos = (uint32_t)(e->arena_tail + pad);
	sqe->arena_len = (uint32_t)(pad + room);
	memcpy(e->arena + sqe->arena_pos % LEDGER_ARENA_BYTES, array, bytes);
	e->arena_tail += pad + room;
	push(sqe);
}

static struct ring_sqe entry(uint8_t op)
{
	static uint64_t tag = 1u << 30;

	return (struct ring_sqe) {
		.op = op, .space = (uint16_t)att()->ix, .win = view()->no,
		.n = 1, .tag = tag++,
	};
}

/* Frames of its own, so that there is something to be mean with. */
static kvmm_frame_t own[8];

static void take_frames(void)
{
	struct kvmm_req *rq = tc_req(fx_c(), 1);

	tc_alloc(fx_c(), rq, 0, 8, own);
}

/* -- rings ----------------------------------------------------------------------------- */

static long tail_far(void *shm, long a, long b)
{
	atomic_store(&era()->ledger->sq.tail,
		     era()->sq_tail + LEDGER_SQ_ENTRIES + 1);
	bell();
	return 0;
}

static long tail_back(void *shm, long a, long b)
{
	tc_ping(fx_c());
	atomic_store(&era()->ledger->sq.tail, era()->sq_tail - 1);
	bell();
	return 0;
}

static long unknown_op(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_NR_OPS);

	push(&e);
	return 0;
}

static long array_too_long(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_FETCH);

	e.n = KVMM_MAX_BATCH + 1;
	e.arena_pos = (uint32_t)era()->arena_tail;
	e.arena_len = LEDGER_ARENA_BYTES;
	push(&e);
	return 0;
}

static long array_of_none(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_PUBLISH);

	e.n = 0;
	push(&e);
	return 0;
}

static long array_over_the_end(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_FETCH);

	e.n = 100;
	e.arena_pos = LEDGER_ARENA_BYTES - 64;
	e.arena_len = LEDGER_ARENA_BYTES;
	push(&e);
	return 0;
}

static long array_before_its_place(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_FETCH);

	e.arena_pos = (uint32_t)era()->arena_tail - 4096;
	e.arena_len = 64;
	push(&e);
	return 0;
}

static long arena_len_absurd(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_NOP);

	e.arena_len = UINT32_MAX;
	push(&e);
	return 0;
}

static long refill_absurd(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_REFILL);

	e.n = UINT32_MAX;
	push(&e);
	return 0;
}

static long refill_of_all(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_REFILL);
	int i;

	e.n = KVMM_MAX_FRAMES;
	for (i = 0; i < 20; i++)
		push(&e);
	tc_ping(fx_c());
	return 0;
}

static long free_of_others(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_FREE);
	uint32_t frame = (uint32_t)a;

	push_array(&e, &frame, sizeof(frame));
	return 0;
}

static long free_twice(void *shm, long a, long b)
{
	struct ring_sqe e = entry(RING_FREE);
	uint32_t frame[2];

	take_frames();
	frame[0] = frame[1] = own[0];
	e.n = 2;
	push_array(&e, frame, sizeof(frame));
	return 0;
}

/* More answers than the ring has places: then the daemon looks at the head. */
static void flood(void)
{
	struct kvmm_era *e = era();
	struct ring_sqe nop = entry(RING_NOP);
	unsigned int i;

	for (i = 0; i < 3 * LEDGER_CQ_ENTRIES; i++) {
		struct t_wait w = t_wait_begin(1000);

		/* full for a second: it has been cut off */
		while (e->sq_tail - atomic_load(&e->ledger->sq.head) >=
		       LEDGER_SQ_ENTRIES - 8)
			if (!t_wait_more(&w))
				return;
		push(&nop);
	}
}

static long head_ahead(void *shm, long a, long b)
{
	atomic_store(&era()->ledger->cq.head, era()->cq_head + (1u << 30));
	flood();
	return 0;
}

static long head_back(void *shm, long a, long b)
{
	int i;

	for (i = 0; i < 10; i++)
		tc_ping(fx_c());
	atomic_store(&era()->ledger->cq.head,
		     era()->cq_head - 5 - LEDGER_CQ_ENTRIES);
	flood();
	return 0;
}

/* Answers that nobody takes: it stops itself and nobody else. */
static long never_reads(void *shm, long a, long b)
{
	struct kvmm_era *e = era();
	struct t_wait w = t_wait_begin(500);
	struct ring_sqe nop = entry(RING_NOP);

	do {
		while (e->sq_tail - atomic_load(&e->ledger->sq.head) <
		       LEDGER_SQ_ENTRIES - 8)
			push(&nop);
	} while (t_wait_more(&w));
	return 0;
}

/* Well-formed entries with senseless contents: each page has its answer. */
static long senseless_pages(void *shm, long seed, long b)
{
	static struct ring_pub pub[64];
	static struct ring_key key[64];
	struct rng r;
	int i, j;

	rng_seed(&r, (uint64_t)seed);
	take_frames();
	for (i = 0; i < 200; i++) {
		struct ring_sqe e = entry(i % 2 ? RING_PUBLISH : RING_FETCH);

		rng_fill(&r, pub, sizeof(pub));
		rng_fill(&r, key, sizeof(key));
		for (j = 0; j < 64; j++) {
			pub[j].group &= 3;
			if (j % 4 == 0)
				pub[j].frame = own[j % 8];
			if (j % 3 == 0)
				pub[j].frame %= 2048;
			if (j % 2 == 0)
				pub[j].group = 0;
			key[j].group &= 1;
		}
		e.n = 64;
		e.req = (uint32_t)rng_next(&r);
		e.arg = i % 4 ? 0 : rng_next(&r);
		e.after = i % 5 ? 0 : rng_next(&r);
		push_array(&e, i % 2 ? (void *)pub : (void *)key,
			   i % 2 ? sizeof(pub) : sizeof(key));
		tc_poll(fx_c());
	}
	tc_ping(fx_c());
	return 0;
}

/* Keys of @n pages, the last one of group @group. */
static long asks_of_group(void *shm, long n, long group)
{
	static struct ring_key key[KVMM_MAX_BATCH + 1];
	struct ring_sqe e = entry(RING_END);

	e.nr_keys = (uint32_t)n;
	e.asked_ms = 0;
	key[n - 1].group = (uint16_t)group;
	push_array(&e, key, (uint32_t)n * sizeof(key[0]));
	return 0;
}

static long asks_of_no_group(void *shm, long a, long b)
{
	return asks_of_group(shm, 3, a);
}

static long asks_of_too_much(void *shm, long a, long b)
{
	return asks_of_group(shm, KVMM_MAX_BATCH + 1, 0);
}

static long senseless_entries(void *shm, long seed, long b)
{
	struct rng r;
	int i;

	rng_seed(&r, (uint64_t)seed);
	for (i = 0; i < 500; i++) {
		static const uint8_t ops[] = { RING_END, RING_CANCEL };
		struct ring_sqe e;

		rng_fill(&r, &e, sizeof(e));
		e.op = ops[i % 2];
		e.arena_len = 0;
		if (e.op == RING_END)
			e.nr_keys = 0;
		if (i % 3)
			e.win = view()->no;
		if (i % 5)
			e.space = (uint16_t)att()->ix;
		if (i % 7 == 0)
			e.frame %= 2048;
		push(&e);
		if (i % 256 == 0)
			tc_ping(fx_c());
	}
	tc_ping(fx_c());
	return 0;
}

static long unknown_objects(void *shm, long seed, long b)
{
	struct ring_key key = { .group = 0 };
	struct ring_pub pub = { .group = 0 };
	struct ring_fork fk = { .from = 1, .to = UINT32_MAX, .win = 200 };
	uint32_t frame = 1;
	int i;

	for (i = 0; i < 6; i++) {
		struct ring_sqe e = entry(RING_FETCH);

		e.win = i % 2 ? UINT16_MAX : 200;
		push_array(&e, &key, sizeof(key));
		e.op = RING_PUBLISH;
		push_array(&e, &pub, sizeof(pub));
		e.op = RING_FREE;
		push_array(&e, &frame, sizeof(frame));
		e.op = RING_FORK;
		push_array(&e, &fk, sizeof(fk));
		fk.win = view()->no;
		push_array(&e, &fk, sizeof(fk));
		e.op = RING_REPORT;
		e.space = 77;
		push_array(&e, &key, sizeof(key));
		e.op = RING_REFILL;
		e.arena_len = 0;
		push(&e);
	}
	tc_ping(fx_c());
	return 0;
}

/* -- the rest of the ledger ------------------------------------------------------------- */

static long magazine_head(void *shm, long a, long b)
{
	struct kvmm_req *rq = tc_req(fx_c(), 1);
	struct ring_sqe e = entry(RING_REFILL);
	kvmm_frame_t frame;

	tc_alloc(fx_c(), rq, 0, 1, &frame);
	atomic_store(&view()->wl->mag_head, 0x80000000u + (uint32_t)a);
	e.n = 64;
	push(&e);
	return 0;
}

static long pins_everywhere(void *shm, long value, long b)
{
	struct kvmm_view *v = view();
	uint32_t i;

	for (i = 0; i < v->max_frames; i++)
		atomic_store(&v->pins[i], (uint32_t)value);
	bell();
	return 0;
}

/* A few frames only, but as many pins as can be, and fewer than none. */
static long pins_absurd(void *shm, long a, long b)
{
	struct kvmm_view *v = view();
	uint32_t i;

	for (i = v->fpe; i < v->fpe + 16; i++)
		atomic_store(&v->pins[i], i % 2 ? UINT32_MAX : 0x80000000u);
	tc_ping(fx_c());
	return 0;
}

static long bitmap_of_ones(void *shm, long a, long b)
{
	struct kvmm_view *v = view();
	struct ring_sqe e = entry(RING_REFILL);
	uint32_t i;

	for (i = 0; i < BITMAP_WORDS(v->nr_extents); i++)
		atomic_store(&v->bitmap[i], UINT64_MAX);
	e.n = 500;
	push(&e);
	tc_ping(fx_c());
	return 0;
}

static long scribble_headers(void *shm, long seed, long b)
{
	struct kvmm_era *e = era();
	struct kvmm_view *v = view();
	struct ring_sqe nop = entry(RING_NOP);
	struct rng r;

	rng_seed(&r, (uint64_t)seed);
	rng_fill(&r, e->ledger, offsetof(struct ledger, step));
	rng_fill(&r, v->wl, offsetof(struct window_ledger, mag_tail));
	rng_fill(&r, (char *)e->ledger +
		    offsetof(struct ledger, step_wanted), 64);
	/* the daemon goes by its own arithmetic, and answers */
	push(&nop);
	T_WAIT(LONG_WAIT, atomic_load(&e->ledger->sq.head) == e->sq_tail);
	return 0;
}

static long scribble_requests(void *shm, long seed, long b)
{
	struct kvmm_era *e = era();
	struct rng r;

	rng_seed(&r, (uint64_t)seed);
	rng_fill(&r, (char *)e->ledger + e->ledger->req_off,
		    LEDGER_REQ_SLOTS * sizeof(struct ledger_req));
	tc_ping(fx_c());
	return 0;
}

static long scribble_cursors(void *shm, long seed, long b)
{
	struct kvmm_era *e = era();
	struct rng r;

	rng_seed(&r, (uint64_t)seed);
	rng_fill(&r, &e->ledger->sq, 2 * sizeof(struct ring_cursors) + 64);
	bell();
	return 0;
}

static long scribble_all(void *shm, long seed, long b)
{
	struct kvmm_era *e = era();
	size_t bytes = e->ledger_shm.bytes;
	struct rng r;

	rng_seed(&r, (uint64_t)seed);
	take_frames();
	rng_fill(&r, e->ledger, bytes);
	bell();
	return 0;
}

static long scribble_window(void *shm, long seed, long b)
{
	struct kvmm_view *v = view();
	struct ring_sqe e = entry(RING_REFILL);
	struct rng r;

	rng_seed(&r, (uint64_t)seed);
	take_frames();
	rng_fill(&r, v->wl, v->wl_shm.bytes);
	e.n = 8;
	push(&e);
	return 0;
}

static long step_at_the_end(void *shm, long a, long b)
{
	atomic_store(&era()->ledger->step, UINT64_MAX);
	bell();
	T_EQ(tc_put(fx_c(), 77, 0, 4), 4);
	return 0;
}

/* The arena changes while the daemon reads it. */
static _Atomic bool flip_on;

static void *flip_arena(void *arg)
{
	struct rng r;

	rng_seed(&r, 1);
	while (atomic_load(&flip_on))
		era()->arena[rng_below(&r, 65536)] ^=
			(uint8_t)(1u << rng_below(&r, 8));
	return NULL;
}

static long flipping_arrays(void *shm, long a, long b)
{
	static struct ring_pub pub[32];
	pthread_t th;
	int i, j;

	take_frames();
	atomic_store(&flip_on, true);
	T_EQ(pthread_create(&th, NULL, flip_arena, NULL), 0);
	for (i = 0; i < 300; i++) {
		struct ring_sqe e = entry(RING_PUBLISH);

		for (j = 0; j < 32; j++)
			pub[j] = (struct ring_pub) {
				.key = { (uint8_t)i, (uint8_t)j },
				.frame = own[j % 8], .flags = KVMM_PUB_ROOT,
			};
		e.n = 32;
		/* always at the front, where it is being changed */
		era()->arena_tail = (era()->arena_tail + LEDGER_ARENA_BYTES) /
				    LEDGER_ARENA_BYTES * LEDGER_ARENA_BYTES;
		T_WAIT(LONG_WAIT, era()->sq_tail ==
		       atomic_load(&era()->ledger->sq.head));
		e.arena_pos = (uint32_t)era()->arena_tail;
		e.arena_len = sizeof(pub);
		/* padding up to there */
		{
			struct ring_sqe pad = entry(RING_NOP);
			uint64_t head = atomic_load(&era()->ledger->arena_head);

			pad.arena_len = (uint32_t)(era()->arena_tail - head);
			push(&pad);
		}
		memcpy(era()->arena, pub, sizeof(pub));
		era()->arena_tail += sizeof(pub);
		push(&e);
		tc_poll(fx_c());
	}
	atomic_store(&flip_on, false);
	T_EQ(pthread_join(th, NULL), 0);
	tc_ping(fx_c());
	return 0;
}

/**
 * struct attack - what a bad client does
 * @reason:	for which it is cut off; NULL: it is not; "": that is left open
 */
struct attack {
	const char	*name;
	proc_fn		fn;
	const char	*reason;
	long		a;
};

static const struct attack ring_attacks[] = {
	{ "tail too far ahead", tail_far, "sq_tail", 0 },
	{ "tail goes back", tail_back, "sq_tail", 0 },
	{ "unknown operation", unknown_op, "sqe_op", 0 },
	{ "array too long", array_too_long, "sqe_array", 0 },
	{ "array of nothing", array_of_none, "sqe_array", 0 },
	{ "array over the arena's end", array_over_the_end, "sqe_array", 0 },
	{ "array before its place", array_before_its_place, "sqe_array", 0 },
	{ "absurd arena_len", arena_len_absurd, "sqe_array", 0 },
	{ "asks of no group", asks_of_no_group, "sqe_key", 1 },
	{ "asks of group 65535", asks_of_no_group, "sqe_key", 65535 },
	{ "asks of too much", asks_of_too_much, "sqe_array", 0 },
	{ "absurd refill", refill_absurd, "sqe_array", 0 },
	{ "refill of everything", refill_of_all, NULL, 0 },
	{ "frees frame 0", free_of_others, "sqe_frame", 0 },
	{ "frees what does not exist", free_of_others, "sqe_frame", 1 << 30 },
	{ "frees a page of others", free_of_others, "sqe_frame", -1 },
	{ "frees twice", free_twice, "sqe_frame", 0 },
	{ "completion head ahead", head_ahead, "cq_head", 0 },
	{ "completion head back", head_back, "cq_head", 0 },
	{ "never reads answers", never_reads, NULL, 0 },
	{ "senseless pages", senseless_pages, NULL, 3 },
	{ "senseless entries", senseless_entries, NULL, 4 },
	{ "unknown objects", unknown_objects, NULL, 0 },
};

static const struct attack ledger_attacks[] = {
	{ "magazine head", magazine_head, "limit", 0 },
	{ "magazine head, other", magazine_head, "limit", 12345 },
	{ "pins on everything", pins_everywhere, "limit", 1 },
	{ "pins beyond measure", pins_everywhere, "limit", 0xffffffff },
	{ "pins beyond measure on a few", pins_absurd, NULL, 0 },
	{ "bitmap of ones", bitmap_of_ones, NULL, 0 },
	{ "scribbled headers", scribble_headers, NULL, 5 },
	{ "scribbled request slots", scribble_requests, NULL, 6 },
	{ "scribbled cursors", scribble_cursors, "", 7 },
	{ "scribbled ledger", scribble_all, "", 8 },
	{ "scribbled ledger, other", scribble_all, "", 9 },
	{ "scribbled window", scribble_window, "", 10 },
	{ "step at the end of time", step_at_the_end, NULL, 0 },
	{ "arena changes while read", flipping_arrays, NULL, 0 },
};

/* A frame that holds a page which others have published. */
static long frame_of_others(void *shm, long a, long b)
{
	struct kvmm_hit hit[16];
	struct kvmm_req *rq = tc_req(fx_c(), 1);
	long frame;

	T_EQ(tc_match(fx_c(), rq, 1, 16, hit, NULL), 16);
	frame = hit[3].frame;
	tc_end(rq);
	return frame;
}

static void run_attack(struct fx *f, const struct attack *at,
		       const struct leak *before)
{
	uint64_t all = ta_rejects(&f->d, NULL), was = 0;
	struct proc *p = &f->p[BAD];
	long a = at->a;

	fprintf(stderr, "# %s\n", at->name);
	fx_client(f, BAD, 0, NULL);
	if (a < 0)
		a = proc_call(p, frame_of_others, 0, 0);
	if (at->reason && *at->reason)
		was = ta_rejects(&f->d, at->reason);
	proc_call(p, at->fn, a, 0);
	if (at->reason && *at->reason) {
		T_WAIT(LONG_WAIT, ta_rejects(&f->d, at->reason) == was + 1);
		T_EQ(ta_rejects(&f->d, NULL), all + 1);
	} else if (!at->reason) {
		ta_check(&f->d);
		T_EQ(ta_rejects(&f->d, NULL), all);
	}
	/* what it asks for is asked, with whatever it wrote */
	json_decref(ta_request(&f->d, "{\"cmd\": \"client\"}"));
	ta_pins(&f->d, 0);
	proc_kill(p);
	T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
	leak_settle(f->d.pid, before, LONG_WAIT);
	ta_check(&f->d);
}

static void run_attacks(struct fx *f, const struct attack *at, size_t n)
{
	struct leak before;
	size_t i;

	healthy_start(f, &before);
	for (i = 0; i < n; i++)
		run_attack(f, &at[i], &before);
	healthy_stop(f);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
	fx_stop(f);
}

static void garbage_in_rings_hurts_nobody(void **state)
{
	run_attacks(*state, ring_attacks, ARRAY_SIZE(ring_attacks));
}

static void garbage_in_ledgers_hurts_nobody(void **state)
{
	run_attacks(*state, ledger_attacks, ARRAY_SIZE(ledger_attacks));
}

/* Between its own frames, or any; after a step that is done, or one to come. */
static void random_forks(struct rng *r, struct ring_sqe *e)
{
	uint64_t at = era()->arena_tail % LEDGER_ARENA_BYTES;
	struct ring_fork *f = (struct ring_fork *)(era()->arena + at);
	uint32_t i;

	if (at + 64 * sizeof(struct ring_pub) > LEDGER_ARENA_BYTES)
		return;
	e->n = 1 + e->n % KVMM_MAX_GROUPS;
	e->after = rng_below(r, 2);
	for (i = 0; i < e->n; i++)
		f[i] = (struct ring_fork){
			.from = view()->fpe + (uint32_t)rng_below(r, 64),
			.to = rng_below(r, 8) ? view()->fpe +
				(uint32_t)rng_below(r, 64) : ~0u,
			.win = rng_below(r, 16) ? view()->no :
						  (uint16_t)rng_below(r, 300),
		};
}

/* Any entry at all, again and again. */
static long random_entries(void *shm, long seed, long n)
{
	struct rng r;

	rng_seed(&r, (uint64_t)seed);
	take_frames();
	rng_fill(&r, era()->arena, LEDGER_ARENA_BYTES);
	while (n--) {
		struct ring_sqe e;

		rng_fill(&r, &e, sizeof(e));
		e.op = (uint8_t)rng_below(&r, RING_NR_OPS);
		e.space = (uint16_t)att()->ix;
		e.win = view()->no;
		e.n = 1 + (uint32_t)rng_below(&r, 64);
		if (e.op == RING_FORK)
			random_forks(&r, &e);
		e.arena_pos = (uint32_t)era()->arena_tail;
		e.arena_len = 64 * sizeof(struct ring_pub);
		era()->arena_tail += e.arena_len;
		if (era()->arena_tail % LEDGER_ARENA_BYTES + e.arena_len >
		    LEDGER_ARENA_BYTES)
			break;
		push(&e);
	}
	return 0;
}

static void random_entries_hurt_nobody(void **state)
{
	unsigned int rounds = test_long() ? 500 : 25, i;
	struct fx *f = *state;
	struct leak before;

	healthy_start(f, &before);
	for (i = 0; i < rounds; i++) {
		fx_client(f, BAD, 0, NULL);
		proc_call(&f->p[BAD], random_entries,
			  (long)(test_seed() + i), 200);
		proc_kill(&f->p[BAD]);
		ta_check(&f->d);
	}
	T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
	leak_settle(f->d.pid, &before, LONG_WAIT);
	healthy_stop(f);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
	fx_stop(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(garbage_in_rings_hurts_nobody),
		FX_TEST(garbage_in_ledgers_hurts_nobody),
		FX_TEST(random_entries_hurt_nobody),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
