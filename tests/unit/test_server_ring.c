/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon's side of the rings: order, hand-overs, back-pressure, lies. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "tests/lib/server_rig.h"
#include "tests/lib/unit.h"

static struct server_rig rig;
static struct raw_client cl;

static int setup(void **state)
{
	int err = srig_open(&rig, "\"spin_us\": 0");

	if (err)
		return err;
	assert_int_equal(rc_connect(&rig, 0, &cl), 0);
	rc_hello(&cl);
	return 0;
}

static int setup_window(void **state)
{
	int err = setup(state);

	if (err)
		return err;
	rc_attach(&cl);
	rc_win_open(&cl, KVMM_RW);
	return 0;
}

static int teardown(void **state)
{
	rc_close(&cl);
	srig_close(&rig);
	return 0;
}

static struct session *session(void)
{
	return list_first(&rig.s->sessions, struct session, link);
}

/* It was closed by the test. */
static void no_client(void)
{
	cl = (struct raw_client){ .fd = -1, .doorbell = -1, .notify = -1,
				  .hdr = SHM_INIT, .ledger_shm = SHM_INIT,
				  .table = SHM_INIT, .wl_shm = SHM_INIT };
}

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

static void a_round_takes_a_bounded_number_of_entries(void **state)
{
	unsigned int i;

	for (i = 0; i < 4096; i++) {
		struct ring_sqe e = { .op = RING_NOP };

		rc_submit(&cl, &e, NULL, 0);
	}
	assert_in_range(ring_poll(session()), 1, 256);
}

static void make_page(struct ring_pub *pub, uint32_t frame, uint8_t id)
{
	*pub = (struct ring_pub){ .frame = frame };
	memset(pub->key, id, sizeof(pub->key));
}

static void publish(struct raw_client *c, struct ring_pub *pub, uint32_t n,
		    uint64_t tag)
{
	struct ring_sqe e = {
		.op = RING_PUBLISH, .win = c->win,
		.space = (uint16_t)c->space, .n = n, .tag = tag,
	};

	rc_submit(c, &e, pub, n * sizeof(*pub));
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

/* -- lies ------------------------------------------------------------------------------ */

static void a_tail_beyond_the_ring_is_cut_off(void **state)
{
	atomic_store(&cl.l->sq.tail, LEDGER_SQ_ENTRIES + 1);
	rc_expect_cut(&cl, REJECT_SQ_TAIL);
}

static void a_tail_that_goes_back_is_cut_off(void **state)
{
	struct ring_sqe e = { .op = RING_NOP };

	rc_submit(&cl, &e, NULL, 0);
	srig_pump(&rig);
	atomic_store(&cl.l->sq.tail, 0);
	rc_expect_cut(&cl, REJECT_SQ_TAIL);
}

static void an_unknown_operation_is_cut_off(void **state)
{
	struct ring_sqe e = { .op = RING_NR_OPS };

	rc_submit(&cl, &e, NULL, 0);
	rc_expect_cut(&cl, REJECT_SQE_OP);
}

static void a_head_beyond_the_tail_is_cut_off(void **state)
{
	struct ring_cqe cqe;
	struct ring_pub pub;
	uint32_t frame;

	rc_alloc(&cl, &frame, 1);
	make_page(&pub, frame, 1);
	publish(&cl, &pub, 1, 1);
	rc_complete(&cl, &cqe, NULL, 0);
	atomic_store(&cl.l->cq.head, cl.cq_head + 1);
	rc_expect_cut(&cl, REJECT_CQ_HEAD);
}

static void arrays_out_of_bounds_are_cut_off(void **state)
{
	static const struct ring_sqe bad[] = {
		{ .op = RING_PUBLISH, .n = 0, .arena_len = 96 },
		{ .op = RING_PUBLISH, .n = KVMM_MAX_BATCH + 1,
		  .arena_len = LEDGER_ARENA_BYTES },
		{ .op = RING_PUBLISH, .n = 2, .arena_len = 96 },
		{ .op = RING_PUBLISH, .n = 1, .arena_pos = 96,
		  .arena_len = 96 },
		{ .op = RING_FETCH, .n = 1, .arena_pos = 0xffffffff,
		  .arena_len = 40 },
		{ .op = RING_FETCH, .n = 1, .arena_pos = LEDGER_ARENA_BYTES - 8,
		  .arena_len = LEDGER_ARENA_BYTES },
		{ .op = RING_FREE, .n = 1, .arena_len = LEDGER_ARENA_BYTES + 1 },
		{ .op = RING_FREE, .n = 0xffffffff, .arena_len = 4 },
		{ .op = RING_REPORT, .n = 2, .arena_len = 80 },
		{ .op = RING_NOP, .arena_len = 0xffffffff },
		{ .op = RING_END, .nr_keys = KVMM_MAX_BATCH + 1,
		  .arena_len = LEDGER_ARENA_BYTES },
		{ .op = RING_END, .nr_keys = 2, .arena_len = 40 },
		{ .op = RING_END, .nr_keys = 0x80000001, .arena_len = 40 },
		{ .op = RING_END, .nr_keys = 1, .arena_pos = 40,
		  .arena_len = 40 },
		{ .op = RING_FORK, .n = 0, .arena_len = 16 },
		{ .op = RING_FORK, .n = KVMM_MAX_GROUPS + 1,
		  .arena_len = 16 * (KVMM_MAX_GROUPS + 1) },
		{ .op = RING_FORK, .n = 2, .arena_len = 16 },
		{ .op = RING_REFILL, .n = 0 },
		{ .op = RING_REFILL, .n = 0xffffffff },
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(bad); i++) {
		struct ring_sqe e = bad[i];
		struct raw_client c;

		assert_int_equal(rc_connect(&rig, 0, &c), 0);
		rc_hello(&c);
		rc_submit(&c, &e, NULL, 0);
		rc_expect_cut(&c, REJECT_SQE_ARRAY);
		rc_close(&c);
		if (srig_reject(&rig, REJECT_SQE_ARRAY) != i + 1)
			fail_msg("entry %u was not refused", i);
	}
}

static void a_foreign_frame_cannot_be_freed(void **state)
{
	uint32_t frame = 0x00ffffff;
	struct ring_sqe e = { .op = RING_FREE, .win = cl.win, .n = 1 };

	rc_submit(&cl, &e, &frame, sizeof(frame));
	rc_expect_cut(&cl, REJECT_SQE_FRAME);
}

static struct mm_space *space(void)
{
	return mm_space_get(rig.s->mm, cl.space);
}

static void asked_of(const struct mm_space_info *si, void *arg)
{
	*(uint64_t *)arg += si->asked;
}

static uint64_t asked(void)
{
	uint64_t n = 0;

	mm_for_each_space(rig.s->mm, asked_of, &n);
	return n;
}

static void submit_end(struct ring_key *key, uint32_t n)
{
	struct ring_sqe e = {
		.op = RING_END, .space = (uint16_t)cl.space, .nr_keys = n,
	};

	rc_submit(&cl, &e, key, n * sizeof(*key));
}

static void an_end_names_what_was_asked_for(void **state)
{
	static struct ring_key key[KVMM_MAX_BATCH];

	assert_non_null(space());
	submit_end(key, 3);
	submit_end(NULL, 0);
	submit_end(key, KVMM_MAX_BATCH);
	srig_pump(&rig);
	assert_int_equal(asked(), 3 + KVMM_MAX_BATCH);
	assert_int_equal(atomic_load(&cl.l->arena_head), cl.arena_tail);
	assert_int_equal(srig_sessions(&rig), 1);
}

static void a_key_of_no_group_is_cut_off(void **state)
{
	struct ring_key key[2] = { { .group = 0 }, { .group = 1 } };

	submit_end(key, 2);
	rc_expect_cut(&cl, REJECT_SQE_KEY);
	assert_int_equal(asked(), 0);
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

/* -- what takes a number out of use -------------------------------------------------------- */

/* As the loop would, between two looks at the ring. */
static void request(uint16_t type, uint16_t what)
{
	static struct sock_msg m;
	struct wire_win *w = (struct wire_win *)m.buf;

	*w = (struct wire_win){
		.h = { .type = type, .len = sizeof(*w) }, .win = what,
	};
	m.len = sizeof(*w);
	session_request(session(), &m);
}

static void ask(uint16_t type, uint16_t what)
{
	struct wire_win w = { .h = { .type = type, .len = sizeof(w) },
			      .win = what };

	assert_int_equal(rc_send(&cl, &w.h, NULL, 0), 0);
}

static void submit_nops(unsigned int n)
{
	struct ring_sqe e = { .op = RING_NOP };

	while (n--)
		rc_submit(&cl, &e, NULL, 0);
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


/* Else its last ends would be of a space that got the number after it. */
static void what_was_posted_before_a_detach_is_taken_before_it(void **state)
{
	struct ring_key key = { .group = 0 };
	struct raw_client other;
	unsigned int i;

	/* so that the space stays */
	assert_int_equal(rc_connect(&rig, 0, &other), 0);
	rc_hello(&other);
	rc_attach(&other);
	rc_attach(&cl);
	for (i = 0; i < LEDGER_SQ_ENTRIES; i++)
		submit_end(&key, 1);
	request(WIRE_DETACH, (uint16_t)cl.space);
	rc_expect(&cl, WIRE_OK);
	assert_int_equal(asked(), LEDGER_SQ_ENTRIES);
	assert_false(mm_space_attached(space(), session()->mc));
	rc_close(&other);
}

static void closing_takes_no_more_than_a_round_at_once(void **state)
{
	unsigned int i;

	submit_nops(LEDGER_SQ_ENTRIES);
	for (i = 0; i < 8; i++)
		ask(WIRE_WIN_CLOSE, cl.win);
	session()->sock.ready(&session()->sock, EPOLLIN);
	assert_in_range(atomic_load(&cl.l->sq.head), 0, 64);
	assert_int_equal(session()->nr_wins, 1);
	rc_expect(&cl, WIRE_OK);
	assert_int_equal(atomic_load(&cl.l->sq.head), LEDGER_SQ_ENTRIES);
	assert_int_equal(session()->nr_wins, 0);
}

static void leaving_what_is_not_there_takes_nothing(void **state)
{
	submit_nops(100);
	request(WIRE_DETACH, (uint16_t)(cl.space + 1));
	request(WIRE_WIN_CLOSE, (uint16_t)(cl.win + 1));
	assert_int_equal(atomic_load(&cl.l->sq.head), 0);
	rc_expect_error(&cl, -EINVAL, "no such space");
	rc_expect_error(&cl, -EINVAL, "no such window");
}

/* What is posted after the request has no claim to be waited for. */
static void a_client_that_posts_on_is_not_waited_for(void **state)
{
	unsigned int i;

	submit_nops(100);
	request(WIRE_WIN_CLOSE, cl.win);
	for (i = 0; i < 4 && session()->nr_wins; i++) {
		submit_nops(64);
		ring_poll(session());
	}
	assert_int_equal(session()->nr_wins, 0);
	assert_true(atomic_load(&cl.l->sq.head) != cl.sq_tail);
}

static void block_with_nops(void)
{
	struct session *ss = session();

	while (!ring_blocked(ss)) {
		submit_nops(1);
		ring_poll(ss);
	}
}

/* A number that is given again must not meet entries of the one before it. */
static void a_blocked_ring_keeps_a_window_number_in_use(void **state)
{
	struct ring_sqe e = { .op = RING_FREE, .win = cl.win, .n = 1 };
	struct wire_win_open o = {
		.h = { .type = WIRE_WIN_OPEN, .len = sizeof(o) },
		.space = cl.space, .rights = KVMM_RW,
	};
	const struct wire_window *w = (const void *)cl.m->buf;
	struct session *ss = session();
	struct ring_cqe cqe;
	struct errmsg err;
	uint32_t frame;

	rc_alloc(&cl, &frame, 1);
	block_with_nops();
	rc_submit(&cl, &e, &frame, sizeof(frame));
	ask(WIRE_WIN_CLOSE, cl.win);
	assert_int_equal(rc_send(&cl, &o.h, NULL, 0), 0);
	srig_pump(&rig);
	assert_int_equal(sock_recv(cl.fd, cl.m), -EAGAIN);
	while (rc_pending(&cl)) {
		rc_complete(&cl, &cqe, NULL, 0);
		rc_advance(&cl);
		ring_reap(ss, now_ns());
	}
	rc_expect(&cl, WIRE_OK);
	rc_expect(&cl, WIRE_WINDOW);
	assert_int_equal(w->win, cl.win);
	srig_pump(&rig);
	assert_int_equal(ss->doom, REJECT_NONE);
	assert_int_equal(ss->nr_wins, 1);
	assert_int_equal(mm_check(rig.s->mm, &err), 0);
}

static void hanging_up_ends_the_wait_of_a_close(void **state)
{
	block_with_nops();
	submit_nops(1);
	ask(WIRE_WIN_CLOSE, cl.win);
	srig_pump(&rig);
	assert_int_equal(session()->nr_wins, 1);
	rc_close(&cl);
	srig_pump(&rig);
	/* without a window it reads nothing any more */
	assert_int_equal(srig_sessions(&rig), 0);
	no_client();
}

/* Another space is nobody's lie: it may have been detached meanwhile. */
static void keys_of_a_foreign_space_are_ignored(void **state)
{
	struct ring_key key = { .group = 9 };
	struct ring_sqe e = { .op = RING_END, .space = 77, .nr_keys = 1 };

	rc_submit(&cl, &e, &key, sizeof(key));
	srig_pump(&rig);
	assert_int_equal(asked(), 0);
	assert_int_equal(srig_sessions(&rig), 1);
}

/* A window that was just closed, another space: mistakes, not garbage. */
static void operations_on_no_window_are_errors(void **state)
{
	static const uint16_t wins[] = { 200, 255, 256, 65535 };
	struct ring_key key = { .group = 0 };
	struct ring_cqe cqe;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(wins); i++) {
		struct ring_sqe e = { .op = RING_FETCH, .win = wins[i],
				      .n = 1, .tag = i };

		rc_submit(&cl, &e, &key, sizeof(key));
		rc_complete(&cl, &cqe, NULL, 0);
		assert_int_equal(cqe.tag, i);
		assert_int_equal(cqe.result, -EINVAL);
	}
	assert_int_equal(session()->doom, REJECT_NONE);
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

/* A client that frees what it has asked to be read is not libkvmm. */
static void a_frame_that_is_being_copied_cannot_be_freed(void **state)
{
	struct ring_sqe e = { .op = RING_FORK, .space = (uint16_t)cl.space,
			      .n = 1, .after = 1 };
	struct ring_sqe fr = { .op = RING_FREE, .win = cl.win, .n = 1 };
	struct ring_fork f = { .win = cl.win };
	uint32_t frame[2];

	rc_alloc(&cl, frame, 2);
	f.from = frame[0];
	f.to = frame[1];
	rc_submit(&cl, &e, &f, sizeof(f));
	rc_submit(&cl, &fr, &frame[0], sizeof(frame[0]));
	rc_expect_cut(&cl, REJECT_SQE_FRAME);
}

static void a_read_only_client_cannot_publish(void **state)
{
	struct raw_client ro;
	struct ring_cqe cqe;
	struct ring_pub pub;

	assert_int_equal(rc_connect(&rig, 1, &ro), 0);
	rc_hello(&ro);
	rc_attach(&ro);
	rc_win_open(&ro, KVMM_RO);
	make_page(&pub, 1, 1);
	publish(&ro, &pub, 1, 3);
	rc_complete(&ro, &cqe, NULL, 0);
	assert_int_equal(cqe.result, -EACCES);
	rc_close(&ro);
}

/* Half a million random entries from a hostile client; another one works on. */
static void garbage_hurts_nobody(void **state)
{
	uint32_t seed = (uint32_t)test_seed() | 1, rounds = test_long() ? 2000 : 100;
	struct raw_client good;
	struct ring_cqe cqe;
	struct errmsg e;
	uint32_t i, k;

	assert_int_equal(rc_connect(&rig, 0, &good), 0);
	rc_hello(&good);
	for (i = 0; i < rounds; i++) {
		struct ring_sqe nop = { .op = RING_NOP, .tag = i };
		struct raw_client c;
		uint32_t *p;

		assert_int_equal(rc_connect(&rig, 0, &c), 0);
		rc_hello(&c);
		p = (uint32_t *)((char *)c.l + c.l->sq_off);
		for (k = 0; k < 4096 * 16; k++) {
			seed = seed * 1664525 + 1013904223;
			p[k] = seed >> 7;
			/* known operations reach further */
			if (k % 16 == 0)
				p[k] = p[k] % RING_NR_OPS;
			if (k % 16 == 2)
				p[k] %= 5000;
		}
		atomic_store(&c.l->sq.tail, 64);
		srig_pump(&rig);
		atomic_store(&c.l->cq.head, seed);
		srig_pump(&rig);
		rc_close(&c);
		rc_submit(&good, &nop, NULL, 0);
		rc_complete(&good, &cqe, NULL, 0);
		assert_int_equal(cqe.tag, i);
		rc_advance(&good);
	}
	srig_pump(&rig);
	assert_int_equal(srig_sessions(&rig), 2);	/* cl and good */
	if (mm_check(rig.s->mm, &e))
		fail_msg("%s", e.text);
	rc_close(&good);
}

#define TEST(f)		cmocka_unit_test_setup_teardown(f, setup, teardown)
#define WIN_TEST(f)	cmocka_unit_test_setup_teardown(f, setup_window, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(nops_complete_in_order),
		TEST(a_round_takes_a_bounded_number_of_entries),
		WIN_TEST(a_published_page_is_sealed_in_its_frame),
		WIN_TEST(many_results_wrap_round_the_ring),
		WIN_TEST(a_frame_is_held_until_the_head_passes),
		WIN_TEST(the_loop_looks_after_hand_overs),
		WIN_TEST(closing_a_window_ends_its_hand_overs),
		WIN_TEST(hanging_up_ends_hand_overs),
		TEST(a_full_completion_ring_stops_its_own_client),
		TEST(a_blocked_client_holds_up_nobody_else),
		WIN_TEST(requests_of_a_socket_are_bounded),
		TEST(a_client_that_sleeps_is_woken_once),
		TEST(an_eventfd_that_blocks_costs_its_client_only),
		TEST(a_sleeping_loop_is_woken_by_the_doorbell),
		TEST(entries_are_found_before_going_to_sleep),
		TEST(a_tail_beyond_the_ring_is_cut_off),
		TEST(a_tail_that_goes_back_is_cut_off),
		TEST(an_unknown_operation_is_cut_off),
		WIN_TEST(a_head_beyond_the_tail_is_cut_off),
		TEST(arrays_out_of_bounds_are_cut_off),
		WIN_TEST(a_foreign_frame_cannot_be_freed),
		WIN_TEST(an_end_names_what_was_asked_for),
		WIN_TEST(a_key_of_no_group_is_cut_off),
		WIN_TEST(ends_of_long_chains_share_a_round),
		cmocka_unit_test_teardown(a_report_costs_what_it_drops,
					  teardown),
		TEST(what_was_posted_before_a_detach_is_taken_before_it),
		WIN_TEST(closing_takes_no_more_than_a_round_at_once),
		WIN_TEST(leaving_what_is_not_there_takes_nothing),
		WIN_TEST(a_client_that_posts_on_is_not_waited_for),
		WIN_TEST(a_blocked_ring_keeps_a_window_number_in_use),
		WIN_TEST(hanging_up_ends_the_wait_of_a_close),
		WIN_TEST(keys_of_a_foreign_space_are_ignored),
		TEST(operations_on_no_window_are_errors),
		WIN_TEST(a_tail_is_copied_into_another_frame),
		WIN_TEST(a_frame_that_is_being_copied_cannot_be_freed),
		WIN_TEST(a_read_only_client_cannot_publish),
		TEST(garbage_hurts_nobody),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
