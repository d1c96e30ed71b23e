/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a match says: the pages, and how much of what is not here is worth
 * loading rather than computing again.
 */
#include <string.h>

#include "libkvmm/lib.h"

/* -- load or recompute ------------------------------------------------------------ */

uint32_t kvmm_load_us(const struct kvmm_hdr *hdr, unsigned int node,
		      uint32_t bytes)
{
	const struct kvmm_hdr_node *n = &hdr->node[node];
	uint64_t us;

	us = (uint64_t)atomic_load_explicit(&n->load_ns_per_kib,
					    memory_order_relaxed) *
	     div_round_up(bytes, 1024) / 1000;
	us += atomic_load_explicit(&n->load_base_us, memory_order_relaxed);
	return us < UINT32_MAX ? us : UINT32_MAX;
}

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

/* What page @p adds: to load, to recompute. */
static void page_cost(const struct kvmm_hdr *hdr, const struct kvmm_page *p,
		      uint64_t *load, uint64_t *base, uint64_t *compute)
{
	*load += page_load_ns(hdr, p);
	*base = max(*base, node_load_ns(hdr, p));
	*compute += p->cost_us * NSEC_PER_USEC;
}

/* A blob comes with the first unit that is fetched, whichever that is. */
static bool blob_comes(const struct kvmm_mset *m, const struct kvmm_mgroup *g,
		       uint32_t u)
{
	const struct kvmm_page *p = &m->page[g->first];

	return u == m->n_here &&
	       (p->state == KVMM_LOWER || p->state == KVMM_PENDING);
}

/* What unit @u adds. */
static void unit_cost(const struct kvmm_mset *m, const struct kvmm_hdr *hdr,
		      uint32_t u, uint64_t *load, uint64_t *base,
		      uint64_t *compute)
{
	unsigned int i;
	uint32_t j;

	for (i = 0; i < m->ngroups; i++) {
		const struct kvmm_mgroup *g = &m->g[i];
		const struct kvmm_page *p = &m->page[g->first];
		uint32_t lo, hi;

		if (g->rule == KVMM_BLOB) {
			if (blob_comes(m, g, u))
				page_cost(hdr, p, load, base, compute);
			continue;
		}
		kvmm_mgroup_need(g, m->n_any, &lo, &hi);
		lo = max(lo, u * g->ratio);
		hi = min(hi, (u + 1) * g->ratio);
		for (j = lo; j < hi; j++)
			page_cost(hdr, &p[j], load, base, compute);
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

void kvmm_match_out(const struct kvmm_mset *m, const struct kvmm_era *e,
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

void kvmm_hits_out(const struct kvmm_mset *m, const struct kvmm_era *e,
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
