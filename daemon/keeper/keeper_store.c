/* SPDX-License-Identifier: Apache-2.0 */
/* What the keeper keeps, and the messages that say so: sd_notify(3)'s. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/keeper/keeper.h"
#include "daemon/log.h"
#include "ipc/base/fd.h"

#define FIRST_FD	3
#define MAX_FDS		253	/* of one message; the kernel's limit */

/* -- the table -------------------------------------------------------------------- */

static bool name_valid(const char *name)
{
	const char *c;

	for (c = name; *c; c++)
		if (*c < ' ' || *c >= 127 || *c == ':')
			return false;
	return c - name < KEEPER_NAME;
}

/* Takes @fd over. */
static void keep(struct keeper *k, int fd, const char *name, bool socket)
{
	size_t bytes = strlen(name) + 1;
	struct kept *e;

	if (k->nr >= k->max || k->name_bytes + bytes > KEEPER_NAME_BYTES) {
		if (!k->refused++)
			log_warn("keeper: no room for \"%s\" and what follows",
				 name);
		close(fd);
		return;
	}
	e = &k->kept[k->nr++];
	*e = (struct kept){ .fd = fd, .socket = socket };
	memcpy(e->name, name, bytes);
	k->name_bytes += bytes;
}

static void forget(struct keeper *k, const char *name)
{
	unsigned int i, n = 0;

	for (i = 0; i < k->nr; i++) {
		struct kept *e = &k->kept[i];

		if (!e->socket && !strcmp(e->name, name)) {
			close(e->fd);
			k->name_bytes -= strlen(e->name) + 1;
			continue;
		}
		if (n != i)
			k->kept[n] = *e;
		n++;
	}
	k->nr = n;
}

void store_adopt(struct keeper *k)
{
	const char *pid = getenv("LISTEN_PID"), *fds = getenv("LISTEN_FDS");
	const char *names = getenv("LISTEN_FDNAMES");
	long i, n = fds ? strtol(fds, NULL, 10) : 0;

	if (pid && strtol(pid, NULL, 10) == getpid()) {
		for (i = 0; i < n && i < KEEPER_SOCKETS; i++) {
			size_t len = names ? strcspn(names, ":") : 0;
			char name[KEEPER_NAME];

			snprintf(name, sizeof(name), "%.*s", (int)len,
				 names ? names : "");
			if (!set_cloexec(FIRST_FD + (int)i))
				keep(k, FIRST_FD + (int)i, name, true);
			if (names)
				names += len + (names[len] == ':');
		}
	}
	unsetenv("LISTEN_PID");
	unsetenv("LISTEN_FDS");
	unsetenv("LISTEN_FDNAMES");
}

/* -- messages ----------------------------------------------------------------------- */

/**
 * struct note - one message
 * @name:	FDNAME=; "stored" when there is none, as systemd says
 * @up:		the lines that go on to our own manager
 */
struct note {
	bool		store, remove, bad;
	char		name[KEEPER_NAME];
	char		up[4096];
	size_t		up_len;
	int		fd[MAX_FDS];
	unsigned int	nr_fds;
};

/* What goes on upwards: how the child is, and never what it keeps. */
static const char *const passed_on[] = {
	"READY=", "STOPPING=", "STATUS=", "WATCHDOG=", "EXTEND_TIMEOUT_USEC=",
};

static void note_line(struct keeper *k, struct note *n, const char *line)
{
	size_t len = strlen(line);
	unsigned int i;

	if (!strcmp(line, "FDSTORE=1")) {
		n->store = true;
	} else if (!strcmp(line, "FDSTOREREMOVE=1")) {
		n->remove = true;
	} else if (!strncmp(line, "FDNAME=", 7)) {
		if (name_valid(line + 7))
			strcpy(n->name, line + 7);
		else
			n->bad = true;
	} else {
		watch_heard(k, line);
	}
	for (i = 0; i < ARRAY_SIZE(passed_on); i++) {
		if (strncmp(line, passed_on[i], strlen(passed_on[i])) ||
		    n->up_len + len + 1 > sizeof(n->up))
			continue;
		memcpy(n->up + n->up_len, line, len);
		n->up[n->up_len + len] = '\n';
		n->up_len += len + 1;
	}
}

/* Reads what came with it; false: not from the child, or cut off. */
static bool note_control(struct keeper *k, struct note *n, struct msghdr *mh)
{
	pid_t from = 0;
	struct cmsghdr *c;

	for (c = CMSG_FIRSTHDR(mh); c; c = CMSG_NXTHDR(mh, c)) {
		if (c->cmsg_level != SOL_SOCKET)
			continue;
		if (c->cmsg_type == SCM_RIGHTS) {
			n->nr_fds = (unsigned int)((c->cmsg_len -
						    CMSG_LEN(0)) / sizeof(int));
			memcpy(n->fd, CMSG_DATA(c), n->nr_fds * sizeof(int));
		} else if (c->cmsg_type == SCM_CREDENTIALS) {
			struct ucred uc;

			memcpy(&uc, CMSG_DATA(c), sizeof(uc));
			from = uc.pid;
		}
	}
	if (!k->child || from != k->child) {
		k->strangers++;
		return false;
	}
	if (mh->msg_flags & MSG_CTRUNC && !k->refused++)
		log_warn("keeper: out of descriptors with %u kept", k->nr);
	return !(mh->msg_flags & (MSG_TRUNC | MSG_CTRUNC));
}

static void note_do(struct keeper *k, struct note *n, char *text)
{
	char *line, *rest = text;
	unsigned int i;

	strcpy(n->name, "stored");
	while ((line = strsep(&rest, "\n")))
		note_line(k, n, line);
	if (n->remove && !n->bad)
		forget(k, n->name);
	if (n->store && n->bad)
		k->refused += n->nr_fds;
	for (i = 0; n->store && !n->bad && i < n->nr_fds; i++)
		keep(k, take_fd(&n->fd[i]), n->name, false);
	up_send(k, n->up, n->up_len);
}

static bool note_recv(struct keeper *k)
{
	static struct note n;		/* nothing here is on the stack or heap */
	static char text[4096 + 1];
	static union {
		struct cmsghdr	align;
		char		bytes[CMSG_SPACE(MAX_FDS * sizeof(int)) +
				      CMSG_SPACE(sizeof(struct ucred))];
	} ctl;
	struct iovec iov = { text, sizeof(text) - 1 };
	struct msghdr mh = {
		.msg_iov	= &iov,
		.msg_iovlen	= 1,
		.msg_control	= ctl.bytes,
		.msg_controllen	= sizeof(ctl.bytes),
	};
	ssize_t len = recvmsg(k->sock, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (len < 0)
		return errno == EINTR;
	n.store = n.remove = n.bad = false;
	n.up_len = n.nr_fds = 0;
	text[len] = '\0';
	if (note_control(k, &n, &mh))
		note_do(k, &n, text);
	close_fds(n.fd, n.nr_fds);
	return true;
}

void store_read(struct keeper *k)
{
	/* a stranger that floods it does not keep us from the rest */
	unsigned int budget = 4 * KEEPER_MAX;

	while (budget-- && note_recv(k))
		;
}

/* -- the child's -------------------------------------------------------------------- */

static char names[sizeof("LISTEN_FDNAMES=") + KEEPER_NAME_BYTES];

/* By number: which of them has it. */
static int16_t holder[FIRST_FD + KEEPER_MAX];
static_assert(KEEPER_MAX <= INT16_MAX, "an index fits");

static void holder_set(int fd, int i)
{
	if (fd < (int)ARRAY_SIZE(holder))
		holder[fd] = (int16_t)i;
}

/*
 * One of them to its place; what is there goes elsewhere first. So it takes one
 * descriptor more, however many there are.
 */
static int place(struct keeper *k, unsigned int i)
{
	int to = FIRST_FD + (int)i, from = k->kept[i].fd, away;

	if (from == to)
		return fcntl(to, F_SETFD, 0) < 0 ? -errno : 0;
	if (holder[to] >= 0) {
		away = fcntl(to, F_DUPFD_CLOEXEC, FIRST_FD);
		if (away < 0)
			return -errno;
		k->kept[holder[to]].fd = away;
		holder_set(away, holder[to]);
	}
	if (dup2(from, to) < 0)
		return -errno;
	close(from);
	holder_set(from, -1);
	holder_set(to, (int)i);
	k->kept[i].fd = to;
	return 0;
}

/* Runs after fork(): system calls and memory that is there. */
int store_hand(struct keeper *k)
{
	char *to = stpcpy(names, "LISTEN_FDNAMES=");
	unsigned int i;
	int err = 0;

	memset(holder, -1, sizeof(holder));
	for (i = 0; i < k->nr; i++)
		holder_set(k->kept[i].fd, (int)i);
	for (i = 0; i < k->nr && !err; i++) {
		err = place(k, i);
		if (i)
			*to++ = ':';
		to = stpcpy(to, k->kept[i].name);
	}
	if (err)
		return err;
	return k->nr && putenv(names) ? -errno : 0;
}
