/* SPDX-License-Identifier: Apache-2.0 */
#include <sys/resource.h>
#include <unistd.h>

#include "tests/lib/unit.h"

#include "tests/lib/mm_rig.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define PAGE	16384

static struct rig rig;
static struct rig_client *a;
static struct mm_pool *pool;

static int setup(void **state)
{
	mr_open(&rig, &(struct rig_opts){ .bytes = 8u << 20 });
	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "window", PAGE);
	mr_win(a, 0);
	pool = a->win->pool;
	return 0;
}

static int teardown(void **state)
{
	mr_check(&rig);
	mr_close(&rig);
	return 0;
}

static struct rig_client *second(uint32_t rights)
{
	struct rig_client *b = mr_client(&rig, 1, rights);

	mr_attach(b, "window", PAGE);
	mr_win(b, 0);
	return b;
}

static enum frame_state state_of(uint32_t f)
{
	return frame_word_state(frame_word_of(pool, f));
}

static void wrong_windows_are_refused(void **state)
{
	struct rig_client *ro = mr_client(&rig, 1, KVMM_RO);
	struct errmsg e;
	struct mm_win *w;

	assert_int_equal(mm_win_open(ro->mc, a->space, 0, 0, 0, &w, &e),
			 -EINVAL);	/* not attached */
	mr_attach(ro, "window", PAGE);
	assert_int_equal(mm_win_open(ro->mc, a->space, 0, 0, KVMM_RW, &w, &e),
			 -EACCES);
	assert_int_equal(mm_win_open(a->mc, a->space, 1, 0, 0, &w, &e),
			 -EINVAL);
	assert_int_equal(mm_win_open(a->mc, a->space, 0, 1, 0, &w, &e),
			 -EINVAL);
	assert_int_equal(mm_win_open(a->mc, a->space, 0, 0, 3, &w, &e),
			 -EINVAL);
	assert_int_equal(mm_win_open(a->mc, a->space, 0, 0, 0, &w, &e),
			 -EBUSY);
}

static void refill_gives_the_want_in_open_frames_of_ones_own(void **state)
{
	uint32_t f[20], i;

	mm_refill(a->win, 20);
	assert_int_equal(atomic_load(&a->win->wl->refills), 1);
	assert_int_equal(mr_pop(a, f, 20), 20);
	for (i = 0; i < 20; i++) {
		assert_int_equal(state_of(f[i]), FRAME_OPEN);
		assert_ptr_equal(pool->meta[f[i]].owner, a->mc->engine);
		assert_true(bitmap_shared_test(a->win->bitmap,
					       f[i] / pool->per_extent));
	}
	assert_true(a->win->nr_open >= 20);
}

static void refill_counts_what_the_magazine_holds(void **state)
{
	uint32_t open;

	mm_refill(a->win, 10);
	open = a->win->nr_open;
	mm_refill(a->win, 10);
	assert_int_equal(a->win->nr_open, open);
}

static void want_that_cannot_be_met_waits_and_wakes(void **state)
{
	uint32_t f[4096], n = 0, total = pool->max_frames, kicks;
	struct rig_client *b;
	int i;

	/* everything there is, until the node is full */
	for (i = 0; i < 200; i++) {
		mm_refill(a->win, 64);
		mr_settle(&rig);
		mr_sync(a);
		n += mr_pop(a, f + n, ARRAY_SIZE(f) - n);
	}
	assert_true(n < total);
	b = second(KVMM_RW);
	mm_refill(b->win, 4);
	assert_int_equal(mr_pop(b, f + n, 4), 0);
	assert_int_equal(pool->want, 4 + a->win->want);
	assert_true(rig.mm->node[0].c.allocstall > 0);
	kicks = b->kicks;
	/* whoever waited longest is served first */
	assert_int_equal(mm_free(a->win, f, 128, 0), 0);
	assert_true(b->kicks > kicks);
	assert_int_equal(mr_pop(b, f, 4), 4);
	assert_int_equal(b->win->want, 0);
}

/* As libkvmm does: a refused allocation leaves its want in the ledger. */
static void ask(struct rig_client *c, uint32_t refused, uint32_t n)
{
	atomic_store(&c->win->wl->want, refused);
	mm_stock(c->win, n);
}

static uint32_t in_hand(struct rig_client *c)
{
	return c->win->mag_tail - atomic_load(&c->win->wl->mag_head);
}

/* Five of them, on as many frames as four stocks: nobody else goes short. */
static void idle_magazines_leave_frames_to_the_others(void **state)
{
	struct rig_client *c[5];
	uint32_t f[256], i, held = 0;

	/* so that there are 256 frames, all of them free again */
	mr_alloc(a, f, 200);
	assert_int_equal(mm_free(a->win, f, 200, 0), 0);
	assert_in_range(pool->nr_frames, 200, 512);
	for (i = 0; i < ARRAY_SIZE(c); i++) {
		c[i] = mr_client(&rig, 1 + i, KVMM_RW);
		mr_attach(c[i], "window", PAGE);
		mr_win(c[i], 0);
		ask(c[i], 0, 64);
		assert_in_range(in_hand(c[i]), 4, 64);
		held += in_hand(c[i]);
	}
	assert_in_range(held, 5 * 4, pool->nr_frames / 4);
	/* nor do they when they ask again */
	for (i = 0; i < ARRAY_SIZE(c); i++)
		ask(c[i], 0, 64);
	held = 0;
	for (i = 0; i < ARRAY_SIZE(c); i++)
		held += in_hand(c[i]);
	assert_in_range(held, 5 * 4, pool->nr_frames / 4);
	/* and who needs many gets them at once */
	ask(c[0], 100, 100);
	assert_int_equal(mr_pop(c[0], f, 100), 100);
}

static void a_client_alone_has_a_small_stock_of_a_small_node(void **state)
{
	uint32_t f[256];

	mr_alloc(a, f, 200);
	assert_int_equal(mm_free(a->win, f, 200, 0), 0);
	mr_pop(a, f, ARRAY_SIZE(f));
	ask(a, 0, 64);
	assert_in_range(in_hand(a), 4, pool->nr_frames / 16);
}

/* What was refused last is asked for ahead, too: it will be needed again. */
static void a_refused_want_is_no_stock(void **state)
{
	uint32_t f[256];

	mr_alloc(a, f, 200);
	assert_int_equal(mm_free(a->win, f, 200, 0), 0);
	mr_pop(a, f, ARRAY_SIZE(f));
	ask(a, 64, 64);
	assert_int_equal(in_hand(a), 64);
}

static void lying_magazine_head_costs_the_client_its_connection(void **state)
{
	atomic_store(&a->win->wl->mag_head, 1000000);
	mm_refill(a->win, 1);
	assert_true(a->evicted);
	atomic_store(&a->win->wl->mag_head, 0);
}

static void offsets_in_the_ledger_are_not_believed(void **state)
{
	struct window_ledger *l = a->win->wl;
	uint32_t f;

	l->pins_off = l->mag_off = l->bitmap_off = UINT64_MAX / 2;
	l->mag_entries = 1;
	l->max_frames = 0;
	mm_refill(a->win, 8);
	assert_int_equal(mr_pop(a, &f, 1), 1);
	assert_int_equal(frame_pins(pool, f), 0);
}

static void frames_of_unmapped_extents_are_not_handed_out(void **state)
{
	struct rig_client *b;
	struct errmsg e;
	uint32_t f;

	b = mr_client(&rig, 1, KVMM_RW);
	mr_attach(b, "window", PAGE);
	assert_int_equal(mm_win_open(b->mc, b->space, 0, 0, 0, &b->win, &e), 0);
	mm_refill(b->win, 1);
	assert_int_equal(mr_pop(b, &f, 1), 0);
	mr_sync(b);
	mr_run(&rig);
	assert_int_equal(mr_pop(b, &f, 1), 1);
}

static void frames_must_be_mapped_by_every_member(void **state)
{
	struct rig_client *m[2];
	struct errmsg e;
	uint32_t f, i;

	for (i = 0; i < 2; i++) {
		m[i] = mr_client(&rig, 1 + i, KVMM_RW);
		mr_join(m[i], 9, i, 2, 0);
		mr_attach(m[i], "window", PAGE);
		assert_int_equal(mm_win_open(m[i]->mc, m[i]->space, 0, 0, 0,
					     &m[i]->win, &e), 0);
	}
	mr_sync(m[0]);
	mm_refill(m[0]->win, 1);
	assert_int_equal(mr_pop(m[0], &f, 1), 0);
	mr_sync(m[1]);
	mr_run(&rig);
	assert_int_equal(mr_pop(m[0], &f, 1), 1);
}

static void unmapped_free_frames_do_not_make_the_pool_grow(void **state)
{
	struct rig_client *b;
	struct errmsg e;
	uint64_t used = rig.host->used;
	int i;

	b = mr_client(&rig, 1, KVMM_RW);
	mr_attach(b, "window", PAGE);
	assert_int_equal(mm_win_open(b->mc, b->space, 0, 0, 0, &b->win, &e), 0);
	mm_refill(b->win, 8);
	for (i = 0; i < 20; i++) {
		rig.mm->next_pools_ns = 0;
		mr_run(&rig);
	}
	mr_settle(&rig);
	assert_int_equal(rig.host->used, used);
}

static void freed_frame_waits_for_its_step(void **state)
{
	uint32_t f;

	mr_alloc(a, &f, 1);
	assert_int_equal(mm_free(a->win, &f, 1, 5), 0);
	assert_int_equal(state_of(f), FRAME_OPEN);
	assert_int_equal(mm_free(a->win, &f, 1, 5), -EINVAL);
	mr_step(a, 4);
	assert_int_equal(state_of(f), FRAME_OPEN);
	mr_step(a, 5);
	assert_int_equal(state_of(f), FRAME_FREE);
}

static void freeing_what_is_not_ones_own_frees_nothing(void **state)
{
	struct rig_client *b = second(KVMM_RW);
	uint32_t f[3];

	mr_alloc(a, f, 1);
	mr_alloc(b, f + 1, 1);
	f[2] = f[0];
	assert_int_equal(mm_free(a->win, f, 2, 0), -EINVAL);
	assert_int_equal(state_of(f[0]), FRAME_OPEN);
	/* the same twice */
	f[1] = f[0];
	assert_int_equal(mm_free(a->win, f, 2, 0), -EINVAL);
	assert_int_equal(state_of(f[0]), FRAME_OPEN);
	f[0] = 0;
	assert_int_equal(mm_free(a->win, f, 1, 0), -EINVAL);
	f[0] = UINT32_MAX;
	assert_int_equal(mm_free(a->win, f, 1, 0), -EINVAL);
}

static void closed_window_gives_its_frames_back(void **state)
{
	uint32_t f[8];

	mr_alloc(a, f, 8);
	assert_true(pool->nr_open >= 8);
	mm_win_close(a->win);
	assert_int_equal(pool->nr_open, 0);
	assert_null(mm_win_get(a->mc, 0));
	assert_true(list_empty(&pool->windows));
}

static void pins_of_a_closed_window_still_count(void **state)
{
	struct mm_win *w = a->win;
	uint32_t f;

	mr_put(a, 1, 0, 1);
	f = copy_at(mr_page(a, 1, 0), 0)->frame;
	mr_pin(a, f, 1);
	mm_win_close(w);
	assert_null(mm_win_get(a->mc, 0));
	assert_int_equal(frame_pins(pool, f), 1);
	mr_exit(a);
	assert_int_equal(frame_pins(pool, f), 0);
}

static bool no_windows(void *arg)
{
	return list_empty(&pool->windows);
}

static bool no_spaces(void *arg)
{
	return list_empty(&rig.mm->spaces);
}

/* The rig's own and one more. */
static bool only_two_windows(void *arg)
{
	return pool->windows.next->next->next == &pool->windows;
}

static void closed_window_ends_with_the_last_frame_to_be_freed(void **state)
{
	uint32_t f[2];
	int i;

	mr_alloc(a, f, 2);
	assert_int_equal(mm_free(a->win, &f[0], 1, 4), 0);
	assert_int_equal(mm_free(a->win, &f[1], 1, 5), 0);
	mm_win_close(a->win);
	assert_int_equal(pool->nr_open, 2);
	mr_step(a, 4);
	for (i = 0; i < 10; i++)
		mr_run(&rig);
	assert_false(no_windows(NULL));
	mr_step(a, 5);
	mr_until(&rig, no_windows, NULL);
	assert_int_equal(pool->nr_open, 0);
}

static void closed_window_ends_with_its_last_pin(void **state)
{
	struct mm_win *w = a->win;
	uint32_t f, g;
	int i;

	mr_put(a, 1, 0, 2);
	f = copy_at(mr_page(a, 1, 0), 0)->frame;
	g = copy_at(mr_page(a, 1, 1), 0)->frame;
	mr_pin(a, f, 1);
	mr_pin(a, g, 2);
	mm_win_close(w);
	atomic_fetch_sub(&w->pins[g], 2);
	for (i = 0; i < 10; i++) {
		rig.mm->next_closed_ns = 0;
		mr_run(&rig);
	}
	assert_int_equal(frame_pins(pool, f), 1);
	atomic_fetch_sub(&w->pins[f], 1);
	mr_until(&rig, no_windows, NULL);
}

/* Nothing of a client that closed and left all it had keeps its space. */
static void space_ends_with_what_was_left_of_its_windows(void **state)
{
	uint32_t f;

	mr_alloc(a, &f, 1);
	assert_int_equal(mm_free(a->win, &f, 1, 5), 0);
	mm_win_close(a->win);
	mm_detach(a->mc, a->space);
	mr_step(a, 5);
	mr_until(&rig, no_spaces, NULL);
}

/* What other windows of its engine still do with its frames, ends first. */
static void closed_window_waits_for_a_publish_of_its_frame(void **state)
{
	struct rig_client *m[2];
	struct ring_pub p;
	uint32_t f, i;

	for (i = 0; i < 2; i++) {
		m[i] = mr_client(&rig, 1 + i, KVMM_RW);
		mr_join(m[i], 9, i, 2, 0);
		mr_attach(m[i], "window", PAGE);
		mr_win(m[i], 0);
	}
	mr_alloc(m[0], &f, 1);
	p = mr_pub(1, 0, f);
	p.after = 1;
	assert_null(mr_publish(m[1], &p, 1, 5));
	mm_win_close(m[0]->win);
	m[0]->win = NULL;
	/* it fails, and nobody has the frame in his hands any more */
	mm_cancel(m[1]->mc, 5);
	assert_int_equal(mr_answer(&rig, 5)->res[0].result, -ECANCELED);
	mr_until(&rig, only_two_windows, NULL);
	assert_int_equal(state_of(f), FRAME_FREE);
}

static void closing_waits_for_answers_on_their_way(void **state)
{
	struct ring_pub p;
	uint32_t f;

	mr_alloc(a, &f, 1);
	p = mr_pub(1, 0, f);
	p.after = 1;
	assert_null(mr_publish(a, &p, 1, 5));
	mm_win_close(a->win);
	mr_step(a, 1);
	assert_int_equal(mr_answer(&rig, 5)->res[0].result, 0);
	assert_false(list_empty(&pool->windows));
	mr_take(&rig, 5);
	assert_true(list_empty(&pool->windows));
}

static void sync_tells_each_extent_once_and_in_parts(void **state)
{
	struct mm_extent_change ch[3];
	struct rig_client *b;
	unsigned int n, skip = 0, told = 0;
	uint64_t seq, again;
	struct errmsg e;
	uint32_t f[100];

	mr_alloc(a, f, 100);	/* several extents */
	assert_true(pool->nr_extents > 1);
	b = mr_client(&rig, 1, KVMM_RO);
	mr_attach(b, "window", PAGE);
	assert_int_equal(mm_win_open(b->mc, b->space, 0, 0, 0, &b->win, &e), 0);
	do {
		n = mm_win_sync(b->win, 0, skip, ch, 1, &seq);
		told += n;
		skip += n;
		if (n) {
			assert_true(ch[0].up);
			assert_true(ch[0].fd >= 0);
		}
	} while (n);
	assert_int_equal(told, pool->nr_extents);
	assert_int_equal(mm_win_sync(b->win, seq, 0, ch, 3, &again), 0);
	assert_int_equal(again, seq);
}

/* All descriptors that this process may have, but one. */
struct hog {
	struct rlimit	rl;
	int		fd[256];
	unsigned int	n;
};

static void hog_begin(struct hog *h)
{
	struct rlimit rl;

	assert_int_equal(getrlimit(RLIMIT_NOFILE, &h->rl), 0);
	rl = h->rl;
	rl.rlim_cur = min(rl.rlim_cur, (rlim_t)ARRAY_SIZE(h->fd));
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &rl), 0);
	while ((h->fd[h->n] = dup(rig.hdr_shm.fd)) >= 0)
		h->n++;
	close(h->fd[--h->n]);
}

static void hog_end(struct hog *h)
{
	while (h->n)
		close(h->fd[--h->n]);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &h->rl), 0);
}

/* An extent that was told before descriptors ran out is told to go, too. */
static void extents_told_before_descriptors_ran_out_are_held(void **state)
{
	struct mm_extent_change ch[8];
	struct rig_client *b;
	struct hog hog = { .n = 0 };
	struct mm_extent *x;
	unsigned int n;
	struct errmsg e;
	uint32_t f[100];
	uint64_t seq;

	mr_alloc(a, f, 100);	/* several extents */
	assert_true(pool->nr_extents > 1);
	b = mr_client(&rig, 1, KVMM_RO);
	mr_attach(b, "window", PAGE);
	assert_int_equal(mm_win_open(b->mc, b->space, 0, 0, 0, &b->win, &e), 0);
	hog_begin(&hog);
	n = mm_win_sync(b->win, 0, 0, ch, 8, &seq);
	hog_end(&hog);
	assert_int_equal(n, 1);
	assert_int_equal(seq, 0);
	x = &pool->extent[ch[0].no];
	bitmap_shared_set(b->win->bitmap, x->no);

	/* all of it is freed and goes */
	assert_int_equal(mm_free(a->win, f, 100, 0), 0);
	mm_win_close(a->win);
	extent_down(pool, x->no);
	assert_non_null(x->ext);
	assert_true(win_holds(b->win, x));
	/* it hears of it with the rest, and then the number is free */
	n = mm_win_sync(b->win, 0, 0, ch, 8, &seq);
	assert_int_equal(ch[0].no, x->no);
	assert_false(ch[0].up);
	bitmap_shared_clear(b->win->bitmap, x->no);
	mm_win_sync(b->win, seq, 0, ch, 8, &seq);
	rig.mm->next_pools_ns = 0;
	mr_run(&rig);
	assert_null(x->ext);
}

static void reserve_is_a_right_within_what_there_is(void **state)
{
	struct rig_client *b = second(KVMM_RW);
	uint32_t all = rig.host->capacity / pool->stride;
	struct errmsg e;

	assert_int_equal(mm_reserve(a->mc, a->space, 0, 0, all / 2, &e), 0);
	assert_int_equal(mm_reserve(b->mc, b->space, 0, 0, all, &e), -ENOSPC);
	assert_non_null(strstr(e.text, "1000"));
	assert_int_equal(mm_reserve(a->mc, a->space, 0, 0, 0, &e), 0);
	assert_int_equal(mm_reserve(b->mc, b->space, 0, 0, all / 2, &e), 0);
	assert_int_equal(mm_reserve(b->mc, b->space, 1, 0, 1, &e), -EINVAL);
}

/* By closing, by hanging up, by a member's death: nobody can use it any more. */
static void reserve_ends_with_what_could_use_it(void **state)
{
	struct rig_client *b = second(KVMM_RW), *c, *m[2];
	uint32_t all = rig.host->capacity / pool->stride - pool->reserve;
	struct errmsg e;
	uint32_t f, i;

	/* a pin keeps the window in the list */
	mr_put(a, 1, 0, 1);
	f = copy_at(mr_page(a, 1, 0), 0)->frame;
	assert_int_equal(mm_reserve(a->mc, a->space, 0, 0, all, &e), 0);
	mr_pin(a, f, 1);
	mm_win_close(a->win);
	assert_int_equal(mm_reserve(b->mc, b->space, 0, 0, all, &e), 0);

	mm_client_disconnect(b->mc);
	c = mr_client(&rig, 2, KVMM_RW);
	mr_attach(c, "window", PAGE);
	mr_win(c, 0);
	assert_int_equal(mm_reserve(c->mc, c->space, 0, 0, all, &e), 0);
	assert_int_equal(mm_reserve(c->mc, c->space, 0, 0, 0, &e), 0);

	for (i = 0; i < 2; i++) {
		m[i] = mr_client(&rig, 3 + i, KVMM_RW);
		mr_join(m[i], 9, i, 2, 0);
		mr_attach(m[i], "window", PAGE);
		mr_win(m[i], 0);
	}
	assert_int_equal(mm_reserve(m[0]->mc, m[0]->space, 0, 0, all, &e), 0);
	mr_exit(m[1]);
	assert_int_equal(mm_reserve(c->mc, c->space, 0, 0, all, &e), 0);
	assert_int_equal(mm_reserve(m[0]->mc, m[0]->space, 0, 0, 1, &e),
			 -EOWNERDEAD);
}

static void reserved_frames_are_not_given_to_others(void **state)
{
	struct rig_client *b = second(KVMM_RW);
	uint32_t all = rig.host->capacity / pool->stride;
	uint32_t f[1024], n = 0;
	struct errmsg e;
	int i;

	assert_int_equal(mm_reserve(a->mc, a->space, 0, 0, all / 2, &e), 0);
	for (i = 0; i < 100; i++) {
		mm_refill(b->win, 64);
		mr_settle(&rig);
		mr_sync(b);
		n += mr_pop(b, f + n, ARRAY_SIZE(f) - n);
	}
	assert_true(n <= all - all / 2);
	mr_alloc(a, f, 100);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(wrong_windows_are_refused),
		T(refill_gives_the_want_in_open_frames_of_ones_own),
		T(refill_counts_what_the_magazine_holds),
		T(want_that_cannot_be_met_waits_and_wakes),
		T(idle_magazines_leave_frames_to_the_others),
		T(a_client_alone_has_a_small_stock_of_a_small_node),
		T(a_refused_want_is_no_stock),
		T(lying_magazine_head_costs_the_client_its_connection),
		T(offsets_in_the_ledger_are_not_believed),
		T(frames_of_unmapped_extents_are_not_handed_out),
		T(frames_must_be_mapped_by_every_member),
		T(unmapped_free_frames_do_not_make_the_pool_grow),
		T(freed_frame_waits_for_its_step),
		T(freeing_what_is_not_ones_own_frees_nothing),
		T(closed_window_gives_its_frames_back),
		T(pins_of_a_closed_window_still_count),
		T(closed_window_ends_with_the_last_frame_to_be_freed),
		T(closed_window_ends_with_its_last_pin),
		T(space_ends_with_what_was_left_of_its_windows),
		T(closed_window_waits_for_a_publish_of_its_frame),
		T(closing_waits_for_answers_on_their_way),
		T(sync_tells_each_extent_once_and_in_parts),
		T(extents_told_before_descriptors_ran_out_are_held),
		T(reserve_is_a_right_within_what_there_is),
		T(reserve_ends_with_what_could_use_it),
		T(reserved_frames_are_not_given_to_others),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
