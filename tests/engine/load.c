/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights from a file: map it, have its format's reader index it, then match the
 * index with the model's table.
 *
 * Every number in the file is doubted. What is not defended against is a file
 * that shrinks while it is mapped.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/engine/load.h"
#include "tests/engine/weights.h"

int file_bad(struct weight_file *f, int err, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(f->why, f->len, fmt, ap);
	va_end(ap);
	return err;
}

bool found_count(const struct found *t, uint64_t *n)
{
	*n = 1;
	for (unsigned int i = 0; i < t->dims; i++)
		if (__builtin_mul_overflow(*n, t->dim[i], n))
			return false;
	return true;
}

bool format_bytes(enum num_format format, uint64_t n, uint64_t *bytes)
{
	switch (format) {
	case NUM_F32:
		return !__builtin_mul_overflow(n, 4, bytes);
	case NUM_F16:
	case NUM_BF16:
		return !__builtin_mul_overflow(n, 2, bytes);
	case NUM_Q8_0:
		return n % 32 == 0 && !__builtin_mul_overflow(n / 32, 34, bytes);
	case NUM_OTHER:
		break;
	}
	return false;
}

static int by_begin(const void *a, const void *b)
{
	const struct found *x = a, *y = b;

	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	return x->end < y->end ? -1 : x->end > y->end;
}

int file_check_layout(struct weight_file *f, uint64_t from, uint64_t to,
		      bool tight)
{
	if (f->nr)
		qsort(f->t, f->nr, sizeof(*f->t), by_begin);
	for (size_t i = 0; i < f->nr; i++) {
		const struct found *t = &f->t[i];

		if (t->end > to || t->end < t->begin)
			return file_bad(f, -EINVAL, "%s ends at byte %llu of %llu: the file is cut off",
					t->name, (unsigned long long)t->end,
					(unsigned long long)to);
		if (t->begin < from)
			return file_bad(f, -EINVAL, "%s overlaps what precedes it",
					t->name);
		if (tight && t->begin > from)
			return file_bad(f, -EINVAL, "there is a hole before %s",
					t->name);
		from = t->end;
	}
	if (tight && from != to)
		return file_bad(f, -EINVAL, "%llu bytes follow the last tensor",
				(unsigned long long)(to - from));
	return 0;
}

/* -- numbers ----------------------------------------------------------------------- */

static uint16_t get_u16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

static float f16_to(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31;
	uint32_t frac = h & 0x3ff, u;
	float f;

	if (!exp) {			/* a multiple of 2^-24 */
		f = (float)frac * 0x1p-24f;
		return sign ? -f : f;
	}
	if (exp == 31)
		u = sign | 0x7f800000 | frac << 13;
	else
		u = sign | (exp + 112) << 23 | frac << 13;
	memcpy(&f, &u, 4);
	return f;
}

static void row_to_float(enum num_format format, const uint8_t *p, float *val,
			 uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		switch (format) {
		case NUM_F32:
			memcpy(&val[i], p + i * 4, 4);
			break;
		case NUM_F16:
			val[i] = f16_to(get_u16(p + i * 2));
			break;
		case NUM_BF16:
			val[i] = bf16_to(get_u16(p + i * 2));
			break;
		default:
			val[i] = f16_to(get_u16(p + i / 32 * 34)) *
				 (float)(int8_t)p[i / 32 * 34 + 2 + i % 32];
		}
	}
}

/* -- matching ------------------------------------------------------------------------ */

static int check_shape(struct weight_file *f, const struct found *t,
		       const struct tensor *w)
{
	const uint64_t want[2] = { w->vector ? w->cols : w->rows, w->cols };
	unsigned int dims = w->vector ? 1 : 2;
	char got[96] = "";
	size_t at = 0;

	if (t->dims == dims && t->dim[0] == want[0] &&
	    (w->vector || t->dim[1] == want[1]))
		return 0;
	for (unsigned int i = 0; i < t->dims; i++)
		at += (size_t)snprintf(got + at, sizeof(got) - at, "%s%llu",
				       i ? ", " : "",
				       (unsigned long long)t->dim[i]);
	if (w->vector)
		return file_bad(f, -EINVAL, "%s is [%s], not [%u]", t->name,
				got, w->cols);
	return file_bad(f, -EINVAL, "%s is [%s], not [%u, %u]", t->name, got,
			w->rows, w->cols);
}

static struct found *find(struct weight_file *f, const char *name)
{
	for (size_t i = 0; i < f->nr; i++)
		if (!f->t[i].used && !strcmp(f->t[i].name, name))
			return &f->t[i];
	return NULL;
}

/* In which row of the model's matrix a file's row is. */
static uint32_t row_of(const struct weight_file *f, const struct tensor *w,
		       uint32_t row)
{
	uint32_t dim = w->turned, i = dim ? row % dim : 0;

	if (!f->turned || !dim)
		return row;
	return row - i + i % 2 * (dim / 2) + i / 2;
}

static int load_tensor(struct weight_file *f, struct model *m,
		       const struct tensor *w)
{
	const char *name = f->gguf ? w->gguf : w->name;
	struct found *t = find(f, name);
	uint64_t row;
	float *val;
	int err;

	if (!t)
		return file_bad(f, -EINVAL, "there is no tensor %s", name);
	t->used = true;
	err = check_shape(f, t, w);
	if (err)
		return err;
	if (!format_bytes(t->format, w->cols, &row))
		return file_bad(f, -ENOTSUP, "%s has numbers of a format that is not read here",
				name);
	val = malloc(w->cols * sizeof(*val));
	if (!val)
		return file_bad(f, -ENOMEM, "out of memory");
	for (uint32_t i = 0; i < w->rows; i++) {
		row_to_float(t->format, f->p + t->begin + i * row, val, w->cols);
		tensor_set_row(m, w, row_of(f, w, i), val);
	}
	free(val);
	return 0;
}

/* May a file have @name though the model does not ask for it? */
static bool harmless(const struct model_config *c, const char *name)
{
	static const char freq[] = ".rotary_emb.inv_freq";
	size_t n = strlen(name);

	if (c->tie_embeddings &&
	    (!strcmp(name, "lm_head.weight") || !strcmp(name, "output.weight")))
		return true;
	return n >= sizeof(freq) && !strcmp(name + n - sizeof(freq) + 1, freq);
}

static int load_all(struct weight_file *f, struct model *m)
{
	struct tensor w;
	int err;

	for (unsigned int i = 0; model_tensor(m, i, &w); i++) {
		err = load_tensor(f, m, &w);
		if (err)
			return err;
	}
	for (size_t i = 0; i < f->nr; i++)
		if (!f->t[i].used && !harmless(&m->c, f->t[i].name))
			return file_bad(f, -EINVAL, "%s is no tensor of this model",
					f->t[i].name);
	return 0;
}

/* -- the file ---------------------------------------------------------------------- */

static int map_file(struct weight_file *f, const char *path)
{
	struct stat st;
	void *p;
	int fd, err;

	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) {
		err = -errno;
		return file_bad(f, err, "cannot open %s: %s", path,
				strerror(-err));
	}
	if (fstat(fd, &st) < 0) {
		err = -errno;
		close(fd);
		return file_bad(f, err, "cannot stat %s: %s", path,
				strerror(-err));
	}
	if (!S_ISREG(st.st_mode) || st.st_size < 16) {
		close(fd);
		return file_bad(f, -EINVAL, "%s is too short, or no file", path);
	}
	f->size = (size_t)st.st_size;
	p = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
	err = p == MAP_FAILED ? -errno : 0;
	close(fd);
	if (err)
		return file_bad(f, err, "cannot map %s: %s", path,
				strerror(-err));
	f->p = p;
	return 0;
}

int model_load(const struct model_config *c, const char *path,
	       char *why, size_t len, struct model **ret)
{
	struct weight_file f = { .why = why, .len = len };
	struct model *m = NULL;
	int err;

	if (*c->foreign)
		return file_bad(&f, -ENOTSUP, "the configuration has %s, which this decoder does not compute",
				c->foreign);
	err = model_config_check(c, why, len);
	if (err)
		return err;
	err = map_file(&f, path);
	if (err)
		return err;
	f.gguf = !memcmp(f.p, "GGUF", 4);
	err = f.gguf ? gguf_index(&f) : safetensors_index(&f);
	if (err)
		goto out;
	err = model_alloc(c, &m);
	if (err) {
		file_bad(&f, err, "no memory for the weights");
		goto out;
	}
	err = load_all(&f, m);
	if (err)
		goto out;
	model_seal(m);
	*ret = m;
	m = NULL;
out:
	model_destroy(m);
	free(f.t);
	munmap((void *)f.p, f.size);
	return err;
}
