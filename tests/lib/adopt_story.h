/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt_story.h - a memory manager's life that the next one has to go on with
 *
 * Beside adopt_rig.h: live() is a life with two clients, and @story says how
 * far it got; a life of churn on a node below says so in @churn. Both are memory
 * that the child shares, made anew for each test (STORY_TEST()).
 */
#ifndef KVMM_TESTS_LIB_ADOPT_STORY_H
#define KVMM_TESTS_LIB_ADOPT_STORY_H

#include <string.h>
#include <sys/mman.h>

#include "daemon/mm/keep.h"
#include "ipc/base/fd.h"
#include "tests/lib/adopt_rig.h"
#include "tests/lib/unit.h"

#define PAGE	4096u
#define CHAIN	6u
#define HELD	4u

/* How far the first one got, as its client knows. */
enum did {
	NOT_YET,
	BEGUN,
	DONE,
};

/**
 * struct story - what happened before the end
 * @sealed:	pages of chain 1 whose answer came, in @frame with @word
 * @open:	frames that the client took out of its magazine
 * @free_now, @free_later, @bad, @closed, @exited: of open[0], open[1], the last
 *		page, the other client's window, and that client
 */
struct story {
	uint32_t	sealed;
	uint32_t	frame[CHAIN];
	uint64_t	word[CHAIN];
	uint32_t	nr_open;
	uint32_t	open[HELD];
	enum did	free_now, free_later, bad, closed, exited;
	uint32_t	other[2];
	uint32_t	nr_other;
};

static struct story *story;
static int fds_before;

#define CHURN_LEN	12u
#define CHURN_ROUNDS	60u
#define CHURN_PINNED	8u	/* every so many a chain stays pinned */

/* What the churning one did; beside struct story. */
struct churn {
	uint64_t	seed;
	uint32_t	nr_pinned;	/* pages that are, and must be found */
	uint32_t	chain[CHURN_ROUNDS * CHURN_LEN];
	uint32_t	i[CHURN_ROUNDS * CHURN_LEN];
	uint32_t	frame[CHURN_ROUNDS * CHURN_LEN];
};

static struct churn *churn;

static inline void fill(struct rig_client *c, uint32_t f, uint32_t chain,
			uint32_t i)
{
	uint32_t *p = frame_addr(c->win->pool, f), k;

	for (k = 0; k < PAGE / 4; k++)
		p[k] = chain * 1000003 + i * 8191 + k;
}

static inline bool good(const struct mm_pool *p, uint32_t f, uint32_t chain,
			uint32_t i)
{
	const uint32_t *q = frame_addr(p, f);
	uint32_t k;

	for (k = 0; k < PAGE / 4; k++)
		if (q[k] != chain * 1000003 + i * 8191 + k)
			return false;
	return true;
}

/* As libkvmm does: filled, pinned, published. */
static inline void publish(struct rig_client *c, uint32_t chain, uint32_t i,
			   uint32_t f)
{
	struct ring_pub pub = mr_pub(chain, i, f);
	const struct rig_done *d;

	fill(c, f, chain, i);
	mr_pin(c, f, 1);
	d = mr_publish(c, &pub, 1, 77);
	assert_non_null(d);
	assert_int_equal(d->res[0].result, 0);
	mr_take(c->rig, 77);
}

static struct rig first;

static inline void live(void *shm)
{
	struct rig_opts o = { .bytes = 1 << 20 };
	struct story *s = shm;
	struct rig_client *a, *b;
	uint32_t f[CHAIN], i;
	struct ring_key key = { .group = 0 };

	ar_open(&first, &o);
	a = mr_client(&first, 0, KVMM_RW);
	mr_attach(a, "a", PAGE);
	mr_win(a, 0);
	mr_alloc(a, f, CHAIN);
	for (i = 0; i < CHAIN; i++) {
		publish(a, 1, i, f[i]);
		s->frame[i] = f[i];
		s->word[i] = frame_word_of(a->win->pool, f[i]);
		s->sealed = i + 1;
	}
	mr_alloc(a, s->open, HELD);
	s->nr_open = HELD;

	b = mr_client(&first, 1, KVMM_RW);
	mr_join(b, 9, 0, 1, KVMM_LEADER);
	mr_attach(b, "a", PAGE);
	mr_win(b, 0);
	mr_alloc(b, s->other, 2);
	s->nr_other = 2;
	mr_pin(b, f[2], 3);

	s->free_now = BEGUN;
	assert_int_equal(mm_free(a->win, &s->open[0], 1, 0), 0);
	s->free_now = DONE;
	s->free_later = BEGUN;
	assert_int_equal(mm_free(a->win, &s->open[1], 1, 5), 0);
	s->free_later = DONE;
	s->bad = BEGUN;
	mr_key(key.key, 1, CHAIN - 1);
	mm_report(a->mc, a->space, &key, KVMM_BAD);
	s->bad = DONE;
	mr_run(&first);

	s->closed = BEGUN;
	mm_win_close(b->win);
	s->closed = DONE;
	mr_run(&first);
	mr_pin(b, f[2], -3);
	mr_run(&first);
	s->exited = BEGUN;
	mr_exit(b);
	mr_settle(&first);
	s->exited = DONE;
}

static inline struct page *page_of(struct mm_space *sp, uint32_t chain,
				   uint32_t i)
{
	uint64_t key[4];

	mr_key((uint8_t *)key, chain, i);
	return page_find(sp, 0, key);
}

static inline bool open_of(const struct mm_pool *p, uint32_t f,
			   struct mm_win *w)
{
	return frame_word_state(frame_word_of(p, f)) == FRAME_OPEN &&
	       p->meta[f].win == w && p->meta[f].owner == w->engine;
}

/* What it gets now is nobody's. */
static inline void check_alloc(struct rig_client *a)
{
	struct mm_pool *p = a->win->pool;
	uint32_t f[16], i, k;

	mr_alloc(a, f, ARRAY_SIZE(f));
	for (i = 0; i < ARRAY_SIZE(f); i++) {
		assert_true(open_of(p, f[i], a->win));
		for (k = 0; k < story->sealed; k++)
			assert_int_not_equal(f[i], story->frame[k]);
		for (k = story->free_later == NOT_YET ? 1 : 2;
		     k < story->nr_open; k++)
			assert_int_not_equal(f[i], story->open[k]);
		for (k = 0; story->closed == NOT_YET && k < story->nr_other; k++)
			assert_int_not_equal(f[i], story->other[k]);
	}
	if (story->sealed > 1 && page_of(a->space, 1, 1)) {
		struct ring_pub pub = mr_pub(2, 0, f[0]);
		const struct rig_done *d;

		mr_key(pub.parent, 1, 1);
		d = mr_publish(a, &pub, 1, 78);
		assert_int_equal(d->res[0].result, 0);
		mr_take(a->rig, 78);
	}
}

static inline bool nobody_waits(void *arg)
{
	return !((struct rig *)arg)->mm->adopt;
}

/* Everybody goes: what is left is pages and free frames. */
static inline void check_end(struct rig *r)
{
	struct mm_pool *p;
	unsigned int i;

	for (i = 0; i < 2; i++)
		if (r->client[i].mc)
			mr_exit(&r->client[i]);
	mr_settle(r);
	mr_until(r, nobody_waits, r);
	list_for_each_entry(p, &r->mm->node[0].pools, node_link) {
		assert_int_equal(p->nr_open, 0);
		assert_int_equal(p->nr_quarantine, 0);
		assert_int_equal(p->nr_loading, 0);
		assert_int_equal(p->nr_free + p->nr_pages, p->nr_frames);
	}
	mr_check(r);
}

/* The first one lives to the end of @fn; nothing is taken apart. */
static inline void leave(void (*fn)(void *shm), void *shm)
{
	memset(story, 0, sizeof(*story));
	memset(churn, 0, sizeof(*churn));
	churn->seed = 1;
	assert_false(ar_die(fn, shm, UINT32_MAX));
}

static inline int story_setup(void **state)
{
	story = mmap(NULL, sizeof(*story), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	churn = mmap(NULL, sizeof(*churn), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	fds_before = fd_count();
	return story == MAP_FAILED || churn == MAP_FAILED;
}

static inline int story_teardown(void **state)
{
	ar_empty();
	munmap(story, sizeof(*story));
	munmap(churn, sizeof(*churn));
	return 0;
}

/* For cmocka's tables. */
#define STORY_TEST(f)							\
	cmocka_unit_test_setup_teardown(f, story_setup, story_teardown)

#endif
