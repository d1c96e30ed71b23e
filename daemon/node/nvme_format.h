/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme_format.h - what a slot store looks like on the medium, version 2
 *
 *	0		superblock, 4 KiB
 *	4 KiB		scratch block: probes of a sick device write and read it
 *	8 KiB		journal and checkpoint areas, where they fit in here
 *	1 MiB - 4 KiB	copy of the superblock
 *	1 MiB		journal and checkpoint areas, where they do not
 *	data_off	segments, to the end; the rest that fills none is unused
 *
 * Slots carry no header: what belongs to a page, its checksum above all, is in
 * its record. All numbers are little-endian, as the hosts are. FORMAT.md says
 * what each thing is for and what a reader must refuse.
 */
#ifndef KVMM_DAEMON_NODE_NVME_FORMAT_H
#define KVMM_DAEMON_NODE_NVME_FORMAT_H

#include <assert.h>
#include <stdint.h>

#include "daemon/node/node.h"

#define NVME_MAGIC		"kvmmslot"
#define NVME_VERSION		2u

#define NVME_BLOCK		4096u
#define NVME_SUPER_BYTES	NVME_BLOCK
#define NVME_PROBE_OFF		NVME_BLOCK
#define NVME_META_OFF		(2 * NVME_BLOCK)
#define NVME_HEAD_BYTES		(1u << 20)
#define NVME_SUPER2_OFF		(NVME_HEAD_BYTES - NVME_BLOCK)

#define NVME_SEG_MIN		(1u << 20)
#define NVME_SEG_MAX		(64u << 20)

/* The journal is a whole number of these; a group never spans two. */
#define NVME_GROUP_BLOCKS	64u

/* Where a store's first sequence number lies: opens << NVME_SEQ_SHIFT. */
#define NVME_SEQ_SHIFT		40

/* More openings than there can have been. */
#define NVME_OPENS_MAX		(UINT64_C(1) << 23)

/* Likewise where an opening's numbers of checkpoints do. */
#define NVME_CKPT_SHIFT		24

/* nvme_super.flags: is being made; whoever finds it makes it anew */
#define NVME_SUPER_MAKING	0x1u

/**
 * struct nvme_super - the superblock; the rest of its 4 KiB is zero
 * @magic:	NVME_MAGIC
 * @version:	NVME_VERSION; another one is refused
 * @seg_bytes:	of one segment
 * @uuid:	random, of this store; new whenever it is emptied
 * @bytes:	size of the store
 * @data_off:	where segments begin
 * @opens:	how often it was opened: makes sequence numbers unique, and tells
 *		which opening wrote a journal block
 * @journal_off: the journal, a ring of blocks
 * @journal_bytes: multiple of NVME_GROUP_BLOCKS blocks
 * @ckpt_off:	two areas for checkpoints, one after the other
 * @ckpt_bytes:	of each
 * @records:	most slots that can be in use; a checkpoint has room for them
 * @label_bytes: most bytes of labels; likewise
 * @flags:	NVME_SUPER_*
 * @crc:	CRC32C of what is before it
 */
struct nvme_super {
	char		magic[8];
	uint32_t	version;
	uint32_t	seg_bytes;
	uint8_t		uuid[16];
	uint64_t	bytes;
	uint64_t	data_off;
	uint64_t	opens;
	uint64_t	journal_off;
	uint64_t	journal_bytes;
	uint64_t	ckpt_off;
	uint64_t	ckpt_bytes;
	uint64_t	records;
	uint64_t	label_bytes;
	uint64_t	reserved;
	uint32_t	flags;
	uint32_t	crc;
};

static_assert(sizeof(struct nvme_super) == 120, "on-medium format");

/* nvme_block.kind */
#define NVME_KIND_JOURNAL	0x6a6d766bu	/* "kvmj" */
#define NVME_KIND_CKPT		0x636d766bu	/* "kvmc" */
#define NVME_KIND_END		0x656d766bu	/* "kvme" */

/**
 * struct nvme_block - what every block of journal and checkpoints begins with
 * @kind:	NVME_KIND_*
 * @crc:	CRC32C of the 4 KiB with this as 0
 * @uuid:	the store's
 * @seq:	journal: number of the block, consecutive from 1 on, its place is
 *		@seq modulo the ring's length. Checkpoint: its place in the area
 * @epoch:	journal: nvme_super.opens of who wrote it. Checkpoint: its number
 * @bytes:	entries that follow, in bytes; behind them zeroes
 * @count:	their number
 * @writer:	random, of the opening that wrote it: tells two that have the same
 *		number, since the first one's mark in the superblock was lost.
 *		In a checkpoint the block with END has it
 */
struct nvme_block {
	uint32_t	kind;
	uint32_t	crc;
	uint8_t		uuid[16];
	uint64_t	seq;
	uint64_t	epoch;
	uint16_t	bytes;
	uint16_t	count;
	uint32_t	reserved;
	uint64_t	writer;
	uint32_t	reserved2[2];
};

static_assert(sizeof(struct nvme_block) == 64, "on-medium format");

#define NVME_BLOCK_ROOM		(NVME_BLOCK - (uint32_t)sizeof(struct nvme_block))

enum nvme_ent_type {
	NVME_ENT_NONE,
	NVME_ENT_ADD,		/* a slot has a record */
	NVME_ENT_DEL,		/* it has none any more */
	NVME_ENT_LABEL,		/* a part of a label */
	NVME_ENT_LABEL_DEL,
	NVME_ENT_BAD,		/* a slot is in quarantine */
	NVME_ENT_ZEROED,	/* a segment's slots are not any more */
	NVME_ENT_END,		/* a checkpoint is complete */
};

/**
 * struct nvme_ent - what every entry begins with
 * @type:	enum nvme_ent_type
 * @bytes:	length with this, multiple of 8
 * @arg:	ADD, BAD: size of the slot. LABEL, LABEL_DEL: number of the label.
 *		ZEROED: number of the segment
 */
struct nvme_ent {
	uint8_t		type;
	uint8_t		reserved;
	uint16_t	bytes;
	uint32_t	arg;
};

static_assert(sizeof(struct nvme_ent) == 8, "on-medium format");

/** struct nvme_ent_add - see struct node_record */
struct nvme_ent_add {
	struct nvme_ent	ent;
	uint64_t	off;
	uint64_t	seq;
	uint32_t	len;
	uint32_t	crc;
	uint8_t		meta[NODE_META_BYTES];
};

static_assert(sizeof(struct nvme_ent_add) == 128, "on-medium format");

/** struct nvme_ent_slot - DEL, BAD */
struct nvme_ent_slot {
	struct nvme_ent	ent;
	uint64_t	off;
	uint64_t	seq;
};

static_assert(sizeof(struct nvme_ent_slot) == 24, "on-medium format");

/**
 * struct nvme_ent_label - a part of a label, whose bytes follow
 * @total:	length of the label
 * @at:		where this part belongs; parts come in order
 */
struct nvme_ent_label {
	struct nvme_ent	ent;
	uint32_t	total;
	uint32_t	at;
};

static_assert(sizeof(struct nvme_ent_label) == 16, "on-medium format");

/**
 * struct nvme_ent_end - in block 0 of a checkpoint's area, written last
 * @number:	of the checkpoint; the valid one with the highest counts
 * @opens:	nvme_super.opens of who wrote it
 * @journal_seq: first block of the journal that still has to be read
 * @nr_blocks:	blocks of the checkpoint, from 1 on
 * @nr_records:	records in them
 * @next_seq:	no slot has this sequence number or a higher one
 * @next_label:	likewise for labels
 */
struct nvme_ent_end {
	struct nvme_ent	ent;
	uint64_t	number;
	uint64_t	opens;
	uint64_t	journal_seq;
	uint64_t	nr_blocks;
	uint64_t	nr_records;
	uint64_t	next_seq;
	uint32_t	next_label;
	uint32_t	reserved;
};

static_assert(sizeof(struct nvme_ent_end) == 64, "on-medium format");

/* What an I/O's identity is followed by in its checksum; the store's uuid goes
 * before it. */
struct nvme_ident_tail {
	uint64_t	seq;
	uint32_t	len;
} __attribute__((packed));

static_assert(sizeof(struct nvme_ident_tail) == 12, "on-medium format");

#endif
