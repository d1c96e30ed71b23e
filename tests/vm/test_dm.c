/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd on a real NVMe driver that fails as disks do: below it lies a target of
 * the device mapper, which is exchanged while pages go down and come up. Whatever
 * it does, no byte is wrong, requests end in time, and afterwards the node comes
 * back by itself.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/lib/dm.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define DISK		"/dev/nvme0n1"
#define MAPPED		DM_PATH("kvmm")
#define SECTORS		((unsigned long long)(512 * MIB / 512))
#define CHAIN		8		/* pages */
#define CHAINS		40
#define DRAM		(8 * MIB)
#define LONG_WAIT	90000
#define GROUP_MS	500		/* a record is on the medium by then */
#define SICK_AFTER	3		/* misses; nobody scrubs then */
#define FINDS		40		/* reads of all pages, see find_rotten() */

static void healthy(void)
{
	dm_table("kvmm", "0 %llu linear " DISK " 0", SECTORS);
}

static void nothing_but_errors(void)
{
	dm_table("kvmm", "0 %llu error", SECTORS);
}

/* It says yes to writes and does nothing. */
static void drops_writes(void)
{
	dm_table("kvmm", "0 %llu flakey " DISK " 0 0 3600 1 drop_writes",
		 SECTORS);
}

static int setup(void **state)
{
	dm_zero(DISK, MIB);		/* a new store */
	dm_create("kvmm", "0 %llu linear " DISK " 0", SECTORS);
	return fx_setup(state);
}

static int teardown(void **state)
{
	int err;

	healthy();		/* what is held up must end before anybody can */
	err = fx_teardown(state);
	dm_remove("kvmm");
	return err;
}

static bool state_is(struct test_daemon *d, const char *state)
{
	return !strcmp(ta_node_state(d, "nvme0"), state);
}

static bool status_says(struct test_daemon *d, const char *key,
			const char *what)
{
	json_t *r = ta_request(d, "{\"cmd\": \"status\"}");
	char *s = json_dumps(json_object_get(r, key), JSON_ENCODE_ANY);
	bool says = s && strstr(s, what);

	free(s);
	json_decref(r);
	return says;
}

/* In words: what is wrong, and that it is over. */
static void status_knows(struct test_daemon *d)
{
	T_CHECK(status_says(d, "sentence", "degraded"));
	T_CHECK(status_says(d, "notes", "nvme0 is "));
}

static void status_is_content(struct test_daemon *d)
{
	T_WAIT(LONG_WAIT, state_is(d, "online"));
	T_CHECK(status_says(d, "sentence", "serving"));
	T_CHECK(!status_says(d, "notes", "nvme0 is degraded"));
	T_CHECK(!status_says(d, "notes", "nvme0 is failed"));
}

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

/* A daemon, and five times as many pages as fit into DRAM. */
static void fill(struct fx *f)
{
	struct td_opts o = {
		.dram_bytes = DRAM, .nvme_bytes = 400 * MIB,
		.nvme_path = MAPPED,
		.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
		.io_timeout = "2s",
	};
	unsigned int i;

	fx_start(f, &o);
	T_WAIT(LONG_WAIT, state_is(&f->d, "online"));
	tc_open(&f->c[0], f->d.socket, NULL);
	for (i = 0; i < CHAINS; i++) {
		T_EQ(tc_put(&f->c[0], 1 + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
}

/* Read all of it, each request within its deadline; tc_get() checks the bytes. */
static struct tc_got read_all(struct fx *f, unsigned int deadline_ms)
{
	struct tc_got sum = { 0 };
	unsigned int i;

	for (i = 0; i < CHAINS; i++) {
		uint64_t t0 = now_ns();
		struct tc_got got = tc_get(&f->c[0], 1 + i, CHAIN, deadline_ms);
		uint64_t took = (now_ns() - t0) / NSEC_PER_MSEC;

		T_CHECK(took < deadline_ms + 2000, "%llu ms",
			(unsigned long long)took);
		sum.resident += got.resident;
		sum.fetched += got.fetched;
		sum.missed += got.missed;
	}
	return sum;
}

static unsigned int had(const struct tc_got *got)
{
	return got->resident + got->fetched;
}

/*
 * Of @put pages all were had but those that kvmmd counted as lost, and @most of
 * them are missing. @before: what it had lost before they were put.
 */
static void nothing_else_is_missing(struct fx *f, const char *when,
				    const struct tc_got *got, unsigned int put,
				    uint64_t before, unsigned int most)
{
	unsigned int lost = (unsigned int)(ta_lost(&f->d) - before);

	printf("# %s: %u resident, %u fetched, %u missed (%u counted, %u may be)\n",
	       when, got->resident, got->fetched, got->missed, lost, most);
	T_CHECK(had(got) + lost >= put, "%u of %u pages, %u are lost",
		had(got), put, lost);
	T_CHECK(had(got) + most >= put, "%u of %u pages, %u may be lost",
		had(got), put, most);
}

/* Pages that memory alone has: what a device that takes no writes can cost. */
static unsigned int only_above(struct fx *f)
{
	return (unsigned int)ta_node(&f->d, "dram0", "pages_dirty");
}

/* Pages go down and come up again, as they did before. */
static void store_serves(struct fx *f, uint64_t first)
{
	uint64_t before = ta_lost(&f->d);
	struct tc_got got, sum = { 0 };
	unsigned int i;

	for (i = 0; i < CHAINS; i++) {
		T_EQ(tc_put(&f->c[0], first + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	for (i = 0; i < CHAINS; i++) {
		got = tc_get(&f->c[0], first + i, CHAIN, 10000);
		sum.resident += got.resident;
		sum.fetched += got.fetched;
		sum.missed += got.missed;
	}
	nothing_else_is_missing(f, "afterwards", &sum, CHAINS * CHAIN, before,
				0);
	T_CHECK(sum.fetched >= CHAINS * CHAIN / 2);
}

static void dram_serves(struct fx *f, uint64_t chain)
{
	T_EQ(tc_put(&f->c[0], chain, 0, CHAIN), CHAIN);
	T_EQ(tc_hits(&f->c[0], chain, CHAIN), CHAIN);
}

/* -- tests --------------------------------------------------------------------- */

static void what_went_down_comes_back(void **state)
{
	struct fx *f = *state;
	struct tc_got got;

	fill(f);
	got = read_all(f, 10000);
	nothing_else_is_missing(f, "well", &got, CHAINS * CHAIN, 0, 0);
	T_CHECK(got.fetched > CHAINS * CHAIN / 2, "%u fetched", got.fetched);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&f->d);
}

static void a_dead_device_is_a_miss_until_it_is_back(void **state)
{
	struct fx *f = *state;
	struct tc_got got;
	unsigned int most;

	fill(f);
	/*
	 * Of dram_serves(), too. And a second error is a verdict: by a scrub, as
	 * long as the device is not known to be ill.
	 */
	most = only_above(f) + CHAIN + SICK_AFTER * CHAIN;
	nothing_but_errors();
	got = read_all(f, 2000);
	T_CHECK(got.missed > 0);
	T_WAIT(LONG_WAIT, state_is(&f->d, "failed"));
	T_CHECK(ta_node(&f->d, "nvme0", "read.eio") > 0);
	status_knows(&f->d);
	dram_serves(f, 1000);
	healthy();
	status_is_content(&f->d);
	/* an error is no verdict on a page: they are there */
	got = read_all(f, 10000);
	nothing_else_is_missing(f, "healed", &got, CHAINS * CHAIN, 0, most);
	T_CHECK(got.fetched >= CHAINS * CHAIN / 2);
	store_serves(f, 2000);
	ta_check(&f->d);
}

static void a_device_that_stalls_keeps_nobody_waiting(void **state)
{
	struct fx *f = *state;
	struct tc_got got;
	unsigned int most;

	fill(f);
	most = only_above(f) + CHAIN;		/* of dram_serves() */
	dm_table("kvmm", "0 %llu delay " DISK " 0 10000", SECTORS);
	got = read_all(f, 500);
	T_CHECK(got.missed > 0);
	T_WAIT(LONG_WAIT, !state_is(&f->d, "online"));
	status_knows(&f->d);
	dram_serves(f, 1000);
	healthy();
	status_is_content(&f->d);
	/* late is not wrong: all but what DRAM could not write down is there */
	got = read_all(f, 10000);
	nothing_else_is_missing(f, "healed", &got, CHAINS * CHAIN, 0, most);
	T_EQ(ta_counter(&f->d, "nvme0", "pgdrop_gone"), 0);
	T_CHECK(got.fetched >= CHAINS * CHAIN / 2);
	store_serves(f, 2000);
	ta_check(&f->d);
}

/*
 * Ask for these chains until none has a wrong checksum any more. Some in a row are
 * taken for a failing device, which is not asked for a while; and as long as
 * there are any, it may happen again.
 */
static void find_rotten(struct fx *f, uint64_t first)
{
	unsigned int i, n;

	for (n = 0; n < FINDS; n++) {
		uint64_t bad = ta_counter(&f->d, "nvme0", "pgcrc_fail");

		for (i = 0; i < CHAINS; i++)
			tc_get(&f->c[0], first + i, CHAIN, 5000);
		if (!state_is(&f->d, "failed") &&
		    ta_counter(&f->d, "nvme0", "pgcrc_fail") == bad)
			break;
		T_WAIT(LONG_WAIT, !state_is(&f->d, "failed"));
	}
	T_CHECK(n < FINDS, "there are wrong checksums again and again");
}

/* It says yes and does nothing: the old bytes are found there. */
static void a_device_that_drops_writes_gives_no_wrong_byte(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	fill(f);
	drops_writes();
	for (i = 0; i < CHAINS; i++) {
		tc_put(&f->c[0], 500 + i, 0, CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	healthy();
	find_rotten(f, 500);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgcrc_fail") > 0);
	status_is_content(&f->d);
	store_serves(f, 2000);
	ta_check(&f->d);
}

static void start_again(struct fx *f)
{
	tc_close(&f->c[0]);
	td_kill(&f->d);
	T_OK(td_start(&f->d));
	T_WAIT(LONG_WAIT, state_is(&f->d, "online"));
	T_EQ(ta_counter(&f->d, "nvme0", "recover_orphan"), 0);
	ta_check(&f->d);
	tc_open(&f->c[0], f->d.socket, NULL);
}

/* What was written before all that; each byte is looked at. */
static void old_pages_are_there(struct fx *f, unsigned int old,
				const char *when)
{
	struct tc_got got = read_all(f, 10000);

	printf("# %s: %u resident, %u fetched, %u missed; %u were below\n", when,
	       got.resident, got.fetched, got.missed, old);
	T_CHECK(had(&got) >= old);
}

/*
 * The journal is dropped, too, and so is each opening's mark in the superblock: a
 * kvmmd that starts then finds the store as it was long ago, and the next one
 * finds what that one could not change.
 */
static void a_start_over_dropped_writes_gives_no_wrong_byte(void **state)
{
	struct fx *f = *state;
	unsigned int i, old;

	fill(f);
	old = (unsigned int)(ta_node(&f->d, "nvme0", "bytes_pages") /
			     TC_PAGE_BYTES);
	T_CHECK(old >= CHAINS * CHAIN - DRAM / TC_PAGE_BYTES);
	usleep(GROUP_MS * 1000);
	drops_writes();
	for (i = 0; i < CHAINS / 2; i++) {
		tc_put(&f->c[0], 500 + i, 0, CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	start_again(f);
	old_pages_are_there(f, old, "started while writes are dropped");
	for (i = 0; i < CHAINS; i++) {
		tc_get(&f->c[0], 500 + i, CHAIN, 5000);
		tc_put(&f->c[0], 600 + i, 0, CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	healthy();
	/* from here on they arrive, behind a hole */
	for (i = 0; i < CHAINS / 2; i++) {
		tc_put(&f->c[0], 700 + i, 0, CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	usleep(GROUP_MS * 1000);
	start_again(f);
	old_pages_are_there(f, old, "started when they are not dropped any more");
	for (i = 0; i < CHAINS; i++) {
		tc_get(&f->c[0], 500 + i, CHAIN, 5000);
		tc_get(&f->c[0], 600 + i, CHAIN, 5000);
		tc_get(&f->c[0], 700 + i, CHAIN, 5000);
	}
	store_serves(f, 2000);
	start_again(f);
	old_pages_are_there(f, old, "and once more");
	ta_check(&f->d);
}

static void a_device_that_corrupts_reads_gives_no_wrong_byte(void **state)
{
	struct fx *f = *state;

	fill(f);
	dm_table("kvmm", "0 %llu flakey " DISK
		 " 0 0 3600 5 corrupt_bio_byte 32 r 1 0", SECTORS);
	read_all(f, 2000);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgcrc_fail") > 0);
	healthy();
	status_is_content(&f->d);
	store_serves(f, 2000);
	ta_check(&f->d);
}

static void it_serves_on_when_the_controller_is_pulled_out(void **state)
{
	struct td_opts o = {
		.dram_bytes = DRAM, .nvme_bytes = 256 * MIB,
		.nvme_path = "/dev/nvme1n1", .io_timeout = "2s",
	};
	struct fx *f = *state;
	unsigned int i;

	fx_start(f, &o);
	T_WAIT(LONG_WAIT, state_is(&f->d, "online"));
	tc_open(&f->c[0], f->d.socket, NULL);
	for (i = 0; i < CHAINS; i++)
		tc_put(&f->c[0], 1 + i, 0, CHAIN);
	dm_sh("echo 1 >/sys/class/nvme/nvme1/device/remove");
	read_all(f, 2000);
	T_WAIT(LONG_WAIT, !state_is(&f->d, "online"));
	status_knows(&f->d);
	dram_serves(f, 1000);
	ta_check(&f->d);
	dm_sh("echo 1 >/sys/bus/pci/rescan");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(what_went_down_comes_back,
						setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_dead_device_is_a_miss_until_it_is_back,
			setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_device_that_stalls_keeps_nobody_waiting,
			setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_device_that_drops_writes_gives_no_wrong_byte,
			setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_start_over_dropped_writes_gives_no_wrong_byte,
			setup, teardown),
		cmocka_unit_test_setup_teardown(
			a_device_that_corrupts_reads_gives_no_wrong_byte,
			setup, teardown),
		cmocka_unit_test_setup_teardown(
			it_serves_on_when_the_controller_is_pulled_out,
			setup, teardown),
	};

	dm_init();
	setvbuf(stdout, NULL, _IOLBF, 0);
	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
