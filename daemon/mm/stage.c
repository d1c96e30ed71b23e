/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Staging: where a page of a gang lies in order, on its way to or from a block
 * node.
 *
 * A block node moves one run of bytes and sums it up; a frame of a gang has
 * several. So a worker gathers the page into a buffer before the write, and
 * scatters it from one after the read. A buffer belongs to its I/O, and goes back
 * when neither kernel nor workers use it any more (see struct node_io).
 *
 * What is out is bounded: STAGE_BYTES, of which writes get half, and one buffer
 * while a load waits: stores cannot starve loads, nor are they starved. One load
 * and one write are always possible, however large the page. A load that finds no
 * buffer waits for one (flight.c), a page that is to be written stays where it is.
 *
 * Fresh memory costs about what the copy costs, in page faults. So buffers are
 * kept for the next of their size, and freed after a second without any use.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "daemon/mm/tier.h"

/* A guess: twice what may be on its way to one node at once (writeback.c). */
#define STAGE_BYTES	(UINT64_C(64) << 20)
#define STAGE_IDLE_NS	NSEC_PER_SEC

static void stage_free(struct mm *mm, struct stage *s)
{
	list_del(&s->link);
	mm->stage.bytes -= s->bytes;
	munmap(s->mem, s->bytes);
	free(s);
}

static void stage_trim(struct mm *mm, uint64_t most)
{
	struct stage *s;

	while (mm->stage.bytes > most &&
	       (s = list_first(&mm->stage.kept, struct stage, link)))
		stage_free(mm, s);
}

static struct stage *stage_create(struct mm *mm, size_t bytes)
{
	struct stage *s = malloc(sizeof(*s));

	if (!s)
		return NULL;
	s->bytes = bytes;
	s->mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (s->mem == MAP_FAILED) {
		free(s);
		return NULL;
	}
	madvise(s->mem, bytes, MADV_DONTDUMP);
	madvise(s->mem, bytes, MADV_DONTFORK);
	list_init(&s->link);
	mm->stage.bytes += bytes;
	return s;
}

/* The last one of this size that came back: some of it may be in a cache. */
static struct stage *stage_again(struct mm *mm, size_t bytes)
{
	struct list *l;

	for (l = mm->stage.kept.prev; l != &mm->stage.kept; l = l->prev) {
		struct stage *s = list_entry(l, struct stage, link);

		if (s->bytes != bytes)
			continue;
		list_del(&s->link);
		return s;
	}
	return NULL;
}

struct stage *stage_get(struct mm *mm, uint32_t len, enum node_dir dir)
{
	size_t bytes = round_up((uint64_t)len, NODE_ALIGN);
	uint64_t out = mm->stage.out[dir];
	uint64_t limit = STAGE_BYTES;
	struct stage *s;

	if (dir == NODE_WRITE) {
		limit /= 2;
		if (out && !list_empty(&mm->stage.wait))
			return NULL;
	}
	if (out && mm->stage.out[NODE_READ] + mm->stage.out[NODE_WRITE] +
		   bytes > STAGE_BYTES)
		return NULL;
	if (out && out + bytes > limit)
		return NULL;
	s = stage_again(mm, bytes);
	if (!s) {
		/* buffers of other sizes make room */
		stage_trim(mm, STAGE_BYTES - min(bytes, STAGE_BYTES));
		s = stage_create(mm, bytes);
	}
	if (!s)
		return NULL;
	s->dir = dir;
	mm->stage.out[dir] += bytes;
	return s;
}

void stage_put(struct mm *mm, struct stage *s)
{
	if (!s)
		return;
	mm->stage.out[s->dir] -= s->bytes;
	list_add_tail(&mm->stage.kept, &s->link);
	stage_trim(mm, STAGE_BYTES);
	mm->stage.idle_ns = now_ns() + STAGE_IDLE_NS;
}

uint64_t stage_run(struct mm *mm, uint64_t now)
{
	if (list_empty(&mm->stage.kept))
		return UINT64_MAX;
	if (now < mm->stage.idle_ns)
		return mm->stage.idle_ns;
	stage_trim(mm, 0);
	return UINT64_MAX;
}

void stage_init(struct mm *mm)
{
	list_init(&mm->stage.kept);
	list_init(&mm->stage.wait);
}

void stage_fini(struct mm *mm)
{
	stage_trim(mm, 0);
}

uint64_t mm_stage_bytes(const struct mm *mm)
{
	return mm->stage.bytes;
}
