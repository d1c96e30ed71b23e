/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/base/clock.h"
#include "tests/lib/unit.h"

static void time_never_goes_back(void **state)
{
	uint64_t last = now_ns();

	for (int i = 0; i < 10000; i++) {
		uint64_t now = now_ns();

		assert_true(now >= last);
		last = now;
		cpu_relax();
	}
}

static void deadline_saturates_instead_of_wrapping(void **state)
{
	assert_true(deadline_in(UINT64_MAX) == DEADLINE_NONE);
	assert_true(deadline_in(UINT64_MAX - 5) == DEADLINE_NONE);
	assert_true(deadline_in(NSEC_PER_SEC) < DEADLINE_NONE);
}

static void past_deadline_has_nothing_left(void **state)
{
	assert_true(deadline_past(0));
	assert_true(deadline_past(now_ns()));
	assert_true(deadline_left(1) == 0);
	assert_int_equal(deadline_left_ms(1), 0);
	assert_false(deadline_past(deadline_in(3600 * NSEC_PER_SEC)));
}

static void milliseconds_are_rounded_up_and_fit_an_int(void **state)
{
	/* A microsecond is not 0 ms: that would spin up to the deadline. */
	assert_int_equal(ns_to_timeout_ms(0), 0);
	assert_int_equal(ns_to_timeout_ms(1), 1);
	assert_int_equal(ns_to_timeout_ms(NSEC_PER_MSEC), 1);
	assert_int_equal(ns_to_timeout_ms(NSEC_PER_MSEC + 1), 2);
	assert_int_equal(ns_to_timeout_ms(UINT64_MAX), INT_MAX);
	assert_int_equal(deadline_left_ms(DEADLINE_NONE), INT_MAX);
}

static void timespec_splits_seconds_and_nanoseconds(void **state)
{
	struct timespec ts = ns_to_timespec(5 * NSEC_PER_SEC + 7);

	assert_int_equal(ts.tv_sec, 5);
	assert_int_equal(ts.tv_nsec, 7);
	assert_true(ns_to_timespec(DEADLINE_NONE).tv_nsec < 1000000000);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(time_never_goes_back),
		cmocka_unit_test(deadline_saturates_instead_of_wrapping),
		cmocka_unit_test(past_deadline_has_nothing_left),
		cmocka_unit_test(milliseconds_are_rounded_up_and_fit_an_int),
		cmocka_unit_test(timespec_splits_seconds_and_nanoseconds),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
