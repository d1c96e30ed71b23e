/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What was posted to a daemon, and not taken when its connection or it ended.
 *
 * Nobody waits for an answer any more; but frames that were given back would be
 * with their client until it exits. A dead daemon may have freed some of the
 * first entry's (do_free()): so it is gone through when that client is adopted,
 * before any frame is handed out, and what came later when it comes again.
 */
#include <errno.h>
#include <string.h>

#include "daemon/server/ring.h"

/* Frames that may turn out not to be its own: one entry's, and a guess. */
#define MAX_STRANGE	(2 * KVMM_MAX_BATCH)


/*
 * All at once, if nobody has begun with them; else one by one. Returns how many
 * were not its own.
 */
static uint32_t resume_free(struct session *ss, const struct ring_sqe *e)
{
	uint32_t off = e->arena_pos % LEDGER_ARENA_BYTES, i, strange = 0;
	uint32_t *frame = (void *)ss->server->scratch;
	struct mm_win *w = entry_win(ss, e);

	if (!w || !e->n || e->n > KVMM_MAX_BATCH ||
	    LEDGER_ARENA_BYTES - off < e->n * sizeof(*frame))
		return 0;
	memcpy(frame, ss->ring.arena + off, e->n * sizeof(*frame));
	if (mm_free_told(w, frame, e->n, e->after, entries_taken, ss) !=
	    -EINVAL)
		return 0;
	entries_taken(ss);
	for (i = 0; i < e->n; i++)
		strange += mm_free(w, frame + i, 1, e->after) == -EINVAL;
	return strange;
}

int ring_resume(struct session *ss)
{
	struct ring *r = &ss->ring;
	uint32_t pending = ring_pending(&r->ledger->sq, r->sq_head);
	uint32_t strange = 0;

	/* the client has taken more since it was adopted */
	r->cq_head = r->cq_seen = atomic_load_explicit(&r->ledger->cq.head,
						       memory_order_acquire);
	if (pending > LEDGER_SQ_ENTRIES ||
	    r->cq_tail - r->cq_head > LEDGER_CQ_ENTRIES)
		return -EPROTO;
	for (; pending && strange <= MAX_STRANGE; pending--) {
		struct ring_sqe e;

		entry_copy(&e, &r->sq[r->sq_head++ & (LEDGER_SQ_ENTRIES - 1)]);
		if (e.op == RING_FREE)
			strange += resume_free(ss, &e);
		entries_taken(ss);
	}
	return strange <= MAX_STRANGE ? 0 : -EPROTO;
}
