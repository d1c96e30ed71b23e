/* SPDX-License-Identifier: Apache-2.0 */
/* Operations in flight: op.c, publish.c, fetch.c, fork.c. */
#ifndef KVMM_LIBKVMM_OP_H
#define KVMM_LIBKVMM_OP_H

#include <errno.h>

#include "libkvmm/req.h"

/* A page of an operation: what the daemon was asked, and whose answer it is. */
struct kvmm_op_page {
	uint32_t	frame;		/* publish: the frame; fork: the new one */
	uint32_t	res;		/* index in the results */
	uint32_t	page;		/* fetch: index in the match; fork: source */
	uint32_t	len;		/* of the chain up to here, pages */
	uint16_t	group;
	uint16_t	own;		/* fork: index in kvmm_req.own */
};

/* One ring entry of an operation: a fetch has one a class. */
struct kvmm_op_part {
	struct kvmm_view *view;
	uint32_t	slot;
	uint32_t	first, n;	/* in kvmm_job.page */
	bool		pending;
	struct ring_sqe	sqe;
	const void	*array;		/* for the arena; only while posting */
	uint32_t	bytes;
};

/* Of the library's own: done.op of an operation that nobody is told of. */
#define LIB_OP_LOAD	0x100u

/**
 * struct kvmm_job - an operation in flight, or done and not yet told
 * @gen:	fetch: of the match whose pages they are
 * @deadline_ns: the library answers by itself after it
 * @blob:	KVMM_OP_BLOB: what is published
 * @load:	LIB_OP_LOAD: whose pages they are; kvmm_op_wait() waits for it
 * @over:	LIB_OP_LOAD: it is; under kvmm.lock, as @wake is, an eventfd or -1
 * @done:	what kvmm_poll() will say
 * @res:	its results, @n of them
 */
struct kvmm_job {
	struct list	link;
	struct kvmm_req	*rq;
	struct kvmm_era	*era;
	uint32_t	gen;
	uint64_t	deadline_ns;
	struct kvmm_blob *blob;
	struct kvmm_mset *load;
	bool		over;
	int		wake;
	struct kvmm_done done;
	struct kvmm_op_part part[KVMM_MAX_CLASSES];
	unsigned int	nr_parts, nr_pending;
	struct kvmm_op_page *page;
	uint32_t	cap_page;
	struct kvmm_result *res;
	uint32_t	cap_res;
	struct ring_key	*key;		/* fetch: what the entries name */
	uint32_t	cap_key;
};

/*
 * Does a page that ended with @err have no answer? The daemon went, or said what
 * makes no sense: it may have done what it was asked, or not.
 */
static inline bool kvmm_op_unknown(int err)
{
	return err == -ENOTCONN || err == -EPROTO;
}

/*
 * What is said of a page that was to be sealed in @frame. No frame with a success
 * is one that was not sealed (mode observe); another one is nonsense.
 */
static inline int kvmm_op_result(const struct ring_result *r, uint32_t frame)
{
	return !r->result && r->frame && r->frame != frame ? -EPROTO :
							     r->result;
}

/* With room for @npages and @nres; NULL when out of memory. */
struct kvmm_job *kvmm_op_alloc(struct kvmm *k, uint32_t npages, uint32_t nres);
void kvmm_op_recycle(struct kvmm *k, struct kvmm_job *op);
/*
 * Post every part's entry. 0: at least one is in flight, and a part that is not
 * pending found no room; else -EAGAIN or -ENOTCONN and nothing was posted.
 */
int kvmm_op_post(struct kvmm_job *op);
struct kvmm_job *kvmm_op_find(struct kvmm_era *e, uint64_t wire,
			     unsigned int *part);
void kvmm_op_free_all(struct kvmm *k);
/* Room for the names of @n pages; NULL when out of memory. */
struct ring_key *kvmm_op_keys(struct kvmm_job *op, uint32_t n);
/* There was nothing to ask the daemon: kvmm_poll() will tell. */
void kvmm_op_ready(struct kvmm_job *op);
/* A completion with per-page results came for part @i. */
void kvmm_op_complete(struct kvmm_job *op, unsigned int i, int result,
		      const struct ring_result *res);
/* All parts that are pending end with @err, no page has an answer. */
void kvmm_op_fail(struct kvmm_job *op, int err);
/* Tell the daemon that nobody waits for the fetches of @rq. */
void kvmm_ops_cancel(struct kvmm_era *e, const struct kvmm_req *rq);
/* What of @e is in flight ends with @err. */
void kvmm_ops_fail(struct kvmm_era *e, int err);
/* Those whose time is up. kvmm.lock is held, as for all of these. */
void kvmm_ops_late(struct kvmm_era *e, uint64_t now);

/*
 * poll.c: until @op is over, which is by its deadline. Other completions are
 * kept for kvmm_poll(). Under no lock, and not between kvmm_enter() and
 * kvmm_exit().
 */
void kvmm_op_wait(struct kvmm *k, struct kvmm_job *op);

/* The window to publish in, or an error with its sentence. */
int kvmm_publish_view(struct kvmm_req *rq, unsigned int cls, unsigned int node,
		      struct kvmm_view **ret) __must_hold(&rq->lock);
void kvmm_publish_result(struct kvmm_job *op, const struct kvmm_op_part *part,
			 int err, const struct ring_result *res);
void kvmm_fork_result(struct kvmm_job *op, const struct kvmm_op_part *part,
		      int err, const struct ring_result *res);
void kvmm_fetch_result(struct kvmm_job *op, const struct kvmm_op_part *part,
		       int err, const struct ring_result *res);

#endif
