/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/base/bits.h"
#include "tests/lib/unit.h"

static void rounding_keeps_multiples_and_moves_the_rest(void **state)
{
	assert_int_equal(round_up(0, 4096), 0);
	assert_int_equal(round_up(1, 4096), 4096);
	assert_int_equal(round_up(4096, 4096), 4096);
	assert_int_equal(round_down(8191, 4096), 4096);
	assert_int_equal(roundup_to(10, 7), 14);
	assert_int_equal(roundup_to(14, 7), 14);
	assert_int_equal(div_round_up(0, 7), 0);
	assert_int_equal(div_round_up(15, 7), 3);
	/* no overflow on the way */
	assert_true(div_round_up(UINT64_MAX, 2) == UINT64_C(1) << 63);
}

static void powers_of_two(void **state)
{
	assert_false(is_pow2(0));
	assert_true(is_pow2(1));
	assert_true(is_pow2(UINT64_C(1) << 63));
	assert_false(is_pow2(6));
	assert_int_equal(ilog2(1), 0);
	assert_int_equal(ilog2(UINT64_MAX), 63);
	assert_int_equal(ilog2(4095), 11);
	assert_int_equal(roundup_pow2(0), 1);
	assert_int_equal(roundup_pow2(1), 1);
	assert_int_equal(roundup_pow2(2), 2);
	assert_int_equal(roundup_pow2(3), 4);
	assert_int_equal(roundup_pow2(4097), 8192);
	assert_true(roundup_pow2(UINT64_C(1) << 63) == UINT64_C(1) << 63);
}

static void gcd_of_zero_is_the_other(void **state)
{
	assert_int_equal(gcd64(12, 18), 6);
	assert_int_equal(gcd64(0, 5), 5);
	assert_int_equal(gcd64(5, 0), 5);
	assert_int_equal(gcd64(7, 13), 1);
}

static void overflow_is_told(void **state)
{
	uint64_t r;

	assert_false(add_overflows(1, 2, &r));
	assert_int_equal(r, 3);
	assert_true(add_overflows(UINT64_MAX, 1, &r));
	assert_false(mul_overflows(UINT32_MAX, UINT32_MAX, &r));
	assert_true(mul_overflows(UINT64_MAX, 2, &r));
}

struct outer {
	int	before;
	int	member;
};

static int calls;

static int counted(int v)
{
	calls++;
	return v;
}

static void macros_evaluate_their_arguments_once(void **state)
{
	struct outer o = { 0 };

	assert_int_equal(min(counted(3), counted(5)), 3);
	assert_int_equal(max(counted(3), counted(5)), 5);
	assert_int_equal(calls, 4);
	assert_int_equal(min(min(1, 2), max(0, 7)), 1);
	assert_int_equal(clamp(9, 0, 5), 5);
	assert_int_equal(clamp(-9, 0, 5), 0);
	assert_ptr_equal(container_of(&o.member, struct outer, member), &o);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rounding_keeps_multiples_and_moves_the_rest),
		cmocka_unit_test(powers_of_two),
		cmocka_unit_test(gcd_of_zero_is_the_other),
		cmocka_unit_test(overflow_is_told),
		cmocka_unit_test(macros_evaluate_their_arguments_once),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
