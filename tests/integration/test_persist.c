/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd ends, in order or not, and nobody keeps its memory: what was on NVMe is
 * found again, by whoever comes first, byte for byte.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define CHAIN		16		/* pages */
#define CHAINS		60
#define DRAM		(16 * MIB)	/* 256 frames */
#define NVME		(128 * MIB)	/* 2,048 slots */
#define GROUP_MS	300		/* a record is on the medium by then */

static const char patient[] = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}";

static const struct td_opts opts = {
	.dram_bytes = DRAM, .nvme_bytes = NVME, .config = patient,
	.io_timeout = "5s",
};

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

static void put(struct fx *f, uint64_t first, unsigned int n)
{
	struct tc *c = &f->c[0];
	unsigned int i;

	for (i = 0; i < n; i++) {
		T_EQ(tc_put(c, first + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
}

/* Pages of all chains that can be had now; their bytes are right. */
static unsigned int there(struct tc *c, uint64_t first, unsigned int n)
{
	unsigned int i, got = 0;

	for (i = 0; i < n; i++)
		got += CHAIN - tc_get(c, first + i, CHAIN, 5000).missed;
	return got;
}

static unsigned int below(struct test_daemon *d)
{
	return (unsigned int)(ta_node(d, "nvme0", "bytes_pages") /
			      TC_PAGE_BYTES);
}

static void back(struct fx *f)
{
	T_OK(td_start(&f->d));
	fx_online(&f->d);
	ta_check(&f->d);
}

static void begin(struct fx *f)
{
	fx_start(f, &opts);
	tc_open(&f->c[0], f->d.socket, NULL);
}

/* -- what is there afterwards ---------------------------------------------------- */

static void killed_daemon_finds_its_pages_on_disk(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int was, got;

	begin(f);
	put(f, 1, CHAINS);
	was = below(&f->d);
	usleep(GROUP_MS * 1000);
	T_CHECK(was > CHAINS * CHAIN / 2, "%u pages below", was);
	tc_close(c);
	td_kill(&f->d);
	back(f);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgrecover") >= was);
	T_EQ(ta_counter(&f->d, "nvme0", "recover_orphan"), 0);
	tc_open(c, f->d.socket, NULL);
	got = there(c, 1, CHAINS);
	T_CHECK(got >= was * 9 / 10, "%u of %u pages", got, was);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&f->d);
	/* and it goes on as ever */
	put(f, 1000, 10);
	T_CHECK(there(c, 1000, 10) >= 9 * CHAIN);
	ta_check(&f->d);
}

/* The store has not written down all of it when it is stopped. */
static void all_is_found_after_a_stop(struct fx *f)
{
	struct tc *c = &f->c[0];
	unsigned int was;

	put(f, 1, CHAINS - 10);
	ta_fault(&f->d, "nvme0:journal:stall:ms=1000:n=1");
	put(f, CHAINS - 9, 10);
	was = below(&f->d);
	tc_close(c);
	fx_stop(f);
	back(f);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgrecover") >= was);
	tc_open(c, f->d.socket, NULL);
	T_CHECK(there(c, 1, CHAINS) >= was);
	/* once more, with what is only there */
	tc_close(c);
	fx_stop(f);
	back(f);
	tc_open(c, f->d.socket, NULL);
	T_CHECK(there(c, 1, CHAINS) >= was * 9 / 10);
	ta_check(&f->d);
}

static void daemon_that_was_stopped_finds_all_of_them(void **state)
{
	struct fx *f = *state;

	begin(f);
	all_is_found_after_a_stop(f);
}

/* Its keeper ends with it, and drops what it kept. */
static void so_does_one_that_was_kept(void **state)
{
	struct td_opts o = opts;
	struct fx *f = *state;

	o.keep = true;
	fx_start(f, &o);
	tc_open(&f->c[0], f->d.socket, NULL);
	all_is_found_after_a_stop(f);
}

static void space_is_there_before_anybody_attaches(void **state)
{
	struct fx *f = *state;
	json_t *r, *one;

	begin(f);
	put(f, 1, CHAINS);
	tc_close(&f->c[0]);
	fx_stop(f);
	back(f);
	r = ta_request(&f->d, "{\"cmd\": \"space\"}");
	T_EQ(json_array_size(json_object_get(r, "spaces")), 1);
	one = json_array_get(json_object_get(r, "spaces"), 0);
	T_EQ(json_integer_value(json_object_get(one, "clients")), 0);
	T_CHECK(json_integer_value(json_object_get(one, "pages")) > 100);
	json_decref(r);
	T_CHECK(ta_node(&f->d, "dram0", "frames.total") == 0);
}

/* In the middle of writes, again and again: what is found is right. */
static void daemon_that_is_killed_while_it_writes(void **state)
{
	unsigned int round, rounds = test_long() ? 40 : 4;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct rng rng;

	rng_seed(&rng, test_seed());
	fx_start(f, &opts);
	for (round = 0; round < rounds; round++) {
		uint64_t first = 1 + round * 20, i = 0, end, late;

		tc_open(c, f->d.socket, NULL);
		late = deadline_in(30 * NSEC_PER_SEC);
		while (ta_counter(&f->d, "dram0", "pgdemote") < 40) {
			T_CHECK(!deadline_past(late));
			tc_put(c, first + i++ % 40, 0, CHAIN);
		}
		end = deadline_in(rng_below(&rng, 400) * NSEC_PER_MSEC);
		while (!deadline_past(end))
			tc_put(c, first + i++ % 40, 0, CHAIN);
		td_kill(&f->d);
		tc_close(c);
		back(f);
		T_EQ(ta_counter(&f->d, "nvme0", "recover_orphan"), 0);
		T_EQ(ta_counter(&f->d, "nvme0", "recover_bad"), 0);
		tc_open(c, f->d.socket, NULL);
		there(c, first, 40);
		tc_close(c);
		ta_check(&f->d);
	}
	T_CHECK(ta_counter(&f->d, "nvme0", "pgrecover") > 100);
}

static void page_that_was_bad_stays_away(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;

	begin(f);
	put(f, 1, CHAINS);
	T_CHECK(CHAIN - tc_get(c, 1, CHAIN, 5000).missed > 4);
	rq = tc_req(c, 1);
	T_CHECK(tc_match(c, rq, 1, CHAIN, NULL, NULL) > 3);
	T_OK(kvmm_report(rq, 3, KVMM_BAD));
	tc_end(rq);
	tc_ping(c);
	usleep(GROUP_MS * 1000);
	tc_close(c);
	td_kill(&f->d);
	back(f);
	tc_open(c, f->d.socket, NULL);
	T_CHECK(CHAIN - tc_get(c, 1, CHAIN, 5000).missed <= 3);
	T_CHECK(there(c, 2, CHAINS - 1) > 0);
	ta_check(&f->d);
}

static void tenant_that_is_gone_leaves_nothing(void **state)
{
	struct td_opts o = opts;
	struct fx *f = *state;
	struct tc *c = &f->c[0];

	o.socket[0] = (struct td_socket){ .name = "a", .tenant = "one" };
	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	put(f, 1, CHAINS);
	tc_close(c);
	fx_stop(f);
	/* the same store, and another configuration */
	f->d.opts.socket[0].tenant = "two";
	T_OK(td_configure(&f->d));
	back(f);
	T_EQ(ta_counter(&f->d, "nvme0", "pgrecover"), 0);
	T_CHECK(ta_counter(&f->d, "nvme0", "recover_label") > 100);
	T_EQ(ta_node(&f->d, "nvme0", "used"), 0);
}

/* A disk that answers late, or a lock that is let go late: nothing is lost. */
static void store_that_can_be_read_later_is_found_later(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int was;

	begin(f);
	T_EQ(ta_node(&f->d, "nvme0", "node.open_fails"), 0);
	T_CHECK(ta_node(&f->d, "nvme0", "node.overcommit_bytes") <= NVME);
	put(f, 1, CHAINS);
	was = below(&f->d);
	usleep(GROUP_MS * 1000);
	tc_close(c);
	td_kill(&f->d);
	T_OK(setenv("KVMM_FAULT", "nvme0:openread:eio", 1));
	T_OK(td_start(&f->d));
	unsetenv("KVMM_FAULT");
	T_WAIT(LONG_WAIT, ta_node(&f->d, "nvme0", "node.open_fails") >= 2);
	T_CHECK(!strcmp(ta_node_state(&f->d, "nvme0"), "failed"));
	/* it serves meanwhile, from memory */
	tc_open(c, f->d.socket, NULL);
	T_EQ(there(c, 1, CHAINS), 0);
	T_EQ(tc_put(c, 1000, 0, CHAIN), CHAIN);
	T_EQ(there(c, 1000, 1), CHAIN);
	ta_check(&f->d);
	ta_fault(&f->d, "");
	fx_online(&f->d);
	T_CHECK(there(c, 1, CHAINS) >= was * 9 / 10);
	T_EQ(ta_counter(&f->d, "nvme0", "recover_orphan"), 0);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(killed_daemon_finds_its_pages_on_disk),
		FX_TEST(daemon_that_was_stopped_finds_all_of_them),
		FX_TEST(so_does_one_that_was_kept),
		FX_TEST(space_is_there_before_anybody_attaches),
		FX_TEST(daemon_that_is_killed_while_it_writes),
		FX_TEST(page_that_was_bad_stays_away),
		FX_TEST(tenant_that_is_gone_leaves_nothing),
		FX_TEST(store_that_can_be_read_later_is_found_later),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
