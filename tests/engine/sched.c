/* SPDX-License-Identifier: Apache-2.0 */
/* The scheduler's loop; see sched.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "tests/engine/request.h"
#include "tests/engine/seq.h"

#define MAX_SEQS	8
#define MAX_TOKENS	128
#define PATIENT_NS	(5 * NSEC_PER_MSEC)	/* for frames, before preempting */
#define PATIENCE_MS	30000

int sched_create(const struct model *m, struct kv *kv, struct team *team,
		 const struct sched_opts *o,
		 void (*done)(void *arg, const struct sched_done *d), void *arg,
		 struct sched **ret)
{
	struct sched *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	s->m = m;
	s->kv = kv;
	s->team = team;
	s->o = *o;
	if (!s->o.max_seqs)
		s->o.max_seqs = MAX_SEQS;
	s->o.max_seqs = min(s->o.max_seqs, PLAN_MAX_SEQS / 2);
	if (!s->o.max_tokens)
		s->o.max_tokens = MAX_TOKENS;
	if (!s->o.patience_ms)
		s->o.patience_ms = PATIENCE_MS;
	s->done = done;
	s->arg = arg;
	list_init(&s->waiting);
	list_init(&s->running);
	*ret = s;
	return 0;
}

static void free_all(struct list *l)
{
	struct seq *q;

	while ((q = list_first(l, struct seq, link))) {
		seq_drop(q, KVMM_UNKNOWN);
		if (q->parent)
			q->logits = NULL;	/* lent */
		seq_free(q);
	}
}

void sched_destroy(struct sched *s)
{
	if (!s)
		return;
	free_all(&s->running);
	free_all(&s->waiting);
	free(s);
}

const struct sched_stats *sched_stats(struct sched *s)
{
	s->st.publishing = 0;
	for (unsigned int i = 0; i < MAX_OPS; i++)
		s->st.publishing += s->op[i].tag &&
				    s->op[i].kind == OP_PUBLISH;
	return &s->st;
}

bool sched_idle(const struct sched *s)
{
	return list_empty(&s->running) && list_empty(&s->waiting);
}

int sched_submit(struct sched *s, const struct sched_req *r)
{
	struct sched_req q = *r;
	struct seq *seq;

	if (request_wrong(r, model_config_of(s->m)->vocab))
		return -EINVAL;
	if (!q.nsamples)
		q.nsamples = 1;
	seq = seq_create(s, &q, 0);
	if (!seq)
		return -ENOMEM;
	seq->nfork = q.nsamples - 1;
	list_add_tail(&s->waiting, &seq->link);
	s->st.requests++;
	return 0;
}

/* ---- operations in flight ------------------------------------------------------- */

struct op *op_get(struct sched *s, enum op_kind kind, struct seq *q)
{
	struct op *op = &s->op[++s->op_seq % MAX_OPS];

	if (op->tag)
		return NULL;	/* the oldest is still out: enough for now */
	*op = (struct op){ .tag = s->op_seq, .kind = kind, .q = q };
	q->nops++;
	return op;
}

void op_put(struct op *op)
{
	if (op->q)
		op->q->nops--;
	op->tag = 0;
	op->q = NULL;
}

static void op_done(struct sched *s, const struct kvmm_done *d)
{
	struct op *op = &s->op[d->tag % MAX_OPS];

	if (op->tag != d->tag)
		return;
	switch (op->kind) {
	case OP_PUBLISH:
		publish_done(op, d);
		break;
	case OP_FETCH:
		fetch_done(op, d);
		break;
	case OP_FORK:
		fork_done(op, d);
		break;
	}
	op_put(op);
}

/* Return: 0, or -EOWNERDEAD. That the daemon is away is no error. */
static int take_completions(struct sched *s)
{
	struct kvmm_done d[16];
	int n, i;

	do {
		n = kvmm_poll(s->kv->k, d, 16);
		for (i = 0; i < n; i++)
			op_done(s, &d[i]);
	} while (n == 16);
	return n == -EOWNERDEAD ? n : 0;
}

/* ---- giving way ------------------------------------------------------------------ */

static void preempt(struct seq *q, enum preempt how)
{
	struct sched *s = q->s;

	seq_drop(q, KVMM_CONTINUES);
	q->no_match = how == PREEMPT_RECOMPUTE;
	q->state = SEQ_WAITING;
	q->preempted++;
	s->st.preempted++;
	s->nrunning--;
	/* it was there before those that wait */
	list_move(&s->waiting, &q->link);
}

static bool may_preempt(const struct seq *q)
{
	return q->state == SEQ_RUNNING && !q->launched && !q->children;
}

/* The one admitted last, but not @but. */
static struct seq *victim(struct sched *s, const struct seq *but)
{
	struct seq *q, *last = NULL;

	list_for_each_entry(q, &s->running, link)
		if (q != but && may_preempt(q))
			last = q;
	return last;
}

void sched_preempt(struct sched *s, enum preempt how)
{
	struct seq *q;

	while ((q = victim(s, NULL)))
		preempt(q, how);
}

/* ---- answers --------------------------------------------------------------------- */

static bool complete(const struct seq *q)
{
	return q->ntok - q->nprompt >= q->r.max_tokens;
}

/* A sample that never became a sequence of its own. */
void seq_refuse(const struct seq *q, uint32_t sample, int err)
{
	struct sched *s = q->s;
	struct sched_done d = {
		.id		= q->r.id,
		.sample		= sample,
		.err		= err,
		.tok		= q->tok + q->nprompt,
		.prompt		= q->nprompt,
		.total_ns	= now_ns() - q->arrive_ns,
	};

	s->done(s->arg, &d);
}

/* The samples that still wait for its prompt end with it. */
static void finish(struct seq *q, int err)
{
	struct sched *s = q->s;
	uint64_t now = now_ns();
	struct sched_done d = {
		.id		= q->r.id,
		.sample		= q->sample,
		.err		= err,
		.tok		= q->tok + q->nprompt,
		.ntok		= q->ntok - q->nprompt,
		.digest		= q->digest,
		.prompt		= q->nprompt,
		.hit		= q->hit,
		.fetched	= q->fetched,
		.computed	= q->computed,
		.preempted	= q->preempted,
		.ttft_ns	= q->first_ns ? q->first_ns - q->arrive_ns : 0,
		.total_ns	= now - q->arrive_ns,
	};

	s->done(s->arg, &d);
	for (; q->nfork; q->nfork--)
		seq_refuse(q, q->r.nsamples - q->nfork, err);
	if (q->state != SEQ_WAITING)
		s->nrunning--;
	seq_drop(q, q->r.how);
	seq_free(q);
}

bool seq_answer(struct seq *q, const float *logits)
{
	uint32_t vocab = model_config_of(q->s->m)->vocab;

	q->digest = logits_digest(q->digest, logits, vocab);
	if (!q->first_ns)
		q->first_ns = now_ns();
	q->tok[q->ntok] = sample(logits, vocab, q->r.temperature,
				 q->r.seed + q->sample, q->ntok);
	q->ntok++;
	if (!complete(q))
		return false;
	if (q->children || q->nfork) {
		/* complete, but its samples need what it holds */
		return false;
	}
	finish(q, 0);
	return true;
}

/* The prompt is computed, and there are more samples of it to begin. */
static void begin_samples(struct seq *q, const float *logits)
{
	size_t bytes = model_config_of(q->s->m)->vocab * sizeof(float);

	q->logits = malloc(bytes);
	if (!q->logits) {
		finish(q, -ENOMEM);
		return;
	}
	memcpy(q->logits, logits, bytes);
	q->state = SEQ_FORKING;
	q->since_ns = 0;
	seq_answer(q, logits);
}

/* ---- admission --------------------------------------------------------------------- */

static bool old_ones_left(const struct sched *s)
{
	const struct seq *q;

	list_for_each_entry(q, &s->running, link)
		if (q->epoch != kvmm_epoch(s->kv->k))
			return true;
	return false;
}

/* After a change of daemon: what runs ends first, then all is mapped anew. */
static bool may_admit(struct sched *s)
{
	uint64_t was = s->kv->epoch;

	if (kvmm_epoch(s->kv->k) == was)
		return true;
	if (old_ones_left(s) || kv_sync(s->kv, s->step) ||
	    s->kv->epoch == was)
		return false;
	s->st.epochs++;
	return true;
}

/* Return: 0, why no more begin for now, or -EOWNERDEAD. */
static int admit(struct sched *s)
{
	struct seq *q, *next;
	int err;

	if (list_empty(&s->waiting))
		return 0;
	if (!may_admit(s))
		return -ENOTCONN;
	list_for_each_entry_safe(q, next, &s->waiting, link) {
		if (s->nrunning >= s->o.max_seqs)
			return 0;
		err = seq_admit(q);
		if (err == -EOWNERDEAD)
			return err;
		if (err == -EAGAIN || err == -ENOTCONN || err == -ESTALE) {
			seq_drop(q, KVMM_UNKNOWN);
			q->state = SEQ_WAITING;
			return err;
		}
		if (err) {
			q->state = SEQ_WAITING;
			finish(q, err);
			continue;
		}
		list_move_tail(&s->running, &q->link);
		s->nrunning++;
	}
	return 0;
}

/* Nothing runs and nothing begins: no daemon, no slot. For how long? */
static void nothing_begins(struct sched *s, int why)
{
	struct seq *q = list_first(&s->waiting, struct seq, link);
	uint64_t now = now_ns();

	if (!q || !list_empty(&s->running)) {
		s->stuck_ns = 0;
		return;
	}
	if (!s->stuck_ns)
		s->stuck_ns = now;
	if (now - s->stuck_ns > s->o.patience_ms * NSEC_PER_MSEC)
		finish(q, why);
}

/* ---- a step ------------------------------------------------------------------------- */

/* No frames: wait a little, then somebody gives way. True: look again. */
static bool starved(struct seq *q)
{
	struct sched *s = q->s;
	struct seq *v;
	uint64_t now = now_ns();

	if (!q->since_ns)
		q->since_ns = now;
	if (now - q->since_ns < PATIENT_NS)
		return false;
	v = victim(s, q);
	if (v) {
		s->st.gave_way++;
		q->since_ns = 0;
		preempt(v, s->o.preempt);
		return true;
	}
	if (q->epoch != kvmm_epoch(s->kv->k) && may_preempt(q)) {
		/* its daemon gives nothing any more, the next one may */
		preempt(q, PREEMPT_SWAP);
		return true;
	}
	if (now - q->since_ns > s->o.patience_ms * NSEC_PER_MSEC &&
	    may_preempt(q)) {
		finish(q, -ENOSPC);
		return true;
	}
	return false;
}

static bool plan_one(struct seq *q, struct plan *p, size_t size, uint32_t n)
{
	struct sched *s = q->s;
	int32_t *table[KV_MAX_GROUPS];
	struct plan_seq ps = {
		.id	= q->r.id,
		.nhit	= q->nhit_told,
		.n	= n,
		.pos	= q->ndone,
	};
	unsigned int g;

	for (g = 0; g < KV_MAX_GROUPS; g++) {
		table[g] = q->g[g].table;
		ps.nb[g] = g < s->kv->ngroups ? q->g[g].nb : 0;
	}
	q->want = q->ndone + n == q->ntok ? p->nseqs + 1 : 0;
	ps.want = q->want;
	if (!plan_seq_add(p, size, &ps, q->tok + q->ndone, table))
		return false;
	for (g = 0; g < s->kv->ngroups; g++) {
		if (!seq_linear(q, g))
			continue;
		if (q->restore)
			plan_copy_add(p, g, q->restore, q->g[g].table[0], false);
		if (q->snap)
			plan_copy_add(p, g, q->g[g].table[0], q->snap, true);
	}
	q->restore = 0;
	q->nhit_told = 0;
	q->launched = n;
	q->since_ns = 0;
	return true;
}

/* @generating: those that lack one token; else those that lack more. */
static void plan_some(struct sched *s, struct plan *p, size_t size,
		      uint32_t *budget, bool generating)
{
	struct seq *q, *next;
	uint32_t n;
	int err;

restart:
	list_for_each_entry_safe(q, next, &s->running, link) {
		if (q->state != SEQ_RUNNING || q->launched || complete(q) ||
		    (q->ntok - q->ndone == 1) != generating)
			continue;
		n = seq_chunk(q, *budget);
		if (!n || p->nseqs == PLAN_MAX_SEQS)
			return;
		err = seq_frames(q, n);
		if (err == -EAGAIN || err == -ENOTCONN) {
			if (starved(q))
				goto restart;
			continue;
		}
		if (err) {
			finish(q, err);
			goto restart;
		}
		if (!plan_one(q, p, size, n)) {
			if (p->nseqs)
				return;
			/* its tables alone are more than a plan can say */
			finish(q, -EMSGSIZE);
			goto restart;
		}
		*budget -= n;
	}
}

static void step_over(struct sched *s)
{
	struct seq *q, *next;

	list_for_each_entry_safe(q, next, &s->running, link) {
		uint32_t n = q->launched;
		const float *l;

		if (!n)
			continue;
		q->launched = 0;
		q->ndone += n;
		q->computed += n;
		s->st.tokens += n;
		seq_forget(q);
		if (!q->want)
			continue;
		l = team_logits(s->team, q->want - 1);
		q->want = 0;
		if (q->nfork && q->ntok == q->nprompt)
			begin_samples(q, l);
		else
			seq_answer(q, l);
	}
}

static int do_step(struct sched *s, struct plan *p)
{
	uint64_t t = now_ns();
	struct seq *q;
	int err;

	s->step = p->step;
	list_for_each_entry(q, &s->running, link)
		if (q->launched)
			seq_publish(q);
	err = team_run(s->team);
	if (err)
		return err;
	s->st.steps++;
	s->st.step_ns += now_ns() - t;
	step_over(s);
	if (s->o.preempt_every && s->st.steps % s->o.preempt_every == 0) {
		q = victim(s, NULL);
		if (q)
			preempt(q, s->o.preempt);
	}
	return 1;
}

static void samples(struct sched *s)
{
	struct seq *q, *next;

	list_for_each_entry_safe(q, next, &s->running, link) {
		if (q->state != SEQ_FORKING || q->parent)
			continue;
		if (q->nfork)
			seq_fork(q);
		if (q->nfork || q->children)
			continue;
		q->state = SEQ_RUNNING;
		q->since_ns = 0;
		if (complete(q))
			finish(q, 0);
	}
}

int sched_run(struct sched *s)
{
	uint32_t budget = s->o.max_tokens;
	struct plan *p;
	size_t size;
	int err;

	err = take_completions(s);
	if (err)
		return err;
	/* between steps: what has come is mapped, or no frame comes from there */
	if (s->kv->epoch == kvmm_epoch(s->kv->k))
		kv_sync(s->kv, s->step);
	samples(s);
	err = admit(s);
	if (err == -EOWNERDEAD)
		return err;
	nothing_begins(s, err);
	if (list_empty(&s->running))
		return 0;
	p = plan_begin(team_buf(s->team, &size), s->step + 1, s->kv->epoch);
	plan_some(s, p, size, &budget, true);
	plan_some(s, p, size, &budget, false);
	if (!p->nseqs)
		return 0;
	return do_step(s, p);
}
