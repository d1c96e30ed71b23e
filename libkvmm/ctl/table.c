/* SPDX-License-Identifier: Apache-2.0 */
/* Tables and units for people. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "ctl.h"

#define MAX_COLUMNS	24

/**
 * struct table - @nr cells, row by row, the headings first
 */
struct table {
	unsigned int	columns;
	bool		right[MAX_COLUMNS];
	char		**cell;
	size_t		nr, room;
};

static void *need(void *p)
{
	if (p)
		return p;
	fputs("kvmmctl: out of memory\n", stderr);
	exit(CTL_REFUSED);
}

void table_cell(struct table *t, const char *text)
{
	if (t->nr == t->room) {
		t->room = t->room ? 2 * t->room : 64;
		t->cell = need(realloc(t->cell, t->room * sizeof(*t->cell)));
	}
	t->cell[t->nr++] = need(strdup(text ? text : ""));
}

void table_cellf(struct table *t, const char *fmt, ...)
{
	char buf[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(buf, sizeof(buf), fmt, ap);
	va_end(ap);
	table_cell(t, buf);
}

struct table *table_create(const char *const *headings)
{
	struct table *t = need(calloc(1, sizeof(*t)));

	for (; *headings && t->columns < MAX_COLUMNS; headings++) {
		const char *h = *headings;

		t->right[t->columns++] = *h == '>';
		table_cell(t, h + (*h == '>'));
	}
	return t;
}

/* Characters, not bytes: continuation bytes of UTF-8 take no place. */
static size_t width_of(const char *s)
{
	size_t n = 0;

	for (; *s; s++)
		n += ((unsigned char)*s & 0xc0) != 0x80;
	return n;
}

void table_print(const struct table *t, FILE *out)
{
	size_t width[MAX_COLUMNS] = { 0 };
	size_t i;

	for (i = 0; i < t->nr; i++) {
		size_t w = width_of(t->cell[i]);

		if (w > width[i % t->columns])
			width[i % t->columns] = w;
	}
	for (i = 0; i < t->nr; i++) {
		unsigned int col = (unsigned int)(i % t->columns);
		bool last = col + 1 == t->columns;
		int pad = (int)(width[col] - width_of(t->cell[i]));

		if (t->right[col])
			fprintf(out, "%*s%s", pad, "", t->cell[i]);
		else
			fprintf(out, "%s%*s", t->cell[i], last ? 0 : pad, "");
		fputs(last ? "\n" : "  ", out);
	}
}

void table_destroy(struct table *t)
{
	size_t i;

	for (i = 0; i < t->nr; i++)
		free(t->cell[i]);
	free(t->cell);
	free(t);
}

const char *text_bytes(int64_t bytes, char *buf, size_t len)
{
	static const char *const unit[] = { "B", "KiB", "MiB", "GiB", "TiB" };
	double v = (double)bytes;
	unsigned int u = 0;

	while (v >= 1024 && u < 4) {
		v /= 1024;
		u++;
	}
	if (!bytes)
		snprintf(buf, len, "0");
	else if (!u || v >= 100 || v == (double)(int64_t)v)
		snprintf(buf, len, "%.0f %s", v, unit[u]);
	else
		snprintf(buf, len, "%.1f %s", v, unit[u]);
	return buf;
}

const char *text_ms(int64_t ms, char *buf, size_t len)
{
	int64_t s = ms / 1000;

	if (ms < 1000)
		snprintf(buf, len, "%" PRId64 " ms", ms);
	else if (s < 600)
		snprintf(buf, len, "%.1f s", (double)ms / 1000);
	else if (s < 7200)
		snprintf(buf, len, "%" PRId64 " min", s / 60);
	else if (s < 172800)
		snprintf(buf, len, "%" PRId64 " h %" PRId64 " min", s / 3600,
			 s / 60 % 60);
	else
		snprintf(buf, len, "%" PRId64 " d %" PRId64 " h", s / 86400,
			 s / 3600 % 24);
	return buf;
}
