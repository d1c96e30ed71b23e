/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The park against a store that is a socket of the test's: what is said to it,
 * what is done when it does not listen, and what comes back.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/server/park.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

/**
 * struct store - the other end
 * @sock:	$NOTIFY_SOCKET
 * @text:	of the last message, @fd what came with it
 */
static struct store {
	int	sock;
	char	text[512];
	int	fd;
} st;

static struct park *park;
static int nr_fds;

static void store_listen(const char *max)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	socklen_t len = sizeof(sa);

	st.sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	assert_true(st.sock >= 0);
	assert_int_equal(bind(st.sock, (struct sockaddr *)&sa,
			      sizeof(sa.sun_family)), 0);
	assert_int_equal(getsockname(st.sock, (struct sockaddr *)&sa, &len), 0);
	sa.sun_path[0] = '@';
	setenv("NOTIFY_SOCKET", sa.sun_path, 1);
	setenv("FDSTORE", max, 1);
}

/* Take one message; false when there is none. */
static bool store_recv(void)
{
	union {
		struct cmsghdr	align;
		char		bytes[CMSG_SPACE(4 * sizeof(int))];
	} ctl;
	struct iovec iov = { st.text, sizeof(st.text) - 1 };
	struct msghdr mh = {
		.msg_iov = &iov, .msg_iovlen = 1,
		.msg_control = ctl.bytes, .msg_controllen = sizeof(ctl.bytes),
	};
	ssize_t n = recvmsg(st.sock, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	struct cmsghdr *c;

	close_fd(&st.fd);
	if (n < 0)
		return false;
	st.text[n] = '\0';
	c = CMSG_FIRSTHDR(&mh);
	if (c)
		memcpy(&st.fd, CMSG_DATA(c), sizeof(int));
	return true;
}

#define assert_said(what)						\
	do {								\
		assert_true(store_recv());				\
		assert_string_equal(st.text, what);			\
	} while (0)
#define assert_silent()		assert_false(store_recv())

static int setup(void **state)
{
	st = (struct store){ .sock = -1, .fd = -1 };
	nr_fds = fd_count();
	return 0;
}

static int teardown(void **state)
{
	park_destroy(park);
	park = NULL;
	close_fd(&st.fd);
	close_fd(&st.sock);
	unsetenv("NOTIFY_SOCKET");
	unsetenv("FDSTORE");
	unsetenv("KVMM_KEEPER");
	assert_int_equal(fd_count(), nr_fds);
	return 0;
}

static int memfd(const char *text)
{
	int fd = memfd_create("test", MFD_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), strlen(text));
	return fd;
}

static bool same_file(int a, int b)
{
	struct stat x, y;

	return !fstat(a, &x) && !fstat(b, &y) && x.st_ino == y.st_ino &&
	       x.st_dev == y.st_dev;
}

static struct park_stat stat_now(void)
{
	struct park_stat s;

	park_stat(park, &s);
	return s;
}

/* -- with a store -------------------------------------------------------------- */

static void put_sends_the_descriptor_under_its_name(void **state)
{
	int fd = memfd("x");

	store_listen("16");
	assert_int_equal(park_create(&park), 0);
	assert_true(park_enabled(park));
	assert_int_equal(park_put(park, fd, "ext/%d.%d", 1, 7), 0);
	assert_said("FDSTORE=1\nFDPOLL=0\nFDNAME=@ext/1.7");
	assert_true(st.fd >= 0 && same_file(st.fd, fd));
	assert_silent();
	assert_int_equal(stat_now().parked, 1);
	assert_string_equal(stat_now().keeper, "systemd");
	close(fd);
}

static void drop_makes_the_store_forget(void **state)
{
	int fd = memfd("x");

	store_listen("16");
	assert_int_equal(park_create(&park), 0);
	park_put(park, fd, "a");
	store_recv();
	park_drop(park, "a");
	assert_said("FDSTOREREMOVE=1\nFDNAME=@a");
	park_drop(park, "a");
	park_drop(park, "never");
	assert_silent();
	assert_int_equal(stat_now().held, 0);
	close(fd);
}

static void put_of_a_used_name_replaces_it(void **state)
{
	int a = memfd("a"), b = memfd("b");

	store_listen("16");
	assert_int_equal(park_create(&park), 0);
	park_put(park, a, "n");
	store_recv();
	assert_int_equal(park_put(park, b, "n"), 0);
	assert_said("FDSTOREREMOVE=1\nFDNAME=@n");
	assert_said("FDSTORE=1\nFDPOLL=0\nFDNAME=@n");
	assert_true(same_file(st.fd, b));
	assert_int_equal(stat_now().parked, 1);
	close(a);
	close(b);
}

static void what_is_no_name_is_refused(void **state)
{
	int fd = memfd("x");

	store_listen("16");
	assert_int_equal(park_create(&park), 0);
	assert_int_equal(park_put(park, fd, "a:b"), -EINVAL);
	assert_int_equal(park_put(park, fd, "a b"), -EINVAL);
	assert_int_equal(park_put(park, fd, "\n"), -EINVAL);
	assert_int_equal(park_put(park, fd, "%s", ""), -EINVAL);
	assert_int_equal(park_put(park, fd, "%080d", 1), -EINVAL);
	assert_int_equal(park_put(park, -1, "a"), -EINVAL);
	assert_silent();
	close(fd);
}

static void full_store_is_counted_and_filled_when_there_is_room(void **state)
{
	int fd[3] = { memfd("0"), memfd("1"), memfd("2") };
	char why[256];
	int i;

	store_listen("2");
	assert_int_equal(park_create(&park), 0);
	assert_int_equal(park_put(park, fd[0], "0"), 0);
	assert_int_equal(park_put(park, fd[1], "1"), 0);
	assert_false(park_why(park, why, sizeof(why)));
	assert_int_equal(park_put(park, fd[2], "2"), -ENOSPC);
	assert_true(park_why(park, why, sizeof(why)));
	assert_non_null(strstr(why, "1 of 3"));
	assert_int_equal(stat_now().failed, 1);
	assert_int_equal(stat_now().waiting, 1);
	while (store_recv())
		;
	park_drop(park, "0");
	assert_said("FDSTOREREMOVE=1\nFDNAME=@0");
	assert_int_equal(park_run(park, now_ns()), DEADLINE_NONE);
	assert_said("FDSTORE=1\nFDPOLL=0\nFDNAME=@2");
	assert_false(park_why(park, why, sizeof(why)));
	for (i = 0; i < 3; i++)
		close(fd[i]);
}

/* A manager that does not read: a put does not wait for it, a drop is kept. */
static void busy_store_is_tried_again(void **state)
{
	uint64_t begin = now_ns();
	unsigned int i, n = 0;
	int fd = memfd("x");

	store_listen("8192");
	assert_int_equal(park_create(&park), 0);
	for (i = 0; i < 2000; i++)
		n += !park_put(park, fd, "f/%u", i);
	assert_true(n > 0 && n < 2000);
	park_drop(park, "f/0");
	assert_true(now_ns() - begin < 5 * NSEC_PER_SEC);
	while (store_recv())
		;
	/* the second that it was left alone is over */
	usleep(1100 * 1000);
	assert_true(park_run(park, now_ns()) != DEADLINE_NONE);
	assert_said("FDSTOREREMOVE=1\nFDNAME=@f/0");
	assert_true(store_recv());
	assert_int_equal(memcmp(st.text, "FDSTORE=1", 9), 0);
	close(fd);
}

static void names_never_outgrow_the_environment(void **state)
{
	size_t bytes = 0;
	unsigned int i;
	int fd = memfd("x"), err = 0;

	store_listen("100000");
	assert_int_equal(park_create(&park), 0);
	for (i = 0; !err; i++) {
		err = park_put(park, fd, "%060u", i);
		while (store_recv())
			bytes += strlen(strstr(st.text, "NAME=") + 5) + 1;
	}
	assert_int_equal(err, -ENOSPC);
	assert_true(bytes <= PARK_NAME_BYTES && bytes > PARK_NAME_BYTES / 2);
	close(fd);
}

static void lost_keeper_is_said(void **state)
{
	char why[256], pid[16];
	int fd = memfd("x");

	store_listen("16");
	snprintf(pid, sizeof(pid), "%d", getppid());
	setenv("KVMM_KEEPER", pid, 1);
	assert_int_equal(park_create(&park), 0);
	assert_string_equal(stat_now().keeper, "kvmmd --keep");
	park_destroy(park);
	setenv("KVMM_KEEPER", "1", 1);
	if (getppid() == 1)
		setenv("KVMM_KEEPER", "2", 1);
	assert_int_equal(park_create(&park), 0);
	assert_false(park_enabled(park));
	assert_int_equal(park_put(park, fd, "a"), -ECONNREFUSED);
	assert_true(park_why(park, why, sizeof(why)));
	assert_non_null(strstr(why, "the keeper is gone"));
	assert_silent();
	close(fd);
}

static void without_a_store_nothing_is_sent(void **state)
{
	char why[256];
	int fd = memfd("x");

	assert_int_equal(park_create(&park), 0);
	assert_false(park_enabled(park));
	assert_int_equal(park_put(park, fd, "a"), 0);
	assert_int_equal(stat_now().held, 1);
	park_drop(park, "a");
	assert_int_equal(stat_now().held, 0);
	assert_true(park_why(park, why, sizeof(why)));
	assert_non_null(strstr(why, "a restart starts empty"));
	close(fd);
}

/* -- what comes back ------------------------------------------------------------- */

/* Run @fn in a child whose descriptors from 3 on are these, under @names. */
static void in_child(void (*fn)(void), const int *fd, unsigned int n,
		     const char *names)
{
	pid_t pid;
	int status;
	unsigned int i;

	fflush(NULL);
	pid = fork();
	assert_true(pid >= 0);
	if (pid) {
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_int_equal(status, 0);
		return;
	}
	for (i = 0; i < n; i++)		/* out of the way first */
		if (fcntl(fd[i], F_DUPFD, 100 + (int)i) < 0)
			_exit(100);
	for (i = 0; i < n; i++)
		if (dup2(100 + (int)i, 3 + (int)i) < 0)
			_exit(101);
	closefrom(3 + (int)n);
	{
		char text[32];

		snprintf(text, sizeof(text), "%d", getpid());
		setenv("LISTEN_PID", text, 1);
		snprintf(text, sizeof(text), "%u", n);
		setenv("LISTEN_FDS", text, 1);
		setenv("LISTEN_FDNAMES", names, 1);
	}
	fn();
	_exit(0);
}

#define CHECK(cond)							\
	do {								\
		if (!(cond)) {						\
			fprintf(stderr, "%d: %s\n", __LINE__, #cond);	\
			_exit(1);					\
		}							\
	} while (0)

static bool holds(int fd, const char *text)
{
	char buf[16] = "";

	return pread(fd, buf, sizeof(buf) - 1, 0) >= 0 && !strcmp(buf, text);
}

static void child_takes(void)
{
	struct park_iter it = PARK_ITER_INIT;
	struct park *p;

	st.sock = -1;
	store_listen("16");
	CHECK(!park_create(&p));
	CHECK(!getenv("LISTEN_FDS"));
	CHECK(park_has(p, "hdr") && !park_has(p, "default"));

	/* in order, and only those with the prefix; takes in between are fine */
	CHECK(park_next(p, "ext/", &it) && !strcmp(it.name, "ext/1"));
	CHECK(holds(it.fd, "one"));
	CHECK(park_take(p, it.name) == it.fd);
	CHECK(fcntl(it.fd, F_GETFD) == FD_CLOEXEC);
	CHECK(park_next(p, "ext/", &it) && !strcmp(it.name, "ext/2"));
	CHECK(!park_next(p, "ext/", &it));

	CHECK(park_take(p, "ext/1") == -ENOENT);
	CHECK(park_take(p, "no") == -ENOENT);
	CHECK(park_socket(p, "@hdr") == -ENOENT);
	CHECK(holds(park_socket(p, "default"), "sock"));
	CHECK(park_take(p, "hdr") >= 0);
	CHECK(!store_recv());

	/* what nobody took is closed and forgotten */
	CHECK(park_done(p) == 1);
	CHECK(store_recv());
	CHECK(!strcmp(st.text, "FDSTOREREMOVE=1\nFDNAME=@ext/2"));
	CHECK(!store_recv());

	/* what was taken is still parked, until it is dropped */
	park_drop(p, "hdr");
	CHECK(store_recv());
	CHECK(!strcmp(st.text, "FDSTOREREMOVE=1\nFDNAME=@hdr"));
	park_destroy(p);
}

static void inherited_descriptors_are_found_by_name(void **state)
{
	const int fd[] = { memfd("sock"), memfd("two"), memfd("head"),
			   memfd("one") };
	int i;

	in_child(child_takes, fd, 4, "default:@ext/2:@hdr:@ext/1");
	for (i = 0; i < 4; i++)
		close(fd[i]);
}

static void child_twice(void)
{
	struct park *p;
	int fd, n = fd_count();

	st.sock = -1;
	CHECK(!park_create(&p));
	CHECK(fd_count() == n - 1);
	fd = park_take(p, "a");
	CHECK(holds(fd, "x"));
	park_destroy(p);
	CHECK(fd_count() == n - 1);	/* taken: not the park's to close */
}

static void second_of_a_name_is_closed(void **state)
{
	const int fd[] = { memfd("x"), memfd("y") };

	in_child(child_twice, fd, 2, "@a:@a");
	close(fd[0]);
	close(fd[1]);
}

/* To the store they are one name: it can only forget both. */
static void child_again(void)
{
	struct park_stat s;
	struct park *p;
	int fd;

	st.sock = -1;
	store_listen("16");
	CHECK(!park_create(&p));
	fd = park_take(p, "a");
	CHECK(holds(fd, "x"));
	park_stat(p, &s);
	CHECK(s.parked == 0 && s.waiting == 1);
	CHECK(park_run(p, now_ns()) == DEADLINE_NONE);
	CHECK(store_recv());
	CHECK(!strcmp(st.text, "FDSTOREREMOVE=1\nFDNAME=@a"));
	CHECK(store_recv());
	CHECK(!strcmp(st.text, "FDSTORE=1\nFDPOLL=0\nFDNAME=@a"));
	CHECK(same_file(st.fd, fd));
	park_stat(p, &s);
	CHECK(s.parked == 1 && s.waiting == 0);
}

static void first_of_a_name_is_parked_again(void **state)
{
	const int fd[] = { memfd("x"), memfd("y") };

	in_child(child_again, fd, 2, "@a:@a");
	close(fd[0]);
	close(fd[1]);
}

/* -- over a re-exec ---------------------------------------------------------------- */

static void child_reexec(void)
{
	struct park *p;
	int fd = memfd("kept"), drop = memfd("gone"), got;

	st.sock = -1;
	store_listen("16");
	CHECK(!park_create(&p));
	CHECK(!park_put(p, fd, "k"));
	CHECK(!park_put(p, drop, "d"));
	park_drop(p, "d");
	while (store_recv())
		;
	CHECK(!park_save(p));
	CHECK(fcntl(fd, F_GETFD) == 0);
	CHECK(getenv("KVMM_REEXEC"));

	/* no exec here: what it leaves is read all the same */
	CHECK(!park_create(&p));
	CHECK(!getenv("KVMM_REEXEC"));
	got = park_take(p, "k");
	CHECK(got == fd && fcntl(fd, F_GETFD) == FD_CLOEXEC);
	CHECK(park_take(p, "d") == -ENOENT);
	CHECK(park_done(p) == 0);
	CHECK(!store_recv());		/* the store has it already */
	park_drop(p, "k");
	CHECK(store_recv());
	CHECK(!strcmp(st.text, "FDSTOREREMOVE=1\nFDNAME=@k"));
}

static void reexec_brings_what_was_held(void **state)
{
	in_child(child_reexec, NULL, 0, "");
}

static void unsave_takes_it_back(void **state)
{
	int fd = memfd("x");

	assert_int_equal(park_create(&park), 0);
	park_put(park, fd, "a");
	assert_int_equal(park_save(park), 0);
	park_unsave(park);
	assert_int_equal(fcntl(fd, F_GETFD), FD_CLOEXEC);
	assert_null(getenv("KVMM_REEXEC"));
	close(fd);
}

static void planted_table_is_not_believed(void **state)
{
	char text[16];
	int fd = memfd("5 1 0 @hdr\n");	/* not sealed */

	snprintf(text, sizeof(text), "%d", fd);
	setenv("KVMM_REEXEC", text, 1);
	assert_int_equal(park_create(&park), 0);
	assert_int_equal(stat_now().inherited, 0);
	close(fd);
}

int main(void)
{
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(put_sends_the_descriptor_under_its_name),
		T(drop_makes_the_store_forget),
		T(put_of_a_used_name_replaces_it),
		T(what_is_no_name_is_refused),
		T(full_store_is_counted_and_filled_when_there_is_room),
		T(busy_store_is_tried_again),
		T(names_never_outgrow_the_environment),
		T(lost_keeper_is_said),
		T(without_a_store_nothing_is_sent),
		T(inherited_descriptors_are_found_by_name),
		T(second_of_a_name_is_closed),
		T(first_of_a_name_is_parked_again),
		T(reexec_brings_what_was_held),
		T(unsave_takes_it_back),
		T(planted_table_is_not_believed),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
