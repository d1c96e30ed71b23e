/* SPDX-License-Identifier: Apache-2.0 */
/*
 * restart - what the end of a kvmmd costs the engines that are attached
 *
 * kvmmd runs under its keeper with 256 Ki pages in DRAM. One client is measured;
 * others pin, match and publish all the time, as engines do. Then kvmmd is
 * killed with SIGKILL, or asked to replace itself, and the next one takes over.
 *
 * gap_ms: from the kill (or the request) until the measured client has seen the
 * new daemon, a prefix hits as a whole, and a page that it publishes is sealed.
 * That includes the 100 ms that the keeper waits first. Each kill is of a daemon
 * of its own, since the keeper's pauses grow; re-execs (gap_ms_orderly) follow one
 * another.
 *
 * gap_ms_1mi is that of kills with four times as many pages. Each is the median
 * of its kind; the longest (_max) has the same limit.
 *
 * dram_hits_kept: pages that hit after it, of all that were put, and all of them
 * hit before: the smallest share of all restarts. The bytes of all of them are
 * looked at.
 */
#include <errno.h>
#include <math.h>
#include <poll.h>
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

#define PAGE_BYTES	4096u
#define DRAM_BYTES	(UINT64_C(5) << 30)
#define PREFIX		512u
#define NR_PREFIXES	512u			/* 256 Ki pages */
#define MAX_PREFIXES	2048u			/* 1 Mi pages, 4 GiB of the 5 */
#define ENGINES		3u
#define OWN_PAGES	1024u			/* of each engine: it has no more */
#define KILLS		9u
#define REEXECS		9u
#define KILLS_1MI	3u
#define GIVE_UP_NS	(20 * NSEC_PER_SEC)
#define ENGINE_FROM	(UINT64_C(1) << 32)	/* numbers of pages */
#define PROOF_FROM	(UINT64_C(1) << 40)

/**
 * struct common - what all processes share
 * @quit:	engines end
 * @turns:	of each engine's loop
 * @reconnects:	of each engine
 */
struct common {
	_Atomic uint32_t quit;
	_Atomic uint64_t turns[ENGINES];
	_Atomic uint64_t reconnects[ENGINES];
};

struct restart {
	struct bench	b;
	struct test_daemon kvmmd;
	struct bench_client c;
	struct common	*com;
	pid_t		engine[ENGINES];
	unsigned int	nr_prefixes;
	struct kvmm_key	key[MAX_PREFIXES][PREFIX];
	uint64_t	proofs;
	uint64_t	wrong;
	uint64_t	absent;		/* before a restart */
	double		kept;		/* the smallest share so far */
	double		adopt_ms;	/* the last adoption, by its own word */
};

/* Ends the engines first: bench_die() knows of the daemon only. */
static void die(struct restart *r, const char *what, int err)
	__attribute__((noreturn));

static void die(struct restart *r, const char *what, int err)
{
	unsigned int i;

	for (i = 0; i < ENGINES; i++)
		if (r->engine[i] > 0)
			kill(r->engine[i], SIGKILL);
	bench_die(&r->b, what, err);
}

/* ---- pages ------------------------------------------------------------------------ */

/*
 * Publish @n pages from number @first on as a chain, whatever there is already.
 * 0 or -errno; while there is no daemon it fails.
 */
static int put_chain(struct bench_client *c, uint64_t first, unsigned int n,
		     struct kvmm_key *key)
{
	struct kvmm_pub pub[PREFIX];
	kvmm_frame_t f[PREFIX];
	struct kvmm_req *rq;
	unsigned int i;
	int err = kvmm_req_open(c->sp, first, NULL, &rq);

	if (err)
		return err;
	err = bc_alloc(c, rq, n, f, 2000);
	memset(pub, 0, sizeof(pub));
	for (i = 0; i < n && !err; i++) {
		bc_key(c, first + i, &pub[i].key);
		if (i)
			pub[i].parent = pub[i - 1].key;
		if (key)
			key[i] = pub[i].key;
		pub[i].frame = f[i];
		memcpy(kvmm_win_ptr(c->win, 0, f[i]), &pub[i].key,
		       sizeof(pub[i].key));
	}
	if (!err)
		err = bc_publish(c, rq, pub, n);
	kvmm_req_end(rq, KVMM_CONTINUES, 0);
	return err < 0 ? err : err == (int)n ? 0 : -EEXIST;
}

static uint64_t reconnects(struct bench_client *c)
{
	struct kvmm_stats st = { .size = sizeof(st) };

	kvmm_stats(c->k, &st);
	return st.connected ? st.reconnects : 0;
}

/* Pages of all prefixes that hit; their bytes are looked at. */
static unsigned int count_hits(struct restart *r)
{
	struct kvmm_hit hit[PREFIX];
	unsigned int p, i, n, sum = 0;

	for (p = 0; p < r->nr_prefixes; p++) {
		struct kvmm_req *rq = bc_req(&r->c, p);

		n = bc_match(&r->c, rq, r->key[p], PREFIX, hit);
		for (i = 0; i < n; i++) {
			const void *at = kvmm_win_ptr(r->c.win, 0,
						      hit[i].frame);

			if (!at || memcmp(at, &r->key[p][i],
					  sizeof(r->key[p][i])))
				r->wrong++;
		}
		sum += n;
		kvmm_req_end(rq, KVMM_CONTINUES, 0);
	}
	return sum;
}

/* ---- engines ---------------------------------------------------------------------- */

/* One turn of the loop: a pinned prefix for some matches, and a page now and then. */
static void engine_turn(struct restart *r, struct bench_client *c,
			unsigned int me, uint64_t turn)
{
	unsigned int p = (unsigned int)((turn * ENGINES + me) %
					r->nr_prefixes);
	struct timespec ts = ns_to_timespec(NSEC_PER_MSEC);
	struct kvmm_hit hit[PREFIX];
	struct kvmm_req *rq;
	struct kvmm_done d;

	if (kvmm_req_open(c->sp, me, NULL, &rq))
		return;
	bc_match(c, rq, r->key[p], PREFIX, hit);
	nanosleep(&ts, NULL);
	if (turn % 8 == 0)
		put_chain(c, ENGINE_FROM * (me + 1) + turn / 8 % OWN_PAGES, 1,
			  NULL);
	kvmm_poll(c->k, &d, 1);
	kvmm_win_sync(c->win, 0);
	kvmm_req_end(rq, KVMM_CONTINUES, 0);
}

static void engine_main(struct restart *r, unsigned int me)
	__attribute__((noreturn));

static void engine_main(struct restart *r, unsigned int me)
{
	struct common *com = r->com;
	struct bench_client c;
	uint64_t turn = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	r->b.kvmmd = NULL;
	bc_open(&c, &r->b, r->kvmmd.socket, PAGE_BYTES);
	/* relaxed: flags and counters, no data */
	while (!atomic_load_explicit(&com->quit, memory_order_relaxed)) {
		engine_turn(r, &c, me, turn++);
		atomic_store_explicit(&com->turns[me], turn,
				      memory_order_relaxed);
		atomic_store_explicit(&com->reconnects[me], reconnects(&c),
				      memory_order_relaxed);
	}
	bc_close(&c);
	_exit(0);
}

/* Wait until all engines' counters at @v are above @than. */
static void engines_wait(struct restart *r, const _Atomic uint64_t *v,
			 uint64_t than, const char *what)
{
	uint64_t deadline = deadline_in(GIVE_UP_NS);
	struct timespec ts = ns_to_timespec(NSEC_PER_MSEC);
	unsigned int i;

	for (i = 0; i < ENGINES; i++)
		while (atomic_load_explicit(&v[i], memory_order_relaxed) <=
		       than) {
			if (deadline_past(deadline))
				die(r, what, -ETIMEDOUT);
			nanosleep(&ts, NULL);
		}
}

static void engines_start(struct restart *r)
{
	unsigned int i;

	memset(r->com, 0, sizeof(*r->com));
	fflush(NULL);
	for (i = 0; i < ENGINES; i++) {
		r->engine[i] = fork();
		if (r->engine[i] < 0)
			die(r, "fork", -errno);
		if (!r->engine[i])
			engine_main(r, i);
	}
	engines_wait(r, r->com->turns, 16, "engines that work");
}

static void engines_end(struct restart *r)
{
	unsigned int i;
	int status;

	atomic_store_explicit(&r->com->quit, 1, memory_order_relaxed);
	for (i = 0; i < ENGINES; i++) {
		waitpid(r->engine[i], &status, 0);
		r->engine[i] = 0;
		if (!WIFEXITED(status) || WEXITSTATUS(status))
			die(r, "an engine did not go on", -ECHILD);
	}
}

/* ---- one restart ------------------------------------------------------------------- */

/* How long the new one took to adopt all. */
static double adopt_ms(struct restart *r)
{
	json_t *reply = NULL;
	double v;
	int err = td_admin(&r->kvmmd, "status", &reply);

	if (err)
		die(r, "status", err);
	v = json_number_value(json_object_get(json_object_get(reply, "adopted"),
					      "ms"));
	json_decref(reply);
	return v;
}

static void begin(struct restart *r, unsigned int nr_prefixes)
{
	struct td_opts o = { .dram_bytes = DRAM_BYTES, .keep = true };
	unsigned int i;
	int err;

	r->nr_prefixes = nr_prefixes;
	bench_daemon(&r->b, &r->kvmmd, &o);
	bc_open(&r->c, &r->b, r->kvmmd.socket, PAGE_BYTES);
	for (i = 0; i < r->nr_prefixes; i++) {
		err = put_chain(&r->c, (uint64_t)i * PREFIX, PREFIX, r->key[i]);
		if (err)
			die(r, "prefixes", err);
	}
	engines_start(r);
}

static void end(struct restart *r)
{
	engines_end(r);
	bc_close(&r->c);
	td_fini(&r->kvmmd);
	r->b.kvmmd = NULL;
}

/* Until the measured client is served as before; ns since @t. */
static uint64_t until_served(struct restart *r, uint64_t before, uint64_t t)
{
	struct pollfd pfd = { .fd = kvmm_fd(r->c.k), .events = POLLIN };
	struct kvmm_hit hit[PREFIX];
	struct kvmm_req *rq;
	struct kvmm_done d;
	bool whole;

	for (;;) {
		if (now_ns() - t > GIVE_UP_NS)
			die(r, "a daemon that takes over", -ETIMEDOUT);
		kvmm_poll(r->c.k, &d, 1);
		if (reconnects(&r->c) <= before) {
			poll(&pfd, 1, 1);
			continue;
		}
		rq = bc_req(&r->c, 0);
		whole = bc_match(&r->c, rq, r->key[0], PREFIX, hit) == PREFIX;
		kvmm_req_end(rq, KVMM_CONTINUES, 0);
		if (whole && !put_chain(&r->c, PROOF_FROM + r->proofs++, 1,
					NULL))
			return now_ns() - t;
	}
}

static double one_restart(struct restart *r, bool killed)
{
	uint64_t before = reconnects(&r->c), t, gap;
	unsigned int all = r->nr_prefixes * PREFIX, was = count_hits(r), is;
	pid_t pid = td_kept(&r->kvmmd);
	int err;

	if (pid < 0)
		die(r, "kvmmd's pid", pid);
	t = now_ns();
	err = killed ? (kill(pid, SIGKILL) ? -errno : 0) :
		       td_admin(&r->kvmmd, "reexec", NULL);
	if (err)
		die(r, "the end of kvmmd", err);
	gap = until_served(r, before, t);
	engines_wait(r, r->com->reconnects, before, "engines that come back");
	is = count_hits(r);
	r->absent += all - was;
	r->kept = fmin(r->kept, (double)is / all);
	r->adopt_ms = adopt_ms(r);
	bench_say("  %s: away for %.1f ms, %.0f ms of it to adopt; %u of %u pages hit again",
		  killed ? "killed" : "re-exec", (double)gap / 1e6,
		  r->adopt_ms, is, all);
	return (double)gap / 1e6;
}

/* The median, and the longest. */
static void report(struct restart *r, const char *key, double *v,
		   unsigned int n)
{
	double median = bench_median(v, n);	/* sorts */
	char name[64];

	bench_result(&r->b, key, median);
	snprintf(name, sizeof(name), "%s_max", key);
	bench_result(&r->b, name, v[n - 1]);
	bench_must(&r->b, key, median, "<=", 1000);
	bench_must(&r->b, name, v[n - 1], "<=", 1000);
}

int main(void)
{
	static struct restart r = { .kept = 1 };
	double killed[KILLS], orderly[REEXECS], many[KILLS_1MI];
	unsigned int i;

	bench_init(&r.b, "restart");
	r.com = bench_shm(&r.b, sizeof(*r.com));
	for (i = 0; i < KILLS; i++) {
		begin(&r, NR_PREFIXES);
		killed[i] = one_restart(&r, true);
		end(&r);
	}
	begin(&r, NR_PREFIXES);
	for (i = 0; i < REEXECS; i++)
		orderly[i] = one_restart(&r, false);
	end(&r);
	for (i = 0; i < KILLS_1MI; i++) {
		begin(&r, MAX_PREFIXES);
		many[i] = one_restart(&r, true);
		end(&r);
	}

	report(&r, "gap_ms", killed, KILLS);
	report(&r, "gap_ms_orderly", orderly, REEXECS);
	report(&r, "gap_ms_1mi", many, KILLS_1MI);
	bench_result(&r.b, "adopt_ms_1mi", r.adopt_ms);
	bench_result(&r.b, "restarts", KILLS + REEXECS + KILLS_1MI);
	bench_result(&r.b, "dram_hits_kept", r.kept);
	bench_result(&r.b, "wrong_pages", (double)r.wrong);
	bench_must(&r.b, "pages that were not there before",
		   (double)r.absent, "==", 0);
	bench_must(&r.b, "dram_hits_kept", r.kept, ">=", 0.98);
	bench_must(&r.b, "wrong_pages", (double)r.wrong, "==", 0);
	return bench_finish(&r.b);
}
