/* SPDX-License-Identifier: Apache-2.0 */
/* The start ladder, with times and boots of the test's own. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "daemon/server/config.h"
#include "daemon/server/ladder.h"
#include "ipc/base/fd.h"
#include "tests/lib/daemon.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define WINDOW_S	600

static char dir[TD_MAX_PATH];
static int dirfd_;
static struct ladder l;

static int setup(void **state)
{
	assert_int_equal(td_tmpdir(NULL, "ladder", dir, sizeof(dir)), 0);
	dirfd_ = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	assert_true(dirfd_ >= 0);
	return 0;
}

static int teardown(void **state)
{
	close(dirfd_);
	td_rmtree(dir);
	return 0;
}

static int start_as(uint64_t now_s, const char *boot, const char *ended)
{
	struct ladder_now now = {
		.now_s = now_s, .window_s = WINDOW_S, .ended = ended,
	};
	struct errmsg e = { "" };

	snprintf(now.boot, sizeof(now.boot), "%s", boot);
	return ladder_begin(&l, dirfd_, &now, &e);
}

static void start(uint64_t now_s)
{
	assert_int_equal(start_as(now_s, "b", NULL), 0);
}

static void file_put(const char *name, const char *text, size_t len)
{
	int fd = openat(dirfd_, name, O_WRONLY | O_CREAT | O_TRUNC, 0600);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, len), len);
	close(fd);
}

static void first_start_and_orderly_ones_adopt_all(void **state)
{
	int i;

	for (i = 0; i < 5; i++) {
		start(100 + (uint64_t)i);
		assert_int_equal(l.step, LADDER_ADOPT);
		assert_int_equal(l.adopt_pct, 100);
		assert_int_equal(l.unclean, 0);
		assert_string_equal(l.why, "");
		assert_int_equal(ladder_end(&l, true), 0);
	}
}

static void each_unclean_end_is_a_step(void **state)
{
	static const struct {
		enum ladder_step step;
		unsigned int pct;
	} want[] = {
		{ LADDER_ADOPT, 100 }, { LADDER_PLAIN, 100 },
		{ LADDER_EMPTY, 0 }, { LADDER_BYPASS, 0 }, { LADDER_BYPASS, 0 },
	};
	unsigned int i;

	start(1000);
	for (i = 0; i < 5; i++) {
		start(1001 + i);
		assert_int_equal(l.unclean, i + 1);
		assert_int_equal(l.step, want[i].step);
		assert_int_equal(l.adopt_pct, want[i].pct);
		assert_true(l.why[0]);
	}
	/* more than are remembered */
	for (i = 0; i < 20; i++)
		start(1010 + i);
	assert_int_equal(l.step, LADDER_BYPASS);
}

static void old_ends_do_not_count(void **state)
{
	start(1000);
	start(1001);
	start(1002);
	assert_int_equal(l.step, LADDER_PLAIN);
	/* the one at 1001 is just out, that at 1002 just in */
	start(1001 + WINDOW_S);
	assert_int_equal(l.unclean, 2);
	start(1001 + 3 * WINDOW_S);
	assert_int_equal(l.unclean, 1);
	assert_int_equal(l.step, LADDER_ADOPT);
}

static void no_window_counts_nothing(void **state)
{
	struct ladder_now now = { .boot = "b", .now_s = 1000 };
	struct errmsg e;
	unsigned int i;

	for (i = 0; i < 6; i++) {
		assert_int_equal(ladder_begin(&l, dirfd_, &now, &e), 0);
		assert_int_equal(l.unclean, 0);
		assert_int_equal(l.step, LADDER_ADOPT);
	}
}

static void orderly_stop_begins_anew(void **state)
{
	unsigned int i;

	for (i = 0; i < 5; i++)
		start(1000 + i);
	assert_int_equal(l.step, LADDER_BYPASS);
	ladder_end(&l, true);
	start(1010);
	assert_int_equal(l.step, LADDER_ADOPT);
	assert_int_equal(l.unclean, 0);
	start(1011);
	assert_int_equal(l.unclean, 1);
}

static void reexec_neither_counts_nor_forgets(void **state)
{
	start(1000);
	start(1001);
	start(1002);
	assert_int_equal(l.unclean, 2);
	ladder_end(&l, false);
	start(1003);
	assert_int_equal(l.unclean, 2);
	start(1004);
	assert_int_equal(l.step, LADDER_EMPTY);
}

static void another_boot_begins_anew(void **state)
{
	unsigned int i;

	for (i = 0; i < 5; i++)
		start(1000 + i);
	assert_int_equal(start_as(50, "c", NULL), 0);
	assert_int_equal(l.step, LADDER_ADOPT);
	assert_int_equal(l.unclean, 0);
}

static void oom_kill_adopts_half(void **state)
{
	start(1000);
	start_as(1001, "b", "oom-kill");
	assert_true(l.oom);
	assert_int_equal(l.adopt_pct, 50);
	assert_non_null(strstr(l.why, "oom-kill"));
	assert_non_null(strstr(l.why, "half"));
	start_as(1002, "b", "oom-kill");
	assert_int_equal(l.adopt_pct, 50);
	start_as(1003, "b", "oom-kill");
	assert_int_equal(l.adopt_pct, 0);
	/* what was said of a daemon that ended in order is of no interest */
	ladder_end(&l, true);
	start_as(1004, "b", "oom-kill");
	assert_int_equal(l.adopt_pct, 100);
}

static void damaged_file_counts_as_one(void **state)
{
	static const char *const text[] = {
		"", "\n", "kvmm-boot 2\nboot b\nstate stopped\n",
		"kvmm-boot 1\n", "kvmm-boot 1\nboot b\nstate stopped",
		"kvmm-boot 1\nboot b\nstate asleep\n",
		"kvmm-boot 1\nboot b\nstate stopped\nunclean 12x\n",
		"kvmm-boot 1\nboot b\nstate stopped\nunclean -\n",
		"kvmm-boot 1\nboot b\nstate stopped\n\n",
		"kvmm-boot 1\nstate stopped\n",
		"kvmm-boot 1\nboot b\nstate running\nunclean 1\nunclean 2\n"
		"unclean 3\nunclean 4\nunclean 5\nunclean 6\nunclean 7\n"
		"unclean 8\nunclean 9\n",
	};
	static char big[8192];
	unsigned int i;

	for (i = 0; i < sizeof(text) / sizeof(text[0]); i++) {
		file_put("boot", text[i], strlen(text[i]));
		start(1000);
		assert_int_equal(l.unclean, 1);
		assert_int_equal(l.step, LADDER_ADOPT);
		assert_non_null(strstr(l.why, "damaged"));
		/* and is good again */
		ladder_end(&l, true);
		start(1001);
		assert_int_equal(l.unclean, 0);
	}
	memset(big, 'x', sizeof(big));
	file_put("boot", big, sizeof(big));
	start(1000);
	assert_int_equal(l.unclean, 1);
	file_put("boot", "kvmm-boot 1\0\nboot b\n", 20);
	start(1000);
	assert_int_equal(l.unclean, 1);
}

/* Any bytes: no crash, and the next start knows where it is. */
static void random_file_is_survived(void **state)
{
	char text[300] = "kvmm-boot 1\nboot b\nstate running\nunclean 998\n";
	size_t len = strlen(text), n;
	unsigned int i, seed = (unsigned int)test_seed();

	print_message("seed %u\n", seed);
	for (i = 0; i < 500; i++) {
		char t[300];
		unsigned int flips;

		memcpy(t, text, len);
		for (flips = 1 + (unsigned int)rand_r(&seed) % 4; flips; flips--)
			t[(unsigned int)rand_r(&seed) % len] =
						(char)rand_r(&seed);
		n = (unsigned int)rand_r(&seed) % 3 ? len
					: (unsigned int)rand_r(&seed) % len;
		file_put("boot", t, n);
		start(1000);
		assert_true(l.unclean <= 2);
		ladder_end(&l, true);
	}
}

static void times_from_the_future_are_dropped(void **state)
{
	const char *t = "kvmm-boot 1\nboot b\nstate stopped\nunclean 5000\n"
			"unclean 18446744073709551615\n";

	file_put("boot", t, strlen(t));
	start(1000);
	assert_int_equal(l.unclean, 0);
}

static void read_only_folder_is_said_and_not_fatal(void **state)
{
	struct ladder_now now = {
		.boot = "b", .now_s = 1001, .window_s = WINDOW_S,
	};
	struct errmsg e = { "" };

	start(1000);
	/* a folder in the place of the new file is as good for root, too */
	assert_int_equal(mkdirat(dirfd_, "boot.new", 0700), 0);
	assert_true(ladder_begin(&l, dirfd_, &now, &e) < 0);
	assert_non_null(strstr(e.text, "not counted"));
	assert_int_equal(l.unclean, 1);
	assert_int_equal(l.step, LADDER_ADOPT);
	assert_true(ladder_end(&l, true) < 0);
}

static void link_is_not_followed(void **state)
{
	char target[TD_MAX_PATH + 16];
	struct stat sb;

	snprintf(target, sizeof(target), "%s/target", dir);
	assert_int_equal(symlinkat(target, dirfd_, "boot.new"), 0);
	assert_true(start_as(1000, "b", NULL) < 0);
	assert_int_equal(stat(target, &sb), -1);
}

/* -- word of how it ended ------------------------------------------------------- */

static void word_of_the_end_is_used_once(void **state)
{
	static struct config c;
	struct ladder_now now;
	char buf[64];

	config_defaults(&c);

	assert_int_equal(ladder_ended(dir, "oom-kill"), 0);
	ladder_now(&now, &c, dirfd_, buf, sizeof(buf));
	assert_string_equal(now.ended, "oom-kill");
	assert_true(strlen(now.boot) > 8 && now.now_s > 0);
	assert_int_equal(now.window_s, 600);
	ladder_now(&now, &c, dirfd_, buf, sizeof(buf));
	assert_string_equal(now.ended, "");

	setenv("KVMM_ENDED", "signal 9", 1);
	ladder_now(&now, &c, dirfd_, buf, sizeof(buf));
	assert_string_equal(now.ended, "signal 9");
	assert_null(getenv("KVMM_ENDED"));
	assert_true(ladder_ended("/nonexistent", "success") < 0);
}

/* -- configuration ---------------------------------------------------------------- */

static void confirmed_configuration_reads_back(void **state)
{
	static struct config c, back;
	char path[TD_MAX_PATH + 32];
	struct errmsg e = { "" };

	config_defaults(&c);
	c.pin_limit_pct = 41;
	assert_int_equal(ladder_confirm(dirfd_, &c), 0);
	snprintf(path, sizeof(path), "%s/%s", dir, LADDER_CONFIRMED);
	assert_int_equal(config_load(path, &back, &e), 0);
	assert_int_equal(back.pin_limit_pct, 41);
}

static void steps_take_from_the_configuration(void **state)
{
	static struct config c;
	unsigned int i;

	config_defaults(&c);
	strcpy(c.policy, "/lib/x.so");
	c.socket[0].mode = KVMM_MODE_ON;
	start(1000);
	start(1001);
	assert_false(ladder_apply(&l, &c));
	assert_string_equal(c.policy, "/lib/x.so");
	start(1002);
	assert_true(ladder_apply(&l, &c));
	assert_string_equal(c.policy, "lru");
	assert_int_equal(c.socket[0].mode, KVMM_MODE_ON);
	for (i = 0; i < 2; i++)
		start(1003);
	assert_true(ladder_apply(&l, &c));
	assert_int_equal(c.socket[0].mode, KVMM_MODE_BYPASS);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(first_start_and_orderly_ones_adopt_all),
		T(each_unclean_end_is_a_step),
		T(old_ends_do_not_count),
		T(no_window_counts_nothing),
		T(orderly_stop_begins_anew),
		T(reexec_neither_counts_nor_forgets),
		T(another_boot_begins_anew),
		T(oom_kill_adopts_half),
		T(damaged_file_counts_as_one),
		T(random_file_is_survived),
		T(times_from_the_future_are_dropped),
		T(read_only_folder_is_said_and_not_fatal),
		T(link_is_not_followed),
		T(word_of_the_end_is_used_once),
		T(confirmed_configuration_reads_back),
		T(steps_take_from_the_configuration),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
