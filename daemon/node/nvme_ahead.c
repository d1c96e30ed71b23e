/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading ahead while a store is read at start-up: a thread reads the next range
 * into one buffer while the last one is looked at in the other.
 *
 * Buffers, range and the open file belong to the thread from the post of @go to
 * the post of @done, and to the caller otherwise. Without a thread, or when
 * another range is asked for than was foretold, the caller reads by itself.
 */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/nvme.h"

/**
 * struct nvme_ahead - two buffers and who fills them
 * @cur:	the buffer that the caller looks at
 * @running:	there is a thread
 * @pending:	it has a range to read, or has read it, into the other buffer
 * @quit:	it is to end
 * @off:	where that range begins
 * @nr:		and its blocks
 */
struct nvme_ahead {
	struct nvme_open *open;
	pthread_t	thread;
	sem_t		go, done;
	char		*buf[2];
	unsigned int	cur;
	bool		running;
	bool		pending;
	bool		quit;
	uint64_t	off;
	uint64_t	nr;
};

/* What cannot be read is zero, and so not good. */
static void read_range(struct nvme_open *o, char *buf, uint64_t off,
		       uint64_t nr)
{
	if (!nvme_open_rw(o, false, buf, (size_t)nr * NVME_BLOCK, off))
		return;
	for (uint64_t i = 0; i < nr; i++) {
		char *p = buf + i * NVME_BLOCK;

		if (nvme_open_rw(o, false, p, NVME_BLOCK, off + i * NVME_BLOCK))
			memset(p, 0, NVME_BLOCK);
	}
}

/* Without deadline, as the reads themselves: who waits is a worker, and the loop
 * goes on without it. */
static void sem_take(sem_t *s)
{
	while (sem_wait(s) < 0 && errno == EINTR)
		;
}

static void *ahead_main(void *arg)
{
	struct nvme_ahead *a = arg;

	for (;;) {
		sem_take(&a->go);
		if (a->quit)
			return NULL;
		read_range(a->open, a->buf[!a->cur], a->off, a->nr);
		sem_post(&a->done);
	}
}

static void ahead_start(struct nvme_ahead *a)
{
	sigset_t all, old;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	a->running = !pthread_create(&a->thread, NULL, ahead_main, a);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}

int nvme_ahead_create(struct nvme_open *o, uint64_t max_blocks,
		      struct nvme_ahead **ret)
{
	struct nvme_ahead *a = calloc(1, sizeof(*a));
	unsigned int i;

	if (!a)
		return -ENOMEM;
	a->open = o;
	sem_init(&a->go, 0, 0);
	sem_init(&a->done, 0, 0);
	for (i = 0; i < ARRAY_SIZE(a->buf); i++) {
		void *buf;

		if (posix_memalign(&buf, NVME_BLOCK, max_blocks * NVME_BLOCK)) {
			nvme_ahead_destroy(a);
			return -ENOMEM;
		}
		a->buf[i] = buf;
	}
	ahead_start(a);
	*ret = a;
	return 0;
}

static void ahead_wait(struct nvme_ahead *a)
{
	if (a->pending)
		sem_take(&a->done);
	a->pending = false;
}

void nvme_ahead_destroy(struct nvme_ahead *a)
{
	if (!a)
		return;
	ahead_wait(a);
	if (a->running) {
		a->quit = true;
		sem_post(&a->go);
		pthread_join(a->thread, NULL);
	}
	sem_destroy(&a->go);
	sem_destroy(&a->done);
	free(a->buf[0]);
	free(a->buf[1]);
	free(a);
}

const char *nvme_ahead_read(struct nvme_ahead *a, uint64_t off, uint64_t nr,
			    uint64_t next_off, uint64_t next_nr)
{
	bool there = a->pending && a->off == off && a->nr == nr;

	ahead_wait(a);
	if (there)
		a->cur = !a->cur;
	else
		read_range(a->open, a->buf[a->cur], off, nr);
	if (a->running && next_nr) {
		a->off = next_off;
		a->nr = next_nr;
		a->pending = true;
		sem_post(&a->go);
	}
	return a->buf[a->cur];
}
