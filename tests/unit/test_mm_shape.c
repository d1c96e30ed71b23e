/* SPDX-License-Identifier: Apache-2.0 */
/* Pages cut into parts and put together again, against a byte-by-byte oracle. */
#include <stdlib.h>
#include <string.h>

#include <kvmm/kvmm.h>

#include "daemon/mm/shape.h"
#include "ipc/base/bits.h"
#include "ipc/base/rand.h"
#include "kernels/kernels.h"
#include "tests/lib/unit.h"

#define SEGS	24
#define SLACK	64	/* behind a part: must stay as it was */
#define CANARY	0xc5

/**
 * struct cut - a class, its shape, and memory for both forms of a page
 */
struct cut {
	struct desc_seg	seg[SEGS];
	struct desc_class c;
	struct shape	*sh;
	uint8_t		*page;
	uint8_t		*part[KVMM_MAX_GANG];
	struct image	im;
};

static void cut_init(struct cut *t, uint32_t world)
{
	uint32_t i;

	t->c.segs = t->seg;
	t->c.page_bytes = 0;
	for (i = 0; i < t->c.nsegs; i++)
		t->c.page_bytes += t->seg[i].bytes;
	t->sh = shape_create(&t->c, world);
	assert_non_null(t->sh);
	t->page = malloc(t->c.page_bytes);
	assert_non_null(t->page);
	t->im = (struct image){ .sh = t->sh, .len = t->c.page_bytes };
	for (i = 0; i < world; i++) {
		t->part[i] = malloc(t->sh->part_bytes + SLACK);
		assert_non_null(t->part[i]);
		memset(t->part[i], CANARY, t->sh->part_bytes + SLACK);
		t->im.part[i] = t->part[i];
	}
}

static void cut_fini(struct cut *t)
{
	uint32_t i;

	for (i = 0; i < t->sh->world; i++)
		free(t->part[i]);
	free(t->page);
	free(t->sh);
}

static void cut_random(struct cut *t, struct rng *rng, uint32_t world)
{
	uint32_t i;

	memset(t, 0, sizeof(*t));
	t->c.nsegs = 1 + rng_below(rng, SEGS);
	for (i = 0; i < t->c.nsegs; i++) {
		t->seg[i].shard = rng_below(rng, 2) ? KVMM_STRIPE : KVMM_MIRROR;
		t->seg[i].align = 1u << rng_below(rng, 7);
		t->seg[i].bytes = world * (1 + rng_below(rng, 200));
		/* odd ones too, where nothing has to divide */
		if (t->seg[i].shard == KVMM_MIRROR)
			t->seg[i].bytes = 1 + rng_below(rng, 1500);
	}
	cut_init(t, world);
	rng_fill(rng, t->page, t->c.page_bytes);
}

/* Is every byte of @t->page where the segments say, for @len bytes of it? */
static void assert_cut(const struct cut *t, uint32_t len)
{
	uint32_t off[SEGS], at = 0, s, i, rank;
	uint32_t world = t->sh->world;
	uint8_t *seen[KVMM_MAX_GANG];

	assert_int_equal(desc_part(&t->c, world, off), t->sh->part_bytes);
	for (rank = 0; rank < world; rank++)
		seen[rank] = calloc(1, t->sh->part_bytes + SLACK);
	for (s = 0; s < t->c.nsegs; s++) {
		uint32_t share = t->seg[s].bytes / world;

		for (i = 0; i < t->seg[s].bytes; i++, at++) {
			for (rank = 0; rank < world; rank++) {
				uint32_t o = off[s] + i;

				if (at >= len)
					continue;
				if (t->seg[s].shard == KVMM_STRIPE) {
					if (i / share != rank)
						continue;
					o = off[s] + i % share;
				}
				assert_int_equal(t->part[rank][o], t->page[at]);
				seen[rank][o] = 1;
			}
		}
	}
	for (rank = 0; rank < world; rank++) {
		for (i = 0; i < t->sh->part_bytes + SLACK; i++)
			if (!seen[rank][i])
				assert_int_equal(t->part[rank][i], CANARY);
		free(seen[rank]);
	}
}

static void runs_cover_the_page_once_and_in_order(void **state)
{
	struct rng rng;
	unsigned int round;
	uint32_t i, at;

	rng_seed(&rng, test_seed());
	for (round = 0; round < 200; round++) {
		struct cut t;

		cut_random(&t, &rng, 1 + rng_below(&rng, KVMM_MAX_GANG));
		for (i = 0, at = 0; i < t.sh->nr_runs; i++) {
			assert_int_equal(t.sh->run[i].at, at);
			assert_true(t.sh->run[i].len);
			assert_true(t.sh->run[i].rank < t.sh->world);
			assert_true(t.sh->run[i].off + t.sh->run[i].len <=
				    t.sh->part_bytes);
			at += t.sh->run[i].len;
		}
		assert_int_equal(at, t.c.page_bytes);
		cut_fini(&t);
	}
}

static void scattered_bytes_are_where_the_segments_say(void **state)
{
	struct rng rng;
	unsigned int round;

	rng_seed(&rng, test_seed());
	for (round = 0; round < 100; round++) {
		struct image flat;
		struct cut t;
		uint8_t *back;

		cut_random(&t, &rng, 1 + rng_below(&rng, KVMM_MAX_GANG));
		flat = image_flat(t.page, t.c.page_bytes);
		image_copy(&t.im, &flat);
		assert_cut(&t, t.c.page_bytes);

		back = calloc(1, t.c.page_bytes);
		flat = image_flat(back, t.c.page_bytes);
		image_copy(&flat, &t.im);
		assert_memory_equal(back, t.page, t.c.page_bytes);
		assert_int_equal(image_crc(&t.im),
				 kvmm_crc32c(0, t.page, t.c.page_bytes));
		assert_int_equal(image_crc(&flat), image_crc(&t.im));
		free(back);
		cut_fini(&t);
	}
}

static void a_shorter_page_leaves_the_rest_alone(void **state)
{
	struct rng rng;
	unsigned int round;

	rng_seed(&rng, test_seed());
	for (round = 0; round < 100; round++) {
		struct image flat;
		struct cut t;
		uint32_t len;

		cut_random(&t, &rng, 1 + rng_below(&rng, KVMM_MAX_GANG));
		len = rng_below(&rng, t.c.page_bytes + 1);
		flat = image_flat(t.page, len);
		t.im.len = len;
		image_copy(&t.im, &flat);
		assert_cut(&t, len);
		assert_int_equal(image_crc(&t.im),
				 kvmm_crc32c(0, t.page, len));
		cut_fini(&t);
	}
}

/* What the other ranks hold of a mirror is theirs to get wrong, not the page's. */
static void a_mirror_is_read_from_the_first_rank(void **state)
{
	struct cut t = {
		.seg = { { 64, 1, 0, KVMM_SEG_K, KVMM_STRIPE },
			 { 100, 1, 0, KVMM_SEG_KV, KVMM_MIRROR } },
		.c.nsegs = 2,
	};
	struct image flat;
	uint8_t back[164];

	cut_init(&t, 4);
	memset(t.page, 0x11, 164);
	flat = image_flat(t.page, 164);
	image_copy(&t.im, &flat);
	memset(t.part[2] + 16, 0x22, 100);
	flat = image_flat(back, 164);
	image_copy(&flat, &t.im);
	assert_memory_equal(back, t.page, 164);
	cut_fini(&t);
}

static void from_gang_to_gang_all_parts_are_written(void **state)
{
	struct rng rng;
	unsigned int round;

	rng_seed(&rng, test_seed());
	for (round = 0; round < 50; round++) {
		struct image flat, to;
		struct cut a, b;

		cut_random(&a, &rng, 2 + rng_below(&rng, KVMM_MAX_GANG - 1));
		b = a;
		cut_init(&b, a.sh->world);
		memcpy(b.page, a.page, a.c.page_bytes);
		flat = image_flat(a.page, a.c.page_bytes);
		image_copy(&a.im, &flat);
		/* shapes of two pools: equal, not the same */
		to = b.im;
		image_copy(&to, &a.im);
		assert_cut(&b, b.c.page_bytes);
		cut_fini(&b);
		cut_fini(&a);
	}
}

static void what_is_adjacent_is_one_run(void **state)
{
	struct cut t = {
		.seg = { { 64, 64, 0, KVMM_SEG_KV, KVMM_MIRROR },
			 { 64, 64, 1, KVMM_SEG_KV, KVMM_MIRROR },
			 { 64, 16, 2, KVMM_SEG_K, KVMM_STRIPE },
			 { 64, 16, 2, KVMM_SEG_V, KVMM_STRIPE } },
		.c.nsegs = 4,
	};

	cut_init(&t, 4);
	assert_int_equal(t.sh->nr_runs, 1 + 4 + 4);
	assert_int_equal(t.sh->part_bytes, 128 + 32);
	cut_fini(&t);
	/* alone, a page is what it is */
	cut_init(&t, 1);
	assert_int_equal(t.sh->part_bytes, t.c.page_bytes);
	assert_int_equal(t.sh->nr_runs, 1);
	cut_fini(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(runs_cover_the_page_once_and_in_order),
		cmocka_unit_test(scattered_bytes_are_where_the_segments_say),
		cmocka_unit_test(a_shorter_page_leaves_the_rest_alone),
		cmocka_unit_test(a_mirror_is_read_from_the_first_rank),
		cmocka_unit_test(from_gang_to_gang_all_parts_are_written),
		cmocka_unit_test(what_is_adjacent_is_one_run),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
