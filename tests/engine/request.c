/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests; see request.h. Whoever writes one is a stranger: a field that is
 * not known, or not what it should be, is an error and no default.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>
#include <kvmm/kvmm.h>

#include "tests/engine/request.h"

const char *request_wrong(const struct sched_req *r, uint32_t vocab)
{
	uint32_t i;

	if (!r->ntok)
		return "tokens: the prompt is empty";
	if (r->ntok > REQUEST_MAX_TOKENS)
		return "tokens: the prompt is longer than 1048576";
	for (i = 0; i < r->ntok; i++)
		if (r->tok[i] >= vocab)
			return "tokens: one of them is not in the vocabulary";
	if (!r->max_tokens || r->max_tokens > REQUEST_MAX_TOKENS)
		return "max_tokens: from 1 to 1048576";
	if (r->nsamples > REQUEST_MAX_SAMPLES)
		return "n: from 1 to 16";
	if (!isfinite(r->temperature) || r->temperature < 0)
		return "temperature: a number, 0 or more";
	return NULL;
}

int text_tokens(const char *text, uint32_t vocab, uint32_t **tok)
{
	size_t n = strlen(text), i;

	*tok = malloc((n ? n : 1) * sizeof(**tok));
	if (!*tok)
		return -ENOMEM;
	for (i = 0; i < n; i++)
		(*tok)[i] = (uint8_t)text[i] % vocab;
	return (int)n;
}

/* ---- out of JSON -------------------------------------------------------------- */

/* What request_read() goes along with: the first complaint is the one. */
struct reading {
	const json_t	*o;
	char		*why;
	size_t		len;
	bool		bad;
};

static void complain(struct reading *rd, const char *field, const char *what)
{
	if (!rd->bad)
		snprintf(rd->why, rd->len, "%s: %s", field, what);
	rd->bad = true;
}

static void known_fields(struct reading *rd)
{
	static const char *const field[] = {
		"id", "text", "tokens", "max_tokens", "n", "temperature",
		"seed", "session", "how",
	};
	const char *name;
	json_t *v;
	size_t i;

	json_object_foreach((json_t *)rd->o, name, v) {
		for (i = 0; i < sizeof(field) / sizeof(field[0]); i++)
			if (!strcmp(field[i], name))
				break;
		if (i == sizeof(field) / sizeof(field[0]))
			complain(rd, name, "no such field");
	}
}

static uint64_t number(struct reading *rd, const char *name, uint64_t dflt)
{
	const json_t *v = json_object_get(rd->o, name);

	if (!v)
		return dflt;
	if (!json_is_integer(v) || json_integer_value(v) < 0)
		complain(rd, name, "a whole number, 0 or more");
	return (uint64_t)json_integer_value(v);
}

/* One of 32 bits; request_wrong() looks closer. */
static uint32_t number32(struct reading *rd, const char *name, uint32_t dflt,
			 uint32_t most)
{
	uint64_t v = number(rd, name, dflt);
	char what[32];

	if (v < 1 || v > most) {
		snprintf(what, sizeof(what), "from 1 to %u", most);
		complain(rd, name, what);
	}
	return (uint32_t)v;
}

static float real(struct reading *rd, const char *name)
{
	const json_t *v = json_object_get(rd->o, name);

	if (v && !json_is_number(v))
		complain(rd, name, "a number, 0 or more");
	return (float)json_number_value(v);
}

static int how_of(struct reading *rd)
{
	const json_t *v = json_object_get(rd->o, "how");
	const char *how = json_string_value(v);

	if (!v)
		return KVMM_UNKNOWN;
	if (how && !strcmp(how, "ended"))
		return KVMM_ENDED;
	if (!how || strcmp(how, "continues"))
		complain(rd, "how", "continues or ended");
	return KVMM_CONTINUES;
}

static int array_in(struct reading *rd, const json_t *a, uint32_t vocab,
		    uint32_t **tok)
{
	size_t n = json_array_size(a), i;

	*tok = malloc((n ? n : 1) * sizeof(**tok));
	if (!*tok)
		return -ENOMEM;
	for (i = 0; i < n; i++) {
		const json_t *v = json_array_get(a, i);
		json_int_t t = json_is_integer(v) ? json_integer_value(v) : -1;

		if (t < 0 || t >= vocab) {
			complain(rd, "tokens",
				 "an array of numbers below the vocabulary");
			return 0;
		}
		(*tok)[i] = (uint32_t)t;
	}
	return (int)n;
}

static int tokens_in(struct reading *rd, uint32_t vocab, uint32_t **tok)
{
	const json_t *a = json_object_get(rd->o, "tokens");
	const json_t *text = json_object_get(rd->o, "text");

	if (!a == !text)
		complain(rd, "tokens", "this or text, and not both");
	else if (a && !json_is_array(a))
		complain(rd, "tokens", "an array of numbers below the vocabulary");
	else if (text && !json_is_string(text))
		complain(rd, "text", "a string");
	else if (text && !*json_string_value(text))
		complain(rd, "text", "the prompt is empty");
	else if (text)
		return text_tokens(json_string_value(text), vocab, tok);
	else
		return array_in(rd, a, vocab, tok);
	return 0;
}

int request_read(const json_t *o, uint32_t vocab, struct sched_req *r,
		 uint32_t **tok, char *why, size_t len)
{
	struct reading rd = { .o = o, .why = why, .len = len };
	const char *wrong;
	int n;

	*tok = NULL;
	known_fields(&rd);
	*r = (struct sched_req){
		.id		= number(&rd, "id", 0),
		.max_tokens	= number32(&rd, "max_tokens", 16,
					   REQUEST_MAX_TOKENS),
		.nsamples	= number32(&rd, "n", 1, REQUEST_MAX_SAMPLES),
		.temperature	= real(&rd, "temperature"),
		.seed		= number(&rd, "seed", 0),
		.session	= number(&rd, "session", 0),
		.how		= how_of(&rd),
	};
	n = tokens_in(&rd, vocab, tok);
	r->tok = *tok;
	r->ntok = n > 0 ? (uint32_t)n : 0;
	if (n < 0)
		complain(&rd, "tokens", strerror(-n));
	wrong = rd.bad ? NULL : request_wrong(r, vocab);
	if (wrong)
		snprintf(why, len, "%s", wrong);
	if (!rd.bad && !wrong)
		return 0;
	free(*tok);
	*tok = NULL;
	return n < 0 ? n : -EINVAL;
}
