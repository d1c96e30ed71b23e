/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of entries: what fits, what is whole, and where a walk ends. */
#include <string.h>

#include "daemon/node/nvme_block.h"
#include "ipc/base/bits.h"
#include "ipc/base/rand.h"
#include "tests/lib/unit.h"

static const uint8_t uuid[16] = "sixteen letters";
static _Alignas(64) char buf[NVME_BLOCK];
static struct nvme_block *const b = (void *)buf;

static void block_holds_31_records(void **state)
{
	unsigned int nr = 0;

	nvme_block_init(b);
	while (nvme_block_add(b, NVME_ENT_ADD, sizeof(struct nvme_ent_add), nr))
		nr++;
	assert_int_equal(nr, 31);
	assert_int_equal(b->count, 31);
	/* and removals still fit behind them */
	assert_non_null(nvme_block_add(b, NVME_ENT_DEL,
				       sizeof(struct nvme_ent_slot), 0));
}

static void entries_are_walked_in_order(void **state)
{
	const struct nvme_ent *e = NULL;
	uint32_t want = 0;

	nvme_block_init(b);
	assert_null(nvme_block_next(b, NULL));
	for (uint32_t i = 0; i < 9; i++)
		assert_non_null(nvme_block_add(b, i % 2 ? NVME_ENT_DEL :
					       NVME_ENT_LABEL,
					       24 + i % 2 * 5, i));
	while ((e = nvme_block_next(b, e))) {
		assert_int_equal(e->arg, want++);
		assert_int_equal(e->bytes % 8, 0);
	}
	assert_int_equal(want, 9);
}

static void longest_part_of_a_label_fills_a_block(void **state)
{
	nvme_block_init(b);
	assert_non_null(nvme_block_add(b, NVME_ENT_LABEL,
				       (uint32_t)sizeof(struct nvme_ent_label) +
				       NVME_LABEL_PART, 1));
	assert_int_equal(nvme_block_left(b), 0);
	assert_null(nvme_block_add(b, NVME_ENT_LABEL_DEL, 8, 1));
}

static void every_bit_is_in_the_checksum(void **state)
{
	uint8_t other[16] = "another's";

	nvme_block_init(b);
	nvme_block_add(b, NVME_ENT_DEL, sizeof(struct nvme_ent_slot), 7);
	nvme_block_seal(b, NVME_KIND_JOURNAL, uuid, 5, 6);
	assert_true(nvme_block_good(b, NVME_KIND_JOURNAL, uuid));
	assert_false(nvme_block_good(b, NVME_KIND_CKPT, uuid));
	assert_false(nvme_block_good(b, NVME_KIND_JOURNAL, other));
	for (size_t i = 0; i < 8 * sizeof(buf); i++) {
		buf[i / 8] ^= (char)(1 << i % 8);
		assert_false(nvme_block_good(b, NVME_KIND_JOURNAL, uuid));
		buf[i / 8] ^= (char)(1 << i % 8);
	}
	assert_true(nvme_block_good(b, NVME_KIND_JOURNAL, uuid));
}

static void zeroes_are_no_block(void **state)
{
	static const uint8_t none[16];

	memset(buf, 0, sizeof(buf));
	assert_false(nvme_block_good(b, NVME_KIND_JOURNAL, none));
	assert_false(nvme_block_good(b, NVME_KIND_END, none));
}

/* Whoever can forge a checksum still leads nobody out of the block. */
static void no_walk_leaves_the_block(void **state)
{
	struct rng r;

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&r, test_seed());
	for (unsigned int i = 0; i < (test_long() ? 200000u : 5000u); i++) {
		const struct nvme_ent *e = NULL;
		unsigned int nr = 0;

		rng_fill(&r, buf, sizeof(buf));
		b->bytes = (uint16_t)rng_below(&r, NVME_BLOCK_ROOM + 1);
		for (char *p = buf + 64; p < buf + 4088; p += 8)
			if (rng_below(&r, 2)) {
				((struct nvme_ent *)p)->type =
					(uint8_t)rng_below(&r, 9);
				((struct nvme_ent *)p)->bytes =
					(uint16_t)(8 * rng_below(&r, 20));
			}
		nvme_block_seal(b, NVME_KIND_CKPT, uuid, 1, 1);
		assert_true(nvme_block_good(b, NVME_KIND_CKPT, uuid));
		while ((e = nvme_block_next(b, e))) {
			assert_true((const char *)e + e->bytes <=
				    buf + 64 + b->bytes);
			assert_true(++nr <= NVME_BLOCK_ROOM / 8);
		}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(block_holds_31_records),
		cmocka_unit_test(entries_are_walked_in_order),
		cmocka_unit_test(longest_part_of_a_label_fills_a_block),
		cmocka_unit_test(every_bit_is_in_the_checksum),
		cmocka_unit_test(zeroes_are_no_block),
		cmocka_unit_test(no_walk_leaves_the_block),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
