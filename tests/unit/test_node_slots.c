/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/node/nvme_slots.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/rand.h"
#include "tests/lib/unit.h"

#define SEG	(1u << 20)
#define OFF	(1u << 20)

static void alloc_ok(struct slot_store *s, uint32_t len, struct node_slot *slot)
{
	assert_int_equal(slots_alloc(s, len, slot), 0);
	assert_true(slots_check(s));
}

static void free_ok(struct slot_store *s, const struct node_slot *slot)
{
	assert_int_equal(slots_free(s, slot), 0);
	assert_true(slots_check(s));
}

static void length_is_rounded_to_a_block(void **state)
{
	struct slot_store s;
	struct node_slot a, b;

	assert_int_equal(slots_init(&s, OFF, SEG, 4, NULL, 7), 0);
	alloc_ok(&s, 4097, &a);
	alloc_ok(&s, 8192, &b);
	assert_int_equal(slots_bytes(&s, &a), 8192);
	assert_int_equal(s.used_bytes, 2 * 8192);
	assert_int_equal(a.off, OFF);
	assert_int_equal(b.off, OFF + 8192);	/* same class, next slot */
	free_ok(&s, &a);
	assert_int_equal(slots_bytes(&s, &a), 0);
	free_ok(&s, &b);
	assert_int_equal(s.used_bytes, 0);
	slots_fini(&s);
}

static void no_sequence_number_is_given_twice(void **state)
{
	struct slot_store s;
	struct node_slot a, b;

	assert_int_equal(slots_init(&s, OFF, SEG, 1, NULL, 100), 0);
	alloc_ok(&s, SEG, &a);
	free_ok(&s, &a);
	alloc_ok(&s, SEG, &b);
	assert_int_equal(a.off, b.off);
	assert_int_equal(a.seq, 100);
	assert_int_equal(b.seq, 101);
	slots_fini(&s);
}

static void foreign_and_double_frees_are_refused(void **state)
{
	struct slot_store s;
	struct node_slot a, x;

	assert_int_equal(slots_init(&s, OFF, SEG, 2, NULL, 1), 0);
	alloc_ok(&s, 8192, &a);
	x = a;
	x.off += 4096;		/* inside a slot */
	assert_int_equal(slots_free(&s, &x), -EINVAL);
	x.off = a.off + 8192;	/* a slot that is free */
	assert_int_equal(slots_free(&s, &x), -EINVAL);
	x.off = OFF + SEG;	/* an empty segment */
	assert_int_equal(slots_free(&s, &x), -EINVAL);
	x.off = OFF + 2 * SEG;	/* behind the end */
	assert_int_equal(slots_free(&s, &x), -EINVAL);
	x.off = 0;
	assert_int_equal(slots_free(&s, &x), -EINVAL);
	free_ok(&s, &a);
	assert_int_equal(slots_free(&s, &a), -EINVAL);
	assert_true(slots_check(&s));
	slots_fini(&s);
}

static void segment_changes_class_only_when_empty(void **state)
{
	struct slot_store s;
	struct node_slot a[4], b;

	assert_int_equal(slots_init(&s, OFF, SEG, 1, NULL, 1), 0);
	for (int i = 0; i < 4; i++)
		alloc_ok(&s, SEG / 4, &a[i]);
	assert_int_equal(slots_alloc(&s, SEG / 4, &b), -ENOSPC);
	for (int i = 0; i < 3; i++)
		free_ok(&s, &a[i]);
	assert_int_equal(slots_alloc(&s, SEG / 2, &b), -ENOSPC);
	free_ok(&s, &a[3]);
	alloc_ok(&s, SEG / 2, &b);
	slots_fini(&s);
}

static void slots_come_from_few_segments(void **state)
{
	struct slot_store s;
	struct node_slot a[8], b;

	assert_int_equal(slots_init(&s, OFF, SEG, 8, NULL, 1), 0);
	for (int i = 0; i < 8; i++)
		alloc_ok(&s, SEG / 4, &a[i]);	/* two segments */
	free_ok(&s, &a[5]);
	alloc_ok(&s, SEG / 4, &b);
	assert_int_equal(b.off, a[5].off);
	slots_fini(&s);
}

static void unwritten_segments_are_the_last_resort(void **state)
{
	uint64_t written[1] = { 0 };
	struct slot_store s;
	struct node_slot a;

	bitmap_set(written, 2);
	assert_int_equal(slots_init(&s, OFF, SEG, 3, written, 1), 0);
	alloc_ok(&s, SEG, &a);
	assert_int_equal(a.off, OFF + 2 * SEG);
	alloc_ok(&s, SEG, &a);
	assert_int_equal(a.off, OFF);
	slots_fini(&s);
}

static void zeroing_makes_segments_ready(void **state)
{
	uint64_t written[1] = { 0 };
	struct slot_store s;
	struct node_slot a, b;
	int z;

	assert_int_equal(slots_init(&s, OFF, SEG, 2, written, 1), 0);
	z = slots_zero_next(&s);
	assert_int_equal(z, 0);
	assert_true(slots_check(&s));
	/* under way: given to nobody */
	alloc_ok(&s, SEG, &a);
	assert_int_equal(a.off, OFF + SEG);
	assert_int_equal(slots_alloc(&s, SEG, &b), -ENOSPC);
	slots_zero_done(&s, (uint32_t)z, 0);
	assert_true(slots_check(&s));
	assert_int_equal(s.nr_ready, 1);
	alloc_ok(&s, SEG, &b);
	/* the other one is in use, and is still to be written when empty */
	assert_int_equal(slots_zero_next(&s), -ENOENT);
	free_ok(&s, &a);
	assert_int_equal(slots_zero_next(&s), 1);
	slots_zero_done(&s, 1, 0);
	assert_false(slots_zero_wanted(&s));
	slots_fini(&s);
}

static void zeroing_gives_up_after_some_tries(void **state)
{
	uint64_t written[1] = { 0 };
	struct slot_store s;
	struct node_slot a;

	assert_int_equal(slots_init(&s, OFF, SEG, 1, written, 1), 0);
	for (int i = 0; i < SLOT_ZERO_TRIES; i++) {
		assert_int_equal(slots_zero_next(&s), 0);
		slots_zero_done(&s, 0, -EIO);
		assert_true(slots_check(&s));
	}
	assert_int_equal(slots_zero_next(&s), -ENOENT);
	alloc_ok(&s, SEG, &a);		/* still better than nothing */
	slots_fini(&s);
}

static void no_space_for_zeroes_is_no_try(void **state)
{
	struct slot_store s;
	struct node_slot a;

	assert_int_equal(slots_init(&s, OFF, SEG, 1, NULL, 1), 0);
	alloc_ok(&s, 4096, &a);
	slots_mark_bad(&s, &a);
	free_ok(&s, &a);
	for (int i = 0; i < 3 * SLOT_ZERO_TRIES; i++) {
		assert_int_equal(slots_zero_next(&s), 0);
		slots_zero_done(&s, 0, i % 2 ? -ENOSPC : -ECANCELED);
		assert_true(slots_check(&s));
	}
	assert_int_equal(slots_zero_next(&s), 0);
	slots_zero_done(&s, 0, 0);
	alloc_ok(&s, SEG, &a);
	slots_fini(&s);
}

static void bad_slot_goes_to_quarantine(void **state)
{
	struct slot_store s;
	struct node_slot a, b, c;

	assert_int_equal(slots_init(&s, OFF, SEG, 1, NULL, 1), 0);
	alloc_ok(&s, SEG / 2, &a);
	slots_mark_bad(&s, &a);
	assert_true(slots_check(&s));
	alloc_ok(&s, SEG / 2, &b);
	free_ok(&s, &a);
	assert_int_equal(s.nr_bad, 1);
	assert_int_equal(s.bad_bytes, SEG / 2);
	assert_int_equal(s.used_bytes, SEG / 2);
	assert_int_equal(slots_free(&s, &a), -EINVAL);
	assert_int_equal(slots_bytes(&s, &a), 0);
	assert_int_equal(slots_alloc(&s, SEG / 2, &c), -ENOSPC);
	free_ok(&s, &b);

	/* empty but for the bad one: not used before it was written anew */
	assert_int_equal(slots_alloc(&s, SEG, &c), -ENOSPC);
	assert_int_equal(slots_zero_next(&s), 0);
	slots_zero_done(&s, 0, 0);
	assert_true(slots_check(&s));
	assert_int_equal(s.bad_bytes, 0);
	alloc_ok(&s, SEG, &c);
	slots_fini(&s);
}

static void segment_that_stays_bad_is_not_used_again(void **state)
{
	struct slot_store s;
	struct node_slot a;

	assert_int_equal(slots_init(&s, OFF, SEG, 1, NULL, 1), 0);
	alloc_ok(&s, 4096, &a);
	slots_mark_bad(&s, &a);
	free_ok(&s, &a);
	for (int i = 0; i < SLOT_ZERO_TRIES; i++) {
		assert_int_equal(slots_zero_next(&s), 0);
		slots_zero_done(&s, 0, -EIO);
		assert_true(slots_check(&s));
	}
	assert_int_equal(slots_zero_next(&s), -ENOENT);
	assert_int_equal(slots_alloc(&s, 4096, &a), -ENOSPC);
	assert_int_equal(s.bad_bytes, 4096);
	slots_fini(&s);
}

static void victim_is_the_emptiest_segment_of_another_size(void **state)
{
	struct slot_store s;
	struct node_slot a[8], b, c;
	struct node_range r;

	assert_int_equal(slots_init(&s, OFF, SEG, 4, NULL, 1), 0);
	for (int i = 0; i < 8; i++)
		alloc_ok(&s, SEG / 4, &a[i]);	/* segments 0, 1 */
	alloc_ok(&s, SEG, &b);			/* 2 */
	alloc_ok(&s, SEG / 8, &c);		/* 3 */
	free_ok(&s, &a[6]);
	assert_int_equal(slots_victim(&s, SEG, 0, &r), 0);
	assert_int_equal(r.off, OFF + 3 * SEG);
	assert_int_equal(r.slot_bytes, SEG / 8);
	assert_int_equal(r.nr_used, 1);
	assert_int_equal(slots_victim(&s, SEG, 1, &r), 0);
	assert_int_equal(r.off, OFF + SEG);
	assert_int_equal(r.nr_used, 3);
	assert_int_equal(slots_victim(&s, SEG, 2, &r), 0);
	assert_int_equal(r.off, OFF);
	assert_int_equal(r.end, OFF + SEG);
	assert_int_equal(slots_victim(&s, SEG, 3, &r), -ENOENT);

	/* freeing what it names makes room */
	assert_int_equal(slots_alloc(&s, SEG, &b), -ENOSPC);
	free_ok(&s, &c);
	alloc_ok(&s, SEG, &b);
	slots_fini(&s);
}

static void many_sizes_share_classes_at_little_waste(void **state)
{
	struct slot_store s;
	struct node_slot a;

	assert_int_equal(slots_init(&s, OFF, 4 * SEG, 400, NULL, 1), 0);
	for (uint32_t i = 1; i <= 300; i++) {
		uint32_t len = i * 12000;

		alloc_ok(&s, len, &a);
		assert_true(slots_bytes(&s, &a) >= len);
		assert_true(slots_bytes(&s, &a) <=
			    round_up(len, 4096) * 9 / 8 + 4096);
	}
	assert_true(s.nr_classes < SLOT_MAX_CLASSES / 2);
	slots_fini(&s);
}

/* What was used is told of; what never was, and the last that is ready, is not. */
static void empty_segments_are_told_of_once(void **state)
{
	struct node_slot slot[3];
	struct slot_store s;
	int a, b;

	assert_int_equal(slots_init(&s, OFF, SEG, 3, NULL, 0), 0);
	assert_false(slots_discard_wanted(&s));
	for (int i = 0; i < 3; i++)
		alloc_ok(&s, SEG, &slot[i]);
	free_ok(&s, &slot[0]);
	assert_int_equal(slots_discard_next(&s), -ENOENT);	/* the last */
	free_ok(&s, &slot[1]);
	free_ok(&s, &slot[2]);
	a = slots_discard_next(&s);
	assert_true(a >= 0);
	assert_true(slots_check(&s));
	b = slots_discard_next(&s);
	assert_true(b >= 0 && b != a);
	assert_int_equal(slots_discard_next(&s), -ENOENT);
	slots_discard_done(&s, (uint32_t)a, true);
	slots_discard_done(&s, (uint32_t)b, false);	/* once more */
	assert_true(slots_check(&s));
	assert_int_equal(s.nr_ready, 3);
	assert_int_equal(slots_discard_next(&s), b);
	slots_discard_done(&s, (uint32_t)b, true);

	/* and what the medium knows to be empty is used last */
	alloc_ok(&s, SEG, &slot[0]);
	assert_int_not_equal(slot[0].off, slots_seg_off(&s, (uint32_t)a));
	assert_int_not_equal(slot[0].off, slots_seg_off(&s, (uint32_t)b));
	free_ok(&s, &slot[0]);
	slots_fini(&s);
}

/* What was written before can be written again when the medium is full. */
static void written_segments_come_before_raw_ones(void **state)
{
	uint64_t written = 1;		/* the first of two */
	struct node_slot slot[4], again;
	struct slot_store s;

	assert_int_equal(slots_init(&s, OFF, SEG, 2, &written, 0), 0);
	for (int i = 0; i < 3; i++)
		alloc_ok(&s, SEG / 2, &slot[i]);
	assert_true(slot[2].off >= slots_seg_off(&s, 1));	/* raw */
	free_ok(&s, &slot[0]);
	alloc_ok(&s, SEG / 2, &again);
	assert_int_equal(again.off, slot[0].off);
	slots_fini(&s);
}

static void too_long_is_refused(void **state)
{
	struct slot_store s;
	struct node_slot a;

	assert_int_equal(slots_init(&s, OFF, SEG, 1, NULL, 1), 0);
	assert_int_equal(slots_alloc(&s, SEG + 1, &a), -E2BIG);
	assert_int_equal(slots_alloc(&s, UINT32_MAX, &a), -E2BIG);
	assert_int_equal(slots_alloc(&s, 0, &a), -E2BIG);
	slots_fini(&s);
}

/*
 * Against a map of the bytes: no two slots overlap, accounts agree, and in the
 * end everything is free again.
 */
static void random_use_keeps_every_law(void **state)
{
	enum { MAX = 4000, SEGS = 24 };
	static struct node_slot slot[MAX];
	static uint32_t len[MAX];
	static uint8_t map[SEGS * (SEG / 4096)];
	static const uint32_t sizes[] = { 4096, 8192, 12288, 65536, 70000,
					  SEG / 2, SEG };
	unsigned int steps = test_long() ? 400000 : 20000;
	uint64_t written[1] = { 0x5a5a5a };
	struct slot_store s;
	uint64_t used = 0;
	unsigned int nr = 0;
	struct rng r;
	int z = -1, d = -1;

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&r, test_seed());
	memset(map, 0, sizeof(map));
	assert_int_equal(slots_init(&s, OFF, SEG, SEGS, written, 1), 0);
	for (unsigned int i = 0; i < steps; i++) {
		bool grow = rng_below(&r, 1000) < (i / 2000 % 2 ? 400 : 600);

		if (grow && nr < MAX) {
			uint32_t l = sizes[rng_below(&r, ARRAY_SIZE(sizes))];
			int err = slots_alloc(&s, l, &slot[nr]);
			uint64_t b, end;

			if (err) {
				assert_int_equal(err, -ENOSPC);
				continue;
			}
			b = (slot[nr].off - OFF) / 4096;
			end = b + round_up(l, 4096) / 4096;
			while (b < end) {
				assert_int_equal(map[b], 0);
				map[b++] = 1;
			}
			used += round_up(l, 4096);
			len[nr++] = l;
		} else if (nr) {
			unsigned int k = (unsigned int)rng_below(&r, nr);
			bool bad = !rng_below(&r, 50);

			if (bad)
				slots_mark_bad(&s, &slot[k]);
			assert_int_equal(slots_free(&s, &slot[k]), 0);
			used -= round_up(len[k], 4096);
			memset(&map[(slot[k].off - OFF) / 4096], 0,
			       round_up(len[k], 4096) / 4096);
			slot[k] = slot[--nr];
			len[k] = len[nr];
		}
		assert_int_equal(s.used_bytes, used);
		if (!rng_below(&r, 16) && z < 0)
			z = slots_zero_next(&s);
		else if (z >= 0 && !rng_below(&r, 8)) {
			slots_zero_done(&s, (uint32_t)z,
					rng_below(&r, 10) ? 0 : -EIO);
			z = -1;
		}
		if (!rng_below(&r, 16) && d < 0) {
			d = slots_discard_next(&s);
		} else if (d >= 0 && !rng_below(&r, 4)) {
			slots_discard_done(&s, (uint32_t)d, rng_below(&r, 4));
			d = -1;
		}
		if (!(i % 64))
			assert_true(slots_check(&s));
	}
	while (nr)
		assert_int_equal(slots_free(&s, &slot[--nr]), 0);
	assert_true(slots_check(&s));
	assert_int_equal(s.used_bytes, 0);
	assert_int_equal(s.nr_classes, 0);
	slots_fini(&s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(length_is_rounded_to_a_block),
		cmocka_unit_test(no_sequence_number_is_given_twice),
		cmocka_unit_test(foreign_and_double_frees_are_refused),
		cmocka_unit_test(segment_changes_class_only_when_empty),
		cmocka_unit_test(slots_come_from_few_segments),
		cmocka_unit_test(unwritten_segments_are_the_last_resort),
		cmocka_unit_test(zeroing_makes_segments_ready),
		cmocka_unit_test(zeroing_gives_up_after_some_tries),
		cmocka_unit_test(no_space_for_zeroes_is_no_try),
		cmocka_unit_test(bad_slot_goes_to_quarantine),
		cmocka_unit_test(segment_that_stays_bad_is_not_used_again),
		cmocka_unit_test(victim_is_the_emptiest_segment_of_another_size),
		cmocka_unit_test(many_sizes_share_classes_at_little_waste),
		cmocka_unit_test(empty_segments_are_told_of_once),
		cmocka_unit_test(written_segments_come_before_raw_ones),
		cmocka_unit_test(too_long_is_refused),
		cmocka_unit_test(random_use_keeps_every_law),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
