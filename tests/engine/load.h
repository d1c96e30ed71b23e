/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load.h - files of weights: what both formats are read into.
 *
 * A reader gets the whole file, mapped, and fills an index of its tensors whose
 * bytes it has found to lie within the file. What they mean to the model is
 * load.c's matter.
 */
#ifndef KVMM_TESTS_ENGINE_LOAD_H
#define KVMM_TESTS_ENGINE_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FOUND_DIMS	4

enum num_format {
	NUM_F32,
	NUM_F16,
	NUM_BF16,
	NUM_Q8_0,			/* blocks of 32: f16 scale, 32 int8 */
	NUM_OTHER,			/* known to the file, not to us */
};

/**
 * struct found - one tensor of a file
 * @name:	cut off where too long, which no tensor of a model is
 * @format:	enum num_format
 * @dims:	how many of @dim
 * @dim:	outermost first
 * @begin, @end: its bytes in the file; of NUM_OTHER not looked at
 * @used:	some tensor of the model was read from it
 */
struct found {
	char		name[96];
	enum num_format	format;
	unsigned int	dims;
	uint64_t	dim[FOUND_DIMS];
	uint64_t	begin, end;
	bool		used;
};

/**
 * struct weight_file - a file being read
 * @p, @size:	its bytes
 * @t, @nr:	its tensors
 * @turned:	queries and keys are in the order of the other kind of RoPE
 * @gguf:	names are those of GGUF
 * @why, @len:	where the sentence about what is wrong goes
 */
struct weight_file {
	const uint8_t	*p;
	size_t		size;
	struct found	*t;
	size_t		nr;
	bool		turned, gguf;
	char		*why;
	size_t		len;
};

/* Fill @f->t; 0, -EINVAL, -ENOTSUP or -ENOMEM and a sentence. */
int safetensors_index(struct weight_file *f);
int gguf_index(struct weight_file *f);

/* Leave the sentence, return @err. */
int file_bad(struct weight_file *f, int err, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* Bytes of @n numbers; false: they do not fill whole blocks, or overflow. */
bool format_bytes(enum num_format format, uint64_t n, uint64_t *bytes);

/* dim[0] * ... ; false: overflow */
bool found_count(const struct found *t, uint64_t *n);

/*
 * Do tensors lie in [@from, @to) without overlap; with @tight, without holes
 * too? Sorts @f->t.
 */
int file_check_layout(struct weight_file *f, uint64_t from, uint64_t to,
		      bool tight);

#endif
