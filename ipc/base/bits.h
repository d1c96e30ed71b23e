/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arithmetic and attribute helpers that every file may use. Arguments of the
 * macros are evaluated once; what must be a power of two says so.
 */
#ifndef KVMM_BASE_BITS_H
#define KVMM_BASE_BITS_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARRAY_SIZE(a)	(sizeof(a) / sizeof((a)[0]) + __must_be_array(a))

/* 0, or a build error where @a is a pointer. */
#define __must_be_array(a)						\
	(0 * sizeof(struct { _Static_assert(				\
		!__builtin_types_compatible_p(__typeof__(a),		\
					      __typeof__(&(a)[0])),	\
		"not an array"); int x; }))

/**
 * container_of() - the struct that a member lies in
 * @ptr:	pointer to the member; not NULL
 * @type:	the struct
 * @member:	the member's name
 */
#define container_of(ptr, type, member)					\
	((type *)((char *)(1 ? (ptr) : &((type *)0)->member) -		\
		  offsetof(type, member)))

/* Kernel-style: both sides must be of one type, so no sign is lost. */
#define __cmp(x, y, op, a, b) ({					\
	__typeof__(x) a = (x);						\
	__typeof__(y) b = (y);						\
	(void)(&a == &b);						\
	a op b ? a : b; })
#define __paste2(a, b)		a##b
#define __paste(a, b)		__paste2(a, b)
#define __unique(name)		__paste(__##name##_, __COUNTER__)

#define min(x, y)	__cmp(x, y, <, __unique(a), __unique(b))
#define max(x, y)	__cmp(x, y, >, __unique(a), __unique(b))
#define min_t(type, x, y)	min((type)(x), (type)(y))
#define max_t(type, x, y)	max((type)(x), (type)(y))
#define clamp(x, lo, hi)	min(max(x, lo), hi)

#define likely(x)	__builtin_expect(!!(x), 1)
#define unlikely(x)	__builtin_expect(!!(x), 0)

#ifndef __always_inline		/* glibc has it */
#define __always_inline	inline __attribute__((always_inline))
#endif
#define __packed	__attribute__((packed))
#define __printf(fmt, args)	__attribute__((format(printf, fmt, args)))
#define __must_check	__attribute__((warn_unused_result))
/* unused: clang does not count the clean-up as a use. */
#define __cleanup(fn)	__attribute__((cleanup(fn), unused))

#define CACHE_LINE	64
#define BIT(n)		(UINT64_C(1) << (n))

static inline bool is_pow2(uint64_t x)
{
	return x && !(x & (x - 1));
}

/* Up or down to a multiple of @a, a power of two. Wraps above 2^64 - @a. */
static inline uint64_t round_up(uint64_t x, uint64_t a)
{
	return (x + a - 1) & ~(a - 1);
}

static inline uint64_t round_down(uint64_t x, uint64_t a)
{
	return x & ~(a - 1);
}

/* Up to a multiple of @a, any non-zero number. */
static inline uint64_t roundup_to(uint64_t x, uint64_t a)
{
	return (x + a - 1) / a * a;
}

static inline uint64_t div_round_up(uint64_t x, uint64_t d)
{
	return x / d + !!(x % d);
}

/* floor(log2(x)); @x must not be 0. */
static inline unsigned int ilog2(uint64_t x)
{
	return 63 - __builtin_clzll(x);
}

/* The smallest power of two that is not below @x; 1 for 0. @x <= 2^63. */
static inline uint64_t roundup_pow2(uint64_t x)
{
	return x <= 1 ? 1 : UINT64_C(2) << ilog2(x - 1);
}

static inline uint64_t gcd64(uint64_t a, uint64_t b)
{
	while (b) {
		uint64_t r = a % b;

		a = b;
		b = r;
	}
	return a;
}

/* Sizes that come from outside: true when the result does not fit. */
static inline bool add_overflows(uint64_t a, uint64_t b, uint64_t *sum)
{
	return __builtin_add_overflow(a, b, sum);
}

static inline bool mul_overflows(uint64_t a, uint64_t b, uint64_t *product)
{
	return __builtin_mul_overflow(a, b, product);
}

#endif
