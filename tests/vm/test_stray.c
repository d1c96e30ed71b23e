/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd is killed while its reads sit in the kernel, and the next one gives out
 * memory at once. What the kernel still has to write goes into frames of the
 * dead; they are nobody's until it is certain that nothing comes any more.
 *
 * Below kvmmd lies a target that holds reads back until it is exchanged.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "tests/lib/dm.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define DISK		"/dev/nvme0n1"
#define MAPPED		DM_PATH("kvmm")
#define STORE		(128 * MIB)
#define SECTORS		((unsigned long long)(STORE / 512))
#define DRAM		(8 * MIB)	/* 128 frames */
#define CHAIN		8		/* pages */
#define CHAINS		40
#define FETCHED		3		/* chains of which reads are under way */
#define REUSED		40		/* chains, more than three times DRAM */
#define LONG_WAIT	90000
#define HELD_MS		600000		/* longer than the test */

static void healthy(void)
{
	dm_table("kvmm", "0 %llu linear " DISK " 0", SECTORS);
}

/* Writes go through. */
static void reads_are_held(void)
{
	dm_table("kvmm", "0 %llu delay " DISK " 0 %u " DISK " 0 0", SECTORS,
		 HELD_MS);
}

static int setup(void **state)
{
	dm_zero(DISK, STORE);
	dm_create("kvmm", "0 %llu linear " DISK " 0", SECTORS);
	return fx_setup(state);
}

static int teardown(void **state)
{
	int err;

	healthy();
	err = fx_teardown(state);
	dm_remove("kvmm");
	return err;
}

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

static void fill(struct fx *f)
{
	struct td_opts o = {
		.dram_bytes = DRAM, .nvme_bytes = STORE, .nvme_path = MAPPED,
		.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
		.io_timeout = "60s", .keep = true,
	};
	unsigned int i;

	fx_start(f, &o);
	tc_open(&f->c[0], f->d.socket, NULL);
	for (i = 0; i < CHAINS; i++) {
		T_EQ(tc_put(&f->c[0], 1 + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	usleep(500000);			/* all records are written */
}

/* Ask for the oldest chains and do not wait; how many reads the kernel has. */
static unsigned int start_reads(struct fx *f)
{
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	struct kvmm_match m;
	unsigned int i, asked = 0;

	for (i = 0; i < FETCHED; i++) {
		uint32_t resident;

		rq = tc_req(c, 1 + i);
		resident = tc_match(c, rq, 1 + i, CHAIN, NULL, &m);
		T_EQ(m.n_pages, CHAIN);
		T_OK(kvmm_fetch(rq, resident, m.n_pages, c->node,
				deadline_in(300 * NSEC_PER_SEC), 77 + i));
		asked += m.n_pages - resident;
	}
	T_CHECK(asked >= CHAIN, "%u pages below", asked);
	/* there may be one more: a scrub's */
	T_WAIT(LONG_WAIT, ta_node(&f->d, "nvme0", "read.inflight") >= asked &&
			  !ta_node(&f->d, "nvme0", "read.queued"));
	T_EQ(ta_node(&f->d, "dram0", "frames.loading"), asked);
	return asked;
}

/* The next kvmmd knows them; it cannot know yet what becomes of them. */
static bool waits(struct test_daemon *d)
{
	return !strcmp(ta_node_state(d, "nvme0"), "starting");
}

static void an_old_read_never_lands_in_a_reused_frame(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[1];
	unsigned int under_way, held, i, hits = 0, lost, below;
	uint64_t frames;
	bool waited;

	fill(f);
	reads_are_held();
	under_way = start_reads(f);
	lost = (unsigned int)ta_lost(&f->d);
	below = (unsigned int)(ta_node(&f->d, "nvme0", "bytes_pages") /
			       TC_PAGE_BYTES);
	T_OK(td_crash(&f->d, NULL));

	/* a new client takes all frames that it can have, again and again */
	tc_open(c, f->d.socket, NULL);
	for (i = 0; i < REUSED; i++)
		T_EQ(tc_put(c, 1000 + i, 0, CHAIN), CHAIN);
	for (i = 0; i < REUSED; i++)
		hits += tc_hits(c, 1000 + i, CHAIN);
	waited = waits(&f->d);
	held = (unsigned int)ta_node(&f->d, "dram0", "frames.loading");
	frames = ta_node(&f->d, "dram0", "frames.total");
	printf("# %u reads under way, %u frames held of %llu, %u pages\n",
	       under_way, held, (unsigned long long)frames, hits);
	T_CHECK(hits >= frames / 2);

	/* now what was read for the dead one arrives */
	healthy();
	T_WAIT(LONG_WAIT, !strcmp(ta_node_state(&f->d, "nvme0"), "online"));
	for (i = 0; i < REUSED; i++)
		tc_hits(c, 1000 + i, CHAIN);	/* and every byte is looked at */
	T_CHECK(waited, "the store was opened while the dead one's reads were under way");
	T_EQ(held, under_way);

	/* the frames are there again, and so are the pages */
	T_WAIT(LONG_WAIT, !ta_node(&f->d, "dram0", "frames.loading"));
	for (i = 0, hits = 0; i < CHAINS; i++) {
		struct tc_got got = tc_get(c, 1 + i, CHAIN, 20000);

		hits += got.resident + got.fetched;
	}
	T_CHECK(hits >= below, "%u pages of %u that were below", hits, below);
	for (i = 0; i < REUSED; i++) {
		struct tc_got got = tc_get(c, 1000 + i, CHAIN, 20000);

		hits += got.resident + got.fetched;
	}
	/* what memory had no room for while nothing could be written is counted */
	lost += (unsigned int)ta_lost(&f->d);
	printf("# %u pages are left, %u are lost, %u were below\n", hits, lost,
	       below);
	T_CHECK(hits + lost >= (CHAINS + REUSED) * CHAIN,
		"%u pages are left, %u are lost", hits, lost);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	T_EQ(ta_node(&f->d, "dram0", "frames.total"), frames);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			an_old_read_never_lands_in_a_reused_frame,
			setup, teardown),
	};

	dm_init();
	setvbuf(stdout, NULL, _IOLBF, 0);
	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
