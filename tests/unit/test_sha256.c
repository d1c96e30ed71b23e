/* SPDX-License-Identifier: Apache-2.0 */
#include <openssl/sha.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "ipc/base/sha256.h"
#include "tests/lib/unit.h"

static uint8_t buf[70000];

static void each_path(void (*test)(void))
{
	int ran = 0;

	/* The last one forced is what stays chosen: the best. */
	for (int i = 0; i < 2; i++) {
		if (sha256_force(i ? "sha-ni" : "portable"))
			continue;
		test();
		ran++;
	}
	assert_true(ran >= 1);
}

static void vectors(void)
{
	static const uint8_t empty[32] = {
		0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14,
		0x9a, 0xfb, 0xf4, 0xc8, 0x99, 0x6f, 0xb9, 0x24,
		0x27, 0xae, 0x41, 0xe4, 0x64, 0x9b, 0x93, 0x4c,
		0xa4, 0x95, 0x99, 0x1b, 0x78, 0x52, 0xb8, 0x55,
	};
	static const uint8_t abc[32] = {
		0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea,
		0x41, 0x41, 0x40, 0xde, 0x5d, 0xae, 0x22, 0x23,
		0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17, 0x7a, 0x9c,
		0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad,
	};
	uint8_t out[32];

	sha256(NULL, 0, out);
	assert_memory_equal(out, empty, 32);
	sha256("abc", 3, out);
	assert_memory_equal(out, abc, 32);
}

static void sha256_matches_fips_vectors_on_every_path(void **state)
{
	each_path(vectors);
}

static void against_libcrypto(void)
{
	uint8_t mine[32], theirs[32];
	struct rng r;

	rng_seed(&r, test_seed());
	for (size_t i = 0; i < 600; i++) {
		size_t len = i < 300 ? i : rng_below(&r, sizeof(buf) - 64);
		size_t off = rng_below(&r, 64);

		sha256(buf + off, len, mine);
		SHA256(buf + off, len, theirs);
		assert_memory_equal(mine, theirs, 32);
	}
}

static void sha256_matches_libcrypto_at_any_length_on_every_path(void **state)
{
	each_path(against_libcrypto);
}

static void in_pieces(void)
{
	uint8_t whole[32], out[32];
	struct sha256 s;
	struct rng r;

	rng_seed(&r, test_seed());
	SHA256(buf, sizeof(buf), whole);
	for (int i = 0; i < 50; i++) {
		size_t done = 0;

		sha256_init(&s);
		while (done < sizeof(buf)) {
			size_t n = rng_below(&r, i % 2 ? 150 : 9000);

			if (n > sizeof(buf) - done)
				n = sizeof(buf) - done;
			sha256_update(&s, buf + done, n);
			done += n;
		}
		sha256_final(&s, out);
		assert_memory_equal(out, whole, 32);
	}
}

static void sha256_in_pieces_equals_the_whole_on_every_path(void **state)
{
	each_path(in_pieces);
}

static void copied_state_goes_on_by_itself(void **state)
{
	uint8_t a[32], b[32], want[32];
	struct sha256 s, fork;

	sha256_init(&s);
	sha256_update(&s, "parent", 6);
	fork = s;
	sha256_update(&s, "left", 4);
	sha256_update(&fork, "right", 5);
	sha256_final(&s, a);
	sha256_final(&fork, b);
	sha256("parentleft", 10, want);
	assert_memory_equal(a, want, 32);
	sha256("parentright", 11, want);
	assert_memory_equal(b, want, 32);
}

static void fields_carry_their_length_little_endian(void **state)
{
	uint8_t out[32], want[32];
	struct sha256 s;

	sha256_init(&s);
	sha256_update_str(&s, "ab");
	sha256_update_u32(&s, 0x04030201);
	sha256_final(&s, out);
	sha256("\2\0\0\0ab\1\2\3\4", 10, want);
	assert_memory_equal(out, want, 32);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(sha256_matches_fips_vectors_on_every_path),
		cmocka_unit_test(sha256_matches_libcrypto_at_any_length_on_every_path),
		cmocka_unit_test(sha256_in_pieces_equals_the_whole_on_every_path),
		cmocka_unit_test(copied_state_goes_on_by_itself),
		cmocka_unit_test(fields_carry_their_length_little_endian),
	};
	struct rng r;

	rng_seed(&r, test_seed());
	rng_fill(&r, buf, sizeof(buf));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
