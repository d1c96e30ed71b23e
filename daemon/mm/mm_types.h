/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm's own structures; nobody outside daemon/mm includes this.
 *
 * A page is (space, group, key). It may have one copy per node. What a copy is
 * depends on its pool: a frame of a memory pool, a slot of a block pool.
 *
 *	copy states	NONE -> LOADING -> READY -> NONE	(memory, from below)
 *			NONE -> READY -> NONE			(memory, publish)
 *			NONE -> WRITING -> READY -> NONE	(block)
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
#include "daemon/mm/shape.h"
#include "daemon/mm/slab.h"
#include "ipc/base/list.h"
#include "ipc/index.h"

#define MM_PAGE_MAX_BYTES	(1u << 30)

enum copy_state {
	COPY_NONE	= 0,
	COPY_LOADING	= 1,
	COPY_WRITING	= 2,
	COPY_READY	= 3,
};

struct flight;				/* flight.c: a read in flight */
struct wback;				/* writeback.c: a write in flight */
struct evac;				/* evacuate.c: an extent being emptied */
struct stage;				/* stage.c: a buffer for a page of a gang */
struct pub_entry;			/* publish.h: a page not yet sealed */
struct keep;				/* keep.h: what outlives the daemon */
struct adoption;			/* adopt.h: one mm_adopt() */
struct adopt;				/* adopt_stray.c: frames that wait */
struct scrub;				/* scrub.c */
struct recovery;			/* recover.h: what a block node finds again */

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

/**
 * struct mm_extent - one extent of a memory pool
 * @ext:	NULL: this number is not in use
 * @nr_free:	on its free stack: pool->free[no * per_extent] and on
 * @nr_used:	frames that are not
 * @up_seq:	extent_seq when it came
 * @down_seq:	when windows were told to unmap it; 0: not yet, or never
 * @down_ns:	by when they must have
 * @going:	closed: its free frames are not handed out
 * @lost:	the last daemon's, and given up: the number is not used again, since
 *		clients may read on in what they have mapped
 * @held:	a window did not unmap it in time: charged until that one does,
 *		or exits. Changed by extent_set_held() only
 * @stays_ns:	it could not be emptied in time: others first, until then
 */
struct mm_extent {
	struct extent	*ext;
	uint32_t	no;
	uint32_t	nr_free;
	uint32_t	nr_used;
	int		ro_fd, rw_fd;
	uint64_t	up_seq;
	uint64_t	down_seq;
	uint64_t	down_ns;
	uint64_t	stays_ns;
	bool		going;
	bool		held;
	bool		lost;
};

/**
 * struct frame_meta - what mm knows of a frame, beside its word
 * @page:	LOADING, READY, ISOLATED
 * @owner:	OPEN, QUARANTINE: the engine; in a magazine also @win
 * @win:	the window whose magazine or hands it is in
 * @refs:	hand-over references, I/O, workers: not reclaimable while > 0
 * @gen:	generation of the last READY word
 * @flags:	FMETA_*: why an OPEN frame is not its engine's to name
 */
struct frame_meta {
	struct page	*page;
	struct mm_engine *owner;
	struct mm_win	*win;
	uint64_t	gen;
	uint32_t	refs;
	uint32_t	flags;
};

#define FMETA_PUB	1u	/* a publish of it is pending */
#define FMETA_FREE	2u	/* freed, waits for its step */
#define FMETA_ZERO	4u	/* QUARANTINE: a worker zeroes it */
#define FMETA_READ	8u	/* LOADING, no page: an abandoned read has it, or
				   one of the last daemon's (adopt_stray.c) */
#define FMETA_COPY	16u	/* a fork is to be copied into it */

/**
 * struct mm_pool - (space, class, node)
 * @parts:	of a frame: of a gang one a rank, else one
 * @stride:	from frame to frame within a part. An extent is @parts times
 *		@per_extent * @stride bytes: all frames' parts of rank 0, then
 *		those of rank 1, ...
 * @shape:	how a page is cut into parts; NULL: it lies there in order
 * @free:	free stacks, one an extent (struct mm_extent)
 * @free_map:	extents that have a free frame to hand out
 * @nr_free:	on the stacks of extents that stay
 * @nr_frames:	in live extents; memory
 * @used_ns:	when frames were last taken
 * @windows:	all window ledgers, those of exited clients too: their pins are
 *		summed. mm_win.pool_link
 * @want:	frames that refills and loads could not get: reclaim works for it.
 *		Refills and loads each add and take away their own: pool_wants()
 * @reserve:	free frames that only loads may take (watermark min)
 * @dirty:	READY copies without a READY copy below, coldest first; kept by
 *		copy_set_state()
 * @nr_refused:	of them, those that the node below did not admit
 * @full_ns:	a search that saw every page found nothing to take: until then
 *		no other is made for a load
 * @squeezed_ns: since when there has been somebody who waits for frames, 0:
 *		nobody does; see pool_wants()
 * @wb_boost:	pages to keep clean beyond the usual share: dirty victims were met
 */
struct mm_pool {
	struct mm_space	*space;
	unsigned int	cls;
	struct mm_node	*nd;
	struct list	node_link;

	uint32_t	page_bytes;	/* of the class */
	uint32_t	parts;
	uint32_t	stride;
	struct shape	*shape;
	void		*policy;	/* instance memory */
	uint64_t	nr_pages;	/* READY copies */
	uint64_t	nr_dirty;	/* of them, without a copy below; memory */
	uint64_t	nr_refused;	/* of these, not admitted there */
	struct list	dirty;		/* copy.link; nr_dirty of them */
	uint64_t	full_ns;
	uint64_t	squeezed_ns;
	uint64_t	wb_boost;
	uint32_t	nr_writing;	/* frames that are being written down */

	/* memory pools */
	struct shm	table_shm;
	struct frame_table *table;
	struct shm	record_shm;
	struct frame_record *record;
	_Atomic uint64_t *owner;	/* keep.h: of OPEN frames */
	bool		adopted;	/* table and records were there before */
	struct frame_meta *meta;	/* [max_frames], lazily backed */
	size_t		lazy_bytes;	/* of the mapping of meta and free */
	uint32_t	max_frames;
	uint32_t	per_extent;
	uint32_t	max_extents;
	uint32_t	nr_extents;
	uint32_t	nr_lost;	/* numbers that are not used again */
	struct mm_extent *extent;	/* [max_extents + 1]; 0 never exists */
	unsigned int	extents_coming;
	unsigned int	extents_putting; /* given back, not yet gone */
	unsigned int	extents_going;	/* closed */
	unsigned int	extents_held;	/* of them: nobody knows when they go */
	uint64_t	stays_ns;	/* the latest of its extents' */
	uint64_t	look_ns;	/* none could be emptied: not before */
	bool		ending;
	bool		feeding;
	uint64_t	used_ns;
	uint64_t	grow_after_ns;	/* not before: the last try failed */
	uint64_t	pin_scan_ns;	/* when pins were last counted */
	uint32_t	pin_scan_at;	/* next extent of the count; 0: none */
	uint32_t	starved;	/* engine whose loads found no frame since then;
					   0: none */
	bool		starved_more;	/* ... and others' */
	uint32_t	*free;
	uint64_t	*free_map;
	uint32_t	nr_free;
	uint32_t	nr_frames;
	uint32_t	nr_open;	/* with engines, magazines included */
	uint32_t	nr_loading;
	uint32_t	nr_quarantine;
	uint32_t	want;
	uint32_t	wmark_min, wmark_low, wmark_high, wmark_promo;
	uint32_t	reserve;
	bool		reclaiming;	/* below low, until high */
	struct list	windows;
	struct list	refill_wait;	/* mm_win.refill_link: wants not met */
	struct list	load_wait;	/* flight.c: flights that wait for a frame */
};

/**
 * struct mm_win - one client's view of a memory pool
 * @refs:	operations that name it, answers whose references are not put
 * @closed:	by the client; its pins still count until they are gone
 * @void_pins:	over the limit: not in pool->windows any more
 * @told_seq:	extent_seq up to which extents were passed to the client
 * @pins, @mag, @bitmap: into the ledger; from the daemon's own arithmetic,
 *		never through offsets that the client can write
 * @nr_open:	OPEN frames that this window was given
 * @want:	frames that the last refill could not get; on pool->refill_wait
 * @closed_link: in mm.closed while @closed
 * @open_at:	closed: extent where the search for OPEN frames goes on
 * @pins_at:	closed: frame where the search for pins goes on
 */
struct mm_win {
	struct mm_client *client;
	uint32_t	keep;		/* its place in the state, plus one */
	struct mm_engine *engine;
	struct mm_pool	*pool;
	uint32_t	rights;
	uint16_t	no;
	bool		closed, void_pins;
	uint32_t	refs;
	struct shm	ledger_shm;
	struct window_ledger *wl;
	_Atomic uint32_t *pins;
	_Atomic uint32_t *mag;
	_Atomic uint64_t *bitmap;
	uint32_t	mag_entries;
	uint32_t	mag_tail;	/* private copies of published cursors */
	uint32_t	refills;
	uint32_t	want;
	uint32_t	nr_open;
	uint64_t	synced_seq, told_seq;
	uint64_t	last_refill_ns;
	uint32_t	given_since;	/* frames handed out, for the demand rate */
	uint32_t	reserved;
	struct list	pool_link;
	struct list	client_link;
	struct list	refill_link;
	struct list	closed_link;
	uint32_t	open_at, pins_at;
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

/* Bytes of a part of an extent, and of all of it. */
static inline uint64_t pool_part_bytes(const struct mm_pool *p)
{
	return (uint64_t)p->per_extent * p->stride;
}

static inline uint64_t pool_extent_bytes(const struct mm_pool *p)
{
	return p->parts * pool_part_bytes(p);
}

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
