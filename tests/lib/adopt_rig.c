/* SPDX-License-Identifier: Apache-2.0 */
/* Dying and adopting; see adopt_rig.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/fd.h"
#include "tests/lib/adopt_rig.h"
#include "tests/lib/unit.h"

#define DIED		77

struct ar_store ar_store;
char ar_said[4096];
bool ar_read_only;
static int to_parent = -1;
static unsigned int countdown;

/* -- the store -------------------------------------------------------------------- */

static int find(const char *name)
{
	unsigned int i;

	for (i = 0; i < ar_store.n; i++)
		if (!strcmp(ar_store.e[i].name, name))
			return (int)i;
	return -1;
}

static void store_drop(const char *name)
{
	int i = find(name);

	if (i < 0)
		return;
	close(ar_store.e[i].fd);
	ar_store.e[i] = ar_store.e[--ar_store.n];
}

/* Takes @fd. */
static void store_add(const char *name, int fd)
{
	store_drop(name);
	assert_true(ar_store.n < AR_FDS);
	snprintf(ar_store.e[ar_store.n].name, sizeof(ar_store.e[0].name), "%s",
		 name);
	ar_store.e[ar_store.n++].fd = fd;
}

int ar_find(const char *name)
{
	int i = find(name);

	return i < 0 ? -1 : ar_store.e[i].fd;
}

void ar_lose(const char *name)
{
	if (ar_find(name) < 0)
		fail_msg("nobody keeps %s", name);
	store_drop(name);
}

void *ar_map(const char *name)
{
	int fd = ar_find(name);
	void *p;

	if (fd < 0)
		fail_msg("nobody keeps %s", name);
	p = mmap(NULL, (size_t)lseek(fd, 0, SEEK_END), PROT_READ | PROT_WRITE,
		 MAP_SHARED, fd, 0);
	assert_true(p != MAP_FAILED);
	return p;
}

void ar_swap(const char *name)
{
	int fd = memfd_create("kvmm-copy", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	off_t n = lseek(ar_find(name), 0, SEEK_END);
	void *bytes;

	assert_true(fd >= 0 && n >= 0);
	assert_int_equal(ftruncate(fd, n), 0);
	if (n) {
		bytes = ar_map(name);
		assert_int_equal(pwrite(fd, bytes, (size_t)n, 0), n);
		munmap(bytes, (size_t)n);
	}
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW |
			       F_SEAL_SEAL), 0);
	store_add(name, fd);
}

void ar_empty(void)
{
	while (ar_store.n)
		close(ar_store.e[--ar_store.n].fd);
	ar_said[0] = '\0';
}

/* -- from a child ------------------------------------------------------------------- */

static void send_to_parent(const char *text, int fd)
{
	struct iovec iov = { .iov_base = (void *)text,
			     .iov_len = strlen(text) + 1 };
	char buf[CMSG_SPACE(sizeof(int))] = { 0 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	struct cmsghdr *c;

	if (fd >= 0) {
		m.msg_control = buf;
		m.msg_controllen = sizeof(buf);
		c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &fd, sizeof(int));
	}
	if (sendmsg(to_parent, &m, MSG_NOSIGNAL) < 0)
		_exit(99);
}

/* One message; false: there are no more. */
static bool recv_from_child(int sock)
{
	char text[128], buf[CMSG_SPACE(sizeof(int))];
	struct iovec iov = { .iov_base = text, .iov_len = sizeof(text) };
	struct msghdr m = {
		.msg_iov = &iov, .msg_iovlen = 1,
		.msg_control = buf, .msg_controllen = sizeof(buf),
	};
	struct cmsghdr *c;
	int fd = -1;

	if (recvmsg(sock, &m, MSG_CMSG_CLOEXEC) <= 0)
		return false;
	c = CMSG_FIRSTHDR(&m);
	if (c)
		memcpy(&fd, CMSG_DATA(c), sizeof(int));
	if (text[0] == '-')
		store_drop(text + 1);
	else
		store_add(text, fd);
	return true;
}

/* -- what mm calls ------------------------------------------------------------------ */

static int keep_put(void *arg, int fd, const char *name)
{
	if (to_parent >= 0)
		send_to_parent(name, fd);
	else
		store_add(name, fcntl(fd, F_DUPFD_CLOEXEC, 0));
	return 0;
}

static void keep_drop(void *arg, const char *name)
{
	char text[80];

	if (to_parent >= 0) {
		snprintf(text, sizeof(text), "-%s", name);
		send_to_parent(text, -1);
	} else {
		store_drop(name);
	}
}

static int keep_take(void *arg, const char *name)
{
	int i = find(name);

	return i < 0 ? -ENOENT : fcntl(ar_store.e[i].fd, F_DUPFD_CLOEXEC, 0);
}

static int keep_client(void *arg, const struct mm_kept_client *kc,
		       struct mm_client_opts *o)
{
	struct rig *r = arg;
	struct rig_client *c;
	char name[32];
	int fd;

	if (kc->no >= RIG_CLIENTS)
		return -EINVAL;
	c = &r->client[kc->no];
	snprintf(name, sizeof(name), "ledger.%u", kc->no);
	fd = keep_take(r, name);
	if (fd < 0 || shm_adopt(&c->ledger_shm, fd, sizeof(struct ledger), 0))
		return -ENOENT;
	c->ledger = c->ledger_shm.addr;
	c->rig = r;
	o->tenant = "default";
	if (ar_read_only)
		o->rights = KVMM_RO;
	o->ledger = &c->ledger_shm;
	o->arg = c;
	return 0;
}

static void keep_adopted(void *arg, struct mm_client *mc, bool whole)
{
	struct rig_client *c = mm_client_arg(mc);

	c->mc = mc;
	c->whole = whole;
}

static void keep_gave_up(void *arg, const char *sentence)
{
	size_t n = strlen(ar_said);

	snprintf(ar_said + n, sizeof(ar_said) - n, "%s\n", sentence);
}

const struct mm_keep_ops ar_keep = {
	.put		= keep_put,
	.drop		= keep_drop,
	.take		= keep_take,
	.client		= keep_client,
	.adopted	= keep_adopted,
	.gave_up	= keep_gave_up,
};

/* -- dying and coming again ----------------------------------------------------------- */

static void point(void)
{
	if (!--countdown)
		_exit(DIED);
}

bool ar_die(void (*fn)(void *shm), void *shm, unsigned int nth)
{
	int sv[2], status;
	pid_t pid;

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0,
				    sv), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (!pid) {
		/* a failure ends the child, and not the test in it */
		setenv("CMOCKA_TEST_ABORT", "1", 1);
		close(sv[0]);
		to_parent = sv[1];
		countdown = nth;
		mm_point_fn = point;
		fn(shm);
		_exit(0);
	}
	close(sv[1]);
	while (recv_from_child(sv[0]))
		;
	close(sv[0]);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (!WIFEXITED(status) ||
	    (WEXITSTATUS(status) && WEXITSTATUS(status) != DIED))
		fail_msg("the first one ended with status 0x%x", status);
	return WEXITSTATUS(status) == DIED;
}

void ar_open(struct rig *r, const struct rig_opts *o)
{
	struct rig_opts mine = *o;
	int fd = ar_find("header");

	mine.keep = &ar_keep;
	mine.hdr_fd = fd < 0 ? 0 : fd;
	mr_open(r, &mine);
	if (fd < 0)
		keep_put(r, r->hdr_shm.fd, "header");
}

static void take_win(struct mm_win *w, void *arg)
{
	struct rig_client *c = arg;

	c->win = w;
	c->mag_head = atomic_load(&w->wl->mag_head);
}

struct rig_client *ar_client(struct rig *r, unsigned int i)
{
	struct rig_client *c = &r->client[i];

	assert_non_null(c->mc);
	assert_int_equal(mm_client_back(c->mc), 0);
	mm_client_windows(c->mc, take_win, c);
	if (c->win)
		c->space = mm_win_space(c->win);
	return c;
}

void ar_bury(void *rig)
{
	static struct grave {
		struct grave	*next;
		void		*rig;
	} *graves;
	struct grave *g = malloc(sizeof(*g));

	assert_non_null(g);
	*g = (struct grave){ graves, rig };
	graves = g;
}
