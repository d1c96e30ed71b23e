/* SPDX-License-Identifier: Apache-2.0 */
/* What a block node finds is not what it ought to be: mm takes what is sound. */
#include <string.h>

#include "daemon/mm/tier.h"
#include "ipc/base/bits.h"
#include "tests/lib/persist_rig.h"

/* The @nth record of the log. */
static struct node_record *record(unsigned int nth)
{
	unsigned int i;

	for (i = 0; i < disk.nr; i++)
		if (disk.said[i].what == FAKE_ADD && !nth--)
			return &disk.said[i].rec;
	fail_msg("no such record");
	return NULL;
}

static void forget(unsigned int nth)
{
	struct node_record *rec = record(nth);

	rec->slot.off = DISK - 4096;	/* newer ones of that slot come */
	rec->slot.seq = 0;
	memset(rec->meta, 0, sizeof(rec->meta));
}

static void page_without_its_parent_is_not_taken(void **state)
{
	fill(RIG_FULL, 1, 6);
	fill(RIG_FULL, 2, 2);
	rig_stop(r);
	forget(2);
	again();
	assert_int_equal(count()->recover_orphan, 3);
	assert_int_equal(count()->pgrecover, 4);
	assert_non_null(rig_page(r, RIG_FULL, 1, 1));
	assert_null(rig_page(r, RIG_FULL, 1, 3));
	assert_int_equal(fake_blk_slots(r->blk), 4);
	rig_stop(r);
	assert_int_equal(fake_disk_records(&disk), 4);
	again();
	assert_int_equal(count()->recover_orphan, 0);
}

static void parent_that_is_in_memory_only_is_no_parent_on_disk(void **state)
{
	fill(RIG_FULL, 1, 3);
	rig_stop(r);
	forget(0);
	opts.hold = true;
	rig_start(r, &opts);
	assert_int_equal(rig_publish_chain(r, RIG_FULL, 1, 2), 2);
	rig_recover(r);
	assert_int_equal(count()->recover_orphan, 2);
	assert_int_equal(count()->pgrecover, 0);
	rig_check(r);
}

static void window_page_needs_no_parent(void **state)
{
	fill(RIG_WINDOW, 1, 4);
	rig_stop(r);
	forget(1);
	again();
	assert_int_equal(count()->pgrecover, 3);
	assert_null(rig_page(r, RIG_WINDOW, 1, 2)->parent);
	assert_int_equal(rig_fetch_check(r, RIG_WINDOW, 1, 0, 4), 3);
}

static void newer_record_of_a_page_holds(void **state)
{
	struct fake_said old;
	unsigned int i;

	fill(RIG_FULL, 1, 2);
	/* the slot's removal gets lost, and the page is written elsewhere */
	for (i = 0; disk.said[i].rec.slot.seq != record(1)->slot.seq; i++)
		;
	old = disk.said[i];
	page_drop_all(rig_page(r, RIG_FULL, 1, 1));
	fill(RIG_FULL, 1, 2);
	rig_stop(r);
	for (i = 0; i < disk.nr; i++)
		if (disk.said[i].what == FAKE_DEL)
			disk.said[i].rec.slot.seq = 0;
	assert_int_equal(fake_disk_records(&disk), 3);
	again();
	assert_int_equal(count()->recover_old, 1);
	assert_int_equal(fake_blk_slots(r->blk), 2);
	assert_true(copy_at(rig_page(r, RIG_FULL, 1, 1), RIG_NVME)->slot.seq >
		    old.rec.slot.seq);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 2), 2);
	rig_stop(r);
	assert_int_equal(fake_disk_records(&disk), 2);
	again();
}

/* Bytes of the record's meta as persist.c lays them out. */
#define META_LABEL	64
#define META_RAW	68
#define META_GROUP	84
#define META_FLAGS	86
#define META_FORMAT	87

static void records_that_make_no_sense_are_not_taken(void **state)
{
	fill(RIG_WINDOW, 1, 7);
	rig_stop(r);
	record(0)->meta[META_LABEL]++;
	record(1)->meta[META_RAW] ^= 1;
	record(2)->meta[META_GROUP] = 9;
	record(3)->meta[META_FLAGS] |= 0x80;
	record(4)->meta[META_FORMAT] = 3;
	record(5)->meta[META_GROUP] = RIG_BIG;
	again();
	assert_int_equal(count()->recover_label, 1);
	assert_int_equal(count()->recover_bad, 5);
	assert_int_equal(count()->pgrecover, 1);
	assert_int_equal(fake_blk_slots(r->blk), 1);
}

static void labels_that_make_no_sense_are_not_taken(void **state)
{
	size_t len, i;
	uint8_t *b;

	fill(RIG_FULL, 1, 2);
	rig_stop(r);
	for (i = 0; disk.said[i].what != FAKE_LABEL; i++)
		;
	b = disk.said[i].bytes;
	len = disk.said[i].len;
	opts.no_client = true;
	/* each byte of its head and of the descriptor's, and all lengths */
	for (i = 0; i < 64; i++) {
		struct fake_said *s = &disk.said[0];
		unsigned int nr = disk.nr;

		assert_ptr_equal(s->bytes, b);
		b[i] ^= 0xff;
		rig_start(r, &opts);
		rig_recover(r);
		fake_blk_die(r->blk, NULL);
		disk.nr = nr;
		rig_stop(r);
		b[i] ^= 0xff;
	}
	for (i = 0; i < len; i += 7) {
		unsigned int nr = disk.nr;

		disk.said[0].len = i;
		rig_start(r, &opts);
		rig_recover(r);
		assert_true(list_empty(&r->mm->spaces));
		fake_blk_die(r->blk, NULL);
		disk.nr = nr;
		rig_stop(r);
	}
	disk.said[0].len = len;
	again();
	assert_int_equal(count()->pgrecover, 2);
}

static void end_in_the_middle_loses_nothing(void **state)
{
	unsigned int rounds, i;

	fill(RIG_FULL, 1, 40);
	rig_stop(r);
	for (rounds = 0; rounds < 4; rounds++) {
		opts.hold = true;
		rig_start(r, &opts);
		r->blk->hold_recovery = false;
		for (i = 0; i < rounds; i++)
			rig_poll(r);
		rig_stop(r);
		assert_int_equal(fake_disk_records(&disk), 40);
	}
	opts.hold = false;
	again();
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 1, 0, 40), 40);
}

static void recovery_that_fails_is_said_and_the_node_serves(void **state)
{
	fill(RIG_FULL, 1, 2);
	rig_stop(r);
	rig_start(r, &opts);
	/* the first round has been: not with anything of it */
	rig_stop(r);
	opts.hold = true;
	rig_start(r, &opts);
	r->blk->recover_err = -EIO;
	rig_recover(r);
	assert_non_null(strstr(r->said, "could not be found again"));
	fill(RIG_FULL, 9, 2);
	assert_int_equal(rig_fetch_check(r, RIG_FULL, 9, 0, 2), 2);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		PERSIST_TEST(page_without_its_parent_is_not_taken),
		PERSIST_TEST(parent_that_is_in_memory_only_is_no_parent_on_disk),
		PERSIST_TEST(window_page_needs_no_parent),
		PERSIST_TEST(newer_record_of_a_page_holds),
		PERSIST_TEST(records_that_make_no_sense_are_not_taken),
		PERSIST_TEST(labels_that_make_no_sense_are_not_taken),
		PERSIST_TEST(end_in_the_middle_loses_nothing),
		PERSIST_TEST(recovery_that_fails_is_said_and_the_node_serves),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
