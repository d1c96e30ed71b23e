/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's model: the paged pass gives the oracle's bits whatever the chunks,
 * the batch, the blocks, the ranks, the threads and the instruction set; and a
 * cache that is wrong somewhere does not.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "tests/engine/weights.h"
#include "tests/lib/unit.h"

#define NR_SEQS		3
#define MAX_TOKENS	112
#define MAX_STEPS	512
#define MAX_LAYERS	8
#define NR_PAGES	(1 + NR_SEQS * (MAX_TOKENS + 2))

/* -- a cache in pages, and ranks ------------------------------------------------- */

/**
 * struct step_plan - what all ranks do at once
 * @n:		tokens of each sequence, 0: none
 * @want:	logits of each?
 * @digest:	what the oracle says
 */
struct step_plan {
	uint32_t	n[NR_SEQS];
	bool		want[NR_SEQS];
	uint64_t	digest[NR_SEQS];
};

/**
 * struct plan - sequences, and how they are cut into steps
 * @len:	of each sequence
 */
struct plan {
	const struct model *m;
	uint32_t	tok[NR_SEQS][MAX_TOKENS];
	uint32_t	len[NR_SEQS];
	struct step_plan step[MAX_STEPS];
	unsigned int	steps;
};

struct rig;

struct rank {
	struct rig	*rig;
	struct fwd	f;
	int32_t		table[MAX_LAYERS][NR_SEQS][MAX_TOKENS + 2];
	float		*shared;	/* what it shows the others */
	int		err;
	unsigned int	wrong;		/* steps with other logits */
};

/**
 * struct rig - ranks with a paged cache
 * @table:	by layer and sequence; ranks have copies that forget what no window
 *		reaches any more
 */
struct rig {
	const struct plan *p;
	uint32_t	world;
	struct rank	rank[MODEL_MAX_WORLD];
	int32_t		table[MAX_LAYERS][NR_SEQS][MAX_TOKENS + 2];
	pthread_barrier_t barrier;
};

static int share(void *arg, float *buf, size_t rows, size_t dim, size_t lo,
		 size_t hi)
{
	struct rank *self = arg;
	struct rig *rig = self->rig;

	self->shared = buf;
	pthread_barrier_wait(&rig->barrier);
	for (uint32_t i = 0; i < rig->world; i++) {
		const float *other = rig->rank[i].shared;
		/* What a rank has computed of a row follows from its number. */
		size_t a = dim * i / rig->world, b = dim * (i + 1) / rig->world;

		if (other == buf)
			continue;
		for (size_t r = 0; r < rows; r++)
			memcpy(buf + r * dim + a, other + r * dim + a,
			       (b - a) * sizeof(*buf));
	}
	pthread_barrier_wait(&rig->barrier);
	return 0;
}

static size_t layer_bytes(const struct rig *rig, unsigned int l)
{
	const struct model_config *c = model_config_of(rig->p->m);
	size_t bytes = model_kv_bytes(c, l);

	return model_kv_striped(c, l) ? bytes / rig->world : bytes;
}

/* Pages of each layer in an order of its own, and nothing but NaN in them. */
static void rig_init(struct rig *rig, const struct plan *p, uint32_t world,
		     const uint32_t *block_tokens, struct rng *r)
{
	const struct model_config *c = model_config_of(p->m);
	static int32_t page[NR_PAGES];

	memset(rig, 0, sizeof(*rig));
	rig->p = p;
	rig->world = world;
	pthread_barrier_init(&rig->barrier, NULL, world);
	for (unsigned int l = 0; l < c->layers; l++) {
		for (int32_t i = 1; i < NR_PAGES; i++)
			page[i] = i;
		for (int32_t i = NR_PAGES - 1; i > 1; i--) {
			int32_t j = 1 + (int32_t)rng_below(r, (uint64_t)i);
			int32_t was = page[i];

			page[i] = page[j];
			page[j] = was;
		}
		for (int s = 0; s < NR_SEQS; s++)
			memcpy(rig->table[l][s],
			       page + 1 + s * (MAX_TOKENS + 2),
			       sizeof(rig->table[l][s]));
	}
	for (uint32_t i = 0; i < world; i++) {
		struct rank *k = &rig->rank[i];

		k->rig = rig;
		memcpy(k->table, rig->table, sizeof(k->table));
		k->f = (struct fwd){ .m = p->m, .rank = i, .world = world,
				     .share = share, .arg = k };
		for (unsigned int l = 0; l < c->layers; l++) {
			bool state = c->kind[l] == LAYER_LINEAR;
			uint32_t bt = state ? 1 : block_tokens[l];
			size_t stride = layer_bytes(rig, l) * bt + 64;
			struct kv_place *at = &k->f.place[l];

			at->k = malloc(stride * NR_PAGES);
			at->v = malloc(stride * NR_PAGES);
			assert_non_null(at->k);
			assert_non_null(at->v);
			memset(at->k, 0xff, stride * NR_PAGES);
			memset(at->v, 0xff, stride * NR_PAGES);
			at->k_stride = at->v_stride = stride;
			at->block_tokens = bt;
			at->table_ix = l;
		}
	}
}

static void rig_fini(struct rig *rig)
{
	const struct model_config *c = model_config_of(rig->p->m);

	for (uint32_t i = 0; i < rig->world; i++) {
		fwd_fini(&rig->rank[i].f);
		for (unsigned int l = 0; l < c->layers; l++) {
			free(rig->rank[i].f.place[l].k);
			free(rig->rank[i].f.place[l].v);
		}
	}
	pthread_barrier_destroy(&rig->barrier);
}

/* Pages that lie before the window of position @pos have no entry. */
static void forget(struct rank *k, unsigned int l, int s, uint32_t pos,
		   uint32_t window)
{
	uint32_t bt = k->f.place[l].block_tokens;

	for (uint32_t b = 0; (b + 1) * bt + window <= pos + 1; b++)
		k->table[l][s][b] = 0;
}

/* Step @s of the plan by one rank; -> err, or how many logits differ. */
static int rank_step(struct rank *k, const uint32_t *pos, unsigned int s)
{
	const struct plan *p = k->rig->p;
	const struct model_config *c = model_config_of(p->m);
	const struct step_plan *sp = &p->step[s];
	const int32_t *table[NR_SEQS][MAX_LAYERS];
	struct fwd_seq seq[NR_SEQS];
	static _Thread_local float logits[NR_SEQS][512];
	unsigned int n = 0;
	int err, wrong = 0;

	for (int i = 0; i < NR_SEQS; i++) {
		if (!sp->n[i])
			continue;
		for (unsigned int l = 0; l < c->layers; l++) {
			if (c->kind[l] == LAYER_WINDOW)
				forget(k, l, i, pos[i], c->window);
			table[i][l] = k->table[l][i];
		}
		seq[n++] = (struct fwd_seq){
			.tok = p->tok[i] + pos[i], .n = sp->n[i],
			.pos = pos[i], .table = table[i],
			.logits = sp->want[i] ? logits[i] : NULL };
	}
	err = fwd_run(&k->f, seq, n);
	if (err)
		return err;
	for (int i = 0; i < NR_SEQS; i++)
		if (sp->n[i] && sp->want[i])
			wrong += logits_digest(0, logits[i], c->vocab) !=
				 sp->digest[i];
	return wrong;
}

static void *rank_main(void *arg)
{
	struct rank *k = arg;
	uint32_t pos[NR_SEQS] = { 0 };

	for (unsigned int s = 0; s < k->rig->p->steps && !k->err; s++) {
		int ret = rank_step(k, pos, s);

		if (ret < 0)
			k->err = ret;
		else
			k->wrong += (unsigned int)ret;
		for (int i = 0; i < NR_SEQS; i++)
			pos[i] += k->rig->p->step[s].n[i];
	}
	return NULL;
}

/* All steps by all ranks; how many logits were others than the oracle's. */
static unsigned int rig_run(struct rig *rig)
{
	pthread_t th[MODEL_MAX_WORLD];
	unsigned int wrong = 0;

	for (uint32_t i = 0; i < rig->world; i++)
		assert_int_equal(pthread_create(&th[i], NULL, rank_main,
						&rig->rank[i]), 0);
	for (uint32_t i = 0; i < rig->world; i++) {
		pthread_join(th[i], NULL);
		assert_int_equal(rig->rank[i].err, 0);
		wrong += rig->rank[i].wrong;
	}
	return wrong;
}

/* -- plans ----------------------------------------------------------------------- */

static void plan_tokens(struct plan *p, struct rng *r)
{
	uint32_t vocab = model_config_of(p->m)->vocab;

	for (int i = 0; i < NR_SEQS; i++) {
		p->len[i] = 45 + (uint32_t)rng_below(r, MAX_TOKENS - 45);
		for (uint32_t t = 0; t < p->len[i]; t++)
			p->tok[i][t] = (uint32_t)rng_below(r, vocab);
	}
}

/* Cut at random into chunks of up to @chunk, some sequences of them in a step. */
static void plan_cut(struct plan *p, struct rng *r, uint32_t chunk)
{
	uint32_t pos[NR_SEQS] = { 0 };
	bool more = true;

	for (p->steps = 0; more; p->steps++) {
		struct step_plan *sp = &p->step[p->steps];
		bool any = false;

		assert_true(p->steps < MAX_STEPS);
		*sp = (struct step_plan){ 0 };
		more = false;
		for (int i = 0; i < NR_SEQS; i++) {
			uint32_t left = p->len[i] - pos[i];

			if (left && rng_below(r, 3)) {
				sp->n[i] = 1 + (uint32_t)rng_below(r, chunk);
				if (sp->n[i] > left)
					sp->n[i] = left;
				pos[i] += sp->n[i];
				sp->want[i] = rng_below(r, 2) ||
					      pos[i] == p->len[i];
				any = true;
			}
			more |= pos[i] < p->len[i];
		}
		if (!any)
			p->steps--;
	}
}

/* What the oracle says after each chunk whose logits are wanted. */
static void plan_ask(struct plan *p)
{
	uint32_t vocab = model_config_of(p->m)->vocab;
	static float logits[512];
	struct oracle *o;

	assert_int_equal(oracle_create(p->m, &o), 0);
	for (int i = 0; i < NR_SEQS; i++) {
		uint32_t pos = 0;

		oracle_reset(o);
		for (unsigned int s = 0; s < p->steps; s++) {
			uint32_t n = p->step[s].n[i];

			assert_int_equal(oracle_run(o, p->tok[i] + pos, n,
						    logits), 0);
			p->step[s].digest[i] = logits_digest(0, logits, vocab);
			pos += n;
		}
	}
	oracle_destroy(o);
}

static struct model *model_of(const char *name, uint64_t seed)
{
	struct model_config c;
	struct model *m;

	assert_int_equal(model_config_named(&c, name), 0);
	assert_int_equal(model_create(&c, seed, &m), 0);
	return m;
}

static void one_matrix(const struct model *m, uint32_t world,
		       unsigned int threads, uint64_t seed)
{
	static const uint32_t sizes[] = { 1, 3, 16, 16, 64 };
	static struct plan p;
	static struct rig rig;
	uint32_t bt[MAX_LAYERS];
	struct rng r;

	rng_seed(&r, seed);
	p.m = m;
	plan_tokens(&p, &r);
	plan_cut(&p, &r, rng_below(&r, 2) ? 7 : 90);
	plan_ask(&p);
	for (int l = 0; l < MAX_LAYERS; l++)
		bt[l] = sizes[rng_below(&r, 5)];
	rig_init(&rig, &p, world, bt, &r);
	for (uint32_t i = 0; i < world; i++)
		rig.rank[i].f.threads = threads;
	assert_int_equal(rig_run(&rig), 0);
	rig_fini(&rig);
}

static const char *const shapes[] = {
	"mha", "gqa", "mqa", "mla", "window", "linear",
};

#define NR_SHAPES	(sizeof(shapes) / sizeof(*shapes))

static void paged_pass_gives_the_oracles_bits(void **state)
{
	int rounds = test_long() ? 12 : 1;

	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = model_of(shapes[i], 7);

		for (int k = 0; k < rounds; k++)
			one_matrix(m, 1, 0, test_seed() * 100 + (uint64_t)k);
		model_destroy(m);
	}
}

static void ranks_give_the_oracles_bits(void **state)
{
	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = model_of(shapes[i], 7);

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
	struct model *m = model_of("gqa", 7);

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
	uint32_t tok[MAX_TOKENS];

	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m = model_of(shapes[i], 7);

		for (int k = 0; k < MAX_TOKENS; k++)
			tok[k] = (uint32_t)(k * k % 250);
		for (int path = 0; path < 2; path++) {
			struct oracle *o;

			if (kern_force(path ? "avx2" : "portable"))
				continue;
			assert_int_equal(oracle_create(m, &o), 0);
			assert_int_equal(oracle_run(o, tok, MAX_TOKENS,
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

static void short_rig(struct rig *rig, struct plan *p, const struct model *m)
{
	uint32_t bt[MAX_LAYERS], pos[NR_SEQS] = { 0 };
	struct rng r;

	rng_seed(&r, 11);
	*p = (struct plan){ .m = m, .steps = 2, .len = { SHORT } };
	for (int t = 0; t < SHORT; t++)
		p->tok[0][t] = (uint32_t)rng_below(&r, 101);
	p->step[0].n[0] = SHORT - 1;
	p->step[1].n[0] = 1;
	p->step[1].want[0] = true;
	plan_ask(p);
	for (int l = 0; l < MAX_LAYERS; l++)
		bt[l] = 16;
	rig_init(rig, p, 1, bt, &r);
	assert_int_equal(rank_step(&rig->rank[0], pos, 0), 0);
}

/* The last token; are the logits wrong? Repeatable: it rewrites what it wrote. */
static bool last_is_wrong(struct rig *rig)
{
	uint32_t pos[NR_SEQS] = { SHORT - 1 };

	return rank_step(&rig->rank[0], pos, 1) != 0;
}

/* Row @t of layer @l, of its K or V. */
static uint8_t *row_at(struct rig *rig, unsigned int l, uint32_t t, bool v)
{
	const struct kv_place *p = &rig->rank[0].f.place[l];

	return (v ? p->v : p->k) + (size_t)rig->table[l][0][t / 16] *
	       p->k_stride + t % 16 * layer_bytes(rig, l);
}

static void one_wrong_byte_changes_the_logits(void **state)
{
	static struct plan p;
	static struct rig rig;
	struct rng r;

	rng_seed(&r, test_seed());
	for (size_t i = 0; i < NR_SHAPES; i++) {
		struct model *m;
		const struct model_config *c;

		/* A step changes states, so it cannot be repeated: see below. */
		if (!strcmp(shapes[i], "linear"))
			continue;
		m = model_of(shapes[i], 7);
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
		rig_fini(&rig);
		model_destroy(m);
	}
}

/* The state of linear layer @l, of one sequence. */
static uint8_t *state_at(struct rig *rig, unsigned int l)
{
	const struct kv_place *p = &rig->rank[0].f.place[l];

	return p->k + (size_t)rig->table[l][0][0] * p->k_stride;
}

static void wrong_or_stale_state_changes_the_logits(void **state)
{
	struct model *m = model_of("linear", 7);
	size_t bytes = model_kv_bytes(model_config_of(m), 0);
	uint8_t *was[3];
	static struct plan p;
	static struct rig rig;

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
	rig_fini(&rig);
	model_destroy(m);
}

static void swapped_heads_change_the_logits(void **state)
{
	struct model *m = model_of("gqa", 7);
	size_t head = model_config_of(m)->head_dim * 2;
	static struct plan p;
	static struct rig rig;
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
	rig_fini(&rig);
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
		struct model *m = model_of(shapes[i], 7);
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

/* -- the oracle ------------------------------------------------------------------------ */

static void truncated_oracle_goes_on_from_there(void **state)
{
	struct model *m = model_of("window", 7);
	uint32_t tok[100];
	float a[512], b[512];
	struct oracle *o;

	for (uint32_t t = 0; t < 100; t++)
		tok[t] = t * 11 % 250;
	assert_int_equal(oracle_create(m, &o), 0);
	assert_int_equal(oracle_run(o, tok, 100, a), 0);
	assert_int_equal(oracle_truncate(o, 101), -EINVAL);
	assert_int_equal(oracle_truncate(o, 60), 0);
	assert_int_equal(oracle_run(o, tok + 60, 40, b), 0);
	assert_memory_equal(a, b, 272 * sizeof(float));
	oracle_destroy(o);
	model_destroy(m);

	m = model_of("linear", 7);
	assert_int_equal(oracle_create(m, &o), 0);
	assert_int_equal(oracle_run(o, tok, 50, a), 0);
	assert_int_equal(oracle_truncate(o, 20), -EINVAL);
	assert_int_equal(oracle_truncate(o, 50), 0);
	assert_int_equal(oracle_truncate(o, 0), 0);
	assert_int_equal(oracle_run(o, tok, 50, b), 0);
	assert_memory_equal(a, b, 272 * sizeof(float));
	tok[3] = 272;
	assert_int_equal(oracle_run(o, tok, 50, b), -EINVAL);
	oracle_destroy(o);
	model_destroy(m);
}

/* -- the oracle's state as bytes ------------------------------------------------------------ */

static void saved_state_goes_on_in_another_oracle(void **state)
{
	static const char *const shape[] = {
		"mha", "gqa", "mqa", "mla", "window", "linear",
	};
	static const uint32_t at[] = { 0, 1, 16, 63, 64, 100 };
	static float a[512], b[512];
	uint32_t tok[112], n;

	for (uint32_t t = 0; t < 112; t++)
		tok[t] = t * 13 % 250;
	for (size_t s = 0; s < 6; s++) {
		struct model *m = model_of(shape[s], 7);

		for (size_t i = 0; i < 6; i++) {
			struct oracle *o, *p;
			uint64_t len;
			void *buf;

			assert_int_equal(oracle_create(m, &o), 0);
			assert_int_equal(oracle_create(m, &p), 0);
			assert_int_equal(oracle_run(o, tok, at[i], NULL), 0);
			len = oracle_state_size(o);
			buf = malloc(len);
			assert_non_null(buf);
			assert_int_equal(oracle_save(o, buf, len - 1), -EINVAL);
			assert_int_equal(oracle_save(o, buf, len), 0);
			/* what it saw before does not matter */
			assert_int_equal(oracle_run(p, tok + 7, 9, NULL), 0);
			assert_int_equal(oracle_load(p, buf, len, &n), 0);
			assert_int_equal(n, at[i]);
			memset(buf, 0xff, len);
			assert_int_equal(oracle_run(o, tok + n, 112 - n, a), 0);
			assert_int_equal(oracle_run(p, tok + n, 112 - n, b), 0);
			assert_memory_equal(a, b, 272 * sizeof(float));
			free(buf);
			oracle_destroy(o);
			oracle_destroy(p);
		}
		model_destroy(m);
	}
}

/* In memory of exactly that length, so that a sanitizer sees a byte too far. */
static int load_copy(struct oracle *o, const uint8_t *buf, uint64_t len)
{
	uint8_t *copy = malloc(len ? len : 1);
	uint32_t n = 77;
	int err;

	assert_non_null(copy);
	memcpy(copy, buf, len);
	err = oracle_load(o, copy, len, &n);
	assert_true(!err || n == 77);
	free(copy);
	return err;
}

static void refused(struct oracle *o, const uint8_t *buf, uint64_t len)
{
	int err = load_copy(o, buf, len);

	if (err != -EINVAL && err != -EBADMSG)
		fail_msg("%d for %llu bytes", err, (unsigned long long)len);
}

static void state_that_is_not_as_it_was_saved_is_refused(void **state)
{
	static const char *const shape[] = { "gqa", "mla", "linear" };
	static float a[512], b[512];
	struct rng r;

	rng_seed(&r, 31);
	for (size_t s = 0; s < 3; s++) {
		struct model *m = model_of(shape[s], 7);
		struct model *other = model_of(shape[s], 8);
		uint32_t tok[40];
		struct oracle *o, *p;
		uint64_t len, i;
		uint8_t *buf;

		for (uint32_t t = 0; t < 40; t++)
			tok[t] = t * 5 % 250;
		assert_int_equal(oracle_create(m, &o), 0);
		assert_int_equal(oracle_create(other, &p), 0);
		assert_int_equal(oracle_run(o, tok, 40, a), 0);
		len = oracle_state_size(o);
		buf = calloc(1, len + 8);
		assert_non_null(buf);
		assert_int_equal(oracle_save(o, buf, len), 0);

		assert_int_equal(load_copy(p, buf, len), -EINVAL);
		for (i = 0; i < 64; i++)
			refused(o, buf, i);
		for (i = 0; i < 50; i++)
			refused(o, buf, rng_below(&r, len));
		refused(o, buf, len + 1);
		refused(o, buf, len + 8);
		for (i = 0; i < 64 + 200; i++) {
			uint64_t at = i < 64 ? i : rng_below(&r, len);
			uint8_t bit = (uint8_t)(1u << rng_below(&r, 8));

			buf[at] ^= bit;
			refused(o, buf, len);
			buf[at] ^= bit;
		}
		/* and after all that it is as new */
		assert_int_equal(oracle_run(o, tok, 40, b), 0);
		assert_memory_equal(a, b, 272 * sizeof(float));
		assert_int_equal(load_copy(o, buf, len), 0);
		for (i = 0; i < 50; i++) {
			rng_fill(&r, buf + (i % 2 ? 8 : 0), len - 8);
			refused(o, buf, len);
		}
		free(buf);
		oracle_destroy(o);
		oracle_destroy(p);
		model_destroy(m);
		model_destroy(other);
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
	struct model *m = model_of("gqa", 7);
	static struct plan p;
	static struct rig rig;
	uint32_t tok[2] = { 1, 2 };
	const int32_t *table[MAX_LAYERS];
	struct fwd_seq seq = { .tok = tok, .n = 2, .table = table };
	struct fwd *f = &rig.rank[0].f;
	int32_t none[2] = { 0, -1 };

	short_rig(&rig, &p, m);
	for (int l = 0; l < MAX_LAYERS; l++)
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
	rig_fini(&rig);
	model_destroy(m);
}

/* -- sampling ------------------------------------------------------------------------------ */

static void greedy_takes_the_first_of_the_largest(void **state)
{
	const float logits[] = { -1, 3, 2, 3, -INFINITY };

	assert_int_equal(sample(logits, 5, 0, 1, 2), 1);
	assert_int_equal(sample(logits, 5, 0, 9, 9), 1);
}

static void draws_follow_from_seed_and_position(void **state)
{
	static const float logits[] = { 0, 1, 2, -INFINITY };
	unsigned int hits[4] = { 0 }, same = 0;

	for (uint32_t pos = 0; pos < 20000; pos++) {
		uint32_t a = sample(logits, 4, 1, 5, pos);

		assert_int_equal(a, sample(logits, 4, 1, 5, pos));
		same += a == sample(logits, 4, 1, 6, pos);
		hits[a]++;
	}
	/* softmax(0, 1, 2) is 0.0900, 0.2447, 0.6652 */
	assert_in_range(hits[0], 1650, 1950);
	assert_in_range(hits[1], 4650, 5150);
	assert_in_range(hits[2], 13000, 13600);
	assert_int_equal(hits[3], 0);
	/* Another seed draws independently: sum of squares is 0.5105. */
	assert_in_range(same, 9800, 10650);
	/* Cold and hot. */
	for (uint32_t pos = 0; pos < 100; pos++)
		assert_int_equal(sample(logits, 4, 0.01f, 5, pos), 2);
}

static void digest_sees_bits_and_order(void **state)
{
	const float a[] = { 1, 2 }, b[] = { 2, 1 }, z[] = { 0, -0.0f };

	assert_true(logits_digest(0, a, 2) != logits_digest(0, b, 2));
	assert_true(logits_digest(0, z, 1) != logits_digest(0, z + 1, 1));
	assert_true(logits_digest(logits_digest(0, a, 1), a + 1, 1) ==
		    logits_digest(0, a, 2));
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
		cmocka_unit_test(truncated_oracle_goes_on_from_there),
		cmocka_unit_test(saved_state_goes_on_in_another_oracle),
		cmocka_unit_test(state_that_is_not_as_it_was_saved_is_refused),
		cmocka_unit_test(bad_steps_are_refused),
		cmocka_unit_test(greedy_takes_the_first_of_the_largest),
		cmocka_unit_test(draws_follow_from_seed_and_position),
		cmocka_unit_test(digest_sees_bits_and_order),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
