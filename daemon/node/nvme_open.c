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
 * What is not ours is not overwritten, unless the operator said so: a file must
 * have exactly the configured size and either a superblock or nothing but zeroes
 * in its first megabyte; a block device is opened O_EXCL too, which refuses one
 * that is mounted. What the store remembers is read here as well: nvme_scan.c.
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
#include <sys/stat.h>
#include <sys/statfs.h>
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

int nvme_open_rw(struct nvme_open *o, bool wr, void *buf, size_t len,
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

/* File systems on which space that was reserved is not what is written to. */
static const struct {
	unsigned int	magic;
	const char	*name;
} overcommitters[] = {
	{ 0x9123683e, "btrfs" },
	{ 0x2fc12fc1, "zfs" },
	{ 0xca451a4e, "bcachefs" },
	{ 0x3434, "nilfs" },
	{ 0x794c7630, "overlayfs" },
	{ 0x6969, "nfs" },
	{ 0xff534d42, "cifs" },
	{ 0xfe534d42, "smb2" },
	{ 0x65735546, "fuse" },
};

/* Does it write in place? If not, what is reserved still may not be there. */
static void open_kind(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	struct statfs fs;

	o->overcommit = NULL;
	if (o->block || fstatfs(o->fd, &fs) < 0)
		return;
	for (size_t i = 0; i < ARRAY_SIZE(overcommitters); i++)
		if ((unsigned int)fs.f_type == overcommitters[i].magic)
			o->overcommit = overcommitters[i].name;
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

	nv->open.room = nvme_open_grows(nv) ? open_room(nv, &avail, &total) :
					      UINT64_MAX;
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
		return errmsg_set(&o->msg, -EUCLEAN,
				  "%s has %llu bytes, but %llu are configured",
				  nv->opts.path,
				  (unsigned long long)st.st_size,
				  (unsigned long long)*bytes);
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
	uint64_t from = o->super.data_off;
	uint64_t end = from + (uint64_t)o->nr_segs * seg_bytes;
	uint64_t off = from;

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
		for (uint64_t i = ((uint64_t)hole - from) / seg_bytes;
		     i * seg_bytes + from < (uint64_t)data; i++)
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

/* Size, superblock and what is remembered; -EUCLEAN: it is not ours, or no more. */
static int open_store(struct nvme *nv, void *buf)
{
	struct nvme_open *o = &nv->open;
	uint64_t bytes;
	bool fresh;
	int err = open_size(nv, &bytes, &fresh);

	if (!err && !fresh && !o->block)
		err = open_fill_holes(nv, bytes);
	if (!err)
		err = nvme_super_open(nv, buf, bytes, fresh);
	if (!err && nv->node.owner)
		err = nvme_scan(nv, &o->found);
	return err;
}

/* What is there cannot be used. Begin anew, or say how the operator can. */
static int open_rebuild(struct nvme *nv, void *buf)
{
	struct nvme_open *o = &nv->open;
	struct errmsg why = o->msg;
	struct stat st;
	int err;

	if (!nv->opts.rebuild)
		return errmsg_set(&o->msg, -EUCLEAN,
				  "%s: remove it, wipe its first MiB, or let it be rebuilt",
				  why.text);
	if (fstat(o->fd, &st) < 0)
		return -errno;
	if (!o->block && (uint64_t)st.st_size != nv->opts.bytes &&
	    ftruncate(o->fd, 0) < 0)
		return -errno;
	o->rebuilt = true;
	err = open_store(nv, buf);
	if (!err)
		o->msg = why;
	return err;
}

static int open_all(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	void *buf = NULL;
	int err = 0;

	if (o->fd < 0)
		err = open_file(nv);
	if (err)
		return err;
	if (flock(o->fd, LOCK_EX | LOCK_NB) < 0)
		return errno == EINTR ? -EWOULDBLOCK : -errno;
	open_kind(nv);
	if (posix_memalign(&buf, NODE_ALIGN, NVME_HEAD_BYTES))
		return errmsg_set(&o->msg, -ENOMEM, "no memory");
	memset(buf, 0, NVME_HEAD_BYTES);
	err = open_store(nv, buf);
	if (err == -EUCLEAN)
		err = open_rebuild(nv, buf);
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

static void open_failed(struct nvme *nv, int err, const char *why)
{
	const struct node_owner *o = nv->node.owner;

	node_set_state(&nv->node, NODE_FAILED, "%s", why);
	nv->open.next_ns = DEADLINE_NONE;
	if (o && o->recovered)
		o->recovered(&nv->node, err, o->arg);
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
	errmsg_set(&nv->open.msg, -EWOULDBLOCK,
		   "%s: another process has had it locked for %llu s",
		   nv->opts.path, (unsigned long long)
		   (nv->opts.lock_wait_ns / NSEC_PER_SEC));
	open_failed(nv, -EWOULDBLOCK, nv->open.msg.text);
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
		open_failed(nv, o->err, o->msg.text);
		return;
	}
	nv->fd = o->fd;
	nv->uuid_crc = kvmm_crc32c(0, sb->uuid, sizeof(sb->uuid));
	err = nv->eng->set_file(nv);
	if (!err)
		err = slots_init(&nv->slots, sb->data_off, sb->seg_bytes,
				 o->nr_segs, o->written,
				 max(sb->opens << NVME_SEQ_SHIFT,
				     o->found ? o->found->next_seq : 0));
	if (err) {
		open_failed(nv, err, strerror(-err));
		return;
	}
	nv->node.capacity = (uint64_t)o->nr_segs * sb->seg_bytes;
	nv->node.max_len = sb->seg_bytes;
	nv->room = o->room;
	o->next_ns = now + nv->opts.check_ns;
	nv->first_seq = nv->slots.next_seq;
	nv->found = o->found;
	o->found = NULL;
	if (nv->found)
		nvme_recover_start(nv);
	else
		node_set_state(&nv->node, NODE_ONLINE,
			       "empty: nobody asked to find anything again");
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
	/* not begun before the first poll: until then there may be an owner */
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
	nvme_found_free(nv->open.found);
	nv->open.found = NULL;
	nvme_found_free(nv->found);
	nv->found = NULL;
}
