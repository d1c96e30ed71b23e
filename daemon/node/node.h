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
 *
 * Here is what nodes have in common. Who includes this has the rest with it:
 * node_extent.h, node_io.h, node_record.h.
 */
#ifndef KVMM_DAEMON_NODE_NODE_H
#define KVMM_DAEMON_NODE_NODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/node/node_extent.h"
#include "daemon/node/node_io.h"
#include "daemon/node/node_record.h"
#include "daemon/node/work.h"

/* I/O addresses and slots are multiples of this; lengths are rounded up to it */
#define NODE_ALIGN		4096u

/* How many nodes one node can be paired with */
#define NODE_MAX_PAIRED		8u

struct node_ops;		/* a back end's table: node_ops.h */

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
