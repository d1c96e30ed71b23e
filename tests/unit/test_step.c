/* SPDX-License-Identifier: Apache-2.0 */
/* Steps over a change of daemon: what a kernel may still touch stays mapped. */
#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define FRAME	70u
#define OPEN	80u

static struct fk f;
static struct fc c;
static struct kvmm_done d;
static struct kvmm_key key;

static int setup(void **state)
{
	if (fk_start(&f, 1) || fc_open(&f, &c))
		return -1;
	key = fk_key(1, 0);
	fk_seal(&f, 0, &key, FK_FULL, FRAME, 1);
	return 0;
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

static void end(uint64_t after)
{
	assert_int_equal(kvmm_req_end(c.rq, KVMM_ENDED, after), 0);
	c.rq = NULL;
}

static char *byte(uint32_t frame)
{
	return kvmm_win_ptr(c.win[0], 0, frame);
}

static void lose(void)
{
	uint64_t deadline = deadline_in(20 * NSEC_PER_SEC);

	f.stopped = true;
	fk_hang_up(&f);
	while (kvmm_poll(c.k, &d, 1) != -ENOTCONN) {
		assert_false(deadline_past(deadline));
		poll(NULL, 0, 1);
	}
}

static void find_the_next(void)
{
	uint64_t deadline = deadline_in(20 * NSEC_PER_SEC);
	uint64_t epoch = kvmm_epoch(c.k);

	f.stopped = false;
	fk_restart(&f);
	while (kvmm_epoch(c.k) == epoch) {
		assert_false(deadline_past(deadline));
		kvmm_poll(c.k, &d, 1);
		poll(NULL, 0, 1);
	}
}

/* What was written is there until step 11 is done, then the new memory is. */
static void expect_kept_until_11(uint32_t frame)
{
	assert_int_equal(kvmm_win_sync(c.win[0], 10), -EBUSY);
	assert_non_null(byte(frame));
	assert_int_equal(*byte(frame), 'x');
	assert_int_equal(kvmm_step_done(c.k, 11), 0);
	assert_int_equal(kvmm_win_sync(c.win[0], 11), 1);
	assert_int_equal(*byte(frame), 0);
}

static void pages_of_a_step_that_runs_stay_over_a_restart(void **state)
{
	assert_int_equal(fc_match(&c, &key), 1);
	*byte(FRAME) = 'x';
	kvmm_step_done(c.k, 10);
	end(11);
	find_the_next();
	expect_kept_until_11(FRAME);
}

static void a_request_may_end_while_the_daemon_is_away(void **state)
{
	assert_int_equal(fc_match(&c, &key), 1);
	*byte(FRAME) = 'x';
	kvmm_step_done(c.k, 10);
	lose();
	end(11);
	find_the_next();
	expect_kept_until_11(FRAME);
}

static void a_request_of_a_former_daemon_may_end_late(void **state)
{
	assert_int_equal(fc_match(&c, &key), 1);
	*byte(FRAME) = 'x';
	find_the_next();
	kvmm_step_done(c.k, 10);
	end(11);
	expect_kept_until_11(FRAME);
}

static void trimmed_pages_stay_over_a_restart(void **state)
{
	assert_int_equal(fc_match(&c, &key), 1);
	*byte(FRAME) = 'x';
	kvmm_step_done(c.k, 10);
	assert_int_equal(kvmm_trim(c.rq, 0, 11), 0);
	end(0);
	find_the_next();
	expect_kept_until_11(FRAME);
}

static void freed_frames_stay_over_a_restart(void **state)
{
	kvmm_frame_t fr;

	fk_give(&f, 0, OPEN, 1);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, &fr, 0), 0);
	*byte(fr) = 'x';
	kvmm_step_done(c.k, 10);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &fr, 1, 11), 0);
	end(0);
	find_the_next();
	expect_kept_until_11(fr);
}

static void the_callers_word_on_a_step_is_enough(void **state)
{
	assert_int_equal(fc_match(&c, &key), 1);
	kvmm_step_done(c.k, 10);
	end(11);
	find_the_next();
	assert_int_equal(kvmm_win_sync(c.win[0], 11), 1);
}

static void a_step_that_is_done_holds_nothing_up(void **state)
{
	assert_int_equal(fc_match(&c, &key), 1);
	end(11);
	kvmm_step_done(c.k, 11);
	find_the_next();
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
}

/* A stream knows of no change of daemon: it goes on writing where it did. */
static void a_stream_may_go_on_writing_the_old_word(void **state)
{
	uint64_t *old = kvmm_step_word(c.k);

	assert_int_equal(fc_match(&c, &key), 1);
	*old = 10;
	end(11);
	find_the_next();
	assert_int_equal(kvmm_win_sync(c.win[0], 0), -EBUSY);
	f.l->step_wanted = 11;
	fk_rung(&f);
	*old = 11;
	kvmm_poll(c.k, &d, 1);
	assert_int_equal(f.l->step, 11);
	assert_true(fk_rung(&f));
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	/* the new one is ahead: the old one does not take it back */
	*kvmm_step_word(c.k) = 20;
	*old = 12;
	kvmm_poll(c.k, &d, 1);
	assert_int_equal(f.l->step, 20);
}

static void the_old_word_counts_without_a_poll(void **state)
{
	uint64_t *old = kvmm_step_word(c.k);

	assert_int_equal(fc_match(&c, &key), 1);
	end(11);
	find_the_next();
	*old = 11;
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
}

/* -- threads ----------------------------------------------------------------------- */

#define ROUNDS	10

/* Does steps for as long as the daemon is the one it found. */
static void *stepper(void *arg)
{
	uint64_t epoch = kvmm_epoch(c.k), *step = arg;

	while (kvmm_epoch(c.k) == epoch)
		kvmm_step_done(c.k, ++*step);
	return NULL;
}

static void a_step_done_as_the_daemon_changes_is_taken_along(void **state)
{
	uint64_t step = 0;
	pthread_t t;
	int i;

	for (i = 0; i < ROUNDS; i++) {
		assert_int_equal(pthread_create(&t, NULL, stepper, &step), 0);
		find_the_next();
		pthread_join(t, NULL);
		assert_int_equal(f.l->step, step);
	}
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(pages_of_a_step_that_runs_stay_over_a_restart),
		T(a_request_may_end_while_the_daemon_is_away),
		T(a_request_of_a_former_daemon_may_end_late),
		T(trimmed_pages_stay_over_a_restart),
		T(freed_frames_stay_over_a_restart),
		T(the_callers_word_on_a_step_is_enough),
		T(a_step_that_is_done_holds_nothing_up),
		T(a_stream_may_go_on_writing_the_old_word),
		T(the_old_word_counts_without_a_poll),
		T(a_step_done_as_the_daemon_changes_is_taken_along),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
