/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shapes: the built-in ones, which of them can be computed, and what they cache.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tests/engine/model.h"

#define F	LAYER_FULL
#define W	LAYER_WINDOW
#define M	LAYER_MLA
#define L	LAYER_LINEAR

/*
 * A token is a byte; 256 and up are for marks of an engine. The tiny shapes have
 * heads * head_dim != hidden, and windows that are no multiple of any block.
 */
#define TINY	.vocab = 272, .hidden = 64, .inter = 112, .rope_theta = 1e4f, \
		.rms_eps = 1e-5f
#define HEADS(h, kv, d)	.heads = h, .kv_heads = kv, .head_dim = d

static const struct model_config named[] = {
	{ .name = "mha", TINY, HEADS(4, 4, 32), .layers = 2, .kind = { F, F } },
	{ .name = "gqa", TINY, HEADS(8, 4, 32), .layers = 2, .kind = { F, F } },
	{ .name = "mqa", TINY, HEADS(4, 1, 32), .layers = 2, .kind = { F, F },
	  .tie_embeddings = true },
	{ .name = "mla", TINY, HEADS(4, 4, 32), .layers = 2, .kind = { M, M },
	  .kv_lora_rank = 48, .qk_rope_dim = 16, .qk_nope_dim = 24,
	  .v_dim = 20 },
	{ .name = "window", TINY, HEADS(8, 4, 32), .window = 40, .layers = 4,
	  .kind = { W, F, W, F } },
	{ .name = "linear", TINY, HEADS(8, 4, 32), .lin_heads = 4, .lin_dk = 16,
	  .lin_dv = 32, .layers = 4, .kind = { L, L, L, F } },
	/* About 25 million weights; 8 KiB of keys and values a token. */
	{ .name = "bench", .vocab = 272, .hidden = 512, .inter = 1536,
	  HEADS(8, 4, 64), .rope_theta = 1e5f, .rms_eps = 1e-5f, .layers = 8,
	  .kind = { F, F, F, F, F, F, F, F } },
};

int model_config_named(struct model_config *c, const char *name)
{
	for (size_t i = 0; i < sizeof(named) / sizeof(*named); i++)
		if (!strcmp(named[i].name, name)) {
			*c = named[i];
			return 0;
		}
	return -ENOENT;
}

/* -- what can be computed ----------------------------------------------------- */

/* Wide enough for what is published, and no product of two overflows 32 bits. */
#define MAX_DIM		(1U << 16)
#define MAX_HEADS	1024
#define MAX_HEAD_DIM	1024

static int bad(char *why, size_t len, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
static int bad(char *why, size_t len, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, len, fmt, ap);
	va_end(ap);
	return -EINVAL;
}

struct range {
	const char	*name;
	uint32_t	val, min, max;
};

static int check_ranges(const struct range *r, size_t nr, char *why, size_t len)
{
	for (; nr--; r++)
		if (r->val < r->min || r->val > r->max)
			return bad(why, len, "%s is %u, not %u to %u", r->name,
				   r->val, r->min, r->max);
	return 0;
}

static bool has(const struct model_config *c, enum layer_kind kind)
{
	for (unsigned int l = 0; l < c->layers; l++)
		if (c->kind[l] == kind)
			return true;
	return false;
}

static int check_attn(const struct model_config *c, char *why, size_t len)
{
	const struct range r[] = {
		{ "num_key_value_heads", c->kv_heads, 1, c->heads },
		{ "head_dim", c->head_dim, 2, MAX_HEAD_DIM },
	};
	int err = check_ranges(r, 2, why, len);

	if (err)
		return err;
	if (c->heads % c->kv_heads)
		return bad(why, len, "num_key_value_heads is %u, which does not divide num_attention_heads, %u",
			   c->kv_heads, c->heads);
	if (c->head_dim % 2)
		return bad(why, len, "head_dim is %u: RoPE turns pairs",
			   c->head_dim);
	if (has(c, LAYER_WINDOW) && (!c->window || c->window > 1U << 30))
		return bad(why, len, "sliding_window is %u, but there are sliding layers",
			   c->window);
	return 0;
}

static int check_mla(const struct model_config *c, char *why, size_t len)
{
	const struct range r[] = {
		{ "kv_lora_rank", c->kv_lora_rank, 1, 4096 },
		{ "qk_rope_head_dim", c->qk_rope_dim, 2, MAX_HEAD_DIM },
		{ "qk_nope_head_dim", c->qk_nope_dim, 1, MAX_HEAD_DIM },
		{ "v_head_dim", c->v_dim, 1, MAX_HEAD_DIM },
	};
	int err = check_ranges(r, 4, why, len);

	if (err)
		return err;
	if (c->qk_rope_dim % 2)
		return bad(why, len, "qk_rope_head_dim is %u: RoPE turns pairs",
			   c->qk_rope_dim);
	return 0;
}

static int check_linear(const struct model_config *c, char *why, size_t len)
{
	const struct range r[] = {
		{ "linear_num_value_heads", c->lin_heads, 1, MAX_HEADS },
		{ "linear_key_head_dim", c->lin_dk, 1, MAX_HEAD_DIM },
		{ "linear_value_head_dim", c->lin_dv, 1, MAX_HEAD_DIM },
	};

	int err = check_ranges(r, 3, why, len);

	if (err)
		return err;
	if ((uint64_t)c->lin_heads * c->lin_dk * c->lin_dv > 1U << 28)
		return bad(why, len, "linear_num_value_heads * linear_key_head_dim * linear_value_head_dim: a state of more than 1 GiB");
	return 0;
}

int model_config_check(const struct model_config *c, char *why, size_t len)
{
	const struct range r[] = {
		{ "vocab_size", c->vocab, 2, 1U << 21 },
		{ "hidden_size", c->hidden, 1, MAX_DIM },
		{ "intermediate_size", c->inter, 1, 1U << 20 },
		{ "num_hidden_layers", c->layers, 1, MODEL_MAX_LAYERS },
		{ "num_attention_heads", c->heads, 1, MAX_HEADS },
	};
	int err = check_ranges(r, 5, why, len);

	if (err)
		return err;
	if (!(c->rope_theta >= 1 && c->rope_theta <= 1e12f))
		return bad(why, len, "rope_theta is %g, not 1 to 1e12",
			   (double)c->rope_theta);
	if (!(c->rms_eps > 0 && c->rms_eps < 1))
		return bad(why, len, "rms_norm_eps is %g, not between 0 and 1",
			   (double)c->rms_eps);
	for (unsigned int l = 0; l < c->layers; l++)
		if (c->kind[l] > LAYER_LINEAR)
			return bad(why, len, "layer %u is of no kind", l);
	if (has(c, LAYER_FULL) || has(c, LAYER_WINDOW))
		err = check_attn(c, why, len);
	if (!err && has(c, LAYER_MLA))
		err = check_mla(c, why, len);
	if (!err && has(c, LAYER_LINEAR))
		err = check_linear(c, why, len);
	return err;
}

/* -- what is cached ------------------------------------------------------------ */

uint32_t model_kv_bytes(const struct model_config *c, unsigned int l)
{
	switch (c->kind[l]) {
	case LAYER_MLA:
		return (c->kv_lora_rank + c->qk_rope_dim) * 2;
	case LAYER_LINEAR:
		return c->lin_heads * c->lin_dk * c->lin_dv * 4;
	default:
		return c->kv_heads * c->head_dim * 2;
	}
}

bool model_kv_striped(const struct model_config *c, unsigned int l)
{
	switch (c->kind[l]) {
	case LAYER_MLA:
		return false;
	case LAYER_LINEAR:
		return true;
	default:
		return c->kv_heads > 1;
	}
}
