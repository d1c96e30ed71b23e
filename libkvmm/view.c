/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A window's shared memory: the frame table (the daemon's) and the window
 * ledger (ours: pins, magazine, bitmap). What the daemon says is checked once,
 * here, so that no later arithmetic can leave the mappings.
 */
#include <stdlib.h>
#include <string.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

static bool fits(uint64_t off, uint64_t n, uint64_t each, uint64_t bytes)
{
	uint64_t len, end;

	return off % 8 == 0 && !mul_overflows(n, each, &len) &&
	       !add_overflows(off, len, &end) && end <= bytes;
}

static bool table_ok(const struct frame_table *t, uint64_t bytes)
{
	return bytes >= sizeof(*t) && t->magic == KVMM_MAGIC_TABLE &&
	       t->size >= sizeof(*t) && t->stride && t->frames_per_extent > 1 &&
	       t->max_frames > t->frames_per_extent &&
	       t->max_frames <= KVMM_MAX_FRAMES &&
	       t->extent_bytes == (uint64_t)t->frames_per_extent * t->stride &&
	       t->extent_bytes % 4096 == 0 &&
	       fits(t->size, t->max_frames, 8, bytes);
}

/* Where the parts of a window ledger are, and for how many they are. */
struct wl_shape {
	uint64_t	bitmap_off, pins_off, mag_off, bytes;
	uint32_t	nr_extents, mag_entries;
};

/*
 * Who writes the ledger may be writing it now. volatile: each field is read once,
 * so that what is used is what was checked.
 */
static bool wl_read(struct wl_shape *s, const struct shm *shm,
		    const struct frame_table *t)
{
	const volatile struct window_ledger *w = shm->addr;

	if (shm->bytes < sizeof(*w) || w->magic != KVMM_MAGIC_WINDOW ||
	    w->size < sizeof(*w) || w->max_frames != t->max_frames)
		return false;
	*s = (struct wl_shape){
		.bitmap_off	= w->bitmap_off,
		.pins_off	= w->pins_off,
		.mag_off	= w->mag_off,
		.bytes		= w->bytes,
		.nr_extents	= w->nr_extents,
		.mag_entries	= w->mag_entries,
	};
	return s->bytes <= shm->bytes && is_pow2(s->mag_entries) &&
	       s->mag_entries >= t->max_frames &&
	       s->nr_extents >= div_round_up(t->max_frames,
					     t->frames_per_extent) &&
	       fits(s->bitmap_off, BITMAP_WORDS(s->nr_extents), 8, s->bytes) &&
	       fits(s->pins_off, t->max_frames, 4, s->bytes) &&
	       fits(s->mag_off, s->mag_entries, 4, s->bytes);
}

static void *at(const struct shm *s, uint64_t off)
{
	return (char *)s->addr + off;
}

/* Large and touched sparsely: calloc() gives untouched pages for these. */
static int view_tables(struct kvmm_view *v)
{
	v->mapped = calloc(BITMAP_WORDS(v->nr_extents), sizeof(*v->mapped));
	v->pos = calloc(v->max_frames, sizeof(*v->pos));
	v->stack = malloc((size_t)v->max_frames * sizeof(*v->stack));
	return v->mapped && v->pos && v->stack ? 0 : -ENOMEM;
}

static void view_dead(struct kvmm_dead *d)
{
	kvmm_view_free(container_of(d, struct kvmm_view, dead));
}

int kvmm_view_create(struct kvmm_att *a, unsigned int cls, unsigned int node,
		     uint32_t rights, uint16_t no, struct shm *table,
		     struct shm *wl, struct kvmm_view **ret)
{
	const struct frame_table *t = table->addr;
	struct wl_shape shape;
	struct kvmm_view *v;

	if (!table_ok(t, table->bytes) || !wl_read(&shape, wl, t))
		return kvmm_fail(-EPROTO,
				 "the daemon's window cannot be used");
	v = calloc(1, sizeof(*v));
	if (!v)
		return kvmm_fail(-ENOMEM, "out of memory");
	v->dead.free = view_dead;
	v->refs = 1;
	v->att = a;
	v->no = no;
	v->cls = cls;
	v->node = node;
	v->rights = rights;
	v->table = t;
	v->word = (const _Atomic uint64_t *)((const char *)t + t->size);
	v->wl = wl->addr;
	v->pins = at(wl, shape.pins_off);
	v->bitmap = at(wl, shape.bitmap_off);
	v->mag = at(wl, shape.mag_off);
	v->mag_mask = shape.mag_entries - 1;
	v->mag_head = atomic_load_explicit(&v->wl->mag_head,
					   memory_order_relaxed);
	v->max_frames = t->max_frames;
	v->fpe = t->frames_per_extent;
	v->fpe_inv = UINT64_MAX / v->fpe + 1;
	v->nr_extents = div_round_up(t->max_frames, v->fpe);
	v->page_bytes = a->sp->desc.cls[cls].page_bytes;
	v->dense = v->fpe;
	v->target = LIB_MAG_TARGET;
	v->level = LIB_MAG_TARGET;
	kvmm_mutex_init(&v->mag_lock, LOCK_MAGAZINE);
	if (view_tables(v)) {
		kvmm_view_free(v);
		return kvmm_fail(-ENOMEM, "out of memory");
	}
	v->table_shm = *table;
	v->wl_shm = *wl;
	*table = (struct shm)SHM_INIT;
	*wl = (struct shm)SHM_INIT;
	*ret = v;
	return 0;
}

static void peer_free(struct kvmm_dead *d)
{
	struct kvmm_peer *p = container_of(d, struct kvmm_peer, dead);

	shm_fini(&p->shm);
	free(p);
}

void kvmm_view_free(struct kvmm_view *v)
{
	uint32_t i;

	if (!v)
		return;
	for (i = 0; i < ARRAY_SIZE(v->peer); i++) {
		struct kvmm_peer *p = atomic_load_explicit(&v->peer[i],
						memory_order_relaxed);

		if (p)
			peer_free(&p->dead);
	}
	if (v->table_shm.addr) {
		shm_fini(&v->table_shm);
		shm_fini(&v->wl_shm);
	}
	kvmm_mutex_fini(&v->mag_lock);
	free((void *)v->mapped);
	free((void *)v->pos);
	free(v->stack);
	free(v->busy);
	free(v->limbo);
	free(v);
}

bool kvmm_view_hold(struct kvmm_view *v)
{
	uint32_t n = atomic_load_explicit(&v->refs, memory_order_relaxed);

	while (n)
		if (atomic_compare_exchange_weak_explicit(&v->refs, &n, n + 1,
							  memory_order_relaxed,
							  memory_order_relaxed))
			return true;
	return false;
}

void kvmm_view_drop(struct kvmm_view *v)
{
	/* acq_rel: the last one out frees what the others wrote */
	if (atomic_fetch_sub_explicit(&v->refs, 1, memory_order_acq_rel) == 1)
		kvmm_bury(v->att->era->k, &v->dead);
}

void kvmm_view_shut(struct kvmm_view *v)
{
	kvmm_lock(&v->mag_lock);
	atomic_store_explicit(&v->closed, true, memory_order_relaxed);
	kvmm_unlock(&v->mag_lock);
}

/* Frames below the first extent that is missing need no bitmap. */
static void view_set_dense(struct kvmm_view *v)
{
	uint32_t e = 1;
	uint64_t end;

	while (e < v->nr_extents && bitmap_shared_test(v->mapped, e))
		e++;
	end = (uint64_t)e * v->fpe;
	/* release: after the mapping that it speaks of */
	atomic_store_explicit(&v->dense,
			      end < v->max_frames ? end : v->max_frames,
			      memory_order_release);
}

void kvmm_view_set_mapped(struct kvmm_view *v, uint32_t extent, bool up)
{
	if (up) {
		bitmap_shared_set(v->mapped, extent);
		bitmap_shared_set(v->bitmap, extent);
	} else {
		bitmap_shared_clear(v->bitmap, extent);
		bitmap_shared_clear(v->mapped, extent);
	}
	view_set_dense(v);
}

/* -- the other members' ------------------------------------------------------ */

/* The view that a message means; the last one opened, if it is still open. */
static struct kvmm_view *view_of(struct kvmm *k, const struct wire_peer *w)
{
	struct kvmm_space *sp;

	list_for_each_entry(sp, &k->spaces, link) {
		struct kvmm_att *a = atomic_load_explicit(&sp->att,
						memory_order_relaxed);
		struct kvmm_view *v;

		if (!a || a->ix != w->space || a->era != kvmm_era_now(k))
			continue;
		for (v = a->views; v; v = v->next)
			if (v->cls == w->cls && v->node == w->node)
				return v;
	}
	return NULL;
}

static struct kvmm_peer *peer_create(const struct kvmm_view *v,
				     const struct wire_peer *w, int fd)
{
	struct kvmm_peer *p = calloc(1, sizeof(*p));
	struct wl_shape shape;

	if (!p) {
		close_fd(&fd);
		return NULL;
	}
	p->dead.free = peer_free;
	p->client = w->client;
	p->shm = (struct shm)SHM_INIT;
	if (shm_map_fd(&p->shm, fd, w->ledger_bytes, 0)) {
		free(p);
		return NULL;
	}
	close_fd(&p->shm.fd);
	if (!wl_read(&shape, &p->shm, v->table)) {
		peer_free(&p->dead);
		return NULL;
	}
	p->bitmap = at(&p->shm, shape.bitmap_off);
	return p;
}

/* Where @client stands, or a place that is free; -1: all are taken. */
static int peer_place(const struct kvmm_view *v, uint32_t client)
{
	int i, free = -1;

	for (i = 0; i < (int)ARRAY_SIZE(v->peer); i++) {
		struct kvmm_peer *p = atomic_load_explicit(
			&((struct kvmm_view *)v)->peer[i],
			memory_order_relaxed);

		if (p && p->client == client)
			return i;
		if (!p && free < 0)
			free = i;
	}
	return free;
}

void kvmm_view_peers_stale(struct kvmm_view *v)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(v->peer); i++) {
		struct kvmm_peer *p = atomic_load_explicit(&v->peer[i],
							   memory_order_relaxed);

		if (p)
			p->stale = true;
	}
}

void kvmm_view_peers_settle(struct kvmm *k, struct kvmm_view *v)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(v->peer); i++) {
		struct kvmm_peer *p = atomic_load_explicit(&v->peer[i],
							   memory_order_relaxed);

		if (!p || !p->stale)
			continue;
		/* seq_cst: unlinks it, see lib.h */
		atomic_store(&v->peer[i], NULL);
		kvmm_bury(k, &p->dead);
	}
}

int kvmm_view_peer(struct kvmm *k, struct sock_msg *m)
{
	const struct wire_peer *w = (const struct wire_peer *)m->buf;
	struct kvmm_peer *p = NULL, *old;
	struct kvmm_view *v;
	int i;

	if (m->len < sizeof(*w))
		return -EPROTO;
	v = view_of(k, w);
	if (!v)
		return 0;		/* closed meanwhile */
	i = peer_place(v, w->client);
	if (i < 0)
		return -EPROTO;
	if (!w->gone) {
		p = peer_create(v, w, sock_msg_take_fd(m));
		if (!p)
			return -EPROTO;
	}
	/* seq_cst: unlinks the old one, see lib.h */
	old = atomic_exchange(&v->peer[i], p);
	if (old)
		kvmm_bury(k, &old->dead);
	if ((uint32_t)i >= atomic_load_explicit(&v->nr_peers,
						memory_order_relaxed))
		/* release: pairs with kvmm_view_shared() */
		atomic_store_explicit(&v->nr_peers, i + 1,
				      memory_order_release);
	return 0;
}
