/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engine: io_uring.
 *
 * One ring, its submission side used by the loop's thread only. The file is a
 * registered one. Buffers are registered in a sparse table, a whole extent an
 * entry, so that the kernel need not pin and unpin pages for each I/O; memory
 * that the table or RLIMIT_MEMLOCK has no room for moves through plain
 * requests on the same ring.
 *
 * Extents come and go on other threads: registering a gigabyte takes the
 * kernel tens of milliseconds, which the loop must not wait for. So the list
 * that says which memory has which entry is under a lock, the system call is
 * not: an entry is reserved, registered, and only then put on the list; and
 * taken off the list before it is unregistered.
 *
 * Completions run as task work of the loop's thread, without interrupting it
 * (COOP_TASKRUN): it learns of them when it enters the kernel, or by the flag
 * that io_uring_peek_batch_cqe() looks at.
 *
 * With SQPOLL a thread of the kernel's looks for what was handed in, and sleeps
 * when it has seen nothing for SQ_IDLE_MS: starting an I/O needs no system call
 * then, and costs a CPU that does nothing else. Worth it where there are CPUs to
 * spare and the I/O is small; off unless asked for.
 */
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/nvme.h"
#include "ipc/base/bitmap.h"

#define URING_MAX_BUFS	4096
#define URING_BATCH	64
#define SQ_IDLE_MS	20

/* Longest memory that the kernel takes as one entry. */
#define URING_BUF_MAX	(UINT64_C(1) << 30)

/**
 * struct uring_buf - memory that was to be registered
 * @ix:		its entry; -1: the kernel refused
 */
struct uring_buf {
	char		*addr;
	uint64_t	len;
	int		ix;
};

/**
 * struct uring - the engine's own
 * @fixed_file:	the file is registered
 * @table:	there is a table of buffers
 * @busy:	the kernel did not take everything
 * @sqpoll:	a thread of the kernel's takes it
 * @lock:	protects all below
 * @bufs:	by address; @nr_bufs of @max_bufs
 * @taken:	which entries are in use
 */
struct uring {
	struct io_uring		ring;
	bool			fixed_file;
	bool			table;
	bool			busy;
	bool			sqpoll;
	struct kvmm_mutex	lock;
	struct uring_buf	*bufs;
	uint32_t		nr_bufs;
	uint32_t		max_bufs;
	uint64_t		taken[BITMAP_WORDS(URING_MAX_BUFS)];
};

/* The ring as wished for, or one that works all the same. */
static int ring_make(struct nvme *nv, struct uring *u, unsigned int entries)
{
	struct io_uring_params p = {
		.flags		= IORING_SETUP_SQPOLL,
		.sq_thread_idle	= SQ_IDLE_MS,
	};
	int err;

	if (nv->opts.sqpoll) {
		err = io_uring_queue_init_params(entries, &u->ring, &p);
		u->sqpoll = !err;
		snprintf(nv->eng_note, sizeof(nv->eng_note), "%s%s",
			 err ? " (no SQPOLL: " : " with SQPOLL",
			 err ? strerror(-err) : "");
		if (!err)
			return 0;
		strcat(nv->eng_note, ")");
	}
	err = io_uring_queue_init(entries, &u->ring,
				  IORING_SETUP_COOP_TASKRUN |
				  IORING_SETUP_TASKRUN_FLAG);
	if (err == -EINVAL)	/* before Linux 5.19 */
		err = io_uring_queue_init(entries, &u->ring, 0);
	return err;
}

static int uring_init(struct nvme *nv)
{
	/* I/Os, the node's own, and a cancel for each */
	unsigned int entries = (unsigned int)roundup_pow2(2 * nv->opts.depth +
							  8);
	struct uring *u = calloc(1, sizeof(*u));
	int err;

	if (!u)
		return -ENOMEM;
	err = ring_make(nv, u, entries);
	if (err) {
		free(u);
		return err;
	}
	io_uring_ring_dontfork(&u->ring);
	u->table = !io_uring_register_buffers_sparse(&u->ring, URING_MAX_BUFS);
	kvmm_mutex_init(&u->lock, LOCK_IO);
	nv->eng_data = u;
	return 0;
}

static int uring_set_file(struct nvme *nv)
{
	struct uring *u = nv->eng_data;

	u->fixed_file = !io_uring_register_files(&u->ring, &nv->fd, 1);
	return 0;
}

static void uring_fini(struct nvme *nv)
{
	struct uring *u = nv->eng_data;

	io_uring_queue_exit(&u->ring);
	kvmm_mutex_fini(&u->lock);
	free(u->bufs);
	free(u);
	nv->eng_data = NULL;
}

/* Where @addr is on the list, or belongs. */
static uint32_t buf_place(const struct uring *u, const char *addr)
	__must_hold(&u->lock)
{
	uint32_t lo = 0, hi = u->nr_bufs;

	while (lo < hi) {
		uint32_t mid = (lo + hi) / 2;

		if (u->bufs[mid].addr + u->bufs[mid].len <= addr)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

/* The entry in which all of the memory lies, or -1. */
static int buf_find(struct uring *u, const char *addr, uint32_t len)
{
	uint32_t i;
	int ix = -1;

	kvmm_lock(&u->lock);
	i = buf_place(u, addr);
	if (i < u->nr_bufs && u->bufs[i].addr <= addr &&
	    addr + len <= u->bufs[i].addr + u->bufs[i].len)
		ix = u->bufs[i].ix;
	kvmm_unlock(&u->lock);
	return ix;
}

static int table_update(struct uring *u, unsigned int ix, void *addr,
			uint64_t len)
{
	struct iovec iov = { .iov_base = addr, .iov_len = len };
	__u64 tag = 0;
	int n = io_uring_register_buffers_update_tag(&u->ring, ix, &iov, &tag,
						     1);

	return n < 0 ? n : n == 1 ? 0 : -EIO;
}

/* Put it on the list; entry @ix may be -1. */
static int buf_insert(struct uring *u, char *addr, uint64_t len, int ix)
	__must_hold(&u->lock)
{
	uint32_t i = buf_place(u, addr);

	if (i < u->nr_bufs && u->bufs[i].addr < addr + len)
		return -EEXIST;
	if (u->nr_bufs == u->max_bufs) {
		uint32_t max_bufs = u->max_bufs ? 2 * u->max_bufs : 16;
		struct uring_buf *bufs = realloc(u->bufs,
						 max_bufs * sizeof(*bufs));

		if (!bufs)
			return -ENOMEM;
		u->bufs = bufs;
		u->max_bufs = max_bufs;
	}
	memmove(&u->bufs[i + 1], &u->bufs[i],
		(u->nr_bufs - i) * sizeof(*u->bufs));
	u->bufs[i] = (struct uring_buf) {
		.addr	= addr,
		.len	= len,
		.ix	= ix,
	};
	u->nr_bufs++;
	return 0;
}

static int uring_buf_add(struct nvme *nv, void *addr, uint64_t len)
{
	struct uring *u = nv->eng_data;
	size_t ix;
	int err, err2;

	kvmm_lock(&u->lock);
	ix = bitmap_next_clear(u->taken, URING_MAX_BUFS, 0);
	err = !u->table ? -EOPNOTSUPP : len > URING_BUF_MAX ? -EINVAL :
	      ix == URING_MAX_BUFS ? -ENOSPC : 0;
	if (!err)
		bitmap_set(u->taken, ix);
	kvmm_unlock(&u->lock);

	if (!err) {
		err = table_update(u, (unsigned int)ix, addr, len);
		if (err) {
			kvmm_lock(&u->lock);
			bitmap_clear(u->taken, ix);
			kvmm_unlock(&u->lock);
		}
	}
	kvmm_lock(&u->lock);
	err2 = buf_insert(u, addr, len, err ? -1 : (int)ix);
	kvmm_unlock(&u->lock);
	if (err2) {
		if (!err) {
			table_update(u, (unsigned int)ix, NULL, 0);
			kvmm_lock(&u->lock);
			bitmap_clear(u->taken, ix);
			kvmm_unlock(&u->lock);
		}
		return err2;
	}
	/* Relaxed: counters for status. */
	atomic_fetch_add_explicit(err ? &nv->plain_bytes : &nv->fixed_bytes,
				  len, memory_order_relaxed);
	return err;
}

static void uring_buf_del(struct nvme *nv, void *addr)
{
	struct uring *u = nv->eng_data;
	struct uring_buf buf = { .ix = -1 };
	uint32_t i;

	kvmm_lock(&u->lock);
	i = buf_place(u, addr);
	if (i < u->nr_bufs && u->bufs[i].addr == addr) {
		buf = u->bufs[i];
		u->nr_bufs--;
		memmove(&u->bufs[i], &u->bufs[i + 1],
			(u->nr_bufs - i) * sizeof(*u->bufs));
	}
	kvmm_unlock(&u->lock);
	if (buf.addr)
		atomic_fetch_sub_explicit(buf.ix < 0 ? &nv->plain_bytes :
						       &nv->fixed_bytes,
					  buf.len, memory_order_relaxed);
	if (buf.ix < 0)
		return;
	table_update(u, (unsigned int)buf.ix, NULL, 0);
	kvmm_lock(&u->lock);
	bitmap_clear(u->taken, (size_t)buf.ix);
	kvmm_unlock(&u->lock);
}

/* There is room for all that can be in flight, so NULL is a sick kernel. */
static struct io_uring_sqe *get_sqe(struct uring *u)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);

	if (!sqe) {
		io_uring_submit(&u->ring);
		sqe = io_uring_get_sqe(&u->ring);
	}
	return sqe;
}

static void uring_start(struct nvme *nv, struct node_io *io)
{
	struct uring *u = nv->eng_data;
	struct io_uring_sqe *sqe = get_sqe(u);
	int fd = u->fixed_file ? 0 : nv->fd;
	unsigned int len = nvme_move_bytes(io);

	if (!sqe) {
		nvme_end_soon(nv, io, -EAGAIN);
		return;
	}
	nvme_io_begun(io, io->priv.start_ns);
	io->priv.buf_ix = buf_find(u, io->addr, len);
	if (io->priv.buf_ix < 0 && io->dir == NODE_WRITE)
		io_uring_prep_write(sqe, fd, io->addr, len, io->slot.off);
	else if (io->priv.buf_ix < 0)
		io_uring_prep_read(sqe, fd, io->addr, len, io->slot.off);
	else if (io->dir == NODE_WRITE)
		io_uring_prep_write_fixed(sqe, fd, io->addr, len, io->slot.off,
					  io->priv.buf_ix);
	else
		io_uring_prep_read_fixed(sqe, fd, io->addr, len, io->slot.off,
					 io->priv.buf_ix);
	if (io->priv.sync && !nv->break_dsync)
		sqe->rw_flags = RWF_DSYNC;
	if (u->fixed_file)
		sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, io);
}

static void uring_flush(struct nvme *nv)
{
	struct uring *u = nv->eng_data;

	if (u->sqpoll) {
		/* its thread takes them in its own time */
		u->busy = io_uring_submit(&u->ring) < 0;
		return;
	}
	while (io_uring_sq_ready(&u->ring)) {
		int n = io_uring_submit(&u->ring);

		if (n <= 0 && n != -EINTR)
			break;
	}
	u->busy = io_uring_sq_ready(&u->ring);
}

static unsigned int uring_reap(struct nvme *nv, unsigned int budget)
{
	struct uring *u = nv->eng_data;
	struct io_uring_cqe *cqes[URING_BATCH];
	struct {
		struct node_io	*io;
		int		res;
	} done[URING_BATCH];
	unsigned int total = 0;

	while (!budget || total < budget) {
		unsigned int want = URING_BATCH, n, i;

		if (budget)
			want = min(want, budget - total);
		n = io_uring_peek_batch_cqe(&u->ring, cqes, want);
		if (!n)
			break;
		for (i = 0; i < n; i++) {
			done[i].io = io_uring_cqe_get_data(cqes[i]);
			done[i].res = cqes[i]->res;
		}
		io_uring_cq_advance(&u->ring, n);
		/* callbacks come from here: the ring is consistent again */
		for (i = 0; i < n; i++)
			if (done[i].io)
				nvme_engine_done(nv, done[i].io, done[i].res);
		total += n;
	}
	return total;
}

static void uring_cancel(struct nvme *nv, struct node_io *io)
{
	struct io_uring_sqe *sqe = get_sqe(nv->eng_data);

	if (!sqe)
		return;
	io_uring_prep_cancel(sqe, io, 0);
	io_uring_sqe_set_data(sqe, NULL);
}

static int uring_fd(const struct nvme *nv)
{
	const struct uring *u = nv->eng_data;

	return u->ring.ring_fd;
}

static bool uring_busy(const struct nvme *nv)
{
	const struct uring *u = nv->eng_data;

	return u->busy;
}

const struct nvme_engine_ops nvme_uring_ops = {
	.name		= "io_uring",
	.init		= uring_init,
	.set_file	= uring_set_file,
	.fini		= uring_fini,
	.start		= uring_start,
	.flush		= uring_flush,
	.reap		= uring_reap,
	.cancel		= uring_cancel,
	.fd		= uring_fd,
	.busy		= uring_busy,
	.buf_add	= uring_buf_add,
	.buf_del	= uring_buf_del,
};
