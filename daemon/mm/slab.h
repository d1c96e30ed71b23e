/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slab.h - many small things of one size
 *
 * They come from large pieces of memory, in order of address, and go back to a
 * free list; the pieces stay until the end.
 */
#ifndef KVMM_DAEMON_MM_SLAB_H
#define KVMM_DAEMON_MM_SLAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct slab;

/**
 * struct slabs - things of one size
 * @size:	of one, a multiple of 8
 * @free:	of those that are free, the first; each names the next
 * @at:		from here on up to @end nothing was ever handed out
 * @first:	pieces of memory
 * @bytes:	of them
 */
struct slabs {
	size_t		size;
	void		*free;
	char		*at, *end;
	struct slab	*first;
	uint64_t	bytes;
};

static inline void slabs_init(struct slabs *s, size_t size)
{
	*s = (struct slabs){ .size = (size + 7) & ~(size_t)7 };
}

void slabs_fini(struct slabs *s);

/** slab_get() - a zeroed one, or NULL */
void *slab_get(struct slabs *s);

/** slab_put() - it is free */
void slab_put(struct slabs *s, void *p);

/**
 * slabs_reserve() - have address space for @nr more, from @s->at on
 *
 * Its memory comes when it is touched; who touches it first need not be who uses
 * it.
 *
 * Return: false when there is none.
 */
bool slabs_reserve(struct slabs *s, uint64_t nr);

/** slabs_trim() - give memory back that was touched and is not used */
void slabs_trim(struct slabs *s);

#endif
