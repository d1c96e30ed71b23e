/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is the device well, how fast is it, and what to do with idle time.
 *
 * A miss is an I/O that failed, had a wrong checksum, or that the kernel kept
 * longer than io_timeout. Misses in a row, with no good I/O between them, move
 * the state down, and only a quiet time moves it up again:
 *
 *	ONLINE -- degrade_after misses --> DEGRADED -- fail_after --> FAILED
 *	   ^                                |    ^                      |
 *	   `-- recover_ns since last miss --'    `---- a good probe ----'
 *
 * DEGRADED takes reads, since what it has may be worth the wait, and no writes:
 * whatever it is ill with, more data on it is not the cure. FAILED takes
 * nothing, so that nobody waits for a timeout to learn of a miss. In both a
 * probe writes and reads a block of its own once in probe_ns; the way up is
 * probed, and never tried out on a page.
 *
 * Two kinds of errors are about writes only and count as no misses. EROFS and
 * EPERM: DEGRADED until a probe's write succeeds. ENOSPC, EDQUOT and EFBIG (a
 * file system that could not preallocate, a thin volume, a quota): writes are off for probe_ns, when one may try,
 * or, once a slot is freed, for FULL_NS. Not at once: the slot whose write just
 * failed is freed, too, and the next would fail in the same way, for ever and as
 * fast as the CPU can.
 *
 * Where space is not preallocated, each write may take some, and the file
 * system's free floor has to be kept while running: nvme_open.c looks how much
 * room there is above it, and writes use that up until its next look. A write
 * to where there was one before takes none and is counted all the same; so the
 * room is too small, never too large.
 *
 * Idle time goes into zero-writing segments that were never written, in chunks
 * at a limited rate and behind every read that somebody waits for.
 */
#include <errno.h>

#include "daemon/node/nvme.h"

#define RATE_FADE	16	/* a sample's weight is one in so many */
#define LAT_FORGET	256
#define RATE_STALE_NS	NSEC_PER_SEC
#define GUESS_BYTES_S	1000000000u
#define FULL_NS		(100 * NSEC_PER_MSEC)
#define GUESS_LAT_NS	(100 * NSEC_PER_USEC)

/* ---- states ---------------------------------------------------------------- */

void nvme_good(struct nvme *nv, enum node_dir dir)
{
	nv->health.bad_row = 0;
	if (dir == NODE_WRITE)
		nv->health.full = false;
}

void nvme_miss(struct nvme *nv, const char *what, uint64_t now)
{
	struct nvme_health *h = &nv->health;

	h->bad_row++;
	h->last_bad = now;
	if (nv->node.state == NODE_ONLINE &&
	    h->bad_row >= nv->opts.degrade_after) {
		h->next_probe = now + nv->opts.probe_ns;
		node_set_state(&nv->node, NODE_DEGRADED,
			       "%u misses in a row, the last a %s: no writes until it was well for %llu s",
			       h->bad_row, what, (unsigned long long)
			       (nv->opts.recover_ns / NSEC_PER_SEC));
		nvme_end_queued(nv, false, -EAGAIN);
	}
	if (nv->node.state == NODE_DEGRADED &&
	    h->bad_row >= nv->opts.fail_after) {
		node_set_state(&nv->node, NODE_FAILED,
			       "%u misses in a row, the last a %s: not used until a probe succeeds",
			       h->bad_row, what);
		nvme_end_queued(nv, true, -EIO);
	}
}

/* A write said -EROFS or -ENOSPC. */
void nvme_refused(struct nvme *nv, int err, uint64_t now)
{
	struct nvme_health *h = &nv->health;

	if (err == -EROFS) {
		h->read_only = true;
		h->last_bad = now;
		if (nv->node.state == NODE_ONLINE) {
			h->next_probe = now + nv->opts.probe_ns;
			node_set_state(&nv->node, NODE_DEGRADED,
				       "%s is read-only: no writes until a probe can write",
				       nv->opts.path);
		}
	} else {
		h->full = true;
		h->full_soon = now + min(FULL_NS, nv->opts.probe_ns);
		h->full_retry = now + nv->opts.probe_ns;
	}
	nvme_end_queued(nv, false, err);
}

void nvme_space_freed(struct nvme *nv)
{
	struct nvme_health *h = &nv->health;

	h->full_retry = min(h->full_retry, h->full_soon);
}

/* @bytes are written to a file that may have to grow for it. */
void nvme_take_room(struct nvme *nv, uint64_t bytes)
{
	if (!nvme_open_grows(nv) || !nv->opts.free_floor_pct)
		return;
	nv->open.taken += bytes;
	nv->room -= min(nv->room, bytes);
	if (nv->room)
		return;
	/* it may have been used up by counting only: look again soon */
	if (!nv->open.running)
		nv->open.next_ns = min(nv->open.next_ns,
				       now_ns() + nv->opts.probe_ns);
	nvme_end_queued(nv, false, -ENOSPC);
}

/* May an I/O be handed in? 0, or what node_submit() answers. */
int nvme_admit(struct nvme *nv, enum node_dir dir, uint64_t now)
{
	struct nvme_health *h = &nv->health;

	switch (nv->node.state) {
	case NODE_STARTING:
		return -EAGAIN;
	case NODE_FAILED:
		return -EIO;
	case NODE_OFFLINE:
		return -ESHUTDOWN;
	default:
		break;
	}
	if (dir == NODE_READ)
		return 0;
	if (h->read_only)
		return -EROFS;
	if (nv->node.state == NODE_DEGRADED)
		return -EAGAIN;
	if (!nv->room)
		return -ENOSPC;
	if (!h->full)
		return 0;
	if (now < h->full_retry)
		return -ENOSPC;
	/* this one may try, and none beside it, whatever is freed meanwhile */
	h->full_retry = now + nv->opts.probe_ns;
	h->full_soon = h->full_retry;
	return 0;
}

bool nvme_writable(const struct node *n)
{
	const struct nvme *nv = to_nvme(n);

	return n->state == NODE_ONLINE && nv->room && nvme_journal_room(nv) &&
	       (!nv->health.full || now_ns() >= nv->health.full_retry);
}

/* ---- probes ---------------------------------------------------------------- */

static void probe_start(struct nvme *nv, enum node_dir dir, uint64_t now)
{
	struct node_io *io = &nv->health.probe;

	io->dir = dir;
	io->len = NVME_PROBE_OFF;
	io->addr = nv->mem;
	io->slot.off = NVME_PROBE_OFF;
	nvme_start_own(nv, io, now);
}

static void probe_verdict(struct nvme *nv, bool good, uint64_t now)
{
	struct nvme_health *h = &nv->health;

	h->probing = false;
	h->next_probe = now + nv->opts.probe_ns;
	if (!good) {
		/* a late one was counted when it was late */
		if (!h->probe.late)
			nvme_miss(nv, "probe", now);
		return;
	}
	h->bad_row = 0;
	if (nv->node.state == NODE_FAILED) {
		node_set_state(&nv->node, NODE_DEGRADED,
			       "answers again: no writes until it was well for %llu s",
			       (unsigned long long)
			       (nv->opts.recover_ns / NSEC_PER_SEC));
	} else if (nv->node.state == NODE_DEGRADED && !h->read_only &&
		   now - h->last_bad >= nv->opts.recover_ns) {
		node_set_state(&nv->node, NODE_ONLINE, "recovered");
	}
}

static void probe_done(struct node_io *io, int result)
{
	struct nvme *nv = to_nvme(io->priv.node);
	struct nvme_health *h = &nv->health;
	uint64_t now = now_ns();

	if (nv->node.state == NODE_OFFLINE) {
		h->probing = false;
		return;
	}
	if (io->dir == NODE_READ) {
		probe_verdict(nv, !result && !io->late, now);
		return;
	}
	/* A device that can only be read is not a failed one, nor a full one. */
	h->read_only = result == -EROFS;
	if (result == -ENOSPC)
		nvme_refused(nv, result, now);
	else if (io->late || (result && !h->read_only)) {
		probe_verdict(nv, false, now);
		return;
	}
	probe_start(nv, NODE_READ, now);
}

static bool probe_wanted(const struct nvme *nv)
{
	return nvme_open_done(nv) && !nv->health.probing &&
	       (nv->node.state == NODE_DEGRADED ||
		nv->node.state == NODE_FAILED);
}

/* ---- zero-writing ---------------------------------------------------------- */

static void zero_done(struct node_io *io, int result)
{
	struct nvme *nv = to_nvme(io->priv.node);
	struct nvme_zero *z = &nv->zero;
	uint64_t now = now_ns();

	z->active = false;
	if (result) {
		slots_zero_done(&nv->slots, (uint32_t)z->seg, result);
		z->seg = -1;
		z->next_ns = now + nv->opts.probe_ns;
		if (result == -EROFS || result == -ENOSPC)
			nvme_refused(nv, result, now);
		else if (!io->late)
			nvme_miss(nv, "zero-write", now);
		return;
	}
	/* not nvme_good(): it would hide that all reads fail */
	if (!io->late)
		nv->health.full = false;
	z->off += NVME_ZERO_BYTES;
	if (z->off < nv->slots.seg_bytes)
		return;
	if (nv->slots.seg[z->seg].nr_bad)
		nvme_log_zeroed(nv, (uint32_t)z->seg);
	slots_zero_done(&nv->slots, (uint32_t)z->seg, 0);
	z->seg = -1;
}

static bool zero_wanted(const struct nvme *nv)
{
	return nvme_open_done(nv) && nv->node.state == NODE_ONLINE &&
	       nv->room && !nv->zero.active && list_empty(&nv->queue[NODE_PRIO_DEMAND]) &&
	       (nv->zero.seg >= 0 || slots_zero_wanted(&nv->slots));
}

static void zero_start(struct nvme *nv, uint64_t now)
{
	struct nvme_zero *z = &nv->zero;

	if (z->seg < 0) {
		z->seg = slots_zero_next(&nv->slots);
		z->off = 0;
	}
	z->active = true;
	z->next_ns = now + (uint64_t)NVME_ZERO_BYTES * NSEC_PER_SEC /
			   nv->opts.zero_bytes_s;
	z->io.dir = NODE_WRITE;
	z->io.len = NVME_ZERO_BYTES;
	z->io.addr = (char *)nv->mem + NVME_PROBE_OFF;
	z->io.slot.off = slots_seg_off(&nv->slots, (uint32_t)z->seg) + z->off;
	nvme_start_own(nv, &z->io, now);
}

/* ---- the loop's part ------------------------------------------------------- */

void nvme_health_poll(struct nvme *nv, uint64_t now)
{
	if (probe_wanted(nv) && now >= nv->health.next_probe) {
		nv->health.probing = true;
		nv->health.probe.done = probe_done;
		nv->node.stats.probes++;
		probe_start(nv, NODE_WRITE, now);
	}
	if (zero_wanted(nv) && now >= nv->zero.next_ns &&
	    (!nv->health.full || now >= nv->health.full_retry)) {
		nv->zero.io.done = zero_done;
		zero_start(nv, now);
	}
}

uint64_t nvme_health_next(const struct nvme *nv)
{
	if (probe_wanted(nv))
		return nv->health.next_probe;
	if (zero_wanted(nv))
		return nv->health.full ? max(nv->zero.next_ns,
					     nv->health.full_retry) :
					 nv->zero.next_ns;
	return DEADLINE_NONE;
}

/* ---- speed ----------------------------------------------------------------- */

/*
 * Bandwidth is bytes that ended over the time between ends, as long as the
 * device had something to do: with one I/O at a time that is its latency, with
 * many it is what the device delivers. Ends that are reaped together count
 * for the same stretch of time.
 */
void nvme_rate_add(struct nvme *nv, const struct node_io *io, uint64_t now)
{
	struct nvme_rate *r = &nv->rate[io->dir];
	struct node_dir_stats *st = &nv->node.stats.dir[io->dir];
	uint64_t took = now - io->priv.start_ns;

	if (!r->best_ns || took < r->best_ns)
		r->best_ns = took;
	else
		r->best_ns += (took - r->best_ns) / LAT_FORGET;
	st->lat_ns = st->lat_ns ? st->lat_ns - st->lat_ns / RATE_FADE +
				  took / RATE_FADE : took;
	r->acc_bytes += io_bytes(io);
	if (now <= r->from)
		return;
	r->sum_bytes += r->acc_bytes - r->sum_bytes / RATE_FADE;
	r->sum_ns += now - r->from - r->sum_ns / RATE_FADE;
	r->acc_bytes = 0;
	r->from = now;
	if (r->sum_ns)
		st->bytes_s = (uint64_t)((unsigned __int128)r->sum_bytes *
					 NSEC_PER_SEC / r->sum_ns);
}

/*
 * A slow spell (a throttled disk, a stopped daemon) must not be believed for
 * ever: who is told that reading is slow does not read, and so nothing would
 * ever correct it. What was not measured lately is guessed again.
 */
static uint64_t rate_now(const struct nvme *nv, enum node_dir dir)
{
	const struct node_dir_stats *st = &nv->node.stats.dir[dir];

	if (!st->bytes_s)
		return GUESS_BYTES_S;
	if (st->bytes_s < GUESS_BYTES_S && !st->inflight && !st->queued &&
	    now_ns() - nv->rate[dir].from > RATE_STALE_NS)
		return GUESS_BYTES_S;
	return st->bytes_s;
}

uint32_t nvme_estimate_us(const struct node *n, enum node_dir dir,
			  uint32_t len)
{
	const struct nvme *nv = to_nvme(n);
	const struct node_dir_stats *st = n->stats.dir;
	uint64_t bytes_s = rate_now(nv, dir);
	uint64_t lat_ns = nv->rate[dir].best_ns ? nv->rate[dir].best_ns :
						  GUESS_LAT_NS;
	unsigned __int128 ns;
	uint64_t us;

	if (n->state != NODE_ONLINE &&
	    (n->state != NODE_DEGRADED || dir == NODE_WRITE))
		return UINT32_MAX;
	/* Write-back that is still queued lets a read pass. */
	ns = st[NODE_READ].queued_bytes + len;
	ns += dir == NODE_READ ? nv->inflight_bytes[NODE_WRITE] :
				 st[NODE_WRITE].queued_bytes;
	ns = ns * NSEC_PER_SEC / bytes_s;
	us = (uint64_t)((ns > lat_ns ? ns : lat_ns) / NSEC_PER_USEC) + 1;
	return us < UINT32_MAX ? (uint32_t)us : UINT32_MAX - 1;
}
