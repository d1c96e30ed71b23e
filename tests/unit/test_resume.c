/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=eventfd */
/* Clients whose connection was lost, and what they are when they come again. */
#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "daemon/mm/mm_types.h"
#include "ipc/base/fd.h"
#include "tests/lib/fixture.h"
#include "tests/lib/server_rig.h"
#include "tests/lib/unit.h"

#define FRAMES		64
#define ENTRIES		LEDGER_SQ_ENTRIES

static struct server_rig rig;
static struct raw_client cl;
static bool no_eventfd;

int __real_eventfd(unsigned int count, int flags);
int __wrap_eventfd(unsigned int count, int flags);

int __wrap_eventfd(unsigned int count, int flags)
{
	if (!no_eventfd)
		return __real_eventfd(count, flags);
	errno = EMFILE;
	return -1;
}

static int setup(void **state)
{
	int err;

	no_eventfd = false;
	err = srig_open(&rig, "\"spin_us\": 0");
	if (err)
		return err;
	assert_int_equal(rc_connect(&rig, 0, &cl), 0);
	rc_hello(&cl);
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

/* The session of that client's number. */
static struct session *session(void)
{
	struct session *ss;

	list_for_each_entry(ss, &rig.s->sessions, link)
		if (ss->no == cl.no)
			return ss;
	fail_msg("client %u is gone", cl.no);
	return NULL;
}

static uint32_t open_frames(void)
{
	return session()->win[cl.win]->nr_open;
}

static void post_free(const uint32_t *frame, uint32_t n)
{
	struct ring_sqe e = {
		.op = RING_FREE, .win = cl.win, .space = (uint16_t)cl.space,
		.n = n,
	};

	rc_submit(&cl, &e, frame, n * sizeof(*frame));
}

static void lost_connection_is_taken_up_again(void **state)
{
	struct ring_sqe e = { .op = RING_NOP, .tag = 7 };
	struct ring_cqe cqe;

	assert_int_equal(rc_hello_again(&cl), WIRE_WELCOME_RESUMED);
	assert_int_equal(rig.s->resumed, 1);
	rc_submit(&cl, &e, NULL, 0);
	rc_complete(&cl, &cqe, NULL, 0);
	assert_int_equal(cqe.tag, 7);
}

static void frames_given_back_are_free_when_it_comes_again(void **state)
{
	uint32_t frame[FRAMES], was;

	rc_alloc(&cl, frame, FRAMES);
	was = open_frames();
	close_fd(&cl.fd);
	srig_pump(&rig);
	post_free(frame, FRAMES / 2);
	post_free(frame + FRAMES / 2, FRAMES / 2);
	assert_int_equal(rc_hello_again(&cl), WIRE_WELCOME_RESUMED);
	assert_int_equal(open_frames(), was - FRAMES);
}

/* Also of an entry of which another daemon had freed some. */
static void frames_that_are_free_do_not_keep_others(void **state)
{
	uint32_t frame[FRAMES], was;

	rc_alloc(&cl, frame, FRAMES);
	was = open_frames();
	close_fd(&cl.fd);
	srig_pump(&rig);
	post_free(frame, FRAMES / 2);
	post_free(frame, FRAMES);
	assert_int_equal(rc_hello_again(&cl), WIRE_WELCOME_RESUMED);
	assert_int_equal(open_frames(), was - FRAMES);
}

/* Who may say so as often as it likes must not cost the others seconds. */
static void lies_about_frames_end_it(void **state)
{
	static uint32_t frame[KVMM_MAX_BATCH];
	struct ring_sqe e = {
		.op = RING_FREE, .win = cl.win, .space = (uint16_t)cl.space,
		.n = KVMM_MAX_BATCH,
	};
	uint32_t i;

	for (i = 0; i < KVMM_MAX_BATCH; i++)
		frame[i] = 1 + i;
	close_fd(&cl.fd);
	srig_pump(&rig);
	rc_submit(&cl, &e, frame, sizeof(frame));
	/* the same bytes again and again */
	for (i = 1; i < ENTRIES; i++)
		rc_submit(&cl, &e, NULL, 0);
	assert_int_equal(rc_hello_again(&cl), 0);
	assert_in_range(session()->ring.sq_head, 1, 8);
}

/* It may have hung up before it heard that: until it posts, it is said again. */
static void adopted_is_said_until_something_is_taken(void **state)
{
	const uint32_t both = WIRE_WELCOME_RESUMED | WIRE_WELCOME_ADOPTED;
	struct ring_sqe e = { .op = RING_NOP };
	struct ring_cqe cqe;

	session()->adopted = true;
	assert_int_equal(rc_hello_again(&cl), both);
	assert_int_equal(rc_hello_again(&cl), both);
	rc_submit(&cl, &e, NULL, 0);
	rc_complete(&cl, &cqe, NULL, 0);
	assert_int_equal(rc_hello_again(&cl), WIRE_WELCOME_RESUMED);
}

static void who_cannot_go_on_is_not_connected(void **state)
{
	struct mm_client *mc = session()->mc;

	assert_true(mc->connected);
	no_eventfd = true;
	rc_come_again(&cl);
	srig_pump(&rig);
	assert_int_equal(rig.s->resumed, 0);
	assert_false(mc->connected);
}

/* mm had no memory for it: then nobody can be asked what becomes of it. */
static void session_that_mm_does_not_know_is_dropped(void **state)
{
	unsigned int was = srig_sessions(&rig);
	struct errmsg e = { "" };
	struct session *ss;

	ss = session_new(rig.s, &rig.s->listener[0], 77);
	assert_non_null(ss);
	ss->state = SESSION_CLOSED;
	assert_int_equal(loop_add(rig.s, &ss->pid, fd_pidfd_open(getpid()), 0),
			 0);
	assert_int_equal(adopt_clients(rig.s, &e), 0);
	srig_pump(&rig);
	assert_int_equal(srig_sessions(&rig), was);
	assert_int_equal(session()->state, SESSION_LIVE);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(lost_connection_is_taken_up_again),
		T(frames_given_back_are_free_when_it_comes_again),
		T(frames_that_are_free_do_not_keep_others),
		T(lies_about_frames_end_it),
		T(adopted_is_said_until_something_is_taken),
		T(who_cannot_go_on_is_not_connected),
		T(session_that_mm_does_not_know_is_dropped),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
