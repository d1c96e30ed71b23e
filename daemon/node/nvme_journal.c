/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The journal: a ring of blocks on the medium, and the entries that are on
 * their way there.
 *
 * Entries go into the open block; full blocks are numbered on and on, and a
 * block's number says where it belongs in the ring. Groups of blocks are
 * written with RWF_DSYNC, NVME_GROUP_NS after their first entry or when there
 * are NVME_GROUP_BLOCKS of them, one group after the other. So what is on the
 * medium is always a beginning of what was said, however a crash tears the last
 * group. Nobody waits for a group but who asked for node_record_flush().
 *
 *	tail ........ done ---- sent ---- due ---- head
 *	 needed by      group     must be    may    open
 *	 recovery     under way  written    wait    block
 *
 * The ring is short. What is behind a checkpoint (@tail) is free, and half a
 * ring is the sign to take one. Where that comes too late, blocks wait in
 * memory: node_slot_alloc() gives nothing out while many do, so what can still
 * come is an entry for each slot in use, 24 bytes of removal each at the worst.
 *
 * An entry that finds no memory is not forgotten, since whoever removed a page
 * must not see it again. It leaves a gap: nothing that came later is written
 * until a checkpoint has been taken that needs nothing from before. The same
 * checkpoint is the way out where the ring is full, or refuses to be written:
 * after NVME_JOURNAL_TRIES a group is given up. Who tried on would find no end,
 * since each failure is a miss, and a node with misses takes no checkpoints.
 */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/nvme.h"

#define CHUNK_SPARES	4u

/**
 * struct chunk - memory of a group
 * @first:	number of its first block, a multiple of NVME_GROUP_BLOCKS
 */
struct chunk {
	struct list	link;
	uint64_t	first;
	char		*mem;
};

/**
 * struct flush - somebody waits
 * @until:	for all blocks below
 */
struct flush {
	struct list	link;
	uint64_t	until;
	void		(*fn)(int err, void *arg);
	void		*arg;
};

/* ---- memory ---------------------------------------------------------------- */

static struct chunk *chunk_new(struct nvme *nv)
{
	struct nvme_journal *j = &nv->journal;
	struct chunk *c = list_first(&j->spare, struct chunk, link);
	struct fault f = { .how = FAULT_NONE };

	if (fault_ask(&nv->node, FAULT_GET, false, &f))
		return NULL;
	if (c) {
		list_del(&c->link);
		j->nr_spare--;
		return c;
	}
	c = calloc(1, sizeof(*c));
	if (!c)
		return NULL;
	if (posix_memalign((void **)&c->mem, NVME_BLOCK,
			   NVME_GROUP_BLOCKS * NVME_BLOCK)) {
		free(c);
		return NULL;
	}
	return c;
}

static void chunk_free(struct chunk *c)
{
	free(c->mem);
	free(c);
}

/* Give back what is written. */
static void chunks_trim(struct nvme_journal *j)
{
	struct chunk *c;

	while ((c = list_first(&j->chunks, struct chunk, link)) && !j->active &&
	       c->first + NVME_GROUP_BLOCKS <= j->done) {
		list_del(&c->link);
		if (j->nr_spare >= CHUNK_SPARES) {
			chunk_free(c);
			continue;
		}
		list_add_tail(&j->spare, &c->link);
		j->nr_spare++;
	}
}

/* ---- entries --------------------------------------------------------------- */

/* An empty block number @head; NULL: no memory. */
static struct nvme_block *block_open(struct nvme *nv)
{
	struct nvme_journal *j = &nv->journal;
	uint64_t first = round_down(j->head, NVME_GROUP_BLOCKS);
	struct chunk *c = list_last(&j->chunks, struct chunk, link);

	if (!c || c->first != first) {
		c = chunk_new(nv);
		if (!c)
			return NULL;
		c->first = first;
		list_add_tail(&j->chunks, &c->link);
	}
	j->open = (void *)(c->mem + (j->head - first) * NVME_BLOCK);
	nvme_block_init(j->open);
	return j->open;
}

static void block_close(struct nvme *nv)
{
	struct nvme_journal *j = &nv->journal;

	if (!j->open)
		return;
	j->open->writer = nv->open.writer;
	nvme_block_seal(j->open, NVME_KIND_JOURNAL, nv->open.super.uuid,
			j->head, nv->open.super.opens);
	j->open = NULL;
	j->head++;
}

/* An entry is lost; see the top. Its place is a block that is never written. */
static void entry_lost(struct nvme *nv)
{
	struct nvme_journal *j = &nv->journal;

	j->gap = min(j->gap, j->head);
	j->head++;
	nv->ckpt.again = nv->ckpt.stage != CKPT_IDLE;
	nv->node.stats.journal_lost++;
}

static void *entry_add(struct nvme *nv, enum nvme_ent_type type,
		       uint32_t bytes, uint32_t arg)
{
	struct nvme_journal *j = &nv->journal;
	void *e = NULL;

	if (!j->nr_blocks)
		return NULL;
	if (j->open)
		e = nvme_block_add(j->open, type, bytes, arg);
	if (!e) {
		block_close(nv);
		if (!block_open(nv)) {
			entry_lost(nv);
			return NULL;
		}
		e = nvme_block_add(j->open, type, bytes, arg);
	}
	if (!j->first_ns)
		j->first_ns = now_ns();
	return e;
}

void nvme_ent_fill(struct nvme_ent_add *e, const struct node_record *rec)
{
	e->off = rec->slot.off;
	e->seq = rec->slot.seq;
	e->len = rec->len;
	e->crc = rec->crc;
	memcpy(e->meta, rec->meta, sizeof(e->meta));
}

void nvme_log_add(struct nvme *nv, const struct node_record *rec,
		  uint32_t slot_bytes)
{
	struct nvme_ent_add *e = entry_add(nv, NVME_ENT_ADD, sizeof(*e),
					   slot_bytes);

	if (e)
		nvme_ent_fill(e, rec);
}

void nvme_log_slot(struct nvme *nv, enum nvme_ent_type type,
		   const struct node_slot *slot, uint32_t slot_bytes)
{
	struct nvme_ent_slot *e = entry_add(nv, type, sizeof(*e), slot_bytes);

	if (!e)
		return;
	e->off = slot->off;
	e->seq = slot->seq;
}

void nvme_log_zeroed(struct nvme *nv, uint32_t seg)
{
	entry_add(nv, NVME_ENT_ZEROED, sizeof(struct nvme_ent), seg);
}

void nvme_log_label(struct nvme *nv, const struct nvme_label *l)
{
	uint32_t at = 0;

	while (at < l->len) {
		uint32_t n = min(l->len - at, NVME_LABEL_PART);
		struct nvme_ent_label *e;

		e = entry_add(nv, NVME_ENT_LABEL,
			      (uint32_t)sizeof(*e) + n, l->id);
		if (e) {
			e->total = l->len;
			e->at = at;
			memcpy(e + 1, l->bytes + at, n);
		}
		at += n;
	}
}

void nvme_log_label_del(struct nvme *nv, uint32_t id)
{
	entry_add(nv, NVME_ENT_LABEL_DEL, sizeof(struct nvme_ent), id);
}

/* ---- who waits ------------------------------------------------------------- */

int nvme_record_flush(struct node *n, void (*fn)(int err, void *arg),
		      void *arg)
{
	struct nvme *nv = to_nvme(n);
	struct nvme_journal *j = &nv->journal;
	struct flush *f;

	if (!n->owner)
		return -EOPNOTSUPP;
	if (!j->nr_blocks)
		return n->state == NODE_STARTING ? -EAGAIN : -EIO;
	f = calloc(1, sizeof(*f));
	if (!f)
		return -ENOMEM;
	f->fn = fn;
	f->arg = arg;
	f->until = nvme_journal_mark(nv);
	j->due = j->head;
	list_add_tail(&j->flushes, &f->link);
	return 0;
}

/* Tell who waits for blocks below @until; called from node_poll() only. */
static void flushes_end(struct nvme_journal *j, uint64_t until, int err)
{
	struct flush *f;

	while ((f = list_first(&j->flushes, struct flush, link)) &&
	       f->until <= until) {
		list_del(&f->link);
		f->fn(err, f->arg);
		free(f);
	}
}

/* Is it only a checkpoint that can help? */
static bool given_up(const struct nvme_journal *j)
{
	return j->fails >= NVME_JOURNAL_TRIES;
}

/* And is there none to come soon? Then nobody waits for one. */
static bool flush_hopeless(const struct nvme *nv)
{
	return given_up(&nv->journal) && !nv->journal.active &&
	       nv->node.state != NODE_ONLINE;
}

void nvme_journal_no_ckpt(struct nvme *nv)
{
	flushes_end(&nv->journal, UINT64_MAX, -EIO);
}

/* ---- writing --------------------------------------------------------------- */

static void group_done(struct node_io *io, int result)
{
	struct nvme *nv = to_nvme(io->priv.node);
	struct nvme_journal *j = &nv->journal;
	struct node_stats *st = &nv->node.stats;
	uint64_t now = now_ns();

	j->active = false;
	if (result) {
		j->fails++;
		j->retry_ns = now + min(nv->opts.probe_ns, NSEC_PER_SEC);
		st->journal_fails++;
		if (result == -EROFS || result == -ENOSPC)
			nvme_refused(nv, result, now);
		else if (!io->late)
			nvme_miss(nv, "journal write", now);
		flushes_end(j, j->sent, -EIO);
		j->done = max(j->done, j->tail);
		chunks_trim(j);
		return;
	}
	/* not nvme_good(): it would hide that all reads fail */
	j->fails = 0;
	st->journal_groups++;
	st->journal_bytes += io->len;
	j->done = max(j->sent, j->tail);
	j->due = max(j->due, j->done);
	chunks_trim(j);
}

/* What may be written, up to this block. */
static uint64_t journal_limit(const struct nvme_journal *j)
{
	return min(min(j->head, j->gap), j->tail + j->nr_blocks);
}

/* How far a group may go that begins at @done; @done: there is none to write. */
static uint64_t group_end(const struct nvme_journal *j)
{
	uint64_t chunk = round_down(j->done, NVME_GROUP_BLOCKS) +
			 NVME_GROUP_BLOCKS;
	uint64_t end = min(journal_limit(j), chunk);

	if (given_up(j) || end <= j->done ||
	    (end < chunk && j->due <= j->done))
		return j->done;
	return end;
}

static void group_start(struct nvme *nv, uint64_t end, uint64_t now)
{
	struct nvme_journal *j = &nv->journal;
	struct chunk *c = list_first(&j->chunks, struct chunk, link);
	struct node_io *io = &j->io;

	assert(c && c->first <= j->done &&
	       end <= c->first + NVME_GROUP_BLOCKS);
	j->active = true;
	j->sent = end;
	io->dir = NODE_WRITE;
	io->len = (uint32_t)(end - j->done) * NVME_BLOCK;
	io->addr = c->mem + (j->done - c->first) * NVME_BLOCK;
	io->slot.off = nv->open.super.journal_off +
		       j->done % j->nr_blocks * NVME_BLOCK;
	io->done = group_done;
	nvme_start_meta(nv, io, now);
}

void nvme_journal_poll(struct nvme *nv, uint64_t now)
{
	struct nvme_journal *j = &nv->journal;
	uint64_t end;

	if (!j->nr_blocks)
		return;
	if (j->first_ns && (nv->node.state == NODE_OFFLINE ||
			    now - j->first_ns >= NVME_GROUP_NS)) {
		j->due = nvme_journal_mark(nv);
		j->first_ns = 0;
	}
	if (!j->active) {
		flushes_end(j, j->done, 0);
		chunks_trim(j);
	}
	if (flush_hopeless(nv))
		flushes_end(j, UINT64_MAX, -EIO);
	if (j->active || now < j->retry_ns)
		return;
	end = group_end(j);
	if (end > j->done)
		group_start(nv, end, now);
}

uint64_t nvme_journal_next(const struct nvme *nv)
{
	const struct nvme_journal *j = &nv->journal;
	const struct flush *f = list_first(&j->flushes, struct flush, link);
	uint64_t next = DEADLINE_NONE;

	if (!j->nr_blocks)
		return next;
	if (j->first_ns)
		next = j->first_ns + NVME_GROUP_NS;
	if (f && (flush_hopeless(nv) || (!j->active && f->until <= j->done)))
		return 0;
	if (!j->active && group_end(j) > j->done)
		next = j->retry_ns;
	return next;
}

uint64_t nvme_journal_mark(struct nvme *nv)
{
	block_close(nv);
	return nv->journal.head;
}

/* ---- bounds ---------------------------------------------------------------- */

/* May slots be given out? Some of the ring is left for those that are. */
bool nvme_journal_room(const struct nvme *nv)
{
	const struct nvme_journal *j = &nv->journal;

	return !j->nr_blocks ||
	       (j->gap == UINT64_MAX && !j->fails &&
		j->head - j->done < NVME_JOURNAL_BACKLOG &&
		j->head - j->tail < j->nr_blocks - j->nr_blocks / 8);
}

const char *nvme_journal_note(const struct nvme *nv)
{
	const struct nvme_journal *j = &nv->journal;

	if (nvme_journal_room(nv))
		return "";
	if (given_up(j))
		return "; the journal cannot be written, writes are off until a checkpoint is";
	if (j->fails)
		return "; a write of the journal failed and is tried again, writes are off";
	if (j->gap != UINT64_MAX)
		return "; the journal had no memory, writes are off until a checkpoint is written";
	if (j->head - j->done >= NVME_JOURNAL_BACKLOG)
		return "; the journal is behind, writes are off";
	return "; the journal is full, writes are off until a checkpoint is written";
}

bool nvme_journal_wants(const struct nvme *nv, bool *whole)
{
	const struct nvme_journal *j = &nv->journal;

	*whole = j->gap != UINT64_MAX || given_up(j) ||
		 j->head - j->tail >= j->nr_blocks;
	return j->nr_blocks &&
	       (*whole || j->head - j->tail > j->nr_blocks / 2);
}

const struct nvme_block *nvme_journal_block(const struct nvme *nv,
					    uint64_t seq)
{
	const struct nvme_journal *j = &nv->journal;
	const struct chunk *c;

	if (seq < j->done || seq >= j->head)
		return NULL;
	list_for_each_entry(c, &j->chunks, link)
		if (seq >= c->first && seq < c->first + NVME_GROUP_BLOCKS)
			return (const void *)(c->mem + (seq - c->first) *
						       NVME_BLOCK);
	return NULL;
}

void nvme_journal_trim(struct nvme *nv, uint64_t from, bool whole)
{
	struct nvme_journal *j = &nv->journal;

	j->tail = from;
	if (whole) {
		j->gap = UINT64_MAX;
		j->fails = 0;
		j->retry_ns = 0;
	} else if (j->gap != UINT64_MAX) {
		j->gap = max(j->gap, from);	/* one since it was collected */
	}
	if (!j->active)
		j->done = max(j->done, from);
	j->due = max(j->due, j->done);
}

/* ---- life ------------------------------------------------------------------ */

void nvme_journal_init(struct nvme *nv, uint64_t head, uint64_t tail)
{
	struct nvme_journal *j = &nv->journal;

	j->head = j->done = j->due = j->sent = head;
	j->tail = tail;
	j->gap = UINT64_MAX;
	j->nr_blocks = nv->open.super.journal_bytes / NVME_BLOCK;
}

/* Is nothing left to be written that still can be? */
bool nvme_journal_idle(const struct nvme *nv)
{
	const struct nvme_journal *j = &nv->journal;

	return !j->nr_blocks ||
	       (!j->active && (given_up(j) ||
			       (!j->open && j->done >= journal_limit(j))));
}

void nvme_journal_last_try(struct nvme *nv)
{
	struct nvme_journal *j = &nv->journal;

	if (!given_up(j))
		return;
	j->fails = NVME_JOURNAL_TRIES - 1;
	j->retry_ns = 0;
}

bool nvme_journal_check(const struct nvme *nv)
{
	const struct nvme_journal *j = &nv->journal;

	return !j->nr_blocks ||
	       (j->tail <= j->head && j->done <= j->head &&
		(!j->active || j->sent > j->done) &&
		j->gap >= j->done);
}

void nvme_journal_fini(struct nvme *nv)
{
	struct nvme_journal *j = &nv->journal;
	struct chunk *c, *tmp;

	flushes_end(j, UINT64_MAX, -ESHUTDOWN);
	list_for_each_entry_safe(c, tmp, &j->chunks, link)
		chunk_free(c);
	list_for_each_entry_safe(c, tmp, &j->spare, link)
		chunk_free(c);
	list_init(&j->chunks);
	list_init(&j->spare);
	j->nr_blocks = 0;
}
