/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes of published models are read right, and bad ones refused by name. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/engine/model.h"
#include "tests/lib/unit.h"

static int read_text(const char *text, struct model_config *c, char *why,
		     size_t len)
{
	const char *dir = getenv("TMPDIR");
	char path[256];
	FILE *f;
	int err;

	snprintf(path, sizeof(path), "%s/config.json", dir ? dir : "/tmp");
	f = fopen(path, "w");
	assert_non_null(f);
	assert_int_equal(fputs(text, f) < 0, 0);
	assert_int_equal(fclose(f), 0);
	err = model_config_read(c, path, why, len);
	unlink(path);
	return err;
}

static struct model_config reads(const char *text)
{
	struct model_config c;
	char why[200] = "";

	if (read_text(text, &c, why, sizeof(why)))
		fail_msg("%s: %s", why, text);
	return c;
}

/* @text is refused with @err, and the sentence contains @what. */
static void refused(const char *text, int err, const char *what)
{
	struct model_config c;
	char why[200] = "";
	int got = read_text(text, &c, why, sizeof(why));

	if (got != err || !strstr(why, what))
		fail_msg("%d \"%s\", not %d \"%s\": %s", got, why, err, what,
			 text);
}

static unsigned int count(const struct model_config *c, enum layer_kind kind)
{
	unsigned int n = 0;

	for (unsigned int l = 0; l < c->layers; l++)
		n += c->kind[l] == kind;
	return n;
}

/* Bytes of K and V that a token needs in all layers. */
static uint32_t token_bytes(const struct model_config *c)
{
	uint32_t n = 0;

	for (unsigned int l = 0; l < c->layers; l++)
		if (c->kind[l] == LAYER_MLA)
			n += model_kv_bytes(c, l);
		else if (c->kind[l] != LAYER_LINEAR)
			n += 2 * model_kv_bytes(c, l);
	return n;
}

#define SIZES(layers, heads, hidden) \
	"\"vocab_size\":1000,\"num_hidden_layers\":" #layers \
	",\"num_attention_heads\":" #heads ",\"hidden_size\":" #hidden

static void published_models_cache_what_is_known_of_them(void **state)
{
	static const struct {
		const char	*text;
		uint32_t	bytes;
	} model[] = {
		/* Llama 3.1 8B, 405B */
		{ "{" SIZES(32, 32, 4096) ",\"num_key_value_heads\":8,"
		  "\"intermediate_size\":14336}", 131072 },
		{ "{" SIZES(126, 128, 16384) ",\"num_key_value_heads\":8}",
		  516096 },
		/* Qwen3-0.6B: heads are not hidden_size / heads wide */
		{ "{" SIZES(28, 16, 1024) ",\"num_key_value_heads\":8,"
		  "\"head_dim\":128,\"sliding_window\":null,"
		  "\"use_sliding_window\":false}", 114688 },
		/* Qwen3-VL-8B: nested */
		{ "{\"model_type\":\"qwen3_vl\",\"text_config\":{"
		  SIZES(36, 32, 4096) ",\"num_key_value_heads\":8,"
		  "\"head_dim\":128}}", 147456 },
		/* Llama 2 7B: no num_key_value_heads, or null */
		{ "{" SIZES(32, 32, 4096) "}", 524288 },
		{ "{" SIZES(32, 32, 4096) ",\"num_key_value_heads\":null,"
		  "\"head_dim\":null}", 524288 },
		{ "{" SIZES(32, 32, 4096) ",\"head_dim\":0}", 524288 },
		/* Falcon 7B: num_kv_heads lies; 40B: it does not */
		{ "{" SIZES(32, 71, 4544) ",\"multi_query\":true,"
		  "\"new_decoder_architecture\":false,\"num_kv_heads\":71}",
		  8192 },
		{ "{" SIZES(60, 128, 8192) ",\"multi_query\":true,"
		  "\"new_decoder_architecture\":true,\"num_kv_heads\":8}",
		  122880 },
		/* StarCoder, MPT, ChatGLM2, GPT-2: other names */
		{ "{\"vocab_size\":9,\"n_layer\":40,\"n_head\":48,"
		  "\"n_embd\":6144,\"multi_query\":true}", 20480 },
		{ "{\"vocab_size\":9,\"n_layers\":32,\"n_heads\":32,"
		  "\"d_model\":4096,\"attn_config\":{}}", 524288 },
		{ "{\"padded_vocab_size\":9,\"num_layers\":28,"
		  "\"num_attention_heads\":32,\"multi_query_group_num\":2,"
		  "\"kv_channels\":128,\"hidden_size\":4096}", 28672 },
		{ "{\"vocab_size\":9,\"n_layer\":12,\"n_head\":12,"
		  "\"n_embd\":768}", 36864 },
		/* DeepSeek-V3: 128 key-value heads that no cache has */
		{ "{" SIZES(61, 128, 7168) ",\"num_key_value_heads\":128,"
		  "\"kv_lora_rank\":512,\"qk_rope_head_dim\":64,"
		  "\"qk_nope_head_dim\":128,\"v_head_dim\":128}", 70272 },
		/* Qwen2.5-7B: a window that is switched off */
		{ "{" SIZES(28, 28, 3584) ",\"num_key_value_heads\":4,"
		  "\"use_sliding_window\":false,\"sliding_window\":131072}",
		  57344 },
	};

	for (size_t i = 0; i < sizeof(model) / sizeof(*model); i++) {
		struct model_config c = reads(model[i].text);

		assert_int_equal(token_bytes(&c), model[i].bytes);
		assert_int_equal(count(&c, LAYER_WINDOW), 0);
	}
}

static void sliding_layers_are_found_where_each_family_says(void **state)
{
	struct model_config c;

	/* Mistral: all */
	c = reads("{" SIZES(32, 32, 4096) ",\"sliding_window\":4096}");
	assert_int_equal(count(&c, LAYER_WINDOW), 32);
	assert_int_equal(c.window, 4096);
	/* gpt-oss: a list */
	c = reads("{" SIZES(4, 64, 2880) ",\"head_dim\":64,"
		  "\"sliding_window\":128,\"layer_types\":["
		  "\"sliding_attention\",\"full_attention\","
		  "\"sliding_attention\",\"full_attention\"]}");
	assert_int_equal(c.kind[0], LAYER_WINDOW);
	assert_int_equal(c.kind[3], LAYER_FULL);
	/* Gemma 2: every other; Gemma 3: five of six */
	c = reads("{\"model_type\":\"gemma2\"," SIZES(42, 16, 3584)
		  ",\"head_dim\":256,\"sliding_window\":4096}");
	assert_int_equal(count(&c, LAYER_WINDOW), 21);
	c = reads("{\"model_type\":\"gemma3\",\"text_config\":{"
		  "\"model_type\":\"gemma3_text\"," SIZES(62, 32, 5376)
		  ",\"head_dim\":128,\"sliding_window\":1024}}");
	assert_int_equal(count(&c, LAYER_WINDOW), 52);
	assert_int_equal(c.kind[5], LAYER_FULL);
	c = reads("{" SIZES(8, 32, 4096) ",\"sliding_window\":64,"
		  "\"sliding_window_pattern\":4}");
	assert_int_equal(count(&c, LAYER_WINDOW), 6);
	/* Qwen2 with the window on: layers before one are full */
	c = reads("{" SIZES(28, 28, 3584) ",\"use_sliding_window\":true,"
		  "\"sliding_window\":4096,\"max_window_layers\":20}");
	assert_int_equal(count(&c, LAYER_WINDOW), 8);
	assert_int_equal(c.kind[19], LAYER_FULL);
}

static void linear_layers_and_their_states_are_found(void **state)
{
	struct model_config c;

	/* Qwen3-Next: the state of a layer is exactly 2 MiB */
	c = reads("{" SIZES(48, 16, 2048) ",\"num_key_value_heads\":2,"
		  "\"head_dim\":256,\"full_attention_interval\":4,"
		  "\"linear_num_value_heads\":32,\"linear_key_head_dim\":128,"
		  "\"linear_value_head_dim\":128}");
	assert_int_equal(count(&c, LAYER_LINEAR), 36);
	assert_int_equal(c.kind[3], LAYER_FULL);
	assert_int_equal(model_kv_bytes(&c, 0), 2 << 20);
	assert_int_equal(token_bytes(&c), 24576);
	/* Kimi-Linear: a list that counts from 1, beside MLA */
	c = reads("{\"text_config\":{" SIZES(4, 96, 7168)
		  ",\"kv_lora_rank\":512,\"qk_rope_head_dim\":64,"
		  "\"qk_nope_head_dim\":128,\"v_head_dim\":128,"
		  "\"linear_attn_config\":{\"full_attn_layers\":[4],"
		  "\"head_dim\":128,\"num_heads\":96}}}");
	assert_int_equal(c.kind[2], LAYER_LINEAR);
	assert_int_equal(c.kind[3], LAYER_MLA);
	assert_int_equal(model_kv_bytes(&c, 0), 6 << 20);
	assert_string_equal(c.foreign, "linear_attn_config");
}

static void arithmetic_is_read_and_what_is_foreign_noted(void **state)
{
	struct model_config c;

	c = reads("{\"model_type\":\"llama\"," SIZES(2, 4, 64)
		  ",\"rope_theta\":500000.0,\"rms_norm_eps\":1e-05,"
		  "\"tie_word_embeddings\":true,\"hidden_act\":\"silu\","
		  "\"attention_bias\":false,\"rope_scaling\":null}");
	assert_string_equal(c.name, "llama");
	assert_true(c.rope_theta == 500000.0f);
	assert_true(c.rms_eps == 1e-5f);
	assert_true(c.tie_embeddings);
	assert_int_equal(c.inter, 256);
	assert_string_equal(c.foreign, "");
	c = reads("{" SIZES(2, 4, 64) ",\"rope_scaling\":{"
		  "\"rope_type\":\"llama3\",\"factor\":8.0}}");
	assert_string_equal(c.foreign, "rope_scaling");
	c = reads("{" SIZES(2, 4, 64) ",\"num_local_experts\":8}");
	assert_string_equal(c.foreign, "num_local_experts");
	c = reads("{" SIZES(2, 4, 64) ",\"hidden_act\":\"gelu\"}");
	assert_string_equal(c.foreign, "hidden_act");
}

static void missing_and_bad_fields_are_named(void **state)
{
	refused("{\"num_hidden_layers\":2}", -EINVAL, "vocab_size is missing");
	refused("{\"vocab_size\":9}", -EINVAL, "hidden_size is missing");
	refused("{\"vocab_size\":9,\"hidden_size\":64}", -EINVAL,
		"num_attention_heads is missing");
	refused("{\"vocab_size\":9,\"hidden_size\":64,"
		"\"num_attention_heads\":4}", -EINVAL,
		"num_hidden_layers is missing");
	refused("{" SIZES(2, 4, 64) ",\"kv_lora_rank\":8}", -EINVAL,
		"qk_rope_head_dim is missing");
	refused("{" SIZES(2, 4, 64) ",\"layer_types\":["
		"\"linear_attention\",\"full_attention\"]}", -EINVAL,
		"linear_num_value_heads is missing");
	refused("{" SIZES("two", 4, 64) "}", -EINVAL,
		"num_hidden_layers is not a count");
	refused("{" SIZES(2, -4, 64) "}", -EINVAL,
		"num_attention_heads is not a count");
	refused("{" SIZES(2, 4.5, 64) "}", -EINVAL,
		"num_attention_heads is not a count");
	refused("{" SIZES(99999999999, 4, 64) "}", -EINVAL,
		"num_hidden_layers is not a count");
	refused("{" SIZES(200, 4, 64) "}", -EINVAL,
		"num_hidden_layers is 200");
	refused("{" SIZES(0, 4, 64) "}", -EINVAL, "num_hidden_layers is 0");
	refused("{" SIZES(2, 0, 64) "}", -EINVAL, "num_attention_heads");
	refused("{" SIZES(2, 5, 64) "}", -EINVAL, "head_dim is missing");
	refused("{" SIZES(2, 4, 64) ",\"head_dim\":7}", -EINVAL,
		"head_dim is 7");
	refused("{" SIZES(2, 4, 64) ",\"num_key_value_heads\":3}", -EINVAL,
		"num_key_value_heads is 3");
	refused("{" SIZES(2, 4, 64) ",\"num_key_value_heads\":8}", -EINVAL,
		"num_key_value_heads is 8");
	refused("{" SIZES(2, 4, 64) ",\"num_key_value_heads\":0}", -EINVAL,
		"num_key_value_heads is 0");
	refused("{" SIZES(2, 4, 64) ",\"layer_types\":[\"full_attention\"]}",
		-EINVAL, "layer_types has 1 entries for 2 layers");
	refused("{" SIZES(1, 4, 64) ",\"layer_types\":[1]}", -EINVAL,
		"layer_types[0] is not a string");
	refused("{" SIZES(1, 4, 64) ",\"layer_types\":"
		"[\"sliding_attention\"]}", -EINVAL, "sliding_window is 0");
	refused("{" SIZES(2, 4, 64) ",\"rope_theta\":\"x\"}", -EINVAL,
		"rope_theta is not a number");
	refused("{" SIZES(2, 4, 64) ",\"rope_theta\":0}", -EINVAL,
		"rope_theta is 0");
	refused("{" SIZES(2, 4, 64) ",\"rms_norm_eps\":-1}", -EINVAL,
		"rms_norm_eps is -1");
	refused("{" SIZES(2, 4, 64) ",\"tie_word_embeddings\":1}", -EINVAL,
		"tie_word_embeddings is not true or false");
	refused("{" SIZES(4, 4, 64) ",\"full_attention_interval\":0}", -EINVAL,
		"full_attention_interval is 0");
	/* In 32 bits it would be a state of 0 bytes. */
	refused("{" SIZES(4, 4, 64) ",\"full_attention_interval\":4,"
		"\"linear_num_value_heads\":1024,"
		"\"linear_key_head_dim\":1024,"
		"\"linear_value_head_dim\":1024}", -EINVAL, "1 GiB");
	refused("[1]", -EINVAL, "not a JSON object");
	refused("{\"vocab_size\":", -EINVAL, "line 1");
	refused("", -EINVAL, "line 1");
}

static void layers_of_other_kinds_are_refused(void **state)
{
	refused("{" SIZES(2, 4, 64) ",\"layer_types\":["
		"\"chunked_attention\",\"full_attention\"]}", -ENOTSUP,
		"layer_types[0] is chunked_attention");
	refused("{" SIZES(52, 32, 2688) ",\"head_dim\":128,"
		"\"hybrid_override_pattern\":\"M*E\"}", -ENOTSUP,
		"hybrid_override_pattern");
	refused("{" SIZES(80, 64, 8192) ",\"num_key_value_heads\":null,"
		"\"block_configs\":[]}", -ENOTSUP, "block_configs");
	refused("{" SIZES(48, 64, 4096) ",\"num_key_value_heads\":4,"
		"\"head_dim\":192,\"v_head_dim\":128}", -ENOTSUP,
		"v_head_dim is 128 and head_dim 192");
	refused("{" SIZES(48, 64, 4096) ",\"num_key_value_heads\":4,"
		"\"swa_num_key_value_heads\":8}", -ENOTSUP,
		"swa_num_key_value_heads is 8");
	refused("{\"text_config\":{" SIZES(30, 16, 2816) ",\"head_dim\":256,"
		"\"global_head_dim\":512}}", -ENOTSUP, "global_head_dim");
	refused("{" SIZES(48, 40, 5120) ",\"attention_chunk_size\":8192}",
		-ENOTSUP, "attention_chunk_size");
	refused("{" SIZES(40, 32, 4096) ",\"cross_attention_layers\":[3]}",
		-ENOTSUP, "cross_attention_layers");
	refused("{" SIZES(61, 128, 7168) ",\"kv_lora_rank\":512,"
		"\"qk_rope_head_dim\":64,\"qk_nope_head_dim\":128,"
		"\"v_head_dim\":128,\"index_head_dim\":128}", -ENOTSUP,
		"index_head_dim");
}

static void missing_file_is_said_and_leaves_the_result_alone(void **state)
{
	struct model_config c = { .vocab = 77 };
	char why[200] = "";

	assert_int_equal(model_config_read(&c, "/nonexistent/config.json", why,
					   sizeof(why)), -ENOENT);
	assert_non_null(strstr(why, "/nonexistent/config.json"));
	assert_int_equal(read_text("{}", &c, why, sizeof(why)), -EINVAL);
	assert_int_equal(c.vocab, 77);
}

static void every_named_shape_can_be_computed(void **state)
{
	static const char *const names[] = {
		"mha", "gqa", "mqa", "mla", "window", "linear", "bench",
	};
	struct model_config c;
	char why[200];

	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
		assert_int_equal(model_config_named(&c, names[i]), 0);
		assert_int_equal(model_config_check(&c, why, sizeof(why)), 0);
	}
	/* What loading is to be measured with must stay small. */
	assert_true(token_bytes(&c) <= (64 << 20) / 4096);
	assert_int_equal(model_config_named(&c, "gqb"), -ENOENT);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(published_models_cache_what_is_known_of_them),
		cmocka_unit_test(sliding_layers_are_found_where_each_family_says),
		cmocka_unit_test(linear_layers_and_their_states_are_found),
		cmocka_unit_test(arithmetic_is_read_and_what_is_foreign_noted),
		cmocka_unit_test(missing_and_bad_fields_are_named),
		cmocka_unit_test(layers_of_other_kinds_are_refused),
		cmocka_unit_test(missing_file_is_said_and_leaves_the_result_alone),
		cmocka_unit_test(every_named_shape_can_be_computed),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
