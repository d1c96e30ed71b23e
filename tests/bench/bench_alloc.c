/* SPDX-License-Identifier: Apache-2.0 */
/*
 * alloc - take frames from the magazine and give them back
 *
 * Subject: kvmm_alloc() and kvmm_free() of 16 frames, and one by one, in
 * steady state: the magazine has enough and the daemon is not asked. Floor: a
 * process-private stack of frame numbers behind a spin lock, what an engine's
 * own allocator would be.
 */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "tests/bench/bench.h"

#define BATCH		16u
#define NR_LOOPS	200000u		/* batches a block */
#define STACK		1024u
#define FIRST_MS	10000

struct alloc {
	struct bench	b;
	struct test_daemon kvmmd;
	struct bench_client c;
	struct kvmm_req	*rq;
	unsigned int	batch;
	kvmm_frame_t	frame[BATCH];
	/* floor */
	atomic_flag	lock;
	unsigned int	top;
	kvmm_frame_t	stack[STACK];
};

static double run_subject(void *arg)
{
	struct alloc *a = arg;
	unsigned int i, n = a->batch;
	uint64_t t = bench_cpu_ns();

	for (i = 0; i < NR_LOOPS; i++) {
		int err = kvmm_alloc(a->rq, 0, a->c.node, n, a->frame, 0);

		if (!err)
			err = kvmm_free(a->rq, 0, a->c.node, a->frame, n, 0);
		if (err)
			bench_die(&a->b, "alloc and free", err);
	}
	return (double)(bench_cpu_ns() - t) / NR_LOOPS / n;
}

static void floor_lock(struct alloc *a)
{
	/* acquire: pairs with floor_unlock() */
	while (atomic_flag_test_and_set_explicit(&a->lock,
						 memory_order_acquire))
		;
}

static void floor_unlock(struct alloc *a)
{
	/* release: pairs with floor_lock() */
	atomic_flag_clear_explicit(&a->lock, memory_order_release);
}

static double run_floor(void *arg)
{
	struct alloc *a = arg;
	unsigned int i, n = a->batch;
	uint64_t t = bench_cpu_ns();

	for (i = 0; i < NR_LOOPS; i++) {
		floor_lock(a);
		a->top -= n;
		memcpy(a->frame, &a->stack[a->top], n * sizeof(*a->frame));
		floor_unlock(a);
		/* The caller sees the frames: keep the copy. */
		__asm__ volatile("" : : "r" (a->frame) : "memory");
		floor_lock(a);
		memcpy(&a->stack[a->top], a->frame, n * sizeof(*a->frame));
		a->top += n;
		floor_unlock(a);
	}
	return (double)(bench_cpu_ns() - t) / NR_LOOPS / n;
}

int main(void)
{
	static struct alloc a = { .lock = ATOMIC_FLAG_INIT };
	bool two = sysconf(_SC_NPROCESSORS_ONLN) > 1;
	struct td_opts o = { .dram_bytes = 256u << 20, .cpu = two ? 2 : 0 };
	struct kvmm_stats before = { .size = sizeof(before) }, after = before;
	struct bench_ratio many, one;
	unsigned int i;
	int err;

	bench_init(&a.b, "alloc");
	if (two)
		td_pin_cpu(0, 0);
	for (i = 0; i < STACK; i++)
		a.stack[i] = i + 1;
	a.top = STACK;
	bench_daemon(&a.b, &a.kvmmd, &o);
	bc_open(&a.c, &a.b, a.kvmmd.socket, 4096);
	a.rq = bc_req(&a.c, 1);
	err = bc_alloc(&a.c, a.rq, BATCH, a.frame, FIRST_MS);
	if (err)
		bench_die(&a.b, "first frames", err);
	kvmm_free(a.rq, 0, a.c.node, a.frame, BATCH, 0);

	kvmm_stats(a.c.k, &before);
	a.batch = BATCH;
	bench_abba("16 frames", BENCH_ROUNDS, run_subject, run_floor, &a, &many);
	a.batch = 1;
	bench_abba("one frame", BENCH_ROUNDS, run_subject, run_floor, &a, &one);
	kvmm_stats(a.c.k, &after);
	kvmm_req_end(a.rq, KVMM_UNKNOWN, 0);
	bc_close(&a.c);

	bench_result(&a.b, "ns_per_page", many.subject);
	bench_result(&a.b, "floor_ns_per_page", many.floor);
	bench_result(&a.b, "ratio", many.ratio);
	bench_result(&a.b, "noise", many.noise);
	bench_result(&a.b, "ns_per_page_of_1", one.subject);
	bench_result(&a.b, "floor_ns_per_page_of_1", one.floor);
	bench_result(&a.b, "noise_of_1", one.noise);
	bench_result(&a.b, "refused",
		     (double)(after.alloc_refused - before.alloc_refused));
	bench_must(&a.b, "ns_per_page", many.subject, "<=", 100);
	return bench_finish(&a.b);
}
