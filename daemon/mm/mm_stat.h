/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What mm shows of itself: counters, who pins, pages, clients, spaces, and whether
 * all of it holds. A part of mm.h, which others include.
 */
#ifndef KVMM_DAEMON_MM_MM_STAT_H
#define KVMM_DAEMON_MM_MM_STAT_H

#include <stdbool.h>
#include <stdint.h>

#include <kvmm/kvmm.h>

#include "daemon/node/node.h"
#include "ipc/base/err.h"
#include "ipc/desc.h"

struct mm;
struct mm_client;

/**
 * struct mm_counters - vmstat of a node; all only ever grow
 */
struct mm_counters {
	uint64_t	pgpublish;	/* sealed here */
	uint64_t	pgpublish_exist; /* refused: somebody was first */
	uint64_t	pgpublish_stale; /* refused: parent nowhere */
	uint64_t	pgload;		/* came from below */
	uint64_t	pgload_fail;
	uint64_t	pgload_late;	/* came after all its waiters had left */
	uint64_t	pgdemote;	/* written to the node below */
	uint64_t	pgdemote_fail;
	uint64_t	pgadmit;	/* block: written here on their own account,
					   and not for one that hangs on them */
	uint64_t	pgadmit_refused; /* block: not worth a write */
	uint64_t	pgadmit_budget;	/* block: no more writes just now */
	uint64_t	pgdrop;		/* left, a copy lives below */
	uint64_t	pgdrop_gone;	/* left, was the last copy */
	uint64_t	pgdrop_orphan;	/* left because its ancestor did, or a part of
					   the same blob */
	uint64_t	pgscan_kreclaimd;
	uint64_t	pgscan_direct;
	uint64_t	pgsteal_kreclaimd;
	uint64_t	pgsteal_direct;
	uint64_t	isolate_pinned;	/* isolated, found pinned, put back */
	uint64_t	allocstall;	/* refills that found nothing */
	uint64_t	pgcrc_fail;
	uint64_t	pgbreach;	/* written to after it was sealed: dropped */
	uint64_t	pgreport;	/* dropped on a consumer's verdict */
	uint64_t	pgundo;		/* dropped: its publisher took it back */
	uint64_t	wreck_lost;	/* blobs that lost a part, too many to be noted;
					   the first node counts for all */
	uint64_t	pgtouch;
	uint64_t	pgfork;		/* OPEN frames copied for a fork */
	uint64_t	stage_wait;	/* loads that waited for a buffer */
	uint64_t	fetch_shared;	/* waiters that joined a read in flight */
	uint64_t	bytes_in;	/* copied or read into this node */
	uint64_t	bytes_out;	/* written or copied from it */
	uint64_t	bytes_copied_shared; /* copied to serve a hit: must be 0 */
	uint64_t	pgrecover;	/* found again after a restart */
	uint64_t	recover_orphan;	/* not taken: its parent was not there */
	uint64_t	recover_label;	/* not taken: of no space that may be */
	uint64_t	recover_bad;	/* not taken: it makes no sense */
	uint64_t	recover_old;	/* not taken: there was a newer one */
	uint64_t	pgscrub;	/* block: read to see whether they are whole */
	uint64_t	pgscrub_bad;	/* block: of these dropped */
};

struct mm_node_stat {
	struct node	*node;
	uint8_t		kind, below, gang;
	uint64_t	bytes_extents;	/* in extents or slots */
	uint64_t	bytes_pages;	/* in READY pages */
	uint64_t	frames, frames_free, frames_open, frames_loading;
	uint64_t	frames_ready, frames_quarantine, frames_magazine;
	uint64_t	pages_dirty;	/* no copy below */
	uint64_t	pages_refused;	/* of these, not admitted there */
	bool		second_touch;	/* block: see struct mm_node_opts */
	uint64_t	filter_bytes;	/* block: the filter of what was seen */
	uint64_t	budget_day;	/* block: bytes a day; 0: no limit */
	int64_t		budget_left;	/* block: below zero: overdrawn */
	struct mm_counters c;
};

unsigned int mm_nr_nodes(const struct mm *mm);
void mm_node_stat(struct mm *mm, unsigned int node, struct mm_node_stat *st);

/**
 * struct mm_pin_info - who pins, for kvmmctl pins
 * @partial:	there may be more: there were too many words to look at
 */
struct mm_pin_info {
	struct mm_client *client;
	const char	*name, *tenant;
	int32_t		pid;
	uint32_t	space, cls, node;
	uint64_t	pins, frames;	/* sum, distinct frames */
	bool		exited;		/* waits for its engine's other members */
	bool		partial;
};

/** mm_for_each_pin() - looks at @most words of pins at most, in all ledgers */
void mm_for_each_pin(struct mm *mm, uint64_t most,
		     void (*fn)(const struct mm_pin_info *pi, void *arg),
		     void *arg);

/** struct mm_page_info - one page, for the dump */
struct mm_page_info {
	uint8_t		key[32], parent[32];
	uint32_t	space;
	uint16_t	group;
	bool		has_parent;
	uint32_t	raw_bytes, pos;
	struct {
		uint8_t	state;		/* 0 none, 1 loading, 2 writing, 3 ready */
		uint32_t frame;
		uint64_t word, slot;
		uint32_t pins;
	} copy[KVMM_MAX_NODES];
};

/**
 * struct mm_page_cursor - where a walk over all pages is
 * @space:	number of the space
 * @size:	of its table of pages; 0: the walk begins
 * @at:		place in that table
 */
struct mm_page_cursor {
	uint32_t	space;
	uint64_t	size;
	uint64_t	at;
};

/**
 * mm_walk_pages() - look at some pages, from where the last call ended
 * @cur:	zeroed for the first call; moved on
 * @most:	stop when there were at least so many (a few more may come)
 *
 * What one call shows is of one moment. Between two calls pages may come and
 * go: such a page is shown or not, any other exactly once.
 *
 * Return: 1: there are more; 0: that was all; -ESTALE: the space is gone or its
 * table has grown, so nobody knows which pages were shown: start over.
 */
int mm_walk_pages(struct mm *mm, struct mm_page_cursor *cur, uint64_t most,
		  void (*fn)(const struct mm_page_info *pi, void *arg),
		  void *arg);

struct mm_client_info {
	const char	*name, *tenant;
	int32_t		pid;
	uint32_t	rank, world, flags, engine, rights, socket;
	uint32_t	state;		/* enum ledger_engine_state */
	uint64_t	step, open_frames, pins;
	uint64_t	held_bytes;	/* in extents that it should have unmapped */
	bool		connected, exited;
	bool		pins_partial;	/* there may be more */
};

/** mm_for_each_client() - looks at @most words of pins at most */
void mm_for_each_client(struct mm *mm, uint64_t most,
			void (*fn)(struct mm_client *c,
				   const struct mm_client_info *ci, void *arg),
			void *arg);

struct mm_space_info {
	uint32_t	ix, clients, mode;
	uint8_t		id[32];
	const struct desc *desc;
	const char	*tenant;
	uint64_t	pages, index_lines, index_used, metadata_bytes;
	uint64_t	bytes[KVMM_MAX_NODES];	/* READY copies per node */
	uint64_t	asked;		/* keys that ended requests named */
	uint64_t	ghost_asked;	/* of these in observe mode */
	uint64_t	ghost_hits;	/* of these known when asked for */
	uint64_t	ghost_pages;	/* keys published in observe mode */
};
void mm_for_each_space(struct mm *mm,
		       void (*fn)(const struct mm_space_info *si, void *arg),
		       void *arg);
/** mm_stage_bytes() - buffers that pages of gangs go through, in use or kept */
uint64_t mm_stage_bytes(const struct mm *mm);
/** mm_kept_bytes() - what is remembered of spaces that ended */
uint64_t mm_kept_bytes(const struct mm *mm);
/** mm_admit_bytes() - what block nodes remember of pages that they refused */
uint64_t mm_admit_bytes(const struct mm *mm);

/**
 * mm_check() - every conservation law: closure, accounts, states, index
 *
 * Slow; for tests and the admin request `check`.
 * Return: 0, or -EUCLEAN with the first law that does not hold.
 */
int mm_check(struct mm *mm, struct errmsg *e);

#endif
