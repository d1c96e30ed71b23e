/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time: when an I/O is too late, for its caller and for the device.
 *
 * Deadlines are one heap. An I/O that is still queued ends at its deadline. One
 * that the kernel has cannot be taken back, whatever io_uring's cancel says in
 * better cases: at its deadline the caller gets its answer, and the I/O stays
 * in flight, with memory and slot, until the kernel is done with it ("late").
 * Apart from the caller's deadline the device has one of its own, io_timeout
 * from the start: only missing that one counts against the device.
 */
#include <assert.h>
#include <errno.h>

#include "daemon/node/nvme.h"

/* ---- the heap ------------------------------------------------------------ */

static void heap_place(struct nvme *nv, uint32_t ix, struct node_io *io)
{
	nv->heap[ix] = io;
	io->priv.heap_ix = ix + 1;
}

static void heap_sift(struct nvme *nv, uint32_t ix, struct node_io *io)
{
	while (ix && nv->heap[(ix - 1) / 2]->priv.expire_ns >
		     io->priv.expire_ns) {
		heap_place(nv, ix, nv->heap[(ix - 1) / 2]);
		ix = (ix - 1) / 2;
	}
	for (;;) {
		uint32_t kid = 2 * ix + 1;

		if (kid >= nv->heap_nr)
			break;
		if (kid + 1 < nv->heap_nr &&
		    nv->heap[kid + 1]->priv.expire_ns <
		    nv->heap[kid]->priv.expire_ns)
			kid++;
		if (nv->heap[kid]->priv.expire_ns >= io->priv.expire_ns)
			break;
		heap_place(nv, ix, nv->heap[kid]);
		ix = kid;
	}
	heap_place(nv, ix, io);
}

void nvme_heap_set(struct nvme *nv, struct node_io *io, uint64_t expire_ns)
{
	io->priv.expire_ns = expire_ns;
	if (!io->priv.heap_ix) {
		assert(nv->heap_nr < nv->heap_max);
		nv->heap_nr++;
		io->priv.heap_ix = nv->heap_nr;
	}
	heap_sift(nv, io->priv.heap_ix - 1, io);
}

void nvme_heap_del(struct nvme *nv, struct node_io *io)
{
	uint32_t ix = io->priv.heap_ix - 1;
	struct node_io *last;

	if (!io->priv.heap_ix)
		return;
	io->priv.heap_ix = 0;
	last = nv->heap[--nv->heap_nr];
	if (last != io)
		heap_sift(nv, ix, last);
}

bool nvme_heap_check(const struct nvme *nv)
{
	for (uint32_t i = 0; i < nv->heap_nr; i++) {
		if (nv->heap[i]->priv.heap_ix != i + 1)
			return false;
		if (i && nv->heap[(i - 1) / 2]->priv.expire_ns >
			 nv->heap[i]->priv.expire_ns)
			return false;
	}
	return true;
}

/* ---- deadlines ----------------------------------------------------------- */

void nvme_set_deadline(struct node *n, struct node_io *io,
		       uint64_t deadline_ns)
{
	struct nvme *nv = to_nvme(n);
	uint64_t expire = deadline_ns ? deadline_ns : DEADLINE_NONE;

	switch (io->priv.stage) {
	case IO_QUEUED:
		if (!deadline_ns)
			expire = now_ns() + nv->opts.queue_timeout_ns;
		break;
	case IO_STALLED:
	case IO_FLYING:
		if (io->late)
			return;
		expire = min(expire,
			     io->priv.start_ns + nv->opts.io_timeout_ns);
		break;
	default:
		return;
	}
	io->deadline_ns = deadline_ns;
	nvme_heap_set(nv, io, expire);
}

static void io_expire(struct nvme *nv, struct node_io *io, uint64_t now)
{
	struct node_dir_stats *st = &nv->node.stats.dir[io->dir];
	uint64_t device = io->priv.start_ns + nv->opts.io_timeout_ns;
	bool first = !io->late;

	if (io->priv.stage == IO_QUEUED) {
		st->expired++;
		nvme_queue_leave(nv, io, -ETIMEDOUT);
		return;
	}
	io->late = true;
	if (now < device) {
		nvme_heap_set(nv, io, device);
	} else {
		nvme_heap_del(nv, io);
		if (io->priv.parts & IO_PART_ENGINE)
			nvme_miss(nv, "timeout", now);
	}
	if (!first)
		return;
	if (io->priv.stage == IO_FLYING && io->priv.parts & IO_PART_ENGINE)
		nv->eng->cancel(nv, io);
	if (io->priv.internal)
		return;
	st->late++;
	io->done(io, -ETIMEDOUT);
}

void nvme_time_poll(struct nvme *nv, uint64_t now)
{
	while (nv->heap_nr && nv->heap[0]->priv.expire_ns <= now)
		io_expire(nv, nv->heap[0], now);
}

uint64_t nvme_time_next(const struct nvme *nv)
{
	return nv->heap_nr ? nv->heap[0]->priv.expire_ns : DEADLINE_NONE;
}
