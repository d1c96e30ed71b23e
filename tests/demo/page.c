/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of an engine's pages. They follow from the page's key, so that
 * whoever reads a page knows what must be in it, whoever wrote it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/demo/engine.h"
#include "tests/lib/pattern.h"

#define NR_CORRUPT	16		/* pages that the self-test damages */

/* A page's segments get different bytes: a swap of K and V must show. */
static struct kvmm_key seg_key(const struct kvmm_key *key, unsigned int seg)
{
	struct kvmm_key k = *key;

	k.b[31] ^= (uint8_t)(seg + 1);
	return k;
}

static void *page_seg(struct engine *e, unsigned int seg, kvmm_frame_t f)
{
	void *p = kvmm_win_ptr(e->win, seg, f);

	/* It may lie in an extent that came after our last step. */
	if (!p && kvmm_win_sync(e->win, e->step - 1) >= 0)
		p = kvmm_win_ptr(e->win, seg, f);
	return p;
}

void write_page(struct engine *e, kvmm_frame_t f, const struct kvmm_key *key)
{
	unsigned int s;

	for (s = 0; s < NR_SEGS; s++) {
		struct kvmm_key k = seg_key(key, s);
		void *p = page_seg(e, s, f);

		if (!p) {
			complain(e, "an allocated frame is not mapped", -EFAULT);
			return;
		}
		pattern_fill(p, PAGE_BYTES / NR_SEGS, &k);
	}
}

/* Is frame @f the same memory here as it was for whoever saw it first? */
void check_place(struct engine *e, kvmm_frame_t f)
{
	const void *p = page_seg(e, 0, f);
	uint64_t mine = p ? places_find(&e->places, p) : 0, first = 0;

	if (!mine || f >= e->sh->nr_places) {
		count(&e->st->copied_bytes, PAGE_BYTES);
		return;
	}
	if (atomic_compare_exchange_strong(&e->sh->place[f], &first, mine) ||
	    first == mine)
		count(&e->st->shared_bytes, PAGE_BYTES);
	else
		count(&e->st->copied_bytes, PAGE_BYTES);
}

/* Read a page that was hit, every byte, where it lies. */
bool read_page(struct engine *e, struct run *r, uint32_t i, kvmm_frame_t f)
{
	uint32_t page = r->r->page[i];
	unsigned int owner = atomic_load_explicit(&e->sh->owner[page],
						  memory_order_relaxed);
	size_t wrong = 0;
	unsigned int s;

	for (s = 0; s < NR_SEGS; s++) {
		struct kvmm_key k = seg_key(&r->key[i], s);
		const void *p = page_seg(e, s, f);

		wrong += p ? pattern_check(p, PAGE_BYTES / NR_SEGS, &k)
			   : PAGE_BYTES / NR_SEGS;
	}
	check_place(e, f);
	count(&e->st->bytes_checked, PAGE_BYTES);
	if (owner && owner != e->me + 1)
		count(&e->st->pages_cross, 1);
	if (!wrong)
		return true;

	if (!read_count(&e->st->wrong_pages))
		fprintf(stderr, "engine %u: page %u in frame %u: %zu wrong bytes\n",
			e->me, page, f, wrong);
	count(&e->st->wrong_bytes, wrong);
	count(&e->st->wrong_pages, 1);
	kvmm_report(r->rq, i, KVMM_BAD);
	return false;
}

/* ---- self-test: the verdict can be no ----------------------------------------- */

/* A run that is a request for the chain of the self-test. */
static int selftest_find(struct engine *e, struct run *r, uint32_t *found)
{
	struct kvmm_keys keys = {
		.k = e->self.key, .n = e->self.n, .group = 0,
	};
	struct kvmm_match m = { .size = sizeof(m) };
	int err;

	*r = (struct run){ .r = e->self.r, .key = e->self.key };
	r->hit = calloc(e->self.n, sizeof(*r->hit));
	if (!r->hit)
		return -ENOMEM;
	err = kvmm_req_open(e->sp, UINT64_MAX, NULL, &r->rq);
	if (!err) {
		err = kvmm_match(r->rq, &keys, 1, e->dram, r->hit, &m);
		if (err)
			kvmm_req_end(r->rq, KVMM_ENDED, 0);
	}
	if (err)
		free(r->hit);
	*found = m.n_resident;
	return err;
}

static void damage(struct engine *e, kvmm_frame_t f)
{
	uint32_t n = e->self.damaged++;
	uint8_t *p = page_seg(e, n % NR_SEGS, f);

	if (p)
		p[n * 2039 % (PAGE_BYTES / NR_SEGS)] ^= 0x10;
}

void selftest_damage(struct engine *e, const struct run *r,
		     const struct op *op)
{
	struct selftest *t = &e->self;
	struct run mine;
	uint32_t found, i;

	if (t->rq)
		return;
	t->r = r->r;
	t->n = op->first + op->n;
	free(t->key);
	t->key = malloc(t->n * sizeof(*t->key));
	if (!t->key)
		return;
	memcpy(t->key, r->key, t->n * sizeof(*t->key));
	if (selftest_find(e, &mine, &found))
		return;
	for (i = op->first; i < found && t->damaged < NR_CORRUPT; i++)
		damage(e, mine.hit[i].frame);
	free(mine.hit);
	if (t->damaged)
		t->rq = mine.rq;
	else
		kvmm_req_end(mine.rq, KVMM_ENDED, 0);
}

void selftest_read_back(struct engine *e)
{
	struct selftest *t = &e->self;
	struct run mine;
	uint32_t found, i;

	fprintf(stderr, "engine %u: self-test: %u pages were damaged\n", e->me,
		t->damaged);
	if (t->rq && !selftest_find(e, &mine, &found)) {
		for (i = 0; i < found; i++)
			if (!read_page(e, &mine, i, mine.hit[i].frame))
				break;
		kvmm_req_end(mine.rq, KVMM_ENDED, 0);
		free(mine.hit);
	}
	if (t->rq)
		kvmm_req_end(t->rq, KVMM_ENDED, 0);
	t->rq = NULL;
	free(t->key);
	t->key = NULL;
}
