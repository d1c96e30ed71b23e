/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Linear attention with decay: a head keeps a state S[dk][dv] instead of keys and
 * values. A token makes it S = g * S + k v^T, with a gate g in (0, 1) of its own,
 * and reads q^T S. Tokens go one by one, so chunks cannot matter.
 */
#include <errno.h>
#include <math.h>

#include "tests/engine/fwd.h"

/* One token of one head: update @s, leave q^T S in @out. */
static void head_step(float *s, const float *q, const float *k, const float *v,
		      float g, float *out, uint32_t dk, uint32_t dv)
{
	memset(out, 0, dv * sizeof(*out));
	for (uint32_t i = 0; i < dk; i++, s += dv)
		for (uint32_t j = 0; j < dv; j++) {
			s[j] = g * s[j] + k[i] * v[j];
			out[j] += q[i] * s[j];
		}
}

static int linear_seq(struct step *st, unsigned int l, const struct fwd_seq *seq,
		      size_t row, uint32_t first, uint32_t heads)
{
	const struct model_config *c = step_config(st);
	const struct kv_place *p = &st->f->place[l];
	int32_t page = seq->table[p->table_ix][0];
	uint32_t dk = c->lin_dk, dv = c->lin_dv, all = c->lin_heads;
	struct fwd_scratch *s = st->s;
	float *state;

	if (page <= 0)
		return -EINVAL;
	state = (float *)(p->k + (size_t)page * p->k_stride);
	if (!seq->pos)
		memset(state, 0, (size_t)heads * dk * dv * sizeof(*state));
	for (uint32_t t = 0; t < seq->n; t++, row++)
		for (uint32_t h = first; h < first + heads; h++) {
			float *out = s->att.p + (row * all + h) * dv;

			head_step(state + (size_t)(h - first) * dk * dv,
				  s->q.p + (row * all + h) * dk,
				  s->k.p + (row * all + h) * dk,
				  s->v.p + (row * all + h) * dv,
				  sigmoid(s->gate.p[row * all + h] + DECAY_BIAS),
				  out, dk, dv);
			rmsnorm(out, out, st->f->m->layer[l].lin_norm, dv,
				c->rms_eps);
		}
	return 0;
}

int step_linear(struct step *st, unsigned int l)
{
	const struct model_config *c = step_config(st);
	const struct layer *w = &st->f->m->layer[l];
	struct fwd_scratch *s = st->s;
	uint32_t heads = c->lin_heads / st->f->world;
	uint32_t first = heads * st->f->rank, end = first + heads;
	size_t kdim = (size_t)c->lin_heads * c->lin_dk;
	size_t vdim = (size_t)c->lin_heads * c->lin_dv, row = 0;
	int err;

	if (fbuf_need(&s->q, st->rows * kdim) ||
	    fbuf_need(&s->k, st->rows * kdim) ||
	    fbuf_need(&s->v, st->rows * vdim) ||
	    fbuf_need(&s->gate, st->rows * c->lin_heads) ||
	    fbuf_need(&s->att, st->rows * vdim))
		return -ENOMEM;
	step_product(st, s->q.p, s->h.p, st->rows, &w->q,
		     (size_t)first * c->lin_dk, (size_t)end * c->lin_dk);
	step_product(st, s->k.p, s->h.p, st->rows, &w->k,
		     (size_t)first * c->lin_dk, (size_t)end * c->lin_dk);
	step_product(st, s->v.p, s->h.p, st->rows, &w->v,
		     (size_t)first * c->lin_dv, (size_t)end * c->lin_dv);
	step_product(st, s->gate.p, s->h.p, st->rows, &w->decay, first, end);
	for (unsigned int i = 0; i < st->nr; i++) {
		err = linear_seq(st, l, &st->seq[i], row, first, heads);
		if (err)
			return err;
		row += st->seq[i].n;
	}
	return step_share(st, s->att.p, st->rows, vdim,
			  (size_t)first * c->lin_dv, (size_t)end * c->lin_dv);
}
