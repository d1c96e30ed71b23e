/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd on a real NVMe driver that fails as disks do: below it lies a target of
 * the device mapper, which is exchanged while pages go down and come up. Whatever
 * it does, no byte is wrong, requests end in time, and afterwards the node comes
 * back by itself.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define DISK		"/dev/nvme0n1"
#define MAPPED		"/dev/mapper/kvmm"
#define SECTORS		(512 * MIB / 512)
#define CHAIN		8		/* pages */
#define CHAINS		40
#define DRAM		(8 * MIB)
#define LONG_WAIT	90000

/* dmsetup has a sentence for each call about what main() tells it of udev. */
static int run(const char *cmd)
{
	char quiet[600];

	snprintf(quiet, sizeof(quiet), "( %s ) 2>/dev/null", cmd);
	return system(quiet);
}

static void sh(const char *fmt, ...)
	__attribute__((format(printf, 1, 2)));

static void sh(const char *fmt, ...)
{
	char cmd[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(cmd, sizeof(cmd), fmt, ap);
	va_end(ap);
	T_CHECK(!run(cmd), "%s", cmd);
}

/* Exchange what lies below, under running I/O: @fmt gets the device's name. */
static void table(const char *target, const char *more)
{
	sh("dmsetup suspend --noflush kvmm && "
	   "echo '0 %llu %s " DISK " 0 %s' | dmsetup load kvmm && "
	   "dmsetup resume kvmm", (unsigned long long)SECTORS, target, more);
}

static void healthy(void)
{
	table("linear", "");
}

static void nothing_but_errors(void)
{
	sh("dmsetup suspend --noflush kvmm && "
	   "echo '0 %llu error' | dmsetup load kvmm && dmsetup resume kvmm",
	   (unsigned long long)SECTORS);
}

static int setup(void **state)
{
	if (run("echo '0 1048576 linear " DISK " 0' | dmsetup create kvmm"))
		return -1;
	return fx_setup(state);
}

static int teardown(void **state)
{
	/* what is held up must end before anybody can */
	int err = run("dmsetup suspend --noflush kvmm; "
		      "echo '0 1048576 linear " DISK " 0' | "
		      "dmsetup load kvmm; dmsetup resume kvmm");

	err |= fx_teardown(state);
	err |= run("dmsetup remove --retry kvmm");
	return err ? -1 : 0;
}

static bool state_is(struct test_daemon *d, const char *state)
{
	return !strcmp(ta_node_state(d, "nvme0"), state);
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
	T_CHECK(got.missed <= CHAINS * CHAIN / 10, "%u missed", got.missed);
	T_CHECK(got.fetched > CHAINS * CHAIN / 2, "%u fetched", got.fetched);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&f->d);
}

static void a_dead_device_is_a_miss_until_it_is_back(void **state)
{
	struct fx *f = *state;
	struct tc_got got;

	fill(f);
	nothing_but_errors();
	got = read_all(f, 2000);
	T_CHECK(got.missed > 0);
	T_WAIT(LONG_WAIT, state_is(&f->d, "failed"));
	T_CHECK(ta_node(&f->d, "nvme0", "read.eio") > 0);
	dram_serves(f, 1000);
	healthy();
	T_WAIT(LONG_WAIT, state_is(&f->d, "online"));
	tc_put(&f->c[0], 2000, 0, CHAIN);
	ta_check(&f->d);
}

static void a_device_that_stalls_keeps_nobody_waiting(void **state)
{
	struct fx *f = *state;
	struct tc_got got;

	fill(f);
	table("delay", "10000");
	got = read_all(f, 500);
	T_CHECK(got.missed > 0);
	T_WAIT(LONG_WAIT, !state_is(&f->d, "online"));
	dram_serves(f, 1000);
	healthy();
	T_WAIT(LONG_WAIT, state_is(&f->d, "online"));
	/* what was not lost to errors is still right */
	read_all(f, 10000);
	ta_check(&f->d);
}

/* It says yes and does nothing: the old bytes are found there. */
static void a_device_that_drops_writes_gives_no_wrong_byte(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	fill(f);
	table("flakey", "0 3600 1 drop_writes");
	for (i = 0; i < CHAINS; i++) {
		tc_put(&f->c[0], 500 + i, 0, CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	healthy();
	for (i = 0; i < CHAINS; i++)
		tc_get(&f->c[0], 500 + i, CHAIN, 5000);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgcrc_fail") > 0);
	ta_check(&f->d);
}

static void a_device_that_corrupts_reads_gives_no_wrong_byte(void **state)
{
	struct fx *f = *state;

	fill(f);
	table("flakey", "0 3600 5 corrupt_bio_byte 32 r 1 0");
	read_all(f, 2000);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgcrc_fail") > 0);
	healthy();
	T_WAIT(LONG_WAIT, state_is(&f->d, "online"));
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
	sh("echo 1 >/sys/class/nvme/nvme1/device/remove");
	read_all(f, 2000);
	T_WAIT(LONG_WAIT, !state_is(&f->d, "online"));
	dram_serves(f, 1000);
	ta_check(&f->d);
	sh("echo 1 >/sys/bus/pci/rescan");
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
			a_device_that_corrupts_reads_gives_no_wrong_byte,
			setup, teardown),
		cmocka_unit_test_setup_teardown(
			it_serves_on_when_the_controller_is_pulled_out,
			setup, teardown),
	};

	/* udev reads what it is told of, and what is slow keeps dmsetup waiting */
	setenv("DM_DISABLE_UDEV", "1", 1);
	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
