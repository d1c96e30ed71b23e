/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoints: all that is known, written to the one of two areas that does not
 * hold the last one, so that the journal before it can be forgotten.
 *
 *	IDLE -> LABELS -> RECORDS -> BAD --------> WRITE -> JOURNAL -> CLOSE -> IDLE
 *	                              `-> LOG -----^ `--------------^
 *
 * The node keeps no records, the owner does: it is asked for them piece by
 * piece, while pages come and go. So a checkpoint is a picture that was not
 * taken at one instant, and only together with the journal from its begin
 * (@from) to its end (@until) is it one: what was removed after it was
 * collected, and what was added after the owner's cursor had passed, is in
 * there. Hence the block that makes it valid is written when the journal is on
 * the medium up to there.
 *
 * Where the journal cannot be written (an entry was lost, the ring is full, the
 * medium refuses), waiting for it would be for ever. Then its blocks from @from
 * to @until, which are all in memory for the same reason, become part of the
 * checkpoint, behind what was collected (LOG): it needs nothing of the ring
 * before @until.
 *
 * The first block of the area is written last, and makes it valid. All parts go
 * with RWF_DSYNC, one after the other, behind reads that somebody waits for and
 * no faster than the background may be, until the journal gets short.
 *
 * One that fails is begun anew, later each time: it is all of it that is written
 * again, and a block that cannot be written may be the last.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/nvme.h"
#include "ipc/base/bitmap.h"

#define RETRY_MAX_NS	(600 * NSEC_PER_SEC)

static uint64_t area_off(const struct nvme *nv, int area)
{
	const struct nvme_super *sb = &nv->open.super;

	return sb->ckpt_off + (uint64_t)area * sb->ckpt_bytes;
}

/* ---- collecting ------------------------------------------------------------ */

static struct nvme_block *buf_block(const struct nvme_ckpt *ck, uint32_t ix)
{
	return (void *)(ck->buf + (size_t)ix * NVME_BLOCK);
}

static void buf_seal(struct nvme *nv)
{
	struct nvme_ckpt *ck = &nv->ckpt;

	nvme_block_seal(buf_block(ck, ck->nr), NVME_KIND_CKPT,
			nv->open.super.uuid,
			ck->written + ck->nr - ck->out + 1, ck->number);
	ck->nr++;
}

/* Have an empty block at @nr. */
static bool buf_room(struct nvme_ckpt *ck)
{
	if (ck->nr >= ck->max) {
		uint32_t max = ck->max ? 2 * ck->max : 2 * NVME_CKPT_BLOCKS;
		void *buf;

		if (posix_memalign(&buf, NVME_BLOCK, (size_t)max * NVME_BLOCK))
			return false;
		if (ck->nr)
			memcpy(buf, ck->buf, (size_t)ck->nr * NVME_BLOCK);
		free(ck->buf);
		ck->buf = buf;
		ck->max = max;
	}
	nvme_block_init(buf_block(ck, ck->nr));
	return true;
}

static void *ckpt_add(struct nvme *nv, enum nvme_ent_type type, uint32_t bytes,
		      uint32_t arg)
{
	struct nvme_ckpt *ck = &nv->ckpt;
	void *e;

	if (ck->failed)
		return NULL;
	e = nvme_block_add(buf_block(ck, ck->nr), type, bytes, arg);
	if (e)
		return e;
	buf_seal(nv);
	if (!buf_room(ck)) {
		ck->failed = true;
		return NULL;
	}
	return nvme_block_add(buf_block(ck, ck->nr), type, bytes, arg);
}

void nvme_record_again(struct node *n, const struct node_record *rec)
{
	struct nvme *nv = to_nvme(n);
	uint32_t slot_bytes = nvme_open_done(nv) ?
			      slots_recorded(&nv->slots, &rec->slot) : 0;
	struct nvme_ent_add *e;

	if (!slot_bytes || nv->ckpt.stage != CKPT_RECORDS)
		return;		/* removed: the owner forgot to forget it */
	e = ckpt_add(nv, NVME_ENT_ADD, sizeof(*e), slot_bytes);
	if (!e)
		return;
	nvme_ent_fill(e, rec);
	nv->ckpt.nr_records++;
}

static void collect_label(struct nvme *nv, const struct nvme_label *l)
{
	uint32_t at = 0;

	while (at < l->len) {
		uint32_t n = min(l->len - at, NVME_LABEL_PART);
		struct nvme_ent_label *e = ckpt_add(nv, NVME_ENT_LABEL,
						    (uint32_t)sizeof(*e) + n,
						    l->id);

		if (!e)
			return;
		e->total = l->len;
		e->at = at;
		memcpy(e + 1, l->bytes + at, n);
		at += n;
	}
}

/* One label each call. True: that was the last. */
static bool collect_labels(struct nvme *nv)
{
	struct nvme_ckpt *ck = &nv->ckpt;

	/* by number, since some may go meanwhile */
	for (uint32_t i = 0; i < nv->labels.nr; i++) {
		const struct nvme_label *l = &nv->labels.v[i];

		if (l->id < ck->cursor)
			continue;
		collect_label(nv, l);
		ck->cursor = (uint64_t)l->id + 1;
		return false;
	}
	return true;
}

static uint64_t blocks_left(const struct nvme *nv)
{
	const struct nvme_ckpt *ck = &nv->ckpt;
	uint64_t have = nv->open.super.ckpt_bytes / NVME_BLOCK - 1;

	return have - min(have, ck->written + ck->nr - ck->out);
}

/* Quarantine is worth less than records: as many as there is room for. */
static void collect_bad(struct nvme *nv)
{
	const struct slot_store *s = &nv->slots;
	uint64_t keep = nv->ckpt.whole ?
			nvme_journal_mark(nv) - nv->ckpt.from : 0;

	for (uint32_t i = 0; i < s->nr_segs; i++) {
		struct node_slot slot = { .seq = s->next_seq };
		uint32_t ix = 0;

		while (blocks_left(nv) > keep + 1 &&
		       slots_next_bad(s, i, &ix, &slot.off)) {
			struct nvme_ent_slot *e;

			e = ckpt_add(nv, NVME_ENT_BAD, sizeof(*e),
				     s->seg[i].slot_bytes);
			if (!e)
				return;
			e->off = slot.off;
			e->seq = slot.seq;
		}
	}
}

/* A block of the journal each call. True: that was the last. */
static bool collect_log(struct nvme *nv)
{
	struct nvme_ckpt *ck = &nv->ckpt;
	const struct nvme_block *b;

	if (ck->cursor >= ck->until)
		return true;
	b = nvme_journal_block(nv, ck->cursor);
	if (!b || !buf_room(ck)) {
		ck->failed = true;
		return false;
	}
	memcpy(buf_block(ck, ck->nr), b, NVME_BLOCK);
	buf_seal(nv);
	ck->cursor++;
	return false;
}

/* One step; a stage that is over leads to the next. */
static void collect_step(struct nvme *nv)
{
	struct nvme_ckpt *ck = &nv->ckpt;

	switch (ck->stage) {
	case CKPT_LABELS:
		if (!collect_labels(nv))
			return;
		ck->cursor = 0;
		ck->stage = CKPT_RECORDS;
		return;
	case CKPT_RECORDS:
		if (!nv->node.owner->collect(&nv->node, &ck->cursor,
					     nv->node.owner->arg))
			return;
		ck->stage = CKPT_BAD;
		return;
	case CKPT_BAD:
		collect_bad(nv);
		if (!ck->failed && buf_block(ck, ck->nr)->bytes)
			buf_seal(nv);
		ck->until = nvme_journal_mark(nv);
		ck->cursor = ck->from;
		ck->stage = ck->whole ? CKPT_LOG : CKPT_WRITE;
		return;
	case CKPT_LOG:
		for (unsigned int i = 0; i < NVME_GROUP_BLOCKS; i++) {
			if (ck->failed)
				return;
			if (!collect_log(nv))
				continue;
			ck->from = ck->until;
			ck->stage = CKPT_WRITE;
			return;
		}
		return;
	default:
		return;
	}
}

static bool collect_wanted(const struct nvme_ckpt *ck)
{
	return ck->stage < CKPT_WRITE && !ck->failed &&
	       ck->nr - ck->out < NVME_CKPT_BLOCKS;
}

/* ---- writing --------------------------------------------------------------- */

static void ckpt_begin(struct nvme *nv, bool whole)
{
	struct nvme_ckpt *ck = &nv->ckpt;

	/* A number for each attempt: a last block may be on the medium although
	 * its write failed, and must not be taken for this one's. */
	ck->number++;
	ck->stage = CKPT_LABELS;
	ck->whole = whole;
	ck->again = false;
	ck->cursor = 0;
	ck->nr = ck->out = 0;
	ck->written = 0;
	ck->nr_records = 0;
	ck->failed = !buf_room(ck);
	ck->from = nvme_journal_mark(nv);
}

/* It is over, for better or worse. */
static void ckpt_end(struct nvme *nv, uint64_t retry_ns)
{
	struct nvme_ckpt *ck = &nv->ckpt;

	ck->stage = CKPT_IDLE;
	ck->retry_ns = retry_ns;
	free(ck->buf);
	ck->buf = NULL;
	ck->max = 0;
}

static void ckpt_failed(struct nvme *nv, uint64_t now)
{
	uint64_t wait = nv->opts.probe_ns << min(nv->ckpt.fails, 20u);

	nv->node.stats.ckpt_fails++;
	nv->ckpt.fails++;
	ckpt_end(nv, now + min(wait, RETRY_MAX_NS));
	if (nv->ckpt.whole)
		nvme_journal_no_ckpt(nv);
}

void nvme_ckpt_note(const struct nvme *nv, char *buf, size_t len)
{
	const struct nvme_ckpt *ck = &nv->ckpt;
	uint64_t now = now_ns();

	buf[0] = '\0';
	if (ck->fails)
		snprintf(buf, len,
			 "; %u checkpoints in a row failed, the next may begin in %llu s",
			 ck->fails, (unsigned long long)
			 ((ck->retry_ns - min(ck->retry_ns, now)) /
			  NSEC_PER_SEC));
}

static void ckpt_closed(struct nvme *nv)
{
	struct nvme_ckpt *ck = &nv->ckpt;

	ck->area = !ck->area;
	nv->node.stats.ckpts++;
	ck->fails = 0;
	/* what was lost since it was collected still needs another one */
	nvme_journal_trim(nv, ck->from, ck->whole && !ck->again);
	ckpt_end(nv, 0);
}

static void part_done(struct node_io *io, int result)
{
	struct nvme *nv = to_nvme(io->priv.node);
	struct nvme_ckpt *ck = &nv->ckpt;
	uint64_t now = now_ns();

	ck->io_active = false;
	if (result) {
		if (result == -EROFS || result == -ENOSPC)
			nvme_refused(nv, result, now);
		else if (!io->late)
			nvme_miss(nv, "checkpoint write", now);
		ckpt_failed(nv, now);
		return;
	}
	nv->node.stats.ckpt_bytes += io->len;
	if (ck->stage == CKPT_CLOSE) {
		ckpt_closed(nv);
		return;
	}
	ck->out += ck->io_blocks;
	ck->written += ck->io_blocks;
	if (ck->out == ck->nr && ck->stage < CKPT_LOG) {
		/* to the front with the open block */
		memcpy(buf_block(ck, 0), buf_block(ck, ck->nr), NVME_BLOCK);
		ck->nr = ck->out = 0;
	} else if (ck->out == ck->nr) {
		ck->nr = ck->out = 0;
	}
}

static void part_start(struct nvme *nv, void *addr, uint32_t blocks,
		       uint64_t at, uint64_t now)
{
	struct nvme_ckpt *ck = &nv->ckpt;
	struct node_io *io = &ck->io;

	ck->io_active = true;
	ck->io_blocks = blocks;
	ck->next_ns = now + (uint64_t)blocks * NVME_BLOCK * NSEC_PER_SEC /
			    nv->opts.zero_bytes_s;
	io->dir = NODE_WRITE;
	io->len = blocks * NVME_BLOCK;
	io->addr = addr;
	io->slot.off = area_off(nv, !ck->area) + at * NVME_BLOCK;
	io->done = part_done;
	nvme_start_meta(nv, io, now);
}

static void close_start(struct nvme *nv, uint64_t now)
{
	struct nvme_ckpt *ck = &nv->ckpt;
	struct nvme_block *b;
	struct nvme_ent_end *e;

	ck->nr = ck->out = 0;
	if (!buf_room(ck)) {
		ckpt_failed(nv, now);
		return;
	}
	b = buf_block(ck, 0);
	e = nvme_block_add(b, NVME_ENT_END, sizeof(*e), 0);
	e->number = ck->number;
	e->opens = nv->open.super.opens;
	e->journal_seq = ck->from;
	e->nr_blocks = ck->written;
	e->nr_records = ck->nr_records;
	e->next_seq = nv->slots.next_seq;
	e->next_label = nv->labels.next;
	b->writer = nv->open.writer;
	nvme_block_seal(b, NVME_KIND_END, nv->open.super.uuid, 0, e->number);
	part_start(nv, b, 1, 0, now);
}

/* Whatever can be written now. */
static void write_step(struct nvme *nv, uint64_t now)
{
	struct nvme_ckpt *ck = &nv->ckpt;
	uint32_t n = min(ck->nr - ck->out, NVME_CKPT_BLOCKS);

	if (n && ck->written + n > nv->open.super.ckpt_bytes / NVME_BLOCK - 1) {
		ckpt_failed(nv, now);
		return;
	}
	if (n) {
		part_start(nv, buf_block(ck, ck->out), n, ck->written + 1, now);
		return;
	}
	if (ck->stage == CKPT_WRITE)
		ck->stage = CKPT_JOURNAL;
	if (ck->stage == CKPT_JOURNAL &&
	    (ck->whole || nv->journal.done >= ck->until))
		ck->stage = CKPT_CLOSE;
	if (ck->stage == CKPT_CLOSE)
		close_start(nv, now);
}

/* May a part be written, or does the device have better things to do? */
static bool ckpt_turn(const struct nvme *nv)
{
	const struct nvme_journal *j = &nv->journal;

	return nv->ckpt.whole ||
	       j->head - j->tail > j->nr_blocks - j->nr_blocks / 4 ||
	       list_empty(&nv->queue[NODE_PRIO_DEMAND]);
}

/* The areas' space was taken when the store was made, where it stays taken. */
static bool ckpt_may(const struct nvme *nv)
{
	return nv->node.owner && nv->node.owner->collect &&
	       nv->node.state == NODE_ONLINE &&
	       (nv->room || !nv->open.overcommit);
}

/* Has the one under way something to do for itself? */
static bool ckpt_waits(const struct nvme *nv)
{
	const struct nvme_ckpt *ck = &nv->ckpt;

	return ck->io_active ||
	       (ck->stage == CKPT_JOURNAL && !ck->whole && !ck->again &&
		nv->journal.done < ck->until);
}

void nvme_ckpt_poll(struct nvme *nv, uint64_t now)
{
	struct nvme_ckpt *ck = &nv->ckpt;
	bool wanted, whole;

	if (!nv->journal.nr_blocks || ck->io_active)
		return;
	wanted = nvme_journal_wants(nv, &whole);
	if (ck->stage != CKPT_IDLE && (ck->again || !ckpt_may(nv) ||
				       (whole && !ck->whole)))
		ckpt_end(nv, 0);
	if (ck->stage == CKPT_IDLE) {
		if (!wanted || now < ck->retry_ns || !ckpt_may(nv))
			return;
		ckpt_begin(nv, whole);
	}
	/* one step each round of the loop, for who else is in it */
	if (collect_wanted(ck))
		collect_step(nv);
	if (ck->failed) {
		ckpt_failed(nv, now);
		return;
	}
	if (!collect_wanted(ck) && ckpt_turn(nv) &&
	    (ck->whole || now >= ck->next_ns))
		write_step(nv, now);
}

uint64_t nvme_ckpt_next(const struct nvme *nv)
{
	const struct nvme_ckpt *ck = &nv->ckpt;
	bool whole;

	if (!nv->journal.nr_blocks || !ckpt_may(nv))
		return DEADLINE_NONE;
	if (ck->stage == CKPT_IDLE)
		return nvme_journal_wants(nv, &whole) ? ck->retry_ns :
							DEADLINE_NONE;
	if (ck->again || (!ck->io_active && collect_wanted(ck)))
		return 0;
	if (ckpt_waits(nv) || !ckpt_turn(nv))
		return DEADLINE_NONE;
	return ck->whole ? 0 : ck->next_ns;
}

void nvme_ckpt_fini(struct nvme *nv)
{
	ckpt_end(nv, 0);
}
