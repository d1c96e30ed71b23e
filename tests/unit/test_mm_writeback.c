/* SPDX-License-Identifier: Apache-2.0 */
/* How pages go down: order, closure, failure, full nodes. */
#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

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

static int write_down(uint32_t chain, uint32_t i)
{
	return page_writeback(rig_page(r, RIG_FULL, chain, i),
			      &r->mm->node[RIG_DRAM], NODE_PRIO_WRITEBACK);
}

static void a_page_is_written_with_all_its_ancestors(void **state)
{
	uint32_t i;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 10), 10);
	assert_int_equal(write_down(1, 9), 10);
	rig_check(r);
	rig_settle(r, 1000);
	for (i = 0; i < 10; i++) {
		assert_int_equal(rig_state(r, RIG_FULL, 1, i, RIG_NVME),
				 COPY_READY);
		assert_int_equal(rig_state(r, RIG_FULL, 1, i, RIG_DRAM),
				 COPY_READY);
	}
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_dirty, 0);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgdemote, 10);
	rig_check(r);
}

static void the_head_is_written_once(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 5), 5);
	assert_int_equal(write_down(1, 2), 3);
	rig_settle(r, 1000);
	assert_int_equal(write_down(1, 4), 2);
	assert_int_equal(write_down(1, 4), -EALREADY);
	rig_settle(r, 1000);
	assert_int_equal(r->blk->seen[NODE_WRITE], 5);
	rig_check(r);
}

/* Of a chain longer than a batch the upper part goes first. */
static void a_long_chain_goes_down_from_its_head(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 512 * 4096, .nvme_bytes = 1024 * 4096,
	};

	rig_stop(r);
	rig_start(r, &o);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 90), 90);
	assert_int_equal(write_down(1, 89), TIER_BATCH);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 0, RIG_NVME), COPY_WRITING);
	assert_int_equal(rig_state(r, RIG_FULL, 1, TIER_BATCH, RIG_NVME),
			 COPY_NONE);
	rig_check(r);
	rig_settle(r, 1000);
	assert_int_equal(write_down(1, 89), 90 - TIER_BATCH);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 89, RIG_NVME), COPY_READY);
	rig_check(r);
}

static void a_window_page_goes_down_alone(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_WINDOW, 1, 5), 5);
	assert_int_equal(page_writeback(rig_page(r, RIG_WINDOW, 1, 4),
					&r->mm->node[RIG_DRAM],
					NODE_PRIO_WRITEBACK), 1);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_WINDOW, 1, 4, RIG_NVME), COPY_READY);
	assert_int_equal(rig_state(r, RIG_WINDOW, 1, 3, RIG_NVME), COPY_NONE);
	rig_check(r);
}

static void a_write_that_is_over_before_its_parents_waits_for_it(void **state)
{
	struct rng rng;
	unsigned int round;
	uint32_t i;

	rng_seed(&rng, test_seed());
	r->blk->rng = &rng;
	for (round = 0; round < 20; round++) {
		assert_int_equal(rig_publish_chain(r, RIG_FULL, round, 5), 5);
		assert_int_equal(write_down(round, 4), 5);
		while (!list_empty(&r->mm->wbacks)) {
			node_poll(r->nvme, 0);
			for (i = 1; i < 5; i++)
				if (rig_state(r, RIG_FULL, round, i,
					      RIG_NVME) == COPY_READY)
					assert_int_equal(
						rig_state(r, RIG_FULL, round,
							  i - 1, RIG_NVME),
						COPY_READY);
			rig_check(r);
		}
		assert_int_equal(rig_state(r, RIG_FULL, round, 4, RIG_NVME),
				 COPY_READY);
	}
}

static void a_failed_write_takes_the_writes_below_it_with_it(void **state)
{
	uint32_t i;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 6), 6);
	assert_int_equal(write_down(1, 5), 6);
	r->blk->err[NODE_WRITE] = -EIO;
	r->blk->nth = 3;		/* the third of six, and the last */
	rig_settle(r, 1000);
	r->blk->err[NODE_WRITE] = 0;
	for (i = 0; i < 6; i++) {
		assert_int_equal(rig_state(r, RIG_FULL, 1, i, RIG_NVME),
				 i < 2 ? COPY_READY : COPY_NONE);
		assert_int_equal(rig_state(r, RIG_FULL, 1, i, RIG_DRAM),
				 COPY_READY);
	}
	assert_int_equal(fake_blk_slots(r->blk), 2);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgdemote_fail, 2);
	rig_check(r);

	/* not again before somebody used it */
	assert_int_equal(write_down(1, 5), -EIO);
	rig_touch(r, RIG_FULL, 1, 6);
	assert_int_equal(write_down(1, 5), 4);
	rig_settle(r, 1000);
	rig_check(r);
}

/* Every order of completion, every place of failure. */
static void closure_holds_whichever_write_fails(void **state)
{
	unsigned int rounds = test_long() ? 2000 : 200, round;
	struct rng rng;
	uint32_t i;

	rng_seed(&rng, test_seed());
	r->blk->rng = &rng;
	r->blk->err[NODE_WRITE] = -EIO;
	for (round = 0; round < rounds; round++) {
		uint32_t chain = round, n = 1 + rng_below(&rng, 8);

		if (rig_publish_chain(r, RIG_FULL, chain, n) < n)
			break;
		r->blk->nth = 1 + rng_below(&rng, 12);
		write_down(chain, n - 1);
		while (!list_empty(&r->mm->wbacks)) {
			node_poll(r->nvme, 0);
			rig_check(r);
		}
		for (i = 0; i < n; i++)
			assert_int_equal(rig_state(r, RIG_FULL, chain, i,
						   RIG_DRAM), COPY_READY);
		page_drop_all(rig_page(r, RIG_FULL, chain, 0));
		rig_check(r);
	}
	assert_int_equal(round, rounds);
	assert_int_equal(r->sp->nr_pages, 0);
	assert_int_equal(fake_blk_slots(r->blk), 0);
}

static void a_report_while_writing_waits_for_the_write(void **state)
{
	struct ring_key key = { .group = RIG_FULL };

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	r->blk->hold[NODE_WRITE] = true;
	assert_int_equal(write_down(1, 2), 3);
	node_poll(r->nvme, 0);
	rig_key(1, 0, key.key);
	mm_report(r->c, r->sp, &key, KVMM_BAD);
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	assert_null(rig_page(r, RIG_FULL, 1, 2));
	/* frames and slots are the write's until it is over */
	assert_int_equal(fake_blk_slots(r->blk), 3);
	rig_check(r);

	/* the same keys may be published meanwhile */
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	rig_check(r);
	r->blk->hold[NODE_WRITE] = false;
	rig_settle(r, 1000);
	rig_run(r, 30);
	assert_int_equal(fake_blk_slots(r->blk), 0);
	assert_int_equal(r->sp->nr_pages, 3);
	rig_check(r);
}

/* -- writes after the publish ---------------------------------------------------- */

static void crc_start(bool crc)
{
	struct rig_opts o = {
		.dram_bytes = 128 * 4096, .nvme_bytes = 1024 * 4096,
		.crc = crc,
	};

	rig_stop(r);
	rig_start(r, &o);
}

static void a_breach_is_found_out_on_the_way_down(void **state)
{
	uint32_t i;

	crc_start(true);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 5), 5);
	rig_breach(r, RIG_FULL, 1, 2, RIG_DRAM);
	assert_int_equal(write_down(1, 4), 5);
	rig_settle(r, 1000);
	for (i = 0; i < 2; i++)
		assert_int_equal(rig_state(r, RIG_FULL, 1, i, RIG_NVME),
				 COPY_READY);
	/* it, and what hangs on it, is nowhere any more */
	for (i = 2; i < 5; i++)
		assert_null(rig_page(r, RIG_FULL, 1, i));
	assert_int_equal(rig_count(r, RIG_DRAM)->pgbreach, 1);
	rig_run(r, 50);
	assert_int_equal(r->sp->nr_pages, 2);
	assert_int_equal(fake_blk_slots(r->blk), 2);
	rig_check(r);

	/* whoever has the right bytes publishes them */
	for (i = 2; i < 5; i++)
		assert_int_equal(rig_publish(r, RIG_FULL, 1, i), 0);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 5), 5);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgbreach, 1);
	rig_check(r);
}

static void a_breach_of_a_pinned_page_is_a_miss_at_once(void **state)
{
	uint32_t f;

	crc_start(true);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	f = copy_at(rig_page(r, RIG_FULL, 1, 0), RIG_DRAM)->frame;
	rig_pin(r, RIG_FULL, f, 1);
	rig_breach(r, RIG_FULL, 1, 0, RIG_DRAM);
	assert_int_equal(write_down(1, 0), 1);
	rig_settle(r, 1000);
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	assert_int_equal(fake_blk_slots(r->blk), 0);
	rig_check(r);
	/* its frame comes back with the last pin */
	assert_int_equal(r->sp->nr_pages, 1);
	rig_pin(r, RIG_FULL, f, -1);
	rig_run(r, 50);
	assert_int_equal(r->sp->nr_pages, 0);
	rig_check(r);
}

static void a_breach_in_a_late_write_is_found_out_at_its_end(void **state)
{
	crc_start(true);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	r->blk->hold[NODE_WRITE] = true;
	assert_int_equal(write_down(1, 1), 2);
	node_poll(r->nvme, 0);
	rig_breach(r, RIG_FULL, 1, 0, RIG_DRAM);
	r->blk->hold[NODE_WRITE] = false;
	rig_settle(r, 1000);
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	assert_null(rig_page(r, RIG_FULL, 1, 1));
	assert_int_equal(fake_blk_slots(r->blk), 0);
	rig_check(r);
}

static void without_a_checksum_nobody_can_tell(void **state)
{
	crc_start(false);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	rig_breach(r, RIG_FULL, 1, 0, RIG_DRAM);
	assert_int_equal(write_down(1, 1), 2);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 0, RIG_NVME), COPY_READY);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgbreach, 0);
	rig_check(r);
}

/* -- full nodes ---------------------------------------------------------------- */

static void fill_nvme(uint32_t first_chain, uint32_t chains, uint32_t len)
{
	uint32_t c;

	for (c = 0; c < chains; c++) {
		assert_int_equal(rig_publish_chain(r, RIG_FULL,
						   first_chain + c, len), len);
		write_down(first_chain + c, len - 1);
		rig_settle(r, 1000);
	}
}

static void a_full_node_gives_up_leaves_only(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 256 * 4096, .nvme_bytes = 32 * 4096,
	};
	uint32_t c, i, there = 0;

	rig_stop(r);
	rig_start(r, &o);
	fill_nvme(1, 8, 4);
	assert_int_equal(fake_blk_slots(r->blk), 32);
	rig_check(r);
	fill_nvme(100, 2, 4);
	rig_check(r);
	assert_int_equal(rig_state(r, RIG_FULL, 101, 3, RIG_NVME), COPY_READY);
	for (c = 1; c < 9; c++)
		for (i = 0; i < 4; i++)
			there += rig_state(r, RIG_FULL, c, i, RIG_NVME) ==
				 COPY_READY;
	assert_true(there >= 32 - 8 - 8);
	/* all of them still live above: nothing was lost */
	assert_int_equal(rig_count(r, RIG_NVME)->pgdrop_gone, 0);
	assert_true(rig_count(r, RIG_NVME)->pgdrop > 0);
}

static void an_ancestor_is_not_evicted_for_its_child(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 128 * 4096, .nvme_bytes = 4 * 4096,
	};
	uint32_t i;

	rig_stop(r);
	rig_start(r, &o);
	/* a chain longer than the node: what is there is a prefix of it */
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 8), 8);
	for (i = 0; i < 8; i++) {
		write_down(1, i);
		rig_settle(r, 1000);
		rig_check(r);
	}
	for (i = 0; i < 4; i++)
		assert_int_equal(rig_state(r, RIG_FULL, 1, i, RIG_NVME),
				 COPY_READY);
	assert_int_equal(write_down(1, 7), -ENOSPC);
}

static void another_size_gets_a_segment(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 256 * 4096, .nvme_bytes = 64 * 4096,
		.extent_bytes = 16 * 4096,
	};
	struct page *pg;

	rig_stop(r);
	rig_start(r, &o);
	fill_nvme(1, 16, 4);
	assert_int_equal(fake_blk_slots(r->blk), 64);
	assert_int_equal(rig_publish_chain(r, RIG_BIG, 7, 2), 2);
	pg = rig_page(r, RIG_BIG, 7, 1);
	assert_int_equal(page_writeback(pg, &r->mm->node[RIG_DRAM],
					NODE_PRIO_WRITEBACK), 2);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_BIG, 7, 1, RIG_NVME), COPY_READY);
	rig_check(r);
}

/* What hangs on a page of the segment is counted with it, not once for each. */
static void long_chains_give_up_a_segment_too(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 512 * 4096, .nvme_bytes = 320 * 4096,
		.extent_bytes = 16 * 4096,
	};

	rig_stop(r);
	rig_start(r, &o);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 320), 320);
	while (write_down(1, 319) > 0)
		rig_settle(r, 1000);
	assert_int_equal(fake_blk_slots(r->blk), 320);
	assert_int_equal(rig_publish_chain(r, RIG_BIG, 7, 2), 2);
	assert_int_equal(page_writeback(rig_page(r, RIG_BIG, 7, 1),
					&r->mm->node[RIG_DRAM],
					NODE_PRIO_WRITEBACK), 2);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_BIG, 7, 1, RIG_NVME), COPY_READY);
	/* of those that could go it was the one on which least hung */
	assert_int_equal(rig_state(r, RIG_FULL, 1, 47, RIG_NVME), COPY_READY);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 48, RIG_NVME), COPY_NONE);
	rig_check(r);
}

/* A leaf that is being read keeps all that it hangs on. */
static void segments_are_not_searched_for_each_page(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 256 * 4096, .nvme_bytes = 64 * 4096,
		.extent_bytes = 16 * 4096,
	};
	struct mm_node *dram, *nvme;
	struct page *big, *leaf;
	unsigned int i, seen;

	rig_stop(r);
	rig_start(r, &o);
	dram = &r->mm->node[RIG_DRAM];
	nvme = &r->mm->node[RIG_NVME];
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 64), 64);
	while (write_down(1, 63) > 0)
		rig_settle(r, 1000);
	assert_int_equal(fake_blk_slots(r->blk), 64);
	leaf = rig_page(r, RIG_FULL, 1, 63);
	page_copy(leaf, nvme)->refs++;
	assert_int_equal(rig_publish_chain(r, RIG_BIG, 7, 1), 1);
	big = rig_page(r, RIG_BIG, 7, 0);
	assert_int_equal(page_writeback(big, dram, NODE_PRIO_WRITEBACK),
			 -ENOSPC);
	seen = r->blk->nr_victims;
	assert_true(seen > 0);
	for (i = 0; i < 100; i++)
		page_writeback(big, dram, NODE_PRIO_WRITEBACK);
	assert_int_equal(r->blk->nr_victims, seen);
	page_copy(leaf, nvme)->refs--;
	rig_run(r, 50);
	assert_int_equal(page_writeback(big, dram, NODE_PRIO_WRITEBACK), 1);
	rig_settle(r, 1000);
	rig_check(r);
}

/*
 * Where each segment that is looked at has something that stays, what is coldest
 * leaves all the same, bit by bit: there is room in the end.
 */
static void a_segment_is_empty_enough_in_the_end(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 512 * 4096, .nvme_bytes = 256 * 4096,
		.extent_bytes = 16 * 4096,
	};
	struct mm_node *dram, *nvme;
	unsigned int c, i, rounds;
	struct page *big;

	rig_stop(r);
	rig_start(r, &o);
	dram = &r->mm->node[RIG_DRAM];
	nvme = &r->mm->node[RIG_NVME];
	for (c = 0; c < 16; c++)
		assert_int_equal(rig_publish_chain(r, RIG_FULL, c, 16), 16);
	/* a segment has the same page of each chain */
	for (i = 0; i < 16; i++)
		for (c = 0; c < 16; c++) {
			assert_int_equal(write_down(c, i), 1);
			rig_settle(r, 1000);
		}
	assert_int_equal(fake_blk_slots(r->blk), 256);
	for (c = 0; c < 16; c++)
		page_copy(rig_page(r, RIG_FULL, c, 8), nvme)->refs++;
	assert_int_equal(rig_publish_chain(r, RIG_BIG, 7, 1), 1);
	big = rig_page(r, RIG_BIG, 7, 0);
	for (rounds = 0; rounds < 300; rounds++) {
		if (page_writeback(big, dram, NODE_PRIO_WRITEBACK) > 0)
			break;
		rig_run(r, 11);
	}
	assert_true(rounds < 300);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_BIG, 7, 0, RIG_NVME), COPY_READY);
	for (c = 0; c < 16; c++)
		page_copy(rig_page(r, RIG_FULL, c, 8), nvme)->refs--;
	rig_check(r);
}

static void a_stalled_node_does_not_get_all_frames(void **state)
{
	struct mm_pool *p = rig_pool(r, RIG_FULL, RIG_DRAM);
	uint32_t c;

	r->blk->hold[NODE_WRITE] = true;
	for (c = 0; c < 100; c++)
		assert_int_equal(rig_publish_chain(r, RIG_FULL, c, 4), 4);
	assert_true(p->nr_writing > 0);
	assert_true(p->nr_writing <= (p->nr_frames + pool_room(p)) / 4);
	assert_true(rig_count(r, RIG_DRAM)->pgdrop_gone > 0);
	rig_check(r);
	r->blk->hold[NODE_WRITE] = false;
	rig_settle(r, 1000);
	assert_int_equal(p->nr_writing, 0);
	rig_check(r);
}

/* The medium has less space than it promised: the coldest make room for others. */
static void a_medium_without_space_is_made_do_with(void **state)
{
	uint32_t c, slots, i;

	for (c = 1; c <= 8; c++) {
		assert_int_equal(rig_publish_chain(r, RIG_FULL, c, 4), 4);
		assert_int_equal(write_down(c, 3), 4);
		rig_settle(r, 1000);
	}
	slots = fake_blk_slots(r->blk);
	assert_int_equal(slots, 32);
	r->blk->err[NODE_WRITE] = -ENOSPC;
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 50, 1), 1);
	assert_int_equal(write_down(50, 0), 1);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_FULL, 50, 0, RIG_NVME), COPY_NONE);
	assert_int_equal(rig_state(r, RIG_FULL, 50, 0, RIG_DRAM), COPY_READY);
	assert_true(fake_blk_slots(r->blk) < slots);
	rig_check(r);
	/* once: if it does not help, the rest is not given up for it, too */
	slots = fake_blk_slots(r->blk);
	assert_true(slots >= 32 - 4);
	assert_int_equal(write_down(50, 0), 1);
	rig_settle(r, 1000);
	assert_int_equal(fake_blk_slots(r->blk), slots);
	/* what went lives above all the same, and the page goes down later */
	r->blk->err[NODE_WRITE] = 0;
	for (c = 1; c <= 8; c++)
		for (i = 0; i < 4; i++)
			assert_int_equal(rig_state(r, RIG_FULL, c, i, RIG_DRAM),
					 COPY_READY);
	assert_int_equal(write_down(50, 0), 1);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_FULL, 50, 0, RIG_NVME), COPY_READY);
	rig_check(r);
}

static void nothing_is_written_that_the_node_refuses(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	r->blk->unwritable = true;
	assert_int_equal(write_down(1, 2), -EAGAIN);
	r->blk->unwritable = false;
	r->blk->refuse[NODE_WRITE] = -EROFS;
	assert_int_equal(write_down(1, 2), -EROFS);
	assert_int_equal(fake_blk_slots(r->blk), 0);
	rig_check(r);
	r->blk->refuse[NODE_WRITE] = 0;
	assert_int_equal(write_down(1, 2), 3);
	rig_settle(r, 1000);
	rig_check(r);
}

static void nothing_is_written_while_memory_is_empty(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 20), 20);
	rig_run(r, 30);
	assert_int_equal(r->blk->seen[NODE_WRITE], 0);
}

static void a_share_of_a_full_pool_is_kept_clean(void **state)
{
	struct mm_pool *p = rig_pool(r, RIG_FULL, RIG_DRAM);
	uint32_t c;

	for (c = 0; c < 30; c++)
		if (rig_publish_chain(r, RIG_FULL, c, 4) < 4)
			break;
	rig_run(r, 100);
	rig_settle(r, 1000);
	assert_true(p->nr_free + pool_room(p) + p->nr_pages - p->nr_dirty >=
		    (p->nr_frames + pool_room(p)) / 8);
	assert_true(rig_count(r, RIG_DRAM)->pgdemote > 0);
	rig_check(r);
}

static void the_end_takes_back_what_was_not_started(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 10), 10);
	r->blk->hold[NODE_WRITE] = true;
	r->blk->unstarted = true;
	assert_int_equal(write_down(1, 9), 10);
	/* teardown must not wait for them */
}

int main(void)
{
#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(a_page_is_written_with_all_its_ancestors),
		T(the_head_is_written_once),
		T(a_long_chain_goes_down_from_its_head),
		T(a_window_page_goes_down_alone),
		T(a_write_that_is_over_before_its_parents_waits_for_it),
		T(a_failed_write_takes_the_writes_below_it_with_it),
		T(closure_holds_whichever_write_fails),
		T(a_report_while_writing_waits_for_the_write),
		T(a_breach_is_found_out_on_the_way_down),
		T(a_breach_of_a_pinned_page_is_a_miss_at_once),
		T(a_breach_in_a_late_write_is_found_out_at_its_end),
		T(without_a_checksum_nobody_can_tell),
		T(a_full_node_gives_up_leaves_only),
		T(an_ancestor_is_not_evicted_for_its_child),
		T(another_size_gets_a_segment),
		T(long_chains_give_up_a_segment_too),
		T(segments_are_not_searched_for_each_page),
		T(a_segment_is_empty_enough_in_the_end),
		T(a_stalled_node_does_not_get_all_frames),
		T(a_medium_without_space_is_made_do_with),
		T(nothing_is_written_that_the_node_refuses),
		T(nothing_is_written_while_memory_is_empty),
		T(a_share_of_a_full_pool_is_kept_clean),
		T(the_end_takes_back_what_was_not_started),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
