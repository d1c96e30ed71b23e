/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scheduler's side of a team; see team.h, and rank.c for the other.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "tests/engine/team_mem.h"

#define READY_NS	(20 * NSEC_PER_SEC)
#define STEP_NS		(120 * NSEC_PER_SEC)
#define LEAVE_NS	(5 * NSEC_PER_SEC)
#define PLAN_BYTES	((size_t)4 << 20)

/**
 * struct team - who computes
 * @buf:	plan; of two in turn when ranks read them
 * @kv, @fwd, @logits: without ranks
 */
struct team {
	const struct model *m;
	struct team_opts o;
	struct kvmm_engine leader;
	struct team_mem	*mem;
	pid_t		pid[MODEL_MAX_WORLD];
	const struct kv	*kv;
	void		*buf;
	uint64_t	posted;
	struct fwd	fwd;
	float		*logits;
};

static size_t round_page(size_t n)
{
	return (n + 4095) & ~(size_t)4095;
}

static struct team_mem *mem_create(const struct model *m,
				   const struct team_opts *o)
{
	const struct model_config *c = model_config_of(m);
	size_t share = (size_t)o->max_tokens * TEAM_SHARE_DIM * sizeof(float);
	size_t logits = (size_t)PLAN_MAX_SEQS * c->vocab * sizeof(float);
	size_t at = round_page(sizeof(struct team_mem));
	struct team_mem *t;
	size_t bytes;

	share = round_page(share);
	bytes = at + 2 * PLAN_BYTES + 2 * share + round_page(logits);
	t = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		 MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (t == MAP_FAILED)
		return NULL;
	t->bytes = bytes;
	t->world = o->ranks;
	t->scheduler = getpid();
	t->plan_off[0] = at;
	t->plan_off[1] = at + PLAN_BYTES;
	t->share_off[0] = at + 2 * PLAN_BYTES;
	t->share_off[1] = t->share_off[0] + share;
	t->share_floats = share / sizeof(float);
	t->logits_off = t->share_off[1] + share;
	return t;
}

static int fork_ranks(struct team *t, const struct kv_opts *ko)
{
	struct kvmm_engine e = t->leader;
	uint32_t r;

	e.flags = 0;
	for (r = 0; r < t->o.ranks; r++) {
		e.rank = r;
		t->pid[r] = fork();
		if (t->pid[r] < 0)
			return -errno;
		if (!t->pid[r])
			_exit(rank_main(t->m, t->mem, &e, ko, t->o.threads));
		if (t->o.pids)
			fprintf(stderr, "rank %u: process %d\n", r, t->pid[r]);
	}
	return 0;
}

static bool can_split(const struct model_config *c, uint32_t ranks)
{
	bool ok = c->heads % ranks == 0;
	unsigned int l;

	if (ranks > MODEL_MAX_WORLD) {
		fprintf(stderr, "engine: %u ranks: at most %d\n", ranks,
			MODEL_MAX_WORLD);
		return false;
	}
	for (l = 0; ok && l < c->layers; l++)
		if (model_kv_striped(c, l))
			ok = (c->kind[l] == LAYER_LINEAR ? c->lin_heads :
							   c->kv_heads) %
			     ranks == 0;
	if (!ok)
		fprintf(stderr, "engine: %u ranks: %s has heads that they do not divide\n",
			ranks, c->name);
	return ok;
}

int team_create(const struct model *m, const struct team_opts *o,
		const struct kv_opts *kv_opts, struct team **ret)
{
	struct team *t;
	int err = -ENOMEM;

	if (o->ranks && !can_split(model_config_of(m), o->ranks))
		return -EINVAL;
	t = calloc(1, sizeof(*t));
	if (!t)
		return -ENOMEM;
	t->m = m;
	t->o = *o;
	t->leader = (struct kvmm_engine){
		.size	= sizeof(t->leader),
		.flags	= KVMM_LEADER | KVMM_NO_STEP,
		.world	= o->ranks,
	};
	memcpy(t->leader.token, o->token, sizeof(t->leader.token));
	if (o->ranks) {
		t->mem = mem_create(m, o);
		if (t->mem)
			err = fork_ranks(t, kv_opts);
	} else {
		t->buf = malloc(PLAN_BYTES);
		t->logits = malloc((size_t)PLAN_MAX_SEQS *
				   model_config_of(m)->vocab * sizeof(float));
		if (t->buf && t->logits)
			err = 0;
	}
	if (err) {
		team_destroy(t);
		return err;
	}
	*ret = t;
	return 0;
}

const struct kvmm_engine *team_leader(const struct team *t)
{
	return t->o.ranks ? &t->leader : NULL;
}

/* ---- are they there? ----------------------------------------------------------- */

/* Has a rank exited? Reaps it. */
static bool rank_gone(struct team *t)
{
	uint32_t r;
	int status;

	for (r = 0; r < t->o.ranks; r++) {
		if (t->pid[r] <= 0 ||
		    waitpid(t->pid[r], &status, WNOHANG) != t->pid[r])
			continue;
		t->pid[r] = 0;
		/* release: a flag, nothing hangs on it */
		atomic_store_explicit(&t->mem->dead, 1, memory_order_release);
	}
	return atomic_load_explicit(&t->mem->dead, memory_order_acquire);
}

int team_attach(struct team *t, const struct kv *kv)
{
	uint64_t until = now_ns() + READY_NS, min = 0;
	struct kvmm_done d;
	int err;

	t->kv = kv;
	if (!t->o.ranks) {
		t->fwd = (struct fwd){
			.m = t->m, .world = 1, .threads = t->o.threads,
		};
		kv_places(kv, &t->fwd, 0);
		return 0;
	}
	while (!min) {
		err = kvmm_poll(kv->k, &d, 1);
		if (err == -EOWNERDEAD || rank_gone(t))
			return -EOWNERDEAD;
		err = kvmm_agree_min(kv->k, TEAM_SLOT_READY, 0, &min);
		if (err)
			return err;
		if (now_ns() > until)
			return -ETIMEDOUT;
		usleep(200);
	}
	return 0;
}

/* ---- a step ---------------------------------------------------------------------- */

void *team_buf(struct team *t, size_t *size)
{
	*size = PLAN_BYTES;
	if (!t->o.ranks)
		return t->buf;
	t->buf = team_mem_at(t->mem, t->mem->plan_off[t->posted & 1]);
	return t->buf;
}

static int post(struct team *t, const struct plan *p)
{
	uint64_t v[TEAM_AGREED] = {
		t->posted & 1, p->bytes, plan_digest(p),
	};

	t->posted++;
	return kvmm_agree_post(t->kv->k, p->step, v, TEAM_AGREED);
}

static int wait_step(struct team *t, uint64_t step)
{
	uint64_t until = now_ns() + STEP_NS;
	unsigned int spins = 0;

	while (kvmm_step_engine(t->kv->k) < step &&
	       team_step(t->mem) < step) {
		if (++spins < 2000)
			continue;
		usleep(50);
		if (rank_gone(t))
			return -EOWNERDEAD;
		if (now_ns() > until)
			return -ETIMEDOUT;
	}
	return 0;
}

int team_run(struct team *t)
{
	const struct plan *p = t->buf;
	int err;

	if (!t->o.ranks) {
		err = plan_run(p, t->kv, &t->fwd, t->logits);
		if (!err)
			err = kvmm_step_done(t->kv->k, p->step);
		return err;
	}
	err = post(t, p);
	return err ? err : wait_step(t, p->step);
}

const float *team_logits(const struct team *t, unsigned int ix)
{
	const float *l = t->o.ranks ? team_mem_at(t->mem, t->mem->logits_off) :
				      t->logits;

	return l + (size_t)ix * model_config_of(t->m)->vocab;
}

/* ---- the end ---------------------------------------------------------------------- */

static void tell_stop(struct team *t)
{
	size_t size;
	struct plan *p;

	if (!t->kv || !t->kv->k)
		return;
	p = plan_begin(team_buf(t, &size), atomic_load(&t->mem->last_step) + 1,
		       t->kv->epoch);
	p->stop = 1;
	post(t, p);
}

static void reap(struct team *t)
{
	uint64_t until = now_ns() + LEAVE_NS;
	uint32_t r, left;

	do {
		rank_gone(t);
		for (left = 0, r = 0; r < t->o.ranks; r++)
			left += t->pid[r] > 0;
		if (left)
			usleep(1000);
	} while (left && now_ns() < until);
	for (r = 0; r < t->o.ranks; r++) {
		if (t->pid[r] <= 0)
			continue;
		kill(t->pid[r], SIGKILL);
		waitpid(t->pid[r], NULL, 0);
	}
}

void team_destroy(struct team *t)
{
	if (!t)
		return;
	if (t->mem) {
		atomic_store(&t->mem->leave, 1);
		tell_stop(t);
		reap(t);
		munmap(t->mem, t->mem->bytes);
	} else {
		free(t->buf);
	}
	fwd_fini(&t->fwd);
	free(t->logits);
	free(t);
}
