/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing to an eventfd that a client has, too.
 *
 * O_NONBLOCK belongs to the open file, and the client holds the same one: it
 * may clear the flag, fill the counter, and a write would stop the loop for
 * ever. Looking first does not help against somebody who races. So a write is
 * made interruptible by a signal of our own: a timer sends it to the loop's
 * thread, where it is blocked but for the write itself. A write that does not
 * block never notices; one that does comes back with EINTR after %GUARD_NS at
 * most, and its client is cut off.
 *
 * A timer whose signal is pending is not started again before it was taken, so
 * an idle daemon is not woken by this.
 */
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"

#define GUARD_NS	(100 * NSEC_PER_MSEC)
#define GUARD_SIGNAL	(SIGRTMIN + 1)

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id	_sigev_un._tid
#endif

static void nothing(int sig)
{
}

static void guard_mask(int how)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, GUARD_SIGNAL);
	pthread_sigmask(how, &set, NULL);
}

int guard_init(struct guard *g)
{
	/* no SA_RESTART: the write is to fail */
	const struct sigaction sa = { .sa_handler = nothing };
	const struct itimerspec every = {
		.it_value	= ns_to_timespec(GUARD_NS),
		.it_interval	= ns_to_timespec(GUARD_NS),
	};
	struct sigevent ev = {
		.sigev_notify	= SIGEV_THREAD_ID,
		.sigev_signo	= GUARD_SIGNAL,
	};

	ev.sigev_notify_thread_id = gettid();
	guard_mask(SIG_BLOCK);
	if (sigaction(GUARD_SIGNAL, &sa, NULL) < 0 ||
	    timer_create(CLOCK_MONOTONIC, &ev, &g->timer) < 0)
		return -errno;
	g->on = true;
	return timer_settime(g->timer, 0, &every, NULL) < 0 ? -errno : 0;
}

void guard_fini(struct guard *g)
{
	if (g->on)
		timer_delete(g->timer);
	g->on = false;
}

int guard_wake(int eventfd)
{
	const uint64_t one = 1;
	int err;

	guard_mask(SIG_UNBLOCK);
	err = write(eventfd, &one, sizeof(one)) < 0 ? -errno : 0;
	guard_mask(SIG_BLOCK);
	return err == -EINTR ? err : 0;	/* full: it is readable anyway */
}
