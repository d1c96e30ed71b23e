/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks with a cache in pages, and the oracle beside them; see fwd_rig.h. */
#include <stdlib.h>
#include <string.h>

#include "tests/lib/fwd_rig.h"
#include "tests/lib/unit.h"

#define NR_PAGES	(1 + RIG_SEQS * (RIG_TOKENS + 2))

static int share(void *arg, float *buf, size_t rows, size_t dim, size_t lo,
		 size_t hi)
{
	struct rig_rank *self = arg;
	struct fwd_rig *rig = self->rig;

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

size_t fwd_rig_layer_bytes(const struct fwd_rig *rig, unsigned int l)
{
	const struct model_config *c = model_config_of(rig->p->m);
	size_t bytes = model_kv_bytes(c, l);

	return model_kv_striped(c, l) ? bytes / rig->world : bytes;
}

void fwd_rig_init(struct fwd_rig *rig, const struct rig_plan *p, uint32_t world,
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
		for (int s = 0; s < RIG_SEQS; s++)
			memcpy(rig->table[l][s],
			       page + 1 + s * (RIG_TOKENS + 2),
			       sizeof(rig->table[l][s]));
	}
	for (uint32_t i = 0; i < world; i++) {
		struct rig_rank *k = &rig->rank[i];

		k->rig = rig;
		memcpy(k->table, rig->table, sizeof(k->table));
		k->f = (struct fwd){ .m = p->m, .rank = i, .world = world,
				     .share = share, .arg = k };
		for (unsigned int l = 0; l < c->layers; l++) {
			bool state = c->kind[l] == LAYER_LINEAR;
			uint32_t bt = state ? 1 : block_tokens[l];
			size_t stride = fwd_rig_layer_bytes(rig, l) * bt + 64;
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

void fwd_rig_fini(struct fwd_rig *rig)
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
static void forget(struct rig_rank *k, unsigned int l, int s, uint32_t pos,
		   uint32_t window)
{
	uint32_t bt = k->f.place[l].block_tokens;

	for (uint32_t b = 0; (b + 1) * bt + window <= pos + 1; b++)
		k->table[l][s][b] = 0;
}

int fwd_rig_rank_step(struct rig_rank *k, const uint32_t *pos, unsigned int s)
{
	const struct rig_plan *p = k->rig->p;
	const struct model_config *c = model_config_of(p->m);
	const struct rig_step *sp = &p->step[s];
	const int32_t *table[RIG_SEQS][RIG_LAYERS];
	struct fwd_seq seq[RIG_SEQS];
	static _Thread_local float logits[RIG_SEQS][512];
	unsigned int n = 0;
	int err, wrong = 0;

	for (int i = 0; i < RIG_SEQS; i++) {
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
	for (int i = 0; i < RIG_SEQS; i++)
		if (sp->n[i] && sp->want[i])
			wrong += logits_digest(0, logits[i], c->vocab) !=
				 sp->digest[i];
	return wrong;
}

static void *rank_main(void *arg)
{
	struct rig_rank *k = arg;
	uint32_t pos[RIG_SEQS] = { 0 };

	for (unsigned int s = 0; s < k->rig->p->steps && !k->err; s++) {
		int ret = fwd_rig_rank_step(k, pos, s);

		if (ret < 0)
			k->err = ret;
		else
			k->wrong += (unsigned int)ret;
		for (int i = 0; i < RIG_SEQS; i++)
			pos[i] += k->rig->p->step[s].n[i];
	}
	return NULL;
}

unsigned int fwd_rig_run(struct fwd_rig *rig)
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

void fwd_rig_plan_tokens(struct rig_plan *p, struct rng *r)
{
	uint32_t vocab = model_config_of(p->m)->vocab;

	for (int i = 0; i < RIG_SEQS; i++) {
		p->len[i] = 45 + (uint32_t)rng_below(r, RIG_TOKENS - 45);
		for (uint32_t t = 0; t < p->len[i]; t++)
			p->tok[i][t] = (uint32_t)rng_below(r, vocab);
	}
}

void fwd_rig_plan_cut(struct rig_plan *p, struct rng *r, uint32_t chunk)
{
	uint32_t pos[RIG_SEQS] = { 0 };
	bool more = true;

	for (p->steps = 0; more; p->steps++) {
		struct rig_step *sp = &p->step[p->steps];
		bool any = false;

		assert_true(p->steps < RIG_STEPS);
		*sp = (struct rig_step){ 0 };
		more = false;
		for (int i = 0; i < RIG_SEQS; i++) {
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

void fwd_rig_plan_ask(struct rig_plan *p)
{
	uint32_t vocab = model_config_of(p->m)->vocab;
	static float logits[512];
	struct oracle *o;

	assert_int_equal(oracle_create(p->m, &o), 0);
	for (int i = 0; i < RIG_SEQS; i++) {
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

struct model *fwd_rig_model(const char *name, uint64_t seed)
{
	struct model_config c;
	struct model *m;

	assert_int_equal(model_config_named(&c, name), 0);
	assert_int_equal(model_create(&c, seed, &m), 0);
	return m;
}
