/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory manager: spaces, pages, frames, engines, reclaim.
 *
 * mm knows pages and never sockets: the server decodes what clients send,
 * copies it out of shared memory, and calls in here with plain structs; answers
 * go back through struct mm_ops. Everything runs on the loop's thread.
 *
 * Objects and who holds them:
 *   mm		the whole; owns nodes' policies, spaces, engines
 *   mm_client	one member process; exists from hello until its pidfd says it
 *		has exited, also while its socket is closed
 *   mm_engine	member processes joined by a token (or one alone); owns OPEN
 *		frames; its references end when all members have exited
 *   mm_space	a KV identity; lives while it has a client or a page
 *   mm_pool	frames or slots of one (space, class, node)
 *   mm_win	one client's view of a memory pool: its pins and its magazine
 *
 * What mm shows of itself is in mm_stat.h, which comes with this.
 */
#ifndef KVMM_DAEMON_MM_MM_H
#define KVMM_DAEMON_MM_MM_H

#include <stdbool.h>
#include <stdint.h>

#include <kvmm/kvmm.h>

#include "daemon/mm/mm_stat.h"
#include "daemon/node/node.h"
#include "ipc/abi.h"
#include "ipc/base/err.h"
#include "ipc/desc.h"
#include "ipc/frame.h"
#include "ipc/ledger.h"
#include "ipc/ring.h"
#include "ipc/shm.h"
#include "policies/kvmm_policy.h"

struct mm;
struct mm_client_opts;
struct mm_client;
struct mm_engine;
struct mm_space;
struct mm_win;

/* -- answers --------------------------------------------------------------- */

/**
 * struct mm_ops - how mm answers; implemented by the server
 * @complete:	an operation of @c is done. @res[i].frame != 0 carries a
 *		hand-over reference on that frame of window @win: the server
 *		calls mm_handover_put() when the client's completion head has
 *		passed the slot, or when the client is gone. Must not fail: the
 *		server queues what does not fit into the ring
 * @index_grew:	@sp has a new index memfd: tell its clients
 * @member:	members of @c's engine changed; tell it (ledgers to pass)
 * @kick_client: @c should be woken: frames came, or its engine is dying
 * @evict_client: @c broke a limit: disconnect it, @why is counted and logged
 * @found:	a space of @tenant was found on a block node: the mode that it
 *		starts in (enum kvmm_mode), or -errno: nobody may have it. NULL:
 *		%KVMM_MODE_ON for all
 * @said:	a sentence for the log; @bad: something was lost. NULL: nobody
 *		wants to know
 *
 * The last two get mm_opts.ops_arg.
 */
struct mm_ops {
	void (*complete)(struct mm_client *c, struct mm_win *win,
			 const struct ring_cqe *cqe,
			 const struct ring_result *res);
	void (*index_grew)(struct mm_space *sp);
	void (*member)(struct mm_client *c, struct mm_client *peer, bool gone);
	void (*kick_client)(struct mm_client *c);
	void (*evict_client)(struct mm_client *c, const char *why);
	int (*found)(void *arg, const char *tenant);
	void (*said)(void *arg, bool bad, const char *sentence);
};

/* -- outliving the daemon ---------------------------------------------------- */

#define MM_KEPT_BYTES	128u	/* of the server's, with each client */

/**
 * struct mm_kept_client - a client that the last daemon had
 * @no:		what the server called it: mm_client_opts.no
 * @bytes:	what the server had kept: mm_client_opts.kept
 */
struct mm_kept_client {
	uint32_t	no;
	uint32_t	socket;
	int32_t		pid;
	const char	*name;
	const uint8_t	*bytes;
};

/**
 * struct mm_keep_ops - who keeps memory when this daemon dies
 * @put:	@fd is to be kept under @name; not taken over. An error is counted
 *		there: it means that this piece will not be found
 * @drop:	not any more
 * @take:	at the beginning: the descriptor that was kept, the caller's, which
 *		stays kept; -ENOENT
 * @client:	adoption: who it was. Fills in what @o needs (ledger, tenant, arg)
 *		as for mm_client_create(); or -errno: it cannot be adopted
 * @adopted:	the client is there; @whole: with all that it had, so that it may
 *		go on (mm_client_back())
 * @gave_up:	a piece is given up; the sentence says which and why. Called before
 *		it is forgotten
 *
 * All get mm_opts.ops_arg.
 */
struct mm_keep_ops {
	int	(*put)(void *arg, int fd, const char *name);
	void	(*drop)(void *arg, const char *name);
	int	(*take)(void *arg, const char *name);
	int	(*client)(void *arg, const struct mm_kept_client *kc,
			  struct mm_client_opts *o);
	void	(*adopted)(void *arg, struct mm_client *c, bool whole);
	void	(*gave_up)(void *arg, const char *sentence);
};

/* -- life cycle ------------------------------------------------------------ */

/**
 * struct mm_node_opts - a node and how mm is to use it
 * @node:	made by the server; outlives mm
 * @kind:	enum kvmm_node_kind, what clients are told
 * @size_max:	bytes that tables are sized for, >= capacity
 * @below:	index of the block node to demote to, %KVMM_NODE_NONE
 * @extent_bytes: 0 = clamp(capacity / 1024, 32 MiB, 1 GiB), less on small nodes
 * @gang:	of memory: its frames are cut into so many parts, one a rank of
 *		an engine of that world; sizes are of all parts together. 0: no
 * @second_touch: block: does not take pages that were used once
 * @day_permille: block: what may be written to it a day, thousandths of its
 *		capacity; 0: no limit
 * @scrub_bytes_s: block: at what rate it is read to see what the medium has lost;
 *		0: never
 */
struct mm_node_opts {
	struct node	*node;
	uint8_t		kind;
	uint8_t		below;
	uint8_t		gang;
	bool		second_touch;
	uint32_t	day_permille;
	uint64_t	size_max;
	uint64_t	extent_bytes;
	uint64_t	scrub_bytes_s;
};

/**
 * struct mm_opts - configuration
 * @hdr:	the shared header, mapped read-write; outlives mm
 * @pool:	workers for checksums and copies
 * @policy:	victims' order, for every pool
 * @epoch:	of this daemon; top 16 bits of every new generation
 * @keep:	who keeps memory for the next daemon; NULL: nobody, and it will
 *		start empty
 * @pin_limit_pct: share of a node's frames one engine may pin
 * @direct_reclaim_ns, @fetch_ns, @shrink_ack_ns: deadlines, see design
 */
struct mm_opts {
	struct kvmm_hdr		*hdr;
	struct work_pool	*pool;
	const struct kvmm_policy_v0 *policy;
	const struct mm_ops	*ops;
	void			*ops_arg;
	const struct mm_keep_ops *keep;
	uint64_t		epoch;
	uint64_t		direct_reclaim_ns;
	uint64_t		fetch_ns;
	uint64_t		shrink_ack_ns;
	uint32_t		pin_limit_pct;
	uint32_t		nr_nodes;
	struct mm_node_opts	node[KVMM_MAX_NODES];
};

/**
 * mm_policy_load() - find a policy by name or file
 * @spec:	"lru", the built-in; or the absolute path of a plug-in
 * @ret:	written on success only; valid until the process ends
 *
 * A plug-in is code that runs as the daemon: its file and every folder above it
 * must belong to root and be writable by nobody else (folders: or be sticky).
 *
 * Context: reads a file; for start-up and configuration changes.
 * Return: 0, -ENOENT, -EPERM (owner or mode), -ENOEXEC (not a plug-in),
 * -EPROTO (another ABI), -EINVAL; always with a sentence.
 */
int mm_policy_load(const char *spec, const struct kvmm_policy_v0 **ret,
		   struct errmsg *e);

int mm_create(const struct mm_opts *o, struct mm **ret, struct errmsg *e);

/**
 * struct mm_adopted - what was found
 * @frames:	READY, and pages again
 * @waiting:	READY, and their parents may come from a block node
 * @open:	with the engines that have them
 * @lost:	READY once, and given up
 * @held:	frames that the last daemon's I/O may still write to
 * @gave_up:	pieces, see mm_keep_ops.gave_up
 */
struct mm_adopted {
	uint32_t	clients, spaces, pools, windows, extents;
	uint64_t	frames, waiting, open, lost, held;
	uint32_t	gave_up;
};

/**
 * mm_adopt() - take over what the last daemon left; before anything else
 * @share_pct:	of each node's extents, how many may keep what nobody uses: 100
 *		all; less after the system ran out of memory
 *
 * Only with mm_opts.keep and the header of the last daemon. Spaces, pools,
 * extents, frames, engines, clients and their windows are as they were; what is
 * in the middle of something is not: operations in flight are dropped, frames
 * that they had are free, or will be when the last daemon's I/O is over. Clients
 * are not connected: mm_client_back(), or their end.
 *
 * Return: 0; -ENOMEM with a sentence: mm is of no use.
 */
int mm_adopt(struct mm *mm, unsigned int share_pct, struct mm_adopted *ad,
	     struct errmsg *e);

/** mm_last_adopted() - what mm_adopt() found; @waiting, @held as they are now */
const struct mm_adopted *mm_last_adopted(const struct mm *mm);

/**
 * mm_drain() - no new I/O; wait for what is in flight, and for workers
 *
 * For who ends and leaves memory to the next daemon: only mm_destroy(), or
 * nothing, may follow.
 * Return: 0 or -ETIMEDOUT.
 */
int mm_drain(struct mm *mm, uint64_t deadline_ns);

/**
 * mm_destroy() - end everything; I/O is waited for until @deadline_ns
 * Return: 0; -ETIMEDOUT: I/O is stuck, nothing that it may touch was freed;
 * -EBUSY: all I/O is over, and workers still give memory back. After either,
 * call it again or exit.
 */
int mm_destroy(struct mm *mm, uint64_t deadline_ns);

/**
 * mm_run() - background work that is due: reclaim, writeback, steps, deadlines
 * @now_ns:	CLOCK_MONOTONIC
 *
 * Cheap when there is nothing to do; does a bounded amount a call.
 * Return: when to call again, absolute ns; 0: at once; UINT64_MAX: when
 * something happens.
 */
uint64_t mm_run(struct mm *mm, uint64_t now_ns);

/**
 * mm_host_short() - the host lacks @bytes of memory; 0: not any more
 *
 * While it does, pools on host nodes grow no further than one extent, and extents
 * that hold nothing that cannot be taken are emptied and given back, the one
 * touched longest ago first. To be said anew when it was measured anew.
 */
void mm_host_short(struct mm *mm, uint64_t bytes);

/* -- clients and engines --------------------------------------------------- */

/**
 * struct mm_client_opts - a process that said hello
 * @tenant:	name of the socket's tenant
 * @socket:	number of the socket; a token is bound to it
 * @rights:	KVMM_RO or KVMM_RW
 * @mode:	mode that a space starts in when this client creates it
 * @ledger:	base ledger, mapped read-write; mm reads the step word, writes
 *		step_wanted and engine_state. Stays mapped until
 *		mm_client_exit() returned and the engine is gone
 * @no:		the server's number for it
 * @kept:	MM_KEPT_BYTES of the server's that a next daemon gets back; copied
 * @arg:	the server's
 */
struct mm_client_opts {
	const char	*tenant;
	const char	*name;
	uint32_t	socket;
	uint32_t	rights;
	uint32_t	mode;
	int32_t		pid;
	uint32_t	no;
	struct shm	*ledger;
	const void	*kept;
	void		*arg;
};

int mm_client_create(struct mm *mm, const struct mm_client_opts *o,
		     struct mm_client **ret);
void *mm_client_arg(const struct mm_client *c);
struct mm_engine *mm_client_engine(const struct mm_client *c);

/** mm_client_join() - before any attach; see kvmm_join() for the errors */
int mm_client_join(struct mm_client *c, const uint8_t token[16],
		   uint32_t rank, uint32_t world, uint32_t flags,
		   struct errmsg *e);

/** mm_client_members() - call @fn for each other member of its engine */
void mm_client_members(struct mm_client *c,
		       void (*fn)(struct mm_client *peer, void *arg),
		       void *arg);

/**
 * mm_client_back() - one that was adopted has said hello again
 *
 * It has the windows and spaces that it had (mm_client_windows() ...), and may ask
 * again from now on.
 * Return: 0; -EOWNERDEAD: it may not: its engine broke a limit.
 */
int mm_client_back(struct mm_client *c);
/** mm_client_windows() - call @fn for each window that is open */
void mm_client_windows(struct mm_client *c,
		       void (*fn)(struct mm_win *w, void *arg), void *arg);
/** mm_client_spaces() - the spaces that it is attached to; how many */
unsigned int mm_client_spaces(const struct mm_client *c, struct mm_space **sp,
			      unsigned int max);
/** mm_client_joined() - is its engine one of a token? */
bool mm_client_joined(const struct mm_client *c);

/**
 * mm_client_disconnect() - the socket is closed; the process may live
 *
 * Its operations in flight are dropped without an answer; its pins and OPEN
 * frames stay until mm_client_exit().
 */
void mm_client_disconnect(struct mm_client *c);

/**
 * mm_client_exit() - the process has exited (its pidfd says so)
 *
 * When it was the last member: the engine's references end, OPEN frames are
 * zeroed and freed. Otherwise the engine is dying. @c is gone on return, or as
 * soon as its engine is: @done is called then and @ledger may be unmapped.
 */
void mm_client_exit(struct mm_client *c, void (*done)(void *arg), void *arg);

/* The other members' numbers, for WIRE_MEMBER. */
uint32_t mm_client_rank(const struct mm_client *c);
uint32_t mm_client_flags(const struct mm_client *c);	/* KVMM_LEADER ... */
uint32_t mm_client_world(const struct mm_client *c);

/* -- spaces ---------------------------------------------------------------- */

/**
 * mm_attach() - create or join the space that @desc describes
 * @desc:	canonical bytes, as received
 * @flags:	KVMM_MUST_JOIN
 * Return: 0, or what kvmm_space_attach() documents, with a sentence.
 */
int mm_attach(struct mm_client *c, const uint8_t *desc, size_t len,
	      uint32_t flags, struct mm_space **ret, struct errmsg *e);
void mm_detach(struct mm_client *c, struct mm_space *sp);

/** mm_space_get() - by its index in the header; NULL */
struct mm_space *mm_space_get(struct mm *mm, uint32_t ix);
uint32_t mm_space_ix(const struct mm_space *sp);
/** mm_space_arg() - the ops_arg of its mm */
void *mm_space_arg(const struct mm_space *sp);
const uint8_t *mm_space_id(const struct mm_space *sp);	/* 32 bytes */
const struct desc *mm_space_desc(const struct mm_space *sp);
const char *mm_space_tenant(const struct mm_space *sp);
bool mm_space_attached(const struct mm_space *sp, const struct mm_client *c);
const struct shm *mm_space_index(const struct mm_space *sp);
uint32_t mm_space_index_epoch(const struct mm_space *sp);
enum kvmm_mode mm_space_mode(const struct mm_space *sp);
void mm_space_set_mode(struct mm_space *sp, enum kvmm_mode mode);

/* -- windows --------------------------------------------------------------- */

/** mm_win_open() - the window ledger is in the list before this returns */
int mm_win_open(struct mm_client *c, struct mm_space *sp, unsigned int cls,
		unsigned int node, uint32_t rights, struct mm_win **ret,
		struct errmsg *e);
void mm_win_close(struct mm_win *w);
const struct shm *mm_win_table(const struct mm_win *w);
const struct shm *mm_win_ledger(const struct mm_win *w);
struct mm_space *mm_win_space(const struct mm_win *w);
uint32_t mm_win_rights(const struct mm_win *w);
unsigned int mm_win_cls(const struct mm_win *w);
unsigned int mm_win_node(const struct mm_win *w);
/** mm_win_no() - the number that ring entries name; unique in its client */
uint16_t mm_win_no(const struct mm_win *w);
/** mm_win_part() - offset, within an extent, of what its client maps of it */
uint64_t mm_win_part(const struct mm_win *w);
/** mm_win_blind() - its client maps nothing: a member of a gang without a step */
bool mm_win_blind(const struct mm_win *w);
struct mm_win *mm_win_get(struct mm_client *c, uint16_t no);

/**
 * struct mm_extent_change - one extent that a window must map or unmap
 * @no:		extent number, >= 1
 * @up:		true: map it
 * @fd:		@up only: mm's own, to be passed on, not kept; read-only for a
 *		read-only window. -1: there is nothing to map, see
 *		mm_win_blind(); the extent counts as mapped all the same
 */
struct mm_extent_change {
	uint32_t	no;
	bool		up;
	int		fd;
};

/**
 * mm_win_sync() - what changed since the client last asked
 * @have_seq:	extent_seq that it has applied: extents that had to go up to it
 *		are now unmapped there
 * @skip:	changes already told in this exchange
 * @ch:		filled with up to @max changes
 * @seq:	what @have_seq will be after all of them
 * Return: number filled in; == @max: there may be more, ask again with the
 * same @have_seq and @skip + @max.
 */
unsigned int mm_win_sync(struct mm_win *w, uint64_t have_seq,
			 unsigned int skip, struct mm_extent_change *ch,
			 unsigned int max, uint64_t *seq);

int mm_reserve(struct mm_client *c, struct mm_space *sp, unsigned int cls,
	       unsigned int node, uint32_t frames, struct errmsg *e);

/* -- operations (arrays are the server's private copies) --------------------- */

/**
 * mm_publish() - seal pages; answers through ops->complete, always
 *
 * @pub is copied. Per page results as kvmm_publish() documents them. Order in
 * the batch counts: a parent may stand before its child.
 */
void mm_publish(struct mm_win *w, const struct ring_sqe *sqe,
		const struct ring_pub *pub);

/** mm_fetch() - bring pages to @w's node; answers through ops->complete */
void mm_fetch(struct mm_win *w, const struct ring_sqe *sqe,
	      const struct ring_key *key);

/**
 * mm_fork() - copy OPEN frames; answers through ops->complete, always
 *
 * After @sqe->after of the engine. @f is copied; it names windows of @c. Per
 * element 0, -EINVAL (not two different OPEN frames of the engine that it may
 * name), -EOWNERDEAD.
 */
void mm_fork(struct mm_client *c, const struct ring_sqe *sqe,
	     const struct ring_fork *f);

/** mm_cancel() - answers once, -ECANCELED or done; unknown tags are ignored */
void mm_cancel(struct mm_client *c, uint64_t tag);

/** mm_refill() - top the magazine up for a want of @n; never waits */
void mm_refill(struct mm_win *w, uint32_t n);
/**
 * mm_stock() - the same as a client asks for it, which may be ahead of need
 *
 * Up to what the last allocation was refused (the ledger's want) it is a want,
 * beyond that no more than a fair part of the pool's frames.
 */
void mm_stock(struct mm_win *w, uint32_t n);

/**
 * mm_free() - OPEN frames come back; reused after step @after
 * Return: 0; -EINVAL: one of them is not @w's, and none was freed; -ENOMEM.
 */
int mm_free(struct mm_win *w, const uint32_t *frame, uint32_t n,
	    uint64_t after);

/**
 * mm_free_told() - the same, and be told when it need not be done again
 * @taken:	called once a next daemon would find that they came back, and before
 *		anybody can have one of them. Until then a next daemon that
 *		has not handed out any frame yet may free them again; afterwards
 *		that would take them from somebody else
 */
int mm_free_told(struct mm_win *w, const uint32_t *frame, uint32_t n,
		 uint64_t after, void (*taken)(void *arg), void *arg);

/* Longer chains lose the touch of their heads; a bound for one ring entry. */
#define MM_TOUCH_MAX	65536u

/** mm_touch() - a request ended; walks the parents from the tail */
void mm_touch(struct mm_win *w, const struct ring_sqe *sqe);

/**
 * mm_asked() - the keys that a request asked for, found or not
 * @sqe:	RING_END with @sqe->nr_keys of @key
 *
 * Counted; in observe mode also how many of them a cache would have had.
 * Return: 0, or -EINVAL: a group is not in the space, nothing was counted.
 */
int mm_asked(struct mm_space *sp, const struct ring_sqe *sqe,
	     const struct ring_key *key);

/**
 * mm_report() - a consumer's verdict: dropped everywhere, counted
 * @verdict:	KVMM_BAD; RING_UNDO: not counted, needs the right to publish
 *
 * Of a blob all of it goes, whichever page is named.
 *
 * Return: how many pages were dropped, which is the time that it took.
 */
uint64_t mm_report(struct mm_client *c, struct mm_space *sp,
		   const struct ring_key *key, uint64_t verdict);

/** mm_handover_put() - the client's completion head passed this frame */
void mm_handover_put(struct mm_win *w, uint32_t frame);

/**
 * mm_step_done() - a member may have completed a step that was waited for
 *
 * Called when its doorbell rang, and by mm_run() every millisecond while
 * something waits.
 */
void mm_step_done(struct mm_client *c);

#endif
