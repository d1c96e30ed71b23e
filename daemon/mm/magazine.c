/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Magazines: OPEN frames on their way to clients, and back.
 *
 * A client that cannot serve an allocation from its magazine says how
 * much it wants; what is pushed is that, and some more for the next 10 ms at the
 * rate of late, as long as frames are plenty. Only frames of extents that every
 * member of the engine has mapped. What cannot be had at once is waited for
 * here, never by the client: it is woken when frames came.
 *
 * Nobody takes back what lies in a magazine, and an idle client does not empty
 * it. So what was never refused to a client is a stock, of which all of a
 * pool's magazines together hold a quarter of its frames at most, but for a few
 * that each may have; each an equal part of it, as if there were eight or more,
 * since who comes first cannot know how many will.
 */
#include <stdlib.h>

#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define REFILL_STOCK	64u		/* a stock, when frames are plenty */
#define REFILL_FLOOR	4u		/* and when there are many magazines */
#define REFILL_SHARERS	8u		/* magazines at least, for the share */
#define REFILL_AHEAD_NS	(10 * NSEC_PER_MSEC)
#define REFILL_RATE_NS	NSEC_PER_MSEC	/* shorter times say nothing of a rate */

/* -- the magazine ------------------------------------------------------------------- */

uint64_t win_mapped(const struct mm_win *w, size_t i)
{
	uint64_t bits = UINT64_MAX;
	const struct mm_win *peer;

	/* acquire: pairs with the release of whoever mapped and set the bit */
	list_for_each_entry(peer, &w->pool->windows, pool_link)
		if (peer->engine == w->engine && !peer->closed &&
		    !peer->client->replaced)
			bits &= atomic_load_explicit(&peer->bitmap[i],
						     memory_order_acquire);
	return bits;
}

/* Frames that wait in the magazine; -EPROTO when the client's head is a lie. */
static int64_t magazine_fill(const struct mm_win *w)
{
	/* acquire: pairs with the client's release: it has read the places */
	uint32_t head = atomic_load_explicit(&w->wl->mag_head,
					     memory_order_acquire);
	uint32_t fill = w->mag_tail - head;

	return fill <= w->mag_entries ? (int64_t)fill : -EPROTO;
}

static void magazine_push(struct mm_win *w, const uint32_t *f, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		atomic_store_explicit(&w->mag[(w->mag_tail + i) &
					      (w->mag_entries - 1)], f[i],
				      memory_order_relaxed);
	mm_point();
	w->mag_tail += n;
	/* release: pairs with the client's acquire; the places are there */
	atomic_store_explicit(&w->wl->mag_tail, w->mag_tail,
			      memory_order_release);
}

/* What others have a right to and do not hold yet. */
static uint64_t reserved_by_others(const struct mm_win *w)
{
	const struct mm_win *o;
	uint64_t sum = 0;

	list_for_each_entry(o, &w->pool->windows, pool_link)
		if (o->engine != w->engine && o->reserved > o->nr_open)
			sum += o->reserved - o->nr_open;
	return sum;
}

/* How many more OPEN frames @w may have at all. */
static uint64_t open_allowance(const struct mm_win *w)
{
	const struct mm_pool *p = w->pool;
	const struct mm *mm = p->space->mm;
	uint64_t frames = pool_most_frames(p);
	uint64_t most = frames, taken = p->nr_open + reserved_by_others(w);

	if (mm->o.pin_limit_pct)
		most = frames * mm->o.pin_limit_pct / 100;
	most = most > w->nr_open ? most - w->nr_open : 0;
	/* one's own reserve is a right, whatever the others hold */
	if (w->nr_open < w->reserved)
		return max(most, (uint64_t)w->reserved - w->nr_open);
	frames = frames > taken ? frames - taken : 0;
	return min(most, frames);
}

/* Hand out up to @n, keeping @keep free frames. Returns how many it was. */
static uint32_t win_give(struct mm_win *w, uint32_t n, uint32_t keep)
{
	struct mm_pool *p = w->pool;
	uint64_t allow = open_allowance(w);
	uint32_t f[256], given = 0;

	n = min((uint64_t)n, allow);
	if (p->nr_free <= keep)
		return 0;
	n = min(n, p->nr_free - keep);
	while (given < n) {
		uint32_t got = frame_take_open(p, w, f,
				min(n - given, (uint32_t)ARRAY_SIZE(f)));

		if (!got)
			break;
		magazine_push(w, f, got);
		given += got;
	}
	w->given_since += given;
	return given;
}

/* What @w may have in stock for no reason, and what it may in all. */
static uint32_t stock_share(const struct mm_win *w, uint32_t *most)
{
	const struct mm_pool *p = w->pool;
	uint32_t quarter = p->nr_frames / 4, n = 0;
	uint64_t others = 0;
	const struct mm_win *o;
	int64_t fill;

	list_for_each_entry(o, &p->windows, pool_link) {
		if (o->closed || o->rights != KVMM_RW)
			continue;
		n++;
		fill = o == w ? 0 : magazine_fill(o);
		others += max(fill, INT64_C(0));
	}
	*most = others < quarter ? quarter - others : 0;
	return min(quarter / max(n, REFILL_SHARERS), REFILL_STOCK);
}

/* What the magazine should hold beyond the want, by the rate of late. */
static uint32_t refill_stock(struct mm_win *w, uint64_t now)
{
	const struct mm_pool *p = w->pool;
	uint64_t ns = max(now - w->last_refill_ns, REFILL_RATE_NS);
	uint64_t rate = 2 * w->given_since * REFILL_AHEAD_NS / ns;
	uint32_t most, share = stock_share(w, &most);

	/* the last round's frames, over the time they lasted */
	w->last_refill_ns = now;
	w->given_since = 0;
	rate = min(rate, p->nr_frames / (uint64_t)16);
	return min(max(rate, (uint64_t)share), (uint64_t)most);
}

static void win_wait(struct mm_win *w, uint32_t n)
{
	struct mm_pool *p = w->pool;

	/* who asks again has waited all along */
	pool_wants(p, w->want, n);
	w->want = n;
	list_del(&w->refill_link);
	list_add_tail(&p->refill_wait, &w->refill_link);
	w->engine->mm->next_pools_ns = 0;
	w->engine->mm->next_reclaim_ns = 0;
}

/* What is clean goes at once; what must be written first is started. */
static void refill_reclaim(struct mm_pool *p, uint32_t n, uint64_t now)
{
	struct mm *mm = p->space->mm;
	struct reclaim_control rc = {
		.want		= n,
		.max_scan	= max(4 * n, 64u),
		.deadline_ns	= now + mm->o.direct_reclaim_ns,
		.direct		= true,
	};

	if (p->nr_pages)
		pool_reclaim(p, &rc);
}

/*
 * The client stores armed, then loads refills; here refills is stored, then
 * armed loaded: one of the two sees the other, and nobody sleeps on frames that
 * are there.
 */
static void refill_answered(struct mm_win *w)
{
	/* seq_cst: see above; and it releases what was pushed before it */
	atomic_store(&w->wl->refills, ++w->refills);
	w->engine->mm->ops->kick_client(w->client);
}

void mm_refill(struct mm_win *w, uint32_t n)
{
	struct mm_pool *p = w->pool;
	uint64_t now = now_ns();
	uint32_t stock, short_of;
	int64_t fill;

	if (w->closed || w->rights != KVMM_RW || engine_usable(w->engine))
		return;
	p->space->mm->now_ns = now;
	fill = magazine_fill(w);
	if (fill < 0) {
		client_evict(w->client, "magazine head beyond its tail");
		return;
	}
	n = min(n, p->max_frames);
	short_of = n > fill ? n - fill : 0;
	/* what it may not have, it need not wait for */
	short_of = min((uint64_t)short_of, open_allowance(w));
	stock = refill_stock(w, now);
	short_of -= win_give(w, short_of, p->reserve);
	/* frames that are there, but not mapped by it yet, need no more room */
	if (short_of && p->nr_free < p->reserve + short_of &&
	    pool_grow(p) == -ENOSPC) {
		refill_reclaim(p, short_of, now);
		short_of -= win_give(w, short_of, p->reserve);
	}
	if (short_of) {
		p->nd->c.allocstall++;
		win_wait(w, short_of);
	} else {
		win_leave_wait(w);
		fill = max(fill, (int64_t)n);
		if (stock > fill)
			win_give(w, stock - fill, p->wmark_low);
		if (pool_runs_dry(p))
			p->space->mm->next_pools_ns = 0;
	}
	refill_answered(w);
}

void mm_stock(struct mm_win *w, uint32_t n)
{
	/* relaxed: a hint beside the entry that asks, and the client's */
	uint32_t want = atomic_load_explicit(&w->wl->want,
					     memory_order_relaxed);
	uint32_t most, share = stock_share(w, &most);

	share = max(min(share, most), REFILL_FLOOR);
	mm_refill(w, min(n, max(want, share)));
}

void win_feed(struct mm_win *w)
{
	uint32_t got;

	if (!w->client->connected || w->closed || engine_usable(w->engine)) {
		win_leave_wait(w);
		return;
	}
	if (magazine_fill(w) < 0) {
		win_leave_wait(w);
		client_evict(w->client, "magazine head beyond its tail");
		return;
	}
	got = win_give(w, w->want, w->pool->reserve);
	if (!got)
		return;
	pool_wants(w->pool, got, 0);
	w->want -= got;
	if (!w->want)
		list_del(&w->refill_link);
	refill_answered(w);
}

/* -- frames that come back ------------------------------------------------------------ */

/* Frames that nobody else may get before a step. */
struct free_wait {
	struct step_wait sw;
	struct mm_pool	*pool;
	uint32_t	n;
	uint32_t	frame[];
};

static bool may_free(const struct mm_win *w, uint32_t f)
{
	const struct mm_pool *p = w->pool;
	const struct frame_meta *m = &p->meta[f];

	return frame_live(p, f) && f >= p->per_extent &&
	       frame_word_state(frame_word_of(p, f)) == FRAME_OPEN &&
	       m->owner == w->engine && !m->flags && !m->refs;
}

static void free_frames(const struct free_wait *fw)
{
	struct mm_pool *p = fw->pool;
	uint32_t i;

	for (i = 0; i < fw->n; i++) {
		const struct mm_win *w = p->meta[fw->frame[i]].win;

		frame_put(p, fw->frame[i]);
		/* not here: who calls may be going through windows */
		if (w->closed && !w->nr_open)
			p->space->mm->next_closed_ns = 0;
	}
}

static void free_step(struct step_wait *sw, int err)
{
	struct free_wait *fw = container_of(sw, struct free_wait, sw);

	/* a dying engine's frames stay so, and go with the rest that it holds */
	if (!err) {
		free_frames(fw);
		pool_feed(fw->pool);
	}
	free(fw);
}

static void nobody_told(void *arg)
{
}

/* They are to be freed after @after; or that is now, and nobody has them yet. */
static void free_begin(struct mm_engine *e, struct free_wait *fw,
		       uint64_t after, void (*taken)(void *arg), void *arg)
{
	struct mm_pool *p = fw->pool;
	uint32_t i;

	if (after <= e->step && !engine_usable(e)) {
		free_frames(fw);
		taken(arg);
		pool_feed(p);
		free(fw);
		return;
	}
	for (i = 0; after > e->step && i < fw->n; i++) {
		frame_freed(p, fw->frame[i], after);
		mm_point();
	}
	taken(arg);
	step_wait_add(e, &fw->sw, after);
}

int mm_free_told(struct mm_win *w, const uint32_t *frame, uint32_t n,
		 uint64_t after, void (*taken)(void *arg), void *arg)
{
	struct mm_pool *p = w->pool;
	struct free_wait *fw;
	uint32_t i;

	fw = malloc(sizeof(*fw) + (size_t)n * sizeof(fw->frame[0]));
	if (!fw)
		return -ENOMEM;
	fw->sw.fn = free_step;
	fw->pool = p;
	for (i = 0; i < n; i++) {
		if (frame[i] >= p->max_frames || !may_free(w, frame[i]))
			goto out_undo;
		p->meta[frame[i]].flags |= FMETA_FREE;
		fw->frame[i] = frame[i];
	}
	fw->n = n;
	free_begin(w->engine, fw, after, taken, arg);
	return 0;

out_undo:
	while (i--)
		p->meta[frame[i]].flags &= ~FMETA_FREE;
	free(fw);
	return -EINVAL;
}

int mm_free(struct mm_win *w, const uint32_t *frame, uint32_t n, uint64_t after)
{
	return mm_free_told(w, frame, n, after, nobody_told, NULL);
}
