/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quarantine: OPEN frames of an engine that has ended.
 *
 * Nobody else ever saw what is in them, and nobody will finish it. No process of
 * the engine runs any more, so nothing writes there; workers zero them, in
 * portions that leave the workers time for others, and then they are free. A
 * frame that a worker still reads (a checksum) comes when that is over.
 */
#include <stdlib.h>

#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"

#define ZERO_JOB_FRAMES	1024u
#define ZERO_JOB_BYTES	(UINT64_C(32) << 20)	/* some 5 ms of one worker */

/* Frames of one pool that a worker zeroes. */
struct zero_job {
	struct work	work;
	struct mm_pool	*pool;
	uint32_t	n, nr_parts;
	uint32_t	stride;
	uint32_t	frame[ZERO_JOB_FRAMES];
	void		*part[ZERO_JOB_FRAMES];	/* all of each frame */
};

static void zero_fn(struct work *work)
{
	struct zero_job *j = container_of(work, struct zero_job, work);
	uint32_t i;

	for (i = 0; i < j->nr_parts; i++)
		memset(j->part[i], 0, j->stride);
}

static void zero_done(struct work *work)
{
	struct zero_job *j = container_of(work, struct zero_job, work);
	struct mm_pool *p = j->pool;
	uint32_t i;

	p->space->mm->nr_jobs--;
	for (i = 0; i < j->n; i++)
		frame_put(p, j->frame[i]);
	free(j);
	pool_feed(p);
}

static void zero_submit(struct zero_job *j)
{
	struct mm *mm = j->pool->space->mm;

	mm->nr_jobs++;
	if (mm->o.pool) {
		work_submit(mm->o.pool, &j->work);
		return;
	}
	zero_fn(&j->work);
	zero_done(&j->work);
}

/* Adds @f to *@job and hands that over when it is full. */
static void zero_add(struct zero_job **job, struct mm_pool *p, uint32_t f)
{
	struct zero_job *j = *job;
	uint32_t rank;

	if (!j) {
		j = malloc(sizeof(*j));
		if (!j) {
			/* slow, but the frame is not lost */
			for (rank = 0; rank < p->parts; rank++)
				memset(frame_part(p, f, rank), 0, p->stride);
			frame_put(p, f);
			return;
		}
		memset(&j->work, 0, sizeof(j->work));
		j->work.fn = zero_fn;
		j->work.done = zero_done;
		j->work.bulk = true;
		j->pool = p;
		j->stride = p->stride;
		j->n = 0;
		j->nr_parts = 0;
		*job = j;
	}
	p->meta[f].flags |= FMETA_ZERO;
	j->frame[j->n++] = f;
	for (rank = 0; rank < p->parts; rank++)
		j->part[j->nr_parts++] = frame_part(p, f, rank);
	if (j->nr_parts + p->parts <= ZERO_JOB_FRAMES &&
	    (uint64_t)j->nr_parts * p->stride < ZERO_JOB_BYTES)
		return;
	zero_submit(j);
	*job = NULL;
}

void frame_zero(struct mm_pool *p, uint32_t f)
{
	struct zero_job *job = NULL;

	zero_add(&job, p, f);
	if (job)
		zero_submit(job);
}

/* OPEN frames of @e in @p: nobody else knows them, nobody will finish them. */
void pool_quarantine(struct mm_pool *p, struct mm_engine *e)
{
	struct zero_job *job = NULL;
	uint32_t no, f, end;

	for (no = 1; no <= p->max_extents && e->nr_open; no++) {
		if (!p->extent[no].ext || !p->extent[no].nr_used)
			continue;
		f = no * p->per_extent;
		for (end = f + p->per_extent; f < end; f++) {
			struct frame_meta *m = &p->meta[f];

			if (m->owner != e ||
			    frame_word_state(frame_word_of(p, f)) != FRAME_OPEN)
				continue;
			frame_quarantine(p, f);
			if (!m->refs)
				zero_add(&job, p, f);
		}
	}
	if (job)
		zero_submit(job);
}
