/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A shape from a Hugging Face style config.json.
 *
 * The same thing has many names there, and a name many meanings: null, 0 and
 * absence are mixed, hidden_size / num_attention_heads is not the head's size
 * once head_dim is given, sliding_window counts only where use_sliding_window
 * does not say otherwise, and MLA models give a num_key_value_heads that no cache
 * has. What would change the cache and is not understood is refused; what changes
 * the arithmetic only is noted in model_config.foreign.
 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "tests/engine/model.h"

/**
 * struct reader - one file being read
 * @top:	the file's object
 * @text:	the object of the language model: nested, or @top
 * @c:		result
 * @why, @len:	where the sentence goes
 */
struct reader {
	json_t			*top, *text;
	struct model_config	*c;
	char			*why;
	size_t			len;
};

static int refuse(struct reader *r, int err, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
static int refuse(struct reader *r, int err, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(r->why, r->len, fmt, ap);
	va_end(ap);
	return err;
}

/* A member that is there and not null. */
static json_t *field(struct reader *r, const char *name)
{
	json_t *j = json_object_get(r->text, name);

	return json_is_null(j) ? NULL : j;
}

static bool flag(struct reader *r, const char *name)
{
	return json_is_true(field(r, name));
}

/* A count; @val is left alone where the field is missing or null. */
static int number(struct reader *r, const char *name, uint32_t *val)
{
	json_t *j = field(r, name);

	if (!j)
		return 0;
	if (!json_is_integer(j) || json_integer_value(j) < 0 ||
	    json_integer_value(j) > UINT32_MAX)
		return refuse(r, -EINVAL, "%s is not a count", name);
	*val = (uint32_t)json_integer_value(j);
	return 0;
}

/* The first of @names (NULL ends them) that is there; -ENOENT: none. */
static int first_of(struct reader *r, const char *const *names, uint32_t *val)
{
	for (; *names; names++)
		if (field(r, *names))
			return number(r, *names, val);
	return -ENOENT;
}

#define NAMES(...)	((const char *const[]){ __VA_ARGS__, NULL })

static int must(struct reader *r, const char *const *names, uint32_t *val)
{
	int err = first_of(r, names, val);

	if (err == -ENOENT)
		return refuse(r, -EINVAL, "%s is missing", names[0]);
	return err;
}

static int real(struct reader *r, const char *name, float *val)
{
	json_t *j = field(r, name);

	if (!j)
		return 0;
	if (!json_is_number(j))
		return refuse(r, -EINVAL, "%s is not a number", name);
	*val = (float)json_number_value(j);
	return 0;
}

/* -- sizes ----------------------------------------------------------------------- */

static int read_kv_heads(struct reader *r)
{
	struct model_config *c = r->c;
	json_t *attn = field(r, "attn_config");
	int err;

	if (field(r, "block_configs"))
		return refuse(r, -ENOTSUP, "block_configs gives every layer a shape of its own");
	/* Falcon's num_kv_heads lies where multi_query is set. */
	if (flag(r, "multi_query") && !flag(r, "new_decoder_architecture")) {
		c->kv_heads = 1;
		return 0;
	}
	err = first_of(r, NAMES("n_head_kv", "num_kv_heads",
				"num_key_value_heads", "multi_query_group_num",
				"num_attention_groups"), &c->kv_heads);
	if (err != -ENOENT)
		return err;
	c->kv_heads = c->heads;
	if (json_is_object(attn) && json_is_integer(json_object_get(attn, "kv_n_heads")))
		c->kv_heads = (uint32_t)json_integer_value(
			json_object_get(attn, "kv_n_heads"));
	return 0;
}

static int read_head_dim(struct reader *r)
{
	struct model_config *c = r->c;
	int err = first_of(r, NAMES("head_dim", "hidden_size_per_head",
				    "kv_channels", "attention_head_dim"),
			   &c->head_dim);

	if (err && err != -ENOENT)
		return err;
	if (c->head_dim)
		return 0;
	/* Null or 0 mean what absence means. */
	if (!c->heads || c->hidden % c->heads)
		return refuse(r, -EINVAL, "head_dim is missing, and hidden_size %u is no multiple of num_attention_heads %u",
			      c->hidden, c->heads);
	c->head_dim = c->hidden / c->heads;
	return 0;
}

static int read_mla(struct reader *r)
{
	struct model_config *c = r->c;
	int err;

	err = must(r, NAMES("kv_lora_rank"), &c->kv_lora_rank);
	if (!err)
		err = must(r, NAMES("qk_rope_head_dim"), &c->qk_rope_dim);
	if (!err)
		err = must(r, NAMES("qk_nope_head_dim"), &c->qk_nope_dim);
	if (!err)
		err = must(r, NAMES("v_head_dim"), &c->v_dim);
	return err;
}

static int read_sizes(struct reader *r)
{
	struct model_config *c = r->c;
	int err;

	err = must(r, NAMES("vocab_size", "padded_vocab_size"), &c->vocab);
	if (!err)
		err = must(r, NAMES("hidden_size", "n_embd", "d_model"),
			   &c->hidden);
	if (!err)
		err = must(r, NAMES("num_attention_heads", "n_head", "n_heads"),
			   &c->heads);
	if (!err)
		err = must(r, NAMES("num_hidden_layers", "n_layer", "n_layers",
				    "num_layers"), &c->layers);
	if (err)
		return err;
	if (c->layers > MODEL_MAX_LAYERS)
		return refuse(r, -EINVAL, "num_hidden_layers is %u, not up to %u",
			      c->layers, MODEL_MAX_LAYERS);
	err = first_of(r, NAMES("intermediate_size", "ffn_hidden_size",
				"n_inner"), &c->inter);
	if (err == -ENOENT) {
		c->inter = 4 * c->hidden;
		err = 0;
	}
	if (!err)
		err = read_kv_heads(r);
	if (!err && field(r, "kv_lora_rank"))
		return read_mla(r);
	if (!err)
		err = read_head_dim(r);
	return err;
}

/* -- kinds of layers --------------------------------------------------------------- */

/* Fields that say that layers cache what no kind here does. */
static int refuse_others(struct reader *r)
{
	static const char *const others[] = {
		"hybrid_override_pattern", "layers_block_type",
		"compress_ratios", "attn_layer_period", "state_size",
		"mamba_d_state", "ssm_state_size", "cross_attention_layers",
		"no_rope_layers", "decoder_layers", "global_head_dim",
		"num_global_key_value_heads", "index_head_dim",
	};
	const struct model_config *c = r->c;
	uint32_t n;

	for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++)
		if (field(r, others[i]))
			return refuse(r, -ENOTSUP, "%s asks for layers that this decoder does not have",
				      others[i]);
	n = 0;
	if (number(r, "num_kv_shared_layers", &n))
		return -EINVAL;
	if (n)
		return refuse(r, -ENOTSUP, "num_kv_shared_layers is %u: layers without a cache",
			      n);
	n = c->kv_heads;
	if (number(r, "swa_num_key_value_heads", &n))
		return -EINVAL;
	if (n != c->kv_heads)
		return refuse(r, -ENOTSUP, "swa_num_key_value_heads is %u and num_key_value_heads %u",
			      n, c->kv_heads);
	n = c->head_dim;
	if (!c->kv_lora_rank && number(r, "v_head_dim", &n))
		return -EINVAL;
	if (n != c->head_dim)
		return refuse(r, -ENOTSUP, "v_head_dim is %u and head_dim %u",
			      n, c->head_dim);
	return 0;
}

static int read_linear(struct reader *r)
{
	struct model_config *c = r->c;
	json_t *sub = field(r, "linear_attn_config");
	int err;

	if (json_is_object(sub)) {	/* Kimi: one size for keys and values */
		struct reader in = *r;

		in.text = sub;
		err = must(&in, NAMES("num_heads"), &c->lin_heads);
		if (!err)
			err = must(&in, NAMES("head_dim"), &c->lin_dk);
		c->lin_dv = c->lin_dk;
		return err;
	}
	err = must(r, NAMES("linear_num_value_heads"), &c->lin_heads);
	if (!err)
		err = must(r, NAMES("linear_key_head_dim"), &c->lin_dk);
	if (!err)
		err = must(r, NAMES("linear_value_head_dim"), &c->lin_dv);
	return err;
}

static int kind_of(struct reader *r, json_t *j, size_t l, uint8_t *kind)
{
	const char *s = json_string_value(j);

	if (!s)
		return refuse(r, -EINVAL, "layer_types[%zu] is not a string", l);
	if (!strcmp(s, "sliding_attention"))
		*kind = LAYER_WINDOW;
	else if (!strcmp(s, "linear_attention"))
		*kind = LAYER_LINEAR;
	else if (strcmp(s, "full_attention"))
		return refuse(r, -ENOTSUP, "layer_types[%zu] is %.40s, which this decoder does not have",
			      l, s);
	return 0;
}

static int read_layer_types(struct reader *r, json_t *types)
{
	struct model_config *c = r->c;
	int err = 0;

	if (!json_is_array(types))
		return refuse(r, -EINVAL, "layer_types is not an array");
	if (json_array_size(types) != c->layers)
		return refuse(r, -EINVAL, "layer_types has %zu entries for %u layers",
			      json_array_size(types), c->layers);
	for (size_t l = 0; l < c->layers && !err; l++)
		err = kind_of(r, json_array_get(types, l), l, &c->kind[l]);
	return err;
}

/* Kimi: all layers are linear but those of a list that counts from 1. */
static int read_full_layers(struct reader *r, json_t *sub)
{
	struct model_config *c = r->c;
	json_t *full = json_object_get(sub, "full_attn_layers");
	uint8_t kind = c->kind[0];

	if (!json_is_array(full))
		return refuse(r, -EINVAL, "linear_attn_config.full_attn_layers is missing");
	memset(c->kind, LAYER_LINEAR, c->layers);
	for (size_t i = 0; i < json_array_size(full); i++) {
		json_int_t l = json_integer_value(json_array_get(full, i));

		if (l < 1 || l > c->layers)
			return refuse(r, -EINVAL, "linear_attn_config.full_attn_layers[%zu] is no layer",
				      i);
		c->kind[l - 1] = kind;
	}
	return 0;
}

/* Every @every-th layer is as it is, the others are of @kind. */
static int every(struct reader *r, const char *name, enum layer_kind kind)
{
	struct model_config *c = r->c;
	uint32_t n = 0;

	if (number(r, name, &n))
		return -EINVAL;
	if (!n)
		return refuse(r, -EINVAL, "%s is 0", name);
	for (uint32_t l = 0; l < c->layers; l++)
		if ((l + 1) % n)
			c->kind[l] = (uint8_t)kind;
	return 0;
}

/* Without layer_types, each family says in its own way where windows are. */
static int read_windows(struct reader *r)
{
	struct model_config *c = r->c;
	json_t *type = field(r, "model_type"), *hybrid;
	const char *s = json_is_string(type) ? json_string_value(type) : "";

	if (!c->window)
		return 0;
	hybrid = field(r, "hybrid_layer_pattern");
	if (json_is_array(hybrid)) {
		for (size_t l = 0; l < c->layers; l++)
			if (json_integer_value(json_array_get(hybrid, l)))
				c->kind[l] = LAYER_WINDOW;
		return 0;
	}
	if (field(r, "sliding_window_pattern"))
		return every(r, "sliding_window_pattern", LAYER_WINDOW);
	if (!strncmp(s, "gemma3", 6)) {
		for (uint32_t l = 0; l < c->layers; l++)
			c->kind[l] = (l + 1) % 6 ? LAYER_WINDOW : LAYER_FULL;
	} else if (!strcmp(s, "gemma2")) {
		for (uint32_t l = 0; l < c->layers; l += 2)
			c->kind[l] = LAYER_WINDOW;
	} else {
		/* Qwen: layers before this one are full. */
		uint32_t first = 0;

		if (flag(r, "use_sliding_window") &&
		    number(r, "max_window_layers", &first))
			return -EINVAL;
		for (uint32_t l = first; l < c->layers; l++)
			c->kind[l] = LAYER_WINDOW;
	}
	return 0;
}

static int read_kinds(struct reader *r)
{
	struct model_config *c = r->c;
	json_t *types = field(r, "layer_types");
	json_t *kimi = field(r, "linear_attn_config");
	json_t *use = field(r, "use_sliding_window");
	int err = 0;

	if (!json_is_false(use))
		err = number(r, "sliding_window", &c->window);
	if (err)
		return err;
	if (c->kv_lora_rank)
		memset(c->kind, LAYER_MLA, c->layers);
	if (types)
		err = read_layer_types(r, types);
	else if (json_is_object(kimi))
		err = read_full_layers(r, kimi);
	else if (field(r, "full_attention_interval"))
		err = every(r, "full_attention_interval", LAYER_LINEAR);
	else if (!c->kv_lora_rank)
		err = read_windows(r);
	/* No layer_types and no window: a chunk is a window that jumps. */
	if (!err && !types && !c->window && field(r, "attention_chunk_size"))
		err = refuse(r, -ENOTSUP, "attention_chunk_size asks for layers that this decoder does not have");
	for (uint32_t l = 0; l < c->layers && !err; l++)
		if (c->kind[l] == LAYER_LINEAR && !c->lin_heads)
			err = read_linear(r);
	return err;
}

/* -- arithmetic -------------------------------------------------------------------- */

/* Note the first field whose arithmetic is not ours. */
static void note_foreign(struct reader *r)
{
	static const char *const if_set[] = {
		"num_experts", "num_local_experts", "n_routed_experts",
		"q_lora_rank", "attn_logit_softcapping",
		"final_logit_softcapping", "attention_bias", "mlp_bias",
		"linear_conv_kernel_dim", "linear_attn_config",
		"query_pre_attn_scalar",
	};
	json_t *j = field(r, "rope_scaling");
	const char *name = NULL, *s;

	if (json_is_object(j)) {
		json_t *t = json_object_get(j, "rope_type");

		s = json_string_value(t ? t : json_object_get(j, "type"));
		if (!s || strcmp(s, "default"))
			name = "rope_scaling";
	}
	for (size_t i = 0; i < sizeof(if_set) / sizeof(*if_set) && !name; i++) {
		j = field(r, if_set[i]);
		if (j && !json_is_false(j) &&
		    !(json_is_integer(j) && !json_integer_value(j)))
			name = if_set[i];
	}
	s = json_string_value(field(r, "hidden_act"));
	if (!name && s && strcmp(s, "silu"))
		name = "hidden_act";
	j = field(r, "partial_rotary_factor");
	if (!name && j && json_number_value(j) != 1.0)
		name = "partial_rotary_factor";
	if (name)
		snprintf(r->c->foreign, sizeof(r->c->foreign), "%s", name);
}

static int read_reals(struct reader *r)
{
	struct model_config *c = r->c;
	json_t *tie = field(r, "tie_word_embeddings");
	int err;

	c->rope_theta = 1e4f;
	c->rms_eps = 1e-6f;
	err = real(r, "rope_theta", &c->rope_theta);
	if (!err)
		err = real(r, "rms_norm_eps", &c->rms_eps);
	if (err)
		return err;
	if (tie && !json_is_boolean(tie))
		return refuse(r, -EINVAL, "tie_word_embeddings is not true or false");
	c->tie_embeddings = json_is_true(tie);
	return 0;
}

/* -- the file ---------------------------------------------------------------------- */

static int read_all(struct reader *r)
{
	static const char *const nested[] = {
		"text_config", "llm_config", "language_config", "decoder",
	};
	struct model_config *c = r->c;
	json_t *name;
	int err;

	if (!json_is_object(r->top))
		return refuse(r, -EINVAL, "the file is not a JSON object");
	r->text = r->top;
	for (size_t i = 0; i < sizeof(nested) / sizeof(*nested); i++) {
		json_t *j = json_object_get(r->top, nested[i]);

		if (json_is_object(j)) {
			r->text = j;
			break;
		}
	}
	name = field(r, "model_type");
	if (!json_is_string(name))
		name = json_object_get(r->top, "model_type");
	snprintf(c->name, sizeof(c->name), "%s",
		 json_is_string(name) ? json_string_value(name) : "model");
	err = read_sizes(r);
	if (!err)
		err = refuse_others(r);
	if (!err)
		err = read_kinds(r);
	if (!err)
		err = read_reals(r);
	if (!err)
		note_foreign(r);
	return err;
}

int model_config_read(struct model_config *c, const char *path,
		      char *why, size_t len)
{
	struct model_config got = { 0 };
	struct reader r = { .c = &got, .why = why, .len = len };
	json_error_t e;
	FILE *f;
	int err;

	f = fopen(path, "re");
	if (!f) {
		err = -errno;
		snprintf(why, len, "cannot open %s: %s", path, strerror(-err));
		return err;
	}
	r.top = json_loadf(f, JSON_REJECT_DUPLICATES, &e);
	fclose(f);
	if (!r.top) {
		snprintf(why, len, "line %d: %s", e.line, e.text);
		return -EINVAL;
	}
	err = read_all(&r);
	if (!err)
		err = model_config_check(&got, why, len);
	json_decref(r.top);
	if (!err)
		*c = got;
	return err;
}
