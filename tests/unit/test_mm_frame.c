/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/unit.h"

#include "tests/lib/mm_rig.h"
#include "ipc/base/bits.h"
#include "kernels/kernels.h"

static struct rig rig;
static struct rig_client *a;
static struct mm_pool *pool;

static int setup(void **state)
{
	mr_open(&rig, &(struct rig_opts){ .bytes = 4u << 20 });
	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "frames", 16384);
	mr_win(a, 0);
	pool = a->win->pool;
	return 0;
}

static int teardown(void **state)
{
	mr_check(&rig);
	mr_close(&rig);
	unsetenv("KVMM_BREAK");
	return 0;
}

static enum frame_state state_of(uint32_t f)
{
	return frame_word_state(frame_word_of(pool, f));
}

static void generation_advances_at_the_seal_and_never_else(void **state)
{
	uint64_t gen[3];
	struct page *pg;
	uint32_t f;
	int i;

	for (i = 0; i < 3; i++) {
		mr_put(a, 1, 0, 1);
		pg = mr_page(a, 1, 0);
		f = copy_at(pg, 0)->frame;
		gen[i] = frame_word_gen(frame_word_of(pool, f));
		assert_true(frame_isolate(pool, f));
		assert_int_equal(frame_word_gen(frame_word_of(pool, f)), gen[i]);
		frame_put(pool, f);
		page_put(pg);
		assert_int_equal(state_of(f), FRAME_FREE);
		assert_int_equal(frame_word_gen(frame_word_of(pool, f)), gen[i]);
	}
	/* the epoch of the rig on top, the counter below it */
	assert_int_equal(gen[0] >> FRAME_GEN_EPOCH_SHIFT, 7);
	assert_true(gen[0] & ((UINT64_C(1) << FRAME_GEN_EPOCH_SHIFT) - 1));
}

static void word_of_a_reused_frame_never_comes_back(void **state)
{
	uint64_t word[64];
	uint32_t frame[64];
	struct page *pg;
	int i, k;

	for (i = 0; i < 64; i++) {
		mr_put(a, 1, 0, 1);
		pg = mr_page(a, 1, 0);
		frame[i] = copy_at(pg, 0)->frame;
		word[i] = frame_word_of(pool, frame[i]);
		for (k = 0; k < i; k++)
			assert_false(frame[k] == frame[i] &&
				     word[k] == word[i]);
		assert_true(frame_isolate(pool, frame[i]));
		frame_put(pool, frame[i]);
		page_put(pg);
	}
}

static void broken_generation_lets_a_word_come_back(void **state)
{
	struct page *pg;
	uint64_t word;
	uint32_t f;

	rig.mm->breaks = MM_BREAK_GENERATION;
	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	f = copy_at(pg, 0)->frame;
	word = frame_word_of(pool, f);
	assert_true(frame_isolate(pool, f));
	frame_put(pool, f);
	page_put(pg);
	/* another page in the same place, and nobody could tell */
	assert_int_equal(frame_take(pool, FRAME_FOR_LOAD, FRAME_LOADING), f);
	pg = page_create(a->space, 0, (uint64_t[4]){ 9 }, NULL, 0);
	assert_non_null(copy_get(pg, pool->nd));
	frame_seal(pool, f, pg);
	assert_int_equal(frame_word_of(pool, f), word);
}

static void isolation_puts_a_pinned_frame_back_as_it_was(void **state)
{
	struct page *pg;
	uint64_t word;
	uint32_t f;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	f = copy_at(pg, 0)->frame;
	word = frame_word_of(pool, f);
	mr_pin(a, f, 1);
	assert_true(frame_busy(pool, f));
	assert_false(frame_isolate(pool, f));
	assert_int_equal(frame_word_of(pool, f), word);
	assert_int_equal(copy_at(pg, 0)->state, COPY_READY);
	assert_int_equal(rig.mm->node[0].c.isolate_pinned, 1);
	mr_pin(a, f, -1);
	assert_true(frame_isolate(pool, f));
	assert_int_equal(state_of(f), FRAME_ISOLATED);
	assert_int_equal(copy_at(pg, 0)->state, COPY_NONE);
	frame_put(pool, f);
	page_put(pg);
}

static void reference_keeps_a_frame_without_isolating_it(void **state)
{
	struct page *pg;
	uint32_t f;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	f = copy_at(pg, 0)->frame;
	frame_ref(pool, f);
	assert_false(frame_isolate(pool, f));
	assert_int_equal(rig.mm->node[0].c.isolate_pinned, 0);
	frame_unref(pool, f);
	copy_at(pg, 0)->refs = 1;
	assert_false(frame_isolate(pool, f));
	copy_at(pg, 0)->refs = 0;
	assert_true(frame_isolate(pool, f));
	frame_put(pool, f);
	page_put(pg);
}

static void pins_of_every_window_count(void **state)
{
	struct rig_client *b = mr_client(&rig, 1, KVMM_RO);
	uint32_t f;

	mr_attach(b, "frames", 16384);
	mr_win(b, 0);
	mr_put(a, 1, 0, 1);
	f = copy_at(mr_page(a, 1, 0), 0)->frame;
	mr_pin(a, f, 3);
	mr_pin(b, f, 2);
	assert_int_equal(frame_pins(pool, f), 5);
	mr_exit(b);
	assert_int_equal(frame_pins(pool, f), 3);
	mr_pin(a, f, -3);
}

static void record_is_whole_while_ready_and_void_after(void **state)
{
	const struct frame_record *r;
	struct page *pg;
	uint32_t f;

	mr_put(a, 1, 0, 2);
	pg = mr_page(a, 1, 1);
	f = copy_at(pg, 0)->frame;
	r = &pool->record[f];
	assert_int_equal(r->crc, kvmm_crc32c(0, r,
					     offsetof(struct frame_record, crc)));
	assert_memory_equal(r->key, pg->key, 32);
	assert_memory_equal(r->parent, pg->parent->key, 32);
	assert_memory_equal(r->space_id, a->space->id, 16);
	assert_int_equal(r->gen, frame_word_gen(frame_word_of(pool, f)));
	assert_int_equal(r->raw_bytes, 16384);
	assert_int_equal(r->pos, 16);
	assert_true(frame_isolate(pool, f));
	frame_put(pool, f);
	page_put(pg);
	assert_int_not_equal(r->crc, kvmm_crc32c(0, r,
					offsetof(struct frame_record, crc)));
}

static void loads_may_take_what_is_kept_from_others(void **state)
{
	uint32_t f, n = 0, frames[4096];

	assert_true(pool->reserve > 0);
	while ((f = frame_take(pool, FRAME_FOR_OPEN, FRAME_LOADING)))
		frames[n++] = f;
	assert_int_equal(pool->nr_free, pool->reserve);
	f = frame_take(pool, FRAME_FOR_LOAD, FRAME_LOADING);
	assert_int_not_equal(f, 0);
	assert_int_equal(pool->nr_loading, n + 1);
	frame_put(pool, f);
	while (n)
		frame_put(pool, frames[--n]);
}

static void frame_zero_is_never_given_out(void **state)
{
	uint32_t f, n = 0, frames[4096];

	while ((f = frame_take(pool, FRAME_FOR_LOAD, FRAME_LOADING))) {
		assert_true(f >= pool->per_extent);
		frames[n++] = f;
	}
	assert_int_equal(n, pool->nr_frames);
	while (n)
		frame_put(pool, frames[--n]);
}

static void closed_extent_gives_nothing_until_it_is_opened_again(void **state)
{
	uint32_t before = pool->nr_free, f;

	f = frame_take(pool, FRAME_FOR_LOAD, FRAME_LOADING);
	extent_close(pool, f / pool->per_extent);
	assert_int_equal(pool->nr_free, before - pool->per_extent);
	frame_put(pool, f);
	assert_int_equal(pool->nr_free, before - pool->per_extent);
	mr_check(&rig);
	extent_reopen(pool, f / pool->per_extent);
	assert_int_equal(pool->nr_free, before);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(generation_advances_at_the_seal_and_never_else),
		T(word_of_a_reused_frame_never_comes_back),
		T(broken_generation_lets_a_word_come_back),
		T(isolation_puts_a_pinned_frame_back_as_it_was),
		T(reference_keeps_a_frame_without_isolating_it),
		T(pins_of_every_window_count),
		T(record_is_whole_while_ready_and_void_after),
		T(loads_may_take_what_is_kept_from_others),
		T(frame_zero_is_never_given_out),
		T(closed_extent_gives_nothing_until_it_is_opened_again),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
