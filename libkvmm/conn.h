/* SPDX-License-Identifier: Apache-2.0 */
/* The connection: conn.c, call.c, poll.c. */
#ifndef KVMM_LIBKVMM_CONN_H
#define KVMM_LIBKVMM_CONN_H

#include "ipc/sock.h"
#include "libkvmm/op.h"

enum conn_state {
	CONN_DOWN,		/* nobody there; try again at @retry_ns */
	CONN_HELLO,		/* hello sent, welcome wanted */
	CONN_JOIN,		/* join sent again after a reconnect */
	CONN_RESUME,		/* the era goes on, once all its news are here */
	CONN_UP,
};

/**
 * struct kvmm_stat - struct kvmm_stats, counted by several threads
 */
struct kvmm_stat {
	_Atomic uint64_t matches, pages_asked, pages_hit, pages_pending,
			pages_lower, pages_missed, pin_races, allocs,
			alloc_refused, published, publish_exists,
			publish_refused, fetched, fetch_missed, late,
			doorbells, touches_lost, reconnects, keys_lost;
};

#define stat_add(k, what, n)						\
	((void)atomic_fetch_add_explicit(&(k)->stat.what, (n),		\
					 memory_order_relaxed))

/**
 * struct kvmm - a connection
 * @alive:	a page of its own that a child of fork() finds zeroed
 * @readers:	hot calls under way, see lib.h
 * @era:	in force; the last one while there is none
 * @dead:	unlinked objects
 * @lock:	connection state, completions, the list of spaces
 * @calling:	a set-up call owns the socket; @cond tells when it is done
 * @leaving:	kvmm_leaving.link, for who calls to see to at the end
 * @retry_ns:	CONN_DOWN: not before; else until when the handshake may take
 * @up_ns:	when it was CONN_UP last
 * @next:	CONN_JOIN: the era that is being set up
 * @anew:	do not ask for the era to go on: the answer made no sense
 * @adopted:	CONN_RESUME: by another process
 * @asked:	how often that was done without an answer
 * @call_seq:	the request under way; @call_type its type; @call_again: a late
 *		reply got in its way, send it once more
 * @join_seq:	the join under way or late; a late yes counts
 * @msg:	what was received last
 * @scratch:	results that wrap in the ring
 * @wake:	eventfd by which the library wakes itself; @kicked: it was used
 * @hungry:	an allocation was refused since the last sleep
 * @fd_ready:	the era's notify has a count: the epoll fd is readable
 * @armed:	the daemon has been asked to write it
 * @busy_ns:	when something was posted or completed last
 * @mail_seen:	ledger.mail before the socket was read last
 * @seen_tail:	of the submission ring, at the last poll
 * @done:	completed, not yet told; @told: told, results still in use
 * @ready:	completed without the daemon, under @ops_lock
 */
struct kvmm {
	const _Atomic uint32_t *alive;
	char		*path;
	char		name[16];
	uint64_t	call_timeout_ns;
	_Alignas(64) _Atomic uint32_t readers;
	_Alignas(64) _Atomic(struct kvmm_era *) era;
	_Atomic(struct kvmm_dead *) dead;

	struct kvmm_mutex lock;
	struct kvmm_cond cond;
	bool		calling;
	struct list	leaving;
	enum conn_state	state;
	int		sock, epfd, wake;
	_Atomic uint64_t retry_ns;
	uint64_t	up_ns;
	uint64_t	sock_checked_ns;
	uint32_t	mail_seen;
	struct kvmm_era	*next;
	uint32_t	seq, call_seq, join_seq;
	uint16_t	call_type;
	bool		call_again;
	bool		anew;
	bool		adopted;
	unsigned int	asked;
	struct sock_msg	*msg;
	bool		joined;
	struct kvmm_engine engine;
	struct list	spaces;
	struct kvmm_era	*word_eras;	/* whose step word was handed out */

	struct ring_result *scratch;
	_Atomic bool	kicked;
	_Atomic bool	hungry;
	bool		fd_ready, armed;
	uint64_t	busy_ns;
	uint32_t	seen_tail;
	struct list	done, told;
	unsigned int	nr_done;

	struct kvmm_mutex talk_lock;	/* what we write for other members */
	struct kvmm_mutex ops_lock;
	struct list	ready;
	struct kvmm_req	*free_req;
	struct kvmm_job	*free_op;
	uint32_t	nr_free_req, nr_free_op;

	struct kvmm_stat stat;
};

/* Nothing of the parent's may be touched in a child. */
static inline bool kvmm_forked(const struct kvmm *k)
{
	return !atomic_load_explicit(k->alive, memory_order_relaxed);
}

/* Begin a call that looks at shared objects; false: answer -ECHILD. */
static inline bool kvmm_enter(struct kvmm *k)
{
	if (unlikely(kvmm_forked(k)))
		return false;
	atomic_fetch_add(&k->readers, 1);	/* seq_cst: see lib.h */
	return true;
}

static inline void kvmm_exit(struct kvmm *k)
{
	/* release: our reads are before the free that this allows */
	atomic_fetch_sub_explicit(&k->readers, 1, memory_order_release);
}

int kvmm_fail_forked(void);
void kvmm_bury(struct kvmm *k, struct kvmm_dead *d);
/* Free what is dead, if nobody looks. Under no lock but kvmm.lock. */
void kvmm_reap(struct kvmm *k);

static inline struct kvmm_era *kvmm_era_now(const struct kvmm *k)
{
	/* seq_cst: see the top of lib.h */
	return atomic_load(&((struct kvmm *)k)->era);
}

/* Make kvmm_fd() readable. */
void kvmm_kick(struct kvmm *k);

/* conn.c */
/* One look at the socket and at the clock; never blocks. */
void kvmm_conn_run(struct kvmm *k, uint64_t now) __must_hold(&k->lock);
/* The connection is over: operations end, a new try follows. */
void kvmm_conn_lost(struct kvmm *k) __must_hold(&k->lock);
/* A join that had timed out was granted after all. */
void kvmm_conn_joined(struct kvmm *k);

/*
 * call.c: a set-up call is
 *
 *	err = kvmm_call_begin(k, &deadline);
 *	if (err)
 *		return err;
 *	... kvmm_call(k, &request.h, WIRE_WINDOW, sizeof(reply), deadline) ...
 *	kvmm_call_end(k);
 *
 * Between the two the socket, the era and the lists of spaces and windows are
 * the caller's; no lock is held. The reply is in k->msg until the next call;
 * its descriptors are taken with sock_msg_take_fd(), what is left is closed.
 */
int kvmm_call_begin(struct kvmm *k, uint64_t *deadline);
void kvmm_call_end(struct kvmm *k);
/*
 * The same for calls that cannot fail. @l->fn has been called when it returns,
 * or is called by whoever is in a call that takes too long, at its end.
 */
void kvmm_call_leave(struct kvmm *k, struct kvmm_leaving *l);
/* 0, or what a WIRE_ERROR says, -ETIMEDOUT, -ENOTCONN, -EPROTO. */
int kvmm_call(struct kvmm *k, struct wire_hdr *h, uint16_t reply,
	      size_t min_bytes, uint64_t deadline);
/* The next message of a reply that has several. */
int kvmm_call_more(struct kvmm *k, uint16_t reply, size_t min_bytes,
		   uint64_t deadline);
/*
 * A message that is no reply to the call under way, and what sock_recv() said of
 * it: 0 or -EMFILE. Closes its descriptors. An error says that what the daemon
 * told could not be taken in. It tells it once: the connection is over then,
 * and the next one brings all of it again.
 */
int kvmm_call_stray(struct kvmm *k, struct sock_msg *m, int err);

/* conn.c, for resume.c */
int kvmm_conn_watch(struct kvmm *k, int fd);
void kvmm_conn_unwatch(struct kvmm *k, int fd);
void kvmm_conn_up(struct kvmm *k, struct kvmm_era *e) __must_hold(&k->lock);

/* resume.c: an era that the next daemon takes over */
/* Is there one to go on with? Then @h says which. */
bool kvmm_resume_ask(struct kvmm *k, struct wire_hello *h) __must_hold(&k->lock);
/* The welcome in k->msg says yes. */
int kvmm_resume_begin(struct kvmm *k) __must_hold(&k->lock);
/* WIRE_RESUMED is in k->msg: everything goes on. */
int kvmm_resume_end(struct kvmm *k) __must_hold(&k->lock);

/* step.c */
/* The step goes on in the next era where it was. */
void kvmm_step_carry(struct kvmm_era *from, struct kvmm_era *to);
/* The same, from the words of former eras that a stream may still write. */
void kvmm_step_words(struct kvmm *k) __must_hold(&k->lock);

/* agree.c, member.c */
/* From @old, or nothing, to @e, which other members may have known for a while. */
void kvmm_era_succeed(struct kvmm *k, struct kvmm_era *old, struct kvmm_era *e)
	__must_hold(&k->lock);
/* Eras before the present one that no member needs any more, go. */
void kvmm_past_run(struct kvmm *k) __must_hold(&k->lock);

/* poll.c */
/* Take completions until @max are done; false: the ring makes no sense. */
bool kvmm_cq_run(struct kvmm *k, struct kvmm_era *e, unsigned int max)
	__must_hold(&k->lock);

/* space.c, win.c, win_map.c: within a set-up call */
void kvmm_space_leave(struct kvmm_space *sp, uint64_t deadline);
void kvmm_win_leave(struct kvmm_win *w, uint64_t deadline);
/* Addresses for all of @v's frames, and the null frame. */
int kvmm_win_reserve(struct kvmm_win *w, const struct kvmm_view *v);
/* Ask what changed and map or unmap it; how many extents that were. */
int kvmm_win_apply(struct kvmm_win *w, struct kvmm_view *v, uint64_t deadline);
void kvmm_win_unmap(struct kvmm_win *w, struct kvmm_view *v);

#endif
