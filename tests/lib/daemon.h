/* SPDX-License-Identifier: Apache-2.0 */
/*
 * daemon.h - a kvmmd as a child process, for tests, benches and the demo
 *
 * A struct test_daemon owns a folder of its own: configuration, sockets, NVMe
 * file, log. The daemon in it can be started, stopped, killed, stopped in its
 * tracks and started again over the same files. It dies with its parent, and
 * td_fini() leaves nothing behind.
 *
 *	struct test_daemon d;
 *	int err = td_init(&d, &(struct td_opts){ .nvme_bytes = 1ull << 30 });
 *
 *	if (!err)
 *		err = td_start(&d);
 *	... kvmm_open(d.socket, ...) ...
 *	td_fini(&d);
 *
 * Nothing here asserts or exits: a failure is an errno and a line on stderr.
 */
#ifndef KVMM_TESTS_LIB_DAEMON_H
#define KVMM_TESTS_LIB_DAEMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct json_t;

#define TD_MAX_PATH	256
#define TD_MAX_SOCKETS	4
#define TD_START_MS	10000
#define TD_STOP_MS	10000

/**
 * struct td_socket - a client socket
 * @name:	file name in the daemon's folder
 * @tenant:	NULL = "default"
 * @rights:	"rw" or "ro"; NULL = "rw"
 * @mode:	"on", "observe", ...; NULL = "on"
 */
struct td_socket {
	const char	*name;
	const char	*tenant;
	const char	*rights;
	const char	*mode;
};

/**
 * struct td_opts - what the daemon should be like; 0 and NULL mean a default
 * @binary:	NULL = $KVMMD, else build/test/kvmmd
 * @parent_dir:	folder for the daemon's own; NULL = $TMPDIR, else /var/tmp (on
 *		disk, where /tmp may be memory that has no O_DIRECT)
 * @dram_bytes:	of node dram0; 256 MiB
 * @dram_max:	size_max of it; @dram_bytes
 * @nvme_bytes:	of node nvme0 below dram0; 0 = no such node
 * @nvme_path:	of nvme0, a block device; NULL = a file in its folder
 * @gang:	parts of a node gang0 beside dram0, above nvme0; 0 = no such node
 * @gang_bytes:	of it, all parts together; 64 MiB
 * @engine:	of nvme0: "auto", "io_uring", "threads"; NULL = "auto"
 * @io_timeout:	of nvme0, as "3s"; NULL = the daemon's default
 * @free_floor_pct: of nvme0; 0 = the daemon's default
 * @admission:	of nvme0; NULL = "all", so that what is evicted can be counted on
 * @writes_per_day: of nvme0; 0 = no limit
 * @policy:	NULL = the daemon's default
 * @socket:	client sockets; none = one, "kvmm.sock"
 * @config:	JSON text, merged into the generated configuration; arrays are
 *		replaced, objects merged
 * @env:	NULL-terminated "NAME=value" strings for the child, or NULL
 * @keep:	under a keeper (kvmmd --keep), whose process is @pid then: it starts
 *		the daemon again when that crashes
 * @cpu:	pin it to CPU @cpu - 1; 0 = do not
 * @log_stderr:	its log goes to stderr, not into a file
 */
struct td_opts {
	const char		*binary;
	const char		*parent_dir;
	uint64_t		dram_bytes;
	uint64_t		dram_max;
	uint64_t		nvme_bytes;
	const char		*nvme_path;
	unsigned int		gang;
	uint64_t		gang_bytes;
	const char		*engine;
	const char		*io_timeout;
	unsigned int		free_floor_pct;
	const char		*admission;
	double			writes_per_day;
	const char		*policy;
	struct td_socket	socket[TD_MAX_SOCKETS];
	const char		*config;
	const char *const	*env;
	int			cpu;
	bool			log_stderr;
	bool			keep;
};

/**
 * struct test_daemon - one of them
 * @pid:	0 when it does not run
 * @dir:	its folder; "" when there is none
 * @socket:	path of the first client socket
 * @admin:	path of the admin socket
 * @nvme:	path of the NVMe file
 * @config:	path of the configuration
 * @log:	path of the log
 * @status:	wait status of the last process that ended
 * @paused:	stopped by td_pause()
 */
struct test_daemon {
	pid_t		pid;
	char		dir[TD_MAX_PATH];
	char		socket[TD_MAX_PATH];
	char		admin[TD_MAX_PATH];
	char		nvme[TD_MAX_PATH];
	char		config[TD_MAX_PATH];
	char		log[TD_MAX_PATH];
	int		status;
	bool		paused;
	struct td_opts	opts;
};

/**
 * td_init() - make the folder and the configuration; start nothing
 * @o:	strings in it stay the caller's and must outlive @d; NULL = defaults
 * Return: 0 or -errno; @d needs no fini then.
 */
int td_init(struct test_daemon *d, const struct td_opts *o);

/** td_fini() - kill what runs, remove the folder; fine twice and on zeroes */
void td_fini(struct test_daemon *d);

/** td_configure() - write its configuration again, from @d->opts; 0 or -errno */
int td_configure(struct test_daemon *d);

/**
 * td_start() - start it and wait until it serves
 *
 * Serves: the admin socket answers a ping and every client socket accepts.
 * Return: 0; -EALREADY; -ETIMEDOUT; -ECHILD (it exited, @d->status says how);
 * the end of its log goes to stderr on failure.
 */
int td_start(struct test_daemon *d);

/** td_spawn() - start it and do not wait */
int td_spawn(struct test_daemon *d);

/** td_wait_ready() - the second half of td_start() */
int td_wait_ready(struct test_daemon *d, unsigned int timeout_ms);

/**
 * td_stop() - SIGTERM, wait, SIGKILL when it takes too long
 * Return: exit status, 128 + signal, or -ETIMEDOUT when it had to be killed.
 */
int td_stop(struct test_daemon *d);

/** td_kill() - SIGKILL and reap */
void td_kill(struct test_daemon *d);

/**
 * td_kept() - with opts.keep: the daemon's own process, by its word
 * Return: its pid, or -errno.
 */
pid_t td_kept(struct test_daemon *d);

/**
 * td_crash() - with opts.keep: SIGKILL the daemon, and wait until another serves
 * @gap_ns:	from the one to the other; may be NULL
 * Return: 0 or -errno.
 */
int td_crash(struct test_daemon *d, uint64_t *gap_ns);

/** td_pause() - SIGSTOP; on return it has really stopped. 0 or -errno */
int td_pause(struct test_daemon *d);

/** td_resume() - SIGCONT; 0 or -errno */
int td_resume(struct test_daemon *d);

/** td_running() - is the process there? Reaps it if it is not. */
bool td_running(struct test_daemon *d);

/**
 * td_admin() - one admin request
 * @request:	JSON object, or a bare command name as "status"
 * @reply:	the parsed reply, a new reference; may be NULL
 * Return: 0 when the reply says ok; else the errno it names or the transport's.
 */
int td_admin(struct test_daemon *d, const char *request,
	     struct json_t **reply);

/** td_dump_log() - the end of its log to stderr */
void td_dump_log(const struct test_daemon *d);

/**
 * td_ending() - in words, how the last process ended or that one runs
 * Return: @buf
 */
const char *td_ending(struct test_daemon *d, char *buf, size_t len);

/* -- small things that go with it -------------------------------------------- */

/** td_tmpdir() - make a folder "@prefix-XXXXXX" as td_init() would; 0, -errno */
int td_tmpdir(const char *parent, const char *prefix, char *path, size_t len);

/** td_rmtree() - remove a folder and what is in it; never follows a link */
void td_rmtree(const char *path);

/** td_pin_cpu() - pin a process (0 = this one) to a CPU; -errno is no tragedy */
int td_pin_cpu(pid_t pid, int cpu);

#endif
