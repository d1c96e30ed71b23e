/* SPDX-License-Identifier: Apache-2.0 */
/* Spaces and windows, in an era and as the user has them. */
#ifndef KVMM_LIBKVMM_SPACE_H
#define KVMM_LIBKVMM_SPACE_H

#include "ipc/base/bitmap.h"
#include "ipc/desc.h"
#include "ipc/frame.h"
#include "ipc/index.h"
#include "libkvmm/era.h"

/* -- space in an era (space.c) ---------------------------------------------------- */

/**
 * struct kvmm_ixmap - a mapped index
 * @words:	@nr_words of them, what is below
 */
struct kvmm_ixmap {
	struct kvmm_dead dead;
	struct shm	shm;
	const struct index *ix;
	uint64_t	nr_lines;
	const _Atomic uint64_t *words;
	uint64_t	nr_words;
	uint64_t	seed[2];
};

struct kvmm_view;
struct kvmm_blob;

/**
 * struct kvmm_att - a space in one era
 * @refs:	the space, every request that is bound to it
 * @read_until:	latest step that was not done when a request ended, or trimmed,
 *		for a daemon that is gone: what is mapped stays until then
 * @kept:	kvmm_blob.next of those whose memory may be used until then
 * @ix:		the space's index in the header
 * @index:	in force; swapped when it grows
 * @view:	open windows
 * @views:	those that are open, kvmm_view.next; whoever is in a set-up call,
 *		or in a poll while nobody is, has them
 */
struct kvmm_att {
	struct kvmm_dead dead;
	_Atomic uint32_t refs;
	struct kvmm_era	*era;
	struct kvmm_space *sp;
	uint32_t	ix;
	_Atomic uint64_t read_until;
	_Atomic(struct kvmm_blob *) kept;
	_Atomic(struct kvmm_ixmap *) index;
	_Atomic(struct kvmm_view *) view[KVMM_MAX_CLASSES][KVMM_MAX_NODES];
	struct kvmm_view *views;
};

/* Takes a reference unless @a is on its way out. */
bool kvmm_att_get(struct kvmm_att *a);
void kvmm_att_put(struct kvmm_att *a);
/*
 * Take the space's own reference if it is the only one: nobody gets another
 * until it is given back. Then kvmm_att_unclaim(), or kvmm_bury() once replaced.
 */
bool kvmm_att_claim(struct kvmm_att *a);
void kvmm_att_unclaim(struct kvmm_att *a);
/* Its daemon is gone, and what it showed may be read until @step. */
void kvmm_att_read_until(struct kvmm_att *a, uint64_t step);
/* WIRE_INDEX; takes the message's descriptor. */
int kvmm_space_index(struct kvmm *k, struct sock_msg *m);
/*
 * Attach (again); the caller is in a set-up call, and what becomes of the former
 * attachment is its business.
 */
int kvmm_space_enter(struct kvmm_space *sp, struct kvmm_era *e,
		     uint64_t deadline);

/**
 * struct kvmm_space - the user's handle of a space
 * @desc:	decoded
 * @bytes:	canonical form, for attaching again
 * @att:	the last era it was attached in
 * @reserved:	floors asked for, by class and node
 * @open:	the user has a window there, if not always a view
 * @wins:	kvmm_win.link
 * @reqs:	kvmm_req.link of those not ended, under kvmm.ops_lock
 * @leaving:	the user has detached it
 */
struct kvmm_space {
	struct kvmm	*k;
	struct list	link;
	struct desc	desc;
	uint32_t	flags;
	uint8_t		*bytes;
	size_t		nr_bytes;
	uint8_t		id[32];
	_Atomic(struct kvmm_att *) att;
	_Atomic uint32_t reserved[KVMM_MAX_CLASSES][KVMM_MAX_NODES];
	_Atomic bool	open[KVMM_MAX_CLASSES][KVMM_MAX_NODES];
	struct list	wins;
	struct list	reqs;
	struct kvmm_leaving leaving;
};

/* -- window in an era (view.c), and the user's (win.c) ------------------------------ */

/**
 * struct kvmm_peer - what another member of the engine has mapped
 */
struct kvmm_peer {
	struct kvmm_dead dead;
	struct shm	shm;
	const _Atomic uint64_t *bitmap;
	uint32_t	client;
	bool		stale;		/* the next daemon has not named it yet */
};

/* A frame that the daemon copies from or into; @freed: it has no owner any more. */
struct kvmm_busy {
	uint32_t	frame;
	uint32_t	refs;
	bool		freed;
};

/*
 * A frame whose publish was never answered. @freed: nobody here wants it any more;
 * its pin is kept until a daemon is there, of which its word is the last one.
 */
struct kvmm_limbo {
	uint32_t	frame;
	bool		freed;
};

/**
 * struct kvmm_view - a window's shared memory
 * @refs:	the att's list, and every request that used it: pins and frames
 *		of a request lie in here, also when the window is closed
 * @closed:	the daemon has the frames back, and may give @no to another
 *		window; set under @mag_lock
 * @no:		the daemon's number
 * @page_bytes:	of a page, what this process has of it: on a gang its part
 * @part_off:	in an extent, of what this process maps of it
 * @blind:	it maps nothing, but takes part in what is mapped: see
 *		kvmm_win_open()
 * @fpe_inv:	ceil(2^64 / frames_per_extent): a division by multiplication
 * @dense:	frames below it lie in mapped extents (but for frame 0's)
 * @mapped:	private copy of the bitmap, for what is not @dense
 * @seq:	extent_seq that is applied
 * @peer:	other members with the same window; @nr_peers places were used
 * @base:	of the window, while it is open
 * @pos:	by frame: where it stands in its request's list, under req.lock
 * @stack:	free frames of this process, under @mag_lock; @nr_stack of them
 * @busy:	@nr_busy frames that must not be given out, under @mag_lock
 * @limbo:	@nr_limbo frames of which nobody knows whether they are sealed,
 *		under @mag_lock
 * @mag_head:	of the magazine ring, @mag_lock
 * @free_after:	latest step named by a free
 * @target:	frames that a refill asks for
 * @level:	frames in hand once the last refill was answered, which may be
 *		fewer; @level_at refills had been then
 * @posted_n:	what the last refill asked for; 0: there was none
 * @posted_at:	refills answered when it was posted
 * @refused:	the last allocation was, when @refused_at refills were answered
 *		and @refused_with frames were in the magazine
 */
struct kvmm_view {
	struct kvmm_dead dead;
	_Atomic uint32_t refs;
	_Atomic bool	closed;
	struct kvmm_view *next;
	struct kvmm_att	*att;
	uint16_t	no;
	uint8_t		cls;
	uint8_t		node;
	uint32_t	rights;
	struct shm	table_shm, wl_shm;
	const struct frame_table *table;
	const _Atomic uint64_t *word;
	struct window_ledger *wl;
	_Atomic uint32_t *pins;
	_Atomic uint64_t *bitmap;
	uint32_t	max_frames;
	uint32_t	fpe;
	uint64_t	fpe_inv;
	uint32_t	nr_extents;
	uint32_t	page_bytes;
	uint64_t	part_off;
	bool		blind;
	_Atomic uint32_t dense;
	_Atomic uint64_t *mapped;
	_Atomic uint64_t seq;
	_Atomic uint32_t *pos;
	_Atomic(uint8_t *) base;
	_Atomic(struct kvmm_peer *) peer[KVMM_MAX_WORLD + 1];
	_Atomic uint32_t nr_peers;

	struct kvmm_mutex mag_lock;
	uint32_t	*stack;
	uint32_t	nr_stack;
	struct kvmm_busy *busy;
	uint32_t	nr_busy, cap_busy;
	struct kvmm_limbo *limbo;
	_Atomic uint32_t nr_limbo;
	uint32_t	cap_limbo;
	uint32_t	mag_head;
	uint32_t	mag_mask;
	const _Atomic uint32_t *mag;
	uint64_t	free_after;
	uint32_t	target;
	uint32_t	level;
	uint32_t	level_at;
	uint32_t	posted_n;
	uint32_t	posted_at;
	bool		refused;
	uint32_t	refused_at;
	uint32_t	refused_with;
};

/* From the two memfds' mappings, taken over on success; 0, -EPROTO, -ENOMEM. */
int kvmm_view_create(struct kvmm_att *a, unsigned int cls, unsigned int node,
		     uint32_t rights, uint16_t no, struct shm *table,
		     struct shm *wl, struct kvmm_view **ret);
void kvmm_view_free(struct kvmm_view *v);
/* Takes a reference unless @v is on its way out. */
bool kvmm_view_hold(struct kvmm_view *v);
/* @v->att must not be gone. */
void kvmm_view_drop(struct kvmm_view *v);
/* For an era that goes on: peers are named anew, and who is not, is none. */
void kvmm_view_peers_stale(struct kvmm_view *v);
void kvmm_view_peers_settle(struct kvmm *k, struct kvmm_view *v);
/* Nothing is posted in its name any more. */
void kvmm_view_shut(struct kvmm_view *v);
void kvmm_view_set_mapped(struct kvmm_view *v, uint32_t extent, bool up);
/* WIRE_PEER; takes the message's descriptor. */
int kvmm_view_peer(struct kvmm *k, struct sock_msg *m);

static inline uint32_t kvmm_view_extent(const struct kvmm_view *v, uint32_t f)
{
	return (unsigned __int128)f * v->fpe_inv >> 64;
}

static inline bool kvmm_view_mapped(const struct kvmm_view *v, uint32_t f)
{
	/* acquire: pairs with kvmm_view_set_mapped(), after the mmap() */
	if (likely(f < atomic_load_explicit(&v->dense, memory_order_acquire)))
		return f >= v->fpe;
	return f < v->max_frames && f >= v->fpe &&
	       bitmap_shared_test(v->mapped, kvmm_view_extent(v, f));
}

/* Do the other members have it mapped, too? They clear a bit before they unmap. */
static inline bool kvmm_view_shared(const struct kvmm_view *v, uint32_t f)
{
	struct kvmm_view *vv = (struct kvmm_view *)v;
	/* acquire: pairs with kvmm_view_peer() */
	uint32_t i, n = atomic_load_explicit(&vv->nr_peers,
					     memory_order_acquire);

	for (i = 0; i < n; i++) {
		/* seq_cst: see the top of lib.h */
		const struct kvmm_peer *p = atomic_load(&vv->peer[i]);

		if (p && !bitmap_shared_test(p->bitmap, kvmm_view_extent(v, f)))
			return false;
	}
	return true;
}

static inline bool kvmm_view_closed(const struct kvmm_view *v)
{
	return atomic_load_explicit((_Atomic bool *)&v->closed,
				    memory_order_relaxed);
}

/* Within a hot call only: see kvmm_req_view() for what lasts. */
static inline struct kvmm_view *kvmm_att_view(struct kvmm_att *a,
					      unsigned int cls,
					      unsigned int node)
{
	if (cls >= KVMM_MAX_CLASSES || node >= KVMM_MAX_NODES)
		return NULL;
	/* seq_cst: see the top of lib.h */
	return atomic_load(&a->view[cls][node]);
}

/**
 * struct kvmm_win - the user's handle of a window
 * @base:	reserved address space of @va_bytes; NULL: nothing is mapped here
 * @view:	what is mapped there now; NULL while nothing is
 * @gang:	of the node
 * @seg_off:	offset of each segment within a page, or this rank's part of it
 * @part_bytes:	of that
 * @leaving:	the user has closed it
 */
struct kvmm_win {
	struct kvmm_space *sp;
	struct list	link;
	struct kvmm_leaving leaving;
	unsigned int	cls, node;
	struct kvmm_win_opts opts;
	uint8_t		*base;
	size_t		va_bytes;
	size_t		stride;
	uint8_t		gang;
	uint32_t	*seg_off;
	uint32_t	part_bytes;
	uint32_t	nsegs;
	_Atomic(struct kvmm_view *) view;
	uint64_t	extent_bytes;
	uint32_t	fpe;
	_Atomic uint32_t dense;		/* as the view's */
};

#endif
