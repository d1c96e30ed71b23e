/* SPDX-License-Identifier: Apache-2.0 */
/* Asking the installed program whether it would start; see trial.h. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/trial.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

extern char **environ;

/* No signal of ours is blocked in it, and it writes to @to. */
static int trial_spawn(struct trial *t, const char *binary, const char *config,
		       int to)
{
	char *argv[] = {
		(char *)binary, (char *)"--check", (char *)"--foreground",
		config ? (char *)"--config" : NULL, (char *)config, NULL,
	};
	posix_spawn_file_actions_t fa;
	posix_spawnattr_t attr;
	sigset_t none;
	int err;

	if (posix_spawn_file_actions_init(&fa))
		return -ENOMEM;
	if (posix_spawnattr_init(&attr)) {
		posix_spawn_file_actions_destroy(&fa);
		return -ENOMEM;
	}
	sigemptyset(&none);
	err = posix_spawn_file_actions_addopen(&fa, STDOUT_FILENO, "/dev/null",
					       O_WRONLY, 0);
	if (!err)
		err = posix_spawn_file_actions_adddup2(&fa, to, STDERR_FILENO);
	if (!err)
		err = posix_spawnattr_setsigmask(&attr, &none);
	if (!err)
		err = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
	if (!err)
		err = posix_spawn(&t->pid, binary, &fa, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&fa);
	return -err;
}

/* What it has said; more than there is room for is read and dropped. */
static void trial_read(struct trial *t)
{
	char rest[256];
	ssize_t n;

	do {
		size_t room = sizeof(t->text) - 1 - t->len;

		n = room ? read(t->out, t->text + t->len, room)
			 : read(t->out, rest, sizeof(rest));
		if (n > 0 && room)
			t->len += (size_t)n;
	} while (n > 0);
	t->text[t->len] = '\0';
}

/* Its last line is the reason; "kvmmd: " in front of that says nothing new. */
static const char *last_line(struct trial *t)
{
	static const char own[] = "kvmmd: ", bad[] = "err: ";
	char *line;

	while (t->len && t->text[t->len - 1] == '\n')
		t->text[--t->len] = '\0';
	line = strrchr(t->text, '\n');
	line = line ? line + 1 : t->text;
	if (!strncmp(line, own, strlen(own)))
		line += strlen(own);
	if (!strncmp(line, bad, strlen(bad)))
		line += strlen(bad);
	return line;
}

int trial_begin(struct trial *t, const char *binary, const char *config,
		uint64_t deadline_ns, struct errmsg *e)
{
	int fd[2], err;

	trial_end(t);
	*t = (struct trial){ .due_ns = deadline_ns };
	if (pipe2(fd, O_CLOEXEC | O_NONBLOCK) < 0) {
		t->out = -1;
		return errmsg_set(e, -errno, "pipe: %s", strerror(errno));
	}
	t->out = fd[0];
	err = trial_spawn(t, binary, config, fd[1]);
	close(fd[1]);
	if (!err)
		return 0;
	t->pid = 0;
	trial_end(t);
	return errmsg_set(e, err, "%.100s: %s", binary, strerror(-err));
}

int trial_poll(struct trial *t, struct errmsg *e)
{
	int status = 0, err;
	pid_t pid;

	pid = waitpid(t->pid, &status, WNOHANG);
	trial_read(t);
	if (pid != t->pid) {
		if (!deadline_past(t->due_ns))
			return -EAGAIN;
		trial_end(t);
		return errmsg_set(e, -ETIMEDOUT, "its --check does not answer");
	}
	t->pid = 0;
	if (WIFSIGNALED(status))
		err = errmsg_set(e, -EINVAL, "its --check: signal %d",
				 WTERMSIG(status));
	else if (WEXITSTATUS(status))
		err = errmsg_set(e, -EINVAL, "it would not start: %s",
				 last_line(t));
	else
		err = 0;
	trial_end(t);
	return err;
}

void trial_end(struct trial *t)
{
	if (t->pid) {
		kill(t->pid, SIGKILL);
		waitpid(t->pid, NULL, 0);
		t->pid = 0;
	}
	close_fd(&t->out);
}
