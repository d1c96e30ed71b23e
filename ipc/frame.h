/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frame words, frame tables and frame records.
 *
 * A frame is the place for one page on one node; its number is the same in
 * every process. Its state is one 64-bit word: 8 bits state, 56 bits
 * generation, compared whole and never reset. Only the daemon writes it.
 *
 *	FREE -> OPEN -> READY -> ISOLATED -> FREE
 *	  \-> LOADING -^           \-> READY (a pin was found)
 *	OPEN -> QUARANTINE -> FREE (its engine died)
 *
 * The generation advances when a frame turns READY, and at no other time: a
 * reader that remembers (frame, READY | g) from the index and later sees the
 * same word knows that the bytes were never anything else in between. The
 * generation's top 16 bits are the epoch of the daemon that made the table, so
 * that words of a table that was not adopted can never match.
 *
 * Pin protocol (model: tests/model/):
 *   client	pins[f] += 1 (seq_cst RMW); load word[f] (seq_cst); the same
 *		READY word -> pinned, else pins[f] -= 1
 *   daemon	exchange word[f] = ISOLATED (seq_cst); load the list of ledgers;
 *		load their pins[f] (seq_cst); all zero -> drop, else READY again
 * In the total order of seq_cst operations either the client's increment is
 * before the daemon's load (and is seen) or the daemon's exchange is before
 * the client's load (and is seen).
 */
#ifndef KVMM_IPC_FRAME_H
#define KVMM_IPC_FRAME_H

#include "ipc/abi.h"

enum frame_state {
	FRAME_FREE	= 0,
	FRAME_OPEN	= 1,	/* an engine's own: being written, private */
	FRAME_LOADING	= 2,	/* a copy from another node is on its way */
	FRAME_READY	= 3,	/* sealed: in the index, may be pinned */
	FRAME_ISOLATED	= 4,	/* for microseconds, while pins are summed */
	FRAME_QUARANTINE = 5,	/* its engine died; not reused before it is gone */
};

#define FRAME_STATE_BITS	8
#define FRAME_GEN_EPOCH_SHIFT	40	/* within the 56-bit generation */

static inline uint64_t frame_word(uint64_t gen, enum frame_state st)
{
	return gen << FRAME_STATE_BITS | st;
}

static inline enum frame_state frame_word_state(uint64_t w)
{
	return w & 0xff;
}

static inline uint64_t frame_word_gen(uint64_t w)
{
	return w >> FRAME_STATE_BITS;
}

/**
 * struct frame_table - head of a (space, class, node)'s frame table memfd
 * @magic:	%KVMM_MAGIC_TABLE
 * @size:	sizeof(struct frame_table), and the offset of the words
 * @stride:	bytes from one frame to the next in a window (host nodes; the
 *		same for every segment); on a gang of one rank's part
 * @max_frames:	words that follow; the node's largest frame count plus the
 *		frames of extent 0, which never exists
 * @frames_per_extent: frame f lies in extent f / @frames_per_extent
 * @extent_bytes: @frames_per_extent * @stride: what a window maps of an extent
 * @extent_seq:	advances with each extent that comes or must go; a window that
 *		has synced to it needs no win_sync
 * @nr_free:	frames of this class that are free now, for kvmm_avail()
 * @nr_clean:	unpinned frames whose page also lives below, or was a cheap drop
 * @nr_dirty:	unpinned frames that would have to be written first
 * @nr_limit:	frames that the tenant may hold at all
 *
 * The table is sized once, sparse, and never moves.
 */
struct frame_table {
	uint64_t		magic;
	uint32_t		size;
	uint32_t		stride;
	uint32_t		max_frames;
	uint32_t		frames_per_extent;
	uint64_t		extent_bytes;
	uint64_t		spare0[4];

	_Alignas(64) _Atomic uint64_t extent_seq;
	_Atomic uint32_t	nr_free;
	_Atomic uint32_t	nr_clean;
	_Atomic uint32_t	nr_dirty;
	_Atomic uint32_t	nr_limit;
	uint32_t		spare1[10];

	_Alignas(64) _Atomic uint64_t word[];
};
static_assert(sizeof(struct frame_table) == 128, "shm ABI");

static inline uint64_t frame_table_bytes(uint32_t max_frames)
{
	return sizeof(struct frame_table) + (uint64_t)max_frames * 8;
}

/**
 * struct frame_record - who a sealed frame is, for a daemon that adopts it
 * @key:	the page's key
 * @parent:	the parent's key; all zero for a root
 * @space_id:	first 16 bytes of the space id
 * @gen:	generation of the READY word that this record belongs to
 * @raw_bytes:	length of the page
 * @stored_bytes: length as stored; equal to @raw_bytes for format RAW
 * @cost_us:	what recomputing the page costs, microseconds
 * @pos:	first token's position in its sequence
 * @data_crc:	CRC32C of the data, valid if %FRAME_REC_CRC
 * @group:	group of the space
 * @format:	0 = RAW
 * @flags:	FRAME_REC_*
 * @crc:	CRC32C of everything before it
 *
 * Written before the frame's word turns READY; kept by the daemon alone.
 */
struct frame_record {
	uint8_t		key[KVMM_KEY_BYTES];
	uint8_t		parent[KVMM_KEY_BYTES];
	uint8_t		space_id[16];
	uint64_t	gen;
	uint32_t	raw_bytes;
	uint32_t	stored_bytes;
	uint32_t	cost_us;
	uint32_t	pos;
	uint32_t	data_crc;
	uint16_t	group;
	uint8_t		format;
	uint8_t		flags;
	uint32_t	spare[3];
	uint32_t	crc;
};
static_assert(sizeof(struct frame_record) == 128, "adoption ABI");

#define FRAME_REC_CRC		1u	/* @data_crc holds */
#define FRAME_REC_ROOT		2u	/* no parent by the publisher's word */
#define FRAME_REC_BOUND		4u	/* no use without its parent */

#endif
