/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ipc - a round trip through the rings
 *
 * spin: both sides awake. Subject: kvmm_ping() and kvmm_poll() until it is
 * back. Floor: two processes that hand one cache line to and fro and do
 * nothing else.
 *
 * wake: both sides asleep; each trip is preceded by a pause long enough for the
 * daemon to go to sleep. Subject: kvmm_ping(), then kvmm_poll() and sleep on
 * kvmm_fd() until it is back, as an engine's loop does; kvmm_poll() stays awake
 * for some 50 us before it lets its caller sleep. Floor: two processes that
 * block in read() of an eventfd each.
 *
 * Client and peer are pinned to CPUs 0 and 1, the floor's peer to that of
 * kvmmd; on one CPU nothing is pinned and the numbers mean little.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/bench.h"

#define NR_SPIN		20000u		/* trips a block */
#define NR_WAKE		400u
#define PAUSE_NS	(400 * NSEC_PER_USEC)
#define LOST_NS		(2 * NSEC_PER_SEC)

/* What the floor's two processes share; each word on a line of its own. */
struct pong {
	_Alignas(64) _Atomic uint32_t ping;
	_Alignas(64) _Atomic uint32_t pong;
	_Alignas(64) _Atomic uint32_t spin;	/* the peer is to spin now */
};

struct ipc {
	struct bench	b;
	struct test_daemon kvmmd;
	struct bench_client c;
	struct pong	*pp;
	int		to_peer;	/* eventfds */
	int		from_peer;
	pid_t		peer;
	uint32_t	n;
	uint64_t	tag;
	double		trip[NR_WAKE];
};

static void pause_a_little(void)
{
	struct timespec ts = ns_to_timespec(PAUSE_NS);

	nanosleep(&ts, NULL);
}

/* ---- floor's peer ----------------------------------------------------------------- */

static void peer_spin(struct pong *pp)
{
	uint32_t seen = atomic_load_explicit(&pp->pong, memory_order_relaxed);

	for (;;) {
		/* acquire and release: pair with run_spin_floor() */
		uint32_t v = atomic_load_explicit(&pp->ping,
						  memory_order_acquire);

		if (v != seen) {
			seen = v;
			atomic_store_explicit(&pp->pong, v,
					      memory_order_release);
		} else if (!atomic_load_explicit(&pp->spin,
						 memory_order_relaxed)) {
			return;
		}
	}
}

static void peer_main(struct ipc *ip) __attribute__((noreturn));

static void peer_main(struct ipc *ip)
{
	uint64_t v, one = 1;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (sysconf(_SC_NPROCESSORS_ONLN) > 1)
		td_pin_cpu(0, 1);
	while (read(ip->to_peer, &v, sizeof(v)) == sizeof(v)) {
		if (write(ip->from_peer, &one, sizeof(one)) != sizeof(one))
			break;
		if (atomic_load_explicit(&ip->pp->spin, memory_order_acquire))
			peer_spin(ip->pp);
	}
	_exit(0);
}

static void peer_call(struct ipc *ip)
{
	uint64_t v = 1;

	if (write(ip->to_peer, &v, sizeof(v)) != sizeof(v) ||
	    read(ip->from_peer, &v, sizeof(v)) != sizeof(v))
		bench_die(&ip->b, "eventfd", -errno);
}

static void peer_start(struct ipc *ip)
{
	ip->pp = bench_shm(&ip->b, sizeof(*ip->pp));
	ip->to_peer = eventfd(0, EFD_CLOEXEC);
	ip->from_peer = eventfd(0, EFD_CLOEXEC);
	fflush(NULL);
	ip->peer = fork();
	if (ip->to_peer < 0 || ip->from_peer < 0 || ip->peer < 0)
		bench_die(&ip->b, "the floor's peer", -errno);
	if (!ip->peer)
		peer_main(ip);
}

/* ---- spin -------------------------------------------------------------------------- */

static double run_spin_floor(void *arg)
{
	struct ipc *ip = arg;
	struct pong *pp = ip->pp;
	unsigned int i;
	uint64_t t;

	/* release: pairs with peer_main(), which then spins */
	atomic_store_explicit(&pp->spin, 1, memory_order_release);
	peer_call(ip);
	t = now_ns();
	for (i = 0; i < NR_SPIN; i++) {
		uint32_t v = ++ip->n;

		/* release and acquire: pair with peer_spin() */
		atomic_store_explicit(&pp->ping, v, memory_order_release);
		while (atomic_load_explicit(&pp->pong,
					    memory_order_acquire) != v)
			;
	}
	t = now_ns() - t;
	atomic_store_explicit(&pp->spin, 0, memory_order_relaxed);
	return (double)t / NR_SPIN;
}

static void wait_for(struct ipc *ip, uint64_t tag, bool sleep)
{
	struct pollfd pfd = { .fd = kvmm_fd(ip->c.k), .events = POLLIN };
	uint64_t deadline = 0;
	struct kvmm_done d;
	unsigned int spins = 0;
	int n;

	for (;;) {
		n = kvmm_poll(ip->c.k, &d, 1);
		if (n < 0)
			bench_die(&ip->b, "kvmm_poll", n);
		if (n && d.tag == tag)
			return;
		if (sleep)
			poll(&pfd, 1, (int)(LOST_NS / NSEC_PER_MSEC));
		else if (++spins % 1024)
			continue;
		if (!deadline)
			deadline = deadline_in(LOST_NS);
		else if (deadline_past(deadline))
			bench_die(&ip->b, "a ping got lost", -ETIMEDOUT);
	}
}

static void ping(struct ipc *ip, bool sleep)
{
	int err = kvmm_ping(ip->c.k, ++ip->tag);

	if (err)
		bench_die(&ip->b, "kvmm_ping", err);
	wait_for(ip, ip->tag, sleep);
}

static double run_spin(void *arg)
{
	struct ipc *ip = arg;
	unsigned int i;
	uint64_t t;

	for (i = 0; i < 100; i++)	/* it is awake after that */
		ping(ip, false);
	t = now_ns();
	for (i = 0; i < NR_SPIN; i++)
		ping(ip, false);
	return (double)(now_ns() - t) / NR_SPIN;
}

/* ---- wake ----------------------------------------------------------------------------- */

static double run_wake_floor(void *arg)
{
	struct ipc *ip = arg;
	unsigned int i;

	for (i = 0; i < NR_WAKE; i++) {
		uint64_t t;

		pause_a_little();
		t = now_ns();
		peer_call(ip);
		ip->trip[i] = (double)(now_ns() - t);
	}
	return bench_median(ip->trip, NR_WAKE);
}

static double run_wake(void *arg)
{
	struct ipc *ip = arg;
	unsigned int i;

	for (i = 0; i < NR_WAKE; i++) {
		uint64_t t;

		pause_a_little();
		t = now_ns();
		ping(ip, true);
		ip->trip[i] = (double)(now_ns() - t);
	}
	return bench_median(ip->trip, NR_WAKE);
}

int main(void)
{
	static struct ipc ip;
	bool two = sysconf(_SC_NPROCESSORS_ONLN) > 1;
	struct td_opts o = { .dram_bytes = 64u << 20, .cpu = two ? 2 : 0 };
	struct bench_ratio spin, wake;
	struct kvmm_stats st = { .size = sizeof(st) };
	uint64_t bells, trips;

	bench_init(&ip.b, "ipc");
	if (two)
		td_pin_cpu(0, 0);
	bench_daemon(&ip.b, &ip.kvmmd, &o);
	bc_open(&ip.c, &ip.b, ip.kvmmd.socket, 4096);
	peer_start(&ip);

	kvmm_stats(ip.c.k, &st);
	bells = st.doorbells;
	trips = ip.tag;
	bench_abba("spin", BENCH_ROUNDS, run_spin, run_spin_floor, &ip, &spin);
	kvmm_stats(ip.c.k, &st);
	bench_result(&ip.b, "spin_doorbells_per_trip",
		     (double)(st.doorbells - bells) / (double)(ip.tag - trips));
	bench_abba("wake", BENCH_ROUNDS, run_wake, run_wake_floor, &ip, &wake);

	kill(ip.peer, SIGKILL);
	waitpid(ip.peer, NULL, 0);
	bc_close(&ip.c);
	bench_result(&ip.b, "spin_rtt_ns", spin.subject);
	bench_result(&ip.b, "spin_floor_ns", spin.floor);
	bench_result(&ip.b, "spin_ratio", spin.ratio);
	bench_result(&ip.b, "spin_noise", spin.noise);
	bench_result(&ip.b, "wake_rtt_ns", wake.subject);
	bench_result(&ip.b, "wake_floor_ns", wake.floor);
	bench_result(&ip.b, "wake_ratio", wake.ratio);
	bench_result(&ip.b, "wake_noise", wake.noise);
	bench_must(&ip.b, "spin_ratio", spin.ratio, "<=", 4);
	bench_must(&ip.b, "wake_ratio", wake.ratio, "<=", 1.5);
	return bench_finish(&ip.b);
}
