/* SPDX-License-Identifier: Apache-2.0 */
/* Reading ahead: whatever was foretold, what is asked for is what comes. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/node/nvme.h"
#include "ipc/base/fd.h"
#include "ipc/base/rand.h"
#include "tests/lib/unit.h"

#define BLOCKS	64u		/* of the file */
#define MOST	8u		/* a range */

static struct nvme store;
static struct nvme_ahead *ahead;
static int fds;

static int setup(void **state)
{
	const char *dir = getenv("TMPDIR");
	uint64_t block[NVME_BLOCK / 8];
	char path[200];
	unsigned int i;

	fds = fd_count();
	snprintf(path, sizeof(path), "%s/kvmm-ahead-%d",
		 dir ? dir : "/var/tmp", (int)getpid());
	store.open.fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	assert_true(store.open.fd >= 0);
	unlink(path);
	for (i = 0; i < BLOCKS; i++) {
		block[0] = i + 1;
		assert_int_equal(write(store.open.fd, block, sizeof(block)),
				 sizeof(block));
	}
	return nvme_ahead_create(&store, MOST, &ahead);
}

static int teardown(void **state)
{
	nvme_ahead_destroy(ahead);
	close_fd(&store.open.fd);
	assert_int_equal(fd_count(), fds);
	return 0;
}

/* Ask for blocks [@at, @at + @nr), foretell others; are they what they are? */
static void ask(uint64_t at, uint64_t nr, uint64_t next, uint64_t next_nr)
{
	const char *buf = nvme_ahead_read(ahead, at * NVME_BLOCK, nr,
					  next * NVME_BLOCK, next_nr);
	uint64_t i, mark;

	for (i = 0; i < nr; i++) {
		memcpy(&mark, buf + i * NVME_BLOCK, sizeof(mark));
		assert_int_equal(mark, at + i < BLOCKS ? at + i + 1 : 0);
		assert_int_equal(nvme_ahead_gone(ahead, i),
				 at + i < BLOCKS ? 0 : -EIO);
	}
}

static void ranges_come_in_the_order_that_was_foretold(void **state)
{
	uint64_t at;

	for (at = 0; at < BLOCKS; at += MOST)
		ask(at, MOST, at + MOST, at + MOST < BLOCKS ? MOST : 0);
}

static void range_that_was_not_foretold_comes_all_the_same(void **state)
{
	struct rng r;
	unsigned int i;

	rng_seed(&r, test_seed());
	for (i = 0; i < 1000; i++)
		ask(rng_below(&r, BLOCKS - MOST), 1 + rng_below(&r, MOST),
		    rng_below(&r, BLOCKS - MOST), rng_below(&r, MOST + 1));
}

/* The file ends in the middle of it. */
static void blocks_that_cannot_be_read_are_zero_and_known(void **state)
{
	ask(0, 1, BLOCKS - 2, 4);
	ask(BLOCKS - 2, 4, 3, 2);
	ask(BLOCKS, 2, 0, 0);
}

static void end_waits_for_what_is_being_read(void **state)
{
	ask(0, MOST, MOST, MOST);
}

#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(ranges_come_in_the_order_that_was_foretold),
		T(range_that_was_not_foretold_comes_all_the_same),
		T(blocks_that_cannot_be_read_are_zero_and_known),
		T(end_waits_for_what_is_being_read),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
