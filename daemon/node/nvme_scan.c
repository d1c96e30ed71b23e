/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Start-up, on a worker: what does the medium remember?
 *
 * The newest checkpoint, then the journal from where the checkpoint says, block
 * by block until one is not the next. Which one is the next is decided by its
 * number, the store's uuid, its checksum and by who wrote it: openings never
 * decrease along the ring. That last one matters. A torn group leaves whole
 * blocks behind a hole; the next daemon writes on at the hole, and what is
 * behind its own last block would fit on exactly, were it not older. Or not by the
 * same writer: two openings have one number if the first one's was never written,
 * by a device that said yes to it.
 *
 * One that is not the next is mostly the end, and may be damage in the middle. A
 * group never spans two chunks of NVME_GROUP_BLOCKS and is begun when the one
 * before it is over. So where a later chunk has a block that is one of the next,
 * this chunk was whole, and what is missing in it is damaged: it is counted, and
 * reading goes on behind it.
 *
 * A checkpoint with damaged blocks gives way to the one before it, if the
 * journal from there is still whole; otherwise what is in the good blocks is
 * kept. What of all that is believed: nvme_found.c.
 *
 * A block that cannot be read is not a damaged one. What it says may be had a
 * while later, and may be that a page was removed. Where it would decide, the
 * answer is -EIO and the store stays as it is, to be opened again.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/nvme_scan.h"
#include "ipc/base/err.h"

#define READ_BYTES	(4u << 20)

/* How far to look for more of the journal behind its end. */
#define LOOK_BLOCKS	(4u * NVME_GROUP_BLOCKS)

/* ---- reading ----------------------------------------------------------------- */

/* A range of blocks; @nr 0: none. */
struct range {
	uint64_t	off;
	uint64_t	nr;
};

/* Have sc->buf show @r; @next is what will most likely be read after it. */
static void read_blocks(struct scan *sc, struct range r, struct range next)
{
	sc->bytes += r.nr * NVME_BLOCK;
	sc->buf = nvme_ahead_read(sc->ahead, r.off, r.nr, next.off, next.nr);
}

static const struct nvme_block *buf_block(const struct scan *sc, uint64_t ix)
{
	return (const void *)(sc->buf + ix * NVME_BLOCK);
}

static bool all_zero(const struct nvme_block *b)
{
	const char *p = (const char *)b;

	return !*p && !memcmp(p, p + 1, NVME_BLOCK - 1);
}

/* What is in the block that makes a checkpoint valid. */
enum end_state {
	END_NONE,		/* zeroes: there never was one */
	END_GOOD,
	END_BAD,
	END_GONE,		/* cannot be read */
};

static bool end_sane(const struct nvme_super *sb,
		     const struct nvme_ent_end *end)
{
	return end->nr_blocks < sb->ckpt_bytes / NVME_BLOCK &&
	       end->journal_seq && end->journal_seq < UINT64_MAX / 2;
}

static enum end_state read_end(struct scan *sc, int area,
			       struct nvme_ent_end *end)
{
	const struct nvme_super *sb = sc->sb;
	const struct nvme_block *b;
	const struct nvme_ent *e;

	read_blocks(sc, (struct range){ sb->ckpt_off + (uint64_t)area *
					sb->ckpt_bytes, 1 },
		    (struct range){ 0, 0 });
	if (nvme_ahead_gone(sc->ahead, 0))
		return END_GONE;
	b = buf_block(sc, 0);
	if (!nvme_block_good(b, NVME_KIND_END, sb->uuid))
		return all_zero(b) ? END_NONE : END_BAD;
	e = nvme_block_next(b, NULL);
	if (!e || e->type != NVME_ENT_END)
		return END_BAD;
	memcpy(end, e, sizeof(*end));
	sc->end_writer[area] = b->writer;
	return end_sane(sb, end) ? END_GOOD : END_BAD;
}

/* The journal from block @seq on, a piece of it. */
static struct range journal_range(const struct scan *sc, uint64_t seq)
{
	const struct nvme_super *sb = sc->sb;
	uint64_t from = sc->f->end.journal_seq;
	uint64_t ring = sb->journal_bytes / NVME_BLOCK;
	uint64_t n = min(from + ring - seq, ring - seq % ring);

	/* not far beyond the end, which mostly comes soon */
	n = min(n, seq == from ? (uint64_t)NVME_GROUP_BLOCKS * 4 :
		(uint64_t)READ_BYTES / NVME_BLOCK);
	return (struct range){ sb->journal_off + seq % ring * NVME_BLOCK, n };
}

/* The checkpoint from block @at on, a piece of it; behind it the journal. */
static struct range ckpt_range(const struct scan *sc, uint64_t at)
{
	const struct nvme_super *sb = sc->sb;
	const struct nvme_found *f = sc->f;
	uint64_t off = sb->ckpt_off + (uint64_t)f->area * sb->ckpt_bytes;

	if (at > f->end.nr_blocks)
		return journal_range(sc, f->end.journal_seq);
	return (struct range){ off + at * NVME_BLOCK,
			       min(f->end.nr_blocks - at + 1,
				   (uint64_t)READ_BYTES / NVME_BLOCK) };
}

static int read_ckpt(struct scan *sc)
{
	const struct nvme_super *sb = sc->sb;
	struct nvme_found *f = sc->f;
	uint64_t at = 1;

	while (at <= f->end.nr_blocks) {
		struct range r = ckpt_range(sc, at);

		read_blocks(sc, r, ckpt_range(sc, at + r.nr));
		for (uint64_t i = 0; i < r.nr; i++, at++) {
			const struct nvme_block *b = buf_block(sc, i);
			int err = nvme_ahead_gone(sc->ahead, i);

			sc->gone = err ? err : sc->gone;
			if (!nvme_block_good(b, NVME_KIND_CKPT, sb->uuid) ||
			    b->seq != at || b->epoch != f->end.number) {
				f->bad_blocks++;
				continue;
			}
			err = nvme_found_block(sc, b);
			if (err)
				return err;
		}
	}
	return 0;
}

/* ---- the journal ---------------------------------------------------------------- */

static bool journal_good(const struct scan *sc, const struct nvme_block *b)
{
	return nvme_block_good(b, NVME_KIND_JOURNAL, sc->sb->uuid);
}

/* Is it block @seq, of the same opening as what was read before or a later one? */
static bool journal_next(const struct scan *sc, const struct nvme_block *b,
			 uint64_t seq)
{
	return journal_good(sc, b) && b->seq == seq &&
	       (b->epoch > sc->f->max_opens ||
		(b->epoch == sc->f->max_opens && b->writer == sc->writer));
}

static uint64_t journal_stop(const struct scan *sc)
{
	return sc->f->end.journal_seq + sc->sb->journal_bytes / NVME_BLOCK;
}

/* Has block @seq been written over? */
static bool later_lap(const struct scan *sc, const struct nvme_block *b,
		      uint64_t seq)
{
	return b->seq > seq && b->seq < UINT64_MAX / 2 &&
	       !((b->seq - seq) % (sc->sb->journal_bytes / NVME_BLOCK));
}

/*
 * Block @seq is not the next one. Is it the end, or damage? Return: the block
 * behind it, in a later chunk, that is one of the next; 0: it is the end. All of
 * the ring is looked at where a checkpoint may be missing: then it may have been
 * written over (sc->gap), which need not show at its first block.
 */
static uint64_t look_on(struct scan *sc, uint64_t seq)
{
	uint64_t chunk = round_down(seq, NVME_GROUP_BLOCKS) + NVME_GROUP_BLOCKS;
	uint64_t stop = journal_stop(sc), found = 0;
	int gone = 0;

	if (!sc->wary)
		stop = min(stop, seq + LOOK_BLOCKS);
	while (seq < stop && !sc->gap && !found) {
		struct range r = journal_range(sc, seq), next = { 0, 0 };

		if (seq + r.nr < stop)
			next = journal_range(sc, seq + r.nr);
		read_blocks(sc, r, next);
		for (uint64_t i = 0; i < r.nr && !found; i++, seq++) {
			const struct nvme_block *b = buf_block(sc, i);
			int err = nvme_ahead_gone(sc->ahead, i);

			gone = err ? err : gone;
			if (journal_good(sc, b) && later_lap(sc, b, seq))
				sc->gap = true;
			if (!journal_next(sc, b, seq))
				continue;
			if (seq >= chunk)
				found = seq;
			else if (sc->blind)	/* torn, or given up */
				gone = -EIO;
		}
	}
	if (!found && gone)
		sc->gone = gone;
	return found;
}

/*
 * A piece of the journal. *@seq: where it begins, then the next block. *@sure:
 * up to here the journal is known to go. True: there is more.
 */
static bool read_piece(struct scan *sc, uint64_t *seq, uint64_t *sure, int *err)
{
	struct range r = journal_range(sc, *seq), next = { 0, 0 };
	struct nvme_found *f = sc->f;

	if (*seq + r.nr < journal_stop(sc))
		next = journal_range(sc, *seq + r.nr);
	read_blocks(sc, r, next);
	for (uint64_t i = 0; i < r.nr; i++, ++*seq) {
		const struct nvme_block *b = buf_block(sc, i);

		sc->gone = nvme_ahead_gone(sc->ahead, i);
		if (sc->gone)
			return false;
		if (journal_next(sc, b, *seq)) {
			f->max_opens = b->epoch;
			sc->writer = b->writer;
			*err = nvme_found_block(sc, b);
			if (*err)
				return false;
			continue;
		}
		if (*seq >= *sure) {
			*sure = look_on(sc, *seq);
			if (!*sure || sc->gap)
				return false;
			f->lost++;
			++*seq;
			return true;	/* the buffer shows what was looked at */
		}
		f->lost++;
	}
	return *seq < journal_stop(sc);
}

static int read_journal(struct scan *sc)
{
	struct nvme_found *f = sc->f;
	uint64_t seq = f->end.journal_seq, sure = 0;
	int gone = sc->gone, err = 0;

	f->max_opens = max(f->max_opens, f->end.opens);
	sc->writer = sc->end_writer[f->area];
	while (read_piece(sc, &seq, &sure, &err))
		;
	f->journal_end = seq;
	sc->gone = gone ? gone : sc->gone;
	return err;
}

/* ---- all of it ----------------------------------------------------------------- */

/* Everything from the checkpoint @end in @area on. */
static int scan_from(struct scan *sc, int area, const struct nvme_ent_end *end,
		     bool wary)
{
	int err;

	nvme_recover_expect(sc->nv, min(end->nr_records,
					(uint64_t)sc->sb->records));
	err = nvme_found_begin(sc, end);
	if (err)
		return err;
	sc->f->area = area;
	sc->gap = false;
	sc->wary = wary;
	sc->gone = 0;
	err = read_ckpt(sc);
	return err ? err : read_journal(sc);
}

static int no_ckpt(struct nvme *nv, const char *what)
{
	return errmsg_set(&nv->open.msg, -EUCLEAN,
			  "%s: %s: what was in the store is lost", nv->opts.path,
			  what);
}

static int unreadable(struct nvme *nv, int err)
{
	return errmsg_set(&nv->open.msg, -EIO,
			  "reading what %s remembers: %s", nv->opts.path,
			  strerror(-err));
}

/*
 * The newer checkpoint, @was, is not whole. Is what the older one led to as good
 * as it was to be? The journal has to be whole up to where the newer one begins.
 */
static bool older_will_do(const struct scan *sc, const struct nvme_ent_end *was,
			  uint64_t lost)
{
	return !sc->gap && !sc->f->bad_blocks && sc->f->lost == lost &&
	       sc->f->journal_end >= was->journal_seq;
}

/* Choose a checkpoint; see the top. */
static int scan_choose(struct scan *sc)
{
	struct nvme *nv = sc->nv;
	struct nvme_ent_end end[2];
	enum end_state st[2];
	uint64_t lost;
	int first, err;

	st[0] = read_end(sc, 0, &end[0]);
	st[1] = read_end(sc, 1, &end[1]);
	sc->blind = st[0] == END_GONE || st[1] == END_GONE;
	if (st[0] != END_GOOD && st[1] != END_GOOD)
		return sc->blind ? unreadable(nv, -EIO) :
		       no_ckpt(nv, "both checkpoints are damaged");
	first = st[0] != END_GOOD ||
		(st[1] == END_GOOD && end[1].number > end[0].number);
	err = scan_from(sc, first, &end[first],
			st[!first] == END_BAD || sc->blind);
	if (!err && sc->f->bad_blocks && st[!first] == END_GOOD) {
		lost = sc->f->lost;
		err = scan_from(sc, !first, &end[!first], true);
		if (!err && !sc->gone && !older_will_do(sc, &end[first], lost))
			err = scan_from(sc, first, &end[first], false);
	}
	if (err)
		return err;
	if (sc->gone)
		return unreadable(nv, sc->gone);
	if (sc->gap)
		return sc->blind ? unreadable(nv, -EIO) :
		       no_ckpt(nv, "the newest checkpoint is damaged");
	if (st[!first] == END_GOOD)
		sc->f->end.number = max(end[0].number, end[1].number);
	return 0;
}

int nvme_scan(struct nvme *nv, struct nvme_found **ret)
{
	struct scan sc = { .nv = nv, .sb = &nv->open.super };
	uint64_t start_ns = now_ns();
	int err;

	err = nvme_ahead_create(nv, READ_BYTES / NVME_BLOCK, &sc.ahead);
	if (err)
		return err;
	err = scan_choose(&sc);
	nvme_ahead_destroy(sc.ahead);
	if (!err)
		err = nvme_found_finish(&sc);
	nvme_found_end(&sc);
	if (err) {
		nvme_found_free(sc.f);
		return err;
	}
	sc.f->bytes = sc.bytes;
	sc.f->start_ns = start_ns;
	*ret = sc.f;
	return 0;
}
