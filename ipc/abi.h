/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared-memory ABI: limits, and the header that every client reads.
 *
 * Four kinds of shared memory exist between kvmmd and a client (all memfds,
 * all named here or in the header of their own):
 *
 *   header	one a daemon, read-only for clients	(this file)
 *   index	one a space, read-only			(ipc/index.h)
 *   frame table one a (space, class, node), read-only	(ipc/frame.h)
 *   ledger	one a client, and one a window of it,
 *		written by both sides			(ipc/ledger.h)
 *
 * Everything a client must not write is a file description opened O_RDONLY.
 * What a client can write is its ledger; the daemon copies from it once, then
 * validates, and keeps private copies of every cursor it owns.
 *
 * All layouts are little-endian, carry a magic, a size and offsets, and are
 * pinned by static_assert.
 */
#ifndef KVMM_IPC_ABI_H
#define KVMM_IPC_ABI_H

#include <assert.h>
#include <stdatomic.h>
#include <stdint.h>

#define KVMM_ABI_VERSION	1u	/* what this tree speaks */
#define KVMM_ABI_MIN		1u	/* oldest that it still serves */

#define KVMM_CACHELINE		64
#define KVMM_KEY_BYTES		32

#define KVMM_MAX_NODES		16	/* nodes of a daemon */
#define KVMM_MAX_SPACES		256
#define KVMM_MAX_CLIENTS	256
#define KVMM_MAX_CLASSES	8	/* classes of a space */
#define KVMM_MAX_GROUPS		8	/* groups of a space */
#define KVMM_MAX_SEGS		1024	/* segments of a class */
#define KVMM_MAX_WORLD		64	/* members of an engine that have a step word */
#define KVMM_MAX_GANG		8	/* parts of a gang node's frames */
#define KVMM_MAX_FRAMES		(1u << 30) /* frames of one table */
#define KVMM_MAX_BATCH		4096	/* pages in one submission */
#define KVMM_MAX_STR		256	/* bytes of a name in a descriptor */

/* Header magic values: eight readable bytes, little-endian. */
#define KVMM_MAGIC_HDR		UINT64_C(0x315244484d4d564b) /* "KVMMHDR1" */
#define KVMM_MAGIC_INDEX	UINT64_C(0x325844494d4d564b) /* "KVMMIDX2" */
#define KVMM_MAGIC_TABLE	UINT64_C(0x314c42544d4d564b) /* "KVMMTBL1" */
#define KVMM_MAGIC_LEDGER	UINT64_C(0x3147444c4d4d564b) /* "KVMMLDG1" */
#define KVMM_MAGIC_WINDOW	UINT64_C(0x314e49574d4d564b) /* "KVMMWIN1" */

/* Feature bits, exchanged at hello; unknown bits are ignored by both sides. */
#define KVMM_FEAT_NVME		(1u << 0) /* a block node is configured */

#define KVMM_LIFE_DIED	UINT32_C(0x40000000)	/* FUTEX_OWNER_DIED */

/**
 * struct kvmm_hdr_space - what every match reads about its space
 * @mode:	enum kvmm_mode; the kill switch, one word a space
 * @trace:	non-zero: req_end carries the keys that were asked for
 * @index_epoch: number of the index memfd in force; a client that holds an
 *		older one reads on in it (entries go stale, the frame word
 *		tells) and gets the new one by a message
 * @live:	1 while the slot is taken
 */
struct kvmm_hdr_space {
	_Atomic uint32_t	mode;
	_Atomic uint32_t	trace;
	_Atomic uint32_t	index_epoch;
	_Atomic uint32_t	live;
	uint32_t		spare[12];
};
static_assert(sizeof(struct kvmm_hdr_space) == 64, "shm ABI");

/**
 * struct kvmm_hdr_node - how fast a node loads, as measured by the daemon
 * @load_base_us:	latency of one page with an empty queue, microseconds
 * @load_ns_per_kib:	what each KiB adds, nanoseconds
 * @queue_us:		what is queued before a new load now, microseconds
 * @state:		0 online, 1 degraded, 2 failed, 3 offline
 */
struct kvmm_hdr_node {
	_Atomic uint32_t	load_base_us;
	_Atomic uint32_t	load_ns_per_kib;
	_Atomic uint32_t	queue_us;
	_Atomic uint32_t	state;
	uint32_t		spare[12];
};
static_assert(sizeof(struct kvmm_hdr_node) == 64, "shm ABI");

/**
 * struct kvmm_hdr - the daemon's header, one memfd, read-only for clients
 * @magic:	%KVMM_MAGIC_HDR
 * @size:	sizeof(struct kvmm_hdr) in the daemon's build
 * @abi:	%KVMM_ABI_VERSION
 * @epoch:	of clients that come now; changes with every daemon that did not
 *		adopt all of its predecessor's memory
 * @sleeping:	1 while the daemon sleeps in epoll or is about to. Dekker pair
 *		with the tail of every submission ring: the daemon stores
 *		sleeping = 1, re-reads all tails, sleeps; a client stores its
 *		tail, loads sleeping, writes its doorbell if it reads 1. All
 *		four seq_cst.
 * @life:	a robust mutex of the daemon's C library, held by its main thread
 *		as long as it serves; its first word is the kernel's futex. 0: not
 *		held; bit %KVMM_LIFE_DIED: the kernel's word that its holder is
 *		gone, whatever it died of. Clients read that word only
 */
struct kvmm_hdr {
	uint64_t		magic;
	uint32_t		size;
	uint32_t		abi;
	uint64_t		epoch;
	uint64_t		spare0[5];

	_Alignas(64) _Atomic uint32_t sleeping;
	uint32_t		spare1[15];

	_Alignas(64) _Atomic uint32_t life[16];

	struct kvmm_hdr_node	node[KVMM_MAX_NODES];
	struct kvmm_hdr_space	space[KVMM_MAX_SPACES];
};
static_assert(sizeof(struct kvmm_hdr) ==
	      192 + 64 * (KVMM_MAX_NODES + KVMM_MAX_SPACES), "shm ABI");

#endif
