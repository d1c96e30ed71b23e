/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The event loop.
 *
 * A round: sweep the submission rings, do what is due, sleep in epoll. After
 * activity the loop does not sleep but sweeps on for a while (spin_us): waking
 * an idle CPU costs about as much, and a client that gets its answer quickly
 * often has the next question. While it sweeps nobody needs to ring: a round
 * trip is two cache lines. The sweep makes no system call and reads no clock
 * but every %SPIN_CHECK times.
 *
 * Going to sleep. One flag for all submission rings, in the shared header:
 *
 *	daemon	sleeping = 1; read all tails; sleep if nothing is there
 *	client	tail = n; read sleeping; ring the doorbell if it is 1
 *
 * All four are seq_cst, so at least one side sees the other: either the daemon
 * sees the entry or the client sees the flag.
 *
 * Descriptors are edge-triggered where the event itself says all there is
 * (doorbells: nobody reads them), level-triggered elsewhere.
 */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"

#define EVENTS		64
#define SPIN_CHECK	32	/* idle sweeps between looks at the clock */
#define SWEEPS		64	/* busy sweeps between looks at other work */
#define BUDGET		256	/* callbacks of workers or a node a round */
/* While the rings are busy, look at descriptors this often. A guess: a socket
 * message or a step's doorbell may wait so long. */
#define EVENTS_EVERY_NS	(50 * NSEC_PER_USEC)

int loop_add(struct server *s, struct source *src, int fd, uint32_t events)
{
	struct epoll_event ev = { .events = events, .data.ptr = src };

	if (epoll_ctl(s->epfd, EPOLL_CTL_ADD, fd, &ev) < 0)
		return -errno;
	src->fd = fd;
	return 0;
}

void loop_mod(struct server *s, struct source *src, uint32_t events)
{
	struct epoll_event ev = { .events = events, .data.ptr = src };

	if (src->fd >= 0 && epoll_ctl(s->epfd, EPOLL_CTL_MOD, src->fd, &ev) < 0)
		log_err("epoll: %s", strerror(errno));
}

void loop_del(struct server *s, struct source *src)
{
	if (src->fd >= 0)
		epoll_ctl(s->epfd, EPOLL_CTL_DEL, src->fd, NULL);
	src->fd = -1;
}

/* -- rings ----------------------------------------------------------------------- */

static unsigned int rings_sweep(struct server *s)
{
	unsigned int i, k = s->watch_next, n = 0;

	for (i = s->nr_watch; i; i--) {
		struct watch *w;

		if (k >= s->nr_watch)
			k = 0;
		w = &s->watch[k++];
		/* acquire: pairs with the client's store of tail */
		if (atomic_load_explicit(w->tail, memory_order_acquire) !=
		    w->head)
			n += ring_poll(w->ss);
	}
	/* who was served first is served last the next time */
	if (n)
		s->watch_next = s->watch_next + 1 < s->nr_watch
				? s->watch_next + 1 : 0;
	return n;
}

/* Is there an entry that would be taken? */
static bool rings_any(struct server *s)
{
	unsigned int i;

	for (i = 0; i < s->nr_watch; i++) {
		struct watch *w = &s->watch[i];

		/* seq_cst: pairs with the client's tail, see above */
		if (atomic_load_explicit(w->tail, memory_order_seq_cst) !=
		    w->head && !ring_blocked(w->ss))
			return true;
	}
	return false;
}

/* Does something move that the rings know nothing of? */
static bool io_moves(struct server *s)
{
	unsigned int i;

	if (work_pending(s->pool))
		return true;
	for (i = 0; i < s->nr_nodes; i++) {
		const struct node_stats *st = &s->node[i]->stats;

		if (st->dir[NODE_READ].inflight || st->dir[NODE_WRITE].inflight)
			return true;
	}
	return false;
}

/*
 * Sweep while there is something, and for spin_us afterwards.
 * Returns false when it is time to sleep.
 */
static bool loop_spin(struct server *s)
{
	unsigned int idle = 0, busy = 0;
	uint64_t now;

	for (;;) {
		if (rings_sweep(s)) {
			s->hot = s->cfg.spin_us;
			s->hot_ns = 0;
			idle = 0;
			if (s->dirty || s->sessions_doomed || ++busy >= SWEEPS)
				return true;
			continue;
		}
		if (!s->hot)
			return false;
		if (!(++idle % SPIN_CHECK)) {
			now = now_ns();
			if (!s->hot_ns)
				s->hot_ns = now + s->cfg.spin_us * NSEC_PER_USEC;
			if (now >= s->hot_ns) {
				s->hot = false;
				return false;
			}
			if (now >= s->mm_due || io_moves(s))
				return true;
		}
		cpu_relax();
	}
}

/* Clients that hold references or cannot take their answers. */
static uint64_t held_run(struct server *s, uint64_t now)
{
	uint64_t due = DEADLINE_NONE;
	struct session *ss;
	unsigned int i;

	for (i = 0; s->nr_held && i < s->nr_watch; i++) {
		ss = s->watch[i].ss;
		if (list_empty(&ss->ring.held) && list_empty(&ss->ring.backlog))
			continue;
		if (now >= ss->ring.poll_due)
			ring_reap(ss, now);
		if (!list_empty(&ss->ring.held) ||
		    !list_empty(&ss->ring.backlog))
			due = min(due, ss->ring.poll_due);
	}
	return due;
}

/* Everything that is due but the rings. Returns when it must be called again. */
static uint64_t loop_due(struct server *s)
{
	uint64_t now = now_ns();
	uint64_t due = DEADLINE_NONE;
	unsigned int i;

	s->dirty = false;
	if (work_poll(s->pool, BUDGET) == BUDGET)
		due = 0;
	for (i = 0; i < s->nr_nodes; i++)
		if (node_poll(s->node[i], BUDGET) == BUDGET)
			due = 0;
	due = min(due, held_run(s, now));
	due = min(due, hostmem_run(s, now));
	s->mm_due = mm_run(s->mm, now);
	due = min(due, s->mm_due);
	for (i = 0; i < s->nr_nodes; i++) {
		node_kick(s->node[i]);
		due = min(due, node_next_deadline(s->node[i]));
	}
	if (now >= s->sessions_due) {
		uint64_t next;

		s->sessions_due = DEADLINE_NONE;
		next = sessions_run(s, now);
		sessions_arm(s, next);
	}
	due = min(due, s->sessions_due);
	if (s->admin)
		due = min(due, admin_run(s->admin, now));
	if (s->sessions_doomed)
		sessions_reap(s);
	return due;
}

/* -- descriptors ------------------------------------------------------------------ */

static int wait_events(struct server *s, struct epoll_event *ev, uint64_t ns)
{
	struct timespec ts = ns_to_timespec(ns);
	int n;

	n = epoll_pwait2(s->epfd, ev, EVENTS, &ts, NULL);
	if (n < 0 && errno == ENOSYS)		/* before Linux 5.11 */
		n = epoll_wait(s->epfd, ev, EVENTS,
			       (int)min(div_round_up(ns, NSEC_PER_MSEC),
					UINT64_C(60000)));
	return n;
}

static void loop_events(struct server *s, uint64_t ns)
{
	struct epoll_event ev[EVENTS];
	int i, n = wait_events(s, ev, ns);

	if (ns) {
		/* seq_cst as all of this flag; nobody needs to ring now */
		atomic_store_explicit(&s->hdr->sleeping, 0,
				      memory_order_seq_cst);
		work_sleep(s->pool, false);
	}
	for (i = 0; i < n; i++) {
		struct source *src = ev[i].data.ptr;

		if (src->fd >= 0)	/* an earlier event may have closed it */
			src->ready(src, ev[i].events);
	}
	s->events_ns = now_ns();
}

static void loop_sleep(struct server *s, uint64_t until)
{
	uint64_t left = deadline_left(until);

	if (!left) {
		loop_events(s, 0);
		return;
	}
	/* a long sleep has no reason: it also bounds what a bug can cost */
	left = min(left, 10 * NSEC_PER_SEC);
	/* seq_cst: pairs with the clients' load after their tail store */
	atomic_store_explicit(&s->hdr->sleeping, 1, memory_order_seq_cst);
	if (work_sleep(s->pool, true) || rings_any(s)) {
		atomic_store_explicit(&s->hdr->sleeping, 0,
				      memory_order_seq_cst);
		work_sleep(s->pool, false);
		return;
	}
	s->c.sleeps++;
	loop_events(s, left);
}

void loop_once(struct server *s, uint64_t until_ns)
{
	bool busy = loop_spin(s);
	uint64_t due = loop_due(s);

	s->c.rounds++;
	if (!busy && !s->hot)
		loop_sleep(s, min(due, until_ns));
	else if (now_ns() - s->events_ns > EVENTS_EVERY_NS)
		loop_events(s, 0);
	if (s->sessions_doomed)
		sessions_reap(s);
}
