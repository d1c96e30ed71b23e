/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is mapped in a window: address space that is reserved once, and extents,
 * mapped when the daemon says that they are there and unmapped when it says that
 * they must go. Extent 0 never exists; its place begins with a page of this
 * process's own for the null frame.
 *
 * A bit in the window's ledger says that an extent is mapped: set after the
 * mapping, cleared before the unmapping, so that a frame that we called a hit
 * is always readable. A member of a gang that maps nothing (kvmm_view.blind) sets
 * and clears it when it is told to.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

#define PAGE_BYTES	4096

/* -- address space --------------------------------------------------------------- */

static int reserve(void *at, size_t bytes)
{
	void *p = mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS |
		       MAP_NORESERVE | MAP_FIXED, -1, 0);

	if (p == MAP_FAILED)
		return -errno;
	madvise(at, bytes, MADV_DONTFORK);
	return 0;
}

int kvmm_win_reserve(struct kvmm_win *w, const struct kvmm_view *v)
{
	uint64_t n = v->nr_extents;
	size_t null_bytes = round_up(w->stride, PAGE_BYTES);
	void *p;

	if (w->opts.max_frames)
		n = min(n, 1 + div_round_up(w->opts.max_frames, v->fpe));
	w->va_bytes = n * w->extent_bytes;
	if (v->blind)
		return 0;
	p = mmap(NULL, w->va_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS |
		 MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return kvmm_fail(-ENOMEM, "no room for %zu bytes of addresses",
				 w->va_bytes);
	w->base = p;
	madvise(p, w->va_bytes, MADV_DONTFORK);
	if (mprotect(p, null_bytes, PROT_READ | PROT_WRITE) < 0)
		return kvmm_fail(-ENOMEM, "no memory for the null frame");
	madvise(p, null_bytes, MADV_DONTDUMP);
	return 0;
}

/* For kvmm_win_ptr(), which need not look at the view then. */
static void show_dense(struct kvmm_win *w, const struct kvmm_view *v)
{
	/* release: after the mapping that it speaks of */
	atomic_store_explicit(&w->dense,
			      atomic_load_explicit(&v->dense,
						   memory_order_relaxed),
			      memory_order_release);
}

/*
 * Map an extent's memfd; @fd stays the caller's. One that is not sealed could
 * shrink under our feet, and the access after that would kill this process.
 */
static int map_extent(struct kvmm_win *w, struct kvmm_view *v, uint32_t no,
		      int fd)
{
	uint8_t *at = w->base + no * w->extent_bytes;
	uint64_t end;
	int prot = v->rights == KVMM_RW ? PROT_READ | PROT_WRITE : PROT_READ;
	int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;
	void *p;

	if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) < 0 ||
	    v->part_off % PAGE_BYTES ||
	    add_overflows(v->part_off, w->extent_bytes, &end) ||
	    (uint64_t)st.st_size < end)
		return kvmm_fail(-EPROTO, "extent %u is not what it should be",
				 no);
	p = mmap(at, w->extent_bytes, prot, MAP_SHARED | MAP_FIXED, fd,
		 (off_t)v->part_off);
	if (p == MAP_FAILED) {
		int err = -errno;

		reserve(at, w->extent_bytes);
		return kvmm_fail(err, "cannot map extent %u: %s", no,
				 strerror(-err));
	}
	madvise(p, w->extent_bytes, MADV_DONTFORK);
	madvise(p, w->extent_bytes, MADV_DONTDUMP);
	if (w->opts.on_extent)
		w->opts.on_extent(w->opts.arg, at, w->extent_bytes, 1);
	return 0;
}

static void unmap_extent(struct kvmm_win *w, struct kvmm_view *v, uint32_t no)
{
	uint8_t *at;

	kvmm_view_set_mapped(v, no, false);
	show_dense(w, v);
	if (v->blind)
		return;
	at = w->base + no * w->extent_bytes;
	if (w->opts.on_extent)
		w->opts.on_extent(w->opts.arg, at, w->extent_bytes, 0);
	reserve(at, w->extent_bytes);
}

void kvmm_win_unmap(struct kvmm_win *w, struct kvmm_view *v)
{
	uint32_t no;

	for (no = 1; v && no < v->nr_extents; no++)
		if (bitmap_shared_test(v->mapped, no))
			unmap_extent(w, v, no);
}

/* -- what the daemon says ---------------------------------------------------------- */

struct sync_count {
	unsigned int	up, down;
};

static int apply_one(struct kvmm_win *w, struct kvmm_view *v,
		     const struct wire_extent *x, int fd,
		     struct sync_count *c)
{
	bool fits = x->no && x->no < v->nr_extents &&
		    (x->no + UINT64_C(1)) * w->extent_bytes <= w->va_bytes;
	bool have;
	int err;

	if (!fits)
		return 0;	/* beyond what the caller wanted to map */
	have = bitmap_shared_test(v->mapped, x->no);
	if (!x->up) {
		if (have) {
			unmap_extent(w, v, x->no);
			c->down++;
		}
		return 0;
	}
	if (fd < 0 && !v->blind)
		return kvmm_fail(-EPROTO, "extent %u came without memory",
				 x->no);
	if (have)
		return 0;	/* told twice */
	err = v->blind ? 0 : map_extent(w, v, x->no, fd);
	if (err)
		return err;
	kvmm_view_set_mapped(v, x->no, true);
	show_dense(w, v);
	c->up++;
	return 0;
}

/* One WIRE_EXTENTS; what cannot be mapped ends it. */
static int apply(struct kvmm_win *w, struct kvmm_view *v, struct sync_count *c)
{
	struct sock_msg *m = w->sp->k->msg;
	const struct wire_extents *x = (const struct wire_extents *)m->buf;
	uint32_t i;
	int err = 0;

	if (x->n > (m->len - sizeof(*x)) / sizeof(x->ext[0]))
		return kvmm_fail(-EPROTO, "%u extents in %zu bytes", x->n,
				 m->len);
	for (i = 0; i < x->n && !err; i++) {
		int fd = x->ext[i].up && !v->blind ? sock_msg_take_fd(m) : -1;

		err = apply_one(w, v, &x->ext[i], fd, c);
		close_fd(&fd);
	}
	return err;
}

/* Ask what changed, and apply it. */
static int sync_once(struct kvmm_win *w, struct kvmm_view *v,
		     struct sync_count *c, uint64_t deadline)
{
	struct kvmm *k = w->sp->k;
	const struct wire_extents *x = (const struct wire_extents *)k->msg->buf;
	struct wire_win ask = {
		.h	= { .type = WIRE_WIN_SYNC, .len = sizeof(ask) },
		.win	= v->no,
		.have_seq = atomic_load_explicit(&v->seq, memory_order_relaxed),
	};
	uint64_t seq;
	int err;

	err = kvmm_call(k, &ask.h, WIRE_EXTENTS, sizeof(*x), deadline);
	for (;;) {
		bool more;

		if (err)
			return err;
		seq = x->seq;
		more = x->more;
		err = apply(w, v, c);
		if (err || !more)
			break;
		err = kvmm_call_more(k, WIRE_EXTENTS, sizeof(*x), deadline);
	}
	if (!err)
		atomic_store_explicit(&v->seq, seq, memory_order_relaxed);
	return err;
}

/* The next have_seq is what tells the daemon that an extent is unmapped. */
int kvmm_win_apply(struct kvmm_win *w, struct kvmm_view *v, uint64_t deadline)
{
	struct sync_count all = { 0 };
	unsigned int down;
	int err;

	do {
		down = all.down;
		err = sync_once(w, v, &all, deadline);
	} while (!err && all.down != down);
	return err ? err : (int)(all.up + all.down);
}
