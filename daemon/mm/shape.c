/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cutting pages into parts: see shape.h.
 *
 * The runs of a shape stand in the page's order and cover it once, so one walk
 * over them gathers, scatters or sums. A stripe gives a run for each rank; what
 * is adjacent on both sides is one run: mirrors that follow each other do, and in
 * a world of one everything does. A mirror is read from the first part, and
 * written to all.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <kvmm/kvmm.h>

#include "daemon/mm/shape.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"

/* Behind the last run, or as part of it. */
static void run_add(struct shape *sh, const struct shape_run *r)
{
	struct shape_run *last = sh->nr_runs ? &sh->run[sh->nr_runs - 1] : NULL;

	if (last && last->mirror == r->mirror && last->rank == r->rank &&
	    last->at + last->len == r->at && last->off + last->len == r->off)
		last->len += r->len;
	else
		sh->run[sh->nr_runs++] = *r;
}

static void seg_runs(struct shape *sh, const struct desc_seg *s, uint32_t at,
		     uint32_t off)
{
	bool mirror = s->shard == KVMM_MIRROR && sh->world > 1;
	uint32_t ranks = mirror ? 1 : sh->world;
	uint32_t len = desc_part_bytes(s, sh->world), rank;

	for (rank = 0; rank < ranks; rank++) {
		struct shape_run r = {
			.at = at + rank * len, .off = off, .len = len,
			.rank = rank, .mirror = mirror,
		};

		run_add(sh, &r);
	}
}

struct shape *shape_create(const struct desc_class *c, uint32_t world)
{
	uint32_t *off = malloc(c->nsegs * sizeof(*off)), at = 0, i;
	struct shape *sh;

	sh = malloc(sizeof(*sh) +
		    (size_t)c->nsegs * world * sizeof(sh->run[0]));
	if (!sh || !off) {
		free(sh);
		free(off);
		return NULL;
	}
	*sh = (struct shape){
		.world = world, .page_bytes = c->page_bytes,
		.part_bytes = desc_part(c, world, off),
	};
	for (i = 0; i < c->nsegs; i++) {
		seg_runs(sh, &c->segs[i], at, off[i]);
		at += c->segs[i].bytes;
	}
	free(off);
	return sh;
}

/* -- walking the runs ---------------------------------------------------------- */

/* Of run @i, what lies within the first @len bytes of the page; 0: nothing. */
static uint32_t run_len(const struct shape *sh, uint32_t i, uint32_t len)
{
	const struct shape_run *r = &sh->run[i];

	return r->at < len ? min(r->len, len - r->at) : 0;
}

/* Into every part that has it. */
static void run_put(const struct image *to, const struct shape_run *r,
		    const uint8_t *from, uint32_t len)
{
	uint32_t rank;

	if (!r->mirror) {
		memcpy(to->part[r->rank] + r->off, from, len);
		return;
	}
	for (rank = 0; rank < to->sh->world; rank++)
		memcpy(to->part[rank] + r->off, from, len);
}

void image_copy(const struct image *to, const struct image *from)
{
	const struct shape *sh = to->sh ? to->sh : from->sh;
	uint32_t i, len;

	if (!sh) {
		memcpy(to->part[0], from->part[0], from->len);
		return;
	}
	for (i = 0; i < sh->nr_runs; i++) {
		const struct shape_run *r = &sh->run[i];
		const uint8_t *src = from->sh ? from->part[r->rank] + r->off :
						from->part[0] + r->at;

		len = run_len(sh, i, from->len);
		if (!len)
			break;
		if (to->sh)
			run_put(to, r, src, len);
		else
			memcpy(to->part[0] + r->at, src, len);
	}
}

uint32_t image_crc(const struct image *im)
{
	uint32_t crc = 0, i, len;

	if (!im->sh)
		return kvmm_crc32c(0, im->part[0], im->len);
	for (i = 0; i < im->sh->nr_runs; i++) {
		const struct shape_run *r = &im->sh->run[i];

		len = run_len(im->sh, i, im->len);
		if (!len)
			break;
		crc = kvmm_crc32c(crc, im->part[r->rank] + r->off, len);
	}
	return crc;
}
