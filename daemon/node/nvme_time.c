/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time: when an I/O is too late, for its caller and for the device.
 *
 * Deadlines are one heap. An I/O that is still queued ends at its deadline. One
 * that the kernel has cannot be taken back, whatever io_uring's cancel says in
 * better cases: at its deadline the caller gets its answer, and the I/O stays
 * in flight, with memory and slot, until the kernel is done with it ("late").
 * Apart from the caller's deadline the device has one of its own: only missing
 * that one counts against the device, and how an I/O ended that did not miss it
 * counts as always, whether anybody still waits or not.
 *
 * The device's is io_timeout from when the kernel began, and the time that a slow
 * device takes for all that is in flight: a quarter of the speed that was
 * measured, or SLOW_BYTES_S, whatever is faster. What waits for one of the
 * threads of that engine has not begun. Unless all of them are stuck, it waits
 * as if it were queued.
 */
#include <assert.h>
#include <errno.h>

#include "daemon/node/nvme.h"

#define SLOW_BYTES_S	32000000u

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

/* How long a slow device would take for what is in flight. */
static uint64_t moving_ns(const struct nvme *nv)
{
	uint64_t ns = 0;

	for (int d = 0; d < 2; d++) {
		uint64_t bytes_s = nv->node.stats.dir[d].bytes_s / 4;
		uint64_t bytes = nv->inflight_bytes[d] + nv->own_bytes[d];

		bytes_s = max(bytes_s, (uint64_t)SLOW_BYTES_S);
		ns += (uint64_t)((unsigned __int128)bytes * NSEC_PER_SEC /
				 bytes_s);
	}
	return ns;
}

/* When the device is to blame, as it looks now; or when to look again. */
static uint64_t device_limit(const struct nvme *nv, const struct node_io *io,
			     uint64_t now, bool *begun)
{
	uint64_t from = atomic_load_explicit(&io->priv.begun_ns,
					     memory_order_relaxed);

	/* one thread may be busy with what is no I/O */
	*begun = from || nv->nr_missed >= max(nv->opts.threads - 1, 1u);
	if (!*begun)
		return min(now + nv->opts.io_timeout_ns, io->priv.start_ns +
			   nv->opts.queue_timeout_ns);
	return (from ? from : io->priv.start_ns) + nv->opts.io_timeout_ns +
	       moving_ns(nv);
}

static uint64_t callers_limit(const struct node_io *io)
{
	return io->deadline_ns && !io->late && !io->priv.internal ?
	       io->deadline_ns : DEADLINE_NONE;
}

uint64_t nvme_first_expiry(const struct nvme *nv, const struct node_io *io)
{
	return min(callers_limit(io), io->priv.start_ns +
		   nv->opts.io_timeout_ns + moving_ns(nv));
}

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
		expire = min(expire, io->priv.start_ns +
			     nv->opts.io_timeout_ns + moving_ns(nv));
		break;
	default:
		return;
	}
	io->deadline_ns = deadline_ns;
	nvme_heap_set(nv, io, expire);
}

/* The caller is told, and what can be taken back is. */
static void io_late(struct nvme *nv, struct node_io *io)
{
	if (io->late)
		return;
	io->late = true;
	if (io->priv.stage == IO_FLYING && io->priv.parts & IO_PART_ENGINE)
		nv->eng->cancel(nv, io);
	if (io->priv.internal)
		return;
	nv->node.stats.dir[io->dir].late++;
	io->done(io, -ETIMEDOUT);
}

static void io_expire(struct nvme *nv, struct node_io *io, uint64_t now)
{
	bool begun;
	uint64_t limit;

	if (io->priv.stage == IO_QUEUED) {
		nv->node.stats.dir[io->dir].expired++;
		nvme_queue_leave(nv, io, -ETIMEDOUT);
		return;
	}
	if (!(io->priv.parts & IO_PART_ENGINE) && now < callers_limit(io)) {
		/* only the checksum is missing, which is no device's */
		nvme_heap_del(nv, io);
		if (callers_limit(io) != DEADLINE_NONE)
			nvme_heap_set(nv, io, callers_limit(io));
		return;
	}
	limit = device_limit(nv, io, now, &begun);
	if (now < limit && now < callers_limit(io)) {
		nvme_heap_set(nv, io, min(limit, callers_limit(io)));
		return;
	}
	if (now < limit || !begun) {
		nvme_heap_set(nv, io, now < limit ? limit :
				      now + nv->opts.io_timeout_ns);
	} else {
		nvme_heap_del(nv, io);
		if (io->priv.parts & IO_PART_ENGINE) {
			io->priv.missed = true;
			nv->nr_missed++;
			nvme_miss(nv, "timeout", now);
		}
	}
	io_late(nv, io);
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
