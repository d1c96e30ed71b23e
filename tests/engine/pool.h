/* SPDX-License-Identifier: Apache-2.0 */
/* pool.h - threads that take parts of one job at a time. */
#ifndef KVMM_TESTS_ENGINE_POOL_H
#define KVMM_TESTS_ENGINE_POOL_H

struct pool;

/* @threads in all, the caller of pool_run() among them. 0 or -errno. */
int thread_pool_create(unsigned int threads, struct pool **ret);
void thread_pool_destroy(struct pool *p);
unsigned int pool_size(const struct pool *p);	/* 0 for NULL */

/* fn(arg, i) for each i < @parts, in any order and thread; returns after all. */
void pool_run(struct pool *p, void (*fn)(void *arg, unsigned int part),
	      void *arg, unsigned int parts);

#endif
