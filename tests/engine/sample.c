/* SPDX-License-Identifier: Apache-2.0 */
/* From logits to a token, and to a digest. */
#include <math.h>

#include "ipc/base/rand.h"
#include "tests/engine/model.h"

static uint32_t best_of(const float *logits, uint32_t vocab)
{
	uint32_t best = 0;

	for (uint32_t i = 1; i < vocab; i++)
		if (logits[i] > logits[best])
			best = i;
	return best;
}

uint32_t sample(const float *logits, uint32_t vocab, float temperature,
		uint64_t seed, uint32_t pos)
{
	uint32_t best = best_of(logits, vocab);
	double sum = 0, at;
	struct rng r;

	if (!(temperature > 0))
		return best;
	for (uint32_t i = 0; i < vocab; i++)
		sum += exp(((double)logits[i] - (double)logits[best]) /
			   (double)temperature);
	/* One draw for each position: a rerun from anywhere draws the same. */
	rng_seed(&r, seed ^ (uint64_t)pos << 32 ^ pos);
	at = rng_double(&r) * sum;
	for (uint32_t i = 0; i < vocab; i++) {
		at -= exp(((double)logits[i] - (double)logits[best]) /
			  (double)temperature);
		if (at < 0)
			return i;
	}
	return best;			/* rounding, or logits that are NaN */
}

uint64_t logits_digest(uint64_t h, const float *logits, uint32_t vocab)
{
	uint32_t bits;

	for (uint32_t i = 0; i < vocab; i++) {
		memcpy(&bits, &logits[i], sizeof(bits));
		h ^= bits;
		h = splitmix64(&h);
	}
	return h;
}
