/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The slot store as a node: made, polled, described, ended. What it is made of
 * is listed in nvme.h.
 */
#include "daemon/node/nvme.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/fd.h"

/* While the kernel does not take what it is given, try again this often. */
#define BUSY_NS		NSEC_PER_MSEC

/* While ending, a step of waiting: some ends give no signal. */
#define DRAIN_STEP_MS	10

static int nvme_fd(const struct node *n)
{
	return to_nvme(n)->epfd;
}

static void nvme_kick(struct node *n)
{
	struct nvme *nv = to_nvme(n);

	if (nv->drained)
		return;
	nvme_start_queued(nv, now_ns());
	nv->eng->flush(nv);
	nvme_crc_flush(nv);
}

static unsigned int nvme_poll(struct node *n, unsigned int budget)
{
	struct nvme *nv = to_nvme(n);
	unsigned int nr = work_poll(nv->aux, 0);
	unsigned int reaped;
	uint64_t now;

	nv->crc_left = NVME_CRC_INLINE;
	if (nv->drained)
		return nr;
	reaped = nv->eng->reap(nv, budget);
	nr += reaped;
	now = now_ns();
	nvme_open_poll(nv, now);
	nvme_io_poll(nv, now, !budget || reaped < budget);
	nvme_recover_poll(nv);
	nvme_health_poll(nv, now);
	nvme_discard_poll(nv, now);
	nvme_flush_poll(nv, now);
	nvme_journal_poll(nv, now);
	nvme_ckpt_poll(nv, now);
	nvme_start_queued(nv, now);
	nv->eng->flush(nv);
	if (nvme_crc_flush(nv)) {	/* callbacks may have handed I/O in */
		nvme_start_queued(nv, now);
		nv->eng->flush(nv);
	}

	n->stats.journal_used = (nv->journal.head - nv->journal.tail) *
				NVME_BLOCK;
	n->used = nv->slots.used_bytes;
	n->stats.bad_slots = nv->slots.nr_bad;
	n->stats.bad_bytes = nv->slots.bad_bytes;
	n->stats.zeroed_bytes = (uint64_t)nv->slots.nr_ready *
				nv->slots.seg_bytes;
	/* Relaxed: counters for status. */
	n->stats.fixed_bytes = atomic_load_explicit(&nv->fixed_bytes,
						    memory_order_relaxed);
	n->stats.plain_bytes = atomic_load_explicit(&nv->plain_bytes,
						    memory_order_relaxed);
	/* who gave a budget asks whether it was used up */
	return budget ? min(nr, budget) : nr;
}

static uint64_t nvme_next_deadline(const struct node *n)
{
	const struct nvme *nv = to_nvme(n);
	uint64_t next = min(nvme_open_next(nv), nvme_io_next(nv));

	if (nv->drained)
		return DEADLINE_NONE;
	next = min(next, nvme_recover_next(nv));
	next = min(next, nvme_health_next(nv));
	next = min(next, nvme_discard_next(nv));
	next = min(next, nvme_flush_next(nv));
	next = min(next, min(nvme_journal_next(nv), nvme_ckpt_next(nv)));
	if (nv->eng->busy(nv))
		next = min(next, deadline_in(BUSY_NS));
	return next;
}

static int nvme_slot_alloc(struct node *n, uint32_t len,
			   struct node_slot *slot)
{
	struct nvme *nv = to_nvme(n);
	int err;

	if (n->owner && nv->slots.nr_used >= nv->open.super.records)
		return -ENOSPC;
	if (!nvme_journal_room(nv))
		return -EAGAIN;
	err = slots_alloc(&nv->slots, len, slot);
	n->used = nv->slots.used_bytes;
	return err;
}

static bool nvme_persistent(const struct node *n)
{
	return n->owner;
}

static void nvme_record_add(struct node *n, const struct node_record *rec)
{
	struct nvme *nv = to_nvme(n);
	uint32_t bytes;

	if (!n->owner || !nvme_open_done(nv))
		return;
	bytes = slots_record(&nv->slots, &rec->slot);
	if (bytes)
		nvme_log_add(nv, rec, bytes);
}

static void nvme_record_del(struct node *n, const struct node_slot *slot)
{
	struct nvme *nv = to_nvme(n);

	if (nvme_open_done(nv) && slots_forget(&nv->slots, slot))
		nvme_log_slot(nv, NVME_ENT_DEL, slot, 0);
}

static int nvme_slot_free(struct node *n, const struct node_slot *slot)
{
	struct nvme *nv = to_nvme(n);
	uint32_t nr_bad = nv->slots.nr_bad;
	uint32_t bytes;
	int err;

	if (!nvme_open_done(nv))
		return -EINVAL;
	bytes = slots_bytes(&nv->slots, slot);
	nvme_record_del(n, slot);
	err = slots_free(&nv->slots, slot);
	n->used = nv->slots.used_bytes;
	if (err)
		return err;
	if (nv->slots.nr_bad != nr_bad)
		nvme_log_slot(nv, NVME_ENT_BAD, slot, bytes);
	nvme_space_freed(nv);
	return 0;
}

static uint32_t nvme_slot_bytes(const struct node *n,
				const struct node_slot *slot)
{
	const struct nvme *nv = to_nvme(n);

	return nvme_open_done(nv) ? slots_bytes(&nv->slots, slot) : 0;
}

static int nvme_slot_victim(struct node *n, uint32_t len, unsigned int nth,
			    struct node_range *r)
{
	const struct nvme *nv = to_nvme(n);

	return nvme_open_done(nv) ? slots_victim(&nv->slots, len, nth, r) :
				    -ENOENT;
}

static int nvme_buf_add(struct node *n, void *addr, uint64_t len)
{
	struct nvme *nv = to_nvme(n);

	return nv->eng->buf_add ? nv->eng->buf_add(nv, addr, len) :
				  -EOPNOTSUPP;
}

static void nvme_buf_del(struct node *n, void *addr)
{
	struct nvme *nv = to_nvme(n);

	if (nv->eng->buf_del)
		nv->eng->buf_del(nv, addr);
}

static bool nvme_check(const struct node *n)
{
	const struct nvme *nv = to_nvme(n);

	if (!nvme_io_check(nv))
		return false;
	if (!nvme_open_done(nv))
		return !n->used && !nv->nr_started;
	return n->used == nv->slots.used_bytes && slots_check(&nv->slots) &&
	       nvme_journal_check(nv);
}

static void nvme_status(const struct node *n, char *buf, size_t len)
{
	const struct nvme *nv = to_nvme(n);
	const struct nvme_open *o = &nv->open;
	uint64_t fixed = atomic_load_explicit(&nv->fixed_bytes,
					      memory_order_relaxed);
	uint64_t plain = atomic_load_explicit(&nv->plain_bytes,
					      memory_order_relaxed);
	char ckpt[100];

	if (!nvme_open_done(nv)) {
		snprintf(buf, len, n->stats.open_fails ?
			 "%s, opened %llu times without success" : "%s",
			 nv->eng->name,
			 (unsigned long long)n->stats.open_fails);
		return;
	}
	nvme_ckpt_note(nv, ckpt, sizeof(ckpt));
	snprintf(buf, len,
		 "%s%s%s, %s, %llu of %llu MiB of memory registered, %u of %u segments written before, %s%s%s%s%s%s%s%s%s%s%s%s",
		 nv->eng->name,
		 nv->opts.engine == NVME_ENGINE_AUTO &&
		 nv->eng == &nvme_threads_ops ? " (io_uring was refused)" : "",
		 nv->eng_note,
		 o->direct ? "O_DIRECT" : "through the page cache",
		 (unsigned long long)(fixed >> 20),
		 (unsigned long long)((fixed + plain) >> 20),
		 nv->slots.nr_ready, nv->slots.nr_segs,
		 n->owner ? "journalled" : "not journalled",
		 o->super_bad ? "; only one superblock is of use" : "",
		 o->sparse ? "; not preallocated" : "",
		 o->overcommit ? "; overcommitted: space is not reserved on " : "",
		 o->overcommit ? o->overcommit : "",
		 !nv->room ? "; the file system's free floor is reached, writes are off" : "",
		 nv->health.full ? "; no space left, writes are off" : "",
		 nvme_journal_note(nv), ckpt,
		 nv->health.read_only ? "; read-only, writes are off" : "",
		 nv->unlinked ? "; the file was unlinked" : "",
		 nvme_discard_note(nv));
}

static bool nvme_idle(const struct nvme *nv)
{
	return !nv->nr_started && !nv->nr_own && !nv->queued &&
	       !nv->open.running && !nv->discard.running &&
	       !nv->flush.running &&
	       list_empty(&nv->ending);
}

/* Is there still a journal to be written, or data to be flushed, and time? */
static bool nvme_settled(const struct nvme *nv, uint64_t deadline_ns)
{
	return nvme_idle(nv) &&
	       ((nvme_journal_idle(nv) && !nvme_flush_wanted(nv)) ||
		deadline_past(deadline_ns));
}

static int nvme_drain(struct nvme *nv, uint64_t deadline_ns)
{
	for (;;) {
		struct pollfd fds[2] = {
			{ .fd = nv->epfd, .events = POLLIN },
			{ .fd = work_fd(nv->pool), .events = POLLIN },
		};

		work_poll(nv->pool, 0);
		nvme_poll(&nv->node, 0);
		if (nvme_settled(nv, deadline_ns))
			return 0;
		if (deadline_past(deadline_ns))
			return -ETIMEDOUT;
		poll(fds, 2, min(deadline_left_ms(deadline_ns),
				 DRAIN_STEP_MS));
	}
}

static void nvme_free(struct nvme *nv)
{
	slots_fini(&nv->slots);
	nvme_labels_fini(&nv->labels);
	close_fd(&nv->epfd);
	if (nv->mem)
		munmap(nv->mem, NVME_MEM_BYTES);
	free(nv->heap);
	free((char *)nv->opts.path);
	free(nv);
}

static int nvme_destroy(struct node *n, uint64_t deadline_ns)
{
	struct nvme *nv = to_nvme(n);
	int err;

	node_set_state(n, NODE_OFFLINE, "being ended");
	if (!nv->drained) {
		nvme_end_queued(nv, true, -ESHUTDOWN);
		nvme_journal_last_try(nv);
		err = nvme_drain(nv, deadline_ns);
		if (err)
			return err;
		/* no worker of a memory node registers anything after this */
		node_unpair_all(n);
		nv->eng->fini(nv);
		nvme_journal_fini(nv);
		nvme_ckpt_fini(nv);
		nvme_open_fini(nv);
		nv->drained = true;
	}
	err = work_destroy(nv->aux, deadline_ns);
	if (err)
		return err;
	nvme_free(nv);
	return 0;
}

static const struct node_ops nvme_node_ops = {
	.name		= "nvme",
	.destroy	= nvme_destroy,
	.fd		= nvme_fd,
	.poll		= nvme_poll,
	.kick		= nvme_kick,
	.next_deadline	= nvme_next_deadline,
	.status		= nvme_status,
	.check		= nvme_check,
	.slot_alloc	= nvme_slot_alloc,
	.slot_free	= nvme_slot_free,
	.slot_bytes	= nvme_slot_bytes,
	.slot_victim	= nvme_slot_victim,
	.submit		= nvme_submit,
	.cancel		= nvme_cancel,
	.raise		= nvme_raise,
	.deadline	= nvme_set_deadline,
	.writable	= nvme_writable,
	.estimate_us	= nvme_estimate_us,
	.buf_add	= nvme_buf_add,
	.buf_del	= nvme_buf_del,
	.buf_busy	= nvme_buf_busy,
	.store_fd	= nvme_store_fd,
	.persistent	= nvme_persistent,
	.record_add	= nvme_record_add,
	.record_del	= nvme_record_del,
	.record_again	= nvme_record_again,
	.label_put	= nvme_label_put,
	.label_del	= nvme_label_del,
	.record_flush	= nvme_record_flush,
};

static void set_default(uint64_t *opt, uint64_t value)
{
	if (!*opt)
		*opt = value;
}

static void set_default32(uint32_t *opt, uint32_t value)
{
	if (!*opt)
		*opt = value;
}

/* Copy @from, with defaults filled in; 0 or -errno. */
static int opts_copy(struct nvme_opts *o, const struct nvme_opts *from)
{
	*o = *from;
	if (!from->path || !*from->path || from->free_floor_pct > 100 ||
	    from->depth > 4096 || from->queue_max > (1u << 20) ||
	    from->threads > 32 || from->engine > NVME_ENGINE_THREADS ||
	    (from->seg_bytes && (!is_pow2(from->seg_bytes) ||
				 from->seg_bytes < NVME_SEG_MIN ||
				 from->seg_bytes > NVME_SEG_MAX)))
		return -EINVAL;
	set_default32(&o->depth, 64);
	set_default32(&o->queue_max, 8192);
	set_default32(&o->threads, 8);
	set_default32(&o->degrade_after, 3);
	set_default32(&o->fail_after, 8);
	set_default(&o->io_timeout_ns, 500 * NSEC_PER_MSEC);
	set_default(&o->queue_timeout_ns, 10 * NSEC_PER_SEC);
	set_default(&o->recover_ns, 30 * NSEC_PER_SEC);
	set_default(&o->probe_ns, NSEC_PER_SEC);
	set_default(&o->lock_wait_ns, 10 * NSEC_PER_SEC);
	set_default(&o->check_ns, 5 * NSEC_PER_SEC);
	set_default(&o->zero_bytes_s, UINT64_C(256) << 20);
	o->name = NULL;
	o->path = strdup(from->path);
	return o->path ? 0 : -ENOMEM;
}

static int engine_start(struct nvme *nv)
{
	int err;

	nv->eng = nv->opts.engine == NVME_ENGINE_THREADS ? &nvme_threads_ops :
							   &nvme_uring_ops;
	err = nv->eng->init(nv);
	if (err && nv->opts.engine == NVME_ENGINE_AUTO) {
		nv->eng = &nvme_threads_ops;
		err = nv->eng->init(nv);
	}
	return err;
}

static int epoll_add(int epfd, int fd)
{
	struct epoll_event ev = { .events = EPOLLIN };

	return epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &ev) < 0 ? -errno : 0;
}

static int nvme_watch(struct nvme *nv)
{
	int fd = nv->eng->fd(nv);
	int err;

	nv->epfd = epoll_create1(EPOLL_CLOEXEC);
	if (nv->epfd < 0)
		return -errno;
	err = epoll_add(nv->epfd, work_fd(nv->aux));
	if (!err && fd >= 0)
		err = epoll_add(nv->epfd, fd);
	return err;
}

static int nvme_alloc(const struct nvme_opts *opts, struct work_pool *pool,
		      struct nvme **ret)
{
	struct nvme *nv = calloc(1, sizeof(*nv));
	int err;

	if (!nv)
		return -ENOMEM;
	nv->pool = pool;
	nv->fd = -1;
	nv->room = UINT64_MAX;
	nv->epfd = -1;
	nv->open.fd = -1;
	nv->zero.seg = -1;
	nv->break_crc = fault_broken("crc");
	nv->break_dsync = fault_broken("dsync");
	for (int p = 0; p < NODE_NR_PRIOS; p++)
		list_init(&nv->queue[p]);
	list_init(&nv->ending);
	list_init(&nv->stalled);
	list_init(&nv->flying);
	list_init(&nv->journal.chunks);
	list_init(&nv->journal.spare);
	list_init(&nv->journal.flushes);
	err = opts_copy(&nv->opts, opts);
	if (err) {
		free(nv);
		return err;
	}
	err = -ENOMEM;
	nv->heap_max = nv->opts.queue_max + NVME_MAX_STARTED(nv->opts.depth) +
		       NVME_NR_OWN;
	nv->heap = calloc(nv->heap_max, sizeof(*nv->heap));
	nv->mem = mmap(NULL, NVME_MEM_BYTES, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (nv->mem == MAP_FAILED)
		nv->mem = NULL;
	if (!nv->heap || !nv->mem)
		goto out_free;
	madvise(nv->mem, NVME_MEM_BYTES, MADV_DONTFORK);
	*ret = nv;
	return 0;

out_free:
	nvme_free(nv);
	return err;
}

int nvme_create(const struct nvme_opts *opts, struct work_pool *pool,
		struct node **ret)
{
	struct nvme *nv;
	int err = fault_env();

	if (!err)
		err = nvme_alloc(opts, pool, &nv);
	if (err)
		return err;
	err = node_init(&nv->node, &nvme_node_ops, NODE_BLOCK, opts->name,
			opts->id);
	if (err)
		goto out_free;
	err = engine_start(nv);
	if (err)
		goto out_free;
	/* One worker for what may block on the file; the engine's besides. */
	err = work_create(opts->name,
			  nv->eng == &nvme_threads_ops ?
			  nv->opts.threads + 1 : 1, &nv->aux);
	if (err)
		goto out_engine;
	err = nvme_watch(nv);
	if (err)
		goto out_aux;
	nvme_open_start(nv);
	*ret = &nv->node;
	return 0;

out_aux:
	work_destroy(nv->aux, DEADLINE_NONE);
out_engine:
	nv->eng->fini(nv);
out_free:
	nvme_free(nv);
	return err;
}
