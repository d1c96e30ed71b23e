/* SPDX-License-Identifier: Apache-2.0 */
/* Starting the daemon, and how it ended. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/keeper/keeper.h"
#include "daemon/log.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

/* Kills for want of memory in our control group so far; 0 where it is unknown. */
static uint64_t oom_kills(void)
{
	char path[512], line[512], *p;
	uint64_t n = 0;
	ssize_t len;
	int fd;

	fd = open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	len = read(fd, line, sizeof(line) - 1);
	close(fd);
	if (len <= 0)
		return 0;
	line[len] = '\0';
	p = strstr(line, "0::");
	if (!p)
		return 0;
	p[strcspn(p, "\n")] = '\0';
	if (snprintf(path, sizeof(path), "/sys/fs/cgroup%s/memory.events",
		     p + 3) >= (int)sizeof(path))
		return 0;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	len = read(fd, line, sizeof(line) - 1);
	close(fd);
	line[max(len, (ssize_t)0)] = '\0';
	p = strstr(line, "oom_kill ");
	if (p)
		n = strtoull(p + 9, NULL, 10);
	return n;
}

/* The child is not what must live longest. */
static void oom_adj_restore(const struct keeper *k)
{
	int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	if (write(fd, k->oom_adj, strlen(k->oom_adj)) < 0)
		log_debug("keeper: oom_score_adj: %s", strerror(errno));
	close(fd);
}

/*
 * Runs after fork(): the environment is a copy, so nothing of ours changes. One
 * thread means that libc may be used as ever.
 */
static void child_exec(struct keeper *k, pid_t keeper)
	__attribute__((noreturn));

static void child_exec(struct keeper *k, pid_t keeper)
{
	char text[32];
	int err;

	snprintf(text, sizeof(text), "%d", keeper);
	setenv("KVMM_KEEPER", text, 1);
	snprintf(text, sizeof(text), "%u", k->max);
	setenv("FDSTORE", text, 1);
	setenv("NOTIFY_SOCKET", k->addr, 1);
	snprintf(text, sizeof(text), "%" PRIu64, k->watchdog_ns / NSEC_PER_USEC);
	setenv("WATCHDOG_USEC", text, 1);
	snprintf(text, sizeof(text), "%d", getpid());
	setenv("WATCHDOG_PID", text, 1);
	if (k->nr) {
		setenv("LISTEN_PID", text, 1);
		snprintf(text, sizeof(text), "%u", k->nr);
		setenv("LISTEN_FDS", text, 1);
	}
	if (k->ended[0])
		setenv("KVMM_ENDED", k->ended, 1);
	if (k->oom_adj[0])
		oom_adj_restore(k);
	err = store_hand(k);
	if (!err) {
		sigprocmask(SIG_SETMASK, (sigset_t *)k->sig_old, NULL);
		execv(k->argv[0], k->argv);
		err = -errno;
	}
	log_err("keeper: %s: %s", k->argv[0], strerror(-err));
	_exit(127);
}

int child_start(struct keeper *k)
{
	pid_t me = getpid(), pid;

	k->oom = oom_kills();
	pid = fork();
	if (pid < 0)
		return -errno;
	if (!pid)
		child_exec(k, me);
	k->child = pid;
	k->ready = false;
	k->start_ns = 0;
	k->started_ns = now_ns();
	watch_begin(k);
	return 0;
}

bool child_reap(struct keeper *k, int *status)
{
	siginfo_t si = { .si_pid = 0 };

	if (!k->child)
		return false;
	/* what it said last counts, and only a child's word does */
	if (waitid(P_PID, (id_t)k->child, &si, WEXITED | WNOHANG | WNOWAIT) ||
	    si.si_pid != k->child)
		return false;
	store_read(k);
	if (waitpid(k->child, status, 0) != k->child)
		return false;
	k->child = 0;
	if (WIFEXITED(*status))
		snprintf(k->ended, sizeof(k->ended), "exit-code %d",
			 WEXITSTATUS(*status));
	else
		snprintf(k->ended, sizeof(k->ended), "signal %d",
			 WTERMSIG(*status));
	if (WIFSIGNALED(*status) && WTERMSIG(*status) == SIGKILL &&
	    oom_kills() > k->oom)
		strcpy(k->ended, "oom-kill");
	if (k->hung)
		strcpy(k->ended, "watchdog");
	return true;
}
