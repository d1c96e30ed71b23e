/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who comes and goes leaves nothing: descriptors, mappings, threads, children
 * and files in /dev/shm are counted on both sides. And what fork(2) leaves in a
 * child is nothing either.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/leak.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000

/* One life of a client, with a little of everything. */
static void live(const char *socket, const struct tc_opts *o, uint64_t chain)
{
	struct kvmm_req *rq, *open;
	kvmm_frame_t frame[4];
	struct tc c;

	tc_open(&c, socket, o);
	T_EQ(tc_put(&c, chain, 0, 8), 8);
	T_EQ(tc_hits(&c, chain, 8), 8);
	rq = tc_req(&c, 1);
	T_EQ(tc_match(&c, rq, chain, 8, NULL, NULL), 8);
	tc_alloc(&c, rq, 0, 4, frame);
	T_OK(kvmm_free(rq, 0, c.node, frame, 2, 0));
	tc_end(rq);
	/* left open: kvmm_close() ends it */
	open = tc_req(&c, 2);
	tc_match(&c, open, chain, 8, NULL, NULL);
	tc_alloc(&c, open, 0, 4, frame);
	T_CHECK(kvmm_step_word(c.k));
	tc_close(&c);
}

/*
 * Somebody who stays has all extents that the node may have, so that they are
 * no leak.
 */
static void fill_up(struct fx *f, struct tc *c, const struct tc_opts *o)
{
	unsigned int i;

	tc_open(c, f->d.socket, o);
	for (i = 0; i < 80; i++)
		tc_put(c, 100 + i, 0, 16);
	tc_sync(c, 0);
}

static void lives_leave_nothing(struct fx *f, const struct tc_opts *o)
{
	unsigned int rounds = test_long() ? 500 : 40, i;
	struct leak mine, daemons;

	fx_start(f, NULL);
	fill_up(f, &f->c[1], o);
	live(f->d.socket, o, 1);
	live(f->d.socket, o, 2);
	leak_calm(f->d.pid, &daemons);
	T_OK(leak_look(0, &mine));
	for (i = 0; i < rounds; i++)
		live(f->d.socket, o, 1 + i % 7);
	leak_settle(0, &mine, 1000);
	leak_settle(f->d.pid, &daemons, LONG_WAIT);
	T_EQ(ta_clients(&f->d), 1);
	T_EQ(ta_pins(&f->d, 0), 0);
	ta_check(&f->d);
}

static void a_client_that_closes_leaves_nothing(void **state)
{
	lives_leave_nothing(*state, NULL);
}

static void a_client_of_two_classes_leaves_nothing(void **state)
{
	struct tc_opts hybrid = { .hybrid = true };

	lives_leave_nothing(*state, &hybrid);
}

static void open_and_join_leave_nothing(void **state)
{
	struct kvmm_open_opts oo = { .size = sizeof(oo) };
	struct kvmm_engine e = { .size = sizeof(e), .world = 1 };
	unsigned int rounds = test_long() ? 2000 : 100, i;
	struct leak mine, daemons;
	struct fx *f = *state;
	struct kvmm *k;

	fx_start(f, NULL);
	T_OK(kvmm_open(f->d.socket, &oo, &k));
	kvmm_close(k);
	leak_calm(f->d.pid, &daemons);
	T_OK(leak_look(0, &mine));
	for (i = 0; i < rounds; i++) {
		struct kvmm_space *sp;

		T_OK(kvmm_open(f->d.socket, &oo, &k));
		if (i % 2)
			T_OK(kvmm_space_attach(k, tc_desc(NULL), &sp));
		if (i % 4 == 1)
			kvmm_space_detach(sp);
		kvmm_close(k);
	}
	leak_settle(0, &mine, 1000);
	leak_settle(f->d.pid, &daemons, LONG_WAIT);
	/* a member's end is its process's end: one is as much as there may be */
	memcpy(e.token, "sixteen bytes!!", 16);
	T_OK(kvmm_open(f->d.socket, &oo, &k));
	T_OK(kvmm_join(k, &e));
	kvmm_close(k);
	leak_settle(0, &mine, 1000);
	ta_check(&f->d);
}

/* What fails half-way leaves nothing either. */
static void refused_calls_leave_nothing(void **state)
{
	struct kvmm_open_opts oo = { .size = sizeof(oo) };
	struct kvmm_win_opts wo = { .size = sizeof(wo) };
	unsigned int rounds = test_long() ? 500 : 50, i;
	struct tc *c = &(*(struct fx **)state)->c[0];
	struct leak mine, daemons;
	struct fx *f = *state;
	struct kvmm_space *sp;
	struct kvmm_win *win;
	struct kvmm_desc d;
	struct kvmm *k;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	leak_calm(f->d.pid, &daemons);
	T_OK(leak_look(0, &mine));
	for (i = 0; i < rounds; i++) {
		T_EQ(kvmm_open("/proc/no/such/socket", &oo, &k), -ENOTCONN);
		T_EQ(kvmm_win_open(c->sp, 0, c->node, &wo, &win), -EBUSY);
		T_EQ(kvmm_win_open(c->sp, 5, c->node, &wo, &win), -EINVAL);
		T_EQ(kvmm_win_open(c->sp, 0, 9, &wo, &win), -EINVAL);
		d = *tc_desc(NULL);
		d.flags = KVMM_MUST_JOIN;
		d.revision = "other";
		T_EQ(kvmm_space_attach(c->k, &d, &sp), -EPROTO);
		T_CHECK(kvmm_reserve(c->sp, 0, c->node, 1u << 28) < 0);
	}
	leak_settle(0, &mine, 1000);
	leak_settle(f->d.pid, &daemons, LONG_WAIT);
	ta_check(&f->d);
}

/* Neither kvmmd nor the client has anything left of a closed window. */
static void windows_open_and_close(void **state)
{
	struct kvmm_win_opts wo = { .size = sizeof(wo) };
	unsigned int rounds = test_long() ? 1000 : 60, i;
	struct tc_opts o = { .no_window = true };
	struct leak mine, open, daemons;
	struct fx *f = *state;
	struct tc *c = &f->c[0];

	fx_start(f, NULL);
	/* the space and its extents stay: somebody else is there */
	fill_up(f, &f->c[1], NULL);
	tc_put(&f->c[1], 1, 0, 32);
	T_OK(leak_look(0, &mine));
	tc_open(c, f->d.socket, &o);
	c->node = f->c[1].node;
	for (i = 0; i < rounds; i++) {
		T_OK(kvmm_win_open(c->sp, 0, c->node, &wo, &c->win[0]));
		c->nr_classes = 1;
		if (i == 2)
			leak_calm(f->d.pid, &daemons);
		T_EQ(tc_hits(c, 1, 32), 32);
		T_EQ(tc_put(c, 2, 0, 4), 4);
		if (i == 2)
			T_OK(leak_look(0, &open));
		if (i + 1 == rounds) {
			leak_settle(f->d.pid, &daemons, LONG_WAIT);
			leak_settle(0, &open, 1000);
		}
		kvmm_win_close(c->win[0]);
		c->nr_classes = 0;
	}
	tc_close(c);
	leak_settle(0, &mine, 1000);
	ta_check(&f->d);
}

static bool reconnected(struct tc *c, uint64_t epoch)
{
	struct kvmm_done d;

	kvmm_poll(c->k, &d, 1);
	return kvmm_epoch(c->k) != epoch;
}

static void daemons_come_and_go(void **state)
{
	unsigned int rounds = test_long() ? 50 : 6, i;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct leak mine;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	for (i = 0; i < rounds; i++) {
		uint64_t epoch = kvmm_epoch(c->k);

		if (i % 2)
			td_kill(&f->d);
		else
			fx_stop(f);
		T_OK(td_start(&f->d));
		T_WAIT(LONG_WAIT, reconnected(c, epoch));
		T_OK(kvmm_win_sync(c->win[0], 0));
		T_EQ(tc_put(c, 1, 0, 8), 8);
		T_EQ(tc_hits(c, 1, 8), 8);
		if (i == 1)
			T_OK(leak_look(0, &mine));
	}
	/* an era more or less is no leak, one a round is */
	leak_settle(0, &mine, 1000);
}

static void kvmmd_itself_leaves_nothing(void **state)
{
	struct td_opts o = { .dram_bytes = 64 * MIB, .nvme_bytes = 64 * MIB };
	struct fx *f = *state;
	struct leak mine, now;
	char why[256];

	T_OK(leak_look(0, &mine));
	fx_start(f, &o);
	tc_open(&f->c[0], f->d.socket, NULL);
	tc_put(&f->c[0], 1, 0, 32);
	tc_close(&f->c[0]);
	fx_stop(f);
	T_OK(leak_look(0, &now));
	T_CHECK(leak_same(&mine, &now, why, sizeof(why)), "%s", why);
	T_EQ(access(f->d.socket, F_OK), -1);
	T_EQ(access(f->d.admin, F_OK), -1);
}

/* -- fork(2) ------------------------------------------------------------------------- */

/* Every call in a child of the process that opened: -ECHILD, no crash. */
static int call_everything(struct tc *c, struct kvmm_req *rq)
{
	struct kvmm_engine e = { .size = sizeof(e), .world = 1 };
	struct kvmm_win_opts wo = { .size = sizeof(wo) };
	struct kvmm_info info = { .size = sizeof(info) };
	struct kvmm_match m = { .size = sizeof(m) };
	struct iovec iov = { &m, sizeof(m) };
	struct kvmm_key key = { .b = { 1 } };
	struct kvmm_keys keys = { .k = &key, .n = 1 };
	struct kvmm_pub pub = { .frame = 1 };
	struct kvmm_space *sp;
	struct kvmm_win *win;
	struct kvmm_req *other;
	struct kvmm_hit hit;
	struct kvmm_done d;
	kvmm_frame_t frame = 1;
	uint64_t v = 1;
	const int got[] = {
		kvmm_join(c->k, &e),
		kvmm_poll(c->k, &d, 1),
		kvmm_ping(c->k, 1),
		kvmm_info(c->k, &info),
		kvmm_step_done(c->k, 5),
		kvmm_space_attach(c->k, tc_desc(NULL), &sp),
		kvmm_win_open(c->sp, 0, c->node, &wo, &win),
		kvmm_win_sync(c->win[0], 0),
		kvmm_reserve(c->sp, 0, c->node, 1),
		kvmm_req_open(c->sp, 1, NULL, &other),
		kvmm_peek(rq, &keys, 1, c->node, &m),
		kvmm_match(rq, &keys, 1, c->node, &hit, &m),
		kvmm_match_get(c->sp, 1, &hit, 1, &m),
		kvmm_agree_post(c->k, 1, &v, 1),
		kvmm_agree_get(c->k, 1, &v, 1, 0),
		kvmm_agree_min(c->k, 1, 1, &v),
		kvmm_req_fork(rq, 2, c->node, &frame, 1, 0, 1, &other),
		kvmm_trim(rq, 0, 0),
		kvmm_alloc(rq, 0, c->node, 1, &frame, 0),
		kvmm_free(rq, 0, c->node, &frame, 1, 0),
		kvmm_publish(rq, c->node, &pub, 1, 1),
		kvmm_fetch(rq, 0, 1, c->node, 0, 1),
		kvmm_cancel(c->k, 1),
		kvmm_report(rq, 0, KVMM_BAD),
		kvmm_read(rq, 0, &iov, 1),
		kvmm_write(rq, 0, c->node, 1, &iov, 1),
		kvmm_req_end(rq, KVMM_ENDED, 0),
	};
	unsigned int i;

	for (i = 0; i < sizeof(got) / sizeof(got[0]); i++)
		if (got[i] != -ECHILD) {
			fprintf(stderr, "call %u in a child: %d\n", i, got[i]);
			return 1;
		}
	if (kvmm_step_word(c->k))
		return 2;
	if (!strstr(kvmm_error(c->k), "child"))
		return 3;
	/* closing what is the parent's takes nothing away from it */
	kvmm_win_close(c->win[0]);
	kvmm_space_detach(c->sp);
	kvmm_close(c->k);
	return 0;
}

static void in_a_child_every_call_answers_echild(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[8];
	struct kvmm_req *rq;
	int status;
	pid_t pid;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, 8);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 8, hit, NULL), 8);
	fflush(NULL);
	pid = fork();
	T_CHECK(pid >= 0);
	if (!pid)
		_exit(call_everything(c, rq));
	T_EQ(waitpid(pid, &status, 0), pid);
	T_EQ(status, 0);

	/* the parent has lost nothing by it */
	T_EQ(ta_pins(&f->d, 0), 8);
	T_EQ(ta_clients(&f->d), 1);
	tc_check(c, 1, hit, 8);
	tc_ping(c);
	T_EQ(tc_publish(c, rq, 2, 0, 4, NULL), 4);
	tc_end(rq);
	T_EQ(tc_hits(c, 2, 4), 4);
	T_EQ(ta_rejects(&f->d, NULL), 0);
	ta_check(&f->d);
}

/* A child opens a connection of its own, and its death is its own. */
static void a_child_with_its_own_connection_is_a_client(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0], mine;
	struct kvmm_req *rq;
	int status;
	pid_t pid;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, 8);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 8, NULL, NULL), 8);
	fflush(NULL);
	pid = fork();
	T_CHECK(pid >= 0);
	if (!pid) {
		struct kvmm_req *his;

		if (tc_try_open(&mine, f->d.socket, NULL))
			_exit(1);
		his = tc_req(&mine, 1);
		_exit(tc_match(&mine, his, 1, 8, NULL, NULL) == 8 ? 0 : 2);
	}
	T_EQ(waitpid(pid, &status, 0), pid);
	T_EQ(status, 0);
	T_WAIT(LONG_WAIT, ta_clients(&f->d) == 1);
	T_EQ(ta_pins(&f->d, 0), 8);
	tc_end(rq);
	T_EQ(ta_pins(&f->d, 0), 0);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(a_client_that_closes_leaves_nothing),
		FX_TEST(a_client_of_two_classes_leaves_nothing),
		FX_TEST(open_and_join_leave_nothing),
		FX_TEST(refused_calls_leave_nothing),
		FX_TEST(windows_open_and_close),
		FX_TEST(daemons_come_and_go),
		FX_TEST(kvmmd_itself_leaves_nothing),
		FX_TEST(in_a_child_every_call_answers_echild),
		FX_TEST(a_child_with_its_own_connection_is_a_client),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
