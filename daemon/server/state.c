/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state folder: a lock, so that two daemons never serve from one folder,
 * and the epoch, which no two daemons in a row may share.
 *
 * The epoch's low 16 bits go into every generation; they count up from one
 * daemon to the next. The rest is random, so that a folder that was lost or
 * copied does not repeat one.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define LOCK_WAIT_NS	(2 * NSEC_PER_SEC) /* a killed daemon's last moments */

static int lock_file(int fd, struct errmsg *e, const char *dir)
{
	uint64_t deadline = deadline_in(LOCK_WAIT_NS);
	struct timespec ts = ns_to_timespec(10 * NSEC_PER_MSEC);

	while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
		if (errno != EWOULDBLOCK && errno != EINTR)
			return errmsg_set(e, -errno, "state_dir %.120s: lock: %s",
					  dir, strerror(errno));
		if (deadline_past(deadline))
			return errmsg_set(e, -EBUSY, "state_dir %.160s: another "
					  "kvmmd serves from it", dir);
		nanosleep(&ts, NULL);
	}
	return 0;
}

static uint64_t epoch_read(int dirfd)
{
	uint64_t epoch = 0;
	char buf[32] = "";
	int fd = openat(dirfd, "epoch", O_RDONLY | O_CLOEXEC | O_NOFOLLOW);

	if (fd < 0)
		return 0;
	if (read(fd, buf, sizeof(buf) - 1) > 0)
		epoch = strtoull(buf, NULL, 16);
	close(fd);
	return epoch;
}

/*
 * By rename: a crash leaves the old one or the new one. Not flushed: after a power
 * cut nobody lives who knew one, and clients wait for this start.
 */
static int epoch_write(int dirfd, uint64_t epoch)
{
	char buf[32];
	int n = snprintf(buf, sizeof(buf), "%016" PRIx64 "\n", epoch);
	int fd = openat(dirfd, "epoch.new",
			O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW,
			0600);
	int err = 0;

	if (fd < 0)
		return -errno;
	if (write(fd, buf, (size_t)n) != n)
		err = errno ? -errno : -EIO;
	close(fd);
	if (!err && renameat(dirfd, "epoch.new", dirfd, "epoch") < 0)
		err = -errno;
	return err;
}

static uint64_t epoch_next(uint64_t last)
{
	uint64_t count = ((last & 0xffff) + 1) & 0xffff, random = 0;

	if (getrandom(&random, sizeof(random), 0) != sizeof(random))
		random = now_ns() << 16;
	return (random & ~UINT64_C(0xffff)) | (count ? count : 1);
}

int state_open(const char *dir, struct state *st, struct errmsg *e)
{
	int err;

	*st = (struct state)STATE_INIT;
	if (mkdir(dir, 0700) < 0 && errno != EEXIST)
		return errmsg_set(e, -errno, "state_dir %.160s: %s", dir,
				  strerror(errno));
	st->dirfd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (st->dirfd < 0)
		return errmsg_set(e, -errno, "state_dir %.160s: %s", dir,
				  strerror(errno));
	st->lock_fd = openat(st->dirfd, "lock",
			     O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (st->lock_fd < 0) {
		err = errmsg_set(e, -errno, "state_dir %.160s: lock: %s", dir,
				 strerror(errno));
		goto out;
	}
	err = lock_file(st->lock_fd, e, dir);
	if (err)
		goto out;
	st->epoch = epoch_next(epoch_read(st->dirfd));
	err = epoch_write(st->dirfd, st->epoch);
	if (err) {
		errmsg_set(e, err, "state_dir %.160s: epoch: %s", dir,
			   strerror(-err));
		goto out;
	}
	return 0;

out:
	state_close(st);
	return err;
}

void state_close(struct state *st)
{
	close_fd(&st->lock_fd);
	close_fd(&st->dirfd);
}
