/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io - the slot store against fio
 *
 * The node alone, without records and pages, reads and writes whole slots of its
 * file; fio does the same on a file of the same size beside it: io_uring, fixed
 * buffers and files, O_DIRECT, the same depth, block size and order (from front
 * to back, and again). Both files were fully written before.
 *
 * Blocks of BLOCK_NS in the order fio, node, node, fio; each half is a pair. A
 * ratio is the median of the pairs' throughputs, node / fio, with its bootstrap
 * interval; noise is fio against fio of the same rounds, the larger by the
 * smaller: a disk that others use does not hold 0.95 of itself.
 *
 * Two limits have no noise in them. depth_share: how many I/Os the kernel had in
 * its hands, on average, of those that it was to have. cpu_ratio: CPU seconds a
 * gigabyte, ours without the checksum's, against fio's. The checksum is timed
 * where it is computed: of bytes that a device has just put into memory it takes
 * more than of others.
 *
 * A disk that is a share of a larger one may be quicker after a rest, and fio
 * takes one while it starts. So does the node, as long as fio's last.
 *
 * $KVMM_BENCH_ONLY, as read_64k, measures that one alone.
 */
#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <jansson.h>

#include "daemon/node/node.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"
#include "tests/bench/bench.h"

/* link: -Wl,--wrap=kvmm_crc32c */

#define FILE_BYTES	(UINT64_C(513) << 20)	/* a MiB of it is no segment */
#define SEG_BYTES	(8u << 20)
#define BLOCK_NS	(2 * NSEC_PER_SEC)
#define ROUNDS		5u			/* two pairs each */
#define PAIRS		(2 * ROUNDS)
#define RESAMPLES	2000u
#define WAIT_NS		(60 * NSEC_PER_SEC)
#define MAX_IOS		256u

struct size {
	const char	*name;
	uint32_t	bytes;
	uint32_t	depth;
};

static const struct size sizes[] = {
	{ "64k",	64u << 10,	32 },
	{ "256k",	256u << 10,	16 },
	{ "2m",		2u << 20,	8 },
};

/**
 * struct block - what one of them came to
 * @bytes_s:	throughput
 * @cpu_gb:	CPU seconds a gigabyte, without the checksum
 * @crc_gb:	those of the checksum
 * @depth:	of the node: I/Os in flight, on average
 */
struct block {
	double		bytes_s;
	double		cpu_gb;
	double		crc_gb;
	double		depth;
};

struct io_bench {
	struct bench	b;
	char		dir[256];
	char		node_path[300];
	char		fio_path[300];
	struct work_pool *pool;
	struct node	*n;
	int		epfd;
	const struct size *size;
	enum node_dir	dir_now;
	char		*mem;
	struct node_slot *slot;
	uint32_t	*crc;
	uint32_t	nr_slots;
	uint32_t	next;
	uint32_t	out;		/* handed in and not released */
	bool		stop;
	uint64_t	bytes;
	uint64_t	rest_ns;	/* fio's, of its last run */
	struct node_io	io[MAX_IOS];
};

/* -- the checksum ------------------------------------------------------------------- */

#define CRC_TIMED	4096u		/* shorter ones are not of data */

static _Atomic uint64_t crc_ns;

uint32_t __real_kvmm_crc32c(uint32_t crc, const void *buf, size_t len);
uint32_t __wrap_kvmm_crc32c(uint32_t crc, const void *buf, size_t len);

uint32_t __wrap_kvmm_crc32c(uint32_t crc, const void *buf, size_t len)
{
	uint64_t t0;

	if (len < CRC_TIMED)
		return __real_kvmm_crc32c(crc, buf, len);
	t0 = bench_cpu_ns();
	crc = __real_kvmm_crc32c(crc, buf, len);
	/* relaxed: a sum, read when nothing is under way */
	atomic_fetch_add_explicit(&crc_ns, bench_cpu_ns() - t0,
				  memory_order_relaxed);
	return crc;
}

/* -- the node --------------------------------------------------------------------- */

static void io_next(struct io_bench *t, struct node_io *io);

static void io_done(struct node_io *io, int result)
{
	struct io_bench *t = io->arg;

	if (result)
		bench_die(&t->b, "I/O of the node", result);
}

static void io_release(struct node_io *io)
{
	struct io_bench *t = io->arg;

	t->out--;
	t->bytes += io->len;
	if (io->dir == NODE_WRITE)
		t->crc[(io->slot.off - t->slot[0].off) / io->len] = io->crc;
	if (!t->stop)
		io_next(t, io);
}

static void io_next(struct io_bench *t, struct node_io *io)
{
	uint32_t i = t->next++ % t->nr_slots;
	void *addr = t->mem + (uint64_t)(io - t->io) * t->size->bytes;
	int err;

	*io = (struct node_io) {
		.dir		= t->dir_now,
		.prio		= t->dir_now == NODE_WRITE ?
				  NODE_PRIO_WRITEBACK : NODE_PRIO_DEMAND,
		.len		= t->size->bytes,
		.crc		= t->crc[i],
		.slot		= t->slot[i],
		.addr		= addr,
		.ident		= "bench",
		.ident_len	= 5,
		.done		= io_done,
		.release	= io_release,
		.arg		= t,
	};
	err = node_submit(t->n, io);
	if (err)
		bench_die(&t->b, "handing I/O in", err);
	t->out++;
}

/* One round of the loop, as kvmmd's; sleeps when there is nothing to do. */
static void turn(struct io_bench *t)
{
	struct epoll_event ev[2];

	work_poll(t->pool, 0);
	node_poll(t->n, 0);
	if (!work_sleep(t->pool, true))
		epoll_wait(t->epfd, ev, 2,
			   min(deadline_left_ms(node_next_deadline(t->n)),
			       100));
	work_sleep(t->pool, false);
}

static void watch(struct io_bench *t, int fd)
{
	struct epoll_event ev = { .events = EPOLLIN };

	if (epoll_ctl(t->epfd, EPOLL_CTL_ADD, fd, &ev) < 0)
		bench_die(&t->b, "epoll", -errno);
}

static double cpu_s(int who)
{
	struct rusage ru;

	getrusage(who, &ru);
	return (double)ru.ru_utime.tv_sec + (double)ru.ru_stime.tv_sec +
	       ((double)ru.ru_utime.tv_usec + (double)ru.ru_stime.tv_usec) /
	       1e6;
}

/* More than the depth are handed in, so that there is always one to start. */
static uint32_t nr_ios(const struct size *s)
{
	return 3 * s->depth;
}

static struct block node_block(struct io_bench *t)
{
	const struct node_dir_stats *st = &t->n->stats.dir[t->dir_now];
	uint64_t begin, at, now, end;
	double area = 0, cpu;
	struct timespec rest = ns_to_timespec(t->rest_ns);
	struct block b;
	uint32_t i;

	nanosleep(&rest, NULL);
	t->stop = false;
	t->bytes = 0;
	atomic_store_explicit(&crc_ns, 0, memory_order_relaxed);
	cpu = cpu_s(RUSAGE_SELF);
	begin = at = now_ns();
	end = begin + BLOCK_NS;
	for (i = 0; i < nr_ios(t->size); i++)
		io_next(t, &t->io[i]);
	node_kick(t->n);
	do {
		turn(t);
		now = now_ns();
		area += (double)(now - at) * (double)st->inflight;
		at = now;
	} while (now < end);
	b.bytes_s = (double)t->bytes * 1e9 / (double)(now - begin);
	b.depth = area / (double)(now - begin);
	t->stop = true;
	while (t->out)
		turn(t);
	b.crc_gb = (double)atomic_load_explicit(&crc_ns,
						memory_order_relaxed) /
		   (double)t->bytes;
	b.cpu_gb = (cpu_s(RUSAGE_SELF) - cpu) * 1e9 / (double)t->bytes -
		   b.crc_gb;
	return b;
}

/* Write-back has three quarters of a node's depth: that much is to be fio's. */
static void node_open(struct io_bench *t)
{
	struct nvme_opts o = {
		.name		= "nvme0",
		.path		= t->node_path,
		.bytes		= FILE_BYTES,
		.seg_bytes	= SEG_BYTES,
		.depth		= t->dir_now == NODE_WRITE ?
				  div_round_up(t->size->depth * 4, 3) :
				  t->size->depth,
		.engine		= NVME_ENGINE_URING,
		.io_timeout_ns	= WAIT_NS,
		.queue_timeout_ns = WAIT_NS,
		.zero_bytes_s	= UINT64_C(1) << 40,
	};
	uint64_t end = deadline_in(WAIT_NS);
	int err = nvme_create(&o, t->pool, &t->n);

	if (err)
		bench_die(&t->b, "making the node", err);
	watch(t, node_fd(t->n));
	while ((t->n->state == NODE_STARTING ||
		t->n->stats.zeroed_bytes < t->n->capacity) &&
	       !deadline_past(end))
		turn(t);
	if (t->n->state != NODE_ONLINE) {
		bench_say("%s", t->n->why);
		bench_die(&t->b, "opening the store", -EIO);
	}
	if (node_buf_add(t->n, t->mem, nr_ios(t->size) * t->size->bytes))
		bench_say("  buffers could not be registered");
}

/* All slots of one size, front to back, each with data in it. */
static void node_fill(struct io_bench *t)
{
	enum node_dir dir = t->dir_now;
	uint32_t i;

	t->nr_slots = 0;
	while (!node_slot_alloc(t->n, t->size->bytes, &t->slot[t->nr_slots]))
		t->nr_slots++;
	t->dir_now = NODE_WRITE;
	t->next = 0;
	t->stop = false;
	for (i = 0; i < nr_ios(t->size); i++)
		io_next(t, &t->io[i]);
	while (t->next < t->nr_slots + nr_ios(t->size))
		turn(t);
	t->stop = true;
	while (t->out)
		turn(t);
	t->dir_now = dir;
	t->next = 0;
}

static void node_close(struct io_bench *t)
{
	int err = node_destroy(t->n, deadline_in(WAIT_NS));

	t->n = NULL;
	if (err)
		bench_die(&t->b, "ending the node", err);
}

/* -- fio ---------------------------------------------------------------------------- */

static json_t *fio_run(struct io_bench *t, const char *args)
{
	char cmd[1024];
	json_error_t je;
	json_t *root;
	FILE *f;

	snprintf(cmd, sizeof(cmd),
		 "fio --name=b --filename='%s' --size=%llu --ioengine=io_uring --direct=1 --output-format=json %s 2>/dev/null",
		 t->fio_path, (unsigned long long)FILE_BYTES, args);
	f = popen(cmd, "re");
	if (!f)
		bench_die(&t->b, "fio", -errno);
	/* it may say something before its report */
	root = json_loadf(f, JSON_DISABLE_EOF_CHECK, &je);
	if (pclose(f) || !root) {
		bench_say("%s: %s", cmd, je.text);
		bench_die(&t->b, "fio (Debian's package is called that)",
			  -ENOENT);
	}
	return root;
}

static double member(const json_t *o, const char *key)
{
	return json_number_value(json_object_get(o, key));
}

static struct block fio_block(struct io_bench *t)
{
	const char *rw = t->dir_now == NODE_WRITE ? "write" : "read";
	const json_t *job, *side;
	struct block b;
	uint64_t t0 = now_ns();
	char args[300];
	json_t *root;
	double s;

	snprintf(args, sizeof(args),
		 "--rw=%s --bs=%u --iodepth=%u --fixedbufs=1 --registerfiles=1 --time_based --runtime=%us",
		 rw, t->size->bytes, t->size->depth,
		 (unsigned int)(BLOCK_NS / NSEC_PER_SEC));
	root = fio_run(t, args);
	job = json_array_get(json_object_get(root, "jobs"), 0);
	side = json_object_get(job, rw);
	s = member(side, "runtime") / 1000;
	t->rest_ns = now_ns() - t0;
	t->rest_ns -= min(t->rest_ns, (uint64_t)(s * NSEC_PER_SEC));
	b.bytes_s = member(side, "bw_bytes");
	b.cpu_gb = (member(job, "usr_cpu") + member(job, "sys_cpu")) / 100 *
		   s * 1e9 / member(side, "io_bytes");
	b.depth = t->size->depth;
	b.crc_gb = 0;
	json_decref(root);
	if (!(b.bytes_s > 0))
		bench_die(&t->b, "fio moved nothing", -EIO);
	return b;
}

static void fio_fill(struct io_bench *t)
{
	json_decref(fio_run(t, "--rw=write --bs=1m --iodepth=16 --end_fsync=1"));
}

/* -- numbers -------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

/* The median's bootstrap interval, 95 %. */
static void interval(const double *v, unsigned int n, double lohi[2])
{
	static double med[RESAMPLES];
	double draw[PAIRS];
	uint64_t seed = 1;
	unsigned int i, k;

	for (i = 0; i < RESAMPLES; i++) {
		for (k = 0; k < n; k++)
			draw[k] = v[bench_rand(&seed) % n];
		med[i] = bench_median(draw, n);
	}
	qsort(med, RESAMPLES, sizeof(*med), by_value);
	lohi[0] = med[RESAMPLES / 40];
	lohi[1] = med[RESAMPLES - 1 - RESAMPLES / 40];
}

static void put(struct io_bench *t, const char *table, const char *key,
		double v)
{
	json_t *o = json_object_get(t->b.results, table);

	if (!o) {
		o = json_object();
		json_object_set_new(t->b.results, table, o);
	}
	json_object_set_new(o, key, json_real(round(v * 1000) / 1000));
}

/* Two pairs: fio and the node, the node and fio. */
static void one_round(struct io_bench *t, struct block f[2], struct block s[2])
{
	f[0] = fio_block(t);
	s[0] = node_block(t);
	s[1] = node_block(t);
	f[1] = fio_block(t);
}

static void one_case(struct io_bench *t, const struct size *size,
		     enum node_dir dir)
{
	double ratio[PAIRS], noise[ROUNDS], depth[PAIRS], cpu[PAIRS];
	const char *only = getenv("KVMM_BENCH_ONLY");
	double lohi[2], r, q;
	char key[32], what[64];
	unsigned int i, k;

	t->size = size;
	t->dir_now = dir;
	snprintf(key, sizeof(key), "%s_%s", dir == NODE_WRITE ? "write" : "read",
		 size->name);
	if (only && strcmp(only, key))
		return;
	node_open(t);
	node_fill(t);
	for (i = 0; i < ROUNDS; i++) {
		struct block f[2], s[2];

		one_round(t, f, s);
		for (k = 0; k < 2; k++) {
			ratio[2 * i + k] = s[k].bytes_s / f[k].bytes_s;
			depth[2 * i + k] = s[k].depth / size->depth;
			cpu[2 * i + k] = s[k].cpu_gb / f[k].cpu_gb;
		}
		noise[i] = max(f[0].bytes_s, f[1].bytes_s) /
			   min(f[0].bytes_s, f[1].bytes_s);
		bench_say("  %s round %u of %u: %.0f and %.0f MB/s, fio %.0f and %.0f; CPU %.3f s/GB (and checksum %.3f), fio %.3f",
			  key, i + 1, ROUNDS, s[0].bytes_s / 1e6,
			  s[1].bytes_s / 1e6, f[0].bytes_s / 1e6,
			  f[1].bytes_s / 1e6, s[0].cpu_gb, s[0].crc_gb, f[0].cpu_gb);
	}
	node_close(t);
	interval(ratio, PAIRS, lohi);
	put(t, "ratio_low", key, lohi[0]);
	put(t, "ratio_high", key, lohi[1]);
	r = bench_median(ratio, PAIRS);
	q = bench_median(noise, ROUNDS);
	put(t, "ratios", key, r);
	put(t, "noise", key, q);
	snprintf(what, sizeof(what), "ratio of %s", key);
	bench_must(&t->b, what, r, ">=", 0.95 / q);
	r = bench_median(depth, PAIRS);
	put(t, "depth_share", key, r);
	snprintf(what, sizeof(what), "depth_share of %s", key);
	bench_must(&t->b, what, r, ">=", 0.95);
	r = bench_median(cpu, PAIRS);
	put(t, "cpu_ratio", key, r);
	snprintf(what, sizeof(what), "cpu_ratio of %s", key);
	bench_must(&t->b, what, r, "<=", 1.5);
}

/* -- all of it -------------------------------------------------------------------------- */

static void make(struct io_bench *t)
{
	size_t most = 0, i;
	int err = td_tmpdir(NULL, "kvmm-io", t->dir, sizeof(t->dir));

	if (err)
		bench_die(&t->b, "a folder", err);
	snprintf(t->node_path, sizeof(t->node_path), "%s/node", t->dir);
	snprintf(t->fio_path, sizeof(t->fio_path), "%s/fio", t->dir);
	for (i = 0; i < ARRAY_SIZE(sizes); i++)
		most = max(most, (size_t)nr_ios(&sizes[i]) * sizes[i].bytes);
	t->mem = mmap(NULL, most, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	t->slot = calloc(FILE_BYTES / sizes[0].bytes, sizeof(*t->slot));
	t->crc = calloc(FILE_BYTES / sizes[0].bytes, sizeof(*t->crc));
	if (t->mem == MAP_FAILED || !t->slot || !t->crc)
		bench_die(&t->b, "memory", -ENOMEM);
	memset(t->mem, 0x5a, most);
	err = work_create("bench", 1, &t->pool);
	if (err)
		bench_die(&t->b, "a worker", err);
	t->epfd = epoll_create1(EPOLL_CLOEXEC);
	watch(t, work_fd(t->pool));
}

int main(void)
{
	static struct io_bench t;
	size_t i;

	bench_init(&t.b, "io");
	make(&t);
	fio_fill(&t);
	for (i = 0; i < ARRAY_SIZE(sizes); i++) {
		one_case(&t, &sizes[i], NODE_READ);
		one_case(&t, &sizes[i], NODE_WRITE);
	}
	work_destroy(t.pool, deadline_in(WAIT_NS));
	td_rmtree(t.dir);
	return bench_finish(&t.b);
}
