/* SPDX-License-Identifier: Apache-2.0 */
/* Values of the configuration: reading them, and saying what is wrong. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/server/config_key.h"

/* -- sentences ----------------------------------------------------------------- */

static void path_text(const struct parse *p, char *buf, size_t len)
{
	size_t n = 0;
	unsigned int i;

	buf[0] = '\0';
	for (i = 0; i < p->depth && n < len; i++) {
		const struct json_step *st = &p->path[i];
		int m = st->key ? snprintf(buf + n, len - n, "%s%.40s",
					   n ? "." : "", st->key)
				: snprintf(buf + n, len - n, "[%zu]", st->ix);

		n += m > 0 ? (size_t)m : 0;
	}
}

/* "kvmmd.json:12: nodes[0].size: what is wrong" */
int key_fail(struct parse *p, const char *fmt, ...)
{
	char path[160], what[160];
	va_list ap;

	path_text(p, path, sizeof(path));
	va_start(ap, fmt);
	vsnprintf(what, sizeof(what), fmt, ap);
	va_end(ap);
	return errmsg_set(p->e, -EINVAL, "%.64s:%u: %s%s%s", p->name,
			  json_line_of(p->text, p->len, p->path, p->depth),
			  path, path[0] ? ": " : "", what);
}

/* The value as it stands in the file, cut to a readable length. */
int key_refuse(struct parse *p, const struct key *k, json_t *v)
{
	char *s = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
	int err = key_fail(p, "%.40s%s is not allowed; %s",
		       s ? s : "this value", s && strlen(s) > 40 ? "..." : "",
		       k->may);

	free(s);
	return err;
}

void parse_key(struct parse *p, const char *key)
{
	p->path[p->depth++] = (struct json_step){ .key = key };
}

void parse_ix(struct parse *p, size_t ix)
{
	p->path[p->depth++] = (struct json_step){ .ix = ix };
}

/* -- values -------------------------------------------------------------------- */

static void *place(void *obj, const struct key *k)
{
	return (char *)obj + k->off;
}

int key_u32(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	json_int_t n = json_integer_value(v);

	if (!json_is_integer(v) || n < (json_int_t)k->lo ||
	    n > (json_int_t)k->hi)
		return key_refuse(p, k, v);
	*(uint32_t *)place(obj, k) = (uint32_t)n;
	return 0;
}

int key_permille(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	double n = json_number_value(v) * 1000, off;
	uint32_t m;

	if (!json_is_number(v) || n < (double)k->lo || n > (double)k->hi)
		return key_refuse(p, k, v);
	m = (uint32_t)(n + 0.5);
	off = n - m;
	if (off > 1e-6 || off < -1e-6)	/* 1e-6: what a decimal is off by */
		return key_refuse(p, k, v);
	*(uint32_t *)place(obj, k) = m;
	return 0;
}

int key_bool(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	if (!json_is_boolean(v))
		return key_refuse(p, k, v);
	*(bool *)place(obj, k) = json_is_true(v);
	return 0;
}

int key_word(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	if (word_find(k->words, json_string_value(v), place(obj, k)))
		return key_refuse(p, k, v);
	return 0;
}

/* A string of 1 to @hi - 1 bytes without a NUL in it. */
int key_string(struct parse *p, const struct key *k, json_t *v,
		      void *obj)
{
	size_t len = json_string_length(v);

	if (!json_is_string(v) || !len || len >= k->hi ||
	    strlen(json_string_value(v)) != len)
		return key_refuse(p, k, v);
	memcpy(place(obj, k), json_string_value(v), len + 1);
	return 0;
}


/* Names go into status lines, descriptors of systemd and hashes: keep plain. */
int key_name(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	const char *s = json_string_value(v);

	if (!s || strspn(s, NAME_CHARS) != json_string_length(v))
		return key_refuse(p, k, v);
	return key_string(p, k, v, obj);
}

int key_path(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	const char *s = json_string_value(v);

	if (!s || s[0] != '/')
		return key_refuse(p, k, v);
	return key_string(p, k, v, obj);
}

/* Whether the file is there and may be trusted is mm_policy_load()'s to say. */
int key_policy(struct parse *p, const struct key *k, json_t *v,
		      void *obj)
{
	const char *s = json_string_value(v);

	if (!s || (s[0] != '/' && strcmp(s, "lru")))
		return key_refuse(p, k, v);
	return key_string(p, k, v, obj);
}

int key_file_mode(struct parse *p, const struct key *k, json_t *v,
			 void *obj)
{
	const char *s = json_string_value(v);
	unsigned long m;
	char *end;

	if (!s || !*s || strspn(s, "01234567") != json_string_length(v) ||
	    strlen(s) > 4)
		return key_refuse(p, k, v);
	m = strtoul(s, &end, 8);
	if (m > 0777)
		return key_refuse(p, k, v);
	*(uint32_t *)place(obj, k) = (uint32_t)m;
	return 0;
}

static int get_bytes(json_t *v, uint64_t *ret)
{
	if (json_is_integer(v) && json_integer_value(v) >= 0) {
		*ret = (uint64_t)json_integer_value(v);
		return 0;
	}
	return json_is_string(v) ? text_bytes(json_string_value(v), ret)
				 : -EINVAL;
}

int key_bytes(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	uint64_t n;

	if (get_bytes(v, &n) || n < k->lo || n > k->hi)
		return key_refuse(p, k, v);
	*(uint64_t *)place(obj, k) = n;
	return 0;
}

int key_ns(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	uint64_t n;

	if (!json_is_string(v) || text_ns(json_string_value(v), &n) ||
	    n < k->lo || n > k->hi)
		return key_refuse(p, k, v);
	*(uint64_t *)place(obj, k) = n;
	return 0;
}

int key_size(struct parse *p, const struct key *k, json_t *v, void *obj)
{
	struct config_node *n = obj;
	const char *s = json_string_value(v);
	size_t len = json_string_length(v);

	if (s && !strcmp(s, "auto")) {
		n->size_kind = CONFIG_AUTO;
		return 0;
	}
	if (s && len > 1 && len <= 3 && s[len - 1] == '%' &&
	    strspn(s, "0123456789") == len - 1) {
		n->size_kind = CONFIG_PERCENT;
		n->size = strtoul(s, NULL, 10);
		return n->size && n->size <= 90 ? 0 : key_refuse(p, k, v);
	}
	n->size_kind = CONFIG_BYTES;
	return key_bytes(p, k, v, obj);
}
