/* SPDX-License-Identifier: Apache-2.0 */
/* The helpers that judge the demo and the benches must be able to say no. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/lib/hist.h"
#include "tests/lib/pattern.h"

#define BYTES	4096u

static const struct kvmm_key key_a = { .b = { 1, 2, 3, [31] = 9 } };

static void pattern_check_takes_what_fill_wrote(void **state)
{
	uint64_t page[BYTES / 8];

	pattern_fill(page, BYTES, &key_a);
	assert_int_equal(pattern_check(page, BYTES, &key_a), 0);
}

static void pattern_check_counts_each_damaged_byte(void **state)
{
	uint64_t page[BYTES / 8];
	uint8_t *b = (uint8_t *)page;

	pattern_fill(page, BYTES, &key_a);
	b[0] ^= 1;
	b[77] ^= 0x80;
	b[BYTES - 1] ^= 0x10;
	assert_int_equal(pattern_check(page, BYTES, &key_a), 3);
}

static void pattern_depends_on_every_byte_of_the_key(void **state)
{
	uint64_t page[BYTES / 8];
	unsigned int i;

	pattern_fill(page, BYTES, &key_a);
	for (i = 0; i < sizeof(key_a.b); i++) {
		struct kvmm_key other = key_a;

		other.b[i] ^= 1;
		assert_true(pattern_check(page, BYTES, &other) > BYTES / 2);
	}
}

/* A page that is torn, shifted or another's tail must not pass. */
static void pattern_depends_on_the_place(void **state)
{
	uint64_t page[BYTES / 8 + 1];

	pattern_fill(page, BYTES, &key_a);
	memmove(page + 1, page, BYTES);
	assert_true(pattern_check(page + 1, BYTES, &key_a) == 0);
	assert_true(pattern_check(page, BYTES, &key_a) > BYTES / 2);
}

static void hist_quantiles_are_right_within_a_sixteenth(void **state)
{
	struct hist *h = calloc(1, sizeof(*h));
	uint64_t v, got;

	assert_non_null(h);
	for (v = 1; v <= 100000; v++)
		hist_add(h, v);
	assert_int_equal(hist_count(h), 100000);
	got = hist_quantile(h, 0.5);
	assert_in_range(got, 50000 * 15 / 16, 50000 * 17 / 16);
	got = hist_quantile(h, 0.99);
	assert_in_range(got, 99000 * 15 / 16, 99000 * 17 / 16);
	assert_int_equal(hist_quantile(h, 0), 1);
	free(h);
}

static void hist_takes_the_largest_value(void **state)
{
	struct hist *h = calloc(1, sizeof(*h));

	assert_non_null(h);
	hist_add(h, UINT64_MAX);
	hist_add(h, 0);
	assert_int_equal(hist_quantile(h, 0), 0);
	assert_true(hist_quantile(h, 1) > UINT64_MAX / 16 * 15);
	free(h);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(pattern_check_takes_what_fill_wrote),
		cmocka_unit_test(pattern_check_counts_each_damaged_byte),
		cmocka_unit_test(pattern_depends_on_every_byte_of_the_key),
		cmocka_unit_test(pattern_depends_on_the_place),
		cmocka_unit_test(hist_quantiles_are_right_within_a_sixteenth),
		cmocka_unit_test(hist_takes_the_largest_value),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
