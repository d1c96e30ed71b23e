/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two compressors behind one interface: plain C, and the SHA extensions (some
 * six times faster), which matter because a prompt's key chain is hashed at
 * every lookup by engines that bring no hashes of their own.
 *
 * The choice is kept in one atomic, written with the same value by whoever
 * comes first: CPUID traps to the hypervisor in a VM, so it is asked once.
 */
#include "ipc/base/sha256.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "ipc/base/bits.h"

static const uint32_t k256[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5,
	0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
	0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
	0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
	0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
	0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
	0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5,
	0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
	0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

typedef void compress_fn(uint32_t h[8], const uint8_t *data, size_t blocks);

static inline uint32_t ror32(uint32_t x, unsigned int n)
{
	return x >> n | x << (32 - n);
}

static inline uint32_t load_be32(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 |
	       (uint32_t)p[2] << 8 | p[3];
}

static void store_be32(uint8_t *p, uint32_t v)
{
	p[0] = (uint8_t)(v >> 24);
	p[1] = (uint8_t)(v >> 16);
	p[2] = (uint8_t)(v >> 8);
	p[3] = (uint8_t)v;
}

static void compress_portable(uint32_t state[8], const uint8_t *data,
			      size_t blocks)
{
	uint32_t w[64];

	for (; blocks; blocks--, data += 64) {
		uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
		uint32_t e = state[4], f = state[5], g = state[6], h = state[7];

		for (int i = 0; i < 16; i++)
			w[i] = load_be32(data + 4 * i);
		for (int i = 16; i < 64; i++) {
			uint32_t x = w[i - 15], y = w[i - 2];

			w[i] = w[i - 16] + w[i - 7] +
			       (ror32(x, 7) ^ ror32(x, 18) ^ x >> 3) +
			       (ror32(y, 17) ^ ror32(y, 19) ^ y >> 10);
		}
		/* Unrolled, the moves from one name to the next go away. */
#pragma GCC unroll 8
		for (int i = 0; i < 64; i++) {
			uint32_t t1 = h + k256[i] + w[i] +
				(ror32(e, 6) ^ ror32(e, 11) ^ ror32(e, 25)) +
				((e & f) ^ (~e & g));
			uint32_t t2 = ((a & b) ^ (a & c) ^ (b & c)) +
				(ror32(a, 2) ^ ror32(a, 13) ^ ror32(a, 22));

			h = g;
			g = f;
			f = e;
			e = d + t1;
			d = c;
			c = b;
			b = a;
			a = t1 + t2;
		}
		state[0] += a;
		state[1] += b;
		state[2] += c;
		state[3] += d;
		state[4] += e;
		state[5] += f;
		state[6] += g;
		state[7] += h;
	}
}

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

/*
 * sha256rnds2 does two rounds on the state held as ABEF and CDGH. The message
 * schedule runs four words at a time in m[0..3], used as a ring.
 */
__attribute__((target("sha,sse4.1,ssse3")))
static void compress_sha_ni(uint32_t h[8], const uint8_t *data, size_t blocks)
{
	const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL,
					    0x0405060700010203LL);
	__m128i t = _mm_loadu_si128((const __m128i *)h);	/* DCBA */
	__m128i u = _mm_loadu_si128((const __m128i *)(h + 4));	/* HGFE */
	__m128i abef, cdgh, m[4];

	t = _mm_shuffle_epi32(t, 0xb1);			/* CDAB */
	u = _mm_shuffle_epi32(u, 0x1b);			/* EFGH */
	abef = _mm_alignr_epi8(t, u, 8);
	cdgh = _mm_blend_epi16(u, t, 0xf0);

	for (; blocks; blocks--, data += 64) {
		__m128i abef0 = abef, cdgh0 = cdgh;

		for (int i = 0; i < 4; i++)
			m[i] = _mm_shuffle_epi8(_mm_loadu_si128(
					(const __m128i *)data + i), swap);
#pragma GCC unroll 16
		for (int i = 0; i < 16; i++) {
			__m128i x = _mm_add_epi32(m[i & 3], _mm_loadu_si128(
					(const __m128i *)&k256[4 * i]));

			cdgh = _mm_sha256rnds2_epu32(cdgh, abef, x);
			x = _mm_shuffle_epi32(x, 0x0e);
			abef = _mm_sha256rnds2_epu32(abef, cdgh, x);

			/* m[i & 3] becomes the words of step i + 4. */
			t = _mm_sha256msg1_epu32(m[i & 3], m[(i + 1) & 3]);
			t = _mm_add_epi32(t, _mm_alignr_epi8(m[(i + 3) & 3],
							     m[(i + 2) & 3], 4));
			m[i & 3] = _mm_sha256msg2_epu32(t, m[(i + 3) & 3]);
		}
		abef = _mm_add_epi32(abef, abef0);
		cdgh = _mm_add_epi32(cdgh, cdgh0);
	}

	t = _mm_shuffle_epi32(abef, 0x1b);		/* FEBA */
	u = _mm_shuffle_epi32(cdgh, 0xb1);		/* DCHG */
	_mm_storeu_si128((__m128i *)h, _mm_blend_epi16(t, u, 0xf0));
	_mm_storeu_si128((__m128i *)(h + 4), _mm_alignr_epi8(u, t, 8));
}

static bool have_sha_ni(void)
{
	unsigned int a, b, c, d;

	if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 29))
		return false;
	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1) &&
	       (c & bit_SSSE3);
}
#else
#define compress_sha_ni	compress_portable
static bool have_sha_ni(void)
{
	return false;
}
#endif

static _Atomic(compress_fn *) chosen;

static compress_fn *choose(void)
{
	compress_fn *fn = atomic_load_explicit(&chosen, memory_order_relaxed);

	if (unlikely(!fn)) {
		fn = have_sha_ni() ? compress_sha_ni : compress_portable;
		atomic_store_explicit(&chosen, fn, memory_order_relaxed);
	}
	return fn;
}

void sha256_init(struct sha256 *s)
{
	static const uint32_t iv[8] = {
		0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
		0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
	};

	memcpy(s->h, iv, sizeof(iv));
	s->bytes = 0;
}

void sha256_update(struct sha256 *s, const void *data, size_t len)
{
	size_t have = s->bytes % 64;
	const uint8_t *p = data;
	compress_fn *compress = choose();

	if (!len)
		return;			/* @data may be NULL then */
	s->bytes += len;
	if (have) {
		size_t n = 64 - have < len ? 64 - have : len;

		memcpy(s->buf + have, p, n);
		p += n;
		len -= n;
		if (have + n < 64)
			return;
		compress(s->h, s->buf, 1);
	}
	if (len >= 64)
		compress(s->h, p, len / 64);
	p += len & ~(size_t)63;
	memcpy(s->buf, p, len % 64);
}

void sha256_final(struct sha256 *s, uint8_t out[SHA256_BYTES])
{
	size_t have = s->bytes % 64;
	uint64_t bits = s->bytes * 8;
	compress_fn *compress = choose();

	s->buf[have++] = 0x80;
	if (have > 56) {
		memset(s->buf + have, 0, 64 - have);
		compress(s->h, s->buf, 1);
		have = 0;
	}
	memset(s->buf + have, 0, 56 - have);
	store_be32(s->buf + 56, (uint32_t)(bits >> 32));
	store_be32(s->buf + 60, (uint32_t)bits);
	compress(s->h, s->buf, 1);
	for (int i = 0; i < 8; i++)
		store_be32(out + 4 * i, s->h[i]);
}

void sha256(const void *data, size_t len, uint8_t out[SHA256_BYTES])
{
	struct sha256 s;

	sha256_init(&s);
	sha256_update(&s, data, len);
	sha256_final(&s, out);
}

void sha256_update_u32(struct sha256 *s, uint32_t v)
{
	uint8_t le[4] = {
		(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16),
		(uint8_t)(v >> 24),
	};

	sha256_update(s, le, sizeof(le));
}

void sha256_update_str(struct sha256 *s, const char *str)
{
	size_t len = strlen(str);

	sha256_update_u32(s, (uint32_t)len);
	sha256_update(s, str, len);
}

#ifdef KVMM_TEST_BUILD
int sha256_force(const char *path)
{
	bool ni = !strcmp(path, "sha-ni");

	if (ni && !have_sha_ni())
		return -ENOTSUP;
	atomic_store_explicit(&chosen, ni ? compress_sha_ni : compress_portable,
			      memory_order_relaxed);
	return 0;
}
#endif
