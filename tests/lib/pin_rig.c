/* SPDX-License-Identifier: Apache-2.0 */
/* Matching against reclaim in one process; see pin_rig.h. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/mm_rig.h"
#include "tests/lib/pattern.h"
#include "tests/lib/pin_rig.h"
#include "tests/lib/unit.h"

#define RIG_BYTES	(PR_CHAINS / 2 * PR_PAGES * PR_PAGE_BYTES)
#define EXTENT_BYTES	(64u << 10)
#define THREADS		2u
#define REQ_SLOTS	8u
#define IDLE		10u		/* windows whose pins are summed, too */
#define LINGER		300u		/* a reader's kernel, in pauses */

/**
 * struct pin_reader - a process: libkvmm's objects, as a connection has them
 */
struct pin_reader {
	struct kvmm	*k;
	struct kvmm_era	*era;
	struct kvmm_att	*att;
	struct kvmm_space *sp;
	struct kvmm_ixmap *x;
	struct kvmm_view *v;
};

struct pin_rig {
	struct rig	r;
	struct rig_client *writer;
	struct pin_reader reader[PR_READERS];
	uint8_t		*addr[4096];	/* of frames */
	uint32_t	nr_frames;
	_Atomic uint32_t next_slot;
};

static const uint32_t alive = 1;

/* -- a reader ------------------------------------------------------------------------ */

static void *zalloc(size_t bytes)
{
	void *p = aligned_alloc(64, round_up(bytes, (size_t)64));

	assert_non_null(p);
	memset(p, 0, bytes);
	return p;
}

static void reader_connect(struct pin_reader *rd, struct rig *r)
{
	struct kvmm_era *e = zalloc(sizeof(*e));
	struct ledger *l = zalloc(sizeof(*l) +
				  REQ_SLOTS * sizeof(struct ledger_req));

	l->req_off = sizeof(*l);
	l->req_slots = REQ_SLOTS;
	e->k = rd->k;
	e->refs = 1;
	e->hdr = r->hdr;
	e->ledger = l;
	e->info.nr_nodes = 1;
	e->info.node[0].kind = KVMM_NODE_HOST;
	rd->era = e;
	atomic_store(&rd->k->era, e);
}

static void reader_attach(struct pin_reader *rd, struct rig_client *c)
{
	const struct index *ix = c->space->index;
	struct desc *d = &rd->sp->desc;

	rd->x = zalloc(sizeof(*rd->x));
	rd->x->ix = ix;
	rd->x->nr_lines = ix->nr_lines;
	memcpy(rd->x->seed, ix->seed, sizeof(rd->x->seed));
	d->nclasses = d->ngroups = 1;
	d->cls[0].page_bytes = PR_PAGE_BYTES;
	d->group[0] = (struct desc_group) { .rule = KVMM_FULL,
					    .block_tokens = 16 };
	rd->sp->k = rd->k;
	rd->att = zalloc(sizeof(*rd->att));
	rd->att->refs = 1;
	rd->att->era = rd->era;
	rd->att->sp = rd->sp;
	rd->att->ix = c->space->ix;
	atomic_store(&rd->att->index, rd->x);
	atomic_store(&rd->sp->att, rd->att);
}

static void reader_window(struct pin_reader *rd, struct rig_client *c)
{
	struct shm table = *mm_win_table(c->win), wl = *mm_win_ledger(c->win);
	uint32_t e;

	assert_int_equal(kvmm_view_create(rd->att, 0, 0, KVMM_RW,
					  mm_win_no(c->win), &table, &wl,
					  &rd->v), 0);
	for (e = 1; e < rd->v->nr_extents; e++)
		if (bitmap_shared_test(c->win->bitmap, e))
			kvmm_view_set_mapped(rd->v, e, true);
	atomic_store(&rd->sp->open[0][0], true);
	atomic_store(&rd->att->view[0][0], rd->v);
}

static void reader_init(struct pin_reader *rd, struct rig *r,
			struct rig_client *c)
{
	rd->k = zalloc(sizeof(*rd->k));
	rd->sp = zalloc(sizeof(*rd->sp));
	rd->k->alive = (const _Atomic uint32_t *)&alive;
	reader_connect(rd, r);
	reader_attach(rd, c);
	reader_window(rd, c);
}

static void reader_fini(struct pin_reader *rd)
{
	/* the memory is the daemon's */
	rd->v->table_shm = (struct shm)SHM_INIT;
	rd->v->wl_shm = (struct shm)SHM_INIT;
	kvmm_view_free(rd->v);
	free(rd->x);
	free(rd->att);
	free(rd->sp);
	free(rd->era->ledger);
	free(rd->era);
	free(rd->k);
}

/* -- the rig --------------------------------------------------------------------------- */

static struct mm_pool *pool(struct pin_rig *pr)
{
	return pr->writer->win->pool;
}

/* All extents, so that nothing grows under the readers. */
static void take_all(struct pin_rig *pr)
{
	uint32_t frame[RIG_BYTES / PR_PAGE_BYTES], n = 0;
	struct mm_pool *p = pool(pr);

	/* some are for loads alone */
	while (p->nr_extents < RIG_BYTES / EXTENT_BYTES) {
		mr_alloc(pr->writer, &frame[n++], 1);
		mr_settle(&pr->r);
	}
	assert_int_equal(mm_free(pr->writer->win, frame, n, 0), 0);
	mr_settle(&pr->r);
}

struct pin_rig *pr_open(void)
{
	const struct rig_opts o = { .bytes = RIG_BYTES,
		.extent_bytes = EXTENT_BYTES, .sync_work = true };
	struct pin_rig *pr = zalloc(sizeof(*pr));
	unsigned int i;

	kvmm_breaks = 0;
	mr_open(&pr->r, &o);
	pr->r.mm->breaks = 0;
	pr->writer = mr_client(&pr->r, 0, KVMM_RW);
	mr_attach(pr->writer, "pins", PR_PAGE_BYTES);
	mr_win(pr->writer, 0);
	take_all(pr);
	for (i = 0; i < PR_READERS; i++) {
		struct rig_client *c = mr_client(&pr->r, i + 1, KVMM_RW);

		mr_attach(c, "pins", PR_PAGE_BYTES);
		mr_win(c, 0);
		mr_sync(c);
		reader_init(&pr->reader[i], &pr->r, c);
	}
	/* a sum takes its time, as on a host with many clients */
	for (; i < PR_READERS + IDLE; i++) {
		struct rig_client *c = mr_client(&pr->r, i + 1, KVMM_RW);

		mr_attach(c, "pins", PR_PAGE_BYTES);
		mr_win(c, 0);
	}
	return pr;
}

void pr_close(struct pin_rig *pr)
{
	unsigned int i;

	kvmm_breaks = 0;
	for (i = 0; i < PR_READERS; i++)
		reader_fini(&pr->reader[i]);
	for (i = 0; i <= PR_READERS + IDLE; i++)
		mr_exit(&pr->r.client[i]);
	mr_close(&pr->r);
	free(pr);
}

void pr_break(struct pin_rig *pr, const char *what)
{
	pr->r.mm->breaks = !strcmp(what, "barrier") ? MM_BREAK_BARRIER :
			   !strcmp(what, "generation") ? MM_BREAK_GENERATION :
			   0;
	kvmm_breaks = !strcmp(what, "pinbarrier") ? BREAK_PINBARRIER :
		      !strcmp(what, "generation") ? BREAK_GENERATION :
		      !strcmp(what, "ready") ? BREAK_READY : 0;
}

/* -- the daemon ------------------------------------------------------------------------- */

static struct page *page_of(struct pin_rig *pr, uint32_t chain, uint32_t i)
{
	return mr_page(pr->writer, chain, i);
}

/*
 * As a publish does it once nothing stands in its way, without the rings and the
 * magazine: the frame that was freed last is the next to be used, at once.
 */
void pr_put(struct pin_rig *pr, uint32_t chain)
{
	struct mm_pool *p = pool(pr);
	struct page *parent = NULL, *pg;
	uint32_t i;

	for (i = 0; i < PR_PAGES; i++, parent = pg) {
		struct kvmm_key key;
		uint64_t words[4];
		uint32_t f;

		pg = page_of(pr, chain, i);
		if (pg)
			continue;
		mr_key(key.b, chain, i);
		memcpy(words, key.b, sizeof(words));
		f = frame_take(p, FRAME_FOR_OPEN, FRAME_OPEN);
		assert_true(f && f < ARRAY_SIZE(pr->addr));
		/* readers look here once they have pinned it */
		pr->addr[f] = frame_addr(p, f);
		pattern_fill(pr->addr[f], PR_PAGE_BYTES, &key);
		pg = page_create(p->space, 0, words, parent, 0);
		assert_non_null(pg);
		assert_non_null(copy_get(pg, p->nd));
		frame_seal(p, f, pg);
	}
}

/* What is free may be written at once: so the next page's bytes come at once. */
bool pr_drop(struct pin_rig *pr, uint32_t chain)
{
	struct mm_node *nd = &pr->r.mm->node[0];
	uint32_t i;

	for (i = PR_PAGES; i > 0; i--) {
		struct page *pg = page_of(pr, chain, i - 1);
		uint32_t f = pg ? copy_at(pg, 0)->frame : 0;

		if (!pg)
			continue;
		if (!copy_evict(pg, nd))
			return false;
		memset(pr->addr[f], 0xdd, PR_PAGE_BYTES);
	}
	return true;
}

void pr_isolate(struct pin_rig *pr, uint32_t chain)
{
	struct mm_pool *p = pool(pr);
	uint32_t f = copy_at(page_of(pr, chain, 0), 0)->frame;

	/* as frame_isolate() does it, without what comes after */
	atomic_exchange(&p->table->word[f],
			frame_word(p->meta[f].gen, FRAME_ISOLATED));
}

void pr_check(struct pin_rig *pr)
{
	mr_settle(&pr->r);
	mr_check(&pr->r);
}

uint64_t pr_pinned(struct pin_rig *pr)
{
	return pr->r.mm->node[0].c.isolate_pinned;
}

/* -- matching ---------------------------------------------------------------------------- */

struct kvmm_req *pr_req(struct pin_rig *pr, unsigned int reader)
{
	struct pin_reader *rd = &pr->reader[reader];
	struct kvmm_req *rq = zalloc(sizeof(*rq));

	kvmm_mutex_init(&rq->lock, LOCK_REQUESTS);
	list_init(&rq->blobs);
	rq->k = rd->k;
	rq->sp = rd->sp;
	rq->att = rd->att;
	rq->refs = 1;
	rq->slot = atomic_fetch_add(&pr->next_slot, 1) % REQ_SLOTS;
	return rq;
}

void pr_req_free(struct kvmm_req *rq)
{
	unsigned int i;

	for (i = 0; i < 2; i++) {
		free(rq->m[i].key);
		free(rq->m[i].page);
	}
	free(rq->p.key);
	free(rq->p.page);
	kvmm_mutex_fini(&rq->lock);
	free(rq);
}

static struct kvmm_keys keys_of(struct kvmm_key key[PR_PAGES], uint32_t chain)
{
	uint32_t i;

	for (i = 0; i < PR_PAGES; i++)
		mr_key(key[i].b, chain, i);
	return (struct kvmm_keys) { .k = key, .n = PR_PAGES };
}

unsigned int pr_match(struct pin_rig *pr, struct kvmm_req *rq, uint32_t chain,
		      struct kvmm_hit hit[PR_PAGES])
{
	struct kvmm_key key[PR_PAGES];
	struct kvmm_keys keys = keys_of(key, chain);
	struct kvmm_match m = { .size = sizeof(m) };

	if (kvmm_match(rq, &keys, 1, 0, hit, &m))
		return 0;
	return m.n_resident;
}

unsigned int pr_look(struct pin_rig *pr, struct kvmm_req *rq, uint32_t chain)
{
	struct kvmm_key key[PR_PAGES];
	struct kvmm_keys keys = keys_of(key, chain);
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit[PR_PAGES];
	struct kvmm_mset *set;
	uint32_t i, n = 0;

	/* what a match leaves, its pins undone: as before its second half */
	if (kvmm_match(rq, &keys, 1, 0, hit, &m))
		return 0;
	set = kvmm_req_match(rq);
	kvmm_mset_unpin(set);
	for (i = 0; i < PR_PAGES; i++)
		n += set->page[i].state == KVMM_HIT;
	return n;
}

unsigned int pr_pin(struct kvmm_req *rq, struct kvmm_hit hit[PR_PAGES])
{
	struct kvmm_mset *set = kvmm_req_match(rq);
	uint32_t i, n;

	n = kvmm_pin_range(rq->att, set, &set->g[0], 0, PR_PAGES);
	for (i = 0; i < n; i++)
		hit[i].frame = set->page[i].frame;
	return n;
}

void pr_unpin(struct kvmm_req *rq)
{
	kvmm_mset_unpin(kvmm_req_match(rq));
}

size_t pr_wrong(struct pin_rig *pr, uint32_t frame, uint32_t chain, uint32_t i)
{
	struct kvmm_key key;

	mr_key(key.b, chain, i);
	return pattern_check(pr->addr[frame], PR_PAGE_BYTES, &key);
}

/* -- both at once -------------------------------------------------------------------------- */

struct race_thread {
	struct pin_rig	*pr;
	struct pin_race	*race;
	struct kvmm_req	*rq;
	_Atomic bool	*stop;
	uint64_t	seed;
	pthread_t	th;
};

/* Read twice, with a kernel's time in between: what is pinned does not change. */
static void read_hits(struct race_thread *t, uint32_t chain, unsigned int n,
		      const struct kvmm_hit *hit)
{
	unsigned int i, j, round;

	for (round = 0; round < 2; round++) {
		for (i = 0; i < n; i++)
			if (pr_wrong(t->pr, hit[i].frame, chain, i))
				atomic_fetch_add(&t->race->wrong, 1);
		for (j = 0; j < LINGER && !round; j++)
			cpu_relax();
	}
}

static void *race_reader(void *arg)
{
	struct race_thread *t = arg;
	struct kvmm_hit hit[PR_PAGES];
	struct rng r;

	rng_seed(&r, t->seed);
	while (!atomic_load(t->stop)) {
		uint32_t chain = (uint32_t)rng_below(&r, t->race->chains);
		unsigned int n = pr_match(t->pr, t->rq, chain, hit);

		read_hits(t, chain, n, hit);
		pr_unpin(t->rq);
		atomic_fetch_add(&t->race->hits, n);
		atomic_fetch_add(&t->race->misses, PR_PAGES - n);
	}
	return NULL;
}

static uint32_t frames_free(struct pin_rig *pr)
{
	return pool(pr)->nr_free;
}

void pr_race(struct pin_rig *pr, uint64_t seed, struct pin_race *out)
{
	uint64_t deadline = deadline_in(out->ms * NSEC_PER_MSEC);
	struct race_thread t[THREADS];
	_Atomic bool stop = false;
	struct rng r;
	unsigned int i;

	if (!out->chains)
		out->chains = PR_CHAINS;
	rng_seed(&r, seed);
	for (i = 0; i < THREADS; i++) {
		t[i] = (struct race_thread) {
			.pr = pr, .race = out, .stop = &stop,
			.seed = seed + 1 + i,
			.rq = pr_req(pr, out->shared ? 0 : i),
		};
		assert_int_equal(pthread_create(&t[i].th, NULL, race_reader,
						&t[i]), 0);
	}
	while (!deadline_past(deadline) && !atomic_load(&out->wrong)) {
		uint32_t chain = (uint32_t)rng_below(&r, out->chains);

		out->drops += pr_drop(pr, chain);
		chain = (uint32_t)rng_below(&r, out->chains);
		if (frames_free(pr) < pool(pr)->reserve + PR_PAGES)
			continue;
		pr_put(pr, chain);
		out->puts++;
	}
	atomic_store(&stop, true);
	for (i = 0; i < THREADS; i++) {
		assert_int_equal(pthread_join(t[i].th, NULL), 0);
		pr_req_free(t[i].rq);
	}
}
