/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The other members of the engine, and how they keep hearing each other while
 * the daemon changes.
 *
 * Members talk through their base ledgers: step words, decisions, counters. A
 * new daemon makes new ledgers, and members come to it one by one, each when it
 * polls next. Until the last one is there some look into the new ledgers and
 * some into the old. So
 *
 *   - the era that was left stays, with our ledger and theirs (era.older)
 *   - a member writes into its ledgers of all eras that it keeps, and before it
 *     enters one it takes along what its former ledger had; then it is ready
 *   - it reads a member's newest ledger that is ready
 *
 * An era goes when nobody needs it: every member of it has come to the present
 * one and is ready, so that we read it there, and says in its ledger that it has
 * met us (ledger_talk.met), so that it reads us here. A member that never comes
 * again must not keep memory for ever: %LIB_PAST_ERAS are kept at most.
 *
 * The same happens on a smaller scale when one member has lost its connection
 * to a daemon that lives: to the others it comes back with a new ledger, and
 * they read the old one until the new one is ready (member.prev).
 *
 * A member that read an old ledger a moment before somebody stopped writing to
 * it has read what was true when it began to look, which is all that a reader
 * ever knows.
 */
#include <errno.h>
#include <stdlib.h>

#include "libkvmm/lib.h"

static void member_free(struct kvmm_dead *d)
{
	struct kvmm_member *m = container_of(d, struct kvmm_member, dead);

	shm_fini(&m->shm);
	free(m);
}

/* Whom @m came back as, and so on; nobody finds them from now on. */
static struct kvmm_member *take_prev(struct kvmm_member *m)
{
	/* seq_cst: unlinks it, see lib.h */
	return atomic_exchange(&m->prev, NULL);
}

void kvmm_members_free(struct kvmm_era *e)
{
	struct kvmm_member *m, *prev;

	while ((m = e->members)) {
		e->members = m->next;
		for (; m; m = prev) {
			prev = take_prev(m);
			member_free(&m->dead);
		}
	}
}

/* -- who comes ------------------------------------------------------------------ */

static struct kvmm_member **member_find(struct kvmm_era *e, uint32_t rank,
					uint32_t flags)
{
	struct kvmm_member **p = &e->members;

	while (*p && ((*p)->rank != rank || (*p)->flags != flags))
		p = &(*p)->next;
	return p;
}

static void member_link(struct kvmm_era *e, struct kvmm_member *m)
{
	struct kvmm_member **p = member_find(e, m->rank, m->flags);
	struct kvmm_member *old = *p;

	if (old) {
		m->next = old->next;
		old->next = NULL;
		atomic_store_explicit(&m->prev, old, memory_order_relaxed);
		e->settling = true;
	}
	*p = m;
	/* seq_cst, both: pair with kvmm_member_ready() */
	if (!(m->flags & KVMM_NO_STEP))
		atomic_store(&e->peer[m->rank], m);
	if (m->flags & KVMM_LEADER)
		atomic_store(&e->leader, m);
	/* release, both: whoever reads it may rely on our reading it there */
	if (!(m->flags & KVMM_NO_STEP))
		atomic_store_explicit(&e->talk->met[m->rank], m->client,
				      memory_order_release);
	if (m->flags & KVMM_LEADER)
		atomic_store_explicit(&e->talk->met_leader, m->client,
				      memory_order_release);
}

int kvmm_era_member(struct kvmm_era *e, struct sock_msg *m)
{
	const struct wire_member *w = (const struct wire_member *)m->buf;
	struct kvmm_member *p, *old;
	int err;

	if (m->len < sizeof(*w))
		return -EPROTO;
	/*
	 * Who left keeps its place: its step stands still, and so does the
	 * engine's. The daemon says ENGINE_DYING in our ledger.
	 */
	if (w->gone)
		return 0;
	if (!(w->flags & KVMM_NO_STEP) && w->rank >= KVMM_MAX_WORLD)
		return -EPROTO;
	p = calloc(1, sizeof(*p));
	if (!p)
		return -ENOMEM;
	p->dead.free = member_free;
	/* as large as ours, so that all that ours has is in it */
	err = kvmm_map_all(&p->shm, sock_msg_take_fd(m), e->ledger_shm.bytes,
			   0);
	if (err) {
		free(p);
		return err;
	}
	p->ledger = p->shm.addr;
	p->talk = (struct ledger_talk *)((char *)p->shm.addr + e->talk_off);
	p->client = p->ledger->client;
	p->rank = w->rank;
	p->flags = w->flags;
	/* the next daemon tells of all that there are */
	old = *member_find(e, w->rank, w->flags);
	if (old && old->client == p->client)
		member_free(&p->dead);
	else
		member_link(e, p);
	return 0;
}

/* -- which eras are over --------------------------------------------------------- */

void kvmm_era_forget(struct kvmm_era *e)
{
	/* seq_cst, both: unlink, see lib.h */
	struct kvmm_era *p = atomic_exchange(&e->older, NULL), *next;

	for (; p; p = next) {
		next = atomic_exchange(&p->older, NULL);
		kvmm_era_put(p);
	}
}

/* Does @m read us in this era, as far as anybody reads us? */
static bool has_met_us(const struct kvmm_era *e, const struct kvmm_member *m)
{
	const _Atomic uint32_t *met;

	if (!(e->flags & KVMM_NO_STEP))
		met = &m->talk->met[e->rank];
	else if (e->flags & KVMM_LEADER)
		met = &m->talk->met_leader;
	else
		return true;
	/* acquire: pairs with member_link() */
	return atomic_load_explicit((_Atomic uint32_t *)met,
				    memory_order_acquire) == e->client;
}

/* Is everybody here who was in one of the eras before, or belongs here? */
static bool all_are_here(struct kvmm_era *e)
{
	const struct kvmm_member *m;
	struct kvmm_era *p;
	uint32_t i;

	for (i = 0; i < e->world; i++)
		if (!atomic_load(&e->peer[i]) &&
		    ((e->flags & KVMM_NO_STEP) || i != e->rank))
			return false;
	for (p = atomic_load(&e->older); p; p = atomic_load(&p->older))
		for (m = p->members; m; m = m->next)
			if (!*member_find(e, m->rank, m->flags))
				return false;
	for (m = e->members; m; m = m->next)
		if (!kvmm_talk_ready(m->talk) || !has_met_us(e, m))
			return false;
	return true;
}

void kvmm_past_run(struct kvmm *k)
{
	struct kvmm_era *e = kvmm_era_now(k);
	struct kvmm_member *m, *p, *next;
	bool settling = false;

	if (!e->settling)
		return;
	for (m = e->members; m; m = m->next) {
		if (!atomic_load_explicit(&m->prev, memory_order_relaxed))
			continue;
		if (!kvmm_talk_ready(m->talk)) {
			settling = true;
			continue;
		}
		for (p = take_prev(m); p; p = next) {
			next = take_prev(p);
			kvmm_bury(k, &p->dead);
		}
	}
	if (atomic_load_explicit(&e->older, memory_order_relaxed)) {
		if (all_are_here(e))
			kvmm_era_forget(e);
		else
			settling = true;
	}
	e->settling = settling;
}

/* Only so many of those before @e. */
static void past_cut(struct kvmm_era *e)
{
	unsigned int n;

	for (n = 0; e && n < LIB_PAST_ERAS; n++)
		e = atomic_load(&e->older);
	if (e)
		kvmm_era_forget(e);
}

void kvmm_era_succeed(struct kvmm *k, struct kvmm_era *old, struct kvmm_era *e)
{
	kvmm_lock(&k->talk_lock);
	if (old) {
		kvmm_agree_carry(old, e);
		if (k->joined) {
			atomic_store(&e->older, old);
			e->settling = true;
		}
	}
	/* release: pairs with kvmm_talk_ready(); our step was taken along, too */
	atomic_store_explicit(&e->talk->ready, 1, memory_order_release);
	/* seq_cst: unlinks the old one, or puts it second; see lib.h */
	atomic_store(&k->era, e);
	kvmm_unlock(&k->talk_lock);
	past_cut(e);
}
