/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking over what the last daemon left: spaces, engines, clients, windows.
 *
 * It is found by name (keep.h) and believed for its contents. Order matters:
 *
 *	1. the state; what it says of clients and windows
 *	2. the windows' ledgers: a pool of which one is missing is not adopted, since
 *	   nobody could say what is pinned there
 *	3. spaces, pools, extents (adopt_pool.c)
 *	4. clients, their engines, their windows: from here on pins count
 *	5. frames, and the pages in them (adopt_frames.c)
 *
 * A client that has lost a part of what it had stays, for its pins, and is not
 * whole: it gets nothing back when it comes again, and begins anew.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/fd.h"
#include "kernels/kernels.h"

/**
 * struct adoption - what one mm_adopt() goes by
 * @client:	by place in the state
 * @ledger:	of each window that there was, by place; mapped or not
 * @spoiled:	pools that are not to be adopted
 */
struct adoption {
	struct mm	*mm;
	struct mm_client *client[KEEP_CLIENTS];
	const struct keep_client *kc[KEEP_CLIENTS];
	struct shm	*ledger;
	bool		spoiled[KVMM_MAX_SPACES][KVMM_MAX_CLASSES][KVMM_MAX_NODES];
};

void adopt_gave_up(struct mm *mm, const char *fmt, ...)
{
	char text[256];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	mm->adopted.gave_up++;
	if (mm->keep->ops->gave_up)
		mm->keep->ops->gave_up(mm->o.ops_arg, text);
}

static uint64_t fd_bytes(int fd)
{
	struct stat st;

	return fstat(fd, &st) || st.st_size < 0 ? 0 : (uint64_t)st.st_size;
}

static int take(struct mm *mm, const char *name)
{
	return mm->keep->ops->take(mm->o.ops_arg, name);
}

int adopt_shm(struct mm *mm, const char *name, uint64_t bytes, bool want_ro,
	      struct shm *s)
{
	int fd = take(mm, name), err;

	if (fd < 0)
		return fd;
	if (!bytes)
		bytes = fd_bytes(fd);
	err = shm_adopt(s, fd, bytes, want_ro);
	if (err)
		adopt_gave_up(mm, "%s is no memory of %llu bytes that kvmmd made: %s",
			      name, (unsigned long long)bytes, strerror(-err));
	return err;
}

/* -- the state ------------------------------------------------------------------- */

static bool state_good(const struct keep_state *st)
{
	return st->magic == KEEP_MAGIC_STATE && st->size == sizeof(*st) &&
	       st->nr_clients == KEEP_CLIENTS && st->nr_wins == KEEP_WINS &&
	       st->crc == keep_state_crc(st);
}

/* 0: it is there; -ENOENT: there is none that is good. */
static int state_take(struct mm *mm)
{
	struct keep *k = mm->keep;

	if (adopt_shm(mm, "mm", keep_state_bytes(), false, &k->shm))
		return -ENOENT;
	if (state_good(k->shm.addr)) {
		keep_state_map(k);
		return 0;
	}
	adopt_gave_up(mm, "the state of the last daemon is not what it should be: nothing is adopted");
	shm_fini(&k->shm);
	return -ENOENT;
}

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

/* -- windows --------------------------------------------------------------------- */

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
		if (a->client[i])
			a->client[i]->whole = false;
}

static int window_ledger(struct adoption *a, unsigned int i,
			 const struct keep_win *kw)
{
	char name[KEEP_NAME];
	int err;

	if (kw->client > KEEP_CLIENTS || !a->kc[kw->client - 1]) {
		adopt_gave_up(a->mm, "window %u is of a client that is not there",
			      i);
		return -ENOENT;
	}
	snprintf(name, sizeof(name), "win.%u", i);
	err = adopt_shm(a->mm, name, kw->ledger_bytes,
			a->kc[kw->client - 1]->flags & KEEP_JOINED,
			&a->ledger[i]);
	if (err == -ENOENT)
		adopt_gave_up(a->mm, "nobody kept the ledger of window %u", i);
	return err;
}

/* Pools that have lost one of their ledgers are spoiled. */
static void windows_read(struct adoption *a)
{
	struct keep *k = a->mm->keep;
	unsigned int i;

	for (i = 0; i < KEEP_WINS; i++) {
		const struct keep_win *kw;

		if (!k->win[i][0].tag.seq && !k->win[i][1].tag.seq)
			continue;
		kw = keep_get2(k->win[i], sizeof(*kw));
		if (!kw) {
			adopt_gave_up(a->mm, "window record %u is torn: no pool is adopted",
				      i);
			spoil_all(a);
		} else if (kw->client && window_ledger(a, i, kw)) {
			spoil(a, kw);
		}
	}
}

/*
 * The ledger is the client's to write: where its parts lie is computed anew, and
 * what it says of them is not looked at.
 */
static int window_bind(struct adoption *a, unsigned int i,
		       const struct keep_win *kw)
{
	struct mm *mm = a->mm;
	struct mm_client *c = a->client[kw->client - 1];
	struct mm_space *sp = kw->space < KVMM_MAX_SPACES ?
			      mm->space[kw->space] : NULL;
	struct mm_pool *p = NULL;

	if (sp && kw->cls < sp->desc.nclasses && kw->node < mm->nr_nodes)
		p = sp->pool[kw->cls][kw->node];
	if (!c || !p || !p->adopted || kw->no >= ARRAY_SIZE(c->win) ||
	    c->win[kw->no])
		return -ENOENT;
	if (a->ledger[i].bytes != win_ledger_bytes(p)) {
		adopt_gave_up(mm, "window %u has a ledger of %zu bytes, of %llu",
			      i, a->ledger[i].bytes,
			      (unsigned long long)win_ledger_bytes(p));
		return -EPROTO;
	}
	return win_adopt(c, p, i + 1, kw, &a->ledger[i]);
}

static void windows_bind(struct adoption *a)
{
	struct keep *k = a->mm->keep;
	unsigned int i;

	for (i = 0; i < KEEP_WINS; i++) {
		const struct keep_win *kw;

		if (!k->win[i][0].tag.seq && !k->win[i][1].tag.seq)
			continue;
		kw = keep_get2(k->win[i], sizeof(*kw));
		if (a->ledger[i].addr && !window_bind(a, i, kw)) {
			a->mm->adopted.windows++;
			continue;
		}
		if (kw && kw->client && kw->client <= KEEP_CLIENTS &&
		    a->client[kw->client - 1])
			a->client[kw->client - 1]->whole = false;
		/* its pool is new, or it was of nobody: the place is free */
		shm_fini(&a->ledger[i]);
		if (!kw || kw->client)
			keep_win_forget(a->mm, i);
	}
}

/* What a client has in an extent that was lost it cannot go on with. */
static void windows_judge(struct mm_pool *p)
{
	struct mm_win *w;

	if (p->nr_lost)
		list_for_each_entry(w, &p->windows, pool_link)
			w->client->whole = false;
}

/* -- spaces ---------------------------------------------------------------------- */

static bool space_good(const struct keep_space *ks, uint64_t bytes, uint32_t ix)
{
	return bytes >= sizeof(*ks) && ks->magic == KEEP_MAGIC_SPACE &&
	       ks->size == sizeof(*ks) && ks->ix == ix &&
	       ks->desc_len <= bytes - sizeof(*ks) &&
	       memchr(ks->tenant, 0, sizeof(ks->tenant)) &&
	       ks->crc == kvmm_crc32c(kvmm_crc32c(0, ks,
					offsetof(struct keep_space, crc)),
				      ks + 1, ks->desc_len);
}

static int space_take(struct adoption *a, uint32_t ix, struct errmsg *e)
{
	struct mm *mm = a->mm;
	const struct keep_space *ks;
	struct shm s = SHM_INIT;
	char name[KEEP_NAME];
	uint8_t id[32];
	int fd, err;

	snprintf(name, sizeof(name), "space.%u", ix);
	fd = take(mm, name);
	if (fd < 0)
		return 0;
	err = shm_adopt(&s, fd, fd_bytes(fd), false);
	ks = s.addr;
	if (!err && !space_good(ks, s.bytes, ix))
		err = -EPROTO;
	if (!err) {
		desc_space_id((const uint8_t *)(ks + 1), ks->desc_len,
			      ks->tenant, id);
		err = memcmp(id, ks->id, sizeof(id)) ? -EPROTO :
		      space_adopt(mm, ix, ks->tenant, (const uint8_t *)(ks + 1),
				  ks->desc_len, ks->id, e);
	}
	if (err && err != -ENOMEM)
		adopt_gave_up(mm, "space %u cannot be adopted: %s", ix,
			      e->text[0] ? e->text : strerror(-err));
	if (!err) {
		mm->adopted.spaces++;
		mm->space[ix]->keep_shm = s;
		return 0;
	}
	mm->keep->ops->drop(mm->o.ops_arg, name);
	shm_fini(&s);
	return err == -ENOMEM ? err : 0;
}

/* What the header says of spaces that nobody has any more. */
static void spaces_not_there(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < KVMM_MAX_SPACES; i++)
		if (!mm->space[i])
			/* release: pairs with the acquire of whoever lists them */
			atomic_store_explicit(&mm->hdr->space[i].live, 0,
					      memory_order_release);
}

/* -- clients --------------------------------------------------------------------- */

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
	c->whole = true;
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
			c->whole = false;
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
		a->kc[i] = NULL;
		keep_client_forget(mm, i);
		return;
	}
	a->client[i] = client_make(mm, i, kc, &o);
	if (!a->client[i]) {
		/* as if out of memory for a new client: it goes on without us */
		adopt_gave_up(mm, "no memory for client %u", kc->no);
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

/* After their windows are there. */
static void clients_finish(struct adoption *a)
{
	struct mm *mm = a->mm;
	struct mm_client *c;
	struct mm_win *w;
	unsigned int i;

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

/* -- all of it ------------------------------------------------------------------- */

static void ledgers_close(struct adoption *a)
{
	unsigned int i;

	for (i = 0; i < KEEP_WINS; i++)
		shm_fini(&a->ledger[i]);
	free(a->ledger);
}

static int adopt_all(struct adoption *a, unsigned int share_pct,
		     struct errmsg *e)
{
	struct mm *mm = a->mm;
	struct mm_pool *p;
	unsigned int i;
	int err;

	/*
	 * Clients first: a window of one that is not there spoils its pool. They
	 * are attached and get windows when spaces and pools exist.
	 */
	clients_read(a);
	clients_take(a);
	windows_read(a);
	mm->adopting = true;
	mm->adopt_spoiled = (const void *)a->spoiled;
	for (i = 0; i < KVMM_MAX_SPACES; i++) {
		err = space_take(a, i, e);
		if (err)
			goto out;
	}
	spaces_not_there(mm);
	for (i = 0; i < KEEP_CLIENTS; i++)
		if (a->client[i])
			client_attach(a, a->client[i], a->kc[i]);
	windows_bind(a);
	for (i = 0; i < mm->nr_nodes; i++) {
		list_for_each_entry(p, &mm->node[i].pools, node_link) {
			if (!p->adopted)
				continue;
			adopt_extents(p);
			windows_judge(p);
		}
	}
	err = adopt_frames(mm, share_pct, e);
	if (err)
		goto out;
	clients_finish(a);
out:
	mm->adopting = false;
	mm->adopt_spoiled = NULL;
	return err;
}

int mm_adopt(struct mm *mm, unsigned int share_pct, struct mm_adopted *ad,
	     struct errmsg *e)
{
	struct adoption *a;
	unsigned int i;
	int err;

	if (!mm->keep)
		return 0;
	e->text[0] = '\0';
	err = state_take(mm);
	if (err) {
		spaces_not_there(mm);
		mm->keep->ops->drop(mm->o.ops_arg, "mm");
		err = keep_begin(mm, e);
		goto out;
	}
	a = calloc(1, sizeof(*a));
	if (a)
		a->ledger = calloc(KEEP_WINS, sizeof(*a->ledger));
	if (!a || !a->ledger) {
		free(a);
		return errmsg_set(e, -ENOMEM, "out of memory");
	}
	a->mm = mm;
	for (i = 0; i < KEEP_WINS; i++)
		a->ledger[i] = (struct shm)SHM_INIT;
	err = adopt_all(a, share_pct, e);
	ledgers_close(a);
	free(a);
out:
	*ad = mm->adopted;
	return err;
}

const struct mm_adopted *mm_last_adopted(const struct mm *mm)
{
	return &mm->adopted;
}
