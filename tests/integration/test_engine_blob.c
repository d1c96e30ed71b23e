/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An engine whose state is its own and contiguous (--blob): saved at checkpoints
 * as blobs, restored in other processes. Whatever becomes of the blobs, tokens
 * and logits are the model's.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/engine_proc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

static const char *const shapes[] = {
	"mha", "gqa", "mqa", "mla", "window", "linear",
};

/* Small nodes under pressure would rather forget pages than have anybody wait. */
#define PATIENT	"{\"timeouts\": {\"direct_reclaim\": \"1s\"}}"
#define LONG_WAIT	20000
#define STEP	64			/* tokens from checkpoint to checkpoint */

/* How engines of this file are started; a test that waits is not for slowness. */
#define BLOB	"--blob", "--fetch-ms", "20000"

/* 214 bytes, so three checkpoints. */
static const char story[] =
	"A server that keeps all of a conversation in one piece cannot share pages "
	"of it, but it can write the piece down where it stands, and whoever comes "
	"next with the same words goes on from there, in any process of host.";

static const struct ep_req cold = {
	.id = 1, .text = story, .max_tokens = 20, .temperature = 0.8, .seed = 7,
};

static struct ep e[3];

static int teardown(void **state)
{
	unsigned int i;

	for (i = 0; i < 3; i++)
		ep_kill(&e[i]);
	return fx_teardown(state);
}

static void start(struct fx *f)
{
	fx_start(f, &(struct td_opts){ .dram_bytes = 64 * MIB });
}

static void blob_engine(struct fx *f, struct ep *p, const char *shape)
{
	ep_start(p, f->d.socket, "-c", shape, BLOB, NULL);
}

/* As deep as a checkpoint of it can be. */
static uint32_t deepest(const struct ep_answer *a)
{
	return (a->prompt - 1) / STEP * STEP;
}

static void restored(const struct ep_answer *a, const char *shape)
{
	T_CHECK(a->hit == deepest(a) && a->hit, "%s: %u tokens of %u restored",
		shape, a->hit, a->prompt);
	T_CHECK(a->computed < a->prompt);
}

static void all_quiet(struct fx *f)
{
	unsigned int i;

	for (i = 0; i < 3; i++)
		if (e[i].pid)
			ep_quit(&e[i]);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
}

/* The first @same bytes of the story, and something else. */
static struct ep_req shares(char *text, size_t len, unsigned int same)
{
	snprintf(text, len, "%.*s#%u: and that is all that they have in common, "
		 "for what is said now is said for the first time", (int)same,
		 story, same);
	return (struct ep_req){
		.id = 100 + same, .text = text, .max_tokens = 8,
		.temperature = 0.8, .seed = same,
	};
}

/* ---- hits ------------------------------------------------------------------------ */

static void a_state_is_restored_in_the_same_and_in_another_process(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;
	unsigned int i;

	start(f);
	for (i = 0; i < 6; i++) {
		blob_engine(f, &e[0], shapes[i]);
		a = ep_one(&e[0], shapes[i], &cold);
		T_EQ(a.hit, 0);
		T_EQ(ep_stat(&e[0], "published"), 3);
		a = ep_one(&e[0], shapes[i], &cold);
		restored(&a, shapes[i]);
		blob_engine(f, &e[1], shapes[i]);
		a = ep_one(&e[1], shapes[i], &cold);
		restored(&a, shapes[i]);
		/* it has it all, and saves nothing twice */
		T_EQ(ep_stat(&e[1], "published"), 0);
		ep_quit(&e[0]);
		ep_quit(&e[1]);
		blob_engine(f, &e[0], shapes[i]);
		a = ep_one(&e[0], shapes[i], &cold);
		restored(&a, shapes[i]);
		ep_quit(&e[0]);
	}
	T_EQ(ta_counter(&f->d, "dram0", "bytes_copied_shared"), 0);
	all_quiet(f);
}

static void the_deepest_checkpoint_in_common_is_where_it_goes_on(void **state)
{
	static const unsigned int same[] = { 10, 63, 64, 70, 127, 128, 150, 200 };
	struct fx *f = *state;
	char text[400];
	unsigned int i, j;

	start(f);
	for (i = 0; i < 6; i++) {
		blob_engine(f, &e[0], shapes[i]);
		blob_engine(f, &e[1], shapes[i]);
		ep_one(&e[0], shapes[i], &cold);
		for (j = 0; j < 8; j++) {
			struct ep_req r = shares(text, sizeof(text), same[j]);

			T_EQ(ep_one(&e[1], shapes[i], &r).hit,
			     same[j] / STEP * STEP);
		}
		ep_quit(&e[0]);
		ep_quit(&e[1]);
	}
	all_quiet(f);
}

/* At 128 of 64, 128, 192; and at the last, wherever that is. */
static void not_every_place_is_saved(void **state)
{
	struct fx *f = *state;
	struct ep_req r;
	char text[400];

	start(f);
	ep_start(&e[0], f->d.socket, "-c", "gqa", BLOB, "--checkpoint-every", "2",
		 NULL);
	T_EQ(ep_one(&e[0], "gqa", &cold).hit, 0);
	T_EQ(ep_stat(&e[0], "published"), 2);
	r = shares(text, sizeof(text), 150);
	T_EQ(ep_one(&e[0], "gqa", &r).hit, 128);
	r = shares(text, sizeof(text), 200);
	T_EQ(ep_one(&e[0], "gqa", &r).hit, 192);
	r = shares(text, sizeof(text), 70);
	T_EQ(ep_one(&e[0], "gqa", &r).hit, 0);
	/* other places are another space */
	ep_start(&e[1], f->d.socket, "-c", "gqa", BLOB, "--checkpoint", "32",
		 NULL);
	T_EQ(ep_one(&e[1], "gqa", &cold).hit, 0);
	T_EQ(ep_stat(&e[1], "published"), 6);
	r = shares(text, sizeof(text), 97);
	T_EQ(ep_one(&e[1], "gqa", &r).hit, 96);
	all_quiet(f);
}

/* Shorter than a checkpoint, one exactly, one and a token; and samples. */
static void answers_of_odd_lengths_are_the_models(void **state)
{
	static const unsigned int len[] = { 1, 63, 64, 65, 128, 129 };
	struct fx *f = *state;
	struct ep_answer a[3];
	char text[130];
	unsigned int i, j;

	start(f);
	for (i = 0; i < 6; i++) {
		blob_engine(f, &e[0], shapes[i]);
		for (j = 0; j < 2 * 6; j++) {
			struct ep_req r = {
				.id = j, .text = text, .max_tokens = 1 + j % 3,
			};

			memset(text, 0, sizeof(text));
			memcpy(text, story, len[j % 6]);
			a[0] = ep_one(&e[0], shapes[i], &r);
			T_CHECK(a[0].hit <= deepest(&a[0]));
			if (j >= 6)
				T_EQ(a[0].hit, deepest(&a[0]));
		}
		ep_ask(&e[0], &(struct ep_req){
			.id = 9, .text = story, .max_tokens = 12, .n = 3,
			.temperature = 1, .seed = 3 });
		ep_answers(&e[0], a, 3);
		for (j = 0; j < 3; j++) {
			ep_expect(&a[j], shapes[i], &(struct ep_req){
				.id = 9, .text = story, .max_tokens = 12,
				.temperature = 1, .seed = 3 });
			if (a[j].sample)
				restored(&a[j], shapes[i]);
		}
		ep_quit(&e[0]);
	}
	all_quiet(f);
}

static void the_oracle_does_without_a_daemon_and_blobs_do_not(void **state)
{
	struct fx *f = *state;
	char why[2048];

	ep_start(&e[0], NULL, "-c", "gqa", "--oracle", NULL);
	T_EQ(ep_one(&e[0], "gqa", &cold).hit, 0);
	ep_quit(&e[0]);
	T_CHECK(!ep_try_start(&e[0], why, sizeof(why), f->d.socket, "-c", "gqa",
			      BLOB, NULL));
	T_CHECK(strstr(why, "engine: open: "), "%s", why);
}

/* ---- down and up ------------------------------------------------------------------- */

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

/* Another prompt, saved at four places, all of it below when it returns. */
static void press(struct fx *f, struct ep *p, unsigned int i)
{
	char text[300];
	struct ep_answer a;
	size_t n = 0;

	while (n < sizeof(text) - 32)
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%u:%zu,", i,
				      n);
	ep_ask(p, &(struct ep_req){ .id = 1000 + i, .text = text,
				    .max_tokens = 1 });
	ep_answers(p, &a, 1);
	T_CHECK(!a.err, "press %u: %s", i, strerror(-a.err));
	T_WAIT(LONG_WAIT, writes_rest(&f->d));
}

/* Until the memory has been filled twice. */
static void push_out(struct fx *f, struct ep *p)
{
	uint64_t was = ta_counter(&f->d, "dram0", "pgdrop");
	unsigned int i;

	for (i = 0; i < 200; i++) {
		press(f, p, i);
		if (ta_counter(&f->d, "dram0", "pgdrop") - was > 100)
			return;
	}
	t_fail(__FILE__, __LINE__, "nothing leaves");
}

static void a_state_comes_back_from_nvme_as_it_was(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;
	unsigned int i;

	for (i = 0; i < 6; i++) {
		fx_start(f, &(struct td_opts){
			.dram_bytes = 4 * MIB, .nvme_bytes = 64 * MIB,
			.config = PATIENT });
		blob_engine(f, &e[0], shapes[i]);
		ep_one(&e[0], shapes[i], &cold);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
		blob_engine(f, &e[1], shapes[i]);
		push_out(f, &e[1]);
		T_EQ(ep_stat(&e[0], "fetched_pages"), 0);
		a = ep_one(&e[0], shapes[i], &cold);
		restored(&a, shapes[i]);
		T_EQ(ep_stat(&e[0], "fetched_pages"), 1);
		T_CHECK(ta_counter(&f->d, "dram0", "pgload") > 0);
		all_quiet(f);
		td_fini(&f->d);
	}
}

/* A medium that lies: computed, and the same. */
static void flipped_bits_cost_checkpoints_and_nothing_else(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;

	fx_start(f, &(struct td_opts){
		.dram_bytes = 4 * MIB, .nvme_bytes = 64 * MIB,
		.config = PATIENT });
	blob_engine(f, &e[0], "gqa");
	ep_one(&e[0], "gqa", &cold);
	T_WAIT(LONG_WAIT, writes_rest(&f->d));
	blob_engine(f, &e[1], "gqa");
	push_out(f, &e[1]);
	ta_fault(&f->d, "nvme0:read:flip");
	a = ep_one(&e[0], "gqa", &cold);
	T_EQ(a.hit, 0);
	T_CHECK(ta_counter(&f->d, "nvme0", "pgcrc_fail") > 0);
	ta_fault(&f->d, "");
	ep_one(&e[0], "gqa", &cold);
	all_quiet(f);
}

/* One that takes nothing any more: what it has comes back, the rest is computed. */
static void a_full_nvme_costs_checkpoints_and_nothing_else(void **state)
{
	struct fx *f = *state;
	unsigned int i = 500;

	fx_start(f, &(struct td_opts){
		.dram_bytes = 4 * MIB, .nvme_bytes = 64 * MIB,
		.config = PATIENT });
	blob_engine(f, &e[0], "gqa");
	ep_one(&e[0], "gqa", &cold);
	T_WAIT(LONG_WAIT, writes_rest(&f->d));
	blob_engine(f, &e[1], "gqa");
	push_out(f, &e[1]);
	ta_fault(&f->d, "nvme0:write:enospc");
	T_WAIT(LONG_WAIT, (press(f, &e[1], i++),
			   ta_node(&f->d, "nvme0", "write.enospc") > 0));
	ep_one(&e[0], "gqa", &cold);
	ta_fault(&f->d, "");
	ep_one(&e[0], "gqa", &cold);
	all_quiet(f);
}

/* ---- another daemon, other modes ----------------------------------------------------- */

static void a_daemon_that_dies_costs_checkpoints_and_nothing_else(void **state)
{
	struct fx *f = *state;
	struct ep_req r[8];
	struct ep_answer a;
	char text[8][400];
	unsigned int i, j;

	start(f);
	for (i = 0; i < 6; i++) {
		blob_engine(f, &e[0], shapes[i]);
		ep_one(&e[0], shapes[i], &cold);
		td_kill(&f->d);
		ep_one(&e[0], shapes[i], &cold);
		T_OK(td_start(&f->d));
		T_WAIT(LONG_WAIT, ep_one(&e[0], shapes[i], &cold).hit > 0);
		/* and while it works */
		for (j = 0; j < 8; j++) {
			r[j] = shares(text[j], sizeof(text[j]), 60 + 10 * j);
			ep_ask(&e[0], &r[j]);
		}
		td_kill(&f->d);
		T_OK(td_start(&f->d));
		for (j = 0; j < 8; j++) {
			ep_answers(&e[0], &a, 1);
			ep_expect(&a, shapes[i], &r[j]);
		}
		T_WAIT(LONG_WAIT, ep_one(&e[0], shapes[i], &cold).hit > 0);
		ep_quit(&e[0]);
	}
	all_quiet(f);
}

static void modes_change_who_computes_and_nothing_else(void **state)
{
	static const char *const mode[] = {
		"bypass", "on", "readonly", "observe", "on",
	};
	struct fx *f = *state;
	struct ep_answer a;
	struct ep_req r;
	char text[400];
	unsigned int i;

	start(f);
	blob_engine(f, &e[0], "gqa");
	ep_one(&e[0], "gqa", &cold);
	for (i = 0; i < 5; i++) {
		ta_mode(&f->d, mode[i]);
		a = ep_one(&e[0], "gqa", &cold);
		if (!strcmp(mode[i], "on") || !strcmp(mode[i], "readonly"))
			restored(&a, "gqa");
		else
			T_EQ(a.hit, 0);
		/* something new, that has to be saved */
		r = shares(text, sizeof(text), 66 + i);
		ep_one(&e[0], "gqa", &r);
	}
	all_quiet(f);
}

/* ---- others -------------------------------------------------------------------------- */

static void two_engines_save_the_same_at_once(void **state)
{
	struct fx *f = *state;
	struct ep_req r[12];
	char text[12][400];
	struct ep_answer a;
	unsigned int i, j, k;

	start(f);
	for (i = 0; i < 6; i++) {
		uint64_t published;

		blob_engine(f, &e[0], shapes[i]);
		blob_engine(f, &e[1], shapes[i]);
		for (j = 0; j < 12; j++) {
			/* nothing in common: two checkpoints each */
			memcpy(text[j], story, 150);
			text[j][0] = (char)('a' + j);
			text[j][150] = '\0';
			r[j] = (struct ep_req){ .id = j, .text = text[j],
						.max_tokens = 2 };
			for (k = 0; k < 2; k++)
				ep_ask(&e[k], &r[j]);
		}
		for (j = 0; j < 12; j++) {
			for (k = 0; k < 2; k++) {
				ep_answers(&e[k], &a, 1);
				ep_expect(&a, shapes[i], &r[j]);
			}
		}
		/* of two that are the same one is there */
		published = ep_stat(&e[0], "published") +
			    ep_stat(&e[1], "published");
		T_EQ(published, 12 * 2);
		ep_quit(&e[0]);
		ep_quit(&e[1]);
	}
	all_quiet(f);
}

static void a_state_of_other_weights_is_never_restored(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;

	start(f);
	/* it is another space */
	ep_start(&e[0], f->d.socket, "-c", "gqa", BLOB, "--seed", "2", NULL);
	blob_engine(f, &e[1], "gqa");
	ep_ask(&e[0], &cold);
	ep_answers(&e[0], &a, 1);
	T_EQ(ep_stat(&e[0], "published"), 3);
	T_EQ(ep_one(&e[1], "gqa", &cold).hit, 0);
	T_EQ(ep_stat(&e[1], "nonsense"), 0);
	ep_quit(&e[0]);
	ep_quit(&e[1]);
	/* and where somebody says that it is the same, the bytes say no */
	ep_start(&e[0], f->d.socket, "-c", "gqa", BLOB, "--seed", "2",
		 "--revision", "one", NULL);
	ep_start(&e[1], f->d.socket, "-c", "gqa", BLOB, "--revision", "one",
		 NULL);
	ep_ask(&e[0], &cold);
	ep_answers(&e[0], &a, 1);
	T_EQ(ep_stat(&e[0], "published"), 3);
	T_EQ(ep_one(&e[1], "gqa", &cold).hit, 0);
	T_EQ(ep_stat(&e[1], "nonsense"), 3);
	/* what was reported is gone, and its place is free */
	T_WAIT(LONG_WAIT, ep_one(&e[1], "gqa", &cold).hit > 0);
	all_quiet(f);
}

/* In computing, between begin and commit, after the commit: wherever it is. */
static void an_engine_that_is_killed_leaves_nothing_half_saved(void **state)
{
	unsigned int rounds = test_long() ? 50 : 6, i, j;
	struct fx *f = *state;
	struct ep_req r[8];
	char text[8][400];
	struct rng rng;

	rng_seed(&rng, test_seed());
	start(f);
	for (i = 0; i < rounds; i++) {
		ep_start(&e[0], f->d.socket, "-c", "gqa", BLOB, "--checkpoint",
			 "16", NULL);
		for (j = 0; j < 8; j++) {
			r[j] = shares(text[j], sizeof(text[j]), 8 + 20 * j);
			text[j][0] = (char)('A' + i % 26);
			ep_ask(&e[0], &r[j]);
		}
		usleep((useconds_t)rng_below(&rng, 100000));
		ep_kill(&e[0]);
		ta_baseline(&f->d, LONG_WAIT);
		ta_check(&f->d);
		ep_start(&e[1], f->d.socket, "-c", "gqa", BLOB, "--checkpoint",
			 "16", NULL);
		for (j = 0; j < 8; j++)
			ep_one(&e[1], "gqa", &r[j]);
		all_quiet(f);
	}
}

int main(void)
{
#define T(x) cmocka_unit_test_setup_teardown(x, fx_setup, teardown)
	const struct CMUnitTest tests[] = {
		T(a_state_is_restored_in_the_same_and_in_another_process),
		T(the_deepest_checkpoint_in_common_is_where_it_goes_on),
		T(not_every_place_is_saved),
		T(answers_of_odd_lengths_are_the_models),
		T(the_oracle_does_without_a_daemon_and_blobs_do_not),
		T(a_state_comes_back_from_nvme_as_it_was),
		T(flipped_bits_cost_checkpoints_and_nothing_else),
		T(a_full_nvme_costs_checkpoints_and_nothing_else),
		T(a_daemon_that_dies_costs_checkpoints_and_nothing_else),
		T(modes_change_who_computes_and_nothing_else),
		T(two_engines_save_the_same_at_once),
		T(a_state_of_other_weights_is_never_restored),
		T(an_engine_that_is_killed_leaves_nothing_half_saved),
	};
	int failed;

	fx_filter();
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	ep_forget();
	return failed;
}
