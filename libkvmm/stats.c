/* SPDX-License-Identifier: Apache-2.0 */
/* What a connection knows about itself, its daemon and its memory. */
#include <string.h>

#include "libkvmm/lib.h"

#define GET(k, what)	atomic_load_explicit(&(k)->stat.what,		\
					     memory_order_relaxed)

/* As much as the caller's version of the struct has; its size stays. */
static int copy_out(void *to, const void *from, size_t known, const char *what)
{
	uint32_t size;

	memcpy(&size, to, sizeof(size));
	if (size < sizeof(size))
		return kvmm_fail(-EINVAL, "%s.size is %u, sizeof is %zu", what,
				 size, known);
	if (size > known)
		size = known;
	memcpy((char *)to + sizeof(size), (const char *)from + sizeof(size),
	       size - sizeof(size));
	return 0;
}

int kvmm_stats(struct kvmm *k, struct kvmm_stats *st)
{
	struct kvmm_stats s = {
		.matches	= GET(k, matches),
		.pages_asked	= GET(k, pages_asked),
		.pages_hit	= GET(k, pages_hit),
		.pages_pending	= GET(k, pages_pending),
		.pages_lower	= GET(k, pages_lower),
		.pages_missed	= GET(k, pages_missed),
		.pin_races	= GET(k, pin_races),
		.allocs		= GET(k, allocs),
		.alloc_refused	= GET(k, alloc_refused),
		.published	= GET(k, published),
		.publish_exists	= GET(k, publish_exists),
		.publish_refused = GET(k, publish_refused),
		.fetched	= GET(k, fetched),
		.fetch_missed	= GET(k, fetch_missed),
		.late		= GET(k, late),
		.doorbells	= GET(k, doorbells),
		.touches_lost	= GET(k, touches_lost),
		.reconnects	= GET(k, reconnects),
		.keys_lost	= GET(k, keys_lost),
	};

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	s.connected = !kvmm_era_lost(kvmm_era_now(k));
	kvmm_exit(k);
	return copy_out(st, &s, sizeof(s), "kvmm_stats");
}

int kvmm_info(struct kvmm *k, struct kvmm_info *info)
{
	int err;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	err = copy_out(info, &kvmm_era_now(k)->info, sizeof(*info),
		       "kvmm_info");
	kvmm_exit(k);
	return err;
}

int kvmm_node_find(struct kvmm *k, const char *name)
{
	const struct kvmm_info *in;
	int ret = -ENOENT;
	uint32_t i;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	in = &kvmm_era_now(k)->info;
	for (i = 0; i < in->nr_nodes && ret < 0; i++)
		if (!strcmp(in->node[i].name, name))
			ret = i;
	kvmm_exit(k);
	return ret < 0 ? kvmm_fail(ret, "there is no node %s", name) : ret;
}

static uint32_t get32(const _Atomic uint32_t *p)
{
	return atomic_load_explicit((_Atomic uint32_t *)p,
				    memory_order_relaxed);
}

int kvmm_avail(const struct kvmm_space *sp, unsigned int cls, kvmm_node_t node,
	       struct kvmm_avail *av)
{
	struct kvmm *k = sp->k;
	struct kvmm_att *a;
	struct kvmm_view *v;
	int err = -EINVAL;

	if (!kvmm_enter(k))
		return kvmm_fail_forked();
	/* seq_cst: see the top of lib.h */
	a = atomic_load(&((struct kvmm_space *)sp)->att);
	v = kvmm_att_view(a, cls, node);
	if (v) {
		struct kvmm_avail r = {
			.now	= kvmm_view_count(v) + get32(&v->table->nr_free),
			.clean	= get32(&v->table->nr_clean),
			.dirty	= get32(&v->table->nr_dirty),
			.floor	= get32(&sp->reserved[cls][node]),
			.limit	= get32(&v->table->nr_limit),
		};

		err = copy_out(av, &r, sizeof(r), "kvmm_avail");
	}
	kvmm_exit(k);
	return v ? err : kvmm_fail(err,
				   "no window is open on class %u at node %u",
				   cls, node);
}
