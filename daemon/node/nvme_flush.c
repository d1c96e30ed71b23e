/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Data reaches the medium, too.
 *
 * A record is written through, its data is not: the checksum finds out what is
 * missing, so nothing has to wait for anything. But a drive with a volatile cache
 * may keep what nobody flushes as long as it likes, and a file system what it has
 * to note about blocks that were written for the first time. After a power cut all
 * records would be there, and all their pages misses.
 *
 * So the medium is told to write down what it has, by a worker, about once a second
 * while there are writes, and at the end. Nobody waits for that. A power cut costs
 * the pages of the last second or two.
 *
 * A process cannot end while one of its threads is in such a call, so a kvmmd that
 * is killed then is not gone until the device has answered, and the next one does
 * not start. Hence nothing is flushed while the device does not look well: an I/O
 * is under way for long, or one has failed.
 *
 * What could not be flushed is not tried again: the kernel says it once, and which
 * data it was it does not say. It will be a miss.
 */
#include <errno.h>
#include <unistd.h>

#include "daemon/node/nvme.h"

#define FLUSH_WELL_NS	(100 * NSEC_PER_MSEC)	/* no I/O takes longer */
#define FLUSH_LATEST	10			/* times NVME_FLUSH_NS, if one does */

static void flush_work(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, flush.work);

	nv->flush.err = fdatasync(nv->fd) < 0 ? -errno : 0;
}

static void flush_work_done(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, flush.work);

	nv->flush.running = false;
	if (nv->flush.err)
		nv->node.stats.flush_fails++;
	else
		nv->node.stats.flushes++;
}

/* Is there data that nobody has flushed, and a device to do it? */
bool nvme_flush_wanted(const struct nvme *nv)
{
	const struct node_stats *st = &nv->node.stats;

	return nv->journal.nr_blocks && !nv->flush.running &&
	       st->dir[NODE_WRITE].ios != nv->flush.ios &&
	       nv->node.state != NODE_FAILED && !nv->health.bad_row;
}

/* The one that was started first: has it been long? */
static bool takes_long(const struct list *l, uint64_t now)
{
	const struct node_io *io = list_first(l, struct node_io, priv.list);

	return io && now - io->priv.start_ns >= FLUSH_WELL_NS;
}

static bool looks_well(const struct nvme *nv, uint64_t now)
{
	uint64_t latest = nv->flush.next_ns + FLUSH_LATEST * NVME_FLUSH_NS;

	return now > latest || (!takes_long(&nv->flying, now) &&
				!takes_long(&nv->stalled, now));
}

void nvme_flush_poll(struct nvme *nv, uint64_t now)
{
	struct nvme_flush *f = &nv->flush;

	if (!nvme_flush_wanted(nv) ||
	    (now < f->next_ns && nv->node.state != NODE_OFFLINE))
		return;
	if (!looks_well(nv, now)) {
		f->look_ns = now + FLUSH_WELL_NS;
		return;
	}
	f->ios = nv->node.stats.dir[NODE_WRITE].ios;
	f->next_ns = now + NVME_FLUSH_NS;
	f->running = true;
	f->work.fn = flush_work;
	f->work.done = flush_work_done;
	work_submit(nv->aux, &f->work);
}

uint64_t nvme_flush_next(const struct nvme *nv)
{
	return nvme_flush_wanted(nv) ? max(nv->flush.next_ns,
					   nv->flush.look_ns) : DEADLINE_NONE;
}
