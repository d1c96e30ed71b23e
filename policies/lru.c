/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lru: the page that was used longest ago leaves first.
 *
 * A request's pages are touched tail to head when it ends, so behind its head
 * comes its second page, and so on: the cold end of the list is a row of tails.
 * The core refuses whatever still has a child, which makes this leaf-LRU: of
 * twelve textbook policies none beats it on recorded KV loads. Touched in the
 * other order, heads would leave before tails and take the use of every tail
 * with them.
 *
 * A page that arrived with nobody waiting (%KVMM_POLICY_COLD) enters at the cold
 * end. Nothing else the core tells is looked at: this is the floor that other
 * policies are measured against, and what kvmmd falls back to.
 *
 * Also linked into kvmmd itself.
 */
#include <stddef.h>

#include "policies/kvmm_policy.h"

/* In each page's @priv. */
struct lru_link {
	struct kvmm_policy_page	*colder;
	struct kvmm_policy_page	*warmer;
};

_Static_assert(sizeof(struct lru_link) <= KVMM_POLICY_PRIV, "per-page bytes");

/* The instance of one pool; @cold and @warm are NULL when it is empty. */
struct lru {
	struct kvmm_policy_page	*cold;
	struct kvmm_policy_page	*warm;
	uint64_t		nr;
};

static struct lru_link *link_of(struct kvmm_policy_page *pg)
{
	return (struct lru_link *)(void *)pg->priv;
}

static void link_warm(struct lru *l, struct kvmm_policy_page *pg)
{
	struct lru_link *k = link_of(pg);

	k->warmer = NULL;
	k->colder = l->warm;
	if (l->warm)
		link_of(l->warm)->warmer = pg;
	else
		l->cold = pg;
	l->warm = pg;
}

static void link_cold(struct lru *l, struct kvmm_policy_page *pg)
{
	struct lru_link *k = link_of(pg);

	k->colder = NULL;
	k->warmer = l->cold;
	if (l->cold)
		link_of(l->cold)->colder = pg;
	else
		l->warm = pg;
	l->cold = pg;
}

static void unlink_page(struct lru *l, struct kvmm_policy_page *pg)
{
	struct lru_link *k = link_of(pg);

	if (k->colder)
		link_of(k->colder)->warmer = k->warmer;
	else
		l->cold = k->warmer;
	if (k->warmer)
		link_of(k->warmer)->colder = k->colder;
	else
		l->warm = k->colder;
	k->colder = NULL;
	k->warmer = NULL;
}

static int lru_init(void *inst)
{
	return 0;		/* zeroed is empty */
}

static void lru_fini(void *inst)
{
}

static void lru_add(void *inst, struct kvmm_policy_page *pg,
		    const struct kvmm_policy_facts *facts)
{
	struct lru *l = inst;

	if (pg->flags & KVMM_POLICY_COLD)
		link_cold(l, pg);
	else
		link_warm(l, pg);
	l->nr++;
}

static void lru_touch(void *inst, struct kvmm_policy_page *pg)
{
	struct lru *l = inst;

	if (l->warm == pg)
		return;
	unlink_page(l, pg);
	link_warm(l, pg);
}

static void lru_remove(void *inst, struct kvmm_policy_page *pg)
{
	struct lru *l = inst;

	unlink_page(l, pg);
	l->nr--;
}

/*
 * From the cold end. The next page is read before this one is offered, since
 * this one may be gone or at the warm end afterwards; the count taken at the
 * start ends the walk before it meets pages that were moved there.
 */
static uint32_t lru_select(void *inst, struct kvmm_policy_select *sel)
{
	struct lru *l = inst;
	struct kvmm_policy_page *pg = l->cold;
	uint64_t left = l->nr < sel->max_scan ? l->nr : sel->max_scan;
	uint32_t offered = 0, taken = 0;

	while (pg && left-- && taken < sel->want) {
		struct kvmm_policy_page *next = link_of(pg)->warmer;
		enum kvmm_policy_answer a = sel->offer(sel, pg);

		offered++;
		if (a == KVMM_POLICY_ENOUGH)
			break;
		if (a == KVMM_POLICY_TAKEN)
			taken++;
		pg = next;
	}
	return offered;
}

const struct kvmm_policy_v0 kvmm_policy_v0 = {
	.abi		= KVMM_POLICY_ABI,
	.size		= sizeof(struct kvmm_policy_v0),
	.name		= "lru",
	.inst_bytes	= sizeof(struct lru),
	.page_bytes	= sizeof(struct kvmm_policy_page),
	.init		= lru_init,
	.fini		= lru_fini,
	.add		= lru_add,
	.touch		= lru_touch,
	.remove		= lru_remove,
	.select		= lru_select,
};
