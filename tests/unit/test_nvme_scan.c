/* SPDX-License-Identifier: Apache-2.0 */
/* What is on the medium may be anything: damaged, stale, foreign, forged. */
#include <fcntl.h>

#include "daemon/node/nvme.h"
#include "kernels/kernels.h"
#include "tests/lib/node_owner.h"

#define PER_BLOCK	31u	/* records in a block */

static struct owner before, after;
static struct nvme_super super;

/* ---- the file behind the node's back ------------------------------------------ */

static void peek(const struct rig *r, uint64_t off, void *buf, size_t len)
{
	assert_int_equal(pread(r->memfd, buf, len, (off_t)off), (ssize_t)len);
}

static void poke(const struct rig *r, uint64_t off, const void *buf, size_t len)
{
	assert_int_equal(pwrite(r->memfd, buf, len, (off_t)off), (ssize_t)len);
}

static void poke_random(const struct rig *r, uint64_t off, size_t len,
			uint64_t seed)
{
	char *buf = malloc(len);

	assert_non_null(buf);
	fill(buf, (uint32_t)len, seed);
	poke(r, off, buf, len);
	free(buf);
}

static uint64_t journal_at(uint64_t seq)
{
	return super.journal_off +
	       seq % (super.journal_bytes / NVME_BLOCK) * NVME_BLOCK;
}

static uint64_t ckpt_at(int area, uint64_t block)
{
	return super.ckpt_off + (uint64_t)area * super.ckpt_bytes +
	       block * NVME_BLOCK;
}

static struct nvme_block *block_get(const struct rig *r, uint64_t off)
{
	static _Alignas(64) char buf[NVME_BLOCK];

	peek(r, off, buf, sizeof(buf));
	return (void *)buf;
}

/* As @b is now, with a right checksum. */
static void block_put(const struct rig *r, uint64_t off, struct nvme_block *b)
{
	nvme_block_seal(b, b->kind, b->uuid, b->seq, b->epoch);
	poke(r, off, b, NVME_BLOCK);
}

static void scan_rig(struct rig *r)
{
	rig_init_memory(r);
	r->o.bytes = 6 * MIB;
	r->o.records = 800;
	owner_open(r, &before);
	super = to_nvme(r->n)->open.super;
}

/* @nr blocks of records, one group. */
static void add_blocks(struct rig *r, struct owner *o, unsigned int nr)
{
	for (unsigned int i = 0; i < nr * PER_BLOCK; i++)
		assert_int_equal(owner_add(r, o, 4096, (uint8_t)i, NULL), 0);
	assert_int_equal(owner_flush(r), 0);
}

/* Each record found must be one that was added: the same in every byte. */
static void assert_known(struct owner *found, struct owner *known)
{
	for (unsigned int i = 0; i < found->nr; i++) {
		uint64_t seq = found->rec[i].rec.slot.seq;
		bool same = false;

		for (unsigned int k = 0; k < known->nr && !same; k++)
			same = known->rec[k].rec.slot.seq == seq &&
			       !memcmp(&known->rec[k].rec, &found->rec[i].rec,
				       sizeof(struct node_record));
		assert_true(same);
	}
}

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

/* A ring long enough that damage in its middle is not near its end. */
static void long_rig(struct rig *r)
{
	rig_init_memory(r);
	r->o.bytes = 40 * MIB;
	r->o.records = 8000;
	r->o.probe_ns = 20 * MSEC;
	owner_open(r, &before);
	super = to_nvme(r->n)->open.super;
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

/* ---- checkpoints ------------------------------------------------------------------ */

/* Until one more checkpoint is complete. */
static void make_ckpt(struct rig *r, struct owner *o)
{
	uint64_t was = r->n->stats.ckpts;
	uint64_t end = deadline_in(PATIENCE_NS);

	while (r->n->stats.ckpts == was && !deadline_past(end)) {
		if (!owner_add(r, o, 4096, 0, NULL))
			owner_free(r, &o->rec[--o->nr]);
		rig_poll(r, 0);
	}
	assert_int_equal(owner_flush(r), 0);
}

/* The journal is as long as it may be without a further one: the beginning of
 * the checkpoint before the last is written over. */
static void fill_half(struct rig *r, struct owner *o)
{
	const struct nvme_journal *j = &to_nvme(r->n)->journal;

	while (j->head - j->tail < j->nr_blocks / 2) {
		assert_int_equal(owner_add(r, o, 4096, 0, NULL), 0);
		owner_free(r, &o->rec[--o->nr]);
		assert_int_equal(owner_flush(r), 0);
	}
	assert_true(j->head - j->tail == j->nr_blocks / 2);
}

static int newest_area(struct rig *r)
{
	return to_nvme(r->n)->ckpt.area;
}

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

static void good_blocks_of_the_only_checkpoint_count(void **state)
{
	struct rig r;
	int area;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	make_ckpt(&r, &before);
	make_ckpt(&r, &before);
	fill_half(&r, &before);
	area = newest_area(&r);
	rig_close(&r);
	poke_random(&r, ckpt_at(area, 2), NVME_BLOCK, 1);
	owner_open(&r, &after);
	assert_int_equal(after.nr, 3 * PER_BLOCK);
	assert_known(&after, &before);
	assert_true(r.n->stats.recover_dropped > 0);
	rig_fini(&r);
}

static void assert_refused(struct rig *r, const char *word)
{
	owner_init(&after);
	rig_make(r);
	node_set_owner(r->n, &after.ops);
	rig_until(r, r->n->state != NODE_STARTING);
	assert_int_equal(r->n->state, NODE_FAILED);
	if (!strstr(r->n->why, word))
		print_message("# '%s' lacks '%s'\n", r->n->why, word);
	assert_non_null(strstr(r->n->why, word));
	assert_int_equal(after.recovered, 1);
	assert_true(after.err < 0);
	rig_close(r);
}

/* As the operator wants it: refused, and made anew. */
static void assert_rebuilt(struct rig *r, const char *word)
{
	struct node_slot slot;

	assert_refused(r, word);
	r->o.rebuild = true;
	owner_open(r, &after);
	assert_int_equal(after.nr_found, 0);
	assert_non_null(strstr(r->n->why, word));
	/* the only segment may be on its way to be zeroes */
	while (node_slot_alloc(r->n, 4096, &slot) == -ENOSPC)
		rig_poll(r, 10);
	assert_int_equal(node_slot_free(r->n, &slot), 0);
	assert_int_equal(owner_add(r, &after, 4096, 0, NULL), 0);
	rig_close(r);
	r->o.rebuild = false;
	owner_open(r, &after);
	assert_int_equal(after.nr_found, 1);
	super = to_nvme(r->n)->open.super;
	rig_close(r);
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

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	make_ckpt(&r, &before);
	make_ckpt(&r, &before);
	fill_half(&r, &before);
	area = newest_area(&r);
	rig_close(&r);
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

/* ---- what cannot be read ----------------------------------------------------------- */

static void fault_at(uint64_t off, uint64_t blocks)
{
	char spec[100];

	snprintf(spec, sizeof(spec), "nvme:openread:eio:off=%llu:len=%llu",
		 (unsigned long long)off,
		 (unsigned long long)(blocks * NVME_BLOCK));
	assert_int_equal(node_fault_set(spec, NULL, 0), 0);
}

/* With blocks that cannot be read it is not opened, and not touched, although it
 * may be rebuilt; then it is, with all that was in it. */
static void assert_waits(struct rig *r, uint64_t off, uint64_t blocks)
{
	char *was = malloc(r->o.bytes), *is = malloc(r->o.bytes);

	assert_non_null(was);
	assert_non_null(is);
	peek(r, 0, was, r->o.bytes);
	fault_at(off, blocks);
	r->o.rebuild = true;
	r->o.probe_ns = MSEC;
	owner_init(&after);
	rig_make(r);
	node_set_owner(r->n, &after.ops);
	rig_until(r, r->n->stats.open_fails >= 2);
	assert_non_null(strstr(r->n->why, "reading what"));
	assert_int_equal(after.recovered, 0);
	peek(r, 0, is, r->o.bytes);
	assert_memory_equal(is, was, r->o.bytes);
	node_fault_set(NULL, NULL, 0);
	rig_until(r, r->n->state == NODE_ONLINE);
	owners_equal(&after, &before);
	assert_int_equal(r->n->stats.recover_dropped, 0);
	rig_close(r);
	r->o.rebuild = false;
	free(was);
	free(is);
}

static void assert_does_without(struct rig *r, uint64_t off, uint64_t blocks)
{
	fault_at(off, blocks);
	owner_open(r, &after);
	assert_true(node_fault_hits() > 0);
	owners_equal(&after, &before);
	assert_int_equal(r->n->stats.recover_dropped, 0);
	node_fault_set(NULL, NULL, 0);
	rig_close(r);
}

static void journal_that_cannot_be_read_is_not_at_its_end(void **state)
{
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	rig_close(&r);
	assert_waits(&r, journal_at(1), 1);
	assert_waits(&r, journal_at(3), 1);
	assert_waits(&r, super.journal_off, super.journal_bytes / NVME_BLOCK);
	rig_fini(&r);
}

/* Nor does a damaged block end it while what is behind cannot be asked. */
static void damage_before_what_cannot_be_read_is_no_end(void **state)
{
	struct rig r;

	long_rig(&r);
	for (int i = 0; i < 12; i++)
		add_blocks(&r, &before, 6);
	rig_close(&r);
	poke_random(&r, journal_at(10) + 100, 1, 3);
	fault_at(journal_at(64), 20);
	owner_init(&after);
	rig_make(&r);
	node_set_owner(r.n, &after.ops);
	rig_until(&r, r.n->stats.open_fails >= 2);
	node_fault_set(NULL, NULL, 0);
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_int_equal(after.nr_found, 71 * PER_BLOCK);
	assert_int_equal(r.n->stats.recover_dropped, 1);
	rig_fini(&r);
}

static void checkpoint_that_cannot_be_read_is_not_damaged(void **state)
{
	struct rig r;
	int area;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	make_ckpt(&r, &before);
	make_ckpt(&r, &before);
	area = newest_area(&r);
	rig_close(&r);
	/* the older one and the journal say all of it */
	assert_does_without(&r, ckpt_at(area, 0), 1);
	assert_does_without(&r, ckpt_at(area, 2), 1);
	assert_does_without(&r, ckpt_at(!area, 0), 1);
	assert_waits(&r, super.ckpt_off, 2 * super.ckpt_bytes / NVME_BLOCK);

	/* the older one is too old */
	owner_open(&r, &after);
	before = after;
	fill_half(&r, &before);
	rig_close(&r);
	assert_waits(&r, ckpt_at(area, 0), 1);
	assert_waits(&r, ckpt_at(area, 2), 1);
	assert_does_without(&r, ckpt_at(!area, 0), 1);
	rig_fini(&r);
}

/* Whatever fails at random while it is opened: it is opened in the end, and
 * nothing is missing. */
static void random_faults_while_opening_lose_nothing(void **state)
{
	unsigned int rounds = test_long() ? 400 : 30;
	struct rng rng;
	struct rig r;
	char spec[400];

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&rng, test_seed());
	scan_rig(&r);
	r.o.probe_ns = MSEC;
	r.o.rebuild = true;
	add_blocks(&r, &before, 4);
	make_ckpt(&r, &before);
	for (unsigned int i = 0; i < rounds; i++) {
		uint64_t s = rng_next(&rng) >> 8;

		if (!rng_below(&rng, 3))
			make_ckpt(&r, &before);
		rig_close(&r);
		snprintf(spec, sizeof(spec),
			 "nvme:openread:eio:p=%u:seed=%llu:n=40;nvme:openread:short:p=%u:seed=%llu:n=9;nvme:openwrite:eio:p=300:seed=%llu:n=3;nvme:openwrite:short:p=300:seed=%llu:n=2;nvme:openwrite:torn:p=200:seed=%llu:n=1",
			 (unsigned int)rng_below(&rng, 400),
			 (unsigned long long)s,
			 (unsigned int)rng_below(&rng, 200),
			 (unsigned long long)s + 1, (unsigned long long)s + 2,
			 (unsigned long long)s + 3, (unsigned long long)s + 4);
		assert_int_equal(node_fault_set(spec, NULL, 0), 0);
		owner_init(&after);
		rig_make(&r);
		node_set_owner(r.n, &after.ops);
		rig_until(&r, r.n->state == NODE_ONLINE);
		assert_int_equal(node_fault_set(NULL, NULL, 0), 0);
		owners_equal(&after, &before);
		assert_int_equal(r.n->stats.recover_dropped, 0);
		before = after;
	}
	rig_fini(&r);
}

/* ---- the superblock ------------------------------------------------------------------ */

static void one_superblock_is_enough(void **state)
{
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 2);
	rig_close(&r);
	poke_random(&r, 0, NVME_BLOCK, 1);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_close(&r);
	poke_random(&r, NVME_SUPER2_OFF, NVME_BLOCK, 1);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_close(&r);
	poke_random(&r, 0, 512, 1);
	poke_random(&r, NVME_SUPER2_OFF, NVME_BLOCK, 1);
	assert_rebuilt(&r, "not a kvmm store");
	rig_fini(&r);
}

static void other_versions_and_sizes_are_never_misread(void **state)
{
	uint32_t version = 1;
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 2);
	rig_close(&r);
	poke(&r, offsetof(struct nvme_super, version), &version, 4);
	assert_rebuilt(&r, "version 1");

	r.o.bytes -= MIB;
	assert_rebuilt(&r, "bytes");
	r.o.bytes += MIB;
	assert_rebuilt(&r, "bytes");
	r.o.seg_bytes = 2 * MIB;
	assert_rebuilt(&r, "segments");
	r.o.records -= 100;
	assert_rebuilt(&r, "records");
	rig_fini(&r);
}

static void superblock_that_makes_no_sense_is_refused(void **state)
{
	struct nvme_super sb;
	struct rig r;

	for (int how = 0; how < 7; how++) {
		scan_rig(&r);
		rig_close(&r);
		sb = super;
		switch (how) {
		case 0:
			sb.data_off = sb.bytes;
			break;
		case 1:
			sb.journal_bytes = 0;
			break;
		case 2:
			sb.ckpt_off = UINT64_MAX - 4096;
			break;
		case 3:
			sb.seg_bytes = 0;
			break;
		case 4:
			sb.records = UINT64_MAX / 2;
			break;
		case 5:
			sb.ckpt_bytes = 1;
			break;
		case 6:
			sb.label_bytes = 0;
			break;
		}
		sb.opens++;
		sb.crc = kvmm_crc32c(0, &sb, offsetof(struct nvme_super, crc));
		poke(&r, 0, &sb, sizeof(sb));
		assert_refused(&r, "no sense");
		rig_fini(&r);
	}
}

/* An opening's number is nobody else's, although no superblock may tell. */
static void superblock_that_is_behind_the_journal_catches_up(void **state)
{
	struct nvme_super sb;
	uint64_t opens;
	struct rig r;

	scan_rig(&r);
	rig_close(&r);
	for (int i = 0; i < 3; i++) {
		owner_open(&r, &before);
		add_blocks(&r, &before, 1);
		opens = to_nvme(r.n)->open.super.opens;
		rig_close(&r);
	}
	sb = super;
	sb.opens = 1;
	sb.crc = kvmm_crc32c(0, &sb, offsetof(struct nvme_super, crc));
	poke(&r, 0, &sb, sizeof(sb));
	poke(&r, NVME_SUPER2_OFF, &sb, sizeof(sb));
	owner_open(&r, &after);
	owners_equal(&after, &before);
	assert_true(to_nvme(r.n)->open.super.opens > opens);
	rig_fini(&r);
}

static void store_that_was_being_made_is_made_anew(void **state)
{
	struct nvme_super sb;
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 1);
	rig_close(&r);
	sb = super;
	sb.flags = NVME_SUPER_MAKING;
	sb.crc = kvmm_crc32c(0, &sb, offsetof(struct nvme_super, crc));
	poke(&r, 0, &sb, sizeof(sb));
	poke(&r, NVME_SUPER2_OFF, &sb, sizeof(sb));
	owner_open(&r, &after);
	assert_int_equal(after.nr_found, 0);
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
		cmocka_unit_test(damaged_checkpoint_gives_way_to_the_one_before),
		cmocka_unit_test(good_blocks_of_the_only_checkpoint_count),
		cmocka_unit_test(store_without_a_checkpoint_is_damaged),
		cmocka_unit_test(checkpoint_that_the_journal_has_left_is_refused),
		cmocka_unit_test(journal_that_was_written_over_further_on_is_refused),
		cmocka_unit_test(attempts_never_share_a_number),
		cmocka_unit_test(owner_is_told_how_many_will_come),
		cmocka_unit_test(journal_that_cannot_be_read_is_not_at_its_end),
		cmocka_unit_test(damage_before_what_cannot_be_read_is_no_end),
		cmocka_unit_test(checkpoint_that_cannot_be_read_is_not_damaged),
		cmocka_unit_test(random_faults_while_opening_lose_nothing),
		cmocka_unit_test(one_superblock_is_enough),
		cmocka_unit_test(other_versions_and_sizes_are_never_misread),
		cmocka_unit_test(superblock_that_makes_no_sense_is_refused),
		cmocka_unit_test(superblock_that_is_behind_the_journal_catches_up),
		cmocka_unit_test(store_that_was_being_made_is_made_anew),
		cmocka_unit_test(random_damage_gives_no_wrong_record),
	};

	return run_on_both_engines(tests);
}
