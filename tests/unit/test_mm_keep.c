/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is found is what its record means, or nobody kept it; and what was lost
 * once is known to be lost by every later daemon, as long as that can hurt.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/mm/keep.h"
#include "ipc/base/fd.h"
#include "tests/lib/adopt_rig.h"
#include "tests/lib/unit.h"

#define PAGE	4096u
#define CHAIN	6u
#define HELD	3u

struct story {
	uint32_t	frame[CHAIN];
	uint32_t	open[HELD];
	uint32_t	per_extent;
};

static struct story *story;
static int fds_before;
static const struct rig_opts opts = { .bytes = 1 << 20 };

/* A chain of pages, all pinned, and frames that it is writing to. */
static void live_one(struct rig *r)
{
	struct rig_client *c;
	uint32_t i;

	ar_open(r, &opts);
	c = mr_client(r, 0, KVMM_RW);
	mr_attach(c, "a", PAGE);
	mr_win(c, 0);
	mr_put(c, 1, 0, CHAIN);
	for (i = 0; i < CHAIN; i++) {
		story->frame[i] = copy_at(mr_page(c, 1, i), 0)->frame;
		mr_pin(c, story->frame[i], 1);
	}
	mr_alloc(c, story->open, HELD);
	story->per_extent = c->win->pool->per_extent;
}

static void live(void *shm)
{
	static struct rig r;

	live_one(&r);
}

/* Adopts, and dies at once: its client has not come again. */
static void live_on(void *shm)
{
	static struct rig r;

	ar_open(&r, &opts);
	mr_run(&r);
}

static void leave(void (*fn)(void *shm))
{
	assert_false(ar_die(fn, NULL, UINT32_MAX));
}

static struct mm_pool *only_pool(struct rig *r)
{
	return list_first(&r->mm->node[0].pools, struct mm_pool, node_link);
}

static void all_go(struct rig *r)
{
	unsigned int i;

	mr_check(r);
	for (i = 0; i < RIG_CLIENTS; i++)
		if (r->client[i].mc)
			mr_exit(&r->client[i]);
	mr_settle(r);
	mr_check(r);
	mr_close(r);
	ar_empty();
	assert_int_equal(fd_count(), fds_before);
}

static void extent_name(char name[64])
{
	snprintf(name, 64, "extent.0.0.0.%u",
		 story->frame[0] / story->per_extent);
}

/* -- a name stands for other memory ------------------------------------------------ */

static void other_memory_is_not_believed(const char *name, const char *why)
{
	static struct rig r;

	leave(live);
	ar_swap(name);
	ar_open(&r, &opts);
	if (!strstr(ar_said, why))
		fail_msg("%s: said only: %s", name, ar_said);
	assert_int_equal(r.adopted.frames, 0);
	/* pins are there, or it has nothing that they could be of */
	assert_non_null(r.client[0].mc);
	assert_false(r.client[0].whole);
	all_go(&r);
}

static void an_extent_of_before_is_not_adopted(void **state)
{
	char name[64];

	memset(story, 0, sizeof(*story));
	leave(live);
	extent_name(name);
	ar_empty();
	other_memory_is_not_believed(name, "another one was kept");
}

static void a_ledger_of_before_spoils_its_pool(void **state)
{
	other_memory_is_not_believed("win.0", "is another one's");
}

static void a_table_of_before_is_not_adopted(void **state)
{
	other_memory_is_not_believed("table.0.0.0", "frame table is another one");
}

static void records_of_before_are_not_adopted(void **state)
{
	/* of a space that was made anew: they speak of the table of then */
	static struct rig r;
	struct keep_pool *h;

	leave(live);
	h = ar_map("record.0.0.0");
	keep_pool_of(h, (struct keep_id){ .dev = h->table.dev, .ino = 1 });
	munmap(h, 4096);
	ar_open(&r, &opts);
	assert_true(strstr(ar_said, "frame table is another one"));
	assert_int_equal(r.adopted.pools, 0);
	assert_false(r.client[0].whole);
	all_go(&r);
}

static void a_space_of_before_is_not_adopted(void **state)
{
	other_memory_is_not_believed("space.0", "space 0 is another one");
}

static void a_pool_of_another_state_is_not_adopted(void **state)
{
	static struct rig r;
	struct keep_pool *h;

	leave(live);
	h = ar_map("record.0.0.0");
	h->state.ino++;
	h->crc = keep_pool_crc(h);
	munmap(h, 4096);
	ar_open(&r, &opts);
	assert_true(strstr(ar_said, "another state"));
	assert_int_equal(r.adopted.pools, 0);
	all_go(&r);
}

static void a_window_that_does_not_fit_spoils_its_pool(void **state)
{
	struct keep k = { .shm = SHM_INIT };
	static struct rig r;
	struct keep_win kw;

	leave(live);
	k.shm.addr = ar_map("mm");
	keep_state_map(&k);
	/* as good as any, but of another table than the pool that it names */
	kw = *(const struct keep_win *)keep_get2(k.win[0], sizeof(kw));
	kw.table_ino++;
	keep_put2(k.win[0], &kw, sizeof(kw));
	munmap(k.shm.addr, keep_state_bytes());
	ar_open(&r, &opts);
	assert_true(strstr(ar_said, "another frame table"));
	assert_int_equal(r.adopted.pools, 0);
	assert_int_equal(r.adopted.windows, 0);
	assert_false(r.client[0].whole);
	all_go(&r);
}

static void a_lost_state_is_said(void **state)
{
	static struct rig r;

	leave(live);
	ar_lose("mm");
	ar_open(&r, &opts);
	assert_true(strstr(ar_said, "nobody kept the state"));
	assert_true(list_empty(&r.mm->spaces));
	all_go(&r);
}

/* -- what was lost stays lost -------------------------------------------------------- */

static void lost_is_lost_for_later_ones_too(void **state)
{
	static struct rig r;
	char name[64];
	uint32_t f, no;

	leave(live);
	extent_name(name);
	no = story->frame[0] / story->per_extent;
	ar_lose(name);
	/* the next one dies before its client has come again, and so does its heir */
	leave(live_on);
	leave(live_on);
	ar_said[0] = '\0';
	ar_open(&r, &opts);
	/* known already: nothing that would be said again at each start */
	assert_string_equal(ar_said, "");
	assert_false(r.client[0].whole);
	assert_true(only_pool(&r)->extent[no].lost);
	/* what the client has mapped there is nobody's */
	ar_client(&r, 0);
	r.client[0].have_seq = 0;
	mr_alloc(&r.client[0], &f, 1);
	assert_int_not_equal(f / story->per_extent, no);
	all_go(&r);
}

/* Wherever the one that finds it lost dies. */
static void lost_is_lost_wherever_it_died(void **state)
{
	static struct rig r;
	unsigned int nth;
	bool died = true;
	char name[64];

	for (nth = 1; died; nth++) {
		leave(live);
		extent_name(name);
		ar_lose(name);
		died = ar_die(live_on, NULL, nth);
		ar_open(&r, &opts);
		assert_false(r.client[0].whole);
		all_go(&r);
	}
	assert_true(nth > 3);
}

static void live_until_it_exits(void *shm)
{
	static struct rig r;

	ar_open(&r, &opts);
	mr_exit(&r.client[0]);
	mr_settle(&r);
}

static void a_number_is_free_when_nobody_has_it_mapped(void **state)
{
	static struct rig r;
	char name[64];
	uint32_t no;

	leave(live);
	extent_name(name);
	no = story->frame[0] / story->per_extent;
	ar_lose(name);
	leave(live_until_it_exits);
	ar_open(&r, &opts);
	if (!list_empty(&r.mm->node[0].pools))
		assert_false(only_pool(&r)->extent[no].lost);
	all_go(&r);
}

/* A second client came after the loss: it has nothing of what was lost. */
static void live_with_another(void *shm)
{
	static struct rig r;
	struct rig_client *b;

	ar_open(&r, &opts);
	b = mr_client(&r, 1, KVMM_RW);
	mr_attach(b, "a", PAGE);
	mr_win(b, 0);
	mr_run(&r);
}

static void who_came_later_has_lost_nothing(void **state)
{
	static struct rig r;
	char name[64];

	leave(live);
	extent_name(name);
	ar_lose(name);
	leave(live_with_another);
	ar_open(&r, &opts);
	assert_false(r.client[0].whole);
	assert_true(r.client[1].whole);
	all_go(&r);
}

/* -- engines ------------------------------------------------------------------------- */

/* Two ranks; only the second has a window on the space. */
static void live_engine(void *shm)
{
	static struct rig r;
	struct rig_client *c[2];
	unsigned int i;

	ar_open(&r, &opts);
	for (i = 0; i < 2; i++) {
		c[i] = mr_client(&r, i, KVMM_RW);
		mr_join(c[i], 9, i, 2, i ? 0 : KVMM_LEADER);
	}
	mr_attach(c[1], "a", PAGE);
	mr_win(c[1], 0);
}

static void nobody_of_an_engine_goes_on_alone(void **state)
{
	static struct rig r;

	leave(live_engine);
	ar_lose("win.0");
	ar_open(&r, &opts);
	assert_false(r.client[1].whole);
	assert_false(r.client[0].whole);
	all_go(&r);
}

static void nor_without_one_that_cannot_be_adopted(void **state)
{
	static struct rig r;

	leave(live_engine);
	ar_lose("ledger.0");
	ar_open(&r, &opts);
	assert_null(r.client[0].mc);
	assert_false(r.client[1].whole);
	all_go(&r);
}

/* -- frames of one that was evicted -------------------------------------------------- */

static void live_evicted(void *shm)
{
	static struct rig r;

	live_one(&r);
	engine_evict(r.client[0].mc->engine, "a test says so");
	mr_run(&r);
}

static void who_was_evicted_may_still_write(void **state)
{
	static struct rig r;
	struct mm_pool *p;
	uint32_t i;

	leave(live_evicted);
	ar_open(&r, &opts);
	mr_check(&r);
	p = only_pool(&r);
	for (i = 0; i < HELD; i++) {
		assert_int_equal(frame_word_state(frame_word_of(p,
						  story->open[i])), FRAME_OPEN);
		assert_ptr_equal(p->meta[story->open[i]].owner,
				 r.client[0].mc->engine);
	}
	all_go(&r);
}

static int setup(void **state)
{
	story = mmap(NULL, sizeof(*story), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	fds_before = fd_count();
	return story == MAP_FAILED;
}

static int teardown(void **state)
{
	ar_empty();
	munmap(story, sizeof(*story));
	return 0;
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(an_extent_of_before_is_not_adopted),
		TEST(a_ledger_of_before_spoils_its_pool),
		TEST(a_table_of_before_is_not_adopted),
		TEST(records_of_before_are_not_adopted),
		TEST(a_space_of_before_is_not_adopted),
		TEST(a_pool_of_another_state_is_not_adopted),
		TEST(a_window_that_does_not_fit_spoils_its_pool),
		TEST(a_lost_state_is_said),
		TEST(lost_is_lost_for_later_ones_too),
		TEST(lost_is_lost_wherever_it_died),
		TEST(a_number_is_free_when_nobody_has_it_mapped),
		TEST(who_came_later_has_lost_nothing),
		TEST(nobody_of_an_engine_goes_on_alone),
		TEST(nor_without_one_that_cannot_be_adopted),
		TEST(who_was_evicted_may_still_write),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
