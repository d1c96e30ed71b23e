/* SPDX-License-Identifier: Apache-2.0 */
/* Writing blobs: what lies where, what is asked, who holds which frame. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/pattern.h"
#include "tests/lib/unit.h"

#define PAGE	4096
#define HEAD	sizeof(struct blob_hdr)

static struct fk f;
static struct fc c;
static struct kvmm_key key, parent;
static struct kvmm_done d;
static struct kvmm_blob *b;

/* No two frames in a row, and not in order. */
static int setup(void **state)
{
	static const uint32_t give[] = { 74, 72, 70, 76, 78, 80, 82, 84 };
	struct ring_sqe sqe;
	uint32_t i;

	if (fk_start(&f, 1) || fc_open(&f, &c))
		return -1;
	for (i = 0; i < 8; i++)
		fk_give(&f, 0, give[i], 1);
	while (fk_take(&f, &sqe, NULL))
		;
	key = fk_key(1, 1);
	parent = fk_key(1, 0);
	b = NULL;
	return 0;
}

static int teardown(void **state)
{
	unsetenv("KVMM_BREAK");
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

static void begin(uint64_t len)
{
	int err = kvmm_blob_begin(c.rq, FK_LAST, 0, &key, &parent, len, &b);

	if (err)
		fail_msg("begin: %d, %s", err, kvmm_error(c.k));
}

/* As many bytes as @n pages hold. */
static uint64_t bytes(unsigned int n)
{
	return n * PAGE - HEAD;
}

static const uint8_t *frame(uint32_t no)
{
	return kvmm_win_ptr(c.win[0], 0, no);
}

static const struct ring_pub *committed(uint64_t len, struct ring_sqe *sqe)
{
	const void *array;

	assert_int_equal(kvmm_blob_commit(b, len, 70, 0, 42), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, sqe, &array));
	return array;
}

static void told(int result, uint32_t at)
{
	assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	assert_int_equal(d.tag, 42);
	assert_int_equal(d.op, KVMM_OP_BLOB);
	assert_int_equal(d.n, 1);
	assert_int_equal(d.res[0].result, result);
	assert_int_equal(d.res[0].frame, at);
}

/* Entries [@from, @n) fail with @err, the others are sealed. */
static void answer(const struct ring_sqe *sqe, const struct ring_pub *p,
		   uint32_t from, int err)
{
	struct ring_result res[16] = { { 0 } };
	uint32_t i;

	for (i = 0; i < sqe->n; i++) {
		if (i >= from) {
			res[i].result = err;
			continue;
		}
		res[i].frame = p[i].frame;
		res[i].word = fk_seal(&f, 0, (const void *)p[i].key, FK_LAST,
				      p[i].frame, 7);
	}
	fk_answer(&f, sqe, 0, res, sqe->n);
}

static void end(void)
{
	kvmm_req_end(c.rq, KVMM_CONTINUES, 0);
	c.rq = NULL;
}

/* How many frames of the eight this process can have. */
static unsigned int free_frames(void)
{
	uint32_t fr[8];
	unsigned int n;
	struct kvmm_req *rq;

	assert_int_equal(kvmm_req_open(c.sp, 9, NULL, &rq), 0);
	for (n = 8; n && kvmm_alloc(rq, 0, 0, n, fr, 0); n--)
		;
	kvmm_req_end(rq, KVMM_ENDED, 0);
	return n;
}

/* -- memory -------------------------------------------------------------------- */

/* Page @i of the blob is frame 70 + 2 * @i: the first three, in order. */
static void memory_is_contiguous_over_scattered_frames(void **state)
{
	uint8_t *p;
	uint32_t i;

	begin(bytes(3));
	p = kvmm_blob_ptr(b);
	assert_int_equal((uintptr_t)p % 64, 0);
	assert_int_equal(kvmm_blob_len(b), bytes(3));
	pattern_fill(p, bytes(3), &key);
	for (i = 0; i < 3; i++)
		assert_memory_equal(frame(70 + 2 * i) + (i ? 0 : HEAD),
				    p + i * PAGE - (i ? HEAD : 0),
				    PAGE - (i ? 0 : HEAD));
	/* and it is the same memory, not the same bytes */
	((uint8_t *)frame(72))[5] ^= 1;
	assert_int_not_equal(pattern_check(p, bytes(3), &key), 0);
}

static void frames_in_a_row_are_seen_where_they_are(void **state)
{
	kvmm_frame_t old[8];

	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 8, old, 0), 0);
	fk_give(&f, 0, 90, 3);
	begin(bytes(3));
	assert_ptr_equal(kvmm_blob_ptr(b), frame(90) + HEAD);
}

/* Two extents are two files, though their frames have neighbouring numbers. */
static void a_row_that_crosses_extents_is_seen_right(void **state)
{
	kvmm_frame_t old[8];
	uint8_t *p;

	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 8, old, 0), 0);
	fk_extent_up(&f, 0, 2);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	fk_give(&f, 0, 2 * FK_FPE - 1, 2);	/* 127 and 128 */
	fk_give(&f, 0, 100, 1);
	begin(bytes(3));
	p = kvmm_blob_ptr(b);
	pattern_fill(p, bytes(3), &key);
	assert_memory_equal(frame(100) + HEAD, p, PAGE - HEAD);
	assert_memory_equal(frame(127), p + PAGE - HEAD, PAGE);
	assert_memory_equal(frame(128), p + 2 * PAGE - HEAD, PAGE);
}

static void a_refused_mapping_is_made_up_for_by_a_copy(void **state)
{
	const struct ring_pub *pub;
	struct ring_sqe sqe;
	uint32_t i;
	uint8_t *p;

	setenv("KVMM_BREAK", "remap", 1);
	kvmm_breaks_init();
	begin(bytes(3));
	p = kvmm_blob_ptr(b);
	pattern_fill(p, bytes(3), &key);
	/* a step that writes to it must be over before it is copied */
	assert_int_equal(kvmm_blob_commit(b, bytes(3), 0, 5, 1), -EAGAIN);
	assert_int_equal(kvmm_step_done(c.k, 5), 0);
	assert_int_equal(kvmm_blob_commit(b, bytes(3), 0, 5, 42), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, &sqe, (const void **)&pub));
	{
		uint8_t all[3 * PAGE];

		for (i = 0; i < 3; i++)
			memcpy(all + i * PAGE, frame(70 + 2 * i), PAGE);
		assert_int_equal(pattern_check(all + HEAD, bytes(3), &key), 0);
	}
	answer(&sqe, pub, 3, 0);
	told(0, 70);
}

static void lengths_take_as_many_frames_as_they_need(void **state)
{
	static const struct {
		uint64_t	len;
		unsigned int	n;
	} t[] = {
		{ 0, 1 }, { 1, 1 }, { PAGE - HEAD, 1 }, { PAGE - HEAD + 1, 2 },
		{ 8 * PAGE - HEAD, 8 },
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(t); i++) {
		begin(t[i].len);
		assert_int_equal(free_frames(), 8 - t[i].n);
		kvmm_blob_abort(b);
		assert_int_equal(free_frames(), 8);
	}
	assert_int_equal(kvmm_blob_begin(c.rq, FK_LAST, 0, &key, NULL,
					 8 * PAGE - HEAD + 1, &b), -EAGAIN);
	assert_int_equal(f.win[0].w->want, 9);
}

static void what_cannot_be_is_refused(void **state)
{
	assert_int_equal(kvmm_blob_begin(c.rq, FK_FULL, 0, &key, NULL, 1, &b),
			 -EINVAL);
	assert_int_equal(kvmm_blob_begin(c.rq, FK_WINDOW, 0, &key, NULL, 1,
					 &b), -EINVAL);
	assert_int_equal(kvmm_blob_begin(c.rq, 99, 0, &key, NULL, 1, &b),
			 -EINVAL);
	assert_int_equal(kvmm_blob_begin(c.rq, FK_LAST, 3, &key, NULL, 1, &b),
			 -EINVAL);
	assert_int_equal(kvmm_blob_begin(c.rq, FK_LAST, 0, &key, NULL,
					 UINT64_MAX, &b), -EINVAL);
	assert_int_equal(kvmm_blob_begin(c.rq, FK_LAST, 0, &key, NULL,
		(uint64_t)BLOB_MAX_CHUNKS * PAGE - HEAD + 1, &b), -EINVAL);
	begin(100);
	assert_int_equal(kvmm_blob_commit(b, 101, 0, 0, 1), -EINVAL);
	kvmm_blob_abort(NULL);
	kvmm_blob_put(NULL);
}

static void what_is_there_is_not_begun(void **state)
{
	fk_seal(&f, 0, &key, FK_LAST, 100, 3);
	assert_int_equal(kvmm_blob_begin(c.rq, FK_LAST, 0, &key, NULL, 1, &b),
			 -EEXIST);
	fk_forget(&f, &key, FK_LAST, 0);
	fk_below(&f, &key, FK_LAST, 0, 1);
	assert_int_equal(kvmm_blob_begin(c.rq, FK_LAST, 0, &key, NULL, 1, &b),
			 -EEXIST);
	/* it does not count when matches do not either */
	f.hdr->space[FK_SPACE].mode = KVMM_MODE_BYPASS;
	begin(1);
	assert_int_equal(free_frames(), 7);
}

static void a_child_of_fork_has_no_blob(void **state)
{
	int status;
	pid_t pid;

	begin(bytes(3));
	pid = fork();
	if (!pid) {
		struct kvmm_blob *other;
		bool ok = kvmm_blob_ptr(b) == NULL && kvmm_blob_len(b) == 0 &&
			  kvmm_blob_commit(b, 1, 0, 0, 1) == -ECHILD &&
			  kvmm_blob_map(c.rq, 0, 0, &other) == -ECHILD &&
			  kvmm_blob_begin(c.rq, FK_LAST, 0, &key, NULL, 1,
					  &other) == -ECHILD;

		kvmm_blob_put(b);
		_exit(!ok);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(free_frames(), 5);
}

/* -- what is published ------------------------------------------------------------ */

static void the_last_chunk_goes_first_and_the_head_last(void **state)
{
	const struct ring_pub *p;
	const struct blob_hdr *h;
	struct ring_sqe sqe;
	uint8_t chunk[32];
	uint32_t i;

	begin(bytes(3));
	p = committed(bytes(3), &sqe);
	assert_int_equal(sqe.n, 3);
	assert_int_equal(sqe.space, FK_SPACE);
	h = (const void *)frame(70);
	assert_true(blob_hdr_good(h, key.b, PAGE));
	assert_int_equal(h->len, bytes(3));
	assert_int_equal(h->nchunks, 3);
	for (i = 0; i < 3; i++) {
		assert_int_equal(p[i].frame, 74 - 2 * i);
		assert_int_equal(p[i].group, FK_LAST);
		assert_int_equal(p[i].flags, i ? RING_PUB_BOUND : 0);
		assert_int_equal(p[i].cost_us, 70);
		if (i)
			assert_memory_equal(p[i].parent, p[i - 1].key, 32);
		blob_chunk_key(key.b, h->id, 2 - i, chunk);
		assert_memory_equal(p[i].key, i == 2 ? key.b : chunk, 32);
	}
	assert_memory_equal(p[0].parent, parent.b, 32);
	for (i = 0; i < 8; i++)
		assert_int_equal(fk_pins(&f, 0, 70 + 2 * i), i < 3);
}

static void two_writings_of_a_key_share_no_chunk(void **state)
{
	const struct ring_pub *p;
	struct ring_sqe sqe;
	uint8_t first[32];

	begin(bytes(2));
	p = committed(bytes(2), &sqe);
	memcpy(first, p[0].key, 32);
	begin(bytes(2));
	p = committed(bytes(2), &sqe);
	assert_memory_not_equal(first, p[0].key, 32);
	assert_memory_equal(p[1].key, key.b, 32);
}

static void a_blob_stays_pinned_and_is_touched_whole_at_the_end(void **state)
{
	const struct ring_pub *p;
	struct ring_sqe sqe;

	begin(bytes(3));
	p = committed(bytes(3), &sqe);
	answer(&sqe, p, 3, 0);
	told(0, 70);
	assert_int_equal(fk_all_pins(&f, 0), 3);
	end();
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.frame, 70);
	assert_int_equal(sqe.arg, frame_word(7, FRAME_READY));
	assert_int_equal(sqe.n, 3);
	assert_int_equal(sqe.group, FK_LAST);
	assert_false(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(free_frames(), 5);
}

static void frames_that_were_not_needed_are_free_at_once(void **state)
{
	const struct ring_pub *p;
	struct ring_sqe sqe;

	begin(bytes(6));
	p = committed(bytes(2), &sqe);
	assert_int_equal(sqe.n, 2);
	assert_int_equal(((const struct blob_hdr *)frame(70))->nchunks, 2);
	assert_int_equal(free_frames(), 6);
	answer(&sqe, p, 2, 0);
	told(0, 70);
	assert_int_equal(free_frames(), 6);
}

static void the_parts_of_a_large_one_are_of_one_operation(void **state)
{
	/* as many frames as the fake has, less than a batch: one part */
	const struct ring_pub *p;
	struct ring_sqe sqe;

	fk_give(&f, 0, 90, 8);
	begin(bytes(16));
	p = committed(bytes(16), &sqe);
	assert_int_equal(sqe.n, 16);
	answer(&sqe, p, 16, 0);
	told(0, 70);
	assert_int_equal(fk_all_pins(&f, 0), 16);
}

/* -- failures ----------------------------------------------------------------------- */

/* The next entry takes back what hangs on @root. */
static void taken_back(const uint8_t root[32])
{
	const struct ring_key *k;
	struct ring_sqe sqe;

	assert_true(fk_take_op(&f, RING_REPORT, &sqe, (const void **)&k));
	assert_int_equal(sqe.arg, RING_UNDO);
	assert_int_equal(sqe.space, FK_SPACE);
	assert_memory_equal(k->key, root, 32);
	assert_int_equal(k->group, FK_LAST);
}

static void a_blob_that_fails_in_the_middle_is_taken_back(void **state)
{
	const struct ring_pub *p;
	struct ring_sqe sqe;
	uint8_t root[32];

	begin(bytes(4));
	p = committed(bytes(4), &sqe);
	memcpy(root, p[0].key, 32);
	answer(&sqe, p, 2, -ENOMEM);
	told(-ENOMEM, 0);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	taken_back(root);
	/* two were sealed, and are the daemon's */
	assert_int_equal(free_frames(), 6);
	end();
	assert_false(fk_take_op(&f, RING_END, &sqe, NULL));
}

static void a_blob_that_fails_at_once_leaves_nothing_to_take_back(void **state)
{
	const struct ring_pub *p;
	struct ring_sqe sqe;

	begin(bytes(4));
	p = committed(bytes(4), &sqe);
	answer(&sqe, p, 0, -EINVAL);
	told(-EINVAL, 0);
	assert_false(fk_take_op(&f, RING_REPORT, &sqe, NULL));
	assert_int_equal(free_frames(), 8);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void the_second_writer_gets_the_canonical_head(void **state)
{
	struct ring_result res[3] = { { 0 } };
	const struct ring_pub *p;
	struct ring_sqe sqe;
	uint8_t root[32];

	begin(bytes(3));
	p = committed(bytes(3), &sqe);
	memcpy(root, p[0].key, 32);
	res[0] = (struct ring_result){ 0, p[0].frame, 1 };
	res[1] = (struct ring_result){ 0, p[1].frame, 1 };
	res[2] = (struct ring_result){
		-EEXIST, 100, frame_word(5, FRAME_READY) };
	fk_word(&f, 0, 100, res[2].word);
	fk_answer(&f, &sqe, 0, res, 3);
	told(-EEXIST, 100);
	taken_back(root);
	assert_int_equal(fk_pins(&f, 0, 100), 1);
	assert_int_equal(fk_all_pins(&f, 0), 1);
	assert_int_equal(free_frames(), 6);
	end();
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.frame, 100);
}

/* It is on another node only: there is no frame to name. */
static void the_second_writer_may_get_no_head(void **state)
{
	const struct ring_pub *p;
	struct ring_sqe sqe;

	begin(bytes(3));
	p = committed(bytes(3), &sqe);
	answer(&sqe, p, 2, -EEXIST);
	told(-EEXIST, 0);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void a_full_ring_leaves_the_blob_as_it_was(void **state)
{
	const struct ring_pub *p;
	struct ring_sqe sqe;
	int i;

	begin(bytes(3));
	for (i = 0; i < LEDGER_SQ_ENTRIES && !kvmm_ping(c.k, 1); i++)
		;
	assert_int_equal(kvmm_blob_commit(b, bytes(2), 0, 0, 1), -EAGAIN);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_int_equal(kvmm_blob_len(b), bytes(3));
	pattern_fill(kvmm_blob_ptr(b), bytes(3), &key);
	while (fk_take(&f, &sqe, NULL))
		if (sqe.op == RING_NOP)
			fk_answer(&f, &sqe, 0, NULL, 0);
	while (kvmm_poll(c.k, &d, 1) > 0)
		;
	p = committed(bytes(3), &sqe);
	answer(&sqe, p, 3, 0);
	told(0, 70);
}

static void modes_are_kept(void **state)
{
	_Atomic uint32_t *mode = &f.hdr->space[FK_SPACE].mode;
	struct ring_result res = { 0 };
	const struct ring_pub *p;
	struct ring_sqe sqe;

	begin(bytes(3));
	*mode = KVMM_MODE_BYPASS;
	assert_int_equal(kvmm_blob_commit(b, 10, 0, 0, 1), -EAGAIN);
	*mode = KVMM_MODE_READONLY;
	assert_int_equal(kvmm_blob_commit(b, 10, 0, 0, 1), -EROFS);
	/* the head's key is remembered, the frames stay private */
	*mode = KVMM_MODE_OBSERVE;
	p = committed(bytes(3), &sqe);
	assert_int_equal(sqe.n, 1);
	assert_memory_equal(p[0].key, key.b, 32);
	/* alone it is no blob: where the mode changes meanwhile it is refused */
	assert_true(p[0].flags & RING_PUB_BOUND);
	fk_answer(&f, &sqe, 0, &res, 1);
	told(0, 0);
	assert_int_equal(free_frames(), 8);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void frames_of_unknown_fate_are_not_used_again(void **state)
{
	struct ring_sqe sqe;

	begin(bytes(3));
	committed(bytes(3), &sqe);
	fk_hang_up(&f);
	while (kvmm_poll(c.k, &d, 1) != 1)
		usleep(1000);
	assert_int_equal(d.op, KVMM_OP_BLOB);
	assert_int_equal(d.res[0].result, -ENOTCONN);
	assert_int_equal(fk_all_pins(&f, 0), 3);
	assert_int_equal(free_frames(), 5);
	assert_int_equal(kvmm_req_end(c.rq, KVMM_ENDED, 0), 0);
	c.rq = NULL;
}

static void a_closed_window_takes_no_blob(void **state)
{
	begin(bytes(3));
	kvmm_win_close(c.win[0]);
	assert_int_equal(kvmm_blob_commit(b, 1, 0, 0, 1), -EINVAL);
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]), 0);
	assert_int_equal(kvmm_blob_commit(b, 1, 0, 0, 1), -ESTALE);
	/* what was not the window's own mapping is there still */
	memset(kvmm_blob_ptr(b), 1, bytes(3));
	kvmm_blob_abort(b);
}

static void a_frame_that_was_freed_by_number_is_noticed(void **state)
{
	const kvmm_frame_t fr = 72;

	begin(bytes(3));
	assert_int_equal(kvmm_free(c.rq, 0, 0, &fr, 1, 0), 0);
	assert_int_equal(kvmm_blob_commit(b, bytes(3), 0, 0, 1), -EINVAL);
	kvmm_blob_abort(b);
	assert_int_equal(free_frames(), 8);
}

/* -- ends ------------------------------------------------------------------------- */

static void the_end_of_a_request_aborts_it(void **state)
{
	begin(bytes(3));
	end();
	assert_int_equal(free_frames(), 8);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

static void a_commit_in_flight_outlives_its_request(void **state)
{
	const struct ring_pub *p;
	struct ring_sqe sqe;

	begin(bytes(3));
	p = committed(bytes(3), &sqe);
	end();
	assert_int_equal(fk_all_pins(&f, 0), 3);
	answer(&sqe, p, 3, 0);
	told(0, 70);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_true(fk_take_op(&f, RING_END, &sqe, NULL));
	assert_int_equal(sqe.n, 3);
}

/* A kernel writes through the pointer until its step is done. */
static void a_step_keeps_the_memory(void **state)
{
	const struct ring_pub *pub;
	struct ring_sqe sqe;
	uint8_t *p;

	begin(bytes(3));
	p = kvmm_blob_ptr(b);
	assert_int_equal(kvmm_blob_commit(b, bytes(3), 0, 5, 42), 0);
	assert_true(fk_take_op(&f, RING_PUBLISH, &sqe, (const void **)&pub));
	assert_int_equal(sqe.after, 5);
	assert_int_equal(pub[2].after, 5);
	kvmm_req_end(c.rq, KVMM_ENDED, 5);
	c.rq = NULL;
	pattern_fill(p, bytes(3), &key);
	assert_int_equal(kvmm_step_done(c.k, 5), 0);
	answer(&sqe, pub, 3, 0);
	told(0, 70);
	assert_int_equal(fk_all_pins(&f, 0), 0);
}

/* Likewise, also of what failed, and when the daemon goes meanwhile. */
static void a_step_keeps_the_memory_of_a_daemon_that_is_gone(void **state)
{
	uint8_t *p;

	begin(bytes(3));
	p = kvmm_blob_ptr(b);
	assert_int_equal(kvmm_blob_commit(b, bytes(3), 0, 5, 42), 0);
	kvmm_req_end(c.rq, KVMM_ENDED, 5);
	c.rq = NULL;
	fk_restart(&f);
	while (kvmm_poll(c.k, &d, 1) != 1)
		usleep(1000);
	assert_int_equal(d.res[0].result, -ENOTCONN);
	while (kvmm_poll(c.k, &d, 1) == -ENOTCONN)
		usleep(1000);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), -EBUSY);
	pattern_fill(p, bytes(3), &key);
	assert_int_equal(kvmm_step_done(c.k, 5), 0);
	assert_true(kvmm_win_sync(c.win[0], 5) >= 0);
}

int main(void)
{
#define T(f)	cmocka_unit_test_setup_teardown(f, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(memory_is_contiguous_over_scattered_frames),
		T(frames_in_a_row_are_seen_where_they_are),
		T(a_row_that_crosses_extents_is_seen_right),
		T(a_refused_mapping_is_made_up_for_by_a_copy),
		T(lengths_take_as_many_frames_as_they_need),
		T(what_cannot_be_is_refused),
		T(what_is_there_is_not_begun),
		T(a_child_of_fork_has_no_blob),
		T(the_last_chunk_goes_first_and_the_head_last),
		T(two_writings_of_a_key_share_no_chunk),
		T(a_blob_stays_pinned_and_is_touched_whole_at_the_end),
		T(frames_that_were_not_needed_are_free_at_once),
		T(the_parts_of_a_large_one_are_of_one_operation),
		T(a_blob_that_fails_in_the_middle_is_taken_back),
		T(a_blob_that_fails_at_once_leaves_nothing_to_take_back),
		T(the_second_writer_gets_the_canonical_head),
		T(the_second_writer_may_get_no_head),
		T(a_full_ring_leaves_the_blob_as_it_was),
		T(modes_are_kept),
		T(frames_of_unknown_fate_are_not_used_again),
		T(a_closed_window_takes_no_blob),
		T(a_frame_that_was_freed_by_number_is_noticed),
		T(the_end_of_a_request_aborts_it),
		T(a_commit_in_flight_outlives_its_request),
		T(a_step_keeps_the_memory),
		T(a_step_keeps_the_memory_of_a_daemon_that_is_gone),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
