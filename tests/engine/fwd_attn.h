/* SPDX-License-Identifier: Apache-2.0 */
/* fwd_attn.h - heads that look at one row of keys and values. */
#ifndef KVMM_TESTS_ENGINE_FWD_ATTN_H
#define KVMM_TESTS_ENGINE_FWD_ATTN_H

#include "tests/engine/fwd.h"

/**
 * struct heads - query heads that share a key-value head, of one sequence
 * @q, @ldq:	first token's queries, heads side by side; floats from token to
 *		token
 * @out, @ldo:	where outputs go, alike
 * @group:	how many heads
 * @dk, @dv:	elements of a key and a value
 * @scale:	of scores
 * @window:	positions seen, or 0: all
 * @latent:	values are the first @dv elements of keys
 * @place:	of the layer
 * @offset:	of this key-value head in a cached row, bytes
 * @row_bytes:	of a cached row of this rank
 */
struct heads {
	const float	*q;
	size_t		ldq;
	float		*out;
	size_t		ldo;
	uint32_t	group, dk, dv;
	float		scale;
	uint32_t	window;
	bool		latent;
	const struct kv_place *place;
	size_t		offset, row_bytes;
};

/* All of @seq's tokens; -EINVAL: a position has no page. */
int attend(struct fwd_scratch *s, const struct heads *h,
	   const struct fwd_seq *seq);

/* Angles of all tokens of the step, for heads of 2 * @half elements. */
int step_angles(struct step *st, size_t half);

/* The first position that @pos looks at. */
static inline uint32_t first_seen(uint32_t pos, uint32_t window)
{
	return window && pos + 1 > window ? pos + 1 - window : 0;
}

#endif
