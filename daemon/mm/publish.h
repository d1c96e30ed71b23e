/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between publish.c, which seals pages, and publish_wait.c, where they wait.
 */
#ifndef KVMM_DAEMON_MM_PUBLISH_H
#define KVMM_DAEMON_MM_PUBLISH_H

#include "daemon/mm/mm_calls.h"

/* What a page waits for: publish.c. */
enum pub_wait {
	PUB_DONE,		/* the result is there */
	PUB_DUP,
	PUB_LOAD,
	PUB_PARENT,
	PUB_STEP,
	PUB_SUM,
};

struct pub_op {
	struct mm_op	op;
	struct mm_space	*space;
	struct mm_pool	*pool;
	struct mm_engine *engine;
	uint32_t	n;
	uint32_t	nr_waiting;
	bool		held;		/* not complete before it is let go */
	struct pub_entry *entry;	/* [n], when the first must wait */
	struct ring_result res[];
};

/**
 * struct pub_entry - a page that is not sealed yet
 * @pub:	key and parent first, so that they are aligned as words
 * @link:	on the list of the entry that it waits for, on mm->pub_ready or
 *		on mm->pub_loading
 * @waiters:	what waits for this one's end
 * @blocker:	the entry that it waits for
 * @pending:	it is the one in the table of pending keys
 * @summed:	the checksum is there
 * @err:	it is to end with this as soon as the worker lets go of it
 */
struct pub_entry {
	struct ring_pub	pub;
	struct pub_op	*op;
	struct pub_entry *hnext;
	struct pub_entry *blocker;
	struct list	link;
	struct list	waiters;
	struct step_wait sw;
	struct work	work;
	struct image	data;
	uint32_t	crc;
	int32_t		err;
	enum pub_wait	wait;
	bool		pending;
	bool		summed;
};

static inline void pub_words(const uint8_t key[32], uint64_t w[4])
{
	memcpy(w, key, 32);
}

/* -- publish.c --------------------------------------------------------------- */

/*
 * Seal page @i, or say what it must wait for. @en: its entry, if it has waited
 * before; @blocker: the entry to wait for.
 */
enum pub_wait pub_try(struct pub_op *op, uint32_t i,
		      const struct ring_pub *pub, struct pub_entry *en,
		      struct pub_entry **blocker);
/* What page @i gets; a @frame that is not 0 carries a reference. */
void pub_result_set(struct pub_op *op, uint32_t i, int err, uint32_t frame);

/* -- publish_wait.c ---------------------------------------------------------- */

/* The first entry of this key; NULL: none is pending. */
struct pub_entry *pub_pending_find(const struct mm_space *sp, uint16_t group,
				   const uint64_t key[4]);
/* Page @i cannot be sealed at once. False: no memory. */
bool pub_entry_create(struct pub_op *op, uint32_t i, const struct ring_pub *pub,
		      enum pub_wait wait, struct pub_entry *blocker);
/* Answers @op if none of its pages waits, else when none does. */
void pub_op_let_go(struct pub_op *op);
/* Look at the entries that are ready again. */
void pub_run(struct mm *mm);
/* mm_op.cancel of a publish. */
void pub_cancel(struct mm_op *mo);

#endif
