/* SPDX-License-Identifier: Apache-2.0 */
/* What a step does; see plan.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/plan.h"

struct plan *plan_begin(void *buf, uint64_t step, uint64_t epoch)
{
	struct plan *p = buf;

	memset(p, 0, sizeof(*p));
	p->step = step;
	p->epoch = epoch;
	p->bytes = sizeof(*p);
	return p;
}

static size_t seq_bytes(const struct plan_seq *s)
{
	size_t words = s->n;
	unsigned int g;

	for (g = 0; g < KV_MAX_GROUPS; g++)
		words += s->nb[g];
	return sizeof(*s) + (words * 4 + 7) / 8 * 8;
}

bool plan_seq_add(struct plan *p, size_t size, const struct plan_seq *s,
		  const uint32_t *tok, int32_t *const table[KV_MAX_GROUPS])
{
	size_t bytes = seq_bytes(s);
	uint8_t *at = (uint8_t *)p + p->bytes;
	unsigned int g;

	if (p->nseqs == PLAN_MAX_SEQS || p->bytes + bytes > size)
		return false;
	memcpy(at, s, sizeof(*s));
	at += sizeof(*s);
	memcpy(at, tok, s->n * sizeof(*tok));
	at += s->n * sizeof(*tok);
	for (g = 0; g < KV_MAX_GROUPS; g++) {
		if (!s->nb[g])
			continue;
		memcpy(at, table[g], s->nb[g] * sizeof(*table[g]));
		at += s->nb[g] * sizeof(*table[g]);
	}
	p->bytes += bytes;
	p->nseqs++;
	return true;
}

bool plan_copy_add(struct plan *p, unsigned int group, uint32_t from,
		   uint32_t to, bool late)
{
	if (p->ncopies == PLAN_MAX_COPIES)
		return false;
	p->copy[p->ncopies++] = (struct plan_copy){
		.group = group, .from = from, .to = to, .late = late,
	};
	return true;
}

const struct plan_seq *plan_each(const struct plan *p, const struct plan_seq *s)
{
	const uint8_t *at = s ? (const uint8_t *)s + seq_bytes(s) :
				(const uint8_t *)(p + 1);

	if (at + sizeof(*s) > (const uint8_t *)p + p->bytes)
		return NULL;
	return (const struct plan_seq *)at;
}

uint64_t plan_digest(const struct plan *p)
{
	const uint8_t *b = (const uint8_t *)p;
	uint64_t h = UINT64_C(0xcbf29ce484222325);
	uint32_t i;

	for (i = 0; i < p->bytes; i++)
		h = (h ^ b[i]) * UINT64_C(0x100000001b3);
	return h;
}

static void copies(const struct plan *p, const struct kv *kv, uint32_t rank,
		   bool late)
{
	uint32_t i;

	for (i = 0; i < p->ncopies; i++) {
		const struct plan_copy *c = &p->copy[i];

		if (!c->late == !late)
			kv_copy(kv, c->group, rank, c->from, c->to);
	}
}

int plan_run(const struct plan *p, const struct kv *kv, struct fwd *f,
	     float *logits)
{
	const uint32_t vocab = model_config_of(f->m)->vocab;
	const int32_t *table[PLAN_MAX_SEQS][KV_MAX_GROUPS];
	struct fwd_seq seq[PLAN_MAX_SEQS];
	const struct plan_seq *s = NULL;
	unsigned int n = 0, g;
	int err = 0;

	if (p->nseqs > PLAN_MAX_SEQS || p->ncopies > PLAN_MAX_COPIES)
		return -EPROTO;
	while (n < p->nseqs && (s = plan_each(p, s))) {
		for (g = 0; g < KV_MAX_GROUPS; g++)
			table[n][g] = plan_table(s, g);
		seq[n] = (struct fwd_seq){
			.tok	= plan_tok(s),
			.n	= s->n,
			.pos	= s->pos,
			.table	= table[n],
			.logits	= s->want ?
				  logits + (size_t)(s->want - 1) * vocab : NULL,
		};
		n++;
	}
	if (n < p->nseqs)
		return -EPROTO;
	copies(p, kv, f->rank, false);
	if (n)
		err = fwd_run(f, seq, n);
	if (!err)
		copies(p, kv, f->rank, true);
	return err;
}
