/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/unit.h"

#include "tests/lib/mm_rig.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "kernels/kernels.h"

#define PAGE	16384

static struct rig rig;
static struct rig_client *a, *b;
static struct mm_pool *pool;

static struct rig_client *newcomer(unsigned int i, uint32_t rights)
{
	struct rig_client *c = mr_client(&rig, i, rights);

	mr_attach(c, "publish", PAGE);
	mr_win(c, 0);
	return c;
}

static int setup(void **state)
{
	mr_open(&rig, &(struct rig_opts){ .bytes = 8u << 20 });
	a = newcomer(0, KVMM_RW);
	b = newcomer(1, KVMM_RW);
	pool = a->win->pool;
	return 0;
}

static int teardown(void **state)
{
	mr_check(&rig);
	mr_close(&rig);
	return 0;
}

static enum frame_state state_of(uint32_t f)
{
	return frame_word_state(frame_word_of(pool, f));
}

static int publish_one(struct rig_client *c, struct ring_pub p)
{
	const struct rig_done *d = mr_publish(c, &p, 1, 99);
	int res;

	assert_non_null(d);
	assert_int_equal(d->n, 1);
	res = d->res[0].result;
	mr_take(&rig, 99);
	return res;
}

static void sealed_page_is_found_with_its_frame_and_word(void **state)
{
	const struct rig_done *d;
	struct ring_pub p;
	uint32_t f;

	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	d = mr_publish(a, &p, 1, 5);
	assert_non_null(d);
	assert_int_equal(d->result, 0);
	assert_int_equal(d->op, RING_PUBLISH);
	assert_int_equal(d->res[0].result, 0);
	assert_int_equal(d->res[0].frame, f);
	assert_int_equal(d->res[0].word, frame_word_of(pool, f));
	assert_int_equal(state_of(f), FRAME_READY);
	/* held for the client until it has read the answer */
	assert_false(frame_isolate(pool, f));
	mr_take(&rig, 5);
	assert_non_null(mr_page(a, 1, 0));
}

static void parent_may_stand_before_its_child_in_the_batch(void **state)
{
	const struct rig_done *d;
	struct ring_pub p[64];
	uint32_t f[64], i;

	mr_alloc(a, f, 64);
	for (i = 0; i < 64; i++)
		p[i] = mr_pub(1, i, f[i]);
	d = mr_publish(a, p, 64, 5);
	assert_non_null(d);
	for (i = 0; i < 64; i++)
		assert_int_equal(d->res[i].result, 0);
	assert_ptr_equal(mr_page(a, 1, 63)->parent, mr_page(a, 1, 62));
	mr_take(&rig, 5);
}

static void child_before_its_parent_is_refused(void **state)
{
	const struct rig_done *d;
	struct ring_pub p[2];
	uint32_t f[2];

	mr_alloc(a, f, 2);
	p[0] = mr_pub(1, 1, f[0]);
	p[1] = mr_pub(1, 0, f[1]);
	d = mr_publish(a, p, 2, 5);
	assert_int_equal(d->res[0].result, -ESTALE);
	assert_int_equal(d->res[0].frame, 0);
	assert_int_equal(d->res[1].result, 0);
	assert_int_equal(state_of(f[0]), FRAME_OPEN);
	assert_int_equal(rig.mm->node[0].c.pgpublish_stale, 1);
	mr_take(&rig, 5);
}

static void root_needs_no_parent(void **state)
{
	struct ring_pub p;
	uint32_t f;

	mr_alloc(a, &f, 1);
	p = mr_pub(1, 7, f);
	p.flags = KVMM_PUB_ROOT;
	assert_int_equal(publish_one(a, p), 0);
	assert_int_not_equal(mr_page(a, 1, 7)->flags & PAGE_ROOT, 0);
}

static void second_publisher_gets_the_first_ones_frame(void **state)
{
	const struct rig_done *d;
	struct ring_pub p;
	uint32_t fa, fb;

	mr_alloc(a, &fa, 1);
	mr_alloc(b, &fb, 1);
	assert_int_equal(publish_one(a, mr_pub(1, 0, fa)), 0);
	p = mr_pub(1, 0, fb);
	d = mr_publish(b, &p, 1, 6);
	assert_int_equal(d->res[0].result, -EEXIST);
	assert_int_equal(d->res[0].frame, fa);
	assert_int_equal(d->res[0].word, frame_word_of(pool, fa));
	assert_int_equal(state_of(fb), FRAME_OPEN);
	assert_false(frame_isolate(pool, fa));
	mr_take(&rig, 6);
	assert_int_equal(rig.mm->node[0].c.pgpublish_exist, 1);
}

static void what_is_not_ones_own_open_frame_is_refused(void **state)
{
	uint32_t fa, fb;
	struct ring_pub p;

	mr_alloc(a, &fa, 1);
	mr_alloc(b, &fb, 1);
	assert_int_equal(publish_one(a, mr_pub(1, 0, fb)), -EINVAL);
	assert_int_equal(publish_one(a, mr_pub(1, 0, 0)), -EINVAL);
	assert_int_equal(publish_one(a, mr_pub(1, 0, 1)), -EINVAL);
	assert_int_equal(publish_one(a, mr_pub(1, 0, UINT32_MAX)), -EINVAL);
	assert_int_equal(publish_one(a, mr_pub(1, 0, pool->max_frames)),
			 -EINVAL);
	p = mr_pub(1, 0, fa);
	p.group = 1;
	assert_int_equal(publish_one(a, p), -EINVAL);
	p.group = 0;
	p.flags = 0x8000;
	assert_int_equal(publish_one(a, p), -EINVAL);
	assert_int_equal(publish_one(a, mr_pub(1, 0, fa)), 0);
	/* sealed: no longer its own to name */
	assert_int_equal(publish_one(a, mr_pub(2, 0, fa)), -EINVAL);
}

static void batch_of_no_pages_or_too_many_is_refused_whole(void **state)
{
	struct ring_sqe sqe = { .op = RING_PUBLISH, .tag = 5 };

	mm_publish(a->win, &sqe, NULL);
	assert_int_equal(mr_answer(&rig, 5)->result, -EINVAL);
	mr_take(&rig, 5);
	sqe.n = KVMM_MAX_BATCH + 1;
	mm_publish(a->win, &sqe, NULL);
	assert_int_equal(mr_answer(&rig, 5)->result, -EINVAL);
	mr_take(&rig, 5);
}

static void modes_and_rights_are_kept(void **state)
{
	struct rig_client *ro = newcomer(2, KVMM_RO);
	uint32_t f;

	mr_alloc(a, &f, 1);
	assert_int_equal(publish_one(ro, mr_pub(1, 0, f)), -EACCES);
	mm_space_set_mode(a->space, KVMM_MODE_READONLY);
	assert_int_equal(publish_one(a, mr_pub(1, 0, f)), -EROFS);
	mm_space_set_mode(a->space, KVMM_MODE_BYPASS);
	assert_int_equal(publish_one(a, mr_pub(1, 0, f)), -EAGAIN);
	mm_space_set_mode(a->space, KVMM_MODE_ON);
	assert_int_equal(publish_one(a, mr_pub(1, 0, f)), 0);
}

static void observed_page_leaves_its_key_only(void **state)
{
	const struct rig_done *d;
	struct ring_pub p;
	uint32_t f;
	int i;

	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	mm_space_set_mode(a->space, KVMM_MODE_OBSERVE);
	for (i = 0; i < 2; i++) {
		d = mr_publish(a, &p, 1, 5);
		assert_int_equal(d->res[0].result, 0);
		assert_int_equal(d->res[0].frame, 0);
		mr_take(&rig, 5);
	}
	assert_int_equal(state_of(f), FRAME_OPEN);
	assert_null(mr_page(a, 1, 0));
	assert_int_equal(a->space->seen.ghost_pages, 1);
	/* that its engine computed it again says nothing of who asked */
	assert_int_equal(a->space->seen.ghost_hits, 0);
}

static void asked(uint32_t asked_ms, uint32_t from, uint32_t n)
{
	struct ring_sqe sqe = {
		.op = RING_END, .nr_keys = n, .asked_ms = asked_ms,
	};
	struct ring_key key[8] = { { .group = 0 } };
	uint32_t i;

	for (i = 0; i < n; i++)
		mr_key(key[i].key, 1, from + i);
	assert_int_equal(mm_asked(a->space, &sqe, key), 0);
}

static uint32_t ms_now(void)
{
	return now_ns() / NSEC_PER_MSEC;
}

static void what_was_observed_before_it_is_asked_for_would_hit(void **state)
{
	uint32_t f, i, before = ms_now();
	struct ring_pub p;

	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	mm_space_set_mode(a->space, KVMM_MODE_OBSERVE);
	mr_publish(a, &p, 1, 5);
	mr_take(&rig, 5);
	/* by the request that computed it, or one that ran beside it */
	asked(before, 0, 3);
	assert_int_equal(a->space->seen.ghost_asked, 3);
	assert_int_equal(a->space->seen.ghost_hits, 0);
	/* computing it once more does not make it younger */
	mr_publish(a, &p, 1, 6);
	mr_take(&rig, 6);
	asked(ms_now() + 1, 0, 3);
	assert_int_equal(a->space->seen.ghost_asked, 6);
	assert_int_equal(a->space->seen.ghost_hits, 1);
	asked(ms_now() + 1, 1, 2);
	assert_int_equal(a->space->seen.ghost_hits, 1);
	/* nor does a month that it was not asked for make it unknown */
	for (i = 0; i < GHOST_ENTRIES; i++)
		if (a->space->seen.ghost[i].tag)
			a->space->seen.ghost[i].ms = ms_now() - (1u << 31) - 9;
	asked(ms_now(), 0, 1);
	assert_int_equal(a->space->seen.ghost_hits, 2);
}

static void pages_of_before_would_hit_while_observed(void **state)
{
	mr_put(a, 1, 0, 2);
	mm_space_set_mode(a->space, KVMM_MODE_OBSERVE);
	asked(ms_now(), 0, 4);
	assert_int_equal(a->space->seen.ghost_asked, 4);
	assert_int_equal(a->space->seen.ghost_hits, 2);
}

static void a_trace_names_keys_without_observing(void **state)
{
	mr_put(a, 1, 0, 2);
	asked(ms_now(), 0, 4);
	assert_int_equal(a->space->seen.asked, 4);
	assert_int_equal(a->space->seen.ghost_asked, 0);
	assert_int_equal(a->space->seen.ghost_hits, 0);
}

static void a_key_of_no_group_counts_nothing(void **state)
{
	struct ring_sqe sqe = { .op = RING_END, .nr_keys = 2 };
	struct ring_key key[2] = { { .group = 0 }, { .group = 1 } };

	mm_space_set_mode(a->space, KVMM_MODE_OBSERVE);
	assert_int_equal(mm_asked(a->space, &sqe, key), -EINVAL);
	assert_int_equal(a->space->seen.asked, 0);
	assert_int_equal(a->space->seen.ghost_asked, 0);
}

static void nothing_is_seen_before_its_step(void **state)
{
	struct ring_pub p[2];
	uint32_t f[2];

	mr_alloc(a, f, 2);
	p[0] = mr_pub(1, 0, f[0]);
	p[1] = mr_pub(1, 1, f[1]);
	p[0].after = p[1].after = 3;
	assert_null(mr_publish(a, p, 2, 5));
	assert_int_equal(atomic_load(&a->ledger->step_wanted), 3);
	mr_step(a, 2);
	assert_null(mr_answer(&rig, 5));
	assert_null(mr_page(a, 1, 0));
	mr_check(&rig);
	mr_step(a, 3);
	assert_non_null(mr_answer(&rig, 5));
	assert_int_equal(mr_answer(&rig, 5)->res[1].result, 0);
	assert_int_equal(atomic_load(&a->ledger->step_wanted), UINT64_MAX);
	mr_take(&rig, 5);
}

static void broken_fence_shows_it_too_early(void **state)
{
	struct ring_pub p;
	uint32_t f;

	rig.mm->breaks = MM_BREAK_FENCE;
	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	p.after = 3;
	assert_non_null(mr_publish(a, &p, 1, 5));
	mr_take(&rig, 5);
}

static void frame_of_a_pending_publish_is_taken(void **state)
{
	struct ring_pub p;
	uint32_t f;

	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	p.after = 1;
	assert_null(mr_publish(a, &p, 1, 5));
	assert_int_equal(publish_one(a, mr_pub(2, 0, f)), -EINVAL);
	assert_int_equal(mm_free(a->win, &f, 1, 0), -EINVAL);
	mr_step(a, 1);
	mr_take(&rig, 5);
}

static void second_publisher_waits_for_the_first(void **state)
{
	struct ring_pub p;
	uint32_t fa, fb;

	mr_alloc(a, &fa, 1);
	mr_alloc(b, &fb, 1);
	p = mr_pub(1, 0, fa);
	p.after = 1;
	assert_null(mr_publish(a, &p, 1, 5));
	p = mr_pub(1, 0, fb);
	assert_null(mr_publish(b, &p, 1, 6));
	mr_step(a, 1);
	assert_int_equal(mr_answer(&rig, 5)->res[0].result, 0);
	assert_int_equal(mr_answer(&rig, 6)->res[0].result, -EEXIST);
	assert_int_equal(mr_answer(&rig, 6)->res[0].frame, fa);
	mr_take(&rig, 5);
	mr_take(&rig, 6);
}

static void second_publisher_takes_over_when_the_first_dies(void **state)
{
	struct ring_pub p;
	uint32_t fa, fb;

	mr_alloc(a, &fa, 1);
	mr_alloc(b, &fb, 1);
	p = mr_pub(1, 0, fa);
	p.after = 1;
	assert_null(mr_publish(a, &p, 1, 5));
	p = mr_pub(1, 0, fb);
	assert_null(mr_publish(b, &p, 1, 6));
	mr_exit(a);
	assert_int_equal(mr_answer(&rig, 6)->res[0].result, 0);
	assert_int_equal(mr_answer(&rig, 6)->res[0].frame, fb);
	mr_take(&rig, 6);
	mr_settle(&rig);
	assert_int_equal(state_of(fa), FRAME_FREE);
}

static void chain_of_pending_pages_seals_in_order(void **state)
{
	struct ring_pub p[200];
	uint32_t f[200], i;

	mr_alloc(a, f, 200);
	for (i = 0; i < 200; i++) {
		p[i] = mr_pub(1, i, f[i]);
		p[i].after = i == 0 ? 1 : 0;
	}
	/* the head waits, so all do */
	assert_null(mr_publish(a, p, 200, 5));
	assert_int_equal(a->space->nr_pages, 0);
	mr_step(a, 1);
	assert_non_null(mr_answer(&rig, 5));
	for (i = 0; i < 200; i++)
		assert_int_equal(mr_answer(&rig, 5)->res[i].result, 0);
	mr_take(&rig, 5);
	assert_int_equal(a->space->nr_pending, 0);
}

static void chain_fails_with_its_head(void **state)
{
	struct ring_pub p[3];
	uint32_t f[3], i;

	mr_alloc(a, f, 1);
	mr_alloc(b, f + 1, 2);
	p[0] = mr_pub(1, 0, f[0]);
	p[0].after = 1;
	assert_null(mr_publish(a, p, 1, 5));
	for (i = 1; i < 3; i++)
		p[i] = mr_pub(1, i, f[i]);
	assert_null(mr_publish(b, p + 1, 2, 6));
	mm_cancel(a->mc, 5);
	assert_int_equal(mr_answer(&rig, 5)->result, -ECANCELED);
	for (i = 0; i < 2; i++)
		assert_int_equal(mr_answer(&rig, 6)->res[i].result, -ESTALE);
	assert_int_equal(state_of(f[0]), FRAME_OPEN);
	mr_take(&rig, 5);
	mr_take(&rig, 6);
	assert_int_equal(mm_free(a->win, f, 1, 0), 0);
}

static void circle_of_pending_pages_is_refused(void **state)
{
	struct ring_pub x, y;
	uint32_t f[3];

	/* a: Y after a step; b: X(parent Y); then a second Y(parent X) */
	mr_alloc(a, f, 1);
	mr_alloc(b, f + 1, 2);
	y = mr_pub(1, 0, f[0]);
	y.after = 1;
	assert_null(mr_publish(a, &y, 1, 5));
	y.frame = f[1];
	y.after = 0;
	mr_key(y.parent, 1, 1);
	assert_null(mr_publish(b, &y, 1, 6));
	x = mr_pub(1, 1, f[2]);
	assert_null(mr_publish(b, &x, 1, 7));
	mm_cancel(a->mc, 5);
	assert_non_null(mr_answer(&rig, 6));
	assert_non_null(mr_answer(&rig, 7));
	assert_int_equal(a->space->nr_pending, 0);
	mr_take(&rig, 5);
	mr_take(&rig, 6);
	mr_take(&rig, 7);
}

static void same_key_twice_in_a_batch_is_one_page(void **state)
{
	const struct rig_done *d;
	struct ring_pub p[2];
	uint32_t f[2];

	mr_alloc(a, f, 2);
	p[0] = mr_pub(1, 0, f[0]);
	p[1] = mr_pub(1, 0, f[1]);
	d = mr_publish(a, p, 2, 5);
	assert_int_equal(d->res[0].result, 0);
	assert_int_equal(d->res[1].result, -EEXIST);
	assert_int_equal(d->res[1].frame, f[0]);
	mr_take(&rig, 5);
	assert_int_equal(pool->meta[f[0]].refs, 0);
}

static void given_checksum_is_checked_by_a_worker(void **state)
{
	struct ring_pub p[2];
	uint32_t f[2];

	mr_alloc(a, f, 2);
	memset(frame_addr(pool, f[0]), 0x5a, PAGE);
	memset(frame_addr(pool, f[1]), 0x5b, PAGE);
	p[0] = mr_pub(1, 0, f[0]);
	p[1] = mr_pub(2, 0, f[1]);
	p[0].flags = p[1].flags = KVMM_PUB_CRC;
	p[0].crc = p[1].crc = kvmm_crc32c(0, frame_addr(pool, f[0]), PAGE);
	assert_null(mr_publish(a, p, 2, 5));
	mr_wait(&rig, 5);
	assert_int_equal(mr_answer(&rig, 5)->res[0].result, 0);
	assert_int_equal(mr_answer(&rig, 5)->res[1].result, -EBADMSG);
	assert_int_equal(mr_page(a, 1, 0)->crc, p[0].crc);
	mr_take(&rig, 5);
	assert_int_equal(state_of(f[1]), FRAME_OPEN);
}

static void client_that_dies_under_a_checksum_leaves_nothing(void **state)
{
	struct ring_pub p;
	uint32_t f;

	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	p.flags = KVMM_PUB_CRC;
	p.crc = kvmm_crc32c(0, frame_addr(pool, f), PAGE);
	assert_null(mr_publish(a, &p, 1, 5));
	mr_exit(a);
	mr_settle(&rig);
	assert_int_equal(state_of(f), FRAME_FREE);
	assert_null(mr_answer(&rig, 5));
	assert_null(mr_page(b, 1, 0));
}

static void disconnect_drops_what_is_pending_without_an_answer(void **state)
{
	struct ring_pub p[2];
	uint32_t f[2];

	mr_alloc(a, f, 2);
	p[0] = mr_pub(1, 0, f[0]);
	p[1] = mr_pub(2, 0, f[1]);
	p[1].after = 1;
	assert_null(mr_publish(a, p, 2, 5));
	assert_int_equal(pool->meta[f[0]].refs, 1);
	mm_client_disconnect(a->mc);
	assert_null(mr_answer(&rig, 5));
	/* what was sealed stays, without the reference that nobody will put */
	assert_int_equal(pool->meta[f[0]].refs, 0);
	assert_int_equal(state_of(f[1]), FRAME_OPEN);
	assert_int_equal(a->space->nr_pending, 0);
}

static void page_may_be_published_again_after_it_left(void **state)
{
	struct page *pg;
	uint32_t f;

	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	f = copy_at(pg, 0)->frame;
	assert_true(frame_isolate(pool, f));
	frame_put(pool, f);
	page_put(pg);
	assert_null(mr_page(a, 1, 0));
	mr_put(a, 1, 0, 1);
	assert_non_null(mr_page(a, 1, 0));
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(sealed_page_is_found_with_its_frame_and_word),
		T(parent_may_stand_before_its_child_in_the_batch),
		T(child_before_its_parent_is_refused),
		T(root_needs_no_parent),
		T(second_publisher_gets_the_first_ones_frame),
		T(what_is_not_ones_own_open_frame_is_refused),
		T(batch_of_no_pages_or_too_many_is_refused_whole),
		T(modes_and_rights_are_kept),
		T(observed_page_leaves_its_key_only),
		T(what_was_observed_before_it_is_asked_for_would_hit),
		T(pages_of_before_would_hit_while_observed),
		T(a_trace_names_keys_without_observing),
		T(a_key_of_no_group_counts_nothing),
		T(nothing_is_seen_before_its_step),
		T(broken_fence_shows_it_too_early),
		T(frame_of_a_pending_publish_is_taken),
		T(second_publisher_waits_for_the_first),
		T(second_publisher_takes_over_when_the_first_dies),
		T(chain_of_pending_pages_seals_in_order),
		T(chain_fails_with_its_head),
		T(circle_of_pending_pages_is_refused),
		T(same_key_twice_in_a_batch_is_one_page),
		T(given_checksum_is_checked_by_a_worker),
		T(client_that_dies_under_a_checksum_leaves_nothing),
		T(disconnect_drops_what_is_pending_without_an_answer),
		T(page_may_be_published_again_after_it_left),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
