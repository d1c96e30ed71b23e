/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pattern.h - page contents that follow from the page's key
 *
 * Stands for a KV-cache page: whoever knows the key can say what every byte
 * must be. Each 64-bit word depends on the key and on its place, so a page of
 * somebody else, an old page, a page shifted by a word and a page torn in the
 * middle all show. Plain C at several GB/s: checking must not be what is
 * measured.
 */
#ifndef KVMM_TESTS_LIB_PATTERN_H
#define KVMM_TESTS_LIB_PATTERN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <kvmm/kvmm.h>

#define PATTERN_STEP	UINT64_C(0x9e3779b97f4a7c15)

/* All 32 bytes of the key count. */
static inline uint64_t pattern_seed(const struct kvmm_key *key)
{
	uint64_t w[4], h = UINT64_C(0x6b766d6d70616765);
	unsigned int i;

	memcpy(w, key->b, sizeof(w));
	for (i = 0; i < 4; i++) {
		h = (h ^ w[i]) * UINT64_C(0xff51afd7ed558ccd);
		h ^= h >> 32;
	}
	return h;
}

/* One round of splitmix64: the counter makes the place count. */
static inline uint64_t pattern_word(uint64_t counter)
{
	uint64_t x = counter;

	x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	return x ^ x >> 27;
}

/* @bytes is a multiple of 8, @page is aligned to 8. */
static inline void pattern_fill(void *page, size_t bytes,
				const struct kvmm_key *key)
{
	uint64_t *p = page, c = pattern_seed(key);
	size_t i;

	for (i = 0; i < bytes / 8; i++, c += PATTERN_STEP)
		p[i] = pattern_word(c);
}

/* Return: how many bytes are wrong. */
static inline size_t pattern_check(const void *page, size_t bytes,
				   const struct kvmm_key *key)
{
	const uint64_t *p = page;
	const unsigned char *b = page;
	uint64_t c = pattern_seed(key), diff = 0;
	size_t i, j, wrong = 0;

	for (i = 0; i < bytes / 8; i++, c += PATTERN_STEP)
		diff |= p[i] ^ pattern_word(c);
	if (!diff)
		return 0;

	c = pattern_seed(key);
	for (i = 0; i < bytes / 8; i++, c += PATTERN_STEP) {
		uint64_t w = pattern_word(c);
		unsigned char want[8];

		memcpy(want, &w, 8);
		for (j = 0; j < 8; j++)
			wrong += b[i * 8 + j] != want[j];
	}
	return wrong;
}

#endif
