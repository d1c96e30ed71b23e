/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Telling the medium which segments are empty: a block device by BLKDISCARD, a
 * file that was not preallocated by punching a hole, which gives the space back
 * to the file system. A preallocated file keeps what was reserved for it, or the
 * next write may find the file system full; so nothing is done there.
 *
 * Off unless asked for. A store that is full, as a cache is, has hardly a segment
 * that stays empty; a drive that is over-provisioned gains nothing by hearing of
 * it; and some drives answer nobody while they discard. It pays where the space
 * is shared: a sparse file, a thin volume.
 *
 * One segment at a time, at a limited rate, on a worker, while nobody waits for
 * a read. The segment is nobody's meanwhile. What a record may still say of its
 * slots does not matter: whoever reads one of them finds zeroes, or what was
 * there, and the checksum knows both for a miss.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>

#include "daemon/node/nvme.h"

/* A guess: far below what drives manage, far above what a cache empties. */
#define DISCARD_BYTES_S	(UINT64_C(512) << 20)

static void discard_work(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, discard.work);
	uint64_t r[2] = {
		slots_seg_off(&nv->slots, nv->discard.seg),
		nv->slots.seg_bytes,
	};
	int rc = nv->open.block ?
		 ioctl(nv->fd, BLKDISCARD, r) :
		 fallocate(nv->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
			   (off_t)r[0], (off_t)r[1]);

	nv->discard.err = rc < 0 ? -errno : 0;
}

static void discard_work_done(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, discard.work);
	struct nvme_discard *d = &nv->discard;
	uint64_t now = now_ns();

	d->running = false;
	slots_discard_done(&nv->slots, d->seg, !d->err);
	if (!d->err) {
		nv->node.stats.discarded_bytes += nv->slots.seg_bytes;
		/* there may be room again: look soon */
		if (!nv->open.block && !nv->open.running)
			nv->open.next_ns = min(nv->open.next_ns,
					       now + nv->opts.probe_ns);
	} else if (d->err == -EOPNOTSUPP || d->err == -ENOTTY ||
		   d->err == -EINVAL) {
		d->no_use = true;
	} else {
		d->next_ns = max(d->next_ns, now + nv->opts.probe_ns);
	}
}

static bool discard_wanted(const struct nvme *nv)
{
	return nv->opts.discard && nvme_open_done(nv) &&
	       (nv->open.block || nv->open.sparse) && !nv->discard.no_use &&
	       !nv->discard.running && nv->node.state == NODE_ONLINE &&
	       list_empty(&nv->queue[NODE_PRIO_DEMAND]) &&
	       slots_discard_wanted(&nv->slots);
}

void nvme_discard_poll(struct nvme *nv, uint64_t now)
{
	struct nvme_discard *d = &nv->discard;
	int seg;

	if (now < d->next_ns || !discard_wanted(nv))
		return;
	seg = slots_discard_next(&nv->slots);
	if (seg < 0)
		return;
	d->seg = (uint32_t)seg;
	d->running = true;
	d->next_ns = now + (uint64_t)nv->slots.seg_bytes * NSEC_PER_SEC /
			   DISCARD_BYTES_S;
	d->work.fn = discard_work;
	d->work.done = discard_work_done;
	work_submit(nv->aux, &d->work);
}

uint64_t nvme_discard_next(const struct nvme *nv)
{
	return discard_wanted(nv) ? nv->discard.next_ns : DEADLINE_NONE;
}

const char *nvme_discard_note(const struct nvme *nv)
{
	if (!nv->opts.discard)
		return "";
	if (!nv->open.block && !nv->open.sparse)
		return "; nothing is discarded: the file is preallocated";
	return nv->discard.no_use ?
	       "; nothing is discarded: the medium has no such thing" : "";
}
