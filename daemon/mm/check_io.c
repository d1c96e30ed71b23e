/* SPDX-License-Identifier: Apache-2.0 */
/* The laws of what is on its way: see check.c. */
#include "daemon/mm/tier.h"

#define broken(e, ...)	errmsg_set(e, -EUCLEAN, __VA_ARGS__)
#define llu(x)		((unsigned long long)(x))

static int check_stage(const struct mm *mm, struct errmsg *e)
{
	uint64_t reads = flights_stage_bytes(mm) + scrubs_stage_bytes(mm);
	uint64_t writes = wbacks_stage_bytes(mm);
	const struct mm_stage *st = &mm->stage;
	const struct stage *s;
	uint64_t kept = 0;

	list_for_each_entry(s, &st->kept, link)
		kept += s->bytes;
	if (reads != st->out[NODE_READ] || writes != st->out[NODE_WRITE] ||
	    reads + writes + kept != st->bytes)
		return broken(e,
			"buffers: reads %llu writes %llu kept %llu, counted as %llu and %llu of %llu",
			llu(reads), llu(writes), llu(kept),
			llu(st->out[NODE_READ]), llu(st->out[NODE_WRITE]),
			llu(st->bytes));
	return 0;
}

/* Writes to @nd, and those from its pools. */
static int check_writes(const struct mm_node *nd, struct errmsg *e)
{
	const struct mm_pool *p;
	uint64_t bytes;
	uint32_t n = wbacks_to(nd, &bytes);

	if (n != nd->wb_ios || bytes != nd->wb_bytes)
		return broken(e,
			"node %u: %u writes of %llu bytes, counted as %u of %llu",
			nd->ix, n, llu(bytes), nd->wb_ios, llu(nd->wb_bytes));
	list_for_each_entry(p, &nd->pools, node_link) {
		n = wbacks_from(p);
		if (n != p->nr_writing)
			return broken(e,
				"space %u, class %u, node %u: %u writes, counted as %u",
				p->space->ix, p->cls, nd->ix, n,
				p->nr_writing);
	}
	return 0;
}

int check_io(const struct mm *mm, struct errmsg *e)
{
	unsigned int i;
	int err = check_stage(mm, e);

	for (i = 0; !err && i < mm->nr_nodes; i++)
		err = check_writes(&mm->node[i], e);
	return err;
}
