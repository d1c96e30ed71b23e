/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kern.h - the arithmetic under the model: products, norms, softmax.
 *
 * Why results never depend on the vector width, the tile or the CPU:
 * - a product's element is sum(w[k] * x[k]) with k ascending, begun at 0. Vector
 *   lanes are different elements, so nothing is ever added across lanes;
 * - a sum along a row has 16 partial sums, of the elements with index i % 16,
 *   which a fixed tree adds up;
 * - multiplications and additions are rounded one by one (-ffp-contract=off);
 * - exp() is a polynomial of our own.
 */
#ifndef KVMM_TESTS_ENGINE_KERN_H
#define KVMM_TESTS_ENGINE_KERN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Elements that lie side by side in a packed matrix, and partial sums of a row. */
#define LANES	16

static inline size_t round_up(size_t n, size_t to)
{
	return (n + to - 1) / to * to;
}

/**
 * struct mat - a matrix of weights, packed
 * @p:		panels of 16 rows: [out / 16][in][16], the last one padded with 0
 * @out, @in:	rows and columns
 */
struct mat {
	float		*p;
	uint32_t	out, in;
};

static inline size_t mat_floats(const struct mat *m)
{
	return round_up(m->out, LANES) * m->in;
}

static inline float *mat_at(const struct mat *m, size_t row, size_t col)
{
	return m->p + (row / LANES * m->in + col) * LANES + row % LANES;
}

/**
 * struct product - y[r][c] = sum over k of x[r][k] * w[c][k], c in [lo, hi)
 * @y, @ldy:	result; floats from row to row
 * @x, @ldx:	input
 * @rows:	of @x and @y
 * @w:		panels of 16 columns c, as in struct mat
 * @ldw:	floats from panel to panel
 * @k:		terms of a sum
 */
struct product {
	float		*y;
	size_t		ldy;
	const float	*x;
	size_t		ldx, rows;
	const float	*w;
	size_t		ldw, k;
	size_t		lo, hi;
};

void product(const struct product *p);

/* out = x * w / rms(x); @out may be @x. */
void rmsnorm(float *out, const float *x, const float *w, size_t n, float eps);

/*
 * s[i] = exp(s[i] - max), and their sum. @n is a multiple of 16; -INFINITY is an
 * element that counts for nothing.
 */
float softmax_exp(float *s, size_t n);

/* g = silu(g) * u */
void silu_mul(float *g, const float *u, size_t n);

/* 1 / (1 + exp(-x)) */
float sigmoid(float x);

/*
 * Angles of position @pos: cos and sin of @half pairs. Pair i of a head turns
 * elements i and i + half (not 2i and 2i + 1).
 */
void rope_angles(float *cs, float *sn, uint32_t pos, size_t half, float theta);
void rope_turn(float *x, const float *cs, const float *sn, size_t half);

/* Round to nearest, ties to even; a NaN stays one. */
static inline uint16_t bf16_from(float f)
{
	uint32_t u;

	memcpy(&u, &f, 4);
	if ((u & 0x7fffffff) > 0x7f800000)
		return (uint16_t)(u >> 16 | 0x40);
	return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float bf16_to(uint16_t h)
{
	uint32_t u = (uint32_t)h << 16;
	float f;

	memcpy(&f, &u, 4);
	return f;
}

/*
 * A panel of keys: element i of @row[j] becomes @out[i * 16 + j], i < @n, j < 16.
 */
void keys_panel(float *out, const uint16_t *const *row, size_t n);

/* A row of values into panels: 16 elements each, panels @ld floats apart. */
void values_row(float *out, size_t ld, const uint16_t *row, size_t n);

#ifdef KVMM_TEST_BUILD
/* "avx2" or "portable"; the former is -ENOTSUP where the CPU has none. */
int kern_force(const char *path);
#endif

#endif
