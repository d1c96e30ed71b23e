/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The power goes, in the middle of writes. boots: 2
 *
 * The machine is run twice over one disk. The first time a part of the pages has
 * been on the medium for a while when the machine is switched off, and another
 * part is on its way. The second time a kvmmd that knows nothing but the disk
 * finds the first part again, and no page of either has a wrong byte.
 *
 * The disk's own cache is not lost here: it is memory of the host's. That is what
 * test_logwrites.c is for. This one shows what the end of a kernel leaves, and that
 * a kvmmd which never ended is found by one that was never told of it.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define CHAIN		8		/* pages */
#define SAFE		48		/* chains, six times what DRAM holds */
#define LATE		48
#define DRAM		(4 * MIB)
#define LONG_WAIT	60000
#define FLUSHED_NS	(2 * NSEC_PER_SEC) /* many groups of the journal */
#define DISK		"/dev/nvme0n1"
#define STORE		(400 * MIB)
#define NOTE_OFF	(1024 * MIB)	/* of the disk: behind the store */

static unsigned int boot(void)
{
	const char *s = getenv("KVMM_BOOT");

	return s ? (unsigned int)atoi(s) : 0;
}

static void start(struct fx *f)
{
	struct td_opts o = {
		.dram_bytes = DRAM, .nvme_bytes = STORE,
		.nvme_path = DISK, .io_timeout = "5s",
		.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
	};

	fx_start(f, &o);
	T_WAIT(LONG_WAIT, !strcmp(ta_node_state(&f->d, "nvme0"), "online"));
	tc_open(&f->c[0], f->d.socket, NULL);
}

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

/* What the first machine has to tell the second: how many pages are below. */
static void note(bool write, uint64_t *pages)
{
	static _Alignas(4096) char buf[4096];
	int fd = open(DISK, O_RDWR | O_DIRECT | O_SYNC | O_CLOEXEC);

	T_CHECK(fd >= 0);
	memcpy(buf, pages, sizeof(*pages));
	T_EQ(write ? pwrite(fd, buf, sizeof(buf), NOTE_OFF) :
		     pread(fd, buf, sizeof(buf), NOTE_OFF), sizeof(buf));
	memcpy(pages, buf, sizeof(*pages));
	close(fd);
}

static void the_power_goes(void **state)
{
	uint64_t below;
	struct timespec ts = ns_to_timespec(FLUSHED_NS);
	struct fx *f = *state;
	unsigned int i;
	int fd;

	start(f);
	for (i = 0; i < SAFE; i++) {
		T_EQ(tc_put(&f->c[0], 1 + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	below = ta_node(&f->d, "nvme0", "bytes_pages") / TC_PAGE_BYTES;
	nanosleep(&ts, NULL);
	note(true, &below);
	for (i = 0; i < LATE; i++)
		tc_put(&f->c[0], 1000 + i, 0, CHAIN);
	fd = open("/proc/sysrq-trigger", O_WRONLY | O_CLOEXEC);
	T_CHECK(fd >= 0);
	T_EQ(write(fd, "b", 1), 1);
	pause();
}

static void what_was_on_the_disk_is_found_again(void **state)
{
	struct fx *f = *state;
	struct tc_got sum = { 0 };
	uint64_t demoted, below = 0;
	unsigned int i;

	start(f);
	note(false, &below);
	/* all but what DRAM alone had */
	T_CHECK(below >= SAFE * CHAIN - DRAM / TC_PAGE_BYTES, "%llu pages",
		(unsigned long long)below);
	demoted = ta_node(&f->d, "nvme0", "used") / TC_PAGE_BYTES;
	T_CHECK(demoted >= below, "%llu of %llu pages",
		(unsigned long long)demoted, (unsigned long long)below);
	for (i = 0; i < SAFE; i++) {
		struct tc_got got = tc_get(&f->c[0], 1 + i, CHAIN, 10000);

		sum.resident += got.resident;
		sum.fetched += got.fetched;
		sum.missed += got.missed;
	}
	printf("# %u fetched, %u missed; %llu were below, %llu were found\n",
	       sum.fetched, sum.missed, (unsigned long long)below,
	       (unsigned long long)demoted);
	T_CHECK(sum.fetched >= below, "%u fetched, %u missed", sum.fetched,
		sum.missed);
	/* these may be there or not; tc_get() has looked at every byte */
	for (i = 0; i < LATE; i++)
		tc_get(&f->c[0], 1000 + i, CHAIN, 10000);
	T_EQ(tc_put(&f->c[0], 5000, 0, CHAIN), CHAIN);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest first[] = { FX_TEST(the_power_goes) };
	const struct CMUnitTest second[] = {
		FX_TEST(what_was_on_the_disk_is_found_again),
	};

	fx_filter();
	return boot() == 1 ? cmocka_run_group_tests(first, NULL, NULL) :
			     cmocka_run_group_tests(second, NULL, NULL);
}
