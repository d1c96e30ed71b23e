/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Publishes that wait: pages that could not be sealed at once (publish.c).
 *
 * Such a page becomes an entry: the first one of its key is in the space's table
 * of pending keys and carries the list of those that wait for it, duplicates and
 * children alike. When an entry ends, however it ends, those are looked at again,
 * from the beginning and in the order in which they came: nothing that was true
 * before is taken for granted. They are put on one list and taken off it in a
 * loop, so that a chain of four thousand pages needs no deeper a stack than one.
 *
 * Waiting cannot go round in a circle: whoever is waited for was pending before.
 * An entry that is looked at again after a failure could close one, so there the
 * chain is followed once.
 */
#include <stdlib.h>

#include "daemon/mm/publish.h"
#include "ipc/base/clock.h"

#define PENDING_BUCKETS	4096u
#define LOAD_RETRY_NS	NSEC_PER_MSEC

/* -- pending keys -------------------------------------------------------------- */

static struct pub_entry **pending_chain(const struct mm_space *sp,
					uint16_t group, const uint64_t key[4])
{
	uint64_t h = key_mix(key, sp->mm->seed[0], sp->mm->seed[1], group);

	return &sp->pending[h & (PENDING_BUCKETS - 1)];
}

struct pub_entry *pub_pending_find(const struct mm_space *sp, uint16_t group,
				   const uint64_t key[4])
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

void pub_op_let_go(struct pub_op *op)
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
	pub_result_set(en->op, en - en->op->entry, err, 0);
	entry_end(en);
}

static void entry_ready(struct pub_entry *en)
{
	list_add_tail(&en->op->space->mm->pub_ready, &en->link);
}

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

bool pub_entry_create(struct pub_op *op, uint32_t i, const struct ring_pub *pub,
		      enum pub_wait wait, struct pub_entry *blocker)
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

void pub_run(struct mm *mm)
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
	pub_op_let_go(op);
	pub_run(mm);
}

void pub_cancel(struct mm_op *mo)
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
