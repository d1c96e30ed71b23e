/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What was adopted is memory like any other: a host in need gets it back, and
 * with a disk below both are one again.
 */
#include <stdio.h>
#include <unistd.h>

#include "tests/lib/kept.h"
#include "tests/lib/unit.h"

/* -- the host lacks memory ---------------------------------------------------------- */

static void say_available(const char *path, unsigned int mib)
{
	FILE *f = fopen(path, "w");

	T_CHECK(f);
	fprintf(f, "MemTotal: %u kB\nMemAvailable: %u kB\n", 10240u * 1024,
		mib * 1024);
	fclose(f);
}

static void what_was_adopted_goes_back_to_a_host_in_need(void **state)
{
	static char path[64], env[96];
	static const char *envs[] = { env, NULL };
	struct td_opts o = fx_kept;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	uint64_t had;

	snprintf(path, sizeof(path), "/var/tmp/kvmm-meminfo-%d", (int)getpid());
	snprintf(env, sizeof(env), "KVMM_TEST_MEMINFO=%s", path);
	say_available(path, 4096);
	o.env = envs;
	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	for (unsigned int i = 0; i < 32; i++)
		T_EQ(tc_put(c, 1 + i, 0, 64), 64);
	tc_ping(c);
	had = ta_node(&f->d, "dram0", "used");
	T_CHECK(had >= 128 * MIB, "%llu", (unsigned long long)had);
	say_available(path, 448);	/* 64 MiB less than 5 per cent */
	fx_crash_and_back(f, c);
	T_WAIT(LONG_WAIT, (tc_sync(c, 0), tc_poll(c),
			   ta_node(&f->d, "dram0", "used") <= had - 64 * MIB));
	say_available(path, 4096);
	T_EQ(tc_put(c, 100, 0, 64), 64);
	T_EQ(tc_hits(c, 100, 64), 64);
	ta_check(&f->d);
	unlink(path);
}

static void say_stalled(const char *path, const char *some, const char *full)
{
	FILE *f = fopen(path, "w");

	T_CHECK(f);
	fprintf(f, "some avg10=%s avg60=0.00 avg300=0.00 total=0\n"
		"full avg10=%s avg60=0.00 avg300=0.00 total=0\n", some, full);
	fclose(f);
}

/* Memory is available, as far as one can see, and nobody gets on. */
static void memory_goes_back_when_all_stall_for_it(void **state)
{
	static char info[64], psi[64], env[2][96];
	static const char *envs[] = { env[0], env[1], NULL };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i;
	uint64_t had;

	snprintf(info, sizeof(info), "/var/tmp/kvmm-meminfo-%d", (int)getpid());
	snprintf(psi, sizeof(psi), "/var/tmp/kvmm-psi-%d", (int)getpid());
	snprintf(env[0], sizeof(env[0]), "KVMM_TEST_MEMINFO=%s", info);
	snprintf(env[1], sizeof(env[1]), "KVMM_TEST_PRESSURE=%s", psi);
	say_available(info, 4096);
	/* some of them always do; that is no reason */
	say_stalled(psi, "99.00", "9.99");
	fx_start(f, &(struct td_opts){ .env = envs });
	tc_open(c, f->d.socket, NULL);
	for (i = 0; i < 32; i++)
		T_EQ(tc_put(c, 1 + i, 0, 64), 64);
	had = ta_node(&f->d, "dram0", "used");
	T_CHECK(had >= 128 * MIB, "%llu", (unsigned long long)had);
	usleep(2500 * 1000);
	tc_sync(c, 0);
	T_EQ(ta_node(&f->d, "dram0", "used"), had);

	say_stalled(psi, "99.00", "10.00");
	T_WAIT(LONG_WAIT, (tc_sync(c, 0), tc_poll(c),
			   ta_node(&f->d, "dram0", "used") <= had - 64 * MIB));
	say_stalled(psi, "0.00", "0.00");
	T_EQ(tc_put(c, 100, 0, 64), 64);
	T_EQ(tc_hits(c, 100, 64), 64);
	ta_check(&f->d);
	unlink(info);
	unlink(psi);
}

/* -- with a disk below ---------------------------------------------------------------- */

#define DISK_CHAINS	48u
#define DISK_PAGES	32u

/* Pages that can be had, wherever they are; bytes are checked. */
static unsigned int all_there(struct tc *c)
{
	unsigned int i, n = 0;

	for (i = 0; i < DISK_CHAINS; i++) {
		struct tc_got g = tc_get(c, 1 + i, DISK_PAGES, 5000);

		n += g.resident + g.fetched;
	}
	return n;
}

/*
 * Three times what fits into memory. Pages in memory whose parents are on the disk
 * alone wait for those; and frames that the last one was reading into for its I/O.
 */
static void memory_and_disk_are_one_again(void **state)
{
	struct td_opts o = fx_kept;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, before, after;

	o.dram_bytes = 32 * MIB;
	o.nvme_bytes = 256 * MIB;
	o.io_timeout = "5s";
	o.config = "{\"timeouts\": {\"crash_window\": \"0s\", "
		   "\"direct_reclaim\": \"1s\"}}";
	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	for (i = 0; i < DISK_CHAINS; i++) {
		T_EQ(tc_put(c, 1 + i, 0, DISK_PAGES), DISK_PAGES);
		T_WAIT(LONG_WAIT, !ta_node(&f->d, "nvme0", "write.inflight") &&
				  !ta_node(&f->d, "nvme0", "write.queued"));
	}
	before = all_there(c);
	T_CHECK(before >= DISK_CHAINS * DISK_PAGES * 9 / 10, "%u", before);
	/* what is on its way to the disk may be lost, no more */
	fx_crash_and_back(f, c);
	fx_online(&f->d);
	ta_check(&f->d);
	T_WAIT(LONG_WAIT, !fx_adopted(f, "waiting"));
	after = all_there(c);
	T_CHECK(after * 100 >= before * 95, "%u of %u pages", after, before);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(what_was_adopted_goes_back_to_a_host_in_need),
		FX_TEST(memory_goes_back_when_all_stall_for_it),
		FX_TEST(memory_and_disk_are_one_again),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
