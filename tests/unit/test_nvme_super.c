/* SPDX-License-Identifier: Apache-2.0 */
/* Superblocks: damaged, behind, of other stores and other versions. */
#include "kernels/kernels.h"
#include "tests/lib/node_medium.h"

static void one_superblock_is_enough(void **state)
{
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 2);
	rig_close(&r);
	poke_random(&r, 0, NVME_BLOCK, 1);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_close(&r);
	poke_random(&r, NVME_SUPER2_OFF, NVME_BLOCK, 1);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_close(&r);
	poke_random(&r, 0, 512, 1);
	poke_random(&r, NVME_SUPER2_OFF, NVME_BLOCK, 1);
	assert_rebuilt(&r, "not a kvmm store");
	rig_fini(&r);
}

static void other_versions_and_sizes_are_never_misread(void **state)
{
	uint32_t version = 1;
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 2);
	rig_close(&r);
	poke(&r, offsetof(struct nvme_super, version), &version, 4);
	assert_rebuilt(&r, "version 1");

	r.o.bytes -= MIB;
	assert_rebuilt(&r, "bytes");
	r.o.bytes += MIB;
	assert_rebuilt(&r, "bytes");
	r.o.seg_bytes = 2 * MIB;
	assert_rebuilt(&r, "segments");
	r.o.records -= 100;
	assert_rebuilt(&r, "records");
	rig_fini(&r);
}

static void superblock_that_makes_no_sense_is_refused(void **state)
{
	struct nvme_super sb;
	struct rig r;

	for (int how = 0; how < 7; how++) {
		scan_rig(&r);
		rig_close(&r);
		sb = super;
		switch (how) {
		case 0:
			sb.data_off = sb.bytes;
			break;
		case 1:
			sb.journal_bytes = 0;
			break;
		case 2:
			sb.ckpt_off = UINT64_MAX - 4096;
			break;
		case 3:
			sb.seg_bytes = 0;
			break;
		case 4:
			sb.records = UINT64_MAX / 2;
			break;
		case 5:
			sb.ckpt_bytes = 1;
			break;
		case 6:
			sb.label_bytes = 0;
			break;
		}
		sb.opens++;
		sb.crc = kvmm_crc32c(0, &sb, offsetof(struct nvme_super, crc));
		poke(&r, 0, &sb, sizeof(sb));
		assert_refused(&r, "no sense");
		rig_fini(&r);
	}
}

/* An opening's number is nobody else's, although no superblock may tell. */
static void superblock_that_is_behind_the_journal_catches_up(void **state)
{
	struct nvme_super sb;
	uint64_t opens;
	struct rig r;

	scan_rig(&r);
	rig_close(&r);
	for (int i = 0; i < 3; i++) {
		owner_open(&r, &before);
		add_blocks(&r, &before, 1);
		opens = to_nvme(r.n)->open.super.opens;
		rig_close(&r);
	}
	sb = super;
	sb.opens = 1;
	sb.crc = kvmm_crc32c(0, &sb, offsetof(struct nvme_super, crc));
	poke(&r, 0, &sb, sizeof(sb));
	poke(&r, NVME_SUPER2_OFF, &sb, sizeof(sb));
	owner_open(&r, &after);
	owners_equal(&after, &before);
	assert_true(to_nvme(r.n)->open.super.opens > opens);
	rig_fini(&r);
}

static void store_that_was_being_made_is_made_anew(void **state)
{
	struct nvme_super sb;
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 1);
	rig_close(&r);
	sb = super;
	sb.flags = NVME_SUPER_MAKING;
	sb.crc = kvmm_crc32c(0, &sb, offsetof(struct nvme_super, crc));
	poke(&r, 0, &sb, sizeof(sb));
	poke(&r, NVME_SUPER2_OFF, &sb, sizeof(sb));
	owner_open(&r, &after);
	assert_int_equal(after.nr_found, 0);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(one_superblock_is_enough),
		cmocka_unit_test(other_versions_and_sizes_are_never_misread),
		cmocka_unit_test(superblock_that_makes_no_sense_is_refused),
		cmocka_unit_test(superblock_that_is_behind_the_journal_catches_up),
		cmocka_unit_test(store_that_was_being_made_is_made_anew),
	};

	return run_on_both_engines(tests);
}
