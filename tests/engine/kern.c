/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic under the model. One body of vector code is compiled for each
 * instruction set, and the best one is taken at run time; see kern.h for why
 * all of them give the same bits.
 */
#include <errno.h>
#include <math.h>
#include <stdatomic.h>

#include "tests/engine/kern.h"

/* One product's inner blocks: what stays in the first and second level cache. */
#define BLOCK_K		512
#define BLOCK_ROWS	96

struct kern {
	size_t	(*tile)(float *y, size_t ldy, const float *x, size_t ldx,
			size_t rows, const float *w, size_t k, int first);
	float	(*softmax)(float *s, size_t n);
	void	(*silu)(float *g, const float *u, size_t n);
	float	(*square_sum)(const float *x, size_t n);
	void	(*widen)(float *out, const uint16_t *in);
	void	(*panel)(float *out, const uint16_t *const *row, size_t n);
};

static float tree_sum(float *lane)
{
	for (int w = LANES / 2; w; w /= 2)
		for (int i = 0; i < w; i++)
			lane[i] += lane[i + w];
	return lane[0];
}

#define VW		4
#define TILE		3
#define TARGET
#define NAME(x)		x##_portable
#include "tests/engine/kern_body.inc"

#if defined(__x86_64__)
/* Not fma: that would round once where the others round twice. */
#define VW		8
#define TILE		6
#define TARGET		__attribute__((target("avx2")))
#define NAME(x)		x##_avx2
#include "tests/engine/kern_body.inc"
#endif

static _Atomic(const struct kern *) chosen;

static const struct kern *kern(void)
{
	/* Relaxed: tables are constant, and any of them gives the same bits. */
	const struct kern *k = atomic_load_explicit(&chosen,
						    memory_order_relaxed);

	if (k)
		return k;
	k = &kern_portable;
#if defined(__x86_64__)
	if (__builtin_cpu_supports("avx2"))
		k = &kern_avx2;
#endif
	atomic_store_explicit(&chosen, k, memory_order_relaxed);
	return k;
}

#ifdef KVMM_TEST_BUILD
int kern_force(const char *path)
{
	const struct kern *k = &kern_portable;

	if (!strcmp(path, "avx2")) {
#if defined(__x86_64__)
		if (!__builtin_cpu_supports("avx2"))
			return -ENOTSUP;
		k = &kern_avx2;
#else
		return -ENOTSUP;
#endif
	}
	atomic_store_explicit(&chosen, k, memory_order_relaxed);
	return 0;
}
#endif

/* Rows [r0, r1) by panel @c0 / 16, terms [k0, k0 + kc). */
static void product_panel(const struct kern *kn, const struct product *p,
			  size_t c0, size_t r0, size_t r1, size_t k0, size_t kc)
{
	const float *w = p->w + c0 / LANES * p->ldw + k0 * LANES;
	size_t lo = p->lo > c0 ? p->lo - c0 : 0;
	size_t hi = p->hi - c0 < LANES ? p->hi - c0 : LANES;
	float part[LANES];

	if (lo == 0 && hi == LANES) {
		while (r0 < r1)
			r0 += kn->tile(p->y + r0 * p->ldy + c0, p->ldy,
				       p->x + r0 * p->ldx + k0, p->ldx,
				       r1 - r0, w, kc, k0 == 0);
		return;
	}
	/* An edge: what lies beside it in @y is not ours to write. */
	for (; r0 < r1; r0++) {
		float *y = p->y + r0 * p->ldy + c0;

		memset(part, 0, sizeof(part));
		memcpy(part + lo, y + lo, (hi - lo) * 4);
		kn->tile(part, LANES, p->x + r0 * p->ldx + k0, p->ldx, 1, w,
			 kc, k0 == 0);
		memcpy(y + lo, part + lo, (hi - lo) * 4);
	}
}

void product(const struct product *p)
{
	const struct kern *kn = kern();

	for (size_t k0 = 0; k0 < p->k; k0 += BLOCK_K) {
		size_t kc = p->k - k0 < BLOCK_K ? p->k - k0 : BLOCK_K;

		for (size_t r0 = 0; r0 < p->rows; r0 += BLOCK_ROWS) {
			size_t r1 = p->rows - r0 < BLOCK_ROWS ? p->rows :
							r0 + BLOCK_ROWS;

			for (size_t c0 = p->lo / LANES * LANES; c0 < p->hi;
			     c0 += LANES)
				product_panel(kn, p, c0, r0, r1, k0, kc);
		}
	}
}

void rmsnorm(float *out, const float *x, const float *w, size_t n, float eps)
{
	float inv = 1.0f / sqrtf(kern()->square_sum(x, n) / (float)n + eps);

	for (size_t i = 0; i < n; i++)
		out[i] = x[i] * inv * w[i];
}

float softmax_exp(float *s, size_t n)
{
	return kern()->softmax(s, n);
}

void silu_mul(float *g, const float *u, size_t n)
{
	kern()->silu(g, u, n);
}

void keys_panel(float *out, const uint16_t *const *row, size_t n)
{
	kern()->panel(out, row, n);
}

void values_row(float *out, size_t ld, const uint16_t *row, size_t n)
{
	const struct kern *kn = kern();

	for (; n >= LANES; n -= LANES, row += LANES, out += ld)
		kn->widen(out, row);
	for (size_t i = 0; i < n; i++)
		out[i] = bf16_to(row[i]);
}

float sigmoid(float x)
{
	/* softmax of (x, 0) is the sigmoid, and spares a scalar exp(). */
	float s[LANES], sum;

	for (int i = 0; i < LANES; i++)
		s[i] = -INFINITY;
	s[0] = x;
	s[1] = 0;
	sum = softmax_exp(s, LANES);
	return s[0] / sum;
}

void rope_angles(float *cs, float *sn, uint32_t pos, size_t half, float theta)
{
	for (size_t i = 0; i < half; i++) {
		/* In double: a float angle is off by 2^-8 at position 2^16. */
		double a = pos * pow(theta, -(double)i / (double)half);

		cs[i] = (float)cos(a);
		sn[i] = (float)sin(a);
	}
}

void rope_turn(float *x, const float *cs, const float *sn, size_t half)
{
	for (size_t i = 0; i < half; i++) {
		float a = x[i], b = x[i + half];

		x[i] = a * cs[i] - b * sn[i];
		x[i + half] = b * cs[i] + a * sn[i];
	}
}
