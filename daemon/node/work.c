/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Worker threads.
 *
 * Two queues under one mutex feed the workers; jobs are tens of microseconds
 * and more, so lock-free queues would buy nothing. Finished jobs go the other
 * way on a stack that workers push to with compare-and-swap and the loop takes
 * whole; it is turned around there, so callbacks come in the order of ends.
 *
 * Wake-ups of the loop are a Dekker pair. A worker pushes, then looks whether
 * the loop sleeps; the loop says that it sleeps, then looks whether something
 * was pushed. Both with seq_cst, so one of them sees the other. Only the push
 * onto an empty stack wakes: whoever comes later stands behind one that did.
 *
 * The eventfd is read only when it may have something to be read: a wake-up is
 * counted in @owed before it is written, and taken off when it has been read. (A
 * flag that was set after the write left a descriptor that is readable and that
 * nobody reads, as long as the worker was kept from setting it: the loop went
 * round and round on the CPU that the worker was waiting for.)
 *
 * Bulk. Clients have pages copied, summed up and zeroed, as many as they like,
 * and somebody else's read has a deadline: behind all of those it would miss it.
 * So they queue apart. The workers take from that queue what the other one leaves
 * them, and one job in BULK_TURN all the same.
 *
 * A job's state: QUEUED under the mutex, RUNNING, DONE (on the stack), IDLE.
 * Only work_cancel() and the workers look at it, under the mutex.
 */
#include "daemon/node/work.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/base/lock.h"

#define WORK_MAX_THREADS	64
#define BULK_TURN		4u

/* How long an idle worker sleeps before it looks again; it is woken for work. */
#define WORK_IDLE_NS		(60 * NSEC_PER_SEC)

enum {
	WORK_IDLE,
	WORK_QUEUED,
	WORK_TAKEN,
};

/* Jobs in the order in which they came. */
struct work_queue {
	struct work	*head;		/* first; taken from here */
	struct work	*tail;		/* last; put here */
};

/**
 * struct work_pool - workers, their queues, and the way back
 * @lock:	protects @queue, @turn, @nr_idle, @stop, @nr_live, job states
 * @wake:	jobs were queued, or @stop
 * @gone:	a worker has left
 * @queue:	jobs that no worker has, by work.bulk
 * @turn:	jobs taken while there were bulk ones, since the last of those
 * @nr_idle:	workers that wait
 * @nr_live:	workers that have not left
 * @done:	stack of finished jobs, newest first
 * @sleeping:	the loop sleeps, or may
 * @owed:	writes to the eventfd, done or about to be, that were not read
 * @pending:	submitted, callback not called; the loop's callers only add
 * @ready:	finished jobs already taken off @done, oldest first; the loop's
 */
struct work_pool {
	struct kvmm_mutex	lock;
	struct kvmm_cond	wake;
	struct kvmm_cond	gone;
	struct work_queue	queue[2];
	unsigned int		turn;
	unsigned int		nr_idle;
	unsigned int		nr_live;
	bool			stop;
	_Atomic(struct work *)	done;
	atomic_bool		sleeping;
	_Atomic uint64_t	owed;
	atomic_uint		pending;
	struct work		*ready;
	int			efd;
	unsigned int		nr_threads;
	pthread_t		threads[WORK_MAX_THREADS];
};

static struct work *queue_pop(struct work_queue *q)
{
	struct work *w = q->head;

	if (w) {
		q->head = w->next;
		if (!q->head)
			q->tail = NULL;
		w->state = WORK_TAKEN;
	}
	return w;
}

/* Under the lock. */
static struct work *work_next(struct work_pool *p)
{
	bool bulk = p->queue[true].head &&
		    (!p->queue[false].head || ++p->turn >= BULK_TURN);

	if (bulk)
		p->turn = 0;
	return queue_pop(&p->queue[bulk]);
}

static bool work_none(const struct work_pool *p)
{
	return !p->queue[false].head && !p->queue[true].head;
}

/* Next job, or NULL when it is time to leave. */
static struct work *work_take(struct work_pool *p)
{
	struct work *w;

	kvmm_lock(&p->lock);
	while (work_none(p) && !p->stop) {
		p->nr_idle++;
		kvmm_cond_wait(&p->wake, &p->lock, deadline_in(WORK_IDLE_NS));
		p->nr_idle--;
	}
	w = work_next(p);
	kvmm_unlock(&p->lock);
	return w;
}

static void work_finished(struct work_pool *p, struct work *w)
{
	struct work *old = atomic_load_explicit(&p->done, memory_order_relaxed);
	uint64_t one = 1;

	do {
		w->next = old;
		/* seq_cst: with the load of @sleeping, see the top; and release
		 * of the job's results to the exchange in work_poll() */
	} while (!atomic_compare_exchange_weak(&p->done, &old, w));
	if (old)
		return;
	/* seq_cst: pairs with the store in work_sleep() */
	if (!atomic_load(&p->sleeping))
		return;
	/* release: before the write, so that whom it wakes reads it; pairs with
	 * the load in work_poll() */
	atomic_fetch_add_explicit(&p->owed, 1, memory_order_release);
	while (write(p->efd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static void *work_main(void *arg)
{
	struct work_pool *p = arg;
	struct work *w;

	while ((w = work_take(p))) {
		/* read before @fn: without @done the job may be gone after it */
		bool callback = w->done;

		w->fn(w);
		if (callback)
			work_finished(p, w);
		else
			atomic_fetch_sub_explicit(&p->pending, 1,
						  memory_order_relaxed);
	}
	kvmm_lock(&p->lock);
	p->nr_live--;
	kvmm_cond_signal(&p->gone);
	kvmm_unlock(&p->lock);
	return NULL;
}

/* Ask the workers to leave; false when one has not by @deadline. */
static bool work_stop(struct work_pool *p, uint64_t deadline)
{
	bool all_gone;

	kvmm_lock(&p->lock);
	p->stop = true;
	kvmm_cond_broadcast(&p->wake);
	while (p->nr_live && !deadline_past(deadline))
		kvmm_cond_wait(&p->gone, &p->lock, deadline);
	all_gone = !p->nr_live;
	kvmm_unlock(&p->lock);
	return all_gone;
}

static void work_free(struct work_pool *p)
{
	for (unsigned int i = 0; i < p->nr_threads; i++)
		pthread_join(p->threads[i], NULL);
	kvmm_cond_fini(&p->gone);
	kvmm_cond_fini(&p->wake);
	kvmm_mutex_fini(&p->lock);
	close_fd(&p->efd);
	free(p);
}

int work_create(const char *name, unsigned int nr_threads,
		struct work_pool **ret)
{
	struct work_pool *p;
	sigset_t all, old;
	int err;

	if (!nr_threads || nr_threads > WORK_MAX_THREADS)
		return -EINVAL;
	p = calloc(1, sizeof(*p));
	if (!p)
		return -ENOMEM;
	p->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (p->efd < 0) {
		err = -errno;
		free(p);
		return err;
	}
	kvmm_mutex_init(&p->lock, LOCK_WORK);
	kvmm_cond_init(&p->wake);
	kvmm_cond_init(&p->gone);
	atomic_init(&p->sleeping, true);

	/* Signals are the main thread's. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	while (p->nr_threads < nr_threads) {
		char short_name[16];

		kvmm_lock(&p->lock);
		p->nr_live++;
		kvmm_unlock(&p->lock);
		err = pthread_create(&p->threads[p->nr_threads], NULL,
				     work_main, p);
		if (err) {
			kvmm_lock(&p->lock);
			p->nr_live--;
			kvmm_unlock(&p->lock);
			break;
		}
		snprintf(short_name, sizeof(short_name), "%s", name);
		pthread_setname_np(p->threads[p->nr_threads], short_name);
		p->nr_threads++;
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (err) {
		work_stop(p, DEADLINE_NONE);
		work_free(p);
		return -err;
	}
	*ret = p;
	return 0;
}

int work_destroy(struct work_pool *p, uint64_t deadline_ns)
{
	if (!p)
		return 0;
	/* Callbacks may submit more: only when nothing is left do they leave. */
	while (work_pending(p)) {
		struct pollfd pfd = { .fd = p->efd, .events = POLLIN };

		work_sleep(p, true);
		if (work_poll(p, 0))
			continue;
		if (deadline_past(deadline_ns))
			return -ETIMEDOUT;
		/* In steps: a job without a callback ends without a signal. */
		poll(&pfd, 1, min(deadline_left_ms(deadline_ns), 10));
	}
	if (!work_stop(p, deadline_ns))
		return -ETIMEDOUT;
	work_free(p);
	return 0;
}

void work_submit(struct work_pool *p, struct work *w)
{
	struct work_queue *q = &p->queue[w->bulk];
	bool wake;

	w->next = NULL;
	atomic_fetch_add_explicit(&p->pending, 1, memory_order_relaxed);
	kvmm_lock(&p->lock);
	w->state = WORK_QUEUED;
	if (q->tail)
		q->tail->next = w;
	else
		q->head = w;
	q->tail = w;
	wake = p->nr_idle;
	kvmm_unlock(&p->lock);
	if (wake)
		kvmm_cond_signal(&p->wake);
}

bool work_cancel(struct work_pool *p, struct work *w)
{
	struct work_queue *q = &p->queue[w->bulk];
	struct work *prev = NULL;
	bool found;

	kvmm_lock(&p->lock);
	found = w->state == WORK_QUEUED;
	if (found) {
		struct work **link = &q->head;

		while (*link != w) {
			prev = *link;
			link = &prev->next;
		}
		*link = w->next;
		if (q->tail == w)
			q->tail = prev;
		w->state = WORK_IDLE;
	}
	kvmm_unlock(&p->lock);
	if (found)
		atomic_fetch_sub_explicit(&p->pending, 1, memory_order_relaxed);
	return found;
}

int work_fd(const struct work_pool *p)
{
	return p->efd;
}

/* Move what is on the stack behind what is ready, oldest first. */
static void work_collect(struct work_pool *p)
{
	/* acquire: pairs with the push in work_finished() */
	struct work *w = atomic_exchange_explicit(&p->done, NULL,
						  memory_order_acquire);
	struct work *batch = NULL;
	struct work **end = &p->ready;

	while (w) {
		struct work *next = w->next;

		w->next = batch;
		batch = w;
		w = next;
	}
	while (*end)
		end = &(*end)->next;
	*end = batch;
}

unsigned int work_poll(struct work_pool *p, unsigned int budget)
{
	unsigned int n = 0;
	uint64_t count;

	/* acquire: pairs with the addition in work_finished() */
	if (atomic_load_explicit(&p->owed, memory_order_acquire)) {
		ssize_t len;

		do
			len = read(p->efd, &count, sizeof(count));
		while (len < 0 && errno == EINTR);
		/* else the write is still to come; relaxed: only we look */
		if (len == (ssize_t)sizeof(count))
			atomic_fetch_sub_explicit(&p->owed, count,
						  memory_order_relaxed);
	}
	if (!p->ready)
		work_collect(p);
	while (p->ready && (!budget || n < budget)) {
		struct work *w = p->ready;

		p->ready = w->next;
		w->state = WORK_IDLE;
		atomic_fetch_sub_explicit(&p->pending, 1, memory_order_relaxed);
		w->done(w);
		n++;
	}
	return n;
}

bool work_sleep(struct work_pool *p, bool sleeping)
{
	/* seq_cst both: pairs with push and load in work_finished() */
	atomic_store(&p->sleeping, sleeping);
	if (p->ready || atomic_load(&p->done)) {
		if (sleeping)
			atomic_store_explicit(&p->sleeping, false,
					      memory_order_relaxed);
		return true;
	}
	return false;
}

unsigned int work_pending(const struct work_pool *p)
{
	return atomic_load_explicit(&p->pending, memory_order_relaxed);
}
