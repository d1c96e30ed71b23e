/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Is the daemon alive? What systemd does for a unit with WatchdogSec=.
 *
 * A daemon that has served says WATCHDOG=1 from its event loop, as often as
 * $WATCHDOG_USEC asks. One that does not is told to end with SIGABRT, so that there
 * is something to look at, and killed when it has not ended soon; then it is
 * started again and finds what was kept. One that does not come to serve, or does
 * not come to an end, hangs as well.
 *
 * Our own manager may watch us. It hears what the daemon says; so the daemon must be
 * found out before it takes us, who keep everything, for hung.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/keeper/keeper.h"
#include "daemon/log.h"
#include "ipc/base/clock.h"

#define WATCHDOG_NS	(10 * NSEC_PER_SEC)	/* as kvmmd.service has it */
#define START_NS	(90 * NSEC_PER_SEC)	/* to serve; a guess */
#define ABORT_NS	(5 * NSEC_PER_SEC)	/* to leave a core */
#define STOP_NS		(15 * NSEC_PER_SEC)
#define LATE_NS		NSEC_PER_SEC

void up_send(const struct keeper *k, const char *text, size_t len)
{
	/* nobody waits for our manager: what it does not take now is lost */
	if (k->up >= 0 && len)
		send(k->up, text, len, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* As long as a child cannot say it: we live. */
static void up_alive(const struct keeper *k)
{
	static const char alive[] = "WATCHDOG=1\n";

	if (k->watched)
		up_send(k, alive, sizeof(alive) - 1);
}

void watch_open(struct keeper *k)
{
	const char *pid = getenv("WATCHDOG_PID"), *usec = getenv("WATCHDOG_USEC");
	uint64_t us = usec ? strtoull(usec, NULL, 10) : 0;

	k->watchdog_ns = WATCHDOG_NS;
	k->watched = us && (!pid || strtol(pid, NULL, 10) == getpid());
	if (k->watched)
		k->watchdog_ns = min(k->watchdog_ns, us * NSEC_PER_USEC / 2);
	unsetenv("WATCHDOG_PID");
	unsetenv("WATCHDOG_USEC");
}

void watch_begin(struct keeper *k)
{
	k->hung = false;
	k->watch_ns = deadline_in(START_NS);
	up_alive(k);
}

void watch_heard(struct keeper *k, const char *line)
{
	bool ready = !strcmp(line, "READY=1");

	if (ready)
		k->ready = k->ever = true;
	if (k->hung)
		return;			/* too late */
	if (!strcmp(line, "STOPPING=1"))
		k->watch_ns = deadline_in(STOP_NS);
	else if (ready || (k->ready && !strcmp(line, "WATCHDOG=1")))
		k->watch_ns = deadline_in(k->watchdog_ns);
}

/*
 * What comes so late was stopped itself, or had no CPU: the child may have had
 * nowhere to say that it lives, and gets a moment to do so.
 */
static bool late(const struct keeper *k)
{
	return deadline_past(k->watch_ns + LATE_NS);
}

void watch_run(struct keeper *k)
{
	if (!k->child || !deadline_past(k->watch_ns))
		return;
	if (late(k)) {
		k->watch_ns = deadline_in(LATE_NS);
		return;
	}
	up_alive(k);
	k->watch_ns = deadline_in(ABORT_NS);
	if (k->hung) {
		log_err("keeper: kvmmd does not end: killed");
		kill(k->child, SIGKILL);
		return;
	}
	k->hung = true;
	log_err("keeper: kvmmd hangs: it has said nothing for %llu ms",
		(unsigned long long)((k->ready ? k->watchdog_ns : START_NS) /
				     NSEC_PER_MSEC));
	kill(k->child, SIGABRT);
	/* one that was stopped would not even hear that */
	kill(k->child, SIGCONT);
}
