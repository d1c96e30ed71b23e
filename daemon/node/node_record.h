/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node_record.h - what a node finds again after a restart (NODE_BLOCK). A part of
 * node.h, which others include.
 *
 * A block node remembers, beside the bytes in its slots, what its owner says
 * about them: a record for each slot, and labels that records may name (an owner
 * keeps there what many records share). Both are written behind the owner's back,
 * in the order of the calls; a crash loses the last of them and never one from
 * the middle. Data and record may reach the medium in any order: a record whose
 * data did not is found out by the checksum at the first read.
 *
 * After a restart a persistent node is NODE_STARTING until it has handed every
 * label and every record to its owner (struct node_owner); slots whose records
 * the owner takes are in use, all others are free.
 */
#ifndef KVMM_DAEMON_NODE_NODE_RECORD_H
#define KVMM_DAEMON_NODE_NODE_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/node/node_io.h"

struct node;

/* What an owner keeps in a record */
#define NODE_META_BYTES		96u

/* Longest label */
#define NODE_LABEL_MAX		65536u

/**
 * struct node_record - a slot that is in use and what is known of it
 * @slot:	as node_slot_alloc() gave it
 * @len:	bytes of data
 * @crc:	node_io.crc of the write
 * @meta:	the owner's; opaque
 */
struct node_record {
	struct node_slot slot;
	uint32_t	len;
	uint32_t	crc;
	uint8_t		meta[NODE_META_BYTES];
};

/**
 * struct node_owner - whom a block node asks and tells
 * @expect:	recovery: about so many records will come, as the last checkpoint
 *		says; while the medium is still being read. May be NULL
 * @begin:	recovery: so many labels and records will come, at most
 * @label:	recovery: a label; before any record that may name it. -ENOENT: the
 *		owner has no use for it, and it is deleted with its records. Any
 *		other error: not now; the owner is asked again every second, and the
 *		medium stays as it is
 * @records:	recovery: @n records in the order of their slots' sequence
 *		numbers, so that who was written first comes first. Sets
 *		@taken[i] for each that it takes; called many times, a slice each.
 *		Returns how many it has decided on: for the next one it had no
 *		memory, say. That and all behind it stay on the medium as they are,
 *		and are handed over again a second later
 * @recovered:	recovery is over (0), or there was nothing (-ENOENT), and the node
 *		turns NODE_ONLINE after it; any other error: the store is refused,
 *		and the node is NODE_FAILED for good. Not called while a store
 *		that could not be opened is being tried again
 * @collect:	checkpoint: hand node_record_again() to every record that was added
 *		and not removed, a part of them each call (one call a round of the
 *		loop: some hundred or thousand); *@cursor is 0 at first and the
 *		owner's from then on. What is added or removed between two calls
 *		may be handed in or not. True: that was all
 * @arg:	the owner's
 *
 * All are called from node_poll(), and may not call node_poll() or
 * node_destroy().
 */
struct node_owner {
	void	(*expect)(struct node *n, uint64_t records, void *arg);
	void	(*begin)(struct node *n, uint64_t labels, uint64_t records,
			 void *arg);
	int	(*label)(struct node *n, uint32_t id, const void *bytes,
			 size_t len, void *arg);
	unsigned int (*records)(struct node *n, const struct node_record *rec,
				unsigned int nr, bool *taken, void *arg);
	void	(*recovered)(struct node *n, int err, void *arg);
	bool	(*collect)(struct node *n, uint64_t *cursor, void *arg);
	void	*arg;
};

/**
 * node_set_owner() - before the first node_poll(); @owner must outlive the node
 *
 * A persistent node that never had one (or a memory node) is started empty. NULL
 * later on: nobody is asked or told any more, and what is on the medium stays as
 * it is, what was not handed out yet, too. The end of an owner's life.
 */
void node_set_owner(struct node *n, const struct node_owner *owner);

/** node_persistent() - does it keep records? Otherwise the calls do nothing. */
bool node_persistent(const struct node *n);

/**
 * node_record_add() - the write of this slot was good: remember it
 *
 * Room was set aside by node_slot_alloc(), which answers -EAGAIN when too much
 * is waiting to be written; so this cannot fail. At most once a slot.
 */
void node_record_add(struct node *n, const struct node_record *rec);

/**
 * node_record_del() - forget a slot now, although it is still in use
 *
 * For data that must not come back (bad, or purged) while a reader still has the
 * slot. node_slot_free() does it otherwise. No effect on a slot without record.
 */
void node_record_del(struct node *n, const struct node_slot *slot);

/** node_record_again() - for node_owner.collect only */
void node_record_again(struct node *n, const struct node_record *rec);

/**
 * node_label_put() - keep a label
 * @id:		on success: its number, for as long as it is kept
 *
 * Return: 0, -ENOSPC (as many as there can be), -ENOMEM, -E2BIG, -EAGAIN,
 * -EOPNOTSUPP (keeps nothing).
 */
int node_label_put(struct node *n, const void *bytes, size_t len,
		   uint32_t *id);

/** node_label_del() - no record names it any more */
void node_label_del(struct node *n, uint32_t id);

/**
 * node_record_flush() - call @fn when all that was said until now is on the medium
 * @fn:		called once, from node_poll(), with 0 or -errno (-EIO: the medium
 *		refused it; -ESHUTDOWN)
 *
 * Return: 0, -ENOMEM, -EOPNOTSUPP.
 */
int node_record_flush(struct node *n, void (*fn)(int err, void *arg),
		      void *arg);

/**
 * node_store_fd() - a second description of a block node's store, without the lock
 *
 * There is one from before the node has handed anything to its owner; the node's,
 * open until node_destroy(). The lock of a store, flock(2), is held by the
 * description that I/O goes through, until the last of it is over: whoever gets a
 * lock by this one, in whatever process, knows that nothing of this node's is under
 * way any more.
 *
 * Return: the descriptor, for reading only; -ENOENT: it has opened none.
 */
int node_store_fd(const struct node *n);

#endif
