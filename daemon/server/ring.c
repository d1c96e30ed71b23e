/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's side of a client's rings: the ledger that they lie in.
 *
 *	ring.c		the ledger, new or the last daemon's
 *	ring_sq.c	submissions
 *	ring_cq.c	completions, and the references that they carry
 *	ring_resume.c	what was posted to a daemon that did not take it
 *
 * The ledger is the client's to write, at any time, with any bytes. The cursors
 * that count are the daemon's own.
 */
#include <string.h>
#include <sys/random.h>

#include "daemon/server/server.h"

/* The layout of a base ledger; a client finds it from the offsets in it. */
#define SQ_OFF		4096u
#define CQ_OFF		(SQ_OFF + LEDGER_SQ_ENTRIES * sizeof(struct ring_sqe))
#define REQ_OFF		(CQ_OFF + LEDGER_CQ_ENTRIES * sizeof(struct ring_cqe))
#define ARENA_OFF	(REQ_OFF + LEDGER_REQ_SLOTS * sizeof(struct ledger_req))
#define AGREE_OFF	(ARENA_OFF + LEDGER_ARENA_BYTES)
#define TALK_OFF	(AGREE_OFF + \
			 LEDGER_AGREE_ENTRIES * sizeof(struct ledger_agree))
#define FROZEN_OFF	(TALK_OFF + sizeof(struct ledger_talk))
#define LEDGER_BYTES	((FROZEN_OFF + LEDGER_FROZEN_SIZE + 4095) & ~UINT64_C(4095))

static_assert(sizeof(struct ledger) <= SQ_OFF, "ledger layout");
static_assert(!(AGREE_OFF % 64) && !(TALK_OFF % 64) && !(FROZEN_OFF % 64),
	      "ledger layout");

uint64_t ring_bytes(void)
{
	return LEDGER_BYTES;
}

static void ring_map(struct session *ss)
{
	struct ring *r = &ss->ring;
	struct ledger *l = ss->ledger_shm.addr;

	r->ledger = l;
	r->sq = (void *)((char *)l + SQ_OFF);
	r->cq = (void *)((char *)l + CQ_OFF);
	r->arena = (uint8_t *)l + ARENA_OFF;
}

int ring_init(struct session *ss)
{
	struct ledger *l;
	int err;

	err = shm_create(&ss->ledger_shm, "kvmm-ledger", LEDGER_BYTES, 1);
	if (err)
		return err;
	l = ss->ledger_shm.addr;
	l->magic = KVMM_MAGIC_LEDGER;
	l->size = sizeof(*l);
	l->client = ss->no;
	l->sq_entries = LEDGER_SQ_ENTRIES;
	l->cq_entries = LEDGER_CQ_ENTRIES;
	l->sq_off = SQ_OFF;
	l->cq_off = CQ_OFF;
	l->arena_off = ARENA_OFF;
	l->arena_bytes = LEDGER_ARENA_BYTES;
	l->req_off = REQ_OFF;
	l->req_slots = LEDGER_REQ_SLOTS;
	l->agree_off = AGREE_OFF;
	l->talk_off = TALK_OFF;
	l->frozen_off = FROZEN_OFF;
	l->bytes = LEDGER_BYTES;
	if (getrandom(ss->secret, sizeof(ss->secret), 0) ==
	    sizeof(ss->secret))
		memcpy(l->secret, ss->secret, sizeof(l->secret));
	/* nobody else has it yet */
	atomic_store_explicit(&l->step_wanted, UINT64_MAX,
			      memory_order_relaxed);
	ring_map(ss);
	return 0;
}

/*
 * What was published of the cursors is where to go on. The client may have written
 * something else there: it finds its own rings in disorder then.
 */
void ring_adopt(struct session *ss)
{
	struct ring *r = &ss->ring;
	struct ledger *l;

	ring_map(ss);
	l = r->ledger;
	/* relaxed: whoever wrote them last is dead, or a liar */
	r->sq_head = atomic_load_explicit(&l->sq.head, memory_order_relaxed);
	r->cq_tail = atomic_load_explicit(&l->cq.tail, memory_order_relaxed);
	r->cq_head = atomic_load_explicit(&l->cq.head, memory_order_relaxed);
	r->cq_seen = r->cq_head;
	r->arena_head = atomic_load_explicit(&l->arena_head,
					     memory_order_relaxed);
	/* it may sleep until something is said */
	session_mail(ss);
}

const struct ledger_req *ring_requests(const struct session *ss)
{
	return (const void *)((const char *)ss->ring.ledger + REQ_OFF);
}
