/* SPDX-License-Identifier: Apache-2.0 */
/* How pages come back: single flight, deadlines, frames, bad bytes. */
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

/* A chain of @n pages that lives below only. */
static void lower_chain(uint32_t chain, uint32_t n)
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
	rig_check(r);
}

static const struct mm_counters *dram(void)
{
	return rig_count(r, RIG_DRAM);
}

static void pages_come_back_byte_for_byte(void **state)
{
	lower_chain(1, 20);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 20), 20);
	assert_int_equal(dram()->pgload, 20);
	assert_int_equal(dram()->bytes_in, 20 * 4096);
	/* the copy below stays: a later drop costs nothing */
	assert_int_equal(rig_state(r, RIG_FULL, 1, 19, RIG_NVME), COPY_READY);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_dirty, 0);
	rig_check(r);
}

static void a_page_that_is_there_is_answered_at_once(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	tag = rig_fetch(r, RIG_FULL, 1, 0, 2, 0);
	assert_int_equal(r->nr_answers, 1);
	assert_true(rig_answer(r, tag, 0, &a));
	assert_int_equal(a.res[1].result, 0);
	assert_true(rig_bytes_ok(r, RIG_FULL, a.res[1].frame, 1, 1));
	assert_int_equal(a.res[1].word,
			 frame_word_of(r->w[0]->pool, a.res[1].frame));
	rig_answer_put(r, &a);
	rig_check(r);
}

static void what_is_nowhere_is_a_miss(void **state)
{
	struct rig_answer a;

	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 9, 0, 3, 0), 100, &a));
	assert_int_equal(a.n, 3);
	assert_int_equal(a.res[2].result, -ENOENT);
	assert_int_equal(a.res[2].frame, 0);
	assert_true(rig_answer(r, rig_fetch(r, RIG_BIG, 9, 0, 1, 0), 100, &a));
	assert_int_equal(a.res[0].result, -ENOENT);
}

static void a_group_of_another_class_is_refused(void **state)
{
	struct ring_key key = { .group = RIG_BIG };
	struct ring_sqe sqe = { .op = RING_FETCH, .n = 1, .tag = 77 };
	struct rig_answer a;

	mm_fetch(r->w[0], &sqe, &key);
	assert_true(rig_answer(r, 77, 0, &a));
	assert_int_equal(a.res[0].result, -EINVAL);
	key.group = 999;
	mm_fetch(r->w[0], &sqe, &key);
	assert_true(rig_answer(r, 77, 0, &a));
	assert_int_equal(a.res[0].result, -EINVAL);
}

static void one_read_serves_all_who_wait(void **state)
{
	struct rig_answer a[8];
	uint64_t tag[8];
	unsigned int i;

	lower_chain(1, 4);
	r->blk->seen[NODE_READ] = 0;
	for (i = 0; i < 8; i++)
		tag[i] = rig_fetch(r, RIG_FULL, 1, 0, 4, 0);
	for (i = 0; i < 8; i++) {
		assert_true(rig_answer(r, tag[i], 1000, &a[i]));
		assert_int_equal(a[i].res[3].result, 0);
		assert_int_equal(a[i].res[3].frame, a[0].res[3].frame);
	}
	assert_int_equal(r->blk->seen[NODE_READ], 4);
	assert_int_equal(dram()->fetch_shared, 28);
	/* each answer holds a reference of its own */
	assert_int_equal(r->w[0]->pool->meta[a[0].res[0].frame].refs, 8);
	rig_check(r);
	for (i = 0; i < 8; i++)
		rig_answer_put(r, &a[i]);
	assert_int_equal(r->w[0]->pool->meta[a[0].res[0].frame].refs, 0);
	rig_check(r);
}

static void a_page_named_twice_is_answered_twice(void **state)
{
	struct ring_key key[2] = { { .group = 0 }, { .group = 0 } };
	struct ring_sqe sqe = { .op = RING_FETCH, .n = 2, .tag = 5000 };
	struct rig_answer a;

	lower_chain(1, 1);
	rig_key(1, 0, key[0].key);
	rig_key(1, 0, key[1].key);
	mm_fetch(r->w[0], &sqe, key);
	assert_true(rig_answer(r, 5000, 1000, &a));
	assert_int_equal(a.res[0].result, 0);
	assert_int_equal(a.res[0].frame, a.res[1].frame);
	rig_answer_put(r, &a);
	rig_check(r);
}

/* A frame named in an answer cannot be reclaimed before it is pinned. */
static void an_answer_holds_its_frame(void **state)
{
	struct rig_answer a;

	lower_chain(1, 2);
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 2, 0), 1000,
			       &a));
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 1, RIG_DRAM), COPY_READY);
	rig_pin(r, RIG_FULL, a.res[1].frame, 1);
	rig_answer_put(r, &a);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 1, RIG_DRAM), COPY_READY);
	rig_pin(r, RIG_FULL, a.res[1].frame, -1);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 1, RIG_DRAM), COPY_NONE);
	rig_check(r);
}

/* -- deadlines ------------------------------------------------------------------ */

static void each_waiter_is_answered_at_its_own_deadline(void **state)
{
	struct rig_answer a;
	uint64_t early, late, t0;

	lower_chain(1, 1);
	r->blk->hold[NODE_READ] = true;
	t0 = now_ns();
	early = rig_fetch(r, RIG_FULL, 1, 0, 1, 30);
	late = rig_fetch(r, RIG_FULL, 1, 0, 1, 2000);
	assert_true(rig_answer(r, early, 1000, &a));
	assert_int_equal(a.result, 0);
	assert_int_equal(a.res[0].result, -ENOENT);
	assert_in_range((now_ns() - t0) / NSEC_PER_MSEC, 30, 500);
	rig_check(r);
	/* the read goes on for the other one, whose deadline is its own now */
	r->blk->hold[NODE_READ] = false;
	assert_true(rig_answer(r, late, 1000, &a));
	assert_int_equal(a.res[0].result, 0);
	rig_answer_put(r, &a);
	rig_check(r);
}

static void a_stalled_node_makes_misses_in_time(void **state)
{
	struct rig_answer a;
	uint64_t tag, t0 = now_ns();

	lower_chain(1, 8);
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 8, 50);
	assert_true(rig_answer(r, tag, 1000, &a));
	assert_int_equal(a.res[7].result, -ENOENT);
	assert_true(now_ns() - t0 < 2 * NSEC_PER_SEC);
	/* frames stay the I/O's until it is over */
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 8);
	rig_run(r, 30);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 8);
	rig_check(r);

	/* late and good: it arrives, cold */
	r->blk->hold[NODE_READ] = false;
	rig_settle(r, 1000);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 0);
	assert_int_equal(dram()->pgload_late, 8);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 8), 8);
	rig_check(r);
}

static void a_late_read_can_be_joined(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	lower_chain(1, 1);
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 20);
	assert_true(rig_answer(r, tag, 1000, &a));
	rig_run(r, 30);
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 2000);
	rig_run(r, 5);
	assert_int_equal(r->nr_answers, 0);
	r->blk->hold[NODE_READ] = false;
	assert_true(rig_answer(r, tag, 1000, &a));
	assert_int_equal(a.res[0].result, 0);
	assert_true(rig_bytes_ok(r, RIG_FULL, a.res[0].frame, 1, 0));
	rig_answer_put(r, &a);
	assert_int_equal(r->blk->seen[NODE_READ], 1);
	rig_check(r);
}

/* Who computed the page need not wait for a device that stalls. */
static void a_publish_does_not_wait_for_a_late_read(void **state)
{
	struct rig_answer a;
	struct page *pg;

	lower_chain(1, 2);
	r->blk->hold[NODE_READ] = true;
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 2, 20), 1000,
			       &a));
	rig_run(r, 30);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	rig_check(r);
	/* the frames of the reads are not free before they are over */
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 2);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 2), 2);
	r->blk->hold[NODE_READ] = false;
	rig_settle(r, 1000);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 0);
	pg = rig_page(r, RIG_FULL, 1, 1);
	assert_int_equal(copy_at(pg, RIG_DRAM)->state, COPY_READY);
	assert_int_equal(copy_at(pg, RIG_NVME)->refs, 0);
	rig_check(r);
}

static void a_late_read_that_fails_gives_its_frame_back(void **state)
{
	struct rig_answer a;

	lower_chain(1, 2);
	r->blk->hold[NODE_READ] = true;
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 2, 20), 1000,
			       &a));
	rig_run(r, 30);
	r->blk->err[NODE_READ] = -EIO;
	r->blk->hold[NODE_READ] = false;
	rig_settle(r, 1000);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 0);
	rig_check(r);
	/* one error does not cost the page */
	r->blk->err[NODE_READ] = 0;
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 2), 2);
	rig_check(r);
}

static void a_deadline_in_the_past_misses_at_once(void **state)
{
	struct ring_sqe sqe = { .op = RING_FETCH, .n = 1, .tag = 99,
				.arg = 1 };
	struct ring_key key = { .group = 0 };
	struct rig_answer a;

	lower_chain(1, 1);
	rig_key(1, 0, key.key);
	mm_fetch(r->w[0], &sqe, &key);
	assert_true(rig_answer(r, 99, 0, &a));
	assert_int_equal(a.res[0].result, -ENOENT);
	rig_check(r);
}

/* -- cancelling --------------------------------------------------------------------- */

static void cancel_takes_back_what_was_not_started(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	lower_chain(1, 3);
	r->blk->hold[NODE_READ] = true;
	r->blk->unstarted = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 3, 0);
	rig_poll(r);
	mm_cancel(r->c, tag);
	assert_true(rig_answer(r, tag, 0, &a));
	assert_int_equal(a.result, -ECANCELED);
	assert_int_equal(a.n, 0);
	rig_settle(r, 1000);
	assert_int_equal(r->blk->seen[NODE_READ], 0);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 0);
	rig_check(r);
	mm_cancel(r->c, tag);		/* unknown now */
}

static void who_joins_a_cancelled_read_is_served(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	lower_chain(1, 1);
	r->blk->hold[NODE_READ] = true;
	r->blk->unstarted = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 0);
	mm_cancel(r->c, tag);
	assert_true(rig_answer(r, tag, 0, &a));
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 0);
	r->blk->hold[NODE_READ] = false;
	assert_true(rig_answer(r, tag, 1000, &a));
	assert_int_equal(a.res[0].result, 0);
	rig_answer_put(r, &a);
	rig_check(r);
}

static void cancel_after_start_lets_the_page_arrive_cold(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	lower_chain(1, 1);
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 0);
	rig_poll(r);
	mm_cancel(r->c, tag);
	assert_true(rig_answer(r, tag, 0, &a));
	assert_int_equal(a.result, -ECANCELED);
	r->blk->hold[NODE_READ] = false;
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 0, RIG_DRAM), COPY_READY);
	assert_int_equal(dram()->pgload_late, 1);
	assert_true(copy_at(rig_page(r, RIG_FULL, 1, 0), RIG_DRAM)->pol.flags &
		    KVMM_POLICY_COLD);
	rig_check(r);
}

static void a_client_that_left_is_not_answered(void **state)
{
	lower_chain(1, 4);
	r->blk->hold[NODE_READ] = true;
	rig_fetch(r, RIG_FULL, 1, 0, 4, 0);
	rig_poll(r);
	rig_client_exit(r);
	r->blk->hold[NODE_READ] = false;
	rig_settle(r, 1000);
	assert_int_equal(r->nr_answers, 0);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 0);
	rig_check(r);
}

/* -- frames ------------------------------------------------------------------------- */

/* Everything in memory pinned: returns how many frames that were. */
static unsigned int pin_all(uint32_t chain, int by)
{
	struct page *pg;
	uint32_t i;

	for (i = 0; (pg = rig_page(r, RIG_FULL, chain, i)); i++) {
		if (copy_at(pg, RIG_DRAM)->state != COPY_READY)
			break;
		rig_pin(r, RIG_FULL, copy_at(pg, RIG_DRAM)->frame, by);
	}
	return i;
}

static void small_start(uint64_t direct_reclaim_ns)
{
	struct rig_opts o = {
		.dram_bytes = 48 * 4096, .nvme_bytes = 1024 * 4096,
		.big_bytes = 8192,
		.direct_reclaim_ns = direct_reclaim_ns,
	};

	rig_stop(r);
	rig_start(r, &o);
}

static void a_target_full_of_pins_says_so_at_once(void **state)
{
	struct rig_answer a;
	uint64_t tag, t0;
	uint32_t n = 0;

	small_start(NSEC_PER_SEC);
	lower_chain(1, 4);
	/* OPEN frames and pinned pages: all that there is */
	while (!rig_publish(r, RIG_FULL, 2, n)) {
		struct page *pg = rig_page(r, RIG_FULL, 2, n++);

		rig_pin(r, RIG_FULL, copy_at(pg, RIG_DRAM)->frame, 1);
	}
	assert_true(n > 8);
	/* the reserve is for loads */
	while (rig_pool(r, RIG_FULL, RIG_DRAM)->nr_free)
		assert_true(frame_take(rig_pool(r, RIG_FULL, RIG_DRAM),
				       FRAME_FOR_LOAD, FRAME_OPEN));
	t0 = now_ns();
	tag = rig_fetch(r, RIG_FULL, 1, 0, 4, 0);
	assert_true(rig_answer(r, tag, 0, &a));
	assert_int_equal(a.res[0].result, -EAGAIN);
	assert_int_equal(a.res[3].result, -EAGAIN);
	/* noted: nobody waits, and yet somebody lacks what others pin */
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->starved,
			 r->c->engine->no);
	assert_true(now_ns() - t0 < 100 * NSEC_PER_MSEC);
	assert_int_equal(pin_all(2, -1), n);
}

static void stores_cannot_take_the_loads_frames(void **state)
{
	uint32_t n = 0;

	small_start(0);
	lower_chain(1, 1);
	while (!rig_publish(r, RIG_FULL, 2, n)) {
		struct page *pg = rig_page(r, RIG_FULL, 2, n++);

		rig_pin(r, RIG_FULL, copy_at(pg, RIG_DRAM)->frame, 1);
	}
	assert_int_equal(rig_publish(r, RIG_FULL, 2, n), -EAGAIN);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 1), 1);
	assert_int_equal(pin_all(2, -1), n);
	rig_check(r);
}

static void a_load_drops_what_is_clean_for_its_frame(void **state)
{
	uint32_t c;

	small_start(0);
	for (c = 1; c <= 12; c++)
		lower_chain(c, 8);
	/* more than memory holds, several times over */
	for (c = 1; c <= 12; c++)
		assert_int_equal(rig_fetch_check(r, RIG_FULL, c, 0, 8), 8);
	for (c = 1; c <= 12; c++)
		assert_int_equal(rig_fetch_check(r, RIG_FULL, c, 0, 8), 8);
	rig_check(r);
	assert_int_equal(dram()->pgdrop_gone, 0);
}

/*
 * Memory full of pages that are pinned, or whose writes are out and held; no
 * frame is free. The whole chain 1 is below.
 */
static void fill_dirty(void)
{
	struct mm_pool *p = rig_pool(r, RIG_FULL, RIG_DRAM);
	struct page *pg;
	uint32_t n = 0;

	r->blk->hold[NODE_WRITE] = true;
	while (!rig_publish(r, RIG_FULL, 2, n)) {
		pg = rig_page(r, RIG_FULL, 2, n++);
		if (n > 4)
			rig_pin(r, RIG_FULL, copy_at(pg, RIG_DRAM)->frame, 1);
	}
	assert_true(n > 8);
	rig_run(r, 5);
	assert_true(p->nr_writing > 0);
	while (p->nr_free)
		assert_true(frame_take(p, FRAME_FOR_LOAD, FRAME_OPEN));
}

static void a_load_waits_for_a_write_to_free_its_frame(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	small_start(NSEC_PER_SEC);
	lower_chain(1, 1);
	fill_dirty();
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 0);
	assert_false(rig_answer(r, tag, 20, &a));
	r->blk->hold[NODE_WRITE] = false;
	rig_pin(r, RIG_FULL, copy_at(rig_page(r, RIG_FULL, 2, rig_pool(r, RIG_FULL,
		RIG_DRAM)->nr_pages - 1), RIG_DRAM)->frame, -1);
	assert_true(rig_answer(r, tag, 1000, &a));
	assert_int_equal(a.res[0].result, 0);
	assert_true(rig_bytes_ok(r, RIG_FULL, a.res[0].frame, 1, 0));
	rig_answer_put(r, &a);
}

static void a_load_does_not_wait_for_a_frame_for_ever(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	small_start(NSEC_PER_SEC);
	lower_chain(1, 1);
	fill_dirty();
	r->mm->o.direct_reclaim_ns = 30 * NSEC_PER_MSEC;
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->starved, 0);
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 0);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->starved,
			 r->c->engine->no);
	assert_false(rig_answer(r, tag, 10, &a));
	assert_true(rig_answer(r, tag, 1000, &a));
	assert_int_equal(a.res[0].result, -EAGAIN);
}

/* However long it takes to populate; but no longer than its own deadline. */
static void a_load_waits_for_an_extent_that_is_on_its_way(void **state)
{
	struct rig_answer a;
	struct mm_pool *p;
	uint64_t tag[2];

	small_start(NSEC_PER_SEC);
	p = rig_pool(r, RIG_FULL, RIG_DRAM);
	lower_chain(1, 2);
	fill_dirty();
	r->mm->o.direct_reclaim_ns = 5 * NSEC_PER_MSEC;
	p->extents_coming++;
	tag[0] = rig_fetch(r, RIG_FULL, 1, 0, 1, 5000);
	tag[1] = rig_fetch(r, RIG_FULL, 1, 1, 1, 60);
	assert_false(rig_answer(r, tag[0], 40, &a));
	assert_true(rig_answer(r, tag[1], 1000, &a));
	assert_int_equal(a.res[0].result, -ENOENT);
	assert_false(rig_answer(r, tag[0], 40, &a));
	/* it is not coming any more: then there is no reason to wait */
	p->extents_coming--;
	assert_true(rig_answer(r, tag[0], 1000, &a));
	assert_int_equal(a.res[0].result, -EAGAIN);
}

static void a_publish_serves_who_waits_for_a_frame(void **state)
{
	uint32_t f;
	struct rig_answer a;
	struct ring_pub pub = { .group = RIG_FULL };
	struct ring_sqe sqe = { .op = RING_PUBLISH, .n = 1, .tag = 4242 };
	uint64_t tag;

	small_start(NSEC_PER_SEC);
	f = rig_frame(r, RIG_FULL, 100);
	assert_true(f);
	lower_chain(1, 1);
	fill_dirty();
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 0);
	assert_false(rig_answer(r, tag, 10, &a));
	/* somebody computed it meanwhile */
	pub.frame = f;
	rig_key(1, 0, pub.key);
	mm_publish(r->w[0], &sqe, &pub);
	assert_true(rig_answer(r, 4242, 100, &a));
	assert_int_equal(a.res[0].result, 0);
	rig_answer_put(r, &a);
	r->blk->hold[NODE_WRITE] = false;
	assert_true(rig_answer(r, tag, 1500, &a));
	assert_int_equal(a.res[0].result, 0);
	assert_int_equal(a.res[0].frame, f);
	rig_answer_put(r, &a);
}

/* -- bad bytes ------------------------------------------------------------------------ */

static void wrong_bytes_are_a_miss_and_take_their_tree(void **state)
{
	struct rig_answer a;
	uint32_t i;

	lower_chain(1, 5);
	r->blk->data[copy_at(rig_page(r, RIG_FULL, 1, 2), RIG_NVME)->slot.off] ^= 1;
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 5, 0), 1000,
			       &a));
	for (i = 0; i < 2; i++) {
		assert_int_equal(a.res[i].result, 0);
		assert_true(rig_bytes_ok(r, RIG_FULL, a.res[i].frame, 1, i));
	}
	assert_int_equal(a.res[2].result, -ENOENT);
	assert_null(rig_page(r, RIG_FULL, 1, 2));
	assert_null(rig_page(r, RIG_FULL, 1, 3));
	assert_int_equal(rig_count(r, RIG_NVME)->pgcrc_fail, 1);
	rig_check(r);
	rig_answer_put(r, &a);
	rig_run(r, 50);
	rig_settle(r, 1000);
	assert_int_equal(r->sp->nr_pages, 2);
	assert_int_equal(fake_blk_slots(r->blk), 2);
	rig_check(r);
}

static void a_bad_head_takes_the_tier_with_it_and_nothing_else(void **state)
{
	struct rig_answer a;

	lower_chain(1, 30);
	lower_chain(2, 3);
	r->blk->data[copy_at(rig_page(r, RIG_FULL, 1, 0), RIG_NVME)->slot.off] ^= 1;
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 1, 0), 1000,
			       &a));
	assert_int_equal(a.res[0].result, -ENOENT);
	assert_int_equal(rig_count(r, RIG_NVME)->pgdrop_orphan, 29);
	assert_int_equal(r->sp->nr_pages, 3);
	rig_check(r);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 2, 0, 3), 3);
}

/* A child in memory whose parent turns out to be unreadable. */
static void pinned_children_of_a_lost_page_are_not_found(void **state)
{
	struct rig_answer a;
	uint32_t f;

	lower_chain(1, 2);
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 1, 1, 0), 1000,
			       &a));
	f = a.res[0].frame;
	rig_pin(r, RIG_FULL, f, 1);
	rig_answer_put(r, &a);
	fake_blk_flip(r->blk);
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 1, 0), 1000,
			       &a));
	assert_int_equal(a.res[0].result, -ENOENT);
	assert_null(rig_page(r, RIG_FULL, 1, 1));
	rig_check(r);
	/* the reader still has its bytes */
	assert_true(rig_bytes_ok(r, RIG_FULL, f, 1, 1));
	/* the same pages may come again meanwhile */
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	rig_check(r);
	rig_pin(r, RIG_FULL, f, -1);
	rig_run(r, 60);
	assert_int_equal(r->sp->nr_pages, 2);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_pages, 2);
	rig_check(r);
}

static void an_io_error_costs_the_page_the_second_time(void **state)
{
	struct rig_answer a;
	unsigned int i;

	lower_chain(1, 1);
	r->blk->err[NODE_READ] = -EIO;
	for (i = 0; i < 2; i++) {
		assert_int_equal(rig_state(r, RIG_FULL, 1, 0, RIG_NVME),
				 COPY_READY);
		assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 1, 0),
				       1000, &a));
		assert_int_equal(a.res[0].result, -ENOENT);
		rig_settle(r, 100);
		rig_check(r);
	}
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	assert_int_equal(dram()->pgload_fail, 2);
}

static void a_failed_node_answers_at_once_and_recovers(void **state)
{
	struct rig_answer a;

	lower_chain(1, 3);
	r->blk->n.state = NODE_FAILED;
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 3, 0), 0, &a));
	assert_int_equal(a.res[2].result, -ENOENT);
	rig_check(r);
	r->blk->n.state = NODE_ONLINE;
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 3), 3);
	rig_check(r);
}

static void a_report_while_loading_is_a_miss(void **state)
{
	struct ring_key key = { .group = RIG_FULL };
	struct rig_answer a;
	uint64_t tag;

	lower_chain(1, 3);
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 0, 3, 0);
	rig_poll(r);
	rig_key(1, 1, key.key);
	mm_report(r->c, r->sp, &key, KVMM_BAD);
	rig_check(r);
	r->blk->hold[NODE_READ] = false;
	assert_true(rig_answer(r, tag, 1000, &a));
	assert_int_equal(a.res[0].result, 0);
	assert_int_equal(a.res[1].result, -ENOENT);
	assert_int_equal(a.res[2].result, -ENOENT);
	rig_answer_put(r, &a);
	rig_settle(r, 1000);
	assert_int_equal(r->sp->nr_pages, 1);
	rig_check(r);
}

static void without_the_checksum_wrong_bytes_would_be_served(void **state)
{
	struct rig_answer a;

	rig_stop(r);
	setenv("KVMM_BREAK", "crc", 1);
	setup(NULL);
	unsetenv("KVMM_BREAK");
	lower_chain(1, 1);
	fake_blk_flip(r->blk);
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 1, 0), 1000,
			       &a));
	assert_int_equal(a.res[0].result, 0);
	assert_false(rig_bytes_ok(r, RIG_FULL, a.res[0].frame, 1, 0));
	rig_answer_put(r, &a);
}

static void in_modes_that_miss_nothing_is_brought_up(void **state)
{
	struct rig_answer a;

	lower_chain(1, 1);
	mm_space_set_mode(r->sp, KVMM_MODE_BYPASS);
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 1, 0), 0, &a));
	assert_int_equal(a.res[0].result, -ENOENT);
	mm_space_set_mode(r->sp, KVMM_MODE_READONLY);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 1), 1);
}

/* -- from memory to memory -------------------------------------------------------- */

static void far_start(bool crc)
{
	struct rig_opts o = {
		.dram_bytes = 128 * 4096, .nvme_bytes = 1024 * 4096,
		.far_bytes = 128 * 4096, .crc = crc,
	};
	uint32_t i;

	rig_stop(r);
	rig_start(r, &o);
	for (i = 0; i < 8; i++)
		assert_int_equal(rig_publish_far(r, 1, i), 0);
	rig_check(r);
}

static void a_page_is_copied_between_nodes_of_memory(void **state)
{
	uint32_t i;

	far_start(false);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 8), 8);
	assert_int_equal(r->blk->seen[NODE_READ], 0);
	for (i = 0; i < 8; i++) {
		assert_int_equal(rig_state(r, RIG_FULL, 1, i, RIG_DRAM),
				 COPY_READY);
		assert_int_equal(rig_state(r, RIG_FULL, 1, i, RIG_FAR),
				 COPY_READY);
	}
	assert_int_equal(rig_count(r, RIG_FAR)->bytes_out, 8 * 4096);
	rig_check(r);
	/* either of two copies may leave, the other is not lost by it */
	r->blk->unwritable = true;
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_pages, 0);
	assert_int_equal(r->sp->nr_pages, 8);
	assert_int_equal(dram()->pgdrop_gone, 0);
	rig_check(r);
}

static void gate_fn(struct work *w)
{
	struct timespec ts = ns_to_timespec(20 * NSEC_PER_MSEC);

	nanosleep(&ts, NULL);
}

/* Somebody forks as much as he likes: a copy that has a deadline goes first. */
static void a_copy_does_not_wait_for_forks(void **state)
{
	struct ring_fork fk[KVMM_MAX_GROUPS] = { 0 };
	struct ring_sqe sqe = {
		.op = RING_FORK, .n = ARRAY_SIZE(fk), .tag = 1u << 20,
	};
	struct work gate = { .fn = gate_fn };
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);
	struct rig_answer a;
	uint64_t tag;
	uint32_t i;

	far_start(false);
	sqe.space = (uint16_t)mm_space_ix(r->sp);
	for (i = 0; i < ARRAY_SIZE(fk); i++) {
		fk[i].from = rig_frame(r, RIG_FULL, 1000);
		fk[i].to = rig_frame(r, RIG_FULL, 1000);
		fk[i].win = r->w[0]->no;
	}
	work_submit(r->pool, &gate);
	mm_fork(r->c, &sqe, fk);
	tag = rig_fetch(r, RIG_FULL, 1, 0, 1, 0);
	while (!r->nr_answers && !deadline_past(deadline))
		work_poll(r->pool, 1);
	assert_int_equal(r->answer[0].result, 0);
	assert_int_equal(r->answer[0].tag, tag);
	assert_true(rig_answer(r, tag, 0, &a));
	assert_int_equal(a.res[0].result, 0);
	rig_answer_put(r, &a);
	assert_true(rig_answer(r, sqe.tag, 1000, &a));
	assert_int_equal(a.res[ARRAY_SIZE(fk) - 1].result, 0);
	rig_check(r);
}

static void a_cancelled_copy_holds_its_frames_until_it_is_over(void **state)
{
	struct rig_answer a;
	uint64_t tag;

	far_start(false);
	tag = rig_fetch(r, RIG_FULL, 1, 0, 8, 0);
	mm_cancel(r->c, tag);
	assert_true(rig_answer(r, tag, 0, &a));
	assert_int_equal(a.result, -ECANCELED);
	rig_check(r);
	rig_settle(r, 1000);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 0);
	rig_check(r);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 8), 8);
}

static void a_breach_is_found_out_by_the_copy(void **state)
{
	far_start(true);
	rig_breach(r, RIG_FULL, 1, 5, RIG_FAR);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 8), 5);
	assert_non_null(rig_page(r, RIG_FULL, 1, 4));
	assert_null(rig_page(r, RIG_FULL, 1, 5));
	assert_null(rig_page(r, RIG_FULL, 1, 7));
	assert_int_equal(rig_count(r, RIG_FAR)->pgbreach, 1);
	rig_settle(r, 1000);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 0);
	rig_check(r);
}

/* Two engines that compute the same page need not get the same bits. */
static void other_bytes_of_a_second_publisher_are_no_breach(void **state)
{
	struct page *pg;

	far_start(true);
	/* the same key on another node, with bytes of another sum */
	r->o.other_bytes = true;
	assert_int_equal(rig_publish(r, RIG_FULL, 1, 0), 0);
	pg = rig_page(r, RIG_FULL, 1, 0);
	assert_int_equal(page_writeback(pg, &r->mm->node[RIG_DRAM],
					NODE_PRIO_WRITEBACK), 1);
	rig_settle(r, 1000);
	assert_int_equal(rig_state(r, RIG_FULL, 1, 0, RIG_NVME), COPY_READY);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgbreach, 0);
	rig_check(r);
}

int main(void)
{
#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(pages_come_back_byte_for_byte),
		T(a_page_that_is_there_is_answered_at_once),
		T(what_is_nowhere_is_a_miss),
		T(a_group_of_another_class_is_refused),
		T(one_read_serves_all_who_wait),
		T(a_page_named_twice_is_answered_twice),
		T(an_answer_holds_its_frame),
		T(each_waiter_is_answered_at_its_own_deadline),
		T(a_stalled_node_makes_misses_in_time),
		T(a_late_read_can_be_joined),
		T(a_publish_does_not_wait_for_a_late_read),
		T(a_late_read_that_fails_gives_its_frame_back),
		T(a_deadline_in_the_past_misses_at_once),
		T(cancel_takes_back_what_was_not_started),
		T(who_joins_a_cancelled_read_is_served),
		T(cancel_after_start_lets_the_page_arrive_cold),
		T(a_client_that_left_is_not_answered),
		T(a_target_full_of_pins_says_so_at_once),
		T(stores_cannot_take_the_loads_frames),
		T(a_load_drops_what_is_clean_for_its_frame),
		T(a_load_waits_for_a_write_to_free_its_frame),
		T(a_load_does_not_wait_for_a_frame_for_ever),
		T(a_load_waits_for_an_extent_that_is_on_its_way),
		T(a_publish_serves_who_waits_for_a_frame),
		T(wrong_bytes_are_a_miss_and_take_their_tree),
		T(a_bad_head_takes_the_tier_with_it_and_nothing_else),
		T(pinned_children_of_a_lost_page_are_not_found),
		T(an_io_error_costs_the_page_the_second_time),
		T(a_failed_node_answers_at_once_and_recovers),
		T(a_report_while_loading_is_a_miss),
		T(without_the_checksum_wrong_bytes_would_be_served),
		T(in_modes_that_miss_nothing_is_brought_up),
		T(a_page_is_copied_between_nodes_of_memory),
		T(a_copy_does_not_wait_for_forks),
		T(a_cancelled_copy_holds_its_frames_until_it_is_over),
		T(a_breach_is_found_out_by_the_copy),
		T(other_bytes_of_a_second_publisher_are_no_breach),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
