/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for many small things, see slab.h. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/mm/slab.h"

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

static bool slab_more(struct slabs *s)
{
	size_t bytes = SLAB_BYTES, off;
	struct slab *sl;

	if (s->bytes >= BIG_SLAB_FROM)
		bytes = BIG_SLAB_BYTES;
	sl = aligned_alloc(bytes, bytes);
	if (!sl)
		return false;
	if (bytes == BIG_SLAB_BYTES)
		madvise(sl, bytes, MADV_HUGEPAGE);
	sl->next = s->first;
	s->first = sl;
	s->bytes += bytes;
	for (off = sizeof(*sl); off + s->size <= bytes; off += s->size)
		slab_put(s, (char *)sl + off);
	return true;
}

void *slab_get(struct slabs *s)
{
	void *p;

	if (!s->free && !slab_more(s))
		return NULL;
	p = s->free;
	s->free = *next_of(p);
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

void slabs_fini(struct slabs *s)
{
	struct slab *sl;

	while ((sl = s->first)) {
		s->first = sl->next;
		free(sl);
	}
	*s = (struct slabs){ .size = s->size };
}
