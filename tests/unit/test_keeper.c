/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper with a toy for a daemon: this program once more, with $TOY saying
 * what it does. A toy counts its starts in a folder, so that each life can be
 * another; it talks as libsystemd does.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "daemon/keeper/keeper.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "tests/lib/daemon.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

static char dir[TD_MAX_PATH], self[TD_MAX_PATH];

/* -- toys ------------------------------------------------------------------------ */

#define CHECK(cond)							\
	do {								\
		if (!(cond)) {						\
			fprintf(stderr, "toy: %d: %s\n", __LINE__, #cond); \
			exit(99);					\
		}							\
	} while (0)

/* A file in the folder, with this life's number and time in it. */
static unsigned int life_count(void)
{
	char path[TD_MAX_PATH + 16];
	unsigned int n = 0;
	uint64_t t;
	FILE *f;

	snprintf(path, sizeof(path), "%s/lives", getenv("TOY_DIR"));
	f = fopen(path, "a+");
	CHECK(f);
	rewind(f);
	while (fscanf(f, "%lu", &t) == 1)
		n++;
	fprintf(f, "%lu\n", now_ns());
	fclose(f);
	return n;
}

static int memfd(const char *text)
{
	int fd = memfd_create("toy", MFD_CLOEXEC);

	CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	return fd;
}

static void park(const char *name, int fd)
{
	char text[512];

	snprintf(text, sizeof(text), "FDSTORE=1\nFDPOLL=0\nFDNAME=%s", name);
	CHECK(sd_pid_notify_with_fds(0, 0, text, &fd, 1) > 0);
}

/* Of this toy's descriptors; kept to its end. */
static char **names;

/* The descriptor of a name, or -1. */
static int found(const char *name)
{
	int i;

	for (i = 0; names && names[i]; i++)
		if (!strcmp(names[i], name))
			return SD_LISTEN_FDS_START + i;
	return -1;
}

static bool holds(int fd, const char *text)
{
	char buf[32] = "";

	return fd >= 0 && pread(fd, buf, sizeof(buf) - 1, 0) >= 0 &&
	       !strcmp(buf, text);
}

static void die(void)
{
	kill(getpid(), SIGKILL);
	for (;;)
		pause();
}

/* Parks in its first life; in the second it finds that and nothing else. */
static int toy_store(unsigned int life)
{
	int n = sd_listen_fds_with_names(0, &names);

	if (!life) {
		CHECK(n == 0 && !getenv("KVMM_ENDED"));
		CHECK(atoi(getenv("FDSTORE")) > 100 &&
		      atoi(getenv("FDSTORE")) <= KEEPER_MAX);
		CHECK(atoi(getenv("KVMM_KEEPER")) == getppid());
		sd_notify(0, "READY=1");
		park("@a", memfd("alpha"));
		park("@b", memfd("beta"));
		park("@c", memfd("gamma"));
		park("bad:name", memfd("bad"));
		sd_notify(0, "FDSTOREREMOVE=1\nFDNAME=@b");
		die();
	}
	CHECK(n == 2);
	CHECK(holds(found("@a"), "alpha"));
	CHECK(holds(found("@c"), "gamma"));
	CHECK(!strcmp(getenv("KVMM_ENDED"), "signal 9"));
	if (life == 1)
		die();			/* they are still kept */
	return 0;
}

/* Crashes five times, then ends in order. */
static int toy_crash(unsigned int life)
{
	sd_notify(0, "READY=1");
	if (life < 5)
		return 1;
	return 0;
}

static int toy_refuse(unsigned int life)
{
	return 1;			/* it never served */
}

static int toy_config(unsigned int life)
{
	sd_notify(0, "READY=1");
	return 78;
}

static volatile sig_atomic_t got_hup, got_term;

static void on_signal(int sig)
{
	if (sig == SIGHUP)
		got_hup = 1;
	else
		got_term = 1;
}

static int toy_signals(unsigned int life)
{
	sigset_t none;

	signal(SIGHUP, on_signal);
	signal(SIGTERM, on_signal);
	/* what the keeper blocks for itself is not blocked here */
	sigprocmask(SIG_SETMASK, NULL, &none);
	CHECK(!sigismember(&none, SIGTERM) && !sigismember(&none, SIGCHLD));
	sd_notify(0, "READY=1\nSTATUS=here");
	while (!got_term)
		usleep(1000);
	return got_hup ? 7 : 8;
}

/* A grandchild is not the daemon: what it says is not heard. */
static int toy_stranger(unsigned int life)
{
	pid_t pid;

	sd_notify(0, "READY=1");
	if (life) {
		int n = sd_listen_fds_with_names(0, &names);

		CHECK(n == 1 && holds(found("@mine"), "mine"));
		return 0;
	}
	park("@mine", memfd("mine"));
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		park("@theirs", memfd("theirs"));
		sd_notify(0, "FDSTOREREMOVE=1\nFDNAME=@mine");
		_exit(0);
	}
	waitpid(pid, NULL, 0);
	die();
	return 0;
}

/* A listening socket of the keeper's own start is there in each life. */
static int toy_socket(unsigned int life)
{
	int n = sd_listen_fds_with_names(0, &names);

	sd_notify(0, "READY=1");
	CHECK(found("default") >= 0);
	CHECK(sd_is_socket(found("default"), AF_UNIX, SOCK_SEQPACKET, 1));
	if (!life) {
		CHECK(n == 1);
		sd_notify(0, "FDSTOREREMOVE=1\nFDNAME=default");
		park("@a", memfd("alpha"));
		die();
	}
	CHECK(n == 2 && holds(found("@a"), "alpha"));
	return 0;
}

/* More names than go into one environment string: it is started all the same. */
static int toy_many(unsigned int life)
{
	char name[80];
	unsigned int i;
	int fd, n;

	sd_notify(0, "READY=1");
	n = sd_listen_fds(0);
	if (life)
		return n > 1000 && n < 2000 ? 0 : 9;
	fd = memfd("x");
	for (i = 0; i < 3000; i++) {
		snprintf(name, sizeof(name), "@%068u", i);
		park(name, fd);
	}
	die();
	return 0;
}

/* As many as it is told that there is room for, and some more. */
static int toy_few(unsigned int life)
{
	unsigned int max = (unsigned int)atoi(getenv("FDSTORE")), i;
	char name[16];
	int n = sd_listen_fds_with_names(0, &names);

	CHECK(max > 150 && max < 256);
	sd_notify(0, "READY=1");
	if (life) {
		CHECK(n == (int)max);
		for (i = 0; i < max; i++) {
			snprintf(name, sizeof(name), "@%u", i);
			CHECK(holds(found(name), name));
		}
		return 0;
	}
	for (i = 0; i < max + 20; i++) {
		int fd;

		snprintf(name, sizeof(name), "@%u", i);
		fd = memfd(name);
		park(name, fd);
		close(fd);
	}
	die();
	return 0;
}

/* Feeds its watchdog for longer than that waits, and no more. */
static void feed(void)
{
	unsigned int i;

	CHECK(atoi(getenv("WATCHDOG_USEC")) == 500000);
	CHECK(atoi(getenv("WATCHDOG_PID")) == getpid());
	sd_notify(0, "READY=1");
	for (i = 0; i < 15; i++) {
		usleep(100000);
		sd_notify(0, "WATCHDOG=1");
	}
}

static int toy_hang(unsigned int life)
{
	if (life) {
		CHECK(!strcmp(getenv("KVMM_ENDED"), "watchdog"));
		return 0;
	}
	feed();
	raise(SIGSTOP);
	return 9;
}

/* Nor does it hear the signal. */
static int toy_deaf(unsigned int life)
{
	signal(SIGABRT, SIG_IGN);
	if (!life)
		feed();
	else
		sd_notify(0, "READY=1");
	if (life)
		return strcmp(getenv("KVMM_ENDED"), "watchdog") ? 9 : 0;
	for (;;)
		pause();
}

/* Its keeper has not listened for longer than it waits. */
static int toy_late(unsigned int life)
{
	if (life)
		return 9;
	sd_notify(0, "READY=1");
	usleep(100000);
	kill(getppid(), SIGSTOP);
	usleep(2500000);
	kill(getppid(), SIGCONT);
	usleep(300000);
	sd_notify(0, "WATCHDOG=1");
	usleep(300000);
	return 0;
}

static int toy_feed(unsigned int life)
{
	feed();
	return 0;
}

static const struct {
	const char	*name;
	int		(*fn)(unsigned int life);
} toys[] = {
	{ "store", toy_store }, { "crash", toy_crash },
	{ "refuse", toy_refuse }, { "config", toy_config },
	{ "signals", toy_signals }, { "stranger", toy_stranger },
	{ "socket", toy_socket }, { "many", toy_many },
	{ "few", toy_few }, { "hang", toy_hang }, { "deaf", toy_deaf }, { "feed", toy_feed },
	{ "late", toy_late },
};

static int toy_run(const char *name)
{
	unsigned int i;

	prctl(PR_SET_PDEATHSIG, SIGKILL);	/* of the keeper: a test's toy */
	for (i = 0; i < sizeof(toys) / sizeof(toys[0]); i++)
		if (!strcmp(toys[i].name, name))
			return toys[i].fn(life_count());
	return 98;
}

/* -- keepers -------------------------------------------------------------------------- */

static int setup(void **state)
{
	assert_int_equal(td_tmpdir(NULL, "keeper", dir, sizeof(dir)), 0);
	return 0;
}

static int teardown(void **state)
{
	td_rmtree(dir);
	return 0;
}

/* A keeper in a process of its own; @before runs in there first. */
static pid_t keeper_start(const char *toy, void (*before)(void))
{
	static struct keeper k;
	char *argv[] = { self, NULL };
	pid_t pid;

	fflush(NULL);
	pid = fork();
	assert_true(pid >= 0);
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	unsetenv("NOTIFY_SOCKET");
	setenv("TOY", toy, 1);
	setenv("TOY_DIR", dir, 1);
	if (before)
		before();
	_exit(keeper_run(&k, argv));
}

/* Its exit status; fails when it does not end. */
static int keeper_wait(pid_t pid, unsigned int ms)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);
	int status;

	while (!waitpid(pid, &status, WNOHANG)) {
		if (deadline_past(deadline)) {
			kill(pid, SIGKILL);
			waitpid(pid, &status, 0);
			fail_msg("the keeper does not end");
		}
		usleep(1000);
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 256;
}

/* Times of the toy's starts; how many. */
static unsigned int lives(uint64_t *t, unsigned int max)
{
	char path[TD_MAX_PATH + 16];
	unsigned int n = 0;
	FILE *f;

	snprintf(path, sizeof(path), "%s/lives", dir);
	f = fopen(path, "r");
	if (!f)
		return 0;
	while (n < max && fscanf(f, "%lu", &t[n]) == 1)
		n++;
	fclose(f);
	return n;
}

static void killed_daemon_finds_what_it_parked(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("store", NULL), 10000), 0);
	assert_int_equal(lives(t, 8), 3);
}

static void pauses_grow_between_crashes(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("crash", NULL), 20000), 0);
	assert_int_equal(lives(t, 8), 6);
	/* the first is none */
	assert_true(t[2] - t[1] >= 100 * NSEC_PER_MSEC);
	assert_true(t[3] - t[2] >= 200 * NSEC_PER_MSEC);
	assert_true(t[5] - t[4] >= 800 * NSEC_PER_MSEC);
}

static void daemon_that_never_served_is_not_started_again(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("refuse", NULL), 5000), 1);
	assert_int_equal(lives(t, 8), 1);
}

static void refused_configuration_is_not_tried_again(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("config", NULL), 5000), 78);
	assert_int_equal(lives(t, 8), 1);
}

static void watched(void)
{
	/* ours; its child is to be found out in half of that */
	setenv("WATCHDOG_USEC", "1000000", 1);
}

static void hung_daemon_is_started_again(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("hang", watched), 10000), 0);
	assert_int_equal(lives(t, 8), 2);
	assert_true(t[1] - t[0] >= 1900 * NSEC_PER_MSEC);
}

static void so_is_one_that_hears_no_signal(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("deaf", watched), 15000), 0);
	assert_int_equal(lives(t, 8), 2);
}

static void daemon_that_says_that_it_lives_is_left_alone(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("feed", watched), 10000), 0);
	assert_int_equal(lives(t, 8), 1);
}

static void keeper_that_was_stopped_asks_again(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("late", watched), 10000), 0);
	assert_int_equal(lives(t, 8), 1);
}

static void strangers_are_not_heard(void **state)
{
	assert_int_equal(keeper_wait(keeper_start("stranger", NULL), 5000), 0);
}

static void too_many_names_do_not_stop_the_next_start(void **state)
{
	assert_int_equal(keeper_wait(keeper_start("many", NULL), 20000), 0);
}

static void few_descriptors(void)
{
	const struct rlimit rl = { 256, 256 };

	if (setrlimit(RLIMIT_NOFILE, &rl))
		_exit(97);
}

static void low_limit_of_descriptors_is_used_up(void **state)
{
	uint64_t t[8];

	assert_int_equal(keeper_wait(keeper_start("few", few_descriptors),
				     10000), 0);
	assert_int_equal(lives(t, 8), 2);
}

static void listen_before(void)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	char text[16];

	if (fd < 0 || bind(fd, (struct sockaddr *)&sa, sizeof(sa.sun_family)) ||
	    listen(fd, 1) || dup2(fd, 3) < 0)
		_exit(97);
	if (fd != 3)
		close(fd);
	snprintf(text, sizeof(text), "%d", getpid());
	setenv("LISTEN_PID", text, 1);
	setenv("LISTEN_FDS", "1", 1);
	setenv("LISTEN_FDNAMES", "default", 1);
}

static void sockets_of_the_start_are_handed_on(void **state)
{
	assert_int_equal(keeper_wait(keeper_start("socket", listen_before),
				     5000), 0);
}

/* -- our own manager -------------------------------------------------------------------- */

static int up = -1;
static char up_addr[sizeof(struct sockaddr_un)];

static void up_listen(void)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	socklen_t len = sizeof(sa);

	up = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	assert_true(up >= 0);
	assert_int_equal(bind(up, (struct sockaddr *)&sa,
			      sizeof(sa.sun_family)), 0);
	assert_int_equal(getsockname(up, (struct sockaddr *)&sa, &len), 0);
	snprintf(up_addr, sizeof(up_addr), "@%.*s",
		 (int)(len - sizeof(sa.sun_family) - 1), sa.sun_path + 1);
}

static void up_before(void)
{
	setenv("NOTIFY_SOCKET", up_addr, 1);
}

static void signals_go_down_and_words_go_up(void **state)
{
	const struct timeval tv = { .tv_sec = 5 };
	char text[256] = "";
	pid_t pid;

	up_listen();
	setsockopt(up, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
	pid = keeper_start("signals", up_before);
	assert_true(recv(up, text, sizeof(text) - 1, 0) > 0);
	assert_string_equal(text, "READY=1\nSTATUS=here\n");
	kill(pid, SIGHUP);
	usleep(100000);
	kill(pid, SIGTERM);
	assert_int_equal(keeper_wait(pid, 5000), 7);
	close_fd(&up);
}

static void what_is_kept_is_not_passed_on(void **state)
{
	char text[256];
	ssize_t n;

	up_listen();
	assert_int_equal(keeper_wait(keeper_start("store", up_before), 10000), 0);
	while ((n = recv(up, text, sizeof(text) - 1, MSG_DONTWAIT)) > 0) {
		text[n] = '\0';
		assert_null(strstr(text, "FD"));
	}
	close_fd(&up);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(killed_daemon_finds_what_it_parked),
		T(pauses_grow_between_crashes),
		T(daemon_that_never_served_is_not_started_again),
		T(refused_configuration_is_not_tried_again),
		T(hung_daemon_is_started_again),
		T(so_is_one_that_hears_no_signal),
		T(daemon_that_says_that_it_lives_is_left_alone),
		T(keeper_that_was_stopped_asks_again),
		T(strangers_are_not_heard),
		T(too_many_names_do_not_stop_the_next_start),
		T(low_limit_of_descriptors_is_used_up),
		T(sockets_of_the_start_are_handed_on),
		T(signals_go_down_and_words_go_up),
		T(what_is_kept_is_not_passed_on),
	};
	const char *toy = getenv("TOY");
	ssize_t n;

	if (toy)
		return toy_run(toy);
	n = readlink("/proc/self/exe", self, sizeof(self) - 1);
	self[n > 0 ? n : 0] = '\0';
	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
