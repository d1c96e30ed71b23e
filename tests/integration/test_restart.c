/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd dies and comes again, or the connection to it ends. A client reads on
 * what it had, hears of it in time, and comes back by itself.
 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "libkvmm/lib.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define BACK_MS		5000		/* until nothing of a dead engine is left */

static const char *socket_path;

static struct kvmm_engine member_of(uint64_t round, uint32_t rank,
				    uint32_t world)
{
	struct kvmm_engine e = {
		.size = sizeof(e), .rank = rank, .world = world,
		.flags = rank ? 0 : KVMM_LEADER,
	};

	memcpy(e.token, &round, sizeof(round));
	return e;
}

/* -- kvmmd ------------------------------------------------------------------------------- */

static bool polls(struct tc *c, int want)
{
	struct kvmm_done d;
	int n = kvmm_poll(c->k, &d, 1);

	return n == want;
}

static bool reconnected(struct tc *c, uint64_t old_epoch)
{
	struct kvmm_done d;

	kvmm_poll(c->k, &d, 1);
	return kvmm_epoch(c->k) != old_epoch;
}

static void clients_live_on_when_kvmmd_dies(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	kvmm_frame_t frame[4];
	struct kvmm_req *rq, *late;
	struct kvmm_space *sp;
	struct kvmm_key key;
	struct kvmm_pub pub;
	struct kvmm_done d;
	struct kvmm_stats st = { .size = sizeof(st) };
	uint64_t epoch, t0;
	void *base;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	tc_alloc(c, rq, 0, 4, frame);
	base = kvmm_win_base(c->win[0], 0);
	epoch = kvmm_epoch(c->k);
	tc_pub(c, &pub, 2, 0, TC_FULL, frame[0], 9);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 5));
	tc_ping(c);

	td_kill(&f->d);
	/* what is in flight ends, and then everybody hears of it */
	t0 = now_ns();
	T_CHECK(tc_wait(c, 5, &d, 2000));
	T_EQ(d.result, -ENOTCONN);
	T_WAIT(2000, polls(c, -ENOTCONN));
	T_CHECK(now_ns() - t0 < NSEC_PER_SEC);
	tc_check(c, 1, hit, 16);
	tc_key(c, 2, 0, TC_FULL, &key);
	tc_fill(c, 0, frame[0], &key);
	T_EQ(tc_wrong(c, 0, frame[0], &key), 0);
	T_EQ(kvmm_publish(rq, c->node, &pub, 1, 6), -ENOTCONN);
	T_EQ(kvmm_space_attach(c->k, tc_desc(NULL), &sp), -ENOTCONN);
	T_EQ(kvmm_ping(c->k, 7), -ENOTCONN);
	T_EQ(tc_hits(c, 1, 16), 0);
	T_OK(kvmm_stats(c->k, &st));
	T_EQ(st.connected, 0);
	T_OK(kvmm_step_done(c->k, 3));

	T_OK(td_start(&f->d));
	T_WAIT(5000, reconnected(c, epoch));
	/* the old request reads on and is of no use otherwise */
	tc_check(c, 1, hit, 16);
	T_EQ(tc_wrong(c, 0, frame[0], &key), 0);
	T_EQ(kvmm_publish(rq, c->node, &pub, 1, 8), -ESTALE);
	T_EQ(kvmm_fetch(rq, 0, 16, c->node, 0, 9), -ESTALE);
	T_EQ(kvmm_win_sync(c->win[0], 0), -EBUSY);
	late = tc_req(c, 2);
	T_EQ(tc_match(c, late, 1, 16, NULL, NULL), 0);
	T_EQ(kvmm_alloc(late, 0, c->node, 1, frame, 0), -EAGAIN);
	tc_end(rq);
	T_OK(kvmm_win_sync(c->win[0], 0));
	T_CHECK(kvmm_win_base(c->win[0], 0) == base);
	T_EQ(tc_match(c, late, 1, 16, NULL, NULL), 0);
	tc_end(late);
	T_EQ(tc_hits(c, 1, 16), 0);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	T_EQ(tc_hits(c, 1, 16), 16);
	T_OK(kvmm_stats(c->k, &st));
	T_EQ(st.connected, 1);
	T_EQ(st.reconnects, 1);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* A member alone gets nothing that the other one has not mapped. */
static void sync_both(struct fx *f)
{
	struct t_wait w = t_wait_begin(LONG_WAIT);
	struct kvmm_req *rq = tc_req(&f->c[0], 1);
	kvmm_frame_t frame[8];

	while (kvmm_alloc(rq, 0, f->c[0].node, 8, frame, 0) == -EAGAIN) {
		T_CHECK(t_wait_more(&w));
		tc_sync(&f->c[0], 0);
		tc_sync(&f->c[1], 0);
		tc_poll(&f->c[0]);
	}
	tc_end(rq);
}

static void engines_join_the_next_kvmmd(void **state)
{
	struct kvmm_engine e[2] = { member_of(7, 0, 2), member_of(7, 1, 2) };
	struct tc_opts o[2] = { { .engine = &e[0] }, { .engine = &e[1] } };
	struct fx *f = *state;
	unsigned int i, round;
	uint64_t epoch;

	fx_start(f, NULL);
	for (i = 0; i < 2; i++)
		tc_open(&f->c[i], f->d.socket, &o[i]);
	for (round = 0; round < 3; round++) {
		epoch = kvmm_epoch(f->c[0].k);
		sync_both(f);
		T_EQ(tc_put(&f->c[0], 1, 0, 8), 8);
		T_EQ(tc_hits(&f->c[1], 1, 8), 8);
		td_kill(&f->d);
		T_OK(td_start(&f->d));
		for (i = 0; i < 2; i++) {
			T_WAIT(5000, reconnected(&f->c[i], epoch));
			T_OK(kvmm_win_sync(f->c[i].win[0], 0));
		}
		T_EQ(tc_hits(&f->c[1], 1, 8), 0);
	}
	sync_both(f);
	T_EQ(tc_put(&f->c[0], 1, 0, 8), 8);
	T_EQ(tc_hits(&f->c[1], 1, 8), 8);
	ta_check(&f->d);
}

/* -- the connection alone -------------------------------------------------------------- */

static struct kvmm_hit late_hit[32];

/* A request ends while the kernel of step 9 reads its pages. */
static long end_before_step(void *shm, long chain, long n)
{
	struct kvmm_req *rq = tc_req(fx_c(), 1);
	long got = tc_match(fx_c(), rq, (uint64_t)chain, (uint32_t)n,
			    late_hit, NULL);

	T_OK(kvmm_req_end(rq, KVMM_ENDED, 9));
	return got;
}

static long lose_the_socket(void *shm, long a, long b)
{
	uint64_t epoch = kvmm_epoch(fx_c()->k);

	T_OK(shutdown(fx_c()->k->sock, SHUT_RDWR));
	T_WAIT(LONG_WAIT, polls(fx_c(), 0) && kvmm_ping(fx_c()->k, 1) == 0);
	T_CHECK(kvmm_epoch(fx_c()->k) == epoch);
	return 0;
}

static long wrong_before_step(void *shm, long chain, long n)
{
	long i, wrong = 0;

	for (i = 0; i < n; i++) {
		struct kvmm_key key;

		tc_key(fx_c(), (uint64_t)chain, (uint32_t)i, TC_FULL, &key);
		wrong += (long)tc_wrong(fx_c(), 0, late_hit[i].frame, &key);
	}
	return wrong;
}

/* Chains of 16 that fit beside 32 pinned pages and magazines in 512 frames. */
#define NEWEST	18

static void a_lost_socket_ends_no_pin_before_its_step(void **state)
{
	struct td_opts o = { .dram_bytes = 32 * MIB };
	struct fx *f = *state;
	long i, there, left;

	fx_start(f, &o);
	fx_client(f, 0, 0, NULL);
	fx_client(f, 1, 0, NULL);
	T_EQ(proc_call(&f->p[0], fx_put, 1, 32), 32);
	T_EQ(proc_call(&f->p[0], end_before_step, 1, 32), 32);
	T_EQ(ta_pins(&f->d, f->p[0].pid), 32);
	proc_call(&f->p[0], lose_the_socket, 0, 0);
	T_EQ(ta_pins(&f->d, f->p[0].pid), 32);
	/* twice what fits */
	for (i = 0; i < 64; i++)
		T_EQ(proc_call(&f->p[1], fx_put, 100 + i, 16), 16);
	T_EQ(proc_call(&f->p[0], wrong_before_step, 1, 32), 0);
	ta_check(&f->d);
	/* pinned pages are pages still, and the rest of the node is in use */
	T_EQ(proc_call(&f->p[1], fx_hits, 1, 32), 32);
	for (i = 0, there = 0; i < NEWEST; i++)
		there += proc_call(&f->p[1], fx_hits, 163 - i, 16);
	T_CHECK(there >= NEWEST * 16 * 9 / 10, "%ld of %d pages", there,
		NEWEST * 16);
	/* the process's end is the end of them */
	proc_kill(&f->p[0]);
	T_WAIT(BACK_MS, !ta_pins(&f->d, 0));
	for (i = 0, left = 0; i < NEWEST; i++)
		left += proc_call(&f->p[1], fx_hits, 163 - i, 16);
	T_CHECK(left >= there, "%ld of %ld pages", left, there);
	proc_end(&f->p[1]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
	fx_stop(f);
}

/* Open, work a little, close, over and over; no call may hang. */
static long come_and_go(void *shm, long ms, long b)
{
	struct tc_opts o = { .timeout_ns = 500 * NSEC_PER_MSEC };
	uint64_t deadline = deadline_in((uint64_t)ms * NSEC_PER_MSEC);
	long good = 0;

	while (!deadline_past(deadline)) {
		struct tc c;
		uint64_t t0 = now_ns();
		int err = tc_try_open(&c, socket_path, &o);

		T_CHECK(!err || err == -ENOTCONN || err == -ETIMEDOUT ||
			err == -EPROTO, "%s", t_strerror(err));
		if (!err) {
			struct kvmm_req *rq = tc_req(&c, 1);
			kvmm_frame_t frame[4];

			tc_match(&c, rq, 1, 8, NULL, NULL);
			kvmm_alloc(rq, 0, c.node, 4, frame, 0);
			tc_end(rq);
			tc_close(&c);
			good++;
		}
		T_CHECK(now_ns() - t0 < 5 * NSEC_PER_SEC);
	}
	return good;
}

static void set_up_survives_kvmmd_dying_in_it(void **state)
{
	unsigned int rounds = test_long() ? 30 : 4, i;
	struct fx *f = *state;
	struct rng r;

	rng_seed(&r, test_seed());
	fx_start(f, NULL);
	socket_path = fx_path(f, 0);
	for (i = 0; i < 2; i++)
		proc_start(&f->p[i]);
	for (i = 0; i < rounds; i++) {
		struct timespec ts = ns_to_timespec(
			50 * NSEC_PER_MSEC +
			rng_below(&r, 50 * NSEC_PER_MSEC));

		proc_send(&f->p[0], come_and_go, 500, 0);
		proc_send(&f->p[1], come_and_go, 500, 0);
		nanosleep(&ts, NULL);
		td_kill(&f->d);
		T_OK(td_start(&f->d));
		T_CHECK(proc_recv(&f->p[0]) > 0);
		T_CHECK(proc_recv(&f->p[1]) > 0);
	}
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
	/* and the last one is as good as new */
	tc_open(&f->c[0], f->d.socket, NULL);
	tc_open(&f->c[1], f->d.socket, NULL);
	T_EQ(tc_put(&f->c[0], 1, 0, 64), 64);
	T_EQ(tc_hits(&f->c[1], 1, 64), 64);
}

/* -- answers that nobody gets --------------------------------------------------------- */

#define LOST_PAGES	8u
#define LOST_TAG	77u

/* Completions that nobody waits for, until what comes next finds no room. */
static void fill_completions(struct tc *c)
{
	struct kvmm_era *e = kvmm_era_now(c->k);
	struct t_wait w = t_wait_begin(LONG_WAIT);
	uint32_t i;

	for (i = ring_pending(&e->ledger->cq, e->cq_head);
	     i < LEDGER_CQ_ENTRIES; i++) {
		struct ring_sqe sqe = { .op = RING_NOP };

		while (kvmm_sq_push(e, &sqe, NULL, 0) == -EAGAIN)
			T_CHECK(t_wait_more(&w));
	}
	T_WAIT(LONG_WAIT, ring_pending(&e->ledger->cq, e->cq_head) ==
			  LEDGER_CQ_ENTRIES);
}

/* What no libkvmm does; the daemon hangs up for it. */
static void break_the_ring(struct tc *c)
{
	struct kvmm_era *e = kvmm_era_now(c->k);
	struct pollfd fd = { .fd = c->k->sock };

	atomic_fetch_add(&e->ledger->sq.tail, 2 * LEDGER_SQ_ENTRIES);
	kvmm_sq_bell(e);
	T_EQ(poll(&fd, 1, LONG_WAIT), 1);
	T_CHECK(fd.revents & POLLHUP);
}

/* All that @rq can get, with bytes of another chain. */
static unsigned int write_all_there_is(struct tc *c, struct kvmm_req *rq)
{
	struct kvmm_key key;
	kvmm_frame_t f;
	unsigned int n;

	tc_key(c, 99, 0, TC_FULL, &key);
	for (n = 0; !kvmm_alloc(rq, 0, c->node, 1, &f, 0); n++)
		tc_fill(c, 0, f, &key);
	return n;
}

/*
 * Pages are sealed and somebody else has found them, but the answer has not
 * reached who published them when its connection ends. Whatever it does with
 * what it holds, the other one reads what was published.
 */
static void lose_an_answer(struct fx *f, bool kill)
{
	struct tc *c = &f->c[0], *other = &f->c[1];
	char bytes[8] = "others";
	const struct iovec iov = { .iov_base = bytes, .iov_len = 8 };
	struct kvmm_pub pub[LOST_PAGES];
	struct kvmm_hit hit[LOST_PAGES];
	kvmm_frame_t frame[LOST_PAGES];
	struct kvmm_req *rq, *reader;
	struct kvmm_done d;
	unsigned int i;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_open(other, f->d.socket, NULL);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, LOST_PAGES, frame);
	for (i = 0; i < LOST_PAGES; i++) {
		tc_pub(c, &pub[i], 1, i, TC_FULL, frame[i], 0);
		tc_fill(c, 0, frame[i], &pub[i].key);
	}
	fill_completions(c);
	T_OK(kvmm_publish(rq, c->node, pub, LOST_PAGES, LOST_TAG));
	T_WAIT(LONG_WAIT, tc_hits(other, 1, LOST_PAGES) == LOST_PAGES);
	reader = tc_req(other, 2);
	T_EQ(tc_match(other, reader, 1, LOST_PAGES, hit, NULL), LOST_PAGES);
	if (kill)
		td_kill(&f->d);
	else
		break_the_ring(c);

	T_CHECK(tc_wait(c, LOST_TAG, &d, LONG_WAIT));
	T_EQ(d.result, -ENOTCONN);
	for (i = 0; i < LOST_PAGES; i++)
		T_EQ(kvmm_write(rq, 0, c->node, frame[i], &iov, 1), -EINVAL);
	T_OK(kvmm_free(rq, 0, c->node, frame, LOST_PAGES, 0));
	T_CHECK(write_all_there_is(c, rq) > 0);
	tc_check(other, 1, hit, LOST_PAGES);
	T_OK(kvmm_req_end(rq, KVMM_ENDED, 0));
	tc_check(other, 1, hit, LOST_PAGES);
	tc_end(reader);
	if (!kill) {
		T_EQ(tc_hits(other, 1, LOST_PAGES), LOST_PAGES);
		ta_check(&f->d);
	}
}

static void a_lost_answer_gives_no_page_away(void **state)
{
	lose_an_answer(*state, false);
}

static void nor_does_one_that_a_dead_kvmmd_owes(void **state)
{
	lose_an_answer(*state, true);
}

/* -- without a system call ------------------------------------------------------------- */

#define QUIET_MS	300

/* Polls without ever sleeping, for so long. */
static void poll_for(struct tc *c, unsigned int ms)
{
	uint64_t until = deadline_in(ms * NSEC_PER_MSEC);
	struct kvmm_done d;

	while (!deadline_past(until))
		T_EQ(kvmm_poll(c->k, &d, 1), 0);
}

/* An engine that never sleeps need not read its socket to know that all is well. */
static void a_poller_asks_its_socket_for_nothing(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	uint64_t looked;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, 4);
	poll_for(c, 50);
	looked = c->k->sock_checked_ns;
	poll_for(c, QUIET_MS);
	T_CHECK(c->k->sock_checked_ns == looked);
	/* what comes is read: a larger window of another member, say */
	tc_open(&f->c[1], f->d.socket, NULL);
	tc_put(&f->c[1], 2, 0, 4);
	T_EQ(tc_hits(c, 2, 4), 4);
	/* a daemon that is stopped lives */
	T_OK(td_pause(&f->d));
	looked = c->k->sock_checked_ns;
	poll_for(c, QUIET_MS);
	T_CHECK(c->k->sock_checked_ns == looked);
	T_OK(td_resume(&f->d));
}

/* And hears of the end in time, be it a kill or an orderly one, and comes back. */
static void a_poller_hears_of_the_end(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	int i;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	for (i = 0; i < 4; i++) {
		poll_for(c, 20);
		if (i % 2)
			T_EQ(td_stop(&f->d), 0);
		else
			td_kill(&f->d);
		T_WAIT(1000, polls(c, -ENOTCONN));
		T_OK(td_start(&f->d));
		T_WAIT(5000, polls(c, 0));
	}
}

/* The daemon lives and has cut us off: that is on the socket alone. */
static void a_poller_hears_that_it_was_cut_off(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	uint64_t before;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	poll_for(c, 20);
	before = c->k->stat.reconnects;
	/* a tail that cannot be: the daemon ends the connection */
	atomic_fetch_add(&kvmm_era_now(c->k)->ledger->sq.tail, 1u << 20);
	kvmm_sq_bell(kvmm_era_now(c->k));
	T_WAIT(5000, polls(c, 0) && c->k->stat.reconnects > before);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(clients_live_on_when_kvmmd_dies),
		FX_TEST(engines_join_the_next_kvmmd),
		FX_TEST(a_lost_socket_ends_no_pin_before_its_step),
		FX_TEST(set_up_survives_kvmmd_dying_in_it),
		FX_TEST(a_lost_answer_gives_no_page_away),
		FX_TEST(nor_does_one_that_a_dead_kvmmd_owes),
		FX_TEST(a_poller_asks_its_socket_for_nothing),
		FX_TEST(a_poller_hears_of_the_end),
		FX_TEST(a_poller_hears_that_it_was_cut_off),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
