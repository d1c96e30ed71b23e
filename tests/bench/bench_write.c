/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write - what it costs to write pages that are found again, against fio
 *
 * The node with an owner, its store full: each write is of a page that takes the
 * slot of another one, chosen at random; when it is over its record is added, so
 * that the journal, and from time to time a checkpoint, is written beside. fio
 * writes at random in the same file, from the same memory: io_uring, fixed buffers
 * and files, O_DIRECT, the same depth and block size. All of it was written before.
 *
 * A write that is on the medium when it ends (the journal's groups, RWF_DSYNC)
 * takes everything with it that the device has in its cache, whoever wrote it:
 * where the device is a file of a host, that is the host's fsync of all that was
 * written since the last one. Who remembers pages has to pay that, so the floor
 * pays it too: a second job of fio writes single blocks with O_DSYNC to a small
 * file, as many a second as the node wrote groups in its last block. It has no
 * records to write, no checkpoints, and no flush of pages once a second.
 *
 * Blocks of BLOCK_NS in the order floor, node, node, floor; each half is a pair.
 * write_ratio is the median of the pairs' throughputs, node / floor; noise is
 * floor against floor of the same rounds, the larger by the smaller.
 * write_ratio_unflushed is against fio alone, which promises nothing: what
 * durability costs on this device, and no fault of the node's.
 *
 * write_amplification: all bytes that the process wrote for its store, by the
 * kernel's account where that is more than the node's own (padding, superblocks,
 * zero-writing, journal, checkpoints), for a byte of page; from the making of the
 * store on, until its pages came to TIMES its capacity. Zero-writing alone is one
 * of them, and is over after the first.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "ipc/base/bits.h"
#include "tests/bench/bench.h"
#include "tests/bench/disk.h"

#define FILE_BYTES	(UINT64_C(265) << 20)	/* 9 MiB of it are no segments */
#define BLOCK_NS	(2 * NSEC_PER_SEC)
#define ROUNDS		5u			/* two pairs each */
#define PAIRS		(2 * ROUNDS)
#define TIMES		25u			/* the capacity: churn at least */
#define MAX_IOS		256u
#define COLLECT_PART	1024u

/**
 * struct page - one in the store
 * @kept:	it has a record; otherwise it is being written
 */
struct page {
	struct node_record rec;
	bool		kept;
};

/**
 * struct put - a page on its way
 * @page:	its place in write_bench.page
 */
struct put {
	struct node_io	io;
	uint32_t	page;
};

struct write_bench {
	struct bench	b;
	struct disk	d;
	struct node_owner owner;
	const struct disk_size *size;
	struct page	*page;
	uint32_t	nr_pages;
	uint32_t	out;		/* handed in and not released */
	uint32_t	waiting;	/* for room in the journal */
	bool		stop;
	uint64_t	rand;
	uint64_t	bytes;		/* of the block */
	uint64_t	written;	/* by this process, to its store */
	double		groups_s;	/* of the last block */
	struct put	put[MAX_IOS];
	uint32_t	wait[MAX_IOS];
};

/* ---- the node's owner ------------------------------------------------------------ */

static bool collect(struct node *n, uint64_t *cursor, void *arg)
{
	const struct write_bench *t = arg;
	uint64_t end = min(*cursor + COLLECT_PART, (uint64_t)t->nr_pages);

	for (; *cursor < end; ++*cursor)
		if (t->page[*cursor].kept)
			node_record_again(n, &t->page[*cursor].rec);
	return *cursor == t->nr_pages;
}

/* ---- pages -------------------------------------------------------------------------- */

static void put_next(struct write_bench *t, struct put *p);

static void put_done(struct node_io *io, int result)
{
	struct write_bench *t = io->arg;

	if (result)
		bench_die(&t->b, "a write of the node", result);
}

static void put_release(struct node_io *io)
{
	struct put *p = container_of(io, struct put, io);
	struct write_bench *t = io->arg;
	struct page *pg = &t->page[p->page];

	pg->rec.crc = io->crc;
	pg->kept = true;
	node_record_add(t->d.n, &pg->rec);
	t->out--;
	t->bytes += io->len;
	if (!t->stop)
		put_next(t, p);
}

/* Page @page has a slot: write it. */
static void put_start(struct write_bench *t, struct put *p)
{
	struct page *pg = &t->page[p->page];
	int err;

	pg->rec.len = t->size->bytes;
	memset(pg->rec.meta, (int)pg->rec.slot.seq, sizeof(pg->rec.meta));
	p->io = (struct node_io) {
		.dir		= NODE_WRITE,
		.prio		= NODE_PRIO_WRITEBACK,
		.len		= t->size->bytes,
		.slot		= pg->rec.slot,
		/* no more buffers than fio has */
		.addr		= t->d.mem + (uint64_t)(p - t->put) %
				  t->size->depth * t->size->bytes,
		.ident		= "bench",
		.ident_len	= 5,
		.done		= put_done,
		.release	= put_release,
		.arg		= t,
	};
	err = node_submit(t->d.n, &p->io);
	if (err)
		bench_die(&t->b, "handing I/O in", err);
	t->out++;
}

/* A slot for @p's page; false: not now. */
static bool put_slot(struct write_bench *t, struct put *p)
{
	int err = node_slot_alloc(t->d.n, t->size->bytes,
				  &t->page[p->page].rec.slot);

	if (err && err != -EAGAIN)
		bench_die(&t->b, "a slot", err);
	return !err;
}

/* Somebody's page goes, another one comes. */
static void put_next(struct write_bench *t, struct put *p)
{
	struct page *pg;

	do {
		p->page = (uint32_t)(bench_rand(&t->rand) % t->nr_pages);
		pg = &t->page[p->page];
	} while (!pg->kept);
	pg->kept = false;
	if (node_slot_free(t->d.n, &pg->rec.slot))
		bench_die(&t->b, "a slot that is free already", -EINVAL);
	if (put_slot(t, p))
		put_start(t, p);
	else
		t->wait[t->waiting++] = (uint32_t)(p - t->put);
}

static void turn(struct write_bench *t)
{
	disk_turn(&t->d);
	while (t->waiting) {
		struct put *p = &t->put[t->wait[t->waiting - 1]];

		if (!put_slot(t, p))
			return;
		t->waiting--;
		put_start(t, p);
	}
}

static void drain(struct write_bench *t)
{
	uint64_t deadline = deadline_in(DISK_WAIT_NS);

	t->stop = true;
	while (t->out || t->waiting) {
		if (deadline_past(deadline))
			bench_die(&t->b, "the last writes", -ETIMEDOUT);
		turn(t);
	}
}

/* Every slot has a page; all in order, once. */
static void fill(struct write_bench *t)
{
	uint32_t i = 0, k;

	t->nr_pages = (uint32_t)(t->d.n->capacity / t->size->bytes);
	memset(t->page, 0, t->nr_pages * sizeof(*t->page));
	while (i < t->nr_pages) {
		t->stop = true;
		for (k = 0; k < disk_nr_ios(t->size) && i < t->nr_pages; k++, i++) {
			t->put[k].page = i;
			while (!put_slot(t, &t->put[k]))
				turn(t);
			put_start(t, &t->put[k]);
		}
		drain(t);
	}
}

/* ---- the kernel's account ------------------------------------------------------------- */

/* What this process, and children that it has waited for, sent to disks; or 0. */
static uint64_t kernel_bytes(void)
{
	FILE *f = fopen("/proc/self/io", "re");
	unsigned long long v = 0;
	char line[128];

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "write_bytes: %llu", &v) == 1)
			break;
	if (f)
		fclose(f);
	return v;
}

/* ---- blocks --------------------------------------------------------------------------- */

/* Churn for @ns and at least @bytes; bytes a second. */
static double churn(struct write_bench *t, uint64_t ns, uint64_t bytes)
{
	uint64_t begin, now, end, groups = t->d.n->stats.journal_groups;
	uint64_t kernel = kernel_bytes();
	double rate;
	uint32_t i;

	t->stop = false;
	t->bytes = 0;
	begin = now_ns();
	end = begin + ns;
	for (i = 0; i < disk_nr_ios(t->size); i++)
		put_next(t, &t->put[i]);
	node_kick(t->d.n);
	do {
		turn(t);
		now = now_ns();
	} while (now < end || t->bytes < bytes);
	rate = (double)t->bytes * 1e9 / (double)(now - begin);
	groups = t->d.n->stats.journal_groups - groups;
	t->groups_s = (double)groups * 1e9 / (double)(now - begin);
	drain(t);
	t->written += kernel_bytes() - kernel;
	return rate;
}

static double node_block(struct write_bench *t)
{
	disk_rest(&t->d);
	return churn(t, BLOCK_NS, 0);
}

/* Fio that flushes as often as the node did. */
static double floor_block(struct write_bench *t, double *syncs_s)
{
	struct disk_share sh = disk_fio(&t->d, "randwrite", t->size->bytes,
					t->size->depth, BLOCK_NS, t->groups_s);

	*syncs_s = sh.syncs_s;
	return sh.bytes_s;
}

static double unflushed_block(struct write_bench *t)
{
	return disk_fio(&t->d, "randwrite", t->size->bytes, t->size->depth,
			BLOCK_NS, 0).bytes_s;
}

/* ---- numbers -------------------------------------------------------------------------- */

/* By the kernel, or by the node, whichever says more. */
static uint64_t all_written(const struct write_bench *t)
{
	const struct node_stats *st = &t->d.n->stats;

	return max(t->written, st->dir[NODE_WRITE].bytes + st->zeroed_bytes +
			       st->journal_bytes + st->ckpt_bytes);
}

static void put_result(struct write_bench *t, const char *table,
		       const char *key, double v)
{
	json_t *o = json_object_get(t->b.results, table);

	if (!o) {
		o = json_object();
		json_object_set_new(t->b.results, table, o);
	}
	json_object_set_new(o, key, json_real(round(v * 10000) / 10000));
}

static void amplification(struct write_bench *t)
{
	const struct node_stats *st = &t->d.n->stats;
	const uint64_t *data = &st->dir[NODE_WRITE].data_bytes;
	uint64_t want = (TIMES + 1) * t->d.n->capacity;
	char what[64];
	double v;

	if (*data < want)
		churn(t, 0, want - *data);
	v = (double)all_written(t) / (double)*data;
	bench_say("  %s: %.1f times the capacity, %llu groups of the journal, %llu checkpoints; %.2f MB by the kernel's account, %.2f MB by the node's",
		  t->size->name, (double)*data / (double)t->d.n->capacity,
		  (unsigned long long)st->journal_groups,
		  (unsigned long long)st->ckpts, (double)t->written / 1e6,
		  (double)(st->dir[NODE_WRITE].bytes + st->zeroed_bytes +
			   st->journal_bytes + st->ckpt_bytes) / 1e6);
	put_result(t, "write_amplification", t->size->name, v);
	snprintf(what, sizeof(what), "write_amplification of %s", t->size->name);
	bench_must(&t->b, what, v, "<=", 1.05);
}

/* A store that is made, zero-written and full. */
static void begin(struct write_bench *t)
{
	uint64_t kernel = kernel_bytes();

	disk_open(&t->d, NODE_WRITE, t->size->depth, &t->owner);
	if (node_buf_add(t->d.n, t->d.mem,
			 disk_nr_ios(t->size) * t->size->bytes))
		bench_say("  buffers could not be registered");
	fill(t);
	t->written = kernel_bytes() - kernel;
}

/* Floor, node, node, floor, and fio alone. */
static void one_round(struct write_bench *t, unsigned int i, double ratio[2],
		      double *noise, double *unflushed)
{
	double syncs[2], f0, f1, s0, s1, u;

	f0 = floor_block(t, &syncs[0]);
	s0 = node_block(t);
	s1 = node_block(t);
	f1 = floor_block(t, &syncs[1]);
	u = unflushed_block(t);
	ratio[0] = s0 / f0;
	ratio[1] = s1 / f1;
	*noise = max(f0, f1) / min(f0, f1);
	*unflushed = (s0 + s1) / 2 / u;
	bench_say("  %s round %u of %u: %.0f and %.0f MB/s (%.1f groups/s), fio %.0f and %.0f (%.1f and %.1f syncs/s), unflushed %.0f",
		  t->size->name, i + 1, ROUNDS, s0 / 1e6, s1 / 1e6,
		  t->groups_s, f0 / 1e6, f1 / 1e6, syncs[0], syncs[1], u / 1e6);
}

static void one_size(struct write_bench *t, const struct disk_size *size)
{
	const char *only = getenv("KVMM_BENCH_ONLY");
	double ratio[PAIRS], noise[ROUNDS], unflushed[ROUNDS], r, q;
	char what[64];
	unsigned int i;

	if (only && strcmp(only, size->name))
		return;
	t->size = size;
	begin(t);
	node_block(t);			/* the first floor needs its groups */
	for (i = 0; i < ROUNDS; i++)
		one_round(t, i, &ratio[2 * i], &noise[i], &unflushed[i]);
	r = bench_median(ratio, PAIRS);
	q = bench_median(noise, ROUNDS);
	put_result(t, "write_ratio", size->name, r);
	put_result(t, "noise", size->name, q);
	put_result(t, "write_ratio_unflushed", size->name,
		   bench_median(unflushed, ROUNDS));
	snprintf(what, sizeof(what), "write_ratio of %s", size->name);
	bench_must(&t->b, what, r, ">=", 0.90 / q);
	amplification(t);
	disk_close(&t->d);
}

int main(void)
{
	static struct write_bench t = { .rand = 0x9e3779b97f4a7c15 };
	size_t i;

	bench_init(&t.b, "write");
	disk_init(&t.d, &t.b, FILE_BYTES);
	t.owner = (struct node_owner){ .collect = collect, .arg = &t };
	t.page = calloc(FILE_BYTES / disk_sizes[0].bytes, sizeof(*t.page));
	if (!t.page)
		bench_die(&t.b, "memory", -ENOMEM);
	for (i = 0; i < DISK_NR_SIZES; i++)
		one_size(&t, &disk_sizes[i]);
	free(t.page);
	disk_fini(&t.d);
	return bench_finish(&t.b);
}
