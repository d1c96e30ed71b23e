/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that write garbage: into the rings, the rest of the ledger, the
 * arena, the socket. What libkvmm could not have written ends the connection
 * with a counted reason; the rest is answered or means nothing. In either case
 * nobody else is hurt: a healthy client works all the while, the laws hold, and
 * kvmmd holds afterwards what it held before.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/fixture.h"
#include "tests/lib/leak.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define HEALTHY		7		/* child */
#define BAD		0
#define PATH_LEN	256

static char path[PATH_LEN];

/* -- the healthy one ---------------------------------------------------------------- */

/*
 * Put, find and read new pages all the time; a wrong byte ends it, and so does
 * a call that does not return. While a bad one has all frames pinned there may
 * be no room to keep what was just published: found is most of it, not all.
 */
static long be_healthy(void *shm, long a, long b)
{
	_Atomic uint32_t *stop = shm;
	struct tc *c = fx_c();
	struct t_wait pause = t_wait_begin(600000);
	uint64_t chain = 1, found = 0;

	while (!atomic_load(stop)) {
		T_EQ(tc_put(c, 5000 + chain, 0, 8), 8);
		found += tc_hits(c, 5000 + chain, 8);
		tc_get(c, 1, 16, 100);
		chain++;
		t_wait_more(&pause);	/* leave the others a CPU */
	}
	T_CHECK(found >= 8 * chain / 2, "%llu pages of %llu published",
		(unsigned long long)found, (unsigned long long)(8 * chain));
	return (long)chain;
}

static long sync_windows(void *shm, long a, long b)
{
	return tc_sync(fx_c(), 0);
}

static const struct td_opts garbage_opts = {
	.dram_bytes = 32 * MIB, .nvme_bytes = 64 * MIB,
	.config = "{\"limits\": {\"pin_limit_pct\": 50}}",
};

/*
 * A daemon with all the extents that it will ever have, and a healthy client at
 * work; what it holds now it is to hold afterwards.
 */
static void start_healthy(struct fx *f, struct leak *before)
{
	long i;

	fx_start(f, &garbage_opts);
	snprintf(path, sizeof(path), "%s", f->d.socket);
	fx_client(f, HEALTHY, 0, NULL);
	for (i = 0; i < 40; i++)
		T_EQ(proc_call(&f->p[HEALTHY], fx_put, 9000 + i, 16), 16);
	T_EQ(proc_call(&f->p[HEALTHY], fx_put, 1, 16), 16);
	proc_call(&f->p[HEALTHY], sync_windows, 0, 0);
	proc_send(&f->p[HEALTHY], be_healthy, 0, 0);
	leak_calm(f->d.pid, before);
}

static void stop_healthy(struct fx *f)
{
	_Atomic uint32_t *stop = f->p[HEALTHY].shm;

	atomic_store(stop, 1);
	T_CHECK(proc_recv(&f->p[HEALTHY]) > 0);
	proc_end(&f->p[HEALTHY]);
}

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

static void fill_random(struct rng *r, void *p, size_t bytes)
{
	rng_fill(r, p, bytes);
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

		fill_random(&r, pub, sizeof(pub));
		fill_random(&r, key, sizeof(key));
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

static long senseless_entries(void *shm, long seed, long b)
{
	struct rng r;
	int i;

	rng_seed(&r, (uint64_t)seed);
	for (i = 0; i < 500; i++) {
		static const uint8_t ops[] = { RING_END, RING_CANCEL };
		struct ring_sqe e;

		fill_random(&r, &e, sizeof(e));
		e.op = ops[i % 2];
		e.arena_len = 0;
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
	fill_random(&r, e->ledger, offsetof(struct ledger, step));
	fill_random(&r, v->wl, offsetof(struct window_ledger, mag_tail));
	fill_random(&r, (char *)e->ledger +
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
	fill_random(&r, (char *)e->ledger + e->ledger->req_off,
		    LEDGER_REQ_SLOTS * sizeof(struct ledger_req));
	tc_ping(fx_c());
	return 0;
}

static long scribble_cursors(void *shm, long seed, long b)
{
	struct kvmm_era *e = era();
	struct rng r;

	rng_seed(&r, (uint64_t)seed);
	fill_random(&r, &e->ledger->sq, 2 * sizeof(struct ring_cursors) + 64);
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
	fill_random(&r, e->ledger, bytes);
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
	fill_random(&r, v->wl, v->wl_shm.bytes);
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

	start_healthy(f, &before);
	for (i = 0; i < n; i++)
		run_attack(f, &at[i], &before);
	stop_healthy(f);
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

/* Any entry at all, again and again. */
static long random_entries(void *shm, long seed, long n)
{
	struct rng r;

	rng_seed(&r, (uint64_t)seed);
	take_frames();
	fill_random(&r, era()->arena, LEDGER_ARENA_BYTES);
	while (n--) {
		struct ring_sqe e;

		fill_random(&r, &e, sizeof(e));
		e.op = (uint8_t)rng_below(&r, RING_NR_OPS);
		e.space = (uint16_t)att()->ix;
		e.win = view()->no;
		e.n = 1 + (uint32_t)rng_below(&r, 64);
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

	start_healthy(f, &before);
	for (i = 0; i < rounds; i++) {
		fx_client(f, BAD, 0, NULL);
		proc_call(&f->p[BAD], random_entries,
			  (long)(test_seed() + i), 200);
		proc_kill(&f->p[BAD]);
		ta_check(&f->d);
	}
	T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
	leak_settle(f->d.pid, &before, LONG_WAIT);
	stop_healthy(f);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
	fx_stop(f);
}

/* -- the socket ----------------------------------------------------------------------------- */

/* More may come at once than wait in the socket's queue. */
static int dial(void)
{
	int fd;

	T_WAIT(LONG_WAIT, (fd = sock_connect(path)) != -EAGAIN);
	T_CHECK(fd >= 0, "%s", strerror(-fd));
	return fd;
}

static void fill_hello(struct wire_hello *h)
{
	*h = (struct wire_hello) {
		.h = { .magic = WIRE_MAGIC, .type = WIRE_HELLO,
		       .len = sizeof(*h), .seq = 1 },
		.abi_min = KVMM_ABI_MIN, .abi_max = KVMM_ABI_VERSION,
		.pid = (uint32_t)getpid(), .name = "garbage",
	};
}

static struct sock_msg msg;

/* The next message, which must come; false: the peer has hung up. */
static bool hear(int fd)
{
	for (;;) {
		int err = sock_recv(fd, &msg);

		if (!err)
			return true;
		if (err != -EAGAIN)
			return false;
		T_CHECK(sock_wait(fd, 1 /* POLLIN */, deadline_in(LONG_WAIT *
				  NSEC_PER_MSEC)) != -ETIMEDOUT);
	}
}

static int hello(void)
{
	int fd = dial(), pidfd = fd_pidfd_open(getpid());
	struct wire_hello h;

	fill_hello(&h);
	T_OK(sock_send(fd, &h.h, &pidfd, 1));
	close(pidfd);
	T_CHECK(hear(fd));
	T_EQ(((struct wire_hdr *)msg.buf)->type, WIRE_WELCOME);
	sock_msg_close_fds(&msg);
	return fd;
}

/* It ends, after an error or without a word. */
static void hangs_up(int fd)
{
	while (hear(fd))
		sock_msg_close_fds(&msg);
	close(fd);
}

static void send_raw(int fd, const void *p, size_t n, const int *fds,
		     unsigned int nr_fds)
{
	char ctl[CMSG_SPACE(253 * sizeof(int))];
	struct iovec iov = { (void *)p, n };
	struct msghdr mh = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t sent;

	if (nr_fds) {
		struct cmsghdr *c;

		memset(ctl, 0, sizeof(ctl));
		mh.msg_control = ctl;
		mh.msg_controllen = CMSG_SPACE(nr_fds * sizeof(int));
		c = CMSG_FIRSTHDR(&mh);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(nr_fds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, nr_fds * sizeof(int));
	}
	sent = sendmsg(fd, &mh, MSG_NOSIGNAL);
	T_CHECK(sent == (ssize_t)n, "%s", strerror(errno));
}

static long raw_silent(void *shm, long a, long b)
{
	hangs_up(dial());
	return 1;
}

static long raw_noise(void *shm, long seed, long n)
{
	uint8_t noise[512];
	struct rng r;
	long i;

	rng_seed(&r, (uint64_t)seed);
	for (i = 0; i < n; i++) {
		int fd = dial();

		fill_random(&r, noise, sizeof(noise));
		send_raw(fd, noise, 1 + rng_below(&r, sizeof(noise)), NULL, 0);
		hangs_up(fd);
	}
	return n;
}

static long raw_magic(void *shm, long a, long b)
{
	struct wire_hello h;
	int fd = dial();

	fill_hello(&h);
	h.h.magic ^= 1;
	send_raw(fd, &h, sizeof(h), NULL, 0);
	hangs_up(fd);
	return 1;
}

static long raw_length(void *shm, long a, long b)
{
	struct wire_hello h;
	int fd = dial();

	fill_hello(&h);
	h.h.len += 8;
	send_raw(fd, &h, sizeof(h), NULL, 0);
	hangs_up(fd);
	return 1;
}

static long raw_huge(void *shm, long a, long b)
{
	static uint8_t big[WIRE_MAX_BYTES + 4096];
	struct wire_hello *h = (struct wire_hello *)big;
	int fd = dial(), room = 1 << 20;

	fill_hello(h);
	h->h.len = sizeof(big);
	setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
	send_raw(fd, big, sizeof(big), NULL, 0);
	hangs_up(fd);
	return 1;
}

/* @n descriptors where none or one belong, told or not told. */
static long raw_fds(void *shm, long n, long told)
{
	int fds[253], fd = dial(), i;
	struct wire_hello h;

	for (i = 0; i < n; i++)
		fds[i] = fd;
	fill_hello(&h);
	h.h.nr_fds = told ? (uint16_t)n : 1;
	send_raw(fd, &h, sizeof(h), fds, (unsigned int)n);
	hangs_up(fd);
	return 1;
}

static long raw_too_early(void *shm, long a, long b)
{
	struct wire_join j = { .h = { .type = WIRE_JOIN, .len = sizeof(j) } };
	int fd = dial();

	T_OK(sock_send(fd, &j.h, NULL, 0));
	hangs_up(fd);
	return 1;
}

static long raw_two_hellos(void *shm, long a, long b)
{
	int fd = hello();
	struct wire_hello h;

	fill_hello(&h);
	T_OK(sock_send(fd, &h.h, NULL, 0));
	hangs_up(fd);
	return 1;
}

static long raw_type(void *shm, long type, long b)
{
	struct wire_ok m = { .h = { .type = (uint16_t)type,
				    .len = sizeof(m) } };
	int fd = hello();

	T_OK(sock_send(fd, &m.h, NULL, 0));
	hangs_up(fd);
	return 1;
}

static long raw_short(void *shm, long by, long b)
{
	struct { struct wire_join j; uint8_t more[16]; } m = {
		.j.h = { .type = WIRE_JOIN,
			 .len = (uint32_t)(sizeof(m.j) + (size_t)by) },
	};
	int fd = hello();

	T_OK(sock_send(fd, &m.j.h, NULL, 0));
	hangs_up(fd);
	return 1;
}

static long raw_abi(void *shm, long a, long b)
{
	struct wire_error *e = (struct wire_error *)msg.buf;
	struct wire_hello h;
	int fd = dial();

	fill_hello(&h);
	h.abi_min = h.abi_max = 99;
	T_OK(sock_send(fd, &h.h, NULL, 0));
	T_CHECK(hear(fd));
	T_EQ(e->h.type, WIRE_ERROR);
	T_EQ(e->err, -EPROTO);
	T_CHECK(strstr(e->sentence, "ABI"));
	hangs_up(fd);
	return 1;
}

/* Somebody else's pidfd, or none at all: who lives longer must not be named. */
static long raw_identity(void *shm, long other, long b)
{
	int fd = dial(), id;
	struct wire_hello h;

	id = other ? fd_pidfd_open(getppid()) :
		     open("/dev/null", O_RDONLY | O_CLOEXEC);
	T_CHECK(id >= 0);
	fill_hello(&h);
	T_OK(sock_send(fd, &h.h, &id, 1));
	close(id);
	hangs_up(fd);
	return 1;
}

/* Asks and asks, and never reads. */
static long raw_deaf(void *shm, long a, long b)
{
	struct wire_join j = { .h = { .type = WIRE_JOIN, .len = sizeof(j) },
			       .world = 100000 };
	struct t_wait w = t_wait_begin(LONG_WAIT);
	int fd = hello(), err;

	do {
		err = sock_send(fd, &j.h, NULL, 0);
		T_CHECK(err != -EAGAIN || t_wait_more(&w));
	} while (!err || err == -EAGAIN);
	close(fd);
	return 1;
}

static const struct raw_attack {
	const char	*name;
	proc_fn		fn;
	const char	*reason;
	long		a, b;
} raw_attacks[] = {
	{ "says nothing", raw_silent, "hello_late", 0, 0 },
	{ "noise", raw_noise, "msg_bad", 11, 50 },
	{ "wrong magic", raw_magic, "msg_bad", 0, 0 },
	{ "wrong length", raw_length, "msg_bad", 0, 0 },
	{ "huge message", raw_huge, "msg_bad", 0, 0 },
	{ "20 descriptors, told", raw_fds, "msg_bad", 20, 1 },
	{ "20 descriptors, not told", raw_fds, "msg_bad", 20, 0 },
	{ "253 descriptors", raw_fds, "msg_bad", 253, 1 },
	{ "253 descriptors, not told", raw_fds, "msg_bad", 253, 0 },
	{ "before hello", raw_too_early, "msg_type", 0, 0 },
	{ "two hellos", raw_two_hellos, "msg_type", 0, 0 },
	{ "no such type", raw_type, "msg_type", 9999, 0 },
	{ "a type of the other side", raw_type, "msg_type", WIRE_WELCOME, 0 },
	{ "short message", raw_short, "msg_short", -8, 0 },
	{ "long message", raw_short, "msg_short", 8, 0 },
	{ "another ABI", raw_abi, "abi", 0, 0 },
	{ "somebody else's pidfd", raw_identity, "identity", 1, 0 },
	{ "no pidfd", raw_identity, "identity", 0, 0 },
	{ "never reads its socket", raw_deaf, "slow", 0, 0 },
};

static void garbage_on_the_socket_hurts_nobody(void **state)
{
	struct fx *f = *state;
	struct leak before;
	size_t i;

	start_healthy(f, &before);
	for (i = 0; i < ARRAY_SIZE(raw_attacks); i++) {
		const struct raw_attack *at = &raw_attacks[i];
		uint64_t all = ta_rejects(&f->d, NULL);
		uint64_t was = ta_rejects(&f->d, at->reason);
		long n;

		fprintf(stderr, "# %s\n", at->name);
		proc_start(&f->p[BAD]);
		n = proc_call(&f->p[BAD], at->fn, at->a, at->b);
		T_EQ(ta_rejects(&f->d, at->reason), was + (uint64_t)n);
		T_EQ(ta_rejects(&f->d, NULL), all + (uint64_t)n);
		proc_end(&f->p[BAD]);
		T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
		leak_settle(f->d.pid, &before, LONG_WAIT);
		ta_check(&f->d);
	}
	stop_healthy(f);
	ta_baseline(&f->d, LONG_WAIT);
	fx_stop(f);
}

/* Requests whose contents make no sense are answered, one by one. */
static long raw_requests(void *shm, long seed, long n)
{
	_Alignas(16) uint8_t buf[2048];
	struct wire_hdr *h = (struct wire_hdr *)buf;
	struct rng r;
	int fd = hello();
	long i;

	rng_seed(&r, (uint64_t)seed);
	for (i = 0; i < n; i++) {
		static const struct { uint16_t type, len; } kinds[] = {
			{ WIRE_JOIN, sizeof(struct wire_join) },
			{ WIRE_DETACH, sizeof(struct wire_win) },
			{ WIRE_WIN_OPEN, sizeof(struct wire_win_open) },
			{ WIRE_WIN_SYNC, sizeof(struct wire_win) },
			{ WIRE_WIN_CLOSE, sizeof(struct wire_win) },
			{ WIRE_RESERVE, sizeof(struct wire_reserve) },
		};
		size_t k = rng_below(&r, ARRAY_SIZE(kinds));

		fill_random(&r, buf, sizeof(buf));
		if (rng_below(&r, 2))
			memset(buf, 0, 32);
		h->type = kinds[k].type;
		h->len = kinds[k].len;
		h->seq = (uint32_t)i + 10;
		T_OK(sock_send(fd, h, NULL, 0));
		do {
			T_CHECK(hear(fd), "request %ld of type %u", i,
				kinds[k].type);
			sock_msg_close_fds(&msg);
		} while (((struct wire_hdr *)msg.buf)->seq != h->seq);
	}
	close(fd);
	return 0;
}

/* A good descriptor with bytes changed: attached or refused, never cut off. */
static long raw_descriptors(void *shm, long seed, long n)
{
	_Alignas(16) static uint8_t buf[sizeof(struct wire_attach) +
					DESC_MAX_BYTES];
	struct wire_attach *a = (struct wire_attach *)buf;
	static uint8_t good[DESC_MAX_BYTES];
	struct errmsg e;
	struct rng r;
	long i, attached = 0;
	int fd = hello(), len = desc_encode(tc_desc(NULL), good, &e);

	T_CHECK(len > 0);
	rng_seed(&r, (uint64_t)seed);
	for (i = 0; i < n; i++) {
		uint64_t j, flips = 1 + rng_below(&r, 8);
		uint32_t cut = rng_below(&r, 4) ? (uint32_t)len :
			       (uint32_t)rng_below(&r, (uint64_t)len + 1);

		memcpy(a->desc, good, (size_t)len);
		for (j = 0; j < flips; j++)
			a->desc[rng_below(&r, (uint64_t)len)] =
				(uint8_t)rng_next(&r);
		a->h = (struct wire_hdr) { .type = WIRE_ATTACH,
			.len = (uint32_t)sizeof(*a) + cut,
			.seq = (uint32_t)i + 10 };
		a->flags = 0;
		a->desc_len = cut;
		T_OK(sock_send(fd, &a->h, NULL, 0));
		T_CHECK(hear(fd), "descriptor %ld", i);
		attached += ((struct wire_hdr *)msg.buf)->type == WIRE_ATTACHED;
		sock_msg_close_fds(&msg);
		if (((struct wire_hdr *)msg.buf)->type != WIRE_ATTACHED)
			continue;
		/* some are good: a name with another letter in it */
		close(fd);
		fd = hello();
	}
	close(fd);
	return attached;
}

static void senseless_requests_are_answered(void **state)
{
	long n = test_long() ? 20000 : 600, i;
	struct fx *f = *state;
	struct leak before;

	start_healthy(f, &before);
	for (i = 0; i < 2; i++) {
		proc_start(&f->p[BAD]);
		proc_call(&f->p[BAD], i ? raw_descriptors : raw_requests,
			  (long)test_seed(), n);
		proc_end(&f->p[BAD]);
		T_EQ(ta_rejects(&f->d, NULL), 0);
		T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
		leak_settle(f->d.pid, &before, LONG_WAIT);
		ta_check(&f->d);
	}
	stop_healthy(f);
	fx_stop(f);
}

static long raw_storm(void *shm, long n, long say_hello)
{
	while (n--)
		close(say_hello ? hello() : dial());
	return 0;
}

/* As many silent ones as there may be: then they are sent away, or get old. */
static long raw_crowd(void *shm, long n, long b)
{
	int fd[200];
	long i;

	for (i = 0; i < n; i++)
		fd[i] = dial();
	for (i = 0; i < n; i++)
		hangs_up(fd[i]);
	return 0;
}

static long opens_in_time(void *shm, long a, long b)
{
	struct t_wait w = t_wait_begin(10000);
	struct tc c;
	int err;

	while ((err = tc_try_open(&c, path, NULL)))
		T_CHECK(t_wait_more(&w), "%s", t_strerror(err));
	tc_close(&c);
	return 0;
}

static void comers_and_goers_leave_nothing(void **state)
{
	struct fx *f = *state;
	struct leak before;

	start_healthy(f, &before);
	proc_start(&f->p[BAD]);
	proc_call(&f->p[BAD], raw_storm, 300, false);
	proc_call(&f->p[BAD], raw_storm, 100, true);
	proc_end(&f->p[BAD]);
	leak_settle(f->d.pid, &before, LONG_WAIT);

	proc_start(&f->p[BAD]);
	proc_start(&f->p[1]);
	proc_send(&f->p[BAD], raw_crowd, 200, 0);
	proc_call(&f->p[1], opens_in_time, 0, 0);
	proc_recv(&f->p[BAD]);
	proc_end(&f->p[BAD]);
	proc_end(&f->p[1]);
	T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
	leak_settle(f->d.pid, &before, LONG_WAIT);
	stop_healthy(f);
	ta_check(&f->d);
	fx_stop(f);
}

/* -- what must not be written -------------------------------------------------------------- */

static int ro_fds[16];
static unsigned int nr_ro, nr_rw;
static int rw_fds[16];

static void keep_fds(void)
{
	int fd;

	while ((fd = sock_msg_take_fd(&msg)) >= 0) {
		struct stat st;

		if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
			close(fd);	/* an eventfd */
			continue;
		}
		if ((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY)
			ro_fds[nr_ro++ % 16] = fd;
		else
			rw_fds[nr_rw++ % 16] = fd;
	}
}

static void ask(int fd, struct wire_hdr *h)
{
	T_OK(sock_send(fd, h, NULL, 0));
	T_CHECK(hear(fd));
	T_CHECK(((struct wire_hdr *)msg.buf)->type != WIRE_ERROR, "%s",
		((struct wire_error *)msg.buf)->sentence);
	keep_fds();
}

/* Everything that a read-only client is given. */
static void collect_fds(void)
{
	_Alignas(16) static uint8_t buf[sizeof(struct wire_attach) +
					DESC_MAX_BYTES];
	struct wire_attach *a = (struct wire_attach *)buf;
	struct wire_win_open w = { .h = { .type = WIRE_WIN_OPEN,
					  .len = sizeof(w), .seq = 3 } };
	struct wire_win s = { .h = { .type = WIRE_WIN_SYNC,
				     .len = sizeof(s), .seq = 4 } };
	struct wire_hello h;
	struct errmsg e;
	int fd = dial(), len = desc_encode(tc_desc(NULL), a->desc, &e);

	T_CHECK(len > 0);
	fill_hello(&h);
	ask(fd, &h.h);
	a->h = (struct wire_hdr) { .type = WIRE_ATTACH,
		.len = (uint32_t)sizeof(*a) + (uint32_t)len, .seq = 2 };
	a->desc_len = (uint32_t)len;
	ask(fd, &a->h);
	w.space = ((struct wire_attached *)msg.buf)->space;
	w.rights = KVMM_RO;
	ask(fd, &w.h);
	s.win = ((struct wire_window *)msg.buf)->win;
	ask(fd, &s.h);
	/* header, index, frame table, an extent */
	T_CHECK(nr_ro >= 4, "%u read-only descriptors", nr_ro);
	T_CHECK(nr_rw >= 2);		/* the two ledgers */
}

static void cannot_write(int fd)
{
	char link[64];
	struct stat st;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	T_OK(fstat(fd, &st));
	T_EQ(st.st_mode & 0777, 0400);
	T_CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) ==
		MAP_FAILED);
	T_EQ(errno, EACCES);
	T_EQ(pwrite(fd, "x", 1, 0), -1);
	T_EQ(errno, EBADF);
	T_EQ(open(link, O_RDWR | O_CLOEXEC), -1);
	T_EQ(errno, EACCES);
	T_EQ(fchmod(fd, 0666), -1);
	T_EQ(errno, EPERM);
	T_EQ(ftruncate(fd, 0), -1);
	T_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
		       4096), -1);
	T_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	T_EQ(errno, EPERM);
}

static void never_writable_later(int fd)
{
	void *p = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);

	T_CHECK(p != MAP_FAILED);
	T_EQ(mprotect(p, 4096, PROT_READ | PROT_WRITE), -1);
	T_EQ(errno, EACCES);
	munmap(p, 4096);
}

static long try_to_write(void *shm, long a, long b)
{
	unsigned int i;
	int control;

	collect_fds();
	/* from another user: kvmmd's own is in its trust domain */
	T_OK(setresuid(65534, 65534, 65534));
	T_OK(prctl(PR_SET_DUMPABLE, 1));
	control = memfd_create("control", MFD_CLOEXEC);
	T_CHECK(control >= 0);
	{
		char link[64];

		snprintf(link, sizeof(link), "/proc/self/fd/%d", control);
		T_CHECK(open(link, O_RDWR | O_CLOEXEC) >= 0);
	}
	for (i = 0; i < nr_ro; i++) {
		cannot_write(ro_fds[i]);
		never_writable_later(ro_fds[i]);
	}
	/* what it may write it cannot resize: that would be a SIGBUS */
	for (i = 0; i < nr_rw; i++) {
		T_EQ(ftruncate(rw_fds[i], 0), -1);
		T_EQ(ftruncate(rw_fds[i], 1L << 40), -1);
		T_EQ(fcntl(rw_fds[i], F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
	}
	return nr_ro;
}

static void what_must_not_be_written_cannot_be(void **state)
{
	struct fx *f = *state;
	struct leak before;

	if (geteuid()) {
		fprintf(stderr, "needs root to become another user\n");
		skip();
	}
	start_healthy(f, &before);
	proc_start(&f->p[BAD]);
	T_CHECK(proc_call(&f->p[BAD], try_to_write, 0, 0) >= 4);
	proc_end(&f->p[BAD]);
	stop_healthy(f);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(garbage_in_rings_hurts_nobody),
		FX_TEST(garbage_in_ledgers_hurts_nobody),
		FX_TEST(random_entries_hurt_nobody),
		FX_TEST(garbage_on_the_socket_hurts_nobody),
		FX_TEST(senseless_requests_are_answered),
		FX_TEST(comers_and_goers_leave_nothing),
		FX_TEST(what_must_not_be_written_cannot_be),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
