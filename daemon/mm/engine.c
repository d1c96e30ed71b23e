/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engines: members, steps, and death.
 *
 * FORMING until all members with a step word have joined, ALIVE, DYING from the
 * first exit on (or when it broke a limit); ended when the last member has
 * exited.
 *
 * A dying engine gets nothing new: what it waited for fails with -EOWNERDEAD.
 * What it holds stays until it has ended, because a member that still runs may
 * read it. Then its windows leave the lists that pins are summed over, and its
 * OPEN frames, which nobody else ever saw, go through quarantine.
 *
 * Steps. The engine's step is the minimum over the step words of its members,
 * 0 before all have joined, and never goes back here whatever a client stores.
 * Waiting is the Dekker pair of ipc/ledger.h: store step_wanted, load the steps
 * again, and only then wait.
 */
#include <stdlib.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define STEP_POLL_NS	NSEC_PER_MSEC	/* step words that streams write */

/* -- steps ----------------------------------------------------------------- */

static bool steps(const struct mm_client *c)
{
	return !(c->flags & KVMM_NO_STEP) && !c->replaced;
}

uint64_t engine_step(struct mm_engine *e)
{
	uint64_t least = UINT64_MAX;
	struct mm_client *c;

	if (e->nr_stepping < e->world)
		return e->step;
	list_for_each_entry(c, &e->members, engine_link) {
		if (!steps(c))
			continue;
		/* seq_cst: pairs with the client's store, see above */
		least = min(least, (uint64_t)atomic_load_explicit(
				&c->ledger->step, memory_order_seq_cst));
	}
	e->step = max(e->step, least);
	return e->step;
}

static void wanted_publish(struct mm_engine *e, uint64_t step)
{
	struct mm_client *c;

	e->step_wanted = step;
	/* seq_cst: pairs with the client's load after it stored its step */
	list_for_each_entry(c, &e->members, engine_link)
		atomic_store_explicit(&c->ledger->step_wanted, step,
				      memory_order_seq_cst);
}

/* Whose step comes first, NULL: nobody waits. */
static struct step_wait *waiter_first(const struct mm_engine *e)
{
	struct heap_node *n = heap_first(&e->waiters);

	return n ? container_of(n, struct step_wait, node) : NULL;
}

static void waiter_run(struct mm_engine *e, struct step_wait *w, int err)
{
	heap_del(&e->waiters, &w->node);
	e->mm->nr_step_waits--;
	w->fn(w, err);
}

void engine_steps_poll(struct mm_engine *e)
{
	for (;;) {
		struct step_wait *w;
		uint64_t want = UINT64_MAX;

		if (!heap_empty(&e->waiters))
			engine_step(e);
		while ((w = waiter_first(e)) && w->node.key <= e->step)
			waiter_run(e, w, 0);
		if (w)
			want = w->node.key;
		if (want == e->step_wanted)
			return;
		/* and look again: a step may have come in between */
		wanted_publish(e, want);
	}
}

void step_wait_add(struct mm_engine *e, struct step_wait *w, uint64_t step)
{
	heap_node_init(&w->node);
	if (engine_usable(e)) {
		w->fn(w, -EOWNERDEAD);
		return;
	}
	if (step <= e->step) {
		w->fn(w, 0);
		return;
	}
	heap_add(&e->waiters, &w->node, step);
	e->mm->nr_step_waits++;
	if (step < e->step_wanted)
		engine_steps_poll(e);
}

void step_wait_del(struct mm_engine *e, struct step_wait *w)
{
	if (!heap_queued(&w->node))
		return;
	heap_del(&e->waiters, &w->node);
	e->mm->nr_step_waits--;
}

void mm_step_done(struct mm_client *c)
{
	engine_steps_poll(c->engine);
}

/* -- engines --------------------------------------------------------------- */

struct mm_engine *engine_create(struct mm *mm, uint32_t socket,
				       uint32_t world)
{
	struct mm_engine *e = calloc(1, sizeof(*e));

	if (!e)
		return NULL;
	e->mm = mm;
	e->no = ++mm->engine_seq;
	e->socket = socket;
	e->world = world;
	e->step_wanted = UINT64_MAX;
	list_init(&e->members);
	list_add_tail(&mm->engines, &e->link);
	return e;
}

void engine_free(struct mm_engine *e)
{
	list_del(&e->link);
	free(e);
}

int engine_usable(const struct mm_engine *e)
{
	return e->state == ENGINE_DYING || e->ended ? -EOWNERDEAD : 0;
}

static void engine_set_state(struct mm_engine *e, enum ledger_engine_state st)
{
	struct mm_client *c;

	e->state = st;
	/* release: pairs with the client's acquire; world belongs to it */
	list_for_each_entry(c, &e->members, engine_link) {
		atomic_store_explicit(&c->ledger->engine_world, e->world,
				      memory_order_relaxed);
		atomic_store_explicit(&c->ledger->engine_state, st,
				      memory_order_release);
	}
}

void engine_add(struct mm_engine *e, struct mm_client *c)
{
	c->engine = e;
	e->nr_members++;
	list_add_tail(&e->members, &c->engine_link);
	if (steps(c))
		e->nr_stepping++;
	/*
	 * seq_cst: pairs with the load in the client's kvmm_step_done(), which
	 * may run beside its join. Others may wait for its step already: if it
	 * reads the old value, the engine_steps_poll() that follows a join
	 * reads its new step.
	 */
	atomic_store_explicit(&c->ledger->step_wanted, e->step_wanted,
			      memory_order_seq_cst);
	engine_set_state(e, e->nr_stepping >= e->world ? ENGINE_ALIVE :
							 ENGINE_FORMING);
}

static struct mm_engine *engine_find(struct mm *mm, uint32_t socket,
				     const uint8_t token[16])
{
	struct mm_engine *e;

	list_for_each_entry(e, &mm->engines, link)
		if (!e->anonymous && !e->ended && e->socket == socket &&
		    !memcmp(e->token, token, sizeof(e->token)))
			return e;
	return NULL;
}

/* Everything it waits for fails; what others wait for of it does, too. */
static void engine_fail_waits(struct mm_engine *e)
{
	struct mm_client *c;
	struct step_wait *w;
	struct mm_win *win;

	while ((w = waiter_first(e)))
		waiter_run(e, w, -EOWNERDEAD);
	wanted_publish(e, UINT64_MAX);
	list_for_each_entry(c, &e->members, engine_link) {
		publish_fail(c, -EOWNERDEAD);
		list_for_each_entry(win, &c->windows, client_link)
			win_give_up(win);
	}
}

void engine_dying(struct mm_engine *e)
{
	struct mm_client *c;

	if (e->state == ENGINE_DYING)
		return;
	engine_set_state(e, ENGINE_DYING);
	keep_engine(e);
	engine_fail_waits(e);
	list_for_each_entry(c, &e->members, engine_link)
		if (c->connected)
			e->mm->ops->kick_client(c);
}

void engine_evict(struct mm_engine *e, const char *why)
{
	struct mm_client *c, *tmp;
	struct mm_win *w;

	e->evicted = true;
	engine_dying(e);
	keep_engine(e);
	list_for_each_entry(c, &e->members, engine_link)
		list_for_each_entry(w, &c->windows, client_link)
			win_void(w);
	list_for_each_entry_safe(c, tmp, &e->members, engine_link)
		client_evict(c, why);
}

/* All members have exited: nothing of it runs any more. */
void engine_end(struct mm_engine *e)
{
	struct mm_client *c, *tmp;
	struct mm_win *w;

	e->ended = true;
	list_for_each_entry(c, &e->members, engine_link)
		list_for_each_entry(w, &c->windows, client_link)
			win_void(w);
	list_for_each_entry(c, &e->members, engine_link)
		list_for_each_entry(w, &c->windows, client_link)
			if (e->nr_open)
				pool_quarantine(w->pool, e);
	list_for_each_entry_safe(c, tmp, &e->members, engine_link)
		client_free(c);
	if (!e->nr_open && !e->nr_quarantine)
		engine_free(e);
}

/* -- joining ----------------------------------------------------------------- */

/*
 * What a client did before it joins belongs to its engine of one, which ends
 * with that: nothing may be left that names it.
 */
static bool engine_unused(const struct mm_engine *e, const struct mm_client *c)
{
	return list_empty(&c->windows) && list_empty(&c->ops) &&
	       heap_empty(&e->waiters) && !e->nr_open;
}

static int join_check(const struct mm_client *c, uint32_t rank, uint32_t world,
		      uint32_t flags, struct errmsg *e)
{
	if (flags & ~(KVMM_LEADER | KVMM_NO_STEP))
		return errmsg_set(e, -EINVAL, "flags: unknown bits 0x%x",
				  flags & ~(KVMM_LEADER | KVMM_NO_STEP));
	if (!world || world > KVMM_MAX_WORLD)
		return errmsg_set(e, -EINVAL, "world: %u, allowed are 1 to %u",
				  world, KVMM_MAX_WORLD);
	if (!(flags & KVMM_NO_STEP) && rank >= world)
		return errmsg_set(e, -EINVAL, "rank: %u, below world %u", rank,
				  world);
	if (c->joined || c->nr_spaces)
		return errmsg_set(e, -EBUSY, c->joined ?
			"this process is a member of an engine already" :
			"spaces are attached: join comes first");
	if (!engine_unused(c->engine, c))
		return errmsg_set(e, -EBUSY,
			"a window that was closed still has pins, frames to be freed or answers to be read");
	return 0;
}

/*
 * Who has the place already. The same process may take it again when its old
 * connection is closed: it came back, and its step word and what it has mapped
 * are the new ones now. One that only reads has no place that others could take.
 */
static int join_place(struct mm_engine *en, const struct mm_client *c,
		      uint32_t rank, uint32_t flags, struct mm_client **old,
		      struct errmsg *e)
{
	struct mm_client *m;

	list_for_each_entry(m, &en->members, engine_link) {
		bool rank_taken = !(flags & KVMM_NO_STEP) && steps(m) &&
				  m->rank == rank;
		bool leader_taken = (flags & m->flags & KVMM_LEADER) &&
				    !m->replaced;

		if (!m->connected && !m->replaced && m->o.pid == c->o.pid &&
		    m->flags == flags && m->rank == rank) {
			*old = m;
			continue;
		}
		if (!rank_taken && !leader_taken)
			continue;
		return errmsg_set(e, -EEXIST, rank_taken ?
			"rank %u is taken by process %d" :
			"rank %u: process %d is the leader already",
			rank, (int)m->o.pid);
	}
	return 0;
}

int mm_client_join(struct mm_client *c, const uint8_t token[16],
		   uint32_t rank, uint32_t world, uint32_t flags,
		   struct errmsg *e)
{
	struct mm_engine *en, *alone = c->engine;
	struct mm_client *old = NULL, *peer;
	struct mm *mm = c->mm;
	int err;

	err = join_check(c, rank, world, flags, e);
	if (err)
		return err;
	en = engine_find(mm, c->o.socket, token);
	if (en && en->state == ENGINE_DYING)
		return errmsg_set(e, -EOWNERDEAD,
				  "a member of this engine has exited");
	if (en && en->world != world)
		return errmsg_set(e, -EPROTO,
				  "world: %u, the engine's other members say %u",
				  world, en->world);
	if (en) {
		err = join_place(en, c, rank, flags, &old, e);
		if (err)
			return err;
	} else {
		en = engine_create(mm, c->o.socket, world);
		if (!en)
			return errmsg_set(e, -ENOMEM, "out of memory");
		memcpy(en->token, token, sizeof(en->token));
	}

	if (old) {
		en->nr_stepping -= steps(old);
		old->replaced = true;
	}
	list_del(&c->engine_link);
	engine_free(alone);
	c->rank = rank;
	c->flags = flags;
	c->joined = true;
	engine_add(en, c);
	keep_engine(en);
	list_for_each_entry(peer, &en->members, engine_link)
		if (peer != c && peer->connected)
			mm->ops->member(peer, c, false);
	engine_steps_poll(en);
	return 0;
}

/* -- running ----------------------------------------------------------------------- */

uint64_t engines_run(struct mm *mm, uint64_t now_ns)
{
	struct mm_engine *e, *tmp;
	bool poll = mm->nr_step_waits && now_ns >= mm->next_step_poll_ns;

	list_for_each_entry_safe(e, tmp, &mm->engines, link) {
		if (poll && !heap_empty(&e->waiters))
			engine_steps_poll(e);
		if (e->ended && !e->nr_open && !e->nr_quarantine)
			engine_free(e);
	}
	if (poll)
		mm->next_step_poll_ns = now_ns + STEP_POLL_NS;
	return mm->nr_step_waits ? mm->next_step_poll_ns : UINT64_MAX;
}

/* The end of the daemon: processes that still live are left without it. */
void engines_fini(struct mm *mm)
{
	struct mm_engine *e;
	struct mm_client *c;
	struct step_wait *w;

	while ((e = list_first(&mm->engines, struct mm_engine, link))) {
		/* operations have been dropped; frames wait to be freed yet */
		while ((w = waiter_first(e)))
			waiter_run(e, w, -EOWNERDEAD);
		while ((c = list_first(&e->members, struct mm_client,
				       engine_link)))
			client_free(c);
		engine_free(e);
	}
}
