/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the members of an engine agree on, through their ledgers: the leader
 * posts a decision for each step, every member has counters of which anybody
 * reads the minimum. No daemon is needed for that, and none may be there; who is
 * read, and who is written to, while the daemon changes, is in member.c.
 *
 * A decision is read with a sequence lock (struct ledger_agree). It can only be
 * overwritten by that of a later step, and what a reader is told then is that
 * its own is gone. A leader that writes nonsense into its ledger can mislead its
 * engine, which it can anyway; no index or length that it wrote is used.
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "libkvmm/lib.h"

static struct ledger_agree *place(struct ledger_agree *a, uint64_t step)
{
	return &a[step % LEDGER_AGREE_ENTRIES];
}

/* -- writing, under talk_lock ---------------------------------------------------- */

static void entry_write(struct ledger_agree *a, uint64_t seq, const uint64_t *v,
			uint32_t n)
{
	uint32_t i;

	/* relaxed: the releases after it carry it along */
	atomic_store_explicit(&a->seq, 0, memory_order_relaxed);
	/* release, each: pairs with the acquire loads in entry_read() */
	atomic_store_explicit(&a->n, n, memory_order_release);
	for (i = 0; i < n; i++)
		atomic_store_explicit(&a->v[i], v[i], memory_order_release);
	/* release: pairs with the first load in entry_read() */
	atomic_store_explicit(&a->seq, seq, memory_order_release);
}

static void entry_copy(struct ledger_agree *to, const struct ledger_agree *from)
{
	struct ledger_agree *a = (struct ledger_agree *)from;
	uint64_t seq = atomic_load_explicit(&a->seq, memory_order_relaxed);
	uint32_t i, n = atomic_load_explicit(&a->n, memory_order_relaxed);
	uint64_t v[LEDGER_AGREE_VALUES];

	if (!seq || n > LEDGER_AGREE_VALUES)
		return;
	for (i = 0; i < n; i++)
		v[i] = atomic_load_explicit(&a->v[i], memory_order_relaxed);
	entry_write(to, seq, v, n);
}

/* Does @e's ledger take decisions? That of an engine of one, and the leader's. */
static bool may_post(const struct kvmm_era *e)
{
	/* acquire: pairs with set_joined() in conn.c */
	return !atomic_load_explicit((_Atomic bool *)&e->joined,
				     memory_order_acquire) ||
	       (e->flags & KVMM_LEADER);
}

void kvmm_agree_carry(struct kvmm_era *from, struct kvmm_era *to)
{
	unsigned int i;

	for (i = 0; may_post(from) && i < LEDGER_AGREE_ENTRIES; i++)
		entry_copy(&to->agree[i], &from->agree[i]);
	/* relaxed: ledger_talk.ready, which comes next, releases them */
	for (i = 0; i < LEDGER_COUNTERS; i++)
		atomic_store_explicit(&to->talk->counter[i],
			atomic_load_explicit(&from->talk->counter[i],
					     memory_order_relaxed),
			memory_order_relaxed);
}

/* The newest ledger has all that the older ones have. */
static int post(struct kvmm *k, uint64_t step, const uint64_t *v, uint32_t n)
	__must_hold(&k->talk_lock)
{
	struct kvmm_era *e = kvmm_era_now(k);
	uint64_t seq = atomic_load_explicit(&place(e->agree, step)->seq,
					    memory_order_relaxed);

	if (seq == step + 1)
		return kvmm_fail(-EEXIST, "step %llu has its decision",
				 (unsigned long long)step);
	if (seq > step + 1)
		return kvmm_fail(-ESTALE,
			"step %llu: its place is taken by step %llu",
			(unsigned long long)step, (unsigned long long)seq - 1);
	/* seq_cst: see the top of lib.h */
	for (; e; e = atomic_load(&e->older))
		entry_write(place(e->agree, step), step + 1, v, n);
	return 0;
}

static int count_ok(uint64_t step, unsigned int n)
{
	if (!n || n > LEDGER_AGREE_VALUES)
		return kvmm_fail(-EINVAL, "%u values, allowed are 1 to %u", n,
				 LEDGER_AGREE_VALUES);
	if (step == UINT64_MAX)
		return kvmm_fail(-EINVAL, "step 2^64 - 1 is none");
	return 0;
}

int kvmm_agree_post(struct kvmm *k, uint64_t step, const uint64_t *v,
		    unsigned int n)
{
	const struct kvmm_era *e;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	e = kvmm_era_now(k);
	err = count_ok(step, n);
	if (err)
		goto out_exit;
	if (!may_post(e)) {
		err = kvmm_fail(-EPERM, "only the leader decides");
	} else if (kvmm_era_dying(e)) {
		err = kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	} else {
		kvmm_lock(&k->talk_lock);
		err = post(k, step, v, n);
		kvmm_unlock(&k->talk_lock);
	}
out_exit:
	kvmm_exit(k);
	return err;
}

/* -- reading ------------------------------------------------------------------------ */

/* 0; -EAGAIN: not there yet; -ESTALE: a later one is; -EMSGSIZE and how many. */
static int entry_read(struct ledger_agree *a, uint64_t step, uint64_t *v,
		      uint32_t n, uint32_t *has)
{
	uint64_t to[LEDGER_AGREE_VALUES], seq;
	uint32_t i;

	/* acquire: pairs with the last store in entry_write() */
	seq = atomic_load_explicit(&a->seq, memory_order_acquire);
	if (seq != step + 1)
		return seq > step + 1 ? -ESTALE : -EAGAIN;
	/*
	 * acquire, each: a word of a later decision brings the 0 that was
	 * stored before it, and the load below sees that or something later.
	 */
	*has = atomic_load_explicit(&a->n, memory_order_acquire);
	for (i = 0; *has == n && i < n; i++)
		to[i] = atomic_load_explicit(&a->v[i], memory_order_acquire);
	if (atomic_load_explicit(&a->seq, memory_order_relaxed) != seq)
		return -ESTALE;
	if (*has != n)
		return -EMSGSIZE;
	memcpy(v, to, n * sizeof(*v));
	return 0;
}

/* Decisions, as they are to be read in @e; NULL: the leader was not met there. */
static struct ledger_agree *decisions(const struct kvmm_era *e)
{
	const struct kvmm_member *m;

	if (may_post(e))
		return e->agree;
	m = kvmm_member_ready(&e->leader);
	return m ? (struct ledger_agree *)((char *)m->shm.addr + e->agree_off) :
		   NULL;
}

/*
 * One look, in the newest ledger first. All of them are looked into: what a
 * leader posted before it had met us here may be in an older one alone.
 */
static int look(struct kvmm *k, uint64_t step, uint64_t *v, uint32_t n)
{
	struct ledger_agree *a;
	struct kvmm_era *e;
	int err, ret = -EAGAIN;
	uint32_t has;

	/* seq_cst, both: see the top of lib.h */
	for (e = kvmm_era_now(k); e; e = atomic_load(&e->older)) {
		a = decisions(e);
		err = a ? entry_read(place(a, step), step, v, n, &has) :
			  -EAGAIN;
		if (!err)
			return 0;
		if (err == -EMSGSIZE)
			return kvmm_fail(err,
				"the decision of step %llu has %u values, not %u",
				(unsigned long long)step, has, n);
		if (err == -ESTALE)
			ret = err;
	}
	if (ret == -ESTALE)
		return kvmm_fail(ret,
			"the decision of step %llu has been overwritten",
			(unsigned long long)step);
	return ret;
}

/* The same, once more before it is said that nobody will decide any more. */
static int look_alive(struct kvmm *k, uint64_t step, uint64_t *v, uint32_t n)
{
	int err = look(k, step, v, n);

	if (err != -EAGAIN || !kvmm_era_dying(kvmm_era_now(k)))
		return err;
	/* what was posted before its death is got by all who ask */
	err = look(k, step, v, n);
	return err != -EAGAIN ? err :
	       kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
}

static void pause_until(uint64_t spin_until, uint64_t deadline, uint64_t now)
{
	struct timespec ts;

	if (now < spin_until) {
		cpu_relax();
		return;
	}
	ts = ns_to_timespec(min(deadline - now, LIB_AGREE_SLEEP_NS));
	nanosleep(&ts, NULL);
}

int kvmm_agree_get(struct kvmm *k, uint64_t step, uint64_t *v, unsigned int n,
		   uint64_t deadline_ns)
{
	uint64_t spin_until = 0, now;
	int err;

	err = kvmm_forked(k) ? kvmm_fail_forked() : count_ok(step, n);
	if (err)
		return err;
	for (;;) {
		/* not held while it waits: nothing could be freed */
		if (!kvmm_enter(k))
			return kvmm_fail_forked();
		err = look_alive(k, step, v, n);
		kvmm_exit(k);
		if (err != -EAGAIN)
			return err;
		now = now_ns();
		if (now >= deadline_ns)
			return kvmm_fail(-ETIMEDOUT,
				"nobody has decided on step %llu",
				(unsigned long long)step);
		if (!spin_until)
			spin_until = now + LIB_AGREE_SPIN_NS;
		pause_until(spin_until, deadline_ns, now);
	}
}

/* -- counters ----------------------------------------------------------------------- */

static void count(struct kvmm *k, unsigned int slot, uint64_t mine)
{
	struct kvmm_era *e;

	kvmm_lock(&k->talk_lock);
	/* seq_cst, both: see the top of lib.h */
	for (e = kvmm_era_now(k); e; e = atomic_load(&e->older))
		/* release: pairs with the acquire in counter_of() */
		atomic_store_explicit(&e->talk->counter[slot], mine,
				      memory_order_release);
	kvmm_unlock(&k->talk_lock);
}

/* Rank @rank's, in the newest ledger of it; 0: it was never met. */
static uint64_t counter_of(struct kvmm *k, uint32_t rank, unsigned int slot)
{
	const struct kvmm_member *m;
	struct kvmm_era *e;

	/* seq_cst, both: see the top of lib.h */
	for (e = kvmm_era_now(k); e; e = atomic_load(&e->older)) {
		m = kvmm_member_ready(&e->peer[rank]);
		if (m)
			/* acquire: pairs with the release in count() */
			return atomic_load_explicit(&m->talk->counter[slot],
						    memory_order_acquire);
	}
	return 0;
}

static uint64_t least(struct kvmm *k, const struct kvmm_era *e,
		      unsigned int slot, uint64_t mine)
{
	bool steps = !(e->flags & KVMM_NO_STEP);
	uint64_t least = steps ? mine : UINT64_MAX;
	uint32_t i;

	for (i = 0; i < e->world && i < KVMM_MAX_WORLD; i++)
		if (!steps || i != e->rank)
			least = min(least, counter_of(k, i, slot));
	return least;
}

int kvmm_agree_min(struct kvmm *k, unsigned int slot, uint64_t mine,
		   uint64_t *min)
{
	const struct kvmm_era *e;
	bool joined;
	int err = 0;

	if (slot >= LEDGER_COUNTERS)
		return kvmm_fail(-EINVAL, "counter %u, there are %u", slot,
				 LEDGER_COUNTERS);
	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	e = kvmm_era_now(k);
	/* acquire: pairs with set_joined() in conn.c */
	joined = atomic_load_explicit((_Atomic bool *)&e->joined,
				      memory_order_acquire);
	if (!joined || !(e->flags & KVMM_NO_STEP))
		count(k, slot, mine);
	*min = joined ? least(k, e, slot, mine) : mine;
	if (kvmm_era_dying(e))
		err = kvmm_fail(-EOWNERDEAD, "a member of the engine is gone");
	kvmm_exit(k);
	return err;
}
