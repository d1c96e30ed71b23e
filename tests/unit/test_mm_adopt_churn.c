/* SPDX-License-Identifier: Apache-2.0 */
/* A memory manager dies while it moves pages to a node below and back. */
#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/fake_blk.h"
#include "tests/lib/adopt_story.h"

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

int main(void)
{
	const struct CMUnitTest tests[] = {
		STORY_TEST(no_wrong_byte_wherever_a_churning_one_died),
		STORY_TEST(half_is_adopted_if_that_is_asked_for),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
