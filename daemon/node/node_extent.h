/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node_extent.h - extents: memory of a node that can be mapped and shared
 * (NODE_MEM). A part of node.h, which others include.
 */
#ifndef KVMM_DAEMON_NODE_NODE_EXTENT_H
#define KVMM_DAEMON_NODE_NODE_EXTENT_H

#include <stdint.h>

struct node;

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

#endif
