/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model.h - a small decoder in plain C: Llama-style layers (RMSNorm, RoPE,
 * SwiGLU) with MHA, GQA, MQA, MLA, sliding-window or linear attention.
 *
 * All arithmetic is float32; keys and values are kept as bf16, the states of
 * linear layers as float32. Each output element is one sum in one order that
 * depends on nothing but the model: not on how many tokens or sequences are
 * computed together, not on block sizes, ranks or threads, not on what vector
 * instructions the CPU has. So two runs that should agree agree bit for bit,
 * and a digest of the logits compares them.
 *
 * The weights belong to nobody's address space in particular: every process
 * makes or reads its own copy.
 */
#ifndef KVMM_TESTS_ENGINE_MODEL_H
#define KVMM_TESTS_ENGINE_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MODEL_MAX_LAYERS	128
#define MODEL_MAX_WORLD		8

enum layer_kind {
	LAYER_FULL	= 0,	/* K and V of every position */
	LAYER_WINDOW	= 1,	/* K and V of the last @window positions */
	LAYER_MLA	= 2,	/* one latent row of every position, no K/V pair */
	LAYER_LINEAR	= 3,	/* one state, updated by every position */
};

/**
 * struct model_config - a model's shape, as read from a config.json
 * @name:	what the configuration calls itself
 * @foreign:	the first field that asks for arithmetic this decoder does not
 *		have (experts, scaled RoPE, ...), else "". Random weights may
 *		have such a shape all the same; a file is refused
 * @kv_heads:	= @heads: MHA; 1: MQA; else GQA
 * @window:	of LAYER_WINDOW, tokens, the current one included
 * @kv_lora_rank, @qk_rope_dim, @qk_nope_dim, @v_dim: of LAYER_MLA
 * @lin_heads, @lin_dk, @lin_dv: of LAYER_LINEAR
 * @tie_embeddings: the output matrix is the embedding
 * @kind:	enum layer_kind, by layer
 */
struct model_config {
	char		name[64];
	char		foreign[32];
	uint32_t	vocab, hidden, inter, layers;
	uint32_t	heads, kv_heads, head_dim;
	uint32_t	window;
	uint32_t	kv_lora_rank, qk_rope_dim, qk_nope_dim, v_dim;
	uint32_t	lin_heads, lin_dk, lin_dv;
	float		rope_theta, rms_eps;
	bool		tie_embeddings;
	uint8_t		kind[MODEL_MAX_LAYERS];
};

struct model;				/* configuration and weights */

/**
 * model_config_named() - a built-in shape
 * @c:		written on success only
 * @name:	"mha", "gqa", "mqa", "mla", "window" (full and sliding layers),
 *		"linear" (full and linear layers): tiny ones for tests, with a
 *		token a byte and some to spare; "bench": prefill of 4,096 tokens
 *		takes seconds
 *
 * Return: 0 or -ENOENT.
 */
int model_config_named(struct model_config *c, const char *name);

/**
 * model_config_read() - a shape from a Hugging Face style config.json
 * @c:		written on success only
 * @path:	the file
 * @why:	what is wrong, a sentence that names the field
 * @len:	of @why, bytes
 *
 * Return: 0; -EINVAL (a bad or missing field); -ENOTSUP (a kind of layer that
 * this decoder does not have); or -errno of reading the file.
 */
int model_config_read(struct model_config *c, const char *path,
		      char *why, size_t len);

/* Can the shape be computed? 0, or -EINVAL and a sentence. */
int model_config_check(const struct model_config *c, char *why, size_t len);

/* Seeded random weights. 0, -EINVAL (a bad shape), -ENOMEM. */
int model_create(const struct model_config *c, uint64_t seed,
		 struct model **ret);

/**
 * model_load() - weights from a .safetensors or .gguf file
 * @c:		what shapes the file must have
 * @path:	the format is told by the file's first bytes
 * @why:	what is wrong, a sentence that names the tensor
 * @len:	of @why, bytes
 * @ret:	the model, owned by the caller: model_destroy()
 *
 * Every tensor of the model must be there and none besides, since one that is
 * left out (a bias, a norm of queries) would give other tokens silently.
 *
 * Return: 0; -EINVAL (malformed, truncated, a wrong shape, a missing tensor);
 * -ENOTSUP (a format of numbers, or arithmetic that @c needs and the decoder
 * does not have); or -errno of reading the file.
 */
int model_load(const struct model_config *c, const char *path,
	       char *why, size_t len, struct model **ret);

void model_destroy(struct model *m);
const struct model_config *model_config_of(const struct model *m);

/* Over configuration and weights: what a space's revision must change with. */
uint64_t model_fingerprint(const struct model *m);

/* -- what is cached, per layer -------------------------------------------- */

/*
 * Bytes that one position of layer @l needs on all ranks together: the K row
 * (the V row has as many), or the latent row of MLA; the whole state for
 * LAYER_LINEAR.
 */
uint32_t model_kv_bytes(const struct model_config *c, unsigned int l);

/*
 * Are layer @l's bytes split over ranks by heads (true), or are all of them on
 * every rank (false: MLA, and MQA, whose one head cannot be split)? Split ones
 * need @kv_heads (@lin_heads) to divide by the world, all need @heads to.
 */
bool model_kv_striped(const struct model_config *c, unsigned int l);

/* -- a step ---------------------------------------------------------------- */

/**
 * struct kv_place - where a rank keeps what a layer caches
 * @k, @v:	page 0's bytes of this rank; a layer of MLA or linear attention
 *		has @k only
 * @k_stride, @v_stride: bytes from page to page
 * @block_tokens: positions in a page
 * @table_ix:	which of fwd_seq.table serves this layer
 *
 * Position p is row p % @block_tokens of page table[p / @block_tokens], at
 * @k + page * @k_stride + row * the row bytes of this rank: [kv_heads of this
 * rank][head_dim] bf16, or [kv_lora_rank + qk_rope_dim] bf16 for MLA. All of
 * kv_heads are of this rank unless model_kv_striped().
 *
 * The state of a linear layer is page table[0], [lin_heads / world][lin_dk]
 * [lin_dv] float; it is read unless the step begins at position 0, and updated
 * in place. All addresses and strides are multiples of 4.
 */
struct kv_place {
	uint8_t		*k, *v;
	size_t		k_stride, v_stride;
	uint32_t	block_tokens;
	unsigned int	table_ix;
};

/**
 * struct fwd_seq - what one sequence does in a step
 * @tok:	@n tokens at positions @pos and on, computed in this step
 * @n:		at least 1
 * @pos:	of @tok[0]; what precedes it is read from the cache
 * @table:	block tables by kv_place.table_ix. Page 0 is nobody's: never read
 *		nor written, so entries that no window reaches may be 0
 * @logits:	vocab floats after the last token, or NULL: not wanted
 */
struct fwd_seq {
	const uint32_t	*tok;
	uint32_t	n, pos;
	const int32_t	*const *table;
	float		*logits;
};

struct fwd_scratch;

/**
 * struct fwd - one rank's view of the computation; zeroed before its first use
 * @m:		model; outlives this
 * @rank, @world: which rank of how many
 * @place:	by layer
 * @share:	tensor parallel: this rank has computed columns [@lo, @hi) of each
 *		of @rows rows of @dim floats in @buf; returns with the others'
 *		columns filled in, or -errno (a rank is gone). May be NULL if
 *		@world is 1
 * @arg:	of @share
 * @threads:	used for the products; 0 or 1: the caller alone. A child of fork()
 *		has not got them, so it needs a fwd of its own
 * @scratch:	grown and kept by fwd_run()
 *
 * Output columns are split over the ranks, never sums: the result is the same
 * for every world. All ranks run the same sequences in the same order, and want
 * logits of the same ones.
 */
struct fwd {
	const struct model *m;
	uint32_t	rank, world;
	struct kv_place	place[MODEL_MAX_LAYERS];
	int		(*share)(void *arg, float *buf, size_t rows, size_t dim,
				 size_t lo, size_t hi);
	void		*arg;
	unsigned int	threads;
	struct fwd_scratch *scratch;
};

/**
 * fwd_run() - all tokens of all sequences through all layers
 * @f:		used by one thread at a time
 * @seq:	@n sequences, none twice
 * @n:		0 is nothing to do
 *
 * K, V and states go to their places, layer by layer. Sequences may share pages
 * that none of them writes.
 *
 * Return: 0; -EINVAL (a token beyond the vocabulary, a step of no tokens, page 0
 * or a negative one where a page is needed, a world that heads do not divide
 * by); -ENOMEM; or what @share returned. After an error what was written for
 * these positions is undefined.
 */
int fwd_run(struct fwd *f, const struct fwd_seq *seq, unsigned int n);
void fwd_fini(struct fwd *f);

/* -- the oracle: private contiguous KV, written plainly --------------------- */

struct oracle;

/* @m must outlive it. 0 or -ENOMEM. */
int oracle_create(const struct model *m, struct oracle **ret);
void oracle_destroy(struct oracle *o);

/*
 * Append @n tokens; logits (vocab floats, may be NULL) after the last. 0, -EINVAL
 * (a token beyond the vocabulary) or -ENOMEM.
 */
int oracle_run(struct oracle *o, const uint32_t *tok, uint32_t n,
	       float *logits);

/* Forget everything. */
void oracle_reset(struct oracle *o);

/*
 * Forget what follows the first @n tokens. -EINVAL if there are fewer, or if the
 * model has linear layers, whose state of then is gone (0 tokens is fine).
 */
int oracle_truncate(struct oracle *o, uint32_t n);

/* Bytes that oracle_save() writes now. */
uint64_t oracle_state_size(const struct oracle *o);

/*
 * All that it remembers, in one piece: a header with the model's fingerprint, the
 * number of tokens and digests, then the rows and states of every layer. 0, or
 * -EINVAL (@len is less than oracle_state_size()).
 */
int oracle_save(const struct oracle *o, void *buf, uint64_t len);

/**
 * oracle_load() - go on from where a saved state was
 * @buf:	@len bytes that oracle_save() wrote, or that anybody did
 * @ntok:	tokens that it has seen; written on success only
 *
 * Return: 0; -EINVAL (no such state, another length, of another model), -EBADMSG
 * (a bit of it is wrong) or -ENOMEM: it has seen nothing then.
 */
int oracle_load(struct oracle *o, const void *buf, uint64_t len,
		uint32_t *ntok);

/* -- tokens ------------------------------------------------------------------ */

/*
 * Greedy if @temperature is 0 (the first of equals), else drawn by a number that
 * follows from @seed and @pos alone.
 */
uint32_t sample(const float *logits, uint32_t vocab, float temperature,
		uint64_t seed, uint32_t pos);

/* Digest of the logits' bits, chained from @h (begin with 0). */
uint64_t logits_digest(uint64_t h, const float *logits, uint32_t vocab);

#endif
