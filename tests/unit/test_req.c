/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a request: what the daemon is told of what it asked for. */
#include <string.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define MANY	10000u		/* more than two entries take */

static struct fk f;
static struct fc c;
static struct kvmm_key key[MANY];
static struct kvmm_hit hit[MANY];

static int setup(void **state)
{
	uint32_t i;

	if (fk_start(&f, 2) || fc_open(&f, &c))
		return -1;
	for (i = 0; i < MANY; i++)
		key[i] = fk_key(1, i);
	f.hdr->space[FK_SPACE].mode = KVMM_MODE_OBSERVE;
	return 0;
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

static void match(uint32_t n)
{
	struct kvmm_keys keys = { .k = key, .n = n, .group = FK_FULL };
	struct kvmm_match m = { .size = sizeof(m) };

	assert_int_equal(kvmm_match(c.rq, &keys, 1, 0, hit, &m), 0);
}

static void peek(uint32_t n)
{
	struct kvmm_keys keys = { .k = key, .n = n, .group = FK_FULL };
	struct kvmm_match m = { .size = sizeof(m) };

	assert_int_equal(kvmm_peek(c.rq, &keys, 1, 0, &m), 0);
}

static void end(int how)
{
	assert_int_equal(kvmm_req_end(c.rq, how, 0), 0);
	c.rq = NULL;
}

static uint64_t keys_lost(void)
{
	struct kvmm_stats st = { .size = sizeof(st) };

	assert_int_equal(kvmm_stats(c.k, &st), 0);
	return st.keys_lost;
}

/* The next entry names keys [@from, @from + @n) of group 0. */
static void expect_keys(uint32_t from, uint32_t n)
{
	const struct ring_key *k;
	struct ring_sqe sqe;
	const void *array;
	uint32_t i;

	assert_true(fk_take_op(&f, RING_END, &sqe, &array));
	assert_int_equal(sqe.nr_keys, n);
	assert_int_equal(sqe.space, FK_SPACE);
	k = array;
	for (i = 0; i < n; i++) {
		assert_memory_equal(k[i].key, key[from + i].b, 32);
		assert_int_equal(k[i].group, FK_FULL);
	}
}

static void expect_no_end(void)
{
	struct ring_sqe sqe;

	assert_false(fk_take_op(&f, RING_END, &sqe, NULL));
}

static void observe_mode_tells_what_was_missed(void **state)
{
	uint32_t before = now_ns() / NSEC_PER_MSEC, after;
	struct ring_sqe sqe;

	match(5);
	after = now_ns() / NSEC_PER_MSEC;
	end(KVMM_CONTINUES);
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.nr_keys, 5);
	assert_in_range(sqe.asked_ms - before, 0, after - before);
	assert_int_equal(sqe.how, KVMM_CONTINUES);
	assert_int_equal(sqe.frame, 0);
	assert_int_equal(sqe.n, 0);
	expect_no_end();
}

static void the_keys_are_those_that_were_asked(void **state)
{
	match(7);
	end(KVMM_ENDED);
	expect_keys(0, 7);
}

static void the_last_match_counts(void **state)
{
	match(7);
	match(4);
	end(KVMM_ENDED);
	expect_keys(0, 4);
	expect_no_end();
}

/* As an engine does that peeks at a prompt, then matches what was found. */
static void a_longer_peek_counts(void **state)
{
	peek(9);
	match(3);
	end(KVMM_ENDED);
	expect_keys(0, 9);
	expect_no_end();
}

static void groups_come_in_the_order_asked(void **state)
{
	struct kvmm_keys keys[] = {
		{ .k = key + 10, .n = 2, .group = FK_LAST },
		{ .k = key, .n = 0, .group = FK_WINDOW },
		{ .k = key + 20, .n = 3, .group = FK_FULL },
	};
	static const uint16_t group[] = {
		FK_LAST, FK_LAST, FK_FULL, FK_FULL, FK_FULL
	};
	struct kvmm_match m = { .size = sizeof(m) };
	const struct ring_key *k;
	struct ring_sqe sqe;
	const void *array;
	unsigned int i;

	assert_int_equal(kvmm_match(c.rq, keys, 3, 0, hit, &m), 0);
	end(KVMM_ENDED);
	assert_true(fk_take_op(&f, RING_END, &sqe, &array));
	assert_int_equal(sqe.nr_keys, 5);
	k = array;
	for (i = 0; i < 5; i++) {
		assert_int_equal(k[i].group, group[i]);
		assert_memory_equal(k[i].key,
				    key[i < 2 ? 10 + i : 18 + i].b, 32);
	}
}

static void more_than_an_entry_takes_goes_in_more(void **state)
{
	match(MANY);
	end(KVMM_ENDED);
	expect_keys(0, KVMM_MAX_BATCH);
	expect_keys(KVMM_MAX_BATCH, KVMM_MAX_BATCH);
	expect_keys(2 * KVMM_MAX_BATCH, MANY - 2 * KVMM_MAX_BATCH);
	expect_no_end();
	assert_int_equal(keys_lost(), 0);
}

static void without_need_nothing_is_told(void **state)
{
	f.hdr->space[FK_SPACE].mode = KVMM_MODE_ON;
	match(5);
	end(KVMM_ENDED);
	expect_no_end();
}

static void a_tail_carries_the_keys_when_there_is_a_trace(void **state)
{
	const struct ring_key *k;
	struct ring_sqe sqe;
	const void *array;
	uint64_t word;

	f.hdr->space[FK_SPACE].mode = KVMM_MODE_ON;
	f.hdr->space[FK_SPACE].trace = 1;
	fk_seal(&f, 0, &key[0], FK_FULL, FK_FIRST, 5);
	word = fk_seal(&f, 0, &key[1], FK_FULL, FK_FIRST + 1, 5);
	match(3);
	end(KVMM_ENDED);
	assert_true(fk_take_op(&f, RING_END, &sqe, &array));
	assert_int_equal(sqe.frame, FK_FIRST + 1);
	assert_int_equal(sqe.arg, word);
	assert_int_equal(sqe.n, 2);
	assert_int_equal(sqe.nr_keys, 3);
	k = array;
	assert_memory_equal(k[2].key, key[2].b, 32);
	expect_no_end();
}

/* What was asked before anybody wanted to know has no time. */
static void a_switch_between_match_and_end_tells_nothing(void **state)
{
	f.hdr->space[FK_SPACE].mode = KVMM_MODE_ON;
	match(5);
	f.hdr->space[FK_SPACE].mode = KVMM_MODE_OBSERVE;
	end(KVMM_ENDED);
	expect_no_end();
}

static void a_recycled_request_has_asked_for_nothing(void **state)
{
	match(5);
	peek(6);
	end(KVMM_ENDED);
	expect_keys(0, 6);
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &c.rq), 0);
	end(KVMM_ENDED);
	expect_no_end();
}

/* The touch must not suffer, and nobody waits. */
static void a_full_arena_costs_the_keys_only(void **state)
{
	const uint32_t fit = LEDGER_ARENA_BYTES /
			     (KVMM_MAX_BATCH * sizeof(struct ring_key));
	struct ring_sqe sqe;
	uint32_t i, n = 0;

	for (i = 0; i < fit; i++) {
		match(KVMM_MAX_BATCH);
		end(KVMM_ENDED);
		assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &c.rq), 0);
	}
	assert_int_equal(keys_lost(), 0);
	f.hdr->space[FK_SPACE].mode = KVMM_MODE_ON;
	f.hdr->space[FK_SPACE].trace = 1;
	fk_seal(&f, 0, &key[0], FK_FULL, FK_FIRST, 5);
	match(KVMM_MAX_BATCH);
	end(KVMM_ENDED);
	assert_int_equal(keys_lost(), KVMM_MAX_BATCH);
	while (fk_take_op(&f, RING_END, &sqe, NULL))
		n++;
	assert_int_equal(n, fit + 1);
	assert_int_equal(sqe.frame, FK_FIRST);
	assert_int_equal(sqe.nr_keys, 0);
	assert_int_equal(sqe.arena_len, 0);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(observe_mode_tells_what_was_missed),
		T(the_keys_are_those_that_were_asked),
		T(the_last_match_counts),
		T(a_longer_peek_counts),
		T(groups_come_in_the_order_asked),
		T(more_than_an_entry_takes_goes_in_more),
		T(without_need_nothing_is_told),
		T(a_tail_carries_the_keys_when_there_is_a_trace),
		T(a_switch_between_match_and_end_tells_nothing),
		T(a_recycled_request_has_asked_for_nothing),
		T(a_full_arena_costs_the_keys_only),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
