/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What must not be shared is not: another layout, dtype, revision, salt, world
 * or window is another space, and a geometry that does not add up is refused
 * with a sentence. And with a protection left out (KVMM_BREAK) the engine's
 * tokens do differ: the comparison with the model can fail.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/engine_proc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

static const struct ep_req req = {
	.id = 1, .max_tokens = 12, .temperature = 0.8, .seed = 2,
	.text = "Two of them say that they are the same and are not, and that "
		"must be found out before a single byte was taken for another.",
};

/* Where it is chance whether two of them meet. */
#define MAX_TRIES	10u
#define MIN_TRIES	2u

static struct ep e[2];

static int teardown(void **state)
{
	ep_kill(&e[0]);
	ep_kill(&e[1]);
	return fx_teardown(state);
}

/* A first engine's pages are there; a second one differs by @opt @arg. */
static void differs_by(struct fx *f, const char *opt, const char *arg,
		       const char *field)
{
	char why[2048] = "";

	ep_start(&e[1], f->d.socket, "-c", "gqa", opt, arg, NULL);
	T_EQ(ep_one(&e[1], "gqa", &req).hit, 0);
	ep_quit(&e[1]);
	T_CHECK(!ep_try_start(&e[1], why, sizeof(why), f->d.socket, "-c", "gqa",
			      opt, "and yet another", "--must-join", NULL));
	T_CHECK(strstr(why, field), "%s: %s", opt, why);
}

static void an_identity_that_differs_is_a_miss_or_refused(void **state)
{
	struct fx *f = *state;

	fx_start(f, NULL);
	ep_start(&e[0], f->d.socket, "-c", "gqa", NULL);
	ep_one(&e[0], "gqa", &req);
	differs_by(f, "--layout", "hnd", "layout");
	differs_by(f, "--kv-dtype", "fp16", "kv_dtype");
	differs_by(f, "--revision", "of last week", "revision");
	differs_by(f, "--salt", "somebody else's", "salt");
	/* nothing of all that was in its way */
	T_CHECK(ep_one(&e[0], "gqa", &req).hit > 0);
	ep_quit(&e[0]);
	ta_baseline(&f->d, 5000);
}

static void another_world_or_weights_are_a_miss_or_refused(void **state)
{
	char why[2048] = "";
	struct fx *f = *state;
	struct ep_answer a;

	fx_start(f, NULL);
	ep_start(&e[0], f->d.socket, "-c", "gqa", NULL);
	ep_one(&e[0], "gqa", &req);
	/* shards of two ranks, on the same node */
	ep_start(&e[1], f->d.socket, "-c", "gqa", "--ranks", "2", NULL);
	T_EQ(ep_one(&e[1], "gqa", &req).hit, 0);
	ep_quit(&e[1]);
	T_CHECK(!ep_try_start(&e[1], why, sizeof(why), f->d.socket, "-c", "gqa",
			      "--world", "4", "--must-join", NULL));
	T_CHECK(strstr(why, "world"), "%s", why);
	/* other weights: another revision by itself */
	ep_start(&e[1], f->d.socket, "-c", "gqa", "--seed", "2", NULL);
	ep_ask(&e[1], &req);
	ep_answers(&e[1], &a, 1);
	T_EQ(a.hit, 0);
	ep_quit(&e[1]);
	ep_quit(&e[0]);
	ta_baseline(&f->d, 5000);
}

/* The same model of the same weights, but pages of other lengths. */
static void another_window_or_block_is_a_miss_or_refused(void **state)
{
	char why[2048] = "";
	struct fx *f = *state;

	fx_start(f, NULL);
	ep_start(&e[0], f->d.socket, "-c", "window", NULL);
	ep_one(&e[0], "window", &req);
	ep_start(&e[1], f->d.socket, "-c", "window", "--block-tokens", "8",
		 "--snap-tokens", "64", NULL);
	T_EQ(ep_one(&e[1], "window", &req).hit, 0);
	ep_quit(&e[1]);
	T_CHECK(!ep_try_start(&e[1], why, sizeof(why), f->d.socket, "-c",
			      "window", "--window-off", "1", "--must-join",
			      NULL));
	T_CHECK(strstr(why, "window_pages"), "%s", why);
	ep_quit(&e[0]);
	ta_baseline(&f->d, 5000);
}

static void a_geometry_that_does_not_add_up_is_refused(void **state)
{
	char why[2048] = "";
	struct fx *f = *state;

	fx_start(f, NULL);
	T_CHECK(!ep_try_start(&e[0], why, sizeof(why), f->d.socket, "-c", "gqa",
			      "--heads-off", "1", NULL));
	T_CHECK(strstr(why, "class full") && strstr(why, "page_bytes"), "%s",
		why);
}

/* ---- the comparison can fail -------------------------------------------------------- */

/* A medium that flips bits, and nobody who looks at checksums. */
static bool wrong_from_a_bad_disk(struct fx *f, const char *const *env)
{
	static const struct ep_req other = {
		.id = 2, .max_tokens = 1,
		.text = "0123456789012345678901234567890123456789012345678901234567890123456789"
			"0123456789012345678901234567890123456789012345678901234567890123456789",
	};
	struct ep_req r = other;
	static char text[200];
	struct ep_answer a;
	unsigned int i;

	fx_start(f, &(struct td_opts){
		.dram_bytes = 2 * MIB, .nvme_bytes = 32 * MIB, .env = env,
		.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}" });
	ep_start(&e[0], f->d.socket, "-c", "gqa", "--fetch-all", "--fetch-ms",
		 "20000", NULL);
	ep_one(&e[0], "gqa", &req);
	for (i = 0; i < 60 && ta_counter(&f->d, "dram0", "pgdrop") < 60; i++) {
		snprintf(text, sizeof(text), "%u%s", i, other.text);
		r.text = text;
		ep_ask(&e[0], &r);
		ep_answers(&e[0], &a, 1);
	}
	ta_fault(&f->d, "nvme0:read:flip");
	ep_ask(&e[0], &req);
	ep_answers(&e[0], &a, 1);
	ep_quit(&e[0]);
	if (!env)
		T_EQ(a.fetched, 0);
	else
		T_CHECK(a.fetched > 0);
	td_fini(&f->d);
	return !ep_is(&a, "gqa", &req);
}

static void without_checksums_a_bad_disk_changes_tokens(void **state)
{
	static const char *const env[] = { "KVMM_BREAK=crc", NULL };
	struct fx *f = *state;

	T_CHECK(wrong_from_a_bad_disk(f, env));
	T_CHECK(!wrong_from_a_bad_disk(f, NULL));
}

/*
 * Pages that can be found before the step that computes them is done: another
 * engine reads what is not there yet. Return: does either of them say what the
 * model does not?
 */
static bool wrong_in_mid_step(struct fx *f, const char *const *env)
{
	struct ep_answer a, b;

	fx_start(f, &(struct td_opts){ .dram_bytes = 64 * MIB, .env = env });
	/* slow enough to be met in the middle of a step */
	ep_start(&e[0], f->d.socket, "-c", "bench", "--budget", "256", NULL);
	ep_start(&e[1], f->d.socket, "-c", "bench", NULL);
	ep_ask(&e[0], &req);
	usleep(50000);
	ep_ask(&e[1], &req);
	ep_answers(&e[1], &b, 1);
	ep_answers(&e[0], &a, 1);
	ep_quit(&e[0]);
	ep_quit(&e[1]);
	td_fini(&f->d);
	/* it computes what it does not hit, and has nothing of the other's then */
	ep_expect(&a, "bench", &req);
	return !ep_is(&b, "bench", &req);
}

static void without_the_fence_half_computed_pages_change_tokens(void **state)
{
	static const char *const env[] = { "KVMM_BREAK=fence", NULL };
	struct fx *f = *state;
	unsigned int i, n;
	bool wrong = false;

	for (n = 0; n < MAX_TRIES && !wrong; n++)
		wrong = wrong_in_mid_step(f, env);
	T_CHECK(wrong, "%u tries", n);
	/* as often, and more than once */
	for (i = 0; i < n || i < MIN_TRIES; i++)
		T_CHECK(!wrong_in_mid_step(f, NULL));
}

int main(void)
{
#define T(x) cmocka_unit_test_setup_teardown(x, fx_setup, teardown)
	const struct CMUnitTest tests[] = {
		T(an_identity_that_differs_is_a_miss_or_refused),
		T(another_world_or_weights_are_a_miss_or_refused),
		T(another_window_or_block_is_a_miss_or_refused),
		T(a_geometry_that_does_not_add_up_is_refused),
		T(without_checksums_a_bad_disk_changes_tokens),
		T(without_the_fence_half_computed_pages_change_tokens),
	};
	int failed;

	fx_filter();
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	ep_forget();
	return failed;
}
