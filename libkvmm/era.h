/* SPDX-License-Identifier: Apache-2.0 */
/* One daemon behind a connection: era.c, ring.c, step.c, member.c, agree.c. */
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
 * struct kvmm_member - another process of the engine (member.c)
 * @next:	in era.members
 * @prev:	whom it came back as: looked at until it is ready itself
 * @talk:	by the era's own offsets: what it writes is not believed
 * @client:	the daemon's number for it
 */
struct kvmm_member {
	struct kvmm_dead dead;
	struct kvmm_member *next;
	_Atomic(struct kvmm_member *) prev;
	struct shm	shm;
	const struct ledger *ledger;
	struct ledger_talk *talk;
	uint32_t	client, rank, flags;
};

/**
 * struct kvmm_era - one daemon, as seen through one connection
 * @refs:	kvmm.era or the era after it, every att
 * @older:	the era before, as long as another member may look or write there
 *		and not here (member.c)
 * @lost:	the connection ended; nothing is posted or matched until the next
 *		daemon has taken it over (resume.c), if it does; set under @sq_lock
 * @over:	for good: another era is in force, or the connection is closed
 * @secret:	of the ledger, for who comes again
 * @doorbell:	eventfd that wakes the daemon
 * @notify:	eventfd that the daemon wakes us with
 * @client:	the daemon's number for us, as it was when we came
 * @agree, @talk, @frozen: parts of the ledger, by offsets that were checked
 * @members:	the other members, whoever came back in place of what he was
 * @settling:	some of them are read, or may read, in former ledgers
 * @peer:	those of them with a step word, by rank
 * @leader:	the leader, unless it is us
 * @frozen_pos:	where the next record of the log goes, under kvmm.talk_lock
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
	_Atomic bool	over;
	uint64_t	epoch;
	uint64_t	secret[2];
	struct shm	hdr_shm, ledger_shm;
	const struct kvmm_hdr *hdr;
	struct ledger	*ledger;
	int		doorbell, notify;
	_Atomic(struct kvmm_era *) older;

	struct kvmm_info info;		/* of the welcome */

	_Atomic bool	joined;
	uint32_t	flags, rank, world;
	uint32_t	client;
	uint64_t	agree_off, talk_off, frozen_off;
	struct ledger_agree *agree;
	struct ledger_talk *talk;
	struct ledger_frozen *frozen;
	struct kvmm_member *members;
	bool		settling;
	_Atomic(struct kvmm_member *) peer[KVMM_MAX_WORLD];
	_Atomic(struct kvmm_member *) leader;
	uint64_t	frozen_pos;

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
/* Map all of a received memfd; the descriptor is not needed afterwards. */
int kvmm_map_all(struct shm *s, int fd, size_t min_bytes, int writable);

/* -- member.c, agree.c: the other members of the engine ------------------------------ */

/* A member came or went (WIRE_MEMBER). Takes the message's descriptor. */
int kvmm_era_member(struct kvmm_era *e, struct sock_msg *m);
void kvmm_members_free(struct kvmm_era *e);
/* Nobody needs the eras before @e. */
void kvmm_era_forget(struct kvmm_era *e);
/* Decisions and counters, so that the next ledger begins with them. */
void kvmm_agree_carry(struct kvmm_era *from, struct kvmm_era *to);

static inline bool kvmm_talk_ready(const struct ledger_talk *t)
{
	/* acquire: pairs with kvmm_era_succeed(): what it took along is there */
	return atomic_load_explicit((_Atomic uint32_t *)&t->ready,
				    memory_order_acquire);
}

/* Whose ledger is to be read: the first that is ready, else NULL. */
static inline const struct kvmm_member *
kvmm_member_ready(const _Atomic(struct kvmm_member *) *link)
{
	/* seq_cst, both: see the top of lib.h */
	struct kvmm_member *m =
		atomic_load((_Atomic(struct kvmm_member *) *)link);

	while (m && !kvmm_talk_ready(m->talk))
		m = atomic_load(&m->prev);
	return m;
}

/* Does somebody read what the leader says here, who cannot ask it? */
static inline bool kvmm_era_leads(const struct kvmm_era *e)
{
	/* acquire: pairs with set_joined() in conn.c */
	return atomic_load_explicit((_Atomic bool *)&e->joined,
				    memory_order_acquire) &&
	       (e->flags & KVMM_LEADER) &&
	       (e->world > 1 || (e->flags & KVMM_NO_STEP));
}

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

/* Nobody counts its pins any more. */
static inline bool kvmm_era_over(const struct kvmm_era *e)
{
	/* acquire: pairs with kvmm_step_drop() */
	return atomic_load_explicit((_Atomic bool *)&e->over,
				    memory_order_acquire);
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
 * no memory. After the era is over nothing runs any more: kvmm_step_drop().
 */
void kvmm_step_defer(struct kvmm_era *e, struct kvmm_deferred *d,
		     uint64_t step);
void kvmm_step_run(struct kvmm_era *e);
/* The era is over from now on, and with it goes whom the pins were for. */
void kvmm_step_drop(struct kvmm_era *e);

/* Nothing is posted any more, not by a thread that was about to, either. */
void kvmm_sq_stop(struct kvmm_era *e);
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
