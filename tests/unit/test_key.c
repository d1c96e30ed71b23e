/* SPDX-License-Identifier: Apache-2.0 */
#include <openssl/evp.h>
#include <string.h>

#include "libkvmm/lib.h"
#include "tests/lib/unit.h"

static struct kvmm_space space;

static int setup(void **state)
{
	memset(&space, 0, sizeof(space));
	memset(space.id, 0x5a, sizeof(space.id));
	return 0;
}

static void le32(EVP_MD_CTX *ctx, uint32_t v)
{
	uint8_t b[4] = { v, v >> 8, v >> 16, v >> 24 };

	EVP_DigestUpdate(ctx, b, 4);
}

/* By the formula in kvmm.h, with somebody else's SHA-256. */
static struct kvmm_key want_key(const uint8_t prev[32], const uint32_t *tok,
				uint32_t block, const void *extra,
				uint32_t nextra)
{
	EVP_MD_CTX *ctx = EVP_MD_CTX_new();
	struct kvmm_key k;
	uint32_t i;

	EVP_DigestInit_ex(ctx, EVP_sha256(), NULL);
	EVP_DigestUpdate(ctx, "kvmm-key-1", 10);
	EVP_DigestUpdate(ctx, prev, 32);
	le32(ctx, block);
	for (i = 0; i < block; i++)
		le32(ctx, tok[i]);
	le32(ctx, nextra);
	EVP_DigestUpdate(ctx, extra, nextra);
	EVP_DigestFinal_ex(ctx, k.b, NULL);
	EVP_MD_CTX_free(ctx);
	return k;
}

static void a_chain_is_what_the_header_says(void **state)
{
	static const char lora[] = "lora-7";
	const uint8_t *prev = space.id;
	struct kvmm_key got[6], want;
	uint32_t tok[100];
	int i;

	for (i = 0; i < 100; i++)
		tok[i] = i * 2654435761u;
	assert_int_equal(kvmm_key_chain(&space, NULL, tok, 100, 16, lora, 6,
					got), 6);
	for (i = 0; i < 6; i++) {
		want = want_key(prev, tok + 16 * i, 16, lora, 6);
		assert_memory_equal(&got[i], &want, 32);
		prev = got[i].b;
	}
}

static void a_chain_goes_on_from_its_parent(void **state)
{
	struct kvmm_key whole[4], half[2];
	uint32_t tok[32] = { 1, 2, 3 };

	assert_int_equal(kvmm_key_chain(&space, NULL, tok, 32, 8, NULL, 0,
					whole), 4);
	assert_int_equal(kvmm_key_chain(&space, &whole[1], tok + 16, 16, 8,
					NULL, 0, half), 2);
	assert_memory_equal(half, whole + 2, sizeof(half));
}

static void every_input_counts(void **state)
{
	struct kvmm_key a, b;
	uint32_t tok[16] = { 0 };

	kvmm_key_chain(&space, NULL, tok, 16, 16, NULL, 0, &a);
	tok[15] = 1;
	kvmm_key_chain(&space, NULL, tok, 16, 16, NULL, 0, &b);
	assert_memory_not_equal(&a, &b, 32);
	tok[15] = 0;
	kvmm_key_chain(&space, NULL, tok, 16, 16, "x", 1, &b);
	assert_memory_not_equal(&a, &b, 32);
	kvmm_key_chain(&space, NULL, tok, 15, 15, NULL, 0, &b);
	assert_memory_not_equal(&a, &b, 32);
	space.id[0]++;
	kvmm_key_chain(&space, NULL, tok, 16, 16, NULL, 0, &b);
	assert_memory_not_equal(&a, &b, 32);
}

static void only_whole_blocks_have_keys(void **state)
{
	uint32_t tok[15] = { 0 };
	struct kvmm_key k;

	assert_int_equal(kvmm_key_chain(&space, NULL, tok, 15, 16, NULL, 0,
					&k), 0);
	assert_int_equal(kvmm_key_chain(&space, NULL, NULL, 0, 16, NULL, 0,
					&k), 0);
	assert_int_equal(kvmm_key_chain(&space, NULL, tok, 15, 0, NULL, 0,
					&k), -EINVAL);
	assert_int_equal(kvmm_key_chain(&space, NULL, NULL, 15, 1, NULL, 0,
					&k), -EINVAL);
}

static void wrapped_hashes_are_of_their_space(void **state)
{
	struct kvmm_key a, b;

	assert_int_equal(kvmm_key_wrap(&space, "abcdefgh", 8, &a), 0);
	assert_int_equal(kvmm_key_wrap(&space, "abcdefgh", 8, &b), 0);
	assert_memory_equal(&a, &b, 32);
	kvmm_key_wrap(&space, "abcdefgh", 7, &b);
	assert_memory_not_equal(&a, &b, 32);
	space.id[31]++;
	kvmm_key_wrap(&space, "abcdefgh", 8, &b);
	assert_memory_not_equal(&a, &b, 32);
	assert_int_equal(kvmm_key_wrap(&space, NULL, 8, &b), -EINVAL);
	assert_int_equal(kvmm_key_wrap(&space, "x", 0, &b), -EINVAL);
}

#define T(x) cmocka_unit_test_setup(x, setup)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_chain_is_what_the_header_says),
		T(a_chain_goes_on_from_its_parent),
		T(every_input_counts),
		T(only_whole_blocks_have_keys),
		T(wrapped_hashes_are_of_their_space),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
