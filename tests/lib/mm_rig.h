/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mm_rig.h - a memory manager on a real host node, and clients that are not
 * processes
 *
 * A rig plays both sides: what the server does with mm's answers, and what a
 * client does with its ledger: pins, magazine, mapped extents, step word. Every
 * call that can fail fails the test.
 */
#ifndef KVMM_TESTS_LIB_MM_RIG_H
#define KVMM_TESTS_LIB_MM_RIG_H

#include "daemon/mm/mm_calls.h"

#define RIG_CLIENTS	16
#define RIG_DONE	1024	/* answers that are remembered */

struct rig;

/* An answer, as the client would read it from its ring. */
struct rig_done {
	struct mm_win	*win;
	uint64_t	tag;
	int32_t		result;
	uint8_t		op;
	uint32_t	n;
	struct ring_result res[];
};

/**
 * struct rig_client - a process
 * @mc:		NULL when mm has let go of it
 * @have_seq:	of its last window
 */
struct rig_client {
	struct rig	*rig;
	struct mm_client *mc;
	struct shm	ledger_shm;
	struct ledger	*ledger;
	struct mm_space	*space;
	struct mm_win	*win;
	uint64_t	have_seq;
	uint32_t	mag_head;
	unsigned int	kicks;
	unsigned int	gone_members, new_members;
	bool		evicted, exited;
	bool		whole;		/* adopted with all that it had */
	char		why[64];
};

/**
 * struct rig_opts - what a rig should be like
 * @bytes:	of the host node; 16 MiB
 * @lower:	a block node to demote to, the caller's
 * @pin_limit_pct: 0 for none
 * @keep:	who keeps memory; then mm adopts what there is
 * @hdr_fd:	with @keep: the header of the last daemon, the caller's; 0: none
 * @share_pct:	with @keep; 0: 100
 * @sync_work:	no worker pool: checksums and zeroing in the call
 */
struct rig_opts {
	uint64_t	bytes;
	uint64_t	extent_bytes;
	struct node	*lower;
	uint32_t	pin_limit_pct;
	bool		sync_work;
	const struct mm_keep_ops *keep;
	int		hdr_fd;
	unsigned int	share_pct;
};

struct rig {
	struct mm	*mm;
	struct shm	hdr_shm;
	struct kvmm_hdr	*hdr;
	struct work_pool *pool;
	struct node	*host;
	struct node	*lower;
	struct rig_client client[RIG_CLIENTS];
	unsigned int	nr_done;
	struct rig_done	*done[RIG_DONE];
	unsigned int	index_grown;
	const struct mm_keep_ops *keep;
	struct mm_adopted adopted;
};

/* A group of a described space; every group has a class of its own. */
struct rig_group {
	uint8_t		rule;
	uint32_t	page_bytes;
};

void mr_open(struct rig *r, const struct rig_opts *o);
/* Ends it: everything must be over in time. */
void mr_close(struct rig *r);

/* One round of the loop. */
void mr_run(struct rig *r);
/* Rounds until @fn says true; fails the test after 10 s. */
void mr_until(struct rig *r, bool (*fn)(void *arg), void *arg);
/* Until no worker and no extent is under way. */
void mr_settle(struct rig *r);
/* mm_check(), with the sentence in the failure. */
void mr_check(struct rig *r);

/* The client @i says hello; @socket and @pid tell them apart. */
struct rig_client *mr_client(struct rig *r, unsigned int i, uint32_t rights);
/* Answers that it will not read any more: their references go. */
void mr_forget(struct rig_client *c);
/* Its process exits. */
void mr_exit(struct rig_client *c);
void mr_join(struct rig_client *c, uint8_t token, uint32_t rank,
	      uint32_t world, uint32_t flags);

/* Canonical bytes of a space of model @name; the caller's buffer. */
size_t mr_desc(uint8_t *buf, const char *name, const struct rig_group *g,
		unsigned int n);
/* Attach to one FULL group of pages of @page_bytes. */
void mr_attach(struct rig_client *c, const char *name, uint32_t page_bytes);
/* Open a window on class @cls, map what there is. */
void mr_win(struct rig_client *c, unsigned int cls);
/* As kvmm_win_sync(): bits follow what mm says. */
void mr_sync(struct rig_client *c);
/* Take @n frames, refilling and syncing as an engine would. */
void mr_alloc(struct rig_client *c, uint32_t *frames, uint32_t n);
/* What is in the magazine, at once; returns how many. */
uint32_t mr_pop(struct rig_client *c, uint32_t *frames, uint32_t max);
void mr_pin(struct rig_client *c, uint32_t frame, int by);

/* The @i-th key of chain @chain. */
void mr_key(uint8_t key[32], uint32_t chain, uint32_t i);
/* An entry of that page, its parent the page before it. */
struct ring_pub mr_pub(uint32_t chain, uint32_t i, uint32_t frame);
struct page *mr_page(struct rig_client *c, uint32_t chain, uint32_t i);
/* Publish; the answer, if it came within the call, else NULL. */
const struct rig_done *mr_publish(struct rig_client *c,
				   const struct ring_pub *pub, uint32_t n,
				   uint64_t tag);
/* The answer with @tag; NULL while there is none. */
const struct rig_done *mr_answer(struct rig *r, uint64_t tag);
/* Wait for it. */
const struct rig_done *mr_wait(struct rig *r, uint64_t tag);
/* The client has read it: hand-over references go. */
void mr_take(struct rig *r, uint64_t tag);
/* Alloc and publish pages [@from, @to) of a chain; all must be READY. */
void mr_put(struct rig_client *c, uint32_t chain, uint32_t from, uint32_t to);
void mr_step(struct rig_client *c, uint64_t step);

#endif
