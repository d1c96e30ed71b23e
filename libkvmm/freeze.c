/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frozen matches: what the leader's last match of a request found, for the ranks
 * that compute with it.
 *
 * The leader writes it into a log in its ledger (struct ledger_frozen) and the
 * position into a table by the request's id. A request keeps its place in the
 * table to its end, and at most as many have one as there are request slots, so
 * a place is nearly always found. The log is a ring: a record that was
 * overwritten before its request has ended is none, and neither is one that is
 * longer than half of the ring.
 *
 * The frames are pinned by the leader. Who reads the record pins nothing, so
 * what it has holds for as long as leader and rank agree that the request
 * lives: that is what steps are for.
 *
 * A rank believes the leader what it found, but no length, index or position:
 * they are copied once and judged before use. A frame that is a HIT is one that
 * is mapped here, or there is no answer.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "libkvmm/lib.h"

#define POS_BITS	48
#define POS_MASK	((UINT64_C(1) << POS_BITS) - 1)
#define UNIT		64u	/* records begin at multiples of it */
#define HIT_BYTES	sizeof(struct kvmm_hit)
#define READ_TRIES	64

static_assert(HIT_BYTES == 12, "struct ledger_match has them as they are");
static_assert(LEDGER_FROZEN_SLOTS > 2 * LEDGER_REQ_SLOTS, "room for a hash");

static uint64_t hash(uint64_t id, uint32_t space)
{
	uint64_t h = (id ^ (uint64_t)space << 48) * UINT64_C(0x9e3779b97f4a7c15);

	h = (h ^ h >> 32) * UINT64_C(0xd6e8feb86659fd93);
	return h ^ h >> 32;
}

static _Atomic uint64_t *slot_of(const struct ledger_frozen *f, uint64_t h,
				 unsigned int probe)
{
	return &((struct ledger_frozen *)f)->slot[(h + probe) %
						  LEDGER_FROZEN_SLOTS];
}

static struct ledger_match *record_at(const struct ledger_frozen *f,
				      uint64_t pos)
{
	return (struct ledger_match *)((char *)(f + 1) +
				       pos % LEDGER_FROZEN_BYTES);
}

/* -- writing, under talk_lock ------------------------------------------------------ */

/* The place of @rq in the table; NULL: all that it may have are taken. */
static _Atomic uint64_t *place_take(struct kvmm_req *rq, uint64_t h)
{
	struct ledger_frozen *f = rq->att->era->frozen;
	unsigned int i;

	for (i = 0; !rq->frozen && i < LEDGER_FROZEN_PROBES; i++)
		if (!atomic_load_explicit(slot_of(f, h, i),
					  memory_order_relaxed))
			rq->frozen = (h + i) % LEDGER_FROZEN_SLOTS + 1;
	return rq->frozen ? &f->slot[rq->frozen - 1] : NULL;
}

static void place_give(struct kvmm_req *rq)
{
	/* relaxed: there is nothing to be read behind a 0 */
	if (rq->frozen)
		atomic_store_explicit(
			&rq->att->era->frozen->slot[rq->frozen - 1], 0,
			memory_order_relaxed);
	rq->frozen = 0;
}

/* Where a record of @bytes goes; what was there is said to be no more. */
static uint64_t log_room(struct kvmm_era *e, uint64_t bytes)
{
	uint64_t pos = e->frozen_pos, off = pos % LEDGER_FROZEN_BYTES;

	if (off + bytes > LEDGER_FROZEN_BYTES)
		pos += LEDGER_FROZEN_BYTES - off;
	e->frozen_pos = pos + bytes;
	/* relaxed: the releases after it carry it along */
	if (e->frozen_pos > LEDGER_FROZEN_BYTES)
		atomic_store_explicit(&e->frozen->low,
				      e->frozen_pos - LEDGER_FROZEN_BYTES,
				      memory_order_relaxed);
	return pos;
}

/* release: pairs with the acquire in word_get() */
static void word_put(_Atomic uint64_t *w, uint64_t v)
{
	atomic_store_explicit(w, v, memory_order_release);
}

static uint64_t pair(uint32_t lo, uint32_t hi)
{
	return lo | (uint64_t)hi << 32;
}

static void record_write(struct ledger_match *r, const struct kvmm_req *rq,
			 const struct kvmm_hit *hits, uint32_t n,
			 const struct kvmm_match *m)
{
	size_t bytes = n * HIT_BYTES, i;

	word_put(&r->id, rq->id);
	word_put(&r->space_n, pair(rq->att->ix, n));
	word_put(&r->m[0], pair(m->n_pages, m->n_resident));
	word_put(&r->m[1], pair(m->n_load, m->load_us));
	word_put(&r->m[2], pair(m->recompute_us, m->sync_wanted));
	for (i = 0; i < bytes; i += sizeof(uint64_t)) {
		uint64_t w = 0;

		memcpy(&w, (const char *)hits + i,
		       min(bytes - i, sizeof(uint64_t)));
		word_put(&r->hit[i / sizeof(uint64_t)], w);
	}
}

void kvmm_freeze(struct kvmm_req *rq, const struct kvmm_hit *hits, uint32_t n,
		 const struct kvmm_match *m)
{
	struct kvmm_era *e = rq->att->era;
	uint64_t h = hash(rq->id, rq->att->ix), pos, bytes;
	_Atomic uint64_t *place;

	bytes = round_up(sizeof(struct ledger_match) + n * HIT_BYTES, UNIT);
	kvmm_lock(&rq->k->talk_lock);
	place = place_take(rq, h);
	if (place && bytes <= LEDGER_FROZEN_BYTES / 2) {
		pos = log_room(e, bytes);
		record_write(record_at(e->frozen, pos), rq, hits, n, m);
		/* release: pairs with the acquire in record_find() */
		atomic_store_explicit(place, (pos / UNIT + 1) |
				      h >> POS_BITS << POS_BITS,
				      memory_order_release);
	} else {
		place_give(rq);
	}
	kvmm_unlock(&rq->k->talk_lock);
}

void kvmm_freeze_again(struct kvmm_req *rq)
{
	struct kvmm_mset *set = kvmm_req_match(rq);
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit *hits;

	if (!rq->att || !kvmm_era_leads(rq->att->era))
		return;
	hits = malloc(set->n * sizeof(*hits) + 1);
	if (!hits) {
		kvmm_thaw(rq);		/* rather none than an old one */
		return;
	}
	kvmm_hits_out(set, rq->att->era, hits);
	kvmm_match_out(set, rq->att->era, &m);
	kvmm_freeze(rq, hits, set->n, &m);
	free(hits);
}

void kvmm_thaw(struct kvmm_req *rq)
{
	if (!rq->frozen)
		return;
	kvmm_lock(&rq->k->talk_lock);
	place_give(rq);
	kvmm_unlock(&rq->k->talk_lock);
}

/* -- reading ------------------------------------------------------------------------- */

/**
 * struct found - a record that may be the right one
 * @slot:	where the table says so; @value what it says
 */
struct found {
	_Atomic uint64_t *slot;
	uint64_t	value, pos;
	uint32_t	n;
};

/* acquire: pairs with the release in word_put(), and so brings low along */
static uint64_t word_get(const _Atomic uint64_t *w)
{
	return atomic_load_explicit((_Atomic uint64_t *)w,
				    memory_order_acquire);
}

static bool overwritten(const struct ledger_frozen *f, uint64_t pos)
{
	/* relaxed: after acquire loads of words that might be newer */
	return atomic_load_explicit(&((struct ledger_frozen *)f)->low,
				    memory_order_relaxed) > pos;
}

/* Of several, as of requests with the same id, the last one. */
static bool record_find(const struct ledger_frozen *f, uint64_t id,
			uint32_t space, struct found *ret)
{
	uint64_t h = hash(id, space);
	unsigned int i;

	ret->slot = NULL;
	for (i = 0; i < LEDGER_FROZEN_PROBES; i++) {
		struct found at = { .slot = slot_of(f, h, i) };
		const struct ledger_match *r;
		uint64_t space_n;

		/* acquire: pairs with the release in kvmm_freeze() */
		at.value = word_get(at.slot);
		if (!(at.value & POS_MASK) ||
		    (at.value ^ h) >> POS_BITS)
			continue;
		at.pos = ((at.value & POS_MASK) - 1) * UNIT;
		r = record_at(f, at.pos);
		space_n = word_get(&r->space_n);
		at.n = space_n >> 32;
		if (word_get(&r->id) != id || (uint32_t)space_n != space ||
		    at.n * HIT_BYTES > LEDGER_FROZEN_BYTES - sizeof(*r) -
				       at.pos % LEDGER_FROZEN_BYTES ||
		    overwritten(f, at.pos) ||
		    (ret->slot && at.pos < ret->pos))
			continue;
		*ret = at;
	}
	return ret->slot;
}

static void record_read(const struct ledger_match *r, struct kvmm_hit *hits,
			uint32_t n, struct kvmm_match *m)
{
	size_t bytes = n * HIT_BYTES, i;
	uint64_t w[3];

	for (i = 0; i < 3; i++)
		w[i] = word_get(&r->m[i]);
	m->n_pages = w[0];
	m->n_resident = w[0] >> 32;
	m->n_load = w[1];
	m->load_us = w[1] >> 32;
	m->recompute_us = w[2];
	m->sync_wanted = w[2] >> 32;
	for (i = 0; i < bytes; i += sizeof(uint64_t)) {
		uint64_t v = word_get(&r->hit[i / sizeof(uint64_t)]);

		memcpy((char *)hits + i, &v, min(bytes - i, sizeof(v)));
	}
}

/* What a page may be said to be, here. */
static bool hit_ok(struct kvmm_att *a, const struct kvmm_hit *h)
{
	const struct desc *d = &a->sp->desc;
	struct kvmm_view *v;
	unsigned int cls;

	if (h->state > KVMM_SKIP || h->group >= d->ngroups ||
	    (h->node >= KVMM_MAX_NODES && h->node != KVMM_NODE_NONE))
		return false;
	if (h->state != KVMM_HIT)
		return true;
	cls = d->group[h->group].class_ix;
	if (!h->frame || h->node >= KVMM_MAX_NODES)
		return false;
	v = kvmm_att_view(a, cls, h->node);
	if (v)
		return kvmm_view_mapped(v, h->frame);
	/* no window of ours; one that waits to be opened again maps nothing */
	return !atomic_load_explicit(&a->sp->open[cls][h->node],
				     memory_order_relaxed);
}

static bool hits_ok(struct kvmm_att *a, const struct kvmm_hit *hits, uint32_t n)
{
	uint32_t i = 0;

	while (i < n && hit_ok(a, &hits[i]))
		i++;
	return i == n;
}

/* The leader's log, as it is to be read in @e; NULL: it was not met there. */
static const struct ledger_frozen *log_of(const struct kvmm_era *e)
{
	const struct kvmm_member *m;

	if (kvmm_era_leads(e))
		return e->frozen;
	m = kvmm_member_ready(&e->leader);
	return m ? (const void *)((char *)m->shm.addr + e->frozen_off) : NULL;
}

/* Hits of the record, @max of them written; -EAGAIN: there is none. */
static int match_get(struct kvmm_att *a, uint64_t id, struct kvmm_hit *hits,
		     uint32_t max, struct kvmm_match *m)
{
	const struct ledger_frozen *f = log_of(a->era);
	unsigned int tries;
	struct found at = { 0 };

	for (tries = 0; f && tries < READ_TRIES; tries++) {
		uint32_t n;

		if (!record_find(f, id, a->ix, &at))
			break;
		n = min(at.n, max);
		record_read(record_at(f, at.pos), hits, n, m);
		/* relaxed: after acquire loads, as in overwritten() */
		if (overwritten(f, at.pos) ||
		    atomic_load_explicit(at.slot, memory_order_relaxed) !=
		    at.value)
			continue;
		if (hits_ok(a, hits, n))
			return at.n;
		break;
	}
	return kvmm_fail(-EAGAIN, "the leader has no match of request %llu",
			 (unsigned long long)id);
}

int kvmm_match_get(struct kvmm_space *sp, uint64_t id, struct kvmm_hit *hits,
		   unsigned int max, struct kvmm_match *m)
{
	struct kvmm *k = sp->k;
	struct kvmm_match full;
	struct kvmm_att *a;
	int ret;

	if (m->size < sizeof(m->size))
		return kvmm_fail(-EINVAL, "kvmm_match.size is %u, sizeof is %zu",
				 m->size, sizeof(*m));
	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	/* seq_cst: see the top of lib.h */
	a = atomic_load(&sp->att);
	if (!a)
		ret = kvmm_fail(-EAGAIN, "no daemon");
	else if (kvmm_era_dying(a->era))
		ret = kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	else
		ret = match_get(a, id, hits, max, &full);
	kvmm_exit(k);
	if (ret < 0)
		return ret;
	full.size = m->size;
	memcpy(m, &full, min_t(size_t, m->size, sizeof(full)));
	return ret;
}
