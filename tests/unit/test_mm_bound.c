/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages that are bound to their parents in a group whose rule does not do so:
 * the parts of a blob. They live and go together; others of the group do not.
 */
#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "tests/lib/pattern.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

#define GROUP	RIG_WINDOW

static struct rig rig;
static struct rig *const r = &rig;

static int setup(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 128 * 4096, .nvme_bytes = 1024 * 4096,
	};

	rig_start(r, &o);
	return 0;
}

static int teardown(void **state)
{
	rig_stop(r);
	return 0;
}

/* Page @i of a chain, its parent the one before. */
static int put(uint32_t chain, uint32_t i, unsigned int flags,
	       struct rig_answer *a)
{
	uint32_t f = rig_frame(r, GROUP, 1000);
	struct ring_pub pub = {
		.frame = f, .group = GROUP, .pos = i * 16, .flags = flags,
	};
	struct ring_sqe sqe = { .op = RING_PUBLISH, .n = 1 };
	struct rig_answer mine;
	struct kvmm_key k;

	assert_int_not_equal(f, 0);
	if (!a)
		a = &mine;
	rig_key(chain, i, pub.key);
	memcpy(k.b, pub.key, sizeof(k.b));
	if (i)
		rig_key(chain, i - 1, pub.parent);
	pattern_fill(frame_addr(rig_pool(r, GROUP, RIG_DRAM), f), 4096, &k);
	sqe.tag = r->next_tag++;
	mm_publish(r->w[0], &sqe, &pub);
	assert_true(rig_answer(r, sqe.tag, 1000, a));
	rig_answer_put(r, a);
	if (a->res[0].result)
		mm_free(r->w[0], &f, 1, 0);
	return a->res[0].result;
}

/* A blob of @n pages: the first is its root, the last its head. */
static void put_bound(uint32_t chain, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		assert_int_equal(put(chain, i, i ? RING_PUB_BOUND : 0, NULL), 0);
}

static bool there(uint32_t chain, uint32_t i)
{
	return rig_page(r, GROUP, chain, i);
}

static bool in_dram(uint32_t chain, uint32_t i)
{
	return rig_state(r, GROUP, chain, i, RIG_DRAM) == COPY_READY;
}

static struct reclaim_control reclaim(uint32_t want)
{
	struct reclaim_control rc = {
		.want = want, .max_scan = 512,
		.deadline_ns = deadline_in(NSEC_PER_SEC),
	};

	pool_reclaim(rig_pool(r, GROUP, RIG_DRAM), &rc);
	return rc;
}

static void report(uint32_t chain, uint32_t i, uint64_t verdict)
{
	struct ring_key key = { .group = GROUP };

	rig_key(chain, i, key.key);
	mm_report(r->c, r->sp, &key, verdict);
}

static void the_head_leaves_first(void **state)
{
	put_bound(1, 6);
	rig_touch(r, GROUP, 1, 6);
	page_writeback(rig_page(r, GROUP, 1, 5), &r->mm->node[RIG_DRAM],
		       NODE_PRIO_WRITEBACK);
	rig_settle(r, 1000);
	assert_int_equal(reclaim(2).freed, 2);
	assert_true(in_dram(1, 0) && in_dram(1, 3));
	assert_false(in_dram(1, 4) || in_dram(1, 5));
	rig_check(r);
	assert_int_equal(reclaim(10).freed, 4);
	rig_check(r);
	/* all of it is below, and comes back */
	assert_int_equal(fake_blk_slots(r->blk), 6);
	assert_int_equal(rig_fetch_check(r, GROUP, 1, 0, 6), 6);
	rig_check(r);
}

/* As it was published, root coldest, and nothing below to go to. */
static void the_head_leaves_first_also_when_it_is_the_warmest(void **state)
{
	struct rig_opts o = { .dram_bytes = 128 * 4096, .no_nvme = true };

	rig_stop(r);
	rig_start(r, &o);
	put_bound(1, 6);
	assert_int_equal(reclaim(1).freed, 1);
	assert_true(there(1, 4));
	assert_false(there(1, 5));
	rig_check(r);
}

static void a_part_whose_parent_is_nowhere_is_refused(void **state)
{
	assert_int_equal(put(1, 1, RING_PUB_BOUND, NULL), -ESTALE);
	assert_int_equal(put(1, 1, 0, NULL), 0);
	rig_check(r);
}

static void warm(uint32_t chain, uint32_t i)
{
	struct mm_pool *p = rig_pool(r, GROUP, RIG_DRAM);

	pool_policy(p)->touch(p->policy,
			      &copy_at(rig_page(r, GROUP, chain, i), RIG_DRAM)->pol);
}

/* Two blobs, of which the first's head is named as the second's parent. */
static void two_in_memory(void)
{
	struct rig_opts o = { .dram_bytes = 128 * 4096, .no_nvme = true };

	rig_stop(r);
	rig_start(r, &o);
	put_bound(1, 2);
	assert_int_equal(put(1, 2, 0, NULL), 0);
	assert_int_equal(put(1, 3, RING_PUB_BOUND, NULL), 0);
	assert_ptr_equal(rig_page(r, GROUP, 1, 2)->parent,
			 rig_page(r, GROUP, 1, 1));
}

static void what_is_not_bound_does_not_hold_its_parent(void **state)
{
	two_in_memory();
	warm(1, 3);
	warm(1, 2);
	assert_int_equal(reclaim(1).freed, 1);
	assert_true(there(1, 0) && there(1, 2) && there(1, 3));
	assert_false(there(1, 1));
	assert_null(rig_page(r, GROUP, 1, 2)->parent);
	rig_check(r);
}

static void what_is_not_bound_stays_when_its_parent_is_lost(void **state)
{
	two_in_memory();
	report(1, 1, KVMM_BAD);
	assert_false(there(1, 0) || there(1, 1));
	assert_true(there(1, 2) && there(1, 3));
	assert_null(rig_page(r, GROUP, 1, 2)->parent);
	rig_check(r);
	report(1, 3, KVMM_BAD);
	assert_int_equal(r->sp->nr_pages, 0);
	rig_check(r);
}

static void a_report_of_any_part_takes_all_of_it(void **state)
{
	uint32_t i, bad;

	for (bad = 0; bad < 4; bad++) {
		put_bound(bad, 4);
		page_writeback(rig_page(r, GROUP, bad, 2),
			       &r->mm->node[RIG_DRAM], NODE_PRIO_WRITEBACK);
		rig_settle(r, 1000);
		report(bad, bad, KVMM_BAD);
		for (i = 0; i < 4; i++)
			assert_false(there(bad, i));
		rig_settle(r, 1000);
		rig_check(r);
	}
	assert_int_equal(r->sp->nr_pages, 0);
	assert_int_equal(fake_blk_slots(r->blk), 0);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgreport, 4);
}

static void what_is_taken_back_is_not_bad(void **state)
{
	put_bound(1, 3);
	report(1, 0, RING_UNDO);
	assert_int_equal(r->sp->nr_pages, 0);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgreport, 0);
	rig_check(r);
}

/* Its own parts may be others than those that the page below was written with. */
static void a_head_that_is_only_below_is_not_written_over(void **state)
{
	struct rig_answer a;

	put_bound(1, 3);
	rig_push_down(r, GROUP);
	assert_false(in_dram(1, 2));
	assert_true(there(1, 2));
	assert_int_equal(put(1, 2, RING_PUB_BOUND, &a), -EEXIST);
	assert_int_equal(a.res[0].frame, 0);
	rig_check(r);
	assert_int_equal(rig_fetch_check(r, GROUP, 1, 0, 3), 3);
	assert_int_equal(put(1, 2, RING_PUB_BOUND, &a), -EEXIST);
	assert_int_not_equal(a.res[0].frame, 0);
	rig_check(r);
}

static void a_part_that_cannot_be_read_takes_all_of_it(void **state)
{
	put_bound(1, 4);
	assert_int_equal(put(1, 4, 0, NULL), 0);	/* the next one's root */
	rig_push_down(r, GROUP);
	assert_int_equal(fake_blk_slots(r->blk), 5);
	assert_int_equal(rig_fetch_check(r, GROUP, 1, 4, 1), 1);
	fake_blk_flip(r->blk);
	assert_int_equal(rig_fetch_check(r, GROUP, 1, 1, 1), 0);
	rig_settle(r, 1000);
	/* and what they hung on is of no use any more */
	assert_false(there(1, 0) || there(1, 1) || there(1, 2) || there(1, 3));
	assert_true(there(1, 4));
	rig_check(r);
}

/* It is neither written down nor kept when its head has been forgotten. */
static void what_has_lost_its_head_goes(void **state)
{
	struct rig_opts o = { .dram_bytes = 128 * 4096, .no_nvme = true };
	uint32_t c;

	rig_stop(r);
	rig_start(r, &o);
	for (c = 0; c < 4; c++)
		put_bound(c, 24);
	for (c = 0; c < 4; c++)
		rig_touch(r, GROUP, c, 24);
	assert_int_equal(reclaim(1).freed, 1);
	assert_false(there(0, 23));
	assert_true(there(0, 22));
	rig_run(r, 20);
	assert_int_equal(r->sp->nr_pages, 3 * 24);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgdrop_orphan, 23);
	rig_check(r);
}

/* A pass over the pool makes the wreck: nobody need come by for it to go on. */
static void what_lost_its_head_to_a_pass_goes_at_once(void **state)
{
	struct rig_opts o = { .dram_bytes = 128 * 4096, .no_nvme = true };
	struct mm_pool *p;
	uint64_t want, now;

	rig_stop(r);
	rig_start(r, &o);
	put_bound(1, 24);
	rig_touch(r, GROUP, 1, 24);
	rig_run(r, 20);
	p = rig_pool(r, GROUP, RIG_DRAM);
	now = now_ns();
	r->mm->now_ns = now;
	/* one frame lacks */
	want = p->nr_free + pool_room(p) + 1 - p->wmark_high;
	pool_wants(p, 0, want);
	r->mm->next_reclaim_ns = 0;
	assert_int_equal(reclaim_run(r->mm, now), now);
	pool_wants(p, want, 0);
	assert_false(there(1, 23));
	assert_true(there(1, 22));
	assert_true(reclaim_run(r->mm, now) > now);
	assert_int_equal(r->sp->nr_pages, 0);
	rig_check(r);
}

static void wrecks_beyond_what_is_noted_are_counted(void **state)
{
	uint32_t c;

	for (c = 0; c < WRECKS + 4; c++)
		put_bound(c, 2);
	for (c = 0; c < WRECKS + 4; c++)
		page_drop_copy(rig_page(r, GROUP, c, 1),
			       &r->mm->node[RIG_DRAM]);
	assert_int_equal(rig_count(r, RIG_DRAM)->wreck_lost, 4);
	rig_run(r, 20);
	/* they are left to reclaim */
	assert_int_equal(r->sp->nr_pages, 4);
	rig_check(r);
}

/* A reader holds it: found by nobody, gone when he lets go. */
static void a_wreck_that_is_pinned_goes_later(void **state)
{
	struct rig_opts o = { .dram_bytes = 128 * 4096, .no_nvme = true };
	uint32_t f;

	rig_stop(r);
	rig_start(r, &o);
	put_bound(1, 5);
	rig_touch(r, GROUP, 1, 5);
	f = copy_at(rig_page(r, GROUP, 1, 2), RIG_DRAM)->frame;
	rig_pin(r, GROUP, f, 1);
	assert_int_equal(reclaim(1).freed, 1);
	rig_run(r, 20);
	assert_false(there(1, 0) || there(1, 2));
	assert_true(rig_bytes_ok(r, GROUP, f, 1, 2));
	rig_check(r);
	rig_pin(r, GROUP, f, -1);
	rig_run(r, 60);
	assert_int_equal(r->sp->nr_pages, 0);
	rig_check(r);
}

int main(void)
{
#define T(f)	cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(the_head_leaves_first),
		T(the_head_leaves_first_also_when_it_is_the_warmest),
		T(a_part_whose_parent_is_nowhere_is_refused),
		T(what_is_not_bound_does_not_hold_its_parent),
		T(what_is_not_bound_stays_when_its_parent_is_lost),
		T(a_report_of_any_part_takes_all_of_it),
		T(what_is_taken_back_is_not_bad),
		T(a_head_that_is_only_below_is_not_written_over),
		T(a_part_that_cannot_be_read_takes_all_of_it),
		T(what_has_lost_its_head_goes),
		T(what_lost_its_head_to_a_pass_goes_at_once),
		T(wrecks_beyond_what_is_noted_are_counted),
		T(a_wreck_that_is_pinned_goes_later),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
