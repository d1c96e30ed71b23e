/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The superblock: where everything is, and whether it is ours; making a store.
 *
 * There are two copies, the second one written first. Whichever is whole and
 * says the highest number of openings counts, so a torn write leaves one, and so
 * does a block of the medium that fails. What cannot be read is not known to be
 * damaged: where it would have decided the store is left as it is.
 *
 * A store is made in an order that a crash cannot turn into a puzzle: first a
 * superblock that says it is being made, under a new uuid by which all older
 * blocks are void; then an empty checkpoint, so that a store without one is
 * known to be damaged; then the superblock as it stays.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/node/nvme.h"
#include "ipc/base/err.h"
#include "kernels/kernels.h"

/* Records for pages of 16 KiB, of 4 KiB in a small store. */
#define RECORD_BYTES		(16u << 10)
#define RECORDS_SMALL		16384u

#define LABELS_LEAST		(80u << 10)
#define LABELS_MOST		(4u << 20)

#define ZERO_STEP		(1u << 20)

/* ---- sizes ------------------------------------------------------------------ */

/*
 * @sb->bytes is set; @records: how many there can be, 0 for the default.
 *
 * The journal is half as long as a checkpoint. A checkpoint is taken each time
 * half a journal is full, so that a page costs its own record and those of four
 * others: less than a kilobyte.
 */
void nvme_layout(struct nvme_super *sb, uint64_t records)
{
	const uint64_t per_block = NVME_BLOCK_ROOM / sizeof(struct nvme_ent_add);
	const uint64_t group = NVME_GROUP_BLOCKS * NVME_BLOCK;
	uint64_t blocks, meta;

	if (!records)
		records = max(sb->bytes / RECORD_BYTES,
			      min(sb->bytes / NODE_ALIGN,
				  (uint64_t)RECORDS_SMALL));
	sb->records = records = min(records, sb->bytes / NODE_ALIGN);
	sb->label_bytes = clamp(sb->bytes / 256, (uint64_t)LABELS_LEAST,
				(uint64_t)LABELS_MOST);
	/* a label's last part may leave most of a block: the half goes to that,
	 * and the rest of it and an eighth of the records to quarantine */
	blocks = 2 + div_round_up(records, per_block) +
		 div_round_up(records, 8 * per_block) +
		 div_round_up(sb->label_bytes * 2, NVME_BLOCK_ROOM);
	sb->ckpt_bytes = blocks * NVME_BLOCK;
	sb->journal_bytes = max(roundup_to(sb->ckpt_bytes / 2, group),
				2 * group);
	meta = sb->journal_bytes + 2 * sb->ckpt_bytes;
	if (NVME_META_OFF + meta <= NVME_SUPER2_OFF) {
		sb->journal_off = NVME_META_OFF;
		sb->data_off = NVME_HEAD_BYTES;
	} else {
		sb->journal_off = NVME_HEAD_BYTES;
		sb->data_off = round_up(NVME_HEAD_BYTES + meta, NVME_SEG_MIN);
	}
	sb->ckpt_off = sb->journal_off + sb->journal_bytes;
}

static uint32_t seg_bytes_for(const struct nvme *nv, uint64_t bytes)
{
	uint64_t seg = nv->opts.seg_bytes;

	if (!seg) {
		seg = (bytes - min(bytes, (uint64_t)NVME_HEAD_BYTES)) / 64;
		seg = seg ? UINT64_C(1) << ilog2(seg) : NVME_SEG_MIN;
		seg = clamp(seg, (uint64_t)NVME_SEG_MIN, (uint64_t)NVME_SEG_MAX);
	}
	return (uint32_t)seg;
}

/* Does a superblock whose checksum is right make sense? */
static bool super_sane(const struct nvme_super *sb)
{
	struct nvme_super want = { .bytes = sb->bytes };

	if (!is_pow2(sb->seg_bytes) || sb->seg_bytes < NVME_SEG_MIN ||
	    sb->seg_bytes > NVME_SEG_MAX || !sb->records ||
	    sb->records > sb->bytes / NODE_ALIGN)
		return false;
	nvme_layout(&want, sb->records);
	return sb->journal_off == want.journal_off &&
	       sb->journal_bytes == want.journal_bytes &&
	       sb->ckpt_off == want.ckpt_off &&
	       sb->ckpt_bytes == want.ckpt_bytes &&
	       sb->label_bytes == want.label_bytes &&
	       sb->data_off == want.data_off &&
	       sb->bytes >= sb->data_off + sb->seg_bytes;
}

static uint32_t super_segs(const struct nvme_super *sb)
{
	return (uint32_t)((sb->bytes - sb->data_off) / sb->seg_bytes);
}

/* ---- reading ---------------------------------------------------------------- */

static uint32_t super_crc(const struct nvme_super *sb)
{
	return kvmm_crc32c(0, sb, offsetof(struct nvme_super, crc));
}

static bool super_good(const struct nvme_super *sb)
{
	return !memcmp(sb->magic, NVME_MAGIC, sizeof(sb->magic)) &&
	       sb->version == NVME_VERSION && sb->crc == super_crc(sb);
}

/* The better of the two copies; @head is the store's first MiB. Of another
 * version only the first is known to be one. */
static const struct nvme_super *super_choose(const char *head)
{
	const struct nvme_super *a = (const void *)head;
	const struct nvme_super *b = (const void *)(head + NVME_SUPER2_OFF);

	if (!memcmp(a->magic, NVME_MAGIC, sizeof(a->magic)) &&
	    a->version != NVME_VERSION)
		return a;
	if (!super_good(a) || (super_good(b) && b->opens > a->opens))
		a = super_good(b) ? b : a;
	return a;
}

/* Why the first MiB could not be read, as far as it matters. */
struct head_err {
	int	any;
	int	super[2];
};

static int head_block(struct nvme *nv, char *head, uint32_t off,
		      struct head_err *e)
{
	int err = nvme_open_read(nv, head + off, NVME_BLOCK, off);

	if (err) {
		memset(head + off, 0, NVME_BLOCK);
		e->any = err;
	}
	return err;
}

/* The first MiB, block by block where that is the only way, the superblocks
 * first. What cannot be read is zero. */
static void head_read(struct nvme *nv, char *head, struct head_err *e)
{
	unsigned int bad = 0;
	uint32_t off;

	*e = (struct head_err){ .any = 0 };
	if (!nvme_open_read(nv, head, NVME_HEAD_BYTES, 0))
		return;
	e->super[0] = head_block(nv, head, 0, e);
	e->super[1] = head_block(nv, head, NVME_SUPER2_OFF, e);
	if (e->super[0] && e->super[1])
		return;
	for (off = NVME_BLOCK; off < NVME_SUPER2_OFF; off += NVME_BLOCK) {
		if (bad < NVME_BAD_MOST)
			bad += !!head_block(nv, head, off, e);
		else
			memset(head + off, 0, NVME_BLOCK);
	}
}

/* Does a superblock fit what is configured? -EUCLEAN with a sentence: no. */
static int super_fits(struct nvme *nv, const struct nvme_super *sb,
		      uint64_t bytes)
{
	struct errmsg *msg = &nv->open.msg;
	const char *path = nv->opts.path;
	uint64_t records = min(nv->opts.records, bytes / NODE_ALIGN);

	if (sb->bytes != bytes)
		return errmsg_set(msg, -EUCLEAN,
				  "%s is a store of %llu bytes, but %llu are configured",
				  path, (unsigned long long)sb->bytes,
				  (unsigned long long)bytes);
	if (!super_sane(sb))
		return errmsg_set(msg, -EUCLEAN,
				  "%s: the superblock makes no sense", path);
	if (nv->opts.seg_bytes && sb->seg_bytes != nv->opts.seg_bytes)
		return errmsg_set(msg, -EUCLEAN,
				  "%s has segments of %u bytes, but %u are configured",
				  path, sb->seg_bytes, nv->opts.seg_bytes);
	if (records && sb->records != records)
		return errmsg_set(msg, -EUCLEAN,
				  "%s has room for %llu records, but %llu are configured",
				  path, (unsigned long long)sb->records,
				  (unsigned long long)records);
	return 0;
}

/*
 * 0: ours. -ENOENT: nothing but zeroes, or being made. -EUCLEAN with a
 * sentence: something else.
 */
static int super_check(struct nvme *nv, const char *head, uint64_t bytes,
		       struct nvme_super *ret)
{
	struct errmsg *msg = &nv->open.msg;
	const char *path = nv->opts.path;
	const struct nvme_super *sb = super_choose(head);
	int err;

	if (memcmp(sb->magic, NVME_MAGIC, sizeof(sb->magic))) {
		if (!head[0] && !memcmp(head, head + 1, NVME_HEAD_BYTES - 1))
			return -ENOENT;
		return errmsg_set(msg, -EUCLEAN,
				  "%s holds something that is not a kvmm store",
				  path);
	}
	if (sb->version != NVME_VERSION)
		return errmsg_set(msg, -EUCLEAN,
				  "%s is a store of version %u, this is version %u",
				  path, sb->version, NVME_VERSION);
	if (sb->crc != super_crc(sb))
		return errmsg_set(msg, -EUCLEAN,
				  "%s: both superblocks are damaged", path);
	if (sb->flags & NVME_SUPER_MAKING)
		return -ENOENT;
	err = super_fits(nv, sb, bytes);
	if (!err)
		*ret = *sb;
	return err;
}

static int head_unreadable(struct nvme *nv, int err)
{
	return errmsg_set(&nv->open.msg, -EIO, "reading the first MiB of %s: %s",
			  nv->opts.path, strerror(-err));
}

/* Does a copy say all, while the other one cannot be read? One that is being
 * made does not: the other one may be done, or still of what was there. */
static bool super_alone(const struct nvme_super *sb, bool first)
{
	if (first && !memcmp(sb->magic, NVME_MAGIC, sizeof(sb->magic)) &&
	    sb->version != NVME_VERSION)
		return true;
	return super_good(sb) && !(sb->flags & NVME_SUPER_MAKING);
}

/* Read and check; see super_check(). */
static int super_find(struct nvme *nv, char *head, uint64_t bytes,
		      struct nvme_super *ret)
{
	unsigned int bad;
	struct head_err e;
	int err;

	head_read(nv, head, &e);
	bad = !!e.super[0] + !!e.super[1];
	if (bad == 2 ||
	    (bad && !super_alone((void *)(head + (e.super[0] ?
						  NVME_SUPER2_OFF : 0)),
				 !e.super[0])))
		return head_unreadable(nv, e.any);
	err = super_check(nv, head, bytes, ret);
	if (err == -ENOENT && e.any && !super_good(super_choose(head)))
		return head_unreadable(nv, e.any);	/* not all zeroes */
	if (err)
		return err;
	nv->open.super_bad = bad;
	/* the other one may have been an opening ahead */
	ret->opens += bad;
	return 0;
}

/* ---- writing ---------------------------------------------------------------- */

static int say_write(struct nvme *nv, int err)
{
	return err ? errmsg_set(&nv->open.msg, err, "writing %s: %s",
				nv->opts.path, strerror(-err)) : 0;
}

static bool of_medium(int err)
{
	return err == -EIO || err == -ENODATA;
}

/*
 * Both copies. @one: the medium may refuse one of them; it is that or no store
 * at all, and the one that is older counts for nothing. Not while a store is
 * made: then the old one could be of what was there before.
 */
static int super_write(struct nvme *nv, void *buf, struct nvme_super *sb,
		       bool one)
{
	static const uint64_t place[] = { NVME_SUPER2_OFF, 0 };
	unsigned int bad = 0, i;
	int err;

	sb->crc = super_crc(sb);
	memset(buf, 0, NVME_SUPER_BYTES);
	memcpy(buf, sb, sizeof(*sb));
	for (i = 0; i < ARRAY_SIZE(place); i++) {
		err = nvme_open_write(nv, buf, NVME_SUPER_BYTES, place[i],
				      true);
		if (err && (!one || bad++ || !of_medium(err)))
			return say_write(nv, err);
	}
	nv->open.super_bad = max(nv->open.super_bad, bad);
	return 0;
}

/*
 * The ring is written as a whole once, so that no group is a transaction of the
 * file system. Where space could not be reserved the checkpoints' is taken too:
 * a file system that is full must not keep the journal from getting shorter.
 */
static int zero_meta(struct nvme *nv, void *buf, const struct nvme_super *sb)
{
	uint64_t len = sb->journal_bytes +
		       (nv->open.sparse ? 2 * sb->ckpt_bytes : 0);
	uint64_t at = 0;
	int err = 0;

	memset(buf, 0, ZERO_STEP);
	while (!err && at < len) {
		uint64_t n = min(len - at, (uint64_t)ZERO_STEP);

		err = nvme_open_write(nv, buf, (size_t)n,
				      sb->journal_off + at, false);
		at += n;
	}
	return say_write(nv, err);
}

static int first_ckpt(struct nvme *nv, void *buf, const struct nvme_super *sb)
{
	struct nvme_ent_end *e;
	int err;

	memset(buf, 0, NVME_BLOCK);
	err = nvme_open_write(nv, buf, NVME_BLOCK,
			      sb->ckpt_off + sb->ckpt_bytes, false);
	if (err)
		return say_write(nv, err);
	nvme_block_init(buf);
	e = nvme_block_add(buf, NVME_ENT_END, sizeof(*e), 0);
	e->number = 1;
	e->opens = sb->opens;
	e->journal_seq = 1;
	nvme_block_seal(buf, NVME_KIND_END, sb->uuid, 0, e->number);
	return say_write(nv, nvme_open_write(nv, buf, NVME_BLOCK, sb->ckpt_off,
					     true));
}

/* Make an empty store; @sb->opens is kept, so that numbers stay unique. @zero:
 * the journal may never have been written. */
static int super_make(struct nvme *nv, void *buf, struct nvme_super *sb,
		      uint64_t bytes, bool zero)
{
	uint64_t opens = sb->opens;
	int err;

	memset(sb, 0, sizeof(*sb));
	memcpy(sb->magic, NVME_MAGIC, sizeof(sb->magic));
	sb->version = NVME_VERSION;
	sb->seg_bytes = seg_bytes_for(nv, bytes);
	sb->bytes = bytes;
	sb->opens = opens;
	sb->flags = NVME_SUPER_MAKING;
	if (getrandom(sb->uuid, sizeof(sb->uuid), 0) != sizeof(sb->uuid))
		return errmsg_set(&nv->open.msg, -EIO, "no random numbers");
	nvme_layout(sb, nv->opts.records);
	if (!super_sane(sb))
		return errmsg_set(&nv->open.msg, -EINVAL,
				  "%s: %llu bytes are too few for a store",
				  nv->opts.path, (unsigned long long)bytes);
	err = super_write(nv, buf, sb, false);
	if (!err && zero)
		err = zero_meta(nv, buf, sb);
	if (!err)
		err = first_ckpt(nv, buf, sb);
	sb->flags = 0;
	return err;
}

int nvme_super_read(struct nvme *nv, void *buf, uint64_t bytes, bool fresh,
		    bool *make)
{
	struct nvme_open *o = &nv->open;
	int err = -ENOENT;

	memset(&o->super, 0, sizeof(o->super));
	if (bytes < NVME_HEAD_BYTES + (uint64_t)NVME_SEG_MIN)
		return errmsg_set(&o->msg, -EINVAL,
				  "%s: %llu bytes are too few for a store",
				  nv->opts.path, (unsigned long long)bytes);
	if (!fresh && !o->rebuilt)
		err = super_find(nv, buf, bytes, &o->super);
	*make = err == -ENOENT;
	if (!err)
		o->nr_segs = super_segs(&o->super);
	return *make ? 0 : err;
}

int nvme_super_make(struct nvme *nv, void *buf, uint64_t bytes)
{
	struct nvme_open *o = &nv->open;
	bool zero = !o->super.bytes;	/* the journal may never have been written */
	int err = super_make(nv, buf, &o->super, bytes, zero);

	o->nr_segs = err ? 0 : super_segs(&o->super);
	return err;
}

int nvme_super_renew(struct nvme *nv, void *buf, bool made)
{
	uint64_t *writer = &nv->open.writer;

	if (getrandom(writer, sizeof(*writer), 0) != sizeof(*writer))
		return errmsg_set(&nv->open.msg, -EIO, "no random numbers");
	nv->open.super.opens++;
	return super_write(nv, buf, &nv->open.super, !made);
}
