/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is worth a write. An SSD is worn by each, and most of what an engine
 * computes is never asked for again: on a block node with second-touch admission
 * a page is not written when it is evicted for the first time.
 *
 * It is, when there is a reason to expect it back:
 *	- a second request used it, while it was in memory
 *	- it came from below, or somebody asked for it when it was gone
 *	- its last request said that it goes on, or when it will be back
 *	- it was published, evicted and not admitted before: the filter knows it
 *	- a page that hangs on it lives where this copy does not
 * and its ancestors go with it unasked, since below they are there first. A page
 * that has pages below itself is there already. So closure never waits for
 * admission, and admission never breaks closure.
 *
 * The filter. A row of buckets of four 16-bit tags: a key has a bucket and a tag
 * by its hash, and the tag that came first leaves a full bucket. One key in some
 * eight thousand is taken for known wrongly; that costs a write. Nothing is ever
 * cleared or counted, and it is bounded: four entries a slot of a node with pages
 * of PAGE_GUESS, which is 32 bytes a MiB. It is not kept over a restart.
 * (Two Bloom filters in turns were considered: as large, and each turn clears
 * megabytes at once.)
 *
 * A page is asked about once: COPY_REFUSED is the answer until a second use.
 * Refused pages can be dropped at once, as clean ones can; pool.nr_refused
 * counts them.
 *
 * The budget. A token bucket, filled evenly over the day with so many times the
 * node's capacity, and charged with what is handed to the node: data, rounded up
 * to NODE_ALIGN. What a node writes for itself (zeroes before first use, its
 * journal) is not in it. A page is written while there is anything left; its
 * ancestors may overdraw by what an hour brings. It is in memory only: a daemon
 * that starts has what an hour brings, whatever the one before it has written.
 */
#include <stdlib.h>

#include "daemon/mm/tier.h"
#include "ipc/base/mix.h"

#define PAGE_GUESS	(UINT64_C(256) << 10)
#define ENTRIES_A_PAGE	4u
#define BUCKET_TAGS	4u
#define BUCKETS_MIN	(UINT64_C(1) << 12)
#define BUCKETS_MAX	(UINT64_C(1) << 23)	/* 64 MiB */

/* Requests that must have used a page, the one that published it included. */
#define USES_ENOUGH	2u

#define DAY_NS		(24 * 3600 * NSEC_PER_SEC)
#define DAY_START	24u	/* parts of a day's budget: to begin with, ... */
#define DAY_MOST	4u	/* ... that can be saved up, ... */
#define DAY_OVERDRAFT	24u	/* ... and that ancestors may overdraw */

/* -- the filter ------------------------------------------------------------------ */

static bool filter_make(struct mm_node *lo)
{
	uint64_t n = lo->node->capacity / PAGE_GUESS * ENTRIES_A_PAGE /
		     BUCKET_TAGS;

	if (lo->admit.bucket)
		return true;
	if (!lo->node->capacity)
		return false;		/* it is not open yet */
	n = roundup_pow2(clamp(n, BUCKETS_MIN, BUCKETS_MAX));
	lo->admit.bucket = calloc(n, sizeof(*lo->admit.bucket));
	if (lo->admit.bucket)
		lo->admit.nr_buckets = n;
	return lo->admit.bucket;
}

/* Is the key known? It is afterwards. */
static bool filter_test_and_set(struct mm_node *lo, const struct mm_space *sp,
				uint16_t group, const uint64_t key[4])
{
	const struct mm *mm = lo->mm;
	uint64_t space, h, b, *bucket;
	uint16_t tag;
	unsigned int i;

	if (!filter_make(lo))
		return false;
	memcpy(&space, sp->id, sizeof(space));
	h = key_mix(key, mm->seed[0] ^ space, mm->seed[1], group);
	tag = (uint16_t)(h >> 48) | 1;		/* 0: a free place */
	bucket = &lo->admit.bucket[h & (lo->admit.nr_buckets - 1)];
	for (i = 0, b = *bucket; i < BUCKET_TAGS; i++, b >>= 16)
		if ((uint16_t)b == tag)
			return true;
	*bucket = *bucket << 16 | tag;
	return false;
}

void admit_asked(const struct mm_space *sp, uint16_t group,
		 const uint64_t key[4])
{
	struct mm *mm = sp->mm;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		if (mm->node[i].admit.second_touch)
			filter_test_and_set(&mm->node[i], sp, group, key);
}

uint64_t mm_admit_bytes(const struct mm *mm)
{
	uint64_t bytes = 0;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		bytes += mm->node[i].admit.nr_buckets *
			 sizeof(*mm->node[i].admit.bucket);
	return bytes;
}

/* -- the question ---------------------------------------------------------------- */

static bool worth_it(const struct page *pg, const struct copy *c, uint64_t now)
{
	if (c->pol.uses >= USES_ENOUGH || (c->flags & COPY_WANTED))
		return true;
	if ((c->pol.flags & KVMM_POLICY_CONTINUES) ||
	    (c->pol.expect_ms &&
	     c->pol.touched_ns + c->pol.expect_ms * NSEC_PER_MSEC > now))
		return true;
	return pg->nr_bound > c->nr_bound;
}

bool admit_page(struct page *pg, struct mm_node *nd, struct mm_node *lo)
{
	struct copy *c = page_copy(pg, nd);

	if (!lo->admit.second_touch || worth_it(pg, c, nd->mm->now_ns))
		return true;
	if (c->flags & COPY_REFUSED)
		return false;
	if (filter_test_and_set(lo, pg->space, pg->group, pg->key)) {
		c->flags |= COPY_WANTED;
		return true;
	}
	lo->c.pgadmit_refused++;
	if (list_empty(&c->link))
		return false;
	c->flags |= COPY_REFUSED;
	page_pool(pg, nd)->nr_refused++;
	return false;
}

void admit_forget(struct mm_pool *p, struct copy *c)
{
	if (!(c->flags & COPY_REFUSED))
		return;
	c->flags &= ~COPY_REFUSED;
	p->nr_refused--;
}

void admit_touch(struct mm_pool *p, struct copy *c)
{
	if (c->pol.uses >= USES_ENOUGH)
		admit_forget(p, c);
}

/* -- the budget ------------------------------------------------------------------- */

/* What a day brings; 0: there is no limit. */
static uint64_t budget_day(const struct mm_node *lo)
{
	return (uint64_t)((unsigned __int128)lo->node->capacity *
			  lo->admit.day_permille / 1000);
}

/* Bring it up to date; whatever is too small to count stays for the next time. */
static void budget_fill(struct mm_node *lo, uint64_t day)
{
	struct mm_admit *a = &lo->admit;
	uint64_t now = lo->mm->now_ns, gained;

	if (!a->filled_ns) {
		a->filled_ns = now;
		a->left = (int64_t)(day / DAY_START);
		return;
	}
	if (now <= a->filled_ns)
		return;
	gained = (uint64_t)((unsigned __int128)(now - a->filled_ns) * day /
			    DAY_NS);
	if (!gained)
		return;
	a->filled_ns += (uint64_t)((unsigned __int128)gained * DAY_NS / day);
	a->left = min(a->left + (int64_t)gained, (int64_t)(day / DAY_MOST));
}

bool budget_left(struct mm_node *lo, bool ancestor)
{
	uint64_t day = budget_day(lo);

	if (!day)
		return !lo->admit.day_permille;
	budget_fill(lo, day);
	return lo->admit.left > (ancestor ? -(int64_t)(day / DAY_OVERDRAFT) : 0);
}

void budget_charge(struct mm_node *lo, uint64_t bytes)
{
	if (lo->admit.day_permille)
		lo->admit.left -= (int64_t)bytes;
}

/* -- beginning, end, observation ---------------------------------------------------- */

void admit_init(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i];

		if (nd->mem)
			continue;
		nd->admit.second_touch = mm->o.node[i].second_touch;
		nd->admit.day_permille = mm->o.node[i].day_permille;
	}
}

void admit_fini(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		free(mm->node[i].admit.bucket);
		mm->node[i].admit.bucket = NULL;
		mm->node[i].admit.nr_buckets = 0;
	}
}

void admit_stat(struct mm_node *lo, struct mm_node_stat *st)
{
	st->second_touch = lo->admit.second_touch;
	st->filter_bytes = lo->admit.nr_buckets * sizeof(*lo->admit.bucket);
	st->budget_day = budget_day(lo);
	if (!st->budget_day)
		return;
	budget_fill(lo, st->budget_day);
	st->budget_left = lo->admit.left;
}
