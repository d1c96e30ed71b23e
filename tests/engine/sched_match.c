/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Admission: what is cached of a sequence becomes the beginning of its block
 * tables; see sched.h.
 */
#include <errno.h>
#include <string.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "tests/engine/seq.h"

#define MAX_HITS	16384u

/* The last token is always computed: its logits are wanted. */
static uint32_t units_of(const struct seq *q)
{
	return (q->ntok - 1) / q->s->kv->unit;
}

static uint32_t pages_of(const struct seq *q, unsigned int g, uint32_t units)
{
	return units * (q->s->kv->unit / q->s->kv->g[g].block_tokens);
}

/* Pages of group @g that length @units needs: [*@lo, *@hi). */
static void needed(const struct seq *q, unsigned int g, uint32_t units,
		   uint32_t *lo, uint32_t *hi)
{
	const struct kv_group *gr = &q->s->kv->g[g];

	*hi = pages_of(q, g, units);
	*lo = 0;
	if (gr->rule == KVMM_WINDOW && *hi > gr->window)
		*lo = *hi - gr->window;
	if (gr->rule == KVMM_LAST && *hi)
		*lo = *hi - 1;
}

static void use_page(struct seq *q, unsigned int g, uint32_t page,
		     kvmm_frame_t f)
{
	struct sched *s = q->s;

	seq_guard(s, g, f);
	if (seq_linear(q, g))
		q->restore = f;
	else
		q->g[g].table[page] = f;
}

/* @units are there: that is where computing begins. */
static void begin_at(struct seq *q, uint32_t units)
{
	unsigned int g;

	q->ndone = units * q->s->kv->unit;
	for (g = 0; g < q->s->kv->ngroups; g++) {
		struct seq_group *sg = &q->g[g];

		sg->npub = pages_of(q, g, units);
		if (!seq_linear(q, g))
			sg->nb = sg->npub;
	}
}

/* ---- match --------------------------------------------------------------------- */

static int match(struct seq *q, uint32_t units, struct kvmm_hit *hit,
		 struct kvmm_match *m)
{
	struct kvmm_keys keys[KV_MAX_GROUPS];
	struct kv *kv = q->s->kv;
	unsigned int g;
	int err;

	for (g = 0; g < kv->ngroups; g++) {
		uint32_t n = pages_of(q, g, units);

		err = seq_keys(q, g, n);
		if (err)
			return err;
		keys[g] = (struct kvmm_keys){
			.k = q->g[g].key, .n = n, .group = g,
		};
	}
	*m = (struct kvmm_match){ .size = sizeof(*m) };
	err = kvmm_match(q->rq, keys, kv->ngroups, kv->node, hit, m);
	if (err || !m->sync_wanted)
		return err;
	/* a page lies where we have not mapped yet: once more */
	kv_sync(kv, q->s->step);
	*m = (struct kvmm_match){ .size = sizeof(*m) };
	return kvmm_match(q->rq, keys, kv->ngroups, kv->node, hit, m);
}

static void take_hits(struct seq *q, const struct kvmm_hit *hit,
		      uint32_t asked, uint32_t units)
{
	uint32_t lo, hi, b;
	unsigned int g;

	for (g = 0; g < q->s->kv->ngroups; g++) {
		needed(q, g, units, &lo, &hi);
		for (b = lo; b < hi; b++)
			use_page(q, g, b, hit[b].frame);
		q->s->st.hit_pages += hi - lo;
		hit += pages_of(q, g, asked);
	}
	q->hit = units * q->s->kv->unit;
	q->nhit_told = units;
	begin_at(q, units);
}

static int fetch(struct seq *q, uint32_t first, uint32_t end)
{
	struct sched *s = q->s;
	uint64_t deadline = s->o.fetch_ms ?
			    now_ns() + s->o.fetch_ms * NSEC_PER_MSEC : 0;
	struct op *op = op_get(s, OP_FETCH, q);
	int err;

	if (!op)
		return -EAGAIN;
	op->first = first;
	op->n = end - first;
	err = kvmm_fetch(q->rq, first, end, s->kv->node, deadline, op->tag);
	if (err) {
		op_put(op);
		return err;
	}
	q->state = SEQ_FETCHING;
	return 0;
}

/* ---- fetch ------------------------------------------------------------------------ */

/* It came, and to where it can be touched. */
static bool usable(const struct seq *q, unsigned int g,
		   const struct kvmm_result *res)
{
	return !res->result && kv_mapped(q->s->kv, g, res->frame);
}

/* How many units of [@first, @first + @n) have all that they need? */
static uint32_t fetched_units(const struct seq *q, const struct op *op,
			      const struct kvmm_done *d)
{
	const struct kvmm_result *res = d->res;
	uint32_t got = op->n, per, i, lo, hi, base;
	unsigned int g;

	for (g = 0; g < q->s->kv->ngroups; g++) {
		per = pages_of(q, g, 1);
		if (res + op->n * per > d->res + d->n)
			return 0;
		if (q->s->kv->g[g].rule == KVMM_FULL) {
			for (i = 0; i < got * per && usable(q, g, &res[i]); i++)
				;
			got = i / per;
		} else {
			/* as far as asked, or not at all */
			base = pages_of(q, g, op->first);
			needed(q, g, op->first + op->n, &lo, &hi);
			for (i = max(lo, base); i < hi; i++)
				if (!usable(q, g, &res[i - base]) ||
				    got < op->n)
					return 0;
		}
		res += op->n * per;
	}
	/* an earlier group may have been whole when a later one was looked at */
	return q->s->kv->ngroups > 1 && got < op->n ? 0 : got;
}

void fetch_done(struct op *op, const struct kvmm_done *d)
{
	struct seq *q = op->q;
	const struct kvmm_result *res = d->res;
	uint32_t units = 0, end, lo, hi, b, base;
	unsigned int g;

	if (!q || q->state != SEQ_FETCHING)
		return;
	/* what came may lie in a new extent */
	if (d->n && !kv_sync(q->s->kv, q->s->step))
		units = fetched_units(q, op, d);
	end = op->first + units;
	for (g = 0; units && g < q->s->kv->ngroups; g++) {
		base = pages_of(q, g, op->first);
		needed(q, g, end, &lo, &hi);
		for (b = max(lo, base); b < hi; b++)
			use_page(q, g, b, res[b - base].frame);
		q->s->st.fetched_pages += hi - max(lo, base);
		res += pages_of(q, g, op->n);
	}
	if (units) {
		begin_at(q, end);
		q->fetched = units * q->s->kv->unit;
	}
	/* what came behind a gap is of no use */
	if (units < op->n)
		kvmm_trim(q->rq, end, 0);
	q->s->st.not_fetched += op->n - units;
	q->state = SEQ_RUNNING;
}

/* ---- admission ---------------------------------------------------------------------- */

/* Frames that sequences hold, those they share counted for each. */
static uint32_t held(const struct sched *s, unsigned int g)
{
	const struct seq *q;
	uint32_t n = 0;

	list_for_each_entry(q, &s->running, link)
		n += q->g[g].nb + 1;
	return n;
}

/*
 * Will its prompt fit beside what runs, with some room to grow? What others have
 * pinned nobody knows: then it has to wait for frames, or gives way again.
 */
static bool room_for(const struct seq *q)
{
	const struct kv *kv = q->s->kv;
	struct kvmm_avail av = { .size = sizeof(av) };
	unsigned int g;

	if (!q->s->nrunning || q->s->o.eager)
		return true;
	for (g = 0; g < kv->ngroups; g++) {
		uint32_t need = div_round_up(q->ntok + 1, kv->g[g].block_tokens);

		if (kvmm_avail(kv->sp, kv->g[g].cls, kv->node, &av))
			return false;
		if (held(q->s, g) + need > av.limit - av.limit / 16)
			return false;
	}
	return true;
}

int seq_admit(struct seq *q)
{
	static struct kvmm_hit hit[MAX_HITS];
	struct sched *s = q->s;
	struct kvmm_hint hint = {
		.size = sizeof(hint), .session = q->r.session,
	};
	struct kvmm_match m = { 0 };
	uint32_t units = min(units_of(q), MAX_HITS / KV_MAX_GROUPS);
	unsigned int g;
	int err = 0;

	if (!room_for(q))
		return -EAGAIN;
	err = kvmm_req_open(s->kv->sp, q->r.id, &hint, &q->rq);
	if (err)
		return err;
	q->epoch = s->kv->epoch;
	q->state = SEQ_RUNNING;
	for (g = 0; !err && g < s->kv->ngroups; g++)
		err = seq_room(q, g, div_round_up(q->ntok + 1,
						  s->kv->g[g].block_tokens));
	if (!err && units && !q->no_match && !s->o.no_match)
		err = match(q, units, hit, &m);
	if (err)
		return err;
	if (m.n_resident)
		take_hits(q, hit, units, m.n_resident);
	if (s->o.fetch_all)
		m.n_load = m.n_pages;
	if (m.n_load > m.n_resident && fetch(q, m.n_resident, m.n_load))
		s->st.not_fetched += m.n_load - m.n_resident;
	return 0;
}
