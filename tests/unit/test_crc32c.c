/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ipc/base/rand.h"
#include "kernels/kernels.h"
#include "tests/lib/unit.h"

#define BUF	16384

static uint8_t buf[BUF + 64], copy[BUF + 192];

/* A bit at a time, straight from the definition. */
static uint32_t reference(uint32_t crc, const uint8_t *p, size_t len)
{
	crc = ~crc;
	while (len--) {
		crc ^= *p++;
		for (int i = 0; i < 8; i++)
			crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
	}
	return ~crc;
}

/* Call @test once for each path that this CPU can run. */
static void each_path(void (*test)(void))
{
	const char *best = kvmm_crc32c_path();
	const char *name;
	int ran = 0;

	for (unsigned int i = 0; (name = kvmm_crc32c_path_name(i)); i++) {
		if (kvmm_crc32c_force(name))
			continue;
		assert_string_equal(kvmm_crc32c_path(), name);
		test();
		ran++;
	}
	assert_true(ran >= 1);
	assert_int_equal(kvmm_crc32c_force(best), 0);
}

static void vectors(void)
{
	uint8_t v[48];
	/* RFC 3720, appendix B.4; its last one is an iSCSI read command. */
	static const uint8_t read10[48] = {
		0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
		0x14, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18,
		0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0,
	};

	memset(v, 0, 32);
	assert_int_equal(kvmm_crc32c(0, v, 32), 0x8a9136aa);
	memset(v, 0xff, 32);
	assert_int_equal(kvmm_crc32c(0, v, 32), 0x62a8ab43);
	for (int i = 0; i < 32; i++)
		v[i] = (uint8_t)i;
	assert_int_equal(kvmm_crc32c(0, v, 32), 0x46dd794e);
	for (int i = 0; i < 32; i++)
		v[i] = (uint8_t)(31 - i);
	assert_int_equal(kvmm_crc32c(0, v, 32), 0x113fdb5c);
	assert_int_equal(kvmm_crc32c(0, read10, 48), 0xd9963a56);
	assert_int_equal(kvmm_crc32c(0, "123456789", 9), 0xe3069283);
	assert_int_equal(kvmm_crc32c(0, NULL, 0), 0);
}

static void crc32c_matches_rfc3720_vectors_on_every_path(void **state)
{
	each_path(vectors);
}

static void lengths(void)
{
	for (size_t len = 0; len < 700; len++)
		for (size_t off = 0; off < 8; off++)
			assert_int_equal(kvmm_crc32c(7, buf + off, len),
					 reference(7, buf + off, len));
}

static void crc32c_matches_reference_at_odd_lengths_and_alignments(void **state)
{
	each_path(lengths);
}

static void random_lengths(void)
{
	struct rng r;

	rng_seed(&r, test_seed());
	for (int i = 0; i < 300; i++) {
		size_t off = rng_below(&r, 64);
		size_t len = rng_below(&r, BUF);
		uint32_t from = (uint32_t)rng_next(&r);

		assert_int_equal(kvmm_crc32c(from, buf + off, len),
				 reference(from, buf + off, len));
	}
}

static void crc32c_matches_reference_on_random_buffers(void **state)
{
	each_path(random_lengths);
}

static void pieces(void)
{
	struct rng r;
	uint32_t whole = reference(0, buf, BUF);

	rng_seed(&r, test_seed());
	for (int i = 0; i < 100; i++) {
		uint32_t crc = 0;
		size_t done = 0;

		while (done < BUF) {
			size_t n = rng_below(&r, 3000);

			if (n > BUF - done)
				n = BUF - done;
			crc = kvmm_crc32c(crc, buf + done, n);
			done += n;
		}
		assert_int_equal(crc, whole);
	}
}

static void crc32c_in_pieces_equals_crc32c_of_the_whole(void **state)
{
	each_path(pieces);
}

static void copies(void)
{
	struct rng r;

	rng_seed(&r, test_seed());
	for (int i = 0; i < 600; i++) {
		size_t len = i < 400 ? (size_t)i : rng_below(&r, BUF);
		size_t from = rng_below(&r, 64);
		size_t to = 64 + rng_below(&r, 64);
		uint32_t crc = (uint32_t)rng_next(&r);

		memset(copy, 0xa5, sizeof(copy));
		assert_int_equal(kvmm_copy_crc32c(copy + to, buf + from, len, crc),
				 reference(crc, buf + from, len));
		assert_memory_equal(copy + to, buf + from, len);
		/* and not a byte beside it */
		for (size_t k = 0; k < to; k++)
			assert_int_equal(copy[k], 0xa5);
		for (size_t k = to + len; k < to + len + 64; k++)
			assert_int_equal(copy[k], 0xa5);
	}
}

static void copy_crc32c_copies_exactly_and_checksums_the_copy(void **state)
{
	each_path(copies);
}

static void combine_equals_crc32c_of_the_concatenation(void **state)
{
	struct rng r;

	rng_seed(&r, test_seed());
	for (int i = 0; i < 300; i++) {
		size_t len = rng_below(&r, BUF);
		size_t cut = rng_below(&r, len + 1);

		assert_int_equal(
			kvmm_crc32c_combine(kvmm_crc32c(0, buf, cut),
					    kvmm_crc32c(0, buf + cut, len - cut),
					    len - cut),
			reference(0, buf, len));
	}
}

static void combine_holds_for_lengths_beyond_32_bits(void **state)
{
	/* A tail of 2^n zeros, n up to 40, built by doubling. */
	uint8_t zero = 0;
	uint32_t tail = kvmm_crc32c(0, &zero, 1);
	uint32_t head = kvmm_crc32c(0, "head", 4);
	uint32_t steps = kvmm_crc32c_combine(head, tail, 1);
	uint64_t len = 1;

	for (int n = 0; n < 40; n++) {
		/* head + (2 len) zeros, by one step and by two */
		uint32_t twice = kvmm_crc32c_combine(tail, tail, len);
		uint32_t a = kvmm_crc32c_combine(head, twice, 2 * len);
		uint32_t b = kvmm_crc32c_combine(
				kvmm_crc32c_combine(head, tail, len), tail, len);

		assert_int_equal(a, b);
		assert_int_not_equal(a, steps);
		steps = a;
		tail = twice;
		len *= 2;
	}
}

static void one_flipped_bit_changes_the_checksum(void **state)
{
	uint32_t was = kvmm_crc32c(0, buf, 4096);

	for (size_t bit = 0; bit < 4096 * 8; bit += 41) {
		buf[bit / 8] ^= (uint8_t)(1 << bit % 8);
		assert_int_not_equal(kvmm_crc32c(0, buf, 4096), was);
		buf[bit / 8] ^= (uint8_t)(1 << bit % 8);
	}
	assert_int_equal(kvmm_crc32c(0, buf, 4096), was);
}

static void unknown_path_is_refused(void **state)
{
	assert_int_not_equal(kvmm_crc32c_force("abacus"), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(crc32c_matches_rfc3720_vectors_on_every_path),
		cmocka_unit_test(crc32c_matches_reference_at_odd_lengths_and_alignments),
		cmocka_unit_test(crc32c_matches_reference_on_random_buffers),
		cmocka_unit_test(crc32c_in_pieces_equals_crc32c_of_the_whole),
		cmocka_unit_test(copy_crc32c_copies_exactly_and_checksums_the_copy),
		cmocka_unit_test(combine_equals_crc32c_of_the_concatenation),
		cmocka_unit_test(combine_holds_for_lengths_beyond_32_bits),
		cmocka_unit_test(one_flipped_bit_changes_the_checksum),
		cmocka_unit_test(unknown_path_is_refused),
	};
	struct rng r;

	rng_seed(&r, test_seed());
	rng_fill(&r, buf, sizeof(buf));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
