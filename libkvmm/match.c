/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The joint rule: one length for all groups.
 *
 * A length is counted in units of the least common multiple of the groups'
 * block_tokens, so that it ends on a page in each of them. Length n needs of a
 *
 *	FULL group	pages [0, n)
 *	WINDOW(w)	pages [n - w, n)
 *	LAST		page n - 1, the snapshot at n
 *	BLOB		its one key, whatever n is
 *
 * (n in the group's own pages). Needing is not monotonous: a WINDOW may have
 * what length 10 needs and not what length 9 does. So n comes down from above:
 * each group in turn lowers it to the largest length that suits it, until none
 * does. This is done twice, for "somewhere" and for "pinned here".
 */
#include <stdlib.h>
#include <string.h>

#include "libkvmm/lib.h"

/* -- keys in ----------------------------------------------------------------- */

static int mset_room(struct kvmm_mset *m, uint32_t n)
{
	uint32_t cap = roundup_pow2(n < 64 ? 64 : n);
	void *key, *page;

	if (n <= m->cap)
		return 0;
	/* what is in them is of an earlier match: no need to keep it */
	key = malloc(cap * sizeof(*m->key));
	page = malloc(cap * sizeof(*m->page));
	if (!key || !page) {
		free(key);
		free(page);
		return kvmm_fail(-ENOMEM, "out of memory");
	}
	free(m->key);
	free(m->page);
	m->key = key;
	m->page = page;
	m->cap = cap;
	return 0;
}

int kvmm_mset_copy(struct kvmm_mset *to, const struct kvmm_mset *from)
{
	struct kvmm_mset kept;
	unsigned int i;
	uint32_t j;
	int err;

	err = mset_room(to, from->n);
	if (err)
		return err;
	kept = *to;
	*to = *from;
	to->key = kept.key;
	to->page = kept.page;
	to->cap = kept.cap;
	to->asked_ns = 0;		/* they were asked for once */
	if (!from->n)
		return 0;
	memcpy(to->key, from->key, from->n * sizeof(*to->key));
	memcpy(to->page, from->page, from->n * sizeof(*to->page));
	for (i = 0; to->nr_pins && i < to->ngroups; i++) {
		const struct kvmm_mgroup *g = &to->g[i];

		for (j = g->first; j < g->first + g->n; j++)
			if (to->page[j].flags & PAGE_PINNED)
				kvmm_pin(g->view, to->page[j].frame);
	}
	return 0;
}

static int check_keys(const struct desc *d, const struct kvmm_keys *keys,
		      unsigned int ngroups, uint32_t *total)
{
	uint32_t seen = 0;
	uint64_t sum = 0;
	unsigned int i;

	if (!ngroups || ngroups > d->ngroups || !keys)
		return kvmm_fail(-EINVAL,
				 "keys of %u groups given, the space has %u",
				 ngroups, d->ngroups);
	for (i = 0; i < ngroups; i++) {
		unsigned int g = keys[i].group;

		if (g >= d->ngroups || seen >> g & 1)
			return kvmm_fail(-EINVAL, "group %u %s", g,
				g < d->ngroups ? "is given twice" :
						 "is not in the space");
		if (d->group[g].rule == KVMM_BLOB && keys[i].n != 1)
			return kvmm_fail(-EINVAL,
				"group %u is a BLOB and has one key, not %u",
				g, keys[i].n);
		if (keys[i].n && !keys[i].k)
			return kvmm_fail(-EINVAL, "group %u: no keys", g);
		seen |= 1u << g;
		sum += keys[i].n;
	}
	if (sum > LIB_MAX_KEYS)
		return kvmm_fail(-EINVAL, "%llu keys, at most %u",
				 (unsigned long long)sum, LIB_MAX_KEYS);
	*total = sum;
	return 0;
}

static uint64_t common_unit(const struct desc *d, const struct kvmm_keys *keys,
			    unsigned int ngroups)
{
	uint64_t unit = 1;
	unsigned int i;

	for (i = 0; i < ngroups; i++) {
		const struct desc_group *g = &d->group[keys[i].group];

		if (g->rule != KVMM_BLOB)
			unit = unit / gcd64(unit, g->block_tokens) *
			       g->block_tokens;
	}
	return unit;
}

/*
 * Fill @m with the keys; nothing is looked up yet. Without a window on @node
 * there is nothing to pin, which only a peek can do with.
 */
static int mset_fill(struct kvmm_req *rq, struct kvmm_mset *m,
		     const struct kvmm_keys *keys, unsigned int ngroups,
		     unsigned int node, bool pin) __must_hold(&rq->lock)
{
	const struct desc *d = &rq->sp->desc;
	uint64_t unit;
	uint32_t i, total, at = 0;
	int err;

	err = check_keys(d, keys, ngroups, &total);
	if (err)
		return err;
	err = mset_room(m, total);
	if (err)
		return err;
	unit = common_unit(d, keys, ngroups);
	m->node = node;
	m->ngroups = ngroups;
	m->n = total;
	m->max_units = UINT32_MAX;
	m->n_any = 0;
	m->n_here = 0;
	m->nr_pins = 0;
	m->races = 0;
	m->sync_wanted = false;
	m->blind = false;
	m->asked_ns = kvmm_req_keys_wanted(rq) ? now_ns() : 0;
	for (i = 0; i < ngroups; i++) {
		struct kvmm_mgroup *g = &m->g[i];
		const struct desc_group *dg = &d->group[keys[i].group];

		g->group = keys[i].group;
		g->rule = dg->rule;
		g->cls = dg->class_ix;
		g->first = at;
		g->n = keys[i].n;
		g->ratio = dg->rule == KVMM_BLOB ? 1 : unit / dg->block_tokens;
		g->window = dg->window_pages;
		g->lead_any = 0;
		g->lead_here = 0;
		g->view = kvmm_req_view(rq, g->cls, node);
		if (!g->view && pin)
			m->blind = true;
		if (!g->view && pin && rq->att && (node >= KVMM_MAX_NODES ||
		    !atomic_load_explicit(&rq->sp->open[g->cls][node],
					  memory_order_relaxed)))
			return kvmm_fail(-EINVAL,
				"no window is open on class %s at node %u",
				d->cls[g->cls].name, node);
		if (g->rule != KVMM_BLOB && g->n / g->ratio < m->max_units)
			m->max_units = g->n / g->ratio;
		if (g->n)
			memcpy(m->key[at], keys[i].k,
			       g->n * sizeof(*m->key));
		at += g->n;
	}
	if (m->max_units == UINT32_MAX)
		m->max_units = 1;	/* of blobs alone: there or not */
	/* all of it: a fetch may bring a page that no look has found */
	for (i = 0; i < total; i++)
		m->page[i] = (struct kvmm_page){ .state = PAGE_UNKNOWN };
	return 0;
}

/* -- the rule ------------------------------------------------------------------ */

void kvmm_mgroup_need(const struct kvmm_mgroup *g, uint32_t n, uint32_t *lo,
		      uint32_t *hi)
{
	*hi = n * g->ratio;
	*lo = 0;
	switch (g->rule) {
	case KVMM_WINDOW:
		*lo = *hi > g->window ? *hi - g->window : 0;
		break;
	case KVMM_LAST:
		*lo = *hi ? *hi - 1 : 0;
		break;
	case KVMM_BLOB:
		*hi = 1;
		break;
	}
}

static bool page_ok(const struct kvmm_page *p, bool here)
{
	return here ? p->state == KVMM_HIT : p->state != KVMM_MISS;
}

/* Look up to page @end: it, and those before it down to @lo that are not yet. */
static void look_back(struct kvmm_att *a, struct kvmm_mset *m,
		      struct kvmm_mgroup *g, uint32_t lo, uint32_t end)
{
	const struct kvmm_page *p = &m->page[g->first];
	uint32_t i = end;

	while (i > lo && p[i - 1].state == PAGE_UNKNOWN)
		i--;
	kvmm_look(a, m, g, i, end);
}

/*
 * The largest length up to @n that a WINDOW group has. Pages [*@good, the end of
 * length @n) are known to suit: however often the other groups move the window
 * down, each page is looked up once, and looked at twice.
 */
static uint32_t fit_window(struct kvmm_att *a, struct kvmm_mset *m,
			   struct kvmm_mgroup *g, uint32_t n, bool here,
			   uint32_t *good)
{
	const struct kvmm_page *p = &m->page[g->first];

	while (n) {
		uint32_t lo, hi, i;

		kvmm_mgroup_need(g, n, &lo, &hi);
		for (i = min(hi, *good); i > lo; i--) {
			if (p[i - 1].state == PAGE_UNKNOWN)
				look_back(a, m, g, lo, i);
			if (!page_ok(&p[i - 1], here))
				break;
		}
		if (i == lo) {
			*good = lo;
			break;
		}
		/* page i - 1 is missing: the next length ends before it */
		n = (i - 1) / g->ratio;
	}
	return n;
}

static uint32_t fit_last(struct kvmm_att *a, struct kvmm_mset *m,
			 struct kvmm_mgroup *g, uint32_t n, bool here)
{
	for (; n; n--) {
		uint32_t i = n * g->ratio - 1;
		const struct kvmm_page *p = &m->page[g->first + i];

		if (p->state == PAGE_UNKNOWN)
			kvmm_look(a, m, g, i, i + 1);
		if (page_ok(p, here))
			break;
	}
	return n;
}

static uint32_t fit_full(const struct kvmm_mgroup *g, uint32_t n, bool here)
{
	return min(n, (here ? g->lead_here : g->lead_any) / g->ratio);
}

static uint32_t fit(struct kvmm_att *a, struct kvmm_mset *m,
		    struct kvmm_mgroup *g, uint32_t n, bool here,
		    uint32_t *good)
{
	switch (g->rule) {
	case KVMM_FULL:
		return fit_full(g, n, here);
	case KVMM_WINDOW:
		return fit_window(a, m, g, n, here, good);
	case KVMM_LAST:
		return fit_last(a, m, g, n, here);
	default:
		return n;
	}
}

/* Only a blob that is asked for alone decides about the length: 1 or 0. */
static uint32_t fit_blobs(const struct kvmm_mset *m, uint32_t n, bool here)
{
	unsigned int i;

	for (i = 0; i < m->ngroups; i++)
		if (m->g[i].rule != KVMM_BLOB)
			return n;
	for (i = 0; i < m->ngroups; i++)
		if (!page_ok(&m->page[m->g[i].first], here))
			return 0;
	return n;
}

static uint32_t joint(struct kvmm_att *a, struct kvmm_mset *m, uint32_t n,
		      bool here)
{
	uint32_t good[KVMM_MAX_GROUPS], before;
	unsigned int i;

	for (i = 0; i < m->ngroups; i++)
		good[i] = UINT32_MAX;
	do {
		before = n;
		for (i = 0; n && i < m->ngroups; i++)
			n = fit(a, m, &m->g[i], n, here, &good[i]);
	} while (n && n != before);
	return fit_blobs(m, n, here);
}

/* How far a FULL group's pages lead, from what is known of them. */
static void count_lead(const struct kvmm_mset *m, struct kvmm_mgroup *g,
		       uint32_t hi)
{
	const struct kvmm_page *p = &m->page[g->first];
	uint32_t i = 0;

	while (i < hi && p[i].state == KVMM_HIT)
		i++;
	g->lead_here = i;
	while (i < hi && p[i].state != KVMM_MISS && p[i].state != PAGE_UNKNOWN)
		i++;
	g->lead_any = i;
}

/*
 * FULL groups are looked up whole, and each only as far as those before it
 * allow; the others only where the rule asks. FULL pages are pinned on the way,
 * while their words are still in the cache: nearly always they will be needed,
 * and pin_all() gives back what is not.
 */
static void look_all(struct kvmm_att *a, struct kvmm_mset *m, bool pin)
{
	uint32_t n = m->max_units;
	unsigned int i;

	for (i = 0; i < m->ngroups; i++) {
		struct kvmm_mgroup *g = &m->g[i];
		uint32_t hi = n * g->ratio;

		if (g->rule == KVMM_BLOB)
			kvmm_look(a, m, g, 0, 1);
		if (g->rule != KVMM_FULL)
			continue;
		hi = kvmm_look_lead(a, m, g, hi, pin);
		count_lead(m, g, hi);
		n = fit_full(g, n, false);
	}
	m->n_any = joint(a, m, n, false);
	m->n_here = joint(a, m, m->n_any, true);
}

/*
 * Pin what length n_here needs. A page that slips away lowers n_here, which
 * moves windows down to pages that are not pinned yet: hence the loop. It ends
 * since each round has one page less that is HIT.
 */
static void pin_all(struct kvmm_att *a, struct kvmm_mset *m)
{
	for (;;) {
		bool lost = false;
		unsigned int i;

		for (i = 0; i < m->ngroups; i++) {
			struct kvmm_mgroup *g = &m->g[i];
			uint32_t lo, hi;

			kvmm_mgroup_need(g, m->n_here, &lo, &hi);
			if (kvmm_pin_range(a, m, g, lo, hi) == hi ||
			    g->rule == KVMM_BLOB)
				continue;
			lost = true;
			if (g->rule == KVMM_FULL)
				count_lead(m, g, g->lead_any);
		}
		m->n_any = joint(a, m, m->n_any, false);
		m->n_here = joint(a, m, min(m->n_here, m->n_any), true);
		for (i = 0; i < m->ngroups; i++) {
			struct kvmm_mgroup *g = &m->g[i];
			uint32_t lo, hi;

			kvmm_mgroup_need(g, m->n_here, &lo, &hi);
			kvmm_unpin_range(m, g, 0, lo);
			kvmm_unpin_range(m, g, hi, g->n);
		}
		if (!lost)
			return;
	}
}

/* -- the calls ------------------------------------------------------------------ */

static void count_match(struct kvmm *k, const struct kvmm_mset *m)
{
	uint64_t pending = 0, lower = 0;
	unsigned int i;
	uint32_t j;

	for (i = 0; i < m->ngroups; i++) {
		const struct kvmm_mgroup *g = &m->g[i];
		uint32_t lo, hi;

		kvmm_mgroup_need(g, m->n_any, &lo, &hi);
		if (g->rule != KVMM_BLOB)
			lo = max(lo, m->n_here * g->ratio);
		for (j = lo; j < hi; j++) {
			const struct kvmm_page *p = &m->page[g->first + j];

			pending += p->state == KVMM_PENDING;
			lower += p->state == KVMM_LOWER;
		}
	}
	stat_add(k, matches, 1);
	stat_add(k, pages_asked, m->n);
	stat_add(k, pages_hit, m->nr_pins);
	if (pending)
		stat_add(k, pages_pending, pending);
	if (lower)
		stat_add(k, pages_lower, lower);
	if (m->n > m->nr_pins + pending + lower)
		stat_add(k, pages_missed,
			 m->n - m->nr_pins - pending - lower);
	if (m->races)
		stat_add(k, pin_races, m->races);
}

bool kvmm_req_answers(const struct kvmm_req *rq)
{
	const struct kvmm_att *a = rq->att;
	uint32_t mode;

	if (!a || kvmm_era_lost(a->era))
		return false;
	mode = atomic_load_explicit(&a->era->hdr->space[a->ix].mode,
				    memory_order_relaxed);
	return mode == KVMM_MODE_ON || mode == KVMM_MODE_READONLY;
}

/* All that may be wrong with a call, and its keys. */
static int match_begin(struct kvmm_req *rq, struct kvmm_mset *set,
		       const struct kvmm_keys *keys, unsigned int ngroups,
		       unsigned int node, const struct kvmm_match *m, bool pin)
	__must_hold(&rq->lock)
{
	int err;

	if (m->size < sizeof(m->size))
		return kvmm_fail(-EINVAL, "kvmm_match.size is %u, sizeof is %zu",
				 m->size, sizeof(*m));
	if (node >= KVMM_MAX_NODES)
		return kvmm_fail(-EINVAL, "there is no node %u", node);
	kvmm_req_bind(rq);
	err = mset_fill(rq, set, keys, ngroups, node, pin);
	if (err)
		return err;
	if (rq->att && kvmm_era_dying(rq->att->era))
		return kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	return 0;
}

int kvmm_peek(struct kvmm_req *rq, const struct kvmm_keys *keys,
	      unsigned int ngroups, kvmm_node_t node, struct kvmm_match *m)
{
	struct kvmm *k = rq->k;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	err = match_begin(rq, &rq->p, keys, ngroups, node, m, false);
	if (!err) {
		if (kvmm_req_answers(rq))
			look_all(rq->att, &rq->p, false);
		kvmm_match_out(&rq->p, rq->att ? rq->att->era : NULL, m);
	}
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return err;
}

int kvmm_match(struct kvmm_req *rq, const struct kvmm_keys *keys,
	       unsigned int ngroups, kvmm_node_t node, struct kvmm_hit *hits,
	       struct kvmm_match *m)
{
	struct kvmm_match out = { .size = sizeof(out) };
	struct kvmm *k = rq->k;
	struct kvmm_mset *set;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	set = &rq->m[!rq->cur];
	err = match_begin(rq, set, keys, ngroups, node, m, true);
	if (err)
		goto out_unlock;
	if (kvmm_req_answers(rq) && !set->blind) {
		look_all(rq->att, set, true);
		pin_all(rq->att, set);
	}
	/* what both matches have is never without a pin */
	kvmm_mset_unpin(kvmm_req_match(rq));
	set->gen = ++rq->gen;
	rq->cur = !rq->cur;
	kvmm_hits_out(set, rq->att ? rq->att->era : NULL, hits);
	kvmm_match_out(set, rq->att ? rq->att->era : NULL, &out);
	if (rq->att && kvmm_era_leads(rq->att->era))
		kvmm_freeze(rq, hits, set->n, &out);
	out.size = m->size;
	memcpy(m, &out, min_t(size_t, m->size, sizeof(out)));
	kvmm_req_show_pins(rq);
	count_match(k, set);
out_unlock:
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return err;
}
