/* SPDX-License-Identifier: Apache-2.0 */
/*
 * File systems that are really full, and a device that is told what is empty.
 *
 * Where space can be reserved a store does not notice that the file system is full;
 * where it cannot, which status says, writes stop, what is there is served, and all
 * goes on by itself when there is room again.
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
#define MNT		"/mnt/kvmm"
#define STORE		(96 * MIB)
#define DRAM		(8 * MIB)	/* 128 frames */
#define CHAIN		8		/* pages */
#define CHAINS		40
#define STORE_PAGES	1280		/* for certain, of 64 KiB: 80 MiB */
#define LONG_WAIT	90000

static const char patient[] = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}";

static bool state_is(struct test_daemon *d, const char *state)
{
	return !strcmp(ta_node_state(d, "nvme0"), state);
}

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

/* Anywhere in it. */
static bool status_says(struct test_daemon *d, const char *what)
{
	json_t *r = ta_request(d, "{\"cmd\": \"status\"}");
	char *s = json_dumps(r, 0);
	bool says = s && strstr(s, what);

	free(s);
	json_decref(r);
	return says;
}

static void put(struct fx *f, uint64_t first, unsigned int n)
{
	for (unsigned int i = 0; i < n; i++) {
		T_EQ(tc_put(&f->c[0], first + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
}

/* Pages that can be had; each byte is looked at. */
static unsigned int had(struct fx *f, uint64_t first, unsigned int n)
{
	unsigned int i, sum = 0;

	for (i = 0; i < n; i++) {
		struct tc_got got = tc_get(&f->c[0], first + i, CHAIN, 20000);

		sum += got.resident + got.fetched;
	}
	return sum;
}

/* -- a device ------------------------------------------------------------------ */

/* Of sysfs' stat: how many requests to discard the device has ended. */
static unsigned long discards(void)
{
	unsigned long v = 0;
	FILE *f = fopen("/sys/block/nvme0n1/stat", "re");

	T_CHECK(f != NULL);
	for (int i = 0; i < 12; i++)
		T_EQ(fscanf(f, "%lu", &v), 1);
	fclose(f);
	return v;
}

static const char discard_config[] =
	"{\"timeouts\": {\"direct_reclaim\": \"1s\"}, \"nodes\": ["
	"{\"name\": \"dram0\", \"kind\": \"host\", \"size\": \"8MiB\","
	" \"size_max\": \"8MiB\", \"below\": \"nvme0\"},"
	"{\"name\": \"nvme0\", \"kind\": \"nvme\", \"path\": \"" DISK "\","
	" \"size\": \"96MiB\", \"admission\": \"all\", \"writes_per_day\": 0,"
	" \"io_timeout\": \"20s\", \"discard\": \"segments\"}]}";

static void a_device_is_told_what_is_empty(void **state)
{
	struct td_opts o = {
		.dram_bytes = DRAM, .config = discard_config,
		.socket = { { .name = "a", .tenant = "one" } },
	};
	struct fx *f = *state;
	unsigned long before;

	dm_zero(DISK, MIB);
	fx_start(f, &o);
	fx_online(&f->d);
	tc_open(&f->c[0], f->d.socket, NULL);
	put(f, 1, CHAINS);
	tc_close(&f->c[0]);
	before = discards();
	fx_stop(f);
	/* whose pages they are is unknown to this one: they go */
	f->d.opts.socket[0].tenant = "two";
	T_OK(td_configure(&f->d));
	T_OK(td_start(&f->d));
	fx_online(&f->d);
	T_EQ(ta_node(&f->d, "nvme0", "used"), 0);
	T_WAIT(LONG_WAIT, ta_node(&f->d, "nvme0", "node.discarded_bytes") >=
			  8 * MIB);
	T_CHECK(discards() > before);
	T_CHECK(!status_says(&f->d, "nothing is discarded"));
	tc_open(&f->c[0], f->d.socket, NULL);
	put(f, 1, CHAINS);
	T_EQ(had(f, 1, CHAINS), CHAINS * CHAIN);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&f->d);
}

/* -- file systems ---------------------------------------------------------------- */

static void made(const char *fs)
{
	dm_sh("umount " MNT "; mkdir -p " MNT "; rm -f /var/tmp/disk && "
	      "truncate -s 420M /var/tmp/disk && mkfs.%s -q /var/tmp/disk >/dev/null && "
	      "mount -o loop /var/tmp/disk " MNT, fs);
}

static void full(void)
{
	/* all that a file can have, then what is left in single blocks */
	dm_run("fallocate -l $(df --output=avail -B1 " MNT " | tail -1) "
	       MNT "/filler; dd if=/dev/zero bs=1M of=" MNT "/filler2; "
	       "sync; dd if=/dev/zero bs=4k of=" MNT "/filler3; sync");
}

static void room_again(void)
{
	dm_sh("rm " MNT "/filler*; sync");
}

static void begin(struct fx *f)
{
	struct td_opts o = {
		.dram_bytes = DRAM, .nvme_bytes = STORE,
		.nvme_path = MNT "/nvme0.kv", .config = patient,
		.io_timeout = "20s",
	};

	fx_start(f, &o);
	tc_open(&f->c[0], f->d.socket, NULL);
}

static void what_is_reserved_is_there(struct fx *f, const char *fs)
{
	unsigned int all, lost;

	made(fs);
	begin(f);
	T_CHECK(!status_says(&f->d, "overcommitted"));
	put(f, 1, CHAINS / 2);
	full();
	put(f, 500, 4 * CHAINS);	/* all of the store, and again */
	T_EQ(ta_node(&f->d, "nvme0", "write.enospc"), 0);
	T_CHECK(state_is(&f->d, "online"));
	all = had(f, 1, CHAINS / 2) + had(f, 500, 4 * CHAINS);
	lost = (unsigned int)ta_lost(&f->d);
	printf("# %u pages, %u had to go\n", all, lost);
	T_CHECK(all + lost >= (CHAINS / 2 + 4 * CHAINS) * CHAIN,
		"%u pages, %u had to go", all, lost);
	T_CHECK(all >= STORE_PAGES, "%u pages", all);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&f->d);
	/* and over a start */
	tc_close(&f->c[0]);
	fx_stop(f);
	T_OK(td_start(&f->d));
	fx_online(&f->d);
	T_EQ(ta_counter(&f->d, "nvme0", "recover_orphan"), 0);
	ta_check(&f->d);
	fx_stop(f);
}

static void a_full_ext4_is_not_noticed(void **state)
{
	what_is_reserved_is_there(*state, "ext4");
}

static void a_full_xfs_is_not_noticed(void **state)
{
	what_is_reserved_is_there(*state, "xfs");
}

/* It copies what is written again: the space of a file is never its own. */
static void a_full_btrfs_stops_writes_until_there_is_room(void **state)
{
	struct fx *f = *state;
	uint64_t demoted, lost;
	unsigned int i, all;

	made("btrfs");
	begin(f);
	T_CHECK(status_says(&f->d, "overcommitted: space is not reserved on btrfs"));
	put(f, 1, CHAINS);
	full();
	/* until the store has to write where it wrote before */
	for (i = 0; i < 10 * CHAINS; i++) {
		T_EQ(tc_put(&f->c[0], 500 + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
		if (ta_node(&f->d, "nvme0", "write.enospc") ||
		    ta_node(&f->d, "nvme0", "node.journal_fails"))
			break;
	}
	printf("# %u chains until there was no space: %llu writes refused\n", i,
	       (unsigned long long)ta_node(&f->d, "nvme0", "write.enospc"));
	T_CHECK(i < 10 * CHAINS);
	T_CHECK(status_says(&f->d, "no space left"));
	/* pages come and go in memory, and nothing is wrong */
	for (i = 0; i < CHAINS; i++) {
		T_EQ(tc_put(&f->c[0], 5000 + i, 0, CHAIN), CHAIN);
		T_EQ(tc_hits(&f->c[0], 5000 + i, CHAIN), CHAIN);
	}
	had(f, 1, CHAINS);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&f->d);

	room_again();
	T_WAIT(LONG_WAIT, state_is(&f->d, "online"));
	demoted = ta_counter(&f->d, "dram0", "pgdemote");
	lost = ta_lost(&f->d);
	for (i = 0; i < 10 * CHAINS; i++) {
		T_EQ(tc_put(&f->c[0], 7000 + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
		if (ta_counter(&f->d, "dram0", "pgdemote") > demoted + 100)
			break;
		usleep(100000);
	}
	T_CHECK(i < 10 * CHAINS, "nothing goes down again");
	T_CHECK(!status_says(&f->d, "no space left"));
	all = had(f, 7000, i + 1);
	lost = ta_lost(&f->d) - lost;
	printf("# %u of %u pages, %llu had to go\n", all, (i + 1) * CHAIN,
	       (unsigned long long)lost);
	T_CHECK(all + lost >= (i + 1) * CHAIN);
	T_CHECK(all >= CHAIN);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&f->d);
}

static void a_store_that_finds_no_room_comes_when_there_is_some(void **state)
{
	struct td_opts o = {
		.dram_bytes = DRAM, .nvme_bytes = STORE,
		.nvme_path = MNT "/nvme0.kv", .config = patient,
		.io_timeout = "20s",
	};
	struct fx *f = *state;
	uint64_t lost;

	made("ext4");
	full();
	T_OK(td_init(&f->d, &o));
	T_OK(td_start(&f->d));
	T_WAIT(LONG_WAIT, state_is(&f->d, "failed"));
	T_CHECK(status_says(&f->d, "have to stay free"));
	tc_open(&f->c[0], f->d.socket, NULL);
	T_EQ(tc_put(&f->c[0], 1, 0, CHAIN), CHAIN);
	T_EQ(tc_hits(&f->c[0], 1, CHAIN), CHAIN);
	room_again();
	T_WAIT(LONG_WAIT, state_is(&f->d, "online"));
	lost = ta_lost(&f->d);
	put(f, 100, CHAINS);
	T_EQ(had(f, 100, CHAINS), CHAINS * CHAIN);
	T_EQ(ta_lost(&f->d), lost);
	ta_check(&f->d);
}

static int teardown(void **state)
{
	int err = fx_teardown(state);

	dm_run("umount " MNT "; rm -f /var/tmp/disk");
	return err;
}

#define FULL_TEST(name) cmocka_unit_test_setup_teardown(name, fx_setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		FULL_TEST(a_device_is_told_what_is_empty),
		FULL_TEST(a_full_ext4_is_not_noticed),
		FULL_TEST(a_full_xfs_is_not_noticed),
		FULL_TEST(a_full_btrfs_stops_writes_until_there_is_room),
		FULL_TEST(a_store_that_finds_no_room_comes_when_there_is_some),
	};

	dm_init();
	setvbuf(stdout, NULL, _IOLBF, 0);
	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
