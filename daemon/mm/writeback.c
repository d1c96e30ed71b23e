/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writeback: pages go down to a block node while they stay READY above.
 *
 * Order. A block node is closed by itself, so that it can be hit after a
 * restart: a page is written after its ancestors, in one batch with them or
 * later. The head of a chain is paid for once. Writes end in any order; one that
 * is over before its parent's stays WRITING until that is READY (settle()). So
 * whatever is READY below has its ancestors READY there, and when a write fails
 * nothing has been given up for it: its descendants below are WRITING, too, and
 * all of them are still READY above.
 *
 * Admission. Which pages are worth a write is in admit.c; asked is the page that
 * is to leave, and not the ancestors that it needs. Where the node is full slots.c
 * makes room. A page that finds none, or a medium that takes no writes, stays
 * where it is, and reclaim may drop it.
 *
 * Gangs. A page of a gang is gathered into a buffer by a worker, and written from
 * there: the copy is WRITING all along. What the node refuses then fails like a
 * write that it took. The page is as dirty as before, so that it would be gathered
 * again at once: no page of a gang is for a moment, in the background. A plain
 * pool goes on, since it is told of a refusal before it has done anything.
 *
 * Breaches. A writer keeps its mapping after it has published. Where it gave a
 * checksum (KVMM_PUB_CRC) that of the bytes that went down is compared with it
 * when the write is over: it was computed for the write anyway. A page that was
 * written to meanwhile is a page of other bytes than its key says; it goes, in
 * memory, too, with all that hangs on it. Once it is below it is safe, since
 * the slot's own checksum covers what was compared here.
 *
 * Clean ahead. A share of each pool is kept clean, coldest first, so that
 * reclaim finds pages that it can drop at once. Where it met dirty ones all the
 * same the share grows (wb_boost), where it did not it shrinks again: a share of
 * the whole pool says nothing of how clean its cold end is when much of what is
 * clean is hot. Nothing is written as long as memory is not nearly full.
 */
#include <stdlib.h>

#include "daemon/mm/tier.h"

/*
 * One part in this many is kept free or clean. A guess: at 1/8 a pool can take
 * an eighth of its size in new pages while the medium does 10 writes; too much
 * writes pages that would have died in memory. Measured by pgdemote of pages
 * that are never loaded against allocstall.
 */
#define WB_CLEAN_SHARE		8u

/*
 * What is under way to one node at once. Guesses: 32 MiB are some 10 to 30 ms
 * of one NVMe drive, enough for its queue; small pages are bounded by number.
 * And of one pool: a device that stalls keeps the frames it was given, and the
 * rest of the pool must be able to go on without it.
 */
#define WB_BYTES		(UINT64_C(32) << 20)
#define WB_IOS_MIN		8u
#define WB_IOS_MAX		256u
#define WB_POOL_SHARE		4u	/* one part in this many */

#define WB_PAUSE_NS		(10 * NSEC_PER_MSEC)
#define WB_LOOK			512u	/* dirty pages looked at a call */

/**
 * struct wback - a page on its way to a block node
 * @link:	in mm->wbacks until the I/O is over; then settle()'s
 * @from, @frame: where it is read from; referenced until the I/O is over
 * @over:	nothing uses frame or slot any more; @io.result holds
 * @flying:	the I/O is handed in and not released
 * @stage:	of a gang: what the I/O writes; @gather fills it from @src
 */
struct wback {
	struct list	link;
	struct node_io	io;
	struct page	*pg;
	struct mm_node	*from, *to;
	uint32_t	frame;
	bool		over, flying;
	struct stage	*stage;
	struct image	src;
	struct work	gather;
	uint8_t		ident[PAGE_IDENT_BYTES];
};

bool wback_over(const struct copy *c)
{
	return c->wb->over;
}

void wback_free(struct copy *c)
{
	list_del(&c->wb->link);
	free(c->wb);
	c->wb = NULL;
}

void page_ident(const struct page *pg, uint8_t ident[PAGE_IDENT_BYTES])
{
	memcpy(ident, pg->space->id, 32);
	ident[32] = pg->group & 0xff;
	ident[33] = pg->group >> 8;
	memcpy(ident + 34, pg->key, 32);
}

bool node_takes(const struct mm_node *lo)
{
	return !lo->mm->stopping && node_writable(lo->node);
}

bool pool_pauses(const struct mm_pool *p, const struct mm_node *lo)
{
	return p->shape && lo->mm->now_ns < lo->wb_after_ns;
}

bool pool_full_of_writes(const struct mm_pool *p, const struct mm_node *lo)
{
	uint64_t most = (p->nr_frames + pool_room(p)) / WB_POOL_SHARE;

	if (p->nr_writing >= max(most, (uint64_t)1))
		return true;
	return lo->wb_ios >= WB_IOS_MAX ||
	       (lo->wb_ios >= WB_IOS_MIN && lo->wb_bytes >= WB_BYTES);
}

/* -- the end of a write -------------------------------------------------------- */

static void wback_ready(struct wback *wb)
{
	struct page *pg = wb->pg;
	struct mm_node *from = wb->from, *to = wb->to;
	struct copy *c = page_copy(pg, to);

	c->crc = wb->io.crc;
	to->no_space = false;
	wback_free(c);
	copy_set_state(pg, to, COPY_READY);
	persist_add(pg, to);
	from->c.pgdemote++;
	from->c.bytes_out += pg->raw_bytes;
	to->c.bytes_in += pg->raw_bytes;
}

/*
 * The write of @pg is over and good: READY, if its parent is, and then the
 * children that waited for it, and theirs.
 */
static void settle(struct page *pg, struct mm_node *to)
{
	struct list ready = LIST_INIT(ready);
	struct copy *c = page_copy(pg, to);
	struct page *child;
	struct wback *wb;

	if (page_bound(pg)) {
		const struct copy *up = page_copy(pg->parent, to);

		if (up->state == COPY_WRITING && !(up->flags & COPY_DOOMED))
			return;		/* its settle() comes back to us */
		if (!copy_good(up)) {
			copy_drop_tree(pg, to);
			return;
		}
	}
	list_add_tail(&ready, &c->wb->link);
	while ((wb = list_first(&ready, struct wback, link))) {
		pg = wb->pg;
		wback_ready(wb);
		list_for_each_entry(child, &pg->children, sibling) {
			c = page_copy(child, to);
			if (page_bound(child) && c->state == COPY_WRITING && c->wb->over &&
			    !(c->flags & COPY_DOOMED))
				list_add_tail(&ready, &c->wb->link);
		}
	}
}

static void wback_failed(struct wback *wb)
{
	struct copy *src = page_copy(wb->pg, wb->from);

	wb->from->c.pgdemote_fail++;
	/*
	 * A bad place on the medium is not offered again, but the same bytes
	 * may be what it chokes on: give the page up sooner than the device.
	 */
	if (wb->io.result == -EIO && src->state == COPY_READY)
		src->flags |= COPY_WFAIL;
	/*
	 * The medium has less space than the node was promised: make do with
	 * less. What was written before can be written again (nvme_slots.c). If
	 * that does not help either no more is given up for it.
	 */
	if (wb->io.result == -ENOSPC && !wb->to->no_space &&
	    !wb->to->mm->stopping) {
		wb->to->no_space = true;
		slots_evict(page_pool(wb->pg, wb->to));
	}
}

static void wback_done(struct node_io *io, int result)
{
	/* nobody waits for a write: all is done when it is over */
}

/* Nothing uses frame, slot or buffer any more; @wb may be gone after this. */
static void wback_end(struct wback *wb)
{
	struct node_io *io = &wb->io;
	struct page *pg = wb->pg;
	struct mm_node *to = wb->to;
	struct mm *mm = to->mm;
	struct copy *c = page_copy(pg, to);

	frame_unref(page_pool(pg, wb->from), wb->frame);
	page_pool(pg, wb->from)->nr_writing--;
	list_del(&wb->link);
	wb->over = true;
	to->wb_ios--;
	to->wb_bytes -= io->len;
	mm->next_reclaim_ns = 0;
	stage_put(mm, wb->stage);
	wb->stage = NULL;
	if (io->result)
		wback_failed(wb);
	if (!io->result && page_breached(pg, io->data_crc))
		page_drop_breach(pg, wb->from);
	else if (io->result || (c->flags & COPY_DOOMED))
		copy_drop_tree(pg, to);
	else
		settle(pg, to);
	flights_staged(mm);
}

static void wback_release(struct node_io *io)
{
	struct wback *wb = io->arg;

	wb->flying = false;
	wback_end(wb);
}

/* -- the beginning of a write ------------------------------------------------- */

/* The memory node to write @pg from: @nd, else another that has it. */
static struct mm_node *write_source(struct page *pg, struct mm_node *nd)
{
	struct mm *mm = nd->mm;
	unsigned int i;

	if (page_copy(pg, nd)->state == COPY_READY)
		return nd;
	for (i = 0; i < mm->nr_nodes; i++)
		if (mm->node[i].mem && copy_at(pg, i)->state == COPY_READY)
			return &mm->node[i];
	return NULL;
}

static int wback_submit(struct wback *wb)
{
	int err = node_submit(wb->to->node, &wb->io);

	wb->flying = !err;
	return err;
}

static void gather_fn(struct work *w)
{
	struct wback *wb = container_of(w, struct wback, gather);
	struct image flat = image_flat(wb->stage->mem, wb->src.len);

	image_copy(&flat, &wb->src);
	/* what another page left there is nobody's to have */
	memset(flat.part[0] + flat.len, 0, wb->stage->bytes - flat.len);
}

static void gather_done(struct work *w)
{
	struct wback *wb = container_of(w, struct wback, gather);
	int err = -ECANCELED;

	if (!wb->to->mm->stopping &&
	    !(page_copy(wb->pg, wb->to)->flags & COPY_DOOMED)) {
		err = wback_submit(wb);
		if (!err)
			return;
		wb->to->wb_after_ns = now_ns() + WB_PAUSE_NS;
	}
	/* -EIO would be the medium's word on these bytes; it has not seen them */
	wb->io.result = err == -EIO ? -EAGAIN : err;
	wback_end(wb);
}

static void wback_gather(struct wback *wb)
{
	struct work_pool *pool = wb->to->mm->o.pool;

	wb->src = frame_image(page_pool(wb->pg, wb->from), wb->frame,
			      wb->io.len);
	wb->gather = (struct work){
		.fn = gather_fn, .done = gather_done, .bulk = true,
	};
	work_submit(pool, &wb->gather);
}

static void wback_fill(struct wback *wb, struct page *pg, struct mm_node *from,
		       struct mm_node *to, enum node_prio prio)
{
	wb->pg = pg;
	wb->from = from;
	wb->to = to;
	wb->frame = page_copy(pg, from)->frame;
	page_ident(pg, wb->ident);
	wb->io.dir = NODE_WRITE;
	wb->io.prio = prio;
	wb->io.len = pg->raw_bytes;
	wb->io.slot = page_copy(pg, to)->slot;
	wb->io.addr = wb->stage ? wb->stage->mem :
				  frame_addr(page_pool(pg, from), wb->frame);
	wb->io.ident = wb->ident;
	wb->io.ident_len = sizeof(wb->ident);
	wb->io.done = wback_done;
	wb->io.release = wback_release;
	wb->io.arg = wb;
}

static int wback_start(struct page *pg, struct mm_node *nd, struct mm_node *to,
		       enum node_prio prio)
{
	struct mm_node *from = write_source(pg, nd);
	struct copy *c = page_copy(pg, to);
	struct wback *wb;
	int err;

	if (!from)
		return -ENOENT;
	wb = calloc(1, sizeof(*wb));
	if (!wb)
		return -ENOMEM;
	if (page_pool(pg, from)->shape) {
		err = -EBUSY;	/* until a buffer comes back */
		wb->stage = stage_get(nd->mm, pg->raw_bytes, NODE_WRITE);
		if (!wb->stage)
			goto err_free;
	}
	err = persist_label(pg->space, to);
	if (err == -EAGAIN)
		err = -EBUSY;
	if (!err)
		err = slot_get(pg, to);
	if (err)
		goto err_free;
	/* what left the node for this slot may have been an ancestor */
	if (page_bound(pg)) {
		const struct copy *up = page_copy(pg->parent, to);

		err = up->state == COPY_NONE || (up->flags & COPY_DOOMED) ?
		      -EAGAIN : 0;
	}
	if (!err) {
		wback_fill(wb, pg, from, to, prio);
		if (!wb->stage)
			err = wback_submit(wb);
	}
	if (err)
		goto err_slot;
	frame_ref(page_pool(pg, from), wb->frame);
	page_pool(pg, from)->nr_writing++;
	list_add_tail(&nd->mm->wbacks, &wb->link);
	c->wb = wb;
	copy_set_state(pg, to, COPY_WRITING);
	to->wb_ios++;
	to->wb_bytes += wb->io.len;
	budget_charge(to, round_up(wb->io.len, NODE_ALIGN));
	if (wb->stage)
		wback_gather(wb);
	return 0;

err_slot:
	slot_put(pg, to);
err_free:
	stage_put(nd->mm, wb->stage);
	free(wb);
	return err;
}

/*
 * Returns how many writes were begun, or why none: -EBUSY (enough are under
 * way), -EIO (refused before), -ENOSPC (and nothing there can go), -EPERM (not
 * admitted), -EDQUOT (no writes left today), -EAGAIN, ...
 * A chain that is longer than a batch begins with its upper part: come again.
 */
int page_writeback(struct page *pg, struct mm_node *nd, enum node_prio prio)
{
	struct page *chain[TIER_BATCH], *above = NULL;
	struct mm_node *lo = node_lower(nd);
	unsigned int n = 0, end, begun = 0;
	struct mm_pool *p;
	int err = 0;

	if (!lo || !node_takes(lo))
		return -EAGAIN;
	p = page_pool(pg, nd);
	if (pool_full_of_writes(p, lo))
		return -EBUSY;
	if (page_copy(pg, lo)->state != COPY_NONE || (pg->flags & PAGE_BAD))
		return -EALREADY;
	if (!admit_page(pg, nd, lo))
		return -EPERM;
	if (!budget_left(lo, false)) {
		lo->c.pgadmit_budget++;
		return -EDQUOT;
	}
	for (;; pg = pg->parent) {
		if (page_copy(pg, nd)->flags & COPY_WFAIL)
			return -EIO;
		chain[n++ % TIER_BATCH] = pg;
		if (!page_bound(pg))
			break;
		if (page_copy(pg->parent, lo)->state != COPY_NONE) {
			above = pg->parent;
			break;
		}
	}
	if (above) {
		if (page_copy(above, lo)->flags & COPY_DOOMED)
			return -EAGAIN;
		/* a leaf there until we arrive: not to be evicted for us */
		page_copy(above, lo)->refs++;
	}
	end = n > TIER_BATCH ? n - TIER_BATCH : 0;
	while (n > end && !pool_full_of_writes(p, lo) &&
	       (n == 1 || budget_left(lo, true))) {
		err = wback_start(chain[--n % TIER_BATCH], nd, lo, prio);
		if (err)
			break;
		begun++;
	}
	lo->c.pgadmit += !n && !err;
	if (above)
		copy_unref(above, lo);
	return begun ? (int)begun : err;
}

/* -- in the background -------------------------------------------------------- */

/* Pages that ought to be free, clean or refused, and are not. */
static uint64_t clean_lack(const struct mm_pool *p, const struct mm_node *lo)
{
	uint64_t room = pool_room(p);
	uint64_t goal = (p->nr_frames + room) / WB_CLEAN_SHARE + p->wb_boost;
	uint64_t have = p->nr_free + room + p->nr_pages - p->nr_dirty +
			p->nr_refused + lo->wb_ios;

	return goal > have ? goal - have : 0;
}

static unsigned int pool_clean(struct mm_pool *p, struct mm_node *lo)
{
	uint64_t lack = p->nr_dirty ? clean_lack(p, lo) : 0;
	unsigned int looked = 0, begun = 0;
	struct list *l, *next;

	lack = min(lack, (uint64_t)TIER_BATCH);
	for (l = p->dirty.next; l != &p->dirty && begun < lack; l = next) {
		struct copy *c = list_entry(l, struct copy, link);
		int n;

		if (++looked > WB_LOOK)
			break;
		next = l->next;
		n = page_writeback(copy_page(c, p->nd), p->nd,
				   NODE_PRIO_WRITEBACK);
		if (n > 0)
			begun += n;
		else if (n != -EALREADY && n != -EIO && n != -EAGAIN &&
			 n != -EPERM)
			break;		/* the others may fare no better */
	}
	return begun;
}

uint64_t writeback_run(struct mm *mm, uint64_t now)
{
	unsigned int begun = 0, i;

	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i], *lo = node_lower(nd);
		struct mm_pool *p;

		if (!lo || !node_takes(lo) || !budget_left(lo, false))
			continue;
		list_for_each_entry(p, &nd->pools, node_link)
			if (!pool_pauses(p, lo) &&
			    !pool_full_of_writes(p, lo))
				begun += pool_clean(p, lo);
	}
	return begun ? now : UINT64_MAX;
}

void writeback_stop(struct mm *mm)
{
	struct wback *wb;

	/* what is being gathered sees for itself that the end has come */
	list_for_each_entry(wb, &mm->wbacks, link)
		if (wb->flying)
			node_io_cancel(&wb->io);
}

uint64_t wbacks_stage_bytes(const struct mm *mm)
{
	const struct wback *wb;
	uint64_t sum = 0;

	list_for_each_entry(wb, &mm->wbacks, link)
		sum += wb->stage ? wb->stage->bytes : 0;
	return sum;
}

uint32_t wbacks_to(const struct mm_node *lo, uint64_t *bytes)
{
	const struct wback *wb;
	uint32_t n = 0;

	*bytes = 0;
	list_for_each_entry(wb, &lo->mm->wbacks, link) {
		if (wb->to != lo)
			continue;
		n++;
		*bytes += wb->io.len;
	}
	return n;
}

uint32_t wbacks_from(const struct mm_pool *p)
{
	const struct wback *wb;
	uint32_t n = 0;

	list_for_each_entry(wb, &p->nd->mm->wbacks, link)
		n += page_pool(wb->pg, wb->from) == p;
	return n;
}
