/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who pins more than it may.
 *
 * Pins are counters that clients write; nothing stops one from pinning all there
 * is. So when frames are short the distinct pinned frames of each engine are
 * counted, a part of a pool at a time, and an engine over the limit is cut off:
 * its pins are void at once, so only it can suffer.
 *
 * Frames are short when somebody waits for some, and when a load has found none
 * since the last count: where all is pinned it is refused at once and does not
 * wait, so that whoever counts later sees nobody who suffers.
 *
 * The limit is there for others. An engine whose KV tensor is this memory pins
 * nearly all of it as a matter of course, and waits for more: as long as nobody
 * else does it is told -EAGAIN, and preempts. Nor is one cut off for what it has
 * reserved.
 */
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define PIN_COUNT_NS	NSEC_PER_SEC	/* between two counts of a pool */
#define PIN_COUNT_LOADS	65536u		/* of pins, in one call */

static void pins_reset(struct mm_pool *p)
{
	struct mm_win *w;

	list_for_each_entry(w, &p->windows, pool_link)
		w->engine->scan_pinned = 0;
}

/* Distinct frames of an extent that each engine pins; its windows are adjacent. */
static uint32_t pins_count_extent(struct mm_pool *p, uint32_t no)
{
	uint32_t f = no * p->per_extent, end = f + p->per_extent, loads = 0;

	for (; f < end; f++) {
		struct mm_engine *seen = NULL;
		struct mm_win *w;

		list_for_each_entry(w, &p->windows, pool_link) {
			if (w->engine == seen)
				continue;
			loads++;
			/* relaxed: a count, nothing is reclaimed by it */
			if (!atomic_load_explicit(&w->pins[f],
						  memory_order_relaxed))
				continue;
			seen = w->engine;
			seen->scan_pinned++;
		}
	}
	return loads;
}

void pool_starves(struct mm_pool *p, const struct mm_engine *e)
{
	if (!p->starved)
		p->starved = e->no;
	else if (p->starved != e->no)
		p->starved_more = true;
}

static void starved_reset(struct mm_pool *p)
{
	p->starved = 0;
	p->starved_more = false;
}

/* Does somebody of another engine lack frames here? */
static bool others_wait(const struct mm_pool *p, const struct mm_engine *e)
{
	const struct mm_win *w;

	list_for_each_entry(w, &p->refill_wait, refill_link)
		if (w->engine != e)
			return true;
	return p->starved_more || (p->starved && p->starved != e->no);
}

static uint64_t reserved_of(const struct mm_pool *p, const struct mm_engine *e)
{
	const struct mm_win *w;
	uint64_t sum = 0;

	list_for_each_entry(w, &p->windows, pool_link)
		if (w->engine == e)
			sum += w->reserved;
	return sum;
}

static bool pins_too_many(const struct mm_pool *p, const struct mm_engine *e)
{
	uint64_t limit = pool_most_frames(p) * e->mm->o.pin_limit_pct / 100;

	return e->scan_pinned > max(limit, reserved_of(p, e)) &&
	       others_wait(p, e);
}

static void pins_judge(struct mm_pool *p)
{
	struct mm_win *w;

again:
	list_for_each_entry(w, &p->windows, pool_link) {
		if (w->engine->evicted || !pins_too_many(p, w->engine))
			continue;
		engine_evict(w->engine, "more pinned frames than it may have");
		goto again;
	}
}

void pool_count_pins(struct mm_pool *p)
{
	struct mm *mm = p->space->mm;
	uint32_t loads = 0;

	if (!mm->o.pin_limit_pct || (mm->pin_pool && mm->pin_pool != p))
		return;
	if (!mm->pin_pool) {
		if ((!p->want && !p->starved) || mm->now_ns < p->pin_scan_ns)
			return;
		mm->pin_pool = p;
		p->pin_scan_at = 1;
		pins_reset(p);
	}
	for (; p->pin_scan_at <= p->max_extents; p->pin_scan_at++) {
		if (loads >= PIN_COUNT_LOADS)
			return;
		if (p->extent[p->pin_scan_at].ext)
			loads += pins_count_extent(p, p->pin_scan_at);
	}
	mm->pin_pool = NULL;
	p->pin_scan_at = 0;
	p->pin_scan_ns = mm->now_ns + PIN_COUNT_NS;
	pins_judge(p);
	starved_reset(p);
}
