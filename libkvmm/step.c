/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Step words. A member's word says that all its work up to a step is complete;
 * the engine's step is the smallest of them. Nothing else fences: what must
 * outlive a kernel names the step that launched it, and waits in a list here
 * until the engine's step has got there.
 */
#include <unistd.h>

#include "libkvmm/lib.h"

uint64_t kvmm_era_step(const struct kvmm_era *e)
{
	uint64_t step = UINT64_MAX, v;
	const struct kvmm_member *m;
	uint32_t i;

	/* acquire: pairs with set_joined() in conn.c */
	if (!atomic_load_explicit(&e->joined, memory_order_acquire))
		/* acquire: pairs with the store of step_done or of a stream */
		return atomic_load_explicit(&e->ledger->step,
					    memory_order_acquire);
	for (i = 0; i < e->world && i < KVMM_MAX_WORLD; i++) {
		const struct ledger *l = e->ledger;

		if ((e->flags & KVMM_NO_STEP) || i != e->rank) {
			m = kvmm_member_ready(&e->peer[i]);
			if (!m)
				return 0;	/* not all have joined */
			l = m->ledger;
		}
		/* acquire: pairs with that member's step_done or stream */
		v = atomic_load_explicit(&l->step, memory_order_acquire);
		if (v < step)
			step = v;
	}
	return step;
}

void kvmm_step_defer(struct kvmm_era *e, struct kvmm_deferred *d, uint64_t step)
{
	struct list *at;

	list_init(&d->link);
	d->step = step;
	if (step <= kvmm_era_step(e) || kvmm_era_over(e)) {
		d->fn(d);
		return;
	}
	kvmm_lock(&e->k->ops_lock);
	/*
	 * Once more, under the lock: kvmm_step_drop() takes it after over is
	 * set, and nobody runs the list of that era again after that.
	 */
	if (kvmm_era_over(e)) {
		kvmm_unlock(&e->k->ops_lock);
		d->fn(d);
		return;
	}
	/* steps come in order, nearly always: from the back */
	for (at = e->deferred.prev; at != &e->deferred; at = at->prev)
		if (list_entry(at, struct kvmm_deferred, link)->step <= step)
			break;
	list_add(at, &d->link);
	atomic_fetch_add_explicit(&e->nr_deferred, 1, memory_order_relaxed);
	kvmm_unlock(&e->k->ops_lock);
}

static void run_until(struct kvmm_era *e, uint64_t step)
{
	struct kvmm_deferred *d, *tmp;
	struct list due = LIST_INIT(due);

	kvmm_lock(&e->k->ops_lock);
	list_for_each_entry_safe(d, tmp, &e->deferred, link) {
		if (d->step > step)
			break;
		list_move_tail(&due, &d->link);
		atomic_fetch_sub_explicit(&e->nr_deferred, 1,
					  memory_order_relaxed);
	}
	kvmm_unlock(&e->k->ops_lock);
	list_for_each_entry_safe(d, tmp, &due, link) {
		list_del(&d->link);
		d->fn(d);
	}
}

void kvmm_step_run(struct kvmm_era *e)
{
	if (atomic_load_explicit(&e->nr_deferred, memory_order_relaxed))
		run_until(e, kvmm_era_step(e));
}

void kvmm_step_drop(struct kvmm_era *e)
{
	/* release: pairs with kvmm_era_over() */
	atomic_store_explicit(&e->over, true, memory_order_release);
	run_until(e, UINT64_MAX);
}

/* -- our own word ------------------------------------------------------------ */

static void ring_daemon(struct kvmm_era *e)
{
	uint64_t one = 1;

	if (write(e->doorbell, &one, sizeof(one)) == sizeof(one))
		stat_add(e->k, doorbells, 1);
}

static void advance(struct kvmm_era *e, uint64_t step)
{
	struct ledger *l = e->ledger;
	uint64_t old = atomic_load_explicit(&l->step, memory_order_relaxed);

	/*
	 * seq_cst, and seq_cst the load after it: the daemon stores
	 * step_wanted, then loads step. One of us sees the other. It also
	 * releases the work of this process to who acquires the step.
	 */
	while (step > old)
		if (atomic_compare_exchange_weak(&l->step, &old, step))
			break;
	if (step > old && !kvmm_era_lost(e) &&
	    atomic_load(&l->step_wanted) <= step)
		ring_daemon(e);
}

void kvmm_step_carry(struct kvmm_era *from, struct kvmm_era *to)
{
	/*
	 * seq_cst: see kvmm_step_done(). It also acquires the work of this
	 * process, as a stream may have released it.
	 */
	advance(to, atomic_load(&from->ledger->step));
}

void kvmm_step_words(struct kvmm *k)
{
	struct kvmm_era *now = kvmm_era_now(k), *e;

	for (e = k->word_eras; e; e = e->next_out)
		if (e != now)
			kvmm_step_carry(e, now);
}

/* -- public ------------------------------------------------------------------ */

int kvmm_step_done(struct kvmm *k, uint64_t step)
{
	struct kvmm_era *e, *now;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	/*
	 * seq_cst, both: the step is stored, then the era is looked at again;
	 * enter_era() stores the era, then looks at the old one's step again.
	 * One of the two takes the step along.
	 */
	now = kvmm_era_now(k);
	do {
		e = now;
		advance(e, step);
		now = kvmm_era_now(k);
	} while (now != e);
	kvmm_step_run(e);
	kvmm_exit(k);
	return 0;
}

uint64_t *kvmm_step_word(struct kvmm *k)
{
	struct kvmm_era *e;
	uint64_t *word = NULL;

	if (kvmm_forked(k)) {
		kvmm_fail_forked();
		return NULL;
	}
	kvmm_lock(&k->lock);
	e = kvmm_era_now(k);
	/* a stream may write it at any time: this era is kept to the end */
	if (!e->word_out) {
		e->word_out = true;
		atomic_fetch_add_explicit(&e->refs, 1, memory_order_relaxed);
		e->next_out = k->word_eras;
		k->word_eras = e;
	}
	if (!(atomic_load(&e->joined) && (e->flags & KVMM_NO_STEP)))
		word = (uint64_t *)&e->ledger->step;
	kvmm_unlock(&k->lock);
	return word;
}

uint64_t kvmm_step_engine(const struct kvmm *k)
{
	struct kvmm *kk = (struct kvmm *)k;
	uint64_t step;

	if (!kvmm_enter(kk)) {
		kvmm_fail_forked();
		return 0;
	}
	step = kvmm_era_step(kvmm_era_now(k));
	kvmm_exit(kk);
	return step;
}
