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
 * @gone:	of each buffer: which of its blocks could not be read
 * @err:	of each buffer: why the last of them could not
 * @running:	there is a thread
 * @pending:	it has a range to read, or has read it, into the other buffer
 * @failed:	it could not read that range as a whole
 * @quit:	it is to end
 * @off:	where that range begins
 * @nr:		and its blocks
 */
struct nvme_ahead {
	struct nvme	*nv;
	pthread_t	thread;
	sem_t		go, done;
	char		*buf[2];
	bool		*gone[2];
	int		err[2];
	unsigned int	cur;
	bool		running;
	bool		pending;
	bool		failed;
	bool		quit;
	uint64_t	off;
	uint64_t	nr;
};

/* Into buffer @which. What cannot be read is zero, and known. @alone: try each
 * block by itself where not all can be read at once. */
static int read_range(struct nvme_ahead *a, unsigned int which, uint64_t off,
		      uint64_t nr, bool alone)
{
	char *buf = a->buf[which];
	bool *gone = a->gone[which];
	unsigned int bad = 0;
	int err;

	a->err[which] = 0;
	memset(gone, 0, (size_t)nr * sizeof(*gone));
	err = nvme_open_read(a->nv, buf, (size_t)nr * NVME_BLOCK, off);
	if (!err || !alone)
		return err;
	for (uint64_t i = 0; i < nr; i++) {
		char *p = buf + i * NVME_BLOCK;

		if (bad < NVME_BAD_MOST)
			err = nvme_open_read(a->nv, p, NVME_BLOCK,
					     off + i * NVME_BLOCK);
		if (!err)
			continue;
		memset(p, 0, NVME_BLOCK);
		gone[i] = true;
		a->err[which] = err;
		bad++;
	}
	return 0;
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
		/* on a sick medium nobody is to wait for what nobody asked for */
		a->failed = read_range(a, !a->cur, a->off, a->nr, false);
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

int nvme_ahead_create(struct nvme *nv, uint64_t max_blocks,
		      struct nvme_ahead **ret)
{
	struct nvme_ahead *a = calloc(1, sizeof(*a));
	unsigned int i;

	if (!a)
		return -ENOMEM;
	a->nv = nv;
	sem_init(&a->go, 0, 0);
	sem_init(&a->done, 0, 0);
	for (i = 0; i < ARRAY_SIZE(a->buf); i++) {
		void *buf;

		if (posix_memalign(&buf, NVME_BLOCK, max_blocks * NVME_BLOCK)) {
			nvme_ahead_destroy(a);
			return -ENOMEM;
		}
		a->buf[i] = buf;
		a->gone[i] = calloc(max_blocks, sizeof(*a->gone[i]));
		if (!a->gone[i]) {
			nvme_ahead_destroy(a);
			return -ENOMEM;
		}
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
	free(a->gone[0]);
	free(a->gone[1]);
	free(a);
}

const char *nvme_ahead_read(struct nvme_ahead *a, uint64_t off, uint64_t nr,
			    uint64_t next_off, uint64_t next_nr)
{
	bool there = a->pending && a->off == off && a->nr == nr;

	ahead_wait(a);
	if (there && !a->failed)
		a->cur = !a->cur;
	else
		read_range(a, a->cur, off, nr, true);
	if (a->running && next_nr) {
		a->off = next_off;
		a->nr = next_nr;
		a->pending = true;
		sem_post(&a->go);
	}
	return a->buf[a->cur];
}

int nvme_ahead_gone(const struct nvme_ahead *a, uint64_t ix)
{
	return a->gone[a->cur][ix] ? a->err[a->cur] : 0;
}
