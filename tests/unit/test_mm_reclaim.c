/* SPDX-License-Identifier: Apache-2.0 */
/* What leaves memory, in which order, and what never does. */
#include <stdio.h>

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

static void start(const struct rig_opts *o)
{
	rig_stop(r);
	rig_start(r, o);
}

static struct mm_pool *kv(void)
{
	return rig_pool(r, RIG_FULL, RIG_DRAM);
}

static const struct mm_counters *dram(void)
{
	return rig_count(r, RIG_DRAM);
}

static struct reclaim_control reclaim(uint32_t want)
{
	struct reclaim_control rc = {
		.want = want, .max_scan = 512,
		.deadline_ns = deadline_in(NSEC_PER_SEC),
	};

	pool_reclaim(kv(), &rc);
	return rc;
}

static bool in_dram(uint32_t chain, uint32_t i)
{
	return rig_state(r, RIG_FULL, chain, i, RIG_DRAM) == COPY_READY;
}

static uint32_t frame_of(unsigned int group, uint32_t chain, uint32_t i)
{
	return copy_at(rig_page(r, group, chain, i), RIG_DRAM)->frame;
}

/* -- order ----------------------------------------------------------------------- */

static void clean_pages_leave_without_io_tail_first(void **state)
{
	struct reclaim_control rc;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 6), 6);
	rig_touch(r, RIG_FULL, 1, 6);
	page_writeback(rig_page(r, RIG_FULL, 1, 5), &r->mm->node[RIG_DRAM],
		       NODE_PRIO_WRITEBACK);
	rig_settle(r, 1000);
	r->blk->seen[NODE_WRITE] = 0;
	rc = reclaim(2);
	assert_int_equal(rc.freed, 2);
	assert_int_equal(r->blk->seen[NODE_WRITE], 0);
	assert_true(in_dram(1, 3) && !in_dram(1, 4) && !in_dram(1, 5));
	assert_int_equal(dram()->pgdrop, 2);
	rig_check(r);
	rc = reclaim(10);
	assert_int_equal(rc.freed, 4);
	assert_int_equal(kv()->nr_pages, 0);
	rig_check(r);
}

static void dirty_pages_are_written_while_ready_and_dropped_later(void **state)
{
	struct reclaim_control rc;
	uint32_t i;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 4), 4);
	rig_touch(r, RIG_FULL, 1, 4);
	r->blk->hold[NODE_WRITE] = true;
	rc = reclaim(4);
	assert_int_equal(rc.freed, 0);
	assert_true(rc.writing >= 4);
	for (i = 0; i < 4; i++)
		assert_true(in_dram(1, i));
	rig_check(r);
	r->blk->hold[NODE_WRITE] = false;
	rig_settle(r, 1000);
	rc = reclaim(4);
	assert_int_equal(rc.freed, 4);
	rig_check(r);
}

static void the_chain_used_longest_ago_leaves_first(void **state)
{
	uint32_t c;

	for (c = 0; c < 4; c++)
		assert_int_equal(rig_publish_chain(r, RIG_FULL, c, 3), 3);
	for (c = 0; c < 4; c++)
		rig_touch(r, RIG_FULL, c, 3);
	rig_touch(r, RIG_FULL, 0, 3);
	reclaim(3);
	rig_settle(r, 1000);
	assert_int_equal(reclaim(3).freed, 3);
	assert_false(in_dram(1, 0));
	assert_true(in_dram(0, 0) && in_dram(2, 0) && in_dram(3, 0));
}

static void a_pinned_page_stays_and_so_does_its_parent(void **state)
{
	uint32_t f;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	f = frame_of(RIG_FULL, 1, 1);
	rig_pin(r, RIG_FULL, f, 1);
	rig_push_down(r, RIG_FULL);
	assert_true(in_dram(1, 0) && in_dram(1, 1) && !in_dram(1, 2));
	assert_true(rig_bytes_ok(r, RIG_FULL, f, 1, 1));
	rig_check(r);
	rig_pin(r, RIG_FULL, f, -1);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(kv()->nr_pages, 0);
}

static void window_pages_leave_whatever_hangs_on_them(void **state)
{
	uint32_t i;

	assert_int_equal(rig_publish_chain(r, RIG_WINDOW, 1, 6), 6);
	reclaim(2);
	rig_settle(r, 1000);
	assert_int_equal(reclaim(2).freed, 2);
	/* the oldest, although others came from them */
	for (i = 0; i < 6; i++)
		assert_int_equal(rig_state(r, RIG_WINDOW, 1, i, RIG_DRAM),
				 i < 2 ? COPY_NONE : COPY_READY);
	rig_check(r);
}

/* -- what stands in the way --------------------------------------------------------- */

/* A chain that was published and never touched: its head is the coldest. */
static void a_chain_that_was_never_touched_can_leave(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 1024 * 4096, .nvme_bytes = 2048 * 4096,
	};
	struct reclaim_control rc;
	unsigned int rounds;

	start(&o);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 700), 700);
	for (rounds = 0; rounds < 300 && kv()->nr_pages; rounds++) {
		rc = (struct reclaim_control){ .want = 64, .max_scan = 64 };
		pool_reclaim(kv(), &rc);
		rig_settle(r, 1000);
	}
	assert_int_equal(kv()->nr_pages, 0);
	rig_check(r);
}

static void pinned_pages_do_not_hide_the_rest(void **state)
{
	struct reclaim_control rc = { .want = 4, .max_scan = 16 };
	unsigned int rounds;
	uint32_t i;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 40), 40);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 2, 4), 4);
	for (i = 0; i < 40; i++)
		rig_pin(r, RIG_FULL, frame_of(RIG_FULL, 1, i), 1);
	for (rounds = 0; rounds < 50 && in_dram(2, 0); rounds++) {
		pool_reclaim(kv(), &rc);
		rig_settle(r, 1000);
	}
	assert_false(in_dram(2, 0));
	assert_true(in_dram(1, 39));
	for (i = 0; i < 40; i++)
		rig_pin(r, RIG_FULL, frame_of(RIG_FULL, 1, i), -1);
	rig_check(r);
}

/* -- nobody below --------------------------------------------------------------------- */

static void without_a_node_below_leaves_are_dropped(void **state)
{
	struct rig_opts o = { .dram_bytes = 128 * 4096, .no_nvme = true };

	start(&o);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 5), 5);
	rig_touch(r, RIG_FULL, 1, 5);
	assert_int_equal(reclaim(2).freed, 2);
	assert_true(in_dram(1, 2) && !rig_page(r, RIG_FULL, 1, 3));
	assert_int_equal(dram()->pgdrop_gone, 2);
	rig_check(r);
}

static void a_node_that_takes_no_writes_does_not_stop_reclaim(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 5), 5);
	rig_touch(r, RIG_FULL, 1, 5);
	r->blk->unwritable = true;
	assert_int_equal(reclaim(2).freed, 2);
	assert_int_equal(dram()->pgdrop_gone, 2);
	rig_check(r);
	/* and when it does again, pages are kept */
	r->blk->unwritable = false;
	rig_push_down(r, RIG_FULL);
	assert_int_equal(r->sp->nr_pages, 3);
	rig_check(r);
}

static void a_page_that_the_medium_refused_is_dropped_not_tried_again(void **state)
{
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	r->blk->err[NODE_WRITE] = -EIO;
	reclaim(1);
	rig_settle(r, 1000);
	assert_true(in_dram(1, 0));
	assert_int_equal(r->blk->seen[NODE_WRITE], 1);
	assert_int_equal(reclaim(1).freed, 1);
	assert_int_equal(r->blk->seen[NODE_WRITE], 1);
	assert_int_equal(r->sp->nr_pages, 0);
	rig_check(r);
}

/* A parent below only, a child in memory only: neither is dropped wrongly. */
static void a_last_copy_with_children_anywhere_is_kept(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 128 * 4096, .nvme_bytes = 2 * 4096,
	};
	uint32_t i;

	start(&o);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 1, 1), 1);
	assert_false(in_dram(1, 0));
	/* the node is full, and the slot of page 0 must not be given up */
	for (i = 2; i < 40; i++) {
		assert_int_equal(rig_publish_chain(r, RIG_FULL, i, 1), 1);
		page_writeback(rig_page(r, RIG_FULL, i, 0),
			       &r->mm->node[RIG_DRAM], NODE_PRIO_WRITEBACK);
		rig_settle(r, 1000);
		assert_non_null(rig_page(r, RIG_FULL, 1, 0));
		rig_check(r);
	}
}

static void without_closure_the_check_fails(void **state)
{
	struct rig_opts o = { .dram_bytes = 128 * 4096, .no_nvme = true };
	struct errmsg e = { "" };

	rig_stop(r);
	setenv("KVMM_BREAK", "closure", 1);
	rig_start(r, &o);
	unsetenv("KVMM_BREAK");
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	assert_int_equal(reclaim(1).freed, 1);
	assert_null(rig_page(r, RIG_FULL, 1, 0));
	assert_int_equal(mm_check(r->mm, &e), -EUCLEAN);
}

/* -- in the background ----------------------------------------------------------------- */

/* Ten times what memory holds goes through it; all of it is there afterwards. */
static void pages_spill_and_come_back(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 128 * 4096, .nvme_bytes = 2048 * 4096,
		/* on a slow machine, too, wait for writes, do not forget */
		.direct_reclaim_ns = 2 * NSEC_PER_SEC,
	};
	uint32_t c, n = 0;

	start(&o);
	for (c = 0; c < 100; c++) {
		while (n < (c + 1) * 12) {
			int err = rig_publish(r, RIG_FULL, c, n % 12);

			assert_true(!err || err == -EAGAIN);
			n += !err;
		}
		rig_touch(r, RIG_FULL, c, 12);
		if (c % 10 == 0)
			rig_check(r);
	}
	assert_int_equal(r->sp->nr_pages, 1200);
	for (c = 0; c < 100; c++)
		assert_int_equal(rig_fetch_check(r, RIG_FULL, c, 0, 12), 12);
	rig_check(r);
	assert_int_equal(dram()->pgdrop_gone, 0);
	assert_int_equal(dram()->pgdrop_orphan, 0);
	assert_true(dram()->pgsteal_kreclaimd > 0);
}

static void frames_come_back_above_the_watermark_by_themselves(void **state)
{
	struct mm_pool *p = kv();
	uint32_t c;

	for (c = 0; c < 40; c++)
		rig_publish_chain(r, RIG_FULL, c, 4);
	rig_run(r, 100);
	rig_settle(r, 1000);
	rig_run(r, 20);
	assert_true(p->nr_free + pool_room(p) >= p->wmark_low);
	rig_check(r);
}

static void a_full_lower_node_forgets_the_coldest(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 64 * 4096, .nvme_bytes = 64 * 4096,
		.big_bytes = 8192,
	};
	uint32_t c, n, there;

	start(&o);
	for (c = 0; c < 60; c++) {
		for (n = 0; n < 4;) {
			int err = rig_publish(r, RIG_FULL, c, n);

			assert_true(!err || err == -EAGAIN || err == -ESTALE);
			if (err == -ESTALE)
				break;
			n += !err;
		}
		rig_touch(r, RIG_FULL, c, 4);
		rig_check(r);
	}
	rig_settle(r, 1000);
	for (there = 0, c = 50; c < 60; c++)
		there += rig_fetch_check(r, RIG_FULL, c, 0, 4);
	assert_true(there >= 36);
	for (there = 0, c = 0; c < 10; c++)
		there += rig_fetch_check(r, RIG_FULL, c, 0, 4);
	assert_int_equal(there, 0);
	rig_check(r);
}

static void memory_moves_to_the_class_that_needs_it(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 256 * 4096, .nvme_bytes = 4096 * 4096,
		.extent_bytes = 16 * 4096,
		.direct_reclaim_ns = 2 * NSEC_PER_SEC,
	};
	uint32_t c, n = 0, tries;

	start(&o);
	for (c = 0; c < 60; c++) {
		rig_publish_chain(r, RIG_FULL, c, 8);
		rig_touch(r, RIG_FULL, c, 8);
	}
	assert_true(kv()->nr_extents >= 12);
	rig_check(r);
	for (tries = 0; n < 30 && tries < 2000; tries++) {
		int err = rig_publish(r, RIG_BIG, 500, n);

		assert_true(!err || err == -EAGAIN);
		n += !err;
		if (n)
			rig_pin(r, RIG_BIG, frame_of(RIG_BIG, 500, n - 1),
				!err);
	}
	assert_int_equal(n, 30);
	assert_true(rig_pool(r, RIG_BIG, RIG_DRAM)->nr_extents > 4);
	rig_check(r);
	/* nothing was lost by it */
	for (c = 0; c < 60; c++)
		rig_fetch_check(r, RIG_FULL, c, 0, 8);
	assert_int_equal(dram()->pgdrop_gone, 0);
	rig_check(r);
}

/*
 * As a long prompt does it: all of one class's pages are pinned, while another
 * class, with no more memory than that and in use of late, has nobody waiting.
 */
static void a_squeezed_class_gets_what_another_does_not_use(void **state)
{
	struct rig_opts o = {
		.dram_bytes = 256 * 4096, .nvme_bytes = 4096 * 4096,
		.extent_bytes = 16 * 4096,
		.direct_reclaim_ns = NSEC_PER_SEC,
	};
	/* far less than it takes to be called idle */
	uint64_t deadline = deadline_in(4 * NSEC_PER_SEC);
	struct mm_pool *big;
	uint32_t n = 0, half;
	int err;

	start(&o);
	big = rig_pool(r, RIG_BIG, RIG_DRAM);
	while (kv()->nr_extents < 8)
		assert_int_equal(rig_publish(r, RIG_FULL, 1, n++), 0);
	half = kv()->nr_extents;
	for (n = 0; big->nr_extents <= half && !deadline_past(deadline);) {
		err = rig_publish(r, RIG_BIG, 2, n);
		assert_true(!err || err == -EAGAIN);
		if (!err)
			rig_pin(r, RIG_BIG, frame_of(RIG_BIG, 2, n++), 1);
	}
	assert_true(big->nr_extents > half);
	assert_true(kv()->nr_extents < half);
	rig_check(r);
	while (n--)
		rig_pin(r, RIG_BIG, frame_of(RIG_BIG, 2, n), -1);
}

/* No page is there to be looked at, and then no pass to see that all is well. */
static void a_wait_is_timed_from_its_begin_to_its_end(void **state)
{
	uint32_t f[256], n = 0;

	while (n < ARRAY_SIZE(f) && (f[n] = rig_frame(r, RIG_FULL, 5)))
		n++;
	assert_in_range(n, 1, ARRAY_SIZE(f) - 1);
	assert_true(kv()->want > 0);
	assert_int_equal(kv()->nr_pages, 0);
	assert_int_not_equal(kv()->squeezed_ns, 0);
	r->mm->now_ns = kv()->squeezed_ns + NSEC_PER_SEC;
	assert_int_equal(pool_squeezed(kv()), NSEC_PER_SEC);
	assert_int_equal(mm_free(r->w[0], f, n, 0), 0);
	assert_int_equal(kv()->want, 0);
	assert_int_equal(pool_squeezed(kv()), 0);
	rig_check(r);
}

static void an_extent_with_a_pinned_page_is_not_emptied(void **state)
{
	struct mm_pool *p = kv();
	uint32_t no, f;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	for (no = 1; no <= p->max_extents; no++)
		if (p->extent[no].ext && no != frame_of(RIG_FULL, 1, 0) /
					       p->per_extent)
			break;
	f = frame_of(RIG_FULL, 1, 0);
	rig_pin(r, RIG_FULL, f, 1);
	if (no > p->max_extents)
		assert_int_equal(pool_evacuate(p), -EBUSY);
	rig_run(r, 20);
	assert_true(in_dram(1, 0));
	rig_check(r);
}

/* The one that is being emptied. */
static uint32_t evacuated(const struct mm_pool *p)
{
	uint32_t no;

	for (no = 1; no <= p->max_extents; no++)
		if (p->extent[no].going && !p->extent[no].down_seq)
			return no;
	return 0;
}

/* A write is on its way in each of them: over soon, and no reason to say no. */
static void extents_busy_with_io_are_emptied_where_there_is_no_other(void **state)
{
	struct mm_pool *p = kv();
	uint32_t f;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 1), 1);
	/* one extent, so there is no other */
	assert_int_equal(p->nr_extents, 1);
	f = frame_of(RIG_FULL, 1, 0);
	frame_ref(p, f);
	assert_int_equal(pool_evacuate(p), 0);
	assert_non_null(p->nd->evac);
	rig_run(r, 5);
	assert_true(in_dram(1, 0));	/* not while it is busy */
	frame_unref(p, f);
	rig_run(r, 50);
	assert_false(in_dram(1, 0));
	rig_check(r);
}

/* The pages of the extent that is being emptied were the space's last ones. */
static void evac_over(const struct mm_pool *p)
{
	uint64_t deadline = deadline_in(10 * NSEC_PER_SEC);

	while (p->nd->evac && !deadline_past(deadline))
		rig_poll(r);
	assert_null(p->nd->evac);
}

/* What kept it may do so for long: others first, and in the end that one again. */
static void another_extent_is_tried_after_one_that_stayed(void **state)
{
	struct mm_pool *p = kv();
	uint32_t i, no, f;

	/* some are in the client's hands */
	for (i = 0; p->nr_extents < 6 || i % 8; i++)
		assert_int_equal(rig_publish(r, RIG_FULL, 1, i), 0);
	rig_settle(r, 1000);
	r->mm->o.shrink_ack_ns = 5 * NSEC_PER_MSEC;
	r->mm->now_ns = now_ns();
	assert_int_equal(pool_evacuate(p), 0);
	no = evacuated(p);
	/* some page of it that is pinned only now */
	for (f = no * p->per_extent; !p->meta[f].page; f++)
		assert_true(f < (no + 1) * p->per_extent);
	rig_pin(r, RIG_FULL, f, 1);
	evac_over(p);
	rig_pin(r, RIG_FULL, f, -1);
	r->mm->o.shrink_ack_ns = 10 * NSEC_PER_SEC;
	r->mm->now_ns = now_ns();
	assert_int_equal(pool_evacuate(p), 0);
	assert_int_not_equal(evacuated(p), no);
	for (i = 0; evacuated(p) != no; i++) {
		assert_true(i < 6);
		evac_over(p);
		assert_int_equal(pool_evacuate(p), 0);
	}
	evac_over(p);
	rig_check(r);
}

static void a_space_may_end_while_its_extent_is_emptied(void **state)
{
	struct rig_opts o = { .dram_bytes = 128 * 4096, .no_nvme = true };
	struct mm_node *nd;
	struct ring_key key = { .group = RIG_FULL };

	start(&o);
	nd = &r->mm->node[RIG_DRAM];
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 4), 4);
	assert_int_equal(pool_evacuate(kv()), 0);
	assert_non_null(nd->evac);
	/* all of it goes before anybody looks at the extent again */
	rig_key(1, 0, key.key);
	mm_report(r->c, r->sp, &key, KVMM_BAD);
	rig_client_exit(r);
	while (r->mm->nr_jobs)
		work_poll(r->pool, 0);
	spaces_run(r->mm, 0);
	rig_run(r, 20);
	assert_null(nd->evac);
	rig_check(r);
	assert_true(list_empty(&r->mm->spaces));
}

/* -- reports and touches ------------------------------------------------------------------ */

static void a_reported_page_is_found_nowhere_and_its_reader_keeps_it(void **state)
{
	struct ring_key key = { .group = RIG_FULL };
	uint32_t f;

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 4), 4);
	page_writeback(rig_page(r, RIG_FULL, 1, 3), &r->mm->node[RIG_DRAM],
		       NODE_PRIO_WRITEBACK);
	rig_settle(r, 1000);
	f = frame_of(RIG_FULL, 1, 2);
	rig_pin(r, RIG_FULL, f, 1);
	rig_key(1, 1, key.key);
	mm_report(r->c, r->sp, &key, KVMM_BAD);
	assert_non_null(rig_page(r, RIG_FULL, 1, 0));
	assert_null(rig_page(r, RIG_FULL, 1, 1));
	assert_null(rig_page(r, RIG_FULL, 1, 2));
	assert_null(rig_page(r, RIG_FULL, 1, 3));
	rig_check(r);
	rig_run(r, 30);
	assert_true(rig_bytes_ok(r, RIG_FULL, f, 1, 2));
	rig_pin(r, RIG_FULL, f, -1);
	rig_run(r, 60);
	assert_int_equal(r->sp->nr_pages, 1);
	assert_int_equal(fake_blk_slots(r->blk), 1);
	rig_check(r);
}

/*
 * Each report finds those below the page pinned, and BAD already: to look at them
 * all once more, page by page of a long chain, would hold everybody up.
 */
static void reports_of_a_pinned_chain_look_at_each_page_once(void **state)
{
	struct ring_key key = { .group = RIG_FULL };
	struct rig_opts o = { .dram_bytes = 1280 * 4096, .no_nvme = true };
	uint32_t i, n = 1000;

	start(&o);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, n), n);
	for (i = 0; i < n; i++)
		rig_pin(r, RIG_FULL, frame_of(RIG_FULL, 1, i), 1);
	for (i = n; i-- > 0; ) {
		rig_key(1, i, key.key);
		assert_int_equal(mm_report(r->c, r->sp, &key, RING_UNDO), 1);
	}
	assert_int_equal(dram()->isolate_pinned, n);
	assert_int_equal(dram()->pgundo, n);
	assert_int_equal(dram()->pgreport, 0);
	assert_int_equal(r->sp->nr_pages, n);
	rig_check(r);
}

static void a_touch_of_what_the_frame_no_longer_holds_is_ignored(void **state)
{
	struct ring_sqe sqe = { .op = RING_END, .n = 3 };

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 3), 3);
	sqe.frame = frame_of(RIG_FULL, 1, 2);
	sqe.arg = frame_word_of(r->w[0]->pool, sqe.frame) + 256;
	mm_touch(r->w[0], &sqe);
	sqe.arg -= 256;
	sqe.group = RIG_WINDOW;
	mm_touch(r->w[0], &sqe);
	sqe.frame = UINT32_MAX;
	mm_touch(r->w[0], &sqe);
	sqe.frame = 0;
	mm_touch(r->w[0], &sqe);
	assert_int_equal(dram()->pgtouch, 0);
	sqe.group = RIG_FULL;
	sqe.frame = frame_of(RIG_FULL, 1, 2);
	sqe.how = KVMM_CONTINUES;
	sqe.expect_ms = 1000;
	mm_touch(r->w[0], &sqe);
	assert_int_equal(dram()->pgtouch, 3);
	assert_true(copy_at(rig_page(r, RIG_FULL, 1, 0), RIG_DRAM)->pol.flags &
		    KVMM_POLICY_CONTINUES);
	rig_check(r);
}

/* -- everything at once -------------------------------------------------------------------- */

/**
 * struct model - what the random test remembers
 * @len:	pages of each chain that were published, at most
 * @pinned:	frame of a page that is pinned, 0: none
 */
struct model {
	struct rng	rng;
	uint32_t	len[24];
	struct {
		uint32_t frame, chain, i;
	} pinned[16];
	uint64_t	fetched, published;
};

static void model_publish(struct model *m)
{
	uint32_t c = rng_below(&m->rng, 24);
	int err;

	if (m->len[c] == 40 || rng_below(&m->rng, 50) == 0)
		m->len[c] = 0;
	err = rig_publish(r, RIG_FULL, c, m->len[c]);
	if (!err || err == -EEXIST)
		m->len[c]++;
	else if (err == -ESTALE)
		m->len[c] = 0;
	else
		assert_int_equal(err, -EAGAIN);
	m->published += !err;
}

static void model_pin(struct model *m)
{
	unsigned int k = rng_below(&m->rng, 16);
	uint32_t c = rng_below(&m->rng, 24), i;
	struct page *pg;

	if (m->pinned[k].frame) {
		assert_true(rig_bytes_ok(r, RIG_FULL, m->pinned[k].frame,
					 m->pinned[k].chain,
					 m->pinned[k].i));
		rig_pin(r, RIG_FULL, m->pinned[k].frame, -1);
		m->pinned[k].frame = 0;
		return;
	}
	if (!m->len[c])
		return;
	i = rng_below(&m->rng, m->len[c]);
	pg = rig_page(r, RIG_FULL, c, i);
	if (!pg || copy_at(pg, RIG_DRAM)->state != COPY_READY)
		return;
	m->pinned[k].frame = copy_at(pg, RIG_DRAM)->frame;
	m->pinned[k].chain = c;
	m->pinned[k].i = i;
	rig_pin(r, RIG_FULL, m->pinned[k].frame, 1);
}

static void model_fetch(struct model *m)
{
	uint32_t c = rng_below(&m->rng, 24), n, i;
	struct rig_answer a;
	uint64_t tag;

	if (!m->len[c])
		return;
	n = 1 + rng_below(&m->rng, m->len[c] < 40 ? m->len[c] : 40);
	tag = rig_fetch(r, RIG_FULL, c, 0, n, 1 + rng_below(&m->rng, 20));
	if (rng_below(&m->rng, 8) == 0)
		mm_cancel(r->c, tag);
	assert_true(rig_answer(r, tag, 5000, &a));
	assert_true(a.result == 0 || a.result == -ECANCELED);
	for (i = 0; i < a.n; i++) {
		assert_true(a.res[i].result == 0 ||
			    a.res[i].result == -ENOENT ||
			    a.res[i].result == -EAGAIN);
		if (a.res[i].result)
			continue;
		assert_true(rig_bytes_ok(r, RIG_FULL, a.res[i].frame, c, i));
		m->fetched++;
	}
	rig_answer_put(r, &a);
}

static void model_fault(struct model *m)
{
	struct fake_blk *b = r->blk;
	static const int err[] = { 0, 0, 0, -EIO, -ENOSPC, -EROFS };

	b->hold[NODE_READ] = rng_below(&m->rng, 8) == 0;
	b->hold[NODE_WRITE] = rng_below(&m->rng, 8) == 0;
	b->unstarted = rng_below(&m->rng, 2);
	b->err[NODE_READ] = rng_below(&m->rng, 4) ? 0 : -EIO;
	b->err[NODE_WRITE] = err[rng_below(&m->rng, ARRAY_SIZE(err))];
	b->nth = 1 + rng_below(&m->rng, 10);
	b->unwritable = rng_below(&m->rng, 6) == 0;
	b->refuse[NODE_READ] = rng_below(&m->rng, 8) ? 0 : -EAGAIN;
	b->refuse[NODE_WRITE] = rng_below(&m->rng, 8) ? 0 : -EAGAIN;
	b->n.state = rng_below(&m->rng, 10) ? NODE_ONLINE : NODE_FAILED;
	if (rng_below(&m->rng, 20) == 0)
		fake_blk_flip(b);
}

static void model_report(struct model *m)
{
	struct ring_key key = { .group = RIG_FULL };
	uint32_t c = rng_below(&m->rng, 24);

	if (!m->len[c])
		return;
	rig_key(c, rng_below(&m->rng, m->len[c]), key.key);
	mm_report(r->c, r->sp, &key, KVMM_BAD);
}

static void model_step(struct model *m)
{
	uint32_t c = rng_below(&m->rng, 24);

	switch (rng_below(&m->rng, 16)) {
	case 0 ... 7:
		model_publish(m);
		break;
	case 8 ... 9:
		model_pin(m);
		break;
	case 10 ... 11:
		model_fetch(m);
		break;
	case 12:
		if (m->len[c])
			rig_touch(r, RIG_FULL, c, m->len[c]);
		break;
	case 13:
		if (rng_below(&m->rng, 10) == 0)
			model_fault(m);
		break;
	case 14:
		if (rng_below(&m->rng, 20) == 0)
			model_report(m);
		else
			reclaim(1 + rng_below(&m->rng, 16));
		break;
	default:
		if (rng_below(&m->rng, 20) == 0)
			pool_evacuate(kv());
		rig_poll(r);
		break;
	}
}

static void model_round(uint64_t seed, unsigned int steps)
{
	struct rig_opts o = {
		.dram_bytes = 96 * 4096, .nvme_bytes = 200 * 4096,
		.direct_reclaim_ns = NSEC_PER_MSEC,
	};
	struct model m = { 0 };
	unsigned int i;

	start(&o);
	rng_seed(&m.rng, seed);
	r->blk->rng = &m.rng;
	for (i = 0; i < steps; i++) {
		model_step(&m);
		rig_check(r);
	}
	for (i = 0; i < 16; i++)
		if (m.pinned[i].frame)
			model_pin(&m);
	/* it recovers by itself, and no frame and no slot is lost */
	r->blk->n.state = NODE_ONLINE;
	memset(r->blk->hold, 0, sizeof(r->blk->hold));
	memset(r->blk->err, 0, sizeof(r->blk->err));
	memset(r->blk->refuse, 0, sizeof(r->blk->refuse));
	r->blk->unwritable = false;
	r->blk->rng = NULL;
	rig_settle(r, 3000);
	rig_run(r, 30);
	rig_check(r);
	for (i = 0; i < 16; i++)
		if (m.pinned[i].frame)
			rig_pin(r, RIG_FULL, m.pinned[i].frame, -1);
	rig_run(r, 30);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(kv()->nr_pages, 0);
	assert_int_equal(kv()->nr_loading, 0);
	assert_int_equal(kv()->nr_writing, 0);
	assert_int_equal(fake_blk_slots(r->blk),
			 rig_pool(r, RIG_FULL, RIG_NVME)->nr_pages);
	rig_check(r);
	assert_true(m.published > 0);
}

static void the_laws_hold_whatever_happens(void **state)
{
	unsigned int rounds = test_long() ? 50 : 6, i;
	uint64_t seed = test_seed();

	for (i = 0; i < rounds; i++) {
		print_message("seed %llu\n", (unsigned long long)(seed + i));
		model_round(seed + i, 1500);
	}
}

int main(void)
{
#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(clean_pages_leave_without_io_tail_first),
		T(dirty_pages_are_written_while_ready_and_dropped_later),
		T(the_chain_used_longest_ago_leaves_first),
		T(a_pinned_page_stays_and_so_does_its_parent),
		T(window_pages_leave_whatever_hangs_on_them),
		T(a_chain_that_was_never_touched_can_leave),
		T(pinned_pages_do_not_hide_the_rest),
		T(without_a_node_below_leaves_are_dropped),
		T(a_node_that_takes_no_writes_does_not_stop_reclaim),
		T(a_page_that_the_medium_refused_is_dropped_not_tried_again),
		T(a_last_copy_with_children_anywhere_is_kept),
		T(without_closure_the_check_fails),
		T(pages_spill_and_come_back),
		T(frames_come_back_above_the_watermark_by_themselves),
		T(a_full_lower_node_forgets_the_coldest),
		T(memory_moves_to_the_class_that_needs_it),
		T(a_squeezed_class_gets_what_another_does_not_use),
		T(a_wait_is_timed_from_its_begin_to_its_end),
		T(an_extent_with_a_pinned_page_is_not_emptied),
		T(extents_busy_with_io_are_emptied_where_there_is_no_other),
		T(another_extent_is_tried_after_one_that_stayed),
		T(a_space_may_end_while_its_extent_is_emptied),
		T(a_reported_page_is_found_nowhere_and_its_reader_keeps_it),
		T(reports_of_a_pinned_chain_look_at_each_page_once),
		T(a_touch_of_what_the_frame_no_longer_holds_is_ignored),
		T(the_laws_hold_whatever_happens),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
