/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/sock.h"
#include "tests/lib/unit.h"

static struct sock_msg msg;

struct pair {
	int	a, b;
	int	before;		/* open descriptors */
	char	path[108];
};

static int setup(void **state)
{
	static struct pair p;
	int fd[2];

	p.before = fd_count();
	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0,
				    fd), 0);
	p.a = fd[0];
	p.b = fd[1];
	snprintf(p.path, sizeof(p.path), "%s/sock-%d", getenv("TMPDIR") ?
		 getenv("TMPDIR") : "/tmp", (int)getpid());
	unlink(p.path);
	*state = &p;
	return 0;
}

static int teardown(void **state)
{
	struct pair *p = *state;

	close_fd(&p->a);
	close_fd(&p->b);
	unlink(p->path);
	/* every test leaves as many descriptors as it found */
	return fd_count() == p->before ? 0 : -1;
}

static struct wire_ok ok_msg(uint32_t seq)
{
	return (struct wire_ok){
		.h = { .type = WIRE_OK, .len = sizeof(struct wire_ok),
		       .seq = seq },
		.value = 42,
	};
}

/* A packet that sock_send() would not send. */
static void send_raw(int fd, const void *buf, size_t len, const int *fds,
		     unsigned int nr)
{
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(253 * sizeof(int))];
	} ctl = { 0 };
	struct iovec iov = { (void *)buf, len };
	struct msghdr mh = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (nr) {
		struct cmsghdr *c;

		mh.msg_control = ctl.buf;
		mh.msg_controllen = CMSG_SPACE(nr * sizeof(int));
		c = CMSG_FIRSTHDR(&mh);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(nr * sizeof(int));
		memcpy(CMSG_DATA(c), fds, nr * sizeof(int));
	}
	assert_int_equal(sendmsg(fd, &mh, 0), len);
}

static void a_message_arrives_whole(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(7);

	assert_int_equal(sock_send(p->a, &m.h, NULL, 0), 0);
	assert_int_equal(sock_recv(p->b, &msg), 0);
	assert_int_equal(msg.len, sizeof(m));
	assert_memory_equal(msg.buf, &m, sizeof(m));
	assert_int_equal(((struct wire_hdr *)msg.buf)->magic, WIRE_MAGIC);
	assert_int_equal(sock_recv(p->b, &msg), -EAGAIN);
}

static void descriptors_arrive_in_order_and_close_on_exec(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(1);
	int fds[WIRE_MAX_FDS], i;
	struct stat want, got;

	for (i = 0; i < WIRE_MAX_FDS; i++)
		fds[i] = i % 2 ? p->a : p->b;
	assert_int_equal(sock_send(p->a, &m.h, fds, WIRE_MAX_FDS), 0);
	assert_int_equal(sock_recv(p->b, &msg), 0);
	assert_int_equal(msg.nr_fds, WIRE_MAX_FDS);
	for (i = 0; i < WIRE_MAX_FDS; i++) {
		int fd = sock_msg_take_fd(&msg);

		assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
		assert_int_equal(fstat(fds[i], &want), 0);
		assert_int_equal(fstat(fd, &got), 0);
		assert_int_equal(want.st_ino, got.st_ino);
		close(fd);
	}
	assert_int_equal(sock_msg_take_fd(&msg), -1);
}

static void what_does_not_fit_is_not_sent(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(1);
	int fds[WIRE_MAX_FDS + 1] = { 0 };

	assert_int_equal(sock_send(p->a, &m.h, fds, WIRE_MAX_FDS + 1), -E2BIG);
	m.h.len = WIRE_MAX_BYTES + 1;
	assert_int_equal(sock_send(p->a, &m.h, NULL, 0), -E2BIG);
	m.h.len = sizeof(m.h) - 1;
	assert_int_equal(sock_send(p->a, &m.h, NULL, 0), -E2BIG);
	assert_int_equal(sock_recv(p->b, &msg), -EAGAIN);
}

/* Each is refused, and the descriptor that came along is closed. */
static void bad_packets_are_refused_and_their_descriptors_closed(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(1);
	int before = fd_count();

	m.h.nr_fds = 1;
	m.h.magic = 0;
	send_raw(p->a, &m, sizeof(m), &p->a, 1);
	assert_int_equal(sock_recv(p->b, &msg), -EPROTO);
	m.h.magic = WIRE_MAGIC;
	m.h.len = sizeof(m) + 8;
	send_raw(p->a, &m, sizeof(m), &p->a, 1);
	assert_int_equal(sock_recv(p->b, &msg), -EPROTO);
	m.h.len = sizeof(m);
	m.h.nr_fds = 0;			/* one came all the same */
	send_raw(p->a, &m, sizeof(m), &p->a, 1);
	assert_int_equal(sock_recv(p->b, &msg), -EPROTO);
	m.h.nr_fds = 2;			/* only one came */
	send_raw(p->a, &m, sizeof(m), &p->a, 1);
	assert_int_equal(sock_recv(p->b, &msg), -EPROTO);
	send_raw(p->a, &m, 3, &p->a, 1);	/* no header */
	assert_int_equal(sock_recv(p->b, &msg), -EPROTO);
	assert_int_equal(msg.nr_fds, 0);
	assert_int_equal(fd_count(), before);
}

static void a_longer_packet_than_any_is_refused(void **state)
{
	static char buf[WIRE_MAX_BYTES + 64];
	struct pair *p = *state;
	struct wire_hdr h = {
		.magic = WIRE_MAGIC, .type = WIRE_OK, .len = WIRE_MAX_BYTES,
	};

	memcpy(buf, &h, sizeof(h));
	send_raw(p->a, buf, sizeof(buf), NULL, 0);
	assert_int_equal(sock_recv(p->b, &msg), -EPROTO);
}

static void more_descriptors_than_allowed_are_all_closed(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(1);
	int fds[200], i, before = fd_count();

	for (i = 0; i < 200; i++)
		fds[i] = p->a;
	m.h.magic = WIRE_MAGIC;
	m.h.nr_fds = WIRE_MAX_FDS;
	send_raw(p->a, &m, sizeof(m), fds, 200);
	assert_int_equal(sock_recv(p->b, &msg), -EPROTO);
	assert_int_equal(fd_count(), before);
}

static void a_full_descriptor_table_is_said_and_leaks_nothing(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(1);
	struct rlimit old, less;
	int fds[8], i, top, before = fd_count();

	for (i = 0; i < 8; i++)
		fds[i] = p->a;
	assert_int_equal(sock_send(p->a, &m.h, fds, 8), 0);
	top = dup(p->a);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	less = old;
	less.rlim_cur = top + 3;	/* room for two more */
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &less), 0);
	i = sock_recv(p->b, &msg);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	close(top);
	assert_int_equal(i, -EMFILE);
	assert_int_equal(msg.nr_fds, 0);
	assert_int_equal(fd_count(), before);
}

static void the_end_is_said(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(1);

	assert_int_equal(sock_send(p->a, &m.h, NULL, 0), 0);
	close_fd(&p->a);
	/* what was sent before is still there */
	assert_int_equal(sock_wait(p->b, POLLIN, deadline_in(NSEC_PER_SEC)), 0);
	assert_int_equal(sock_recv(p->b, &msg), 0);
	assert_int_equal(sock_recv(p->b, &msg), -EPIPE);
	assert_int_equal(sock_send(p->b, &m.h, NULL, 0), -EPIPE);
	assert_int_equal(sock_wait(p->b, POLLPRI, deadline_in(NSEC_PER_SEC)),
			 -EPIPE);
}

static void a_peer_that_does_not_read_is_not_waited_for(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(1);
	int i, err = 0;

	for (i = 0; i < 1 << 20 && !err; i++)
		err = sock_send(p->a, &m.h, NULL, 0);
	assert_int_equal(err, -EAGAIN);
	assert_int_equal(sock_wait(p->a, POLLOUT,
				   deadline_in(2 * NSEC_PER_MSEC)), -ETIMEDOUT);
}

static void waiting_ends_at_the_deadline(void **state)
{
	struct pair *p = *state;
	uint64_t deadline = deadline_in(10 * NSEC_PER_MSEC);

	assert_int_equal(sock_wait(p->b, POLLIN, deadline), -ETIMEDOUT);
	assert_true(deadline_past(deadline));
	assert_int_equal(sock_wait(p->b, POLLIN, 0), -ETIMEDOUT);
}

static void a_server_is_found_and_answers(void **state)
{
	struct pair *p = *state;
	struct wire_ok m = ok_msg(1);
	int l = sock_listen(p->path, 0640), c, s;
	struct stat st;

	assert_true(l >= 0);
	assert_int_equal(stat(p->path, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0640);
	assert_int_equal(sock_accept(l), -EAGAIN);
	c = sock_connect(p->path);
	assert_true(c >= 0);
	s = sock_accept(l);
	assert_true(s >= 0);
	assert_true(fcntl(s, F_GETFD) & FD_CLOEXEC);
	assert_true(fcntl(s, F_GETFL) & O_NONBLOCK);
	assert_int_equal(sock_send(c, &m.h, NULL, 0), 0);
	assert_int_equal(sock_recv(s, &msg), 0);
	close(c);
	close(s);
	close(l);
}

static void a_stale_socket_is_replaced_a_live_one_is_not(void **state)
{
	struct pair *p = *state;
	int l = sock_listen(p->path, 0600), again;

	assert_true(l >= 0);
	assert_int_equal(sock_listen(p->path, 0600), -EADDRINUSE);
	close(l);			/* leaves the file behind */
	again = sock_listen(p->path, 0600);
	assert_true(again >= 0);
	close(again);
}

static void a_file_in_the_way_is_left_alone(void **state)
{
	struct pair *p = *state;
	int fd = open(p->path, O_CREAT | O_WRONLY, 0600);
	struct stat st;

	close(fd);
	assert_int_equal(sock_listen(p->path, 0600), -EADDRINUSE);
	assert_int_equal(stat(p->path, &st), 0);
	assert_true(S_ISREG(st.st_mode));
}

static void nobody_there_is_enotconn(void **state)
{
	struct pair *p = *state;
	char longer[200];

	assert_int_equal(sock_connect(p->path), -ENOTCONN);
	close(sock_listen(p->path, 0600));
	assert_int_equal(sock_connect(p->path), -ENOTCONN);
	memset(longer, 'x', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = '\0';
	assert_int_equal(sock_connect(longer), -ENAMETOOLONG);
	assert_int_equal(sock_connect(""), -EINVAL);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_message_arrives_whole),
		T(descriptors_arrive_in_order_and_close_on_exec),
		T(what_does_not_fit_is_not_sent),
		T(bad_packets_are_refused_and_their_descriptors_closed),
		T(a_longer_packet_than_any_is_refused),
		T(more_descriptors_than_allowed_are_all_closed),
		T(a_full_descriptor_table_is_said_and_leaks_nothing),
		T(the_end_is_said),
		T(a_peer_that_does_not_read_is_not_waited_for),
		T(waiting_ends_at_the_deadline),
		T(a_server_is_found_and_answers),
		T(a_stale_socket_is_replaced_a_live_one_is_not),
		T(a_file_in_the_way_is_left_alone),
		T(nobody_there_is_enotconn),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
