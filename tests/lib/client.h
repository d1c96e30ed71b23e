/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client.h - a client as tests use it: one connection, one space, a window on
 * dram0 for each class
 *
 * A page's bytes follow from its key (pattern.h), so whoever reads a page knows
 * what must be in it. A chain is a sequence of pages of which each names the
 * one before as its parent; its keys follow from a number, so that processes
 * that share nothing but that number share the chain.
 *
 * Calls that are not named try fail the test, or end the child that they run
 * in, with a sentence (proc.h). Every wait has a deadline.
 */
#ifndef KVMM_TESTS_LIB_CLIENT_H
#define KVMM_TESTS_LIB_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include <kvmm/kvmm.h>

#include "tests/lib/proc.h"

#define TC_PAGE_BYTES	(64u << 10)
#define TC_WAIT_MS	20000
#define TC_MAX_CLASSES	3
#define TC_MAX_CHAIN	4096

/* Groups of a hybrid space; a plain one has the first alone. */
enum tc_group {
	TC_FULL		= 0,
	TC_WINDOW	= 1,
	TC_LAST		= 2,
};
#define TC_WINDOW_PAGES	3

/**
 * struct tc_opts - what a client should be like; 0 and NULL mean a default
 * @model:	of the descriptor, as a name for the space; "test"
 * @page_bytes:	of the first class; %TC_PAGE_BYTES
 * @hybrid:	FULL, WINDOW(3) and LAST groups; LAST has a class of its own
 * @desc_flags:	KVMM_MUST_JOIN
 * @rights:	of the windows
 * @engine:	join it first
 * @timeout_ns:	of set-up calls
 * @no_window:	attach only
 * @world:	of the descriptor; above 1 pages are striped and mirrored
 * @node:	of the windows; "dram0". On a gang each rank writes and checks
 *		its own part of a page
 */
struct tc_opts {
	const char	*model;
	uint32_t	page_bytes;
	bool		hybrid;
	uint32_t	desc_flags;
	uint32_t	rights;
	const struct kvmm_engine *engine;
	uint64_t	timeout_ns;
	bool		no_window;
	uint16_t	world;
	const char	*node;
};

/**
 * struct tc - a client
 * @win:	by class
 * @gang:	of the windows' node
 * @rank:	of the engine that was joined
 * @tag:	the last one used
 * @nr_stray:	completions that nobody waited for
 */
struct tc {
	struct kvmm	*k;
	struct kvmm_space *sp;
	struct kvmm_win	*win[TC_MAX_CLASSES];
	unsigned int	nr_classes;
	uint32_t	page_bytes[TC_MAX_CLASSES];
	kvmm_node_t	node;
	uint8_t		gang;
	uint32_t	rank;
	uint64_t	tag;
	uint64_t	nr_stray;
};

/* The descriptor that @o means; valid until the next call in this thread. */
const struct kvmm_desc *tc_desc(const struct tc_opts *o);

/** tc_try_open() - 0 or -errno; @c needs no close then */
int tc_try_open(struct tc *c, const char *socket, const struct tc_opts *o);
void tc_open(struct tc *c, const char *socket, const struct tc_opts *o);
/** tc_close() - fine on zeroes and twice */
void tc_close(struct tc *c);

/** tc_sync() - kvmm_win_sync() of all windows; how much changed */
int tc_sync(struct tc *c, uint64_t step);

struct kvmm_req *tc_req(struct tc *c, uint64_t id);
void tc_end(struct kvmm_req *rq);

/* -- keys and bytes ------------------------------------------------------------ */

/** tc_key() - of page @i of chain @chain, group @group */
void tc_key(const struct tc *c, uint64_t chain, uint32_t i, unsigned int group,
	    struct kvmm_key *key);
/** tc_keys() - of pages [0, @n) */
void tc_keys(const struct tc *c, uint64_t chain, uint32_t n,
	     unsigned int group, struct kvmm_key *key);

/** tc_fill() - write a page's bytes into a frame; tc_wrong() - count wrong ones;
 * on a gang those of this rank's part */
void tc_fill(struct tc *c, unsigned int cls, kvmm_frame_t f,
	     const struct kvmm_key *key);
size_t tc_wrong(struct tc *c, unsigned int cls, kvmm_frame_t f,
		const struct kvmm_key *key);

/* -- operations ---------------------------------------------------------------- */

/** tc_wait() - poll until @tag is answered; its results stay valid until the
 * next poll. False: not within @ms */
bool tc_wait(struct tc *c, uint64_t tag, struct kvmm_done *d, unsigned int ms);

/** tc_poll() - take whatever there is, count it as stray */
void tc_poll(struct tc *c);

/** tc_ping() - a round trip: all that was posted before has been looked at */
void tc_ping(struct tc *c);

/** tc_try_alloc() - wait @ms for frames, mapping what comes; 0 or -errno */
int tc_try_alloc(struct tc *c, struct kvmm_req *rq, unsigned int cls,
		 unsigned int n, kvmm_frame_t *f, unsigned int ms);
void tc_alloc(struct tc *c, struct kvmm_req *rq, unsigned int cls,
	      unsigned int n, kvmm_frame_t *f);

/** tc_pub() - fill in a page of @chain to be published */
void tc_pub(const struct tc *c, struct kvmm_pub *pub, uint64_t chain,
	    uint32_t i, unsigned int group, kvmm_frame_t f, uint64_t after);

/**
 * tc_post() - publish page 0 of a chain after a step, and do not wait
 * @tag:	of the completion
 *
 * Return: the request, which stays open.
 */
struct kvmm_req *tc_post(struct tc *c, uint64_t chain, uint64_t after,
			 uint64_t *tag);

/**
 * tc_publish() - pages [@first, @first + @n) of a chain, made and sealed
 * @res:	per page, may be NULL
 *
 * Allocates, writes, publishes, waits. Return: pages that are now in the cache
 * and this request's to read (published, or there before).
 */
unsigned int tc_publish(struct tc *c, struct kvmm_req *rq, uint64_t chain,
			uint32_t first, uint32_t n, struct kvmm_result *res);

/** tc_put() - the same in a request of its own, which ends */
unsigned int tc_put(struct tc *c, uint64_t chain, uint32_t first, uint32_t n);

/**
 * tc_match() - FULL group only; @hit and @m may be NULL
 *
 * Maps what has come when the match says that it lies there. Return: n_resident
 */
unsigned int tc_match(struct tc *c, struct kvmm_req *rq, uint64_t chain,
		      uint32_t n, struct kvmm_hit *hit, struct kvmm_match *m);
/* The same without that. */
unsigned int tc_match_once(struct tc *c, struct kvmm_req *rq, uint64_t chain,
			   uint32_t n, struct kvmm_hit *hit,
			   struct kvmm_match *m);
unsigned int tc_peek(struct tc *c, struct kvmm_req *rq, uint64_t chain,
		     uint32_t n, struct kvmm_match *m);

/** tc_check() - bytes of what tc_match() found; fails on a wrong one */
void tc_check(struct tc *c, uint64_t chain, const struct kvmm_hit *hit,
	      uint32_t n);

/** tc_hits() - match in a request of its own, check all bytes; n_resident */
unsigned int tc_hits(struct tc *c, uint64_t chain, uint32_t n);

/** struct tc_got - what tc_get() came to */
struct tc_got {
	uint32_t	resident;	/* found in place */
	uint32_t	fetched;	/* came from below in time */
	uint32_t	missed;		/* the others */
	uint64_t	ns;		/* the fetch took */
};

/**
 * tc_get() - read a chain, fetching what lies below; checks every byte
 * @deadline_ms: of the fetch
 */
struct tc_got tc_get(struct tc *c, uint64_t chain, uint32_t n,
		     unsigned int deadline_ms);

#endif
