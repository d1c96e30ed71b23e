/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fwd.h - inside the paged forward pass: the buffers of a step, and its parts.
 *
 * A step runs all its tokens through one layer after another. Buffers hold a row
 * for each token, of all ranks' columns; a rank computes its own and gets the
 * others' by sharing. Keys and values are seen by their rank only.
 */
#ifndef KVMM_TESTS_ENGINE_FWD_H
#define KVMM_TESTS_ENGINE_FWD_H

#include "tests/engine/weights.h"

struct pool;

/* Floats that grow and never shrink. */
struct fbuf {
	float	*p;
	size_t	n;
};

/**
 * struct fwd_scratch - buffers of a step
 * @x:		the residual stream
 * @h:		normed input of a projection
 * @q, @k, @v:	queries, keys, values (MLA: @k is latent and rotated key)
 * @att:	heads' outputs, then of @tmp's projection
 * @gate, @up:	of the MLP; @gate takes a linear layer's gates too
 * @cs, @sn:	angles of each token
 * @pool:	threads for products, or NULL
 */
struct fwd_scratch {
	struct fbuf	x, h, q, k, v, att, tmp, gate, up, cs, sn;
	struct fbuf	kp, vp, rows, score, out;	/* of attn.c */
	struct pool	*pool;
};

/* Room for @n floats, whose content is undefined. 0 or -ENOMEM. */
int fbuf_need(struct fbuf *b, size_t n);

/* A step as its parts see it. */
struct step {
	struct fwd		*f;
	struct fwd_scratch	*s;
	const struct fwd_seq	*seq;
	unsigned int		nr;
	size_t			rows;	/* tokens of all sequences */
};

static inline const struct model_config *step_config(const struct step *st)
{
	return &st->f->m->c;
}

/*
 * y[rows][w->out] = x[rows][w->in] * w, output rows [lo, hi) of @w. Other columns
 * of @y are left alone.
 */
void step_product(struct step *st, float *y, const float *x, size_t rows,
		  const struct mat *w, size_t lo, size_t hi);

/* The same for this rank's part of the columns, then all ranks' are shared. */
int step_project(struct step *st, float *y, const float *x, size_t rows,
		 const struct mat *w);

/* Have the others' columns of @buf[rows][dim], [lo, hi) being ours. */
int step_share(struct step *st, float *buf, size_t rows, size_t dim, size_t lo,
	       size_t hi);

/* st->s->att = what layer @l's heads say of st->s->h, shared by all ranks. */
int step_attn(struct step *st, unsigned int l);
int step_mla(struct step *st, unsigned int l);
int step_linear(struct step *st, unsigned int l);

/* Where layer @l keeps position @pos of @seq, or NULL: the table has no page. */
uint8_t *place_row(const struct kv_place *p, uint8_t *base, size_t stride,
		   const int32_t *table, uint32_t pos, size_t row_bytes);

#endif
