/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ledger: the one shared area a client may write.
 *
 * A client has one base ledger (step word, rings, arena, request slots) and,
 * for every window it opens on a (space, class, node), one window ledger (pins,
 * magazine, bitmap of mapped extents). Both are memfds made by the daemon at
 * their final size, sealed, sparse: they never move and never grow.
 *
 * Trust. The daemon believes nothing it reads here. Cursors it owns (submission
 * head, completion tail, magazine tail) live in its private memory and are only
 * published here; what a client writes is copied once and then validated; a
 * value that cannot be (a tail further than the ring is long) ends the
 * connection with a counted reason.
 */
#ifndef KVMM_IPC_LEDGER_H
#define KVMM_IPC_LEDGER_H

#include "ipc/abi.h"
#include "ipc/ring.h"

#define LEDGER_SQ_ENTRIES	4096	/* submission ring, entries of 64 bytes */
#define LEDGER_CQ_ENTRIES	8192	/* completion ring, slots of 64 bytes */
#define LEDGER_ARENA_BYTES	(4u << 20)
#define LEDGER_REQ_SLOTS	4096
#define LEDGER_AGREE_ENTRIES	1024	/* decisions that are kept */
#define LEDGER_AGREE_VALUES	64	/* of one decision */
#define LEDGER_COUNTERS		64	/* of a member, kvmm_agree_min() */
#define LEDGER_FROZEN_SLOTS	16384	/* matches that can be found */
#define LEDGER_FROZEN_PROBES	16	/* slots that one may be in */
#define LEDGER_FROZEN_BYTES	(4u << 20) /* of the log that they lie in */

/* enum ledger_engine_state: how the client's engine is */
enum ledger_engine_state {
	ENGINE_FORMING	= 0,	/* not all members have joined */
	ENGINE_ALIVE	= 1,
	ENGINE_DYING	= 2,	/* a member is gone: -EOWNERDEAD */
};

/**
 * struct ledger_req - a request slot: who pins what, for people
 * @id:		the engine's request id
 * @start_ns:	CLOCK_MONOTONIC of kvmm_req_open()
 * @session:	the engine's session id
 * @space:	index of the space in the header
 * @nr_pins:	pins that the request holds now
 * @state:	0 = free
 *
 * Informative: what may be reclaimed is decided by the pins alone.
 */
struct ledger_req {
	_Atomic uint64_t	id;
	_Atomic uint64_t	start_ns;
	_Atomic uint64_t	session;
	_Atomic uint32_t	space;
	_Atomic uint32_t	nr_pins;
	_Atomic uint32_t	state;
	uint32_t		spare[7];
};
static_assert(sizeof(struct ledger_req) == 64, "shm ABI");

/**
 * struct ledger_agree - what the leader has decided for a step
 * @seq:	step + 1; 0 while there is none or it is being written
 * @n:		values
 * @v:		the decision
 *
 * Place step % %LEDGER_AGREE_ENTRIES. In one place steps only grow, so a value
 * of @seq never comes back. The writer stores seq = 0, then @n and @v, then
 * seq = step + 1, all but the first with release; a reader loads @seq, what it
 * wants and @seq again, all but the last with acquire. Whoever has read one word
 * of a later write sees its 0, or something later, the second time.
 */
struct ledger_agree {
	_Atomic uint64_t	seq;
	_Atomic uint32_t	n;
	uint32_t		spare0;
	_Atomic uint64_t	v[LEDGER_AGREE_VALUES];
	uint64_t		spare1[6];
};
static_assert(sizeof(struct ledger_agree) == 9 * 64, "shm ABI");

/**
 * struct ledger_talk - what a member tells the others
 * @ready:	it has taken along what its former ledger had: until then that
 *		one is to be read
 * @met_leader:	&ledger.client of the leader whose ledger this member reads
 * @met:	the same of the members with a step word, by rank
 * @counter:	kvmm_agree_min()
 */
struct ledger_talk {
	_Atomic uint32_t	ready;
	_Atomic uint32_t	met_leader;
	uint32_t		spare[14];
	_Atomic uint32_t	met[KVMM_MAX_WORLD];
	_Alignas(64) _Atomic uint64_t counter[LEDGER_COUNTERS];
};
static_assert(sizeof(struct ledger_talk) == 64 + 256 + 512, "shm ABI");

/**
 * struct ledger_frozen - the leader's matches, for the other members
 * @low:	records that begin before it may have been overwritten
 * @slot:	where a record begins: bytes of the log / 64, plus 1, and in the
 *		top 16 bits those of its hash; 0: none
 *
 * The log follows: %LEDGER_FROZEN_BYTES in which struct ledger_match are written
 * one after the other, at running positions that are multiples of 64; none
 * wraps. A record is in one of %LEDGER_FROZEN_PROBES slots from its hash on.
 *
 * The writer stores @low, then the record's words with release, then the slot
 * with release. A reader loads the slot and the words with acquire, then @low
 * and the slot again: the words are of that record if @low is not beyond it.
 */
struct ledger_frozen {
	_Atomic uint64_t	low;
	uint64_t		spare[7];
	_Atomic uint64_t	slot[LEDGER_FROZEN_SLOTS];
};
static_assert(sizeof(struct ledger_frozen) % 64 == 0, "shm ABI");

#define LEDGER_FROZEN_SIZE	(sizeof(struct ledger_frozen) + \
				 LEDGER_FROZEN_BYTES)

/**
 * struct ledger_match - one record of the log
 * @id:		of the request
 * @space_n:	the space's index in the header; hits << 32
 * @m:		struct kvmm_match without its size, two fields a word
 * @hit:	struct kvmm_hit, 12 bytes each, as they lie in memory
 */
struct ledger_match {
	_Atomic uint64_t	id;
	_Atomic uint64_t	space_n;
	_Atomic uint64_t	m[3];
	uint64_t		spare[3];
	_Atomic uint64_t	hit[];
};
static_assert(sizeof(struct ledger_match) == 64, "shm ABI");

/**
 * struct ledger - the base ledger
 * @magic:	%KVMM_MAGIC_LEDGER
 * @size:	sizeof(struct ledger)
 * @client:	the daemon's number for this client
 * @sq_off:	offset of the submission entries, bytes from the ledger's start
 * @cq_off:	offset of the completion slots
 * @arena_off:	offset of the arena: batch arrays of submissions
 * @req_off:	offset of the request slots
 * @bytes:	size of the whole memfd
 * @agree_off:	offset of struct ledger_agree[%LEDGER_AGREE_ENTRIES]
 * @talk_off:	offset of struct ledger_talk
 * @frozen_off:	offset of struct ledger_frozen and its log
 * @secret:	who comes again to a daemon that has adopted this ledger says it
 *		(struct wire_hello); random
 * @step:	all work of this process up to this step is complete. A line of
 *		its own: a GPU stream may write it. Dekker pair with
 *		@step_wanted: the client stores step, loads step_wanted, rings
 *		if it was reached; the daemon stores step_wanted, loads step,
 *		waits. All four seq_cst.
 * @step_wanted: the smallest step that something waits for; ~0: none.
 *		Written by the daemon
 * @engine_state: enum ledger_engine_state, written by the daemon
 * @engine_world: members with a step word
 * @mail:	what has happened on the socket: advances after each message that
 *		the daemon sent, and after it closed it. With struct
 *		kvmm_hdr.life a client need not look at its socket to know that
 *		there is nothing; release, pairs with the client's acquire before
 *		it reads the socket
 * @sq:		submission ring's cursors
 * @cq:		completion ring's cursors
 * @arena_head:	bytes of the arena that the daemon has consumed, a running sum;
 *		the client may reuse what lies before it
 */
struct ledger {
	uint64_t		magic;
	uint32_t		size;
	uint32_t		client;
	uint32_t		sq_entries;
	uint32_t		cq_entries;
	uint64_t		sq_off;
	uint64_t		cq_off;
	uint64_t		arena_off;
	uint64_t		arena_bytes;
	uint64_t		req_off;

	_Alignas(64) uint32_t	req_slots;
	uint32_t		spare0;
	uint64_t		bytes;
	uint64_t		agree_off;
	uint64_t		talk_off;
	uint64_t		frozen_off;
	uint64_t		secret[2];
	uint64_t		spare1;

	_Alignas(64) _Atomic uint64_t step;
	uint64_t		spare2[7];

	_Alignas(64) _Atomic uint64_t step_wanted;
	_Atomic uint32_t	engine_state;
	_Atomic uint32_t	engine_world;
	_Atomic uint32_t	mail;
	uint32_t		spare5;
	uint64_t		spare3[5];

	struct ring_cursors	sq;
	struct ring_cursors	cq;

	_Alignas(64) _Atomic uint64_t arena_head;
	uint64_t		spare4[7];
};
static_assert(sizeof(struct ring_cursors) == 192, "shm ABI");
static_assert(sizeof(struct ledger) == 4 * 64 + 2 * 192 + 64, "shm ABI");

/**
 * struct window_ledger - the part of the ledger that belongs to one window
 * @magic:	%KVMM_MAGIC_WINDOW
 * @size:	sizeof(struct window_ledger)
 * @max_frames:	as in the frame table
 * @mag_entries: places of the magazine, a power of two >= @max_frames
 * @nr_extents:	bits of the bitmap
 * @bitmap_off:	offset of the bitmap of extents that this process has mapped
 *		(u64 words, set by the client)
 * @pins_off:	offset of the pins: one u32 a frame
 * @mag_off:	offset of the magazine's places: one u32 a place
 * @bytes:	size of the whole memfd
 * @mag_tail:	frames handed out, a running count; the daemon stores it with
 *		release after the places, the client loads it with acquire
 * @mag_head:	frames taken; the client's
 * @want:	frames that the last refused allocation asked for; the client's
 * @refills:	refill requests that the daemon has answered
 */
struct window_ledger {
	uint64_t		magic;
	uint32_t		size;
	uint32_t		max_frames;
	uint32_t		mag_entries;
	uint32_t		nr_extents;
	uint64_t		bitmap_off;
	uint64_t		pins_off;
	uint64_t		mag_off;
	uint64_t		bytes;
	uint64_t		spare0;

	_Alignas(64) _Atomic uint32_t mag_tail;
	_Atomic uint32_t	refills;
	uint32_t		spare1[14];

	_Alignas(64) _Atomic uint32_t mag_head;
	_Atomic uint32_t	want;
	uint32_t		spare2[14];
};
static_assert(sizeof(struct window_ledger) == 192, "shm ABI");

static inline _Atomic uint32_t *window_pins(struct window_ledger *w)
{
	return (_Atomic uint32_t *)((char *)w + w->pins_off);
}

static inline _Atomic uint32_t *window_magazine(struct window_ledger *w)
{
	return (_Atomic uint32_t *)((char *)w + w->mag_off);
}

static inline _Atomic uint64_t *window_bitmap(struct window_ledger *w)
{
	return (_Atomic uint64_t *)((char *)w + w->bitmap_off);
}

#endif
