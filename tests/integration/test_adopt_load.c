/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd is killed under several engines, and under engines of several ranks:
 * all of them work on with the next one.
 */
#include <errno.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/kept.h"
#include "tests/lib/unit.h"

/* -- several, under load ----------------------------------------------------------- */

#define LOAD_PAGES	32
#define LOAD_CHAINS	24

/* Put and read chains until told otherwise; bytes are checked all along. */
static long work(void *shm, long base, long ms)
{
	uint64_t deadline = deadline_in((uint64_t)ms * NSEC_PER_MSEC);
	struct tc *c = fx_c();
	long done = 0;
	struct rng r;

	rng_seed(&r, (uint64_t)base);
	while (!deadline_past(deadline)) {
		uint64_t chain = (uint64_t)base + rng_below(&r, LOAD_CHAINS);
		struct kvmm_hit hit[LOAD_PAGES];
		kvmm_frame_t f[LOAD_PAGES];
		struct kvmm_req *rq = tc_req(c, chain);
		struct kvmm_pub pub[LOAD_PAGES];
		struct kvmm_done d;
		unsigned int i;
		uint32_t n;

		n = tc_match_once(c, rq, chain, LOAD_PAGES, hit, NULL);
		tc_check(c, chain, hit, n);
		if (n < LOAD_PAGES &&
		    !kvmm_alloc(rq, 0, c->node, LOAD_PAGES - n, f, 0)) {
			for (i = n; i < LOAD_PAGES; i++) {
				tc_pub(c, &pub[i], chain, i, TC_FULL, f[i - n],
				       0);
				tc_fill(c, 0, f[i - n], &pub[i].key);
			}
			c->tag++;
			if (!kvmm_publish(rq, c->node, &pub[n], LOAD_PAGES - n,
					  c->tag))
				tc_wait(c, c->tag, &d, 2000);
		}
		tc_end(rq);
		tc_poll(c);
		kvmm_win_sync(c->win[0], 0);
		done++;
	}
	return done;
}

static long count_hits(void *shm, long base, long b)
{
	long i, n = 0;

	for (i = 0; i < LOAD_CHAINS; i++)
		n += fx_hits(shm, base + i, LOAD_PAGES);
	return n;
}

static long poll_back(void *shm, long a, long b)
{
	T_WAIT(LONG_WAIT, tc_back(fx_c(), (uint64_t)a));
	return 0;
}

static bool up(struct tc *c)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	struct kvmm_done d;

	kvmm_poll(c->k, &d, 1);
	T_OK(kvmm_stats(c->k, &st));
	return st.connected;
}

static long poll_up(void *shm, long a, long b)
{
	T_WAIT(LONG_WAIT, up(fx_c()));
	return 0;
}

static long my_reconnects(void *shm, long a, long b)
{
	return (long)tc_reconnects(fx_c());
}

static void engines_work_on_through_crashes(void **state)
{
	unsigned int rounds = test_long() ? 12 : 3, i, k;
	struct fx *f = *state;
	long before, after, n[3];
	struct timespec ts;
	struct rng r;

	rng_seed(&r, test_seed());
	fx_start_kept(f);
	for (i = 0; i < 3; i++)
		fx_client(f, i, 0, NULL);
	for (k = 0; k < rounds; k++) {
		for (i = 0; i < 3; i++)
			proc_send(&f->p[i], work, 1000, 1500);
		ts = ns_to_timespec(100 * NSEC_PER_MSEC +
				    rng_below(&r, 300 * NSEC_PER_MSEC));
		nanosleep(&ts, NULL);
		fx_crash(f, false);
		for (i = 0; i < 3; i++)
			T_CHECK(proc_recv(&f->p[i]) > 0);
		for (i = 0; i < 3; i++)
			proc_call(&f->p[i], poll_up, 0, 0);
		ta_check(&f->d);
	}
	/* what is there now is there after the next one */
	before = proc_call(&f->p[0], count_hits, 1000, 0);
	T_CHECK(before > LOAD_CHAINS * LOAD_PAGES / 2, "%ld pages", before);
	for (i = 0; i < 3; i++)
		n[i] = proc_call(&f->p[i], my_reconnects, 0, 0);
	fx_crash(f, false);
	for (i = 0; i < 3; i++)
		proc_call(&f->p[i], poll_back, n[i], 0);
	for (i = 0; i < 3; i++) {
		after = proc_call(&f->p[i], count_hits, 1000, 0);
		T_CHECK(after * 100 >= before * 98, "%ld of %ld pages", after,
			before);
	}
	T_EQ(ta_rejects(&f->d, NULL), 0);
	for (i = 0; i < 3; i++)
		proc_end(&f->p[i]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
	fx_stop(f);
}

/* Nobody is there to hear of it; the next one does. */
static void who_died_meanwhile_holds_nothing(void **state)
{
	struct fx *f = *state;
	pid_t pid;

	fx_start_kept(f);
	fx_client(f, 0, 0, NULL);
	fx_client(f, 1, 0, NULL);
	T_EQ(proc_call(&f->p[0], fx_put, 1, 32), 32);
	T_EQ(proc_call(&f->p[0], fx_hold, 1, 32), 32);
	T_EQ(proc_call(&f->p[1], fx_hold, 1, 32), 32);
	pid = td_kept(&f->d);
	T_OK(td_pause(&f->d));
	T_OK(kill(pid, SIGKILL));
	proc_kill(&f->p[0]);
	T_OK(td_resume(&f->d));
	T_WAIT(LONG_WAIT, td_kept(&f->d) > 0 && td_kept(&f->d) != pid);
	T_WAIT(BACK_MS, ta_clients(&f->d) == 1);
	T_EQ(ta_pins(&f->d, 0), 32);
	T_EQ(ta_pins(&f->d, f->p[1].pid), 32);
	proc_call(&f->p[1], poll_back, 0, 0);
	T_EQ(proc_call(&f->p[1], fx_recheck, 1, 32), 0);
	proc_call(&f->p[1], fx_release, 0, 0);
	T_EQ(proc_call(&f->p[1], fx_hits, 1, 32), 32);
	proc_end(&f->p[1]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
	fx_stop(f);
}

/* -- an engine of two ----------------------------------------------------------------- */

static struct kvmm_engine member_of(uint32_t rank)
{
	struct kvmm_engine e = {
		.size = sizeof(e), .rank = rank, .world = 2,
		.flags = rank ? 0 : KVMM_LEADER, .token = "adopted engine",
	};

	return e;
}

static void an_engine_stays_one(void **state)
{
	struct kvmm_engine e[2] = { member_of(0), member_of(1) };
	struct tc_opts o[2] = { { .engine = &e[0] }, { .engine = &e[1] } };
	struct fx *f = *state;
	struct t_wait w = t_wait_begin(LONG_WAIT);
	kvmm_frame_t frame[8];
	struct kvmm_req *rq;
	unsigned int i, round;

	fx_start_kept(f);
	for (i = 0; i < 2; i++)
		tc_open(&f->c[i], f->d.socket, &o[i]);
	for (round = 0; round < 3; round++) {
		rq = tc_req(&f->c[0], 1);
		while (kvmm_alloc(rq, 0, f->c[0].node, 8, frame, 0) == -EAGAIN) {
			T_CHECK(t_wait_more(&w));
			for (i = 0; i < 2; i++)
				tc_sync(&f->c[i], 0);
			tc_poll(&f->c[0]);
		}
		tc_end(rq);
		T_EQ(tc_put(&f->c[0], 1 + round, 0, 8), 8);
		for (i = 0; i < 2; i++)
			T_OK(kvmm_step_done(f->c[i].k, 10 + round));
		fx_crash(f, false);
		for (i = 0; i < 2; i++)
			T_WAIT(LONG_WAIT, tc_back(&f->c[i], round));
		/* steps go on, and so do hits */
		T_EQ(kvmm_step_engine(f->c[0].k), 10 + round);
		T_EQ(kvmm_step_engine(f->c[1].k), 10 + round);
		for (i = 0; i <= round; i++) {
			T_EQ(tc_hits(&f->c[0], 1 + i, 8), 8);
			T_EQ(tc_hits(&f->c[1], 1 + i, 8), 8);
		}
	}
	ta_check(&f->d);
}

/* Frames with a part for each rank: both parts are there, and both ranks. */
static void so_does_one_on_a_gang(void **state)
{
	struct kvmm_engine e[2] = { member_of(0), member_of(1) };
	struct tc_opts o[2] = {
		{ .engine = &e[0], .world = 2, .node = "gang0" },
		{ .engine = &e[1], .world = 2, .node = "gang0" },
	};
	struct td_opts opts = fx_kept;
	struct fx *f = *state;
	struct tc *c = f->c;
	struct t_wait w = t_wait_begin(LONG_WAIT);
	kvmm_frame_t frame[8];
	struct kvmm_pub pub[8];
	struct kvmm_req *rq;
	struct kvmm_done d;
	unsigned int i, k;

	opts.gang = 2;
	opts.gang_bytes = 32 * MIB;
	fx_start(f, &opts);
	for (i = 0; i < 2; i++)
		tc_open(&c[i], f->d.socket, &o[i]);
	rq = tc_req(&c[0], 1);
	while (kvmm_alloc(rq, 0, c[0].node, 8, frame, 0) == -EAGAIN) {
		T_CHECK(t_wait_more(&w));
		for (i = 0; i < 2; i++)
			tc_sync(&c[i], 0);
		tc_poll(&c[0]);
	}
	for (i = 0; i < 8; i++) {
		tc_pub(&c[0], &pub[i], 1, i, TC_FULL, frame[i], 0);
		for (k = 0; k < 2; k++)
			tc_fill(&c[k], 0, frame[i], &pub[i].key);
	}
	T_OK(kvmm_publish(rq, c[0].node, pub, 8, 5));
	T_CHECK(tc_wait(&c[0], 5, &d, LONG_WAIT));
	T_EQ(d.result, 0);
	for (k = 0; k < 2; k++) {
		fx_crash(f, k == 0);
		for (i = 0; i < 2; i++)
			T_WAIT(LONG_WAIT, tc_back(&c[i], k));
		for (i = 0; i < 2; i++)
			T_EQ(tc_hits(&c[i], 1, 8), 8);
	}
	tc_end(rq);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(engines_work_on_through_crashes),
		FX_TEST(who_died_meanwhile_holds_nothing),
		FX_TEST(an_engine_stays_one),
		FX_TEST(so_does_one_on_a_gang),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
