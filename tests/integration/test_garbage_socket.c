/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that send garbage through the socket, crowd it, or do not read it; and
 * one that tries to write what it may only read. Whoever breaks the rules is cut
 * off with a counted reason, and nobody else is hurt (test_garbage.c has the
 * rest).
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/base/rand.h"
#include "ipc/desc.h"
#include "ipc/sock.h"
#include "tests/lib/healthy.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define BAD		0		/* which child it is */

static const char *path;		/* of the socket; forks come later */

/* -- the socket ----------------------------------------------------------------------------- */

/* More may come at once than wait in the socket's queue. */
static int dial(void)
{
	int fd;

	T_WAIT(LONG_WAIT, (fd = sock_connect(path)) != -EAGAIN);
	T_CHECK(fd >= 0, "%s", strerror(-fd));
	return fd;
}

static void fill_hello(struct wire_hello *h)
{
	*h = (struct wire_hello) {
		.h = { .magic = WIRE_MAGIC, .type = WIRE_HELLO,
		       .len = sizeof(*h), .seq = 1 },
		.abi_min = KVMM_ABI_MIN, .abi_max = KVMM_ABI_VERSION,
		.pid = (uint32_t)getpid(), .name = "garbage",
	};
}

static struct sock_msg msg;

/* The next message, which must come; false: the peer has hung up. */
static bool hear(int fd)
{
	for (;;) {
		int err = sock_recv(fd, &msg);

		if (!err)
			return true;
		if (err != -EAGAIN)
			return false;
		T_CHECK(sock_wait(fd, POLLIN, deadline_in(LONG_WAIT *
				  NSEC_PER_MSEC)) != -ETIMEDOUT);
	}
}

static int hello(void)
{
	int fd = dial(), pidfd = fd_pidfd_open(getpid());
	struct wire_hello h;

	fill_hello(&h);
	T_OK(sock_send(fd, &h.h, &pidfd, 1));
	close(pidfd);
	T_CHECK(hear(fd));
	T_EQ(((struct wire_hdr *)msg.buf)->type, WIRE_WELCOME);
	sock_msg_close_fds(&msg);
	return fd;
}

/* It ends, after an error or without a word. */
static void hangs_up(int fd)
{
	while (hear(fd))
		sock_msg_close_fds(&msg);
	close(fd);
}

static void send_raw(int fd, const void *p, size_t n, const int *fds,
		     unsigned int nr_fds)
{
	char ctl[CMSG_SPACE(253 * sizeof(int))];
	struct iovec iov = { (void *)p, n };
	struct msghdr mh = { .msg_iov = &iov, .msg_iovlen = 1 };
	ssize_t sent;

	if (nr_fds) {
		struct cmsghdr *c;

		memset(ctl, 0, sizeof(ctl));
		mh.msg_control = ctl;
		mh.msg_controllen = CMSG_SPACE(nr_fds * sizeof(int));
		c = CMSG_FIRSTHDR(&mh);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(nr_fds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, nr_fds * sizeof(int));
	}
	sent = sendmsg(fd, &mh, MSG_NOSIGNAL);
	T_CHECK(sent == (ssize_t)n, "%s", strerror(errno));
}

static long raw_silent(void *shm, long a, long b)
{
	hangs_up(dial());
	return 1;
}

static long raw_noise(void *shm, long seed, long n)
{
	uint8_t noise[512];
	struct rng r;
	long i;

	rng_seed(&r, (uint64_t)seed);
	for (i = 0; i < n; i++) {
		int fd = dial();

		rng_fill(&r, noise, sizeof(noise));
		send_raw(fd, noise, 1 + rng_below(&r, sizeof(noise)), NULL, 0);
		hangs_up(fd);
	}
	return n;
}

static long raw_magic(void *shm, long a, long b)
{
	struct wire_hello h;
	int fd = dial();

	fill_hello(&h);
	h.h.magic ^= 1;
	send_raw(fd, &h, sizeof(h), NULL, 0);
	hangs_up(fd);
	return 1;
}

static long raw_length(void *shm, long a, long b)
{
	struct wire_hello h;
	int fd = dial();

	fill_hello(&h);
	h.h.len += 8;
	send_raw(fd, &h, sizeof(h), NULL, 0);
	hangs_up(fd);
	return 1;
}

static long raw_huge(void *shm, long a, long b)
{
	static uint8_t big[WIRE_MAX_BYTES + 4096];
	struct wire_hello *h = (struct wire_hello *)big;
	int fd = dial(), room = 1 << 20;

	fill_hello(h);
	h->h.len = sizeof(big);
	setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof(room));
	send_raw(fd, big, sizeof(big), NULL, 0);
	hangs_up(fd);
	return 1;
}

/* @n descriptors where none or one belong, told or not told. */
static long raw_fds(void *shm, long n, long told)
{
	int fds[253], fd = dial(), i;
	struct wire_hello h;

	for (i = 0; i < n; i++)
		fds[i] = fd;
	fill_hello(&h);
	h.h.nr_fds = told ? (uint16_t)n : 1;
	send_raw(fd, &h, sizeof(h), fds, (unsigned int)n);
	hangs_up(fd);
	return 1;
}

static long raw_too_early(void *shm, long a, long b)
{
	struct wire_join j = { .h = { .type = WIRE_JOIN, .len = sizeof(j) } };
	int fd = dial();

	T_OK(sock_send(fd, &j.h, NULL, 0));
	hangs_up(fd);
	return 1;
}

static long raw_two_hellos(void *shm, long a, long b)
{
	int fd = hello();
	struct wire_hello h;

	fill_hello(&h);
	T_OK(sock_send(fd, &h.h, NULL, 0));
	hangs_up(fd);
	return 1;
}

static long raw_type(void *shm, long type, long b)
{
	struct wire_ok m = { .h = { .type = (uint16_t)type,
				    .len = sizeof(m) } };
	int fd = hello();

	T_OK(sock_send(fd, &m.h, NULL, 0));
	hangs_up(fd);
	return 1;
}

static long raw_short(void *shm, long by, long b)
{
	struct { struct wire_join j; uint8_t more[16]; } m = {
		.j.h = { .type = WIRE_JOIN,
			 .len = (uint32_t)(sizeof(m.j) + (size_t)by) },
	};
	int fd = hello();

	T_OK(sock_send(fd, &m.j.h, NULL, 0));
	hangs_up(fd);
	return 1;
}

static long raw_abi(void *shm, long a, long b)
{
	struct wire_error *e = (struct wire_error *)msg.buf;
	struct wire_hello h;
	int fd = dial();

	fill_hello(&h);
	h.abi_min = h.abi_max = 99;
	T_OK(sock_send(fd, &h.h, NULL, 0));
	T_CHECK(hear(fd));
	T_EQ(e->h.type, WIRE_ERROR);
	T_EQ(e->err, -EPROTO);
	T_CHECK(strstr(e->sentence, "ABI"));
	hangs_up(fd);
	return 1;
}

/* Somebody else's pidfd, or none at all: who lives longer must not be named. */
static long raw_identity(void *shm, long other, long b)
{
	int fd = dial(), id;
	struct wire_hello h;

	id = other ? fd_pidfd_open(getppid()) :
		     open("/dev/null", O_RDONLY | O_CLOEXEC);
	T_CHECK(id >= 0);
	fill_hello(&h);
	T_OK(sock_send(fd, &h.h, &id, 1));
	close(id);
	hangs_up(fd);
	return 1;
}

/* Asks and asks, and never reads. */
static long raw_deaf(void *shm, long a, long b)
{
	struct wire_join j = { .h = { .type = WIRE_JOIN, .len = sizeof(j) },
			       .world = 100000 };
	struct t_wait w = t_wait_begin(LONG_WAIT);
	int fd = hello(), err;

	do {
		err = sock_send(fd, &j.h, NULL, 0);
		T_CHECK(err != -EAGAIN || t_wait_more(&w));
	} while (!err || err == -EAGAIN);
	close(fd);
	return 1;
}

static const struct raw_attack {
	const char	*name;
	proc_fn		fn;
	const char	*reason;
	long		a, b;
} raw_attacks[] = {
	{ "says nothing", raw_silent, "hello_late", 0, 0 },
	{ "noise", raw_noise, "msg_bad", 11, 50 },
	{ "wrong magic", raw_magic, "msg_bad", 0, 0 },
	{ "wrong length", raw_length, "msg_bad", 0, 0 },
	{ "huge message", raw_huge, "msg_bad", 0, 0 },
	{ "20 descriptors, told", raw_fds, "msg_bad", 20, 1 },
	{ "20 descriptors, not told", raw_fds, "msg_bad", 20, 0 },
	{ "253 descriptors", raw_fds, "msg_bad", 253, 1 },
	{ "253 descriptors, not told", raw_fds, "msg_bad", 253, 0 },
	{ "before hello", raw_too_early, "msg_type", 0, 0 },
	{ "two hellos", raw_two_hellos, "msg_type", 0, 0 },
	{ "no such type", raw_type, "msg_type", 9999, 0 },
	{ "a type of the other side", raw_type, "msg_type", WIRE_WELCOME, 0 },
	{ "short message", raw_short, "msg_short", -8, 0 },
	{ "long message", raw_short, "msg_short", 8, 0 },
	{ "another ABI", raw_abi, "abi", 0, 0 },
	{ "somebody else's pidfd", raw_identity, "identity", 1, 0 },
	{ "no pidfd", raw_identity, "identity", 0, 0 },
	{ "never reads its socket", raw_deaf, "slow", 0, 0 },
};

static void garbage_on_the_socket_hurts_nobody(void **state)
{
	struct fx *f = *state;
	struct leak before;
	size_t i;

	healthy_start(f, &before);
	path = f->d.socket;
	for (i = 0; i < ARRAY_SIZE(raw_attacks); i++) {
		const struct raw_attack *at = &raw_attacks[i];
		uint64_t all = ta_rejects(&f->d, NULL);
		uint64_t was = ta_rejects(&f->d, at->reason);
		long n;

		fprintf(stderr, "# %s\n", at->name);
		proc_start(&f->p[BAD]);
		n = proc_call(&f->p[BAD], at->fn, at->a, at->b);
		T_EQ(ta_rejects(&f->d, at->reason), was + (uint64_t)n);
		T_EQ(ta_rejects(&f->d, NULL), all + (uint64_t)n);
		proc_end(&f->p[BAD]);
		T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
		leak_settle(f->d.pid, &before, LONG_WAIT);
		ta_check(&f->d);
	}
	healthy_stop(f);
	ta_baseline(&f->d, LONG_WAIT);
	fx_stop(f);
}

/* Requests whose contents make no sense are answered, one by one. */
static long raw_requests(void *shm, long seed, long n)
{
	_Alignas(16) uint8_t buf[2048];
	struct wire_hdr *h = (struct wire_hdr *)buf;
	struct rng r;
	int fd = hello();
	long i;

	rng_seed(&r, (uint64_t)seed);
	for (i = 0; i < n; i++) {
		static const struct { uint16_t type, len; } kinds[] = {
			{ WIRE_JOIN, sizeof(struct wire_join) },
			{ WIRE_DETACH, sizeof(struct wire_win) },
			{ WIRE_WIN_OPEN, sizeof(struct wire_win_open) },
			{ WIRE_WIN_SYNC, sizeof(struct wire_win) },
			{ WIRE_WIN_CLOSE, sizeof(struct wire_win) },
			{ WIRE_RESERVE, sizeof(struct wire_reserve) },
		};
		size_t k = rng_below(&r, ARRAY_SIZE(kinds));

		rng_fill(&r, buf, sizeof(buf));
		if (rng_below(&r, 2))
			memset(buf, 0, 32);
		h->type = kinds[k].type;
		h->len = kinds[k].len;
		h->seq = (uint32_t)i + 10;
		T_OK(sock_send(fd, h, NULL, 0));
		do {
			T_CHECK(hear(fd), "request %ld of type %u", i,
				kinds[k].type);
			sock_msg_close_fds(&msg);
		} while (((struct wire_hdr *)msg.buf)->seq != h->seq);
	}
	close(fd);
	return 0;
}

/* A good descriptor with bytes changed: attached or refused, never cut off. */
static long raw_descriptors(void *shm, long seed, long n)
{
	_Alignas(16) static uint8_t buf[sizeof(struct wire_attach) +
					DESC_MAX_BYTES];
	struct wire_attach *a = (struct wire_attach *)buf;
	static uint8_t good[DESC_MAX_BYTES];
	struct errmsg e;
	struct rng r;
	long i, attached = 0;
	int fd = hello(), len = desc_encode(tc_desc(NULL), good, &e);

	T_CHECK(len > 0);
	rng_seed(&r, (uint64_t)seed);
	for (i = 0; i < n; i++) {
		uint64_t j, flips = 1 + rng_below(&r, 8);
		uint32_t cut = rng_below(&r, 4) ? (uint32_t)len :
			       (uint32_t)rng_below(&r, (uint64_t)len + 1);

		memcpy(a->desc, good, (size_t)len);
		for (j = 0; j < flips; j++)
			a->desc[rng_below(&r, (uint64_t)len)] =
				(uint8_t)rng_next(&r);
		a->h = (struct wire_hdr) { .type = WIRE_ATTACH,
			.len = (uint32_t)sizeof(*a) + cut,
			.seq = (uint32_t)i + 10 };
		a->flags = 0;
		a->desc_len = cut;
		T_OK(sock_send(fd, &a->h, NULL, 0));
		T_CHECK(hear(fd), "descriptor %ld", i);
		attached += ((struct wire_hdr *)msg.buf)->type == WIRE_ATTACHED;
		sock_msg_close_fds(&msg);
		if (((struct wire_hdr *)msg.buf)->type != WIRE_ATTACHED)
			continue;
		/* some are good: a name with another letter in it */
		close(fd);
		fd = hello();
	}
	close(fd);
	return attached;
}

static void senseless_requests_are_answered(void **state)
{
	long n = test_long() ? 20000 : 600, i;
	struct fx *f = *state;
	struct leak before;

	healthy_start(f, &before);
	path = f->d.socket;
	for (i = 0; i < 2; i++) {
		proc_start(&f->p[BAD]);
		proc_call(&f->p[BAD], i ? raw_descriptors : raw_requests,
			  (long)test_seed(), n);
		proc_end(&f->p[BAD]);
		T_EQ(ta_rejects(&f->d, NULL), 0);
		T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
		leak_settle(f->d.pid, &before, LONG_WAIT);
		ta_check(&f->d);
	}
	healthy_stop(f);
	fx_stop(f);
}

static long raw_storm(void *shm, long n, long say_hello)
{
	while (n--)
		close(say_hello ? hello() : dial());
	return 0;
}

/* As many silent ones as there may be: then they are sent away, or get old. */
static long raw_crowd(void *shm, long n, long b)
{
	int fd[200];
	long i;

	for (i = 0; i < n; i++)
		fd[i] = dial();
	for (i = 0; i < n; i++)
		hangs_up(fd[i]);
	return 0;
}

static long opens_in_time(void *shm, long a, long b)
{
	struct t_wait w = t_wait_begin(10000);
	struct tc c;
	int err;

	while ((err = tc_try_open(&c, path, NULL)))
		T_CHECK(t_wait_more(&w), "%s", t_strerror(err));
	tc_close(&c);
	return 0;
}

static void comers_and_goers_leave_nothing(void **state)
{
	struct fx *f = *state;
	struct leak before;

	healthy_start(f, &before);
	path = f->d.socket;
	proc_start(&f->p[BAD]);
	proc_call(&f->p[BAD], raw_storm, 300, false);
	proc_call(&f->p[BAD], raw_storm, 100, true);
	proc_end(&f->p[BAD]);
	leak_settle(f->d.pid, &before, LONG_WAIT);

	proc_start(&f->p[BAD]);
	proc_start(&f->p[1]);
	proc_send(&f->p[BAD], raw_crowd, 200, 0);
	proc_call(&f->p[1], opens_in_time, 0, 0);
	proc_recv(&f->p[BAD]);
	proc_end(&f->p[BAD]);
	proc_end(&f->p[1]);
	T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
	leak_settle(f->d.pid, &before, LONG_WAIT);
	healthy_stop(f);
	ta_check(&f->d);
	fx_stop(f);
}

/* -- what must not be written -------------------------------------------------------------- */

static int ro_fds[16];
static unsigned int nr_ro, nr_rw;
static int rw_fds[16];

static void keep_fds(void)
{
	int fd;

	while ((fd = sock_msg_take_fd(&msg)) >= 0) {
		struct stat st;

		if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
			close(fd);	/* an eventfd */
			continue;
		}
		if ((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY)
			ro_fds[nr_ro++ % 16] = fd;
		else
			rw_fds[nr_rw++ % 16] = fd;
	}
}

static void ask(int fd, struct wire_hdr *h)
{
	T_OK(sock_send(fd, h, NULL, 0));
	T_CHECK(hear(fd));
	T_CHECK(((struct wire_hdr *)msg.buf)->type != WIRE_ERROR, "%s",
		((struct wire_error *)msg.buf)->sentence);
	keep_fds();
}

/* Everything that a read-only client is given. */
static void collect_fds(void)
{
	_Alignas(16) static uint8_t buf[sizeof(struct wire_attach) +
					DESC_MAX_BYTES];
	struct wire_attach *a = (struct wire_attach *)buf;
	struct wire_win_open w = { .h = { .type = WIRE_WIN_OPEN,
					  .len = sizeof(w), .seq = 3 } };
	struct wire_win s = { .h = { .type = WIRE_WIN_SYNC,
				     .len = sizeof(s), .seq = 4 } };
	struct wire_hello h;
	struct errmsg e;
	int fd = dial(), len = desc_encode(tc_desc(NULL), a->desc, &e);

	T_CHECK(len > 0);
	fill_hello(&h);
	ask(fd, &h.h);
	a->h = (struct wire_hdr) { .type = WIRE_ATTACH,
		.len = (uint32_t)sizeof(*a) + (uint32_t)len, .seq = 2 };
	a->desc_len = (uint32_t)len;
	ask(fd, &a->h);
	w.space = ((struct wire_attached *)msg.buf)->space;
	w.rights = KVMM_RO;
	ask(fd, &w.h);
	s.win = ((struct wire_window *)msg.buf)->win;
	ask(fd, &s.h);
	/* header, index, frame table, an extent */
	T_CHECK(nr_ro >= 4, "%u read-only descriptors", nr_ro);
	T_CHECK(nr_rw >= 2);		/* the two ledgers */
}

static void cannot_write(int fd)
{
	char link[64];
	struct stat st;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	T_OK(fstat(fd, &st));
	T_EQ(st.st_mode & 0777, 0400);
	T_CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) ==
		MAP_FAILED);
	T_EQ(errno, EACCES);
	T_EQ(pwrite(fd, "x", 1, 0), -1);
	T_EQ(errno, EBADF);
	T_EQ(open(link, O_RDWR | O_CLOEXEC), -1);
	T_EQ(errno, EACCES);
	T_EQ(fchmod(fd, 0666), -1);
	T_EQ(errno, EPERM);
	T_EQ(ftruncate(fd, 0), -1);
	T_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
		       4096), -1);
	T_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	T_EQ(errno, EPERM);
}

static void never_writable_later(int fd)
{
	void *p = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);

	T_CHECK(p != MAP_FAILED);
	T_EQ(mprotect(p, 4096, PROT_READ | PROT_WRITE), -1);
	T_EQ(errno, EACCES);
	munmap(p, 4096);
}

static long try_to_write(void *shm, long a, long b)
{
	unsigned int i;
	int control;

	collect_fds();
	/* from another user: kvmmd's own is in its trust domain */
	T_OK(setresuid(65534, 65534, 65534));
	T_OK(prctl(PR_SET_DUMPABLE, 1));
	control = memfd_create("control", MFD_CLOEXEC);
	T_CHECK(control >= 0);
	{
		char link[64];

		snprintf(link, sizeof(link), "/proc/self/fd/%d", control);
		T_CHECK(open(link, O_RDWR | O_CLOEXEC) >= 0);
	}
	for (i = 0; i < nr_ro; i++) {
		cannot_write(ro_fds[i]);
		never_writable_later(ro_fds[i]);
	}
	/* what it may write it cannot resize: that would be a SIGBUS */
	for (i = 0; i < nr_rw; i++) {
		T_EQ(ftruncate(rw_fds[i], 0), -1);
		T_EQ(ftruncate(rw_fds[i], 1L << 40), -1);
		T_EQ(fcntl(rw_fds[i], F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
	}
	return nr_ro;
}

static void what_must_not_be_written_cannot_be(void **state)
{
	struct fx *f = *state;
	struct leak before;

	if (geteuid()) {
		fprintf(stderr, "needs root to become another user\n");
		skip();
	}
	healthy_start(f, &before);
	path = f->d.socket;
	proc_start(&f->p[BAD]);
	T_CHECK(proc_call(&f->p[BAD], try_to_write, 0, 0) >= 4);
	proc_end(&f->p[BAD]);
	healthy_stop(f);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(garbage_on_the_socket_hurts_nobody),
		FX_TEST(senseless_requests_are_answered),
		FX_TEST(comers_and_goers_leave_nothing),
		FX_TEST(what_must_not_be_written_cannot_be),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
