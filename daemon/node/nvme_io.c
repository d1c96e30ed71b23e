/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of an I/O.
 *
 *	submit -> QUEUED -> FLYING ------------------------> IDLE
 *	             |        |  ^                            ^
 *	             |        v  | (fault table)              |
 *	             |       STALLED -------------------------|
 *	             `-> ENDING (cancelled, device gone) -----'
 *
 * Queues, one a priority, are served in order, but every eighth start is a
 * write-back's: demotion that never gets a turn ends in allocations that wait.
 * And write-back has at most three quarters of the depth, so that a read that
 * somebody waits for need not wait for a write to end.
 *
 * An I/O has up to two parts that run side by side: the engine's transfer and
 * the checksum of the data (on a worker, or by the loop when it is short). A
 * write needs both in any order; a read's checksum begins when its data are
 * there. It ends when no part is left.
 *
 * Deadlines are in nvme_time.c.
 *
 * Callbacks may hand in, cancel and raise I/O. So no list is walked across a
 * callback: each loop takes the first entry until none is left.
 */
#include <errno.h>
#include <string.h>

#include "daemon/node/nvme.h"
#include "kernels/kernels.h"

#define WRITEBACK_SHARE	8	/* at least one start in so many */

/* ---- the checksum -------------------------------------------------------- */

static void crc_work_fn(struct work *w)
{
	struct node_io *io = container_of(w, struct node_io, priv.crc_work);

	io->priv.data_crc = kvmm_crc32c(0, io->addr, io->len);
}

static void io_finish(struct nvme *nv, struct node_io *io);

static void crc_work_done(struct work *w)
{
	struct node_io *io = container_of(w, struct node_io, priv.crc_work);

	io->priv.parts &= (uint8_t)~IO_PART_CRC;
	if (!io->priv.parts)
		io_finish(to_nvme(io->priv.node), io);
}

/* Not at once: the device is given its next I/Os first; see nvme_crc_flush(). */
static void crc_start(struct nvme *nv, struct node_io *io)
{
	io->priv.parts |= IO_PART_CRC;
	io->priv.crc_work.fn = crc_work_fn;
	io->priv.crc_work.done = crc_work_done;
	io->priv.crc_work.next = nv->crc_jobs;
	nv->crc_jobs = &io->priv.crc_work;
}

/* Those of @jobs that are for the loop; the others go to the workers. */
static struct work *crc_share(struct nvme *nv, struct work *jobs)
{
	struct work *mine = NULL, **end = &mine, *w;

	while ((w = jobs)) {
		const struct node_io *io = container_of(w, struct node_io,
							priv.crc_work);

		jobs = w->next;
		w->next = NULL;
		if (io->len <= nv->crc_left) {
			nv->crc_left -= io->len;
			*end = w;
			end = &w->next;
		} else {
			work_submit(nv->pool, w);
		}
	}
	return mine;
}

bool nvme_crc_flush(struct nvme *nv)
{
	struct work *first = NULL, *w;
	bool any;

	while ((w = nv->crc_jobs)) {
		nv->crc_jobs = w->next;
		w->next = first;
		first = w;
	}
	first = crc_share(nv, first);
	any = first;
	while ((w = first)) {
		first = w->next;
		crc_work_fn(w);
		crc_work_done(w);
	}
	return any;
}

static uint32_t ident_crc(const struct nvme *nv, const struct node_io *io)
{
	struct nvme_ident_tail tail = {
		.seq	= io->slot.seq,
		.len	= io->len,
	};

	return kvmm_crc32c(kvmm_crc32c(nv->uuid_crc, io->ident, io->ident_len),
			   &tail, sizeof(tail));
}

/* ---- ends ---------------------------------------------------------------- */

/* The last thing that is done to an I/O: afterwards it is the caller's. */
static void io_end(struct node_io *io, int result)
{
	list_del(&io->priv.list);
	io->priv.stage = IO_IDLE;
	io->result = result;
	if (!io->late)
		io->done(io, result);
	io->release(io);
}

/* The kernel's answer in the words that everybody here knows: EROFS, ENOSPC and,
 * where the medium is to blame, EIO; others as they are. */
static int errno_map(int res)
{
	switch (res) {
	case -EROFS:
	case -EPERM:
		return -EROFS;
	case -ENOSPC:
	case -EDQUOT:
	case -EFBIG:
		return -ENOSPC;
	case -EIO:
	case -ENODATA:
	case -EILSEQ:
	case -EREMOTEIO:
	case -EBADE:
	case -EUCLEAN:
		return -EIO;
	default:
		return res >= 0 ? -EIO : res;	/* short */
	}
}

/* Count an error of the engine's; returns what the caller is told. */
static int io_error(struct nvme *nv, struct node_io *io, int res)
{
	struct node_dir_stats *st = &nv->node.stats.dir[io->dir];
	int err = errno_map(res);

	switch (err) {
	case -ECANCELED:
		return err;		/* by us, after its deadline */
	case -EROFS:
	case -ENOSPC:
		st->erofs += err == -EROFS;
		st->enospc += err == -ENOSPC;
		if (io->dir == NODE_WRITE)
			nvme_refused(nv, err, now_ns());
		return err;
	case -EIO:
		st->enodata += res == -ENODATA;
		st->nr_short += res >= 0;
		st->eio += res < 0 && res != -ENODATA;
		slots_mark_bad(&nv->slots, &io->slot);
		break;
	default:
		st->other++;
		break;
	}
	if (!io->priv.missed)
		nvme_miss(nv, io->dir == NODE_WRITE ? "write" : "read",
			  now_ns());
	return -EIO;
}

/* No part is left. */
static void io_finish(struct nvme *nv, struct node_io *io)
{
	struct node_dir_stats *st = &nv->node.stats.dir[io->dir];
	int res = io->priv.res;
	uint32_t crc;

	nvme_heap_del(nv, io);
	nv->nr_started--;
	if (res != (int)io_bytes(io)) {
		io_end(io, io_error(nv, io, res));
		return;
	}
	crc = kvmm_crc32c_combine(io->priv.ident_crc, io->priv.data_crc,
				  io->len);
	if (io->dir == NODE_WRITE) {
		io->crc = crc;
		io->data_crc = io->priv.data_crc;
	} else if (crc != io->crc && !nv->break_crc) {
		nv->node.stats.crc_bad++;
		/* What was written before the last power cut may have been
		 * lost in it, and the medium is no worse for that. */
		if (io->slot.seq >= nv->first_seq) {
			slots_mark_bad(&nv->slots, &io->slot);
			if (!io->priv.missed)
				nvme_miss(nv, "checksum", now_ns());
		}
		io_end(io, -EBADMSG);
		return;
	}
	st->ios++;
	st->bytes += io_bytes(io);
	st->data_bytes += io->len;
	if (io->priv.buf_ix >= 0)
		nv->node.stats.fixed_ios++;
	if (!io->priv.missed)
		nvme_good(nv, io->dir);
	io_end(io, 0);
}

static void own_done(struct nvme *nv, struct node_io *io, int res)
{
	nv->nr_own--;
	nv->own_bytes[io->dir] -= io_bytes(io);
	nvme_heap_del(nv, io);
	list_del(&io->priv.list);
	io->priv.stage = IO_IDLE;
	io->done(io, res == (int)io_bytes(io) ? 0 : errno_map(res));
}

/*
 * Does it say how fast the device is? Not a read in the background: one at a time
 * behind everybody else, it says how slow one is that is let wait, and who believes
 * that of all reads makes none.
 */
static bool io_measured(const struct node_io *io)
{
	return io->dir == NODE_WRITE || io->prio != NODE_PRIO_WRITEBACK;
}

void nvme_engine_done(struct nvme *nv, struct node_io *io, int res)
{
	io->priv.parts &= (uint8_t)~IO_PART_ENGINE;
	if (io->priv.fault == FAULT_TORN && res >= 0)
		res = (int)io_bytes(io);
	io->priv.res = res;
	nv->nr_missed -= io->priv.missed;
	fault_tap(&nv->node, FAULT_TAP_END, io);
	if (io->priv.internal) {
		own_done(nv, io, res);
		return;
	}
	nv->inflight--;
	nv->inflight_wb -= io->prio == NODE_PRIO_WRITEBACK;
	nv->inflight_bytes[io->dir] -= io_bytes(io);
	nv->node.stats.dir[io->dir].inflight--;
	nv->node.stats.dir[io->dir].queued_bytes -= io_bytes(io);
	if (res == (int)io_bytes(io)) {
		if (io_measured(io))
			nvme_rate_add(nv, io, now_ns());
		if (io->dir == NODE_READ) {
			if (io->priv.fault == FAULT_FLIP)
				((uint8_t *)io->addr)[io->len / 2] ^= 1;
			crc_start(nv, io);
		}
	}
	if (!io->priv.parts)
		io_finish(nv, io);
}

/* ---- starts -------------------------------------------------------------- */

static void engine_start(struct nvme *nv, struct node_io *io)
{
	fault_tap(&nv->node, FAULT_TAP_START, io);
	nv->eng->start(nv, io);
}

static enum fault_what io_what(const struct node_io *io)
{
	if (io->dir == NODE_READ)
		return FAULT_READ;
	return io->priv.sync ? FAULT_JOURNAL : FAULT_WRITE;
}

/* Give @io to the engine, unless the fault table has other plans for it. */
static void io_launch(struct nvme *nv, struct node_io *io, uint64_t now)
{
	struct fault f = { .how = FAULT_NONE };

	io->priv.stage = IO_FLYING;
	io->priv.start_ns = now;
	nvme_io_begun(io, 0);
	io->priv.parts = IO_PART_ENGINE;
	io->priv.buf_ix = -1;
	io->priv.res = 0;
	fault_ask_at(&nv->node, io_what(io),
		     io->priv.internal && !io->priv.sync, io->slot.off,
		     io_bytes(io), &f);
	io->priv.fault = (uint8_t)f.how;
	io->priv.due_ns = now;
	switch (f.how) {
	case FAULT_NONE:
	case FAULT_FLIP:
	case FAULT_TORN:
		list_move_tail(&nv->flying, &io->priv.list);
		engine_start(nv, io);
		return;
	case FAULT_ERROR:
		io->priv.res = -f.err;
		io->priv.due_ns = now + f.ms * NSEC_PER_MSEC;
		break;
	case FAULT_SHORT:
		io->priv.res = (int)(io_bytes(io) / 2);
		break;
	case FAULT_DROP:
	case FAULT_STALE:
		io->priv.res = (int)io_bytes(io);
		break;
	case FAULT_REORDER:
	case FAULT_STALL:
		io->priv.due_ns = now + f.ms * NSEC_PER_MSEC;
		break;
	}
	nvme_io_begun(io, now);
	io->priv.stage = IO_STALLED;
	list_move_tail(&nv->stalled, &io->priv.list);
}

void nvme_end_soon(struct nvme *nv, struct node_io *io, int res)
{
	io->priv.fault = FAULT_ERROR;
	io->priv.res = res;
	io->priv.due_ns = 0;
	io->priv.stage = IO_STALLED;
	list_move_tail(&nv->stalled, &io->priv.list);
}

static void io_start(struct nvme *nv, struct node_io *io, uint64_t now)
{
	struct node_dir_stats *st = &nv->node.stats.dir[io->dir];

	nv->queued--;
	nv->nr_started++;
	nv->inflight++;
	nv->inflight_wb += io->prio == NODE_PRIO_WRITEBACK;
	nv->inflight_bytes[io->dir] += io_bytes(io);
	st->queued--;
	st->inflight++;
	if (io_measured(io) &&
	    (!nv->rate[io->dir].from || st->inflight == 1))
		nv->rate[io->dir].from = now;
	io->priv.ident_crc = ident_crc(nv, io);
	io->priv.start_ns = now;
	nvme_heap_set(nv, io, nvme_first_expiry(nv, io));
	io_launch(nv, io, now);
	if (io->dir == NODE_WRITE) {
		crc_start(nv, io);
		nvme_take_room(nv, io_bytes(io));
	}
}

static void start_own(struct nvme *nv, struct node_io *io, bool sync,
		      uint64_t now)
{
	io->priv.node = &nv->node;
	io->priv.internal = true;
	io->priv.sync = sync;
	io->priv.missed = false;
	io->late = false;
	list_init(&io->priv.list);
	nv->nr_own++;
	nv->own_bytes[io->dir] += io_bytes(io);
	io->priv.start_ns = now;
	nvme_heap_set(nv, io, nvme_first_expiry(nv, io));
	io_launch(nv, io, now);
	if (io->dir == NODE_WRITE)
		nvme_take_room(nv, io_bytes(io));
}

void nvme_start_own(struct nvme *nv, struct node_io *io, uint64_t now)
{
	start_own(nv, io, false, now);
}

void nvme_start_meta(struct nvme *nv, struct node_io *io, uint64_t now)
{
	start_own(nv, io, true, now);
}

static struct node_io *queue_pick(const struct nvme *nv)
{
	const struct list *wb = &nv->queue[NODE_PRIO_WRITEBACK];
	uint32_t wb_max = max(nv->opts.depth * 3 / 4, 1u);
	bool wb_may = !list_empty(wb) && nv->inflight_wb < wb_max;

	if (wb_may && nv->row >= WRITEBACK_SHARE - 1)
		return list_first(wb, struct node_io, priv.list);
	for (int p = 0; p < NODE_PRIO_WRITEBACK; p++)
		if (!list_empty(&nv->queue[p]))
			return list_first(&nv->queue[p], struct node_io,
					  priv.list);
	return wb_may ? list_first(wb, struct node_io, priv.list) : NULL;
}

/*
 * The next to start, or NULL. Besides the device's depth the I/Os whose
 * checksums are not done yet are bounded, so that the device cannot run away
 * from the workers.
 */
static struct node_io *next_start(const struct nvme *nv)
{
	if (nv->inflight >= nv->opts.depth ||
	    nv->nr_started >= NVME_MAX_STARTED(nv->opts.depth))
		return NULL;
	return queue_pick(nv);
}

void nvme_start_queued(struct nvme *nv, uint64_t now)
{
	struct node_io *io;

	while ((io = next_start(nv))) {
		if (io->prio == NODE_PRIO_WRITEBACK)
			nv->row = 0;
		else
			nv->row++;
		io_start(nv, io, now);
	}
}

/* ---- calls --------------------------------------------------------------- */

int nvme_submit(struct node *n, struct node_io *io)
{
	struct nvme *nv = to_nvme(n);
	struct node_dir_stats *st = &n->stats.dir[io->dir];
	uint64_t now = now_ns();
	int err = nvme_admit(nv, io->dir, now);

	if (!err && nv->queued >= nv->opts.queue_max)
		err = -EAGAIN;
	if (!err && io->deadline_ns && io->deadline_ns <= now)
		err = -ETIMEDOUT;
	if (err) {
		st->refused++;
		return err;
	}
	if (slots_bytes(&nv->slots, &io->slot) < io->len)
		return -EINVAL;

	memset(&io->priv, 0, sizeof(io->priv));
	io->priv.node = n;
	io->priv.stage = IO_QUEUED;
	io->late = false;
	io->result = 0;
	list_add_tail(&nv->queue[io->prio], &io->priv.list);
	nvme_heap_set(nv, io, io->deadline_ns ? io->deadline_ns :
			 now + nv->opts.queue_timeout_ns);
	nv->queued++;
	st->queued++;
	st->queued_bytes += io_bytes(io);
	return 0;
}

void nvme_queue_leave(struct nvme *nv, struct node_io *io, int result)
{
	nvme_heap_del(nv, io);
	nv->queued--;
	nv->node.stats.dir[io->dir].queued--;
	nv->node.stats.dir[io->dir].queued_bytes -= io_bytes(io);
	list_move_tail(&nv->ending, &io->priv.list);
	io->priv.stage = IO_ENDING;
	io->priv.res = result;
}

void nvme_end_queued(struct nvme *nv, bool reads_too, int result)
{
	struct node_io *io, *tmp;

	for (int p = 0; p < NODE_NR_PRIOS; p++)
		list_for_each_entry_safe(io, tmp, &nv->queue[p], priv.list)
			if (reads_too || io->dir == NODE_WRITE)
				nvme_queue_leave(nv, io, result);
}

int nvme_cancel(struct node *n, struct node_io *io)
{
	struct nvme *nv = to_nvme(n);

	if (io->priv.stage != IO_QUEUED)
		return -EALREADY;
	n->stats.dir[io->dir].cancelled++;
	nvme_queue_leave(nv, io, -ECANCELED);
	return 0;
}

void nvme_raise(struct node *n, struct node_io *io, enum node_prio prio)
{
	if (io->priv.stage != IO_QUEUED)
		return;
	io->prio = prio;
	list_move_tail(&to_nvme(n)->queue[prio], &io->priv.list);
}

static bool list_busy(const struct list *head, const char *from, const char *to)
{
	const struct node_io *io;

	list_for_each_entry(io, head, priv.list) {
		const char *addr = io->addr;

		if (addr < to && addr + io_bytes(io) > from)
			return true;
	}
	return false;
}

bool nvme_buf_busy(const struct node *n, const void *addr, uint64_t len)
{
	const struct nvme *nv = to_nvme(n);
	const char *from = addr;
	const char *to = from + len;

	for (int p = 0; p < NODE_NR_PRIOS; p++)
		if (list_busy(&nv->queue[p], from, to))
			return true;
	return list_busy(&nv->ending, from, to) ||
	       list_busy(&nv->stalled, from, to) ||
	       list_busy(&nv->flying, from, to);
}

/* ---- the loop's part ------------------------------------------------------ */

/* To @due, behind what is due before it. */
static void stalled_sort(struct list *due, struct node_io *io)
{
	struct node_io *other, *tmp;

	list_move_tail(due, &io->priv.list);
	list_for_each_entry_safe(other, tmp, due, priv.list) {
		if (other == io)
			return;
		if (other->priv.due_ns > io->priv.due_ns)
			list_move_tail(due, &other->priv.list);
	}
}

/* Injected faults whose time has come. */
static void stalled_poll(struct nvme *nv, uint64_t now)
{
	struct list due;
	struct node_io *io, *tmp;

	list_init(&due);
	list_for_each_entry_safe(io, tmp, &nv->stalled, priv.list)
		if (io->priv.due_ns <= now)
			stalled_sort(&due, io);
	while ((io = list_first(&due, struct node_io, priv.list))) {
		list_move_tail(&nv->flying, &io->priv.list);
		io->priv.stage = IO_FLYING;
		if (io->priv.fault == FAULT_STALL)
			engine_start(nv, io);
		else
			nvme_engine_done(nv, io, io->priv.res);
	}
}

void nvme_io_poll(struct nvme *nv, uint64_t now, bool all_seen)
{
	struct node_io *io;

	stalled_poll(nv, now);
	/* what lies completed and was not looked at yet is not late */
	if (all_seen)
		nvme_time_poll(nv, now);
	while ((io = list_first(&nv->ending, struct node_io, priv.list)))
		io_end(io, io->priv.res);
}

uint64_t nvme_io_next(const struct nvme *nv)
{
	uint64_t next = nvme_time_next(nv);
	const struct node_io *io;

	if (!list_empty(&nv->ending) || next_start(nv))
		return 0;
	list_for_each_entry(io, &nv->stalled, priv.list)
		next = min(next, io->priv.due_ns);
	return next;
}

bool nvme_io_check(const struct nvme *nv)
{
	unsigned long queued = 0;

	for (int p = 0; p < NODE_NR_PRIOS; p++)
		queued += list_count(&nv->queue[p]);
	return nvme_heap_check(nv) && queued == nv->queued &&
	       nv->inflight_wb <= nv->inflight &&
	       nv->inflight <= nv->opts.depth &&
	       nv->inflight <= nv->nr_started &&
	       nv->nr_started + nv->nr_own ==
	       list_count(&nv->stalled) + list_count(&nv->flying);
}
