/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index of a .gguf file, versions 2 and 3: counts, metadata, tensor infos,
 * then the tensors' bytes, aligned. Little-endian. Of the metadata only the
 * alignment and the architecture matter: shapes come from a config.json.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/engine/load.h"

/* Types of metadata values. */
enum {
	GGUF_U32	= 4,
	GGUF_STRING	= 8,
	GGUF_ARRAY	= 9,
};

#define MAX_NEST	4		/* arrays of arrays */

/**
 * struct cursor - where reading is
 * @f:		the file
 * @at:		next byte
 * @bad:	something was cut off; what was read since is 0
 */
struct cursor {
	struct weight_file	*f;
	size_t			at;
	bool			bad;
};

static uint64_t left(const struct cursor *c)
{
	return c->f->size - c->at;
}

static uint64_t get(struct cursor *c, unsigned int bytes)
{
	uint64_t v = 0;

	if (c->bad || left(c) < bytes) {
		c->bad = true;
		return 0;
	}
	for (unsigned int i = bytes; i--;)
		v = v << 8 | c->f->p[c->at + i];
	c->at += bytes;
	return v;
}

/* A string's bytes, not terminated. */
static const char *get_str(struct cursor *c, size_t *len)
{
	uint64_t n = get(c, 8);
	const char *s;

	if (c->bad || n > left(c)) {
		c->bad = true;
		*len = 0;
		return "";
	}
	s = (const char *)c->f->p + c->at;
	c->at += n;
	*len = n;
	return s;
}

static bool is(const char *s, size_t len, const char *what)
{
	return len == strlen(what) && !memcmp(s, what, len);
}

/* Bytes of a value of fixed size; 0: it has none, or is unknown. */
static unsigned int value_bytes(uint32_t type)
{
	static const uint8_t bytes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };

	return type < sizeof(bytes) ? bytes[type] : 0;
}

static int skip_value(struct cursor *c, uint32_t type, int nest)
{
	unsigned int bytes = value_bytes(type);
	uint32_t of;
	uint64_t n;
	size_t len;
	int err = 0;

	if (bytes) {
		get(c, bytes);
		return 0;
	}
	if (type == GGUF_STRING) {
		get_str(c, &len);
		return 0;
	}
	if (type != GGUF_ARRAY || nest == MAX_NEST)
		return file_bad(c->f, -EINVAL, "metadata of the unknown type %u",
				type);
	of = (uint32_t)get(c, 4);
	n = get(c, 8);
	bytes = value_bytes(of);
	if (bytes) {
		if (n > left(c) / bytes)
			c->bad = true;
		else
			c->at += n * bytes;
		return 0;
	}
	/* Strings and arrays have at least 8 bytes each, so this ends. */
	while (n-- && !err && !c->bad)
		err = skip_value(c, of, nest + 1);
	return err;
}

static int read_meta(struct cursor *c, uint64_t n, uint64_t *align)
{
	struct weight_file *f = c->f;
	int err = 0;

	while (n-- && !err && !c->bad) {
		size_t len, slen;
		const char *key = get_str(c, &len), *s;
		uint32_t type = (uint32_t)get(c, 4);

		if (is(key, len, "general.alignment") && type == GGUF_U32) {
			*align = get(c, 4);
		} else if (is(key, len, "general.architecture") &&
			   type == GGUF_STRING) {
			s = get_str(c, &slen);
			f->turned = is(s, slen, "llama");
		} else {
			err = skip_value(c, type, 0);
		}
	}
	if (!err && c->bad)
		err = file_bad(f, -EINVAL, "the metadata is cut off");
	return err;
}

static enum num_format format_of(uint32_t type)
{
	switch (type) {
	case 0:
		return NUM_F32;
	case 1:
		return NUM_F16;
	case 8:
		return NUM_Q8_0;
	case 30:
		return NUM_BF16;
	default:
		return NUM_OTHER;
	}
}

/* Offsets are still relative to where data begin, which follows the infos. */
static int read_info(struct cursor *c, struct found *t)
{
	struct weight_file *f = c->f;
	const char *s;
	uint64_t n;
	size_t len;

	s = get_str(c, &len);
	snprintf(t->name, sizeof(t->name), "%.*s",
		 (int)(len < sizeof(t->name) ? len : sizeof(t->name)), s);
	if (!len && !c->bad)
		return file_bad(f, -EINVAL, "tensor %zu has no name", f->nr);
	t->dims = (uint32_t)get(c, 4);
	if (t->dims > FOUND_DIMS)
		return file_bad(f, -EINVAL, "%s has %u dimensions", t->name,
				t->dims);
	for (unsigned int i = t->dims; i--;)	/* innermost first */
		t->dim[i] = get(c, 8);
	t->format = format_of((uint32_t)get(c, 4));
	t->begin = get(c, 8);
	if (c->bad)
		return file_bad(f, -EINVAL, "the list of tensors is cut off");
	if (!found_count(t, &n))
		return file_bad(f, -EINVAL, "%s is larger than any file",
				t->name);
	/* Blocks do not go on from row to row. */
	if (t->format == NUM_Q8_0 && (!t->dims || t->dim[t->dims - 1] % 32))
		return file_bad(f, -EINVAL, "%s: a row is not made of blocks of 32",
				t->name);
	if (t->format != NUM_OTHER && !format_bytes(t->format, n, &t->end))
		return file_bad(f, -EINVAL, "%s is larger than any file",
				t->name);
	return 0;
}

/* Now that it is known where data begin: absolute offsets. */
static int place_all(struct weight_file *f, uint64_t base, uint64_t align)
{
	for (size_t i = 0; i < f->nr; i++) {
		struct found *t = &f->t[i];

		if (t->begin % align)
			return file_bad(f, -EINVAL, "%s is not aligned to %llu",
					t->name, (unsigned long long)align);
		if (__builtin_add_overflow(t->begin, base, &t->begin) ||
		    __builtin_add_overflow(t->begin, t->end, &t->end))
			return file_bad(f, -EINVAL, "%s ends beyond any file",
					t->name);
	}
	return file_check_layout(f, base, f->size, false);
}

int gguf_index(struct weight_file *f)
{
	struct cursor c = { .f = f, .at = 4 };
	uint64_t align = 32, nr, meta, base;
	uint32_t version = (uint32_t)get(&c, 4);
	int err;

	if (version != 2 && version != 3)
		return file_bad(f, -ENOTSUP, "GGUF version %u is not read here",
				version);
	nr = get(&c, 8);
	meta = get(&c, 8);
	err = read_meta(&c, meta, &align);
	if (err)
		return err;
	if (!align || align % 8 || align > 1U << 20)
		return file_bad(f, -EINVAL, "general.alignment is %llu",
				(unsigned long long)align);
	/* An info has 24 bytes at least, so this bounds what is allocated. */
	if (nr > left(&c) / 24)
		return file_bad(f, -EINVAL, "the list of tensors is cut off");
	f->t = calloc(nr + 1, sizeof(*f->t));
	if (!f->t)
		return file_bad(f, -ENOMEM, "out of memory");
	while (f->nr < nr) {
		err = read_info(&c, &f->t[f->nr++]);
		if (err)
			return err;
	}
	base = (c.at + align - 1) / align * align;
	return place_all(f, base, align);
}
