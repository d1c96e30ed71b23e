/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The weight table, and random weights.
 *
 * A random weight is a small integer times a power of two. So F32, BF16, F16 and
 * Q8_0 all hold it exactly, and a file of any of them gives the same logits. How
 * far they spread is chosen so that a head looks at few positions, and every
 * layer's output counts in the sum: then one wrong byte of a cache is seen in
 * the logits.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ipc/base/rand.h"
#include "tests/engine/weights.h"

/* Weights of more than this many bytes are refused rather than swapped. */
#define MODEL_MAX_BYTES	(UINT64_C(8) << 30)

/* -- the table -------------------------------------------------------------- */

static void tensor_name(struct tensor *t, int l, const char *name,
			const char *gguf)
{
	if (l < 0) {
		snprintf(t->name, sizeof(t->name), "%s.weight", name);
		snprintf(t->gguf, sizeof(t->gguf), "%s.weight", gguf);
	} else {
		snprintf(t->name, sizeof(t->name), "model.layers.%d.%s.weight",
			 l, name);
		snprintf(t->gguf, sizeof(t->gguf), "blk.%d.%s.weight", l, gguf);
	}
}

/* What is noted of a kind of tensor; each of a layer's is one entry. */
struct entry {
	const char	*name, *gguf;
	float		gain;
	uint32_t	rows, cols;
	uint32_t	turned;
	float		**flat;		/* or */
	struct mat	*mat;		/* or kv_b */
};

#define MAX_ENTRIES	16

static unsigned int attn_entries(const struct model_config *c, struct layer *w,
				 struct entry *e)
{
	uint32_t dim = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
	struct entry *p = e;

	*p++ = (struct entry){ "self_attn.q_proj", "attn_q", 1.5f, dim,
			       c->hidden, c->head_dim, .mat = &w->q };
	*p++ = (struct entry){ "self_attn.k_proj", "attn_k", 1.0f, kv,
			       c->hidden, c->head_dim, .mat = &w->k };
	*p++ = (struct entry){ "self_attn.v_proj", "attn_v", 1.0f, kv,
			       c->hidden, .mat = &w->v };
	*p++ = (struct entry){ "self_attn.o_proj", "attn_output", 1.0f,
			       c->hidden, dim, .mat = &w->o };
	return (unsigned int)(p - e);
}

static unsigned int mla_entries(const struct model_config *c, struct layer *w,
				struct entry *e)
{
	uint32_t rope = c->qk_rope_dim, nope = c->qk_nope_dim;
	struct entry *p = e;

	*p++ = (struct entry){ "self_attn.q_proj", "attn_q", 1.5f,
			       c->heads * (nope + rope), c->hidden,
			       .mat = &w->q };
	*p++ = (struct entry){ "self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa",
			       1.0f, c->kv_lora_rank + rope, c->hidden,
			       .mat = &w->kv_a };
	*p++ = (struct entry){ "self_attn.kv_a_layernorm", "attn_kv_a_norm", 0,
			       1, c->kv_lora_rank, .flat = &w->kv_norm };
	*p++ = (struct entry){ "self_attn.kv_b_proj", "attn_kv_b", 1.0f,
			       c->heads * (nope + c->v_dim), c->kv_lora_rank };
	*p++ = (struct entry){ "self_attn.o_proj", "attn_output", 1.0f,
			       c->hidden, c->heads * c->v_dim, .mat = &w->o };
	return (unsigned int)(p - e);
}

/* Names of our own: no published layer is as plain as this one. */
static unsigned int linear_entries(const struct model_config *c,
				   struct layer *w, struct entry *e)
{
	uint32_t dk = c->lin_heads * c->lin_dk, dv = c->lin_heads * c->lin_dv;
	struct entry *p = e;

	*p++ = (struct entry){ "linear_attn.q_proj", "lin_q", 1.0f, dk,
			       c->hidden, .mat = &w->q };
	*p++ = (struct entry){ "linear_attn.k_proj", "lin_k", 1.0f, dk,
			       c->hidden, .mat = &w->k };
	*p++ = (struct entry){ "linear_attn.v_proj", "lin_v", 1.0f, dv,
			       c->hidden, .mat = &w->v };
	*p++ = (struct entry){ "linear_attn.decay_proj", "lin_decay", 1.0f,
			       c->lin_heads, c->hidden, .mat = &w->decay };
	*p++ = (struct entry){ "linear_attn.norm", "lin_norm", 0, 1, c->lin_dv,
			       .flat = &w->lin_norm };
	*p++ = (struct entry){ "linear_attn.out_proj", "lin_out", 1.0f,
			       c->hidden, dv, .mat = &w->o };
	return (unsigned int)(p - e);
}

static unsigned int layer_entries(const struct model_config *c,
				  unsigned int l, struct layer *w,
				  struct entry *e)
{
	struct entry *p = e;

	*p++ = (struct entry){ "input_layernorm", "attn_norm", 0, 1, c->hidden,
			       .flat = &w->norm1 };
	switch (c->kind[l]) {
	case LAYER_MLA:
		p += mla_entries(c, w, p);
		break;
	case LAYER_LINEAR:
		p += linear_entries(c, w, p);
		break;
	default:
		p += attn_entries(c, w, p);
	}
	*p++ = (struct entry){ "post_attention_layernorm", "ffn_norm", 0, 1,
			       c->hidden, .flat = &w->norm2 };
	*p++ = (struct entry){ "mlp.gate_proj", "ffn_gate", 1.5f, c->inter,
			       c->hidden, .mat = &w->gate };
	*p++ = (struct entry){ "mlp.up_proj", "ffn_up", 1.0f, c->inter,
			       c->hidden, .mat = &w->up };
	*p++ = (struct entry){ "mlp.down_proj", "ffn_down", 1.0f, c->hidden,
			       c->inter, .mat = &w->down };
	return (unsigned int)(p - e);
}

static unsigned int outer_entries(struct model *m, struct entry *e)
{
	const struct model_config *c = &m->c;
	struct entry *p = e;

	*p++ = (struct entry){ "model.embed_tokens", "token_embd",
			       sqrtf((float)c->hidden), c->vocab, c->hidden,
			       .flat = &m->embed };
	*p++ = (struct entry){ "model.norm", "output_norm", 0, 1, c->hidden,
			       .flat = &m->norm };
	if (!c->tie_embeddings)
		*p++ = (struct entry){ "lm_head", "output", 3.0f, c->vocab,
				       c->hidden, .mat = &m->head };
	return (unsigned int)(p - e);
}

bool model_tensor(struct model *m, unsigned int i, struct tensor *t)
{
	struct entry e[MAX_ENTRIES];
	unsigned int nr = outer_entries(m, e);
	struct layer *w = NULL;
	int l = -1;

	while (i >= nr) {
		i -= nr;
		if (++l == (int)m->c.layers)
			return false;
		w = &m->layer[l];
		nr = layer_entries(&m->c, (unsigned int)l, w, e);
	}
	*t = (struct tensor){
		.rows = e[i].rows, .cols = e[i].cols, .gain = e[i].gain,
		.vector = e[i].gain == 0, .turned = e[i].turned,
		.mat = e[i].mat, .l = w,
		.flat = e[i].flat ? *e[i].flat : NULL,
		.at = e[i].flat ? TENSOR_FLAT :
		      e[i].mat ? TENSOR_MAT : TENSOR_KV_B,
	};
	tensor_name(t, l, e[i].name, e[i].gguf);
	return true;
}

/* -- rows -------------------------------------------------------------------- */

void tensor_set_row(struct model *m, const struct tensor *t, uint32_t row,
		    const float *val)
{
	uint32_t nope = m->c.qk_nope_dim, dim = nope + m->c.v_dim;
	const struct mat *w = t->mat;

	switch (t->at) {
	case TENSOR_FLAT:
		memcpy(t->flat + (size_t)row * t->cols, val, t->cols * 4);
		if (t->flat != m->embed || !m->c.tie_embeddings)
			return;
		w = &m->head;
		break;
	case TENSOR_MAT:
		break;
	case TENSOR_KV_B:
		if (row % dim < nope) {
			/* Applied to a query, so it is kept transposed. */
			for (uint32_t i = 0; i < t->cols; i++)
				*mat_at(&t->l->uk[row / dim], i, row % dim) =
					val[i];
			return;
		}
		w = &t->l->uv[row / dim];
		row = row % dim - nope;
		break;
	}
	for (uint32_t i = 0; i < t->cols; i++)
		*mat_at(w, row, i) = val[i];
}

void tensor_get_row(const struct model *m, const struct tensor *t,
		    uint32_t row, float *val)
{
	uint32_t nope = m->c.qk_nope_dim, dim = nope + m->c.v_dim;

	for (uint32_t i = 0; i < t->cols; i++) {
		if (t->at == TENSOR_FLAT)
			val[i] = t->flat[(size_t)row * t->cols + i];
		else if (t->at == TENSOR_MAT)
			val[i] = *mat_at(t->mat, row, i);
		else if (row % dim < nope)
			val[i] = *mat_at(&t->l->uk[row / dim], i, row % dim);
		else
			val[i] = *mat_at(&t->l->uv[row / dim],
					 row % dim - nope, i);
	}
}

/* -- memory ------------------------------------------------------------------ */

/* Gives out @m->floats, or only counts while there is none. */
struct layout {
	float		*base;
	uint64_t	used;
};

static float *take(struct layout *a, uint64_t floats)
{
	float *p = a->base ? a->base + a->used : NULL;

	a->used += round_up(floats, LANES);
	return p;
}

static void take_mat(struct layout *a, struct mat *w, uint32_t out, uint32_t in)
{
	*w = (struct mat){ .out = out, .in = in };
	w->p = take(a, (uint64_t)mat_floats(w));
}

static void layout_entries(struct model *m, struct layout *a, struct entry *e,
			   unsigned int nr, struct layer *w)
{
	const struct model_config *c = &m->c;

	for (unsigned int i = 0; i < nr; i++) {
		if (e[i].flat) {
			*e[i].flat = take(a, (uint64_t)e[i].rows * e[i].cols);
		} else if (e[i].mat) {
			take_mat(a, e[i].mat, e[i].rows, e[i].cols);
		} else {
			for (uint32_t h = 0; h < c->heads; h++) {
				take_mat(a, &w->uk[h], c->kv_lora_rank,
					 c->qk_nope_dim);
				take_mat(a, &w->uv[h], c->v_dim,
					 c->kv_lora_rank);
			}
		}
	}
}

static uint64_t model_layout(struct model *m, float *base)
{
	struct layout a = { .base = base };
	struct entry e[MAX_ENTRIES];

	layout_entries(m, &a, e, outer_entries(m, e), NULL);
	if (m->c.tie_embeddings)
		take_mat(&a, &m->head, m->c.vocab, m->c.hidden);
	for (unsigned int l = 0; l < m->c.layers; l++) {
		struct layer *w = &m->layer[l];

		if (m->c.kind[l] == LAYER_MLA) {
			w->uk = m->mla + (size_t)l * 2 * m->c.heads;
			w->uv = w->uk + m->c.heads;
		}
		layout_entries(m, &a, e, layer_entries(&m->c, l, w, e), w);
	}
	return a.used;
}

int model_alloc(const struct model_config *c, struct model **ret)
{
	struct model *m;
	char why[160];
	uint64_t n;
	int err;

	err = model_config_check(c, why, sizeof(why));
	if (err)
		return err;
	m = calloc(1, sizeof(*m));
	if (!m)
		return -ENOMEM;
	m->c = *c;
	m->mla = calloc((size_t)c->layers * 2 * c->heads, sizeof(*m->mla));
	if (!m->mla)
		goto nomem;
	n = model_layout(m, NULL);
	if (n > MODEL_MAX_BYTES / 4)
		goto nomem;
	m->nr_floats = n;
	/* Cache lines hold whole panels' rows; the padding stays 0. */
	m->floats = aligned_alloc(64, n * 4);
	if (!m->floats)
		goto nomem;
	memset(m->floats, 0, n * 4);
	model_layout(m, m->floats);
	*ret = m;
	return 0;

nomem:
	model_destroy(m);
	return -ENOMEM;
}

void model_destroy(struct model *m)
{
	if (!m)
		return;
	free(m->floats);
	free(m->mla);
	free(m);
}

const struct model_config *model_config_of(const struct model *m)
{
	return &m->c;
}

/* -- random weights ----------------------------------------------------------- */

static uint64_t mix(uint64_t h, uint64_t v)
{
	h ^= v;
	return splitmix64(&h);
}

static uint64_t mix_str(uint64_t h, const char *s)
{
	while (*s)
		h = mix(h, (unsigned char)*s++);
	return h;
}

/* k * 2^e with |k| <= 127, whose standard deviation is about @gain / sqrt(n) */
static float step_of(float gain, uint32_t n)
{
	float want = gain / sqrtf((float)n) / 73.6f;

	return exp2f(roundf(log2f(want)));
}

static void tensor_random(struct model *m, const struct tensor *t,
			  uint64_t seed, float *row)
{
	float step = t->gain > 0 ? step_of(t->gain, t->cols) : 0;
	struct rng r;

	/* By name: what a tensor holds does not hang on which others there are. */
	rng_seed(&r, mix_str(seed, t->name));
	for (uint32_t i = 0; i < t->rows; i++) {
		for (uint32_t k = 0; k < t->cols; k++) {
			uint32_t v = (uint32_t)(rng_next(&r) >> 33);

			if (step > 0)
				row[k] = step * ((float)(v % 255) - 127.0f);
			else
				row[k] = 1.0f + ((float)(v % 33) - 16.0f) / 64;
		}
		tensor_set_row(m, t, i, row);
	}
}

int model_create(const struct model_config *c, uint64_t seed,
		 struct model **ret)
{
	struct tensor t;
	struct model *m;
	float *row;
	int err;

	err = model_alloc(c, &m);
	if (err)
		return err;
	for (unsigned int i = 0; model_tensor(m, i, &t); i++) {
		row = malloc(t.cols * sizeof(*row));
		if (!row) {
			model_destroy(m);
			return -ENOMEM;
		}
		tensor_random(m, &t, seed, row);
		free(row);
	}
	model_seal(m);
	*ret = m;
	return 0;
}

/* -- fingerprint --------------------------------------------------------------- */

static uint64_t config_mix(uint64_t h, const struct model_config *c)
{
	const uint32_t v[] = {
		c->vocab, c->hidden, c->inter, c->layers, c->heads, c->kv_heads,
		c->head_dim, c->window, c->kv_lora_rank, c->qk_rope_dim,
		c->qk_nope_dim, c->v_dim, c->lin_heads, c->lin_dk, c->lin_dv,
		c->tie_embeddings,
	};
	uint32_t bits[2];

	for (size_t i = 0; i < sizeof(v) / sizeof(*v); i++)
		h = mix(h, v[i]);
	memcpy(&bits[0], &c->rope_theta, 4);
	memcpy(&bits[1], &c->rms_eps, 4);
	h = mix(mix(h, bits[0]), bits[1]);
	for (unsigned int l = 0; l < c->layers; l++)
		h = mix(h, c->kind[l]);
	return h;
}

void model_seal(struct model *m)
{
	uint64_t h = config_mix(0, &m->c), v;

	for (size_t i = 0; i < m->nr_floats; i += 2) {
		memcpy(&v, m->floats + i, 8);
		/* Not mix(): its latency would be felt over many weights. */
		h = (h ^ v) * UINT64_C(0x9e3779b97f4a7c15);
		h ^= h >> 29;
	}
	m->fingerprint = mix(h, m->nr_floats);
}

uint64_t model_fingerprint(const struct model *m)
{
	return m->fingerprint;
}
