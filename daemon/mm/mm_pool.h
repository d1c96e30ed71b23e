/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools: their extents and frames, and the windows of those who map them. A part
 * of mm_types.h.
 */
#ifndef KVMM_DAEMON_MM_MM_POOL_H
#define KVMM_DAEMON_MM_MM_POOL_H

#include "daemon/mm/mm.h"
#include "daemon/mm/shape.h"
#include "ipc/base/list.h"

struct mm_node;
struct page;

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

/* Bytes of a part of an extent, and of all of it. */
static inline uint64_t pool_part_bytes(const struct mm_pool *p)
{
	return (uint64_t)p->per_extent * p->stride;
}

static inline uint64_t pool_extent_bytes(const struct mm_pool *p)
{
	return p->parts * pool_part_bytes(p);
}

#endif
