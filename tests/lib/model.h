/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.h - the clients of tests/integration/test_model.c
 *
 * Chains share prefixes: a page is a node of a tree, and all its bytes follow
 * from the node. A client does what the test asks it to, one call at a time, and
 * says on its board what came of it; the test knows what may.
 */
#ifndef KVMM_TESTS_LIB_MODEL_H
#define KVMM_TESTS_LIB_MODEL_H

#include <stdint.h>

#include <kvmm/kvmm.h>

#include "tests/lib/client.h"

struct rng;

#define LONG_WAIT	20000
#define CLIENTS		3u
#define REQS		2u		/* open at a time, a client */
#define PAGE_BYTES	16384u
#define CHAINS		48u
#define LEN		24u		/* pages of a chain */
#define NODES		(CHAINS * LEN)
#define POSTED		256u		/* publishes not answered yet, a client */

/** grow_tree() - which chain is another one's up to where; before the forks */
void grow_tree(struct rng *r);

/** node_of() - the node that is page @i of a chain */
uint32_t node_of(uint32_t chain, uint32_t i);
void node_key(const struct tc *c, uint32_t node, struct kvmm_key *key);

/* The answer to a publish. */
struct answer {
	uint64_t tag;
	int32_t	result;
	uint32_t n;
	struct kvmm_result res[LEN];
};

/**
 * struct board - between the test and a client
 * @chain, @first, @n: in: pages of a chain
 * @deadline_ms: in: of a fetch
 * @after:	in: of a publish or a free
 * @step:	in: the client's own
 * @tag:	out: of the publish
 * @err:	out: of the call itself
 * @wrong:	out: bytes
 * @n_pages, @n_resident: out: of a match
 * @res:	out: of a fetch, by page
 * @answer:	out: of publishes, since the last m_collect()
 */
struct board {
	uint32_t chain, first, n, deadline_ms;
	uint64_t after, tag, step;
	int64_t	err;
	uint64_t wrong;
	uint32_t n_pages, n_resident;
	struct kvmm_result res[LEN];
	uint32_t nr_answers;
	struct answer answer[POSTED];
};


/* For proc_call(): each takes the number of one of the client's requests. */
long m_match(void *board, long r, long unused);		/* opens it */
long m_fetch(void *board, long r, long unused);
long m_publish(void *board, long r, long unused);
/* Takes frames, gives @first of them back; the rest goes with the request. */
long m_waste(void *board, long r, long unused);
long m_trim(void *board, long r, long n);
long m_end(void *board, long r, long after);

/* And these are the client's as a whole. */
long m_recheck(void *board, long a, long b);	/* wrong bytes in all it holds */
long m_collect(void *board, long a, long b);	/* after a round trip */
long m_step(void *board, long step, long unused);
long m_epoch(void *board, long a, long b);
/* There is another kvmmd: hear of it, end what was, attach again. */
long m_reborn(void *board, long old_epoch, long unused);

#endif
