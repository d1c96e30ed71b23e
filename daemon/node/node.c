/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The common part of all nodes: arguments and states are checked here, once,
 * and the back end is called.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/node/node_ops.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

int node_init(struct node *n, const struct node_ops *ops, enum node_kind kind,
	      const char *name, uint32_t id)
{
	if (!name || !*name || strlen(name) >= sizeof(n->name))
		return -EINVAL;
	memset(n, 0, sizeof(*n));
	n->ops = ops;
	n->kind = kind;
	n->id = id;
	strcpy(n->name, name);
	return 0;
}

void node_set_state(struct node *n, enum node_state state, const char *fmt, ...)
{
	enum node_state old = n->state;
	char why[sizeof(n->why)];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, sizeof(why), fmt, ap);
	va_end(ap);
	if (old == state && !strcmp(why, n->why))
		return;
	n->state = state;
	memcpy(n->why, why, sizeof(why));
	if (n->on_state)
		n->on_state(n, old);
}

const char *node_state_name(enum node_state state)
{
	static const char *const names[] = {
		[NODE_STARTING]	= "starting",
		[NODE_ONLINE]	= "online",
		[NODE_DEGRADED]	= "degraded",
		[NODE_FAILED]	= "failed",
		[NODE_OFFLINE]	= "offline",
	};

	return state < ARRAY_SIZE(names) ? names[state] : "?";
}

int node_destroy(struct node *n, uint64_t deadline_ns)
{
	return n ? n->ops->destroy(n, deadline_ns) : 0;
}

int node_fd(const struct node *n)
{
	return n->ops->fd ? n->ops->fd(n) : -1;
}

unsigned int node_poll(struct node *n, unsigned int budget)
{
	return n->ops->poll ? n->ops->poll(n, budget) : 0;
}

void node_kick(struct node *n)
{
	if (n->ops->kick)
		n->ops->kick(n);
}

uint64_t node_next_deadline(const struct node *n)
{
	return n->ops->next_deadline ? n->ops->next_deadline(n) :
				       DEADLINE_NONE;
}

void node_status(const struct node *n, char *buf, size_t len)
{
	if (n->ops->status)
		n->ops->status(n, buf, len);
	else if (len)
		buf[0] = '\0';
}

bool node_check(const struct node *n)
{
	if (n->used > n->capacity)
		return false;
	return n->ops->check ? n->ops->check(n) : true;
}

/* What a request other than I/O gets in the state that the node is in. */
static int state_error(const struct node *n)
{
	switch (n->state) {
	case NODE_STARTING:
		return -EAGAIN;
	case NODE_FAILED:
		return -EIO;
	case NODE_OFFLINE:
		return -ESHUTDOWN;
	default:
		return 0;
	}
}

int node_extent_get(struct node *n, uint64_t bytes, uint32_t flags,
		    extent_cb cb, void *arg)
{
	int err = state_error(n);

	if (err)
		return err;
	if (!n->ops->extent_get)
		return -EOPNOTSUPP;
	if (!cb || !bytes || bytes % NODE_ALIGN || flags & ~EXTENT_HUGE)
		return -EINVAL;
	return n->ops->extent_get(n, bytes, flags, cb, arg);
}

int node_extent_put(struct extent *ext, extent_cb cb, void *arg)
{
	return ext->node->ops->extent_put(ext, cb, arg);
}

int node_extent_adopt(struct node *n, int fd, uint64_t bytes, uint64_t id,
		      struct extent **ret)
{
	int err = state_error(n);

	if (!err && !n->ops->extent_adopt)
		err = -EOPNOTSUPP;
	if (!err && (!bytes || bytes % NODE_ALIGN))
		err = -EINVAL;
	if (err) {
		close_fd(&fd);
		return err;
	}
	return n->ops->extent_adopt(n, fd, bytes, id, ret);
}

static int pair_place(const struct node *n, const struct node *other)
{
	for (unsigned int i = 0; i < NODE_MAX_PAIRED; i++)
		if (n->paired[i] == other)
			return (int)i;
	return -ENOSPC;
}

int node_pair(struct node *mem, struct node *blk)
{
	int m = pair_place(mem, NULL);
	int b = pair_place(blk, NULL);

	if (mem->kind != NODE_MEM || blk->kind != NODE_BLOCK ||
	    !mem->ops->unpair)
		return -EINVAL;
	if (mem->used)
		return -EBUSY;	/* workers may be looking at the table */
	if (m < 0 || b < 0)
		return -ENOSPC;
	mem->paired[m] = blk;
	blk->paired[b] = mem;
	return 0;
}

void node_unpair_all(struct node *n)
{
	for (unsigned int i = 0; i < NODE_MAX_PAIRED; i++) {
		struct node *other = n->paired[i];
		struct node *mem = n->kind == NODE_MEM ? n : other;
		struct node *blk = n->kind == NODE_MEM ? other : n;

		if (!other)
			continue;
		mem->ops->unpair(mem, (unsigned int)pair_place(mem, blk));
		blk->paired[pair_place(blk, mem)] = NULL;
	}
}

int node_slot_alloc(struct node *n, uint32_t len, struct node_slot *slot)
{
	int err = state_error(n);

	if (err)
		return err;
	if (!n->ops->slot_alloc)
		return -EOPNOTSUPP;
	if (!len)
		return -EINVAL;
	if (len > n->max_len)
		return -E2BIG;
	return n->ops->slot_alloc(n, len, slot);
}

/* In every state: slots are given back while a node fails or ends, too. */
int node_slot_free(struct node *n, const struct node_slot *slot)
{
	return n->ops->slot_free ? n->ops->slot_free(n, slot) : -EOPNOTSUPP;
}

uint32_t node_slot_bytes(const struct node *n, const struct node_slot *slot)
{
	return n->ops->slot_bytes ? n->ops->slot_bytes(n, slot) : 0;
}

int node_slot_victim(struct node *n, uint32_t len, unsigned int nth,
		     struct node_range *r)
{
	if (!n->ops->slot_victim || !len || len > n->max_len)
		return -ENOENT;
	return n->ops->slot_victim(n, len, nth, r);
}

int node_submit(struct node *n, struct node_io *io)
{
	if (!n->ops->submit)
		return -EOPNOTSUPP;
	if ((io->dir != NODE_READ && io->dir != NODE_WRITE) ||
	    io->prio >= NODE_NR_PRIOS || !io->len || !io->addr ||
	    (uintptr_t)io->addr % NODE_ALIGN || !io->done || !io->release ||
	    io->ident_len > NODE_IDENT_MAX || (io->ident_len && !io->ident))
		return -EINVAL;
	return n->ops->submit(n, io);
}

int node_io_cancel(struct node_io *io)
{
	return io->priv.node->ops->cancel(io->priv.node, io);
}

void node_io_raise(struct node_io *io, enum node_prio prio)
{
	if (prio < io->prio)
		io->priv.node->ops->raise(io->priv.node, io, prio);
}

void node_io_deadline(struct node_io *io, uint64_t deadline_ns)
{
	io->priv.node->ops->deadline(io->priv.node, io, deadline_ns);
}

bool node_writable(const struct node *n)
{
	return n->ops->writable && n->ops->writable(n);
}

uint32_t node_estimate_us(const struct node *n, enum node_dir dir,
			  uint32_t len)
{
	if (!n->ops->estimate_us)
		return UINT32_MAX;
	return n->ops->estimate_us(n, dir, len);
}

int node_buf_add(struct node *n, void *addr, uint64_t len)
{
	if (!n->ops->buf_add)
		return -EOPNOTSUPP;
	if (!len || len % NODE_ALIGN || (uintptr_t)addr % NODE_ALIGN)
		return -EINVAL;
	return n->ops->buf_add(n, addr, len);
}

void node_buf_del(struct node *n, void *addr)
{
	if (n->ops->buf_del)
		n->ops->buf_del(n, addr);
}

bool node_buf_busy(const struct node *n, const void *addr, uint64_t len)
{
	return n->ops->buf_busy && n->ops->buf_busy(n, addr, len);
}

void node_set_owner(struct node *n, const struct node_owner *owner)
{
	n->owner = owner;
}

bool node_persistent(const struct node *n)
{
	return n->ops->persistent && n->ops->persistent(n);
}

int node_store_fd(const struct node *n)
{
	return n->ops->store_fd ? n->ops->store_fd(n) : -ENOENT;
}

void node_record_add(struct node *n, const struct node_record *rec)
{
	if (n->ops->record_add)
		n->ops->record_add(n, rec);
}

void node_record_del(struct node *n, const struct node_slot *slot)
{
	if (n->ops->record_del)
		n->ops->record_del(n, slot);
}

void node_record_again(struct node *n, const struct node_record *rec)
{
	if (n->ops->record_again)
		n->ops->record_again(n, rec);
}

int node_label_put(struct node *n, const void *bytes, size_t len,
		   uint32_t *id)
{
	if (!n->ops->label_put)
		return -EOPNOTSUPP;
	if (!len || len > NODE_LABEL_MAX)
		return -E2BIG;
	return n->ops->label_put(n, bytes, len, id);
}

void node_label_del(struct node *n, uint32_t id)
{
	if (n->ops->label_del)
		n->ops->label_del(n, id);
}

int node_record_flush(struct node *n, void (*fn)(int err, void *arg),
		      void *arg)
{
	if (!n->ops->record_flush)
		return -EOPNOTSUPP;
	return n->ops->record_flush(n, fn, arg);
}
