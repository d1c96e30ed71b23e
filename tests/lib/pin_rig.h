/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pin_rig.h - libkvmm's matching against mm's reclaim, in one process, over one
 * mapping
 *
 * A mm_rig is the daemon: its frames, index, isolation and windows. Readers are
 * libkvmm's own objects, put together by hand over the very memory that mm has
 * mapped, so that ThreadSanitizer sees both sides and so that a test can stop
 * between any two steps of either.
 */
#ifndef KVMM_TESTS_LIB_PIN_RIG_H
#define KVMM_TESTS_LIB_PIN_RIG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <kvmm/kvmm.h>

#define PR_READERS	3		/* processes that match */
#define PR_PAGE_BYTES	4096u
#define PR_PAGES	4u		/* of a chain */
#define PR_CHAINS	32u		/* twice what there are frames for */

struct pin_rig;
struct pin_reader;
struct kvmm_req;

/** pr_open() - a daemon with frames for half of the chains, and readers */
struct pin_rig *pr_open(void);
void pr_close(struct pin_rig *pr);

/* KVMM_BREAK's variants; "" for none. */
void pr_break(struct pin_rig *pr, const char *what);

/* -- the daemon's side: one thread ------------------------------------------------ */

/** pr_put() - publish a chain, if it is not there; its bytes follow from its key */
void pr_put(struct pin_rig *pr, uint32_t chain);
/** pr_drop() - reclaim what is not pinned of it, leaves first; true: all of it */
bool pr_drop(struct pin_rig *pr, uint32_t chain);
/** pr_isolate() - take page 0's frame as far as ISOLATED, and leave it there */
void pr_isolate(struct pin_rig *pr, uint32_t chain);
void pr_check(struct pin_rig *pr);
/** pr_pinned() - how often an isolation found a pin and was undone */
uint64_t pr_pinned(struct pin_rig *pr);

/* -- a reader's side: any thread, a request of its own ------------------------------- */

struct kvmm_req *pr_req(struct pin_rig *pr, unsigned int reader);
void pr_req_free(struct kvmm_req *rq);
/** pr_match() - kvmm_match() of a chain; how many pages it pinned */
unsigned int pr_match(struct pin_rig *pr, struct kvmm_req *rq, uint32_t chain,
		      struct kvmm_hit hit[PR_PAGES]);
/** pr_look() - the first half of it: look up, do not pin; pr_pin(): the other */
unsigned int pr_look(struct pin_rig *pr, struct kvmm_req *rq, uint32_t chain);
unsigned int pr_pin(struct kvmm_req *rq, struct kvmm_hit hit[PR_PAGES]);
void pr_unpin(struct kvmm_req *rq);
/** pr_wrong() - bytes of page @i of @chain that are not in @frame */
size_t pr_wrong(struct pin_rig *pr, uint32_t frame, uint32_t chain,
		uint32_t i);

/* -- both at once ----------------------------------------------------------------- */

/**
 * struct pin_race - what came of it
 * @shared:	in: threads of one reader, else each has one of its own
 * @ms:		in: for how long; it ends at the first wrong byte
 * @chains:	in: of how many chains; 0 = PR_CHAINS. A few meet more often
 */
struct pin_race {
	bool		shared;
	unsigned int	ms;
	uint32_t	chains;
	uint64_t	puts, drops;
	_Atomic uint64_t hits, misses, wrong;
};

/** pr_race() - two threads match and read, this one publishes and reclaims */
void pr_race(struct pin_rig *pr, uint64_t seed, struct pin_race *out);

#endif
