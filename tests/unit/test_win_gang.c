/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's view of a gang: its part of each frame, or nothing at all. */
#include <string.h>
#include <sys/mman.h>

#include "ipc/base/bitmap.h"
#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/leak.h"
#include "tests/lib/unit.h"

#define EXTENT	((size_t)FK_FPE * FK_STRIDE)

static struct fk f;
static struct kvmm *k;
static struct kvmm_space *sp;
static struct kvmm_win *win;

/* 2,048 bytes of stripe, 512 of mirror, 1,024 of stripe, on two ranks */
static const struct kvmm_seg segs[] = {
	{ .bytes = 2048, .align = 64, .what = KVMM_SEG_K,
	  .shard = KVMM_STRIPE },
	{ .bytes = 512, .align = 512, .what = KVMM_SEG_KV,
	  .shard = KVMM_MIRROR },
	{ .bytes = 1024, .align = 64, .what = KVMM_SEG_V,
	  .shard = KVMM_STRIPE },
};
static const struct kvmm_class cls = {
	.name = "kv", .page_bytes = 3584, .nsegs = 3, .segs = segs,
};
static const struct kvmm_group group = {
	.rule = KVMM_FULL, .block_tokens = 16,
};

static int attach(uint16_t world)
{
	struct kvmm_desc d = {
		.size = sizeof(d), .model = "gang", .world = world,
		.nclasses = 1, .ngroups = 1, .classes = &cls, .groups = &group,
	};

	return kvmm_space_attach(k, &d, &sp);
}

static int setup(void **state)
{
	struct kvmm_open_opts o = {
		.size = sizeof(o), .call_timeout_ns = FC_TIMEOUT_NS,
	};

	win = NULL;
	if (fk_start(&f, 1))
		return -1;
	f.gang = 2;
	f.part_off = EXTENT;
	fk_restart(&f);
	return kvmm_open(f.path, &o, &k) || attach(2) ? -1 : 0;
}

static int teardown(void **state)
{
	kvmm_close(k);
	fk_stop(&f);
	return 0;
}

static int win_open(void)
{
	return kvmm_win_open(sp, 0, 0, NULL, &win);
}

/* What a process maps of an extent, by another mapping of the file. */
static uint8_t *file(uint32_t no)
{
	uint8_t *p = mmap(NULL, 2 * EXTENT, PROT_READ, MAP_SHARED,
			  f.win[0].extent[no], 0);

	assert_true(p != MAP_FAILED);
	return p;
}

static void a_rank_maps_its_own_part(void **state)
{
	uint8_t *all = file(1), *at;

	assert_int_equal(win_open(), 0);
	at = kvmm_win_ptr(win, 0, FK_FIRST + 3);
	assert_non_null(at);
	strcpy((char *)at, "mine");
	assert_string_equal((char *)all + EXTENT + 3 * FK_STRIDE, "mine");
	assert_int_equal(all[3 * FK_STRIDE], 0);
	munmap(all, 2 * EXTENT);
}

static void segments_have_the_ranks_share(void **state)
{
	uint8_t *base;

	assert_int_equal(win_open(), 0);
	base = kvmm_win_base(win, 0);
	assert_ptr_equal(kvmm_win_base(win, 1), base + 1024);
	assert_ptr_equal(kvmm_win_base(win, 2), base + 1536);
	assert_int_equal(kvmm_win_stride(win, 2), FK_STRIDE);
	assert_null(kvmm_win_base(win, 3));
}

static void nodes_say_that_they_are_gangs(void **state)
{
	struct kvmm_info in = { .size = sizeof(in) };

	assert_int_equal(kvmm_info(k, &in), 0);
	assert_int_equal(in.node[0].gang, 2);
	assert_int_equal(in.node[1].gang, 0);
}

static void calls(void *arg, void *ptr, size_t bytes, int up)
{
	++*(unsigned int *)arg;
}

/* It takes part in what is mapped by its bits, and has nothing to touch. */
static void a_blind_member_sets_its_bits_and_maps_nothing(void **state)
{
	unsigned int n = 0;
	struct kvmm_win_opts o = {
		.size = sizeof(o), .on_extent = calls, .arg = &n,
	};
	struct leak before, now;
	const _Atomic uint64_t *bits = window_bitmap(f.win[0].w);

	f.win_flags = WIRE_WINDOW_BLIND;
	f.part_off = 0;
	assert_int_equal(leak_look(0, &before), 0);
	assert_int_equal(kvmm_win_open(sp, 0, 0, &o, &win), 0);
	assert_true(bitmap_shared_test(bits, 1));
	fk_extent_up(&f, 0, 2);
	assert_int_equal(kvmm_win_sync(win, 0), 1);
	assert_true(bitmap_shared_test(bits, 2));
	assert_int_equal(leak_look(0, &now), 0);
	/* table and ledger, no extent */
	assert_int_equal(now.shm_maps, before.shm_maps + 2);
	assert_null(kvmm_win_base(win, 0));
	assert_null(kvmm_win_ptr(win, 0, FK_FIRST));
	assert_null(kvmm_win_ptr(win, 0, 0));
	fk_extent_down(&f, 0, 2);
	assert_int_equal(kvmm_win_sync(win, 0), 1);
	assert_false(bitmap_shared_test(bits, 2));
	kvmm_win_close(win);
	assert_false(bitmap_shared_test(bits, 1));
	assert_int_equal(n, 0);
}

static void another_world_is_refused_before_it_is_asked_for(void **state)
{
	kvmm_space_detach(sp);
	assert_int_equal(attach(4), 0);
	assert_int_equal(win_open(), -EINVAL);
	assert_string_equal(kvmm_error(k),
		"node dram0 is a gang of 2, the space is for a world of 4");
	assert_int_equal(f.win[0].opens, 0);
}

static void refused(uint64_t part_off)
{
	unsigned int closes = f.win[0].closes;
	struct leak before, now;
	char why[256];

	f.part_off = part_off;
	assert_int_equal(leak_look(0, &before), 0);
	assert_int_equal(win_open(), -EPROTO);
	assert_int_equal(f.win[0].closes, closes + 1);
	leak_calm(0, &now);
	if (!leak_same(&before, &now, why, sizeof(why)))
		fail_msg("%s", why);
}

/* A daemon that is wrong must not make us read beyond the file: SIGBUS. */
static void a_part_that_is_not_in_the_extent_is_refused(void **state)
{
	refused(2 * EXTENT);
	refused(EXTENT + 4096);
	refused(EXTENT - 64);
	refused(UINT64_MAX - 4095);
	refused(UINT64_MAX);
	f.part_off = EXTENT;
	assert_int_equal(win_open(), 0);
}

static void find_the_next(void)
{
	uint64_t deadline = deadline_in(10 * NSEC_PER_SEC);
	uint64_t epoch = kvmm_epoch(k);
	struct kvmm_done d;

	fk_restart(&f);
	while (kvmm_epoch(k) == epoch) {
		assert_false(deadline_past(deadline));
		kvmm_poll(k, &d, 1);
	}
}

/* A daemon that is wrong: what had no address would be mapped at one of ours. */
static void a_window_that_mapped_nothing_does_not_begin_to(void **state)
{
	f.win_flags = WIRE_WINDOW_BLIND;
	assert_int_equal(win_open(), 0);
	assert_null(kvmm_win_base(win, 0));
	f.win_flags = 0;
	find_the_next();
	assert_int_equal(kvmm_win_sync(win, 0), -EPROTO);
	assert_non_null(strstr(kvmm_error(k), "nothing"));
	kvmm_win_close(win);
}

static void a_gang_is_found_again_with_the_next_daemon(void **state)
{
	void *base;
	uint8_t *all;

	assert_int_equal(win_open(), 0);
	base = kvmm_win_base(win, 0);
	find_the_next();
	assert_true(kvmm_win_sync(win, 0) > 0);
	assert_ptr_equal(kvmm_win_base(win, 0), base);
	all = file(1);
	strcpy(kvmm_win_ptr(win, 0, FK_FIRST), "mine");
	assert_string_equal((char *)all + EXTENT, "mine");
	munmap(all, 2 * EXTENT);
}

static void a_node_that_is_no_gang_any_more_ends_the_window(void **state)
{
	assert_int_equal(win_open(), 0);
	f.gang = 0;
	find_the_next();
	assert_int_equal(kvmm_win_sync(win, 0), -EPROTO);
	kvmm_win_close(win);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_rank_maps_its_own_part),
		T(segments_have_the_ranks_share),
		T(nodes_say_that_they_are_gangs),
		T(a_blind_member_sets_its_bits_and_maps_nothing),
		T(another_world_is_refused_before_it_is_asked_for),
		T(a_part_that_is_not_in_the_extent_is_refused),
		T(a_window_that_mapped_nothing_does_not_begin_to),
		T(a_gang_is_found_again_with_the_next_daemon),
		T(a_node_that_is_no_gang_any_more_ends_the_window),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
