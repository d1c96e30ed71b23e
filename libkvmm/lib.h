/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvmm's objects, and which lifetime each of them has.
 *
 *   kvmm		a connection, for as long as the user has the handle
 *   era		one daemon behind it: header, ledger, rings. A new daemon is
 *			a new era; the old one stays while something uses it
 *   att		a space in one era: its index and its views
 *   view		a window's shared memory in one era: frame table, pins,
 *			magazine. Lives as long as its att
 *   space, win		the user's handles; they outlive eras
 *   req		bound to one att; its pins and frames lie in its views
 *   op			a publish or fetch in flight; keeps its request alive
 *
 * Who may free what another thread may be looking at: every hot call runs
 * between kvmm_enter() and kvmm_exit(), which count readers. An object that was
 * unlinked is freed when the count was seen at zero afterwards: whoever enters
 * later cannot find it any more. (The unlinking store and the load of the count
 * are seq_cst, and so are the increment and the load of the link: the same
 * Dekker pair as pins and reclaim.)
 *
 * Locks, outermost first (ranks in ipc/base/lock.h): kvmm.lock (completions,
 * connection), req.lock (a request against kvmm_poll() in another thread),
 * view.mag_lock, kvmm.ops_lock, era.sq_lock. Set-up calls own the socket
 * through kvmm.calling, not through a lock, so that nobody is kept waiting
 * beyond its deadline, and callbacks run under no lock.
 */
#ifndef KVMM_LIBKVMM_LIB_H
#define KVMM_LIBKVMM_LIB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <kvmm/kvmm.h>

#include "ipc/abi.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/err.h"
#include "ipc/base/list.h"
#include "ipc/base/lock.h"
#include "ipc/desc.h"
#include "ipc/frame.h"
#include "ipc/index.h"
#include "ipc/ledger.h"
#include "ipc/ring.h"
#include "ipc/shm.h"
#include "ipc/sock.h"

#define LIB_CALL_TIMEOUT_NS	(2 * NSEC_PER_SEC)
#define LIB_FETCH_NS		(2 * NSEC_PER_SEC)	/* deadline 0, no cost */
#define LIB_RECONNECT_NS	(100 * NSEC_PER_MSEC)
#define LIB_SOCK_CHECK_NS	(10 * NSEC_PER_MSEC)	/* while busy */
#define LIB_SOCK_IDLE_NS	(100 * NSEC_PER_USEC)	/* while not */
/* How long kvmm_poll() stays awake for completions: about what a wake costs. */
#define LIB_SPIN_NS		(50 * NSEC_PER_USEC)
/* After a deadline the daemon gets this long to say what it has. */
#define LIB_LATE_GRACE_NS	(5 * NSEC_PER_MSEC)
/* Step words may be written by a stream, of which nobody tells us. */
#define LIB_STEP_POLL_NS	NSEC_PER_MSEC

#define LIB_MAX_OPS		4096	/* in flight, a connection */
#define LIB_MAX_KEYS		(1u << 22) /* of one match */
#define LIB_MAG_TARGET		64	/* frames asked for at least */

/* -- unprotected variants, in test builds only ------------------------------- */

#define BREAK_PINBARRIER	1u	/* pin without an atomic operation */
#define BREAK_GENERATION	2u	/* compare the state only */
#define BREAK_READY		4u	/* compare the generation only */

#ifdef KVMM_TEST_BUILD
extern unsigned int kvmm_breaks;
void kvmm_breaks_init(void);
static inline bool lib_broken(unsigned int what)
{
	return kvmm_breaks & what;
}
#else
static inline void kvmm_breaks_init(void) {}
static inline bool lib_broken(unsigned int what)
{
	return false;
}
#endif

/* -- errors and options (error.c) -------------------------------------------- */

/* The calling thread's sentence. */
struct errmsg *kvmm_errmsg(void);

void kvmm_say(const char *fmt, ...) __printf(1, 2);

/* Set the thread's sentence, return @err. A macro, so that gcc sees it is not 0. */
#define kvmm_fail(err, ...) ({						\
	int __err = (err);						\
	kvmm_say(__VA_ARGS__);						\
	__err; })

/*
 * Copy an option struct that begins with its size: what the caller's version
 * lacks is zero, what ours lacks must be zero. 0, -EINVAL, -E2BIG.
 */
int kvmm_opts_copy(void *to, size_t known, const void *from, const char *what);

/* -- deferred freeing --------------------------------------------------------- */

/**
 * struct kvmm_dead - embedded in what is freed once no hot call can see it
 * @free: called outside of locks
 */
struct kvmm_dead {
	struct kvmm_dead *next;
	void		(*free)(struct kvmm_dead *d);
};

/* -- era (era.c, ring.c, step.c) ------------------------------------------------ */

struct kvmm_job;

/* One place of the table of operations in flight. */
struct kvmm_op_slot {
	struct kvmm_job	*op;
	uint64_t	wire;		/* tag on the ring: slot | sequence << 16 */
	uint32_t	part;
	uint32_t	next_free;
};

/**
 * struct kvmm_era - one daemon, as seen through one connection
 * @refs:	kvmm.era, every att
 * @lost:	the connection ended; nothing is posted or matched any more
 * @doorbell:	eventfd that wakes the daemon
 * @notify:	eventfd that the daemon wakes us with
 * @peer:	the other members' ledgers by rank, as far as they have a step
 *		word; @leader, which may have none, is not among them
 * @sq_tail, @arena_tail: the producer's own cursors, under @sq_lock
 * @cq_head:	the consumer's, under kvmm.lock
 * @slot:	operations in flight, under kvmm.ops_lock
 * @ops:	kvmm_op.link of them
 * @next_late_ns: no operation's deadline is before it
 * @deferred:	kvmm_deferred.link by step, under kvmm.ops_lock
 */
struct kvmm_era {
	struct kvmm_dead dead;
	struct kvmm	*k;
	_Atomic uint32_t refs;
	_Atomic bool	lost;
	uint64_t	epoch;
	struct shm	hdr_shm, ledger_shm;
	const struct kvmm_hdr *hdr;
	struct ledger	*ledger;
	int		doorbell, notify;

	struct kvmm_info info;		/* of the welcome */

	_Atomic bool	joined;
	uint32_t	flags, rank, world;
	_Atomic(const struct ledger *) peer[KVMM_MAX_WORLD];
	struct shm	peer_shm[KVMM_MAX_WORLD];

	struct kvmm_mutex sq_lock;
	struct ring_sqe	*sq;
	uint8_t		*arena;
	uint32_t	sq_tail;
	uint64_t	arena_tail;

	const uint8_t	*cq;
	uint32_t	cq_head;

	struct kvmm_op_slot *slot;
	uint32_t	slot_free;
	uint32_t	op_seq;
	struct list	ops;
	_Atomic uint32_t nr_ops;
	_Atomic uint64_t next_late_ns;

	struct list	deferred;
	_Atomic uint32_t nr_deferred;

	uint32_t	*req_free;	/* stack of request slots */
	uint32_t	nr_req_free;
	bool		word_out;	/* a stream may write our step word */
	struct kvmm_era	*next_out;
};

/**
 * struct kvmm_deferred - something that waits for a step of the engine
 * @fn:		called under no lock; may free @d
 */
struct kvmm_deferred {
	struct list	link;
	uint64_t	step;
	void		(*fn)(struct kvmm_deferred *d);
};

struct sock_msg;
int kvmm_era_create(struct kvmm *k, struct sock_msg *m, struct kvmm_era **ret);
void kvmm_era_put(struct kvmm_era *e);
/* A member came or went (WIRE_MEMBER). Takes the message's descriptor. */
int kvmm_era_member(struct kvmm_era *e, struct sock_msg *m);

static inline struct ledger_req *kvmm_era_req(struct kvmm_era *e, uint32_t slot)
{
	return (struct ledger_req *)((char *)e->ledger + e->ledger->req_off) +
	       slot;
}

static inline bool kvmm_era_lost(const struct kvmm_era *e)
{
	/* relaxed: a call that is late by a moment was merely early */
	return atomic_load_explicit(&e->lost, memory_order_relaxed);
}

/* A member of the engine is gone: nothing new is begun. */
static inline bool kvmm_era_dying(const struct kvmm_era *e)
{
	return atomic_load_explicit(&e->ledger->engine_state,
				    memory_order_relaxed) == ENGINE_DYING;
}

uint64_t kvmm_era_step(const struct kvmm_era *e);

/*
 * Run @d->fn when the engine has completed @step; at once when it has. Needs
 * no memory. After the era is lost nothing runs any more: kvmm_step_drop().
 */
void kvmm_step_defer(struct kvmm_era *e, struct kvmm_deferred *d,
		     uint64_t step);
void kvmm_step_run(struct kvmm_era *e);
/* The daemon is gone, and with it whom the pins were for. */
void kvmm_step_drop(struct kvmm_era *e);

/*
 * kvmm_sq_push() - post one entry, with @bytes of @array in the arena
 *
 * Rings the doorbell if the daemon sleeps. 0, -EAGAIN (no room), -ENOTCONN.
 */
int kvmm_sq_push(struct kvmm_era *e, struct ring_sqe *sqe, const void *array,
		 uint32_t bytes);
/* The same in two: the bell costs a system call when the daemon sleeps. */
int kvmm_sq_post(struct kvmm_era *e, struct ring_sqe *sqe, const void *array,
		 uint32_t bytes);
void kvmm_sq_bell(struct kvmm_era *e);

/* -- space in an era (space.c) ---------------------------------------------------- */

/**
 * struct kvmm_ixmap - a mapped index
 */
struct kvmm_ixmap {
	struct kvmm_dead dead;
	struct shm	shm;
	const struct index *ix;
	uint64_t	nr_lines;
	uint64_t	seed[2];
};

struct kvmm_view;

/**
 * struct kvmm_att - a space in one era
 * @refs:	the space, every request that is bound to it
 * @ix:		the space's index in the header
 * @index:	in force; swapped when it grows
 * @view:	open windows
 * @views:	all that ever were, kvmm_view.next
 */
struct kvmm_att {
	struct kvmm_dead dead;
	_Atomic uint32_t refs;
	struct kvmm_era	*era;
	struct kvmm_space *sp;
	uint32_t	ix;
	_Atomic(struct kvmm_ixmap *) index;
	_Atomic(struct kvmm_view *) view[KVMM_MAX_CLASSES][KVMM_MAX_NODES];
	struct kvmm_view *views;
};

/* Takes a reference unless @a is on its way out. */
bool kvmm_att_get(struct kvmm_att *a);
void kvmm_att_put(struct kvmm_att *a);
/* WIRE_INDEX; takes the message's descriptor. */
int kvmm_space_index(struct kvmm *k, struct sock_msg *m);
/* Attach (again); the caller is in a set-up call. */
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
};

/**
 * struct kvmm_view - a window's shared memory
 * @no:		the daemon's number
 * @fpe_inv:	ceil(2^64 / frames_per_extent): a division by multiplication
 * @dense:	frames below it lie in mapped extents (but for frame 0's)
 * @mapped:	private copy of the bitmap, for what is not @dense
 * @seq:	extent_seq that is applied
 * @peer:	other members with the same window; @nr_peers places were used
 * @base:	of the window, while it is open
 * @pos:	by frame: where it stands in its request's list, under req.lock
 * @stack:	free frames of this process, under @mag_lock; @nr_stack of them
 * @mag_head:	of the magazine ring, @mag_lock
 * @free_after:	latest step named by a free since the stack gave some back
 * @target:	frames that a refill asks for
 * @posted_n:	what the last refill asked for; 0: there was none
 * @posted_at:	refills answered when it was posted
 * @refused:	the last allocation was, when @refused_at refills were answered
 *		and @refused_with frames were in the magazine
 */
struct kvmm_view {
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
	uint32_t	mag_head;
	uint32_t	mag_mask;
	const _Atomic uint32_t *mag;
	uint64_t	free_after;
	uint32_t	target;
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
		/* seq_cst: see the top of this file */
		const struct kvmm_peer *p = atomic_load(&vv->peer[i]);

		if (p && !bitmap_shared_test(p->bitmap, kvmm_view_extent(v, f)))
			return false;
	}
	return true;
}

static inline struct kvmm_view *kvmm_att_view(struct kvmm_att *a,
					      unsigned int cls,
					      unsigned int node)
{
	if (cls >= KVMM_MAX_CLASSES || node >= KVMM_MAX_NODES)
		return NULL;
	/* seq_cst: see the top of this file */
	return atomic_load(&a->view[cls][node]);
}

/**
 * struct kvmm_win - the user's handle of a window
 * @base:	reserved address space of @va_bytes
 * @view:	what is mapped there now; NULL while nothing is
 * @seg_off:	offset of each segment within a page
 */
struct kvmm_win {
	struct kvmm_space *sp;
	struct list	link;
	unsigned int	cls, node;
	struct kvmm_win_opts opts;
	uint8_t		*base;
	size_t		va_bytes;
	size_t		stride;
	uint32_t	*seg_off;
	uint32_t	nsegs;
	_Atomic(struct kvmm_view *) view;
	uint64_t	extent_bytes;
	uint32_t	fpe;
	_Atomic uint32_t dense;		/* as the view's */
};

/* -- requests (req.c, match.c, pin.c) ---------------------------------------------------- */

/* States of a page that kvmm_hit_state has no words for. */
#define PAGE_UNKNOWN	0xff	/* not looked up */

#define PAGE_PINNED	1u	/* this match holds a pin on it */

/**
 * struct kvmm_page - what a match knows of one key
 * @fword:	the frame's word as it must be
 * @frame:	HIT: its frame on the asked node
 * @cost_us:	to recompute
 * @raw_bytes:	length
 * @state:	enum kvmm_hit_state or PAGE_UNKNOWN
 * @node:	LOWER, PENDING: where from
 * @flags:	PAGE_PINNED
 */
struct kvmm_page {
	uint64_t	fword;
	uint32_t	frame;
	uint32_t	cost_us;
	uint32_t	raw_bytes;
	uint8_t		state;
	uint8_t		node;
	uint8_t		flags;
	uint8_t		spare;
};

/**
 * struct kvmm_mgroup - one group of a match
 * @first:	its first page in the match's arrays
 * @ratio:	pages of a unit
 * @window:	WINDOW: pages needed
 * @lead_any:	FULL: leading pages that are somewhere
 * @lead_here:	FULL: leading pages that are HIT
 */
struct kvmm_mgroup {
	uint16_t	group;
	uint8_t		rule;
	uint8_t		cls;
	uint32_t	first;
	uint32_t	n;
	uint32_t	ratio;
	uint32_t	window;
	uint32_t	lead_any;
	uint32_t	lead_here;
	struct kvmm_view *view;
};

/**
 * struct kvmm_mset - keys and what was found for them
 * @gen:	changes with each match
 * @max_units:	units for which every group has keys
 * @n_any, @n_here: units usable anywhere, on the node
 * @sync_wanted: some page lies in an extent that is not mapped
 * @blind:	a window waits to be opened again: nothing can be pinned
 */
struct kvmm_mset {
	uint32_t	gen;
	unsigned int	node;
	unsigned int	ngroups;
	struct kvmm_mgroup g[KVMM_MAX_GROUPS];
	uint64_t	(*key)[4];
	struct kvmm_page *page;
	uint32_t	n;
	uint32_t	cap;
	uint32_t	max_units;
	uint32_t	n_any;
	uint32_t	n_here;
	uint32_t	nr_pins;
	uint32_t	races;
	bool		sync_wanted;
	bool		blind;
};

/**
 * struct kvmm_own - what a request owns in one view
 * @open:	OPEN frames
 * @pin:	pins beside those of the match: published, fetched, canonical
 */
struct kvmm_own {
	struct kvmm_view *view;
	uint32_t	*open;
	uint32_t	nr_open, cap_open;
	uint32_t	*pin;
	uint32_t	nr_pin, cap_pin;
};

/**
 * struct kvmm_tail - the end of a chain, for the touch
 * @len:	pages up to and with @frame; 0 = none
 */
struct kvmm_tail {
	struct kvmm_view *view;
	uint64_t	word;
	uint32_t	frame;
	uint32_t	len;
};

/**
 * struct kvmm_req - a request
 * @refs:	1: the user's, handed on to what ends it
 * @att:	NULL while its space has no attachment in the current era
 * @slot:	in the ledger
 * @m:		the match, under way or last: @m[@cur]; the other one is what a
 *		new match is built in
 * @p:		kvmm_peek()'s scratch
 * @nr_ops:	operations in flight
 * @nr_flying:	pages in them: each may become a pin or an OPEN frame again
 *
 * Everything under @lock. Recycled with its arrays, so that opening one in
 * steady state allocates nothing.
 */
struct kvmm_req {
	struct kvmm_mutex lock;
	struct list	link;
	struct kvmm	*k;
	struct kvmm_space *sp;
	struct kvmm_att	*att;
	_Atomic uint32_t refs;
	uint32_t	slot;
	uint64_t	id;
	uint64_t	session;
	uint32_t	expect_ms;
	unsigned int	cur;
	struct kvmm_mset m[2];
	struct kvmm_mset p;
	uint32_t	gen;
	struct kvmm_own	own[KVMM_MAX_CLASSES];
	unsigned int	nr_own;
	struct kvmm_tail tail[KVMM_MAX_GROUPS];
	uint32_t	nr_ops;
	uint32_t	nr_flying;
	bool		ended;
	uint8_t		how;
	uint64_t	after;
	struct kvmm_deferred deferred;
};

static inline struct kvmm_mset *kvmm_req_match(struct kvmm_req *rq)
{
	return &rq->m[rq->cur];
}

/* Bind to the space's attachment if it has one that is current. */
bool kvmm_req_bind(struct kvmm_req *rq) __must_hold(&rq->lock);
/* What @rq owns in @v; NULL: no room for another view. */
struct kvmm_own *kvmm_req_own(struct kvmm_req *rq, struct kvmm_view *v);
/*
 * Room for @n more, beside what operations in flight may bring; 0 or -ENOMEM.
 * Adding then cannot fail.
 */
int kvmm_own_room_open(struct kvmm_req *rq, struct kvmm_own *o, uint32_t n);
int kvmm_own_room_pin(struct kvmm_req *rq, struct kvmm_own *o, uint32_t n);
void kvmm_own_add_open(struct kvmm_own *o, uint32_t frame);
/* Take @frame out of the list; false: it is not in it. */
bool kvmm_own_del_open(struct kvmm_own *o, uint32_t frame);
bool kvmm_own_has_open(const struct kvmm_own *o, uint32_t frame);
void kvmm_own_add_pin(struct kvmm_own *o, uint32_t frame);
void kvmm_req_set_tail(struct kvmm_req *rq, unsigned int group,
		       struct kvmm_view *v, uint32_t frame, uint64_t word,
		       uint32_t len);
/* Tell the ledger how many pins there are; for people. */
void kvmm_req_show_pins(struct kvmm_req *rq);
/* An operation of @rq is over: called under its lock, drops the reference. */
void kvmm_req_op_done(struct kvmm_req *rq) __releases(&rq->lock);
void kvmm_req_free_all(struct kvmm *k);
/* Forget a request without telling anybody (kvmm_close(), lost daemon). */
void kvmm_req_abandon(struct kvmm_req *rq);

/* pin.c: the client's half of the pin protocol */
/*
 * Pin @frame if its word is still @word: what a completion names. The daemon's
 * hand-over reference makes that so, until the connection ends: then it drops
 * them all, and a completion may be read after that.
 */
bool kvmm_pin_word(struct kvmm_view *v, uint32_t frame, uint64_t word);
void kvmm_pin(struct kvmm_view *v, uint32_t frame);
void kvmm_unpin(struct kvmm_view *v, uint32_t frame);

/* Look pages [@lo, @hi) of @g up. */
void kvmm_look(struct kvmm_att *a, struct kvmm_mset *m, struct kvmm_mgroup *g,
	       uint32_t lo, uint32_t hi);
/*
 * Look pages [0, @hi) up, as far as the first that is nowhere; with @pin, pin
 * them as long as they are HIT. Returns the first page not looked up.
 */
uint32_t kvmm_look_lead(struct kvmm_att *a, struct kvmm_mset *m,
			struct kvmm_mgroup *g, uint32_t hi, bool pin);
/*
 * Pin those of [@lo, @hi) that are HIT and not pinned, and check them. The
 * first that fails is read again once, and pinned again if the line moved;
 * failing twice it is what it was found to be, and it and everything after it
 * in the range is unpinned. Returns the first page that is not pinned.
 */
uint32_t kvmm_pin_range(struct kvmm_att *a, struct kvmm_mset *m,
			struct kvmm_mgroup *g, uint32_t lo, uint32_t hi);
void kvmm_unpin_range(struct kvmm_mset *m, struct kvmm_mgroup *g, uint32_t lo,
		      uint32_t hi);
void kvmm_mset_unpin(struct kvmm_mset *m);

/* Pages of @g that length @n needs: [*@lo, *@hi). */
void kvmm_mgroup_need(const struct kvmm_mgroup *g, uint32_t n, uint32_t *lo,
		      uint32_t *hi);
uint32_t kvmm_load_us(const struct kvmm_hdr *hdr, unsigned int node,
		      uint32_t bytes);

/* -- frames (frames.c) ---------------------------------------------------------------------- */

/* Back to this process's stack; @after gates others. */
void kvmm_view_put(struct kvmm_view *v, const uint32_t *frame, uint32_t n,
		   uint64_t after);
/* Ask for a refill unless one is on its way. */
void kvmm_view_want(struct kvmm_view *v, uint32_t n);
/* Have frames come since an allocation was refused? */
bool kvmm_view_fed(struct kvmm_view *v);
/* Frames in this process's hands. */
uint32_t kvmm_view_count(struct kvmm_view *v);

/* -- operations (op.c, publish.c, fetch.c) ------------------------------------------------- */

/* A page of an operation: what the daemon was asked, and whose answer it is. */
struct kvmm_op_page {
	uint32_t	frame;		/* publish: the frame */
	uint32_t	res;		/* index in the results */
	uint32_t	page;		/* fetch: index in the match */
	uint32_t	len;		/* of the chain up to here, pages */
	uint16_t	group;
};

/* One ring entry of an operation: a fetch has one a class. */
struct kvmm_op_part {
	struct kvmm_view *view;
	uint32_t	slot;
	uint32_t	first, n;	/* in kvmm_job.page */
	bool		pending;
	struct ring_sqe	sqe;
	const void	*array;		/* for the arena; only while posting */
	uint32_t	bytes;
};

/**
 * struct kvmm_job - an operation in flight, or done and not yet told
 * @gen:	fetch: of the match whose pages they are
 * @deadline_ns: the library answers by itself after it
 * @done:	what kvmm_poll() will say
 * @res:	its results, @n of them
 */
struct kvmm_job {
	struct list	link;
	struct kvmm_req	*rq;
	struct kvmm_era	*era;
	uint32_t	gen;
	uint64_t	deadline_ns;
	struct kvmm_done done;
	struct kvmm_op_part part[KVMM_MAX_CLASSES];
	unsigned int	nr_parts, nr_pending;
	struct kvmm_op_page *page;
	uint32_t	cap_page;
	struct kvmm_result *res;
	uint32_t	cap_res;
	struct ring_key	*key;		/* fetch: what the entries name */
	uint32_t	cap_key;
};

/* With room for @npages and @nres; NULL when out of memory. */
struct kvmm_job *kvmm_op_alloc(struct kvmm *k, uint32_t npages, uint32_t nres);
void kvmm_op_recycle(struct kvmm *k, struct kvmm_job *op);
/*
 * Post every part's entry. 0: at least one is in flight, and a part that is not
 * pending found no room; else -EAGAIN or -ENOTCONN and nothing was posted.
 */
int kvmm_op_post(struct kvmm_job *op);
struct kvmm_job *kvmm_op_find(struct kvmm_era *e, uint64_t wire,
			     unsigned int *part);
void kvmm_op_free_all(struct kvmm *k);
/* Room for the names of @n pages; NULL when out of memory. */
struct ring_key *kvmm_op_keys(struct kvmm_job *op, uint32_t n);
/* There was nothing to ask the daemon: kvmm_poll() will tell. */
void kvmm_op_ready(struct kvmm_job *op);
/* A completion with per-page results came for part @i. */
void kvmm_op_complete(struct kvmm_job *op, unsigned int i, int result,
		      const struct ring_result *res);
/* All parts that are pending end with @err, no page has an answer. */
void kvmm_op_fail(struct kvmm_job *op, int err);
/* Tell the daemon that nobody waits for the fetches of @rq. */
void kvmm_ops_cancel(struct kvmm_era *e, const struct kvmm_req *rq);
/* What of @e is in flight ends with @err. */
void kvmm_ops_fail(struct kvmm_era *e, int err);
/* Those whose time is up. kvmm.lock is held, as for all of these. */
void kvmm_ops_late(struct kvmm_era *e, uint64_t now);

void kvmm_publish_result(struct kvmm_job *op, const struct kvmm_op_part *part,
			 int err, const struct ring_result *res);
void kvmm_fetch_result(struct kvmm_job *op, const struct kvmm_op_part *part,
		       int err, const struct ring_result *res);

/* -- connection (conn.c, call.c, poll.c) ----------------------------------------------------- */

enum conn_state {
	CONN_DOWN,		/* nobody there; try again at @retry_ns */
	CONN_HELLO,		/* hello sent, welcome wanted */
	CONN_JOIN,		/* join sent again after a reconnect */
	CONN_UP,
};

/**
 * struct kvmm_stat - struct kvmm_stats, counted by several threads
 */
struct kvmm_stat {
	_Atomic uint64_t matches, pages_asked, pages_hit, pages_pending,
			pages_lower, pages_missed, pin_races, allocs,
			alloc_refused, published, publish_exists,
			publish_refused, fetched, fetch_missed, late,
			doorbells, touches_lost, reconnects;
};

#define stat_add(k, what, n)						\
	((void)atomic_fetch_add_explicit(&(k)->stat.what, (n),		\
					 memory_order_relaxed))

/**
 * struct kvmm - a connection
 * @alive:	a page of its own that a child of fork() finds zeroed
 * @readers:	hot calls under way, see the top
 * @era:	in force; the last one while there is none
 * @dead:	unlinked objects
 * @lock:	connection state, completions, the list of spaces
 * @calling:	a set-up call owns the socket; @cond tells when it is done
 * @retry_ns:	CONN_DOWN: not before; else until when the handshake may take
 * @next:	CONN_JOIN: the era that is being set up
 * @call_seq:	the request under way; @call_type its type; @call_again: a late
 *		reply got in its way, send it once more
 * @join_seq:	the join under way or late; a late yes counts
 * @msg:	what was received last
 * @scratch:	results that wrap in the ring
 * @wake:	eventfd by which the library wakes itself; @kicked: it was used
 * @hungry:	an allocation was refused since the last sleep
 * @fd_ready:	the era's notify has a count: the epoll fd is readable
 * @armed:	the daemon has been asked to write it
 * @busy_ns:	when something was posted or completed last
 * @seen_tail:	of the submission ring, at the last poll
 * @done:	completed, not yet told; @told: told, results still in use
 * @ready:	completed without the daemon, under @ops_lock
 */
struct kvmm {
	const _Atomic uint32_t *alive;
	char		*path;
	char		name[16];
	uint64_t	call_timeout_ns;
	_Alignas(64) _Atomic uint32_t readers;
	_Alignas(64) _Atomic(struct kvmm_era *) era;
	_Atomic(struct kvmm_dead *) dead;

	struct kvmm_mutex lock;
	struct kvmm_cond cond;
	bool		calling;
	enum conn_state	state;
	int		sock, epfd, wake;
	_Atomic uint64_t retry_ns;
	uint64_t	sock_checked_ns;
	struct kvmm_era	*next;
	uint32_t	seq, call_seq, join_seq;
	uint16_t	call_type;
	bool		call_again;
	struct sock_msg	*msg;
	bool		joined;
	struct kvmm_engine engine;
	struct list	spaces;
	struct kvmm_era	*word_eras;	/* whose step word was handed out */

	struct ring_result *scratch;
	_Atomic bool	kicked;
	_Atomic bool	hungry;
	bool		fd_ready, armed;
	uint64_t	busy_ns;
	uint32_t	seen_tail;
	struct list	done, told;
	unsigned int	nr_done;

	struct kvmm_mutex ops_lock;
	struct list	ready;
	struct kvmm_req	*free_req;
	struct kvmm_job	*free_op;
	uint32_t	nr_free_req, nr_free_op;

	struct kvmm_stat stat;
};

/* Nothing of the parent's may be touched in a child. */
static inline bool kvmm_forked(const struct kvmm *k)
{
	return !atomic_load_explicit(k->alive, memory_order_relaxed);
}

/* Begin a call that looks at shared objects; false: answer -ECHILD. */
static inline bool kvmm_enter(struct kvmm *k)
{
	if (unlikely(kvmm_forked(k)))
		return false;
	atomic_fetch_add(&k->readers, 1);	/* seq_cst: see the top */
	return true;
}

static inline void kvmm_exit(struct kvmm *k)
{
	/* release: our reads are before the free that this allows */
	atomic_fetch_sub_explicit(&k->readers, 1, memory_order_release);
}

int kvmm_fail_forked(void);
void kvmm_bury(struct kvmm *k, struct kvmm_dead *d);
/* Free what is dead, if nobody looks. Under no lock but kvmm.lock. */
void kvmm_reap(struct kvmm *k);

static inline struct kvmm_era *kvmm_era_now(const struct kvmm *k)
{
	/* seq_cst: see the top of this file */
	return atomic_load(&((struct kvmm *)k)->era);
}

/* Make kvmm_fd() readable. */
void kvmm_kick(struct kvmm *k);

/* conn.c */
/* One look at the socket and at the clock; never blocks. */
void kvmm_conn_run(struct kvmm *k, uint64_t now) __must_hold(&k->lock);
/* The connection is over: operations end, a new try follows. */
void kvmm_conn_lost(struct kvmm *k) __must_hold(&k->lock);
/* A join that had timed out was granted after all. */
void kvmm_conn_joined(struct kvmm *k);

/*
 * call.c: a set-up call is
 *
 *	err = kvmm_call_begin(k, &deadline);
 *	if (err)
 *		return err;
 *	... kvmm_call(k, &request.h, WIRE_WINDOW, sizeof(reply), deadline) ...
 *	kvmm_call_end(k);
 *
 * Between the two the socket, the era and the lists of spaces and windows are
 * the caller's; no lock is held. The reply is in k->msg until the next call;
 * its descriptors are taken with sock_msg_take_fd(), what is left is closed.
 */
int kvmm_call_begin(struct kvmm *k, uint64_t *deadline);
void kvmm_call_end(struct kvmm *k);
/* 0, or what a WIRE_ERROR says, -ETIMEDOUT, -ENOTCONN, -EPROTO. */
int kvmm_call(struct kvmm *k, struct wire_hdr *h, uint16_t reply,
	      size_t min_bytes, uint64_t deadline);
/* The next message of a reply that has several. */
int kvmm_call_more(struct kvmm *k, uint16_t reply, size_t min_bytes,
		   uint64_t deadline);
/* A message that is no reply to the call under way; closes its descriptors. */
void kvmm_call_stray(struct kvmm *k, struct sock_msg *m);

/* poll.c */
/* Take completions until @max are done; false: the ring makes no sense. */
bool kvmm_cq_run(struct kvmm *k, struct kvmm_era *e, unsigned int max)
	__must_hold(&k->lock);

/* space.c, win.c: within a set-up call */
void kvmm_space_leave(struct kvmm_space *sp, uint64_t deadline);
void kvmm_win_leave(struct kvmm_win *w, uint64_t deadline);

#endif
