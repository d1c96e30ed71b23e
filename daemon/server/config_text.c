/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and durations as people write them, and where in a file a key stands. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/server/config.h"

struct unit {
	const char	*name;
	uint64_t	mul;
};

/* The first NR_PRINTED are those that are written, too. */
static const struct unit byte_units[] = {
	{ "TiB", UINT64_C(1) << 40 }, { "GiB", 1 << 30 }, { "MiB", 1 << 20 },
	{ "KiB", 1 << 10 }, { "B", 1 },
	{ "TB", UINT64_C(1000000000000) }, { "GB", 1000000000 },
	{ "MB", 1000000 }, { "kB", 1000 }, { "", 1 },
};
#define NR_PRINTED	5

/* No empty unit: a duration without one is a mistake of factor a thousand. */
static const struct unit time_units[] = {
	{ "h", UINT64_C(3600000000000) }, { "min", UINT64_C(60000000000) },
	{ "s", 1000000000 }, { "ms", 1000000 }, { "us", 1000 }, { "ns", 1 },
};

static const struct unit *unit_find(const struct unit *u, size_t n,
				    const char *name)
{
	while (*name == ' ')
		name++;
	for (; n; n--, u++)
		if (!strcmp(name, u->name))
			return u;
	return NULL;
}

/* Digits, at most six decimals, a unit. The result must be a whole number. */
static int parse_unit(const char *s, const struct unit *units, size_t n,
		      uint64_t *ret)
{
	uint64_t v = 0, frac = 0, scale = 1;
	const struct unit *u;

	if (*s < '0' || *s > '9')
		return -EINVAL;
	for (; *s >= '0' && *s <= '9'; s++)
		if (mul_overflows(v, 10, &v) ||
		    add_overflows(v, (uint64_t)(*s - '0'), &v))
			return -ERANGE;
	if (*s == '.') {
		for (s++; *s >= '0' && *s <= '9'; s++) {
			if (scale >= 1000000)
				return -EINVAL;
			frac = frac * 10 + (uint64_t)(*s - '0');
			scale *= 10;
		}
		if (scale == 1)
			return -EINVAL;
	}
	u = unit_find(units, n, s);
	if (!u)
		return -EINVAL;
	if (mul_overflows(v, u->mul, &v) || mul_overflows(frac, u->mul, &frac))
		return -ERANGE;
	if (frac % scale)
		return -EINVAL;
	return add_overflows(v, frac / scale, ret) ? -ERANGE : 0;
}

int text_bytes(const char *s, uint64_t *bytes)
{
	return parse_unit(s, byte_units, ARRAY_SIZE(byte_units), bytes);
}

int text_ns(const char *s, uint64_t *ns)
{
	return parse_unit(s, time_units, ARRAY_SIZE(time_units), ns);
}

/* The largest unit that divides it; the tables are in falling order. */
static const char *print_unit(uint64_t v, const struct unit *u, size_t n,
			      char *buf, size_t len)
{
	for (; n > 1; n--, u++)
		if (v && v % u->mul == 0)
			break;
	snprintf(buf, len, "%" PRIu64 "%s", v / u->mul, u->name);
	return buf;
}

const char *text_of_bytes(uint64_t bytes, char *buf, size_t len)
{
	return print_unit(bytes, byte_units, NR_PRINTED, buf, len);
}

const char *text_of_ns(uint64_t ns, char *buf, size_t len)
{
	return print_unit(ns, time_units, ARRAY_SIZE(time_units), buf, len);
}

/* -- where a key stands ------------------------------------------------------ */

/**
 * struct scan - a walk over a document that is known to be JSON
 *
 * Memory-safe on any bytes; right about well-formed documents only.
 */
struct scan {
	const char	*p, *end;
	unsigned int	line;
};

static int scan_peek(struct scan *s)
{
	while (s->p < s->end && strchr(" \t\r\n", *s->p) && *s->p) {
		s->line += *s->p == '\n';
		s->p++;
	}
	return s->p < s->end ? *s->p : -1;
}

static bool scan_take(struct scan *s, int c)
{
	if (scan_peek(s) != c)
		return false;
	s->p++;
	return true;
}

/* Over a string, from its first quote; its raw inside in [*from, *to). */
static bool scan_string(struct scan *s, const char **from, const char **to)
{
	if (!scan_take(s, '"'))
		return false;
	*from = s->p;
	while (s->p < s->end && *s->p != '"')
		s->p += *s->p == '\\' && s->p + 1 < s->end ? 2 : 1;
	*to = s->p;
	return scan_take(s, '"');
}

/* Over one value of any kind: brackets are counted, strings are skipped. */
static bool scan_skip(struct scan *s)
{
	const char *a, *b;
	int depth = 0;

	do {
		int c = scan_peek(s);

		if (c < 0)
			return false;
		if (c == '"') {
			if (!scan_string(s, &a, &b))
				return false;
			continue;
		}
		if (c == '{' || c == '[')
			depth++;
		else if (c == '}' || c == ']')
			depth--;
		s->p++;
		if (c == '{' || c == '[' || c == '}' || c == ']' || depth)
			continue;
		/* a number or a word at the top: up to what ends it */
		while (s->p < s->end && !strchr(",]} \t\r\n", *s->p))
			s->p++;
	} while (depth > 0);
	return true;
}

/* To the value of @key in the object that begins here; @at: the key's line. */
static bool scan_member(struct scan *s, const char *key, unsigned int *at)
{
	const char *from, *to;

	if (!scan_take(s, '{'))
		return false;
	while (scan_peek(s) == '"') {
		unsigned int line = s->line;

		if (!scan_string(s, &from, &to) || !scan_take(s, ':'))
			return false;
		if ((size_t)(to - from) == strlen(key) &&
		    !memcmp(from, key, (size_t)(to - from))) {
			*at = line;
			return true;
		}
		if (!scan_skip(s) || !scan_take(s, ','))
			return false;
	}
	return false;
}

static bool scan_element(struct scan *s, size_t ix, unsigned int *at)
{
	if (!scan_take(s, '['))
		return false;
	while (ix--)
		if (!scan_skip(s) || !scan_take(s, ','))
			return false;
	if (scan_peek(s) < 0)
		return false;
	*at = s->line;
	return true;
}

unsigned int json_line_of(const char *text, size_t len,
			  const struct json_step *path, unsigned int depth)
{
	struct scan s = { .p = text, .end = text + len, .line = 1 };
	unsigned int at, i;

	scan_peek(&s);
	at = s.line;
	for (i = 0; i < depth; i++)
		if (path[i].key ? !scan_member(&s, path[i].key, &at)
				: !scan_element(&s, path[i].ix, &at))
			break;
	return at;
}
