/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kept.h - a kvmmd with a keeper, which starts it again, and clients that come
 * back to the next one
 *
 * Beside fixture.h: fx_setup() and fx_teardown() are the same.
 */
#ifndef KVMM_TESTS_LIB_KEPT_H
#define KVMM_TESTS_LIB_KEPT_H

#include "tests/lib/fixture.h"

#define LONG_WAIT	20000	/* ms until a client is back */
#define BACK_MS		5000	/* ms until nothing is left of a client */

/* How that daemon is: many deaths are the subject, not what to make of them. */
extern const struct td_opts fx_kept;

/** fx_start_kept() - fx_start() with fx_kept */
void fx_start_kept(struct fx *f);

/**
 * fx_crash() - kill the daemon, and wait for the next one
 * @first:	it is this keeper's first, so the gap must be short; the keeper
 *		waits longer from time to time
 */
void fx_crash(struct fx *f, bool first);

/** fx_adopted() - a number of status.adopted */
long fx_adopted(struct fx *f, const char *name);

/** tc_reconnects() - how often has the client come back so far? */
uint64_t tc_reconnects(struct tc *c);

/**
 * tc_back() - has the client seen a new daemon, and has what it had?
 * @reconnects:	before the old one died
 */
bool tc_back(struct tc *c, uint64_t reconnects);

/** fx_crash_and_back() - fx_crash(), the first, until @c is back */
void fx_crash_and_back(struct fx *f, struct tc *c);

#endif
