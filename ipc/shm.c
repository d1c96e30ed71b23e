/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/shm.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL	0x0008U
#endif

/*
 * Linux 6.3 wants to be told that nobody will execute the memory, and with
 * vm.memfd_noexec=2 insists; before that the flag is unknown.
 */
static int memfd_new(const char *name)
{
	unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	int fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, flags);
	return fd < 0 ? -errno : fd;
}

/*
 * The mode binds whoever gets a read-only description: reopening it through
 * /proc for writing is refused to another user. Sealing comes after sizing.
 */
static int memfd_settle(int fd, size_t bytes)
{
	if (ftruncate(fd, bytes) < 0 || fchmod(fd, 0400) < 0 ||
	    fcntl(fd, F_ADD_SEALS,
		  F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		return -errno;
	return 0;
}

static int reopen_ro(int fd)
{
	char path[32];
	int ro;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	ro = open(path, O_RDONLY | O_CLOEXEC);
	return ro < 0 ? -errno : ro;
}

static uintptr_t page_up(uintptr_t v)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

	return (v + page - 1) & ~(page - 1);
}

/*
 * Map a file so that huge pages of it can be: 2 MiB of the file that begin at a
 * multiple of that do so in memory. Small ones lie where there is room.
 */
static void *map_aligned(size_t bytes, int prot, int fd, off_t off)
{
	uintptr_t from, at, end;
	void *p;

	if (bytes < SHM_HUGE_BYTES)
		return mmap(NULL, bytes, prot, MAP_SHARED, fd, off);
	p = mmap(NULL, bytes + SHM_HUGE_BYTES, PROT_NONE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return p;
	from = (uintptr_t)p;
	end = page_up(from + bytes + SHM_HUGE_BYTES);
	at = (from + SHM_HUGE_BYTES - 1) & ~(uintptr_t)(SHM_HUGE_BYTES - 1);
	p = mmap((void *)at, bytes, prot, MAP_SHARED | MAP_FIXED, fd, off);
	if (p == MAP_FAILED) {
		int err = errno;

		munmap((void *)from, end - from);
		errno = err;
		return p;
	}
	if (at > from)
		munmap((void *)from, at - from);
	if (end > page_up(at + bytes))
		munmap((void *)page_up(at + bytes), end - page_up(at + bytes));
	return p;
}

int shm_create(struct shm *s, const char *name, size_t bytes, int want_ro)
{
	void *addr;
	int fd, ro = -1, err;

	if (!bytes)
		return -EINVAL;
	fd = memfd_new(name);
	if (fd < 0)
		return fd;
	err = memfd_settle(fd, bytes);
	if (err)
		goto out_close;
	if (want_ro) {
		ro = reopen_ro(fd);
		if (ro < 0) {
			err = ro;
			goto out_close;
		}
	}
	addr = map_aligned(bytes, PROT_READ | PROT_WRITE, fd, 0);
	if (addr == MAP_FAILED) {
		err = -errno;
		goto out_close_ro;
	}
	madvise(addr, bytes, MADV_DONTDUMP);
	*s = (struct shm){
		.fd = fd, .ro_fd = ro, .bytes = bytes, .addr = addr,
	};
	return 0;

out_close_ro:
	if (ro >= 0)
		close(ro);
out_close:
	close(fd);
	return err;
}

static int adopt_check(int fd, size_t bytes)
{
	const int want = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	const int bars = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;
	int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;

	if (seals < 0 || (seals & (want | bars)) != want || !bytes ||
	    fstat(fd, &st) < 0 || (uint64_t)st.st_size != bytes)
		return -EPROTO;
	return 0;
}

int shm_adopt(struct shm *s, int fd, size_t bytes, int want_ro)
{
	int ro = -1, err = adopt_check(fd, bytes);
	void *addr;

	if (err)
		goto out_close;
	if (want_ro) {
		ro = reopen_ro(fd);
		if (ro < 0) {
			err = ro;
			goto out_close;
		}
	}
	addr = map_aligned(bytes, PROT_READ | PROT_WRITE, fd, 0);
	if (addr == MAP_FAILED) {
		err = errno == EACCES ? -EPROTO : -errno;
		goto out_close_ro;
	}
	madvise(addr, bytes, MADV_DONTDUMP);
	*s = (struct shm){
		.fd = fd, .ro_fd = ro, .bytes = bytes, .addr = addr,
	};
	return 0;

out_close_ro:
	if (ro >= 0)
		close(ro);
out_close:
	if (fd >= 0)
		close(fd);
	return err;
}

int shm_map_fd(struct shm *s, int fd, size_t bytes, int writable)
{
	struct stat st;
	void *addr;
	int seals, err;

	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0) {
		/* EINVAL: some other kind of file */
		err = errno == EBADF ? -EBADF : -EPROTO;
		goto out_close;
	}
	err = -EPROTO;
	if (!(seals & F_SEAL_SHRINK) || fstat(fd, &st) < 0 || !bytes ||
	    (uint64_t)st.st_size < bytes)
		goto out_close;

	addr = map_aligned(bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
			   fd, 0);
	if (addr == MAP_FAILED) {
		err = errno == EACCES ? -EPROTO : -errno;
		goto out_close;
	}
	/* a child must not count in its parent's ledger */
	if (madvise(addr, bytes, MADV_DONTFORK) < 0) {
		err = -errno;
		munmap(addr, bytes);
		goto out_close;
	}
	madvise(addr, bytes, MADV_DONTDUMP);
	*s = (struct shm){
		.fd = fd, .ro_fd = -1, .bytes = bytes, .addr = addr,
	};
	return 0;

out_close:
	if (fd >= 0)
		close(fd);
	return err;
}

/*
 * MADV_COLLAPSE wants some page of the piece to be there: a read is enough. It
 * does not ask the system's policy for shared memory, which is "never" unless
 * somebody changed it.
 */
int64_t shm_huge(int fd, uint64_t off, uint64_t bytes)
{
	uint64_t first = (off + SHM_HUGE_BYTES - 1) & ~(SHM_HUGE_BYTES - 1);
	uint64_t end = (off + bytes) & ~(SHM_HUGE_BYTES - 1), at;
	int64_t done = 0;
	int err = 0;
	char *p;

	if (first >= end)
		return 0;
	p = map_aligned(end - first, PROT_READ, fd, (off_t)first);
	if (p == MAP_FAILED)
		return -errno;
	for (at = 0; at < end - first; at += SHM_HUGE_BYTES) {
		*(volatile char *)(p + at);
		if (madvise(p + at, SHM_HUGE_BYTES, MADV_COLLAPSE))
			err = -errno;
		else
			done += (int64_t)SHM_HUGE_BYTES;
	}
	munmap(p, end - first);
	return done ? done : err;
}

void shm_fini(struct shm *s)
{
	if (s->addr)
		munmap(s->addr, s->bytes);
	if (s->fd >= 0)
		close(s->fd);
	if (s->ro_fd >= 0)
		close(s->ro_fd);
	*s = (struct shm)SHM_INIT;
}
