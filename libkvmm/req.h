/* SPDX-License-Identifier: Apache-2.0 */
/* Requests: what they found, what they own; and frames. */
#ifndef KVMM_LIBKVMM_REQ_H
#define KVMM_LIBKVMM_REQ_H

#include "libkvmm/space.h"

/* -- requests (req.c, own.c, trim.c, match.c, match_out.c, pin.c) -------------------- */

/* States of a page that kvmm_hit_state has no words for. */
#define PAGE_UNKNOWN	0xff	/* not looked up */

/* Views that a request can look into, those of closed windows among them. */
#define REQ_MAX_VIEWS	32

#define PAGE_PINNED	1u	/* this match holds a pin on it */

/**
 * struct kvmm_page - what a match knows of one key
 * @fword:	the frame's word as it must be
 * @frame:	HIT: its frame on the asked node
 * @cost_us:	to recompute
 * @raw_bytes:	length
 * @state:	enum kvmm_hit_state or PAGE_UNKNOWN
 * @flags:	PAGE_PINNED
 * @node:	LOWER, PENDING: where from
 */
struct kvmm_page {
	uint64_t	fword;
	uint32_t	frame;
	uint32_t	cost_us;
	uint32_t	raw_bytes;
	uint8_t		state;
	uint8_t		flags;
	uint8_t		node;
	uint8_t		spare;
};

/**
 * struct kvmm_mgroup - one group of a match
 * @first:	its first page in the match's arrays
 * @ratio:	pages of a unit
 * @window:	WINDOW: pages needed
 * @lead_any:	FULL: leading pages that are somewhere
 * @lead_here:	FULL: leading pages that are HIT
 * @view:	where its pins are counted; NULL: it has none
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
 * @asked_ns:	when, if the daemon wanted to know then; else 0
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
	uint64_t	asked_ns;
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
 * @held:	views that it has used and keeps a reference on
 * @frozen:	its place in the ledger's table of frozen matches, plus 1
 * @blobs:	kvmm_blob.link
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
	struct kvmm_view *held[REQ_MAX_VIEWS];
	unsigned int	nr_held;
	struct kvmm_tail tail[KVMM_MAX_GROUPS];
	uint32_t	frozen;
	struct list	blobs;
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

/* The group that page @page of @m is of. */
static inline struct kvmm_mgroup *kvmm_mset_group(struct kvmm_mset *m,
						  uint32_t page)
{
	struct kvmm_mgroup *g = m->g;

	while (g + 1 < m->g + m->ngroups && page >= g[1].first)
		g++;
	return g;
}

/* Is the daemon to be told of the keys that @rq asks for? */
static inline bool kvmm_req_keys_wanted(const struct kvmm_req *rq)
{
	const struct kvmm_att *a = rq->att;
	const struct kvmm_hdr_space *s;

	if (!a)
		return false;
	s = &a->era->hdr->space[a->ix];
	return atomic_load_explicit((_Atomic uint32_t *)&s->mode,
				    memory_order_relaxed) ==
	       KVMM_MODE_OBSERVE ||
	       atomic_load_explicit((_Atomic uint32_t *)&s->trace,
				    memory_order_relaxed);
}

/* Can the daemon be asked? 0, -ENOTCONN, -ESTALE, -EOWNERDEAD. */
int kvmm_req_alive(const struct kvmm_req *rq) __must_hold(&rq->lock);
/* Does the space answer matches at all? */
bool kvmm_req_answers(const struct kvmm_req *rq) __must_hold(&rq->lock);
/* Bind to the space's attachment if it has one that is current. */
bool kvmm_req_bind(struct kvmm_req *rq) __must_hold(&rq->lock);
/*
 * The open window's view, which then stays until the request is over; NULL: no
 * window is open there.
 */
struct kvmm_view *kvmm_req_view(struct kvmm_req *rq, unsigned int cls,
				unsigned int node) __must_hold(&rq->lock);
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
/* Take one pin on @frame out of the list, which the caller drops. */
bool kvmm_own_del_pin(struct kvmm_own *o, uint32_t frame);
void kvmm_own_unpin(struct kvmm_own *o);
void kvmm_req_set_tail(struct kvmm_req *rq, unsigned int group,
		       struct kvmm_view *v, uint32_t frame, uint64_t word,
		       uint32_t len);
/* Tell the ledger how many pins there are; for people. */
void kvmm_req_show_pins(struct kvmm_req *rq);
/* One more of @rq's attachment, with its hint, and nothing in it. 0 or -errno. */
int kvmm_req_child(struct kvmm_req *rq, uint64_t id, struct kvmm_req **ret);
/* It was never heard of. */
void kvmm_req_undo(struct kvmm_req *rq);
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
/* The same for what a request has published, which may not have been. */
void kvmm_unpin_own(struct kvmm_view *v, uint32_t frame);

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
/* The same again, with pins of its own; 0 or -ENOMEM, and nothing was done. */
int kvmm_mset_copy(struct kvmm_mset *to, const struct kvmm_mset *from);

/* Pages of @g that length @n needs: [*@lo, *@hi). */
void kvmm_mgroup_need(const struct kvmm_mgroup *g, uint32_t n, uint32_t *lo,
		      uint32_t *hi);
/* match_out.c: what the caller is told; @e may be NULL, nothing is below then */
void kvmm_match_out(const struct kvmm_mset *m, const struct kvmm_era *e,
		    struct kvmm_match *out);
void kvmm_hits_out(const struct kvmm_mset *m, const struct kvmm_era *e,
		   struct kvmm_hit *hits);
uint32_t kvmm_load_us(const struct kvmm_hdr *hdr, unsigned int node,
		      uint32_t bytes);

/* freeze.c: what the ranks are told; the era's leader only, under the req's lock */
void kvmm_freeze(struct kvmm_req *rq, const struct kvmm_hit *hits, uint32_t n,
		 const struct kvmm_match *m);
/* The match of @rq has changed. */
void kvmm_freeze_again(struct kvmm_req *rq);
/* There is none any more. */
void kvmm_thaw(struct kvmm_req *rq);

/* -- frames (frames.c) ---------------------------------------------------------------------- */

/* Back to this process's stack; @after gates others. */
void kvmm_view_put(struct kvmm_view *v, const uint32_t *frame, uint32_t n,
		   uint64_t after);
/* @n of them; 0, or -EAGAIN with the want recorded. */
int kvmm_view_take(struct kvmm_view *v, uint32_t n, uint32_t *frames);
/*
 * @frame is copied by the daemon: whoever puts it, nobody takes it before each
 * kvmm_view_busy() has had its kvmm_view_idle(). 0 or -ENOMEM.
 */
int kvmm_view_busy(struct kvmm_view *v, uint32_t frame);
void kvmm_view_idle(struct kvmm_view *v, uint32_t frame);
/* Ask for a refill unless one is on its way. */
void kvmm_view_want(struct kvmm_view *v, uint32_t n);
/* Have frames come since an allocation was refused? */
bool kvmm_view_fed(struct kvmm_view *v);
/*
 * Nobody has said whether @frame was sealed. It is pinned; when that ends, its
 * word tells: kvmm_unpin_own(). Without memory it stays where it is.
 */
void kvmm_view_limbo(struct kvmm_view *v, uint32_t frame);
/* The daemon is there again; @adopted: it is another process. */
void kvmm_view_resumed(struct kvmm_view *v, bool adopted);
/* Frames in this process's hands. */
uint32_t kvmm_view_count(struct kvmm_view *v);
/* As kvmm_alloc(); @view: where they are of, the request's until its end. */
int kvmm_frames_alloc(struct kvmm_req *rq, unsigned int cls, unsigned int node,
		      uint32_t n, uint32_t *frames, struct kvmm_view **view)
	__must_hold(&rq->lock);
/* Address of a frame; NULL: its extent is not mapped, or the window closed. */
uint8_t *kvmm_frame_addr(const struct kvmm_view *v, uint32_t frame);

#endif
