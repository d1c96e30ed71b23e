/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames in parts: a gang of host memory beside a plain node and a block node.
 * Pages are striped and mirrored; the rig checks them in order, byte for byte.
 */
#include <stdlib.h>

#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

#define GANG	4
#define PAGE	16384u
/* two quarters and one of stripes, and a mirror: what a rank has of a page */
#define PART	(3 * PAGE / 4 / GANG + PAGE / 4)

static struct rig rig;
static struct rig *const r = &rig;

static void start(const struct rig_opts *more)
{
	struct rig_opts o = more ? *more : (struct rig_opts){ .crc = false };

	o.gang = GANG;
	o.page_bytes = PAGE;
	o.big_bytes = 2 * PAGE;
	if (!o.dram_bytes)
		o.dram_bytes = 128 * GANG * 8192;
	if (!o.nvme_bytes)
		o.nvme_bytes = 1024 * PAGE;
	o.extent_bytes = 8 * GANG * 8192;
	rig_start(r, &o);
}

static int setup(void **state)
{
	start(NULL);
	return 0;
}

static int teardown(void **state)
{
	rig_stop(r);
	return 0;
}

static struct mm_pool *pool(void)
{
	return rig_pool(r, RIG_FULL, RIG_DRAM);
}

static int write_down(uint32_t chain, uint32_t i)
{
	return page_writeback(rig_page(r, RIG_FULL, chain, i),
			      &r->mm->node[RIG_DRAM], NODE_PRIO_WRITEBACK);
}

/* All pages of a chain are in memory no more. */
static void lower(uint32_t chain, uint32_t n)
{
	uint32_t i;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, chain, n), n);
	rig_push_down(r, RIG_FULL);
	for (i = 0; i < n; i++) {
		assert_int_equal(rig_state(r, RIG_FULL, chain, i, RIG_DRAM),
				 COPY_NONE);
		assert_int_equal(rig_state(r, RIG_FULL, chain, i, RIG_NVME),
				 COPY_READY);
	}
}

/* -- geometry ------------------------------------------------------------------ */

static void an_extent_has_the_ranks_parts_one_after_the_other(void **state)
{
	const struct mm_pool *p = pool();
	uint8_t *base = p->extent[1].ext->addr;
	uint32_t f = p->per_extent;

	assert_int_equal(p->parts, GANG);
	assert_int_equal(p->shape->part_bytes, PART);
	assert_int_equal(p->stride, round_up(PART, 4096));
	assert_int_equal(p->table->stride, p->stride);
	assert_int_equal(p->table->extent_bytes, p->per_extent * p->stride);
	assert_int_equal(p->extent[1].ext->bytes,
			 GANG * p->per_extent * p->stride);
	assert_ptr_equal(frame_part(p, f, 0), base);
	assert_ptr_equal(frame_part(p, f + 1, 0), base + p->stride);
	assert_ptr_equal(frame_part(p, f, 3),
			 base + 3 * p->table->extent_bytes);
}

static void bytes_are_counted_with_all_parts(void **state)
{
	struct mm_node_stat st;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	mm_node_stat(r->mm, RIG_DRAM, &st);
	assert_int_equal(st.gang, GANG);
	assert_int_equal(st.bytes_extents, r->host->used);
	assert_true(st.bytes_extents >= (uint64_t)pool()->nr_frames * GANG *
					pool()->stride);
	assert_int_equal(st.bytes_pages, 3 * PAGE);
	assert_true(atomic_load(&pool()->table->nr_limit) * (uint64_t)GANG *
		    pool()->stride <= r->host->capacity);
	rig_check(r);
}

/* -- down and up ------------------------------------------------------------------ */

static void pages_go_down_in_order_and_come_back_in_parts(void **state)
{
	lower(1, 10);
	/* a mirror is stored once */
	assert_int_equal(r->nvme->used, 10 * PAGE);
	assert_int_equal(r->mm->node[RIG_NVME].bytes_pages, 10 * PAGE);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 10), 10);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgload, 10);
	assert_int_equal(rig_count(r, RIG_DRAM)->bytes_in, 10 * PAGE);
	rig_check(r);
}

/* What the block node has is what any node has: the page in order. */
static void a_plain_node_reads_what_a_gang_wrote(void **state)
{
	struct rig_opts o = { .far_bytes = 128 * PAGE };
	struct ring_sqe sqe = { .op = RING_FETCH, .n = 4, .tag = 77 };
	struct ring_key key[4] = { 0 };
	struct rig_answer a;
	uint32_t i, at;

	rig_stop(r);
	start(&o);
	lower(1, 4);
	for (i = 0; i < 4; i++)
		rig_key(1, i, key[i].key);
	mm_fetch(r->w_far, &sqe, key);
	assert_true(rig_answer(r, 77, 5000, &a));
	for (i = 0; i < 4; i++) {
		assert_int_equal(a.res[i].result, 0);
		at = a.res[i].frame;
		assert_true(rig_bytes_at(r, RIG_FAR, RIG_FULL, at, 1, i));
	}
	rig_answer_put(r, &a);
	rig_check(r);
}

static void a_breach_of_one_part_is_a_breach(void **state)
{
	struct rig_opts o = { .crc = true };

	rig_stop(r);
	start(&o);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	rig_breach(r, RIG_FULL, 1, 1, RIG_DRAM);
	assert_int_equal(write_down(1, 2), 3);
	rig_settle(r, 1000);
	assert_non_null(rig_page(r, RIG_FULL, 1, 0));
	assert_null(rig_page(r, RIG_FULL, 1, 1));
	assert_int_equal(rig_count(r, RIG_DRAM)->pgbreach, 1);
	rig_check(r);
}

static void a_wrong_checksum_at_the_publish_is_refused(void **state)
{
	struct rig_opts o = { .crc = true };

	rig_stop(r);
	start(&o);
	assert_int_equal(rig_publish(r, RIG_FULL, 1, 0), 0);
	r->o.wrong_crc = true;
	assert_int_equal(rig_publish(r, RIG_FULL, 2, 0), -EBADMSG);
	rig_check(r);
}

/* -- between nodes of memory -------------------------------------------------------- */

static void pages_are_copied_from_a_plain_node_into_parts(void **state)
{
	struct rig_opts o = { .far_bytes = 128 * PAGE, .crc = true };
	uint32_t i;

	rig_stop(r);
	start(&o);
	for (i = 0; i < 8; i++)
		assert_int_equal(rig_publish_far(r, 1, i), 0);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 8), 8);
	assert_int_equal(r->blk->seen[NODE_READ], 0);
	assert_int_equal(mm_stage_bytes(r->mm), 0);
	rig_check(r);
	rig_breach(r, RIG_FULL, 1, 7, RIG_FAR);
	rig_push_down(r, RIG_FULL);
	rig_check(r);
}

static void pages_are_copied_from_parts_to_a_plain_node(void **state)
{
	struct rig_opts o = { .far_bytes = 128 * PAGE };
	struct ring_sqe sqe = { .op = RING_FETCH, .n = 1, .tag = 77 };
	struct ring_key key = { 0 };
	struct rig_answer a;

	rig_stop(r);
	start(&o);
	assert_int_equal(rig_publish(r, RIG_FULL, 1, 0), 0);
	rig_key(1, 0, key.key);
	mm_fetch(r->w_far, &sqe, &key);
	assert_true(rig_answer(r, 77, 1000, &a));
	assert_int_equal(a.res[0].result, 0);
	assert_true(rig_bytes_at(r, RIG_FAR, RIG_FULL, a.res[0].frame, 1, 0));
	rig_answer_put(r, &a);
	rig_check(r);
}

/* -- trouble ---------------------------------------------------------------------- */

static void all_parts_come_or_none(void **state)
{
	struct rig_answer a;

	lower(1, 4);
	fake_blk_flip(r->blk);
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 4, 0), 1000,
			       &a));
	assert_int_equal(a.res[0].result, -ENOENT);
	rig_answer_put(r, &a);
	rig_settle(r, 1000);
	assert_int_equal(pool()->nr_loading, 0);
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	rig_check(r);
}

static void a_late_read_keeps_frame_and_buffer_until_it_is_over(void **state)
{
	struct rig_answer a;
	uint64_t bytes;

	lower(1, 3);
	r->blk->hold[NODE_READ] = true;
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 3, 20), 1000,
			       &a));
	assert_int_equal(a.res[2].result, -ENOENT);
	rig_answer_put(r, &a);
	rig_run(r, 50);
	assert_int_equal(r->mm->stage.out[NODE_READ], 3 * PAGE);
	assert_int_equal(pool()->nr_loading, 3);
	rig_check(r);
	r->blk->hold[NODE_READ] = false;
	rig_settle(r, 1000);
	assert_int_equal(r->mm->stage.out[NODE_READ], 0);
	/* late and good: they are there now */
	assert_int_equal(rig_count(r, RIG_DRAM)->pgload_late, 3);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 3), 3);
	bytes = mm_stage_bytes(r->mm);
	assert_true(bytes && bytes <= 16 * PAGE);
	rig_run(r, 1200);
	assert_int_equal(mm_stage_bytes(r->mm), 0);
	rig_check(r);
}

static void a_cancelled_read_that_was_not_started_leaves_nothing(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	lower(1, 3);
	r->blk->hold[NODE_READ] = true;
	r->blk->unstarted = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 3, 0);
	mm_cancel(r->c, tag);
	assert_true(rig_answer(r, tag, 0, &a));
	rig_settle(r, 1000);
	assert_int_equal(r->mm->stage.out[NODE_READ], 0);
	assert_int_equal(pool()->nr_loading, 0);
	rig_check(r);
}

/* A publish does not wait for a read that nobody wants; its frame is its own. */
static void a_publish_overtakes_a_late_read(void **state)
{
	struct rig_answer a;

	lower(1, 1);
	r->blk->hold[NODE_READ] = true;
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 1, 20), 1000,
			       &a));
	rig_answer_put(r, &a);
	rig_run(r, 30);
	assert_int_equal(rig_publish(r, RIG_FULL, 1, 0), 0);
	rig_check(r);
	r->blk->hold[NODE_READ] = false;
	rig_settle(r, 1000);
	assert_int_equal(pool()->nr_loading, 0);
	assert_int_equal(r->mm->stage.out[NODE_READ], 0);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 1), 1);
	rig_check(r);
}

static void what_the_node_refuses_after_the_gathering_is_a_failed_write(
								void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	r->blk->refuse[NODE_WRITE] = -EAGAIN;
	assert_int_equal(write_down(1, 2), 3);
	rig_check(r);
	rig_settle(r, 1000);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgdemote_fail, 3);
	assert_int_equal(fake_blk_slots(r->blk), 0);
	assert_int_equal(pool()->nr_writing, 0);
	assert_int_equal(r->mm->stage.out[NODE_WRITE], 0);
	rig_check(r);
	r->blk->refuse[NODE_WRITE] = 0;
	assert_int_equal(write_down(1, 2), 3);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 2, RIG_NVME), COPY_READY);
	rig_check(r);
}

/* The pages are as dirty as before: gathering them again at once is for nothing. */
static void what_the_node_refuses_is_not_gathered_over_and_over(void **state)
{
	const struct mm_counters *ct = rig_count(r, RIG_DRAM);
	uint64_t before, t0, ms;

	r->blk->refuse[NODE_WRITE] = -EAGAIN;
	rig_publish_chain(r, RIG_FULL, 1, 60);
	rig_publish_chain(r, RIG_FULL, 2, 60);
	before = ct->pgdemote_fail;
	t0 = now_ns();
	rig_run(r, 100);
	ms = (now_ns() - t0) / NSEC_PER_MSEC;
	print_message("%llu writes refused in %llu ms\n", (unsigned long long)
		      (ct->pgdemote_fail - before), (unsigned long long)ms);
	assert_true(ct->pgdemote_fail > before);
	/* a pool's share of 32 or so in 10 ms */
	assert_true(ct->pgdemote_fail - before < (ms / 10 + 2) * 64);
	r->blk->refuse[NODE_WRITE] = 0;
	rig_run(r, 50);
	assert_true(ct->pgdemote > 0);
	rig_settle(r, 1000);
	rig_check(r);
}

/* A page went while it was gathered: the node was never asked. */
static void what_went_while_it_was_gathered_was_not_refused(void **state)
{
	struct ring_key key = { .group = RIG_FULL };

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	assert_int_equal(write_down(1, 0), 1);
	rig_key(1, 0, key.key);
	mm_report(r->c, r->sp, &key, KVMM_BAD);
	rig_settle(r, 1000);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgdemote_fail, 1);
	assert_int_equal(r->mm->node[RIG_NVME].wb_after_ns, 0);
}

/* It hears of a refusal at once, and gathers nothing for it. */
static void a_plain_pool_writes_while_a_gang_pauses(void **state)
{
	struct rig_opts o = { .far_bytes = 128 * PAGE };
	struct reclaim_control rc = { .want = 4, .max_scan = 64 };

	rig_stop(r);
	start(&o);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	assert_int_equal(rig_publish_far(r, 2, 0), 0);
	r->mm->node[RIG_NVME].wb_after_ns = now_ns() + 60 * NSEC_PER_SEC;
	pool_reclaim(pool(), &rc);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 0, RIG_NVME), COPY_NONE);
	pool_reclaim(rig_pool(r, RIG_FULL, RIG_FAR), &rc);
	assert_int_equal(rig_state(r, RIG_FULL, 2, 0, RIG_NVME), COPY_WRITING);
	rig_settle(r, 1000);
	rig_check(r);
}

/* They are dirty, and can go soon: a load waits for that. */
static void what_pauses_is_not_taken_for_in_use(void **state)
{
	struct reclaim_control rc = { .want = 4, .max_scan = 64 };

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 2, 1), 1);
	r->mm->node[RIG_NVME].wb_after_ns = now_ns() + 60 * NSEC_PER_SEC;
	pool_reclaim(pool(), &rc);
	assert_int_equal(rc.freed, 0);
	assert_int_equal(rc.writing, 2);
}

static void who_waits_for_memory_for_a_buffer_tries_again(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	lower(1, 1);
	/* as if there was none: and nobody brings one back */
	r->mm->stage.out[NODE_READ] = UINT64_C(1) << 30;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 5000);
	assert_int_equal(list_count(&r->mm->stage.wait), 1);
	r->mm->stage.out[NODE_READ] = 0;
	assert_true(rig_answer(r, tag, 2000, &a));
	assert_int_equal(a.res[0].result, 0);
	rig_answer_put(r, &a);
	rig_check(r);
}

/* What is refused for good is forgotten as with a plain pool, only later. */
static void a_gang_whose_writes_are_refused_forgets(void **state)
{
	uint32_t c;

	r->blk->refuse[NODE_WRITE] = -EAGAIN;
	for (c = 1; c <= 300; c++)
		assert_int_equal(rig_publish(r, RIG_FULL, c, 0), 0);
	assert_true(rig_count(r, RIG_DRAM)->pgdrop_gone > 100);
	rig_check(r);
}

static void a_report_while_gathering_ends_the_write(void **state)
{
	struct ring_key key = { .group = RIG_FULL };

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	assert_int_equal(write_down(1, 2), 3);
	rig_key(1, 0, key.key);
	mm_report(r->c, r->sp, &key, KVMM_BAD);
	rig_check(r);
	rig_settle(r, 1000);
	rig_run(r, 30);
	assert_int_equal(fake_blk_slots(r->blk), 0);
	assert_int_equal(r->sp->nr_pages, 0);
	assert_int_equal(r->blk->seen[NODE_WRITE], 0);
	rig_check(r);
}

static void the_end_waits_for_what_is_gathered_and_scattered(void **state)
{
	lower(1, 4);
	rig_fetch(r, RIG_FULL, 1, 0, 4, 0);
	node_poll(r->nvme, 0);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 2, 3), 3);
	write_down(2, 2);
	/* teardown: nothing that workers use may be freed under them */
}

/* -- buffers ---------------------------------------------------------------------- */

#define BIG_PAGE	(8u << 20)

/* More pages at once than there may be buffers: the rest waits its turn. */
static void loads_wait_for_buffers_and_come_in_time(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 32 * 4 * (3 * BIG_PAGE / 4 / GANG + BIG_PAGE / 4),
		.nvme_bytes = 64 * (uint64_t)BIG_PAGE,
		.gang = GANG, .page_bytes = BIG_PAGE, .big_bytes = PAGE,
		.extent_bytes = 4 * 4 * (3 * BIG_PAGE / 4 / GANG +
					 BIG_PAGE / 4),
		.fetch_ns = 20 * NSEC_PER_SEC,
	};
	struct rig_answer a;
	uint64_t tag;
	uint32_t i;

	rig_stop(r);
	rig_start(r, &o);
	lower(1, 12);
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 12, 0);
	rig_run(r, 20);
	assert_int_equal(r->mm->stage.out[NODE_READ], 8 * BIG_PAGE);
	assert_int_equal(list_count(&r->mm->stage.wait), 4);
	assert_int_equal(rig_count(r, RIG_DRAM)->stage_wait, 4);
	rig_check(r);
	/* one write goes on, no more while loads wait */
	r->blk->hold[NODE_WRITE] = true;
	assert_int_equal(rig_publish(r, RIG_FULL, 2, 0), 0);
	assert_int_equal(rig_publish(r, RIG_FULL, 3, 0), 0);
	assert_int_equal(write_down(2, 0), 1);
	assert_int_equal(write_down(3, 0), -EBUSY);
	rig_check(r);
	r->blk->hold[NODE_WRITE] = false;
	r->blk->hold[NODE_READ] = false;
	assert_true(rig_answer(r, tag, 20000, &a));
	for (i = 0; i < 12; i++) {
		assert_int_equal(a.res[i].result, 0);
		assert_true(rig_bytes_ok(r, RIG_FULL, a.res[i].frame, 1, i));
	}
	rig_answer_put(r, &a);
	assert_true(list_empty(&r->mm->stage.wait));
	rig_check(r);
}

/* Until the node holds as many reads as there are buffers, and the rest waits. */
static void buffers_full(void)
{
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);

	while (r->blk->nr < 8 && !deadline_past(deadline))
		rig_run(r, 10);
	assert_int_equal(r->blk->nr, 8);
}

static void who_waits_for_a_buffer_may_leave(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 32 * 4 * (3 * BIG_PAGE / 4 / GANG + BIG_PAGE / 4),
		.nvme_bytes = 64 * (uint64_t)BIG_PAGE,
		.gang = GANG, .page_bytes = BIG_PAGE, .big_bytes = PAGE,
		.extent_bytes = 4 * 4 * (3 * BIG_PAGE / 4 / GANG +
					 BIG_PAGE / 4),
	};
	struct rig_answer a;
	uint64_t tag;

	rig_stop(r);
	rig_start(r, &o);
	lower(1, 12);
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 12, 0);
	buffers_full();
	assert_int_equal(pool()->nr_loading, 12);
	mm_cancel(r->c, tag);
	assert_true(rig_answer(r, tag, 0, &a));
	assert_int_equal(a.result, -ECANCELED);
	assert_true(list_empty(&r->mm->stage.wait));
	assert_int_equal(pool()->nr_loading, 8);
	rig_check(r);
	r->blk->hold[NODE_READ] = false;
	rig_settle(r, 5000);
	assert_int_equal(pool()->nr_loading, 0);
	assert_int_equal(r->mm->stage.out[NODE_READ], 0);
	rig_check(r);
}

/* A node that fails at once: all that waits ends, one after the other. */
static void a_failing_node_does_not_leave_waiters_behind(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 32 * 4 * (3 * BIG_PAGE / 4 / GANG + BIG_PAGE / 4),
		.nvme_bytes = 64 * (uint64_t)BIG_PAGE,
		.gang = GANG, .page_bytes = BIG_PAGE, .big_bytes = PAGE,
		.extent_bytes = 4 * 4 * (3 * BIG_PAGE / 4 / GANG +
					 BIG_PAGE / 4),
	};
	struct rig_answer a;
	uint64_t tag;
	uint32_t i;

	rig_stop(r);
	rig_start(r, &o);
	lower(1, 12);
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 12, 0);
	buffers_full();
	r->blk->refuse[NODE_READ] = -EIO;
	r->blk->hold[NODE_READ] = false;
	assert_true(rig_answer(r, tag, 5000, &a));
	for (i = 0; i < 12; i++)
		assert_int_equal(a.res[i].result, i < 8 ? 0 : -ENOENT);
	rig_answer_put(r, &a);
	assert_true(list_empty(&r->mm->stage.wait));
	assert_int_equal(pool()->nr_loading, 0);
	rig_check(r);
}

/* -- anything, in any order ---------------------------------------------------------- */

#define CHAINS	8
#define DEPTH	12
#define IN_FLIGHT 8

static struct rng rng;
static struct {
	uint64_t tag;
	uint32_t chain, first;
} flying[IN_FLIGHT];
static unsigned int nr_flying;
static uint32_t came;

static void do_fetch(void)
{
	uint32_t chain = rng_below(&rng, CHAINS), first = rng_below(&rng, DEPTH);
	uint32_t n = 1 + rng_below(&rng, DEPTH - first);

	if (nr_flying == IN_FLIGHT)
		return;
	flying[nr_flying].chain = chain;
	flying[nr_flying].first = first;
	flying[nr_flying++].tag = rig_fetch(r, RIG_FULL, chain, first, n,
					    1 + rng_below(&rng, 40));
}

/* Whatever is answered must be right, all parts of it. */
static void do_answers(unsigned int ms)
{
	struct rig_answer a;
	unsigned int i;
	uint32_t j;

	for (i = 0; i < nr_flying; i++) {
		if (!rig_answer(r, flying[i].tag, ms, &a))
			continue;
		for (j = 0; j < a.n; j++) {
			if (a.res[j].result)
				continue;
			assert_true(rig_bytes_ok(r, RIG_FULL, a.res[j].frame,
						 flying[i].chain,
						 flying[i].first + j));
			came++;
		}
		rig_answer_put(r, &a);
		flying[i--] = flying[--nr_flying];
	}
}

static void do_publish(void)
{
	uint32_t chain = rng_below(&rng, CHAINS), i;

	for (i = 0; i < DEPTH; i++) {
		enum copy_state st = rig_state(r, RIG_FULL, chain, i, RIG_DRAM);

		if (st == COPY_LOADING)
			return;		/* it would wait for that */
		if (st == COPY_NONE)
			break;
	}
	if (i < DEPTH)
		rig_publish(r, RIG_FULL, chain, i);
}

static void do_reclaim(void)
{
	struct reclaim_control rc = {
		.want = 1 + rng_below(&rng, 32), .max_scan = 256,
		.deadline_ns = deadline_in(NSEC_PER_SEC),
	};

	pool_reclaim(pool(), &rc);
}

static void no_trouble(void)
{
	memset(r->blk->hold, 0, sizeof(r->blk->hold));
	memset(r->blk->err, 0, sizeof(r->blk->err));
	memset(r->blk->refuse, 0, sizeof(r->blk->refuse));
}

static void do_trouble(void)
{
	struct ring_key key = { .group = RIG_FULL };

	switch (rng_below(&rng, 8)) {
	case 0:
		r->blk->hold[NODE_READ] ^= true;
		break;
	case 1:
		r->blk->hold[NODE_WRITE] ^= true;
		break;
	case 2:
		r->blk->unstarted ^= true;
		break;
	case 3:
		r->blk->refuse[rng_below(&rng, 2)] ^= -EAGAIN;
		break;
	case 4:
		r->blk->err[rng_below(&rng, 2)] ^= -EIO;
		r->blk->nth = 1 + rng_below(&rng, 6);
		break;
	case 5:
		rig_key(rng_below(&rng, CHAINS), rng_below(&rng, DEPTH),
			key.key);
		mm_report(r->c, r->sp, &key, KVMM_BAD);
		break;
	case 6:
		if (nr_flying)
			mm_cancel(r->c, flying[0].tag);
		break;
	default:
		rig_run(r, 3);
	}
}

static void laws_and_bytes_hold_under_random_operations(void **state)
{
	struct rig_opts o = { .dram_bytes = 64 * GANG * 8192, .crc = true };
	unsigned int rounds = test_long() ? 20000 : 1500, i;

	rig_stop(r);
	start(&o);
	rng_seed(&rng, test_seed());
	r->blk->rng = &rng;
	nr_flying = came = 0;
	for (i = 0; i < rounds; i++) {
		switch (rng_below(&rng, 8)) {
		case 0:
		case 1:
			do_publish();
			break;
		case 2:
		case 3:
			do_fetch();
			break;
		case 4:
			do_reclaim();
			break;
		case 5:
			if (!rng_below(&rng, 4))
				do_trouble();
			else if (!rng_below(&rng, 4))
				no_trouble();
			break;
		default:
			rig_poll(r);
		}
		do_answers(0);
		rig_check(r);
	}
	no_trouble();
	do_answers(5000);
	assert_int_equal(nr_flying, 0);
	rig_settle(r, 5000);
	assert_int_equal(pool()->nr_loading, 0);
	assert_int_equal(r->mm->stage.out[NODE_READ], 0);
	assert_int_equal(r->mm->stage.out[NODE_WRITE], 0);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgbreach, 0);
	rig_check(r);
	/* and something happened */
	print_message("came %u, loaded %llu, demoted %llu\n", came,
		      (unsigned long long)rig_count(r, RIG_DRAM)->pgload,
		      (unsigned long long)rig_count(r, RIG_DRAM)->pgdemote);
	assert_true(came > rounds / 20);
	assert_true(rig_count(r, RIG_DRAM)->pgload > rounds / 100);
	assert_true(rig_count(r, RIG_DRAM)->pgdemote > rounds / 100);
}

/* -- worlds ----------------------------------------------------------------------- */

static struct mm_space *attach(struct mm_client *c, uint16_t world,
			       const char *model)
{
	struct kvmm_seg seg = {
		.bytes = PAGE, .align = 64, .what = KVMM_SEG_KV,
		.shard = KVMM_STRIPE,
	};
	struct kvmm_class cls = {
		.name = "kv", .page_bytes = PAGE, .nsegs = 1, .segs = &seg,
	};
	struct kvmm_group group = {
		.rule = KVMM_FULL, .block_tokens = 16,
	};
	struct kvmm_desc d = {
		.size = sizeof(d), .model = model, .world = world,
		.nclasses = 1, .ngroups = 1, .classes = &cls, .groups = &group,
	};
	static uint8_t buf[DESC_MAX_BYTES];
	struct mm_space *sp;
	struct errmsg e;

	if (mm_attach(c, buf, desc_encode(&d, buf, &e), 0, &sp, &e))
		fail_msg("%s", e.text);
	return sp;
}

static void a_gang_serves_spaces_of_its_world_only(void **state)
{
	struct mm_space *sp = attach(r->c, 2, "other");
	struct errmsg e = { "" };
	struct mm_win *w;

	assert_null(sp->pool[0][RIG_DRAM]);
	assert_non_null(sp->pool[0][RIG_NVME]);
	assert_int_equal(mm_win_open(r->c, sp, 0, RIG_DRAM, KVMM_RW, &w, &e),
			 -EINVAL);
	assert_string_equal(e.text,
		"node dram0 is a gang of 4, the space is for a world of 2");
	assert_int_equal(mm_reserve(r->c, sp, 0, RIG_DRAM, 1, &e), -EINVAL);
	rig_check(r);
	mm_detach(r->c, sp);
	rig_run(r, 20);
	rig_check(r);
}

static struct mm_client *client(struct shm *ledger, uint32_t world)
{
	struct mm_client_opts co = {
		.tenant = "default", .name = "other", .rights = KVMM_RW,
		.pid = 2, .ledger = ledger, .arg = r,
	};
	struct mm_client *c;
	struct errmsg e;

	assert_int_equal(shm_create(ledger, "ledger", sizeof(struct ledger), 0),
			 0);
	assert_int_equal(mm_client_create(r->mm, &co, &c), 0);
	if (world)
		assert_int_equal(mm_client_join(c, (const uint8_t[16]){ 2 }, 0,
						world, 0, &e), 0);
	return c;
}

static void leave(struct mm_client *c, struct shm *ledger)
{
	mm_client_disconnect(c);
	mm_client_exit(c, NULL, NULL);
	shm_fini(ledger);
}

/* What it takes at once it takes where all engines can use it. */
static void the_first_extent_is_on_a_plain_node(void **state)
{
	struct rig_opts o = { .far_bytes = 128 * PAGE };
	struct mm_space *sp;

	rig_stop(r);
	start(&o);
	sp = attach(r->c, GANG, "other");
	assert_int_equal(sp->pool[0][RIG_DRAM]->extents_coming, 0);
	assert_int_equal(sp->pool[0][RIG_FAR]->extents_coming, 1);
	rig_run(r, 20);
	rig_check(r);
}

static void a_gang_is_for_engines_of_its_world_only(void **state)
{
	struct shm ledger = SHM_INIT;
	struct errmsg e = { "" };
	struct mm_client *c;
	struct mm_space *sp;
	struct mm_win *w;

	c = client(&ledger, 0);
	sp = attach(c, GANG, "mine");
	assert_int_equal(mm_win_open(c, sp, 0, RIG_DRAM, KVMM_RW, &w, &e),
			 -EINVAL);
	assert_string_equal(e.text,
		"node dram0 is a gang of 4: join an engine of that world first");
	leave(c, &ledger);
	ledger = (struct shm)SHM_INIT;
	c = client(&ledger, 2);
	sp = attach(c, GANG, "mine");
	assert_int_equal(mm_win_open(c, sp, 0, RIG_DRAM, KVMM_RW, &w, &e),
			 -EINVAL);
	assert_string_equal(e.text,
		"node dram0 is a gang of 4, the engine is of world 2");
	leave(c, &ledger);
	rig_check(r);
}

static void each_rank_is_told_its_own_part(void **state)
{
	struct mm_extent_change ch[16];
	struct mm_client *c[3];
	struct shm ledger[3];
	struct errmsg e;
	struct mm_win *w;
	unsigned int i;
	uint64_t seq;

	for (i = 0; i < 3; i++) {
		ledger[i] = (struct shm)SHM_INIT;
		c[i] = client(&ledger[i], 0);
		/* the last one only leads */
		if (mm_client_join(c[i], (const uint8_t[16]){ 1 }, 1 + i, GANG,
				   i == 2 ? KVMM_NO_STEP : 0, &e))
			fail_msg("%s", e.text);
		mm_attach(c[i], r->sp->desc_bytes, r->sp->desc_len, 0,
			  &r->sp, &e);
		if (mm_win_open(c[i], r->sp, 0, RIG_DRAM, KVMM_RW, &w, &e))
			fail_msg("%s", e.text);
		assert_int_equal(mm_win_blind(w), i == 2);
		assert_int_equal(mm_win_part(w), i == 2 ? 0 :
				 (1 + i) * pool_part_bytes(pool()));
		assert_true(mm_win_sync(w, 0, 0, ch, 16, &seq) >= 1);
		assert_true(ch[0].up);
		assert_int_equal(ch[0].fd >= 0, i != 2);
	}
	rig_check(r);
	for (i = 0; i < 3; i++)
		mm_client_disconnect(c[i]);
	for (i = 0; i < 3; i++)
		mm_client_exit(c[i], NULL, NULL);
	rig_client_exit(r);
	for (i = 0; i < 3; i++)
		shm_fini(&ledger[i]);
}

static void nothing_of_a_dead_engine_is_left_in_any_part(void **state)
{
	struct mm_pool *p = pool();
	uint32_t f = rig_frame(r, RIG_FULL, 100), rank, i;

	assert_true(f);
	/* the space lives on by a page */
	assert_int_equal(rig_publish(r, RIG_FULL, 1, 0), 0);
	for (rank = 0; rank < GANG; rank++)
		memset(frame_part(p, f, rank), 0xee, p->stride);
	rig_client_exit(r);
	rig_settle(r, 1000);
	assert_int_equal(p->nr_quarantine, 0);
	for (rank = 0; rank < GANG; rank++) {
		const uint8_t *at = frame_part(p, f, rank);

		for (i = 0; i < p->stride; i++)
			assert_int_equal(at[i], 0);
	}
	rig_check(r);
}

static void a_fork_copies_every_part(void **state)
{
	static uint8_t page[PAGE], back[PAGE];
	struct mm_pool *p = pool();
	struct mm_win *w = r->w[0];
	struct ring_fork f = { .win = w->no };
	struct ring_sqe sqe = {
		.op = RING_FORK, .n = 1, .tag = 77,
		.space = (uint16_t)mm_space_ix(p->space),
	};
	struct image flat = image_flat(page, PAGE), im;
	struct rig_answer a;
	uint32_t i;

	f.from = rig_frame(r, RIG_FULL, 2000);
	f.to = rig_frame(r, RIG_FULL, 2000);
	assert_true(f.from && f.to);
	for (i = 0; i < PAGE; i++)
		page[i] = (uint8_t)(i * 7 + i / 256);
	im = frame_image(p, f.from, PAGE);
	image_copy(&im, &flat);
	mm_fork(r->c, &sqe, &f);
	assert_true(rig_answer(r, sqe.tag, 2000, &a));
	assert_int_equal(a.n, 1);
	assert_int_equal(a.res[0].result, 0);
	rig_answer_put(r, &a);
	for (i = 0; i < GANG; i++)
		assert_memory_equal(frame_part(p, f.to, i),
				    frame_part(p, f.from, i), PART);
	im = frame_image(p, f.to, PAGE);
	flat = image_flat(back, PAGE);
	image_copy(&flat, &im);
	assert_memory_equal(back, page, PAGE);
	assert_int_equal(mm_free(w, &f.from, 1, 0), 0);
	assert_int_equal(mm_free(w, &f.to, 1, 0), 0);
}

int main(void)
{
#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(an_extent_has_the_ranks_parts_one_after_the_other),
		T(bytes_are_counted_with_all_parts),
		T(pages_go_down_in_order_and_come_back_in_parts),
		T(a_plain_node_reads_what_a_gang_wrote),
		T(a_breach_of_one_part_is_a_breach),
		T(a_wrong_checksum_at_the_publish_is_refused),
		T(pages_are_copied_from_a_plain_node_into_parts),
		T(pages_are_copied_from_parts_to_a_plain_node),
		T(all_parts_come_or_none),
		T(a_late_read_keeps_frame_and_buffer_until_it_is_over),
		T(a_cancelled_read_that_was_not_started_leaves_nothing),
		T(a_publish_overtakes_a_late_read),
		T(what_the_node_refuses_after_the_gathering_is_a_failed_write),
		T(what_the_node_refuses_is_not_gathered_over_and_over),
		T(what_went_while_it_was_gathered_was_not_refused),
		T(a_plain_pool_writes_while_a_gang_pauses),
		T(what_pauses_is_not_taken_for_in_use),
		T(who_waits_for_memory_for_a_buffer_tries_again),
		T(a_gang_whose_writes_are_refused_forgets),
		T(a_report_while_gathering_ends_the_write),
		T(the_end_waits_for_what_is_gathered_and_scattered),
		T(loads_wait_for_buffers_and_come_in_time),
		T(who_waits_for_a_buffer_may_leave),
		T(a_failing_node_does_not_leave_waiters_behind),
		T(laws_and_bytes_hold_under_random_operations),
		T(a_gang_serves_spaces_of_its_world_only),
		T(the_first_extent_is_on_a_plain_node),
		T(a_gang_is_for_engines_of_its_world_only),
		T(each_rank_is_told_its_own_part),
		T(a_fork_copies_every_part),
		T(nothing_of_a_dead_engine_is_left_in_any_part),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
