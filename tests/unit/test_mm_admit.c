/* SPDX-License-Identifier: Apache-2.0 */
/* What is worth a write to a block node, and how much may be written a day. */
#include <errno.h>

#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

#define NVME_BYTES	(UINT64_C(1024) * 4096)

static struct rig rig;
static struct rig *const r = &rig;

static void start(bool second_touch, uint32_t day_permille)
{
	struct rig_opts o = {
		.dram_bytes = 128 * 4096, .nvme_bytes = NVME_BYTES,
		.second_touch = second_touch, .day_permille = day_permille,
	};

	rig_start(r, &o);
}

static int setup(void **state)
{
	start(true, 0);
	return 0;
}

static int setup_budget(void **state)
{
	start(false, 1000);
	return 0;
}

static int teardown(void **state)
{
	rig_stop(r);
	return 0;
}

static struct mm_node *lo(void)
{
	return &r->mm->node[RIG_NVME];
}

static int write_down(uint32_t chain, uint32_t i)
{
	return page_writeback(rig_page(r, RIG_FULL, chain, i),
			      &r->mm->node[RIG_DRAM], NODE_PRIO_WRITEBACK);
}

static enum copy_state below(uint32_t chain, uint32_t i)
{
	return rig_state(r, RIG_FULL, chain, i, RIG_NVME);
}

/* -- second touch ---------------------------------------------------------------- */

static void what_was_used_once_is_not_written(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	assert_int_equal(write_down(1, 2), -EPERM);
	/* the request that published it ends: that is its first use */
	rig_touch(r, RIG_FULL, 1, 3);
	assert_int_equal(write_down(1, 2), -EPERM);
	rig_settle(r, 1000);
	assert_int_equal(r->blk->seen[NODE_WRITE], 0);
	assert_int_equal(rig_count(r, RIG_NVME)->pgadmit, 0);
	/* asked twice, refused once */
	assert_int_equal(rig_count(r, RIG_NVME)->pgadmit_refused, 1);
	rig_check(r);
	/* it is dropped like any other */
	rig_push_down(r, RIG_FULL);
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	assert_int_equal(r->blk->seen[NODE_WRITE], 0);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_refused, 0);
	rig_check(r);
}

static void what_two_requests_used_is_written_with_its_ancestors(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 4), 4);
	rig_touch(r, RIG_FULL, 1, 4);
	assert_int_equal(write_down(1, 3), -EPERM);
	rig_touch(r, RIG_FULL, 1, 4);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_refused, 0);
	assert_int_equal(write_down(1, 3), 4);
	rig_settle(r, 1000);
	assert_int_equal(below(1, 3), COPY_READY);
	assert_int_equal(rig_count(r, RIG_NVME)->pgadmit, 1);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgdemote, 4);
	rig_check(r);
}

static void what_comes_again_after_its_eviction_is_written(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	rig_push_down(r, RIG_FULL);
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 2, 3), 3);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(below(1, 2), COPY_READY);
	assert_null(rig_page(r, RIG_FULL, 2, 0));
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 3), 3);
	rig_check(r);
}

static void the_same_key_in_another_group_is_another_page(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	assert_int_equal(write_down(1, 0), -EPERM);
	assert_int_equal(rig_publish_chain(r, RIG_WINDOW, 1, 1), 1);
	assert_int_equal(page_writeback(rig_page(r, RIG_WINDOW, 1, 0),
					&r->mm->node[RIG_DRAM],
					NODE_PRIO_WRITEBACK), -EPERM);
}

static void what_was_asked_for_in_vain_is_written(void **state)
{
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 2), 0);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	assert_int_equal(write_down(1, 1), 2);
	rig_settle(r, 1000);
	rig_check(r);
}

static void what_came_from_below_may_go_back(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	rig_touch(r, RIG_FULL, 1, 2);
	rig_touch(r, RIG_FULL, 1, 2);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 2), 2);
	/* the node has given its copies up, since they live above */
	copy_drop_tree(rig_page(r, RIG_FULL, 1, 0), lo());
	assert_int_equal(below(1, 0), COPY_NONE);
	assert_int_equal(write_down(1, 1), 2);
	rig_settle(r, 1000);
	assert_int_equal(below(1, 1), COPY_READY);
	rig_check(r);
}

static void a_session_that_goes_on_is_written(void **state)
{
	struct page *pg;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	pg = rig_page(r, RIG_FULL, 1, 1);
	assert_int_equal(write_down(1, 1), -EPERM);
	copy_at(pg, RIG_DRAM)->pol.flags = KVMM_POLICY_CONTINUES;
	assert_int_equal(write_down(1, 1), 2);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 2, 2), 2);
	pg = rig_page(r, RIG_FULL, 2, 1);
	copy_at(pg, RIG_DRAM)->pol.expect_ms = 1000;
	assert_int_equal(write_down(2, 1), 2);
	rig_settle(r, 1000);
	rig_check(r);
}

/* Pages that are used once stream through; those that are used stay below. */
static void a_scan_writes_nothing_and_costs_nobody_his_pages(void **state)
{
	uint32_t c, i, there = 0;

	for (c = 0; c < 8; c++) {
		assert_int_equal(rig_publish_chain(r, RIG_FULL, c, 4), 4);
		rig_touch(r, RIG_FULL, c, 4);
		rig_touch(r, RIG_FULL, c, 4);
	}
	for (c = 100; c < 400; c++) {
		assert_int_equal(rig_publish_chain(r, RIG_FULL, c, 4), 4);
		rig_touch(r, RIG_FULL, c, 4);
	}
	rig_settle(r, 1000);
	for (c = 0; c < 8; c++)
		for (i = 0; i < 4; i++)
			there += below(c, i) == COPY_READY;
	assert_int_equal(there, 32);
	/* nothing was written but them, if the filter mistook none */
	assert_true(r->blk->seen[NODE_WRITE] <= 32 + 8);
	assert_int_equal(rig_count(r, RIG_NVME)->pgdemote_fail, 0);
	rig_check(r);
}

/* Refused pages are as good as clean ones: nothing is written to have some. */
static void refused_pages_count_as_clean(void **state)
{
	struct mm_pool *p = rig_pool(r, RIG_FULL, RIG_DRAM);
	uint32_t c;

	for (c = 0; c < 40; c++)
		assert_int_equal(rig_publish_chain(r, RIG_FULL, c, 4), 4);
	rig_run(r, 50);
	assert_true(p->nr_refused > 0);
	assert_true(p->nr_free + pool_room(p) + p->nr_pages - p->nr_dirty +
		    p->nr_refused >= (p->nr_frames + pool_room(p)) / 8);
	assert_int_equal(r->blk->seen[NODE_WRITE], 0);
	rig_check(r);
}

static void the_filter_is_bounded_and_forgets_the_oldest(void **state)
{
	uint64_t key[4] = { 0 }, n = 0;

	admit_asked(r->sp, RIG_FULL, key);
	n = lo()->admit.nr_buckets * 4;
	assert_int_equal(mm_admit_bytes(r->mm), n * 2);
	for (key[0] = 1; key[0] < 8 * n; key[0]++)
		admit_asked(r->sp, RIG_FULL, key);
	assert_int_equal(mm_admit_bytes(r->mm), n * 2);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	assert_int_equal(write_down(1, 0), -EPERM);
	rig_check(r);
}

/* A node that is being opened has no capacity yet; clients ask all the same. */
static void the_filter_is_made_for_a_node_that_is_open(void **state)
{
	const uint64_t key[4] = { 1 };
	uint64_t bytes = r->nvme->capacity;

	r->nvme->capacity = 0;
	admit_asked(r->sp, RIG_FULL, key);
	assert_int_equal(lo()->admit.nr_buckets, 0);
	r->nvme->capacity = UINT64_C(1) << 40;
	admit_asked(r->sp, RIG_FULL, key);
	assert_int_equal(lo()->admit.nr_buckets, UINT64_C(1) << 22);
	r->nvme->capacity = bytes;
	rig_check(r);
}

/* How many of many keys that it never saw it takes for known. */
static void the_filter_mistakes_few(void **state)
{
	uint64_t key[4] = { 0 }, full = 0, i;
	uint32_t wrong = 0;

	for (key[0] = 1; key[0] < 200000; key[0]++)
		admit_asked(r->sp, RIG_FULL, key);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	for (i = 0; i < lo()->admit.nr_buckets; i++)
		full += lo()->admit.bucket[i] >> 48 != 0;
	assert_true(full > lo()->admit.nr_buckets * 9 / 10);
	for (i = 0; i < 20000; i++) {
		struct page *pg = rig_page(r, RIG_FULL, 1, 0);
		struct copy *c = copy_at(pg, RIG_DRAM);
		uint64_t was = pg->key[3];

		pg->key[3] = ~i;
		wrong += admit_page(pg, &r->mm->node[RIG_DRAM], lo());
		pg->key[3] = was;
		c->flags &= ~COPY_WANTED;
		admit_forget(rig_pool(r, RIG_FULL, RIG_DRAM), c);
	}
	print_message("# %u of 20000\n", wrong);
	assert_true(wrong < 20);
	rig_check(r);
}

/* -- the budget -------------------------------------------------------------------- */

/* Let @ns go by for the budget; time itself is nobody's to move. */
static void pass(uint64_t ns)
{
	uint64_t now = r->mm->now_ns;

	r->mm->now_ns = lo()->admit.filled_ns + ns;
	budget_left(lo(), false);
	r->mm->now_ns = now;
	lo()->admit.filled_ns = now;
}

#define HOUR	(3600 * NSEC_PER_SEC)
#define DAY_OF	NVME_BYTES		/* one drive write a day */

static void what_is_written_is_charged_to_the_byte(void **state)
{
	int64_t left;

	assert_true(budget_left(lo(), false));
	left = lo()->admit.left;
	assert_int_equal(left, DAY_OF / 24);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	assert_int_equal(write_down(1, 2), 3);
	rig_settle(r, 1000);
	left -= lo()->admit.left;
	/* less what the moment brought: 48 bytes a second */
	assert_true(left <= 3 * 4096 && left > 3 * 4096 - 500);
}

static void a_spent_budget_stops_writes_until_it_is_filled(void **state)
{
	uint32_t c, begun = 0;
	int n;

	for (c = 0; c < 100; c++) {
		assert_int_equal(rig_publish_chain(r, RIG_FULL, c, 1), 1);
		n = write_down(c, 0);
		rig_settle(r, 1000);
		if (n == -EDQUOT)
			break;
		if (n > 0)
			begun++;
	}
	/* an hour of 4 MiB a day is 42.7 pages */
	assert_int_equal(begun, 43);
	assert_int_equal(rig_count(r, RIG_NVME)->pgadmit_budget, 1);
	assert_int_equal(r->blk->seen[NODE_WRITE], begun);

	/* nothing is stuck meanwhile: pages are forgotten */
	rig_push_down(r, RIG_FULL);
	assert_null(rig_page(r, RIG_FULL, c, 0));
	assert_int_equal(r->blk->seen[NODE_WRITE], begun);

	pass(HOUR);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 200, 1), 1);
	assert_int_equal(write_down(200, 0), 1);
	rig_settle(r, 1000);
	rig_check(r);
}

static void no_more_than_a_quarter_day_is_saved_up(void **state)
{
	assert_true(budget_left(lo(), false));
	pass(100 * HOUR);
	assert_true(budget_left(lo(), false));
	assert_int_equal(lo()->admit.left, DAY_OF / 4);
}

/* However often one looks: what is too small to count is not lost. */
static void a_day_brings_a_days_budget(void **state)
{
	uint64_t now = r->mm->now_ns;
	unsigned int i;

	assert_true(budget_left(lo(), false));
	lo()->admit.left = 0;
	for (i = 0; i < 36000; i++) {
		r->mm->now_ns += NSEC_PER_MSEC * 10;
		budget_left(lo(), false);
	}
	/* 360 s of it */
	assert_in_range(lo()->admit.left, DAY_OF / 240 - 1, DAY_OF / 240);
	r->mm->now_ns = now;
	lo()->admit.filled_ns = now;
}

static void ancestors_may_overdraw_and_no_further(void **state)
{
	const int64_t most = DAY_OF / 24;
	uint32_t i, there = 0;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 100), 100);
	assert_true(budget_left(lo(), false));
	lo()->admit.left = 1;
	while (write_down(1, 99) > 0)
		rig_settle(r, 1000);
	rig_settle(r, 1000);
	assert_true(lo()->admit.left < 0);
	assert_true(lo()->admit.left >= -most - 4096);
	/* the upper part of the chain is there, and closed */
	for (i = 0; i < 100; i++)
		there += below(1, i) == COPY_READY;
	assert_in_range(there, 1, 43);
	assert_int_equal(below(1, there - 1), COPY_READY);
	rig_check(r);
}

static void no_budget_is_no_limit(void **state)
{
	rig_stop(r);
	start(false, 0);
	r->mm->node[RIG_NVME].admit.left = -1000000;
	assert_true(budget_left(lo(), false));
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 100), 100);
	assert_true(write_down(1, 99) > 0);
	rig_settle(r, 1000);
	rig_check(r);
}

/* -- both, with all that can go wrong -------------------------------------------------- */

static void random_step(struct rng *rng)
{
	uint32_t chain = (uint32_t)rng_below(rng, 40);
	uint32_t n = 1 + (uint32_t)rng_below(rng, 6);

	switch (rng_below(rng, 8)) {
	case 0:
	case 1:
	case 2:
		rig_publish_chain(r, RIG_FULL, chain, n);
		break;
	case 3:
	case 4:
		rig_touch(r, RIG_FULL, chain, n);
		break;
	case 5:
		rig_fetch_check(r, RIG_FULL, chain, 0, n);
		break;
	case 6:
		if (rig_state(r, RIG_FULL, chain, n - 1, RIG_DRAM) ==
		    COPY_READY)
			write_down(chain, n - 1);
		break;
	default:
		r->blk->err[NODE_WRITE] = rng_below(rng, 3) ? 0 :
					  rng_below(rng, 2) ? -ENOSPC : -EIO;
		lo()->admit.left = (int64_t)rng_below(rng, 40 * 4096) -
				   8 * 4096;
		break;
	}
}

static void whatever_is_admitted_the_laws_hold(void **state)
{
	unsigned int steps = test_long() ? 20000 : 1500, i;
	struct rng rng;

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&rng, test_seed());
	rig_stop(r);
	start(true, 1000);
	r->blk->rng = &rng;
	r->blk->nth = 3;
	for (i = 0; i < steps; i++) {
		random_step(&rng);
		if (!(i % 16))
			rig_check(r);
	}
	rig_settle(r, 1000);
	rig_check(r);
	print_message("# %llu admitted, %llu not, %llu over the budget\n",
		      (unsigned long long)rig_count(r, RIG_NVME)->pgadmit,
		      (unsigned long long)
		      rig_count(r, RIG_NVME)->pgadmit_refused,
		      (unsigned long long)
		      rig_count(r, RIG_NVME)->pgadmit_budget);
	assert_true(rig_count(r, RIG_NVME)->pgadmit > 0);
	assert_true(rig_count(r, RIG_NVME)->pgadmit_refused > 0);
	assert_true(rig_count(r, RIG_NVME)->pgadmit_budget > 0);
}

int main(void)
{
#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)
#define B(name)	cmocka_unit_test_setup_teardown(name, setup_budget, teardown)
	const struct CMUnitTest tests[] = {
		T(what_was_used_once_is_not_written),
		T(what_two_requests_used_is_written_with_its_ancestors),
		T(what_comes_again_after_its_eviction_is_written),
		T(the_same_key_in_another_group_is_another_page),
		T(what_was_asked_for_in_vain_is_written),
		T(what_came_from_below_may_go_back),
		T(a_session_that_goes_on_is_written),
		T(a_scan_writes_nothing_and_costs_nobody_his_pages),
		T(refused_pages_count_as_clean),
		T(the_filter_is_bounded_and_forgets_the_oldest),
		T(the_filter_is_made_for_a_node_that_is_open),
		T(the_filter_mistakes_few),
		B(what_is_written_is_charged_to_the_byte),
		B(a_spent_budget_stops_writes_until_it_is_filled),
		B(no_more_than_a_quarter_day_is_saved_up),
		B(a_day_brings_a_days_budget),
		B(ancestors_may_overdraw_and_no_further),
		B(no_budget_is_no_limit),
		B(whatever_is_admitted_the_laws_hold),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
