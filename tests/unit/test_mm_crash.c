/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon that dies again and again over the same disk, with two nodes of
 * memory above it: random operations, refusals, I/O errors, flipped bits,
 * checkpoints; at a death the disk loses a tail of what was not flushed.
 *
 * What must come of it each time: every record that the disk still has is taken
 * (so no page is without its parent: the disk is closed by itself at every
 * instant), all laws hold after every slice, no byte is wrong, what was reported
 * as bad and flushed stays away, and what was neither lost nor flipped is hit.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "kernels/kernels.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

#define CHAINS	6u
#define DEPTH	20u
#define GROUPS	3u
#define DISK	(160 * UINT64_C(4096))
#define LIVES	6u

static struct fake_disk disk;
static struct rig rig;
static struct rig *const r = &rig;
static struct rng rng;

/* Pages that were reported, and whether that is on the medium. */
static enum { FINE, REPORTED, GONE } bad[GROUPS][CHAINS][DEPTH];

static uint64_t found, hits, lost, reports, deaths;

static uint32_t roll(uint32_t n)
{
	return (uint32_t)rng_below(&rng, n);
}

static void flushed(void)
{
	unsigned int i;

	fake_blk_flush(r->blk);
	for (i = 0; i < sizeof(bad) / sizeof(bad[0][0][0]); i++)
		if ((&bad[0][0][0])[i] == REPORTED)
			(&bad[0][0][0])[i] = GONE;
}

/* -- what happens ---------------------------------------------------------------- */

static void do_publish(unsigned int g, uint32_t c)
{
	uint32_t i = 0, n = 1 + roll(4);

	while (i < DEPTH && rig_page(r, g, c, i))
		i++;
	for (; n && i < DEPTH; n--, i++) {
		int err = g == RIG_FULL && !roll(4) ?
			  rig_publish_far(r, c, i) : rig_publish(r, g, c, i);

		if (err)
			return;
		bad[g][c][i] = FINE;
	}
}

static void do_fetch(unsigned int g, uint32_t c)
{
	rig_fetch_check(r, g, c, 0, 1 + roll(DEPTH));
}

static void do_report(unsigned int g, uint32_t c)
{
	struct ring_key k = { .group = (uint16_t)g };
	uint32_t i = roll(DEPTH);

	if (!rig_page(r, g, c, i))
		return;
	rig_key(c, i, k.key);
	mm_report(r->c, r->sp, &k, KVMM_BAD);
	bad[g][c][i] = REPORTED;
	reports++;
}

static void do_write(unsigned int g, uint32_t c)
{
	struct page *pg = rig_page(r, g, c, roll(DEPTH));

	if (pg && page_copy(pg, &r->mm->node[RIG_DRAM])->state == COPY_READY)
		page_writeback(pg, &r->mm->node[RIG_DRAM],
			       NODE_PRIO_WRITEBACK);
}

static void do_reclaim(unsigned int g)
{
	struct reclaim_control rc = {
		.want = 1 + roll(16), .max_scan = 256,
		.deadline_ns = deadline_in(NSEC_PER_MSEC),
	};

	pool_reclaim(rig_pool(r, g, roll(8) ? RIG_DRAM : RIG_NVME), &rc);
}

static void flip_one(void)
{
	uint32_t at = roll(DISK / 4096);

	if (r->blk->seq[at])
		r->blk->data[at * UINT64_C(4096) + roll(4096)] ^= 1;
}

static void shake(void)
{
	struct fake_blk *b = r->blk;

	b->err[NODE_READ] = roll(8) ? 0 : -EIO;
	b->err[NODE_WRITE] = roll(8) ? 0 : -EIO;
	b->nth = 1 + roll(5);
	b->refuse[NODE_WRITE] = roll(10) ? 0 : -EAGAIN;
	b->unwritable = !roll(12);
	b->journal_full = !roll(10);
	b->label_err = roll(10) ? 0 : -EAGAIN;
	if (!roll(10))
		flip_one();
}

static void between(void *arg)
{
	do_write(roll(GROUPS), roll(CHAINS));
	do_reclaim(roll(GROUPS));
	rig_poll(r);
}

static void one_thing(void)
{
	unsigned int g = roll(GROUPS);
	uint32_t c = roll(CHAINS);

	switch (roll(40)) {
	case 0 ... 9:
		do_publish(g, c);
		break;
	case 10 ... 15:
		do_fetch(g, c);
		break;
	case 16 ... 21:
		do_write(g, c);
		break;
	case 22 ... 25:
		do_reclaim(g);
		break;
	case 26 ... 27:
		rig_touch(r, g, c, 1 + roll(DEPTH));
		break;
	case 28:
		if (!roll(4))
			do_report(g, c);
		break;
	case 29:
		shake();
		break;
	case 30:
		flushed();
		break;
	case 31:
		if (!roll(4))
			fake_blk_checkpoint(r->blk, between, NULL);
		break;
	case 32:
		scrub_again(&r->mm->node[RIG_NVME]);
		break;
	default:
		rig_poll(r);
	}
}

/* -- lives ----------------------------------------------------------------------- */

static void birth(void)
{
	struct rig_opts o = {
		.dram_bytes = 64 * 4096, .far_bytes = 24 * 4096,
		.nvme_bytes = DISK, .disk = &disk, .hold = true,
		.frame_ms = 2, .scrub_bytes_s = UINT64_C(1) << 30,
	};

	rig_start(r, &o);
	/* the daemon serves before all is found, at times */
	while (roll(3))
		do_publish(roll(GROUPS), roll(CHAINS));
}

/* No slot is in use that no page has. */
static void check_leaks(void)
{
	const struct mm_node *nd = &r->mm->node[RIG_NVME];
	const struct copy *c;
	unsigned long n = 0;
	uint64_t i;

	for (i = 0; i < nd->nr_slot_lists; i++)
		for (c = nd->slots[i]; c; c = c->slot_next)
			n++;
	assert_int_equal(n, fake_blk_slots(r->blk));
}

static void check_recovered(unsigned int standing)
{
	const struct mm_counters *ct = rig_count(r, RIG_NVME);
	unsigned int g;
	uint32_t c, i;

	if (ct->recover_orphan)
		fail_msg("%llu pages without their parents",
			 (unsigned long long)ct->recover_orphan);
	assert_int_equal(ct->recover_bad, 0);
	assert_int_equal(ct->recover_label, 0);
	assert_int_equal(ct->pgrecover + ct->recover_old, standing);
	found += ct->pgrecover;
	for (g = 0; g < GROUPS; g++)
		for (c = 0; c < CHAINS; c++)
			for (i = 0; i < DEPTH; i++)
				if (bad[g][c][i] == GONE)
					assert_null(rig_page(r, g, c, i));
}

/* Its bytes are as they were written; those that were lost are not. */
static bool slot_whole(const struct page *pg)
{
	const struct copy *c = copy_at(pg, RIG_NVME);
	uint8_t ident[PAGE_IDENT_BYTES];
	uint32_t crc;

	page_ident(pg, ident);
	crc = kvmm_crc32c(0, ident, sizeof(ident));
	crc = kvmm_crc32c(crc, &c->slot.seq, sizeof(c->slot.seq));
	crc = kvmm_crc32c(crc, r->blk->data + c->slot.off, pg->raw_bytes);
	return crc == c->crc;
}

/* Fetched alone, from the disk, whatever its parents are. */
static void check_hits(void)
{
	unsigned int g;
	uint32_t c, i;

	for (g = 0; g < GROUPS; g++)
		for (c = 0; c < CHAINS; c++)
			for (i = 0; i < DEPTH; i++) {
				struct page *pg = rig_page(r, g, c, i);
				bool whole;

				if (!pg || copy_at(pg, RIG_NVME)->state !=
					   COPY_READY)
					continue;
				whole = slot_whole(pg);
				lost += !whole;
				if (rig_fetch_check(r, g, c, i, 1))
					hits++;
				else if (whole)
					fail_msg("page %u of chain %u is lost",
						 i, c);
			}
}

static void one_life(void)
{
	unsigned int i, n = 100 + roll(400), standing = fake_disk_records(&disk);
	struct mm_counters *ct;

	birth();
	rig_recover(r);
	check_recovered(standing);
	check_leaks();
	if (roll(2))
		check_hits();
	r->blk->rng = &rng;
	r->blk->hold_flush = true;
	/* of this life, the other was its recovery */
	ct = &r->mm->node[RIG_NVME].c;
	for (i = 0; i < n; i++) {
		one_thing();
		rig_check(r);
		check_leaks();
	}
	assert_int_equal(ct->bytes_copied_shared, 0);
	memset(r->blk->err, 0, sizeof(r->blk->err));
	r->blk->journal_full = false;
	if (roll(4)) {
		rig_die(r, roll(4) ? &rng : NULL);
		deaths++;
		/* what was not on the medium may be back */
		for (i = 0; i < sizeof(bad) / sizeof(bad[0][0][0]); i++)
			if ((&bad[0][0][0])[i] == REPORTED)
				(&bad[0][0][0])[i] = FINE;
	} else {
		rig_stop(r);
		for (i = 0; i < sizeof(bad) / sizeof(bad[0][0][0]); i++)
			if ((&bad[0][0][0])[i] == REPORTED)
				(&bad[0][0][0])[i] = GONE;
	}
}

static void lives_over_one_disk(void **state)
{
	unsigned int run, runs = test_long() ? 60 : 3, life;

	for (run = 0; run < runs; run++) {
		rng_seed(&rng, test_seed() + run);
		memset(bad, 0, sizeof(bad));
		fake_disk_init(&disk, DISK);
		for (life = 0; life < LIVES; life++)
			one_life();
		fake_disk_fini(&disk);
	}
	/* and something happened */
	print_message("found %llu, hit %llu, lost %llu, reported %llu, deaths %llu\n",
		      (unsigned long long)found, (unsigned long long)hits,
		      (unsigned long long)lost, (unsigned long long)reports,
		      (unsigned long long)deaths);
	assert_true(found > 100 && hits > 50 && deaths > 5);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(lives_over_one_disk),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
