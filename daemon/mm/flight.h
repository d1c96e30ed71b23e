/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between fetch.c, which answers operations, and flight.c, which brings pages.
 */
#ifndef KVMM_DAEMON_MM_FLIGHT_H
#define KVMM_DAEMON_MM_FLIGHT_H

#include "daemon/mm/tier.h"

/**
 * struct flight_wait - somebody waits for a page
 * @link:	in the flight's waiters
 * @fl:		NULL: not any more
 */
struct flight_wait {
	struct list	link;
	struct flight	*fl;
};

/**
 * flight_begin() - bring @pg to @p's node for @w
 * @deadline_ns: when @w leaves at the latest
 * @more:	pages, this one included, that will be asked for in a row
 *
 * May be answered (fetch_answer()) before it returns.
 * Return: 0; -ENOENT (there is nothing to bring it from), -EAGAIN (no frame, and
 * none to wait for): @w waits for nothing.
 */
int flight_begin(struct flight_wait *w, struct page *pg, struct mm_pool *p,
		 uint64_t deadline_ns, uint32_t more);
/* Wait, too; somebody waits now for what may have been left to arrive cold. */
void flight_join(struct flight_wait *w, struct flight *fl,
		 uint64_t deadline_ns);
/* Does it wait for a frame? */
bool flight_waits(const struct flight_wait *w);
/* Returns the page if it is there by now: as after a publish, see flight.c. */
struct page *flight_leave(struct flight_wait *w);
/* Waits for frames whose time is over. */
uint64_t flights_run(struct mm *mm, uint64_t now);
/* Take back what has not been started. */
void flights_stop(struct mm *mm);

/* fetch.c: @pg is READY, or NULL and @err says why. */
void fetch_answer(struct flight_wait *w, struct page *pg, int err);

#endif
