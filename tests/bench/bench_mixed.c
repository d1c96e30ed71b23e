/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mixed - what writeback and reclaim cost those who only want their pages
 *
 * One client matches prefixes that are in use and not pinned, so that reclaim
 * passes by them, and now and then publishes a page; a prefix of which something
 * is gone is put again, and counted. Beside it another client fills the cache
 * without pause: every page that it seals means that one is reclaimed, and most
 * of them are written to the node below. In the control arms a process that kvmmd
 * knows nothing of streams as many bytes a second as were written down in the
 * churn arm before, through memory and to a file beside the store. What is written
 * down then is the measured client's own, and each arm says how much was moved.
 *
 * The measured client rests for PAUSE_NS after each put: kvmmd has to have a CPU
 * sometimes where there are two, and both others take what there is.
 *
 * A put has no limit here, it is only said: it takes a frame where another client
 * takes all there are, and so waits for reclaim, and that for the device.
 *
 * Arms of ARM_NS in turns, ABBA. A ratio is the median over rounds of p99 with
 * churn against p99 in control; control against control is the noise.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "tests/bench/bench.h"
#include "tests/lib/hist.h"

#define PAGE_BYTES	(64u << 10)
#define DRAM_BYTES	(UINT64_C(256) << 20)
#define NVME_BYTES	(UINT64_C(1) << 30)
#define STREAM_BYTES	(UINT64_C(256) << 20)	/* then from the front again */
#define STREAMS		16u
#define PREFIX		16u
#define NR_PREFIXES	32u			/* 32 MiB of the 256 */
#define CHAIN		32u
#define ROUNDS		5u
#define ARM_NS		(2 * NSEC_PER_SEC)
#define PUT_EVERY	64u			/* matches */
#define PAUSE_NS	(NSEC_PER_MSEC)		/* after each put */
#define PUT_FROM	(UINT64_C(1) << 32)	/* numbers of pages */
#define CHURN_FROM	(UINT64_C(1) << 40)

/**
 * struct common - what both processes share
 * @stop:	the one beside ends
 * @streamed:	bytes, in a control arm
 */
struct common {
	_Atomic uint32_t stop;
	_Atomic uint64_t streamed;
};

struct mixed {
	struct bench	b;
	struct test_daemon kvmmd;
	struct bench_client c;
	struct common	*com;
	struct kvmm_key	key[NR_PREFIXES][PREFIX];
	uint64_t	rand;
	uint64_t	puts;
	uint64_t	rate;		/* bytes a second that were written down */
	uint64_t	matches, whole;	/* with churn */
	int		stream_fd;
	bool		two;
};

/**
 * struct arm - what one came to
 * @match, @put: p99, ns
 * @rate:	bytes a second that were written down, or streamed
 */
struct arm {
	double		match, put;
	double		rate;
};

static bool stopped(const struct mixed *m)
{
	/* relaxed: seen soon enough */
	return atomic_load_explicit(&m->com->stop, memory_order_relaxed);
}

/* ---- what runs beside ------------------------------------------------------------- */

static void churn_main(struct mixed *m) __attribute__((noreturn));

static void churn_main(struct mixed *m)
{
	uint64_t n = CHURN_FROM + now_ns();
	struct bench_client c;

	m->b.kvmmd = NULL;
	bc_open(&c, &m->b, m->kvmmd.socket, PAGE_BYTES);
	while (!stopped(m)) {
		/* an answer of -EAGAIN is the cache's, and we come again */
		bc_put(&c, n, CHAIN, NULL);
		n += CHAIN;
	}
	bc_close(&c);
	_exit(0);
}

/* One of several, since the churn has many writes in flight, too. */
struct stream {
	struct mixed	*m;
	pthread_t	thread;
	char		*from, *to;
	uint64_t	off;		/* of its part of the file */
};

static void *stream_thread(void *arg)
{
	struct stream *st = arg;
	struct mixed *m = st->m;
	uint64_t begin = now_ns(), done = 0, part = STREAM_BYTES / STREAMS;
	struct timespec ts = ns_to_timespec(NSEC_PER_MSEC);

	while (!stopped(m)) {
		uint64_t at = done % part;

		if ((double)done > (double)(now_ns() - begin) / 1e9 *
				   (double)m->rate / STREAMS) {
			nanosleep(&ts, NULL);
			continue;
		}
		memset(st->from + at, (int)done, PAGE_BYTES);
		memcpy(st->to, st->from + at, PAGE_BYTES);
		if (pwrite(m->stream_fd, st->to, PAGE_BYTES, (off_t)(st->off + at)) !=
		    PAGE_BYTES)
			_exit(1);
		done += PAGE_BYTES;
		atomic_fetch_add_explicit(&m->com->streamed, PAGE_BYTES,
					  memory_order_relaxed);
	}
	return NULL;
}

static void stream_main(struct mixed *m) __attribute__((noreturn));

static void stream_main(struct mixed *m)
{
	static struct stream st[STREAMS];
	size_t room = STREAM_BYTES + STREAMS * PAGE_BYTES;
	char *mem = mmap(NULL, room, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned int i;

	if (mem == MAP_FAILED)
		_exit(1);
	for (i = 0; i < STREAMS; i++) {
		st[i] = (struct stream){
			.m = m,
			.off = i * (STREAM_BYTES / STREAMS),
			.from = mem + i * (STREAM_BYTES / STREAMS),
			.to = mem + STREAM_BYTES + i * PAGE_BYTES,
		};
		if (pthread_create(&st[i].thread, NULL, stream_thread, &st[i]))
			_exit(1);
	}
	for (i = 0; i < STREAMS; i++)
		pthread_join(st[i].thread, NULL);
	_exit(0);
}

/* Its file, fully written, as the store is. */
static void stream_open(struct mixed *m)
{
	char path[TD_MAX_PATH * 2];
	char *mem = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t at;

	snprintf(path, sizeof(path), "%s/stream", m->kvmmd.dir);
	m->stream_fd = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC,
			    0600);
	if (m->stream_fd < 0 || mem == MAP_FAILED ||
	    posix_fallocate(m->stream_fd, 0, (off_t)STREAM_BYTES))
		bench_die(&m->b, "a file to stream to", -errno);
	for (at = 0; at < STREAM_BYTES; at += PAGE_BYTES)
		if (pwrite(m->stream_fd, mem, PAGE_BYTES, (off_t)at) !=
		    PAGE_BYTES)
			bench_die(&m->b, "a file to stream to", -errno);
	munmap(mem, PAGE_BYTES);
}

/* ---- the client that is measured ---------------------------------------------------- */

static void one_match(struct mixed *m, bool churn, struct hist *h)
{
	unsigned int p = (unsigned int)(bench_rand(&m->rand) % NR_PREFIXES);
	struct kvmm_req *rq = bc_req(&m->c, p);
	struct kvmm_hit hit[PREFIX];
	uint64_t t = now_ns();
	unsigned int n = bc_match(&m->c, rq, m->key[p], PREFIX, hit);

	hist_add(h, now_ns() - t);
	kvmm_req_end(rq, KVMM_CONTINUES, 0);
	if (churn) {
		m->matches++;
		m->whole += n == PREFIX;
	}
	if (n < PREFIX)
		bc_put(&m->c, (uint64_t)p * PREFIX, PREFIX, NULL);
}

static void one_put(struct mixed *m, struct hist *h)
{
	uint64_t t = now_ns();
	int err = bc_put(&m->c, PUT_FROM + m->puts++, 1, NULL);

	if (err)
		bench_die(&m->b, "a put", err);
	hist_add(h, now_ns() - t);
}

static pid_t start_beside(struct mixed *m, bool churn)
{
	pid_t pid;

	atomic_store_explicit(&m->com->stop, 0, memory_order_relaxed);
	atomic_store_explicit(&m->com->streamed, 0, memory_order_relaxed);
	pid = fork();
	if (pid < 0)
		bench_die(&m->b, "fork", -errno);
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (m->two)
		td_pin_cpu(0, 1);
	if (churn)
		churn_main(m);
	stream_main(m);
}

static void end_beside(struct mixed *m, pid_t pid)
{
	int status;

	atomic_store_explicit(&m->com->stop, 1, memory_order_relaxed);
	waitpid(pid, &status, 0);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		bench_die(&m->b, "the process beside", -ECHILD);
}

static struct arm run_arm(struct mixed *m, bool churn)
{
	static struct hist match, put;
	uint64_t begin, n = 0, out = bc_counter(&m->b, "bytes_out");
	struct timespec pause = ns_to_timespec(PAUSE_NS);
	struct kvmm_done d;
	struct arm a;
	pid_t pid;

	memset(&match, 0, sizeof(match));
	memset(&put, 0, sizeof(put));
	begin = now_ns();
	pid = start_beside(m, churn);
	while (now_ns() - begin < ARM_NS) {
		one_match(m, churn, &match);
		if (++n % PUT_EVERY)
			continue;
		kvmm_poll(m->c.k, &d, 1);
		one_put(m, &put);
		nanosleep(&pause, NULL);
	}
	end_beside(m, pid);
	out = churn ? bc_counter(&m->b, "bytes_out") - out :
		      atomic_load_explicit(&m->com->streamed,
					   memory_order_relaxed);
	a.rate = (double)out * 1e9 / (double)(now_ns() - begin);
	if (churn)
		m->rate = (uint64_t)a.rate;
	a.match = (double)hist_quantile(&match, 0.99);
	a.put = (double)hist_quantile(&put, 0.99);
	bench_say("  %s: match p99 %.2f us, put p99 %.1f us; %.0f MB/s %s",
		  churn ? "churn  " : "control", a.match / 1e3, a.put / 1e3,
		  a.rate / 1e6, churn ? "written down" : "streamed");
	return a;
}

static double noise_of(double a, double b)
{
	return a > b ? a / b : b / a;
}

static void measure(struct mixed *m)
{
	double match[ROUNDS], put[ROUNDS], mn[ROUNDS], pn[ROUNDS];
	double match_us[ROUNDS], put_us[ROUNDS], rate[ROUNDS], stream[ROUNDS];
	unsigned int i;

	run_arm(m, true);
	for (i = 0; i < ROUNDS; i++) {
		struct arm c1, c2, s1, s2;

		if (i % 2) {
			s1 = run_arm(m, true);
			c1 = run_arm(m, false);
			c2 = run_arm(m, false);
			s2 = run_arm(m, true);
		} else {
			c1 = run_arm(m, false);
			s1 = run_arm(m, true);
			s2 = run_arm(m, true);
			c2 = run_arm(m, false);
		}
		match[i] = (s1.match + s2.match) / (c1.match + c2.match);
		put[i] = (s1.put + s2.put) / (c1.put + c2.put);
		match_us[i] = (s1.match + s2.match) / 2e3;
		put_us[i] = (s1.put + s2.put) / 2e3;
		mn[i] = noise_of(c1.match, c2.match);
		pn[i] = noise_of(c1.put, c2.put);
		rate[i] = (s1.rate + s2.rate) / 2e6;
		stream[i] = (c1.rate + c2.rate) / 2e6;
	}
	bench_result(&m->b, "churn_mb_s", bench_median(rate, ROUNDS));
	bench_result(&m->b, "control_mb_s", bench_median(stream, ROUNDS));
	bench_result(&m->b, "match_p99_us", bench_median(match_us, ROUNDS));
	bench_result(&m->b, "put_p99_us", bench_median(put_us, ROUNDS));
	bench_result(&m->b, "match_noise", bench_median(mn, ROUNDS));
	bench_result(&m->b, "put_noise", bench_median(pn, ROUNDS));
	bench_result(&m->b, "put_ratio", bench_median(put, ROUNDS));
	bench_result(&m->b, "match_ratio", bench_median(match, ROUNDS));
}

static double result(const struct mixed *m, const char *key)
{
	return json_number_value(json_object_get(m->b.results, key));
}

int main(void)
{
	static struct mixed m = { .rand = 0x9e3779b97f4a7c15 };
	/* a disk that others use is slow, but not ill */
	struct td_opts o = { .dram_bytes = DRAM_BYTES,
			     .nvme_bytes = NVME_BYTES, .io_timeout = "20s" };
	unsigned int i;
	int err;

	bench_init(&m.b, "mixed");
	m.two = sysconf(_SC_NPROCESSORS_ONLN) > 1;
	if (m.two)
		td_pin_cpu(0, 0);
	m.com = bench_shm(&m.b, sizeof(*m.com));
	bench_daemon(&m.b, &m.kvmmd, &o);
	bc_open(&m.c, &m.b, m.kvmmd.socket, PAGE_BYTES);
	for (i = 0; i < NR_PREFIXES; i++) {
		err = bc_put(&m.c, (uint64_t)i * PREFIX, PREFIX, m.key[i]);
		if (err)
			bench_die(&m.b, "prefixes", err);
	}
	stream_open(&m);
	measure(&m);
	bench_result(&m.b, "whole_share", (double)m.whole / (double)m.matches);
	bench_result(&m.b, "pgdemote", (double)bc_counter(&m.b, "pgdemote"));
	bench_must(&m.b, "pages were written back", result(&m, "pgdemote"),
		   ">=", 1000);
	bench_must(&m.b, "match p99, churn / control",
		   result(&m, "match_ratio"), "<=",
		   1.5 * result(&m, "match_noise"));
	bench_must(&m.b, "matches that found all",
		   result(&m, "whole_share"), ">=", 0.99);
	bench_must(&m.b, "bytes of control, of churn's",
		   result(&m, "control_mb_s") / result(&m, "churn_mb_s"),
		   ">=", 0.8);
	bc_close(&m.c);
	return bench_finish(&m.b);
}
