/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recover - how soon the pages on a disk are found again, and how many
 *
 * seconds_1mi: node and mm are made over a store with 1 Mi pages; the time is
 * from nvme_create() until the node is online and mm has them all. Each opening is
 * a process of its own, which ends as a crash would. The floor reads the bytes
 * that such an opening reads, and no more: checkpoint and journal, O_DIRECT, in
 * pieces as large, and does nothing with them; seq_read_ratio is against that.
 *
 * cpu_seconds is the CPU time of one opening: on a machine that others use the
 * time is theirs, too, and the floor, which hardly computes, does not show it.
 *
 * node_bytes_per_record: what the node alone keeps in its heap afterwards, for an
 * owner that keeps nothing. total_bytes_per_page: that, and what mm says that it
 * keeps for the sake of its pages.
 *
 * hits_kept: the recorded requests are replayed through a kvmmd with DRAM and
 * NVMe, twice. The second time each hit is noted that NVMe gave, of a page that was
 * there before. Then kvmmd is killed, its DRAM is gone, and the requests come
 * again: how many of those hit once more, before anybody published them anew.
 */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <jansson.h>

#include "daemon/mm/mm.h"
#include "daemon/node/nvme.h"
#include "ipc/base/fd.h"
#include "tests/bench/bench.h"
#include "tests/bench/many.h"
#include "tests/bench/replay.h"

#define HOST_BYTES	(UINT64_C(64) << 20)
#define ROUNDS		5u
#define READ_BYTES	(4u << 20)
#define WAIT_NS		(120 * NSEC_PER_SEC)
#define DRAM_BYTES	(UINT64_C(32) << 20)	/* 4,096 pages */
#define NVME_BYTES	(UINT64_C(1) << 30)	/* records for 65,536: all 39,116 of them */

/**
 * struct opened - what a process that opened the store has seen
 * @ok:		all went well
 * @ns:		until online
 * @pages:	in mm; or records, where there is no mm
 * @node_heap:	of the node alone, bytes
 * @metadata:	mm's own account, bytes
 * @peak_kib:	of memory, while it was going on
 * @cpu_s:	CPU time that it took
 * @ckpt_off, @ckpt_bytes: what was read of the checkpoint
 * @ring_off, @ring_blocks: the journal, of which blocks
 * @tail:	to
 * @head:	were read
 */
struct opened {
	bool		ok;
	uint64_t	ns;
	uint64_t	pages;
	uint64_t	node_heap;
	uint64_t	metadata;
	uint64_t	peak_kib;
	double		cpu_s;
	uint64_t	ckpt_off, ckpt_bytes;
	uint64_t	ring_off, ring_blocks;
	uint64_t	tail, head;
};

struct recover {
	struct bench	b;
	char		dir[256];
	char		path[300];
	struct opened	*shm;		/* of the child */
	char		*buf;		/* READ_BYTES */
	int		fd;		/* the store, O_DIRECT */
};

/* ---- an opening: in a child ---------------------------------------------------------- */

/**
 * struct opening - node, and mm over it
 * @mm:		NULL: the node alone
 */
struct opening {
	struct recover	*t;
	struct work_pool *pool;
	struct node	*nvme, *host;
	struct mm	*mm;
	struct opened	*o;
};

static void give_up(const char *what, int err) __attribute__((noreturn));

static void give_up(const char *what, int err)
{
	bench_say("recover: %s: %s", what, strerror(-err));
	_exit(1);
}

static uint64_t heap_bytes(void)
{
	struct mallinfo2 mi = mallinfo2();

	return mi.uordblks + mi.hblkhd;
}

static void turn(struct opening *op)
{
	struct pollfd p[3] = {
		{ .fd = work_fd(op->pool), .events = POLLIN },
		{ .fd = node_fd(op->nvme), .events = POLLIN },
		{ .fd = op->host ? node_fd(op->host) : -1, .events = POLLIN },
	};
	uint64_t next;

	work_poll(op->pool, 0);
	node_poll(op->nvme, 0);
	next = node_next_deadline(op->nvme);
	if (op->mm) {
		node_poll(op->host, 0);
		next = min(next, mm_run(op->mm, now_ns()));
	}
	if (next && !work_sleep(op->pool, true))
		poll(p, 3, min(deadline_left_ms(next), 100));
	work_sleep(op->pool, false);
}

static void until_online(struct opening *op)
{
	uint64_t deadline = deadline_in(WAIT_NS);

	while (op->nvme->state == NODE_STARTING && !deadline_past(deadline))
		turn(op);
	if (op->nvme->state != NODE_ONLINE) {
		bench_say("%s", op->nvme->why);
		give_up("opening the store", -EIO);
	}
}

static void note_layout(struct opening *op)
{
	const struct nvme *nv = to_nvme(op->nvme);
	const struct nvme_super *sb = &nv->open.super;
	struct opened *o = op->o;
	uint64_t journal;

	o->tail = nv->journal.tail;
	o->head = nv->journal.head;
	o->ring_off = sb->journal_off;
	o->ring_blocks = sb->journal_bytes / NVME_BLOCK;
	journal = (o->head - o->tail) * NVME_BLOCK;
	o->ckpt_off = sb->ckpt_off + (uint64_t)nv->ckpt.area * sb->ckpt_bytes;
	/* what is read beyond the journal's end is not what a floor would read */
	o->ckpt_bytes = op->nvme->stats.recover_bytes -
			min(op->nvme->stats.recover_bytes, journal);
	o->ckpt_bytes = min(o->ckpt_bytes, sb->ckpt_bytes);
}

static void open_node(struct opening *op)
{
	struct nvme_opts no;
	int err;

	many_opts(&no, op->t->path);
	err = nvme_create(&no, op->pool, &op->nvme);
	if (err)
		give_up("a node", err);
}

static unsigned int take_all(struct node *n, const struct node_record *rec,
			     unsigned int nr, bool *taken, void *arg)
{
	memset(taken, true, nr);
	return nr;
}

static bool collect_none(struct node *n, uint64_t *cursor, void *arg)
{
	return true;
}

static void alone_main(struct opening *op)
{
	static const struct node_owner owner = {
		.records = take_all, .collect = collect_none,
	};
	uint64_t heap = heap_bytes();

	open_node(op);
	node_set_owner(op->nvme, &owner);
	until_online(op);
	op->o->node_heap = heap_bytes() - heap;
	op->o->pages = op->nvme->stats.recovered;
	note_layout(op);
}

/* ---- with mm ---------------------------------------------------------------------------- */

static void no_complete(struct mm_client *c, struct mm_win *win,
			const struct ring_cqe *cqe,
			const struct ring_result *res)
{
}

static void no_index(struct mm_space *sp)
{
}

static void no_member(struct mm_client *c, struct mm_client *peer, bool gone)
{
}

static void no_kick(struct mm_client *c)
{
}

static void no_evict(struct mm_client *c, const char *why)
{
}

static void said(void *arg, bool bad, const char *sentence)
{
	if (bad)
		bench_say("  %s", sentence);
}

static const struct mm_ops ops = {
	.complete	= no_complete,
	.index_grew	= no_index,
	.member		= no_member,
	.kick_client	= no_kick,
	.evict_client	= no_evict,
	.said		= said,
};

static void sum_space(const struct mm_space_info *si, void *arg)
{
	struct opened *o = arg;

	o->pages += si->pages;
	o->metadata += si->metadata_bytes;
}

static void open_mm(struct opening *op)
{
	struct host_opts ho = {
		.name = "dram0", .bytes = HOST_BYTES, .numa = -1, .threads = 1,
	};
	struct mm_opts mo = {
		.hdr = bench_shm(&op->t->b, sizeof(struct kvmm_hdr)),
		.pool = op->pool, .ops = &ops, .epoch = 1,
		.direct_reclaim_ns = 5 * NSEC_PER_MSEC,
		.fetch_ns = 2 * NSEC_PER_SEC, .shrink_ack_ns = NSEC_PER_SEC,
		.nr_nodes = 2,
	};
	struct errmsg e;
	int err = host_create(&ho, &op->host);

	if (!err)
		err = mm_policy_load("lru", &mo.policy, &e);
	if (err)
		give_up("memory and a policy", err);
	mo.node[0] = (struct mm_node_opts){
		.node = op->host, .kind = KVMM_NODE_HOST, .below = 1,
		.size_max = HOST_BYTES,
	};
	mo.node[1] = (struct mm_node_opts){
		.node = op->nvme, .kind = KVMM_NODE_NVME,
		.below = KVMM_NODE_NONE, .size_max = MANY_BYTES,
	};
	err = mm_create(&mo, &op->mm, &e);
	if (err)
		give_up(e.text, err);
}

static double cpu_s(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static void whole_main(struct opening *op)
{
	uint64_t begin = now_ns();
	double cpu = cpu_s();
	struct rusage ru;

	open_node(op);
	open_mm(op);
	until_online(op);
	op->o->ns = now_ns() - begin;
	op->o->cpu_s = cpu_s() - cpu;
	mm_for_each_space(op->mm, sum_space, op->o);
	op->o->metadata += mm_kept_bytes(op->mm) + mm_admit_bytes(op->mm);
	getrusage(RUSAGE_SELF, &ru);
	op->o->peak_kib = (uint64_t)ru.ru_maxrss;
}

/* Open the store in a process that dies with it; exits when that fails. */
static void open_once(struct recover *t, void (*fn)(struct opening *op))
{
	struct opening op = { .t = t, .o = t->shm };
	int status, err;
	pid_t pid;

	memset(t->shm, 0, sizeof(*t->shm));
	fflush(NULL);
	pid = fork();
	if (pid < 0)
		bench_die(&t->b, "fork", -errno);
	if (!pid) {
		err = work_create("bench", 1, &op.pool);
		if (err)
			give_up("a worker", err);
		fn(&op);
		op.o->ok = true;
		_exit(0);
	}
	waitpid(pid, &status, 0);
	if (!t->shm->ok)
		bench_die(&t->b, "an opening", -ECHILD);
	if (t->shm->pages != MANY_PAGES) {
		bench_say("%llu pages", (unsigned long long)t->shm->pages);
		bench_die(&t->b, "pages that are missing", -ENOENT);
	}
}

/* ---- subject and floor --------------------------------------------------------------------- */

static double subject(void *arg)
{
	struct recover *t = arg;

	open_once(t, whole_main);
	return (double)t->shm->ns / MANY_PAGES;
}

static void read_range(struct recover *t, uint64_t off, uint64_t len)
{
	while (len) {
		size_t n = min(len, (uint64_t)READ_BYTES);

		if (pread(t->fd, t->buf, n, (off_t)off) != (ssize_t)n)
			bench_die(&t->b, "reading", errno ? -errno : -EIO);
		off += n;
		len -= n;
	}
}

static double floor_read(void *arg)
{
	struct recover *t = arg;
	const struct opened o = *t->shm;
	uint64_t begin = now_ns(), at = o.tail;

	read_range(t, o.ckpt_off, o.ckpt_bytes);
	while (at < o.head) {
		uint64_t n = min(o.head - at,
				 o.ring_blocks - at % o.ring_blocks);

		read_range(t, o.ring_off + at % o.ring_blocks * NVME_BLOCK,
			   n * NVME_BLOCK);
		at += n;
	}
	return (double)(now_ns() - begin) / MANY_PAGES;
}

/* The subject leaves its own account: the floor's is of the opening before. */
static double subject_again(void *arg)
{
	struct recover *t = arg;
	struct opened layout = *t->shm;
	double v = subject(arg);

	layout.metadata = t->shm->metadata;
	layout.peak_kib = t->shm->peak_kib;
	layout.cpu_s = t->shm->cpu_s;
	*t->shm = layout;
	return v;
}

static void measure_many(struct recover *t)
{
	double node_bytes, read_mb, total;
	struct bench_ratio r;

	many_make(&t->b, t->path);
	t->fd = open(t->path, O_RDONLY | O_DIRECT | O_CLOEXEC);
	if (t->fd < 0)
		bench_die(&t->b, "the store", -errno);
	open_once(t, alone_main);
	node_bytes = (double)t->shm->node_heap / MANY_PAGES;
	read_mb = (double)(t->shm->ckpt_bytes +
			   (t->shm->head - t->shm->tail) * NVME_BLOCK) / 1e6;
	bench_abba("1 Mi pages, ns each", ROUNDS, subject_again, floor_read, t,
		   &r);
	total = node_bytes + (double)t->shm->metadata / MANY_PAGES;
	close_fd(&t->fd);
	unlink(t->path);

	bench_result(&t->b, "seconds_1mi", r.subject * MANY_PAGES / 1e9);
	bench_result(&t->b, "floor_seconds", r.floor * MANY_PAGES / 1e9);
	bench_result(&t->b, "read_mb", read_mb);
	bench_result(&t->b, "seq_read_ratio", r.ratio);
	bench_result(&t->b, "noise", r.noise);
	bench_result(&t->b, "node_bytes_per_record", node_bytes);
	bench_result(&t->b, "total_bytes_per_page", total);
	bench_result(&t->b, "cpu_seconds", t->shm->cpu_s);
	bench_result(&t->b, "peak_mb", (double)t->shm->peak_kib * 1024 / 1e6);
	bench_must(&t->b, "seconds_1mi", r.subject * MANY_PAGES / 1e9, "<=", 2);
	bench_must(&t->b, "seq_read_ratio", r.ratio, "<=", 3);
	bench_must(&t->b, "node_bytes_per_record", node_bytes, "<=", 96);
	bench_must(&t->b, "total_bytes_per_page", total, "<=", 224);
}

/* ---- hits that are kept ---------------------------------------------------------------- */

static void load_trace(struct recover *t, struct trace *tr)
{
	const char *src = getenv("KVMM_SRC");
	static const char *const file[] = { "conversation", "agents" };
	char path[512];
	size_t i;
	int err = 0;

	for (i = 0; i < ARRAY_SIZE(file) && !err; i++) {
		snprintf(path, sizeof(path), "%s/tests/data/%s.jsonl.zst",
			 src ? src : ".", file[i]);
		err = trace_add(tr, path);
	}
	if (!err)
		err = trace_seal(tr);
	if (err)
		bench_die(&t->b, "recorded requests", err);
}

/* Until nvme0 is online and nothing is being written to it. */
static void nvme_rests(struct recover *t, struct test_daemon *d)
{
	struct timespec ts = ns_to_timespec(10 * NSEC_PER_MSEC);
	uint64_t deadline = deadline_in(WAIT_NS);
	bool rests;

	do {
		json_t *status, *n, *w;
		int err = td_admin(d, "status", &status);

		if (err || deadline_past(deadline))
			bench_die(&t->b, "nvme0", err ? err : -ETIMEDOUT);
		n = json_array_get(json_object_get(status, "nodes"), 1);
		w = json_object_get(n, "write");
		rests = !strcmp(json_string_value(json_object_get(n, "state")),
				"online") &&
			!json_integer_value(json_object_get(w, "inflight")) &&
			!json_integer_value(json_object_get(w, "queued"));
		json_decref(status);
		nanosleep(&ts, NULL);
	} while (!rests);
}

static void say_replay(const char *what, const struct trace *tr,
		       const struct replay *r)
{
	size_t i, memory = 0, below = 0;

	for (i = 0; i < tr->page_len; i++) {
		memory += r->from[i] == REPLAY_MEMORY;
		below += r->from[i] == REPLAY_BELOW;
	}
	bench_say("  %s: %zu pages asked, %llu hit; of those from before it %zu in DRAM and %zu on NVMe, %llu late",
		  what, tr->page_len, (unsigned long long)r->hits, memory,
		  below, (unsigned long long)r->late);
}

static void report_hits(struct recover *t, const struct trace *tr,
			const struct replay *was, const struct replay *is)
{
	uint64_t gave = 0, kept = 0, wrong = was->wrong + is->wrong;
	double share;
	size_t i;

	for (i = 0; i < tr->page_len; i++) {
		if (was->from[i] != REPLAY_BELOW)
			continue;
		gave++;
		kept += is->from[i] != REPLAY_MISS;
	}
	share = gave ? (double)kept / (double)gave : 0;
	bench_result(&t->b, "nvme_hits", (double)gave);
	bench_result(&t->b, "hits_kept", share);
	bench_result(&t->b, "wrong_pages", (double)wrong);
	bench_must(&t->b, "pages that NVMe gave", (double)gave, ">=", 10000);
	bench_must(&t->b, "hits_kept", share, ">=", 0.9);
	bench_must(&t->b, "wrong_pages", (double)wrong, "==", 0);
}

static void measure_hits(struct recover *t)
{
	/* who evicts waits for the disk, and forgets nothing */
	struct td_opts o = {
		.dram_bytes = DRAM_BYTES, .nvme_bytes = NVME_BYTES,
		.io_timeout = "20s",
		.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
	};
	struct replay was, is;
	struct test_daemon d;
	struct trace tr = { .nr = 0 };

	load_trace(t, &tr);
	bench_daemon(&t->b, &d, &o);
	nvme_rests(t, &d);
	replay_run(&t->b, d.socket, &tr, &was);
	say_replay("filled", &tr, &was);
	replay_fini(&was);
	replay_run(&t->b, d.socket, &tr, &was);
	say_replay("before", &tr, &was);

	/* at once: what was said in the last moments may be lost */
	td_kill(&d);
	if (td_start(&d))
		bench_die(&t->b, "kvmmd once more", -ECHILD);
	nvme_rests(t, &d);
	replay_run(&t->b, d.socket, &tr, &is);
	say_replay("after", &tr, &is);
	report_hits(t, &tr, &was, &is);
	td_fini(&d);
	t->b.kvmmd = NULL;
	replay_fini(&was);
	replay_fini(&is);
	trace_fini(&tr);
}

int main(void)
{
	static struct recover t = { .fd = -1 };
	int err;

	bench_init(&t.b, "recover");
	err = td_tmpdir(NULL, "kvmm-recover", t.dir, sizeof(t.dir));
	if (err)
		bench_die(&t.b, "a folder", err);
	snprintf(t.path, sizeof(t.path), "%s/nvme", t.dir);
	t.shm = bench_shm(&t.b, sizeof(*t.shm));
	if (posix_memalign((void **)&t.buf, NVME_BLOCK, READ_BYTES))
		bench_die(&t.b, "memory", -ENOMEM);
	measure_many(&t);
	measure_hits(&t);
	free(t.buf);
	td_rmtree(t.dir);
	return bench_finish(&t.b);
}
