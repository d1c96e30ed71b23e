/* SPDX-License-Identifier: Apache-2.0 */
/* Windows that close: what is still read stays, and not a moment longer. */
#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/leak.h"
#include "tests/lib/unit.h"

#define PAGES	4u
#define ROUNDS	50

static struct fk f;
static struct fc c;
static struct kvmm_key key[PAGES];
static struct kvmm_hit hit[PAGES];
static struct leak with, without;	/* a window of class 0 */

static void win_open(void)
{
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]), 0);
}

static void win_close(void)
{
	kvmm_win_close(c.win[0]);
	c.win[0] = NULL;
}

static uint32_t match(void)
{
	struct kvmm_keys keys = { .k = key, .n = PAGES, .group = FK_FULL };
	struct kvmm_match m = { .size = sizeof(m) };

	assert_int_equal(kvmm_match(c.rq, &keys, 1, 0, hit, &m), 0);
	return m.n_resident;
}

static void end(uint64_t after)
{
	assert_int_equal(kvmm_req_end(c.rq, KVMM_ENDED, after), 0);
	c.rq = NULL;
}

static void poll_once(void)
{
	struct kvmm_done d;

	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
}

/* Mappings of shared memory beside the extents, which go with a window. */
static void expect_maps(const struct leak *want)
{
	struct leak now;

	assert_int_equal(leak_look(0, &now), 0);
	assert_int_equal(now.shm_maps, want->shm_maps);
}

static int setup(void **state)
{
	uint32_t i;

	if (fk_start(&f, 2) || fc_open(&f, &c))
		return -1;
	for (i = 0; i < PAGES; i++) {
		key[i] = fk_key(1, i);
		fk_seal(&f, 0, &key[i], FK_FULL, FK_FIRST + i, 5);
	}
	win_close();
	poll_once();
	if (leak_look(0, &without))
		return -1;
	win_open();
	return leak_look(0, &with);
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

static void a_closed_window_leaves_nothing_mapped(void **state)
{
	int i;

	for (i = 0; i < ROUNDS; i++) {
		win_close();
		expect_maps(&without);
		win_open();
		expect_maps(&with);
	}
}

static void a_request_of_before_does_not_keep_what_it_never_used(void **state)
{
	win_close();
	expect_maps(&without);
	win_open();
	assert_int_equal(match(), PAGES);
}

/* Its pins are in the tables: they are taken back when it ends. */
static void hits_keep_the_tables_until_the_request_ends(void **state)
{
	struct leak held;

	assert_int_equal(match(), PAGES);
	win_close();
	poll_once();
	assert_int_equal(fk_all_pins(&f, 0), PAGES);
	assert_int_equal(leak_look(0, &held), 0);
	assert_int_equal(held.shm_maps, without.shm_maps + 2);
	end(0);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	poll_once();
	expect_maps(&without);
}

static void a_step_that_reads_keeps_the_tables(void **state)
{
	struct leak held;

	assert_int_equal(match(), PAGES);
	end(7);
	win_close();
	poll_once();
	assert_int_equal(leak_look(0, &held), 0);
	assert_int_equal(held.shm_maps, without.shm_maps + 2);
	assert_int_equal(fk_all_pins(&f, 0), PAGES);
	assert_int_equal(kvmm_step_done(c.k, 7), 0);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	poll_once();
	expect_maps(&without);
}

/* Pins that were trimmed outlive the request that had them. */
static void trimmed_pins_keep_the_tables_until_their_step(void **state)
{
	struct leak held;

	assert_int_equal(match(), PAGES);
	assert_int_equal(kvmm_trim(c.rq, 1, 7), 0);
	end(0);
	win_close();
	poll_once();
	assert_int_equal(leak_look(0, &held), 0);
	assert_int_equal(held.shm_maps, without.shm_maps + 2);
	assert_int_equal(fk_all_pins(&f, 0), PAGES - 1);
	assert_int_equal(kvmm_step_done(c.k, 7), 0);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	poll_once();
	expect_maps(&without);
}

/* The daemon took its frames back, and may have given away its number. */
static void frames_of_a_closed_window_are_not_given_back(void **state)
{
	static kvmm_frame_t fr[400];
	struct ring_sqe sqe;

	fk_give(&f, 0, FK_FIRST, 400);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 400, fr, 0), 0);
	win_close();
	while (fk_take(&f, &sqe, NULL))
		;
	end(0);
	assert_false(fk_take_op(&f, RING_FREE, &sqe, NULL));
	poll_once();
	expect_maps(&without);
}

static void a_publish_in_flight_keeps_the_tables(void **state)
{
	struct kvmm_pub pub = { .key = fk_key(2, 0) };
	struct ring_sqe sqe;
	struct kvmm_done d;

	fk_give(&f, 0, FK_FIRST + PAGES, 1);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, &pub.frame, 0), 0);
	assert_int_equal(kvmm_publish(c.rq, 0, &pub, 1, 3), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, &sqe, NULL));
	win_close();
	end(0);
	poll_once();
	fk_answer(&f, &sqe, -ECANCELED, NULL, 0);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.result, -ECANCELED);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	poll_once();
	expect_maps(&without);
}

/* The daemon has it, and must not keep what nobody here can use. */
static void a_window_that_makes_no_sense_is_given_back(void **state)
{
	unsigned int closes;

	win_close();
	closes = f.win[0].closes;
	f.win[0].t->magic = 0;
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]), -EPROTO);
	assert_int_equal(f.win[0].closes, closes + 1);
	f.win[0].t->magic = KVMM_MAGIC_TABLE;
	win_open();
}

/* -- another daemon ---------------------------------------------------------------- */

static void find_the_next(void)
{
	uint64_t deadline = deadline_in(10 * NSEC_PER_SEC);
	uint64_t epoch = kvmm_epoch(c.k);
	struct kvmm_done d;

	fk_restart(&f);
	while (kvmm_epoch(c.k) == epoch) {
		assert_false(deadline_past(deadline));
		kvmm_poll(c.k, &d, 1);
	}
}

/* Each window is opened again in turn; none may look at what went with one. */
static void windows_find_the_next_daemon_one_by_one(void **state)
{
	end(0);
	find_the_next();
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	/* the first one took the space along */
	assert_null(kvmm_win_ptr(c.win[1], 0, FK_FIRST));
	assert_int_equal(kvmm_win_sync(c.win[1], 0), 1);
	assert_non_null(kvmm_win_ptr(c.win[0], 0, FK_FIRST));
	assert_non_null(kvmm_win_ptr(c.win[1], 0, FK_FIRST));
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 0);
	assert_int_equal(kvmm_win_sync(c.win[1], 0), 0);
}

/*
 * A thread that found the attachment in force before the daemon went, and goes
 * on as its mappings go: it may not bind a request to it any more.
 */
static struct kvmm_att *found_before;
static unsigned int asked, bound;

static void goes_on_now(void *arg, void *ptr, size_t bytes, int up)
{
	if (up || !found_before)
		return;
	asked++;
	bound += kvmm_att_get(found_before);
}

static void nobody_binds_to_what_is_going(void **state)
{
	const struct kvmm_win_opts o = {
		.size = sizeof(o), .on_extent = goes_on_now,
	};

	win_close();
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, &o, &c.win[0]), 0);
	end(0);
	asked = bound = 0;
	assert_true(kvmm_enter(c.k));
	found_before = c.sp->att;
	find_the_next();
	/* and one that did in time is in the way, as any other */
	assert_true(kvmm_att_get(found_before));
	assert_int_equal(kvmm_win_sync(c.win[0], 0), -EBUSY);
	kvmm_att_put(found_before);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	found_before = NULL;
	kvmm_exit(c.k);
	assert_int_equal(asked, 1);
	assert_int_equal(bound, 0);
}

/* -- reserves ----------------------------------------------------------------------- */

static uint32_t told_floor(unsigned int cls)
{
	struct kvmm_avail av = { .size = sizeof(av) };

	assert_int_equal(kvmm_avail(c.sp, cls, 0, &av), 0);
	return av.floor;
}

static void a_floor_is_asked_for_again_of_the_next_daemon(void **state)
{
	assert_int_equal(kvmm_reserve(c.sp, 1, 0, 20), 0);
	end(0);
	find_the_next();
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	assert_int_equal(f.win[0].reserves, 0);
	assert_int_equal(kvmm_win_sync(c.win[1], 0), 1);
	assert_int_equal(f.win[1].reserved, 20);
	assert_int_equal(told_floor(1), 20);
}

/* What the next daemon does not grant is not claimed to be there. */
static void a_floor_that_is_refused_is_none(void **state)
{
	assert_int_equal(kvmm_reserve(c.sp, 1, 0, 20), 0);
	end(0);
	f.full = true;
	find_the_next();
	assert_int_equal(kvmm_win_sync(c.win[1], 0), 1);
	assert_int_equal(f.win[1].reserves, 2);
	assert_int_equal(told_floor(1), 0);
	f.full = false;
}

static void a_floor_goes_with_its_window(void **state)
{
	assert_int_equal(kvmm_reserve(c.sp, 0, 0, 20), 0);
	assert_int_equal(told_floor(0), 20);
	win_close();
	win_open();
	assert_int_equal(told_floor(0), 0);
}

/* -- threads ------------------------------------------------------------------------ */

static _Atomic bool stop;
static _Atomic unsigned int found;

static void *matcher(void *arg)
{
	struct kvmm_keys keys = { .k = key, .n = PAGES, .group = FK_FULL };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit h[PAGES];
	struct kvmm_req *rq;

	while (!stop) {
		if (kvmm_req_open(c.sp, 9, NULL, &rq))
			break;
		/* without a window it is a mistake, with one a hit */
		if (!kvmm_match(rq, &keys, 1, 0, h, &m) && m.n_resident)
			found++;
		kvmm_peek(rq, &keys, 1, 0, &m);
		kvmm_req_end(rq, KVMM_ENDED, 0);
	}
	return NULL;
}

static void windows_close_under_threads_that_match(void **state)
{
	uint64_t deadline = deadline_in(20 * NSEC_PER_SEC);
	struct ring_sqe sqe;
	unsigned int i;
	pthread_t t;

	stop = false;
	found = 0;
	assert_int_equal(pthread_create(&t, NULL, matcher, NULL), 0);
	for (i = 0; i < ROUNDS || (found < 10 && !deadline_past(deadline));
	     i++) {
		win_close();
		while (fk_take(&f, &sqe, NULL))
			;
		win_open();
		poll_once();
	}
	stop = true;
	pthread_join(t, NULL);
	assert_true(found >= 10);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	win_close();
	poll_once();
	expect_maps(&without);
}

/* A call of another thread that takes longer than one may wait for it. */
static _Atomic bool in_callback, may_go;

static void takes_long(void *arg, void *ptr, size_t bytes, int up)
{
	in_callback = true;
	while (!may_go)
		poll(NULL, 0, 1);
}

static void *syncer(void *arg)
{
	return (void *)(intptr_t)kvmm_win_sync(c.win[1], 0);
}

static pthread_t begin_long_call(void)
{
	const struct kvmm_win_opts o = {
		.size = sizeof(o), .on_extent = takes_long,
	};
	pthread_t t;

	may_go = true;
	kvmm_win_close(c.win[1]);
	assert_int_equal(kvmm_win_open(c.sp, 1, 0, &o, &c.win[1]), 0);
	in_callback = may_go = false;
	fk_extent_up(&f, 1, 2);
	assert_int_equal(pthread_create(&t, NULL, syncer, NULL), 0);
	while (!in_callback)
		poll(NULL, 0, 1);
	return t;
}

static void end_long_call(pthread_t t)
{
	void *ret;

	may_go = true;
	pthread_join(t, &ret);
	assert_int_equal((intptr_t)ret, 1);
}

static void a_window_that_cannot_close_now_is_closed_later(void **state)
{
	unsigned int closes = f.win[0].closes;
	pthread_t t;

	end(0);
	t = begin_long_call();
	win_close();
	assert_int_equal(f.win[0].closes, closes);
	end_long_call(t);
	win_open();
	assert_int_equal(f.win[0].closes, closes + 1);
	assert_non_null(kvmm_win_ptr(c.win[0], 0, FK_FIRST));
}

static void a_space_that_cannot_go_now_goes_later(void **state)
{
	pthread_t t = begin_long_call();

	win_close();
	kvmm_space_detach(c.sp);
	c.rq = NULL;
	assert_int_equal(f.detaches, 0);
	end_long_call(t);
	assert_int_equal(kvmm_space_attach(c.k, fk_desc(2), &c.sp), 0);
	assert_int_equal(f.detaches, 1);
	assert_false(f.win[0].open);
	assert_false(f.win[1].open);
	win_open();
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_closed_window_leaves_nothing_mapped),
		T(a_request_of_before_does_not_keep_what_it_never_used),
		T(hits_keep_the_tables_until_the_request_ends),
		T(a_step_that_reads_keeps_the_tables),
		T(trimmed_pins_keep_the_tables_until_their_step),
		T(frames_of_a_closed_window_are_not_given_back),
		T(a_publish_in_flight_keeps_the_tables),
		T(a_window_that_makes_no_sense_is_given_back),
		T(windows_find_the_next_daemon_one_by_one),
		T(nobody_binds_to_what_is_going),
		T(a_floor_is_asked_for_again_of_the_next_daemon),
		T(a_floor_that_is_refused_is_none),
		T(a_floor_goes_with_its_window),
		T(windows_close_under_threads_that_match),
		T(a_window_that_cannot_close_now_is_closed_later),
		T(a_space_that_cannot_go_now_goes_later),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
