/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store's file: found or made, locked, as long as configured, its space
 * reserved. On a worker, since each step may take long on a slow or sick disk.
 *
 * No error of the system's is taken for a damaged store: the kernel says
 * EUCLEAN of a file system, and here it means that what is in the file is not
 * ours. See nvme_open.c for what becomes of either.
 */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "daemon/node/nvme.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/err.h"
#include "ipc/base/fd.h"

/* ---- transfers --------------------------------------------------------------- */

int nvme_sys_err(void)
{
	return errno == EUCLEAN ? -EIO : -errno;
}

static int file_rw(struct nvme_open *o, bool wr, void *buf, size_t len,
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
				return nvme_sys_err();
			o->direct = false;
		} else if (errno != EINTR) {
			return nvme_sys_err();
		}
	}
	return 0;
}

static void sleep_ms(uint32_t ms)
{
	struct timespec ts = { .tv_sec = ms / 1000,
			       .tv_nsec = ms % 1000 * (long)NSEC_PER_MSEC };

	while (nanosleep(&ts, &ts) < 0 && errno == EINTR)
		;
}

/* As the fault table wants it; see fault.h. */
static int faulty_rw(struct nvme_open *o, bool wr, void *buf, size_t len,
		     uint64_t off, const struct fault *f)
{
	size_t half = round_down(len / 2, (size_t)512);
	int err = 0;

	sleep_ms(f->ms);
	switch (f->how) {
	case FAULT_ERROR:
		return -f->err;
	case FAULT_SHORT:
		err = file_rw(o, wr, buf, half, off);
		return err ? err : -EIO;
	case FAULT_TORN:
		return file_rw(o, wr, buf, half, off);
	case FAULT_DROP:
	case FAULT_STALE:
		return 0;
	default:
		break;
	}
	err = file_rw(o, wr, buf, len, off);
	if (!err && f->how == FAULT_FLIP && !wr)
		((uint8_t *)buf)[len / 2] ^= 1;
	return err;
}

/* What the tap is shown: no more than it looks at. */
static void tap_init(struct node_io *io, const void *buf, size_t len,
		     uint64_t off, bool sync)
{
	*io = (struct node_io){
		.dir		= NODE_WRITE,
		.len		= (uint32_t)len,
		.slot.off	= off,
		.addr		= (void *)buf,
		.priv.internal	= true,
		.priv.sync	= sync,
	};
}

int nvme_open_read(struct nvme *nv, void *buf, size_t len, uint64_t off)
{
	struct fault f = { .how = FAULT_NONE };

	if (fault_ask_at(&nv->node, FAULT_OPEN_READ, false, off, len, &f))
		return faulty_rw(&nv->open, false, buf, len, off, &f);
	return file_rw(&nv->open, false, buf, len, off);
}

int nvme_open_write(struct nvme *nv, const void *buf, size_t len, uint64_t off,
		    bool sync)
{
	struct fault f = { .how = FAULT_NONE };
	struct nvme_open *o = &nv->open;
	void *p = (void *)buf;
	struct node_io io;
	int err;

	tap_init(&io, buf, len, off, sync);
	fault_tap(&nv->node, FAULT_TAP_START, &io);
	if (fault_ask_at(&nv->node, FAULT_OPEN_WRITE, false, off, len, &f))
		err = faulty_rw(o, true, p, len, off, &f);
	else
		err = file_rw(o, true, p, len, off);
	if (!err && sync && fdatasync(o->fd) < 0)
		err = nvme_sys_err();
	io.priv.res = err ? err : (int)len;
	fault_tap(&nv->node, FAULT_TAP_END, &io);
	return err;
}

/* ---- the file ------------------------------------------------------------------ */

static unsigned long long mib(uint64_t bytes)
{
	return bytes >> 20;
}

static int say_errno(struct nvme *nv)
{
	int err = nvme_sys_err();

	return errmsg_set(&nv->open.msg, err, "%s: %s", nv->opts.path,
			  strerror(-err));
}

/*
 * Is it where the devices are? A file that is made there takes the name of one
 * that comes late, and is in memory. /dev/shm is a place for files.
 */
static bool among_devices(const char *path)
{
	char dir[PATH_MAX], real[PATH_MAX];

	if (strlen(path) >= sizeof(dir))
		return false;
	strcpy(dir, path);
	if (!realpath(dirname(dir), real))
		strcpy(real, path);
	return (!strcmp(real, "/dev") || !strncmp(real, "/dev/", 5)) &&
	       strcmp(real, "/dev/shm") && strncmp(real, "/dev/shm/", 9);
}

/* There is none: make it. 0: open it, or try again without O_DIRECT. */
static int file_make(struct nvme *nv, int flags)
{
	struct nvme_open *o = &nv->open;
	const char *path = nv->opts.path;
	int err;

	if (among_devices(path))
		return errmsg_set(&o->msg, -ENOENT, "%s: there is no such device",
				  path);
	o->fd = open(path, flags | O_CREAT | O_EXCL, 0600);
	if (o->fd >= 0)
		o->created = true;
	else if (errno == EINVAL && o->direct)
		o->direct = false;
	else if (errno != EEXIST) {
		err = nvme_sys_err();
		return errmsg_set(&o->msg, err, "cannot make %s: %s", path,
				  strerror(-err));
	}
	return 0;
}

int nvme_file_open(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	const char *path = nv->opts.path;
	struct stat st;
	int err = 0;

	o->direct = !nv->opts.buffered;
	o->created = false;
	while (!err && o->fd < 0) {
		int flags = O_RDWR | O_CLOEXEC | O_NOCTTY |
			    (o->direct ? O_DIRECT : 0);

		/* O_EXCL without O_CREAT: of block devices, if they are free */
		o->fd = open(path, flags | O_EXCL);
		if (o->fd >= 0)
			break;
		if (errno == EINVAL && o->direct)
			o->direct = false;
		else if (errno == EBUSY)
			return errmsg_set(&o->msg, -EWOULDBLOCK,
					  "%s is mounted, or somebody has it for himself",
					  path);
		else if (errno == ENOENT)
			err = file_make(nv, flags);
		else
			err = say_errno(nv);
	}
	if (err)
		return err;
	if (fstat(o->fd, &st) < 0)
		return say_errno(nv);
	o->block = S_ISBLK(st.st_mode);
	if (o->block)
		return 0;
	if (!S_ISREG(st.st_mode))
		return errmsg_set(&o->msg, -EINVAL,
				  "%s is neither a file nor a block device",
				  path);
	if (among_devices(path))
		return errmsg_set(&o->msg, -EINVAL,
				  "%s is a file in a folder for devices: remove it",
				  path);
	return 0;
}

/* Is it still what its name names? Who had it before may have removed it. */
static bool file_named(const struct nvme *nv)
{
	struct stat a, b;

	return !fstat(nv->open.fd, &a) && !stat(nv->opts.path, &b) &&
	       a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

/* Its own open(2), of the very file: see node_store_fd(). */
static int open_twin(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", o->fd);
	if (o->twin < 0)
		o->twin = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
	return o->twin < 0 ? say_errno(nv) : 0;
}

int nvme_file_lock(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;

	if (flock(o->fd, LOCK_EX | LOCK_NB) < 0) {
		/* what is in it now is somebody else's */
		o->created = false;
		if (errno != EWOULDBLOCK && errno != EINTR)
			return say_errno(nv);
		return errmsg_set(&o->msg, -EWOULDBLOCK,
				  "%s: another process has it locked",
				  nv->opts.path);
	}
	if (file_named(nv))
		return open_twin(nv);
	o->created = false;
	close_fd(&o->fd);
	return errmsg_set(&o->msg, -EWOULDBLOCK, "%s was replaced meanwhile",
			  nv->opts.path);
}

void nvme_file_drop(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;

	if (o->fd >= 0 && o->created && file_named(nv))
		unlink(nv->opts.path);
	close_fd(&o->twin);
	close_fd(&o->fd);
}

/* ---- its space ----------------------------------------------------------------- */

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
void nvme_file_kind(struct nvme *nv)
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
	int err = nvme_sys_err();

	return errmsg_set(&nv->open.msg, err,
			  "%s: cannot preallocate %llu MiB: %s",
			  nv->opts.path, mib(bytes), strerror(-err));
}

/* Bytes that nothing is reserved for; a hole in a file is as good as none. */
static uint64_t open_unreserved(const struct nvme *nv)
{
	const struct nvme_open *o = &nv->open;
	struct stat st;

	if (!nvme_open_grows(nv) || fstat(o->fd, &st) < 0)
		return 0;
	return (uint64_t)st.st_size -
	       (o->overcommit ? 0 : min((uint64_t)st.st_blocks * 512,
					(uint64_t)st.st_size));
}

void nvme_file_look(struct nvme *nv)
{
	uint64_t avail = 0, total = 0;

	nv->open.room = nvme_open_grows(nv) ? open_room(nv, &avail, &total) :
					      UINT64_MAX;
	nv->open.unreserved = open_unreserved(nv);
}

/* Reserve the space of the file's first @bytes, @missing of which it lacks. */
static int file_reserve(struct nvme *nv, uint64_t bytes, uint64_t missing)
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
static int file_allocate(struct nvme *nv, uint64_t bytes)
{
	struct nvme_open *o = &nv->open;
	int err = file_reserve(nv, bytes, bytes);

	if (!err && o->sparse && ftruncate(o->fd, (off_t)bytes) < 0)
		err = open_no_space(nv, bytes);
	if (err)
		(void)!ftruncate(o->fd, 0);
	return err;
}

/* How long the store is; *@fresh: the file was empty. */
int nvme_file_size(struct nvme *nv, uint64_t *bytes, bool *fresh)
{
	struct nvme_open *o = &nv->open;
	struct stat st;

	*fresh = false;
	*bytes = nv->opts.bytes;
	if (o->block) {
		uint64_t dev;

		if (ioctl(o->fd, BLKGETSIZE64, &dev) < 0)
			return say_errno(nv);
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
		return say_errno(nv);
	if (!st.st_size) {
		*fresh = true;
		return file_allocate(nv, *bytes);
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
int nvme_file_written(struct nvme *nv)
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

int nvme_file_fill(struct nvme *nv, uint64_t bytes, bool ours)
{
	struct nvme_open *o = &nv->open;
	struct stat st;
	uint64_t has;
	int err;

	if (o->block)
		return 0;
	if (fstat(o->fd, &st) < 0)
		return say_errno(nv);
	has = (uint64_t)st.st_blocks * 512;
	if (has >= bytes)
		return 0;
	err = file_reserve(nv, bytes, bytes - has);
	if (!ours || (err != -ENOSPC && err != -EDQUOT && err != -EFBIG))
		return err;
	errmsg_clear(&o->msg);
	o->sparse = true;
	return 0;
}
