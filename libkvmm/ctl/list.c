/* SPDX-License-Identifier: Apache-2.0 */
/* kvmmctl space, client, pins, mode: lists, and one of a list. */
#include <inttypes.h>
#include <string.h>

#include "ctl.h"

static const char *const list_words[] = { "list", NULL };

/* A list takes no word, or "list". */
static bool only_list(int argc, char **argv)
{
	return !argc || (argc == 1 && ctl_word(list_words, argv[0]) == 0);
}

/* -- spaces ----------------------------------------------------------------------- */

static void print_spaces(const json_t *list)
{
	static const char *const head[] = {
		">SPACE", "ID", "TENANT", "MODEL", "MODE", ">CLIENTS",
		">PAGES", ">BYTES", NULL
	};
	struct table *t = table_create(head);
	const json_t *s, *v;
	const char *name;
	char buf[TEXT_LEN];
	size_t i;

	json_array_foreach((json_t *)list, i, s) {
		int64_t bytes = 0;

		json_object_foreach((json_t *)ctl_at(s, "bytes"), name, v)
			bytes += json_integer_value(v);
		table_cellf(t, "%" PRId64, ctl_int(s, "space"));
		table_cellf(t, "%.12s", ctl_str(s, "id"));
		table_cell(t, ctl_str(s, "tenant"));
		table_cell(t, ctl_str(s, "model"));
		table_cell(t, ctl_str(s, "mode"));
		table_cellf(t, "%" PRId64, ctl_int(s, "clients"));
		table_cellf(t, "%" PRId64, ctl_int(s, "pages"));
		table_cell(t, text_bytes(bytes, buf, sizeof(buf)));
	}
	table_print(t, stdout);
	table_destroy(t);
}

static void line(const char *name, const char *value)
{
	if (*value)
		printf("  %-14s %s\n", name, value);
}

/* What observe mode has counted since the space was made. */
static void print_observed(const json_t *s)
{
	int64_t asked = ctl_int(s, "ghost_asked");
	int64_t hits = ctl_int(s, "ghost_hits");

	if (asked)
		printf("  %-14s %" PRId64 " pages asked for, %" PRId64
		       " would have hit (%.1f %%), %" PRId64 " missed\n",
		       "observed", asked, hits, 100.0 * hits / asked,
		       asked - hits);
	if (ctl_int(s, "ghost_pages"))
		printf("  %-14s %" PRId64 " of pages that were published\n",
		       "keys kept", ctl_int(s, "ghost_pages"));
}

static void print_space(const json_t *s)
{
	static const char *const words[] = {
		"model", "revision", "kv_dtype", "scale_format", "layout",
		"abi_tag", NULL
	};
	char buf[TEXT_LEN];
	const char *name;
	const json_t *v;
	size_t i;

	printf("space %" PRId64 " %s\n", ctl_int(s, "space"), ctl_str(s, "id"));
	line("tenant", ctl_str(s, "tenant"));
	line("mode", ctl_str(s, "mode"));
	for (i = 0; words[i]; i++)
		line(words[i], ctl_str(s, words[i]));
	printf("  %-14s %" PRId64 "\n", "world", ctl_int(s, "world"));
	printf("  %-14s %" PRId64 "\n", "clients", ctl_int(s, "clients"));
	printf("  %-14s %" PRId64 "\n", "pages", ctl_int(s, "pages"));
	json_object_foreach((json_t *)ctl_at(s, "bytes"), name, v)
		line(name, text_bytes(json_integer_value(v), buf, sizeof(buf)));
	printf("  %-14s %" PRId64 " of %" PRId64 " lines\n", "index",
	       ctl_int(s, "index_used"), ctl_int(s, "index_lines"));
	line("metadata", text_bytes(ctl_int(s, "metadata"), buf, sizeof(buf)));
	print_observed(s);
	json_array_foreach((json_t *)ctl_at(s, "classes"), i, v)
		printf("  class %zu        %s: %s a page, %" PRId64
		       " segments\n", i, ctl_str(v, "name"),
		       text_bytes(ctl_int(v, "page_bytes"), buf, sizeof(buf)),
		       ctl_int(v, "segments"));
	json_array_foreach((json_t *)ctl_at(s, "groups"), i, v)
		printf("  group %zu        %s, class %" PRId64 ", %" PRId64
		       " tokens a page\n", i, ctl_str(v, "rule"),
		       ctl_int(v, "class"), ctl_int(v, "block_tokens"));
}

enum ctl_exit ctl_space(const struct ctl *c, int argc, char **argv)
{
	static const char *const verbs[] = { "list", "show", NULL };
	int verb = argc ? ctl_word(verbs, argv[0]) : 0;
	enum ctl_exit rc;
	const json_t *s;
	json_t *r;
	size_t i;

	if (verb < 0 || (verb == 0 && argc > 1) || (verb == 1 && argc != 2))
		return ctl_usage("space [list | show SPACE]");
	rc = ctl_ask(c, verb ? json_pack("{s:s, s:s}", "cmd", "space",
					 "space", argv[1])
			     : json_pack("{s:s}", "cmd", "space"), &r);
	if (!r)
		return rc;
	if (!verb)
		print_spaces(ctl_at(r, "spaces"));
	else
		json_array_foreach((json_t *)ctl_at(r, "spaces"), i, s)
			print_space(s);
	json_decref(r);
	return rc;
}

/* -- clients ------------------------------------------------------------------------ */

static const char *client_state(const json_t *cl)
{
	if (ctl_true(cl, "exited"))
		return "exited";
	if (!ctl_true(cl, "connected"))
		return "hung up";
	return ctl_str(cl, "state");
}

enum ctl_exit ctl_client(const struct ctl *c, int argc, char **argv)
{
	static const char *const head[] = {
		">CLIENT", "NAME", ">PID", "TENANT", "RIGHTS", ">ENGINE",
		"MEMBER", "STATE", ">STEP", ">PINS", ">OPEN", ">IN FLIGHT",
		">SINCE", NULL
	};
	char buf[TEXT_LEN];
	enum ctl_exit rc;
	struct table *t;
	const json_t *cl;
	json_t *r;
	size_t i;

	if (!only_list(argc, argv))
		return ctl_usage("client [list]");
	rc = ctl_ask(c, json_pack("{s:s}", "cmd", "client"), &r);
	if (!r)
		return rc;
	t = table_create(head);
	json_array_foreach((json_t *)ctl_at(r, "clients"), i, cl) {
		table_cellf(t, "%" PRId64, ctl_int(cl, "client"));
		table_cell(t, ctl_str(cl, "name"));
		table_cellf(t, "%" PRId64 "%s", ctl_int(cl, "pid"),
			    ctl_true(cl, "foreign") ? "?" : "");
		table_cell(t, ctl_str(cl, "tenant"));
		table_cell(t, ctl_str(cl, "rights"));
		table_cellf(t, "%" PRId64, ctl_int(cl, "engine"));
		table_cellf(t, "%" PRId64 "/%" PRId64 "%s",
			    ctl_int(cl, "rank"), ctl_int(cl, "world"),
			    ctl_true(cl, "leader") ? " leader" : "");
		table_cell(t, client_state(cl));
		table_cellf(t, "%" PRId64, ctl_int(cl, "step"));
		table_cellf(t, "%" PRId64 "%s", ctl_int(cl, "pins"),
			    ctl_true(cl, "pins_partial") ? "+" : "");
		table_cellf(t, "%" PRId64, ctl_int(cl, "open_frames"));
		table_cellf(t, "%" PRId64, ctl_int(cl, "in_flight"));
		table_cell(t, text_ms(ctl_int(cl, "since_ms"), buf,
				      sizeof(buf)));
	}
	table_print(t, stdout);
	table_destroy(t);
	json_decref(r);
	return rc;
}

/* -- pins ----------------------------------------------------------------------------- */

enum ctl_exit ctl_pins(const struct ctl *c, int argc, char **argv)
{
	static const char *const head[] = {
		">PID", "NAME", "TENANT", ">SPACE", ">CLASS", "NODE", ">PINS",
		">FRAMES", ">REQUESTS", ">OLDEST", "", NULL
	};
	char buf[TEXT_LEN];
	enum ctl_exit rc;
	const json_t *p;
	struct table *t;
	json_t *r;
	size_t i;

	if (!only_list(argc, argv))
		return ctl_usage("pins takes no \"%s\"", argv[0]);
	rc = ctl_ask(c, json_pack("{s:s}", "cmd", "pins"), &r);
	if (!r)
		return rc;
	t = table_create(head);
	json_array_foreach((json_t *)ctl_at(r, "pins"), i, p) {
		table_cellf(t, "%" PRId64, ctl_int(p, "pid"));
		table_cell(t, ctl_str(p, "name"));
		table_cell(t, ctl_str(p, "tenant"));
		table_cellf(t, "%" PRId64, ctl_int(p, "space"));
		table_cellf(t, "%" PRId64, ctl_int(p, "class"));
		table_cell(t, ctl_str(p, "node"));
		table_cellf(t, "%" PRId64 "%s", ctl_int(p, "pins"),
			    ctl_true(p, "partial") ? "+" : "");
		table_cellf(t, "%" PRId64, ctl_int(p, "frames"));
		table_cellf(t, "%" PRId64, ctl_int(p, "requests"));
		table_cell(t, ctl_int(p, "requests")
			   ? text_ms(ctl_int(p, "oldest_ms"), buf, sizeof(buf))
			   : "");
		table_cell(t, ctl_true(p, "exited") ? "exited; its engine lives"
			   : ctl_true(p, "old") ? "older than 10 min" : "");
	}
	table_print(t, stdout);
	table_destroy(t);
	json_decref(r);
	return rc;
}

/* -- mode ----------------------------------------------------------------------------- */

enum ctl_exit ctl_mode(const struct ctl *c, int argc, char **argv)
{
	static const char *const modes[] = {
		"on", "observe", "bypass", "readonly", NULL
	};
	const char *space = argc == 2 ? argv[0] : "all";
	int mode = argc == 1 || argc == 2 ? ctl_word(modes, argv[argc - 1])
					  : -1;
	enum ctl_exit rc;
	const json_t *s;
	json_t *r;
	size_t i;

	if (mode < 0)
		return ctl_usage("mode [SPACE|all] on|observe|bypass|readonly");
	rc = ctl_ask(c, json_pack("{s:s, s:s, s:s}", "cmd", "mode",
				  "space", space, "mode", modes[mode]), &r);
	if (!r)
		return rc;
	json_array_foreach((json_t *)ctl_at(r, "spaces"), i, s)
		printf("space %" PRId64 ": %s -> %s\n", ctl_int(s, "space"),
		       ctl_str(s, "was"), ctl_str(s, "mode"));
	if (!i)
		puts("there is no space yet; what a socket's spaces start in "
		     "is in the configuration");
	json_decref(r);
	return rc;
}
