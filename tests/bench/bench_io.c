/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io - the slot store against fio
 *
 * The node alone, without records and pages, reads and writes whole slots of its
 * file; fio does the same in the same file, with the same memory: io_uring, fixed
 * buffers and files, O_DIRECT, the same depth, block size and order (from front
 * to back, and again). All of it was written before.
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
 * more than of others. All that its workers use is its own, with being woken and
 * saying that they are done; the loop's part of that is not.
 *
 * A disk that is a share of a larger one may be quicker after a rest, and fio
 * takes one while it starts. So does the node, as long as fio's last.
 *
 * CPU is the process's and that of the kernel's threads which start I/Os for it.
 *
 * $KVMM_BENCH_ONLY, as read_64k, measures that one alone.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <jansson.h>

#include "daemon/node/node.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"
#include "tests/bench/bench.h"
#include "tests/bench/disk.h"

/* link: -Wl,--wrap=kvmm_crc32c */

#define FILE_BYTES	(UINT64_C(513) << 20)	/* a MiB of it is no segment */
#define BLOCK_NS	(2 * NSEC_PER_SEC)
#define ROUNDS		5u			/* two pairs each */
#define PAIRS		(2 * ROUNDS)
#define RESAMPLES	2000u
#define MAX_IOS		256u

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
	struct disk	d;
	const struct disk_size *size;
	enum node_dir	dir_now;
	struct node_slot *slot;
	uint32_t	*crc;
	uint32_t	nr_slots;
	uint32_t	next;
	uint32_t	out;		/* handed in and not released */
	bool		stop;
	uint64_t	bytes;
	struct node_io	io[MAX_IOS];
};

/* -- the checksum ------------------------------------------------------------------- */

#define CRC_TIMED	4096u		/* shorter ones are not of data */

static uint64_t loop_crc_ns;		/* of the loop's thread */
static _Thread_local bool on_loop;

uint32_t __real_kvmm_crc32c(uint32_t crc, const void *buf, size_t len);
uint32_t __wrap_kvmm_crc32c(uint32_t crc, const void *buf, size_t len);

uint32_t __wrap_kvmm_crc32c(uint32_t crc, const void *buf, size_t len)
{
	uint64_t t0;

	if (len < CRC_TIMED || !on_loop)
		return __real_kvmm_crc32c(crc, buf, len);
	t0 = bench_cpu_ns();
	crc = __real_kvmm_crc32c(crc, buf, len);
	loop_crc_ns += bench_cpu_ns() - t0;
	return crc;
}

static bool is_worker(const char *name)
{
	return !strcmp(name, DISK_WORKERS);
}

/* What the checksum has taken so far, wherever. */
static uint64_t crc_cpu_ns(void)
{
	return loop_crc_ns + disk_cpu_ns("/proc/self/task", is_worker);
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
	/* no more buffers than fio has: a cache holds them as well. Who shares one
	 * reads the same from the medium, as it was filled from it. */
	void *addr = t->d.mem + (uint64_t)(i % t->size->depth) * t->size->bytes;
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
	err = node_submit(t->d.n, io);
	if (err)
		bench_die(&t->b, "handing I/O in", err);
	t->out++;
}

static double cpu_s(int who)
{
	struct rusage ru;

	getrusage(who, &ru);
	return (double)ru.ru_utime.tv_sec + (double)ru.ru_stime.tv_sec +
	       ((double)ru.ru_utime.tv_usec + (double)ru.ru_stime.tv_usec) /
	       1e6;
}

static struct block node_block(struct io_bench *t)
{
	const struct node_dir_stats *st = &t->d.n->stats.dir[t->dir_now];
	uint64_t begin, at, now, end, crc_ns, kernel_ns;
	double area = 0, cpu;
	struct block b;
	uint32_t i;

	disk_rest(&t->d);
	t->stop = false;
	t->bytes = 0;
	crc_ns = crc_cpu_ns();
	kernel_ns = disk_kernel_ns();
	cpu = cpu_s(RUSAGE_SELF);
	begin = at = now_ns();
	end = begin + BLOCK_NS;
	for (i = 0; i < disk_nr_ios(t->size); i++)
		io_next(t, &t->io[i]);
	node_kick(t->d.n);
	do {
		disk_turn(&t->d);
		now = now_ns();
		area += (double)(now - at) * (double)st->inflight;
		at = now;
	} while (now < end);
	b.bytes_s = (double)t->bytes * 1e9 / (double)(now - begin);
	b.depth = area / (double)(now - begin);
	t->stop = true;
	while (t->out)
		disk_turn(&t->d);
	cpu = (cpu_s(RUSAGE_SELF) - cpu) * 1e9;
	kernel_ns = disk_kernel_ns() - kernel_ns;
	b.crc_gb = (double)(crc_cpu_ns() - crc_ns) / (double)t->bytes;
	b.cpu_gb = (cpu + (double)kernel_ns) / (double)t->bytes - b.crc_gb;
	return b;
}

/* All slots of one size, front to back, each with data in it. */
static void node_fill(struct io_bench *t)
{
	enum node_dir dir = t->dir_now;
	uint32_t i;

	t->nr_slots = 0;
	while (!node_slot_alloc(t->d.n, t->size->bytes, &t->slot[t->nr_slots]))
		t->nr_slots++;
	t->dir_now = NODE_WRITE;
	t->next = 0;
	t->stop = false;
	for (i = 0; i < disk_nr_ios(t->size); i++)
		io_next(t, &t->io[i]);
	while (t->next < t->nr_slots + disk_nr_ios(t->size))
		disk_turn(&t->d);
	t->stop = true;
	while (t->out)
		disk_turn(&t->d);
	t->dir_now = dir;
	t->next = 0;
}

static void node_open(struct io_bench *t)
{
	disk_open(&t->d, t->dir_now, t->size->depth, NULL);
	if (node_buf_add(t->d.n, t->d.mem,
			 disk_nr_ios(t->size) * t->size->bytes))
		bench_say("  buffers could not be registered");
}

static struct block fio_block(struct io_bench *t)
{
	struct disk_share sh = disk_fio(&t->d, t->dir_now == NODE_WRITE ?
					"write" : "read", t->size->bytes,
					t->size->depth, BLOCK_NS, 0);

	return (struct block){ .bytes_s = sh.bytes_s, .cpu_gb = sh.cpu_gb,
			       .depth = t->size->depth };
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

static void one_case(struct io_bench *t, const struct disk_size *size,
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
	disk_close(&t->d);
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
	disk_init(&t->d, &t->b, FILE_BYTES);
	t->slot = calloc(FILE_BYTES / disk_sizes[0].bytes, sizeof(*t->slot));
	t->crc = calloc(FILE_BYTES / disk_sizes[0].bytes, sizeof(*t->crc));
	if (!t->slot || !t->crc)
		bench_die(&t->b, "memory", -ENOMEM);
}

int main(void)
{
	static struct io_bench t;
	size_t i;

	bench_init(&t.b, "io");
	on_loop = true;
	make(&t);
	for (i = 0; i < DISK_NR_SIZES; i++) {
		one_case(&t, &disk_sizes[i], NODE_READ);
		one_case(&t, &disk_sizes[i], NODE_WRITE);
	}
	disk_fini(&t.d);
	return bench_finish(&t.b);
}
