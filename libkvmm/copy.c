/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plain copies for callers that do not work in place; in the caller's thread,
 * out of or into a mapped window.
 */
#include <string.h>

#include "libkvmm/lib.h"

static int fail_blind(const struct kvmm_view *v)
{
	return kvmm_fail(-EINVAL,
		"this member of the engine has no step, and maps nothing of node %u",
		v->node);
}

uint8_t *kvmm_frame_addr(const struct kvmm_view *v, uint32_t frame)
{
	/* acquire: pairs with win_show() in win.c */
	uint8_t *base = atomic_load_explicit(&v->base, memory_order_acquire);

	if (!base || !kvmm_view_mapped(v, frame))
		return NULL;
	return base + (size_t)frame * v->table->stride;
}

static size_t iov_bytes(const struct iovec *iov, int n)
{
	size_t sum = 0;
	int i;

	for (i = 0; i < n; i++)
		sum += iov[i].iov_len;
	return sum;
}

static int read_page(struct kvmm_req *rq, unsigned int page,
		     const struct iovec *iov, int n)
{
	struct kvmm_mset *m = kvmm_req_match(rq);
	const struct kvmm_page *p;
	const struct kvmm_view *v;
	const uint8_t *from;
	size_t left, part;
	int i;

	if (page >= m->n || n < 0)
		return kvmm_fail(-EINVAL, "there is no page %u", page);
	p = &m->page[page];
	if (!(p->flags & PAGE_PINNED))
		return kvmm_fail(-ENOENT, "page %u is not a hit", page);
	v = kvmm_mset_group(m, page)->view;
	if (v->blind)
		return fail_blind(v);
	from = kvmm_frame_addr(v, p->frame);
	if (!from)
		return kvmm_fail(-ENOENT,
			"page %u is not mapped: kvmm_win_sync()", page);
	left = p->raw_bytes && p->raw_bytes < v->page_bytes ? p->raw_bytes :
							      v->page_bytes;
	left = min(left, iov_bytes(iov, n));
	part = left;
	for (i = 0; i < n && left; i++) {
		size_t len = min(left, iov[i].iov_len);

		memcpy(iov[i].iov_base, from, len);
		from += len;
		left -= len;
	}
	return part;
}

int kvmm_read(struct kvmm_req *rq, unsigned int page, const struct iovec *iov,
	      int n)
{
	struct kvmm *k = rq->k;
	int ret;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	ret = read_page(rq, page, iov, n);
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return ret;
}

static int write_frame(struct kvmm_req *rq, unsigned int cls,
		       kvmm_node_t node, kvmm_frame_t frame,
		       const struct iovec *iov, int n) __must_hold(&rq->lock)
{
	struct kvmm_view *v = kvmm_req_view(rq, cls, node);
	struct kvmm_own *o = v ? kvmm_req_own(rq, v) : NULL;
	size_t bytes;
	uint8_t *to;
	int i;

	if (!o || !kvmm_own_has_open(o, frame))
		return kvmm_fail(-EINVAL,
			"frame %u is no OPEN frame of this request", frame);
	if (v->blind)
		return fail_blind(v);
	bytes = n < 0 ? SIZE_MAX : iov_bytes(iov, n);
	if (bytes > v->page_bytes)
		return kvmm_fail(-EINVAL, "%zu bytes into a page of %u", bytes,
				 v->page_bytes);
	to = kvmm_frame_addr(v, frame);
	if (!to)
		return kvmm_fail(-EINVAL, "frame %u is not mapped", frame);
	for (i = 0; i < n; i++) {
		memcpy(to, iov[i].iov_base, iov[i].iov_len);
		to += iov[i].iov_len;
	}
	return bytes;
}

int kvmm_write(struct kvmm_req *rq, unsigned int cls, kvmm_node_t node,
	       kvmm_frame_t frame, const struct iovec *iov, int n)
{
	struct kvmm *k = rq->k;
	int ret;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	kvmm_lock(&rq->lock);
	ret = write_frame(rq, cls, node, frame, iov, n);
	kvmm_unlock(&rq->lock);
	kvmm_exit(k);
	return ret;
}
