/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hist.h - latencies in logarithmic buckets
 *
 * 16 buckets to each power of two: a quantile is right within 1/32. One writer,
 * no lock; it may live in memory that another process reads (relaxed), and a
 * writer that is killed leaves a whole histogram behind.
 */
#ifndef KVMM_TESTS_LIB_HIST_H
#define KVMM_TESTS_LIB_HIST_H

#include <stdatomic.h>
#include <stdint.h>

#define HIST_SUB	16u			/* buckets to a power of two */
#define HIST_BUCKETS	((64u - 4u + 1u) * HIST_SUB)

struct hist {
	_Atomic uint64_t n[HIST_BUCKETS];
};

static inline unsigned int hist_bucket(uint64_t v)
{
	unsigned int shift;

	if (v < HIST_SUB)
		return (unsigned int)v;
	shift = 63u - 4u - (unsigned int)__builtin_clzll(v);
	return (shift + 1) * HIST_SUB + (unsigned int)(v >> shift) - HIST_SUB;
}

/* Middle of a bucket. */
static inline uint64_t hist_value(unsigned int b)
{
	unsigned int shift;

	if (b < 2 * HIST_SUB)
		return b;
	shift = b / HIST_SUB - 1;
	return ((uint64_t)(b % HIST_SUB + HIST_SUB) << shift) +
	       (UINT64_C(1) << shift) / 2;
}

static inline void hist_add(struct hist *h, uint64_t v)
{
	_Atomic uint64_t *n = &h->n[hist_bucket(v)];

	/* One writer: a plain increment, made of two relaxed accesses. */
	atomic_store_explicit(n, atomic_load_explicit(n, memory_order_relaxed)
			      + 1, memory_order_relaxed);
}

static inline void hist_merge(struct hist *to, const struct hist *from)
{
	unsigned int i;

	for (i = 0; i < HIST_BUCKETS; i++) {
		uint64_t n = atomic_load_explicit(&from->n[i],
						  memory_order_relaxed);

		atomic_fetch_add_explicit(&to->n[i], n, memory_order_relaxed);
	}
}

static inline uint64_t hist_count(const struct hist *h)
{
	uint64_t sum = 0;
	unsigned int i;

	for (i = 0; i < HIST_BUCKETS; i++)
		sum += atomic_load_explicit(&h->n[i], memory_order_relaxed);
	return sum;
}

/* The value that a share @q of all are not above; 0 when there are none. */
static inline uint64_t hist_quantile(const struct hist *h, double q)
{
	uint64_t want, seen = 0, total = hist_count(h);
	unsigned int i;

	if (!total)
		return 0;
	want = (uint64_t)(q * (double)(total - 1)) + 1;
	for (i = 0; i < HIST_BUCKETS; i++) {
		seen += atomic_load_explicit(&h->n[i], memory_order_relaxed);
		if (seen >= want)
			return hist_value(i);
	}
	return 0;
}

#endif
