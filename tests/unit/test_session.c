/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=pthread_create */
/* Sessions: hello, identity, set-up requests, and who is cut off for what. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "tests/lib/server_rig.h"
#include "tests/lib/unit.h"

static struct server_rig rig;

/* -- threads that are not to be had, or do not get on ---------------------------------- */

static enum { THREADS_RUN, THREADS_FAIL, THREADS_STICK } threads;
static unsigned int nr_stuck;
static struct { void *(*fn)(void *arg); void *arg; } stuck[64];

int __real_pthread_create(pthread_t *t, const pthread_attr_t *attr,
			  void *(*fn)(void *arg), void *arg);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr,
			  void *(*fn)(void *arg), void *arg);

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr,
			  void *(*fn)(void *arg), void *arg)
{
	if (threads == THREADS_FAIL)
		return EAGAIN;
	if (threads != THREADS_STICK || nr_stuck == ARRAY_SIZE(stuck))
		return __real_pthread_create(t, attr, fn, arg);
	stuck[nr_stuck].fn = fn;
	stuck[nr_stuck++].arg = arg;
	return 0;
}

static void threads_get_on(void)
{
	threads = THREADS_RUN;
	while (nr_stuck--)
		stuck[nr_stuck].fn(stuck[nr_stuck].arg);
	nr_stuck = 0;
}

static int setup(void **state)
{
	return srig_open(&rig, NULL);
}

static int teardown(void **state)
{
	threads_get_on();
	srig_close(&rig);
	return 0;
}

static void connect_to(struct raw_client *c, unsigned int socket)
{
	int err = rc_connect(&rig, socket, c);

	if (err)
		fail_msg("connect: %s", strerror(-err));
}

static void send_hello(struct raw_client *c, uint32_t abi_min, uint32_t abi_max,
		       int fd)
{
	struct wire_hello h = {
		.h = { .type = WIRE_HELLO, .len = sizeof(h) },
		.abi_min = abi_min, .abi_max = abi_max,
		.pid = (uint32_t)getpid(), .name = "test",
	};

	assert_int_equal(rc_send(c, &h.h, &fd, fd >= 0), 0);
}

/* -- hello ------------------------------------------------------------------------ */

static void hello_is_answered_with_ledger_and_header(void **state)
{
	struct raw_client c;
	const struct wire_welcome *w;

	connect_to(&c, 0);
	rc_hello(&c);
	w = (const void *)c.m->buf;
	assert_int_equal(w->abi, KVMM_ABI_VERSION);
	assert_string_equal(w->tenant, "demo");
	assert_int_equal(w->rights, KVMM_RW);
	assert_int_equal(w->nr_nodes, 1);
	assert_string_equal(w->node[0].name, "dram0");
	assert_int_equal(w->node[0].kind, KVMM_NODE_HOST);
	assert_true(w->epoch != 0);
	assert_int_equal(((struct kvmm_hdr *)c.hdr.addr)->magic,
			 KVMM_MAGIC_HDR);
	assert_int_equal(((struct kvmm_hdr *)c.hdr.addr)->epoch, w->epoch);
	assert_int_equal(c.l->client, w->client);
	rc_close(&c);
}

static void list_names(struct mm_client *c, const struct mm_client_info *ci,
		       void *arg)
{
	snprintf(arg, 32, "%s", ci->name);
}

/* It goes into logs, lists and terminals. */
static void a_name_is_made_printable(void **state)
{
	static const char raw[16] = "a\n\x1b[2J\xff\xc3.b~\x7f\0\n";
	char name[32] = "";
	struct raw_client c;
	struct wire_hello h = {
		.h = { .type = WIRE_HELLO, .len = sizeof(h) },
		.abi_min = 1, .abi_max = 1, .pid = (uint32_t)getpid(),
	};

	memcpy(h.name, raw, sizeof(h.name));
	connect_to(&c, 0);
	assert_int_equal(rc_send(&c, &h.h, NULL, 0), 0);
	rc_expect(&c, WIRE_WELCOME);
	mm_for_each_client(rig.s->mm, 0, list_names, name);
	assert_string_equal(name, "a??[2J??.b~?");
	rc_close(&c);
}

static void header_cannot_be_written_by_a_client(void **state)
{
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED,
			      c.hdr.fd, 0), MAP_FAILED);
	assert_int_equal(mprotect(c.hdr.addr, 4096, PROT_READ | PROT_WRITE),
			 -1);
	rc_close(&c);
}

static void another_abi_is_refused_with_both_ranges(void **state)
{
	struct raw_client c;

	connect_to(&c, 0);
	send_hello(&c, 77, 78, -1);
	rc_expect_error(&c, -EPROTO, "this client 77 to 78");
	rc_expect_cut(&c, REJECT_ABI);
	rc_close(&c);
}

static void abi_ranges_that_overlap_meet_at_the_highest(void **state)
{
	struct raw_client c;
	const struct wire_welcome *w;

	connect_to(&c, 0);
	send_hello(&c, 0, 99, -1);
	rc_expect(&c, WIRE_WELCOME);
	w = (const void *)c.m->buf;
	assert_int_equal(w->abi, KVMM_ABI_VERSION);
	rc_close(&c);
}

static void a_file_is_no_pidfd(void **state)
{
	struct raw_client c;
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC), before;
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);

	connect_to(&c, 0);
	before = fd_count();
	send_hello(&c, 1, 1, fd);
	close(fd);
	rc_expect_error(&c, -EACCES, "is not a pidfd");
	rc_expect_cut(&c, REJECT_IDENTITY);
	rc_close(&c);
	/* it is closed on a thread of its own */
	while (fd_count() > before - 2 && !deadline_past(deadline))
		srig_pump(&rig);
	assert_int_equal(fd_count(), before - 2);
}

static void hello_with_a_file(enum reject why)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	struct raw_client c;

	connect_to(&c, 0);
	send_hello(&c, 1, 1, fd);
	close(fd);
	rc_expect_cut(&c, why);
	rc_close(&c);
	srig_pump(&rig);
}

static void wait_for_fds(int n)
{
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);

	while (fd_count() != n && !deadline_past(deadline))
		srig_pump(&rig);
	assert_int_equal(fd_count(), n);
}

/* What could not be closed then is closed later. */
static void no_thread_to_close_a_file_costs_no_descriptor(void **state)
{
	int before = fd_count();
	unsigned int i;

	threads = THREADS_FAIL;
	for (i = 0; i < 3; i++)
		hello_with_a_file(REJECT_IDENTITY);
	threads = THREADS_RUN;
	hello_with_a_file(REJECT_IDENTITY);
	wait_for_fds(before);
}

/* A file system that does not answer holds so many threads and no more. */
static void files_that_cannot_be_closed_are_bounded(void **state)
{
	int before = fd_count(), most;
	struct raw_client c;
	unsigned int i;

	threads = THREADS_STICK;
	for (i = 0; i < FOREIGN_CLOSERS; i++)
		hello_with_a_file(REJECT_IDENTITY);
	most = fd_count();
	for (i = 0; i < 8; i++)
		hello_with_a_file(REJECT_NOMEM);
	assert_int_equal(fd_count(), most);
	/* another socket's clients do not notice */
	connect_to(&c, 1);
	rc_hello(&c);
	rc_close(&c);
	threads_get_on();
	connect_to(&c, 0);
	rc_hello(&c);
	rc_close(&c);
	wait_for_fds(before);
}

/* A pidfd of somebody who lives longer would keep pins for ever. */
static void another_process_pidfd_is_refused(void **state)
{
	struct raw_client c;
	int fd = fd_pidfd_open(1);

	if (fd < 0)
		skip();
	connect_to(&c, 0);
	send_hello(&c, 1, 1, fd);
	close(fd);
	rc_expect_error(&c, -EACCES, "process");
	rc_expect_cut(&c, REJECT_IDENTITY);
	rc_close(&c);
}

static void silence_ends_after_two_seconds(void **state)
{
	struct raw_client c;

	connect_to(&c, 0);
	srig_pump(&rig);
	assert_int_equal(rig.s->nr_greeting, 1);
	sessions_run(rig.s, now_ns() + 1900 * NSEC_PER_MSEC);
	srig_pump(&rig);
	assert_int_equal(rig.s->nr_greeting, 1);
	sessions_run(rig.s, now_ns() + 2100 * NSEC_PER_MSEC);
	rc_expect_cut(&c, REJECT_HELLO_LATE);
	assert_int_equal(rig.s->nr_greeting, 0);
	rc_close(&c);
}

static void too_many_silent_connections_are_refused(void **state)
{
	struct raw_client c[LISTENER_MAX_GREETING + 1], other;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(c); i++) {
		connect_to(&c[i], 0);
		srig_pump(&rig);
	}
	rc_expect_error(&c[LISTENER_MAX_GREETING], -EUSERS, "hello");
	/* other sockets are open to others */
	connect_to(&other, 1);
	rc_hello(&other);
	rc_close(&other);
	for (i = 0; i < ARRAY_SIZE(c); i++)
		rc_close(&c[i]);
	srig_pump(&rig);
	assert_int_equal(srig_sessions(&rig), 0);
}

/* -- what is not a message ------------------------------------------------------------ */

static void raw_bytes_are_cut_off(void **state)
{
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	assert_int_equal(send(c.fd, "GET / HTTP/1.0\r\n\r\n", 18, 0), 18);
	rc_expect_cut(&c, REJECT_MSG_BAD);
	rc_close(&c);
}

static void a_request_before_hello_is_cut_off(void **state)
{
	struct raw_client c;
	struct wire_join j = { .h = { .type = WIRE_JOIN, .len = sizeof(j) } };

	connect_to(&c, 0);
	rc_send(&c, &j.h, NULL, 0);
	rc_expect_cut(&c, REJECT_MSG_TYPE);
	rc_close(&c);
}

static void a_second_hello_is_cut_off(void **state)
{
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	send_hello(&c, 1, 1, -1);
	rc_expect_cut(&c, REJECT_MSG_TYPE);
	rc_close(&c);
}

static void unknown_types_are_cut_off(void **state)
{
	static const uint16_t types[] = { 0, 9, 63, WIRE_WELCOME, WIRE_INDEX,
					  65535 };
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(types); i++) {
		struct raw_client c;
		struct wire_ok m = { .h = { .type = types[i],
					    .len = sizeof(m) } };

		connect_to(&c, 0);
		rc_hello(&c);
		rc_send(&c, &m.h, NULL, 0);
		rc_expect_cut(&c, REJECT_MSG_TYPE);
		rc_close(&c);
	}
	assert_int_equal(srig_reject(&rig, REJECT_MSG_TYPE), ARRAY_SIZE(types));
}

static void wrong_lengths_are_cut_off(void **state)
{
	static const struct { uint16_t type; uint32_t len; } msg[] = {
		{ WIRE_JOIN, sizeof(struct wire_join) - 4 },
		{ WIRE_JOIN, sizeof(struct wire_join) + 4 },
		{ WIRE_ATTACH, sizeof(struct wire_hdr) },
		{ WIRE_ATTACH, sizeof(struct wire_attach) + 8 }, /* desc_len 0 */
		{ WIRE_WIN_OPEN, sizeof(struct wire_win_open) + 1 },
		{ WIRE_WIN_SYNC, 16 },
		{ WIRE_RESERVE, 16 },
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(msg); i++) {
		_Alignas(16) uint8_t buf[256] = { 0 };
		struct wire_hdr *h = (void *)buf;
		struct raw_client c;

		h->type = msg[i].type;
		h->len = msg[i].len;
		connect_to(&c, 0);
		rc_hello(&c);
		rc_send(&c, h, NULL, 0);
		rc_expect_cut(&c, REJECT_MSG_SHORT);
		rc_close(&c);
	}
	assert_int_equal(srig_reject(&rig, REJECT_MSG_SHORT), ARRAY_SIZE(msg));
}

static void descriptors_that_nobody_asked_for_are_closed(void **state)
{
	int before, fds[8], i;
	struct raw_client c;
	struct wire_join j = { .h = { .type = WIRE_JOIN, .len = sizeof(j) } };

	for (i = 0; i < 8; i++)
		fds[i] = 0;
	connect_to(&c, 0);
	rc_hello(&c);
	srig_pump(&rig);
	before = fd_count();
	rc_send(&c, &j.h, fds, 8);
	rc_expect_cut(&c, REJECT_MSG_BAD);
	srig_pump(&rig);
	/* the session's socket, doorbell, notify and pidfd went, too */
	assert_true(fd_count() <= before);
	rc_close(&c);
}

/* -- set-up ------------------------------------------------------------------------------ */

static void a_space_is_attached_and_left(void **state)
{
	struct wire_win d = { .h = { .type = WIRE_DETACH, .len = sizeof(d) } };
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	rc_attach(&c);
	d.win = (uint16_t)c.space;
	rc_send(&c, &d.h, NULL, 0);
	rc_expect(&c, WIRE_OK);
	rc_send(&c, &d.h, NULL, 0);
	rc_expect_error(&c, -EINVAL, "no such space");
	rc_close(&c);
}

static void a_bad_descriptor_is_an_error_with_a_sentence(void **state)
{
	_Alignas(16) uint8_t buf[64] = { 0 };
	struct wire_attach *a = (void *)buf;
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	a->h.type = WIRE_ATTACH;
	a->h.len = sizeof(*a) + 20;
	a->desc_len = 20;
	memset(a->desc, 0xff, 20);
	rc_send(&c, &a->h, NULL, 0);
	rc_expect_error(&c, -EINVAL, "");
	/* and the connection goes on */
	rc_attach(&c);
	rc_close(&c);
}

static void a_read_only_socket_attaches_to_what_exists_only(void **state)
{
	_Alignas(16) uint8_t buf[sizeof(struct wire_attach) + DESC_MAX_BYTES];
	struct wire_attach *a = (void *)buf;
	struct raw_client ro, rw;

	connect_to(&ro, 1);
	rc_hello(&ro);
	*a = (struct wire_attach){ .h.type = WIRE_ATTACH };
	a->desc_len = (uint32_t)rc_desc(a->desc);
	a->h.len = (uint32_t)sizeof(*a) + a->desc_len;
	rc_send(&ro, &a->h, NULL, 0);
	rc_expect_error(&ro, -ENOENT, "");
	connect_to(&rw, 0);
	rc_hello(&rw);
	rc_attach(&rw);
	rc_attach(&ro);
	rc_close(&ro);
	rc_close(&rw);
}

static void expect_win_open_error(struct raw_client *c, uint32_t space,
				  uint16_t cls, uint16_t node, uint32_t rights,
				  int err)
{
	struct wire_win_open w = {
		.h = { .type = WIRE_WIN_OPEN, .len = sizeof(w) },
		.space = space, .cls = cls, .node = node, .rights = rights,
	};

	rc_send(c, &w.h, NULL, 0);
	rc_expect_error(c, err, "");
}

static void windows_are_refused_for_what_is_not_there(void **state)
{
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	expect_win_open_error(&c, 0, 0, 0, KVMM_RW, -EINVAL);
	rc_attach(&c);
	expect_win_open_error(&c, c.space + 1, 0, 0, KVMM_RW, -EINVAL);
	expect_win_open_error(&c, c.space, 1, 0, KVMM_RW, -EINVAL);
	expect_win_open_error(&c, c.space, 0, 1, KVMM_RW, -EINVAL);
	expect_win_open_error(&c, c.space, 0, 0, 7, -EINVAL);
	rc_win_open(&c, KVMM_RW);
	expect_win_open_error(&c, c.space, 0, 0, KVMM_RW, -EBUSY);
	rc_close(&c);
}

static void a_read_only_socket_gets_no_writable_window(void **state)
{
	struct raw_client ro, rw;

	connect_to(&rw, 0);
	rc_hello(&rw);
	rc_attach(&rw);
	connect_to(&ro, 1);
	rc_hello(&ro);
	rc_attach(&ro);
	expect_win_open_error(&ro, ro.space, 0, 0, KVMM_RW, -EACCES);
	rc_win_open(&ro, KVMM_RO);
	rc_close(&ro);
	rc_close(&rw);
}

static void extents_arrive_with_their_descriptors(void **state)
{
	const struct wire_extents *x;
	struct wire_win w = { .h = { .type = WIRE_WIN_SYNC,
				     .len = sizeof(w) } };
	struct raw_client c;
	uint32_t frame;
	void *p;

	connect_to(&c, 0);
	rc_hello(&c);
	rc_attach(&c);
	rc_win_open(&c, KVMM_RW);
	rc_alloc(&c, &frame, 1);
	w.win = c.win;
	rc_send(&c, &w.h, NULL, 0);
	rc_expect(&c, WIRE_EXTENTS);
	x = (const void *)c.m->buf;
	assert_true(x->n >= 1);
	assert_int_equal(x->ext[0].up, 1);
	assert_int_equal(c.m->nr_fds, x->n);
	assert_true(x->seq > 0);
	p = mmap(NULL, SRIG_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, c.m->fd[0],
		 0);
	assert_ptr_not_equal(p, MAP_FAILED);
	memset(p, 1, SRIG_PAGE);
	munmap(p, SRIG_PAGE);
	/* up to date: nothing more to tell */
	w.have_seq = x->seq;
	rc_send(&c, &w.h, NULL, 0);
	rc_expect(&c, WIRE_EXTENTS);
	assert_int_equal(x->n, 0);
	rc_close(&c);
}

static void a_space_with_windows_cannot_be_left(void **state)
{
	struct wire_win d = { .h = { .type = WIRE_DETACH, .len = sizeof(d) } };
	struct wire_win w = { .h = { .type = WIRE_WIN_CLOSE,
				     .len = sizeof(w) } };
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	rc_attach(&c);
	rc_win_open(&c, KVMM_RW);
	d.win = (uint16_t)c.space;
	w.win = c.win;
	rc_send(&c, &d.h, NULL, 0);
	rc_expect_error(&c, -EBUSY, "open windows");
	rc_send(&c, &w.h, NULL, 0);
	rc_expect(&c, WIRE_OK);
	rc_send(&c, &w.h, NULL, 0);
	rc_expect_error(&c, -EINVAL, "no such window");
	rc_send(&c, &d.h, NULL, 0);
	rc_expect(&c, WIRE_OK);
	rc_close(&c);
}

static void members_get_each_others_ledgers(void **state)
{
	struct wire_join j = {
		.h = { .type = WIRE_JOIN, .len = sizeof(j) },
		.token = "sixteen bytes..", .world = 2,
	};
	const struct wire_member *m;
	struct raw_client a, b;

	connect_to(&a, 0);
	rc_hello(&a);
	rc_send(&a, &j.h, NULL, 0);
	rc_expect(&a, WIRE_OK);
	connect_to(&b, 0);
	rc_hello(&b);
	j.rank = 1;
	rc_send(&b, &j.h, NULL, 0);
	rc_expect(&b, WIRE_OK);
	rc_expect(&b, WIRE_MEMBER);
	m = (const void *)b.m->buf;
	assert_int_equal(m->rank, 0);
	assert_int_equal(b.m->nr_fds, 1);
	assert_ptr_equal(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED,
			      b.m->fd[0], 0), MAP_FAILED);
	rc_expect(&a, WIRE_MEMBER);
	m = (const void *)a.m->buf;
	assert_int_equal(m->rank, 1);
	assert_int_equal(m->gone, 0);
	/* each of them once */
	srig_pump(&rig);
	assert_int_equal(sock_recv(a.fd, a.m), -EAGAIN);
	assert_int_equal(sock_recv(b.fd, b.m), -EAGAIN);
	rc_close(&a);
	rc_close(&b);
}

/* -- the end ------------------------------------------------------------------------------ */

static void a_client_without_windows_is_gone_with_its_socket(void **state)
{
	struct raw_client c;
	int before = fd_count();

	connect_to(&c, 0);
	rc_hello(&c);
	rc_close(&c);
	srig_pump(&rig);
	assert_int_equal(srig_sessions(&rig), 0);
	assert_int_equal(fd_count(), before);
	connect_to(&c, 0);
	rc_hello(&c);
	rc_attach(&c);
	rc_close(&c);
	srig_pump(&rig);
	assert_int_equal(srig_sessions(&rig), 0);
}

/* Its process lives: it may still read what it has mapped. */
static void a_client_with_windows_stays_until_its_process_ends(void **state)
{
	struct session *ss;
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	rc_attach(&c);
	rc_win_open(&c, KVMM_RW);
	rc_close(&c);
	srig_pump(&rig);
	assert_int_equal(srig_sessions(&rig), 1);
	ss = list_first(&rig.s->sessions, struct session, link);
	assert_int_equal(ss->state, SESSION_CLOSED);
	/* what the pidfd's event does */
	session_exited(ss);
	srig_pump(&rig);
	assert_int_equal(srig_sessions(&rig), 0);
}

static void a_killed_process_is_noticed_by_its_pidfd(void **state)
{
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);
	struct raw_client c;
	pid_t pid = fork();
	int i;

	assert_true(pid >= 0);
	if (!pid) {
		struct wire_hello h = {
			.h = { .type = WIRE_HELLO, .len = sizeof(h) },
			.abi_min = 1, .abi_max = 1,
		};
		int pidfd = fd_pidfd_open(getpid());

		if (rc_connect(&rig, 0, &c) || rc_send(&c, &h.h, &pidfd, 1))
			_exit(1);
		for (;;)
			pause();
	}
	while (!rig.s->nr_watch && !deadline_past(deadline))
		loop_once(rig.s, deadline_in(NSEC_PER_MSEC));
	assert_int_equal(rig.s->nr_watch, 1);
	kill(pid, SIGKILL);
	assert_int_equal(waitpid(pid, &i, 0), pid);
	while (srig_sessions(&rig) && !deadline_past(deadline))
		loop_once(rig.s, deadline_in(NSEC_PER_MSEC));
	assert_int_equal(srig_sessions(&rig), 0);
}

static void a_process_that_keeps_hanging_up_is_refused(void **state)
{
	struct raw_client c;
	unsigned int i;

	for (i = 0; i < SESSION_MAX_OLD; i++) {
		connect_to(&c, 0);
		rc_hello(&c);
		rc_attach(&c);
		rc_win_open(&c, KVMM_RW);
		rc_close(&c);
		srig_pump(&rig);
	}
	connect_to(&c, 0);
	send_hello(&c, 1, 1, -1);
	rc_expect_error(&c, -EUSERS, "earlier connections");
	rc_close(&c);
}

static void a_client_that_does_not_read_is_cut_off(void **state)
{
	struct wire_win w = { .h = { .type = WIRE_WIN_SYNC,
				     .len = sizeof(w) } };
	struct session *ss;
	struct raw_client c;
	int i;

	connect_to(&c, 0);
	rc_hello(&c);
	ss = list_first(&rig.s->sessions, struct session, link);
	for (i = 0; i < 100000 && !ss->nr_out; i++) {
		/* each is answered by an error of 280 bytes */
		if (sock_send(c.fd, &w.h, NULL, 0) == -EAGAIN)
			srig_pump(&rig);
	}
	assert_int_equal(ss->nr_out, 1);
	/* no request is read meanwhile, so no more waits than that */
	for (i = 0; i < 100; i++) {
		sock_send(c.fd, &w.h, NULL, 0);
		srig_pump(&rig);
	}
	assert_int_equal(ss->nr_out, 1);
	sessions_run(rig.s, now_ns() + 6 * NSEC_PER_SEC);
	srig_pump(&rig);
	assert_int_equal(srig_reject(&rig, REJECT_SLOW), 1);
	rc_close(&c);
}

static void what_waited_is_sent_when_the_client_reads_again(void **state)
{
	struct wire_win w = { .h = { .type = WIRE_WIN_SYNC,
				     .len = sizeof(w) } };
	uint32_t sent = 0, got = 0;
	struct session *ss;
	struct raw_client c;

	connect_to(&c, 0);
	rc_hello(&c);
	ss = list_first(&rig.s->sessions, struct session, link);
	while (!ss->nr_out && sent < 100000) {
		w.h.seq = sent;
		if (!sock_send(c.fd, &w.h, NULL, 0))
			sent++;
		else
			srig_pump(&rig);
	}
	while (got < sent) {
		const struct wire_hdr *h = (const void *)c.m->buf;

		rc_expect(&c, WIRE_ERROR);
		assert_int_equal(h->seq, got);
		got++;
	}
	assert_int_equal(srig_reject(&rig, REJECT_SLOW), 0);
	rc_close(&c);
}

static void clients_beyond_the_limit_are_refused(void **state)
{
	struct raw_client a, b, c;
	struct server_rig small;

	assert_int_equal(srig_open(&small, "\"limits\": {\"max_clients\": 2}"),
			 0);
	assert_int_equal(rc_connect(&small, 0, &a), 0);
	rc_hello(&a);
	assert_int_equal(rc_connect(&small, 1, &b), 0);
	rc_hello(&b);
	assert_int_equal(rc_connect(&small, 1, &c), 0);
	send_hello(&c, 1, 1, -1);
	rc_expect_error(&c, -EUSERS, "max_clients");
	rc_close(&a);
	rc_close(&b);
	rc_close(&c);
	srig_close(&small);
}

/* Two sockets, three clients: one is kept for the other socket. */
static void one_socket_cannot_take_all_clients(void **state)
{
	struct raw_client a, b, c, d;
	struct server_rig small;

	assert_int_equal(srig_open(&small, "\"limits\": {\"max_clients\": 3}"),
			 0);
	assert_int_equal(rc_connect(&small, 0, &a), 0);
	rc_hello(&a);
	assert_int_equal(rc_connect(&small, 0, &b), 0);
	rc_hello(&b);
	assert_int_equal(rc_connect(&small, 0, &c), 0);
	send_hello(&c, 1, 1, -1);
	rc_expect_error(&c, -EUSERS, "for others");
	assert_int_equal(rc_connect(&small, 1, &d), 0);
	rc_hello(&d);
	rc_close(&a);
	rc_close(&b);
	rc_close(&c);
	rc_close(&d);
	srig_close(&small);
}

static void spaces_beyond_the_limit_are_refused(void **state)
{
	_Alignas(16) uint8_t buf[sizeof(struct wire_attach) + DESC_MAX_BYTES];
	struct wire_attach *a = (void *)buf;
	struct server_rig small;
	struct raw_client c;

	assert_int_equal(srig_open(&small, "\"limits\": {\"max_spaces\": 1}"),
			 0);
	assert_int_equal(rc_connect(&small, 0, &c), 0);
	rc_hello(&c);
	rc_attach(&c);
	*a = (struct wire_attach){ .h.type = WIRE_ATTACH };
	a->desc_len = (uint32_t)rc_desc(a->desc);
	a->desc[4] ^= 1;		/* another model's name */
	a->h.len = (uint32_t)sizeof(*a) + a->desc_len;
	rc_send(&c, &a->h, NULL, 0);
	rc_expect_error(&c, -EUSERS, "max_spaces");
	rc_close(&c);
	srig_close(&small);
}

static void two_daemons_do_not_share_a_state_folder(void **state)
{
	struct server_opts o = { .cfg = &rig.cfg, .config_path = "" };
	struct server *s;
	struct errmsg e;

	assert_int_equal(server_create(&o, &s, &e), -EBUSY);
	assert_non_null(strstr(e.text, "another kvmmd"));
}

static void each_daemon_has_an_epoch_of_its_own(void **state)
{
	struct server_opts o = { .cfg = &rig.cfg, .config_path = "" };
	uint64_t first = rig.s->epoch;
	struct errmsg e;

	assert_int_equal(server_destroy(rig.s, deadline_in(NSEC_PER_SEC)), 0);
	rig.s = NULL;
	assert_int_equal(server_create(&o, &rig.s, &e), 0);
	assert_int_not_equal(rig.s->epoch & 0xffff, first & 0xffff);
	assert_int_not_equal(rig.s->epoch & 0xffff, 0);
}

#define TEST(f)	cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(hello_is_answered_with_ledger_and_header),
		TEST(a_name_is_made_printable),
		TEST(header_cannot_be_written_by_a_client),
		TEST(another_abi_is_refused_with_both_ranges),
		TEST(abi_ranges_that_overlap_meet_at_the_highest),
		TEST(a_file_is_no_pidfd),
		TEST(no_thread_to_close_a_file_costs_no_descriptor),
		TEST(files_that_cannot_be_closed_are_bounded),
		TEST(another_process_pidfd_is_refused),
		TEST(silence_ends_after_two_seconds),
		TEST(too_many_silent_connections_are_refused),
		TEST(raw_bytes_are_cut_off),
		TEST(a_request_before_hello_is_cut_off),
		TEST(a_second_hello_is_cut_off),
		TEST(unknown_types_are_cut_off),
		TEST(wrong_lengths_are_cut_off),
		TEST(descriptors_that_nobody_asked_for_are_closed),
		TEST(a_space_is_attached_and_left),
		TEST(a_bad_descriptor_is_an_error_with_a_sentence),
		TEST(a_read_only_socket_attaches_to_what_exists_only),
		TEST(windows_are_refused_for_what_is_not_there),
		TEST(a_read_only_socket_gets_no_writable_window),
		TEST(extents_arrive_with_their_descriptors),
		TEST(a_space_with_windows_cannot_be_left),
		TEST(members_get_each_others_ledgers),
		TEST(a_client_without_windows_is_gone_with_its_socket),
		TEST(a_client_with_windows_stays_until_its_process_ends),
		TEST(a_killed_process_is_noticed_by_its_pidfd),
		TEST(a_process_that_keeps_hanging_up_is_refused),
		TEST(a_client_that_does_not_read_is_cut_off),
		TEST(what_waited_is_sent_when_the_client_reads_again),
		TEST(clients_beyond_the_limit_are_refused),
		TEST(one_socket_cannot_take_all_clients),
		TEST(spaces_beyond_the_limit_are_refused),
		TEST(two_daemons_do_not_share_a_state_folder),
		TEST(each_daemon_has_an_epoch_of_its_own),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
