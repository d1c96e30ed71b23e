/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows: address space that is reserved once and never moves. Frame f lies at
 * base + f * stride, in extent f / frames_per_extent. What is mapped changes in
 * kvmm_win_sync() only (win_map.c), which also finds the next daemon.
 *
 * On a gang a frame is this rank's part of it, and so is an extent: the daemon
 * says where in the file that lies. Stride and extent length are those of a part
 * in the frame table, so nothing else differs. A member that maps nothing sets
 * its bits all the same: magazines and matches go by what all members have.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

/* -- opening ------------------------------------------------------------------------- */

static uint32_t win_rights(const struct kvmm_win *w, const struct kvmm_era *e)
{
	return w->opts.rights ? w->opts.rights : e->info.rights;
}

/* Tell the daemon that its window @no is not used any more. */
static void win_bye(struct kvmm_att *a, uint16_t no, uint64_t deadline)
{
	struct kvmm *k = a->era->k;
	struct wire_win b = {
		.h	= { .type = WIRE_WIN_CLOSE, .len = sizeof(b) },
		.win	= no,
	};

	if (deadline && !kvmm_era_lost(a->era) && a->era == kvmm_era_now(k))
		kvmm_call(k, &b.h, WIRE_OK, sizeof(struct wire_hdr), deadline);
}

/* Open in the space's attachment; on success the view is linked. */
static int win_enter(struct kvmm_win *w, struct kvmm_att *a,
		     struct kvmm_view **ret, uint64_t deadline)
{
	struct kvmm *k = w->sp->k;
	const struct wire_window *r = (const struct wire_window *)k->msg->buf;
	struct wire_win_open o = {
		.h	= { .type = WIRE_WIN_OPEN, .len = sizeof(o) },
		.space	= a->ix,
		.cls	= w->cls,
		.node	= w->node,
		.rights	= win_rights(w, a->era),
		.max_frames = w->opts.max_frames,
	};
	struct shm table = SHM_INIT, wl = SHM_INIT;
	uint64_t part_off;
	uint16_t no;
	bool blind;
	int err;

	err = kvmm_call(k, &o.h, WIRE_WINDOW, sizeof(*r), deadline);
	if (err)
		return err;
	no = r->win;
	part_off = r->part_off;
	blind = r->flags & WIRE_WINDOW_BLIND;
	err = shm_map_fd(&table, sock_msg_take_fd(k->msg), r->table_bytes, 0);
	if (!err)
		err = shm_map_fd(&wl, sock_msg_take_fd(k->msg),
				 r->ledger_bytes, 1);
	if (err) {
		kvmm_fail(err, "the daemon's window cannot be mapped: %s",
			  strerror(-err));
		goto out_fini;
	}
	close_fd(&table.fd);
	close_fd(&wl.fd);
	err = kvmm_view_create(a, w->cls, w->node, o.rights, no, &table,
			       &wl, ret);
	if (err)
		goto out_fini;
	(*ret)->page_bytes = w->part_bytes;
	(*ret)->part_off = part_off;
	(*ret)->blind = blind;
	(*ret)->next = a->views;
	a->views = *ret;
	return 0;

out_fini:
	shm_fini(&table);
	shm_fini(&wl);
	/* it would answer -EBUSY to the next try */
	win_bye(a, no, deadline);
	return err;
}

/*
 * The daemon has forgotten @v, or never showed it to anybody: what no request
 * looks into any more is unmapped.
 */
static void view_forget(struct kvmm_view *v)
{
	struct kvmm_view **p = &v->att->views;

	while (*p && *p != v)
		p = &(*p)->next;
	if (!*p)
		return;
	*p = v->next;
	kvmm_view_drop(v);
}

/* Matches and allocations find it from here on. */
static void win_show(struct kvmm_win *w, struct kvmm_view *v)
{
	/* release: the extents are mapped by now */
	atomic_store_explicit(&v->base, w->base, memory_order_release);
	/* seq_cst: see the top of lib.h */
	atomic_store(&w->view, v);
	atomic_store(&v->att->view[w->cls][w->node], v);
	if (v->rights == KVMM_RW)
		kvmm_view_want(v, LIB_MAG_TARGET);
}

static uint8_t gang_of(const struct kvmm_win *w)
{
	return kvmm_era_now(w->sp->k)->info.node[w->node].gang;
}

static int win_geometry(struct kvmm_win *w, const struct desc_class *c)
{
	w->gang = gang_of(w);
	w->nsegs = c->nsegs;
	w->seg_off = calloc(c->nsegs, sizeof(*w->seg_off));
	if (!w->seg_off)
		return kvmm_fail(-ENOMEM, "out of memory");
	w->part_bytes = desc_part(c, w->gang ? w->gang : 1, w->seg_off);
	return 0;
}

static void win_destroy(struct kvmm_win *w)
{
	if (w->base)
		munmap(w->base, w->va_bytes);
	free(w->seg_off);
	free(w);
}

static int win_check(const struct kvmm_space *sp, unsigned int cls,
		     unsigned int node, const struct kvmm_win_opts *o)
{
	const struct kvmm_info *in = &kvmm_era_now(sp->k)->info;
	struct kvmm_win *w;

	if (cls >= sp->desc.nclasses)
		return kvmm_fail(-EINVAL, "class %u, the space has %u", cls,
				 sp->desc.nclasses);
	if (node >= in->nr_nodes)
		return kvmm_fail(-EINVAL, "node %u, there are %u", node,
				 in->nr_nodes);
	if (in->node[node].kind != KVMM_NODE_HOST)
		return kvmm_fail(-EINVAL, "node %s cannot be mapped here",
				 in->node[node].name);
	if (in->node[node].gang && in->node[node].gang != sp->desc.world)
		return kvmm_fail(-EINVAL,
			"node %s is a gang of %u, the space is for a world of %u",
			in->node[node].name, in->node[node].gang,
			sp->desc.world);
	if (o->spare || o->rights > KVMM_RW)
		return kvmm_fail(-EINVAL, "kvmm_win_opts: rights %u, spare %u",
				 o->rights, o->spare);
	if (o->rights == KVMM_RW && in->rights != KVMM_RW)
		return kvmm_fail(-EACCES, "this socket grants reading only");
	list_for_each_entry(w, &sp->wins, link)
		if (w->cls == cls && w->node == node)
			return kvmm_fail(-EBUSY, "this window is open already");
	return 0;
}

static int win_open(struct kvmm_win *w, uint64_t deadline)
{
	struct kvmm_att *a = atomic_load_explicit(&w->sp->att,
						  memory_order_relaxed);
	struct kvmm_view *v;
	int err;

	if (a->era != kvmm_era_now(w->sp->k))
		return kvmm_fail(-ESTALE,
			"the daemon was replaced: kvmm_win_sync() of an open window, or attach again");
	err = win_enter(w, a, &v, deadline);
	if (err)
		return err;
	w->stride = v->table->stride;
	w->extent_bytes = v->table->extent_bytes;
	w->fpe = v->fpe;
	err = w->stride < v->page_bytes ?
	      kvmm_fail(-EPROTO, "a stride of %zu bytes for pages of %u",
			w->stride, v->page_bytes) :
	      kvmm_win_reserve(w, v);
	if (!err)
		err = kvmm_win_apply(w, v, deadline);
	if (err < 0) {
		kvmm_win_unmap(w, v);
		win_bye(v->att, v->no, deadline);
		view_forget(v);
		return err;
	}
	win_show(w, v);
	return 0;
}

int kvmm_win_open(struct kvmm_space *sp, unsigned int cls, kvmm_node_t node,
		  const struct kvmm_win_opts *opts, struct kvmm_win **ret)
{
	struct kvmm *k = sp->k;
	uint64_t deadline;
	struct kvmm_win *w;
	int err;

	err = kvmm_call_begin(k, &deadline);
	if (err)
		return err;
	w = calloc(1, sizeof(*w));
	if (!w) {
		err = kvmm_fail(-ENOMEM, "out of memory");
		goto out_end;
	}
	w->sp = sp;
	w->cls = cls;
	w->node = node;
	list_init(&w->link);
	if (opts)
		err = kvmm_opts_copy(&w->opts, sizeof(w->opts), opts,
				     "kvmm_win_opts");
	if (!err)
		err = win_check(sp, cls, node, &w->opts);
	if (!err)
		err = win_geometry(w, &sp->desc.cls[cls]);
	if (!err)
		err = win_open(w, deadline);
	if (err) {
		win_destroy(w);
		goto out_end;
	}
	list_add_tail(&sp->wins, &w->link);
	atomic_store_explicit(&sp->open[cls][node], true, memory_order_relaxed);
	*ret = w;
out_end:
	kvmm_call_end(k);
	return err;
}

static int ask_reserve(struct kvmm_att *a, unsigned int cls, unsigned int node,
		       uint32_t frames, uint64_t deadline)
{
	struct wire_reserve r = {
		.h	= { .type = WIRE_RESERVE, .len = sizeof(r) },
		.space	= a->ix,
		.cls	= cls,
		.node	= node,
		.frames	= frames,
	};

	return kvmm_call(a->era->k, &r.h, WIRE_OK, sizeof(struct wire_hdr),
			 deadline);
}

/* -- syncing ---------------------------------------------------------------------------- */

/* What is mapped is of a daemon that is gone. */
static void win_hide(struct kvmm_win *w)
{
	struct kvmm_view *v = atomic_load_explicit(&w->view,
						   memory_order_relaxed);

	kvmm_win_unmap(w, v);
	/* seq_cst: unlinks it, see lib.h */
	atomic_store(&w->view, NULL);
}

/* The latest step that may still touch what is mapped of a daemon that is gone. */
static uint64_t att_last_step(struct kvmm_att *a)
{
	uint64_t step = atomic_load_explicit(&a->read_until,
					     memory_order_relaxed);
	struct kvmm_view *v;

	for (v = a->views; v; v = v->next) {
		kvmm_lock(&v->mag_lock);
		step = max(step, v->free_after);
		kvmm_unlock(&v->mag_lock);
	}
	return step;
}

/*
 * May @a go, and its mappings with it? Not while a request is bound to it, nor
 * while a kernel runs that was launched for one that has ended: @done is the
 * last step of which the caller says that it is complete. On success @a is
 * claimed: a thread that found it in force a moment ago and goes on only now
 * binds no request to it, whose frames would be the next daemon's.
 */
static int att_idle(struct kvmm_att *a, uint64_t done)
{
	struct kvmm *k = a->era->k;
	uint64_t step;

	if (!kvmm_att_claim(a))
		return kvmm_fail(-EBUSY,
			"requests of the former daemon are still open");
	kvmm_lock(&k->lock);
	kvmm_step_words(k);
	kvmm_unlock(&k->lock);
	step = att_last_step(a);
	if (step <= max(done, kvmm_era_step(kvmm_era_now(k))))
		return 0;
	kvmm_att_unclaim(a);
	return kvmm_fail(-EBUSY,
			 "step %llu may still use pages of the former daemon",
			 (unsigned long long)step);
}

/* Attach @sp to the daemon in force; what was mapped of the former one goes. */
static int attach_again(struct kvmm_space *sp, uint64_t done, uint64_t deadline)
{
	struct kvmm_att *old = atomic_load_explicit(&sp->att,
						    memory_order_relaxed);
	struct kvmm_win *w;
	int err;

	err = att_idle(old, done);
	if (err)
		return err;
	err = kvmm_space_enter(sp, kvmm_era_now(sp->k), deadline);
	if (err) {
		kvmm_att_unclaim(old);
		return err;
	}
	/* the views of all its windows go with the attachment */
	list_for_each_entry(w, &sp->wins, link)
		win_hide(w);
	kvmm_bury(sp->k, &old->dead);
	return 0;
}

/*
 * The floor that the user had: one that this daemon cannot grant is none, and
 * kvmm_avail() says so. Only when nobody answers it is asked for once more.
 */
static int reserve_again(struct kvmm_win *w, struct kvmm_att *a,
			 uint64_t deadline)
{
	_Atomic uint32_t *floor = &w->sp->reserved[w->cls][w->node];
	uint32_t frames = atomic_load_explicit(floor, memory_order_relaxed);
	int err;

	if (!frames)
		return 0;
	err = ask_reserve(a, w->cls, w->node, frames, deadline);
	if (err == -ENOTCONN || err == -ETIMEDOUT)
		return err;
	if (err)
		atomic_store_explicit(floor, 0, memory_order_relaxed);
	return 0;
}

/*
 * After a change of daemon: attach and open again, at the same base, once
 * nobody uses what was there before.
 */
static int win_again(struct kvmm_win *w, uint64_t done, uint64_t deadline)
{
	struct kvmm_space *sp = w->sp;
	struct kvmm_att *a = atomic_load_explicit(&sp->att,
						  memory_order_relaxed);
	struct kvmm_view *v;
	int n, err;

	if (a->era != kvmm_era_now(sp->k)) {
		err = attach_again(sp, done, deadline);
		if (err)
			return err;
		a = atomic_load_explicit(&sp->att, memory_order_relaxed);
	}
	if (gang_of(w) != w->gang)
		return kvmm_fail(-EPROTO,
			"the node was a gang of %u and is one of %u now: close the window",
			w->gang, gang_of(w));
	err = win_enter(w, a, &v, deadline);
	if (err)
		return err;
	if (v->table->stride != w->stride) {
		uint32_t stride = v->table->stride;

		win_bye(a, v->no, deadline);
		view_forget(v);
		return kvmm_fail(-EPROTO,
			"the stride was %zu bytes and is %u now: close the window",
			w->stride, stride);
	}
	if (v->blind != !w->base) {
		win_bye(a, v->no, deadline);
		view_forget(v);
		return kvmm_fail(-EPROTO,
			"this member mapped %s here before: close the window",
			w->base ? "memory" : "nothing");
	}
	w->extent_bytes = v->table->extent_bytes;
	w->fpe = v->fpe;
	n = kvmm_win_apply(w, v, deadline);
	err = n < 0 ? n : reserve_again(w, a, deadline);
	if (err) {
		kvmm_win_unmap(w, v);
		win_bye(a, v->no, deadline);
		view_forget(v);
		return err;
	}
	win_show(w, v);
	return n;
}

int kvmm_win_sync(struct kvmm_win *w, uint64_t step)
{
	struct kvmm *k = w->sp->k;
	struct kvmm_view *v;
	uint64_t deadline;
	bool same;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	/* seq_cst: see the top of lib.h */
	v = atomic_load(&w->view);
	same = v && v->att->era == kvmm_era_now(k) &&
	       (kvmm_era_lost(v->att->era) ||
		/* acquire: pairs with the daemon's release after the change */
		atomic_load_explicit(&v->table->extent_seq,
				     memory_order_acquire) ==
		atomic_load_explicit(&v->seq, memory_order_relaxed));
	kvmm_exit(k);
	if (same)
		return 0;
	err = kvmm_call_begin(k, &deadline);
	if (err)
		return err;
	v = atomic_load_explicit(&w->view, memory_order_relaxed);
	if (v && v->att->era == kvmm_era_now(k))
		err = kvmm_win_apply(w, v, deadline);
	else
		err = win_again(w, step, deadline);
	kvmm_call_end(k);
	return err;
}

/* -- closing ---------------------------------------------------------------------------- */

void kvmm_win_leave(struct kvmm_win *w, uint64_t deadline)
{
	struct kvmm_view *v = atomic_load_explicit(&w->view,
						   memory_order_relaxed);

	list_del(&w->link);
	atomic_store_explicit(&w->sp->open[w->cls][w->node], false,
			      memory_order_relaxed);
	/* the floor is the window's, there and here */
	atomic_store_explicit(&w->sp->reserved[w->cls][w->node], 0,
			      memory_order_relaxed);
	if (v) {
		/* seq_cst: unlinks it; who has used it keeps it */
		atomic_store(&v->att->view[w->cls][w->node], NULL);
		atomic_store(&w->view, NULL);
		atomic_store(&v->base, NULL);
		/* frames in hand: the daemon takes them back with the window */
		kvmm_view_shut(v);
		kvmm_win_unmap(w, v);
		win_bye(v->att, v->no, deadline);
		view_forget(v);
	}
	win_destroy(w);
}

static void win_leaving(struct kvmm_leaving *l, uint64_t deadline)
{
	kvmm_win_leave(container_of(l, struct kvmm_win, leaving), deadline);
}

void kvmm_win_close(struct kvmm_win *w)
{
	if (!w || kvmm_forked(w->sp->k))
		return;
	w->leaving.fn = win_leaving;
	kvmm_call_leave(w->sp->k, &w->leaving);
}

/* -- addresses ------------------------------------------------------------------------- */

void *kvmm_win_base(const struct kvmm_win *w, unsigned int seg)
{
	return seg < w->nsegs && w->base ? w->base + w->seg_off[seg] : NULL;
}

size_t kvmm_win_stride(const struct kvmm_win *w, unsigned int seg)
{
	return seg < w->nsegs ? w->stride : 0;
}

static bool win_mapped(struct kvmm_win *w, kvmm_frame_t frame)
{
	struct kvmm *k = w->sp->k;
	struct kvmm_view *v;
	bool mapped;

	if (!kvmm_enter(k))
		return false;
	/* seq_cst: see the top of lib.h */
	v = atomic_load(&w->view);
	mapped = v && kvmm_view_mapped(v, frame);
	kvmm_exit(k);
	return mapped;
}

void *kvmm_win_ptr(const struct kvmm_win *w, unsigned int seg,
		   kvmm_frame_t frame)
{
	uint32_t dense;

	if (kvmm_forked(w->sp->k)) {
		kvmm_fail_forked();
		return NULL;
	}
	if (seg >= w->nsegs || !w->base)
		return NULL;
	/* acquire: pairs with show_dense(), after the mmap() */
	dense = atomic_load_explicit(&w->dense, memory_order_acquire);
	if (frame && (frame < w->fpe || frame >= dense) &&
	    !win_mapped((struct kvmm_win *)w, frame))
		return NULL;
	return w->base + frame * w->stride + w->seg_off[seg];
}

/* -- reserve ----------------------------------------------------------------------------- */

int kvmm_reserve(struct kvmm_space *sp, unsigned int cls, kvmm_node_t node,
		 uint32_t frames)
{
	struct kvmm *k = sp->k;
	struct kvmm_att *a;
	uint64_t deadline;
	int err;

	err = kvmm_call_begin(k, &deadline);
	if (err)
		return err;
	a = atomic_load_explicit(&sp->att, memory_order_relaxed);
	if (cls >= sp->desc.nclasses || node >= KVMM_MAX_NODES)
		err = kvmm_fail(-EINVAL, "class %u, node %u", cls, node);
	else if (a->era != kvmm_era_now(k))
		err = kvmm_fail(-ESTALE,
			"the daemon was replaced: kvmm_win_sync() attaches again");
	else
		err = ask_reserve(a, cls, node, frames, deadline);
	if (!err)
		atomic_store_explicit(&sp->reserved[cls][node], frames,
				      memory_order_relaxed);
	kvmm_call_end(k);
	return err;
}
