/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Time is CLOCK_MONOTONIC in nanoseconds, and a deadline is absolute. It is the
 * clock of the public API too, so a client's deadline needs no translation.
 */
#ifndef KVMM_BASE_CLOCK_H
#define KVMM_BASE_CLOCK_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define NSEC_PER_USEC	UINT64_C(1000)
#define NSEC_PER_MSEC	UINT64_C(1000000)
#define NSEC_PER_SEC	UINT64_C(1000000000)

/* Later than anything; for the minimum of several deadlines, never to wait. */
#define DEADLINE_NONE	UINT64_MAX

/* Through the vDSO: no system call, about 20 ns. */
static inline uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * NSEC_PER_SEC + (uint64_t)ts.tv_nsec;
}

/* @ns from now; saturates at %DEADLINE_NONE. */
static inline uint64_t deadline_in(uint64_t ns)
{
	uint64_t now = now_ns();

	return ns > DEADLINE_NONE - now ? DEADLINE_NONE : now + ns;
}

static inline bool deadline_past(uint64_t deadline)
{
	return now_ns() >= deadline;
}

/* Nanoseconds left, 0 when it is past. */
static inline uint64_t deadline_left(uint64_t deadline)
{
	uint64_t now = now_ns();

	return now < deadline ? deadline - now : 0;
}

/*
 * A timeout as poll() and epoll_wait() want it: in milliseconds, rounded up, so
 * that a wait that timed out is really past its deadline, and never negative.
 */
static inline int ns_to_timeout_ms(uint64_t ns)
{
	uint64_t ms = ns / NSEC_PER_MSEC + !!(ns % NSEC_PER_MSEC);

	return ms < INT_MAX ? (int)ms : INT_MAX;
}

static inline int deadline_left_ms(uint64_t deadline)
{
	return ns_to_timeout_ms(deadline_left(deadline));
}

static inline struct timespec ns_to_timespec(uint64_t ns)
{
	return (struct timespec) {
		.tv_sec		= (time_t)(ns / NSEC_PER_SEC),
		.tv_nsec	= (long)(ns % NSEC_PER_SEC),
	};
}

/* In a spin loop: lets the other hyper-thread run, saves power. */
static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

#endif
