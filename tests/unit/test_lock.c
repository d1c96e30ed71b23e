/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "ipc/base/lock.h"
#include "tests/lib/unit.h"

static struct kvmm_mutex outer = KVMM_MUTEX_INIT(LOCK_SPACE);
static struct kvmm_mutex inner = KVMM_MUTEX_INIT(LOCK_NODE);

/* Does @fn abort()? In a child, whose complaint goes nowhere. */
static bool aborts(void (*fn)(void))
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		signal(SIGABRT, SIG_DFL);
		close(2);
		fn();
		_exit(0);
	}
	waitpid(pid, &status, 0);
	return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void in_order(void)
{
	kvmm_lock(&outer);
	kvmm_lock(&inner);
	kvmm_unlock(&inner);
	kvmm_unlock(&outer);
	kvmm_lock(&inner);
	kvmm_unlock(&inner);
}

static __no_lock_check void against_the_order(void)
{
	kvmm_lock(&inner);
	kvmm_lock(&outer);
}

static __no_lock_check void same_rank(void)
{
	static struct kvmm_mutex other = KVMM_MUTEX_INIT(LOCK_NODE);

	kvmm_lock(&inner);
	kvmm_lock(&other);
}

static __no_lock_check void twice(void)
{
	kvmm_lock(&inner);
	kvmm_lock(&inner);
}

static __no_lock_check void not_held(void)
{
	kvmm_unlock(&inner);
}

static void order_of_the_list_is_allowed(void **state)
{
	assert_false(aborts(in_order));
}

static void order_against_the_list_is_caught(void **state)
{
	assert_true(aborts(against_the_order));
}

static void two_locks_of_one_rank_are_caught(void **state)
{
	assert_true(aborts(same_rank));
	assert_true(aborts(twice));
}

static void dropping_what_is_not_held_is_caught(void **state)
{
	assert_true(aborts(not_held));
}

static void held_is_known_for_this_thread(void **state)
{
	assert_false(kvmm_lock_held(&outer));
	kvmm_lock(&outer);
	assert_true(kvmm_lock_held(&outer));
	assert_false(kvmm_lock_held(&inner));
	kvmm_unlock(&outer);
	assert_false(kvmm_lock_held(&outer));
}

static void *try_it(void *arg)
{
	bool *got = arg;

	*got = false;
	if (kvmm_trylock(&outer)) {
		*got = true;
		kvmm_unlock(&outer);
	}
	return NULL;
}

static void trylock_fails_while_another_thread_holds_it(void **state)
{
	pthread_t t;
	bool got;

	kvmm_lock(&outer);
	assert_int_equal(pthread_create(&t, NULL, try_it, &got), 0);
	pthread_join(t, NULL);
	assert_false(got);
	kvmm_unlock(&outer);
	assert_int_equal(pthread_create(&t, NULL, try_it, &got), 0);
	pthread_join(t, NULL);
	assert_true(got);
}

struct counter {
	struct kvmm_mutex	lock;
	struct kvmm_cond	cond;
	int			value;
};

static void *count(void *arg)
{
	struct counter *c = arg;

	for (int i = 0; i < 20000; i++) {
		kvmm_lock(&c->lock);
		c->value++;
		kvmm_unlock(&c->lock);
	}
	kvmm_lock(&c->lock);
	kvmm_cond_broadcast(&c->cond);
	kvmm_unlock(&c->lock);
	return NULL;
}

static void counters_under_the_lock_lose_nothing(void **state)
{
	uint64_t deadline = deadline_in(60 * NSEC_PER_SEC);
	struct counter c = { .value = 0 };
	pthread_t t[2];
	int err = 0;

	kvmm_mutex_init(&c.lock, LOCK_TEST);
	kvmm_cond_init(&c.cond);
	for (int i = 0; i < 2; i++)
		assert_int_equal(pthread_create(&t[i], NULL, count, &c), 0);
	kvmm_lock(&c.lock);
	while (c.value < 40000 && !err)
		err = kvmm_cond_wait(&c.cond, &c.lock, deadline);
	kvmm_unlock(&c.lock);
	for (int i = 0; i < 2; i++)
		pthread_join(t[i], NULL);
	assert_int_equal(err, 0);
	assert_int_equal(c.value, 40000);
	kvmm_cond_fini(&c.cond);
	kvmm_mutex_fini(&c.lock);
}

static void wait_ends_at_its_deadline(void **state)
{
	struct counter c = { .value = 0 };
	uint64_t deadline;
	int err = 0;

	kvmm_mutex_init(&c.lock, LOCK_TEST);
	kvmm_cond_init(&c.cond);
	kvmm_lock(&c.lock);
	deadline = deadline_in(5 * NSEC_PER_MSEC);
	while (!err)
		err = kvmm_cond_wait(&c.cond, &c.lock, deadline);
	assert_true(kvmm_lock_held(&c.lock));
	kvmm_unlock(&c.lock);
	assert_int_equal(err, -ETIMEDOUT);
	assert_true(deadline_past(deadline));
	kvmm_cond_fini(&c.cond);
	kvmm_mutex_fini(&c.lock);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(order_of_the_list_is_allowed),
		cmocka_unit_test(order_against_the_list_is_caught),
		cmocka_unit_test(two_locks_of_one_rank_are_caught),
		cmocka_unit_test(dropping_what_is_not_held_is_caught),
		cmocka_unit_test(held_is_known_for_this_thread),
		cmocka_unit_test(trylock_fails_while_another_thread_holds_it),
		cmocka_unit_test(counters_under_the_lock_lose_nothing),
		cmocka_unit_test(wait_ends_at_its_deadline),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
