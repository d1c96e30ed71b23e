/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lock order at run time. Each thread keeps a bit per rank that it holds; a
 * lock may be taken when no bit at its own rank or further in is set. That
 * finds an inversion on the first run that has it, without two threads having
 * to meet. Release builds keep no count and no thread-local state.
 */
#include "ipc/base/lock.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

static_assert(NR_LOCK_RANKS <= 64, "held_ranks is one word");

#if KVMM_LOCK_DEBUG
static _Thread_local uint64_t held_ranks;

static const char *const rank_names[] = {
	[LOCK_CLIENT]	= "client",
	[LOCK_REQUESTS]	= "requests",
	[LOCK_TALK]	= "talk",
	[LOCK_MAGAZINE]	= "magazine",
	[LOCK_OPS]	= "ops",
	[LOCK_RING]	= "ring",
	[LOCK_DAEMON]	= "daemon",
	[LOCK_SPACE]	= "space",
	[LOCK_NODE]	= "node",
	[LOCK_IO]	= "io",
	[LOCK_WORK]	= "work",
	[LOCK_DONE]	= "done",
	[LOCK_LOG]	= "log",
	[LOCK_TEST]	= "test",
};
static_assert(ARRAY_SIZE(rank_names) == NR_LOCK_RANKS, "a name for each rank");

static void rank_check(const struct kvmm_mutex *l)
{
	if (held_ranks >> l->rank) {
		fprintf(stderr, "lock order: taking %s while holding %s\n",
			rank_names[l->rank], rank_names[ilog2(held_ranks)]);
		abort();
	}
}

static void rank_push(const struct kvmm_mutex *l)
{
	held_ranks |= BIT(l->rank);
}

static void rank_pop(const struct kvmm_mutex *l)
{
	if (!(held_ranks & BIT(l->rank))) {
		fprintf(stderr, "lock order: dropping %s, which is not held\n",
			rank_names[l->rank]);
		abort();
	}
	held_ranks &= ~BIT(l->rank);
}

bool kvmm_lock_held(const struct kvmm_mutex *l)
{
	return held_ranks & BIT(l->rank);
}
#else
static void rank_check(const struct kvmm_mutex *l) { (void)l; }
static void rank_push(const struct kvmm_mutex *l) { (void)l; }
static void rank_pop(const struct kvmm_mutex *l) { (void)l; }

bool kvmm_lock_held(const struct kvmm_mutex *l)
{
	(void)l;
	return true;
}
#endif

void kvmm_mutex_init(struct kvmm_mutex *l, enum lock_rank rank)
{
	pthread_mutex_init(&l->mutex, NULL);
	l->rank = (uint8_t)rank;
}

void kvmm_mutex_fini(struct kvmm_mutex *l)
{
	pthread_mutex_destroy(&l->mutex);
}

__no_lock_check void kvmm_lock(struct kvmm_mutex *l)
{
	rank_check(l);			/* before it can deadlock */
	pthread_mutex_lock(&l->mutex);
	rank_push(l);
}

__no_lock_check bool kvmm_trylock(struct kvmm_mutex *l)
{
	/* Cannot deadlock, so any order is allowed; still it is then held. */
	if (pthread_mutex_trylock(&l->mutex))
		return false;
	rank_push(l);
	return true;
}

__no_lock_check void kvmm_unlock(struct kvmm_mutex *l)
{
	rank_pop(l);
	pthread_mutex_unlock(&l->mutex);
}

void kvmm_cond_init(struct kvmm_cond *c)
{
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&c->cond, &attr);
	pthread_condattr_destroy(&attr);
}

void kvmm_cond_fini(struct kvmm_cond *c)
{
	pthread_cond_destroy(&c->cond);
}

void kvmm_cond_signal(struct kvmm_cond *c)
{
	pthread_cond_signal(&c->cond);
}

void kvmm_cond_broadcast(struct kvmm_cond *c)
{
	pthread_cond_broadcast(&c->cond);
}

int kvmm_cond_wait(struct kvmm_cond *c, struct kvmm_mutex *l, uint64_t deadline)
{
	struct timespec ts = ns_to_timespec(deadline);
	int err;

	rank_pop(l);
	err = pthread_cond_timedwait(&c->cond, &l->mutex, &ts);
	rank_check(l);
	rank_push(l);
	return -err;
}
