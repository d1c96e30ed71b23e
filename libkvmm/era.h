/* SPDX-License-Identifier: Apache-2.0 */
/* One daemon behind a connection: era.c, ring.c, step.c. */
#ifndef KVMM_LIBKVMM_ERA_H
#define KVMM_LIBKVMM_ERA_H

#include "ipc/ledger.h"
#include "ipc/ring.h"
#include "ipc/shm.h"
#include "libkvmm/base.h"

struct kvmm_job;

/* One place of the table of operations in flight. */
struct kvmm_op_slot {
	struct kvmm_job	*op;
	uint64_t	wire;		/* tag on the ring: slot | sequence << 16 */
	uint32_t	part;
	uint32_t	next_free;
};

/**
 * struct kvmm_era - one daemon, as seen through one connection
 * @refs:	kvmm.era, every att
 * @lost:	the connection ended; nothing is posted or matched any more
 * @doorbell:	eventfd that wakes the daemon
 * @notify:	eventfd that the daemon wakes us with
 * @peer:	the other members' ledgers by rank, as far as they have a step
 *		word; @leader, which may have none, is not among them
 * @sq_tail, @arena_tail: the producer's own cursors, under @sq_lock
 * @cq_head:	the consumer's, under kvmm.lock
 * @slot:	operations in flight, under kvmm.ops_lock
 * @ops:	kvmm_op.link of them
 * @next_late_ns: no operation's deadline is before it
 * @deferred:	kvmm_deferred.link by step, under kvmm.ops_lock
 */
struct kvmm_era {
	struct kvmm_dead dead;
	struct kvmm	*k;
	_Atomic uint32_t refs;
	_Atomic bool	lost;
	uint64_t	epoch;
	struct shm	hdr_shm, ledger_shm;
	const struct kvmm_hdr *hdr;
	struct ledger	*ledger;
	int		doorbell, notify;

	struct kvmm_info info;		/* of the welcome */

	_Atomic bool	joined;
	uint32_t	flags, rank, world;
	_Atomic(const struct ledger *) peer[KVMM_MAX_WORLD];
	struct shm	peer_shm[KVMM_MAX_WORLD];

	struct kvmm_mutex sq_lock;
	struct ring_sqe	*sq;
	uint8_t		*arena;
	uint32_t	sq_tail;
	uint64_t	arena_tail;

	const uint8_t	*cq;
	uint32_t	cq_head;

	struct kvmm_op_slot *slot;
	uint32_t	slot_free;
	uint32_t	op_seq;
	struct list	ops;
	_Atomic uint32_t nr_ops;
	_Atomic uint64_t next_late_ns;

	struct list	deferred;
	_Atomic uint32_t nr_deferred;

	uint32_t	*req_free;	/* stack of request slots */
	uint32_t	nr_req_free;
	bool		word_out;	/* a stream may write our step word */
	struct kvmm_era	*next_out;
};

/**
 * struct kvmm_deferred - something that waits for a step of the engine
 * @fn:		called under no lock; may free @d
 */
struct kvmm_deferred {
	struct list	link;
	uint64_t	step;
	void		(*fn)(struct kvmm_deferred *d);
};

struct sock_msg;
int kvmm_era_create(struct kvmm *k, struct sock_msg *m, struct kvmm_era **ret);
void kvmm_era_put(struct kvmm_era *e);
/* A member came or went (WIRE_MEMBER). Takes the message's descriptor. */
int kvmm_era_member(struct kvmm_era *e, struct sock_msg *m);

static inline struct ledger_req *kvmm_era_req(struct kvmm_era *e, uint32_t slot)
{
	return (struct ledger_req *)((char *)e->ledger + e->ledger->req_off) +
	       slot;
}

static inline bool kvmm_era_lost(const struct kvmm_era *e)
{
	/* relaxed: a call that is late by a moment was merely early */
	return atomic_load_explicit(&e->lost, memory_order_relaxed);
}

/* A member of the engine is gone: nothing new is begun. */
static inline bool kvmm_era_dying(const struct kvmm_era *e)
{
	return atomic_load_explicit(&e->ledger->engine_state,
				    memory_order_relaxed) == ENGINE_DYING;
}

uint64_t kvmm_era_step(const struct kvmm_era *e);

/*
 * Run @d->fn when the engine has completed @step; at once when it has. Needs
 * no memory. After the era is lost nothing runs any more: kvmm_step_drop().
 */
void kvmm_step_defer(struct kvmm_era *e, struct kvmm_deferred *d,
		     uint64_t step);
void kvmm_step_run(struct kvmm_era *e);
/* The daemon is gone, and with it whom the pins were for. */
void kvmm_step_drop(struct kvmm_era *e);

/*
 * kvmm_sq_push() - post one entry, with @bytes of @array in the arena
 *
 * Rings the doorbell if the daemon sleeps. 0, -EAGAIN (no room), -ENOTCONN.
 */
int kvmm_sq_push(struct kvmm_era *e, struct ring_sqe *sqe, const void *array,
		 uint32_t bytes);
/* The same, with an array of @bytes that @fill writes, under the ring's lock. */
int kvmm_sq_push_fill(struct kvmm_era *e, struct ring_sqe *sqe, uint32_t bytes,
		      void (*fill)(void *to, void *arg), void *arg);
/* The first in two: the bell costs a system call when the daemon sleeps. */
int kvmm_sq_post(struct kvmm_era *e, struct ring_sqe *sqe, const void *array,
		 uint32_t bytes);
void kvmm_sq_bell(struct kvmm_era *e);

#endif
