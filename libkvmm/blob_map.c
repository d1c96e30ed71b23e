/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blobs, the reader's half.
 *
 * The head says how many chunks there are and, with its key, what theirs are.
 * Its header is copied before it is looked at. The chunks are a match of their
 * own then: looked up and pinned as pages of one group, and what is not on the
 * node is asked of the daemon, head first and then all the others at once. A
 * chunk that the index does not know is asked for, too: a line may have lost its
 * place.
 *
 * The calling thread waits for its loads (kvmm_op_wait()). Pins are the blob's
 * from the beginning, apart from those of the match that named it, so that a
 * failure leaves these as they were, and so does a later match or a trim.
 */
#include <stdlib.h>
#include <string.h>

#include "libkvmm/lib.h"

/**
 * struct mapping - a blob on its way
 * @m:		chunks [0, m.n); the head first
 */
struct mapping {
	struct kvmm_req	*rq;
	struct kvmm_view *v;
	uint64_t	deadline_ns;
	struct kvmm_mset m;
	struct blob_hdr	hdr;
};

/* -- loads ------------------------------------------------------------------------- */

void kvmm_blob_fetched(struct kvmm_job *op, const struct kvmm_op_part *part,
		       int err, const struct ring_result *res)
{
	struct kvmm_view *v = part->view;
	uint64_t good = 0;
	uint32_t i;

	for (i = 0; i < part->n; i++) {
		const struct kvmm_op_page *pg = &op->page[part->first + i];
		struct kvmm_page *p = &op->load->page[pg->page];
		const struct ring_result *r = res ? &res[i] : NULL;
		struct kvmm_result *out = &op->res[pg->res];

		out->result = r ? r->result : err;
		if (out->result)
			continue;
		if (!r || !r->frame || r->frame >= v->max_frames ||
		    !kvmm_pin_word(v, r->frame, r->word)) {
			out->result = -ENOENT;
			continue;
		}
		p->state = KVMM_HIT;
		p->frame = r->frame;
		p->fword = r->word;
		p->flags |= PAGE_PINNED;
		op->load->nr_pins++;
		good++;
	}
	stat_add(op->era->k, fetched, good);
	if (good < part->n)
		stat_add(op->era->k, fetch_missed, part->n - good);
}

/* Pages that are not pinned, into @op and @key, in parts of one entry each. */
static void ask(struct mapping *mp, struct kvmm_job *op, struct ring_key *key)
{
	struct kvmm_mset *m = &mp->m;
	struct kvmm_op_part *part = NULL;
	uint32_t i, at = 0;

	for (i = 0; i < m->n; i++) {
		if (m->page[i].flags & PAGE_PINNED)
			continue;
		if (!part || part->n == KVMM_MAX_BATCH) {
			part = &op->part[op->nr_parts++];
			part->view = mp->v;
			part->first = at;
			part->n = 0;
			part->pending = false;
			part->array = key + at;
		}
		memset(&key[at], 0, sizeof(key[at]));
		memcpy(key[at].key, m->key[i], sizeof(key[at].key));
		key[at].group = m->g[0].group;
		op->page[at] = (struct kvmm_op_page){ .page = i, .res = at };
		part->n++;
		at++;
	}
}

static int load_post(struct mapping *mp, struct kvmm_job *op)
{
	struct kvmm_req *rq = mp->rq;
	unsigned int i;
	int err;

	for (i = 0; i < op->nr_parts; i++) {
		struct kvmm_op_part *part = &op->part[i];

		part->bytes = part->n * sizeof(struct ring_key);
		part->sqe = (struct ring_sqe){
			.op	= RING_FETCH,
			.space	= rq->att->ix,
			.win	= mp->v->no,
			.n	= part->n,
			.req	= rq->slot,
			.arg	= mp->deadline_ns,
		};
	}
	rq->nr_ops++;
	err = kvmm_op_post(op);
	if (err) {
		rq->nr_ops--;
		return err;
	}
	for (i = 0; i < op->nr_parts; i++)
		if (!op->part[i].pending)
			kvmm_blob_fetched(op, &op->part[i], -EAGAIN, NULL);
	return 0;
}

/* Ask for what is not pinned, @n pages; the operation in *@ret. */
static int load(struct kvmm_req *rq, struct mapping *mp, uint32_t n,
		struct kvmm_job **ret) __must_hold(&rq->lock)
{
	struct kvmm_job *op;
	struct ring_key *key;
	int err = kvmm_req_alive(rq);

	if (err)
		return err;
	op = kvmm_op_alloc(rq->k, n, n);
	if (!op)
		return -ENOMEM;
	op->rq = rq;
	op->era = rq->att->era;
	op->load = &mp->m;
	op->done.op = LIB_OP_LOAD;
	op->done.n = n;
	op->deadline_ns = mp->deadline_ns > DEADLINE_NONE - LIB_LATE_GRACE_NS ?
			  DEADLINE_NONE : mp->deadline_ns + LIB_LATE_GRACE_NS;
	key = kvmm_op_keys(op, n);
	err = key ? 0 : -ENOMEM;
	if (!err) {
		ask(mp, op, key);
		err = load_post(mp, op);
	}
	if (err) {
		kvmm_op_recycle(rq->k, op);
		return err;
	}
	*ret = op;
	return 0;
}

/*
 * What the answers come to: 0, go on; or why the blob cannot be had. A page for
 * which there was no frame at the moment is asked for again if others came.
 */
static int loaded(const struct mapping *mp, const struct kvmm_job *op)
{
	uint32_t i, good = 0;
	int again = 0;

	for (i = 0; i < op->done.n; i++) {
		int err = op->res[i].result;

		good += !err;
		if (err == -EAGAIN) {
			again = err;
			continue;
		}
		if (err == -ENOENT && deadline_past(mp->deadline_ns))
			err = -ETIMEDOUT;
		if (err)
			return kvmm_fail(err, err == -ENOENT ?
				"a part of the blob is nowhere" :
				err == -ETIMEDOUT ?
				"the blob could not be loaded in time" :
				"the blob could not be loaded");
	}
	if (!again || good)
		return 0;
	return kvmm_fail(-EAGAIN, "there are no frames to load the blob into");
}

/* -- pages ------------------------------------------------------------------------- */

/* Pin what is on the node; how many of the pages are not. */
static uint32_t pin_here(struct mapping *mp)
{
	struct kvmm_mset *m = &mp->m;
	uint32_t lo;

	if (m->nr_pins == m->n)
		return 0;
	kvmm_look(mp->rq->att, m, &m->g[0], 0, m->n);
	for (lo = 0; lo < m->n; lo++)
		lo = kvmm_pin_range(mp->rq->att, m, &m->g[0], lo, m->n);
	return m->n - m->nr_pins;
}

/* Not now, and there is no time to wait. */
static int not_here(const struct mapping *mp)
{
	uint32_t i;

	for (i = 0; i < mp->m.n; i++)
		if (mp->m.page[i].state == KVMM_MISS)
			return kvmm_fail(-ENOENT,
				"a part of the blob is nowhere");
	return kvmm_fail(-EAGAIN, mp->m.sync_wanted ?
		"a part of the blob is not mapped here: kvmm_win_sync()" :
		"a part of the blob has to be loaded");
}

/* Pin all of mp->m. */
static int pin_all(struct mapping *mp)
{
	struct kvmm_req *rq = mp->rq;
	struct kvmm *k = rq->k;
	struct kvmm_job *op;
	uint32_t n;
	int err;

	kvmm_lock(&rq->lock);
	for (n = pin_here(mp); n; n = mp->m.n - mp->m.nr_pins) {
		err = mp->deadline_ns ? load(rq, mp, n, &op) : not_here(mp);
		if (err)
			goto out_unlock;
		kvmm_unlock(&rq->lock);
		kvmm_exit(k);
		kvmm_op_wait(k, op);
		if (!kvmm_enter(k))
			return kvmm_fail_forked();
		kvmm_lock(&rq->lock);
		err = loaded(mp, op);
		kvmm_op_recycle(k, op);
		if (err)
			goto out_unlock;
	}
	err = 0;
out_unlock:
	kvmm_unlock(&rq->lock);
	return err;
}

/* -- the call ------------------------------------------------------------------------ */

static int pages_alloc(struct kvmm_mset *m, uint32_t n)
{
	uint32_t i;

	m->key = malloc(n * sizeof(*m->key));
	m->page = malloc(n * sizeof(*m->page));
	if (!m->key || !m->page)
		return kvmm_fail(-ENOMEM, "out of memory");
	for (i = 0; i < n; i++)
		m->page[i] = (struct kvmm_page){ .state = PAGE_UNKNOWN };
	m->n = n;
	m->g[0].n = n;
	return 0;
}

static void pages_free(struct kvmm_mset *m)
{
	free(m->key);
	free(m->page);
}

/* The head as the match has it; pinned once more if it is. */
static int map_begin(struct kvmm_req *rq, struct mapping *mp,
		     unsigned int page) __must_hold(&rq->lock)
{
	struct kvmm_mset *m = kvmm_req_match(rq);
	const struct kvmm_mgroup *g;
	const struct kvmm_page *p;
	int err;

	if (page >= m->n)
		return kvmm_fail(-EINVAL, "there is no page %u", page);
	g = kvmm_mset_group(m, page);
	p = &m->page[page];
	err = kvmm_blob_group(rq, g->group);
	if (!err)
		err = kvmm_req_alive(rq);
	if (!err)
		err = kvmm_blob_node(rq, m->node);
	if (err)
		return err;
	if (!kvmm_req_answers(rq) || p->state == PAGE_UNKNOWN ||
	    p->state == KVMM_MISS)
		return kvmm_fail(-ENOENT, "page %u is not there", page);
	mp->v = kvmm_req_view(rq, g->cls, m->node);
	if (!mp->v)
		return kvmm_fail(-EINVAL,
			"no window is open on class %u at node %u", g->cls,
			m->node);
	mp->m.node = m->node;
	mp->m.ngroups = 1;
	mp->m.g[0] = (struct kvmm_mgroup){
		.group = g->group, .rule = g->rule, .cls = g->cls, .ratio = 1,
		.view = mp->v,
	};
	err = pages_alloc(&mp->m, 1);
	if (err)
		return err;
	memcpy(mp->m.key[0], m->key[page], sizeof(mp->m.key[0]));
	if ((p->flags & PAGE_PINNED) && g->view == mp->v) {
		mp->m.page[0] = *p;
		mp->m.nr_pins = 1;
		kvmm_pin(mp->v, p->frame);
	}
	return 0;
}

/* Is it a blob at all? Then there is room for its other chunks afterwards. */
static int read_head(struct mapping *mp)
{
	const uint8_t *at = kvmm_frame_addr(mp->v, mp->m.page[0].frame);
	uint64_t (*key)[4] = mp->m.key;
	struct kvmm_page *page = mp->m.page;
	uint32_t i;
	int err;

	if (!at)
		return kvmm_fail(-EAGAIN,
			"the blob's head is not mapped here: kvmm_win_sync()");
	if (mp->v->page_bytes < sizeof(mp->hdr))
		return kvmm_fail(-EBADMSG, "this page is no blob");
	memcpy(&mp->hdr, at, sizeof(mp->hdr));
	if (!blob_hdr_good(&mp->hdr, (uint8_t *)key[0], mp->v->page_bytes))
		return kvmm_fail(-EBADMSG, "this page is no blob");
	if (mp->hdr.nchunks == 1)
		return 0;
	if (mp->v->table->stride != mp->v->page_bytes)
		return kvmm_fail(-EBADMSG, "this page is no blob of its class");
	err = pages_alloc(&mp->m, mp->hdr.nchunks);
	if (err) {
		/* the pin is in the old ones */
		pages_free(&mp->m);
		mp->m.key = key;
		mp->m.page = page;
		return err;
	}
	memcpy(mp->m.key[0], key[0], sizeof(key[0]));
	mp->m.page[0] = page[0];
	for (i = 1; i < mp->m.n; i++)
		blob_chunk_key((uint8_t *)key[0], mp->hdr.id, i,
			       (uint8_t *)mp->m.key[i]);
	free(key);
	free(page);
	return 0;
}

/* All is pinned: the pins are the blob's. */
static int map_end(struct mapping *mp, struct kvmm_blob **ret)
{
	struct kvmm_req *rq = mp->rq;
	struct kvmm_blob *b;
	uint32_t i;
	int err;

	b = kvmm_blob_alloc(rq, mp->v, mp->m.g[0].group, mp->m.n);
	if (!b)
		return -ENOMEM;
	for (i = 0; i < b->n; i++)
		b->frame[i] = mp->m.page[i].frame;
	err = kvmm_span_init(&b->span, mp->v, b->frame, b->n);
	if (err) {
		kvmm_blob_free(b);
		return err;
	}
	if (b->span.kind == SPAN_COPY)
		kvmm_span_in(&b->span, mp->v, b->frame, b->n);
	b->state = BLOB_MAPPED;
	b->nr_pins = b->n;
	b->word = mp->m.page[0].fword;
	b->len = mp->hdr.len;
	mp->m.nr_pins = 0;
	kvmm_lock(&rq->lock);
	list_add_tail(&rq->blobs, &b->link);
	kvmm_req_show_pins(rq);
	kvmm_unlock(&rq->lock);
	*ret = b;
	return 0;
}

int kvmm_blob_map(struct kvmm_req *rq, unsigned int page, uint64_t deadline_ns,
		  struct kvmm_blob **ret)
{
	struct mapping mp = { .rq = rq, .deadline_ns = deadline_ns };
	struct kvmm *k = rq->k;
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	err = map_begin(rq, &mp, page);
	kvmm_unlock(&rq->lock);
	if (!err)
		err = pin_all(&mp);
	if (!err)
		err = read_head(&mp);
	if (!err && mp.hdr.nchunks > 1)
		err = pin_all(&mp);
	if (!err)
		err = map_end(&mp, ret);
	kvmm_mset_unpin(&mp.m);
	pages_free(&mp.m);
	kvmm_exit(k);
	return err;
}
