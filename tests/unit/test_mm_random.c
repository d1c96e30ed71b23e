/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations of several clients on two nodes, in any order, with
 * failures and deaths; every law is checked after each round, and every byte
 * that a client has pinned must be what its page was published with.
 */
#include <stdio.h>
#include <string.h>

#include "tests/lib/unit.h"

#include "tests/lib/fake_blk.h"
#include "tests/lib/mm_rig.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "kernels/kernels.h"

#define PAGE		4096
#define NR		4
#define CHAINS		6
#define DEPTH		24
#define HAND		16
#define SENT		64

/* What a client holds: OPEN frames, and pins with what must be under them. */
struct hand {
	struct rig_client *c;
	uint32_t	open[HAND], nr_open;
	struct {
		uint32_t frame, chain, i;
		uint64_t word;
	} pin[HAND];
	uint32_t	nr_pin;
	struct {
		uint64_t tag;
		uint32_t frame[8];
	} sent[SENT];
	uint32_t	nr_sent;
	uint64_t	step;
};

static struct rig rig;
static struct fake_blk *blk;
static struct hand hand[NR];
static struct rng rng;
static uint64_t next_tag;
static uint8_t rule;
static uint64_t sealed, fetched, exists, deaths, wrong;

static uint32_t roll(uint32_t n)
{
	return rng_below(&rng, n);
}

/* The bytes of a page follow from its name. */
static void fill(void *p, uint32_t chain, uint32_t i)
{
	struct rng r;

	rng_seed(&r, (uint64_t)chain << 32 | i);
	rng_fill(&r, p, PAGE);
}

static bool is_right(const void *p, uint32_t chain, uint32_t i)
{
	uint8_t want[PAGE];

	fill(want, chain, i);
	return !memcmp(p, want, PAGE);
}

static struct mm_pool *pool_of(const struct hand *h)
{
	return h->c->win->pool;
}

static void attach(struct rig_client *c)
{
	const struct rig_group g = { rule, PAGE };
	uint8_t buf[DESC_MAX_BYTES];
	size_t len = mr_desc(buf, "random", &g, 1);
	struct errmsg e;

	assert_int_equal(mm_attach(c->mc, buf, len, 0, &c->space, &e), 0);
}

static void newcomer(unsigned int n)
{
	struct hand *h = &hand[n];

	memset(h, 0, sizeof(*h));
	h->c = mr_client(&rig, n, KVMM_RW);
	attach(h->c);
	mr_win(h->c, 0);
}

/* -- what a client does -------------------------------------------------------- */

static void do_alloc(struct hand *h)
{
	uint32_t n = roll(HAND - h->nr_open + 1);
	uint32_t got = mr_pop(h->c, h->open + h->nr_open, n), i;

	for (i = 0; i < got; i++)
		assert_int_equal(frame_word_state(frame_word_of(pool_of(h),
				 h->open[h->nr_open + i])), FRAME_OPEN);
	h->nr_open += got;
	if (got < n)
		mm_refill(h->c->win, n - got);
}

static uint32_t take_open(struct hand *h)
{
	uint32_t k = roll(h->nr_open), f = h->open[k];

	h->open[k] = h->open[--h->nr_open];
	return f;
}

static void do_free(struct hand *h)
{
	uint32_t f[4], n = 0;

	while (n < 4 && h->nr_open)
		f[n++] = take_open(h);
	if (n)
		assert_int_equal(mm_free(h->c->win, f, n,
					 roll(3) ? 0 : h->step + roll(3)), 0);
}

/* A run of a chain from somewhere on, part of it after a step. */
static void do_publish(struct hand *h)
{
	struct ring_sqe sqe = { .op = RING_PUBLISH, .tag = next_tag++ };
	uint32_t chain = roll(CHAINS), from = roll(2) * roll(DEPTH), n = 0;
	struct ring_pub p[8];

	if (rig.nr_done > 60 || h->nr_sent == SENT)
		return;
	while (n < 8 && h->nr_open && from + n < DEPTH) {
		uint32_t f = take_open(h);

		fill(frame_addr(pool_of(h), f), chain, from + n);
		p[n] = mr_pub(chain, from + n, f);
		p[n].after = roll(3) ? 0 : h->step + roll(3);
		if (!roll(4)) {
			p[n].flags = KVMM_PUB_CRC;
			p[n].crc = roll(8) ? kvmm_crc32c(0,
				frame_addr(pool_of(h), f), PAGE) : 1;
		}
		if (rule != KVMM_FULL && roll(3))
			p[n].flags |= RING_PUB_BOUND;
		h->sent[h->nr_sent].frame[n++] = f;
	}
	sqe.n = n;
	if (!n)
		return;
	h->sent[h->nr_sent++].tag = sqe.tag;
	mm_publish(h->c->win, &sqe, p);
}

/* Frames that were not sealed are the client's own still. */
static void take_back(struct hand *h, const struct rig_done *d)
{
	uint32_t i, k;

	for (i = 0; h->sent[i].tag != d->tag; i++)
		assert_true(i < h->nr_sent);
	for (k = 0; k < d->n; k++) {
		uint32_t f = h->sent[i].frame[k];

		if (!d->res[k].result)
			continue;
		if (h->nr_open < HAND)
			h->open[h->nr_open++] = f;
		else
			assert_int_equal(mm_free(h->c->win, &f, 1, 0), 0);
	}
	h->sent[i] = h->sent[--h->nr_sent];
}

static void do_fetch(struct hand *h)
{
	struct ring_sqe sqe = {
		.op = RING_FETCH, .tag = next_tag++,
		.arg = now_ns() + roll(20) * NSEC_PER_MSEC,
	};
	uint32_t chain = roll(CHAINS), from = roll(DEPTH), n;
	struct ring_key k[8];

	if (rig.nr_done > 60)
		return;
	memset(k, 0, sizeof(k));
	for (n = 0; n < 8 && from + n < DEPTH; n++)
		mr_key(k[n].key, chain, from + n);
	sqe.n = n;
	mm_fetch(h->c->win, &sqe, k);
}

/* As the library does it: index, pin, word; undone when the word is another. */
static void do_match(struct hand *h)
{
	const struct index *ix = h->c->space->index;
	uint32_t chain = roll(CHAINS), i;

	for (i = 0; i < DEPTH && h->nr_pin < HAND; i++) {
		struct index_hit hit;
		uint64_t key[4];

		mr_key((uint8_t *)key, chain, i);
		if (!index_find(ix, index_hash(ix->nr_lines, ix->seed, key, 0,
					       0), key, 0, 0, &hit))
			break;
		mr_pin(h->c, hit.frame, 1);
		if (frame_word_of(pool_of(h), hit.frame) != hit.fword) {
			mr_pin(h->c, hit.frame, -1);
			break;
		}
		h->pin[h->nr_pin].frame = hit.frame;
		h->pin[h->nr_pin].chain = chain;
		h->pin[h->nr_pin].word = hit.fword;
		h->pin[h->nr_pin++].i = i;
	}
}

static void check_pins(const struct hand *h)
{
	uint32_t i;

	for (i = 0; i < h->nr_pin; i++) {
		uint32_t f = h->pin[i].frame;

		if (frame_word_of(pool_of(h), f) == h->pin[i].word &&
		    is_right(frame_addr(pool_of(h), f), h->pin[i].chain,
			     h->pin[i].i))
			continue;
		wrong++;
	}
}

static void do_unpin(struct hand *h, bool all)
{
	check_pins(h);
	while (h->nr_pin && (all || roll(4)))
		mr_pin(h->c, h->pin[--h->nr_pin].frame, -1);
}

static void do_reap(struct hand *h)
{
	unsigned int i, k;

	for (i = 0; i < rig.nr_done; i++) {
		const struct rig_done *d = rig.done[i];

		if (!d->win || d->win->client != h->c->mc)
			continue;
		for (k = 0; k < d->n; k++) {
			sealed += d->op == RING_PUBLISH && !d->res[k].result;
			exists += d->res[k].result == -EEXIST;
			fetched += d->op == RING_FETCH && !d->res[k].result;
			if (d->res[k].frame)
				assert_int_equal(frame_word_of(pool_of(h),
						 d->res[k].frame),
						 d->res[k].word);
		}
		if (d->op == RING_PUBLISH)
			take_back(h, d);
		mr_take(&rig, d->tag);
		return;
	}
}

static void do_touch(struct hand *h)
{
	struct ring_sqe sqe = { .op = RING_END, .n = DEPTH };

	if (!h->nr_pin)
		return;
	sqe.frame = h->pin[h->nr_pin - 1].frame;
	sqe.arg = h->pin[h->nr_pin - 1].word;
	sqe.how = roll(3);
	mm_touch(h->c->win, &sqe);
}

static void do_report(struct hand *h)
{
	struct ring_key k = { .group = 0 };

	mr_key(k.key, roll(CHAINS), roll(DEPTH));
	mm_report(h->c->mc, h->c->space, &k, roll(2) ? KVMM_BAD : RING_UNDO);
}

static void do_die(unsigned int n)
{
	struct hand *h = &hand[n];

	check_pins(h);
	if (roll(2)) {
		mr_forget(h->c);
		mm_client_disconnect(h->c->mc);
		mr_run(&rig);
	}
	mr_exit(h->c);
	deaths++;
	mr_check(&rig);
	newcomer(n);
}

static void one_thing(unsigned int n)
{
	struct hand *h = &hand[n];

	switch (roll(40)) {
	case 0 ... 7:
		do_alloc(h);
		break;
	case 8 ... 13:
		do_publish(h);
		break;
	case 14 ... 18:
		do_fetch(h);
		break;
	case 19 ... 24:
		do_match(h);
		break;
	case 25 ... 28:
		do_unpin(h, false);
		break;
	case 29 ... 31:
		do_reap(h);
		break;
	case 32:
		do_free(h);
		break;
	case 33:
		mr_step(h->c, h->step += roll(3));
		break;
	case 34:
		mr_sync(h->c);
		break;
	case 35:
		do_touch(h);
		break;
	case 36:
		mm_cancel(h->c->mc, next_tag - 1 - roll(8));
		break;
	case 37:
		if (!roll(20))
			do_report(h);
		break;
	case 38:
		if (!roll(30))
			do_die(n);
		break;
	default:
		mr_run(&rig);
	}
}

/* -- the test ------------------------------------------------------------------- */

static void shake_the_device(void)
{
	blk->err[NODE_READ] = roll(8) ? 0 : -EIO;
	blk->err[NODE_WRITE] = roll(8) ? 0 : -EIO;
	blk->nth = 1 + roll(5);
	blk->refuse[NODE_WRITE] = roll(10) ? 0 : -EAGAIN;
	blk->hold[NODE_READ] = !roll(6);
	if (!roll(40))
		fake_blk_flip(blk);
}

static void run(uint64_t seed, unsigned int rounds)
{
	unsigned int i, k;

	rng_seed(&rng, seed);
	next_tag = 1000;
	sealed = fetched = exists = deaths = wrong = 0;
	blk = fake_blk_create(48 * PAGE, 1u << 20);
	assert_non_null(blk);
	blk->rng = &rng;
	mr_open(&rig, &(struct rig_opts){ .bytes = 96 * PAGE,
					  .lower = &blk->n });
	for (i = 0; i < NR; i++)
		newcomer(i);
	for (i = 0; i < rounds; i++) {
		for (k = 0; k < 20; k++)
			one_thing(roll(NR));
		shake_the_device();
		mr_run(&rig);
		mr_check(&rig);
	}
	blk->hold[NODE_READ] = false;
	for (i = 0; i < NR; i++) {
		do_unpin(&hand[i], true);
		mr_exit(hand[i].c);
	}
	mr_settle(&rig);
	mr_check(&rig);
	mr_close(&rig);
	assert_int_equal(wrong, 0);
}

static void many(uint8_t of_rule)
{
	unsigned int i, runs = test_long() ? 100 : 4;
	uint64_t s = 0, f = 0, x = 0, d = 0;

	rule = of_rule;
	for (i = 0; i < runs; i++) {
		run(test_seed() + i, 600);
		s += sealed;
		f += fetched;
		x += exists;
		d += deaths;
	}
	/* and something happened */
	print_message("sealed %llu, fetched %llu, there before %llu, deaths %llu\n",
		      (unsigned long long)s, (unsigned long long)f,
		      (unsigned long long)x, (unsigned long long)d);
	assert_true(s > 100 * runs);
	assert_true(f > 10 * runs);
	assert_true(x > 10 * runs);
	assert_true(d > 0);
}

static void laws_hold_under_random_operations(void **state)
{
	many(KVMM_FULL);
}

/* A group whose pages are bound to their parents or not, as it happens. */
static void laws_hold_where_some_are_bound(void **state)
{
	many(KVMM_LAST);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(laws_hold_under_random_operations),
		cmocka_unit_test(laws_hold_where_some_are_bound),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
