/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmm_poll(): completions, deadlines, steps, the connection.
 *
 * Sleeping. The eventfd `notify` is in kvmm_fd()'s epoll. While this side is
 * awake it has a count, that is, kvmm_fd() is readable: a caller that sleeps on
 * it comes back at once, and one that spins makes no system call. To go to
 * sleep the count is drained, `armed` is set to 1 and the ring is looked at
 * once more; the daemon that posts a completion then sees 1, writes the eventfd
 * and makes it 2 (ipc/ring.h has the ordering), and this side is awake again.
 * Since that costs system calls on both sides, it is put off while an operation
 * is in flight and something moved in the last %LIB_SPIN_NS.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

/* -- completions --------------------------------------------------------------- */

#define CQ_SLOT		sizeof(struct ring_cqe)

/* The results behind slot @at: in the ring, or copied where they wrap. */
static const struct ring_result *results(struct kvmm *k, struct kvmm_era *e,
					 uint32_t at, uint32_t n)
{
	uint32_t entries = e->ledger->cq_entries;
	uint32_t first = at & (entries - 1), slots = ring_result_slots(n), part;

	if (first + slots <= entries)
		return (const struct ring_result *)(e->cq + first * CQ_SLOT);
	part = entries - first;
	memcpy(k->scratch, e->cq + first * CQ_SLOT, part * CQ_SLOT);
	memcpy((char *)k->scratch + part * CQ_SLOT, e->cq,
	       (slots - part) * CQ_SLOT);
	return k->scratch;
}

static void completed(struct kvmm *k, struct kvmm_era *e,
		      const struct ring_cqe *c, uint32_t at)
{
	unsigned int part;
	struct kvmm_job *op = kvmm_op_find(e, c->tag, &part);
	int err = c->result;

	if (!op)
		return;			/* late: it has had its answer */
	if (c->n == op->part[part].n) {
		kvmm_op_complete(op, part, err,
				 c->n ? results(k, e, at + 1, c->n) : NULL);
		return;
	}
	kvmm_op_complete(op, part, err < 0 ? err : -EPROTO, NULL);
}

bool kvmm_cq_run(struct kvmm *k, struct kvmm_era *e, unsigned int max)
{
	uint32_t entries = e->ledger->cq_entries, head = e->cq_head;
	uint32_t pending = ring_pending(&e->ledger->cq, head);
	bool sane = pending <= entries;

	while (sane && pending && k->nr_done < max) {
		struct ring_cqe c;
		uint32_t slots;

		memcpy(&c, e->cq + (head & (entries - 1)) * CQ_SLOT, sizeof(c));
		slots = 1 + ring_result_slots(c.n);
		sane = c.n <= KVMM_MAX_BATCH && slots <= pending;
		if (!sane)
			break;
		completed(k, e, &c, head);
		head += slots;
		pending -= slots;
	}
	if (head != e->cq_head) {
		e->cq_head = head;
		/* release: our pins are before the hand-over references go */
		atomic_store_explicit(&e->ledger->cq.head, head,
				      memory_order_release);
	}
	return sane;
}

/* -- sleeping ---------------------------------------------------------------------- */

static void woken(struct kvmm *k, struct kvmm_era *e)
{
	/* acquire is not needed: the ring's own tail orders its entries */
	if (!k->armed ||
	    atomic_load_explicit(&e->ledger->cq.armed, memory_order_relaxed) != 2)
		return;
	k->armed = false;
	k->fd_ready = true;
	atomic_store_explicit(&e->ledger->cq.armed, 0, memory_order_relaxed);
}

/* Did frames come for an allocation that was refused, before we were armed? */
static bool fed(struct kvmm *k, struct kvmm_era *e)
{
	struct kvmm_space *sp;

	/* seq_cst: after armed = 1; pairs with refuse() in frames.c */
	if (!atomic_load(&k->hungry) || k->calling)
		return false;
	list_for_each_entry(sp, &k->spaces, link) {
		struct kvmm_att *a = atomic_load_explicit(&sp->att,
						memory_order_relaxed);
		struct kvmm_view *v;

		for (v = a && a->era == e ? a->views : NULL; v; v = v->next)
			if (kvmm_view_fed(v))
				return true;
	}
	return false;
}

/*
 * Nothing was there: let the caller sleep. True when something has come in the
 * meantime, after all.
 */
static bool go_to_sleep(struct kvmm *k, struct kvmm_era *e, uint64_t now)
{
	uint64_t count;

	if (k->fd_ready) {
		if (atomic_load_explicit(&e->nr_ops, memory_order_relaxed) &&
		    now - k->busy_ns < LIB_SPIN_NS)
			return false;
		if (read(e->notify, &count, sizeof(count)) < 0 &&
		    errno != EAGAIN)
			return false;
		k->fd_ready = false;
	}
	if (!k->armed) {
		k->armed = true;
		/* seq_cst, as is the load of the tail: see ipc/ring.h */
		atomic_store(&e->ledger->cq.armed, 1);
	}
	if (fed(k, e)) {
		/* one turn awake, so that the caller tries again */
		atomic_store_explicit(&k->hungry, false, memory_order_relaxed);
		kvmm_kick(k);
	}
	return ring_pending(&e->ledger->cq, e->cq_head);
}

/* -- one turn ------------------------------------------------------------------------- */

static void free_told(struct kvmm *k)
{
	struct kvmm_job *op, *tmp;

	list_for_each_entry_safe(op, tmp, &k->told, link) {
		list_del(&op->link);
		kvmm_op_recycle(k, op);
	}
}

static void take_ready(struct kvmm *k)
{
	uint64_t count;
	struct kvmm_job *op, *tmp;

	if (!atomic_load_explicit(&k->kicked, memory_order_relaxed))
		return;
	/*
	 * acquire: pairs with kvmm_kick(); read first, so none gets lost. With
	 * nothing to read its write is still to come, and whoever finds kicked
	 * true then must read it, or the descriptor stays readable for ever.
	 */
	if (read(k->wake, &count, sizeof(count)) == sizeof(count))
		atomic_exchange_explicit(&k->kicked, false,
					 memory_order_acq_rel);
	else if (errno != EAGAIN)
		return;
	kvmm_lock(&k->ops_lock);
	list_for_each_entry_safe(op, tmp, &k->ready, link) {
		list_move_tail(&k->done, &op->link);
		k->nr_done++;
	}
	kvmm_unlock(&k->ops_lock);
}

static void note_activity(struct kvmm *k, struct kvmm_era *e, uint64_t now)
{
	uint32_t tail = atomic_load_explicit(&e->ledger->sq.tail,
					     memory_order_relaxed);

	if (tail != k->seen_tail)
		k->busy_ns = now;
	k->seen_tail = tail;
}

static unsigned int tell(struct kvmm *k, struct kvmm_done *done,
			 unsigned int max)
{
	unsigned int n = 0;

	while (n < max && !list_empty(&k->done)) {
		struct kvmm_job *op = list_first(&k->done, struct kvmm_job, link);

		op->done.res = op->res;
		done[n++] = op->done;
		list_move_tail(&k->told, &op->link);
		k->nr_done--;
	}
	return n;
}

/*
 * Does shared memory say that there is nothing on the socket: that the daemon
 * lives, and has sent nothing since it was read? A daemon that keeps no such
 * word (0) is asked by the socket, and so is one that has died, until that says
 * so, too.
 */
static bool socket_silent(const struct kvmm *k, const struct kvmm_era *e)
{
	/* relaxed: the kernel writes it; the socket is what counts */
	uint32_t life = atomic_load_explicit(
			(_Atomic uint32_t *)&e->hdr->life[0],
			memory_order_relaxed);

	if (!life || (life & KVMM_LIFE_DIED))
		return false;
	/* acquire: pairs with session_mail() in the daemon */
	return atomic_load_explicit(&e->ledger->mail, memory_order_acquire) ==
	       k->mail_seen;
}

static void look_at_socket(struct kvmm *k, uint64_t now, bool idle)
	__must_hold(&k->lock)
{
	uint64_t every = LIB_SOCK_CHECK_NS;

	if (k->calling)
		return;			/* whoever calls reads it */
	if (idle && !k->fd_ready)
		every = LIB_SOCK_IDLE_NS;
	if (k->state == CONN_UP && socket_silent(k, kvmm_era_now(k)))
		every = LIB_SOCK_SURE_NS;
	if (k->state == CONN_UP && now - k->sock_checked_ns < every)
		return;
	kvmm_conn_run(k, now);
}

/* Take what has come, until @max are to be told. */
static void take(struct kvmm *k, uint64_t now, unsigned int max)
	__must_hold(&k->lock)
{
	struct kvmm_era *e = kvmm_era_now(k);

	if (k->state == CONN_UP) {
		woken(k, e);
		note_activity(k, e, now);
		if (!kvmm_cq_run(k, e, max))
			kvmm_conn_lost(k);
		kvmm_ops_late(e, now);
	}
	/* also while there is no daemon: what is read is read on */
	kvmm_step_words(k);
	kvmm_step_run(e);
	look_at_socket(k, now, !k->nr_done);
	if (!k->calling)
		kvmm_past_run(k);
}

static unsigned int turn(struct kvmm *k, struct kvmm_done *done,
			 unsigned int max) __must_hold(&k->lock)
{
	uint64_t now = now_ns();
	unsigned int n;

	take_ready(k);
	take(k, now, max);
	n = tell(k, done, max);
	if (n)
		k->busy_ns = now;
	return n;
}

int kvmm_poll(struct kvmm *k, struct kvmm_done *done, unsigned int max)
{
	struct kvmm_era *e;
	int n;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&k->lock);
	free_told(k);
	do {
		n = turn(k, done, max);
		e = kvmm_era_now(k);
	} while (!n && max && k->state == CONN_UP &&
		 go_to_sleep(k, e, now_ns()));
	if (!n && kvmm_era_lost(e))
		n = kvmm_fail(-ENOTCONN, "no daemon at %s", k->path);
	else if (!n && kvmm_era_dying(e))
		n = kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	kvmm_unlock(&k->lock);
	kvmm_exit(k);
	/* after the exit: our own look would keep everything alive */
	kvmm_lock(&k->lock);
	kvmm_reap(k);
	kvmm_unlock(&k->lock);
	return n;
}

/* -- waiting for one ------------------------------------------------------------------- */

#define WAIT_MS		5	/* between two looks at the socket */

/*
 * Sleep until the daemon writes, or another thread has taken what we wait for.
 * Not on kvmm_fd(): that is readable while there is something to be told, which
 * we do not do.
 */
static void wait_a_little(const struct kvmm_era *e, const struct kvmm_job *op)
{
	struct pollfd fd[2] = {
		{ .fd = e->notify, .events = POLLIN },
		{ .fd = op->wake, .events = POLLIN },	/* -1 is passed over */
	};
	uint64_t now = now_ns();
	uint64_t ms = op->deadline_ns <= now ? 0 :
		      (op->deadline_ns - now) / NSEC_PER_MSEC + 1;

	poll(fd, ARRAY_SIZE(fd), min(ms, (uint64_t)WAIT_MS));
}

/* True: look again at once. */
static bool wait_turn(struct kvmm *k, struct kvmm_job *op)
	__must_hold(&k->lock)
{
	struct kvmm_era *e = kvmm_era_now(k);

	take(k, now_ns(), UINT32_MAX);
	if (op->over)
		return true;
	if (k->state != CONN_UP || go_to_sleep(k, e, now_ns()))
		return true;
	return k->fd_ready;		/* it is worth to stay awake */
}

void kvmm_op_wait(struct kvmm *k, struct kvmm_job *op)
{
	struct kvmm_era *e = op->era;
	int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	bool over = false;

	kvmm_lock(&k->lock);
	op->wake = fd;
	kvmm_unlock(&k->lock);
	while (!over && kvmm_enter(k)) {
		bool again;

		kvmm_lock(&k->lock);
		again = wait_turn(k, op);
		over = op->over;
		/* what others wait for has gone past their kvmm_fd() */
		if (k->nr_done && (over || !again))
			kvmm_kick(k);
		kvmm_unlock(&k->lock);
		kvmm_exit(k);
		if (!again)
			wait_a_little(e, op);
	}
	close_fd(&fd);
}

uint64_t kvmm_next_deadline(struct kvmm *k)
{
	struct kvmm_era *e;
	uint64_t next;

	if (!kvmm_enter(k)) {
		kvmm_fail_forked();
		return 0;
	}
	e = kvmm_era_now(k);
	next = atomic_load_explicit(&k->retry_ns, memory_order_relaxed);
	next = min(next, atomic_load_explicit(&e->next_late_ns,
					      memory_order_relaxed));
	/* a stream or another member may do the step without telling us */
	if (atomic_load_explicit(&e->nr_deferred, memory_order_relaxed))
		next = min(next, deadline_in(LIB_STEP_POLL_NS));
	if (atomic_load_explicit(&k->kicked, memory_order_relaxed))
		next = 0;
	kvmm_exit(k);
	return next;
}

uint64_t kvmm_epoch(const struct kvmm *k)
{
	struct kvmm *kk = (struct kvmm *)k;
	uint64_t epoch;

	if (!kvmm_enter(kk)) {
		kvmm_fail_forked();
		return 0;
	}
	epoch = kvmm_era_now(k)->epoch;
	kvmm_exit(kk);
	return epoch;
}
