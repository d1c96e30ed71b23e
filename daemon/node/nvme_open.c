/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Opening a store.
 *
 * All of it happens on a worker of the node, since each step may take long on
 * a slow or sick disk, and the daemon serves meanwhile: open, lock, look at
 * what is there, preallocate, write the superblock. Only waiting for the lock
 * is cut into tries, between which the worker is free.
 *
 * The lock is flock(2) on the very file description that I/O goes through.
 * A process that was killed holds it until the kernel has ended its last I/O
 * on it, so whoever has the lock knows that nobody writes any more.
 *
 * What is not ours is not overwritten, unless the operator said so: a file must
 * have exactly the configured size and either a superblock or nothing but zeroes
 * in its first megabyte; a block device is opened O_EXCL too, which refuses one
 * that is mounted. What the store remembers is read here as well: nvme_scan.c.
 *
 * Later, every check_ns, the worker looks whether the file still has a name.
 * I/O goes on without one; only the space is lost when the daemon ends. It also
 * looks how much more of the file system a file that could not be preallocated
 * may take; see nvme_health.c.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/node/nvme.h"
#include "ipc/base/err.h"
#include "ipc/base/fd.h"
#include "kernels/kernels.h"

#define LOCK_STEP_NS	(50 * NSEC_PER_MSEC)
#define RETRY_MAX_NS	(10 * NSEC_PER_SEC)

/* ---- on the worker --------------------------------------------------------- */

/* Size, superblock and what is remembered; -EUCLEAN: it is not ours, or no more. */
static int open_store(struct nvme *nv, void *buf)
{
	struct nvme_open *o = &nv->open;
	uint64_t bytes;
	bool fresh, make = false;
	int err = nvme_file_size(nv, &bytes, &fresh);

	if (!err)
		err = nvme_super_read(nv, buf, bytes, fresh, &make);
	if (!err && !fresh)
		err = nvme_file_fill(nv, bytes, !make);
	make |= !o->owned;
	if (!err && make)
		err = nvme_super_make(nv, buf, bytes);
	if (!err && o->owned)
		err = nvme_scan(nv, &o->found);
	/* the copy that counted may have been behind: its medium refused it */
	if (!err && o->found && o->found->max_opens < NVME_OPENS_MAX)
		o->super.opens = max(o->super.opens, o->found->max_opens);
	/* not before: a store that cannot be read is left as it is */
	if (!err)
		err = nvme_super_renew(nv, buf, make);
	return err;
}

/* What is there cannot be used. Begin anew, or say how the operator can. */
static int open_rebuild(struct nvme *nv, void *buf)
{
	struct nvme_open *o = &nv->open;
	struct errmsg why = o->msg;
	struct stat st;
	int err;

	if (!nv->opts.rebuild)
		return errmsg_set(&o->msg, -EUCLEAN,
				  "%s: remove it, wipe its first MiB, or let it be rebuilt",
				  why.text);
	if (fstat(o->fd, &st) < 0)
		return nvme_sys_err();
	if (!o->block && (uint64_t)st.st_size != nv->opts.bytes &&
	    ftruncate(o->fd, 0) < 0)
		return nvme_sys_err();
	o->rebuilt = true;
	err = open_store(nv, buf);
	if (!err)
		o->msg = why;
	return err;
}

static int open_all(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	void *buf = NULL;
	int err = 0;

	if (o->fd < 0)
		err = nvme_file_open(nv);
	if (!err)
		err = nvme_file_lock(nv);
	if (err)
		return err;
	nvme_file_kind(nv);
	if (posix_memalign(&buf, NODE_ALIGN, NVME_HEAD_BYTES))
		return errmsg_set(&o->msg, -ENOMEM, "no memory");
	memset(buf, 0, NVME_HEAD_BYTES);
	err = open_store(nv, buf);
	if (err == -EUCLEAN)
		err = open_rebuild(nv, buf);
	if (!err)
		err = nvme_file_written(nv);
	if (!err)
		nvme_file_look(nv);
	free(buf);
	return err;
}

static void open_work(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, open.work);
	struct nvme_open *o = &nv->open;

	/* nothing of a try that failed may count in the next one */
	errmsg_clear(&o->msg);
	o->sparse = o->rebuilt = false;
	o->super_bad = 0;
	nvme_found_free(o->found);
	o->found = NULL;
	o->err = open_all(nv);
	if (!o->err || o->err == -EWOULDBLOCK)
		return;
	if (!o->msg.text[0])
		errmsg_set(&o->msg, o->err, "%s: %s", nv->opts.path,
			   strerror(-o->err));
	nvme_file_drop(nv);
}

static void watch_work(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, open.work);
	struct nvme_open *o = &nv->open;
	struct stat st;

	o->err = fstat(o->fd, &st) < 0 ? nvme_sys_err() : 0;
	o->nlink = o->err ? 0 : (uint64_t)st.st_nlink;
	nvme_file_look(nv);
}

/* ---- on the loop ----------------------------------------------------------- */

/* It is not ours, or no more: that is for the operator to decide. */
static void open_refused(struct nvme *nv, int err, const char *why)
{
	const struct node_owner *o = nv->node.owner;

	node_set_state(&nv->node, NODE_FAILED, "%s", why);
	nv->open.next_ns = DEADLINE_NONE;
	if (o && o->recovered)
		o->recovered(&nv->node, err, o->arg);
}

/*
 * Anything else may pass: a controller that is being reset, a device or a file
 * system that comes late, a process that lets the lock go, memory, space. The
 * owner is told of nothing, since what the store holds is not lost.
 */
static void open_failed(struct nvme *nv, int err, const char *why,
			uint64_t now)
{
	struct nvme_open *o = &nv->open;

	nv->node.stats.open_fails++;
	if (err == -EUCLEAN) {
		open_refused(nv, err, why);
		return;
	}
	close_fd(&o->twin);
	close_fd(&o->fd);
	o->retry_ns = min(o->retry_ns ? 2 * o->retry_ns : nv->opts.probe_ns,
			  RETRY_MAX_NS);
	o->next_ns = now + o->retry_ns;
	/* in front, since sentences are cut off at their end */
	node_set_state(&nv->node, NODE_FAILED, "being tried again: %s", why);
}

static void open_waits(struct nvme *nv, uint64_t now)
{
	struct nvme_open *o = &nv->open;

	if (now >= o->lock_until) {
		open_failed(nv, -EWOULDBLOCK, o->msg.text, now);
		return;
	}
	node_set_state(&nv->node, NODE_STARTING, "waiting: %s", o->msg.text);
	o->next_ns = now + LOCK_STEP_NS;
}

/* The file is open and read; 0, or there was no memory. */
static int open_use(struct nvme *nv)
{
	struct nvme_open *o = &nv->open;
	const struct nvme_super *sb = &o->super;
	int err;

	err = slots_init(&nv->slots, sb->data_off, sb->seg_bytes, o->nr_segs,
			 o->written, max(sb->opens << NVME_SEQ_SHIFT,
					 o->found ? o->found->next_seq : 0));
	if (err)
		return err;
	nv->fd = o->fd;
	err = nv->eng->set_file(nv);
	if (err) {
		nv->fd = -1;
		slots_fini(&nv->slots);
		memset(&nv->slots, 0, sizeof(nv->slots));
	}
	return err;
}

static void open_work_done(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, open.work);
	struct nvme_open *o = &nv->open;
	const struct nvme_super *sb = &o->super;
	uint64_t now = now_ns();
	int err;

	o->running = false;
	if (nv->node.state == NODE_OFFLINE)
		return;
	if (o->err == -EWOULDBLOCK) {
		open_waits(nv, now);
		return;
	}
	if (o->err) {
		open_failed(nv, o->err, o->msg.text, now);
		return;
	}
	err = open_use(nv);
	if (err) {
		open_failed(nv, err, strerror(-err), now);
		return;
	}
	nv->uuid_crc = kvmm_crc32c(0, sb->uuid, sizeof(sb->uuid));
	nv->node.capacity = (uint64_t)o->nr_segs * sb->seg_bytes;
	nv->node.max_len = sb->seg_bytes;
	nv->node.stats.overcommit_bytes = o->unreserved;
	nv->room = o->room;
	o->next_ns = now + nv->opts.check_ns;
	nv->first_seq = nv->slots.next_seq;
	nv->found = o->found;
	o->found = NULL;
	if (nv->found)
		nvme_recover_start(nv);
	else
		node_set_state(&nv->node, NODE_ONLINE,
			       "empty: nobody asked to find anything again");
}

static void watch_work_done(struct work *w)
{
	struct nvme *nv = container_of(w, struct nvme, open.work);
	struct nvme_open *o = &nv->open;

	o->running = false;
	nv->node.stats.overcommit_bytes = o->unreserved;
	nv->room = o->room == UINT64_MAX ? o->room :
					   o->room - min(o->room, o->taken);
	o->next_ns = now_ns() + (nv->room ? nv->opts.check_ns :
					    nv->opts.probe_ns);
	if (!o->room != nv->floored && nv->node.state != NODE_OFFLINE) {
		nv->floored = !o->room;
		node_set_state(&nv->node, nv->node.state, nv->floored ?
			       "%s: the file system's free floor of %u %% is reached: no writes" :
			       "%s: more than %u %% of the file system are free again",
			       nv->opts.path, nv->opts.free_floor_pct);
	}
	if (o->err || o->nlink || o->block || nv->unlinked)
		return;
	nv->unlinked = true;
	if (nv->node.state != NODE_OFFLINE)
		node_set_state(&nv->node, nv->node.state,
			       "%s was unlinked: its space is free again when the daemon ends",
			       nv->opts.path);
}

void nvme_open_start(struct nvme *nv)
{
	nv->open.fd = nv->open.twin = -1;
	nv->open.next_ns = 0;
	nv->open.lock_until = deadline_in(nv->opts.lock_wait_ns);
	node_set_state(&nv->node, NODE_STARTING, "opening %s", nv->opts.path);
	/* not begun before the first poll: until then there may be an owner */
}

void nvme_open_poll(struct nvme *nv, uint64_t now)
{
	struct nvme_open *o = &nv->open;
	bool watch = nvme_open_done(nv);

	if (o->running || now < o->next_ns || nv->node.state == NODE_OFFLINE)
		return;
	/* once: who leaves meanwhile does not want it emptied */
	o->owned |= nv->node.owner != NULL;
	o->running = true;
	o->taken = nv->inflight_bytes[NODE_WRITE] + nv->own_bytes[NODE_WRITE];
	o->work.fn = watch ? watch_work : open_work;
	o->work.done = watch ? watch_work_done : open_work_done;
	work_submit(nv->aux, &o->work);
}

uint64_t nvme_open_next(const struct nvme *nv)
{
	if (nv->open.running || nv->node.state == NODE_OFFLINE)
		return DEADLINE_NONE;
	return nv->open.next_ns;
}

/* The workers that it is theirs before have done with it when nv->fd is set. */
int nvme_store_fd(const struct node *n)
{
	const struct nvme *nv = to_nvme(n);

	return nv->fd < 0 ? -ENOENT : nv->open.twin;
}

/* No job is running and no I/O in flight. */
void nvme_open_fini(struct nvme *nv)
{
	/* The engine may keep the file a moment longer than this. */
	if (nv->open.fd >= 0)
		flock(nv->open.fd, LOCK_UN);
	close_fd(&nv->open.twin);
	close_fd(&nv->open.fd);
	nv->fd = -1;
	free(nv->open.written);
	nv->open.written = NULL;
	nvme_found_free(nv->open.found);
	nv->open.found = NULL;
	nvme_found_free(nv->found);
	nv->found = NULL;
}
