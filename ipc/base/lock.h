/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The locks of this project, all of them, in one ordered list. A thread takes
 * them in the order of enum lock_rank only, outermost first, and never two of
 * one rank. Builds with assertions check that at each kvmm_lock(); clang checks
 * who must hold what, from the attributes on functions.
 *
 * Under no lock: callbacks, waiting for a client, sleeping without a deadline.
 * Locks are private to a process: nothing shared with another one is ever
 * locked, since the other one may be stopped or dead.
 */
#ifndef KVMM_BASE_LOCK_H
#define KVMM_BASE_LOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(KVMM_TEST_BUILD) || !defined(NDEBUG)
#define KVMM_LOCK_DEBUG	1
#else
#define KVMM_LOCK_DEBUG	0
#endif

#ifdef __clang__
#define __ts_attr(x)	__attribute__((x))
#else
#define __ts_attr(x)
#endif
#define __capability(s)	__ts_attr(capability(s))
#define __acquires(l)	__ts_attr(acquire_capability(l))
#define __releases(l)	__ts_attr(release_capability(l))
#define __try_acquires(ret, l)	__ts_attr(try_acquire_capability(ret, l))
#define __must_hold(l)	__ts_attr(requires_capability(l))
#define __no_lock_check	__ts_attr(no_thread_safety_analysis)

/**
 * enum lock_rank - every lock there is, outermost first
 * @LOCK_CLIENT:	libkvmm, a connection: its state, completions, the list
 *			of spaces. Never held while waiting for the daemon
 * @LOCK_REQUESTS:	libkvmm, one request: what it found and owns
 * @LOCK_TALK:		libkvmm, what a member writes for the others of its
 *			engine: decisions, counters, frozen matches
 * @LOCK_MAGAZINE:	libkvmm, the consumer side of one magazine
 * @LOCK_OPS:		libkvmm, operations in flight, request slots, what waits
 *			for a step
 * @LOCK_RING:		libkvmm, the producer side of the submission ring and
 *			its arena
 * @LOCK_DAEMON:	kvmmd, the lists of clients, engines, spaces and nodes
 * @LOCK_SPACE:		kvmmd, one space: its pages, index, frame tables and
 *			records. No callback, no blocking I/O, no driver call
 * @LOCK_NODE:		kvmmd, one node: extents, free frames, budgets
 * @LOCK_IO:		kvmmd, a back end's queue of I/O and its slots
 * @LOCK_WORK:		kvmmd, the worker pool's queues
 * @LOCK_DONE:		kvmmd, completions on their way to the event loop
 * @LOCK_LOG:		kvmmd, lines of the log
 * @LOCK_TEST:		helpers of tests
 */
enum lock_rank {
	LOCK_CLIENT,
	LOCK_REQUESTS,
	LOCK_TALK,
	LOCK_MAGAZINE,
	LOCK_OPS,
	LOCK_RING,
	LOCK_DAEMON,
	LOCK_SPACE,
	LOCK_NODE,
	LOCK_IO,
	LOCK_WORK,
	LOCK_DONE,
	LOCK_LOG,
	LOCK_TEST,
	NR_LOCK_RANKS
};

/**
 * struct kvmm_mutex - a mutex that knows its place in the order
 * @mutex:	process-private
 * @rank:	enum lock_rank
 */
struct __capability("mutex") kvmm_mutex {
	pthread_mutex_t	mutex;
	uint8_t		rank;
};

#define KVMM_MUTEX_INIT(r)	{ PTHREAD_MUTEX_INITIALIZER, (r) }

void kvmm_mutex_init(struct kvmm_mutex *l, enum lock_rank rank);
void kvmm_mutex_fini(struct kvmm_mutex *l);

void kvmm_lock(struct kvmm_mutex *l) __acquires(l);
bool kvmm_trylock(struct kvmm_mutex *l) __try_acquires(true, l);
void kvmm_unlock(struct kvmm_mutex *l) __releases(l);

/* Does this thread hold it? Always true where nothing keeps count. */
bool kvmm_lock_held(const struct kvmm_mutex *l);

/**
 * struct kvmm_cond - a condition that one waits on with a deadline only
 */
struct kvmm_cond {
	pthread_cond_t	cond;
};

void kvmm_cond_init(struct kvmm_cond *c);
void kvmm_cond_fini(struct kvmm_cond *c);
void kvmm_cond_signal(struct kvmm_cond *c);
void kvmm_cond_broadcast(struct kvmm_cond *c);

/**
 * kvmm_cond_wait() - sleep until a signal or @deadline, @l released meanwhile
 * @c:		what to wait for
 * @l:		held by the caller, and it must be the innermost lock it holds
 * @deadline:	absolute, CLOCK_MONOTONIC nanoseconds
 *
 * May return early: the caller looks at its condition again.
 * Return: 0 or -ETIMEDOUT.
 */
int kvmm_cond_wait(struct kvmm_cond *c, struct kvmm_mutex *l,
		   uint64_t deadline) __must_hold(l);

#endif
