/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bits in arrays of 64-bit words. The plain calls belong to one thread or to a
 * lock; the shared ones work on atomics that another process reads.
 */
#ifndef KVMM_BASE_BITMAP_H
#define KVMM_BASE_BITMAP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BITMAP_WORDS(bits)	(((size_t)(bits) + 63) / 64)

static inline bool bitmap_test(const uint64_t *map, size_t bit)
{
	return map[bit / 64] >> (bit % 64) & 1;
}

static inline void bitmap_set(uint64_t *map, size_t bit)
{
	map[bit / 64] |= UINT64_C(1) << (bit % 64);
}

static inline void bitmap_clear(uint64_t *map, size_t bit)
{
	map[bit / 64] &= ~(UINT64_C(1) << (bit % 64));
}

/* Sets the bit and returns what it was. */
static inline bool bitmap_test_set(uint64_t *map, size_t bit)
{
	bool was = bitmap_test(map, bit);

	bitmap_set(map, bit);
	return was;
}

static inline size_t __bitmap_next(const uint64_t *map, size_t nbits,
				   size_t from, uint64_t flip)
{
	size_t w = from / 64;
	uint64_t x;

	if (from >= nbits)
		return nbits;
	x = (map[w] ^ flip) & (~UINT64_C(0) << (from % 64));
	while (!x) {
		if (++w >= BITMAP_WORDS(nbits))
			return nbits;
		x = map[w] ^ flip;
	}
	from = w * 64 + (size_t)__builtin_ctzll(x);
	return from < nbits ? from : nbits;
}

/* The first set, or clear, bit at or after @from; @nbits when there is none. */
static inline size_t bitmap_next_set(const uint64_t *map, size_t nbits,
				     size_t from)
{
	return __bitmap_next(map, nbits, from, 0);
}

static inline size_t bitmap_next_clear(const uint64_t *map, size_t nbits,
				       size_t from)
{
	return __bitmap_next(map, nbits, from, ~UINT64_C(0));
}

/* How many of the first @nbits are set. */
static inline size_t bitmap_weight(const uint64_t *map, size_t nbits)
{
	size_t n = 0, w;

	for (w = 0; w < nbits / 64; w++)
		n += (size_t)__builtin_popcountll(map[w]);
	if (nbits % 64)
		n += (size_t)__builtin_popcountll(map[w] &
				((UINT64_C(1) << (nbits % 64)) - 1));
	return n;
}

/* Release: whoever sees the bit (bitmap_shared_test) sees what came before. */
static inline void bitmap_shared_set(_Atomic uint64_t *map, size_t bit)
{
	atomic_fetch_or_explicit(&map[bit / 64], UINT64_C(1) << (bit % 64),
				 memory_order_release);
}

/* Release: whoever sees it clear (bitmap_shared_test) sees what came before. */
static inline void bitmap_shared_clear(_Atomic uint64_t *map, size_t bit)
{
	atomic_fetch_and_explicit(&map[bit / 64], ~(UINT64_C(1) << (bit % 64)),
				  memory_order_release);
}

/* Acquire: pairs with bitmap_shared_set() and bitmap_shared_clear(). */
static inline bool bitmap_shared_test(const _Atomic uint64_t *map, size_t bit)
{
	return atomic_load_explicit(&map[bit / 64], memory_order_acquire) >>
	       (bit % 64) & 1;
}

#endif
