/* SPDX-License-Identifier: Apache-2.0 */
/* What was posted to a daemon, and not taken when its connection or it ended. */
#include <errno.h>
#include <string.h>

#include "daemon/server/ring.h"

/* One by one: some of them it may have had its hands on. */
static void resume_free(struct session *ss, const struct ring_sqe *e)
{
	uint32_t off = e->arena_pos % LEDGER_ARENA_BYTES, i, f;
	struct mm_win *w = entry_win(ss, e);

	if (!w || !e->n || e->n > KVMM_MAX_BATCH ||
	    LEDGER_ARENA_BYTES - off < e->n * sizeof(f))
		return;
	for (i = 0; i < e->n; i++) {
		memcpy(&f, ss->ring.arena + off + i * sizeof(f), sizeof(f));
		mm_free(w, &f, 1, e->after);
	}
}

int ring_resume(struct session *ss)
{
	struct ring *r = &ss->ring;
	uint32_t pending = ring_pending(&r->ledger->sq, r->sq_head);

	/* the client has taken more since it was adopted */
	r->cq_head = r->cq_seen = atomic_load_explicit(&r->ledger->cq.head,
						       memory_order_acquire);
	if (pending > LEDGER_SQ_ENTRIES ||
	    r->cq_tail - r->cq_head > LEDGER_CQ_ENTRIES)
		return -EPROTO;
	for (; pending; pending--) {
		struct ring_sqe e;

		entry_copy(&e, &r->sq[r->sq_head++ & (LEDGER_SQ_ENTRIES - 1)]);
		atomic_store_explicit(&r->ledger->sq.head, r->sq_head,
				      memory_order_release);
		if (e.op == RING_FREE)
			resume_free(ss, &e);
	}
	return 0;
}
