/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.h - one engine's inside; for engine.c and page.c only
 *
 *	engine.c	the loop of steps, requests and operations
 *	page.c		bytes of pages: written, read and checked in place
 */
#ifndef KVMM_TESTS_DEMO_ENGINE_H
#define KVMM_TESTS_DEMO_ENGINE_H

#include <kvmm/kvmm.h>

#include "tests/demo/demo.h"

#define NR_ACTIVE	2		/* computed at a time */
#define NR_RUNS		32		/* those, and the ones that only drain */
#define CHUNK		32		/* pages computed in a step */
#define NR_OPS		256		/* in flight; a power of two */

enum run_state { RUN_FREE, RUN_FETCHING, RUN_COMPUTING, RUN_DRAINING };

/**
 * struct run - a request being worked on
 * @have:	pages [0, have) are there or published
 * @fetch_end:	fetched are [have, fetch_end)
 * @inflight:	publishes not answered yet
 * @since:	when it began to wait for frames, or to drain; 0: it does not
 */
struct run {
	enum run_state	state;
	const struct request *r;
	struct kvmm_req	*rq;
	struct kvmm_key	*key;
	struct kvmm_hit	*hit;
	uint32_t	have;
	uint32_t	fetch_end;
	uint32_t	inflight;
	uint64_t	since;
};

/**
 * struct op - something posted and not answered yet
 * @start_ns:	when it was posted; publish: when its step was done, 0 before
 * @stops:	how often kvmmd had been stopped then
 */
struct op {
	struct run	*run;		/* NULL: free */
	uint64_t	tag;
	uint64_t	start_ns;
	uint32_t	stops;
	uint32_t	first;
	uint32_t	n;
	kvmm_frame_t	frame[CHUNK];
};

/**
 * struct selftest - of --selftest-corrupt: a chain with damaged pages
 * @rq:		pins it until the engine's end; NULL: nothing is damaged yet
 * @r:		the recorded request whose pages they are
 * @key:	its keys, @n of them
 * @damaged:	pages that were changed
 */
struct selftest {
	struct kvmm_req	*rq;
	const struct request *r;
	struct kvmm_key	*key;
	uint32_t	n;
	uint32_t	damaged;
};

/**
 * struct engine - the process
 * @step:	the one that is launched, or will be next
 * @busy_until:	the device works on @step; 0: it does not
 * @launched:	publishes of @step, whose bytes are written at its end
 */
struct engine {
	const struct demo *dm;
	struct shared	*sh;
	struct engine_stats *st;
	unsigned int	me;
	struct kvmm	*k;
	struct kvmm_space *sp;
	struct kvmm_win	*win;
	kvmm_node_t	dram;
	struct places	places;
	uint64_t	step;
	uint64_t	busy_until;
	unsigned int	nr_fetches;
	struct op	*launched[NR_ACTIVE];
	unsigned int	nr_launched;
	uint64_t	seq;
	unsigned int	nr_active;
	struct selftest	self;
	struct run	run[NR_RUNS];
	struct op	op[NR_OPS];
};

static inline void count(_Atomic uint64_t *c, uint64_t n)
{
	/* This process is the only writer. */
	atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed)
			      + n, memory_order_relaxed);
}

static inline uint64_t read_count(const _Atomic uint64_t *c)
{
	return atomic_load_explicit(c, memory_order_relaxed);
}

/** complain() - of a call that failed as it must not */
void complain(struct engine *e, const char *what, int err);

/* ---- pages in place (page.c) -------------------------------------------------- */

/** write_page() - what the page @key must hold, into frame @f */
void write_page(struct engine *e, kvmm_frame_t f, const struct kvmm_key *key);

/**
 * read_page() - page @i of @r, which was hit, every byte, where it lies
 * Return: false: it is wrong; that is counted and reported.
 */
bool read_page(struct engine *e, struct run *r, uint32_t i, kvmm_frame_t f);

/** check_place() - is @f the same memory here as for whoever saw it first? */
void check_place(struct engine *e, kvmm_frame_t f);

/**
 * selftest_damage() - change pages of @r that were published behind all backs
 * @op:		the publish; its pages are sealed
 *
 * Only once, and only where the chain is in DRAM as a whole: it stays pinned,
 * so that a damaged page cannot leave before somebody asks for it.
 */
void selftest_damage(struct engine *e, const struct run *r,
		     const struct op *op);

/**
 * selftest_read_back() - ask for the damaged pages as any request would
 *
 * At the engine's end: others may not have met them.
 */
void selftest_read_back(struct engine *e);

#endif
