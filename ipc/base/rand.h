/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Seeded random numbers for tests, jitter and samples (xoshiro256**, public
 * domain by Blackman and Vigna). Not for secrets: those come from getrandom().
 */
#ifndef KVMM_BASE_RAND_H
#define KVMM_BASE_RAND_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/**
 * struct rng - one stream; not thread-safe
 * @s:	the state, never all zero
 */
struct rng {
	uint64_t	s[4];
};

/* The step of splitmix64: a good 64-bit scramble of a counter. */
static inline uint64_t splitmix64(uint64_t *x)
{
	uint64_t z = (*x += UINT64_C(0x9e3779b97f4a7c15));

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

static inline void rng_seed(struct rng *r, uint64_t seed)
{
	for (int i = 0; i < 4; i++)
		r->s[i] = splitmix64(&seed);
}

static inline uint64_t rng_next(struct rng *r)
{
	uint64_t *s = r->s;
	uint64_t x = s[1] * 5;
	uint64_t ret = ((x << 7) | (x >> 57)) * 9;
	uint64_t t = s[1] << 17;

	s[2] ^= s[0];
	s[3] ^= s[1];
	s[1] ^= s[2];
	s[0] ^= s[3];
	s[2] ^= t;
	s[3] = (s[3] << 45) | (s[3] >> 19);
	return ret;
}

/* 0 <= result < @n, without bias that a test could see; 0 for @n = 0. */
static inline uint64_t rng_below(struct rng *r, uint64_t n)
{
	return (uint64_t)(((unsigned __int128)rng_next(r) * n) >> 64);
}

/* 0 <= result < 1. */
static inline double rng_double(struct rng *r)
{
	return (double)(rng_next(r) >> 11) * 0x1p-53;
}

static inline void rng_fill(struct rng *r, void *buf, size_t len)
{
	unsigned char *p = buf;

	while (len) {
		uint64_t x = rng_next(r);
		size_t n = len < sizeof(x) ? len : sizeof(x);

		memcpy(p, &x, n);
		p += n;
		len -= n;
	}
}

#endif
