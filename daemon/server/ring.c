/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's side of a client's rings.
 *
 * Submissions. The ledger is the client's to write, at any time, with any
 * bytes. So: the tail is read once and must lie within the ring; an entry is
 * copied once, then judged; an array in the arena is copied once into the
 * server's scratch, then judged. What cannot be the work of libkvmm - an
 * unknown operation, an array out of bounds, a tail further than the ring is
 * long - ends the connection. What can be a race or a mistake of the engine (a
 * window that was just closed) is an -errno of the operation.
 *
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
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"

#define ROUND_ENTRIES	64	/* entries of one client a round */
#define ROUND_PAGES	8192	/* pages of one client a round */
#define OPS_A_PAGE	16	/* operations passed over in a page's time; a guess */
#define MAX_OPS		LEDGER_SQ_ENTRIES
#define MAX_PAGES	(1u << 16) /* submitted and not complete */
#define MAX_BACKLOG	LEDGER_CQ_ENTRIES
#define GAP_MIN_NS	(100 * NSEC_PER_USEC)
#define GAP_MAX_NS	(20 * NSEC_PER_MSEC)

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

/* -- completions ------------------------------------------------------------------- */

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

/* -- submissions ------------------------------------------------------------------- */

bool ring_blocked(const struct session *ss)
{
	const struct ring *r = &ss->ring;

	return r->backlog_slots > MAX_BACKLOG || r->ops >= MAX_OPS ||
	       r->pages >= MAX_PAGES || ss->doom || ss->over;
}

/* Bytes of an array's element; 0: the operation has no array. */
static const struct {
	uint32_t	bytes;
	uint32_t	max;
	bool		may_lack;
} op_array[RING_NR_OPS] = {
	[RING_PUBLISH]	= { sizeof(struct ring_pub), KVMM_MAX_BATCH },
	[RING_FETCH]	= { sizeof(struct ring_key), KVMM_MAX_BATCH },
	[RING_FREE]	= { sizeof(uint32_t), KVMM_MAX_BATCH },
	[RING_REPORT]	= { sizeof(struct ring_key), 1 },
	[RING_END]	= { sizeof(struct ring_key), KVMM_MAX_BATCH, true },
	[RING_FORK]	= { sizeof(struct ring_fork), KVMM_MAX_GROUPS },
};

/* Elements of an entry's array. */
static uint32_t entry_elems(const struct ring_sqe *e)
{
	return e->op == RING_END ? e->nr_keys : e->n;
}

/*
 * What an entry costs, in pages that are looked at, if all that it says is
 * true. That is not always in its array: an end walks the parents of its tail,
 * a refill looks for frames to reclaim, a cancel for its operation.
 */
static uint64_t entry_pages(const struct session *ss, const struct ring_sqe *e)
{
	switch (e->op) {
	case RING_END:
		return (uint64_t)e->nr_keys +
		       (e->frame ? min(e->n, MM_TOUCH_MAX) : 0);
	case RING_PUBLISH:
	case RING_FETCH:
	case RING_REFILL:
	case RING_FREE:
	case RING_FORK:
		return e->n;
	case RING_CANCEL:
		return ss->ring.ops / OPS_A_PAGE;
	default:
		return 1;
	}
}

/*
 * Copy the entry's array out of the arena, and take the arena's part as
 * consumed. The array lies in [arena_head, arena_head + arena_len), and does
 * not wrap.
 */
static bool array_copy(struct session *ss, const struct ring_sqe *e)
{
	struct ring *r = &ss->ring;
	uint32_t skip = e->arena_pos - (uint32_t)r->arena_head;
	uint32_t off = e->arena_pos % LEDGER_ARENA_BYTES;
	uint32_t n = entry_elems(e), bytes;

	if (e->arena_len > LEDGER_ARENA_BYTES)
		return false;
	if (op_array[e->op].bytes && (n || !op_array[e->op].may_lack)) {
		if (!n || n > op_array[e->op].max)
			return false;
		bytes = n * op_array[e->op].bytes;
		if (skip > e->arena_len || e->arena_len - skip < bytes ||
		    LEDGER_ARENA_BYTES - off < bytes)
			return false;
		memcpy(ss->server->scratch, r->arena + off, bytes);
	}
	r->arena_head += e->arena_len;
	return true;
}

static void answer_err(struct session *ss, const struct ring_sqe *e, int err)
{
	const struct ring_cqe cqe = {
		.op	= e->op,
		.result	= err,
		.tag	= e->tag,
	};

	ring_complete(ss, NULL, &cqe, NULL);
}

static struct mm_win *entry_win(struct session *ss, const struct ring_sqe *e)
{
	return e->win < SESSION_MAX_WINS ? ss->win[e->win] : NULL;
}

/* An operation on pages: may it be handed to mm? */
static int pages_judge(struct session *ss, const struct ring_sqe *e,
		       const struct mm_win *w)
{
	if (!w || mm_space_ix(mm_win_space(w)) != e->space)
		return -EINVAL;
	if (e->op == RING_PUBLISH && mm_win_rights(w) != KVMM_RW)
		return -EACCES;
	if (ss->via->requests >= ss->server->cfg.max_requests)
		return -EAGAIN;
	return 0;
}

/* Before it is handed to mm, which may answer at once. */
static void op_counted(struct session *ss, const struct ring_sqe *e)
{
	ss->ring.ops++;
	ss->ring.pages += e->n;
	ss->via->requests++;
}

static void do_pages(struct session *ss, const struct ring_sqe *e)
{
	struct mm_win *w = entry_win(ss, e);
	int err = pages_judge(ss, e, w);

	if (err) {
		answer_err(ss, e, err);
		return;
	}
	op_counted(ss, e);
	if (e->op == RING_PUBLISH)
		mm_publish(w, e, (const void *)ss->server->scratch);
	else
		mm_fetch(w, e, (const void *)ss->server->scratch);
}

/* mm judges it: it names a window for each of its frames. */
static void do_fork(struct session *ss, const struct ring_sqe *e)
{
	if (ss->via->requests >= ss->server->cfg.max_requests) {
		answer_err(ss, e, -EAGAIN);
		return;
	}
	op_counted(ss, e);
	mm_fork(ss->mc, e, (const void *)ss->server->scratch);
}

static void do_refill(struct session *ss, const struct ring_sqe *e)
{
	struct mm_win *w = entry_win(ss, e);

	if (!e->n || e->n > KVMM_MAX_FRAMES)
		session_doom(ss, REJECT_SQE_ARRAY, "a refill of %u frames",
			     e->n);
	else if (w && mm_win_rights(w) == KVMM_RW)
		mm_stock(w, e->n);
}

static void do_free(struct session *ss, const struct ring_sqe *e)
{
	struct mm_win *w = entry_win(ss, e);

	/*
	 * Not to be done twice, whenever we die: by then the frames may be
	 * somebody else's. release, as in ring_poll(); the array was copied.
	 */
	atomic_store_explicit(&ss->ring.ledger->sq.head, ss->ring.sq_head,
			      memory_order_release);
	if (w && mm_free(w, (const void *)ss->server->scratch, e->n,
			 e->after) == -EINVAL)
		session_doom(ss, REJECT_SQE_FRAME,
			     "freed a frame that it does not own");
}

static uint64_t do_report(struct session *ss, const struct ring_sqe *e)
{
	struct mm_space *sp = mm_space_get(ss->server->mm, e->space);

	if (!sp || !mm_space_attached(sp, ss->mc))
		return 0;
	return mm_report(ss->mc, sp, (const void *)ss->server->scratch,
			 e->arg);
}

/* A detach is no lie, so a space that is gone gets no answer. */
static void do_end(struct session *ss, const struct ring_sqe *e)
{
	struct mm_space *sp = e->nr_keys ?
			      mm_space_get(ss->server->mm, e->space) : NULL;
	struct mm_win *w = entry_win(ss, e);

	if (sp && mm_space_attached(sp, ss->mc) &&
	    mm_asked(sp, e, (const void *)ss->server->scratch)) {
		session_doom(ss, REJECT_SQE_KEY,
			     "asked for keys of a group that space %u does not have",
			     e->space);
		return;
	}
	if (w)
		mm_touch(w, e);
}

/*
 * One entry, which is the daemon's own copy. Returns what it cost, in pages, that
 * entry_pages() could not know: a report names one page, and takes what hangs
 * on it.
 */
static uint64_t ring_take(struct session *ss, const struct ring_sqe *e)
{
	uint64_t pages = 0;

	if (e->op >= RING_NR_OPS) {
		session_doom(ss, REJECT_SQE_OP, "operation %u does not exist",
			     e->op);
		return 0;
	}
	if (!array_copy(ss, e)) {
		session_doom(ss, REJECT_SQE_ARRAY,
			     "operation %u: %u elements at %u + %u do not lie in the arena",
			     e->op, entry_elems(e), e->arena_pos, e->arena_len);
		return 0;
	}
	if (e->op != RING_NOP)
		ss->server->dirty = true;
	switch ((enum ring_op)e->op) {
	case RING_NOP:
		answer_err(ss, e, 0);
		break;
	case RING_PUBLISH:
	case RING_FETCH:
		do_pages(ss, e);
		break;
	case RING_REFILL:
		do_refill(ss, e);
		break;
	case RING_FREE:
		do_free(ss, e);
		break;
	case RING_END:
		do_end(ss, e);
		break;
	case RING_CANCEL:
		mm_cancel(ss->mc, e->arg);
		break;
	case RING_REPORT:
		pages = do_report(ss, e);
		break;
	case RING_FORK:
		do_fork(ss, e);
		break;
	case RING_NR_OPS:
		break;
	}
	return pages;
}

/* The client's memory is read here and nowhere else. */
static void entry_copy(struct ring_sqe *to, const struct ring_sqe *from)
{
	memcpy(to, from, sizeof(*to));
	/* so that no later use of @to can become a second look at @from */
	__asm__ volatile("" : : "r"(to) : "memory");
}

/* Entries that were posted and not taken; none of who lies about them. */
static uint32_t sq_pending(struct session *ss)
{
	struct ring *r = &ss->ring;
	uint32_t pending = ring_pending(&r->ledger->sq, r->sq_head);

	if (pending <= LEDGER_SQ_ENTRIES)
		return pending;
	session_doom(ss, REJECT_SQ_TAIL,
		     "submission tail is %u entries ahead of a ring of %u",
		     pending, LEDGER_SQ_ENTRIES);
	return 0;
}

unsigned int ring_poll(struct session *ss)
{
	struct ring *r = &ss->ring;
	uint64_t arena = r->arena_head;
	uint32_t pending, done;
	uint64_t pages = 0;

	if (ring_blocked(ss))
		return 0;
	pending = min(sq_pending(ss), (uint32_t)ROUND_ENTRIES);
	for (done = 0; done < pending && pages < ROUND_PAGES; done++) {
		struct ring_sqe e;

		if (ring_blocked(ss))
			break;
		entry_copy(&e, &r->sq[r->sq_head++ & (LEDGER_SQ_ENTRIES - 1)]);
		pages += entry_pages(ss, &e);
		pages += ring_take(ss, &e);
	}
	r->submissions += done;
	/* release: the client may write there again once it sees these */
	if (r->arena_head != arena)
		atomic_store_explicit(&r->ledger->arena_head, r->arena_head,
				      memory_order_release);
	atomic_store_explicit(&r->ledger->sq.head, r->sq_head,
			      memory_order_release);
	if (ss->watch_ix >= 0)
		ss->server->watch[ss->watch_ix].head = r->sq_head;
	if (r->marked && !ss->doom && (int32_t)(r->sq_head - r->mark) >= 0)
		session_late(ss);
	return done;
}

/* -- what was posted to the last daemon ------------------------------------------ */

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

bool ring_mark(struct session *ss)
{
	struct ring *r = &ss->ring;
	uint32_t pending = sq_pending(ss);

	/* what is posted from now on has no claim to be waited for */
	r->mark = r->sq_head + pending;
	r->marked = pending != 0;
	return r->marked;
}

void ring_completed(struct session *ss, const struct ring_cqe *cqe)
{
	struct ring *r = &ss->ring;

	if (!r->ops)
		return;
	r->ops--;
	ss->via->requests--;
	/*
	 * An operation refused as a whole does not say how many pages it had:
	 * what is left over goes when nothing is in flight, which is where a
	 * blocked client gets to.
	 */
	r->pages -= r->ops ? min(r->pages, cqe->n) : r->pages;
}
