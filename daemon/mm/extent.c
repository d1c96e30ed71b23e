/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Extents of memory pools: how they come, are taken over, and go.
 *
 * Extents come when frames run short and the node has room: asked for, charged
 * to the node at once, populated by its workers, and entered here when they
 * arrive. They go in three steps, because clients map them:
 *
 *	close	free frames are no longer handed out; reclaim empties the rest
 *	down	nothing is in it any more: extent_seq advances, windows unmap it
 *		in their next win_sync and clear its bit
 *	put	no window maps it: the memory goes back to the node
 *
 * A window that does not unmap it within shrink_ack keeps it: the extent stays
 * charged, is shown as held, and goes when that client has acknowledged or
 * exited. Memory is never handed to another class in place: what it gets is
 * new, so that nobody who kept a mapping can read it.
 *
 * Windows are told what changed by extent_seq alone: an extent is new to whom
 * has a seq before its up_seq, and gone for whom has one before its down_seq.
 * A number is used again only after all windows have passed its down_seq.
 */
#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define COMING_MAX	4u		/* extents under way to one pool */
#define GROW_RETRY_NS	(100 * NSEC_PER_MSEC)
#define EVACUATE_IDLE_NS (10 * NSEC_PER_SEC)
#define SQUEEZED_NS	(50 * NSEC_PER_MSEC)

/*
 * Shares of what the pool has now. A pool of a few frames keeps fewer back than
 * the eight that a load may want at once, or nothing would be left to use.
 */
static void pool_watermarks(struct mm_pool *p)
{
	uint32_t n = p->nr_frames, few = min(8u, n / 16);

	p->wmark_min = max(n / 128, max(few, n ? 1u : 0u));
	p->wmark_low = max(n / 64, p->wmark_min + (p->wmark_min + 1) / 2);
	p->wmark_high = max(n / 32, 2 * p->wmark_min);
	p->wmark_promo = p->wmark_high;
	p->reserve = p->wmark_min;
}

/* -- extents that come ----------------------------------------------------- */

static uint64_t seq_next(struct mm_pool *p)
{
	/* release: pairs with the client's acquire before it asks for changes */
	return atomic_fetch_add_explicit(&p->table->extent_seq, 1,
					 memory_order_release) + 1;
}

static void kick_windows(struct mm_pool *p)
{
	struct mm *mm = p->space->mm;
	struct mm_win *w;

	list_for_each_entry(w, &p->windows, pool_link)
		if (!w->closed && w->client->connected)
			mm->ops->kick_client(w->client);
}

static void extent_enter(struct mm_pool *p, struct extent *ext)
{
	uint32_t no = 1, i;
	struct mm_extent *e;

	while (p->extent[no].ext || p->extent[no].lost)
		no++;
	e = &p->extent[no];
	mm_point();
	*e = (struct mm_extent){
		.ext = ext, .no = no, .ro_fd = -1, .rw_fd = -1,
		.nr_free = p->per_extent,
	};
	/* the lowest on top, so that frames come in runs */
	for (i = 0; i < p->per_extent; i++)
		p->free[(size_t)no * p->per_extent + i] =
			(no + 1) * p->per_extent - 1 - i;
	/* generations go on, also of a number that had been given back */
	for (i = 0; p->adopted && i < p->per_extent; i++)
		p->meta[(size_t)no * p->per_extent + i].gen =
			frame_word_gen(frame_word_of(p, no * p->per_extent + i));
	bitmap_set(p->free_map, no);
	p->nr_free += p->per_extent;
	p->nr_frames += p->per_extent;
	p->nr_extents++;
	e->up_seq = seq_next(p);
	keep_extent(p, e);
	pool_watermarks(p);
}

static void extent_came(struct extent *ext, int err, void *arg)
{
	struct mm_pool *p = arg;

	p->extents_coming--;
	if (err) {
		p->grow_after_ns = now_ns() + GROW_RETRY_NS;
		return;
	}
	/* the node counts it, so this cannot be out of numbers */
	extent_enter(p, ext);
	if (p->ending)
		return;
	kick_windows(p);
	pool_feed(p);
	pool_publish_avail(p);
}

/* A rank maps its part alone, which of hugepages must begin with one. */
static uint32_t huge_flag(const struct mm_pool *p)
{
	uint32_t bytes = p->shape ? p->shape->part_bytes : p->page_bytes;
	bool tight = (p->stride - bytes) * UINT64_C(100) <=
		     UINT64_C(6) * p->stride;

	if (p->parts > 1 && pool_part_bytes(p) % SHM_HUGE_BYTES)
		return 0;
	return tight && pool_extent_bytes(p) >= SHM_HUGE_BYTES ? EXTENT_HUGE : 0;
}

uint64_t pool_room(const struct mm_pool *p)
{
	const struct node *n = p->nd->node;
	uint64_t free_bytes = n->capacity > n->used ? n->capacity - n->used : 0;
	uint64_t exts = free_bytes / pool_extent_bytes(p);
	uint64_t slots = p->max_extents - p->nr_extents - p->nr_lost -
			 p->extents_coming;

	return min(exts, slots) * p->per_extent;
}

/*
 * The node is full: let the class that was used longest ago give an extent up,
 * if it has more of them than this one, or rests. Where somebody has waited for
 * a while, so that this class's own pages must all be in use, another class of
 * the same space need only have nobody waiting itself: a long prompt of a hybrid
 * model pins page after page of one class, and leaves page after page of another
 * behind. What others use is not its to take by that.
 *
 * Where a client holds what it should have unmapped, the next extent would be as
 * little use. And a class that could not empty one comes after the others.
 */
static void evacuate_other(struct mm_pool *p)
{
	struct mm_pool *q, *best = NULL;
	uint64_t age, best_age = UINT64_MAX;
	uint64_t now = p->space->mm->now_ns;
	bool squeezed = pool_squeezed(p) >= SQUEEZED_NS;

	list_for_each_entry(q, &p->nd->pools, node_link) {
		uint32_t keep = q->space->nr_clients ? 1 : 0;

		if (q == p || q->ending || q->extents_held ||
		    q->nr_extents - q->extents_going <= keep)
			continue;
		if (q->nr_extents <= p->nr_extents &&
		    (q->want || (now - q->used_ns < EVACUATE_IDLE_NS &&
				 !(squeezed && q->space == p->space))))
			continue;
		age = max(q->used_ns, q->stays_ns);
		if (age >= best_age)
			continue;
		best = q;
		best_age = age;
	}
	if (best)
		pool_evacuate(best);
}

bool pool_gives(const struct mm_pool *p)
{
	unsigned int going = p->ending ? p->nr_extents + p->extents_coming :
					 p->extents_going;

	return going > p->extents_held || p->extents_putting;
}

bool node_room_comes(const struct mm_node *nd)
{
	const struct mm_pool *p;

	if (nd->evac)
		return true;
	list_for_each_entry(p, &nd->pools, node_link)
		if (pool_gives(p))
			return true;
	return false;
}

int pool_grow(struct mm_pool *p)
{
	struct mm *mm = p->space->mm;
	int err;

	if (p->ending || mm->stopping)
		return -ESHUTDOWN;
	if (p->extents_coming >= COMING_MAX ||
	    (p->extents_coming &&
	     (uint64_t)p->extents_coming * p->per_extent >= p->want))
		return 0;
	/* what it has already will do while the host is short of memory */
	if (mm->host_lacks && p->nr_extents && p->nd->kind == KVMM_NODE_HOST)
		return -ENOSPC;
	if (mm->now_ns < p->grow_after_ns)
		return p->extents_coming ? 0 : -EAGAIN;
	if (p->nr_extents + p->nr_lost + p->extents_coming >= p->max_extents)
		err = -ENOSPC;
	else
		err = node_extent_get(p->nd->node, pool_extent_bytes(p),
				      huge_flag(p), extent_came, p);
	if (!err) {
		p->extents_coming++;
		return 0;
	}
	if (err == -ENOSPC) {
		/* an extent that is on its way back is room enough */
		if (!p->extents_coming && !node_room_comes(p->nd))
			evacuate_other(p);
		return -ENOSPC;
	}
	p->grow_after_ns = mm->now_ns + GROW_RETRY_NS;
	return -EAGAIN;
}

/* -- extents of the last daemon's ------------------------------------------ */

void extent_adopt(struct mm_pool *p, uint32_t no, struct extent *ext,
		  const struct keep_extent *kx)
{
	p->extent[no] = (struct mm_extent){
		.ext = ext, .no = no, .ro_fd = -1, .rw_fd = -1,
		.nr_used = p->per_extent,
		.up_seq = kx->up_seq, .down_seq = kx->down_seq,
	};
	p->nr_extents++;
	p->nr_frames += p->per_extent;
	pool_watermarks(p);
}

void extent_lose(struct mm_pool *p, uint32_t no)
{
	p->extent[no] = (struct mm_extent){
		.no = no, .ro_fd = -1, .rw_fd = -1, .lost = true,
	};
	p->nr_lost++;
}

void extent_adopted(struct mm_pool *p, uint32_t no, uint64_t down_seq)
{
	struct mm_extent *e = &p->extent[no];

	p->nr_free += e->nr_free;
	if (e->nr_free)
		bitmap_set(p->free_map, no);
	e->down_seq = 0;
	if (!down_seq)
		return;
	if (e->nr_used) {
		/* it cannot be, but if it is, windows are to map it again */
		e->up_seq = seq_next(p);
		keep_extent(p, e);
		return;
	}
	extent_close(p, no);
	e->down_seq = down_seq;
	e->down_ns = p->space->mm->now_ns + p->space->mm->o.shrink_ack_ns;
	p->space->mm->next_pools_ns = 0;
}

/* -- extents that go ------------------------------------------------------- */

void extent_close(struct mm_pool *p, uint32_t no)
{
	struct mm_extent *e = &p->extent[no];

	if (e->going)
		return;
	e->going = true;
	p->nr_free -= e->nr_free;
	bitmap_clear(p->free_map, no);
	p->extents_going++;
}

void extent_reopen(struct mm_pool *p, uint32_t no)
{
	struct mm_extent *e = &p->extent[no];

	if (!e->going || e->down_seq)
		return;
	e->going = false;
	p->nr_free += e->nr_free;
	if (e->nr_free)
		bitmap_set(p->free_map, no);
	p->extents_going--;
}

bool win_holds(const struct mm_win *w, const struct mm_extent *x)
{
	if (w->closed || w->client->exited || w->told_seq < x->up_seq)
		return false;
	/* who cannot say anything any more may still clear its bits */
	if (!w->client->connected)
		return bitmap_shared_test(w->bitmap, x->no);
	return w->synced_seq < x->down_seq ||
	       bitmap_shared_test(w->bitmap, x->no);
}

static bool extent_held(const struct mm_pool *p, const struct mm_extent *e)
{
	const struct mm_win *w;

	list_for_each_entry(w, &p->windows, pool_link)
		if (win_holds(w, e))
			return true;
	return false;
}

static void extent_gone(struct extent *ext, int err, void *arg)
{
	struct mm_pool *p = arg;

	p->extents_putting--;
}

static void extent_set_held(struct mm_pool *p, struct mm_extent *e, bool held)
{
	p->extents_held += held;
	p->extents_held -= e->held;
	e->held = held;
}

/* Back to the node; true when it is on its way. */
static bool extent_put(struct mm_pool *p, struct mm_extent *e)
{
	struct mm *mm = p->space->mm;

	if (node_extent_put(e->ext, extent_gone, p))
		return false;		/* I/O on it: tried again */
	p->extents_putting++;
	mm->host_short -= min(mm->host_short, pool_extent_bytes(p));
	keep_extent_drop(p, e->no);
	extent_set_held(p, e, false);
	close_fd(&e->ro_fd);
	close_fd(&e->rw_fd);
	*e = (struct mm_extent){ .ro_fd = -1, .rw_fd = -1 };
	p->nr_extents--;
	p->extents_going--;
	p->nr_frames -= p->per_extent;
	pool_watermarks(p);
	return true;
}

/* Give a downed extent back if nobody maps it. */
static bool extent_try_put(struct mm_pool *p, struct mm_extent *e)
{
	bool held = extent_held(p, e);

	if (!held || p->space->mm->now_ns >= e->down_ns)
		extent_set_held(p, e, held);
	return !held && extent_put(p, e);
}

void extent_down(struct mm_pool *p, uint32_t no)
{
	struct mm *mm = p->space->mm;
	struct mm_extent *e = &p->extent[no];

	if (!e->ext || e->down_seq || e->nr_used)
		return;
	extent_close(p, no);
	e->down_seq = seq_next(p);
	keep_extent(p, e);
	e->down_ns = mm->now_ns + mm->o.shrink_ack_ns;
	mm->next_pools_ns = 0;
	if (!extent_try_put(p, e))
		kick_windows(p);
}

void extents_going_run(struct mm_pool *p)
{
	uint32_t no;

	for (no = 1; p->extents_going && no <= p->max_extents; no++) {
		struct mm_extent *e = &p->extent[no];

		if (e->ext && e->down_seq)
			extent_try_put(p, e);
	}
}

bool pool_end(struct mm_pool *p)
{
	uint32_t no;

	if (!p->nd->mem)
		return true;
	p->ending = true;
	evacuate_forget(p);
	for (no = 1; p->nr_extents && no <= p->max_extents; no++)
		if (p->extent[no].ext && !p->extent[no].nr_used)
			extent_down(p, no);
	extents_going_run(p);
	return !p->nr_extents && !p->extents_coming && !p->extents_putting;
}

bool pool_abandon(struct mm_pool *p)
{
	uint32_t no;

	if (!p->nd->mem)
		return true;
	p->ending = true;
	evacuate_forget(p);
	for (no = 1; p->nr_extents && no <= p->max_extents; no++) {
		if (!p->extent[no].ext)
			continue;
		extent_close(p, no);
		extent_put(p, &p->extent[no]);
	}
	return !p->nr_extents && !p->extents_coming && !p->extents_putting;
}
