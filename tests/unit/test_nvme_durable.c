/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=io_uring_submit,--wrap=pwritev2,--wrap=pwrite,--wrap=fdatasync */
/*
 * What has to be on the medium when it ends is asked of the kernel so. Whether
 * it got there nobody sees who does not cut the power: all that a test of the
 * results would find right is right without it, too.
 */
#include "daemon/node/nvme.h"
#include "tests/lib/kernel_writes.h"
#include "tests/lib/node_owner.h"

static struct owner mine;

/**
 * struct tally - writes since the last kernel_writes_reset()
 * @journal:	to the ring; @journal_loose: without RWF_DSYNC
 * @ckpt:	to the checkpoints' areas; @ckpt_loose likewise
 * @data:	to slots; @data_sync: with RWF_DSYNC, which is much dearer
 */
struct tally {
	unsigned int	journal, journal_loose;
	unsigned int	ckpt, ckpt_loose;
	unsigned int	data, data_sync;
};

static void count(const struct nvme_super *sb, struct tally *t)
{
	struct kernel_write w;

	memset(t, 0, sizeof(*t));
	for (uint64_t i = 0; kernel_writes_get(i, &w); i++) {
		if (w.flush || w.off < sb->journal_off)
			continue;
		if (w.off < sb->ckpt_off) {
			t->journal++;
			t->journal_loose += !w.dsync;
		} else if (w.off < sb->ckpt_off + 2 * sb->ckpt_bytes) {
			t->ckpt++;
			t->ckpt_loose += !w.dsync;
		} else if (w.off >= sb->data_off) {
			t->data++;
			t->data_sync += w.dsync;
		}
	}
}

/* Pages, records, flushes, until two checkpoints are complete. */
static void use(struct rig *r, struct tally *t)
{
	uint64_t end = deadline_in(PATIENCE_NS);
	struct node_slot slot;
	uint32_t crc;

	rig_init(r);
	r->o.records = 4096;
	owner_open(r, &mine);
	kernel_writes_reset();
	for (int i = 0; i < 4; i++) {
		fill(r->mem, 65536, (unsigned int)i);
		assert_int_equal(op_write(r, &slot, r->mem, 65536, "p", &crc),
				 0);
	}
	while (r->n->stats.ckpts < 2 && !deadline_past(end)) {
		for (int i = 0; i < 400; i++) {
			if (owner_add(r, &mine, 4096, 0, NULL))
				break;
			if (i % 100)
				owner_free(r, &mine.rec[--mine.nr]);
		}
		rig_poll(r, 1);
	}
	assert_int_equal(owner_flush(r), 0);
	assert_true(r->n->stats.ckpts >= 2);
	rig_until(r, !to_nvme(r->n)->nr_own);
	count(&to_nvme(r->n)->open.super, t);
	print_message("# %u writes of the journal, %u of checkpoints, %u of data\n",
		      t->journal, t->ckpt, t->data);
	assert_true(t->journal >= 4 && t->ckpt >= 4 && t->data >= 4);
	rig_fini(r);
}

static void journal_and_checkpoints_are_written_through(void **state)
{
	struct tally t;
	struct rig r;

	use(&r, &t);
	assert_int_equal(t.journal_loose, 0);
	assert_int_equal(t.ckpt_loose, 0);
	assert_int_equal(t.data_sync, 0);
}

static void and_if_they_were_not_it_would_be_seen(void **state)
{
	struct tally t;
	struct rig r;

	setenv("KVMM_BREAK", "dsync", 1);
	use(&r, &t);
	unsetenv("KVMM_BREAK");
	assert_int_equal(t.journal_loose, t.journal);
	assert_int_equal(t.ckpt_loose, t.ckpt);
}

/* Each is on the medium before the next one is begun: one of them is whole. */
static unsigned int superblocks_written(struct rig *r)
{
	struct kernel_write w;
	bool loose = false;
	unsigned int nr = 0;

	owner_open(r, &mine);
	for (uint64_t i = 0; kernel_writes_get(i, &w); i++) {
		if (w.flush) {
			loose = false;
			continue;
		}
		/* nothing at all is begun behind one that is not flushed */
		assert_false(loose);
		if (w.off && w.off != NVME_SUPER2_OFF)
			continue;
		nr++;
		loose = !w.dsync;
	}
	assert_false(loose);
	rig_close(r);
	kernel_writes_reset();
	return nr;
}

static void superblocks_are_flushed_one_after_the_other(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.zero_bytes_s = 1;
	kernel_writes_reset();
	assert_true(superblocks_written(&r) >= 4);	/* made, and opened */
	assert_int_equal(superblocks_written(&r), 2);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(journal_and_checkpoints_are_written_through),
		cmocka_unit_test(and_if_they_were_not_it_would_be_seen),
		cmocka_unit_test(superblocks_are_flushed_one_after_the_other),
	};

	return run_on_all_engines(tests);
}
