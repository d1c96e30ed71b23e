/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index of a .safetensors file: a length (u64, little-endian), a JSON object
 * of that many bytes, and the tensors' bytes without holes. Offsets count from
 * the end of the JSON.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "tests/engine/load.h"

#define MAX_HEADER	(UINT64_C(100) << 20)	/* what the format allows */

static enum num_format format_of(const char *s)
{
	if (!strcmp(s, "F32"))
		return NUM_F32;
	if (!strcmp(s, "F16"))
		return NUM_F16;
	if (!strcmp(s, "BF16"))
		return NUM_BF16;
	return NUM_OTHER;
}

static int read_shape(struct weight_file *f, struct found *t, json_t *shape)
{
	if (!json_is_array(shape))
		return file_bad(f, -EINVAL, "%s has no shape", t->name);
	if (json_array_size(shape) > FOUND_DIMS)
		return file_bad(f, -EINVAL, "%s has %zu dimensions", t->name,
				json_array_size(shape));
	for (size_t i = 0; i < json_array_size(shape); i++) {
		json_t *j = json_array_get(shape, i);

		if (!json_is_integer(j) || json_integer_value(j) < 0)
			return file_bad(f, -EINVAL, "%s: a dimension is not a count",
					t->name);
		t->dim[t->dims++] = (uint64_t)json_integer_value(j);
	}
	return 0;
}

static int read_tensor(struct weight_file *f, struct found *t, const char *name,
		       json_t *j, uint64_t base)
{
	json_t *at = json_object_get(j, "data_offsets");
	const char *type = json_string_value(json_object_get(j, "dtype"));
	json_t *b = json_array_get(at, 0), *e = json_array_get(at, 1);
	uint64_t n, bytes;
	int err;

	snprintf(t->name, sizeof(t->name), "%s", name);
	if (!type)
		return file_bad(f, -EINVAL, "%s has no dtype", t->name);
	t->format = format_of(type);
	err = read_shape(f, t, json_object_get(j, "shape"));
	if (err)
		return err;
	if (json_array_size(at) != 2 || !json_is_integer(b) ||
	    !json_is_integer(e) || json_integer_value(b) < 0 ||
	    json_integer_value(e) < json_integer_value(b))
		return file_bad(f, -EINVAL, "%s has no sensible data_offsets",
				t->name);
	if (__builtin_add_overflow(base, (uint64_t)json_integer_value(b),
				   &t->begin) ||
	    __builtin_add_overflow(base, (uint64_t)json_integer_value(e),
				   &t->end))
		return file_bad(f, -EINVAL, "%s has no sensible data_offsets",
				t->name);
	if (!found_count(t, &n))
		return file_bad(f, -EINVAL, "%s is larger than any file",
				t->name);
	if (t->format != NUM_OTHER &&
	    (!format_bytes(t->format, n, &bytes) || bytes != t->end - t->begin))
		return file_bad(f, -EINVAL, "%s has %llu bytes, which is not what its shape needs",
				t->name,
				(unsigned long long)(t->end - t->begin));
	return 0;
}

static int read_index(struct weight_file *f, json_t *top, uint64_t base)
{
	const char *name;
	json_t *j;
	int err;

	if (!json_is_object(top))
		return file_bad(f, -EINVAL, "the header is not a JSON object");
	f->t = calloc(json_object_size(top) + 1, sizeof(*f->t));
	if (!f->t)
		return file_bad(f, -ENOMEM, "out of memory");
	json_object_foreach(top, name, j) {
		if (!strcmp(name, "__metadata__"))
			continue;
		err = read_tensor(f, &f->t[f->nr++], name, j, base);
		if (err)
			return err;
	}
	return file_check_layout(f, base, f->size, true);
}

int safetensors_index(struct weight_file *f)
{
	json_error_t e;
	uint64_t len = 0;
	json_t *top;
	int err;

	for (int i = 7; i >= 0; i--)
		len = len << 8 | f->p[i];
	if (len > MAX_HEADER)
		return file_bad(f, -EINVAL, "neither a safetensors nor a GGUF file: its header would have %llu bytes",
				(unsigned long long)len);
	if (len > f->size - 8)
		return file_bad(f, -EINVAL, "the header of %llu bytes is cut off",
				(unsigned long long)len);
	top = json_loadb((const char *)f->p + 8, (size_t)len,
			 JSON_REJECT_DUPLICATES, &e);
	if (!top)
		return file_bad(f, -EINVAL, "the header is no JSON: %s", e.text);
	err = read_index(f, top, 8 + len);
	json_decref(top);
	return err;
}
