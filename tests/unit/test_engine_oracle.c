/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the engine's answers are compared with: the oracle goes back and on, and
 * its state is saved and restored to the bit, or refused; tokens are drawn as
 * seed, position and logits say.
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "tests/lib/fwd_rig.h"
#include "tests/lib/unit.h"

/* -- the oracle ------------------------------------------------------------------------ */

static void truncated_oracle_goes_on_from_there(void **state)
{
	struct model *m = fwd_rig_model("window", 7);
	uint32_t tok[100];
	float a[512], b[512];
	struct oracle *o;

	for (uint32_t t = 0; t < 100; t++)
		tok[t] = t * 11 % 250;
	assert_int_equal(oracle_create(m, &o), 0);
	assert_int_equal(oracle_run(o, tok, 100, a), 0);
	assert_int_equal(oracle_truncate(o, 101), -EINVAL);
	assert_int_equal(oracle_truncate(o, 60), 0);
	assert_int_equal(oracle_run(o, tok + 60, 40, b), 0);
	assert_memory_equal(a, b, 272 * sizeof(float));
	oracle_destroy(o);
	model_destroy(m);

	m = fwd_rig_model("linear", 7);
	assert_int_equal(oracle_create(m, &o), 0);
	assert_int_equal(oracle_run(o, tok, 50, a), 0);
	assert_int_equal(oracle_truncate(o, 20), -EINVAL);
	assert_int_equal(oracle_truncate(o, 50), 0);
	assert_int_equal(oracle_truncate(o, 0), 0);
	assert_int_equal(oracle_run(o, tok, 50, b), 0);
	assert_memory_equal(a, b, 272 * sizeof(float));
	tok[3] = 272;
	assert_int_equal(oracle_run(o, tok, 50, b), -EINVAL);
	oracle_destroy(o);
	model_destroy(m);
}

/* -- the oracle's state as bytes ------------------------------------------------------------ */

static void saved_state_goes_on_in_another_oracle(void **state)
{
	static const char *const shape[] = {
		"mha", "gqa", "mqa", "mla", "window", "linear",
	};
	static const uint32_t at[] = { 0, 1, 16, 63, 64, 100 };
	static float a[512], b[512];
	uint32_t tok[112], n;

	for (uint32_t t = 0; t < 112; t++)
		tok[t] = t * 13 % 250;
	for (size_t s = 0; s < 6; s++) {
		struct model *m = fwd_rig_model(shape[s], 7);

		for (size_t i = 0; i < 6; i++) {
			struct oracle *o, *p;
			uint64_t len;
			void *buf;

			assert_int_equal(oracle_create(m, &o), 0);
			assert_int_equal(oracle_create(m, &p), 0);
			assert_int_equal(oracle_run(o, tok, at[i], NULL), 0);
			len = oracle_state_size(o);
			buf = malloc(len);
			assert_non_null(buf);
			assert_int_equal(oracle_save(o, buf, len - 1), -EINVAL);
			assert_int_equal(oracle_save(o, buf, len), 0);
			/* what it saw before does not matter */
			assert_int_equal(oracle_run(p, tok + 7, 9, NULL), 0);
			assert_int_equal(oracle_load(p, buf, len, &n), 0);
			assert_int_equal(n, at[i]);
			memset(buf, 0xff, len);
			assert_int_equal(oracle_run(o, tok + n, 112 - n, a), 0);
			assert_int_equal(oracle_run(p, tok + n, 112 - n, b), 0);
			assert_memory_equal(a, b, 272 * sizeof(float));
			free(buf);
			oracle_destroy(o);
			oracle_destroy(p);
		}
		model_destroy(m);
	}
}

/* In memory of exactly that length, so that a sanitizer sees a byte too far. */
static int load_copy(struct oracle *o, const uint8_t *buf, uint64_t len)
{
	uint8_t *copy = malloc(len ? len : 1);
	uint32_t n = 77;
	int err;

	assert_non_null(copy);
	memcpy(copy, buf, len);
	err = oracle_load(o, copy, len, &n);
	assert_true(!err || n == 77);
	free(copy);
	return err;
}

static void refused(struct oracle *o, const uint8_t *buf, uint64_t len)
{
	int err = load_copy(o, buf, len);

	if (err != -EINVAL && err != -EBADMSG)
		fail_msg("%d for %llu bytes", err, (unsigned long long)len);
}

static void state_that_is_not_as_it_was_saved_is_refused(void **state)
{
	static const char *const shape[] = { "gqa", "mla", "linear" };
	static float a[512], b[512];
	struct rng r;

	rng_seed(&r, 31);
	for (size_t s = 0; s < 3; s++) {
		struct model *m = fwd_rig_model(shape[s], 7);
		struct model *other = fwd_rig_model(shape[s], 8);
		uint32_t tok[40];
		struct oracle *o, *p;
		uint64_t len, i;
		uint8_t *buf;

		for (uint32_t t = 0; t < 40; t++)
			tok[t] = t * 5 % 250;
		assert_int_equal(oracle_create(m, &o), 0);
		assert_int_equal(oracle_create(other, &p), 0);
		assert_int_equal(oracle_run(o, tok, 40, a), 0);
		len = oracle_state_size(o);
		buf = calloc(1, len + 8);
		assert_non_null(buf);
		assert_int_equal(oracle_save(o, buf, len), 0);

		assert_int_equal(load_copy(p, buf, len), -EINVAL);
		for (i = 0; i < 64; i++)
			refused(o, buf, i);
		for (i = 0; i < 50; i++)
			refused(o, buf, rng_below(&r, len));
		refused(o, buf, len + 1);
		refused(o, buf, len + 8);
		for (i = 0; i < 64 + 200; i++) {
			uint64_t at = i < 64 ? i : rng_below(&r, len);
			uint8_t bit = (uint8_t)(1u << rng_below(&r, 8));

			buf[at] ^= bit;
			refused(o, buf, len);
			buf[at] ^= bit;
		}
		/* and after all that it is as new */
		assert_int_equal(oracle_run(o, tok, 40, b), 0);
		assert_memory_equal(a, b, 272 * sizeof(float));
		assert_int_equal(load_copy(o, buf, len), 0);
		for (i = 0; i < 50; i++) {
			rng_fill(&r, buf + (i % 2 ? 8 : 0), len - 8);
			refused(o, buf, len);
		}
		free(buf);
		oracle_destroy(o);
		oracle_destroy(p);
		model_destroy(m);
		model_destroy(other);
	}
}

/* -- sampling ------------------------------------------------------------------------------ */

static void greedy_takes_the_first_of_the_largest(void **state)
{
	const float logits[] = { -1, 3, 2, 3, -INFINITY };

	assert_int_equal(sample(logits, 5, 0, 1, 2), 1);
	assert_int_equal(sample(logits, 5, 0, 9, 9), 1);
}

static void draws_follow_from_seed_and_position(void **state)
{
	static const float logits[] = { 0, 1, 2, -INFINITY };
	unsigned int hits[4] = { 0 }, same = 0;

	for (uint32_t pos = 0; pos < 20000; pos++) {
		uint32_t a = sample(logits, 4, 1, 5, pos);

		assert_int_equal(a, sample(logits, 4, 1, 5, pos));
		same += a == sample(logits, 4, 1, 6, pos);
		hits[a]++;
	}
	/* softmax(0, 1, 2) is 0.0900, 0.2447, 0.6652 */
	assert_in_range(hits[0], 1650, 1950);
	assert_in_range(hits[1], 4650, 5150);
	assert_in_range(hits[2], 13000, 13600);
	assert_int_equal(hits[3], 0);
	/* Another seed draws independently: sum of squares is 0.5105. */
	assert_in_range(same, 9800, 10650);
	/* Cold and hot. */
	for (uint32_t pos = 0; pos < 100; pos++)
		assert_int_equal(sample(logits, 4, 0.01f, 5, pos), 2);
}

static void digest_sees_bits_and_order(void **state)
{
	const float a[] = { 1, 2 }, b[] = { 2, 1 }, z[] = { 0, -0.0f };

	assert_true(logits_digest(0, a, 2) != logits_digest(0, b, 2));
	assert_true(logits_digest(0, z, 1) != logits_digest(0, z + 1, 1));
	assert_true(logits_digest(logits_digest(0, a, 1), a + 1, 1) ==
		    logits_digest(0, a, 2));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(truncated_oracle_goes_on_from_there),
		cmocka_unit_test(saved_state_goes_on_in_another_oracle),
		cmocka_unit_test(state_that_is_not_as_it_was_saved_is_refused),
		cmocka_unit_test(greedy_takes_the_first_of_the_largest),
		cmocka_unit_test(draws_follow_from_seed_and_position),
		cmocka_unit_test(digest_sees_bits_and_order),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
