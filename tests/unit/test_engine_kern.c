/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic under the model is what it says: right to a few units of the
 * last place, and the same bits with every instruction set.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "tests/engine/kern.h"
#include "tests/lib/unit.h"

static float any(struct rng *r, float spread)
{
	return ((float)rng_double(r) * 2 - 1) * spread;
}

/* |a - b| within @rel of @b, or of 1 where @b is small */
static void near(double a, double b, double rel)
{
	double most = rel * (fabs(b) > 1e-30 ? fabs(b) : 1e-30);

	if (!(fabs(a - b) <= most))
		fail_msg("%.9g, not %.9g", a, b);
}

static void each_path(void (*test)(void))
{
	int ran = 0;

	/* The last one forced is what stays chosen: the best. */
	for (int i = 0; i < 2; i++) {
		if (kern_force(i ? "avx2" : "portable"))
			continue;
		test();
		ran++;
	}
	assert_true(ran >= 1);
}

/* -- products ------------------------------------------------------------------------ */

#define MOST	70

static void one_product(size_t rows, size_t in, size_t out, size_t lo, size_t hi,
			struct rng *r)
{
	static float x[130 * 1100], y[130 * MOST], was[130 * MOST];
	static float w[1100 * (MOST + LANES)];
	struct mat m = { w, (uint32_t)out, (uint32_t)in };
	size_t pad = rng_below(r, 4), ldx = in + pad, ldy = out + pad;

	memset(w, 0, sizeof(w));
	for (size_t i = 0; i < rows * ldx; i++)
		x[i] = any(r, 1);
	for (size_t i = 0; i < out; i++)
		for (size_t k = 0; k < in; k++)
			*mat_at(&m, i, k) = any(r, 1);
	for (size_t i = 0; i < rows * ldy; i++)
		was[i] = y[i] = any(r, 1);
	product(&(struct product){
		.y = y, .ldy = ldy, .x = x, .ldx = ldx, .rows = rows, .w = w,
		.ldw = in * LANES, .k = in, .lo = lo, .hi = hi });
	for (size_t i = 0; i < rows; i++)
		for (size_t c = 0; c < ldy; c++) {
			float sum = 0;

			if (c < lo || c >= hi) {
				assert_true(y[i * ldy + c] == was[i * ldy + c]);
				continue;
			}
			for (size_t k = 0; k < in; k++)
				sum += x[i * ldx + k] * *mat_at(&m, c, k);
			/* Not near: the very sum. */
			assert_true(y[i * ldy + c] == sum);
		}
}

static void products(void)
{
	struct rng r;

	rng_seed(&r, test_seed());
	for (int i = 0; i < 60; i++) {
		size_t out = 1 + rng_below(&r, MOST);
		size_t lo = rng_below(&r, out);
		size_t hi = lo + 1 + rng_below(&r, out - lo);
		size_t rows = 1 + rng_below(&r, i % 4 ? 14 : 130);

		one_product(rows, 1 + rng_below(&r, i % 4 ? 80 : 1100), out,
			    i % 3 ? 0 : lo, i % 3 ? out : hi, &r);
	}
}

static void product_is_the_plain_sum_and_leaves_other_columns_alone(void **state)
{
	each_path(products);
}

/* -- rows ------------------------------------------------------------------------------ */

static void softmaxes(void)
{
	static float s[256], was[256];
	struct rng r;

	rng_seed(&r, test_seed());
	for (size_t n = LANES; n <= 256; n += LANES) {
		float max = -INFINITY, sum, lane[LANES] = { 0 };

		for (size_t i = 0; i < n; i++) {
			was[i] = s[i] = rng_below(&r, 5) ? any(&r, 30) :
							   -INFINITY;
			max = s[i] > max ? s[i] : max;
		}
		sum = softmax_exp(s, n);
		for (size_t i = 0; i < n; i++) {
			if (was[i] == -INFINITY)
				assert_true(s[i] == 0);
			else
				near(s[i], exp((double)(was[i] - max)), 4e-7);
			lane[i % LANES] += s[i];
		}
		for (int w = LANES / 2; w; w /= 2)
			for (int i = 0; i < w; i++)
				lane[i] += lane[i + w];
		if (max > -INFINITY)
			assert_true(lane[0] == sum);
		else
			assert_true(sum == 0);
	}
}

static void softmax_is_right_and_masks_exactly(void **state)
{
	each_path(softmaxes);
}

/* Zeros in front or behind, as pages and windows bring them, change nothing. */
static void masked_lanes_change_no_bit(void **state)
{
	float a[32], b[64];
	struct rng r;

	rng_seed(&r, test_seed());
	for (int i = 0; i < 64; i++)
		b[i] = -INFINITY;
	for (int i = 0; i < 32; i++)
		a[i] = b[i + 16] = any(&r, 10);
	assert_true(softmax_exp(a, 32) == softmax_exp(b, 64));
	assert_memory_equal(a, b + 16, sizeof(a));
}

static void silus(void)
{
	static float g[100], u[100], was[100];
	struct rng r;

	rng_seed(&r, test_seed());
	for (size_t n = 1; n < 100; n++) {
		for (size_t i = 0; i < 100; i++) {
			was[i] = g[i] = any(&r, i % 10 ? 10 : 80);
			u[i] = any(&r, 3);
		}
		silu_mul(g, u, n);
		for (size_t i = 0; i < n; i++)
			near(g[i], was[i] / (1 + exp(-(double)was[i])) * u[i],
			     1e-6);
		for (size_t i = n; i < 100; i++)
			assert_true(g[i] == was[i]);
	}
	g[0] = -1000;
	g[1] = 1000;
	u[0] = u[1] = 1;
	silu_mul(g, u, 2);
	assert_true(g[0] <= 0 && g[0] > -1e-30f);
	assert_true(g[1] == 1000);
}

static void silu_is_right_at_any_length(void **state)
{
	each_path(silus);
}

static void norms(void)
{
	static float x[200], w[200], out[200];
	struct rng r;

	rng_seed(&r, test_seed());
	for (size_t n = 1; n < 200; n += 3) {
		double sum = 0;

		for (size_t i = 0; i < n; i++) {
			x[i] = any(&r, 4);
			w[i] = any(&r, 2);
			sum += (double)x[i] * x[i];
		}
		rmsnorm(out, x, w, n, 1e-5f);
		for (size_t i = 0; i < n; i++)
			near(out[i], x[i] * w[i] /
				     sqrt(sum / (double)n + 1e-5f), 2e-6);
	}
}

static void rmsnorm_is_right_at_any_length(void **state)
{
	each_path(norms);
}

static void instruction_sets_agree_on_rows(void **state)
{
	static float x[2][333], y[2][333], s[2][320], n[2][333];
	float w[333], sum[2];
	struct rng r;

	for (int p = 0; p < 2; p++) {
		if (kern_force(p ? "avx2" : "portable"))
			return;			/* only one on this CPU */
		rng_seed(&r, test_seed());
		for (int i = 0; i < 333; i++) {
			x[p][i] = any(&r, 90);
			y[p][i] = any(&r, 9);
			w[i] = any(&r, 1);
		}
		rmsnorm(n[p], x[p], w, 333, 1e-6f);
		memcpy(s[p], x[p], sizeof(s[p]));
		sum[p] = softmax_exp(s[p], 320);
		silu_mul(x[p], y[p], 333);
	}
	assert_memory_equal(n[0], n[1], sizeof(n[0]));
	assert_memory_equal(s[0], s[1], sizeof(s[0]));
	assert_memory_equal(x[0], x[1], sizeof(x[0]));
	assert_true(sum[0] == sum[1]);
}

static void sigmoid_is_right(void **state)
{
	for (float x = -60; x < 60; x += 0.37f)
		near(sigmoid(x), 1 / (1 + exp(-(double)x)), 1e-6);
}

/* -- positions and numbers ----------------------------------------------------------------- */

static void rope_turns_by_the_position(void **state)
{
	static const uint32_t at[] = { 0, 1, 17, 4095, 131071 };
	float cs[8], sn[8], x[16], was[16];

	for (size_t k = 0; k < sizeof(at) / sizeof(*at); k++) {
		for (int i = 0; i < 16; i++)
			was[i] = x[i] = (float)(i + 1);
		rope_angles(cs, sn, at[k], 8, 10000);
		rope_turn(x, cs, sn, 8);
		for (int i = 0; i < 8; i++) {
			double a = at[k] * pow(10000, -i / 8.0);

			assert_true(fabs(x[i] - (was[i] * cos(a) -
						 was[i + 8] * sin(a))) < 1e-5);
			assert_true(fabs(x[i + 8] - (was[i + 8] * cos(a) +
						     was[i] * sin(a))) < 1e-5);
		}
	}
}

static void bf16_rounds_to_nearest_even(void **state)
{
	static const struct {
		uint32_t	f;
		uint16_t	h;
	} v[] = {
		{ 0x3f800000, 0x3f80 }, { 0x3f808000, 0x3f80 },
		{ 0x3f808001, 0x3f81 }, { 0x3f818000, 0x3f82 },
		{ 0x80000000, 0x8000 }, { 0x7f7fffff, 0x7f80 },
		{ 0x7f800000, 0x7f80 }, { 0xff800000, 0xff80 },
		{ 0x7f800001, 0x7fc0 }, { 0x00008000, 0x0000 },
		{ 0x00018000, 0x0002 },
	};

	for (size_t i = 0; i < sizeof(v) / sizeof(*v); i++) {
		float f;

		memcpy(&f, &v[i].f, 4);
		assert_int_equal(bf16_from(f), v[i].h);
	}
	for (uint32_t h = 0; h < 65536; h++)
		if ((h & 0x7fff) <= 0x7f80)
			assert_int_equal(bf16_from(bf16_to((uint16_t)h)), h);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(product_is_the_plain_sum_and_leaves_other_columns_alone),
		cmocka_unit_test(softmax_is_right_and_masks_exactly),
		cmocka_unit_test(masked_lanes_change_no_bit),
		cmocka_unit_test(silu_is_right_at_any_length),
		cmocka_unit_test(rmsnorm_is_right_at_any_length),
		cmocka_unit_test(instruction_sets_agree_on_rows),
		cmocka_unit_test(sigmoid_is_right),
		cmocka_unit_test(rope_turns_by_the_position),
		cmocka_unit_test(bf16_rounds_to_nearest_even),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
