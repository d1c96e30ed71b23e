/* SPDX-License-Identifier: Apache-2.0 */
/*
 * team.h - who computes: the scheduler's own process, or rank processes
 *
 * Ranks are forked before anything of kvmm is open. Each opens the same space
 * and windows, joins the engine with its rank, and waits for the leader's
 * decision of the next step through kvmm_agree_get(); what the step does lies
 * in memory that they share with the scheduler, and so do the columns that they
 * compute for each other. Who dies is told by kvmmd (-EOWNERDEAD), and, since
 * kvmmd may be away at that moment, by the kernel.
 */
#ifndef KVMM_TESTS_ENGINE_TEAM_H
#define KVMM_TESTS_ENGINE_TEAM_H

#include "tests/engine/plan.h"

/**
 * struct team_opts - who computes
 * @ranks:	0: the scheduler's process does; else so many rank processes, at most
 *		%MODEL_MAX_WORLD
 * @token:	of the engine
 * @max_tokens:	that a step computes at most, on which buffers' sizes depend
 * @threads:	of a rank
 * @pids:	write the ranks' process ids to stderr, for who kills them
 */
struct team_opts {
	uint32_t	ranks;
	uint8_t		token[16];
	uint32_t	max_tokens;
	unsigned int	threads;
	bool		pids;
};

struct team;

/**
 * team_create() - fork the ranks, if any
 * @kv_opts:	how they open their KV memory; @engine is filled in
 *
 * Call it before anything else has threads or a connection. It does not return
 * in a rank.
 * Return: 0, or -errno; -EINVAL with a sentence on stderr.
 */
int team_create(const struct model *m, const struct team_opts *o,
		const struct kv_opts *kv_opts, struct team **ret);

/** team_leader() - what the scheduler joins as; NULL: there is nobody to lead */
const struct kvmm_engine *team_leader(const struct team *t);

/** team_attach() - the scheduler's KV memory is open; waits for the ranks */
int team_attach(struct team *t, const struct kv *kv);

/** team_buf() - where the next plan is written, and its size */
void *team_buf(struct team *t, size_t *size);

/**
 * team_run() - do the step in team_buf() and wait until all have
 * Return: 0, or -EOWNERDEAD, -ETIMEDOUT, ...: the engine is at its end.
 */
int team_run(struct team *t);

/** team_logits() - answer @ix of the last step */
const float *team_logits(const struct team *t, unsigned int ix);

/** team_destroy() - let the ranks leave, or kill them, and reap them */
void team_destroy(struct team *t);

#endif
