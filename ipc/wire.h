/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control messages over the Unix socket (SOCK_SEQPACKET): set-up only, never on
 * the hot path. One message is one packet: struct wire_hdr, the type's struct,
 * then variable data. Requests carry a sequence number, replies repeat it;
 * messages the daemon sends by itself carry 0. A failed request is answered by
 * WIRE_ERROR with an errno and a sentence. See ipc/PROTOCOL.md.
 */
#ifndef KVMM_IPC_WIRE_H
#define KVMM_IPC_WIRE_H

#include "ipc/abi.h"

#define WIRE_MAGIC		UINT32_C(0x4d4d564b)	/* "KVMM" */
#define WIRE_MAX_BYTES		65536
#define WIRE_MAX_FDS		64	/* a message; the kernel allows 253 */
#define WIRE_NAME_BYTES		64
#define WIRE_SENTENCE_BYTES	256

enum wire_type {
	/* client -> daemon */
	WIRE_HELLO	= 1,	/* + pidfd of the sender */
	WIRE_JOIN	= 2,
	WIRE_ATTACH	= 3,	/* + canonical descriptor (ipc/desc.h) */
	WIRE_DETACH	= 4,
	WIRE_WIN_OPEN	= 5,
	WIRE_WIN_SYNC	= 6,
	WIRE_WIN_CLOSE	= 7,
	WIRE_RESERVE	= 8,
	/* daemon -> client, replies */
	WIRE_WELCOME	= 64,	/* + header ro, ledger rw, doorbell, notify */
	WIRE_OK		= 65,
	WIRE_ERROR	= 66,
	WIRE_ATTACHED	= 67,	/* + index ro */
	WIRE_WINDOW	= 68,	/* + frame table ro, window ledger rw */
	WIRE_EXTENTS	= 69,	/* + one fd per extent that came */
	WIRE_RESUMED	= 70,	/* after a WELCOME that resumes, and all news */
	/* daemon -> client, unasked (seq 0) */
	WIRE_MEMBER	= 96,	/* + that member's ledger ro */
	WIRE_INDEX	= 97,	/* + index ro: a larger one is in force */
	WIRE_PEER	= 98,	/* + a member's window ledger ro: what it has mapped */
};

struct wire_hdr {
	uint32_t	magic;
	uint16_t	type;
	uint16_t	nr_fds;
	uint32_t	len;	/* whole message, this header included */
	uint32_t	seq;
};
static_assert(sizeof(struct wire_hdr) == 16, "wire ABI");

struct wire_hello {
	struct wire_hdr	h;
	uint32_t	abi_min;
	uint32_t	abi_max;
	uint64_t	features;
	uint32_t	pid;		/* as the client sees it; display only */
	uint32_t	spare;
	char		name[16];	/* program, for people */
	/* what follows is there when @h.len says so */
	uint64_t	epoch;		/* of the header that it has mapped */
	uint64_t	secret[2];	/* of the ledger that it has mapped */
	uint32_t	client;		/* whose that is; 0: it has none */
	uint32_t	spare1;
};
static_assert(sizeof(struct wire_hello) == 88, "wire ABI");

/* A hello without the last part: nothing to resume. */
#define WIRE_HELLO_SHORT	56u

struct wire_node {
	char		name[16];
	uint8_t		kind;		/* enum kvmm_node_kind */
	uint8_t		state;
	uint8_t		below;		/* node it demotes to, 0xff none */
	uint8_t		gang;		/* parts of its frames; 0: no gang */
	uint8_t		spare[4];
	uint64_t	size_bytes;
	uint64_t	extent_bytes;
};
static_assert(sizeof(struct wire_node) == 40, "wire ABI");

struct wire_welcome {
	struct wire_hdr	h;
	uint32_t	abi;
	uint32_t	client;
	uint64_t	features;
	uint64_t	epoch;
	char		tenant[WIRE_NAME_BYTES];
	char		version[16];
	uint32_t	rights;		/* KVMM_RO / KVMM_RW */
	uint32_t	nr_nodes;
	uint32_t	max_requests;	/* of the socket */
	uint32_t	flags;		/* WIRE_WELCOME_* */
	struct wire_node node[];
};
static_assert(sizeof(struct wire_welcome) == 136, "wire ABI");

/*
 * The client is what it was: the same number, ledger, windows, spaces and engine.
 * Of the descriptors only doorbell and notify are new. What it had posted is not
 * done, but for frames that it gave back. WIRE_INDEX, WIRE_MEMBER and WIRE_PEER
 * bring what has changed, and WIRE_RESUMED ends it.
 */
#define WIRE_WELCOME_RESUMED	1u
#define WIRE_WELCOME_ADOPTED	2u	/* and by another process: nothing that the
					   former one had begun goes on */

/**
 * struct wire_resumed - what the daemon believes the client has
 * @joined:	1: it is a member of an engine
 * @space:	@nr_spaces places in the header
 * @win:	a bit for each window number
 *
 * What the client does not know of it closes.
 */
struct wire_resumed {
	struct wire_hdr	h;
	uint32_t	joined;
	uint32_t	nr_spaces;
	uint16_t	space[8];
	uint64_t	win[4];
};
static_assert(sizeof(struct wire_resumed) == 72, "wire ABI");

struct wire_join {
	struct wire_hdr	h;
	uint8_t		token[16];
	uint32_t	rank;
	uint32_t	world;
	uint32_t	flags;		/* KVMM_LEADER, KVMM_NO_STEP */
	uint32_t	spare;
};
static_assert(sizeof(struct wire_join) == 48, "wire ABI");

struct wire_attach {
	struct wire_hdr	h;
	uint32_t	flags;		/* KVMM_MUST_JOIN */
	uint32_t	desc_len;
	uint8_t		desc[];
};
static_assert(sizeof(struct wire_attach) == 24, "wire ABI");

struct wire_attached {
	struct wire_hdr	h;
	uint32_t	space;		/* index in the header */
	uint32_t	index_epoch;
	uint8_t		id[32];
	uint64_t	index_bytes;
};
static_assert(sizeof(struct wire_attached) == 64, "wire ABI");

struct wire_win_open {
	struct wire_hdr	h;
	uint32_t	space;
	uint16_t	cls;
	uint16_t	node;
	uint32_t	rights;
	uint32_t	max_frames;	/* 0 = the node's largest */
};
static_assert(sizeof(struct wire_win_open) == 32, "wire ABI");

#define WIRE_WINDOW_BLIND	1u	/* nothing is mapped: extents come
					   without a descriptor */

struct wire_window {
	struct wire_hdr	h;
	uint16_t	win;		/* the number that ring entries name */
	uint16_t	flags;		/* WIRE_WINDOW_* */
	uint16_t	spare[2];
	uint64_t	table_bytes;
	uint64_t	ledger_bytes;
	uint64_t	part_off;	/* in each extent, of what is mapped of it */
};
static_assert(sizeof(struct wire_window) == 48, "wire ABI");

/* WIRE_WIN_SYNC, WIRE_WIN_CLOSE, WIRE_DETACH (space in @win) */
struct wire_win {
	struct wire_hdr	h;
	uint16_t	win;
	uint16_t	spare[3];
	uint64_t	have_seq;	/* extent_seq that the client has applied */
};
static_assert(sizeof(struct wire_win) == 32, "wire ABI");

/*
 * One extent in WIRE_EXTENTS; those with @up have their fd in order, unless the
 * window is WIRE_WINDOW_BLIND.
 */
struct wire_extent {
	uint32_t	no;		/* extent number, >= 1 */
	uint32_t	up;		/* 1 map it, 0 unmap it and clear its bit */
};

struct wire_extents {
	struct wire_hdr	h;
	uint64_t	seq;		/* extent_seq once all of @more are applied */
	uint32_t	n;
	uint32_t	more;		/* 1: another WIRE_EXTENTS with this seq follows */
	struct wire_extent ext[];
};
static_assert(sizeof(struct wire_extents) == 32, "wire ABI");

struct wire_reserve {
	struct wire_hdr	h;
	uint32_t	space;
	uint16_t	cls;
	uint16_t	node;
	uint32_t	frames;
	uint32_t	spare;
};
static_assert(sizeof(struct wire_reserve) == 32, "wire ABI");

struct wire_ok {
	struct wire_hdr	h;
	uint64_t	value;
};
static_assert(sizeof(struct wire_ok) == 24, "wire ABI");

struct wire_error {
	struct wire_hdr	h;
	int32_t		err;		/* -errno */
	uint32_t	spare;
	char		sentence[WIRE_SENTENCE_BYTES];
};
static_assert(sizeof(struct wire_error) == 16 + 8 + 256, "wire ABI");

struct wire_member {
	struct wire_hdr	h;
	uint32_t	rank;
	uint32_t	flags;
	uint32_t	world;
	uint32_t	gone;		/* 1: left; no fd */
	uint64_t	ledger_bytes;
};
static_assert(sizeof(struct wire_member) == 40, "wire ABI");

struct wire_index {
	struct wire_hdr	h;
	uint32_t	space;
	uint32_t	epoch;
	uint64_t	bytes;
};
static_assert(sizeof(struct wire_index) == 32, "wire ABI");

/*
 * Another member of the engine has the same window: a page is a hit only where
 * its bitmap says so, too. Told to whoever has such a window, when either opens
 * or the other closes.
 */
struct wire_peer {
	struct wire_hdr	h;
	uint32_t	space;
	uint16_t	cls;
	uint16_t	node;
	uint32_t	client;		/* the daemon's number for that member */
	uint32_t	gone;		/* 1: it has closed it; no fd */
	uint64_t	ledger_bytes;
};
static_assert(sizeof(struct wire_peer) == 40, "wire ABI");

#endif
