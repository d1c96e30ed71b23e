/* SPDX-License-Identifier: Apache-2.0 */
/* alone.h - the oracle behind the scheduler's interface: one request after the
 * other, in private contiguous memory */
#ifndef KVMM_TESTS_ENGINE_ALONE_H
#define KVMM_TESTS_ENGINE_ALONE_H

#include "tests/engine/serve.h"

struct alone;

/**
 * struct alone_prompt - who computes prompts
 * @compute:	let @o see all of @r's tokens, and write the logits after the last;
 *		*@hit is how many of them were not computed. 0 or -errno
 * @arg:	of @compute
 */
struct alone_prompt {
	int	(*compute)(void *arg, struct oracle *o,
			   const struct sched_req *r, float *logits,
			   uint32_t *hit);
	void	*arg;
};

/** alone_create() - @p: copied; NULL: the oracle computes all of a prompt */
int alone_create(const struct model *m, const struct alone_prompt *p,
		 void (*done)(void *arg, const struct sched_done *d), void *arg,
		 struct alone **ret);
void alone_destroy(struct alone *a);
/** alone_submit() - 0, -EINVAL (request_wrong()), -ENOMEM */
int alone_submit(struct alone *a, const struct sched_req *r);
/** alone_run() - a sample, start to end; 1, 0 (there was none) or -errno */
int alone_run(struct alone *a);
bool alone_idle(const struct alone *a);

extern const struct serve_ops alone_ops;	/* of a struct alone */

/**
 * alone_answer() - what sample @sample of a request is
 * @tok:	of @r->max_tokens, written
 * Return: 0 or -errno.
 */
int alone_answer(const struct model *m, const struct sched_req *r,
		 uint32_t sample, uint32_t *tok, uint64_t *digest);

#endif
