/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd: options and configuration; its life is process.c's.
 *
 * It stays in the foreground and logs to stderr; who wants it in the background
 * has a service manager.
 */
#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/keeper/keeper.h"
#include "daemon/log.h"
#include "daemon/process.h"
#include "daemon/server/ladder.h"
#include "daemon/server/server.h"

#define EXIT_USAGE	2
#define EXIT_CONFIG	78	/* sysexits.h: do not start it again like this */

#define OPTION_ENDED	256	/* has no letter */

/* libc looks for it */
__attribute__((visibility("default")))
const char *argp_program_version = "kvmmd " KVMM_VERSION_STRING;

/**
 * struct options - the command line
 * @config:	NULL: the usual place, if there is a file
 */
struct options {
	const char	*config;
	bool		check, defaults, verbose, plain, keep, ended;
};

static const struct argp_option option_list[] = {
	{ "config", 'c', "FILE", 0, "Configuration (" CONFIG_PATH ")", 0 },
	{ "check", 'C', NULL, 0, "Judge the configuration and exit", 0 },
	{ "defaults", 'D', NULL, 0, "Print the default configuration", 0 },
	{ "foreground", 'f', NULL, 0,
	  "Log without the journal's priorities, also under systemd", 0 },
	{ "keep", 'k', NULL, 0,
	  "Run the daemon as a child, keep its memory when it crashes, and "
	  "start it again; where systemd does not", 0 },
	{ "ended", OPTION_ENDED, NULL, 0,
	  "For ExecStopPost=: note how the last one ended ($SERVICE_RESULT)",
	  0 },
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
	case 'k':
		o->keep = true;
		return 0;
	case OPTION_ENDED:
		o->ended = true;
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

/*
 * What the last daemon left is as good as available: without it "auto" would be
 * less from restart to restart.
 */
static int resolve(struct config *c, const struct park *park, struct errmsg *e)
{
	return config_resolve(c, meminfo("MemTotal"),
			      meminfo("MemAvailable") + park_bytes(park), e);
}

static int load(const char *path, const struct park *park, struct config *c,
		struct errmsg *e)
{
	int err = config_load(path, c, e);

	return err ? err : resolve(c, park, e);
}

static int configure(const struct options *o, const struct park *park,
		     struct config *c, const char **path, struct errmsg *e)
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
	return err ? err : resolve(c, park, e);
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

/* -- being started ---------------------------------------------------------------------- */

/* The program as it is installed: a later version may be there by then. */
static const char *binary_path(void)
{
	static const char gone[] = " (deleted)";
	static char path[4096];
	ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
	size_t len = sizeof(gone) - 1;

	if (n <= 0)
		return "/proc/self/exe";
	path[n] = '\0';
	if ((size_t)n > len && !strcmp(path + n - len, gone))
		path[(size_t)n - len] = '\0';
	return path;
}

/* Its child has the same command line; so has a child that lost its keeper. */
static bool be_keeper(const struct options *o)
{
	const char *keeper = getenv("KVMM_KEEPER");

	if (!o->keep || o->check || getenv(PARK_REEXEC_ENV))
		return false;
	return !keeper || strtol(keeper, NULL, 10) != getppid();
}

static int keep(char **argv)
{
	static struct keeper k;		/* large */

	argv[0] = (char *)binary_path();
	return keeper_run(&k, argv);
}

static int ended(const struct config *c)
{
	const char *how = getenv("SERVICE_RESULT");
	int err = how ? ladder_ended(c->state_dir, how) : -EINVAL;

	if (!err)
		return EXIT_SUCCESS;
	fprintf(stderr, "kvmmd: --ended: %s\n",
		how ? strerror(-err) : "no $SERVICE_RESULT");
	return EXIT_FAILURE;
}

static int run(const struct options *o, struct park *park, char **argv)
{
	static struct config cfg;	/* large: paths of many sockets */
	struct process_opts po = {
		.park	= park,
		.cfg	= &cfg,
		.load	= load,
		.given_path = o->config,
		.binary	= binary_path(),
		.argv	= argv,
	};
	struct errmsg e = { "" };

	if (configure(o, park, &cfg, &po.config_path, &e)) {
		log_err("%s", e.text);
		return EXIT_CONFIG;
	}
	log_set_level(o->verbose ? LOG_LVL_DEBUG : cfg.log_level);
	if (o->check)
		return check_only(&cfg, po.config_path);
	return o->ended ? ended(&cfg) : process_run(&po);
}

static int print_defaults(void)
{
	static struct config cfg;

	config_defaults(&cfg);
	return config_print(&cfg, stdout) ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
	struct options o = { .config = NULL };
	struct park *park;
	int rc;

	argp_err_exit_status = EXIT_USAGE;
	if (argp_parse(&parser, argc, argv, 0, NULL, &o))
		return EXIT_USAGE;
	umask(077);
	if (!o.plain)
		log_init();
	if (o.defaults)
		return print_defaults();
	if (be_keeper(&o))
		return keep(argv);
	if (park_create(&park)) {
		log_err("out of memory");
		return EXIT_FAILURE;
	}
	rc = run(&o, park, argv);
	park_destroy(park);
	return rc;
}
