/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Completions. What does not fit waits in a private backlog. While that is
 * long, or while very much is in flight, no further submission is taken: a
 * client that does not read its answers stops itself and nobody else.
 *
 * Hand-overs. A frame named in a completion carries a reference; the client
 * pins the frame and then advances the completion head. Nobody rings for that,
 * so the loop looks at the head of whoever holds references (ring_reap()),
 * less and less often if it does not move: a stopped client costs 50 looks a
 * second.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"

#define GAP_MIN_NS	(100 * NSEC_PER_USEC)
#define GAP_MAX_NS	(20 * NSEC_PER_MSEC)

/**
 * struct answer - a completion that waits for room, or whose frames still
 * carry references
 * @win:	whose frames they are; NULL when nothing is referenced
 * @end:	completion head at which the references end
 */
struct answer {
	struct list	link;
	struct mm_win	*win;
	uint32_t	end;
	struct ring_cqe	cqe;
	struct ring_result res[];
};

static uint32_t answer_slots(uint32_t n)
{
	return 1 + ring_result_slots(n);
}

static bool holds(const struct ring *r)
{
	return !list_empty(&r->held) || !list_empty(&r->backlog);
}

/* Keep the server's count of sessions that have to be looked at. */
static void held_count(struct session *ss, bool before)
{
	struct ring *r = &ss->ring;

	if (holds(r) == before)
		return;
	if (before) {
		ss->server->nr_held--;
		return;
	}
	ss->server->nr_held++;
	r->poll_gap = GAP_MIN_NS;
	r->poll_due = 0;
}

static void answer_put_refs(struct answer *a)
{
	uint32_t i;

	for (i = 0; a->win && i < a->cqe.n; i++)
		if (a->res[i].frame)
			mm_handover_put(a->win, a->res[i].frame);
	a->win = NULL;
}

static void answer_free(struct answer *a)
{
	list_del(&a->link);
	answer_put_refs(a);
	free(a);
}

/*
 * Room for @n slots? The head that was last seen will do nearly always; the
 * client's own is on a line that it has just written.
 */
static bool ring_room(struct ring *r, uint32_t n)
{
	uint32_t head;

	if (LEDGER_CQ_ENTRIES - (r->cq_tail - r->cq_seen) >= n)
		return true;
	/* acquire: pairs with the client's release: it has read those slots */
	head = atomic_load_explicit(&r->ledger->cq.head, memory_order_acquire);
	if (r->cq_tail - head > LEDGER_CQ_ENTRIES)
		return false;		/* a lie, see ring_reap() */
	r->cq_seen = head;
	return LEDGER_CQ_ENTRIES - (r->cq_tail - head) >= n;
}

/* Into the ring: head and results first, then the tail, all at once. */
static void ring_place(struct ring *r, const struct ring_cqe *cqe,
		       const struct ring_result *res)
{
	uint32_t mask = LEDGER_CQ_ENTRIES - 1;
	uint32_t pos = r->cq_tail, left;

	memcpy(&r->cq[pos++ & mask], cqe, sizeof(*cqe));
	for (left = cqe->n; left; ) {
		uint32_t k = min(left, (uint32_t)RING_RESULTS);

		memcpy(&r->cq[pos++ & mask], res, k * sizeof(*res));
		res += k;
		left -= k;
	}
	r->cq_tail = pos;
	r->completions++;
	/* seq_cst: pairs with the client's load of tail after armed = 1 */
	atomic_store_explicit(&r->ledger->cq.tail, pos, memory_order_seq_cst);
}

void ring_kick(struct session *ss)
{
	_Atomic uint32_t *armed = &ss->ring.ledger->cq.armed;

	/* seq_cst: pairs with the client's armed = 1 before its load of tail */
	if (atomic_load_explicit(armed, memory_order_seq_cst) != 1)
		return;
	ss->ring.wakes++;
	if (guard_wake(ss->notify_fd)) {
		session_doom(ss, REJECT_NOTIFY, "a write to its eventfd blocks");
		return;
	}
	/*
	 * seq_cst as above; and after the write, since a client that sees 2
	 * drains the count and arms again: a write that came later would keep
	 * its fd readable until the next completion.
	 */
	atomic_store_explicit(armed, 2, memory_order_seq_cst);
}

static bool has_frames(const struct ring_cqe *cqe, const struct ring_result *res)
{
	uint32_t i;

	for (i = 0; i < cqe->n; i++)
		if (res[i].frame)
			return true;
	return false;
}

static struct answer *answer_new(struct mm_win *win, const struct ring_cqe *cqe,
				 const struct ring_result *res)
{
	struct answer *a = malloc(sizeof(*a) + cqe->n * sizeof(*res));

	if (!a)
		return NULL;
	list_init(&a->link);
	a->win = win;
	a->end = 0;
	a->cqe = *cqe;
	if (cqe->n)
		memcpy(a->res, res, cqe->n * sizeof(*res));
	return a;
}

/* Nobody is there to take them. */
static void drop_refs(struct mm_win *win, const struct ring_cqe *cqe,
		      const struct ring_result *res)
{
	uint32_t i;

	for (i = 0; win && i < cqe->n; i++)
		if (res[i].frame)
			mm_handover_put(win, res[i].frame);
}

void ring_complete(struct session *ss, struct mm_win *win,
		   const struct ring_cqe *cqe, const struct ring_result *res)
{
	struct ring *r = &ss->ring;
	uint32_t slots = answer_slots(cqe->n);
	bool before = holds(r), refs = win && has_frames(cqe, res);
	struct answer *a = NULL;
	bool room;

	if (ss->state != SESSION_LIVE) {
		drop_refs(win, cqe, res);
		return;
	}
	room = list_empty(&r->backlog) && ring_room(r, slots);
	if (refs || !room) {
		a = answer_new(refs ? win : NULL, cqe, res);
		if (!a) {
			drop_refs(win, cqe, res);
			session_doom(ss, REJECT_NOMEM,
				     "no memory for a completion");
			return;
		}
	}
	if (room) {
		ring_place(r, cqe, res);
		if (a) {
			a->end = r->cq_tail;
			list_add_tail(&r->held, &a->link);
		}
		ring_kick(ss);
	} else {
		list_add_tail(&r->backlog, &a->link);
		r->backlog_slots += slots;
	}
	held_count(ss, before);
}

/* What waits goes into the ring as far as there is room. */
static bool backlog_flush(struct ring *r)
{
	bool any = false;
	struct answer *a;

	while ((a = list_first(&r->backlog, struct answer, link))) {
		uint32_t slots = answer_slots(a->cqe.n);

		if (!ring_room(r, slots))
			break;
		ring_place(r, &a->cqe, a->res);
		r->backlog_slots -= slots;
		a->end = r->cq_tail;
		list_move_tail(&r->held, &a->link);
		any = true;
	}
	return any;
}

void ring_reap(struct session *ss, uint64_t now_ns)
{
	struct ring *r = &ss->ring;
	bool before = holds(r), moved;
	struct answer *a;
	uint32_t head;

	/* acquire: pairs with the client's release of head, after its pins */
	head = atomic_load_explicit(&r->ledger->cq.head, memory_order_acquire);
	if (r->cq_tail - head > r->cq_tail - r->cq_head) {
		session_doom(ss, REJECT_CQ_HEAD,
			     "completion head %u is not between %u and %u",
			     head, r->cq_head, r->cq_tail);
		return;
	}
	moved = head != r->cq_head;
	r->cq_head = head;
	while ((a = list_first(&r->held, struct answer, link)) &&
	       (int32_t)(head - a->end) >= 0)
		answer_free(a);
	if (backlog_flush(r)) {
		ring_kick(ss);
		moved = true;
	}
	r->poll_gap = moved ? GAP_MIN_NS : min(2 * r->poll_gap, GAP_MAX_NS);
	r->poll_due = now_ns + r->poll_gap;
	held_count(ss, before);
}

void ring_win_closed(struct session *ss, struct mm_win *win)
{
	struct ring *r = &ss->ring;
	struct answer *a;
	uint32_t i;

	list_for_each_entry(a, &r->held, link)
		if (a->win == win)
			answer_put_refs(a);
	list_for_each_entry(a, &r->backlog, link) {
		if (a->win != win)
			continue;
		answer_put_refs(a);
		/* not told yet: never tell what is not referenced */
		for (i = 0; i < a->cqe.n; i++)
			a->res[i] = (struct ring_result){ .result = -ECANCELED };
	}
}

void ring_fini(struct session *ss)
{
	struct ring *r = &ss->ring;
	bool before = holds(r);
	struct answer *a;

	while ((a = list_first(&r->held, struct answer, link)))
		answer_free(a);
	while ((a = list_first(&r->backlog, struct answer, link)))
		answer_free(a);
	r->backlog_slots = 0;
	held_count(ss, before);
	ss->via->requests -= r->ops;
	r->ops = 0;
	r->pages = 0;
}
