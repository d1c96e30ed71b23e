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
 * its own but the results. Otherwise the page becomes an entry: the first one
 * of its key is in the space's table of pending keys and carries the list of
 * those that wait for it, duplicates and children alike. When an entry ends,
 * however it ends, those are looked at again, from the beginning and in the
 * order in which they came: nothing that was true before is taken for granted.
 * They are put on one list and taken off it in a loop, so that a chain of four
 * thousand pages needs no deeper a stack than one.
 *
 * Waiting cannot go round in a circle: whoever is waited for was pending before.
 * An entry that is looked at again after a failure could close one, so there the
 * chain is followed once.
 */
#include <stdlib.h>

#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define PENDING_BUCKETS	4096u
#define LOAD_RETRY_NS	NSEC_PER_MSEC

enum pub_wait {
	PUB_DONE,		/* the result is there */
	PUB_DUP,
	PUB_LOAD,
	PUB_PARENT,
	PUB_STEP,
	PUB_SUM,
};

struct pub_op {
	struct mm_op	op;
	struct mm_space	*space;
	struct mm_pool	*pool;
	struct mm_engine *engine;
	uint32_t	n;
	uint32_t	nr_waiting;
	bool		held;		/* not complete before it is let go */
	struct pub_entry *entry;	/* [n], when the first must wait */
	struct ring_result res[];
};

/**
 * struct pub_entry - a page that is not sealed yet
 * @pub:	key and parent first, so that they are aligned as words
 * @link:	on the list of the entry that it waits for, on mm->pub_ready or
 *		on mm->pub_loading
 * @waiters:	what waits for this one's end
 * @blocker:	the entry that it waits for
 * @pending:	it is the one in the table of pending keys
 * @summed:	the checksum is there
 * @err:	it is to end with this as soon as the worker lets go of it
 */
struct pub_entry {
	struct ring_pub	pub;
	struct pub_op	*op;
	struct pub_entry *hnext;
	struct pub_entry *blocker;
	struct list	link;
	struct list	waiters;
	struct step_wait sw;
	struct work	work;
	struct image	data;
	uint32_t	crc;
	int32_t		err;
	enum pub_wait	wait;
	bool		pending;
	bool		summed;
};

static void pub_words(const uint8_t key[32], uint64_t w[4])
{
	memcpy(w, key, 32);
}

/* -- pending keys -------------------------------------------------------------- */

static struct pub_entry **pending_chain(const struct mm_space *sp,
					uint16_t group, const uint64_t key[4])
{
	uint64_t h = key_mix(key, sp->mm->seed[0], sp->mm->seed[1], group);

	return &sp->pending[h & (PENDING_BUCKETS - 1)];
}

static struct pub_entry *pending_find(const struct mm_space *sp,
				      uint16_t group, const uint64_t key[4])
{
	struct pub_entry *en;

	if (!sp->nr_pending)
		return NULL;
	for (en = *pending_chain(sp, group, key); en; en = en->hnext)
		if (en->pub.group == group && !memcmp(en->pub.key, key, 32))
			return en;
	return NULL;
}

static bool pending_add(struct pub_entry *en)
{
	struct mm_space *sp = en->op->space;
	struct pub_entry **chain;
	uint64_t key[4];

	if (en->pending)
		return true;
	if (!sp->pending)
		sp->pending = calloc(PENDING_BUCKETS, sizeof(*sp->pending));
	if (!sp->pending)
		return false;
	pub_words(en->pub.key, key);
	chain = pending_chain(sp, en->pub.group, key);
	en->hnext = *chain;
	*chain = en;
	en->pending = true;
	sp->nr_pending++;
	return true;
}

static void pending_del(struct pub_entry *en)
{
	struct mm_space *sp = en->op->space;
	struct pub_entry **pp;
	uint64_t key[4];

	if (!en->pending)
		return;
	pub_words(en->pub.key, key);
	for (pp = pending_chain(sp, en->pub.group, key); *pp != en;)
		pp = &(*pp)->hnext;
	*pp = en->hnext;
	en->pending = false;
	sp->nr_pending--;
}

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

static void result_set(struct pub_op *op, uint32_t i, int err, uint32_t frame)
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
	result_set(op, i, err, 0);
	return PUB_DONE;
}

/* The page exists on this node: the publisher keeps its frame and gets that. */
static enum pub_wait pub_exists(struct pub_op *op, uint32_t i, struct page *pg)
{
	struct mm_node *nd = op->pool->nd;

	nd->c.pgpublish_exist++;
	result_set(op, i, -EEXIST, page_copy(pg, nd)->frame);
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
	result_set(op, i, 0, pub->frame);
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

/*
 * Seal page @i, or say what it must wait for. @en: its entry, if it has waited
 * before; @blocker: the entry to wait for.
 */
static enum pub_wait pub_try(struct pub_op *op, uint32_t i,
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
	*blocker = pending_find(sp, pub->group, key);
	if (*blocker && *blocker != en)
		return PUB_DUP;

	pub_words(pub->parent, up);
	if (!pg && !(pub->flags & KVMM_PUB_ROOT) && !key_is_zero(up)) {
		parent = page_find(sp, pub->group, up);
		if (!parent && needs_parent(sp, pub)) {
			*blocker = pending_find(sp, pub->group, up);
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

/* -- entries ---------------------------------------------------------------------- */

static void op_complete(struct pub_op *op)
{
	uint32_t i, cancelled = 0;

	for (i = 0; i < op->n; i++)
		cancelled += op->res[i].result == -ECANCELED;
	mm_op_complete(&op->op, op->pool,
		       cancelled == op->n ? -ECANCELED : 0, op->n, op->res);
	mm_op_fini(&op->op);
	free(op->entry);
	free(op);
}

static void op_let_go(struct pub_op *op)
{
	op->held = false;
	if (!op->nr_waiting)
		op_complete(op);
}

/* Its result is there: who waited for it is looked at again. */
static void entry_end(struct pub_entry *en)
{
	struct pub_op *op = en->op;
	struct mm_pool *p = op->pool;
	struct pub_entry *w;

	pending_del(en);
	list_for_each_entry(w, &en->waiters, link)
		w->blocker = NULL;
	list_splice_tail(&op->space->mm->pub_ready, &en->waiters);
	/* only while it is still what it was when the entry was made */
	p->meta[en->pub.frame].flags &= ~FMETA_PUB;
	en->wait = PUB_DONE;
	if (--op->nr_waiting == 0 && !op->held)
		op_complete(op);
}

static void entry_fail(struct pub_entry *en, int err)
{
	result_set(en->op, en - en->op->entry, err, 0);
	entry_end(en);
}

static void entry_ready(struct pub_entry *en)
{
	list_add_tail(&en->op->space->mm->pub_ready, &en->link);
}

static void pub_run(struct mm *mm);

static void entry_step(struct step_wait *sw, int err)
{
	struct pub_entry *en = container_of(sw, struct pub_entry, sw);
	struct mm *mm = en->op->space->mm;

	if (err)
		entry_fail(en, err);
	else
		entry_ready(en);
	pub_run(mm);
}

static void sum_fn(struct work *work)
{
	struct pub_entry *en = container_of(work, struct pub_entry, work);

	en->crc = image_crc(&en->data);
}

static void sum_over(struct pub_entry *en)
{
	struct mm *mm = en->op->space->mm;

	mm->nr_jobs--;
	frame_unref(en->op->pool, en->pub.frame);
	en->summed = true;
	if (en->err)
		entry_fail(en, en->err);
	else
		entry_ready(en);
}

static void sum_done(struct work *work)
{
	struct pub_entry *en = container_of(work, struct pub_entry, work);
	struct mm *mm = en->op->space->mm;

	sum_over(en);
	pub_run(mm);
}

static void entry_sum(struct pub_entry *en)
{
	struct mm *mm = en->op->space->mm;
	struct mm_pool *p = en->op->pool;

	frame_ref(p, en->pub.frame);
	en->data = frame_image(p, en->pub.frame, p->page_bytes);
	en->work = (struct work){
		.fn = sum_fn, .done = sum_done, .bulk = true,
	};
	mm->nr_jobs++;
	if (mm->o.pool) {
		work_submit(mm->o.pool, &en->work);
		return;
	}
	sum_fn(&en->work);
	sum_over(en);
}

/* Would waiting for @blocker close a circle? */
static bool waits_for(const struct pub_entry *blocker,
		      const struct pub_entry *en)
{
	for (; blocker; blocker = blocker->blocker)
		if (blocker == en)
			return true;
	return false;
}

static void entry_wait(struct pub_entry *en, enum pub_wait wait,
		       struct pub_entry *blocker)
{
	struct pub_op *op = en->op;

	en->wait = wait;
	if (wait != PUB_DUP && wait != PUB_LOAD && !pending_add(en)) {
		entry_fail(en, -ENOMEM);
		return;
	}
	switch (wait) {
	case PUB_DUP:
	case PUB_PARENT:
		/* who has no waiters cannot be waited for in a circle */
		if (!list_empty(&en->waiters) && waits_for(blocker, en)) {
			entry_fail(en, -ESTALE);
			return;
		}
		en->blocker = blocker;
		list_add_tail(&blocker->waiters, &en->link);
		break;
	case PUB_LOAD:
		list_add_tail(&op->space->mm->pub_loading, &en->link);
		break;
	case PUB_STEP:
		en->sw.fn = entry_step;
		step_wait_add(op->engine, &en->sw, en->pub.after);
		break;
	case PUB_SUM:
		entry_sum(en);
		break;
	case PUB_DONE:
		break;
	}
}

static void entry_look(struct pub_entry *en)
{
	struct pub_entry *blocker = NULL;
	enum pub_wait wait = pub_try(en->op, en - en->op->entry, &en->pub, en,
				     &blocker);

	if (wait == PUB_DONE)
		entry_end(en);
	else
		entry_wait(en, wait, blocker);
}

static void pub_run(struct mm *mm)
{
	struct pub_entry *en;

	if (mm->pub_running)
		return;
	mm->pub_running = true;
	while ((en = list_first(&mm->pub_ready, struct pub_entry, link))) {
		list_del(&en->link);
		entry_look(en);
	}
	mm->pub_running = false;
}

uint64_t publish_run(struct mm *mm, uint64_t now_ns)
{
	if (list_empty(&mm->pub_loading))
		return UINT64_MAX;
	list_splice_tail(&mm->pub_ready, &mm->pub_loading);
	pub_run(mm);
	return list_empty(&mm->pub_loading) ? UINT64_MAX :
					      now_ns + LOAD_RETRY_NS;
}

/* -- giving up ----------------------------------------------------------------------- */

/* It ends with @err, now or when a worker lets go of its frame. */
static void entry_give_up(struct pub_entry *en, int err)
{
	struct mm *mm = en->op->space->mm;

	switch (en->wait) {
	case PUB_DONE:
		return;
	case PUB_SUM:
		if (!en->summed &&
		    !(mm->o.pool && work_cancel(mm->o.pool, &en->work))) {
			en->err = err;
			return;
		}
		if (!en->summed) {
			mm->nr_jobs--;
			frame_unref(en->op->pool, en->pub.frame);
		}
		break;
	case PUB_STEP:
		step_wait_del(en->op->engine, &en->sw);
		break;
	default:
		break;
	}
	list_del(&en->link);
	en->blocker = NULL;
	entry_fail(en, err);
}

static void op_give_up(struct pub_op *op, int err)
{
	struct mm *mm = op->space->mm;
	uint32_t i;

	if (!op->entry)
		return;
	op->held = true;
	for (i = 0; i < op->n; i++)
		if (op->entry[i].op)
			entry_give_up(&op->entry[i], err);
	op_let_go(op);
	pub_run(mm);
}

static void pub_cancel(struct mm_op *mo)
{
	op_give_up(container_of(mo, struct pub_op, op), -ECANCELED);
}

void publish_fail(struct mm_client *c, int err)
{
	bool nested = c->mm->pub_running;
	struct mm_op *mo, *tmp;

	/* only the operation at hand may end, or @tmp would be gone */
	c->mm->pub_running = true;
	list_for_each_entry_safe(mo, tmp, &c->ops, link)
		if (mo->cancel == pub_cancel)
			op_give_up(container_of(mo, struct pub_op, op), err);
	c->mm->pub_running = nested;
	pub_run(c->mm);
}

/* -- the call ------------------------------------------------------------------------- */

/* Page @i cannot be sealed at once. */
static bool entry_create(struct pub_op *op, uint32_t i,
			 const struct ring_pub *pub, enum pub_wait wait,
			 struct pub_entry *blocker)
{
	struct pub_entry *en;

	if (!op->entry)
		op->entry = calloc(op->n, sizeof(*op->entry));
	if (!op->entry)
		return false;
	en = &op->entry[i];
	en->pub = *pub;
	en->op = op;
	list_init(&en->link);
	list_init(&en->waiters);
	heap_node_init(&en->sw.node);
	op->nr_waiting++;
	op->pool->meta[pub->frame].flags |= FMETA_PUB;
	entry_wait(en, wait, blocker);
	return true;
}

static void pub_page(struct pub_op *op, uint32_t i, const struct ring_pub *pub)
{
	struct pub_entry *blocker = NULL;
	enum pub_wait wait = pub_try(op, i, pub, NULL, &blocker);

	if (wait != PUB_DONE && !entry_create(op, i, pub, wait, blocker))
		result_set(op, i, -ENOMEM, 0);
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

	result_set(op, i, err, 0);
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
			result_set(op, i, refused, 0);
		else if (mm_space_mode(sp) == KVMM_MODE_OBSERVE)
			pub_observe(op, i, &pub[i]);
		else
			pub_page(op, i, &pub[i]);
	}
	mm->pub_running = nested;
	op_let_go(op);
	pub_run(mm);
}
