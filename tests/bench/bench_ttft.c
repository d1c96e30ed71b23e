/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ttft - time to the first token, cold and with what is cached
 *
 * The small engine (tests/engine) as a process like any other, with the shape
 * "bench" and as many threads as there are CPUs, and prompts that share 4,096
 * tokens. Times are the engine's own, from a request's arrival to its first
 * token.
 *
 * cold_ms: nobody has computed the prompt. dram_ms: the same process has.
 * dram_other_ms: another process has. nvme_ms: its pages were pushed out of DRAM
 * by other pages and came back from NVMe. nomatch_ms is a second cold figure, of
 * an engine that does not look. Both cold ones have neither a hit nor a fetch.
 *
 * engine_restart_ms: the first request of an engine that has just started, after
 * its predecessor has ended; from its arrival, too, so without the time that
 * making the model, connecting and mapping took. engine_restart_all_ms is the
 * same with it, from fork() on.
 *
 * Each is a median, of <name>_n times.
 *
 * Each prompt is asked with the same last tokens everywhere, and once more with
 * other ones. The digests of the logits of all answers to a prompt must be the
 * same, with one computed by an engine that finds nothing among them.
 *
 * step_ratio: a decode step over kvmm memory against private memory;
 * step_syscalls: system calls that libkvmm makes in it; step_publish_syscalls: in
 * one in which every sequence fills a page, at most; step.c.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "tests/bench/bench.h"
#include "tests/bench/step.h"
#include "tests/engine/kv.h"
#include "tests/lib/engine_child.h"

#define DRAM_BYTES	(UINT64_C(192) << 20)
#define NVME_BYTES	(UINT64_C(2) << 30)
#define SHARED		4096u		/* tokens */
#define LAST		8u		/* further ones: no page of their own */
#define ANSWER		4u		/* tokens to generate */
#define PROMPTS		2u
#define TAILS		2u		/* kinds of last tokens */
#define REPEATS		5u
#define PUSH_PAGES	32u		/* that push others out, a request */
#define PUSH_NS		(10 * NSEC_PER_SEC)
#define NVME_MIN	4000u		/* tokens that must have come from below */
#define START_MS	60000u
#define ANSWER_MS	300000u
#define MAX_TIMES	(PROMPTS * TAILS * REPEATS)

/* Times of one kind. */
struct times {
	const char	*key;
	double		ms[MAX_TIMES];
	unsigned int	n;
};

struct ttft {
	struct bench	b;
	struct test_daemon kvmmd;
	struct engine_child one, two;
	char		threads[16];
	char		digest[PROMPTS][TAILS][24];
	struct kv	kv;		/* of who pushes */
	struct model	*model;
	uint64_t	pushed;
	struct times	cold, nomatch, dram, other, nvme, restart, restart_all;
};

/* Ends what it started: bench_die() knows of the daemon only. */
static void die(struct ttft *t, const char *what, int err)
	__attribute__((noreturn));

static void die(struct ttft *t, const char *what, int err)
{
	ec_kill(&t->one);
	ec_kill(&t->two);
	bench_die(&t->b, what, err);
}

/* ---- requests -------------------------------------------------------------------- */

/* Tokens that look like nothing else: prompt @p, last tokens of kind @tail. */
static json_t *prompt(unsigned int p, unsigned int tail)
{
	uint64_t shared = 0x9e3779b97f4a7c15ull * (p + 1);
	uint64_t last = shared ^ (tail + 1);
	json_t *a = json_array();
	unsigned int i;

	for (i = 0; i < SHARED + LAST; i++)
		json_array_append_new(a, json_integer((json_int_t)
			(bench_rand(i < SHARED ? &shared : &last) % 256)));
	return a;
}

static unsigned int number(const json_t *o, const char *name)
{
	return (unsigned int)json_integer_value(json_object_get(o, name));
}

/* The answer, a new reference, with the logits that it must have. */
static json_t *ask(struct ttft *t, struct engine_child *e, unsigned int p,
		   unsigned int tail)
{
	char *want = t->digest[p][tail];
	const char *got;
	json_t *o;
	int err = ec_ask(e, json_pack("{s:i, s:o, s:i, s:s}", "id", (int)p + 1,
				      "tokens", prompt(p, tail), "max_tokens",
				      (int)ANSWER, "how", "continues"));

	if (!err)
		err = ec_event(e, "done", ANSWER_MS, &o);
	if (err)
		die(t, "an answer", err);
	got = json_string_value(json_object_get(o, "digest"));
	if (number(o, "err") || !got)
		die(t, "an answer is an error", -EIO);
	if (!*want)
		snprintf(want, sizeof(t->digest[p][tail]), "%s", got);
	if (strcmp(want, got))
		die(t, "answers to the same prompt differ", -EBADMSG);
	return o;
}

static void note(struct times *times, double ms)
{
	if (times->n < MAX_TIMES)
		times->ms[times->n++] = ms;
}

/*
 * Ask, and note the time to the first token. So many tokens at least must have
 * been hit, and fetched; where both are 0, it is none at all.
 */
static void timed(struct ttft *t, struct engine_child *e, unsigned int p,
		  unsigned int tail, unsigned int hit, unsigned int fetched,
		  struct times *times)
{
	json_t *o = ask(t, e, p, tail);
	double ms = json_number_value(json_object_get(o, "ttft_ms"));

	bench_say("  %s: prompt %u.%u: %.1f ms, %u tokens hit, %u fetched",
		  times->key, p, tail, ms, number(o, "hit"),
		  number(o, "fetched"));
	if (!hit && !fetched && (number(o, "hit") || number(o, "fetched")))
		die(t, "a cold prompt was not cold", -EEXIST);
	if (number(o, "hit") < hit)
		die(t, "too little was hit", -ENOENT);
	if (number(o, "fetched") < fetched)
		die(t, "too little came from NVMe", -ENOENT);
	note(times, ms);
	json_decref(o);
}

static void start(struct ttft *t, struct engine_child *e, const char *more)
{
	const char *const args[] = {
		"-c", "bench", "--threads", t->threads, "--fetch-all",
		"--fetch-ms", "20000", more, NULL,
	};
	int err = ec_start(e, t->kvmmd.socket, args, START_MS);

	if (err)
		die(t, "an engine", err);
}

static void end(struct ttft *t, struct engine_child *e)
{
	if (ec_end(e))
		die(t, "an engine did not end well", -ECHILD);
}

/* ---- pushing out ------------------------------------------------------------------ */

/* Wait for something to come, a millisecond at most. */
static int wait_done(struct ttft *t, struct kvmm_done *d)
{
	struct pollfd p = { .fd = kvmm_fd(t->kv.k), .events = POLLIN };
	int n = kvmm_poll(t->kv.k, d, 1);

	if (!n)
		poll(&p, 1, 1);
	return n;
}

static int push_alloc(struct ttft *t, struct kvmm_req *rq, kvmm_frame_t *f)
{
	uint64_t deadline = deadline_in(PUSH_NS);
	struct kvmm_done d;
	int err;

	while ((err = kvmm_alloc(rq, 0, t->kv.node, PUSH_PAGES, f, 0)) ==
	       -EAGAIN) {
		if (deadline_past(deadline))
			return -ETIMEDOUT;
		err = kv_sync(&t->kv, 0);
		if (err)
			return err;
		wait_done(t, &d);
	}
	return err ? err : kv_sync(&t->kv, 0);
}

static int push_publish(struct ttft *t, struct kvmm_req *rq,
			const kvmm_frame_t *f)
{
	uint64_t deadline = deadline_in(PUSH_NS);
	struct kvmm_pub pub[PUSH_PAGES];
	const struct kvmm_class *cls = &t->kv.cls[0];
	struct kvmm_done d;
	unsigned int i, s;
	int err;

	memset(pub, 0, sizeof(pub));
	for (i = 0; i < PUSH_PAGES; i++) {
		kvmm_key_wrap(t->kv.sp, &t->pushed, sizeof(t->pushed),
			      &pub[i].key);
		t->pushed++;
		if (i)
			pub[i].parent = pub[i - 1].key;
		pub[i].pos = i * t->kv.g[0].block_tokens;
		pub[i].frame = f[i];
		for (s = 0; s < cls->nsegs; s++)
			memset(kvmm_win_ptr(t->kv.g[0].win, s, f[i]), (int)i,
			       cls->segs[s].bytes);
	}
	err = kvmm_publish(rq, t->kv.node, pub, PUSH_PAGES, 1);
	if (err)
		return err;
	while (!(err = wait_done(t, &d)))
		if (deadline_past(deadline))
			return -ETIMEDOUT;
	if (err < 0)
		return err;
	return d.result ? d.result : d.n == PUSH_PAGES ? d.res[0].result : -EIO;
}

/*
 * Twice as much as DRAM holds is published in the engines' own space, so that
 * what was used longest ago leaves.
 */
static void push_out(struct ttft *t)
{
	kvmm_frame_t f[PUSH_PAGES];
	struct kvmm_req *rq;
	uint64_t bytes;
	int err;

	for (bytes = 0; bytes < 2 * DRAM_BYTES;
	     bytes += (uint64_t)PUSH_PAGES * t->kv.cls[0].page_bytes) {
		err = kvmm_req_open(t->kv.sp, t->pushed, NULL, &rq);
		if (err)
			die(t, "a request that pushes others out", err);
		err = push_alloc(t, rq, f);
		if (!err)
			err = push_publish(t, rq, f);
		kvmm_req_end(rq, KVMM_CONTINUES, 0);
		if (err)
			die(t, "pages that push others out", err);
	}
}

static void push_open(struct ttft *t)
{
	const struct kv_opts o = { .socket = t->kvmmd.socket };
	struct model_config c;
	struct model *m;
	int err = model_config_named(&c, "bench");

	if (!err)
		err = model_create(&c, 1, &m);
	if (!err)
		err = kv_open(&t->kv, m, &o);
	if (err)
		die(t, "the engines' space", err);
	t->model = m;
}

static void push_close(struct ttft *t)
{
	kv_close(&t->kv);
	model_destroy(t->model);
}

/* ---- what is measured --------------------------------------------------------------- */

static void measure_dram(struct ttft *t)
{
	unsigned int p, tail, i;

	start(t, &t->one, NULL);
	for (p = 0; p < PROMPTS; p++)
		timed(t, &t->one, p, 0, 0, 0, &t->cold);
	start(t, &t->two, NULL);
	for (i = 0; i < REPEATS; i++)
		for (p = 0; p < PROMPTS; p++)
			for (tail = 0; tail < TAILS; tail++) {
				timed(t, &t->one, p, tail, SHARED, 0, &t->dram);
				timed(t, &t->two, p, tail, SHARED, 0,
				      &t->other);
			}
	end(t, &t->one);
}

static void measure_nvme(struct ttft *t)
{
	unsigned int i;

	push_open(t);
	for (i = 0; i < REPEATS; i++) {
		push_out(t);
		timed(t, &t->two, i % PROMPTS, i % TAILS, 0, NVME_MIN,
		      &t->nvme);
	}
	push_close(t);
	end(t, &t->two);
}

/* Where all engines are gone, what they have published is still there. */
static void measure_restart(struct ttft *t)
{
	unsigned int i;

	for (i = 0; i < REPEATS; i++) {
		uint64_t began = now_ns();
		double ready_ms;

		start(t, &t->one, NULL);
		ready_ms = (double)(now_ns() - began) / NSEC_PER_MSEC;
		timed(t, &t->one, (REPEATS - 1) % PROMPTS, i % TAILS, SHARED, 0,
		      &t->restart);
		note(&t->restart_all,
		     ready_ms + t->restart.ms[t->restart.n - 1]);
		end(t, &t->one);
	}
}

static void measure_nomatch(struct ttft *t)
{
	start(t, &t->one, "--no-match");
	timed(t, &t->one, 0, 1, 0, 0, &t->nomatch);
	end(t, &t->one);
}

static double result(struct ttft *t, struct times *times)
{
	double v = bench_median(times->ms, times->n);
	char n[64];

	bench_result(&t->b, times->key, v);
	snprintf(n, sizeof(n), "%s_n", times->key);
	bench_result(&t->b, n, times->n);
	return v;
}

static void report(struct ttft *t)
{
	double cold = result(t, &t->cold), dram, other, nvme;

	result(t, &t->nomatch);
	dram = result(t, &t->dram);
	other = result(t, &t->other);
	nvme = result(t, &t->nvme);
	result(t, &t->restart);
	result(t, &t->restart_all);
	dram = cold / (dram > other ? dram : other);
	nvme = cold / nvme;
	bench_result(&t->b, "speedup_dram", dram);
	bench_result(&t->b, "speedup_nvme", nvme);
	bench_must(&t->b, "speedup_dram", dram, ">=", 20);
	bench_must(&t->b, "speedup_nvme", nvme, ">=", 5);
}

static void measure_steps(struct ttft *t)
{
	struct step_result r;
	double noise;

	step_measure(&t->b, t->kvmmd.socket, &r);
	noise = r.time.noise > 1 ? r.time.noise : 1 / r.time.noise;
	bench_result(&t->b, "step_us", r.time.subject);
	bench_result(&t->b, "step_floor_us", r.time.floor);
	bench_result(&t->b, "step_ratio", r.time.ratio);
	bench_result(&t->b, "noise", r.time.noise);
	bench_result(&t->b, "step_syscalls", r.syscalls);
	bench_result(&t->b, "step_publish_syscalls", r.publish_syscalls);
	bench_must(&t->b, "step_ratio", r.time.ratio, "<=", 1.02 * noise);
	bench_must(&t->b, "step_syscalls", r.syscalls, "==", 0);
}

int main(void)
{
	static struct ttft t = {
		.cold.key = "cold_ms", .nomatch.key = "nomatch_ms",
		.dram.key = "dram_ms", .other.key = "dram_other_ms",
		.nvme.key = "nvme_ms", .restart.key = "engine_restart_ms",
		.restart_all.key = "engine_restart_all_ms",
	};
	const struct td_opts o = {
		.dram_bytes = DRAM_BYTES, .nvme_bytes = NVME_BYTES,
		/* who pushes waits for the disk, and forgets nothing */
		.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
		.io_timeout = "5s",
	};

	bench_init(&t.b, "ttft");
	snprintf(t.threads, sizeof(t.threads), "%ld",
		 sysconf(_SC_NPROCESSORS_ONLN));
	bench_daemon(&t.b, &t.kvmmd, &o);
	measure_steps(&t);
	measure_dram(&t);
	measure_nvme(&t);
	measure_restart(&t);
	measure_nomatch(&t);
	report(&t);
	return bench_finish(&t.b);
}
