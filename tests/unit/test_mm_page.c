/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/unit.h"

#include "tests/lib/fake_blk.h"
#include "tests/lib/mm_rig.h"
#include "ipc/base/bits.h"

#define PAGE	16384

static struct rig rig;
static struct fake_blk *blk;
static struct rig_client *a;
static struct mm_node *hi, *lo;
static struct mm_pool *pool;

static int setup(void **state)
{
	blk = fake_blk_create(8u << 20, 1u << 20);
	assert_non_null(blk);
	mr_open(&rig, &(struct rig_opts){ .bytes = 4u << 20,
					   .lower = &blk->n });
	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "page", PAGE);
	mr_win(a, 0);
	hi = &rig.mm->node[0];
	lo = &rig.mm->node[1];
	pool = a->win->pool;
	return 0;
}

static int teardown(void **state)
{
	mr_check(&rig);
	mr_close(&rig);
	return 0;
}

static bool line_of(struct page *pg, uint8_t node, struct index_hit *hit)
{
	const struct index *ix = a->space->index;

	return index_find(ix, index_hash(ix->nr_lines, ix->seed, pg->key,
					 pg->group, node),
			  pg->key, pg->group, node, hit);
}

static bool word_of(const struct page *pg, struct index_hit *hit)
{
	return index_look_below(a->space->index, pg->key, pg->group, hit);
}

static bool written_down(void *arg)
{
	return copy_at((struct page *)arg, 1)->state == COPY_READY;
}

static void write_down(struct page *pg)
{
	assert_true(page_writeback(pg, hi, NODE_PRIO_WRITEBACK) > 0);
	mr_until(&rig, written_down, pg);
}

static void children_are_counted_where_they_are(void **state)
{
	struct page *head, *tail;

	mr_put(a, 1, 0, 2);
	head = mr_page(a, 1, 0);
	tail = mr_page(a, 1, 1);
	assert_int_equal(head->nr_bound, 1);
	assert_int_equal(copy_at(head, 0)->nr_bound, 1);
	assert_int_equal(copy_at(head, 1)->nr_bound, 0);
	write_down(tail);	/* takes its parent along */
	assert_int_equal(copy_at(head, 1)->nr_bound, 1);
	assert_int_equal(copy_at(head, 1)->state, COPY_READY);
	page_drop_copy(tail, hi);
	assert_int_equal(copy_at(head, 0)->nr_bound, 0);
	assert_int_equal(head->nr_bound, 1);
}

static void page_is_clean_while_a_copy_lives_below(void **state)
{
	struct page *pg;
	struct index_hit hit;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	assert_int_equal(pool->nr_dirty, 1);
	assert_false(page_has_below(pg, hi));
	assert_false(word_of(pg, &hit));
	write_down(pg);
	assert_int_equal(pool->nr_dirty, 0);
	assert_true(page_has_below(pg, hi));
	assert_ptr_equal(page_source(pg, hi), lo);
	assert_true(word_of(pg, &hit));
	assert_int_equal(hit.frame, 1);
	assert_int_equal(hit.fword, BIT(1));
	page_drop_copy(pg, lo);
	assert_int_equal(pool->nr_dirty, 1);
	assert_null(page_source(pg, hi));
	assert_false(word_of(pg, &hit));
}

static void doomed_copy_is_no_copy_below(void **state)
{
	struct page *pg;
	struct index_hit hit;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	write_down(pg);
	copy_at(pg, 1)->refs = 1;		/* a read of it is under way */
	page_drop_copy(pg, lo);
	assert_int_equal(copy_at(pg, 1)->state, COPY_READY);
	assert_int_equal(pool->nr_dirty, 1);
	assert_false(page_has_below(pg, hi));
	assert_null(page_source(pg, hi));
	assert_false(word_of(pg, &hit));
	copy_at(pg, 1)->refs = 0;
	page_drop_copy(pg, lo);
}

static void bad_page_is_found_by_nobody_and_may_be_made_again(void **state)
{
	struct page *pg, *again;
	struct index_hit hit;
	uint32_t f;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	f = copy_at(pg, 0)->frame;
	mr_pin(a, f, 1);
	page_drop_all(pg);
	assert_int_equal(copy_at(pg, 0)->state, COPY_READY);
	assert_null(mr_page(a, 1, 0));
	assert_false(line_of(pg, 0, &hit));
	mr_put(a, 1, 0, 1);
	again = mr_page(a, 1, 0);
	assert_ptr_not_equal(again, pg);
	mr_check(&rig);
	/* the end of the old one leaves the new one's line alone */
	mr_pin(a, f, -1);
	assert_true(frame_isolate(pool, f));
	frame_put(pool, f);
	page_put(pg);
	assert_true(line_of(again, 0, &hit));
	assert_int_equal(hit.frame, copy_at(again, 0)->frame);
}

static void loading_shows_as_pending(void **state)
{
	struct ring_key k = { .group = 0 };
	struct ring_sqe sqe = { .op = RING_FETCH, .n = 1, .tag = 8 };
	struct page *pg;
	struct index_hit hit;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	write_down(pg);
	page_drop_copy(pg, hi);
	assert_int_equal(copy_at(pg, 0)->state, COPY_NONE);
	assert_false(line_of(pg, 0, &hit));
	assert_true(word_of(pg, &hit));
	assert_int_equal(hit.flags & INDEX_PENDING, 0);
	blk->hold[NODE_READ] = true;
	mr_key(k.key, 1, 0);
	mm_fetch(a->win, &sqe, &k);
	assert_true(word_of(pg, &hit));
	assert_int_not_equal(hit.flags & INDEX_PENDING, 0);
	mr_check(&rig);
	blk->hold[NODE_READ] = false;
	mr_wait(&rig, 8);
	assert_int_equal(mr_answer(&rig, 8)->res[0].result, 0);
	assert_true(line_of(pg, 0, &hit));
	mr_take(&rig, 8);
}

static void publisher_of_a_page_below_becomes_its_copy_here(void **state)
{
	const struct rig_done *d;
	struct ring_pub p;
	struct page *pg;
	uint32_t f;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	write_down(pg);
	page_drop_copy(pg, hi);
	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	d = mr_publish(a, &p, 1, 5);
	assert_int_equal(d->res[0].result, 0);
	assert_int_equal(d->res[0].frame, f);
	assert_ptr_equal(mr_page(a, 1, 0), pg);
	assert_int_equal(pg->nr_copies, 2);
	assert_int_equal(pool->nr_dirty, 0);
	mr_take(&rig, 5);
}

static void publisher_waits_for_a_load_of_the_page(void **state)
{
	struct ring_key k = { .group = 0 };
	struct ring_sqe sqe = { .op = RING_FETCH, .n = 1, .tag = 8 };
	struct ring_pub p;
	struct page *pg;
	uint32_t f;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	write_down(pg);
	page_drop_copy(pg, hi);
	blk->hold[NODE_READ] = true;
	mr_key(k.key, 1, 0);
	mm_fetch(a->win, &sqe, &k);
	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	assert_null(mr_publish(a, &p, 1, 5));
	blk->hold[NODE_READ] = false;
	mr_wait(&rig, 8);
	mr_wait(&rig, 5);
	assert_int_equal(mr_answer(&rig, 5)->res[0].result, -EEXIST);
	assert_int_equal(mr_answer(&rig, 5)->res[0].frame,
			 mr_answer(&rig, 8)->res[0].frame);
	mr_take(&rig, 5);
	mr_take(&rig, 8);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

static uint32_t longest_chain(void)
{
	uint32_t longest = 0;
	uint64_t i;

	for (i = 0; i < a->space->hash_size; i++) {
		const struct page *pg = a->space->hash[i].first;
		uint32_t n = 0;

		for (; pg; pg = pg->hnext)
			n++;
		longest = max(longest, n);
	}
	return longest;
}

/* Published, pinned and reported again and again: look-ups of it stay short. */
static void bad_pages_of_one_key_do_not_share_a_chain(void **state)
{
	struct ring_key key = { 0 };
	uint32_t i, n = 100;

	mr_key(key.key, 1, 0);
	for (i = 0; i < n; i++) {
		mr_put(a, 1, 0, 1);
		mr_pin(a, copy_at(mr_page(a, 1, 0), 0)->frame, 1);
		mm_report(a->mc, a->space, &key, RING_UNDO);
		assert_null(mr_page(a, 1, 0));
	}
	assert_int_equal(a->space->nr_pages, n);
	assert_true(longest_chain() < n / 5);
	mr_check(&rig);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(children_are_counted_where_they_are),
		T(page_is_clean_while_a_copy_lives_below),
		T(doomed_copy_is_no_copy_below),
		T(bad_page_is_found_by_nobody_and_may_be_made_again),
		T(loading_shows_as_pending),
		T(publisher_of_a_page_below_becomes_its_copy_here),
		T(publisher_waits_for_a_load_of_the_page),
		T(bad_pages_of_one_key_do_not_share_a_chain),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
