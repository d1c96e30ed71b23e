/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A memory manager dies anywhere, its disk loses what it had not flushed, and the
 * next one finds both its memory and its disk: what is in either is one page again,
 * with the bytes that it had, and every law holds, at every slice of the recovery.
 */
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/mm/keep.h"
#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "kernels/kernels.h"
#include "tests/lib/adopt_rig.h"
#include "tests/lib/fake_blk.h"
#include "tests/lib/unit.h"

/* Who is dead takes nothing apart. */
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void)
{
	return 1;
}

#define PAGE	4096u
#define LEN	12u
#define CHAINS	60u
#define PINNED	8u		/* every so many a chain stays pinned */

/**
 * struct life - what the dead one did
 * @b, @r:	of it; left as they are where it died
 * @nr_pinned:	pages that are, and must be found where they were
 */
struct life {
	struct fake_disk disk;
	struct fake_blk	*b;
	struct rig	r;
	uint32_t	nr_pinned;
	uint32_t	chain[CHAINS * LEN], i[CHAINS * LEN];
	uint32_t	frame[CHAINS * LEN];
};

static struct life *life;
static struct rng rng;
static jmp_buf death;
static unsigned int countdown;

static void point(void)
{
	if (countdown && !--countdown)
		longjmp(death, 1);
}

/* -- pages --------------------------------------------------------------------------- */

static void fill(uint32_t *p, uint32_t chain, uint32_t i)
{
	for (uint32_t k = 0; k < PAGE / 4; k++)
		p[k] = chain * 1000003 + i * 8191 + k;
}

static bool good(const struct mm_pool *p, uint32_t f, uint32_t chain, uint32_t i)
{
	uint32_t want[PAGE / 4];

	fill(want, chain, i);
	return !memcmp(frame_addr(p, f), want, PAGE);
}

static void publish(struct rig_client *c, uint32_t chain, uint32_t i, uint32_t f)
{
	struct ring_pub pub = mr_pub(chain, i, f);
	void *at = frame_addr(c->win->pool, f);

	fill(at, chain, i);
	/* as a blob's parts: none says how far down it is */
	pub.pos = 0;
	if (chain & 1) {
		pub.flags |= KVMM_PUB_CRC;
		pub.crc = kvmm_crc32c(0, at, PAGE);
	}
	mr_pin(c, f, 1);
	mr_publish(c, &pub, 1, 77);
	mr_wait(c->rig, 77);
	mr_take(c->rig, 77);
}

static void put(struct rig_client *c, uint32_t chain)
{
	uint32_t f[LEN], i;

	mr_alloc(c, f, LEN);
	for (i = 0; i < LEN; i++) {
		publish(c, chain, i, f[i]);
		if (chain % PINNED) {
			mr_pin(c, f[i], -1);
			continue;
		}
		life->chain[life->nr_pinned] = chain;
		life->i[life->nr_pinned] = i;
		life->frame[life->nr_pinned++] = f[i];
	}
	for (i = 0; i < 3; i++)
		mr_run(c->rig);
}

/* Returns how many pages came; what comes is right. */
static uint32_t get(struct rig_client *c, uint32_t chain)
{
	struct ring_key key[LEN] = { { .group = 0 } };
	struct ring_sqe sqe = {
		.op = RING_FETCH, .n = LEN, .tag = 55,
		.arg = deadline_in(NSEC_PER_SEC),
	};
	const struct rig_done *d;
	uint32_t i, n = 0;

	for (i = 0; i < LEN; i++)
		mr_key(key[i].key, chain, i);
	mm_fetch(c->win, &sqe, key);
	d = mr_wait(c->rig, 55);
	for (i = 0; i < d->n; i++) {
		if (d->res[i].result)
			continue;
		assert_true(good(c->win->pool, d->res[i].frame, chain, i));
		n++;
	}
	mr_take(c->rig, 55);
	return n;
}

/* -- the one that dies ----------------------------------------------------------------- */

static bool is_online(void *arg)
{
	return ((struct rig *)arg)->lower->state == NODE_ONLINE;
}

static void live(void)
{
	struct rig_opts o = { .bytes = 1 << 20, .lower = &life->b->n };
	struct rig *r = &life->r;
	struct rig_client *c;
	uint32_t chain;

	ar_open(r, &o);
	mr_until(r, is_online, r);
	c = mr_client(r, 0, KVMM_RW);
	mr_attach(c, "a", PAGE);
	mr_win(c, 0);
	for (chain = 1; chain <= CHAINS; chain++) {
		put(c, chain);
		if (rng_below(&rng, 3) == 0)
			get(c, 1 + (uint32_t)rng_below(&rng, chain));
		if (rng_below(&rng, 8) == 0)
			fake_blk_flush(life->b);
	}
}

/* True: it died in the middle of something; else when it had nothing to do. */
static bool live_until(unsigned int nth)
{
	volatile bool died = true;

	countdown = nth;
	mm_point_fn = point;
	if (!setjmp(death)) {
		live();
		died = false;
	}
	mm_point_fn = NULL;
	countdown = 0;
	fake_blk_die(life->b, rng_below(&rng, 4) ? &rng : NULL);
	return died;
}

/* -- the one that follows ------------------------------------------------------------- */

static void check_pinned(struct rig *r)
{
	struct mm_space *sp = list_first(&r->mm->spaces, struct mm_space, link);
	uint64_t key[4];
	uint32_t k;

	for (k = 0; k < life->nr_pinned; k++) {
		struct page *pg;

		mr_key((uint8_t *)key, life->chain[k], life->i[k]);
		pg = page_find(sp, 0, key);
		assert_true(good(sp->pool[0][0], life->frame[k],
				 life->chain[k], life->i[k]));
		assert_non_null(pg);
		assert_int_equal(copy_at(pg, 0)->frame, life->frame[k]);
	}
}

/* But for what is pinned and of no use. */
static bool all_is_decided(void *arg)
{
	return !mm_last_adopted(((struct rig *)arg)->mm)->waiting &&
	       is_online(arg);
}

static void follow(void)
{
	struct fake_blk *b = fake_blk_open(&life->disk, 1 << 16);
	struct rig_opts o = { .bytes = 1 << 20, .lower = &b->n };
	static struct rig r;
	struct rig_client *c = NULL;
	uint32_t chain, n;

	o.share_pct = rng_below(&rng, 2) ? 100 : 1 + rng_below(&rng, 60);
	b->hold_recovery = rng_below(&rng, 2);
	ar_open(&r, &o);
	assert_string_equal(ar_said, "");
	for (n = 0; n < 40; n++) {
		mr_check(&r);
		b->hold_recovery = b->hold_recovery && rng_below(&rng, 8);
		mr_run(&r);
	}
	b->hold_recovery = false;
	mr_until(&r, all_is_decided, &r);
	mr_check(&r);
	if (r.client[0].mc)
		c = ar_client(&r, 0);
	if (c && c->win) {
		check_pinned(&r);
		for (chain = 1; chain <= CHAINS; chain++)
			get(c, chain);
		put(c, CHAINS + 1);
		assert_int_equal(get(c, CHAINS + 1), LEN);
		check_pinned(&r);
		mr_check(&r);
	}
	if (c)
		mr_exit(c);
	mr_settle(&r);
	mr_check(&r);
	assert_int_equal(mm_last_adopted(r.mm)->waiting, 0);
	mr_close(&r);
}

static void memory_and_disk_are_one_wherever_it_died(void **state)
{
	unsigned int rounds = test_long() ? 120 : 24, n, died = 0;

	rng_seed(&rng, test_seed());
	for (n = 0; n < rounds; n++) {
		life = calloc(1, sizeof(*life));
		assert_non_null(life);
		fake_disk_init(&life->disk, 8 << 20);
		life->b = fake_blk_open(&life->disk, 1 << 16);
		died += live_until(1 + (unsigned int)rng_below(&rng, 3500));
		follow();
		ar_empty();
		fake_disk_fini(&life->disk);
		ar_bury(life);
	}
	print_message("%u of %u died in the middle of something\n", died,
		      rounds);
	assert_true(died > 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(memory_and_disk_are_one_wherever_it_died),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
