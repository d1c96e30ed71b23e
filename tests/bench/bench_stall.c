/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stall - what others notice of a device that says nothing for ten seconds
 *
 * Two nodes of memory with a store below each, and a tenant for each. The first
 * store stalls: whatever is read from it, written to it or probed on it is in
 * flight for STALL_NS. (The daemon is that of the tests, which can be told so.)
 * Measured are, all the while, matches and puts in both nodes of memory, and
 * fetches from the store that is well. Beside it somebody else puts into the
 * memory above the stalled one, and asks for pages that are on it, with a deadline.
 * In the control arms all is the same and nothing stalls. Where both stores are on
 * one disk the first's load is the second's trouble in control only; hence there
 * is little of it.
 *
 * A round is control, stall, control. A ratio is the median over rounds of p99 in
 * stall against the mean of both in control; control against control is the noise.
 * After each stall nobody does anything: the store has to come back by itself, and
 * then its pages have to be found.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/bits.h"
#include "tests/bench/bench.h"
#include "tests/lib/hist.h"

#define PAGE_BYTES	(64u << 10)
#define DRAM_BYTES	"64MiB"			/* 1,024 pages */
#define NVME_BYTES	"1GiB"
#define PREFIX		16u
#define NR_HOT		16u			/* prefixes in use, of 16 MiB */
#define PUT_FROM	(UINT64_C(1) << 32)	/* numbers of pages */
#define BESIDE_FROM	(UINT64_C(1) << 40)
#define FILL_PUTS	4000u			/* pages, and */
#define FILL_CHAINS	320u			/* chains, of which most went below */
#define ASKED		200u			/* of them, by who runs beside */
#define ROUNDS		3u
#define STALL_NS	(10 * NSEC_PER_SEC)
#define CONTROL_NS	(5 * NSEC_PER_SEC)
#define TURN_NS		(2 * NSEC_PER_MSEC)	/* then the next one */
#define BESIDE_NS	(100 * NSEC_PER_MSEC)
#define MATCHES		32u			/* in a turn, each memory */
#define FETCH_EVERY	4u			/* turns */
#define ABOVE_EVERY	4u			/* turns: puts above the first store */
#define FETCH_NS	(5 * NSEC_PER_SEC)	/* of those that are measured */
#define DEADLINE_NS	(200 * NSEC_PER_MSEC)	/* of those from the stalled store */
#define BACK_NS		(120 * NSEC_PER_SEC)

enum what { MATCH_0, PUT_0, MATCH_1, PUT_1, FETCH_1, NR_WHAT };

static const char *const what_name[NR_WHAT] = {
	"match_above", "put_above", "match", "put", "fetch",
};

/**
 * struct common - what both processes share
 * @stop:	the one beside ends
 * @next:	its chains so far
 * @asked:	its fetches from the first store
 * @missed:	those that did not get all
 * @late_ns:	how long after its deadline one ended, at the most
 */
struct common {
	_Atomic uint32_t stop;
	_Atomic uint64_t next;
	_Atomic uint64_t asked;
	_Atomic uint64_t missed;
	_Atomic uint64_t late_ns;
};

/**
 * struct side - a tenant and its memory
 * @socket:	of the tenant
 * @puts:	single pages so far
 */
struct side {
	struct bench_client c;
	char		socket[TD_MAX_PATH * 2];
	struct kvmm_key	hot[NR_HOT][PREFIX];
	uint64_t	puts;
};

struct stall {
	struct bench	b;
	struct test_daemon kvmmd;
	struct common	*com;
	struct side	side[2];
	char		dir[TD_MAX_PATH];	/* of both stores */
	uint64_t	rand;
	bool		two;
	unsigned int	degraded;	/* stalls that status spoke of */
	unsigned int	back;		/* after which pages were found again */
	double		back_s;		/* the longest, from the end of the arm on */
};

struct arm {
	double		p99[NR_WHAT];	/* ns */
};

/* ---- the daemon --------------------------------------------------------------- */

static json_t *status(struct stall *s)
{
	json_t *r;
	int err = td_admin(&s->kvmmd, "status", &r);

	if (err)
		bench_die(&s->b, "status of kvmmd", err);
	return r;
}

static bool online(struct stall *s, const char *name)
{
	json_t *r = status(s), *node;
	bool is = false;
	size_t i;

	json_array_foreach(json_object_get(r, "nodes"), i, node) {
		const char *n = json_string_value(json_object_get(node, "name"));
		const char *st = json_string_value(json_object_get(node, "state"));

		if (n && st && !strcmp(n, name))
			is = !strcmp(st, "online");
	}
	json_decref(r);
	return is;
}

static bool says_degraded(struct stall *s)
{
	json_t *r = status(s);
	const char *t = json_string_value(json_object_get(r, "sentence"));
	bool says = t && strstr(t, "degraded");

	json_decref(r);
	return says;
}

static void wait_online(struct stall *s, const char *name)
{
	struct timespec ts = ns_to_timespec(20 * NSEC_PER_MSEC);
	uint64_t deadline = deadline_in(BACK_NS);

	while (!online(s, name)) {
		if (deadline_past(deadline))
			bench_die(&s->b, name, -ETIMEDOUT);
		nanosleep(&ts, NULL);
	}
}

/* Until no store writes anything. */
static void wait_written(struct stall *s)
{
	struct timespec ts = ns_to_timespec(NSEC_PER_MSEC);
	uint64_t deadline = deadline_in(BACK_NS);
	json_int_t sum, inflight, queued;
	json_t *r, *node;
	size_t i;

	do {
		r = status(s);
		sum = 0;
		json_array_foreach(json_object_get(r, "nodes"), i, node)
			if (!json_unpack(node, "{s:{s:I, s:I}}", "write",
					 "inflight", &inflight,
					 "queued", &queued))
				sum += inflight + queued;
		json_decref(r);
		if (deadline_past(deadline))
			bench_die(&s->b, "writes that end", -ETIMEDOUT);
		nanosleep(&ts, NULL);
	} while (sum);
}

static void fault(struct stall *s, const char *spec)
{
	char text[256];
	int err;

	snprintf(text, sizeof(text), "{\"cmd\": \"fault\", \"spec\": \"%s\"}",
		 spec);
	err = td_admin(&s->kvmmd, text, NULL);
	if (err)
		bench_die(&s->b, "a fault (is that the tests' kvmmd?)", err);
}

/* ---- pages ---------------------------------------------------------------------- */

/*
 * Bring pages [@first, @first + @n), a chain that is below; ns that it took, 0: it
 * was not. @missed: pages that did not come.
 */
static uint64_t fetch_chain(struct bench_client *c, uint64_t first,
			    unsigned int n, uint64_t ns, unsigned int *missed)
{
	struct pollfd p = { .fd = kvmm_fd(c->k), .events = POLLIN };
	struct kvmm_key key[PREFIX];
	struct kvmm_keys keys = { .k = key, .n = n };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_req *rq = bc_req(c, first);
	uint64_t tag = ++c->tag, t, took = 0;
	struct kvmm_hit hit[PREFIX];
	struct kvmm_done d;
	unsigned int i;
	int err;

	for (i = 0; i < n; i++)
		bc_key(c, first + i, &key[i]);
	err = kvmm_match(rq, &keys, 1, c->node, hit, &m);
	*missed = n - m.n_pages;
	if (err || m.n_pages == m.n_resident)
		goto out;
	t = now_ns();
	err = kvmm_fetch(rq, m.n_resident, m.n_pages, c->node, t + ns, tag);
	while (!err) {
		int got = kvmm_poll(c->k, &d, 1);

		if (got > 0 && d.tag == tag)
			break;
		err = got < 0 ? got :
		      now_ns() > t + ns + 10 * NSEC_PER_SEC ? -ETIMEDOUT : 0;
		if (!got && !err)
			poll(&p, 1, 1);
	}
	took = now_ns() - t;
	for (i = 0; !err && i < m.n_pages - m.n_resident; i++)
		*missed += d.result || i >= d.n || d.res[i].result;
out:
	if (err)
		bench_die(c->b, "a fetch", err);
	kvmm_req_end(rq, KVMM_ENDED, 0);
	kvmm_win_sync(c->win, 0);
	return took;
}

static void put(struct bench_client *c, uint64_t first, unsigned int n,
		struct kvmm_key *key)
{
	int err = bc_put(c, first, n, key);

	if (err)
		bench_die(c->b, "a put", err);
}

static uint64_t beside_page(uint64_t chain)
{
	return BESIDE_FROM + chain * PREFIX;
}

/*
 * Memory and what is below it. Who puts faster than a store writes has pages that
 * are forgotten; so it is waited for.
 */
static void fill(struct stall *s)
{
	unsigned int i, k;

	for (i = 0; i < FILL_CHAINS; i++) {
		put(&s->side[0].c, beside_page(i), PREFIX, NULL);
		wait_written(s);
	}
	atomic_store_explicit(&s->com->next, i, memory_order_relaxed);
	for (i = 0; i < FILL_PUTS; i++) {
		put(&s->side[1].c, PUT_FROM + s->side[1].puts++, 1, NULL);
		if (i % PREFIX == 0)
			wait_written(s);
	}
	for (k = 0; k < 2; k++)
		for (i = 0; i < NR_HOT; i++)
			put(&s->side[k].c, (uint64_t)i * PREFIX, PREFIX,
			    s->side[k].hot[i]);
}

/* ---- what runs beside ------------------------------------------------------------- */

static void beside_main(struct stall *s) __attribute__((noreturn));

/* Puts into the first memory, and asks for what went to its store before the arm. */
static void beside_main(struct stall *s)
{
	struct common *com = s->com;
	/* relaxed, all of them: flags and counters, no data */
	uint64_t next = atomic_load_explicit(&com->next, memory_order_relaxed);
	uint64_t took, late = 0;
	struct timespec ts = ns_to_timespec(BESIDE_NS);
	uint64_t rand = next | 1;
	struct bench_client c;
	unsigned int missed;

	s->b.kvmmd = NULL;
	bc_open(&c, &s->b, s->side[0].socket, PAGE_BYTES);
	while (!atomic_load_explicit(&com->stop, memory_order_relaxed)) {
		put(&c, beside_page(next++), PREFIX, NULL);
		took = fetch_chain(&c, beside_page(bench_rand(&rand) % ASKED),
				   PREFIX, DEADLINE_NS, &missed);
		late = max(late, took - min(took, (uint64_t)DEADLINE_NS));
		atomic_fetch_add_explicit(&com->asked, 1, memory_order_relaxed);
		atomic_fetch_add_explicit(&com->missed, !!missed,
					  memory_order_relaxed);
		nanosleep(&ts, NULL);
	}
	atomic_store_explicit(&com->next, next, memory_order_relaxed);
	if (late > atomic_load_explicit(&com->late_ns, memory_order_relaxed))
		atomic_store_explicit(&com->late_ns, late, memory_order_relaxed);
	bc_close(&c);
	_exit(0);
}

static pid_t start_beside(struct stall *s)
{
	pid_t pid;

	atomic_store_explicit(&s->com->stop, 0, memory_order_relaxed);
	atomic_store_explicit(&s->com->asked, 0, memory_order_relaxed);
	atomic_store_explicit(&s->com->missed, 0, memory_order_relaxed);
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		bench_die(&s->b, "fork", -errno);
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (s->two)
		td_pin_cpu(0, 1);
	beside_main(s);
}

static void end_beside(struct stall *s, pid_t pid)
{
	int status;

	atomic_store_explicit(&s->com->stop, 1, memory_order_relaxed);
	waitpid(pid, &status, 0);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		bench_die(&s->b, "the process beside", -ECHILD);
}

/* ---- what is measured --------------------------------------------------------------- */

static void one_match(struct stall *s, struct side *sd, struct hist *h)
{
	unsigned int p = (unsigned int)(bench_rand(&s->rand) % NR_HOT);
	struct kvmm_req *rq = bc_req(&sd->c, p);
	struct kvmm_hit hit[PREFIX];
	uint64_t t = now_ns();
	unsigned int n = bc_match(&sd->c, rq, sd->hot[p], PREFIX, hit);

	hist_add(h, now_ns() - t);
	kvmm_req_end(rq, KVMM_CONTINUES, 0);
	if (n < PREFIX)
		bc_put(&sd->c, (uint64_t)p * PREFIX, PREFIX, NULL);
}

static void one_put(struct side *sd, struct hist *h)
{
	uint64_t t = now_ns();

	put(&sd->c, PUT_FROM + sd->puts++, 1, NULL);
	hist_add(h, now_ns() - t);
}

static void one_fetch(struct stall *s, struct hist *h)
{
	struct side *sd = &s->side[1];
	unsigned int missed;
	uint64_t ns = fetch_chain(&sd->c, PUT_FROM + sd->puts - 3600 +
				  bench_rand(&s->rand) % 1800, 1, FETCH_NS,
				  &missed);

	if (ns)
		hist_add(h, ns);
}

static void one_turn(struct stall *s, uint64_t turn, struct hist *h)
{
	struct kvmm_done d;
	unsigned int i, k;

	for (k = 0; k < 2; k++) {
		struct side *sd = &s->side[k];

		for (i = 0; i < MATCHES; i++)
			one_match(s, sd, &h[k ? MATCH_1 : MATCH_0]);
		kvmm_poll(sd->c.k, &d, 1);
		if (k || turn % ABOVE_EVERY == 0)
			one_put(sd, &h[k ? PUT_1 : PUT_0]);
	}
	if (turn % FETCH_EVERY == 0)
		one_fetch(s, &h[FETCH_1]);
}

static struct arm run_arm(struct stall *s, bool stalled)
{
	static struct hist h[NR_WHAT];
	uint64_t end = deadline_in(stalled ? STALL_NS : CONTROL_NS);
	pid_t pid = start_beside(s);
	uint64_t next = now_ns(), turn;
	struct timespec ts;
	struct arm a;
	unsigned int i;

	memset(h, 0, sizeof(h));
	if (stalled)
		fault(s, "nvme0:read:stall;nvme0:write:stall;nvme0:journal:stall");
	for (turn = 0; !deadline_past(end); turn++) {
		one_turn(s, turn, h);
		next = max(next + TURN_NS, now_ns());
		ts = ns_to_timespec(deadline_left(next));
		nanosleep(&ts, NULL);
	}
	if (stalled)
		s->degraded += says_degraded(s);
	fault(s, "");
	end_beside(s, pid);
	for (i = 0; i < NR_WHAT; i++)
		a.p99[i] = (double)hist_quantile(&h[i], 0.99);
	bench_say("  %s: p99 above it: match %.2f us, put %.0f us; others: match %.2f us, put %.0f us, fetch %.0f us (of %llu); %llu of %llu asked beside missed",
		  stalled ? "stall  " : "control", a.p99[MATCH_0] / 1e3,
		  a.p99[PUT_0] / 1e3, a.p99[MATCH_1] / 1e3, a.p99[PUT_1] / 1e3,
		  a.p99[FETCH_1] / 1e3,
		  (unsigned long long)hist_count(&h[FETCH_1]),
		  (unsigned long long)s->com->missed,
		  (unsigned long long)s->com->asked);
	return a;
}

/* Nobody does anything: the store comes back, and has what it had. */
static void come_back(struct stall *s, uint64_t chain)
{
	uint64_t begin = now_ns();
	unsigned int missed;
	double sec;

	wait_online(s, "nvme0");
	sec = (double)(now_ns() - begin) / 1e9;
	if (fetch_chain(&s->side[0].c, beside_page(chain), PREFIX, FETCH_NS,
			&missed) && !missed)
		s->back++;
	s->back_s = max(s->back_s, sec);
	bench_say("  online %.1f s after the stall, %u pages of %u missed",
		  sec, missed, PREFIX);
}

static void measure(struct stall *s)
{
	double ratio[NR_WHAT][ROUNDS], noise[NR_WHAT][ROUNDS];
	double us[NR_WHAT][ROUNDS];
	char text[64];
	unsigned int i, k;

	run_arm(s, false);
	for (i = 0; i < ROUNDS; i++) {
		struct arm c1 = run_arm(s, false), st, c2;

		st = run_arm(s, true);
		come_back(s, ASKED + i);
		c2 = run_arm(s, false);
		for (k = 0; k < NR_WHAT; k++) {
			double lo = min(c1.p99[k], c2.p99[k]);
			double hi = max(c1.p99[k], c2.p99[k]);

			ratio[k][i] = st.p99[k] * 2 / (lo + hi);
			noise[k][i] = hi / lo;
			us[k][i] = st.p99[k] / 1e3;
		}
	}
	for (k = 0; k < NR_WHAT; k++) {
		double r = bench_median(ratio[k], ROUNDS);
		double q = bench_median(noise[k], ROUNDS);

		snprintf(text, sizeof(text), "%s_p99_us", what_name[k]);
		bench_result(&s->b, text, bench_median(us[k], ROUNDS));
		snprintf(text, sizeof(text), "%s_ratio", what_name[k]);
		bench_result(&s->b, text, r);
		snprintf(text, sizeof(text), "%s_noise", what_name[k]);
		bench_result(&s->b, text, q);
		snprintf(text, sizeof(text), "%s p99, stall / control",
			 what_name[k]);
		bench_must(&s->b, text, r, "<=", 1.5 * q);
	}
}

/* ---- all of it ------------------------------------------------------------------------- */

/* The first store answers within a second or is in trouble; the other may be slow. */
static void begin(struct stall *s)
{
	static char text[2048], binary[TD_MAX_PATH * 2];
	const char *build = getenv("KVMM_BUILD");
	static struct td_opts o = {
		.binary = binary, .config = text,
		.socket = { { "a.sock", "a" }, { "b.sock", "b" } },
	};
	unsigned int k;
	int err = td_tmpdir(NULL, "kvmm-stall", s->dir, sizeof(s->dir));

	if (err)
		bench_die(&s->b, "a folder", err);
	snprintf(binary, sizeof(binary), "%s/test/kvmmd", build ? build : "build");
	snprintf(text, sizeof(text),
		 "{\"nodes\": ["
		 "{\"name\": \"dram0\", \"kind\": \"host\", \"size\": \"%s\","
		 " \"size_max\": \"%s\", \"below\": \"nvme0\"},"
		 "{\"name\": \"dram1\", \"kind\": \"host\", \"size\": \"%s\","
		 " \"size_max\": \"%s\", \"below\": \"nvme1\"},"
		 "{\"name\": \"nvme0\", \"kind\": \"nvme\", \"size\": \"%s\","
		 " \"path\": \"%s/0\", \"admission\": \"all\","
		 " \"writes_per_day\": 0, \"io_timeout\": \"1s\"},"
		 "{\"name\": \"nvme1\", \"kind\": \"nvme\", \"size\": \"%s\","
		 " \"path\": \"%s/1\", \"admission\": \"all\","
		 " \"writes_per_day\": 0, \"io_timeout\": \"20s\"}]}",
		 DRAM_BYTES, DRAM_BYTES, DRAM_BYTES, DRAM_BYTES, NVME_BYTES,
		 s->dir, NVME_BYTES, s->dir);
	bench_daemon(&s->b, &s->kvmmd, &o);
	wait_online(s, "nvme0");
	wait_online(s, "nvme1");
	for (k = 0; k < 2; k++) {
		snprintf(s->side[k].socket, sizeof(s->side[k].socket),
			 "%s/%s", s->kvmmd.dir, o.socket[k].name);
		bc_open_on(&s->side[k].c, &s->b, s->side[k].socket, PAGE_BYTES,
			   k ? "dram1" : "dram0");
	}
	fill(s);
}

int main(void)
{
	static struct stall s = { .rand = 0x9e3779b97f4a7c15 };
	unsigned int k;
	int rc;

	bench_init(&s.b, "stall");
	s.two = sysconf(_SC_NPROCESSORS_ONLN) > 1;
	if (s.two)
		td_pin_cpu(0, 0);
	s.com = bench_shm(&s.b, sizeof(*s.com));
	begin(&s);
	measure(&s);
	bench_result(&s.b, "back_s", s.back_s);
	bench_result(&s.b, "late_ms", (double)s.com->late_ns / 1e6);
	bench_must(&s.b, "stalls of which status said degraded", s.degraded,
		   "==", ROUNDS);
	bench_must(&s.b, "stalls after which pages were found again", s.back,
		   "==", ROUNDS);
	bench_must(&s.b, "ms that a miss came after its deadline",
		   (double)s.com->late_ns / 1e6, "<=", 100);
	for (k = 0; k < 2; k++)
		bc_close(&s.side[k].c);
	rc = bench_finish(&s.b);
	td_rmtree(s.dir);
	return rc;
}
