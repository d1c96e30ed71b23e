/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's model: the paged pass gives the oracle's bits whatever the chunks,
 * the batch, the blocks, the ranks, the threads and the instruction set; and a
 * cache that is wrong somewhere does not.
 */
#include <errno.h>
#include <string.h>

#include "tests/lib/fwd_rig.h"
#include "tests/lib/unit.h"

static void one_matrix(const struct model *m, uint32_t world,
		       unsigned int threads, uint64_t seed)
{
	static const uint32_t sizes[] = { 1, 3, 16, 16, 64 };
	static struct rig_plan p;
	static struct fwd_rig rig;
	uint32_t bt[RIG_LAYERS];
	struct rng r;

	rng_seed(&r, seed);
	p.m = m;
	fwd_rig_plan_tokens(&p, &r);
	fwd_rig_plan_cut(&p, &r, rng_below(&r, 2) ? 7 : 90);
	fwd_rig_plan_ask(&p);
	for (int l = 0; l < RIG_LAYERS; l++)
		bt[l] = sizes[rng_below(&r, 5)];
	fwd_rig_init(&rig, &p, world, bt, &r);
	for (uint32_t i = 0; i < world; i++)
		rig.rank[i].f.threads = threads;
	assert_int_equal(fwd_rig_run(&rig), 0);
	fwd_rig_fini(&rig);
}

static const char *const shapes[] = {
	"mha", "gqa", "mqa", "mla", "window", "linear",
};

#define NR_SHAPES	(sizeof(shapes) / sizeof(*shapes))

static void paged_pass_gives_the_oracles_bits(void **state)
{
	int rounds = test_long() ? 12 : 1;

	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = fwd_rig_model(shapes[i], 7);

		for (int k = 0; k < rounds; k++)
			one_matrix(m, 1, 0, test_seed() * 100 + (uint64_t)k);
		model_destroy(m);
	}
}

static void ranks_give_the_oracles_bits(void **state)
{
	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = fwd_rig_model(shapes[i], 7);

		one_matrix(m, 2, 0, test_seed());
		one_matrix(m, 4, 0, test_seed() + 1);
		model_destroy(m);
	}
}

/* Every kind of layer in one model, sizes that nothing divides evenly. */
static struct model *mixed_model(void)
{
	static const uint8_t kind[] = {
		LAYER_WINDOW, LAYER_MLA, LAYER_LINEAR, LAYER_FULL, LAYER_MLA,
	};
	struct model_config c = {
		.name = "mixed", .vocab = 101, .hidden = 52, .inter = 75,
		.layers = 5, .heads = 4, .kv_heads = 4, .head_dim = 18,
		.window = 23, .kv_lora_rank = 21, .qk_rope_dim = 6,
		.qk_nope_dim = 11, .v_dim = 13, .lin_heads = 4, .lin_dk = 7,
		.lin_dv = 9, .rope_theta = 1e4f, .rms_eps = 1e-5f,
	};
	struct model *m;

	memcpy(c.kind, kind, sizeof(kind));
	assert_int_equal(model_create(&c, 5, &m), 0);
	return m;
}

static void mixed_layers_of_odd_sizes_give_the_oracles_bits(void **state)
{
	struct model *m = mixed_model();

	for (uint32_t world = 1; world <= 4; world *= 2)
		one_matrix(m, world, 0, test_seed() + world);
	model_destroy(m);
}

static void threads_give_the_oracles_bits(void **state)
{
	struct model *m = fwd_rig_model("gqa", 7);

	one_matrix(m, 1, 3, test_seed());
	one_matrix(m, 2, 2, test_seed());
	model_destroy(m);
	m = mixed_model();
	one_matrix(m, 1, 4, test_seed());
	model_destroy(m);
}

static void instruction_sets_give_the_same_bits(void **state)
{
	static float logits[512];
	uint64_t digest[2];
	uint32_t tok[RIG_TOKENS];

	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = fwd_rig_model(shapes[i], 7);

		for (int k = 0; k < RIG_TOKENS; k++)
			tok[k] = (uint32_t)(k * k % 250);
		for (int path = 0; path < 2; path++) {
			struct oracle *o;

			if (kern_force(path ? "avx2" : "portable"))
				continue;
			assert_int_equal(oracle_create(m, &o), 0);
			assert_int_equal(oracle_run(o, tok, RIG_TOKENS,
						    logits), 0);
			digest[path] = logits_digest(0, logits, 272);
			oracle_destroy(o);
			if (path)
				assert_true(digest[0] == digest[1]);
			else
				one_matrix(m, 1, 0, test_seed());
		}
		model_destroy(m);
	}
}

/* -- what is wrong is seen ----------------------------------------------------------- */

/*
 * One sequence of 64 tokens in pages of 16, all of it cached but the last token;
 * then something is done to the cache.
 */
#define SHORT	64

static void short_rig(struct fwd_rig *rig, struct rig_plan *p,
		      const struct model *m)
{
	uint32_t bt[RIG_LAYERS], pos[RIG_SEQS] = { 0 };
	struct rng r;

	rng_seed(&r, 11);
	*p = (struct rig_plan){ .m = m, .steps = 2, .len = { SHORT } };
	for (int t = 0; t < SHORT; t++)
		p->tok[0][t] = (uint32_t)rng_below(&r, 101);
	p->step[0].n[0] = SHORT - 1;
	p->step[1].n[0] = 1;
	p->step[1].want[0] = true;
	fwd_rig_plan_ask(p);
	for (int l = 0; l < RIG_LAYERS; l++)
		bt[l] = 16;
	fwd_rig_init(rig, p, 1, bt, &r);
	assert_int_equal(fwd_rig_rank_step(&rig->rank[0], pos, 0), 0);
}

/* The last token; are the logits wrong? Repeatable: it rewrites what it wrote. */
static bool last_is_wrong(struct fwd_rig *rig)
{
	uint32_t pos[RIG_SEQS] = { SHORT - 1 };

	return fwd_rig_rank_step(&rig->rank[0], pos, 1) != 0;
}

/* Row @t of layer @l, of its K or V. */
static uint8_t *row_at(struct fwd_rig *rig, unsigned int l, uint32_t t, bool v)
{
	const struct kv_place *p = &rig->rank[0].f.place[l];

	return (v ? p->v : p->k) + (size_t)rig->table[l][0][t / 16] *
	       p->k_stride + t % 16 * fwd_rig_layer_bytes(rig, l);
}

static void one_wrong_byte_changes_the_logits(void **state)
{
	static struct rig_plan p;
	static struct fwd_rig rig;
	struct rng r;

	rng_seed(&r, test_seed());
	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m;
		const struct model_config *c;

		/* A step changes states, so it cannot be repeated: see below. */
		if (!strcmp(shapes[i], "linear"))
			continue;
		m = fwd_rig_model(shapes[i], 7);
		c = model_config_of(m);
		short_rig(&rig, &p, m);
		assert_false(last_is_wrong(&rig));
		for (int k = 0; k < 60; k++) {
			unsigned int l = (unsigned int)rng_below(&r, c->layers);
			uint32_t t = (uint32_t)rng_below(&r, SHORT - 1);
			bool v = rng_below(&r, 2) && c->kind[l] != LAYER_MLA;
			uint8_t *at = row_at(&rig, l, t, v) +
				(rng_below(&r, model_kv_bytes(c, l)) | 1);

			*at ^= 0x80;		/* a sign */
			if (c->kind[l] == LAYER_WINDOW &&
			    t + c->window < SHORT)
				assert_false(last_is_wrong(&rig));
			else
				assert_true(last_is_wrong(&rig));
			*at ^= 0x80;
		}
		assert_false(last_is_wrong(&rig));
		fwd_rig_fini(&rig);
		model_destroy(m);
	}
}

/* The state of linear layer @l, of one sequence. */
static uint8_t *state_at(struct fwd_rig *rig, unsigned int l)
{
	const struct kv_place *p = &rig->rank[0].f.place[l];

	return p->k + (size_t)rig->table[l][0][0] * p->k_stride;
}

static void wrong_or_stale_state_changes_the_logits(void **state)
{
	struct model *m = fwd_rig_model("linear", 7);
	size_t bytes = model_kv_bytes(model_config_of(m), 0);
	uint8_t *was[3];
	static struct rig_plan p;
	static struct fwd_rig rig;

	short_rig(&rig, &p, m);
	for (unsigned int l = 0; l < 3; l++) {
		was[l] = malloc(bytes);
		assert_non_null(was[l]);
		memcpy(was[l], state_at(&rig, l), bytes);
	}
	assert_false(last_is_wrong(&rig));
	/* Once more, from states that have already seen the token. */
	assert_true(last_is_wrong(&rig));
	for (size_t at = 3; at < bytes + 4; at += 52) {
		for (unsigned int l = 0; l < 3; l++)
			memcpy(state_at(&rig, l), was[l], bytes);
		if (at < bytes)
			state_at(&rig, at % 3)[at] ^= 0x80;
		assert_int_equal(last_is_wrong(&rig), at < bytes);
	}
	for (unsigned int l = 0; l < 3; l++)
		free(was[l]);
	fwd_rig_fini(&rig);
	model_destroy(m);
}

static void swapped_heads_change_the_logits(void **state)
{
	struct model *m = fwd_rig_model("gqa", 7);
	size_t head = model_config_of(m)->head_dim * 2;
	static struct rig_plan p;
	static struct fwd_rig rig;
	uint8_t tmp[256];

	short_rig(&rig, &p, m);
	for (int v = 0; v < 2; v++)
		for (uint32_t t = 0; t < SHORT - 1; t++) {
			uint8_t *row = row_at(&rig, 0, t, v);

			memcpy(tmp, row, head);
			memcpy(row, row + head, head);
			memcpy(row + head, tmp, head);
		}
	assert_true(last_is_wrong(&rig));
	fwd_rig_fini(&rig);
	model_destroy(m);
}

/* Leave rows [lo, hi) of a matrix (columns, with @cols) and zero the rest. */
static void keep_only(struct model *m, const char *name, uint32_t lo,
		      uint32_t hi, bool cols)
{
	struct tensor t;
	float row[512];

	for (unsigned int i = 0; model_tensor(m, i, &t); i++) {
		if (strcmp(t.name, name))
			continue;
		for (uint32_t r = 0; r < t.rows; r++) {
			tensor_get_row(m, &t, r, row);
			for (uint32_t k = 0; k < t.cols; k++)
				if ((cols ? k : r) < lo || (cols ? k : r) >= hi)
					row[k] = 0;
			tensor_set_row(m, &t, r, row);
		}
	}
}

/*
 * As published GQA models have it: query head i looks at key-value head i /
 * group. With one head's output and one head's values left, the layer says
 * something if and only if they belong together.
 */
static void query_heads_look_at_their_own_group(void **state)
{
	static const char o_proj[] = "model.layers.0.self_attn.o_proj.weight";
	static const char v_proj[] = "model.layers.0.self_attn.v_proj.weight";
	static const uint32_t tok[] = { 5, 9, 200, 31 };
	struct model_config c;
	float logits[512], silent[512];

	assert_int_equal(model_config_named(&c, "gqa"), 0);
	c.layers = 1;
	for (uint32_t pair = 0; pair <= c.heads * c.kv_heads; pair++) {
		uint32_t q = pair / c.kv_heads, kv = pair % c.kv_heads;
		bool none = pair == 0;
		struct model *m;
		struct oracle *o;

		if (!none) {
			q = (pair - 1) / c.kv_heads;
			kv = (pair - 1) % c.kv_heads;
		}
		assert_int_equal(model_create(&c, 7, &m), 0);
		keep_only(m, o_proj, q * c.head_dim, (q + 1) * c.head_dim, true);
		keep_only(m, v_proj, none ? 0 : kv * c.head_dim,
			  none ? 0 : (kv + 1) * c.head_dim, false);
		assert_int_equal(oracle_create(m, &o), 0);
		assert_int_equal(oracle_run(o, tok, 4, none ? silent : logits),
				 0);
		if (!none)
			assert_int_equal(!memcmp(silent, logits, c.vocab * 4),
					 kv != q / (c.heads / c.kv_heads));
		oracle_destroy(o);
		model_destroy(m);
	}
}

/* The far past counts: else no test would see that it is lost. */
static void first_token_is_remembered_by_every_shape(void **state)
{
	static float a[512], b[512];
	uint32_t tok[100];

	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = fwd_rig_model(shapes[i], 7);
		struct oracle *o;

		for (uint32_t t = 0; t < 100; t++)
			tok[t] = t * 7 % 250;
		assert_int_equal(oracle_create(m, &o), 0);
		assert_int_equal(oracle_run(o, tok, 100, a), 0);
		tok[0]++;
		oracle_reset(o);
		assert_int_equal(oracle_run(o, tok, 100, b), 0);
		assert_memory_not_equal(a, b, sizeof(float) * 272);
		oracle_destroy(o);
		model_destroy(m);
	}
}

/* -- what fwd_run() refuses -------------------------------------------------------------- */

static int gone(void *arg, float *buf, size_t rows, size_t dim, size_t lo,
		size_t hi)
{
	return -EOWNERDEAD;
}

static void bad_steps_are_refused(void **state)
{
	struct model *m = fwd_rig_model("gqa", 7);
	static struct rig_plan p;
	static struct fwd_rig rig;
	uint32_t tok[2] = { 1, 2 };
	const int32_t *table[RIG_LAYERS];
	struct fwd_seq seq = { .tok = tok, .n = 2, .table = table };
	struct fwd *f = &rig.rank[0].f;
	int32_t none[2] = { 0, -1 };

	short_rig(&rig, &p, m);
	for (int l = 0; l < RIG_LAYERS; l++)
		table[l] = rig.table[l][0];
	assert_int_equal(fwd_run(f, &seq, 0), 0);
	assert_int_equal(fwd_run(f, &seq, 1), 0);
	tok[1] = 272;
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	tok[1] = 2;
	seq.n = 0;
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	seq.n = 2;
	seq.pos = UINT32_MAX;
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	seq.pos = 0;
	table[1] = none;
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	table[1] = none + 1;
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	table[1] = rig.table[1][0];
	f->world = 3;
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	f->world = 8;			/* heads divide by it, kv_heads do not */
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	f->world = f->rank = 2;
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	f->rank = 1;
	f->share = NULL;
	assert_int_equal(fwd_run(f, &seq, 1), -EINVAL);
	f->share = gone;
	assert_int_equal(fwd_run(f, &seq, 1), -EOWNERDEAD);
	fwd_rig_fini(&rig);
	model_destroy(m);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(paged_pass_gives_the_oracles_bits),
		cmocka_unit_test(ranks_give_the_oracles_bits),
		cmocka_unit_test(mixed_layers_of_odd_sizes_give_the_oracles_bits),
		cmocka_unit_test(threads_give_the_oracles_bits),
		cmocka_unit_test(instruction_sets_give_the_same_bits),
		cmocka_unit_test(one_wrong_byte_changes_the_logits),
		cmocka_unit_test(wrong_or_stale_state_changes_the_logits),
		cmocka_unit_test(swapped_heads_change_the_logits),
		cmocka_unit_test(query_heads_look_at_their_own_group),
		cmocka_unit_test(first_token_is_remembered_by_every_shape),
		cmocka_unit_test(bad_steps_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
