/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "daemon/node/work.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "tests/lib/unit.h"

#define PATIENCE_NS	(20 * NSEC_PER_SEC)

struct job {
	struct work	work;
	pthread_t	worker;
	pthread_t	loop;
	sem_t		*gate;
	unsigned int	order;
	unsigned int	left;
	struct work_pool *pool;
};

static unsigned int nr_done;

static void job_fn(struct work *w)
{
	struct job *j = container_of(w, struct job, work);

	j->worker = pthread_self();
	if (j->gate)
		while (sem_wait(j->gate) < 0)
			;
}

static void job_done(struct work *w)
{
	struct job *j = container_of(w, struct job, work);

	j->loop = pthread_self();
	j->order = ++nr_done;
	if (j->left) {
		j->left--;
		work_submit(j->pool, w);
	}
}

static struct work_pool *pool_new(unsigned int threads)
{
	struct work_pool *p;

	nr_done = 0;
	assert_int_equal(work_create("test", threads, &p), 0);
	return p;
}

static void job_init(struct job *j)
{
	memset(j, 0, sizeof(*j));
	j->work.fn = job_fn;
	j->work.done = job_done;
}

static bool readable(int fd, int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, ms) == 1;
}

static void poll_until(struct work_pool *p, unsigned int n)
{
	uint64_t end = deadline_in(PATIENCE_NS);

	while (nr_done < n && !deadline_past(end)) {
		if (work_poll(p, 0))
			continue;
		readable(work_fd(p), 50);
	}
	assert_int_equal(nr_done, n);
}

static void done_runs_on_the_polling_thread(void **state)
{
	struct work_pool *p = pool_new(2);
	struct job j;

	job_init(&j);
	work_submit(p, &j.work);
	assert_int_equal(work_pending(p), 1);
	poll_until(p, 1);
	assert_true(pthread_equal(j.loop, pthread_self()));
	assert_false(pthread_equal(j.worker, pthread_self()));
	assert_int_equal(work_pending(p), 0);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
}

static void one_worker_keeps_the_order(void **state)
{
	struct work_pool *p = pool_new(1);
	struct job j[100];

	for (unsigned int i = 0; i < ARRAY_SIZE(j); i++) {
		job_init(&j[i]);
		work_submit(p, &j[i].work);
	}
	poll_until(p, ARRAY_SIZE(j));
	for (unsigned int i = 0; i < ARRAY_SIZE(j); i++)
		assert_int_equal(j[i].order, i + 1);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
}

static void budget_bounds_a_poll(void **state)
{
	struct work_pool *p = pool_new(1);
	uint64_t end = deadline_in(PATIENCE_NS);
	struct job j[5];

	for (unsigned int i = 0; i < ARRAY_SIZE(j); i++) {
		job_init(&j[i]);
		work_submit(p, &j[i].work);
	}
	while (nr_done < ARRAY_SIZE(j) && !deadline_past(end)) {
		unsigned int before = nr_done;

		assert_true(work_poll(p, 2) <= 2);
		assert_true(nr_done - before <= 2);
		/* what was left over must keep the loop awake */
		if (!work_sleep(p, true))
			readable(work_fd(p), 50);
		work_sleep(p, false);
	}
	assert_int_equal(nr_done, ARRAY_SIZE(j));
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
}

static atomic_uint nr_silent;

static void silent_fn(struct work *w)
{
	atomic_fetch_add(&nr_silent, 1);
}

/* Until the only worker has really put everything before this behind it. */
static void settle(struct work_pool *p)
{
	struct work w = { .fn = silent_fn };
	uint64_t end = deadline_in(PATIENCE_NS);
	unsigned int before = atomic_load(&nr_silent);

	work_submit(p, &w);
	while (work_pending(p) > 1 || atomic_load(&nr_silent) == before) {
		assert_false(deadline_past(end));
		usleep(1000);
	}
}

static void eventfd_is_quiet_while_the_loop_is_awake(void **state)
{
	struct work_pool *p = pool_new(1);
	struct job j;

	assert_false(work_sleep(p, true));
	work_sleep(p, false);
	job_init(&j);
	work_submit(p, &j.work);
	settle(p);
	/* done, and nobody was told: a loop that asks learns of it */
	assert_false(readable(work_fd(p), 0));
	assert_true(work_sleep(p, true));
	assert_int_equal(work_poll(p, 0), 1);

	/* asleep: the next end is told, once */
	assert_false(work_sleep(p, true));
	work_submit(p, &j.work);
	assert_true(readable(work_fd(p), 10000));
	work_sleep(p, false);
	settle(p);
	assert_int_equal(work_poll(p, 0), 1);
	assert_false(readable(work_fd(p), 0));
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
}

/* A lost wake-up shows as a poll that runs into its timeout. */
static void no_wakeup_is_lost(void **state)
{
	unsigned int rounds = test_long() ? 200000 : 5000;
	struct work_pool *p = pool_new(2);
	struct job j[2];

	for (unsigned int i = 0; i < ARRAY_SIZE(j); i++) {
		job_init(&j[i]);
		j[i].pool = p;
		j[i].left = rounds;
		work_submit(p, &j[i].work);
	}
	while (nr_done < ARRAY_SIZE(j) * (rounds + 1)) {
		if (!work_sleep(p, true))
			assert_true(readable(work_fd(p), 20000));
		work_sleep(p, false);
		work_poll(p, 0);
	}
	assert_int_equal(work_pending(p), 0);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
}

static void cancel_takes_back_only_what_has_not_begun(void **state)
{
	struct work_pool *p = pool_new(1);
	struct job j[3];
	sem_t gate;

	sem_init(&gate, 0, 0);
	for (unsigned int i = 0; i < ARRAY_SIZE(j); i++) {
		job_init(&j[i]);
		j[i].gate = &gate;
		work_submit(p, &j[i].work);
	}
	usleep(20000);
	assert_false(work_cancel(p, &j[0].work));
	assert_true(work_cancel(p, &j[2].work));
	assert_false(work_cancel(p, &j[2].work));
	assert_int_equal(work_pending(p), 2);
	sem_post(&gate);
	sem_post(&gate);
	poll_until(p, 2);
	assert_int_equal(j[2].order, 0);

	/* the queue is whole after its tail was taken away */
	work_submit(p, &j[2].work);
	sem_post(&gate);
	poll_until(p, 3);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
	sem_destroy(&gate);
}

/* The first has the only worker; the others wait until @gate is posted. */
static void queue_behind_a_gate(struct work_pool *p, sem_t *gate,
				struct job *first)
{
	job_init(first);
	first->gate = gate;
	work_submit(p, &first->work);
	usleep(20000);
}

static void others_go_before_bulk(void **state)
{
	struct work_pool *p = pool_new(1);
	struct job first, bulk[100], one;
	sem_t gate;

	sem_init(&gate, 0, 0);
	queue_behind_a_gate(p, &gate, &first);
	for (unsigned int i = 0; i < ARRAY_SIZE(bulk); i++) {
		job_init(&bulk[i]);
		bulk[i].work.bulk = true;
		work_submit(p, &bulk[i].work);
	}
	job_init(&one);
	work_submit(p, &one.work);
	/* in the middle and at the end */
	assert_true(work_cancel(p, &bulk[99].work));
	assert_true(work_cancel(p, &bulk[50].work));
	sem_post(&gate);
	poll_until(p, 100);
	assert_int_equal(one.order, 2);
	for (unsigned int i = 1; i < 50; i++)
		assert_int_equal(bulk[i].order, bulk[i - 1].order + 1);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
	sem_destroy(&gate);
}

static void bulk_gets_its_turn(void **state)
{
	struct work_pool *p = pool_new(1);
	struct job first, j[100], bulk;
	sem_t gate;

	sem_init(&gate, 0, 0);
	queue_behind_a_gate(p, &gate, &first);
	for (unsigned int i = 0; i < ARRAY_SIZE(j); i++) {
		job_init(&j[i]);
		work_submit(p, &j[i].work);
	}
	job_init(&bulk);
	bulk.work.bulk = true;
	work_submit(p, &bulk.work);
	sem_post(&gate);
	poll_until(p, 102);
	assert_in_range(bulk.order, 3, 8);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
	sem_destroy(&gate);
}

static void destroy_drains_what_callbacks_submit(void **state)
{
	struct work_pool *p = pool_new(1);
	struct job j;

	job_init(&j);
	j.pool = p;
	j.left = 3;
	work_submit(p, &j.work);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
	assert_int_equal(nr_done, 4);
}

static void destroy_keeps_its_deadline_over_a_stuck_job(void **state)
{
	struct work_pool *p = pool_new(1);
	struct job j;
	sem_t gate;

	sem_init(&gate, 0, 0);
	job_init(&j);
	j.gate = &gate;
	work_submit(p, &j.work);
	assert_int_equal(work_destroy(p, deadline_in(50 * NSEC_PER_MSEC)),
			 -ETIMEDOUT);
	assert_int_equal(nr_done, 0);
	sem_post(&gate);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
	assert_int_equal(nr_done, 1);
	sem_destroy(&gate);
}

static void job_without_callback_runs(void **state)
{
	struct work_pool *p = pool_new(1);
	struct work w = { .fn = silent_fn };
	unsigned int before = atomic_load(&nr_silent);

	work_submit(p, &w);
	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
	assert_int_equal(atomic_load(&nr_silent), before + 1);
}

static void bad_arguments_are_refused(void **state)
{
	struct work_pool *p;

	assert_int_equal(work_create("x", 0, &p), -EINVAL);
	assert_int_equal(work_create("x", 65, &p), -EINVAL);
	assert_int_equal(work_destroy(NULL, 0), 0);
}

static void nothing_is_left_open(void **state)
{
	int before = fd_count();
	struct work_pool *p = pool_new(3);

	assert_int_equal(work_destroy(p, deadline_in(PATIENCE_NS)), 0);
	assert_int_equal(fd_count(), before);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(done_runs_on_the_polling_thread),
		cmocka_unit_test(one_worker_keeps_the_order),
		cmocka_unit_test(budget_bounds_a_poll),
		cmocka_unit_test(eventfd_is_quiet_while_the_loop_is_awake),
		cmocka_unit_test(no_wakeup_is_lost),
		cmocka_unit_test(cancel_takes_back_only_what_has_not_begun),
		cmocka_unit_test(others_go_before_bulk),
		cmocka_unit_test(bulk_gets_its_turn),
		cmocka_unit_test(destroy_drains_what_callbacks_submit),
		cmocka_unit_test(destroy_keeps_its_deadline_over_a_stuck_job),
		cmocka_unit_test(job_without_callback_runs),
		cmocka_unit_test(bad_arguments_are_refused),
		cmocka_unit_test(nothing_is_left_open),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
