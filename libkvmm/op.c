/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations in flight. Each ring entry carries a tag of slot and sequence
 * number; a completion whose tag is not the slot's is late: the library has
 * answered for it, at its deadline or when the connection ended, and it is
 * dropped (what it hands over goes with the completion head).
 *
 * An operation is in flight (era.ops), done (kvmm.done), told (kvmm.told, its
 * results are the user's until the next poll), then free.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "libkvmm/lib.h"

#define OP_KEEP_FREE	256		/* recycled objects a connection keeps */
#define NO_SLOT		UINT32_MAX

/* -- objects ------------------------------------------------------------------ */

static void op_destroy(struct kvmm_job *op)
{
	free(op->page);
	free(op->res);
	free(op->key);
	free(op);
}

struct ring_key *kvmm_op_keys(struct kvmm_job *op, uint32_t n)
{
	struct ring_key *p;

	if (n > op->cap_key) {
		p = realloc(op->key, n * sizeof(*p));
		if (!p) {
			kvmm_fail(-ENOMEM, "out of memory");
			return NULL;
		}
		op->key = p;
		op->cap_key = n;
	}
	return op->key;
}

static int op_room(struct kvmm_job *op, uint32_t npages, uint32_t nres)
{
	void *p;

	if (npages > op->cap_page) {
		p = realloc(op->page, npages * sizeof(*op->page));
		if (!p)
			return -ENOMEM;
		op->page = p;
		op->cap_page = npages;
	}
	if (nres > op->cap_res) {
		p = realloc(op->res, nres * sizeof(*op->res));
		if (!p)
			return -ENOMEM;
		op->res = p;
		op->cap_res = nres;
	}
	return 0;
}

struct kvmm_job *kvmm_op_alloc(struct kvmm *k, uint32_t npages, uint32_t nres)
{
	struct kvmm_job *op;

	kvmm_lock(&k->ops_lock);
	op = k->free_op;
	if (op) {
		k->free_op = (struct kvmm_job *)op->link.next;
		k->nr_free_op--;
	}
	kvmm_unlock(&k->ops_lock);
	if (!op)
		op = calloc(1, sizeof(*op));
	if (!op || op_room(op, npages, nres)) {
		if (op)
			op_destroy(op);
		kvmm_fail(-ENOMEM, "out of memory");
		return NULL;
	}
	list_init(&op->link);
	op->rq = NULL;
	op->era = NULL;
	op->deadline_ns = DEADLINE_NONE;
	op->blob = NULL;
	op->load = NULL;
	op->over = false;
	op->wake = -1;
	op->nr_parts = 0;
	op->nr_pending = 0;
	memset(&op->done, 0, sizeof(op->done));
	op->done.res = op->res;
	return op;
}

void kvmm_op_recycle(struct kvmm *k, struct kvmm_job *op)
{
	bool keep;

	kvmm_lock(&k->ops_lock);
	keep = k->nr_free_op < OP_KEEP_FREE;
	if (keep) {
		op->link.next = (struct list *)k->free_op;
		k->free_op = op;
		k->nr_free_op++;
	}
	kvmm_unlock(&k->ops_lock);
	if (!keep)
		op_destroy(op);
}

void kvmm_op_free_all(struct kvmm *k)
{
	struct kvmm_job *op;

	while (k->free_op) {
		op = k->free_op;
		k->free_op = (struct kvmm_job *)op->link.next;
		op_destroy(op);
	}
	k->nr_free_op = 0;
}

/* -- slots -------------------------------------------------------------------- */

static bool slot_take(struct kvmm *k, struct kvmm_job *op, unsigned int i)
	__must_hold(&k->ops_lock)
{
	struct kvmm_era *e = op->era;
	uint32_t slot = e->slot_free;
	struct kvmm_op_slot *s;

	if (slot >= LIB_MAX_OPS)
		return false;
	s = &e->slot[slot];
	e->slot_free = s->next_free;
	s->op = op;
	s->part = i;
	s->wire = slot | (uint64_t)++e->op_seq << 16;
	op->part[i].slot = slot;
	op->part[i].pending = true;
	op->part[i].sqe.tag = s->wire;
	op->nr_pending++;
	return true;
}

static void slot_free(struct kvmm *k, struct kvmm_job *op, unsigned int i)
	__must_hold(&k->ops_lock)
{
	struct kvmm_era *e = op->era;
	uint32_t slot = op->part[i].slot;

	e->slot[slot].op = NULL;
	e->slot[slot].wire = 0;
	e->slot[slot].next_free = e->slot_free;
	e->slot_free = slot;
	op->part[i].slot = NO_SLOT;
	op->part[i].pending = false;
	op->nr_pending--;
}

static int part_post(struct kvmm *k, struct kvmm_job *op, unsigned int i)
	__must_hold(&k->ops_lock)
{
	struct kvmm_op_part *p = &op->part[i];
	int err;

	if (!slot_take(k, op, i))
		return kvmm_fail(-EAGAIN, "%u operations are in flight",
				 LIB_MAX_OPS);
	err = kvmm_sq_post(op->era, &p->sqe, p->array, p->bytes);
	if (!err)
		return 0;
	slot_free(k, op, i);
	return kvmm_fail(err, err == -EAGAIN ? "the submission ring is full" :
					       "no daemon");
}

/*
 * All under one hold of ops_lock: a completion, or the end of the connection,
 * finds either an operation that is in flight or none.
 */
int kvmm_op_post(struct kvmm_job *op)
{
	struct kvmm_era *e = op->era;
	struct kvmm *k = e->k;
	unsigned int i;
	int err = 0;

	kvmm_lock(&k->ops_lock);
	for (i = 0; i < op->nr_parts && !err; i++)
		err = part_post(k, op, i);
	if (!op->nr_pending) {
		kvmm_unlock(&k->ops_lock);
		return err;
	}
	list_add_tail(&e->ops, &op->link);
	atomic_fetch_add_explicit(&e->nr_ops, 1, memory_order_relaxed);
	if (op->deadline_ns < atomic_load_explicit(&e->next_late_ns,
						   memory_order_relaxed))
		atomic_store_explicit(&e->next_late_ns, op->deadline_ns,
				      memory_order_relaxed);
	kvmm_unlock(&k->ops_lock);
	kvmm_sq_bell(e);
	return 0;
}

/* The operation, and which part of it, that @wire names; NULL: it is late. */
struct kvmm_job *kvmm_op_find(struct kvmm_era *e, uint64_t wire,
			     unsigned int *part)
{
	uint32_t slot = wire & 0xffff;
	struct kvmm_job *op = NULL;

	kvmm_lock(&e->k->ops_lock);
	if (slot < LIB_MAX_OPS && e->slot[slot].wire == wire) {
		op = e->slot[slot].op;
		*part = e->slot[slot].part;
	}
	kvmm_unlock(&e->k->ops_lock);
	return op;
}

/* -- ends ------------------------------------------------------------------------ */

/* Somebody is told: by a poll, or who waits for it. */
static void op_over(struct kvmm *k, struct kvmm_job *op)
{
	uint64_t one = 1;

	if (!op->load) {
		list_add_tail(&k->done, &op->link);
		k->nr_done++;
		return;
	}
	op->over = true;
	/* a full counter wakes as well */
	if (op->wake >= 0 && write(op->wake, &one, sizeof(one)) < 0)
		return;
}

/*
 * Into the results of the user, under the lock of its request; the last part
 * makes the operation done. kvmm.lock is held: only a poll gets here.
 */
static void op_part_over(struct kvmm_job *op, unsigned int i, int err,
			 const struct ring_result *res)
	__no_lock_check		/* a ping has no request to lock */
{
	struct kvmm *k = op->era->k;
	struct kvmm_req *rq = op->rq;

	if (rq)
		kvmm_lock(&rq->lock);
	kvmm_lock(&k->ops_lock);
	slot_free(k, op, i);
	if (!op->nr_pending) {
		list_del(&op->link);
		atomic_fetch_sub_explicit(&op->era->nr_ops, 1,
					  memory_order_relaxed);
	}
	kvmm_unlock(&k->ops_lock);
	if (op->done.op == KVMM_OP_PUBLISH)
		kvmm_publish_result(op, &op->part[i], err, res);
	else if (op->done.op == KVMM_OP_FETCH)
		kvmm_fetch_result(op, &op->part[i], err, res);
	else if (op->done.op == KVMM_OP_BLOB)
		kvmm_blob_result(op, &op->part[i], err, res);
	else if (op->done.op == LIB_OP_LOAD)
		kvmm_blob_fetched(op, &op->part[i], err, res);
	else if (op->done.op == KVMM_OP_FORK)
		kvmm_fork_result(op, &op->part[i], err, res);
	if (err)
		op->done.result = err;
	if (op->nr_pending) {
		if (rq)
			kvmm_unlock(&rq->lock);
		return;
	}
	op_over(k, op);
	if (rq)
		kvmm_req_op_done(rq);
}

void kvmm_op_complete(struct kvmm_job *op, unsigned int i, int result,
		      const struct ring_result *res)
{
	op_part_over(op, i, result, res);
}

void kvmm_op_fail(struct kvmm_job *op, int err)
{
	unsigned int i, n = op->nr_parts;

	/* the last part may end the life of the request, not of the operation */
	for (i = 0; i < n; i++)
		if (op->part[i].pending)
			op_part_over(op, i, err, NULL);
}

void kvmm_op_ready(struct kvmm_job *op)
{
	struct kvmm *k = op->era->k;

	kvmm_lock(&k->ops_lock);
	list_add_tail(&k->ready, &op->link);
	kvmm_unlock(&k->ops_lock);
	kvmm_kick(k);
}

static struct kvmm_job *first_due(struct kvmm_era *e, uint64_t now,
				 uint64_t *next)
{
	struct kvmm_job *op, *due = NULL;

	*next = DEADLINE_NONE;
	kvmm_lock(&e->k->ops_lock);
	list_for_each_entry(op, &e->ops, link) {
		if (op->deadline_ns <= now) {
			due = op;
			break;
		}
		*next = min(*next, op->deadline_ns);
	}
	if (!due)
		atomic_store_explicit(&e->next_late_ns, *next,
				      memory_order_relaxed);
	kvmm_unlock(&e->k->ops_lock);
	return due;
}

void kvmm_ops_fail(struct kvmm_era *e, int err)
{
	struct kvmm_job *op;

	for (;;) {
		kvmm_lock(&e->k->ops_lock);
		op = list_first(&e->ops, struct kvmm_job, link);
		kvmm_unlock(&e->k->ops_lock);
		if (!op)
			return;
		kvmm_op_fail(op, err);
	}
}

void kvmm_ops_late(struct kvmm_era *e, uint64_t now)
{
	struct kvmm_job *op;
	uint64_t next;

	if (now < atomic_load_explicit(&e->next_late_ns, memory_order_relaxed))
		return;
	while ((op = first_due(e, now, &next))) {
		stat_add(e->k, late, 1);
		kvmm_op_fail(op, -ETIMEDOUT);
	}
}

/* -- cancel and ping -------------------------------------------------------------- */

static void post_cancel(struct kvmm_era *e, uint64_t wire)
{
	struct ring_sqe sqe = { .op = RING_CANCEL, .arg = wire };

	/* a full ring: it runs into its deadline instead */
	kvmm_sq_push(e, &sqe, NULL, 0);
}

static uint32_t op_wires(const struct kvmm_job *op, uint64_t *wire)
{
	uint32_t i, n = 0;

	for (i = 0; i < op->nr_parts; i++)
		if (op->part[i].pending)
			wire[n++] = op->era->slot[op->part[i].slot].wire;
	return n;
}

/* Fetches of a request that has ended: nobody waits for the pages. */
void kvmm_ops_cancel(struct kvmm_era *e, const struct kvmm_req *rq)
{
	uint64_t wire[KVMM_MAX_CLASSES * 8];
	struct kvmm_job *op;
	uint32_t i, n = 0;

	kvmm_lock(&e->k->ops_lock);
	list_for_each_entry(op, &e->ops, link) {
		if (n + KVMM_MAX_CLASSES > ARRAY_SIZE(wire))
			break;
		if (op->rq == rq && op->done.op == KVMM_OP_FETCH)
			n += op_wires(op, wire + n);
	}
	kvmm_unlock(&e->k->ops_lock);
	for (i = 0; i < n; i++)
		post_cancel(e, wire[i]);
}

int kvmm_cancel(struct kvmm *k, uint64_t tag)
{
	uint64_t wire[KVMM_MAX_CLASSES];
	struct kvmm_job *op;
	struct kvmm_era *e;
	uint32_t i, n = 0;
	int err = 0;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	e = kvmm_era_now(k);
	kvmm_lock(&k->ops_lock);
	list_for_each_entry(op, &e->ops, link)
		if (!op->load && op->done.tag == tag) {
			n = op_wires(op, wire);
			break;
		}
	kvmm_unlock(&k->ops_lock);
	if (kvmm_era_lost(e))
		err = kvmm_fail(-ENOTCONN, "no daemon");
	else if (!n)
		err = kvmm_fail(-ENOENT, "nothing in flight has the tag %llu",
				(unsigned long long)tag);
	for (i = 0; !err && i < n; i++) {
		struct ring_sqe sqe = { .op = RING_CANCEL, .arg = wire[i] };

		err = kvmm_sq_push(e, &sqe, NULL, 0);
	}
	kvmm_exit(k);
	return err;
}

int kvmm_ping(struct kvmm *k, uint64_t tag)
{
	struct kvmm_job *op;
	int err = -ENOMEM;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	op = kvmm_op_alloc(k, 0, 0);
	if (!op)
		goto out_exit;
	op->era = kvmm_era_now(k);
	op->done.tag = tag;
	op->done.op = KVMM_OP_PING;
	op->nr_parts = 1;
	op->part[0] = (struct kvmm_op_part){ .sqe = { .op = RING_NOP } };
	err = kvmm_op_post(op);
	if (err)
		kvmm_op_recycle(k, op);
out_exit:
	kvmm_exit(k);
	return err;
}
