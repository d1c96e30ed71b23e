/* SPDX-License-Identifier: Apache-2.0 */
/*
 * work.h - worker threads for what the event loop must not do itself
 *
 * Checksums, copies, populating memory and blocking system calls run here.
 * A job is embedded in whatever it works on; its function runs on a worker,
 * its done callback on the loop's thread, from work_poll(). Nothing is
 * allocated per job, so handing work over cannot fail.
 */
#ifndef KVMM_DAEMON_NODE_WORK_H
#define KVMM_DAEMON_NODE_WORK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct work_pool;		/* opaque; made by work_create() */

/**
 * struct work - one job
 * @fn:		runs on a worker; owns whatever the job points to meanwhile
 * @done:	runs on the loop's thread after @fn; may free the job. NULL: none,
 *		and then the job must not be touched after @fn returned
 * @bulk:	there may be any number of these: the others go first, though not
 *		for ever
 * @next:	private
 * @state:	private
 *
 * Zero it, set @fn and @done, hand it to work_submit(). It belongs to the pool
 * until @done is called or work_cancel() returned true.
 */
struct work {
	void		(*fn)(struct work *w);
	void		(*done)(struct work *w);
	struct work	*next;
	uint32_t	state;
	bool		bulk;
};

/**
 * work_create() - start a pool
 * @name:	thread name, at most 15 characters are kept
 * @nr_threads:	how many workers, 1 to 64
 * @ret:	the new pool; written on success only
 *
 * Return: 0, -EINVAL, -ENOMEM, or what eventfd(2) or pthread_create(3) said.
 * The caller owns *@ret: work_destroy().
 */
int work_create(const char *name, unsigned int nr_threads,
		struct work_pool **ret);

/**
 * work_destroy() - drain and stop a pool
 * @pool:	NULL is fine
 * @deadline_ns: absolute CLOCK_MONOTONIC
 *
 * Runs what is queued, calls every done callback on the calling thread, joins
 * the workers and frees the pool. Jobs submitted meanwhile by callbacks run too.
 *
 * Context: the loop's thread, outside of work_poll().
 * Return: 0, or -ETIMEDOUT: a worker is stuck in a job. The pool then still
 * exists, and so does all memory that the job may touch; call again or exit.
 */
int work_destroy(struct work_pool *pool, uint64_t deadline_ns);

/**
 * work_submit() - hand a job over
 *
 * Context: any thread. Never blocks for longer than the queue's mutex.
 */
void work_submit(struct work_pool *pool, struct work *w);

/**
 * work_cancel() - take a job back that no worker has begun
 *
 * Context: the loop's thread.
 * Return: true when the job is the caller's again (no callback will come),
 * false when a worker has it or had it.
 */
bool work_cancel(struct work_pool *pool, struct work *w);

/**
 * work_fd() - the eventfd that becomes readable when jobs are done
 *
 * Only written when the loop said that it sleeps: see work_sleep().
 */
int work_fd(const struct work_pool *pool);

/**
 * work_poll() - call done callbacks
 * @budget:	at most so many; 0 for all there are now. A loop that gives one
 *		must ask work_sleep() before it sleeps: what is left over gives
 *		no further signal
 *
 * Context: the loop's thread; not from within a callback.
 * Return: how many were called.
 */
unsigned int work_poll(struct work_pool *pool, unsigned int budget);

/**
 * work_sleep() - tell the workers whether the loop is about to sleep
 * @sleeping:	true before epoll_wait(2), false after it
 *
 * Return: true when jobs are done already: then do not sleep, poll. A loop that
 * never calls this gets an eventfd write per batch (pools start as sleeping).
 */
bool work_sleep(struct work_pool *pool, bool sleeping);

/** work_pending() - jobs submitted whose callback has not been called */
unsigned int work_pending(const struct work_pool *pool);

#endif
