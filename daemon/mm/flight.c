/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Flights: a page on its way to a node of memory, whoever asked for it.
 *
 * One flight per (page, node); all who wait hang on it. It goes through
 *
 *	waiting	 it has no frame yet: in pool->load_wait, the copy still NONE
 *	loading	 it has a frame, the copy is LOADING, and in turn
 *		 - staging: to a gang, it waits for a buffer (stage.c)
 *		 - flying: the I/O is out
 *		 - copying: a worker copies from memory, or scatters from the buffer
 *	over	 the copy READY, or NONE again
 *	abandoned loading, but somebody published the page meanwhile: the copy
 *		 is what that made it, and the frame goes back with the I/O
 *
 * and holds a reference on the copy it reads from all along. copy.flight leads
 * to it in the first two. The read's deadline is that of its latest waiter. A
 * flight without waiters is taken back if nothing has been started, else the page
 * arrives cold: at the end of the policy's list where it is reclaimed first, or
 * not at all when frames are short.
 *
 * An I/O ends in two steps (struct node_io): answers are given in the first, and
 * frame and reference go back in the second, when neither kernel nor workers use
 * them any more. To a gang the answer waits for the scattering, too: all parts are
 * there, or none is. Between the two a late flight may be joined again, and a read
 * that was late and good arrives like any other.
 *
 * Frames. Loads may take the reserve, which stores cannot. Without a free frame
 * the pool grows, and reclaims at once what is clean; where that gives nothing
 * because everything is pinned the answer is -EAGAIN, recompute, at once; else a
 * flight waits as long as a direct reclaim may take, or as its waiters will while
 * an extent is on its way.
 *
 * A copy from memory is compared with the publisher's checksum, if there is one,
 * as a write to a block node is (writeback.c).
 *
 * Bytes that are not what was written (-EBADMSG) end the copy below, and with it
 * what hangs on it there (copy_judge()).
 */
#include <stdlib.h>

#include "daemon/mm/flight.h"

#define LOAD_SCAN	256u		/* pages a direct reclaim looks at */
#define FULL_NS		NSEC_PER_MSEC	/* a pool full of pins stays so */
#define STAGE_RETRY_NS	NSEC_PER_MSEC

/**
 * struct flight - a page on its way to a node
 * @link:	in mm->flights
 * @pool_link:	in the pool's load_wait while it has no frame, in mm->stage.wait
 *		while it has one and waits for a buffer
 * @from_frame:	where it is copied from, when @from is memory
 * @flying:	the I/O is handed in and not released
 * @frame:	0 while waiting
 * @give_up_ns:	until when it waits for a frame
 * @deadline_ns: of the latest waiter
 * @began:	the node took the I/O
 * @answered:	the I/O said that it failed or is late
 * @arrived:	READY
 * @abandoned:	the page is not its any more, the frame is
 * @stage_waits: for a buffer; counted
 * @sum:	copied: compute @crc, that of the bytes that arrived
 * @stage:	to a gang from a block node: what the I/O reads into
 * @src, @dst:	copying
 */
struct flight {
	struct list	link;
	struct list	pool_link;
	struct list	waiters;
	struct page	*pg;
	struct mm_node	*from, *to;
	uint32_t	from_frame, frame;
	uint64_t	give_up_ns, deadline_ns;
	bool		flying, began, answered, arrived, abandoned, sum;
	bool		stage_waits;
	uint32_t	crc;
	struct stage	*stage;
	struct image	src, dst;
	struct node_io	io;
	struct work	copy;
	uint8_t		ident[PAGE_IDENT_BYTES];
};

/* The page, if it is there. */
static struct page *flight_page(const struct flight *fl)
{
	struct page *pg = fl->pg;

	return page_copy(pg, fl->to)->state == COPY_READY &&
	       !(pg->flags & PAGE_BAD) ? pg : NULL;
}

/* Answer all who wait: with the page if it is READY, else with @err. */
static void flight_answer(struct flight *fl, int err)
{
	struct page *pg = flight_page(fl);
	struct flight_wait *w;

	while ((w = list_first(&fl->waiters, struct flight_wait, link))) {
		list_del(&w->link);
		w->fl = NULL;
		fetch_answer(w, pg, err);
	}
}

/* -- a flight ends ------------------------------------------------------------- */

static void source_get(struct flight *fl)
{
	struct copy *c = page_copy(fl->pg, fl->from);

	if (fl->from->mem) {
		fl->from_frame = c->frame;
		frame_ref(page_pool(fl->pg, fl->from), c->frame);
	} else {
		c->refs++;
	}
}

/* The page may be gone after this. */
static void source_put(struct flight *fl)
{
	if (fl->from->mem)
		frame_unref(page_pool(fl->pg, fl->from), fl->from_frame);
	else
		copy_unref(fl->pg, fl->from);
}

static void source_judge(struct flight *fl, int result)
{
	if (!result || result == -ECANCELED || result == -ESHUTDOWN)
		return;
	fl->to->c.pgload_fail++;
	/* refused is no word on the copy that is there */
	if (fl->began)
		copy_judge(fl->pg, fl->from, result);
}

/* Answers those who still wait, gives everything back. @fl is gone. */
static void flight_end(struct flight *fl, int result)
{
	struct mm_pool *p = page_pool(fl->pg, fl->to);
	struct copy *c = page_copy(fl->pg, fl->to);
	struct mm *mm = fl->to->mm;
	bool freed = false;

	flight_answer(fl, result == -EAGAIN ? -EAGAIN : -ENOENT);
	if (c->flight == fl)
		c->flight = NULL;
	list_del(&fl->pool_link);
	if (!fl->frame) {
		pool_wants(p, 1, 0);
		copy_put(fl->pg, fl->to);
	} else if (!fl->arrived) {
		if (!fl->abandoned)
			copy_set_state(fl->pg, fl->to, COPY_NONE);
		frame_put(p, fl->frame);
		freed = true;
		source_judge(fl, result);
	}
	source_put(fl);
	list_del(&fl->link);
	stage_put(mm, fl->stage);
	free(fl);
	if (freed)
		pool_feed(p);
	flights_staged(mm);
}

/* The bytes are there. Not kept: nobody may find it, or nobody needs it. */
static void flight_arrive(struct flight *fl)
{
	struct mm_pool *p = page_pool(fl->pg, fl->to);
	struct page *pg = fl->pg;
	struct copy *c = page_copy(pg, fl->to);
	bool wanted = !list_empty(&fl->waiters);

	if (fl->abandoned || (pg->flags & PAGE_BAD) ||
	    (c->flags & COPY_DOOMED))
		return;
	if (!wanted) {
		fl->to->c.pgload_late++;
		if (p->nr_free <= p->reserve)
			return;
		c->pol.flags |= KVMM_POLICY_COLD;
	} else {
		fl->to->c.pgload++;
		c->flags |= COPY_WANTED;
	}
	fl->arrived = true;
	c->flight = NULL;
	frame_seal(p, fl->frame, pg);
	fl->to->c.bytes_in += pg->raw_bytes;
	fl->from->c.bytes_out += pg->raw_bytes;
	flight_answer(fl, 0);
}

static bool result_good(const struct flight *fl, int result)
{
	if (result == -EBADMSG && mm_broken(fl->to->mm, MM_BREAK_CRC))
		return true;
	return !result;
}

static void read_done(struct node_io *io, int result)
{
	struct flight *fl = io->arg;

	if (result_good(fl, result)) {
		if (!fl->stage)
			flight_arrive(fl);
		return;
	}
	fl->answered = true;
	if (result != -ECANCELED)	/* whoever joined since: see below */
		flight_answer(fl, -ENOENT);
}

static void flight_submit(struct flight *fl);
static void flight_copy(struct flight *fl, struct image src);

static void read_release(struct node_io *io)
{
	struct flight *fl = io->arg;

	fl->flying = false;
	if (result_good(fl, io->result) && fl->stage) {
		flight_copy(fl, image_flat(fl->stage->mem, io->len));
		return;
	}
	if (io->late && !fl->arrived && result_good(fl, io->result))
		flight_arrive(fl);
	if (io->result == -ECANCELED && !list_empty(&fl->waiters) &&
	    !fl->abandoned && !fl->to->mm->stopping)
		flight_submit(fl);
	else
		flight_end(fl, io->result);
}

bool fetch_abandon(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);
	struct frame_meta *m = &page_pool(pg, nd)->meta[c->frame];
	struct flight *fl = c->flight;

	if (c->state != COPY_LOADING)
		return false;
	if (!fl->answered && !list_empty(&fl->waiters))
		return false;
	fl->abandoned = true;
	c->flight = NULL;
	m->page = NULL;
	m->flags = FMETA_READ;
	copy_set_state(pg, nd, COPY_NONE);
	return true;
}

static void copy_fn(struct work *w)
{
	struct flight *fl = container_of(w, struct flight, copy);

	image_copy(&fl->dst, &fl->src);
	if (fl->sum)
		fl->crc = image_crc(&fl->dst);
}

static void copy_done(struct work *w)
{
	struct flight *fl = container_of(w, struct flight, copy);
	struct mm_node *from = fl->from;
	struct page *pg = fl->pg;

	if (!fl->sum || !page_breached(pg, fl->crc)) {
		flight_arrive(fl);
		flight_end(fl, 0);
		return;
	}
	/* the source is READY, so the page is there until it is dropped here */
	flight_end(fl, -EBADMSG);
	page_drop_breach(pg, from);
}

/* All that is left to do is to copy from @src, and a worker does that. */
static void flight_copy(struct flight *fl, struct image src)
{
	struct mm_pool *p = page_pool(fl->pg, fl->to);

	fl->src = src;
	fl->dst = frame_image(p, fl->frame, src.len);
	fl->copy = (struct work){ .fn = copy_fn, .done = copy_done };
	/* what was read is what was written, and that was looked at */
	fl->sum = fl->from->mem && (fl->pg->flags & PAGE_CRC);
	work_submit(fl->to->mm->o.pool, &fl->copy);
}

/* -- a flight begins ------------------------------------------------------------ */

static void flight_submit(struct flight *fl)
{
	struct mm_pool *p = page_pool(fl->pg, fl->to);
	const struct copy *src = page_copy(fl->pg, fl->from);
	int err;

	if (fl->from->mem) {
		flight_copy(fl, frame_image(page_pool(fl->pg, fl->from),
					    fl->from_frame,
					    fl->pg->raw_bytes));
		return;
	}
	fl->io = (struct node_io) {
		.dir		= NODE_READ,
		.prio		= NODE_PRIO_DEMAND,
		.len		= fl->pg->raw_bytes,
		.crc		= src->crc,
		.slot		= src->slot,
		.addr		= fl->stage ? fl->stage->mem :
					      frame_addr(p, fl->frame),
		.ident		= fl->ident,
		.ident_len	= sizeof(fl->ident),
		.deadline_ns	= fl->deadline_ns,
		.done		= read_done,
		.release	= read_release,
		.arg		= fl,
	};
	err = node_submit(fl->from->node, &fl->io);
	fl->began = !err;
	fl->flying = !err;
	fl->answered = false;
	if (err)
		flight_end(fl, err);
}

/* Hand it in when it has what it needs: to a gang, a buffer. */
static void flight_go(struct flight *fl)
{
	struct mm *mm = fl->to->mm;

	if (!page_pool(fl->pg, fl->to)->shape || fl->from->mem) {
		flight_submit(fl);
		return;
	}
	list_add_tail(&mm->stage.wait, &fl->pool_link);
	flights_staged(mm);
}

/* Those that came since the last call stand behind the others. */
static void count_stage_waits(struct mm *mm)
{
	struct list *l = mm->stage.wait.prev;

	for (; l != &mm->stage.wait; l = l->prev) {
		struct flight *fl = list_entry(l, struct flight, pool_link);

		if (fl->stage_waits)
			break;
		fl->stage_waits = true;
		fl->to->c.stage_wait++;
	}
}

void flights_staged(struct mm *mm)
{
	struct flight *fl;

	/* one that cannot be handed in ends, and comes here again */
	if (mm->stage.serving)
		return;
	mm->stage.serving = true;
	while ((fl = list_first(&mm->stage.wait, struct flight, pool_link))) {
		fl->stage = stage_get(mm, fl->pg->raw_bytes, NODE_READ);
		if (!fl->stage)
			break;
		list_del(&fl->pool_link);
		flight_submit(fl);
	}
	count_stage_waits(mm);
	mm->stage.serving = false;
}

/* @f is LOADING. @fl may be gone after this. */
static void flight_start(struct flight *fl, uint32_t f)
{
	struct mm_pool *p = page_pool(fl->pg, fl->to);
	struct copy *c = page_copy(fl->pg, fl->to);

	fl->frame = f;
	p->meta[f].page = fl->pg;
	c->frame = f;
	copy_set_state(fl->pg, fl->to, COPY_LOADING);
	c->flight = fl;
	flight_go(fl);
}

/* Is there still a reason and a source for a flight that has waited? */
static bool flight_useful(const struct flight *fl)
{
	return !(fl->pg->flags & PAGE_BAD) &&
	       page_copy(fl->pg, fl->to)->state == COPY_NONE &&
	       copy_good(page_copy(fl->pg, fl->from));
}

void fetch_frames_came(struct mm_pool *p)
{
	struct flight *fl;
	uint32_t f;

	while ((fl = list_first(&p->load_wait, struct flight, pool_link))) {
		if (!flight_useful(fl)) {
			flight_end(fl, -ENOENT);
			continue;
		}
		f = frame_take(p, FRAME_FOR_LOAD, FRAME_LOADING);
		if (!f)
			return;
		list_del(&fl->pool_link);
		pool_wants(p, 1, 0);
		flight_start(fl, f);
	}
}

/* Will there be an extent for somebody without anybody doing anything? */
static bool room_comes(const struct mm_pool *p)
{
	const struct mm_pool *q;

	if (p->extents_coming || pool_room(p) || p->nd->evac)
		return true;
	list_for_each_entry(q, &p->nd->pools, node_link)
		if (pool_gives(q))
			return true;
	return false;
}

/* A frame, at once; @more: pages of the operation that may want one, too. */
static uint32_t load_frame(struct mm_pool *p, uint32_t more)
{
	uint64_t now = p->nd->mm->now_ns;
	struct reclaim_control rc = {
		.want		= min(more, TIER_BATCH),
		.max_scan	= LOAD_SCAN,
		.direct		= true,
	};
	uint32_t f;

	if (!list_empty(&p->load_wait))
		return 0;		/* others were first */
	f = frame_take(p, FRAME_FOR_LOAD, FRAME_LOADING);
	if (f || now < p->full_ns)
		return f;
	pool_grow(p);
	rc.deadline_ns = now_ns() + TIER_SLICE_NS;
	pool_reclaim(p, &rc);
	f = frame_take(p, FRAME_FOR_LOAD, FRAME_LOADING);
	if (!f && !rc.writing && rc.scanned >= p->nr_pages && !room_comes(p))
		p->full_ns = now + FULL_NS;
	return f;
}

static void wait_add(struct flight_wait *w, struct flight *fl)
{
	w->fl = fl;
	list_add_tail(&fl->waiters, &w->link);
}

void flight_join(struct flight_wait *w, struct flight *fl,
		 uint64_t deadline_ns)
{
	wait_add(w, fl);
	fl->to->c.fetch_shared++;
	fl->deadline_ns = max(fl->deadline_ns, deadline_ns);
	if (fl->flying) {
		node_io_deadline(&fl->io, fl->deadline_ns);
		node_io_raise(&fl->io, NODE_PRIO_DEMAND);
	}
}

bool flight_waits(const struct flight_wait *w)
{
	return w->fl && !w->fl->frame;
}

int flight_begin(struct flight_wait *w, struct page *pg, struct mm_pool *p,
		 uint64_t deadline_ns, uint32_t more)
{
	struct mm_node *to = p->nd, *from = page_source(pg, to);
	struct flight *fl;
	struct copy *c;
	uint32_t f;

	if (!from)
		return -ENOENT;
	c = copy_get(pg, to);
	fl = c ? calloc(1, sizeof(*fl)) : NULL;
	if (!fl) {
		copy_put(pg, to);
		return -EAGAIN;
	}
	fl->pg = pg;
	fl->from = from;
	fl->to = to;
	fl->deadline_ns = deadline_ns;
	list_init(&fl->pool_link);
	list_init(&fl->waiters);
	page_ident(pg, fl->ident);
	source_get(fl);		/* a reclaim for its frame must not take it */
	f = load_frame(p, more);
	if (!f && to->mm->now_ns < p->full_ns) {
		copy_put(pg, to);
		source_put(fl);
		free(fl);
		return -EAGAIN;
	}
	list_add_tail(&to->mm->flights, &fl->link);
	c->flight = fl;
	wait_add(w, fl);
	if (f) {
		flight_start(fl, f);
		return 0;
	}
	fl->give_up_ns = to->mm->now_ns + to->mm->o.direct_reclaim_ns;
	list_add_tail(&p->load_wait, &fl->pool_link);
	pool_wants(p, 0, 1);
	to->mm->next_reclaim_ns = 0;
	return 0;
}

/* -- waiters leave, time passes --------------------------------------------------- */

struct page *flight_leave(struct flight_wait *w)
{
	struct flight *fl = w->fl;
	struct page *pg = flight_page(fl);

	list_del(&w->link);
	w->fl = NULL;
	if (!list_empty(&fl->waiters))
		return pg;
	if (!list_empty(&fl->pool_link))
		flight_end(fl, -ECANCELED);
	else if (fl->flying)
		node_io_cancel(&fl->io);	/* or it arrives cold */
	return pg;
}

/*
 * Flights that have waited for a frame long enough; they stand in order. Where
 * an extent is on its way there will be frames, however long populating it takes:
 * then it is the waiters' own deadlines that count.
 */
static uint64_t load_waits_run(struct mm_pool *p, uint64_t now)
{
	struct flight *fl;

	while ((fl = list_first(&p->load_wait, struct flight, pool_link))) {
		uint64_t until = fl->give_up_ns;

		if (p->extents_coming)
			until = max(until, fl->deadline_ns);
		if (now < until)
			return until;
		flight_end(fl, -EAGAIN);
	}
	return UINT64_MAX;
}

/* With no buffer out, none comes back to serve who waits: there was no memory. */
static uint64_t stage_waits_run(struct mm *mm, uint64_t now)
{
	if (list_empty(&mm->stage.wait) || mm->stage.out[NODE_READ] ||
	    mm->stage.out[NODE_WRITE])
		return UINT64_MAX;
	flights_staged(mm);
	return list_empty(&mm->stage.wait) ? UINT64_MAX : now + STAGE_RETRY_NS;
}

uint64_t flights_run(struct mm *mm, uint64_t now)
{
	uint64_t next = UINT64_MAX, at;
	struct mm_pool *p;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		list_for_each_entry(p, &mm->node[i].pools, node_link) {
			at = load_waits_run(p, now);

			next = min(next, at);
		}
	at = stage_waits_run(mm, now);
	return min(next, at);
}

void flights_stop(struct mm *mm)
{
	struct flight *fl;

	/* those that wait for something went with their last waiter */
	list_for_each_entry(fl, &mm->flights, link)
		if (fl->flying)
			node_io_cancel(&fl->io);
}

uint64_t flights_stage_bytes(const struct mm *mm)
{
	const struct flight *fl;
	uint64_t sum = 0;

	list_for_each_entry(fl, &mm->flights, link)
		sum += fl->stage ? fl->stage->bytes : 0;
	return sum;
}
