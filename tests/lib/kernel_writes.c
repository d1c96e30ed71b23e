/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/kernel_writes.h"

#include <liburing.h>
#include <pthread.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define KEPT	65536u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kernel_write kept[KEPT];
static uint64_t nr;

int __real_io_uring_submit(struct io_uring *ring);
int __wrap_io_uring_submit(struct io_uring *ring);
ssize_t __real_pwritev2(int fd, const struct iovec *iov, int n, off_t off,
			int flags);
ssize_t __wrap_pwritev2(int fd, const struct iovec *iov, int n, off_t off,
			int flags);
ssize_t __real_pwrite(int fd, const void *buf, size_t len, off_t off);
ssize_t __wrap_pwrite(int fd, const void *buf, size_t len, off_t off);
int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);

static void note(const struct kernel_write *w)
{
	pthread_mutex_lock(&lock);
	kept[nr++ % KEPT] = *w;
	pthread_mutex_unlock(&lock);
}

void kernel_writes_reset(void)
{
	pthread_mutex_lock(&lock);
	nr = 0;
	pthread_mutex_unlock(&lock);
}

bool kernel_writes_get(uint64_t ix, struct kernel_write *w)
{
	bool have;

	pthread_mutex_lock(&lock);
	have = ix < nr && nr - ix <= KEPT;
	if (have)
		*w = kept[ix % KEPT];
	pthread_mutex_unlock(&lock);
	return have;
}

bool kernel_writes_take(const void *addr, uint64_t off, bool *dsync)
{
	bool found = false, flushed = false;

	pthread_mutex_lock(&lock);
	for (uint64_t i = nr; i-- > 0 && nr - i <= KEPT && !found;) {
		struct kernel_write *w = &kept[i % KEPT];

		flushed |= w->flush;
		found = w->addr == addr && w->off == off && !w->flush &&
			!w->taken;
		if (!found)
			continue;
		w->taken = true;
		*dsync = w->dsync || (w->over && flushed);
	}
	pthread_mutex_unlock(&lock);
	return found;
}

static void note_sqe(const struct io_uring_sqe *sqe)
{
	if (sqe->opcode != IORING_OP_WRITE &&
	    sqe->opcode != IORING_OP_WRITE_FIXED)
		return;
	note(&(struct kernel_write) {
		.addr	= (const void *)(uintptr_t)sqe->addr,
		.off	= sqe->off,
		.len	= sqe->len,
		.dsync	= sqe->rw_flags & (RWF_DSYNC | RWF_SYNC),
	});
}

/* What is new in the queue; what the kernel did not take is not noted twice. */
int __wrap_io_uring_submit(struct io_uring *ring)
{
	const struct io_uring_sq *sq = &ring->sq;

	for (unsigned int i = sq->sqe_head; i != sq->sqe_tail; i++)
		note_sqe(&sq->sqes[i & sq->ring_mask]);
	return __real_io_uring_submit(ring);
}

ssize_t __wrap_pwritev2(int fd, const struct iovec *iov, int n, off_t off,
			int flags)
{
	note(&(struct kernel_write) {
		.addr	= iov->iov_base,
		.off	= (uint64_t)off,
		.len	= iov->iov_len,
		.dsync	= flags & (RWF_DSYNC | RWF_SYNC),
	});
	return __real_pwritev2(fd, iov, n, off, flags);
}

ssize_t __wrap_pwrite(int fd, const void *buf, size_t len, off_t off)
{
	note(&(struct kernel_write) {
		.addr	= buf,
		.off	= (uint64_t)off,
		.len	= len,
		.over	= true,
	});
	return __real_pwrite(fd, buf, len, off);
}

int __wrap_fdatasync(int fd)
{
	note(&(struct kernel_write){ .flush = true });
	return __real_fdatasync(fd);
}
