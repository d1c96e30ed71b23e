/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages and their copies. A part of mm_types.h.
 *
 * A page is (space, group, key). It may have one copy per node. What a copy is
 * depends on its pool: a frame of a memory pool, a slot of a block pool.
 *
 *	copy states	NONE -> LOADING -> READY -> NONE	(memory, from below)
 *			NONE -> READY -> NONE			(memory, publish)
 *			NONE -> WRITING -> READY -> NONE	(block)
 */
#ifndef KVMM_DAEMON_MM_MM_PAGE_H
#define KVMM_DAEMON_MM_MM_PAGE_H

#include "daemon/mm/mm.h"
#include "ipc/base/list.h"

struct flight;				/* flight.c: a read in flight */
struct wback;				/* writeback.c: a write in flight */

#define MM_PAGE_MAX_BYTES	(1u << 30)

enum copy_state {
	COPY_NONE	= 0,
	COPY_LOADING	= 1,
	COPY_WRITING	= 2,
	COPY_READY	= 3,
};

/**
 * struct copy - a page on one node
 * @pol:	the policy's view; in the pool's policy while READY
 * @flight:	memory, LOADING or about to: the read
 * @wb:		block, WRITING: the write
 * @nr_bound:	pages that are bound to this one and have a copy here
 * @refs:	I/O that uses it as source: not dropped meanwhile (hand-over
 *		references are the frame's: frame_meta.refs; frame_isolate() refuses
 *		on either)
 * @flags:	COPY_*; zero while NONE
 * @page:	memory: whose it is
 * @link:	memory: in pool.dirty while READY without a READY copy below, moved
 *		to its tail by a touch
 * @slot_next:	block: in its node's table of slots (slots.c), from the slot's
 *		allocation to its return
 * @crc:	block: checksum that a read must show
 *
 * Those on block nodes are part of the page. Those in memory come when somebody
 * wants the page there (copy_get()) and go when they are NONE: most pages of a
 * large disk have none, and are to cost no more than they must.
 */
struct copy {
	struct kvmm_policy_page pol;
	union {
		struct flight	*flight;
		struct wback	*wb;
	};
	uint32_t	nr_bound;
	uint16_t	refs;
	uint8_t		state;
	uint8_t		flags;
	union {
		struct {
			struct page	*page;
			struct list	link;
			uint32_t	frame;
		};
		struct {
			struct node_slot slot;
			struct copy	*slot_next;
			uint32_t	crc;
		};
	};
};
static_assert(sizeof(struct copy) == 80, "one a page and block node");

#define COPY_DOOMED	1u	/* goes as soon as its I/O is over: no source, not
				   counted as a copy below */
#define COPY_WFAIL	2u	/* memory: the medium refused it; not written again
				   before the next touch */
#define COPY_REFUSED	4u	/* memory, dirty: the node below did not admit it */
#define COPY_WANTED	8u	/* memory: it does, by what it knows (admit.c) */
#define COPY_KEPT	16u	/* block: the node has a record of it (persist.c) */

/**
 * struct page - a page
 * @key:	as four words, the index's form
 * @parent:	NULL for a root; kept alive by closure if the page is bound to it
 * @crc:	CRC32C of the data if PAGE_CRC
 *
 * Behind it a copy for each block node, then a pointer to one for each node of
 * memory: page_copy().
 */
struct page {
	uint64_t	key[4];
	struct mm_space	*space;
	struct page	*hnext;
	struct page	*parent;
	struct list	children;	/* their sibling */
	struct list	sibling;
	uint32_t	nr_bound;
	uint32_t	raw_bytes;
	uint32_t	pos;
	uint32_t	cost_us;
	uint32_t	crc;
	uint8_t		group;
	uint8_t		flags;		/* PAGE_* */
	uint8_t		strikes;
	uint8_t		nr_copies;	/* not NONE */
};
static_assert(sizeof(struct page) == 112, "there may be many millions");
static_assert(KVMM_MAX_GROUPS <= UINT8_MAX && KVMM_MAX_NODES <= UINT8_MAX,
	      "they fit");

#define PAGE_ROOT	1u	/* by the publisher's word: outside closure */
#define PAGE_CRC	2u	/* @crc holds, for every copy */
#define PAGE_BAD	4u	/* being dropped everywhere: not found any more, its
				   index lines are gone and may be another page's */
#define PAGE_BOUND	8u	/* is no use without its parent: closure holds. All
				   of FULL groups, and the parts of a blob */
#define PAGE_ADOPT	32u	/* found by adopt_frames(), not yet looked at */
#define PAGE_ORPHAN	16u	/* BOUND, not BAD, and its parent was freed before
				   it: a breach that mm_check() reports */

#endif
