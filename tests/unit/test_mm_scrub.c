/* SPDX-License-Identifier: Apache-2.0 */
/* Pages on a block node are read now and then; those that are damaged go. */
#include <stdio.h>
#include <string.h>

#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

#define LEN	12u
#define DISK	(UINT64_C(4) << 20)

static struct fake_disk disk;
static struct rig rig;
static struct rig *const r = &rig;

static void start(uint64_t bytes_s)
{
	struct rig_opts o = {
		.dram_bytes = 64 * 4096, .nvme_bytes = DISK, .disk = &disk,
		.scrub_bytes_s = bytes_s,
		.direct_reclaim_ns = 2 * NSEC_PER_SEC,
	};

	rig_start(r, &o);
	rig_recover(r);
}

static int setup(void **state)
{
	fake_disk_init(&disk, DISK);
	start(UINT64_C(1) << 30);
	return 0;
}

static int teardown(void **state)
{
	rig_stop(r);
	fake_disk_fini(&disk);
	return 0;
}

static struct mm_node *nvme(void)
{
	return &r->mm->node[RIG_NVME];
}

static void fill(unsigned int group, uint32_t chain, uint32_t n)
{
	assert_int_equal(rig_publish_chain(r, group, chain, n), n);
	rig_push_down(r, group);
	rig_settle(r, 1000);
}

/* Rounds until a whole pass is over, which began now. */
static void pass(void)
{
	uint64_t deadline = deadline_in(10 * NSEC_PER_SEC), n;

	scrub_again(nvme());
	do {
		n = nvme()->c.pgscrub;
		rig_run(r, 100);
		rig_check(r);
		assert_false(deadline_past(deadline));
	} while (nvme()->c.pgscrub != n);
}

static struct copy *copy_of(uint32_t chain, uint32_t i)
{
	struct page *pg = rig_page(r, RIG_FULL, chain, i);

	assert_non_null(pg);
	return page_copy(pg, nvme());
}

static void every_page_is_read_once_a_pass(void **state)
{
	uint64_t n;

	fill(RIG_FULL, 1, LEN);
	fill(RIG_BIG, 2, 3);
	n = nvme()->c.pgscrub;
	pass();
	assert_int_equal(nvme()->c.pgscrub - n, LEN + 3);
	assert_int_equal(nvme()->c.pgscrub_bad, 0);
	rig_run(r, 100);
	assert_int_equal(nvme()->c.pgscrub - n, LEN + 3);
}

static void damaged_page_goes_with_what_hangs_on_it(void **state)
{
	uint64_t off;

	fill(RIG_FULL, 1, LEN);
	off = copy_of(1, 4)->slot.off;
	pass();
	r->blk->data[off + 17] ^= 4;
	pass();
	assert_int_equal(nvme()->c.pgscrub_bad, 1);
	assert_int_equal(nvme()->c.pgcrc_fail, 1);
	assert_int_equal(nvme()->c.pgdrop_orphan, LEN - 5);
	assert_non_null(rig_page(r, RIG_FULL, 1, 3));
	assert_null(rig_page(r, RIG_FULL, 1, 4));
	/* on the disk, too */
	rig_die(r, NULL);
	start(0);
	assert_int_equal(nvme()->c.pgrecover, 4);
}

static void page_that_also_lives_above_is_written_again(void **state)
{
	uint64_t off;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	page_writeback(rig_page(r, RIG_FULL, 1, 1), &r->mm->node[RIG_DRAM],
		       NODE_PRIO_WRITEBACK);
	rig_settle(r, 1000);
	off = copy_of(1, 1)->slot.off;
	r->blk->data[off] ^= 1;
	pass();
	assert_int_equal(nvme()->c.pgscrub_bad, 1);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_dirty, 1);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 2), 2);
}

static void error_once_is_forgiven(void **state)
{
	fill(RIG_FULL, 1, 2);
	pass();
	r->blk->err[NODE_READ] = -EIO;
	scrub_again(nvme());
	rig_run(r, 100);
	r->blk->err[NODE_READ] = 0;
	assert_int_equal(nvme()->c.pgscrub_bad, 0);
	assert_non_null(rig_page(r, RIG_FULL, 1, 1));
	r->blk->err[NODE_READ] = -EIO;
	scrub_again(nvme());
	rig_run(r, 100);
	r->blk->err[NODE_READ] = 0;
	assert_int_equal(nvme()->c.pgscrub_bad, 1);
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	rig_check(r);
}

static void nothing_is_read_while_somebody_loads(void **state)
{
	struct rig_answer a;
	uint64_t tag, n;

	fill(RIG_FULL, 1, LEN);
	pass();
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 5000);
	rig_poll(r);
	n = nvme()->c.pgscrub;
	scrub_again(nvme());
	rig_run(r, 100);
	assert_int_equal(r->blk->nr, 1);
	r->blk->hold[NODE_READ] = false;
	assert_true(rig_answer(r, tag, 5000, &a));
	rig_answer_put(r, &a);
	rig_run(r, 200);
	assert_true(nvme()->c.pgscrub > n);
}

static void nothing_is_read_of_a_node_that_is_not_online(void **state)
{
	fill(RIG_FULL, 1, LEN);
	pass();
	r->nvme->state = NODE_DEGRADED;
	scrub_again(nvme());
	r->blk->hold[NODE_READ] = true;
	rig_run(r, 100);
	assert_int_equal(r->blk->nr, 0);
	r->nvme->state = NODE_ONLINE;
	r->blk->hold[NODE_READ] = false;
}

static void rate_is_kept(void **state)
{
	uint64_t n;

	rig_stop(r);
	start(20 * 4096);
	fill(RIG_FULL, 1, LEN);
	n = nvme()->c.pgscrub;
	scrub_again(nvme());
	rig_run(r, 300);
	/* twenty a second */
	assert_in_range(nvme()->c.pgscrub - n, 1, 8);
}

static void page_may_go_while_it_is_read(void **state)
{
	uint32_t i;

	fill(RIG_FULL, 1, LEN);
	pass();
	r->blk->hold[NODE_READ] = true;
	scrub_again(nvme());
	rig_run(r, 50);
	assert_int_equal(r->blk->nr, 1);
	for (i = LEN; i-- > 0;)
		page_drop_all(rig_page(r, RIG_FULL, 1, i));
	rig_check(r);
	assert_int_equal(fake_blk_slots(r->blk), 1);
	r->blk->hold[NODE_READ] = false;
	rig_run(r, 50);
	assert_int_equal(fake_blk_slots(r->blk), 0);
	rig_check(r);
}

static void end_waits_for_what_is_read(void **state)
{
	fill(RIG_FULL, 1, LEN);
	pass();
	r->blk->hold[NODE_READ] = true;
	r->blk->unstarted = true;
	scrub_again(nvme());
	rig_run(r, 50);
	assert_int_equal(r->blk->nr, 1);
	/* teardown ends it */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
		T(every_page_is_read_once_a_pass),
		T(damaged_page_goes_with_what_hangs_on_it),
		T(page_that_also_lives_above_is_written_again),
		T(error_once_is_forgiven),
		T(nothing_is_read_while_somebody_loads),
		T(nothing_is_read_of_a_node_that_is_not_online),
		T(rate_is_kept),
		T(page_may_go_while_it_is_read),
		T(end_waits_for_what_is_read),
#undef T
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
