/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engine: pread and pwrite on the node's own workers, for hosts that refuse
 * io_uring (containers under a seccomp filter often do). As many I/Os move at
 * once as there are threads. The daemon's shared workers are never used: a
 * device that stalls would take them all, and with them every checksum.
 */
#include <errno.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/node/nvme.h"

static int threads_init(struct nvme *nv)
{
	return 0;
}

static int threads_set_file(struct nvme *nv)
{
	return 0;
}

static void threads_fini(struct nvme *nv)
{
}

static void rw_work(struct work *w)
{
	struct node_io *io = container_of(w, struct node_io, priv.io_work);
	const struct nvme *nv = to_nvme(io->priv.node);
	bool sync = io->priv.sync && !nv->break_dsync;
	uint32_t len = nvme_move_bytes(io);
	uint32_t done = 0;
	int err = 0;

	nvme_io_begun(io, now_ns());
	while (done < len) {
		char *p = (char *)io->addr + done;
		off_t off = (off_t)(io->slot.off + done);
		struct iovec iov = { .iov_base = p, .iov_len = len - done };
		ssize_t n = io->dir == NODE_READ ?
			    pread(nv->fd, p, len - done, off) :
			    pwritev2(nv->fd, &iov, 1, off,
				     sync ? RWF_DSYNC : 0);

		if (n > 0) {
			done += (uint32_t)n;
		} else if (n < 0 && errno != EINTR) {
			err = -errno;
			break;
		} else if (n == 0) {
			break;
		}
	}
	io->priv.res = err ? err : (int)done;
}

static void rw_work_done(struct work *w)
{
	struct node_io *io = container_of(w, struct node_io, priv.io_work);

	nvme_engine_done(to_nvme(io->priv.node), io, io->priv.res);
}

static void threads_start(struct nvme *nv, struct node_io *io)
{
	io->priv.io_work.fn = rw_work;
	io->priv.io_work.done = rw_work_done;
	work_submit(nv->aux, &io->priv.io_work);
}

static void threads_flush(struct nvme *nv)
{
}

/* nvme_poll() polls the workers itself, since start-up uses them, too. */
static unsigned int threads_reap(struct nvme *nv, unsigned int budget)
{
	return 0;
}

static void threads_cancel(struct nvme *nv, struct node_io *io)
{
	if (work_cancel(nv->aux, &io->priv.io_work))
		nvme_end_soon(nv, io, -ECANCELED);
}

static int threads_fd(const struct nvme *nv)
{
	return -1;
}

static bool threads_busy(const struct nvme *nv)
{
	return false;
}

const struct nvme_engine_ops nvme_threads_ops = {
	.name		= "threads",
	.init		= threads_init,
	.set_file	= threads_set_file,
	.fini		= threads_fini,
	.start		= threads_start,
	.flush		= threads_flush,
	.reap		= threads_reap,
	.cancel		= threads_cancel,
	.fd		= threads_fd,
	.busy		= threads_busy,
};
