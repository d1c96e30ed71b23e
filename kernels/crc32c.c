/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CRC-32C three ways: slicing by 8 in plain C; the crc32 instruction, whose
 * latency of 3 cycles allows 8 bytes each 3 cycles; and three such streams side
 * by side, which hides the latency and needs their results joined.
 *
 * Bits are reflected: bit 31 of a remainder is x^0. To join, a remainder r must
 * be advanced over n bits: r * x^n mod P. A carry-less product of two reflected
 * 32-bit values, put through crc32 as a 64-bit word, comes out as their product
 * times x^33 mod P; so the factor for m words is x^(64 m - 33) mod P, kept in
 * advance[m]. Tables are made before main(): 10 KiB that no file has to carry.
 */
#include "kernels/kernels.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#define POLY		0x82f63b78u	/* reflected */
#define STREAM_WORDS	256		/* most words of a stream between joins */
#define STREAMS_MIN	(3 * 8 * 8)	/* shorter than that: one stream */
#define COPY_CHUNK	4096		/* stays in L1 between copy and sum */

static uint32_t slice[8][256];
static uint32_t x2n[64 + 3];		/* x^(2^n) mod P, for 64 bits of bytes */
#ifdef __x86_64__
static uint32_t advance[2 * STREAM_WORDS + 1];
#endif

/* a * b mod P. */
static uint32_t mul_mod(uint32_t a, uint32_t b)
{
	uint32_t p = 0;

	for (int i = 31; i >= 0; i--) {
		if (a >> i & 1)
			p ^= b;
		b = b >> 1 ^ (b & 1 ? POLY : 0);
	}
	return p;
}

static inline uint64_t load64(const uint8_t *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof(v));
	return v;
}

/*
 * The same, read once for certain: where a value is both summed and stored, and
 * the source may change meanwhile, a compiler must not load it twice.
 */
static inline uint64_t load64_once(const uint8_t *p)
{
	typedef uint64_t __attribute__((may_alias, aligned(1))) word;

	return *(const volatile word *)p;
}

static inline void store64(uint8_t *p, uint64_t v)
{
	memcpy(p, &v, sizeof(v));
}

/* -- portable ------------------------------------------------------------- */

static uint32_t crc_portable(uint32_t crc, const uint8_t *p, size_t len)
{
	for (; len >= 8; len -= 8, p += 8) {
		uint64_t v = load64(p);

#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
		v = __builtin_bswap64(v);
#endif
		v ^= crc;
		crc = slice[7][v & 0xff] ^ slice[6][v >> 8 & 0xff] ^
		      slice[5][v >> 16 & 0xff] ^ slice[4][v >> 24 & 0xff] ^
		      slice[3][v >> 32 & 0xff] ^ slice[2][v >> 40 & 0xff] ^
		      slice[1][v >> 48 & 0xff] ^ slice[0][v >> 56];
	}
	while (len--)
		crc = crc >> 8 ^ slice[0][(crc ^ *p++) & 0xff];
	return crc;
}

/*
 * Copy, then sum the copy: the source may change between two reads of it, the
 * copy does not.
 */
static uint32_t copy_portable(uint32_t crc, uint8_t *dst, const uint8_t *src,
			      size_t len)
{
	while (len) {
		size_t n = len < COPY_CHUNK ? len : COPY_CHUNK;

		memcpy(dst, src, n);
		crc = crc_portable(crc, dst, n);
		dst += n;
		src += n;
		len -= n;
	}
	return crc;
}

static bool always(void)
{
	return true;
}

/* -- x86 ------------------------------------------------------------------ */

#ifdef __x86_64__
#include <immintrin.h>

#define ALWAYS_INLINE	inline __attribute__((always_inline))

/* Without @copy, @dst is not touched; both callers pass a constant. */
__attribute__((target("sse4.2")))
static ALWAYS_INLINE uint32_t one_stream(uint32_t crc, uint8_t *dst,
					 const uint8_t *src, size_t len,
					 bool copy)
{
	uint64_t c = crc;

	for (; len >= 8; len -= 8, src += 8) {
		uint64_t v = copy ? load64_once(src) : load64(src);

		c = _mm_crc32_u64(c, v);
		if (copy) {
			store64(dst, v);
			dst += 8;
		}
	}
	for (; len; len--, src++) {
		uint8_t v = *(const volatile uint8_t *)src;

		c = _mm_crc32_u8((uint32_t)c, v);
		if (copy)
			*dst++ = v;
	}
	return (uint32_t)c;
}

__attribute__((target("sse4.2,pclmul")))
static ALWAYS_INLINE uint64_t clmul(uint64_t a, uint32_t b)
{
	return (uint64_t)_mm_cvtsi128_si64(_mm_clmulepi64_si128(
			_mm_cvtsi64_si128((long long)a),
			_mm_cvtsi64_si128((long long)b), 0));
}

__attribute__((target("sse4.2,pclmul")))
static ALWAYS_INLINE uint32_t three_streams(uint32_t crc, uint8_t *dst,
					    const uint8_t *src, size_t len,
					    bool copy)
{
	while (len >= STREAMS_MIN) {
		size_t words = len / 24 < STREAM_WORDS ? len / 24 : STREAM_WORDS;
		size_t n = words * 8;
		uint64_t c0 = crc, c1 = 0, c2 = 0;

		for (size_t i = 0; i < n; i += 8) {
			uint64_t v0 = copy ? load64_once(src + i) :
					     load64(src + i);
			uint64_t v1 = copy ? load64_once(src + n + i) :
					     load64(src + n + i);
			uint64_t v2 = copy ? load64_once(src + 2 * n + i) :
					     load64(src + 2 * n + i);

			c0 = _mm_crc32_u64(c0, v0);
			c1 = _mm_crc32_u64(c1, v1);
			c2 = _mm_crc32_u64(c2, v2);
			if (copy) {
				store64(dst + i, v0);
				store64(dst + n + i, v1);
				store64(dst + 2 * n + i, v2);
			}
		}
		crc = (uint32_t)(c2 ^ _mm_crc32_u64(0,
					clmul(c0, advance[2 * words]) ^
					clmul(c1, advance[words])));
		src += 3 * n;
		len -= 3 * n;
		if (copy)
			dst += 3 * n;
	}
	return one_stream(crc, dst, src, len, copy);
}

__attribute__((target("sse4.2")))
static uint32_t crc_sse42(uint32_t crc, const uint8_t *p, size_t len)
{
	return one_stream(crc, NULL, p, len, false);
}

__attribute__((target("sse4.2")))
static uint32_t copy_sse42(uint32_t crc, uint8_t *dst, const uint8_t *src,
			   size_t len)
{
	return one_stream(crc, dst, src, len, true);
}

__attribute__((target("sse4.2,pclmul")))
static uint32_t crc_pclmul(uint32_t crc, const uint8_t *p, size_t len)
{
	return three_streams(crc, NULL, p, len, false);
}

__attribute__((target("sse4.2,pclmul")))
static uint32_t copy_pclmul(uint32_t crc, uint8_t *dst, const uint8_t *src,
			    size_t len)
{
	return three_streams(crc, dst, src, len, true);
}

static bool have_sse42(void)
{
	return __builtin_cpu_supports("sse4.2");
}

static bool have_pclmul(void)
{
	return have_sse42() && __builtin_cpu_supports("pclmul");
}
#endif

/* -- choice --------------------------------------------------------------- */

/**
 * struct crc_path - one way to compute it
 * @name:	for status and tests
 * @usable:	can this CPU run it?
 * @crc:	remainder in, remainder out, without the inversions
 * @copy:	the same while copying
 */
struct crc_path {
	const char	*name;
	bool		(*usable)(void);
	uint32_t	(*crc)(uint32_t crc, const uint8_t *p, size_t len);
	uint32_t	(*copy)(uint32_t crc, uint8_t *dst, const uint8_t *src,
				size_t len);
};

/* Best first. */
static const struct crc_path paths[] = {
#ifdef __x86_64__
	{
		.name	= "sse4.2+pclmul",
		.usable	= have_pclmul,
		.crc	= crc_pclmul,
		.copy	= copy_pclmul,
	},
	{
		.name	= "sse4.2",
		.usable	= have_sse42,
		.crc	= crc_sse42,
		.copy	= copy_sse42,
	},
#endif
	{
		.name	= "portable",
		.usable	= always,
		.crc	= crc_portable,
		.copy	= copy_portable,
	},
};
#define NR_PATHS (sizeof(paths) / sizeof(paths[0]))

static const struct crc_path *path;

/* Before main(), so that no caller has to ask whether it was done. */
__attribute__((constructor))
static void crc32c_init(void)
{
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t r = i;

		for (int bit = 0; bit < 8; bit++)
			r = r >> 1 ^ (r & 1 ? POLY : 0);
		slice[0][i] = r;
	}
	for (int k = 1; k < 8; k++)
		for (int i = 0; i < 256; i++)
			slice[k][i] = slice[k - 1][i] >> 8 ^
				      slice[0][slice[k - 1][i] & 0xff];

	x2n[0] = 0x40000000;			/* x */
	for (int n = 1; n < 64 + 3; n++)
		x2n[n] = mul_mod(x2n[n - 1], x2n[n - 1]);
#ifdef __x86_64__
	advance[1] = 1;				/* x^31 */
	for (int m = 2; m <= 2 * STREAM_WORDS; m++)
		advance[m] = mul_mod(advance[m - 1], x2n[6]);
	__builtin_cpu_init();
#endif
	for (path = paths; !path->usable(); path++)
		;				/* the last one always is */
}

uint32_t kvmm_crc32c(uint32_t crc, const void *buf, size_t len)
{
	return ~path->crc(~crc, buf, len);
}

uint32_t kvmm_copy_crc32c(void *restrict dst, const void *restrict src,
			  size_t len, uint32_t crc)
{
	return ~path->copy(~crc, dst, src, len);
}

/*
 * The inversions at both ends cancel out, so the plain rule holds for finished
 * checksums: A's advanced over B's bits, plus B's.
 */
uint32_t kvmm_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b)
{
	/* x^(8 len), bit by bit of len; 8 is 2^3. */
	for (unsigned int n = 3; len_b; len_b >>= 1, n++)
		if (len_b & 1)
			crc_a = mul_mod(crc_a, x2n[n]);
	return crc_a ^ crc_b;
}

const char *kvmm_crc32c_path(void)
{
	return path->name;
}

#ifdef KVMM_TEST_BUILD
const char *kvmm_crc32c_path_name(unsigned int i)
{
	return i < NR_PATHS ? paths[i].name : NULL;
}

int kvmm_crc32c_force(const char *name)
{
	for (size_t i = 0; i < NR_PATHS; i++) {
		if (strcmp(paths[i].name, name))
			continue;
		if (!paths[i].usable())
			return -ENOTSUP;
		path = &paths[i];
		return 0;
	}
	return -ENOENT;
}
#endif
