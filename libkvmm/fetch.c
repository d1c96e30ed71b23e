/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fetching: bring pages of a match to a node. What is pinned already, or what
 * the groups' rules do not need for the length that is asked for, is answered
 * here; the rest goes to the daemon, one ring entry a class, since frame
 * numbers are per class and node.
 *
 * Results stand as the pages do in the match: units [first, end) of the first
 * group, then of the second, and so on. A BLOB's one page is of any units.
 */
#include <string.h>

#include "libkvmm/lib.h"

#define ENTRY_PAGES	KVMM_MAX_BATCH

/* -- the answer ----------------------------------------------------------------- */

/*
 * Pin the frame for the page, or for the request when the match has been
 * replaced meanwhile, or counts its pins in another view: of another node, or
 * of a window that was closed or not open at all. False: it is gone, and with
 * it the daemon.
 */
static bool fetched(struct kvmm_job *op, struct kvmm_view *v,
		    const struct kvmm_op_page *pg, const struct ring_result *r)
{
	struct kvmm_req *rq = op->rq;
	struct kvmm_mset *m = kvmm_req_match(rq);
	struct kvmm_page *p = &m->page[pg->page];

	if (!rq->ended && !kvmm_pin_word(v, r->frame, r->word))
		return false;
	kvmm_req_set_tail(rq, pg->group, v, r->frame, r->word, pg->len);
	if (rq->ended)
		return true;
	if (m->gen != op->gen || kvmm_mset_group(m, pg->page)->view != v ||
	    (p->flags & PAGE_PINNED)) {
		kvmm_own_add_pin(kvmm_req_own(rq, v), r->frame);
		return true;
	}
	p->state = KVMM_HIT;
	p->node = v->node;
	p->frame = r->frame;
	p->fword = r->word;
	p->flags |= PAGE_PINNED;
	m->nr_pins++;
	return true;
}

void kvmm_fetch_result(struct kvmm_job *op, const struct kvmm_op_part *part,
		       int err, const struct ring_result *res)
{
	struct kvmm_view *v = part->view;
	uint64_t good = 0;
	uint32_t i;

	op->rq->nr_flying -= part->n;
	for (i = 0; i < part->n; i++) {
		const struct kvmm_op_page *pg = &op->page[part->first + i];
		const struct ring_result *r = res ? &res[i] : NULL;
		struct kvmm_result *out = &op->res[pg->res];

		out->result = r ? r->result : err;
		out->frame = 0;
		if (out->result)
			continue;
		if (!r || !r->frame || r->frame >= v->max_frames ||
		    !fetched(op, v, pg, r)) {
			out->result = -ENOENT;
			continue;
		}
		out->frame = r->frame;
		good++;
	}
	stat_add(op->era->k, fetched, good);
	if (good < part->n)
		stat_add(op->era->k, fetch_missed, part->n - good);
	kvmm_req_show_pins(op->rq);
}

/* -- the call --------------------------------------------------------------------- */

/* The part for @v, or the next one. Parts of one class follow each other. */
static struct kvmm_op_part *part_for(struct kvmm_job *op, struct kvmm_view *v,
				     uint32_t at)
{
	struct kvmm_op_part *part;

	if (op->nr_parts) {
		part = &op->part[op->nr_parts - 1];
		if (part->view == v && part->n < ENTRY_PAGES)
			return part;
		if (op->nr_parts == ARRAY_SIZE(op->part))
			return NULL;
	}
	part = &op->part[op->nr_parts++];
	part->view = v;
	part->first = at;
	part->n = 0;
	part->pending = false;
	return part;
}

/* Pages of @g that units [@first, @end) are answered with; returns how many. */
static uint32_t span(const struct kvmm_mgroup *g, unsigned int first,
		     unsigned int end, uint32_t *lo)
{
	if (g->rule == KVMM_BLOB) {
		*lo = 0;
		return 1;
	}
	*lo = first * g->ratio;
	return (end - first) * g->ratio;
}

/*
 * Go through the pages of units [@first, @end) of one group; @at counts those
 * that are asked of the daemon, @res all.
 */
static int ask_group(struct kvmm_req *rq, struct kvmm_job *op,
		     const struct kvmm_mgroup *g, struct kvmm_view *v,
		     unsigned int first, unsigned int end, uint32_t *at,
		     uint32_t *res)
{
	struct kvmm_mset *m = kvmm_req_match(rq);
	uint32_t lo, hi, i, n = span(g, first, end, &i);

	kvmm_mgroup_need(g, end, &lo, &hi);
	for (; n; n--, i++, (*res)++) {
		struct kvmm_page *p = &m->page[g->first + i];
		struct kvmm_op_part *part;

		op->res[*res] = (struct kvmm_result){ 0 };
		if ((p->flags & PAGE_PINNED) && g->view == v) {
			op->res[*res].frame = p->frame;
			continue;
		}
		if (i < lo || i >= hi)
			continue;	/* not needed: 0, and no frame */
		part = part_for(op, v, *at);
		if (!part)
			return kvmm_fail(-EINVAL,
				"more than %u pages in one fetch",
				ENTRY_PAGES * KVMM_MAX_CLASSES);
		part->n++;
		op->page[(*at)++] = (struct kvmm_op_page){
			.res	= *res,
			.page	= g->first + i,
			.len	= i + 1,
			.group	= g->group,
		};
	}
	return 0;
}

/* Groups in the order of their classes, so that each class is one part. */
static int ask_all(struct kvmm_req *rq, struct kvmm_job *op, unsigned int first,
		   unsigned int end, unsigned int node)
	__must_hold(&rq->lock)
{
	struct kvmm_mset *m = kvmm_req_match(rq);
	uint32_t base[KVMM_MAX_GROUPS], at = 0, n = 0, lo;
	unsigned int cls, i;
	int err;

	for (i = 0; i < m->ngroups; i++) {
		base[i] = n;
		n += span(&m->g[i], first, end, &lo);
	}
	for (cls = 0; cls < rq->sp->desc.nclasses; cls++) {
		for (i = 0; i < m->ngroups; i++) {
			struct kvmm_mgroup *g = &m->g[i];
			struct kvmm_view *v;
			uint32_t res = base[i];

			if (g->cls != cls)
				continue;
			v = kvmm_req_view(rq, cls, node);
			if (!v)
				return kvmm_fail(-EINVAL,
					"no window is open on class %s at node %u",
					rq->sp->desc.cls[cls].name, node);
			err = ask_group(rq, op, g, v, first, end, &at, &res);
			if (err)
				return err;
		}
	}
	return 0;
}

/*
 * The entries' arrays, all in @key, and room for the pins they bring: for all
 * @n pages in each view, since several parts may be of one, and what other
 * operations in flight bring does not count these yet.
 */
static int make_entries(struct kvmm_req *rq, struct kvmm_job *op,
			struct ring_key *key, uint32_t n, uint64_t deadline_ns)
{
	struct kvmm_mset *m = kvmm_req_match(rq);
	unsigned int i;
	uint32_t j;

	for (i = 0; i < op->nr_parts; i++) {
		struct kvmm_op_part *part = &op->part[i];
		struct kvmm_own *o = kvmm_req_own(rq, part->view);

		if (!o)
			return kvmm_fail(-EINVAL,
				"a request may have pages of %u windows at most",
				KVMM_MAX_CLASSES);
		if (kvmm_own_room_pin(rq, o, n))
			return -ENOMEM;
		part->array = key + part->first;
		part->bytes = part->n * sizeof(*key);
		part->sqe = (struct ring_sqe){
			.op	= RING_FETCH,
			.space	= rq->att->ix,
			.win	= part->view->no,
			.n	= part->n,
			.req	= rq->slot,
			.arg	= deadline_ns,
		};
		for (j = 0; j < part->n; j++) {
			const struct kvmm_op_page *pg =
				&op->page[part->first + j];
			struct ring_key *rk = &key[part->first + j];

			memset(rk, 0, sizeof(*rk));
			memcpy(rk->key, m->key[pg->page], sizeof(rk->key));
			rk->group = pg->group;
		}
	}
	return 0;
}

static int post(struct kvmm_req *rq, struct kvmm_job *op)
{
	unsigned int i;
	int err;

	for (i = 0; i < op->nr_parts; i++)
		rq->nr_flying += op->part[i].n;
	rq->nr_ops++;
	err = kvmm_op_post(op);
	if (err)
		rq->nr_ops--;
	for (i = 0; i < op->nr_parts; i++) {
		if (op->part[i].pending)
			continue;
		/* no room for this class: its pages have their answer */
		if (err)
			rq->nr_flying -= op->part[i].n;
		else
			kvmm_fetch_result(op, &op->part[i], -EAGAIN, NULL);
	}
	return err;
}

/* What the caller left to us: as long as recomputing would take. */
static uint64_t default_deadline(const struct kvmm_req *rq,
				 const struct kvmm_job *op, uint32_t n)
{
	const struct kvmm_mset *m = &rq->m[rq->cur];
	uint64_t us = 0;
	uint32_t i;

	for (i = 0; i < n; i++)
		us += m->page[op->page[i].page].cost_us;
	return deadline_in(us ? us * NSEC_PER_USEC : LIB_FETCH_NS);
}

static int fetch_check(struct kvmm_req *rq, unsigned int first,
		       unsigned int end) __must_hold(&rq->lock)
{
	const struct kvmm_mset *m = kvmm_req_match(rq);

	int err = kvmm_req_alive(rq);

	if (err)
		return err;
	if (!m->ngroups || first >= end || end > m->max_units)
		return kvmm_fail(-EINVAL,
			"units [%u, %u) asked for, the match has %u", first,
			end, m->ngroups ? m->max_units : 0);
	return 0;
}

static int fetch(struct kvmm_req *rq, unsigned int first, unsigned int end,
		 kvmm_node_t node, uint64_t deadline_ns, uint64_t tag)
	__must_hold(&rq->lock)
{
	struct kvmm_mset *m = kvmm_req_match(rq);
	uint32_t n = 0, asked = 0, lo = 0;
	struct ring_key *key;
	struct kvmm_job *op;
	unsigned int i;
	int err;

	err = fetch_check(rq, first, end);
	if (err)
		return err;
	for (i = m->ngroups; i > 0; i--)
		n += span(&m->g[i - 1], first, end, &lo);
	op = kvmm_op_alloc(rq->k, n, n);
	if (!op)
		return -ENOMEM;
	op->rq = rq;
	op->era = rq->att->era;
	op->gen = m->gen;
	op->done.tag = tag;
	op->done.op = KVMM_OP_FETCH;
	op->done.first = lo;		/* the first group's, from page 0 on */
	op->done.n = n;
	err = ask_all(rq, op, first, end, node);
	if (err)
		goto out_recycle;
	for (i = 0; i < op->nr_parts; i++)
		asked += op->part[i].n;
	if (!asked) {
		kvmm_op_ready(op);
		return 0;
	}
	if (!deadline_ns)
		deadline_ns = default_deadline(rq, op, asked);
	op->deadline_ns = deadline_ns > DEADLINE_NONE - LIB_LATE_GRACE_NS ?
			  DEADLINE_NONE : deadline_ns + LIB_LATE_GRACE_NS;
	key = kvmm_op_keys(op, asked);
	err = key ? make_entries(rq, op, key, asked, deadline_ns) : -ENOMEM;
	if (!err)
		err = post(rq, op);
	if (!err)
		return 0;
out_recycle:
	kvmm_op_recycle(rq->k, op);
	return err;
}

int kvmm_fetch(struct kvmm_req *rq, unsigned int first, unsigned int end,
	       kvmm_node_t node, uint64_t deadline_ns, uint64_t tag)
{
	struct kvmm *k = rq->k;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	err = fetch(rq, first, end, node, deadline_ns, tag);
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return err;
}

/* -- report -------------------------------------------------------------------------- */

int kvmm_report(struct kvmm_req *rq, unsigned int page, int verdict)
{
	struct kvmm *k = rq->k;
	struct ring_sqe sqe = { .op = RING_REPORT, .n = 1, .arg = verdict };
	struct ring_key key = { .group = 0 };
	struct kvmm_mset *m;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	m = kvmm_req_match(rq);
	if (verdict != KVMM_BAD || page >= m->n) {
		err = kvmm_fail(-EINVAL, verdict != KVMM_BAD ?
			"verdict %d is unknown" : "there is no page %d",
			verdict != KVMM_BAD ? verdict : (int)page);
		goto out_unlock;
	}
	if (!rq->att || kvmm_era_lost(rq->att->era)) {
		err = kvmm_fail(-ENOTCONN, "no daemon");
		goto out_unlock;
	}
	memcpy(key.key, m->key[page], sizeof(key.key));
	key.group = kvmm_mset_group(m, page)->group;
	sqe.space = rq->att->ix;
	sqe.req = rq->slot;
	err = kvmm_sq_push(rq->att->era, &sqe, &key, sizeof(key));
out_unlock:
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return err;
}
