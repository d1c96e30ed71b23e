/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.h - where a model's tensors live, and the table that names them.
 *
 * The table drives all that happens to weights: they are made, read from either
 * kind of file, written by tests and hashed row by row through it, so that names
 * and shapes are said once.
 */
#ifndef KVMM_TESTS_ENGINE_WEIGHTS_H
#define KVMM_TESTS_ENGINE_WEIGHTS_H

#include "tests/engine/kern.h"
#include "tests/engine/model.h"

/**
 * struct layer - the weights of one layer; what its kind has not is empty
 * @norm1, @norm2: before attention, before the MLP
 * @q, @k, @v, @o: projections; MLA has @q and @o
 * @kv_a, @kv_norm: of MLA: to the latent and the shared rotated key
 * @uk, @uv:	of MLA, by head: nope part of a query to the latent space, and
 *		from there to a value (both halves of kv_b_proj)
 * @decay:	of linear attention: to the heads' gates
 * @lin_norm:	of linear attention: of a head's output
 * @gate, @up, @down: the MLP
 */
struct layer {
	float		*norm1, *norm2;
	struct mat	q, k, v, o;
	struct mat	kv_a, *uk, *uv;
	float		*kv_norm;
	struct mat	decay;
	float		*lin_norm;
	struct mat	gate, up, down;
};

struct model {
	struct model_config c;
	float		*embed;		/* [vocab][hidden] */
	float		*norm;
	struct mat	head;
	struct layer	layer[MODEL_MAX_LAYERS];
	struct mat	*mla;		/* all of layer[].uk and uv */
	float		*floats;	/* what everything above points into */
	size_t		nr_floats;
	uint64_t	fingerprint;
};

enum tensor_at {
	TENSOR_FLAT,			/* row-major floats */
	TENSOR_MAT,			/* a packed matrix */
	TENSOR_KV_B,			/* uk and uv of all heads of a layer */
};

/**
 * struct tensor - one tensor, as files name and shape it
 * @name:	in a safetensors file
 * @gguf:	in a GGUF file
 * @rows, @cols: shape; a vector is one row with @vector set
 * @turned:	rows are heads of this many elements which GGUF files of the
 *		llama architecture keep in the order of the other kind of RoPE; 0
 * @gain:	spread of random weights relative to 1 / sqrt(cols); 0: around 1
 * @at, @flat, @mat, @l: where it lives
 */
struct tensor {
	char		name[64];
	char		gguf[40];
	uint32_t	rows, cols;
	bool		vector;
	uint32_t	turned;
	float		gain;
	enum tensor_at	at;
	float		*flat;
	struct mat	*mat;
	struct layer	*l;
};

/* A model with all weights 0, to be filled. 0, -EINVAL, -ENOMEM. */
int model_alloc(const struct model_config *c, struct model **ret);

/*
 * Tensor @i of @m; false: there is none. The order is that of layers.
 */
bool model_tensor(struct model *m, unsigned int i, struct tensor *t);
void tensor_set_row(struct model *m, const struct tensor *t, uint32_t row,
		    const float *val);
void tensor_get_row(const struct model *m, const struct tensor *t,
		    uint32_t row, float *val);

/* Once all weights are there: what follows from them. */
void model_seal(struct model *m);

/* How the decay of linear layers leans: gates are sigmoid(decay * x + this). */
#define DECAY_BIAS	4.0f

#endif
