/* SPDX-License-Identifier: Apache-2.0 */
/* Questions to a kvmmd; see admin.h. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include <kvmm/admin.h>

#include "tests/lib/admin.h"
#include "tests/lib/proc.h"

#define ADMIN_MS	10000

json_t *ta_request(struct test_daemon *d, const char *fmt, ...)
{
	char *text, *answer;
	json_t *reply;
	va_list ap;

	va_start(ap, fmt);
	T_CHECK(vasprintf(&text, fmt, ap) >= 0);
	va_end(ap);
	T_OK(kvmm_admin_call(d->admin, text, &answer, ADMIN_MS));
	reply = json_loads(answer, 0, NULL);
	T_CHECK(reply && json_is_true(json_object_get(reply, "ok")),
		"%s: %.300s", text, answer);
	free(answer);
	free(text);
	return reply;
}

static json_t *find_node(json_t *status, const char *name)
{
	json_t *node;
	size_t i;

	json_array_foreach(json_object_get(status, "nodes"), i, node) {
		const char *n = json_string_value(json_object_get(node, "name"));

		if (n && !strcmp(n, name))
			return node;
	}
	t_fail(__FILE__, __LINE__, "status knows no node %s", name);
}

static uint64_t number_at(json_t *o, const char *path)
{
	char step[64];
	const char *dot;

	while ((dot = strchr(path, '.'))) {
		snprintf(step, sizeof(step), "%.*s", (int)(dot - path), path);
		o = json_object_get(o, step);
		path = dot + 1;
	}
	o = json_object_get(o, path);
	T_CHECK(json_is_integer(o), "status has no number %s", path);
	return (uint64_t)json_integer_value(o);
}

uint64_t ta_node(struct test_daemon *d, const char *node, const char *path)
{
	json_t *status = ta_request(d, "{\"cmd\": \"status\"}");
	uint64_t v = number_at(find_node(status, node), path);

	json_decref(status);
	return v;
}

uint64_t ta_counter(struct test_daemon *d, const char *node, const char *name)
{
	char path[80];

	snprintf(path, sizeof(path), "counters.%s", name);
	return ta_node(d, node, path);
}

uint64_t ta_pages(struct test_daemon *d)
{
	json_t *status = ta_request(d, "{\"cmd\": \"status\"}");
	uint64_t v = number_at(status, "spaces.pages");

	json_decref(status);
	return v;
}

uint64_t ta_lost(struct test_daemon *d)
{
	static const char *const nodes[] = { "dram0", "nvme0" };
	uint64_t sum = 0;
	unsigned int i;

	for (i = 0; i < 2; i++)
		sum += ta_counter(d, nodes[i], "pgdrop_gone") +
		       ta_counter(d, nodes[i], "pgdrop_orphan");
	return sum;
}

const char *ta_node_state(struct test_daemon *d, const char *node)
{
	static char state[32];
	json_t *status = ta_request(d, "{\"cmd\": \"status\"}");
	const char *s = json_string_value(
		json_object_get(find_node(status, node), "state"));

	T_CHECK(s, "status has no state of %s", node);
	snprintf(state, sizeof(state), "%s", s);
	json_decref(status);
	return state;
}

uint64_t ta_rejects(struct test_daemon *d, const char *reason)
{
	json_t *status = ta_request(d, "{\"cmd\": \"status\"}");
	json_t *rejects = json_object_get(status, "rejects"), *v;
	uint64_t sum = 0;
	const char *key;

	T_CHECK(json_is_object(rejects), "status has no rejects");
	if (reason)
		sum = number_at(rejects, reason);
	else
		json_object_foreach(rejects, key, v)
			sum += (uint64_t)json_integer_value(v);
	json_decref(status);
	return sum;
}

unsigned int ta_clients(struct test_daemon *d)
{
	json_t *reply = ta_request(d, "{\"cmd\": \"client\"}");
	json_t *list = json_object_get(reply, "clients");
	size_t n = json_array_size(list);

	T_CHECK(json_is_array(list), "client lists no clients");
	json_decref(reply);
	return (unsigned int)n;
}

uint64_t ta_open(struct test_daemon *d, pid_t pid)
{
	json_t *reply = ta_request(d, "{\"cmd\": \"client\"}"), *c;
	uint64_t sum = 0;
	size_t i;

	json_array_foreach(json_object_get(reply, "clients"), i, c)
		if (!pid || (pid_t)number_at(c, "pid") == pid)
			sum += number_at(c, "open_frames");
	json_decref(reply);
	return sum;
}

uint64_t ta_pins(struct test_daemon *d, pid_t pid)
{
	json_t *reply = ta_request(d, "{\"cmd\": \"pins\"}"), *p;
	uint64_t sum = 0;
	size_t i;

	json_array_foreach(json_object_get(reply, "pins"), i, p)
		if (!pid || (pid_t)number_at(p, "pid") == pid)
			sum += number_at(p, "pins");
	json_decref(reply);
	return sum;
}

uint64_t ta_in_hand(struct test_daemon *d)
{
	static const char *const what[] = {
		"frames.open", "frames.loading", "frames.quarantine",
		"frames.magazine",
	};
	json_t *status = ta_request(d, "{\"cmd\": \"status\"}"), *node;
	uint64_t sum = 0;
	size_t i, j;

	json_array_foreach(json_object_get(status, "nodes"), i, node)
		for (j = 0; j < sizeof(what) / sizeof(what[0]); j++)
			if (json_object_get(node, "frames"))
				sum += number_at(node, what[j]);
	json_decref(status);
	return sum;
}

int ta_try_check(struct test_daemon *d, char *why, size_t len)
{
	char *answer;
	json_t *reply;
	const char *s;
	int err = 0;

	T_OK(kvmm_admin_call(d->admin, "{\"cmd\": \"check\"}", &answer,
			     ADMIN_MS));
	reply = json_loads(answer, 0, NULL);
	T_CHECK(reply, "check: %.300s", answer);
	if (!json_is_true(json_object_get(reply, "ok")))
		err = -(int)json_integer_value(json_object_get(reply, "errno"));
	s = json_string_value(json_object_get(reply, "error"));
	snprintf(why, len, "%s", s ? s : "");
	json_decref(reply);
	free(answer);
	return err;
}

void ta_check(struct test_daemon *d)
{
	char why[512];
	int err = ta_try_check(d, why, sizeof(why));

	T_CHECK(!err, "%s", why);
}

void ta_mode(struct test_daemon *d, const char *mode)
{
	json_decref(ta_request(d, "{\"cmd\": \"mode\", \"space\": \"all\", \"mode\": \"%s\"}",
			       mode));
}

void ta_fault(struct test_daemon *d, const char *spec)
{
	json_decref(ta_request(d, "{\"cmd\": \"fault\", \"spec\": \"%s\"}",
			       spec));
}

void ta_baseline(struct test_daemon *d, unsigned int ms)
{
	struct t_wait w = t_wait_begin(ms);

	for (;;) {
		uint64_t held = ta_in_hand(d), pins = ta_pins(d, 0);

		if (!held && !pins)
			return;
		T_CHECK(t_wait_more(&w),
			"%llu frames in somebody's hands, %llu pins",
			(unsigned long long)held, (unsigned long long)pins);
	}
}
