/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a page of a gang is cut into parts, and back.
 *
 * The bytes of a page have one order that does not depend on where it lies: its
 * segments, one after the other, each as the whole gang has it. That is what a
 * plain node's frame holds, what is written below, and what checksums are of.
 * On a gang each rank has a part of its own (desc_part()): its share of a stripe,
 * and all of a mirror.
 */
#ifndef KVMM_DAEMON_MM_SHAPE_H
#define KVMM_DAEMON_MM_SHAPE_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/desc.h"

/**
 * struct shape_run - bytes that are adjacent both in the page and in a part
 * @at:		in the page
 * @off:	in the part
 * @rank:	whose part; of a mirror 0, from which it is read
 * @mirror:	at @off in all parts
 */
struct shape_run {
	uint32_t	at;
	uint32_t	off;
	uint32_t	len;
	uint8_t		rank;
	uint8_t		mirror;
};

/**
 * struct shape - of a class, for a world
 * @run:	in the page's order, without a gap
 */
struct shape {
	uint32_t	world;
	uint32_t	page_bytes;
	uint32_t	part_bytes;
	uint32_t	nr_runs;
	struct shape_run run[];
};

/**
 * shape_create() - compute the runs
 * @world:	1 to %KVMM_MAX_GANG, what the stripes divide by
 * Return: NULL when out of memory. The caller's: free().
 */
struct shape *shape_create(const struct desc_class *c, uint32_t world);

/**
 * struct image - where the bytes of a page are
 * @sh:		NULL: they are at @part[0], in order
 * @part:	of each rank
 * @len:	the first so many of the page's bytes
 *
 * Whoever makes one holds the memory and the shape for as long as it is used;
 * workers need nothing else of a frame.
 */
struct image {
	const struct shape *sh;
	uint8_t		*part[KVMM_MAX_GANG];
	uint32_t	len;
};

/* Memory that holds a page in order. */
static inline struct image image_flat(void *mem, uint32_t len)
{
	return (struct image){ .part = { mem }, .len = len };
}

/**
 * image_copy() - the bytes of a page from one place to another
 * @to:		of @from's length; parts of the same shape if both are in parts
 *
 * Context: any thread.
 */
void image_copy(const struct image *to, const struct image *from);

/** image_crc() - CRC32C of the page's bytes, in the page's order */
uint32_t image_crc(const struct image *im);

#endif
