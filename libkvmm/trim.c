/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pins that go before their request's end: of a match that is longer than what
 * is used of it, of pages that have passed out of a window. At once, or when the
 * step that may still read those pages is done.
 */
#include <stdlib.h>

#include "libkvmm/lib.h"

/* Pins of one view that wait for a step. */
struct trimmed {
	struct kvmm_deferred deferred;
	struct kvmm_att	*att;
	struct kvmm_view *view;
	uint32_t	n;
	uint32_t	frame[];
};

static void trimmed_step(struct kvmm_deferred *d)
{
	struct trimmed *t = container_of(d, struct trimmed, deferred);
	uint32_t i;

	if (d->step > kvmm_era_step(t->att->era)) {
		/* the daemon is gone: as in req_step() */
		kvmm_att_read_until(t->att, d->step);
		t->n = 0;
	}
	for (i = 0; i < t->n; i++)
		kvmm_unpin_own(t->view, t->frame[i]);
	kvmm_view_drop(t->view);
	kvmm_att_put(t->att);
	free(t);
}

static struct trimmed *trimmed_new(struct kvmm_view *v, uint32_t n)
{
	struct trimmed *t = malloc(sizeof(*t) + n * sizeof(t->frame[0]));

	if (t) {
		t->n = 0;
		t->view = v;
	}
	return t;
}

/* It outlives the request from here on. */
static void trimmed_hold(struct trimmed *t, struct kvmm_att *a)
{
	t->att = a;
	kvmm_view_hold(t->view);		/* the request has one */
	atomic_fetch_add_explicit(&a->refs, 1, memory_order_relaxed);
}

static void trimmed_defer(struct trimmed *t, uint64_t after)
{
	t->deferred.fn = trimmed_step;
	kvmm_step_defer(t->att->era, &t->deferred, after);
}

/*
 * The pins from page @lo on go after @after. Without memory to remember them
 * they stay the request's until its end, which is always allowed.
 */
static struct trimmed *trim_group(struct kvmm_req *rq, struct kvmm_mset *m,
				  struct kvmm_mgroup *g, uint32_t lo)
{
	struct kvmm_own *o = kvmm_req_own(rq, g->view);
	struct trimmed *t = trimmed_new(g->view, g->n - lo);
	uint32_t i;

	if (!t && (!o || kvmm_own_room_pin(rq, o, g->n - lo)))
		return NULL;
	for (i = lo; i < g->n; i++) {
		struct kvmm_page *p = &m->page[g->first + i];

		if (!(p->flags & PAGE_PINNED))
			continue;
		if (t)
			t->frame[t->n++] = p->frame;
		else
			kvmm_own_add_pin(o, p->frame);
		p->flags &= ~PAGE_PINNED;
		m->nr_pins--;
	}
	return t;
}

int kvmm_trim(struct kvmm_req *rq, unsigned int n, uint64_t after)
{
	struct trimmed *t[KVMM_MAX_GROUPS] = { NULL };
	struct kvmm *k = rq->k;
	struct kvmm_mset *m;
	struct kvmm_era *e;
	unsigned int i;
	bool now;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	m = kvmm_req_match(rq);
	if (!rq->att || n >= m->max_units || !m->nr_pins) {
		kvmm_unlock(&rq->lock);
		kvmm_exit(k);
		return 0;
	}
	e = rq->att->era;
	now = after <= kvmm_era_step(e);
	for (i = 0; i < m->ngroups; i++) {
		struct kvmm_mgroup *g = &m->g[i];
		uint32_t lo = g->rule == KVMM_BLOB ? 1 : n * g->ratio;

		if (now) {
			kvmm_unpin_range(m, g, lo, g->n);
			continue;
		}
		t[i] = trim_group(rq, m, g, lo);
		if (t[i])
			trimmed_hold(t[i], rq->att);
	}
	if (n < m->n_here)
		m->n_here = n;
	kvmm_freeze_again(rq);
	kvmm_req_show_pins(rq);
	kvmm_unlock(&rq->lock);
	for (i = 0; i < KVMM_MAX_GROUPS; i++)
		if (t[i])
			trimmed_defer(t[i], after);
	kvmm_exit(k);
	return 0;
}

/* -- single frames ------------------------------------------------------------- */

/* One pin of the match on @frame, forgotten but still counted. */
static bool match_del_pin(struct kvmm_mset *m, const struct kvmm_view *v,
			  uint32_t frame)
{
	unsigned int i;
	uint32_t j;

	for (i = 0; m->nr_pins && i < m->ngroups; i++) {
		const struct kvmm_mgroup *g = &m->g[i];

		if (g->view != v)
			continue;
		for (j = g->first; j < g->first + g->n; j++) {
			struct kvmm_page *p = &m->page[j];

			if (p->frame != frame || !(p->flags & PAGE_PINNED))
				continue;
			p->flags &= ~PAGE_PINNED;
			m->nr_pins--;
			return true;
		}
	}
	return false;
}

/* Give @frames back; how many were this request's to give. */
static uint32_t free_some(struct kvmm_req *rq, struct kvmm_view *v,
			  const kvmm_frame_t *frames, uint32_t n,
			  uint64_t after, struct trimmed **late)
	__must_hold(&rq->lock)
{
	bool now = after <= kvmm_era_step(rq->att->era);
	struct kvmm_own *o = kvmm_req_own(rq, v);
	uint32_t i, run;

	for (i = 0; o && i < n; i++) {
		for (run = i; i < n && kvmm_own_del_open(o, frames[i]); i++)
			;
		if (i > run)
			kvmm_view_put(v, &frames[run], i - run, after);
		if (i == n)
			break;
		if (!now && !*late)
			*late = trimmed_new(v, n);
		if (!now && !*late)
			continue;	/* stays until the request's end */
		if (!kvmm_own_del_pin(o, frames[i]) &&
		    !match_del_pin(kvmm_req_match(rq), v, frames[i]))
			break;
		if (now)
			kvmm_unpin_own(v, frames[i]);
		else
			(*late)->frame[(*late)->n++] = frames[i];
	}
	return i;
}

int kvmm_free(struct kvmm_req *rq, unsigned int cls, kvmm_node_t node,
	      const kvmm_frame_t *frames, unsigned int n, uint64_t after)
{
	struct kvmm *k = rq->k;
	struct trimmed *late = NULL;
	struct kvmm_view *v;
	unsigned int i = 0;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	v = kvmm_req_view(rq, cls, node);
	if (v) {
		i = free_some(rq, v, frames, n, after, &late);
		kvmm_req_show_pins(rq);
	}
	if (late)
		trimmed_hold(late, rq->att);
	kvmm_unlock(&rq->lock);
	if (late)
		trimmed_defer(late, after);
	kvmm_exit(k);
	if (!v && n)
		return kvmm_fail(-EINVAL,
				 "no window is open on class %u at node %u",
				 cls, node);
	if (i < n)
		return kvmm_fail(-EINVAL,
			"frames[%u] is neither an OPEN frame nor a pinned page of this request; those before it are given back",
			i);
	return 0;
}
