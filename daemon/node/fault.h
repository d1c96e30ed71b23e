/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault.h - I/O errors on demand, in test builds
 *
 * A table of rules is asked between a back end's queue and its engine, so that
 * everything above - deadlines, states, accounts - meets an injected error the
 * way it meets a real one. In other builds nothing of it exists.
 *
 * A rule is WHO:WHAT:HOW[:KEY=VALUE]..., rules are separated by ';':
 *
 *	WHO	name of a node or of its back end ("nvme0", "nvme", "host")
 *	WHAT	read, write, journal (a write of journal or checkpoint), openread
 *		or openwrite (while a store is opened), or get (an extent;
 *		memory for the journal)
 *	HOW	eio, enodata, erofs, enospc, edquot, efbig, eperm, enomem: fail
 *			so, after ms=N; 0
 *		short	transfer half
 *		stall	keep it in flight for ms=N, then do it
 *		reorder	hold it back for a random time up to ms=N: what is in
 *			flight together happens in any order
 *		flip	one bit of what was read is wrong
 *		drop	a write that reports success and never happens
 *		torn	a write that reports success, of which half happens
 *		stale	a read that reports success and leaves the memory alone
 *	KEY	n=N	only so many times
 *		skip=N	let the first N pass
 *		ms=N	for stall, 10000; for reorder, 10; for an error, 0
 *		p=N	strikes N times of 1000, by chance
 *		seed=N	of that chance; 0. The same one, the same sequence
 *		off=N	only where byte N is touched, or one of the
 *		len=N	bytes from there on
 *
 * As "nvme:write:eio:n=3;nvme:read:stall:ms=10000". A node's own I/O (probes,
 * zero-writing) meets the rules without n= and skip= only, but for journal.
 */
#ifndef KVMM_DAEMON_NODE_FAULT_H
#define KVMM_DAEMON_NODE_FAULT_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/node/node.h"
#include "ipc/base/err.h"

enum fault_what {
	FAULT_READ,
	FAULT_WRITE,
	FAULT_GET,
	FAULT_JOURNAL,
	FAULT_OPEN_READ,
	FAULT_OPEN_WRITE,
};

enum fault_how {
	FAULT_NONE,
	FAULT_ERROR,		/* @err */
	FAULT_SHORT,
	FAULT_STALL,		/* @ms */
	FAULT_FLIP,
	FAULT_DROP,
	FAULT_TORN,
	FAULT_STALE,
	FAULT_REORDER,		/* in rules only: what strikes is a FAULT_STALL */
};

enum fault_tap_when {
	FAULT_TAP_START,
	FAULT_TAP_END,		/* io->priv.res is its result */
};

/**
 * struct fault - what is to go wrong
 * @err:	positive errno, for FAULT_ERROR
 * @ms:		milliseconds, for FAULT_STALL; before FAULT_ERROR
 */
struct fault {
	enum fault_how	how;
	int		err;
	uint32_t	ms;
};

#ifdef KVMM_TEST_BUILD

/**
 * fault_set() - replace the table
 * @spec:	rules as above; NULL or "" for none
 * @msg:	what is wrong with @spec; may be NULL
 *
 * Context: the loop's thread, at any time.
 * Return: 0, or -EINVAL and the table is as it was.
 */
int fault_set(const char *spec, struct errmsg *msg);

/**
 * fault_env() - set the table from $KVMM_FAULT, the first time it is called
 *
 * Return: 0, or -EINVAL, and a line on stderr says why.
 */
int fault_env(void);

/**
 * fault_ask() - is @what on @n to go wrong now? Fills @f in and counts.
 *
 * Context: any thread.
 */
bool fault_ask(const struct node *n, enum fault_what what, bool internal,
	       struct fault *f);

/** fault_ask_at() - the same for a transfer of @len bytes at @off */
bool fault_ask_at(const struct node *n, enum fault_what what, bool internal,
		  uint64_t off, uint64_t len, struct fault *f);

/** fault_hits() - how often a rule has struck since the last fault_set() */
uint64_t fault_hits(void);

/**
 * fault_tap_set() - have all I/O shown to @fn, for tests that replay it
 *
 * Called when the engine gets an I/O and when it has ended; the transfer's memory
 * may be looked at. While a store is opened that is on a worker, for its writes.
 * NULL: nobody looks.
 */
void fault_tap_set(void (*fn)(const struct node *n, enum fault_tap_when when,
			      const struct node_io *io, void *arg),
		   void *arg);

void fault_tap(const struct node *n, enum fault_tap_when when,
	       const struct node_io *io);

/**
 * fault_broken() - does $KVMM_BREAK name this protection to be left out?
 *
 * A slot store knows crc (a read's checksum) and dsync (journal and checkpoints
 * are on the medium when their writes end).
 */
bool fault_broken(const char *what);

#else

static inline int fault_env(void)
{
	return 0;
}

static inline bool fault_ask(const struct node *n, enum fault_what what,
			     bool internal, struct fault *f)
{
	return false;
}

static inline bool fault_ask_at(const struct node *n, enum fault_what what,
				bool internal, uint64_t off, uint64_t len,
				struct fault *f)
{
	return false;
}

static inline void fault_tap(const struct node *n, enum fault_tap_when when,
			     const struct node_io *io)
{
}

static inline bool fault_broken(const char *what)
{
	return false;
}

#endif
#endif
