/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device that says nothing for ten seconds is one node's trouble: status says
 * so, whoever asks for its pages has a miss by his deadline, other nodes and
 * other tenants go on as if nothing were, and it is used again without anybody
 * doing anything. (What becomes of frames and slots meanwhile: test_spill.c.)
 *
 * Two nodes of memory, each with a store below; the first store stalls, reads
 * and writes alike.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define CHAIN		16
#define STALL_MS	10000
#define DEADLINE_MS	200

/* A deadline, and what a busy machine may add. */
#define IN_TIME_NS	(NSEC_PER_SEC)

/* A daemon for each engine, stalled at the same time: a stall takes its time. */
struct stalled {
	struct test_daemon d;
	struct tc	a, b;		/* tenants, on dram0 and on dram1 */
	char		dir[TD_MAX_PATH];
};

/*
 * recover_ns is half a minute by default, and the stall is over long before: so
 * the last thing that is waited for takes about that long.
 */
static void config(char *text, size_t len, const char *dir, const char *engine)
{
	snprintf(text, len,
		 "{\"timeouts\": {\"direct_reclaim\": \"200ms\"}, \"nodes\": ["
		 "{\"name\": \"dram0\", \"kind\": \"host\", \"size\": \"16MiB\","
		 " \"size_max\": \"16MiB\", \"below\": \"nvme0\"},"
		 "{\"name\": \"dram1\", \"kind\": \"host\", \"size\": \"16MiB\","
		 " \"size_max\": \"16MiB\", \"below\": \"nvme1\"},"
		 "{\"name\": \"nvme0\", \"kind\": \"nvme\", \"size\": \"128MiB\","
		 " \"path\": \"%s/0\", \"engine\": \"%s\", \"admission\": \"all\","
		 " \"writes_per_day\": 0, \"io_timeout\": \"500ms\"},"
		 "{\"name\": \"nvme1\", \"kind\": \"nvme\", \"size\": \"128MiB\","
		 " \"path\": \"%s/1\", \"engine\": \"%s\", \"admission\": \"all\","
		 " \"writes_per_day\": 0, \"io_timeout\": \"5s\"}]}",
		 dir, engine, dir, engine);
}

static bool writes_rest(struct test_daemon *d, const char *node)
{
	return !ta_node(d, node, "write.inflight") &&
	       !ta_node(d, node, "write.queued");
}

static void put_slowly(struct test_daemon *d, const char *node, struct tc *c,
		       uint64_t first, unsigned int n)
{
	unsigned int i;

	for (i = 0; i < n; i++) {
		T_EQ(tc_put(c, first + i, 0, CHAIN), CHAIN);
		T_WAIT(LONG_WAIT, writes_rest(d, node));
	}
}

static bool status_says(struct test_daemon *d, const char *key,
			const char *what)
{
	json_t *r = ta_request(d, "{\"cmd\": \"status\"}");
	char *s = json_dumps(json_object_get(r, key), JSON_ENCODE_ANY);
	bool says = s && strstr(s, what);

	free(s);
	json_decref(r);
	return says;
}

static bool troubled(struct test_daemon *d)
{
	const char *state = ta_node_state(d, "nvme0");

	return !strcmp(state, "degraded") || !strcmp(state, "failed");
}

/* Pages of the stalled store: a miss, and in time. */
static void a_miss_in_time(struct tc *c, uint64_t chain)
{
	struct tc_got got = tc_get(c, chain, CHAIN, DEADLINE_MS);

	T_CHECK(got.ns < DEADLINE_MS * NSEC_PER_MSEC + IN_TIME_NS, "%llu ns",
		(unsigned long long)got.ns);
}

/* One round of another node and another tenant: down to its store and back. */
static void others_go_on(struct test_daemon *d, struct tc *c, unsigned int i)
{
	uint64_t t0 = now_ns();
	struct tc_got got;

	T_EQ(tc_put(c, 5000 + i, 0, CHAIN), CHAIN);
	T_EQ(tc_hits(c, 5000 + i, CHAIN), CHAIN);
	got = tc_get(c, 1000 + i % 20, CHAIN, 5000);
	T_EQ(got.missed, 0);
	T_CHECK(now_ns() - t0 < 4 * IN_TIME_NS, "%llu ns",
		(unsigned long long)(now_ns() - t0));
	T_EQ(strcmp(ta_node_state(d, "nvme1"), "online"), 0);
}

static void begin(struct stalled *s, const char *engine)
{
	static char text[2048];
	struct td_opts o = {
		.config = text,
		.socket = { { "a.sock", "a" }, { "b.sock", "b" } },
	};
	struct tc_opts on_1 = { .node = "dram1" };
	char path[TD_MAX_PATH * 2];

	T_OK(td_tmpdir(NULL, "kvmm-stall", s->dir, sizeof(s->dir)));
	config(text, sizeof(text), s->dir, engine);
	T_OK(td_init(&s->d, &o));
	T_OK(td_start(&s->d));
	fx_online(&s->d);
	T_WAIT(LONG_WAIT, !strcmp(ta_node_state(&s->d, "nvme1"), "online"));
	snprintf(path, sizeof(path), "%s/b.sock", s->d.dir);
	tc_open(&s->a, s->d.socket, NULL);
	tc_open(&s->b, path, &on_1);
	put_slowly(&s->d, "nvme0", &s->a, 1, 40);
	put_slowly(&s->d, "nvme1", &s->b, 1000, 30);
	T_CHECK(ta_node(&s->d, "nvme0", "used") > 0);
}

static void while_stalled(struct stalled *s)
{
	struct test_daemon *d = &s->d;
	unsigned int i;
	uint64_t begun, t0;

	ta_fault(d, "nvme0:read:stall;nvme0:write:stall");
	begun = now_ns();
	for (i = 0; i < 8 || !troubled(d); i++) {
		a_miss_in_time(&s->a, 1 + i % 20);
		others_go_on(d, &s->b, i);
		T_CHECK(now_ns() - begun < STALL_MS * NSEC_PER_MSEC,
			"nobody noticed");
	}
	T_CHECK(status_says(d, "sentence", "degraded"));
	T_CHECK(status_says(d, "notes", "nvme0 is "));
	/* its own tenant has memory, too, and it is as quick as ever */
	for (i = 0; i < 24; i++) {
		t0 = now_ns();
		T_EQ(tc_put(&s->a, 500 + i, 0, CHAIN), CHAIN);
		T_EQ(tc_hits(&s->a, 500 + i, CHAIN), CHAIN);
		T_CHECK(now_ns() - t0 < 4 * IN_TIME_NS);
	}
	ta_check(d);
	/* what was started stays so until it is over; what is new does not */
	ta_fault(d, "");
}

static void end(struct stalled *s)
{
	struct test_daemon *d = &s->d;
	uint64_t demoted;

	T_WAIT(STALL_MS + LONG_WAIT,
	       !ta_node(d, "nvme0", "read.inflight") &&
	       !ta_node(d, "nvme0", "write.inflight"));
	T_WAIT(3 * LONG_WAIT, !strcmp(ta_node_state(d, "nvme0"), "online"));
	T_CHECK(status_says(d, "sentence", "serving"));
	demoted = ta_counter(d, "dram0", "pgdemote");
	put_slowly(d, "nvme0", &s->a, 2000, 30);
	T_CHECK(ta_counter(d, "dram0", "pgdemote") > demoted);
	T_EQ(tc_get(&s->a, 2000, CHAIN, 5000).missed, 0);
	T_EQ(ta_counter(d, "nvme0", "pgcrc_fail"), 0);
	tc_close(&s->a);
	tc_close(&s->b);
	ta_baseline(d, LONG_WAIT);
	ta_check(d);
	T_EQ(td_stop(d), 0);
	td_fini(d);
	td_rmtree(s->dir);
}

static void others_go_on_while_a_store_stalls(void **state)
{
	static const char *const engines[] = { "io_uring", "threads" };
	static struct stalled s[2];
	unsigned int i;

	for (i = 0; i < 2; i++)
		begin(&s[i], engines[i]);
	for (i = 0; i < 2; i++)
		while_stalled(&s[i]);
	for (i = 0; i < 2; i++)
		end(&s[i]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(others_go_on_while_a_store_stalls),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
