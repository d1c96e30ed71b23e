/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine's processes agree on what each step does, through a real kvmmd's
 * ledgers: whether that is there, stopped, or being replaced.
 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define RANKS		4u
#define WAIT_NS		(20 * NSEC_PER_SEC)
#define BACK_MS		5000

static struct kvmm_engine leader_of(uint32_t world)
{
	return (struct kvmm_engine){
		.size = sizeof(struct kvmm_engine), .world = world,
		.flags = KVMM_LEADER | KVMM_NO_STEP, .token = "test_agree",
	};
}

static struct kvmm_engine rank_of(uint32_t rank, uint32_t world)
{
	return (struct kvmm_engine){
		.size = sizeof(struct kvmm_engine), .world = world,
		.rank = rank, .token = "test_agree",
	};
}

/* Child 0 is the leader, those after it are the ranks. */
static void start(struct fx *f, uint32_t world)
{
	struct kvmm_engine e = leader_of(world);
	struct tc_opts o = { .engine = &e };
	uint32_t i;

	fx_start(f, NULL);
	fx_client(f, 0, 0, &o);
	for (i = 0; i < world; i++) {
		e = rank_of(i, world);
		fx_client(f, 1 + i, 0, &o);
	}
}

static uint64_t value_of(uint64_t step, unsigned int i)
{
	return (step + 1) * 0x9e3779b97f4a7c15u + i;
}

static uint64_t next_step;		/* of this process */

/* Lead for @ms; a decision's first value says how many steps there will be. */
static long lead(void *shm, long ms, long b)
{
	uint64_t deadline = deadline_in((uint64_t)ms * NSEC_PER_MSEC);
	uint64_t give_up = deadline + WAIT_NS, v[8], min;
	struct tc *c = fx_c();
	bool last = false;
	long n = 0;
	unsigned int i;

	for (; !last; n++, next_step++) {
		last = deadline_past(deadline);
		for (i = 1; i < 8; i++)
			v[i] = value_of(next_step, i);
		v[0] = last;
		T_OK(kvmm_agree_post(c->k, next_step, v, 8));
		do {
			/* as an engine that may have two steps in flight */
			T_OK(kvmm_agree_min(c->k, 5, 0, &min));
			tc_poll(c);
			T_CHECK(!deadline_past(give_up), "min %llu, step %llu",
				(unsigned long long)min,
				(unsigned long long)next_step);
		} while (min + 1 < next_step);
	}
	return n;
}

static long follow(void *shm, long a, long b)
{
	struct tc *c = fx_c();
	uint64_t v[8] = { 0 }, min;
	unsigned int i;
	long n;

	for (n = 0; !v[0]; n++, next_step++) {
		int err = kvmm_agree_get(c->k, next_step, v, 8,
					 deadline_in(WAIT_NS));

		if (err)
			return err;
		for (i = 1; i < 8; i++)
			T_CHECK(v[i] == value_of(next_step, i));
		T_OK(kvmm_agree_min(c->k, 5, next_step, &min));
		T_CHECK(min <= next_step);
		T_OK(kvmm_step_done(c->k, next_step));
		tc_poll(c);
	}
	return n;
}

static void send_all(struct fx *f, uint32_t world, long ms)
{
	uint32_t i;

	proc_send(&f->p[0], lead, ms, 0);
	for (i = 1; i <= world; i++)
		proc_send(&f->p[i], follow, 0, 0);
}

/* All have taken the same steps; how many. */
static long recv_all(struct fx *f, uint32_t world)
{
	long n = proc_recv(&f->p[0]);
	uint32_t i;

	for (i = 1; i <= world; i++)
		T_EQ(proc_recv(&f->p[i]), n);
	return n;
}

static void ranks_follow_their_leader(void **state)
{
	struct fx *f = *state;
	uint32_t world;

	for (world = 2; world <= RANKS; world += 2) {
		uint32_t i;

		start(f, world);
		send_all(f, world, 300);
		T_CHECK(recv_all(f, world) > 2);
		for (i = 0; i <= world; i++)
			proc_end(&f->p[i]);
		ta_baseline(&f->d, BACK_MS);
		fx_stop(f);
		td_fini(&f->d);
	}
}

static void a_stopped_daemon_changes_nothing(void **state)
{
	struct fx *f = *state;

	start(f, 2);
	send_all(f, 2, 100);
	recv_all(f, 2);
	T_OK(td_pause(&f->d));
	send_all(f, 2, 500);
	T_CHECK(recv_all(f, 2) > 2);
	T_OK(td_resume(&f->d));
	send_all(f, 2, 100);
	recv_all(f, 2);
}

static long eras_kept(void *shm, long a, long b)
{
	struct kvmm_era *e = kvmm_era_now(fx_c()->k);
	long n = -1;

	tc_poll(fx_c());
	for (; e; e = atomic_load(&e->older))
		n++;
	return n;
}

static long all_eras_kept(struct fx *f)
{
	long n = 0;
	uint32_t i;

	for (i = 0; i <= RANKS; i++)
		n += proc_call(&f->p[i], eras_kept, 0, 0);
	return n;
}

static void decisions_flow_while_the_daemon_is_replaced(void **state)
{
	unsigned int rounds = test_long() ? 20 : 4, i;
	struct fx *f = *state;
	struct rng r;

	rng_seed(&r, test_seed());
	start(f, RANKS);
	send_all(f, RANKS, rounds * 300);
	for (i = 0; i < rounds; i++) {
		struct timespec ts = ns_to_timespec(
			rng_below(&r, 150 * NSEC_PER_MSEC));

		nanosleep(&ts, NULL);
		td_kill(&f->d);
		ts = ns_to_timespec(rng_below(&r, 50 * NSEC_PER_MSEC));
		nanosleep(&ts, NULL);
		T_OK(td_start(&f->d));
	}
	T_CHECK(recv_all(f, RANKS) > 2);
	/* and nothing is kept of the daemons before, once all have met again */
	T_WAIT(BACK_MS, !all_eras_kept(f));
}

static long wait_for_next(void *shm, long a, long b)
{
	uint64_t v[8], t0 = now_ns();
	int err = kvmm_agree_get(fx_c()->k, next_step, v, 8,
				 deadline_in(WAIT_NS));

	return err == -EOWNERDEAD ? (long)((now_ns() - t0) / NSEC_PER_MSEC) :
				    err ? err : -EEXIST;
}

static void ranks_hear_of_their_leaders_death(void **state)
{
	struct fx *f = *state;
	uint32_t i;

	start(f, RANKS);
	send_all(f, RANKS, 50);
	recv_all(f, RANKS);
	for (i = 1; i <= RANKS; i++)
		proc_send(&f->p[i], wait_for_next, 0, 0);
	proc_kill(&f->p[0]);
	for (i = 1; i <= RANKS; i++) {
		long ms = proc_recv(&f->p[i]);

		T_CHECK(ms >= 0 && ms < 5000, "%ld", ms);
	}
	for (i = 1; i <= RANKS; i++)
		proc_end(&f->p[i]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
}

/* A rank dies in the middle of it: nobody waits for it longer than he must. */
static void all_hear_of_a_ranks_death(void **state)
{
	struct fx *f = *state;
	uint32_t i;

	start(f, RANKS);
	send_all(f, RANKS, 50);
	recv_all(f, RANKS);
	for (i = 0; i < RANKS; i++)
		if (i != 2)
			proc_send(&f->p[i], wait_for_next, 0, 0);
	proc_kill(&f->p[2]);
	for (i = 0; i < RANKS; i++)
		if (i != 2)
			T_CHECK(proc_recv(&f->p[i]) >= 0);
}

/* The connections alone; everybody else's lives. */
static long lose_the_socket(void *shm, long a, long b)
{
	T_OK(shutdown(fx_c()->k->sock, SHUT_RDWR));
	return 0;
}

static long connected(void *shm, long a, long b)
{
	struct kvmm_stats st = { .size = sizeof(st) };

	tc_poll(fx_c());
	T_OK(kvmm_stats(fx_c()->k, &st));
	return st.connected ? (long)st.reconnects : -1;
}

static void a_member_comes_back_and_is_heard_again(void **state)
{
	struct fx *f = *state;
	uint32_t i, j, round;

	start(f, 2);
	send_all(f, 2, 50);
	recv_all(f, 2);
	for (round = 0; round < 3; round++) {
		for (i = 0; i < 3; i++) {
			proc_call(&f->p[i], lose_the_socket, 0, 0);
			send_all(f, 2, 50);
			T_CHECK(recv_all(f, 2) > 2);
			T_WAIT(BACK_MS, proc_call(&f->p[i], connected, 0, 0) ==
					(long)round + 1);
			/* one that comes back throws nobody else out */
			for (j = 0; j < 3; j++)
				T_EQ(proc_call(&f->p[j], connected, 0, 0),
				     round + (j <= i));
		}
	}
}

/* -- matches -------------------------------------------------------------------------- */

#define PAGES	24

/* Rank: the frames of request @id, as the leader found them, bytes and all. */
static long read_match(void *shm, long id, long chain)
{
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit[PAGES];
	struct tc *c = fx_c();
	int n = kvmm_match_get(c->sp, (uint64_t)id, hit, PAGES, &m);

	if (n < 0)
		return n;
	T_EQ(n, m.n_resident);
	tc_check(c, (uint64_t)chain, hit, (uint32_t)n);
	return n;
}

static long sync_it(void *shm, long a, long b)
{
	tc_poll(fx_c());
	return tc_sync(fx_c(), 0);
}

static struct kvmm_req *held;		/* the leader's */

static long match_it(void *shm, long id, long chain)
{
	struct tc *c = fx_c();

	held = tc_req(c, (uint64_t)id);
	return tc_match(c, held, (uint64_t)chain, PAGES, NULL, NULL);
}

static long end_it(void *shm, long a, long b)
{
	tc_end(held);
	return 0;
}

static void ranks_read_the_pages_that_their_leader_found(void **state)
{
	struct fx *f = *state;
	uint32_t i;

	start(f, 2);
	tc_open(&f->c[0], f->d.socket, NULL);
	T_EQ(tc_put(&f->c[0], 7, 0, PAGES), PAGES);
	for (i = 0; i < 3; i++)
		proc_call(&f->p[i], sync_it, 0, 0);
	T_EQ(proc_call(&f->p[0], match_it, 42, 7), PAGES);
	T_EQ(proc_call(&f->p[1], read_match, 42, 7), PAGES);
	T_OK(td_pause(&f->d));
	T_EQ(proc_call(&f->p[2], read_match, 42, 7), PAGES);
	T_EQ(proc_call(&f->p[2], read_match, 43, 7), -EAGAIN);
	proc_call(&f->p[0], end_it, 0, 0);
	T_EQ(proc_call(&f->p[2], read_match, 42, 7), -EAGAIN);
	T_OK(td_resume(&f->d));
	T_EQ(proc_call(&f->p[0], match_it, 44, 7), PAGES);
	proc_kill(&f->p[0]);
	T_WAIT(BACK_MS, proc_call(&f->p[1], read_match, 44, 7) == -EOWNERDEAD);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(ranks_follow_their_leader),
		FX_TEST(a_stopped_daemon_changes_nothing),
		FX_TEST(decisions_flow_while_the_daemon_is_replaced),
		FX_TEST(ranks_hear_of_their_leaders_death),
		FX_TEST(all_hear_of_a_ranks_death),
		FX_TEST(a_member_comes_back_and_is_heard_again),
		FX_TEST(ranks_read_the_pages_that_their_leader_found),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
