/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd is killed and another one takes over: what was in DRAM is there, what
 * was pinned is pinned, and the engine goes on where it was.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <jansson.h>

#include "libkvmm/lib.h"
#include "tests/lib/kept.h"
#include "tests/lib/unit.h"

static void clients_go_on_with_the_next_kvmmd(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	kvmm_frame_t frame[4];
	struct kvmm_req *rq;
	struct kvmm_pub pub;
	struct kvmm_done d;
	uint64_t epoch;
	void *base;

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	tc_alloc(c, rq, 0, 4, frame);
	base = kvmm_win_base(c->win[0], 0);
	epoch = kvmm_epoch(c->k);
	T_EQ(ta_pins(&f->d, getpid()), 16);

	fx_crash_and_back(f, c);
	T_CHECK(kvmm_epoch(c->k) == epoch);
	T_CHECK(kvmm_win_base(c->win[0], 0) == base);
	T_EQ(fx_adopted(f, "clients"), 1);
	T_EQ(fx_adopted(f, "pages"), 16);
	T_EQ(fx_adopted(f, "gave_up"), 0);
	/* pins held all along, and the request goes on */
	T_EQ(ta_pins(&f->d, getpid()), 16);
	tc_check(c, 1, hit, 16);
	tc_pub(c, &pub, 2, 0, TC_FULL, frame[0], 0);
	tc_fill(c, 0, frame[0], &pub.key);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 5));
	T_CHECK(tc_wait(c, 5, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	T_EQ(tc_hits(c, 1, 16), 16);
	T_EQ(tc_hits(c, 2, 1), 1);
	T_OK(kvmm_free(rq, 0, c->node, &frame[1], 1, 0));
	tc_end(rq);
	T_EQ(tc_put(c, 3, 0, 64), 64);
	T_EQ(tc_hits(c, 3, 64), 64);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	/* another process finds it, too */
	tc_open(&f->c[1], f->d.socket, NULL);
	T_EQ(tc_hits(&f->c[1], 1, 16), 16);
	tc_close(&f->c[1]);
	fx_stop(f);
}

/* What was given back to a kvmmd that did not get to it. */
static void frames_given_back_to_the_dead_are_free(void **state)
{
	kvmm_frame_t frame[512];
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	unsigned int i;
	uint64_t was;
	pid_t pid;

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 4), 4);
	rq = tc_req(c, 1);
	tc_ping(c);
	was = ta_open(&f->d, 0);
	/* few at a time, or the library would keep many */
	for (i = 0; i < 512; i += 32)
		tc_alloc(c, rq, 0, 32, frame + i);
	tc_ping(c);
	T_CHECK(ta_open(&f->d, 0) >= was + 400);
	pid = td_kept(&f->d);
	T_OK(kill(pid, SIGSTOP));
	T_OK(kvmm_free(rq, 0, c->node, frame, 512, 0));
	T_OK(kill(pid, SIGKILL));
	T_WAIT(LONG_WAIT, tc_back(c, 0));
	/* but for what the library keeps to itself, and a refill */
	T_WAIT(LONG_WAIT, (tc_ping(c), ta_open(&f->d, 0) <= was + 200));
	tc_end(rq);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* Has its log these words? */
static bool logged(const struct test_daemon *d, const char *words)
{
	static char text[1u << 20];
	FILE *in = fopen(d->log, "re");
	size_t n;

	if (!in)
		return false;
	n = fread(text, 1, sizeof(text) - 1, in);
	fclose(in);
	text[n] = '\0';
	return strstr(text, words) != NULL;
}

/* Whoever mends the configuration a moment later finds everything. */
static void failed_starts_lose_nothing(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	struct kvmm_req *rq;

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	f->d.opts.policy = "/nonexistent/policy.so";
	T_OK(td_configure(&f->d));
	T_OK(kill(td_kept(&f->d), SIGKILL));
	/* it has failed twice when the third is announced */
	T_WAIT(LONG_WAIT, logged(&f->d, "start 4 in"));
	T_CHECK(logged(&f->d, "/nonexistent/policy.so"));
	f->d.opts.policy = NULL;
	T_OK(td_configure(&f->d));
	T_WAIT(LONG_WAIT, tc_back(c, 0));
	T_EQ(fx_adopted(f, "clients"), 1);
	T_EQ(fx_adopted(f, "pages"), 16);
	T_EQ(ta_pins(&f->d, getpid()), 16);
	tc_check(c, 1, hit, 16);
	tc_end(rq);
	T_EQ(tc_hits(c, 1, 16), 16);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* What was posted and not answered is not done later, and costs no frame. */
static void unanswered_publishes_cost_no_frame(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	kvmm_frame_t frame[8];
	struct kvmm_pub pub[8];
	struct kvmm_req *rq;
	struct kvmm_done d;
	uint64_t open;
	unsigned int i;

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 4), 4);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 8, frame);
	tc_ping(c);
	open = ta_open(&f->d, 0);
	/* they wait for a step that does not come */
	for (i = 0; i < 8; i++)
		tc_pub(c, &pub[i], 9, i, TC_FULL, frame[i], 7);
	T_OK(kvmm_publish(rq, c->node, pub, 8, 5));
	tc_ping(c);
	fx_crash(f, true);
	T_CHECK(tc_wait(c, 5, &d, LONG_WAIT));
	T_EQ(d.result, -ENOTCONN);
	T_WAIT(LONG_WAIT, tc_back(c, 0));
	T_OK(kvmm_step_done(c->k, 7));
	tc_ping(c);
	T_EQ(tc_hits(c, 9, 8), 0);
	tc_end(rq);
	tc_ping(c);
	T_CHECK(ta_open(&f->d, 0) <= open + 64);	/* and a refill */
	/* all of them can be had again */
	T_EQ(tc_put(c, 9, 0, 8), 8);
	T_EQ(tc_hits(c, 9, 8), 8);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

static bool answered(struct tc *c)
{
	struct kvmm_era *e = kvmm_era_now(c->k);

	return atomic_load(&e->ledger->cq.tail) != e->cq_head;
}

/*
 * The next kvmmd knows of no reference that an answer carries: what it names may
 * be reclaimed before it is read, and is a miss then.
 */
static void answers_of_the_dead_name_nothing_wrong(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0], *o = &f->c[1];
	struct td_opts opts = fx_kept;
	kvmm_frame_t frame[8];
	struct kvmm_pub pub[8];
	struct kvmm_req *rq;
	struct kvmm_done d;
	unsigned int i, n = 0;

	opts.dram_bytes = 16 * MIB;		/* 256 pages */
	fx_start(f, &opts);
	tc_open(c, f->d.socket, NULL);
	tc_open(o, f->d.socket, NULL);
	T_EQ(tc_put(o, 1, 0, 8), 8);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 8, frame);
	for (i = 0; i < 8; i++) {
		tc_pub(c, &pub[i], 1, i, TC_FULL, frame[i], 0);
		tc_fill(c, 0, frame[i], &pub[i].key);
	}
	T_OK(kvmm_publish(rq, c->node, pub, 8, 5));
	T_WAIT(LONG_WAIT, answered(c));
	fx_crash(f, true);
	T_WAIT(LONG_WAIT, tc_back(o, 0));
	T_EQ(fx_adopted(f, "gave_up"), 0);
	for (i = 0; i < 60; i++)
		tc_put(o, 100 + i, 0, 16);
	T_CHECK(tc_hits(o, 1, 8) < 8);
	T_CHECK(tc_wait(c, 5, &d, LONG_WAIT));
	for (i = 0; i < 8; i++) {
		if (d.res[i].result != -EEXIST || !d.res[i].frame)
			continue;
		T_EQ(tc_wrong(c, 0, d.res[i].frame, &pub[i].key), 0);
		n++;
	}
	T_CHECK(n < 8);
	T_WAIT(LONG_WAIT, tc_back(c, 0));
	tc_end(rq);
	ta_check(&f->d);
	tc_close(c);
	tc_close(o);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

static void windows_closed_meanwhile_are_closed(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_win_opts wo = { .size = sizeof(wo) };

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	tc_open(&f->c[1], f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 8), 8);
	T_OK(td_pause(&f->d));			/* the keeper: nobody is started */
	T_OK(kill(td_kept(&f->d), SIGKILL));
	T_WAIT(LONG_WAIT, kvmm_poll(c->k, &(struct kvmm_done){ 0 }, 1) ==
			  -ENOTCONN);
	kvmm_win_close(c->win[0]);
	c->win[0] = NULL;
	T_OK(td_resume(&f->d));
	T_WAIT(LONG_WAIT, tc_back(c, 0));
	tc_ping(c);
	T_OK(kvmm_win_open(c->sp, 0, c->node, &wo, &c->win[0]));
	T_EQ(tc_hits(c, 1, 8), 8);
	T_WAIT(LONG_WAIT, tc_back(&f->c[1], 0));
	T_EQ(tc_hits(&f->c[1], 1, 8), 8);
	ta_check(&f->d);
	tc_close(c);
	tc_close(&f->c[1]);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* A stop that is followed by a start is no other than a crash. */
static void reexec_is_only_a_gap(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	struct kvmm_req *rq;
	unsigned int i;
	uint64_t n;

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	for (i = 0; i < 3; i++) {
		n = tc_reconnects(c);
		json_decref(ta_request(&f->d,
				       "{\"cmd\": \"reexec\"}"));
		T_WAIT(LONG_WAIT, tc_back(c, n));
		tc_check(c, 1, hit, 16);
		T_EQ(ta_pins(&f->d, getpid()), 16);
		T_EQ(tc_hits(c, 1, 16), 16);
	}
	tc_end(rq);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* The daemon lives, and nobody was to blame: the request goes on. */
static void so_does_a_connection_that_was_lost(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[16];
	kvmm_frame_t frame;
	struct kvmm_req *rq;
	struct kvmm_pub pub;
	struct kvmm_done d;
	unsigned int i;
	uint64_t n;

	fx_start_kept(f);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 16), 16);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 16, hit, NULL), 16);
	for (i = 0; i < 5; i++) {
		n = tc_reconnects(c);
		T_OK(shutdown(c->k->sock, SHUT_RDWR));
		T_WAIT(LONG_WAIT, tc_back(c, n));
		T_EQ(ta_clients(&f->d), 1);
		T_EQ(ta_pins(&f->d, getpid()), 16 + i);
		tc_alloc(c, rq, 0, 1, &frame);
		tc_pub(c, &pub, 2 + i, 0, TC_FULL, frame, 0);
		tc_fill(c, 0, frame, &pub.key);
		T_OK(kvmm_publish(rq, c->node, &pub, 1, 5 + i));
		T_CHECK(tc_wait(c, 5 + i, &d, LONG_WAIT));
		T_EQ(d.res[0].result, 0);
	}
	tc_end(rq);
	ta_check(&f->d);
	tc_close(c);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(clients_go_on_with_the_next_kvmmd),
		FX_TEST(frames_given_back_to_the_dead_are_free),
		FX_TEST(failed_starts_lose_nothing),
		FX_TEST(unanswered_publishes_cost_no_frame),
		FX_TEST(answers_of_the_dead_name_nothing_wrong),
		FX_TEST(windows_closed_meanwhile_are_closed),
		FX_TEST(reexec_is_only_a_gap),
		FX_TEST(so_does_a_connection_that_was_lost),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
