/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node_ops.h - what a back end implements; for the files of daemon/node/ only
 *
 * node.c checks kind and state before it calls, so a back end sees only what
 * makes sense for it. A NULL entry answers -EOPNOTSUPP (or nothing).
 */
#ifndef KVMM_DAEMON_NODE_OPS_H
#define KVMM_DAEMON_NODE_OPS_H

#include "daemon/node/node.h"
#include "ipc/base/bits.h"

/**
 * struct node_ops - a back end
 * @name:	"host", "nvme"; also how the fault table names it
 * @destroy:	see node_destroy(); frees @n when it returns 0
 *
 * @unpair:	forget node.paired[@ix] of @mem, which is about to end
 *
 * The others are as the node_*() call of that name says.
 */
struct node_ops {
	const char	*name;
	int		(*destroy)(struct node *n, uint64_t deadline_ns);
	int		(*fd)(const struct node *n);
	unsigned int	(*poll)(struct node *n, unsigned int budget);
	void		(*kick)(struct node *n);
	uint64_t	(*next_deadline)(const struct node *n);
	void		(*status)(const struct node *n, char *buf, size_t len);
	bool		(*check)(const struct node *n);

	int		(*extent_get)(struct node *n, uint64_t bytes,
				      uint32_t flags, extent_cb cb, void *arg);
	int		(*extent_put)(struct extent *ext, extent_cb cb,
				      void *arg);
	int		(*extent_adopt)(struct node *n, int fd, uint64_t bytes,
					uint64_t id, struct extent **ret);
	void		(*unpair)(struct node *mem, unsigned int ix);

	int		(*slot_alloc)(struct node *n, uint32_t len,
				      struct node_slot *slot);
	int		(*slot_free)(struct node *n,
				     const struct node_slot *slot);
	uint32_t	(*slot_bytes)(const struct node *n,
				      const struct node_slot *slot);
	int		(*slot_victim)(struct node *n, uint32_t len,
				       unsigned int nth, struct node_range *r);
	int		(*submit)(struct node *n, struct node_io *io);
	int		(*cancel)(struct node *n, struct node_io *io);
	void		(*raise)(struct node *n, struct node_io *io,
				 enum node_prio prio);
	void		(*deadline)(struct node *n, struct node_io *io,
				    uint64_t deadline_ns);
	bool		(*writable)(const struct node *n);
	uint32_t	(*estimate_us)(const struct node *n, enum node_dir dir,
				       uint32_t len);
	int		(*buf_add)(struct node *n, void *addr, uint64_t len);
	void		(*buf_del)(struct node *n, void *addr);
	bool		(*buf_busy)(const struct node *n, const void *addr,
				    uint64_t len);

	int		(*store_fd)(const struct node *n);
	bool		(*persistent)(const struct node *n);
	void		(*record_add)(struct node *n,
				      const struct node_record *rec);
	void		(*record_del)(struct node *n,
				      const struct node_slot *slot);
	void		(*record_again)(struct node *n,
					const struct node_record *rec);
	int		(*label_put)(struct node *n, const void *bytes,
				     size_t len, uint32_t *id);
	void		(*label_del)(struct node *n, uint32_t id);
	int		(*record_flush)(struct node *n,
					void (*fn)(int err, void *arg),
					void *arg);
};

/** node_init() - fill in the common part; -EINVAL for a name that is too long */
int node_init(struct node *n, const struct node_ops *ops, enum node_kind kind,
	      const char *name, uint32_t id);

/** node_unpair_all() - @n, of either kind, is about to end */
void node_unpair_all(struct node *n);

/** node_set_state() - change state and sentence, and tell the owner */
void node_set_state(struct node *n, enum node_state state,
		    const char *fmt, ...) __printf(3, 4);

#endif
