/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps: what waits for them, also over a change of daemon: what a kernel may
 * still touch stays mapped.
 */
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

static void pages_given_back_stay_over_a_restart(void **state)
{
	const kvmm_frame_t fr = FRAME;

	assert_int_equal(fc_match(&c, &key), 1);
	*byte(FRAME) = 'x';
	kvmm_step_done(c.k, 10);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &fr, 1, 11), 0);
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

struct steps {
	uint64_t epoch, step;
};

/* Does steps for as long as the daemon is the one that its maker found. */
static void *stepper(void *arg)
{
	struct steps *s = arg;

	while (kvmm_epoch(c.k) == s->epoch)
		kvmm_step_done(c.k, ++s->step);
	return NULL;
}

static void a_step_done_as_the_daemon_changes_is_taken_along(void **state)
{
	struct steps s = { 0 };
	pthread_t t;
	int i;

	for (i = 0; i < ROUNDS; i++) {
		s.epoch = kvmm_epoch(c.k);
		assert_int_equal(pthread_create(&t, NULL, stepper, &s), 0);
		find_the_next();
		pthread_join(t, NULL);
		assert_int_equal(f.l->step, s.step);
	}
}

/* -- of one daemon ------------------------------------------------------------ */

static void pins_wait_for_their_step(void **state)
{
	assert_int_equal(fc_match(&c, &key), 1);
	kvmm_req_end(c.rq, KVMM_ENDED, 7);
	c.rq = NULL;
	assert_int_equal(kvmm_step_done(c.k, 6), 0);
	assert_int_equal(fk_pins(&f, 0, FRAME), 1);
	assert_true(kvmm_next_deadline(c.k) <= deadline_in(NSEC_PER_MSEC));
	/* a stream writes the word, and the next poll sees it */
	*kvmm_step_word(c.k) = 7;
	kvmm_poll(c.k, &d, 1);
	assert_int_equal(fk_pins(&f, 0, FRAME), 0);
	assert_int_equal(kvmm_next_deadline(c.k), UINT64_MAX);
}

static void a_trim_waits_for_its_step(void **state)
{
	assert_int_equal(fc_match(&c, &key), 1);
	assert_int_equal(kvmm_trim(c.rq, 0, 2), 0);
	assert_int_equal(fk_pins(&f, 0, FRAME), 1);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_int_equal(fk_pins(&f, 0, FRAME), 1);
	kvmm_step_done(c.k, 2);
	assert_int_equal(fk_pins(&f, 0, FRAME), 0);
}

static void a_page_given_back_waits_for_its_step(void **state)
{
	const kvmm_frame_t fr = FRAME;

	assert_int_equal(fc_match(&c, &key), 1);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &fr, 1, 2), 0);
	assert_int_equal(fk_pins(&f, 0, FRAME), 1);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_int_equal(fk_pins(&f, 0, FRAME), 1);
	kvmm_step_done(c.k, 2);
	assert_int_equal(fk_pins(&f, 0, FRAME), 0);
}

static void steps_are_run_in_their_order(void **state)
{
	static const uint64_t after[] = { 5, 3, 9, 3, 7 };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_req *rq[5];
	struct kvmm_hit hit;
	struct kvmm_key k;
	unsigned int i, step, left;

	for (i = 0; i < 5; i++) {
		const struct kvmm_keys keys = { .k = &k, .n = 1 };

		k = fk_key(2, i);
		fk_seal(&f, 0, &k, 0, FRAME + i, 1);
		assert_int_equal(kvmm_req_open(c.sp, i, NULL, &rq[i]), 0);
		assert_int_equal(kvmm_match(rq[i], &keys, 1, 0, &hit, &m), 0);
	}
	for (i = 0; i < 5; i++)
		kvmm_req_end(rq[i], KVMM_ENDED, after[i]);
	for (step = 0; step <= 10; step++) {
		kvmm_step_done(c.k, step);
		for (i = 0, left = 0; i < 5; i++)
			left += after[i] > step;
		assert_int_equal(fk_all_pins(&f, 0), left);
	}
}

static void a_step_rings_only_when_it_is_waited_for(void **state)
{
	fk_rung(&f);
	f.l->step_wanted = 5;
	kvmm_step_done(c.k, 4);
	assert_false(fk_rung(&f));
	kvmm_step_done(c.k, 5);
	assert_true(fk_rung(&f));
	f.l->step_wanted = UINT64_MAX;
	kvmm_step_done(c.k, 6);
	assert_false(fk_rung(&f));
	/* backwards is nowhere */
	kvmm_step_done(c.k, 2);
	assert_int_equal(kvmm_step_engine(c.k), 6);
}

/* Rank 0 of two: the engine is as far as the slower one. */
static void an_engine_is_as_far_as_its_slowest_member(void **state)
{
	const struct kvmm_engine e = {
		.size = sizeof(e), .token = "0123456789abcde", .world = 2,
	};
	struct wire_member w = {
		.h = { .type = WIRE_MEMBER, .len = sizeof(w) },
		.rank = 1, .world = 2,
	};
	struct shm peer = SHM_INIT;
	struct ledger *l;

	assert_int_equal(kvmm_join(c.k, &e), -EBUSY);
	kvmm_space_detach(c.sp);
	c.rq = NULL;
	assert_int_equal(kvmm_join(c.k, &e), 0);
	kvmm_step_done(c.k, 5);
	assert_int_equal(kvmm_step_engine(c.k), 0);
	assert_int_equal(shm_create(&peer, "peer", f.ledger_shm.bytes, 1), 0);
	l = peer.addr;
	l->step = 3;
	((struct ledger_talk *)((char *)l + f.l->talk_off))->ready = 1;
	w.ledger_bytes = peer.bytes;
	assert_int_equal(sock_send(f.sock, &w.h, &peer.ro_fd, 1), 0);
	while (!kvmm_step_engine(c.k))
		kvmm_poll(c.k, &d, 1);
	assert_int_equal(kvmm_step_engine(c.k), 3);
	l->step = 8;
	assert_int_equal(kvmm_step_engine(c.k), 5);
	f.l->engine_state = ENGINE_DYING;
	assert_int_equal(kvmm_poll(c.k, &d, 1), -EOWNERDEAD);
	shm_fini(&peer);
}

static void joining_says_what_is_wrong(void **state)
{
	struct kvmm_engine e = { .size = sizeof(e), .world = 2 };

	kvmm_space_detach(c.sp);
	c.rq = NULL;
	e.rank = 2;
	assert_int_equal(kvmm_join(c.k, &e), -EINVAL);
	e.rank = 0;
	e.world = 0;
	assert_int_equal(kvmm_join(c.k, &e), -EINVAL);
	e.world = KVMM_MAX_WORLD + 1;
	assert_int_equal(kvmm_join(c.k, &e), -EINVAL);
	e.world = 2;
	e.flags = 1u << 9;
	assert_int_equal(kvmm_join(c.k, &e), -EINVAL);
	e.flags = KVMM_LEADER | KVMM_NO_STEP;
	e.rank = 7;
	assert_int_equal(kvmm_join(c.k, &e), 0);
	assert_null(kvmm_step_word(c.k));
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(pages_of_a_step_that_runs_stay_over_a_restart),
		T(a_request_may_end_while_the_daemon_is_away),
		T(a_request_of_a_former_daemon_may_end_late),
		T(trimmed_pages_stay_over_a_restart),
		T(pages_given_back_stay_over_a_restart),
		T(freed_frames_stay_over_a_restart),
		T(the_callers_word_on_a_step_is_enough),
		T(a_step_that_is_done_holds_nothing_up),
		T(a_stream_may_go_on_writing_the_old_word),
		T(the_old_word_counts_without_a_poll),
		T(a_step_done_as_the_daemon_changes_is_taken_along),
		T(pins_wait_for_their_step),
		T(a_trim_waits_for_its_step),
		T(a_page_given_back_waits_for_its_step),
		T(steps_are_run_in_their_order),
		T(a_step_rings_only_when_it_is_waited_for),
		T(an_engine_is_as_far_as_its_slowest_member),
		T(joining_says_what_is_wrong),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
