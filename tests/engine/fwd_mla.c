/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MLA: what is cached of a position is one latent row that all heads share, with
 * one rotated key behind it. A head's query is taken to the latent space instead
 * of the keys out of it ("absorbed"), so attention is that of many heads with one
 * key-value head, whose values are the latent part of its keys.
 *
 * Latent rows are the same for all heads, so every rank computes and keeps all.
 */
#include <errno.h>
#include <math.h>

#include "tests/engine/fwd.h"
#include "tests/engine/fwd_attn.h"

static int store_latent(struct step *st, unsigned int l,
			const struct fwd_seq *seq, size_t row, uint32_t t)
{
	const struct model_config *c = step_config(st);
	const struct kv_place *p = &st->f->place[l];
	size_t half = c->qk_rope_dim / 2, n = c->kv_lora_rank + 2 * half;
	float *k = st->s->k.p + row * n;
	uint16_t *kr = (uint16_t *)place_row(p, p->k, p->k_stride,
					     seq->table[p->table_ix],
					     seq->pos + t, n * 2);

	if (!kr)
		return -EINVAL;
	rmsnorm(k, k, st->f->m->layer[l].kv_norm, c->kv_lora_rank, c->rms_eps);
	rope_turn(k + c->kv_lora_rank, st->s->cs.p + row * half,
		  st->s->sn.p + row * half, half);
	for (size_t i = 0; i < n; i++)
		kr[i] = bf16_from(k[i]);
	return 0;
}

/* Queries of this rank's heads, [token][head][kv_lora_rank + rope], into s->v. */
static void latent_queries(struct step *st, const struct layer *w,
			   uint32_t first, uint32_t heads)
{
	const struct model_config *c = step_config(st);
	struct fwd_scratch *s = st->s;
	size_t dim = c->qk_nope_dim + c->qk_rope_dim, half = c->qk_rope_dim / 2;
	size_t dk = c->kv_lora_rank + c->qk_rope_dim;

	for (uint32_t i = 0; i < heads; i++) {
		const float *q = s->q.p + (first + i) * dim;
		const struct mat *uk = &w->uk[first + i];

		product(&(struct product){
			.y = s->v.p + i * dk, .ldy = heads * dk,
			.x = q, .ldx = c->heads * dim, .rows = st->rows,
			.w = uk->p, .ldw = (size_t)uk->in * LANES, .k = uk->in,
			.lo = 0, .hi = uk->out });
		for (size_t r = 0; r < st->rows; r++) {
			float *rot = s->v.p + (r * heads + i) * dk +
				     c->kv_lora_rank;

			memcpy(rot, q + r * c->heads * dim + c->qk_nope_dim,
			       c->qk_rope_dim * 4);
			rope_turn(rot, s->cs.p + r * half, s->sn.p + r * half,
				  half);
		}
	}
}

int step_mla(struct step *st, unsigned int l)
{
	const struct model_config *c = step_config(st);
	const struct layer *w = &st->f->m->layer[l];
	struct fwd_scratch *s = st->s;
	uint32_t heads = c->heads / st->f->world, first = heads * st->f->rank;
	size_t dim = c->qk_nope_dim + c->qk_rope_dim;
	size_t dk = c->kv_lora_rank + c->qk_rope_dim, row = 0;
	size_t odim = (size_t)c->heads * c->v_dim;
	struct heads h = {
		.ldq = heads * dk, .ldo = (size_t)heads * c->kv_lora_rank,
		.group = heads, .dk = (uint32_t)dk, .dv = c->kv_lora_rank,
		.scale = 1.0f / sqrtf((float)dim), .latent = true,
		.place = &st->f->place[l], .row_bytes = dk * 2,
	};
	int err = 0;

	/* s->up is free until the MLP: heads' outputs in the latent space. */
	if (fbuf_need(&s->q, st->rows * c->heads * dim) ||
	    fbuf_need(&s->k, st->rows * dk) ||
	    fbuf_need(&s->v, st->rows * heads * dk) ||
	    fbuf_need(&s->up, st->rows * h.ldo) ||
	    fbuf_need(&s->att, st->rows * odim) ||
	    step_angles(st, c->qk_rope_dim / 2))
		return -ENOMEM;
	step_product(st, s->k.p, s->h.p, st->rows, &w->kv_a, 0, dk);
	step_product(st, s->q.p, s->h.p, st->rows, &w->q, first * dim,
		     (first + heads) * dim);
	latent_queries(st, w, first, heads);
	for (unsigned int i = 0; i < st->nr && !err; i++) {
		for (uint32_t t = 0; t < st->seq[i].n && !err; t++)
			err = store_latent(st, l, &st->seq[i], row + t, t);
		row += st->seq[i].n;
	}
	row = 0;
	for (unsigned int i = 0; i < st->nr && !err; i++) {
		h.q = s->v.p + row * h.ldq;
		h.out = s->up.p + row * h.ldo;
		err = attend(s, &h, &st->seq[i]);
		row += st->seq[i].n;
	}
	if (err)
		return err;
	for (uint32_t i = 0; i < heads; i++)
		product(&(struct product){
			.y = s->att.p + (first + i) * c->v_dim, .ldy = odim,
			.x = s->up.p + (size_t)i * c->kv_lora_rank,
			.ldx = h.ldo, .rows = st->rows, .w = w->uv[first + i].p,
			.ldw = (size_t)c->kv_lora_rank * LANES,
			.k = c->kv_lora_rank, .lo = 0, .hi = c->v_dim });
	return step_share(st, s->att.p, st->rows, odim, (size_t)first * c->v_dim,
			  (size_t)(first + heads) * c->v_dim);
}
