/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What block nodes are told, so that they find it again after a restart.
 *
 * The node remembers, the page is ours. With each slot a persistent node keeps a
 * record, in which the page says who it is (struct page_meta); what all pages of
 * a space have in common is a label of the node's (struct space_label): tenant
 * and descriptor, from which the space can be made again. So a record means
 * something as long as its label is there, and a label is put before the first
 * page of its space is written.
 *
 * Order. Records are added when a copy turns READY, parents first, and what goes
 * goes children first; a crash loses the last of what was said and nothing from
 * the middle. So what is found is closed under "parent of".
 *
 * What is made of it at the next start: recover.c.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/mm/persist_format.h"
#include "daemon/mm/recover.h"

#define COLLECT_PART	1024u		/* records a call, a few more at most */
#define COLLECT_LISTS	4096u		/* ... and lists that are looked at */

static_assert(sizeof(struct space_label) + 64 + DESC_MAX_BYTES <=
	      NODE_LABEL_MAX, "a label holds any space");

void persist_say(struct mm *mm, bool bad, const char *fmt, ...)
{
	char buf[512];
	va_list ap;

	if (!mm->ops->said)
		return;
	va_start(ap, fmt);
	vsnprintf(buf, sizeof(buf), fmt, ap);
	va_end(ap);
	mm->ops->said(mm->o.ops_arg, bad, buf);
}

/* -- what is kept ---------------------------------------------------------------- */

static int label_put(struct mm_space *sp, struct mm_node *nd)
{
	struct space_label l = {
		.magic		= LABEL_MAGIC,
		.version	= LABEL_VERSION,
		.tenant_len	= (uint16_t)strlen(sp->tenant),
		.desc_len	= (uint32_t)sp->desc_len,
	};
	size_t len = sizeof(l) + l.tenant_len + l.desc_len;
	uint8_t *buf = malloc(len);
	int err;

	if (!buf)
		return -ENOMEM;
	memcpy(buf, &l, sizeof(l));
	memcpy(buf + sizeof(l), sp->tenant, l.tenant_len);
	memcpy(buf + sizeof(l) + l.tenant_len, sp->desc_bytes, l.desc_len);
	err = node_label_put(nd->node, buf, len, &sp->label[nd->ix]);
	free(buf);
	if (!err)
		sp->labelled |= BIT(nd->ix);
	return err;
}

/*
 * Without room for a label the space's pages go down all the same: they serve
 * until the next restart.
 */
int persist_label(struct mm_space *sp, struct mm_node *nd)
{
	int err;

	if (((sp->labelled | sp->unlabelled) & BIT(nd->ix)) ||
	    !node_persistent(nd->node))
		return 0;
	err = label_put(sp, nd);
	if (err != -ENOSPC && err != -E2BIG && err != -EOPNOTSUPP)
		return err;
	/* for good: pages that hang on one without a record are of no use */
	sp->unlabelled |= BIT(nd->ix);
	persist_say(sp->mm, true, "node %s: no label for space %u: %s; its pages will not be found again",
		    nd->node->name, sp->ix, strerror(-err));
	return 0;
}

static void record_fill(const struct page *pg, const struct mm_node *nd,
			struct node_record *rec)
{
	const struct copy *c = page_copy(pg, nd);
	struct page_meta m = {
		.label		= pg->space->label[nd->ix],
		.raw_len	= pg->raw_bytes,
		.pos		= pg->pos,
		.cost_us	= pg->cost_us,
		.data_crc	= pg->flags & PAGE_CRC ? pg->crc : 0,
		.group		= pg->group,
		.format		= FORMAT_RAW,
	};

	memcpy(m.key, pg->key, sizeof(m.key));
	if (pg->parent)
		memcpy(m.parent, pg->parent->key, sizeof(m.parent));
	if (pg->flags & PAGE_CRC)
		m.flags |= META_CRC;
	if (pg->flags & PAGE_ROOT)
		m.flags |= META_ROOT;
	if (pg->flags & PAGE_BOUND)
		m.flags |= META_BOUND;
	rec->slot = c->slot;
	rec->len = pg->raw_bytes;
	rec->crc = c->crc;
	memcpy(rec->meta, &m, sizeof(m));
}

void persist_add(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);
	struct node_record rec;

	if (!(pg->space->labelled & BIT(nd->ix)))
		return;
	record_fill(pg, nd, &rec);
	node_record_add(nd->node, &rec);
	c->flags |= COPY_KEPT;
}

void persist_del(struct page *pg, struct mm_node *nd)
{
	struct copy *c = page_copy(pg, nd);

	if (!(c->flags & COPY_KEPT))
		return;
	c->flags &= ~COPY_KEPT;
	node_record_del(nd->node, &c->slot);
}

void persist_space_end(struct mm_space *sp)
{
	struct mm *mm = sp->mm;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		if (sp->labelled & BIT(i))
			node_label_del(mm->node[i].node, sp->label[i]);
	sp->labelled = 0;
	sp->unlabelled = 0;
}

bool persist_waits(const struct mm_space *sp)
{
	const struct mm *mm = sp->mm;
	unsigned int i;

	for (i = 0; sp->labelled && i < mm->nr_nodes; i++)
		if ((sp->labelled & BIT(i)) && mm->node[i].recovery)
			return true;
	return false;
}

/*
 * A part of what a checkpoint needs. The copies of a list stay in it while they
 * have their slot, so that none is missed by going on with the next list.
 */
static bool collect(struct node *n, uint64_t *cursor, void *arg)
{
	struct mm_node *nd = arg;
	unsigned int lists = 0, nr = 0;
	struct node_record rec;
	struct copy *c;

	for (; *cursor < nd->nr_slot_lists; ++*cursor) {
		if (nr >= COLLECT_PART || lists++ >= COLLECT_LISTS)
			return false;
		for (c = nd->slots[*cursor]; c; c = c->slot_next) {
			if (!(c->flags & COPY_KEPT))
				continue;
			record_fill(copy_page(c, nd), nd, &rec);
			node_record_again(n, &rec);
			nr++;
		}
	}
	return true;
}

/* -- the owner of each block node ------------------------------------------------- */

int persist_init(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i];

		if (nd->mem)
			continue;
		nd->owner = (struct node_owner){
			.expect		= found_expect,
			.begin		= found_begin,
			.label		= found_label,
			.records	= found_records,
			.recovered	= found_all,
			.collect	= collect,
			.arg		= nd,
		};
		/* some keep nothing when there is nobody to keep it for */
		node_set_owner(nd->node, &nd->owner);
		if (!node_persistent(nd->node)) {
			node_set_owner(nd->node, NULL);
			continue;
		}
		nd->recovery = calloc(1, sizeof(*nd->recovery));
		if (!nd->recovery)
			return -ENOMEM;
	}
	return 0;
}

void persist_fini(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i];

		if (nd->node && nd->node->owner == &nd->owner)
			node_set_owner(nd->node, NULL);
		recovery_free(nd);
	}
}
