/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a client may write into its rings: lies and garbage cost itself alone,
 * mistakes are answered.
 */
#include "tests/lib/ring_rig.h"

static void a_tail_beyond_the_ring_is_cut_off(void **state)
{
	atomic_store(&cl.l->sq.tail, LEDGER_SQ_ENTRIES + 1);
	rc_expect_cut(&cl, REJECT_SQ_TAIL);
}

static void a_tail_that_goes_back_is_cut_off(void **state)
{
	struct ring_sqe e = { .op = RING_NOP };

	rc_submit(&cl, &e, NULL, 0);
	srig_pump(&rig);
	atomic_store(&cl.l->sq.tail, 0);
	rc_expect_cut(&cl, REJECT_SQ_TAIL);
}

static void an_unknown_operation_is_cut_off(void **state)
{
	struct ring_sqe e = { .op = RING_NR_OPS };

	rc_submit(&cl, &e, NULL, 0);
	rc_expect_cut(&cl, REJECT_SQE_OP);
}

static void a_head_beyond_the_tail_is_cut_off(void **state)
{
	struct ring_cqe cqe;
	struct ring_pub pub;
	uint32_t frame;

	rc_alloc(&cl, &frame, 1);
	make_page(&pub, frame, 1);
	publish(&cl, &pub, 1, 1);
	rc_complete(&cl, &cqe, NULL, 0);
	atomic_store(&cl.l->cq.head, cl.cq_head + 1);
	rc_expect_cut(&cl, REJECT_CQ_HEAD);
}

static void arrays_out_of_bounds_are_cut_off(void **state)
{
	static const struct ring_sqe bad[] = {
		{ .op = RING_PUBLISH, .n = 0, .arena_len = 96 },
		{ .op = RING_PUBLISH, .n = KVMM_MAX_BATCH + 1,
		  .arena_len = LEDGER_ARENA_BYTES },
		{ .op = RING_PUBLISH, .n = 2, .arena_len = 96 },
		{ .op = RING_PUBLISH, .n = 1, .arena_pos = 96,
		  .arena_len = 96 },
		{ .op = RING_FETCH, .n = 1, .arena_pos = 0xffffffff,
		  .arena_len = 40 },
		{ .op = RING_FETCH, .n = 1, .arena_pos = LEDGER_ARENA_BYTES - 8,
		  .arena_len = LEDGER_ARENA_BYTES },
		{ .op = RING_FREE, .n = 1, .arena_len = LEDGER_ARENA_BYTES + 1 },
		{ .op = RING_FREE, .n = 0xffffffff, .arena_len = 4 },
		{ .op = RING_REPORT, .n = 2, .arena_len = 80 },
		{ .op = RING_NOP, .arena_len = 0xffffffff },
		{ .op = RING_END, .nr_keys = KVMM_MAX_BATCH + 1,
		  .arena_len = LEDGER_ARENA_BYTES },
		{ .op = RING_END, .nr_keys = 2, .arena_len = 40 },
		{ .op = RING_END, .nr_keys = 0x80000001, .arena_len = 40 },
		{ .op = RING_END, .nr_keys = 1, .arena_pos = 40,
		  .arena_len = 40 },
		{ .op = RING_FORK, .n = 0, .arena_len = 16 },
		{ .op = RING_FORK, .n = KVMM_MAX_GROUPS + 1,
		  .arena_len = 16 * (KVMM_MAX_GROUPS + 1) },
		{ .op = RING_FORK, .n = 2, .arena_len = 16 },
		{ .op = RING_REFILL, .n = 0 },
		{ .op = RING_REFILL, .n = 0xffffffff },
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(bad); i++) {
		struct ring_sqe e = bad[i];
		struct raw_client c;

		assert_int_equal(rc_connect(&rig, 0, &c), 0);
		rc_hello(&c);
		rc_submit(&c, &e, NULL, 0);
		rc_expect_cut(&c, REJECT_SQE_ARRAY);
		rc_close(&c);
		if (srig_reject(&rig, REJECT_SQE_ARRAY) != i + 1)
			fail_msg("entry %u was not refused", i);
	}
}

static void a_foreign_frame_cannot_be_freed(void **state)
{
	uint32_t frame = 0x00ffffff;
	struct ring_sqe e = { .op = RING_FREE, .win = cl.win, .n = 1 };

	rc_submit(&cl, &e, &frame, sizeof(frame));
	rc_expect_cut(&cl, REJECT_SQE_FRAME);
}

static void an_end_names_what_was_asked_for(void **state)
{
	static struct ring_key key[KVMM_MAX_BATCH];

	assert_non_null(space());
	submit_end(key, 3);
	submit_end(NULL, 0);
	submit_end(key, KVMM_MAX_BATCH);
	srig_pump(&rig);
	assert_int_equal(asked(), 3 + KVMM_MAX_BATCH);
	assert_int_equal(atomic_load(&cl.l->arena_head), cl.arena_tail);
	assert_int_equal(srig_sessions(&rig), 1);
}

static void a_key_of_no_group_is_cut_off(void **state)
{
	struct ring_key key[2] = { { .group = 0 }, { .group = 1 } };

	submit_end(key, 2);
	rc_expect_cut(&cl, REJECT_SQE_KEY);
	assert_int_equal(asked(), 0);
}

/* Another space is nobody's lie: it may have been detached meanwhile. */
static void keys_of_a_foreign_space_are_ignored(void **state)
{
	struct ring_key key = { .group = 9 };
	struct ring_sqe e = { .op = RING_END, .space = 77, .nr_keys = 1 };

	rc_submit(&cl, &e, &key, sizeof(key));
	srig_pump(&rig);
	assert_int_equal(asked(), 0);
	assert_int_equal(srig_sessions(&rig), 1);
}

/* A window that was just closed, another space: mistakes, not garbage. */
static void operations_on_no_window_are_errors(void **state)
{
	static const uint16_t wins[] = { 200, 255, 256, 65535 };
	struct ring_key key = { .group = 0 };
	struct ring_cqe cqe;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(wins); i++) {
		struct ring_sqe e = { .op = RING_FETCH, .win = wins[i],
				      .n = 1, .tag = i };

		rc_submit(&cl, &e, &key, sizeof(key));
		rc_complete(&cl, &cqe, NULL, 0);
		assert_int_equal(cqe.tag, i);
		assert_int_equal(cqe.result, -EINVAL);
	}
	assert_int_equal(session()->doom, REJECT_NONE);
}

/* A client that frees what it has asked to be read is not libkvmm. */
static void a_frame_that_is_being_copied_cannot_be_freed(void **state)
{
	struct ring_sqe e = { .op = RING_FORK, .space = (uint16_t)cl.space,
			      .n = 1, .after = 1 };
	struct ring_sqe fr = { .op = RING_FREE, .win = cl.win, .n = 1 };
	struct ring_fork f = { .win = cl.win };
	uint32_t frame[2];

	rc_alloc(&cl, frame, 2);
	f.from = frame[0];
	f.to = frame[1];
	rc_submit(&cl, &e, &f, sizeof(f));
	rc_submit(&cl, &fr, &frame[0], sizeof(frame[0]));
	rc_expect_cut(&cl, REJECT_SQE_FRAME);
}

static void a_read_only_client_cannot_publish(void **state)
{
	struct raw_client ro;
	struct ring_cqe cqe;
	struct ring_pub pub;

	assert_int_equal(rc_connect(&rig, 1, &ro), 0);
	rc_hello(&ro);
	rc_attach(&ro);
	rc_win_open(&ro, KVMM_RO);
	make_page(&pub, 1, 1);
	publish(&ro, &pub, 1, 3);
	rc_complete(&ro, &cqe, NULL, 0);
	assert_int_equal(cqe.result, -EACCES);
	rc_close(&ro);
}

/* Half a million random entries from a hostile client; another one works on. */
static void garbage_hurts_nobody(void **state)
{
	uint32_t seed = (uint32_t)test_seed() | 1, rounds = test_long() ? 2000 : 100;
	struct raw_client good;
	struct ring_cqe cqe;
	struct errmsg e;
	uint32_t i, k;

	assert_int_equal(rc_connect(&rig, 0, &good), 0);
	rc_hello(&good);
	for (i = 0; i < rounds; i++) {
		struct ring_sqe nop = { .op = RING_NOP, .tag = i };
		struct raw_client c;
		uint32_t *p;

		assert_int_equal(rc_connect(&rig, 0, &c), 0);
		rc_hello(&c);
		p = (uint32_t *)((char *)c.l + c.l->sq_off);
		for (k = 0; k < 4096 * 16; k++) {
			seed = seed * 1664525 + 1013904223;
			p[k] = seed >> 7;
			/* known operations reach further */
			if (k % 16 == 0)
				p[k] = p[k] % RING_NR_OPS;
			if (k % 16 == 2)
				p[k] %= 5000;
		}
		atomic_store(&c.l->sq.tail, 64);
		srig_pump(&rig);
		atomic_store(&c.l->cq.head, seed);
		srig_pump(&rig);
		rc_close(&c);
		rc_submit(&good, &nop, NULL, 0);
		rc_complete(&good, &cqe, NULL, 0);
		assert_int_equal(cqe.tag, i);
		rc_advance(&good);
	}
	srig_pump(&rig);
	assert_int_equal(srig_sessions(&rig), 2);	/* cl and good */
	if (mm_check(rig.s->mm, &e))
		fail_msg("%s", e.text);
	rc_close(&good);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		RING_TEST(a_tail_beyond_the_ring_is_cut_off),
		RING_TEST(a_tail_that_goes_back_is_cut_off),
		RING_TEST(an_unknown_operation_is_cut_off),
		RING_WIN_TEST(a_head_beyond_the_tail_is_cut_off),
		RING_TEST(arrays_out_of_bounds_are_cut_off),
		RING_WIN_TEST(a_foreign_frame_cannot_be_freed),
		RING_WIN_TEST(an_end_names_what_was_asked_for),
		RING_WIN_TEST(a_key_of_no_group_is_cut_off),
		RING_WIN_TEST(keys_of_a_foreign_space_are_ignored),
		RING_TEST(operations_on_no_window_are_errors),
		RING_WIN_TEST(a_frame_that_is_being_copied_cannot_be_freed),
		RING_WIN_TEST(a_read_only_client_cannot_publish),
		RING_TEST(garbage_hurts_nobody),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
