/* SPDX-License-Identifier: Apache-2.0 */
/* Reading blobs: what is found, loaded, waited for, believed, and let go. */
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/pattern.h"
#include "tests/lib/unit.h"

#define PAGE	4096
#define HEAD	sizeof(struct blob_hdr)
#define MAX	8

static struct fk f;
static struct fc c;
static struct kvmm_key key;
static struct kvmm_blob *b;

/* The blob that there is: chunk i in frame[i], under ckey[i]. */
static uint32_t n, frame[MAX];
static struct kvmm_key ckey[MAX];

/* -- the daemon's side ----------------------------------------------------------- */

enum serve {
	SERVE_NOT,
	SERVE_LOAD,		/* what is asked for comes */
	SERVE_MISS,		/* is nowhere */
	SERVE_FULL,		/* has no frames */
	SERVE_HALF,		/* every other one comes, the others next time */
	SERVE_HANG_UP,
};
static _Atomic enum serve serve;
static _Atomic bool serve_stop;
static _Atomic unsigned int served;	/* pages that were asked for */
static pthread_t server;

static uint64_t seal(uint32_t chunk, uint64_t gen)
{
	return fk_seal(&f, 0, &ckey[chunk], FK_LAST, frame[chunk], gen);
}

static struct ring_result load(const struct ring_key *k, uint32_t at)
{
	struct ring_result r = { .result = -ENOENT };
	uint32_t i;

	if (serve == SERVE_FULL || (serve == SERVE_HALF && at % 2))
		r.result = -EAGAIN;
	else if (serve != SERVE_MISS)
		for (i = 0; i < n; i++)
			if (!memcmp(k->key, ckey[i].b, 32))
				r = (struct ring_result){ 0, frame[i],
							  seal(i, 20) };
	return r;
}

static void serve_one(const struct ring_sqe *sqe, const struct ring_key *k)
{
	struct ring_result res[MAX];
	uint32_t i;

	served += sqe->n;
	if (serve == SERVE_HANG_UP) {
		fk_hang_up(&f);
		return;
	}
	for (i = 0; i < sqe->n && i < MAX; i++)
		res[i] = load(&k[i], i);
	fk_answer(&f, sqe, 0, res, sqe->n);
}

static void *serve_main(void *unused)
{
	const void *array;
	struct ring_sqe sqe;

	while (!serve_stop) {
		if (serve == SERVE_NOT || !fk_take(&f, &sqe, &array)) {
			usleep(200);
			continue;
		}
		if (sqe.op == RING_FETCH)
			serve_one(&sqe, array);
		else if (sqe.op == RING_NOP)
			fk_answer(&f, &sqe, 0, NULL, 0);
	}
	return NULL;
}

static void begin_serving(enum serve what)
{
	serve = what;
	serve_stop = false;
	served = 0;
	assert_int_equal(pthread_create(&server, NULL, serve_main, NULL), 0);
}

static void end_serving(void)
{
	if (serve == SERVE_NOT)
		return;
	serve_stop = true;
	pthread_join(server, NULL);
	serve = SERVE_NOT;
}

/* -- a blob ------------------------------------------------------------------------ */

static uint64_t bytes(void)
{
	return n * PAGE - HEAD - 100;
}

/* Publish one of @chunks pages, in scattered frames. */
static void make(uint32_t chunks)
{
	const struct ring_pub *p;
	struct ring_result res[MAX];
	struct kvmm_done d;
	struct ring_sqe sqe;
	struct kvmm_req *rq;
	uint32_t i;

	n = chunks;
	for (i = 0; i < n; i++)
		fk_give(&f, 0, 80 - 2 * i, 1);
	assert_int_equal(kvmm_req_open(c.sp, 8, NULL, &rq), 0);
	assert_int_equal(kvmm_blob_begin(rq, FK_LAST, 0, &key, NULL, bytes(),
					 &b), 0);
	pattern_fill(kvmm_blob_ptr(b), bytes(), &key);
	assert_int_equal(kvmm_blob_commit(b, bytes(), 9, 0, 1), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, &sqe, (const void **)&p));
	for (i = 0; i < n; i++) {
		memcpy(ckey[n - 1 - i].b, p[i].key, 32);
		frame[n - 1 - i] = p[i].frame;
		res[i] = (struct ring_result){ 0, p[i].frame,
					       seal(n - 1 - i, 7) };
	}
	fk_answer(&f, &sqe, 0, res, n);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.res[0].result, 0);
	kvmm_req_end(rq, KVMM_ENDED, 0);
	while (fk_take(&f, &sqe, NULL))
		;
	b = NULL;
}

static int setup(void **state)
{
	key = fk_key(1, 1);
	serve = SERVE_NOT;
	if (fk_start(&f, 1) || fc_open(&f, &c))
		return -1;
	make(5);
	return 0;
}

static int teardown(void **state)
{
	end_serving();
	unsetenv("KVMM_BREAK");
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

/* It is on the lower node only. */
static void push_down(uint32_t chunk)
{
	fk_forget(&f, &ckey[chunk], FK_LAST, 0);
	fk_word(&f, 0, frame[chunk], frame_word(7, FRAME_FREE));
	fk_below(&f, &ckey[chunk], FK_LAST, 0, 9);
}

static void lose(uint32_t chunk)
{
	fk_forget(&f, &ckey[chunk], FK_LAST, 0);
	fk_word(&f, 0, frame[chunk], frame_word(7, FRAME_FREE));
}

static uint32_t match(void)
{
	const struct kvmm_keys keys = { .k = &key, .n = 1, .group = FK_LAST };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit;

	assert_int_equal(kvmm_match(c.rq, &keys, 1, 0, &hit, &m), 0);
	return m.n_pages;
}

static int map_for(uint64_t ns)
{
	return kvmm_blob_map(c.rq, 0, ns ? deadline_in(ns) : 0, &b);
}

static int map(void)
{
	return map_for(5 * NSEC_PER_SEC);
}

static void is_right(void)
{
	assert_int_equal(kvmm_blob_len(b), bytes());
	assert_int_equal(pattern_check(kvmm_blob_ptr(b), bytes(), &key), 0);
}

static void end(void)
{
	kvmm_req_end(c.rq, KVMM_CONTINUES, 0);
	c.rq = NULL;
}

/* -- found -------------------------------------------------------------------------- */

static void what_is_here_is_mapped_without_asking(void **state)
{
	struct ring_sqe sqe;
	uint32_t i;

	assert_int_equal(match(), 1);
	assert_int_equal(map_for(0), 0);
	is_right();
	assert_int_equal((uintptr_t)kvmm_blob_ptr(b) % 64, 0);
	assert_false(fk_take(&f, &sqe, NULL));
	/* the match's pin is the match's */
	assert_int_equal(fk_pins(&f, 0, frame[0]), 2);
	for (i = 1; i < n; i++)
		assert_int_equal(fk_pins(&f, 0, frame[i]), 1);
	kvmm_blob_put(b);
	assert_int_equal(fk_pins(&f, 0, frame[0]), 1);
	assert_int_equal(fk_all_pins(&f, 0), 1);
}

static void a_blob_of_one_page_is_the_page(void **state)
{
	key = fk_key(1, 2);
	make(1);
	assert_int_equal(match(), 1);
	assert_int_equal(map_for(0), 0);
	is_right();
	assert_ptr_equal(kvmm_blob_ptr(b),
			 (char *)kvmm_win_ptr(c.win[0], 0, frame[0]) + HEAD);
}

static void it_outlives_the_match_that_found_it(void **state)
{
	assert_int_equal(match(), 1);
	assert_int_equal(map(), 0);
	key = fk_key(3, 3);
	assert_int_equal(match(), 0);
	assert_int_equal(fk_all_pins(&f, 0), n);
	key = fk_key(1, 1);
	is_right();
	end();
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void it_is_touched_whole_at_the_end_and_once(void **state)
{
	struct kvmm_blob *other;
	struct ring_sqe sqe;

	assert_int_equal(match(), 1);
	assert_int_equal(map(), 0);
	assert_int_equal(kvmm_blob_map(c.rq, 0, 0, &other), 0);
	kvmm_blob_put(b);
	kvmm_blob_put(other);
	end();
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.frame, frame[0]);
	assert_int_equal(sqe.n, n);
	assert_int_equal(sqe.arg, frame_word(7, FRAME_READY));
	assert_false(fk_take_op(&f, RING_END, &sqe, NULL));
}

static void a_refused_mapping_is_made_up_for_by_a_copy(void **state)
{
	setenv("KVMM_BREAK", "remap", 1);
	kvmm_breaks_init();
	assert_int_equal(match(), 1);
	assert_int_equal(map(), 0);
	is_right();
	((uint8_t *)kvmm_win_ptr(c.win[0], 0, frame[2]))[0] ^= 1;
	is_right();
	assert_int_equal(fk_all_pins(&f, 0), n + 1);
}

/* -- loaded --------------------------------------------------------------------------- */

static void what_is_below_is_loaded(void **state)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		push_down(i);
	assert_int_equal(match(), 1);
	begin_serving(SERVE_LOAD);
	assert_int_equal(map(), 0);
	end_serving();
	assert_int_equal(served, n);
	is_right();
	/* and by the blob alone */
	assert_int_equal(fk_all_pins(&f, 0), n);
	kvmm_blob_put(b);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void only_what_is_not_here_is_asked_for(void **state)
{
	push_down(2);
	push_down(4);
	assert_int_equal(match(), 1);
	begin_serving(SERVE_LOAD);
	assert_int_equal(map(), 0);
	end_serving();
	assert_int_equal(served, 2);
	is_right();
}

/* The index may have lost its line: the daemon knows. */
static void what_the_index_does_not_know_is_asked_for(void **state)
{
	lose(3);
	assert_int_equal(match(), 1);
	assert_int_equal(map_for(0), -ENOENT);
	begin_serving(SERVE_LOAD);
	assert_int_equal(map(), 0);
	end_serving();
	is_right();
}

static void without_time_nothing_is_asked_for(void **state)
{
	struct ring_sqe sqe;

	push_down(2);
	assert_int_equal(match(), 1);
	assert_int_equal(map_for(0), -EAGAIN);
	assert_false(fk_take(&f, &sqe, NULL));
	assert_int_equal(fk_all_pins(&f, 0), 1);
	push_down(0);
	assert_int_equal(match(), 1);
	assert_int_equal(map_for(0), -EAGAIN);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void pages_for_which_frames_come_are_asked_for_again(void **state)
{
	uint32_t i;

	for (i = 1; i < n; i++)
		push_down(i);
	assert_int_equal(match(), 1);
	begin_serving(SERVE_HALF);
	assert_int_equal(map(), 0);
	end_serving();
	assert_int_equal(served, 4 + 2 + 1);
	is_right();
}

static void a_blob_that_finds_no_frames_is_to_be_recomputed(void **state)
{
	push_down(1);
	push_down(2);
	assert_int_equal(match(), 1);
	begin_serving(SERVE_FULL);
	assert_int_equal(map(), -EAGAIN);
	end_serving();
	assert_int_equal(fk_all_pins(&f, 0), 1);
}

static void a_part_that_is_nowhere_is_the_whole_blob_nowhere(void **state)
{
	lose(3);
	assert_int_equal(match(), 1);
	begin_serving(SERVE_MISS);
	assert_int_equal(map(), -ENOENT);
	end_serving();
	assert_int_equal(fk_all_pins(&f, 0), 1);
	end();
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void who_comes_late_is_told_in_time(void **state)
{
	uint64_t t0;

	push_down(3);
	assert_int_equal(match(), 1);
	t0 = now_ns();
	assert_int_equal(map_for(50 * NSEC_PER_MSEC), -ETIMEDOUT);
	assert_true(now_ns() - t0 >= 50 * NSEC_PER_MSEC);
	assert_true(now_ns() - t0 < 500 * NSEC_PER_MSEC);
	assert_int_equal(fk_all_pins(&f, 0), 1);
	/* the head alone can be late, too */
	push_down(0);
	assert_int_equal(match(), 1);
	assert_int_equal(map_for(10 * NSEC_PER_MSEC), -ETIMEDOUT);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	/* and a deadline may be over before */
	assert_int_equal(kvmm_blob_map(c.rq, 0, 1, &b), -ETIMEDOUT);
}

static void the_daemons_end_ends_the_wait(void **state)
{
	uint64_t t0 = now_ns();

	push_down(3);
	assert_int_equal(match(), 1);
	begin_serving(SERVE_HANG_UP);
	assert_int_equal(map(), -ENOTCONN);
	end_serving();
	assert_true(now_ns() - t0 < 2 * NSEC_PER_SEC);
	assert_int_equal(fk_all_pins(&f, 0), 1);
}

/* A caller that sleeps on kvmm_fd() must not miss what the wait took in. */
static void other_completions_are_kept_for_the_next_poll(void **state)
{
	struct pollfd pfd = { .fd = kvmm_fd(c.k), .events = POLLIN };
	struct kvmm_done d;
	int i;

	push_down(3);
	assert_int_equal(match(), 1);
	assert_int_equal(kvmm_ping(c.k, 77), 0);
	assert_int_equal(kvmm_ping(c.k, 78), 0);
	begin_serving(SERVE_LOAD);
	assert_int_equal(map(), 0);
	end_serving();
	assert_int_equal(poll(&pfd, 1, 1000), 1);
	for (i = 77; i < 79; i++) {
		assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
		assert_int_equal(d.tag, i);
		assert_int_equal(d.op, KVMM_OP_PING);
	}
	assert_int_equal(kvmm_poll(c.k, &d, 1), 0);
	is_right();
}

/* What others hold in their hands stays theirs: results are valid to the next poll. */
static void results_of_the_last_poll_survive_a_wait(void **state)
{
	const struct ring_pub *p;
	struct ring_result res = { .result = -EINVAL };
	struct kvmm_pub pub = { .group = FK_FULL };
	struct kvmm_done d;
	struct ring_sqe sqe;

	fk_give(&f, 0, 100, 1);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, &pub.frame, 0), 0);
	pub.key = fk_key(9, 9);
	assert_int_equal(kvmm_publish(c.rq, 0, &pub, 1, 5), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, &sqe, (const void **)&p));
	fk_answer(&f, &sqe, 0, &res, 1);
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	push_down(1);
	assert_int_equal(match(), 1);
	begin_serving(SERVE_LOAD);
	assert_int_equal(map(), 0);
	end_serving();
	assert_int_equal(d.res[0].result, -EINVAL);
	is_right();
}

/* Another thread's poll takes the completion that this one waits for. */
static _Atomic bool polling;

static void *poll_main(void *unused)
{
	struct kvmm_done d;

	while (polling)
		kvmm_poll(c.k, &d, 1);
	return NULL;
}

static void another_thread_may_poll_meanwhile(void **state)
{
	uint64_t t0 = now_ns();
	pthread_t other;
	int i;

	polling = true;
	assert_int_equal(pthread_create(&other, NULL, poll_main, NULL), 0);
	begin_serving(SERVE_LOAD);
	for (i = 0; i < 20; i++) {
		push_down(1);
		push_down(3);
		assert_int_equal(match(), 1);
		assert_int_equal(map(), 0);
		is_right();
		kvmm_blob_put(b);
	}
	end_serving();
	polling = false;
	pthread_join(other, NULL);
	assert_true(now_ns() - t0 < 20 * NSEC_PER_SEC);
}

/* -- believed --------------------------------------------------------------------------- */

static struct blob_hdr *hdr(void)
{
	return kvmm_win_ptr(c.win[0], 0, frame[0]);
}

static void refused(void)
{
	assert_int_equal(match(), 1);
	assert_int_equal(map_for(0), -EBADMSG);
	assert_int_equal(fk_all_pins(&f, 0), 1);
}

static void a_plain_page_is_no_blob(void **state)
{
	memset(hdr(), 0, PAGE);
	refused();
	memset(hdr(), 0xff, PAGE);
	refused();
}

static void a_header_that_was_tampered_with_is_not_believed(void **state)
{
	struct blob_hdr good = *hdr();
	size_t i;

	for (i = 0; i < offsetof(struct blob_hdr, spare); i++) {
		((uint8_t *)hdr())[i] ^= 0x10;
		refused();
		*hdr() = good;
	}
	assert_int_equal(map_for(0), 0);
}

/* Whoever can publish can also sign: what he says must still make sense. */
static void a_header_that_makes_no_sense_is_not_believed(void **state)
{
	struct blob_hdr good = *hdr();

	hdr()->nchunks = UINT32_MAX;
	blob_hdr_seal(hdr(), key.b);
	refused();
	*hdr() = good;
	hdr()->nchunks = 0;
	hdr()->len = 0;
	blob_hdr_seal(hdr(), key.b);
	refused();
	*hdr() = good;
	hdr()->len = UINT64_MAX - 10;
	blob_hdr_seal(hdr(), key.b);
	refused();
	*hdr() = good;
	hdr()->len = UINT64_MAX;
	hdr()->nchunks = 1;
	blob_hdr_seal(hdr(), key.b);
	refused();
	*hdr() = good;
	hdr()->len -= PAGE;
	blob_hdr_seal(hdr(), key.b);
	refused();
	*hdr() = good;
	hdr()->page_bytes *= 2;
	blob_hdr_seal(hdr(), key.b);
	refused();
	/* of another key */
	*hdr() = good;
	blob_hdr_seal(hdr(), fk_key(4, 4).b);
	refused();
}

/* The most that can be said truthfully: chunks that are nowhere. */
static void a_header_that_promises_too_much_finds_nothing(void **state)
{
	hdr()->nchunks = BLOB_MAX_CHUNKS;
	hdr()->len = (uint64_t)BLOB_MAX_CHUNKS * PAGE - HEAD;
	blob_hdr_seal(hdr(), key.b);
	assert_int_equal(match(), 1);
	assert_int_equal(map_for(0), -ENOENT);
	assert_int_equal(fk_all_pins(&f, 0), 1);
}

static void what_is_no_page_of_a_blob_group_is_refused(void **state)
{
	const struct kvmm_keys keys = { .k = &key, .n = 1, .group = FK_FULL };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit;

	assert_int_equal(map_for(0), -EINVAL);	/* nothing was matched */
	fk_seal(&f, 0, &key, FK_FULL, 100, 3);
	assert_int_equal(kvmm_match(c.rq, &keys, 1, 0, &hit, &m), 0);
	assert_int_equal(map_for(0), -EINVAL);
	assert_int_equal(match(), 1);
	assert_int_equal(kvmm_blob_map(c.rq, 1, 0, &b), -EINVAL);
	key = fk_key(5, 5);
	assert_int_equal(match(), 0);
	assert_int_equal(map_for(0), -ENOENT);
}

static void modes_are_kept(void **state)
{
	_Atomic uint32_t *mode = &f.hdr->space[FK_SPACE].mode;

	assert_int_equal(match(), 1);
	*mode = KVMM_MODE_BYPASS;
	assert_int_equal(map(), -ENOENT);
	*mode = KVMM_MODE_OBSERVE;
	assert_int_equal(map(), -ENOENT);
	*mode = KVMM_MODE_READONLY;
	assert_int_equal(map(), 0);
	is_right();
}

/* -- ends --------------------------------------------------------------------------------- */

static void it_stays_readable_when_the_daemon_goes(void **state)
{
	struct kvmm_done d;

	assert_int_equal(match(), 1);
	assert_int_equal(map(), 0);
	fk_restart(&f);
	while (kvmm_poll(c.k, &d, 1) != -ENOTCONN)
		usleep(1000);
	while (kvmm_poll(c.k, &d, 1) == -ENOTCONN)
		usleep(1000);
	is_right();
	assert_int_equal(kvmm_win_sync(c.win[0], 0), -EBUSY);
	is_right();
	assert_int_equal(kvmm_blob_map(c.rq, 0, 0, &b), -ESTALE);
	end();
	assert_true(kvmm_win_sync(c.win[0], 0) >= 0);
}

static void a_step_keeps_pins_and_memory(void **state)
{
	const uint8_t *p;

	assert_int_equal(match(), 1);
	assert_int_equal(map(), 0);
	p = kvmm_blob_ptr(b);
	kvmm_req_end(c.rq, KVMM_ENDED, 3);
	c.rq = NULL;
	assert_int_equal(fk_all_pins(&f, 0), n + 1);
	assert_int_equal(pattern_check(p, bytes(), &key), 0);
	assert_int_equal(kvmm_step_done(c.k, 3), 0);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void a_window_that_is_closed_leaves_the_pins_to_be_put(void **state)
{
	assert_int_equal(match(), 1);
	assert_int_equal(map(), 0);
	kvmm_win_close(c.win[0]);
	is_right();		/* scattered: a mapping of its own */
	kvmm_blob_put(b);
	end();
}

int main(void)
{
#define T(f)	cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(what_is_here_is_mapped_without_asking),
		T(a_blob_of_one_page_is_the_page),
		T(it_outlives_the_match_that_found_it),
		T(it_is_touched_whole_at_the_end_and_once),
		T(a_refused_mapping_is_made_up_for_by_a_copy),
		T(what_is_below_is_loaded),
		T(only_what_is_not_here_is_asked_for),
		T(what_the_index_does_not_know_is_asked_for),
		T(without_time_nothing_is_asked_for),
		T(pages_for_which_frames_come_are_asked_for_again),
		T(a_blob_that_finds_no_frames_is_to_be_recomputed),
		T(a_part_that_is_nowhere_is_the_whole_blob_nowhere),
		T(who_comes_late_is_told_in_time),
		T(the_daemons_end_ends_the_wait),
		T(other_completions_are_kept_for_the_next_poll),
		T(results_of_the_last_poll_survive_a_wait),
		T(another_thread_may_poll_meanwhile),
		T(a_plain_page_is_no_blob),
		T(a_header_that_was_tampered_with_is_not_believed),
		T(a_header_that_makes_no_sense_is_not_believed),
		T(a_header_that_promises_too_much_finds_nothing),
		T(what_is_no_page_of_a_blob_group_is_refused),
		T(modes_are_kept),
		T(it_stays_readable_when_the_daemon_goes),
		T(a_step_keeps_pins_and_memory),
		T(a_window_that_is_closed_leaves_the_pins_to_be_put),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
