/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rings between a client and the daemon: entries of 64 bytes, one producer, one
 * consumer, running cursors of 32 bits, and a flag for a consumer that sleeps.
 *
 * Submission ring (client -> daemon). One flag for all of them, in the
 * daemon's header (struct kvmm_hdr.sleeping): the daemon sleeps once, not per
 * ring. The client stores tail (seq_cst), loads hdr->sleeping (seq_cst) and
 * writes its doorbell eventfd if it reads 1.
 *
 * Completion ring (daemon -> client). @armed is the client's: 0 awake, 1 wants
 * an eventfd write, 2 the write has been made (the client must drain it). The
 * client stores armed = 1 (seq_cst), re-reads tail (seq_cst), then sleeps; the
 * daemon stores tail (seq_cst), and if it loads armed == 1 writes the eventfd,
 * then stores armed = 2. Both are the same Dekker pair as pins and reclaim.
 *
 * A completion is one head slot followed by ceil(n / RING_RESULTS) result
 * slots; a producer publishes them with one tail store, so a consumer sees all
 * or none.
 */
#ifndef KVMM_IPC_RING_H
#define KVMM_IPC_RING_H

#include <stdbool.h>
#include <stddef.h>

#include "ipc/abi.h"

/**
 * struct ring_cursors - tail, head and flag, each on a line of its own
 * @tail:	entries produced, a running count
 * @head:	entries consumed
 * @armed:	completion ring only, see above
 */
struct ring_cursors {
	_Alignas(64) _Atomic uint32_t tail;
	_Alignas(64) _Atomic uint32_t head;
	_Alignas(64) _Atomic uint32_t armed;
};

enum ring_op {
	RING_NOP	= 0,	/* completes at once: ping */
	RING_PUBLISH	= 1,	/* arena: struct ring_pub[n] */
	RING_FETCH	= 2,	/* arena: struct ring_key[n] */
	RING_REFILL	= 3,	/* magazine of @win wants @n frames; no completion */
	RING_FREE	= 4,	/* arena: u32 frame[n] go back after @after; no completion */
	RING_END	= 5,	/* request ended, arena: struct ring_key[nr_keys]
				 * or none; no completion */
	RING_CANCEL	= 6,	/* @arg = tag of the operation; no completion */
	RING_REPORT	= 7,	/* arena: struct ring_key[1]; @arg = enum kvmm_verdict
				 * or RING_UNDO; no completion */
	RING_FORK	= 8,	/* arena: struct ring_fork[n]: OPEN frames are copied
				 * once @after is done */
	RING_NR_OPS
};

/*
 * @arg of a RING_REPORT, beside enum kvmm_verdict: whoever published the page
 * takes it back, and what is bound to it. It was not bad and is not counted so.
 */
#define RING_UNDO	(UINT64_C(1) << 16)

/**
 * struct ring_sqe - a submission
 * @op:		enum ring_op
 * @how:	RING_END: enum kvmm_end
 * @win:	the daemon's window number (WIN_OPEN reply); RING_FETCH: where to
 * @space:	index of the space in the header
 * @n:		elements of the arena array; RING_REFILL: frames wanted;
 *		RING_END: length of the chain in pages
 * @group:	RING_END: group of the tail
 * @req:	request slot in the ledger
 * @tag:	comes back in the completion; unique among those in flight
 * @nr_keys:	RING_END, which has no completion: keys in the arena, at most
 *		%KVMM_MAX_BATCH; 0 unless the space's trace bit is on or its
 *		mode is observe. What the request asked for last, found or not,
 *		group by group in the order asked. More than fit go in further
 *		entries of the same @req, which follow it and have no @frame
 * @asked_ms:	RING_END: when it asked for them: CLOCK_MONOTONIC in
 *		milliseconds, modulo 2^32
 * @after:	step; nothing happens to the frames before every member did it
 * @arg:	RING_FETCH: absolute CLOCK_MONOTONIC deadline, ns; RING_CANCEL: tag;
 *		RING_END: tail page's READY word
 * @arena_pos:	running position of the array in the arena (offset =
 *		@arena_pos modulo arena_bytes; arrays never wrap)
 * @arena_len:	bytes of the arena up to and with this array that may be
 *		reused once the entry is consumed: the daemon adds it to
 *		arena_head (padding at the wrap included)
 * @frame:	RING_END: tail frame, 0 when there was none
 * @session:	RING_END: the engine's session, and @expect_ms its expected
 *		return
 *
 * The arena array starts at @arena_pos; entries are consumed in order and the
 * arena is freed in order.
 */
struct ring_sqe {
	uint8_t		op;
	uint8_t		how;
	uint16_t	space;
	uint16_t	win;
	uint16_t	group;
	uint32_t	n;
	uint32_t	req;
	union {
		uint64_t	tag;
		struct {
			uint32_t	nr_keys;
			uint32_t	asked_ms;
		};
	};
	uint64_t	after;
	uint64_t	arg;
	uint32_t	arena_pos;
	uint32_t	arena_len;
	uint32_t	frame;
	uint32_t	expect_ms;
	uint64_t	session;
};
static_assert(sizeof(struct ring_sqe) == 64, "wire ABI");
static_assert(offsetof(struct ring_sqe, tag) == 16 &&
	      offsetof(struct ring_sqe, nr_keys) == 16 &&
	      offsetof(struct ring_sqe, asked_ms) == 20 &&
	      offsetof(struct ring_sqe, after) == 24, "wire ABI");

/**
 * struct ring_pub - one page to publish
 *
 * As struct kvmm_pub, with the layout pinned.
 */
struct ring_pub {
	uint8_t		key[KVMM_KEY_BYTES];
	uint8_t		parent[KVMM_KEY_BYTES];
	uint32_t	frame;
	uint32_t	pos;
	uint32_t	cost_us;
	uint32_t	crc;
	uint16_t	group;
	uint16_t	flags;	/* KVMM_PUB_*, RING_PUB_BOUND */
	uint32_t	spare;
	uint64_t	after;
};
static_assert(sizeof(struct ring_pub) == 96, "wire ABI");

/*
 * struct ring_pub.flags, beside KVMM_PUB_*: the page is no use without its
 * parent, whatever the rule of its group: they live and go together as in a FULL
 * group. If the page is there, on whichever node, it is -EEXIST: its parent may
 * be another one than this one's.
 */
#define RING_PUB_BOUND	(1u << 8)

/* One page by name. */
struct ring_key {
	uint8_t		key[KVMM_KEY_BYTES];
	uint16_t	group;
	uint16_t	spare[3];
};
static_assert(sizeof(struct ring_key) == 40, "wire ABI");

/**
 * struct ring_fork - one OPEN frame that is copied into another
 * @win:	the daemon's window number, of both
 * @group:	whose tail it is; for people
 *
 * At most %KVMM_MAX_GROUPS in an entry, whose own @win is not used. The source
 * may go on to be written, forked or published; the target is named by nobody
 * before the completion.
 */
struct ring_fork {
	uint32_t	from;
	uint32_t	to;
	uint16_t	win;
	uint16_t	group;
	uint32_t	spare;
};
static_assert(sizeof(struct ring_fork) == 16, "wire ABI");

/**
 * struct ring_cqe - head slot of a completion
 * @op:		enum ring_op of the submission
 * @result:	0, or the operation's -errno when no page has one of its own
 * @tag:	the submission's
 * @n:		per-page results that follow in ceil(@n / RING_RESULTS) slots
 */
struct ring_cqe {
	uint8_t		op;
	uint8_t		flags;
	uint16_t	spare0;
	int32_t		result;
	uint64_t	tag;
	uint32_t	n;
	uint32_t	spare1[11];
};
static_assert(sizeof(struct ring_cqe) == 64, "wire ABI");

/**
 * struct ring_result - what became of one page
 * @result:	0 or -errno
 * @frame:	fetch: where it is; publish: the frame it is sealed in (with
 *		-EEXIST somebody else's: the canonical one); 0: none, as always
 *		of a fork
 * @word:	the frame's READY word
 *
 * A frame named here carries a reference of the daemon's until the completion
 * head passes the slot: pin first, then advance.
 */
struct ring_result {
	int32_t		result;
	uint32_t	frame;
	uint64_t	word;
};
#define RING_RESULTS	4	/* a slot */
static_assert(RING_RESULTS * sizeof(struct ring_result) == 64, "wire ABI");

static inline uint32_t ring_result_slots(uint32_t n)
{
	return (n + RING_RESULTS - 1) / RING_RESULTS;
}

/*
 * Producer side: room for @n more entries? @tail is the producer's own copy;
 * head is the other side's word. A head that runs ahead of the tail is the
 * other side's lie: then there is no room.
 */
static inline bool ring_has_room(struct ring_cursors *c, uint32_t entries,
				 uint32_t tail, uint32_t n)
{
	/* acquire: pairs with the consumer's release of head */
	uint32_t used = tail - atomic_load_explicit(&c->head,
						    memory_order_acquire);

	return used <= entries && entries - used >= n;
}

/*
 * Consumer side: entries that may be read. @head is the consumer's own copy.
 * Returns more than @entries when the producer lies.
 */
static inline uint32_t ring_pending(struct ring_cursors *c, uint32_t head)
{
	/* seq_cst: pairs with the producer's tail store (data, and Dekker) */
	return atomic_load_explicit(&c->tail, memory_order_seq_cst) - head;
}

#endif
