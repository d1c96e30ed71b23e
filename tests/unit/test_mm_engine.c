/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/unit.h"

#include "tests/lib/mm_rig.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define PAGE	16384

static struct rig rig;
static struct rig_client *a, *b;
static struct mm_pool *pool;

static int setup(void **state)
{
	mr_open(&rig, &(struct rig_opts){ .bytes = 8u << 20 });
	return 0;
}

static int teardown(void **state)
{
	mr_check(&rig);
	mr_close(&rig);
	return 0;
}

/* Two members of one engine, each with a window. */
static void two_members(uint32_t flags_a)
{
	a = mr_client(&rig, 0, KVMM_RW);
	b = mr_client(&rig, 1, KVMM_RW);
	mr_join(a, 1, 0, flags_a & KVMM_NO_STEP ? 1 : 2, flags_a);
	mr_join(b, 1, flags_a & KVMM_NO_STEP ? 0 : 1,
		 flags_a & KVMM_NO_STEP ? 1 : 2, 0);
	mr_attach(a, "engine", PAGE);
	mr_attach(b, "engine", PAGE);
	mr_win(a, 0);
	mr_win(b, 0);
	pool = a->win->pool;
}

static enum frame_state state_of(uint32_t f)
{
	return frame_word_state(frame_word_of(pool, f));
}

static int join(struct rig_client *c, uint8_t token, uint32_t rank,
		uint32_t world, uint32_t flags)
{
	uint8_t t[16] = { token };
	struct errmsg e;

	return mm_client_join(c->mc, t, rank, world, flags, &e);
}

static void joining_is_refused_for_what_it_says(void **state)
{
	struct rig_client *c[4];
	int i;

	for (i = 0; i < 4; i++)
		c[i] = mr_client(&rig, i, KVMM_RW);
	assert_int_equal(join(c[0], 1, 0, 0, 0), -EINVAL);
	assert_int_equal(join(c[0], 1, 0, KVMM_MAX_WORLD + 1, 0), -EINVAL);
	assert_int_equal(join(c[0], 1, 2, 2, 0), -EINVAL);
	assert_int_equal(join(c[0], 1, 0, 2, 0x80), -EINVAL);
	assert_int_equal(join(c[0], 1, 0, 2, KVMM_LEADER), 0);
	assert_int_equal(join(c[0], 1, 0, 2, KVMM_LEADER), -EBUSY);
	assert_int_equal(join(c[1], 1, 0, 2, 0), -EEXIST);
	assert_int_equal(join(c[1], 1, 1, 2, KVMM_LEADER), -EEXIST);
	assert_int_equal(join(c[1], 1, 1, 3, 0), -EPROTO);
	assert_int_equal(join(c[1], 1, 1, 2, 0), 0);
	mr_attach(c[2], "engine", PAGE);
	assert_int_equal(join(c[2], 2, 0, 1, 0), -EBUSY);
	mr_exit(c[1]);
	assert_int_equal(join(c[3], 1, 1, 2, 0), -EOWNERDEAD);
}

/* A window that is closed, and a space left, and something of both remains. */
static void joining_waits_for_what_is_left_of_closed_windows(void **state)
{
	uint32_t f, g;

	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "engine", PAGE);
	mr_win(a, 0);
	mr_put(a, 1, 0, 1);
	g = copy_at(mr_page(a, 1, 0), 0)->frame;
	mr_alloc(a, &f, 1);
	/* a frame that is freed after a step to come */
	assert_int_equal(mm_free(a->win, &f, 1, 3), 0);
	mr_pin(a, g, 1);
	pool = a->win->pool;
	mm_win_close(a->win);
	mm_detach(a->mc, a->space);
	assert_int_equal(join(a, 1, 0, 1, 0), -EBUSY);
	mr_step(a, 3);
	assert_int_equal(state_of(f), FRAME_FREE);
	/* and a pin */
	assert_int_equal(join(a, 1, 0, 1, 0), -EBUSY);
	mr_exit(a);
	assert_int_equal(frame_pins(pool, g), 0);
}

static void joining_waits_for_answers(void **state)
{
	struct ring_pub p;
	uint32_t f;

	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "engine", PAGE);
	mr_win(a, 0);
	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	p.after = 3;
	assert_null(mr_publish(a, &p, 1, 5));
	mm_win_close(a->win);
	mm_detach(a->mc, a->space);
	assert_int_equal(join(a, 1, 0, 1, 0), -EBUSY);
	mr_step(a, 3);
	assert_int_equal(mr_answer(&rig, 5)->res[0].result, 0);
	assert_int_equal(join(a, 1, 0, 1, 0), -EBUSY);
	mr_take(&rig, 5);
	mr_run(&rig);
	assert_int_equal(join(a, 1, 0, 1, 0), 0);
}

static void members_hear_of_each_other(void **state)
{
	a = mr_client(&rig, 0, KVMM_RW);
	b = mr_client(&rig, 1, KVMM_RW);
	mr_join(a, 1, 0, 2, 0);
	assert_int_equal(atomic_load(&a->ledger->engine_state), ENGINE_FORMING);
	mr_join(b, 1, 1, 2, 0);
	assert_int_equal(a->new_members, 1);
	assert_int_equal(atomic_load(&a->ledger->engine_state), ENGINE_ALIVE);
	assert_int_equal(atomic_load(&a->ledger->engine_world), 2);
	mr_exit(b);
	assert_int_equal(a->gone_members, 1);
	assert_int_equal(atomic_load(&a->ledger->engine_state), ENGINE_DYING);
	assert_true(a->kicks > 0);
}

static void process_that_comes_back_takes_its_place_again(void **state)
{
	struct rig_client *c;

	two_members(0);
	mm_client_disconnect(b->mc);
	c = mr_client(&rig, 2, KVMM_RW);
	/* another process may not */
	assert_int_equal(join(c, 1, 1, 2, 0), -EEXIST);
	c->mc->o.pid = b->mc->o.pid;
	assert_int_equal(join(c, 1, 1, 2, 0), 0);
	/* and its new step word counts, not the old one */
	atomic_store(&a->ledger->step, 5);
	atomic_store(&c->ledger->step, 4);
	assert_int_equal(engine_step(a->mc->engine), 4);
}

/* What its old windows have mapped holds nothing up. */
static void reader_that_comes_back_is_one_member(void **state)
{
	struct rig_client *c;

	two_members(KVMM_NO_STEP);
	c = mr_client(&rig, 2, KVMM_RW);
	assert_int_equal(join(c, 1, 0, 1, KVMM_NO_STEP), 0);
	assert_false(a->mc->replaced);
	mm_client_disconnect(a->mc);
	c = mr_client(&rig, 3, KVMM_RW);
	c->mc->o.pid = a->mc->o.pid;
	assert_int_equal(join(c, 1, 0, 1, KVMM_NO_STEP), 0);
	assert_true(a->mc->replaced);
	assert_true(win_mapped(b->win, 0));
	atomic_store(&a->win->bitmap[0], 0);
	assert_true(win_mapped(b->win, 0));
}

static void step_is_the_minimum_over_all_members(void **state)
{
	struct ring_pub p;
	uint32_t f;

	two_members(0);
	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	p.after = 2;
	assert_null(mr_publish(a, &p, 1, 5));
	assert_int_equal(atomic_load(&a->ledger->step_wanted), 2);
	assert_int_equal(atomic_load(&b->ledger->step_wanted), 2);
	mr_step(a, 9);
	assert_null(mr_answer(&rig, 5));
	mr_step(b, 2);
	assert_int_equal(mr_answer(&rig, 5)->res[0].result, 0);
	mr_take(&rig, 5);
}

static void nothing_with_a_step_happens_before_all_joined(void **state)
{
	struct ring_pub p;
	uint32_t f;

	a = mr_client(&rig, 0, KVMM_RW);
	mr_join(a, 1, 0, 2, 0);
	mr_attach(a, "engine", PAGE);
	mr_win(a, 0);
	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	p.after = 1;
	assert_null(mr_publish(a, &p, 1, 5));
	mr_step(a, 7);
	assert_null(mr_answer(&rig, 5));
	b = mr_client(&rig, 1, KVMM_RW);
	atomic_store(&b->ledger->step, 1);
	mr_join(b, 1, 1, 2, 0);
	assert_non_null(mr_answer(&rig, 5));
	mr_take(&rig, 5);
}

static void step_written_by_a_stream_is_seen_within_milliseconds(void **state)
{
	struct ring_pub p;
	uint32_t f;

	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "engine", PAGE);
	mr_win(a, 0);
	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	p.after = 1;
	assert_null(mr_publish(a, &p, 1, 5));
	/* nobody rings */
	atomic_store(&a->ledger->step, 1);
	mr_wait(&rig, 5);
	mr_take(&rig, 5);
}

static void step_that_goes_back_is_not_believed(void **state)
{
	a = mr_client(&rig, 0, KVMM_RW);
	atomic_store(&a->ledger->step, 5);
	assert_int_equal(engine_step(a->mc->engine), 5);
	atomic_store(&a->ledger->step, 1);
	assert_int_equal(engine_step(a->mc->engine), 5);
}

static void frames_of_a_dead_engine_are_zeroed_before_they_are_free(void **state)
{
	unsigned char *bytes;
	uint32_t f[40], i;
	size_t k;

	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "engine", PAGE);
	mr_win(a, 0);
	/* stays, so that the space does */
	b = mr_client(&rig, 1, KVMM_RW);
	mr_attach(b, "engine", PAGE);
	pool = a->win->pool;
	mr_alloc(a, f, 40);
	for (i = 0; i < 40; i++)
		memset(frame_addr(pool, f[i]), 0xee, PAGE);
	mr_exit(a);
	assert_true(a->exited);
	assert_int_equal(pool->nr_open, 0);
	for (i = 0; i < 40; i++)
		assert_int_equal(state_of(f[i]), FRAME_QUARANTINE);
	mr_check(&rig);
	mr_settle(&rig);
	assert_int_equal(pool->nr_quarantine, 0);
	assert_int_equal(pool->nr_free, pool->nr_frames);
	for (i = 0; i < 40; i++) {
		bytes = frame_addr(pool, f[i]);
		for (k = 0; k < PAGE; k++)
			assert_int_equal(bytes[k], 0);
	}
}

static void pins_end_with_the_last_member_and_not_before(void **state)
{
	struct page *pg;
	uint32_t f, open;

	two_members(KVMM_LEADER | KVMM_NO_STEP);
	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	f = copy_at(pg, 0)->frame;
	mr_alloc(a, &open, 1);
	mr_pin(a, f, 1);
	/* the leader is gone; the rank's kernels may still read */
	mr_exit(a);
	assert_false(a->exited);
	assert_false(frame_isolate(pool, f));
	assert_int_equal(state_of(open), FRAME_OPEN);
	mr_exit(b);
	assert_true(a->exited && b->exited);
	mr_settle(&rig);
	assert_int_equal(state_of(open), FRAME_FREE);
	assert_true(frame_isolate(pool, f));
	frame_put(pool, f);
	page_put(pg);
}

static void pins_outlive_the_socket(void **state)
{
	uint32_t f;

	two_members(0);
	mr_put(a, 1, 0, 1);
	f = copy_at(mr_page(a, 1, 0), 0)->frame;
	mr_pin(a, f, 1);
	mm_client_disconnect(a->mc);
	assert_false(frame_isolate(pool, f));
}

static void broken_ledger_loses_pins_with_the_socket(void **state)
{
	uint32_t f;
	struct page *pg;

	two_members(0);
	rig.mm->breaks = MM_BREAK_LEDGER;
	mr_put(a, 1, 0, 1);
	pg = mr_page(a, 1, 0);
	f = copy_at(pg, 0)->frame;
	mr_pin(a, f, 1);
	mm_client_disconnect(a->mc);
	assert_true(frame_isolate(pool, f));
	frame_put(pool, f);
	page_put(pg);
}

static void dying_engine_gets_nothing_new(void **state)
{
	struct errmsg e;
	struct ring_pub p[2];
	uint32_t f[2], tail;

	two_members(0);
	mr_alloc(a, f, 2);
	p[0] = mr_pub(1, 0, f[0]);
	p[1] = mr_pub(1, 1, f[1]);
	p[0].after = 3;
	assert_null(mr_publish(a, p, 2, 5));
	mr_exit(b);
	assert_int_equal(mr_answer(&rig, 5)->res[0].result, -EOWNERDEAD);
	assert_int_equal(mr_answer(&rig, 5)->res[1].result, -EOWNERDEAD);
	mr_take(&rig, 5);
	assert_int_equal(mr_publish(a, p, 1, 6)->res[0].result, -EOWNERDEAD);
	mr_take(&rig, 6);
	tail = a->win->mag_tail;
	mm_refill(a->win, 200);
	assert_int_equal(a->win->mag_tail, tail);
	mm_win_close(a->win);
	assert_int_equal(mm_win_open(a->mc, a->space, 0, 0, 0, &a->win, &e),
			 -EOWNERDEAD);
}

static void others_notice_nothing_of_a_death(void **state)
{
	struct rig_client *c;
	struct ring_pub p;
	uint32_t f;

	two_members(0);
	c = mr_client(&rig, 2, KVMM_RW);
	mr_attach(c, "engine", PAGE);
	mr_win(c, 0);
	mr_alloc(c, &f, 1);
	p = mr_pub(3, 0, f);
	p.after = 1;
	assert_null(mr_publish(c, &p, 1, 7));
	mr_exit(a);
	mr_exit(b);
	mr_settle(&rig);
	mr_step(c, 1);
	assert_int_equal(mr_answer(&rig, 7)->res[0].result, 0);
	mr_take(&rig, 7);
}

static void free_that_waits_for_a_step_survives_a_death(void **state)
{
	uint32_t f;

	two_members(0);
	mr_alloc(a, &f, 1);
	assert_int_equal(mm_free(a->win, &f, 1, 9), 0);
	mr_exit(a);
	assert_int_equal(state_of(f), FRAME_OPEN);
	mr_exit(b);
	mr_settle(&rig);
	assert_int_equal(rig.mm->nr_step_waits, 0);
}

/* A member that still runs may use it before that step, whatever was closed. */
static void free_of_a_dying_engine_waits_for_its_end(void **state)
{
	uint32_t f;
	int i;

	two_members(0);
	mr_alloc(a, &f, 1);
	assert_int_equal(mm_free(a->win, &f, 1, 9), 0);
	mm_win_close(a->win);
	mr_exit(b);
	for (i = 0; i < 10; i++) {
		rig.mm->next_closed_ns = 0;
		mr_run(&rig);
		assert_int_equal(state_of(f), FRAME_OPEN);
	}
	mr_attach(mr_client(&rig, 2, KVMM_RW), "engine", PAGE);
	mr_exit(a);
	mr_settle(&rig);
	assert_int_equal(state_of(f), FRAME_FREE);
}

/* The daemon ends before the step comes: a leak check sees what is left. */
static void free_that_waits_for_a_step_ends_with_the_daemon(void **state)
{
	uint32_t f;

	two_members(0);
	mr_alloc(a, &f, 1);
	assert_int_equal(mm_free(a->win, &f, 1, 9), 0);
	assert_int_equal(rig.mm->nr_step_waits, 1);
}

static bool is_evicted(void *arg)
{
	rig.mm->next_pools_ns = 0;
	rig.mm->next_reclaim_ns = 0;
	return ((struct rig_client *)arg)->evicted;
}

static void engine_over_its_pin_limit_suffers_alone(void **state)
{
	uint32_t n = 0, k;
	struct rig_client *c;
	int i;

	mr_close(&rig);
	mr_open(&rig, &(struct rig_opts){ .bytes = 2u << 20,
					   .pin_limit_pct = 50 });
	a = mr_client(&rig, 0, KVMM_RW);
	c = mr_client(&rig, 1, KVMM_RW);
	mr_attach(a, "engine", PAGE);
	mr_attach(c, "engine", PAGE);
	mr_win(a, 0);
	mr_win(c, 0);
	pool = a->win->pool;
	for (i = 0; i < 64; i++)
		mr_put(a, 1, i, i + 1);
	for (i = 0; i < 24; i++)
		mr_put(c, 2, i, i + 1);
	for (i = 0; i < 24; i++)
		mr_pin(c, copy_at(mr_page(c, 2, i), 0)->frame, 1);
	/* more than half of the node's 128 frames */
	for (k = pool->per_extent; k < pool->max_frames && n < 70; k++) {
		if (!frame_live(pool, k))
			continue;
		n++;
		mr_pin(a, k, 1);
	}
	/* the count is made when frames are short */
	mm_refill(c->win, 60);
	mr_until(&rig, is_evicted, a);
	assert_false(c->evicted);
	assert_int_equal(frame_pins(pool, copy_at(mr_page(c, 2, 0), 0)->frame), 1);
	assert_non_null(strstr(a->why, "pinned"));
	for (i = 0; i < 24; i++)
		mr_pin(c, copy_at(mr_page(c, 2, i), 0)->frame, -1);
}

/* Pins of @c on @n frames, whatever is in them: more than half of 128. */
static void pin_many(struct rig_client *c, uint32_t n, int by)
{
	uint32_t f, i = 0;

	for (f = pool->per_extent; f < pool->max_frames && i < n; f++) {
		if (!frame_live(pool, f))
			continue;
		i++;
		mr_pin(c, f, by);
	}
	assert_int_equal(i, n);
}

/* All that are pinned are counted and judged, if frames are short. */
static void count_pins(void)
{
	pool->pin_scan_ns = 0;
	do
		pool_count_pins(pool);
	while (rig.mm->pin_pool);
}

/* Somebody waits for frames; then all that are pinned are counted and judged. */
static void count_pins_while(struct rig_client *c)
{
	mm_refill(c->win, pool->max_frames);
	assert_true(pool->want > 0);
	count_pins();
}

/* Two engines in 128 frames, of which one may pin half; a pins 70 of them. */
static void start_over_the_limit(void)
{
	uint32_t i;

	mr_close(&rig);
	mr_open(&rig, &(struct rig_opts){ .bytes = 2u << 20,
					   .pin_limit_pct = 50 });
	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "engine", PAGE);
	mr_win(a, 0);
	pool = a->win->pool;
	for (i = 0; i < 88; i++)
		mr_put(a, 1, i, i + 1);
	pin_many(a, 70, 1);
}

static void second_engine(void)
{
	b = mr_client(&rig, 1, KVMM_RW);
	mr_attach(b, "engine", PAGE);
	mr_win(b, 0);
}

static void engine_that_is_alone_may_pin_all_there_is(void **state)
{
	start_over_the_limit();
	count_pins_while(a);
	assert_int_equal(a->mc->engine->scan_pinned, 70);
	assert_false(a->evicted);
	/* and beside one that wants nothing */
	second_engine();
	count_pins_while(a);
	assert_false(a->evicted);
	/* but not when that one waits, too */
	count_pins_while(b);
	assert_true(a->evicted);
	assert_false(b->evicted);
}

/* All of it is pinned, so that no load waits: it is told so at once. */
static void engine_that_starves_anothers_loads_is_found_out(void **state)
{
	start_over_the_limit();
	second_engine();
	pool_starves(pool, a->mc->engine);
	count_pins();
	assert_int_equal(a->mc->engine->scan_pinned, 70);
	assert_false(a->evicted);
	pool_starves(pool, b->mc->engine);
	count_pins();
	assert_true(a->evicted);
	assert_false(b->evicted);
	/* each count has its own: nobody has starved since */
	assert_int_equal(pool->starved, 0);
}

static void engine_is_not_the_only_one_to_starve(void **state)
{
	start_over_the_limit();
	second_engine();
	pool_starves(pool, a->mc->engine);
	pool_starves(pool, b->mc->engine);
	count_pins();
	assert_true(a->evicted);
}

static void reserve_may_be_pinned_beyond_the_limit(void **state)
{
	struct errmsg e;

	start_over_the_limit();
	assert_int_equal(mm_reserve(a->mc, a->space, 0, 0, 80, &e), 0);
	second_engine();
	count_pins_while(b);
	assert_int_equal(a->mc->engine->scan_pinned, 70);
	assert_false(a->evicted);
	assert_int_equal(mm_reserve(a->mc, a->space, 0, 0, 69, &e), 0);
	count_pins_while(b);
	assert_true(a->evicted);
	assert_false(b->evicted);
}

/*
 * An engine at its limit in one pool opens a window on another one while that
 * one is being counted: what it pins there is nothing.
 */
static void pins_elsewhere_do_not_count_in_a_pool_just_opened(void **state)
{
	struct rig_client *c;
	struct mm_pool *q;
	unsigned int i;

	mr_close(&rig);
	mr_open(&rig, &(struct rig_opts){ .bytes = 8u << 20,
					   .pin_limit_pct = 50 });
	a = mr_client(&rig, 0, KVMM_RW);
	c = mr_client(&rig, 1, KVMM_RW);
	/* small pages: more of them may be pinned than there are large ones */
	mr_attach(a, "small", 4096);
	mr_win(a, 0);
	pool = a->win->pool;
	mr_attach(c, "large", 65536);
	mr_win(c, 0);
	q = c->win->pool;
	mr_alloc(a, (uint32_t[100]){ 0 }, 100);
	for (i = 0; i < pool->max_frames; i++)
		if (frame_live(pool, i))
			mr_pin(a, i, 1);
	pool->want++;
	do
		pool_count_pins(pool);
	while (rig.mm->pin_pool);
	pool->want--;
	assert_true(a->mc->engine->scan_pinned > 100);
	assert_false(a->evicted);
	/* the other pool's count is under way */
	rig.mm->pin_pool = q;
	q->pin_scan_at = 1;
	mr_attach(a, "large", 65536);
	mr_win(a, 0);
	while (rig.mm->pin_pool)
		pool_count_pins(q);
	assert_false(a->evicted);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(joining_is_refused_for_what_it_says),
		T(joining_waits_for_what_is_left_of_closed_windows),
		T(joining_waits_for_answers),
		T(members_hear_of_each_other),
		T(process_that_comes_back_takes_its_place_again),
		T(reader_that_comes_back_is_one_member),
		T(step_is_the_minimum_over_all_members),
		T(nothing_with_a_step_happens_before_all_joined),
		T(step_written_by_a_stream_is_seen_within_milliseconds),
		T(step_that_goes_back_is_not_believed),
		T(frames_of_a_dead_engine_are_zeroed_before_they_are_free),
		T(pins_end_with_the_last_member_and_not_before),
		T(pins_outlive_the_socket),
		T(broken_ledger_loses_pins_with_the_socket),
		T(dying_engine_gets_nothing_new),
		T(others_notice_nothing_of_a_death),
		T(free_that_waits_for_a_step_survives_a_death),
		T(free_of_a_dying_engine_waits_for_its_end),
		T(free_that_waits_for_a_step_ends_with_the_daemon),
		T(engine_over_its_pin_limit_suffers_alone),
		T(engine_that_is_alone_may_pin_all_there_is),
		T(engine_that_starves_anothers_loads_is_found_out),
		T(engine_is_not_the_only_one_to_starve),
		T(reserve_may_be_pinned_beyond_the_limit),
		T(pins_elsewhere_do_not_count_in_a_pool_just_opened),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
