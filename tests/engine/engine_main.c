/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmm-engine - a small inference engine whose KV is kvmm memory
 *
 * The scheduler's process, and rank processes with --ranks. Reads requests from
 * stdin (serve.h), or takes them from --prompt or --trace. --oracle computes the same
 * without kvmm: one sequence at a time, in private contiguous memory. --blob is
 * the same with its state saved in kvmm at checkpoints, and restored from there.
 */
#include <argp.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "tests/engine/alone.h"
#include "tests/engine/blobs.h"
#include "tests/engine/front.h"

/* What the command line said. */
struct args {
	const char	*config, *weights;
	uint64_t	seed;
	struct kv_opts	kv;
	struct team_opts team;
	struct sched_opts sched;
	struct front_opts front;
	uint32_t	checkpoint, every;
	bool		oracle, blob, text;
};

enum {
	OPT_SOCKET = 256, OPT_NODE, OPT_BLOCK, OPT_SNAP, OPT_SALT, OPT_REVISION,
	OPT_DTYPE, OPT_LAYOUT, OPT_HEADS_OFF, OPT_WINDOW_OFF, OPT_MUST_JOIN, OPT_RESERVE,
	OPT_RANKS, OPT_WORLD, OPT_THREADS, OPT_PIDS, OPT_SEQS, OPT_BUDGET,
	OPT_PREEMPT, OPT_EVERY, OPT_NO_MATCH, OPT_GUARD, OPT_EAGER, OPT_PATIENCE, OPT_FETCH, OPT_ALL, OPT_ORACLE,
	OPT_BLOB, OPT_CHECKPOINT, OPT_CHECKPOINT_EVERY,
	OPT_PROMPT, OPT_TRACE, OPT_LIMIT, OPT_SLICE, OPT_PAGE, OPT_GENERATE, OPT_TEXT, OPT_SEED, OPT_WEIGHTS,
};

static const struct argp_option options[] = {
	{ 0, 0, 0, 0, "Model", 1 },
	{ "config", 'c', "NAME|FILE", 0, "a built-in shape or a config.json; gqa" },
	{ "seed", OPT_SEED, "N", 0, "of random weights; 1" },
	{ "weights", OPT_WEIGHTS, "FILE", 0, "safetensors or GGUF" },
	{ 0, 0, 0, 0, "KV memory", 2 },
	{ "socket", OPT_SOCKET, "PATH", 0, "of kvmmd" },
	{ "node", OPT_NODE, "NAME", 0, "dram0" },
	{ "block-tokens", OPT_BLOCK, "N", 0, "tokens of a page; 16" },
	{ "snap-tokens", OPT_SNAP, "N", 0, "between snapshots of states; 64" },
	{ "reserve", OPT_RESERVE, "FRAMES", 0, "that it must be able to have" },
	{ "revision", OPT_REVISION, "TEXT", 0, "instead of the weights' digest" },
	{ "salt", OPT_SALT, "TEXT", 0, "" },
	{ "kv-dtype", OPT_DTYPE, "NAME", 0, "to claim; bf16" },
	{ "layout", OPT_LAYOUT, "NAME", 0, "to claim; nhd" },
	{ "must-join", OPT_MUST_JOIN, 0, 0, "no new space beside one of this model" },
	{ "heads-off", OPT_HEADS_OFF, "N", 0, "miscount KV heads by so many" },
	{ "window-off", OPT_WINDOW_OFF, "N", 0, "miscount window pages" },
	{ "world", OPT_WORLD, "N", 0, "to claim without ranks" },
	{ 0, 0, 0, 0, "Who computes", 3 },
	{ "ranks", OPT_RANKS, "N", 0, "rank processes; none: this one" },
	{ "threads", OPT_THREADS, "N", 0, "of a process" },
	{ "pids", OPT_PIDS, 0, 0, "tell ranks' processes on stderr" },
	{ 0, 0, 0, 0, "Scheduling", 4 },
	{ "max-seqs", OPT_SEQS, "N", 0, "running at once; 8" },
	{ "budget", OPT_BUDGET, "TOKENS", 0, "of a step; 128" },
	{ "preempt", OPT_PREEMPT, "recompute|swap", 0, "" },
	{ "preempt-every", OPT_EVERY, "STEPS", 0, "somebody gives way" },
	{ "eager", OPT_EAGER, 0, 0, "admit what may not fit beside what runs" },
	{ "patience-ms", OPT_PATIENCE, "MS", 0, "for frames nobody gives; 30000" },
	{ "no-match", OPT_NO_MATCH, 0, 0, "compute all" },
	{ "guard", OPT_GUARD, 0, 0, "map hits read-only; not with --ranks" },
	{ "fetch-all", OPT_ALL, 0, 0, "also where computing is faster" },
	{ "fetch-ms", OPT_FETCH, "MS", 0, "deadline of fetches; with --blob of saving, too" },
	{ 0, 0, 0, 0, "What to do", 5 },
	{ "oracle", OPT_ORACLE, 0, 0, "without kvmm" },
	{ "blob", OPT_BLOB, 0, 0, "the same, with its state as blobs" },
	{ "checkpoint", OPT_CHECKPOINT, "N", 0, "tokens from one to the next; 64" },
	{ "checkpoint-every", OPT_CHECKPOINT_EVERY, "N", 0,
	  "save at each Nth of them and at the prompt's last; 1" },
	{ "prompt", OPT_PROMPT, "TEXT", 0, "instead of requests from stdin" },
	{ "trace", OPT_TRACE, "FILE", 0, "recorded requests (tests/data)" },
	{ "limit", OPT_LIMIT, "N", 0, "requests of the trace" },
	{ "slice", OPT_SLICE, "I/N", 0, "every N-th of them from the I-th on" },
	{ "page-tokens", OPT_PAGE, "N", 0, "that a page of the trace becomes; 16" },
	{ "generate", OPT_GENERATE, "N", 0, "tokens for each of them; 32" },
	{ "text", OPT_TEXT, 0, 0, "answers as text, too" },
	{ 0 }
};

static uint32_t num(struct argp_state *st, const char *arg)
{
	char *end;
	unsigned long v = strtoul(arg, &end, 0);

	if (!*arg || *end || v > UINT32_MAX)
		argp_error(st, "%s: a number is wanted", arg);
	return (uint32_t)v;
}

static error_t parse(int key, char *arg, struct argp_state *st)
{
	struct args *a = st->input;

	switch (key) {
	case 'c':		a->config = arg; break;
	case OPT_SEED:		a->seed = num(st, arg); break;
	case OPT_WEIGHTS:	a->weights = arg; break;
	case OPT_SOCKET:	a->kv.socket = arg; break;
	case OPT_NODE:		a->kv.node = arg; break;
	case OPT_BLOCK:		a->kv.block_tokens = num(st, arg); break;
	case OPT_SNAP:		a->kv.snap_tokens = num(st, arg); break;
	case OPT_RESERVE:	a->kv.reserve = num(st, arg); break;
	case OPT_REVISION:	a->kv.revision = arg; break;
	case OPT_SALT:		a->kv.salt = arg; break;
	case OPT_DTYPE:		a->kv.kv_dtype = arg; break;
	case OPT_LAYOUT:	a->kv.layout = arg; break;
	case OPT_WINDOW_OFF:	a->kv.window_off = num(st, arg); break;
	case OPT_MUST_JOIN:	a->kv.flags |= KVMM_MUST_JOIN; break;
	case OPT_HEADS_OFF:	a->kv.heads_off = num(st, arg); break;
	case OPT_WORLD:		a->kv.world = num(st, arg); break;
	case OPT_RANKS:		a->team.ranks = num(st, arg); break;
	case OPT_THREADS:	a->team.threads = num(st, arg); break;
	case OPT_PIDS:		a->team.pids = true; break;
	case OPT_SEQS:		a->sched.max_seqs = num(st, arg); break;
	case OPT_BUDGET:	a->sched.max_tokens = num(st, arg); break;
	case OPT_EVERY:		a->sched.preempt_every = num(st, arg); break;
	case OPT_NO_MATCH:	a->sched.no_match = true; break;
	case OPT_EAGER:		a->sched.eager = true; break;
	case OPT_GUARD:		a->sched.guard = true; break;
	case OPT_PATIENCE:	a->sched.patience_ms = num(st, arg); break;
	case OPT_FETCH:		a->sched.fetch_ms = num(st, arg); break;
	case OPT_ALL:		a->sched.fetch_all = true; break;
	case OPT_ORACLE:	a->oracle = true; break;
	case OPT_BLOB:		a->blob = true; break;
	case OPT_CHECKPOINT:	a->checkpoint = num(st, arg); break;
	case OPT_CHECKPOINT_EVERY: a->every = num(st, arg); break;
	case OPT_PROMPT:	a->front.prompt = arg; break;
	case OPT_TRACE:		a->front.trace = arg; break;
	case OPT_LIMIT:		a->front.limit = num(st, arg); break;
	case OPT_PAGE:		a->front.page_tokens = num(st, arg); break;
	case OPT_SLICE:
		if (sscanf(arg, "%u/%u", &a->front.first, &a->front.every) != 2 ||
		    !a->front.every)
			argp_error(st, "--slice: I/N");
		break;
	case OPT_GENERATE:	a->front.max_tokens = num(st, arg); break;
	case OPT_TEXT:		a->text = true; break;
	case OPT_PREEMPT:
		if (strcmp(arg, "recompute") && strcmp(arg, "swap"))
			argp_error(st, "--preempt: recompute or swap");
		a->sched.preempt = strcmp(arg, "swap") ? PREEMPT_RECOMPUTE :
							 PREEMPT_SWAP;
		break;
	case ARGP_KEY_ARG:
		argp_usage(st);
		break;
	default:
		return ARGP_ERR_UNKNOWN;
	}
	return 0;
}

static const struct argp argp = {
	options, parse, NULL,
	"kvmm-engine: a small inference engine whose KV is kvmm memory",
};

/* ---- with kvmm -------------------------------------------------------------------- */

struct engine {
	struct kv	kv;
	struct team	*team;
	struct sched	*sched;
	bool		text;
};

static int eng_submit(void *arg, const struct sched_req *r)
{
	return sched_submit(((struct engine *)arg)->sched, r);
}

static int eng_run(void *arg)
{
	return sched_run(((struct engine *)arg)->sched);
}

static bool eng_idle(void *arg)
{
	return sched_idle(((struct engine *)arg)->sched);
}

static int eng_fd(void *arg)
{
	return kvmm_fd(((struct engine *)arg)->kv.k);
}

static int eng_cmd(void *arg, const char *cmd, const char *how)
{
	struct engine *e = arg;

	if (!strcmp(cmd, "stats"))
		serve_stats(sched_stats(e->sched), &e->kv);
	else if (!strcmp(cmd, "preempt"))
		sched_preempt(e->sched, how && !strcmp(how, "swap") ?
			      PREEMPT_SWAP : PREEMPT_RECOMPUTE);
	else
		return -EINVAL;
	return 0;
}

static const struct serve_ops eng_ops = {
	eng_submit, eng_run, eng_idle, eng_fd, eng_cmd,
};

static void eng_done(void *arg, const struct sched_done *d)
{
	serve_done(d, ((struct engine *)arg)->text);
}

/* ---- both --------------------------------------------------------------------------- */

static int run(const struct args *a, const struct serve_ops *ops, void *arg,
	       uint32_t vocab)
{
	if (a->front.prompt || a->front.trace)
		return front_run(&a->front, ops, arg, vocab);
	return serve(ops, arg, STDIN_FILENO, vocab);
}

static int run_oracle(const struct args *a, const struct model *m)
{
	struct alone *al;
	int err = alone_create(m, NULL, eng_done,
			       &(struct engine){ .text = a->text }, &al);

	if (err)
		return err;
	err = run(a, &alone_ops, al, model_config_of(m)->vocab);
	alone_destroy(al);
	return err;
}

static int run_blobs(const struct args *a, const struct model *m)
{
	struct blobs_opts o = {
		.socket = a->kv.socket, .node = a->kv.node,
		.revision = a->kv.revision, .salt = a->kv.salt,
		.step = a->checkpoint, .every = a->every,
		.wait_ms = a->sched.fetch_ms,
	};
	struct blobs *b;
	int err = blobs_create(m, &o, eng_done,
			       &(struct engine){ .text = a->text }, &b);

	if (err)
		return err;
	err = run(a, &blobs_ops, b, model_config_of(m)->vocab);
	blobs_destroy(b);
	return err;
}

static int run_engine(struct args *a, const struct model *m)
{
	struct engine e = { .text = a->text };
	int err;

	if (a->team.ranks && a->sched.guard) {
		fprintf(stderr, "engine: --guard: not with --ranks, whose processes write\n");
		return -EINVAL;
	}
	if (a->team.ranks)
		a->kv.world = a->team.ranks;
	a->team.max_tokens = a->sched.max_tokens ? a->sched.max_tokens : 128;
	if (getrandom(a->team.token, sizeof(a->team.token), 0) < 0)
		return -errno;
	err = team_create(m, &a->team, &a->kv, &e.team);
	if (err)
		return err;
	a->kv.engine = team_leader(e.team);
	err = kv_open(&e.kv, m, &a->kv);
	if (!err)
		err = team_attach(e.team, &e.kv);
	if (!err)
		err = sched_create(m, &e.kv, e.team, &a->sched, eng_done, &e,
				   &e.sched);
	if (!err)
		err = run(a, &eng_ops, &e, model_config_of(m)->vocab);
	sched_destroy(e.sched);
	team_destroy(e.team);
	kv_close(&e.kv);
	return err;
}

static int get_model(const struct args *a, struct model **m)
{
	const char *of = a->config;
	struct model_config c;
	char why[256] = "";
	int err;

	err = model_config_named(&c, of);
	if (err)
		err = model_config_read(&c, of, why, sizeof(why));
	if (!err && a->weights) {
		of = a->weights;
		err = model_load(&c, of, why, sizeof(why), m);
	} else if (!err) {
		err = model_create(&c, a->seed, m);
	}
	if (err)
		fprintf(stderr, "engine: %s: %s\n", of,
			*why ? why : strerror(-err));
	return err;
}

int main(int argc, char **argv)
{
	struct args a = { .config = "gqa", .seed = 1, .front.max_tokens = 32 };
	struct model *m = NULL;
	int err;

	signal(SIGPIPE, SIG_IGN);
	argp_parse(&argp, argc, argv, 0, NULL, &a);
	err = get_model(&a, &m);
	if (!err) {
		err = a.oracle ? run_oracle(&a, m) :
		      a.blob ? run_blobs(&a, m) : run_engine(&a, m);
		if (err)
			fprintf(stderr, "engine: %s\n", strerror(-err));
	}
	model_destroy(m);
	return err == -EOWNERDEAD ? 3 : err ? 1 : 0;
}
