/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The policy ABI, version 0: the order in which pages leave a node.
 *
 * Version 0 is not frozen: a plug-in is built against the daemon it runs in.
 *
 * A policy proposes, the core disposes. The core tells it which pages a pool
 * (one space's class on one node) holds and when they are used; asked for
 * victims, the policy walks its own order and offers page after page, and the
 * core takes or refuses each (pinned, under I/O, has a child here). A policy
 * never sees keys, tenants or memory.
 *
 * A plug-in is one shared object that exports `kvmm_policy_v0`. It keeps its
 * per-page state in @priv of each page and its own in the instance memory; both
 * are zeroed by the core. All calls come from one thread. It may not block,
 * allocate without bound, or call anything but libc.
 */
#ifndef KVMM_POLICY_H
#define KVMM_POLICY_H

#include <stdint.h>

#define KVMM_POLICY_ABI		0
#define KVMM_POLICY_PRIV	16	/* bytes a page: there may be many millions */

/**
 * struct kvmm_policy_page - one page in one pool, as a policy sees it
 * @touched_ns:	last use, CLOCK_MONOTONIC
 * @expect_ms:	after that its conversation is expected back; 0 unknown
 * @uses:	requests that used it since it came; no more than UINT16_MAX
 * @flags:	KVMM_POLICY_*
 * @priv:	the policy's
 */
struct kvmm_policy_page {
	uint64_t	touched_ns;
	uint32_t	expect_ms;
	uint16_t	uses;
	uint16_t	flags;
	uint8_t		priv[KVMM_POLICY_PRIV] __attribute__((aligned(8)));
};

/**
 * struct kvmm_policy_facts - what does not change about a page
 * @pos:	first token's position in its sequence
 * @cost_us:	what recomputing it costs; 0 unknown
 */
struct kvmm_policy_facts {
	uint32_t	pos;
	uint32_t	cost_us;
};

#define KVMM_POLICY_ENDED	1u	/* its last request said ENDED */
#define KVMM_POLICY_CONTINUES	2u	/* its last request said CONTINUES */
#define KVMM_POLICY_COLD	4u	/* arrived with nobody waiting */

enum kvmm_policy_answer {
	KVMM_POLICY_TAKEN,		/* leaves; remove() will follow */
	KVMM_POLICY_REFUSED,		/* not now; offer the next */
	KVMM_POLICY_ENOUGH,		/* taken, or not; stop here */
};

/**
 * struct kvmm_policy_select - one search for victims
 * @want:	pages wanted
 * @max_scan:	offer at most so many
 * @now_ns:	CLOCK_MONOTONIC
 * @offer:	the core's; may call remove() or touch() of this very page before it
 *		returns, of no other
 * @arg:	the core's
 */
struct kvmm_policy_select {
	uint32_t	want;
	uint32_t	max_scan;
	uint64_t	now_ns;
	enum kvmm_policy_answer (*offer)(struct kvmm_policy_select *sel,
					 struct kvmm_policy_page *pg);
	void		*arg;
};

/**
 * struct kvmm_policy_v0 - what a plug-in exports
 * @abi:	%KVMM_POLICY_ABI
 * @size:	sizeof(struct kvmm_policy_v0)
 * @name:	shown and configured
 * @inst_bytes:	instance memory, one a pool
 * @page_bytes:	sizeof(struct kvmm_policy_page)
 * @init:	@inst is zeroed; 0 or -errno
 * @fini:	all pages have been removed
 * @add:	@pg came to the pool; who wants @facts later on keeps them
 * @touch:	a request used it; a request's pages come tail to head, so the
 *		head is the most recently used
 * @remove:	@pg leaves the pool
 * @select:	offer victims, best first; returns how many were offered
 */
struct kvmm_policy_v0 {
	uint32_t	abi;
	uint32_t	size;
	const char	*name;
	uint32_t	inst_bytes;
	uint32_t	page_bytes;
	int		(*init)(void *inst);
	void		(*fini)(void *inst);
	void		(*add)(void *inst, struct kvmm_policy_page *pg,
			       const struct kvmm_policy_facts *facts);
	void		(*touch)(void *inst, struct kvmm_policy_page *pg);
	void		(*remove)(void *inst, struct kvmm_policy_page *pg);
	uint32_t	(*select)(void *inst, struct kvmm_policy_select *sel);
};

/* What a plug-in exports; const, and it lives as long as the plug-in is loaded. */
extern const struct kvmm_policy_v0 kvmm_policy_v0
	__attribute__((visibility("default")));

#endif
