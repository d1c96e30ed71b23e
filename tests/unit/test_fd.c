/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include "ipc/base/fd.h"
#include "tests/lib/unit.h"

static void close_fd_closes_once_and_keeps_errno(void **state)
{
	int before = fd_count();
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

	assert_int_equal(fd_count(), before + 1);
	errno = EXDEV;
	close_fd(&fd);
	assert_int_equal(errno, EXDEV);
	assert_int_equal(fd, -1);
	close_fd(&fd);
	assert_int_equal(fd_count(), before);
}

static int open_and_leave(void)
{
	int fd __cleanup_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

	return fd_count();
}

static void cleanup_closes_at_the_end_of_the_function(void **state)
{
	int before = fd_count();

	assert_int_equal(open_and_leave(), before + 1);
	assert_int_equal(fd_count(), before);
}

static void taken_fd_is_not_closed_by_its_old_owner(void **state)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	int mine = take_fd(&fd);

	close_fd(&fd);
	assert_int_equal(fd, -1);
	assert_true(fcntl(mine, F_GETFD) >= 0);
	close_fd(&mine);
}

static void close_fds_closes_each(void **state)
{
	int before = fd_count();
	int fds[4] = { -1, -1, -1, -1 };

	fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	fds[2] = open("/dev/null", O_RDONLY | O_CLOEXEC);
	close_fds(fds, 4);
	assert_int_equal(fd_count(), before);
	for (int i = 0; i < 4; i++)
		assert_int_equal(fds[i], -1);
}

static void flags_are_set_and_bad_fds_refused(void **state)
{
	int fd = open("/dev/null", O_RDONLY);

	assert_int_equal(set_cloexec(fd), 0);
	assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
	assert_int_equal(set_nonblock(fd), 0);
	assert_true(fcntl(fd, F_GETFL) & O_NONBLOCK);
	close_fd(&fd);
	assert_int_equal(set_cloexec(-1), -EBADF);
	assert_int_equal(set_nonblock(-1), -EBADF);
}

static void pidfd_turns_readable_when_its_process_dies(void **state)
{
	struct pollfd pfd = { .events = POLLIN };
	pid_t pid = fork();

	if (!pid) {
		pause();
		_exit(0);
	}
	pfd.fd = fd_pidfd_open(pid);
	assert_true(pfd.fd >= 0);
	assert_true(fcntl(pfd.fd, F_GETFD) & FD_CLOEXEC);
	assert_int_equal(fd_pidfd_dead(pfd.fd), 0);
	kill(pid, SIGKILL);
	assert_int_equal(poll(&pfd, 1, 10000), 1);
	assert_int_equal(fd_pidfd_dead(pfd.fd), 1);
	waitpid(pid, NULL, 0);
	assert_int_equal(fd_pidfd_dead(pfd.fd), 1);
	assert_int_equal(fd_pidfd_open(pid), -ESRCH);
	close_fd(&pfd.fd);
}

static void dead_descriptor_is_not_taken_for_a_dead_process(void **state)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	int nr = fd;

	close_fd(&fd);
	assert_int_equal(fd_pidfd_dead(nr), -EBADF);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(close_fd_closes_once_and_keeps_errno),
		cmocka_unit_test(cleanup_closes_at_the_end_of_the_function),
		cmocka_unit_test(taken_fd_is_not_closed_by_its_old_owner),
		cmocka_unit_test(close_fds_closes_each),
		cmocka_unit_test(flags_are_set_and_bad_fds_refused),
		cmocka_unit_test(pidfd_turns_readable_when_its_process_dies),
		cmocka_unit_test(dead_descriptor_is_not_taken_for_a_dead_process),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
