/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control messages over SOCK_SEQPACKET: one packet is one message, so there is
 * no framing and no partial read, and the descriptors of a message arrive with
 * it or not at all.
 *
 * Nothing here blocks but sock_wait(). SIGPIPE is never raised.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "ipc/sock.h"

#define LISTEN_BACKLOG	128

static int sock_addr(const char *path, struct sockaddr_un *sa, socklen_t *len)
{
	size_t n = strlen(path);

	if (!n)
		return -EINVAL;
	if (n >= sizeof(sa->sun_path))
		return -ENAMETOOLONG;
	memset(sa, 0, sizeof(*sa));
	sa->sun_family = AF_UNIX;
	memcpy(sa->sun_path, path, n + 1);
	*len = offsetof(struct sockaddr_un, sun_path) + n + 1;
	return 0;
}

static int sock_new(void)
{
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK,
			0);

	return fd < 0 ? -errno : fd;
}

static int try_connect(int fd, const struct sockaddr_un *sa, socklen_t len)
{
	while (connect(fd, (const struct sockaddr *)sa, len) < 0) {
		if (errno != EINTR)
			return -errno;
	}
	return 0;
}

/*
 * Remove what a dead server left at @sa. Only a socket that refuses
 * connections is removed: never a file, never somebody who answers.
 */
static int remove_stale(const struct sockaddr_un *sa, socklen_t len)
{
	struct stat st;
	int fd, err;

	if (lstat(sa->sun_path, &st) < 0)
		return errno == ENOENT ? 0 : -errno;
	if (!S_ISSOCK(st.st_mode))
		return -EADDRINUSE;
	fd = sock_new();
	if (fd < 0)
		return fd;
	err = try_connect(fd, sa, len);
	close(fd);
	if (err != -ECONNREFUSED)
		return err == -ENOENT ? 0 : -EADDRINUSE;
	if (unlink(sa->sun_path) < 0 && errno != ENOENT)
		return -errno;
	return 0;
}

int sock_listen(const char *path, unsigned int mode)
{
	struct sockaddr_un sa;
	socklen_t len;
	int fd, err;

	err = sock_addr(path, &sa, &len);
	if (err)
		return err;
	err = remove_stale(&sa, len);
	if (err)
		return err;
	fd = sock_new();
	if (fd < 0)
		return fd;

	/*
	 * bind() takes the file's mode from the socket's, less the umask: so
	 * the file is never open to more than @mode, not even for a moment.
	 */
	if (fchmod(fd, mode) < 0 ||
	    bind(fd, (struct sockaddr *)&sa, len) < 0) {
		err = -errno;
		goto out_close;
	}
	if (chmod(path, mode) < 0 || listen(fd, LISTEN_BACKLOG) < 0) {
		err = -errno;
		goto out_unlink;
	}
	return fd;

out_unlink:
	unlink(path);
out_close:
	close(fd);
	return err;
}

int sock_connect(const char *path)
{
	struct sockaddr_un sa;
	socklen_t len;
	int fd, err;

	err = sock_addr(path, &sa, &len);
	if (err)
		return err;
	fd = sock_new();
	if (fd < 0)
		return fd;
	err = try_connect(fd, &sa, len);
	if (err) {
		close(fd);
		return err == -ENOENT || err == -ECONNREFUSED ? -ENOTCONN : err;
	}
	return fd;
}

int sock_accept(int listen_fd)
{
	for (;;) {
		int fd = accept4(listen_fd, NULL, NULL,
				 SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0)
			return fd;
		if (errno == EINTR)
			continue;
		/* the peer changed its mind meanwhile: nothing to report */
		return errno == ECONNABORTED ? -EAGAIN : -errno;
	}
}

/* What sendmsg() and recvmsg() say, in this file's words. */
static int sock_errno(int e)
{
	switch (e) {
	case EAGAIN:
	case ETOOMANYREFS:	/* our descriptors in flight are not taken */
		return -EAGAIN;
	case EPIPE:
	case ECONNRESET:
	case ENOTCONN:
		return -EPIPE;
	case EMSGSIZE:
		return -E2BIG;
	default:
		return -e;
	}
}

int sock_send(int fd, struct wire_hdr *h, const int *fds, unsigned int nr_fds)
{
	union {
		struct cmsghdr	align;
		char		buf[CMSG_SPACE(WIRE_MAX_FDS * sizeof(int))];
	} ctl;
	struct iovec iov = { .iov_base = h, .iov_len = h->len };
	struct msghdr mh = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (h->len < sizeof(*h) || h->len > WIRE_MAX_BYTES ||
	    nr_fds > WIRE_MAX_FDS)
		return -E2BIG;
	h->magic = WIRE_MAGIC;
	h->nr_fds = nr_fds;
	if (nr_fds) {
		struct cmsghdr *c;

		memset(&ctl, 0, sizeof(ctl));
		mh.msg_control = ctl.buf;
		mh.msg_controllen = CMSG_SPACE(nr_fds * sizeof(int));
		c = CMSG_FIRSTHDR(&mh);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(nr_fds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, nr_fds * sizeof(int));
	}
	while (sendmsg(fd, &mh, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
		if (errno != EINTR)
			return sock_errno(errno);
	}
	return 0;
}

/* Take every descriptor out of @mh; what does not fit is closed. */
static void collect_fds(struct msghdr *mh, struct sock_msg *m)
{
	struct cmsghdr *c;

	for (c = CMSG_FIRSTHDR(mh); c; c = CMSG_NXTHDR(mh, c)) {
		size_t i, n;
		int fd;

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (i = 0; i < n; i++) {
			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			if (m->nr_fds < WIRE_MAX_FDS)
				m->fd[m->nr_fds++] = fd;
			else
				close(fd);
		}
	}
}

static int check_packet(const struct sock_msg *m, int flags,
			unsigned int max_fds)
{
	const struct wire_hdr *h = (const struct wire_hdr *)m->buf;

	if ((flags & MSG_TRUNC) || m->len < sizeof(*h) ||
	    h->magic != WIRE_MAGIC || h->len != m->len ||
	    h->nr_fds > max_fds)
		return -EPROTO;
	if (h->nr_fds == m->nr_fds && !(flags & MSG_CTRUNC))
		return 0;
	/* the kernel drops what our descriptor table has no room for */
	if ((flags & MSG_CTRUNC) && m->nr_fds < h->nr_fds)
		return -EMFILE;
	return -EPROTO;
}

int sock_recv_max(int fd, struct sock_msg *m, unsigned int max_fds)
{
	union {
		struct cmsghdr	align;
		char		buf[CMSG_SPACE(WIRE_MAX_FDS * sizeof(int))];
	} ctl;
	struct iovec iov = { .iov_base = m->buf, .iov_len = sizeof(m->buf) };
	struct msghdr mh = {
		.msg_iov	= &iov,
		.msg_iovlen	= 1,
		/* not CMSG_SPACE: its padding has room for one more */
		.msg_control	= max_fds ? ctl.buf : NULL,
		.msg_controllen	= max_fds ? CMSG_LEN(max_fds * sizeof(int)) : 0,
	};
	ssize_t n;
	int err;

	m->len = 0;
	m->nr_fds = 0;
	do {
		n = recvmsg(fd, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n < 0)
		return sock_errno(errno);
	collect_fds(&mh, m);
	m->len = n;
	/* an empty packet cannot be told from the end, and is no message */
	err = n ? check_packet(m, mh.msg_flags, max_fds) : -EPIPE;
	if (err && err != -EMFILE)
		m->len = 0;
	return err;
}

int sock_recv(int fd, struct sock_msg *m)
{
	int err = sock_recv_max(fd, m, WIRE_MAX_FDS);

	if (err)
		sock_msg_close_fds(m);
	return err;
}

int sock_wait(int fd, short events, uint64_t deadline_ns)
{
	struct pollfd p = { .fd = fd, .events = events };

	for (;;) {
		uint64_t left = deadline_left(deadline_ns);
		struct timespec ts = ns_to_timespec(left);
		int n = ppoll(&p, 1, &ts, NULL);

		if (n < 0 && errno != EINTR)
			return -errno;
		if (n > 0) {
			/* data may be left to read after a hang-up */
			if (p.revents & events)
				return 0;
			return -EPIPE;
		}
		if (!left)
			return -ETIMEDOUT;
	}
}

int sock_msg_take_fd(struct sock_msg *m)
{
	int fd;

	if (!m->nr_fds)
		return -1;
	fd = m->fd[0];
	m->nr_fds--;
	memmove(&m->fd[0], &m->fd[1], m->nr_fds * sizeof(m->fd[0]));
	return fd;
}

void sock_msg_close_fds(struct sock_msg *m)
{
	while (m->nr_fds)
		close(m->fd[--m->nr_fds]);
}
