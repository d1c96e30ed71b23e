/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One JSON request, one JSON reply, over a stream socket of its own. The text
 * is the caller's business; here it is only carried, by a deadline.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <kvmm/admin.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

#define FIRST_ROOM	4096

static int admin_connect(const char *path, uint64_t deadline)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	int fd, err;

	if (strlen(path) >= sizeof(sa.sun_path))
		return kvmm_fail(-ENAMETOOLONG, "%s: too long for a socket",
				 path);
	strcpy(sa.sun_path, path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return kvmm_fail(-errno, "socket: %s", strerror(errno));
	while (connect(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0) {
		err = -errno;
		if (err == -EINTR)
			continue;
		if (err == -EAGAIN && !deadline_past(deadline)) {
			poll(NULL, 0, 5);	/* its queue is full */
			continue;
		}
		close_fd(&fd);
		if (err == -ENOENT || err == -ECONNREFUSED)
			return kvmm_fail(-ENOTCONN, "nobody listens at %s",
					 path);
		return kvmm_fail(err == -EAGAIN ? -ETIMEDOUT : err, "%s: %s",
				 path, strerror(-err));
	}
	return fd;
}

static int admin_send(int fd, const char *text, size_t len, uint64_t deadline)
{
	while (len) {
		ssize_t n = send(fd, text, len, MSG_NOSIGNAL);
		int err;

		if (n >= 0) {
			text += n;
			len -= n;
			continue;
		}
		if (errno == EINTR)
			continue;
		if (errno != EAGAIN)
			return err_is_disconnect(-errno) ? -EPROTO : -errno;
		err = sock_wait(fd, POLLOUT, deadline);
		if (err)
			return err == -EPIPE ? -EPROTO : err;
	}
	return 0;
}

/* Read up to the newline, which is replaced by the end of the string. */
static int admin_recv(int fd, char **reply, uint64_t deadline)
{
	size_t len = 0, room = FIRST_ROOM;
	char *buf = malloc(room), *nl = NULL;
	int err = 0;

	if (!buf)
		return -ENOMEM;
	while (!nl && !err) {
		ssize_t n;

		if (len == room) {
			char *p = room < KVMM_ADMIN_MAX_REPLY ?
				  realloc(buf, room * 2) : NULL;

			if (!p) {
				err = room < KVMM_ADMIN_MAX_REPLY ? -ENOMEM :
								    -EMSGSIZE;
				break;
			}
			buf = p;
			room *= 2;
		}
		n = recv(fd, buf + len, room - len, 0);
		if (n > 0) {
			nl = memchr(buf + len, '\n', n);
			len += n;
		} else if (n == 0) {
			err = -EPROTO;
		} else if (errno == EAGAIN) {
			err = sock_wait(fd, POLLIN, deadline);
			if (err == -EPIPE)
				err = -EPROTO;
		} else if (errno != EINTR) {
			err = err_is_disconnect(-errno) ? -EPROTO : -errno;
		}
	}
	if (err) {
		free(buf);
		return err;
	}
	*nl = '\0';
	*reply = buf;
	return 0;
}

int kvmm_admin_call(const char *socket, const char *request, char **reply,
		    unsigned int timeout_ms)
{
	uint64_t deadline = deadline_in(timeout_ms * NSEC_PER_MSEC);
	size_t len = strlen(request);
	int fd, err;

	if (!socket)
		socket = getenv("KVMM_ADMIN_SOCKET");
	if (!socket || !*socket)
		socket = KVMM_ADMIN_SOCKET;
	if (len >= KVMM_ADMIN_MAX_REQUEST || strchr(request, '\n'))
		return kvmm_fail(-EMSGSIZE,
			"a request is one line of less than %u bytes",
			KVMM_ADMIN_MAX_REQUEST);
	fd = admin_connect(socket, deadline);
	if (fd < 0)
		return fd;
	err = admin_send(fd, request, len, deadline);
	if (!err)
		err = admin_send(fd, "\n", 1, deadline);
	if (!err)
		err = admin_recv(fd, reply, deadline);
	close_fd(&fd);
	if (err)
		kvmm_fail(err, "%s: %s", socket, err == -EPROTO ?
			  "the daemon hung up" : strerror(-err));
	return err;
}
