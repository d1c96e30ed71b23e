/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory for pages, made ready before they come.
 *
 * After a restart there are a million pages at once, and near to half of the time
 * that they take goes to the kernel, which zeroes memory at the first touch. How
 * many will come is known before the first of them does: a node has still to read
 * its journal, or the other frames are to be looked at. So a worker touches the
 * memory meanwhile, from its beginning on; nothing depends on how far it gets.
 * What nobody used in the end is given back.
 */
#include <stdatomic.h>
#include <sys/mman.h>

#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ	22	/* Linux 5.14 */
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE	23	/* Linux 5.14 */
#endif

#define STEP	((size_t)2 << 20)
#define AHEAD_MIN	(UINT64_C(16) << 10)	/* fewer are as well made as they come */

void ahead_map(const void *mem, size_t len, bool write)
{
	uintptr_t from = round_down((uintptr_t)mem, NODE_ALIGN);
	uintptr_t to = round_up((uintptr_t)mem + len, NODE_ALIGN);

	/* if it cannot be done they come by themselves */
	(void)madvise((void *)from, to - from, write ? MADV_POPULATE_WRITE :
						       MADV_POPULATE_READ);
}

static void touch_fn(struct work *w)
{
	struct mm_ahead *a = container_of(w, struct mm_ahead, work);

	size_t left = a->a_job;

	/* relaxed: it decides nothing but when to stop */
	while (left && a->from < a->to &&
	       !atomic_load_explicit(&a->stop, memory_order_relaxed)) {
		size_t n = min((size_t)(a->to - a->from), min(left, STEP));

		if (madvise(a->from, n, MADV_POPULATE_WRITE)) {
			a->to = a->from;	/* it comes by itself, later */
			break;
		}
		a->from += n;
		left -= n;
	}
}

static void touch_on(struct mm_ahead *a)
{
	a->running = true;
	a->mm->nr_jobs++;
	work_submit(a->mm->o.pool, &a->work);
}

static void touch_done(struct work *w)
{
	struct mm_ahead *a = container_of(w, struct mm_ahead, work);

	a->running = false;
	a->mm->nr_jobs--;
	if (atomic_load_explicit(&a->stop, memory_order_relaxed)) {
		slabs_trim(a->slabs);
		return;
	}
	/* what was overtaken is there */
	if (a->slabs->at > a->from && a->slabs->at < a->to)
		a->from = (char *)round_down((uintptr_t)a->slabs->at,
					     NODE_ALIGN);
	if (a->from < a->to)
		touch_on(a);
}

void ahead_begin(struct mm *mm, struct mm_ahead *a, struct slabs *s,
		 uint64_t nr, size_t a_job)
{
	if (a->running || !mm->o.pool || nr < AHEAD_MIN ||
	    !slabs_reserve(s, nr))
		return;
	a->mm = mm;
	a->slabs = s;
	a->from = (char *)round_down((uintptr_t)s->at, NODE_ALIGN);
	a->to = (char *)round_down((uintptr_t)s->at + nr * s->size, NODE_ALIGN);
	atomic_store_explicit(&a->stop, false, memory_order_relaxed);
	a->a_job = a_job;
	a->work = (struct work){
		.fn = touch_fn, .done = touch_done, .bulk = true,
	};
	touch_on(a);
}

static void ahead_end(struct mm_ahead *a)
{
	if (!a->mm)
		return;
	atomic_store_explicit(&a->stop, true, memory_order_relaxed);
	if (!a->running)
		slabs_trim(a->slabs);
	else if (work_cancel(a->mm->o.pool, &a->work))
		touch_done(&a->work);
}

void aheads_end(struct mm *mm)
{
	ahead_end(&mm->pages_ahead);
	ahead_end(&mm->copies_ahead);
}
