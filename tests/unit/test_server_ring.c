/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon's side of the rings: order, rounds, hand-overs, back-pressure. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>

#include "tests/lib/ring_rig.h"

/* -- round trips -------------------------------------------------------------------- */

static void nops_complete_in_order(void **state)
{
	struct ring_cqe cqe;
	uint64_t i;

	for (i = 0; i < 300; i++) {
		struct ring_sqe e = { .op = RING_NOP, .tag = i };

		rc_submit(&cl, &e, NULL, 0);
	}
	for (i = 0; i < 300; i++) {
		rc_complete(&cl, &cqe, NULL, 0);
		assert_int_equal(cqe.op, RING_NOP);
		assert_int_equal(cqe.tag, i);
		assert_int_equal(cqe.result, 0);
		assert_int_equal(cqe.n, 0);
	}
	assert_int_equal(atomic_load(&cl.l->sq.head), 300);
}

static void a_published_page_is_sealed_in_its_frame(void **state)
{
	struct ring_result res[1];
	struct ring_cqe cqe;
	struct ring_pub pub;
	uint32_t frame;

	rc_alloc(&cl, &frame, 1);
	make_page(&pub, frame, 1);
	publish(&cl, &pub, 1, 7);
	rc_complete(&cl, &cqe, res, 1);
	assert_int_equal(cqe.op, RING_PUBLISH);
	assert_int_equal(cqe.tag, 7);
	assert_int_equal(cqe.n, 1);
	assert_int_equal(res[0].result, 0);
	assert_int_equal(res[0].frame, frame);
	assert_int_equal(frame_word_state(res[0].word), FRAME_READY);
}

static void many_results_wrap_round_the_ring(void **state)
{
	static struct ring_pub pub[64];
	struct ring_result res[64];
	uint32_t frame[64], round, i;
	struct ring_cqe cqe;

	for (round = 0; round < 600; round++) {
		/* all refused: the frames are nobody's */
		for (i = 0; i < 64; i++)
			make_page(&pub[i], 0x7fffffff, (uint8_t)i);
		publish(&cl, pub, 64, round);
		rc_complete(&cl, &cqe, res, 64);
		assert_int_equal(cqe.tag, round);
		assert_int_equal(cqe.n, 64);
		for (i = 0; i < 64; i++) {
			assert_int_equal(res[i].result, -EINVAL);
			assert_int_equal(res[i].frame, 0);
		}
		rc_advance(&cl);
	}
	rc_alloc(&cl, frame, 1);
}

static void a_tail_is_copied_into_another_frame(void **state)
{
	struct ring_sqe e = { .op = RING_FORK, .space = (uint16_t)cl.space,
			      .n = 2, .tag = 5 };
	struct ring_result res[2];
	struct ring_fork f[2] = { { .win = cl.win }, { .win = cl.win } };
	struct ring_cqe cqe;
	uint32_t frame[3];

	rc_alloc(&cl, frame, 3);
	f[0].from = f[1].from = frame[0];
	f[0].to = frame[1];
	f[1].to = UINT32_MAX;
	rc_submit(&cl, &e, f, sizeof(f));
	rc_complete(&cl, &cqe, res, 2);
	assert_int_equal(cqe.op, RING_FORK);
	assert_int_equal(cqe.tag, 5);
	assert_int_equal(cqe.result, 0);
	assert_int_equal(cqe.n, 2);
	assert_int_equal(res[0].result, 0);
	assert_int_equal(res[0].frame, 0);
	assert_int_equal(res[1].result, -EINVAL);
	assert_int_equal(session()->via->requests, 0);
	/* the window is each element's own */
	f[1].win = 200;
	rc_submit(&cl, &e, f, sizeof(f));
	rc_complete(&cl, &cqe, res, 2);
	assert_int_equal(cqe.result, -EINVAL);
	assert_int_equal(cqe.n, 0);
	session()->via->requests = rig.s->cfg.max_requests;
	rc_submit(&cl, &e, f, sizeof(f));
	rc_complete(&cl, &cqe, res, 2);
	assert_int_equal(cqe.result, -EAGAIN);
	session()->via->requests = 0;
}

/* -- hand-overs --------------------------------------------------------------------- */

static void a_frame_is_held_until_the_head_passes(void **state)
{
	struct ring_result res[1];
	struct session *ss = session();
	struct ring_cqe cqe;
	struct ring_pub pub;
	uint32_t frame;
	int i;

	rc_alloc(&cl, &frame, 1);
	make_page(&pub, frame, 1);
	publish(&cl, &pub, 1, 1);
	rc_complete(&cl, &cqe, res, 1);
	for (i = 0; i < 50; i++)
		srig_pump(&rig);
	assert_false(list_empty(&ss->ring.held));
	assert_int_equal(rig.s->nr_held, 1);
	rc_advance(&cl);
	ring_reap(ss, now_ns());
	assert_true(list_empty(&ss->ring.held));
	assert_int_equal(rig.s->nr_held, 0);
	srig_pump(&rig);
	assert_int_equal(ss->doom, REJECT_NONE);
}

/* The loop finds out by itself, without a doorbell. */
static void the_loop_looks_after_hand_overs(void **state)
{
	uint64_t deadline = deadline_in(NSEC_PER_SEC);
	struct session *ss = session();
	struct ring_cqe cqe;
	struct ring_pub pub;
	uint32_t frame;

	rc_alloc(&cl, &frame, 1);
	make_page(&pub, frame, 1);
	publish(&cl, &pub, 1, 1);
	rc_complete(&cl, &cqe, NULL, 0);
	rc_advance(&cl);
	while (!list_empty(&ss->ring.held) && !deadline_past(deadline))
		loop_once(rig.s, deadline_in(100 * NSEC_PER_MSEC));
	assert_true(list_empty(&ss->ring.held));
}

static void closing_a_window_ends_its_hand_overs(void **state)
{
	struct wire_win w = { .h = { .type = WIRE_WIN_CLOSE,
				     .len = sizeof(w) }, .win = cl.win };
	struct session *ss = session();
	struct ring_cqe cqe;
	struct ring_pub pub;
	struct errmsg e;
	uint32_t frame;

	rc_alloc(&cl, &frame, 1);
	make_page(&pub, frame, 1);
	publish(&cl, &pub, 1, 1);
	rc_complete(&cl, &cqe, NULL, 0);
	rc_send(&cl, &w.h, NULL, 0);
	rc_expect(&cl, WIRE_OK);
	rc_advance(&cl);
	ring_reap(ss, now_ns());
	assert_true(list_empty(&ss->ring.held));
	assert_int_equal(mm_check(rig.s->mm, &e), 0);
}

static void hanging_up_ends_hand_overs(void **state)
{
	struct ring_cqe cqe;
	struct ring_pub pub;
	struct errmsg e;
	uint32_t frame;

	rc_alloc(&cl, &frame, 1);
	make_page(&pub, frame, 1);
	publish(&cl, &pub, 1, 1);
	rc_complete(&cl, &cqe, NULL, 0);
	rc_close(&cl);
	srig_pump(&rig);
	assert_int_equal(rig.s->nr_held, 0);
	assert_int_equal(session()->state, SESSION_CLOSED);
	assert_int_equal(mm_check(rig.s->mm, &e), 0);
	no_client();
}

/* -- rounds ----------------------------------------------------------------------------- */

static void a_round_takes_a_bounded_number_of_entries(void **state)
{
	unsigned int i;

	for (i = 0; i < 4096; i++) {
		struct ring_sqe e = { .op = RING_NOP };

		rc_submit(&cl, &e, NULL, 0);
	}
	assert_in_range(ring_poll(session()), 1, 256);
}

static uint64_t touches(void)
{
	struct mm_node_stat st;

	mm_node_stat(rig.s->mm, 0, &st);
	return st.c.pgtouch;
}

#define CHAIN	500u

/* A walk over the parents is work, too, whatever the entry's size. */
static void ends_of_long_chains_share_a_round(void **state)
{
	static struct ring_result res[CHAIN];
	static struct ring_pub pub[CHAIN];
	static uint32_t frame[CHAIN];
	struct ring_sqe e = {
		.op = RING_END, .win = cl.win, .space = (uint16_t)cl.space,
		.n = CHAIN,
	};
	struct ring_cqe cqe;
	unsigned int i;

	rc_alloc(&cl, frame, CHAIN);
	for (i = 0; i < CHAIN; i++) {
		pub[i] = (struct ring_pub){ .frame = frame[i], .pos = i };
		memcpy(pub[i].key, &(uint32_t){ i + 1 }, 4);
		memcpy(pub[i].parent, &i, 4);
	}
	publish(&cl, pub, CHAIN, 1);
	rc_complete(&cl, &cqe, res, CHAIN);
	rc_advance(&cl);
	assert_int_equal(res[CHAIN - 1].result, 0);
	e.frame = res[CHAIN - 1].frame;
	e.arg = res[CHAIN - 1].word;
	for (i = 0; i < 64; i++)
		rc_submit(&cl, &e, NULL, 0);
	assert_in_range(ring_poll(session()), 1, 32);
	assert_in_range(touches(), CHAIN, 8192 + CHAIN);
	srig_pump(&rig);
	assert_int_equal(touches(), 64 * CHAIN);
}

/* A chain of @n pages, in batches; @n is a multiple of their size. */
static void publish_chain(struct raw_client *c, uint32_t n)
{
	static struct ring_pub pub[256];
	static struct ring_result res[256];
	uint32_t frame[256], i, at;
	struct ring_cqe cqe;

	for (at = 0; at < n; at += 256) {
		rc_alloc(c, frame, 256);
		for (i = 0; i < 256; i++) {
			uint32_t no = at + i + 1, up = no - 1;

			pub[i] = (struct ring_pub){ .frame = frame[i] };
			memcpy(pub[i].key, &no, sizeof(no));
			memcpy(pub[i].parent, &up, sizeof(up));
		}
		publish(c, pub, 256, at);
		rc_complete(c, &cqe, res, 256);
		rc_advance(c);
		assert_int_equal(cqe.n, 256);
		for (i = 0; i < 256; i++)
			assert_int_equal(res[i].result, 0);
	}
}

/* It names one page, but drops a whole chain: the others are for the next round. */
static void a_report_costs_what_it_drops(void **state)
{
	struct ring_key key = { 0 };
	struct ring_sqe e = {
		.op = RING_REPORT, .n = 1, .arg = KVMM_BAD,
	};
	uint32_t i, root = 1;

	assert_int_equal(srig_open_sized(&rig, "48MiB", "\"spin_us\": 0"), 0);
	assert_int_equal(rc_connect(&rig, 0, &cl), 0);
	rc_hello(&cl);
	rc_attach(&cl);
	rc_win_open(&cl, KVMM_RW);
	publish_chain(&cl, 33 * 256);
	e.win = cl.win;
	e.space = (uint16_t)cl.space;
	memcpy(key.key, &root, sizeof(root));
	for (i = 0; i < 4; i++)
		rc_submit(&cl, &e, &key, sizeof(key));
	assert_int_equal(ring_poll(session()), 1);
	assert_int_equal(ring_poll(session()), 3);
}

/* -- back-pressure --------------------------------------------------------------------- */

/* More answers than the ring has slots: nothing is lost, nothing is reordered. */
static void a_full_completion_ring_stops_its_own_client(void **state)
{
	uint64_t sent = 0, got = 0;
	struct session *ss = session();
	struct ring_cqe cqe;

	while (!ring_blocked(ss) && sent < 100000) {
		struct ring_sqe e = { .op = RING_NOP, .tag = sent++ };

		rc_submit(&cl, &e, NULL, 0);
		ring_poll(ss);
	}
	assert_true(ring_blocked(ss));
	assert_in_range(sent, LEDGER_CQ_ENTRIES, 3 * LEDGER_CQ_ENTRIES);
	/* it asks on, and nothing is taken */
	for (int i = 0; i < 10; i++) {
		struct ring_sqe e = { .op = RING_NOP, .tag = sent++ };

		rc_submit(&cl, &e, NULL, 0);
	}
	assert_int_equal(ring_poll(ss), 0);
	/* a loop that has nothing else to do goes to sleep all the same */
	assert_int_equal(ss->doom, REJECT_NONE);
	while (got < sent) {
		rc_complete(&cl, &cqe, NULL, 0);
		assert_int_equal(cqe.tag, got);
		got++;
		rc_advance(&cl);
	}
	srig_pump(&rig);
	assert_int_equal(ss->ring.backlog_slots, 0);
	assert_false(rc_pending(&cl));
}

static void a_blocked_client_holds_up_nobody_else(void **state)
{
	struct session *ss = session();
	struct raw_client other;
	struct ring_cqe cqe;
	struct ring_sqe e = { .op = RING_NOP };

	while (!ring_blocked(ss)) {
		e.tag++;
		rc_submit(&cl, &e, NULL, 0);
		ring_poll(ss);
	}
	assert_int_equal(rc_connect(&rig, 0, &other), 0);
	rc_hello(&other);
	e.tag = 77;
	rc_submit(&other, &e, NULL, 0);
	rc_complete(&other, &cqe, NULL, 0);
	assert_int_equal(cqe.tag, 77);
	rc_close(&other);
}

static void requests_of_a_socket_are_bounded(void **state)
{
	struct ring_sqe e = { .op = RING_FETCH, .win = cl.win,
			      .space = (uint16_t)cl.space, .n = 1, .tag = 5 };
	struct ring_key key = { .group = 0 };
	struct ring_cqe cqe;

	session()->via->requests = rig.s->cfg.max_requests;
	rc_submit(&cl, &e, &key, sizeof(key));
	rc_complete(&cl, &cqe, NULL, 0);
	assert_int_equal(cqe.tag, 5);
	assert_int_equal(cqe.result, -EAGAIN);
	session()->via->requests = 0;
}

/* -- waking ---------------------------------------------------------------------------- */

static void a_client_that_sleeps_is_woken_once(void **state)
{
	struct ring_sqe e = { .op = RING_NOP };
	struct ring_cqe cqe;
	eventfd_t n = 0;

	/* awake: nobody writes */
	rc_submit(&cl, &e, NULL, 0);
	rc_complete(&cl, &cqe, NULL, 0);
	assert_int_equal(eventfd_read(cl.notify, &n), -1);
	/* asleep: one write for two completions */
	atomic_store(&cl.l->cq.armed, 1);
	rc_submit(&cl, &e, NULL, 0);
	rc_complete(&cl, &cqe, NULL, 0);
	assert_int_equal(atomic_load(&cl.l->cq.armed), 2);
	rc_submit(&cl, &e, NULL, 0);
	rc_complete(&cl, &cqe, NULL, 0);
	assert_int_equal(eventfd_read(cl.notify, &n), 0);
	assert_int_equal(n, 1);
}

/* It holds the same open file: O_NONBLOCK is the client's to clear. */
static void an_eventfd_that_blocks_costs_its_client_only(void **state)
{
	struct ring_sqe e = { .op = RING_NOP };
	uint64_t start = now_ns();

	assert_int_equal(fcntl(cl.notify, F_SETFL, 0), 0);
	assert_int_equal(eventfd_write(cl.notify, UINT64_MAX - 1), 0);
	atomic_store(&cl.l->cq.armed, 1);
	rc_submit(&cl, &e, NULL, 0);
	rc_expect_cut(&cl, REJECT_NOTIFY);
	assert_in_range(now_ns() - start, 0, 2 * NSEC_PER_SEC);
}

/* A client as it should be, on a thread of its own. */
static void *ring_the_bell(void *arg)
{
	const struct kvmm_hdr *hdr = cl.hdr.addr;
	struct timespec ts = ns_to_timespec(50 * NSEC_PER_MSEC);
	struct ring_sqe e = { .op = RING_NOP, .tag = 99 };

	nanosleep(&ts, NULL);
	rc_submit(&cl, &e, NULL, 0);
	if (atomic_load(&hdr->sleeping))
		eventfd_write(cl.doorbell, 1);
	return NULL;
}

static void a_sleeping_loop_is_woken_by_the_doorbell(void **state)
{
	const struct kvmm_hdr *hdr = cl.hdr.addr;
	uint64_t start = now_ns();
	pthread_t t;

	assert_int_equal(pthread_create(&t, NULL, ring_the_bell, NULL), 0);
	while (!rc_pending(&cl) && now_ns() - start < 5 * NSEC_PER_SEC)
		loop_once(rig.s, deadline_in(5 * NSEC_PER_SEC));
	pthread_join(t, NULL);
	assert_true(rc_pending(&cl));
	assert_in_range(now_ns() - start, 0, 4 * NSEC_PER_SEC);
	assert_int_equal(atomic_load(&hdr->sleeping), 0);
	assert_true(rig.s->c.sleeps >= 1);
	assert_true(rig.s->c.doorbells >= 1);
}

static void entries_are_found_before_going_to_sleep(void **state)
{
	struct ring_sqe e = { .op = RING_NOP };
	uint64_t start = now_ns();

	rc_submit(&cl, &e, NULL, 0);	/* and nobody rings */
	loop_once(rig.s, deadline_in(2 * NSEC_PER_SEC));
	while (!rc_pending(&cl) && now_ns() - start < 5 * NSEC_PER_SEC)
		loop_once(rig.s, deadline_in(2 * NSEC_PER_SEC));
	assert_in_range(now_ns() - start, 0, NSEC_PER_SEC);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		RING_TEST(nops_complete_in_order),
		RING_TEST(a_round_takes_a_bounded_number_of_entries),
		RING_WIN_TEST(a_published_page_is_sealed_in_its_frame),
		RING_WIN_TEST(many_results_wrap_round_the_ring),
		RING_WIN_TEST(a_frame_is_held_until_the_head_passes),
		RING_WIN_TEST(the_loop_looks_after_hand_overs),
		RING_WIN_TEST(closing_a_window_ends_its_hand_overs),
		RING_WIN_TEST(hanging_up_ends_hand_overs),
		RING_TEST(a_full_completion_ring_stops_its_own_client),
		RING_TEST(a_blocked_client_holds_up_nobody_else),
		RING_WIN_TEST(requests_of_a_socket_are_bounded),
		RING_TEST(a_client_that_sleeps_is_woken_once),
		RING_TEST(an_eventfd_that_blocks_costs_its_client_only),
		RING_TEST(a_sleeping_loop_is_woken_by_the_doorbell),
		RING_TEST(entries_are_found_before_going_to_sleep),
		RING_WIN_TEST(ends_of_long_chains_share_a_round),
		cmocka_unit_test_teardown(a_report_costs_what_it_drops,
					  ring_teardown),
		RING_WIN_TEST(a_tail_is_copied_into_another_frame),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
