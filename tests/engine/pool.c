/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads for products. One job at a time: pool_run() posts it, works at it
 * itself, and returns when no part is left and none is being done.
 *
 * All waits are for threads of this process which only compute: a worker waits
 * for the next job, and a caller for parts that were begun. A deadline would
 * have nothing to do but to wait on.
 */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "tests/engine/pool.h"

struct pool {
	pthread_mutex_t	lock;		/* of everything below */
	pthread_cond_t	work, done;
	void		(*fn)(void *arg, unsigned int part);
	void		*arg;
	unsigned int	next, parts;	/* parts not begun are [next, parts) */
	unsigned int	busy;
	bool		quit;
	unsigned int	nr;
	pthread_t	thread[];
};

/* Do parts until none is left. Called and returns with the lock held. */
static void pool_drain(struct pool *p)
{
	while (p->next < p->parts) {
		unsigned int part = p->next++;

		p->busy++;
		pthread_mutex_unlock(&p->lock);
		p->fn(p->arg, part);
		pthread_mutex_lock(&p->lock);
		p->busy--;
	}
}

static void *pool_worker(void *arg)
{
	struct pool *p = arg;

	pthread_mutex_lock(&p->lock);
	while (!p->quit) {
		pool_drain(p);
		if (!p->busy)
			pthread_cond_signal(&p->done);
		pthread_cond_wait(&p->work, &p->lock);
	}
	pthread_mutex_unlock(&p->lock);
	return NULL;
}

void pool_run(struct pool *p, void (*fn)(void *arg, unsigned int part),
	      void *arg, unsigned int parts)
{
	pthread_mutex_lock(&p->lock);
	p->fn = fn;
	p->arg = arg;
	p->next = 0;
	p->parts = parts;
	pthread_cond_broadcast(&p->work);
	pool_drain(p);
	while (p->busy)
		pthread_cond_wait(&p->done, &p->lock);
	pthread_mutex_unlock(&p->lock);
}

int thread_pool_create(unsigned int threads, struct pool **ret)
{
	struct pool *p;
	int err;

	p = calloc(1, sizeof(*p) + threads * sizeof(*p->thread));
	if (!p)
		return -ENOMEM;
	pthread_mutex_init(&p->lock, NULL);
	pthread_cond_init(&p->work, NULL);
	pthread_cond_init(&p->done, NULL);
	while (p->nr + 1 < threads) {
		err = pthread_create(&p->thread[p->nr], NULL, pool_worker, p);
		if (err) {
			thread_pool_destroy(p);
			return -err;
		}
		p->nr++;
	}
	*ret = p;
	return 0;
}

void thread_pool_destroy(struct pool *p)
{
	if (!p)
		return;
	pthread_mutex_lock(&p->lock);
	p->quit = true;
	pthread_cond_broadcast(&p->work);
	pthread_mutex_unlock(&p->lock);
	for (unsigned int i = 0; i < p->nr; i++)
		pthread_join(p->thread[i], NULL);
	pthread_cond_destroy(&p->done);
	pthread_cond_destroy(&p->work);
	pthread_mutex_destroy(&p->lock);
	free(p);
}

unsigned int pool_size(const struct pool *p)
{
	return p ? p->nr + 1 : 0;
}
