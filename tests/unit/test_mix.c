/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is the hash even where the table looks: in its low bits, for keys as they
 * come (SHA-256 values) and for the worst that still happens (counters, keys
 * that differ in one bit)?
 */
#include <math.h>
#include <string.h>

#include "ipc/base/mix.h"
#include "ipc/base/rand.h"
#include "ipc/base/sha256.h"
#include "tests/lib/unit.h"

#define CELLS	4096
#define KEYS	(64 * CELLS)

static uint32_t cells[CELLS];

/*
 * How many standard deviations chi-square lies off its mean; a good hash stays
 * within +-6 for any seed of the test, a bad one is off by thousands, and one
 * that is too even is as wrong.
 */
static double chi_square_sigmas(void)
{
	const double want = (double)KEYS / CELLS, df = CELLS - 1;
	double chi = 0;

	for (int i = 0; i < CELLS; i++)
		chi += (cells[i] - want) * (cells[i] - want) / want;
	return (chi - df) / sqrt(2 * df);
}

/* Runs every key of @make through the hash; looks at 12 bits from @shift. */
static void check_even(void (*make)(uint64_t i, uint64_t k[4]), unsigned int shift)
{
	struct rng r;
	uint64_t k[4], s0, s1;

	rng_seed(&r, test_seed() + shift);
	s0 = rng_next(&r);
	s1 = rng_next(&r);
	memset(cells, 0, sizeof(cells));
	for (uint64_t i = 0; i < KEYS; i++) {
		make(i, k);
		cells[key_mix(k, s0, s1, 3) >> shift & (CELLS - 1)]++;
	}
	assert_true(fabs(chi_square_sigmas()) < 6);
}

static void counter_first(uint64_t i, uint64_t k[4])
{
	k[0] = i;
	k[1] = k[2] = k[3] = 0;
}

static void counter_last(uint64_t i, uint64_t k[4])
{
	k[0] = k[1] = k[2] = 0;
	k[3] = i << 32;
}

static void counter_everywhere(uint64_t i, uint64_t k[4])
{
	k[0] = k[1] = k[2] = k[3] = i;
}

static void sha(uint64_t i, uint64_t k[4])
{
	sha256(&i, sizeof(i), (uint8_t *)k);
}

static void sequential_keys_fill_the_table_evenly(void **state)
{
	for (unsigned int shift = 0; shift <= 52; shift += 13) {
		check_even(counter_first, shift);
		check_even(counter_last, shift);
		check_even(counter_everywhere, shift);
	}
}

static void sha_keys_fill_the_table_evenly(void **state)
{
	check_even(sha, 0);
	check_even(sha, 20);
	check_even(sha, 52);
}

static void the_measure_itself_finds_an_uneven_hash(void **state)
{
	memset(cells, 0, sizeof(cells));
	for (uint64_t i = 0; i < KEYS; i++)
		cells[(i * 2) & (CELLS - 1)]++;
	assert_true(chi_square_sigmas() > 6);
	/* and one that is too even */
	memset(cells, 0, sizeof(cells));
	for (uint64_t i = 0; i < KEYS; i++)
		cells[i & (CELLS - 1)]++;
	assert_true(chi_square_sigmas() < -6);
}

/* Flip each input bit: each output bit must flip in about half of the cases. */
static void every_input_bit_reaches_every_output_bit(void **state)
{
	enum { TRIALS = 512 };
	struct rng r;

	rng_seed(&r, test_seed());
	for (int bit = 0; bit < 256 + 32; bit++) {
		uint32_t flips[64] = { 0 };

		for (int t = 0; t < TRIALS; t++) {
			uint64_t k[4], s0 = rng_next(&r), s1 = rng_next(&r);
			uint32_t tag = (uint32_t)rng_next(&r);
			uint64_t h, d;

			for (int i = 0; i < 4; i++)
				k[i] = rng_next(&r);
			h = key_mix(k, s0, s1, tag);
			if (bit < 256)
				k[bit / 64] ^= UINT64_C(1) << bit % 64;
			else
				tag ^= 1u << (bit - 256);
			d = h ^ key_mix(k, s0, s1, tag);
			for (int o = 0; o < 64; o++)
				flips[o] += d >> o & 1;
		}
		/* 256 expected, 11.3 a standard deviation: 7 of them. */
		for (int o = 0; o < 64; o++)
			assert_in_range(flips[o], 256 - 80, 256 + 80);
	}
}

static void other_seeds_give_another_table(void **state)
{
	uint64_t k[4] = { 1, 2, 3, 4 };
	int same = 0;

	for (uint64_t s = 0; s < 1000; s++) {
		same += key_mix(k, s, 9, 0) == key_mix(k, s + 1, 9, 0);
		same += key_mix(k, 9, s, 0) == key_mix(k, 9, s + 1, 0);
		same += key_mix(k, 9, 9, (uint32_t)s) ==
			key_mix(k, 9, 9, (uint32_t)s + 1);
	}
	assert_int_equal(same, 0);
}

static void key_word_that_meets_its_seed_does_not_hide_the_others(void **state)
{
	/* The factor k[0] ^ seed0 is zero; k[1] must still matter. */
	uint64_t a[4] = { 77, 1, 0, 0 }, b[4] = { 77, 2, 0, 0 };

	assert_true(key_mix(a, 77, 5, 0) != key_mix(b, 77, 5, 0));
	a[2] = b[2] = 5;
	b[1] = a[1];
	b[3] = 9;
	assert_true(key_mix(a, 1, 5, 0) != key_mix(b, 1, 5, 0));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(sequential_keys_fill_the_table_evenly),
		cmocka_unit_test(sha_keys_fill_the_table_evenly),
		cmocka_unit_test(the_measure_itself_finds_an_uneven_hash),
		cmocka_unit_test(every_input_bit_reaches_every_output_bit),
		cmocka_unit_test(other_seeds_give_another_table),
		cmocka_unit_test(key_word_that_meets_its_seed_does_not_hide_the_others),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
