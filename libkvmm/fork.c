/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forking a request: several samples of one prompt, beams of a search.
 *
 * Whole pages are shared: the child pins what the parent has pinned. It need not
 * look at their words: where the parent's pin is counted reclaim cannot pass, so
 * one more makes no difference to anybody. What is not a whole page yet, the
 * tail of each group, cannot be shared, since both would write on in it: the
 * daemon copies it, once the step that writes it is done by all members.
 *
 * While it does, the child's new frames are the operation's, as those of a
 * publish are. The parent's are its own to write on in, to publish and to free;
 * but what it frees does not come back into circulation in this process before
 * the copy is over (kvmm_view_busy()). If the connection ends first nobody knows
 * when that is, and they never do: neither do the child's.
 */
#include <errno.h>

#include "libkvmm/lib.h"

/**
 * struct tails - what is to be copied, in the order of the operation's pages
 * @g:		group, and place in the caller's array
 * @o:		the child's, of the view that both frames are of
 */
struct tails {
	unsigned int	n;
	struct {
		unsigned int	g;
		struct kvmm_own	*o;
		uint32_t	from, to;
	} t[KVMM_MAX_GROUPS];
};

/* -- the answer --------------------------------------------------------------------- */

void kvmm_fork_result(struct kvmm_job *op, const struct kvmm_op_part *part,
		      int err, const struct ring_result *res)
{
	bool unknown = !res && kvmm_op_unknown(err);
	struct kvmm_req *rq = op->rq;
	uint32_t i;

	rq->nr_flying -= part->n;
	for (i = 0; i < part->n; i++) {
		const struct kvmm_op_page *pg = &op->page[i];
		struct kvmm_own *o = &rq->own[pg->own];

		op->res[pg->res] = (struct kvmm_result){
			.result	= res ? res[i].result : err,
			.frame	= pg->frame,
		};
		kvmm_own_add_open(o, pg->frame);
		if (unknown)
			continue;	/* it may still be copied */
		kvmm_view_idle(o->view, pg->page);
		kvmm_view_idle(o->view, pg->frame);
	}
}

/* -- what may be wrong ---------------------------------------------------------------- */

static int check_era(const struct kvmm_req *rq) __must_hold(&rq->lock)
{
	int err = kvmm_req_alive(rq);

	if (err)
		return err;
	if (rq->nr_ops)
		return kvmm_fail(-EBUSY,
			"%u operations of the request are in flight: poll first",
			rq->nr_ops);
	return 0;
}

/* The tails, with their views still the parent's. */
static int check_tails(struct kvmm_req *rq, kvmm_node_t node,
		       const kvmm_frame_t *tail, unsigned int n,
		       struct tails *ts) __must_hold(&rq->lock)
{
	const struct desc *d = &rq->sp->desc;
	struct kvmm_view *v;
	struct kvmm_own *o;
	unsigned int g;

	if (n > d->ngroups)
		return kvmm_fail(-EINVAL, "tails of %u groups, the space has %u",
				 n, d->ngroups);
	for (g = 0; g < n; g++) {
		if (!tail[g])
			continue;
		v = kvmm_req_view(rq, d->group[g].class_ix, node);
		if (!v)
			return kvmm_fail(-EINVAL,
				"no window is open on class %s at node %u",
				d->cls[d->group[g].class_ix].name, node);
		if (v->rights != KVMM_RW)
			return kvmm_fail(-EACCES, "the window is read-only");
		o = kvmm_req_own(rq, v);
		if (!o || !kvmm_own_has_open(o, tail[g]))
			return kvmm_fail(-EINVAL,
				"tail[%u] %u is no OPEN frame of this request",
				g, tail[g]);
		ts->t[ts->n].g = g;
		ts->t[ts->n].o = o;
		ts->t[ts->n++].from = tail[g];
	}
	return 0;
}

/* -- the child -------------------------------------------------------------------------- */

/* All that the parent holds, with references and pins of the child's own. */
static int share(const struct kvmm_req *rq, struct kvmm_req *child)
{
	unsigned int i;
	uint32_t j;
	int err;

	for (i = 0; i < rq->nr_held; i++) {
		kvmm_view_hold(rq->held[i]);	/* the parent has one */
		child->held[child->nr_held++] = rq->held[i];
	}
	err = kvmm_mset_copy(kvmm_req_match(child), &rq->m[rq->cur]);
	if (err)
		return err;
	child->gen = rq->m[rq->cur].gen;
	for (i = 0; i < rq->nr_own; i++) {
		const struct kvmm_own *from = &rq->own[i];
		struct kvmm_own *o = kvmm_req_own(child, from->view);

		err = kvmm_own_room_pin(child, o, from->nr_pin);
		if (err)
			return err;
		for (j = 0; j < from->nr_pin; j++) {
			kvmm_pin(from->view, from->pin[j]);
			kvmm_own_add_pin(o, from->pin[j]);
		}
	}
	for (i = 0; i < ARRAY_SIZE(child->tail); i++)
		child->tail[i] = rq->tail[i];
	return 0;
}

static void give_frames(struct tails *ts, unsigned int n)
{
	while (n) {
		n--;
		kvmm_view_put(ts->t[n].o->view, &ts->t[n].to, 1, 0);
	}
}

/* A frame for each tail out of its view's magazine; all or none. */
static int take_frames(struct kvmm_req *child, struct tails *ts)
{
	uint32_t got[KVMM_MAX_GROUPS];
	unsigned int i, j, n;
	bool done[KVMM_MAX_GROUPS] = { false };
	int err = 0;

	for (i = 0; i < ts->n; i++) {
		struct kvmm_own *o = ts->t[i].o;

		if (done[i])
			continue;
		for (n = 0, j = i; j < ts->n; j++)
			n += ts->t[j].o == o;
		err = kvmm_own_room_open(child, o, n);
		if (!err)
			err = kvmm_view_take(o->view, n, got);
		if (err)
			goto out_give;
		for (n = 0, j = i; j < ts->n; j++) {
			if (ts->t[j].o != o)
				continue;
			ts->t[j].to = got[n++];
			done[j] = true;
		}
	}
	return 0;

out_give:
	for (j = 0; j < ts->n; j++)
		if (done[j])
			kvmm_view_put(ts->t[j].o->view, &ts->t[j].to, 1, 0);
	return err;
}

static void all_idle(struct tails *ts, unsigned int n)
{
	while (n) {
		n--;
		kvmm_view_idle(ts->t[n].o->view, ts->t[n].from);
		kvmm_view_idle(ts->t[n].o->view, ts->t[n].to);
	}
}

static int all_busy(struct tails *ts)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < ts->n; i++) {
		err = kvmm_view_busy(ts->t[i].o->view, ts->t[i].from);
		if (err)
			break;
		err = kvmm_view_busy(ts->t[i].o->view, ts->t[i].to);
		if (err) {
			kvmm_view_idle(ts->t[i].o->view, ts->t[i].from);
			break;
		}
	}
	if (err)
		all_idle(ts, i);
	return err;
}

/* -- the operation ------------------------------------------------------------------------ */

static int post(struct kvmm_req *child, struct kvmm_job *op,
		const struct tails *ts, uint64_t after)
{
	struct kvmm_op_part *part = &op->part[0];
	struct ring_fork f[KVMM_MAX_GROUPS];
	unsigned int i;
	int err;

	for (i = 0; i < ts->n; i++) {
		f[i] = (struct ring_fork){
			.from = ts->t[i].from, .to = ts->t[i].to,
			.win = ts->t[i].o->view->no, .group = ts->t[i].g,
		};
		op->page[i] = (struct kvmm_op_page){
			.frame = ts->t[i].to, .page = ts->t[i].from,
			.res = ts->t[i].g, .own = ts->t[i].o - child->own,
			.group = ts->t[i].g,
		};
	}
	part->view = ts->t[0].o->view;
	part->first = 0;
	part->n = ts->n;
	part->array = f;
	part->bytes = ts->n * sizeof(f[0]);
	part->sqe = (struct ring_sqe){
		.op	= RING_FORK,
		.space	= child->att->ix,
		.n	= ts->n,
		.req	= child->slot,
		.after	= after,
	};
	child->nr_ops++;
	child->nr_flying += ts->n;
	/* from here on a poll of another thread may be through with it */
	err = kvmm_op_post(op);
	if (err) {
		child->nr_ops--;
		child->nr_flying -= ts->n;
	}
	return err;
}

/* Frames for the child, and the copies into them. */
static int copy_tails(struct kvmm_req *child, struct tails *ts, unsigned int n,
		      uint64_t after, uint64_t tag)
{
	struct kvmm *k = child->k;
	struct kvmm_job *op;
	unsigned int i;
	int err;

	for (i = 0; i < ts->n; i++)
		ts->t[i].o = kvmm_req_own(child, ts->t[i].o->view);
	err = take_frames(child, ts);
	stat_add(k, allocs, 1);
	if (err == -EAGAIN)
		stat_add(k, alloc_refused, 1);
	if (err)
		return err;
	err = all_busy(ts);
	if (err)
		goto out_give;
	op = kvmm_op_alloc(k, ts->n, n);
	if (!op) {
		err = -ENOMEM;
		goto out_idle;
	}
	op->rq = child;
	op->era = child->att->era;
	op->nr_parts = 1;
	op->done.tag = tag;
	op->done.op = KVMM_OP_FORK;
	op->done.n = n;
	for (i = 0; i < n; i++)
		op->res[i] = (struct kvmm_result){ .result = 0 };
	err = post(child, op, ts, after);
	if (!err)
		return 0;
	kvmm_op_recycle(k, op);
out_idle:
	all_idle(ts, ts->n);
out_give:
	give_frames(ts, ts->n);
	return err;
}

static int req_fork(struct kvmm_req *rq, uint64_t child_id, kvmm_node_t node,
		    const kvmm_frame_t *tail, unsigned int n, uint64_t after,
		    uint64_t tag, struct kvmm_req **ret)
	__must_hold(&rq->lock)
{
	struct tails ts = { .n = 0 };
	struct kvmm_req *child;
	int err;

	err = check_era(rq);
	if (!err)
		err = check_tails(rq, node, tail, n, &ts);
	if (!err)
		err = kvmm_req_child(rq, child_id, &child);
	if (err)
		return err;
	err = share(rq, child);
	if (err)
		goto out_undo;
	kvmm_req_show_pins(child);
	if (rq->frozen)
		kvmm_freeze_again(child);
	/* once it is posted a poll may have to do with the child */
	*ret = child;
	if (ts.n)
		err = copy_tails(child, &ts, n, after, tag);
	if (!err)
		return ts.n;
out_undo:
	kvmm_req_undo(child);
	return err;
}

int kvmm_req_fork(struct kvmm_req *rq, uint64_t child_id, kvmm_node_t node,
		  const kvmm_frame_t *tail, unsigned int n, uint64_t after,
		  uint64_t tag, struct kvmm_req **child)
{
	struct kvmm_req *c = NULL;
	struct kvmm *k = rq->k;
	int ret;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	ret = req_fork(rq, child_id, node, tail, n, after, tag, &c);
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	if (ret >= 0)
		*child = c;
	return ret;
}
