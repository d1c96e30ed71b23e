/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking over pools: frame table, records and extents.
 *
 * A pool is adopted with the geometry that it had: where a frame lies follows from
 * it, in every process. What a node's size is now decides only of what comes. One
 * that is given up is made anew, and
 * in the table that clients still have all frames turn FREE, so that nobody finds
 * anything there; what they have pinned they go on reading, in memory that is
 * theirs alone by then.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"
#include "ipc/base/fd.h"

/* -- giving up ------------------------------------------------------------------- */

/* FREE, with the generation that it had. */
static void words_retire(struct frame_table *t, uint64_t from, uint64_t end)
{
	uint64_t f;

	for (f = from; f < end; f++) {
		uint64_t w = atomic_load_explicit(&t->word[f],
						  memory_order_relaxed);

		if (frame_word_state(w) == FRAME_FREE)
			continue;
		/* seq_cst: as any word that a pin may race with */
		atomic_store_explicit(&t->word[f],
				      frame_word(frame_word_gen(w), FRAME_FREE),
				      memory_order_seq_cst);
	}
}

/* Only where the file has memory: reading the rest would make it. */
static void table_retire(const struct shm *s)
{
	struct frame_table *t = s->addr;
	off_t at = 0, hole, end = (off_t)s->bytes;

	while (at < end) {
		at = lseek(s->fd, at, SEEK_DATA);
		if (at < 0)
			return;
		hole = lseek(s->fd, at, SEEK_HOLE);
		hole = hole < 0 || hole > end ? end : hole;
		at = max(at, (off_t)sizeof(*t));
		if (at < hole)
			words_retire(t, (uint64_t)(at - (off_t)sizeof(*t)) / 8,
				     (uint64_t)(hole - (off_t)sizeof(*t)) / 8);
		at = hole;
	}
}

/* -- table and records ----------------------------------------------------------- */

static const char *table_wrong(const struct frame_table *t,
			       const struct mm_pool *p)
{
	if (t->magic != KVMM_MAGIC_TABLE || t->size != sizeof(*t))
		return "its frame table is none";
	if (t->stride != p->stride || t->max_frames != p->max_frames ||
	    t->frames_per_extent != p->per_extent ||
	    t->extent_bytes != pool_part_bytes(p))
		return "its frame table has another geometry";
	return NULL;
}

/* Takes the geometry over from @h, if it can have been @p's. */
static const char *head_take(const struct keep_pool *h, struct mm_pool *p)
{
	struct keep_pool want;
	uint64_t frames;

	if (h->magic != KEEP_MAGIC_POOL || h->crc != keep_pool_crc(h))
		return "its records are none";
	frames = (h->max_extents + UINT64_C(1)) * h->per_extent;
	if (h->per_extent < 2 || !h->max_extents || frames > KVMM_MAX_FRAMES)
		return "its records are of no possible geometry";
	p->per_extent = h->per_extent;
	p->max_extents = h->max_extents;
	p->max_frames = frames;
	keep_pool_layout(p, &want);
	keep_pool_of(&want, h->table);
	if (memcmp(h, &want, sizeof(want)))
		return "its records are of another state, node or size of pages";
	if (!keep_id_same(keep_id_of(p->table_shm.fd), h->table))
		return "what was kept as its frame table is another one";
	return NULL;
}

static const char *pool_judge(struct mm_pool *p)
{
	const struct keep_pool *h = p->record_shm.addr;
	const char *why;

	if (p->record_shm.bytes < sizeof(*h))
		return "its records are none";
	why = head_take(h, p);
	if (!why && p->record_shm.bytes != h->bytes)
		why = "its records are not all there";
	if (!why && p->table_shm.bytes != frame_table_bytes(p->max_frames))
		why = "its frame table has another size";
	if (!why)
		why = table_wrong(p->table_shm.addr, p);
	return why ? why : adopt_pool_windows(p);
}

int adopt_pool_shm(struct mm_pool *p)
{
	uint32_t per = p->per_extent, extents = p->max_extents;
	uint32_t frames = p->max_frames;
	struct mm *mm = p->space->mm;
	char table[KEEP_NAME], record[KEEP_NAME];
	int no_table, no_record;
	const char *why;

	keep_name_pool(p, "table", table);
	keep_name_pool(p, "record", record);
	no_table = adopt_shm(mm, table, 0, true, &p->table_shm);
	no_record = adopt_shm(mm, record, 0, false, &p->record_shm);
	if (no_table == -ENOENT && no_record == -ENOENT)
		return -ENOENT;
	if (no_table == -ENOENT)
		goto out_drop;		/* it was being made, nobody knew it */
	if (no_table || no_record)
		why = "its frame table or its records are not there";
	else
		why = pool_judge(p);
	if (!why) {
		mm->adopted.pools++;
		return 0;
	}
	p->per_extent = per;
	p->max_extents = extents;
	p->max_frames = frames;
	adopt_gave_up(mm, "class %u of space %u on node %s cannot be adopted: %s",
		      p->cls, p->space->ix, p->nd->node->name, why);
	if (!no_table)
		table_retire(&p->table_shm);
out_drop:
	shm_fini(&p->table_shm);
	shm_fini(&p->record_shm);
	mm->keep->ops->drop(mm->o.ops_arg, table);
	mm->keep->ops->drop(mm->o.ops_arg, record);
	return -ENOENT;
}

/* -- extents --------------------------------------------------------------------- */

static const struct keep_extent *extents_of(const struct mm_pool *p)
{
	return (const struct keep_extent *)
		((const struct keep_pool *)p->record_shm.addr + 1);
}

/* A window of @p's, void or not, whose client is @c. */
static bool client_has(const struct mm_client *c, const struct mm_pool *p)
{
	const struct mm_win *w;

	list_for_each_entry(w, &c->windows, client_link)
		if (w->pool == p)
			return true;
	return false;
}

/* Who has a window of @p has lost a part of it. */
static void clients_lose(const struct mm_pool *p)
{
	struct mm_engine *e;
	struct mm_client *c;

	list_for_each_entry(e, &p->space->mm->engines, link)
		list_for_each_entry(c, &e->members, engine_link)
			if (client_has(c, p))
				adopt_partial(c);
}

/* Is there a client that has lost a part of @p, now or before, and lives? */
static bool clients_lost(const struct mm_pool *p)
{
	struct mm_engine *e;
	struct mm_client *c;

	list_for_each_entry(e, &p->space->mm->engines, link)
		list_for_each_entry(c, &e->members, engine_link)
			if (!c->whole && client_has(c, p))
				return true;
	return false;
}

/* What was in it is lost; clients that have it mapped read on there. */
static void extent_give_up(struct mm_pool *p, uint32_t no, const char *why)
{
	struct mm *mm = p->space->mm;

	adopt_gave_up(mm, "extent %u of class %u of space %u on node %s: %s",
		      no, p->cls, p->space->ix, p->nd->node->name, why);
	clients_lose(p);
	words_retire(p->table, (uint64_t)no * p->per_extent,
		     (no + UINT64_C(1)) * p->per_extent);
	keep_extent_lose(p, no);
	extent_lose(p, no);
}

/* A daemon before the last one gave it up. */
static void extent_lost(struct mm_pool *p, uint32_t no)
{
	if (clients_lost(p))
		extent_lose(p, no);
	else
		keep_extent_drop(p, no);
}

static void extent_take(struct mm_pool *p, uint32_t no,
			const struct keep_extent *kx)
{
	struct mm *mm = p->space->mm;
	struct extent *ext;
	char name[KEEP_NAME];
	int fd, err;

	if (kx->crc != keep_extent_crc(kx) || (kx->id &&
	    kx->bytes != pool_extent_bytes(p))) {
		extent_give_up(p, no, "its record is torn");
		return;
	}
	if (kx->flags & KEEP_EXTENT_LOST) {
		extent_lost(p, no);
		return;
	}
	keep_name_extent(p, no, name);
	fd = mm->keep->ops->take(mm->o.ops_arg, name);
	if (fd < 0) {
		extent_give_up(p, no, "nobody kept it");
		return;
	}
	if (!keep_id_same(keep_id_of(fd), kx->mem)) {
		close(fd);
		extent_give_up(p, no, "another one was kept");
		return;
	}
	err = node_extent_adopt(p->nd->node, fd, kx->bytes, kx->id, &ext);
	if (err) {
		extent_give_up(p, no, strerror(-err));
		return;
	}
	extent_adopt(p, no, ext, kx);
	mm->adopted.extents++;
}

void adopt_extents(struct mm_pool *p)
{
	const struct keep_extent *kx = extents_of(p);
	uint32_t no;

	for (no = 1; no <= p->max_extents; no++)
		if (kx[no].id || kx[no].crc)
			extent_take(p, no, &kx[no]);
}
