/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A memory manager dies at every place where something is half done, and the next
 * one takes over: what was sealed is found, what was pinned is as it was, what was
 * held is held, what was nobody's is free, and every law holds.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/mm/keep.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/base/rand.h"
#include "tests/lib/adopt_rig.h"
#include "tests/lib/fake_blk.h"
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

static void fill(struct rig_client *c, uint32_t f, uint32_t chain, uint32_t i)
{
	uint32_t *p = frame_addr(c->win->pool, f), k;

	for (k = 0; k < PAGE / 4; k++)
		p[k] = chain * 1000003 + i * 8191 + k;
}

static bool good(const struct mm_pool *p, uint32_t f, uint32_t chain, uint32_t i)
{
	const uint32_t *q = frame_addr(p, f);
	uint32_t k;

	for (k = 0; k < PAGE / 4; k++)
		if (q[k] != chain * 1000003 + i * 8191 + k)
			return false;
	return true;
}

/* As libkvmm does: filled, pinned, published. */
static void publish(struct rig_client *c, uint32_t chain, uint32_t i,
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

static void live(void *shm)
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

/* -- what must be there --------------------------------------------------------- */

static struct page *page_of(struct mm_space *sp, uint32_t chain, uint32_t i)
{
	uint64_t key[4];

	mr_key((uint8_t *)key, chain, i);
	return page_find(sp, 0, key);
}

static void check_pages(struct rig_client *a)
{
	struct mm_pool *p = a->win->pool;
	uint32_t i;

	for (i = 0; i < story->sealed; i++) {
		struct page *pg = page_of(a->space, 1, i);
		uint32_t f = story->frame[i];

		/* pinned, whatever became of it: nobody else writes there */
		assert_true(good(p, f, 1, i));
		assert_true(frame_pins(p, f) >= 1);
		assert_true(frame_word_state(frame_word_of(p, f)) != FRAME_FREE);
		if (i == CHAIN - 1 && story->bad != NOT_YET) {
			if (story->bad == DONE)
				assert_null(pg);
			continue;
		}
		assert_non_null(pg);
		assert_int_equal(copy_at(pg, 0)->frame, f);
		assert_int_equal(frame_word_of(p, f), story->word[i]);
		assert_true(!i || pg->parent == page_of(a->space, 1, i - 1));
	}
}

static bool open_of(const struct mm_pool *p, uint32_t f, struct mm_win *w)
{
	return frame_word_state(frame_word_of(p, f)) == FRAME_OPEN &&
	       p->meta[f].win == w && p->meta[f].owner == w->engine;
}

static void check_frames(struct rig_client *a)
{
	struct mm_pool *p = a->win->pool;
	uint32_t i;

	for (i = 0; i < story->nr_open; i++) {
		if ((i == 0 && story->free_now != NOT_YET) ||
		    (i == 1 && story->free_later == BEGUN))
			continue;
		assert_true(open_of(p, story->open[i], a->win));
	}
	if (story->free_now == DONE)
		assert_false(p->meta[story->open[0]].owner == a->win->engine &&
			     p->meta[story->open[0]].flags);
	if (story->free_later == DONE) {
		assert_true(p->meta[story->open[1]].flags & FMETA_FREE);
		mr_step(a, 5);
		assert_false(open_of(p, story->open[1], a->win));
	}
}

/* What it gets now is nobody's. */
static void check_alloc(struct rig_client *a)
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

static void check_other(struct rig *r)
{
	struct rig_client *b = &r->client[1];
	uint32_t i;

	if (!b->mc)
		return;
	b = ar_client(r, 1);
	if (b->win && story->closed == NOT_YET)
		for (i = 0; i < story->nr_other; i++)
			assert_true(open_of(b->win->pool, story->other[i],
					    b->win));
}

static bool nobody_waits(void *arg)
{
	return !((struct rig *)arg)->mm->adopt;
}

/* Everybody goes: what is left is pages and free frames. */
static void check_end(struct rig *r)
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

static void adopt_and_check(unsigned int nth)
{
	static struct rig r;
	struct rig_client *a;

	ar_open(&r, &(struct rig_opts){ .bytes = 1 << 20 });
	if (getenv("V"))
		print_message("point %u\n", nth);
	if (ar_said[0])
		fail_msg("point %u: given up: %s", nth, ar_said);
	mr_check(&r);
	if (r.client[0].mc) {
		assert_true(r.client[0].whole);
		a = ar_client(&r, 0);
		if (a->win) {
			check_pages(a);
			check_frames(a);
			check_other(&r);
			check_alloc(a);
			mr_check(&r);
		} else {
			assert_int_equal(story->sealed, 0);
		}
	} else {
		assert_int_equal(story->sealed, 0);
	}
	check_end(&r);
	mr_close(&r);
	/* what was not taken is what park_done() would close */
	ar_empty();
}

static void all_is_found_wherever_it_died(void **state)
{
	unsigned int nth;
	bool died = true;

	for (nth = 1; died; nth++) {
		memset(story, 0, sizeof(*story));
		died = ar_die(live, story, nth);
		adopt_and_check(nth);
	}
	print_message("%u places to die at\n", nth - 2);
	assert_true(nth > 70);
	assert_int_equal(fd_count(), fds_before);
}

/* -- frames on their way back ------------------------------------------------------ */

#define BACK	16u

/**
 * struct backs - two lots of frames that are given back
 * @begun, @taken: of each lot; whether it need not be said again
 */
struct backs {
	uint32_t	frame[2 * BACK];
	bool		begun[2], taken[2];
	bool		had;
};

static void take_note(void *arg)
{
	*(bool *)arg = true;
}

static void live_giving_back(void *shm)
{
	struct rig_opts o = { .bytes = 1 << 20 };
	struct backs *b = shm;
	struct rig_client *a;
	unsigned int i;

	ar_open(&first, &o);
	a = mr_client(&first, 0, KVMM_RW);
	mr_attach(a, "a", PAGE);
	mr_win(a, 0);
	mr_alloc(a, b->frame, 2 * BACK);
	b->had = true;
	/* now, and after a step */
	for (i = 0; i < 2; i++) {
		b->begun[i] = true;
		assert_int_equal(mm_free_told(a->win, b->frame + i * BACK, BACK,
					      i ? 5 : 0, take_note,
					      &b->taken[i]), 0);
	}
}

/* What was not taken is said again, as a ring that was found does. */
static void say_again(struct rig_client *a, const struct backs *b)
{
	unsigned int i, k;

	for (i = 0; i < 2; i++)
		for (k = 0; b->begun[i] && !b->taken[i] && k < BACK; k++)
			mm_free(a->win, b->frame + i * BACK + k, 1, i ? 5 : 0);
}

static void frames_given_back_stay_with_nobody(void **state)
{
	struct backs *b = mmap(NULL, sizeof(*b), PROT_READ | PROT_WRITE,
			       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	static struct rig r;
	struct rig_client *a;
	unsigned int nth, i;
	bool died = true;

	assert_true(b != MAP_FAILED);
	for (nth = 1; died; nth++) {
		memset(b, 0, sizeof(*b));
		died = ar_die(live_giving_back, b, nth);
		ar_open(&r, &(struct rig_opts){ .bytes = 1 << 20 });
		a = b->had ? ar_client(&r, 0) : NULL;
		if (a) {
			say_again(a, b);
			mr_step(a, 5);
			mr_run(&r);
			for (i = 0; i < 2 * BACK; i++)
				if (b->begun[i / BACK])
					assert_null(a->win->pool->
						    meta[b->frame[i]].win);
			mr_check(&r);
		}
		if (r.client[0].mc)
			mr_exit(&r.client[0]);
		mr_settle(&r);
		mr_close(&r);
		ar_empty();
	}
	munmap(b, sizeof(*b));
	assert_int_equal(fd_count(), fds_before);
}

/* The second one dies while it adopts, or soon after. */
static void live_again(void *shm)
{
	static struct rig r;

	ar_open(&r, &(struct rig_opts){ .bytes = 1 << 20 });
	mr_run(&r);
}

static void dying_again_loses_nothing_more(void **state)
{
	unsigned int nth;
	bool died = true;

	for (nth = 1; died; nth++) {
		memset(story, 0, sizeof(*story));
		assert_false(ar_die(live, story, UINT32_MAX));
		story->exited = DONE;
		died = ar_die(live_again, story, nth);
		adopt_and_check(nth);
	}
	assert_int_equal(fd_count(), fds_before);
}

/* -- with a node below ------------------------------------------------------------ */

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
static struct rig_opts churn_opts = { .bytes = 1 << 20 };

static void get_back(struct rig_client *c, uint32_t chain)
{
	struct ring_key key[CHURN_LEN] = { { .group = 0 } };
	struct ring_sqe sqe = {
		.op = RING_FETCH, .n = CHURN_LEN, .tag = 55,
		.arg = deadline_in(NSEC_PER_SEC),
	};
	const struct rig_done *d;
	uint32_t i;

	for (i = 0; i < CHURN_LEN; i++)
		mr_key(key[i].key, chain, i);
	mm_fetch(c->win, &sqe, key);
	d = mr_wait(c->rig, 55);
	for (i = 0; i < d->n; i++)
		if (!d->res[i].result)
			assert_true(good(c->win->pool, d->res[i].frame, chain,
					 i));
	mr_take(c->rig, 55);
}

static void churn_round(struct rig_client *c, struct churn *s, uint32_t round)
{
	uint32_t f[CHURN_LEN], i;

	mr_alloc(c, f, CHURN_LEN);
	for (i = 0; i < CHURN_LEN; i++) {
		publish(c, round, i, f[i]);
		if (round % CHURN_PINNED) {
			mr_pin(c, f[i], -1);
			continue;
		}
		s->chain[s->nr_pinned] = round;
		s->i[s->nr_pinned] = i;
		s->frame[s->nr_pinned++] = f[i];
	}
	for (i = 0; i < 3; i++)
		mr_run(c->rig);
}

static void live_churning(void *shm)
{
	struct churn *s = shm;
	struct rig_client *c;
	struct fake_blk *b = fake_blk_create(8 << 20, 1 << 16);
	struct rng rng;
	uint32_t round;

	rng_seed(&rng, s->seed);
	churn_opts.lower = &b->n;
	ar_open(&first, &churn_opts);
	c = mr_client(&first, 0, KVMM_RW);
	mr_attach(c, "a", PAGE);
	mr_win(c, 0);
	for (round = 1; round <= CHURN_ROUNDS; round++) {
		churn_round(c, s, round);
		if (rng_below(&rng, 3) == 0)
			get_back(c, 1 + (uint32_t)rng_below(&rng, round));
	}
}

static void check_churned(struct rig *r, struct mm_space *sp)
{
	struct mm_pool *p = sp->pool[0][0];
	uint32_t chain, i, k;

	for (k = 0; k < churn->nr_pinned; k++) {
		struct page *pg = page_of(sp, churn->chain[k], churn->i[k]);

		assert_true(good(p, churn->frame[k], churn->chain[k],
				 churn->i[k]));
		assert_non_null(pg);
		assert_int_equal(copy_at(pg, 0)->frame, churn->frame[k]);
	}
	for (chain = 1; chain <= CHURN_ROUNDS; chain++) {
		for (i = 0; i < CHURN_LEN; i++) {
			struct page *pg = page_of(sp, chain, i);

			if (pg && copy_at(pg, 0)->state == COPY_READY)
				assert_true(good(p, copy_at(pg, 0)->frame, chain,
						 i));
		}
	}
}

static void no_wrong_byte_wherever_a_churning_one_died(void **state)
{
	unsigned int rounds = test_long() ? 400 : 40, n;
	static struct rig r;
	struct rng rng;

	rng_seed(&rng, test_seed());
	for (n = 0; n < rounds; n++) {
		struct fake_blk *b = fake_blk_create(8 << 20, 1 << 16);

		memset(churn, 0, sizeof(*churn));
		churn->seed = rng_next(&rng);
		ar_die(live_churning, churn,
		       1 + (unsigned int)rng_below(&rng, 12000));
		churn_opts.lower = &b->n;
		ar_open(&r, &churn_opts);
		assert_string_equal(ar_said, "");
		mr_check(&r);
		if (r.client[0].mc) {
			struct rig_client *c = ar_client(&r, 0);

			if (c->win) {
				check_churned(&r, c->space);
				/* and it goes on */
				churn_round(c, churn, 200);
				get_back(c, 1);
				check_churned(&r, c->space);
				mr_check(&r);
			}
		}
		check_end(&r);
		mr_close(&r);
		ar_empty();
	}
	assert_int_equal(fd_count(), fds_before);
}

/* -- what is not as it should be --------------------------------------------------- */

static struct mm_pool *only_pool(struct rig *r)
{
	return list_first(&r->mm->node[0].pools, struct mm_pool, node_link);
}

/* The first one lives to the end of @fn; nothing is taken apart. */
static void leave(void (*fn)(void *shm), void *shm)
{
	memset(story, 0, sizeof(*story));
	memset(churn, 0, sizeof(*churn));
	churn->seed = 1;
	assert_false(ar_die(fn, shm, UINT32_MAX));
}

static void open_second(struct rig *r)
{
	ar_open(r, &(struct rig_opts){ .bytes = 1 << 20 });
	mr_check(r);
}

static void close_second(struct rig *r)
{
	unsigned int i;

	for (i = 0; i < 2; i++)
		if (r->client[i].mc)
			mr_exit(&r->client[i]);
	mr_settle(r);
	mr_close(r);
	ar_empty();
	assert_int_equal(fd_count(), fds_before);
}

/* Bytes of a kept file, mapped. */
static void *map(const char *name)
{
	int fd = ar_find(name);
	off_t n;
	void *p;

	assert_true(fd >= 0);
	n = lseek(fd, 0, SEEK_END);
	p = mmap(NULL, (size_t)n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_true(p != MAP_FAILED);
	return p;
}

static struct frame_record *records(void)
{
	struct keep_pool *h = map("record.0.0.0");

	return (struct frame_record *)((char *)h + h->record_off);
}

static void bad_record_costs_its_page_and_what_hangs_on_it(void **state)
{
	static struct rig r;
	struct rig_client *a;
	uint32_t i;

	leave(live, story);
	records()[story->frame[2]].cost_us ^= 1;
	open_second(&r);
	a = ar_client(&r, 0);
	assert_string_equal(ar_said, "");
	for (i = 0; i < CHAIN; i++) {
		/* pinned all the same */
		assert_true(good(a->win->pool, story->frame[i], 1, i));
		if (i < 2)
			assert_non_null(page_of(a->space, 1, i));
		else
			assert_null(page_of(a->space, 1, i));
	}
	check_alloc(a);
	/* until the last unpin */
	for (i = 0; i < CHAIN; i++)
		mr_pin(a, story->frame[i], -1);
	mr_until(&r, nobody_waits, &r);
	mr_check(&r);
	close_second(&r);
}

static void lost_ledger_costs_its_pool(void **state)
{
	static struct rig r;
	struct frame_table *t;
	uint32_t i;

	leave(live, story);
	t = map("table.0.0.0");
	ar_lose("win.0");
	open_second(&r);
	assert_true(strstr(ar_said, "ledger of window 0"));
	assert_true(strstr(ar_said, "cannot be adopted"));
	assert_non_null(r.client[0].mc);
	assert_false(r.client[0].whole);
	assert_int_equal(r.adopted.frames, 0);
	/* who still looks there sees nothing, and generations stay */
	for (i = 0; i < CHAIN; i++)
		assert_int_equal(atomic_load(&t->word[story->frame[i]]),
				 frame_word(frame_word_gen(story->word[i]),
					    FRAME_FREE));
	assert_false(only_pool(&r)->adopted);
	close_second(&r);
}

static void lost_extent_costs_what_is_in_it(void **state)
{
	static struct rig r;
	struct frame_table *t;
	uint32_t i, no;
	char name[64];

	leave(live, story);
	t = map("table.0.0.0");
	no = story->frame[0] / t->frames_per_extent;
	snprintf(name, sizeof(name), "extent.0.0.0.%u", no);
	ar_lose(name);
	open_second(&r);
	assert_true(strstr(ar_said, "nobody kept it"));
	assert_true(only_pool(&r)->extent[no].lost);
	for (i = 0; i < CHAIN; i++)
		assert_null(page_of(list_first(&r.mm->spaces, struct mm_space,
					       link), 1, i));
	/* a client that reads on there keeps the number for itself */
	assert_false(r.client[0].whole);
	ar_client(&r, 0);
	r.client[0].have_seq = 0;
	mr_alloc(&r.client[0], &i, 1);
	assert_int_not_equal(i / t->frames_per_extent, no);
	mr_check(&r);
	close_second(&r);
}

/* A window that may write stays what it is, so its client must begin anew. */
static void who_may_write_no_more_is_not_whole(void **state)
{
	static struct rig r;

	leave(live, story);
	open_second(&r);
	assert_true(r.client[0].whole);
	close_second(&r);
	leave(live, story);
	ar_read_only = true;
	open_second(&r);
	ar_read_only = false;
	assert_false(r.client[0].whole);
	close_second(&r);
}

/* The state has places for very many windows, and few of them are ever used. */
static void looking_at_the_state_does_not_fill_it(void **state)
{
	struct rig r;
	struct stat was, is;
	int fd;

	leave(live, story);
	fd = ar_find("mm");
	assert_int_equal(fstat(fd, &was), 0);
	open_second(&r);
	assert_int_equal(fstat(r.mm->keep->shm.fd, &is), 0);
	assert_int_equal(is.st_ino, was.st_ino);
	/* 512 bytes each; the places of clients are few */
	assert_true(is.st_blocks <= was.st_blocks + 1024);
	close_second(&r);
}

static void torn_state_is_an_empty_start(void **state)
{
	static struct rig r;
	struct keep_state *st;

	leave(live, story);
	st = map("mm");
	st->nr_wins--;
	open_second(&r);
	assert_true(strstr(ar_said, "nothing is adopted"));
	assert_null(r.client[0].mc);
	assert_true(list_empty(&r.mm->spaces));
	close_second(&r);
}

static void torn_client_costs_its_pools_and_no_other(void **state)
{
	static struct rig r;
	struct keep k = { .shm = SHM_INIT };

	leave(live, story);
	k.shm.addr = map("mm");
	keep_state_map(&k);
	k.client[0][0].tag.crc ^= 1;
	k.client[0][1].tag.crc ^= 1;
	open_second(&r);
	assert_true(strstr(ar_said, "client record 0 is torn"));
	assert_null(r.client[0].mc);
	assert_int_equal(r.adopted.spaces, 1);
	close_second(&r);
}

/* Any bytes anywhere: an answer, never a crash, and laws that hold. */
static void random_bytes_are_survived(void **state)
{
	unsigned int rounds = test_long() ? 600 : 60, n, k;
	static struct rig r;
	struct rng rng;

	rng_seed(&rng, test_seed());
	for (n = 0; n < rounds; n++) {
		leave(live, story);
		for (k = 0; k < 1 + rng_below(&rng, 4); k++) {
			unsigned int at = (unsigned int)rng_below(&rng,
								  ar_store.n);
			uint8_t *p = map(ar_store.e[at].name);
			uint64_t bytes = (uint64_t)lseek(ar_store.e[at].fd, 0,
							 SEEK_END);
			uint64_t i, to = rng_below(&rng, min(bytes, 65536ul));

			for (i = 0; i < 1 + rng_below(&rng, 64); i++)
				p[(to + i) % bytes] ^=
					(uint8_t)rng_below(&rng, 256);
			munmap(p, bytes);
		}
		ar_open(&r, &(struct rig_opts){ .bytes = 1 << 20 });
		mr_check(&r);
		for (k = 0; k < 5; k++)
			mr_run(&r);
		for (k = 0; k < 2; k++)
			if (r.client[k].mc)
				mr_exit(&r.client[k]);
		mr_settle(&r);
		mr_check(&r);
		mr_close(&r);
		ar_empty();
	}
	assert_int_equal(fd_count(), fds_before);
}

static void half_is_adopted_if_that_is_asked_for(void **state)
{
	struct fake_blk *b = fake_blk_create(8 << 20, 1 << 16);
	struct rig_opts o = churn_opts;
	static struct rig r;

	leave(live_churning, churn);
	o.lower = &b->n;
	o.share_pct = 50;
	ar_open(&r, &o);
	mr_check(&r);
	assert_true(r.adopted.lost > 0);
	assert_true(r.adopted.frames >= churn->nr_pinned);
	check_churned(&r, ar_client(&r, 0)->space);
	check_end(&r);
	mr_close(&r);
	ar_empty();
	assert_int_equal(fd_count(), fds_before);
}

static int setup(void **state)
{
	story = mmap(NULL, sizeof(*story), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	churn = mmap(NULL, sizeof(*churn), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	fds_before = fd_count();
	return story == MAP_FAILED || churn == MAP_FAILED;
}

static int teardown(void **state)
{
	ar_empty();
	munmap(story, sizeof(*story));
	munmap(churn, sizeof(*churn));
	return 0;
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(all_is_found_wherever_it_died),
		TEST(frames_given_back_stay_with_nobody),
		TEST(dying_again_loses_nothing_more),
		TEST(no_wrong_byte_wherever_a_churning_one_died),
		TEST(bad_record_costs_its_page_and_what_hangs_on_it),
		TEST(lost_ledger_costs_its_pool),
		TEST(lost_extent_costs_what_is_in_it),
		TEST(who_may_write_no_more_is_not_whole),
		TEST(looking_at_the_state_does_not_fill_it),
		TEST(torn_state_is_an_empty_start),
		TEST(torn_client_costs_its_pools_and_no_other),
		TEST(random_bytes_are_survived),
		TEST(half_is_adopted_if_that_is_asked_for),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
