/* SPDX-License-Identifier: Apache-2.0 */
/* kvmmctl status, ping, check: the whole. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ctl.h"

static void print_head(const json_t *r)
{
	char up[TEXT_LEN], meta[TEXT_LEN], rss[TEXT_LEN];
	const char *config = ctl_str(r, "config");

	printf("kvmmd %s: %s\n", ctl_str(r, "version"),
	       ctl_str(r, "sentence"));
	printf("  up %s, pid %" PRId64 ", epoch %s, policy %s, config %s\n",
	       text_ms(ctl_int(r, "uptime_ms"), up, sizeof(up)),
	       ctl_int(r, "pid"), ctl_str(r, "epoch"), ctl_str(r, "policy"),
	       *config ? config : "built-in defaults");
	printf("  clients %" PRId64 " of %" PRId64 " (%" PRId64
	       " hung up, still mapped), spaces %" PRId64 " with %" PRId64
	       " pages\n",
	       ctl_int(r, "clients.connected"), ctl_int(r, "clients.max"),
	       ctl_int(r, "clients.closed"), ctl_int(r, "spaces.attached"),
	       ctl_int(r, "spaces.pages"));
	printf("  metadata %s, %" PRId64 " B a page, resident %s, descriptors %"
	       PRId64 " of %" PRId64 "\n",
	       text_bytes(ctl_int(r, "memory.metadata"), meta, sizeof(meta)),
	       ctl_int(r, "memory.bytes_per_page"),
	       text_bytes(ctl_int(r, "memory.rss"), rss, sizeof(rss)),
	       ctl_int(r, "limits.fds"), ctl_int(r, "limits.fds_max"));
	printf("  start %s, %" PRId64 " of %" PRId64 " descriptors kept by %s\n",
	       ctl_str(r, "start.step"), ctl_int(r, "park.parked"),
	       ctl_int(r, "park.held"), ctl_str(r, "park.keeper"));
}

static void cell_bytes(struct table *t, const json_t *o, const char *path)
{
	char buf[TEXT_LEN];

	table_cell(t, text_bytes(ctl_int(o, path), buf, sizeof(buf)));
}

static void cell_int(struct table *t, const json_t *o, const char *path)
{
	table_cellf(t, "%" PRId64, ctl_int(o, path));
}

/* "host", or "host x 4" of a gang. */
static void cell_kind(struct table *t, const json_t *n)
{
	int64_t gang = ctl_int(n, "gang");

	if (gang)
		table_cellf(t, "%s x %" PRId64, ctl_str(n, "kind"), gang);
	else
		table_cell(t, ctl_str(n, "kind"));
}

/* "second-touch, 3.2 GiB of 64 GiB a day left to write" */
static void print_admission(const json_t *n)
{
	int64_t day = ctl_int(n, "admission.budget_day");
	int64_t left = ctl_int(n, "admission.budget_left");
	char a[TEXT_LEN], b[TEXT_LEN];

	if (!*ctl_str(n, "admission.policy"))
		return;
	printf("  %s: admission %s, ", ctl_str(n, "name"),
	       ctl_str(n, "admission.policy"));
	if (!day)
		printf("no limit on writes\n");
	else
		printf("%s of %s a day %s\n",
		       text_bytes(left < 0 ? -left : left, a, sizeof(a)),
		       text_bytes(day, b, sizeof(b)),
		       left < 0 ? "overdrawn" : "left to write");
}

static void print_nodes(const json_t *nodes)
{
	static const char *const head[] = {
		"NODE", "KIND", "STATE", ">SIZE", ">USED", ">PAGES", ">DIRTY",
		">FREE", ">OPEN", ">READY", ">LOADING", ">QUARANTINE", "BELOW",
		NULL
	};
	struct table *t = table_create(head);
	const json_t *n;
	size_t i;

	json_array_foreach((json_t *)nodes, i, n) {
		table_cell(t, ctl_str(n, "name"));
		cell_kind(t, n);
		table_cell(t, ctl_str(n, "state"));
		cell_bytes(t, n, "capacity");
		cell_bytes(t, n, "used");
		cell_bytes(t, n, "bytes_pages");
		cell_int(t, n, "pages_dirty");
		cell_int(t, n, "frames.free");
		cell_int(t, n, "frames.open");
		cell_int(t, n, "frames.ready");
		cell_int(t, n, "frames.loading");
		cell_int(t, n, "frames.quarantine");
		table_cell(t, ctl_str(n, "below"));
	}
	table_print(t, stdout);
	table_destroy(t);
	json_array_foreach((json_t *)nodes, i, n) {
		if (*ctl_str(n, "line"))
			printf("  %s: %s\n", ctl_str(n, "name"),
			       ctl_str(n, "line"));
		print_admission(n);
	}
}

static void print_sockets(const json_t *list)
{
	static const char *const head[] = {
		"SOCKET", "TENANT", "RIGHTS", "MODE", ">CLIENTS", ">REQUESTS",
		"PATH", NULL
	};
	struct table *t = table_create(head);
	const json_t *s;
	size_t i;

	json_array_foreach((json_t *)list, i, s) {
		table_cell(t, ctl_str(s, "name"));
		table_cell(t, ctl_str(s, "tenant"));
		table_cell(t, ctl_str(s, "rights"));
		table_cell(t, ctl_str(s, "mode"));
		cell_int(t, s, "clients");
		cell_int(t, s, "requests");
		table_cell(t, ctl_str(s, "path"));
	}
	table_print(t, stdout);
	table_destroy(t);
}

static bool any_node(const json_t *nodes, const char *counter)
{
	const json_t *n;
	size_t i;

	json_array_foreach((json_t *)nodes, i, n)
		if (ctl_int(ctl_at(n, "counters"), counter))
			return true;
	return false;
}

/* One row a counter that is not 0 everywhere, one column a node. */
static void print_counters(const json_t *nodes)
{
	const char *head[24] = { "COUNTER" };
	const json_t *n, *v;
	const char *name;
	struct table *t;
	char right[16][24];
	size_t i, cols = 0;

	json_array_foreach((json_t *)nodes, i, n) {
		if (cols >= 16)
			break;
		snprintf(right[cols], sizeof(right[0]), ">%.20s",
			 ctl_str(n, "name"));
		head[cols + 1] = right[cols];
		cols++;
	}
	t = table_create(head);
	json_object_foreach((json_t *)ctl_at(json_array_get(nodes, 0),
					     "counters"), name, v) {
		if (!any_node(nodes, name))
			continue;
		table_cell(t, name);
		for (i = 0; i < cols; i++)
			cell_int(t, ctl_at(json_array_get(nodes, i),
					   "counters"), name);
	}
	table_print(t, stdout);
	table_destroy(t);
}

static void print_rejects(const json_t *rejects)
{
	const char *name, *sep = "refused or cut off: ";
	const json_t *v;

	json_object_foreach((json_t *)rejects, name, v) {
		if (!json_integer_value(v))
			continue;
		printf("%s%s %" JSON_INTEGER_FORMAT, sep, name,
		       json_integer_value(v));
		sep = ", ";
	}
	if (*sep == ',')
		putchar('\n');
}

enum ctl_exit ctl_status(const struct ctl *c, int argc, char **argv)
{
	enum ctl_exit rc;
	const json_t *n;
	json_t *r;
	size_t i;

	if (argc)
		return ctl_usage("status takes no \"%s\"", argv[0]);
	rc = ctl_ask(c, json_pack("{s:s}", "cmd", "status"), &r);
	if (!r)
		return rc;
	print_head(r);
	putchar('\n');
	print_nodes(ctl_at(r, "nodes"));
	putchar('\n');
	print_sockets(ctl_at(r, "sockets"));
	putchar('\n');
	print_counters(ctl_at(r, "nodes"));
	print_rejects(ctl_at(r, "rejects"));
	json_array_foreach((json_t *)ctl_at(r, "notes"), i, n)
		printf("note: %s\n", json_string_value(n));
	json_decref(r);
	return rc;
}

enum ctl_exit ctl_ping(const struct ctl *c, int argc, char **argv)
{
	enum ctl_exit rc;
	json_t *r;

	if (argc)
		return ctl_usage("ping takes no \"%s\"", argv[0]);
	rc = ctl_ask(c, json_pack("{s:s}", "cmd", "ping"), &r);
	if (r)
		printf("kvmmd %s: %s, epoch %s\n", ctl_str(r, "version"),
		       ctl_str(r, "state"), ctl_str(r, "epoch"));
	json_decref(r);
	return rc;
}

enum ctl_exit ctl_check(const struct ctl *c, int argc, char **argv)
{
	enum ctl_exit rc;
	json_t *r;

	if (argc > 1 || (argc && (strspn(argv[0], "0123456789") !=
				  strlen(argv[0]) || strlen(argv[0]) > 7)))
		return ctl_usage("check takes milliseconds, no \"%s\"",
				 argv[argc - 1]);
	rc = ctl_ask(c, argc ? json_pack("{s:s, s:i}", "cmd", "check", "max_ms",
					 atoi(argv[0])) :
			       json_pack("{s:s}", "cmd", "check"), &r);
	if (r)
		printf("all laws hold (%.1f ms)\n",
		       json_real_value(ctl_at(r, "ms")));
	json_decref(r);
	return rc;
}
