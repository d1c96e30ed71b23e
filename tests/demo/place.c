/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which memory an address is: inode and offset of the file behind it, as the
 * kernel tells in /proc/self/maps. Two processes that say the same look at the
 * same bytes, and nobody copied them.
 */
#include <inttypes.h>
#include <stdio.h>

#include "tests/demo/demo.h"

/* Offsets stay below 2^40; 24 bits of the inode tell extents apart. */
static uint64_t place_id(uint64_t inode, uint64_t offset)
{
	return inode << 40 | offset;
}

static uint64_t look_up(uintptr_t ptr)
{
	char line[512];
	uint64_t id = 0;
	FILE *f = fopen("/proc/self/maps", "re");

	if (!f)
		return 0;
	while (fgets(line, sizeof(line), f)) {
		uint64_t from, to, off, inode;

		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %" SCNx64
			   " %*s %" SCNu64, &from, &to, &off, &inode) != 4)
			continue;
		if (ptr >= from && ptr < to) {
			id = place_id(inode, off + (ptr - from));
			break;
		}
	}
	fclose(f);
	return id;
}

void places_on_extent(void *arg, void *ptr, size_t bytes, int up)
{
	struct places *pl = arg;
	unsigned int i;

	for (i = 0; i < pl->nr; i++)
		if (pl->ext[i].ptr == (uintptr_t)ptr)
			break;
	if (!up) {
		if (i < pl->nr)
			pl->ext[i] = pl->ext[--pl->nr];
		return;
	}
	if (i == sizeof(pl->ext) / sizeof(pl->ext[0]))
		return;
	pl->ext[i].ptr = (uintptr_t)ptr;
	pl->ext[i].bytes = bytes;
	pl->ext[i].id = look_up((uintptr_t)ptr);
	if (i == pl->nr)
		pl->nr++;
}

uint64_t places_find(const struct places *pl, const void *ptr)
{
	unsigned int i;

	for (i = 0; i < pl->nr; i++) {
		uintptr_t off = (uintptr_t)ptr - pl->ext[i].ptr;

		if (off < pl->ext[i].bytes)
			return pl->ext[i].id + off;
	}
	return 0;
}
