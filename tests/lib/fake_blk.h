/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_blk.h - a block node in memory that does as a test says
 *
 * The two-stage life of an I/O, checksums and slots are real; time, order and
 * failure are the test's. An I/O is done by node_poll(), in the order in which it
 * came or in a random one.
 *
 * On a disk of the test's (struct fake_disk) it is persistent: what its owner says
 * about slots is a log that a later node over the same disk reads again, as
 * node.h says. fake_disk_crash() takes from it what a loss of power may take.
 */
#ifndef KVMM_TESTS_LIB_FAKE_BLK_H
#define KVMM_TESTS_LIB_FAKE_BLK_H

#include "daemon/node/node.h"
#include "ipc/base/rand.h"

#define FAKE_BLK_QUEUE	4096u

enum fake_say { FAKE_ADD, FAKE_DEL, FAKE_LABEL, FAKE_LABEL_DEL };

/* One thing that was said, in order. A label's bytes are malloc()ed. */
struct fake_said {
	enum fake_say	what;
	uint32_t	id;
	size_t		len;
	uint8_t		*bytes;
	struct node_record rec;
};

/**
 * struct fake_disk - what outlives a node
 * @data:	@bytes of slots
 * @said:	@nr of them, of which @flushed are on the medium
 * @wrote:	offsets of slots that were written since; @nr_wrote
 */
struct fake_disk {
	uint64_t	bytes;
	uint8_t		*data;
	struct fake_said *said;
	unsigned int	nr, max, flushed;
	uint64_t	next_seq;
	uint32_t	next_label;
	uint64_t	*wrote;
	unsigned int	nr_wrote, max_wrote;
};

void fake_disk_init(struct fake_disk *d, uint64_t bytes);
void fake_disk_fini(struct fake_disk *d);

/**
 * fake_disk_crash() - the power goes: a tail of what was not flushed is lost, and
 * so is what was written to some slots since
 * @rng:	NULL: all of it
 */
void fake_disk_crash(struct fake_disk *d, struct rng *rng);

/** fake_disk_records() - slots that have a record now */
unsigned int fake_disk_records(const struct fake_disk *d);

/** fake_disk_labels() - labels that are kept now */
unsigned int fake_disk_labels(const struct fake_disk *d);

struct fake_flush {
	void	(*fn)(int err, void *arg);
	void	*arg;
};

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
 * @disk:	non-NULL: persistent
 * @hold_flush:	nothing gets onto the medium by itself
 * @hold_recovery: it stays NODE_STARTING
 * @recover_err: what recovery ends with
 * @journal_full: node_slot_alloc() says -EAGAIN
 * @label_err:	node_label_put() says this
 * @store_fd:	what node_store_fd() says, the test's; 0: there is none
 * @nr:		I/Os that it has
 * @nr_victims:	how often it was asked for a segment to empty
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
	unsigned int	nr_victims;
	uint64_t	seen[2];
	uint8_t		*data;
	uint64_t	*seq;		/* of the slot that begins here; 0: free */
	uint32_t	*len;
	uint64_t	next_seq;
	uint32_t	hand;
	struct fake_disk *disk;
	bool		hold_flush;
	bool		hold_recovery;
	bool		journal_full;
	int		recover_err;
	int		label_err;
	int		store_fd;
	bool		*recorded;	/* by slot, as seq */
	struct fake_found *found;	/* recovery under way */
	struct fake_flush flush[16];
	unsigned int	nr_flush;
	unsigned int	nr_again;	/* records of the last checkpoint */
	struct fake_said *again;
	struct node_io	*io[FAKE_BLK_QUEUE];
};

/** fake_blk_create() - @bytes of slots, online at once; NULL: no memory */
struct fake_blk *fake_blk_create(uint64_t bytes, uint32_t max_len);

/**
 * fake_blk_open() - a node over a disk that may have been used before
 *
 * NODE_STARTING until its owner has been told of all that is on it.
 */
struct fake_blk *fake_blk_open(struct fake_disk *d, uint32_t max_len);

/**
 * fake_blk_die() - fake_disk_crash() under a node that goes on without its disk
 *
 * What it does from now on is for nobody but itself.
 */
void fake_blk_die(struct fake_blk *b, struct rng *rng);

/** fake_blk_flush() - all that was said is on the medium */
void fake_blk_flush(struct fake_blk *b);

/**
 * fake_blk_checkpoint() - write the log anew from what the owner collects
 * @between:	called between two parts of it; may be NULL
 */
void fake_blk_checkpoint(struct fake_blk *b, void (*between)(void *arg),
			 void *arg);

/** fake_blk_flip() - change a bit of every slot's data; returns how many */
unsigned int fake_blk_flip(struct fake_blk *b);

/** fake_blk_slots() - slots that are in use */
unsigned int fake_blk_slots(const struct fake_blk *b);

#endif
