/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tier_rig.h - mm with a host node and a block node, and one client of it, in
 * one process and without a server
 *
 * The client is played by the test: it takes frames out of its magazine, writes
 * pages whose bytes follow from their key, publishes, pins and fetches them.
 * Pages are named by a chain and a place in it; each is the child of the one
 * before. Answers are kept until rig_answer() takes them.
 */
#ifndef KVMM_TESTS_LIB_TIER_RIG_H
#define KVMM_TESTS_LIB_TIER_RIG_H

#include "daemon/mm/mm_calls.h"
#include "daemon/node/work.h"
#include "tests/lib/fake_blk.h"

#define RIG_DRAM	0		/* node numbers */
#define RIG_NVME	1
#define RIG_FAR		2		/* a second node of memory, if asked for */
#define RIG_FULL	0		/* groups */
#define RIG_WINDOW	1
#define RIG_BIG		2		/* of a class of larger pages */

/**
 * struct rig_opts - sizes
 * @page_bytes:	of the class of FULL and WINDOW; 0: 4096
 * @big_bytes:	of the class of BIG; 0: 16384
 * @extent_bytes: 0: eight pages
 * @far_bytes:	of a second host node, beside the first; 0: none
 * @nvme_path:	a real slot store in this file instead of a fake one
 * @nvme_engine: by which
 * @disk:	the fake one is persistent, and this is its disk
 * @hold:	... and finds nothing again before rig.blk->hold_recovery ends
 * @no_client:	rig_attach() comes later
 * @found:	mm_ops.found
 * @scrub_bytes_s: of the block node
 * @frame_ms:	how long a publish waits for a frame; 0: as long as it takes on a
 *		busy machine
 */
struct rig_opts {
	uint64_t	dram_bytes, nvme_bytes, extent_bytes, far_bytes;
	uint32_t	page_bytes, big_bytes;
	uint64_t	direct_reclaim_ns, fetch_ns;
	const struct kvmm_policy_v0 *policy;
	enum nvme_engine nvme_engine;
	const char	*nvme_path;
	struct fake_disk *disk;
	bool		hold;
	bool		no_client;
	int		(*found)(const char *tenant);
	uint64_t	scrub_bytes_s;
	unsigned int	frame_ms;
	bool		no_nvme;
	bool		second_touch;	/* see struct mm_node_opts */
	uint32_t	day_permille;
	uint8_t		gang;		/* DRAM is one of so many parts */
	bool		crc;		/* publishers say what the bytes sum up to */
	bool		other_bytes;	/* ... and compute others than usual */
	bool		wrong_crc;	/* ... and are wrong about it */
};

struct rig_answer {
	uint64_t	tag;
	int32_t		result;
	uint32_t	n;
	struct mm_win	*win;
	struct ring_result res[64];
};

struct rig {
	struct rig_opts	o;
	struct work_pool *pool;
	struct node	*host, *nvme, *far;
	struct fake_blk	*blk;		/* NULL when @o.nvme_path */
	struct kvmm_hdr	*hdr;
	struct mm	*mm;
	struct shm	ledger;
	struct mm_client *c;
	struct mm_space	*sp;
	struct mm_win	*w[2];		/* on DRAM, by class */
	struct mm_win	*w_far;		/* of the first class */
	uint32_t	mag_head[3];
	uint64_t	next_tag;
	char		said[512];	/* mm's last sentence */
	unsigned int	nr_answers;
	struct rig_answer *answer;	/* [RIG_ANSWERS] */
};

#define RIG_ANSWERS	4096

/* Ends the test on failure. */
void rig_start(struct rig *r, const struct rig_opts *o);
void rig_stop(struct rig *r);
/* The daemon dies: what was not flushed is lost, all of it if @rng is NULL. */
void rig_die(struct rig *r, struct rng *rng);
/* A client comes, as rig_start() has one come. */
void rig_attach(struct rig *r);
/* Rounds until the fake node has found everything again. */
void rig_recover(struct rig *r);
/* The client's process is gone; the space lives on by its pages. */
void rig_client_exit(struct rig *r);

/* One round of the loop. */
void rig_poll(struct rig *r);
/* Rounds until nothing is in flight and nothing wants to run, or @ms. */
void rig_settle(struct rig *r, unsigned int ms);
/* Rounds for @ms. */
void rig_run(struct rig *r, unsigned int ms);
/* mm_check() and those of the nodes must pass. */
void rig_check(struct rig *r);

void rig_key(uint32_t chain, uint32_t i, uint8_t key[32]);
struct page *rig_page(struct rig *r, unsigned int group, uint32_t chain,
		      uint32_t i);
enum copy_state rig_state(struct rig *r, unsigned int group, uint32_t chain,
			  uint32_t i, unsigned int node);
/* The class of a group's pages, as in rig.w. */
static inline unsigned int rig_class(unsigned int group)
{
	return group == RIG_BIG;
}

struct mm_pool *rig_pool(struct rig *r, unsigned int group,
			 unsigned int node);
const struct mm_counters *rig_count(struct rig *r, unsigned int node);

/* A frame from the magazine, 0: none within @ms. */
uint32_t rig_frame(struct rig *r, unsigned int group, unsigned int ms);
/* Publish page @i of a chain; result of the publish, or -EAGAIN: no frame. */
int rig_publish(struct rig *r, unsigned int group, uint32_t chain, uint32_t i);
/* The same on the second node of memory. */
int rig_publish_far(struct rig *r, uint32_t chain, uint32_t i);
/* Pages [0, n); how many went well. */
uint32_t rig_publish_chain(struct rig *r, unsigned int group, uint32_t chain,
			   uint32_t n);
void rig_pin(struct rig *r, unsigned int group, uint32_t frame, int by);
/* The end of a request whose tail is page @n - 1. */
void rig_touch(struct rig *r, unsigned int group, uint32_t chain, uint32_t n);
/* Fetch pages [first, first + n); returns the tag. @ms 0: the default. */
uint64_t rig_fetch(struct rig *r, unsigned int group, uint32_t chain,
		   uint32_t first, uint32_t n, unsigned int ms);
/* The answer with that tag, within @ms; its frames stay referenced. */
bool rig_answer(struct rig *r, uint64_t tag, unsigned int ms,
		struct rig_answer *a);
void rig_answer_put(struct rig *r, const struct rig_answer *a);
/* Somebody writes to a page that is sealed. */
void rig_breach(struct rig *r, unsigned int group, uint32_t chain, uint32_t i,
		unsigned int node);
/* Are these the bytes of that page? */
bool rig_bytes_ok(struct rig *r, unsigned int group, uint32_t frame,
		  uint32_t chain, uint32_t i);
/* The same on another node. */
bool rig_bytes_at(struct rig *r, unsigned int node, unsigned int group,
		  uint32_t frame, uint32_t chain, uint32_t i);
/* Fetch [first, first + n), check the bytes, let go: pages that came. */
uint32_t rig_fetch_check(struct rig *r, unsigned int group, uint32_t chain,
			 uint32_t first, uint32_t n);
/* Demote and drop from memory all that can be. */
void rig_push_down(struct rig *r, unsigned int group);

#endif
