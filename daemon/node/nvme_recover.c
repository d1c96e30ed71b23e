/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Start-up, on the loop: what nvme_scan.c found is handed to the owner.
 *
 * First the labels, then the records, oldest first, a slice each so that the
 * loop has time for others. A slot is in use before its record is handed over,
 * and free again, its record removed, when the owner does not take it. Nobody
 * can allocate before the end: until then the node is NODE_STARTING, so the
 * account is right before the first write.
 *
 * A label or a record that the owner cannot take now, for lack of memory, say,
 * holds all of it up: to leave it out would be to delete it and all that belongs
 * to it. The owner is asked again, and the node is NODE_STARTING until it has an
 * answer.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/nvme.h"

#define SLICE		512u
#define SLICE_NS	(2 * NSEC_PER_MSEC)
#define EXPECT_NS	(5 * NSEC_PER_MSEC)
#define AGAIN_NS	NSEC_PER_SEC
#define AHEAD		16u		/* records that are fetched ahead of time */

void nvme_recover_expect(struct nvme *nv, uint64_t records)
{
	/* relaxed: nothing but the number is looked at */
	atomic_store_explicit(&nv->expect, records, memory_order_relaxed);
}

/* The worker has read how many there are: the owner may prepare itself. */
static void recover_tell(struct nvme *nv)
{
	const struct node_owner *o = nv->node.owner;
	uint64_t records = atomic_exchange_explicit(&nv->expect, 0,
						    memory_order_relaxed);

	if (!records || nv->told)
		return;
	nv->told = true;
	if (o && o->expect)
		o->expect(&nv->node, records, o->arg);
}

/* Quarantine, in two passes: a segment is retired when nothing in it is used. */
static void recover_bad(struct nvme *nv)
{
	struct nvme_found *f = nv->found;
	uint32_t nr = 0;

	for (uint32_t i = 0; i < f->nr_bad; i++) {
		struct node_slot slot = { .off = f->bad[i].off };

		if (!slots_restore(&nv->slots, &slot, f->bad[i].ent.arg))
			f->bad[nr++] = f->bad[i];
	}
	for (uint32_t i = 0; i < nr; i++) {
		struct node_slot slot = { .off = f->bad[i].off };

		slots_mark_bad(&nv->slots, &slot);
		slots_free(&nv->slots, &slot);
	}
}

void nvme_recover_start(struct nvme *nv)
{
	const struct node_owner *o = nv->node.owner;
	struct nvme_found *f = nv->found;

	recover_tell(nv);
	/* attempts that left no block to be found by had numbers, too */
	nv->ckpt.number = max(f->end.number,
			      nv->open.super.opens << NVME_CKPT_SHIFT);
	nv->ckpt.area = f->area;
	nvme_journal_init(nv, f->journal_end, f->end.journal_seq);
	nv->labels = f->labels;
	memset(&f->labels, 0, sizeof(f->labels));
	nv->node.stats.recover_bytes = f->bytes;
	nv->node.stats.recover_dropped = f->dropped + f->bad_blocks + f->lost;
	node_set_state(&nv->node, NODE_STARTING, "%s: %u records are read",
		       nv->opts.path, f->nr_order);
	if (o && o->begin)
		o->begin(&nv->node, nv->labels.nr, f->nr_order, o->arg);
}

/* @what: label or record @nr */
static void recover_waits(struct nvme *nv, const char *what, uint32_t nr,
			  int err)
{
	nv->found->again_ns = deadline_in(AGAIN_NS);
	node_set_state(&nv->node, NODE_STARTING,
		       "%s: %s %u cannot be taken now: %s; it is tried again, nothing is deleted",
		       nv->opts.path, what, nr, strerror(-err));
}

/* One more label; they are gone through by number, since some go. */
static bool recover_label(struct nvme *nv)
{
	const struct node_owner *o = nv->node.owner;
	struct nvme_labels *ls = &nv->labels;
	int err;

	for (uint32_t i = 0; i < ls->nr; i++) {
		const struct nvme_label *l = &ls->v[i];

		if (l->id < nv->found->next_label)
			continue;
		err = o->label ? o->label(&nv->node, l->id, l->bytes, l->len,
					  o->arg) : 0;
		if (err && err != -ENOENT) {
			recover_waits(nv, "label", l->id, err);
			return true;
		}
		nv->found->next_label = l->id + 1;
		if (err)
			nvme_label_del(&nv->node, l->id);
		return true;
	}
	return false;
}

/* The order is that of writing, which is not that of the table. */
static void recover_prefetch(const struct nvme_found *f)
{
	const char *e;

	if (f->next + AHEAD >= f->nr_order)
		return;
	e = (const char *)&f->rec[f->order[f->next + AHEAD]];
	__builtin_prefetch(e);
	__builtin_prefetch(e + 64);
}

static void recover_record(const struct nvme_ent_add *e,
			   struct node_record *rec)
{
	rec->slot.off = e->off;
	rec->slot.seq = e->seq;
	rec->len = e->len;
	rec->crc = e->crc;
	memcpy(rec->meta, e->meta, sizeof(rec->meta));
}

/**
 * struct slice - records that are handed over together
 * @at:		where each stands in nvme_found.order
 * @taken:	by the owner
 */
struct slice {
	struct node_record rec[SLICE];
	uint32_t	at[SLICE];
	bool		taken[SLICE];
	unsigned int	nr;
};

/* Their slots are in use from here on. */
static void slice_fill(struct nvme *nv, struct slice *s)
{
	struct nvme_found *f = nv->found;

	s->nr = 0;
	memset(s->taken, false, sizeof(s->taken));
	while (s->nr < SLICE && f->next < f->nr_order) {
		const struct nvme_ent_add *e = &f->rec[f->order[f->next]];
		struct node_record *rec = &s->rec[s->nr];

		s->at[s->nr] = f->next++;
		recover_prefetch(f);
		recover_record(e, rec);
		if (nv->slots.nr_used >= nv->open.super.records ||
		    slots_restore(&nv->slots, &rec->slot, e->ent.arg))
			nv->node.stats.recover_dropped++;
		else
			s->nr++;
	}
}

/* From record @first on nothing was decided: as if they had not been there. */
static void slice_back(struct nvme *nv, struct slice *s, unsigned int first)
{
	struct nvme_found *f = nv->found;

	/* those between them that were dropped will be once more */
	nv->node.stats.recover_dropped -= f->next - s->at[first] -
					  (s->nr - first);
	f->next = s->at[first];
	for (unsigned int i = first; i < s->nr; i++)
		slots_free(&nv->slots, &s->rec[i].slot);
	s->nr = first;
	recover_waits(nv, "record", f->next, -ENOMEM);
}

/* The next records; false: there are none left. */
static bool recover_slice(struct nvme *nv)
{
	struct nvme_found *f = nv->found;
	const struct node_owner *o = nv->node.owner;
	unsigned int done;
	struct slice s;

	slice_fill(nv, &s);
	nv->node.used = nv->slots.used_bytes;
	done = s.nr && o->records ?
	       o->records(&nv->node, s.rec, s.nr, s.taken, o->arg) : s.nr;
	if (done < s.nr)
		slice_back(nv, &s, done);
	for (unsigned int i = 0; i < s.nr; i++) {
		if (s.taken[i])
			f->taken++;
		else
			node_slot_free(&nv->node, &s.rec[i].slot);
	}
	return f->next < f->nr_order;
}

/* The sentence for it. Blocks that are damaged are no pages: nobody knows what
 * was in them. */
static void recover_say(struct nvme *nv, const struct nvme_found *f)
{
	unsigned long long dropped = f->nr_order - f->taken + f->dropped;
	unsigned long long damaged = f->bad_blocks + f->lost;
	char note[128] = "";

	if (damaged)
		snprintf(note, sizeof(note),
			 "; %llu blocks of metadata are damaged: pages are lost, some that were removed may be back",
			 damaged);
	if (f->nr_order)
		node_set_state(&nv->node, NODE_ONLINE,
			       "%u pages were found again, %llu had to be dropped, %llu ms%s",
			       f->taken, dropped, (unsigned long long)
			       (nv->node.stats.recover_ns / NSEC_PER_MSEC),
			       note);
	else
		node_set_state(&nv->node, NODE_ONLINE, nv->open.rebuilt ?
			       "emptied: %s%s" : "empty%s%s",
			       nv->open.rebuilt ? nv->open.msg.text : "", note);
}

static void recover_end(struct nvme *nv)
{
	struct nvme_found *f = nv->found;
	struct node_stats *st = &nv->node.stats;
	const struct node_owner *o = nv->node.owner;

	recover_bad(nv);
	nv->node.used = nv->slots.used_bytes;
	st->recovered = f->taken;
	st->recover_ns = now_ns() - f->start_ns;
	nv->found = NULL;
	if (o->recovered)
		o->recovered(&nv->node, f->nr_order ? 0 : -ENOENT, o->arg);
	recover_say(nv, f);
	/* the journal may have been refused already, by removals */
	if (nv->health.read_only)
		nvme_refused(nv, -EROFS, now_ns());
	nvme_found_free(f);
}

/* True: there is more to do at once. */
bool nvme_recover_poll(struct nvme *nv)
{
	uint64_t end = now_ns() + SLICE_NS;

	if (nv->open.running)
		recover_tell(nv);
	/* without an owner: he has left, and what is there stays as it is */
	if (!nv->found || !nv->node.owner || nv->node.state == NODE_OFFLINE)
		return false;
	do {
		if (!deadline_past(nv->found->again_ns))
			return false;
		if (recover_label(nv) || recover_slice(nv))
			continue;
		recover_end(nv);
		return false;
	} while (now_ns() < end);
	return true;
}

uint64_t nvme_recover_next(const struct nvme *nv)
{
	if (nv->node.state == NODE_OFFLINE)
		return DEADLINE_NONE;
	if (nv->found)
		return nv->node.owner ? nv->found->again_ns : DEADLINE_NONE;
	/* the worker has no way of telling but to be asked */
	return nv->open.running && !nv->told && nv->node.owner &&
	       nv->node.state != NODE_ONLINE ? deadline_in(EXPECT_NS) :
					       DEADLINE_NONE;
}
