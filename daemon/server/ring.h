/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of the rings: an entry, and whose it is. */
#ifndef KVMM_SERVER_RING_H
#define KVMM_SERVER_RING_H

#include <string.h>

#include "daemon/server/server.h"

/* Entries in the client's memory are read here and nowhere else. */
static inline void entry_copy(struct ring_sqe *to, const struct ring_sqe *from)
{
	memcpy(to, from, sizeof(*to));
	/* so that no later use of @to can become a second look at @from */
	__asm__ volatile("" : : "r"(to) : "memory");
}

static inline struct mm_win *entry_win(struct session *ss,
				      const struct ring_sqe *e)
{
	return e->win < SESSION_MAX_WINS ? ss->win[e->win] : NULL;
}

/* What was taken so far need not be taken again, whenever we die. */
static inline void entries_taken(void *arg)
{
	struct session *ss = arg;

	/* release, as in ring_poll(): the client may write there again */
	atomic_store_explicit(&ss->ring.ledger->sq.head, ss->ring.sq_head,
			      memory_order_release);
}

#endif
