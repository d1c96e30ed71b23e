/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvmm - find, pin and share KV-cache pages of a host's kvmmd.
 *
 * General rules
 *   - Return 0 or a count, or -errno; kvmm_error() has the sentence.
 *   - [H] marks hot calls: no system call, no message, no lock shared with
 *     another process. One that posts rings a doorbell only when the daemon
 *     sleeps.
 *   - Nothing blocks, except set-up calls (open, join, attach, win_open,
 *     win_sync, reserve), which are bounded by &kvmm_open_opts.call_timeout_ns,
 *     and calls that take an absolute CLOCK_MONOTONIC deadline in nanoseconds.
 *   - Nothing logs, aborts, or starts a thread.
 *   - Handles of different requests may be used from different threads; one
 *     request belongs to one thread at a time.
 *   - What the daemon says on the socket (a larger index, who is a member and
 *     what it has mapped, the daemon's own end) is taken in by kvmm_poll(), and
 *     by set-up calls while they wait for an answer; by nothing else. Call it
 *     now and then, also when nothing is in flight.
 *   - In a child after fork(2) every call answers -ECHILD, or NULL or 0 where it
 *     returns no error; kvmm_win_base() and kvmm_win_stride() answer as before.
 *   - Daemon away: [H] calls answer a miss or -EAGAIN, others -ENOTCONN; what
 *     was hit stays readable; kvmm_poll() reconnects.
 *   - All option structs begin with their size and may grow at the end. What is
 *     in one behind what this library knows has to be 0: -E2BIG.
 */
#ifndef KVMM_KVMM_H
#define KVMM_KVMM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVMM_API __attribute__((visibility("default")))

/* -- nouns ----------------------------------------------------------------- */

struct kvmm;			/* a connection; made by kvmm_open() */
struct kvmm_space;		/* a KV identity; made by kvmm_space_attach() */
struct kvmm_win;		/* a view of (class, node); by kvmm_win_open() */
struct kvmm_req;		/* owns pins and OPEN frames; by kvmm_req_open() */
struct kvmm_blob;		/* state of any length; by kvmm_blob_begin(), _map() */

/* Dense per (space, class, node). 0 is the null frame: private scratch. */
typedef uint32_t kvmm_frame_t;
typedef uint8_t  kvmm_node_t;

#define KVMM_NODE_NONE	0xff

struct kvmm_key {
	uint8_t b[32];
};

enum kvmm_mode {
	KVMM_MODE_ON		= 0,
	KVMM_MODE_OBSERVE	= 1,	/* matches count and answer MISS */
	KVMM_MODE_BYPASS	= 2,	/* MISS; publish -EAGAIN */
	KVMM_MODE_READONLY	= 3,	/* hits; publish -EROFS */
};

enum kvmm_rights {
	KVMM_RO	= 1,
	KVMM_RW	= 2,
};

enum kvmm_node_kind {
	KVMM_NODE_HOST	= 1,		/* DRAM; mappable */
	KVMM_NODE_CUDA	= 2,		/* HBM; mappable */
	KVMM_NODE_NVME	= 3,		/* block */
	KVMM_NODE_REMOTE = 4,
};

/* How a group's pages are needed. */
enum kvmm_rule {
	KVMM_FULL	= 1,		/* all of [0, n) */
	KVMM_WINDOW	= 2,		/* [n - window_pages, n) */
	KVMM_LAST	= 3,		/* a snapshot at n */
	KVMM_BLOB	= 4,		/* one key, any length */
};

enum kvmm_seg_what {
	KVMM_SEG_K = 1, KVMM_SEG_V, KVMM_SEG_KV, KVMM_SEG_STATE,
	KVMM_SEG_SCALE, KVMM_SEG_INDEX,
};

/* What a rank holds of a segment on a gang. Elsewhere pages lie in one piece. */
enum kvmm_seg_shard {
	KVMM_MIRROR = 1,		/* every rank holds all of it */
	KVMM_STRIPE = 2,		/* equal parts by rank */
};

enum kvmm_hit_state {
	KVMM_MISS	= 0,
	KVMM_HIT	= 1,		/* on the asked node; pinned by match */
	KVMM_PENDING	= 2,		/* on its way, or not mapped here yet */
	KVMM_LOWER	= 3,		/* on another node: fetch */
	KVMM_SKIP	= 4,		/* not needed by the group's rule */
};

enum kvmm_end {
	KVMM_UNKNOWN	= 0,
	KVMM_ENDED	= 1,		/* the conversation is over */
	KVMM_CONTINUES	= 2,		/* comes back, as after a tool call */
};

enum kvmm_verdict {
	KVMM_BAD	= 1,		/* the bytes are not what the key says */
};

/* struct kvmm_engine.flags */
#define KVMM_LEADER	(1u << 0)	/* matches, allocates, publishes */
#define KVMM_NO_STEP	(1u << 1)	/* computes nothing: has no step word */

/* struct kvmm_desc.flags */
#define KVMM_MUST_JOIN	(1u << 0)	/* -EPROTO instead of a new space when one
					   of the same model and abi_tag exists */
/* struct kvmm_pub.flags */
#define KVMM_PUB_ROOT	(1u << 0)	/* a root of its own: no parent */
#define KVMM_PUB_CRC	(1u << 1)	/* @crc is CRC32C of the data: check it */

/* kvmm_alloc() flags */
#define KVMM_EVICT_OK	(1u << 0)	/* the want may evict cached pages: it
					   always may, so this changes nothing */

/* -- connection ------------------------------------------------------------ */

/**
 * struct kvmm_open_opts - how to connect
 * @size:	sizeof(struct kvmm_open_opts)
 * @flags:	0
 * @call_timeout_ns: bound of each set-up call; 0 = 2 s
 * @name:	program name shown by kvmmctl; NULL = the process's own
 */
struct kvmm_open_opts {
	uint32_t	size;
	uint32_t	flags;
	uint64_t	call_timeout_ns;
	const char	*name;
};

/**
 * kvmm_open() - connect to a kvmmd
 * @socket:	path; NULL = $KVMM_SOCKET, else /run/kvmm/default.sock
 * @opts:	NULL = defaults
 * @ret:	the connection; written on success only
 *
 * The socket decides tenant and rights. Context: any thread; blocks for one
 * round trip.
 * Return: 0, -ENOTCONN (nobody listens), -EPROTO (no common ABI), -EACCES,
 * -EUSERS (too many clients), -ETIMEDOUT, -EINVAL. The caller owns *@ret.
 */
KVMM_API int kvmm_open(const char *socket, const struct kvmm_open_opts *opts,
		       struct kvmm **ret);

/**
 * kvmm_close() - end a connection, its spaces, windows and requests
 * @k:	NULL is fine
 *
 * No handle made from @k may be used afterwards. Mappings go.
 */
KVMM_API void kvmm_close(struct kvmm *k);

/**
 * struct kvmm_engine - which engine this process is a member of
 * @size:	sizeof(struct kvmm_engine)
 * @flags:	%KVMM_LEADER, %KVMM_NO_STEP
 * @token:	the same 16 bytes in every member; bound to the socket
 * @rank:	of the members with a step word: 0 .. @world - 1
 * @world:	how many members have a step word
 */
struct kvmm_engine {
	uint32_t	size;
	uint32_t	flags;
	uint8_t		token[16];
	uint32_t	rank;
	uint32_t	world;
};

/**
 * kvmm_join() - become a member of an engine
 * @k:	connection with no space attached yet
 * @e:	copied
 *
 * Without it a process is an engine of one. References of an engine end when
 * all its members have exited.
 * Return: 0, -EPROTO (another world), -EEXIST (rank or leader taken), -EBUSY
 * (a member already, spaces are attached, or something is left of windows that
 * were closed),
 * -EOWNERDEAD (the engine is dying), -EINVAL, -ENOTCONN, -ETIMEDOUT.
 */
KVMM_API int kvmm_join(struct kvmm *k, const struct kvmm_engine *e);

/**
 * kvmm_fd() - a descriptor to wait on
 *
 * An epoll fd, readable when kvmm_poll() has something to do. Owned by @k.
 */
KVMM_API int kvmm_fd(struct kvmm *k);

/**
 * kvmm_next_deadline() - [H] until when the caller may sleep before kvmm_poll()
 *
 * Return: absolute CLOCK_MONOTONIC, ns; UINT64_MAX: as long as it likes.
 */
KVMM_API uint64_t kvmm_next_deadline(struct kvmm *k);

/**
 * struct kvmm_result - one page of a completion
 * @result:	0 or -errno
 * @frame:	where the page is; 0 = nowhere
 */
struct kvmm_result {
	int32_t		result;
	kvmm_frame_t	frame;
};

enum kvmm_op {
	KVMM_OP_PUBLISH	= 1,
	KVMM_OP_FETCH	= 2,
	KVMM_OP_PING	= 3,
	KVMM_OP_BLOB	= 4,
	KVMM_OP_FORK	= 5,
};

/**
 * struct kvmm_done - a completion
 * @tag:	the caller's
 * @op:		enum kvmm_op
 * @result:	0: look at the pages. Else all of it failed or, where a fetch is
 *		of several classes or of more than 4,096 pages, a part; each
 *		page's own result holds then, too. -ETIMEDOUT (the deadline
 *		passed and the library answered), -ECANCELED, -ENOTCONN (the
 *		daemon went), -ESHUTDOWN (it is about to), -EOWNERDEAD, -EAGAIN,
 *		-EINVAL, -EACCES (the daemon refused it), -EPROTO (it answered
 *		nonsense)
 * @first:	fetch: where the first page stands in the request's hits;
 *		publish, blob, fork: 0
 * @n:		elements of @res. A blob has one, whatever its length. Fetch:
 *		units [first, end) of the match's first group, then those of its
 *		second, and so on; of a BLOB its page
 * @res:	valid until the next kvmm_poll() of this connection
 */
struct kvmm_done {
	uint64_t		tag;
	uint32_t		op;
	int32_t			result;
	uint32_t		first;
	uint32_t		n;
	const struct kvmm_result *res;
};

/**
 * kvmm_poll() - take completions, run what waits for a step, reconnect
 * @k:		connection
 * @done:	written up to the return value
 * @max:	elements of @done
 *
 * Never blocks. No system call while the daemon is connected and neither side
 * sleeps. When it returned 0, kvmm_fd() becomes readable with the next thing to
 * do; for some 50 us after the last completion it is readable at once while an
 * operation is in flight, since a round through the caller's loop costs less
 * than a sleep. Wait for it level-triggered.
 * Return: completions taken; -ENOTCONN when the daemon is away and nothing is
 * left to take; -EOWNERDEAD when the engine is dying and nothing is left.
 */
KVMM_API int kvmm_poll(struct kvmm *k, struct kvmm_done *done,
		       unsigned int max);

/**
 * kvmm_ping() - [H] a round trip through the rings
 * @tag:	comes back as %KVMM_OP_PING
 * Return: 0, -EAGAIN (ring full), -ENOTCONN, -ENOMEM.
 */
KVMM_API int kvmm_ping(struct kvmm *k, uint64_t tag);

/**
 * kvmm_epoch() - [H] changes when a daemon was replaced by one that knew nothing
 *
 * One that took over what its predecessor had goes on with its epoch: windows,
 * frames, pins and requests are as they were, only what was in flight has ended
 * with -ENOTCONN. Nor does it change when the daemon has cut us off, for breaking
 * the protocol or a limit, and we come again: but requests from before are -ESTALE
 * then, and kvmm_win_sync() attaches again.
 */
KVMM_API uint64_t kvmm_epoch(const struct kvmm *k);

/** kvmm_error() - this thread's last sentence; "" when there was none */
KVMM_API const char *kvmm_error(const struct kvmm *k);

/**
 * struct kvmm_node_info - one node
 * @below:	node it demotes to, %KVMM_NODE_NONE
 * @gang:	0, or how many ranks its frames are for: they have a part for
 *		each. Sizes are of all parts
 */
struct kvmm_node_info {
	char		name[16];
	uint8_t		kind;		/* enum kvmm_node_kind */
	uint8_t		below;
	uint8_t		gang;
	uint8_t		spare[5];
	uint64_t	size_bytes;
	uint64_t	extent_bytes;
};

struct kvmm_info {
	uint32_t	size;		/* in: sizeof(struct kvmm_info) */
	uint32_t	abi;
	uint32_t	rights;		/* enum kvmm_rights */
	uint32_t	nr_nodes;
	uint64_t	epoch;
	char		tenant[64];
	char		daemon_version[16];
	char		library_version[16];
	struct kvmm_node_info node[16];
};

/** kvmm_info() - versions, tenant, rights and nodes, as of the last connect */
KVMM_API int kvmm_info(struct kvmm *k, struct kvmm_info *info);

/** kvmm_node_find() - index of a node by name; -ENOENT */
KVMM_API int kvmm_node_find(struct kvmm *k, const char *name);

/* -- step words: the only fence -------------------------------------------- */

/**
 * kvmm_step_done() - [H] all device and CPU work up to @step is complete
 * @step: monotonic; a smaller one than before is ignored
 *
 * Runs unpins that waited for it. Rings only if the daemon waits for this step.
 * Return: 0 or -ECHILD.
 */
KVMM_API int kvmm_step_done(struct kvmm *k, uint64_t step);

/**
 * kvmm_step_word() - the word itself, a cache line of its own; NULL if none
 *
 * Stays valid until kvmm_close(), but it is another one after a change of
 * kvmm_epoch(): ask again then. What is written to an older one counts as well,
 * from the next kvmm_poll() on.
 */
KVMM_API uint64_t *kvmm_step_word(struct kvmm *k);

/**
 * kvmm_step_engine() - [H] the engine's step: the minimum over its members
 *
 * 0 until kvmm_poll() has heard of all of them; pins that wait for a step then
 * wait, too.
 */
KVMM_API uint64_t kvmm_step_engine(const struct kvmm *k);

/* -- what the members of an engine agree on -------------------------------- */

/**
 * kvmm_agree_post() - [H] the leader's decision for a step
 * @step:	each once; a decision is kept until that of @step + 1,024
 * @v:		@n values, 1 to 64; what they mean is the engine's
 *
 * Goes on while the daemon is away, stopped or being replaced.
 * Return: 0; -EPERM (not the leader); -EINVAL; -EEXIST (posted already); -ESTALE
 * (that of @step + 1,024, or a later one in its place, was posted before);
 * -EOWNERDEAD (nothing was posted).
 */
KVMM_API int kvmm_agree_post(struct kvmm *k, uint64_t step, const uint64_t *v,
			     unsigned int n);

/**
 * kvmm_agree_get() - [H] exactly that decision, by a deadline
 * @step:	of kvmm_agree_post()
 * @v:		written on success only
 * @n:		as posted
 * @deadline_ns: absolute CLOCK_MONOTONIC; 0 = look once
 *
 * No system call when it is there; else this spins for some 50 us, then sleeps
 * for as long a time and looks again. What was posted before a member died is
 * got by all. Without kvmm_join() a process posts and gets its own.
 * Return: 0; -ETIMEDOUT; -EOWNERDEAD (a member is gone, and nobody decided on
 * @step before); -ESTALE (overwritten already); -EMSGSIZE (posted with another
 * @n); -EINVAL.
 */
KVMM_API int kvmm_agree_get(struct kvmm *k, uint64_t step, uint64_t *v,
			    unsigned int n, uint64_t deadline_ns);

/**
 * kvmm_agree_min() - [H] publish an own counter, read the members' minimum
 * @slot:	0 to 63
 * @mine:	this member's value from now on; one with %KVMM_NO_STEP has none
 *		and only reads
 * @min:	over the members that have a step word; 0 until kvmm_poll() has
 *		heard of all of them. A counter that was never published is 0
 *
 * Return: 0; -EINVAL; -EOWNERDEAD (a member is gone; @min is written).
 */
KVMM_API int kvmm_agree_min(struct kvmm *k, unsigned int slot, uint64_t mine,
			    uint64_t *min);

/* -- spaces ---------------------------------------------------------------- */

/**
 * struct kvmm_seg - a part of a page
 * @bytes:	of the whole gang: of %KVMM_STRIPE each rank has bytes / world, of
 *		%KVMM_MIRROR all
 * @align:	power of two; also of each rank's share
 * @layer:	of the model
 * @what:	enum kvmm_seg_what
 * @shard:	enum kvmm_seg_shard
 *
 * In one piece - on a node that is no gang, below it, and for @crc of struct
 * kvmm_pub - a page is its segments one after the other, a stripe the shares of
 * ranks 0, 1, ... in turn, a mirror once: rank 0's.
 */
struct kvmm_seg {
	uint32_t	bytes;
	uint32_t	align;
	uint16_t	layer;
	uint8_t		what;
	uint8_t		shard;
};

struct kvmm_class {
	const char	*name;
	uint32_t	page_bytes;	/* = sum of the segments' bytes */
	uint32_t	nsegs;
	const struct kvmm_seg *segs;
};

struct kvmm_group {
	uint16_t	class_ix;
	uint8_t		rule;		/* enum kvmm_rule */
	uint8_t		spare;
	uint32_t	block_tokens;	/* tokens of a page */
	uint32_t	window_pages;	/* WINDOW only */
};

/**
 * struct kvmm_desc - what a space is
 * @size:	sizeof(struct kvmm_desc)
 * @flags:	%KVMM_MUST_JOIN; not part of the identity
 *
 * Every other field is part of the identity, and so is the tenant of the
 * socket: two processes share pages if and only if all of it is equal. Strings
 * are UTF-8 without control characters; NULL is "".
 */
struct kvmm_desc {
	uint32_t	size;
	uint32_t	flags;
	const char	*model;
	const char	*revision;
	const char	*kv_dtype;
	const char	*scale_format;
	const char	*layout;
	const char	*abi_tag;
	const char	*salt;
	uint16_t	world;		/* ranks a page is sharded over, >= 1 */
	uint16_t	nclasses;
	uint16_t	ngroups;
	uint16_t	spare;
	const struct kvmm_class *classes;
	const struct kvmm_group *groups;
};

/**
 * kvmm_space_attach() - create or join a space
 * @desc:	copied
 *
 * Return: 0; -EINVAL (the sentence names the field, as when a class's segments
 * do not sum to its page_bytes); -EBUSY (attached already); -EPROTO (a member of
 * the same engine described it otherwise, or %KVMM_MUST_JOIN); -ENOENT (a
 * read-only client and no such space); -ENOSPC; -EUSERS (256 spaces); -ENOTCONN;
 * -ETIMEDOUT.
 * The caller owns *@ret: kvmm_space_detach().
 */
KVMM_API int kvmm_space_attach(struct kvmm *k, const struct kvmm_desc *desc,
			       struct kvmm_space **ret);

/** kvmm_space_detach() - leave; ends its requests, closes its windows */
KVMM_API void kvmm_space_detach(struct kvmm_space *sp);

/** kvmm_space_id() - SHA-256 of the canonical descriptor and the tenant */
KVMM_API int kvmm_space_id(const struct kvmm_space *sp, uint8_t id[32]);

/** kvmm_mode() - [H] enum kvmm_mode of the space, now; without a daemon, last */
KVMM_API int kvmm_mode(const struct kvmm_space *sp);

/**
 * kvmm_key_chain() - keys of a token sequence, pure
 * @parent:	key before the first block; NULL = the space itself
 * @tok:	@n tokens; only whole blocks of @block tokens get a key
 * @extra:	mixed into every key (LoRA, image hashes), @nextra bytes
 * @out:	@n / @block keys
 *
 * key = SHA-256("kvmm-key-1", parent or space id, u32 n, tokens, u32 nextra,
 * extra), integers little-endian, n = @block.
 * Return: number of keys, or -EINVAL.
 */
KVMM_API int kvmm_key_chain(const struct kvmm_space *sp,
			    const struct kvmm_key *parent,
			    const uint32_t *tok, size_t n, unsigned int block,
			    const void *extra, size_t nextra,
			    struct kvmm_key *out);

/**
 * kvmm_key_wrap() - a key from an engine's own block hash, pure
 *
 * key = SHA-256("kvmm-wrap-1", space id, u32 len, hash), little-endian.
 * Return: 0 or -EINVAL.
 */
KVMM_API int kvmm_key_wrap(const struct kvmm_space *sp, const void *hash,
			   size_t len, struct kvmm_key *out);

/* -- windows --------------------------------------------------------------- */

/**
 * struct kvmm_win_opts - what a window should be like
 * @size:	sizeof(struct kvmm_win_opts)
 * @rights:	%KVMM_RO or %KVMM_RW; 0 = what the socket grants
 * @max_frames:	address space to reserve; 0 = the node's largest
 * @spare:	0
 * @on_extent:	called in win_open/win_sync/win_close when an extent comes
 *		(@up = 1, mapped) or goes (@up = 0, still mapped); may be NULL.
 *		It must make no set-up call on the same connection, nor close a
 *		window or detach
 * @arg:	for @on_extent; valid until it cannot come any more, see
 *		kvmm_win_close()
 */
struct kvmm_win_opts {
	uint32_t	size;
	uint32_t	rights;
	uint32_t	max_frames;
	uint32_t	spare;
	void		(*on_extent)(void *arg, void *ptr, size_t bytes, int up);
	void		*arg;
};

/**
 * kvmm_win_open() - map a class's frames on a node into this process
 *
 * On a gang (&kvmm_node_info.gang) a rank maps its own part of each frame, and
 * frame numbers are the same for all ranks: a page is published, hit, fetched
 * and freed for all of them at once. All of the ranks open the window. A member
 * with %KVMM_NO_STEP maps nothing: it matches, allocates, fetches and publishes
 * by number, kvmm_win_base() and kvmm_win_ptr() are NULL, on_extent does not
 * come. It calls kvmm_win_sync() like the others.
 *
 * Return: 0, -EINVAL (no such class or node, or it cannot be mapped; a gang of
 * another world than the space's or the engine's, or no engine was joined),
 * -EACCES, -EBUSY (open already), -ENOSPC, -ENOMEM, -ESTALE (the daemon was
 * replaced: kvmm_win_sync() of an open window, or attach again), -ENOTCONN,
 * -ETIMEDOUT.
 * The caller owns *@ret: kvmm_win_close().
 */
KVMM_API int kvmm_win_open(struct kvmm_space *sp, unsigned int cls,
			   kvmm_node_t node, const struct kvmm_win_opts *opts,
			   struct kvmm_win **ret);

/**
 * kvmm_win_close() - unmap; no request may use its frames any more
 *
 * If a set-up call of another thread takes longer than call_timeout_ns, that
 * thread closes the window at its call's end, and on_extent may come from there.
 * The same holds for kvmm_space_detach().
 */
KVMM_API void kvmm_win_close(struct kvmm_win *w);

/**
 * kvmm_win_base() - [H] address of segment @seg of frame 0
 *
 * Fixed for the window's life, also over a change of daemon. Frame f lies at
 * base + f * kvmm_win_stride(). Frame 0 is private scratch of this process. On a
 * gang it is this rank's share of the segment; NULL for a member that maps
 * nothing.
 */
KVMM_API void *kvmm_win_base(const struct kvmm_win *w, unsigned int seg);

/** kvmm_win_stride() - [H] bytes from frame to frame in segment @seg */
KVMM_API size_t kvmm_win_stride(const struct kvmm_win *w, unsigned int seg);

/** kvmm_win_ptr() - [H] segment of a frame; NULL if it is not mapped here */
KVMM_API void *kvmm_win_ptr(const struct kvmm_win *w, unsigned int seg,
			    kvmm_frame_t frame);

/**
 * kvmm_win_sync() - apply growth, give up extents
 * @step: the last completed step: nothing that was launched up to it, and
 *	  nothing later, touches an extent that is given up here
 *
 * The only call that maps or unmaps. No system call when nothing changed, or
 * while the daemon is away: then it returns 0.
 * After a change of daemon it attaches again, once the old requests have ended
 * and every step is done that an end, a trim or a free of theirs named: by the
 * engine's word or by @step. Floors of kvmm_reserve() are asked for again; one
 * that is refused is 0 in kvmm_avail() from then on.
 * Return: extents that came or went; -EBUSY (old requests are still open, or
 * steps that named their frames still run);
 * -ENOTCONN (it went meanwhile, or the window waits to be opened again);
 * -ETIMEDOUT; -ENOMEM; when it attaches again, also what kvmm_space_attach() and
 * kvmm_win_open() return.
 */
KVMM_API int kvmm_win_sync(struct kvmm_win *w, uint64_t step);

/**
 * kvmm_reserve() - a floor of frames for this engine
 * @frames: OPEN and pinned frames up to which an allocation cannot be refused
 *	    in favour of others; replaces the earlier value
 *
 * A right, not memory taken from the cache.
 * Ends with the window, the connection or the first member of the engine.
 * Return: 0, -ENOSPC (the sentence says who holds the rest), -EINVAL, -EACCES
 * (read-only), -EOWNERDEAD, -ESTALE (the daemon was replaced: kvmm_win_sync()
 * attaches again), -ENOTCONN, -ETIMEDOUT.
 */
KVMM_API int kvmm_reserve(struct kvmm_space *sp, unsigned int cls,
			  kvmm_node_t node, uint32_t frames);

/**
 * struct kvmm_avail - frames, as the daemon last published them
 * @now:	in this process's hands or free on the node
 * @clean:	pages that are dropped without a write, pinned ones among them
 * @dirty:	pages that must be written first, pinned ones among them
 * @floor:	this engine's reserve
 * @limit:	that the tenant may hold
 *
 * Nobody counts pins: @now + @clean + @dirty is what could be had if no page were
 * pinned, by this engine or by another one. An engine knows what it holds itself;
 * of what others hold only kvmm_alloc() can tell.
 */
struct kvmm_avail {
	uint32_t	size;
	uint32_t	now;
	uint32_t	clean;
	uint32_t	dirty;
	uint32_t	floor;
	uint32_t	limit;
};

/** kvmm_avail() - [H] Return: 0 or -EINVAL (no window on it here). */
KVMM_API int kvmm_avail(const struct kvmm_space *sp, unsigned int cls,
			kvmm_node_t node, struct kvmm_avail *av);

/* -- requests -------------------------------------------------------------- */

/**
 * struct kvmm_hint - what the engine knows of a request
 * @size:	sizeof(struct kvmm_hint)
 * @priority:	0 = normal; nothing looks at it yet
 * @session:	conversation; 0 = unknown
 * @expect_return_ms: after which the conversation is expected back; 0 = unknown
 */
struct kvmm_hint {
	uint32_t	size;
	int32_t		priority;
	uint64_t	session;
	uint32_t	expect_return_ms;
	uint32_t	spare;
};

/**
 * kvmm_req_open() - [H] begin a request
 * @id:		the engine's own number, for people and for the ranks
 * @hint:	copied; may be NULL
 *
 * Without a daemon, or before kvmm_win_sync() has attached to the next one, it
 * finds nothing and gets no frames, and goes on as any other once there is one.
 * Return: 0, -EAGAIN (all request slots are taken), -EINVAL, -ENOMEM.
 */
KVMM_API int kvmm_req_open(struct kvmm_space *sp, uint64_t id,
			   const struct kvmm_hint *hint, struct kvmm_req **ret);

/**
 * struct kvmm_keys - the keys of one group
 * @k:		one per page, from the sequence's start
 * @n:		elements
 * @group:	of the space
 */
struct kvmm_keys {
	const struct kvmm_key *k;
	uint32_t	n;
	uint16_t	group;
	uint16_t	spare;
};

/**
 * struct kvmm_hit - one page of a match
 * @frame:	HIT: its frame on the asked node; else 0
 * @eta_us:	LOWER, PENDING: estimated time to load it
 * @state:	enum kvmm_hit_state
 * @node:	where it is; %KVMM_NODE_NONE: nowhere, or it was not looked for
 * @group:	of the keys
 */
struct kvmm_hit {
	kvmm_frame_t	frame;
	uint32_t	eta_us;
	uint8_t		state;
	uint8_t		node;
	uint16_t	group;
};

/**
 * struct kvmm_match - the joint answer for all groups
 * @size:	in: sizeof(struct kvmm_match)
 * @n_pages:	usable anywhere
 * @n_resident:	usable on the asked node now; match pinned them
 * @n_load:	advised: fetch up to here, recompute the rest
 * @load_us:	estimated time of that fetch
 * @recompute_us: estimated time to recompute the same pages
 * @sync_wanted: a page lies in an extent that is not mapped: kvmm_win_sync()
 *
 * Lengths count units of the least common multiple of the block_tokens of the
 * groups that are asked for, BLOBs aside.
 * n is the largest length for which every FULL group has [0, n), every WINDOW
 * its last window_pages pages, every LAST a snapshot at n.
 */
struct kvmm_match {
	uint32_t	size;
	uint32_t	n_pages;
	uint32_t	n_resident;
	uint32_t	n_load;
	uint32_t	load_us;
	uint32_t	recompute_us;
	uint32_t	sync_wanted;
};

/**
 * kvmm_peek() - [H] what a match would find; no pins, no touch, repeatable
 * @m:	written
 *
 * Without kvmm_poll() it ages as kvmm_match() does.
 * Return: 0, -EINVAL, -ENOMEM, -EOWNERDEAD, -ECHILD.
 */
KVMM_API int kvmm_peek(struct kvmm_req *rq, const struct kvmm_keys *keys,
		       unsigned int ngroups, kvmm_node_t node,
		       struct kvmm_match *m);

/**
 * kvmm_match() - [H] find and pin the longest usable prefix
 * @keys:	@ngroups arrays, each group of the space at most once; 4 Mi keys in
 *		all at most
 * @node:	where the pages are wanted
 * @hits:	one per key, concatenated in the order of @keys
 * @m:		written
 *
 * Replaces an earlier match of the same request: its pins go at once, so no
 * step in flight may read pages that only it had. @keys are copied. A BLOB group
 * has one key, does not count in lengths, and is pinned when it is there; asked
 * for alone, n_pages and n_resident are 1 or 0.
 *
 * A page that is on the node, but beyond a length that all groups have there,
 * is PENDING with @eta_us 0: it is not pinned, and a fetch costs no read.
 *
 * When the space's index has grown, the new one comes with kvmm_poll(). A client
 * that never polls looks on into the old one, to which nothing is added: what
 * was published or loaded since is a MISS, and with time everything is. It never
 * is wrong bytes, since each frame's own word decides after the pin. Likewise it
 * goes on to hit what a daemon left that is gone, until kvmm_poll() notices.
 * Return: 0, -EINVAL (also: no window is open on a group's class at @node),
 * -ENOMEM, -EOWNERDEAD, -ECHILD.
 */
KVMM_API int kvmm_match(struct kvmm_req *rq, const struct kvmm_keys *keys,
			unsigned int ngroups, kvmm_node_t node,
			struct kvmm_hit *hits, struct kvmm_match *m);

/**
 * kvmm_match_get() - [H] what the leader's last match of a request found
 * @id:		of kvmm_req_open() in the leader
 * @hits:	as kvmm_match() gave them to it; at most @max are written
 * @m:		likewise
 *
 * For the engine's other members, in the same space. The frames are pinned by
 * the leader until it ends the request or frees them, and no longer: nothing is
 * pinned here.
 * A later kvmm_match() or kvmm_trim() of the leader replaces it.
 * Return: hits of that match, which may be more than @max; -EAGAIN (none, or
 * none any more: a very long one, or one so old that 4 MiB of others followed,
 * is forgotten before its request ends); -EOWNERDEAD; -EINVAL. @hits may have
 * been written to in either case.
 */
KVMM_API int kvmm_match_get(struct kvmm_space *sp, uint64_t id,
			    struct kvmm_hit *hits, unsigned int max,
			    struct kvmm_match *m);

/**
 * kvmm_trim() - [H] keep the pins of the first @n units only
 * @after: last launched step that reads the others; 0 = none
 *
 * Pages that it published stay pinned until its end.
 * Return: 0 or -ECHILD.
 */
KVMM_API int kvmm_trim(struct kvmm_req *rq, unsigned int n, uint64_t after);

/**
 * kvmm_req_fork() - [H] a second request that goes on from where this one is
 * @child_id:	as the id of kvmm_req_open(); hint and space are the parent's
 * @node:	where the tails are
 * @tail:	@n frames by group, @n up to the space's groups: the page that is
 *		being written, an OPEN frame of this request; 0: the group has none
 * @after:	last launched step that writes what the child needs of them
 * @tag:	of the completion
 * @child:	written on success only; the caller's: kvmm_req_end()
 *
 * The child has the parent's last match, and pins of its own on all that the
 * parent has pinned, but for blobs that it has mapped or committed: no copy, and the parent
 * may end first. For each tail it gets a frame of its own, to which the daemon
 * copies the tail once every member has completed @after. Meanwhile the parent
 * may write on, behind what @after wrote, fork again, publish the tail, free it,
 * or end. Forks complete in any order. What else the parent has as OPEN frames,
 * such as a full page whose publish was refused, stays the parent's own and goes
 * with it.
 *
 * %KVMM_OP_FORK has one result a tail, in the order of @tail: the new frame, and
 * 0 (it is the child's OPEN frame with the tail's bytes) or what went wrong: it
 * is the child's OPEN frame all the same, with undefined bytes, to be computed
 * again or freed. After -ENOTCONN or -EPROTO bytes may still be copied to it: do not use it.
 * Before the completion nobody may use it.
 * Return: tails that are being copied; 0: there were none, and no completion
 * comes. -EAGAIN (not enough frames: recorded and asked for as by kvmm_alloc();
 * ring full; no request slot), -EBUSY (an operation of the parent is in flight,
 * and what it will have pinned is not known: poll first), -EINVAL, -EACCES
 * (read-only), -EOWNERDEAD, -ENOTCONN, -ESTALE, -ENOMEM: nothing was done.
 */
KVMM_API int kvmm_req_fork(struct kvmm_req *rq, uint64_t child_id,
			   kvmm_node_t node, const kvmm_frame_t *tail,
			   unsigned int n, uint64_t after, uint64_t tag,
			   struct kvmm_req **child);

/**
 * kvmm_req_end() - [H] end a request
 * @how:	enum kvmm_end
 * @after:	last launched step that uses its frames; 0 = none
 *
 * Drops its pins after that step, frees what was not published. @rq is gone.
 * In mode observe, and while the space is traced, the daemon is told which keys
 * it asked for last: those of its last match or peek, whichever had more.
 * Completions of what it has in flight still come, pin nothing, and leave
 * nothing behind. Never fails: what it returns is 0, or -ECHILD.
 */
KVMM_API int kvmm_req_end(struct kvmm_req *rq, int how, uint64_t after);

/* -- frames ---------------------------------------------------------------- */

/**
 * kvmm_alloc() - [H] take OPEN frames from the magazine
 * @n:		all or nothing
 *
 * While the daemon is away there is what its magazine holds, and then -EAGAIN;
 * -EAGAIN also before kvmm_win_sync() has attached to the next one. A request of
 * a daemon that was replaced gets nothing more, for good: end it.
 * Return: 0, -EAGAIN (recorded and asked for; wait on kvmm_fd() or preempt),
 * -EACCES (read-only), -EINVAL (no window), -EOWNERDEAD, -ENOMEM.
 */
KVMM_API int kvmm_alloc(struct kvmm_req *rq, unsigned int cls,
			kvmm_node_t node, unsigned int n, kvmm_frame_t *frames,
			unsigned int flags);

/**
 * kvmm_free() - [H] give back frames that the request does not use any more
 * @cls:	class and
 * @node:	node that they are of: numbers are per (class, node)
 * @after:	last launched step that uses them; this process may get OPEN ones
 *		again at once, others only after it
 *
 * What was not published is free again. Of pages that it found, fetched or
 * published the request's pin goes, after @after: that is how what has passed
 * out of a sliding window is given up before the request's end. A page whose
 * publish is in flight is neither yet.
 * Return: 0, or -EINVAL at the first that is neither an OPEN frame nor a pinned
 * page of this request (those before it are given back).
 */
KVMM_API int kvmm_free(struct kvmm_req *rq, unsigned int cls, kvmm_node_t node,
		       const kvmm_frame_t *frames, unsigned int n,
		       uint64_t after);

/**
 * struct kvmm_pub - a page to publish
 * @key:	its name
 * @parent:	its parent's key; all zero: the sequence starts here
 * @frame:	OPEN, from kvmm_alloc() of this request
 * @pos:	first token's position
 * @cost_us:	what recomputing it costs; 0 = unknown
 * @crc:	CRC32C of the page if %KVMM_PUB_CRC. Checked when it is sealed,
 *		and again when the page is first copied out of the memory that
 *		it was published in: one that was written to in between is
 *		dropped, and counted (pgbreach in `kvmmctl status`)
 * @group:	of the space
 * @flags:	%KVMM_PUB_ROOT, %KVMM_PUB_CRC
 * @after:	last launched step that writes it; 0 = it is written
 */
struct kvmm_pub {
	struct kvmm_key	key;
	struct kvmm_key	parent;
	kvmm_frame_t	frame;
	uint32_t	pos;
	uint32_t	cost_us;
	uint32_t	crc;
	uint16_t	group;
	uint16_t	flags;
	uint32_t	spare;
	uint64_t	after;
};

/**
 * kvmm_publish() - [H] seal pages in place and let others find them
 * @node:	node of the frames
 * @pub:	@n pages of one class, at most 4,096; read before the call returns
 * @tag:	of the completion
 *
 * A page becomes findable when every member has completed its @after, and not
 * before its parent, which may stand before it in @pub or be in flight. The
 * request holds a pin on it until its end.
 *
 * Per page: 0 and its frame; 0 and no frame (mode observe: it stays mine);
 * -EEXIST (somebody's page was first: @frame stays mine, the result names the
 * canonical frame, pinned for this request, or 0 if it has gone again); -ESTALE
 * (in a FULL group: its parent is in no node); -EBADMSG (@crc does not match);
 * -EROFS, -EAGAIN (mode); -EACCES; -EINVAL (not my OPEN frame); -ENOMEM; of these
 * it stays mine. -ENOTCONN, -EPROTO (nobody knows whether it was sealed, and
 * others may be reading it: it can be read and given back as a sealed page can,
 * but is not to be written to, and comes out of kvmm_alloc() no more).
 * Return: 0 (posted), -EAGAIN (ring full), -EACCES, -EROFS, -EINVAL, -ENOTCONN,
 * -ESTALE (a request of a former daemon), -EOWNERDEAD, -ENOMEM.
 */
KVMM_API int kvmm_publish(struct kvmm_req *rq, kvmm_node_t node,
			  const struct kvmm_pub *pub, unsigned int n,
			  uint64_t tag);

/**
 * kvmm_fetch() - [H] bring pages of the last match to @node
 * @first:	units [@first, @end) of what the match was asked for, all groups,
 *		whether it found them or not; of a WINDOW or LAST group what
 *		length @end needs, of a BLOB its page
 * @deadline_ns: absolute CLOCK_MONOTONIC; 0 = as long as recomputing these
 *		pages would take, 2 s where nobody gave a cost. What is not
 *		there by then is a miss; the completion comes in time
 * @tag:	of the completion
 *
 * Single flight over all processes. Per page: 0 and the frame, pinned for this
 * request as a hit of that match is; 0 and no frame (not needed); -ENOENT (gone,
 * unreadable or late: recompute), -EAGAIN (target full of pins, or no room to
 * ask: recompute), -ETIMEDOUT (late, and so was the daemon: recompute), or what
 * else &kvmm_done.result may be. A frame may lie in an extent that is not mapped
 * yet: kvmm_win_sync().
 * Return: 0 (posted), -EAGAIN (ring full), -EINVAL, -ENOTCONN, -ESTALE,
 * -EOWNERDEAD, -ENOMEM.
 */
KVMM_API int kvmm_fetch(struct kvmm_req *rq, unsigned int first,
			unsigned int end, kvmm_node_t node,
			uint64_t deadline_ns, uint64_t tag);

/**
 * kvmm_cancel() - give up a fetch, a publish, a commit or a fork
 *
 * Its completion comes once, as -ECANCELED or done.
 * Return: 0, -ENOENT (not in flight), -EAGAIN, -ENOTCONN.
 */
KVMM_API int kvmm_cancel(struct kvmm *k, uint64_t tag);

/**
 * kvmm_report() - the bytes of a page are bad
 * @page:	index in the last match's hits
 * @verdict:	enum kvmm_verdict
 *
 * The page is dropped everywhere and counted.
 * Return: 0 (posted), -EAGAIN (ring full), -EINVAL, -ENOTCONN.
 */
KVMM_API int kvmm_report(struct kvmm_req *rq, unsigned int page, int verdict);

/**
 * kvmm_read() - copy a pinned page out, in the caller's thread
 * @page:	index in the last match's hits
 *
 * On a gang this rank's part of it: its shares of the segments in order, each
 * where its alignment allows, as from kvmm_win_base() of the first on.
 * Return: bytes copied, -ENOENT (not a hit, or not mapped: kvmm_win_sync()),
 * -EINVAL (no such page; a member that maps nothing).
 */
KVMM_API int kvmm_read(struct kvmm_req *rq, unsigned int page,
		       const struct iovec *iov, int n);

/**
 * kvmm_write() - copy into an OPEN frame of this request
 *
 * On a gang into this rank's part of it, see kvmm_read().
 * Return: bytes copied, -EINVAL (not mine, or it does not fit).
 */
KVMM_API int kvmm_write(struct kvmm_req *rq, unsigned int cls,
			kvmm_node_t node, kvmm_frame_t frame,
			const struct iovec *iov, int n);

/* -- blobs ------------------------------------------------------------------ */

/*
 * State of any length under one key: what an engine can write out and read back
 * in one piece (a llama.cpp sequence, a Mamba snapshot). In groups of rule LAST
 * (checkpoints along a sequence, of which a match finds the deepest) and BLOB.
 *
 * A blob lies in as many pages of its group's class as it takes. Nobody finds a
 * part of it, and what one writer began and another ended is never one blob. It
 * goes down and comes up page by page, but it is there as a whole or not at all.
 *
 * To restore and to save at every 256th token:
 *
 *	n = kvmm_key_chain(sp, NULL, tok, ntok, 256, NULL, 0, key);
 *	kvmm_match(rq, &(struct kvmm_keys){ .k = key, .n = n, .group = STATE },
 *		   1, dram, hit, &m);
 *	if (m.n_pages &&
 *	    !kvmm_blob_map(rq, m.n_pages - 1, deadline, &b)) {
 *		if (!restore(kvmm_blob_ptr(b), kvmm_blob_len(b)))
 *			kvmm_report(rq, m.n_pages - 1, KVMM_BAD);
 *		kvmm_blob_put(b);
 *	}
 *	... compute from token m.n_pages * 256 on ...
 *	err = kvmm_blob_begin(rq, STATE, dram, &key[n - 1], NULL, most, &b);
 *	if (!err) {
 *		len = save(kvmm_blob_ptr(b), most);
 *		err = kvmm_blob_commit(b, len, cost_us, 0, tag);
 *		if (err)
 *			kvmm_blob_abort(b);
 *	}			... else without saving: -EEXIST, -EAGAIN ...
 *	kvmm_req_end(rq, KVMM_CONTINUES, 0);
 *
 * What a match says of load_us is of a blob's first page alone.
 */

/**
 * kvmm_blob_begin() - memory to write a blob into
 * @group:	of rule LAST or BLOB. If the blob takes more than one page, the
 *		class's page_bytes must be a multiple of 4,096
 * @key:	copied, as @parent is
 * @parent:	the blob that this one goes on from, a hint; NULL: none
 * @len:	bytes that it will have at most; with 64 more at most 32,768 pages
 * @ret:	written on success only
 *
 * Takes OPEN frames of the window on (class, @node) and gives memory that is
 * contiguous over them: the window's own, where they lie one behind the other;
 * else a second mapping of them, which costs a system call for each run. If the
 * kernel refuses that, memory of this process, which kvmm_blob_commit() copies.
 *
 * Return: 0; -EEXIST (there is one of this key); -EAGAIN (no frames: as
 * kvmm_alloc(), recorded and asked for, all or nothing), -EINVAL, -EACCES,
 * -EOPNOTSUPP (@node is a gang), -EOWNERDEAD, -ENOMEM. The caller owns *@ret:
 * kvmm_blob_commit() or kvmm_blob_abort(); kvmm_req_end() aborts it.
 */
KVMM_API int kvmm_blob_begin(struct kvmm_req *rq, unsigned int group,
			     kvmm_node_t node, const struct kvmm_key *key,
			     const struct kvmm_key *parent, uint64_t len,
			     struct kvmm_blob **ret);

/**
 * kvmm_blob_commit() - let others find it
 * @b:		from kvmm_blob_begin()
 * @len:	bytes that it has, up to those it was begun with; frames that
 *		this does not need are free
 * @cost_us:	what recomputing it costs; 0 = unknown
 * @after:	last launched step that writes it; 0 = it is written
 * @tag:	of the completion, %KVMM_OP_BLOB with one result: 0 and the frame
 *		of its head; 0 and no frame in mode observe; -EEXIST, and the head
 *		of the blob that was first, pinned for this request, or 0; or what
 *		went wrong with the first of its pages, as for kvmm_publish()
 *
 * On success @b is gone and its memory no longer the caller's, but that of a
 * step up to @after until the request's end. The request holds pins on a blob
 * that was published until its end; of one that was not nothing stays.
 * Return: 0 (posted); -EAGAIN (ring full; mode bypass; or the memory is a copy
 * and step @after is not done), -EROFS, -EACCES, -EINVAL, -ENOTCONN, -ESTALE (a
 * request of a former daemon, a window that was closed), -EOWNERDEAD, -ENOMEM:
 * @b is as it was.
 */
KVMM_API int kvmm_blob_commit(struct kvmm_blob *b, uint64_t len,
			      uint32_t cost_us, uint64_t after, uint64_t tag);

/**
 * kvmm_blob_abort() - give it up; nothing writes to it any more
 * @b:	from kvmm_blob_begin(), not committed; NULL is fine
 */
KVMM_API void kvmm_blob_abort(struct kvmm_blob *b);

/**
 * kvmm_blob_map() - a blob in one piece, pinned
 * @page:	index in the last match's hits; of a LAST group that was asked for
 *		alone n_pages - 1
 * @deadline_ns: absolute CLOCK_MONOTONIC: what is not on the match's node by
 *		then is late. 0: do not wait
 * @ret:	written on success only
 *
 * Blocks until @deadline_ns at most, if parts of it have to be loaded; this is
 * no hot call then. Completions that come meanwhile are kept for kvmm_poll().
 * The memory is found and made contiguous as in kvmm_blob_begin(), and is not to
 * be written to. It stays until kvmm_blob_put(), or until the request's end and
 * the step that this names; where it is the window's own, at most until
 * kvmm_win_close(). A later match or trim changes nothing, nor does the end of
 * the daemon.
 *
 * Return: 0; -ENOENT (it is not there, or not all of it any more), -EBADMSG (the
 * page is no blob), -ETIMEDOUT (late), -EAGAIN (parts of it are not on the node
 * and @deadline_ns is 0; no frames to load them into; or kvmm_win_sync() is
 * needed), -EOPNOTSUPP (a gang), -EINVAL, -ENOTCONN, -ESTALE, -EOWNERDEAD,
 * -ENOMEM. Nothing is pinned then but what the match has. The caller owns *@ret.
 */
KVMM_API int kvmm_blob_map(struct kvmm_req *rq, unsigned int page,
			   uint64_t deadline_ns, struct kvmm_blob **ret);

/** kvmm_blob_ptr() - [H] its first byte, aligned to 64 */
KVMM_API void *kvmm_blob_ptr(const struct kvmm_blob *b);

/** kvmm_blob_len() - [H] bytes: those it was begun with, or has */
KVMM_API uint64_t kvmm_blob_len(const struct kvmm_blob *b);

/**
 * kvmm_blob_put() - let go of a mapped blob, before the request's end
 * @b:	from kvmm_blob_map(); NULL is fine
 */
KVMM_API void kvmm_blob_put(struct kvmm_blob *b);

/* -- observation ----------------------------------------------------------- */

/**
 * struct kvmm_stats - this connection's counters since kvmm_open()
 * @connected:	1 while a daemon answers
 */
struct kvmm_stats {
	uint32_t	size;		/* in: sizeof(struct kvmm_stats) */
	uint32_t	connected;
	uint64_t	matches;
	uint64_t	pages_asked;
	uint64_t	pages_hit;
	uint64_t	pages_pending;
	uint64_t	pages_lower;
	uint64_t	pages_missed;
	uint64_t	pin_races;	/* pinned, re-checked, undone */
	uint64_t	allocs;
	uint64_t	alloc_refused;
	uint64_t	published;
	uint64_t	publish_exists;
	uint64_t	publish_refused;
	uint64_t	fetched;
	uint64_t	fetch_missed;
	uint64_t	late;		/* completions made by the library */
	uint64_t	doorbells;	/* system calls made to wake the daemon */
	uint64_t	touches_lost;	/* ring was full at a request's end */
	uint64_t	reconnects;
	uint64_t	keys_lost;	/* not told at a request's end: no room */
};

/** kvmm_stats() - [H] Return: 0, -EINVAL or -ECHILD. */
KVMM_API int kvmm_stats(struct kvmm *k, struct kvmm_stats *st);

#ifdef __cplusplus
}
#endif

#endif
