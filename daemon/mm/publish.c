/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Publish: from an engine's OPEN frame to a page that everybody finds.
 *
 * A page is sealed when nothing stands in its way any more:
 *
 *	DUP	another publish of the same key is pending: wait for its end,
 *		then this one is -EEXIST, or the first itself if that failed
 *	LOAD	the page is on its way to this node from below: likewise
 *	PARENT	the parent's own publish is pending: sealed after it, in order
 *	STEP	not all members have done the step that writes it
 *	SUM	a worker computes the checksum that the publisher gave
 *
 * Mostly nothing does, and a batch is sealed within the call, without memory of
 * its own but the results. Otherwise the page becomes an entry, and waits:
 * publish_wait.c.
 */
#include <stdlib.h>

#include "daemon/mm/publish.h"
#include "ipc/base/bits.h"

/* -- one page -------------------------------------------------------------------- */

static bool key_is_zero(const uint64_t k[4])
{
	return !(k[0] | k[1] | k[2] | k[3]);
}

/* What a page must be whatever happens around it. @mine: its entry exists. */
static int pub_validate(const struct pub_op *op, const struct ring_pub *pub,
			bool mine)
{
	const struct mm_space *sp = op->space;
	const struct mm_pool *p = op->pool;
	const struct frame_meta *m;

	if (engine_usable(op->engine))
		return -EOWNERDEAD;
	if (pub->group >= sp->desc.ngroups ||
	    sp->desc.group[pub->group].class_ix != p->cls)
		return -EINVAL;
	if (pub->flags & ~(KVMM_PUB_ROOT | KVMM_PUB_CRC | RING_PUB_BOUND))
		return -EINVAL;
	if (!frame_live(p, pub->frame) || pub->frame < p->per_extent)
		return -EINVAL;
	m = &p->meta[pub->frame];
	if (frame_word_state(frame_word_of(p, pub->frame)) != FRAME_OPEN ||
	    m->owner != op->engine)
		return -EINVAL;
	/* a reference alone is a fork's, which reads it */
	if ((m->flags & ~FMETA_PUB) || (!mine && m->flags))
		return -EINVAL;
	return 0;
}

void pub_result_set(struct pub_op *op, uint32_t i, int err, uint32_t frame)
{
	struct ring_result *r = &op->res[i];

	*r = (struct ring_result){ .result = err, .frame = frame };
	if (!frame)
		return;
	r->word = frame_word_of(op->pool, frame);
	frame_ref(op->pool, frame);
}

static enum pub_wait pub_result(struct pub_op *op, uint32_t i, int err)
{
	pub_result_set(op, i, err, 0);
	return PUB_DONE;
}

/* The page exists on this node: the publisher keeps its frame and gets that. */
static enum pub_wait pub_exists(struct pub_op *op, uint32_t i, struct page *pg)
{
	struct mm_node *nd = op->pool->nd;

	nd->c.pgpublish_exist++;
	pub_result_set(op, i, -EEXIST, page_copy(pg, nd)->frame);
	return PUB_DONE;
}

static uint8_t page_flags(const struct ring_pub *pub)
{
	if (pub->flags & KVMM_PUB_ROOT)
		return PAGE_ROOT;
	return pub->flags & RING_PUB_BOUND ? PAGE_BOUND : 0;
}

static enum pub_wait pub_seal(struct pub_op *op, uint32_t i,
			      const struct ring_pub *pub, struct page *pg,
			      const uint64_t key[4], struct page *parent)
{
	struct mm_pool *p = op->pool;

	if (!pg) {
		pg = page_create(op->space, pub->group, key, parent,
				 page_flags(pub));
		if (!pg)
			return pub_result(op, i, -ENOMEM);
		pg->pos = pub->pos;
		pg->cost_us = pub->cost_us;
		if (pub->flags & KVMM_PUB_CRC) {
			pg->crc = pub->crc;
			pg->flags |= PAGE_CRC;
		}
	} else {
		page_crc_agree(pg, pub->flags & KVMM_PUB_CRC, pub->crc);
	}
	if (!copy_get(pg, p->nd)) {
		page_put(pg);
		return pub_result(op, i, -ENOMEM);
	}
	frame_seal(p, pub->frame, pg);
	p->nd->c.pgpublish++;
	pub_result_set(op, i, 0, pub->frame);
	return PUB_DONE;
}

static bool needs_parent(const struct mm_space *sp, const struct ring_pub *pub)
{
	return sp->desc.group[pub->group].rule == KVMM_FULL ||
	       (pub->flags & RING_PUB_BOUND);
}

static bool step_is_due(struct pub_op *op, uint64_t after)
{
	return !after || after <= op->engine->step ||
	       mm_broken(op->space->mm, MM_BREAK_FENCE);
}

enum pub_wait pub_try(struct pub_op *op, uint32_t i,
		      const struct ring_pub *pub, struct pub_entry *en,
		      struct pub_entry **blocker)
{
	struct mm_space *sp = op->space;
	struct mm_node *nd = op->pool->nd;
	struct page *pg, *parent = NULL;
	uint64_t key[4], up[4];
	int err;

	err = pub_validate(op, pub, en != NULL);
	if (err)
		return pub_result(op, i, err);
	pub_words(pub->key, key);
	pg = page_find(sp, pub->group, key);
	if (pg && page_copy(pg, nd)->state == COPY_READY)
		return pub_exists(op, i, pg);
	if (pg && (pub->flags & RING_PUB_BOUND)) {
		nd->c.pgpublish_exist++;
		return pub_result(op, i, -EEXIST);
	}
	if (pg && page_copy(pg, nd)->state != COPY_NONE &&
	    !fetch_abandon(pg, nd))
		return PUB_LOAD;
	*blocker = pub_pending_find(sp, pub->group, key);
	if (*blocker && *blocker != en)
		return PUB_DUP;

	pub_words(pub->parent, up);
	if (!pg && !(pub->flags & KVMM_PUB_ROOT) && !key_is_zero(up)) {
		parent = page_find(sp, pub->group, up);
		if (!parent && needs_parent(sp, pub)) {
			*blocker = pub_pending_find(sp, pub->group, up);
			if (*blocker && *blocker != en)
				return PUB_PARENT;
			nd->c.pgpublish_stale++;
			return pub_result(op, i, -ESTALE);
		}
	}
	if (!step_is_due(op, pub->after))
		return PUB_STEP;
	if ((pub->flags & KVMM_PUB_CRC) && !(en && en->summed))
		return PUB_SUM;
	if (en && en->summed && en->crc != pub->crc) {
		nd->c.pgcrc_fail++;
		return pub_result(op, i, -EBADMSG);
	}
	return pub_seal(op, i, pub, pg, key, parent);
}

/* -- the call ------------------------------------------------------------------------- */

static void pub_page(struct pub_op *op, uint32_t i, const struct ring_pub *pub)
{
	struct pub_entry *blocker = NULL;
	enum pub_wait wait = pub_try(op, i, pub, NULL, &blocker);

	if (wait != PUB_DONE && !pub_entry_create(op, i, pub, wait, blocker))
		pub_result_set(op, i, -ENOMEM, 0);
}

/*
 * A page touches half a dozen places that are in no cache. Fetched a few pages
 * ahead they cost a third of what they cost one after the other.
 */
#define PREFETCH_AHEAD	8u

static void pub_prefetch(const struct pub_op *op, const struct ring_pub *pub)
{
	const struct mm_pool *p = op->pool;
	uint64_t key[4];

	if (pub->frame >= p->max_frames || pub->group >= op->space->desc.ngroups)
		return;
	__builtin_prefetch(&p->meta[pub->frame], 1);
	__builtin_prefetch(&p->table->word[pub->frame], 1);
	__builtin_prefetch(&p->record[pub->frame], 1);
	__builtin_prefetch((char *)&p->record[pub->frame] + 64, 1);
	pub_words(pub->key, key);
	page_prefetch(op->space, pub->group, key);
	index_prefetch(op->space, key, pub->group, p->nd->ix);
}

/* Refused as a whole by rights or mode; 0: go on. */
static int pub_refused(const struct mm_win *w)
{
	if (w->rights != KVMM_RW || w->client->o.rights != KVMM_RW)
		return -EACCES;
	switch (mm_space_mode(w->pool->space)) {
	case KVMM_MODE_BYPASS:
		return -EAGAIN;
	case KVMM_MODE_READONLY:
		return -EROFS;
	default:
		return 0;
	}
}

/* The key is remembered, the frame stays the engine's own: frame 0. */
static void pub_observe(struct pub_op *op, uint32_t i,
			const struct ring_pub *pub)
{
	int err = pub_validate(op, pub, false);
	uint64_t key[4];

	pub_result_set(op, i, err, 0);
	if (err)
		return;
	pub_words(pub->key, key);
	ghost_publish(op->space, pub->group, key);
}

void mm_publish(struct mm_win *w, const struct ring_sqe *sqe,
		const struct ring_pub *pub)
{
	struct ring_cqe cqe = { .op = RING_PUBLISH, .tag = sqe->tag };
	struct mm_space *sp = w->pool->space;
	struct mm *mm = sp->mm;
	uint32_t n = sqe->n, i;
	struct pub_op *op;
	int refused;
	bool nested;

	if (!n || n > KVMM_MAX_BATCH)
		cqe.result = -EINVAL;
	op = cqe.result ? NULL :
	     malloc(sizeof(*op) + (size_t)n * sizeof(op->res[0]));
	if (!op) {
		cqe.result = cqe.result ? cqe.result : -ENOMEM;
		mm->ops->complete(w->client, w, &cqe, NULL);
		return;
	}
	*op = (struct pub_op){
		.space = sp, .pool = w->pool, .engine = w->engine,
		.n = n, .held = true,
	};
	mm_op_init(&op->op, w, sqe->tag, RING_PUBLISH, pub_cancel);
	engine_step(w->engine);

	refused = pub_refused(w);
	/* what becomes ready meanwhile is looked at after the batch, in order */
	nested = mm->pub_running;
	mm->pub_running = true;
	for (i = 0; i < min(n, PREFETCH_AHEAD); i++)
		pub_prefetch(op, &pub[i]);
	for (i = 0; i < n; i++) {
		if (i + PREFETCH_AHEAD < n)
			pub_prefetch(op, &pub[i + PREFETCH_AHEAD]);
		if (refused)
			pub_result_set(op, i, refused, 0);
		else if (mm_space_mode(sp) == KVMM_MODE_OBSERVE)
			pub_observe(op, i, &pub[i]);
		else
			pub_page(op, i, &pub[i]);
	}
	mm->pub_running = nested;
	pub_op_let_go(op);
	pub_run(mm);
}
