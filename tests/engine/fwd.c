/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward pass of one rank: norms, projections, the MLP and the output, for
 * all tokens of a step together. What differs by kind of layer is in fwd_attn.c,
 * fwd_mla.c and fwd_linear.c.
 */
#include <errno.h>
#include <stdlib.h>

#include "tests/engine/fwd.h"
#include "tests/engine/pool.h"

int fbuf_need(struct fbuf *b, size_t n)
{
	float *p;

	if (b->n >= n)
		return 0;
	n = round_up(n + n / 4, LANES);
	p = aligned_alloc(64, n * sizeof(*p));
	if (!p)
		return -ENOMEM;
	/* Nothing is kept: buffers live for a step. */
	free(b->p);
	*b = (struct fbuf){ p, n };
	return 0;
}

uint8_t *place_row(const struct kv_place *p, uint8_t *base, size_t stride,
		   const int32_t *table, uint32_t pos, size_t row_bytes)
{
	int32_t page = table[pos / p->block_tokens];

	if (page <= 0)
		return NULL;
	return base + (size_t)page * stride + pos % p->block_tokens * row_bytes;
}

/* -- products over threads and ranks ------------------------------------------ */

struct product_job {
	struct product	p;
	unsigned int	parts;
};

static void product_part(void *arg, unsigned int part)
{
	const struct product_job *j = arg;
	struct product p = j->p;
	size_t first = p.lo / LANES, panels = (p.hi + LANES - 1) / LANES - first;

	/* Cut between panels, so that no two parts write one vector. */
	if (part)
		p.lo = (first + panels * part / j->parts) * LANES;
	if (part + 1 < j->parts)
		p.hi = (first + panels * (part + 1) / j->parts) * LANES;
	if (p.lo < p.hi)
		product(&p);
}

void step_product(struct step *st, float *y, const float *x, size_t rows,
		  const struct mat *w, size_t lo, size_t hi)
{
	struct product_job j = {
		.p = { .y = y, .ldy = w->out, .x = x, .ldx = w->in,
		       .rows = rows, .w = w->p, .ldw = (size_t)w->in * LANES,
		       .k = w->in, .lo = lo, .hi = hi },
		.parts = st->s->pool ? st->f->threads : 1,
	};

	if (j.parts > 1)
		pool_run(st->s->pool, product_part, &j, j.parts);
	else
		product(&j.p);
}

int step_share(struct step *st, float *buf, size_t rows, size_t dim, size_t lo,
	       size_t hi)
{
	if (st->f->world == 1)
		return 0;
	return st->f->share(st->f->arg, buf, rows, dim, lo, hi);
}

int step_project(struct step *st, float *y, const float *x, size_t rows,
		 const struct mat *w)
{
	const struct fwd *f = st->f;
	size_t lo = (size_t)w->out * f->rank / f->world;
	size_t hi = (size_t)w->out * (f->rank + 1) / f->world;

	step_product(st, y, x, rows, w, lo, hi);
	return step_share(st, y, rows, w->out, lo, hi);
}

/* -- a layer -------------------------------------------------------------------- */

static void add(float *x, const float *y, size_t n)
{
	for (size_t i = 0; i < n; i++)
		x[i] += y[i];
}

static void norm_rows(struct step *st, const float *w)
{
	const struct model_config *c = step_config(st);

	for (size_t r = 0; r < st->rows; r++)
		rmsnorm(st->s->h.p + r * c->hidden, st->s->x.p + r * c->hidden,
			w, c->hidden, c->rms_eps);
}

static int step_mlp(struct step *st, const struct layer *w)
{
	const struct model_config *c = step_config(st);
	const struct fwd *f = st->f;
	struct fwd_scratch *s = st->s;
	size_t lo = (size_t)c->inter * f->rank / f->world;
	size_t hi = (size_t)c->inter * (f->rank + 1) / f->world;
	int err;

	step_product(st, s->gate.p, s->h.p, st->rows, &w->gate, lo, hi);
	step_product(st, s->up.p, s->h.p, st->rows, &w->up, lo, hi);
	for (size_t r = 0; r < st->rows; r++)
		silu_mul(s->gate.p + r * c->inter + lo,
			 s->up.p + r * c->inter + lo, hi - lo);
	err = step_share(st, s->gate.p, st->rows, c->inter, lo, hi);
	if (err)
		return err;
	return step_project(st, s->tmp.p, s->gate.p, st->rows, &w->down);
}

static int step_layer(struct step *st, unsigned int l)
{
	const struct model_config *c = step_config(st);
	const struct layer *w = &st->f->m->layer[l];
	struct fwd_scratch *s = st->s;
	int err;

	norm_rows(st, w->norm1);
	switch (c->kind[l]) {
	case LAYER_MLA:
		err = step_mla(st, l);
		break;
	case LAYER_LINEAR:
		err = step_linear(st, l);
		break;
	default:
		err = step_attn(st, l);
	}
	if (err)
		return err;
	err = step_project(st, s->tmp.p, s->att.p, st->rows, &w->o);
	if (err)
		return err;
	add(s->x.p, s->tmp.p, st->rows * c->hidden);

	norm_rows(st, w->norm2);
	err = step_mlp(st, w);
	if (err)
		return err;
	add(s->x.p, s->tmp.p, st->rows * c->hidden);
	return 0;
}

/* -- a step ----------------------------------------------------------------------- */

static void step_embed(struct step *st)
{
	uint32_t dim = step_config(st)->hidden;
	float *x = st->s->x.p;

	for (unsigned int i = 0; i < st->nr; i++)
		for (uint32_t t = 0; t < st->seq[i].n; t++, x += dim)
			memcpy(x, st->f->m->embed +
				  (size_t)st->seq[i].tok[t] * dim, dim * 4);
}

/* The last tokens' logits, for the sequences that want them. */
static int step_logits(struct step *st)
{
	const struct model_config *c = step_config(st);
	const struct model *m = st->f->m;
	struct fwd_scratch *s = st->s;
	size_t row = 0, n = 0;
	int err;

	for (unsigned int i = 0; i < st->nr; i++) {
		row += st->seq[i].n;
		if (st->seq[i].logits)
			rmsnorm(s->h.p + n++ * c->hidden,
				s->x.p + (row - 1) * c->hidden, m->norm,
				c->hidden, c->rms_eps);
	}
	if (!n)
		return 0;
	err = fbuf_need(&s->gate, n * c->vocab);
	if (err)
		return err;
	err = step_project(st, s->gate.p, s->h.p, n, &m->head);
	if (err)
		return err;
	n = 0;
	for (unsigned int i = 0; i < st->nr; i++)
		if (st->seq[i].logits)
			memcpy(st->seq[i].logits, s->gate.p + n++ * c->vocab,
			       c->vocab * sizeof(float));
	return 0;
}

static int step_check(struct step *st)
{
	const struct model_config *c = step_config(st);
	const struct fwd *f = st->f;

	if (!f->world || f->world > MODEL_MAX_WORLD || f->rank >= f->world ||
	    c->heads % f->world || (f->world > 1 && !f->share))
		return -EINVAL;
	for (unsigned int l = 0; l < c->layers; l++) {
		uint32_t heads = c->kind[l] == LAYER_LINEAR ? c->lin_heads :
							      c->kv_heads;

		if (model_kv_striped(c, l) && heads % f->world)
			return -EINVAL;
		if (c->kind[l] != LAYER_LINEAR && !f->place[l].block_tokens)
			return -EINVAL;
	}
	for (unsigned int i = 0; i < st->nr; i++) {
		const struct fwd_seq *q = &st->seq[i];

		if (!q->n || q->n > UINT32_MAX - q->pos)
			return -EINVAL;
		for (uint32_t t = 0; t < q->n; t++)
			if (q->tok[t] >= c->vocab)
				return -EINVAL;
		st->rows += q->n;
	}
	return 0;
}

static int step_buffers(struct step *st)
{
	const struct model_config *c = step_config(st);
	struct fwd_scratch *s = st->s;
	size_t n = st->rows;

	if (fbuf_need(&s->x, n * c->hidden) ||
	    fbuf_need(&s->h, n * c->hidden) ||
	    fbuf_need(&s->tmp, n * c->hidden) ||
	    fbuf_need(&s->gate, n * c->inter) ||
	    fbuf_need(&s->up, n * c->inter))
		return -ENOMEM;
	return 0;
}

static int step_pool(struct fwd *f)
{
	if (f->threads <= 1 || pool_size(f->scratch->pool) == f->threads)
		return 0;
	thread_pool_destroy(f->scratch->pool);
	f->scratch->pool = NULL;
	return thread_pool_create(f->threads, &f->scratch->pool);
}

int fwd_run(struct fwd *f, const struct fwd_seq *seq, unsigned int n)
{
	struct step st = { .f = f, .seq = seq, .nr = n };
	int err;

	if (!n)
		return 0;
	err = step_check(&st);
	if (err)
		return err;
	if (!f->scratch)
		f->scratch = calloc(1, sizeof(*f->scratch));
	if (!f->scratch)
		return -ENOMEM;
	st.s = f->scratch;
	err = step_pool(f);
	if (!err)
		err = step_buffers(&st);
	if (err)
		return err;

	step_embed(&st);
	for (unsigned int l = 0; l < f->m->c.layers; l++) {
		err = step_layer(&st, l);
		if (err)
			return err;
	}
	return step_logits(&st);
}

void fwd_fini(struct fwd *f)
{
	struct fwd_scratch *s = f->scratch;

	if (!s)
		return;
	struct fbuf *b[] = {
		&s->x, &s->h, &s->q, &s->k, &s->v, &s->att, &s->tmp, &s->gate,
		&s->up, &s->cs, &s->sn, &s->kp, &s->vp, &s->rows, &s->score,
		&s->out,
	};
	for (size_t i = 0; i < sizeof(b) / sizeof(*b); i++)
		free(b[i]->p);
	thread_pool_destroy(s->pool);
	free(s);
	f->scratch = NULL;
}
