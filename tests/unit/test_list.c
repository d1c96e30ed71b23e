/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/base/list.h"
#include "ipc/base/rand.h"
#include "tests/lib/unit.h"

struct item {
	int		nr;
	struct list	link;
};

/* The list as digits, front first, so that a failure can be read. */
static long digits(struct list *head)
{
	struct item *it;
	long v = 0;

	list_for_each_entry(it, head, link)
		v = v * 10 + it->nr;
	return v;
}

static void fill(struct list *head, struct item *items, int n)
{
	list_init(head);
	for (int i = 0; i < n; i++) {
		items[i].nr = i + 1;
		list_add_tail(head, &items[i].link);
	}
}

static void members_stay_in_the_order_they_were_added(void **state)
{
	struct item it[4] = { { 0 } };
	struct list head;

	fill(&head, it, 3);
	it[3].nr = 9;
	list_add(&head, &it[3].link);
	assert_int_equal(digits(&head), 9123);
	assert_int_equal(list_count(&head), 4);
	assert_ptr_equal(list_first(&head, struct item, link), &it[3]);
	assert_ptr_equal(list_last(&head, struct item, link), &it[2]);
}

static void empty_list_has_no_first_and_no_last(void **state)
{
	struct list head = LIST_INIT(head);

	assert_true(list_empty(&head));
	assert_null(list_first(&head, struct item, link));
	assert_null(list_last(&head, struct item, link));
}

static void deleted_member_may_be_deleted_again(void **state)
{
	struct item it[3];
	struct list head;

	fill(&head, it, 3);
	list_del(&it[1].link);
	list_del(&it[1].link);
	assert_true(list_empty(&it[1].link));
	assert_int_equal(digits(&head), 13);
}

static void moving_changes_the_order_only(void **state)
{
	struct item it[3];
	struct list head;

	fill(&head, it, 3);
	list_move_tail(&head, &it[0].link);
	assert_int_equal(digits(&head), 231);
	list_move(&head, &it[2].link);
	assert_int_equal(digits(&head), 321);
}

static void splice_empties_its_source(void **state)
{
	struct item a[2], b[2];
	struct list to, from;

	fill(&to, a, 2);
	fill(&from, b, 2);
	list_splice_tail(&to, &from);
	assert_int_equal(digits(&to), 1212);
	assert_true(list_empty(&from));
	list_splice_tail(&to, &from);
	assert_int_equal(digits(&to), 1212);
	assert_true(list_check(&to, 4));
}

static void safe_walk_survives_deletion_of_every_member(void **state)
{
	struct item it[5], *pos, *tmp;
	struct list head;
	int seen = 0;

	fill(&head, it, 5);
	list_for_each_entry_safe(pos, tmp, &head, link) {
		list_del(&pos->link);
		seen++;
	}
	assert_int_equal(seen, 5);
	assert_true(list_empty(&head));
}

static void reverse_walk_sees_the_last_first(void **state)
{
	struct item it[3], *pos;
	struct list head;
	long v = 0;

	fill(&head, it, 3);
	list_for_each_entry_reverse(pos, &head, link)
		v = v * 10 + pos->nr;
	assert_int_equal(v, 321);
}

static void check_finds_a_broken_back_link_and_a_loop(void **state)
{
	struct item it[4];
	struct list head;

	fill(&head, it, 4);
	assert_true(list_check(&head, 4));
	assert_false(list_check(&head, 3));
	it[2].link.prev = &head;
	assert_false(list_check(&head, 4));
	it[2].link.prev = &it[1].link;
	it[3].link.next = &it[1].link;
	assert_false(list_check(&head, 4));
}

static void random_operations_agree_with_an_array(void **state)
{
	struct item it[9];
	struct list head;
	bool on[9] = { false };
	struct rng r;

	rng_seed(&r, test_seed());
	list_init(&head);
	for (int i = 0; i < 9; i++) {
		it[i].nr = i;
		list_init(&it[i].link);
	}
	for (int step = 0; step < 5000; step++) {
		unsigned int i = (unsigned int)rng_below(&r, 9), n = 0;

		if (!on[i] && rng_below(&r, 2))
			list_add(&head, &it[i].link);
		else if (!on[i])
			list_add_tail(&head, &it[i].link);
		else
			list_del(&it[i].link);
		on[i] = !on[i];
		for (int k = 0; k < 9; k++) {
			n += on[k];
			assert_int_equal(list_empty(&it[k].link), !on[k]);
		}
		assert_int_equal(list_count(&head), n);
		assert_true(list_check(&head, n));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(members_stay_in_the_order_they_were_added),
		cmocka_unit_test(empty_list_has_no_first_and_no_last),
		cmocka_unit_test(deleted_member_may_be_deleted_again),
		cmocka_unit_test(moving_changes_the_order_only),
		cmocka_unit_test(splice_empties_its_source),
		cmocka_unit_test(safe_walk_survives_deletion_of_every_member),
		cmocka_unit_test(reverse_walk_sees_the_last_first),
		cmocka_unit_test(check_finds_a_broken_back_link_and_a_loop),
		cmocka_unit_test(random_operations_agree_with_an_array),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
