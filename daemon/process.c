/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From the first look at what the last daemon left to the last word about how
 * this one ended.
 *
 * Under a service manager it takes its sockets from there (by
 * FileDescriptorName=), says READY=1 when it serves, keeps STATUS= up to date
 * and feeds the watchdog from the event loop, so that a loop that hangs is found
 * out.
 *
 * A re-exec (`kvmmctl daemon reexec`) is the same restart without the manager:
 * I/O comes to rest, what is parked is left open, and the process is replaced by
 * the program as it is installed now. Clients see their sockets close, as after
 * a crash; their memory and what they have pinned is there all the time.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/notify.h"
#include "daemon/process.h"
#include "daemon/server/ladder.h"
#include "daemon/server/park.h"
#include "daemon/server/server.h"
#include "daemon/trial.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define STOP_NS		(5 * NSEC_PER_SEC)
#define STATUS_NS	(5 * NSEC_PER_SEC)
#define AGAIN_NS	(100 * NSEC_PER_MSEC)	/* what the manager did not take */
#define DRAIN_NS	(5 * NSEC_PER_SEC)
#define TRIAL_NS	(3 * NSEC_PER_SEC)
#define TRIAL_LOOK_NS	(2 * NSEC_PER_MSEC)

/**
 * struct daemon - the process
 * @stop:	signal that asked for the end, or 0
 * @notify:	to who started us
 * @trial:	of what a re-exec would execute
 * @ready:	that it serves has been said
 * @confirm_due: when the configuration has proved itself
 */
struct daemon {
	const struct process_opts *opts;
	struct server	*server;
	struct source	signals;
	struct park	*park;
	struct state	state;
	struct ladder	ladder;
	struct notify	notify;
	struct trial	trial;
	int		stop;
	bool		ready;
	uint64_t	watchdog_ns, watchdog_due, status_due;
	uint64_t	confirm_due;
	char		status[512];
};

/* -- signals ----------------------------------------------------------------------------- */

static void signal_ready(struct source *src, uint32_t events)
{
	struct daemon *d = container_of(src, struct daemon, signals);
	struct signalfd_siginfo si;

	while (read(src->fd, &si, sizeof(si)) == (ssize_t)sizeof(si)) {
		if (si.ssi_signo != SIGHUP) {
			d->stop = (int)si.ssi_signo;
			continue;
		}
		log_notice("SIGHUP: the configuration is read at start only; "
			   "restart to apply a change");
	}
}

/* Before any thread: workers inherit the mask, so the loop gets them all. */
static int signals_open(void)
{
	sigset_t set;
	int fd;

	signal(SIGPIPE, SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	if (sigprocmask(SIG_BLOCK, &set, NULL) < 0)
		return -errno;
	fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	return fd < 0 ? -errno : fd;
}

/* -- what is due now and then -------------------------------------------------------------- */

static void watchdog_feed(struct daemon *d, uint64_t now)
{
	if (!d->watchdog_ns)
		return;
	/* as often as that: one that is lost is no harm */
	d->watchdog_due = now + d->watchdog_ns;
	if (notify_say(&d->notify, "WATCHDOG=1"))
		d->watchdog_due = now + AGAIN_NS;
}

/* The manager waits for that; so if it does not listen now it is said later. */
static void ready_say(struct daemon *d)
{
	uint64_t usec = 0;

	if (notify_say(&d->notify, "READY=1") == -EAGAIN)
		return;
	d->ready = true;
	if (sd_watchdog_enabled(0, &usec) > 0)
		d->watchdog_ns = usec * NSEC_PER_USEC / 3;
}

static void status_say(struct daemon *d)
{
	char line[512], text[sizeof(line) + 8];

	server_status(d->server, line, sizeof(line));
	if (!strcmp(line, d->status))
		return;
	snprintf(text, sizeof(text), "STATUS=%s", line);
	if (!notify_say(&d->notify, text))
		strcpy(d->status, line);
}

/* Words for the manager, when there is one. */
static uint64_t notify_run(struct daemon *d, uint64_t now)
{
	if (d->notify.sock < 0)
		return DEADLINE_NONE;		/* nobody listens */
	if (!d->ready)
		ready_say(d);
	if (!d->ready)
		return now + AGAIN_NS;
	if (now >= d->watchdog_due)
		watchdog_feed(d, now);
	if (now >= d->status_due) {
		status_say(d);
		d->status_due = now + STATUS_NS;
	}
	return d->watchdog_ns ? min(d->watchdog_due, d->status_due)
			      : d->status_due;
}

/* It has served for as long as ends are counted: the next may rely on it. */
static void confirm(struct daemon *d)
{
	int err;

	d->confirm_due = DEADLINE_NONE;
	if (d->ladder.step != LADDER_ADOPT)
		return;
	err = ladder_confirm(d->state.dirfd, d->opts->cfg);
	if (err)
		log_warn("the configuration could not be kept as the last good "
			 "one: %s", strerror(-err));
}

/* Does what is due; returns when to come again. */
static uint64_t chores_run(struct daemon *d)
{
	uint64_t now = now_ns();
	uint64_t due = notify_run(d, now);

	due = min(due, park_run(d->park, now));
	if (now >= d->confirm_due)
		confirm(d);
	return min(due, d->confirm_due);
}

/* -- replacing the process ----------------------------------------------------------------- */

static void reexec_failed(struct daemon *d, const char *why)
{
	struct server *s = d->server;

	snprintf(s->reexec_why, sizeof(s->reexec_why), "%s", why);
	log_err("not re-executed: %s; serving on", why);
}

/*
 * What is replaced is gone, so it must be known that the next one starts. It is
 * asked while this one serves on. 0: it does; -EAGAIN: it has not said yet.
 */
static int reexec_try(struct daemon *d, struct errmsg *e)
{
	struct server *s = d->server;
	int err = 0;

	if (!d->trial.pid)
		err = trial_begin(&d->trial, d->opts->binary,
				  d->opts->given_path, deadline_in(TRIAL_NS), e);
	if (!err)
		err = trial_poll(&d->trial, e);
	s->reexec_ns = err == -EAGAIN ? deadline_in(TRIAL_LOOK_NS) : 0;
	return err;
}

/* Returns when it could not be done, or not yet: then everything is as it was. */
static void reexec(struct daemon *d)
{
	struct server *s = d->server;
	struct errmsg e = { "" };
	int err;

	err = reexec_try(d, &e);
	if (err == -EAGAIN)
		return;
	/* what comes may take as long as the watchdog waits */
	watchdog_feed(d, now_ns());
	if (!err)
		err = server_drain(s, deadline_in(DRAIN_NS), &e);
	if (err) {
		reexec_failed(d, e.text);
		return;
	}
	watchdog_feed(d, now_ns());
	err = park_save(d->park);
	if (err) {
		reexec_failed(d, strerror(-err));
		return;
	}
	ladder_end(&d->ladder, false);
	log_notice("re-executing %s", d->opts->binary);
	execv(d->opts->binary, d->opts->argv);
	err = -errno;
	park_unsave(d->park);
	ladder_again(&d->ladder);
	errmsg_set(&e, err, "%.100s: %s", d->opts->binary, strerror(-err));
	reexec_failed(d, e.text);
}

/* -- the life of it ------------------------------------------------------------------------ */

/* Each extent and each client needs descriptors: take what we may have. */
static void raise_limits(void)
{
	struct rlimit rl;

	if (getrlimit(RLIMIT_NOFILE, &rl) < 0 || rl.rlim_cur == rl.rlim_max)
		return;
	rl.rlim_cur = rl.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &rl) < 0)
		log_warn("RLIMIT_NOFILE stays at its soft limit: %s",
			 strerror(errno));
}

static int serve(struct daemon *d)
{
	struct server *s = d->server;

	log_notice("kvmmd %s serves %u socket%s, epoch %016" PRIx64
		   ", admin %s", KVMM_VERSION_STRING, s->nr_listeners,
		   s->nr_listeners == 1 ? "" : "s", s->epoch,
		   s->cfg.admin_socket);
	d->confirm_due = s->cfg.crash_window_ns ?
			 deadline_in(s->cfg.crash_window_ns) : DEADLINE_NONE;
	while (!d->stop) {
		loop_once(s, min(chores_run(d), s->reexec_ns ? s->reexec_ns
							     : DEADLINE_NONE));
		if (s->reexec_ns && deadline_past(s->reexec_ns))
			reexec(d);
	}
	log_notice("stopping: %s", strsignal(d->stop));
	notify_say(&d->notify, "STOPPING=1");
	return 0;
}

/*
 * After a second unclean end the configuration is that which has served before,
 * if there is one; what is wrong with today's is for a person to see.
 */
static void config_confirmed(struct daemon *d, const char **path)
{
	static struct config last;	/* large */
	static char file[CONFIG_FILE_PATH + 32];
	struct config *c = d->opts->cfg;
	struct errmsg e = { "" };
	int err;

	if (d->ladder.step < LADDER_PLAIN)
		return;
	snprintf(file, sizeof(file), "%s/%s", c->state_dir, LADDER_CONFIRMED);
	err = d->opts->load(file, d->park, &last, &e);
	if (!err && !strcmp(last.state_dir, c->state_dir)) {
		log_warn("%s is used in the place of %s", file,
			 **path ? *path : "the built-in defaults");
		*c = last;
		*path = file;
	} else if (err && err != -ENOENT) {
		log_warn("%s", e.text);
	}
	ladder_apply(&d->ladder, c);
}

static void ladder_climb(struct daemon *d, const char **path)
{
	struct ladder_now now;
	struct errmsg e = { "" };
	char ended[64];

	ladder_now(&now, d->opts->cfg, d->state.dirfd, ended, sizeof(ended));
	if (ladder_begin(&d->ladder, d->state.dirfd, &now, &e))
		log_warn("%s", e.text);
	if (d->ladder.why[0])
		log_warn("%s", d->ladder.why);
	config_confirmed(d, path);
}

/* From the lock on the state folder to the sockets. */
static int start(struct daemon *d)
{
	const char *path = d->opts->config_path;
	struct server_opts o = {
		.cfg	= d->opts->cfg,
		.park	= d->park,
		.state	= &d->state,
		.ladder	= &d->ladder,
	};
	struct errmsg e = { "" };
	int err;

	raise_limits();
	err = state_open(d->opts->cfg->state_dir, &d->state, &e);
	if (err) {
		log_err("%s", e.text);
		return err;
	}
	ladder_climb(d, &path);
	o.config_path = path;
	err = server_create(&o, &d->server, &e);
	if (err) {
		log_err("%s", e.text);
		ladder_end(&d->ladder, false);	/* refused is not crashed */
		if (park_enabled(d->park))
			_exit(EXIT_FAILURE);	/* it may be left as it is */
	}
	return err;
}

/* 0 or -errno; may not return. */
static int stop(struct daemon *d, int err)
{
	int stopped = server_destroy(d->server, deadline_in(STOP_NS));

	if (stopped && stopped != -EBUSY) {
		/* the kernel still writes to memory that must not be freed */
		log_err("I/O is stuck after %" PRIu64 " s: leaving it behind",
			(uint64_t)(STOP_NS / NSEC_PER_SEC));
		_exit(EXIT_FAILURE);
	}
	if (!err)
		ladder_end(&d->ladder, true);
	if (stopped) {
		log_info("the kernel takes back the rest of the memory");
		_exit(err ? EXIT_FAILURE : EXIT_SUCCESS);
	}
	return err;
}

static int live(struct daemon *d, int sigfd)
{
	int err = server_live(d->server);

	if (err)
		log_warn("clients cannot see by memory whether kvmmd lives: %s",
			 strerror(-err));
	err = loop_add(d->server, &d->signals, sigfd, EPOLLIN);
	if (err)
		log_err("epoll: %s", strerror(-err));
	else
		err = serve(d);
	trial_end(&d->trial);
	loop_del(d->server, &d->signals);
	server_leave(d->server);
	return stop(d, err);
}

int process_run(const struct process_opts *opts)
{
	struct daemon d = {
		.opts		= opts,
		.park		= opts->park,
		.signals	= { .fd = -1, .ready = signal_ready },
		.state		= STATE_INIT,
		.notify		= NOTIFY_INIT,
		.trial		= TRIAL_INIT,
	};
	int sigfd = signals_open(), err;

	if (sigfd < 0) {
		log_err("signals: %s", strerror(-sigfd));
		return EXIT_FAILURE;
	}
	notify_open(&d.notify);
	err = start(&d);
	if (!err)
		err = live(&d, sigfd);
	state_close(&d.state);
	notify_close(&d.notify);
	close(sigfd);
	return err ? EXIT_FAILURE : EXIT_SUCCESS;
}
