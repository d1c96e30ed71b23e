/* SPDX-License-Identifier: Apache-2.0 */
/*
 * match - find, pin and unpin a prefix of 512 pages out of 1 Mi
 *
 * Subject: kvmm_match() and kvmm_trim() through libkvmm, against a kvmmd with
 * 1 Mi pages of 4 KiB in chains of 512. Twice: with the frames of a chain in
 * random order, and in runs of 32 as a magazine gives them.
 *
 * Turns are taken chain by chain (floor, subject, subject, floor, each with a
 * chain of its own), some 50 us each, so that what a neighbour does to the caches
 * it does to both. In a round each of them sees each chain once, in random order:
 * nothing of it is left in a cache. A round's figures are medians over its
 * chains.
 *
 * Floor: what cannot be done with less. A hash table of the same 64-byte lines
 * at the same load, in huge pages like kvmmd's, probed with the key's own bits (SHA-256 needs no hash),
 * the lines, frame words and pins prefetched in a software pipeline; each page
 * loads its frame word and writes its pin, plainly, and checks nothing: no
 * version, no second look, no atomic, no request, no unpin.
 *
 * Syscalls: the subject's loop in a process where every system call is trapped
 * and counted.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/bench/bench.h"

#define PAGE_BYTES	4096u
#define NR_PAGES	(1u << 20)
#define CHAIN		512u
#define NR_CHAINS	(NR_PAGES / CHAIN)
#define NR_REQS		(NR_PAGES / 4096u)	/* publishers: 8 chains each */
#define REQ_PAGES	(NR_PAGES / NR_REQS)
#define RUN		32u
#define NODE_BYTES	((uint64_t)NR_PAGES * PAGE_BYTES * 9 / 8)
#define FILL_MS		60000
#define NR_TRAPPED	2000

struct line {
	uint64_t	word0;
	struct kvmm_key	key;
	uint64_t	fword;
	uint64_t	frame;
	uint64_t	aux;
};

struct match {
	struct bench	b;
	struct test_daemon kvmmd;
	struct bench_client c;
	struct kvmm_key	*key;		/* NR_PAGES, chain after chain */
	kvmm_frame_t	*frame;		/* where the daemon has them */
	uint32_t	*order;		/* chains, in the order of visits */
	struct kvmm_req	*rq;
	struct kvmm_hit	hit[CHAIN];
	uint64_t	rand;
	double		syscalls;
	/* floor */
	struct line	*line;
	uint64_t	*word;
	uint32_t	*pin;
	uint64_t	mask;
	uint64_t	sum;
	kvmm_frame_t	out[CHAIN];
};

/* ---- subject -------------------------------------------------------------------- */

static void subject_chain(struct match *m, const struct kvmm_key *k)
{
	if (bc_match(&m->c, m->rq, k, CHAIN, m->hit) != CHAIN)
		bench_die(&m->b, "a chain is not resident", -ENOENT);
	kvmm_trim(m->rq, 0, 0);
}

/* The same with a request of its own for each chain, ended with a touch. */
static double run_requests(struct match *m)
{
	uint64_t t = now_ns();
	unsigned int i;

	for (i = 0; i < NR_CHAINS; i++) {
		const struct kvmm_key *k = &m->key[m->order[i] * CHAIN];
		struct kvmm_req *rq = bc_req(&m->c, i);

		if (bc_match(&m->c, rq, k, CHAIN, m->hit) != CHAIN)
			bench_die(&m->b, "a chain is not resident", -ENOENT);
		kvmm_req_end(rq, KVMM_CONTINUES, 0);
	}
	return (double)(now_ns() - t) / NR_PAGES;
}

/* ---- floor ----------------------------------------------------------------------- */

#define AHEAD_LINE	48u
#define AHEAD_FRAME	16u

static uint64_t key_bits(const struct kvmm_key *k)
{
	uint64_t w;

	memcpy(&w, k->b, sizeof(w));
	return w;
}

static struct line *floor_find(struct match *m, const struct kvmm_key *k)
{
	uint64_t w = key_bits(k), i = w & m->mask;

	while (key_bits(&m->line[i].key) != w)
		i = (i + 1) & m->mask;
	return &m->line[i];
}

static void floor_chain(struct match *m, const struct kvmm_key *k)
{
	uint64_t sum = 0;
	unsigned int i;

	for (i = 0; i < CHAIN + AHEAD_LINE; i++) {
		if (i < CHAIN)
			__builtin_prefetch(&m->line[key_bits(&k[i]) & m->mask]);
		if (i >= AHEAD_LINE - AHEAD_FRAME &&
		    i < CHAIN + AHEAD_LINE - AHEAD_FRAME) {
			unsigned int j = i - (AHEAD_LINE - AHEAD_FRAME);
			kvmm_frame_t f = (kvmm_frame_t)floor_find(m, &k[j])->frame;

			m->out[j] = f;
			__builtin_prefetch(&m->word[f]);
			__builtin_prefetch(&m->pin[f], 1);
		}
		if (i >= AHEAD_LINE) {
			kvmm_frame_t f = m->out[i - AHEAD_LINE];

			sum += m->word[f];
			m->pin[f]++;
		}
	}
	m->sum += sum;
}

/* ---- turns ------------------------------------------------------------------------ */

static double timed(struct match *m, void (*fn)(struct match *m,
						const struct kvmm_key *k),
		    unsigned int visit)
{
	const struct kvmm_key *k = &m->key[m->order[visit % NR_CHAINS] * CHAIN];
	uint64_t t = now_ns();

	fn(m, k);
	return (double)(now_ns() - t) / CHAIN;
}

/* One round; medians in ns a page. Floor and subject are never on one chain. */
static void run_round(struct match *m, double *subject, double floor[2])
{
	static double s[2][NR_CHAINS / 2], f[2][NR_CHAINS / 2];
	unsigned int i, away = NR_CHAINS / 2;
	double both[NR_CHAINS];

	for (i = 0; i < NR_CHAINS / 2; i++) {
		f[0][i] = timed(m, floor_chain, 2 * i);
		s[0][i] = timed(m, subject_chain, 2 * i + away);
		s[1][i] = timed(m, subject_chain, 2 * i + 1 + away);
		f[1][i] = timed(m, floor_chain, 2 * i + 1);
	}
	memcpy(both, s, sizeof(both));
	*subject = bench_median(both, NR_CHAINS);
	floor[0] = bench_median(f[0], NR_CHAINS / 2);
	floor[1] = bench_median(f[1], NR_CHAINS / 2);
}

static void run_rounds(struct match *m, const char *what,
		       struct bench_ratio *r)
{
	double s[BENCH_ROUNDS], f[BENCH_ROUNDS];
	double ratio[BENCH_ROUNDS], noise[BENCH_ROUNDS], two[2];
	unsigned int i;

	run_round(m, s, two);		/* to warm up */
	for (i = 0; i < BENCH_ROUNDS; i++) {
		run_round(m, &s[i], two);
		f[i] = (two[0] + two[1]) / 2;
		ratio[i] = s[i] / f[i];
		noise[i] = two[0] > two[1] ? two[0] / two[1] : two[1] / two[0];
		bench_say("  %s round %u of %u: %.1f against %.1f: %.2f (floor against floor %.2f)",
			  what, i + 1, BENCH_ROUNDS, s[i], f[i], ratio[i],
			  noise[i]);
	}
	r->subject = bench_median(s, BENCH_ROUNDS);
	r->floor = bench_median(f, BENCH_ROUNDS);
	r->ratio = bench_median(ratio, BENCH_ROUNDS);
	r->noise = bench_median(noise, BENCH_ROUNDS);
}

static void floor_init(struct match *m, kvmm_frame_t max_frame)
{
	uint64_t lines = 2 * NR_PAGES;
	unsigned int i;

	m->mask = lines - 1;
	m->line = bench_shm(&m->b, lines * sizeof(*m->line));
	bench_shm_huge(m->line, lines * sizeof(*m->line));
	m->word = bench_shm(&m->b, (max_frame + 1ull) * sizeof(*m->word));
	m->pin = bench_shm(&m->b, (max_frame + 1ull) * sizeof(*m->pin));
	for (i = 0; i < NR_PAGES; i++) {
		uint64_t at = key_bits(&m->key[i]) & m->mask;

		while (key_bits(&m->line[at].key))
			at = (at + 1) & m->mask;
		m->line[at].key = m->key[i];
		m->line[at].frame = m->frame[i];
		m->word[m->frame[i]] = 3;
	}
}

static void floor_fini(struct match *m, kvmm_frame_t max_frame)
{
	munmap(m->line, (m->mask + 1) * sizeof(*m->line));
	munmap(m->word, (max_frame + 1ull) * sizeof(*m->word));
	munmap(m->pin, (max_frame + 1ull) * sizeof(*m->pin));
}

/* ---- filling the daemon -------------------------------------------------------------- */

static void swap_frames(kvmm_frame_t *a, kvmm_frame_t *b, unsigned int n)
{
	unsigned int i;

	for (i = 0; i < n; i++) {
		kvmm_frame_t t = a[i];

		a[i] = b[i];
		b[i] = t;
	}
}

/*
 * All frames first, to a request drawn anew for each unit, then shuffled within
 * each request. What one chain has lies all over the node and at no fixed
 * distance: frames dealt in turns are a power of two apart, and fall into a few
 * sets of the caches.
 */
static void take_frames(struct match *m, struct kvmm_req **rq, bool runs)
{
	unsigned int unit = runs ? RUN : 1, n = NR_PAGES / unit, i, j;
	unsigned int has[NR_REQS] = { 0 };
	uint16_t *turn = calloc(n, sizeof(*turn));

	if (!turn)
		bench_die(&m->b, "memory", -ENOMEM);
	for (i = 0; i < n; i++)
		turn[i] = (uint16_t)(i % NR_REQS);
	for (i = n - 1; i > 0; i--) {
		uint16_t t = turn[i];

		j = (unsigned int)(bench_rand(&m->rand) % (i + 1));
		turn[i] = turn[j];
		turn[j] = t;
	}
	for (i = 0; i < n; i++) {
		unsigned int r = turn[i];
		kvmm_frame_t *f = &m->frame[r * REQ_PAGES + has[r]];
		int err = bc_alloc(&m->c, rq[r], unit, f, FILL_MS);

		if (err)
			bench_die(&m->b, "frames for 1 Mi pages", err);
		has[r] += unit;
		if (i % (n / 8) == 0)
			bench_say("  %u of %u frames", i * unit, NR_PAGES);
	}
	free(turn);
	for (i = 0; i < NR_REQS; i++) {
		kvmm_frame_t *f = &m->frame[i * REQ_PAGES];

		for (j = REQ_PAGES / unit - 1; j > 0; j--)
			swap_frames(&f[j * unit], &f[bench_rand(&m->rand) %
						     (j + 1) * unit], unit);
	}
}

static void publish_all(struct match *m, struct kvmm_req **rq)
{
	struct kvmm_pub *pub = calloc(CHAIN, sizeof(*pub));
	unsigned int i, j;

	if (!pub)
		bench_die(&m->b, "memory", -ENOMEM);
	for (i = 0; i < NR_CHAINS; i++) {
		int n;

		for (j = 0; j < CHAIN; j++) {
			unsigned int pg = i * CHAIN + j;

			pub[j].key = m->key[pg];
			if (j)
				pub[j].parent = m->key[pg - 1];
			pub[j].frame = m->frame[pg];
			pub[j].pos = j * 16;
		}
		n = bc_publish(&m->c, rq[i * CHAIN / REQ_PAGES], pub, CHAIN);
		if (n != (int)CHAIN)
			bench_die(&m->b, "publish", n < 0 ? n : -EIO);
	}
	free(pub);
}

/* Share of neighbouring pages that lie in neighbouring frames. */
static double adjacency(const struct match *m)
{
	unsigned int i, n = 0;

	for (i = 1; i < NR_PAGES; i++)
		n += m->frame[i] == m->frame[i - 1] + 1;
	return (double)n / NR_PAGES;
}

static kvmm_frame_t fill(struct match *m, bool runs)
{
	struct kvmm_req *rq[NR_REQS];
	kvmm_frame_t max = 0;
	unsigned int i;

	for (i = 0; i < NR_REQS; i++)
		rq[i] = bc_req(&m->c, i);
	take_frames(m, rq, runs);
	publish_all(m, rq);
	for (i = 0; i < NR_REQS; i++)
		kvmm_req_end(rq[i], KVMM_UNKNOWN, 0);
	for (i = 0; i < NR_PAGES; i++)
		max = m->frame[i] > max ? m->frame[i] : max;
	return max;
}

/* ---- system calls ---------------------------------------------------------------------- */

/* In a child: connect anew, then match, peek, pin and unpin without the kernel. */
static int trapped_prepare(void *arg)
{
	struct match *m = arg;

	bc_open(&m->c, &m->b, m->kvmmd.socket, PAGE_BYTES);
	m->rq = bc_req(&m->c, 1);
	return bc_match(&m->c, m->rq, m->key, CHAIN, m->hit) != CHAIN;
}

static int trapped_loop(void *arg)
{
	struct kvmm_match peek = { .size = sizeof(peek) };
	struct kvmm_keys keys = { .n = CHAIN };
	struct match *m = arg;
	unsigned int i;

	for (i = 0; i < NR_TRAPPED; i++) {
		keys.k = &m->key[i % NR_CHAINS * CHAIN];
		if (kvmm_peek(m->rq, &keys, 1, m->c.node, &peek) ||
		    bc_match(&m->c, m->rq, keys.k, CHAIN, m->hit) != CHAIN ||
		    kvmm_trim(m->rq, CHAIN / 2, 0) || kvmm_trim(m->rq, 0, 0))
			return -EIO;
	}
	return 0;
}

/* ---- both arrangements ------------------------------------------------------------------- */

static void shuffle_order(struct match *m)
{
	unsigned int i;

	for (i = 0; i < NR_CHAINS; i++)
		m->order[i] = i;
	for (i = NR_CHAINS - 1; i > 0; i--) {
		unsigned int j = (unsigned int)(bench_rand(&m->rand) % (i + 1));
		uint32_t t = m->order[i];

		m->order[i] = m->order[j];
		m->order[j] = t;
	}
}

static void measure(struct match *m, bool runs, struct bench_ratio *r)
{
	struct td_opts o = {
		.dram_bytes = NODE_BYTES,
		.config = "{\"limits\": {\"pin_limit_pct\": 100}}",
		.cpu = sysconf(_SC_NPROCESSORS_ONLN) > 1 ? 2 : 0,
	};
	kvmm_frame_t max;
	unsigned int i;

	bench_say("match: 1 Mi pages, frames in %s",
		  runs ? "runs of 32" : "random order");
	bench_daemon(&m->b, &m->kvmmd, &o);
	bc_open(&m->c, &m->b, m->kvmmd.socket, PAGE_BYTES);
	for (i = 0; i < NR_PAGES; i++)
		bc_key(&m->c, i, &m->key[i]);
	max = fill(m, runs);
	floor_init(m, max);
	m->rq = bc_req(&m->c, 0);

	run_rounds(m, runs ? "runs" : "random", r);
	bench_result(&m->b, runs ? "adjacent_runs" : "adjacent_random",
		     adjacency(m));
	if (!runs) {
		double v[5];

		for (i = 0; i < 5; i++)
			v[i] = run_requests(m);
		bench_result(&m->b, "request_us_512",
			     bench_median(v, 5) * CHAIN / 1e3);
		m->syscalls = bench_count_syscalls(&m->b, trapped_prepare,
						   trapped_loop, m);
		bench_result(&m->b, "syscalls", m->syscalls);
	}
	kvmm_req_end(m->rq, KVMM_UNKNOWN, 0);
	floor_fini(m, max);
	bc_close(&m->c);
	td_fini(&m->kvmmd);
	m->b.kvmmd = NULL;
}

int main(void)
{
	static struct match m;
	struct bench_ratio random, runs;

	bench_init(&m.b, "match");
	m.rand = 88172645463325252ull;
	m.key = calloc(NR_PAGES, sizeof(*m.key));
	m.frame = calloc(NR_PAGES, sizeof(*m.frame));
	m.order = calloc(NR_CHAINS, sizeof(*m.order));
	if (!m.key || !m.frame || !m.order)
		bench_die(&m.b, "memory", -ENOMEM);
	if (sysconf(_SC_NPROCESSORS_ONLN) > 1)
		td_pin_cpu(0, 0);
	shuffle_order(&m);

	measure(&m, false, &random);
	measure(&m, true, &runs);
	bench_result(&m.b, "us_512", random.subject * CHAIN / 1e3);
	bench_result(&m.b, "ns_per_page", random.subject);
	bench_result(&m.b, "floor_ns_per_page", random.floor);
	bench_result(&m.b, "ratio", random.ratio);
	bench_result(&m.b, "noise", random.noise);
	bench_result(&m.b, "ns_per_page_runs", runs.subject);
	bench_result(&m.b, "ratio_runs", runs.ratio);
	bench_result(&m.b, "noise_runs", runs.noise);
	bench_must(&m.b, "ratio", random.ratio, "<=", 1.6);
	bench_must(&m.b, "ns_per_page", random.subject, "<=", 120);
	bench_must(&m.b, "syscalls", m.syscalls, "==", 0);
	return bench_finish(&m.b);
}
