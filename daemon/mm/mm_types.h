/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm's own structures; nobody outside daemon/mm includes this.
 *
 * Pages and copies are in mm_page.h, pools and windows in mm_pool.h; here is what
 * they hang on, and what must hold between all of them.
 *
 * Laws (mm_check):
 *   - a page exists while it has a copy that is not NONE
 *   - closure: a page that is bound to its parent (page_bound()) has its parent
 *     alive (any node)
 *   - closure, block node: the parent of a bound page's READY or WRITING copy
 *     has a READY or WRITING copy on the same node (closed by itself)
 *   (copies that are COPY_DOOMED are outside the two laws of closure)
 *   - closure, block node: the parent of a READY copy is READY there: a write
 *     that is over before its parent's stays WRITING until that is over
 *   - page.children holds the pages whose parent it is, by their sibling member;
 *     page.nr_bound = those of them that are bound to it;
 *     copy.nr_bound = those of these with a copy, not NONE, on this node
 *   - a copy in memory exists while it is not NONE, or a read waits for a frame
 *   - memory pool: dirty holds the nr_dirty READY copies of pages that have no
 *     READY copy below; of these pool.nr_refused are COPY_REFUSED, others never
 *   - a frame is in exactly one place: its extent's free stack, an engine's
 *     hands or magazine (OPEN, owner set), a page (LOADING, READY, ISOLATED),
 *     quarantine (QUARANTINE, owner set)
 *   - node.used = sum of extents (memory) or of slots (block)
 *   - a page has copies only on nodes where its space has a pool
 *   - persistent block node: COPY_KEPT exactly while READY and not COPY_DOOMED,
 *     of spaces that have a label there; such a space has a bit in labelled
 *   - stage.out = buffers of reads and writes under way
 *
 * A node of memory may be a gang: each of its frames has a part for every rank
 * of an engine, and all parts share the frame's number, word and page. Only
 * spaces of the gang's world have pools there; sp->pool[cls][node] is NULL
 * otherwise, and so is page_pool(). A page that has a copy on a node has a pool
 * there.
 */
#ifndef KVMM_DAEMON_MM_MM_TYPES_H
#define KVMM_DAEMON_MM_MM_TYPES_H

#include "daemon/mm/heap.h"
#include "daemon/mm/mm.h"
#include "daemon/mm/mm_page.h"
#include "daemon/mm/mm_pool.h"
#include "daemon/mm/slab.h"
#include "ipc/base/list.h"
#include "ipc/index.h"

struct evac;				/* evacuate.c: an extent being emptied */
struct stage;				/* stage.c: a buffer for a page of a gang */
struct pub_entry;			/* publish.h: a page not yet sealed */
struct keep;				/* keep.h: what outlives the daemon */
struct adoption;			/* adopt.h: one mm_adopt() */
struct adopt;				/* adopt_stray.c: frames that wait */
struct scrub;				/* scrub.c */
struct recovery;			/* recover.h: what a block node finds again */

/**
 * struct mm_admit - what a block node admits (admit.c)
 * @second_touch: not what was used once; else everything
 * @day_permille: write budget: thousandths of its capacity a day; 0: no limit
 * @bucket:	the filter, @nr_buckets of them, a power of two; made when first
 *		asked, since only a node that is online knows its capacity
 * @filled_ns:	up to when the budget was filled; 0: not yet
 * @left:	bytes; below zero: overdrawn
 */
struct mm_admit {
	bool		second_touch;
	uint32_t	day_permille;
	uint64_t	*bucket;
	uint64_t	nr_buckets;
	uint64_t	filled_ns;
	int64_t		left;
};

/* One node, as mm runs it. */
struct mm_node {
	struct mm	*mm;
	struct node	*node;
	unsigned int	ix;
	uint8_t		kind;
	uint8_t		below;
	bool		mem;		/* extents, mappable */
	uint8_t		gang;		/* memory: parts of a frame; 0: whole */
	uint32_t	copy_off;	/* in a page: see page_copy() */
	uint64_t	size_max;
	uint64_t	extent_bytes;
	uint64_t	bytes_pages;
	struct mm_counters c;
	struct list	pools;		/* mm_pool.node_link */
	struct copy	**slots;	/* block: copy.slot_next by offset, slots.c */
	uint64_t	nr_slot_lists;
	uint64_t	slot_list_bytes;
	uint64_t	segment_after_ns; /* none could be emptied: not before */
	uint64_t	wb_bytes;	/* block: being written to it */
	uint32_t	wb_ios;
	uint64_t	wb_after_ns;	/* it refused a gang's: none before that */
	bool		no_space;	/* the last word of its medium on writes */
	struct mm_admit	admit;		/* block */
	struct node_owner owner;	/* block */
	struct recovery	*recovery;	/* block: until it is over */
	uint64_t	scrub_bytes_s;	/* block; 0: none */
	struct scrub	*scrub;		/* block */
	struct evac	*evac;		/* memory: at most one at a time */
	struct mm_pool	*next_pool;	/* memory: where kreclaimd goes on */
};

struct mm_client {
	struct mm	*mm;
	struct mm_engine *engine;
	struct mm_client_opts o;
	char		tenant[64], name[32];
	uint8_t		kept[MM_KEPT_BYTES];
	struct ledger	*ledger;
	uint32_t	rank, flags;
	uint32_t	keep;		/* its place in the state, plus one */
	bool		whole;		/* of what it had nothing was lost */
	bool		joined, connected, exited;
	bool		evicted;	/* its eviction has been asked for */
	bool		replaced;	/* its process came back and has its place */
	struct list	engine_link;
	struct list	windows;
	struct list	ops;		/* its operations in flight: struct mm_op */
	struct mm_space	*spaces[KVMM_MAX_SPACES / 32]; /* attached, dense */
	unsigned int	nr_spaces;
	struct mm_win	*win[256];
	void		(*exit_done)(void *arg);
	void		*exit_arg;
};

struct mm_engine {
	struct mm	*mm;
	uint32_t	no;
	uint8_t		token[16];
	bool		anonymous;	/* an engine of one */
	uint32_t	socket;
	uint32_t	world;
	uint32_t	nr_members, nr_exited, nr_stepping;
	enum ledger_engine_state state;
	uint64_t	step;		/* minimum, as last computed */
	uint64_t	step_wanted;
	uint64_t	nr_open;	/* OPEN frames */
	uint64_t	nr_quarantine;
	uint64_t	scan_pinned;	/* frames, by the count under way */
	bool		ended;		/* all members exited */
	bool		evicted;	/* over a limit: gets nothing any more */
	struct list	members;
	struct heap	waiters;	/* struct step_wait, by step */
	struct list	link;
};

/**
 * struct step_wait - something that goes on after a step of an engine
 * @node:	its key is the step
 * @fn:		called when the step is done (@err 0) or the engine dies
 *		(-EOWNERDEAD); may free @w
 */
struct step_wait {
	struct heap_node node;
	void		(*fn)(struct step_wait *w, int err);
};

/**
 * struct mm_op - an operation of a client that is not complete
 * @cancel:	of its kind; answers it or leaves it to be answered. Called by
 *		mm_cancel(), and in the cases below; may end the operation
 *
 * When its client disconnects, @link is deleted, @client and @win become NULL,
 * and @cancel is called: nothing is answered.
 */
struct mm_op {
	struct list	link;
	struct mm_client *client;
	struct mm_win	*win;
	uint64_t	tag;
	uint8_t		op;
	void		(*cancel)(struct mm_op *op);
};

/**
 * struct page_chain - one chain of a space's private hash
 * @may_have:	bit b is clear when no page of it has b in its hash's top six
 */
struct page_chain {
	struct page	*first;
	uint64_t	may_have;
};

/**
 * struct ghost - a key that was published in observe mode
 * @tag:	of its hash, 0: free
 * @ms:		when it was the first time, CLOCK_MONOTONIC modulo 2^32
 */
struct ghost {
	uint32_t	tag;
	uint32_t	ms;
};
#define GHOST_ENTRIES	(1u << 17)

/**
 * struct seen - what was asked for in a space
 * @ghost:	%GHOST_ENTRIES keys by hash, or NULL: never observed
 * @asked:	keys that ended requests named
 * @ghost_asked: of these in observe mode
 * @ghost_hits:	of these known when asked for
 * @ghost_pages: keys published in observe mode
 */
struct seen {
	struct ghost	*ghost;
	uint64_t	asked, ghost_asked, ghost_hits, ghost_pages;
};

/**
 * struct wreck - what is left of a blob that has lost a part (drop.c)
 * @key:	the page to drop next; in @group
 */
struct wreck {
	uint64_t	key[4];
	uint16_t	group;
};
#define WRECKS		16	/* of a space; more are left to reclaim */

/* What is kept of a space that ended; @id is zero where there is none. */
struct kept {
	uint8_t		id[32];
	struct seen	seen;
};
#define KEPT		8

struct mm_space {
	struct mm	*mm;
	uint32_t	ix;
	uint8_t		id[32];
	char		tenant[64];
	struct desc	desc;
	struct shm	keep_shm;	/* keep.h: who it is */
	uint8_t		*desc_bytes;
	size_t		desc_len;
	uint32_t	nr_clients;
	uint64_t	nr_pages;
	struct shm	index_shm;
	struct index	*index;
	uint32_t	index_epoch;
	uint64_t	index_used;
	uint64_t	below_used;	/* words */
	struct huge_job	*index_huge;	/* of this index, on its way */
	bool		index_asked;	/* for huge pages */
	struct page_chain *hash;	/* private: by page.hnext */
	uint64_t	hash_size;
	struct mm_pool	*pool[KVMM_MAX_CLASSES][KVMM_MAX_NODES];
	uint64_t	index_pushed;	/* lines and words that lost their place */
	struct pub_entry **pending;	/* publish_wait.c: by key hash */
	uint64_t	nr_pending;
	bool		ending;		/* being taken apart */
	bool		bare;		/* found again; no first extents yet */
	uint64_t	unlabelled;	/* nodes that would not have a label */
	uint64_t	labelled;	/* nodes that know it, by ... */
	uint32_t	label[KVMM_MAX_NODES];
	struct wreck	wreck[WRECKS];
	unsigned int	nr_wrecks;
	struct seen	seen;
	struct list	link;
};

/**
 * struct mm_stage - buffers for pages of gangs on their way (stage.c)
 * @kept:	struct stage, for the next of their size
 * @wait:	flights that wait for one: flight.pool_link
 * @serving:	those are being served
 * @out:	bytes in use, by direction
 * @bytes:	that exist
 * @idle_ns:	until when the kept ones are kept
 */
struct mm_stage {
	struct list	kept;
	struct list	wait;
	bool		serving;
	uint64_t	out[2];
	uint64_t	bytes;
	uint64_t	idle_ns;
};

/**
 * struct mm_ahead - memory of slabs that is being touched (ahead.c)
 * @mm:		NULL: nothing ever was
 * @from, @to:	what is left of it; a worker's while @running
 * @a_job:	bytes at a time: others wait for the worker, too
 * @stop:	enough
 */
struct mm_ahead {
	struct work	work;
	struct mm	*mm;
	struct slabs	*slabs;
	char		*from, *to;
	size_t		a_job;
	bool		running;
	_Atomic bool	stop;
};

struct mm {
	struct mm_opts	o;
	struct kvmm_hdr	*hdr;
	const struct mm_ops *ops;
	unsigned int	nr_nodes;
	struct mm_node	node[KVMM_MAX_NODES];
	struct mm_space	*space[KVMM_MAX_SPACES];
	struct kept	kept[KEPT];	/* ghost.c: the oldest at @kept_next */
	unsigned int	kept_next;
	struct list	spaces, engines;
	uint32_t	engine_seq;
	struct list	flights;	/* flight.c: reads in flight */
	struct heap	fetches;	/* fetch.c: operations, by deadline */
	struct list	wbacks;		/* writeback.c: writes in flight */
	struct mm_stage	stage;
	struct list	closed;		/* window.c: of which something is left */
	uint64_t	next_closed_ns;	/* 0: something changed, look now */
	bool		stopping;	/* tier_stop(): no new I/O */
	bool		wrecks;		/* some space may have one */
	uint64_t	next_step_poll_ns;
	uint64_t	next_reclaim_ns;
	uint64_t	now_ns;
	uint64_t	seed[2];
	struct slabs	pages;		/* with their copies on block nodes */
	struct slabs	copies;		/* in memory */
	struct mm_ahead	pages_ahead, copies_ahead;
	uint64_t	nr_step_waits;
	uint64_t	next_estimate_ns;
	bool		host_lacks;	/* memory, and none of ours is to grow */
	uint64_t	host_short;	/* of it, bytes that are still to come from us */
	uint64_t	next_spaces_ns;
	uint64_t	next_pools_ns;	/* 0: something changed, look now */
	struct list	pub_ready;	/* publish_wait.c: entries to look at again */
	struct list	pub_loading;	/* entries that wait for a load */
	bool		pub_running;
	unsigned int	nr_jobs;	/* on the work pool: checksums, zeroing */
	struct mm_pool	*pin_pool;	/* whose pins are being counted */
	struct keep	*keep;		/* NULL: nothing is kept */
	bool		adopting;	/* mm_adopt() makes spaces and pools */
	struct adoption	*adoption;	/* while mm_adopt() runs */
	struct adopt	*adopt;		/* NULL: nothing is left to be adopted */
	struct mm_adopted adopted;
	unsigned int	breaks;		/* MM_BREAK_*, test builds only */
};

/*
 * The unprotected variants, so that a test can show that it would notice:
 * KVMM_BREAK=name[,name], in test builds only.
 */
#define MM_BREAK_BARRIER	1u	/* isolate: sum before a relaxed store */
#define MM_BREAK_GENERATION	2u	/* the generation never advances */
#define MM_BREAK_CLOSURE	4u	/* drop whatever has children, too */
#define MM_BREAK_FENCE		8u	/* publish ignores its step */
#define MM_BREAK_LEDGER		16u	/* pins go with the socket */
#define MM_BREAK_CRC		32u	/* a read's checksum is not looked at */

static inline bool mm_broken(const struct mm *mm, unsigned int which)
{
#ifdef KVMM_TEST_BUILD
	return mm->breaks & which;
#else
	return false;
#endif
}

/*
 * Places where a daemon may die with something half done, for tests that have it
 * die at each of them.
 */
#ifdef KVMM_TEST_BUILD
extern void (*mm_point_fn)(void);
#define mm_point()	do { if (mm_point_fn) mm_point_fn(); } while (0)
#else
#define mm_point()	((void)0)
#endif

/* Frames that @p would have if the node were all its own. */
static inline uint64_t pool_most_frames(const struct mm_pool *p)
{
	return p->nd->node->capacity / ((uint64_t)p->parts * p->stride);
}

/* Are there frames for the pages of @sp on @nd? */
static inline bool node_serves(const struct mm_node *nd,
			       const struct mm_space *sp)
{
	return !nd->gang || nd->gang == sp->desc.world;
}

#endif
