/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What members of an engine tell each other through their ledgers: decisions and
 * counters, also while some have come to the next daemon and some have not.
 *
 * Each member has a daemon of its own, made by hand, and is told of the others'
 * ledgers when the test likes.
 */
#include <poll.h>
#include <pthread.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define MEMBERS	4
#define WAIT_NS	(20 * NSEC_PER_SEC)

/* One process of the engine, if it were one. */
struct member {
	struct fk	f;
	struct kvmm	*k;
	struct kvmm_engine e;
};

static struct member m[MEMBERS];
static unsigned int nr;

static int setup(void **state)
{
	nr = 0;
	return 0;
}

static int teardown(void **state)
{
	unsigned int i;

	for (i = 0; i < nr; i++) {
		kvmm_close(m[i].k);
		fk_stop(&m[i].f);
	}
	return 0;
}

static struct ledger_talk *talk(unsigned int i)
{
	return (void *)((char *)m[i].f.l + m[i].f.l->talk_off);
}

static void poll_all(void)
{
	struct kvmm_done d;
	unsigned int i;

	for (i = 0; i < nr; i++)
		kvmm_poll(m[i].k, &d, 1);
}

static bool past(unsigned int i)
{
	return atomic_load(&kvmm_era_now(m[i].k)->older);
}

static void alone(void)
{
	const struct kvmm_open_opts o = {
		.size = sizeof(o), .call_timeout_ns = FC_TIMEOUT_NS,
	};

	assert_int_equal(fk_start(&m[nr].f, 1), 0);
	assert_int_equal(kvmm_open(m[nr].f.path, &o, &m[nr].k), 0);
	nr++;
}

static unsigned int join(uint32_t rank, uint32_t world, uint32_t flags)
{
	unsigned int i = nr;

	alone();
	m[i].e = (struct kvmm_engine){
		.size = sizeof(m[i].e), .token = "0123456789abcde",
		.rank = rank, .world = world, .flags = flags,
	};
	assert_int_equal(kvmm_join(m[i].k, &m[i].e), 0);
	return i;
}

/* Tell @i of @j's ledger, and see that it has taken it. */
static void meet(unsigned int i, unsigned int j)
{
	uint64_t deadline = deadline_in(WAIT_NS);
	struct wire_member w = {
		.h = { .type = WIRE_MEMBER, .len = sizeof(w) },
		.rank = m[j].e.rank, .world = m[j].e.world,
		.flags = m[j].e.flags,
		.ledger_bytes = m[j].f.ledger_shm.bytes,
	};
	_Atomic uint32_t *met = m[j].e.flags & KVMM_NO_STEP ?
				&talk(i)->met_leader :
				&talk(i)->met[m[j].e.rank];
	struct kvmm_done d;

	assert_int_equal(sock_send(m[i].f.sock, &w.h,
				   &m[j].f.ledger_shm.ro_fd, 1), 0);
	while (*met != m[j].f.l->client) {
		assert_false(deadline_past(deadline));
		kvmm_poll(m[i].k, &d, 1);
		poll(NULL, 0, 1);
	}
}

static void meet_all(void)
{
	unsigned int i, j;

	for (i = 0; i < nr; i++)
		for (j = 0; j < nr; j++)
			if (i != j)
				meet(i, j);
}

/* A leader without a step word, and @n ranks. */
static void engine_of(unsigned int n)
{
	unsigned int i;

	join(0, n, KVMM_LEADER | KVMM_NO_STEP);
	for (i = 0; i < n; i++)
		join(i, n, 0);
	meet_all();
}

/* @i's daemon is replaced; it hears of it and comes to the next one. */
static void come_to_the_next(unsigned int i)
{
	uint64_t deadline = deadline_in(WAIT_NS);
	uint64_t epoch = kvmm_epoch(m[i].k);
	struct kvmm_done d;

	fk_restart(&m[i].f);
	while (kvmm_epoch(m[i].k) == epoch) {
		assert_false(deadline_past(deadline));
		kvmm_poll(m[i].k, &d, 1);
		poll(NULL, 0, 1);
	}
}

static int post(unsigned int i, uint64_t step, uint64_t value)
{
	return kvmm_agree_post(m[i].k, step, &value, 1);
}

/* What @i gets at once, or -errno. */
static int64_t get(unsigned int i, uint64_t step)
{
	uint64_t v = 0;
	int err = kvmm_agree_get(m[i].k, step, &v, 1, 0);

	return err ? err : (int64_t)v;
}

static uint64_t min_of(unsigned int i, unsigned int slot, uint64_t mine)
{
	uint64_t min = 12345;

	assert_int_equal(kvmm_agree_min(m[i].k, slot, mine, &min), 0);
	return min;
}

/* -- decisions ----------------------------------------------------------------- */

static void a_decision_is_got_by_every_rank(void **state)
{
	uint64_t v[64], got[64];
	unsigned int i, n;

	engine_of(3);
	for (n = 1; n <= 64; n++) {
		for (i = 0; i < n; i++)
			v[i] = n * 1000 + i;
		assert_int_equal(kvmm_agree_post(m[0].k, n, v, n), 0);
		for (i = 0; i < nr; i++) {
			memset(got, 0, sizeof(got));
			assert_int_equal(kvmm_agree_get(m[i].k, n, got, n, 0),
					 0);
			assert_memory_equal(got, v, n * sizeof(*v));
		}
	}
}

static void it_is_of_exactly_that_step(void **state)
{
	uint64_t v[3];

	engine_of(1);
	assert_int_equal(get(1, 0), -ETIMEDOUT);
	assert_int_equal(post(0, 0, 10), 0);
	assert_int_equal(get(1, 0), 10);
	assert_int_equal(get(1, 1), -ETIMEDOUT);
	assert_int_equal(get(1, 1024), -ETIMEDOUT);
	assert_int_equal(post(0, 1024, 11), 0);
	assert_int_equal(get(1, 1024), 11);
	assert_int_equal(get(1, 0), -ESTALE);
	assert_non_null(strstr(kvmm_error(m[1].k), "overwritten"));
	assert_int_equal(kvmm_agree_get(m[1].k, 1024, v, 3, 0), -EMSGSIZE);
	assert_non_null(strstr(kvmm_error(m[1].k), "has 1 values, not 3"));
	assert_int_equal(post(0, UINT64_MAX - 1, 12), 0);
	assert_int_equal(get(1, UINT64_MAX - 1), 12);
}

static void a_step_is_decided_once(void **state)
{
	engine_of(1);
	assert_int_equal(post(0, 7, 1), 0);
	assert_int_equal(post(0, 7, 2), -EEXIST);
	assert_int_equal(post(0, 7 + 1024, 3), 0);
	assert_int_equal(post(0, 7, 2), -ESTALE);
	assert_int_equal(post(0, 6, 4), 0);
	assert_int_equal(get(1, 6), 4);
	assert_int_equal(get(1, 7 + 1024), 3);
}

static void what_makes_no_sense_is_refused(void **state)
{
	uint64_t v[65] = { 0 };

	engine_of(1);
	assert_int_equal(post(1, 1, 1), -EPERM);
	assert_int_equal(kvmm_agree_post(m[0].k, 1, v, 0), -EINVAL);
	assert_int_equal(kvmm_agree_post(m[0].k, 1, v, 65), -EINVAL);
	assert_int_equal(kvmm_agree_post(m[0].k, UINT64_MAX, v, 1), -EINVAL);
	assert_int_equal(kvmm_agree_get(m[1].k, 1, v, 0, 0), -EINVAL);
	assert_int_equal(kvmm_agree_get(m[1].k, 1, v, 65, 0), -EINVAL);
	assert_int_equal(kvmm_agree_min(m[1].k, 64, 0, v), -EINVAL);
}

static void a_process_alone_agrees_with_itself(void **state)
{
	alone();
	assert_int_equal(get(0, 1), -ETIMEDOUT);
	assert_int_equal(post(0, 1, 5), 0);
	assert_int_equal(get(0, 1), 5);
	assert_int_equal(min_of(0, 3, 9), 9);
	come_to_the_next(0);
	assert_int_equal(get(0, 1), 5);
	assert_int_equal(post(0, 1, 6), -EEXIST);
	assert_int_equal(post(0, 2, 6), 0);
	assert_int_equal(get(0, 2), 6);
	assert_false(past(0));
}

/* -- waiting ------------------------------------------------------------------- */

static void a_wait_ends_at_its_deadline(void **state)
{
	uint64_t t0, v;

	engine_of(1);
	t0 = now_ns();
	assert_int_equal(kvmm_agree_get(m[1].k, 1, &v, 1,
					t0 + 20 * NSEC_PER_MSEC), -ETIMEDOUT);
	assert_in_range(now_ns() - t0, 20 * NSEC_PER_MSEC, NSEC_PER_SEC);
}

static void *post_late(void *arg)
{
	poll(NULL, 0, 20);
	post(0, 1, 77);
	return NULL;
}

static void a_wait_ends_with_the_decision(void **state)
{
	pthread_t t;
	uint64_t v;

	engine_of(1);
	assert_int_equal(pthread_create(&t, NULL, post_late, NULL), 0);
	assert_int_equal(kvmm_agree_get(m[1].k, 1, &v, 1,
					deadline_in(WAIT_NS)), 0);
	assert_int_equal(v, 77);
	pthread_join(t, NULL);
}

static void *die_late(void *arg)
{
	poll(NULL, 0, 20);
	atomic_store(&m[1].f.l->engine_state, ENGINE_DYING);
	return NULL;
}

static void a_wait_ends_when_the_engine_dies(void **state)
{
	uint64_t v, t0 = now_ns();
	pthread_t t;

	engine_of(1);
	post(0, 1, 5);
	assert_int_equal(pthread_create(&t, NULL, die_late, NULL), 0);
	assert_int_equal(kvmm_agree_get(m[1].k, 2, &v, 1,
					deadline_in(WAIT_NS)), -EOWNERDEAD);
	assert_in_range(now_ns() - t0, 0, WAIT_NS / 2);
	pthread_join(t, NULL);
	/* what was decided before is */
	assert_int_equal(get(1, 1), 5);
	assert_int_equal(kvmm_agree_min(m[1].k, 0, 3, &v), -EOWNERDEAD);
	m[0].f.l->engine_state = ENGINE_DYING;
	assert_int_equal(post(0, 2, 5), -EOWNERDEAD);
	assert_int_equal(get(0, 2), -EOWNERDEAD);
}

/* -- counters ------------------------------------------------------------------- */

static void the_minimum_is_of_all_ranks(void **state)
{
	unsigned int i;

	join(0, 3, KVMM_LEADER | KVMM_NO_STEP);
	for (i = 0; i < 3; i++)
		join(i, 3, 0);
	assert_int_equal(min_of(1, 0, 9), 0);
	meet(0, 1);
	meet(0, 2);
	assert_int_equal(min_of(0, 0, 0), 0);
	meet_all();
	assert_int_equal(min_of(1, 0, 9), 0);
	assert_int_equal(min_of(2, 0, 8), 0);
	assert_int_equal(min_of(3, 0, 7), 7);
	assert_int_equal(min_of(1, 0, 6), 6);
	assert_int_equal(min_of(1, 0, 10), 7);
	/* the leader has none and does not count */
	assert_int_equal(min_of(0, 0, 1), 7);
	assert_int_equal(min_of(1, 0, 10), 7);
	/* each slot by itself */
	assert_int_equal(min_of(1, 63, 5), 0);
	assert_int_equal(min_of(2, 63, 5), 0);
	assert_int_equal(min_of(3, 63, 4), 4);
	assert_int_equal(min_of(0, 62, 4), 0);
}

static void a_leader_that_computes_counts(void **state)
{
	join(0, 2, KVMM_LEADER);
	join(1, 2, 0);
	meet_all();
	assert_int_equal(min_of(1, 0, 5), 0);
	assert_int_equal(min_of(0, 0, 3), 3);
	assert_int_equal(min_of(1, 0, 5), 3);
	assert_int_equal(post(0, 1, 4), 0);
	assert_int_equal(get(1, 1), 4);
}

/* -- a change of daemon ------------------------------------------------------------ */

static void all_hear_each_other(uint64_t step)
{
	unsigned int i;

	assert_int_equal(post(0, step, step * 3), 0);
	for (i = 0; i < nr; i++) {
		assert_int_equal(get(i, step), step * 3);
		/* and everything that was decided before */
		assert_int_equal(get(i, step / 2), step / 2 * 3);
	}
	for (i = 1; i < nr; i++)
		min_of(i, 0, step + i);
	for (i = 0; i < nr; i++)
		assert_int_equal(min_of(i, 0, i ? step + i : 0), step + 1);
}

static void gone_to(const unsigned int *order)
{
	uint64_t step = 2;
	unsigned int i;

	engine_of(2);
	post(0, 1, 3);
	all_hear_each_other(step);
	for (i = 0; i < nr; i++) {
		come_to_the_next(order[i]);
		all_hear_each_other(++step);
	}
	/* they come to know each other one after the other, too */
	for (i = 0; i < nr; i++) {
		unsigned int j;

		for (j = 0; j < nr; j++)
			if (order[i] != j)
				meet(order[i], j);
		all_hear_each_other(++step);
	}
	poll_all();
	for (i = 0; i < nr; i++)
		assert_false(past(i));
	all_hear_each_other(++step);
}

static void the_leader_may_come_to_the_next_daemon_first(void **state)
{
	gone_to((const unsigned int[]){ 0, 1, 2 });
}

static void it_may_come_last(void **state)
{
	gone_to((const unsigned int[]){ 2, 1, 0 });
}

static void it_may_come_in_between(void **state)
{
	gone_to((const unsigned int[]){ 1, 0, 2 });
}

static void members_may_be_daemons_apart(void **state)
{
	uint64_t step = 2;
	unsigned int i;

	engine_of(2);
	post(0, 1, 3);
	all_hear_each_other(step);
	for (i = 0; i < LIB_PAST_ERAS; i++) {
		come_to_the_next(0);
		all_hear_each_other(++step);
	}
	come_to_the_next(1);
	all_hear_each_other(++step);
	come_to_the_next(1);
	all_hear_each_other(++step);
	come_to_the_next(2);
	meet_all();
	poll_all();
	all_hear_each_other(++step);
	for (i = 0; i < nr; i++)
		assert_false(past(i));
}

/* Who never comes again keeps no memory for ever. */
static void only_so_many_daemons_are_remembered(void **state)
{
	struct kvmm_era *e;
	unsigned int i, n = 0;

	engine_of(1);
	for (i = 0; i < 2 * LIB_PAST_ERAS; i++)
		come_to_the_next(0);
	for (e = kvmm_era_now(m[0].k); e; e = atomic_load(&e->older))
		n++;
	assert_int_equal(n, LIB_PAST_ERAS + 1);
}

/* To a follower whose daemon lives on the leader comes back as another one. */
static void a_member_that_lost_its_connection_comes_back(void **state)
{
	struct shm old;
	uint64_t step = 2;

	engine_of(1);
	post(0, 1, 3);
	all_hear_each_other(step);
	/* as the next ledger looks before anybody has entered it */
	assert_int_equal(shm_create(&old, "next", m[0].f.ledger_shm.bytes, 1),
			 0);
	memcpy(old.addr, m[0].f.l, sizeof(struct ledger));
	((struct ledger *)old.addr)->client = 99;
	{
		struct wire_member w = {
			.h = { .type = WIRE_MEMBER, .len = sizeof(w) },
			.world = 1, .flags = m[0].e.flags,
		};
		struct kvmm_done d;

		assert_int_equal(sock_send(m[1].f.sock, &w.h, &old.ro_fd, 1),
				 0);
		while (talk(1)->met_leader != 99)
			kvmm_poll(m[1].k, &d, 1);
	}
	all_hear_each_other(++step);
	shm_fini(&old);
	come_to_the_next(0);
	all_hear_each_other(++step);
	meet(1, 0);
	all_hear_each_other(++step);
	meet(0, 1);
	poll_all();
	assert_false(past(0));
	assert_null(atomic_load(&kvmm_era_now(m[1].k)->leader->prev));
	all_hear_each_other(++step);
}

/* -- what others write ---------------------------------------------------------------- */

static void garbage_of_the_leader_is_no_harm(void **state)
{
	struct ledger *l, head;
	unsigned int i;
	uint64_t v[64];
	struct rng r;

	rng_seed(&r, test_seed());
	engine_of(2);
	l = m[0].f.l;
	memcpy(&head, l, sizeof(head));
	for (i = 0; i < 2000; i++) {
		uint64_t step = rng_below(&r, 4096);
		struct ledger_agree *a = (void *)((char *)l +
			m[1].f.l->agree_off);

		rng_fill(&r, &a[step % 1024], sizeof(*a));
		if (i & 1)
			a[step % 1024].seq = step + 1;
		if (i & 2)
			a[step % 1024].n = rng_below(&r, 70);
		kvmm_agree_get(m[1].k, step, v, 1 + rng_below(&r, 64), 0);
		if (!(i % 64))
			rng_fill(&r, l, sizeof(*l));
	}
	/* what others wrote of the rank: it counts, as it has to */
	rng_fill(&r, talk(2), sizeof(struct ledger_talk));
	kvmm_agree_min(m[1].k, 0, 1, v);
	/* the leader itself lives on with what it wrote, for as long as it can */
	memcpy(l, &head, sizeof(head));
	poll_all();
}

/* -- threads --------------------------------------------------------------------------- */

#define READERS	3
#define GOOD	100000u		/* decisions that each of them is to get */
#define MOST	(1u << 22)	/* steps, however slow they are */

static _Atomic uint64_t newest, good[READERS];
static _Atomic bool over;

static uint64_t value_of(uint64_t step, unsigned int i)
{
	return step * 0x9e3779b97f4a7c15u + i;
}

static bool all_good(void)
{
	unsigned int i = 0;

	while (i < READERS && atomic_load(&good[i]) >= GOOD)
		i++;
	return i == READERS;
}

static void *write_steps(void *arg)
{
	uint64_t v[64], step;
	unsigned int i;

	for (step = 1; step <= MOST && !all_good(); step++) {
		for (i = 0; i < 64; i++)
			v[i] = value_of(step, i);
		kvmm_agree_post(m[0].k, step, v, 64);
		atomic_store(&newest, step);
	}
	atomic_store(&over, true);
	return NULL;
}

/* Who is near the end of the ring reads what is being overwritten. */
static void *read_steps(void *arg)
{
	unsigned int who = (unsigned int)(uintptr_t)arg, i;
	struct rng r;
	uint64_t v[64], top;

	rng_seed(&r, test_seed() + who);
	while (!atomic_load(&over)) {
		uint64_t back = rng_below(&r, 2) ? rng_below(&r, 4) :
						   1010 + rng_below(&r, 16);
		uint64_t step;
		int err;

		top = atomic_load(&newest);
		step = top > back ? top - back + 2 : 1;
		err = kvmm_agree_get(m[who].k, step, v, 64, 0);
		if (err && err != -ETIMEDOUT && err != -ESTALE)
			return (void *)1;
		for (i = 0; !err && i < 64; i++)
			if (v[i] != value_of(step, i))
				return (void *)2;
		if (!err)
			atomic_fetch_add(&good[who], 1);
	}
	return NULL;
}

static void nobody_gets_a_mix(void **state)
{
	pthread_t w, r[READERS];
	unsigned int i;
	void *ret;

	engine_of(2);
	newest = 0;
	over = false;
	for (i = 0; i < READERS; i++) {
		good[i] = 0;
		assert_int_equal(pthread_create(&r[i], NULL, read_steps,
						(void *)(uintptr_t)i), 0);
	}
	assert_int_equal(pthread_create(&w, NULL, write_steps, NULL), 0);
	pthread_join(w, NULL);
	for (i = 0; i < READERS; i++) {
		pthread_join(r[i], &ret);
		assert_int_equal((uintptr_t)ret, 0);
		assert_in_range(good[i], 1, UINT64_MAX);
	}
}

#define CHANGES	12

static _Atomic bool stop;

/* Each step, in order, by who polls, and so changes its daemon, meanwhile. */
static void *follow(void *arg)
{
	unsigned int who = (unsigned int)(uintptr_t)arg;
	uint64_t v, step;

	for (step = 1; !atomic_load(&stop); step++) {
		if (kvmm_agree_get(m[who].k, step, &v, 1,
				   deadline_in(WAIT_NS)) ||
		    v != value_of(step, 0))
			return (void *)(uintptr_t)step;
		kvmm_agree_min(m[who].k, 0, step, &v);
	}
	return NULL;
}

/* As fast as they follow. */
static void *lead(void *arg)
{
	uint64_t step, v, min;

	for (step = 1; !atomic_load(&stop); step++) {
		v = value_of(step, 0);
		if (kvmm_agree_post(m[0].k, step, &v, 1))
			return (void *)(uintptr_t)step;
		do {
			if (kvmm_agree_min(m[0].k, 0, 0, &min))
				return (void *)(uintptr_t)step;
		} while (min + 100 < step && !atomic_load(&stop));
	}
	/* nobody is left waiting */
	for (v = 0; v < 2; v++, step++) {
		min = value_of(step, 0);
		kvmm_agree_post(m[0].k, step, &min, 1);
	}
	return NULL;
}

static void decisions_flow_while_daemons_change(void **state)
{
	pthread_t t[3];
	struct rng r;
	unsigned int i;
	void *ret;

	rng_seed(&r, test_seed());
	engine_of(2);
	stop = false;
	for (i = 0; i < 3; i++)
		assert_int_equal(pthread_create(&t[i], NULL, i ? follow : lead,
						(void *)(uintptr_t)i), 0);
	for (i = 0; i < CHANGES; i++) {
		unsigned int at = rng_below(&r, 3), j;

		for (j = 0; j < 3; j++) {
			come_to_the_next((at + j) % 3);
			poll_all();
		}
		meet_all();
		poll_all();
	}
	atomic_store(&stop, true);
	for (i = 3; i-- > 0; ) {
		pthread_join(t[2 - i], &ret);
		assert_int_equal((uintptr_t)ret, 0);
	}
	for (i = 0; i < 3; i++)
		assert_false(past(i));
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_decision_is_got_by_every_rank),
		T(it_is_of_exactly_that_step),
		T(a_step_is_decided_once),
		T(what_makes_no_sense_is_refused),
		T(a_process_alone_agrees_with_itself),
		T(a_wait_ends_at_its_deadline),
		T(a_wait_ends_with_the_decision),
		T(a_wait_ends_when_the_engine_dies),
		T(the_minimum_is_of_all_ranks),
		T(a_leader_that_computes_counts),
		T(the_leader_may_come_to_the_next_daemon_first),
		T(it_may_come_last),
		T(it_may_come_in_between),
		T(members_may_be_daemons_apart),
		T(only_so_many_daemons_are_remembered),
		T(a_member_that_lost_its_connection_comes_back),
		T(garbage_of_the_leader_is_no_harm),
		T(nobody_gets_a_mix),
		T(decisions_flow_while_daemons_change),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
