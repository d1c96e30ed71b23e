/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The park's messages, and the three ways in which descriptors come back.
 *
 * To the store it is datagrams as of sd_notify(3): FDSTORE=1 with FDNAME= and
 * one descriptor, FDSTOREREMOVE=1 with FDNAME=. FDPOLL=0, since a pidfd of a
 * process that has exited polls as hung up, and is what a later daemon must see.
 * The messages are our own, as libsystemd's would wait for a manager that does
 * not read: nothing here waits longer than %SEND_MS, and then not again for a
 * second.
 *
 * Nobody answers. A store that is full drops what it gets without a word, so
 * its size is asked beforehand: $FDSTORE, which systemd sets since version 254,
 * the unit file for older ones, and the keeper.
 *
 * Back they come as $LISTEN_FDS and $LISTEN_FDNAMES, with the manager's
 * listening sockets among them, or, after a re-exec in place, as they are, under
 * the numbers that a sealed memfd lists.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/notify.h"
#include "daemon/server/park_store.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define SEND_MS		20
#define QUIET_NS	NSEC_PER_SEC
#define SEALS		(F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)

/* -- who keeps them ----------------------------------------------------------------- */

void store_open(struct park *p)
{
	const char *max = getenv("FDSTORE"), *keeper = getenv("KVMM_KEEPER");
	const struct timeval tv = { .tv_usec = SEND_MS * 1000 };

	p->max = max ? (unsigned int)strtoul(max, NULL, 10) : 0;
	p->max = min(p->max, (unsigned int)PARK_MAX);
	p->keeper = keeper ? (pid_t)strtol(keeper, NULL, 10) : 0;
	p->to_len = notify_address(&p->to, getenv("NOTIFY_SOCKET"));
	if (!p->max || !p->to_len)
		return;
	p->sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (p->sock < 0)
		log_warn("nothing is parked: socket: %s", strerror(errno));
	else
		setsockopt(p->sock, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
}

bool store_lost(const struct park *p)
{
	return p->sock < 0 || (p->keeper && getppid() != p->keeper);
}

/* -- messages ---------------------------------------------------------------------------- */

static int store_send(struct park *p, const char *text, int fd)
{
	struct iovec iov = { .iov_base = (char *)text, .iov_len = strlen(text) };
	union {
		struct cmsghdr	align;
		char		bytes[CMSG_SPACE(sizeof(int))];
	} ctl = { .bytes = { 0 } };
	struct msghdr mh = {
		.msg_name	= &p->to,
		.msg_namelen	= p->to_len,
		.msg_iov	= &iov,
		.msg_iovlen	= 1,
	};

	if (store_lost(p))
		return -ECONNREFUSED;
	if (p->quiet_ns && now_ns() < p->quiet_ns)
		return -EAGAIN;
	p->quiet_ns = 0;
	if (fd >= 0) {
		mh.msg_control = ctl.bytes;
		mh.msg_controllen = sizeof(ctl.bytes);
		*CMSG_FIRSTHDR(&mh) = (struct cmsghdr){
			.cmsg_level	= SOL_SOCKET,
			.cmsg_type	= SCM_RIGHTS,
			.cmsg_len	= CMSG_LEN(sizeof(int)),
		};
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&mh)), &fd, sizeof(fd));
	}
	if (sendmsg(p->sock, &mh, MSG_NOSIGNAL) >= 0)
		return 0;
	if (errno == EAGAIN)
		p->quiet_ns = now_ns() + QUIET_NS;
	return -errno;
}

void store_is(struct park *p, struct parked *e, bool stored)
{
	size_t bytes = strlen(e->name) + 1;

	if (e->stored == stored)
		return;
	e->stored = stored;
	if (stored) {
		p->nr_stored++;
		p->stored_bytes += bytes;
	} else {
		p->nr_stored--;
		p->stored_bytes -= bytes;
	}
}

static int store_add(struct park *p, struct parked *e)
{
	char text[PARK_NAME + 64];
	int err;

	if (p->nr_stored >= p->max ||
	    p->stored_bytes + strlen(e->name) + 1 > PARK_NAME_BYTES)
		return -ENOSPC;
	snprintf(text, sizeof(text), "FDSTORE=1\nFDPOLL=0\nFDNAME=%s", e->name);
	err = store_send(p, text, e->fd);
	if (!err)
		store_is(p, e, true);
	return err;
}

static int store_remove(struct park *p, struct parked *e)
{
	char text[PARK_NAME + 64];
	int err;

	snprintf(text, sizeof(text), "FDSTOREREMOVE=1\nFDNAME=%s", e->name);
	err = store_send(p, text, -1);
	if (!err)
		e->stale = false;
	return err;
}

int store_sync(struct park *p, struct parked *e)
{
	int err = 0;

	/* a socket of the manager's is not in the store */
	if (p->sock < 0 || e->name[0] != PARK_SIGIL) {
		e->stale = false;
		return 0;
	}
	if (e->stale)
		err = store_remove(p, e);
	if (!err && e->fd >= 0 && !e->stored)
		err = store_add(p, e);
	if (err) {
		p->failed++;
		if (err != p->error)
			log_warn("parking %s: %s; tried again later",
				 e->name + 1, strerror(-err));
		p->error = err;
	}
	return err;
}

/* -- what comes back --------------------------------------------------------------------- */

/* One descriptor; it is closed when it is of no use. 0 or -ENOMEM. */
static int inherit(struct park *p, const char *name, int fd, bool stored)
{
	bool ours = name[0] == PARK_SIGIL;
	struct parked *e = park_find(p, name);

	if (e || !*name || strlen(name) > PARK_NAME) {
		log_warn("inherited descriptor \"%.*s\": %s: closed", PARK_NAME,
			 name, e ? "another one has this name" : "not a name");
		close(fd);
		/* the store has two; both go, and the first comes again */
		if (e && ours) {
			e->stale = true;
			store_is(p, e, false);
			p->behind = true;
		}
		return 0;
	}
	e = park_insert(p, name);
	if (!e) {
		close(fd);
		return -ENOMEM;
	}
	e->fd = fd;
	e->found = true;
	if (ours) {
		p->inherited++;
		store_is(p, e, stored);
	} else {
		p->stored_bytes += strlen(name) + 1;
	}
	return 0;
}

static int inherit_listen(struct park *p)
{
	char **name = NULL;
	int i, err = 0, n = sd_listen_fds_with_names(1, &name);

	for (i = 0; i < n; i++) {
		int fd = SD_LISTEN_FDS_START + i;

		if (err)
			close(fd);
		else
			err = inherit(p, name[i], fd, true);
		free(name[i]);
	}
	free(name);
	return err;
}

/* A name that the store was still to forget. */
static int inherit_tombstone(struct park *p, const char *name)
{
	struct parked *e = park_find(p, name);

	if (!e)
		e = park_insert(p, name);
	if (!e)
		return -ENOMEM;
	e->stale = true;
	p->behind = true;
	return 0;
}

static_assert(PARK_NAME == 70, "what sscanf() reads");

/* One line of the table: "NUMBER STORED STALE NAME". */
static int inherit_line(struct park *p, const char *line)
{
	char name[PARK_NAME + 1];
	int fd, stored, stale, err = 0;

	if (sscanf(line, "%d %d %d %70s", &fd, &stored, &stale, name) != 4 ||
	    (fd >= 0 && (fd <= STDERR_FILENO || set_cloexec(fd)))) {
		log_warn("re-exec: \"%.80s\" names no descriptor", line);
		return 0;
	}
	if (fd >= 0)
		err = inherit(p, name, fd, stored != 0);
	if (!err && stale)
		err = inherit_tombstone(p, name);
	return err;
}

/* The table that park_save() left, from a descriptor that only we could make. */
static int inherit_saved(struct park *p, int fd)
{
	char line[PARK_NAME + 64];
	FILE *f;
	int err = 0;

	if (fcntl(fd, F_GET_SEALS) != SEALS)
		return 0;
	f = fdopen(fd, "r");
	if (!f)
		return -errno;
	rewind(f);
	while (!err && fgets(line, sizeof(line), f))
		err = inherit_line(p, line);
	fclose(f);
	return err;
}

int store_inherit(struct park *p)
{
	const char *saved = getenv(PARK_REEXEC_ENV);
	int fd = saved ? (int)strtol(saved, NULL, 10) : -1;

	unsetenv(PARK_REEXEC_ENV);
	if (fd > STDERR_FILENO)
		return inherit_saved(p, fd);
	return inherit_listen(p);
}

/* -- leaving them to ourselves ------------------------------------------------------------- */

/* All that is held; close-on-exec or not. */
static int held_cloexec(struct park *p, bool on)
{
	unsigned int i;

	for (i = 0; i < p->nr; i++) {
		int fd = p->entry[i]->fd;

		if (fd >= 0 && fcntl(fd, F_SETFD, on ? FD_CLOEXEC : 0) < 0)
			return -errno;
	}
	return 0;
}

static int table_write(struct park *p, FILE *f)
{
	unsigned int i;

	for (i = 0; i < p->nr; i++) {
		const struct parked *e = p->entry[i];

		fprintf(f, "%d %d %d %s\n", e->fd, e->stored, e->stale,
			e->name);
	}
	return fflush(f) || ferror(f) ? -EIO : 0;
}

int park_save(struct park *p)
{
	int fd = memfd_create("kvmm-park", MFD_ALLOW_SEALING), copy, err;
	char text[16];
	FILE *f;

	if (fd < 0)
		return -errno;
	copy = dup(fd);
	f = copy < 0 ? NULL : fdopen(copy, "w");
	if (!f) {
		err = -errno;
		close_fd(&copy);
		goto out;
	}
	err = table_write(p, f);
	fclose(f);
	if (!err && fcntl(fd, F_ADD_SEALS, SEALS) < 0)
		err = -errno;
	if (!err)
		err = held_cloexec(p, false);
	if (err)
		goto out;
	snprintf(text, sizeof(text), "%d", fd);
	if (!setenv(PARK_REEXEC_ENV, text, 1))
		return 0;
	err = -ENOMEM;
out:
	held_cloexec(p, true);
	close(fd);
	return err;
}

void park_unsave(struct park *p)
{
	const char *saved = getenv(PARK_REEXEC_ENV);

	held_cloexec(p, true);
	if (saved)
		close((int)strtol(saved, NULL, 10));
	unsetenv(PARK_REEXEC_ENV);
}
