/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The small engine and what no engine should be asked: requests that make no
 * sense, command lines that cannot be, prompts that no node has room for. Each
 * is answered, in time and with a sentence, and the next one as if nothing had
 * been.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "tests/lib/engine_proc.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

static const struct ep_req good = {
	.id = 1, .max_tokens = 12, .temperature = 0.8, .seed = 9,
	.text = "Whatever was said before, this can be answered, and so it is.",
};

static struct ep e;

static int teardown(void **state)
{
	ep_kill(&e);
	return fx_teardown(state);
}

/* ---- lines that make no sense --------------------------------------------------- */

/* @id: -1: the answer cannot say whose it is */
static const struct bad {
	const char	*line;
	int64_t		id;
	const char	*why;
} bad[] = {
	{ "{\"id\":1,\"text\":\"x\",\"max_tokens\":4294967295}", 1, "max_tokens: " },
	{ "{\"id\":2,\"text\":\"x\",\"max_tokens\":4294967297}", 2, "max_tokens: " },
	{ "{\"id\":3,\"text\":\"x\",\"max_tokens\":1048577}", 3, "max_tokens: " },
	{ "{\"id\":4,\"text\":\"x\",\"max_tokens\":0}", 4, "max_tokens: " },
	{ "{\"id\":5,\"text\":\"x\",\"max_tokens\":-1}", 5, "max_tokens: " },
	{ "{\"id\":6,\"text\":\"x\",\"max_tokens\":\"all\"}", 6, "max_tokens: " },
	{ "{\"id\":7,\"text\":\"x\",\"n\":17}", 7, "n: " },
	{ "{\"id\":8,\"text\":\"x\",\"n\":4294967297}", 8, "n: " },
	{ "{\"id\":9,\"text\":\"x\",\"n\":0}", 9, "n: " },
	{ "{\"id\":10,\"text\":\"x\",\"stop\":\".\"}", 10, "stop: no such field" },
	{ "{\"id\":11}", 11, "tokens: " },
	{ "{\"id\":12,\"text\":\"\"}", 12, "text: the prompt is empty" },
	{ "{\"id\":13,\"text\":7}", 13, "text: " },
	{ "{\"id\":14,\"tokens\":[]}", 14, "tokens: the prompt is empty" },
	{ "{\"id\":15,\"tokens\":[1,\"2\"]}", 15, "tokens: " },
	{ "{\"id\":16,\"tokens\":[1,4096]}", 16, "tokens: " },
	{ "{\"id\":17,\"tokens\":[-1]}", 17, "tokens: " },
	{ "{\"id\":18,\"tokens\":{\"0\":1}}", 18, "tokens: " },
	{ "{\"id\":19,\"tokens\":[1],\"text\":\"x\"}", 19, "tokens: " },
	{ "{\"id\":20,\"text\":\"x\",\"temperature\":\"hot\"}", 20, "temperature: " },
	{ "{\"id\":21,\"text\":\"x\",\"temperature\":-1}", 21, "temperature: " },
	{ "{\"id\":22,\"text\":\"x\",\"temperature\":1e300}", 22, "temperature: " },
	{ "{\"id\":23,\"text\":\"x\",\"seed\":1.5}", 23, "seed: " },
	{ "{\"id\":24,\"text\":\"x\",\"how\":\"perhaps\"}", 24, "how: " },
	{ "{\"id\":25,\"cmd\":\"dance\"}", 25, "no such command" },
	{ "{\"id\":\"26\",\"text\":\"x\"}", -1, "id: " },
	{ "{\"id\":-27,\"text\":\"x\"}", -27, "id: " },
	{ "{\"id\":28,\"tex", -1, "" },
	{ "{\"id\":29,\"text\":\"x\"}}", -1, "" },
	{ "{\"id\":30,\"text\":\"\\u0000\"}", -1, "" },
	{ "{\"id\":31,\"text\":\"\xff\xfe\"}", -1, "" },
	/* its complaint cuts a letter in two */
	{ "{\"id\":32,\"text\": \xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4", -1, "" },
	{ "[1]", -1, "not an object" },
	{ "7", -1, "" },
	{ "", -1, "" },
};
#define NR_BAD	(sizeof(bad) / sizeof(bad[0]))

static void all_are_refused(void)
{
	char why[512];
	size_t i;

	for (i = 0; i < NR_BAD; i++) {
		int64_t id;

		ep_say(&e, bad[i].line);
		ep_say(&e, "\n");
		id = ep_complaint(&e, why, sizeof(why));
		T_CHECK(id == bad[i].id && strstr(why, bad[i].why), "%s: %s",
			bad[i].line, why);
	}
	ep_one(&e, "gqa", &good);
}

static void a_request_without_sense_is_refused_by_its_id(void **state)
{
	struct fx *f = *state;

	fx_start(f, NULL);
	ep_start(&e, f->d.socket, "-c", "gqa", NULL);
	all_are_refused();
	T_EQ(ep_stat(&e, "requests"), 1);
	ep_quit(&e);
	ep_start(&e, f->d.socket, "-c", "gqa", "--blob", NULL);
	all_are_refused();
	ep_quit(&e);
	ep_start(&e, NULL, "-c", "gqa", "--oracle", NULL);
	all_are_refused();
	T_EQ(ep_stat(&e, "requests"), 1);
	ep_quit(&e);
	ta_baseline(&f->d, 5000);
}

/* 300 tokens and 2^32 - 301 more: a sum that is nothing. */
static void a_length_that_wraps_is_refused(void **state)
{
	static char line[512], prompt[301], why[128];
	unsigned int more[] = { 4294966995u, 4294966996u, 4294967295u }, i;
	struct fx *f = *state;

	fx_start(f, NULL);
	ep_start(&e, f->d.socket, "-c", "gqa", NULL);
	memset(prompt, 'w', sizeof(prompt) - 1);
	for (i = 0; i < 3; i++) {
		snprintf(line, sizeof(line),
			 "{\"id\":%u,\"text\":\"%s\",\"max_tokens\":%u}\n", i,
			 prompt, more[i]);
		ep_say(&e, line);
		T_EQ(ep_complaint(&e, why, sizeof(why)), i);
		T_CHECK(strstr(why, "max_tokens: "), "%s", why);
	}
	ep_one(&e, "gqa", &good);
	ep_quit(&e);
}

static void a_last_line_without_an_end_is_answered(void **state)
{
	struct fx *f = *state;
	struct ep_answer a;

	fx_start(f, NULL);
	ep_start(&e, f->d.socket, "-c", "gqa", NULL);
	ep_say(&e, "{\"id\":5,\"text\":\"And then\",\"max_tokens\":3}");
	ep_hang_up(&e);
	ep_answers(&e, &a, 1);
	T_EQ(a.id, 5);
	T_EQ(a.ntok, 3);
	T_EQ(ep_end(&e, 10000), 0);
}

/* ---- command lines that cannot be ------------------------------------------------ */

static void a_command_line_without_sense_is_refused(void **state)
{
	static const char *const line[][6] = {
		{ "--ranks", "9", "", "", "9 ranks: at most 8" },
		{ "--ranks", "4294967295", "", "", "at most 8" },
		{ "--ranks", "2", "--guard", "--eager", "--guard: not with --ranks" },
		{ "--ranks", "3", "", "", "heads that they do not divide" },
		{ "--block-tokens", "4294967295", "", "", "geometry" },
		{ "--snap-tokens", "4294967280", "", "", "geometry" },
		{ "--block-tokens", "65536", "--heads-off", "4294967295", "geometry" },
		{ "-c", "/no/config.json", "--weights", "/no/weights", "/no/config.json: " },
		{ "-c", "gqa", "--weights", "/no/weights", "/no/weights: " },
		{ "--prompt", "", "--generate", "4", "--prompt: " },
		{ "--prompt", "x", "--generate", "0", "--generate: " },
		{ "--prompt", "x", "--generate", "4294967295", "--generate: " },
		{ "--trace", "/dev/null", "--page-tokens", "4294967295", "--page-tokens: " },
	};
	struct fx *f = *state;
	char why[2048];
	size_t i;

	fx_start(f, NULL);
	for (i = 0; i < sizeof(line) / sizeof(line[0]); i++) {
		const char *const *l = line[i];

		T_CHECK(!ep_try_start(&e, why, sizeof(why), f->d.socket, "-c",
				      "gqa", l[0], l[1],
				      *l[2] ? l[2] : "--eager",
				      *l[2] ? l[3] : NULL, NULL),
			"%s %s", l[0], l[1]);
		T_CHECK(strstr(why, l[4]), "%s %s: %s", l[0], l[1], why);
	}
	ta_baseline(&f->d, 5000);
}

/* One line, and nothing that would have to be told from it. */
static void a_prompts_answer_is_all_that_is_printed(void **state)
{
	struct fx *f = *state;
	char out[2048];

	fx_start(f, NULL);
	ep_print(out, sizeof(out), f->d.socket, "-c", "gqa", "--text",
		 "--prompt", "And so", "--generate", "4", NULL);
	T_CHECK(strstr(out, "\"event\":\"done\""), "%s", out);
	T_CHECK(strchr(out, '\n') == out + strlen(out) - 1, "%s", out);
}

/* ---- more than there is ---------------------------------------------------------- */

/* No node has room for it: all of its samples are told so. */
static void a_prompt_without_room_is_answered_for_every_sample(void **state)
{
	static char text[6000];
	struct ep_req r = { .id = 3, .text = text, .max_tokens = 2 };
	struct fx *f = *state;
	struct ep_answer a[3];
	unsigned int n, i, seen;

	fx_start(f, &(struct td_opts){ .dram_bytes = 2 * MIB });
	ep_start(&e, f->d.socket, "-c", "mha", "--patience-ms", "300", NULL);
	memset(text, 'l', sizeof(text) - 1);
	for (n = 1; n <= 3; n++) {
		r.n = n;
		ep_ask(&e, &r);
		ep_answers(&e, a, n);
		for (seen = 0, i = 0; i < n; i++) {
			T_EQ(a[i].err, -ENOSPC);
			T_CHECK(strstr(a[i].why, "no room"), "%s", a[i].why);
			T_EQ(a[i].id, 3);
			seen |= 1u << a[i].sample;
		}
		T_EQ(seen, (1u << n) - 1);
	}
	ep_one(&e, "mha", &good);
	ep_quit(&e);
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

/*
 * Prompts that fill the node, page by page up to where they do not fit: at some
 * of them no frame is left for a sample's tail, and none comes, since all is held
 * by the one whose samples they are.
 */
static void samples_without_tails_are_computed_by_themselves(void **state)
{
	static char text[6000];
	struct ep_req r = { .id = 4, .text = text, .max_tokens = 2, .n = 3,
			    .temperature = 0.8, .seed = 3 };
	unsigned int len, i, refused = 0, alone = 0;
	struct fx *f = *state;
	struct ep_answer a[3];

	fx_start(f, &(struct td_opts){ .dram_bytes = MIB });
	ep_start(&e, f->d.socket, "-c", "mha", "--patience-ms", "300",
		 "--block-tokens", "64", NULL);
	for (len = 640; !refused && len < sizeof(text); len += 64) {
		memset(text, 'a' + (int)(len / 64 % 26), len - 8);
		text[len - 8] = '\0';
		ep_ask(&e, &r);
		ep_answers(&e, a, 3);
		for (i = 0; i < 3; i++) {
			bool by_itself = !a[i].err && a[i].sample &&
					 a[i].computed > 2;

			if (a[i].err)
				T_EQ(a[i].err, -ENOSPC);
			if (by_itself)
				ep_expect(&a[i], "mha", &r);
			alone += by_itself;
			refused += a[i].err != 0;
		}
	}
	T_CHECK(refused, "a prompt of %u tokens found room", len);
	T_CHECK(alone, "every sample got a tail");
	ep_one(&e, "mha", &good);
	ep_quit(&e);
	ta_baseline(&f->d, 5000);
	ta_check(&f->d);
}

int main(void)
{
#define T(x) cmocka_unit_test_setup_teardown(x, fx_setup, teardown)
	const struct CMUnitTest tests[] = {
		T(a_request_without_sense_is_refused_by_its_id),
		T(a_length_that_wraps_is_refused),
		T(a_last_line_without_an_end_is_answered),
		T(a_command_line_without_sense_is_refused),
		T(a_prompts_answer_is_all_that_is_printed),
		T(a_prompt_without_room_is_answered_for_every_sample),
		T(samples_without_tails_are_computed_by_themselves),
	};
	int failed;

	fx_filter();
	failed = cmocka_run_group_tests(tests, NULL, NULL);
	ep_forget();
	return failed;
}
