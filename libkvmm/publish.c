/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Publishing. The frames are pinned before the entry is posted, so that a page
 * that others find at once cannot be reclaimed before we have a pin of our own.
 * While the entry is in flight the frames are the operation's; what is refused
 * goes back to the request as OPEN.
 *
 * Without an answer nobody knows what has become of a page. The daemon may have
 * sealed it, and if it lives, or its memory is still mapped by others, they read
 * it. So it is not OPEN again: the request keeps its pin, as on a page that was
 * sealed. When the pin goes the frame's word tells, if the era goes on: a daemon
 * that takes over does nothing that was posted before it.
 */
#include <errno.h>
#include <string.h>

#include "libkvmm/lib.h"

static_assert(sizeof(struct kvmm_pub) == sizeof(struct ring_pub) &&
	      offsetof(struct kvmm_pub, parent) ==
	      offsetof(struct ring_pub, parent) &&
	      offsetof(struct kvmm_pub, frame) ==
	      offsetof(struct ring_pub, frame) &&
	      offsetof(struct kvmm_pub, crc) == offsetof(struct ring_pub, crc) &&
	      offsetof(struct kvmm_pub, group) ==
	      offsetof(struct ring_pub, group) &&
	      offsetof(struct kvmm_pub, after) ==
	      offsetof(struct ring_pub, after),
	      "kvmm_publish() copies the caller's array as it is");

/* -- the answer ------------------------------------------------------------------ */

static int one_result(struct kvmm_job *op, struct kvmm_own *o,
		      const struct kvmm_op_page *pg,
		      const struct ring_result *r, struct kvmm_result *out)
{
	struct kvmm_req *rq = op->rq;
	struct kvmm_view *v = o->view;

	out->result = kvmm_op_result(r, pg->frame);
	if (kvmm_op_unknown(out->result)) {
		out->frame = 0;
		kvmm_own_add_pin(o, pg->frame);
		/* of one that talks nonsense nothing is believed */
		if (out->result == -ENOTCONN)
			kvmm_view_limbo(v, pg->frame);
		return out->result;
	}
	out->frame = r->frame;
	if (!r->result && r->frame) {
		kvmm_own_add_pin(o, pg->frame);
		kvmm_req_set_tail(rq, pg->group, v, pg->frame, r->word,
				  pg->len);
		return 0;
	}
	/* it stays mine */
	kvmm_unpin(v, pg->frame);
	kvmm_own_add_open(o, pg->frame);
	if (r->result != -EEXIST || !r->frame || r->frame >= v->max_frames)
		return r->result ? r->result : -EAGAIN;
	if (!rq->ended) {
		if (!kvmm_pin_word(v, r->frame, r->word)) {
			out->frame = 0;		/* gone, with the daemon */
			return -EEXIST;
		}
		kvmm_own_add_pin(o, r->frame);
	}
	kvmm_req_set_tail(rq, pg->group, v, r->frame, r->word, pg->len);
	return -EEXIST;
}

void kvmm_publish_result(struct kvmm_job *op, const struct kvmm_op_part *part,
			 int err, const struct ring_result *res)
{
	struct kvmm_own *o = kvmm_req_own(op->rq, part->view);
	uint64_t sealed = 0, exists = 0;
	uint32_t i;

	op->rq->nr_flying -= part->n;
	for (i = 0; i < part->n; i++) {
		const struct ring_result failed = { .result = err };
		int what = one_result(op, o, &op->page[i],
				      res ? &res[i] : &failed, &op->res[i]);

		sealed += !what;
		exists += what == -EEXIST;
	}
	stat_add(op->era->k, published, sealed);
	if (exists)
		stat_add(op->era->k, publish_exists, exists);
	if (sealed + exists < part->n)
		stat_add(op->era->k, publish_refused,
			 part->n - sealed - exists);
	kvmm_req_show_pins(op->rq);
}

/* -- the call --------------------------------------------------------------------- */

static int check_mode(const struct kvmm_att *a)
{
	switch (atomic_load_explicit(&a->era->hdr->space[a->ix].mode,
				     memory_order_relaxed)) {
	case KVMM_MODE_BYPASS:
		return kvmm_fail(-EAGAIN, "the space's mode is bypass");
	case KVMM_MODE_READONLY:
		return kvmm_fail(-EROFS, "the space's mode is readonly");
	default:
		return 0;
	}
}

/* One class for all, since one ring entry names one window. */
static int check_groups(const struct kvmm_req *rq, const struct kvmm_pub *pub,
			unsigned int n, unsigned int *cls)
{
	const struct desc *d = &rq->sp->desc;
	unsigned int i;

	for (i = 0; i < n; i++) {
		unsigned int g = pub[i].group;

		if (pub[i].flags & RING_PUB_BOUND)
			return kvmm_fail(-EINVAL, "pub[%u].flags is 0x%x", i,
					 pub[i].flags);
		if (g >= d->ngroups)
			return kvmm_fail(-EINVAL,
				"pub[%u].group is %u, the space has %u", i, g,
				d->ngroups);
		if (d->group[g].class_ix != d->group[pub[0].group].class_ix)
			return kvmm_fail(-EINVAL,
				"pub[%u] is of class %s, those before it of %s",
				i, d->cls[d->group[g].class_ix].name,
				d->cls[d->group[pub[0].group].class_ix].name);
	}
	*cls = d->group[pub[0].group].class_ix;
	return 0;
}

int kvmm_publish_view(struct kvmm_req *rq, unsigned int cls, unsigned int node,
		      struct kvmm_view **ret)
{
	struct kvmm_view *v;
	int err;

	err = kvmm_req_alive(rq);
	if (err)
		return err;
	v = kvmm_req_view(rq, cls, node);
	if (!v)
		return kvmm_fail(-EINVAL,
				 "no window is open on class %s at node %u",
				 rq->sp->desc.cls[cls].name, node);
	if (v->rights != KVMM_RW)
		return kvmm_fail(-EACCES, "the window is read-only");
	err = check_mode(rq->att);
	if (err)
		return err;
	*ret = v;
	return 0;
}

/* Take the frames out of the request; all or none. */
static int take_frames(struct kvmm_own *o, struct kvmm_job *op,
		       const struct kvmm_pub *pub, unsigned int n)
{
	const struct desc *d = &op->rq->sp->desc;
	unsigned int i;

	for (i = 0; i < n; i++) {
		const struct desc_group *g = &d->group[pub[i].group];

		if (!kvmm_own_del_open(o, pub[i].frame))
			break;
		op->page[i] = (struct kvmm_op_page){
			.frame	= pub[i].frame,
			.res	= i,
			.len	= g->rule == KVMM_BLOB ? 1 :
				  pub[i].pos / g->block_tokens + 1,
			.group	= pub[i].group,
		};
	}
	if (i == n)
		return 0;
	kvmm_fail(-EINVAL, "pub[%u].frame %u is no OPEN frame of this request",
		  i, pub[i].frame);
	while (i)
		kvmm_own_add_open(o, op->page[--i].frame);
	return -EINVAL;
}

static int post(struct kvmm_req *rq, struct kvmm_job *op, struct kvmm_view *v,
		struct kvmm_own *o, const struct kvmm_pub *pub, unsigned int n)
{
	struct kvmm_op_part *part = &op->part[0];
	unsigned int i;
	int err;

	part->view = v;
	part->first = 0;
	part->n = n;
	part->array = pub;
	part->bytes = n * sizeof(*pub);
	part->sqe = (struct ring_sqe){
		.op	= RING_PUBLISH,
		.space	= rq->att->ix,
		.win	= v->no,
		.n	= n,
		.req	= rq->slot,
	};
	for (i = 0; i < n; i++) {
		kvmm_pin(v, pub[i].frame);
		if (pub[i].after > part->sqe.after)
			part->sqe.after = pub[i].after;
	}
	rq->nr_ops++;
	rq->nr_flying += n;
	err = kvmm_op_post(op);
	if (!err)
		return 0;
	rq->nr_ops--;
	rq->nr_flying -= n;
	for (i = 0; i < n; i++) {
		kvmm_unpin(v, pub[i].frame);
		kvmm_own_add_open(o, pub[i].frame);
	}
	return err;
}

static int publish(struct kvmm_req *rq, kvmm_node_t node,
		   const struct kvmm_pub *pub, unsigned int n, uint64_t tag)
	__must_hold(&rq->lock)
{
	struct kvmm_view *v;
	struct kvmm_own *o;
	struct kvmm_job *op;
	unsigned int cls;
	int err;

	if (!n || n > KVMM_MAX_BATCH)
		return kvmm_fail(-EINVAL, "%u pages, allowed are 1 to %u", n,
				 KVMM_MAX_BATCH);
	err = check_groups(rq, pub, n, &cls);
	if (!err)
		err = kvmm_publish_view(rq, cls, node, &v);
	if (err)
		return err;
	o = kvmm_req_own(rq, v);
	if (!o)
		return kvmm_fail(-EINVAL, "the request has no frame there");
	op = kvmm_op_alloc(rq->k, n, n);
	if (!op)
		return -ENOMEM;
	op->rq = rq;
	op->era = rq->att->era;
	op->nr_parts = 1;
	op->done.tag = tag;
	op->done.op = KVMM_OP_PUBLISH;
	op->done.n = n;
	/* room for what the completion adds, which must not fail */
	err = kvmm_own_room_pin(rq, o, n);
	if (!err)
		err = take_frames(o, op, pub, n);
	if (!err)
		err = post(rq, op, v, o, pub, n);
	if (err)
		kvmm_op_recycle(rq->k, op);
	return err;
}

int kvmm_publish(struct kvmm_req *rq, kvmm_node_t node,
		 const struct kvmm_pub *pub, unsigned int n, uint64_t tag)
{
	struct kvmm *k = rq->k;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	err = publish(rq, node, pub, n, tag);
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return err;
}
