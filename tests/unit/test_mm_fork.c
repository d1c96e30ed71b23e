/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/unit.h"

#include "tests/lib/mm_rig.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define PAGE	16384

static struct rig rig;
static struct rig_client *a, *b;
static struct mm_pool *pool;
static uint32_t f[8];			/* of @a: filled, by number */
static uint64_t next_tag;

static void fill(uint32_t frame, uint8_t byte)
{
	memset(frame_addr(pool, frame), byte, PAGE);
}

static bool filled(uint32_t frame, uint8_t byte)
{
	const uint8_t *p = frame_addr(pool, frame);

	return p[0] == byte && !memcmp(p, p + 1, PAGE - 1);
}

static struct rig_client *newcomer(unsigned int i)
{
	struct rig_client *c = mr_client(&rig, i, KVMM_RW);

	mr_attach(c, "fork", PAGE);
	mr_win(c, 0);
	return c;
}

static void begin(bool sync_work)
{
	unsigned int i;

	mr_open(&rig, &(struct rig_opts){
		.bytes = 8u << 20, .sync_work = sync_work });
	a = newcomer(0);
	b = newcomer(1);
	pool = a->win->pool;
	mr_alloc(a, f, ARRAY_SIZE(f));
	for (i = 0; i < ARRAY_SIZE(f); i++)
		fill(f[i], (uint8_t)i);
	next_tag = 100;
}

static int setup(void **state)
{
	begin(false);
	return 0;
}

static int setup_sync(void **state)
{
	begin(true);
	return 0;
}

static int teardown(void **state)
{
	mr_check(&rig);
	mr_close(&rig);
	return 0;
}

static enum frame_state state_of(uint32_t frame)
{
	return frame_word_state(frame_word_of(pool, frame));
}

static bool free_of_all(uint32_t frame)
{
	return !pool->meta[frame].refs && !pool->meta[frame].flags;
}

/* An entry of @n copies, by a client; its tag. */
static uint64_t fork_many(struct rig_client *c, const struct ring_fork *fk,
			  uint32_t n, uint64_t after)
{
	struct ring_sqe sqe = {
		.op = RING_FORK, .space = (uint16_t)mm_space_ix(c->space),
		.n = n, .tag = next_tag++, .after = after,
	};

	mm_fork(c->mc, &sqe, fk);
	return sqe.tag;
}

static uint64_t fork_one(uint32_t from, uint32_t to, uint64_t after)
{
	const struct ring_fork fk = {
		.from = from, .to = to, .win = a->win->no,
	};

	return fork_many(a, &fk, 1, after);
}

/* What became of element @i. */
static int result(uint64_t tag, uint32_t i)
{
	const struct rig_done *d = mr_wait(&rig, tag);

	assert_int_equal(d->op, RING_FORK);
	assert_in_range(i + 1, 1, d->n);
	assert_int_equal(d->res[i].frame, 0);
	return d->res[i].result;
}

static int free_frame(struct rig_client *c, uint32_t frame)
{
	return mm_free(c->win, &frame, 1, 0);
}

static int publish(uint32_t frame, uint32_t chain)
{
	struct ring_pub p = mr_pub(chain, 0, frame);
	const struct rig_done *d = mr_publish(a, &p, 1, 99);
	int res;

	assert_non_null(d);
	res = d->res[0].result;
	mr_take(&rig, 99);
	return res;
}

/* -- copies --------------------------------------------------------------------- */

static void tail_is_copied(void **state)
{
	struct ring_fork fk[3];
	unsigned int i;
	uint64_t tag;

	for (i = 0; i < 3; i++)
		fk[i] = (struct ring_fork){
			.from = f[i], .to = f[i + 4], .win = a->win->no };
	tag = fork_many(a, fk, 3, 0);
	for (i = 0; i < 3; i++) {
		assert_int_equal(result(tag, i), 0);
		assert_true(filled(f[i + 4], (uint8_t)i));
		assert_true(filled(f[i], (uint8_t)i));
		assert_int_equal(state_of(f[i + 4]), FRAME_OPEN);
		assert_true(free_of_all(f[i]));
		assert_true(free_of_all(f[i + 4]));
	}
	assert_int_equal(pool->nd->c.pgfork, 3);
	assert_int_equal(publish(f[4], 1), 0);
	assert_int_equal(free_frame(a, f[0]), 0);
}

static void one_source_serves_many(void **state)
{
	uint64_t tag[7];
	unsigned int i;

	fill(f[0], 77);
	for (i = 0; i < 7; i++)
		tag[i] = fork_one(f[0], f[i + 1], 1);
	assert_int_equal(pool->meta[f[0]].refs, 7);
	mr_step(a, 1);
	for (i = 0; i < 7; i++) {
		assert_int_equal(result(tag[i], 0), 0);
		assert_true(filled(f[i + 1], 77));
	}
	assert_true(free_of_all(f[0]));
}

/* What counts is what is there when the step is done. */
static void copy_waits_for_its_step(void **state)
{
	uint64_t tag = fork_one(f[1], f[2], 3);

	mr_step(a, 2);
	mr_run(&rig);
	mr_settle(&rig);
	assert_null(mr_answer(&rig, tag));
	assert_true(filled(f[2], 2));
	fill(f[1], 55);
	mr_step(a, 3);
	assert_int_equal(result(tag, 0), 0);
	assert_true(filled(f[2], 55));
}

static void it_waits_for_all_members(void **state)
{
	struct rig_client *c[2];
	struct ring_fork fk;
	uint32_t g[2];
	uint64_t tag;
	int i;

	for (i = 0; i < 2; i++) {
		c[i] = mr_client(&rig, 2 + i, KVMM_RW);
		mr_join(c[i], 1, i, 2, 0);
	}
	for (i = 0; i < 2; i++) {
		mr_attach(c[i], "fork", PAGE);
		mr_win(c[i], 0);
	}
	mr_alloc(c[0], g, 2);
	fill(g[0], 9);
	fk = (struct ring_fork){
		.from = g[0], .to = g[1], .win = c[0]->win->no };
	tag = fork_many(c[0], &fk, 1, 1);
	mr_step(c[0], 1);
	mr_run(&rig);
	assert_null(mr_answer(&rig, tag));
	mr_step(c[1], 1);
	assert_int_equal(result(tag, 0), 0);
	assert_true(filled(g[1], 9));
}

/* -- refusals --------------------------------------------------------------------- */

static int refused(uint32_t from, uint32_t to)
{
	uint64_t tag = fork_one(from, to, 0);

	return result(tag, 0);
}

static void what_is_not_ones_own_open_frame_is_refused(void **state)
{
	uint32_t other, n = pool->max_frames;

	mr_alloc(b, &other, 1);
	assert_int_equal(publish(f[7], 1), 0);
	assert_int_equal(refused(f[0], f[0]), -EINVAL);
	assert_int_equal(refused(0, f[0]), -EINVAL);
	assert_int_equal(refused(f[0], 0), -EINVAL);
	assert_int_equal(refused(n, f[0]), -EINVAL);
	assert_int_equal(refused(f[0], UINT32_MAX), -EINVAL);
	assert_int_equal(refused(other, f[0]), -EINVAL);
	assert_int_equal(refused(f[0], other), -EINVAL);
	assert_int_equal(refused(f[7], f[0]), -EINVAL);
	assert_int_equal(refused(f[0], f[7]), -EINVAL);
	assert_int_equal(refused(f[0], f[0] + 200), -EINVAL);
	assert_true(free_of_all(f[0]));
	assert_int_equal(refused(f[0], f[1]), 0);
}

static void a_target_is_nobodys_before_the_end(void **state)
{
	struct ring_fork twice[2] = {
		{ .from = f[2], .to = f[3], .win = a->win->no },
		{ .from = f[4], .to = f[3], .win = a->win->no },
	};
	uint64_t tag = fork_one(f[0], f[1], 5), both;

	assert_int_equal(refused(f[2], f[1]), -EINVAL);
	assert_int_equal(refused(f[1], f[2]), -EINVAL);
	/* a source is read, and must not be written by another one */
	assert_int_equal(refused(f[2], f[0]), -EINVAL);
	assert_int_equal(free_frame(a, f[1]), -EINVAL);
	assert_int_equal(free_frame(a, f[0]), -EINVAL);
	assert_int_equal(publish(f[1], 1), -EINVAL);
	both = fork_many(a, twice, 2, 0);
	assert_int_equal(result(both, 0), 0);
	assert_int_equal(result(both, 1), -EINVAL);
	/* freed, waits for its step */
	assert_int_equal(mm_free(a->win, &f[5], 1, 5), 0);
	assert_int_equal(refused(f[5], f[6]), -EINVAL);
	assert_int_equal(refused(f[6], f[5]), -EINVAL);
	mr_step(a, 5);
	assert_int_equal(result(tag, 0), 0);
	assert_true(filled(f[1], 0));
	assert_int_equal(publish(f[1], 1), 0);
}

static int whole(struct rig_client *c, struct ring_fork fk, uint32_t n,
		 uint16_t space)
{
	struct ring_fork many[KVMM_MAX_GROUPS + 1] = { fk };
	struct ring_sqe sqe = {
		.op = RING_FORK, .space = space, .n = n, .tag = next_tag++,
	};
	const struct rig_done *d;

	mm_fork(c->mc, &sqe, many);
	d = mr_answer(&rig, sqe.tag);
	assert_non_null(d);
	assert_int_equal(d->n, 0);
	return d->result;
}

static void entries_that_make_no_sense_are_refused_whole(void **state)
{
	struct ring_fork fk = {
		.from = f[0], .to = f[1], .win = a->win->no };
	uint16_t sp = (uint16_t)mm_space_ix(a->space);
	struct rig_client *ro;

	assert_int_equal(whole(a, fk, 0, sp), -EINVAL);
	assert_int_equal(whole(a, fk, KVMM_MAX_GROUPS + 1, sp), -EINVAL);
	assert_int_equal(whole(a, fk, 1, sp + 1), -EINVAL);
	fk.win++;
	assert_int_equal(whole(a, fk, 1, sp), -EINVAL);
	fk.win = UINT16_MAX;
	assert_int_equal(whole(a, fk, 1, sp), -EINVAL);
	ro = mr_client(&rig, 2, KVMM_RO);
	mr_attach(ro, "fork", PAGE);
	mr_win(ro, 0);
	fk.win = ro->win->no;
	assert_int_equal(whole(ro, fk, 1, sp), -EACCES);
	assert_true(free_of_all(f[0]));
}

/* -- what may happen meanwhile ------------------------------------------------------ */

static void a_source_may_be_published(void **state)
{
	uint64_t tag = fork_one(f[0], f[1], 1);
	struct page *pg;

	fill(f[0], 33);
	assert_int_equal(publish(f[0], 1), 0);
	pg = mr_page(a, 1, 0);
	assert_non_null(pg);
	/* nobody has a pin on it, but it is read */
	assert_true(frame_busy(pool, f[0]));
	assert_false(frame_isolate(pool, f[0]));
	mr_step(a, 1);
	assert_int_equal(result(tag, 0), 0);
	assert_true(filled(f[1], 33));
	assert_true(frame_isolate(pool, f[0]));
	frame_put(pool, f[0]);
	page_put(pg);
}

static void cancelled_before_its_step_it_is_over(void **state)
{
	uint64_t tag = fork_one(f[0], f[1], 1);

	mm_cancel(a->mc, tag);
	assert_int_equal(mr_answer(&rig, tag)->result, -ECANCELED);
	assert_int_equal(result(tag, 0), -ECANCELED);
	assert_true(free_of_all(f[0]));
	assert_true(free_of_all(f[1]));
	mr_step(a, 1);
	mr_run(&rig);
	mr_settle(&rig);
	assert_true(filled(f[1], 1));
}

static void cancelled_while_it_is_copied_it_is_done(void **state)
{
	uint64_t tag = fork_one(f[0], f[1], 0);

	mm_cancel(a->mc, tag);
	assert_int_equal(result(tag, 0), 0);
	assert_true(filled(f[1], 0));
}

static void a_dying_engine_gets_no_copy(void **state)
{
	uint64_t tag = fork_one(f[0], f[1], 1);

	engine_dying(a->mc->engine);
	assert_int_equal(result(tag, 0), -EOWNERDEAD);
	assert_true(filled(f[1], 1));
	assert_int_equal(whole(a, (struct ring_fork){ .win = a->win->no }, 1,
			       (uint16_t)mm_space_ix(a->space)), -EOWNERDEAD);
}

static void expect_all_free(void)
{
	unsigned int i;

	mr_settle(&rig);
	for (i = 0; i < ARRAY_SIZE(f); i++)
		assert_int_equal(state_of(f[i]), FRAME_FREE);
	assert_int_equal(pool->nr_open, 0);
	assert_int_equal(pool->nr_quarantine, 0);
}

static void nothing_is_left_of_a_process_that_waited_for_a_step(void **state)
{
	fork_one(f[0], f[1], 1);
	mr_exit(a);
	expect_all_free();
	assert_true(filled(f[1], 0));		/* zeroed */
}

static void nothing_is_left_of_one_whose_pages_were_copied(void **state)
{
	unsigned int i;

	for (i = 1; i < ARRAY_SIZE(f); i++)
		fork_one(f[0], f[i], 0);
	mr_exit(a);
	expect_all_free();
	for (i = 0; i < ARRAY_SIZE(f); i++)
		assert_true(filled(f[i], 0));
}

static void a_hang_up_ends_it_without_an_answer(void **state)
{
	uint64_t waits = fork_one(f[0], f[1], 1);
	uint64_t runs = fork_one(f[0], f[2], 0);

	mm_client_disconnect(a->mc);
	assert_true(free_of_all(f[1]));
	mr_settle(&rig);
	assert_null(mr_answer(&rig, waits));
	assert_null(mr_answer(&rig, runs));
	assert_true(free_of_all(f[0]));
	assert_true(free_of_all(f[2]));
	assert_int_equal(state_of(f[2]), FRAME_OPEN);
}

static bool window_is_gone(void *arg)
{
	return list_empty(&rig.mm->closed);
}

static void a_window_may_close_meanwhile(void **state)
{
	uint64_t tag = fork_one(f[0], f[1], 1);

	mm_win_close(a->win);
	assert_int_equal(state_of(f[0]), FRAME_OPEN);
	assert_int_equal(state_of(f[1]), FRAME_OPEN);
	mr_step(a, 1);
	assert_int_equal(result(tag, 0), 0);
	mr_until(&rig, window_is_gone, NULL);
	assert_int_equal(state_of(f[0]), FRAME_FREE);
	assert_int_equal(state_of(f[1]), FRAME_FREE);
}

static void the_end_of_all_waits_for_it(void **state)
{
	fork_one(f[0], f[1], 1);
	fork_one(f[0], f[2], 0);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(tail_is_copied),
		cmocka_unit_test_setup_teardown(one_source_serves_many,
						setup_sync, teardown),
		T(one_source_serves_many),
		T(copy_waits_for_its_step),
		T(it_waits_for_all_members),
		T(what_is_not_ones_own_open_frame_is_refused),
		T(a_target_is_nobodys_before_the_end),
		T(entries_that_make_no_sense_are_refused_whole),
		T(a_source_may_be_published),
		T(cancelled_before_its_step_it_is_over),
		T(cancelled_while_it_is_copied_it_is_done),
		T(a_dying_engine_gets_no_copy),
		T(nothing_is_left_of_a_process_that_waited_for_a_step),
		T(nothing_is_left_of_one_whose_pages_were_copied),
		T(a_hang_up_ends_it_without_an_answer),
		T(a_window_may_close_meanwhile),
		T(the_end_of_all_waits_for_it),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
