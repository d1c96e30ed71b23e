/* SPDX-License-Identifier: Apache-2.0 */
/* A block node in memory; see fake_blk.h. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/node_ops.h"
#include "ipc/base/clock.h"
#include "kernels/kernels.h"
#include "tests/lib/fake_blk.h"

enum io_stage {
	IO_QUEUED = 1,
	IO_STARTED,
	IO_LATE,		/* done was called, release was not */
	IO_CANCELLED,
};

static struct fake_blk *blk(const struct node *n)
{
	return container_of((struct node *)n, struct fake_blk, n);
}

/* -- slots ------------------------------------------------------------------- */

static uint32_t units(uint32_t len)
{
	return div_round_up(len, NODE_ALIGN);
}

/* In front of the hand first, as a log would; from the start then. */
static int fake_slot_alloc(struct node *n, uint32_t len, struct node_slot *slot)
{
	struct fake_blk *b = blk(n);
	uint32_t total = n->capacity / NODE_ALIGN, want = units(len), at, run;
	uint32_t tries = total + want;

	at = b->hand < total ? b->hand : 0;
	for (run = 0; tries; tries--) {
		if (at == total) {
			at = 0;
			run = 0;
		}
		if (b->seq[at]) {
			at += units(b->len[at]);
			run = 0;
			continue;
		}
		at++;
		if (++run < want)
			continue;
		at -= want;
		b->hand = at + want;
		b->seq[at] = ++b->next_seq;
		b->len[at] = len;
		n->used += (uint64_t)want * NODE_ALIGN;
		*slot = (struct node_slot){
			.off = (uint64_t)at * NODE_ALIGN, .seq = b->seq[at],
		};
		return 0;
	}
	return -ENOSPC;
}

static int fake_slot_free(struct node *n, const struct node_slot *slot)
{
	struct fake_blk *b = blk(n);
	uint32_t at = slot->off / NODE_ALIGN;
	unsigned int i;

	assert(b->seq[at] == slot->seq);
	for (i = 0; i < b->nr; i++)
		assert(b->io[i]->slot.seq != slot->seq);
	b->seq[at] = 0;
	n->used -= (uint64_t)units(b->len[at]) * NODE_ALIGN;
	return 0;
}

static uint32_t fake_slot_bytes(const struct node *n,
				const struct node_slot *slot)
{
	struct fake_blk *b = blk(n);
	uint32_t at = slot->off / NODE_ALIGN;

	return b->seq[at] ? units(b->len[at]) * NODE_ALIGN : 0;
}

/* Segments of 16 units; any that holds slots of another size. */
static int fake_slot_victim(struct node *n, uint32_t len, unsigned int nth,
			    struct node_range *r)
{
	struct fake_blk *b = blk(n);
	uint32_t total = n->capacity / NODE_ALIGN, seg, at;

	for (seg = 0; seg < total; seg += 16) {
		bool other = false;

		*r = (struct node_range){
			.off = (uint64_t)seg * NODE_ALIGN,
			.end = (uint64_t)(seg + 16) * NODE_ALIGN,
		};
		for (at = seg; at < seg + 16 && at < total; at++) {
			if (!b->seq[at])
				continue;
			r->nr_used++;
			r->slot_bytes = units(b->len[at]) * NODE_ALIGN;
			other |= units(b->len[at]) != units(len);
		}
		if (other && !nth--)
			return 0;
	}
	return -ENOENT;
}

unsigned int fake_blk_slots(const struct fake_blk *b)
{
	uint32_t total = b->n.capacity / NODE_ALIGN, at;
	unsigned int n = 0;

	for (at = 0; at < total; at++)
		n += b->seq[at] != 0;
	return n;
}

unsigned int fake_blk_flip(struct fake_blk *b)
{
	uint32_t total = b->n.capacity / NODE_ALIGN, at;
	unsigned int n = 0;

	for (at = 0; at < total; at++) {
		if (!b->seq[at])
			continue;
		b->data[(uint64_t)at * NODE_ALIGN + b->len[at] / 2] ^= 0x10;
		n++;
	}
	return n;
}

/* -- I/O --------------------------------------------------------------------- */

static uint32_t io_crc(const struct node_io *io, const void *data)
{
	uint32_t crc = kvmm_crc32c(0, io->ident, io->ident_len);

	crc = kvmm_crc32c(crc, &io->slot.seq, sizeof(io->slot.seq));
	return kvmm_crc32c(crc, data, io->len);
}

static int io_move(struct fake_blk *b, struct node_io *io)
{
	uint8_t *at = b->data + io->slot.off;
	uint32_t nth = b->nth ? b->nth : 1;

	assert(b->seq[io->slot.off / NODE_ALIGN] == io->slot.seq);
	if (++b->seen[io->dir] % nth == 0 && b->err[io->dir])
		return b->err[io->dir];
	if (io->dir == NODE_WRITE) {
		memcpy(at, io->addr, io->len);
		io->crc = io_crc(io, io->addr);
		io->data_crc = kvmm_crc32c(0, io->addr, io->len);
		return 0;
	}
	memcpy(io->addr, at, io->len);
	return io_crc(io, io->addr) == io->crc ? 0 : -EBADMSG;
}

static int fake_submit(struct node *n, struct node_io *io)
{
	struct fake_blk *b = blk(n);

	if (n->state == NODE_FAILED)
		return -EIO;
	if (n->state == NODE_OFFLINE)
		return -ESHUTDOWN;
	if (b->refuse[io->dir])
		return b->refuse[io->dir];
	if (io->dir == NODE_WRITE && b->unwritable)
		return -EAGAIN;
	if (io->deadline_ns && deadline_past(io->deadline_ns))
		return -ETIMEDOUT;
	if (b->nr == FAKE_BLK_QUEUE)
		return -EAGAIN;
	io->priv.node = n;
	io->priv.stage = IO_QUEUED;
	b->io[b->nr++] = io;
	return 0;
}

static int fake_cancel(struct node *n, struct node_io *io)
{
	if (io->priv.stage != IO_QUEUED)
		return -EALREADY;
	io->priv.stage = IO_CANCELLED;
	return 0;
}

static void fake_raise(struct node *n, struct node_io *io, enum node_prio prio)
{
	io->prio = prio;
}

static void fake_deadline(struct node *n, struct node_io *io,
			  uint64_t deadline_ns)
{
	if (io->priv.stage != IO_LATE)
		io->deadline_ns = deadline_ns;
}

static void io_end(struct fake_blk *b, struct node_io *io, int result)
{
	unsigned int i;

	for (i = 0; b->io[i] != io; i++)
		;
	memmove(&b->io[i], &b->io[i + 1], (--b->nr - i) * sizeof(b->io[0]));
	io->result = result;
	if (io->priv.stage == IO_LATE)
		io->late = true;
	else
		io->done(io, result);
	io->release(io);
}

/* One I/O's turn. True: it is over. */
static bool io_turn(struct fake_blk *b, struct node_io *io)
{
	bool held = b->hold[io->dir];

	if (io->priv.stage == IO_CANCELLED) {
		io_end(b, io, -ECANCELED);
		return true;
	}
	if (b->n.state == NODE_OFFLINE) {
		io_end(b, io, -ESHUTDOWN);
		return true;
	}
	if (io->priv.stage == IO_QUEUED && !(held && b->unstarted))
		io->priv.stage = IO_STARTED;
	if (b->rng && rng_below(b->rng, 4) == 0)
		held = true;
	if (!held) {
		io_end(b, io, io_move(b, io));
		return true;
	}
	if (io->deadline_ns && deadline_past(io->deadline_ns) &&
	    io->priv.stage != IO_LATE) {
		if (io->priv.stage == IO_QUEUED) {
			io_end(b, io, -ETIMEDOUT);
			return true;
		}
		io->priv.stage = IO_LATE;
		io->done(io, -ETIMEDOUT);
	}
	return false;
}

static unsigned int fake_poll(struct node *n, unsigned int budget)
{
	struct fake_blk *b = blk(n);
	struct node_io *now[FAKE_BLK_QUEUE];
	unsigned int nr = b->nr, i, over = 0;

	/* what callbacks hand in has its turn next time */
	memcpy(now, b->io, nr * sizeof(now[0]));
	for (i = 0; b->rng && i + 1 < nr; i++) {
		unsigned int j = i + rng_below(b->rng, nr - i);
		struct node_io *t = now[i];

		now[i] = now[j];
		now[j] = t;
	}
	for (i = 0; i < nr; i++)
		over += io_turn(b, now[i]);
	return over;
}

static bool fake_writable(const struct node *n)
{
	return n->state == NODE_ONLINE && !blk(n)->unwritable;
}

static uint32_t fake_estimate(const struct node *n, enum node_dir dir,
			      uint32_t len)
{
	return n->state == NODE_FAILED ? UINT32_MAX : 100;
}

static int fake_destroy(struct node *n, uint64_t deadline_ns)
{
	struct fake_blk *b = blk(n);

	n->state = NODE_OFFLINE;
	while (b->nr)
		fake_poll(n, 0);
	free(b->data);
	free(b->seq);
	free(b->len);
	free(b);
	return 0;
}

static const struct node_ops fake_ops = {
	.name		= "fake",
	.destroy	= fake_destroy,
	.poll		= fake_poll,
	.slot_alloc	= fake_slot_alloc,
	.slot_free	= fake_slot_free,
	.slot_bytes	= fake_slot_bytes,
	.slot_victim	= fake_slot_victim,
	.submit		= fake_submit,
	.cancel		= fake_cancel,
	.raise		= fake_raise,
	.deadline	= fake_deadline,
	.writable	= fake_writable,
	.estimate_us	= fake_estimate,
};

struct fake_blk *fake_blk_create(uint64_t bytes, uint32_t max_len)
{
	struct fake_blk *b = calloc(1, sizeof(*b));
	uint64_t total = bytes / NODE_ALIGN;

	if (!b)
		return NULL;
	node_init(&b->n, &fake_ops, NODE_BLOCK, "nvme0", 1);
	b->n.capacity = bytes;
	b->n.max_len = max_len;
	b->data = calloc(1, bytes);
	b->seq = calloc(total, sizeof(*b->seq));
	b->len = calloc(total, sizeof(*b->len));
	if (!b->data || !b->seq || !b->len) {
		fake_destroy(&b->n, 0);
		return NULL;
	}
	node_set_state(&b->n, NODE_ONLINE, "in memory");
	return b;
}
