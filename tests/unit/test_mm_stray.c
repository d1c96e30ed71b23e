/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames that are nobody's yet: they wait for I/O of a daemon that is dead, on
 * whatever store that is, or for their parents, in whatever order they lie.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/tier.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "kernels/kernels.h"
#include "tests/lib/adopt_rig.h"
#include "tests/lib/fake_blk.h"
#include "tests/lib/unit.h"

/* Who is dead takes nothing apart. */
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void)
{
	return 1;
}

#define PAGE	4096u
#define CHAIN	12u
#define ROUNDS	60u

/* A store, and the description that the dead one's I/O goes through. */
static int store_fd, io_fd;
static int fds_before;

static int open_again(int fd, int how)
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	fd = open(path, how | O_CLOEXEC);
	assert_true(fd >= 0);
	return fd;
}

static struct fake_blk *blk_over(int fd)
{
	struct fake_blk *b = fake_blk_create(8 << 20, 1 << 16);

	b->store_fd = open_again(fd, O_RDONLY);
	return b;
}

static int setup(void **state)
{
	fds_before = fd_count();
	store_fd = memfd_create("store", MFD_CLOEXEC);
	io_fd = open_again(store_fd, O_RDWR);
	assert_int_equal(flock(io_fd, LOCK_EX | LOCK_NB), 0);
	return 0;
}

static int teardown(void **state)
{
	ar_empty();
	close_fd(&store_fd);
	close_fd(&io_fd);
	return 0;
}

/* -- I/O of one that is dead ---------------------------------------------------- */

/* Reads are on their way when it dies. */
static void live_reading(void *shm)
{
	struct fake_blk *b = blk_over(store_fd);
	struct rig_opts o = { .bytes = 1 << 20, .lower = &b->n };
	struct ring_key key[CHAIN] = { { .group = 0 } };
	struct ring_sqe sqe = {
		.op = RING_FETCH, .n = CHAIN, .tag = 55,
		.arg = deadline_in(NSEC_PER_SEC),
	};
	static struct rig r;
	struct rig_client *c;
	uint32_t round, i;

	ar_open(&r, &o);
	c = mr_client(&r, 0, KVMM_RW);
	mr_attach(c, "a", PAGE);
	mr_win(c, 0);
	for (round = 1; round <= ROUNDS; round++) {
		mr_put(c, round, 0, CHAIN);
		for (i = 0; i < 3; i++)
			mr_run(&r);
	}
	b->hold[NODE_READ] = true;
	for (i = 0; i < CHAIN; i++)
		mr_key(key[i].key, 1, i);
	mm_fetch(c->win, &sqe, key);
	for (i = 0; i < 3; i++)
		mr_run(&r);
	assert_true(c->win->pool->nr_loading > 0);
}

/* Adopts without any store, and dies. */
static void live_without(void *shm)
{
	struct rig_opts o = { .bytes = 1 << 20 };
	static struct rig r;

	ar_open(&r, &o);
	mr_run(&r);
}

static struct mm_pool *only_pool(struct rig *r)
{
	return list_first(&r->mm->node[0].pools, struct mm_pool, node_link);
}

static void run_ms(struct rig *r, unsigned int ms)
{
	struct timespec ts = ns_to_timespec(NSEC_PER_MSEC);

	while (ms--) {
		mr_run(r);
		nanosleep(&ts, NULL);
	}
}

static bool nobody_waits(void *arg)
{
	return !((struct rig *)arg)->mm->adopt;
}

static void go(struct rig *r, struct fake_blk *b)
{
	int fd = b ? b->store_fd : -1;

	mr_until(r, nobody_waits, r);
	assert_int_equal(only_pool(r)->nr_loading, 0);
	assert_int_equal(mm_last_adopted(r->mm)->held, 0);
	mr_check(r);
	mr_exit(&r->client[0]);
	mr_settle(r);
	mr_close(r);
	close_fd(&fd);
	ar_empty();
	close_fd(&store_fd);
	close_fd(&io_fd);
	assert_int_equal(fd_count(), fds_before);
}

/* What is being read into stays so, until it is over. */
static void held_until_it_is_over(struct rig *r, struct fake_blk *b)
{
	uint32_t n = only_pool(r)->nr_loading;

	assert_true(n > 0);
	assert_int_equal(mm_last_adopted(r->mm)->held, n);
	run_ms(r, 40);
	assert_int_equal(only_pool(r)->nr_loading, n);
	close_fd(&io_fd);
	go(r, b);
}

static void open_next(struct rig *r, struct fake_blk *b)
{
	struct rig_opts o = { .bytes = 1 << 20, .lower = b ? &b->n : NULL };

	ar_open(r, &o);
	mr_check(r);
}

static void leave(void (*fn)(void *shm))
{
	assert_false(ar_die(fn, NULL, UINT32_MAX));
}

static void frames_of_old_io_wait_for_the_lock(void **state)
{
	struct fake_blk *b = fake_blk_create(8 << 20, 1 << 16);
	static struct rig r;

	leave(live_reading);
	b->n.state = NODE_STARTING;
	open_next(&r, b);
	run_ms(&r, 20);
	/* a node that cannot get it keeps them */
	b->n.state = NODE_FAILED;
	run_ms(&r, 20);
	held_until_it_is_over(&r, NULL);
}

static void also_without_that_store(void **state)
{
	static struct rig r;

	leave(live_reading);
	open_next(&r, NULL);
	held_until_it_is_over(&r, NULL);
}

static void also_with_another_one(void **state)
{
	int other = memfd_create("other", MFD_CLOEXEC), fd;
	struct fake_blk *b = blk_over(other);
	static struct rig r;

	leave(live_reading);
	fd = open_again(other, O_RDWR);
	assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
	close_fd(&other);
	open_next(&r, b);
	run_ms(&r, 20);
	assert_true(only_pool(&r)->nr_loading > 0);
	close_fd(&fd);
	held_until_it_is_over(&r, b);
}

static void also_in_the_daemon_after_the_next(void **state)
{
	static struct rig r;

	leave(live_reading);
	leave(live_without);
	leave(live_without);
	open_next(&r, NULL);
	held_until_it_is_over(&r, NULL);
}

static void who_has_the_lock_knows(void **state)
{
	struct fake_blk *b = blk_over(store_fd);
	static struct rig r;
	int fd;

	leave(live_reading);
	/* the node's own description: nobody else gets it */
	close_fd(&io_fd);
	fd = open_again(store_fd, O_RDWR);
	assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
	open_next(&r, b);
	mr_until(&r, nobody_waits, &r);
	close_fd(&fd);
	go(&r, b);
}

static void nobody_kept_it_and_only_its_node_knows(void **state)
{
	static struct rig r;
	struct fake_blk *b;

	leave(live_reading);
	ar_lose("block.0");
	leave(live_without);
	close_fd(&io_fd);
	/* it is over, and who could tell? */
	b = fake_blk_create(8 << 20, 1 << 16);
	open_next(&r, b);
	run_ms(&r, 20);
	assert_true(only_pool(&r)->nr_loading > 0);
	b->store_fd = open_again(store_fd, O_RDONLY);
	go(&r, b);
}

static void another_one_under_its_name_proves_nothing(void **state)
{
	static struct rig r;

	leave(live_reading);
	ar_swap("block.0");
	open_next(&r, NULL);
	run_ms(&r, 20);
	assert_true(only_pool(&r)->nr_loading > 0);
	assert_int_equal(ar_find("block.0"), -1);
	mr_exit(&r.client[0]);
	mr_settle(&r);
	mr_close(&r);
	ar_empty();
}

static void what_is_over_is_forgotten(void **state)
{
	static struct rig r;

	leave(live_reading);
	assert_true(ar_find("block.0") >= 0);
	close_fd(&io_fd);
	leave(live_without);
	assert_int_equal(ar_find("block.0"), -1);
	open_next(&r, NULL);
	assert_int_equal(only_pool(&r)->nr_loading, 0);
	assert_null(r.mm->adopt);
	go(&r, NULL);
}

/* -- parents that are found later -------------------------------------------------- */

#define PAGES	64u
#define BELOW	32u		/* of them, on the disk as well */

/*
 * The upper half of a chain is on the disk, and in memory that is not adopted; the
 * lower half is in memory that is. Children lie before their parents, and none says
 * how far down it is: as a blob's parts do.
 */
struct halves {
	struct fake_disk disk;
	struct fake_blk	*b;
	struct rig	r;		/* of the dead one: left as it is */
	uint32_t	frame[PAGES];
};

static int by_number(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

static void put_halves(struct rig_client *c, struct halves *h, uint32_t from,
		       uint32_t to)
{
	const struct rig_done *d;
	struct ring_pub pub;
	uint32_t i;

	for (i = from; i < to; i++) {
		memset(frame_addr(c->win->pool, h->frame[i]), (int)i, PAGE);
		pub = mr_pub(1, i, h->frame[i]);
		pub.pos = 0;
		pub.crc = kvmm_crc32c(0, frame_addr(c->win->pool,
						    h->frame[i]), PAGE);
		pub.flags |= KVMM_PUB_CRC;
		mr_publish(c, &pub, 1, 77);
		d = mr_wait(c->rig, 77);
		assert_int_equal(d->res[0].result, 0);
		mr_take(c->rig, 77);
	}
}

static bool is_online(void *arg)
{
	return ((struct rig *)arg)->lower->state == NODE_ONLINE;
}

static bool upper_is_below(void *arg)
{
	struct rig *r = arg;
	uint32_t i;

	for (i = 0; i < BELOW; i++)
		if (copy_at(mr_page(&r->client[0], 1, i), 1)->state !=
		    COPY_READY)
			return false;
	return true;
}

static void live_halves(struct halves *h)
{
	struct rig_opts o = { .bytes = 1 << 20 };
	struct rig *r = &h->r;
	struct rig_client *c;
	uint32_t i, t;

	fake_disk_init(&h->disk, 8 << 20);
	h->b = fake_blk_open(&h->disk, 1 << 16);
	o.lower = &h->b->n;
	ar_open(r, &o);
	mr_until(r, is_online, r);
	c = mr_client(r, 0, KVMM_RW);
	mr_attach(c, "a", PAGE);
	mr_win(c, 0);
	mr_alloc(c, h->frame, PAGES);
	qsort(h->frame, PAGES, sizeof(h->frame[0]), by_number);
	for (i = 0; i < PAGES / 2; i++) {
		t = h->frame[i];
		h->frame[i] = h->frame[PAGES - 1 - i];
		h->frame[PAGES - 1 - i] = t;
	}
	put_halves(c, h, 0, BELOW);
	for (i = 0; i < BELOW; i++)
		page_writeback(mr_page(c, 1, i), &r->mm->node[0],
			       NODE_PRIO_WRITEBACK);
	mr_until(r, upper_is_below, r);
	h->b->unwritable = true;
	put_halves(c, h, BELOW, PAGES);
	fake_blk_flush(h->b);
	fake_blk_die(h->b, NULL);
	mr_exit(c);
}

static struct halves *halves(void)
{
	struct halves *h = calloc(1, sizeof(*h));

	assert_non_null(h);
	live_halves(h);
	ar_bury(h);
	return h;
}

/* One extent of them: the one with the lower half. */
static void open_half(struct rig *r, struct halves *h, struct fake_blk **b)
{
	struct rig_opts o = { .bytes = 1 << 20, .share_pct = 10 };

	*b = fake_blk_open(&h->disk, 1 << 16);
	(*b)->hold_recovery = true;
	o.lower = &(*b)->n;
	ar_open(r, &o);
	mr_check(r);
	assert_int_equal(r->adopted.waiting, PAGES - BELOW);
	run_ms(r, 20);
	assert_int_equal(mm_last_adopted(r->mm)->waiting, PAGES - BELOW);
}

static struct page *page_of(struct rig *r, uint32_t i)
{
	uint64_t key[4];

	mr_key((uint8_t *)key, 1, i);
	return page_find(list_first(&r->mm->spaces, struct mm_space, link), 0,
			 key);
}

static void children_before_their_parents_are_found(void **state)
{
	struct halves *h = halves();
	static struct rig r;
	struct fake_blk *b;
	uint64_t lost;
	uint32_t i;

	open_half(&r, h, &b);
	lost = mm_last_adopted(r.mm)->lost;
	b->hold_recovery = false;
	mr_until(&r, nobody_waits, &r);
	mr_check(&r);
	for (i = 0; i < PAGES; i++) {
		assert_non_null(page_of(&r, i));
		if (i < BELOW)
			continue;
		assert_int_equal(copy_at(page_of(&r, i), 0)->state, COPY_READY);
		assert_int_equal(copy_at(page_of(&r, i), 0)->frame,
				 h->frame[i]);
		assert_true(page_of(&r, i)->parent == page_of(&r, i - 1));
	}
	assert_int_equal(mm_last_adopted(r.mm)->lost, lost);
	mr_close(&r);
}

static void orphans_do_not_wait_for_ever(void **state)
{
	struct halves *h = halves();
	static struct rig r;
	struct fake_blk *b;

	open_half(&r, h, &b);
	mm_run(r.mm, now_ns() + 60 * NSEC_PER_SEC);
	assert_int_equal(mm_last_adopted(r.mm)->waiting, 0);
	assert_int_equal(only_pool(&r)->nr_loading, 0);
	b->hold_recovery = false;
	mr_until(&r, is_online, &r);
	mr_check(&r);
	mr_close(&r);
}

/* The frame's record says other bytes than the disk's: published again since. */
static void a_checksum_that_is_not_all_copies_goes(void **state)
{
	struct halves *h = halves();
	struct frame_record *rec;
	static struct rig r;
	struct keep_pool *kp;
	struct fake_blk *b;

	kp = ar_map("record.0.0.0");
	rec = (struct frame_record *)((char *)kp + kp->record_off) +
	      h->frame[BELOW];
	/* it takes the key of the last one that is on the disk */
	mr_key(rec->key, 1, BELOW - 1);
	mr_key(rec->parent, 1, BELOW - 2);
	assert_true(rec->flags & FRAME_REC_CRC);
	rec->crc = kvmm_crc32c(0, rec, offsetof(struct frame_record, crc));
	open_half(&r, h, &b);
	b->hold_recovery = false;
	mr_until(&r, nobody_waits, &r);
	assert_int_equal(copy_at(page_of(&r, BELOW - 1), 0)->frame,
			 h->frame[BELOW]);
	assert_false(page_of(&r, BELOW - 1)->flags & PAGE_CRC);
	assert_true(page_of(&r, BELOW - 2)->flags & PAGE_CRC);
	mr_check(&r);
	mr_close(&r);
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(frames_of_old_io_wait_for_the_lock),
		TEST(also_without_that_store),
		TEST(also_with_another_one),
		TEST(also_in_the_daemon_after_the_next),
		TEST(who_has_the_lock_knows),
		TEST(nobody_kept_it_and_only_its_node_knows),
		TEST(another_one_under_its_name_proves_nothing),
		TEST(what_is_over_is_forgotten),
		TEST(children_before_their_parents_are_found),
		TEST(orphans_do_not_wait_for_ever),
		TEST(a_checksum_that_is_not_all_copies_goes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
