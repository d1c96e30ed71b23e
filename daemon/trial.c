/* SPDX-License-Identifier: Apache-2.0 */
/* Asking the installed program whether it would start; see trial.h. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/trial.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define ROUND_NS	(10 * NSEC_PER_MSEC)

extern char **environ;

/**
 * struct trial - one of them
 * @out:	reads what it says on stderr
 * @text:	the begin of that
 */
struct trial {
	pid_t	pid;
	int	out;
	char	text[256];
	size_t	len;
};

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

/* Its wait status, or -ETIMEDOUT and it is no more. */
static int trial_wait(struct trial *t, uint64_t deadline_ns, int *status)
{
	struct timespec ts = ns_to_timespec(ROUND_NS);

	for (;;) {
		pid_t pid = waitpid(t->pid, status, WNOHANG);

		trial_read(t);
		if (pid == t->pid)
			return 0;
		if (pid < 0 && errno != EINTR)
			return -errno;
		if (deadline_past(deadline_ns))
			break;
		nanosleep(&ts, NULL);
	}
	kill(t->pid, SIGKILL);
	waitpid(t->pid, status, 0);
	return -ETIMEDOUT;
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

int trial_run(const char *binary, const char *config, uint64_t deadline_ns,
	      struct errmsg *e)
{
	struct trial t = { .pid = 0 };
	int fd[2], status = 0, err;

	if (pipe2(fd, O_CLOEXEC | O_NONBLOCK) < 0)
		return errmsg_set(e, -errno, "pipe: %s", strerror(errno));
	t.out = fd[0];
	err = trial_spawn(&t, binary, config, fd[1]);
	close(fd[1]);
	if (err)
		errmsg_set(e, err, "%.100s: %s", binary, strerror(-err));
	else
		err = trial_wait(&t, deadline_ns, &status);
	if (err == -ETIMEDOUT)
		errmsg_set(e, err, "%.100s --check does not answer", binary);
	close(fd[0]);
	if (err)
		return err;
	if (WIFEXITED(status) && !WEXITSTATUS(status))
		return 0;
	if (WIFSIGNALED(status))
		return errmsg_set(e, -EINVAL, "%.100s --check: signal %d",
				  binary, WTERMSIG(status));
	return errmsg_set(e, -EINVAL, "it would not start: %s", last_line(&t));
}
