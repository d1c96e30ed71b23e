/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A memory manager dies at every place where something is half done, and the next
 * one takes over: what was sealed is found, what was pinned is as it was, what was
 * held is held, what was nobody's is free, and every law holds.
 */
#include "tests/lib/adopt_story.h"

/* -- what must be there --------------------------------------------------------- */

static void check_pages(struct rig_client *a)
{
	struct mm_pool *p = a->win->pool;
	uint32_t i;

	for (i = 0; i < story->sealed; i++) {
		struct page *pg = page_of(a->space, 1, i);
		uint32_t f = story->frame[i];

		/* pinned, whatever became of it: nobody else writes there */
		assert_true(good(p, f, 1, i));
		assert_true(frame_pins(p, f) >= 1);
		assert_true(frame_word_state(frame_word_of(p, f)) != FRAME_FREE);
		if (i == CHAIN - 1 && story->bad != NOT_YET) {
			if (story->bad == DONE)
				assert_null(pg);
			continue;
		}
		assert_non_null(pg);
		assert_int_equal(copy_at(pg, 0)->frame, f);
		assert_int_equal(frame_word_of(p, f), story->word[i]);
		assert_true(!i || pg->parent == page_of(a->space, 1, i - 1));
	}
}

static void check_frames(struct rig_client *a)
{
	struct mm_pool *p = a->win->pool;
	uint32_t i;

	for (i = 0; i < story->nr_open; i++) {
		if ((i == 0 && story->free_now != NOT_YET) ||
		    (i == 1 && story->free_later == BEGUN))
			continue;
		assert_true(open_of(p, story->open[i], a->win));
	}
	if (story->free_now == DONE)
		assert_false(p->meta[story->open[0]].owner == a->win->engine &&
			     p->meta[story->open[0]].flags);
	if (story->free_later == DONE) {
		assert_true(p->meta[story->open[1]].flags & FMETA_FREE);
		mr_step(a, 5);
		assert_false(open_of(p, story->open[1], a->win));
	}
}

static void check_other(struct rig *r)
{
	struct rig_client *b = &r->client[1];
	uint32_t i;

	if (!b->mc)
		return;
	b = ar_client(r, 1);
	if (b->win && story->closed == NOT_YET)
		for (i = 0; i < story->nr_other; i++)
			assert_true(open_of(b->win->pool, story->other[i],
					    b->win));
}

static void adopt_and_check(unsigned int nth)
{
	static struct rig r;
	struct rig_client *a;

	ar_open(&r, &(struct rig_opts){ .bytes = 1 << 20 });
	if (getenv("V"))
		print_message("point %u\n", nth);
	if (ar_said[0])
		fail_msg("point %u: given up: %s", nth, ar_said);
	mr_check(&r);
	if (r.client[0].mc) {
		assert_true(r.client[0].whole);
		a = ar_client(&r, 0);
		if (a->win) {
			check_pages(a);
			check_frames(a);
			check_other(&r);
			check_alloc(a);
			mr_check(&r);
		} else {
			assert_int_equal(story->sealed, 0);
		}
	} else {
		assert_int_equal(story->sealed, 0);
	}
	check_end(&r);
	mr_close(&r);
	/* what was not taken is what park_done() would close */
	ar_empty();
}

static void all_is_found_wherever_it_died(void **state)
{
	unsigned int nth;
	bool died = true;

	for (nth = 1; died; nth++) {
		memset(story, 0, sizeof(*story));
		died = ar_die(live, story, nth);
		adopt_and_check(nth);
	}
	print_message("%u places to die at\n", nth - 2);
	assert_true(nth > 70);
	assert_int_equal(fd_count(), fds_before);
}

/* -- frames on their way back ------------------------------------------------------ */

#define BACK	16u

/**
 * struct backs - two lots of frames that are given back
 * @begun, @taken: of each lot; whether it need not be said again
 */
struct backs {
	uint32_t	frame[2 * BACK];
	bool		begun[2], taken[2];
	bool		had;
};

static void take_note(void *arg)
{
	*(bool *)arg = true;
}

static void live_giving_back(void *shm)
{
	struct rig_opts o = { .bytes = 1 << 20 };
	struct backs *b = shm;
	struct rig_client *a;
	unsigned int i;

	ar_open(&first, &o);
	a = mr_client(&first, 0, KVMM_RW);
	mr_attach(a, "a", PAGE);
	mr_win(a, 0);
	mr_alloc(a, b->frame, 2 * BACK);
	b->had = true;
	/* now, and after a step */
	for (i = 0; i < 2; i++) {
		b->begun[i] = true;
		assert_int_equal(mm_free_told(a->win, b->frame + i * BACK, BACK,
					      i ? 5 : 0, take_note,
					      &b->taken[i]), 0);
	}
}

/* What was not taken is said again, as a ring that was found does. */
static void say_again(struct rig_client *a, const struct backs *b)
{
	unsigned int i, k;

	for (i = 0; i < 2; i++)
		for (k = 0; b->begun[i] && !b->taken[i] && k < BACK; k++)
			mm_free(a->win, b->frame + i * BACK + k, 1, i ? 5 : 0);
}

static void frames_given_back_stay_with_nobody(void **state)
{
	struct backs *b = mmap(NULL, sizeof(*b), PROT_READ | PROT_WRITE,
			       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	static struct rig r;
	struct rig_client *a;
	unsigned int nth, i;
	bool died = true;

	assert_true(b != MAP_FAILED);
	for (nth = 1; died; nth++) {
		memset(b, 0, sizeof(*b));
		died = ar_die(live_giving_back, b, nth);
		ar_open(&r, &(struct rig_opts){ .bytes = 1 << 20 });
		a = b->had ? ar_client(&r, 0) : NULL;
		if (a) {
			say_again(a, b);
			mr_step(a, 5);
			mr_run(&r);
			for (i = 0; i < 2 * BACK; i++)
				if (b->begun[i / BACK])
					assert_null(a->win->pool->
						    meta[b->frame[i]].win);
			mr_check(&r);
		}
		if (r.client[0].mc)
			mr_exit(&r.client[0]);
		mr_settle(&r);
		mr_close(&r);
		ar_empty();
	}
	munmap(b, sizeof(*b));
	assert_int_equal(fd_count(), fds_before);
}

/* The second one dies while it adopts, or soon after. */
static void live_again(void *shm)
{
	static struct rig r;

	ar_open(&r, &(struct rig_opts){ .bytes = 1 << 20 });
	mr_run(&r);
}

static void dying_again_loses_nothing_more(void **state)
{
	unsigned int nth;
	bool died = true;

	for (nth = 1; died; nth++) {
		memset(story, 0, sizeof(*story));
		assert_false(ar_die(live, story, UINT32_MAX));
		story->exited = DONE;
		died = ar_die(live_again, story, nth);
		adopt_and_check(nth);
	}
	assert_int_equal(fd_count(), fds_before);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		STORY_TEST(all_is_found_wherever_it_died),
		STORY_TEST(frames_given_back_stay_with_nobody),
		STORY_TEST(dying_again_loses_nothing_more),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
