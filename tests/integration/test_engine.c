/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real consumer: the small engine of tests/engine/, whose KV tensor is kvmm
 * memory. Whatever happens to its pages, every token and every logit is what the
 * same model computes alone, in private contiguous memory.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/engine_proc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

static const char *const shapes[] = {
	"mha", "gqa", "mqa", "mla", "window", "linear",
};

/* 200 bytes and some: a dozen pages, three snapshots of a state. */
static const char story[] =
	"Once upon a time there was a manager of memory who knew every page by "
	"its key. Engines came from far to ask for what others had computed "
	"before them, and never had to wait for an answer. Then one night, at "
	"three, ";

static const struct ep_req cold = {
	.id = 1, .text = story, .max_tokens = 24, .temperature = 0.8, .seed = 7,
};
static const struct ep_req more = {
	.id = 2, .max_tokens = 16, .temperature = 0.9, .seed = 11,
	.text = "Once upon a time there was a manager of memory who knew every "
		"page by its key. Engines came from far to ask for what others "
		"had computed before them, but the manager was asleep.",
};

static struct ep e[4];

static int teardown(void **state)
{
	unsigned int i;

	for (i = 0; i < 4; i++)
		ep_kill(&e[i]);
	return fx_teardown(state);
}

static void start(struct fx *f)
{
	fx_start(f, &(struct td_opts){ .dram_bytes = 64 * MIB });
}

/* ---- cold, and hits -------------------------------------------------------------- */

static void a_cold_answer_is_the_models(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	start(f);
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], NULL);
		T_EQ(ep_one(&e[0], shapes[i], &cold).hit, 0);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

/* Greedy, one token, one page exactly, a prompt of whole pages, a short one. */
static void answers_of_odd_lengths_are_the_models(void **state)
{
	static const struct ep_req odd[] = {
		{ .id = 1, .text = "x", .max_tokens = 1 },
		{ .id = 2, .text = "0123456789abcdef", .max_tokens = 20 },
		{ .id = 3, .text = "0123456789abcde", .max_tokens = 2 },
		{ .id = 4, .max_tokens = 17, .text =
		  "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef" },
	};
	struct fx *f = *state;
	unsigned int i, j;

	start(f);
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], NULL);
		for (j = 0; j < 2 * 4; j++)
			ep_one(&e[0], shapes[i], &odd[j % 4]);
		ep_quit(&e[0]);
	}
}

/*
 * What another process had computed is found in place: mapped read-only here,
 * and not a byte of it was moved for that.
 */
static void a_hit_from_another_process_is_no_copy(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;
	unsigned int i;

	start(f);
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], NULL);
		ep_start(&e[1], f->d.socket, "-c", shapes[i], "--guard", NULL);
		ep_one(&e[0], shapes[i], &cold);
		T_WAIT(5000, !ep_stat(&e[0], "publishing"));
		a = ep_one(&e[1], shapes[i], &cold);
		T_WAIT(5000, !ep_stat(&e[1], "publishing"));
		T_CHECK(a.hit >= 128, "%s: %u tokens hit", shapes[i], a.hit);
		T_CHECK(a.hit + a.computed <= a.prompt + 24);
		a = ep_one(&e[1], shapes[i], &more);
		T_CHECK(a.hit >= 64, "%s: %u tokens hit", shapes[i], a.hit);
		T_CHECK(ep_stat(&e[1], "guarded") >= ep_stat(&e[1], "hit_pages"));
		T_EQ(ep_stat(&e[1], "unguarded"), 0);
		ep_quit(&e[0]);
		ep_quit(&e[1]);
		T_EQ(ta_counter(&f->d, "dram0", "bytes_in"), 0);
		T_EQ(ta_counter(&f->d, "dram0", "bytes_out"), 0);
	}
	ta_baseline(&f->d, 5000);
}

/* It has ended, and another one goes on with what it left. */
static void an_engine_that_starts_again_finds_its_prefixes(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	start(f);
	for (i = 0; i < 12; i++) {
		const char *shape = shapes[i / 2];
		uint32_t hit;

		ep_start(&e[0], f->d.socket, "-c", shape, NULL);
		hit = ep_one(&e[0], shape, &cold).hit;
		T_CHECK(i % 2 ? hit >= 192 : !hit, "%s: %u tokens hit", shape,
			hit);
		ep_quit(&e[0]);
	}
}

/* ---- many at a time -------------------------------------------------------------- */

static void ask_many(struct ep *p, unsigned int n, struct ep_req *r)
{
	static char text[32][128];
	unsigned int i;

	for (i = 0; i < n; i++) {
		snprintf(text[i], sizeof(text[i]),
			 "All of them begin in the same way for some pages, and then say %u%s.",
			 i % 7, i % 3 ? "" : " more, and go on for a little while");
		r[i] = (struct ep_req){
			.id = i, .text = text[i], .max_tokens = 8 + i % 9,
			.temperature = 0.7, .seed = i,
		};
		ep_ask(p, &r[i]);
	}
}

static void expect_many(struct ep *p, const char *shape, unsigned int n,
			const struct ep_req *r)
{
	struct ep_answer a[32];
	unsigned int i;

	ep_answers(p, a, n);
	for (i = 0; i < n; i++)
		ep_expect(&a[i], shape, &r[a[i].id]);
}

static void requests_are_batched(void **state)
{
	struct fx *f = *state;
	struct ep_req r[32];
	unsigned int i;

	start(f);
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], "--budget", "48",
			 NULL);
		ask_many(&e[0], 24, r);
		expect_many(&e[0], shapes[i], 24, r);
		T_CHECK(ep_stat(&e[0], "steps") < 24 * 12);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

static uint64_t both(const char *name)
{
	return ep_stat(&e[0], name) + ep_stat(&e[1], name);
}

/* Both compute the same at the same time: one page of two stays, and serves. */
static void two_engines_of_a_space_share_what_they_compute(void **state)
{
	uint64_t exists = 0, audited = 0, hits;
	struct fx *f = *state;
	struct ep_req r[32];
	unsigned int i;

	start(f);
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], NULL);
		ep_start(&e[1], f->d.socket, "-c", shapes[i], NULL);
		ask_many(&e[0], 16, r);
		ask_many(&e[1], 16, r);
		expect_many(&e[0], shapes[i], 16, r);
		expect_many(&e[1], shapes[i], 16, r);
		T_EQ(both("differ"), 0);
		audited += both("audited");
		exists += both("exists");
		/* none of the two has computed all that it used */
		hits = both("hit_pages");
		T_CHECK(hits + both("exists") > 0, "%s", shapes[i]);
		ep_quit(&e[0]);
		ep_quit(&e[1]);
	}
	/* and it was seen that a page of one is a page of the other */
	T_CHECK(exists > 0 && audited > 0);
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

/* ---- giving way ------------------------------------------------------------------ */

static void preempted(struct fx *f, const char *how)
{
	struct ep_req r[32];
	unsigned int i;

	start(f);
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], "--preempt", how,
			 "--preempt-every", "5", "--budget", "32", NULL);
		ask_many(&e[0], 12, r);
		expect_many(&e[0], shapes[i], 12, r);
		T_CHECK(ep_stat(&e[0], "preempted") > 0);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

static void preemption_by_recompute_changes_nothing(void **state)
{
	preempted(*state, "recompute");
}

static void preemption_by_swap_changes_nothing(void **state)
{
	preempted(*state, "swap");
}

/* ---- samples ----------------------------------------------------------------------- */

static void samples_share_their_prompt(void **state)
{
	struct ep_req r = more;
	struct fx *f = *state;
	struct ep_answer a[5];
	unsigned int i, j, computed;

	start(f);
	r.n = 5;
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], NULL);
		ep_ask(&e[0], &r);
		ep_answers(&e[0], a, 5);
		for (computed = 0, j = 0; j < 5; j++) {
			ep_expect(&a[j], shapes[i], &r);
			computed += a[j].computed;
		}
		T_EQ(ep_stat(&e[0], "forks"), 4);
		/* the prompt once, and what each has generated but its last */
		T_EQ(computed, a[0].prompt + 5 * 15);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

/*
 * Frames that were hits once, and read-only, become the samples' own: there are
 * few of them, so those of some prompts are the next one's.
 */
static void samples_write_to_pages_that_were_guarded(void **state)
{
	static char text[8][300];
	struct fx *f = *state;
	struct ep_answer a[2];
	unsigned int i, j;

	fx_start(f, &(struct td_opts){ .dram_bytes = MIB });
	ep_start(&e[0], f->d.socket, "-c", "mha", "--guard", NULL);
	for (i = 0; i < 8; i++) {
		struct ep_req r = { .id = i, .text = text[i], .max_tokens = 6,
				    .n = 2, .temperature = 1, .seed = i };

		memset(text[i], 'a' + (int)i, 200 + 3 * i);
		ep_one(&e[0], "mha", &(struct ep_req){ .id = i, .text = text[i],
						       .max_tokens = 1 });
		ep_ask(&e[0], &r);
		ep_answers(&e[0], a, 2);
		for (j = 0; j < 2; j++)
			ep_expect(&a[j], "mha", &r);
	}
	T_CHECK(ta_counter(&f->d, "dram0", "pgpublish") > MIB / 16384);
	T_CHECK(ep_stat(&e[0], "guarded") > 8 * 8);
	T_EQ(ep_stat(&e[0], "unguarded"), 0);
	T_CHECK(ep_stat(&e[0], "forks") > 4);
	ep_quit(&e[0]);
	ta_baseline(&f->d, 5000);
}

static void samples_of_preempted_prompts_are_the_models(void **state)
{
	struct ep_req r = more;
	struct fx *f = *state;
	struct ep_answer a[4];
	unsigned int i, j;

	start(f);
	r.n = 4;
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], "--preempt", "swap",
			 "--preempt-every", "3", NULL);
		ep_ask(&e[0], &r);
		ep_answers(&e[0], a, 4);
		for (j = 0; j < 4; j++)
			ep_expect(&a[j], shapes[i], &r);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 5000);
}

/*
 * A page that was not published is the first sample's own, and goes with it when
 * it ends or gives way: the others must not have it.
 */
static void samples_of_unpublished_prompts_are_the_models(void **state)
{
	static const char *const mode[] = { "observe", "bypass", "readonly" };
	struct ep_req r = more;
	struct fx *f = *state;
	struct ep_answer a[3];
	unsigned int i, j;

	start(f);
	r.n = 3;
	r.max_tokens = 40;
	for (i = 0; i < 3; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], "--budget", "1",
			 NULL);
		ta_mode(&f->d, mode[i]);	/* of the spaces there are */
		ep_ask(&e[0], &r);
		ep_answers(&e[0], a, 3);
		for (j = 0; j < 3; j++)
			ep_expect(&a[j], shapes[i], &r);
		T_EQ(ep_stat(&e[0], "forks"), 0);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 5000);
}

/* ---- modes -------------------------------------------------------------------------- */

static void all_modes(struct fx *f, const char *shape)
{
	static const char *const mode[] = {
		"bypass", "on", "readonly", "observe", "on",
	};
	struct ep_answer a;
	unsigned int i;

	ep_one(&e[0], shape, &cold);
	for (i = 0; i < 5; i++) {
		bool hits = !strcmp(mode[i], "on") || !strcmp(mode[i], "readonly");

		ta_mode(&f->d, mode[i]);
		a = ep_one(&e[0], shape, &cold);
		T_EQ(a.hit > 0, hits);
	}
	/* while it works */
	ep_ask(&e[0], &more);
	ta_mode(&f->d, "bypass");
	ep_ask(&e[0], &cold);
	ta_mode(&f->d, "on");
	for (i = 0; i < 2; i++) {
		ep_answers(&e[0], &a, 1);
		ep_expect(&a, shape, a.id == 1 ? &cold : &more);
	}
}

static void modes_change_who_computes_and_nothing_else(void **state)
{
	struct fx *f = *state;
	unsigned int i;

	start(f);
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], NULL);
		all_modes(f, shapes[i]);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

/* ---- another daemon ------------------------------------------------------------------ */

/* Its frames are all gone; what runs ends by itself, and the next begins anew. */
static void a_daemon_that_dies_costs_hits_and_nothing_else(void **state)
{
	struct fx *f = *state;
	struct ep_req r[32];
	unsigned int i;

	start(f);
	for (i = 0; i < 6; i++) {
		ep_start(&e[0], f->d.socket, "-c", shapes[i], "--budget", "32",
			 NULL);
		ep_one(&e[0], shapes[i], &cold);
		td_kill(&f->d);
		ep_one(&e[0], shapes[i], &more);
		T_OK(td_start(&f->d));
		/* and while it works */
		ask_many(&e[0], 12, r);
		td_kill(&f->d);
		T_OK(td_start(&f->d));
		expect_many(&e[0], shapes[i], 12, r);
		T_WAIT(20000, ep_one(&e[0], shapes[i], &cold).hit > 0);
		T_CHECK(ep_stat(&e[0], "epochs") > 0);
		ep_quit(&e[0]);
	}
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

int main(void)
{
#define T(x) cmocka_unit_test_setup_teardown(x, fx_setup, teardown)
	const struct CMUnitTest tests[] = {
		T(a_cold_answer_is_the_models),
		T(answers_of_odd_lengths_are_the_models),
		T(a_hit_from_another_process_is_no_copy),
		T(an_engine_that_starts_again_finds_its_prefixes),
		T(requests_are_batched),
		T(two_engines_of_a_space_share_what_they_compute),
		T(preemption_by_recompute_changes_nothing),
		T(preemption_by_swap_changes_nothing),
		T(samples_share_their_prompt),
		T(samples_write_to_pages_that_were_guarded),
		T(samples_of_preempted_prompts_are_the_models),
		T(samples_of_unpublished_prompts_are_the_models),
		T(modes_change_who_computes_and_nothing_else),
		T(a_daemon_that_dies_costs_hits_and_nothing_else),
	};
	int failed;

	fx_filter();
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	ep_forget();
	return failed;
}
