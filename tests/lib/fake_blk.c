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

static void fake_record_del(struct node *n, const struct node_slot *slot);
static void found_free(struct fake_blk *b);

/* In front of the hand first, as a log would; from the start then. */
static int fake_slot_alloc(struct node *n, uint32_t len, struct node_slot *slot)
{
	struct fake_blk *b = blk(n);
	uint32_t total = n->capacity / NODE_ALIGN, want = units(len), at, run;
	uint32_t tries = total + want;

	if (b->journal_full)
		return -EAGAIN;
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
		b->seq[at] = b->disk ? ++b->disk->next_seq : ++b->next_seq;
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
	fake_record_del(n, slot);
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

	b->nr_victims++;
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

/* -- what is remembered --------------------------------------------------------- */

void fake_disk_init(struct fake_disk *d, uint64_t bytes)
{
	memset(d, 0, sizeof(*d));
	d->bytes = bytes;
	d->data = calloc(1, bytes);
	assert(d->data);
}

static void said_free(struct fake_said *v, unsigned int nr)
{
	while (nr)
		free(v[--nr].bytes);
	free(v);
}

void fake_disk_fini(struct fake_disk *d)
{
	said_free(d->said, d->nr);
	free(d->wrote);
	free(d->data);
	memset(d, 0, sizeof(*d));
}

static void disk_wrote(struct fake_disk *d, uint64_t off)
{
	if (d->nr_wrote == d->max_wrote) {
		d->max_wrote = d->max_wrote ? 2 * d->max_wrote : 64;
		d->wrote = realloc(d->wrote,
				   d->max_wrote * sizeof(*d->wrote));
		assert(d->wrote);
	}
	d->wrote[d->nr_wrote++] = off;
}

static void disk_say(struct fake_disk *d, const struct fake_said *s)
{
	if (d->nr == d->max) {
		d->max = d->max ? 2 * d->max : 64;
		d->said = realloc(d->said, d->max * sizeof(*d->said));
		assert(d->said);
	}
	d->said[d->nr++] = *s;
}

void fake_disk_crash(struct fake_disk *d, struct rng *rng)
{
	unsigned int keep = d->flushed, i;

	if (rng)
		keep += rng_below(rng, d->nr - d->flushed + 1);
	while (d->nr > keep)
		free(d->said[--d->nr].bytes);
	for (i = 0; i < d->nr_wrote; i++)
		if (!rng || rng_below(rng, 4) == 0)
			memset(d->data + d->wrote[i], 0xee, NODE_ALIGN);
	d->flushed = d->nr;
	d->nr_wrote = 0;
}

/* Is what said[@at] added still there at the end? */
static bool said_stands(const struct fake_disk *d, unsigned int at)
{
	const struct fake_said *s = &d->said[at], *t;
	unsigned int i;

	for (i = at + 1; i < d->nr; i++) {
		t = &d->said[i];
		if (s->what == FAKE_LABEL) {
			if (t->what == FAKE_LABEL_DEL && t->id == s->id)
				return false;
			continue;
		}
		if (t->what == FAKE_DEL && t->rec.slot.off == s->rec.slot.off &&
		    t->rec.slot.seq >= s->rec.slot.seq)
			return false;
		if (t->what == FAKE_ADD && t->rec.slot.off == s->rec.slot.off &&
		    t->rec.slot.seq >= s->rec.slot.seq)
			return false;
	}
	return true;
}

static unsigned int disk_count(const struct fake_disk *d, enum fake_say what)
{
	unsigned int i, n = 0;

	for (i = 0; i < d->nr; i++)
		n += d->said[i].what == what && said_stands(d, i);
	return n;
}

unsigned int fake_disk_records(const struct fake_disk *d)
{
	return disk_count(d, FAKE_ADD);
}

unsigned int fake_disk_labels(const struct fake_disk *d)
{
	return disk_count(d, FAKE_LABEL);
}

static int fake_store_fd(const struct node *n)
{
	return blk(n)->store_fd ? blk(n)->store_fd : -ENOENT;
}

static bool fake_persistent(const struct node *n)
{
	return blk(n)->disk;
}

static void fake_record_add(struct node *n, const struct node_record *rec)
{
	struct fake_blk *b = blk(n);
	uint32_t at = rec->slot.off / NODE_ALIGN;

	if (!b->disk)
		return;
	assert(b->seq[at] == rec->slot.seq && b->len[at] == rec->len);
	assert(!b->recorded[at]);
	b->recorded[at] = true;
	disk_say(b->disk, &(struct fake_said){ .what = FAKE_ADD, .rec = *rec });
}

static void fake_record_del(struct node *n, const struct node_slot *slot)
{
	struct fake_blk *b = blk(n);
	uint32_t at = slot->off / NODE_ALIGN;

	if (!b->disk || b->seq[at] != slot->seq || !b->recorded[at])
		return;
	b->recorded[at] = false;
	disk_say(b->disk, &(struct fake_said){
		.what = FAKE_DEL, .rec.slot = *slot });
}

static void again(struct fake_blk *b, const struct fake_said *s)
{
	b->again = realloc(b->again, (b->nr_again + 1) * sizeof(*b->again));
	assert(b->again);
	b->again[b->nr_again++] = *s;
}

static void fake_record_again(struct node *n, const struct node_record *rec)
{
	struct fake_blk *b = blk(n);
	uint32_t at = rec->slot.off / NODE_ALIGN;

	assert(b->seq[at] == rec->slot.seq && b->recorded[at]);
	again(b, &(struct fake_said){ .what = FAKE_ADD, .rec = *rec });
}

static uint8_t *bytes_copy(const void *bytes, size_t len)
{
	uint8_t *p = malloc(len);

	assert(p);
	memcpy(p, bytes, len);
	return p;
}

static int fake_label_put(struct node *n, const void *bytes, size_t len,
			  uint32_t *id)
{
	struct fake_blk *b = blk(n);

	if (!b->disk)
		return -EOPNOTSUPP;
	if (b->label_err)
		return b->label_err;
	*id = ++b->disk->next_label;
	disk_say(b->disk, &(struct fake_said){
		.what = FAKE_LABEL, .id = *id, .len = len,
		.bytes = bytes_copy(bytes, len) });
	return 0;
}

static void fake_label_del(struct node *n, uint32_t id)
{
	if (blk(n)->disk)
		disk_say(blk(n)->disk, &(struct fake_said){
			.what = FAKE_LABEL_DEL, .id = id });
}

static int fake_record_flush(struct node *n, void (*fn)(int err, void *arg),
			     void *arg)
{
	struct fake_blk *b = blk(n);

	if (!b->disk)
		return -EOPNOTSUPP;
	if (b->nr_flush == sizeof(b->flush) / sizeof(b->flush[0]))
		return -ENOMEM;
	b->flush[b->nr_flush++] = (struct fake_flush){ fn, arg };
	return 0;
}

void fake_blk_flush(struct fake_blk *b)
{
	b->disk->flushed = b->disk->nr;
	b->disk->nr_wrote = 0;
}

void fake_blk_die(struct fake_blk *b, struct rng *rng)
{
	struct fake_disk *d = b->disk;

	b->data = bytes_copy(d->data, d->bytes);
	b->disk = NULL;
	b->next_seq = d->next_seq;
	found_free(b);
	fake_disk_crash(d, rng);
}

static void flush_some(struct fake_blk *b)
{
	unsigned int i, n = b->nr_flush;
	struct fake_flush f[16];

	if (!b->disk || b->found || (b->hold_flush && !n))
		return;
	fake_blk_flush(b);
	memcpy(f, b->flush, sizeof(f));
	b->nr_flush = 0;
	for (i = 0; i < n; i++)
		f[i].fn(0, f[i].arg);
}

void fake_blk_checkpoint(struct fake_blk *b, void (*between)(void *arg),
			 void *arg)
{
	struct fake_disk *d = b->disk;
	unsigned int j0 = d->nr, labels, i;
	uint64_t cursor = 0;

	b->nr_again = 0;
	for (i = 0; i < j0; i++)
		if (d->said[i].what == FAKE_LABEL && said_stands(d, i)) {
			struct fake_said s = d->said[i];

			s.bytes = bytes_copy(s.bytes, s.len);
			again(b, &s);
		}
	labels = b->nr_again;
	while (!b->n.owner->collect(&b->n, &cursor, b->n.owner->arg))
		if (between)
			between(arg);
	for (i = j0; i < d->nr; i++) {
		again(b, &d->said[i]);
		d->said[i].bytes = NULL;
	}
	said_free(d->said, d->nr);
	d->said = b->again;
	d->nr = d->max = b->nr_again;
	b->again = NULL;
	b->nr_again -= labels + (i - j0);
	fake_blk_flush(b);
}

/* -- finding it again ------------------------------------------------------------ */

/**
 * struct fake_found - what recovery hands out
 * @label:	places in the log, @label_at of them handed out, then
 * @rec:	by slot.seq
 */
struct fake_found {
	unsigned int	*label, nr_labels, label_at;
	struct node_record *rec;
	unsigned int	nr, at;
	bool		begun;
};

static int by_seq(const void *a, const void *b)
{
	const struct node_record *x = a, *y = b;

	return x->slot.seq < y->slot.seq ? -1 : x->slot.seq > y->slot.seq;
}

static void found_read(struct fake_blk *b)
{
	struct fake_found *f = calloc(1, sizeof(*f));
	const struct fake_disk *d = b->disk;
	unsigned int i;

	assert(f);
	f->label = calloc(d->nr + 1, sizeof(*f->label));
	f->rec = calloc(d->nr + 1, sizeof(*f->rec));
	assert(f->label && f->rec);
	for (i = 0; i < d->nr; i++) {
		if (d->said[i].what == FAKE_LABEL && said_stands(d, i))
			f->label[f->nr_labels++] = i;
		if (d->said[i].what == FAKE_ADD && said_stands(d, i))
			f->rec[f->nr++] = d->said[i].rec;
	}
	qsort(f->rec, f->nr, sizeof(*f->rec), by_seq);
	b->found = f;
}

static void found_free(struct fake_blk *b)
{
	if (!b->found)
		return;
	free(b->found->label);
	free(b->found->rec);
	free(b->found);
	b->found = NULL;
}

/* False: one of them cannot be taken now. */
static bool recover_labels(struct fake_blk *b)
{
	struct fake_found *f = b->found;

	for (; f->label_at < f->nr_labels; f->label_at++) {
		struct fake_said s = b->disk->said[f->label[f->label_at]];
		int err = b->n.owner->label(&b->n, s.id, s.bytes, s.len,
					    b->n.owner->arg);

		if (err && err != -ENOENT)
			return false;
		if (err)
			fake_label_del(&b->n, s.id);
	}
	return true;
}

#define FAKE_SLICE	16u

static void recover_slice(struct fake_blk *b)
{
	struct fake_found *f = b->found;
	const struct node_record *rec = f->rec + f->at;
	unsigned int n = min(f->nr - f->at, FAKE_SLICE), i;
	bool taken[FAKE_SLICE] = { false };

	b->n.owner->records(&b->n, rec, n, taken, b->n.owner->arg);
	for (i = 0; i < n; i++) {
		uint32_t at = rec[i].slot.off / NODE_ALIGN;

		if (!taken[i]) {
			disk_say(b->disk, &(struct fake_said){
				.what = FAKE_DEL, .rec.slot = rec[i].slot });
			continue;
		}
		b->seq[at] = rec[i].slot.seq;
		b->len[at] = rec[i].len;
		b->recorded[at] = true;
		b->n.used += (uint64_t)units(rec[i].len) * NODE_ALIGN;
	}
	f->at += n;
}

static void recover_some(struct fake_blk *b)
{
	int err = b->recover_err;

	if (b->hold_recovery || !b->n.owner)
		return;
	if (!b->found->begun && b->n.owner->expect)
		b->n.owner->expect(&b->n, b->found->nr, b->n.owner->arg);
	if (!b->found->begun)
		b->n.owner->begin(&b->n, b->found->nr_labels, b->found->nr,
				  b->n.owner->arg);
	b->found->begun = true;
	if (!recover_labels(b))
		return;
	if (b->found->at < b->found->nr && !err) {
		recover_slice(b);
		return;
	}
	if (!err && !b->found->nr)
		err = -ENOENT;
	found_free(b);
	b->n.owner->recovered(&b->n, err, b->n.owner->arg);
	node_set_state(&b->n, NODE_ONLINE, "in memory");
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
		if (b->disk)
			disk_wrote(b->disk, io->slot.off);
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

	if (n->state == NODE_STARTING)
		return -EAGAIN;
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
	if (b->found)
		recover_some(b);
	flush_some(b);
	return over;
}

static bool fake_writable(const struct node *n)
{
	return n->state == NODE_ONLINE && !blk(n)->unwritable;
}

static uint32_t fake_estimate(const struct node *n, enum node_dir dir,
			      uint32_t len)
{
	return n->state == NODE_FAILED || n->state == NODE_STARTING ?
	       UINT32_MAX : 100;
}

static int fake_destroy(struct node *n, uint64_t deadline_ns)
{
	struct fake_blk *b = blk(n);

	n->state = NODE_OFFLINE;
	while (b->nr)
		fake_poll(n, 0);
	if (b->disk)
		fake_blk_flush(b);
	else
		free(b->data);
	found_free(b);
	free(b->recorded);
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
	.store_fd	= fake_store_fd,
	.persistent	= fake_persistent,
	.record_add	= fake_record_add,
	.record_del	= fake_record_del,
	.record_again	= fake_record_again,
	.label_put	= fake_label_put,
	.label_del	= fake_label_del,
	.record_flush	= fake_record_flush,
};

static struct fake_blk *blk_create(uint8_t *data, uint64_t bytes,
				   uint32_t max_len)
{
	struct fake_blk *b = calloc(1, sizeof(*b));
	uint64_t total = bytes / NODE_ALIGN;

	if (!b)
		return NULL;
	node_init(&b->n, &fake_ops, NODE_BLOCK, "nvme0", 1);
	b->n.capacity = bytes;
	b->n.max_len = max_len;
	b->data = data;
	b->seq = calloc(total, sizeof(*b->seq));
	b->len = calloc(total, sizeof(*b->len));
	b->recorded = calloc(total, sizeof(*b->recorded));
	if (!b->data || !b->seq || !b->len || !b->recorded) {
		fake_destroy(&b->n, 0);
		return NULL;
	}
	return b;
}

struct fake_blk *fake_blk_create(uint64_t bytes, uint32_t max_len)
{
	struct fake_blk *b = blk_create(calloc(1, bytes), bytes, max_len);

	if (b)
		node_set_state(&b->n, NODE_ONLINE, "in memory");
	return b;
}

struct fake_blk *fake_blk_open(struct fake_disk *d, uint32_t max_len)
{
	struct fake_blk *b = blk_create(d->data, d->bytes, max_len);

	if (!b)
		return NULL;
	b->disk = d;
	found_read(b);
	return b;
}
