/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - what a step does, as the scheduler tells it to who computes
 *
 * A plan is one run of bytes, so that it can lie in memory that ranks share:
 * a head, copies of pages, and sequences with their tokens and block tables.
 * Frame numbers mean the same in every process, so nothing in it is translated.
 */
#ifndef KVMM_TESTS_ENGINE_PLAN_H
#define KVMM_TESTS_ENGINE_PLAN_H

#include "tests/engine/kv.h"

#define PLAN_MAX_SEQS	64u
#define PLAN_MAX_COPIES	(4 * PLAN_MAX_SEQS)

/**
 * struct plan_copy - a page to copy
 * @group:	of the space
 * @late:	after the computation, else before it
 */
struct plan_copy {
	uint32_t	group, from, to, late;
};

/**
 * struct plan_seq - a sequence's part in a step
 * @id:		of the request, as kvmm_match_get() knows it
 * @nhit:	units that the match of this request found on the node, told in the
 *		first step after it; 0 later
 * @n, @pos:	tokens to compute and where they stand
 * @want:	logits after the last of them: place of the answer + 1; 0: none
 * @nb:		entries of each group's table
 *
 * Followed by tok[@n] and the tables, all of 32 bits.
 */
struct plan_seq {
	uint64_t	id;
	uint32_t	nhit;
	uint32_t	n, pos;
	uint32_t	want;
	uint32_t	nb[KV_MAX_GROUPS];
	uint32_t	spare;
};

/**
 * struct plan - head
 * @step:	of the engine
 * @epoch:	of the daemon whose frames are meant
 * @stop:	there will be no further step
 * @bytes:	of all of it
 */
struct plan {
	uint64_t	step, epoch;
	uint32_t	stop, bytes;
	uint32_t	nseqs, ncopies;
	struct plan_copy copy[PLAN_MAX_COPIES];
};

/** plan_begin() - an empty plan in @buf */
struct plan *plan_begin(void *buf, uint64_t step, uint64_t epoch);

/** plan_seq_add() - Return: false: no room in @size bytes */
bool plan_seq_add(struct plan *p, size_t size, const struct plan_seq *s,
		  const uint32_t *tok, int32_t *const table[KV_MAX_GROUPS]);

bool plan_copy_add(struct plan *p, unsigned int group, uint32_t from,
		   uint32_t to, bool late);

/**
 * plan_run() - do what @p says, on this rank
 * @logits:	vocab floats for each answer, by @want - 1
 * Return: 0, -EPROTO (it makes no sense), or what @f->share says.
 */
int plan_run(const struct plan *p, const struct kv *kv, struct fwd *f,
	     float *logits);

/** plan_digest() - for who must know that it is the one */
uint64_t plan_digest(const struct plan *p);

/** plan_each() - the sequence after @s, the first for NULL; NULL: no more */
const struct plan_seq *plan_each(const struct plan *p, const struct plan_seq *s);

static inline const uint32_t *plan_tok(const struct plan_seq *s)
{
	return (const uint32_t *)(s + 1);
}

static inline const int32_t *plan_table(const struct plan_seq *s,
					unsigned int g)
{
	const int32_t *t = (const int32_t *)(plan_tok(s) + s->n);
	unsigned int i;

	for (i = 0; i < g; i++)
		t += s->nb[i];
	return t;
}

#endif
