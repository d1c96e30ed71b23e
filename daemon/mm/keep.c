/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writing down what the next daemon needs: see keep.h.
 *
 * A memfd is handed to whoever keeps it once its contents are good, and before
 * anybody but us relies on it; a record is written once the memfd that it speaks of
 * is kept. On the way back the record goes first. So what is found is at most more
 * than was in use, never less.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/mm/keep.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"

#ifdef KVMM_TEST_BUILD
void (*mm_point_fn)(void);
#endif

/* -- two copies ------------------------------------------------------------------ */

static const struct keep_tag *tag_of(const void *copy, size_t bytes)
{
	return (const void *)((const char *)copy + bytes -
			      sizeof(struct keep_tag));
}

static uint32_t copy_crc(const void *copy, size_t bytes)
{
	return kvmm_crc32c(0, copy, bytes - sizeof(uint32_t));
}

static bool copy_good(const void *copy, size_t bytes)
{
	const struct keep_tag *t = tag_of(copy, bytes);

	return t->seq && t->crc == copy_crc(copy, bytes);
}

const void *keep_get2(const void *pair, size_t bytes)
{
	const void *a = pair, *b = (const char *)pair + bytes;
	bool good_a = copy_good(a, bytes), good_b = copy_good(b, bytes);

	if (good_a && good_b)
		/* a running number: 32 bits of it may have gone round */
		return (int32_t)(tag_of(a, bytes)->seq -
				 tag_of(b, bytes)->seq) > 0 ? a : b;
	return good_a ? a : good_b ? b : NULL;
}

void keep_put2(void *pair, const void *from, size_t bytes)
{
	const void *now = keep_get2(pair, bytes);
	char *to = now == pair ? (char *)pair + bytes : pair;
	struct keep_tag *t = (void *)(to + bytes - sizeof(*t));
	uint32_t seq = now ? tag_of(now, bytes)->seq + 1 : 1;

	/* whatever is there of it when we die is not what its checksum says */
	memcpy(to, from, bytes - sizeof(*t));
	mm_point();
	t->seq = seq ? seq : 1;
	t->crc = copy_crc(to, bytes);
	mm_point();
}

/* -- names ----------------------------------------------------------------------- */

static void put(struct mm *mm, int fd, const char *fmt, ...) __printf(3, 4);
static void drop(struct mm *mm, const char *fmt, ...) __printf(2, 3);

static void put(struct mm *mm, int fd, const char *fmt, ...)
{
	char name[KEEP_NAME];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(name, sizeof(name), fmt, ap);
	va_end(ap);
	mm->keep->ops->put(mm->o.ops_arg, fd, name);
	mm_point();
}

static void drop(struct mm *mm, const char *fmt, ...)
{
	char name[KEEP_NAME];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(name, sizeof(name), fmt, ap);
	va_end(ap);
	mm->keep->ops->drop(mm->o.ops_arg, name);
	mm_point();
}

void keep_name_pool(const struct mm_pool *p, const char *what,
		    char name[KEEP_NAME])
{
	snprintf(name, KEEP_NAME, "%s.%u.%u.%u", what, p->space->ix, p->cls,
		 p->nd->ix);
}

void keep_name_extent(const struct mm_pool *p, uint32_t no,
		      char name[KEEP_NAME])
{
	snprintf(name, KEEP_NAME, "extent.%u.%u.%u.%u", p->space->ix, p->cls,
		 p->nd->ix, no);
}

struct keep_id keep_id_of(int fd)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return (struct keep_id){ .ino = 0 };
	return (struct keep_id){ .dev = st.st_dev, .ino = st.st_ino };
}

/* -- the state ------------------------------------------------------------------- */

uint64_t keep_state_bytes(void)
{
	return sizeof(struct keep_state) +
	       KEEP_CLIENTS * 2 * sizeof(struct keep_client) +
	       KEEP_WINS * 2 * sizeof(struct keep_win) +
	       KEEP_STORES * 2 * sizeof(struct keep_store) +
	       sizeof(struct keep_live);
}

uint32_t keep_state_crc(const struct keep_state *st)
{
	return kvmm_crc32c(0, st, offsetof(struct keep_state, crc));
}

void keep_state_map(struct keep *k)
{
	char *at = (char *)k->shm.addr + sizeof(struct keep_state);

	k->client = (void *)at;
	at += KEEP_CLIENTS * sizeof(k->client[0]);
	k->win = (void *)at;
	at += KEEP_WINS * sizeof(k->win[0]);
	k->store = (void *)at;
	at += KEEP_STORES * sizeof(k->store[0]);
	k->live = (void *)at;
}

int keep_begin(struct mm *mm, struct errmsg *e)
{
	struct keep *k = mm->keep;
	struct keep_state *st;
	int err;

	err = shm_create(&k->shm, "kvmm-state", keep_state_bytes(), 0);
	if (err)
		return errmsg_set(e, err, "state of %llu bytes: %s",
				  (unsigned long long)keep_state_bytes(),
				  strerror(-err));
	st = k->shm.addr;
	st->magic = KEEP_MAGIC_STATE;
	st->size = sizeof(*st);
	st->nr_clients = KEEP_CLIENTS;
	st->nr_wins = KEEP_WINS;
	st->crc = keep_state_crc(st);
	keep_state_map(k);
	put(mm, k->shm.fd, "mm");
	return 0;
}

void keep_end(struct mm *mm)
{
	if (!mm->keep)
		return;
	keep_stores_end(mm);
	if (mm->keep->shm.addr)
		drop(mm, "mm");
	shm_fini(&mm->keep->shm);
	free(mm->keep);
	mm->keep = NULL;
}

/* -- clients --------------------------------------------------------------------- */

int keep_client_take(struct mm_client *c)
{
	struct keep *k = c->mm->keep;
	size_t i;

	if (!k)
		return 0;
	i = bitmap_next_clear(k->clients, KEEP_CLIENTS, 0);
	if (i == KEEP_CLIENTS)
		return -EUSERS;
	bitmap_set(k->clients, i);
	c->keep = i + 1;
	keep_client(c);
	return 0;
}

static uint32_t client_flags(const struct mm_client *c)
{
	return (c->joined ? KEEP_JOINED : 0) |
	       (c->replaced ? KEEP_REPLACED : 0) |
	       (c->engine->state == ENGINE_DYING ? KEEP_DYING : 0) |
	       (c->engine->evicted ? KEEP_EVICTED : 0) |
	       (c->whole ? 0 : KEEP_PARTIAL);
}

void keep_client(struct mm_client *c)
{
	struct keep *k = c->mm->keep;
	struct keep_client kc = {
		.used	= 1,
		.no	= c->o.no,
		.engine	= c->engine->no,
		.socket	= c->o.socket,
		.rank	= c->rank,
		.mflags	= c->flags,
		.world	= c->engine->world,
		.rights	= c->o.rights,
		.mode	= c->o.mode,
		.pid	= c->o.pid,
		.nr_spaces = c->nr_spaces,
	};
	unsigned int i;

	if (!k || !c->keep)
		return;
	kc.flags = client_flags(c);
	memcpy(kc.token, c->engine->token, sizeof(kc.token));
	memcpy(kc.name, c->name, sizeof(kc.name));
	memcpy(kc.server, c->kept, sizeof(kc.server));
	for (i = 0; i < c->nr_spaces; i++)
		kc.space[i] = c->spaces[i]->ix;
	keep_put2(k->client[c->keep - 1], &kc, sizeof(kc));
}

void keep_client_drop(struct mm_client *c)
{
	struct keep *k = c->mm->keep;
	const struct keep_client none = { .used = 0 };

	if (!k || !c->keep)
		return;
	keep_put2(k->client[c->keep - 1], &none, sizeof(none));
	bitmap_clear(k->clients, c->keep - 1);
	c->keep = 0;
}

void keep_engine(struct mm_engine *e)
{
	struct mm_client *c;

	if (!e->mm->keep)
		return;
	list_for_each_entry(c, &e->members, engine_link)
		keep_client(c);
}

/* -- windows --------------------------------------------------------------------- */

int keep_win_take(struct mm_win *w)
{
	struct mm *mm = w->client->mm;
	struct keep *k = mm->keep;
	size_t i;

	if (!k)
		return 0;
	i = bitmap_next_clear(k->wins, KEEP_WINS, 0);
	if (i == KEEP_WINS)
		return -ENOSPC;
	bitmap_set(k->wins, i);
	w->keep = i + 1;
	put(mm, w->ledger_shm.fd, "win.%zu", i);
	keep_win(w);
	return 0;
}

void keep_win(struct mm_win *w)
{
	struct keep *k = w->client->mm->keep;
	struct keep_win kw = {
		.client	= w->client->keep,
		.no	= w->no,
		.space	= w->pool->space->ix,
		.cls	= w->pool->cls,
		.node	= w->pool->nd->ix,
		.flags	= (w->closed ? KEEP_WIN_CLOSED : 0) |
			  (w->void_pins ? KEEP_WIN_VOID : 0),
		.rights	= w->rights,
		.reserved = w->reserved,
		.synced_seq = w->synced_seq,
		.ledger_bytes = w->ledger_shm.bytes,
	};
	struct keep_id ledger;

	if (!k || !w->keep)
		return;
	ledger = keep_id_of(w->ledger_shm.fd);
	kw.dev = (uint32_t)ledger.dev;
	kw.ledger_ino = ledger.ino;
	kw.table_ino = keep_id_of(w->pool->table_shm.fd).ino;
	keep_put2(k->win[w->keep - 1], &kw, sizeof(kw));
}

void keep_win_drop(struct mm_win *w)
{
	struct mm *mm = w->client->mm;
	const struct keep_win none = { .client = 0 };

	if (!mm->keep || !w->keep)
		return;
	keep_put2(mm->keep->win[w->keep - 1], &none, sizeof(none));
	drop(mm, "win.%u", w->keep - 1);
	bitmap_clear(mm->keep->wins, w->keep - 1);
	w->keep = 0;
}

/* -- spaces ---------------------------------------------------------------------- */

/* Best effort: a space that cannot be kept is not found again. */
void keep_space(struct mm_space *sp)
{
	struct keep_space *ks;

	if (!sp->mm->keep ||
	    shm_create(&sp->keep_shm, "kvmm-space", sizeof(*ks) + sp->desc_len,
		       0))
		return;
	ks = sp->keep_shm.addr;
	ks->magic = KEEP_MAGIC_SPACE;
	ks->size = sizeof(*ks);
	ks->ix = sp->ix;
	memcpy(ks->id, sp->id, sizeof(ks->id));
	memcpy(ks->tenant, sp->tenant, sizeof(ks->tenant));
	ks->desc_len = sp->desc_len;
	memcpy(ks + 1, sp->desc_bytes, sp->desc_len);
	ks->crc = kvmm_crc32c(kvmm_crc32c(0, ks, offsetof(struct keep_space,
							  crc)),
			      sp->desc_bytes, sp->desc_len);
	/* first: what a busy keeper still has under this name is not it */
	sp->mm->keep->live->space_ino[sp->ix] =
		keep_id_of(sp->keep_shm.fd).ino;
	mm_point();
	put(sp->mm, sp->keep_shm.fd, "space.%u", sp->ix);
}

void keep_space_drop(struct mm_space *sp)
{
	if (sp->mm->keep) {
		sp->mm->keep->live->space_ino[sp->ix] = 0;
		drop(sp->mm, "space.%u", sp->ix);
	}
	shm_fini(&sp->keep_shm);
}

/* -- pools and extents ----------------------------------------------------------- */

uint32_t keep_pool_crc(const struct keep_pool *h)
{
	return kvmm_crc32c(0, h, offsetof(struct keep_pool, crc));
}

void keep_pool_layout(const struct mm_pool *p, struct keep_pool *h)
{
	uint64_t at = sizeof(*h) +
		      (p->max_extents + UINT64_C(1)) * sizeof(struct keep_extent);

	memset(h, 0, sizeof(*h));
	h->magic = KEEP_MAGIC_POOL;
	h->size = sizeof(*h);
	h->ix = p->space->ix;
	h->cls = p->cls;
	h->node = p->nd->ix;
	memcpy(h->space_id, p->space->id, sizeof(h->space_id));
	snprintf(h->node_name, sizeof(h->node_name), "%s", p->nd->node->name);
	h->page_bytes = p->page_bytes;
	h->stride = p->stride;
	h->parts = p->parts;
	h->per_extent = p->per_extent;
	h->max_extents = p->max_extents;
	h->max_frames = p->max_frames;
	h->owner_off = round_up(at, 4096);
	at = h->owner_off + (uint64_t)p->max_frames * sizeof(p->owner[0]);
	h->record_off = round_up(at, 4096);
	h->bytes = h->record_off +
		   (uint64_t)p->max_frames * sizeof(p->record[0]);
	if (p->space->mm->keep)
		h->state = keep_id_of(p->space->mm->keep->shm.fd);
	h->crc = keep_pool_crc(h);
}

void keep_pool_of(struct keep_pool *h, struct keep_id table)
{
	h->table = table;
	h->crc = keep_pool_crc(h);
}

/* Records first: a table alone is of no use, and is not adopted. */
void keep_pool(struct mm_pool *p)
{
	struct mm *mm = p->space->mm;
	char name[KEEP_NAME];

	if (!mm->keep || !p->nd->mem)
		return;
	keep_name_pool(p, "record", name);
	put(mm, p->record_shm.fd, "%s", name);
	keep_name_pool(p, "table", name);
	put(mm, p->table_shm.fd, "%s", name);
}

void keep_pool_drop(struct mm_pool *p)
{
	struct mm *mm = p->space->mm;
	char name[KEEP_NAME];

	if (!mm->keep || !p->nd->mem)
		return;
	keep_name_pool(p, "table", name);
	drop(mm, "%s", name);
	keep_name_pool(p, "record", name);
	drop(mm, "%s", name);
}

uint32_t keep_extent_crc(const struct keep_extent *x)
{
	return kvmm_crc32c(0, x, offsetof(struct keep_extent, crc));
}

static struct keep_extent *extent_record(const struct mm_pool *p, uint32_t no)
{
	return (struct keep_extent *)((struct keep_pool *)p->record_shm.addr +
				      1) + no;
}

void keep_extent(struct mm_pool *p, const struct mm_extent *x)
{
	struct mm *mm = p->space->mm;
	struct keep_extent *to = extent_record(p, x->no);
	struct keep_extent kx = {
		.id = x->ext->id, .bytes = x->ext->bytes,
		.up_seq = x->up_seq, .down_seq = x->down_seq,
		.mem = keep_id_of(x->ext->fd),
	};
	char name[KEEP_NAME];

	if (!mm->keep)
		return;
	if (!x->down_seq) {
		keep_name_extent(p, x->no, name);
		put(mm, x->ext->fd, "%s", name);
	}
	kx.crc = keep_extent_crc(&kx);
	*to = kx;
	mm_point();
}

void keep_extent_drop(struct mm_pool *p, uint32_t no)
{
	struct mm *mm = p->space->mm;
	char name[KEEP_NAME];

	if (!mm->keep)
		return;
	*extent_record(p, no) = (struct keep_extent){ .id = 0 };
	mm_point();
	keep_name_extent(p, no, name);
	drop(mm, "%s", name);
}

void keep_extent_lose(struct mm_pool *p, uint32_t no)
{
	struct keep_extent kx = { .flags = KEEP_EXTENT_LOST };
	char name[KEEP_NAME];

	kx.crc = keep_extent_crc(&kx);
	*extent_record(p, no) = kx;
	mm_point();
	keep_name_extent(p, no, name);
	drop(p->space->mm, "%s", name);
}

/* -- what cannot be adopted ------------------------------------------------------ */

void keep_client_partial(struct mm *mm, unsigned int i)
{
	const struct keep_client *kc = keep_get2(mm->keep->client[i],
						 sizeof(*kc));
	struct keep_client now;

	if (!kc || !kc->used || kc->flags & KEEP_PARTIAL)
		return;
	now = *kc;
	now.flags |= KEEP_PARTIAL;
	keep_put2(mm->keep->client[i], &now, sizeof(now));
}

void keep_client_forget(struct mm *mm, unsigned int i)
{
	const struct keep_client none = { .used = 0 };

	keep_put2(mm->keep->client[i], &none, sizeof(none));
}

void keep_win_forget(struct mm *mm, unsigned int i)
{
	const struct keep_win none = { .client = 0 };

	keep_put2(mm->keep->win[i], &none, sizeof(none));
	drop(mm, "win.%u", i);
}
