/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The writer of a space's index; ipc/index.h has the readers and the layout.
 *
 * Where a line goes. Its home if that is free, else its other line: these two a
 * reader prefetches. If both are taken, one of the two occupants often has its
 * own second line free and is moved there. Else the emptier of the two buckets,
 * which keeps both from filling up at the same time. At half load two lines in a
 * hundred end up there, and once in ten thousand pages both buckets are full;
 * then one of the eight occupants nearly always has room in its own two and is
 * moved, or finds it once another one has moved. What still finds no place (one
 * page in a million at half load, or keys chosen to collide, for which growth is
 * no cure) pushes another line out: that page is a miss for clients until it is
 * set again, and is counted.
 *
 * A move writes the new place before it clears the old one, so that a reader
 * that probes in between sees the page at least once; seeing it twice does no
 * harm, the frame's word decides.
 *
 * Growth. Over half load a memfd with twice the lines is filled from this one,
 * line by line, and only then its epoch is published. Clients that hold the old
 * one go on reading it; it is never written again, so its entries age into
 * misses and stale frame words, which pinning finds out.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define INDEX_MIN_LINES	1024u
#define INDEX_MAX_LINES	(UINT64_C(1) << 32)
#define INDEX_MAX_WORDS	(UINT64_C(1) << 34)

/* What a line holds, read by its only writer. */
struct line_val {
	uint64_t	key[4];
	uint64_t	fword;
	uint64_t	frame;
	uint64_t	aux;
	uint16_t	group;
	uint8_t		node;
	uint8_t		flags;
};

static uint64_t peek(const _Atomic uint64_t *w)
{
	return atomic_load_explicit(w, memory_order_relaxed);
}

static uint8_t line_flags(const struct index_line *l)
{
	return peek(&l->word0) >> 56;
}

static bool line_used(const struct index_line *l)
{
	return line_flags(l) & INDEX_USED;
}

static void line_read(const struct index_line *l, struct line_val *v)
{
	uint64_t w = peek(&l->word0);
	unsigned int i;

	for (i = 0; i < 4; i++)
		v->key[i] = peek(&l->key[i]);
	v->fword = peek(&l->fword);
	v->frame = peek(&l->frame);
	v->aux = peek(&l->aux);
	v->group = w >> 32;
	v->node = w >> 48;
	v->flags = w >> 56;
}

/* Release throughout: pairs with the acquire loads of index_read_line(). */
static void line_write(struct index_line *l, const struct line_val *v)
{
	uint32_t ver = (uint32_t)peek(&l->word0) & ~1u;
	unsigned int i;

	atomic_store_explicit(&l->word0, peek(&l->word0) | 1,
			      memory_order_release);
	for (i = 0; i < 4; i++)
		atomic_store_explicit(&l->key[i], v->key[i],
				      memory_order_release);
	atomic_store_explicit(&l->fword, v->fword, memory_order_release);
	atomic_store_explicit(&l->frame, v->frame, memory_order_release);
	atomic_store_explicit(&l->aux, v->aux, memory_order_release);
	atomic_store_explicit(&l->word0,
			      index_word0(ver + 2, v->group, v->node, v->flags),
			      memory_order_release);
}

/* Nothing but the version and the flags: a reader in the middle retries. */
static void line_clear(struct index_line *l)
{
	uint32_t ver = (uint32_t)peek(&l->word0) & ~1u;

	/* release: pairs with the acquire of word0 in index_read_line() */
	atomic_store_explicit(&l->word0, index_word0(ver + 2, 0, 0, 0),
			      memory_order_release);
}

static struct index_hash hash_of(const struct index *ix, const uint64_t key[4],
				 uint16_t group, uint8_t node)
{
	return index_hash(ix->nr_lines, ix->seed, key, group, node);
}

static struct index_line *line_find(struct index *ix, struct index_hash h,
				    const uint64_t key[4], uint16_t group,
				    uint8_t node)
{
	uint64_t want = index_word0(0, group, node, 0);
	unsigned int i;

	for (i = 0; i < INDEX_PROBES; i++) {
		struct index_line *l = &ix->line[index_probe(h, i)];

		if (line_used(l) &&
		    (peek(&l->word0) & UINT64_C(0x00ffffff00000000)) == want &&
		    peek(&l->key[0]) == key[0] && peek(&l->key[1]) == key[1] &&
		    peek(&l->key[2]) == key[2] && peek(&l->key[3]) == key[3])
			return l;
	}
	return NULL;
}

/* -- finding a place ------------------------------------------------------- */

/* The first free line of probes [from, from + INDEX_BUCKET), and how many. */
static unsigned int bucket_free(struct index *ix, struct index_hash h,
				unsigned int from, struct index_line **first)
{
	unsigned int i, n = 0;

	*first = NULL;
	for (i = from; i < from + INDEX_BUCKET; i++) {
		struct index_line *l = &ix->line[index_probe(h, i)];

		if (line_used(l))
			continue;
		if (!n++)
			*first = l;
	}
	return n;
}

/* Its home or its other line. */
static struct index_line *place_near(struct index *ix, struct index_hash h)
{
	if (!line_used(&ix->line[h.home]))
		return &ix->line[h.home];
	if (!line_used(&ix->line[h.other]))
		return &ix->line[h.other];
	return NULL;
}

static struct index_line *place_far(struct index *ix, struct index_hash h)
{
	struct index_line *a, *b;
	unsigned int nr_a = bucket_free(ix, h, 0, &a);

	return bucket_free(ix, h, INDEX_BUCKET, &b) > nr_a ? b : a;
}

/* How far a page may be moved to make room, and what for. */
enum move {
	MOVE_NEAR,		/* to its other near line */
	MOVE_FAR,		/* to any line of its two buckets */
	MOVE_TWICE,		/* there, and another one makes room in turn */
};

/* Make room in @l by moving its page. */
static bool move_away(struct index *ix, struct index_line *l, enum move how)
{
	struct index_line *to;
	struct index_hash h;
	struct line_val v;
	unsigned int i;

	line_read(l, &v);
	h = hash_of(ix, v.key, v.group, v.node);
	to = place_near(ix, h);
	if (!to && how >= MOVE_FAR)
		to = place_far(ix, h);
	for (i = 0; !to && how == MOVE_TWICE && i < INDEX_PROBES; i++) {
		struct index_line *m = &ix->line[index_probe(h, i)];

		if (m != l && move_away(ix, m, MOVE_FAR))
			to = m;
	}
	if (!to)
		return false;
	line_write(to, &v);
	line_clear(l);
	return true;
}

static struct index_line *place(struct index *ix, struct index_hash h)
{
	struct index_line *l = place_near(ix, h);
	enum move how;
	unsigned int i;

	if (l)
		return l;
	if (move_away(ix, &ix->line[h.home], MOVE_NEAR))
		return &ix->line[h.home];
	if (move_away(ix, &ix->line[h.other], MOVE_NEAR))
		return &ix->line[h.other];
	l = place_far(ix, h);
	if (l)
		return l;
	/* Both buckets are full: move one of the eight. */
	for (how = MOVE_FAR; how <= MOVE_TWICE; how++) {
		for (i = 0; i < INDEX_PROBES; i++) {
			l = &ix->line[index_probe(h, i)];
			if (move_away(ix, l, how))
				return l;
		}
	}
	return NULL;
}

/* -- life ------------------------------------------------------------------ */

#define HUGE_SLICE	(8 * SHM_HUGE_BYTES)	/* a job: some ten milliseconds */
#define HUGE_PART	16	/* lines in use, one in so many, from which on */

/**
 * struct huge_job - huge pages for an index, piece by piece
 * @sp:		NULL when the space has another index by now, or none
 *
 * A look into a large table is mostly a page walk. The job has a descriptor of
 * its own, so that the worker knows nothing of the space.
 */
struct huge_job {
	struct work	work;
	struct mm_space	*sp;
	struct work_pool *pool;
	int		fd;
	uint64_t	off;
	uint64_t	bytes;
	uint64_t	slice;		/* bytes at a time */
	bool		failed;
};

static void huge_fn(struct work *w)
{
	struct huge_job *j = container_of(w, struct huge_job, work);

	j->failed = shm_huge(j->fd, j->off, min(j->bytes - j->off,
						j->slice)) < 0;
	j->off += j->slice;
}

/* One piece a job, so that others get their turn; none at all: give up. */
static void huge_done(struct work *w)
{
	struct huge_job *j = container_of(w, struct huge_job, work);

	if (j->sp && !j->failed && j->off < j->bytes) {
		work_submit(j->pool, &j->work);
		return;
	}
	if (j->sp)
		j->sp->index_huge = NULL;
	close(j->fd);
	free(j);
}

/*
 * Best effort: without it everything works, only slower. It makes all lines
 * resident. Keys are spread evenly, so at one line in HUGE_PART nearly all of them
 * are anyway: four in each memory page. Words are left alone: who reads one waits
 * for I/O next.
 */
static void index_want_huge(struct mm_space *sp, uint64_t slice)
{
	struct huge_job *j;

	sp->index_asked = true;
	if (!sp->mm->o.pool ||
	    index_bytes(sp->index->nr_lines, 0) < 2 * SHM_HUGE_BYTES)
		return;
	j = calloc(1, sizeof(*j));
	if (!j)
		return;
	j->fd = fcntl(sp->index_shm.fd, F_DUPFD_CLOEXEC, 0);
	if (j->fd < 0) {
		free(j);
		return;
	}
	j->sp = sp;
	j->pool = sp->mm->o.pool;
	j->bytes = min(round_up(index_bytes(sp->index->nr_lines, 0),
				SHM_HUGE_BYTES), sp->index_shm.bytes);
	j->slice = slice;
	j->work.fn = huge_fn;
	j->work.done = huge_done;
	j->work.bulk = true;
	sp->index_huge = j;
	work_submit(j->pool, &j->work);
}

void index_expect(struct mm_space *sp, uint64_t nr_pages)
{
	if (!sp->index_asked && nr_pages >= sp->index->nr_lines / HUGE_PART)
		index_want_huge(sp, index_bytes(sp->index->nr_lines, 0));
}

void index_expected(struct mm_space *sp, uint64_t deadline_ns)
{
	const struct timespec ts = ns_to_timespec(100 * NSEC_PER_USEC);

	while (sp->index_huge && !deadline_past(deadline_ns))
		if (!work_poll(sp->mm->o.pool, 0))
			nanosleep(&ts, NULL);
}

/* What the worker has in hand it ends, and no more. */
static void index_no_huge(struct mm_space *sp)
{
	if (sp->index_huge)
		sp->index_huge->sp = NULL;
	sp->index_huge = NULL;
	sp->index_asked = false;
}

static int index_new(struct shm *s, uint64_t nr_lines, uint64_t nr_words,
		     uint32_t epoch, const uint64_t seed[2])
{
	struct index *ix;
	int err = shm_create(s, "kvmm-index", index_bytes(nr_lines, nr_words),
			     1);

	if (err)
		return err;
	ix = s->addr;
	ix->magic = KVMM_MAGIC_INDEX;
	ix->size = sizeof(*ix);
	ix->epoch = epoch;
	ix->nr_lines = nr_lines;
	ix->nr_words = nr_words;
	ix->seed[0] = seed[0];
	ix->seed[1] = seed[1];
	return 0;
}

static void index_publish_epoch(struct mm_space *sp)
{
	/* release: pairs with the client's acquire; the lines are there */
	atomic_store_explicit(&sp->mm->hdr->space[sp->ix].index_epoch,
			      sp->index_epoch, memory_order_release);
}

int index_create(struct mm_space *sp, uint64_t nr_lines, uint64_t nr_words,
		 uint32_t epoch)
{
	uint64_t seed[2];
	int err;

	if (getrandom(seed, sizeof(seed), 0) != sizeof(seed))
		return -EIO;
	nr_lines = round_up(clamp(nr_lines, (uint64_t)INDEX_MIN_LINES,
				  INDEX_MAX_LINES), INDEX_SPAN);
	nr_words = round_up(min(nr_words, INDEX_MAX_WORDS), INDEX_WORD_SPAN);
	sp->index_shm = (struct shm)SHM_INIT;
	err = index_new(&sp->index_shm, nr_lines, nr_words, epoch, seed);
	if (err)
		return err;
	sp->index = sp->index_shm.addr;
	sp->index_epoch = epoch;
	sp->index_used = 0;
	sp->below_used = 0;
	index_publish_epoch(sp);
	return 0;
}

void index_destroy(struct mm_space *sp)
{
	index_no_huge(sp);
	shm_fini(&sp->index_shm);
	sp->index = NULL;
}

static void lines_copy(struct mm_space *sp, const struct index *old,
		       struct index *ix)
{
	uint64_t i;

	if (ix->nr_lines == old->nr_lines) {
		/* nobody has it yet: a plain copy will do */
		memcpy((void *)ix->line, (const void *)old->line,
		       index_bytes(old->nr_lines, 0) - sizeof(*old));
		return;
	}
	for (i = 0; i < old->nr_lines; i++) {
		struct index_line *to;
		struct line_val v;

		if (!line_used(&old->line[i]))
			continue;
		line_read(&old->line[i], &v);
		to = place(ix, hash_of(ix, v.key, v.group, v.node));
		if (to) {
			line_write(to, &v);
		} else {
			sp->index_used--;
			sp->index_pushed++;
		}
	}
}

int index_grow(struct mm_space *sp, uint64_t nr_lines, uint64_t nr_words)
{
	struct index *old = sp->index, *ix;
	struct shm s = SHM_INIT;
	int err;

	if (nr_lines > INDEX_MAX_LINES || nr_words > INDEX_MAX_WORDS)
		return -ENOSPC;
	err = index_new(&s, nr_lines, nr_words, sp->index_epoch + 1, old->seed);
	if (err)
		return err;
	ix = s.addr;
	lines_copy(sp, old, ix);
	if (nr_words == old->nr_words)
		memcpy((void *)&ix->line[nr_lines],
		       (const void *)&old->line[old->nr_lines],
		       nr_words * sizeof(uint64_t));
	else
		index_below_fill(sp, ix);

	index_no_huge(sp);
	shm_fini(&sp->index_shm);
	sp->index_shm = s;
	sp->index = ix;
	sp->index_epoch++;
	index_publish_epoch(sp);
	sp->mm->ops->index_grew(sp);
	return 0;
}

/* -- setting and clearing -------------------------------------------------- */

static struct line_val line_val(const struct page *pg, uint8_t node,
				uint8_t flags, uint64_t fword, uint32_t frame)
{
	struct line_val v = {
		.fword	= fword,
		.frame	= frame | (uint64_t)pg->cost_us << 32,
		.aux	= pg->pos | (uint64_t)pg->raw_bytes << 32,
		.group	= pg->group,
		.node	= node,
		.flags	= flags | INDEX_USED,
	};

	memcpy(v.key, pg->key, sizeof(v.key));
	return v;
}

void index_set(struct mm_space *sp, const struct page *pg, uint8_t node,
	       uint8_t flags, uint64_t fword, uint32_t frame)
{
	struct index_hash h = hash_of(sp->index, pg->key, pg->group, node);
	struct index_line *l = line_find(sp->index, h, pg->key, pg->group, node);
	struct line_val v;

	if (!l) {
		index_add(sp, pg, node, flags, fword, frame);
		return;
	}
	v = line_val(pg, node, flags, fword, frame);
	line_write(l, &v);
}

void index_add(struct mm_space *sp, const struct page *pg, uint8_t node,
	       uint8_t flags, uint64_t fword, uint32_t frame)
{
	struct line_val v = line_val(pg, node, flags, fword, frame);
	struct index_hash h = hash_of(sp->index, pg->key, pg->group, node);
	struct index_line *l;

	if (sp->index_used >= sp->index->nr_lines / 2 &&
	    !index_grow(sp, 2 * sp->index->nr_lines, sp->index->nr_words))
		h = hash_of(sp->index, pg->key, pg->group, node);
	l = place(sp->index, h);
	if (l) {
		sp->index_used++;
	} else {
		l = &sp->index->line[h.home];
		sp->index_pushed++;
	}
	line_write(l, &v);
	if (!sp->index_asked &&
	    sp->index_used >= sp->index->nr_lines / HUGE_PART)
		index_want_huge(sp, HUGE_SLICE);
}

void index_prefetch(const struct mm_space *sp, const uint64_t key[4],
		    uint16_t group, uint8_t node)
{
	struct index_hash h = hash_of(sp->index, key, group, node);

	__builtin_prefetch(&sp->index->line[h.home], 1);
}

void index_clear(struct mm_space *sp, const struct page *pg, uint8_t node)
{
	struct index_line *l = line_find(sp->index,
			hash_of(sp->index, pg->key, pg->group, node),
			pg->key, pg->group, node);

	if (!l)
		return;		/* it was pushed out, or never there */
	line_clear(l);
	sp->index_used--;
}

/* Here, since index_grew() is what it is for: that has only the space. */
void *mm_space_arg(const struct mm_space *sp)
{
	return sp->mm->o.ops_arg;
}
