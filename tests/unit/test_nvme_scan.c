/* SPDX-License-Identifier: Apache-2.0 */
/* What is on the medium may be anything: damaged, stale, foreign, forged. */
#include "tests/lib/node_medium.h"

/* ---- the journal --------------------------------------------------------------- */

static void stale_blocks_of_a_torn_group_are_not_the_next_ones(void **state)
{
	char zero[NVME_BLOCK] = { 0 };
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 3);
	rig_close(&r);
	poke(&r, journal_at(2), zero, sizeof(zero));	/* torn: 1 and 3 are there */
	owner_open(&r, &after);
	assert_int_equal(after.nr, PER_BLOCK);
	add_blocks(&r, &after, 1);			/* is block 2 now */
	rig_close(&r);
	before = after;
	owner_open(&r, &after);
	assert_int_equal(after.nr, 2 * PER_BLOCK);
	owners_equal(&after, &before);
	rig_fini(&r);
}

/*
 * A device that says yes and writes nothing loses an opening's mark in the
 * superblock, and the next one has the same number. What the first has written all
 * the same is no continuation of what the second wrote before it.
 */
static void an_opening_that_left_no_mark_is_not_gone_on_with(void **state)
{
	char super1[NVME_BLOCK], super2[NVME_BLOCK];
	char zero[NVME_BLOCK] = { 0 };
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 2);
	rig_close(&r);
	peek(&r, 0, super1, sizeof(super1));
	peek(&r, NVME_SUPER2_OFF, super2, sizeof(super2));
	owner_open(&r, &after);
	add_blocks(&r, &after, 3);
	rig_close(&r);
	poke(&r, 0, super1, sizeof(super1));
	poke(&r, NVME_SUPER2_OFF, super2, sizeof(super2));
	poke(&r, journal_at(3), zero, sizeof(zero));
	owner_open(&r, &after);
	owners_equal(&after, &before);
	add_blocks(&r, &after, 1);		/* is block 3 now */
	rig_close(&r);
	before = after;
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_fini(&r);
}

static void journal_ends_at_what_is_no_block(void **state)
{
	struct nvme_block *b;
	struct rig r;

	for (int how = 0; how < 6; how++) {
		scan_rig(&r);
		add_blocks(&r, &before, 4);
		rig_close(&r);
		b = block_get(&r, journal_at(3));
		switch (how) {
		case 0:				/* noise */
			poke_random(&r, journal_at(3), NVME_BLOCK, 7);
			break;
		case 1:				/* one bit */
			b->reserved2[1] ^= 1;
			poke(&r, journal_at(3), b, NVME_BLOCK);
			break;
		case 2:				/* of another store */
			b->uuid[3] ^= 1;
			block_put(&r, journal_at(3), b);
			break;
		case 3:				/* of an older lap */
			b->seq -= super.journal_bytes / NVME_BLOCK;
			block_put(&r, journal_at(3), b);
			break;
		case 4:				/* of an older opening */
			b->epoch--;
			block_put(&r, journal_at(3), b);
			break;
		case 5:				/* of a checkpoint */
			b->kind = NVME_KIND_CKPT;
			block_put(&r, journal_at(3), b);
			break;
		}
		owner_open(&r, &after);
		assert_int_equal(after.nr, 2 * PER_BLOCK);
		assert_known(&after, &before);
		rig_fini(&r);
	}
}

static void blocks_in_another_order_are_not_read(void **state)
{
	char a[NVME_BLOCK], b[NVME_BLOCK];
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	rig_close(&r);
	peek(&r, journal_at(2), a, sizeof(a));
	peek(&r, journal_at(3), b, sizeof(b));
	poke(&r, journal_at(2), b, sizeof(b));
	poke(&r, journal_at(3), a, sizeof(a));
	owner_open(&r, &after);
	assert_int_equal(after.nr, PER_BLOCK);
	rig_fini(&r);
}

/*
 * What was acknowledged after a damaged block still counts, above all that a
 * page was removed; and what the block held is counted.
 */
static void damage_in_the_middle_hides_nothing_behind_it(void **state)
{
	struct owned *bad;
	struct rig r;
	uint64_t seq;

	long_rig(&r);
	add_blocks(&r, &before, 1);
	for (int i = 0; i < 12; i++)
		add_blocks(&r, &before, 6);
	bad = &before.rec[3];			/* of the first block */
	seq = bad->rec.slot.seq;
	owner_free(&r, bad);
	assert_int_equal(owner_flush(&r), 0);
	assert_true(to_nvme(r.n)->journal.head > 70);
	rig_close(&r);
	poke_random(&r, journal_at(10) + 100, 1, 3);
	owner_open(&r, &after);
	assert_int_equal(after.nr_found, 72 * PER_BLOCK - 1);
	assert_null(owner_find(&after, seq));
	assert_known(&after, &before);
	assert_int_equal(r.n->stats.recover_dropped, 1);
	assert_non_null(strstr(r.n->why, "1 blocks of metadata"));
	/* it goes on behind the end, and not at the damage */
	add_blocks(&r, &after, 2);
	rig_close(&r);
	before = after;
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_fini(&r);
}

/* Only what is in a later chunk proves that a chunk was whole. */
static void damage_at_the_end_is_the_end(void **state)
{
	char zero[NVME_BLOCK] = { 0 };
	struct rig r;

	long_rig(&r);
	for (int i = 0; i < 5; i++)
		add_blocks(&r, &before, 6);
	rig_close(&r);
	poke(&r, journal_at(20), zero, sizeof(zero));
	owner_open(&r, &after);
	assert_int_equal(after.nr_found, 19 * PER_BLOCK);
	assert_int_equal(r.n->stats.recover_dropped, 0);
	rig_fini(&r);
}

/* ---- forged entries -------------------------------------------------------------- */

static void forge_add(struct nvme_block *b, uint64_t off, uint64_t seq,
		      uint32_t len, uint32_t slot_bytes)
{
	struct nvme_ent_add *e = nvme_block_add(b, NVME_ENT_ADD, sizeof(*e),
						slot_bytes);

	assert_non_null(e);
	e->off = off;
	e->seq = seq;
	e->len = len;
}

static void records_that_cannot_be_are_dropped(void **state)
{
	static _Alignas(64) char buf[NVME_BLOCK];
	struct nvme_block *b = (void *)buf;
	uint64_t at;
	struct rig r;

	scan_rig(&r);
	at = super.data_off;
	rig_close(&r);
	nvme_block_init(b);
	forge_add(b, at - 4096, 1, 1, 4096);		/* not in the data */
	forge_add(b, super.bytes, 2, 1, 4096);
	forge_add(b, UINT64_MAX - 4095, 3, 1, 4096);
	forge_add(b, at + 100, 4, 1, 4096);		/* not aligned */
	forge_add(b, at + 4096, 5, 1, 8192);		/* not on a slot */
	forge_add(b, at + 8192, 6, 8193, 8192);		/* longer than it */
	forge_add(b, at + 16384, 7, 0, 8192);		/* empty */
	forge_add(b, at + 32768, 8, 1, 0);		/* no size */
	forge_add(b, at, 9, 1, 2 * MIB);		/* too large a size */
	forge_add(b, at, 10, 1, 1000);
	forge_add(b, at, 10, UINT32_MAX, UINT32_MAX);
	forge_add(b, at + 4096 * 4, 20, 1, 4096);	/* other classes, older */
	forge_add(b, at + 4096 * 8, 21, 1, 16384);
	forge_add(b, at + 12288 * 2, 22, 12000, 12288);	/* counts */
	forge_add(b, at + MIB, UINT64_MAX, 1, 4096);	/* no such number */
	/* the last whole slot of a segment, and one that is cut off */
	forge_add(b, at + 2 * MIB + 12288 * 84, 23, 1, 12288);
	forge_add(b, at + 2 * MIB + 12288 * 85, 24, 1, 12288);
	nvme_block_seal(b, NVME_KIND_JOURNAL, super.uuid, 1, super.opens);
	poke(&r, journal_at(1), b, sizeof(buf));
	owner_open(&r, &after);
	assert_int_equal(after.nr, 2);
	assert_int_equal(after.rec[0].rec.slot.seq, 22);
	assert_int_equal(after.rec[1].rec.slot.seq, 23);
	assert_true(r.n->stats.recover_dropped >= 10);
	assert_int_equal(r.n->used, 2 * 12288);
	assert_true(node_check(r.n));
	rig_fini(&r);
}

static void other_entries_that_cannot_be_are_ignored(void **state)
{
	static _Alignas(64) char buf[NVME_BLOCK];
	struct nvme_block *b = (void *)buf;
	struct nvme_ent_label *l;
	struct nvme_ent_slot *s;
	struct rig r;

	scan_rig(&r);
	rig_close(&r);
	nvme_block_init(b);
	l = nvme_block_add(b, NVME_ENT_LABEL, sizeof(*l), 1);	/* empty */
	l = nvme_block_add(b, NVME_ENT_LABEL, sizeof(*l) + 8, 2);
	l->total = UINT32_MAX;
	l = nvme_block_add(b, NVME_ENT_LABEL, sizeof(*l) + 8, 3);
	l->total = 5;
	l->at = 6;
	l = nvme_block_add(b, NVME_ENT_LABEL, sizeof(*l) + 8, 4);
	l->total = 5000;			/* a part that is too short */
	l = nvme_block_add(b, NVME_ENT_LABEL, sizeof(*l) + 8, UINT32_MAX);
	l->total = 8;
	l = nvme_block_add(b, NVME_ENT_LABEL, sizeof(*l) + 8, 7);
	l->total = 8;
	memcpy(l + 1, "counted", 8);
	nvme_block_add(b, NVME_ENT_LABEL_DEL, 8, 99);
	nvme_block_add(b, NVME_ENT_ZEROED, 8, UINT32_MAX);
	s = nvme_block_add(b, NVME_ENT_BAD, sizeof(*s), 4096);
	s->off = UINT64_MAX & ~UINT64_C(4095);
	s = nvme_block_add(b, NVME_ENT_BAD, sizeof(*s), 0);
	s->off = super.data_off;
	s = nvme_block_add(b, NVME_ENT_DEL, sizeof(*s), 0);
	s->off = 12345;
	s->seq = UINT64_MAX;
	nvme_block_seal(b, NVME_KIND_JOURNAL, super.uuid, 1, super.opens);
	poke(&r, journal_at(1), b, sizeof(buf));
	owner_open(&r, &after);
	assert_int_equal(after.nr, 0);
	assert_int_equal(after.nr_labels_found, 1);
	assert_string_equal((char *)after.label[0].bytes, "counted");
	assert_int_equal(r.n->stats.bad_slots, 0);
	assert_int_equal(owner_add(&r, &after, 4096, 0, NULL), 0);
	rig_fini(&r);
}

/* ---- anything -------------------------------------------------------------------------- */

static void damage_once(const struct rig *r, struct rng *rng, uint64_t from,
			uint64_t bytes)
{
	uint64_t off = from + rng_below(rng, bytes / 512) * 512;
	char a[NVME_BLOCK], b[NVME_BLOCK];

	switch (rng_below(rng, 4)) {
	case 0:
		peek(r, off, a, 1);
		a[0] ^= (char)(1 << rng_below(rng, 8));
		poke(r, off, a, 1);
		break;
	case 1:
		poke_random(r, off, 512, rng_next(rng));
		break;
	case 2:
		memset(a, 0, sizeof(a));
		poke(r, round_down(off, NVME_BLOCK), a, sizeof(a));
		break;
	case 3:
		off = round_down(off, NVME_BLOCK);
		peek(r, off, a, sizeof(a));
		from += rng_below(rng, bytes / NVME_BLOCK) * NVME_BLOCK;
		peek(r, from, b, sizeof(b));
		poke(r, off, b, sizeof(b));
		poke(r, from, a, sizeof(a));
		break;
	}
}

static void random_damage_gives_no_wrong_record(void **state)
{
	unsigned int rounds = test_long() ? 600 : 30;
	struct rng rng;
	struct rig r;
	char *image;

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&rng, test_seed());
	scan_rig(&r);
	add_blocks(&r, &before, 5);
	make_ckpt(&r, &before);
	add_blocks(&r, &before, 3);
	rig_close(&r);
	image = malloc(r.o.bytes);
	assert_non_null(image);
	peek(&r, 0, image, r.o.bytes);
	for (unsigned int i = 0; i < rounds; i++) {
		unsigned int n = 1 + (unsigned int)rng_below(&rng, 12);

		poke(&r, 0, image, r.o.bytes);
		while (n--)
			damage_once(&r, &rng, super.journal_off,
				    super.ckpt_off + 2 * super.ckpt_bytes -
				    super.journal_off);
		owner_init(&after);
		rig_make(&r);
		node_set_owner(r.n, &after.ops);
		rig_until(&r, r.n->state != NODE_STARTING);
		assert_known(&after, &before);
		assert_int_equal(r.n->used, (uint64_t)after.nr * 4096);
		rig_close(&r);
	}
	free(image);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(stale_blocks_of_a_torn_group_are_not_the_next_ones),
		cmocka_unit_test(an_opening_that_left_no_mark_is_not_gone_on_with),
		cmocka_unit_test(journal_ends_at_what_is_no_block),
		cmocka_unit_test(blocks_in_another_order_are_not_read),
		cmocka_unit_test(damage_in_the_middle_hides_nothing_behind_it),
		cmocka_unit_test(damage_at_the_end_is_the_end),
		cmocka_unit_test(records_that_cannot_be_are_dropped),
		cmocka_unit_test(other_entries_that_cannot_be_are_ignored),
		cmocka_unit_test(random_damage_gives_no_wrong_record),
	};

	return run_on_both_engines(tests);
}
