/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests own pins and OPEN frames. A request ends in two steps: the user's
 * handle goes at once; the object stays until its last operation is complete
 * and its pins' step is done. What an operation brings after the end is treated
 * as if it had come before: a sealed page is unpinned after the step, a frame
 * that stayed private is freed.
 */
#include <stdlib.h>
#include <string.h>

#include "libkvmm/lib.h"

#define REQ_KEEP_FREE	256		/* recycled objects a connection keeps */
#define REQ_KEEP_KEYS	(1u << 16)	/* and how long their arrays may be */

/* -- what it looks into --------------------------------------------------------- */

struct kvmm_view *kvmm_req_view(struct kvmm_req *rq, unsigned int cls,
				unsigned int node)
{
	struct kvmm_view *v = rq->att ? kvmm_att_view(rq->att, cls, node) : NULL;
	unsigned int i;

	if (!v)
		return NULL;
	for (i = 0; i < rq->nr_held; i++)
		if (rq->held[i] == v)
			return v;
	/* it may be closed by another thread at this moment */
	if (rq->nr_held == ARRAY_SIZE(rq->held) || !kvmm_view_hold(v))
		return NULL;
	rq->held[rq->nr_held++] = v;
	return v;
}

/* -- slots in the ledger ---------------------------------------------------------- */

static int slot_take(struct kvmm_req *rq, struct kvmm_era *e)
{
	struct ledger_req *l;

	kvmm_lock(&rq->k->ops_lock);
	if (!e->nr_req_free) {
		kvmm_unlock(&rq->k->ops_lock);
		return -EAGAIN;
	}
	rq->slot = e->req_free[--e->nr_req_free];
	kvmm_unlock(&rq->k->ops_lock);

	l = kvmm_era_req(e, rq->slot);
	atomic_store_explicit(&l->id, rq->id, memory_order_relaxed);
	atomic_store_explicit(&l->start_ns, now_ns(), memory_order_relaxed);
	atomic_store_explicit(&l->session, rq->session, memory_order_relaxed);
	atomic_store_explicit(&l->space, rq->att->ix, memory_order_relaxed);
	atomic_store_explicit(&l->nr_pins, 0, memory_order_relaxed);
	/* release: who reads the state as taken reads the rest as it is */
	atomic_store_explicit(&l->state, 1, memory_order_release);
	return 0;
}

static void slot_give(struct kvmm_req *rq, struct kvmm_era *e)
{
	/* release: as in slot_take() */
	atomic_store_explicit(&kvmm_era_req(e, rq->slot)->state, 0,
			      memory_order_release);
	kvmm_lock(&rq->k->ops_lock);
	e->req_free[e->nr_req_free++] = rq->slot;
	kvmm_unlock(&rq->k->ops_lock);
}

void kvmm_req_show_pins(struct kvmm_req *rq)
{
	uint32_t n = kvmm_req_match(rq)->nr_pins + kvmm_blobs_pins(rq);
	unsigned int i;

	if (!rq->att)
		return;
	for (i = 0; i < rq->nr_own; i++)
		n += rq->own[i].nr_pin;
	atomic_store_explicit(&kvmm_era_req(rq->att->era, rq->slot)->nr_pins, n,
			      memory_order_relaxed);
}

int kvmm_req_alive(const struct kvmm_req *rq)
{
	if (!rq->att)
		return kvmm_fail(-ENOTCONN, "no daemon");
	if (rq->att->era != kvmm_era_now(rq->k))
		return kvmm_fail(-ESTALE,
			"the request is of a daemon that is gone");
	if (kvmm_era_lost(rq->att->era))
		return kvmm_fail(-ENOTCONN, "no daemon");
	if (kvmm_era_dying(rq->att->era))
		return kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	return 0;
}

/*
 * A request that was opened between two daemons, or before win_sync attached
 * again, holds nothing and finds nothing: it does not stand in win_sync's way,
 * and gets an attachment with the first call that finds one.
 */
bool kvmm_req_bind(struct kvmm_req *rq)
{
	struct kvmm_att *a;

	if (rq->att)
		return true;
	/* seq_cst: see the top of lib.h */
	a = atomic_load(&rq->sp->att);
	if (!a || a->era != kvmm_era_now(rq->k) || !kvmm_att_get(a))
		return false;
	rq->att = a;
	if (!slot_take(rq, a->era))
		return true;
	rq->att = NULL;
	kvmm_att_put(a);
	return false;
}

/* -- objects ---------------------------------------------------------------------- */

static void req_destroy(struct kvmm_req *rq)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(rq->own); i++) {
		free(rq->own[i].open);
		free(rq->own[i].pin);
	}
	for (i = 0; i < ARRAY_SIZE(rq->m); i++) {
		free(rq->m[i].key);
		free(rq->m[i].page);
	}
	free(rq->p.key);
	free(rq->p.page);
	kvmm_mutex_fini(&rq->lock);
	free(rq);
}

static struct kvmm_req *req_new(struct kvmm *k)
{
	struct kvmm_req *rq;

	kvmm_lock(&k->ops_lock);
	rq = k->free_req;
	if (rq) {
		k->free_req = (struct kvmm_req *)rq->link.next;
		k->nr_free_req--;
	}
	kvmm_unlock(&k->ops_lock);
	if (!rq) {
		rq = calloc(1, sizeof(*rq));
		if (!rq)
			return NULL;
		kvmm_mutex_init(&rq->lock, LOCK_REQUESTS);
		list_init(&rq->blobs);
	}
	rq->k = k;
	rq->refs = 1;
	return rq;
}

static bool req_is_large(const struct kvmm_req *rq)
{
	return rq->m[0].cap > REQ_KEEP_KEYS || rq->m[1].cap > REQ_KEEP_KEYS ||
	       rq->p.cap > REQ_KEEP_KEYS;
}

/* Nobody refers to it any more: the attachment's reference and itself go. */
static void req_recycle(struct kvmm_req *rq)
{
	struct kvmm *k = rq->k;
	bool keep;

	while (rq->nr_held)
		kvmm_view_drop(rq->held[--rq->nr_held]);
	if (rq->att) {
		slot_give(rq, rq->att->era);
		kvmm_att_put(rq->att);
	}
	rq->att = NULL;
	rq->sp = NULL;
	rq->nr_own = 0;
	rq->frozen = 0;
	rq->nr_ops = 0;
	rq->nr_flying = 0;
	rq->ended = false;
	rq->m[0].ngroups = rq->m[0].nr_pins = rq->m[0].n = 0;
	rq->m[1].ngroups = rq->m[1].nr_pins = rq->m[1].n = 0;
	rq->m[0].asked_ns = rq->m[1].asked_ns = rq->p.asked_ns = 0;
	memset(rq->tail, 0, sizeof(rq->tail));

	kvmm_lock(&k->ops_lock);
	keep = k->nr_free_req < REQ_KEEP_FREE && !req_is_large(rq);
	if (keep) {
		rq->link.next = (struct list *)k->free_req;
		k->free_req = rq;
		k->nr_free_req++;
	}
	kvmm_unlock(&k->ops_lock);
	if (!keep)
		req_destroy(rq);
}

static void req_put(struct kvmm_req *rq)
{
	/* acq_rel: the last one recycles what the others wrote */
	if (atomic_fetch_sub_explicit(&rq->refs, 1, memory_order_acq_rel) == 1)
		req_recycle(rq);
}

void kvmm_req_free_all(struct kvmm *k)
{
	struct kvmm_req *rq;

	while (k->free_req) {
		rq = k->free_req;
		k->free_req = (struct kvmm_req *)rq->link.next;
		req_destroy(rq);
	}
	k->nr_free_req = 0;
}

int kvmm_req_open(struct kvmm_space *sp, uint64_t id,
		  const struct kvmm_hint *hint, struct kvmm_req **ret)
{
	struct kvmm *k = sp->k;
	struct kvmm_hint h = { 0 };
	struct kvmm_req *rq;
	int err = 0;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	if (hint)
		err = kvmm_opts_copy(&h, sizeof(h), hint, "kvmm_hint");
	if (err)
		goto out_exit;
	rq = req_new(k);
	if (!rq) {
		err = kvmm_fail(-ENOMEM, "out of memory");
		goto out_exit;
	}
	rq->sp = sp;
	rq->id = id;
	rq->session = h.session;
	rq->expect_ms = h.expect_return_ms;
	kvmm_lock(&rq->lock);
	if (!kvmm_req_bind(rq)) {
		struct kvmm_att *a = atomic_load(&sp->att);	/* seq_cst */

		/* without a daemon it may be unbound; with one, slots are out */
		if (a && a->era == kvmm_era_now(k))
			err = kvmm_fail(-EAGAIN,
				"all %u request slots are taken",
				a->era->ledger->req_slots);
	}
	kvmm_unlock(&rq->lock);
	if (err) {
		req_put(rq);
		goto out_exit;
	}
	kvmm_lock(&k->ops_lock);
	list_add_tail(&sp->reqs, &rq->link);
	kvmm_unlock(&k->ops_lock);
	*ret = rq;
out_exit:
	kvmm_exit(k);
	return err;
}

int kvmm_req_child(struct kvmm_req *rq, uint64_t id, struct kvmm_req **ret)
{
	struct kvmm *k = rq->k;
	struct kvmm_req *c = req_new(k);
	int err;

	if (!c)
		return kvmm_fail(-ENOMEM, "out of memory");
	c->sp = rq->sp;
	c->id = id;
	c->session = rq->session;
	c->expect_ms = rq->expect_ms;
	kvmm_att_get(rq->att);		/* the parent has one */
	c->att = rq->att;
	err = slot_take(c, c->att->era);
	if (err) {
		c->att = NULL;
		kvmm_att_put(rq->att);
		req_put(c);
		return kvmm_fail(err, "all %u request slots are taken",
				 rq->att->era->ledger->req_slots);
	}
	kvmm_lock(&k->ops_lock);
	list_add_tail(&c->sp->reqs, &c->link);
	kvmm_unlock(&k->ops_lock);
	*ret = c;
	return 0;
}

/* -- the end ------------------------------------------------------------------------ */

void kvmm_req_set_tail(struct kvmm_req *rq, unsigned int group,
		       struct kvmm_view *v, uint32_t frame, uint64_t word,
		       uint32_t len)
{
	struct kvmm_tail *t = &rq->tail[group];

	if (len >= t->len)
		*t = (struct kvmm_tail){
			.view = v, .frame = frame, .word = word, .len = len,
		};
}

/* The deepest page that the match holds is a tail, too. */
static void tails_of_match(struct kvmm_req *rq)
{
	const struct kvmm_mset *m = kvmm_req_match(rq);
	unsigned int i;
	uint32_t j;

	for (i = 0; m->nr_pins && i < m->ngroups; i++) {
		const struct kvmm_mgroup *g = &m->g[i];

		for (j = g->n; j > 0; j--) {
			const struct kvmm_page *p = &m->page[g->first + j - 1];

			if (!(p->flags & PAGE_PINNED))
				continue;
			kvmm_req_set_tail(rq, g->group, g->view, p->frame,
					  p->fword, j);
			break;
		}
	}
}

/**
 * struct asked - keys on their way into the arena
 * @at:		keys that have gone; @group is where the next one belongs
 * @n:		how many the entry takes that is being written
 */
struct asked {
	const struct kvmm_mset *m;
	uint32_t	at;
	uint32_t	n;
	unsigned int	group;
};

/*
 * A peek names all of a prompt, the match that follows it often no more than
 * the peek had found: what counts is the one that asked for more.
 */
static struct asked what_was_asked(struct kvmm_req *rq)
{
	const struct kvmm_mset *m = kvmm_req_match(rq);
	struct asked a = { 0 };

	if (!kvmm_req_keys_wanted(rq))
		return a;
	if (rq->p.asked_ns && (!m->asked_ns || rq->p.n > m->n))
		m = &rq->p;
	if (m->asked_ns && m->n)
		a.m = m;
	return a;
}

static uint32_t asked_left(const struct asked *a)
{
	return a->m ? a->m->n - a->at : 0;
}

/* Straight into the arena, under the ring's lock. */
static void copy_keys(void *to, void *arg)
{
	struct ring_key *key = to;
	struct asked *a = arg;
	uint32_t i;

	for (i = 0; i < a->n; i++, a->at++) {
		const struct kvmm_mgroup *g = &a->m->g[a->group];

		while (a->at >= g->first + g->n)
			g = &a->m->g[++a->group];
		memcpy(key[i].key, a->m->key[a->at], sizeof(key[i].key));
		key[i].group = g->group;
		memset(key[i].spare, 0, sizeof(key[i].spare));
	}
}

/* With as many keys as one entry takes; without, if the arena has no room. */
static void push_end(struct kvmm_req *rq, struct ring_sqe *sqe,
		     struct asked *a)
{
	struct kvmm_era *e = rq->att->era;
	int err;

	a->n = min_t(uint32_t, asked_left(a), KVMM_MAX_BATCH);
	if (a->n) {
		sqe->nr_keys = a->n;
		sqe->asked_ms = a->m->asked_ns / NSEC_PER_MSEC;
		err = kvmm_sq_push_fill(e, sqe, a->n * sizeof(struct ring_key),
					copy_keys, a);
		if (!err)
			return;
		if (err == -EAGAIN)
			stat_add(rq->k, keys_lost, asked_left(a));
		a->m = NULL;
		sqe->nr_keys = 0;
		sqe->asked_ms = 0;
	}
	if (sqe->frame && kvmm_sq_push(e, sqe, NULL, 0) == -EAGAIN)
		stat_add(rq->k, touches_lost, 1);
}

/*
 * One entry per group that had hits or published pages, and one per blob, all
 * of whose chunks are touched; the first carries the keys if they are wanted,
 * and what it cannot take goes in more.
 */
static void post_end(struct kvmm_req *rq)
{
	struct asked asked = what_was_asked(rq);
	const struct ring_sqe plain = {
		.op		= RING_END,
		.how		= rq->how,
		.space		= rq->att->ix,
		.req		= rq->slot,
		.after		= rq->after,
		.expect_ms	= rq->expect_ms,
		.session	= rq->session,
	};
	const struct kvmm_blob *b;
	struct ring_sqe sqe;
	unsigned int i;

	for (i = 0; i < KVMM_MAX_GROUPS; i++) {
		const struct kvmm_tail *t = &rq->tail[i];

		if (!t->len || kvmm_view_closed(t->view) ||
		    kvmm_blobs_find(rq, t->view, t->frame, t->word))
			continue;
		sqe = plain;
		sqe.group = i;
		sqe.n = t->len;
		sqe.arg = t->word;
		sqe.frame = t->frame;
		sqe.win = t->view->no;
		push_end(rq, &sqe, &asked);
	}
	list_for_each_entry(b, &rq->blobs, link) {
		if (!b->word || kvmm_view_closed(b->view))
			continue;
		sqe = plain;
		sqe.group = b->group;
		sqe.n = b->n;
		sqe.arg = b->word;
		sqe.frame = b->frame[0];
		sqe.win = b->view->no;
		push_end(rq, &sqe, &asked);
	}
	while (asked_left(&asked)) {
		sqe = plain;
		push_end(rq, &sqe, &asked);
	}
}

static void free_open(struct kvmm_req *rq)
{
	unsigned int i;

	for (i = 0; i < rq->nr_own; i++) {
		struct kvmm_own *o = &rq->own[i];

		if (o->nr_open)
			kvmm_view_put(o->view, o->open, o->nr_open, rq->after);
		o->nr_open = 0;
	}
}

static void unpin_all(struct kvmm_req *rq)
{
	unsigned int i;

	kvmm_mset_unpin(kvmm_req_match(rq));
	for (i = 0; i < rq->nr_own; i++)
		kvmm_own_unpin(&rq->own[i]);
	kvmm_blobs_end(rq);
	kvmm_req_show_pins(rq);
}

void kvmm_req_undo(struct kvmm_req *rq)
{
	kvmm_lock(&rq->k->ops_lock);
	list_del(&rq->link);
	kvmm_unlock(&rq->k->ops_lock);
	kvmm_thaw(rq);
	unpin_all(rq);
	req_put(rq);
}

/*
 * The step is done, or the daemon is gone. In the latter case a kernel may be
 * reading still: the pins stay as they are, nobody counts them any more, and
 * kvmm_win_sync() leaves the mappings alone until the step is done.
 */
static void req_step(struct kvmm_deferred *d)
{
	struct kvmm_req *rq = container_of(d, struct kvmm_req, deferred);

	if (d->step <= kvmm_era_step(rq->att->era)) {
		kvmm_lock(&rq->lock);
		unpin_all(rq);
		kvmm_unlock(&rq->lock);
	} else {
		kvmm_att_read_until(rq->att, d->step);
		kvmm_lock(&rq->lock);
		kvmm_blobs_keep(rq);
		kvmm_unlock(&rq->lock);
	}
	req_put(rq);
}

/* Ended and nothing is in flight: tell the daemon, let the pins go. */
static void req_finish(struct kvmm_req *rq) __releases(&rq->lock)
{
	if (!rq->att) {
		kvmm_unlock(&rq->lock);
		req_put(rq);
		return;
	}
	free_open(rq);
	post_end(rq);
	if (rq->after <= kvmm_era_step(rq->att->era)) {
		unpin_all(rq);
		kvmm_unlock(&rq->lock);
		req_put(rq);
		return;
	}
	kvmm_unlock(&rq->lock);
	rq->deferred.fn = req_step;
	kvmm_step_defer(rq->att->era, &rq->deferred, rq->after);
}

void kvmm_req_op_done(struct kvmm_req *rq)
{
	/* the user's reference became the finish's when it ended the request */
	if (!--rq->nr_ops && rq->ended)
		req_finish(rq);
	else
		kvmm_unlock(&rq->lock);
}

static int req_end(struct kvmm_req *rq, int how, uint64_t after)
{
	struct kvmm *k = rq->k;

	kvmm_lock(&k->ops_lock);
	list_del(&rq->link);
	kvmm_unlock(&k->ops_lock);

	kvmm_lock(&rq->lock);
	rq->ended = true;
	rq->how = how;
	rq->after = after;
	kvmm_thaw(rq);
	tails_of_match(rq);
	if (!rq->nr_ops) {
		req_finish(rq);
		return 0;
	}
	/*
	 * Something is in flight. What it may touch is with the operation; the
	 * rest goes now, as far as no step holds it.
	 */
	if (rq->att) {
		kvmm_ops_cancel(rq->att->era, rq);
		free_open(rq);
		if (after <= kvmm_era_step(rq->att->era))
			unpin_all(rq);
	}
	kvmm_unlock(&rq->lock);
	return 0;
}

int kvmm_req_end(struct kvmm_req *rq, int how, uint64_t after)
{
	struct kvmm *k = rq->k;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	req_end(rq, how, after);
	kvmm_exit(k);
	return 0;
}

void kvmm_req_abandon(struct kvmm_req *rq)
{
	/* whoever closes the connection says that it reads no more */
	req_end(rq, KVMM_UNKNOWN, 0);
}
