/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients: one process each, and the operations that it is owed an answer of.
 *
 * A client ends when its pidfd says so. Its socket may close long before: then
 * nobody answers it any more, but its pins and frames stay, since its kernels
 * may still run.
 */
#include <stdlib.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"

/* -- clients ---------------------------------------------------------------- */

static void copy_str(char *dst, size_t size, const char *src)
{
	size_t n = src ? strnlen(src, size - 1) : 0;

	memcpy(dst, src ? src : "", n);
	dst[n] = '\0';
}

struct mm_client *client_new(struct mm *mm, const struct mm_client_opts *o)
{
	struct mm_client *c;

	if (!o->ledger || !o->ledger->addr)
		return NULL;
	c = calloc(1, sizeof(*c));
	if (!c)
		return NULL;
	c->mm = mm;
	c->o = *o;
	copy_str(c->tenant, sizeof(c->tenant), o->tenant);
	copy_str(c->name, sizeof(c->name), o->name);
	c->o.tenant = c->tenant;
	c->o.name = c->name;
	if (o->kept)
		memcpy(c->kept, o->kept, sizeof(c->kept));
	c->o.kept = c->kept;
	c->ledger = o->ledger->addr;
	c->whole = true;
	list_init(&c->windows);
	list_init(&c->ops);
	return c;
}

int mm_client_create(struct mm *mm, const struct mm_client_opts *o,
		     struct mm_client **ret)
{
	struct mm_client *c;
	struct mm_engine *e;
	int err;

	if (!o->ledger || !o->ledger->addr)
		return -EINVAL;
	c = client_new(mm, o);
	if (!c)
		return -ENOMEM;
	e = engine_create(mm, o->socket, 1);
	if (!e) {
		free(c);
		return -ENOMEM;
	}
	e->anonymous = true;
	c->connected = true;
	engine_add(e, c);
	err = keep_client_take(c);
	if (err) {
		list_del(&c->engine_link);
		engine_free(e);
		free(c);
		return err;
	}
	*ret = c;
	return 0;
}

void *mm_client_arg(const struct mm_client *c)
{
	return c->o.arg;
}

struct mm_engine *mm_client_engine(const struct mm_client *c)
{
	return c->engine;
}

uint32_t mm_client_rank(const struct mm_client *c)
{
	return c->rank;
}

uint32_t mm_client_flags(const struct mm_client *c)
{
	return c->flags;
}

uint32_t mm_client_world(const struct mm_client *c)
{
	return c->engine->world;
}

void mm_client_members(struct mm_client *c,
		       void (*fn)(struct mm_client *peer, void *arg),
		       void *arg)
{
	struct mm_client *peer;

	list_for_each_entry(peer, &c->engine->members, engine_link)
		if (peer != c && !peer->exited && !peer->replaced)
			fn(peer, arg);
}

int mm_client_back(struct mm_client *c)
{
	if (c->engine->evicted || c->exited)
		return -EOWNERDEAD;
	c->connected = true;
	return 0;
}

void mm_client_windows(struct mm_client *c,
		       void (*fn)(struct mm_win *w, void *arg), void *arg)
{
	struct mm_win *w;

	list_for_each_entry(w, &c->windows, client_link)
		if (!w->closed)
			fn(w, arg);
}

unsigned int mm_client_spaces(const struct mm_client *c, struct mm_space **sp,
			      unsigned int max)
{
	unsigned int i;

	for (i = 0; i < c->nr_spaces && i < max; i++)
		sp[i] = c->spaces[i];
	return i;
}

bool mm_client_joined(const struct mm_client *c)
{
	return c->joined;
}

void client_evict(struct mm_client *c, const char *why)
{
	if (c->evicted || !c->connected)
		return;
	c->evicted = true;
	c->mm->ops->evict_client(c, why);
}

/* -- leaving ------------------------------------------------------------------ */

void mm_client_disconnect(struct mm_client *c)
{
	struct mm_win *w;
	struct mm_op *op;

	if (!c->connected)
		return;
	c->connected = false;
	/* all of them first: one that ends may let another one be answered */
	list_for_each_entry(op, &c->ops, link) {
		op->client = NULL;
		op->win->refs--;
		op->win = NULL;
	}
	while ((op = list_first(&c->ops, struct mm_op, link))) {
		list_del(&op->link);
		op->cancel(op);
	}
	list_for_each_entry(w, &c->windows, client_link) {
		win_give_up(w);
		keep_win(w);
		if (mm_broken(c->mm, MM_BREAK_LEDGER))
			win_void(w);
	}
}

void client_free(struct mm_client *c)
{
	struct mm_win *w;

	while ((w = list_first(&c->windows, struct mm_win, client_link)))
		win_destroy(w);
	while (c->nr_spaces)
		mm_detach(c, c->spaces[0]);
	keep_client_drop(c);
	list_del(&c->engine_link);
	if (c->exit_done)
		c->exit_done(c->exit_arg);
	free(c);
}

void mm_client_exit(struct mm_client *c, void (*done)(void *arg), void *arg)
{
	struct mm_engine *e = c->engine;
	struct mm_client *peer;

	mm_client_disconnect(c);
	c->exited = true;
	c->exit_done = done;
	c->exit_arg = arg;
	e->nr_exited++;
	engine_dying(e);
	if (e->nr_exited == e->nr_members) {
		engine_end(e);
		return;
	}
	list_for_each_entry(peer, &e->members, engine_link)
		if (peer->connected)
			e->mm->ops->member(peer, c, true);
}

/* -- operations ---------------------------------------------------------------- */

void mm_op_init(struct mm_op *op, struct mm_win *w, uint64_t tag, uint8_t kind,
		void (*cancel)(struct mm_op *op))
{
	op->client = w->client;
	op->win = w;
	op->tag = tag;
	op->op = kind;
	op->cancel = cancel;
	w->refs++;
	list_add_tail(&w->client->ops, &op->link);
}

void mm_op_fini(struct mm_op *op)
{
	struct mm_win *w = op->win;

	list_del(&op->link);
	op->client = NULL;
	op->win = NULL;
	if (!w)
		return;
	w->refs--;
	win_retire(w);
}

void mm_op_complete(struct mm_op *op, struct mm_pool *p, int32_t result,
		    uint32_t n, const struct ring_result *res)
{
	struct ring_cqe cqe = {
		.op = op->op, .result = result, .tag = op->tag, .n = n,
	};
	uint32_t i;

	if (!op->client) {
		for (i = 0; i < n; i++)
			if (res[i].frame)
				frame_unref(p, res[i].frame);
		return;
	}
	for (i = 0; i < n; i++)
		op->win->refs += res[i].frame != 0;
	p->space->mm->ops->complete(op->client, op->win, &cqe, res);
}

void mm_handover_put(struct mm_win *w, uint32_t frame)
{
	if (frame_live(w->pool, frame))
		frame_unref(w->pool, frame);
	if (w->refs)
		w->refs--;
	win_retire(w);
}

void mm_cancel(struct mm_client *c, uint64_t tag)
{
	struct mm_op *op;

	list_for_each_entry(op, &c->ops, link) {
		if (op->tag != tag)
			continue;
		op->cancel(op);
		return;
	}
}
