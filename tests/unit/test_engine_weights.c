/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights from files: both formats and every format of numbers give the model
 * that was written, and a file that is torn, hostile or another model's gives a
 * sentence.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/rand.h"
#include "tests/engine/weights.h"
#include "tests/lib/unit.h"

static char path[256];

/* -- writing files ------------------------------------------------------------------ */

struct bytes {
	uint8_t	*p;
	size_t	n, room;
};

static void put(struct bytes *b, const void *p, size_t n)
{
	if (!n)
		return;
	while (b->n + n > b->room) {
		b->room = b->room ? 2 * b->room : 4096;
		b->p = realloc(b->p, b->room);
		assert_non_null(b->p);
	}
	if (p)
		memcpy(b->p + b->n, p, n);
	else
		memset(b->p + b->n, 0, n);
	b->n += n;
}

static void put_int(struct bytes *b, uint64_t v, int bytes)
{
	put(b, &v, (size_t)bytes);		/* little-endian, as the host */
}

static void put_str(struct bytes *b, const char *s)
{
	put_int(b, strlen(s), 8);
	put(b, s, strlen(s));
}

static void save(const struct bytes *b)
{
	FILE *f = fopen(path, "wb");

	assert_non_null(f);
	assert_int_equal(fwrite(b->p, 1, b->n, f), b->n);
	assert_int_equal(fclose(f), 0);
}

/* All that a test may want to be otherwise in a file. */
struct form {
	bool		gguf;
	const char	*type;		/* of matrices: F32, F16, BF16, Q8_0 */
	const char	*arch;		/* of a GGUF file */
	const char	*skip;		/* a tensor to leave out */
	const char	*extra;		/* a tensor to add */
	const char	*transpose;	/* a tensor to give the other shape */
};

/* Exact for all random weights: small integers times a power of two. */
static uint16_t f16_of(float f)
{
	uint16_t sign = f < 0 ? 0x8000 : 0;
	int exp = 15;

	if (f < 0)
		f = -f;
	if (f < 0x1p-14f)
		return (uint16_t)(sign | (uint16_t)(f * 0x1p24f));
	for (; f >= 2; exp++)
		f /= 2;
	for (; f < 1; exp--)
		f *= 2;
	return (uint16_t)(sign | exp << 10 | (int)((f - 1) * 1024));
}

static void put_q8(struct bytes *b, const float *row, uint32_t n)
{
	for (uint32_t i = 0; i < n; i += 32) {
		float most = 0, d;

		for (uint32_t k = i; k < i + 32; k++) {
			float a = row[k] < 0 ? -row[k] : row[k];

			most = a > most ? a : most;
		}
		/* The largest power of two that 127 of reach all of them. */
		for (d = 0x1p-20f; d * 127 < most; )
			d *= 2;
		put_int(b, f16_of(d), 2);
		for (uint32_t k = i; k < i + 32; k++) {
			int8_t q = (int8_t)(row[k] / d);

			assert_true((float)q * d == row[k]);
			put(b, &q, 1);
		}
	}
}

static void put_row(struct bytes *b, const char *type, const float *row,
		    uint32_t n)
{
	if (!strcmp(type, "F32")) {
		put(b, row, n * 4);
	} else if (!strcmp(type, "Q8_0")) {
		put_q8(b, row, n);
	} else {
		for (uint32_t i = 0; i < n; i++)
			put_int(b, !strcmp(type, "F16") ? f16_of(row[i]) :
				   bf16_from(row[i]), 2);
	}
}

/* GGUF files of the llama architecture have rows of a head in pairs. */
static uint32_t file_row(const struct form *fm, const struct tensor *t,
			 uint32_t i)
{
	uint32_t d = t->turned;

	if (!fm->gguf || strcmp(fm->arch, "llama") || !d)
		return i;
	/* reshape(heads, 2, d / 2).swap(1, 2): row 2k + s was s * d / 2 + k */
	return i / d * d + i % 2 * (d / 2) + i % d / 2;
}

static const char *type_of(const struct form *fm, const struct tensor *t)
{
	if (fm->gguf && t->vector)
		return "F32";
	/* As converters do where rows are not made of whole blocks. */
	return !strcmp(fm->type, "Q8_0") && t->cols % 32 ? "F16" : fm->type;
}

static void put_tensor(struct bytes *b, struct model *m, const struct form *fm,
		       const struct tensor *t)
{
	float *row = malloc(t->cols * sizeof(*row));

	assert_non_null(row);
	for (uint32_t i = 0; i < t->rows; i++) {
		tensor_get_row(m, t, file_row(fm, t, i), row);
		put_row(b, type_of(fm, t), row, t->cols);
	}
	free(row);
}

static bool skipped(const struct form *fm, const char *name)
{
	return fm->skip && !strcmp(fm->skip, name);
}

/* One member of the header; @rows 0: a vector. */
static void put_member(struct bytes *b, const char *name, const char *type,
		       uint32_t rows, uint32_t cols, size_t begin, size_t end)
{
	char s[256], shape[32];

	snprintf(shape, sizeof(shape), rows ? "%u,%u" : "%.0u%u", rows, cols);
	snprintf(s, sizeof(s), ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],"
		 "\"data_offsets\":[%zu,%zu]}", name, type, shape, begin, end);
	put(b, s, strlen(s));
}

static void write_safetensors(struct model *m, const struct form *fm)
{
	static const char meta[] = "{\"__metadata__\":{\"format\":\"pt\"}";
	struct bytes head = { 0 }, data = { 0 }, all = { 0 };
	struct tensor t;

	put(&head, meta, strlen(meta));
	for (unsigned int i = 0; model_tensor(m, i, &t); i++) {
		bool other = fm->transpose && !strcmp(fm->transpose, t.name);
		uint32_t rows = t.vector ? 0 : t.rows, cols = t.cols;
		size_t at = data.n;

		if (skipped(fm, t.name))
			continue;
		put_tensor(&data, m, fm, &t);
		put_member(&head, t.name, type_of(fm, &t), other ? cols : rows,
			   other ? rows : cols, at, data.n);
	}
	if (fm->extra) {
		put_member(&head, fm->extra, "F32", 0, 1, data.n, data.n + 4);
		put(&data, NULL, 4);
	}
	put(&head, "}", 1);
	put_int(&all, head.n, 8);
	put(&all, head.p, head.n);
	put(&all, data.p, data.n);
	save(&all);
	free(head.p);
	free(data.p);
	free(all.p);
}

static uint32_t gguf_type(const char *type)
{
	return !strcmp(type, "F32") ? 0 : !strcmp(type, "F16") ? 1 :
	       !strcmp(type, "Q8_0") ? 8 : 30;
}

#define ALIGN	64

static void put_info(struct bytes *b, const char *name, const char *type,
		     uint32_t rows, uint32_t cols, size_t at)
{
	put_str(b, name);
	put_int(b, rows ? 2 : 1, 4);
	put_int(b, cols, 8);
	if (rows)
		put_int(b, rows, 8);
	put_int(b, gguf_type(type), 4);
	put_int(b, at, 8);
}

static void put_meta(struct bytes *b, const struct form *fm)
{
	put_str(b, "general.architecture");
	put_int(b, 8, 4);
	put_str(b, fm->arch);
	put_str(b, "tokenizer.ggml.tokens");
	put_int(b, 9, 4);			/* an array of strings */
	put_int(b, 8, 4);
	put_int(b, 2, 8);
	put_str(b, "a");
	put_str(b, "");
	put_str(b, "tokenizer.ggml.scores");
	put_int(b, 9, 4);			/* an array of f32 */
	put_int(b, 6, 4);
	put_int(b, 3, 8);
	put(b, NULL, 12);
	put_str(b, "general.alignment");
	put_int(b, 4, 4);
	put_int(b, ALIGN, 4);
	put_str(b, "some.flag");
	put_int(b, 7, 4);
	put_int(b, 1, 1);
}

static void write_gguf(struct model *m, const struct form *fm)
{
	struct bytes info = { 0 }, data = { 0 }, all = { 0 };
	uint64_t nr = 0;
	struct tensor t;

	for (unsigned int i = 0; model_tensor(m, i, &t); i++) {
		bool other = fm->transpose && !strcmp(fm->transpose, t.gguf);
		uint32_t rows = t.vector ? 0 : t.rows, cols = t.cols;

		if (skipped(fm, t.gguf))
			continue;
		put(&data, NULL, (ALIGN - data.n % ALIGN) % ALIGN);
		put_info(&info, t.gguf, type_of(fm, &t), other ? cols : rows,
			 other ? rows : cols, data.n);
		put_tensor(&data, m, fm, &t);
		nr++;
	}
	if (fm->extra) {
		put(&data, NULL, (ALIGN - data.n % ALIGN) % ALIGN);
		put_info(&info, fm->extra, "F32", 0, 1, data.n);
		put(&data, NULL, 4);
		nr++;
	}
	put(&all, "GGUF", 4);
	put_int(&all, 3, 4);
	put_int(&all, nr, 8);
	put_int(&all, 5, 8);
	put_meta(&all, fm);
	put(&all, info.p, info.n);
	put(&all, NULL, (ALIGN - all.n % ALIGN) % ALIGN);
	put(&all, data.p, data.n);
	save(&all);
	free(info.p);
	free(data.p);
	free(all.p);
}

static void write_file(struct model *m, const struct form *fm)
{
	if (fm->gguf)
		write_gguf(m, fm);
	else
		write_safetensors(m, fm);
}

/* -- what is read ---------------------------------------------------------------------- */

static const char *const shapes[] = { "gqa", "mqa", "mla", "linear" };

#define NR_SHAPES	(sizeof(shapes) / sizeof(*shapes))

static struct model *model_of(const char *name)
{
	struct model_config c;
	struct model *m;

	assert_int_equal(model_config_named(&c, name), 0);
	assert_int_equal(model_create(&c, 3, &m), 0);
	return m;
}

static uint64_t digest_of(const struct model *m)
{
	uint32_t vocab = model_config_of(m)->vocab, tok[40];
	static float logits[512];
	struct oracle *o;

	for (uint32_t i = 0; i < 40; i++)
		tok[i] = i * 37 % vocab;
	assert_int_equal(oracle_create(m, &o), 0);
	assert_int_equal(oracle_run(o, tok, 40, logits), 0);
	oracle_destroy(o);
	return logits_digest(0, logits, vocab);
}

static void reads_back(struct model *m, const struct form *fm)
{
	struct model *got;
	char why[256] = "";

	write_file(m, fm);
	if (model_load(model_config_of(m), path, why, sizeof(why), &got))
		fail_msg("%s %s: %s", model_config_of(m)->name, fm->type, why);
	assert_true(model_fingerprint(got) == model_fingerprint(m));
	assert_true(digest_of(got) == digest_of(m));
	model_destroy(got);
}

static void safetensors_of_every_format_give_the_same_logits(void **state)
{
	static const char *const types[] = { "F32", "F16", "BF16" };

	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = model_of(shapes[i]);

		for (int k = 0; k < 3; k++)
			reads_back(m, &(struct form){ .type = types[k] });
		model_destroy(m);
	}
}

static void gguf_of_every_format_gives_the_same_logits(void **state)
{
	static const char *const types[] = { "F32", "F16", "BF16", "Q8_0" };

	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = model_of(shapes[i]);

		for (int k = 0; k < 4; k++)
			reads_back(m, &(struct form){ .gguf = true,
						      .type = types[k],
						      .arch = "llama" });
		reads_back(m, &(struct form){ .gguf = true, .type = "F32",
					      .arch = "other" });
		model_destroy(m);
	}
}

static void tied_file_may_carry_the_output_matrix_too(void **state)
{
	struct model *m = model_of("mqa");

	assert_true(model_config_of(m)->tie_embeddings);
	reads_back(m, &(struct form){ .type = "F32",
				      .extra = "lm_head.weight" });
	model_destroy(m);
}

static void fingerprint_tells_weights_and_shapes_apart(void **state)
{
	struct model_config c;
	struct model *a, *b;

	assert_int_equal(model_config_named(&c, "gqa"), 0);
	assert_int_equal(model_create(&c, 1, &a), 0);
	assert_int_equal(model_create(&c, 2, &b), 0);
	assert_true(model_fingerprint(a) != model_fingerprint(b));
	assert_true(digest_of(a) != digest_of(b));
	model_destroy(b);
	assert_int_equal(model_create(&c, 1, &b), 0);
	assert_true(model_fingerprint(a) == model_fingerprint(b));
	model_destroy(b);
	c.rope_theta *= 2;		/* no weight knows of it */
	assert_int_equal(model_create(&c, 1, &b), 0);
	assert_true(model_fingerprint(a) != model_fingerprint(b));
	model_destroy(a);
	model_destroy(b);
}

/* -- what is refused ------------------------------------------------------------------- */

static void refused(const struct model_config *c, int err, const char *what)
{
	struct model *got = NULL;
	char why[256] = "";
	int ret = model_load(c, path, why, sizeof(why), &got);

	if (ret != err || !strstr(why, what))
		fail_msg("%d \"%s\", not %d \"%s\"", ret, why, err, what);
	assert_null(got);
}

static void file_of_another_shape_is_refused_by_tensor(void **state)
{
	struct model *m = model_of("gqa");
	struct model_config c = *model_config_of(m);

	for (int gguf = 0; gguf < 2; gguf++) {
		struct form fm = { .gguf = gguf, .type = "F32",
				   .arch = "llama" };
		const char *k = gguf ? "blk.1.attn_k.weight" :
				"model.layers.1.self_attn.k_proj.weight";

		fm.skip = k;
		write_file(m, &fm);
		refused(&c, -EINVAL, "there is no tensor ");
		refused(&c, -EINVAL, k);
		fm.skip = NULL;
		fm.transpose = k;
		write_file(m, &fm);
		refused(&c, -EINVAL, "is [64, 128], not [128, 64]");
		refused(&c, -EINVAL, k);
		fm.transpose = NULL;
		/* A bias that is left out would give other tokens silently. */
		fm.extra = "model.layers.0.self_attn.q_proj.bias";
		write_file(m, &fm);
		refused(&c, -EINVAL, "q_proj.bias is no tensor of this model");
	}
	model_destroy(m);
}

static void foreign_arithmetic_is_refused_for_a_file_only(void **state)
{
	struct model *m = model_of("gqa"), *r;
	struct model_config c = *model_config_of(m);

	write_file(m, &(struct form){ .type = "F32" });
	snprintf(c.foreign, sizeof(c.foreign), "rope_scaling");
	refused(&c, -ENOTSUP, "rope_scaling");
	assert_int_equal(model_create(&c, 1, &r), 0);
	model_destroy(r);
	model_destroy(m);
}

static void write_text(const char *json, size_t data)
{
	struct bytes b = { 0 };

	put_int(&b, strlen(json), 8);
	put(&b, json, strlen(json));
	put(&b, NULL, data);
	save(&b);
	free(b.p);
}

static void hostile_safetensors_get_a_sentence(void **state)
{
	static const struct {
		const char	*json;
		size_t		data;
		int		err;
		const char	*what;
	} bad[] = {
		{ "[1, 2, 3]", 0, -EINVAL, "not a JSON object" },
		{ "{\"a\": ", 9, -EINVAL, "no JSON" },
		{ "{\"a\":1,\"a\":2}", 9, -EINVAL, "no JSON" },
		{ "{\"a\":{}}    ", 0, -EINVAL, "a has no dtype" },
		{ "{\"a\":{\"dtype\":\"F32\"}}", 0, -EINVAL, "no shape" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[-1]}}", 0, -EINVAL,
		  "not a count" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1]}}", 0,
		  -EINVAL, "5 dimensions" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 0, -EINVAL,
		  "data_offsets" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],"
		  "\"data_offsets\":[8,4]}}", 8, -EINVAL, "data_offsets" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[1],"
		  "\"data_offsets\":[0,5]}}", 8, -EINVAL, "a has 5 bytes" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],"
		  "\"data_offsets\":[0,0]}}", 0, -EINVAL, "a has 0 bytes" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],"
		  "\"data_offsets\":[0,0]}}", 0, -EINVAL, "larger than" },
		{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":"
		  "[9223372036854775800,9223372036854775807]}}", 8, -EINVAL,
		  "cut off" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],"
		  "\"data_offsets\":[0,8]}}", 7, -EINVAL, "cut off" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],"
		  "\"data_offsets\":[0,8]}}", 9, -EINVAL, "1 bytes follow" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],"
		  "\"data_offsets\":[4,12]}}", 12, -EINVAL, "hole" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],"
		  "\"data_offsets\":[0,8]},\"b\":{\"dtype\":\"F32\","
		  "\"shape\":[1],\"data_offsets\":[4,8]}}", 8, -EINVAL,
		  "overlaps" },
		{ "{}              ", 0, -EINVAL, "there is no tensor" },
	};
	struct model_config c;
	uint8_t huge[16] = { 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f };

	assert_int_equal(model_config_named(&c, "gqa"), 0);
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		write_text(bad[i].json, bad[i].data);
		refused(&c, bad[i].err, bad[i].what);
	}
	save(&(struct bytes){ .p = huge, .n = sizeof(huge) });
	refused(&c, -EINVAL, "neither a safetensors nor a GGUF file");
	memcpy(huge, "\x64\0\0\0\0\0\0\0", 8);
	save(&(struct bytes){ .p = huge, .n = sizeof(huge) });
	refused(&c, -EINVAL, "header of 100 bytes is cut off");
	save(&(struct bytes){ .p = huge, .n = 0 });
	refused(&c, -EINVAL, "too short");
	unlink(path);
	refused(&c, -ENOENT, "cannot open");
}

/* A GGUF file of one tensor, with what a test wants to be odd about it. */
struct odd {
	uint64_t	version, dims, type, meta_type;
	uint64_t	nr, metas, dim, offset, align, count;
};

static void write_odd(const struct odd *o)
{
	struct bytes b = { 0 };

	put(&b, "GGUF", 4);
	put_int(&b, o->version, 4);
	put_int(&b, o->nr, 8);
	put_int(&b, o->metas, 8);
	put_str(&b, "general.alignment");
	put_int(&b, 4, 4);
	put_int(&b, o->align, 4);
	put_str(&b, "list");
	put_int(&b, o->meta_type, 4);
	if (o->meta_type == 9) {
		put_int(&b, 8, 4);
		put_int(&b, o->count, 8);
	}
	put_str(&b, "a");
	put_int(&b, o->dims, 4);
	for (uint32_t i = 0; i < o->dims; i++)
		put_int(&b, o->dim, 8);
	put_int(&b, o->type, 4);
	put_int(&b, o->offset, 8);
	put(&b, NULL, 256 - b.n % 32);
	save(&b);
	free(b.p);
}

#define FIELD(x)	(offsetof(struct odd, x) / sizeof(uint64_t))

static void hostile_gguf_gets_a_sentence(void **state)
{
	static const struct {
		size_t		field;
		uint64_t	val;
		size_t		field2;
		uint64_t	val2;
		int		err;
		const char	*what;
	} bad[] = {
		{ FIELD(nr), 1, FIELD(nr), 1, -EINVAL, "there is no tensor" },
		{ FIELD(nr), 0, FIELD(nr), 0, -EINVAL, "there is no tensor" },
		{ FIELD(nr), UINT64_MAX, FIELD(nr), UINT64_MAX, -EINVAL,
		  "tensors is cut off" },
		{ FIELD(nr), 3, FIELD(nr), 3, -EINVAL, "has no name" },
		{ FIELD(nr), 9, FIELD(nr), 9, -EINVAL, "has no name" },
		{ FIELD(version), 1, FIELD(dim), 4, -ENOTSUP, "version 1" },
		{ FIELD(version), 3U << 24, FIELD(dim), 4, -ENOTSUP, "version" },
		{ FIELD(metas), UINT64_MAX, FIELD(dim), 4, -EINVAL, "" },
		{ FIELD(count), UINT64_MAX, FIELD(dim), 4, -EINVAL,
		  "metadata is cut off" },
		{ FIELD(count), 1000, FIELD(dim), 4, -EINVAL,
		  "metadata is cut off" },
		{ FIELD(meta_type), 13, FIELD(dim), 4, -EINVAL,
		  "unknown type 13" },
		{ FIELD(align), 0, FIELD(dim), 4, -EINVAL,
		  "general.alignment is 0" },
		{ FIELD(align), 12, FIELD(dim), 4, -EINVAL,
		  "general.alignment is 12" },
		{ FIELD(align), 1U << 31, FIELD(dim), 4, -EINVAL,
		  "general.alignment" },
		{ FIELD(dims), 5, FIELD(dim), 4, -EINVAL, "5 dimensions" },
		{ FIELD(dims), 3, FIELD(dim), UINT64_MAX, -EINVAL,
		  "larger than" },
		{ FIELD(dims), 1, FIELD(dim), UINT64_MAX, -EINVAL,
		  "larger than" },
		{ FIELD(dims), 1, FIELD(dim), 1000, -EINVAL, "cut off" },
		{ FIELD(type), 8, FIELD(dim), 33, -EINVAL, "blocks of 32" },
		{ FIELD(type), 8, FIELD(dims), 0, -EINVAL, "blocks of 32" },
		{ FIELD(offset), 1, FIELD(dim), 4, -EINVAL, "not aligned" },
		{ FIELD(offset), UINT64_MAX - 31, FIELD(dim), 4, -EINVAL,
		  "beyond any file" },
		{ FIELD(offset), 4096, FIELD(dim), 4, -EINVAL, "cut off" },
	};
	struct model_config c;

	assert_int_equal(model_config_named(&c, "gqa"), 0);
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
		struct odd o = { .version = 3, .dims = 1, .meta_type = 9,
				 .nr = 1, .metas = 2, .dim = 4, .align = 32 };

		((uint64_t *)&o)[bad[i].field] = bad[i].val;
		((uint64_t *)&o)[bad[i].field2] = bad[i].val2;
		write_odd(&o);
		refused(&c, bad[i].err, bad[i].what);
	}
}

/* -- what happens to a file --------------------------------------------------------------- */

static struct bytes slurp(void)
{
	struct bytes b = { 0 };
	struct stat st;
	FILE *f = fopen(path, "rb");

	assert_non_null(f);
	assert_int_equal(fstat(fileno(f), &st), 0);
	put(&b, NULL, (size_t)st.st_size);
	assert_int_equal(fread(b.p, 1, b.n, f), b.n);
	fclose(f);
	return b;
}

static void truncated_file_is_refused_wherever_it_ends(void **state)
{
	struct model *m = model_of("mqa");
	struct rng r;

	rng_seed(&r, test_seed());
	for (int gguf = 0; gguf < 2; gguf++) {
		struct bytes b, cut;

		write_file(m, &(struct form){ .gguf = gguf, .type = "BF16",
					      .arch = "llama" });
		b = slurp();
		cut = b;
		for (int i = 0; i < 60; i++) {
			cut.n = i < 30 ? (size_t)i * 7 : rng_below(&r, b.n);
			save(&cut);
			refused(model_config_of(m), -EINVAL, "");
		}
		cut.n = b.n - 1;
		save(&cut);
		refused(model_config_of(m), -EINVAL, "cut off");
		free(b.p);
	}
	model_destroy(m);
}

/* Anything may come of it but a crash; a model that loads can be run. */
static void flipped_bytes_never_crash(void **state)
{
	struct model *m = model_of("mqa"), *got;
	int rounds = test_long() ? 4000 : 300, loaded = 0;
	char why[256];
	struct rng r;

	rng_seed(&r, test_seed());
	for (int gguf = 0; gguf < 2; gguf++) {
		struct bytes b;

		write_file(m, &(struct form){ .gguf = gguf, .type = "BF16",
					      .arch = "llama" });
		b = slurp();
		for (int i = 0; i < rounds; i++) {
			/* Mostly where the structure is: at the beginning. */
			size_t at = rng_below(&r, i % 8 ? 2600 : b.n);
			uint8_t was = b.p[at];

			b.p[at] = (uint8_t)rng_below(&r, 256);
			save(&b);
			*why = 0;
			if (!model_load(model_config_of(m), path, why,
					sizeof(why), &got)) {
				loaded++;
				model_destroy(got);
			} else {
				assert_true(*why);
			}
			b.p[at] = was;
		}
		free(b.p);
	}
	assert_true(loaded > 0);
	model_destroy(m);
}

static int where(void **state)
{
	const char *dir = getenv("TMPDIR");

	snprintf(path, sizeof(path), "%s/engine-weights.%d",
		 dir ? dir : "/tmp", (int)getpid());
	return 0;
}

static int away(void **state)
{
	unlink(path);
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(safetensors_of_every_format_give_the_same_logits),
		cmocka_unit_test(gguf_of_every_format_gives_the_same_logits),
		cmocka_unit_test(tied_file_may_carry_the_output_matrix_too),
		cmocka_unit_test(fingerprint_tells_weights_and_shapes_apart),
		cmocka_unit_test(file_of_another_shape_is_refused_by_tensor),
		cmocka_unit_test(foreign_arithmetic_is_refused_for_a_file_only),
		cmocka_unit_test(hostile_safetensors_get_a_sentence),
		cmocka_unit_test(hostile_gguf_gets_a_sentence),
		cmocka_unit_test(truncated_file_is_refused_wherever_it_ends),
		cmocka_unit_test(flipped_bytes_never_crash),
	};

	return cmocka_run_group_tests(tests, where, away);
}
