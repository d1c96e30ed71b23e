/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Spaces: attach, the index in force, detach. After a change of daemon a space
 * is attached again with the same canonical bytes, by kvmm_win_sync(), once no
 * request is bound to the old attachment.
 */
#include <stdlib.h>
#include <string.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

/* -- index ---------------------------------------------------------------------- */

static void ixmap_free(struct kvmm_dead *d)
{
	struct kvmm_ixmap *x = container_of(d, struct kvmm_ixmap, dead);

	shm_fini(&x->shm);
	free(x);
}

/* Map an index of @bytes; @fd is taken over. */
static int ixmap_create(int fd, uint64_t bytes, struct kvmm_ixmap **ret)
{
	struct kvmm_ixmap *x = calloc(1, sizeof(*x));
	const struct index *ix;
	int err;

	if (!x) {
		close_fd(&fd);
		return kvmm_fail(-ENOMEM, "out of memory");
	}
	x->dead.free = ixmap_free;
	x->shm = (struct shm)SHM_INIT;
	err = fd < 0 || bytes < sizeof(*ix) ? -EPROTO :
					      shm_map_fd(&x->shm, fd, bytes, 0);
	if (fd >= 0 && bytes < sizeof(*ix))
		close_fd(&fd);
	if (err)
		goto out_free;
	close_fd(&x->shm.fd);
	ix = x->shm.addr;
	x->ix = ix;
	x->nr_lines = ix->nr_lines;
	x->nr_words = ix->nr_words;
	x->seed[0] = ix->seed[0];
	x->seed[1] = ix->seed[1];
	err = -EPROTO;
	if (ix->magic != KVMM_MAGIC_INDEX || ix->size != sizeof(*ix) ||
	    !x->nr_lines || x->nr_lines % INDEX_SPAN ||
	    x->nr_lines > (bytes - sizeof(*ix)) / sizeof(struct index_line) ||
	    x->nr_words % INDEX_WORD_SPAN ||
	    x->nr_words > (bytes - index_bytes(x->nr_lines, 0)) /
			  sizeof(uint64_t))
		goto out_free;
	x->words = index_words(ix, x->nr_lines);
	*ret = x;
	return 0;

out_free:
	ixmap_free(&x->dead);
	return kvmm_fail(err, "the daemon's index cannot be used: %s",
			 strerror(-err));
}

int kvmm_space_index(struct kvmm *k, struct sock_msg *m)
{
	const struct wire_index *w = (const struct wire_index *)m->buf;
	struct kvmm_space *sp;
	struct kvmm_ixmap *x, *old;
	int err;

	if (m->len < sizeof(*w))
		return -EPROTO;
	list_for_each_entry(sp, &k->spaces, link) {
		struct kvmm_att *a = atomic_load_explicit(&sp->att,
						memory_order_relaxed);

		if (!a || a->ix != w->space || a->era != kvmm_era_now(k))
			continue;
		err = ixmap_create(sock_msg_take_fd(m), w->bytes, &x);
		if (err)
			return err;
		/* seq_cst: unlinks the old one, see lib.h */
		old = atomic_exchange(&a->index, x);
		kvmm_bury(k, &old->dead);
		return 0;
	}
	return 0;
}

/* -- attachment -------------------------------------------------------------------- */

static void att_free(struct kvmm_dead *d)
{
	struct kvmm_att *a = container_of(d, struct kvmm_att, dead);
	struct kvmm_ixmap *x = atomic_load_explicit(&a->index,
						    memory_order_relaxed);
	struct kvmm_blob *b = atomic_load_explicit(&a->kept,
						   memory_order_relaxed);
	struct kvmm_blob *next;
	struct kvmm_view *v;

	for (; b; b = next) {
		next = b->next;
		kvmm_blob_free(b);
	}
	while ((v = a->views)) {
		a->views = v->next;
		kvmm_view_free(v);
	}
	if (x)
		ixmap_free(&x->dead);
	kvmm_era_put(a->era);
	free(a);
}

bool kvmm_att_get(struct kvmm_att *a)
{
	uint32_t n = atomic_load_explicit(&a->refs, memory_order_relaxed);

	while (n)
		if (atomic_compare_exchange_weak(&a->refs, &n, n + 1))
			return true;
	return false;
}

void kvmm_att_put(struct kvmm_att *a)
{
	/* acq_rel: the last one out frees what the others wrote */
	if (a && atomic_fetch_sub_explicit(&a->refs, 1,
					   memory_order_acq_rel) == 1)
		kvmm_bury(a->era->k, &a->dead);
}

bool kvmm_att_claim(struct kvmm_att *a)
{
	uint32_t one = 1;

	/* acquire: what those wrote who have put theirs */
	return atomic_compare_exchange_strong_explicit(&a->refs, &one, 0,
						       memory_order_acquire,
						       memory_order_relaxed);
}

void kvmm_att_unclaim(struct kvmm_att *a)
{
	atomic_store_explicit(&a->refs, 1, memory_order_relaxed);
}

void kvmm_att_read_until(struct kvmm_att *a, uint64_t step)
{
	uint64_t old = atomic_load_explicit(&a->read_until,
					    memory_order_relaxed);

	/* relaxed: the caller's kvmm_att_put() shows it to who looks */
	while (step > old)
		if (atomic_compare_exchange_weak_explicit(&a->read_until, &old,
							  step,
							  memory_order_relaxed,
							  memory_order_relaxed))
			break;
}

int kvmm_space_enter(struct kvmm_space *sp, struct kvmm_era *e,
		     uint64_t deadline)
{
	struct kvmm *k = sp->k;
	const struct wire_attached *r = (const struct wire_attached *)k->msg->buf;
	size_t bytes = sizeof(struct wire_attach) + sp->nr_bytes;
	struct wire_attach *w = calloc(1, bytes);
	struct kvmm_att *a = calloc(1, sizeof(*a));
	struct kvmm_ixmap *x = NULL;
	int err;

	if (!w || !a) {
		err = kvmm_fail(-ENOMEM, "out of memory");
		goto out_free;
	}
	w->h.type = WIRE_ATTACH;
	w->h.len = bytes;
	w->flags = sp->flags;
	w->desc_len = sp->nr_bytes;
	memcpy(w->desc, sp->bytes, sp->nr_bytes);
	err = kvmm_call(k, &w->h, WIRE_ATTACHED, sizeof(*r), deadline);
	if (err)
		goto out_free;
	err = r->space < KVMM_MAX_SPACES ?
	      ixmap_create(sock_msg_take_fd(k->msg), r->index_bytes, &x) :
	      kvmm_fail(-EPROTO, "the daemon named space %u", r->space);
	if (err)
		goto out_free;
	a->dead.free = att_free;
	a->refs = 1;
	a->era = e;
	a->sp = sp;
	a->ix = r->space;
	atomic_fetch_add_explicit(&e->refs, 1, memory_order_relaxed);
	atomic_store_explicit(&a->index, x, memory_order_relaxed);
	memcpy(sp->id, r->id, sizeof(sp->id));
	/* seq_cst: unlinks the old one, see lib.h */
	atomic_store(&sp->att, a);
	free(w);
	return 0;

out_free:
	free(w);
	free(a);
	return err;
}

/* -- the handle ------------------------------------------------------------------------ */

static void space_destroy(struct kvmm_space *sp)
{
	if (!sp)
		return;
	desc_fini(&sp->desc);
	free(sp->bytes);
	free(sp);
}

static int space_create(struct kvmm *k, const struct kvmm_desc *user,
			struct kvmm_space **ret)
{
	struct kvmm_space *sp = calloc(1, sizeof(*sp));
	struct kvmm_desc d;
	int err;

	if (!sp)
		return kvmm_fail(-ENOMEM, "out of memory");
	sp->k = k;
	list_init(&sp->link);
	list_init(&sp->wins);
	list_init(&sp->reqs);
	err = kvmm_opts_copy(&d, sizeof(d), user, "kvmm_desc");
	if (err)
		goto out_free;
	if (d.flags & ~KVMM_MUST_JOIN) {
		err = kvmm_fail(-EINVAL, "kvmm_desc.flags is 0x%x", d.flags);
		goto out_free;
	}
	sp->flags = d.flags;
	sp->bytes = malloc(DESC_MAX_BYTES);
	if (!sp->bytes) {
		err = kvmm_fail(-ENOMEM, "out of memory");
		goto out_free;
	}
	err = desc_encode(&d, sp->bytes, kvmm_errmsg());
	if (err < 0)
		goto out_free;
	sp->nr_bytes = err;
	err = desc_decode(sp->bytes, sp->nr_bytes, &sp->desc, kvmm_errmsg());
	if (err)
		goto out_free;
	*ret = sp;
	return 0;

out_free:
	space_destroy(sp);
	return err;
}

static bool attached_twice(struct kvmm *k, const struct kvmm_space *sp)
{
	struct kvmm_space *o;

	list_for_each_entry(o, &k->spaces, link)
		if (o->nr_bytes == sp->nr_bytes &&
		    !memcmp(o->bytes, sp->bytes, sp->nr_bytes))
			return true;
	return false;
}

int kvmm_space_attach(struct kvmm *k, const struct kvmm_desc *desc,
		      struct kvmm_space **ret)
{
	struct kvmm_space *sp;
	uint64_t deadline;
	int err;

	if (kvmm_forked(k))
		return kvmm_fail_forked();
	err = space_create(k, desc, &sp);
	if (err)
		return err;
	err = kvmm_call_begin(k, &deadline);
	if (err)
		goto out_destroy;
	if (attached_twice(k, sp))
		err = kvmm_fail(-EBUSY, "this space is attached already");
	else
		err = kvmm_space_enter(sp, kvmm_era_now(k), deadline);
	if (err)
		goto out_end;
	kvmm_lock(&k->lock);
	list_add_tail(&k->spaces, &sp->link);
	kvmm_unlock(&k->lock);
	kvmm_call_end(k);
	*ret = sp;
	return 0;

out_end:
	kvmm_call_end(k);
out_destroy:
	space_destroy(sp);
	return err;
}

/* Also for kvmm_close(); without a @deadline nobody is told. */
void kvmm_space_leave(struct kvmm_space *sp, uint64_t deadline)
{
	struct kvmm *k = sp->k;
	struct kvmm_att *a = atomic_load_explicit(&sp->att,
						  memory_order_relaxed);
	struct wire_win w = {
		.h	= { .type = WIRE_DETACH, .len = sizeof(w) },
		.win	= a ? a->ix : 0,
	};
	struct kvmm_win *win, *tmp;
	struct kvmm_req *rq;

	while ((rq = list_first(&sp->reqs, struct kvmm_req, link)))
		kvmm_req_abandon(rq);
	list_for_each_entry_safe(win, tmp, &sp->wins, link)
		kvmm_win_leave(win, deadline);
	if (deadline && a && a->era == kvmm_era_now(k) &&
	    !kvmm_era_lost(a->era))
		kvmm_call(k, &w.h, WIRE_OK, sizeof(struct wire_hdr), deadline);
	kvmm_lock(&k->lock);
	list_del(&sp->link);
	kvmm_unlock(&k->lock);
	/* seq_cst: unlinks it, see lib.h */
	atomic_store(&sp->att, NULL);
	kvmm_att_put(a);
	space_destroy(sp);
}

static void space_leaving(struct kvmm_leaving *l, uint64_t deadline)
{
	kvmm_space_leave(container_of(l, struct kvmm_space, leaving), deadline);
}

void kvmm_space_detach(struct kvmm_space *sp)
{
	if (!sp || kvmm_forked(sp->k))
		return;
	sp->leaving.fn = space_leaving;
	kvmm_call_leave(sp->k, &sp->leaving);
}

int kvmm_space_id(const struct kvmm_space *sp, uint8_t id[32])
{
	if (kvmm_forked(sp->k))
		return kvmm_fail_forked();
	memcpy(id, sp->id, sizeof(sp->id));
	return 0;
}

int kvmm_mode(const struct kvmm_space *sp)
{
	struct kvmm *k = sp->k;
	struct kvmm_att *a;
	int mode;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	/* seq_cst: see the top of lib.h */
	a = atomic_load(&((struct kvmm_space *)sp)->att);
	mode = atomic_load_explicit(&a->era->hdr->space[a->ix].mode,
				    memory_order_relaxed);
	kvmm_exit(k);
	return mode;
}
