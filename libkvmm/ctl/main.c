/* SPDX-License-Identifier: Apache-2.0 */
#include <argp.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <kvmm/admin.h>

#include "ctl.h"

__attribute__((visibility("default")))
const char *argp_program_version = "kvmmctl " KVMM_VERSION_STRING;

static const struct noun {
	const char	*name;
	enum ctl_exit	(*fn)(const struct ctl *c, int argc, char **argv);
} nouns[] = {
	{ "status",	ctl_status },
	{ "space",	ctl_space },
	{ "client",	ctl_client },
	{ "pins",	ctl_pins },
	{ "mode",	ctl_mode },
	{ "ping",	ctl_ping },
	{ "check",	ctl_check },
	{ "daemon",	ctl_daemon },
};

/* The same, as a list to search. */
static const char *const noun_names[] = {
	"status", "space", "client", "pins", "mode", "ping", "check",
	"daemon", NULL
};

/**
 * struct options - the command line
 * @word:	noun and what follows it
 */
struct options {
	struct ctl	ctl;
	char		**word;
	int		nr_words;
};

static const struct argp_option option_list[] = {
	{ "json", 'j', NULL, 0, "Print the daemon's answer as JSON", 0 },
	{ "socket", 's', "PATH", 0,
	  "Admin socket ($KVMM_ADMIN_SOCKET, else " KVMM_ADMIN_SOCKET ")", 0 },
	{ "timeout", 't', "TIME", 0,
	  "How long to wait, as 500ms or 2s (5s)", 0 },
	{ NULL }
};

/* "500ms", "2s", "2": seconds when there is no unit. 0: not a time. */
static unsigned int parse_ms(const char *s)
{
	char *end;
	double v = strtod(s, &end);

	if (end == s || v <= 0)
		return 0;
	if (!strcmp(end, "ms"))
		v /= 1000;
	else if (*end && strcmp(end, "s"))
		return 0;
	return v >= 0.001 && v <= 86400 ? (unsigned int)(v * 1000) : 0;
}

static error_t parse_option(int key, char *arg, struct argp_state *state)
{
	struct options *o = state->input;

	switch (key) {
	case 'j':
		o->ctl.json = true;
		return 0;
	case 's':
		o->ctl.socket = arg;
		return 0;
	case 't':
		o->ctl.timeout_ms = parse_ms(arg);
		if (!o->ctl.timeout_ms)
			argp_error(state, "--timeout=%s: a time is 1ms to "
				   "86400s", arg);
		return 0;
	case ARGP_KEY_ARGS:
		o->word = state->argv + state->next;
		o->nr_words = state->argc - state->next;
		return 0;
	default:
		return ARGP_ERR_UNKNOWN;
	}
}

static const struct argp parser = {
	.options	= option_list,
	.parser		= parse_option,
	.args_doc	= "status\n"
			  "space [list | show SPACE]\n"
			  "client [list]\n"
			  "pins\n"
			  "mode [SPACE|all] on|observe|bypass|readonly\n"
			  "ping\n"
			  "check [MS]\n"
			  "daemon reexec",
	.doc		= "Shows and steers a kvmmd. Words may be shortened as "
			  "long as they stay unique; SPACE is a number or the "
			  "begin of an id."
			  "\vExit status: 0 when done, 1 when the daemon "
			  "refused, 2 for a bad command line, 3 when no daemon "
			  "answers, 4 when it did not answer in time.",
};

int ctl_word(const char *const *words, const char *w)
{
	size_t len = strlen(w);
	int i, found = -1;

	for (i = 0; words[i]; i++) {
		if (strncmp(words[i], w, len))
			continue;
		if (!words[i][len])
			return i;
		found = found == -1 ? i : -2;
	}
	return len ? found : -1;
}

enum ctl_exit ctl_usage(const char *fmt, ...)
{
	va_list ap;

	fputs("kvmmctl: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputs("\nTry `kvmmctl --help'.\n", stderr);
	return CTL_USAGE;
}

static enum ctl_exit call_failed(const struct ctl *c, int err)
{
	const char *path = c->socket ? c->socket : getenv("KVMM_ADMIN_SOCKET");

	if (!path || !*path)
		path = KVMM_ADMIN_SOCKET;
	if (err == -ETIMEDOUT) {
		fprintf(stderr, "kvmmctl: %s: no answer in %u ms\n", path,
			c->timeout_ms);
		return CTL_TIMEOUT;
	}
	fprintf(stderr, "kvmmctl: %s: %s\n", path,
		err == -ENOTCONN ? "no daemon listens there" : strerror(-err));
	return CTL_AWAY;
}

enum ctl_exit ctl_ask(const struct ctl *c, json_t *request, json_t **reply)
{
	char *text = request ? json_dumps(request, JSON_COMPACT) : NULL;
	char *answer = NULL;
	json_error_t je;
	json_t *r;
	int err;

	*reply = NULL;
	json_decref(request);
	err = text ? kvmm_admin_call(c->socket, text, &answer, c->timeout_ms)
		   : -ENOMEM;
	free(text);
	if (err)
		return call_failed(c, err);
	r = json_loads(answer, 0, &je);
	free(answer);
	if (!json_is_object(r)) {
		fprintf(stderr, "kvmmctl: the answer is not JSON: %s\n",
			je.text);
		json_decref(r);
		return CTL_REFUSED;
	}
	if (c->json) {
		json_dumpf(r, stdout, JSON_INDENT(2));
		putchar('\n');
	}
	if (!ctl_true(r, "ok")) {
		fprintf(stderr, "kvmmctl: %s\n", ctl_str(r, "error"));
		json_decref(r);
		return CTL_REFUSED;
	}
	if (c->json)
		json_decref(r);
	else
		*reply = r;
	return CTL_OK;
}

const json_t *ctl_at(const json_t *o, const char *path)
{
	char step[64];
	const char *dot;

	while ((dot = strchr(path, '.'))) {
		snprintf(step, sizeof(step), "%.*s", (int)(dot - path), path);
		o = json_object_get(o, step);
		path = dot + 1;
	}
	return json_object_get(o, path);
}

int64_t ctl_int(const json_t *o, const char *path)
{
	return json_integer_value(ctl_at(o, path));
}

const char *ctl_str(const json_t *o, const char *path)
{
	const char *s = json_string_value(ctl_at(o, path));

	return s ? s : "";
}

bool ctl_true(const json_t *o, const char *path)
{
	return json_is_true(ctl_at(o, path));
}

int main(int argc, char **argv)
{
	struct options o = { .ctl.timeout_ms = 5000 };
	enum ctl_exit rc;
	int ix;

	argp_err_exit_status = CTL_USAGE;
	if (argp_parse(&parser, argc, argv, 0, NULL, &o))
		return CTL_USAGE;
	if (!o.nr_words)
		return ctl_usage("what about? status, space, client, pins, "
				 "mode, ping, check or daemon");
	ix = ctl_word(noun_names, o.word[0]);
	if (ix < 0)
		return ctl_usage(ix == -2 ? "\"%s\" may be several commands"
					  : "there is no command \"%s\"",
				 o.word[0]);
	rc = nouns[ix].fn(&o.ctl, o.nr_words - 1, o.word + 1);
	if (fflush(stdout) || ferror(stdout)) {
		perror("kvmmctl: standard output");
		return CTL_REFUSED;
	}
	return rc;
}
