/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay.h - the recorded requests through one client, one after another
 *
 * What a request finds it uses, what lies below is fetched, with patience, and
 * the rest is published. Of each page that is asked for it is told where it came
 * from. A page that was published in the same replay is told apart: that it hits
 * says nothing of what was there before.
 */
#ifndef KVMM_TESTS_BENCH_REPLAY_H
#define KVMM_TESTS_BENCH_REPLAY_H

#include <stdint.h>

#include "tests/bench/bench.h"
#include "tests/lib/trace.h"

#define REPLAY_PAGE_BYTES	8192u

enum replay_from {
	REPLAY_MISS,		/* or published in this replay */
	REPLAY_MEMORY,
	REPLAY_BELOW,
};

/**
 * struct replay - one replay
 * @from:	of each element of trace.page: enum replay_from
 * @fresh:	of each page: was published in this replay
 * @hits:	pages that hit, fresh ones included
 * @late:	pages that were below and did not come
 * @wrong:	pages with other bytes than theirs
 */
struct replay {
	uint8_t		*from;
	uint8_t		*fresh;
	uint64_t	hits;
	uint64_t	late;
	uint64_t	wrong;
};

/** replay_run() - with a client of its own; exits when something fails */
void replay_run(struct bench *b, const char *socket, const struct trace *t,
		struct replay *r);
void replay_fini(struct replay *r);

#endif
