/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmm_req_fork() against a daemon made by hand: what the child has, what is
 * asked, and that no frame comes back into circulation before its copy is over.
 */
#include <poll.h>
#include <string.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define PAGE	70u			/* the lowest frame that is a page */
#define PAGES	4u
#define OPEN	80u			/* the lowest frame in the magazine */
#define FRAMES	12u

static struct fk f;
static struct fc c;
static struct kvmm_key keys[PAGES];
static struct kvmm_done d;
static kvmm_frame_t tail[FK_FULL2 + 1];

static int start(unsigned int classes)
{
	unsigned int i;

	memset(tail, 0, sizeof(tail));
	if (fk_start(&f, classes) || fc_open(&f, &c))
		return -1;
	for (i = 0; i < PAGES; i++) {
		keys[i] = fk_key(1, i);
		fk_seal(&f, 0, &keys[i], FK_FULL, PAGE + i, 1);
	}
	for (i = 0; i < classes; i++)
		fk_give(&f, i, OPEN, FRAMES);
	return kvmm_alloc(c.rq, 0, 0, 1, &tail[FK_FULL], 0);
}

static int setup(void **state)
{
	return start(1);
}

static int setup2(void **state)
{
	return start(2);
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

static uint32_t match(struct kvmm_req *rq)
{
	const struct kvmm_keys k = { .k = keys, .n = PAGES, .group = FK_FULL };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit[PAGES];

	assert_int_equal(kvmm_match(rq, &k, 1, 0, hit, &m), 0);
	return m.n_resident;
}

static int fork_it(struct kvmm_req *rq, struct kvmm_req **child)
{
	return kvmm_req_fork(rq, 2, 0, tail, 4, 7, 42, child);
}

/* With one tail, posted and taken as the daemon does. */
static struct kvmm_req *forked(struct ring_sqe *sqe, struct ring_fork *fk)
{
	struct kvmm_req *child;
	const void *array;

	assert_int_equal(fork_it(c.rq, &child), 1);
	assert_true(fk_take_op(&f, RING_FORK, sqe, &array));
	assert_int_equal(sqe->n, 1);
	memcpy(fk, array, sizeof(*fk));
	return child;
}

static void answer(const struct ring_sqe *sqe, int result)
{
	const struct ring_result res = { .result = result };

	fk_answer(&f, sqe, 0, &res, 1);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.tag, 42);
	assert_int_equal(d.op, KVMM_OP_FORK);
	assert_int_equal(d.n, 4);
}

static void end(struct kvmm_req *rq)
{
	assert_int_equal(kvmm_req_end(rq, KVMM_ENDED, 0), 0);
}

static void end_parent(void)
{
	end(c.rq);
	c.rq = NULL;
}

/* Frames that a request of this process can have now, all of them freed again. */
static uint32_t in_hand(kvmm_frame_t *fr)
{
	struct kvmm_req *rq;
	uint32_t n = 0;

	assert_int_equal(kvmm_req_open(c.sp, 99, NULL, &rq), 0);
	while (!kvmm_alloc(rq, 0, 0, 1, &fr[n], 0))
		n++;
	end(rq);
	return n;
}

static bool has(const kvmm_frame_t *fr, uint32_t n, kvmm_frame_t frame)
{
	while (n)
		if (fr[--n] == frame)
			return true;
	return false;
}

static uint32_t slots_taken(void)
{
	const struct ledger_req *l = (void *)((char *)f.l + f.l->req_off);
	uint32_t i, n = 0;

	for (i = 0; i < f.l->req_slots; i++)
		n += l[i].state;
	return n;
}

/* -- what is shared ------------------------------------------------------------------- */

static void expect_pins(uint32_t each)
{
	uint32_t i;

	for (i = 0; i < PAGES; i++)
		assert_int_equal(fk_pins(&f, 0, PAGE + i), each);
}

static void a_child_has_its_parents_match(void **state)
{
	const struct iovec iov = { .iov_base = (char[8]){ 0 }, .iov_len = 8 };
	struct kvmm_req *child;
	struct ring_sqe sqe;

	assert_int_equal(match(c.rq), PAGES);
	memset(kvmm_win_ptr(c.win[0], 0, PAGE + 2), 'x', 8);
	tail[FK_FULL] = 0;
	assert_int_equal(fork_it(c.rq, &child), 0);
	assert_false(fk_take_op(&f, RING_FORK, &sqe, NULL));
	expect_pins(2);
	end_parent();
	expect_pins(1);
	assert_int_equal(kvmm_read(child, 2, &iov, 1), 8);
	assert_memory_equal(iov.iov_base, "xxxxxxxx", 8);
	assert_int_equal(kvmm_report(child, 3, KVMM_BAD), 0);
	assert_int_equal(kvmm_trim(child, 3, 0), 0);
	assert_int_equal(fk_pins(&f, 0, PAGE + 3), 0);
	assert_int_equal(kvmm_fetch(child, 0, 4, 0, 0, 5), 0);
	end(child);
	kvmm_poll(c.k, &d, 1);
	kvmm_step_done(c.k, 1);
	while (fk_take_op(&f, RING_FETCH, &sqe, NULL))
		fk_answer(&f, &sqe, -ENOENT, NULL, 0);
	kvmm_poll(c.k, &d, 1);
	expect_pins(0);
}

static void a_child_has_its_parents_other_pins(void **state)
{
	struct kvmm_pub pub = { .frame = tail[FK_FULL], .key = fk_key(2, 0) };
	struct ring_result res = { 0, tail[FK_FULL],
				   frame_word(9, FRAME_READY) };
	struct kvmm_req *child, *grandchild;
	struct ring_sqe sqe;

	assert_int_equal(kvmm_publish(c.rq, 0, &pub, 1, 1), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, &sqe, NULL));
	/* it is not known yet what it will have pinned */
	tail[FK_FULL] = 0;
	assert_int_equal(fork_it(c.rq, &child), -EBUSY);
	fk_answer(&f, &sqe, 0, &res, 1);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(fork_it(c.rq, &child), 0);
	assert_int_equal(fork_it(child, &grandchild), 0);
	assert_int_equal(fk_pins(&f, 0, res.frame), 3);
	end_parent();
	end(child);
	assert_int_equal(fk_pins(&f, 0, res.frame), 1);
	/* it is its chain's end, too */
	end(grandchild);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.frame, res.frame);
}

static void a_child_is_a_request_of_its_own(void **state)
{
	const struct kvmm_hint h = { .size = sizeof(h), .session = 5,
				     .expect_return_ms = 77 };
	struct kvmm_req *parent, *child;
	const struct ledger_req *l = (void *)((char *)f.l + f.l->req_off);
	struct ring_sqe sqe;

	assert_int_equal(kvmm_req_open(c.sp, 10, &h, &parent), 0);
	assert_int_equal(match(parent), PAGES);
	assert_int_equal(kvmm_req_fork(parent, 11, 0, NULL, 0, 0, 0, &child),
			 0);
	assert_int_equal(slots_taken(), 3);
	assert_int_equal(l[2].id, 11);
	assert_int_equal(l[2].session, 5);
	assert_int_equal(l[2].nr_pins, PAGES);
	/* what it does with its match is no business of the parent's */
	assert_int_equal(kvmm_trim(child, 1, 0), 0);
	assert_int_equal(fk_all_pins(&f, 0), PAGES + 1);
	end(parent);
	assert_int_equal(fk_pins(&f, 0, PAGE), 1);
	assert_int_equal(fk_all_pins(&f, 0), 1);
	while (fk_take(&f, &sqe, NULL))
		;
	end(child);
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.session, 5);
	assert_int_equal(sqe.expect_ms, 77);
	assert_int_equal(slots_taken(), 1);
}

/* -- what is copied --------------------------------------------------------------------- */

static void the_entry_names_both_frames(void **state)
{
	struct kvmm_req *child;
	struct ring_fork fk;
	struct ring_sqe sqe;

	child = forked(&sqe, &fk);
	assert_int_equal(sqe.after, 7);
	assert_int_equal(sqe.space, FK_SPACE);
	assert_int_equal(fk.from, tail[FK_FULL]);
	assert_in_range(fk.to, OPEN, OPEN + FRAMES - 1);
	assert_int_not_equal(fk.to, fk.from);
	assert_int_equal(fk.win, 0);
	assert_int_equal(fk.group, FK_FULL);
	answer(&sqe, 0);
	assert_int_equal(d.result, 0);
	assert_int_equal(d.res[0].result, 0);
	assert_int_equal(d.res[0].frame, fk.to);
	assert_int_equal(d.res[1].frame, 0);
	assert_int_equal(d.res[3].result, 0);
	assert_int_equal(kvmm_free(child, 0, 0, &fk.to, 1, 0), 0);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &fk.from, 1, 0), 0);
	end(child);
}

static void tails_of_several_classes_go_in_one_entry(void **state)
{
	struct kvmm_req *child;
	const struct ring_fork *fk;
	struct ring_result res[3] = { { 0 }, { .result = -EINVAL }, { 0 } };
	struct ring_sqe sqe;
	const void *array;

	assert_int_equal(kvmm_alloc(c.rq, 1, 0, 1, &tail[FK_FULL2], 0), 0);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, &tail[FK_LAST], 0), 0);
	assert_int_equal(kvmm_req_fork(c.rq, 2, 0, tail, 5, 7, 42, &child), 3);
	assert_true(fk_take_op(&f, RING_FORK, &sqe, &array));
	fk = array;
	assert_int_equal(sqe.n, 3);
	assert_int_equal(fk[0].group, FK_FULL);
	assert_int_equal(fk[1].group, FK_LAST);
	assert_int_equal(fk[2].group, FK_FULL2);
	assert_int_equal(fk[1].win, 0);
	assert_int_equal(fk[2].win, 1);
	assert_int_equal(fk[2].from, tail[FK_FULL2]);
	assert_int_not_equal(fk[0].to, fk[1].to);
	fk_answer(&f, &sqe, 0, res, 3);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.n, 5);
	assert_int_equal(d.res[FK_LAST].result, -EINVAL);
	assert_int_equal(d.res[FK_LAST].frame, fk[1].to);
	assert_int_equal(d.res[FK_WINDOW].frame, 0);
	assert_int_equal(d.res[FK_FULL2].frame, fk[2].to);
	assert_int_equal(kvmm_free(child, 1, 0, &fk[2].to, 1, 0), 0);
	assert_int_equal(kvmm_free(child, 0, 0, &fk[1].to, 1, 0), 0);
	end(child);
}

static void nobody_has_the_new_frame_before_the_answer(void **state)
{
	struct kvmm_pub pub = { .key = fk_key(3, 0) };
	struct kvmm_req *child, *more;
	struct ring_fork fk;
	struct ring_sqe sqe;

	child = forked(&sqe, &fk);
	pub.frame = fk.to;
	assert_int_equal(kvmm_free(child, 0, 0, &fk.to, 1, 0), -EINVAL);
	assert_int_equal(kvmm_publish(child, 0, &pub, 1, 1), -EINVAL);
	assert_int_equal(fork_it(child, &more), -EBUSY);
	answer(&sqe, 0);
	assert_int_equal(kvmm_publish(child, 0, &pub, 1, 1), 0);
	end(child);
}

static void what_fails_leaves_the_child_its_frame(void **state)
{
	static const int err[] = { -EINVAL, -EOWNERDEAD, -ECANCELED };
	struct kvmm_req *child;
	struct ring_fork fk;
	struct ring_sqe sqe;
	unsigned int i;

	for (i = 0; i < 3; i++) {
		child = forked(&sqe, &fk);
		answer(&sqe, err[i]);
		assert_int_equal(d.res[0].result, err[i]);
		assert_int_equal(d.res[0].frame, fk.to);
		assert_int_equal(kvmm_free(child, 0, 0, &fk.to, 1, 0), 0);
		end(child);
	}
	/* refused as a whole */
	child = forked(&sqe, &fk);
	fk_answer(&f, &sqe, -EACCES, NULL, 0);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.result, -EACCES);
	assert_int_equal(d.res[0].result, -EACCES);
	assert_int_equal(kvmm_free(child, 0, 0, &fk.to, 1, 0), 0);
	end(child);
}

static void it_can_be_cancelled(void **state)
{
	struct kvmm_req *child;
	struct ring_sqe sqe, cancel;
	struct ring_fork fk;

	child = forked(&sqe, &fk);
	assert_int_equal(kvmm_cancel(c.k, 42), 0);
	assert_true(fk_take_op(&f, RING_CANCEL, &cancel, NULL));
	assert_int_equal(cancel.arg, sqe.tag);
	answer(&sqe, -ECANCELED);
	end(child);
}

/* -- frames in circulation ---------------------------------------------------------------- */

static void a_freed_tail_comes_back_after_the_copy(void **state)
{
	kvmm_frame_t fr[FRAMES];
	struct kvmm_req *child;
	struct ring_fork fk;
	struct ring_sqe sqe;

	child = forked(&sqe, &fk);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &fk.from, 1, 0), 0);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &fk.from, 1, 0), -EINVAL);
	assert_int_equal(in_hand(fr), FRAMES - 2);
	assert_false(has(fr, FRAMES - 2, fk.from));
	answer(&sqe, 0);
	assert_int_equal(in_hand(fr), FRAMES - 1);
	assert_true(has(fr, FRAMES - 1, fk.from));
	end(child);
	assert_int_equal(in_hand(fr), FRAMES);
}

static void either_may_end_first(void **state)
{
	kvmm_frame_t fr[FRAMES];
	struct kvmm_req *child;
	struct ring_fork fk;
	struct ring_sqe sqe;

	child = forked(&sqe, &fk);
	end_parent();
	assert_int_equal(in_hand(fr), FRAMES - 2);
	end(child);
	assert_int_equal(in_hand(fr), FRAMES - 2);
	assert_int_equal(slots_taken(), 1);
	answer(&sqe, 0);
	assert_int_equal(in_hand(fr), FRAMES);
	assert_int_equal(slots_taken(), 0);
}

static void a_tail_is_held_by_the_last_of_its_copies(void **state)
{
	struct kvmm_req *child[FRAMES - 1];
	struct ring_sqe sqe[FRAMES - 1];
	kvmm_frame_t fr[FRAMES];
	struct ring_fork fk;
	unsigned int i;

	for (i = 0; i < FRAMES - 1; i++)
		child[i] = forked(&sqe[i], &fk);
	end_parent();
	for (i = 0; i < FRAMES - 1; i++) {
		assert_int_equal(in_hand(fr), i);
		assert_false(has(fr, i, fk.from));
		answer(&sqe[i], 0);
		end(child[i]);
	}
	assert_int_equal(in_hand(fr), FRAMES);
	assert_true(has(fr, FRAMES, fk.from));
}

static void a_published_tail_is_no_ones_to_free(void **state)
{
	struct kvmm_pub pub = { .frame = tail[FK_FULL], .key = fk_key(2, 0) };
	struct ring_result res = { 0, tail[FK_FULL],
				   frame_word(9, FRAME_READY) };
	kvmm_frame_t fr[FRAMES];
	struct kvmm_req *child;
	struct ring_sqe sqe, ps;
	struct ring_fork fk;

	child = forked(&sqe, &fk);
	assert_int_equal(kvmm_publish(c.rq, 0, &pub, 1, 1), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, &ps, NULL));
	fk_answer(&f, &ps, 0, &res, 1);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	answer(&sqe, 0);
	end(child);
	end_parent();
	assert_int_equal(in_hand(fr), FRAMES - 1);
	assert_false(has(fr, FRAMES - 1, fk.from));
}

static void with_the_connection_frames_are_lost(void **state)
{
	uint64_t deadline = deadline_in(20 * NSEC_PER_SEC);
	kvmm_frame_t fr[FRAMES];
	struct kvmm_req *child;
	struct ring_fork fk;
	struct ring_sqe sqe;

	child = forked(&sqe, &fk);
	f.stopped = true;
	fk_hang_up(&f);
	while (kvmm_poll(c.k, &d, 1) != 1) {
		assert_false(deadline_past(deadline));
		poll(NULL, 0, 1);
	}
	assert_int_equal(d.result, -ENOTCONN);
	assert_int_equal(d.res[0].result, -ENOTCONN);
	assert_int_equal(d.res[0].frame, fk.to);
	assert_int_equal(kvmm_free(child, 0, 0, &fk.to, 1, 0), 0);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &fk.from, 1, 0), 0);
	/* what is left of the magazine is, but not those two */
	while (!kvmm_alloc(c.rq, 0, 0, 1, fr, 0)) {
		assert_int_not_equal(fr[0], fk.to);
		assert_int_not_equal(fr[0], fk.from);
	}
	assert_int_equal(fork_it(c.rq, &child), -ENOTCONN);
	end(child);
	f.stopped = false;
}

/* -- refusals ------------------------------------------------------------------------------ */

static void without_frames_nothing_is_done(void **state)
{
	kvmm_frame_t fr[FRAMES];
	struct kvmm_req *child = NULL;
	struct ring_sqe sqe;

	assert_int_equal(match(c.rq), PAGES);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, FRAMES - 1, fr, 0), 0);
	while (fk_take(&f, &sqe, NULL))
		;
	assert_int_equal(fork_it(c.rq, &child), -EAGAIN);
	assert_null(child);
	assert_int_equal(f.win[0].w->want, 1);
	expect_pins(1);
	assert_int_equal(slots_taken(), 1);
	fk_give(&f, 0, OPEN + FRAMES, 1);
	assert_int_equal(fork_it(c.rq, &child), 1);
	end(child);
}

/* Of two classes one has a frame: it is put back. */
static void all_tails_or_none(void **state)
{
	kvmm_frame_t fr[FRAMES], got[FRAMES];
	struct kvmm_req *child;

	assert_int_equal(kvmm_alloc(c.rq, 1, 0, FRAMES, fr, 0), 0);
	tail[FK_FULL2] = fr[0];
	assert_int_equal(kvmm_req_fork(c.rq, 2, 0, tail, 5, 7, 42, &child),
			 -EAGAIN);
	assert_int_equal(in_hand(got), FRAMES - 1);
	assert_int_equal(slots_taken(), 1);
}

static void with_a_full_ring_nothing_is_done(void **state)
{
	kvmm_frame_t fr[FRAMES];
	struct kvmm_req *child;
	struct ring_sqe sqe;

	assert_int_equal(match(c.rq), PAGES);
	while (!kvmm_report(c.rq, 0, KVMM_BAD))
		;
	assert_int_equal(fork_it(c.rq, &child), -EAGAIN);
	expect_pins(1);
	assert_int_equal(slots_taken(), 1);
	while (fk_take(&f, &sqe, NULL))
		assert_int_not_equal(sqe.op, RING_FORK);
	assert_int_equal(in_hand(fr), FRAMES - 1);
	assert_int_equal(kvmm_free(c.rq, 0, 0, &tail[FK_FULL], 1, 0), 0);
	assert_int_equal(in_hand(fr), FRAMES);
}

static void with_all_slots_taken_nothing_is_done(void **state)
{
	static struct kvmm_req *rq[LEDGER_REQ_SLOTS];
	struct kvmm_req *child;
	uint32_t i, n = 0;

	assert_int_equal(match(c.rq), PAGES);
	while (!kvmm_req_open(c.sp, n, NULL, &rq[n]))
		n++;
	assert_int_equal(fork_it(c.rq, &child), -EAGAIN);
	expect_pins(1);
	for (i = 0; i < n; i++)
		end(rq[i]);
}

static void what_makes_no_sense_is_refused(void **state)
{
	struct kvmm_req *child, *other;
	kvmm_frame_t mine = tail[FK_FULL];

	assert_int_equal(kvmm_req_open(c.sp, 3, NULL, &other), 0);
	assert_int_equal(fork_it(other, &child), -EINVAL);
	assert_non_null(strstr(kvmm_error(c.k), "tail[0] 8"));
	tail[FK_FULL] = PAGE;
	assert_int_equal(fork_it(c.rq, &child), -EINVAL);
	tail[FK_FULL] = UINT32_MAX;
	assert_int_equal(fork_it(c.rq, &child), -EINVAL);
	tail[FK_FULL] = mine;
	assert_int_equal(kvmm_req_fork(c.rq, 2, 0, tail, 5, 0, 0, &child),
			 -EINVAL);
	assert_int_equal(kvmm_req_fork(c.rq, 2, 1, tail, 4, 0, 0, &child),
			 -EINVAL);
	assert_int_equal(kvmm_req_fork(c.rq, 2, 200, tail, 4, 0, 0, &child),
			 -EINVAL);
	assert_int_equal(slots_taken(), 2);
	f.l->engine_state = ENGINE_DYING;
	assert_int_equal(fork_it(c.rq, &child), -EOWNERDEAD);
	f.l->engine_state = ENGINE_ALIVE;
	end(other);
}

static void of_a_former_daemon_nothing_is_forked(void **state)
{
	uint64_t deadline = deadline_in(20 * NSEC_PER_SEC);
	uint64_t epoch = kvmm_epoch(c.k);
	struct kvmm_req *child;

	fk_restart(&f);
	while (kvmm_epoch(c.k) == epoch) {
		assert_false(deadline_past(deadline));
		kvmm_poll(c.k, &d, 1);
		poll(NULL, 0, 1);
	}
	assert_int_equal(fork_it(c.rq, &child), -ESTALE);
	tail[FK_FULL] = 0;
	assert_int_equal(fork_it(c.rq, &child), -ESTALE);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)
#define T2(x) cmocka_unit_test_setup_teardown(x, setup2, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_child_has_its_parents_match),
		T(a_child_has_its_parents_other_pins),
		T(a_child_is_a_request_of_its_own),
		T(the_entry_names_both_frames),
		T2(tails_of_several_classes_go_in_one_entry),
		T(nobody_has_the_new_frame_before_the_answer),
		T(what_fails_leaves_the_child_its_frame),
		T(it_can_be_cancelled),
		T(a_freed_tail_comes_back_after_the_copy),
		T(either_may_end_first),
		T(a_tail_is_held_by_the_last_of_its_copies),
		T(a_published_tail_is_no_ones_to_free),
		T(with_the_connection_frames_are_lost),
		T(without_frames_nothing_is_done),
		T2(all_tails_or_none),
		T(with_a_full_ring_nothing_is_done),
		T(with_all_slots_taken_nothing_is_done),
		T(what_makes_no_sense_is_refused),
		T(of_a_former_daemon_nothing_is_forked),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
