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
		     unsigned int node, bool pin)
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
		if (g->n / g->ratio < m->max_units)
			m->max_units = g->n / g->ratio;
		if (g->n)
			memcpy(m->key[at], keys[i].k,
			       g->n * sizeof(*m->key));
		at += g->n;
	}
	for (i = 0; i < total; i++) {
		m->page[i].state = PAGE_UNKNOWN;
		m->page[i].flags = 0;
	}
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

/* The largest length up to @n that a WINDOW group has. */
static uint32_t fit_window(struct kvmm_att *a, struct kvmm_mset *m,
			   struct kvmm_mgroup *g, uint32_t n, bool here)
{
	const struct kvmm_page *p = &m->page[g->first];

	while (n) {
		uint32_t lo, hi, i;

		kvmm_mgroup_need(g, n, &lo, &hi);
		kvmm_look(a, m, g, lo, hi);
		for (i = hi; i > lo && page_ok(&p[i - 1], here); i--)
			;
		if (i == lo)
			break;
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

		kvmm_look(a, m, g, i, i + 1);
		if (page_ok(&m->page[g->first + i], here))
			break;
	}
	return n;
}

static uint32_t fit(struct kvmm_att *a, struct kvmm_mset *m,
		    struct kvmm_mgroup *g, uint32_t n, bool here)
{
	uint32_t lead;

	switch (g->rule) {
	case KVMM_FULL:
		lead = (here ? g->lead_here : g->lead_any) / g->ratio;
		return lead < n ? lead : n;
	case KVMM_WINDOW:
		return fit_window(a, m, g, n, here);
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
	uint32_t before;
	unsigned int i;

	do {
		before = n;
		for (i = 0; n && i < m->ngroups; i++)
			n = fit(a, m, &m->g[i], n, here);
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
		n = fit(a, m, g, n, false);
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

/* -- load or recompute ------------------------------------------------------------ */

static uint64_t page_load_ns(const struct kvmm_hdr *hdr,
			     const struct kvmm_page *p)
{
	if (p->state != KVMM_LOWER && p->state != KVMM_PENDING)
		return 0;
	return (uint64_t)atomic_load_explicit(
			&hdr->node[p->node].load_ns_per_kib,
			memory_order_relaxed) *
	       div_round_up(p->raw_bytes, 1024);
}

/* Once a fetch: the latency of the slowest node, and what it has queued. */
static uint64_t node_load_ns(const struct kvmm_hdr *hdr,
			     const struct kvmm_page *p)
{
	const struct kvmm_hdr_node *n = &hdr->node[p->node];

	if (p->state != KVMM_LOWER && p->state != KVMM_PENDING)
		return 0;
	return ((uint64_t)atomic_load_explicit(&n->load_base_us,
					       memory_order_relaxed) +
		atomic_load_explicit(&n->queue_us, memory_order_relaxed)) *
	       NSEC_PER_USEC;
}

/* What unit @u adds: to load, to recompute. */
static void unit_cost(const struct kvmm_mset *m, const struct kvmm_hdr *hdr,
		      uint32_t u, uint64_t *load, uint64_t *base,
		      uint64_t *compute)
{
	unsigned int i;
	uint32_t j;

	for (i = 0; i < m->ngroups; i++) {
		const struct kvmm_mgroup *g = &m->g[i];
		uint32_t lo, hi;

		kvmm_mgroup_need(g, m->n_any, &lo, &hi);
		for (j = u * g->ratio; j < (u + 1) * g->ratio; j++) {
			const struct kvmm_page *p = &m->page[g->first + j];

			if (j < lo || j >= hi)
				continue;
			*load += page_load_ns(hdr, p);
			*base = max(*base, node_load_ns(hdr, p));
			*compute += p->cost_us * NSEC_PER_USEC;
		}
	}
}

static uint32_t ns_to_us(uint64_t ns)
{
	return min(div_round_up(ns, NSEC_PER_USEC), (uint64_t)UINT32_MAX);
}

/*
 * Load up to where load + recompute of the rest is least. Pages whose cost
 * nobody gave are always worth loading: there is nothing to compare with.
 */
static void advise_load(const struct kvmm_mset *m, const struct kvmm_hdr *hdr,
			struct kvmm_match *out)
{
	uint64_t load = 0, base = 0, computed = 0, best = 0, total = 0;
	uint64_t at_load = 0, at_computed = 0;
	uint32_t u;

	out->n_load = m->n_here;
	for (u = m->n_here; u < m->n_any; u++)
		unit_cost(m, hdr, u, &load, &base, &total);
	if (!total) {
		out->n_load = m->n_any;
		out->load_us = ns_to_us(load + base);
		return;
	}
	load = 0;
	base = 0;
	best = total;			/* load nothing */
	for (u = m->n_here; u < m->n_any; u++) {
		unit_cost(m, hdr, u, &load, &base, &computed);
		if (load + base + (total - computed) <= best) {
			best = load + base + (total - computed);
			out->n_load = u + 1;
			at_load = load + base;
			at_computed = computed;
		}
	}
	out->load_us = ns_to_us(at_load);
	out->recompute_us = ns_to_us(at_computed);
}

/* -- the answer -------------------------------------------------------------------- */

static void match_out(const struct kvmm_mset *m, const struct kvmm_era *e,
		      struct kvmm_match *out)
{
	uint32_t size = out->size;
	struct kvmm_match r = {
		.size		= size,
		.n_pages	= m->n_any,
		.n_resident	= m->n_here,
		.n_load		= m->n_here,
		.sync_wanted	= m->sync_wanted,
	};

	if (e && m->n_any > m->n_here)
		advise_load(m, e->hdr, &r);
	memcpy(out, &r, min_t(size_t, size, sizeof(r)));
}

static void hit_out(const struct kvmm_mset *m, const struct kvmm_mgroup *g,
		    const struct kvmm_era *e, uint32_t i, uint32_t lo,
		    uint32_t hi, struct kvmm_hit *hit)
{
	const struct kvmm_page *p = &m->page[g->first + i];

	hit->frame = 0;
	hit->eta_us = 0;
	hit->node = p->node;
	hit->group = g->group;
	if (p->flags & PAGE_PINNED) {
		hit->frame = p->frame;
		hit->state = KVMM_HIT;
		return;
	}
	if (p->state == PAGE_UNKNOWN || p->state == KVMM_MISS) {
		/* a page that the rule does not need was not looked for */
		hit->state = p->state == PAGE_UNKNOWN && i < hi &&
			     g->rule != KVMM_BLOB ? KVMM_SKIP : KVMM_MISS;
		hit->node = KVMM_NODE_NONE;
		return;
	}
	if (i < lo || i >= hi) {
		hit->state = KVMM_SKIP;	/* there, but of no use */
		return;
	}
	/* here, but not of a length that is: a fetch pins it without a read */
	hit->state = p->state == KVMM_HIT ? KVMM_PENDING : p->state;
	if (p->state != KVMM_HIT)
		hit->eta_us = kvmm_load_us(e->hdr, p->node, p->raw_bytes);
}

static void hits_out(const struct kvmm_mset *m, const struct kvmm_era *e,
		     struct kvmm_hit *hits)
{
	unsigned int i;
	uint32_t j;

	for (i = 0; i < m->ngroups; i++) {
		const struct kvmm_mgroup *g = &m->g[i];
		uint32_t lo, hi;

		kvmm_mgroup_need(g, m->n_any, &lo, &hi);
		for (j = 0; j < g->n; j++)
			hit_out(m, g, e, j, lo, hi, &hits[g->first + j]);
	}
}

static void count_match(struct kvmm *k, const struct kvmm_mset *m)
{
	uint64_t pending = 0, lower = 0;
	unsigned int i;
	uint32_t j;

	for (i = 0; i < m->ngroups; i++) {
		const struct kvmm_mgroup *g = &m->g[i];
		uint32_t lo, hi;

		kvmm_mgroup_need(g, m->n_any, &lo, &hi);
		for (j = max(lo, m->n_here * g->ratio); j < hi; j++) {
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

/* Does the space answer matches at all? */
static bool answers(const struct kvmm_req *rq)
{
	const struct kvmm_att *a = rq->att;
	uint32_t mode;

	if (!a || kvmm_era_lost(a->era))
		return false;
	mode = atomic_load_explicit(&a->era->hdr->space[a->ix].mode,
				    memory_order_relaxed);
	return mode == KVMM_MODE_ON || mode == KVMM_MODE_READONLY;
}

static int match_check(const struct kvmm_match *m, unsigned int node)
{
	if (m->size < sizeof(m->size))
		return kvmm_fail(-EINVAL, "kvmm_match.size is %u, sizeof is %zu",
				 m->size, sizeof(*m));
	if (node >= KVMM_MAX_NODES)
		return kvmm_fail(-EINVAL, "there is no node %u", node);
	return 0;
}

int kvmm_peek(struct kvmm_req *rq, const struct kvmm_keys *keys,
	      unsigned int ngroups, kvmm_node_t node, struct kvmm_match *m)
{
	struct kvmm *k = rq->k;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	err = match_check(m, node);
	if (err)
		goto out_exit;
	kvmm_lock(&rq->lock);
	kvmm_req_bind(rq);
	err = mset_fill(rq, &rq->p, keys, ngroups, node, false);
	if (!err && rq->att && kvmm_era_dying(rq->att->era))
		err = kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	if (!err) {
		if (answers(rq))
			look_all(rq->att, &rq->p, false);
		match_out(&rq->p, rq->att ? rq->att->era : NULL, m);
	}
	kvmm_unlock(&rq->lock);
out_exit:
	kvmm_exit(k);
	return err;
}

int kvmm_match(struct kvmm_req *rq, const struct kvmm_keys *keys,
	       unsigned int ngroups, kvmm_node_t node, struct kvmm_hit *hits,
	       struct kvmm_match *m)
{
	struct kvmm *k = rq->k;
	struct kvmm_mset *set;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	err = match_check(m, node);
	if (err)
		goto out_exit;
	kvmm_lock(&rq->lock);
	kvmm_req_bind(rq);
	set = &rq->m[!rq->cur];
	err = mset_fill(rq, set, keys, ngroups, node, true);
	if (!err && rq->att && kvmm_era_dying(rq->att->era))
		err = kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	if (err)
		goto out_unlock;
	if (answers(rq) && !set->blind) {
		look_all(rq->att, set, true);
		pin_all(rq->att, set);
	}
	/* what both matches have is never without a pin */
	kvmm_mset_unpin(kvmm_req_match(rq));
	set->gen = ++rq->gen;
	rq->cur = !rq->cur;
	hits_out(set, rq->att ? rq->att->era : NULL, hits);
	match_out(set, rq->att ? rq->att->era : NULL, m);
	kvmm_req_show_pins(rq);
	count_match(k, set);
out_unlock:
	kvmm_unlock(&rq->lock);
out_exit:
	kvmm_exit(k);
	return err;
}
