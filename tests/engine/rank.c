/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank: waits for the leader's decision of the next step, computes its
 * columns of it in its part of the KV memory, and says so by its step word.
 *
 * Mappings change between steps only. After a change of daemon a rank keeps
 * what it has mapped until the scheduler's plan names the new daemon's epoch:
 * until then its frames mean the old one's.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "tests/engine/team_mem.h"

#define IDLE_NS		(50 * NSEC_PER_MSEC)
#define LOOK_NS		(2 * NSEC_PER_MSEC)	/* is everybody alive? */
#define SYNC_NS		(20 * NSEC_PER_SEC)
#define SHARE_NS	(60 * NSEC_PER_SEC)

/**
 * struct rank - one
 * @logits:	of a rank whose answers nobody reads: all ranks compute all of them
 * @step:	the next one
 * @nshared:	barriers passed
 */
struct rank {
	struct team_mem	*t;
	struct kv	kv;
	struct fwd	fwd;
	float		*logits;
	uint64_t	step;
	uint64_t	nshared;
};

/* Is the engine at its end? */
static bool engine_over(struct rank *r)
{
	struct kvmm_done d;

	if (kvmm_poll(r->kv.k, &d, 1) == -EOWNERDEAD ||
	    getppid() != r->t->scheduler)
		atomic_store(&r->t->dead, 1);
	return atomic_load(&r->t->dead) || atomic_load(&r->t->leave);
}

/* ---- columns of the other ranks ---------------------------------------------------- */

static int barrier(struct rank *r)
{
	struct team_mem *t = r->t;
	uint32_t phase = atomic_load(&t->phase);
	uint64_t look = now_ns() + LOOK_NS, until = look + SHARE_NS;
	unsigned int spins = 0;

	if (atomic_fetch_add(&t->arrived, 1) + 1 == t->world) {
		atomic_store(&t->arrived, 0);
		/* seq_cst: what all have written is there for who sees it */
		atomic_fetch_add(&t->phase, 1);
		return 0;
	}
	while (atomic_load(&t->phase) == phase) {
		if (++spins % 64)
			continue;
		sched_yield();
		if (now_ns() < look)
			continue;
		look = now_ns() + LOOK_NS;
		if (engine_over(r))
			return -EOWNERDEAD;
		if (look > until)
			return -ETIMEDOUT;
	}
	return 0;
}

static void columns(float *to, const float *from, size_t rows, size_t dim,
		    size_t lo, size_t hi)
{
	size_t i;

	for (i = 0; i < rows; i++)
		memcpy(to + i * dim + lo, from + i * dim + lo,
		       (hi - lo) * sizeof(*to));
}

/* fwd.share: our columns to the others, theirs to us, some rows at a time */
static int share(void *arg, float *buf, size_t rows, size_t dim, size_t lo,
		 size_t hi)
{
	struct rank *r = arg;
	size_t most = r->t->share_floats / dim, n;
	int err;

	if (!most)
		return -EMSGSIZE;
	for (; rows; rows -= n, buf += n * dim) {
		float *mem = team_mem_at(r->t,
					 r->t->share_off[r->nshared++ & 1]);

		n = rows < most ? rows : most;
		columns(mem, buf, n, dim, lo, hi);
		err = barrier(r);
		if (err)
			return err;
		columns(buf, mem, n, dim, 0, lo);
		columns(buf, mem, n, dim, hi, dim);
	}
	return 0;
}

/* ---- steps -------------------------------------------------------------------------- */

/* Map what the plan's frames are of. */
static int rank_sync(struct rank *r, uint64_t epoch)
{
	uint64_t until = now_ns() + SYNC_NS;
	struct kvmm_done d;
	int err;

	if (epoch == r->kv.epoch) {
		/* growth, as long as it is the same daemon's */
		if (kvmm_epoch(r->kv.k) == epoch)
			kv_sync(&r->kv, r->step - 1);
		return 0;
	}
	for (;;) {
		kvmm_poll(r->kv.k, &d, 1);
		if (kvmm_epoch(r->kv.k) == epoch) {
			err = kv_sync(&r->kv, r->step - 1);
			if (!err && r->kv.epoch == epoch)
				return 0;
		}
		if (engine_over(r))
			return -EOWNERDEAD;
		if (now_ns() > until)
			return -ETIMEDOUT;
		usleep(500);
	}
}

/* What the leader found for a request is what its plan says. */
static int check_match(struct rank *r, const struct plan_seq *s)
{
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit[64];
	uint32_t i, n;
	int got;

	if (!s->nhit || r->kv.g[0].rule != KVMM_FULL)
		return 0;
	got = kvmm_match_get(r->kv.sp, s->id, hit, 64, &m);
	if (got == -EAGAIN)
		return 0;	/* not kept: it was long ago */
	if (got < 0)
		return got;
	n = s->nhit * (r->kv.unit / r->kv.g[0].block_tokens);
	if (m.n_resident < s->nhit)
		return -EPROTO;
	for (i = 0; i < n && i < (uint32_t)got; i++)
		if ((int32_t)hit[i].frame != plan_table(s, 0)[i])
			return -EPROTO;
	return 0;
}

static int run(struct rank *r, const uint64_t v[TEAM_AGREED])
{
	struct plan *p = team_mem_at(r->t, r->t->plan_off[v[0] & 1]);
	const struct plan_seq *s = NULL;
	int err;

	if (p->bytes != v[1] || plan_digest(p) != v[2] || p->step != r->step)
		return -EPROTO;
	if (p->stop)
		return 1;
	err = rank_sync(r, p->epoch);
	while (!err && (s = plan_each(p, s)))
		err = check_match(r, s);
	if (!err)
		err = plan_run(p, &r->kv, &r->fwd, r->logits);
	if (err)
		return err;
	kvmm_step_done(r->kv.k, r->step);
	/* release: pairs with team_step() */
	atomic_store_explicit(&r->t->done[r->fwd.rank], r->step,
			      memory_order_release);
	if (!r->fwd.rank)
		atomic_store(&r->t->last_step, r->step);
	r->step++;
	return 0;
}

static int loop(struct rank *r)
{
	uint64_t v[TEAM_AGREED], min;
	int err;

	kvmm_agree_min(r->kv.k, TEAM_SLOT_READY, 1, &min);
	for (;;) {
		err = kvmm_agree_get(r->kv.k, r->step, v, TEAM_AGREED,
				     now_ns() + IDLE_NS);
		if (!err)
			err = run(r, v);
		else if (err == -ETIMEDOUT)
			err = rank_sync(r, r->kv.epoch);
		if (err == 1 || (!err && engine_over(r)))
			return atomic_load(&r->t->dead) ? -EOWNERDEAD : 0;
		if (err == -EOWNERDEAD && atomic_load(&r->t->leave))
			return 0;	/* others have left before us */
		if (err)
			return err;
	}
}

int rank_main(const struct model *m, struct team_mem *t,
	      const struct kvmm_engine *e, const struct kv_opts *ko,
	      unsigned int threads)
{
	struct kv_opts o = *ko;
	struct rank r = {
		.t	= t,
		.step	= 1,
		.fwd	= {
			.m = m, .rank = e->rank, .world = e->world,
			.threads = threads,
			.share = e->world > 1 ? share : NULL,
		},
	};
	int err;

	r.fwd.arg = &r;
	o.engine = e;
	r.logits = e->rank ? malloc((size_t)PLAN_MAX_SEQS * sizeof(float) *
				    model_config_of(m)->vocab) :
			     team_mem_at(t, t->logits_off);
	err = r.logits ? kv_open(&r.kv, m, &o) : -ENOMEM;
	if (!err) {
		kv_places(&r.kv, &r.fwd, e->rank);
		err = loop(&r);
		if (err)
			fprintf(stderr, "rank %u: step %llu: %s\n", e->rank,
				(unsigned long long)r.step, strerror(-err));
	}
	if (err && err != -EOWNERDEAD)
		atomic_store(&t->dead, 1);
	fwd_fini(&r.fwd);
	kv_close(&r.kv);
	if (e->rank)
		free(r.logits);
	return err ? 1 : 0;
}
