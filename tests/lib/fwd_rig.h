/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fwd_rig.h - the engine's paged pass under test: sequences cut into steps, ranks
 * with a cache in pages, and what the oracle says of each step
 *
 * Everything asserts.
 */
#ifndef KVMM_TESTS_LIB_FWD_RIG_H
#define KVMM_TESTS_LIB_FWD_RIG_H

#include <pthread.h>

#include "ipc/base/rand.h"
#include "tests/engine/weights.h"

#define RIG_SEQS	3
#define RIG_TOKENS	112
#define RIG_STEPS	512
#define RIG_LAYERS	8

/**
 * struct rig_step - what all ranks do at once
 * @n:		tokens of each sequence, 0: none
 * @want:	logits of each?
 * @digest:	what the oracle says
 */
struct rig_step {
	uint32_t	n[RIG_SEQS];
	bool		want[RIG_SEQS];
	uint64_t	digest[RIG_SEQS];
};

/**
 * struct rig_plan - sequences, and how they are cut into steps
 * @len:	of each sequence
 */
struct rig_plan {
	const struct model *m;
	uint32_t	tok[RIG_SEQS][RIG_TOKENS];
	uint32_t	len[RIG_SEQS];
	struct rig_step step[RIG_STEPS];
	unsigned int	steps;
};

struct fwd_rig;

struct rig_rank {
	struct fwd_rig	*rig;
	struct fwd	f;
	int32_t		table[RIG_LAYERS][RIG_SEQS][RIG_TOKENS + 2];
	float		*shared;	/* what it shows the others */
	int		err;
	unsigned int	wrong;		/* steps with other logits */
};

/**
 * struct fwd_rig - ranks with a paged cache
 * @table:	by layer and sequence; ranks have copies that forget what no window
 *		reaches any more
 */
struct fwd_rig {
	const struct rig_plan *p;
	uint32_t	world;
	struct rig_rank	rank[MODEL_MAX_WORLD];
	int32_t		table[RIG_LAYERS][RIG_SEQS][RIG_TOKENS + 2];
	pthread_barrier_t barrier;
};

/** fwd_rig_model() - a shape by its name, with the weights of @seed */
struct model *fwd_rig_model(const char *name, uint64_t seed);

/** fwd_rig_plan_tokens() - tokens for all of its sequences, of some length */
void fwd_rig_plan_tokens(struct rig_plan *p, struct rng *r);

/**
 * fwd_rig_plan_cut() - into chunks of up to @chunk at random, some sequences of
 * them in a step
 */
void fwd_rig_plan_cut(struct rig_plan *p, struct rng *r, uint32_t chunk);

/** fwd_rig_plan_ask() - what the oracle says after each chunk */
void fwd_rig_plan_ask(struct rig_plan *p);

/**
 * fwd_rig_init() - pages of each layer in an order of its own, and nothing but
 * NaN in them
 * @block_tokens: by layer
 */
void fwd_rig_init(struct fwd_rig *rig, const struct rig_plan *p, uint32_t world,
		  const uint32_t *block_tokens, struct rng *r);
void fwd_rig_fini(struct fwd_rig *rig);

/** fwd_rig_layer_bytes() - bytes of a row of layer @l, of one rank */
size_t fwd_rig_layer_bytes(const struct fwd_rig *rig, unsigned int l);

/** fwd_rig_rank_step() - step @s by one rank: -errno, or how many logits differ */
int fwd_rig_rank_step(struct rig_rank *k, const uint32_t *pos, unsigned int s);

/** fwd_rig_run() - all steps by all ranks; how many logits were not the oracle's */
unsigned int fwd_rig_run(struct fwd_rig *rig);

#endif
