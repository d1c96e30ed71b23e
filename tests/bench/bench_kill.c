/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kill - what the death of an engine costs
 *
 * A survivor matches prefixes of 64 pages without pause. Beside it engines are
 * started, get into the middle of things (pins, frames being written, publishes
 * and touches on their way), and are killed with SIGKILL at a random moment.
 *
 * baseline_ms: from the kill until kvmmd's account is what it was before that
 * engine: no frame open, loading, in quarantine or in a magazine more, and no
 * pin of it. Median over all kills.
 *
 * p99_ratio: the survivor's p99 in those arms against control arms, in which as
 * many processes that have nothing to do with kvmm, but have mapped and touched
 * as much memory and keep a CPU as busy, are killed in the same way, and kvmmd
 * is asked as often. Median over rounds of two arms each, ABBA; control against
 * control is the noise.
 */
#include <errno.h>
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

#define PAGE_BYTES	4096u
#define NODE_BYTES	(UINT64_C(512) << 20)
#define PREFIX		64u
#define NR_PREFIXES	512u		/* the survivor's: 128 MiB */
#define NR_VICTIM_KEYS	8192u		/* bounded: so that nothing is evicted */
#define TOUCHED_BYTES	(UINT64_C(64) << 20)
#define ROUNDS		5u
#define KILLS		10u		/* an arm */
#define MIN_MATCHES	200000u		/* an arm */
#define LIFE_MIN_US	3000u
#define LIFE_MAX_US	30000u
#define GIVE_UP_NS	(5 * NSEC_PER_SEC)
#define MAX_KILLS	(4 * ROUNDS * KILLS)

/* What main process, killer and victims share. */
struct common {
	_Atomic uint32_t victim_busy;	/* the victim is in its loop */
	_Atomic uint32_t arm_over;	/* the killer is through */
	_Atomic uint32_t failed;
	uint32_t	nr_kills;
	double		baseline_ms[MAX_KILLS];
};

struct kill {
	struct bench	b;
	struct test_daemon kvmmd;
	struct bench_client c;
	struct common	*com;
	struct kvmm_req	*rq;
	struct kvmm_key	key[NR_PREFIXES][PREFIX];
	uint64_t	rand;
	struct hist	hist;
	uint64_t	wrong;
	bool		two;
};

/* ---- victims ---------------------------------------------------------------------- */

static void busy(struct common *com)
{
	atomic_store_explicit(&com->victim_busy, 1, memory_order_release);
}

/* A few pages of the victims' own chain, from its start. */
static void victim_publish(struct bench_client *c, struct kvmm_req *rq,
			   uint64_t *rand)
{
	uint64_t first = NR_PREFIXES * PREFIX +
			 bench_rand(rand) % (NR_VICTIM_KEYS / 8) * 8;
	unsigned int n = 1 + bench_rand(rand) % 8, i;
	struct kvmm_pub pub[8];
	kvmm_frame_t f[8];

	if (kvmm_alloc(rq, 0, c->node, n, f, 0)) {
		kvmm_win_sync(c->win, 0);
		return;
	}
	memset(pub, 0, sizeof(pub));
	for (i = 0; i < n; i++) {
		bc_key(c, first + i, &pub[i].key);
		if (i)
			pub[i].parent = pub[i - 1].key;
		pub[i].frame = f[i];
		memcpy(kvmm_win_ptr(c->win, 0, f[i]), &pub[i].key, 32);
	}
	if (bench_rand(rand) % 4)
		kvmm_publish(rq, c->node, pub, n, ++c->tag);
	else if (bench_rand(rand) % 2)
		kvmm_free(rq, 0, c->node, f, n, 0);
	/* else they stay open until the request ends, or we do */
}

static void victim_main(struct kill *k) __attribute__((noreturn));

static void victim_main(struct kill *k)
{
	uint64_t rand = now_ns() | 1;
	struct kvmm_req *rq[4] = { NULL };
	struct kvmm_hit hit[PREFIX];
	struct kvmm_done d[16];
	struct bench_client c;

	k->b.kvmmd = NULL;
	bc_open(&c, &k->b, k->kvmmd.socket, PAGE_BYTES);
	busy(k->com);
	for (;;) {
		unsigned int i = bench_rand(&rand) % 4;

		if (rq[i] && bench_rand(&rand) % 4 == 0) {
			kvmm_req_end(rq[i], bench_rand(&rand) % 3, 0);
			rq[i] = NULL;
		}
		if (!rq[i] && kvmm_req_open(c.sp, i, NULL, &rq[i]))
			continue;
		if (bench_rand(&rand) % 2)
			bc_match(&c, rq[i], k->key[bench_rand(&rand) %
						   NR_PREFIXES], PREFIX, hit);
		else
			victim_publish(&c, rq[i], &rand);
		kvmm_poll(c.k, d, 16);
	}
}

/* The same size and the same haste, but nobody that kvmmd knows. */
static void stranger_main(struct kill *k) __attribute__((noreturn));

static void stranger_main(struct kill *k)
{
	int fd = memfd_create("stranger", MFD_CLOEXEC);
	uint64_t rand = now_ns() | 1;
	volatile uint64_t *p;
	uint64_t i;

	if (fd < 0 || ftruncate(fd, (off_t)NODE_BYTES))
		_exit(1);
	p = mmap(NULL, NODE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		_exit(1);
	for (i = 0; i < TOUCHED_BYTES; i += PAGE_BYTES)
		p[i / 8] = i;
	busy(k->com);
	for (;;)
		p[bench_rand(&rand) % (TOUCHED_BYTES / 8)]++;
}

/* ---- the killer -------------------------------------------------------------------- */

static uint64_t number(const json_t *o, const char *key)
{
	return (uint64_t)json_integer_value(json_object_get(o, key));
}

/* Frames that are in somebody's hands, as kvmmd sees it. */
static uint64_t frames_in_hand(struct kill *k)
{
	json_t *status, *node;
	uint64_t n = 0;
	size_t i;
	int err = td_admin(&k->kvmmd, "status", &status);

	if (err)
		bench_die(&k->b, "status", err);
	json_array_foreach(json_object_get(status, "nodes"), i, node) {
		json_t *f = json_object_get(node, "frames");

		n += number(f, "open") + number(f, "loading") +
		     number(f, "quarantine") + number(f, "magazine");
	}
	json_decref(status);
	return n;
}

static uint64_t pins_of(struct kill *k, pid_t pid)
{
	json_t *reply, *p;
	uint64_t n = 0;
	size_t i;
	int err = td_admin(&k->kvmmd, "pins", &reply);

	if (err)
		bench_die(&k->b, "pins", err);
	json_array_foreach(json_object_get(reply, "pins"), i, p)
		if (json_integer_value(json_object_get(p, "pid")) == pid)
			n += number(p, "pins");
	json_decref(reply);
	return n;
}

/* Milliseconds from @t until nothing of @pid is left. */
static double until_baseline(struct kill *k, pid_t pid, uint64_t baseline,
			     uint64_t t)
{
	struct timespec ts = ns_to_timespec(NSEC_PER_MSEC / 4);

	for (;;) {
		if (frames_in_hand(k) <= baseline && !pins_of(k, pid))
			return (double)(now_ns() - t) / 1e6;
		if (now_ns() - t > GIVE_UP_NS)
			return GIVE_UP_NS / 1e6;
		nanosleep(&ts, NULL);
	}
}

static void kill_one(struct kill *k, bool engine)
{
	uint64_t baseline = frames_in_hand(k), t, life;
	struct timespec ts;
	double ms;
	pid_t pid;

	atomic_store_explicit(&k->com->victim_busy, 0, memory_order_relaxed);
	pid = fork();
	if (pid < 0)
		bench_die(&k->b, "fork", -errno);
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (engine)
			victim_main(k);
		else
			stranger_main(k);
	}
	t = now_ns();
	ts = ns_to_timespec(NSEC_PER_MSEC / 10);
	while (!atomic_load_explicit(&k->com->victim_busy,
				     memory_order_acquire)) {
		nanosleep(&ts, NULL);
		if (now_ns() - t > GIVE_UP_NS || waitpid(pid, NULL, WNOHANG))
			bench_die(&k->b, "the victim does not live", -ECHILD);
	}
	life = LIFE_MIN_US + bench_rand(&k->rand) %
			     (LIFE_MAX_US - LIFE_MIN_US);
	ts = ns_to_timespec(life * NSEC_PER_USEC);
	nanosleep(&ts, NULL);

	t = now_ns();
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
	/* Strangers are asked about as well: the same load on kvmmd. */
	ms = until_baseline(k, pid, baseline, t);
	if (engine && k->com->nr_kills < MAX_KILLS)
		k->com->baseline_ms[k->com->nr_kills++] = ms;
}

static void killer_main(struct kill *k, bool engine) __attribute__((noreturn));

static void killer_main(struct kill *k, bool engine)
{
	unsigned int i;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	k->b.kvmmd = NULL;
	if (k->two)
		td_pin_cpu(0, 1);
	k->rand = now_ns() | 1;
	for (i = 0; i < KILLS; i++)
		kill_one(k, engine);
	atomic_store_explicit(&k->com->arm_over, 1, memory_order_release);
	_exit(0);
}

/* ---- the survivor -------------------------------------------------------------------- */

static void check_bytes(struct kill *k, unsigned int p,
			const struct kvmm_hit *hit)
{
	unsigned int i;

	for (i = 0; i < PREFIX; i++) {
		const void *at = kvmm_win_ptr(k->c.win, 0, hit[i].frame);

		if (!at || memcmp(at, &k->key[p][i], sizeof(k->key[p][i])))
			k->wrong++;
	}
}

static void survive(struct kill *k)
{
	struct kvmm_hit hit[PREFIX];
	struct kvmm_done d;
	uint64_t n = 0;

	memset(&k->hist, 0, sizeof(k->hist));
	for (;;) {
		unsigned int p = (unsigned int)(bench_rand(&k->rand) %
						NR_PREFIXES);
		uint64_t t = now_ns();
		unsigned int got = bc_match(&k->c, k->rq, k->key[p], PREFIX,
					    hit);

		hist_add(&k->hist, now_ns() - t);
		if (got != PREFIX)
			bench_die(&k->b, "the survivor lost a page", -ENOENT);
		if (++n % 64)
			continue;
		kvmm_poll(k->c.k, &d, 1);	/* as an engine's loop does */
		check_bytes(k, p, hit);
		if (n >= MIN_MATCHES &&
		    /* acquire: pairs with killer_main() */
		    atomic_load_explicit(&k->com->arm_over,
					 memory_order_acquire))
			return;
	}
}

struct arm {
	double		p50;
	double		p99;
};

static struct arm run_arm(struct kill *k, bool engine)
{
	struct arm a;
	int status;
	pid_t pid;

	atomic_store_explicit(&k->com->arm_over, 0, memory_order_relaxed);
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		bench_die(&k->b, "fork", -errno);
	if (!pid)
		killer_main(k, engine);
	/* A killer that fails must not leave the survivor waiting. */
	signal(SIGALRM, SIG_DFL);
	alarm(60);
	survive(k);
	alarm(0);
	waitpid(pid, &status, 0);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		bench_die(&k->b, "the killer", -ECHILD);
	a.p50 = (double)hist_quantile(&k->hist, 0.50);
	a.p99 = (double)hist_quantile(&k->hist, 0.99);
	bench_say("  %s killed: p50 %.2f us, p99 %.2f us",
		  engine ? "engines  " : "strangers", a.p50 / 1e3, a.p99 / 1e3);
	return a;
}

static void fill(struct kill *k)
{
	struct kvmm_pub pub[PREFIX];
	kvmm_frame_t f[PREFIX];
	unsigned int i, j;

	for (i = 0; i < NR_PREFIXES; i++) {
		struct kvmm_req *rq = bc_req(&k->c, i);
		int n = bc_alloc(&k->c, rq, PREFIX, f, 10000);

		if (n)
			bench_die(&k->b, "frames", n);
		memset(pub, 0, sizeof(pub));
		for (j = 0; j < PREFIX; j++) {
			bc_key(&k->c, i * PREFIX + j, &k->key[i][j]);
			pub[j].key = k->key[i][j];
			if (j)
				pub[j].parent = k->key[i][j - 1];
			pub[j].frame = f[j];
			memcpy(kvmm_win_ptr(k->c.win, 0, f[j]), &pub[j].key,
			       sizeof(pub[j].key));
		}
		n = bc_publish(&k->c, rq, pub, PREFIX);
		if (n != (int)PREFIX)
			bench_die(&k->b, "publish", n < 0 ? n : -EIO);
		kvmm_req_end(rq, KVMM_CONTINUES, 0);
	}
}

int main(void)
{
	static struct kill k = { .rand = 0x9e3779b97f4a7c15 };
	struct td_opts o = { .dram_bytes = NODE_BYTES };
	double p99[ROUNDS], p50[ROUNDS], noise[ROUNDS];
	unsigned int i;

	bench_init(&k.b, "kill");
	k.two = sysconf(_SC_NPROCESSORS_ONLN) > 1;
	o.cpu = k.two ? 2 : 0;
	if (k.two)
		td_pin_cpu(0, 0);
	k.com = bench_shm(&k.b, sizeof(*k.com));
	bench_daemon(&k.b, &k.kvmmd, &o);
	bc_open(&k.c, &k.b, k.kvmmd.socket, PAGE_BYTES);
	fill(&k);
	k.rq = bc_req(&k.c, NR_PREFIXES);

	run_arm(&k, true);
	for (i = 0; i < ROUNDS; i++) {
		struct arm e1, e2, s1, s2;

		if (i % 2) {
			e1 = run_arm(&k, true);
			s1 = run_arm(&k, false);
			s2 = run_arm(&k, false);
			e2 = run_arm(&k, true);
		} else {
			s1 = run_arm(&k, false);
			e1 = run_arm(&k, true);
			e2 = run_arm(&k, true);
			s2 = run_arm(&k, false);
		}
		p99[i] = (e1.p99 + e2.p99) / (s1.p99 + s2.p99);
		p50[i] = (e1.p50 + e2.p50) / (s1.p50 + s2.p50);
		noise[i] = s1.p99 > s2.p99 ? s1.p99 / s2.p99 : s2.p99 / s1.p99;
		bench_say("round %u of %u: p99 ratio %.2f, p50 ratio %.2f, control against control %.2f",
			  i + 1, ROUNDS, p99[i], p50[i], noise[i]);
	}
	kvmm_req_end(k.rq, KVMM_UNKNOWN, 0);
	bc_close(&k.c);

	bench_result(&k.b, "kills", k.com->nr_kills);
	bench_result(&k.b, "baseline_ms",
		     bench_median(k.com->baseline_ms, k.com->nr_kills));
	/* sorted now */
	bench_result(&k.b, "baseline_ms_max", k.com->nr_kills ?
		     k.com->baseline_ms[k.com->nr_kills - 1] : 0);
	bench_result(&k.b, "p99_ratio", bench_median(p99, ROUNDS));
	bench_result(&k.b, "p50_ratio", bench_median(p50, ROUNDS));
	bench_result(&k.b, "noise", bench_median(noise, ROUNDS));
	bench_result(&k.b, "wrong_pages", (double)k.wrong);
	bench_must(&k.b, "kills", k.com->nr_kills, ">=", 100);
	bench_must(&k.b, "baseline_ms",
		   bench_median(k.com->baseline_ms, k.com->nr_kills), "<=",
		   100);
	bench_must(&k.b, "p99_ratio", bench_median(p99, ROUNDS), "<=", 1.5);
	bench_must(&k.b, "wrong_pages", (double)k.wrong, "==", 0);
	return bench_finish(&k.b);
}
