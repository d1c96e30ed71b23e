/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd is killed and another one takes over: what was in DRAM is there, what was
 * pinned is pinned, and engines go on where they were.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "ipc/frame.h"
#include "libkvmm/lib.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define BACK_MS		5000
#define GAP_NS		NSEC_PER_SEC
#define MIB		(UINT64_C(1) << 20)

static struct td_opts kept_opts = {
	.keep	= true,
	/* many deaths are the subject here, not what to make of them */
	.config	= "{\"timeouts\": {\"crash_window\": \"0s\"}}",
};

static void start(struct fx *f)
{
	fx_start(f, &kept_opts);
}

/* The keeper waits longer from time to time: only the first gap says something. */
static void crash(struct fx *f, bool first)
{
	uint64_t gap = 0;

	T_OK(td_crash(&f->d, &gap));
	T_CHECK(!first || gap < GAP_NS, "%llu ms",
		(unsigned long long)(gap / NSEC_PER_MSEC));
}

/* A number of status.adopted. */
static long adopted(struct fx *f, const char *name)
{
	json_t *r = ta_request(&f->d, "{\"cmd\": \"status\"}");
	json_t *o = json_object_get(r, "adopted");
	long v = (long)json_integer_value(json_object_get(o, name));

	json_decref(r);
	return v;
}

/* It has seen the new daemon, and has what it had. */
static bool back(struct tc *c, uint64_t reconnects)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	struct kvmm_done d;

	kvmm_poll(c->k, &d, 1);
	T_OK(kvmm_stats(c->k, &st));
	return st.connected && st.reconnects > reconnects;
}

static uint64_t reconnects(struct tc *c)
{
	struct kvmm_stats st = { .size = sizeof(st) };

	T_OK(kvmm_stats(c->k, &st));
	return st.reconnects;
}

static void crash_and_back(struct fx *f, struct tc *c)
{
	uint64_t before = reconnects(c);

	crash(f, true);
	T_WAIT(LONG_WAIT, back(c, before));
}

/* -- one client ------------------------------------------------------------------- */

static void clients_go_on_with_the_next_kvmmd(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	kvmm_frame_t frame[4];
	struct kvmm_req *rq;
	struct kvmm_pub pub;
	struct kvmm_done d;
	uint64_t epoch;
	void *base;

	start(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	tc_alloc(c, rq, 0, 4, frame);
	base = kvmm_win_base(c->win[0], 0);
	epoch = kvmm_epoch(c->k);
	T_EQ(ta_pins(&f->d, getpid()), 16);

	crash_and_back(f, c);
	T_CHECK(kvmm_epoch(c->k) == epoch);
	T_CHECK(kvmm_win_base(c->win[0], 0) == base);
	T_EQ(adopted(f, "clients"), 1);
	T_EQ(adopted(f, "pages"), 16);
	T_EQ(adopted(f, "gave_up"), 0);
	/* pins held all along, and the request goes on */
	T_EQ(ta_pins(&f->d, getpid()), 16);
	tc_check(c, 1, hit, 16);
	tc_pub(c, &pub, 2, 0, TC_FULL, frame[0], 0);
	tc_fill(c, 0, frame[0], &pub.key);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 5));
	T_CHECK(tc_wait(c, 5, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	T_EQ(tc_hits(c, 1, 16), 16);
	T_EQ(tc_hits(c, 2, 1), 1);
	T_OK(kvmm_free(rq, 0, c->node, &frame[1], 1, 0));
	tc_end(rq);
	T_EQ(tc_put(c, 3, 0, 64), 64);
	T_EQ(tc_hits(c, 3, 64), 64);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	/* another process finds it, too */
	tc_open(&f->c[1], f->d.socket, NULL);
	T_EQ(tc_hits(&f->c[1], 1, 16), 16);
	tc_close(&f->c[1]);
	fx_stop(f);
}

/* What was given back to a kvmmd that did not get to it. */
static void frames_given_back_to_the_dead_are_free(void **state)
{
	kvmm_frame_t frame[512];
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	unsigned int i;
	uint64_t was;
	pid_t pid;

	start(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 4), 4);
	rq = tc_req(c, 1);
	tc_ping(c);
	was = ta_open(&f->d, 0);
	/* few at a time, or the library would keep many */
	for (i = 0; i < 512; i += 32)
		tc_alloc(c, rq, 0, 32, frame + i);
	tc_ping(c);
	T_CHECK(ta_open(&f->d, 0) >= was + 400);
	pid = td_kept(&f->d);
	T_OK(kill(pid, SIGSTOP));
	T_OK(kvmm_free(rq, 0, c->node, frame, 512, 0));
	T_OK(kill(pid, SIGKILL));
	T_WAIT(LONG_WAIT, back(c, 0));
	/* but for what the library keeps to itself, and a refill */
	T_WAIT(LONG_WAIT, (tc_ping(c), ta_open(&f->d, 0) <= was + 200));
	tc_end(rq);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* Has its log these words? */
static bool logged(const struct test_daemon *d, const char *words)
{
	static char text[1u << 20];
	FILE *in = fopen(d->log, "re");
	size_t n;

	if (!in)
		return false;
	n = fread(text, 1, sizeof(text) - 1, in);
	fclose(in);
	text[n] = '\0';
	return strstr(text, words) != NULL;
}

/* Whoever mends the configuration a moment later finds everything. */
static void failed_starts_lose_nothing(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	struct kvmm_req *rq;

	start(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	f->d.opts.policy = "/nonexistent/policy.so";
	T_OK(td_configure(&f->d));
	T_OK(kill(td_kept(&f->d), SIGKILL));
	/* it has failed twice when the third is announced */
	T_WAIT(LONG_WAIT, logged(&f->d, "start 4 in"));
	T_CHECK(logged(&f->d, "/nonexistent/policy.so"));
	f->d.opts.policy = NULL;
	T_OK(td_configure(&f->d));
	T_WAIT(LONG_WAIT, back(c, 0));
	T_EQ(adopted(f, "clients"), 1);
	T_EQ(adopted(f, "pages"), 16);
	T_EQ(ta_pins(&f->d, getpid()), 16);
	tc_check(c, 1, hit, 16);
	tc_end(rq);
	T_EQ(tc_hits(c, 1, 16), 16);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* What was posted and not answered is not done later, and costs no frame. */
static void unanswered_publishes_cost_no_frame(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	kvmm_frame_t frame[8];
	struct kvmm_pub pub[8];
	struct kvmm_req *rq;
	struct kvmm_done d;
	uint64_t open;
	unsigned int i;

	start(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 4), 4);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 8, frame);
	tc_ping(c);
	open = ta_open(&f->d, 0);
	/* they wait for a step that does not come */
	for (i = 0; i < 8; i++)
		tc_pub(c, &pub[i], 9, i, TC_FULL, frame[i], 7);
	T_OK(kvmm_publish(rq, c->node, pub, 8, 5));
	tc_ping(c);
	crash(f, true);
	T_CHECK(tc_wait(c, 5, &d, LONG_WAIT));
	T_EQ(d.result, -ENOTCONN);
	T_WAIT(LONG_WAIT, back(c, 0));
	T_OK(kvmm_step_done(c->k, 7));
	tc_ping(c);
	T_EQ(tc_hits(c, 9, 8), 0);
	tc_end(rq);
	tc_ping(c);
	T_CHECK(ta_open(&f->d, 0) <= open + 64);	/* and a refill */
	/* all of them can be had again */
	T_EQ(tc_put(c, 9, 0, 8), 8);
	T_EQ(tc_hits(c, 9, 8), 8);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

static bool answered(struct tc *c)
{
	struct kvmm_era *e = kvmm_era_now(c->k);

	return atomic_load(&e->ledger->cq.tail) != e->cq_head;
}

/*
 * The next kvmmd knows of no reference that an answer carries: what it names may
 * be reclaimed before it is read, and is a miss then.
 */
static void answers_of_the_dead_name_nothing_wrong(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0], *o = &f->c[1];
	struct td_opts opts = kept_opts;
	kvmm_frame_t frame[8];
	struct kvmm_pub pub[8];
	struct kvmm_req *rq;
	struct kvmm_done d;
	unsigned int i, n = 0;

	opts.dram_bytes = 16 * MIB;		/* 256 pages */
	fx_start(f, &opts);
	tc_open(c, f->d.socket, NULL);
	tc_open(o, f->d.socket, NULL);
	T_EQ(tc_put(o, 1, 0, 8), 8);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 8, frame);
	for (i = 0; i < 8; i++) {
		tc_pub(c, &pub[i], 1, i, TC_FULL, frame[i], 0);
		tc_fill(c, 0, frame[i], &pub[i].key);
	}
	T_OK(kvmm_publish(rq, c->node, pub, 8, 5));
	T_WAIT(LONG_WAIT, answered(c));
	crash(f, true);
	T_WAIT(LONG_WAIT, back(o, 0));
	T_EQ(adopted(f, "gave_up"), 0);
	for (i = 0; i < 60; i++)
		tc_put(o, 100 + i, 0, 16);
	T_CHECK(tc_hits(o, 1, 8) < 8);
	T_CHECK(tc_wait(c, 5, &d, LONG_WAIT));
	for (i = 0; i < 8; i++) {
		if (d.res[i].result != -EEXIST || !d.res[i].frame)
			continue;
		T_EQ(tc_wrong(c, 0, d.res[i].frame, &pub[i].key), 0);
		n++;
	}
	T_CHECK(n < 8);
	T_WAIT(LONG_WAIT, back(c, 0));
	tc_end(rq);
	ta_check(&f->d);
	tc_close(c);
	tc_close(o);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

static void windows_closed_meanwhile_are_closed(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_win_opts wo = { .size = sizeof(wo) };

	start(f);
	tc_open(c, f->d.socket, NULL);
	tc_open(&f->c[1], f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 8), 8);
	T_OK(td_pause(&f->d));			/* the keeper: nobody is started */
	T_OK(kill(td_kept(&f->d), SIGKILL));
	T_WAIT(LONG_WAIT, kvmm_poll(c->k, &(struct kvmm_done){ 0 }, 1) ==
			  -ENOTCONN);
	kvmm_win_close(c->win[0]);
	c->win[0] = NULL;
	T_OK(td_resume(&f->d));
	T_WAIT(LONG_WAIT, back(c, 0));
	tc_ping(c);
	T_OK(kvmm_win_open(c->sp, 0, c->node, &wo, &c->win[0]));
	T_EQ(tc_hits(c, 1, 8), 8);
	T_WAIT(LONG_WAIT, back(&f->c[1], 0));
	T_EQ(tc_hits(&f->c[1], 1, 8), 8);
	ta_check(&f->d);
	tc_close(c);
	tc_close(&f->c[1]);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* A stop that is followed by a start is no other than a crash. */
static void reexec_is_only_a_gap(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	struct kvmm_req *rq;
	unsigned int i;
	uint64_t n;

	start(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	for (i = 0; i < 3; i++) {
		n = reconnects(c);
		json_decref(ta_request(&f->d,
				       "{\"cmd\": \"reexec\"}"));
		T_WAIT(LONG_WAIT, back(c, n));
		tc_check(c, 1, hit, 16);
		T_EQ(ta_pins(&f->d, getpid()), 16);
		T_EQ(tc_hits(c, 1, 16), 16);
	}
	tc_end(rq);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* The daemon lives, and nobody was to blame: the request goes on. */
static void so_does_a_connection_that_was_lost(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	kvmm_frame_t frame;
	struct kvmm_req *rq;
	struct kvmm_pub pub;
	struct kvmm_done d;
	unsigned int i;
	uint64_t n;

	start(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	for (i = 0; i < 5; i++) {
		n = reconnects(c);
		T_OK(shutdown(c->k->sock, SHUT_RDWR));
		T_WAIT(LONG_WAIT, back(c, n));
		T_EQ(ta_clients(&f->d), 1);
		T_EQ(ta_pins(&f->d, getpid()), 16 + i);
		tc_alloc(c, rq, 0, 1, &frame);
		tc_pub(c, &pub, 2 + i, 0, TC_FULL, frame, 0);
		tc_fill(c, 0, frame, &pub.key);
		T_OK(kvmm_publish(rq, c->node, &pub, 1, 5 + i));
		T_CHECK(tc_wait(c, 5 + i, &d, LONG_WAIT));
		T_EQ(d.res[0].result, 0);
	}
	tc_end(rq);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* -- the host lacks memory ---------------------------------------------------------- */

static void say_available(const char *path, unsigned int mib)
{
	FILE *f = fopen(path, "w");

	T_CHECK(f);
	fprintf(f, "MemTotal: %u kB\nMemAvailable: %u kB\n", 10240u * 1024,
		mib * 1024);
	fclose(f);
}

static void what_was_adopted_goes_back_to_a_host_in_need(void **state)
{
	static char path[64], env[96];
	static const char *envs[] = { env, NULL };
	struct td_opts o = kept_opts;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	uint64_t had;

	snprintf(path, sizeof(path), "/var/tmp/kvmm-meminfo-%d", (int)getpid());
	snprintf(env, sizeof(env), "KVMM_TEST_MEMINFO=%s", path);
	say_available(path, 4096);
	o.env = envs;
	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	for (unsigned int i = 0; i < 32; i++)
		T_EQ(tc_put(c, 1 + i, 0, 64), 64);
	tc_ping(c);
	had = ta_node(&f->d, "dram0", "used");
	T_CHECK(had >= 128 * MIB, "%llu", (unsigned long long)had);
	say_available(path, 448);	/* 64 MiB less than 5 per cent */
	crash_and_back(f, c);
	T_WAIT(LONG_WAIT, (tc_sync(c, 0), tc_poll(c),
			   ta_node(&f->d, "dram0", "used") <= had - 64 * MIB));
	say_available(path, 4096);
	T_EQ(tc_put(c, 100, 0, 64), 64);
	T_EQ(tc_hits(c, 100, 64), 64);
	ta_check(&f->d);
	unlink(path);
}

static void say_stalled(const char *path, const char *some, const char *full)
{
	FILE *f = fopen(path, "w");

	T_CHECK(f);
	fprintf(f, "some avg10=%s avg60=0.00 avg300=0.00 total=0\n"
		"full avg10=%s avg60=0.00 avg300=0.00 total=0\n", some, full);
	fclose(f);
}

/* Memory is available, as far as one can see, and nobody gets on. */
static void memory_goes_back_when_all_stall_for_it(void **state)
{
	static char info[64], psi[64], env[2][96];
	static const char *envs[] = { env[0], env[1], NULL };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i;
	uint64_t had;

	snprintf(info, sizeof(info), "/var/tmp/kvmm-meminfo-%d", (int)getpid());
	snprintf(psi, sizeof(psi), "/var/tmp/kvmm-psi-%d", (int)getpid());
	snprintf(env[0], sizeof(env[0]), "KVMM_TEST_MEMINFO=%s", info);
	snprintf(env[1], sizeof(env[1]), "KVMM_TEST_PRESSURE=%s", psi);
	say_available(info, 4096);
	/* some of them always do; that is no reason */
	say_stalled(psi, "99.00", "9.99");
	fx_start(f, &(struct td_opts){ .env = envs });
	tc_open(c, f->d.socket, NULL);
	for (i = 0; i < 32; i++)
		T_EQ(tc_put(c, 1 + i, 0, 64), 64);
	had = ta_node(&f->d, "dram0", "used");
	T_CHECK(had >= 128 * MIB, "%llu", (unsigned long long)had);
	usleep(2500 * 1000);
	tc_sync(c, 0);
	T_EQ(ta_node(&f->d, "dram0", "used"), had);

	say_stalled(psi, "99.00", "10.00");
	T_WAIT(LONG_WAIT, (tc_sync(c, 0), tc_poll(c),
			   ta_node(&f->d, "dram0", "used") <= had - 64 * MIB));
	say_stalled(psi, "0.00", "0.00");
	T_EQ(tc_put(c, 100, 0, 64), 64);
	T_EQ(tc_hits(c, 100, 64), 64);
	ta_check(&f->d);
	unlink(info);
	unlink(psi);
}

/* -- several, under load ----------------------------------------------------------- */

#define LOAD_PAGES	32
#define LOAD_CHAINS	24

/* Put and read chains until told otherwise; bytes are checked all along. */
static long work(void *shm, long base, long ms)
{
	uint64_t deadline = deadline_in((uint64_t)ms * NSEC_PER_MSEC);
	struct tc *c = fx_c();
	long done = 0;
	struct rng r;

	rng_seed(&r, (uint64_t)base);
	while (!deadline_past(deadline)) {
		uint64_t chain = (uint64_t)base + rng_below(&r, LOAD_CHAINS);
		struct kvmm_hit hit[LOAD_PAGES];
		kvmm_frame_t f[LOAD_PAGES];
		struct kvmm_req *rq = tc_req(c, chain);
		struct kvmm_pub pub[LOAD_PAGES];
		struct kvmm_done d;
		unsigned int i;
		uint32_t n;

		n = tc_match_once(c, rq, chain, LOAD_PAGES, hit, NULL);
		tc_check(c, chain, hit, n);
		if (n < LOAD_PAGES &&
		    !kvmm_alloc(rq, 0, c->node, LOAD_PAGES - n, f, 0)) {
			for (i = n; i < LOAD_PAGES; i++) {
				tc_pub(c, &pub[i], chain, i, TC_FULL, f[i - n],
				       0);
				tc_fill(c, 0, f[i - n], &pub[i].key);
			}
			c->tag++;
			if (!kvmm_publish(rq, c->node, &pub[n], LOAD_PAGES - n,
					  c->tag))
				tc_wait(c, c->tag, &d, 2000);
		}
		tc_end(rq);
		tc_poll(c);
		kvmm_win_sync(c->win[0], 0);
		done++;
	}
	return done;
}

static long count_hits(void *shm, long base, long b)
{
	long i, n = 0;

	for (i = 0; i < LOAD_CHAINS; i++)
		n += fx_hits(shm, base + i, LOAD_PAGES);
	return n;
}

static long poll_back(void *shm, long a, long b)
{
	T_WAIT(LONG_WAIT, back(fx_c(), (uint64_t)a));
	return 0;
}

static bool up(struct tc *c)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	struct kvmm_done d;

	kvmm_poll(c->k, &d, 1);
	T_OK(kvmm_stats(c->k, &st));
	return st.connected;
}

static long poll_up(void *shm, long a, long b)
{
	T_WAIT(LONG_WAIT, up(fx_c()));
	return 0;
}

static long my_reconnects(void *shm, long a, long b)
{
	return (long)reconnects(fx_c());
}

static void engines_work_on_through_crashes(void **state)
{
	unsigned int rounds = test_long() ? 12 : 3, i, k;
	struct fx *f = *state;
	long before, after, n[3];
	struct timespec ts;
	struct rng r;

	rng_seed(&r, test_seed());
	start(f);
	for (i = 0; i < 3; i++)
		fx_client(f, i, 0, NULL);
	for (k = 0; k < rounds; k++) {
		for (i = 0; i < 3; i++)
			proc_send(&f->p[i], work, 1000, 1500);
		ts = ns_to_timespec(100 * NSEC_PER_MSEC +
				    rng_below(&r, 300 * NSEC_PER_MSEC));
		nanosleep(&ts, NULL);
		crash(f, false);
		for (i = 0; i < 3; i++)
			T_CHECK(proc_recv(&f->p[i]) > 0);
		for (i = 0; i < 3; i++)
			proc_call(&f->p[i], poll_up, 0, 0);
		ta_check(&f->d);
	}
	/* what is there now is there after the next one */
	before = proc_call(&f->p[0], count_hits, 1000, 0);
	T_CHECK(before > LOAD_CHAINS * LOAD_PAGES / 2, "%ld pages", before);
	for (i = 0; i < 3; i++)
		n[i] = proc_call(&f->p[i], my_reconnects, 0, 0);
	crash(f, false);
	for (i = 0; i < 3; i++)
		proc_call(&f->p[i], poll_back, n[i], 0);
	for (i = 0; i < 3; i++) {
		after = proc_call(&f->p[i], count_hits, 1000, 0);
		T_CHECK(after * 100 >= before * 98, "%ld of %ld pages", after,
			before);
	}
	T_EQ(ta_rejects(&f->d, NULL), 0);
	for (i = 0; i < 3; i++)
		proc_end(&f->p[i]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
	fx_stop(f);
}

/* Nobody is there to hear of it; the next one does. */
static void who_died_meanwhile_holds_nothing(void **state)
{
	struct fx *f = *state;
	pid_t pid;

	start(f);
	fx_client(f, 0, 0, NULL);
	fx_client(f, 1, 0, NULL);
	T_EQ(proc_call(&f->p[0], fx_put, 1, 32), 32);
	T_EQ(proc_call(&f->p[0], fx_hold, 1, 32), 32);
	T_EQ(proc_call(&f->p[1], fx_hold, 1, 32), 32);
	pid = td_kept(&f->d);
	T_OK(td_pause(&f->d));
	T_OK(kill(pid, SIGKILL));
	proc_kill(&f->p[0]);
	T_OK(td_resume(&f->d));
	T_WAIT(LONG_WAIT, td_kept(&f->d) > 0 && td_kept(&f->d) != pid);
	T_WAIT(BACK_MS, ta_clients(&f->d) == 1);
	T_EQ(ta_pins(&f->d, 0), 32);
	T_EQ(ta_pins(&f->d, f->p[1].pid), 32);
	proc_call(&f->p[1], poll_back, 0, 0);
	T_EQ(proc_call(&f->p[1], fx_recheck, 1, 32), 0);
	proc_call(&f->p[1], fx_release, 0, 0);
	T_EQ(proc_call(&f->p[1], fx_hits, 1, 32), 32);
	proc_end(&f->p[1]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
	fx_stop(f);
}

/* -- an engine of two ----------------------------------------------------------------- */

static struct kvmm_engine member_of(uint32_t rank)
{
	struct kvmm_engine e = {
		.size = sizeof(e), .rank = rank, .world = 2,
		.flags = rank ? 0 : KVMM_LEADER, .token = "adopted engine",
	};

	return e;
}

static void an_engine_stays_one(void **state)
{
	struct kvmm_engine e[2] = { member_of(0), member_of(1) };
	struct tc_opts o[2] = { { .engine = &e[0] }, { .engine = &e[1] } };
	struct fx *f = *state;
	struct t_wait w = t_wait_begin(LONG_WAIT);
	kvmm_frame_t frame[8];
	struct kvmm_req *rq;
	unsigned int i, round;

	start(f);
	for (i = 0; i < 2; i++)
		tc_open(&f->c[i], f->d.socket, &o[i]);
	for (round = 0; round < 3; round++) {
		rq = tc_req(&f->c[0], 1);
		while (kvmm_alloc(rq, 0, f->c[0].node, 8, frame, 0) == -EAGAIN) {
			T_CHECK(t_wait_more(&w));
			for (i = 0; i < 2; i++)
				tc_sync(&f->c[i], 0);
			tc_poll(&f->c[0]);
		}
		tc_end(rq);
		T_EQ(tc_put(&f->c[0], 1 + round, 0, 8), 8);
		for (i = 0; i < 2; i++)
			T_OK(kvmm_step_done(f->c[i].k, 10 + round));
		crash(f, false);
		for (i = 0; i < 2; i++)
			T_WAIT(LONG_WAIT, back(&f->c[i], round));
		/* steps go on, and so do hits */
		T_EQ(kvmm_step_engine(f->c[0].k), 10 + round);
		T_EQ(kvmm_step_engine(f->c[1].k), 10 + round);
		for (i = 0; i <= round; i++) {
			T_EQ(tc_hits(&f->c[0], 1 + i, 8), 8);
			T_EQ(tc_hits(&f->c[1], 1 + i, 8), 8);
		}
	}
	ta_check(&f->d);
}

/* Frames with a part for each rank: both parts are there, and both ranks. */
static void so_does_one_on_a_gang(void **state)
{
	struct kvmm_engine e[2] = { member_of(0), member_of(1) };
	struct tc_opts o[2] = {
		{ .engine = &e[0], .world = 2, .node = "gang0" },
		{ .engine = &e[1], .world = 2, .node = "gang0" },
	};
	struct td_opts opts = kept_opts;
	struct fx *f = *state;
	struct tc *c = f->c;
	struct t_wait w = t_wait_begin(LONG_WAIT);
	kvmm_frame_t frame[8];
	struct kvmm_pub pub[8];
	struct kvmm_req *rq;
	struct kvmm_done d;
	unsigned int i, k;

	opts.gang = 2;
	opts.gang_bytes = 32 * MIB;
	fx_start(f, &opts);
	for (i = 0; i < 2; i++)
		tc_open(&c[i], f->d.socket, &o[i]);
	rq = tc_req(&c[0], 1);
	while (kvmm_alloc(rq, 0, c[0].node, 8, frame, 0) == -EAGAIN) {
		T_CHECK(t_wait_more(&w));
		for (i = 0; i < 2; i++)
			tc_sync(&c[i], 0);
		tc_poll(&c[0]);
	}
	for (i = 0; i < 8; i++) {
		tc_pub(&c[0], &pub[i], 1, i, TC_FULL, frame[i], 0);
		for (k = 0; k < 2; k++)
			tc_fill(&c[k], 0, frame[i], &pub[i].key);
	}
	T_OK(kvmm_publish(rq, c[0].node, pub, 8, 5));
	T_CHECK(tc_wait(&c[0], 5, &d, LONG_WAIT));
	T_EQ(d.result, 0);
	for (k = 0; k < 2; k++) {
		crash(f, k == 0);
		for (i = 0; i < 2; i++)
			T_WAIT(LONG_WAIT, back(&c[i], k));
		for (i = 0; i < 2; i++)
			T_EQ(tc_hits(&c[i], 1, 8), 8);
	}
	tc_end(rq);
	ta_check(&f->d);
}

/* -- with a disk below ---------------------------------------------------------------- */

#define DISK_CHAINS	48u
#define DISK_PAGES	32u

/* Pages that can be had, wherever they are; bytes are checked. */
static unsigned int all_there(struct tc *c)
{
	unsigned int i, n = 0;

	for (i = 0; i < DISK_CHAINS; i++) {
		struct tc_got g = tc_get(c, 1 + i, DISK_PAGES, 5000);

		n += g.resident + g.fetched;
	}
	return n;
}

/*
 * Three times what fits into memory. Pages in memory whose parents are on the disk
 * alone wait for those; and frames that the last one was reading into for its I/O.
 */
static void memory_and_disk_are_one_again(void **state)
{
	struct td_opts o = kept_opts;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, before, after;

	o.dram_bytes = 32 * MIB;
	o.nvme_bytes = 256 * MIB;
	o.io_timeout = "5s";
	o.config = "{\"timeouts\": {\"crash_window\": \"0s\", "
		   "\"direct_reclaim\": \"1s\"}}";
	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	for (i = 0; i < DISK_CHAINS; i++) {
		T_EQ(tc_put(c, 1 + i, 0, DISK_PAGES), DISK_PAGES);
		T_WAIT(LONG_WAIT, !ta_node(&f->d, "nvme0", "write.inflight") &&
				  !ta_node(&f->d, "nvme0", "write.queued"));
	}
	before = all_there(c);
	T_CHECK(before >= DISK_CHAINS * DISK_PAGES * 9 / 10, "%u", before);
	/* what is on its way to the disk may be lost, no more */
	crash_and_back(f, c);
	fx_online(&f->d);
	ta_check(&f->d);
	T_WAIT(LONG_WAIT, !adopted(f, "waiting"));
	after = all_there(c);
	T_CHECK(after * 100 >= before * 95, "%u of %u pages", after, before);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* -- what was spoilt -------------------------------------------------------------------- */

/* A file of the keeper's, by the name of its memory, mapped. */
static void *keepers(pid_t keeper, const char *what, size_t *bytes)
{
	char dir[64], link[320], to[256];
	struct dirent *de;
	void *p = NULL;
	ssize_t n;
	DIR *d;
	int fd;

	snprintf(dir, sizeof(dir), "/proc/%d/fd", (int)keeper);
	d = opendir(dir);
	T_CHECK(d);
	while (!p && (de = readdir(d))) {
		snprintf(link, sizeof(link), "%s/%s", dir, de->d_name);
		n = readlink(link, to, sizeof(to) - 1);
		to[n < 0 ? 0 : n] = '\0';
		if (!strstr(to, what))
			continue;
		fd = open(link, O_RDWR | O_CLOEXEC);
		T_CHECK(fd >= 0, "%s", strerror(errno));
		*bytes = (size_t)lseek(fd, 0, SEEK_END);
		p = mmap(NULL, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
			 0);
		T_CHECK(p != MAP_FAILED);
		close(fd);
	}
	closedir(d);
	return p;
}

/* Every record of a chain's page @i, by its key: a bit of it flips. */
static unsigned int spoil(void *mem, size_t bytes, const struct kvmm_key *key)
{
	unsigned int n = 0;
	size_t at;

	for (at = 0; at + sizeof(struct frame_record) <= bytes; at += 128) {
		struct frame_record *r = (void *)((char *)mem + at);

		if (memcmp(r->key, key->b, sizeof(r->key)))
			continue;
		r->cost_us ^= 4;
		n++;
	}
	return n;
}

static void a_spoilt_record_costs_a_page(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_key key;
	size_t bytes = 0;
	void *mem;
	pid_t pid;

	start(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	T_EQ(tc_put(c, 2, 0, 16), 16);
	pid = td_kept(&f->d);
	T_OK(td_pause(&f->d));
	T_OK(kill(pid, SIGKILL));
	mem = keepers(f->d.pid, "kvmm-records", &bytes);
	T_CHECK(mem);
	tc_key(c, 1, 8, TC_FULL, &key);
	T_EQ(spoil(mem, bytes, &key), 1);
	munmap(mem, bytes);
	T_OK(td_resume(&f->d));
	T_WAIT(LONG_WAIT, back(c, 0));
	T_EQ(tc_hits(c, 1, 16), 8);
	T_EQ(tc_hits(c, 2, 16), 16);
	ta_check(&f->d);
	T_EQ(tc_put(c, 1, 8, 8), 8);
	T_EQ(tc_hits(c, 1, 16), 16);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* The state that says who had what is gone: everybody begins anew. */
static void without_a_state_all_begin_anew(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	struct kvmm_req *rq;
	size_t bytes = 0;
	uint64_t epoch;
	void *mem;
	pid_t pid;

	start(f);
	tc_open(c, f->d.socket, NULL);
	epoch = kvmm_epoch(c->k);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	pid = td_kept(&f->d);
	T_OK(td_pause(&f->d));
	T_OK(kill(pid, SIGKILL));
	mem = keepers(f->d.pid, "kvmm-state", &bytes);
	T_CHECK(mem);
	memset(mem, 0x5a, 4096);
	munmap(mem, bytes);
	T_OK(td_resume(&f->d));
	T_WAIT(LONG_WAIT, back(c, 0));
	/* by which a rank knows that a plan of then means nothing now */
	T_CHECK(kvmm_epoch(c->k) != epoch);
	/* it reads on what it had pinned */
	tc_check(c, 1, hit, 16);
	tc_end(rq);
	T_OK(kvmm_win_sync(c->win[0], 0));
	T_EQ(tc_hits(c, 1, 16), 0);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	T_EQ(tc_hits(c, 1, 16), 16);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(clients_go_on_with_the_next_kvmmd),
		FX_TEST(frames_given_back_to_the_dead_are_free),
		FX_TEST(failed_starts_lose_nothing),
		FX_TEST(unanswered_publishes_cost_no_frame),
		FX_TEST(answers_of_the_dead_name_nothing_wrong),
		FX_TEST(windows_closed_meanwhile_are_closed),
		FX_TEST(reexec_is_only_a_gap),
		FX_TEST(so_does_a_connection_that_was_lost),
		FX_TEST(what_was_adopted_goes_back_to_a_host_in_need),
		FX_TEST(memory_goes_back_when_all_stall_for_it),
		FX_TEST(engines_work_on_through_crashes),
		FX_TEST(who_died_meanwhile_holds_nothing),
		FX_TEST(an_engine_stays_one),
		FX_TEST(so_does_one_on_a_gang),
		FX_TEST(memory_and_disk_are_one_again),
		FX_TEST(a_spoilt_record_costs_a_page),
		FX_TEST(without_a_state_all_begin_anew),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
