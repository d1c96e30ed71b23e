/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences: tokens, keys, block tables, frames; see seq.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "tests/engine/seq.h"

#define FRAMES_ONCE	256u	/* asked for at once */

struct seq *seq_create(struct sched *s, const struct sched_req *r,
		       uint32_t sample)
{
	struct seq *q = calloc(1, sizeof(*q));

	if (!q)
		return NULL;
	list_init(&q->link);
	q->s = s;
	q->r = *r;
	q->r.tok = NULL;
	q->sample = sample;
	/* room for all that it will ever have; the sum fits (request_wrong()) */
	q->tok = malloc(((size_t)r->ntok + r->max_tokens) * sizeof(*q->tok));
	if (!q->tok) {
		free(q);
		return NULL;
	}
	memcpy(q->tok, r->tok, r->ntok * sizeof(*q->tok));
	q->ntok = q->nprompt = r->ntok;
	q->arrive_ns = now_ns();
	return q;
}

void seq_free(struct seq *q)
{
	unsigned int g, i;

	/* what is in flight answers nobody */
	for (i = 0; q->nops && i < MAX_OPS; i++)
		if (q->s->op[i].q == q)
			q->s->op[i].q = NULL;
	for (g = 0; g < KV_MAX_GROUPS; g++) {
		free(q->g[g].table);
		free(q->g[g].key);
	}
	list_del(&q->link);
	free(q->logits);
	free(q->tok);
	free(q);
}

int seq_room(struct seq *q, unsigned int g, uint32_t n)
{
	struct seq_group *sg = &q->g[g];
	uint32_t cap = max(n + 16, 2 * sg->cap);
	void *t, *k;

	if (n <= sg->cap)
		return 0;
	t = realloc(sg->table, cap * sizeof(*sg->table));
	if (!t)
		return -ENOMEM;
	sg->table = t;
	memset(sg->table + sg->cap, 0, (cap - sg->cap) * sizeof(*sg->table));
	k = realloc(sg->key, cap * sizeof(*sg->key));
	if (!k)
		return -ENOMEM;
	sg->key = k;
	sg->cap = cap;
	return 0;
}

int seq_keys(struct seq *q, unsigned int g, uint32_t n)
{
	const uint32_t block = q->s->kv->g[g].block_tokens;
	struct seq_group *sg = &q->g[g];
	int err = seq_room(q, g, n);

	if (err || n <= sg->nkey)
		return err;
	err = kvmm_key_chain(q->s->kv->sp,
			     sg->nkey ? &sg->key[sg->nkey - 1] : NULL,
			     q->tok + (size_t)sg->nkey * block,
			     (size_t)(n - sg->nkey) * block, block, NULL, 0,
			     sg->key + sg->nkey);
	if (err < 0)
		return err;
	sg->nkey += err;
	return 0;
}

uint32_t seq_chunk(const struct seq *q, uint32_t budget)
{
	uint32_t n = min(q->ntok - q->ndone, budget);
	unsigned int g;

	/* a snapshot is taken at the end of a step */
	for (g = 0; g < q->s->kv->ngroups; g++) {
		uint32_t every = q->s->kv->g[g].block_tokens;

		if (seq_linear(q, g))
			n = min(n, every - q->ndone % every);
	}
	return n;
}

/* ---- frames ------------------------------------------------------------------- */

static int take(struct seq *q, unsigned int g, uint32_t n, kvmm_frame_t *f)
{
	struct kv *kv = q->s->kv;
	uint32_t i;
	int err;

	err = kvmm_alloc(q->rq, kv->g[g].cls, kv->node, n, f, KVMM_EVICT_OK);
	for (i = 0; !err && q->s->o.guard && i < n; i++)
		err = kv_protect(kv, g, f[i], false);
	return err;
}

void seq_guard(struct sched *s, unsigned int g, kvmm_frame_t f)
{
	if (!s->o.guard)
		return;
	if (kv_protect(s->kv, g, f, true))
		s->st.unguarded++;
	else
		s->st.guarded++;
}

static int frames_paged(struct seq *q, unsigned int g, uint32_t n)
{
	const uint32_t block = q->s->kv->g[g].block_tokens;
	struct seq_group *sg = &q->g[g];
	uint32_t need = div_round_up(q->ndone + n, block);
	kvmm_frame_t f[FRAMES_ONCE];
	uint32_t i, m;
	int err = seq_room(q, g, need);

	while (!err && sg->nb < need) {
		m = min(need - sg->nb, FRAMES_ONCE);
		err = take(q, g, m, f);
		for (i = 0; !err && i < m; i++)
			sg->table[sg->nb++] = f[i];
	}
	return err;
}

static int frames_state(struct seq *q, unsigned int g, uint32_t n)
{
	const uint32_t every = q->s->kv->g[g].block_tokens;
	struct seq_group *sg = &q->g[g];
	kvmm_frame_t f;
	int err = seq_room(q, g, 1);

	if (!err && !sg->nb) {
		err = take(q, g, 1, &f);
		if (!err) {
			sg->table[0] = f;
			sg->nb = 1;
		}
	}
	if (!err && !q->snap && (q->ndone + n) % every == 0) {
		err = take(q, g, 1, &f);
		if (!err)
			q->snap = f;
	}
	return err;
}

int seq_frames(struct seq *q, uint32_t n)
{
	unsigned int g;
	int err = 0;

	for (g = 0; !err && g < q->s->kv->ngroups; g++)
		err = seq_linear(q, g) ? frames_state(q, g, n) :
					 frames_paged(q, g, n);
	return err;
}

void seq_forget(struct seq *q)
{
	const struct kv *kv = q->s->kv;
	unsigned int g;
	uint32_t b;

	for (g = 0; g < kv->ngroups; g++) {
		struct seq_group *sg = &q->g[g];
		uint32_t keep;

		if (kv->g[g].rule != KVMM_WINDOW ||
		    q->ndone <= q->s->kv->c->window)
			continue;
		/* the next token, at ndone, looks back window - 1 further */
		keep = (q->ndone + 1 - q->s->kv->c->window) /
		       kv->g[g].block_tokens;
		for (b = 0; b < keep && b < sg->npub; b++) {
			kvmm_frame_t f = sg->table[b];

			/* one whose publish is under way goes later */
			if (f && !kvmm_free(q->rq, kv->g[g].cls, kv->node, &f,
					    1, q->s->step))
				sg->table[b] = 0;
		}
	}
}

void seq_drop(struct seq *q, int how)
{
	unsigned int g, i;

	if (q->rq)
		kvmm_req_end(q->rq, how, q->s->step);
	q->rq = NULL;
	for (i = 0; q->nops && i < MAX_OPS; i++)
		if (q->s->op[i].q == q)
			q->s->op[i].q = NULL;
	q->nops = 0;
	for (g = 0; g < KV_MAX_GROUPS; g++) {
		if (q->g[g].table)
			memset(q->g[g].table, 0,
			       q->g[g].cap * sizeof(*q->g[g].table));
		q->g[g].nb = q->g[g].npub = q->g[g].nprivate = 0;
	}
	q->ndone = q->launched = 0;
	q->nhit_told = q->snap = q->restore = q->want = 0;
	q->since_ns = 0;
}
