/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who is at the other end, as a pidfd: references end when that says that the
 * process has exited, so a client must not be able to name somebody who lives
 * longer.
 *
 *	SO_PEERPIDFD	(Linux 6.5) the kernel's own word
 *	else		the pidfd of itself that the client sends with hello. Its
 *			"Pid:" must be SO_PEERCRED's. That is 0 in both when the
 *			client lives in a PID namespace that we cannot see: then it
 *			is taken at its word, and shown as foreign
 *	else		pidfd_open(SO_PEERCRED's pid)
 *
 * SO_PEERCRED and SO_PEERPIDFD name who called connect(). If the two pidfds
 * differ, that was the parent of who speaks now, and the parent's exit would
 * end the references of a child that still reads: refused.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/server/server.h"
#include "ipc/base/fd.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD	77
#endif

/* "Pid:" of a pidfd: 0 foreign namespace, -1 exited; -EBADF: not a pidfd. */
static int pidfd_pid(int pidfd, long *pid)
{
	char path[40], buf[512], *line;
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", pidfd);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	n = read(fd, buf, sizeof(buf) - 1);
	close(fd);
	if (n < 0)
		return -EBADF;
	buf[n] = '\0';
	line = strstr(buf, "\nPid:");
	if (!line)
		return -EBADF;
	*pid = strtol(line + 5, NULL, 10);
	return 0;
}

bool fd_is_pidfd(int fd)
{
	long pid;

	return !pidfd_pid(fd, &pid);
}

static int peer_pidfd(int sock)
{
	int fd = -1;
	socklen_t len = sizeof(fd);

	if (getsockopt(sock, SOL_SOCKET, SO_PEERPIDFD, &fd, &len) < 0)
		return -errno;
	return fd;
}

/* Without SO_PEERPIDFD: is what the client sent its own? */
static int believe_sent(const struct session *ss, int pidfd, long pid,
			struct errmsg *e)
{
	int fd;

	if (pid != ss->cred_pid)
		return errmsg_set(e, -EPERM, "the pidfd in hello is of process "
				  "%ld, but process %d connected", pid,
				  (int)ss->cred_pid);
	fd = fcntl(pidfd, F_DUPFD_CLOEXEC, 3);
	return fd < 0 ? -errno : fd;
}

int session_identify(struct session *ss, int sock, int pidfd,
		     struct errmsg *e)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);
	long sent = -1, peer = -1;
	int fd, err;

	if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		return errmsg_set(e, -EPERM, "SO_PEERCRED: %s",
				  strerror(errno));
	ss->cred_pid = cred.pid;
	ss->cred_uid = cred.uid;
	ss->foreign = !cred.pid;
	if (pidfd >= 0) {
		err = pidfd_pid(pidfd, &sent);
		if (err)
			return errmsg_set(e, -EPERM, "the descriptor in hello "
					  "is not a pidfd (%s)",
					  strerror(-err));
	}

	fd = peer_pidfd(sock);
	if (fd >= 0) {
		if (pidfd < 0 || pidfd_pid(fd, &peer) || peer == sent)
			return fd;
		close(fd);
		return errmsg_set(e, -EPERM, "process %ld says hello on a "
				  "connection that process %ld made: connect "
				  "again after fork", sent, peer);
	}
	if (pidfd >= 0)
		return believe_sent(ss, pidfd, sent, e);
	fd = cred.pid > 0 ? fd_pidfd_open(cred.pid) : -ESRCH;
	if (fd >= 0)
		return fd;
	return errmsg_set(e, -EPERM, "no pidfd of this process: hello had "
			  "none, SO_PEERPIDFD needs Linux 6.5, pidfd_open(%d): "
			  "%s", (int)cred.pid, strerror(-fd));
}
