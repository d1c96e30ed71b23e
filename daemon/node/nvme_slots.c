/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Slots and segments.
 *
 * A store is cut into segments, and a segment, while it is in use, into slots
 * of one size. Pages are immutable: a page is written once to a free slot, and
 * the slot is free again when the page is dropped, so there is nothing to
 * clean, copy or compact and a byte is written once. What can go wrong with
 * that is fragmentation between sizes: a segment changes its size only when it
 * is empty. Slots are given out from as few segments as possible, and
 * slots_victim() names the segment that is emptied most cheaply; whether to do
 * that is the caller's decision. (A log with cleaning was considered: at 90 %
 * full and near-random deaths it writes every byte three to five times.)
 *
 * Sizes. A slot is as long as its page, rounded up to 4 KiB; engines use few
 * different page sizes. State blobs may have any length, though, and a segment
 * for each would waste the store: once SLOT_EXACT_CLASSES sizes are in use, new
 * ones are rounded up to an eighth of a power of two, at most 12.5 % longer.
 *
 * States of a segment:
 *
 *	RAW -> ZEROING -> READY -> (in use) -> READY
 *	RAW -> (in use, when nothing else is left) -> RAW
 *	(in use) -> SUSPECT	when it empties and slots are in quarantine
 *	SUSPECT -> ZEROING -> READY, or DEAD after SLOT_ZERO_TRIES failures
 *	READY -> DISCARD -> READY	if the medium is to know of empty ones
 *
 * The first write to a preallocated block of a file is a transaction of the
 * file system, which is why segments are zero-written before use; writing a
 * bad block again is also what makes a drive replace it, which is why that
 * brings slots back from quarantine.
 */
#include "daemon/node/nvme_slots.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"

#define PARTIAL_LOOK	8u	/* segments looked at for a better one */

static struct list *seg_list(struct slot_store *s, enum seg_state state)
{
	switch (state) {
	case SEG_READY:
		return &s->ready;
	case SEG_RAW:
		return &s->raw;
	case SEG_SUSPECT:
		return &s->suspect;
	default:
		return NULL;
	}
}

int slots_init(struct slot_store *s, uint64_t data_off, uint32_t seg_bytes,
	       uint32_t nr_segs, const uint64_t *written, uint64_t first_seq)
{
	memset(s, 0, sizeof(*s));
	s->seg = calloc(nr_segs, sizeof(*s->seg));
	if (!s->seg)
		return -ENOMEM;
	s->nr_segs = nr_segs;
	s->seg_bytes = seg_bytes;
	s->data_off = data_off;
	s->next_seq = first_seq;
	list_init(&s->ready);
	list_init(&s->raw);
	list_init(&s->suspect);
	for (uint32_t i = 0; i < nr_segs; i++) {
		struct slot_seg *seg = &s->seg[i];

		seg->state = !written || bitmap_test(written, i) ? SEG_READY :
								   SEG_RAW;
		s->nr_ready += seg->state == SEG_READY;
		list_init(&seg->link);
		list_add_tail(seg_list(s, seg->state), &seg->link);
	}
	return 0;
}

static void seg_free_maps(struct slot_seg *seg)
{
	if (seg->map != seg->word)
		free(seg->map);
	free(seg->bad);
	seg->map = NULL;
	seg->rec = NULL;
	seg->bad = NULL;
}

void slots_fini(struct slot_store *s)
{
	for (uint32_t i = 0; i < s->nr_segs; i++)
		seg_free_maps(&s->seg[i]);
	free(s->seg);
	s->seg = NULL;
	s->nr_segs = 0;
}

static struct slot_class *class_find(const struct slot_store *s,
				     uint32_t slot_bytes)
{
	for (size_t i = 0; i < ARRAY_SIZE(s->class); i++)
		if (s->class[i].slot_bytes == slot_bytes)
			return (struct slot_class *)&s->class[i];
	return NULL;
}

/* Size of the slot that @len bytes get; see the top. */
static uint32_t class_size(const struct slot_store *s, uint32_t len)
{
	uint32_t want = (uint32_t)round_up(len, NODE_ALIGN);
	uint32_t step;

	if (s->nr_classes < SLOT_EXACT_CLASSES || class_find(s, want))
		return want;
	step = max_t(uint32_t, (1u << ilog2(want)) / 8, NODE_ALIGN);
	return min_t(uint32_t, (uint32_t)round_up(want, step), s->seg_bytes);
}

/* Cut an empty segment into slots of @slot_bytes; put it on its class's list. */
static int seg_cut(struct slot_store *s, struct slot_seg *seg,
		   uint32_t slot_bytes)
{
	struct slot_class *c = class_find(s, slot_bytes);
	uint32_t nr_slots = s->seg_bytes / slot_bytes;

	if (!c) {
		c = class_find(s, 0);
		if (!c)
			return -ENOSPC;
	}
	seg->word[0] = seg->word[1] = 0;
	seg->map = nr_slots <= 64 ? seg->word :
		   calloc(2 * BITMAP_WORDS(nr_slots), sizeof(*seg->map));
	if (!seg->map)
		return -ENOMEM;
	seg->rec = seg->map + BITMAP_WORDS(nr_slots);
	seg->nr_slots = nr_slots;
	if (!c->slot_bytes) {
		list_init(&c->partial);
		c->slot_bytes = slot_bytes;
		s->nr_classes++;
	}
	seg->slot_bytes = slot_bytes;
	seg->hint = 0;
	c->nr_segs++;
	list_move(&c->partial, &seg->link);
	return 0;
}

static struct slot_seg *seg_assign(struct slot_store *s, uint32_t slot_bytes)
{
	struct slot_seg *seg = list_first(&s->ready, struct slot_seg, link);

	if (!seg)
		seg = list_first(&s->raw, struct slot_seg, link);
	return seg && !seg_cut(s, seg, slot_bytes) ? seg : NULL;
}

/* @seg has no used slot any more: back to the empty ones of its state. */
static void seg_retire(struct slot_store *s, struct slot_seg *seg)
{
	struct slot_class *c = class_find(s, seg->slot_bytes);

	if (!--c->nr_segs) {
		c->slot_bytes = 0;
		s->nr_classes--;
	}
	if (seg->nr_bad) {
		/* keeps its size, for the account of bad bytes */
		s->nr_ready -= seg->state == SEG_READY;
		seg->state = SEG_SUSPECT;
	} else {
		seg_free_maps(seg);
		seg->slot_bytes = 0;
		seg->nr_slots = 0;
		seg->spent = true;
	}
	/* in front, to be used again before what the medium knows to be empty */
	list_move(seg_list(s, seg->state), &seg->link);
}

static uint64_t *quarantine(const struct slot_seg *seg)
{
	return seg->bad + BITMAP_WORDS(seg->nr_slots);
}

/* Segment and index of a slot that is in use; NULL when it is none. */
static struct slot_seg *slot_find(const struct slot_store *s,
				  const struct node_slot *slot, uint32_t *ix)
{
	struct slot_seg *seg;
	uint64_t rel;

	if (slot->off < s->data_off)
		return NULL;
	rel = slot->off - s->data_off;
	if (rel / s->seg_bytes >= s->nr_segs)
		return NULL;
	seg = &s->seg[rel / s->seg_bytes];
	rel %= s->seg_bytes;
	if (!seg->nr_used || rel % seg->slot_bytes ||
	    rel / seg->slot_bytes >= seg->nr_slots)
		return NULL;
	*ix = (uint32_t)(rel / seg->slot_bytes);
	if (!bitmap_test(seg->map, *ix) ||
	    (seg->bad && bitmap_test(quarantine(seg), *ix)))
		return NULL;
	return seg;
}

/*
 * A segment with a free slot. Where the medium has no space left for what was
 * never written, slots that were are the ones that still can be: rather those.
 */
static struct slot_seg *seg_partial(const struct slot_class *c)
{
	struct slot_seg *seg;
	unsigned int looked = 0;

	list_for_each_entry(seg, &c->partial, link) {
		if (seg->state == SEG_READY)
			return seg;
		if (++looked == PARTIAL_LOOK)
			break;
	}
	return list_first(&c->partial, struct slot_seg, link);
}

static void slot_take(struct slot_store *s, struct slot_seg *seg, uint32_t ix)
{
	bitmap_set(seg->map, ix);
	seg->nr_used++;
	if (seg->nr_used + seg->nr_bad == seg->nr_slots)
		list_del(&seg->link);
	s->used_bytes += seg->slot_bytes;
	s->nr_used++;
}

int slots_alloc(struct slot_store *s, uint32_t len, struct node_slot *slot)
{
	struct slot_seg *seg = NULL;
	struct slot_class *c;
	uint32_t slot_bytes;
	size_t ix;

	if (!len || len > s->seg_bytes)
		return -E2BIG;
	slot_bytes = class_size(s, len);
	c = class_find(s, slot_bytes);
	if (c)
		seg = seg_partial(c);
	if (!seg)
		seg = seg_assign(s, slot_bytes);
	if (!seg)
		return -ENOSPC;

	ix = bitmap_next_clear(seg->map, seg->nr_slots, seg->hint);
	if (ix == seg->nr_slots)
		ix = bitmap_next_clear(seg->map, seg->nr_slots, 0);
	assert(ix < seg->nr_slots);
	slot_take(s, seg, (uint32_t)ix);
	seg->hint = (uint32_t)ix + 1;
	slot->off = slots_seg_off(s, (uint32_t)(seg - s->seg)) +
		    ix * slot_bytes;
	slot->seq = s->next_seq++;
	return 0;
}

int slots_free(struct slot_store *s, const struct node_slot *slot)
{
	uint32_t ix;
	struct slot_seg *seg = slot_find(s, slot, &ix);
	bool was_full;

	if (!seg)
		return -EINVAL;
	was_full = seg->nr_used + seg->nr_bad == seg->nr_slots;
	seg->nr_used--;
	bitmap_clear(seg->rec, ix);
	s->used_bytes -= seg->slot_bytes;
	s->nr_used--;
	if (seg->bad && bitmap_test(seg->bad, ix)) {
		bitmap_set(quarantine(seg), ix);
		seg->nr_bad++;
		s->nr_bad++;
		s->bad_bytes += seg->slot_bytes;
	} else {
		bitmap_clear(seg->map, ix);
		if (was_full) {
			struct slot_class *c = class_find(s, seg->slot_bytes);

			list_add_tail(&c->partial, &seg->link);
		}
	}
	if (!seg->nr_used)
		seg_retire(s, seg);
	return 0;
}

uint32_t slots_bytes(const struct slot_store *s, const struct node_slot *slot)
{
	uint32_t ix;
	const struct slot_seg *seg = slot_find(s, slot, &ix);

	return seg ? seg->slot_bytes : 0;
}

void slots_mark_bad(struct slot_store *s, const struct node_slot *slot)
{
	uint32_t ix;
	struct slot_seg *seg = slot_find(s, slot, &ix);

	if (!seg)
		return;
	if (!seg->bad)
		seg->bad = calloc(2 * BITMAP_WORDS(seg->nr_slots),
				  sizeof(*seg->bad));
	/* without memory it stays in use: the next reader finds out again */
	if (seg->bad)
		bitmap_set(seg->bad, ix);
}

uint32_t slots_record(struct slot_store *s, const struct node_slot *slot)
{
	uint32_t ix;
	struct slot_seg *seg = slot_find(s, slot, &ix);

	if (!seg)
		return 0;
	bitmap_set(seg->rec, ix);
	return seg->slot_bytes;
}

uint32_t slots_recorded(const struct slot_store *s,
			const struct node_slot *slot)
{
	uint32_t ix;
	const struct slot_seg *seg = slot_find(s, slot, &ix);

	return seg && bitmap_test(seg->rec, ix) ? seg->slot_bytes : 0;
}

uint32_t slots_forget(struct slot_store *s, const struct node_slot *slot)
{
	uint32_t ix;
	struct slot_seg *seg = slot_find(s, slot, &ix);

	if (!seg || !bitmap_test(seg->rec, ix))
		return 0;
	bitmap_clear(seg->rec, ix);
	return seg->slot_bytes;
}

int slots_restore(struct slot_store *s, const struct node_slot *slot,
		  uint32_t slot_bytes)
{
	uint64_t rel = slot->off - s->data_off;
	struct slot_seg *seg;
	uint32_t ix;
	int err;

	if (slot->off < s->data_off || rel / s->seg_bytes >= s->nr_segs ||
	    !slot_bytes || slot_bytes % NODE_ALIGN || slot_bytes > s->seg_bytes)
		return -EINVAL;
	seg = &s->seg[rel / s->seg_bytes];
	rel %= s->seg_bytes;
	if (rel % slot_bytes || rel + slot_bytes > s->seg_bytes)
		return -EINVAL;
	ix = (uint32_t)(rel / slot_bytes);
	if (!seg->nr_used) {
		if (seg->nr_bad || seg->state > SEG_READY)
			return -EINVAL;
		err = seg_cut(s, seg, slot_bytes);
		if (err)
			return err;
	}
	if (seg->slot_bytes != slot_bytes || bitmap_test(seg->map, ix))
		return -EINVAL;
	slot_take(s, seg, ix);
	bitmap_set(seg->rec, ix);
	return 0;
}

bool slots_next_bad(const struct slot_store *s, uint32_t seg_ix, uint32_t *ix,
		    uint64_t *off)
{
	const struct slot_seg *seg = &s->seg[seg_ix];
	size_t i;

	if (!seg->nr_bad)
		return false;
	i = bitmap_next_set(quarantine(seg), seg->nr_slots, *ix);
	if (i == seg->nr_slots)
		return false;
	*ix = (uint32_t)i + 1;
	*off = slots_seg_off(s, seg_ix) + i * seg->slot_bytes;
	return true;
}

int slots_victim(const struct slot_store *s, uint32_t len, unsigned int nth,
		 struct node_range *r)
{
	uint32_t mine = class_size(s, len);
	const struct slot_seg *best = NULL;
	const struct slot_seg *last = NULL;

	do {
		best = NULL;
		for (uint32_t i = 0; i < s->nr_segs; i++) {
			const struct slot_seg *seg = &s->seg[i];
			uint64_t bytes = (uint64_t)seg->nr_used *
					 seg->slot_bytes;
			uint64_t floor = !last ? 0 :
					 (uint64_t)last->nr_used *
					 last->slot_bytes;

			if (!seg->nr_used || seg->slot_bytes == mine)
				continue;
			if (last && (bytes < floor ||
				     (bytes == floor && seg <= last)))
				continue;
			if (!best || bytes < (uint64_t)best->nr_used *
					     best->slot_bytes)
				best = seg;
		}
		last = best;
	} while (best && nth--);
	if (!best)
		return -ENOENT;
	r->off = slots_seg_off(s, (uint32_t)(best - s->seg));
	r->end = r->off + s->seg_bytes;
	r->slot_bytes = best->slot_bytes;
	r->nr_used = best->nr_used;
	return 0;
}

/* The first segment of @head that is still worth a try. */
static struct slot_seg *zero_candidate(const struct list *head)
{
	struct slot_seg *seg;

	list_for_each_entry(seg, head, link)
		if (seg->tries < SLOT_ZERO_TRIES)
			return seg;
	return NULL;
}

bool slots_zero_wanted(const struct slot_store *s)
{
	return zero_candidate(&s->suspect) || zero_candidate(&s->raw);
}

int slots_zero_next(struct slot_store *s)
{
	struct slot_seg *seg = zero_candidate(&s->suspect);

	if (!seg)
		seg = zero_candidate(&s->raw);
	if (!seg)
		return -ENOENT;
	seg->state = SEG_ZEROING;
	list_del(&seg->link);
	return (int)(seg - s->seg);
}

void slots_zero_done(struct slot_store *s, uint32_t ix, int err)
{
	struct slot_seg *seg = &s->seg[ix];

	if (!err) {
		s->nr_bad -= seg->nr_bad;
		s->bad_bytes -= (uint64_t)seg->nr_bad * seg->slot_bytes;
		seg_free_maps(seg);
		seg->nr_bad = 0;
		seg->slot_bytes = 0;
		seg->nr_slots = 0;
		seg->tries = 0;
		seg->state = SEG_READY;
		s->nr_ready++;
	} else {
		/* no space, or too late: that says nothing of the medium */
		seg->tries += err == -EIO;
		if (!seg->nr_bad)
			seg->state = SEG_RAW;
		else if (seg->tries < SLOT_ZERO_TRIES)
			seg->state = SEG_SUSPECT;
		else
			seg->state = SEG_DEAD;
	}
	if (seg->state != SEG_DEAD)
		list_add_tail(seg_list(s, seg->state), &seg->link);
}

/* Those that were used stand in front of those that the medium knows of. */
static struct slot_seg *discard_candidate(const struct slot_store *s)
{
	struct slot_seg *seg = list_first(&s->ready, struct slot_seg, link);

	return seg && seg->spent && s->ready.next != s->ready.prev ? seg : NULL;
}

bool slots_discard_wanted(const struct slot_store *s)
{
	return discard_candidate(s);
}

int slots_discard_next(struct slot_store *s)
{
	struct slot_seg *seg = discard_candidate(s);

	if (!seg)
		return -ENOENT;
	seg->state = SEG_DISCARD;
	s->nr_ready--;
	list_del(&seg->link);
	return (int)(seg - s->seg);
}

void slots_discard_done(struct slot_store *s, uint32_t ix, bool ok)
{
	struct slot_seg *seg = &s->seg[ix];

	seg->state = SEG_READY;
	seg->spent = !ok;
	s->nr_ready++;
	if (ok)
		list_add_tail(&s->ready, &seg->link);
	else
		list_add(&s->ready, &seg->link);
}

static bool seg_check(const struct slot_store *s, const struct slot_seg *seg)
{
	uint32_t full = seg->nr_used + seg->nr_bad;

	if (!seg->nr_used) {
		/* empty: of no class, and on the list of its state */
		if (seg->state != SEG_SUSPECT && seg->state != SEG_DEAD &&
		    seg->state != SEG_ZEROING && seg->nr_bad)
			return false;
		return list_empty(&seg->link) == (seg->state == SEG_ZEROING ||
						  seg->state == SEG_DISCARD ||
						  seg->state == SEG_DEAD);
	}
	return (seg->state == SEG_READY || seg->state == SEG_RAW) &&
	       seg->slot_bytes && full <= seg->nr_slots &&
	       bitmap_weight(seg->map, seg->nr_slots) == full &&
	       class_find(s, seg->slot_bytes) &&
	       list_empty(&seg->link) == (full == seg->nr_slots);
}

bool slots_check(const struct slot_store *s)
{
	uint64_t used = 0, bad = 0, nr_used = 0;
	uint32_t nr_bad = 0, nr_ready = 0, in_class = 0;

	for (uint32_t i = 0; i < s->nr_segs; i++) {
		const struct slot_seg *seg = &s->seg[i];

		if (!seg_check(s, seg))
			return false;
		used += (uint64_t)seg->nr_used * seg->slot_bytes;
		nr_used += seg->nr_used;
		bad += (uint64_t)seg->nr_bad * seg->slot_bytes;
		nr_bad += seg->nr_bad;
		nr_ready += seg->state == SEG_READY;
		in_class += seg->nr_used != 0;
	}
	for (size_t i = 0; i < ARRAY_SIZE(s->class); i++)
		if (s->class[i].slot_bytes)
			in_class -= s->class[i].nr_segs;
	return used == s->used_bytes && nr_used == s->nr_used && bad == s->bad_bytes &&
	       nr_bad == s->nr_bad && nr_ready == s->nr_ready && !in_class;
}
