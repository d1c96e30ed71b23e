/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme.h - the slot store's inside; for the nvme_*.c files only
 *
 *	nvme.c		making, ending, the loop's entry points, status
 *	nvme_open.c	start-up, again and again; the watch on the file
 *	nvme_file.c	found or made, locked, as long as configured, reserved
 *	nvme_io.c	an I/O's life: queues, start, checksum, end
 *	nvme_time.c	its deadlines
 *	nvme_health.c	states of the device, probes, zero-writing, estimates
 *	nvme_discard.c	telling the medium what is empty
 *	nvme_flush.c	telling it to write down what it has
 *	nvme_slots.c	which bytes are free
 *	nvme_uring.c	engine: io_uring
 *	nvme_threads.c	engine: pread and pwrite on workers
 *
 * and what it remembers, in nvme_meta.h.
 */
#ifndef KVMM_DAEMON_NODE_NVME_H
#define KVMM_DAEMON_NODE_NVME_H

#include <stdatomic.h>

#include "daemon/node/fault.h"
#include "daemon/node/node_ops.h"
#include "daemon/node/nvme_format.h"
#include "daemon/node/nvme_meta.h"
#include "daemon/node/nvme_slots.h"
#include "ipc/base/clock.h"
#include "ipc/base/list.h"
#include "ipc/base/lock.h"

struct nvme;

/* How much zero-writing does at once. */
#define NVME_ZERO_BYTES		(1u << 20)

/*
 * So many bytes' checksums are computed on the loop's own thread each time that
 * it looks: some 40 us, once the device has its next I/Os. Waking a worker, and
 * being woken by it, costs more than one of 64 KiB takes; when much comes at once
 * workers do the rest. Measured by `bench io`: reads of 64 KiB cost half of fio's
 * CPU so, and as much as fio's with every checksum on a worker; those of 256 KiB
 * 0.7 of it, and 1.3.
 */
#define NVME_CRC_INLINE		(256u << 10)

/**
 * enum io_stage - where an I/O is; node_io.priv.stage
 * @IO_QUEUED:	on nvme.queue[prio]; nobody else knows of it
 * @IO_ENDING:	was queued; @res is its result; on nvme.ending for the next poll
 * @IO_STALLED:	started, held back by the fault table; on nvme.stalled
 * @IO_FLYING:	the engine, a worker or both have it; on nvme.flying
 * @IO_IDLE:	the caller's
 */
enum io_stage {
	IO_IDLE,
	IO_QUEUED,
	IO_ENDING,
	IO_STALLED,
	IO_FLYING,
};

/* node_io.priv.parts: what must still end before the I/O does */
#define IO_PART_ENGINE		0x1u
#define IO_PART_CRC		0x2u

/**
 * struct nvme_engine_ops - who talks to the kernel
 *
 * @init:	at creation, before there is a file; 0 or -errno
 * @set_file:	the file is open; called once, on the loop's thread
 * @fini:	no I/O is in flight
 * @start:	take an I/O; nothing is reported before @reap. Its length is
 *		that of @len rounded up
 * @flush:	give all taken to the kernel
 * @reap:	call nvme_engine_done() for what has ended, at most @budget
 * @cancel:	try to end an I/O early; it is reported by @reap all the same
 * @fd:		what becomes readable when @reap has something to do, or -1
 * @busy:	@flush could not do all; call it again soon
 * @buf_add:	register memory; any thread; NULL: there is no such thing
 * @buf_del:	any thread
 */
struct nvme_engine_ops {
	const char	*name;
	int		(*init)(struct nvme *nv);
	int		(*set_file)(struct nvme *nv);
	void		(*fini)(struct nvme *nv);
	void		(*start)(struct nvme *nv, struct node_io *io);
	void		(*flush)(struct nvme *nv);
	unsigned int	(*reap)(struct nvme *nv, unsigned int budget);
	void		(*cancel)(struct nvme *nv, struct node_io *io);
	int		(*fd)(const struct nvme *nv);
	bool		(*busy)(const struct nvme *nv);
	int		(*buf_add)(struct nvme *nv, void *addr, uint64_t len);
	void		(*buf_del)(struct nvme *nv, void *addr);
};

extern const struct nvme_engine_ops nvme_uring_ops;
extern const struct nvme_engine_ops nvme_threads_ops;

/**
 * struct nvme_open - start-up and the watch on the file; nvme_open.c
 * @work:	the job, one at a time, on nvme.aux
 * @running:	a worker has it; all below is the worker's then
 * @owned:	somebody has asked for what is in it, who may have left since
 * @next_ns:	when to do the next step
 * @lock_until:	how long to wait for the lock before it is called a failure
 * @retry_ns:	how long the last failure was waited for; it doubles
 * @err:	the job's result
 * @msg:	the sentence for @err
 * @fd:		the file, with the lock; -1
 * @twin:	another description of it, without; -1
 * @direct:	O_DIRECT
 * @block:	a block device
 * @created:	the file was made here
 * @sparse:	space is not preallocated: writes take it
 * @overcommit:	name of a file system on which they may take it all the same
 * @rebuilt:	what was there was thrown away; @msg says why
 * @room:	sparse: bytes that may still be taken, as the worker last saw it
 * @unreserved:	bytes of it that no space is set aside for
 * @super_bad:	copies of the superblock that cannot be read or written
 * @taken:	sparse: bytes on their way when the worker began to look, or since:
 *		it may not have seen them
 * @super:	the superblock as it is on the medium now
 * @writer:	random, of this opening: see struct nvme_block
 * @found:	what the store remembers
 * @nr_segs:	segments of the store
 * @written:	one bit a segment: has been written as a whole
 * @nlink:	what the watch saw
 */
struct nvme_open {
	struct work		work;
	bool			running;
	bool			owned;
	uint64_t		next_ns;
	uint64_t		lock_until;
	uint64_t		retry_ns;
	int			err;
	struct errmsg		msg;
	int			fd;
	int			twin;
	bool			direct;
	bool			block;
	bool			created;
	bool			sparse;
	bool			rebuilt;
	const char		*overcommit;
	uint64_t		room;
	uint64_t		unreserved;
	unsigned int		super_bad;
	uint64_t		taken;
	struct nvme_super	super;
	uint64_t		writer;
	struct nvme_found	*found;
	uint32_t		nr_segs;
	uint64_t		*written;
	uint64_t		nlink;
};

/**
 * struct nvme_health - is the device well? nvme_health.c
 * @bad_row:	misses since the last good I/O
 * @last_bad:	when the last miss was
 * @next_probe:	when to probe next
 * @probe:	the probe
 * @probing:	it is out
 * @probe_good:	its write was good, its read is to come
 * @read_only:	a write said EROFS; until a probe's write succeeds
 * @full:	a write said ENOSPC, and none has succeeded since
 * @full_retry:	then one write may try; @full_soon, if a slot has been freed
 */
struct nvme_health {
	uint32_t	bad_row;
	uint64_t	last_bad;
	uint64_t	next_probe;
	struct node_io	probe;
	bool		probing;
	bool		read_only;
	bool		full;
	uint64_t	full_retry, full_soon;
};

/**
 * struct nvme_zero - zero-writing in the background; nvme_health.c
 * @io:		the chunk under way
 * @active:	it is out
 * @seg:	its segment, -1: none
 * @off:	next byte in it
 * @next_ns:	when the next chunk may start
 */
struct nvme_zero {
	struct node_io	io;
	bool		active;
	int		seg;
	uint32_t	off;
	uint64_t	next_ns;
};

/**
 * struct nvme_discard - segments that the medium is told are empty
 * @work:	one at a time, on nvme.aux
 * @running:	a worker has it
 * @seg:	its segment
 * @err:	the job's result
 * @next_ns:	when the next may begin
 * @no_use:	the medium has no such thing
 */
struct nvme_discard {
	struct work		work;
	bool			running;
	uint32_t		seg;
	int			err;
	uint64_t		next_ns;
	bool			no_use;
};

/**
 * struct nvme_flush - data that the medium is told to write down
 * @work:	one at a time, on nvme.aux
 * @running:	a worker has it
 * @err:	the job's result
 * @ios:	writes that had ended when the last one began
 * @next_ns:	when the next may begin
 * @look_ns:	and when to look again, where the device did not look well
 */
struct nvme_flush {
	struct work		work;
	bool			running;
	int			err;
	uint64_t		ios;
	uint64_t		next_ns;
	uint64_t		look_ns;
};

/* How long data may be with a drive that could lose it, as far as we see to it. */
#define NVME_FLUSH_NS		NSEC_PER_SEC

/**
 * struct nvme_rate - how fast one direction is
 * @sum_bytes:	recent bytes, fading
 * @sum_ns:	the time they took, fading
 * @acc_bytes:	ended since @from
 * @from:	when the device last had nothing more to say
 * @best_ns:	shortest recent time of one I/O, slowly forgotten
 */
struct nvme_rate {
	uint64_t	sum_bytes;
	uint64_t	sum_ns;
	uint64_t	acc_bytes;
	uint64_t	from;
	uint64_t	best_ns;
};

/**
 * struct nvme - a slot store
 * @opts:	with defaults filled in; @path is its own copy
 * @pool:	the daemon's workers: checksums
 * @aux:	workers of its own: system calls that may block for long
 * @eng:	the engine; @eng_data is its own
 * @eng_note:	what is to be said about it beside its name
 * @fd:		the file description that the engine uses, = open.fd once
 *		everything is in order; -1 before
 * @epfd:	what the loop watches
 * @unlinked:	the file has no name any more
 * @floored:	the last look at the file system found its free floor reached
 * @drained:	destroy got as far as stopping the engine
 * @break_crc:	test builds: accept what the checksum refuses
 * @break_dsync: write journal and checkpoints as if they were data
 * @crc_left:	of NVME_CRC_INLINE, until the next poll
 * @crc_jobs:	checksums to be computed, the last first
 * @room:	bytes that writes may take until the next look; 0: writes are off
 * @queue:	I/Os not started
 * @queued:	their number
 * @ending:	I/Os that were taken out of the queue and end at the next poll
 * @stalled:	I/Os that the fault table holds back
 * @flying:	I/Os that engine or workers have
 * @inflight:	callers' I/Os that the engine has, or would have but for the
 *		fault table
 * @inflight_wb: of those, write-back
 * @inflight_bytes: and their bytes by direction
 * @nr_started:	callers' I/Os in @stalled and @flying: @inflight, and those that
 *		only a checksum is missing from
 * @nr_own:	the node's own I/Os that the engine has
 * @own_bytes:	and their bytes by direction
 * @nr_missed:	I/Os that the engine has and the device's time is over for
 * @row:	I/Os started since the last write-back
 * @heap:	I/Os by @expire_ns; @heap_nr of @heap_max places
 * @journal:	and
 * @labels:	and
 * @ckpt:	what is remembered; nothing without an owner
 * @found:	start-up: what is being handed over
 * @expect:	about how much it will be, from the worker that reads; 0: unknown
 * @told:	and the owner knows
 * @first_seq:	slots given out since the start have this or a higher one
 * @uuid_crc:	checksum of the store's uuid; part of every slot's
 * @mem:	4 KiB for probes, then zeroes
 * @fixed_bytes: registered memory; any thread
 * @plain_bytes: memory that could not be; any thread
 */
struct nvme {
	struct node		node;
	struct nvme_opts	opts;
	struct work_pool	*pool;
	struct work_pool	*aux;
	const struct nvme_engine_ops *eng;
	void			*eng_data;
	char			eng_note[64];
	int			fd;
	int			epfd;
	bool			unlinked;
	bool			floored;
	bool			drained;
	bool			break_crc;
	bool			break_dsync;
	uint32_t		crc_left;
	struct work		*crc_jobs;
	uint64_t		room;
	struct list		queue[NODE_NR_PRIOS];
	uint32_t		queued;
	struct list		ending;
	struct list		stalled;
	struct list		flying;
	uint32_t		inflight;
	uint32_t		inflight_wb;
	uint64_t		inflight_bytes[2];
	uint32_t		nr_started;
	uint32_t		nr_own;
	uint64_t		own_bytes[2];
	uint32_t		nr_missed;
	uint32_t		row;
	struct node_io		**heap;
	uint32_t		heap_nr;
	uint32_t		heap_max;
	struct slot_store	slots;
	struct nvme_open	open;
	struct nvme_health	health;
	struct nvme_zero	zero;
	struct nvme_discard	discard;
	struct nvme_flush	flush;
	struct nvme_rate	rate[2];
	struct nvme_journal	journal;
	struct nvme_labels	labels;
	struct nvme_ckpt	ckpt;
	struct nvme_found	*found;
	_Atomic uint64_t	expect;
	bool			told;
	uint64_t		first_seq;
	uint32_t		uuid_crc;
	void			*mem;
	_Atomic uint64_t	fixed_bytes;
	_Atomic uint64_t	plain_bytes;
};

#define NVME_MAX_STARTED(depth)	(4 * (depth))

/* The node's own I/O: probe, zero-writing, journal, checkpoint. */
#define NVME_NR_OWN		4

#define NVME_MEM_BYTES		(NVME_PROBE_OFF + NVME_ZERO_BYTES)

static inline struct nvme *to_nvme(const struct node *n)
{
	return container_of((struct node *)n, struct nvme, node);
}

/* What moves for @io. */
static inline uint32_t io_bytes(const struct node_io *io)
{
	return (uint32_t)round_up(io->len, NODE_ALIGN);
}

/* What the engine is to move: a torn write ends early and nobody is told. */
static inline uint32_t nvme_move_bytes(const struct node_io *io)
{
	uint32_t bytes = io_bytes(io);

	return io->priv.fault == FAULT_TORN ?
	       max((uint32_t)round_down(bytes / 2, NODE_ALIGN), NODE_ALIGN) :
	       bytes;
}

/* Are there slots, is there a file? */
static inline bool nvme_open_done(const struct nvme *nv)
{
	return nv->slots.seg;
}

/* Do writes take space of the file system? */
static inline bool nvme_open_grows(const struct nvme *nv)
{
	return nv->open.sparse || nv->open.overcommit;
}

/* nvme_open.c */

void nvme_open_start(struct nvme *nv);
void nvme_open_poll(struct nvme *nv, uint64_t now);
uint64_t nvme_open_next(const struct nvme *nv);
void nvme_open_fini(struct nvme *nv);
int nvme_store_fd(const struct node *n);

/* So many blocks that cannot be read, each after its own half minute maybe, are
 * enough to know that it is not the blocks. */
#define NVME_BAD_MOST	16u

/* nvme_file.c; blocks: on the worker only */

/* -errno; what the kernel says of a file system is none of a store's errors. */
int nvme_sys_err(void);
/* One transfer, all of it or an error; gives O_DIRECT up where it is refused.
 * @sync: on the medium at its end, with all that was written before. */
int nvme_open_read(struct nvme *nv, void *buf, size_t len, uint64_t off);
int nvme_open_write(struct nvme *nv, const void *buf, size_t len, uint64_t off,
		    bool sync);
/* -EWOULDBLOCK: somebody has it. */
int nvme_file_open(struct nvme *nv);
int nvme_file_lock(struct nvme *nv);
/* Close it; one that was made here and did not become a store goes. */
void nvme_file_drop(struct nvme *nv);
void nvme_file_kind(struct nvme *nv);
/* How much more it may take, and how much it lacks. */
void nvme_file_look(struct nvme *nv);
/* How long the store is; *@fresh: the file was empty. */
int nvme_file_size(struct nvme *nv, uint64_t *bytes, bool *fresh);
/* A file may have holes: made by a copy, or sparse from the start. Where they
 * cannot be filled one of @ours is as good as sparse. */
int nvme_file_fill(struct nvme *nv, uint64_t bytes, bool ours);
int nvme_file_written(struct nvme *nv);

/* nvme_io.c */
int nvme_submit(struct node *n, struct node_io *io);
int nvme_cancel(struct node *n, struct node_io *io);
void nvme_raise(struct node *n, struct node_io *io, enum node_prio prio);
bool nvme_buf_busy(const struct node *n, const void *addr, uint64_t len);
void nvme_start_queued(struct nvme *nv, uint64_t now);
void nvme_end_queued(struct nvme *nv, bool reads_too, int result);
/* @all_seen: what the kernel has done with by now has been reported */
void nvme_io_poll(struct nvme *nv, uint64_t now, bool all_seen);
/* Checksums that have to be computed: when the engine has got all it can. In a
 * poll callbacks come from here; in a kick there are only those of writes, which
 * the engine still has. Return: the loop computed some. */
bool nvme_crc_flush(struct nvme *nv);
uint64_t nvme_io_next(const struct nvme *nv);
bool nvme_io_check(const struct nvme *nv);

/* Out of the queue; it ends with @result at the next poll. */
void nvme_queue_leave(struct nvme *nv, struct node_io *io, int result);

/* The node's own I/O: started at once, only @done is called, at its end. */
void nvme_start_own(struct nvme *nv, struct node_io *io, uint64_t now);

/* The same for journal and checkpoints: on the medium when it ends. */
void nvme_start_meta(struct nvme *nv, struct node_io *io, uint64_t now);

/* End an I/O that the engine did not start, or took back, with @res: soon, from
 * nvme_io_poll(), since now is no time for callbacks. */
void nvme_end_soon(struct nvme *nv, struct node_io *io, int res);

/* The kernel begins with @io now; any thread. Relaxed: nothing hangs on it but
 * how long it may take. */
static inline void nvme_io_begun(struct node_io *io, uint64_t now)
{
	atomic_store_explicit(&io->priv.begun_ns, now, memory_order_relaxed);
}

/* The engine has done with @io: bytes moved or -errno. */
void nvme_engine_done(struct nvme *nv, struct node_io *io, int res);

/* nvme_time.c */

/* Add, or move to a new deadline. */
void nvme_heap_set(struct nvme *nv, struct node_io *io, uint64_t expire_ns);
void nvme_heap_del(struct nvme *nv, struct node_io *io);
bool nvme_heap_check(const struct nvme *nv);
void nvme_set_deadline(struct node *n, struct node_io *io,
		       uint64_t deadline_ns);
uint64_t nvme_first_expiry(const struct nvme *nv, const struct node_io *io);
void nvme_time_poll(struct nvme *nv, uint64_t now);
uint64_t nvme_time_next(const struct nvme *nv);

/* nvme_discard.c */
void nvme_discard_poll(struct nvme *nv, uint64_t now);
uint64_t nvme_discard_next(const struct nvme *nv);
/* What status says about it; "" where there is nothing to say. */
const char *nvme_discard_note(const struct nvme *nv);

/* nvme_flush.c */
void nvme_flush_poll(struct nvme *nv, uint64_t now);
uint64_t nvme_flush_next(const struct nvme *nv);
bool nvme_flush_wanted(const struct nvme *nv);

/* nvme_health.c */
void nvme_miss(struct nvme *nv, const char *what, uint64_t now);
void nvme_good(struct nvme *nv, enum node_dir dir);
void nvme_refused(struct nvme *nv, int err, uint64_t now);
void nvme_space_freed(struct nvme *nv);
void nvme_take_room(struct nvme *nv, uint64_t bytes);
int nvme_admit(struct nvme *nv, enum node_dir dir, uint64_t now);
void nvme_health_poll(struct nvme *nv, uint64_t now);
uint64_t nvme_health_next(const struct nvme *nv);
void nvme_rate_add(struct nvme *nv, const struct node_io *io, uint64_t now);
bool nvme_writable(const struct node *n);
uint32_t nvme_estimate_us(const struct node *n, enum node_dir dir,
			  uint32_t len);

#endif
