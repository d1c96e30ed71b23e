/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ipc/base/bitmap.h"
#include "ipc/base/rand.h"
#include "tests/lib/unit.h"

#define NBITS	203			/* not a multiple of 64 */

static void words_round_up(void **state)
{
	assert_int_equal(BITMAP_WORDS(0), 0);
	assert_int_equal(BITMAP_WORDS(1), 1);
	assert_int_equal(BITMAP_WORDS(64), 1);
	assert_int_equal(BITMAP_WORDS(65), 2);
}

static void search_ends_at_the_last_bit_not_at_the_last_word(void **state)
{
	uint64_t map[BITMAP_WORDS(NBITS)];

	memset(map, 0, sizeof(map));
	assert_int_equal(bitmap_next_set(map, NBITS, 0), NBITS);
	bitmap_set(map, NBITS);			/* beyond the end */
	assert_int_equal(bitmap_next_set(map, NBITS, 0), NBITS);
	assert_int_equal(bitmap_weight(map, NBITS), 0);
	memset(map, 0xff, sizeof(map));
	assert_int_equal(bitmap_next_clear(map, NBITS, 0), NBITS);
	assert_int_equal(bitmap_weight(map, NBITS), NBITS);
	assert_int_equal(bitmap_next_set(map, NBITS, NBITS), NBITS);
}

static void random_bits_agree_with_an_array_of_bools(void **state)
{
	uint64_t map[BITMAP_WORDS(NBITS)] = { 0 };
	bool ref[NBITS] = { false };
	struct rng r;

	rng_seed(&r, test_seed());
	for (int step = 0; step < 5000; step++) {
		size_t bit = rng_below(&r, NBITS), from = rng_below(&r, NBITS);
		size_t set = from, clear = from, weight = 0;

		if (rng_below(&r, 2)) {
			assert_int_equal(bitmap_test_set(map, bit), ref[bit]);
			ref[bit] = true;
		} else {
			bitmap_clear(map, bit);
			ref[bit] = false;
		}
		while (set < NBITS && !ref[set])
			set++;
		while (clear < NBITS && ref[clear])
			clear++;
		for (size_t i = 0; i < NBITS; i++)
			weight += ref[i];
		assert_int_equal(bitmap_test(map, from), ref[from]);
		assert_int_equal(bitmap_next_set(map, NBITS, from), set);
		assert_int_equal(bitmap_next_clear(map, NBITS, from), clear);
		assert_int_equal(bitmap_weight(map, NBITS), weight);
	}
}

static void shared_bits_do_not_touch_their_neighbours(void **state)
{
	static _Atomic uint64_t map[2];

	bitmap_shared_set(map, 3);
	bitmap_shared_set(map, 64);
	bitmap_shared_set(map, 65);
	bitmap_shared_clear(map, 64);
	assert_true(bitmap_shared_test(map, 3));
	assert_false(bitmap_shared_test(map, 64));
	assert_true(bitmap_shared_test(map, 65));
	assert_int_equal(map[0], 8);
	assert_int_equal(map[1], 2);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(words_round_up),
		cmocka_unit_test(search_ends_at_the_last_bit_not_at_the_last_word),
		cmocka_unit_test(random_bits_agree_with_an_array_of_bools),
		cmocka_unit_test(shared_bits_do_not_touch_their_neighbours),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
