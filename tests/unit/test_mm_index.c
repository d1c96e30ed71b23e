/* SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "tests/lib/unit.h"

#include "tests/lib/fake_blk.h"
#include "tests/lib/mm_rig.h"
#include "ipc/base/bits.h"
#include "ipc/base/rand.h"

static struct rig rig;
static struct rig_client *a;
static struct mm_space *sp;

static int setup(void **state)
{
	struct fake_blk *blk = fake_blk_create(16u << 20, 1u << 20);

	assert_non_null(blk);
	mr_open(&rig, &(struct rig_opts){ .bytes = 4u << 20,
					  .lower = &blk->n });
	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "index", 16384);
	sp = a->space;
	mr_settle(&rig);
	return 0;
}

static int teardown(void **state)
{
	mr_close(&rig);
	return 0;
}

/* A page that is nothing but a name. */
static struct page *named(uint32_t i)
{
	static struct page pg;

	pg.space = sp;
	mr_key((uint8_t *)pg.key, 1, i);
	pg.pos = i;
	pg.cost_us = i * 3;
	pg.raw_bytes = 16384;
	return &pg;
}

static bool find_in(const struct index *ix, uint32_t i, uint8_t node,
		    struct index_hit *hit)
{
	const struct page *pg = named(i);

	return index_find(ix, index_hash(ix->nr_lines, ix->seed, pg->key,
					 pg->group, node),
			  pg->key, pg->group, node, hit);
}

static bool find(uint32_t i, uint8_t node, struct index_hit *hit)
{
	return find_in(sp->index, i, node, hit);
}

static void reader_finds_what_was_set_until_it_is_cleared(void **state)
{
	struct index_hit hit;

	assert_false(find(5, 0, &hit));
	index_set(sp, named(5), 0, INDEX_USED, 0x1234, 77);
	assert_true(find(5, 0, &hit));
	assert_int_equal(hit.fword, 0x1234);
	assert_int_equal(hit.frame, 77);
	assert_int_equal(hit.cost_us, 15);
	assert_int_equal(hit.pos, 5);
	assert_int_equal(hit.raw_bytes, 16384);
	assert_false(find(5, 1, &hit));
	assert_false(find(6, 0, &hit));
	index_clear(sp, named(5), 0);
	assert_false(find(5, 0, &hit));
	assert_int_equal(sp->index_used, 0);
}

static void setting_again_changes_the_line_and_adds_none(void **state)
{
	struct index_hit hit;

	index_set(sp, named(5), 0, INDEX_USED, 1, 10);
	index_set(sp, named(5), 0, INDEX_USED, 2, 11);
	assert_int_equal(sp->index_used, 1);
	assert_true(find(5, 0, &hit));
	assert_int_equal(hit.fword, 2);
}

static void nodes_of_a_page_have_lines_of_their_own(void **state)
{
	struct index_hit hit;

	index_set(sp, named(5), 0, INDEX_USED, 1, 10);
	index_set(sp, named(5), 1, INDEX_USED, 2, 11);
	assert_true(find(5, 0, &hit));
	assert_int_equal(hit.frame, 10);
	assert_true(find(5, 1, &hit));
	assert_int_equal(hit.frame, 11);
	index_clear(sp, named(5), 0);
	assert_true(find(5, 1, &hit));
}

static void clearing_what_is_not_there_is_nothing(void **state)
{
	index_clear(sp, named(5), 0);
	assert_int_equal(sp->index_used, 0);
}

static void growth_keeps_every_line_and_publishes_the_epoch_last(void **state)
{
	uint64_t lines = sp->index->nr_lines;
	struct index_hit hit;
	uint32_t i;

	for (i = 0; i < lines; i++)
		index_set(sp, named(i), 0, INDEX_USED, i + 1, i);
	assert_true(sp->index->nr_lines > lines);
	assert_true(rig.index_grown > 0);
	assert_int_equal(sp->index_epoch, 1 + rig.index_grown);
	assert_int_equal(sp->index->epoch, sp->index_epoch);
	assert_int_equal(atomic_load(&rig.hdr->space[sp->ix].index_epoch),
			 sp->index_epoch);
	assert_int_equal(sp->index_used, lines);
	assert_int_equal(sp->index_pushed, 0);
	for (i = 0; i < lines; i++) {
		assert_true(find(i, 0, &hit));
		assert_int_equal(hit.fword, i + 1);
	}
}

static void old_index_is_never_written_again(void **state)
{
	uint64_t lines = sp->index->nr_lines, bytes = index_bytes(lines, sp->index->nr_words);
	struct shm old = SHM_INIT;
	struct index *copy;
	uint32_t i;

	for (i = 0; i < lines / 2; i++)
		index_set(sp, named(i), 0, INDEX_USED, 1, i);
	assert_int_equal(shm_map_fd(&old, dup(sp->index_shm.ro_fd), bytes, 0),
			 0);
	copy = malloc(bytes);
	assert_non_null(copy);
	index_set(sp, named(i), 0, INDEX_USED, 1, i);	/* grows */
	memcpy(copy, old.addr, bytes);
	assert_int_equal(rig.index_grown, 1);
	for (i = 0; i < lines / 2; i++)
		index_clear(sp, named(i), 0);
	assert_memory_equal(copy, old.addr, bytes);
	free(copy);
	shm_fini(&old);
}

/* Keys that all go to the same two buckets, as a hostile client would choose. */
static void colliding_keys_push_each_other_out_and_nobody_else(void **state)
{
	struct page *pg = named(0);
	struct index_hash want = index_hash(sp->index->nr_lines,
					    sp->index->seed, pg->key, 0, 0);
	uint64_t epoch = sp->index_epoch;
	unsigned int n = 0;
	uint32_t i;

	for (i = 1; n < 64; i++) {
		struct index_hash h;

		pg = named(i);
		h = index_hash(sp->index->nr_lines, sp->index->seed, pg->key,
			       0, 0);
		if (h.home / INDEX_BUCKET != want.home / INDEX_BUCKET)
			continue;
		index_set(sp, pg, 0, INDEX_USED, 1, i);
		n++;
		if (i > 10000000)
			fail_msg("no collisions");
	}
	/* at so low a load growth is no answer */
	assert_int_equal(sp->index_epoch, epoch);
	assert_int_equal(sp->index_used + sp->index_pushed, n);
}

static void random_operations_agree_with_an_array(void **state)
{
	enum { KEYS = 3000 };
	static uint32_t frame[KEYS];
	struct rng rng;
	uint32_t i, k, used = 0;

	memset(frame, 0, sizeof(frame));
	rng_seed(&rng, test_seed());
	for (i = 0; i < 60000; i++) {
		struct index_hit hit;

		k = rng_below(&rng, KEYS);
		if (rng_below(&rng, 3)) {
			used += !frame[k];
			frame[k] = i + 1;
			index_set(sp, named(k), 0, INDEX_USED, i, i + 1);
		} else if (frame[k]) {
			used--;
			frame[k] = 0;
			index_clear(sp, named(k), 0);
		}
		k = rng_below(&rng, KEYS);
		assert_int_equal(find(k, 0, &hit), frame[k] != 0);
		if (frame[k])
			assert_int_equal(hit.frame, frame[k]);
	}
	assert_int_equal(sp->index_used, used);
}

/*
 * Not before the index is in use, one job an index, and what grows or ends under
 * a job is left to it: the worker has a descriptor of its own.
 */
static void huge_pages_are_asked_for_when_they_cost_nothing(void **state)
{
	struct index_hit hit;
	struct huge_job *first;
	uint32_t i = 0, n;

	assert_false(sp->index_asked);
	while (index_bytes(sp->index->nr_lines, 0) < 2 * SHM_HUGE_BYTES)
		index_add(sp, named(i), 0, 0, i, i + 1), i++;
	/* it has grown to that size just now */
	first = sp->index_huge;
	assert_non_null(first);
	index_add(sp, named(i), 0, 0, i, i + 1);
	i++;
	assert_ptr_equal(sp->index_huge, first);
	n = (uint32_t)sp->index->nr_lines;
	while (sp->index->nr_lines == n)
		index_add(sp, named(i), 0, 0, i, i + 1), i++;
	assert_ptr_not_equal(sp->index_huge, first);
	mr_settle(&rig);
	assert_null(sp->index_huge);
	assert_true(sp->index_asked);
	for (n = 0; n < i; n++) {
		assert_true(find(n, 0, &hit));
		assert_int_equal(hit.frame, n + 1);
		index_clear(sp, named(n), 0);
	}
}

/* -- words ----------------------------------------------------------------------- */

static bool below(uint32_t i, struct index_hit *hit)
{
	return index_look_below(sp->index, named(i)->key, 0, hit);
}

static void set_below(uint32_t i, uint64_t nodes, bool pending)
{
	const struct below b = {
		.nodes = nodes, .pending = pending, .source = 1,
	};

	index_below_set(sp, named(i), &b);
}

static void page_below_is_found_by_its_word(void **state)
{
	struct index_hit hit;

	assert_false(below(5, &hit));
	set_below(5, 6, true);
	assert_true(below(5, &hit));
	assert_int_equal(hit.fword, 6);
	assert_int_equal(hit.frame, 1);
	assert_int_equal(hit.cost_us, 15);
	assert_true(hit.flags & INDEX_PENDING);
	assert_int_equal(sp->below_used, 1);
	assert_int_equal(sp->index_used, 0);
	set_below(5, 2, false);
	assert_int_equal(sp->below_used, 1);
	assert_true(below(5, &hit));
	assert_int_equal(hit.fword, 2);
	assert_false(hit.flags & INDEX_PENDING);
	assert_false(below(6, &hit));
	index_below_clear(sp, named(5));
	assert_false(below(5, &hit));
	assert_int_equal(sp->below_used, 0);
	index_below_clear(sp, named(5));
	assert_int_equal(sp->below_used, 0);
}

static void cost_is_kept_to_two_per_cent(void **state)
{
	uint32_t us[] = { 0, 1, 127, 128, 200, 999, 12345, 7654321,
			  UINT32_MAX };
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(us); i++) {
		uint32_t got = index_cost_unpack(index_cost_pack(us[i]));

		assert_true(got <= us[i]);
		assert_true(got >= us[i] - us[i] / 50);
	}
}

/* Real pages, since growth goes by these. */
static void growth_takes_all_words_along(void **state)
{
	struct mm_node *nd = &rig.mm->node[1];
	uint32_t i, n = 3000, grown = rig.index_grown;
	struct index_hit hit;
	uint64_t key[4];

	for (i = 0; i < n; i++) {
		struct page *pg;

		mr_key((uint8_t *)key, 7, i);
		pg = page_create(sp, 0, key, NULL, PAGE_ROOT);
		assert_non_null(pg);
		pg->cost_us = i;
		page_copy(pg, nd)->slot.off = i * UINT64_C(16384);
		copy_set_state(pg, nd, COPY_READY);
	}
	assert_true(rig.index_grown > grown);
	assert_int_equal(sp->below_used, n);
	assert_int_equal(sp->index_pushed, 0);
	assert_true(sp->index->nr_words * 2 / 3 >= n);
	for (i = 0; i < n; i++) {
		mr_key((uint8_t *)key, 7, i);
		assert_true(index_look_below(sp->index, key, 0, &hit));
		assert_int_equal(hit.fword, 2);
		assert_int_equal(hit.cost_us,
				 index_cost_unpack(index_cost_pack(i)));
	}
	for (i = 0; i < n; i++) {
		struct page *pg;

		mr_key((uint8_t *)key, 7, i);
		pg = page_find(sp, 0, key);
		copy_set_state(pg, nd, COPY_NONE);
		page_put(pg);
		assert_false(index_look_below(sp->index, key, 0, &hit));
	}
	assert_int_equal(sp->below_used, 0);
}

/* Full to the brim nothing is lost but what is counted. */
static void words_that_find_no_place_push_others_out(void **state)
{
	uint64_t nr = sp->index->nr_words, found = 0;
	struct index_hit hit;
	uint32_t i;

	sp->below_used = 0;
	for (i = 0; i < nr; i++) {
		const struct below b = { .nodes = 2, .source = 1 };

		/* it would grow */
		sp->below_used = 0;
		index_below_add(sp, named(i), &b);
	}
	assert_int_equal(sp->index->nr_words, nr);
	for (i = 0; i < nr; i++)
		found += below(i, &hit);
	assert_int_equal(found + sp->index_pushed, nr);
	assert_true(found > nr * 9 / 10);
	for (i = 0; i < nr; i++)
		if (below(i, &hit)) {
			sp->below_used = 1;
			index_below_clear(sp, named(i));
		}
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(reader_finds_what_was_set_until_it_is_cleared),
		T(setting_again_changes_the_line_and_adds_none),
		T(nodes_of_a_page_have_lines_of_their_own),
		T(clearing_what_is_not_there_is_nothing),
		T(growth_keeps_every_line_and_publishes_the_epoch_last),
		T(old_index_is_never_written_again),
		T(colliding_keys_push_each_other_out_and_nobody_else),
		T(random_operations_agree_with_an_array),
		T(page_below_is_found_by_its_word),
		T(cost_is_kept_to_two_per_cent),
		T(growth_takes_all_words_along),
		T(words_that_find_no_place_push_others_out),
		T(huge_pages_are_asked_for_when_they_cost_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
