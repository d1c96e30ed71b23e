/* SPDX-License-Identifier: Apache-2.0 */
/* Limits, errors, unprotected variants, freeing later. */
#ifndef KVMM_LIBKVMM_BASE_H
#define KVMM_LIBKVMM_BASE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <kvmm/kvmm.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/err.h"
#include "ipc/base/list.h"
#include "ipc/base/lock.h"

#define LIB_CALL_TIMEOUT_NS	(2 * NSEC_PER_SEC)
#define LIB_FETCH_NS		(2 * NSEC_PER_SEC)	/* deadline 0, no cost */
#define LIB_RECONNECT_NS	(100 * NSEC_PER_MSEC)
#define LIB_SOCK_CHECK_NS	(10 * NSEC_PER_MSEC)	/* while busy */
#define LIB_SOCK_IDLE_NS	(100 * NSEC_PER_USEC)	/* while not */
#define LIB_SOCK_SURE_NS	(10 * NSEC_PER_SEC)	/* where memory says it */
/* How long kvmm_poll() stays awake for completions: about what a wake costs. */
#define LIB_SPIN_NS		(50 * NSEC_PER_USEC)
/* After a deadline the daemon gets this long to say what it has. */
#define LIB_LATE_GRACE_NS	(5 * NSEC_PER_MSEC)
/* Step words may be written by a stream, of which nobody tells us. */
#define LIB_STEP_POLL_NS	NSEC_PER_MSEC

/* How long a wait for the leader's decision spins, and then sleeps a time. */
#define LIB_AGREE_SPIN_NS	(50 * NSEC_PER_USEC)
#define LIB_AGREE_SLEEP_NS	(50 * NSEC_PER_USEC)
/* Former daemons, or connections, that members may still talk through. */
#define LIB_PAST_ERAS		4

#define LIB_MAX_OPS		4096	/* in flight, a connection */
#define LIB_MAX_KEYS		(1u << 22) /* of one match */
#define LIB_MAG_TARGET		64	/* frames asked for at least */

/* -- unprotected variants, in test builds only ------------------------------- */

#define BREAK_PINBARRIER	1u	/* pin without an atomic operation */
#define BREAK_GENERATION	2u	/* compare the state only */
#define BREAK_READY		4u	/* compare the generation only */
/* No protection is taken away, but what a kernel may refuse is refused. */
#define BREAK_REMAP		8u	/* no second mapping of a frame */

#ifdef KVMM_TEST_BUILD
extern unsigned int kvmm_breaks;
void kvmm_breaks_init(void);
static inline bool lib_broken(unsigned int what)
{
	return kvmm_breaks & what;
}
#else
static inline void kvmm_breaks_init(void) {}
static inline bool lib_broken(unsigned int what)
{
	return false;
}
#endif

/* -- errors and options (error.c) -------------------------------------------- */

/* The calling thread's sentence. */
struct errmsg *kvmm_errmsg(void);

void kvmm_say(const char *fmt, ...) __printf(1, 2);

/* Set the thread's sentence, return @err. A macro, so that gcc sees it is not 0. */
#define kvmm_fail(err, ...) ({						\
	int __err = (err);						\
	kvmm_say(__VA_ARGS__);						\
	__err; })

/*
 * Copy an option struct that begins with its size: what the caller's version
 * lacks is zero, what ours lacks must be zero. 0, -EINVAL, -E2BIG.
 */
int kvmm_opts_copy(void *to, size_t known, const void *from, const char *what);

/* -- deferred freeing --------------------------------------------------------- */

/**
 * struct kvmm_dead - embedded in what is freed once no hot call can see it
 * @free: called outside of locks
 */
struct kvmm_dead {
	struct kvmm_dead *next;
	void		(*free)(struct kvmm_dead *d);
};

/* -- handles that go (call.c) -------------------------------------------------- */

/**
 * struct kvmm_leaving - a handle that its user has let go of
 * @fn:		takes leave of the daemon within a set-up call, and frees it;
 *		without a deadline there is no daemon to tell
 */
struct kvmm_leaving {
	struct list	link;
	void		(*fn)(struct kvmm_leaving *l, uint64_t deadline);
};

#endif
