/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle: the model as one would write it down, a token at a time, over
 * private contiguous arrays. It shares with the paged pass what a sum's order
 * hangs on (rmsnorm, softmax_exp, silu_mul, rope, the rounding to bf16) and the
 * weights; no product, no cache and no attention code.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/weights.h"

/**
 * struct past - what a layer remembers
 * @k, @v:	a row for each position, growing; MLA has @k only
 * @state:	of a linear layer
 */
struct past {
	uint16_t	*k, *v;
	float		*state;
};

/**
 * struct oracle - one sequence
 * @m:		model
 * @pos, @room:	tokens kept, and that fit
 * @past:	by layer
 * @x, @h:	the residual stream and its norm
 * @q, @kv:	of the current token
 * @heads, @out: heads' outputs, and their projection
 * @lat, @acc:	of one head of MLA: its query and output in the latent space
 * @gate, @up:	of the MLP
 * @score:	of one head, @room rounded up to whole lanes
 */
struct oracle {
	const struct model *m;
	uint32_t	pos, room;
	struct past	past[MODEL_MAX_LAYERS];
	float		*x, *h, *q, *kv, *heads, *out, *lat, *acc, *gate, *up;
	float		*score;
};

/* -- little things --------------------------------------------------------------- */

/* y = W x, 16 rows of W at a time, as they lie side by side */
static void mul(float *y, const struct mat *w, const float *x)
{
	for (uint32_t i = 0; i < w->out; i += LANES) {
		const float *p = mat_at(w, i, 0);
		float sum[LANES] = { 0 };

		for (uint32_t k = 0; k < w->in; k++, p += LANES)
			for (int j = 0; j < LANES; j++)
				sum[j] += p[j] * x[k];
		for (uint32_t j = 0; j < LANES && i + j < w->out; j++)
			y[i + j] = sum[j];
	}
}

static void turn(const struct oracle *o, float *x, uint32_t dim)
{
	float cs[512], sn[512];		/* heads have 1024 elements at most */

	rope_angles(cs, sn, o->pos, dim / 2, o->m->c.rope_theta);
	rope_turn(x, cs, sn, dim / 2);
}

static void to_bf16(uint16_t *out, const float *x, size_t n)
{
	for (size_t i = 0; i < n; i++)
		out[i] = bf16_from(x[i]);
}

/*
 * out = sum of softmax(q . k) * v over the positions up to the current one that
 * a window of @window (0: all) sees; rows of @k and @v are @stride apart.
 */
static void look(struct oracle *o, float *out, const float *q,
		 const uint16_t *k, const uint16_t *v, size_t stride,
		 uint32_t dk, uint32_t dv, float scale, uint32_t window)
{
	uint32_t n = o->pos + 1, i, d;
	float sum;

	for (i = 0; i < n; i++) {
		const uint16_t *row = k + i * stride;

		for (sum = 0, d = 0; d < dk; d++)
			sum += bf16_to(row[d]) * q[d];
		o->score[i] = sum * scale;
		if (window && i + window < n)
			o->score[i] = -INFINITY;
	}
	for (; i % LANES; i++)
		o->score[i] = -INFINITY;
	sum = softmax_exp(o->score, i);
	for (d = 0; d < dv; d++)
		out[d] = 0;
	for (i = 0; i < n; i++)
		for (d = 0; d < dv; d++)
			out[d] += o->score[i] * bf16_to(v[i * stride + d]);
	for (d = 0; d < dv; d++)
		out[d] /= sum;
}

/* -- kinds of layers --------------------------------------------------------------- */

static void attn(struct oracle *o, unsigned int l)
{
	const struct model_config *c = &o->m->c;
	const struct layer *w = &o->m->layer[l];
	uint32_t dim = c->head_dim;
	size_t row = (size_t)c->kv_heads * dim;
	uint16_t *k = o->past[l].k, *v = o->past[l].v;

	mul(o->kv, &w->k, o->h);
	for (uint32_t i = 0; i < c->kv_heads; i++)
		turn(o, o->kv + i * dim, dim);
	to_bf16(k + o->pos * row, o->kv, row);
	mul(o->kv, &w->v, o->h);
	to_bf16(v + o->pos * row, o->kv, row);

	mul(o->q, &w->q, o->h);
	for (uint32_t i = 0; i < c->heads; i++) {
		uint32_t of = i * c->kv_heads / c->heads;

		turn(o, o->q + i * dim, dim);
		look(o, o->heads + i * dim, o->q + i * dim, k + of * dim,
		     v + of * dim, row, dim, dim, 1.0f / sqrtf((float)dim),
		     c->kind[l] == LAYER_WINDOW ? c->window : 0);
	}
}

static void mla(struct oracle *o, unsigned int l)
{
	const struct model_config *c = &o->m->c;
	const struct layer *w = &o->m->layer[l];
	uint32_t lora = c->kv_lora_rank, rope = c->qk_rope_dim;
	uint32_t nope = c->qk_nope_dim, row = lora + rope;
	uint16_t *k = o->past[l].k;

	mul(o->kv, &w->kv_a, o->h);
	rmsnorm(o->kv, o->kv, w->kv_norm, lora, c->rms_eps);
	turn(o, o->kv + lora, rope);
	to_bf16(k + (size_t)o->pos * row, o->kv, row);

	mul(o->q, &w->q, o->h);
	for (uint32_t i = 0; i < c->heads; i++) {
		float *q = o->q + i * (nope + rope);

		mul(o->lat, &w->uk[i], q);
		turn(o, q + nope, rope);
		memcpy(o->lat + lora, q + nope, rope * sizeof(*q));
		look(o, o->acc, o->lat, k, k, row, row, lora,
		     1.0f / sqrtf((float)(nope + rope)), 0);
		mul(o->heads + i * c->v_dim, &w->uv[i], o->acc);
	}
}

static void linear(struct oracle *o, unsigned int l)
{
	const struct model_config *c = &o->m->c;
	const struct layer *w = &o->m->layer[l];
	uint32_t dk = c->lin_dk, dv = c->lin_dv;
	float *k = o->kv, *v = k + c->lin_heads * dk;
	float *decay = v + c->lin_heads * dv;

	mul(o->q, &w->q, o->h);
	mul(k, &w->k, o->h);
	mul(v, &w->v, o->h);
	mul(decay, &w->decay, o->h);
	for (uint32_t i = 0; i < c->lin_heads; i++) {
		float *state = o->past[l].state + (size_t)i * dk * dv;
		float *out = o->heads + i * dv;
		float keep = sigmoid(decay[i] + DECAY_BIAS);

		for (uint32_t b = 0; b < dv; b++) {
			out[b] = 0;
			for (uint32_t a = 0; a < dk; a++) {
				float *at = &state[a * dv + b];

				*at = keep * *at + k[i * dk + a] * v[i * dv + b];
				out[b] += o->q[i * dk + a] * *at;
			}
		}
		rmsnorm(out, out, w->lin_norm, dv, c->rms_eps);
	}
}

/* -- a token ------------------------------------------------------------------------ */

static void token(struct oracle *o, uint32_t tok, float *logits)
{
	const struct model *m = o->m;
	const struct model_config *c = &m->c;

	memcpy(o->x, m->embed + (size_t)tok * c->hidden, c->hidden * 4);
	for (unsigned int l = 0; l < c->layers; l++) {
		const struct layer *w = &m->layer[l];

		rmsnorm(o->h, o->x, w->norm1, c->hidden, c->rms_eps);
		if (c->kind[l] == LAYER_MLA)
			mla(o, l);
		else if (c->kind[l] == LAYER_LINEAR)
			linear(o, l);
		else
			attn(o, l);
		mul(o->out, &w->o, o->heads);
		for (uint32_t i = 0; i < c->hidden; i++)
			o->x[i] += o->out[i];

		rmsnorm(o->h, o->x, w->norm2, c->hidden, c->rms_eps);
		mul(o->gate, &w->gate, o->h);
		mul(o->up, &w->up, o->h);
		silu_mul(o->gate, o->up, c->inter);
		mul(o->out, &w->down, o->gate);
		for (uint32_t i = 0; i < c->hidden; i++)
			o->x[i] += o->out[i];
	}
	if (logits) {
		rmsnorm(o->h, o->x, m->norm, c->hidden, c->rms_eps);
		mul(logits, &m->head, o->h);
	}
	o->pos++;
}

/* -- life -------------------------------------------------------------------------- */

static int grow(void *at, size_t bytes)
{
	void *p = realloc(*(void **)at, bytes);

	if (!p)
		return -ENOMEM;
	*(void **)at = p;
	return 0;
}

static int need(struct oracle *o, uint64_t tokens)
{
	const struct model_config *c = &o->m->c;
	uint64_t room = o->room;

	if (tokens <= room)
		return 0;
	while (room < tokens)
		room = room ? room * 2 : 64;
	if (room > UINT32_MAX)
		return -ENOMEM;
	if (grow(&o->score, room * sizeof(*o->score)))
		return -ENOMEM;
	for (unsigned int l = 0; l < c->layers; l++) {
		struct past *p = &o->past[l];
		size_t bytes = (size_t)room * model_kv_bytes(c, l);

		if (c->kind[l] == LAYER_LINEAR)
			continue;
		if (grow(&p->k, bytes) ||
		    (c->kind[l] != LAYER_MLA && grow(&p->v, bytes)))
			return -ENOMEM;
	}
	o->room = (uint32_t)room;
	return 0;
}

static uint32_t max(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

static int oracle_alloc(struct oracle *o)
{
	const struct model_config *c = &o->m->c;
	uint32_t dk = c->lin_heads * c->lin_dk, dv = c->lin_heads * c->lin_dv;
	uint32_t row = c->kv_lora_rank + c->qk_rope_dim;
	uint32_t q = max(max(c->heads * c->head_dim, dk),
			 c->heads * (c->qk_nope_dim + c->qk_rope_dim));
	uint32_t kv = max(max(c->kv_heads * c->head_dim, row),
			  dk + dv + c->lin_heads);
	uint32_t heads = max(max(c->heads * c->head_dim, dv),
			     c->heads * c->v_dim);

	if (grow(&o->x, c->hidden * 4) || grow(&o->h, c->hidden * 4) ||
	    grow(&o->out, c->hidden * 4) || grow(&o->q, q * 4) ||
	    grow(&o->kv, kv * 4) || grow(&o->heads, heads * 4) ||
	    grow(&o->lat, (row + 1) * 4) || grow(&o->acc, (row + 1) * 4) ||
	    grow(&o->gate, c->inter * 4) || grow(&o->up, c->inter * 4))
		return -ENOMEM;
	for (unsigned int l = 0; l < c->layers; l++)
		if (c->kind[l] == LAYER_LINEAR &&
		    grow(&o->past[l].state, model_kv_bytes(c, l)))
			return -ENOMEM;
	return 0;
}

int oracle_create(const struct model *m, struct oracle **ret)
{
	struct oracle *o = calloc(1, sizeof(*o));

	if (!o)
		return -ENOMEM;
	o->m = m;
	if (oracle_alloc(o)) {
		oracle_destroy(o);
		return -ENOMEM;
	}
	oracle_reset(o);
	*ret = o;
	return 0;
}

void oracle_destroy(struct oracle *o)
{
	if (!o)
		return;
	for (unsigned int l = 0; l < MODEL_MAX_LAYERS; l++) {
		free(o->past[l].k);
		free(o->past[l].v);
		free(o->past[l].state);
	}
	free(o->x);
	free(o->h);
	free(o->q);
	free(o->kv);
	free(o->heads);
	free(o->out);
	free(o->lat);
	free(o->acc);
	free(o->gate);
	free(o->up);
	free(o->score);
	free(o);
}

int oracle_run(struct oracle *o, const uint32_t *tok, uint32_t n,
	       float *logits)
{
	for (uint32_t i = 0; i < n; i++)
		if (tok[i] >= o->m->c.vocab)
			return -EINVAL;
	if (need(o, (uint64_t)o->pos + n))
		return -ENOMEM;
	for (uint32_t i = 0; i < n; i++)
		token(o, tok[i], i + 1 == n ? logits : NULL);
	return 0;
}

void oracle_reset(struct oracle *o)
{
	const struct model_config *c = &o->m->c;

	o->pos = 0;
	for (unsigned int l = 0; l < c->layers; l++)
		if (c->kind[l] == LAYER_LINEAR)
			memset(o->past[l].state, 0, model_kv_bytes(c, l));
}

int oracle_truncate(struct oracle *o, uint32_t n)
{
	const struct model_config *c = &o->m->c;

	if (n > o->pos)
		return -EINVAL;
	if (!n) {
		oracle_reset(o);
		return 0;
	}
	for (unsigned int l = 0; l < c->layers && n < o->pos; l++)
		if (c->kind[l] == LAYER_LINEAR)
			return -EINVAL;
	o->pos = n;
	return 0;
}

/* -- its state as bytes ------------------------------------------------------------- */

/**
 * struct state_hdr - what a saved state begins with
 * @model:	fingerprint
 * @bytes:	all of it, this included
 * @body:	digest of what follows
 * @self:	digest of this, up to here
 */
struct state_hdr {
	char		magic[8];
	uint64_t	model;
	uint64_t	bytes;
	uint64_t	ntok;
	uint64_t	body;
	uint64_t	self;
};

static const char state_magic[8] = "oracle1";

/* One word that differs always shows, since each round is a bijection of it. */
static uint64_t digest(uint64_t h, const void *p, size_t len)
{
	const uint8_t *at = p;

	while (len) {
		size_t n = len < 8 ? len : 8;
		uint64_t v = 0;

		memcpy(&v, at, n);
		h = (h ^ v) * UINT64_C(0x9e3779b97f4a7c15);
		h ^= h >> 29;
		at += n;
		len -= n;
	}
	return h;
}

/* Part @i of what @n tokens leave: two for each layer, which may be empty. */
static void *part(const struct oracle *o, unsigned int i, uint64_t n,
		  uint64_t *bytes)
{
	const struct model_config *c = &o->m->c;
	const struct past *p = &o->past[i / 2];
	uint8_t kind = c->kind[i / 2];

	*bytes = model_kv_bytes(c, i / 2);
	if (kind != LAYER_LINEAR)
		*bytes *= n;
	if (i % 2 && (kind == LAYER_LINEAR || kind == LAYER_MLA))
		*bytes = 0;
	return i % 2 ? p->v : kind == LAYER_LINEAR ? (void *)p->state : p->k;
}

static uint64_t state_bytes(const struct oracle *o, uint64_t n)
{
	uint64_t sum = sizeof(struct state_hdr), bytes;

	for (unsigned int i = 0; i < 2 * o->m->c.layers; i++) {
		part(o, i, n, &bytes);
		sum += bytes;
	}
	return sum;
}

uint64_t oracle_state_size(const struct oracle *o)
{
	return state_bytes(o, o->pos);
}

int oracle_save(const struct oracle *o, void *buf, uint64_t len)
{
	struct state_hdr h = {
		.model	= model_fingerprint(o->m),
		.bytes	= oracle_state_size(o),
		.ntok	= o->pos,
	};
	uint8_t *at = (uint8_t *)buf + sizeof(h);
	uint64_t bytes;

	if (len < h.bytes)
		return -EINVAL;
	memcpy(h.magic, state_magic, sizeof(h.magic));
	for (unsigned int i = 0; i < 2 * o->m->c.layers; i++) {
		const void *p = part(o, i, o->pos, &bytes);

		if (!bytes)
			continue;
		h.body = digest(h.body, p, bytes);
		memcpy(at, p, bytes);
		at += bytes;
	}
	h.self = digest(0, &h, offsetof(struct state_hdr, self));
	memcpy(buf, &h, sizeof(h));
	return 0;
}

static int state_check(const struct oracle *o, const struct state_hdr *h,
		       uint64_t len)
{
	if (memcmp(h->magic, state_magic, sizeof(h->magic)))
		return -EINVAL;
	if (h->self != digest(0, h, offsetof(struct state_hdr, self)))
		return -EBADMSG;
	if (h->model != model_fingerprint(o->m) || h->bytes != len ||
	    h->ntok > UINT32_MAX || state_bytes(o, h->ntok) != len)
		return -EINVAL;
	return 0;
}

/*
 * The bytes may be somebody else's memory: what is looked at is what was copied.
 */
int oracle_load(struct oracle *o, const void *buf, uint64_t len, uint32_t *ntok)
{
	const uint8_t *at = (const uint8_t *)buf + sizeof(struct state_hdr);
	struct state_hdr h;
	uint64_t sum = 0, bytes;
	int err;

	oracle_reset(o);
	if (len < sizeof(h))
		return -EINVAL;
	memcpy(&h, buf, sizeof(h));
	err = state_check(o, &h, len);
	if (!err)
		err = need(o, h.ntok);
	if (err)
		return err;
	for (unsigned int i = 0; i < 2 * o->m->c.layers; i++) {
		void *p = part(o, i, h.ntok, &bytes);

		if (!bytes)
			continue;
		memcpy(p, at, bytes);
		sum = digest(sum, p, bytes);
		at += bytes;
	}
	if (sum != h.body) {
		oracle_reset(o);
		return -EBADMSG;
	}
	o->pos = (uint32_t)h.ntok;
	*ntok = o->pos;
	return 0;
}
