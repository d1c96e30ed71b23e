/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node_io.h - slots, and I/O between them and memory (NODE_BLOCK). A part of
 * node.h, which others include.
 */
#ifndef KVMM_DAEMON_NODE_NODE_IO_H
#define KVMM_DAEMON_NODE_NODE_IO_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/node/work.h"
#include "ipc/base/list.h"

struct node;

/* Longest node_io.ident */
#define NODE_IDENT_MAX		256u

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

/* ---- slots ----------------------------------------------------------------- */

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

/* ---- I/O ------------------------------------------------------------------- */

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

#endif
