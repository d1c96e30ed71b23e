/* SPDX-License-Identifier: Apache-2.0 */
/* Publishing: who holds what pin at which moment, whatever the answer is. */
#include <poll.h>
#include <string.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

static struct fk f;
static struct fc c;
static kvmm_frame_t fr[8];
static struct kvmm_pub pub[8];
static struct kvmm_done d;

static int setup(void **state)
{
	struct ring_sqe sqe;
	uint32_t i;

	if (fk_start(&f, 2) || fc_open(&f, &c))
		return -1;
	fk_give(&f, 0, 70, 8);
	if (kvmm_alloc(c.rq, 0, 0, 8, fr, 0))
		return -1;
	while (fk_take(&f, &sqe, NULL))
		;
	memset(pub, 0, sizeof(pub));
	for (i = 0; i < 8; i++) {
		pub[i].key = fk_key(1, i);
		if (i)
			pub[i].parent = pub[i - 1].key;
		pub[i].frame = fr[i];
		pub[i].pos = 16 * i;
		pub[i].after = i;
	}
	return 0;
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

/* Post and take the entry as the daemon does. */
static const struct ring_pub *posted(unsigned int n, struct ring_sqe *sqe)
{
	const void *array;

	assert_int_equal(kvmm_publish(c.rq, 0, pub, n, 42), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, sqe, &array));
	return array;
}

static void answer(const struct ring_sqe *sqe, const struct ring_result *res,
		   uint32_t n)
{
	fk_answer(&f, sqe, 0, res, n);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.tag, 42);
	assert_int_equal(d.op, KVMM_OP_PUBLISH);
}

static uint32_t pins(uint32_t frame)
{
	return fk_pins(&f, 0, frame);
}

static void the_entry_says_what_was_said(void **state)
{
	struct ring_sqe sqe;
	const struct ring_pub *p = posted(8, &sqe);

	assert_memory_equal(p, pub, sizeof(pub));
	assert_int_equal(sqe.n, 8);
	assert_int_equal(sqe.space, FK_SPACE);
	assert_int_equal(sqe.win, 0);
	assert_int_equal(sqe.after, 7);
}

static void frames_are_pinned_before_the_daemon_sees_them(void **state)
{
	struct ring_sqe sqe;
	int i;

	posted(3, &sqe);
	for (i = 0; i < 8; i++)
		assert_int_equal(pins(fr[i]), i < 3);
	/* and are the operation's: nobody may free or publish them again */
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 1, 0), -EINVAL);
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 1, 1), -EINVAL);
}

static void a_sealed_page_that_is_given_back_loses_its_pin_once(void **state)
{
	struct ring_sqe sqe;
	struct ring_result res = { 0, fr[0], frame_word(5, FRAME_READY) };
	const kvmm_frame_t mixed[] = { fr[3], fr[0], fr[4] };

	posted(1, &sqe);
	answer(&sqe, &res, 1);
	assert_int_equal(kvmm_free(c.rq, 0, 0, mixed, 3, 0), 0);
	assert_int_equal(pins(fr[0]), 0);
	/* nobody but the daemon gives it out again, and no pin is left to drop */
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 1, 0), -EINVAL);
	kvmm_req_end(c.rq, KVMM_CONTINUES, 0);
	c.rq = NULL;
	assert_int_equal(pins(fr[0]), 0);
}

static void a_sealed_page_stays_pinned_until_the_end(void **state)
{
	struct ring_sqe sqe;
	struct ring_result res = { 0, fr[0], frame_word(5, FRAME_READY) };

	posted(1, &sqe);
	answer(&sqe, &res, 1);
	assert_int_equal(d.result, 0);
	assert_int_equal(d.n, 1);
	assert_int_equal(d.res[0].result, 0);
	assert_int_equal(d.res[0].frame, fr[0]);
	assert_int_equal(pins(fr[0]), 1);
	kvmm_req_end(c.rq, KVMM_CONTINUES, 0);
	c.rq = NULL;
	assert_int_equal(pins(fr[0]), 0);
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.frame, fr[0]);
	assert_int_equal(sqe.arg, frame_word(5, FRAME_READY));
	assert_int_equal(sqe.n, 1);
	assert_int_equal(sqe.how, KVMM_CONTINUES);
}

/* The canonical frame is pinned before the completion head lets go of it. */
static void a_second_publisher_gets_the_canonical_frame(void **state)
{
	struct ring_result res = { -EEXIST, 100, frame_word(5, FRAME_READY) };
	struct ring_sqe sqe;

	fk_word(&f, 0, 100, res.word);
	posted(1, &sqe);
	fk_answer(&f, &sqe, 0, &res, 1);
	assert_int_equal(f.l->cq.head, 0);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(f.l->cq.head, 2);
	assert_int_equal(d.res[0].result, -EEXIST);
	assert_int_equal(d.res[0].frame, 100);
	assert_int_equal(pins(100), 1);
	assert_int_equal(pins(fr[0]), 0);
	/* mine is mine */
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 1, 0), 0);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_int_equal(pins(100), 0);
}

/* The daemon let go of it when the connection ended, and reused it. */
static void a_canonical_frame_that_was_reused_is_not_named(void **state)
{
	struct ring_result res = { -EEXIST, 100, frame_word(5, FRAME_READY) };
	struct ring_sqe sqe;

	fk_word(&f, 0, 100, frame_word(6, FRAME_READY));
	posted(1, &sqe);
	answer(&sqe, &res, 1);
	assert_int_equal(d.res[0].result, -EEXIST);
	assert_int_equal(d.res[0].frame, 0);
	assert_int_equal(pins(100), 0);
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 1, 0), 0);
}

static void what_is_refused_stays_open_and_mine(void **state)
{
	static const int err[] = { -ESTALE, -EBADMSG, -EROFS, -EAGAIN };
	struct ring_sqe sqe;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(err); i++) {
		struct ring_result res = { .result = err[i] };

		posted(1, &sqe);
		answer(&sqe, &res, 1);
		assert_int_equal(d.res[0].result, err[i]);
		assert_int_equal(pins(fr[0]), 0);
	}
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 8, 0), 0);
}

/* The whole operation refused: each page has that answer. */
static void an_operation_that_is_refused_touches_no_page(void **state)
{
	struct ring_sqe sqe;
	int i;

	posted(3, &sqe);
	fk_answer(&f, &sqe, -EACCES, NULL, 0);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.result, -EACCES);
	assert_int_equal(d.n, 3);
	for (i = 0; i < 3; i++)
		assert_int_equal(d.res[i].result, -EACCES);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 8, 0), 0);
}

static void an_answer_after_the_end_leaves_nothing_behind(void **state)
{
	struct ring_result res[3] = {
		{ 0, fr[0], frame_word(5, FRAME_READY) },
		{ -EEXIST, 100, frame_word(5, FRAME_READY) },
		{ -ESTALE, 0, 0 },
	};
	struct ring_sqe sqe, end;
	kvmm_frame_t again[7];
	int i;

	posted(3, &sqe);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	/* it is not told before it is known what there is to touch */
	assert_false(fk_take_op(&f, RING_END, &end, NULL));
	assert_int_equal(fk_all_pins(&f, 0), 3);
	answer(&sqe, res, 3);
	assert_int_equal(d.res[1].frame, 100);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_true(fk_take_op(&f, RING_END, &end, NULL));
	assert_int_equal(end.n, 2);
	assert_int_equal(end.frame, 100);
	/* seven of the eight frames are free again, the sealed one is not */
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &c.rq), 0);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 7, again, 0), 0);
	for (i = 0; i < 7; i++)
		assert_int_not_equal(again[i], fr[0]);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, again, 0), -EAGAIN);
}

/* The end names a step: what was sealed is pinned until then. */
static void an_answer_after_the_end_waits_for_the_step(void **state)
{
	struct ring_result res = { 0, fr[0], frame_word(5, FRAME_READY) };
	struct ring_sqe sqe;

	posted(1, &sqe);
	kvmm_req_end(c.rq, KVMM_ENDED, 3);
	c.rq = NULL;
	answer(&sqe, &res, 1);
	assert_int_equal(pins(fr[0]), 1);
	kvmm_step_done(c.k, 2);
	assert_int_equal(pins(fr[0]), 1);
	kvmm_step_done(c.k, 3);
	assert_int_equal(pins(fr[0]), 0);
}

static void a_full_ring_changes_nothing(void **state)
{
	int i;

	for (i = 0; i < LIB_MAX_OPS; i++)
		if (kvmm_ping(c.k, i))
			break;
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 8, 1), -EAGAIN);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 8, 0), 0);
}

static void batches_in_flight_do_not_mix(void **state)
{
	struct ring_result res[2][4];
	struct ring_sqe sqe[2];
	unsigned int i;

	for (i = 0; i < 4; i++) {
		res[0][i] = (struct ring_result){ 0, fr[i], 0x103 };
		res[1][i] = (struct ring_result){ -ESTALE, 0, 0 };
	}
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 4, 1), 0);
	assert_int_equal(kvmm_publish(c.rq, 0, pub + 4, 4, 2), 0);
	assert_true(fk_take(&f, &sqe[0], NULL));
	assert_true(fk_take(&f, &sqe[1], NULL));
	assert_int_not_equal(sqe[0].tag, sqe[1].tag);
	fk_answer(&f, &sqe[1], 0, res[1], 4);
	fk_answer(&f, &sqe[0], 0, res[0], 4);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.tag, 2);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.tag, 1);
	assert_int_equal(fk_all_pins(&f, 0), 4);
	/* an answer that comes twice is nobody's */
	fk_answer(&f, &sqe[0], 0, res[0], 4);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
	assert_int_equal(fk_all_pins(&f, 0), 4);
}

static void modes_and_mistakes_are_refused_at_once(void **state)
{
	struct ring_sqe sqe;

	f.hdr->space[FK_SPACE].mode = KVMM_MODE_BYPASS;
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 1, 1), -EAGAIN);
	f.hdr->space[FK_SPACE].mode = KVMM_MODE_READONLY;
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 1, 1), -EROFS);
	f.hdr->space[FK_SPACE].mode = KVMM_MODE_ON;
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 0, 1), -EINVAL);
	assert_int_equal(kvmm_publish(c.rq, 0, pub, KVMM_MAX_BATCH + 1, 1),
			 -EINVAL);
	assert_int_equal(kvmm_publish(c.rq, 1, pub, 1, 1), -EINVAL);
	pub[1].frame = pub[0].frame;	/* named twice */
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 2, 1), -EINVAL);
	pub[1].frame = fr[1];
	pub[1].group = FK_FULL2;	/* of another class */
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 2, 1), -EINVAL);
	pub[1].group = 99;
	assert_int_equal(kvmm_publish(c.rq, 0, pub, 2, 1), -EINVAL);
	assert_false(fk_take(&f, &sqe, NULL));
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 8, 0), 0);
}

/* The arena is a ring of bytes that no array wraps in. */
static void arrays_go_through_the_arena_in_any_size(void **state)
{
	struct ring_result res[8];
	struct ring_sqe sqe;
	uint32_t n, i, round, wraps = 0, before = 0;

	for (i = 0; i < 8; i++)
		res[i] = (struct ring_result){ .result = -ESTALE };
	for (round = 0; round < 20000; round++) {
		const struct ring_pub *p;

		n = 1 + round % 8;
		pub[n - 1].crc = round;
		p = posted(n, &sqe);
		assert_memory_equal(p, pub, n * sizeof(*p));
		wraps += sqe.arena_pos % LEDGER_ARENA_BYTES < before;
		before = sqe.arena_pos % LEDGER_ARENA_BYTES;
		answer(&sqe, res, n);
	}
	assert_true(wraps > 1);
}

/* -- no answer --------------------------------------------------------------------- */

/* The connection ends, and nobody is there to connect to again. */
static void lose_the_daemon(void)
{
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);

	f.stopped = true;
	fk_hang_up(&f);
	while (kvmm_poll(c.k, &d, 1) != 1) {
		assert_false(deadline_past(deadline));
		poll(NULL, 0, 1);
	}
	assert_int_equal(d.op, KVMM_OP_PUBLISH);
}

static int write_to(kvmm_frame_t frame)
{
	const struct iovec iov = { .iov_base = (char *)"others", .iov_len = 6 };

	return kvmm_write(c.rq, 0, 0, frame, &iov, 1);
}

/* All that this process can still get are the frames from @first on. */
static void expect_free(unsigned int first)
{
	kvmm_frame_t got;
	unsigned int i, n = 0;

	while (!kvmm_alloc(c.rq, 0, 0, 1, &got, 0)) {
		for (i = 0; i < first; i++)
			assert_int_not_equal(got, fr[i]);
		n++;
	}
	assert_int_equal(n, 8 - first);
}

/*
 * The daemon may have sealed them and shows them to others: they can be read
 * until the request's end, and are not this process's to write to again. Their pins
 * stay until a daemon is there of which their words are the last one.
 */
static void pages_of_unknown_fate_are_read_and_not_written(void **state)
{
	unsigned int i;
	struct ring_sqe sqe;

	posted(3, &sqe);
	lose_the_daemon();
	assert_int_equal(d.result, -ENOTCONN);
	for (i = 0; i < 3; i++) {
		assert_int_equal(d.res[i].result, -ENOTCONN);
		assert_int_equal(write_to(fr[i]), -EINVAL);
		assert_int_equal(pins(fr[i]), 1);
	}
	/* which cannot be said of the others */
	assert_int_equal(write_to(fr[3]), 6);
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 8, 0), 0);
	assert_int_equal(fk_all_pins(&f, 0), 3);
	expect_free(3);
	f.stopped = false;
}

static void the_end_of_a_request_leaves_them_alone(void **state)
{
	struct ring_sqe sqe;

	posted(3, &sqe);
	lose_the_daemon();
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	assert_int_equal(fk_all_pins(&f, 0), 3);
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &c.rq), 0);
	expect_free(3);
	f.stopped = false;
}

static void so_does_an_end_that_came_before(void **state)
{
	struct ring_sqe sqe;

	posted(3, &sqe);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	lose_the_daemon();
	assert_int_equal(fk_all_pins(&f, 0), 3);
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &c.rq), 0);
	expect_free(3);
	f.stopped = false;
}

/* Of a batch that was answered in part nothing is known either. */
static void an_answer_that_makes_no_sense_is_none(void **state)
{
	struct ring_result res[3] = {
		{ 0, fr[0], frame_word(5, FRAME_READY) },
		{ 0, fr[5], frame_word(5, FRAME_READY) },	/* whose? */
		{ -ESTALE, 0, 0 },
	};
	struct ring_sqe sqe;

	posted(3, &sqe);
	answer(&sqe, res, 3);
	assert_int_equal(d.res[0].result, 0);
	assert_int_equal(d.res[1].result, -EPROTO);
	assert_int_equal(d.res[2].result, -ESTALE);
	assert_int_equal(write_to(fr[1]), -EINVAL);
	assert_int_equal(write_to(fr[2]), 6);
	assert_int_equal(write_to(fr[5]), 6);
	assert_int_equal(kvmm_free(c.rq, 0, 0, fr, 8, 0), 0);
	expect_free(2);
	assert_int_equal(kvmm_req_end(c.rq, KVMM_ENDED, 0), 0);

	/* not as many as were asked about */
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &c.rq), 0);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 6, fr + 2, 0), 0);
	pub[0].frame = fr[2];
	pub[1].frame = fr[3];
	posted(2, &sqe);
	answer(&sqe, res, 1);
	assert_int_equal(d.result, -EPROTO);
	assert_int_equal(write_to(fr[2]), -EINVAL);
	assert_int_equal(write_to(fr[3]), -EINVAL);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(the_entry_says_what_was_said),
		T(frames_are_pinned_before_the_daemon_sees_them),
		T(a_sealed_page_that_is_given_back_loses_its_pin_once),
		T(a_sealed_page_stays_pinned_until_the_end),
		T(a_second_publisher_gets_the_canonical_frame),
		T(a_canonical_frame_that_was_reused_is_not_named),
		T(what_is_refused_stays_open_and_mine),
		T(an_operation_that_is_refused_touches_no_page),
		T(an_answer_after_the_end_leaves_nothing_behind),
		T(an_answer_after_the_end_waits_for_the_step),
		T(a_full_ring_changes_nothing),
		T(batches_in_flight_do_not_mix),
		T(modes_and_mistakes_are_refused_at_once),
		T(arrays_go_through_the_arena_in_any_size),
		T(pages_of_unknown_fate_are_read_and_not_written),
		T(the_end_of_a_request_leaves_them_alone),
		T(so_does_an_end_that_came_before),
		T(an_answer_that_makes_no_sense_is_none),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
