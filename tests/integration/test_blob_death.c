/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blobs of several writers at once, and with everything that can die on the way
 * dying on the way. What is mapped is right in every byte, or nothing is.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/blob_client.h"
#include "tests/lib/fixture.h"
#include "tests/lib/leak.h"
#include "tests/lib/unit.h"

/* -- several writers ----------------------------------------------------------------- */

#define WRITERS	3
#define ROUNDS	20

/* Each writes other bytes, and another length. */
static long race_len(long name, long writer)
{
	return (2 + (name + writer) % WRITERS) * (long)PAGE + 8 * writer;
}

static long child_race(void *shm, long name, long writer)
{
	return tb_save(&tb_mine, STATE, (uint64_t)name,
		       (uint64_t)race_len(name, writer), (uint64_t)writer);
}

static void one_of_several_writers_wins_and_it_is_his_alone(void **state)
{
	struct fx *f = *state;
	uint64_t pages = 0;
	long name, w, won, err;

	fx_start(f, NULL);
	for (w = 0; w < WRITERS; w++)
		tb_child(f, (unsigned int)w);
	tb_open(&f->c[0], f->d.socket);
	for (name = 0; name < ROUNDS; name++) {
		for (w = 0; w < WRITERS; w++)
			proc_send(&f->p[w], child_race, name, w);
		for (w = 0, won = -1; w < WRITERS; w++) {
			err = proc_recv(&f->p[w]);
			if (!err) {
				T_EQ(won, -1);
				won = w;
			} else {
				T_EQ(err, -EEXIST);
			}
		}
		T_CHECK(won >= 0);
		T_EQ(tb_restore(&f->c[0], STATE, (uint64_t)name,
				(uint64_t)race_len(name, won), (uint64_t)won,
				1000), 0);
		pages += CHUNKS((uint64_t)race_len(name, won));
	}
	/* of what the others wrote nothing is left */
	T_WAIT(LONG_WAIT, ta_pages(&f->d) == pages);
	ta_check(&f->d);
	tb_all_quiet(f);
}

/* -- who dies ----------------------------------------------------------------------------- */

static long child_begin(void *shm, long name, long len)
{
	struct kvmm_key key = tb_name(&tb_mine, STATE, (uint64_t)name);
	struct kvmm_req *rq = tc_req(&tb_mine, 1);
	struct kvmm_blob *b;

	T_OK(tb_begin(&tb_mine, rq, STATE, &key, NULL, (uint64_t)len, &b));
	memset(kvmm_blob_ptr(b), 0x55, (size_t)len);
	return 0;
}

/* Committed, but for a step that is never done. */
static long child_half_commit(void *shm, long name, long len)
{
	struct kvmm_key key = tb_name(&tb_mine, STATE, (uint64_t)name);
	struct kvmm_req *rq = tc_req(&tb_mine, 1);
	struct kvmm_blob *b;

	T_OK(tb_begin(&tb_mine, rq, STATE, &key, NULL, (uint64_t)len, &b));
	T_OK(kvmm_blob_commit(b, (uint64_t)len, 0, 5, 1));
	tc_ping(&tb_mine);
	return 0;
}

static void nothing_is_left_of(struct fx *f, proc_fn fn)
{
	tb_child(f, 0);
	T_EQ(proc_call(&f->p[0], fn, 1, MIB), 0);
	proc_signal(&f->p[0], SIGKILL);
	proc_reap(&f->p[0]);
	T_EQ(tb_restore(&f->c[0], STATE, 1, MIB, 0, 100), -ENOENT);
	T_WAIT(LONG_WAIT, !ta_pages(&f->d));
	ta_check(&f->d);
}

static void a_writer_that_dies_leaves_nothing(void **state)
{
	struct fx *f = *state;

	fx_start(f, NULL);
	tb_open(&f->c[0], f->d.socket);
	nothing_is_left_of(f, child_begin);
	nothing_is_left_of(f, child_half_commit);
	T_EQ(tb_save(&f->c[0], STATE, 1, MIB, 0), 0);
	T_EQ(tb_restore(&f->c[0], STATE, 1, MIB, 0, 100), 0);
	tb_all_quiet(f);
}

static void a_second_writer_takes_over_when_the_first_dies(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_key key, bytes = tb_bytes(1, 2 * PAGE, 4);
	struct kvmm_blob *b;
	struct kvmm_done d;
	struct kvmm_req *rq;

	fx_start(f, NULL);
	tb_open(c, f->d.socket);
	tb_child(f, 0);
	T_EQ(proc_call(&f->p[0], child_half_commit, 1, MIB), 0);
	key = tb_name(c, STATE, 1);
	rq = tc_req(c, 1);
	T_OK(tb_begin(c, rq, STATE, &key, NULL, 2 * PAGE, &b));
	tb_fill(kvmm_blob_ptr(b), 2 * PAGE, &bytes);
	T_OK(kvmm_blob_commit(b, 2 * PAGE, 0, 0, 8));
	tc_ping(c);
	T_EQ(c->nr_stray, 0);		/* it waits for the first's step */
	proc_signal(&f->p[0], SIGKILL);
	proc_reap(&f->p[0]);
	T_CHECK(tc_wait(c, 8, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	tc_end(rq);
	T_EQ(tb_restore(c, STATE, 1, 2 * PAGE, 4, 100), 0);
	tb_all_quiet(f);
}

static long child_map(void *shm, long name, long len)
{
	struct kvmm_req *rq = tc_req(&tb_mine, 1);
	struct kvmm_blob *b;
	struct kvmm_match m;

	if (tb_match(&tb_mine, rq, STATE, (uint64_t)name, &m) != 1)
		return -ENOENT;
	return tb_map(&tb_mine, rq, 0, 1000, &b);
}

static void a_reader_that_dies_lets_go(void **state)
{
	struct fx *f = *state;

	fx_start(f, NULL);
	tb_open(&f->c[0], f->d.socket);
	T_EQ(tb_save(&f->c[0], STATE, 1, MIB, 0), 0);
	tb_child(f, 0);
	T_EQ(proc_call(&f->p[0], child_map, 1, MIB), 0);
	T_EQ(ta_pins(&f->d, 0), CHUNKS(MIB) + 1);
	proc_signal(&f->p[0], SIGKILL);
	proc_reap(&f->p[0]);
	T_WAIT(LONG_WAIT, !ta_pins(&f->d, 0));
	T_EQ(tb_restore(&f->c[0], STATE, 1, MIB, 0, 100), 0);
	tb_all_quiet(f);
}

static void what_is_mapped_outlives_the_daemon(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_key bytes = tb_bytes(1, MIB, 0);
	struct kvmm_blob *b;
	struct kvmm_match m;
	struct kvmm_req *rq;

	fx_start(f, NULL);
	tb_open(c, f->d.socket);
	T_EQ(tb_save(c, STATE, 1, MIB, 0), 0);
	rq = tc_req(c, 1);
	T_EQ(tb_match(c, rq, STATE, 1, &m), 1);
	T_OK(tb_map(c, rq, 0, 1000, &b));
	td_kill(&f->d);
	T_EQ(tb_wrong(kvmm_blob_ptr(b), MIB, &bytes), 0);
	T_OK(td_start(&f->d));
	T_WAIT(LONG_WAIT, (tc_poll(c), kvmm_win_sync(c->win[0], 0) == -EBUSY));
	T_EQ(tb_wrong(kvmm_blob_ptr(b), MIB, &bytes), 0);
	tc_end(rq);
	T_WAIT(LONG_WAIT, (tc_poll(c), kvmm_win_sync(c->win[0], 0) >= 0));
	T_EQ(tb_restore(c, STATE, 1, MIB, 0, 100), -ENOENT);
	T_EQ(tb_save(c, STATE, 1, MIB, 0), 0);
	T_EQ(tb_restore(c, STATE, 1, MIB, 0, 100), 0);
	tb_all_quiet(f);
}

/* A blob that has to be read, on a disk that takes ten seconds. */
static long child_map_slow(void *shm, long name, long ms)
{
	struct kvmm_req *rq = tc_req(&tb_mine, 1);
	struct kvmm_blob *b;
	struct kvmm_match m;
	int err = -ENOENT;

	if (tb_match(&tb_mine, rq, STATE, (uint64_t)name, &m))
		err = kvmm_blob_map(rq, 0, deadline_in((uint64_t)ms *
						       NSEC_PER_MSEC), &b);
	tc_end(rq);
	return err;
}

/* The name of a blob of which something lies below only. */
static unsigned int one_below(struct tc *c, unsigned int n)
{
	unsigned int i;

	for (i = 0; i < n; i++)
		if (tb_restore(c, STATE, i, MIB, 0, 0) == -EAGAIN)
			return i;
	T_CHECK(0, "nothing is below");
	return 0;
}

static void who_waits_is_told_that_the_daemon_is_gone(void **state)
{
	struct fx *f = *state;
	unsigned int name;
	uint64_t t0;

	fx_start(f, &tb_tiers);
	tb_open(&f->c[0], f->d.socket);
	tb_saved_slowly(f, &f->c[0], 0, MANY, MIB);
	name = one_below(&f->c[0], MANY);
	ta_fault(&f->d, "nvme0:read:stall:ms=4000");
	tb_child(f, 0);
	/* a daemon that is stopped: late, and in time */
	T_OK(td_pause(&f->d));
	t0 = now_ns();
	T_EQ(proc_call(&f->p[0], child_map_slow, name, 200), -ETIMEDOUT);
	T_CHECK(now_ns() - t0 < 2 * NSEC_PER_SEC);
	T_OK(td_resume(&f->d));
	/* and one that dies */
	proc_send(&f->p[0], child_map_slow, name, 20000);
	usleep(200000);
	T_CHECK(!proc_answered(&f->p[0]));
	td_kill(&f->d);
	t0 = now_ns();
	T_EQ(proc_recv(&f->p[0]), -ENOTCONN);
	T_CHECK(now_ns() - t0 < 2 * NSEC_PER_SEC);
}

/* -- all of it -------------------------------------------------------------------------------- */

#define NAMES	12
#define LEN(n)	((uint64_t)((n) % 5 * 100000 + (n)))

/* Saves, restores, aborts, reports, for a while; returns what was restored. */
static long child_work(void *shm, long seed, long ms)
{
	uint64_t deadline = deadline_in((uint64_t)ms * NSEC_PER_MSEC);
	struct rng r;
	long had = 0;

	rng_seed(&r, (uint64_t)seed);
	while (!deadline_past(deadline)) {
		uint64_t name = rng_below(&r, NAMES), len = LEN(name);
		struct kvmm_key key = tb_name(&tb_mine, STATE, name);
		struct kvmm_key bytes = tb_bytes(name, len, 0);
		struct kvmm_req *rq = tc_req(&tb_mine, name);
		struct kvmm_blob *b;
		struct kvmm_match m;
		int err;

		if (tb_match(&tb_mine, rq, STATE, name, &m)) {
			err = tb_map(&tb_mine, rq, 0, 1000, &b);
			if (!err && tb_wrong(kvmm_blob_ptr(b), len, &bytes))
				return -EILSEQ;
			had += !err;
			if (!rng_below(&r, 20))
				T_OK(kvmm_report(rq, 0, KVMM_BAD));
		} else {
			err = tb_save_key(&tb_mine, rq, STATE, &key, NULL, len,
					  &bytes);
			T_CHECK(!err || err == -EEXIST || err == -EAGAIN,
				"%s", t_strerror(err));
		}
		if (!rng_below(&r, 10) &&
		    !kvmm_blob_begin(rq, THING, tb_mine.node, &key, NULL,
				     3 * PAGE, &b) && rng_below(&r, 2))
			kvmm_blob_abort(b);
		tc_end(rq);
	}
	return had;
}

static void many_at_work_and_some_dying_leave_the_laws_standing(void **state)
{
	unsigned int rounds = test_long() ? 40 : 6, i, w;
	struct fx *f = *state;
	long had = 0;

	fx_start(f, &tb_tiers);
	tb_open(&f->c[0], f->d.socket);
	for (i = 0; i < rounds; i++) {
		for (w = 0; w < 3; w++) {
			tb_child(f, w);
			proc_send(&f->p[w], child_work,
				  (long)test_seed() + i * 3 + w, 400);
		}
		usleep(100000 + i * 20000);
		ta_check(&f->d);
		proc_signal(&f->p[0], SIGKILL);
		proc_reap(&f->p[0]);
		for (w = 1; w < 3; w++) {
			long n = proc_recv(&f->p[w]);

			T_OK(n);
			had += n;
			proc_end(&f->p[w]);
		}
		ta_check(&f->d);
	}
	T_CHECK(had > 10 * (long)rounds, "%ld", had);
	tb_all_quiet(f);
}

static void lives_with_blobs_leave_nothing(void **state)
{
	unsigned int rounds = test_long() ? 300 : 30, i;
	struct leak mine_then, daemons;
	struct fx *f = *state;

	fx_start(f, NULL);
	tb_open(&f->c[0], f->d.socket);
	for (i = 0; i < rounds + 3; i++) {
		struct tc *c = &f->c[1];
		struct kvmm_blob *b;
		struct kvmm_key key;
		struct kvmm_match m;
		struct kvmm_req *rq;

		if (i == 3) {
			leak_calm(f->d.pid, &daemons);
			T_OK(leak_look(0, &mine_then));
		}
		tb_open(c, f->d.socket);
		T_EQ(tb_save(c, STATE, i % 4, 5 * PAGE, 0), i < 4 ? 0 : -EEXIST);
		T_EQ(tb_restore(c, STATE, i % 4, 5 * PAGE, 0, 1000), 0);
		rq = tc_req(c, 1);
		T_EQ(tb_match(c, rq, STATE, i % 4, &m), 1);
		T_OK(tb_map(c, rq, 0, 0, &b));
		key = tb_name(c, THING, i);
		T_OK(tb_begin(c, rq, THING, &key, NULL, 7 * PAGE, &b));
		/* left open: kvmm_close() ends it */
		tc_close(c);
	}
	leak_settle(0, &mine_then, 1000);
	leak_settle(f->d.pid, &daemons, LONG_WAIT);
	tb_all_quiet(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(one_of_several_writers_wins_and_it_is_his_alone),
		FX_TEST(a_writer_that_dies_leaves_nothing),
		FX_TEST(a_second_writer_takes_over_when_the_first_dies),
		FX_TEST(a_reader_that_dies_lets_go),
		FX_TEST(what_is_mapped_outlives_the_daemon),
		FX_TEST(who_waits_is_told_that_the_daemon_is_gone),
		FX_TEST(many_at_work_and_some_dying_leave_the_laws_standing),
		FX_TEST(lives_with_blobs_leave_nothing),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
