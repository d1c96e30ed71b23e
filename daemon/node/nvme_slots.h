/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme_slots.h - which bytes of a store are free
 *
 * A data structure only: it does no I/O, takes no lock and belongs to the
 * loop's thread.
 */
#ifndef KVMM_DAEMON_NODE_NVME_SLOTS_H
#define KVMM_DAEMON_NODE_NVME_SLOTS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/node/node.h"
#include "ipc/base/list.h"

#define SLOT_MAX_CLASSES	192
#define SLOT_EXACT_CLASSES	32
#define SLOT_ZERO_TRIES		3

enum seg_state {
	SEG_RAW,		/* never written as a whole: the last resort */
	SEG_READY,
	SEG_SUSPECT,		/* empty, has bad slots: not used until zeroed */
	SEG_ZEROING,
	SEG_DISCARD,		/* the medium is being told that it is empty */
	SEG_DEAD,		/* could not be zeroed */
};

/**
 * struct slot_seg - a segment
 * @link:	on its class's list of segments with free slots, or, empty, on
 *		the store's list of its state
 * @map:	one bit a slot: used or bad; points to @word when they fit
 * @rec:	one bit a slot: has a record; behind @map
 * @bad:	two bits a slot, all first ones first: marked bad; marked bad and
 *		given back, in quarantine. NULL as long as none is
 * @slot_bytes:	size of its slots; 0 when it belongs to no class
 * @nr_slots:	how many
 * @nr_used:	given out, those that were marked bad meanwhile included
 * @nr_bad:	given back and kept in quarantine
 * @hint:	where to look for a free slot
 * @tries:	failed attempts to zero it
 * @spent:	has been used since the medium was told that it is empty
 */
struct slot_seg {
	struct list	link;
	uint64_t	*map;
	uint64_t	*rec;
	uint64_t	*bad;
	uint64_t	word[2];
	uint32_t	slot_bytes;
	uint32_t	nr_slots;
	uint32_t	nr_used;
	uint32_t	nr_bad;
	uint32_t	hint;
	uint8_t		state;
	uint8_t		tries;
	bool		spent;
};

/**
 * struct slot_class - slots of one size
 * @partial:	its segments with a free slot
 * @slot_bytes:	0: this entry is free
 * @nr_segs:	its segments
 */
struct slot_class {
	struct list	partial;
	uint32_t	slot_bytes;
	uint32_t	nr_segs;
};

/**
 * struct slot_store - all segments of a store
 * @ready:	empty segments, written before
 * @raw:	empty segments, not written yet
 * @suspect:	see SEG_SUSPECT
 * @used_bytes:	slots given out
 * @nr_used:	their number
 * @bad_bytes:	slots in quarantine
 * @nr_bad:	their number
 * @nr_ready:	segments that were written as a whole, used or empty
 * @next_seq:	sequence number of the next slot given out
 */
struct slot_store {
	struct slot_seg		*seg;
	uint32_t		nr_segs;
	uint32_t		seg_bytes;
	uint64_t		data_off;
	uint64_t		next_seq;
	uint64_t		used_bytes;
	uint64_t		nr_used;
	uint64_t		bad_bytes;
	uint32_t		nr_bad;
	uint32_t		nr_ready;
	uint32_t		nr_classes;
	struct list		ready;
	struct list		raw;
	struct list		suspect;
	struct slot_class	class[SLOT_MAX_CLASSES];
};

/**
 * slots_init() - all segments empty
 * @data_off:	where the first one begins
 * @written:	one bit a segment: has been written as a whole; NULL: all
 * @first_seq:	sequence number of the first slot given out
 *
 * Return: 0 or -ENOMEM.
 */
int slots_init(struct slot_store *s, uint64_t data_off, uint32_t seg_bytes,
	       uint32_t nr_segs, const uint64_t *written, uint64_t first_seq);
void slots_fini(struct slot_store *s);

/* These as node_slot_alloc(), node_slot_free(), ... say. */
int slots_alloc(struct slot_store *s, uint32_t len, struct node_slot *slot);
int slots_free(struct slot_store *s, const struct node_slot *slot);
uint32_t slots_bytes(const struct slot_store *s, const struct node_slot *slot);
int slots_victim(const struct slot_store *s, uint32_t len, unsigned int nth,
		 struct node_range *r);

/* To quarantine when it is freed; unknown slots are ignored. */
void slots_mark_bad(struct slot_store *s, const struct node_slot *slot);

/**
 * slots_record() - a slot in use has a record from now on
 *
 * Return: the slot's size, or 0 when it is not in use.
 */
uint32_t slots_record(struct slot_store *s, const struct node_slot *slot);

/** slots_recorded() - the slot's size, or 0 when it has no record */
uint32_t slots_recorded(const struct slot_store *s,
			const struct node_slot *slot);

/** slots_forget() - it has none any more; what slots_recorded() said before */
uint32_t slots_forget(struct slot_store *s, const struct node_slot *slot);

/**
 * slots_restore() - have a slot in use, with a record, exactly there
 *
 * Return: 0; -EINVAL: there can be none, or it is taken; -ENOMEM.
 */
int slots_restore(struct slot_store *s, const struct node_slot *slot,
		  uint32_t slot_bytes);

/**
 * slots_next_bad() - walk a segment's quarantine
 * @ix:		0 at first, then ours
 * @off:	the next one
 */
bool slots_next_bad(const struct slot_store *s, uint32_t seg, uint32_t *ix,
		    uint64_t *off);

/**
 * slots_zero_next() - which segment to zero-write next
 *
 * It is nobody's until slots_zero_done(), which is told 0 or -errno. Where the
 * medium refuses (-EIO) again and again the segment is given up.
 * Return: its number, or -ENOENT.
 */
int slots_zero_next(struct slot_store *s);
void slots_zero_done(struct slot_store *s, uint32_t seg, int err);

/**
 * slots_discard_next() - an empty segment that the medium may be told of
 *
 * One that was in use before; not the last that is ready. It is nobody's until
 * slots_discard_done().
 * Return: its number, or -ENOENT.
 */
int slots_discard_next(struct slot_store *s);
void slots_discard_done(struct slot_store *s, uint32_t seg, bool ok);

/* Is there one? */
bool slots_discard_wanted(const struct slot_store *s);

/* Is there still a segment to be zero-written? */
bool slots_zero_wanted(const struct slot_store *s);

static inline uint64_t slots_seg_off(const struct slot_store *s, uint32_t seg)
{
	return s->data_off + (uint64_t)seg * s->seg_bytes;
}

bool slots_check(const struct slot_store *s);

#endif
