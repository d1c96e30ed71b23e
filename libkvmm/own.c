/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a request owns in a view: OPEN frames, and pins beside those of its match.
 */
#include <stdlib.h>
#include <string.h>

#include "libkvmm/lib.h"

struct kvmm_own *kvmm_req_own(struct kvmm_req *rq, struct kvmm_view *v)
{
	unsigned int i;

	for (i = 0; i < rq->nr_own; i++)
		if (rq->own[i].view == v)
			return &rq->own[i];
	if (rq->nr_own == ARRAY_SIZE(rq->own))
		return NULL;
	rq->own[i].view = v;
	rq->own[i].nr_open = 0;
	rq->own[i].nr_pin = 0;
	rq->nr_own++;
	return &rq->own[i];
}

static int grow(uint32_t **list, uint32_t *cap, uint64_t want)
{
	uint64_t n = roundup_pow2(want < 64 ? 64 : want);
	uint32_t *p;

	if (want <= *cap)
		return 0;
	p = realloc(*list, n * sizeof(*p));
	if (!p)
		return kvmm_fail(-ENOMEM, "out of memory");
	*list = p;
	*cap = n;
	return 0;
}

int kvmm_own_room_open(struct kvmm_req *rq, struct kvmm_own *o, uint32_t n)
{
	return grow(&o->open, &o->cap_open,
		    (uint64_t)o->nr_open + n + rq->nr_flying);
}

int kvmm_own_room_pin(struct kvmm_req *rq, struct kvmm_own *o, uint32_t n)
{
	return grow(&o->pin, &o->cap_pin,
		    (uint64_t)o->nr_pin + n + rq->nr_flying);
}

/*
 * view.pos says where in its owner's list a frame stands. Frames of others are
 * looked at too, when somebody frees what is not his: hence relaxed atomics,
 * and the check that the place agrees.
 */
void kvmm_own_add_open(struct kvmm_own *o, uint32_t frame)
{
	atomic_store_explicit(&o->view->pos[frame], o->nr_open,
			      memory_order_relaxed);
	o->open[o->nr_open++] = frame;
}

static int64_t open_pos(const struct kvmm_own *o, uint32_t frame)
{
	uint32_t pos;

	if (frame >= o->view->max_frames)
		return -1;
	pos = atomic_load_explicit(&o->view->pos[frame], memory_order_relaxed);
	return pos < o->nr_open && o->open[pos] == frame ? (int64_t)pos : -1;
}

bool kvmm_own_has_open(const struct kvmm_own *o, uint32_t frame)
{
	return open_pos(o, frame) >= 0;
}

bool kvmm_own_del_open(struct kvmm_own *o, uint32_t frame)
{
	int64_t pos = open_pos(o, frame);
	uint32_t last;

	if (pos < 0)
		return false;
	last = o->open[--o->nr_open];
	o->open[pos] = last;
	atomic_store_explicit(&o->view->pos[last], pos, memory_order_relaxed);
	return true;
}

void kvmm_own_add_pin(struct kvmm_own *o, uint32_t frame)
{
	o->pin[o->nr_pin++] = frame;
}

/* The oldest is asked for first, as a rule: what passes out of a window. */
bool kvmm_own_del_pin(struct kvmm_own *o, uint32_t frame)
{
	uint32_t i;

	for (i = 0; i < o->nr_pin && o->pin[i] != frame; i++)
		;
	if (i == o->nr_pin)
		return false;
	o->nr_pin--;
	memmove(&o->pin[i], &o->pin[i + 1], (o->nr_pin - i) * sizeof(*o->pin));
	return true;
}

void kvmm_own_unpin(struct kvmm_own *o)
{
	while (o->nr_pin)
		kvmm_unpin_own(o->view, o->pin[--o->nr_pin]);
}
