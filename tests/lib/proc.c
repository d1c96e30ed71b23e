/* SPDX-License-Identifier: Apache-2.0 */
/* Children that run functions, and checks; see proc.h. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "tests/lib/proc.h"
#include "tests/lib/unit.h"

bool t_failed;
static bool in_child;

/* -- checks -------------------------------------------------------------------- */

void t_fail(const char *file, int line, const char *fmt, ...)
{
	char text[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	fprintf(stderr, "%s:%d: %s%s\n", file, line,
		in_child ? "in a child: " : "", text);
	fflush(stderr);
	if (in_child)
		_exit(1);
	t_failed = true;
	print_error("%s\n", text);
	_fail(file, line);
	abort();		/* _fail() does not return, but does not say so */
}

void t_fail_check(const char *file, int line, const char *cond,
		  const char *fmt, ...)
{
	char text[400];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	t_fail(file, line, "%.100s:%s", cond, text);
}

const char *t_strerror(long long err)
{
	static _Thread_local char text[400];
	const char *name = strerrorname_np((int)-err);

	snprintf(text, sizeof(text), "%s (%s)", name ? name : "no errno",
		 kvmm_error(NULL));
	return text;
}

struct t_wait t_wait_begin(unsigned int ms)
{
	return (struct t_wait) {
		.deadline = deadline_in(ms * NSEC_PER_MSEC),
		.step_ns = NSEC_PER_MSEC / 2,
	};
}

bool t_wait_more(struct t_wait *w)
{
	struct timespec ts = ns_to_timespec(w->step_ns);

	if (deadline_past(w->deadline))
		return false;
	nanosleep(&ts, NULL);
	return true;
}

/* -- the child's side ------------------------------------------------------------ */

struct order {
	proc_fn	fn;
	long	a, b;
};

/* Keep the standard ones and @fd, which becomes 3. */
static void close_others(int fd)
{
	if (dup2(fd, 3) < 0)
		_exit(127);
	syscall(SYS_close_range, 4u, ~0u, 0u);
}

static void child_main(int fd, void *shm, pid_t parent)
	__attribute__((noreturn));

static void child_main(int fd, void *shm, pid_t parent)
{
	struct order o;

	in_child = true;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(127);
	/* cmocka's handlers belong to the test */
	signal(SIGSEGV, SIG_DFL);
	signal(SIGBUS, SIG_DFL);
	signal(SIGILL, SIG_DFL);
	signal(SIGFPE, SIG_DFL);
	signal(SIGSYS, SIG_DFL);
	signal(SIGPIPE, SIG_IGN);
	close_others(fd);
	while (recv(3, &o, sizeof(o), 0) == sizeof(o)) {
		long ret = o.fn(shm, o.a, o.b);

		if (send(3, &ret, sizeof(ret), 0) != sizeof(ret))
			break;
	}
	_exit(0);
}

/* -- the test's side --------------------------------------------------------------- */

static void hang_up(struct proc *p)
{
	if (p->fd > 0)
		close(p->fd);
	p->fd = -1;
	p->busy = false;
}

static void forget(struct proc *p)
{
	hang_up(p);
	if (p->shm)
		munmap(p->shm, PROC_SHM_BYTES);
	p->shm = NULL;
}

void proc_start(struct proc *p)
{
	pid_t me = getpid();
	int fd[2];

	T_CHECK(!p->pid);
	forget(p);
	p->shm = mmap(NULL, PROC_SHM_BYTES, PROT_READ | PROT_WRITE,
		      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	T_CHECK(p->shm != MAP_FAILED);
	T_OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fd));
	fflush(NULL);
	p->pid = fork();
	T_CHECK(p->pid >= 0);
	if (!p->pid)
		child_main(fd[1], p->shm, me);
	close(fd[1]);
	p->fd = fd[0];
}

void proc_send(struct proc *p, proc_fn fn, long a, long b)
{
	struct order o = { .fn = fn, .a = a, .b = b };

	T_CHECK(p->pid && !p->busy);
	T_EQ(send(p->fd, &o, sizeof(o), MSG_NOSIGNAL), (long)sizeof(o));
	p->busy = true;
}

bool proc_answered(struct proc *p)
{
	struct pollfd pfd = { .fd = p->fd, .events = POLLIN };

	return poll(&pfd, 1, 0) > 0;
}

long proc_recv(struct proc *p)
{
	struct pollfd pfd = { .fd = p->fd, .events = POLLIN };
	uint64_t deadline = deadline_in(PROC_WAIT_MS * NSEC_PER_MSEC);
	long ret;
	int n;

	T_CHECK(p->busy);
	p->busy = false;
	do {
		n = poll(&pfd, 1, deadline_left_ms(deadline));
	} while (n < 0 && errno == EINTR);
	T_CHECK(n > 0, "child %d does not answer", p->pid);
	if (recv(p->fd, &ret, sizeof(ret), 0) == sizeof(ret))
		return ret;
	proc_reap(p);
	t_fail(__FILE__, __LINE__, "a child ended in a call, status 0x%x",
	       p->status);
}

long proc_call(struct proc *p, proc_fn fn, long a, long b)
{
	proc_send(p, fn, a, b);
	return proc_recv(p);
}

void proc_signal(struct proc *p, int sig)
{
	T_CHECK(p->pid);
	T_OK(kill(p->pid, sig));
	if (sig == SIGSTOP)
		T_WAIT(5000, proc_stopped(p));
}

bool proc_stopped(struct proc *p)
{
	siginfo_t si = { .si_pid = 0 };

	/* looks, and leaves an end for proc_reap() */
	return !waitid(P_PID, (id_t)p->pid, &si,
		       WSTOPPED | WNOHANG | WNOWAIT) && si.si_pid == p->pid;
}

static bool reaped(struct proc *p)
{
	int status;

	if (waitpid(p->pid, &status, WNOHANG) != p->pid)
		return false;
	p->status = status;
	p->pid = 0;
	return true;
}

int proc_reap(struct proc *p)
{
	T_CHECK(p->pid);
	T_WAIT(PROC_WAIT_MS, reaped(p));
	hang_up(p);
	return p->status;
}

void proc_end(struct proc *p)
{
	if (!p->pid)
		return;
	if (p->busy)
		proc_recv(p);
	shutdown(p->fd, SHUT_RDWR);
	T_EQ(proc_reap(p), 0);
	forget(p);
}

void proc_kill(struct proc *p)
{
	int status;

	if (p->pid) {
		kill(p->pid, SIGKILL);
		while (waitpid(p->pid, &status, 0) < 0 && errno == EINTR)
			;
		p->status = status;
		p->pid = 0;
	}
	forget(p);
}
