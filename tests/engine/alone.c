/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle as a server; see alone.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/clock.h"
#include "ipc/base/list.h"
#include "tests/engine/alone.h"
#include "tests/engine/request.h"

struct job {
	struct list	link;
	struct sched_req r;
	uint32_t	sample;
	uint64_t	arrive_ns;
	uint32_t	tok[];
};

struct alone {
	const struct model *m;
	struct alone_prompt prompt;
	void		(*done)(void *arg, const struct sched_done *d);
	void		*arg;
	struct list	jobs;
	struct sched_stats st;
};

static int compute_all(void *arg, struct oracle *o, const struct sched_req *r,
		       float *logits, uint32_t *hit)
{
	*hit = 0;
	return oracle_run(o, r->tok, r->ntok, logits);
}

static const struct alone_prompt all = { .compute = compute_all };

/* Sample @d->sample of @r into @tok, and what there is to say of it into @d. */
static int answer(const struct model *m, const struct alone_prompt *p,
		  const struct sched_req *r, uint32_t *tok,
		  struct sched_done *d, uint64_t *first_ns)
{
	uint32_t vocab = model_config_of(m)->vocab, i;
	float *logits = malloc(vocab * sizeof(*logits));
	struct oracle *o = NULL;
	int err;

	err = logits ? oracle_create(m, &o) : -ENOMEM;
	if (!err)
		err = p->compute(p->arg, o, r, logits, &d->hit);
	for (i = 0; !err && i < r->max_tokens; i++) {
		d->digest = logits_digest(d->digest, logits, vocab);
		tok[i] = sample(logits, vocab, r->temperature,
				r->seed + d->sample, r->ntok + i);
		if (!i)
			*first_ns = now_ns();
		if (i + 1 < r->max_tokens)
			err = oracle_run(o, &tok[i], 1, logits);
	}
	oracle_destroy(o);
	free(logits);
	return err;
}

int alone_answer(const struct model *m, const struct sched_req *r,
		 uint32_t nr, uint32_t *tok, uint64_t *digest)
{
	struct sched_done d = { .sample = nr };
	uint64_t first;
	int err = answer(m, &all, r, tok, &d, &first);

	*digest = d.digest;
	return err;
}

int alone_create(const struct model *m, const struct alone_prompt *p,
		 void (*done)(void *arg, const struct sched_done *d), void *arg,
		 struct alone **ret)
{
	struct alone *a = calloc(1, sizeof(*a));

	if (!a)
		return -ENOMEM;
	a->m = m;
	a->prompt = p ? *p : all;
	a->done = done;
	a->arg = arg;
	list_init(&a->jobs);
	*ret = a;
	return 0;
}

void alone_destroy(struct alone *a)
{
	struct job *j;

	if (!a)
		return;
	while ((j = list_first(&a->jobs, struct job, link))) {
		list_del(&j->link);
		free(j);
	}
	free(a);
}

int alone_submit(struct alone *a, const struct sched_req *r)
{
	uint32_t n = r->nsamples ? r->nsamples : 1, i;

	if (request_wrong(r, model_config_of(a->m)->vocab))
		return -EINVAL;
	for (i = 0; i < n; i++) {
		struct job *j = malloc(sizeof(*j) + r->ntok * sizeof(*j->tok));

		if (!j)
			return -ENOMEM;
		j->r = *r;
		j->sample = i;
		j->arrive_ns = now_ns();
		memcpy(j->tok, r->tok, r->ntok * sizeof(*j->tok));
		j->r.tok = j->tok;
		list_add_tail(&a->jobs, &j->link);
	}
	a->st.requests++;
	return 0;
}

int alone_run(struct alone *a)
{
	struct job *j = list_first(&a->jobs, struct job, link);
	struct sched_done d;
	uint64_t first = 0;
	uint32_t *tok;

	if (!j)
		return 0;
	tok = malloc(j->r.max_tokens * sizeof(*tok));
	if (!tok)
		return -ENOMEM;
	d = (struct sched_done){
		.id = j->r.id, .sample = j->sample, .tok = tok,
		.prompt = j->r.ntok,
	};
	d.err = answer(a->m, &a->prompt, &j->r, tok, &d, &first);
	d.computed = j->r.ntok - d.hit + j->r.max_tokens - 1;
	d.ntok = d.err ? 0 : j->r.max_tokens;
	a->st.tokens += d.err ? 0 : d.computed;
	d.ttft_ns = first ? first - j->arrive_ns : 0;
	d.total_ns = now_ns() - j->arrive_ns;
	a->done(a->arg, &d);
	free(tok);
	list_del(&j->link);
	free(j);
	return 1;
}

bool alone_idle(const struct alone *a)
{
	return list_empty(&a->jobs);
}

/* ---- behind serve() ----------------------------------------------------------- */

static int submit_op(void *arg, const struct sched_req *r)
{
	return alone_submit(arg, r);
}

static int run_op(void *arg)
{
	return alone_run(arg);
}

static bool idle_op(void *arg)
{
	return alone_idle(arg);
}

static int fd_op(void *arg)
{
	return -1;
}

static int cmd_op(void *arg, const char *cmd, const char *how)
{
	struct alone *a = arg;

	if (!strcmp(cmd, "stats"))
		serve_stats(&a->st, NULL);
	else if (strcmp(cmd, "preempt"))
		return -EINVAL;
	return 0;
}

const struct serve_ops alone_ops = {
	submit_op, run_op, idle_op, fd_op, cmd_op,
};
