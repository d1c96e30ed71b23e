/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A decode step over kvmm memory against one over private memory; see step.h.
 *
 * Both are the same forward pass of the small engine (tests/engine), with the
 * same weights and buffers, over the same block tables: only where the rows of
 * keys and values lie differs. Subject: frames in a window of kvmmd's, and the
 * calls that the engine makes in a step that neither fills a page nor needs a new
 * frame; they are written down here once more (calls_before(), run()), since
 * sched.c has no such step without a queue and logits of its own. Floor: anonymous
 * memory with the same distances from page to page and the same place within a
 * huge page, and no calls at all.
 *
 * A step that fills pages publishes them, too, one call a sequence; it is counted
 * in system calls and not timed: with pages of 16 tokens it is one of sixteen.
 *
 * Turns are taken step by step (floor, subject, subject, floor, and then the
 * other way round, so that who finds its rows in the caches is nobody's
 * advantage), in CPU time, since a step does not sleep.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/shm.h"
#include "tests/bench/step.h"
#include "tests/engine/kv.h"

#define NR_SEQS		4u
#define CONTEXT		384u		/* tokens before a step */
#define BLOCK		16u
#define PAGES		(CONTEXT / BLOCK + 1)
#define CHUNK		64u		/* of the prompt, at once */
#define TURNS		100u		/* a round, of four steps each */
#define NR_TRAPPED	200u
#define NR_FILLING	8u
#define ALLOC_NS	(10 * NSEC_PER_SEC)

/* A step takes a millisecond or two, of which the cache is a good part. */
static const struct model_config shape = {
	.name = "bench-step", .vocab = 272, .hidden = 128, .inter = 256,
	.heads = 4, .kv_heads = 4, .head_dim = 32, .layers = 4,
	.rope_theta = 1e5f, .rms_eps = 1e-5f,
};

/**
 * struct mem - where keys and values lie
 * @k:	libkvmm calls go here; NULL: none are made
 */
struct mem {
	struct kvmm	*k;
	struct kv_place	place[MODEL_MAX_LAYERS];
	float		logits[NR_SEQS][272];
	uint64_t	digest;
};

/**
 * struct steps - all of it
 * @filled:	pages to publish, @nfilled left; none: steps fill no page
 */
struct steps {
	struct bench	*b;
	const char	*socket;
	struct model	*m;
	struct kv	kv;
	struct kvmm_req	*rq;
	struct fwd	fwd;
	struct mem	shared, apart;
	int32_t		table[NR_SEQS][PAGES];
	const int32_t	*tables[NR_SEQS][KV_MAX_GROUPS];
	uint64_t	step;
	kvmm_frame_t	filled[NR_FILLING * NR_SEQS];
	uint32_t	nfilled;
	void		*map;
	size_t		map_bytes;
};

/* ---- a step -------------------------------------------------------------------- */

/* What an engine asks the library in a step, as sched_run() and team_run() do. */
static int calls_before(struct steps *s)
{
	struct kvmm_avail av = { .size = sizeof(av) };
	struct kvmm_done d[16];
	int n = kvmm_poll(s->kv.k, d, 16);

	if (n < 0)
		return n;
	n = kv_sync(&s->kv, s->step);
	if (n < 0)
		return n;
	return kvmm_avail(s->kv.sp, s->kv.g[0].cls, s->kv.node, &av);
}

/* As seq_publish() does, before the step that fills them. */
static int publish_filled(struct steps *s)
{
	uint32_t i;
	int err = 0;

	for (i = 0; i < NR_SEQS && s->nfilled && !err; i++) {
		struct kvmm_pub pub = {
			.frame = s->filled[--s->nfilled], .after = s->step + 1,
		};

		kvmm_key_wrap(s->kv.sp, &s->nfilled, sizeof(s->nfilled),
			      &pub.key);
		err = kvmm_publish(s->rq, s->kv.node, &pub, 1, s->nfilled + 1);
	}
	return err;
}

/* @n tokens of each sequence at @pos, which follow from both. */
static int run(struct steps *s, struct mem *mem, uint32_t pos, uint32_t n)
{
	uint32_t tok[NR_SEQS][CHUNK];
	struct fwd_seq seq[NR_SEQS];
	uint32_t i, t;
	int err = mem->k ? calls_before(s) : 0;

	if (!err && mem->k)
		err = publish_filled(s);
	if (err)
		return err;
	for (i = 0; i < NR_SEQS; i++) {
		for (t = 0; t < n; t++)
			tok[i][t] = ((pos + t) * 7 + i * 31) % shape.vocab;
		seq[i] = (struct fwd_seq){
			.tok = tok[i], .n = n, .pos = pos,
			.table = s->tables[i], .logits = mem->logits[i],
		};
	}
	memcpy(s->fwd.place, mem->place, sizeof(mem->place[0]) * shape.layers);
	err = fwd_run(&s->fwd, seq, NR_SEQS);
	if (!err && mem->k)
		err = kvmm_step_done(mem->k, ++s->step);
	for (i = 0; !err && i < NR_SEQS; i++)
		mem->digest = logits_digest(mem->digest, mem->logits[i],
					    shape.vocab);
	return err;
}

static int prompt(struct steps *s, struct mem *mem)
{
	uint32_t pos;
	int err = 0;

	for (pos = 0; pos < CONTEXT && !err; pos += CHUNK)
		err = run(s, mem, pos, CHUNK);
	return err;
}

/* ---- both kinds of memory --------------------------------------------------------- */

static int frames_some(struct steps *s, kvmm_frame_t *f, unsigned int n)
{
	uint64_t deadline = deadline_in(ALLOC_NS);
	struct kvmm_done d;
	int err;

	while ((err = kvmm_alloc(s->rq, s->kv.g[0].cls, s->kv.node, n, f, 0)) ==
	       -EAGAIN) {
		if (deadline_past(deadline))
			return -ETIMEDOUT;
		kvmm_poll(s->kv.k, &d, 1);
		err = kv_sync(&s->kv, s->step);
		if (err)
			return err;
	}
	return err;
}

static int frames(struct steps *s)
{
	kvmm_frame_t f[PAGES];
	unsigned int i, p;
	int err;

	for (i = 0; i < NR_SEQS; i++) {
		err = frames_some(s, f, PAGES);
		if (err)
			return err;
		for (p = 0; p < PAGES; p++)
			s->table[i][p] = (int32_t)f[p];
		s->tables[i][0] = s->table[i];
	}
	return kv_sync(&s->kv, s->step);
}

static int open_shared(struct steps *s)
{
	const struct kv_opts o = { .socket = s->socket, .block_tokens = BLOCK };
	int err = kv_open(&s->kv, s->m, &o);

	if (err)
		return err;
	err = kvmm_req_open(s->kv.sp, 1, NULL, &s->rq);
	if (!err)
		err = frames(s);
	if (err)
		return err;
	kv_places(&s->kv, &s->fwd, 0);
	memcpy(s->shared.place, s->fwd.place, sizeof(s->fwd.place));
	s->shared.k = s->kv.k;
	return 0;
}

static void bounds(const struct steps *s, const uint8_t *base, size_t stride,
		   uintptr_t *lo, uintptr_t *hi)
{
	uintptr_t at = (uintptr_t)base;
	unsigned int i, p;

	for (i = 0; i < NR_SEQS; i++)
		for (p = 0; p < PAGES; p++) {
			uintptr_t f = at + (size_t)s->table[i][p] * stride;

			*lo = f < *lo ? f : *lo;
			*hi = f + stride > *hi ? f + stride : *hi;
		}
}

/* As far from each other as in the windows, and as far into a huge page. */
static int open_apart(struct steps *s)
{
	uintptr_t lo = UINTPTR_MAX, hi = 0, at;
	unsigned int l;

	for (l = 0; l < shape.layers; l++) {
		const struct kv_place *p = &s->shared.place[l];

		bounds(s, p->k, p->k_stride, &lo, &hi);
		bounds(s, p->v, p->v_stride, &lo, &hi);
	}
	s->map_bytes = hi - lo + 2 * SHM_HUGE_BYTES;
	s->map = mmap(NULL, s->map_bytes, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (s->map == MAP_FAILED)
		return -errno;
	at = ((uintptr_t)s->map + SHM_HUGE_BYTES - 1) & ~(SHM_HUGE_BYTES - 1);
	at += lo & (SHM_HUGE_BYTES - 1);
	for (l = 0; l < shape.layers; l++) {
		struct kv_place *p = &s->apart.place[l];

		*p = s->shared.place[l];
		p->k += at - lo;
		p->v += at - lo;
	}
	return 0;
}

static void close_both(struct steps *s)
{
	fwd_fini(&s->fwd);
	kvmm_req_end(s->rq, KVMM_ENDED, 0);
	kv_close(&s->kv);
	munmap(s->map, s->map_bytes);
	model_destroy(s->m);
}

/* ---- turns ------------------------------------------------------------------------ */

static double timed(struct steps *s, struct mem *mem, uint32_t turn)
{
	uint64_t t = bench_cpu_ns();
	int err = run(s, mem, CONTEXT + turn % BLOCK, 1);

	if (err)
		bench_die(s->b, "a step", err);
	return (double)(bench_cpu_ns() - t) / 1e3;
}

static void run_round(struct steps *s, double *subject, double floor[2])
{
	double su[2 * TURNS], fl[2][TURNS];
	unsigned int i;

	for (i = 0; i < TURNS; i++) {
		struct mem *outer = i % 2 ? &s->shared : &s->apart;
		struct mem *inner = i % 2 ? &s->apart : &s->shared;
		double us[4];

		us[0] = timed(s, outer, i);
		us[1] = timed(s, inner, i);
		us[2] = timed(s, inner, i);
		us[3] = timed(s, outer, i);
		fl[0][i] = us[i % 2];
		fl[1][i] = us[3 - i % 2];
		su[2 * i] = us[1 - i % 2];
		su[2 * i + 1] = us[2 + i % 2];
	}
	*subject = bench_median(su, 2 * TURNS);
	floor[0] = bench_median(fl[0], TURNS);
	floor[1] = bench_median(fl[1], TURNS);
}

static void run_rounds(struct steps *s, struct bench_ratio *r)
{
	double su[BENCH_ROUNDS], fl[BENCH_ROUNDS];
	double ratio[BENCH_ROUNDS], noise[BENCH_ROUNDS], two[2];
	unsigned int i;

	run_round(s, su, two);		/* to warm up */
	for (i = 0; i < BENCH_ROUNDS; i++) {
		run_round(s, &su[i], two);
		fl[i] = (two[0] + two[1]) / 2;
		ratio[i] = su[i] / fl[i];
		noise[i] = two[0] > two[1] ? two[0] / two[1] : two[1] / two[0];
		bench_say("  step round %u of %u: %.1f against %.1f us: %.3f (floor against floor %.3f)",
			  i + 1, BENCH_ROUNDS, su[i], fl[i], ratio[i],
			  noise[i]);
	}
	r->subject = bench_median(su, BENCH_ROUNDS);
	r->floor = bench_median(fl, BENCH_ROUNDS);
	r->ratio = bench_median(ratio, BENCH_ROUNDS);
	r->noise = bench_median(noise, BENCH_ROUNDS);
}

/* ---- system calls ------------------------------------------------------------------ */

static int trapped_prepare(void *arg)
{
	struct steps *s = arg;
	int err;

	s->fwd.m = s->m;
	s->fwd.world = 1;
	err = open_shared(s);
	if (!err)
		err = prompt(s, &s->shared);
	return err ? err : run(s, &s->shared, CONTEXT, 1);
}

static int trapped_loop(void *arg)
{
	struct steps *s = arg;
	unsigned int i;
	int err = 0;

	for (i = 0; i < NR_TRAPPED && !err; i++)
		err = run(s, &s->shared, CONTEXT + i % BLOCK, 1);
	return err;
}

static int filling_prepare(void *arg)
{
	struct steps *s = arg;
	int err = trapped_prepare(s);

	if (!err)
		err = frames_some(s, s->filled, NR_FILLING * NR_SEQS);
	if (!err)
		err = kv_sync(&s->kv, s->step);
	s->nfilled = err ? 0 : NR_FILLING * NR_SEQS;
	return err;
}

static int filling_loop(void *arg)
{
	struct steps *s = arg;
	int err = 0;

	while (s->nfilled && !err)
		err = run(s, &s->shared, CONTEXT + BLOCK - 1, 1);
	return err;
}

static double count(struct bench *b, const char *socket,
		    int (*prepare)(void *arg), int (*loop)(void *arg),
		    unsigned int steps)
{
	struct steps s = { .b = b, .socket = socket };
	struct model_config c = shape;
	int err = model_create(&c, 1, &s.m);
	double n;

	if (err)
		bench_die(b, "a model", err);
	n = bench_count_syscalls(b, prepare, loop, &s);
	model_destroy(s.m);
	return n / steps;
}

/* ---- all of it ----------------------------------------------------------------------- */

void step_measure(struct bench *b, const char *socket, struct step_result *r)
{
	static struct steps s;
	struct model_config c = shape;
	int err;

	memset(&s, 0, sizeof(s));
	s.b = b;
	s.socket = socket;
	err = model_create(&c, 1, &s.m);
	if (err)
		bench_die(b, "a model", err);
	s.fwd.m = s.m;
	s.fwd.world = 1;
	err = open_shared(&s);
	if (!err)
		err = open_apart(&s);
	if (!err)
		err = prompt(&s, &s.shared);
	if (!err)
		err = prompt(&s, &s.apart);
	if (err)
		bench_die(b, "memory for steps", err);
	run_rounds(&s, &r->time);
	if (s.shared.digest != s.apart.digest)
		bench_die(b, "steps: logits differ", -EBADMSG);
	close_both(&s);
	r->syscalls = count(b, socket, trapped_prepare, trapped_loop,
			    NR_TRAPPED);
	r->publish_syscalls = count(b, socket, filling_prepare, filling_loop,
				    NR_FILLING);
}
