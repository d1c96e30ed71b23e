/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fixture.h - a kvmmd and some child processes for each test of a program
 *
 * fx_setup() makes the daemon's folder and starts nothing, so that a test can
 * say what the daemon should be like: fx_start(). fx_teardown() ends everything,
 * also after a failure, and fails only if a sanitizer has spoken in the daemon.
 */
#ifndef KVMM_TESTS_LIB_FIXTURE_H
#define KVMM_TESTS_LIB_FIXTURE_H

#include "tests/lib/admin.h"
#include "tests/lib/client.h"
#include "tests/lib/daemon.h"
#include "tests/lib/proc.h"

#define FX_PROCS	12
#define MIB		(UINT64_C(1) << 20)

/**
 * struct fx - what a test has
 * @d:		its daemon
 * @c:		clients in this process, closed by the tear-down
 * @p:		child processes, killed by the tear-down
 */
struct fx {
	struct test_daemon d;
	struct tc	c[4];
	struct proc	p[FX_PROCS];
};

int fx_setup(void **state);
int fx_teardown(void **state);

/**
 * fx_start() - start a daemon; one socket unless @o says otherwise
 *
 * Its disk may take 20 s unless @o says otherwise: a slow one under a test is
 * no subject of it. Waits until that is online: before, nothing spills.
 */
void fx_start(struct fx *f, const struct td_opts *o);

/** fx_online() - wait until nvme0 is online */
void fx_online(struct test_daemon *d);

/** fx_stop() - SIGTERM; it must exit with 0 and in time */
void fx_stop(struct fx *f);

/** fx_path() - of the daemon's socket @i; static memory */
const char *fx_path(const struct fx *f, unsigned int i);

/** fx_client() - start child @i with a client of its own, see fx_c() */
void fx_client(struct fx *f, unsigned int i, unsigned int socket,
	       const struct tc_opts *o);

/** fx_c() - in a child: its client */
struct tc *fx_c(void);

/*
 * What children do, for proc_call(): fx_put(chain, n) and so on. Each works in
 * a request of its own.
 */
long fx_put(void *shm, long chain, long n);	/* pages in the cache */
long fx_hits(void *shm, long chain, long n);	/* resident ones, bytes checked */
long fx_close(void *shm, long a, long b);	/* its client */

/* A request that stays open in the child, one at a time. */
long fx_hold(void *shm, long chain, long n);	/* match, check, keep; resident */
long fx_recheck(void *shm, long chain, long n);	/* wrong bytes in what is held */
long fx_frames(void *shm, long a, long b);	/* u32 of held frames to shm; n */
long fx_release(void *shm, long a, long b);

/**
 * fx_spill() - publish a chain, and others until its tail has left DRAM
 * @filler:	number of the first chain to push it out with
 *
 * In a daemon with a node below. Return: pages of it that are still resident;
 * all @n are somewhere.
 */
uint32_t fx_spill(struct tc *c, uint64_t chain, uint32_t n, uint64_t filler);

/**
 * fx_grow() - let dram0 have all the extents that it will ever have
 *
 * So that a later one is no leak. FX_GROW children, the first is @i, take frames
 * until the node is used up, and go: pages alone would not do, since reclaim
 * may always be quick enough to get on with one extent less, and one engine may
 * have no more than its limit. Another client has the space attached.
 */
#define FX_GROW		3
void fx_grow(struct fx *f, unsigned int i);

/** fx_filter() - run only tests that match $KVMM_TEST_ONLY, as "*late*" */
void fx_filter(void);

/* For cmocka's tables. */
#define FX_TEST(name)	cmocka_unit_test_setup_teardown(name, fx_setup, \
							fx_teardown)

#endif
