/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_blk.h - a block node in memory that does as a test says
 *
 * The two-stage life of an I/O, checksums and slots are real; time, order and
 * failure are the test's. An I/O is done by node_poll(), in the order in which it
 * came or in a random one.
 */
#ifndef KVMM_TESTS_LIB_FAKE_BLK_H
#define KVMM_TESTS_LIB_FAKE_BLK_H

#include "daemon/node/node.h"
#include "ipc/base/rand.h"

#define FAKE_BLK_QUEUE	4096u

/**
 * struct fake_blk - the node, and what it is to do
 * @n:		for mm
 * @hold:	per direction: I/O is taken and not done
 * @unstarted:	what is held can still be cancelled
 * @err:	per direction: every @nth fails with this; 0: none does
 * @nth:	0 counts as 1
 * @refuse:	per direction: node_submit() says this
 * @unwritable:	node_writable() says no
 * @rng:	non-NULL: done in random order, some of them later
 * @nr:		I/Os that it has
 * @seen:	per direction: I/Os done, well or not
 */
struct fake_blk {
	struct node	n;
	bool		hold[2];
	bool		unstarted;
	int		err[2];
	uint32_t	nth;
	int		refuse[2];
	bool		unwritable;
	struct rng	*rng;
	unsigned int	nr;
	uint64_t	seen[2];
	uint8_t		*data;
	uint64_t	*seq;		/* of the slot that begins here; 0: free */
	uint32_t	*len;
	uint64_t	next_seq;
	uint32_t	hand;
	struct node_io	*io[FAKE_BLK_QUEUE];
};

/** fake_blk_create() - @bytes of slots, online at once; NULL: no memory */
struct fake_blk *fake_blk_create(uint64_t bytes, uint32_t max_len);

/** fake_blk_flip() - change a bit of every slot's data; returns how many */
unsigned int fake_blk_flip(struct fake_blk *b);

/** fake_blk_slots() - slots that are in use */
unsigned int fake_blk_slots(const struct fake_blk *b);

#endif
