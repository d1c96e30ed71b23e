/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Submissions. The tail is read once and must lie within the ring; an entry is
 * copied once, then judged; an array in the arena is copied once into the
 * server's scratch, then judged. What cannot be the work of libkvmm - an
 * unknown operation, an array out of bounds, a tail further than the ring is
 * long - ends the connection. What can be a race or a mistake of the engine (a
 * window that was just closed) is an -errno of the operation.
 */
#include <errno.h>
#include <string.h>

#include "daemon/server/ring.h"

#define ROUND_ENTRIES	64	/* entries of one client a round */
#define ROUND_PAGES	8192	/* pages of one client a round */
#define OPS_A_PAGE	16	/* operations passed over in a page's time; a guess */
#define MAX_OPS		LEDGER_SQ_ENTRIES
#define MAX_PAGES	(1u << 16) /* submitted and not complete */
#define MAX_BACKLOG	LEDGER_CQ_ENTRIES

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
	 * Neither to be lost nor done twice, whenever we die: then the frames
	 * may be somebody else's. So the entry is taken in the middle of it.
	 */
	if (w && mm_free_told(w, (const void *)ss->server->scratch, e->n,
			      e->after, entries_taken, ss) == -EINVAL)
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
	/* it has heard its welcome: from here on what goes on is ours */
	ss->adopted &= !done;
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
