/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper's life: start the daemon, wait, start it again.
 *
 * The daemon ends in order when it was asked to (by the signal that is passed
 * on) or exits with a status after which another start would go the same way.
 * Then the keeper ends, too, with that status and with everything that it
 * keeps. After anything else the daemon is started again: at once after 100 ms,
 * then with growing pauses up to 5 s, which begin anew once it has run for a
 * while. One that hangs is ended (keeper_watch.c). One that never served is not
 * started again: who starts it by hand wants to see why it does not work.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/keeper/keeper.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define BACKOFF_MIN_NS	(100 * NSEC_PER_MSEC)
#define BACKOFF_MAX_NS	(5 * NSEC_PER_SEC)
#define STEADY_NS	(30 * NSEC_PER_SEC)	/* a run after which it begins anew */
#define KILL_NS		(15 * NSEC_PER_SEC)	/* to end in order */
#define OWN_FDS		((rlim_t)64)	/* of the keeper's, and to move others with */

/* Statuses of kvmmd after which it would only end again. */
#define EXIT_USAGE	2
#define EXIT_CONFIG	78

static_assert(sizeof(sigset_t) <= sizeof(((struct keeper *)0)->sig_old),
	      "a signal mask fits");

/* -- making ------------------------------------------------------------------------ */

static int signals_open(struct keeper *k)
{
	sigset_t set;

	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	if (sigprocmask(SIG_BLOCK, &set, (sigset_t *)k->sig_old) < 0)
		return -errno;
	k->sigfd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return k->sigfd < 0 ? -errno : 0;
}

/*
 * An abstract address that the kernel chooses: no file to be left behind. Others
 * may send to it, as they may to systemd's; the child alone is heard.
 */
static int socket_open(struct keeper *k)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	socklen_t len = sizeof(sa);
	const int on = 1;

	k->sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (k->sock < 0)
		return -errno;
	if (setsockopt(k->sock, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) < 0 ||
	    bind(k->sock, (struct sockaddr *)&sa, sizeof(sa.sun_family)) < 0 ||
	    getsockname(k->sock, (struct sockaddr *)&sa, &len) < 0)
		return -errno;
	snprintf(k->addr, sizeof(k->addr), "@%.*s",
		 (int)(len - offsetof(struct sockaddr_un, sun_path) - 1),
		 sa.sun_path + 1);
	return 0;
}

/* Our own manager's, if there is one. */
static void up_open(struct keeper *k)
{
	struct sockaddr_un sa;
	socklen_t len = notify_address(&sa, getenv("NOTIFY_SOCKET"));

	k->up = -1;
	if (!len)
		return;
	k->up = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (k->up < 0)
		return;
	if (connect(k->up, (struct sockaddr *)&sa, len) < 0)
		close_fd(&k->up);
}

/* Everything is lost when it goes: so be the last. Fails without privilege. */
static void outlive(struct keeper *k)
{
	struct rlimit rl;
	int fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);

	if (fd >= 0) {
		if (read(fd, k->oom_adj, sizeof(k->oom_adj) - 1) <= 0)
			k->oom_adj[0] = '\0';
		else if (pwrite(fd, "-999", 4, 0) < 0)
			log_debug("keeper: oom_score_adj: %s", strerror(errno));
		close(fd);
	}
	k->max = KEEPER_MAX;
	if (!getrlimit(RLIMIT_NOFILE, &rl)) {
		rl.rlim_cur = rl.rlim_max;
		setrlimit(RLIMIT_NOFILE, &rl);
		k->max = (unsigned int)min(rl.rlim_max - min(rl.rlim_max,
							     OWN_FDS),
					   (rlim_t)KEEPER_MAX);
	}
}

static int keeper_open(struct keeper *k)
{
	int err;

	outlive(k);
	store_adopt(k);
	watch_open(k);
	up_open(k);
	err = signals_open(k);
	return err ? err : socket_open(k);
}

static void keeper_close(struct keeper *k)
{
	while (k->nr)
		close(k->kept[--k->nr].fd);
	close_fd(&k->sock);
	close_fd(&k->up);
	close_fd(&k->sigfd);
}

/* -- the loop --------------------------------------------------------------------------- */

static void signals_read(struct keeper *k)
{
	struct signalfd_siginfo si;

	while (read(k->sigfd, &si, sizeof(si)) == (ssize_t)sizeof(si)) {
		int sig = (int)si.ssi_signo;

		if (sig == SIGCHLD)
			continue;
		if (sig != SIGHUP && !k->stop) {
			k->stop = sig;
			k->kill_ns = deadline_in(KILL_NS);
		}
		if (k->child)
			kill(k->child, sig);
	}
}

/* May another start go better? */
static bool start_again(const struct keeper *k, int status)
{
	if (k->stop || !k->ever)
		return false;
	return !WIFEXITED(status) ||
	       (WEXITSTATUS(status) != EXIT_SUCCESS &&
		WEXITSTATUS(status) != EXIT_USAGE &&
		WEXITSTATUS(status) != EXIT_CONFIG);
}

static void pause_begin(struct keeper *k, const char *what)
{
	uint64_t now = now_ns();

	/* the first time at once: clients wait */
	if (now - k->started_ns > STEADY_NS)
		k->backoff_ns = 0;
	k->start_ns = now + k->backoff_ns;
	log_warn("keeper: kvmmd ended (%s), start %u in %" PRIu64 " ms with %u "
		 "descriptors kept", what, k->restarts + 2,
		 k->backoff_ns / NSEC_PER_MSEC, k->nr);
	k->backoff_ns = clamp(2 * k->backoff_ns, BACKOFF_MIN_NS, BACKOFF_MAX_NS);
}

static int exit_status(int status)
{
	return WIFEXITED(status) ? WEXITSTATUS(status)
				 : 128 + WTERMSIG(status);
}

/* One round; true: this was the last, with @rc. */
static bool keeper_round(struct keeper *k, int *rc)
{
	struct pollfd p[] = {
		{ .fd = k->sock, .events = POLLIN },
		{ .fd = k->sigfd, .events = POLLIN },
	};
	uint64_t due = k->child ? k->stop ? k->kill_ns : k->watch_ns
				: k->start_ns;
	int status;

	poll(p, ARRAY_SIZE(p), due == DEADLINE_NONE ? -1
						    : deadline_left_ms(due));
	store_read(k);
	signals_read(k);
	if (child_reap(k, &status)) {
		if (!start_again(k, status)) {
			*rc = exit_status(status);
			return true;
		}
		pause_begin(k, k->ended);
	}
	if (k->stop && !k->child) {
		*rc = EXIT_SUCCESS;
		return true;
	}
	if (k->stop && deadline_past(k->kill_ns)) {
		log_err("keeper: kvmmd does not end: killed");
		kill(k->child, SIGKILL);
		k->kill_ns = deadline_in(KILL_NS);
	}
	if (!k->stop)
		watch_run(k);
	if (!k->child && deadline_past(k->start_ns)) {
		int err = child_start(k);

		if (err)
			pause_begin(k, strerror(-err));
		else
			k->restarts++;
	}
	return false;
}

int keeper_run(struct keeper *k, char *const *argv)
{
	int rc = EXIT_FAILURE, err;

	k->argv = argv;
	k->sock = k->up = k->sigfd = -1;
	err = keeper_open(k);
	if (!err)
		err = child_start(k);
	if (err)
		log_err("keeper: %s", strerror(-err));
	else
		while (!keeper_round(k, &rc))
			;
	keeper_close(k);
	return rc;
}
