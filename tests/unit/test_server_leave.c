/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What takes a number out of use, a window's or a space's: entries that were
 * posted before are taken before, and nobody waits for long.
 */
#include <sys/epoll.h>

#include "tests/lib/ring_rig.h"

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

int main(void)
{
	const struct CMUnitTest tests[] = {
		RING_TEST(what_was_posted_before_a_detach_is_taken_before_it),
		RING_WIN_TEST(closing_takes_no_more_than_a_round_at_once),
		RING_WIN_TEST(leaving_what_is_not_there_takes_nothing),
		RING_WIN_TEST(a_client_that_posts_on_is_not_waited_for),
		RING_WIN_TEST(a_blocked_ring_keeps_a_window_number_in_use),
		RING_WIN_TEST(hanging_up_ends_the_wait_of_a_close),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
