/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sched.h - continuous batching over kvmm memory
 *
 * A sequence is a prompt and what was generated for it; a request with n
 * samples becomes n of them once its prompt is computed. What a sequence still
 * lacks is computed in steps: each takes one token of every sequence that is
 * generating, and chunks of prompts as far as the step's budget goes.
 *
 *	WAITING -> FETCHING -> RUNNING -> (done)
 *	   ^          |           |  \-> FORKING -> RUNNING
 *	   \----------+-----------/ preempted
 *
 * Admission looks for the longest prefix that is cached, brings what lies below
 * if that is worth it, and computes the rest. Full pages are published while
 * they are being computed, with the step as their fence. Where frames run out
 * the sequence admitted last gives way: its frames are freed, and it starts
 * again later, by computing (recompute) or from what it had published (swap).
 */
#ifndef KVMM_TESTS_ENGINE_SCHED_H
#define KVMM_TESTS_ENGINE_SCHED_H

#include "tests/engine/team.h"

enum preempt {
	PREEMPT_RECOMPUTE = 0,
	PREEMPT_SWAP	= 1,
};

/**
 * struct sched_opts - how to schedule; 0: the default
 * @max_seqs:	running at once; 8
 * @max_tokens:	of a step; 128
 * @preempt:	how
 * @preempt_every: preempt somebody every so many steps, for tests; 0: never
 * @eager:	admit what may not fit beside what runs
 * @no_match:	find nothing: compute all
 * @guard:	map what was hit read-only while it is used; where the scheduler's
 *		process computes
 * @patience_ms: how long a sequence waits for frames where nobody is left to give
 *		way, or for somebody to begin with; then it is answered with an error.
 *		30 s
 * @fetch_ms:	deadline of fetches; 0: the library's own
 * @fetch_all:	bring whatever is somewhere, also where computing is faster
 */
struct sched_opts {
	uint32_t	max_seqs;
	uint32_t	max_tokens;
	enum preempt	preempt;
	uint32_t	preempt_every;
	bool		eager;
	bool		no_match;
	bool		guard;
	uint32_t	patience_ms;
	uint32_t	fetch_ms;
	bool		fetch_all;
};

/**
 * struct sched_req - a request
 * @tok:	@ntok of them, copied
 * @max_tokens:	to generate
 * @nsamples:	how many answers
 * @temperature: 0: greedy
 * @seed:	of sample 0; sample i has @seed + i
 * @how:	enum kvmm_end: will there be more of it?
 */
struct sched_req {
	uint64_t	id;
	const uint32_t	*tok;
	uint32_t	ntok;
	uint32_t	max_tokens;
	uint32_t	nsamples;
	float		temperature;
	uint64_t	seed;
	uint64_t	session;
	int		how;
};

/**
 * struct sched_done - a sample is complete
 * @tok:	@ntok generated; valid during the call
 * @err:	0, or why there are fewer
 * @digest:	of the logits that they were drawn from
 * @hit:	tokens of the prompt found on the node
 * @fetched:	brought from below
 * @computed:	all tokens computed for it, those for the second time, too
 * @preempted:	how often
 * @ttft_ns:	from its arrival to its first token; @total_ns: to its last
 */
struct sched_done {
	uint64_t	id;
	uint32_t	sample;
	int		err;
	const uint32_t	*tok;
	uint32_t	ntok;
	uint64_t	digest;
	uint32_t	prompt, hit, fetched, computed, preempted;
	uint64_t	ttft_ns, total_ns;
};

/**
 * struct sched_stats - what happened
 * @published, @exists, @refused: pages, by what was said of their publish;
 *		@refused: also those that could not be posted
 * @publishing:	publishes of which the outcome is not known yet (not a sum)
 * @gave_way:	sequences preempted because frames had run out
 * @not_fetched: units (--blob: states) that were to come and did not: computed
 * @unsaved:	states that no memory was found for (--blob)
 * @nonsense:	states that made no sense once they were there (--blob)
 * @guarded:	pages that were made read-only for @guard; @unguarded: that could not be
 * @frames_audited, @frames_differ: -EEXIST: own page compared with the canonical
 */
struct sched_stats {
	uint64_t	steps, tokens, requests;
	uint64_t	hit_pages, fetched_pages, published, exists, refused;
	uint64_t	publishing;
	uint64_t	preempted, gave_way, not_fetched, forks, epochs;
	uint64_t	unsaved, nonsense;
	uint64_t	guarded, unguarded;
	uint64_t	frames_audited, frames_differ;
	uint64_t	step_ns;
};

struct sched;

/** sched_create() - @kv and @team must outlive it */
int sched_create(const struct model *m, struct kv *kv, struct team *team,
		 const struct sched_opts *o,
		 void (*done)(void *arg, const struct sched_done *d), void *arg,
		 struct sched **ret);
void sched_destroy(struct sched *s);

/** sched_submit() - 0, -EINVAL (request_wrong()), -ENOMEM */
int sched_submit(struct sched *s, const struct sched_req *r);

/**
 * sched_run() - admit, do a step, take what came
 * Return: 1: a step was made; 0: nothing to compute now (wait on kvmm_fd(), at
 * most a few ms while sequences wait); -errno: the engine is at its end.
 */
int sched_run(struct sched *s);

/** sched_idle() - nothing is running or waiting */
bool sched_idle(const struct sched *s);

/** sched_preempt() - all that runs gives way */
void sched_preempt(struct sched *s, enum preempt how);

const struct sched_stats *sched_stats(struct sched *s);

#endif
