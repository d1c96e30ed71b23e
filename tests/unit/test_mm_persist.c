/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a block node finds again after a restart, seen from mm: pages, their
 * spaces, and nothing that must not be there.
 */
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/mm/tier.h"
#include "ipc/base/bits.h"
#include "tests/lib/persist_rig.h"

static void pages_are_found_again_after_an_orderly_end(void **state)
{
	fill(RIG_FULL, 1, LEN);
	fill(RIG_WINDOW, 2, LEN);
	fill(RIG_BIG, 3, 4);
	rig_stop(r);
	again();
	assert_int_equal(count()->pgrecover, 2 * LEN + 4);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, LEN), LEN);
	assert_int_equal(rig_fetch_check(r, RIG_WINDOW, 2, 0, LEN), LEN);
	assert_int_equal(rig_fetch_check(r, RIG_BIG, 3, 0, 4), 4);
	rig_check(r);
}

static void pages_are_found_again_after_a_death(void **state)
{
	fill(RIG_FULL, 1, LEN);
	rig_die(r, NULL);
	again();
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, LEN), LEN);
	rig_check(r);
}

static void what_a_page_is_comes_back_with_it(void **state)
{
	struct page *pg;

	opts.crc = true;
	rig_stop(r);
	rig_start(r, &opts);
	rig_recover(r);
	fill(RIG_FULL, 1, 2);
	rig_die(r, NULL);
	again();
	pg = rig_page(r, RIG_FULL, 1, 1);
	assert_non_null(pg);
	assert_ptr_equal(pg->parent, rig_page(r, RIG_FULL, 1, 0));
	assert_int_equal(pg->pos, 16);
	assert_true(pg->flags & PAGE_CRC);
	assert_true(pg->flags & PAGE_BOUND);
	assert_false(pg->parent->flags & PAGE_ROOT);
}

static void unflushed_tail_is_lost_in_one_piece(void **state)
{
	uint32_t i, n;

	fill(RIG_FULL, 1, 6);
	r->blk->hold_flush = true;
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 2, 6), 6);
	rig_push_down(r, RIG_FULL);
	/* three of six records get onto the medium */
	disk.flushed += 3;
	rig_die(r, NULL);
	again();
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 6), 6);
	for (n = 0; rig_page(r, RIG_FULL, 2, n); n++)
		;
	assert_int_equal(n, 3);
	for (i = n; i < 6; i++)
		assert_null(rig_page(r, RIG_FULL, 2, i));
}

static void data_that_was_lost_is_a_miss(void **state)
{
	fill(RIG_FULL, 1, LEN);
	fake_blk_flip(r->blk);
	rig_die(r, NULL);
	again();
	assert_int_equal(count()->pgrecover, LEN);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 1), 0);
	rig_settle(r, 1000);
	rig_check(r);
	/* and with it went what hung on it, on the disk, too */
	assert_null(rig_page(r, RIG_FULL, 1, LEN - 1));
	rig_die(r, NULL);
	assert_int_equal(fake_disk_records(&disk), 0);
	again();
}

/* What was found is coldest in the order of writing: heads of chains first. */
static void full_node_takes_pages_after_a_restart(void **state)
{
	uint32_t c;

	opts.dram_bytes = 256 * 4096;
	rig_stop(r);
	rig_start(r, &opts);
	rig_recover(r);
	for (c = 0; c < 8; c++)
		fill(RIG_FULL, c, 128);
	assert_int_equal(r->nvme->used, DISK);
	rig_die(r, NULL);
	again();
	assert_int_equal(count()->pgrecover, 8 * 128);
	fill(RIG_FULL, 20, LEN);
	assert_int_equal(rig_state(r, RIG_FULL, 20, LEN - 1, RIG_NVME),
			 COPY_READY);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 20, 0, LEN), LEN);
	rig_check(r);
}

static int readonly(const char *tenant)
{
	assert_string_equal(tenant, "default");
	return KVMM_MODE_READONLY;
}

static void space_is_found_without_a_client(void **state)
{
	fill(RIG_FULL, 1, LEN);
	rig_stop(r);
	opts.no_client = true;
	opts.found = readonly;
	again();
	assert_non_null(r->sp);
	assert_int_equal(mm_space_mode(r->sp), KVMM_MODE_READONLY);
	assert_int_equal(r->sp->nr_pages, LEN);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_extents, 0);
	rig_run(r, 20);
	assert_int_equal(r->sp->nr_pages, LEN);
	/* its first client gets it with all that is in it */
	rig_attach(r);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, LEN), LEN);
	rig_check(r);
}

static void label_goes_with_its_space(void **state)
{
	uint32_t i;

	fill(RIG_FULL, 1, LEN);
	assert_int_equal(fake_disk_labels(&disk), 1);
	for (i = LEN; i-- > 0;)
		page_drop_all(rig_page(r, RIG_FULL, 1, i));
	assert_int_equal(fake_disk_labels(&disk), 1);
	rig_client_exit(r);
	rig_run(r, 50);
	assert_true(list_empty(&r->mm->spaces));
	assert_int_equal(fake_disk_labels(&disk), 0);
	assert_int_equal(fake_disk_records(&disk), 0);
}

static void label_without_pages_goes_after_recovery(void **state)
{
	fill(RIG_FULL, 1, 1);
	r->blk->hold_flush = true;
	disk.flushed = 1;		/* the label */
	rig_die(r, NULL);
	assert_int_equal(fake_disk_labels(&disk), 1);
	opts.no_client = true;
	rig_start(r, &opts);
	rig_recover(r);
	rig_run(r, 50);
	assert_true(list_empty(&r->mm->spaces));
	assert_int_equal(fake_disk_labels(&disk), 0);
}

static int nobody(const char *tenant)
{
	return -ENOENT;
}

static void space_of_a_tenant_that_is_gone_is_given_up(void **state)
{
	fill(RIG_FULL, 1, LEN);
	rig_stop(r);
	opts.no_client = true;
	opts.found = nobody;
	rig_start(r, &opts);
	rig_recover(r);
	assert_true(list_empty(&r->mm->spaces));
	assert_int_equal(count()->recover_label, LEN);
	assert_int_equal(count()->pgrecover, 0);
	assert_non_null(strstr(r->said, "1 spaces given up"));
	assert_int_equal(fake_disk_labels(&disk), 0);
	assert_int_equal(fake_disk_records(&disk), 0);
	assert_int_equal(r->nvme->used, 0);
}

static bool resident(const char *p)
{
	unsigned char vec;

	return !mincore((void *)round_down((uintptr_t)p, 4096), 4096, &vec) &&
	       vec & 1;
}

static void memory_for_what_will_be_found_is_touched_before(void **state)
{
	struct mm *mm = r->mm;
	const uint64_t nr = 40000;
	uint64_t end;
	char *last;

	rig_settle(r, 1000);
	ahead_begin(mm, &mm->pages_ahead, &mm->pages, nr, 1 << 20);
	last = mm->pages.at + (nr - 100) * mm->pages.size;
	assert_true(last < mm->pages.end);
	for (end = deadline_in(10 * NSEC_PER_SEC);
	     mm->nr_jobs && !deadline_past(end);)
		rig_poll(r);
	assert_int_equal(mm->nr_jobs, 0);
	assert_true(resident(last));
	fill(RIG_FULL, 1, LEN);
	aheads_end(mm);
	assert_false(resident(last));
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, LEN), LEN);

	/* the end comes while it is under way */
	ahead_begin(mm, &mm->pages_ahead, &mm->pages, nr, SIZE_MAX);
	rig_check(r);
}

/* What there is no room for today may be wanted tomorrow. */
static void space_that_cannot_be_made_now_stays_on_the_disk(void **state)
{
	uint64_t dram = opts.dram_bytes;

	fill(RIG_FULL, 1, LEN);
	fill(RIG_BIG, 2, 3);
	rig_stop(r);
	opts.no_client = true;
	opts.dram_bytes = 4 * 4096;	/* no extent of BIG */
	rig_start(r, &opts);
	rig_run(r, 50);
	assert_int_equal(r->nvme->state, NODE_STARTING);
	assert_non_null(strstr(r->said, "cannot hold an extent"));
	assert_int_equal(fake_disk_labels(&disk), 1);
	assert_int_equal(fake_disk_records(&disk), LEN + 3);
	rig_stop(r);
	assert_int_equal(fake_disk_records(&disk), LEN + 3);
	opts.no_client = false;
	opts.dram_bytes = dram;
	again();
	assert_int_equal(count()->pgrecover, LEN + 3);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, LEN), LEN);
	rig_check(r);
}

static int may_not = -EUSERS;

static int not_yet(const char *tenant)
{
	return may_not ? may_not : KVMM_MODE_ON;
}

static void space_is_made_as_soon_as_it_can_be(void **state)
{
	fill(RIG_FULL, 1, LEN);
	rig_stop(r);
	opts.no_client = true;
	opts.found = not_yet;
	may_not = -EUSERS;
	rig_start(r, &opts);
	rig_run(r, 50);
	assert_int_equal(r->nvme->state, NODE_STARTING);
	may_not = 0;
	rig_recover(r);
	rig_attach(r);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, LEN), LEN);
	rig_check(r);
}

static void page_that_was_published_meanwhile_gets_its_copy(void **state)
{
	fill(RIG_FULL, 1, 3);
	rig_die(r, NULL);
	opts.hold = true;
	rig_start(r, &opts);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_dirty, 2);
	rig_recover(r);
	assert_int_equal(count()->pgrecover, 3);
	assert_int_equal(r->sp->nr_pages, 3);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_dirty, 0);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 3), 3);
}

static void nothing_is_read_or_written_before_all_is_found(void **state)
{
	struct rig_answer a;

	fill(RIG_FULL, 1, 3);
	rig_die(r, NULL);
	opts.hold = true;
	rig_start(r, &opts);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 2, 2), 2);
	rig_run(r, 20);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 3), 0);
	assert_int_equal(page_writeback(rig_page(r, RIG_FULL, 2, 0),
					&r->mm->node[RIG_DRAM],
					NODE_PRIO_WRITEBACK), -EAGAIN);
	/* one that is known already and cannot be read yet is a miss, too */
	r->blk->hold_recovery = false;
	rig_poll(r);
	r->blk->hold_recovery = true;
	rig_poll(r);
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, 1, 100), 500,
			       &a));
	assert_true(a.res[0].result < 0);
	rig_check(r);
	rig_recover(r);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 3), 3);
}

static void bad_page_is_not_found_again_while_it_is_read(void **state)
{
	struct ring_key k = { .group = RIG_FULL };
	struct rig_answer a;
	uint64_t tag;

	fill(RIG_FULL, 1, 3);
	r->blk->hold[NODE_READ] = true;
	tag = rig_fetch(r, RIG_FULL, 1, 1, 1, 5000);
	rig_poll(r);
	rig_key(1, 1, k.key);
	mm_report(r->c, r->sp, &k, KVMM_BAD);
	fake_blk_flush(r->blk);
	assert_int_equal(fake_disk_records(&disk), 1);
	rig_check(r);
	r->blk->hold[NODE_READ] = false;
	assert_true(rig_answer(r, tag, 5000, &a));
	rig_answer_put(r, &a);
	rig_die(r, NULL);
	again();
	assert_non_null(rig_page(r, RIG_FULL, 1, 0));
	assert_null(rig_page(r, RIG_FULL, 1, 1));
	assert_null(rig_page(r, RIG_FULL, 1, 2));
}

static void pages_wait_while_the_journal_is_full(void **state)
{
	struct mm_node *dram = &r->mm->node[RIG_DRAM];

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, LEN), LEN);
	r->blk->journal_full = true;
	assert_int_equal(page_writeback(rig_page(r, RIG_FULL, 1, LEN - 1), dram,
					NODE_PRIO_WRITEBACK), -EBUSY);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgdrop_gone, 0);
	r->blk->journal_full = false;
	rig_push_down(r, RIG_FULL);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, LEN), LEN);
	rig_check(r);
}

static void label_is_asked_for_again_unless_there_is_no_room(void **state)
{
	struct mm_node *dram = &r->mm->node[RIG_DRAM];

	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	r->blk->label_err = -EAGAIN;
	assert_int_equal(page_writeback(rig_page(r, RIG_FULL, 1, 1), dram,
					NODE_PRIO_WRITEBACK), -EBUSY);
	assert_int_equal(fake_blk_slots(r->blk), 0);
	r->blk->label_err = -ENOSPC;
	rig_push_down(r, RIG_FULL);
	assert_non_null(strstr(r->said, "no label"));
	/* good until the restart, and then not there */
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 2), 2);
	assert_int_equal(fake_disk_records(&disk), 0);
	rig_check(r);
}

static void checkpoint_holds_what_there_is(void **state)
{
	uint32_t i;

	fill(RIG_FULL, 1, LEN);
	fill(RIG_BIG, 2, 3);
	for (i = LEN; i-- > LEN / 2;)
		page_drop_all(rig_page(r, RIG_FULL, 1, i));
	fake_blk_checkpoint(r->blk, NULL, NULL);
	assert_int_equal(r->blk->nr_again, LEN / 2 + 3);
	assert_int_equal(disk.nr, 1 + LEN / 2 + 3);
	rig_die(r, NULL);
	again();
	assert_int_equal(count()->pgrecover, LEN / 2 + 3);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, LEN), LEN / 2);
	assert_int_equal(rig_fetch_check(r, RIG_BIG, 2, 0, 3), 3);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		PERSIST_TEST(pages_are_found_again_after_an_orderly_end),
		PERSIST_TEST(pages_are_found_again_after_a_death),
		PERSIST_TEST(what_a_page_is_comes_back_with_it),
		PERSIST_TEST(unflushed_tail_is_lost_in_one_piece),
		PERSIST_TEST(data_that_was_lost_is_a_miss),
		PERSIST_TEST(full_node_takes_pages_after_a_restart),
		PERSIST_TEST(space_is_found_without_a_client),
		PERSIST_TEST(label_goes_with_its_space),
		PERSIST_TEST(label_without_pages_goes_after_recovery),
		PERSIST_TEST(space_of_a_tenant_that_is_gone_is_given_up),
		PERSIST_TEST(memory_for_what_will_be_found_is_touched_before),
		PERSIST_TEST(space_that_cannot_be_made_now_stays_on_the_disk),
		PERSIST_TEST(space_is_made_as_soon_as_it_can_be),
		PERSIST_TEST(page_that_was_published_meanwhile_gets_its_copy),
		PERSIST_TEST(nothing_is_read_or_written_before_all_is_found),
		PERSIST_TEST(bad_page_is_not_found_again_while_it_is_read),
		PERSIST_TEST(pages_wait_while_the_journal_is_full),
		PERSIST_TEST(label_is_asked_for_again_unless_there_is_no_room),
		PERSIST_TEST(checkpoint_holds_what_there_is),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
