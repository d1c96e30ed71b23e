/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fetch: what a client asks to have brought up, and when it is answered.
 *
 * Each page of an operation is there already, or hangs on a flight (flight.c)
 * together with all others who want it. The operation is answered when all its
 * pages are done, and at its own deadline whatever they do: a page that has not
 * come by then is a miss, and its flight is left. A frame that is named in an
 * answer is referenced until the client's completion head has passed it.
 */
#include <stdlib.h>

#include "daemon/mm/flight.h"

#define FETCH_MAX_NS	(60 * NSEC_PER_SEC)	/* no operation lives longer */

struct fetch_op;

/* One page of an operation. */
struct fetch_page {
	struct flight_wait w;
	struct fetch_op	*fo;
};

/**
 * struct fetch_op - a fetch of some pages by one client
 * @node:	in mm->fetches; its key is the deadline
 * @pending:	pages not done yet, and 1 while they are being asked for
 * @res:	what became of each; a frame here holds a reference
 */
struct fetch_op {
	struct mm_op	op;
	struct heap_node node;
	struct mm_pool	*pool;
	uint64_t	deadline_ns;
	uint32_t	n, pending;
	struct ring_result *res;
	struct fetch_page wait[];
};

/* -- answers ----------------------------------------------------------------- */

static void fetch_put(struct fetch_op *fo, int32_t result, uint32_t n)
{
	mm_op_complete(&fo->op, fo->pool, result, n, fo->res);
	mm_op_fini(&fo->op);
	heap_del(&fo->pool->nd->mm->fetches, &fo->node);
	free(fo);
}

static void fetch_unhold(struct fetch_op *fo)
{
	if (--fo->pending == 0)
		fetch_put(fo, 0, fo->n);
}

/* The page is READY on the pool's node: name it, with a reference. */
static void result_ready(struct mm_pool *p, struct page *pg,
			 struct ring_result *r)
{
	r->result = 0;
	r->frame = page_copy(pg, p->nd)->frame;
	r->word = frame_word_of(p, r->frame);
	frame_ref(p, r->frame);
}

void fetch_answer(struct flight_wait *w, struct page *pg, int err)
{
	struct fetch_page *fp = container_of(w, struct fetch_page, w);
	struct fetch_op *fo = fp->fo;
	struct ring_result *r = &fo->res[fp - fo->wait];

	if (pg)
		result_ready(fo->pool, pg, r);
	else
		r->result = err;
	fetch_unhold(fo);
}

/* -- operations ---------------------------------------------------------------- */

static void fetch_leave(struct fetch_op *fo, int32_t result)
{
	uint32_t i;

	for (i = 0; i < fo->n; i++) {
		struct page *pg;

		if (!fo->wait[i].w.fl)
			continue;
		pg = flight_leave(&fo->wait[i].w);
		if (pg)
			result_ready(fo->pool, pg, &fo->res[i]);
		else
			fo->res[i].result = result;
	}
}

/* Nothing was done to any page: no frame goes out. */
static void fetch_abort(struct fetch_op *fo, int32_t result)
{
	uint32_t i;

	fetch_leave(fo, result);
	for (i = 0; i < fo->n; i++)
		if (fo->res[i].frame)
			frame_unref(fo->pool, fo->res[i].frame);
	fetch_put(fo, result, 0);
}

static void fetch_cancel(struct mm_op *op)
{
	fetch_abort(container_of(op, struct fetch_op, op), -ECANCELED);
}

/* Whose deadline is next, NULL: there is no operation. */
static struct fetch_op *fetch_first(const struct mm *mm)
{
	struct heap_node *n = heap_first(&mm->fetches);

	return n ? container_of(n, struct fetch_op, node) : NULL;
}

static struct fetch_op *fetch_create(struct mm_win *w,
				     const struct ring_sqe *sqe, uint64_t now)
{
	struct mm *mm = w->pool->nd->mm;
	uint32_t n = sqe->n, i;
	struct fetch_op *fo;

	fo = calloc(1, sizeof(*fo) + n * (sizeof(fo->wait[0]) +
					  sizeof(fo->res[0])));
	if (!fo)
		return NULL;
	fo->res = (struct ring_result *)(fo->wait + n);
	fo->pool = w->pool;
	fo->n = n;
	fo->deadline_ns = min(sqe->arg ? sqe->arg : now + mm->o.fetch_ns,
			      now + FETCH_MAX_NS);
	for (i = 0; i < n; i++) {
		fo->wait[i].fo = fo;
		list_init(&fo->wait[i].w.link);
	}
	mm_op_init(&fo->op, w, sqe->tag, RING_FETCH, fetch_cancel);
	heap_add(&mm->fetches, &fo->node, fo->deadline_ns);
	return fo;
}

/* Hang page @i on @fl, or on a flight of its own. */
static void fetch_wait(struct fetch_op *fo, uint32_t i, struct page *pg,
		       struct flight *fl)
{
	struct flight_wait *w = &fo->wait[i].w;
	int err;

	fo->pending++;
	if (fl) {
		flight_join(w, fl, fo->deadline_ns);
		err = 0;
	} else {
		err = flight_begin(w, pg, fo->pool, fo->deadline_ns, fo->n - i);
	}
	if (err == -EAGAIN || flight_waits(w))
		pool_starves(fo->pool, fo->op.client->engine);
	if (!err)
		return;
	fo->res[i].result = err;
	fo->pending--;
}

/* One page. It is answered in @res, now or by its flight. */
static void fetch_page(struct fetch_op *fo, uint32_t i,
		       const struct ring_key *key)
{
	struct mm_pool *p = fo->pool;
	struct mm_space *sp = p->space;
	struct ring_result *r = &fo->res[i];
	uint64_t k[4];
	struct page *pg;
	struct copy *c;

	if (key->group >= sp->desc.ngroups ||
	    sp->desc.group[key->group].class_ix != p->cls) {
		r->result = -EINVAL;
		return;
	}
	memcpy(k, key->key, sizeof(k));
	pg = page_find(sp, key->group, k);
	if (!pg) {
		admit_asked(sp, key->group, k);
		r->result = -ENOENT;
		return;
	}
	c = page_copy(pg, p->nd);
	if (c->state == COPY_READY) {
		result_ready(p, pg, r);
	} else if (fo->deadline_ns <= sp->mm->now_ns) {
		r->result = -ENOENT;
	} else {
		fetch_wait(fo, i, pg, c->flight);
	}
}

static int fetch_allowed(const struct mm_win *w)
{
	int err = engine_usable(w->engine);

	if (err)
		return err;
	return w->pool->nd->mm->stopping ? -ESHUTDOWN : 0;
}

/* In these modes matches find nothing, so nothing is brought up either. */
static bool mode_misses(const struct mm_space *sp)
{
	enum kvmm_mode mode = mm_space_mode(sp);

	return mode == KVMM_MODE_OBSERVE || mode == KVMM_MODE_BYPASS;
}

void mm_fetch(struct mm_win *w, const struct ring_sqe *sqe,
	      const struct ring_key *key)
{
	struct mm *mm = w->pool->nd->mm;
	struct ring_cqe cqe = { .op = RING_FETCH, .tag = sqe->tag };
	struct fetch_op *fo;
	uint32_t i;

	mm->now_ns = now_ns();
	cqe.result = fetch_allowed(w);
	if (cqe.result) {
		mm->ops->complete(w->client, w, &cqe, NULL);
		return;
	}
	fo = fetch_create(w, sqe, mm->now_ns);
	if (!fo) {
		cqe.result = -EAGAIN;
		mm->ops->complete(w->client, w, &cqe, NULL);
		return;
	}
	fo->pending = 1;
	for (i = 0; i < fo->n; i++) {
		if (mode_misses(w->pool->space))
			fo->res[i].result = -ENOENT;
		else
			fetch_page(fo, i, &key[i]);
	}
	fetch_unhold(fo);
}

/* -- time --------------------------------------------------------------------- */

uint64_t fetch_run(struct mm *mm, uint64_t now)
{
	uint64_t next = UINT64_MAX, at;
	struct fetch_op *fo;

	mm->now_ns = now;
	while ((fo = fetch_first(mm))) {
		if (now < fo->deadline_ns) {
			next = fo->deadline_ns;
			break;
		}
		fetch_leave(fo, -ENOENT);
		fetch_put(fo, 0, fo->n);
	}
	at = flights_run(mm, now);
	return min(next, at);
}

void fetch_stop(struct mm *mm)
{
	struct fetch_op *fo;

	while ((fo = fetch_first(mm)))
		fetch_abort(fo, -ECANCELED);
	flights_stop(mm);
}
