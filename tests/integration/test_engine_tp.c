/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The small engine under tensor parallel: a scheduler that computes nothing and
 * ranks that map the same pages (a plain node) or each its own part of them (a
 * gang), against the model on one processor.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "tests/lib/engine_proc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

/* Heads divide by four; a single head and latents are mirrored. */
static const char *const shapes[] = {
	"mha", "gqa", "mqa", "mla", "window", "linear",
};
#define NR_SHAPES	(sizeof(shapes) / sizeof(shapes[0]))

static const struct ep_req req = {
	.id = 1, .max_tokens = 20, .temperature = 0.8, .seed = 3,
	.text = "Every rank has a part of every head's memory, and all of them "
		"together have to come to the very same words as one would.",
};
static const struct ep_req other = {
	.id = 2, .max_tokens = 12, .temperature = 0.8, .seed = 4, .n = 3,
	.text = "Every rank has a part of every head's memory, and all of them "
		"together have to come to the very same end.",
};

static struct ep e[4];

static int teardown(void **state)
{
	unsigned int i, r;

	for (i = 0; i < 4; i++) {
		ep_kill(&e[i]);
		for (r = 0; r < e[i].nranks; r++)
			if (e[i].rank[r] > 0)
				kill(e[i].rank[r], SIGKILL);
		memset(&e[i], 0, sizeof(e[i]));
	}
	return fx_teardown(state);
}

/* A plain node and two gangs over one disk. */
static const char nodes[] =
	"{\"nodes\": ["
	"{\"name\": \"dram0\", \"kind\": \"host\", \"size\": \"48MiB\"},"
	"{\"name\": \"gang2\", \"kind\": \"host\", \"gang\": 2, \"size\": \"48MiB\"},"
	"{\"name\": \"gang4\", \"kind\": \"host\", \"gang\": 4, \"size\": \"48MiB\"}]}";

static void start(struct fx *f)
{
	fx_start(f, &(struct td_opts){ .config = nodes });
}

static void run_on(struct fx *f, const char *shape, const char *ranks,
		   const char *node, bool again)
{
	struct ep_answer a[3];
	unsigned int i;

	ep_start(&e[0], f->d.socket, "-c", shape, "--ranks", ranks, "--node",
		 node, "--fetch-all", "--fetch-ms", "20000", NULL);
	a[0] = ep_one(&e[0], shape, &req);
	T_EQ(a[0].hit + a[0].fetched > 0, again);
	a[0] = ep_one(&e[0], shape, &req);
	T_CHECK(a[0].hit > 0, "%s, %s ranks on %s", shape, ranks, node);
	ep_ask(&e[0], &other);
	ep_answers(&e[0], a, 3);
	for (i = 0; i < 3; i++)
		ep_expect(&a[i], shape, &other);
	ep_quit(&e[0]);
}

static void two_ranks_of_a_plain_node_are_as_one(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	start(f);
	for (i = 0; i < NR_SHAPES; i++)
		run_on(f, shapes[i], "2", "dram0", false);
	ta_baseline(&f->d, 10000);
	ta_check(&f->d);
}

static void two_ranks_of_a_gang_are_as_one(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	start(f);
	for (i = 0; i < NR_SHAPES; i++) {
		run_on(f, shapes[i], "2", "gang2", false);
		run_on(f, shapes[i], "2", "gang2", true);
	}
	ta_baseline(&f->d, 10000);
	ta_check(&f->d);
}

static void four_ranks_of_a_gang_are_as_one(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	start(f);
	for (i = 0; i < NR_SHAPES; i++)
		run_on(f, shapes[i], "4", "gang4", false);
	ta_baseline(&f->d, 10000);
	ta_check(&f->d);
}

/* Computed on one kind of node, it is fetched to the other: put together from
 * parts, and cut into them. */
static void pages_go_from_a_gang_to_a_plain_node_and_back(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	start(f);
	for (i = 0; i < NR_SHAPES; i++) {
		run_on(f, shapes[i], "2", i % 2 ? "dram0" : "gang2", false);
		run_on(f, shapes[i], "2", i % 2 ? "gang2" : "dram0", true);
	}
	ta_check(&f->d);
}

static void preempted_ranks_come_to_the_same(void **state)
{
	struct fx *f = *state;

	start(f);
	ep_start(&e[0], f->d.socket, "-c", "gqa", "--ranks", "2", "--node",
		 "gang2", "--preempt", "swap", "--preempt-every", "4", NULL);
	T_CHECK(ep_one(&e[0], "gqa", &req).preempted > 0);
	ep_quit(&e[0]);
	ta_baseline(&f->d, 10000);
}

/* ---- members that die -------------------------------------------------------------- */

static bool rank_lives(const struct ep *p, unsigned int r)
{
	return !kill(p->rank[r], 0);
}

/* Busy for long: answers of many tokens, one after the other. */
static void keep_busy(struct ep *p)
{
	struct ep_req r = req;
	unsigned int i;

	r.max_tokens = 60;
	for (i = 0; i < 20; i++) {
		r.id = 100 + i;
		r.seed = i;
		ep_ask(p, &r);
	}
}

/*
 * Ranks learn that their engine is dying and leave. What they have mapped stays
 * theirs until the last one is gone; then all is free.
 */
static void ranks_leave_when_their_scheduler_dies(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;

	start(f);
	ep_start(&e[0], f->d.socket, "-c", "gqa", "--ranks", "2", "--node",
		 "gang2", NULL);
	ep_start(&e[1], f->d.socket, "-c", "gqa", NULL);
	T_EQ(e[0].nranks, 2);
	keep_busy(&e[0]);
	ep_answers(&e[0], &a, 1);
	/* one of them can say nothing for the time being */
	kill(e[0].rank[1], SIGSTOP);
	ep_kill(&e[0]);
	T_WAIT(10000, !rank_lives(&e[0], 0));
	T_CHECK(rank_lives(&e[0], 1));
	T_CHECK(ta_in_hand(&f->d) > 0);
	ep_one(&e[1], "gqa", &req);
	T_CHECK(ta_in_hand(&f->d) > 0);
	kill(e[0].rank[1], SIGCONT);
	T_WAIT(10000, !rank_lives(&e[0], 1));
	ep_quit(&e[1]);
	ta_baseline(&f->d, 10000);
	ta_check(&f->d);
}

static void an_engine_ends_when_a_rank_dies(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;

	start(f);
	ep_start(&e[0], f->d.socket, "-c", "gqa", "--ranks", "4", "--node",
		 "gang4", NULL);
	ep_start(&e[1], f->d.socket, "-c", "gqa", "--ranks", "4", "--node",
		 "gang4", NULL);
	keep_busy(&e[0]);
	ep_answers(&e[0], &a, 1);
	kill(e[0].rank[2], SIGKILL);
	/* it says so by its exit status */
	T_EQ(ep_end(&e[0], 60000), 3);
	T_CHECK(ep_one(&e[1], "gqa", &req).hit > 0);
	ep_quit(&e[1]);
	ta_baseline(&f->d, 10000);
	ta_check(&f->d);
}

/* ---- a daemon that dies ------------------------------------------------------------- */

static void ranks_and_scheduler_go_over_to_the_next_daemon_together(void **state)
{
	struct fx *f = *state;
	struct ep_answer a[8];
	struct ep_req r = req;
	unsigned int i, j;

	start(f);
	ep_start(&e[0], f->d.socket, "-c", "gqa", "--ranks", "2", "--node",
		 "gang2", NULL);
	r.max_tokens = 60;
	for (i = 0; i < 3; i++) {
		for (j = 0; j < 4; j++) {
			r.id = 10 * i + j;
			r.seed = j;
			ep_ask(&e[0], &r);
		}
		td_kill(&f->d);
		T_OK(td_start(&f->d));
		ep_answers(&e[0], a, 4);
		for (j = 0; j < 4; j++) {
			r.id = a[j].id;
			r.seed = a[j].id % 10;
			ep_expect(&a[j], "gqa", &r);
		}
	}
	T_CHECK(ep_stat(&e[0], "reconnects") > 0);
	/* once all of them are there, what it computes is found in the new one */
	T_WAIT(20000, ep_one(&e[0], "gqa", &req).hit > 0);
	ep_quit(&e[0]);
	ta_baseline(&f->d, 10000);
	ta_check(&f->d);
}

int main(void)
{
#define T(x) cmocka_unit_test_setup_teardown(x, fx_setup, teardown)
	const struct CMUnitTest tests[] = {
		T(two_ranks_of_a_plain_node_are_as_one),
		T(two_ranks_of_a_gang_are_as_one),
		T(four_ranks_of_a_gang_are_as_one),
		T(pages_go_from_a_gang_to_a_plain_node_and_back),
		T(preempted_ranks_come_to_the_same),
		T(ranks_leave_when_their_scheduler_dies),
		T(an_engine_ends_when_a_rank_dies),
		T(ranks_and_scheduler_go_over_to_the_next_daemon_together),
	};
	int failed;

	fx_filter();
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	ep_forget();
	return failed;
}
