/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blobs, the writer's half; blob_map.c is the reader's, ipc/blob.h says what
 * they are made of.
 *
 * A handle that was committed is gone, and so is one that was put; what is left
 * of it is the request's own: pins, and what is to be touched at its end. All of
 * a request's blobs are on one list, whatever became of them.
 *
 * Nothing of a blob is found before all of it is sealed, since the head is the
 * last one. When something fails the part that was sealed is taken back: its
 * root is named, and the daemon drops what is bound to it. If even that has no
 * room in the ring, or if the writer dies, it stays in the cache as pages that
 * nobody can name, and leaves as the coldest do.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "libkvmm/lib.h"

static_assert(BLOB_MAX_CHUNKS <= KVMM_MAX_CLASSES * KVMM_MAX_BATCH,
	      "a blob has as many parts as an operation");

/* -- objects -------------------------------------------------------------------- */

struct kvmm_blob *kvmm_blob_alloc(struct kvmm_req *rq, struct kvmm_view *v,
				  unsigned int group, uint32_t n)
{
	struct kvmm_blob *b = calloc(1, sizeof(*b));

	if (b)
		b->frame = malloc(n * sizeof(*b->frame));
	if (!b || !b->frame) {
		free(b);
		kvmm_fail(-ENOMEM, "out of memory");
		return NULL;
	}
	list_init(&b->link);
	b->rq = rq;
	b->view = v;
	b->group = group;
	b->n = n;
	return b;
}

void kvmm_blob_free(struct kvmm_blob *b)
{
	kvmm_span_fini(&b->span);
	free(b->frame);
	free(b);
}

void kvmm_blob_key(const struct kvmm_blob *b, uint32_t chunk,
		   uint8_t key[KVMM_KEY_BYTES])
{
	if (chunk)
		blob_chunk_key(b->key, b->id, chunk, key);
	else
		memcpy(key, b->key, KVMM_KEY_BYTES);
}

static void blob_unpin(struct kvmm_blob *b)
{
	while (b->nr_pins)
		kvmm_unpin(b->view, b->frame[--b->nr_pins]);
}

static void blob_forget(struct kvmm_blob *b)
{
	list_del(&b->link);
	kvmm_blob_free(b);
}

int kvmm_blob_group(const struct kvmm_req *rq, unsigned int group)
{
	const struct desc *d = &rq->sp->desc;

	if (group >= d->ngroups)
		return kvmm_fail(-EINVAL, "group %u, the space has %u", group,
				 d->ngroups);
	if (d->group[group].rule != KVMM_LAST &&
	    d->group[group].rule != KVMM_BLOB)
		return kvmm_fail(-EINVAL,
			"group %u: a blob is of a group of rule LAST or BLOB",
			group);
	return 0;
}

/* On a gang each rank has a part of each page, and nobody all of them. */
int kvmm_blob_node(const struct kvmm_req *rq, unsigned int node)
{
	if (!rq->att || node >= KVMM_MAX_NODES ||
	    !rq->att->era->info.node[node].gang)
		return 0;
	return kvmm_fail(-EOPNOTSUPP, "node %s is a gang: it has no blobs",
			 rq->att->era->info.node[node].name);
}

/* -- all of a request's --------------------------------------------------------- */

uint32_t kvmm_blobs_pins(const struct kvmm_req *rq)
{
	const struct kvmm_blob *b;
	uint32_t n = 0;

	list_for_each_entry(b, &rq->blobs, link)
		n += b->nr_pins;
	return n;
}

const struct kvmm_blob *kvmm_blobs_find(const struct kvmm_req *rq,
					const struct kvmm_view *v,
					uint32_t frame, uint64_t word)
{
	const struct kvmm_blob *b;

	list_for_each_entry(b, &rq->blobs, link)
		if (word && b->word == word && b->view == v &&
		    b->frame[0] == frame)
			return b;
	return NULL;
}

void kvmm_blobs_end(struct kvmm_req *rq)
{
	struct kvmm_blob *b, *tmp;

	list_for_each_entry_safe(b, tmp, &rq->blobs, link) {
		if (b->state == BLOB_COMMITTING)
			continue;
		blob_unpin(b);
		blob_forget(b);
	}
}

void kvmm_blobs_keep(struct kvmm_req *rq)
{
	struct kvmm_att *a = rq->att;
	struct kvmm_blob *b, *tmp;

	list_for_each_entry_safe(b, tmp, &rq->blobs, link) {
		list_del(&b->link);
		b->next = atomic_load_explicit(&a->kept, memory_order_relaxed);
		/* relaxed: the caller's kvmm_att_put() shows it to att_free() */
		while (!atomic_compare_exchange_weak_explicit(&a->kept,
				&b->next, b, memory_order_relaxed,
				memory_order_relaxed))
			;
	}
}

/* -- begin ------------------------------------------------------------------------ */

static int by_number(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

/* OPEN frames of @b go back. */
static void frames_back(struct kvmm_blob *b, uint32_t from, uint64_t after)
{
	struct kvmm_own *o = kvmm_req_own(b->rq, b->view);
	uint32_t i, n = 0;

	/* those that somebody has published or freed by number are not ours */
	for (i = from; i < b->n; i++)
		if (kvmm_own_del_open(o, b->frame[i]))
			b->frame[from + n++] = b->frame[i];
	kvmm_view_put(b->view, b->frame + from, n, after);
}

/* Somebody has it already, as far as the index says. */
static bool is_known(struct kvmm_req *rq, const struct kvmm_blob *b,
		     unsigned int cls, unsigned int node)
	__must_hold(&rq->lock)
{
	struct kvmm_page page = { .state = PAGE_UNKNOWN };
	uint64_t key[1][4];
	struct kvmm_mset m = {
		.node = node, .ngroups = 1, .key = key, .page = &page, .n = 1,
		.g[0] = { .group = b->group, .cls = cls, .n = 1, .ratio = 1 },
	};

	if (!kvmm_req_answers(rq))
		return false;
	memcpy(key, b->key, sizeof(key));
	kvmm_look(rq->att, &m, &m.g[0], 0, 1);
	return page.state != KVMM_MISS;
}

static int begin_frames(struct kvmm_req *rq, struct kvmm_blob *b,
			unsigned int cls, unsigned int node)
	__must_hold(&rq->lock)
{
	int err;

	/* the view that they are of: the window may be closed and opened again */
	err = kvmm_frames_alloc(rq, cls, node, b->n, b->frame, &b->view);
	if (err)
		return err;
	/* so that as many as possible lie one behind the other */
	qsort(b->frame, b->n, sizeof(*b->frame), by_number);
	if (b->n > 1 && b->view->table->stride != b->view->page_bytes)
		err = kvmm_fail(-EINVAL,
			"a stride of %u bytes for pages of %u",
			b->view->table->stride, b->view->page_bytes);
	if (!err)
		err = kvmm_span_init(&b->span, b->view, b->frame, b->n);
	if (err)
		frames_back(b, 0, 0);
	return err;
}

static int begin_chunks(const struct kvmm_req *rq, unsigned int group,
			uint64_t len, uint32_t *n)
{
	const struct desc_class *c;
	int err = kvmm_blob_group(rq, group);

	if (err)
		return err;
	c = &rq->sp->desc.cls[rq->sp->desc.group[group].class_ix];
	if (c->page_bytes < sizeof(struct blob_hdr))
		return kvmm_fail(-EINVAL,
			"class %s: pages of %u bytes, a blob's head needs %zu",
			c->name, c->page_bytes, sizeof(struct blob_hdr));
	*n = blob_chunks(len, c->page_bytes);
	if (!*n)
		return kvmm_fail(-EINVAL,
			"a blob of %llu bytes is more than %u pages of %u",
			(unsigned long long)len, BLOB_MAX_CHUNKS,
			c->page_bytes);
	if (*n > 1 && c->page_bytes % BLOB_ALIGN)
		return kvmm_fail(-EINVAL,
			"class %s: pages of %u bytes, and a blob of several needs a multiple of %u",
			c->name, c->page_bytes, BLOB_ALIGN);
	return 0;
}

static int begin(struct kvmm_req *rq, unsigned int group, unsigned int node,
		 const struct kvmm_key *key, const struct kvmm_key *parent,
		 uint64_t len, struct kvmm_blob **ret) __must_hold(&rq->lock)
{
	struct kvmm_blob *b;
	unsigned int cls;
	uint32_t n;
	int err;

	kvmm_req_bind(rq);
	err = begin_chunks(rq, group, len, &n);
	if (!err)
		err = kvmm_blob_node(rq, node);
	if (err)
		return err;
	b = kvmm_blob_alloc(rq, NULL, group, n);
	if (!b)
		return -ENOMEM;
	b->len = len;
	memcpy(b->key, key->b, sizeof(b->key));
	if (parent)
		memcpy(b->parent, parent->b, sizeof(b->parent));
	cls = rq->sp->desc.group[group].class_ix;
	if (is_known(rq, b, cls, node))
		err = kvmm_fail(-EEXIST, "there is a blob of this key");
	else if (getrandom(b->id, sizeof(b->id), GRND_NONBLOCK) != sizeof(b->id))
		err = kvmm_fail(-EAGAIN, "no random bytes");
	else
		err = begin_frames(rq, b, cls, node);
	if (err) {
		kvmm_blob_free(b);
		return err;
	}
	list_add_tail(&rq->blobs, &b->link);
	*ret = b;
	return 0;
}

int kvmm_blob_begin(struct kvmm_req *rq, unsigned int group, kvmm_node_t node,
		    const struct kvmm_key *key, const struct kvmm_key *parent,
		    uint64_t len, struct kvmm_blob **ret)
{
	struct kvmm *k = rq->k;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	err = begin(rq, group, node, key, parent, len, ret);
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return err;
}

/* -- the end of a commit ------------------------------------------------------------ */

/* Drop what was sealed of it: all hangs on the last chunk. */
static void take_back(struct kvmm_job *op, const struct kvmm_blob *b)
{
	struct ring_sqe sqe = {
		.op	= RING_REPORT,
		.space	= op->rq->att->ix,
		.n	= 1,
		.req	= op->rq->slot,
		.arg	= RING_UNDO,
	};
	struct ring_key key = { .group = b->group };

	kvmm_blob_key(b, op->page[0].page, key.key);
	kvmm_sq_push(op->era, &sqe, &key, sizeof(key));
}

/* What is left of a blob that was not, or not by us, published. */
static void blob_rest(struct kvmm_blob *b, uint32_t canonical)
{
	b->nr_pins = 0;
	if (canonical) {
		b->state = BLOB_SEALED;
		b->frame[0] = canonical;
		b->nr_pins = 1;
	} else if (b->span.addr) {
		b->state = BLOB_FAILED;
		b->word = 0;
	} else {
		blob_forget(b);
	}
}

/*
 * Nothing is pinned of it but the canonical head. Frames that are OPEN still
 * are free; whether those are of which nobody has told us their words say.
 */
static void blob_failed(struct kvmm_job *op, struct kvmm_blob *b)
{
	uint32_t i, n = 0, canonical = op->res[0].frame;
	bool root = op->page[0].res;

	for (i = 0; i < b->n; i++) {
		const struct kvmm_op_page *pg = &op->page[i];

		if (!pg->res && (int32_t)pg->len == -ENOTCONN)
			kvmm_view_limbo(b->view, pg->frame);
		else if (!pg->res && !kvmm_op_unknown((int32_t)pg->len))
			b->frame[n++] = pg->frame;
		kvmm_unpin_own(b->view, pg->frame);
	}
	if (root)
		take_back(op, b);
	kvmm_view_put(b->view, b->frame, n, b->after);
	blob_rest(b, canonical);
}

static void blob_over(struct kvmm_job *op)
{
	struct kvmm_blob *b = op->blob;
	uint32_t i, n = b->n, sealed = 0;
	int err = 0;

	for (i = 0; i < n; i++) {
		sealed += op->page[i].res;
		if (!err)
			err = (int32_t)op->page[i].len;
	}
	op->res[0].result = err;
	if (sealed == n) {
		b->state = BLOB_SEALED;
		b->nr_pins = n;
		op->res[0].frame = b->frame[0];
		stat_add(op->era->k, published, n);
	} else {
		/* -EEXIST of the head alone is somebody else's success */
		if (err == -EEXIST)
			stat_add(op->era->k, publish_exists, 1);
		else if (err)
			stat_add(op->era->k, publish_refused, n - sealed);
		blob_failed(op, b);
	}
	op->blob = NULL;
}

/* Somebody's head was first: pinned while the answer holds a reference. */
static void canonical(struct kvmm_job *op, const struct ring_result *r)
{
	struct kvmm_blob *b = op->blob;

	if (!r->frame || r->frame >= b->view->max_frames || op->rq->ended ||
	    !kvmm_pin_word(b->view, r->frame, r->word))
		return;
	op->res[0].frame = r->frame;
	b->word = r->word;
}

void kvmm_blob_result(struct kvmm_job *op, const struct kvmm_op_part *part,
		      int err, const struct ring_result *res)
{
	struct kvmm_blob *b = op->blob;
	uint32_t i;

	for (i = 0; i < part->n; i++) {
		struct kvmm_op_page *pg = &op->page[part->first + i];
		const struct ring_result failed = { .result = err };
		const struct ring_result *r = res ? &res[i] : &failed;

		pg->len = (uint32_t)kvmm_op_result(r, pg->frame);
		pg->res = !r->result && r->frame == pg->frame;
		if (pg->page)
			continue;
		if (pg->res)
			b->word = r->word;
		else if (r->result == -EEXIST)
			canonical(op, r);
	}
	if (op->nr_pending)
		return;
	blob_over(op);
	kvmm_req_show_pins(op->rq);
}

/* -- commit ------------------------------------------------------------------------- */

static void write_head(struct kvmm_blob *b)
{
	struct blob_hdr h = {
		.magic		= BLOB_MAGIC,
		.version	= BLOB_VERSION,
		.size		= sizeof(h),
		.len		= b->len,
		.nchunks	= b->n,
		.page_bytes	= b->view->page_bytes,
	};

	memcpy(h.id, b->id, sizeof(h.id));
	blob_hdr_seal(&h, b->key);
	memcpy(kvmm_frame_addr(b->view, b->frame[0]), &h, sizeof(h));
}

/*
 * The pages in the order in which they are published: the last chunk first, the
 * head at the end. In observe mode the head's key is all that anybody wants.
 */
static void fill_pubs(struct kvmm_blob *b, struct kvmm_job *op,
		      struct ring_pub *pub, uint32_t n, uint32_t cost_us)
{
	uint32_t chunks = blob_chunks(b->len, b->view->page_bytes);
	uint32_t i, chunk;

	for (i = 0; i < n; i++) {
		bool bound;

		chunk = n - 1 - i;
		/* also a head that goes alone: see commit() */
		bound = chunk + 1 < chunks;
		pub[i] = (struct ring_pub){
			.frame	= b->frame[chunk],
			.cost_us = cost_us,
			.group	= b->group,
			.flags	= bound ? RING_PUB_BOUND : 0,
			.after	= b->after,
		};
		kvmm_blob_key(b, chunk, pub[i].key);
		if (bound)
			kvmm_blob_key(b, chunk + 1, pub[i].parent);
		else
			memcpy(pub[i].parent, b->parent,
			       sizeof(pub[i].parent));
		op->page[i] = (struct kvmm_op_page){
			.frame	= b->frame[chunk],
			.page	= chunk,
			.group	= b->group,
		};
	}
}

static void make_parts(struct kvmm_blob *b, struct kvmm_job *op,
		       const struct ring_pub *pub, uint32_t n)
{
	uint32_t first;

	for (first = 0; first < n; first += KVMM_MAX_BATCH) {
		struct kvmm_op_part *part = &op->part[op->nr_parts++];

		part->view = b->view;
		part->first = first;
		part->n = min(n - first, (uint32_t)KVMM_MAX_BATCH);
		part->pending = false;
		part->array = pub + first;
		part->bytes = part->n * sizeof(*pub);
		part->sqe = (struct ring_sqe){
			.op	= RING_PUBLISH,
			.space	= b->rq->att->ix,
			.win	= b->view->no,
			.n	= part->n,
			.req	= b->rq->slot,
			.after	= b->after,
		};
	}
}

/* All of the blob's frames are OPEN, or nothing was done. */
static int take_frames(struct kvmm_blob *b, struct kvmm_own *o, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		if (!kvmm_own_del_open(o, b->frame[i]))
			break;
	if (i == n)
		return 0;
	while (i)
		kvmm_own_add_open(o, b->frame[--i]);
	return kvmm_fail(-EINVAL,
			 "a frame of this blob was freed or published");
}

static int post(struct kvmm_blob *b, struct kvmm_job *op, uint32_t n)
{
	struct kvmm_req *rq = b->rq;
	struct kvmm_own *o = kvmm_req_own(rq, b->view);
	unsigned int i;
	uint32_t j;
	int err;

	err = take_frames(b, o, n);
	if (err)
		return err;
	for (j = 0; j < n; j++)
		kvmm_pin(b->view, b->frame[j]);
	rq->nr_ops++;
	err = kvmm_op_post(op);
	if (err) {
		rq->nr_ops--;
		for (j = 0; j < n; j++) {
			kvmm_unpin(b->view, b->frame[j]);
			kvmm_own_add_open(o, b->frame[j]);
		}
		return err;
	}
	b->state = BLOB_COMMITTING;
	/* what it had too much of */
	frames_back(b, n, b->after);
	b->n = n;
	/* a part that found no room has its answer, and so has the blob */
	for (i = 0; i < op->nr_parts; i++)
		if (!op->part[i].pending)
			kvmm_blob_result(op, &op->part[i], -EAGAIN, NULL);
	return 0;
}

static int commit_check(struct kvmm_req *rq, struct kvmm_blob *b,
			uint64_t len, uint64_t after) __must_hold(&rq->lock)
{
	struct kvmm_view *v;
	int err;

	if (b->state != BLOB_OPEN)
		return kvmm_fail(-EINVAL, "the blob is somebody's already");
	if (len > b->len)
		return kvmm_fail(-EINVAL,
			"%llu bytes, the blob was begun with %llu",
			(unsigned long long)len, (unsigned long long)b->len);
	err = kvmm_publish_view(rq, b->view->cls, b->view->node, &v);
	if (err)
		return err;
	if (v != b->view)
		return kvmm_fail(-ESTALE,
			"the window has been closed since the blob was begun");
	if (b->span.kind == SPAN_COPY && after > kvmm_era_step(rq->att->era))
		return kvmm_fail(-EAGAIN,
			"this blob is copied, and step %llu still writes it",
			(unsigned long long)after);
	return 0;
}

static int commit(struct kvmm_req *rq, struct kvmm_blob *b, uint64_t len,
		  uint32_t cost_us, uint64_t after, uint64_t tag)
	__must_hold(&rq->lock)
{
	uint64_t was_len = b->len;
	uint32_t n, was_n = b->n;
	struct ring_pub *pub;
	struct kvmm_job *op;
	int err;

	err = commit_check(rq, b, len, after);
	if (err)
		return err;
	n = blob_chunks(len, b->view->page_bytes);
	if (b->span.kind == SPAN_COPY)
		err = kvmm_span_out(&b->span, b->view, b->frame, n);
	if (err)
		return err;
	b->after = after;
	b->len = len;
	b->n = n;
	write_head(b);
	b->n = was_n;
	/*
	 * Only the head's key is wanted then. Where the mode has changed by the
	 * time the daemon reads it, a head alone would be a blob that nobody can
	 * read: it is bound to a chunk that is not there, and refused.
	 */
	if (atomic_load_explicit(&rq->att->era->hdr->space[rq->att->ix].mode,
				 memory_order_relaxed) == KVMM_MODE_OBSERVE)
		n = 1;
	op = kvmm_op_alloc(rq->k, n, 1);
	pub = malloc(n * sizeof(*pub));
	err = op && pub ? 0 : kvmm_fail(-ENOMEM, "out of memory");
	if (err)
		goto out_free;
	op->rq = rq;
	op->era = rq->att->era;
	op->blob = b;
	op->done.tag = tag;
	op->done.op = KVMM_OP_BLOB;
	op->done.n = 1;
	op->res[0] = (struct kvmm_result){ 0 };
	fill_pubs(b, op, pub, n, cost_us);
	make_parts(b, op, pub, n);
	err = post(b, op, n);
out_free:
	free(pub);
	if (err)
		b->len = was_len;
	if (err && op)
		kvmm_op_recycle(rq->k, op);
	/* a step that still writes does so until the request's end at most */
	if (!err && after <= kvmm_era_step(rq->att->era))
		kvmm_span_fini(&b->span);
	return err;
}

int kvmm_blob_commit(struct kvmm_blob *b, uint64_t len, uint32_t cost_us,
		     uint64_t after, uint64_t tag)
{
	struct kvmm_req *rq = b->rq;
	struct kvmm *k = rq->k;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	err = commit(rq, b, len, cost_us, after, tag);
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return err;
}

/* -- the rest ------------------------------------------------------------------------- */

/* The handle goes; that the head was used is remembered, once. */
static void put(struct kvmm_req *rq, struct kvmm_blob *b)
	__must_hold(&rq->lock)
{
	const struct kvmm_blob *other;

	if (b->state == BLOB_OPEN) {
		frames_back(b, 0, 0);
		blob_forget(b);
		return;
	}
	blob_unpin(b);
	kvmm_span_fini(&b->span);
	b->state = BLOB_PUT;
	other = kvmm_blobs_find(rq, b->view, b->frame[0], b->word);
	if (other != b)
		blob_forget(b);
	kvmm_req_show_pins(rq);
}

void kvmm_blob_put(struct kvmm_blob *b)
{
	struct kvmm_req *rq;

	if (!b || !kvmm_enter(b->rq->k))
		return;
	rq = b->rq;
	kvmm_lock(&rq->lock);
	put(rq, b);
	kvmm_unlock(&rq->lock);
	kvmm_exit(rq->k);
}

void kvmm_blob_abort(struct kvmm_blob *b)
{
	kvmm_blob_put(b);
}

void *kvmm_blob_ptr(const struct kvmm_blob *b)
{
	if (kvmm_forked(b->rq->k)) {
		kvmm_fail_forked();
		return NULL;
	}
	return b->span.addr + sizeof(struct blob_hdr);
}

uint64_t kvmm_blob_len(const struct kvmm_blob *b)
{
	if (kvmm_forked(b->rq->k)) {
		kvmm_fail_forked();
		return 0;
	}
	return b->len;
}
