/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spaces: who they are, who is attached, in which mode, and when they end.
 *
 * A space is its descriptor and its tenant; the hash of both is its id. The
 * first read-write client that describes it makes it, with a pool for each class
 * on each node, but for gangs of another world. It lives while it has a client or a page; then it is taken
 * apart, which may take a while: extents must come back from the node's workers
 * first. Meanwhile its slot in the header is not given to another.
 *
 * A block node that finds pages again after a restart makes their space, too
 * (recover_label.c). Nobody may ever attach to it, so it gets its first extents when
 * somebody does.
 *
 * Observe mode. Publishes leave nothing but the hash of their key in a table of
 * fixed size: a key that is found there would have been a hit, had the mode been
 * on. Later keys push earlier ones out of their place, as a cache would.
 */
#include <stdio.h>
#include <stdlib.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define INDEX_FIRST_MAX	(UINT64_C(1) << 22)	/* lines, 256 MiB, sparse */
#define WORDS_FIRST_MAX	(UINT64_C(1) << 24)	/* 128 MiB, sparse */
#define END_RETRY_NS	NSEC_PER_MSEC

/* -- finding ----------------------------------------------------------------- */

struct mm_space *mm_space_get(struct mm *mm, uint32_t ix)
{
	struct mm_space *sp = ix < KVMM_MAX_SPACES ? mm->space[ix] : NULL;

	return sp && !sp->ending ? sp : NULL;
}

struct mm_space *space_find(struct mm *mm, const uint8_t id[32])
{
	struct mm_space *sp;

	list_for_each_entry(sp, &mm->spaces, link)
		if (!sp->ending && !memcmp(sp->id, id, sizeof(sp->id)))
			return sp;
	return NULL;
}

uint32_t mm_space_ix(const struct mm_space *sp)
{
	return sp->ix;
}

const uint8_t *mm_space_id(const struct mm_space *sp)
{
	return sp->id;
}

const struct desc *mm_space_desc(const struct mm_space *sp)
{
	return &sp->desc;
}

const char *mm_space_tenant(const struct mm_space *sp)
{
	return sp->tenant;
}

const struct shm *mm_space_index(const struct mm_space *sp)
{
	return &sp->index_shm;
}

uint32_t mm_space_index_epoch(const struct mm_space *sp)
{
	return sp->index_epoch;
}

bool mm_space_attached(const struct mm_space *sp, const struct mm_client *c)
{
	unsigned int i;

	for (i = 0; i < c->nr_spaces; i++)
		if (c->spaces[i] == sp)
			return true;
	return false;
}

static struct kvmm_hdr_space *hdr_space(const struct mm_space *sp)
{
	return &sp->mm->hdr->space[sp->ix];
}

enum kvmm_mode mm_space_mode(const struct mm_space *sp)
{
	/* relaxed: the daemon is the only writer */
	return atomic_load_explicit(&hdr_space(sp)->mode,
				    memory_order_relaxed);
}

void mm_space_set_mode(struct mm_space *sp, enum kvmm_mode mode)
{
	/* release: pairs with the acquire of every match */
	atomic_store_explicit(&hdr_space(sp)->mode, mode,
			      memory_order_release);
}

/* -- making -------------------------------------------------------------------- */

void space_free(struct mm_space *sp)
{
	unsigned int c, n;

	for (c = 0; c < KVMM_MAX_CLASSES; c++)
		for (n = 0; n < KVMM_MAX_NODES; n++)
			if (sp->pool[c][n])
				pool_destroy(sp->pool[c][n]);
	if (sp->index)
		index_destroy(sp);
	/* release: pairs with the acquire of whoever lists spaces */
	atomic_store_explicit(&hdr_space(sp)->live, 0, memory_order_release);
	keep_space_drop(sp);
	sp->mm->space[sp->ix] = NULL;
	list_del(&sp->link);
	ghost_keep(sp);
	desc_fini(&sp->desc);
	free(sp->desc_bytes);
	free(sp->pending);
	free(sp->hash);
	free(sp);
}

/* Pages of @sp that the nodes of memory could hold, or those below. */
static uint64_t pages_most(const struct mm_space *sp, bool mem)
{
	uint64_t pages = 0;
	unsigned int c, n;

	for (c = 0; c < sp->desc.nclasses; c++)
		for (n = 0; n < sp->mm->nr_nodes; n++) {
			const struct mm_node *nd = &sp->mm->node[n];

			if (nd->mem != mem || !node_serves(nd, sp))
				continue;
			/* a disk may not know yet how large it is */
			pages += (mem ? nd->node->capacity : nd->size_max) /
				 round_up(sp->desc.cls[c].page_bytes,
					  NODE_ALIGN);
		}
	return pages;
}

/*
 * Lines for what memory could hold, two a page, and three words for two pages
 * below; later it grows by itself. No more than that: the larger the table, the
 * more a look into it costs.
 */
static int index_first(struct mm_space *sp, uint32_t epoch)
{
	uint64_t below = pages_most(sp, false);

	return index_create(sp, min(2 * pages_most(sp, true), INDEX_FIRST_MAX),
			    min(below + below / 2, WORDS_FIRST_MAX), epoch);
}

static int space_pools(struct mm_space *sp, struct errmsg *e)
{
	unsigned int c, n;
	int err;

	for (c = 0; c < sp->desc.nclasses; c++) {
		for (n = 0; n < sp->mm->nr_nodes; n++) {
			if (!node_serves(&sp->mm->node[n], sp))
				continue;
			err = pool_create(sp, c, &sp->mm->node[n], e);
			if (err)
				return err;
		}
	}
	return 0;
}

/* The first host node for pages of @sp; a gang only where there is no other. */
static unsigned int first_node(const struct mm_space *sp)
{
	const struct mm *mm = sp->mm;
	unsigned int n, gang = mm->nr_nodes;

	for (n = 0; n < mm->nr_nodes; n++) {
		const struct mm_node *nd = &mm->node[n];

		if (!nd->mem || nd->kind != KVMM_NODE_HOST ||
		    !node_serves(nd, sp))
			continue;
		if (!nd->gang)
			return n;
		gang = min(gang, n);
	}
	return gang;
}

/*
 * Each class has an extent on the first host node from the start, or one that
 * is being made room for; on others it gets one with its first window.
 */
static int space_first_extents(struct mm_space *sp, struct errmsg *e)
{
	struct mm *mm = sp->mm;
	unsigned int n = first_node(sp), c;

	if (n == mm->nr_nodes)
		return 0;
	for (c = 0; c < sp->desc.nclasses; c++) {
		if (pool_grow(sp->pool[c][n]) == -ENOSPC &&
		    !node_room_comes(&mm->node[n]))
			return errmsg_set(e, -ENOSPC,
				"node %s is full: no room for an extent of class %s",
				mm->node[n].node->name, sp->desc.cls[c].name);
	}
	return 0;
}

static int space_slot(const struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < KVMM_MAX_SPACES; i++)
		if (!mm->space[i])
			return i;
	return -EUSERS;
}

int space_adopt(struct mm *mm, uint32_t ix, const char *tenant,
		const uint8_t *bytes, size_t len, const uint8_t id[32],
		struct errmsg *e)
{
	struct mm_space *sp = calloc(1, sizeof(*sp));
	uint32_t epoch;
	int err;

	if (!sp)
		return errmsg_set(e, -ENOMEM, "out of memory");
	sp->mm = mm;
	sp->ix = ix;
	memcpy(sp->id, id, sizeof(sp->id));
	snprintf(sp->tenant, sizeof(sp->tenant), "%s", tenant);
	sp->index_shm = (struct shm)SHM_INIT;
	sp->keep_shm = (struct shm)SHM_INIT;
	list_init(&sp->link);
	err = desc_decode(bytes, len, &sp->desc, e);
	if (err) {
		free(sp);
		return err;
	}
	mm->space[ix] = sp;
	list_add_tail(&mm->spaces, &sp->link);
	err = -ENOMEM;
	sp->desc_bytes = malloc(len);
	if (!sp->desc_bytes)
		goto out_free;
	memcpy(sp->desc_bytes, bytes, len);
	sp->desc_len = len;
	/* clients look on into the one that they have until they are told */
	epoch = atomic_load_explicit(&hdr_space(sp)->index_epoch,
				     memory_order_relaxed);
	err = index_first(sp, epoch + 1);
	if (!err)
		err = space_pools(sp, e);
	if (err)
		goto out_free;
	/* release: pairs with the acquire of whoever lists spaces */
	atomic_store_explicit(&hdr_space(sp)->live, 1, memory_order_release);
	return 0;

out_free:
	if (!e->text[0])
		errmsg_set(e, err, "%s", strerror(-err));
	space_free(sp);
	return err;
}

/**
 * struct space_kind - of a space that is to be made
 * @bare:	without first extents
 */
struct space_kind {
	const char	*tenant;
	uint32_t	mode;
	bool		bare;
};

/* Takes @d over on success. */
static int space_create(struct mm *mm, const struct space_kind *k,
			struct desc *d, const uint8_t *bytes, size_t len,
			const uint8_t id[32], struct mm_space **ret,
			struct errmsg *e)
{
	struct mm_space *sp;
	int err, ix;

	ix = space_slot(mm);
	if (ix < 0)
		return errmsg_set(e, ix, "%u spaces exist, no more are possible",
				  KVMM_MAX_SPACES);
	sp = calloc(1, sizeof(*sp));
	if (!sp)
		return errmsg_set(e, -ENOMEM, "out of memory");
	sp->mm = mm;
	sp->ix = ix;
	memcpy(sp->id, id, sizeof(sp->id));
	snprintf(sp->tenant, sizeof(sp->tenant), "%s", k->tenant);
	sp->bare = k->bare;
	sp->index_shm = (struct shm)SHM_INIT;
	sp->keep_shm = (struct shm)SHM_INIT;
	ghost_take(sp);
	mm->space[ix] = sp;
	list_add_tail(&mm->spaces, &sp->link);
	sp->desc = *d;

	err = -ENOMEM;
	sp->desc_bytes = malloc(len);
	if (!sp->desc_bytes) {
		errmsg_set(e, err, "out of memory");
		goto out_end;
	}
	memcpy(sp->desc_bytes, bytes, len);
	sp->desc_len = len;
	err = index_first(sp, 1);
	if (err) {
		errmsg_set(e, err, "index: %s", strerror(-err));
		goto out_end;
	}
	err = space_pools(sp, e);
	if (!err && !k->bare)
		err = space_first_extents(sp, e);
	if (err)
		goto out_end;

	atomic_store_explicit(&hdr_space(sp)->trace, 0, memory_order_relaxed);
	mm_space_set_mode(sp, k->mode);
	/* release: pairs with the acquire of whoever lists spaces */
	atomic_store_explicit(&hdr_space(sp)->live, 1, memory_order_release);
	keep_space(sp);
	*ret = sp;
	return 0;

out_end:
	/* @d stays the caller's; extents that were asked for must come first */
	memset(&sp->desc, 0, sizeof(sp->desc));
	sp->ending = true;
	spaces_run(mm, 0);
	return err;
}

int space_found(struct mm *mm, const char *tenant, uint32_t mode,
		const uint8_t *bytes, size_t len, struct mm_space **ret,
		struct errmsg *e)
{
	const struct space_kind k = {
		.tenant = tenant, .mode = mode, .bare = true,
	};
	struct desc d;
	uint8_t id[32];
	int err;

	err = desc_decode(bytes, len, &d, e);
	if (err)
		return err;
	desc_space_id(bytes, len, tenant, id);
	err = space_create(mm, &k, &d, bytes, len, id, ret, e);
	if (err)
		desc_fini(&d);
	return err;
}

/* -- attaching --------------------------------------------------------------------- */

/* May @c, asking for what is not there, have meant something that is? */
static int check_must_join(struct mm_client *c, const struct desc *d,
			   struct errmsg *e)
{
	struct mm_space *sp;

	list_for_each_entry(sp, &c->mm->spaces, link) {
		if (sp->ending || strcmp(sp->tenant, c->tenant) ||
		    strcmp(sp->desc.model, d->model) ||
		    strcmp(sp->desc.abi_tag, d->abi_tag))
			continue;
		return errmsg_set(e, -EPROTO,
			"there is a space of model %s, but its %s differs",
			d->model, desc_diff(&sp->desc, d));
	}
	return 0;
}

/*
 * A member that attached the same model described it otherwise: ranks that
 * disagree would compute nonsense. Salts may differ: an engine that serves
 * several users has a space for each.
 */
static int check_members(struct mm_client *c, const struct desc *d,
			 const uint8_t id[32], struct errmsg *e)
{
	const char *field = NULL;
	struct mm_client *m;
	unsigned int i;
	int rank = 0;

	list_for_each_entry(m, &c->engine->members, engine_link) {
		if (m == c)
			continue;
		for (i = 0; i < m->nr_spaces; i++) {
			const struct mm_space *sp = m->spaces[i];
			const char *f;

			if (!memcmp(sp->id, id, sizeof(sp->id)))
				return 0;
			if (strcmp(sp->desc.model, d->model))
				continue;
			f = desc_diff(&sp->desc, d);
			if (!f || !strcmp(f, "salt"))
				continue;
			field = f;
			rank = m->rank;
		}
	}
	if (!field)
		return 0;
	return errmsg_set(e, -EPROTO,
		"%s: rank %d of this engine describes model %s otherwise",
		field, rank, d->model);
}

static void attach(struct mm_client *c, struct mm_space *sp)
{
	c->spaces[c->nr_spaces++] = sp;
	sp->nr_clients++;
	keep_client(c);
}

int mm_attach(struct mm_client *c, const uint8_t *bytes, size_t len,
	      uint32_t flags, struct mm_space **ret, struct errmsg *e)
{
	struct mm_space *sp;
	struct space_kind k;
	struct desc d;
	uint8_t id[32];
	int err;

	if (flags & ~KVMM_MUST_JOIN)
		return errmsg_set(e, -EINVAL, "flags: unknown bits 0x%x",
				  flags & ~KVMM_MUST_JOIN);
	if (engine_usable(c->engine))
		return errmsg_set(e, -EOWNERDEAD,
				  "a member of the engine has exited");
	err = desc_decode(bytes, len, &d, e);
	if (err)
		return err;
	desc_space_id(bytes, len, c->tenant, id);

	sp = space_find(c->mm, id);
	if (sp && mm_space_attached(sp, c)) {
		*ret = sp;
		goto out_desc;
	}
	err = -EUSERS;
	if (c->nr_spaces == ARRAY_SIZE(c->spaces)) {
		errmsg_set(e, err, "%zu spaces are attached already",
			   ARRAY_SIZE(c->spaces));
		goto out_desc;
	}
	err = check_members(c, &d, id, e);
	if (!err && !sp && (flags & KVMM_MUST_JOIN))
		err = check_must_join(c, &d, e);
	if (err)
		goto out_desc;
	if (sp) {
		err = sp->bare ? space_first_extents(sp, e) : 0;
		if (err)
			goto out_desc;
		sp->bare = false;
		attach(c, sp);
		*ret = sp;
		goto out_desc;
	}
	if (c->o.rights != KVMM_RW) {
		err = errmsg_set(e, -ENOENT,
			"no such space, and a read-only client makes none");
		goto out_desc;
	}
	/* what nobody uses any more makes room first */
	spaces_run(c->mm, 0);
	k = (struct space_kind){ .tenant = c->tenant, .mode = c->o.mode };
	err = space_create(c->mm, &k, &d, bytes, len, id, &sp, e);
	if (err)
		goto out_desc;
	attach(c, sp);
	*ret = sp;
	return 0;		/* the space has @d now */

out_desc:
	desc_fini(&d);
	return err;
}

void mm_detach(struct mm_client *c, struct mm_space *sp)
{
	struct mm_win *w, *tmp;
	unsigned int i;

	for (i = 0; i < c->nr_spaces && c->spaces[i] != sp; i++)
		;
	if (i == c->nr_spaces)
		return;
	list_for_each_entry_safe(w, tmp, &c->windows, client_link)
		if (w->pool->space == sp)
			mm_win_close(w);
	c->spaces[i] = c->spaces[--c->nr_spaces];
	sp->nr_clients--;
	keep_client(c);
	sp->mm->next_spaces_ns = 0;
}

/* -- ending ----------------------------------------------------------------------------- */

static bool pool_idle(const struct mm_pool *p)
{
	return list_empty(&p->windows) && !p->nr_open && !p->nr_loading &&
	       !p->nr_quarantine && !p->nr_pages;
}

/* Take it apart as far as that goes now; true: it is gone. */
static bool space_end(struct mm_space *sp)
{
	bool done = true;
	unsigned int c, n;

	for (c = 0; c < KVMM_MAX_CLASSES; c++)
		for (n = 0; n < KVMM_MAX_NODES; n++)
			if (sp->pool[c][n] && !pool_idle(sp->pool[c][n]))
				return false;
	sp->ending = true;
	persist_space_end(sp);
	ghost_keep(sp);		/* its successor may come before it is gone */
	for (c = 0; c < KVMM_MAX_CLASSES; c++)
		for (n = 0; n < KVMM_MAX_NODES; n++)
			if (sp->pool[c][n])
				done &= pool_end(sp->pool[c][n]);
	if (done)
		space_free(sp);
	return done;
}

uint64_t spaces_run(struct mm *mm, uint64_t now_ns)
{
	struct mm_space *sp, *tmp;
	bool again = false;

	if (now_ns && now_ns < mm->next_spaces_ns)
		return mm->next_spaces_ns;
	list_for_each_entry_safe(sp, tmp, &mm->spaces, link)
		if (!sp->nr_clients && !sp->nr_pages && !sp->nr_pending &&
		    !persist_waits(sp))
			again |= !space_end(sp);
	mm->next_spaces_ns = now_ns + (again ? END_RETRY_NS : NSEC_PER_SEC);
	return again ? mm->next_spaces_ns : UINT64_MAX;
}
