/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A word in shared memory that says whether this daemon lives.
 *
 * Clients would have to read their sockets again and again to notice that nobody
 * is there any more, a system call in each step of an engine. The kernel knows a
 * word that changes by itself when its holder is gone: the futex of a robust
 * mutex. The main thread takes one in the header and keeps it. Exit, crash or
 * SIGKILL: the kernel sets %KVMM_LIFE_DIED, before it closes the first socket.
 */
#include <errno.h>
#include <pthread.h>

#include "daemon/server/server.h"

static_assert(sizeof(pthread_mutex_t) <= sizeof(((struct kvmm_hdr *)0)->life),
	      "a mutex of this C library fits into the header");

static pthread_mutex_t *life(struct server *s)
{
	return (pthread_mutex_t *)s->hdr->life;
}

int server_live(struct server *s)
{
	pthread_mutexattr_t a;
	int err;

	err = pthread_mutexattr_init(&a);
	if (err)
		return -err;
	err = pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
	if (!err)
		err = pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
	if (!err)
		err = pthread_mutex_init(life(s), &a);
	pthread_mutexattr_destroy(&a);
	return err ? -err : -pthread_mutex_lock(life(s));
}

void server_leave(struct server *s)
{
	if (pthread_mutex_unlock(life(s)))
		return;			/* it was not held */
	pthread_mutex_destroy(life(s));
}
