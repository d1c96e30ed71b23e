/* SPDX-License-Identifier: Apache-2.0 */
/* A kvmmd as a child process; see daemon.h. */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include <kvmm/admin.h>

#include "ipc/base/clock.h"
#include "tests/lib/daemon.h"

#define ADMIN_TIMEOUT_MS	10000
#define LOG_TAIL_BYTES		4096

static void sleep_ms(unsigned int ms)
{
	struct timespec ts = ns_to_timespec(ms * NSEC_PER_MSEC);

	nanosleep(&ts, NULL);
}

/* ---- folders --------------------------------------------------------------- */

static int rm_one(const char *path, const struct stat *st, int type,
		  struct FTW *ftw)
{
	remove(path);
	return 0;
}

void td_rmtree(const char *path)
{
	if (path && *path)
		nftw(path, rm_one, 16, FTW_DEPTH | FTW_PHYS);
}

int td_tmpdir(const char *parent, const char *prefix, char *path, size_t len)
{
	if (!parent)
		parent = getenv("TMPDIR");
	if (!parent || !*parent)
		parent = "/var/tmp";
	if ((size_t)snprintf(path, len, "%s/%s-XXXXXX", parent, prefix) >= len)
		return -ENAMETOOLONG;
	if (!mkdtemp(path)) {
		int err = -errno;

		*path = '\0';
		return err;
	}
	return 0;
}

int td_pin_cpu(pid_t pid, int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	return sched_setaffinity(pid, sizeof(set), &set) ? -errno : 0;
}

/* ---- configuration --------------------------------------------------------- */

static json_t *config_sockets(const struct test_daemon *d)
{
	json_t *list = json_array();
	unsigned int i;

	for (i = 0; i < TD_MAX_SOCKETS; i++) {
		const struct td_socket *s = &d->opts.socket[i];
		char path[TD_MAX_PATH * 2];

		if (i && !s->name)
			break;
		snprintf(path, sizeof(path), "%s/%s", d->dir,
			 s->name ? s->name : "kvmm.sock");
		json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}",
			"path", path,
			"tenant", s->tenant ? s->tenant : "default",
			"rights", s->rights ? s->rights : "rw",
			"mode", s->mode ? s->mode : "on"));
	}
	return list;
}

/* Bytes as the configuration wants them: text. */
static json_t *json_bytes(uint64_t bytes)
{
	char text[32];

	snprintf(text, sizeof(text), "%" PRIu64, bytes);
	return json_string(text);
}

static json_t *config_nodes(const struct test_daemon *d)
{
	const struct td_opts *o = &d->opts;
	json_t *list = json_array(), *nvme, *gang = NULL;
	json_t *dram = json_pack("{s:s, s:s, s:o, s:o}", "name", "dram0",
				 "kind", "host",
				 "size", json_bytes(o->dram_bytes),
				 "size_max", json_bytes(o->dram_max));

	json_array_append_new(list, dram);
	if (o->gang) {
		uint64_t bytes = o->gang_bytes ? o->gang_bytes : 64 << 20;

		gang = json_pack("{s:s, s:s, s:i, s:o, s:o}", "name", "gang0",
				 "kind", "host", "gang", (int)o->gang,
				 "size", json_bytes(bytes),
				 "size_max", json_bytes(bytes));
		json_array_append_new(list, gang);
	}
	if (!o->nvme_bytes)
		return list;
	json_object_set_new(dram, "below", json_string("nvme0"));
	if (gang)
		json_object_set_new(gang, "below", json_string("nvme0"));
	nvme = json_pack("{s:s, s:s, s:s, s:o, s:s, s:s, s:f}",
			 "name", "nvme0", "kind", "nvme", "path", d->nvme,
			 "size", json_bytes(o->nvme_bytes),
			 "engine", o->engine ? o->engine : "auto",
			 "admission", o->admission ? o->admission : "all",
			 "writes_per_day", o->writes_per_day);
	if (o->io_timeout)
		json_object_set_new(nvme, "io_timeout",
				    json_string(o->io_timeout));
	if (o->free_floor_pct)
		json_object_set_new(nvme, "free_floor_pct",
				    json_integer(o->free_floor_pct));
	json_array_append_new(list, nvme);
	return list;
}

static int write_config(const struct test_daemon *d)
{
	/* killed on purpose and often: that says nothing against what is kept */
	json_t *cfg = json_pack("{s:s, s:{s:s}, s:{s:s}, s:o, s:o}",
				"state_dir", d->dir,
				"admin", "socket", d->admin,
				"timeouts", "crash_window", "0s",
				"sockets", config_sockets(d),
				"nodes", config_nodes(d));
	json_error_t je;
	int err = 0;

	if (cfg && d->opts.policy)
		json_object_set_new(cfg, "policy", json_string(d->opts.policy));
	if (cfg && d->opts.config) {
		json_t *more = json_loads(d->opts.config, 0, &je);

		if (!more || json_object_update_recursive(cfg, more)) {
			fprintf(stderr, "configuration: %s\n", je.text);
			err = -EINVAL;
		}
		json_decref(more);
	}
	if (!err && (!cfg || json_dump_file(cfg, d->config, JSON_INDENT(2))))
		err = -EIO;
	json_decref(cfg);
	return err;
}

int td_init(struct test_daemon *d, const struct td_opts *o)
{
	int err;

	memset(d, 0, sizeof(*d));
	if (o)
		d->opts = *o;
	if (!d->opts.dram_bytes)
		d->opts.dram_bytes = 256u << 20;
	if (!d->opts.dram_max)
		d->opts.dram_max = d->opts.dram_bytes;
	if (!d->opts.binary)
		d->opts.binary = getenv("KVMMD");
	if (!d->opts.binary)
		d->opts.binary = "build/test/kvmmd";

	err = td_tmpdir(d->opts.parent_dir, "kvmm", d->dir, sizeof(d->dir));
	if (err)
		return err;
	/* A socket's path has 107 bytes; the longest name here has 10. */
	if (strlen(d->dir) > 90) {
		err = -ENAMETOOLONG;
		goto out_rm;
	}
	snprintf(d->socket, sizeof(d->socket), "%.90s/%.100s", d->dir,
		 d->opts.socket[0].name ? d->opts.socket[0].name : "kvmm.sock");
	snprintf(d->admin, sizeof(d->admin), "%.90s/admin.sock", d->dir);
	if (d->opts.nvme_path)
		snprintf(d->nvme, sizeof(d->nvme), "%s", d->opts.nvme_path);
	else
		snprintf(d->nvme, sizeof(d->nvme), "%.90s/nvme0.kv", d->dir);
	snprintf(d->config, sizeof(d->config), "%.90s/kvmmd.json", d->dir);
	snprintf(d->log, sizeof(d->log), "%.90s/kvmmd.log", d->dir);
	err = write_config(d);
	if (err)
		goto out_rm;
	return 0;

out_rm:
	td_rmtree(d->dir);
	d->dir[0] = '\0';
	return err;
}

int td_configure(struct test_daemon *d)
{
	return write_config(d);
}

/* ---- the process ----------------------------------------------------------- */

static void child_exec(const struct test_daemon *d, pid_t parent)
	__attribute__((noreturn));

static void child_exec(const struct test_daemon *d, pid_t parent)
{
	const char *const *e;
	int fd;

	/* a keeper ends its daemon first */
	prctl(PR_SET_PDEATHSIG, d->opts.keep ? SIGTERM : SIGKILL);
	if (getppid() != parent)
		_exit(127);		/* it died before the line above */
	fd = open("/dev/null", O_RDONLY);
	if (fd >= 0)
		dup2(fd, 0);
	if (!d->opts.log_stderr) {
		fd = open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600);
		if (fd >= 0) {
			dup2(fd, 1);
			dup2(fd, 2);
		}
	}
	unsetenv("NOTIFY_SOCKET");
	unsetenv("LISTEN_FDS");
	for (e = d->opts.env; e && *e; e++)
		putenv((char *)*e);
	if (d->opts.cpu)
		td_pin_cpu(0, d->opts.cpu - 1);
	if (d->opts.keep)
		execl(d->opts.binary, d->opts.binary, "--keep", "--config",
		      d->config, (char *)NULL);
	else
		execl(d->opts.binary, "kvmmd", "--config", d->config,
		      (char *)NULL);
	fprintf(stderr, "%s: %s\n", d->opts.binary, strerror(errno));
	_exit(127);
}

int td_spawn(struct test_daemon *d)
{
	pid_t me = getpid();
	pid_t pid;

	if (d->pid)
		return -EALREADY;
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		return -errno;
	if (!pid)
		child_exec(d, me);
	d->pid = pid;
	d->paused = false;
	return 0;
}

static void reaped(struct test_daemon *d, int status)
{
	d->status = status;
	d->pid = 0;
	d->paused = false;
}

bool td_running(struct test_daemon *d)
{
	int status;

	if (!d->pid)
		return false;
	if (waitpid(d->pid, &status, WNOHANG) == d->pid)
		reaped(d, status);
	return d->pid != 0;
}

static bool accepts(const char *path, int type)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	bool ok;

	if (fd < 0)
		return false;
	snprintf(sa.sun_path, sizeof(sa.sun_path), "%.*s",
		 (int)sizeof(sa.sun_path) - 1, path);
	ok = !connect(fd, (struct sockaddr *)&sa, sizeof(sa));
	close(fd);
	return ok;
}

/*
 * Client sockets are only looked at: the daemon counts a connection that says
 * nothing as a client that broke off.
 */
static bool serves(struct test_daemon *d)
{
	unsigned int i;

	if (!accepts(d->admin, SOCK_STREAM) || td_admin(d, "ping", NULL))
		return false;
	for (i = 0; i < TD_MAX_SOCKETS; i++) {
		const char *name = d->opts.socket[i].name;
		char path[TD_MAX_PATH * 2];
		struct stat st;

		if (i && !name)
			break;
		snprintf(path, sizeof(path), "%s/%s", d->dir,
			 name ? name : "kvmm.sock");
		if (stat(path, &st) || !S_ISSOCK(st.st_mode))
			return false;
	}
	return true;
}

int td_wait_ready(struct test_daemon *d, unsigned int timeout_ms)
{
	uint64_t deadline = deadline_in(timeout_ms * NSEC_PER_MSEC);

	for (;;) {
		if (!td_running(d)) {
			td_dump_log(d);
			return -ECHILD;
		}
		if (serves(d))
			return 0;
		if (deadline_past(deadline)) {
			td_dump_log(d);
			return -ETIMEDOUT;
		}
		sleep_ms(2);
	}
}

int td_start(struct test_daemon *d)
{
	int err = td_spawn(d);

	return err ? err : td_wait_ready(d, TD_START_MS);
}

void td_kill(struct test_daemon *d)
{
	int status;

	if (!d->pid)
		return;
	kill(d->pid, SIGKILL);
	while (waitpid(d->pid, &status, 0) < 0 && errno == EINTR)
		;
	reaped(d, status);
}

int td_stop(struct test_daemon *d)
{
	uint64_t deadline = deadline_in(TD_STOP_MS * NSEC_PER_MSEC);

	if (!td_running(d))
		return -ESRCH;
	if (d->paused)
		td_resume(d);
	kill(d->pid, SIGTERM);
	while (td_running(d)) {
		if (deadline_past(deadline)) {
			td_dump_log(d);
			td_kill(d);
			return -ETIMEDOUT;
		}
		sleep_ms(1);
	}
	return WIFEXITED(d->status) ? WEXITSTATUS(d->status)
				    : 128 + WTERMSIG(d->status);
}

int td_pause(struct test_daemon *d)
{
	int status;

	if (!d->pid)
		return -ESRCH;
	if (kill(d->pid, SIGSTOP))
		return -errno;
	while (waitpid(d->pid, &status, WUNTRACED) < 0)
		if (errno != EINTR)
			return -errno;
	if (!WIFSTOPPED(status)) {
		reaped(d, status);
		return -ESRCH;
	}
	d->paused = true;
	return 0;
}

int td_resume(struct test_daemon *d)
{
	if (!d->pid)
		return -ESRCH;
	d->paused = false;
	return kill(d->pid, SIGCONT) ? -errno : 0;
}

pid_t td_kept(struct test_daemon *d)
{
	json_t *r = NULL;
	int err = td_admin(d, "status", &r);
	pid_t pid = (pid_t)json_integer_value(json_object_get(r, "pid"));

	json_decref(r);
	return err ? err : pid > 1 ? pid : -EPROTO;
}

int td_crash(struct test_daemon *d, uint64_t *gap_ns)
{
	uint64_t deadline = deadline_in(TD_START_MS * NSEC_PER_MSEC), t0;
	pid_t was = td_kept(d), is;

	if (was < 0)
		return was;
	t0 = now_ns();
	if (kill(was, SIGKILL))
		return -errno;
	do {
		if (deadline_past(deadline) || !td_running(d)) {
			td_dump_log(d);
			return -ETIMEDOUT;
		}
		sleep_ms(1);
		is = serves(d) ? td_kept(d) : -EAGAIN;
	} while (is < 0 || is == was);
	if (gap_ns)
		*gap_ns = now_ns() - t0;
	return 0;
}

void td_fini(struct test_daemon *d)
{
	if (d->pid && d->opts.keep)
		td_stop(d);
	if (d->pid)
		td_kill(d);
	td_rmtree(d->dir);
	d->dir[0] = '\0';
}

/* ---- talking to it ----------------------------------------------------------- */

int td_admin(struct test_daemon *d, const char *request, json_t **reply)
{
	char cmd[128];
	char *text = NULL;
	json_error_t je;
	json_t *root;
	int err;

	if (reply)
		*reply = NULL;
	if (request[0] != '{') {
		snprintf(cmd, sizeof(cmd), "{\"cmd\": \"%.64s\"}", request);
		request = cmd;
	}
	err = kvmm_admin_call(d->admin, request, &text, ADMIN_TIMEOUT_MS);
	if (err)
		return err;
	root = json_loads(text, 0, &je);
	free(text);
	if (!root)
		return -EPROTO;
	if (!json_is_true(json_object_get(root, "ok"))) {
		err = (int)json_integer_value(json_object_get(root, "errno"));
		err = err > 0 ? -err : err ? err : -EPROTO;
	}
	if (reply && !err)
		*reply = root;
	else
		json_decref(root);
	return err;
}

void td_dump_log(const struct test_daemon *d)
{
	char buf[LOG_TAIL_BYTES];
	struct stat st;
	ssize_t n;
	int fd;

	if (d->opts.log_stderr || !d->dir[0])
		return;
	fd = open(d->log, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (!fstat(fd, &st) && st.st_size > (off_t)sizeof(buf))
		lseek(fd, -(off_t)sizeof(buf), SEEK_END);
	n = read(fd, buf, sizeof(buf));
	close(fd);
	if (n > 0)
		fprintf(stderr, "--- end of kvmmd's log\n%.*s\n---\n", (int)n,
			buf);
}

const char *td_ending(struct test_daemon *d, char *buf, size_t len)
{
	if (td_running(d))
		snprintf(buf, len, "kvmmd runs");
	else if (WIFSIGNALED(d->status))
		snprintf(buf, len, "kvmmd was killed by signal %d (%s)%s",
			 WTERMSIG(d->status), strsignal(WTERMSIG(d->status)),
			 WCOREDUMP(d->status) ? ", core dumped" : "");
	else
		snprintf(buf, len, "kvmmd exited with status %d",
			 WEXITSTATUS(d->status));
	return buf;
}
