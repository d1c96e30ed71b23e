/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blobs between processes: written by one, read by another, down to NVMe and
 * back. What is mapped is right in every byte, or nothing is.
 */
#include <errno.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "tests/lib/blob_client.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

/* -- one writes, another reads ---------------------------------------------------- */

static void a_blob_of_any_length_is_restored_by_another_process(void **state)
{
	static const long lens[] = {
		0, 1, PAGE - HEAD - 1, PAGE - HEAD, PAGE - HEAD + 1,
		3 * PAGE, 5 * MIB, 5 * MIB + 3,
	};
	struct fx *f = *state;
	uint64_t pages = 0;
	unsigned int i;
	long g;

	fx_start(f, NULL);
	tb_child(f, 0);
	tb_open(&f->c[0], f->d.socket);
	for (i = 0; i < ARRAY_SIZE(lens); i++) {
		for (g = 0; g < 2; g++) {
			long name = 2 * i + g;

			T_EQ(proc_call(&f->p[0], tb_child_save, name, lens[i]), 0);
			T_EQ(tb_restore(&f->c[0], g ? STATE : THING,
					(uint64_t)name, (uint64_t)lens[i], 0,
					1000), 0);
			pages += CHUNKS(lens[i]);
		}
		ta_check(&f->d);
	}
	T_EQ(ta_pages(&f->d), pages);
	/* nothing was copied, and nothing had to be asked for */
	T_EQ(ta_counter(&f->d, "dram0", "bytes_copied_shared"), 0);
	T_EQ(ta_counter(&f->d, "dram0", "pgload"), 0);
	/* a reader that may only read maps it, too */
	tc_close(&f->c[0]);
	tb_open_class(&f->c[0], f->d.socket, KVMM_RO, &tb_cls);
	T_EQ(tb_restore(&f->c[0], STATE, 13, 5 * MIB, 0, 0), 0);
	tb_all_quiet(f);
}

/*
 * Two ring entries, one operation; and down and up in as many. All of it has to
 * be below before its first page can leave, and a cache that is filled faster
 * than it can be written forgets: then it is saved once more.
 */
static void a_blob_may_have_more_pages_than_a_batch(void **state)
{
	const uint64_t len = 4200 * 4096 + 17;
	struct t_wait w = t_wait_begin(LONG_WAIT);
	struct td_opts o = tb_tiers;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	uint64_t filler = 100;
	enum tb_place at;

	o.dram_bytes = 64 * MIB;
	o.nvme_bytes = 256 * MIB;
	fx_start(f, &o);
	tb_open_class(c, f->d.socket, 0, &tb_small_cls);
	T_EQ(tb_save(c, STATE, 1, len, 0), 0);
	T_EQ(ta_pages(&f->d), 4201);
	ta_check(&f->d);
	T_EQ(tb_save(c, STATE, 1, len, 1), -EEXIST);
	while ((at = tb_peek(c, STATE, 1)) != BELOW) {
		T_CHECK(t_wait_more(&w), "it is at %d", at);
		if (at == NOWHERE)
			T_EQ(tb_save(c, STATE, 1, len, 0), 0);
		T_EQ(tb_save(c, THING, filler++, MIB, 0), 0);
		T_WAIT(LONG_WAIT, tb_writes_rest(&f->d));
	}
	T_EQ(tb_restore(c, STATE, 1, len, 0, 0), -EAGAIN);
	T_EQ(tb_restore(c, STATE, 1, len, 0, 20000), 0);
	tb_all_quiet(f);
}

/* The llama.cpp shape: a few checkpoints, the deepest one decides. */
static void the_deepest_checkpoint_is_found(void **state)
{
	static const unsigned int at[] = { 2, 5, 6, 9 };
	uint32_t tok[12 * STEP];
	struct kvmm_key key[12];
	struct kvmm_hit hit[12];
	struct kvmm_keys keys = { .k = key, .n = 12, .group = STATE };
	struct kvmm_match m = { .size = sizeof(m) };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_blob *b;
	struct kvmm_req *rq;
	unsigned int i;

	fx_start(f, NULL);
	tb_open(c, f->d.socket);
	for (i = 0; i < 12 * STEP; i++)
		tok[i] = i * 7;
	T_EQ(kvmm_key_chain(c->sp, NULL, tok, 12 * STEP, STEP, NULL, 0, key),
	     12);
	for (i = 0; i < 4; i++) {
		struct kvmm_key bytes = tb_bytes(at[i], at[i] * PAGE, 0);

		rq = tc_req(c, i);
		T_EQ(tb_save_key(c, rq, STATE, &key[at[i] - 1],
				 i ? &key[at[i - 1] - 1] : NULL, at[i] * PAGE,
				 &bytes), 0);
		tc_end(rq);
		ta_check(&f->d);
	}
	for (i = 12; i > 0; i--) {
		unsigned int deepest = i >= 9 ? 9 : i >= 6 ? 6 : i == 5 ? 5 :
				       i >= 2 ? 2 : 0;
		struct kvmm_key bytes = tb_bytes(deepest, deepest * PAGE, 0);

		keys.n = i;
		rq = tc_req(c, i);
		T_OK(kvmm_match(rq, &keys, 1, c->node, hit, &m));
		T_EQ(m.n_pages, deepest);
		T_EQ(m.n_resident, deepest);
		if (deepest) {
			T_OK(tb_map(c, rq, m.n_pages - 1, 1000, &b));
			T_EQ(kvmm_blob_len(b), deepest * PAGE);
			T_EQ(tb_wrong(kvmm_blob_ptr(b), deepest * PAGE, &bytes),
			     0);
		}
		tc_end(rq);
	}
	/* one that is reported takes none of the others with it */
	keys.n = 12;
	rq = tc_req(c, 1);
	T_OK(kvmm_match(rq, &keys, 1, c->node, hit, &m));
	T_EQ(m.n_pages, 9);
	T_OK(kvmm_report(rq, m.n_pages - 1, KVMM_BAD));
	tc_ping(c);
	T_OK(kvmm_match(rq, &keys, 1, c->node, hit, &m));
	T_EQ(m.n_pages, 6);
	T_OK(tb_map(c, rq, m.n_pages - 1, 1000, &b));
	tc_end(rq);
	tb_all_quiet(f);
}

/* -- down and up ----------------------------------------------------------------------- */

static void blobs_go_down_and_come_up_whole(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, round;

	fx_start(f, &tb_tiers);
	tb_open(c, f->d.socket);
	tb_child(f, 0);
	tb_saved_slowly(f, c, 0, MANY, MIB);
	ta_check(&f->d);
	for (round = 0; round < 2; round++) {
		for (i = 0; i < MANY; i++) {
			T_EQ(tb_restore(c, STATE, i, MIB, 0, 10000), 0);
			if (i % 2)
				T_EQ(proc_call(&f->p[0], tb_child_restore, i,
					       MIB), 0);
			T_WAIT(LONG_WAIT, tb_writes_rest(&f->d));
		}
		ta_check(&f->d);
	}
	T_CHECK(ta_counter(&f->d, "dram0", "pgload") > MANY * 8);
	T_EQ(ta_counter(&f->d, "dram0", "pgcrc_fail"), 0);
	tb_all_quiet(f);
}

/* Any number of pages of any blob are missing: it is there or it is not. */
static void without_time_a_blob_is_whole_or_not_mapped(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, had = 0;

	fx_start(f, &tb_tiers);
	tb_open(c, f->d.socket);
	tb_saved_slowly(f, c, 0, MANY, MIB);
	for (i = 0; i < MANY; i++) {
		int err = tb_restore(c, STATE, i, MIB, 0, 0);

		T_CHECK(!err || err == -EAGAIN, "%s", t_strerror(err));
		had += !err;
	}
	T_CHECK(had && had < MANY, "%u of %u", had, MANY);
	tb_all_quiet(f);
}

static void a_part_that_is_bad_below_is_the_end_of_all_of_it(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, bad = MANY, gone = 0;
	struct kvmm_match m;
	struct kvmm_req *rq;

	fx_start(f, &tb_tiers);
	tb_open(c, f->d.socket);
	tb_saved_slowly(f, c, 0, MANY, MIB);
	/* the third read from now on: in the middle of a blob, most likely */
	ta_fault(&f->d, "nvme0:read:flip:n=1:skip=3");
	for (i = 0; i < MANY; i++) {
		int err = tb_restore(c, STATE, i, MIB, 0, 10000);

		T_CHECK(!err || err == -ENOENT, "%s", t_strerror(err));
		if (err) {
			bad = i;
			gone++;
			break;
		}
	}
	ta_fault(&f->d, "");
	T_EQ(gone, 1);
	ta_check(&f->d);
	rq = tc_req(c, 1);
	T_EQ(tb_match(c, rq, STATE, bad, &m), 0);
	tc_end(rq);
	/* it may be computed and saved again, and the others are there */
	T_EQ(tb_save(c, STATE, bad, MIB, 0), 0);
	for (i = 0; i < MANY; i++) {
		T_EQ(tb_restore(c, STATE, i, MIB, 0, 10000), 0);
		T_WAIT(LONG_WAIT, tb_writes_rest(&f->d));
	}
	tb_all_quiet(f);
}

static void a_slow_disk_is_late_in_time(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, late = 0;

	fx_start(f, &tb_tiers);
	tb_open(c, f->d.socket);
	tb_saved_slowly(f, c, 0, MANY, MIB);
	ta_fault(&f->d, "nvme0:read:stall:ms=400");
	for (i = 0; i < 4 && !late; i++) {
		uint64_t t0 = now_ns();
		int err = tb_restore(c, STATE, i, MIB, 0, 100);

		T_CHECK(!err || err == -ETIMEDOUT, "%s", t_strerror(err));
		T_CHECK(now_ns() - t0 < 1000 * NSEC_PER_MSEC);
		late += err != 0;
	}
	T_CHECK(late);
	ta_fault(&f->d, "");
	/* what was late has arrived, or is read again */
	T_EQ(tb_restore(c, STATE, i - 1, MIB, 0, 10000), 0);
	tb_all_quiet(f);
}

/* -- what is no blob ---------------------------------------------------------------------- */

static void a_plain_page_is_never_taken_for_a_blob(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_pub pub = { .group = STATE };
	struct kvmm_blob *b;
	struct kvmm_match m;
	struct kvmm_done d;
	struct kvmm_req *rq;

	fx_start(f, NULL);
	tb_open(c, f->d.socket);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 1, &pub.frame);
	pub.key = tb_name(c, STATE, 1);
	tc_fill(c, 0, pub.frame, &pub.key);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 9));
	T_CHECK(tc_wait(c, 9, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	T_EQ(tb_match(c, rq, STATE, 1, &m), 1);
	T_EQ(tb_map(c, rq, 0, 1000, &b), -EBADMSG);
	/* and a page of a FULL group is none by its rule */
	T_EQ(tb_match(c, rq, PAGES, 1, &m), 0);
	T_EQ(tb_map(c, rq, 0, 1000, &b), -EINVAL);
	tc_end(rq);
	T_EQ(tb_save(c, STATE, 1, PAGE, 0), -EEXIST);
	tb_all_quiet(f);
}

static void a_reported_blob_is_gone_whole_and_its_reader_keeps_it(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0], *o = &f->c[1];
	struct kvmm_key bytes = tb_bytes(7, MIB, 0);
	struct kvmm_req *rq, *other;
	struct kvmm_blob *b;
	struct kvmm_match m;

	fx_start(f, NULL);
	tb_open(c, f->d.socket);
	tb_open(o, f->d.socket);
	T_EQ(tb_save(c, STATE, 7, MIB, 0), 0);
	rq = tc_req(c, 1);
	T_EQ(tb_match(c, rq, STATE, 7, &m), 1);
	T_OK(tb_map(c, rq, 0, 1000, &b));
	other = tc_req(o, 2);
	T_EQ(tb_match(o, other, STATE, 7, &m), 1);
	T_OK(kvmm_report(other, 0, KVMM_BAD));
	tc_ping(o);
	T_EQ(tb_restore(o, STATE, 7, MIB, 0, 1000), -ENOENT);
	tc_end(other);
	ta_check(&f->d);
	T_EQ(tb_wrong(kvmm_blob_ptr(b), MIB, &bytes), 0);
	/* somebody else may save it anew meanwhile */
	T_EQ(tb_save(o, STATE, 7, 2 * MIB, 3), 0);
	T_EQ(tb_wrong(kvmm_blob_ptr(b), MIB, &bytes), 0);
	tc_end(rq);
	T_EQ(tb_restore(c, STATE, 7, 2 * MIB, 3, 1000), 0);
	T_WAIT(LONG_WAIT, ta_pages(&f->d) == CHUNKS(2 * MIB));
	tb_all_quiet(f);
}

static void modes_are_kept(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_key key, bytes = tb_bytes(3, MIB, 0);
	struct kvmm_blob *b;
	struct kvmm_done d;
	struct kvmm_req *rq;

	fx_start(f, NULL);
	tb_open(c, f->d.socket);
	T_EQ(tb_save(c, STATE, 1, MIB, 0), 0);
	ta_mode(&f->d, "bypass");
	T_EQ(tb_restore(c, STATE, 1, MIB, 0, 1000), -ENOENT);
	T_EQ(tb_save(c, STATE, 2, MIB, 0), -EAGAIN);
	ta_mode(&f->d, "readonly");
	T_EQ(tb_restore(c, STATE, 1, MIB, 0, 1000), 0);
	T_EQ(tb_save(c, STATE, 2, MIB, 0), -EROFS);
	ta_mode(&f->d, "observe");
	T_EQ(tb_restore(c, STATE, 1, MIB, 0, 1000), -ENOENT);
	key = tb_name(c, STATE, 3);
	rq = tc_req(c, 3);
	T_OK(tb_begin(c, rq, STATE, &key, NULL, MIB, &b));
	tb_fill(kvmm_blob_ptr(b), MIB, &bytes);
	T_OK(kvmm_blob_commit(b, MIB, 0, 0, 99));
	T_CHECK(tc_wait(c, 99, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	T_EQ(d.res[0].frame, 0);
	tc_end(rq);
	ta_mode(&f->d, "on");
	T_EQ(tb_restore(c, STATE, 1, MIB, 0, 1000), 0);
	T_EQ(tb_restore(c, STATE, 3, MIB, 0, 1000), -ENOENT);
	T_EQ(ta_pages(&f->d), CHUNKS(MIB));
	tb_all_quiet(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(a_blob_of_any_length_is_restored_by_another_process),
		FX_TEST(a_blob_may_have_more_pages_than_a_batch),
		FX_TEST(the_deepest_checkpoint_is_found),
		FX_TEST(blobs_go_down_and_come_up_whole),
		FX_TEST(without_time_a_blob_is_whole_or_not_mapped),
		FX_TEST(a_part_that_is_bad_below_is_the_end_of_all_of_it),
		FX_TEST(a_slow_disk_is_late_in_time),
		FX_TEST(a_plain_page_is_never_taken_for_a_blob),
		FX_TEST(a_reported_blob_is_gone_whole_and_its_reader_keeps_it),
		FX_TEST(modes_are_kept),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
