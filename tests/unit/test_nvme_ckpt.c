/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints that are damaged, too old, or all that there is. */
#include "tests/lib/node_medium.h"

static void damaged_checkpoint_gives_way_to_the_one_before(void **state)
{
	struct rig r;
	int area;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	make_ckpt(&r, &before);
	area = newest_area(&r);
	rig_close(&r);
	/* the journal from the older one on is still there: half a ring */
	poke_random(&r, ckpt_at(area, 1), NVME_BLOCK, 1);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_close(&r);

	/* the block that makes it valid: the same */
	poke_random(&r, ckpt_at(area, 0), NVME_BLOCK, 1);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_fini(&r);
}

/* A closed store whose journal has left the older checkpoint behind; where the
 * newer one is. */
static int only_ckpt(struct rig *r)
{
	int area;

	scan_rig(r);
	add_blocks(r, &before, 4);
	make_ckpt(r, &before);
	make_ckpt(r, &before);
	fill_half(r, &before);
	area = newest_area(r);
	rig_close(r);
	return area;
}

static void good_blocks_of_the_only_checkpoint_count(void **state)
{
	struct rig r;
	int area;

	area = only_ckpt(&r);
	poke_random(&r, ckpt_at(area, 2), NVME_BLOCK, 1);
	owner_open(&r, &after);
	assert_int_equal(after.nr, 3 * PER_BLOCK);
	assert_known(&after, &before);
	assert_true(r.n->stats.recover_dropped > 0);
	rig_fini(&r);
}

static void store_without_a_checkpoint_is_damaged(void **state)
{
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	rig_close(&r);
	poke_random(&r, ckpt_at(0, 0), NVME_BLOCK, 1);
	poke_random(&r, ckpt_at(1, 0), NVME_BLOCK, 2);
	assert_rebuilt(&r, "checkpoint");
	rig_fini(&r);
}

/* What was removed must not come back by way of an older checkpoint. */
static void checkpoint_that_the_journal_has_left_is_refused(void **state)
{
	struct rig r;
	int area;

	area = only_ckpt(&r);
	poke_random(&r, ckpt_at(area, 0), NVME_BLOCK, 1);
	assert_rebuilt(&r, "checkpoint is damaged");
	rig_fini(&r);
}

/* The ring was written over, but not where reading begins: numbers were skipped
 * there, and the blocks of the lap before are still in their places. */
static void journal_that_was_written_over_further_on_is_refused(void **state)
{
	uint64_t ring, over;
	struct nvme_ent_end end;
	char old[NVME_BLOCK];
	struct rig r;
	int area;

	long_rig(&r);
	ring = super.journal_bytes / NVME_BLOCK;
	add_blocks(&r, &before, 4);
	make_ckpt(&r, &before);
	make_ckpt(&r, &before);
	area = newest_area(&r);
	memcpy(&end, nvme_block_next(block_get(&r, ckpt_at(!area, 0)), NULL),
	       sizeof(end));
	peek(&r, journal_at(end.journal_seq), old, sizeof(old));
	fill_half(&r, &before);
	over = to_nvme(r.n)->journal.head - end.journal_seq;
	rig_close(&r);
	assert_true(over >= ring + 2);
	poke(&r, journal_at(end.journal_seq), old, sizeof(old));
	if (over > ring + 2)
		poke_random(&r, journal_at(end.journal_seq + 1), NVME_BLOCK, 1);
	poke_random(&r, ckpt_at(area, 0), NVME_BLOCK, 1);
	assert_refused(&r, "checkpoint is damaged");
	rig_fini(&r);
}

/* A checkpoint's number is its own, whatever became of those before. */
static void attempts_never_share_a_number(void **state)
{
	struct nvme_ent_end end;
	uint64_t last = 0;
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	for (int i = 0; i < 3; i++) {
		make_ckpt(&r, i ? &after : &before);
		memcpy(&end, nvme_block_next(block_get(&r,
				ckpt_at(newest_area(&r), 0)), NULL),
		       sizeof(end));
		assert_true(end.number >> NVME_CKPT_SHIFT > last);
		last = end.number >> NVME_CKPT_SHIFT;
		assert_int_equal(last, to_nvme(r.n)->open.super.opens);
		rig_close(&r);
		owner_open(&r, &after);
	}
	rig_fini(&r);
}

static void owner_is_told_how_many_will_come(void **state)
{
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	rig_close(&r);
	owner_open(&r, &after);		/* there is no checkpoint of them yet */
	assert_int_equal(after.expected, 0);
	owners_equal(&after, &before);
	make_ckpt(&r, &after);
	rig_close(&r);
	owner_open(&r, &before);
	assert_true(before.expected >= 4);
	assert_true(before.nr_found >= before.expected);
	owners_equal(&before, &after);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(damaged_checkpoint_gives_way_to_the_one_before),
		cmocka_unit_test(good_blocks_of_the_only_checkpoint_count),
		cmocka_unit_test(store_without_a_checkpoint_is_damaged),
		cmocka_unit_test(checkpoint_that_the_journal_has_left_is_refused),
		cmocka_unit_test(journal_that_was_written_over_further_on_is_refused),
		cmocka_unit_test(attempts_never_share_a_number),
		cmocka_unit_test(owner_is_told_how_many_will_come),
	};

	return run_on_both_engines(tests);
}
