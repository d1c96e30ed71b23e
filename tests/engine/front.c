/* SPDX-License-Identifier: Apache-2.0 */
/* Prompts and traces; see front.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <kvmm/kvmm.h>

#include "ipc/base/rand.h"
#include "tests/engine/front.h"
#include "tests/engine/request.h"
#include "tests/lib/trace.h"

#define AHEAD		32u	/* requests of a trace that wait at once */
#define WAIT_US		200
#define MAX_PAGE	4096u	/* tokens that a page of a trace becomes */

static int run_once(const struct serve_ops *ops, void *arg)
{
	int did = ops->run(arg);

	if (!did)
		usleep(WAIT_US);
	return did < 0 ? did : 0;
}

static int run_all(const struct serve_ops *ops, void *arg)
{
	int err = 0;

	while (!err && !ops->idle(arg))
		err = run_once(ops, arg);
	return err;
}

static int prompt(const struct front_opts *o, const struct serve_ops *ops,
		  void *arg, uint32_t vocab)
{
	struct sched_req r = {
		.id = 1, .max_tokens = o->max_tokens, .nsamples = 1,
		.how = KVMM_CONTINUES,
	};
	uint32_t *tok;
	int n = text_tokens(o->prompt, vocab, &tok);

	if (n < 0)
		return n;
	r.tok = tok;
	r.ntok = (uint32_t)n;
	n = ops->submit(arg, &r);
	free(tok);
	return n ? n : run_all(ops, arg);
}

/* What page @page of a trace says: the same for whoever asks. */
static void page_tokens(uint32_t page, uint32_t *tok, uint32_t n,
			uint32_t vocab)
{
	struct rng r;
	uint32_t i;

	rng_seed(&r, page);
	for (i = 0; i < n; i++)
		tok[i] = (uint32_t)rng_below(&r, vocab);
}

static int submit_recorded(const struct front_opts *o, const struct request *q,
			   uint64_t id, const struct serve_ops *ops, void *arg,
			   uint32_t vocab)
{
	struct sched_req r = {
		.id = id, .max_tokens = o->max_tokens, .nsamples = 1,
		.session = q->session, .how = q->how, .seed = id,
		.ntok = q->npages * o->page_tokens + 1,
	};
	uint32_t *tok = malloc(r.ntok * sizeof(*tok)), i;
	int err;

	if (!tok)
		return -ENOMEM;
	for (i = 0; i < q->npages; i++)
		page_tokens(q->page[i], tok + (size_t)i * o->page_tokens,
			    o->page_tokens, vocab);
	/* pages of the trace are whole, prompts hardly ever */
	tok[r.ntok - 1] = (uint32_t)(id % vocab);
	r.tok = tok;
	err = ops->submit(arg, &r);
	free(tok);
	return err;
}

static int trace(struct front_opts o, const struct serve_ops *ops, void *arg,
		 uint32_t vocab)
{
	uint32_t every = o.every ? o.every : 1;
	struct trace t = { 0 };
	size_t i, n = 0;
	int err;

	if (!o.page_tokens)
		o.page_tokens = 16;
	err = trace_add(&t, o.trace);
	if (!err)
		err = trace_seal(&t);
	for (i = o.first; !err && i < t.nr && (!o.limit || n < o.limit);
	     i += every) {
		err = submit_recorded(&o, &t.req[i], i, ops, arg, vocab);
		n++;
		while (!err && n % AHEAD == 0 && !ops->idle(arg))
			err = run_once(ops, arg);
	}
	if (!err)
		err = run_all(ops, arg);
	trace_fini(&t);
	return err;
}

/* What the command line asks for that nobody could answer. */
static const char *wrong(const struct front_opts *o)
{
	if (!o->max_tokens || o->max_tokens > REQUEST_MAX_TOKENS)
		return "--generate: from 1 to 1048576";
	if (o->prompt && !*o->prompt)
		return "--prompt: the prompt is empty";
	if (o->page_tokens > MAX_PAGE)
		return "--page-tokens: from 1 to 4096";
	return NULL;
}

int front_run(const struct front_opts *o, const struct serve_ops *ops,
	      void *arg, uint32_t vocab)
{
	const char *why = wrong(o);
	int err;

	if (why) {
		fprintf(stderr, "engine: %s\n", why);
		return -EINVAL;
	}
	if (o->prompt)
		return prompt(o, ops, arg, vocab);
	serve_ready();
	err = trace(*o, ops, arg, vocab);
	if (!err && ops->cmd)
		ops->cmd(arg, "stats", NULL);
	return err;
}
