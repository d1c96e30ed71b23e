/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests in several threads, completions taken in another, a daemon in the
 * main thread: what a thread sanitizer should see of libkvmm's own locking, and
 * that no frame and no pin is lost on the way.
 */
#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define WORKERS	3
#define FRAMES	256		/* in circulation */
#define BATCH	4

static struct fk f;
static struct fc c;
static _Atomic bool stop;
static _Atomic unsigned int working;
static _Atomic uint64_t rounds, told, failed, forks, freed;

static int setup(void **state)
{
	uint32_t no;

	if (fk_start(&f, 1) || fc_open(&f, &c))
		return -1;
	for (no = 2; no <= FRAMES / FK_FPE + 1; no++)
		fk_extent_up(&f, 0, no);
	if (kvmm_win_sync(c.win[0], 0) < 0)
		return -1;
	fk_give(&f, 0, FK_FIRST, FRAMES);
	stop = false;
	rounds = told = failed = forks = freed = 0;
	return 0;
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

/* The pin of a hit goes before its request's end, and goes once. */
static void free_hit(struct kvmm_req *rq, const struct kvmm_hit *hit,
		     uint64_t after)
{
	if (kvmm_free(rq, 0, 0, &hit->frame, 1, after) ||
	    kvmm_free(rq, 0, 0, &hit->frame, 1, after) != -EINVAL)
		failed++;
	freed++;
}

static void one_request(struct rng *r, uint32_t me)
{
	struct kvmm_key key[BATCH];
	struct kvmm_pub pub[BATCH];
	struct kvmm_hit hit[BATCH];
	struct kvmm_match m = { .size = sizeof(m) };
	kvmm_frame_t fr[BATCH];
	struct kvmm_req *rq;
	struct kvmm_req *child;
	uint32_t i;
	int err;

	if (kvmm_req_open(c.sp, me, NULL, &rq))
		return;
	memset(pub, 0, sizeof(pub));
	for (i = 0; i < BATCH; i++)
		key[i] = fk_key(rng_below(r, 20), i);
	kvmm_match(rq, &(struct kvmm_keys){ .k = key, .n = BATCH }, 1, 0, hit,
		   &m);
	if (m.n_resident && rng_below(r, 2))
		free_hit(rq, &hit[0], rng_below(r, 2) ? rounds : 0);
	if (!kvmm_alloc(rq, 0, 0, BATCH, fr, 0)) {
		for (i = 0; i < BATCH; i++) {
			pub[i].key = fk_key(me, i);
			pub[i].frame = fr[i];
			pub[i].pos = 16 * i;
		}
		/* it may end, and its parent may, before it has its frame */
		err = kvmm_req_fork(rq, me, 0, fr, 1, rounds, 2, &child);
		if (err >= 0)
			forks++;
		else if (err != -EAGAIN)
			failed++;
		if (err >= 0)
			kvmm_req_end(child, KVMM_ENDED, rng_below(r, 2));
		switch (rng_below(r, 4)) {
		case 0:
			kvmm_free(rq, 0, 0, fr, BATCH, 0);
			break;
		case 1:
			break;		/* the end frees them */
		default:
			/* a full ring is an answer, and the end frees them */
			err = kvmm_publish(rq, 0, pub, BATCH, rounds);
			if (err && err != -EAGAIN)
				failed++;
		}
	}
	kvmm_fetch(rq, 0, BATCH, 0, deadline_in(NSEC_PER_SEC), 1);
	if (rng_below(r, 2))
		kvmm_trim(rq, 1, rng_below(r, 2));
	kvmm_req_end(rq, KVMM_ENDED, rng_below(r, 3) ? 0 : rounds);
	kvmm_step_done(c.k, rounds);
	rounds++;
}

static void *worker(void *arg)
{
	struct rng r;

	rng_seed(&r, test_seed() + (uintptr_t)arg);
	while (!stop)
		one_request(&r, (uint32_t)(uintptr_t)arg);
	working--;
	return NULL;
}

static void *poller(void *arg)
{
	struct kvmm_done d[16];

	while (working || kvmm_next_deadline(c.k) != UINT64_MAX) {
		int n = kvmm_poll(c.k, d, 16);

		if (n > 0)
			told += n;
		else
			poll(NULL, 0, 1);
		if (n == -ENOTCONN) {	/* it is asked again and again */
			failed++;
			stop = true;
			break;
		}
	}
	return NULL;
}

/* Whoever reads them may have been kept from it. */
static void room_for_answer(void)
{
	uint64_t deadline = deadline_in(20 * NSEC_PER_SEC);

	while (f.cq_tail - f.l->cq.head > LEDGER_CQ_ENTRIES - 1 - BATCH &&
	       !deadline_past(deadline))
		poll(NULL, 0, 1);
}

/* Everything is refused, so that every frame stays in circulation. */
static void answer(const struct ring_sqe *sqe, const void *array)
{
	struct ring_result res[BATCH];
	const uint32_t *frame = array;
	uint32_t i;

	for (i = 0; i < BATCH; i++)
		res[i] = (struct ring_result){ .result = i % 2 ? -ESTALE :
								 -ENOENT };
	room_for_answer();
	if (sqe->op == RING_PUBLISH || sqe->op == RING_FETCH ||
	    sqe->op == RING_FORK)
		fk_answer(&f, sqe, 0, res, sqe->n);
	if (sqe->op == RING_FREE)
		for (i = 0; i < sqe->n; i++)
			fk_give(&f, 0, frame[i], 1);
}

static void nothing_is_lost_between_threads(void **state)
{
	uint64_t ms = test_long() ? 30000 : 1500;
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);
	pthread_t t[WORKERS + 1];
	struct ring_sqe sqe;
	const void *array;
	kvmm_frame_t all[FRAMES];
	uintptr_t i;

	for (i = 0; i < 20; i++) {
		struct kvmm_key k = fk_key(i, 0);

		fk_seal(&f, 0, &k, 0, FK_FRAMES - FK_FPE + i, 1);
	}
	fk_extent_up(&f, 0, FK_EXTENTS - 1);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	working = WORKERS;
	assert_int_equal(pthread_create(&t[0], NULL, poller, NULL), 0);
	for (i = 1; i <= WORKERS; i++)
		assert_int_equal(pthread_create(&t[i], NULL, worker,
						(void *)i), 0);
	while (working || atomic_load(&kvmm_era_now(c.k)->nr_ops)) {
		while (fk_take(&f, &sqe, &array))
			answer(&sqe, array);
		if (deadline_past(deadline))
			stop = true;
		poll(NULL, 0, 0);
	}
	for (i = 0; i <= WORKERS; i++)
		pthread_join(t[i], NULL);
	kvmm_step_done(c.k, UINT64_MAX);
	assert_int_equal(fk_all_pins(&f, 0), 0);
	assert_true(rounds > 100);
	assert_true(told > 0);
	assert_true(forks > 0);
	assert_true(freed > 0);
	assert_int_equal(failed, 0);
	/* every frame is somewhere */
	while (fk_take(&f, &sqe, &array))
		answer(&sqe, array);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, FRAMES, all, 0), 0);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, all, 0), -EAGAIN);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(nothing_is_lost_between_threads),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
