/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What becomes of pages: published in the step that fills them, exchanged for a
 * canonical one, shared by the samples of a prompt. See sched.h.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "tests/engine/seq.h"

#define PUB_ONCE	128u
#define FORK_NS		NSEC_PER_SEC	/* for tails of samples, then without */

/* ---- publish ------------------------------------------------------------------ */

/* Microseconds that computing a page took so far, for who decides what to keep. */
static uint32_t page_cost_us(const struct seq *q, unsigned int g)
{
	const struct sched_stats *st = &q->s->st;

	if (!st->tokens)
		return 0;
	return st->step_ns / st->tokens * q->s->kv->g[g].block_tokens / 1000;
}

static void fill(struct seq *q, unsigned int g, uint32_t page,
		 kvmm_frame_t f, struct kvmm_pub *pub)
{
	const struct seq_group *sg = &q->g[g];

	memset(pub, 0, sizeof(*pub));
	pub->key = sg->key[page];
	if (page)
		pub->parent = sg->key[page - 1];
	pub->frame = f;
	pub->pos = page * q->s->kv->g[g].block_tokens;
	pub->cost_us = page_cost_us(q, g);
	pub->group = g;
	pub->after = q->s->step;
}

/* Pages [@first, @first + @n) of @g, in one entry of the ring. */
static int post(struct seq *q, unsigned int g, uint32_t first, uint32_t n,
		kvmm_frame_t snap)
{
	struct kvmm_pub pub[PUB_ONCE];
	struct op *op = op_get(q->s, OP_PUBLISH, q);
	uint32_t i;
	int err;

	if (!op)
		return -EAGAIN;
	op->group = g;
	op->first = first;
	op->n = n;
	op->snap = snap;
	for (i = 0; i < n; i++)
		fill(q, g, first + i,
		     snap ? snap : (kvmm_frame_t)q->g[g].table[first + i],
		     &pub[i]);
	err = kvmm_publish(q->rq, q->s->kv->node, pub, n, op->tag);
	if (err)
		op_put(op);
	return err;
}

static void publish_paged(struct seq *q, unsigned int g)
{
	struct seq_group *sg = &q->g[g];
	uint32_t end = (q->ndone + q->launched) / q->s->kv->g[g].block_tokens;
	uint32_t n;

	while (sg->npub < end) {
		n = min(end - sg->npub, PUB_ONCE);
		if (seq_keys(q, g, sg->npub + n))
			return;
		if (post(q, g, sg->npub, n, 0)) {
			/* nobody finds them, nor what would hang on them */
			q->s->st.refused += n;
			sg->nprivate += end - sg->npub;
			sg->npub = end;
			return;
		}
		sg->npub += n;
	}
}

static void publish_state(struct seq *q, unsigned int g)
{
	uint32_t j = (q->ndone + q->launched) / q->s->kv->g[g].block_tokens;
	kvmm_frame_t f = q->snap;

	q->snap = 0;
	if (seq_keys(q, g, j) || post(q, g, j - 1, 1, f)) {
		q->s->st.refused++;
		kvmm_free(q->rq, q->s->kv->g[g].cls, q->s->kv->node, &f, 1,
			  q->s->step);
	}
	q->g[g].npub = j;
}

void seq_publish(struct seq *q)
{
	unsigned int g;

	for (g = 0; g < q->s->kv->ngroups; g++) {
		if (!seq_linear(q, g))
			publish_paged(q, g);
		else if (q->snap)
			publish_state(q, g);
	}
}

/* ---- what was said of them ------------------------------------------------------ */

/* Two computed the same page: are they the same? */
static void audit(struct sched *s, unsigned int g, uint32_t mine,
		  uint32_t other)
{
	const struct kv_group *gr = &s->kv->g[g];
	const struct kvmm_class *cls = &s->kv->cls[gr->cls];
	unsigned int seg;

	if (team_leader(s->team))
		return;			/* the scheduler maps all or nothing */
	s->st.frames_audited++;
	for (seg = 0; seg < cls->nsegs; seg++) {
		const void *a = kvmm_win_ptr(gr->win, seg, mine);
		const void *b = kvmm_win_ptr(gr->win, seg, other);

		if (a && b && memcmp(a, b, cls->segs[seg].bytes)) {
			s->st.frames_differ++;
			return;
		}
	}
}

/*
 * Somebody was first: his page serves us, too, and ours goes back. False: his is
 * gone again, or lies where we cannot map; ours stays, and stays our own.
 */
static bool exchange(struct seq *q, unsigned int g, uint32_t page,
		     kvmm_frame_t canonical)
{
	struct sched *s = q->s;
	kvmm_frame_t mine;

	if (!canonical)
		return false;
	if (!kv_mapped(s->kv, g, canonical))
		kv_sync(s->kv, s->step);
	if (!kv_mapped(s->kv, g, canonical))
		return false;
	mine = q->g[g].table[page];
	audit(s, g, mine, canonical);
	seq_guard(s, g, canonical);
	q->g[g].table[page] = canonical;
	kvmm_free(q->rq, s->kv->g[g].cls, s->kv->node, &mine, 1, s->step);
	return true;
}

/* A snapshot is for others: neither ours nor a canonical one is read here. */
static void let_go(struct seq *q, unsigned int g, kvmm_frame_t snap,
		   const struct kvmm_result *res)
{
	const struct kv *kv = q->s->kv;
	kvmm_frame_t f[2] = { snap, res->frame };

	kvmm_free(q->rq, kv->g[g].cls, kv->node, f,
		  res->frame && res->frame != snap ? 2 : 1, q->s->step);
}

void publish_done(struct op *op, const struct kvmm_done *d)
{
	struct seq *q = op->q;
	uint32_t i;
	bool mine;

	if (!q)
		return;
	for (i = 0; i < d->n && i < op->n; i++) {
		/* also one that was counted only (mode observe) */
		mine = !d->res[i].frame;
		switch (d->res[i].result) {
		case 0:
			q->s->st.published++;
			break;
		case -EEXIST:
			q->s->st.exists++;
			if (op->snap)
				break;
			mine = !exchange(q, op->group, op->first + i,
					 d->res[i].frame);
			break;
		default:
			q->s->st.refused++;
		}
		if (op->snap)
			let_go(q, op->group, op->snap, &d->res[i]);
		else if (mine)
			q->g[op->group].nprivate++;
	}
	if (!d->n)
		q->s->st.refused += op->n;
}

/* ---- samples ------------------------------------------------------------------------ */

/* What a sample has of its parent, but for the tails. */
static int inherit(struct seq *c, const struct seq *q)
{
	unsigned int g;
	int err = 0;

	c->ndone = q->ndone;
	c->hit = q->ndone;
	c->epoch = q->epoch;
	c->arrive_ns = q->arrive_ns;
	for (g = 0; !err && g < q->s->kv->ngroups; g++) {
		const struct seq_group *from = &q->g[g];
		struct seq_group *to = &c->g[g];

		err = seq_room(c, g, max(from->nb, from->nkey));
		if (err)
			break;
		if (from->nb)
			memcpy(to->table, from->table,
			       from->nb * sizeof(*to->table));
		if (from->nkey)
			memcpy(to->key, from->key,
			       from->nkey * sizeof(*to->key));
		to->nb = from->nb;
		to->npub = from->npub;
		to->nkey = from->nkey;
	}
	return err;
}

/* The pages that are still being written: one a group at most. */
static unsigned int tails(const struct seq *q, kvmm_frame_t tail[KV_MAX_GROUPS])
{
	unsigned int g, n = 0;

	for (g = 0; g < q->s->kv->ngroups; g++) {
		const struct seq_group *sg = &q->g[g];
		bool partial = q->ndone % q->s->kv->g[g].block_tokens;

		tail[g] = 0;
		if (seq_linear(q, g))
			tail[g] = sg->nb ? sg->table[0] : 0;
		else if (partial)
			tail[g] = sg->table[sg->nb - 1];
		n += tail[g] != 0;
	}
	return n;
}

/*
 * A page that was not published is this sequence's own and goes with it, however
 * long a sample would need it.
 */
static bool all_shared(const struct seq *q)
{
	unsigned int g;

	for (g = 0; g < q->s->kv->ngroups; g++)
		if (q->g[g].nprivate)
			return false;
	return true;
}

static int fork_one(struct seq *q, uint32_t sample)
{
	kvmm_frame_t tail[KV_MAX_GROUPS];
	struct sched *s = q->s;
	struct sched_req r = q->r;
	struct op *op;
	struct seq *c;
	int n = 0;

	if (!all_shared(q))
		return -ENOENT;
	r.tok = q->tok;
	r.ntok = q->nprompt;
	r.nsamples = 1;
	c = seq_create(s, &r, sample);
	if (!c)
		return -ENOMEM;
	op = op_get(s, OP_FORK, c);
	if (!op || inherit(c, q))
		goto err;
	tails(q, tail);
	n = kvmm_req_fork(q->rq, q->r.id, s->kv->node, tail, s->kv->ngroups,
			  s->step, op->tag, &c->rq);
	if (n < 0)
		goto err;
	s->st.forks++;
	c->parent = q;
	c->logits = q->logits;		/* lent, until it has answered */
	c->state = n ? SEQ_FORKING : SEQ_RUNNING;
	list_add_tail(&s->running, &c->link);
	s->nrunning++;
	if (n) {
		q->children++;
		q->state = SEQ_FORKING;
		return 0;
	}
	op_put(op);
	c->logits = NULL;
	c->parent = NULL;
	seq_answer(c, q->logits);
	return 0;
err:
	c->logits = NULL;
	if (op)
		op_put(op);
	seq_free(c);
	return n ? n : -EAGAIN;
}

/* No copy of its parent's: from its tokens, by itself. */
static int sample_alone(struct seq *q, uint32_t sample)
{
	struct sched_req r = q->r;
	struct seq *c;

	r.tok = q->tok;
	r.ntok = q->nprompt;
	r.nsamples = 1;
	c = seq_create(q->s, &r, sample);
	if (!c)
		return -ENOMEM;
	c->arrive_ns = q->arrive_ns;
	list_add_tail(&q->s->waiting, &c->link);
	return 0;
}

/*
 * What a fork needs may come with the next round. It need not: this sequence
 * holds its pages meanwhile, and perhaps they are all that there are.
 */
static bool patient(struct seq *q)
{
	uint64_t now = now_ns();

	if (!q->since_ns)
		q->since_ns = now;
	return now - q->since_ns < FORK_NS;
}

void seq_fork(struct seq *q)
{
	uint32_t sample;
	int err;

	while (q->nfork) {
		sample = q->r.nsamples - q->nfork;
		err = fork_one(q, sample);
		if ((err == -EAGAIN || err == -EBUSY) && patient(q))
			return;
		if (!err)
			q->since_ns = 0;
		else
			err = sample_alone(q, sample);
		if (err)
			seq_refuse(q, sample, err);
		q->nfork--;
	}
}

/* A copied tail is written to; its frame may have been guarded as a hit once. */
static bool take_tail(struct seq *c, unsigned int g, kvmm_frame_t f)
{
	struct seq_group *sg = &c->g[g];

	if (c->s->o.guard && kv_protect(c->s->kv, g, f, false))
		return false;
	sg->table[seq_linear(c, g) ? 0 : sg->nb - 1] = f;
	return true;
}

void fork_done(struct op *op, const struct kvmm_done *d)
{
	struct seq *c = op->q, *q;
	uint32_t g;
	bool ok = !d->result;

	if (!c)
		return;
	q = c->parent;
	c->parent = NULL;
	for (g = 0; ok && g < d->n; g++) {
		if (d->res[g].result)
			ok = false;
		else if (d->res[g].frame)
			ok = take_tail(c, g, d->res[g].frame);
	}
	c->state = SEQ_RUNNING;
	c->logits = NULL;
	if (!ok) {
		/* its copies are not there: from its tokens, by itself */
		seq_drop(c, KVMM_CONTINUES);
		c->state = SEQ_WAITING;
		list_move_tail(&c->s->waiting, &c->link);
		c->s->nrunning--;
	} else {
		seq_answer(c, q->logits);
	}
	q->children--;
}
