/* SPDX-License-Identifier: Apache-2.0 */
/* Readers of the index, against a writer that is anywhere. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "ipc/index.h"
#include "tests/lib/unit.h"

#define LINES	64

static struct index *ix;

static int setup(void **state)
{
	ix = aligned_alloc(64, index_bytes(LINES, 0));
	memset(ix, 0, index_bytes(LINES, 0));
	ix->nr_lines = LINES;
	ix->seed[0] = 1;
	ix->seed[1] = 2;
	return 0;
}

static int teardown(void **state)
{
	free(ix);
	return 0;
}

static void key_of(uint64_t key[4], uint64_t n)
{
	int i;

	for (i = 0; i < 4; i++)
		key[i] = n * 4 + i;
}

/* As the daemon writes: odd, the words, even. */
static void put_line(struct index_line *l, uint64_t n, uint16_t group,
		     uint8_t node, uint64_t value)
{
	uint32_t v = (uint32_t)atomic_load_explicit(&l->word0,
						    memory_order_relaxed);
	uint64_t key[4];
	int i;

	key_of(key, n);
	atomic_store_explicit(&l->word0, index_word0(v | 1, group, node, 0),
			      memory_order_relaxed);
	for (i = 0; i < 4; i++)
		atomic_store_explicit(&l->key[i], key[i], memory_order_release);
	atomic_store_explicit(&l->fword, value, memory_order_release);
	atomic_store_explicit(&l->frame, value << 32 | (uint32_t)value,
			      memory_order_release);
	atomic_store_explicit(&l->aux, value, memory_order_release);
	atomic_store_explicit(&l->word0,
			      index_word0((v | 1) + 1, group, node, INDEX_USED),
			      memory_order_release);
}

static bool find(uint64_t n, uint16_t group, uint8_t node,
		 struct index_hit *hit)
{
	uint64_t key[4];

	key_of(key, n);
	return index_find(ix, index_hash(LINES, ix->seed, key, group, node),
			  key, group, node, hit);
}

static struct index_line *probe(uint64_t n, unsigned int i)
{
	uint64_t key[4];

	key_of(key, n);
	return &ix->line[index_probe(index_hash(LINES, ix->seed, key, 0, 0),
				     i)];
}

static void a_page_is_found_on_each_of_its_lines(void **state)
{
	struct index_hit hit;
	unsigned int i;

	for (i = 0; i < INDEX_PROBES; i++) {
		struct index_line *l = probe(7, i);

		put_line(l, 7, 0, 0, 1000 + i);
		assert_true(find(7, 0, 0, &hit));
		assert_int_equal(hit.fword, 1000 + i);
		assert_int_equal(hit.frame, 1000 + i);
		assert_int_equal(hit.cost_us, 1000 + i);
		memset((void *)l, 0, sizeof(*l));
		assert_false(find(7, 0, 0, &hit));
	}
}

/* Eight different lines, in two buckets, whatever the key is. */
static void probes_are_eight_lines_of_two_buckets(void **state)
{
	struct rng r;
	int k;

	rng_seed(&r, test_seed());
	for (k = 0; k < 10000; k++) {
		uint64_t nr = INDEX_SPAN * (1 + rng_below(&r, 1u << 20));
		uint64_t key[4], seen[INDEX_PROBES];
		struct index_hash h;
		unsigned int i, j;

		key_of(key, rng_next(&r));
		h = index_hash(nr, ix->seed, key, k, 0);
		for (i = 0; i < INDEX_PROBES; i++) {
			seen[i] = index_probe(h, i);
			assert_true(seen[i] < nr);
			for (j = 0; j < i; j++)
				assert_int_not_equal(seen[i], seen[j]);
			assert_int_equal(seen[i] / INDEX_BUCKET,
					 seen[i / INDEX_BUCKET *
					      INDEX_BUCKET] / INDEX_BUCKET);
		}
	}
}

static void another_group_node_or_key_is_another_page(void **state)
{
	struct index_hit hit;

	/* the same line, so that only the comparison can tell */
	put_line(probe(7, 0), 7, 1, 0, 5);
	assert_false(find(7, 0, 0, &hit));
	put_line(probe(7, 0), 7, 0, 1, 5);
	assert_false(find(7, 0, 0, &hit));
	put_line(probe(7, 0), 8, 0, 0, 5);
	assert_false(find(7, 0, 0, &hit));
	put_line(probe(7, 0), 7, 0, 0, 5);
	assert_true(find(7, 0, 0, &hit));
}

static void each_word_of_the_key_counts(void **state)
{
	struct index_line *l = probe(7, 0);
	struct index_hit hit;
	int i;

	for (i = 0; i < 4; i++) {
		put_line(l, 7, 0, 0, 5);
		l->key[i] ^= UINT64_C(1) << 63;
		assert_false(find(7, 0, 0, &hit));
	}
}

/* The daemon died in the middle: a miss after a bounded number of looks. */
static void a_line_left_odd_is_a_miss(void **state)
{
	struct index_line *l = probe(7, 0);
	struct index_hit hit;

	put_line(l, 7, 0, 0, 5);
	l->word0 |= 1;
	assert_false(find(7, 0, 0, &hit));
}

static _Atomic bool stop;

static void *writer(void *arg)
{
	struct index_line *l = arg;
	uint64_t i;

	for (i = 1; !stop; i++)
		put_line(l, i % 2 ? 7 : 8, 0, 0, i % 2 ? 77 : 88);
	return NULL;
}

/* A reader sees the one content or the other, never a mixture. */
static void a_reader_never_sees_half_a_line(void **state)
{
	struct index_line *l = probe(7, 0);
	unsigned int i, found = 0;
	uint64_t key[4];
	pthread_t t;

	put_line(l, 7, 0, 0, 77);
	key_of(key, 7);
	stop = false;
	assert_int_equal(pthread_create(&t, NULL, writer, l), 0);
	for (i = 0; i < 300000 || (!found && i < 100000000); i++) {
		struct index_hit hit;

		if (!index_read_line(l, key, 0, 0, &hit))
			continue;
		found++;
		if (hit.fword != 77 || hit.frame != 77 || hit.cost_us != 77 ||
		    hit.pos != 77)
			break;
	}
	stop = true;
	pthread_join(t, NULL);
	assert_int_equal(i >= 300000, 1);
	assert_true(found > 0);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_page_is_found_on_each_of_its_lines),
		T(probes_are_eight_lines_of_two_buckets),
		T(another_group_node_or_key_is_another_page),
		T(each_word_of_the_key_counts),
		T(a_line_left_odd_is_a_miss),
		T(a_reader_never_sees_half_a_line),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
