/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The producer's side of the submission ring and its arena.
 *
 * Entries are consumed in order, and so the arena is freed in order: one
 * running sum says what is in use. An array never wraps; what is left before
 * the end is skipped, and the entry's arena_len counts it.
 */
#include <string.h>
#include <unistd.h>

#include "libkvmm/lib.h"

#define ARENA_ALIGN	64

void kvmm_sq_stop(struct kvmm_era *e)
{
	kvmm_lock(&e->sq_lock);
	/* release: a poster that sees it finds its operation failed by us */
	atomic_store_explicit(&e->lost, true, memory_order_release);
	kvmm_unlock(&e->sq_lock);
}

static void ring_doorbell(struct kvmm_era *e)
{
	uint64_t one = 1;

	/* EAGAIN means that it has been rung 2^64 times already */
	if (write(e->doorbell, &one, sizeof(one)) == sizeof(one))
		stat_add(e->k, doorbells, 1);
}

/*
 * Find room for @bytes. Under sq_lock. Returns the padding before the array,
 * or -EAGAIN. A head that is ahead of us is a daemon's bug: then there is none.
 */
static int64_t arena_room(struct kvmm_era *e, uint32_t bytes)
{
	uint64_t size = e->ledger->arena_bytes;
	/* acquire: pairs with the daemon's release once it has copied */
	uint64_t used = e->arena_tail -
			atomic_load_explicit(&e->ledger->arena_head,
					     memory_order_acquire);
	uint64_t off = e->arena_tail & (size - 1);
	uint64_t pad = off + bytes > size ? size - off : 0;

	if (used > size || bytes > size || pad + bytes > size - used)
		return -EAGAIN;
	return pad;
}

/*
 * Room for an entry and its array. Returns where the array goes, which is
 * nowhere for @bytes = 0; NULL: there is no room.
 */
static void *sq_begin(struct kvmm_era *e, struct ring_sqe *sqe, uint32_t bytes)
	__must_hold(&e->sq_lock)
{
	uint32_t room = round_up(bytes, ARENA_ALIGN);
	uint64_t pos = e->arena_tail;
	int64_t pad;

	if (!ring_has_room(&e->ledger->sq, e->ledger->sq_entries, e->sq_tail,
			   1))
		return NULL;
	if (bytes) {
		pad = arena_room(e, room);
		if (pad < 0)
			return NULL;
		pos += pad;
		sqe->arena_pos = pos;
		sqe->arena_len = pad + room;
	}
	return e->arena + (pos & (e->ledger->arena_bytes - 1));
}

static void sq_commit(struct kvmm_era *e, const struct ring_sqe *sqe)
	__must_hold(&e->sq_lock)
{
	e->sq[e->sq_tail & (e->ledger->sq_entries - 1)] = *sqe;
	e->sq_tail++;
	e->arena_tail += sqe->arena_len;
	/*
	 * seq_cst: releases entry and array to the daemon, and is the first
	 * half of the pair with kvmm_hdr.sleeping.
	 */
	atomic_store(&e->ledger->sq.tail, e->sq_tail);
}

int kvmm_sq_post(struct kvmm_era *e, struct ring_sqe *sqe, const void *array,
		 uint32_t bytes)
{
	bool lost;
	void *at;

	kvmm_lock(&e->sq_lock);
	lost = kvmm_era_lost(e);
	at = lost ? NULL : sq_begin(e, sqe, bytes);
	if (at) {
		if (bytes)
			memcpy(at, array, bytes);
		sq_commit(e, sqe);
	}
	kvmm_unlock(&e->sq_lock);
	return at ? 0 : lost ? -ENOTCONN : -EAGAIN;
}

int kvmm_sq_push_fill(struct kvmm_era *e, struct ring_sqe *sqe, uint32_t bytes,
		      void (*fill)(void *to, void *arg), void *arg)
{
	bool lost;
	void *at;

	kvmm_lock(&e->sq_lock);
	lost = kvmm_era_lost(e);
	at = lost ? NULL : sq_begin(e, sqe, bytes);
	if (at) {
		fill(at, arg);
		sq_commit(e, sqe);
	}
	kvmm_unlock(&e->sq_lock);
	if (!at)
		return lost ? -ENOTCONN : -EAGAIN;
	kvmm_sq_bell(e);
	return 0;
}

void kvmm_sq_bell(struct kvmm_era *e)
{
	/* seq_cst: the other half; the daemon stores it, then reads all tails */
	if (unlikely(atomic_load(&e->hdr->sleeping)))
		ring_doorbell(e);
}

int kvmm_sq_push(struct kvmm_era *e, struct ring_sqe *sqe, const void *array,
		 uint32_t bytes)
{
	int err = kvmm_sq_post(e, sqe, array, bytes);

	if (!err)
		kvmm_sq_bell(e);
	return err;
}
