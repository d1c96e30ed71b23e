/* SPDX-License-Identifier: Apache-2.0 */
/*
 * persist_rig.h - mm on a disk that outlives it
 *
 * Beside tier_rig.h: each test has a rig, @r, over a fake disk, @disk, and can
 * end it and begin again().
 */
#ifndef KVMM_TESTS_LIB_PERSIST_RIG_H
#define KVMM_TESTS_LIB_PERSIST_RIG_H

#include "ipc/base/clock.h"
#include "tests/lib/tier_rig.h"
#include "tests/lib/unit.h"

#define LEN	12u
#define DISK	(UINT64_C(4) << 20)

static struct fake_disk disk;
static struct rig rig;
static struct rig *const r = &rig;
static struct rig_opts opts;

static inline int persist_setup(void **state)
{
	opts = (struct rig_opts){
		.dram_bytes = 64 * 4096, .nvme_bytes = DISK, .disk = &disk,
		.direct_reclaim_ns = 2 * NSEC_PER_SEC,
	};
	fake_disk_init(&disk, DISK);
	rig_start(r, &opts);
	rig_recover(r);
	return 0;
}

static inline int persist_teardown(void **state)
{
	rig_stop(r);
	fake_disk_fini(&disk);
	return 0;
}

/* Memory is gone, the disk is there. */
static inline void again(void)
{
	rig_start(r, &opts);
	rig_recover(r);
	rig_check(r);
}

static inline void fill(unsigned int group, uint32_t chain, uint32_t n)
{
	assert_int_equal(rig_publish_chain(r, group, chain, n), n);
	rig_push_down(r, group);
	rig_settle(r, 1000);
	rig_check(r);
}

static inline const struct mm_counters *count(void)
{
	return rig_count(r, RIG_NVME);
}

/* For cmocka's tables. */
#define PERSIST_TEST(f)							\
	cmocka_unit_test_setup_teardown(f, persist_setup, persist_teardown)

#endif
