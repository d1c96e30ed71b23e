/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle with its state in kvmm; see blobs.h.
 *
 * A prompt is one request of kvmm's, from the match to the last commit. A state
 * is read where it lies, and written where it will lie. All calls come from one
 * thread, one prompt after the other, so nothing of an old request is open when
 * a window has to follow a change of daemon.
 */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "tests/engine/alone.h"
#include "tests/engine/blobs.h"

#define PAGE_BYTES	65536u
#define MAX_KEYS	4096u
#define DRAIN_MS	1000u
#define STATE		0u		/* the only group */

/**
 * struct blobs - one engine
 * @alone:	requests, samples and the oracle
 * @ops, @tag:	commits that have not completed, and the last one's tag
 * @st:		what was published, refused, restored; pages are states here
 */
struct blobs {
	const struct model *m;
	struct blobs_opts o;
	struct alone	*alone;
	struct kvmm	*k;
	struct kvmm_space *sp;
	struct kvmm_win	*win;
	kvmm_node_t	node;
	uint32_t	ops;
	uint64_t	tag;
	struct sched_stats st;
};

/**
 * struct prompt - a prompt on its way
 * @rq:		NULL: compute without kvmm
 * @epoch:	of the daemon that it was opened at
 * @key:	of the checkpoints that it may have, @nkeys: at @b->o.step,
 *		2 * @b->o.step, ...
 * @hit:	tokens restored
 * @pos:	tokens seen
 * @from_ns:	since when it computes
 */
struct prompt {
	struct blobs	*b;
	struct oracle	*o;
	const struct sched_req *r;
	struct kvmm_req	*rq;
	uint64_t	epoch;
	struct kvmm_key	*key;
	uint32_t	nkeys;
	uint32_t	hit, pos;
	uint64_t	from_ns;
};

/* ---- between the calls ----------------------------------------------------------- */

/* Return: as kvmm_poll(). */
static int take_completions(struct blobs *b)
{
	struct kvmm_done d[16];
	int n, i;

	while ((n = kvmm_poll(b->k, d, 16)) > 0) {
		for (i = 0; i < n; i++) {
			if (d[i].op != KVMM_OP_BLOB)
				continue;
			b->ops--;
			if (!d[i].res[0].result)
				b->st.published++;
			else if (d[i].res[0].result == -EEXIST)
				b->st.exists++;
			else
				b->st.refused++;
		}
	}
	return n;
}

static void wait_a_little(struct blobs *b)
{
	struct pollfd p = { .fd = kvmm_fd(b->k), .events = POLLIN };

	poll(&p, 1, 1);
}

/*
 * After an -EAGAIN: may it be otherwise by now? Frames come with extents that
 * are to be mapped. A daemon that has gone gives this request nothing any more.
 */
static bool try_again(struct prompt *p, uint64_t until)
{
	struct blobs *b = p->b;

	kvmm_win_sync(b->win, 0);
	if (take_completions(b) < 0 || kvmm_epoch(b->k) != p->epoch ||
	    now_ns() >= until)
		return false;
	wait_a_little(b);
	return true;
}

static void drain(struct blobs *b)
{
	uint64_t until = now_ns() + DRAIN_MS * NSEC_PER_MSEC;

	while (take_completions(b) >= 0 && b->ops && now_ns() < until)
		wait_a_little(b);
}

/* ---- restore ---------------------------------------------------------------------- */

/* Checkpoints among the first @n that the prompt could begin from. */
static uint32_t deepest(struct prompt *p, uint32_t n, bool *below)
{
	static struct kvmm_hit hit[MAX_KEYS];
	struct kvmm_keys keys = { .k = p->key, .n = n, .group = STATE };
	struct kvmm_match m = { .size = sizeof(m) };
	struct blobs *b = p->b;
	int err;

	err = kvmm_match(p->rq, &keys, 1, b->node, hit, &m);
	if (!err && m.sync_wanted && kvmm_win_sync(b->win, 0) > 0) {
		m = (struct kvmm_match){ .size = sizeof(m) };
		err = kvmm_match(p->rq, &keys, 1, b->node, hit, &m);
	}
	*below = m.n_pages > m.n_resident;
	return err ? 0 : m.n_pages;
}

static int map(struct prompt *p, uint32_t page, struct kvmm_blob **ret)
{
	uint64_t until = now_ns() + p->b->o.wait_ms * NSEC_PER_MSEC;
	int err;

	do
		err = kvmm_blob_map(p->rq, page, until, ret);
	while (err == -EAGAIN && try_again(p, until));
	return err;
}

/* Checkpoint @n: 0, or why it is none to begin from. */
static int restore_one(struct prompt *p, uint32_t n)
{
	struct kvmm_blob *blob;
	uint32_t ntok = 0;
	int err;

	err = map(p, n - 1, &blob);
	if (err)
		return err;
	err = oracle_load(p->o, kvmm_blob_ptr(blob), kvmm_blob_len(blob),
			  &ntok);
	if (!err && ntok != n * p->b->o.step)
		err = -EBADMSG;
	kvmm_blob_put(blob);
	if (err == -EINVAL || err == -EBADMSG) {
		p->b->st.nonsense++;
		kvmm_report(p->rq, n - 1, KVMM_BAD);
	}
	return err;
}

/*
 * From the deepest checkpoint; if that is gone or makes no sense, from the next
 * one. Where it only is late, or the daemon is away, the next would be as well.
 */
static void restore(struct prompt *p)
{
	struct blobs *b = p->b;
	/* the last token is always computed: its logits are wanted */
	uint32_t n = (p->r->ntok - 1) / b->o.step;
	bool below;
	int err;

	if (n > p->nkeys)
		n = p->nkeys;
	for (; n; n--) {
		n = deepest(p, n, &below);
		if (!n)
			return;
		err = restore_one(p, n);
		if (!err) {
			p->hit = p->pos = n * b->o.step;
			b->st.hit_pages++;
			b->st.fetched_pages += below;
			return;
		}
		oracle_reset(p->o);
		if (err != -ENOENT && err != -EINVAL && err != -EBADMSG) {
			b->st.not_fetched++;
			return;
		}
	}
}

/* ---- save -------------------------------------------------------------------------- */

static int begin(struct prompt *p, const struct kvmm_key *key,
		 const struct kvmm_key *parent, uint64_t len,
		 struct kvmm_blob **ret)
{
	uint64_t until = now_ns() + p->b->o.wait_ms * NSEC_PER_MSEC;
	int err;

	do
		err = kvmm_blob_begin(p->rq, STATE, p->b->node, key, parent,
				      len, ret);
	while (err == -EAGAIN && try_again(p, until));
	return err;
}

/* What computing it again would cost, by what this prompt took. */
static uint32_t cost_us(const struct prompt *p)
{
	uint64_t us = (now_ns() - p->from_ns) / NSEC_PER_USEC;

	us = us * p->pos / (p->pos - p->hit);
	return us < UINT32_MAX ? (uint32_t)us : UINT32_MAX;
}

static void save(struct prompt *p)
{
	struct blobs *b = p->b;
	uint32_t n = p->pos / b->o.step;
	uint64_t len = oracle_state_size(p->o);
	struct kvmm_blob *blob;
	uint32_t cost = cost_us(p);
	int err;

	err = begin(p, &p->key[n - 1], n > 1 ? &p->key[n - 2] : NULL, len,
		    &blob);
	if (err == -EEXIST)
		b->st.exists++;
	else if (err)
		b->st.unsaved++;
	if (err)
		return;
	err = oracle_save(p->o, kvmm_blob_ptr(blob), len);
	if (!err)
		err = kvmm_blob_commit(blob, len, cost, 0, ++b->tag);
	if (err) {
		kvmm_blob_abort(blob);
		b->st.refused++;
		return;
	}
	b->ops++;
}

/* ---- a prompt ----------------------------------------------------------------------- */

static bool is_checkpoint(const struct prompt *p)
{
	uint32_t n = p->pos / p->b->o.step;

	return p->rq && p->pos % p->b->o.step == 0 && n <= p->nkeys &&
	       (n % p->b->o.every == 0 || n == p->nkeys);
}

/* Without a request the prompt is computed, and that is all. */
static void prompt_begin(struct prompt *p)
{
	struct kvmm_hint hint = {
		.size = sizeof(hint), .session = p->r->session,
	};
	struct blobs *b = p->b;
	uint32_t n = p->r->ntok / b->o.step;
	int got;

	if (n > MAX_KEYS)
		n = MAX_KEYS;
	if (!n)
		return;
	p->key = malloc(n * sizeof(*p->key));
	if (!p->key)
		return;
	p->epoch = kvmm_epoch(b->k);
	got = kvmm_key_chain(b->sp, NULL, p->r->tok, n * b->o.step, b->o.step,
			     NULL, 0, p->key);
	if (got <= 0 || kvmm_req_open(b->sp, p->r->id, &hint, &p->rq)) {
		p->rq = NULL;
		return;
	}
	p->nkeys = (uint32_t)got;
	restore(p);
}

static int prompt_run(struct prompt *p, float *logits)
{
	uint32_t step = p->b->o.step, end;
	int err;

	while (p->pos < p->r->ntok) {
		end = p->pos + step - p->pos % step;
		if (end > p->r->ntok)
			end = p->r->ntok;
		err = oracle_run(p->o, p->r->tok + p->pos, end - p->pos,
				 end == p->r->ntok ? logits : NULL);
		if (err)
			return err;
		p->b->st.tokens += end - p->pos;
		p->pos = end;
		if (is_checkpoint(p))
			save(p);
	}
	return 0;
}

/*
 * Whoever gets the answer finds what was saved for it: what is not complete then
 * is waited for, a millisecond mostly.
 */
static int compute(void *arg, struct oracle *o, const struct sched_req *r,
		   float *logits, uint32_t *hit)
{
	struct blobs *b = arg;
	struct prompt p = { .b = b, .o = o, .r = r };
	int err;

	prompt_begin(&p);
	p.from_ns = now_ns();
	err = prompt_run(&p, logits);
	*hit = p.hit;
	drain(b);
	if (p.rq)
		kvmm_req_end(p.rq, r->how, 0);
	free(p.key);
	b->st.requests++;
	return err;
}

/* ---- life ---------------------------------------------------------------------------- */

static int complain(const struct blobs *b, const char *what, int err)
{
	const char *why = b->k ? kvmm_error(b->k) : "";

	fprintf(stderr, "engine: %s: %s%s%s\n", what, strerror(-err),
		*why ? ": " : "", why);
	return err;
}

/* Another name and layout than the paged engine's: the two never meet. */
static int attach(struct blobs *b)
{
	const struct kvmm_seg seg = {
		.bytes = PAGE_BYTES, .align = 64, .what = KVMM_SEG_STATE,
		.shard = KVMM_MIRROR,
	};
	const struct kvmm_class cls = {
		.name = "state", .page_bytes = PAGE_BYTES, .nsegs = 1,
		.segs = &seg,
	};
	const struct kvmm_group group = {
		.rule = KVMM_LAST, .block_tokens = b->o.step,
	};
	char model[80], revision[20];
	struct kvmm_desc d = {
		.size = sizeof(d), .model = model,
		.revision = b->o.revision ? b->o.revision : revision,
		.kv_dtype = "bf16", .layout = "oracle-state-1",
		.abi_tag = "kvmm-engine-1", .salt = b->o.salt, .world = 1,
		.nclasses = 1, .ngroups = 1, .classes = &cls, .groups = &group,
	};

	snprintf(model, sizeof(model), "%s/state", model_config_of(b->m)->name);
	snprintf(revision, sizeof(revision), "%016" PRIx64,
		 model_fingerprint(b->m));
	return kvmm_space_attach(b->k, &d, &b->sp);
}

static int connect_all(struct blobs *b)
{
	struct kvmm_open_opts oo = { .size = sizeof(oo), .name = "kvmm-engine" };
	struct kvmm_win_opts wo = { .size = sizeof(wo) };
	int err;

	err = kvmm_open(b->o.socket, &oo, &b->k);
	if (err)
		return complain(b, "open", err);
	err = kvmm_node_find(b->k, b->o.node);
	if (err < 0)
		return complain(b, b->o.node, err);
	b->node = (kvmm_node_t)err;
	err = attach(b);
	if (err)
		return complain(b, "attach", err);
	err = kvmm_win_open(b->sp, 0, b->node, &wo, &b->win);
	return err ? complain(b, "window", err) : 0;
}

static void defaults(struct blobs_opts *o)
{
	if (!o->node)
		o->node = "dram0";
	if (!o->step)
		o->step = 64;
	if (!o->every)
		o->every = 1;
	if (!o->wait_ms)
		o->wait_ms = 1000;
}

int blobs_create(const struct model *m, const struct blobs_opts *o,
		 void (*done)(void *arg, const struct sched_done *d), void *arg,
		 struct blobs **ret)
{
	struct blobs *b = calloc(1, sizeof(*b));
	struct alone_prompt p = { .compute = compute, .arg = b };
	int err;

	if (!b)
		return -ENOMEM;
	b->m = m;
	b->o = *o;
	defaults(&b->o);
	err = alone_create(m, &p, done, arg, &b->alone);
	if (!err)
		err = connect_all(b);
	if (err) {
		blobs_destroy(b);
		return err;
	}
	*ret = b;
	return 0;
}

void blobs_destroy(struct blobs *b)
{
	if (!b)
		return;
	alone_destroy(b->alone);
	kvmm_close(b->k);
	free(b);
}

/* ---- behind serve() -------------------------------------------------------------------- */

static int submit_op(void *arg, const struct sched_req *r)
{
	return alone_submit(((struct blobs *)arg)->alone, r);
}

/* No request is open here: a window may follow to another daemon. */
static int run_op(void *arg)
{
	struct blobs *b = arg;

	take_completions(b);
	kvmm_win_sync(b->win, 0);
	return alone_run(b->alone);
}

static bool idle_op(void *arg)
{
	return alone_idle(((struct blobs *)arg)->alone);
}

static int fd_op(void *arg)
{
	return kvmm_fd(((struct blobs *)arg)->k);
}

static int cmd_op(void *arg, const char *cmd, const char *how)
{
	struct blobs *b = arg;

	if (!strcmp(cmd, "stats"))
		serve_stats(&b->st, NULL);
	else if (strcmp(cmd, "preempt"))
		return -EINVAL;
	return 0;
}

const struct serve_ops blobs_ops = {
	submit_op, run_op, idle_op, fd_op, cmd_op,
};
