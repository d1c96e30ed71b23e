/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests are forked, against a real kvmmd: pages are shared, tails are copied,
 * and whoever ends first, and whatever dies, nothing is left and no byte is wrong.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define BACK_MS		5000
#define WAIT_MS		20000
#define KIDS		16u
#define PAGES		12u

/* A request that has hits, and one OPEN frame with the bytes of a chain's page. */
struct parent {
	struct kvmm_req	*rq;
	kvmm_frame_t	tail;
};

static void tail_of(struct tc *c, struct parent *p, uint64_t chain, uint32_t i)
{
	struct kvmm_key key;

	tc_alloc(c, p->rq, 0, 1, &p->tail);
	tc_key(c, chain, i, TC_FULL, &key);
	tc_fill(c, 0, p->tail, &key);
}

static void parent_of(struct tc *c, struct parent *p, uint64_t chain,
		      uint32_t n)
{
	p->rq = tc_req(c, 1);
	T_EQ(tc_match(c, p->rq, chain, n, NULL, NULL), n);
	tail_of(c, p, chain, n);
}

/* Fork with that tail; frames may have to come first. */
static struct kvmm_req *fork_of(struct tc *c, const struct parent *p,
				uint64_t after, uint64_t tag)
{
	struct t_wait w = t_wait_begin(WAIT_MS);
	struct kvmm_req *child;
	int ret;

	while ((ret = kvmm_req_fork(p->rq, 100 + tag, c->node, &p->tail, 1,
				    after, tag, &child)) == -EAGAIN) {
		T_CHECK(t_wait_more(&w));
		tc_poll(c);
		tc_sync(c, 0);
	}
	T_EQ(ret, 1);
	return child;
}

/*
 * The children's frames, once they have what the parent's had: of tags @tag to
 * @tag + @n - 1, in whichever order workers get to them.
 */
static void copied(struct tc *c, uint64_t tag, uint32_t n, kvmm_frame_t *fr)
{
	struct t_wait w = t_wait_begin(WAIT_MS);
	struct kvmm_done d;
	uint32_t got = 0;

	while (got < n) {
		if (kvmm_poll(c->k, &d, 1) <= 0) {
			T_CHECK(t_wait_more(&w), "%u of %u", got, n);
			continue;
		}
		T_EQ(d.op, KVMM_OP_FORK);
		if (d.tag < tag || d.tag >= tag + n)
			continue;
		T_EQ(d.result, 0);
		T_EQ(d.n, 1);
		T_EQ(d.res[0].result, 0);
		fr[d.tag - tag] = d.res[0].frame;
		got++;
	}
}

static void expect_bytes(struct tc *c, kvmm_frame_t frame, uint64_t chain,
			 uint32_t i)
{
	struct kvmm_key key;

	tc_key(c, chain, i, TC_FULL, &key);
	T_EQ(tc_wrong(c, 0, frame, &key), 0);
}

static void publish_as(struct tc *c, struct kvmm_req *rq, kvmm_frame_t frame,
		       uint64_t chain, uint32_t i)
{
	uint64_t tag = ++c->tag;
	struct kvmm_pub pub;
	struct kvmm_done d;

	tc_pub(c, &pub, chain, i, TC_FULL, frame, 0);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, tag));
	T_CHECK(tc_wait(c, tag, &d, WAIT_MS));
	T_EQ(d.res[0].result, 0);
}

static void over(struct fx *f)
{
	unsigned int i;

	for (i = 0; i < 4; i++)
		tc_close(&f->c[i]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
}

/* -- one child ------------------------------------------------------------------------- */

static void a_child_goes_on_where_its_parent_is(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[PAGES];
	struct kvmm_req *child;
	struct parent p;
	kvmm_frame_t fr;
	struct kvmm_key key;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_open(&f->c[1], f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 8), 8);
	p.rq = tc_req(c, 1);
	T_EQ(tc_match(c, p.rq, 1, 8, hit, NULL), 8);
	/* and what it has published itself */
	T_EQ(tc_publish(c, p.rq, 1, 8, 4, NULL), 4);
	tail_of(c, &p, 1, PAGES);
	T_OK(kvmm_step_done(c->k, 4));
	child = fork_of(c, &p, 5, 900);
	T_EQ(ta_pins(&f->d, 0), 2 * PAGES);
	tc_ping(c);
	/* its step is not done yet: what is written until then is copied */
	tc_key(c, 2, PAGES, TC_FULL, &key);
	tc_fill(c, 0, p.tail, &key);
	T_OK(kvmm_step_done(c->k, 5));
	copied(c, 900, 1, &fr);
	expect_bytes(c, fr, 2, PAGES);
	/* the parent ends, and its page is somebody else's */
	tc_fill(c, 0, p.tail, &(struct kvmm_key){ { 1 } });
	tc_end(p.rq);
	T_EQ(ta_pins(&f->d, 0), PAGES);
	tc_check(c, 1, hit, 8);
	expect_bytes(c, fr, 2, PAGES);
	/* the child's tail becomes a page that others find */
	tc_key(c, 1, PAGES, TC_FULL, &key);
	tc_fill(c, 0, fr, &key);
	publish_as(c, child, fr, 1, PAGES);
	tc_end(child);
	T_EQ(tc_hits(&f->c[1], 1, PAGES + 1), PAGES + 1);
	T_EQ(ta_counter(&f->d, "dram0", "pgfork"), 1);
	over(f);
}

static void fetched_pages_are_shared(void **state)
{
	struct td_opts o = {
		.dram_bytes = 16 * MIB, .nvme_bytes = 64 * MIB,
	};
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_match m;
	struct kvmm_done d;
	struct kvmm_req *rq, *child;
	uint32_t i;

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	T_CHECK(fx_spill(c, 1, PAGES, 100) < PAGES);
	rq = tc_req(c, 1);
	tc_match(c, rq, 1, PAGES, NULL, &m);
	T_EQ(m.n_pages, PAGES);
	T_OK(kvmm_fetch(rq, m.n_resident, PAGES, c->node,
			deadline_in(20 * NSEC_PER_SEC), 50));
	/* nobody knows yet what it will have pinned */
	T_EQ(kvmm_req_fork(rq, 2, c->node, NULL, 0, 0, 0, &child), -EBUSY);
	T_CHECK(tc_wait(c, 50, &d, WAIT_MS));
	T_EQ(d.n, PAGES - m.n_resident);
	T_OK(kvmm_req_fork(rq, 2, c->node, NULL, 0, 0, 0, &child));
	T_EQ(ta_pins(&f->d, 0), 2 * PAGES);
	for (i = 0; i < d.n; i++) {
		T_EQ(d.res[i].result, 0);
		T_CHECK(d.res[i].frame);
	}
	tc_end(rq);
	/* twice what fits: only pins hold them */
	for (i = 0; i < 32; i++)
		tc_put(c, 200 + i, 0, 16);
	T_EQ(ta_pins(&f->d, 0), PAGES);
	T_EQ(tc_hits(c, 1, PAGES), PAGES);
	tc_end(child);
	over(f);
}

/* -- many -------------------------------------------------------------------------------- */

/*
 * The parent and its children end in any order, before and after the copies,
 * while others take and give frames all the time.
 */
static void sixteen_children_of_one_parent(void **state)
{
	unsigned int rounds = test_long() ? 200 : 20, round, i;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct rng r;

	rng_seed(&r, test_seed());
	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_open(&f->c[1], f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, PAGES), PAGES);
	for (round = 1; round <= rounds; round++) {
		struct kvmm_req *kid[KIDS];
		kvmm_frame_t fr[KIDS];
		struct parent p;
		bool first = rng_below(&r, 2);

		parent_of(c, &p, 1, PAGES);
		for (i = 0; i < KIDS; i++)
			kid[i] = fork_of(c, &p, round, round * 100 + i);
		T_EQ(ta_pins(&f->d, 0), (KIDS + 1) * PAGES);
		if (first)
			tc_end(p.rq);
		if (rng_below(&r, 2)) {
			tc_end(kid[3]);
			kid[3] = NULL;
		}
		/* whoever gets the frames now must not be in the way */
		T_EQ(tc_put(c, 1000 + round, 0, 8), 8);
		T_OK(kvmm_step_done(c->k, round));
		copied(c, round * 100, KIDS, fr);
		for (i = 0; i < KIDS; i++)
			if (kid[i])
				expect_bytes(c, fr[i], 1, PAGES);
		for (i = 0; i < KIDS; i++) {
			struct kvmm_key key;

			if (!kid[i])
				continue;
			tc_key(c, 2000 + round * KIDS + i, 0, TC_FULL, &key);
			tc_fill(c, 0, fr[i], &key);
		}
		for (i = 0; i < KIDS; i++)
			if (kid[i])
				publish_as(c, kid[i], fr[i],
					   2000 + round * KIDS + i, 0);
		if (!first) {
			expect_bytes(c, p.tail, 1, PAGES);
			tc_end(p.rq);
		}
		for (i = 0; i < KIDS; i++) {
			if (!kid[i])
				continue;
			tc_end(kid[i]);
			T_EQ(tc_hits(&f->c[1], 2000 + round * KIDS + i, 1), 1);
		}
	}
	T_EQ(ta_pins(&f->d, 0), 0);
	T_EQ(ta_counter(&f->d, "dram0", "pgfork"), rounds * KIDS);
	over(f);
}

/* Three groups, of which two have a tail, in two classes. */
static void tails_of_two_classes(void **state)
{
	struct tc_opts o = { .hybrid = true };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	kvmm_frame_t tail[3] = { 0 };
	struct kvmm_req *rq, *child;
	struct kvmm_key key[2];
	struct kvmm_done d;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, &o);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 1, &tail[TC_FULL]);
	tc_alloc(c, rq, 1, 1, &tail[TC_LAST]);
	tc_key(c, 1, 0, TC_FULL, &key[0]);
	tc_key(c, 1, 0, TC_LAST, &key[1]);
	tc_fill(c, 0, tail[TC_FULL], &key[0]);
	tc_fill(c, 1, tail[TC_LAST], &key[1]);
	T_WAIT(WAIT_MS, kvmm_req_fork(rq, 2, c->node, tail, 3, 0, 7,
				      &child) == 2 ||
			(tc_poll(c), tc_sync(c, 0), false));
	T_CHECK(tc_wait(c, 7, &d, WAIT_MS));
	T_EQ(d.n, 3);
	T_EQ(d.res[TC_WINDOW].frame, 0);
	T_EQ(d.res[TC_FULL].result, 0);
	T_EQ(d.res[TC_LAST].result, 0);
	T_EQ(tc_wrong(c, 0, d.res[TC_FULL].frame, &key[0]), 0);
	T_EQ(tc_wrong(c, 1, d.res[TC_LAST].frame, &key[1]), 0);
	tc_end(rq);
	tc_end(child);
	over(f);
}

/* -- when something dies ------------------------------------------------------------------- */

/* Forks without end, and ends: for a SIGKILL to come in between. */
static long fork_for_ever(void *shm, long chain, long b)
{
	struct tc *c = fx_c();
	uint64_t step = 1;

	for (;; step++) {
		struct kvmm_req *kid[4];
		kvmm_frame_t fr[4];
		struct parent p;
		unsigned int i;

		parent_of(c, &p, (uint64_t)chain, PAGES);
		for (i = 0; i < 4; i++)
			kid[i] = fork_of(c, &p, step, step * 10 + i);
		if (step % 2)
			tc_end(p.rq);
		T_OK(kvmm_step_done(c->k, step));
		/* every other time nobody waits for anything */
		if (step % 4 < 2)
			copied(c, step * 10, 4, fr);
		for (i = 0; i < 4; i++) {
			if (step % 4 < 2)
				expect_bytes(c, fr[i], (uint64_t)chain, PAGES);
			tc_end(kid[i]);
		}
		if (!(step % 2))
			tc_end(p.rq);
		++*(_Atomic uint64_t *)shm;
	}
	return 0;
}

static void nothing_is_left_of_a_process_that_forks(void **state)
{
	unsigned int rounds = test_long() ? 50 : 6, i;
	struct fx *f = *state;
	struct rng r;

	rng_seed(&r, test_seed());
	fx_start(f, NULL);
	tc_open(&f->c[0], f->d.socket, NULL);
	T_EQ(tc_put(&f->c[0], 1, 0, PAGES), PAGES);
	for (i = 0; i < rounds; i++) {
		struct timespec ts = ns_to_timespec(
			rng_below(&r, 30 * NSEC_PER_MSEC));

		fx_client(f, 0, 0, NULL);
		proc_send(&f->p[0], fork_for_ever, 1, 0);
		T_WAIT(WAIT_MS, *(_Atomic uint64_t *)f->p[0].shm > 2);
		nanosleep(&ts, NULL);
		proc_kill(&f->p[0]);
		T_WAIT(BACK_MS, !ta_pins(&f->d, 0));
		T_EQ(tc_hits(&f->c[0], 1, PAGES), PAGES);
		ta_check(&f->d);
	}
	over(f);
}

static void forks_in_flight_end_with_the_daemon(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *kid[4];
	struct kvmm_done d;
	struct parent p;
	uint64_t epoch;
	unsigned int i;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, PAGES), PAGES);
	parent_of(c, &p, 1, PAGES);
	for (i = 0; i < 4; i++)
		kid[i] = fork_of(c, &p, 9, 10 + i);
	epoch = kvmm_epoch(c->k);
	td_kill(&f->d);
	for (i = 0; i < 4; i++) {
		T_CHECK(tc_wait(c, 10 + i, &d, WAIT_MS));
		T_EQ(d.result, -ENOTCONN);
		T_EQ(d.res[0].result, -ENOTCONN);
		T_OK(kvmm_free(kid[i], 0, c->node, &d.res[0].frame, 1, 0));
	}
	expect_bytes(c, p.tail, 1, PAGES);
	T_OK(td_start(&f->d));
	T_WAIT(WAIT_MS, (tc_poll(c), kvmm_epoch(c->k) != epoch));
	T_EQ(kvmm_req_fork(p.rq, 5, c->node, &p.tail, 1, 0, 0, &kid[0]),
	     -ESTALE);
	tc_end(p.rq);
	for (i = 1; i < 4; i++)
		tc_end(kid[i]);
	T_EQ(kvmm_win_sync(c->win[0], 0), -EBUSY);	/* kid 0 */
	tc_close(c);
	over(f);
}

/* It is asked for through the ring, and goes on when the daemon does. */
static void a_stopped_daemon_copies_later(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *child;
	struct parent p;
	struct kvmm_done d;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, PAGES), PAGES);
	parent_of(c, &p, 1, PAGES);
	T_OK(td_pause(&f->d));
	child = fork_of(c, &p, 0, 5);
	T_CHECK(!tc_wait(c, 5, &d, 50));
	/* both end before it has even been looked at, and their frames stay */
	tc_end(p.rq);
	tc_end(child);
	T_OK(td_resume(&f->d));
	T_CHECK(tc_wait(c, 5, &d, WAIT_MS));
	T_EQ(d.res[0].result, 0);
	over(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(a_child_goes_on_where_its_parent_is),
		FX_TEST(fetched_pages_are_shared),
		FX_TEST(sixteen_children_of_one_parent),
		FX_TEST(tails_of_two_classes),
		FX_TEST(nothing_is_left_of_a_process_that_forks),
		FX_TEST(forks_in_flight_end_with_the_daemon),
		FX_TEST(a_stopped_daemon_copies_later),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
