/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd: options, signals, systemd; the rest is the server's.
 *
 * It stays in the foreground and logs to stderr; who wants it in the background
 * has a service manager. Under systemd it takes its sockets from the manager
 * (by FileDescriptorName=), says READY=1 when it serves, keeps STATUS= up to
 * date and feeds the watchdog from the event loop, so that a loop that hangs is
 * found out.
 */
#include <argp.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/server/server.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define EXIT_USAGE	2
#define EXIT_CONFIG	78	/* sysexits.h: do not start it again like this */
#define STOP_NS		(5 * NSEC_PER_SEC)
#define STATUS_NS	(5 * NSEC_PER_SEC)

/* libc looks for it */
__attribute__((visibility("default")))
const char *argp_program_version = "kvmmd " KVMM_VERSION_STRING;

/**
 * struct options - the command line
 * @config:	NULL: the usual place, if there is a file
 */
struct options {
	const char	*config;
	bool		check, defaults, verbose, plain;
};

static const struct argp_option option_list[] = {
	{ "config", 'c', "FILE", 0, "Configuration (" CONFIG_PATH ")", 0 },
	{ "check", 'C', NULL, 0, "Judge the configuration and exit", 0 },
	{ "defaults", 'D', NULL, 0, "Print the default configuration", 0 },
	{ "foreground", 'f', NULL, 0,
	  "Log without the journal's priorities, also under systemd", 0 },
	{ "verbose", 'v', NULL, 0, "Log everything", 0 },
	{ NULL }
};

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
	struct options *o = state->input;

	switch (key) {
	case 'c':
		o->config = arg;
		return 0;
	case 'C':
		o->check = true;
		return 0;
	case 'D':
		o->defaults = true;
		return 0;
	case 'f':
		o->plain = true;
		return 0;
	case 'v':
		o->verbose = true;
		return 0;
	case ARGP_KEY_ARG:
		argp_error(state, "unexpected argument: %s", arg);
		return EINVAL;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp parser = {
	.options	= option_list,
	.parser		= parse_option,
	.doc		= "Owns the KV-cache memory of this host."
			  "\vExit status: 0 after an orderly stop, 1 when "
			  "something failed, 2 for a bad command line, 78 for a "
			  "configuration that is refused.",
};

/* -- configuration ---------------------------------------------------------------------- */

/* A line of /proc/meminfo, bytes; 0 when it is not there. */
static uint64_t meminfo(const char *name)
{
	char line[128];
	uint64_t kib = 0;
	FILE *f = fopen("/proc/meminfo", "re");

	if (!f)
		return 0;
	while (fgets(line, sizeof(line), f)) {
		size_t n = strlen(name);

		if (!strncmp(line, name, n) && line[n] == ':') {
			kib = strtoull(line + n + 1, NULL, 10);
			break;
		}
	}
	fclose(f);
	return kib * 1024;
}

static int configure(const struct options *o, struct config *c,
		     const char **path, struct errmsg *e)
{
	int err;

	*path = o->config ? o->config : CONFIG_PATH;
	err = config_load(*path, c, e);
	if (err == -ENOENT && !o->config) {
		log_notice("no %s: the built-in defaults are used",
			   CONFIG_PATH);
		*path = "";
		config_defaults(c);
		err = 0;
	}
	if (err)
		return err;
	return config_resolve(c, meminfo("MemTotal"), meminfo("MemAvailable"),
			      e);
}

static int check_only(const struct config *c, const char *path)
{
	const struct kvmm_policy_v0 *policy;
	struct errmsg e = { "" };

	if (mm_policy_load(c->policy, &policy, &e)) {
		fprintf(stderr, "kvmmd: %s\n", e.text);
		return EXIT_CONFIG;
	}
	printf("%s: ok\n", path[0] ? path : "built-in defaults");
	return 0;
}

/* -- signals ----------------------------------------------------------------------------- */

/**
 * struct daemon - the process
 * @stop:	signal that asked for the end, or 0
 */
struct daemon {
	struct server	*server;
	struct source	signals;
	int		stop;
	uint64_t	watchdog_ns, watchdog_due, status_due;
	char		status[512];
};

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

/* -- systemd ----------------------------------------------------------------------------- */

/**
 * struct activation - sockets that the manager opened for us
 */
struct activation {
	int		fd[CONFIG_MAX_SOCKETS];
	char		**name;
	unsigned int	nr;
};

static void activation_take(struct activation *a)
{
	int i, n = sd_listen_fds_with_names(1, &a->name);

	for (i = 0; i < n; i++) {
		int fd = SD_LISTEN_FDS_START + i;

		if (a->nr >= CONFIG_MAX_SOCKETS ||
		    sd_is_socket_unix(fd, SOCK_SEQPACKET, 1, NULL, 0) <= 0 ||
		    set_nonblock(fd)) {
			log_warn("socket activation: \"%s\" is not a listening "
				 "SOCK_SEQPACKET socket: closed", a->name[i]);
			close(fd);
			continue;
		}
		/* names move along with what is kept */
		if ((unsigned int)i != a->nr) {
			char *keep = a->name[a->nr];

			a->name[a->nr] = a->name[i];
			a->name[i] = keep;
		}
		a->fd[a->nr++] = fd;
	}
}

static void activation_free(struct activation *a)
{
	char **p;

	for (p = a->name; p && *p; p++)
		free(*p);
	free(a->name);
}

/* Does what is due; returns when to come again. */
static uint64_t notify_run(struct daemon *d)
{
	uint64_t now = now_ns();
	char line[512];

	if (!d->status_due)
		return DEADLINE_NONE;		/* nobody listens */
	if (d->watchdog_ns && now >= d->watchdog_due) {
		sd_notify(0, "WATCHDOG=1");
		d->watchdog_due = now + d->watchdog_ns;
	}
	if (now >= d->status_due) {
		server_status(d->server, line, sizeof(line));
		if (strcmp(line, d->status)) {
			sd_notifyf(0, "STATUS=%s", line);
			strcpy(d->status, line);
		}
		d->status_due = now + STATUS_NS;
	}
	return d->watchdog_ns ? min(d->watchdog_due, d->status_due)
			      : d->status_due;
}

static void notify_ready(struct daemon *d)
{
	uint64_t usec = 0;

	if (sd_notify(0, "READY=1") <= 0)
		return;
	if (sd_watchdog_enabled(0, &usec) > 0)
		d->watchdog_ns = usec * NSEC_PER_USEC / 3;
	d->status_due = 1;
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
	notify_ready(d);
	while (!d->stop)
		loop_once(s, notify_run(d));
	log_notice("stopping: %s", strsignal(d->stop));
	sd_notify(0, "STOPPING=1");
	return 0;
}

static int run(const struct config *c, const char *path)
{
	struct daemon d = { .signals = { .fd = -1, .ready = signal_ready } };
	struct activation act = { .nr = 0 };
	struct server_opts o = { .cfg = c, .config_path = path };
	struct errmsg e = { "" };
	int sigfd, err, stopped;

	sigfd = signals_open();
	if (sigfd < 0) {
		log_err("signals: %s", strerror(-sigfd));
		return EXIT_FAILURE;
	}
	raise_limits();
	activation_take(&act);
	o.inherited = act.fd;
	o.inherited_name = act.name;
	o.nr_inherited = act.nr;
	err = server_create(&o, &d.server, &e);
	activation_free(&act);
	if (err) {
		log_err("%s", e.text);
		close(sigfd);
		return EXIT_FAILURE;
	}
	err = server_live(d.server);
	if (err)
		log_warn("clients cannot see by memory whether kvmmd lives: %s",
			 strerror(-err));
	err = loop_add(d.server, &d.signals, sigfd, EPOLLIN);
	if (err)
		log_err("epoll: %s", strerror(-err));
	else
		err = serve(&d);
	loop_del(d.server, &d.signals);
	close(sigfd);
	server_leave(d.server);
	stopped = server_destroy(d.server, deadline_in(STOP_NS));
	if (stopped == -EBUSY) {
		log_info("the kernel takes back the rest of the memory");
		_exit(err ? EXIT_FAILURE : EXIT_SUCCESS);
	}
	if (stopped) {
		/* the kernel still writes to memory that must not be freed */
		log_err("I/O is stuck after %" PRIu64 " s: leaving it behind",
			(uint64_t)(STOP_NS / NSEC_PER_SEC));
		_exit(EXIT_FAILURE);
	}
	return err ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
	static struct config cfg;	/* large: paths of many sockets */
	struct options o = { .config = NULL };
	struct errmsg e = { "" };
	const char *path;

	argp_err_exit_status = EXIT_USAGE;
	if (argp_parse(&parser, argc, argv, 0, NULL, &o))
		return EXIT_USAGE;
	umask(077);
	if (!o.plain)
		log_init();
	if (o.defaults) {
		config_defaults(&cfg);
		return config_print(&cfg, stdout) ? EXIT_FAILURE : EXIT_SUCCESS;
	}
	if (configure(&o, &cfg, &path, &e)) {
		log_err("%s", e.text);
		return EXIT_CONFIG;
	}
	log_set_level(o.verbose ? LOG_LVL_DEBUG : cfg.log_level);
	if (o.check)
		return check_only(&cfg, path);
	return run(&cfg, path);
}
