/* SPDX-License-Identifier: Apache-2.0 */
/* Recorded requests; see trace.h. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>
#include <kvmm/kvmm.h>
#include <zstd.h>

#include "tests/lib/trace.h"

/* Ids of one file, to pages: open addressing, grows at half full. */
struct idmap {
	uint64_t	*id;		/* + 1; 0: empty */
	uint32_t	*page;
	size_t		size;		/* power of two */
	size_t		used;
};

static size_t idmap_slot(const struct idmap *m, uint64_t id)
{
	size_t i = (id * UINT64_C(0x9e3779b97f4a7c15)) >> 20;

	for (;; i++) {
		i &= m->size - 1;
		if (!m->id[i] || m->id[i] == id + 1)
			return i;
	}
}

static int idmap_grow(struct idmap *m)
{
	struct idmap n = { .size = m->size ? 2 * m->size : 1u << 14 };
	size_t i;

	n.id = calloc(n.size, sizeof(*n.id));
	n.page = calloc(n.size, sizeof(*n.page));
	if (!n.id || !n.page) {
		free(n.id);
		free(n.page);
		return -ENOMEM;
	}
	for (i = 0; i < m->size; i++) {
		size_t s;

		if (!m->id[i])
			continue;
		s = idmap_slot(&n, m->id[i] - 1);
		n.id[s] = m->id[i];
		n.page[s] = m->page[i];
	}
	n.used = m->used;
	free(m->id);
	free(m->page);
	*m = n;
	return 0;
}

/* Return: the page, or -ENOMEM. */
static int64_t idmap_get(struct idmap *m, uint64_t id, uint32_t *next)
{
	size_t s;

	if (2 * m->used >= m->size && idmap_grow(m))
		return -ENOMEM;
	s = idmap_slot(m, id);
	if (!m->id[s]) {
		m->id[s] = id + 1;
		m->page[s] = (*next)++;
		m->used++;
	}
	return m->page[s];
}

/* Read and unpack a whole file. The caller frees it. */
static int slurp(const char *path, char **text, size_t *len)
{
	unsigned long long size;
	char *packed = NULL;
	long n;
	FILE *f;
	int err = -EIO;

	*text = NULL;
	f = fopen(path, "re");
	if (!f)
		return -errno;
	if (fseek(f, 0, SEEK_END) || (n = ftell(f)) <= 0)
		goto out;
	rewind(f);
	packed = malloc((size_t)n);
	if (!packed || fread(packed, 1, (size_t)n, f) != (size_t)n)
		goto out;
	size = ZSTD_getFrameContentSize(packed, (size_t)n);
	err = -EPROTO;
	if (size == ZSTD_CONTENTSIZE_ERROR ||
	    size == ZSTD_CONTENTSIZE_UNKNOWN || size > 1u << 30)
		goto out;
	err = -ENOMEM;
	*text = malloc(size + 1);
	if (!*text)
		goto out;
	*len = ZSTD_decompress(*text, size, packed, (size_t)n);
	(*text)[size] = '\0';
	err = *len == size ? 0 : -EPROTO;
out:
	if (err) {
		free(*text);
		*text = NULL;
	}
	free(packed);
	fclose(f);
	return err;
}

static int how_of(const json_t *row)
{
	const char *stop = json_string_value(json_object_get(row, "stop"));

	if (!stop)
		return KVMM_UNKNOWN;
	if (!strcmp(stop, "tool_use"))
		return KVMM_CONTINUES;
	return strcmp(stop, "end_turn") ? KVMM_UNKNOWN : KVMM_ENDED;
}

static int reserve_room(struct trace *t, size_t pages)
{
	if (t->nr == t->cap) {
		size_t cap = t->cap ? 2 * t->cap : 1024;
		void *p = realloc(t->req, cap * sizeof(*t->req));

		if (!p)
			return -ENOMEM;
		t->req = p;
		t->cap = cap;
	}
	if (t->page_len + pages > t->page_cap) {
		size_t cap = 2 * t->page_cap + pages + 65536;
		void *p = realloc(t->page, cap * sizeof(*t->page));

		if (!p)
			return -ENOMEM;
		t->page = p;
		t->page_cap = cap;
	}
	return 0;
}

static int add_row(struct trace *t, struct idmap *ids, const json_t *row)
{
	const json_t *list = json_object_get(row, "hash_ids");
	size_t n = json_array_size(list), i;
	struct request *r;

	if (!n || n > UINT32_MAX)
		return -EPROTO;
	if (reserve_room(t, n))
		return -ENOMEM;
	r = &t->req[t->nr++];
	*r = (struct request) {
		.when = json_number_value(json_object_get(row, "timestamp")),
		.session = (uint64_t)json_integer_value(
				json_object_get(row, "session_id")) * 8 +
			   t->nr_files + 1,
		.how = how_of(row),
		.tokens = (uint32_t)json_integer_value(
				json_object_get(row, "input_length")),
		.npages = (uint32_t)n,
	};
	for (i = 0; i < n; i++) {
		int64_t pg = idmap_get(ids, (uint64_t)json_integer_value(
				json_array_get(list, i)), &t->nr_pages);

		if (pg < 0)
			return (int)pg;
		t->page[t->page_len++] = (uint32_t)pg;
	}
	if (n > t->max_pages)
		t->max_pages = (uint32_t)n;
	return 0;
}

/* Stretch a file's time to 0 .. 1. */
static void normalise(struct request *r, size_t n)
{
	double first = n ? r[0].when : 0, span = n ? r[n - 1].when - first : 0;
	size_t i;

	for (i = 0; i < n; i++)
		r[i].when = span > 0 ? (r[i].when - first) / span : 0;
}

int trace_add(struct trace *t, const char *path)
{
	struct idmap ids = { 0 };
	size_t first = t->nr, len = 0, row_no = 0;
	char *text, *line, *end;
	int err;

	err = slurp(path, &text, &len);
	if (err)
		goto out;
	for (line = text; line < text + len; line = end + 1) {
		json_t *row;

		end = strchr(line, '\n');
		if (!end)
			end = text + len;
		row_no++;
		row = json_loadb(line, (size_t)(end - line), 0, NULL);
		err = row ? add_row(t, &ids, row) : -EPROTO;
		json_decref(row);
		if (err)
			goto out;
	}
	normalise(t->req + first, t->nr - first);
	t->nr_files++;
out:
	if (err)
		fprintf(stderr, "%s: line %zu: %s\n", path, row_no,
			strerror(-err));
	free(text);
	free(ids.id);
	free(ids.page);
	return err;
}

static int by_time(const void *a, const void *b)
{
	const struct request *x = a, *y = b;

	if (x->when != y->when)
		return x->when < y->when ? -1 : 1;
	/* A total order, so that every run deals the same requests. */
	return x->page < y->page ? -1 : x->page > y->page;
}

int trace_seal(struct trace *t)
{
	size_t i, off = 0;

	if (!t->nr)
		return -ENODATA;
	/* The pages have stopped moving. */
	for (i = 0; i < t->nr; i++) {
		t->req[i].page = t->page + off;
		off += t->req[i].npages;
	}
	qsort(t->req, t->nr, sizeof(*t->req), by_time);
	return 0;
}

void trace_fini(struct trace *t)
{
	free(t->req);
	free(t->page);
	memset(t, 0, sizeof(*t));
}
