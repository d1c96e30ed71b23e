/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages go down to the NVMe node and come back, byte for byte; and the node is
 * taken away, breaks, fills up, becomes read-only, stalls and lies. Whatever it
 * does, requests end in time, a page that cannot be had is a miss, what lies in
 * DRAM is served as ever, and the laws hold.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define CHAIN		16		/* pages */
#define DRAM		(16 * MIB)	/* 256 frames */
#define NVME		(128 * MIB)	/* 2,048 slots */

static const char *const engines[] = { "io_uring", "threads" };
#define NR_ENGINES	2

/*
 * A cache that is filled faster than it can be written forgets, and so does one
 * over a device that is late three times in a row; here both may take so long
 * that it does so only when the device takes nothing.
 */
static const char patient[] = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}";

static struct td_opts opts(const char *engine)
{
	return (struct td_opts) {
		.dram_bytes = DRAM, .nvme_bytes = NVME, .engine = engine,
		.config = patient, .io_timeout = "5s",
	};
}

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

/* Nothing is on its way down, and what comes up finds frames. */
static bool at_rest(struct test_daemon *d)
{
	uint64_t free = ta_node(d, "dram0", "frames.free");
	uint64_t ready = ta_node(d, "dram0", "frames.ready");
	uint64_t dirty = ta_node(d, "dram0", "pages_dirty");

	return writes_rest(d) && free + ready - dirty >= CHAIN + CHAIN / 2;
}

/* So slowly that nothing has to be forgotten. */
static void put_slowly(struct test_daemon *d, struct tc *c, uint64_t first,
		       unsigned int n)
{
	unsigned int i;

	for (i = 0; i < n; i++) {
		T_EQ(tc_put(c, first + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(d));
	}
}

/* How many pages of some chains cannot be had now. */
static unsigned int missing(struct tc *c, uint64_t first, unsigned int n)
{
	unsigned int i, missed = 0;

	for (i = 0; i < n; i++)
		missed += tc_get(c, first + i, CHAIN, 5000).missed;
	return missed;
}

/* Pages that have a copy below now. */
static unsigned int below(struct test_daemon *d)
{
	return (unsigned int)(ta_node(d, "nvme0", "used") / TC_PAGE_BYTES);
}

/* The floor after every trouble: all but a tenth of what should be there is. */
#define MOST_THERE(c, first, n)						\
	do {								\
		unsigned int __gone = missing(c, first, n);		\
									\
		T_CHECK(__gone <= (n) * CHAIN / 10, "%u of %u pages",	\
			__gone, (n) * CHAIN);				\
	} while (0)

/* For each engine one after the other, a daemon and a client. */
static void for_each_engine(struct fx *f, const struct td_opts *more,
			    void (*fn)(struct fx *f))
{
	unsigned int i;

	for (i = 0; i < NR_ENGINES; i++) {
		struct td_opts o = *more;

		o.engine = engines[i];
		fx_start(f, &o);
		tc_open(&f->c[0], f->d.socket, NULL);
		fn(f);
		tc_close(&f->c[0]);
		ta_baseline(&f->d, LONG_WAIT);
		ta_check(&f->d);
		fx_stop(f);
		td_fini(&f->d);
	}
}

/* -- down and up --------------------------------------------------------------------- */

static void spill_and_load(struct fx *f)
{
	unsigned int chains = 60, i;
	struct tc *c = &f->c[0];
	struct tc_got sum = { 0 };

	put_slowly(&f->d, c, 1, chains);
	T_CHECK(ta_counter(&f->d, "dram0", "pgdemote") > 500);
	for (i = 0; i < chains; i++) {
		struct tc_got got = tc_get(c, 1 + i, CHAIN, 5000);

		sum.resident += got.resident;
		sum.fetched += got.fetched;
		sum.missed += got.missed;
	}
	/* four times what DRAM holds, and nothing is lost */
	T_EQ(sum.missed, 0);
	T_CHECK(sum.fetched > 500, "%u resident, %u fetched", sum.resident,
		sum.fetched);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	T_CHECK(ta_counter(&f->d, "dram0", "pgload") >= sum.fetched);
	T_EQ(ta_counter(&f->d, "dram0", "bytes_copied_shared"), 0);
}

static void pages_spill_and_come_back_byte_identical(void **state)
{
	struct td_opts o = opts(NULL);

	for_each_engine(*state, &o, spill_and_load);
}

/* More than both nodes hold: what is left of it is right, nothing breaks. */
static void overflow(struct fx *f)
{
	struct tc *c = &f->c[0];
	unsigned int i, there = 0, slots;

	put_slowly(&f->d, c, 1, 120);
	for (i = 0; i < 120; i++) {
		struct tc_got got = tc_get(c, 1 + i, CHAIN, 5000);

		there += got.resident + got.fetched;
	}
	/* a full store: the frames hold copies of what is there, or more */
	slots = (unsigned int)(ta_node(&f->d, "nvme0", "capacity") /
			       TC_PAGE_BYTES);
	T_CHECK(there >= slots * 9 / 10, "%u pages, %u slots", there, slots);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgdrop") +
		ta_counter(&f->d, "nvme0", "pgdrop_gone") > 0);
	T_CHECK(ta_node(&f->d, "nvme0", "used") <=
		ta_node(&f->d, "nvme0", "capacity"));
}

static void a_full_store_gives_up_what_is_old(void **state)
{
	struct td_opts o = opts(NULL);

	o.nvme_bytes = 64 * MIB;
	for_each_engine(*state, &o, overflow);
}

/* -- one read for all ------------------------------------------------------------------ */

static long get(void *shm, long chain, long n)
{
	struct tc_got got = tc_get(fx_c(), (uint64_t)chain, (uint32_t)n, 10000);

	T_EQ(got.missed, 0);
	return got.fetched;
}

static void one_read_serves_every_process(void **state)
{
	struct td_opts o = opts(NULL);
	struct fx *f = *state;
	uint64_t reads, shared;
	uint32_t here, below;
	unsigned int i;

	/* five magazines are more than 256 frames */
	o.dram_bytes = 3 * DRAM;
	fx_start(f, &o);
	for (i = 0; i < 4; i++)
		fx_client(f, i, 0, NULL);
	tc_open(&f->c[0], f->d.socket, NULL);
	here = fx_spill(&f->c[0], 1, CHAIN, 100);
	below = CHAIN - here;
	T_WAIT(LONG_WAIT, at_rest(&f->d));
	reads = ta_node(&f->d, "nvme0", "read.ios");
	shared = ta_counter(&f->d, "dram0", "fetch_shared");
	/* slow enough for all to come while it is under way */
	ta_fault(&f->d, "nvme0:read:stall:ms=300");
	for (i = 0; i < 4; i++)
		proc_send(&f->p[i], get, 1, CHAIN);
	for (i = 0; i < 4; i++)
		T_EQ(proc_recv(&f->p[i]), below);
	T_EQ(ta_node(&f->d, "nvme0", "read.ios") - reads, below);
	T_EQ(ta_counter(&f->d, "dram0", "fetch_shared") - shared, 3 * below);
	T_EQ(ta_counter(&f->d, "dram0", "bytes_copied_shared"), 0);
	ta_fault(&f->d, "");
	ta_check(&f->d);
}

/* A dead waiter takes nothing away from the others. */
static void a_read_outlives_who_asked_first(void **state)
{
	struct td_opts o = opts(NULL);
	struct fx *f = *state;
	uint32_t here;

	fx_start(f, &o);
	fx_client(f, 0, 0, NULL);
	fx_client(f, 1, 0, NULL);
	tc_open(&f->c[0], f->d.socket, NULL);
	here = fx_spill(&f->c[0], 1, CHAIN, 100);
	T_WAIT(LONG_WAIT, at_rest(&f->d));
	ta_fault(&f->d, "nvme0:read:stall:ms=400");
	proc_send(&f->p[0], get, 1, CHAIN);
	T_WAIT(LONG_WAIT, ta_node(&f->d, "nvme0", "read.inflight") > 0);
	proc_send(&f->p[1], get, 1, CHAIN);
	T_WAIT(LONG_WAIT, ta_counter(&f->d, "dram0", "fetch_shared") > 0);
	proc_kill(&f->p[0]);
	T_EQ(proc_recv(&f->p[1]), CHAIN - here);
	proc_end(&f->p[1]);
	tc_close(&f->c[0]);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
}

static void a_cancelled_fetch_is_answered_once(void **state)
{
	struct td_opts o = opts(NULL);
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_match m;
	struct kvmm_req *rq;
	struct kvmm_done d;
	uint32_t here;

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	here = fx_spill(c, 1, CHAIN, 100);
	T_WAIT(LONG_WAIT, at_rest(&f->d));
	ta_fault(&f->d, "nvme0:read:stall:ms=300");
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, CHAIN, NULL, &m), here);
	T_OK(kvmm_fetch(rq, here, CHAIN, c->node,
			deadline_in(10 * NSEC_PER_SEC), 7));
	T_WAIT(LONG_WAIT, ta_node(&f->d, "nvme0", "read.inflight") > 0);
	T_OK(kvmm_cancel(c->k, 7));
	T_EQ(kvmm_cancel(c->k, 8), -ENOENT);
	T_CHECK(tc_wait(c, 7, &d, LONG_WAIT));
	T_CHECK(d.result == -ECANCELED || !d.result);
	tc_end(rq);
	/* the page arrives all the same or not at all; its frame comes back */
	T_WAIT(LONG_WAIT, !ta_node(&f->d, "dram0", "frames.loading"));
	ta_fault(&f->d, "");
	T_EQ(tc_get(c, 1, CHAIN, 10000).missed, 0);
	ta_check(&f->d);
}

/* -- the file ------------------------------------------------------------------------- */

static bool line_says(struct test_daemon *d, const char *word)
{
	json_t *status = ta_request(d, "{\"cmd\": \"status\"}"), *node;
	bool found = false;
	size_t i;

	json_array_foreach(json_object_get(status, "nodes"), i, node) {
		const char *line = json_string_value(json_object_get(node,
								    "line"));
		const char *why = json_string_value(json_object_get(node,
								   "why"));

		found |= (line && strstr(line, word)) ||
			 (why && strstr(why, word));
	}
	json_decref(status);
	return found;
}

static void unlinked(struct fx *f)
{
	struct tc *c = &f->c[0];

	put_slowly(&f->d, c, 1, 30);
	T_OK(unlink(f->d.nvme));
	T_EQ(tc_get(c, 1, CHAIN, 5000).missed, 0);
	put_slowly(&f->d, c, 100, 30);
	T_EQ(tc_get(c, 100, CHAIN, 5000).missed, 0);
	MOST_THERE(c, 1, 30);
	MOST_THERE(c, 100, 30);
	/* it goes on, and says so; it looks every 5 s */
	if (test_long() || !strcmp(f->d.opts.engine, engines[0]))
		T_WAIT(LONG_WAIT, line_says(&f->d, "unlinked"));
	T_CHECK(!strcmp(ta_node_state(&f->d, "nvme0"), "online"));
}

static void it_serves_on_when_its_file_is_unlinked(void **state)
{
	struct td_opts o = opts(NULL);

	for_each_engine(*state, &o, unlinked);
}

static void it_starts_without_its_file(void **state)
{
	static const char config[] =
		"{\"nodes\": [{\"name\": \"dram0\", \"kind\": \"host\", "
		"\"size\": \"16MiB\", \"below\": \"nvme0\"}, "
		"{\"name\": \"nvme0\", \"kind\": \"nvme\", "
		"\"size\": \"128MiB\", \"path\": \"/proc/no/such/folder\"}]}";
	struct td_opts o = { .dram_bytes = DRAM, .config = config };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i;

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	for (i = 0; i < 40; i++)
		T_EQ(tc_put(c, 1 + i, 0, CHAIN), CHAIN);
	T_EQ(tc_hits(c, 40, CHAIN), CHAIN);
	T_CHECK(strcmp(ta_node_state(&f->d, "nvme0"), "online"));
	T_CHECK(line_says(&f->d, "No such file") || line_says(&f->d, "/proc"));
	ta_check(&f->d);
	fx_stop(f);
}

/* The free floor: a file that would leave less is not made. */
static void it_serves_when_the_disk_has_no_room_for_its_file(void **state)
{
	struct td_opts o = opts(NULL);
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct statvfs vfs;
	struct stat st;

	o.free_floor_pct = 90;
	T_OK(td_init(&f->d, &o));
	T_OK(statvfs(f->d.dir, &vfs));
	if (vfs.f_bavail >= vfs.f_blocks / 10 * 9)
		skip();		/* this one has nearly nothing on it */
	T_OK(td_start(&f->d));
	T_WAIT(LONG_WAIT, !strcmp(ta_node_state(&f->d, "nvme0"), "failed"));
	T_CHECK(line_says(&f->d, "90 %"));
	T_CHECK(stat(f->d.nvme, &st) < 0);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, CHAIN), CHAIN);
	T_EQ(tc_hits(c, 1, CHAIN), CHAIN);
	ta_check(&f->d);
	fx_stop(f);
}

static void a_store_that_is_gone_starts_empty_and_says_so(void **state)
{
	struct td_opts o = opts(NULL);
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct tc_got got;

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	put_slowly(&f->d, c, 1, 30);
	tc_close(c);
	td_kill(&f->d);
	T_EQ(unlink(f->d.nvme), 0);
	T_OK(td_start(&f->d));
	fx_online(&f->d);
	tc_open(c, f->d.socket, NULL);
	got = tc_get(c, 1, CHAIN, 1000);
	T_EQ(got.missed, CHAIN);
	T_WAIT(LONG_WAIT, line_says(&f->d, "empty"));
	put_slowly(&f->d, c, 1, 30);
	MOST_THERE(c, 1, 30);
	ta_check(&f->d);
}

/* -- errors ------------------------------------------------------------------------------ */

/* What DRAM holds is found, new pages go in, and nothing takes long. */
static void dram_serves(struct fx *f, uint64_t first, unsigned int n)
{
	struct tc *c = &f->c[0];
	unsigned int i;

	for (i = 0; i < n; i++) {
		uint64_t t0 = now_ns();

		T_EQ(tc_put(c, first + i, 0, CHAIN), CHAIN);
		T_EQ(tc_hits(c, first + i, CHAIN), CHAIN);
		T_CHECK(now_ns() - t0 < 2 * NSEC_PER_SEC);
	}
}

static void failing_reads(struct fx *f)
{
	struct tc *c = &f->c[0];
	struct tc_got got;
	unsigned int i, missed = 0, safe, there;
	uint64_t t0;

	put_slowly(&f->d, c, 1, 40);
	safe = below(&f->d);
	T_CHECK(safe > 40 * CHAIN / 2, "%u pages below", safe);
	ta_fault(&f->d, "nvme0:read:eio");
	for (i = 0; i < 10; i++) {
		t0 = now_ns();
		got = tc_get(c, 1 + i, CHAIN, 2000);
		missed += got.missed;
		T_CHECK(now_ns() - t0 < 3 * NSEC_PER_SEC);
	}
	T_CHECK(missed > 50, "%u", missed);
	T_CHECK(ta_counter(&f->d, "dram0", "pgload_fail") +
		ta_counter(&f->d, "nvme0", "pgload_fail") > 0);
	T_CHECK(strcmp(ta_node_state(&f->d, "nvme0"), "online"));
	dram_serves(f, 500, 30);
	MOST_THERE(c, 522, 8);	/* half of the frames */
	ta_check(&f->d);

	/* a probe brings it back; what is left is readable again */
	ta_fault(&f->d, "");
	T_WAIT(LONG_WAIT, missing(c, 11, 10) == 0);
	/* of what had a copy, all that was not asked for meanwhile */
	there = 30 * CHAIN - missing(c, 11, 30);
	T_CHECK(there >= (safe - 10 * CHAIN) * 9 / 10, "%u of %u pages", there,
		safe - 10 * CHAIN);
}

static void failing_reads_are_misses(void **state)
{
	struct td_opts o = opts(NULL);

	for_each_engine(*state, &o, failing_reads);
}

/* How writes fail, and how many pages may be given up for it: slots that were
 * written before, where there is no space for others. */
static const char *write_fault;
static unsigned int given_up;

static void refused_writes(struct fx *f)
{
	struct tc *c = &f->c[0];
	unsigned int safe, there;
	struct tc_got got;

	put_slowly(&f->d, c, 1, 40);
	safe = below(&f->d);
	T_CHECK(safe > 40 * CHAIN / 2, "%u pages below", safe);
	ta_fault(&f->d, write_fault);
	/* more than DRAM holds: some of it has nowhere to go */
	dram_serves(f, 500, 24);
	T_CHECK(ta_counter(&f->d, "dram0", "pgdemote_fail") +
		ta_counter(&f->d, "nvme0", "pgdemote_fail") +
		ta_counter(&f->d, "dram0", "pgdrop_gone") > 0);
	ta_check(&f->d);
	/* what was written before is served, unless the node is taken for dead */
	got = tc_get(c, 1, CHAIN, 2000);
	T_CHECK(got.missed <= given_up ||
		!strcmp(ta_node_state(&f->d, "nvme0"), "failed"));
	ta_fault(&f->d, "");
	T_WAIT(LONG_WAIT, missing(c, 2, 10) == 0);
	there = 40 * CHAIN - missing(c, 1, 40);
	T_CHECK(there >= safe * 9 / 10, "%u of %u pages", there, safe);
	if (test_long()) {
		uint64_t demoted = ta_counter(&f->d, "dram0", "pgdemote");
		uint64_t chain = 900;

		T_WAIT(60000, !strcmp(ta_node_state(&f->d, "nvme0"),
				      "online"));
		/* a full file system is tried again after a while */
		T_WAIT(60000, (put_slowly(&f->d, c, chain++, 1),
			       ta_counter(&f->d, "dram0", "pgdemote") >
			       demoted));
	}
}

static void failing_writes_cost_no_service(void **state)
{
	struct td_opts o = opts(NULL);

	given_up = 0;
	write_fault = "nvme0:write:eio";
	for_each_engine(*state, &o, refused_writes);
}

static void a_full_file_system_costs_no_service(void **state)
{
	struct td_opts o = opts(NULL);

	given_up = 4;
	write_fault = "nvme0:write:enospc";
	for_each_engine(*state, &o, refused_writes);
}

static void a_read_only_device_costs_no_service(void **state)
{
	struct td_opts o = opts(NULL);

	given_up = 0;
	write_fault = "nvme0:write:erofs";
	for_each_engine(*state, &o, refused_writes);
}

/* -- lies -------------------------------------------------------------------------------- */

static void flipped_bits(struct fx *f)
{
	struct tc *c = &f->c[0];
	struct tc_got got;
	uint32_t here;

	here = fx_spill(c, 1, CHAIN, 100);
	T_WAIT(LONG_WAIT, at_rest(&f->d));
	T_CHECK(here < CHAIN);
	ta_fault(&f->d, "nvme0:read:flip:n=1");
	/* tc_get() has looked at every byte of what came */
	got = tc_get(c, 1, CHAIN, 5000);
	T_CHECK(got.missed >= 1);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail") +
	     ta_counter(&f->d, "dram0", "pgcrc_fail"), 1);
	T_EQ(ta_node(&f->d, "nvme0", "node.crc_bad"), 1);
	/* the liar is gone, with all that hangs on it; the rest is not */
	ta_check(&f->d);
	got = tc_get(c, 1, CHAIN, 5000);
	T_CHECK(got.missed >= 1 && got.missed <= CHAIN - here);
	T_EQ(tc_put(c, 1, 0, CHAIN), CHAIN);
	T_EQ(tc_get(c, 1, CHAIN, 5000).missed, 0);
}

static void a_flipped_bit_is_a_miss(void **state)
{
	struct td_opts o = opts(NULL);

	for_each_engine(*state, &o, flipped_bits);
}

/* Writes that report success and never happen, and reads that end early. */
static void lost_writes(struct fx *f)
{
	struct tc *c = &f->c[0];
	unsigned int i, missed = 0;
	uint64_t bad;

	ta_fault(&f->d, "nvme0:write:drop");
	put_slowly(&f->d, c, 1, 40);
	ta_fault(&f->d, "");
	for (i = 0; i < 10; i++)
		missed += tc_get(c, 1 + i, CHAIN, 5000).missed;
	T_CHECK(missed > 50, "%u", missed);
	bad = ta_node(&f->d, "nvme0", "node.crc_bad");
	T_CHECK(bad > 0);
	/* what needs no disk is there, and what comes now as well */
	T_EQ(tc_get(c, 40, CHAIN, 5000).missed, 0);
	dram_serves(f, 500, 8);
	MOST_THERE(c, 500, 8);
	ta_check(&f->d);
}

static void a_lost_write_is_a_miss(void **state)
{
	struct td_opts o = opts(NULL);

	for_each_engine(*state, &o, lost_writes);
}

static void short_reads(struct fx *f)
{
	struct tc *c = &f->c[0];

	fx_spill(c, 1, CHAIN, 100);
	T_WAIT(LONG_WAIT, at_rest(&f->d));
	ta_fault(&f->d, "nvme0:read:short:n=2");
	tc_get(c, 1, CHAIN, 5000);
	ta_fault(&f->d, "");
	ta_check(&f->d);
	T_EQ(tc_put(c, 1, 0, CHAIN), CHAIN);
	T_EQ(tc_get(c, 1, CHAIN, 5000).missed, 0);
}

static void a_short_read_is_no_page(void **state)
{
	struct td_opts o = opts(NULL);

	for_each_engine(*state, &o, short_reads);
}

/* -- stalls ------------------------------------------------------------------------------ */

#define STALL_MS	10000

/**
 * struct stalled - one of four daemons that stall at the same time
 * @t0:		when the fault was set
 * @safe:	pages that had a copy below then
 */
struct stalled {
	struct test_daemon d;
	struct tc	c;
	bool		reads;
	uint64_t	t0;
	unsigned int	safe;
};

/*
 * Four stores that are zero-written at once may keep a disk busy for longer than
 * an I/O may take. A disk that does not get done is left at it.
 */
static void zero_written(struct test_daemon *d)
{
	uint64_t all = ta_node(d, "nvme0", "capacity");
	struct t_wait w = t_wait_begin(LONG_WAIT);

	while (ta_node(d, "nvme0", "node.zeroed_bytes") < all &&
	       t_wait_more(&w))
		;
}

static void begin_stall(struct stalled *s)
{
	char spec[80];

	put_slowly(&s->d, &s->c, 1, 40);
	/* a disk that is as slow by itself has taken fewer, perhaps none */
	s->safe = below(&s->d);
	T_CHECK(s->safe > 40 * CHAIN / 2 ||
		strcmp(ta_node_state(&s->d, "nvme0"), "online"),
		"%u pages below", s->safe);
	snprintf(spec, sizeof(spec), "nvme0:%s:stall:ms=%u",
		 s->reads ? "read" : "write", STALL_MS);
	ta_fault(&s->d, spec);
	s->t0 = now_ns();
}

/* Requests miss in time, and DRAM is as quick as ever. */
static void work_while_stalled(struct stalled *s)
{
	struct tc *c = &s->c;
	struct tc_got got;
	unsigned int i, missed = 0;
	uint64_t t0;

	for (i = 0; s->reads && i < 5; i++) {
		got = tc_get(c, 1 + i, CHAIN, 200);
		T_CHECK(got.ns < NSEC_PER_SEC, "%llu ns",
			(unsigned long long)got.ns);
		missed += got.missed;
	}
	T_CHECK(!s->reads || missed > 0);
	for (i = 0; i < 24; i++) {
		t0 = now_ns();
		T_EQ(tc_put(c, 500 + i, 0, CHAIN), CHAIN);
		T_EQ(tc_hits(c, 500 + i, CHAIN), CHAIN);
		T_CHECK(now_ns() - t0 < 2 * NSEC_PER_SEC);
	}
	ta_check(&s->d);
}

/* What was stuck is over, its frames are back, pages come again. */
static void end_stall(struct stalled *s)
{
	ta_fault(&s->d, "");
	T_WAIT(STALL_MS + 5000,
	       !ta_node(&s->d, "dram0", "frames.loading") &&
	       !ta_node(&s->d, "nvme0", "read.inflight") &&
	       !ta_node(&s->d, "nvme0", "write.inflight"));
	/* all but a tenth of what had a copy, as soon as the disk can */
	T_WAIT(3 * LONG_WAIT, 40 * CHAIN - missing(&s->c, 1, 40) >=
			      s->safe * 9 / 10);
	tc_close(&s->c);
	ta_baseline(&s->d, LONG_WAIT);
	ta_check(&s->d);
}

/* Reads and writes, both engines, at once: a stall takes its time. */
static void a_device_that_stalls_for_10_s_costs_no_service(void **state)
{
	static struct stalled s[4];
	unsigned int i;

	memset(s, 0, sizeof(s));
	for (i = 0; i < 4; i++) {
		struct td_opts o = opts(engines[i % 2]);

		o.io_timeout = "500ms";
		s[i].reads = i < 2;
		T_OK(td_init(&s[i].d, &o));
		T_OK(td_start(&s[i].d));
		fx_online(&s[i].d);
		zero_written(&s[i].d);
		tc_open(&s[i].c, s[i].d.socket, NULL);
	}
	for (i = 0; i < 4; i++) {
		begin_stall(&s[i]);
		work_while_stalled(&s[i]);
		T_CHECK(now_ns() - s[i].t0 < STALL_MS * NSEC_PER_MSEC,
			"the stall was over before it was met");
	}
	for (i = 0; i < 4; i++) {
		end_stall(&s[i]);
		td_fini(&s[i].d);
	}
}

static void a_stalled_device_does_not_keep_kvmmd_from_ending(void **state)
{
	struct td_opts o = opts(NULL);
	struct fx *f = *state;
	struct kvmm_req *rq;
	struct tc *c = &f->c[0];
	struct kvmm_match m;
	uint32_t here;
	uint64_t t0;

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	here = fx_spill(c, 1, CHAIN, 100);
	T_WAIT(LONG_WAIT, at_rest(&f->d));
	ta_fault(&f->d, "nvme0:read:stall:ms=2000");
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, CHAIN, NULL, &m), here);
	T_OK(kvmm_fetch(rq, here, CHAIN, c->node, 0, 7));
	T_WAIT(LONG_WAIT, ta_node(&f->d, "nvme0", "read.inflight") > 0);
	t0 = now_ns();
	T_CHECK(td_stop(&f->d) >= 0);
	T_CHECK(now_ns() - t0 < 9 * NSEC_PER_SEC);
	tc_end(rq);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(pages_spill_and_come_back_byte_identical),
		FX_TEST(a_full_store_gives_up_what_is_old),
		FX_TEST(one_read_serves_every_process),
		FX_TEST(a_read_outlives_who_asked_first),
		FX_TEST(a_cancelled_fetch_is_answered_once),
		FX_TEST(it_serves_on_when_its_file_is_unlinked),
		FX_TEST(it_starts_without_its_file),
		FX_TEST(it_serves_when_the_disk_has_no_room_for_its_file),
		FX_TEST(a_store_that_is_gone_starts_empty_and_says_so),
		FX_TEST(failing_reads_are_misses),
		FX_TEST(failing_writes_cost_no_service),
		FX_TEST(a_full_file_system_costs_no_service),
		FX_TEST(a_read_only_device_costs_no_service),
		FX_TEST(a_flipped_bit_is_a_miss),
		FX_TEST(a_lost_write_is_a_miss),
		FX_TEST(a_short_read_is_no_page),
		FX_TEST(a_device_that_stalls_for_10_s_costs_no_service),
		FX_TEST(a_stalled_device_does_not_keep_kvmmd_from_ending),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
