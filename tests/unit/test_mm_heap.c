/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tests/lib/unit.h"

#include "daemon/mm/heap.h"
#include "ipc/base/bits.h"
#include "ipc/base/rand.h"

#define N	1000

struct item {
	struct heap_node node;
	unsigned int	no;
};

static struct heap heap;
static struct item item[N];

static int setup(void **state)
{
	unsigned int i;

	memset(&heap, 0, sizeof(heap));
	for (i = 0; i < N; i++) {
		item[i].no = i;
		heap_node_init(&item[i].node);
	}
	return 0;
}

static struct item *first(void)
{
	struct heap_node *n = heap_first(&heap);

	return n ? container_of(n, struct item, node) : NULL;
}

static struct item *take(void)
{
	struct item *it = first();

	if (it)
		heap_del(&heap, &it->node);
	return it;
}

static void an_empty_one_has_no_first(void **state)
{
	assert_true(heap_empty(&heap));
	assert_null(heap_first(&heap));
	heap_add(&heap, &item[0].node, 7);
	assert_false(heap_empty(&heap));
	assert_ptr_equal(take(), &item[0]);
	assert_true(heap_empty(&heap));
}

static void who_is_in_none_may_be_taken_out(void **state)
{
	heap_add(&heap, &item[0].node, 1);
	heap_del(&heap, &item[1].node);
	assert_true(heap_queued(&item[0].node));
	heap_del(&heap, &item[0].node);
	assert_false(heap_queued(&item[0].node));
	heap_del(&heap, &item[0].node);
	assert_true(heap_empty(&heap));
}

static void keys_come_out_in_order_however_they_went_in(void **state)
{
	unsigned int i;

	for (i = 0; i < N; i++)
		heap_add(&heap, &item[i].node, N - i);
	for (i = 0; i < N; i++)
		assert_int_equal(take()->no, N - 1 - i);
	for (i = 0; i < N; i++)
		heap_add(&heap, &item[i].node, i);
	for (i = 0; i < N; i++)
		assert_int_equal(take()->no, i);
	assert_null(take());
}

static void equal_keys_come_out_as_they_went_in(void **state)
{
	unsigned int i;

	for (i = 0; i < N; i++)
		heap_add(&heap, &item[i].node, i % 3);
	for (i = 0; i < N; i += 5)
		heap_del(&heap, &item[i].node);
	for (i = 0; i < 3; i++) {
		unsigned int k;

		for (k = i; k < N; k += 3)
			if (k % 5)
				assert_int_equal(take()->no, k);
	}
	assert_null(take());
}

/* The least of all that are in it, found by looking at each. */
static struct item *least(void)
{
	struct item *best = NULL;
	unsigned int i;

	for (i = 0; i < N; i++) {
		const struct heap_node *n = &item[i].node;

		if (!heap_queued(n))
			continue;
		if (!best || n->key < best->node.key ||
		    (n->key == best->node.key && n->seq < best->node.seq))
			best = &item[i];
	}
	return best;
}

static void the_first_is_the_least_whatever_comes_and_goes(void **state)
{
	struct rng rng;
	unsigned int i;

	rng_seed(&rng, test_seed());
	for (i = 0; i < 20000; i++) {
		struct item *it = &item[rng_below(&rng, N)];

		if (rng_below(&rng, 8) == 0)
			take();
		else if (heap_queued(&it->node))
			heap_del(&heap, &it->node);
		else
			heap_add(&heap, &it->node, rng_below(&rng, 50));
		if (i % 8 == 0)
			assert_ptr_equal(first(), least());
	}
	while (first()) {
		assert_ptr_equal(first(), least());
		take();
	}
	assert_null(least());
}

#define T(name) cmocka_unit_test_setup(name, setup)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(an_empty_one_has_no_first),
		T(who_is_in_none_may_be_taken_out),
		T(keys_come_out_in_order_however_they_went_in),
		T(equal_keys_come_out_as_they_went_in),
		T(the_first_is_the_least_whatever_comes_and_goes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
