/* SPDX-License-Identifier: Apache-2.0 */
/* File descriptors: -1 is "none", and every owner closes on every path. */
#ifndef KVMM_BASE_FD_H
#define KVMM_BASE_FD_H

#include <errno.h>
#include <sys/types.h>
#include <unistd.h>

#include "ipc/base/bits.h"

/**
 * close_fd() - close *@fd if it is open, and make it -1
 * @fd:	where the descriptor is kept; a negative one is left alone
 *
 * Keeps errno, so that it may stand in an error path.
 */
static inline void close_fd(int *fd)
{
	int saved = errno;

	if (*fd >= 0)
		close(*fd);
	*fd = -1;
	errno = saved;
}

/* Close @fds[0..n) and make them -1. */
static inline void close_fds(int *fds, unsigned int n)
{
	while (n--)
		close_fd(&fds[n]);
}

/* `int fd __cleanup_fd = -1;` in functions without goto. */
#define __cleanup_fd	__cleanup(close_fd)

/* Hand a descriptor on: returns it and leaves -1 behind. */
static inline int take_fd(int *fd)
{
	int ret = *fd;

	*fd = -1;
	return ret;
}

/* 0 or -errno. For descriptors that no call could open with O_CLOEXEC. */
int set_cloexec(int fd);

/* 0 or -errno. */
int set_nonblock(int fd);

/**
 * fd_pidfd_open() - a pidfd, close-on-exec
 * @pid:	the process; 0 is not allowed
 *
 * Return: a descriptor that the caller owns, or -errno (-ESRCH: it is gone).
 */
int fd_pidfd_open(pid_t pid);

/* 1 when the process behind @pidfd has exited, 0 when not, or -errno. */
int fd_pidfd_dead(int pidfd);

/**
 * fd_count() - how many descriptors this process has open
 *
 * For tests, which compare the number before and after.
 * Return: the number, or -errno when /proc cannot be read.
 */
int fd_count(void);

#endif
