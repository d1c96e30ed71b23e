/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A short text, generated twice: by one engine (tests/engine) that has to compute
 * all of the prompt, and by another one, a process of its own, that finds it.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "tests/demo/demo.h"
#include "tests/lib/engine_child.h"

#define PROMPT_BYTES	1200u		/* about: whole sentences */
#define QUICK_BYTES	400u
#define ANSWER		60u
#define START_MS	20000u
#define ANSWER_MS	60000u

static const char sentence[] =
	"A page is computed once, by whoever is first to need it, and found by "
	"all others who begin with the same words. ";

static int take_answer(const json_t *o, struct generated *g)
{
	const char *text = json_string_value(json_object_get(o, "text"));
	const char *digest = json_string_value(json_object_get(o, "digest"));

	if (json_integer_value(json_object_get(o, "err")) || !text || !digest)
		return -EIO;
	snprintf(g->text, sizeof(g->text), "%s", text);
	snprintf(g->digest, sizeof(g->digest), "%s", digest);
	g->ttft_ms = json_number_value(json_object_get(o, "ttft_ms"));
	g->prompt = (uint32_t)json_integer_value(json_object_get(o, "prompt"));
	g->hit = (uint32_t)json_integer_value(json_object_get(o, "hit")) +
		 (uint32_t)json_integer_value(json_object_get(o, "fetched"));
	return 0;
}

static int generate(const char *socket, bool quick, const char *prompt,
		    struct generated *g)
{
	char threads[16];
	const char *const args[] = {
		"-c", quick ? "gqa" : "bench", "--threads", threads, "--text",
		NULL,
	};
	struct engine_child e;
	json_t *o;
	int err, end;

	snprintf(threads, sizeof(threads), "%ld",
		 sysconf(_SC_NPROCESSORS_ONLN));
	err = ec_start(&e, socket, args, START_MS);
	if (err)
		return err;
	err = ec_ask(&e, json_pack("{s:i, s:s, s:i, s:s}", "id", 1, "text",
				   prompt, "max_tokens", (int)ANSWER, "how",
				   "continues"));
	if (!err)
		err = ec_event(&e, "done", ANSWER_MS, &o);
	if (err) {
		ec_kill(&e);
		return err;
	}
	err = take_answer(o, g);
	json_decref(o);
	end = ec_end(&e);
	return err ? err : end;
}

int text_twice(const char *socket, bool quick, struct generated g[2])
{
	char prompt[PROMPT_BYTES + sizeof(sentence)] = "";
	size_t want = quick ? QUICK_BYTES : PROMPT_BYTES, n;
	int err;

	for (n = 0; n < want; n += sizeof(sentence) - 1)
		memcpy(prompt + n, sentence, sizeof(sentence));
	err = generate(socket, quick, prompt, &g[0]);
	return err ? err : generate(socket, quick, prompt, &g[1]);
}

void text_print(const struct generated g[2])
{
	unsigned int i;

	printf("\na prompt of %u tokens, continued twice by a small engine, each time by a new process\n",
	       g[0].prompt);
	printf("(its weights are random and so is the text: what counts is that it is the same)\n");
	for (i = 0; i < 2; i++)
		printf("  %-9s first token after %8.1f ms, %4u tokens hit: %s\n",
		       i ? "from hits" : "computed", g[i].ttft_ms, g[i].hit,
		       g[i].text);
}
