/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The disk has a volatile cache, and the power goes: what is left is one of the
 * states that flushes and write-throughs allow, and no better one.
 *
 * The other tests with power cuts cannot show that. What the machine wrote is in
 * the host's memory when it is switched off, and stays there, flushed or not. Here
 * log-writes records what kvmmd and its kernel really asked of the device, and
 * images are made of it in which all that nobody flushed is missing, or some of it,
 * or parts of single writes. kvmmd is started on each.
 *
 * What kvmmd promises: a record is on the medium 50 ms after it was made, its data
 * about a second after it was written, and is a miss until then.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/dm.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define DISK		"/dev/nvme0n1"
#define LOG_DISK	"/dev/nvme1n1"
#define STORE		(40 * MIB)
#define DRAM		(4 * MIB)
#define CHAIN		8		/* pages */
#define CHAINS		48
#define SECTION		6		/* chains from mark to mark */
#define CHURN		100		/* chains more than the store holds */
#define CHURN_SECTION	5
#define SETTLE		25		/* chains from mark to mark */
#define CHURNED		1000		/* number of the first */
#define PASSES		40		/* see read_all() */
#define LONG_WAIT	60000
#define GROUP_MS	500		/* a record is on the medium by then */
#define FLUSH_MS	2500		/* and data */

/**
 * struct promise - what must be found in an image
 * @records:	pages whose records were written through
 * @pages:	and those whose data was flushed
 */
struct promise {
	unsigned int	records;
	unsigned int	pages;
};

static struct td_opts opts = {
	.dram_bytes = DRAM, .nvme_bytes = STORE, .io_timeout = "20s",
	.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
};

static struct wlog wl;
static char *image;

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

static unsigned int below(struct test_daemon *d)
{
	return (unsigned int)(ta_node(d, "nvme0", "bytes_pages") /
			      TC_PAGE_BYTES);
}

static void begin(struct fx *f, const char *path)
{
	opts.nvme_path = path;
	fx_start(f, &opts);
	tc_open(&f->c[0], f->d.socket, NULL);
}

/* ---- recording --------------------------------------------------------------- */

static void put(struct fx *f, uint64_t first, unsigned int n)
{
	for (unsigned int i = 0; i < n; i++) {
		T_EQ(tc_put(&f->c[0], first + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
}

/* Pages that have left the store, for room or with what they hung on. */
static unsigned int left(struct test_daemon *d)
{
	return (unsigned int)(ta_counter(d, "nvme0", "pgdrop") +
			      ta_counter(d, "nvme0", "pgdrop_gone") +
			      ta_counter(d, "nvme0", "pgdrop_orphan"));
}

static void say_left(struct fx *f)
{
	dm_mark("kvmm", "n:0:0:%u", left(&f->d));
}

/*
 * Two marks: "r:PAGES:LEFT:NOW" when the records of so many pages must be there, "d"
 * when their data must be, too. LEFT had left when they were counted, NOW when
 * the mark was made. Two more say that again, for cuts before them: see left_at().
 * Nothing is flushed but by kvmmd.
 */
static void mark(struct fx *f)
{
	unsigned int pages, was;

	T_WAIT(LONG_WAIT, writes_rest(&f->d));
	was = left(&f->d);
	pages = below(&f->d);
	usleep(GROUP_MS * 1000);
	dm_mark("kvmm", "r:%u:%u:%u", pages, was, left(&f->d));
	usleep(FLUSH_MS * 1000);
	dm_mark("kvmm", "d:%u:%u:%u", pages, was, left(&f->d));
	say_left(f);
	say_left(f);
}

static void record(struct fx *f)
{
	unsigned int i;

	dm_zero(DISK, STORE);
	dm_create("kvmm", "0 %llu log-writes " DISK " " LOG_DISK,
		  (unsigned long long)(STORE / 512));
	begin(f, DM_PATH("kvmm"));
	for (i = 0; i < CHAINS; i += SECTION) {
		put(f, 1 + i, SECTION);
		mark(f);
	}
	T_EQ(ta_counter(&f->d, "nvme0", "pgdrop"), 0);
	/* from here on the oldest go, and their slots are used again */
	for (i = 0; i < CHURN; i += CHURN_SECTION) {
		put(f, CHURNED + i, CHURN_SECTION);
		if (i % SETTLE)
			say_left(f);
		else
			mark(f);
	}
	printf("# %u pages left the store\n", left(&f->d));
	T_CHECK(left(&f->d) > CHAINS * CHAIN / 2);
	tc_close(&f->c[0]);
	td_kill(&f->d);
	td_fini(&f->d);
	dm_remove("kvmm");
}

/* ---- cutting ----------------------------------------------------------------- */

struct mark {
	char		what;
	unsigned int	pages, left, now;
};

static bool mark_at(unsigned int i, struct mark *m)
{
	return (wl.e[i].flags & WLOG_MARK) &&
	       sscanf(wl.e[i].data, "%c:%u:%u:%u", &m->what, &m->pages,
		      &m->left, &m->now) == 4;
}

/* Pages that had left when the log was cut, and no fewer. */
static unsigned int left_at(unsigned int cut)
{
	unsigned int i, behind = 0;
	struct mark m = { 0 };

	/* the first mark behind it was made of what was counted before */
	for (i = cut; i < wl.nr && behind < 2; i++)
		behind += mark_at(i, &m);
	for (i = wl.nr; !behind && i && !mark_at(i - 1, &m);)
		i--;
	return m.now;
}

/* What has left since it was counted may be missing, its slot used again. */
static struct promise promised(unsigned int cut)
{
	unsigned int gone = left_at(cut);
	struct promise p = { 0 };
	struct mark m;

	for (unsigned int i = 0; i < cut; i++) {
		unsigned int n;

		if (!mark_at(i, &m))
			continue;
		n = m.pages - min(m.pages, gone - m.left);
		if (m.what == 'r')
			p.records = n;
		else if (m.what == 'd')
			p.pages = n;
	}
	return p;
}

/* All before @cut, and nothing else: the cache was lost. */
static void cut_strictly(unsigned int cut)
{
	memset(image, 0, STORE);
	for (unsigned int i = 0; i < cut; i++)
		wlog_apply(&wl, i, image, STORE);
}

/*
 * All before @cut, what was written through until the next flush, and of the rest
 * that this flush brings some, some in parts, in another order.
 */
static void cut_with_luck(unsigned int cut, struct rng *rng)
{
	unsigned int end = wlog_flush_after(&wl, cut);

	cut_strictly(cut);
	for (unsigned int i = cut; i < end; i++) {
		const struct wlog_entry *e = &wl.e[i];
		uint64_t luck = rng_below(rng, 4);

		if (e->flags & WLOG_FUA || luck == 1)
			wlog_apply(&wl, i, image, STORE);
		else if (luck == 2)
			wlog_tear(&wl, i, image, STORE, rng_next(rng));
	}
}

/* All before @cut, and a part of the write that was under way. */
static void cut_in_a_write(unsigned int cut, struct rng *rng)
{
	cut_strictly(cut);
	if (cut < wl.nr)
		wlog_tear(&wl, cut, image, STORE, rng_next(rng));
}

static void write_image(void)
{
	int fd = open(DISK, O_RDWR | O_DIRECT | O_CLOEXEC);
	uint64_t at;

	T_CHECK(fd >= 0);
	for (at = 0; at < STORE; at += 4 * MIB)
		T_EQ(pwrite(fd, image + at, 4 * MIB, (off_t)at), 4 * MIB);
	T_EQ(fsync(fd), 0);
	close(fd);
}

static unsigned int read_once(struct fx *f)
{
	struct tc *c = &f->c[0];
	unsigned int i, got = 0;

	for (i = 0; i < CHAINS; i++)
		got += CHAIN - tc_get(c, 1 + i, CHAIN, 20000).missed;
	for (i = 0; i < CHURN; i++)
		got += CHAIN - tc_get(c, CHURNED + i, CHAIN, 20000).missed;
	return got;
}

/*
 * Every byte that tc_get() gives is right, or it fails. Records without their data
 * are found by the checksum, and some in a row are taken for a failing device,
 * which is not asked for a while: so until there are none.
 */
static unsigned int read_all(struct fx *f)
{
	unsigned int i, got = 0;

	for (i = 0; i < PASSES; i++) {
		uint64_t bad = ta_counter(&f->d, "nvme0", "pgcrc_fail");

		got = read_once(f);
		if (ta_counter(&f->d, "nvme0", "pgcrc_fail") == bad)
			break;
		T_WAIT(LONG_WAIT, strcmp(ta_node_state(&f->d, "nvme0"),
					 "failed"));
	}
	T_CHECK(i < PASSES, "there are wrong checksums again and again");
	return got;
}

/* kvmmd on what is left. */
static void judge(struct fx *f, const struct promise *p, const char *what,
		  unsigned int cut)
{
	unsigned int got, records;

	write_image();
	begin(f, DISK);
	records = (unsigned int)ta_counter(&f->d, "nvme0", "pgrecover");
	T_CHECK(records >= p->records,
		"%s at %u: %u of %u records were found", what, cut, records,
		p->records);
	T_EQ(ta_counter(&f->d, "nvme0", "recover_orphan"), 0);
	T_EQ(ta_counter(&f->d, "nvme0", "recover_bad"), 0);
	T_EQ(ta_node(&f->d, "nvme0", "node.recover_dropped"), 0);
	got = read_all(f);
	T_CHECK(got >= p->pages, "%s at %u: %u of %u pages were got", what, cut,
		got, p->pages);
	T_EQ(tc_put(&f->c[0], 9000, 0, CHAIN), CHAIN);
	ta_check(&f->d);
	printf("# %s at %u of %u: %u records (%u), %u pages (%u)\n", what, cut,
	       wl.nr, records, p->records, got, p->pages);
	tc_close(&f->c[0]);
	td_kill(&f->d);
	td_fini(&f->d);
}

static void at_marks(struct fx *f)
{
	for (unsigned int i = 0; i < wl.nr; i++) {
		struct promise p = promised(i + 1);
		struct mark m;

		if (!mark_at(i, &m) || m.what == 'n')
			continue;
		cut_strictly(i + 1);
		judge(f, &p, "mark", i + 1);
	}
}

static void between(struct fx *f)
{
	unsigned int n, nr = test_long() ? 150 : 12;
	struct rng rng;

	rng_seed(&rng, test_seed());
	for (n = 0; n < nr; n++) {
		unsigned int cut = (unsigned int)rng_below(&rng, wl.nr + 1);
		struct promise p = promised(cut);

		if (n % 3 == 0)
			cut_strictly(cut);
		else if (n % 3 == 1)
			cut_with_luck(cut, &rng);
		else
			cut_in_a_write(cut, &rng);
		judge(f, &p, n % 3 == 0 ? "cut" : n % 3 == 1 ? "luck" : "torn",
		      cut);
	}
}

static void what_was_flushed_is_found_after_every_cut(void **state)
{
	unsigned int nr_flush = 0, nr_fua = 0, nr_mark = 0, i;
	struct fx *f = *state;

	printf("# seed %llu\n", (unsigned long long)test_seed());
	record(f);
	wlog_read(&wl, LOG_DISK);
	for (i = 0; i < wl.nr; i++) {
		nr_flush += !!(wl.e[i].flags & WLOG_FLUSH);
		nr_fua += !!(wl.e[i].flags & WLOG_FUA);
		nr_mark += !!(wl.e[i].flags & WLOG_MARK);
	}
	printf("# %u entries: %u flushes, %u written through, %u marks\n",
	       wl.nr, nr_flush, nr_fua, nr_mark);
	T_CHECK(nr_mark > 2 * CHAINS / SECTION);
	image = aligned_alloc(4096, STORE);
	T_CHECK(image != NULL);
	at_marks(f);
	between(f);
}

static int teardown(void **state)
{
	int err = fx_teardown(state);

	wlog_free(&wl);
	free(image);
	image = NULL;
	dm_run("dmsetup info kvmm && dmsetup remove --retry kvmm");
	return err;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			what_was_flushed_is_found_after_every_cut,
			fx_setup, teardown),
	};

	dm_init();
	setvbuf(stdout, NULL, _IOLBF, 0);
	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
