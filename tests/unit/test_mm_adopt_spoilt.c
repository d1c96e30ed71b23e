/* SPDX-License-Identifier: Apache-2.0 */
/* What a memory manager left is not as it should be: the next takes the rest. */
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/rand.h"
#include "tests/lib/adopt_story.h"

static struct mm_pool *only_pool(struct rig *r)
{
	return list_first(&r->mm->node[0].pools, struct mm_pool, node_link);
}

static void open_second(struct rig *r)
{
	ar_open(r, &(struct rig_opts){ .bytes = 1 << 20 });
	mr_check(r);
}

static void close_second(struct rig *r)
{
	unsigned int i;

	for (i = 0; i < 2; i++)
		if (r->client[i].mc)
			mr_exit(&r->client[i]);
	mr_settle(r);
	mr_close(r);
	ar_empty();
	assert_int_equal(fd_count(), fds_before);
}

/* Bytes of a kept file, mapped. */
static void *map(const char *name)
{
	int fd = ar_find(name);
	off_t n;
	void *p;

	assert_true(fd >= 0);
	n = lseek(fd, 0, SEEK_END);
	p = mmap(NULL, (size_t)n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_true(p != MAP_FAILED);
	return p;
}

static struct frame_record *records(void)
{
	struct keep_pool *h = map("record.0.0.0");

	return (struct frame_record *)((char *)h + h->record_off);
}

static void bad_record_costs_its_page_and_what_hangs_on_it(void **state)
{
	static struct rig r;
	struct rig_client *a;
	uint32_t i;

	leave(live, story);
	records()[story->frame[2]].cost_us ^= 1;
	open_second(&r);
	a = ar_client(&r, 0);
	assert_string_equal(ar_said, "");
	for (i = 0; i < CHAIN; i++) {
		/* pinned all the same */
		assert_true(good(a->win->pool, story->frame[i], 1, i));
		if (i < 2)
			assert_non_null(page_of(a->space, 1, i));
		else
			assert_null(page_of(a->space, 1, i));
	}
	check_alloc(a);
	/* until the last unpin */
	for (i = 0; i < CHAIN; i++)
		mr_pin(a, story->frame[i], -1);
	mr_until(&r, nobody_waits, &r);
	mr_check(&r);
	close_second(&r);
}

static void lost_ledger_costs_its_pool(void **state)
{
	static struct rig r;
	struct frame_table *t;
	uint32_t i;

	leave(live, story);
	t = map("table.0.0.0");
	ar_lose("win.0");
	open_second(&r);
	assert_true(strstr(ar_said, "ledger of window 0"));
	assert_true(strstr(ar_said, "cannot be adopted"));
	assert_non_null(r.client[0].mc);
	assert_false(r.client[0].whole);
	assert_int_equal(r.adopted.frames, 0);
	/* who still looks there sees nothing, and generations stay */
	for (i = 0; i < CHAIN; i++)
		assert_int_equal(atomic_load(&t->word[story->frame[i]]),
				 frame_word(frame_word_gen(story->word[i]),
					    FRAME_FREE));
	assert_false(only_pool(&r)->adopted);
	close_second(&r);
}

static void lost_extent_costs_what_is_in_it(void **state)
{
	static struct rig r;
	struct frame_table *t;
	uint32_t i, no;
	char name[64];

	leave(live, story);
	t = map("table.0.0.0");
	no = story->frame[0] / t->frames_per_extent;
	snprintf(name, sizeof(name), "extent.0.0.0.%u", no);
	ar_lose(name);
	open_second(&r);
	assert_true(strstr(ar_said, "nobody kept it"));
	assert_true(only_pool(&r)->extent[no].lost);
	for (i = 0; i < CHAIN; i++)
		assert_null(page_of(list_first(&r.mm->spaces, struct mm_space,
					       link), 1, i));
	/* a client that reads on there keeps the number for itself */
	assert_false(r.client[0].whole);
	ar_client(&r, 0);
	r.client[0].have_seq = 0;
	mr_alloc(&r.client[0], &i, 1);
	assert_int_not_equal(i / t->frames_per_extent, no);
	mr_check(&r);
	close_second(&r);
}

/* A window that may write stays what it is, so its client must begin anew. */
static void who_may_write_no_more_is_not_whole(void **state)
{
	static struct rig r;

	leave(live, story);
	open_second(&r);
	assert_true(r.client[0].whole);
	close_second(&r);
	leave(live, story);
	ar_read_only = true;
	open_second(&r);
	ar_read_only = false;
	assert_false(r.client[0].whole);
	close_second(&r);
}

/* The state has places for very many windows, and few of them are ever used. */
static void looking_at_the_state_does_not_fill_it(void **state)
{
	struct rig r;
	struct stat was, is;
	int fd;

	leave(live, story);
	fd = ar_find("mm");
	assert_int_equal(fstat(fd, &was), 0);
	open_second(&r);
	assert_int_equal(fstat(r.mm->keep->shm.fd, &is), 0);
	assert_int_equal(is.st_ino, was.st_ino);
	/* 512 bytes each; the places of clients are few */
	assert_true(is.st_blocks <= was.st_blocks + 1024);
	close_second(&r);
}

static void torn_state_is_an_empty_start(void **state)
{
	static struct rig r;
	struct keep_state *st;

	leave(live, story);
	st = map("mm");
	st->nr_wins--;
	open_second(&r);
	assert_true(strstr(ar_said, "nothing is adopted"));
	assert_null(r.client[0].mc);
	assert_true(list_empty(&r.mm->spaces));
	close_second(&r);
}

static void torn_client_costs_its_pools_and_no_other(void **state)
{
	static struct rig r;
	struct keep k = { .shm = SHM_INIT };

	leave(live, story);
	k.shm.addr = map("mm");
	keep_state_map(&k);
	k.client[0][0].tag.crc ^= 1;
	k.client[0][1].tag.crc ^= 1;
	open_second(&r);
	assert_true(strstr(ar_said, "client record 0 is torn"));
	assert_null(r.client[0].mc);
	assert_int_equal(r.adopted.spaces, 1);
	close_second(&r);
}

/* Any bytes anywhere: an answer, never a crash, and laws that hold. */
static void random_bytes_are_survived(void **state)
{
	unsigned int rounds = test_long() ? 600 : 60, n, k;
	static struct rig r;
	struct rng rng;

	rng_seed(&rng, test_seed());
	for (n = 0; n < rounds; n++) {
		leave(live, story);
		for (k = 0; k < 1 + rng_below(&rng, 4); k++) {
			unsigned int at = (unsigned int)rng_below(&rng,
								  ar_store.n);
			uint8_t *p = map(ar_store.e[at].name);
			uint64_t bytes = (uint64_t)lseek(ar_store.e[at].fd, 0,
							 SEEK_END);
			uint64_t i, to = rng_below(&rng, min(bytes, 65536ul));

			for (i = 0; i < 1 + rng_below(&rng, 64); i++)
				p[(to + i) % bytes] ^=
					(uint8_t)rng_below(&rng, 256);
			munmap(p, bytes);
		}
		ar_open(&r, &(struct rig_opts){ .bytes = 1 << 20 });
		mr_check(&r);
		for (k = 0; k < 5; k++)
			mr_run(&r);
		for (k = 0; k < 2; k++)
			if (r.client[k].mc)
				mr_exit(&r.client[k]);
		mr_settle(&r);
		mr_check(&r);
		mr_close(&r);
		ar_empty();
	}
	assert_int_equal(fd_count(), fds_before);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		STORY_TEST(bad_record_costs_its_page_and_what_hangs_on_it),
		STORY_TEST(lost_ledger_costs_its_pool),
		STORY_TEST(lost_extent_costs_what_is_in_it),
		STORY_TEST(who_may_write_no_more_is_not_whole),
		STORY_TEST(looking_at_the_state_does_not_fill_it),
		STORY_TEST(torn_state_is_an_empty_start),
		STORY_TEST(torn_client_costs_its_pools_and_no_other),
		STORY_TEST(random_bytes_are_survived),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
