/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Closing what a client sent.
 *
 * That may block: a FUSE server is asked to flush, and need not answer. A pidfd
 * is safe. Anything else is no part of the protocol, so a thread of its own
 * closes it. How many may be stuck is bounded, for each socket, so that one
 * tenant's file system is nobody else's trouble; beyond that nothing more is
 * received (foreign_room()). What no thread was to be had for stays in its
 * place until the next look.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "daemon/server/server.h"

enum closer_state { CLOSER_FREE, CLOSER_LEFT, CLOSER_BUSY };

/* A descriptor to close; only its thread makes one that is busy free. */
struct closer {
	int		fd;
	_Atomic enum closer_state state;
};

/* Of the process: a thread that is stuck outlives its server. */
static struct closer closers[CONFIG_MAX_SOCKETS][FOREIGN_CLOSERS];

static void *closer(void *arg)
{
	struct closer *c = arg;

	close(c->fd);
	/* release: pairs with the acquire of closer_state(); fd was read */
	atomic_store_explicit(&c->state, CLOSER_FREE, memory_order_release);
	return NULL;
}

static enum closer_state closer_state(const struct closer *c)
{
	/* acquire: pairs with the release of its thread */
	return atomic_load_explicit(&c->state, memory_order_acquire);
}

static void closer_start(struct closer *c)
{
	enum closer_state state = CLOSER_LEFT;
	pthread_attr_t attr;
	pthread_t thread;

	/* relaxed, both: the thread begins after the first, or not at all */
	atomic_store_explicit(&c->state, CLOSER_BUSY, memory_order_relaxed);
	if (!pthread_attr_init(&attr)) {
		pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
		if (!pthread_create(&thread, &attr, closer, c))
			state = CLOSER_BUSY;
		pthread_attr_destroy(&attr);
	}
	if (state == CLOSER_LEFT)
		atomic_store_explicit(&c->state, state, memory_order_relaxed);
}

bool foreign_room(unsigned int socket)
{
	bool room = false;
	unsigned int i;

	for (i = 0; i < FOREIGN_CLOSERS; i++) {
		struct closer *c = &closers[socket][i];

		if (closer_state(c) == CLOSER_LEFT)
			closer_start(c);
		room |= closer_state(c) == CLOSER_FREE;
	}
	return room;
}

void foreign_close(int fd, unsigned int socket)
{
	unsigned int i;

	if (fd_is_pidfd(fd)) {
		close(fd);
		return;
	}
	for (i = 0; i < FOREIGN_CLOSERS; i++) {
		struct closer *c = &closers[socket][i];

		if (closer_state(c) != CLOSER_FREE)
			continue;
		c->fd = fd;
		closer_start(c);
		return;
	}
}
