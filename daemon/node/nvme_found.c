/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a store remembers, while it is read: a table of records, labels and slots
 * in quarantine. Nothing that is read is believed: a record must lie on a slot, a
 * segment has slots of one size only (the newest decides), and so on; what does
 * not fit is dropped and counted.
 *
 * Records are kept once for each place in the store, in tables by segment and
 * slot: records that were made one after the other lie beside each other, which
 * spares a million of them as many cache misses. (off, seq) decides: a newer one
 * replaces an older one, and a removal removes what is not newer. Where the
 * checkpoint saw a segment in two classes, the removals come from the journal.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/node/nvme_scan.h"

#define HUGE_BYTES	(2u << 20)
#define FOUND_MAX	(UINT32_C(1) << 31)

/* ---- the table of records ---------------------------------------------------- */

static bool slot_good(const struct scan *sc, uint64_t off, uint32_t slot_bytes)
{
	const struct nvme_super *sb = sc->sb;
	uint64_t at;

	if (off < sb->data_off || off >= sb->bytes || !slot_bytes ||
	    slot_bytes % NODE_ALIGN || slot_bytes > sb->seg_bytes)
		return false;
	at = (off - sb->data_off) & (sb->seg_bytes - 1);
	return (off - sb->data_off) / sb->seg_bytes < sc->nv->open.nr_segs &&
	       !(at % slot_bytes) && at + slot_bytes <= sb->seg_bytes;
}

static struct seg_view *seg_of(const struct scan *sc, uint64_t off)
{
	return &sc->seg[(off - sc->sb->data_off) / sc->sb->seg_bytes];
}

/* Which slot of its segment; it lies on one. */
static uint32_t slot_of(const struct scan *sc, const struct seg_view *v,
			uint64_t off)
{
	return (uint32_t)((off - sc->sb->data_off) & (sc->sb->seg_bytes - 1)) /
	       v->slot_bytes;
}

/* Have room for @max records; large, and touched once from end to end. */
static int found_grow(struct nvme_found *f, uint32_t max)
{
	void *rec;
	size_t len = (size_t)max * sizeof(*f->rec);

	if (posix_memalign(&rec, HUGE_BYTES, len))
		return -ENOMEM;
	madvise(rec, len, MADV_HUGEPAGE);
	if (f->nr)
		memcpy(rec, f->rec, (size_t)f->nr * sizeof(*f->rec));
	free(f->rec);
	f->rec = rec;
	f->max = max;
	return 0;
}

/* What is known of this segment is of another class, and older. */
static int seg_recut(struct scan *sc, struct seg_view *v, uint32_t slot_bytes)
{
	uint32_t nr = sc->sb->seg_bytes / slot_bytes;
	uint32_t *place = calloc(nr, sizeof(*place));

	if (!place)
		return -ENOMEM;
	for (uint32_t i = 0; v->slot_bytes &&
	     i < sc->sb->seg_bytes / v->slot_bytes; i++) {
		if (!v->place[i])
			continue;
		v->conflicts += sc->f->rec[v->place[i] - 1].ent.type ==
				NVME_ENT_ADD;
		sc->f->rec[v->place[i] - 1].ent.type = NVME_ENT_NONE;
	}
	free(v->place);
	v->place = place;
	v->slot_bytes = slot_bytes;
	return 0;
}

static int found_add(struct scan *sc, const struct nvme_ent_add *e)
{
	struct nvme_found *f = sc->f;
	struct seg_view *v;
	uint32_t *place;
	int err;

	if (!slot_good(sc, e->off, e->ent.arg) || !e->len ||
	    e->len > e->ent.arg || e->seq == UINT64_MAX) {
		f->dropped++;
		return 0;
	}
	f->next_seq = max(f->next_seq, e->seq + 1);
	v = seg_of(sc, e->off);
	if (v->slot_bytes != e->ent.arg) {
		if (v->slot_bytes && v->seq > e->seq) {
			v->conflicts++;
			return 0;
		}
		err = seg_recut(sc, v, e->ent.arg);
		if (err)
			return err;
	}
	v->seq = max(v->seq, e->seq);
	place = &v->place[slot_of(sc, v, e->off)];
	if (*place && f->rec[*place - 1].ent.type == NVME_ENT_ADD &&
	    f->rec[*place - 1].seq > e->seq)
		return 0;
	if (!*place) {
		if (f->nr == f->max) {
			err = f->max > FOUND_MAX / 2 ? -ENOMEM :
			      found_grow(f, 2 * f->max);
			if (err)
				return err;
		}
		*place = ++f->nr;
	}
	f->rec[*place - 1] = *e;
	return 0;
}

static void found_del(struct scan *sc, const struct nvme_ent_slot *e)
{
	struct nvme_found *f = sc->f;
	struct seg_view *v;
	uint32_t place = 0;

	if (!slot_good(sc, e->off, NODE_ALIGN) || e->seq == UINT64_MAX)
		return;
	f->next_seq = max(f->next_seq, e->seq + 1);
	v = seg_of(sc, e->off);
	if (v->slot_bytes && slot_good(sc, e->off, v->slot_bytes))
		place = v->place[slot_of(sc, v, e->off)];
	if (place && f->rec[place - 1].ent.type == NVME_ENT_ADD &&
	    f->rec[place - 1].seq <= e->seq)
		f->rec[place - 1].ent.type = NVME_ENT_NONE;
	else if (v->conflicts && e->seq < v->seq)
		v->conflicts--;		/* it was gone: no conflict at all */
}

/* ---- labels and quarantine --------------------------------------------------- */

static int found_label(struct scan *sc, const struct nvme_ent_label *e)
{
	struct nvme_labels *ls = &sc->f->labels;
	struct nvme_label *l = nvme_label_find(ls, e->ent.arg);
	uint32_t n = e->ent.bytes - (uint32_t)sizeof(*e);
	int err;

	if (!e->total || e->total > NODE_LABEL_MAX || e->at >= e->total ||
	    n < min(e->total - e->at, NVME_LABEL_PART) ||
	    e->ent.arg == UINT32_MAX)
		return 0;
	n = min(n, e->total - e->at);
	if (l && !e->at && l->have < l->len) {
		/* the same once more, with its first half torn off */
		nvme_label_drop(ls, e->ent.arg);
		l = NULL;
	}
	if (!l) {
		if (e->at)
			return 0;
		err = nvme_label_room(ls, e->ent.arg, e->total, &l);
		if (err)
			return err == -ENOSPC ? 0 : err;
	}
	if (l->len != e->total || l->have != e->at)
		return 0;	/* there already: the checkpoint had it, too */
	memcpy(l->bytes + e->at, e + 1, n);
	l->have += n;
	return 0;
}

static int found_bad(struct scan *sc, const struct nvme_ent_slot *e)
{
	struct nvme_found *f = sc->f;

	if (!slot_good(sc, e->off, e->ent.arg))
		return 0;
	if (f->nr_bad == f->max_bad) {
		uint32_t max = f->max_bad ? 2 * f->max_bad : 64;
		struct nvme_ent_slot *bad = realloc(f->bad,
						    max * sizeof(*bad));

		if (!bad)
			return -ENOMEM;
		f->bad = bad;
		f->max_bad = max;
	}
	f->bad[f->nr_bad++] = *e;
	return 0;
}

static void found_zeroed(struct scan *sc, uint64_t seg)
{
	struct nvme_found *f = sc->f;
	uint64_t from = sc->sb->data_off + seg * sc->sb->seg_bytes;
	uint32_t nr = 0;

	for (uint32_t i = 0; i < f->nr_bad; i++)
		if (f->bad[i].off < from ||
		    f->bad[i].off >= from + sc->sb->seg_bytes)
			f->bad[nr++] = f->bad[i];
	f->nr_bad = nr;
}

int nvme_found_block(struct scan *sc, const struct nvme_block *b)
{
	const struct nvme_ent *e = NULL;
	int err = 0;

	while (!err && (e = nvme_block_next(b, e))) {
		switch (e->type) {
		case NVME_ENT_ADD:
			err = found_add(sc, (const void *)e);
			break;
		case NVME_ENT_DEL:
			found_del(sc, (const void *)e);
			break;
		case NVME_ENT_LABEL:
			err = found_label(sc, (const void *)e);
			break;
		case NVME_ENT_LABEL_DEL:
			nvme_label_drop(&sc->f->labels, e->arg);
			break;
		case NVME_ENT_BAD:
			err = found_bad(sc, (const void *)e);
			break;
		case NVME_ENT_ZEROED:
			found_zeroed(sc, e->arg);
			break;
		default:
			break;
		}
	}
	return err;
}

/* ---- what can be true --------------------------------------------------------- */

/* Records of another size than their segment's, and of slots in quarantine. */
static void weed(struct scan *sc)
{
	struct nvme_found *f = sc->f;

	for (uint32_t i = 0; i < f->nr_bad; i++)
		found_del(sc, &f->bad[i]);
	for (uint32_t i = 0; i < sc->nv->open.nr_segs; i++)
		f->dropped += sc->seg[i].conflicts;
}

/**
 * struct sort_key - a record on its way to its place in the order
 *
 * Sorted instead of the records' numbers alone: a pass would then look at all
 * records, in an order in which nearly each is a miss of the cache.
 */
struct sort_key {
	uint64_t	seq;
	uint32_t	ix;
};

#define SORT_BITS	12u
#define SORT_SIZE	(1u << SORT_BITS)

/* A pass of a radix sort by SORT_BITS of the sequence numbers at @shift. */
static void sort_pass(const struct sort_key *from, struct sort_key *to,
		      uint32_t nr, unsigned int shift)
{
	uint32_t count[SORT_SIZE] = { 0 }, sum = 0;

	for (uint32_t i = 0; i < nr; i++)
		count[from[i].seq >> shift & (SORT_SIZE - 1)]++;
	for (uint32_t b = 0; b < SORT_SIZE; b++) {
		uint32_t n = count[b];

		count[b] = sum;
		sum += n;
	}
	for (uint32_t i = 0; i < nr; i++)
		to[count[from[i].seq >> shift & (SORT_SIZE - 1)]++] = from[i];
}

static int sort_records(struct nvme_found *f)
{
	size_t room = max(f->nr, 1u);
	struct sort_key *from = malloc(room * sizeof(*from));
	struct sort_key *to = malloc(room * sizeof(*to));
	uint64_t any = 0, all = UINT64_MAX;

	f->order = malloc(room * sizeof(*f->order));
	if (!from || !to || !f->order) {
		free(from);
		free(to);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < f->nr; i++) {
		if (f->rec[i].ent.type != NVME_ENT_ADD)
			continue;
		from[f->nr_order++] = (struct sort_key){ f->rec[i].seq, i };
		any |= f->rec[i].seq;
		all &= f->rec[i].seq;
	}
	for (unsigned int shift = 0; shift < 64; shift += SORT_BITS) {
		struct sort_key *was = from;

		/* digits that are the same everywhere sort nothing */
		if (!((any ^ all) >> shift & (SORT_SIZE - 1)) || !f->nr_order)
			continue;
		sort_pass(from, to, f->nr_order, shift);
		from = to;
		to = was;
	}
	for (uint32_t i = 0; i < f->nr_order; i++)
		f->order[i] = from[i].ix;
	free(from);
	free(to);
	return 0;
}

int nvme_found_finish(struct scan *sc)
{
	struct nvme_labels *ls = &sc->f->labels;

	weed(sc);
	for (uint32_t i = ls->nr; i-- > 0;)
		if (ls->v[i].have < ls->v[i].len)
			nvme_label_drop(ls, ls->v[i].id);
	ls->next = max(ls->next, sc->f->end.next_label);
	sc->f->next_seq = max(sc->f->next_seq, sc->f->end.next_seq);
	return sort_records(sc->f);
}

/* ---- life ----------------------------------------------------------------------- */

void nvme_found_free(struct nvme_found *f)
{
	if (!f)
		return;
	nvme_labels_fini(&f->labels);
	free(f->rec);
	free(f->order);
	free(f->bad);
	free(f);
}

void nvme_found_end(struct scan *sc)
{
	for (uint32_t i = 0; sc->seg && i < sc->nv->open.nr_segs; i++)
		free(sc->seg[i].place);
	free(sc->seg);
	sc->seg = NULL;
}

int nvme_found_begin(struct scan *sc, const struct nvme_ent_end *end)
{
	uint64_t want = end->nr_records + min(end->nr_records / 8,
					      (uint64_t)1 << 20);

	/* what was written there is not to be believed, either */
	want = clamp(want, (uint64_t)1024, sc->sb->records + 1024);
	want = min(want, (uint64_t)FOUND_MAX);
	nvme_found_free(sc->f);
	nvme_found_end(sc);
	sc->f = calloc(1, sizeof(*sc->f));
	sc->seg = calloc(max(sc->nv->open.nr_segs, 1u), sizeof(*sc->seg));
	if (!sc->f || !sc->seg)
		return -ENOMEM;
	sc->f->end = *end;
	return found_grow(sc->f, (uint32_t)want);
}
