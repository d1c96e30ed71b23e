/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening a store.
 *
 * All of it happens on a worker of the node, since each step may take long on
 * a slow or sick disk, and the daemon serves meanwhile: open, lock, look at
 * what is there, preallocate, write the superblock. Only waiting for the lock
 * is cut into tries, between which the worker is free.
 *
 * The lock is flock(2) on the very file description that I/O goes through.
 * A process that was killed holds it until the kernel has ended its last I/O
 * on it, so whoever has the lock knows that nobody writes any more.
 *
 * What is not ours is not overwritten: a file must have exactly the configured
 * size and either a superblock or nothing but zeroes in its first megabyte; a
 * block device is opened O_EXCL too, which refuses one that is mounted.
 *
 * Later, every check_ns, the worker looks whether the file still has a name.
 * I/O goes on without one; only the space is lost when the daemon ends. It also
 * looks how much more of the file system a file that could not be preallocated
 * may take; see nvme_health.c.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "daemon/node/nvme.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/err.h"
#include "ipc/base/fd.h"
#include "kernels/kernels.h"

#define LOCK_STEP_NS	(50 * NSEC_PER_MSEC)

static unsigned long long mib(uint64_t bytes)
{
	return bytes >> 20;
}

/* ---- on the worker --------------------------------------------------------- */

/* One transfer, all of it or an error; gives O_DIRECT up where it is refused. */
static int open_rw(struct nvme_open *o, bool wr, void *buf, size_t len,
		   uint64_t off)
{
	size_t done = 0;

	while (done < len) {
		char *p = (char *)buf + done;
		off_t at = (off_t)(off + done);
		ssize_t n = wr ? pwrite(o->fd, p, len - done, at) :
				 pread(o->fd, p, len - done, at);

		if (n > 0) {
			done += (size_t)n;
		} else if (n == 0) {
			return -EIO;
		} else if (errno == EINVAL && o->direct) {
			int fl = fcntl(o->fd, F_GETFL);

			if (fl < 0 || fcntl(o->fd, F_SETFL, fl & ~O_DIRECT) < 0)
				return -errno;
			o->direct = false;
		} else if (errno != EINTR) {
			return -errno;
		}
	}
	return 0;
}

static int open_file(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	const char *path = nv->opts.path;
	int flags = O_RDWR | O_CLOEXEC | O_NOCTTY;
	struct stat st;

	o->direct = !nv->opts.buffered;
	while (o->fd < 0) {
		int extra = o->direct ? O_DIRECT : 0;

		/* O_EXCL without O_CREAT: of block devices, if they are free */
		o->fd = open(path, flags | O_EXCL | extra);
		if (o->fd >= 0)
			break;
		if (errno == EINVAL && o->direct) {
			o->direct = false;
			continue;
		}
		if (errno == EBUSY)
			return -EWOULDBLOCK;
		if (errno != ENOENT)
			return errmsg_set(&o->msg, -errno, "%s: %s", path,
					  strerror(errno));
		o->fd = open(path, flags | O_CREAT | O_EXCL | extra, 0600);
		if (o->fd >= 0)
			o->created = true;
		else if (errno == EINVAL && o->direct)
			o->direct = false;
		else if (errno != EEXIST)
			return errmsg_set(&o->msg, -errno, "cannot make %s: %s",
					  path, strerror(errno));
	}
	if (fstat(o->fd, &st) < 0)
		return errmsg_set(&o->msg, -errno, "%s: %s", path,
				  strerror(errno));
	o->block = S_ISBLK(st.st_mode);
	if (!o->block && !S_ISREG(st.st_mode))
		return errmsg_set(&o->msg, -EINVAL,
				  "%s is neither a file nor a block device",
				  path);
	return 0;
}

/* What may be taken of the file system before its free floor is reached. */
static uint64_t open_room(const struct nvme *nv, uint64_t *avail,
			  uint64_t *total)
{
	struct statvfs vfs;
	uint64_t floor;

	/* memory file systems may have no size */
	if (!nv->opts.free_floor_pct || fstatvfs(nv->open.fd, &vfs) < 0 ||
	    !vfs.f_blocks)
		return UINT64_MAX;
	*total = (uint64_t)vfs.f_blocks * vfs.f_frsize;
	*avail = (uint64_t)vfs.f_bavail * vfs.f_frsize;
	floor = *total / 100 * nv->opts.free_floor_pct;
	return *avail > floor ? *avail - floor : 0;
}

static int open_no_space(struct nvme *nv, uint64_t bytes)
{
	int err = -errno;

	return errmsg_set(&nv->open.msg, err,
			  "%s: cannot preallocate %llu MiB: %s",
			  nv->opts.path, mib(bytes), strerror(-err));
}

static void open_look(struct nvme *nv)
{
	uint64_t avail = 0, total = 0;

	nv->open.room = nv->open.sparse ? open_room(nv, &avail, &total)
					: UINT64_MAX;
}

/* Reserve the space of the file's first @bytes, @missing of which it lacks. */
static int open_reserve(struct nvme *nv, uint64_t bytes, uint64_t missing)
{
	struct nvme_open *o = &nv->open;
	uint64_t avail = 0, total = 0;

	if (open_room(nv, &avail, &total) < missing)
		return errmsg_set(&o->msg, -ENOSPC,
				  "%s: %llu MiB of %llu MiB free space are too much: %u %% of %llu MiB have to stay free",
				  nv->opts.path, mib(missing), mib(avail),
				  nv->opts.free_floor_pct, mib(total));
	if (!nv->opts.sparse && !fallocate(o->fd, 0, 0, (off_t)bytes))
		return 0;
	if (!nv->opts.sparse && errno != EOPNOTSUPP)
		return open_no_space(nv, bytes);
	o->sparse = true;
	return 0;
}

/* Make an empty file as long as configured, its space reserved. */
static int open_allocate(struct nvme *nv, uint64_t bytes)
{
	struct nvme_open *o = &nv->open;
	int err = open_reserve(nv, bytes, bytes);

	if (!err && o->sparse && ftruncate(o->fd, (off_t)bytes) < 0)
		err = open_no_space(nv, bytes);
	if (err)
		(void)!ftruncate(o->fd, 0);
	return err;
}

/* How long the store is; *@fresh: the file was empty. */
static int open_size(struct nvme *nv, uint64_t *bytes, bool *fresh)
{
	struct nvme_open *o = &nv->open;
	struct stat st;

	*fresh = false;
	*bytes = nv->opts.bytes;
	if (o->block) {
		uint64_t dev;

		if (ioctl(o->fd, BLKGETSIZE64, &dev) < 0)
			return errmsg_set(&o->msg, -errno, "%s: %s",
					  nv->opts.path, strerror(errno));
		if (!*bytes)
			*bytes = dev;
		if (*bytes > dev)
			return errmsg_set(&o->msg, -EINVAL,
					  "%s has %llu MiB, but %llu MiB are configured",
					  nv->opts.path, mib(dev), mib(*bytes));
		*bytes = round_down(*bytes, NODE_ALIGN);
		return 0;
	}
	if (fstat(o->fd, &st) < 0)
		return errmsg_set(&o->msg, -errno, "%s: %s", nv->opts.path,
				  strerror(errno));
	if (!st.st_size) {
		*fresh = true;
		return open_allocate(nv, *bytes);
	}
	if ((uint64_t)st.st_size != *bytes)
		return errmsg_set(&o->msg, -EINVAL,
				  "%s has %llu bytes, but %llu are configured: remove it or configure its size",
				  nv->opts.path,
				  (unsigned long long)st.st_size,
				  (unsigned long long)*bytes);
	return 0;
}

static uint32_t super_crc(const struct nvme_super *sb)
{
	return kvmm_crc32c(0, sb, offsetof(struct nvme_super, crc));
}

/* Is what begins with @sb ours? *@ours is false for all zeroes. */
static int super_check(struct nvme *nv, const struct nvme_super *sb,
		       uint64_t bytes, bool *ours)
{
	struct nvme_open *o = &nv->open;
	const char *p = (const char *)sb;

	*ours = false;
	if (memcmp(sb->magic, NVME_MAGIC, sizeof(sb->magic))) {
		if (!p[0] && !memcmp(p, p + 1, NVME_DATA_OFF - 1))
			return 0;
		return errmsg_set(&o->msg, -EINVAL,
				  "%s holds something that is not a kvmm store: remove it, or wipe its first MiB",
				  nv->opts.path);
	}
	if (sb->version != NVME_VERSION)
		return errmsg_set(&o->msg, -EINVAL,
				  "%s is a store of version %u, this is version %u: remove it, or wipe its first MiB",
				  nv->opts.path, sb->version, NVME_VERSION);
	if (sb->crc != super_crc(sb))
		return errmsg_set(&o->msg, -EINVAL,
				  "%s: the superblock is damaged: remove it, or wipe its first MiB",
				  nv->opts.path);
	if (sb->bytes != bytes)
		return errmsg_set(&o->msg, -EINVAL,
				  "%s is a store of %llu bytes, but %llu are configured: remove it, or wipe its first MiB",
				  nv->opts.path, (unsigned long long)sb->bytes,
				  (unsigned long long)bytes);
	*ours = true;
	return 0;
}

static uint32_t seg_bytes_for(const struct nvme *nv, uint64_t bytes)
{
	uint64_t seg = nv->opts.seg_bytes;

	if (!seg) {
		seg = (bytes - NVME_DATA_OFF) / 64;
		seg = seg ? UINT64_C(1) << ilog2(seg) : NVME_SEG_MIN;
		seg = clamp(seg, (uint64_t)NVME_SEG_MIN, (uint64_t)NVME_SEG_MAX);
	}
	return (uint32_t)seg;
}

/* Read, check and renew the superblock; @buf has NVME_DATA_OFF bytes. */
static int open_super(struct nvme *nv, void *buf, uint64_t bytes, bool fresh)
{
	struct nvme_open *o = &nv->open;
	struct nvme_super *sb = buf;
	bool ours = false;
	int err;

	if (bytes < NVME_DATA_OFF + (uint64_t)NVME_SEG_MIN ||
	    bytes < NVME_DATA_OFF + (uint64_t)nv->opts.seg_bytes)
		return errmsg_set(&o->msg, -EINVAL,
				  "%s: %llu bytes are too few for a store",
				  nv->opts.path, (unsigned long long)bytes);
	if (!fresh) {
		err = open_rw(o, false, buf, NVME_DATA_OFF, 0);
		if (err)
			return errmsg_set(&o->msg, err, "reading %s: %s",
					  nv->opts.path, strerror(-err));
		err = super_check(nv, sb, bytes, &ours);
		if (err)
			return err;
	}
	if (!ours) {
		memset(buf, 0, NVME_SUPER_BYTES);
		memcpy(sb->magic, NVME_MAGIC, sizeof(sb->magic));
		if (getrandom(sb->uuid, sizeof(sb->uuid), 0) !=
		    sizeof(sb->uuid))
			return errmsg_set(&o->msg, -EIO, "no random numbers");
	}
	sb->version = NVME_VERSION;
	sb->seg_bytes = seg_bytes_for(nv, bytes);
	sb->bytes = bytes;
	sb->data_off = NVME_DATA_OFF;
	sb->opens++;
	sb->crc = super_crc(sb);
	err = open_rw(o, true, buf, NVME_SUPER_BYTES, 0);
	if (!err && fdatasync(o->fd) < 0)
		err = -errno;
	if (err)
		return errmsg_set(&o->msg, err, "writing %s: %s",
				  nv->opts.path, strerror(-err));
	o->super = *sb;
	o->nr_segs = (uint32_t)((bytes - NVME_DATA_OFF) / sb->seg_bytes);
	return 0;
}

/*
 * Which segments have been written as a whole? What was only preallocated
 * reads as a hole. A file system that cannot tell says that all is data: then
 * nothing is zero-written, and first writes cost what they cost.
 */
static int open_written(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	uint32_t seg_bytes = o->super.seg_bytes;
	uint64_t end = NVME_DATA_OFF + (uint64_t)o->nr_segs * seg_bytes;
	uint64_t off = NVME_DATA_OFF;

	free(o->written);
	o->written = calloc(BITMAP_WORDS(o->nr_segs), sizeof(*o->written));
	if (!o->written)
		return errmsg_set(&o->msg, -ENOMEM, "no memory");
	for (uint32_t i = 0; i < o->nr_segs; i++)
		bitmap_set(o->written, i);
	while (!o->block && off < end) {
		off_t hole = lseek(o->fd, (off_t)off, SEEK_HOLE);
		off_t data;

		if (hole < 0 || (uint64_t)hole >= end)
			break;
		data = lseek(o->fd, hole, SEEK_DATA);
		if (data < 0 || (uint64_t)data > end)
			data = (off_t)end;
		for (uint64_t i = ((uint64_t)hole - NVME_DATA_OFF) / seg_bytes;
		     i * seg_bytes + NVME_DATA_OFF < (uint64_t)data; i++)
			bitmap_clear(o->written, i);
		off = (uint64_t)data;
	}
	return 0;
}

/* A file of ours may have holes: made by a copy, or sparse from the start. */
static int open_fill_holes(struct nvme *nv, uint64_t bytes)
{
	uint64_t has;
	struct stat st;

	if (fstat(nv->open.fd, &st) < 0)
		return -errno;
	has = (uint64_t)st.st_blocks * 512;
	return has < bytes ? open_reserve(nv, bytes, bytes - has) : 0;
}

static int open_all(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	void *buf = NULL;
	uint64_t bytes;
	bool fresh;
	int err = 0;

	if (o->fd < 0)
		err = open_file(nv);
	if (err)
		return err;
	if (flock(o->fd, LOCK_EX | LOCK_NB) < 0)
		return errno == EINTR ? -EWOULDBLOCK : -errno;
	if (posix_memalign(&buf, NODE_ALIGN, NVME_DATA_OFF))
		return errmsg_set(&o->msg, -ENOMEM, "no memory");
	memset(buf, 0, NVME_DATA_OFF);
	err = open_size(nv, &bytes, &fresh);
	if (!err)
		err = open_super(nv, buf, bytes, fresh);
	if (!err && !fresh && !nv->open.block)
		err = open_fill_holes(nv, bytes);
	if (!err)
		err = open_written(nv);
	if (!err)
		open_look(nv);
	free(buf);
	return err;
}

static void open_work(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, open.work);
	struct nvme_open *o = &nv->open;

	errmsg_clear(&o->msg);
	o->err = open_all(nv);
	if (o->err && o->err != -EWOULDBLOCK) {
		if (!o->msg.text[0])
			errmsg_set(&o->msg, o->err, "%s: %s", nv->opts.path,
				   strerror(-o->err));
		if (o->created)
			unlink(nv->opts.path);
		close_fd(&o->fd);
	}
}

static void watch_work(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, open.work);
	struct nvme_open *o = &nv->open;
	struct stat st;

	o->err = fstat(o->fd, &st) < 0 ? -errno : 0;
	o->nlink = o->err ? 0 : (uint64_t)st.st_nlink;
	open_look(nv);
}

/* ---- on the loop ----------------------------------------------------------- */

static void open_failed(struct nvme *nv, const char *why)
{
	node_set_state(&nv->node, NODE_FAILED, "%s", why);
	nv->open.next_ns = DEADLINE_NONE;
}

static void open_waits(struct nvme *nv, uint64_t now)
{
	if (now < nv->open.lock_until) {
		node_set_state(&nv->node, NODE_STARTING,
			       "waiting for %s: another process has it locked",
			       nv->opts.path);
		nv->open.next_ns = now + LOCK_STEP_NS;
		return;
	}
	close_fd(&nv->open.fd);
	node_set_state(&nv->node, NODE_FAILED,
		       "%s: another process has had it locked for %llu s",
		       nv->opts.path, (unsigned long long)
		       (nv->opts.lock_wait_ns / NSEC_PER_SEC));
	nv->open.next_ns = DEADLINE_NONE;
}

static void open_work_done(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, open.work);
	struct nvme_open *o = &nv->open;
	const struct nvme_super *sb = &o->super;
	uint64_t now = now_ns();
	int err;

	o->running = false;
	if (nv->node.state == NODE_OFFLINE)
		return;
	if (o->err == -EWOULDBLOCK) {
		open_waits(nv, now);
		return;
	}
	if (o->err) {
		open_failed(nv, o->msg.text);
		return;
	}
	nv->fd = o->fd;
	err = nv->eng->set_file(nv);
	if (!err)
		err = slots_init(&nv->slots, sb->data_off, sb->seg_bytes,
				 o->nr_segs, o->written,
				 sb->opens << NVME_SEQ_SHIFT);
	if (err) {
		open_failed(nv, strerror(-err));
		return;
	}
	nv->node.capacity = (uint64_t)o->nr_segs * sb->seg_bytes;
	nv->node.max_len = sb->seg_bytes;
	nv->room = o->room;
	o->next_ns = now + nv->opts.check_ns;
	node_set_state(&nv->node, NODE_ONLINE,
		       "started empty: there is no journal yet");
}

static void watch_work_done(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, open.work);
	struct nvme_open *o = &nv->open;

	o->running = false;
	nv->room = o->room == UINT64_MAX ? o->room :
					   o->room - min(o->room, o->taken);
	o->next_ns = now_ns() + (nv->room ? nv->opts.check_ns :
					    nv->opts.probe_ns);
	if (!o->room != nv->floored && nv->node.state != NODE_OFFLINE) {
		nv->floored = !o->room;
		node_set_state(&nv->node, nv->node.state, nv->floored ?
			       "%s: the file system's free floor of %u %% is reached: no writes" :
			       "%s: more than %u %% of the file system are free again",
			       nv->opts.path, nv->opts.free_floor_pct);
	}
	if (o->err || o->nlink || o->block || nv->unlinked)
		return;
	nv->unlinked = true;
	if (nv->node.state != NODE_OFFLINE)
		node_set_state(&nv->node, nv->node.state,
			       "%s was unlinked: its space is free again when the daemon ends",
			       nv->opts.path);
}

void nvme_open_start(struct nvme *nv)
{
	nv->open.fd = -1;
	nv->open.next_ns = 0;
	nv->open.lock_until = deadline_in(nv->opts.lock_wait_ns);
	node_set_state(&nv->node, NODE_STARTING, "opening %s", nv->opts.path);
	nvme_open_poll(nv, now_ns());
}

void nvme_open_poll(struct nvme *nv, uint64_t now)
{
	struct nvme_open *o = &nv->open;
	bool watch = nvme_open_done(nv);

	if (o->running || now < o->next_ns || nv->node.state == NODE_OFFLINE)
		return;
	o->running = true;
	o->taken = nv->inflight_bytes[NODE_WRITE];
	o->work.fn = watch ? watch_work : open_work;
	o->work.done = watch ? watch_work_done : open_work_done;
	work_submit(nv->aux, &o->work);
}

uint64_t nvme_open_next(const struct nvme *nv)
{
	if (nv->open.running || nv->node.state == NODE_OFFLINE)
		return DEADLINE_NONE;
	return nv->open.next_ns;
}

/* No job is running and no I/O in flight. */
void nvme_open_fini(struct nvme *nv)
{
	/* The engine may keep the file a moment longer than this. */
	if (nv->open.fd >= 0)
		flock(nv->open.fd, LOCK_UN);
	close_fd(&nv->open.fd);
	nv->fd = -1;
	free(nv->open.written);
	nv->open.written = NULL;
}
