/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt_rig.h - memory managers that die, and others that adopt what they leave
 *
 * The first one runs in a child that dies at the n-th place where something is
 * half done (mm_point()); what it had kept has come to the test by then, as it
 * would come to a service manager. The second one runs in the test.
 */
#ifndef KVMM_TESTS_LIB_ADOPT_RIG_H
#define KVMM_TESTS_LIB_ADOPT_RIG_H

#include <sys/types.h>

#include "tests/lib/mm_rig.h"

#define AR_FDS		512

/* What a store holds; the test looks into it and spoils it. */
struct ar_store {
	struct {
		char	name[64];
		int	fd;
	} e[AR_FDS];
	unsigned int n;
};

/* The one that everything here uses. */
extern struct ar_store ar_store;
/* What was said of pieces that were given up, one line each. */
extern char ar_said[4096];

/* Who is adopted may only read by now. */
extern bool ar_read_only;

/* Keeps in ar_store; in a child that ar_die() runs, in its parent's. */
extern const struct mm_keep_ops ar_keep;

/**
 * ar_die() - run @fn in a child until its @nth place where it may die
 * @shm:	memory that both see, for @fn
 *
 * @fn makes its rig with ar_open(). Return: did it die? Else it came to its end,
 * and ended itself (also: without having taken anything apart).
 */
bool ar_die(void (*fn)(void *shm), void *shm, unsigned int nth);

/** ar_open() - a rig that keeps, and adopts what there is in the store */
void ar_open(struct rig *r, const struct rig_opts *o);

/** ar_find() - a descriptor of the store, its own; -1 */
int ar_find(const char *name);
/** ar_lose() - it was not kept */
void ar_lose(const char *name);
/** ar_swap() - what is kept is a copy of it: other memory under its name */
void ar_swap(const char *name);
/** ar_map() - all of what is kept, mapped; the caller's */
void *ar_map(const char *name);
/** ar_empty() - close all of it */
void ar_empty(void);

/**
 * ar_bury() - remember a daemon that died, with all that its rig had
 *
 * Nobody can take it apart: it died anywhere, as by a SIGKILL. But the memory is no
 * leak. In the process of the test; @rig is from malloc().
 */
void ar_bury(void *rig);

/** ar_client() - a client that was adopted, as a rig knows it; it is back */
struct rig_client *ar_client(struct rig *r, unsigned int i);

#endif
