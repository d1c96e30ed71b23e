/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Host memory: extents are memfds.
 *
 * Nothing of a node's capacity is touched when it is made, so a daemon with a
 * terabyte to manage serves in well under a second. An extent is made when it
 * is asked for, by a worker of the node: created, sealed, mapped, populated in
 * slices, registered for I/O, and only then handed out, so that nobody who
 * writes to a frame pays for a page fault or meets an out-of-memory in it. The
 * bytes are charged when they are asked for and credited when they are gone.
 *
 * What a client must not write it gets as a read-only file description of the
 * memfd; mode 0400 and an owner other than the client's user keep it from
 * opening a better one. F_SEAL_WRITE or F_SEAL_FUTURE_WRITE would be stronger,
 * but also stop a restarted daemon from mapping the memory writable and from
 * punching it, that is, from ever giving it back.
 *
 * A daemon that comes after this one takes extents over as they are: it gets the
 * memfds from whoever kept them, and believes seals and size only.
 *
 * Giving back: registrations for I/O end first, since they hold on to the
 * pages; then the memory is punched, because a client may keep its mapping
 * for as long as it likes and the pages would live as long as that.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "daemon/node/fault.h"
#include "daemon/node/node_ops.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/base/lock.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL		0x0008U		/* Linux 6.3 */
#endif
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB		(21U << 26)
#endif
#ifndef HUGETLBFS_MAGIC
#define HUGETLBFS_MAGIC		0x958458f6
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE	23		/* Linux 5.14 */
#endif

#define HUGE_BYTES		(UINT64_C(2) << 20)
#define MAX_NUMA		1024
#define MPOL_PREFERRED		1

/* Populated at a time; between slices a worker looks whether the node ends. */
#define SLICE_BYTES		(UINT64_C(16) << 20)

/**
 * struct host - a host memory node
 * @lock:	protects node.paired while extents exist
 * @aux:	workers that make and give back extents
 * @numa:	NUMA node to prefer, or -1
 * @huge:	use hugepages for who asks
 * @huge_short:	an extent that wanted hugepages got none
 * @next_id:	of the next extent
 * @nr_live:	extents in the hands of the owner
 * @stop:	workers are to give up; set by the loop, looked at by them
 */
struct host {
	struct node		node;
	struct kvmm_mutex	lock;
	struct work_pool	*aux;
	int			numa;
	bool			huge;
	bool			huge_short;
	uint64_t		next_id;
	uint64_t		nr_live;
	atomic_bool		stop;
};

/**
 * struct host_extent - an extent while it comes, lives and goes
 * @work:	the job that makes it, later the one that gives it back
 * @err:	what became of the making
 * @want_huge:	it asked for hugepages
 * @busy:	adopted, a worker registers it
 * @going:	put while it was busy
 * @fault:	what is to go wrong while it is made (test builds)
 */
struct host_extent {
	struct extent	ext;
	struct work	work;
	extent_cb	cb;
	void		*arg;
	int		err;
	bool		want_huge;
	bool		busy;
	bool		going;
	struct fault	fault;
};

static struct host *to_host(const struct node *n)
{
	return container_of((struct node *)n, struct host, node);
}

static struct host_extent *work_to_he(struct work *w)
{
	return container_of(w, struct host_extent, work);
}

/* Relaxed: only an order to hurry, nothing is published with it. */
static bool host_stopping(struct host *h)
{
	return atomic_load_explicit(&h->stop, memory_order_relaxed);
}

/* A memfd of mode 0400, sized and sealed; or -errno. */
static int extent_memfd(const struct host *h, const struct extent *e, bool huge)
{
	unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	char name[64];
	int fd, err;

	if (huge)
		flags |= MFD_HUGETLB | MFD_HUGE_2MB;
	snprintf(name, sizeof(name), "kvmm:%s:%llu", h->node.name,
		 (unsigned long long)e->id);
	fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, flags);
	if (fd < 0)
		return -errno;
	if (fchmod(fd, 0400) < 0 ||
	    ftruncate(fd, (off_t)e->bytes) < 0 ||
	    fcntl(fd, F_ADD_SEALS,
		  F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
		err = -errno;
		close(fd);
		return err;
	}
	return fd;
}

/* A wish only: memory of another NUMA node is better than none. */
static void extent_prefer_numa(const struct host *h, const struct extent *e)
{
	unsigned long mask[MAX_NUMA / (8 * sizeof(long))] = { 0 };
	unsigned int bits = 8 * sizeof(long);

	if (h->numa < 0)
		return;
	mask[(unsigned int)h->numa / bits] |= 1ul << ((unsigned int)h->numa %
						      bits);
	syscall(SYS_mbind, e->addr, e->bytes, MPOL_PREFERRED, mask,
		(unsigned long)MAX_NUMA, 0);
}

static int extent_populate(struct host *h, const struct extent *e)
{
	uint64_t off = 0;

	while (off < e->bytes) {
		uint64_t len = min(SLICE_BYTES, e->bytes - off);
		int err = 0;

		if (host_stopping(h))
			return -ESHUTDOWN;
		if (madvise((char *)e->addr + off, len, MADV_POPULATE_WRITE))
			err = errno;
		if (err == EAGAIN || err == EINTR)
			continue;
		/* Older kernels: allocated at least, with an errno if not. */
		if (err == EINVAL && fallocate(e->fd, 0, (off_t)off,
					       (off_t)len) == 0)
			err = 0;
		else if (err == EINVAL)
			err = errno;
		if (err)
			return err == EFAULT || err == ENOSPC ? -ENOMEM : -err;
		off += len;
	}
	return 0;
}

static void extent_free_memory(struct extent *e)
{
	if (e->fd >= 0 && e->addr)
		/* fails on no kernel that has memfds; the rest frees as well
		 * when nobody else maps it */
		(void)!fallocate(e->fd, FALLOC_FL_PUNCH_HOLE |
				 FALLOC_FL_KEEP_SIZE, 0, (off_t)e->bytes);
	if (e->addr)
		munmap(e->addr, e->bytes);
	e->addr = NULL;
	close_fd(&e->fd);
}

/* Memory for @e, of huge pages or not, mapped; nothing is left on failure. */
static int extent_map(const struct host *h, struct extent *e, bool huge)
{
	void *addr;
	int err;

	e->fd = extent_memfd(h, e, huge);
	if (e->fd < 0) {
		err = e->fd;
		e->fd = -1;
		return err;
	}
	/* Of hugetlb this is where the pages are reserved. */
	addr = mmap(NULL, e->bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
		    e->fd, 0);
	if (addr == MAP_FAILED) {
		err = -errno;
		close_fd(&e->fd);
		return err;
	}
	e->addr = addr;
	if (huge)
		e->flags |= EXTENT_HUGE;
	return 0;
}

static void extent_register(struct host *h, const struct extent *e)
{
	/* Refused ones do I/O unregistered; the block node counts them. */
	kvmm_lock(&h->lock);
	for (unsigned int i = 0; i < NODE_MAX_PAIRED; i++)
		if (h->node.paired[i])
			node_buf_add(h->node.paired[i], e->addr, e->bytes);
	kvmm_unlock(&h->lock);
}

static void extent_unregister(struct host *h, const struct extent *e)
{
	kvmm_lock(&h->lock);
	for (unsigned int i = 0; i < NODE_MAX_PAIRED; i++)
		if (h->node.paired[i])
			node_buf_del(h->node.paired[i], e->addr);
	kvmm_unlock(&h->lock);
}

static void extent_make(struct work *w)
{
	struct host_extent *he = work_to_he(w);
	struct extent *e = &he->ext;
	struct host *h = to_host(e->node);

	if (he->fault.how == FAULT_ERROR) {
		he->err = -he->fault.err;
		return;
	}
	if (he->fault.how == FAULT_STALL) {
		uint64_t end = deadline_in(he->fault.ms * NSEC_PER_MSEC);

		while (!deadline_past(end) && !host_stopping(h))
			usleep(1000);
	}
	he->err = -ENOMEM;
	if (he->want_huge && e->bytes % HUGE_BYTES == 0)
		he->err = extent_map(h, e, true);
	if (he->err)
		he->err = extent_map(h, e, false);
	if (he->err)
		return;
	madvise(e->addr, e->bytes, MADV_DONTFORK);
	madvise(e->addr, e->bytes, MADV_DONTDUMP);
	if (he->want_huge && !(e->flags & EXTENT_HUGE))
		madvise(e->addr, e->bytes, MADV_HUGEPAGE);
	extent_prefer_numa(h, e);
	he->err = extent_populate(h, e);
	if (he->err)
		extent_free_memory(e);
	else
		extent_register(h, e);
}

static void extent_unmake(struct work *w)
{
	struct host_extent *he = work_to_he(w);

	extent_unregister(to_host(he->ext.node), &he->ext);
	extent_free_memory(&he->ext);
}

static void extent_gone(struct work *w)
{
	struct host_extent *he = work_to_he(w);
	struct host *h = to_host(he->ext.node);
	extent_cb cb = he->cb;
	void *arg = he->arg;

	h->node.used -= he->ext.bytes;
	free(he);
	if (cb)
		cb(NULL, 0, arg);
}

static void extent_unmake_later(struct host *h, struct host_extent *he)
{
	he->work.fn = extent_unmake;
	he->work.done = extent_gone;
	work_submit(h->aux, &he->work);
}

static void extent_made(struct work *w)
{
	struct host_extent *he = work_to_he(w);
	struct host *h = to_host(he->ext.node);
	extent_cb cb = he->cb;
	void *arg = he->arg;
	int err = he->err;

	if (h->node.state == NODE_OFFLINE) {
		if (!err) {
			he->cb = NULL;
			extent_unmake_later(h, he);
			cb(NULL, -ESHUTDOWN, arg);
			return;
		}
		err = -ESHUTDOWN;
	}
	if (err) {
		h->node.used -= he->ext.bytes;
		free(he);
		cb(NULL, err, arg);
		return;
	}
	h->nr_live++;
	h->node.stats.extents++;
	if (he->ext.flags & EXTENT_HUGE)
		h->node.stats.huge_bytes += he->ext.bytes;
	else if (he->want_huge)
		h->huge_short = true;
	cb(&he->ext, 0, arg);
}

static int host_extent_get(struct node *n, uint64_t bytes, uint32_t flags,
			   extent_cb cb, void *arg)
{
	struct host *h = to_host(n);
	struct host_extent *he;

	if (bytes > n->capacity - n->used)
		return -ENOSPC;
	he = calloc(1, sizeof(*he));
	if (!he)
		return -ENOMEM;
	he->ext.node = n;
	he->ext.fd = -1;
	he->ext.bytes = bytes;
	he->ext.id = ++h->next_id;
	he->cb = cb;
	he->arg = arg;
	he->want_huge = h->huge && flags & EXTENT_HUGE;
	he->work.fn = extent_make;
	he->work.done = extent_made;
	fault_ask(n, FAULT_GET, false, &he->fault);
	n->used += bytes;
	work_submit(h->aux, &he->work);
	return 0;
}

static int host_extent_put(struct extent *ext, extent_cb cb, void *arg)
{
	struct host_extent *he = container_of(ext, struct host_extent, ext);
	struct host *h = to_host(ext->node);

	for (unsigned int i = 0; i < NODE_MAX_PAIRED; i++)
		if (h->node.paired[i] &&
		    node_buf_busy(h->node.paired[i], ext->addr, ext->bytes))
			return -EBUSY;
	h->nr_live--;
	h->node.stats.extents--;
	if (ext->flags & EXTENT_HUGE)
		h->node.stats.huge_bytes -= ext->bytes;
	he->cb = cb;
	he->arg = arg;
	if (he->busy)
		he->going = true;
	else
		extent_unmake_later(h, he);
	return 0;
}

/* -- extents of a daemon before this one ------------------------------------ */

static void adopted_register(struct work *w)
{
	struct host_extent *he = work_to_he(w);

	extent_register(to_host(he->ext.node), &he->ext);
}

static void adopted_registered(struct work *w)
{
	struct host_extent *he = work_to_he(w);

	he->busy = false;
	if (he->going)
		extent_unmake_later(to_host(he->ext.node), he);
}

/* Sealed so that no access can fault, and of the size that was said. */
static int adopted_check(const struct host_extent *he)
{
	const int want = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	const int bars = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;
	int seals = fcntl(he->ext.fd, F_GET_SEALS);
	struct stat st;

	if (seals < 0 || (seals & (want | bars)) != want || fstat(he->ext.fd, &st) < 0 ||
	    (uint64_t)st.st_size != he->ext.bytes)
		return -EPROTO;
	return 0;
}

static int adopted_map(struct host_extent *he)
{
	struct extent *e = &he->ext;
	struct statfs fs;
	void *addr;

	addr = mmap(NULL, e->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, e->fd,
		    0);
	if (addr == MAP_FAILED)
		return -errno;
	e->addr = addr;
	madvise(addr, e->bytes, MADV_DONTFORK);
	madvise(addr, e->bytes, MADV_DONTDUMP);
	if (!fstatfs(e->fd, &fs) && fs.f_type == HUGETLBFS_MAGIC)
		e->flags |= EXTENT_HUGE;
	return 0;
}

static int host_extent_adopt(struct node *n, int fd, uint64_t bytes,
			     uint64_t id, struct extent **ret)
{
	struct host *h = to_host(n);
	struct host_extent *he = NULL;
	int err = -ENOSPC;

	if (bytes > n->capacity - n->used)
		goto out_close;
	err = -ENOMEM;
	he = calloc(1, sizeof(*he));
	if (!he)
		goto out_close;
	he->ext = (struct extent){
		.node = n, .fd = fd, .bytes = bytes, .id = id,
	};
	err = adopted_check(he);
	if (!err)
		err = adopted_map(he);
	if (err)
		goto out_close;
	h->next_id = max(h->next_id, id);
	h->nr_live++;
	n->used += bytes;
	n->stats.extents++;
	if (he->ext.flags & EXTENT_HUGE)
		n->stats.huge_bytes += bytes;
	he->busy = true;
	he->work.fn = adopted_register;
	he->work.done = adopted_registered;
	work_submit(h->aux, &he->work);
	*ret = &he->ext;
	return 0;

out_close:
	free(he);
	close_fd(&fd);
	return err;
}

int extent_fd_ro(const struct extent *ext)
{
	char path[40];
	int fd;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", ext->fd);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

int extent_fd_rw(const struct extent *ext)
{
	int fd = fcntl(ext->fd, F_DUPFD_CLOEXEC, 0);

	return fd < 0 ? -errno : fd;
}

/* Waits for the registration that a worker is in the middle of. */
static void host_unpair(struct node *mem, unsigned int ix)
{
	struct host *h = to_host(mem);

	kvmm_lock(&h->lock);
	mem->paired[ix] = NULL;
	kvmm_unlock(&h->lock);
}

static int host_fd(const struct node *n)
{
	return work_fd(to_host(n)->aux);
}

static unsigned int host_poll(struct node *n, unsigned int budget)
{
	/* all there are: what is left over would give no signal */
	return work_poll(to_host(n)->aux, 0);
}

static void host_status(const struct node *n, char *buf, size_t len)
{
	const struct host *h = to_host(n);
	const struct node_stats *st = &n->stats;

	snprintf(buf, len, "%llu extents, %llu MiB of them on hugepages%s",
		 (unsigned long long)st->extents,
		 (unsigned long long)(st->huge_bytes >> 20),
		 h->huge_short ? "; there were not enough free hugepages" : "");
}

static int host_destroy(struct node *n, uint64_t deadline_ns)
{
	struct host *h = to_host(n);
	int err;

	if (h->nr_live)
		return -EBUSY;
	node_set_state(n, NODE_OFFLINE, "being ended");
	atomic_store_explicit(&h->stop, true, memory_order_relaxed);
	err = work_destroy(h->aux, deadline_ns);
	if (err)
		return err;
	node_unpair_all(n);
	kvmm_mutex_fini(&h->lock);
	free(h);
	return 0;
}

static const struct node_ops host_node_ops = {
	.name		= "host",
	.destroy	= host_destroy,
	.fd		= host_fd,
	.poll		= host_poll,
	.status		= host_status,
	.extent_get	= host_extent_get,
	.extent_put	= host_extent_put,
	.extent_adopt	= host_extent_adopt,
	.unpair		= host_unpair,
};

int host_create(const struct host_opts *opts, struct node **ret)
{
	unsigned int threads = opts->threads;
	struct host *h;
	int err;

	if (!opts->bytes || opts->numa < -1 || opts->numa >= MAX_NUMA)
		return -EINVAL;
	if (!threads)
		threads = sysconf(_SC_NPROCESSORS_ONLN) >= 8 ? 2 : 1;
	h = calloc(1, sizeof(*h));
	if (!h)
		return -ENOMEM;
	err = fault_env();
	if (!err)
		err = node_init(&h->node, &host_node_ops, NODE_MEM,
				opts->name, opts->id);
	if (!err)
		err = work_create(opts->name, threads, &h->aux);
	if (err) {
		free(h);
		return err;
	}
	kvmm_mutex_init(&h->lock, LOCK_NODE);
	h->numa = opts->numa;
	h->huge = opts->huge;
	h->node.capacity = round_down(opts->bytes, NODE_ALIGN);
	node_set_state(&h->node, NODE_ONLINE, "memory is taken when needed");
	*ret = &h->node;
	return 0;
}
