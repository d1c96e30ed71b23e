/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OPEN frames. The daemon hands them out through a window's magazine, a ring of
 * frame numbers; what this process frees lands on a private stack over it and
 * is taken from there first, since its lines are warm and its work is ordered
 * by the process itself. Neither costs a round trip.
 *
 * A refill is asked for when an allocation was refused, and ahead of that when
 * less than half of what the last one brought is left. One is outstanding at a
 * time, unless more is wanted than it asked for. Too many frames on the stack
 * (four refills and an eighth of what is mapped) are given back.
 */
#include <stdlib.h>
#include <string.h>

#include "libkvmm/lib.h"

#define GIVE_BATCH	1024		/* frames of one RING_FREE */

/* -- magazine, under mag_lock ------------------------------------------------- */

static uint32_t ring_count(const struct kvmm_view *v)
{
	/* acquire: pairs with the daemon's release after the places */
	uint32_t n = atomic_load_explicit(&v->wl->mag_tail,
					  memory_order_acquire) - v->mag_head;

	return n <= v->mag_mask + 1 ? n : 0;
}

/*
 * Take @n of the @ring frames that are there; returns how many were had. What is
 * no frame at all is a daemon's bug and passed over.
 */
static uint32_t ring_take(struct kvmm_view *v, kvmm_frame_t *to, uint32_t n,
			  uint32_t ring)
{
	uint32_t i, got = 0;

	for (i = 0; i < ring && got < n; i++) {
		uint32_t f = atomic_load_explicit(&v->mag[(v->mag_head + i) &
							  v->mag_mask],
						  memory_order_relaxed);

		if (likely(f >= v->fpe && f < v->max_frames))
			to[got++] = f;
	}
	v->mag_head += i;
	/* release: the places are read before the daemon writes them again */
	atomic_store_explicit(&v->wl->mag_head, v->mag_head,
			      memory_order_release);
	return got;
}

/* Every frame has one owner, so all fit, unless a daemon gave one out twice. */
static void stack_put(struct kvmm_view *v, const uint32_t *frame, uint32_t n)
	__must_hold(&v->mag_lock)
{
	n = min(n, v->max_frames - v->nr_stack);
	memcpy(v->stack + v->nr_stack, frame, n * sizeof(*frame));
	v->nr_stack += n;
}

static bool refill_outstanding(const struct kvmm_view *v)
{
	/* acquire: an answered refill has its frames in the ring */
	return v->posted_n && v->posted_at ==
	       atomic_load_explicit(&v->wl->refills, memory_order_acquire);
}

static void refill(struct kvmm_view *v, uint32_t n) __must_hold(&v->mag_lock)
{
	struct ring_sqe sqe = {
		.op	= RING_REFILL,
		.space	= v->att->ix,
		.win	= v->no,
		.n	= n,
	};

	uint32_t at;

	if (kvmm_view_closed(v) ||
	    (refill_outstanding(v) && n <= v->posted_n))
		return;
	at = atomic_load_explicit(&v->wl->refills, memory_order_relaxed);
	if (kvmm_sq_push(v->att->era, &sqe, NULL, 0))
		return;			/* full: the next one tries again */
	v->posted_at = at;
	v->posted_n = n;
}

bool kvmm_view_fed(struct kvmm_view *v)
{
	bool fed;

	kvmm_lock(&v->mag_lock);
	/* seq_cst: after armed = 1; the daemon stores it, then loads armed */
	fed = v->refused && atomic_load(&v->wl->refills) != v->refused_at &&
	      ring_count(v) > v->refused_with;
	kvmm_unlock(&v->mag_lock);
	return fed;
}

uint32_t kvmm_view_count(struct kvmm_view *v)
{
	uint32_t n;

	kvmm_lock(&v->mag_lock);
	n = ring_count(v) + v->nr_stack;
	kvmm_unlock(&v->mag_lock);
	return n;
}

void kvmm_view_want(struct kvmm_view *v, uint32_t n)
{
	kvmm_lock(&v->mag_lock);
	refill(v, n);
	kvmm_unlock(&v->mag_lock);
}

/* How many frames are enough not to ask ahead, if @have are in hand now. */
static uint32_t low_mark(struct kvmm_view *v, uint32_t at, uint32_t have)
	__must_hold(&v->mag_lock)
{
	if (at != v->level_at) {
		v->level_at = at;
		v->level = have;
	}
	return min(v->target, v->level) / 2;
}

/* Record the want, and ask for it; @with are in the ring after @at refills. */
static int refuse(struct kvmm_view *v, uint32_t n, uint32_t at, uint32_t with)
	__must_hold(&v->mag_lock)
{
	v->target = max(n, (uint32_t)LIB_MAG_TARGET);
	v->refused = true;
	v->refused_with = with;
	v->refused_at = at;
	/* relaxed: a hint beside the entry that asks */
	atomic_store_explicit(&v->wl->want, n, memory_order_relaxed);
	/*
	 * Before the entry is there: the daemon may answer at once and find
	 * nobody armed. seq_cst: then who arms next sees it in fed().
	 */
	atomic_store(&v->att->era->k->hungry, true);
	refill(v, n);
	return kvmm_fail(-EAGAIN, "%u frames wanted, fewer are in hand", n);
}

/* 0, or -EAGAIN with the want recorded. */
static int take(struct kvmm_view *v, uint32_t n, kvmm_frame_t *frames)
	__must_hold(&v->mag_lock)
{
	/* acquire: before the ring, so that no answer is taken for an old one */
	uint32_t at = atomic_load_explicit(&v->wl->refills,
					   memory_order_acquire);
	uint32_t ring = ring_count(v);
	uint32_t from_stack = min(n, v->nr_stack);
	uint32_t from_ring = n - from_stack;
	uint32_t low = low_mark(v, at, ring + v->nr_stack);

	if ((uint64_t)ring + v->nr_stack < n)
		return refuse(v, n, at, ring);
	if (from_ring) {
		uint32_t got = ring_take(v, frames + from_stack, from_ring,
					 ring);

		if (unlikely(got < from_ring)) {
			stack_put(v, frames + from_stack, got);
			return refuse(v, n, at, 0);
		}
	}
	v->refused = false;
	v->nr_stack -= from_stack;
	memcpy(frames, v->stack + v->nr_stack, from_stack * sizeof(*frames));
	if (ring + v->nr_stack - from_ring < low)
		refill(v, v->target);
	return 0;
}

int kvmm_view_take(struct kvmm_view *v, uint32_t n, uint32_t *frames)
{
	int err;

	kvmm_lock(&v->mag_lock);
	err = take(v, n, frames);
	kvmm_unlock(&v->mag_lock);
	return err;
}

/* -- giving back ------------------------------------------------------------------ */

static uint32_t mapped_frames(const struct kvmm_view *v)
{
	return atomic_load_explicit(&v->dense, memory_order_relaxed) - v->fpe;
}

static void give(struct kvmm_view *v, uint32_t n) __must_hold(&v->mag_lock)
{
	while (n) {
		uint32_t part = min(n, (uint32_t)GIVE_BATCH);
		struct ring_sqe sqe = {
			.op	= RING_FREE,
			.space	= v->att->ix,
			.win	= v->no,
			.n	= part,
			.after	= v->free_after,
		};

		/* the coldest are at the bottom, but moving costs more */
		if (kvmm_sq_push(v->att->era, &sqe,
				 v->stack + v->nr_stack - part,
				 part * sizeof(*v->stack)))
			return;		/* kept; the next free tries again */
		v->nr_stack -= part;
		n -= part;
	}
}

static struct kvmm_busy *busy_find(struct kvmm_view *v, uint32_t frame)
	__must_hold(&v->mag_lock)
{
	uint32_t i;

	for (i = 0; i < v->nr_busy; i++)
		if (v->busy[i].frame == frame)
			return &v->busy[i];
	return NULL;
}

static int busy_add(struct kvmm_view *v, uint32_t frame)
	__must_hold(&v->mag_lock)
{
	uint32_t cap = v->cap_busy ? 2 * v->cap_busy : 16;
	struct kvmm_busy *p;

	if (v->nr_busy == v->cap_busy) {
		p = realloc(v->busy, cap * sizeof(*p));
		if (!p)
			return kvmm_fail(-ENOMEM, "out of memory");
		v->busy = p;
		v->cap_busy = cap;
	}
	v->busy[v->nr_busy++] = (struct kvmm_busy){ .frame = frame, .refs = 1 };
	return 0;
}

int kvmm_view_busy(struct kvmm_view *v, uint32_t frame)
{
	struct kvmm_busy *b;
	int err = 0;

	kvmm_lock(&v->mag_lock);
	b = busy_find(v, frame);
	if (b)
		b->refs++;
	else
		err = busy_add(v, frame);
	kvmm_unlock(&v->mag_lock);
	return err;
}

void kvmm_view_idle(struct kvmm_view *v, uint32_t frame)
{
	struct kvmm_busy *b;

	kvmm_lock(&v->mag_lock);
	b = busy_find(v, frame);
	if (b && !--b->refs) {
		if (b->freed && !kvmm_view_closed(v))
			stack_put(v, &frame, 1);
		*b = v->busy[--v->nr_busy];
	}
	kvmm_unlock(&v->mag_lock);
}

/* Those that are being copied stay where they are. */
static void put_idle(struct kvmm_view *v, const uint32_t *frame, uint32_t n)
	__must_hold(&v->mag_lock)
{
	struct kvmm_busy *b;
	uint32_t i;

	for (i = 0; i < n; i++) {
		b = busy_find(v, frame[i]);
		if (b)
			b->freed = true;
		else
			stack_put(v, &frame[i], 1);
	}
}

void kvmm_view_put(struct kvmm_view *v, const uint32_t *frame, uint32_t n,
		   uint64_t after)
{
	uint32_t high;

	kvmm_lock(&v->mag_lock);
	if (kvmm_view_closed(v)) {	/* they went with the window */
		kvmm_unlock(&v->mag_lock);
		return;
	}
	if (unlikely(v->nr_busy))
		put_idle(v, frame, n);
	else
		stack_put(v, frame, n);
	if (after > v->free_after)
		v->free_after = after;
	high = max(4 * v->target, mapped_frames(v) / 8);
	if (unlikely(v->nr_stack > high))
		give(v, v->nr_stack - high / 2);
	kvmm_unlock(&v->mag_lock);
}

/* -- publishes that were never answered ---------------------------------------------- */

void kvmm_view_limbo(struct kvmm_view *v, uint32_t frame)
{
	struct kvmm_limbo *more;
	uint32_t n, cap;

	kvmm_lock(&v->mag_lock);
	n = atomic_load_explicit(&v->nr_limbo, memory_order_relaxed);
	if (n == v->cap_limbo) {
		cap = v->cap_limbo ? 2 * v->cap_limbo : 64;
		more = realloc(v->limbo, cap * sizeof(*more));
		if (!more)
			goto out_unlock;
		v->limbo = more;
		v->cap_limbo = cap;
	}
	v->limbo[n] = (struct kvmm_limbo){ .frame = frame };
	atomic_store_explicit(&v->nr_limbo, n + 1, memory_order_relaxed);
out_unlock:
	kvmm_unlock(&v->mag_lock);
}

/* Ours again, if it was not sealed; it is pinned, so its word stands still. */
static void limbo_settle(struct kvmm_view *v, uint32_t frame)
	__must_hold(&v->mag_lock)
{
	/* acquire: pairs with the daemon's release when it sealed it */
	uint64_t word = atomic_load_explicit(&v->word[frame],
					     memory_order_acquire);

	if (frame_word_state(word) == FRAME_OPEN && !kvmm_view_closed(v) &&
	    !kvmm_era_dying(v->att->era))
		stack_put(v, &frame, 1);
}

/*
 * A pin of ours ends on a frame that may be in limbo. True: not yet. Without a
 * connection what was posted may be done this very moment; when there is one again
 * it is either done or will not be.
 */
static bool limbo_keeps(struct kvmm_view *v, uint32_t frame)
{
	bool keeps = false;
	uint32_t i, n;

	kvmm_lock(&v->mag_lock);
	n = atomic_load_explicit(&v->nr_limbo, memory_order_relaxed);
	for (i = 0; i < n; i++)
		if (v->limbo[i].frame == frame && !v->limbo[i].freed)
			break;
	if (i == n)
		goto out_unlock;
	keeps = kvmm_era_lost(v->att->era);
	if (keeps) {
		v->limbo[i].freed = true;
		goto out_unlock;
	}
	v->limbo[i] = v->limbo[n - 1];
	atomic_store_explicit(&v->nr_limbo, n - 1, memory_order_relaxed);
	limbo_settle(v, frame);
out_unlock:
	kvmm_unlock(&v->mag_lock);
	return keeps;
}

void kvmm_unpin_own(struct kvmm_view *v, uint32_t frame)
{
	if (unlikely(atomic_load_explicit(&v->nr_limbo,
					  memory_order_relaxed)) &&
	    limbo_keeps(v, frame))
		return;
	kvmm_unpin(v, frame);
}

/* Forks that were never answered: nobody copies any more. */
static void busy_over(struct kvmm_view *v) __must_hold(&v->mag_lock)
{
	uint32_t i;

	for (i = 0; i < v->nr_busy; i++)
		if (v->busy[i].freed && !kvmm_view_closed(v))
			stack_put(v, &v->busy[i].frame, 1);
	v->nr_busy = 0;
}

void kvmm_view_resumed(struct kvmm_view *v, bool adopted)
{
	uint32_t i, n, kept = 0;

	kvmm_lock(&v->mag_lock);
	n = atomic_load_explicit(&v->nr_limbo, memory_order_relaxed);
	for (i = 0; i < n; i++) {
		uint32_t frame = v->limbo[i].frame;

		if (!v->limbo[i].freed) {
			v->limbo[kept++] = v->limbo[i];
			continue;
		}
		limbo_settle(v, frame);
		kvmm_unpin(v, frame);
	}
	atomic_store_explicit(&v->nr_limbo, kept, memory_order_relaxed);
	if (adopted)
		busy_over(v);
	/* what was asked for nobody has heard */
	v->posted_n = 0;
	if (v->rights == KVMM_RW)
		refill(v, max(v->target, (uint32_t)LIB_MAG_TARGET));
	kvmm_unlock(&v->mag_lock);
}

/* -- public ------------------------------------------------------------------------- */

/* The view that an allocation is for, or an error with its sentence. */
static int alloc_view(struct kvmm_req *rq, unsigned int cls, unsigned int node,
		      struct kvmm_view **ret) __must_hold(&rq->lock)
{
	struct kvmm_view *v;

	if (!kvmm_req_bind(rq))
		return kvmm_fail(-EAGAIN,
			"no daemon, or its windows are not opened again yet, since the request was opened");
	v = kvmm_req_view(rq, cls, node);
	if (!v && cls < KVMM_MAX_CLASSES && node < KVMM_MAX_NODES &&
	    atomic_load_explicit(&rq->sp->open[cls][node],
				 memory_order_relaxed))
		return kvmm_fail(-EAGAIN,
			"the window waits for kvmm_win_sync() to open it again");
	if (!v)
		return kvmm_fail(-EINVAL,
				 "no window is open on class %u at node %u",
				 cls, node);
	if (v->rights != KVMM_RW)
		return kvmm_fail(-EACCES, "the window is read-only");
	if (kvmm_era_dying(rq->att->era))
		return kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	*ret = v;
	return 0;
}

static int alloc(struct kvmm_req *rq, unsigned int cls, unsigned int node,
		 uint32_t n, kvmm_frame_t *frames, struct kvmm_view **view)
	__must_hold(&rq->lock)
{
	struct kvmm_view *v;
	struct kvmm_own *o;
	uint32_t i;
	int err;

	err = alloc_view(rq, cls, node, &v);
	if (err)
		return err;
	if (n > v->max_frames)
		return kvmm_fail(-EINVAL, "%u frames asked for, the node has %u",
				 n, v->max_frames);
	o = kvmm_req_own(rq, v);
	if (!o)
		return kvmm_fail(-EINVAL,
			"a request may have frames of %u windows at most",
			KVMM_MAX_CLASSES);
	err = kvmm_own_room_open(rq, o, n);
	if (err)
		return err;
	err = kvmm_view_take(v, n, frames);
	if (err)
		return err;
	for (i = 0; i < n; i++)
		kvmm_own_add_open(o, frames[i]);
	*view = v;
	return 0;
}

int kvmm_frames_alloc(struct kvmm_req *rq, unsigned int cls, unsigned int node,
		      uint32_t n, uint32_t *frames, struct kvmm_view **view)
{
	int err = alloc(rq, cls, node, n, frames, view);

	stat_add(rq->k, allocs, 1);
	if (err == -EAGAIN)
		stat_add(rq->k, alloc_refused, 1);
	return err;
}

int kvmm_alloc(struct kvmm_req *rq, unsigned int cls, kvmm_node_t node,
	       unsigned int n, kvmm_frame_t *frames, unsigned int flags)
{
	struct kvmm *k = rq->k;
	struct kvmm_view *v;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	if (flags & ~KVMM_EVICT_OK) {
		kvmm_exit(k);
		return kvmm_fail(-EINVAL, "unknown flags 0x%x", flags);
	}
	kvmm_lock(&rq->lock);
	err = kvmm_frames_alloc(rq, cls, node, n, frames, &v);
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return err;
}
