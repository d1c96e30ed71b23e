/* SPDX-License-Identifier: Apache-2.0 */
/* alone.h - the oracle behind the scheduler's interface: one request after the
 * other, in private contiguous memory */
#ifndef KVMM_TESTS_ENGINE_ALONE_H
#define KVMM_TESTS_ENGINE_ALONE_H

#include "tests/engine/sched.h"

struct alone;

int alone_create(const struct model *m,
		 void (*done)(void *arg, const struct sched_done *d), void *arg,
		 struct alone **ret);
void alone_destroy(struct alone *a);
int alone_submit(struct alone *a, const struct sched_req *r);
int alone_run(struct alone *a);
bool alone_idle(const struct alone *a);

/**
 * alone_answer() - what sample @sample of a request is
 * @tok:	of @r->max_tokens, written
 * Return: 0 or -errno.
 */
int alone_answer(const struct model *m, const struct sched_req *r,
		 uint32_t sample, uint32_t *tok, uint64_t *digest);

#endif
