/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node.h - places with memory, as the memory manager sees them
 *
 * A node knows bytes, extents and slots; it knows nothing of pages, spaces or
 * clients. There are two kinds. A NODE_MEM node gives out extents: memory that
 * can be mapped, with a file descriptor to share (host DRAM). A NODE_BLOCK node
 * gives out slots of a file or block device and moves bytes between a slot and
 * memory, asynchronously (NVMe). Which page lives where, what is evicted and
 * what is worth writing is the caller's business.
 *
 * Threads. Every call and every callback is on the event loop's thread unless
 * its text says otherwise. No call blocks. No callback runs inside the call that
 * started the operation: those of extents come from node_poll(), those of I/O
 * from node_poll() or from work_poll() of the pool given to nvme_create().
 *
 * The loop. Watch node_fd() and work_fd(); each round call work_poll() and
 * node_poll(), then sleep no longer than node_next_deadline(). I/O handed in
 * is started by the next node_poll(), so that a round's I/O goes to the kernel
 * in one system call; node_kick() starts it earlier.
 */
#ifndef KVMM_DAEMON_NODE_NODE_H
#define KVMM_DAEMON_NODE_NODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/node/work.h"
#include "ipc/base/list.h"

/* I/O addresses and slots are multiples of this; lengths are rounded up to it */
#define NODE_ALIGN		4096u

/* Longest node_io.ident */
#define NODE_IDENT_MAX		256u

/* How many nodes one node can be paired with */
#define NODE_MAX_PAIRED		8u

struct node_ops;		/* a back end's table: node_ops.h */
struct node_owner;		/* see below: what is found again */

enum node_kind {
	NODE_MEM,		/* extents that can be mapped and shared */
	NODE_BLOCK,		/* slots, reached by I/O */
};

enum node_state {
	NODE_STARTING,		/* lock, size and format being checked: no slots yet */
	NODE_ONLINE,
	NODE_DEGRADED,		/* reads are served, writes refused with -EAGAIN */
	NODE_FAILED,		/* everything is refused at once with -EIO */
	NODE_OFFLINE,		/* being destroyed: everything is -ESHUTDOWN */
};

enum node_dir {
	NODE_READ,
	NODE_WRITE,
};

/* In order of service. Write-back always keeps a small share. */
enum node_prio {
	NODE_PRIO_DEMAND,	/* somebody waits */
	NODE_PRIO_PREFETCH,
	NODE_PRIO_WRITEBACK,
	NODE_NR_PRIOS,
};

/**
 * struct node_dir_stats - one direction of a block node; all only ever grow
 * but the last four
 * @ios:	completed well
 * @bytes:	of those, moved, padding included
 * @data_bytes:	of those, the callers' own (@bytes / @data_bytes on writes is
 *		the node's share of write amplification)
 * @late:	given up at a deadline while the kernel had them
 * @expired:	given up at a deadline while still queued
 * @cancelled:	taken back while queued
 * @refused:	refused by node_submit(): state, queue full, writes off
 * @eio:	media errors: EIO and what else the kernel says for them
 * @enodata:	media errors reported as ENODATA (NVMe does)
 * @erofs:	EROFS and EPERM
 * @enospc:	ENOSPC, EDQUOT and EFBIG
 * @nr_short:	short transfers
 * @other:	any other errno
 * @inflight:	in the kernel's hands now, late ones included
 * @queued:	waiting here
 * @queued_bytes: length of @inflight and @queued together
 * @bytes_s:	measured bandwidth, bytes per second; 0 until measured
 * @lat_ns:	measured time from start to end of one I/O
 */
struct node_dir_stats {
	uint64_t	ios;
	uint64_t	bytes;
	uint64_t	data_bytes;
	uint64_t	late;
	uint64_t	expired;
	uint64_t	cancelled;
	uint64_t	refused;
	uint64_t	eio;
	uint64_t	enodata;
	uint64_t	erofs;
	uint64_t	enospc;
	uint64_t	nr_short;
	uint64_t	other;
	uint64_t	inflight;
	uint64_t	queued;
	uint64_t	queued_bytes;
	uint64_t	bytes_s;
	uint64_t	lat_ns;
};

/**
 * struct node_stats - what a node counts
 * @dir:	per direction; block nodes only
 * @crc_bad:	reads whose checksum was wrong
 * @fixed_ios:	I/Os through registered buffers
 * @fixed_bytes: memory registered for I/O now
 * @plain_bytes: memory that should be registered but is not (RLIMIT_MEMLOCK)
 * @bad_slots:	slots in quarantine; they count as neither used nor free
 * @bad_bytes:	their bytes
 * @zeroed_bytes: bytes ready for use (zero-written, or written before)
 * @discarded_bytes: segments that the medium was told are empty
 * @flushes:	times that the medium was told to write down what it has
 * @flush_fails: and could not
 * @extents:	extents that exist
 * @huge_bytes:	of them, backed by hugepages
 * @probes:	probes of a degraded or failed device
 * @journal_bytes: written to the journal
 * @journal_groups: in so many groups
 * @journal_fails: groups whose write failed; each is tried again
 * @journal_lost: entries that found no memory; a checkpoint makes up for them
 * @journal_used: of the ring, in use now
 * @ckpt_bytes:	written to checkpoints
 * @ckpts:	that were completed
 * @ckpt_fails:	and that were not
 * @open_fails:	how often the store could not be opened; each is tried again
 * @overcommit_bytes: of the store, for which no space is set aside: a sparse
 *		file's holes, all of it where the file system does not write in
 *		place
 * @recovered:	records that the owner took at start-up
 * @recover_dropped: those, and blocks, that could not be right
 * @recover_bytes: read for it
 * @recover_ns:	from the first read to the last record handed over
 */
struct node_stats {
	struct node_dir_stats	dir[2];
	uint64_t		crc_bad;
	uint64_t		fixed_ios;
	uint64_t		fixed_bytes;
	uint64_t		plain_bytes;
	uint64_t		bad_slots;
	uint64_t		bad_bytes;
	uint64_t		zeroed_bytes;
	uint64_t		discarded_bytes;
	uint64_t		flushes;
	uint64_t		flush_fails;
	uint64_t		extents;
	uint64_t		huge_bytes;
	uint64_t		probes;
	uint64_t		journal_bytes;
	uint64_t		journal_groups;
	uint64_t		journal_fails;
	uint64_t		journal_lost;
	uint64_t		journal_used;
	uint64_t		ckpt_bytes;
	uint64_t		ckpts;
	uint64_t		ckpt_fails;
	uint64_t		open_fails;
	uint64_t		overcommit_bytes;
	uint64_t		recovered;
	uint64_t		recover_dropped;
	uint64_t		recover_bytes;
	uint64_t		recover_ns;
};

/**
 * struct node - what is common; back ends embed it, callers only read it
 * @id:		the caller's number for it
 * @capacity:	bytes that can be given out
 * @used:	bytes given out, exactly; never above @capacity
 * @max_len:	longest slot, bytes (block nodes)
 * @why:	one sentence: why @state is what it is
 * @on_state:	the caller may set it: called after every change of @state or of
 *		@why, for the log; @old is the state before. Must not call node
 *		functions
 * @arg:	the caller's, for @on_state
 */
struct node {
	const struct node_ops	*ops;
	enum node_kind		kind;
	enum node_state		state;
	uint32_t		id;
	uint32_t		max_len;
	uint64_t		capacity;
	uint64_t		used;
	struct node_stats	stats;
	char			name[32];
	char			why[256];
	void			(*on_state)(struct node *n, enum node_state old);
	void			*arg;
	struct node		*paired[NODE_MAX_PAIRED]; /* see node_pair() */
	const struct node_owner	*owner;	/* see node_set_owner() */
};

/* ---- making and ending ------------------------------------------------- */

/**
 * struct host_opts - what a host memory node should be like
 * @name:	copied
 * @bytes:	capacity
 * @numa:	NUMA node to prefer, -1 for none
 * @huge:	use 2 MiB hugepages for extents that ask, while there are some
 * @threads:	workers that populate and give back; 0: 1, or 2 from 8 CPUs on
 */
struct host_opts {
	const char	*name;
	uint32_t	id;
	uint64_t	bytes;
	int		numa;
	bool		huge;
	uint32_t	threads;
};

/**
 * host_create() - make a host memory node; allocates none of @bytes yet
 *
 * Return: 0, -EINVAL, -ENOMEM, or why no thread could be started. The caller
 * owns *@ret: node_destroy().
 */
int host_create(const struct host_opts *opts, struct node **ret);

enum nvme_engine {
	NVME_ENGINE_AUTO,	/* io_uring, threads where it is refused */
	NVME_ENGINE_URING,	/* io_uring or nothing */
	NVME_ENGINE_THREADS,	/* pread/pwrite on a pool of its own */
};

/**
 * struct nvme_opts - what a slot store should be like; 0 means the default
 * @name:	copied
 * @path:	file (made when missing) or block device; copied
 * @bytes:	size of the file; may be 0 for a block device: all of it. A file
 *		or store of another size is refused with a sentence
 * @seg_bytes:	segment; power of two, 1 MiB to 64 MiB; by default 64 MiB or
 *		the largest of which the file holds 64
 * @free_floor_pct: do not take space that leaves less of the file system free
 *		than this, per cent; 0: no floor. A new file whose preallocation
 *		would is refused; where there is none, writes are off meanwhile
 * @sparse:	preallocate nothing, even where the file system could
 * @rebuild:	empty a file that is of another version or size, damaged, or not
 *		ours at all, instead of refusing it
 * @records:	most slots that can be in use: one for 16 KiB, in a small store
 *		for 4 KiB. Journal and checkpoints are as large as this needs,
 *		2.5 times 132 bytes each, which @bytes includes
 * @depth:	I/Os in the kernel's hands at once; 64
 * @queue_max:	I/Os waiting here; 8192
 * @engine:	see enum nvme_engine
 * @threads:	for NVME_ENGINE_THREADS; 8
 * @buffered:	no O_DIRECT, even where the file system has it
 * @sqpoll:	io_uring: a thread of the kernel's takes I/O from memory, without
 *		a system call; where it is refused, the usual way, and status says so
 * @discard:	tell the medium of segments that became empty (nvme_discard.c)
 * @io_timeout_ns: an I/O the kernel keeps longer is given up; 500 ms, and the
 *		time that what is in flight takes a slow device
 * @queue_timeout_ns: an I/O without deadline is given up when it waited this
 *		long; 10 s
 * @recover_ns:	a degraded device is online again after this time without a
 *		miss; 30 s
 * @probe_ns:	how often a degraded or failed device is probed; 1 s
 * @lock_wait_ns: how long to wait for another daemon that has the store
 *		locked until that is a failure; 10 s
 * @check_ns:	how often the file is looked at (unlinked?); 5 s
 * @zero_bytes_s: rate of what is written in the background, zeroes and
 *		checkpoints each; 256 MiB/s
 * @degrade_after: misses in a row until NODE_DEGRADED; 3
 * @fail_after:	misses in a row until NODE_FAILED; 8
 */
struct nvme_opts {
	const char		*name;
	const char		*path;
	uint32_t		id;
	uint32_t		seg_bytes;
	uint64_t		bytes;
	uint32_t		free_floor_pct;
	uint32_t		depth;
	uint32_t		queue_max;
	uint32_t		threads;
	enum nvme_engine	engine;
	bool			buffered;
	bool			sparse;
	bool			sqpoll;
	bool			discard;
	bool			rebuild;
	uint64_t		records;
	uint64_t		io_timeout_ns;
	uint64_t		queue_timeout_ns;
	uint64_t		recover_ns;
	uint64_t		probe_ns;
	uint64_t		lock_wait_ns;
	uint64_t		check_ns;
	uint64_t		zero_bytes_s;
	uint32_t		degrade_after;
	uint32_t		fail_after;
};

/**
 * nvme_create() - make a slot store node
 * @pool:	checksums run there; the caller polls it; must outlive the node
 *
 * Returns at once with the node NODE_STARTING; opening, locking, sizing and
 * the superblock are done in the background. Then it is NODE_ONLINE with
 * @capacity and @max_len set, or NODE_FAILED with the sentence in @why. That is
 * for good only where the store is damaged or not ours and may not be rebuilt;
 * all else, a lock that is not had in lock_wait_ns, too, is tried again, from
 * probe_ns up to every 10 s, and the node is NODE_STARTING once it succeeds.
 * Nothing is begun before the first node_poll(), so that node_set_owner() can be
 * called; without an owner it starts empty.
 *
 * Return: 0, -EINVAL, -ENOMEM, or the errno of io_uring_setup(2) when only
 * io_uring was allowed. The caller owns *@ret: node_destroy().
 */
int nvme_create(const struct nvme_opts *opts, struct work_pool *pool,
		struct node **ret);

/**
 * node_destroy() - end a node
 * @n:		NULL is fine
 * @deadline_ns: absolute CLOCK_MONOTONIC
 *
 * Refuses what is new, fails what is queued (-ESHUTDOWN), waits for what the
 * kernel or a worker has. All callbacks are called from inside, as are those
 * of other jobs of the pool given to nvme_create(). Extents must have been put
 * before. Nodes that are paired may end in any order; the block node first is
 * the usual one, since its I/O keeps extents busy.
 *
 * Return: 0, or -ETIMEDOUT (I/O is stuck in the kernel), or -EBUSY (extents
 * exist): the node then still exists, and no memory that the kernel may
 * still write has been freed. Call again later, or exit.
 */
int node_destroy(struct node *n, uint64_t deadline_ns);

/* ---- the loop ------------------------------------------------------------ */

/** node_fd() - what to watch for EPOLLIN, or -1 when there is nothing */
int node_fd(const struct node *n);

/**
 * node_poll() - start what was handed in, reap what is done, keep deadlines
 * @budget:	at most so many completions; 0 for all there are now
 *
 * Return: how many completions were reaped. At @budget there may be more.
 */
unsigned int node_poll(struct node *n, unsigned int budget);

/** node_kick() - start what was handed in, without any callback */
void node_kick(struct node *n);

/**
 * node_next_deadline() - when node_poll() wants to be called next
 *
 * Return: absolute CLOCK_MONOTONIC ns (0: at once), or DEADLINE_NONE (clock.h).
 */
uint64_t node_next_deadline(const struct node *n);

/**
 * node_status() - one line for people: engine, O_DIRECT, fixed buffers, what is
 * out of the ordinary (the file was unlinked, hugepages ran out, ...)
 */
void node_status(const struct node *n, char *buf, size_t len);

/** node_state_name() - "online" ... */
const char *node_state_name(enum node_state state);

/** node_check() - conservation laws of @n, for assert(); true when they hold */
bool node_check(const struct node *n);

/* ---- extents (NODE_MEM) -------------------------------------------------- */

#define EXTENT_HUGE	0x1u	/* wants hugepages; shows whether it got them */

/**
 * struct extent - memory of a node
 * @fd:		read-write, never to be given to a client: see extent_fd_ro()
 * @addr:	where the daemon has it mapped, read-write
 * @bytes:	its size, what is charged to the node
 * @flags:	EXTENT_*
 * @id:		unique in the life of the node, from 1
 *
 * A memfd of mode 0400, sealed against shrink, grow and further seals and
 * against nothing else: a restarted daemon must be able to map it read-write
 * and to punch it. Populated and zero.
 */
struct extent {
	struct node	*node;
	int		fd;
	uint32_t	flags;
	void		*addr;
	uint64_t	bytes;
	uint64_t	id;
};

/**
 * extent_cb - callback of node_extent_get() and node_extent_put()
 * @ext:	the new extent, the callee's until node_extent_put(); NULL on error
 * @err:	0, -ENOMEM, -EMFILE, ... ; -ESHUTDOWN when the node ended first
 */
typedef void (*extent_cb)(struct extent *ext, int err, void *arg);

/**
 * node_extent_get() - ask for an extent
 * @bytes:	multiple of NODE_ALIGN
 * @flags:	EXTENT_HUGE
 * @cb:		called once, later, from node_poll(), unless an error is returned
 *
 * @bytes are charged to the node from this call on.
 *
 * Return: 0, -ENOSPC (over the node's capacity), -EINVAL, -ENOMEM, -ESHUTDOWN.
 */
int node_extent_get(struct node *n, uint64_t bytes, uint32_t flags,
		    extent_cb cb, void *arg);

/**
 * node_extent_put() - give an extent back
 * @cb:		called later from node_poll() when the memory is gone and the
 *		node's account is down by it; its @ext is NULL. NULL: nobody
 *		wants to know
 *
 * Ends registrations for I/O first, then punches, unmaps and closes it, in
 * the background. What another process still maps stays mapped there, as
 * zeroes.
 *
 * Return: 0; -EBUSY when a paired block node has an I/O on it that is not
 * released: then nothing was done.
 */
int node_extent_put(struct extent *ext, extent_cb cb, void *arg);

/**
 * node_extent_adopt() - take over an extent that a daemon before this one made
 * @fd:		of it; taken over, also on error (then closed, not punched: another
 *		process may still read it)
 * @bytes:	its size, multiple of NODE_ALIGN
 * @id:		what it was there; later ones get higher numbers
 * @ret:	the extent, the caller's until node_extent_put()
 *
 * Its memory is as it was left. It is registered with paired nodes in the
 * background; I/O on it works at once.
 *
 * Return: 0; -EPROTO (not a file that a node of this kind makes: seals or size);
 * -ENOSPC (over the node's capacity), -EINVAL, -ENOMEM, -EOPNOTSUPP,
 * -ESHUTDOWN, or why it cannot be mapped.
 */
int node_extent_adopt(struct node *n, int fd, uint64_t bytes, uint64_t id,
		      struct extent **ret);

/**
 * extent_fd_ro() - a read-only file description of an extent, for a client
 *
 * Return: an fd (close-on-exec, the caller's), or a negative errno.
 */
int extent_fd_ro(const struct extent *ext);

/**
 * extent_fd_rw() - a read-write file description of an extent, for a writer
 *
 * Return: an fd (close-on-exec, the caller's), or a negative errno.
 */
int extent_fd_rw(const struct extent *ext);

/**
 * node_pair() - let a memory node's extents be registered for a block node's I/O
 *
 * From now on the extents of @mem are registered with @blk before they are
 * handed out and unregistered before they are punched. As far as
 * RLIMIT_MEMLOCK allows; I/O on others works all the same. Call it before the
 * first extent is asked for.
 *
 * Return: 0, -EINVAL (kinds), -EBUSY (extents exist), -ENOSPC (too many).
 */
int node_pair(struct node *mem, struct node *blk);

/* ---- slots and I/O (NODE_BLOCK) -------------------------------------------- */

/**
 * struct node_slot - a place for one immutable run of bytes
 * @off:	byte offset in the store; identifies the slot
 * @seq:	never given out twice, part of the checksum: a page that is read
 *		with the slot of its predecessor is found out
 */
struct node_slot {
	uint64_t	off;
	uint64_t	seq;
};

/**
 * node_slot_alloc() - take a free slot
 * @len:	bytes that will be written, 1 to @max_len
 *
 * Charges node_slot_bytes() to the node: @len rounded up to NODE_ALIGN, and a
 * little further when very many different sizes are in use at once.
 *
 * Return: 0; -ENOSPC: no free slot of that size and no empty segment: free
 * slots of that size, or see node_slot_victim(), or any, where a persistent node
 * has as many as it can remember; -EAGAIN (starting, or too many records wait to
 * be written: node_writable() is false then, too), -EIO (failed), -E2BIG,
 * -EINVAL, -ESHUTDOWN.
 */
int node_slot_alloc(struct node *n, uint32_t len, struct node_slot *slot);

/**
 * node_slot_free() - give a slot back
 *
 * No I/O on it may be unreleased. A slot whose write failed or whose checksum
 * was wrong goes to quarantine instead of the free list.
 *
 * Return: 0, or -EINVAL when it was not in use (counted on, never fatal).
 */
int node_slot_free(struct node *n, const struct node_slot *slot);

/** node_slot_bytes() - what a slot in use is charged; 0 for one that is not */
uint32_t node_slot_bytes(const struct node *n, const struct node_slot *slot);

/**
 * struct node_range - a segment, as node_slot_victim() names it
 * @off:	first byte
 * @end:	first byte after it
 * @slot_bytes:	size of its slots
 * @nr_used:	slots in use
 */
struct node_range {
	uint64_t	off;
	uint64_t	end;
	uint32_t	slot_bytes;
	uint32_t	nr_used;
};

/**
 * node_slot_victim() - the segment whose slots are best freed to make room for
 * slots of another size
 * @len:	what room is wanted for
 * @nth:	0 for the emptiest, 1 for the next, ...
 * @r:		the answer: free every slot with off <= slot.off < end
 *
 * Return: 0, or -ENOENT.
 */
int node_slot_victim(struct node *n, uint32_t len, unsigned int nth,
		     struct node_range *r);

/**
 * struct node_io - one transfer between a slot and memory
 * @dir:	NODE_READ or NODE_WRITE
 * @prio:	see node_io_raise()
 * @len:	bytes of data; what moves is rounded up to NODE_ALIGN, and the memory
 *		must be there up to that length
 * @slot:	from node_slot_alloc(), of at least @len bytes
 * @addr:	multiple of NODE_ALIGN
 * @ident:	opaque bytes that say whose data it is; part of the checksum
 * @ident_len:	their number, at most NODE_IDENT_MAX
 * @crc:	write: filled in when @done is called with 0. read: the expected one
 * @data_crc:	write: CRC32C of the data alone, filled in as @crc is
 * @deadline_ns: absolute CLOCK_MONOTONIC, 0 for the node's defaults
 * @done:	see below
 * @release:	see below
 * @arg:	the caller's
 * @result:	what became of the transfer itself; valid in @release
 * @late:	@done was called before the transfer was over
 *
 * The caller zeroes it, fills it in, and leaves it, @ident, the slot and the
 * memory alone until @release. Every I/O that node_submit() accepted gets
 * exactly one call of @done and then exactly one of @release:
 *
 *	normal		done(result), and release directly after it
 *	cancelled	done(-ECANCELED), release directly after it
 *	late		done(-ETIMEDOUT) at the deadline; release only when
 *			neither kernel nor workers use memory, slot or @ident
 *			any more, which may be much later
 *
 * So an answer is given in @done, and frame, slot and the I/O itself are given
 * back in @release and nowhere else. In @release of a late I/O @result tells
 * how the transfer ended after all: a late read with 0 has the right, checked
 * bytes in memory; a late write with 0 is on the medium, @crc and @data_crc are
 * filled in.
 *
 * Results: 0; -EBADMSG the checksum is wrong: a miss; -EIO, also when
 * the kernel said ENODATA; -EROFS; -ENOSPC; -ETIMEDOUT; -ECANCELED;
 * -ESHUTDOWN. Both callbacks may call any node function but node_poll() and
 * node_destroy(); @release may free or resubmit the I/O.
 */
struct node_io {
	enum node_dir	dir;
	enum node_prio	prio;
	uint32_t	len;
	uint32_t	crc;
	uint32_t	data_crc;
	struct node_slot slot;
	void		*addr;
	const void	*ident;
	uint32_t	ident_len;
	bool		late;
	int		result;
	uint64_t	deadline_ns;
	void		(*done)(struct node_io *io, int result);
	void		(*release)(struct node_io *io);
	void		*arg;
	struct node_io_priv {
		struct node	*node;
		struct list	list;		/* a queue, or what is in flight */
		uint64_t	start_ns;	/* when the engine got it */
		_Atomic uint64_t begun_ns;	/* when the kernel did; 0 */
		uint64_t	expire_ns;	/* key in the heap of deadlines */
		uint64_t	due_ns;		/* end of an injected stall */
		uint32_t	heap_ix;	/* place there + 1; 0: not in it */
		uint32_t	ident_crc;
		uint32_t	data_crc;
		int		res;		/* as the engine gave it */
		int		buf_ix;		/* registered buffer, -1: plain */
		uint8_t		stage;
		uint8_t		parts;		/* what is still to be done */
		uint8_t		fault;
		bool		internal;	/* the node's own I/O */
		bool		sync;		/* on the medium at its end */
		bool		missed;		/* the device's time is over */
		struct work	crc_work;
		struct work	io_work;
	} priv;
};

/**
 * node_submit() - hand an I/O in
 *
 * Return: 0: accepted, @done and @release will be called; otherwise nothing
 * was done and no callback comes: -EAGAIN (queue full, starting, writes to a
 * degraded node), -EIO (failed), -EROFS, -ENOSPC (writes are off),
 * -ETIMEDOUT (@deadline_ns is past), -EINVAL, -ENOMEM, -ESHUTDOWN.
 */
int node_submit(struct node *n, struct node_io *io);

/**
 * node_io_cancel() - take an I/O back that has not been started
 *
 * Return: 0: @done(-ECANCELED) and @release will come from the next
 * node_poll(); -EALREADY: it has been started and completes as usual.
 */
int node_io_cancel(struct node_io *io);

/** node_io_raise() - somebody waits for it now: serve it as @prio if queued */
void node_io_raise(struct node_io *io, enum node_prio prio);

/**
 * node_io_deadline() - move an I/O's deadline (a further waiter came)
 *
 * No effect when @done was called already.
 */
void node_io_deadline(struct node_io *io, uint64_t deadline_ns);

/**
 * node_writable() - would node_submit() take a write now, as far as state,
 * ENOSPC and EROFS are concerned? Ask before choosing what to demote.
 */
bool node_writable(const struct node *n);

/**
 * node_estimate_us() - how long @len bytes would take if handed in now
 *
 * What is queued at the same or a better priority, measured bandwidth and
 * latency. Before anything was measured: a guess of 1 GB/s and 100 us.
 *
 * Return: microseconds, UINT32_MAX when the node would refuse it.
 */
uint32_t node_estimate_us(const struct node *n, enum node_dir dir,
			  uint32_t len);

/**
 * node_buf_add() - register memory for I/O; extents of paired nodes need not
 * @addr:	multiple of NODE_ALIGN
 *
 * Context: any thread.
 * Return: 0, -ENOMEM (over RLIMIT_MEMLOCK), -ENOSPC (table full), -EINVAL,
 * -EOPNOTSUPP (this engine has no such thing). I/O on it works all the same.
 */
int node_buf_add(struct node *n, void *addr, uint64_t len);

/**
 * node_buf_del() - end a registration
 *
 * No I/O on the memory may be unreleased. A registration keeps the pages it was
 * made with: punch or unmap before this and they are not freed, and I/O goes
 * to the old ones. Unknown memory is ignored. Context: any thread.
 */
void node_buf_del(struct node *n, void *addr);

/** node_buf_busy() - is there an unreleased I/O on this memory? */
bool node_buf_busy(const struct node *n, const void *addr, uint64_t len);

/* ---- what is found again (NODE_BLOCK) ---------------------------------------- */

/*
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

/* ---- test builds ----------------------------------------------------------- */

#ifdef KVMM_TEST_BUILD
/**
 * node_fault_set() - replace the table of injected I/O errors while running
 * @spec:	rules as fault.h describes them; NULL or "": none
 * @why:	a sentence about what is wrong with @spec; may be NULL
 *
 * Return: 0, or -EINVAL and the table is as it was.
 */
int node_fault_set(const char *spec, char *why, size_t len);

/** node_fault_hits() - how often a rule has struck since then */
uint64_t node_fault_hits(void);
#endif

#endif
