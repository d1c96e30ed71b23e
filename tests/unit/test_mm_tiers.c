/* SPDX-License-Identifier: Apache-2.0 */
/* mm over a real slot store: pages spill, the device fails, pages come back. */
#include <stdio.h>
#include <unistd.h>

#include "daemon/mm/tier.h"
#include "daemon/node/fault.h"
#include "ipc/base/clock.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

#define CHAINS	40u
#define LEN	12u

static struct rig rig;
static struct rig *const r = &rig;
static char path[256];
static enum nvme_engine engine;

static void start(uint64_t nvme_bytes)
{
	struct rig_opts o = {
		.dram_bytes = 128 * 4096, .nvme_bytes = nvme_bytes,
		.nvme_path = path, .nvme_engine = engine,
		.direct_reclaim_ns = 2 * NSEC_PER_SEC,
	};

	rig_start(r, &o);
}

static int setup(void **state)
{
	const char *tmp = getenv("TMPDIR");
	int fd;

	snprintf(path, sizeof(path), "%s/kvmm-tiers-XXXXXX",
		 tmp ? tmp : "/tmp");
	fd = mkstemp(path);
	assert_true(fd >= 0);
	close(fd);
	unlink(path);
	start(UINT64_C(32) << 20);
	return 0;
}

static int teardown(void **state)
{
	fault_set(NULL, NULL);
	rig_stop(r);
	unlink(path);
	return 0;
}

static void faults(const char *spec)
{
	struct errmsg e = { "" };

	if (fault_set(spec, &e))
		fail_msg("%s", e.text);
}

/* What does not get a frame is tried again: the device may be slow. */
static void fill(uint32_t first, uint32_t chains)
{
	uint64_t deadline = deadline_in(20 * NSEC_PER_SEC);
	uint32_t c, i;

	for (c = first; c < first + chains; c++) {
		for (i = 0; i < LEN && !deadline_past(deadline);) {
			int err = rig_publish(r, RIG_FULL, c, i);

			assert_true(!err || err == -EAGAIN || err == -ESTALE);
			if (err == -ESTALE)
				break;
			i += !err;
		}
		rig_touch(r, RIG_FULL, c, LEN);
	}
}

static uint32_t fetch_all(uint32_t first, uint32_t chains)
{
	uint32_t c, n = 0;

	for (c = first; c < first + chains; c++)
		n += rig_fetch_check(r, RIG_FULL, c, 0, LEN);
	return n;
}

static void pages_spill_to_the_file_and_come_back(void **state)
{
	fill(0, CHAINS);
	rig_check(r);
	assert_int_equal(fetch_all(0, CHAINS), CHAINS * LEN);
	assert_int_equal(rig_count(r, RIG_DRAM)->pgdrop_gone, 0);
	assert_true(rig_count(r, RIG_DRAM)->pgload > CHAINS * LEN / 2);
	rig_settle(r, 1000);
	rig_check(r);
}

static void pages_are_found_again_after_a_restart(void **state)
{
	uint32_t n;

	fill(0, CHAINS);
	rig_push_down(r, RIG_FULL);
	n = fetch_all(0, CHAINS);
	rig_push_down(r, RIG_FULL);
	rig_stop(r);
	start(UINT64_C(32) << 20);
	assert_int_equal(r->nvme->state, NODE_ONLINE);
	assert_true(rig_count(r, RIG_NVME)->pgrecover >= n);
	assert_int_equal(rig_count(r, RIG_NVME)->recover_orphan, 0);
	rig_check(r);
	assert_int_equal(fetch_all(0, CHAINS), n);
	assert_int_equal(rig_count(r, RIG_NVME)->pgcrc_fail, 0);
	rig_settle(r, 1000);
	rig_check(r);
}

static void flipped_bits_are_misses_and_never_served(void **state)
{
	uint32_t n;

	fill(0, CHAINS);
	rig_push_down(r, RIG_FULL);
	faults("nvme0:read:flip:n=5:skip=10");
	n = fetch_all(0, CHAINS);
	assert_true(n < CHAINS * LEN);
	assert_int_equal(rig_count(r, RIG_NVME)->pgcrc_fail, 5);
	faults(NULL);
	rig_settle(r, 2000);
	rig_check(r);
}

static void a_failing_device_costs_hits_and_nothing_else(void **state)
{
	struct rig_answer a;
	uint64_t t0;
	uint32_t c;

	fill(0, CHAINS);
	rig_push_down(r, RIG_FULL);
	faults("nvme0:read:eio;nvme0:write:eio");
	for (c = 0; c < 20; c++) {
		t0 = now_ns();
		assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, c, 0, LEN,
						    500), 2000, &a));
		assert_true(now_ns() - t0 < 1500 * NSEC_PER_MSEC);
		assert_int_equal(a.res[LEN - 1].result, -ENOENT);
		rig_answer_put(r, &a);
		rig_check(r);
	}
	/* stores go on, what does not fit is forgotten */
	fill(100, 20);
	rig_check(r);
	faults(NULL);
	rig_run(r, 500);
	assert_int_equal(r->nvme->state, NODE_ONLINE);
	fill(200, 5);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(fetch_all(200, 5), 5 * LEN);
	rig_settle(r, 1000);
	rig_check(r);
}

static void a_stalled_device_makes_misses_in_time(void **state)
{
	struct rig_answer a;
	uint64_t t0;

	fill(0, CHAINS);
	rig_push_down(r, RIG_FULL);
	faults("nvme0:read:stall:ms=2500;nvme0:write:stall:ms=2500");
	t0 = now_ns();
	assert_true(rig_answer(r, rig_fetch(r, RIG_FULL, 1, 0, LEN, 50), 2000,
			       &a));
	assert_int_equal(a.res[0].result, -ENOENT);
	assert_true(now_ns() - t0 < 500 * NSEC_PER_MSEC);
	fill(100, 12);
	rig_check(r);
	faults(NULL);
	rig_settle(r, 10000);
	rig_run(r, 500);
	rig_check(r);
	assert_int_equal(r->nvme->state, NODE_ONLINE);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_loading, 0);
	assert_int_equal(rig_pool(r, RIG_FULL, RIG_DRAM)->nr_writing, 0);
	fill(300, 3);
	rig_push_down(r, RIG_FULL);
	assert_int_equal(fetch_all(300, 3), 3 * LEN);
}

static void writes_that_never_happened_are_misses(void **state)
{
	unsigned int rounds;

	faults("nvme0:write:drop");
	fill(0, 4);
	rig_push_down(r, RIG_FULL);
	faults(NULL);
	/* so many bad reads in a row make the device one that is failing */
	for (rounds = 0; rounds < 20 && r->sp->nr_pages; rounds++) {
		assert_int_equal(fetch_all(0, 4), 0);
		rig_run(r, 300);
		rig_check(r);
	}
	assert_int_equal(r->sp->nr_pages, 0);
}

static void a_small_store_keeps_what_came_last(void **state)
{
	rig_stop(r);
	unlink(path);
	start(UINT64_C(8) << 20);
	/* eight segments of 256 slots */
	fill(0, 200);
	rig_check(r);
	rig_settle(r, 1000);
	assert_true(fetch_all(190, 10) >= 9 * LEN);
	assert_int_equal(fetch_all(0, 10), 0);
	rig_settle(r, 1000);
	rig_check(r);
}

/* Pages of another size get segments of their own out of a full store. */
static void a_full_store_makes_room_for_another_size(void **state)
{
	uint32_t i;

	rig_stop(r);
	unlink(path);
	start(UINT64_C(8) << 20);
	fill(0, 200);
	rig_settle(r, 1000);
	for (i = 0; i < 6; i++)
		assert_int_equal(rig_publish(r, RIG_BIG, 1, i), 0);
	rig_push_down(r, RIG_BIG);
	for (i = 0; i < 6; i++)
		assert_int_equal(rig_state(r, RIG_BIG, 1, i, RIG_NVME),
				 COPY_READY);
	assert_int_equal(rig_fetch_check(r, RIG_BIG, 1, 0, 6), 6);
	rig_check(r);
}

int main(void)
{
#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(pages_spill_to_the_file_and_come_back),
		T(pages_are_found_again_after_a_restart),
		T(flipped_bits_are_misses_and_never_served),
		T(a_failing_device_costs_hits_and_nothing_else),
		T(a_stalled_device_makes_misses_in_time),
		T(writes_that_never_happened_are_misses),
		T(a_small_store_keeps_what_came_last),
		T(a_full_store_makes_room_for_another_size),
	};

	int err;

	engine = NVME_ENGINE_AUTO;
	err = cmocka_run_group_tests_name("io_uring", tests, NULL, NULL);
	engine = NVME_ENGINE_THREADS;
	return err + cmocka_run_group_tests_name("threads", tests, NULL, NULL);
}
