/* SPDX-License-Identifier: Apache-2.0 */
/* The clients of the model test; see model.h. */
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/fixture.h"
#include "tests/lib/model.h"

/* -- chains that share prefixes ------------------------------------------------------ */

/* Chain c is its parent's up to branch, and its own from there. */
static uint32_t parent_of[CHAINS], branch_of[CHAINS];

uint32_t node_of(uint32_t chain, uint32_t i)
{
	while (i < branch_of[chain])
		chain = parent_of[chain];
	return chain * LEN + i;
}

void node_key(const struct tc *c, uint32_t node, struct kvmm_key *key)
{
	tc_key(c, 7000 + node / LEN, node % LEN, TC_FULL, key);
}

void grow_tree(struct rng *r)
{
	uint32_t c;

	for (c = 0; c < CHAINS; c++) {
		parent_of[c] = c ? (uint32_t)rng_below(r, c) : 0;
		branch_of[c] = c % 4 ? (uint32_t)rng_below(r, LEN) : 0;
	}
}

/* -- in a client ---------------------------------------------------------------------- */

/* A request as the client itself sees it: what lies where, for its bytes. */
static struct mine {
	struct kvmm_req	*rq;
	uint32_t	chain;
	kvmm_frame_t	frame[LEN];
} mine[REQS];
static struct answer kept[POSTED];
static struct { uint64_t tag; uint32_t r, first; } sent[POSTED];
static uint32_t nr_kept, nr_sent;

static void keep_answer(const struct kvmm_done *d)
{
	struct answer *a = &kept[nr_kept++];
	uint32_t i, j;

	T_CHECK(nr_kept < POSTED && d->n <= LEN);
	a->tag = d->tag;
	a->result = d->result;
	a->n = d->n;
	memcpy(a->res, d->res, d->n * sizeof(d->res[0]));
	for (i = 0; i < nr_sent && sent[i].tag != d->tag; i++)
		;
	T_CHECK(i < nr_sent, "an answer to nothing");
	for (j = 0; !d->result && j < d->n && sent[i].r < REQS; j++)
		if (!d->res[j].result || d->res[j].result == -EEXIST)
			mine[sent[i].r].frame[sent[i].first + j] =
				d->res[j].frame;
	sent[i] = sent[--nr_sent];
}

/* Take completions until @tag comes, into @d; publishes are kept. */
static bool pump(uint64_t tag, struct kvmm_done *d, unsigned int ms)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);
	struct pollfd pfd = { .fd = kvmm_fd(fx_c()->k), .events = POLLIN };

	for (;;) {
		int n = kvmm_poll(fx_c()->k, d, 1);

		if (n > 0 && tag && d->tag == tag)
			return true;
		if (n > 0 && d->op == KVMM_OP_PUBLISH)
			keep_answer(d);
		if (n > 0)
			continue;
		if (deadline_past(deadline))
			return false;
		poll(&pfd, 1, 1);
	}
}

static uint64_t wrong_in(const struct mine *m, uint32_t i)
{
	struct kvmm_key key;

	if (!m->frame[i])
		return 0;
	node_key(fx_c(), node_of(m->chain, i), &key);
	return tc_wrong(fx_c(), 0, m->frame[i], &key);
}

/* All that it holds, in every request. */
long m_recheck(void *shm, long a, long b)
{
	long wrong = 0;
	uint32_t r, i;

	for (r = 0; r < REQS; r++)
		for (i = 0; mine[r].rq && i < LEN; i++)
			wrong += (long)wrong_in(&mine[r], i);
	return wrong;
}

static void find(struct board *b, uint32_t r)
{
	struct kvmm_key key[LEN];
	struct kvmm_keys keys = { .k = key, .n = LEN };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit[LEN];
	uint32_t i;

	for (i = 0; i < LEN; i++)
		node_key(fx_c(), node_of(b->chain, i), &key[i]);
	T_OK(kvmm_match(mine[r].rq, &keys, 1, fx_c()->node, hit, &m));
	if (m.sync_wanted && tc_sync(fx_c(), b->step))
		T_OK(kvmm_match(mine[r].rq, &keys, 1, fx_c()->node, hit, &m));
	b->n_pages = m.n_pages;
	b->n_resident = m.n_resident;
	for (i = 0; i < LEN; i++)
		mine[r].frame[i] = i < m.n_resident ? hit[i].frame : 0;
}

long m_match(void *shm, long r, long unused)
{
	struct board *b = shm;
	uint32_t i;

	T_CHECK(!mine[r].rq);
	mine[r].rq = tc_req(fx_c(), (uint64_t)r);
	mine[r].chain = b->chain;
	find(b, (uint32_t)r);
	for (i = 0, b->wrong = 0; i < LEN; i++)
		b->wrong += wrong_in(&mine[r], i);
	return 0;
}

long m_fetch(void *shm, long r, long unused)
{
	struct board *b = shm;
	uint64_t tag = ++fx_c()->tag;
	struct kvmm_done d;
	uint32_t i;

	T_OK(kvmm_fetch(mine[r].rq, b->first, b->first + b->n, fx_c()->node,
			deadline_in(b->deadline_ms * NSEC_PER_MSEC), tag));
	T_CHECK(pump(tag, &d, b->deadline_ms + 1000),
		"a fetch is not answered by its deadline");
	b->err = d.result;
	b->wrong = 0;
	T_CHECK(d.result || d.n == b->n);
	for (i = 0; i < b->n; i++) {
		b->res[i].result = d.result ? d.result : d.res[i].result;
		if (b->res[i].result)
			continue;
		mine[r].frame[b->first + i] = d.res[i].frame;
		if (!kvmm_win_ptr(fx_c()->win[0], 0, d.res[i].frame))
			tc_sync(fx_c(), b->step);
		b->wrong += wrong_in(&mine[r], b->first + i);
	}
	return 0;
}

static uint64_t latest;		/* step that an end or a free has named */

static void launched(uint64_t step)
{
	if (step > latest)
		latest = step;
}

static int get_frames(struct kvmm_req *rq, uint32_t n, kvmm_frame_t *frame,
		      uint64_t step)
{
	uint64_t deadline = deadline_in(100 * NSEC_PER_MSEC);
	struct kvmm_done d;

	for (;;) {
		int err = kvmm_alloc(rq, 0, fx_c()->node, n, frame,
				     KVMM_EVICT_OK);

		if (err != -EAGAIN || deadline_past(deadline))
			return err;
		tc_sync(fx_c(), step);
		pump(0, &d, 1);
	}
}

long m_publish(void *shm, long r, long unused)
{
	struct board *b = shm;
	kvmm_frame_t frame[LEN];
	struct kvmm_pub pub[LEN];
	uint32_t i;

	b->err = get_frames(mine[r].rq, b->n, frame, b->step);
	if (b->err)
		return 0;
	for (i = 0; i < b->n; i++) {
		uint32_t at = b->first + i;

		pub[i] = (struct kvmm_pub) { .frame = frame[i],
			.pos = at * 16, .after = b->after };
		node_key(fx_c(), node_of(b->chain, at), &pub[i].key);
		if (at)
			node_key(fx_c(), node_of(b->chain, at - 1),
				 &pub[i].parent);
		tc_fill(fx_c(), 0, frame[i], &pub[i].key);
	}
	b->tag = ++fx_c()->tag;
	sent[nr_sent].tag = b->tag;
	sent[nr_sent].r = (uint32_t)r;
	sent[nr_sent++].first = b->first;
	b->err = kvmm_publish(mine[r].rq, fx_c()->node, pub, b->n, b->tag);
	if (b->err) {
		nr_sent--;
		T_OK(kvmm_free(mine[r].rq, 0, fx_c()->node, frame, b->n, 0));
	}
	return 0;
}

/* Take frames and give some of them back; the rest goes with the request. */
long m_waste(void *shm, long r, long unused)
{
	struct board *b = shm;
	kvmm_frame_t frame[LEN];

	b->err = get_frames(mine[r].rq, b->n, frame, b->step);
	if (b->err || !b->first)
		return 0;
	launched(b->after);
	T_OK(kvmm_free(mine[r].rq, 0, fx_c()->node, frame, b->first, b->after));
	return 0;
}

/* All that has been posted was looked at; what was answered is handed over. */
long m_collect(void *shm, long a, long unused)
{
	struct board *b = shm;
	uint64_t tag = ++fx_c()->tag;
	struct kvmm_done d;

	T_OK(kvmm_ping(fx_c()->k, tag));
	T_CHECK(pump(tag, &d, LONG_WAIT));
	b->nr_answers = nr_kept;
	memcpy(b->answer, kept, nr_kept * sizeof(kept[0]));
	nr_kept = 0;
	return 0;
}

long m_step(void *shm, long step, long unused)
{
	T_OK(kvmm_step_done(fx_c()->k, (uint64_t)step));
	tc_sync(fx_c(), (uint64_t)step);
	return 0;
}

long m_trim(void *shm, long r, long n)
{
	uint32_t i;

	T_OK(kvmm_trim(mine[r].rq, (unsigned int)n, 0));
	/* what it published itself is pinned yet: not looked at again, either */
	for (i = (uint32_t)n; i < LEN; i++)
		mine[r].frame[i] = 0;
	return 0;
}

long m_end(void *shm, long r, long after)
{
	uint32_t i;

	launched((uint64_t)after);
	T_OK(kvmm_req_end(mine[r].rq, (int)(after % 3), (uint64_t)after));
	memset(&mine[r], 0, sizeof(mine[r]));
	for (i = 0; i < nr_sent; i++)
		if (sent[i].r == (uint32_t)r)
			sent[i].r = REQS;
	return 0;
}

/* Another kvmmd: hear of it, end what was, attach again. */
long m_reborn(void *shm, long epoch, long unused)
{
	struct kvmm_done d;
	uint32_t r;

	T_WAIT(LONG_WAIT, (pump(0, &d, 0), kvmm_epoch(fx_c()->k) !=
			   (uint64_t)epoch));
	T_EQ(m_recheck(NULL, 0, 0), 0);
	for (r = 0; r < REQS; r++)
		if (mine[r].rq)
			m_end(NULL, r, 0);
	pump(0, &d, 0);
	nr_kept = nr_sent = 0;
	/* whatever may still read or write the old frames is over by now */
	T_WAIT(LONG_WAIT, kvmm_win_sync(fx_c()->win[0], latest) >= 0);
	return 0;
}

long m_epoch(void *shm, long a, long unused)
{
	return (long)kvmm_epoch(fx_c()->k);
}
