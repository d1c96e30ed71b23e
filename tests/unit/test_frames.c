/* SPDX-License-Identifier: Apache-2.0 */
/* OPEN frames: the magazine, the stack over it, refills, giving back. */
/* link: -Wl,--wrap=kvmm_sq_push */
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

static struct fk f;
static struct fc c;

static int setup_n(unsigned int classes)
{
	if (fk_start(&f, classes) || fc_open(&f, &c))
		return -1;
	return 0;
}

static int setup(void **state)
{
	return setup_n(1);
}

static int setup2(void **state)
{
	return setup_n(2);
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

/* Refills asked for since the last look. */
static unsigned int refills(uint32_t *n)
{
	struct ring_sqe sqe;
	unsigned int count = 0;

	while (fk_take(&f, &sqe, NULL))
		if (sqe.op == RING_REFILL) {
			*n = sqe.n;
			count++;
		}
	return count;
}

static int alloc(unsigned int n, kvmm_frame_t *frame)
{
	return kvmm_alloc(c.rq, 0, 0, n, frame, 0);
}

static void a_window_asks_for_a_stock_when_it_opens(void **state)
{
	uint32_t n = 0;

	assert_int_equal(refills(&n), 1);
	assert_int_equal(n, LIB_MAG_TARGET);
}

static void frames_come_in_the_order_of_the_magazine(void **state)
{
	kvmm_frame_t fr[5], i;

	fk_give(&f, 0, 70, 20);
	assert_int_equal(alloc(5, fr), 0);
	for (i = 0; i < 5; i++)
		assert_int_equal(fr[i], 70 + i);
	assert_int_equal(f.win[0].w->mag_head, 5);
}

/* Seven times the ring's places go through it. */
static void the_ring_wraps(void **state)
{
	kvmm_frame_t fr[40];
	unsigned int i, j;

	for (i = 0; i < 90; i++) {
		fk_give(&f, 0, 64 + i, 40);
		assert_int_equal(alloc(40, fr), 0);
		for (j = 0; j < 40; j++)
			assert_int_equal(fr[j], 64 + i + j);
		/* gone, as if published: nothing comes from the stack */
		c.rq->own[0].nr_open = 0;
	}
	assert_int_equal(f.win[0].w->mag_head, 90 * 40);
}

static void all_or_nothing(void **state)
{
	kvmm_frame_t fr[8] = { 9, 9 };

	fk_give(&f, 0, 70, 3);
	kvmm_node_find(c.k, "no such node");
	assert_int_equal(alloc(4, fr), -EAGAIN);
	/* not of what went wrong before */
	assert_non_null(strstr(kvmm_error(c.k), "4 frames wanted"));
	assert_int_equal(fr[0], 9);
	assert_int_equal(f.win[0].w->mag_head, 0);
	assert_int_equal(alloc(3, fr), 0);
	assert_int_equal(alloc(1, fr), -EAGAIN);
}

static void a_refusal_is_recorded_and_asked_for_once(void **state)
{
	kvmm_frame_t fr[200];
	uint32_t n;

	fk_give(&f, 0, 70, 1);		/* answers what the window asked */
	refills(&n);
	assert_int_equal(alloc(100, fr), -EAGAIN);
	assert_int_equal(alloc(100, fr), -EAGAIN);
	assert_int_equal(alloc(50, fr), -EAGAIN);
	assert_int_equal(refills(&n), 1);
	assert_int_equal(n, 100);
	assert_int_equal(f.win[0].w->want, 50);
	/* more than that was asked for is asked for at once */
	assert_int_equal(alloc(150, fr), -EAGAIN);
	assert_int_equal(refills(&n), 1);
	assert_int_equal(n, 150);
	/* and when it has been answered, anew */
	fk_give(&f, 0, 100, 10);
	assert_int_equal(alloc(50, fr), -EAGAIN);
	assert_int_equal(refills(&n), 1);
}

/* A daemon that has little to give is not asked after each frame. */
static void a_small_stock_is_asked_for_at_its_half(void **state)
{
	kvmm_frame_t fr[64];
	uint32_t n = 0;

	fk_give(&f, 0, 64, 12);
	refills(&n);
	assert_int_equal(alloc(6, fr), 0);
	assert_int_equal(refills(&n), 0);
	assert_int_equal(alloc(1, fr), 0);
	assert_int_equal(refills(&n), 1);
	/* as much as ever: there may be more by now */
	assert_int_equal(n, LIB_MAG_TARGET);
	fk_give(&f, 0, 76, 7);
	assert_int_equal(alloc(6, fr), 0);
	assert_int_equal(refills(&n), 0);
	fk_give(&f, 0, 83, 58);
	assert_int_equal(alloc(32, fr), 0);
	assert_int_equal(refills(&n), 0);
	assert_int_equal(alloc(1, fr), 0);
	assert_int_equal(refills(&n), 1);
}

static void a_refill_is_asked_for_ahead_of_need(void **state)
{
	kvmm_frame_t fr[64];
	uint32_t n = 0;

	fk_give(&f, 0, 64, 64);
	refills(&n);
	assert_int_equal(alloc(32, fr), 0);
	assert_int_equal(refills(&n), 0);	/* half of it is left */
	assert_int_equal(alloc(1, fr), 0);
	assert_int_equal(refills(&n), 1);
	assert_int_equal(n, LIB_MAG_TARGET);
}

static void a_freed_frame_is_had_again_at_once(void **state)
{
	kvmm_frame_t fr[4], again[4];
	struct ring_sqe sqe;

	fk_give(&f, 0, 70, 4);
	assert_int_equal(alloc(4, fr), 0);
	while (fk_take(&f, &sqe, NULL))
		;
	/* others must wait for step 9, this process need not */
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 4, 9), 0);
	assert_int_equal(alloc(4, again), 0);
	assert_memory_equal(fr, again, sizeof(fr));
	assert_false(fk_take_op(&f, RING_FREE, &sqe, NULL));
}

static void only_own_open_frames_can_be_freed(void **state)
{
	kvmm_frame_t fr[4], bad[3];
	struct kvmm_req *other;

	fk_give(&f, 0, 70, 8);
	assert_int_equal(alloc(4, fr), 0);
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &other), 0);
	assert_int_equal(kvmm_free(other, 0, 0, fr, 1, 0), -EINVAL);
	bad[0] = fr[0];
	bad[1] = 79;			/* nobody's */
	bad[2] = fr[1];
	assert_int_equal(kvmm_free(c.rq, 0, 0, bad, 3, 0), -EINVAL);
	/* those before the wrong one went, those after it did not */
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 1, 0), -EINVAL);
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr + 1, 3, 0), 0);
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr + 1, 1, 0), -EINVAL);
	bad[0] = bad[1] = UINT32_MAX;
	assert_int_equal(kvmm_free(c.rq, 0, 0, bad, 1, 0), -EINVAL);
	assert_non_null(strstr(kvmm_error(c.k), "neither"));
	assert_int_equal(kvmm_free(c.rq, 3, 0, bad, 1, 0), -EINVAL);
	assert_non_null(strstr(kvmm_error(c.k), "no window"));
	assert_int_equal(kvmm_free(c.rq, 0, 0, bad, 0, 0), 0);
	kvmm_req_end(other, KVMM_ENDED, 0);
}

/* The same number in two classes is two frames. */
static void numbers_are_per_class(void **state)
{
	kvmm_frame_t a, b;

	fk_give(&f, 0, 70, 1);
	fk_give(&f, 1, 70, 1);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, &a, 0), 0);
	assert_int_equal(kvmm_alloc(c.rq, 1, 0, 1, &b, 0), 0);
	assert_int_equal(a, b);
	assert_int_equal(kvmm_free(c.rq, 1, 0, &b, 1, 0), 0);
	assert_int_equal(kvmm_free(c.rq, 1, 0, &b, 1, 0), -EINVAL);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &a, 1, 0), 0);
}

static void the_end_of_a_request_frees_its_frames(void **state)
{
	kvmm_frame_t fr[4];
	struct kvmm_req *rq;

	fk_give(&f, 0, 70, 4);
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &rq), 0);
	assert_int_equal(kvmm_alloc(rq, 0, 0, 4, fr, 0), 0);
	assert_int_equal(alloc(4, fr), -EAGAIN);
	kvmm_req_end(rq, KVMM_ENDED, 5);
	assert_int_equal(alloc(4, fr), 0);
}

/* More than four refills and an eighth of what is mapped is too much. */
static void a_surplus_is_given_back_with_its_step(void **state)
{
	uint32_t i, no, n = 0, first = 0;
	kvmm_frame_t fr[400];
	const uint32_t *given;
	struct ring_sqe sqe;

	for (no = 2; no < FK_EXTENTS; no++)
		fk_extent_up(&f, 0, no);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), FK_EXTENTS - 2);
	fk_give(&f, 0, 64, 400);
	assert_int_equal(alloc(400, fr), 0);
	while (fk_take(&f, &sqe, NULL))
		;
	for (i = 0; i < 400; i++)
		assert_int_equal(kvmm_free(c.rq, 0, 0, &fr[i], 1, i), 0);
	while (fk_take(&f, &sqe, (const void **)&given)) {
		assert_int_equal(sqe.op, RING_FREE);
		assert_int_equal(sqe.win, 0);
		assert_true(sqe.after >= n);
		first = given[0];
		n += sqe.n;
	}
	assert_true(first >= 64);
	assert_true(n > 0 && n < 400);
	/* what is left is still to be had */
	assert_int_equal(alloc(400 - n, fr), 0);
	assert_int_equal(alloc(1, fr), -EAGAIN);
}

static void the_daemon_is_rung_for_only_when_it_sleeps(void **state)
{
	kvmm_frame_t fr[500];

	fk_rung(&f);
	assert_int_equal(alloc(300, fr), -EAGAIN);
	assert_false(fk_rung(&f));
	f.hdr->sleeping = 1;
	assert_int_equal(alloc(400, fr), -EAGAIN);
	assert_true(fk_rung(&f));
}

static void who_waits_for_frames_is_woken(void **state)
{
	struct pollfd p = { .fd = kvmm_fd(c.k), .events = POLLIN };
	struct kvmm_done d;
	kvmm_frame_t fr[8];

	assert_int_equal(alloc(8, fr), -EAGAIN);
	/* the frames come before the client goes to sleep: it must not */
	fk_give(&f, 0, 70, 8);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
	assert_int_equal(poll(&p, 1, 1000), 1);
	assert_int_equal(alloc(8, fr), 0);
	/* once, not for ever */
	do {
		assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
	} while (poll(&p, 1, 1) > 0);
}

/* -- another thread polls while a refill is being asked for ------------------ */

static _Atomic bool polled;
static bool poll_beside;
static pthread_t poller;

int __real_kvmm_sq_push(struct kvmm_era *e, struct ring_sqe *sqe,
			const void *array, uint32_t bytes);
int __wrap_kvmm_sq_push(struct kvmm_era *e, struct ring_sqe *sqe,
			const void *array, uint32_t bytes);

static void *poll_until_asleep(void *arg)
{
	struct pollfd p = { .fd = kvmm_fd(c.k), .events = POLLIN };
	struct kvmm_done d;

	do {
		kvmm_poll(c.k, &d, 1);
	} while (poll(&p, 1, 0) > 0);
	polled = true;
	return NULL;
}

/* The frames come, and who polls goes to sleep, before the push returns. */
int __wrap_kvmm_sq_push(struct kvmm_era *e, struct ring_sqe *sqe,
			const void *array, uint32_t bytes)
{
	int err = __real_kvmm_sq_push(e, sqe, array, bytes), i;

	if (!poll_beside)
		return err;
	poll_beside = false;
	fk_give(&f, 0, 80, 8);
	assert_int_equal(pthread_create(&poller, NULL, poll_until_asleep, NULL),
			 0);
	/* or waits for the window's lock, which we have */
	for (i = 0; i < 50 && !polled; i++)
		usleep(1000);
	return err;
}

static void frames_that_come_at_once_wake_another_thread(void **state)
{
	struct pollfd p = { .fd = kvmm_fd(c.k), .events = POLLIN };
	kvmm_frame_t fr[8];
	struct kvmm_done d;

	fk_give(&f, 0, 70, 1);
	while (kvmm_poll(c.k, &d, 1) || poll(&p, 1, 0) > 0)
		;
	poll_beside = true;
	assert_int_equal(alloc(8, fr), -EAGAIN);
	assert_false(poll_beside);
	pthread_join(poller, NULL);
	/* it had one turn more for it, or has one coming */
	assert_int_equal(c.k->hungry ? poll(&p, 1, 1000) : 1, 1);
	assert_int_equal(alloc(8, fr), 0);
}

/* -- a daemon that is wrong ---------------------------------------------------- */

static void a_number_that_is_no_frame_is_not_given_out(void **state)
{
	static const uint32_t bad[] = {
		0, FK_FIRST - 1, FK_FRAMES, UINT32_MAX,
	};
	kvmm_frame_t fr[4];
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(bad); i++) {
		fk_give(&f, 0, 70 + 4 * i, 4);
		window_magazine(f.win[0].w)[4 * i + 1] = bad[i];
	}
	/* 12 of the 16 are frames */
	for (i = 0; i < ARRAY_SIZE(bad); i++) {
		assert_int_equal(alloc(3, fr), 0);
		assert_int_equal(fr[0], 70 + 4 * i);
		assert_int_equal(fr[1], 72 + 4 * i);
		assert_int_equal(fr[2], 73 + 4 * i);
	}
	fk_give(&f, 0, 90, 4);
	window_magazine(f.win[0].w)[19] = FK_FRAMES;
	assert_int_equal(alloc(4, fr), -EAGAIN);
	/* those that are frames are not lost */
	assert_int_equal(alloc(3, fr), 0);
	assert_int_equal(fr[0] + fr[1] + fr[2], 90 + 91 + 92);
}

static void a_frame_that_was_given_twice_breaks_nothing(void **state)
{
	static kvmm_frame_t fr[FK_MAG];
	uint32_t i, round;

	for (round = 0; round < 2; round++) {
		for (i = 0; i < FK_MAG; i++)
			fk_give(&f, 0, 70, 1);
		assert_int_equal(alloc(FK_MAG, fr), 0);
	}
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
}

static void what_cannot_be_given_is_said(void **state)
{
	kvmm_frame_t fr;

	assert_int_equal(kvmm_alloc(c.rq, 1, 0, 1, &fr, 0), -EINVAL);
	assert_int_equal(kvmm_alloc(c.rq, 0, 1, 1, &fr, 0), -EINVAL);
	assert_int_equal(kvmm_alloc(c.rq, 99, 99, 1, &fr, 0), -EINVAL);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, &fr, 1u << 9), -EINVAL);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, FK_FRAMES + 1, &fr, 0),
			 -EINVAL);
	f.l->engine_state = ENGINE_DYING;
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, &fr, 0), -EOWNERDEAD);
	f.l->engine_state = ENGINE_ALIVE;
}

static void what_there_is_is_told(void **state)
{
	struct kvmm_avail av = { .size = sizeof(av) };
	kvmm_frame_t fr[3];

	fk_give(&f, 0, 70, 10);
	f.win[0].t->nr_free = 100;
	f.win[0].t->nr_clean = 20;
	f.win[0].t->nr_dirty = 30;
	assert_int_equal(alloc(3, fr), 0);
	kvmm_free(c.rq, 0, 0, fr, 1, 0);
	assert_int_equal(kvmm_reserve(c.sp, 0, 0, 55), 0);
	assert_int_equal(kvmm_avail(c.sp, 0, 0, &av), 0);
	assert_int_equal(av.now, 108);
	assert_int_equal(av.clean, 20);
	assert_int_equal(av.dirty, 30);
	assert_int_equal(av.floor, 55);
	assert_int_equal(av.limit, FK_FRAMES);
	assert_int_equal(kvmm_avail(c.sp, 1, 0, &av), -EINVAL);
}

static void a_read_only_socket_gives_no_frames(void **state)
{
	kvmm_frame_t fr;

	fc_close(&c);
	f.rights = KVMM_RO;
	f.win[0].open = false;
	assert_int_equal(fc_open(&f, &c), 0);
	fk_give(&f, 0, 70, 1);
	assert_int_equal(alloc(1, &fr), -EACCES);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)
#define T2(x) cmocka_unit_test_setup_teardown(x, setup2, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_window_asks_for_a_stock_when_it_opens),
		T(frames_come_in_the_order_of_the_magazine),
		T(the_ring_wraps),
		T(all_or_nothing),
		T(a_refusal_is_recorded_and_asked_for_once),
		T(a_refill_is_asked_for_ahead_of_need),
		T(a_small_stock_is_asked_for_at_its_half),
		T(a_freed_frame_is_had_again_at_once),
		T(only_own_open_frames_can_be_freed),
		T2(numbers_are_per_class),
		T(the_end_of_a_request_frees_its_frames),
		T(a_surplus_is_given_back_with_its_step),
		T(the_daemon_is_rung_for_only_when_it_sleeps),
		T(who_waits_for_frames_is_woken),
		T(frames_that_come_at_once_wake_another_thread),
		T(a_number_that_is_no_frame_is_not_given_out),
		T(a_frame_that_was_given_twice_breaks_nothing),
		T(what_cannot_be_given_is_said),
		T(what_there_is_is_told),
		T(a_read_only_socket_gives_no_frames),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
