/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for many small things, see slab.h. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/mm/slab.h"
#include "ipc/base/bits.h"

#define SLAB_BYTES	((size_t)256 << 10)
#define BIG_SLAB_BYTES	((size_t)2 << 20)	/* a hugepage, if there are any */
#define BIG_SLAB_FROM	(8 * SLAB_BYTES)

struct slab {
	struct slab	*next;
	_Alignas(64) char mem[];
};

/* The next one stands where its key, or whatever, will. */
static void **next_of(void *p)
{
	return p;
}

static size_t left_of(const struct slabs *s)
{
	return (size_t)(s->end - s->at);
}

/* What is left of the piece in use is little, and goes to the free list. */
static bool slab_add(struct slabs *s, size_t bytes)
{
	size_t align = min(bytes, BIG_SLAB_BYTES);
	struct slab *sl = aligned_alloc(align, bytes);

	if (!sl)
		return false;
	if (align == BIG_SLAB_BYTES)
		madvise(sl, bytes, MADV_HUGEPAGE);
	for (; left_of(s) >= s->size; s->at += s->size)
		slab_put(s, s->at);
	sl->next = s->first;
	s->first = sl;
	s->bytes += bytes;
	s->at = sl->mem;
	s->end = (char *)sl + bytes;
	return true;
}

static bool slab_more(struct slabs *s)
{
	return slab_add(s, s->bytes >= BIG_SLAB_FROM ? BIG_SLAB_BYTES :
						       SLAB_BYTES);
}

void *slab_get(struct slabs *s)
{
	void *p = s->free;

	if (p) {
		s->free = *next_of(p);
		return memset(p, 0, s->size);
	}
	if (left_of(s) < s->size && !slab_more(s))
		return NULL;
	p = s->at;
	s->at += s->size;
	return memset(p, 0, s->size);
}

void slab_put(struct slabs *s, void *p)
{
#ifdef KVMM_TEST_BUILD
	memset(p, 0xdb, s->size);	/* whoever follows a pointer in it falls */
#endif
	*next_of(p) = s->free;
	s->free = p;
}

bool slabs_reserve(struct slabs *s, uint64_t nr)
{
	uint64_t most = SIZE_MAX / 2 / s->size, bytes;

	if (nr > most)
		return false;
	if (left_of(s) / s->size >= nr)
		return true;
	/* one that was hardly used, say: not to be cut up for the next */
	if (left_of(s) > BIG_SLAB_BYTES)
		return false;
	bytes = round_up(sizeof(struct slab) + nr * s->size, BIG_SLAB_BYTES);
	return slab_add(s, bytes);
}

void slabs_trim(struct slabs *s)
{
	uintptr_t from = round_up((uintptr_t)s->at, BIG_SLAB_BYTES);

	if (from < (uintptr_t)s->end)
		madvise((void *)from, (uintptr_t)s->end - from, MADV_DONTNEED);
}

void slabs_fini(struct slabs *s)
{
	struct slab *sl;

	while ((sl = s->first)) {
		s->first = sl->next;
		free(sl);
	}
	*s = (struct slabs){ .size = s->size };
}
