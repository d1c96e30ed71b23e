/* SPDX-License-Identifier: Apache-2.0 */
/*
 * proc.h - child processes that run a test's functions on demand
 *
 * A child is a fork of the test, so a pointer to one of the test's own
 * functions is good in it: proc_call() has it run there and brings the result
 * back. What a function keeps in static variables stays in that child from call
 * to call. For more than a number there is proc.shm, memory that both see.
 *
 *	static long do_open(void *shm, long a, long b)	{ ... }
 *
 *	proc_start(&p);
 *	proc_call(&p, do_open, 0, 0);
 *	proc_signal(&p, SIGKILL);
 *	proc_reap(&p);
 *
 * A child dies with its parent, and has none of its descriptors but standard
 * ones, so that a connection of the parent's ends when the parent closes it.
 *
 * Here are also the checks that work on both sides: a failure in the test's own
 * process fails the test, one in a child says why and ends the child, which
 * fails the call that it was working on.
 */
#ifndef KVMM_TESTS_LIB_PROC_H
#define KVMM_TESTS_LIB_PROC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PROC_SHM_BYTES	(1u << 20)
#define PROC_WAIT_MS	30000		/* for an answer */

/* -- checks -------------------------------------------------------------------- */

void t_fail(const char *file, int line, const char *fmt, ...)
	__attribute__((format(printf, 3, 4), noreturn));
void t_fail_check(const char *file, int line, const char *cond,
		  const char *fmt, ...)
	__attribute__((format(printf, 4, 5), noreturn));

/* Has a check of this process failed since it was last cleared? */
extern bool t_failed;

/* True, or the test fails here; the sentence is printed. */
#define T_CHECK(cond, ...)						\
	do {								\
		if (!(cond))						\
			t_fail_check(__FILE__, __LINE__, #cond,		\
				     " " __VA_ARGS__);			\
	} while (0)

/* Both are integers, and equal. */
#define T_EQ(a, b)							\
	do {								\
		long long __a = (long long)(a), __b = (long long)(b);	\
									\
		if (__a != __b)						\
			t_fail(__FILE__, __LINE__,			\
			       "%s is %lld, %s is %lld", #a, __a, #b, __b); \
	} while (0)

/* A call that returns 0 or -errno. */
#define T_OK(call)							\
	do {								\
		long long __r = (long long)(call);			\
									\
		if (__r < 0)						\
			t_fail(__FILE__, __LINE__, "%s: %s", #call,	\
			       t_strerror(__r));			\
	} while (0)

/* The error's name and what libkvmm said last in this thread. */
const char *t_strerror(long long err);

/*
 * Waiting for a condition with a deadline; looks every half millisecond.
 * T_WAIT() fails the test when it does not come.
 */
struct t_wait {
	uint64_t	deadline;
	uint64_t	step_ns;
};

struct t_wait t_wait_begin(unsigned int ms);

/* False when the time is up; sleeps a little. */
bool t_wait_more(struct t_wait *w);

#define T_WAIT(ms, cond)						\
	do {								\
		struct t_wait __w = t_wait_begin(ms);			\
									\
		while (!(cond))						\
			if (!t_wait_more(&__w))				\
				t_fail(__FILE__, __LINE__,		\
				       "not within %u ms: %s",		\
				       (unsigned int)(ms), #cond);	\
	} while (0)

/* -- children ------------------------------------------------------------------- */

/**
 * struct proc - a child process
 * @pid:	0 when there is none
 * @fd:		to it, -1
 * @shm:	PROC_SHM_BYTES that both see; zeroed by proc_start()
 * @status:	wait status once it was reaped
 * @busy:	a call was sent and not answered
 */
struct proc {
	pid_t		pid;
	int		fd;
	void		*shm;
	int		status;
	bool		busy;
};

typedef long (*proc_fn)(void *shm, long a, long b);

/** proc_start() - fork one; @p is zero or was used before */
void proc_start(struct proc *p);

/** proc_call() - run @fn there and return what it returns */
long proc_call(struct proc *p, proc_fn fn, long a, long b);

/** proc_send() - have it begin; proc_recv() takes the result */
void proc_send(struct proc *p, proc_fn fn, long a, long b);
long proc_recv(struct proc *p);

/** proc_answered() - would proc_recv() return at once? */
bool proc_answered(struct proc *p);

/** proc_signal() - SIGKILL, SIGSTOP (waits until it has stopped), SIGCONT, ... */
void proc_signal(struct proc *p, int sig);

/** proc_stopped() - has it stopped itself (raise(SIGSTOP))? */
bool proc_stopped(struct proc *p);

/** proc_reap() - wait for its end; its wait status. @p->shm stays */
int proc_reap(struct proc *p);

/** proc_end() - have it exit, and fail unless it does so with 0; fine twice */
void proc_end(struct proc *p);

/** proc_kill() - SIGKILL, reap, forget; for tear-downs, fine on zeroes, twice */
void proc_kill(struct proc *p);

#endif
