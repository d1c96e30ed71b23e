/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A match that is longer than what is used of it: the pins behind go at once, or
 * when the step that may still read those pages is done.
 */
#include <stdlib.h>

#include "libkvmm/lib.h"

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
		kvmm_unpin(t->view, t->frame[i]);
	kvmm_view_drop(t->view);
	kvmm_att_put(t->att);
	free(t);
}

/*
 * The pins from page @lo on go after @after. Without memory to remember them
 * they stay the request's until its end, which is always allowed.
 */
static struct trimmed *trim_group(struct kvmm_req *rq, struct kvmm_mset *m,
				  struct kvmm_mgroup *g, uint32_t lo)
{
	struct kvmm_own *o = kvmm_req_own(rq, g->view);
	struct trimmed *t = malloc(sizeof(*t) + (g->n - lo) *
				   sizeof(t->frame[0]));
	uint32_t i;

	if (!t && (!o || kvmm_own_room_pin(rq, o, g->n - lo)))
		return NULL;
	if (t) {
		t->n = 0;
		t->view = g->view;
	}
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
		if (t[i]) {
			t[i]->att = rq->att;
			kvmm_view_hold(t[i]->view);	/* the request has one */
			atomic_fetch_add_explicit(&rq->att->refs, 1,
						  memory_order_relaxed);
		}
	}
	if (n < m->n_here)
		m->n_here = n;
	kvmm_req_show_pins(rq);
	kvmm_unlock(&rq->lock);
	for (i = 0; i < KVMM_MAX_GROUPS; i++) {
		if (!t[i])
			continue;
		t[i]->deferred.fn = trimmed_step;
		kvmm_step_defer(e, &t[i]->deferred, after);
	}
	kvmm_exit(k);
	return 0;
}
