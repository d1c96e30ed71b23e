/* SPDX-License-Identifier: Apache-2.0 */
/* The small inference engine as a child process; see engine_child.h. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/lib/engine_child.h"

#define MAX_ARGS	32
#define FIRST_BYTES	65536u
#define MAX_BYTES	(16u << 20)	/* of a line */
#define END_NS		(10 * NSEC_PER_SEC)

/* ---- start and end ------------------------------------------------------------ */

static void be_engine(int in, int out, char **argv) __attribute__((noreturn));

static void be_engine(int in, int out, char **argv)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	signal(SIGINT, SIG_IGN);	/* the parent ends it */
	dup2(in, STDIN_FILENO);
	dup2(out, STDOUT_FILENO);
	closefrom(3);
	execv(argv[0], argv);
	perror(argv[0]);
	_exit(127);
}

static int spawn(struct engine_child *e, const char *socket,
		 const char *const *args)
{
	const char *build = getenv("KVMM_BUILD");
	char *argv[MAX_ARGS], path[512];
	int n = 0, in[2], out[2];

	snprintf(path, sizeof(path), "%s/engine", build ? build : "build");
	argv[n++] = path;
	argv[n++] = (char *)"--socket";
	argv[n++] = (char *)socket;
	while (*args && n < MAX_ARGS - 1)
		argv[n++] = (char *)*args++;
	argv[n] = NULL;
	if (*args)
		return -E2BIG;
	if (pipe2(in, O_CLOEXEC))
		return -errno;
	if (pipe2(out, O_CLOEXEC)) {
		n = -errno;
		close(in[0]);
		close(in[1]);
		return n;
	}
	signal(SIGPIPE, SIG_IGN);
	fflush(NULL);
	e->pid = fork();
	if (!e->pid)
		be_engine(in[0], out[1], argv);
	n = e->pid < 0 ? -errno : 0;
	close(in[0]);
	close(out[1]);
	e->in = in[1];
	e->out = out[0];
	return n;
}

static void forget(struct engine_child *e)
{
	if (e->pid) {
		close(e->in);
		close(e->out);
	}
	free(e->buf);
	memset(e, 0, sizeof(*e));
}

int ec_start(struct engine_child *e, const char *socket,
	     const char *const *args, unsigned int ms)
{
	json_t *ready;
	int err;

	memset(e, 0, sizeof(*e));
	err = spawn(e, socket, args);
	if (!err)
		err = ec_event(e, "ready", ms, &ready);
	if (err)
		ec_kill(e);
	else
		json_decref(ready);
	return err;
}

void ec_kill(struct engine_child *e)
{
	if (e->pid > 0) {
		kill(e->pid, SIGKILL);
		while (waitpid(e->pid, NULL, 0) < 0 && errno == EINTR)
			;
	}
	forget(e);
}

int ec_end(struct engine_child *e)
{
	uint64_t deadline = deadline_in(END_NS);
	struct timespec tick = ns_to_timespec(NSEC_PER_MSEC);
	int status = 0;

	if (e->pid <= 0)
		return 0;
	ec_ask(e, json_pack("{s:s}", "cmd", "quit"));
	while (waitpid(e->pid, &status, WNOHANG) != e->pid) {
		if (deadline_past(deadline)) {
			ec_kill(e);
			return -ECHILD;
		}
		nanosleep(&tick, NULL);
	}
	forget(e);
	return WIFEXITED(status) && !WEXITSTATUS(status) ? 0 : -ECHILD;
}

/* ---- lines ---------------------------------------------------------------------- */

int ec_ask(struct engine_child *e, json_t *req)
{
	char *s = json_dumps(req, JSON_COMPACT);
	size_t n, at = 0;
	ssize_t did = 0;

	json_decref(req);
	if (!s)
		return -ENOMEM;
	n = strlen(s);
	s[n++] = '\n';			/* in place of its end */
	while (at < n) {
		did = write(e->in, s + at, n - at);
		if (did > 0)
			at += (size_t)did;
		else if (errno != EINTR)
			break;
	}
	free(s);
	return at < n ? -ECHILD : 0;
}

static int more_room(struct engine_child *e)
{
	size_t cap = e->cap ? 2 * e->cap : FIRST_BYTES;
	char *p = cap > MAX_BYTES ? NULL : realloc(e->buf, cap);

	if (!p)
		return -ENOMEM;
	e->buf = p;
	e->cap = cap;
	return 0;
}

/* The next line as an object, a new reference, by @deadline. */
static int next_line(struct engine_child *e, uint64_t deadline, json_t **o)
{
	struct pollfd p = { .fd = e->out, .events = POLLIN };
	char *nl;
	ssize_t n;

	while (!(nl = e->len ? memchr(e->buf, '\n', e->len) : NULL)) {
		uint64_t now = now_ns();
		int left = now < deadline ?
			   (int)((deadline - now) / NSEC_PER_MSEC) + 1 : 0;

		if (e->len == e->cap && more_room(e))
			return -ENOMEM;
		n = poll(&p, 1, left);
		if (n <= 0)
			return n ? -errno : -ETIMEDOUT;
		n = read(e->out, e->buf + e->len, e->cap - e->len);
		if (n <= 0)
			return n ? -errno : -ECHILD;
		e->len += (size_t)n;
	}
	*o = json_loadb(e->buf, (size_t)(nl - e->buf), 0, NULL);
	e->len -= (size_t)(nl + 1 - e->buf);
	memmove(e->buf, nl + 1, e->len);
	return *o ? 0 : -EPROTO;
}

int ec_event(struct engine_child *e, const char *name, unsigned int ms,
	     json_t **o)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);
	const char *got;
	int err;

	for (;;) {
		err = next_line(e, deadline, o);
		if (err)
			return err;
		got = json_string_value(json_object_get(*o, "event"));
		if (got && !strcmp(got, name))
			return 0;
		if (got && !strcmp(got, "error")) {
			fprintf(stderr, "the engine says: %s\n",
				json_string_value(json_object_get(*o, "why")));
			err = -EPROTO;
		}
		json_decref(*o);
		if (err)
			return err;
	}
}
