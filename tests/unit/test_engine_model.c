/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's model: the paged pass gives the oracle's bits whatever the chunks,
 * the batch, the blocks, the ranks, the threads and the instruction set; and a
 * cache that is wrong somewhere does not.
 */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "tests/engine/weights.h"
#include "tests/lib/unit.h"

#define NR_SEQS		3
#define MAX_TOKENS	160
#define MAX_STEPS	512
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
	uint8_t		*mem[2 * MODEL_MAX_LAYERS];
	float		*shared;	/* what it shows the others */
	int		err;
	unsigned int	wrong;		/* steps with other logits */
};

/**
 * struct rig - ranks with a paged cache
 * @table:	by layer and sequence
 */
struct rig {
	const struct plan *p;
	uint32_t	world;
	struct rank	rank[MODEL_MAX_WORLD];
	int32_t		table[MODEL_MAX_LAYERS][NR_SEQS][MAX_TOKENS + 2];
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

/* Step @s of the plan by one rank; -> err, or how many logits differ. */
static int rank_step(struct rank *k, const uint32_t *pos, unsigned int s)
{
	const struct plan *p = k->rig->p;
	const struct model_config *c = model_config_of(p->m);
	const struct step_plan *sp = &p->step[s];
	const int32_t *table[NR_SEQS][MODEL_MAX_LAYERS];
	struct fwd_seq seq[NR_SEQS];
	static _Thread_local float logits[NR_SEQS][512];
	unsigned int n = 0;
	int err, wrong = 0;

	for (int i = 0; i < NR_SEQS; i++) {
		if (!sp->n[i])
			continue;
		for (unsigned int l = 0; l < c->layers; l++)
			table[i][l] = k->rig->table[l][i];
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
		p->len[i] = 60 + (uint32_t)rng_below(r, MAX_TOKENS - 60);
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
	uint32_t bt[MODEL_MAX_LAYERS];
	struct rng r;

	rng_seed(&r, seed);
	p.m = m;
	plan_tokens(&p, &r);
	plan_cut(&p, &r, rng_below(&r, 2) ? 7 : 90);
	plan_ask(&p);
	for (int l = 0; l < MODEL_MAX_LAYERS; l++)
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
	int rounds = test_long() ? 12 : 2;

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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(paged_pass_gives_the_oracles_bits),
		cmocka_unit_test(ranks_give_the_oracles_bits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
