/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ipc/base/rand.h"
#include "tests/lib/unit.h"

static void known_state_gives_the_published_numbers(void **state)
{
	/* What the authors' reference code gives from this state. */
	struct rng r = { { 1, 2, 3, 4 } };

	assert_int_equal(rng_next(&r), 11520);
	assert_int_equal(rng_next(&r), 0);
	assert_int_equal(rng_next(&r), 1509978240);
	assert_int_equal(rng_next(&r), 1215971899390074240);
}

static void same_seed_same_numbers_other_seed_other_numbers(void **state)
{
	struct rng a, b, c;

	rng_seed(&a, 7);
	rng_seed(&b, 7);
	rng_seed(&c, 8);
	for (int i = 0; i < 100; i++) {
		uint64_t x = rng_next(&a);

		assert_true(x == rng_next(&b));
		assert_true(x != rng_next(&c));
	}
}

static void below_stays_below_and_reaches_every_value(void **state)
{
	unsigned int seen[10] = { 0 };
	struct rng r;

	rng_seed(&r, test_seed());
	for (int i = 0; i < 100000; i++) {
		uint64_t x = rng_below(&r, 10);

		assert_true(x < 10);
		seen[x]++;
	}
	/* 10,000 expected; 5 standard deviations are some 475. */
	for (int i = 0; i < 10; i++)
		assert_in_range(seen[i], 9500, 10500);
	assert_int_equal(rng_below(&r, 0), 0);
	assert_int_equal(rng_below(&r, 1), 0);
}

static void double_lies_in_zero_to_one(void **state)
{
	double sum = 0;
	struct rng r;

	rng_seed(&r, test_seed());
	for (int i = 0; i < 100000; i++) {
		double d = rng_double(&r);

		assert_true(d >= 0 && d < 1);
		sum += d;
	}
	assert_true(sum > 49000 && sum < 51000);
}

static void fill_writes_exactly_len_bytes(void **state)
{
	uint8_t buf[40];
	struct rng r;

	for (size_t len = 0; len <= 32; len++) {
		memset(buf, 0, sizeof(buf));
		rng_seed(&r, test_seed());
		rng_fill(&r, buf, len);
		for (size_t i = len; i < sizeof(buf); i++)
			assert_int_equal(buf[i], 0);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(known_state_gives_the_published_numbers),
		cmocka_unit_test(same_seed_same_numbers_other_seed_other_numbers),
		cmocka_unit_test(below_stays_below_and_reaches_every_value),
		cmocka_unit_test(double_lies_in_zero_to_one),
		cmocka_unit_test(fill_writes_exactly_len_bytes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
