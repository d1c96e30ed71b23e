/* SPDX-License-Identifier: Apache-2.0 */
/*
 * serve.h - requests and answers, one JSON object a line
 *
 * Requests: {"id": 1, "text": "..." or "tokens": [..], "max_tokens": 16, "n": 1,
 * "temperature": 0, "seed": 0, "session": 0, "how": "continues" | "ended"}, and
 * {"cmd": "preempt", "how": "swap" | "recompute"}, {"cmd": "stats"},
 * {"cmd": "quit"}.
 * Answers: {"event": "ready"}, {"event": "done", ...} for each sample, with "err" (a
 * negative errno) and "why" where it did not get its tokens,
 * {"event": "stats", ...}, {"event": "error", "why": "..."}, with the "id" of the
 * request that it is about.
 *
 * A text's bytes are its tokens. A field that nobody knows is an error.
 */
#ifndef KVMM_TESTS_ENGINE_SERVE_H
#define KVMM_TESTS_ENGINE_SERVE_H

#include "tests/engine/sched.h"

/**
 * struct serve_ops - who answers
 * @submit:	a request; 0 or -errno
 * @run:	as sched_run(); @idle: as sched_idle()
 * @fd:	what to wait on beside the input while there is nothing to compute, or -1
 * @cmd:	another command; 0, or -EINVAL: unknown
 */
struct serve_ops {
	int	(*submit)(void *arg, const struct sched_req *r);
	int	(*run)(void *arg);
	bool	(*idle)(void *arg);
	int	(*fd)(void *arg);
	int	(*cmd)(void *arg, const char *cmd, const char *how);
};

/**
 * serve() - until the input ends or says quit, and all is answered
 * @vocab:	of the model
 * Return: 0, or what @run said.
 */
int serve(const struct serve_ops *ops, void *arg, int in, uint32_t vocab);

/** serve_ready() - say that requests are answered from now on */
void serve_ready(void);

/** serve_done() - write an answer; text: as text, too */
void serve_done(const struct sched_done *d, bool text);

/** serve_stats() - write what happened; @kv may be NULL */
void serve_stats(const struct sched_stats *st, const struct kv *kv);

#endif
