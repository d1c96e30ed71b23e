/* SPDX-License-Identifier: Apache-2.0 */
/* What kvmm_poll() owes to the loop around it: sleep, and the next daemon. */
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

static struct fk f;
static struct fc c;
static struct kvmm_done d;

static int setup(void **state)
{
	return fk_start(&f, 1) || fc_open(&f, &c) ? -1 : 0;
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

static bool readable(void)
{
	struct pollfd p = { .fd = kvmm_fd(c.k), .events = POLLIN };

	return poll(&p, 1, 0) == 1;
}

/* An event loop with nothing to do comes to rest within a few turns. */
static bool sleeps(void)
{
	int i;

	for (i = 0; i < 100 && readable(); i++)
		kvmm_poll(c.k, &d, 1);
	return i < 100;
}

/*
 * Who makes the wake-up is between its two halves, having said that it writes
 * and not written yet, as the poll looks.
 */
static void a_wake_up_seen_half_done_does_not_stay(void **state)
{
	uint64_t one = 1;

	assert_true(sleeps());
	c.k->kicked = true;
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
	/* nobody goes to sleep over it */
	assert_int_equal(kvmm_next_deadline(c.k), 0);
	assert_int_equal(write(c.k->wake, &one, sizeof(one)), sizeof(one));
	assert_true(readable());
	assert_true(sleeps());
	assert_true(kvmm_next_deadline(c.k) > now_ns());
	/* and the next one is made */
	kvmm_kick(c.k);
	assert_true(readable());
	assert_true(sleeps());
}

/* -- for ever ---------------------------------------------------------------------- */

static void who_waits_for_ever_finds_the_next_daemon_too(void **state)
{
	const struct kvmm_open_opts o = {
		.size = sizeof(o), .call_timeout_ns = UINT64_MAX,
	};
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);
	struct kvmm *k;

	fk_hang_up(&f);
	assert_int_equal(kvmm_open(f.path, &o, &k), 0);
	/* the next daemon takes its time: its welcome is not there at once */
	f.stopped = true;
	poll(NULL, 0, 20);
	fk_restart(&f);
	while (k->state != CONN_HELLO) {
		assert_false(deadline_past(deadline));
		kvmm_poll(k, &d, 1);
		poll(NULL, 0, 1);
	}
	f.stopped = false;
	while (kvmm_epoch(k) != f.epoch && !deadline_past(deadline)) {
		kvmm_poll(k, &d, 1);
		poll(NULL, 0, 1);
	}
	assert_int_equal(kvmm_epoch(k), f.epoch);
	kvmm_close(k);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_wake_up_seen_half_done_does_not_stay),
		T(who_waits_for_ever_finds_the_next_daemon_too),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
