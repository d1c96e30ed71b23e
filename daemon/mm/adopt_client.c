/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking over clients, their engines and their windows.
 *
 * A window whose ledger is missing, is another one's, or does not fit what it is
 * of, spoils its pool: nobody could say what its client has pinned there. So
 * whatever can be wrong with a window is found before its pool is made; what is
 * left to fail afterwards is memory, and then all of it fails.
 *
 * A client that has lost a part of what it had stays, for its pins, and is not
 * whole: it gets nothing back when it comes again, and begins anew. Nor does any
 * other member of its engine, since they all go by the same plans. That is written
 * down before what shows it is forgotten, and holds for as long as its process
 * lives: it still has the old memory mapped.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/mm/adopt.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"

void adopt_partial(struct mm_client *c)
{
	if (!c || !c->whole)
		return;
	c->whole = false;
	keep_client_partial(c->mm, c->keep - 1);
}

/* -- clients --------------------------------------------------------------------- */

static void clients_read(struct adoption *a)
{
	struct keep *k = a->mm->keep;
	unsigned int i;

	for (i = 0; i < KEEP_CLIENTS; i++) {
		const struct keep_client *kc;

		if (!k->client[i][0].tag.seq && !k->client[i][1].tag.seq)
			continue;
		kc = keep_get2(k->client[i], sizeof(*kc));
		if (!kc)
			adopt_gave_up(a->mm, "client record %u is torn", i);
		else if (kc->used)
			a->kc[i] = kc;
	}
}

static struct mm_engine *engine_of(struct mm *mm, const struct keep_client *kc,
				   uint32_t socket)
{
	struct mm_engine *e;

	list_for_each_entry(e, &mm->engines, link)
		if (e->no == kc->engine)
			return e;
	e = engine_create(mm, socket, kc->world);
	if (!e)
		return NULL;
	e->no = kc->engine;
	e->anonymous = !(kc->flags & KEEP_JOINED);
	memcpy(e->token, kc->token, sizeof(e->token));
	return e;
}

static struct mm_client *client_make(struct mm *mm, unsigned int i,
				     const struct keep_client *kc,
				     const struct mm_client_opts *o)
{
	struct mm_engine *e = engine_of(mm, kc, o->socket);
	struct mm_client *c;

	if (!e)
		return NULL;
	c = client_new(mm, o);
	if (!c) {
		if (!e->nr_members)
			engine_free(e);
		return NULL;
	}
	c->keep = i + 1;
	c->rank = kc->rank;
	c->flags = kc->mflags;
	c->joined = kc->flags & KEEP_JOINED;
	c->replaced = kc->flags & KEEP_REPLACED;
	c->whole = !(kc->flags & KEEP_PARTIAL);
	bitmap_set(mm->keep->clients, i);
	engine_add(e, c);
	if (kc->flags & KEEP_EVICTED)
		e->evicted = true;
	return c;
}

static void client_attach(struct adoption *a, struct mm_client *c,
			  const struct keep_client *kc)
{
	struct mm *mm = a->mm;
	unsigned int i;

	for (i = 0; i < kc->nr_spaces && i < ARRAY_SIZE(kc->space); i++) {
		struct mm_space *sp = mm->space[kc->space[i]];

		if (!sp || sp->ending || strcmp(sp->tenant, c->tenant)) {
			adopt_partial(c);
			continue;
		}
		c->spaces[c->nr_spaces++] = sp;
		sp->nr_clients++;
	}
}

static void client_take(struct adoption *a, unsigned int i)
{
	const struct keep_client *kc = a->kc[i];
	struct mm *mm = a->mm;
	struct mm_kept_client k = {
		.no = kc->no, .socket = kc->socket, .pid = kc->pid,
		.name = kc->name, .bytes = kc->server,
	};
	struct mm_client_opts o = {
		.name = kc->name, .socket = kc->socket, .rights = kc->rights,
		.mode = kc->mode, .pid = kc->pid, .no = kc->no,
		.kept = kc->server,
	};

	if (kc->name[sizeof(kc->name) - 1] || !kc->world ||
	    kc->world > KVMM_MAX_WORLD ||
	    mm->keep->ops->client(mm->o.ops_arg, &k, &o)) {
		adopt_gave_up(mm, "client %u cannot be adopted", kc->no);
		a->broken[a->nr_broken++] = kc->engine;
		a->kc[i] = NULL;
		keep_client_forget(mm, i);
		return;
	}
	a->client[i] = client_make(mm, i, kc, &o);
	if (!a->client[i]) {
		/* as if out of memory for a new client: it goes on without us */
		adopt_gave_up(mm, "no memory for client %u", kc->no);
		a->broken[a->nr_broken++] = kc->engine;
		a->kc[i] = NULL;
		return;
	}
	mm->adopted.clients++;
}

static void clients_take(struct adoption *a)
{
	struct mm *mm = a->mm;
	struct mm_engine *e;
	unsigned int i;

	for (i = 0; i < KEEP_CLIENTS; i++) {
		if (!a->kc[i])
			continue;
		mm->engine_seq = max(mm->engine_seq, a->kc[i]->engine);
		client_take(a, i);
	}
	list_for_each_entry(e, &mm->engines, link)
		engine_step(e);
}

/* -- windows, before there are pools ---------------------------------------------- */

static void spoil(struct adoption *a, const struct keep_win *kw)
{
	if (kw->space < KVMM_MAX_SPACES && kw->cls < KVMM_MAX_CLASSES &&
	    kw->node < KVMM_MAX_NODES)
		a->spoiled[kw->space][kw->cls][kw->node] = true;
}

/* A record that cannot be read could be of any pool, and of any client. */
static void spoil_all(struct adoption *a)
{
	unsigned int i;

	memset(a->spoiled, 1, sizeof(a->spoiled));
	for (i = 0; i < KEEP_CLIENTS; i++)
		adopt_partial(a->client[i]);
}

static int window_ledger(struct adoption *a, struct adopt_win *aw)
{
	const struct keep_win *kw = aw->kw;
	struct keep_id id;
	char name[KEEP_NAME];
	int err;

	if (kw->client > KEEP_CLIENTS || !a->kc[kw->client - 1]) {
		adopt_gave_up(a->mm, "window %u is of a client that is not there",
			      aw->slot);
		return -ENOENT;
	}
	snprintf(name, sizeof(name), "win.%u", aw->slot);
	err = adopt_shm(a->mm, name, kw->ledger_bytes,
			a->kc[kw->client - 1]->flags & KEEP_JOINED,
			&aw->ledger);
	if (err == -ENOENT)
		adopt_gave_up(a->mm, "nobody kept the ledger of window %u",
			      aw->slot);
	if (err)
		return err;
	id = keep_id_of(aw->ledger.fd);
	if (id.ino == kw->ledger_ino && (uint32_t)id.dev == kw->dev)
		return 0;
	adopt_gave_up(a->mm, "what was kept as the ledger of window %u is another one's",
		      aw->slot);
	shm_fini(&aw->ledger);
	return -ENOENT;
}

/* No two windows of a client have the same number; 0, -EEXIST. */
static int window_number(struct adoption *a, const struct adopt_win *aw)
{
	unsigned int i;

	if (aw->kw->no >= ARRAY_SIZE(a->client[0]->win))
		return -EEXIST;
	for (i = 0; i < a->nr_wins; i++) {
		const struct keep_win *kw = a->win[i].kw;

		if (kw && kw->client == aw->kw->client &&
		    kw->no == aw->kw->no) {
			spoil(a, kw);
			return -EEXIST;
		}
	}
	return 0;
}

static void window_read(struct adoption *a, unsigned int slot)
{
	struct keep *k = a->mm->keep;
	struct adopt_win *aw = &a->win[a->nr_wins];

	*aw = (struct adopt_win){
		.kw = keep_get2(k->win[slot], sizeof(*aw->kw)),
		.slot = slot, .ledger = SHM_INIT,
	};
	if (aw->kw && !aw->kw->client)
		return;
	if (!aw->kw) {
		adopt_gave_up(a->mm, "window record %u is torn: no pool is adopted",
			      slot);
		spoil_all(a);
	} else if (window_ledger(a, aw) || window_number(a, aw)) {
		spoil(a, aw->kw);
	}
	a->nr_wins++;
}

/*
 * The first place from @i on that was written to some day. Nearly all are holes in
 * the state's memory, which a mere look would fill.
 */
static unsigned int window_next(const struct keep *k, unsigned int i)
{
	off_t from = (const char *)k->win - (const char *)k->shm.addr;
	off_t at = lseek(k->shm.fd, from + i * (off_t)sizeof(k->win[0]),
			 SEEK_DATA);

	if (at < 0)
		return errno == ENXIO ? KEEP_WINS : i;
	return max(i, (unsigned int)((at - from) / (off_t)sizeof(k->win[0])));
}

/* Pools that have lost one of their ledgers are spoiled. */
static void windows_read(struct adoption *a)
{
	struct keep *k = a->mm->keep;
	unsigned int i;

	for (i = window_next(k, 0); i < KEEP_WINS; i = window_next(k, i + 1))
		if (k->win[i][0].tag.seq || k->win[i][1].tag.seq)
			window_read(a, i);
}

static bool window_of(const struct keep_win *kw, const struct mm_pool *p)
{
	return kw && kw->space == p->space->ix && kw->cls == p->cls &&
	       kw->node == p->nd->ix;
}

/* Called when @p has its geometry and its table, and before anybody has @p. */
const char *adopt_pool_windows(const struct mm_pool *p)
{
	const struct adoption *a = p->space->mm->adoption;
	uint64_t table = keep_id_of(p->table_shm.fd).ino;
	unsigned int i;

	if (a->spoiled[p->space->ix][p->cls][p->nd->ix])
		return "not all that its clients have pinned is known";
	for (i = 0; i < a->nr_wins; i++) {
		const struct adopt_win *aw = &a->win[i];

		if (!window_of(aw->kw, p))
			continue;
		if (aw->ledger.bytes != win_ledger_bytes(p))
			return "a ledger has another size";
		if (aw->kw->table_ino != table)
			return "its clients have another frame table";
	}
	return NULL;
}

void adopt_clients_take(struct adoption *a)
{
	clients_read(a);
	clients_take(a);
	windows_read(a);
}

/* -- windows, of pools ------------------------------------------------------------ */

/*
 * The ledger is the client's to write: where its parts lie is computed anew, and
 * what it says of them is not looked at. -ENOENT: its pool is a new one.
 */
static int window_bind(struct adoption *a, struct adopt_win *aw)
{
	const struct keep_win *kw = aw->kw;
	struct mm *mm = a->mm;
	struct mm_client *c = a->client[kw->client - 1];
	struct mm_space *sp = kw->space < KVMM_MAX_SPACES ?
			      mm->space[kw->space] : NULL;
	struct mm_pool *p = NULL;

	if (sp && kw->cls < sp->desc.nclasses && kw->node < mm->nr_nodes)
		p = sp->pool[kw->cls][kw->node];
	if (!c || !p || !p->adopted)
		return -ENOENT;
	/* more than its socket allows by now */
	if (kw->rights == KVMM_RW && c->o.rights != KVMM_RW)
		c->whole = false;
	return win_adopt(c, p, aw->slot + 1, kw, &aw->ledger);
}

static int windows_bind(struct adoption *a)
{
	unsigned int i;
	int err;

	for (i = 0; i < a->nr_wins; i++) {
		struct adopt_win *aw = &a->win[i];

		err = aw->ledger.addr ? window_bind(a, aw) : -ENOENT;
		if (err == -ENOMEM)
			return err;
		if (!err) {
			a->mm->adopted.windows++;
			continue;
		}
		if (aw->kw && aw->kw->client <= KEEP_CLIENTS)
			adopt_partial(a->client[aw->kw->client - 1]);
		/* its pool is new, or it was of nobody: the place is free */
		shm_fini(&aw->ledger);
		keep_win_forget(a->mm, aw->slot);
	}
	return 0;
}

int adopt_clients_bind(struct adoption *a)
{
	unsigned int i;

	for (i = 0; i < KEEP_CLIENTS; i++)
		if (a->client[i])
			client_attach(a, a->client[i], a->kc[i]);
	return windows_bind(a);
}

/* -- after all is there ------------------------------------------------------------ */

static bool engine_broken(const struct adoption *a, const struct mm_engine *e)
{
	struct mm_client *c;
	unsigned int i;

	for (i = 0; i < a->nr_broken; i++)
		if (a->broken[i] == e->no)
			return true;
	/* one whose process came back is another client by now */
	list_for_each_entry(c, &e->members, engine_link)
		if (!c->whole && !c->replaced)
			return true;
	return false;
}

/* Nobody goes on alone. */
static void engines_judge(struct adoption *a)
{
	struct mm_engine *e;
	struct mm_client *c;

	list_for_each_entry(e, &a->mm->engines, link) {
		if (!engine_broken(a, e))
			continue;
		list_for_each_entry(c, &e->members, engine_link)
			adopt_partial(c);
	}
}

void adopt_clients_finish(struct adoption *a)
{
	struct mm *mm = a->mm;
	struct mm_client *c;
	struct mm_win *w;
	unsigned int i;

	engines_judge(a);
	for (i = 0; i < KEEP_CLIENTS; i++) {
		c = a->client[i];
		if (!c)
			continue;
		if (a->kc[i]->flags & (KEEP_DYING | KEEP_EVICTED))
			engine_dying(c->engine);
		if (c->engine->evicted)
			list_for_each_entry(w, &c->windows, client_link)
				win_void(w);
	}
	for (i = 0; i < KEEP_CLIENTS; i++)
		if (a->client[i])
			mm->keep->ops->adopted(mm->o.ops_arg, a->client[i],
					       a->client[i]->whole);
}
