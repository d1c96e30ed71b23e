/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=kvmm_crc32c */
/*
 * crc - what it costs to check every byte that comes from a block node
 *
 * Slots of a node's file are read one at a time, as a fetch of a single page
 * does; load_share is the largest part of a load, over the sizes, that goes to
 * the checksum: the median of rounds. The checksum is timed where it is computed,
 * of bytes that the device has just put into memory, and the loads go to one piece
 * of MEM_BYTES after the other, so that no cache knows the memory from before.
 */
#include <errno.h>
#include <math.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/node/node.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"
#include "tests/bench/bench.h"

#define FILE_BYTES	(UINT64_C(65) << 20)
#define SEG_BYTES	(8u << 20)
#define ROUNDS		21u
#define WAIT_NS		(60 * NSEC_PER_SEC)
#define LOAD_BYTES	(UINT64_C(16) << 20)	/* a round */
#define MEM_BYTES	(UINT64_C(128) << 20)	/* no cache has so much */

static const struct {
	const char	*name;
	uint32_t	bytes;
} sizes[] = {
	{ "16k", 16u << 10 }, { "64k", 64u << 10 }, { "256k", 256u << 10 },
	{ "2m", 2u << 20 },
};

struct crc_bench {
	struct bench	b;
	struct work_pool *pool;
	struct node	*n;
	char		*mem;
	uint64_t	at;		/* of the next load, in @mem */
	bool		over;
	int		result;
};

/* ---- the checksum ----------------------------------------------------------- */

#define CRC_TIMED	4096u		/* shorter ones are not of data */

static _Atomic uint64_t crc_ns;

uint32_t __real_kvmm_crc32c(uint32_t crc, const void *buf, size_t len);
uint32_t __wrap_kvmm_crc32c(uint32_t crc, const void *buf, size_t len);

uint32_t __wrap_kvmm_crc32c(uint32_t crc, const void *buf, size_t len)
{
	uint64_t t0 = now_ns();

	crc = __real_kvmm_crc32c(crc, buf, len);
	/* relaxed: a sum, read when nothing is under way */
	if (len >= CRC_TIMED)
		atomic_fetch_add_explicit(&crc_ns, now_ns() - t0,
					  memory_order_relaxed);
	return crc;
}

static uint64_t crc_sum(void)
{
	return atomic_load_explicit(&crc_ns, memory_order_relaxed);
}

/* ---- loads ------------------------------------------------------------------ */

static void io_done(struct node_io *io, int result)
{
	struct crc_bench *t = io->arg;

	t->result = result;
}

static void io_release(struct node_io *io)
{
	struct crc_bench *t = io->arg;

	t->over = true;
}

static void turn(struct crc_bench *t)
{
	struct pollfd p[2] = {
		{ .fd = node_fd(t->n), .events = POLLIN },
		{ .fd = work_fd(t->pool), .events = POLLIN },
	};

	work_poll(t->pool, 0);
	node_poll(t->n, 0);
	if (!t->over && !work_sleep(t->pool, true))
		poll(p, 2, min(deadline_left_ms(node_next_deadline(t->n)),
			       100));
	work_sleep(t->pool, false);
}

static uint32_t one_io(struct crc_bench *t, enum node_dir dir,
		       const struct node_slot *slot, uint32_t len, uint32_t crc)
{
	struct node_io io = {
		.dir = dir, .prio = NODE_PRIO_DEMAND, .len = len, .crc = crc,
		.slot = *slot, .addr = t->mem + t->at, .ident = "bench",
		.ident_len = 5, .done = io_done, .release = io_release,
		.arg = t,
	};
	int err = node_submit(t->n, &io);

	if (err)
		bench_die(&t->b, "handing I/O in", err);
	t->at = (t->at + len) % MEM_BYTES;
	t->over = false;
	node_kick(t->n);
	while (!t->over)
		turn(t);
	if (t->result)
		bench_die(&t->b, "I/O of the node", t->result);
	return io.crc;
}

static void node_open(struct crc_bench *t, const char *path)
{
	struct nvme_opts o = {
		.name = "nvme0", .path = path, .bytes = FILE_BYTES,
		.seg_bytes = SEG_BYTES, .io_timeout_ns = WAIT_NS,
		.queue_timeout_ns = WAIT_NS, .zero_bytes_s = UINT64_C(1) << 40,
	};
	uint64_t end = deadline_in(WAIT_NS);
	int err = nvme_create(&o, t->pool, &t->n);

	if (err)
		bench_die(&t->b, "making the node", err);
	while ((t->n->state == NODE_STARTING ||
		t->n->stats.zeroed_bytes < t->n->capacity) &&
	       !deadline_past(end))
		turn(t);
	if (t->n->state != NODE_ONLINE)
		bench_die(&t->b, t->n->why, -EIO);
	if (node_buf_add(t->n, t->mem, MEM_BYTES))
		bench_say("  memory could not be registered");
}

/* The checksum's part of loads of @len. */
static double share(struct crc_bench *t, const char *name, uint32_t len)
{
	unsigned int nr = (unsigned int)(LOAD_BYTES / len), r, i;
	double v[ROUNDS], loads[ROUNDS], m;
	struct node_slot slot;
	char key[32];
	uint32_t crc;
	int err = node_slot_alloc(t->n, len, &slot);

	if (err)
		bench_die(&t->b, "a slot", err);
	t->at = 0;
	memset(t->mem, 0x5a, len);
	crc = one_io(t, NODE_WRITE, &slot, len, 0);
	for (r = 0; r < ROUNDS; r++) {
		uint64_t t0 = now_ns(), t1, c0 = crc_sum();

		for (i = 0; i < nr; i++)
			one_io(t, NODE_READ, &slot, len, crc);
		t1 = now_ns();
		v[r] = (double)(crc_sum() - c0) / (double)(t1 - t0);
		loads[r] = (double)(t1 - t0) / 1e3 / nr;
	}
	node_slot_free(t->n, &slot);
	m = bench_median(v, ROUNDS);
	snprintf(key, sizeof(key), "load_us_%s", name);
	bench_result(&t->b, key, bench_median(loads, ROUNDS));
	snprintf(key, sizeof(key), "load_share_%s", name);
	bench_result(&t->b, key, m);
	return m;
}

int main(void)
{
	static struct crc_bench t;
	char dir[256], path[300];
	double worst = 0;
	size_t i;
	int err;

	bench_init(&t.b, "crc");
	err = td_tmpdir(NULL, "kvmm-crc", dir, sizeof(dir));
	if (!err)
		err = work_create("bench", 1, &t.pool);
	t.mem = mmap(NULL, MEM_BYTES, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (err || t.mem == MAP_FAILED)
		bench_die(&t.b, "preparing", err ? err : -ENOMEM);
	snprintf(path, sizeof(path), "%s/node", dir);
	node_open(&t, path);
	bench_result_text(&t.b, "path", kvmm_crc32c_path());
	for (i = 0; i < ARRAY_SIZE(sizes); i++)
		worst = fmax(worst, share(&t, sizes[i].name, sizes[i].bytes));
	bench_result(&t.b, "load_share", worst);
	bench_must(&t.b, "load_share", worst, "<=", 0.10);
	node_destroy(t.n, deadline_in(WAIT_NS));
	work_destroy(t.pool, deadline_in(WAIT_NS));
	td_rmtree(dir);
	return bench_finish(&t.b);
}
