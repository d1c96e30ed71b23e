/* SPDX-License-Identifier: Apache-2.0 */
/*
 * seal - publish pages where they lie
 *
 * 4 KiB pages in batches of 64, after = 0, chains of 512, several batches in
 * flight; the first line of each page is written. Measured twice: while the
 * node still has free frames, and in steady state, when every page sealed
 * means that another one is reclaimed. The limit is on the latter.
 *
 * bytes_copied: a second client matches what was sealed. A page counts as
 * copied unless it is in the publisher's frame and a byte that the publisher
 * changes there shows at the reader; what kvmmd says it copied is added.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "tests/bench/bench.h"

#define PAGE_BYTES	4096u
#define BATCH		64u
#define CHAIN		512u
#define NR_FLIGHT	16u		/* batches in flight */
#define NODE_BYTES	(UINT64_C(1) << 30)
#define BLOCK_PAGES	(64u << 10)	/* pages a block */
#define FRESH_BLOCKS	3u
#define STEADY_BLOCKS	9u
#define WAIT_MS		10000

#define NR_CHAINS	4u		/* being published */

/* A chain on its way; its request ends when all its batches are answered. */
struct chain {
	struct kvmm_req	*rq;
	unsigned int	pending;
};

struct seal {
	struct bench	b;
	struct test_daemon kvmmd;
	struct bench_client pub;
	struct bench_client sub;
	uint64_t	nr_chains;	/* begun, ever */
	uint64_t	sealed;
	uint64_t	refused;
	unsigned int	inflight;
	struct chain	chain[NR_CHAINS];
	struct kvmm_key	key[BLOCK_PAGES];
	kvmm_frame_t	frame[CHAIN];	/* of the last chain */
	uint64_t	copied;
	uint64_t	checked;
};

static struct chain *chain_of(struct seal *s, uint64_t tag)
{
	return &s->chain[tag / (CHAIN / BATCH) % NR_CHAINS];
}

static void batch_done(struct seal *s, const struct kvmm_done *d)
{
	struct chain *c = chain_of(s, d->tag);
	unsigned int i;

	if (d->result)
		bench_die(&s->b, "publish", d->result);
	for (i = 0; i < d->n; i++) {
		s->sealed += !d->res[i].result;
		s->refused += !!d->res[i].result;
	}
	s->inflight--;
	if (!--c->pending) {
		kvmm_req_end(c->rq, KVMM_CONTINUES, 0);
		c->rq = NULL;
	}
}

/* Take completions until at most @most batches are in flight. */
static void reap(struct seal *s, unsigned int most)
{
	struct pollfd pfd = { .fd = kvmm_fd(s->pub.k), .events = POLLIN };
	uint64_t deadline = deadline_in(WAIT_MS * NSEC_PER_MSEC);
	struct kvmm_done d[8];

	for (;;) {
		int n = kvmm_poll(s->pub.k, d, 8), i;

		if (n < 0)
			bench_die(&s->b, "kvmm_poll", n);
		for (i = 0; i < n; i++)
			batch_done(s, &d[i]);
		if (s->inflight <= most)
			return;
		if (n)
			continue;
		if (deadline_past(deadline))
			bench_die(&s->b, "publish is not answered", -ETIMEDOUT);
		poll(&pfd, 1, 1);
	}
}

/* Frames for a batch; what is in flight is reaped while there are none. */
static void take_frames(struct seal *s, struct kvmm_req *rq, kvmm_frame_t *f)
{
	struct pollfd pfd = { .fd = kvmm_fd(s->pub.k), .events = POLLIN };
	uint64_t deadline = deadline_in(WAIT_MS * NSEC_PER_MSEC);
	int err;

	while ((err = kvmm_alloc(rq, 0, s->pub.node, BATCH, f,
				 KVMM_EVICT_OK)) == -EAGAIN) {
		if (deadline_past(deadline))
			break;
		kvmm_win_sync(s->pub.win, 0);
		if (s->inflight) {
			reap(s, s->inflight - 1);
		} else {
			reap(s, 0);
			poll(&pfd, 1, 1);
		}
	}
	if (err)
		bench_die(&s->b, "frames", err);
}

static void seal_batch(struct seal *s, struct chain *c,
		       const struct kvmm_key *key, unsigned int first,
		       uint64_t tag)
{
	struct kvmm_pub pub[BATCH];
	kvmm_frame_t *f = &s->frame[first];
	unsigned int i;
	int err;

	take_frames(s, c->rq, f);
	memset(pub, 0, sizeof(pub));
	for (i = 0; i < BATCH; i++) {
		void *at = kvmm_win_ptr(s->pub.win, 0, f[i]);

		memcpy(at, &key[first + i], sizeof(*key));
		pub[i].key = key[first + i];
		if (first + i)
			pub[i].parent = key[first + i - 1];
		pub[i].frame = f[i];
		pub[i].pos = (first + i) * 16;
		pub[i].cost_us = 100;
	}
	while ((err = kvmm_publish(c->rq, s->pub.node, pub, BATCH, tag)) ==
	       -EAGAIN)
		reap(s, s->inflight ? s->inflight - 1 : 0);
	if (err)
		bench_die(&s->b, "kvmm_publish", err);
	s->inflight++;
	if (s->inflight >= NR_FLIGHT)
		reap(s, NR_FLIGHT / 2);
}

static void seal_chain(struct seal *s, const struct kvmm_key *key)
{
	uint64_t tag = s->nr_chains++ * (CHAIN / BATCH);
	struct chain *c = chain_of(s, tag);
	unsigned int i;

	while (c->rq)
		reap(s, s->inflight - 1);
	c->rq = bc_req(&s->pub, tag);
	c->pending = CHAIN / BATCH;
	for (i = 0; i < CHAIN; i += BATCH)
		seal_batch(s, c, key, i, tag + i / BATCH);
}

/* Is what was sealed last the very memory that the publisher has? */
static void check_copies(struct seal *s)
{
	struct kvmm_req *rq = bc_req(&s->sub, 1);
	const struct kvmm_key *key = &s->key[BLOCK_PAGES - CHAIN];
	struct kvmm_hit hit[CHAIN];
	struct kvmm_done d;
	unsigned int i, n;

	kvmm_poll(s->sub.k, &d, 1);	/* the index may have grown */
	kvmm_win_sync(s->sub.win, 0);
	n = bc_match(&s->sub, rq, key, CHAIN, hit);
	for (i = 0; i < n; i++) {
		uint8_t *mine = kvmm_win_ptr(s->pub.win, 0, s->frame[i]);
		uint8_t *its = kvmm_win_ptr(s->sub.win, 0, hit[i].frame);
		uint8_t before = mine[PAGE_BYTES - 1];

		/* The whole trust domain is in this process: nobody is hurt. */
		mine[PAGE_BYTES - 1] = before ^ 0x5a;
		if (hit[i].frame != s->frame[i] || !its ||
		    its[PAGE_BYTES - 1] != (before ^ 0x5a) ||
		    memcmp(its, &key[i], sizeof(key[i])))
			s->copied += PAGE_BYTES;
		mine[PAGE_BYTES - 1] = before;
		s->checked++;
	}
	kvmm_req_end(rq, KVMM_UNKNOWN, 0);
}

/* Pages per second of a block. Keys are made outside of the time. */
static double block(struct seal *s, const char *what)
{
	uint64_t t, sealed = s->sealed, first = s->nr_chains * CHAIN;
	double rate;
	unsigned int i;

	for (i = 0; i < BLOCK_PAGES; i++)
		bc_key(&s->pub, first + i, &s->key[i]);
	t = now_ns();
	for (i = 0; i < BLOCK_PAGES; i += CHAIN)
		seal_chain(s, &s->key[i]);
	reap(s, 0);
	t = now_ns() - t;
	rate = (double)(s->sealed - sealed) * 1e9 / (double)t;
	check_copies(s);
	bench_say("  %s: %.0f pages/s", what, rate);
	return rate;
}

int main(void)
{
	static struct seal s;
	bool two = sysconf(_SC_NPROCESSORS_ONLN) > 1;
	struct td_opts o = { .dram_bytes = NODE_BYTES, .cpu = two ? 2 : 0 };
	double fresh[FRESH_BLOCKS], steady[STEADY_BLOCKS], rate;
	uint64_t fill;
	unsigned int i;

	bench_init(&s.b, "seal");
	if (two)
		td_pin_cpu(0, 0);
	bench_daemon(&s.b, &s.kvmmd, &o);
	bc_open(&s.pub, &s.b, s.kvmmd.socket, PAGE_BYTES);
	bc_open(&s.sub, &s.b, s.kvmmd.socket, PAGE_BYTES);

	for (i = 0; i < FRESH_BLOCKS; i++)
		fresh[i] = block(&s, "frames are free");
	fill = NODE_BYTES / PAGE_BYTES;
	while (s.nr_chains * CHAIN < fill)
		block(&s, "filling up");
	for (i = 0; i < STEADY_BLOCKS; i++)
		steady[i] = block(&s, "steady state");

	s.copied += bc_counter(&s.b, "bytes_copied_shared");
	bench_result(&s.b, "publish_pages_s_fresh",
		     bench_median(fresh, FRESH_BLOCKS));
	rate = bench_median(steady, STEADY_BLOCKS);	/* sorts */
	bench_result(&s.b, "publish_pages_s", rate);
	bench_result(&s.b, "noise", steady[STEADY_BLOCKS - 1] / steady[0]);
	bench_result(&s.b, "refused", (double)s.refused);
	bench_result(&s.b, "bytes_copied", (double)s.copied);
	bench_result(&s.b, "pages_checked", (double)s.checked);
	bench_must(&s.b, "publish_pages_s", rate, ">=", 300000);
	bench_must(&s.b, "bytes_copied", (double)s.copied, "==", 0);
	bench_must(&s.b, "pages_checked", (double)s.checked, ">=", CHAIN);
	bc_close(&s.sub);
	bc_close(&s.pub);
	return bench_finish(&s.b);
}
