/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attention over pages: full and sliding-window layers, and the part of it that
 * MLA shares.
 *
 * Keys of one head are unpacked into panels of 16 positions, values into panels
 * of 16 elements, so that scores and weighted sums are products like any other:
 * a score sums over elements, an output over positions, each ascending. Rows of
 * a tile that see fewer positions than the tile does have weights of exactly 0
 * there, and adding 0 * v changes no bit of a sum that began at +0. Panels begin
 * at multiples of 16 positions, so a position is in the same one of softmax's 16
 * partial sums whatever the window's start.
 */
#include <errno.h>
#include <math.h>

#include "tests/engine/fwd.h"
#include "tests/engine/fwd_attn.h"

/* Queries at a time: their scores should stay in the second level cache. */
#define TILE_ROWS	24

/* Elements of a key, or of a value and what fills its last panel. */
#define MAX_ROW		(4096 + 1024 + LANES)

int step_angles(struct step *st, size_t half)
{
	struct fwd_scratch *s = st->s;
	size_t row = 0;

	if (fbuf_need(&s->cs, st->rows * half) ||
	    fbuf_need(&s->sn, st->rows * half))
		return -ENOMEM;
	for (unsigned int i = 0; i < st->nr; i++)
		for (uint32_t t = 0; t < st->seq[i].n; t++, row++)
			rope_angles(s->cs.p + row * half, s->sn.p + row * half,
				    st->seq[i].pos + t, half,
				    step_config(st)->rope_theta);
	return 0;
}

/* Positions that no query looks at, before the first and after the last. */
static const uint16_t nothing[MAX_ROW];

/* Keys and values of 16 positions, the first being @at, into their panels. */
static int unpack_16(struct fwd_scratch *s, const struct heads *h,
		     const int32_t *table, size_t at, size_t from, size_t to,
		     size_t base, size_t span)
{
	const struct kv_place *p = h->place;
	const uint16_t *k[LANES];

	for (size_t j = 0; j < LANES; j++) {
		size_t pos = at + j;
		float *vp = s->vp.p + (pos - base) * LANES;
		const uint8_t *kr, *vr;

		if (pos < from || pos >= to) {
			k[j] = nothing;
			values_row(vp, span * LANES, nothing, h->dv);
			continue;
		}
		kr = place_row(p, p->k, p->k_stride, table, (uint32_t)pos,
			       h->row_bytes);
		if (!kr)
			return -EINVAL;
		vr = h->latent ? kr :
		     place_row(p, p->v, p->v_stride, table, (uint32_t)pos,
			       h->row_bytes);
		k[j] = (const uint16_t *)(kr + h->offset);
		values_row(vp, span * LANES,
			   (const uint16_t *)(vr + h->offset), h->dv);
	}
	keys_panel(s->kp.p + (at - base) * h->dk, k, h->dk);
	return 0;
}

/* Scores to weights: -inf where row @pos does not look, then exp and sum. */
static float weigh(float *s, size_t base, size_t lo, size_t hi, uint32_t pos,
		   const struct heads *h)
{
	size_t from = first_seen(pos, h->window), to = pos + 1 - base, j = lo;

	from = from > base ? from - base : 0;
	for (; j < from; j++)
		s[j] = -INFINITY;
	for (; j < to; j++)
		s[j] *= h->scale;
	for (; j < hi; j++)
		s[j] = -INFINITY;
	return softmax_exp(s + lo, hi - lo);
}

/*
 * Rows [r0, r1) of a sequence's queries, a row being a token and one of the
 * group's heads.
 */
static void attend_tile(struct fwd_scratch *s, const struct heads *h,
			uint32_t pos, size_t base, size_t span, size_t r0,
			size_t r1)
{
	uint32_t first = pos + (uint32_t)(r0 / h->group);
	uint32_t last = pos + (uint32_t)((r1 - 1) / h->group);
	size_t lo = first_seen(first, h->window) - base;
	size_t hi = last + 1 - base;
	size_t n = r1 - r0;
	float sum[TILE_ROWS];

	lo = lo / LANES * LANES;
	hi = round_up(hi, LANES);
	for (size_t r = r0; r < r1; r++)
		memcpy(s->rows.p + (r - r0) * h->dk,
		       h->q + r / h->group * h->ldq + r % h->group * h->dk,
		       h->dk * 4);
	product(&(struct product){
		.y = s->score.p, .ldy = span, .x = s->rows.p, .ldx = h->dk,
		.rows = n, .w = s->kp.p, .ldw = (size_t)h->dk * LANES,
		.k = h->dk, .lo = lo, .hi = hi });
	for (size_t r = r0; r < r1; r++)
		sum[r - r0] = weigh(s->score.p + (r - r0) * span, base, lo, hi,
				    pos + (uint32_t)(r / h->group), h);
	product(&(struct product){
		.y = s->out.p, .ldy = h->dv, .x = s->score.p + lo, .ldx = span,
		.rows = n, .w = s->vp.p + lo * LANES, .ldw = span * LANES,
		.k = hi - lo, .lo = 0, .hi = h->dv });
	for (size_t r = r0; r < r1; r++) {
		float *out = h->out + r / h->group * h->ldo +
			     r % h->group * h->dv;

		for (uint32_t d = 0; d < h->dv; d++)
			out[d] = s->out.p[(r - r0) * h->dv + d] / sum[r - r0];
	}
}

int attend(struct fwd_scratch *s, const struct heads *h,
	   const struct fwd_seq *seq)
{
	const int32_t *table = seq->table[h->place->table_ix];
	size_t from = first_seen(seq->pos, h->window);
	size_t to = (size_t)seq->pos + seq->n;
	size_t base = from / LANES * LANES;
	size_t span = round_up(to - base, LANES);
	size_t rows = (size_t)seq->n * h->group;
	int err;

	if (fbuf_need(&s->kp, span * h->dk) ||
	    fbuf_need(&s->vp, span * round_up(h->dv, LANES)) ||
	    fbuf_need(&s->rows, (size_t)TILE_ROWS * h->dk) ||
	    fbuf_need(&s->score, TILE_ROWS * span) ||
	    fbuf_need(&s->out, (size_t)TILE_ROWS * h->dv))
		return -ENOMEM;
	for (size_t at = base; at < to; at += LANES) {
		err = unpack_16(s, h, table, at, from, to, base, span);
		if (err)
			return err;
	}
	for (size_t r = 0; r < rows; r += TILE_ROWS)
		attend_tile(s, h, seq->pos, base, span, r,
			    rows - r < TILE_ROWS ? rows : r + TILE_ROWS);
	return 0;
}

/* -- full and sliding layers ---------------------------------------------------- */

/* A range of heads, and where they begin in a row of all ranks' columns. */
struct part {
	uint32_t	first, n;
};

static struct part part_of(const struct fwd *f, uint32_t heads, bool split)
{
	if (!split)
		return (struct part){ 0, heads };
	return (struct part){ heads / f->world * f->rank, heads / f->world };
}

/* This rank's keys and values of one token, as they are cached. */
static int store(struct step *st, unsigned int l, const struct fwd_seq *seq,
		 size_t row, uint32_t t, struct part kv)
{
	const struct model_config *c = step_config(st);
	const struct kv_place *p = &st->f->place[l];
	const int32_t *table = seq->table[p->table_ix];
	size_t dim = (size_t)c->kv_heads * c->head_dim;
	size_t n = (size_t)kv.n * c->head_dim;
	float *k = st->s->k.p + row * dim + (size_t)kv.first * c->head_dim;
	float *v = st->s->v.p + row * dim + (size_t)kv.first * c->head_dim;
	uint16_t *kr = (uint16_t *)place_row(p, p->k, p->k_stride, table,
					     seq->pos + t, n * 2);
	uint16_t *vr = (uint16_t *)place_row(p, p->v, p->v_stride, table,
					     seq->pos + t, n * 2);

	if (!kr)
		return -EINVAL;
	for (size_t i = 0; i < n; i++) {
		kr[i] = bf16_from(k[i]);
		vr[i] = bf16_from(v[i]);
	}
	return 0;
}

static void turn_heads(struct step *st, float *x, size_t row, uint32_t heads)
{
	size_t half = step_config(st)->head_dim / 2;

	for (uint32_t i = 0; i < heads; i++)
		rope_turn(x + i * 2 * half, st->s->cs.p + row * half,
			  st->s->sn.p + row * half, half);
}

static int attend_seq(struct step *st, unsigned int l,
		      const struct fwd_seq *seq, size_t row, struct part q,
		      struct part kv)
{
	const struct model_config *c = step_config(st);
	size_t dim = (size_t)c->heads * c->head_dim;
	uint32_t group = c->heads / c->kv_heads;
	struct heads h = {
		.ldq = dim, .ldo = dim,
		.group = group, .dk = c->head_dim, .dv = c->head_dim,
		.scale = 1.0f / sqrtf((float)c->head_dim),
		.window = c->kind[l] == LAYER_WINDOW ? c->window : 0,
		.place = &st->f->place[l],
		.row_bytes = (size_t)kv.n * c->head_dim * 2,
	};
	int err = 0;

	/* By key-value head; with MQA this rank's queries are a part of a group. */
	if (group > q.n)
		h.group = q.n;
	for (uint32_t i = 0; i < q.n / h.group && !err; i++) {
		size_t at = row * dim +
			    (size_t)(q.first + i * h.group) * c->head_dim;
		uint32_t kvh = (q.first + i * h.group) / group - kv.first;

		h.q = st->s->q.p + at;
		h.out = st->s->att.p + at;
		h.offset = (size_t)kvh * c->head_dim * 2;
		err = attend(st->s, &h, seq);
	}
	return err;
}

int step_attn(struct step *st, unsigned int l)
{
	const struct model_config *c = step_config(st);
	const struct layer *w = &st->f->m->layer[l];
	struct part q = part_of(st->f, c->heads, true);
	struct part kv = part_of(st->f, c->kv_heads, model_kv_striped(c, l));
	size_t qdim = (size_t)c->heads * c->head_dim;
	size_t kvdim = (size_t)c->kv_heads * c->head_dim;
	size_t qlo = (size_t)q.first * c->head_dim, qhi = qlo +
		     (size_t)q.n * c->head_dim;
	size_t klo = (size_t)kv.first * c->head_dim, khi = klo +
		     (size_t)kv.n * c->head_dim;
	struct fwd_scratch *s = st->s;
	size_t row = 0;
	int err = 0;

	if (fbuf_need(&s->q, st->rows * qdim) ||
	    fbuf_need(&s->k, st->rows * kvdim) ||
	    fbuf_need(&s->v, st->rows * kvdim) ||
	    fbuf_need(&s->att, st->rows * qdim) ||
	    step_angles(st, c->head_dim / 2))
		return -ENOMEM;
	step_product(st, s->q.p, s->h.p, st->rows, &w->q, qlo, qhi);
	step_product(st, s->k.p, s->h.p, st->rows, &w->k, klo, khi);
	step_product(st, s->v.p, s->h.p, st->rows, &w->v, klo, khi);
	for (unsigned int i = 0; i < st->nr && !err; i++) {
		for (uint32_t t = 0; t < st->seq[i].n && !err; t++) {
			turn_heads(st, s->q.p + (row + t) * qdim + qlo, row + t,
				   q.n);
			turn_heads(st, s->k.p + (row + t) * kvdim + klo,
				   row + t, kv.n);
			err = store(st, l, &st->seq[i], row + t, t, kv);
		}
		row += st->seq[i].n;
	}
	row = 0;
	for (unsigned int i = 0; i < st->nr && !err; i++) {
		err = attend_seq(st, l, &st->seq[i], row, q, kv);
		row += st->seq[i].n;
	}
	return err ? err : step_share(st, s->att.p, st->rows, qdim, qlo, qhi);
}
