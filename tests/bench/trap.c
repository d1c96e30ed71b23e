/* SPDX-License-Identifier: Apache-2.0 */
/* Counting system calls; see bench.h. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include "tests/bench/bench.h"

/* In memory that the parent sees. */
static volatile sig_atomic_t *nr_syscalls;

/* The call is not made, and counted. Who made it hears that there is nothing. */
static void on_trap(int sig, siginfo_t *info, void *context)
{
#ifdef __x86_64__
	((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = -EAGAIN;
#endif
	++*nr_syscalls;
}

/* Everything but the way out is trapped. */
static int trap_syscalls(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
			 offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
	};
	struct sock_fprog prog = { sizeof(code) / sizeof(code[0]), code };

	struct sigaction sa = {
		.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO,
	};

	sigaction(SIGSYS, &sa, NULL);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog))
		return -errno;
	return 0;
}

/* Does the trap see a system call at all? */
static bool trap_works(void)
{
	syscall(SYS_getppid);
	if (*nr_syscalls != 1)
		return false;
	*nr_syscalls = 0;
	return true;
}

static int trapped_child(int (*prepare)(void *arg), int (*loop)(void *arg),
			 void *arg)
{
	if (prepare(arg))
		return 2;
	if (trap_syscalls() || !trap_works())
		return 3;
	return loop(arg) ? 4 : 0;
}

double bench_count_syscalls(struct bench *b, int (*prepare)(void *arg),
			    int (*loop)(void *arg), void *arg)
{
	int status;
	double n;
	pid_t pid;

	nr_syscalls = mmap(NULL, sizeof(*nr_syscalls), PROT_READ | PROT_WRITE,
			   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (nr_syscalls == MAP_FAILED)
		bench_die(b, "memory", -errno);
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		bench_die(b, "fork", -errno);
	if (!pid) {
		b->kvmmd = NULL;	/* the parent's */
		_exit(trapped_child(prepare, loop, arg));
	}
	waitpid(pid, &status, 0);
	if (!WIFEXITED(status) || WEXITSTATUS(status)) {
		bench_say("wait status 0x%x", status);
		bench_die(b, "the process without system calls", -ECHILD);
	}
	n = *nr_syscalls;
	munmap((void *)nr_syscalls, sizeof(*nr_syscalls));
	return n;
}
