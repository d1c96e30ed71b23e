/* SPDX-License-Identifier: Apache-2.0 */
/* Fetching: what is asked, what is pinned, and what is answered in time. */
#include <poll.h>
#include <string.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define N	6

static struct fk f;
static struct fc c;
static struct kvmm_key key[16];
static struct kvmm_hit hit[64];
static struct kvmm_match m;
static struct kvmm_done d;

/* Pages 0 and 1 are here, 2 to 5 below. */
static int setup(void **state)
{
	struct ring_sqe sqe;
	uint32_t i;

	if (fk_start(&f, 2) || fc_open(&f, &c))
		return -1;
	while (fk_take(&f, &sqe, NULL))
		;
	for (i = 0; i < ARRAY_SIZE(key); i++)
		key[i] = fk_key(1, i);
	fk_seal(&f, 0, &key[0], FK_FULL, 70, 1);
	fk_seal(&f, 0, &key[1], FK_FULL, 71, 1);
	for (i = 2; i < N; i++)
		fk_below(&f, &key[i], FK_FULL, 0, 0);
	m.size = sizeof(m);
	return kvmm_match(c.rq, &(struct kvmm_keys){ .k = key, .n = N }, 1, 0,
			  hit, &m);
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

static const struct ring_key *posted(struct ring_sqe *sqe)
{
	const void *array;

	assert_true(fk_take_op(&f, RING_FETCH, sqe, &array));
	return array;
}

static void results(struct ring_result *res, unsigned int n, uint32_t frame)
{
	unsigned int i;

	for (i = 0; i < n; i++) {
		res[i] = (struct ring_result){
			0, frame + i, frame_word(9, FRAME_READY),
		};
		fk_word(&f, 0, frame + i, res[i].word);
		fk_word(&f, 1, frame + i, res[i].word);
	}
}

static void only_what_is_not_here_is_asked_for(void **state)
{
	struct ring_sqe sqe;
	const struct ring_key *k;
	uint64_t deadline = deadline_in(NSEC_PER_SEC);
	int i;

	assert_int_equal(kvmm_fetch(c.rq, 0, N, 0, deadline, 7), 0);
	k = posted(&sqe);
	assert_int_equal(sqe.n, 4);
	assert_int_equal(sqe.arg, deadline);
	for (i = 0; i < 4; i++) {
		assert_memory_equal(k[i].key, key[2 + i].b, 32);
		assert_int_equal(k[i].group, FK_FULL);
	}
}

static void what_came_is_pinned_and_can_be_read(void **state)
{
	struct iovec iov = { (char[64]){ 0 }, 64 };
	struct ring_result res[4];
	struct ring_sqe sqe;
	int i;

	assert_int_equal(kvmm_fetch(c.rq, 0, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&sqe);
	results(res, 4, 80);
	res[2] = (struct ring_result){ .result = -ENOENT };
	fk_answer(&f, &sqe, 0, res, 4);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.op, KVMM_OP_FETCH);
	assert_int_equal(d.tag, 7);
	assert_int_equal(d.result, 0);
	assert_int_equal(d.first, 0);
	assert_int_equal(d.n, N);
	for (i = 0; i < N; i++)
		assert_int_equal(d.res[i].result, i == 4 ? -ENOENT : 0);
	assert_int_equal(d.res[0].frame, 70);
	assert_int_equal(d.res[2].frame, 80);
	assert_int_equal(d.res[4].frame, 0);
	assert_int_equal(fk_pins(&f, 0, 80), 1);
	assert_int_equal(fk_pins(&f, 0, 82), 0);
	assert_int_equal(kvmm_read(c.rq, 2, &iov, 1), 64);
	assert_int_equal(kvmm_read(c.rq, 4, &iov, 1), -ENOENT);
	/* they are the match's now: a trim lets go of them */
	assert_int_equal(kvmm_trim(c.rq, 3, 0), 0);
	assert_int_equal(fk_pins(&f, 0, 80), 1);
	assert_int_equal(fk_pins(&f, 0, 81), 0);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.n, 6);
	assert_int_equal(sqe.frame, 83);
}

/* The daemon let go of the frame when the connection ended, and reused it. */
static void a_frame_that_was_reused_meanwhile_is_a_miss(void **state)
{
	struct ring_result res[4];
	struct ring_sqe sqe;

	assert_int_equal(kvmm_fetch(c.rq, 0, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&sqe);
	results(res, 4, 80);
	fk_answer(&f, &sqe, 0, res, 4);
	fk_word(&f, 0, 81, frame_word(10, FRAME_READY));
	fk_word(&f, 0, 82, frame_word(9, FRAME_ISOLATED));
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.res[2].result, 0);
	assert_int_equal(d.res[3].result, -ENOENT);
	assert_int_equal(d.res[3].frame, 0);
	assert_int_equal(d.res[4].result, -ENOENT);
	assert_int_equal(d.res[5].result, 0);
	assert_int_equal(fk_pins(&f, 0, 80), 1);
	assert_int_equal(fk_pins(&f, 0, 81), 0);
	assert_int_equal(fk_pins(&f, 0, 82), 0);
	assert_int_equal(fk_pins(&f, 0, 83), 1);
}

/* Nobody answers: the library does, in time, and the truth comes too late. */
static void a_late_page_is_a_miss_in_time(void **state)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	struct ring_result res[4];
	struct ring_sqe sqe;
	uint64_t deadline = deadline_in(5 * NSEC_PER_MSEC);
	int i;

	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, deadline, 7), 0);
	posted(&sqe);
	assert_true(kvmm_next_deadline(c.k) >= deadline);
	assert_true(kvmm_next_deadline(c.k) <=
		    deadline + 10 * NSEC_PER_MSEC);
	while (!kvmm_poll(c.k, &d, 1))
		assert_false(deadline_past(deadline + NSEC_PER_SEC));
	assert_true(deadline_past(deadline));
	assert_int_equal(d.tag, 7);
	assert_int_equal(d.result, -ETIMEDOUT);
	assert_int_equal(d.n, 4);
	for (i = 0; i < 4; i++)
		assert_int_equal(d.res[i].result, -ETIMEDOUT);
	results(res, 4, 80);
	fk_answer(&f, &sqe, 0, res, 4);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
	assert_int_equal(fk_all_pins(&f, 0), 2);
	/* what it handed over goes back with the head */
	assert_int_equal(f.l->cq.head, f.l->cq.tail);
	kvmm_stats(c.k, &st);
	assert_int_equal(st.late, 1);
	assert_int_equal(st.fetch_missed, 4);
	/* its slot in use again, the old tag is still nobody's */
	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, deadline_in(NSEC_PER_SEC),
				    8), 0);
	fk_answer(&f, &sqe, 0, res, 4);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
}

static void without_a_deadline_the_cost_is_one(void **state)
{
	struct ring_sqe sqe;
	uint64_t now;
	int i;

	now = now_ns();
	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, 0, 7), 0);
	posted(&sqe);
	assert_true(sqe.arg >= now + 2 * NSEC_PER_SEC);
	for (i = 2; i < N; i++)
		fk_below(&f, &key[i], FK_FULL, 0, 51200);	/* fits exactly */
	kvmm_match(c.rq, &(struct kvmm_keys){ .k = key, .n = N }, 1, 0, hit,
		   &m);
	now = now_ns();
	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, 0, 7), 0);
	posted(&sqe);
	assert_true(sqe.arg >= now + 200 * NSEC_PER_MSEC);
	assert_true(sqe.arg < now + NSEC_PER_SEC);
}

/* What an earlier match of the request knew of other pages is not of these. */
static void a_page_nobody_knew_has_no_cost_and_a_whole_length(void **state)
{
	const struct kvmm_keys keys = { .k = key + 8, .n = N };
	struct ring_result res[N];
	char buf[4096];
	struct iovec iov = { buf, sizeof(buf) };
	struct ring_sqe sqe;
	uint64_t now;
	int i;

	for (i = 0; i < N; i++)
		fk_below(&f, &key[i + 8], FK_FULL, 0, 50000);
	for (i = 0; i < 2; i++)		/* both of its arrays */
		assert_int_equal(kvmm_match(c.rq, &keys, 1, 0, hit, &m), 0);
	for (i = 0; i < N; i++)
		fk_forget_below(&f, &key[i + 8], FK_FULL);
	assert_int_equal(kvmm_match(c.rq, &keys, 1, 0, hit, &m), 0);
	assert_int_equal(m.n_pages, 0);
	now = now_ns();
	assert_int_equal(kvmm_fetch(c.rq, 0, N, 0, 0, 7), 0);
	posted(&sqe);
	assert_true(sqe.arg >= now + 2 * NSEC_PER_SEC);
	results(res, N, 80);
	fk_answer(&f, &sqe, 0, res, N);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(kvmm_read(c.rq, 0, &iov, 1), 4096);
}

static void nothing_to_ask_is_answered_at_once(void **state)
{
	struct pollfd p = { .fd = kvmm_fd(c.k), .events = POLLIN };
	struct ring_sqe sqe;

	while (kvmm_poll(c.k, &d, 1) || poll(&p, 1, 0) > 0)
		;			/* asleep */
	assert_int_equal(kvmm_fetch(c.rq, 0, 2, 0, 0, 7), 0);
	assert_false(fk_take_op(&f, RING_FETCH, &sqe, NULL));
	assert_int_equal(poll(&p, 1, 1000), 1);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.tag, 7);
	assert_int_equal(d.n, 2);
	assert_int_equal(d.res[1].frame, 71);
	assert_int_equal(fk_all_pins(&f, 0), 2);
}

static void pages_of_a_match_that_was_replaced_stay_pinned(void **state)
{
	struct ring_result res[4];
	struct ring_sqe sqe;

	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&sqe);
	kvmm_match(c.rq, &(struct kvmm_keys){ .k = key, .n = 1 }, 1, 0, hit,
		   &m);
	results(res, 4, 80);
	fk_answer(&f, &sqe, 0, res, 4);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.res[0].frame, 80);
	assert_int_equal(fk_all_pins(&f, 0), 5);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

/*
 * One class, two entries, and none of the pages is the match's any more: all of
 * them become pins beside it.
 */
static void more_pages_than_an_entry_takes_can_all_be_pinned(void **state)
{
	static struct kvmm_key many[2 * KVMM_MAX_BATCH];
	static struct kvmm_hit hits[2 * KVMM_MAX_BATCH];
	static struct ring_result res[KVMM_MAX_BATCH];
	const struct kvmm_keys keys = { .k = many, .n = 2 * KVMM_MAX_BATCH };
	struct ring_sqe sqe[2];
	uint32_t i;

	for (i = 0; i < keys.n; i++)
		many[i] = fk_key(2, i);
	assert_int_equal(kvmm_match(c.rq, &keys, 1, 0, hits, &m), 0);
	assert_int_equal(kvmm_fetch(c.rq, 0, keys.n, 0,
				    deadline_in(10 * NSEC_PER_SEC), 7), 0);
	posted(&sqe[0]);
	posted(&sqe[1]);
	assert_int_equal(sqe[1].n, KVMM_MAX_BATCH);
	kvmm_match(c.rq, &keys, 1, 0, hits, &m);
	for (i = 0; i < KVMM_MAX_BATCH; i++)
		results(&res[i], 1, 80);
	fk_answer(&f, &sqe[0], 0, res, KVMM_MAX_BATCH);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
	fk_answer(&f, &sqe[1], 0, res, KVMM_MAX_BATCH);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.n, keys.n);
	assert_int_equal(fk_pins(&f, 0, 80), keys.n);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

/*
 * A match that could look nowhere, since the window had to be opened again, has
 * no view whose pins its pages could be.
 */
static void pages_of_a_blind_match_are_the_requests(void **state)
{
	const struct kvmm_keys keys = { .k = key, .n = N };
	struct iovec iov = { (char[64]){ 0 }, 64 };
	struct ring_result res[N];
	struct ring_sqe sqe;
	struct kvmm_req *rq;
	int round = 0;

	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	fk_restart(&f);
	while (round++ < 1000 && (kvmm_poll(c.k, &d, 1) == -ENOTCONN ||
				  kvmm_epoch(c.k) != f.epoch))
		poll(NULL, 0, 5);
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &rq), 0);
	c.rq = rq;
	assert_int_equal(kvmm_match(rq, &keys, 1, 0, hit, &m), 0);
	assert_int_equal(m.n_pages, 0);
	assert_true(kvmm_win_sync(c.win[0], 0) > 0);
	assert_int_equal(kvmm_fetch(rq, 0, N, 0, deadline_in(NSEC_PER_SEC), 7),
			 -ENOTCONN);
	/* bound now, if to no match */
	assert_int_equal(kvmm_peek(rq, &keys, 1, 0, &m), 0);
	assert_int_equal(kvmm_fetch(rq, 0, N, 0, deadline_in(NSEC_PER_SEC), 7),
			 0);
	posted(&sqe);
	results(res, N, 80);
	fk_answer(&f, &sqe, 0, res, N);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.res[0].frame, 80);
	assert_int_equal(fk_all_pins(&f, 0), N);
	assert_int_equal(kvmm_read(rq, 0, &iov, 1), -ENOENT);
	assert_int_equal(kvmm_trim(rq, 1, 0), 0);
	assert_int_equal(fk_all_pins(&f, 0), N);
	kvmm_req_end(rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

/* Closed and opened again the window is another one, with pins of its own. */
static void a_window_opened_again_has_its_own_pins(void **state)
{
	struct shm old = f.win[0].wl;
	struct window_ledger *w = old.addr;
	struct ring_result res[4];
	struct ring_sqe sqe;
	uint32_t i;

	kvmm_win_close(c.win[0]);
	f.win[0].wl = (struct shm)SHM_INIT;
	assert_int_equal(shm_create(&f.win[0].wl, "fake-window", old.bytes, 0),
			 0);
	f.win[0].w = f.win[0].wl.addr;
	memcpy(f.win[0].w, w, sizeof(*w));
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]), 0);
	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&sqe);
	results(res, 4, 80);
	fk_answer(&f, &sqe, 0, res, 4);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(fk_all_pins(&f, 0), 4);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_int_equal(fk_all_pins(&f, 0), 0);
	for (i = 0; i < FK_FRAMES; i++)
		assert_int_equal(window_pins(w)[i], 0);
	shm_fini(&old);
}

static void an_ended_request_wants_no_pages(void **state)
{
	struct ring_sqe sqe, cancel;
	struct ring_result res[4];

	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&sqe);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	assert_true(fk_take_op(&f, RING_CANCEL, &cancel, NULL));
	assert_int_equal(cancel.arg, sqe.tag);
	results(res, 4, 80);
	fk_answer(&f, &sqe, 0, res, 4);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.tag, 7);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void a_cancel_is_passed_on_and_answered_once(void **state)
{
	struct ring_sqe sqe, cancel;

	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&sqe);
	assert_int_equal(kvmm_cancel(c.k, 8), -ENOENT);
	assert_int_equal(kvmm_cancel(c.k, 7), 0);
	assert_true(fk_take_op(&f, RING_CANCEL, &cancel, NULL));
	assert_int_equal(cancel.arg, sqe.tag);
	fk_answer(&f, &sqe, -ECANCELED, NULL, 0);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.result, -ECANCELED);
	assert_int_equal(kvmm_cancel(c.k, 7), -ENOENT);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
}

/* A class is an entry; the completion comes when all are answered. */
static void groups_of_several_classes_are_one_operation(void **state)
{
	const struct kvmm_keys keys[] = {
		{ .k = key, .n = N, .group = FK_FULL },
		{ .k = key, .n = N / 2, .group = FK_FULL2 },
	};
	struct ring_sqe a, b;
	struct ring_result res[4];
	int i;

	for (i = 0; i < N / 2; i++)
		fk_below(&f, &key[i], FK_FULL2, 0, 0);
	assert_int_equal(kvmm_match(c.rq, keys, 2, 0, hit, &m), 0);
	assert_int_equal(m.n_pages, 3);
	assert_int_equal(kvmm_fetch(c.rq, 0, 3, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&a);
	posted(&b);
	assert_int_equal(a.win, 0);
	/* pages 0 and 1 are of no use without their pages of the other group */
	assert_int_equal(a.n, 6);
	assert_int_equal(b.win, 1);
	assert_int_equal(b.n, 3);
	results(res, 3, 90);
	fk_answer(&f, &b, 0, res, 3);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
	fk_answer(&f, &a, -ENOENT, NULL, 0);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.n, 9);
	assert_int_equal(d.res[0].result, -ENOENT);
	assert_int_equal(d.res[5].result, -ENOENT);
	assert_int_equal(d.res[6].frame, 90);
	assert_int_equal(fk_all_pins(&f, 1), 3);
}

/* What the rule does not need is not brought. */
static void a_window_fetches_its_last_pages(void **state)
{
	const struct kvmm_keys keys = { .k = key, .n = N, .group = FK_WINDOW };
	const struct ring_key *k;
	struct ring_sqe sqe;
	int i;

	for (i = 0; i < N; i++)
		fk_below(&f, &key[i], FK_WINDOW, 0, 0);
	assert_int_equal(kvmm_match(c.rq, &keys, 1, 0, hit, &m), 0);
	assert_int_equal(m.n_pages, N);
	assert_int_equal(kvmm_fetch(c.rq, 0, N, 0, 0, 7), 0);
	k = posted(&sqe);
	assert_int_equal(sqe.n, FK_WINDOW_PAGES);
	assert_memory_equal(k[0].key, key[3].b, 32);
}

/* It has one key for every length: the first unit is no more its own. */
static void a_blob_comes_with_any_units(void **state)
{
	const struct kvmm_keys keys[] = {
		{ .k = key + 9, .n = 1, .group = FK_BLOB },
		{ .k = key, .n = N, .group = FK_FULL },
	};
	struct ring_result res[3];
	const struct ring_key *k;
	struct ring_sqe sqe;

	fk_below(&f, &key[9], FK_BLOB, 0, 0);
	assert_int_equal(kvmm_match(c.rq, keys, 2, 0, hit, &m), 0);
	assert_int_equal(m.n_pages, N);
	assert_int_equal(kvmm_fetch(c.rq, 2, 4, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	k = posted(&sqe);
	assert_int_equal(sqe.n, 3);
	assert_memory_equal(k[0].key, key[9].b, 32);
	assert_int_equal(k[0].group, FK_BLOB);
	assert_memory_equal(k[1].key, key[2].b, 32);
	results(res, 3, 80);
	fk_answer(&f, &sqe, 0, res, 3);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.first, 0);
	assert_int_equal(d.n, 3);
	assert_int_equal(d.res[0].frame, 80);
	assert_int_equal(d.res[2].frame, 82);
	/* here now, it is not asked for again */
	assert_int_equal(kvmm_fetch(c.rq, 4, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	k = posted(&sqe);
	assert_int_equal(sqe.n, 2);
	assert_memory_equal(k[0].key, key[4].b, 32);
}

static void a_daemon_that_talks_nonsense_is_left(void **state)
{
	struct ring_sqe sqe;

	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&sqe);
	f.l->cq.tail = LEDGER_CQ_ENTRIES + 1;
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.result, -ENOTCONN);
}

/* The right number of answers is part of an answer. */
static void a_short_answer_is_no_answer(void **state)
{
	struct ring_result res[3];
	struct ring_sqe sqe;

	assert_int_equal(kvmm_fetch(c.rq, 2, N, 0, deadline_in(NSEC_PER_SEC),
				    7), 0);
	posted(&sqe);
	results(res, 3, 80);
	fk_answer(&f, &sqe, 0, res, 3);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.result, -EPROTO);
	assert_int_equal(fk_all_pins(&f, 0), 2);
}

static void a_report_names_the_page(void **state)
{
	const struct ring_key *k;
	struct ring_sqe sqe;

	assert_int_equal(kvmm_report(c.rq, 1, KVMM_BAD), 0);
	assert_true(fk_take(&f, &sqe, (const void **)&k));
	assert_int_equal(sqe.op, RING_REPORT);
	assert_int_equal(sqe.arg, KVMM_BAD);
	assert_memory_equal(k->key, key[1].b, 32);
	assert_int_equal(kvmm_report(c.rq, N, KVMM_BAD), -EINVAL);
	assert_int_equal(kvmm_report(c.rq, 0, 9), -EINVAL);
}

static void wrong_ranges_are_refused(void **state)
{
	assert_int_equal(kvmm_fetch(c.rq, 0, N + 1, 0, 0, 1), -EINVAL);
	assert_int_equal(kvmm_fetch(c.rq, 3, 3, 0, 0, 1), -EINVAL);
	assert_int_equal(kvmm_fetch(c.rq, 4, 3, 0, 0, 1), -EINVAL);
	assert_int_equal(kvmm_fetch(c.rq, 0, N, 1, 0, 1), -EINVAL);
	assert_int_equal(kvmm_fetch(c.rq, 0, N, 99, 0, 1), -EINVAL);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(only_what_is_not_here_is_asked_for),
		T(what_came_is_pinned_and_can_be_read),
		T(a_frame_that_was_reused_meanwhile_is_a_miss),
		T(a_late_page_is_a_miss_in_time),
		T(without_a_deadline_the_cost_is_one),
		T(a_page_nobody_knew_has_no_cost_and_a_whole_length),
		T(nothing_to_ask_is_answered_at_once),
		T(pages_of_a_match_that_was_replaced_stay_pinned),
		T(more_pages_than_an_entry_takes_can_all_be_pinned),
		T(a_window_opened_again_has_its_own_pins),
		T(pages_of_a_blind_match_are_the_requests),
		T(an_ended_request_wants_no_pages),
		T(a_cancel_is_passed_on_and_answered_once),
		T(groups_of_several_classes_are_one_operation),
		T(a_window_fetches_its_last_pages),
		T(a_blob_comes_with_any_units),
		T(a_daemon_that_talks_nonsense_is_left),
		T(a_short_answer_is_no_answer),
		T(a_report_names_the_page),
		T(wrong_ranges_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
