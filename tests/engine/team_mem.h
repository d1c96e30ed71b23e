/* SPDX-License-Identifier: Apache-2.0 */
/* team_mem.h - what the scheduler and its ranks share; team.c and rank.c only */
#ifndef KVMM_TESTS_ENGINE_TEAM_MEM_H
#define KVMM_TESTS_ENGINE_TEAM_MEM_H

#include <stdatomic.h>
#include <sys/types.h>

#include "tests/engine/team.h"

#define TEAM_SLOT_READY	0	/* kvmm_agree_min(): 1 once a rank can compute */
#define TEAM_AGREED	3	/* which plan, its bytes, its digest */
#define TEAM_SHARE_DIM	1024	/* floats a token in a share at once */

/**
 * struct team_mem - its head
 * @dead:	somebody is gone: the engine is at its end
 * @leave:	the scheduler wants nothing any more
 * @last_step:	that rank 0 has finished
 * @done:	steps that each rank has finished
 * @arrived, @phase: of the barrier
 * @share_off:	columns under way, two areas in turn: who reads one is waited for
 *		at the barrier of the other
 */
struct team_mem {
	size_t		bytes;
	uint32_t	world;
	pid_t		scheduler;
	_Atomic uint32_t dead, leave;
	_Atomic uint64_t last_step;
	_Atomic uint64_t done[MODEL_MAX_WORLD];
	_Alignas(64) _Atomic uint32_t arrived;
	_Alignas(64) _Atomic uint32_t phase;
	size_t		plan_off[2], share_off[2], logits_off;
	size_t		share_floats;
};

static inline void *team_mem_at(struct team_mem *t, size_t off)
{
	return (char *)t + off;
}

/* The same as kvmm_step_engine(), also while ranks and scheduler wait for a
 * daemon in turn. */
static inline uint64_t team_step(struct team_mem *t)
{
	uint64_t min = UINT64_MAX, v;
	uint32_t r;

	for (r = 0; r < t->world; r++) {
		/* acquire: pairs with the rank's release after its step */
		v = atomic_load_explicit(&t->done[r], memory_order_acquire);
		if (v < min)
			min = v;
	}
	return min;
}

/** rank_main() - a rank's life; Return: its exit status */
int rank_main(const struct model *m, struct team_mem *t,
	      const struct kvmm_engine *e, const struct kv_opts *ko,
	      unsigned int threads);

#endif
