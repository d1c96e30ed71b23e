/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fork: what an engine has written into one OPEN frame goes into another one, so
 * that a sequence can go on twice from the middle of a page.
 *
 * There is no copy-on-write: the tail is less than a page, and its next token
 * would write to it. So it is copied, once, when the step that writes it is done
 * by all members, by a worker:
 *
 *	STEP -> COPY -> over		or over from either, with an error
 *
 * From the call to its end both frames are referenced: neither is freed, zeroed
 * or given to anybody else, whatever becomes of the engine. The source is its
 * engine's to go on with: it may write behind what the step wrote, fork the
 * frame again, and even publish it, since a page that is sealed keeps its bytes.
 * The target is nobody's until it is over (FMETA_COPY): to name it is refused.
 */
#include <stdlib.h>

#include "daemon/mm/mm_calls.h"

/**
 * struct fork_copy - one frame into another
 * @pool:	of both; NULL: it was refused, and its result says why
 */
struct fork_copy {
	struct work	work;
	struct fork_op	*op;
	struct mm_pool	*pool;
	uint32_t	from, to;
	struct image	src, dst;
};

/**
 * struct fork_op - a fork of some frames by one client
 * @copying:	workers have been given the copies
 * @pending:	copies that are not over, and 1 while they are handed out
 */
struct fork_op {
	struct mm_op	op;
	struct mm	*mm;
	struct mm_pool	*any_pool;
	struct mm_engine *engine;
	struct step_wait sw;
	bool		copying;
	uint32_t	n, pending;
	struct ring_result res[KVMM_MAX_GROUPS];
	struct fork_copy copy[];
};

/* -- the end ------------------------------------------------------------------- */

/* The frames are their owners' again. */
static void copy_release(struct fork_copy *c)
{
	struct mm_pool *p = c->pool;

	/* zero already if the engine has ended meanwhile */
	p->meta[c->to].flags &= ~FMETA_COPY;
	frame_unref(p, c->from);
	frame_unref(p, c->to);
	/* of a window that was closed: they can be freed now */
	p->space->mm->next_closed_ns = 0;
}

static void fork_end(struct fork_op *fo, int err)
{
	uint32_t i;

	for (i = 0; i < fo->n; i++) {
		if (!fo->copy[i].pool)
			continue;
		fo->res[i].result = err;
		copy_release(&fo->copy[i]);
	}
	mm_op_complete(&fo->op, fo->any_pool, err == -ECANCELED ? err : 0,
		       fo->n, fo->res);
	mm_op_fini(&fo->op);
	free(fo);
}

static void fork_unhold(struct fork_op *fo)
{
	if (!--fo->pending)
		fork_end(fo, 0);
}

/* -- the copy ------------------------------------------------------------------- */

static void copy_fn(struct work *work)
{
	struct fork_copy *c = container_of(work, struct fork_copy, work);

	image_copy(&c->dst, &c->src);
}

static void copy_done(struct work *work)
{
	struct fork_copy *c = container_of(work, struct fork_copy, work);

	c->op->mm->nr_jobs--;
	c->pool->nd->c.pgfork++;
	fork_unhold(c->op);
}

static void copy_begin(struct fork_copy *c)
{
	struct mm *mm = c->op->mm;

	c->src = frame_image(c->pool, c->from, c->pool->page_bytes);
	c->dst = frame_image(c->pool, c->to, c->pool->page_bytes);
	c->work = (struct work){
		.fn = copy_fn, .done = copy_done, .bulk = true,
	};
	c->op->pending++;
	mm->nr_jobs++;
	if (mm->o.pool) {
		work_submit(mm->o.pool, &c->work);
		return;
	}
	copy_fn(&c->work);
	copy_done(&c->work);
}

static void fork_step(struct step_wait *sw, int err)
{
	struct fork_op *fo = container_of(sw, struct fork_op, sw);
	uint32_t i;

	if (err) {
		fork_end(fo, err);
		return;
	}
	fo->copying = true;
	fo->pending = 1;
	for (i = 0; i < fo->n; i++)
		if (fo->copy[i].pool)
			copy_begin(&fo->copy[i]);
	fork_unhold(fo);
}

/* A copy that was begun is seen to its end: that is when its frames are free. */
static void fork_cancel(struct mm_op *mo)
{
	struct fork_op *fo = container_of(mo, struct fork_op, op);

	if (fo->copying)
		return;
	step_wait_del(fo->engine, &fo->sw);
	fork_end(fo, -ECANCELED);
}

/* -- the call ------------------------------------------------------------------- */

/* Is @f an OPEN frame of @w's engine, and its to name? */
static bool frame_is_own(const struct mm_win *w, uint32_t f)
{
	const struct mm_pool *p = w->pool;

	return frame_live(p, f) && f >= p->per_extent &&
	       frame_word_state(frame_word_of(p, f)) == FRAME_OPEN &&
	       p->meta[f].owner == w->engine && !p->meta[f].flags;
}

static void copy_take(struct fork_op *fo, uint32_t i, struct mm_win *w,
		      const struct ring_fork *f)
{
	struct fork_copy *c = &fo->copy[i];
	struct mm_pool *p = w->pool;

	c->op = fo;
	fo->res[i] = (struct ring_result){ .result = -EINVAL };
	/* another fork may read the source, but nobody may use the target */
	if (f->from == f->to || !frame_is_own(w, f->from) ||
	    !frame_is_own(w, f->to) || p->meta[f->to].refs)
		return;
	c->pool = p;
	c->from = f->from;
	c->to = f->to;
	p->meta[f->to].flags |= FMETA_COPY;
	frame_ref(p, f->from);
	frame_ref(p, f->to);
}

/* Refused as a whole; 0: go on. */
static int fork_refused(struct mm_client *c, const struct ring_sqe *sqe,
			const struct ring_fork *f)
{
	const struct mm_win *w;
	uint32_t i;

	if (!sqe->n || sqe->n > KVMM_MAX_GROUPS)
		return -EINVAL;
	for (i = 0; i < sqe->n; i++) {
		w = mm_win_get(c, f[i].win);
		if (!w || mm_space_ix(w->pool->space) != sqe->space)
			return -EINVAL;
		if (w->rights != KVMM_RW)
			return -EACCES;
	}
	return engine_usable(c->engine);
}

void mm_fork(struct mm_client *c, const struct ring_sqe *sqe,
	     const struct ring_fork *f)
{
	struct ring_cqe cqe = { .op = RING_FORK, .tag = sqe->tag };
	struct fork_op *fo = NULL;
	struct mm_win *w;
	uint32_t i;

	cqe.result = fork_refused(c, sqe, f);
	if (!cqe.result) {
		fo = calloc(1, sizeof(*fo) + sqe->n * sizeof(fo->copy[0]));
		cqe.result = fo ? 0 : -ENOMEM;
	}
	if (!fo) {
		c->mm->ops->complete(c, NULL, &cqe, NULL);
		return;
	}
	w = mm_win_get(c, f[0].win);
	fo->mm = c->mm;
	fo->any_pool = w->pool;
	fo->engine = c->engine;
	fo->n = sqe->n;
	fo->sw.fn = fork_step;
	mm_op_init(&fo->op, w, sqe->tag, RING_FORK, fork_cancel);
	for (i = 0; i < fo->n; i++)
		copy_take(fo, i, mm_win_get(c, f[i].win), &f[i]);
	engine_step(fo->engine);
	step_wait_add(fo->engine, &fo->sw, sqe->after);
}
