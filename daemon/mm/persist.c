/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What block nodes find again after a restart.
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
 * the middle. So what is found is closed under "parent of". It is checked all the
 * same: a page whose parent is not READY on this node is not taken (a journal may
 * have been damaged), nor are those that hang on it.
 *
 * Recovery. Labels come first and make spaces, then records in the order in which
 * they were written, a slice at a time. A page may be there already: published,
 * or adopted from memory, since the daemon serves meanwhile; then it gets this
 * copy, too. Until the node is online nothing can be read from it, nothing is
 * written to it, and a match of what is only there is a miss. What was found is
 * as cold as can be, in the order in which it was written.
 *
 * A removal that a crash has lost may leave two records of one page: the newer
 * one holds, whoever the older slot belongs to now.
 *
 * A label that says nothing, or is of a tenant that is not in the configuration, is
 * deleted with all that belongs to it. What fails otherwise, for lack of memory or
 * of room in a node that was made smaller, may be other tomorrow: the node asks
 * again until then, and keeps what it has.
 *
 * A space that was found and has no client lives while it has pages, as any other.
 * Labels of which nothing was found are deleted with their space.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/persist_format.h"
#include "daemon/mm/tier.h"

#define PREFETCH_AHEAD	8u
#define AHEAD_BYTES	((size_t)16 << 20)	/* some ms of a worker */
#define COLLECT_PART	1024u		/* records a call, a few more at most */
#define COLLECT_LISTS	4096u		/* ... and lists that are looked at */

static_assert(sizeof(struct space_label) + 64 + DESC_MAX_BYTES <=
	      NODE_LABEL_MAX, "a label holds any space");

/* A label that was found, and the space that it stands for. */
struct known {
	uint32_t	id;
	struct mm_space	*sp;
};

/**
 * struct recovery - finding again, while it lasts
 * @known:	@nr_known labels by number
 * @last:	the one that was looked for last
 * @stale:	slots of which a newer one was found: free when all is over
 * @refused:	labels that were not taken
 * @waits:	the one that could not be taken yet, plus one; it was told
 * @share:	records for each label, if they have the same
 */
struct recovery {
	struct known	*known;
	unsigned int	nr_known, max_known;
	struct known	last;
	struct node_slot *stale;
	unsigned int	nr_stale, max_stale;
	unsigned int	spaces, refused;
	uint64_t	waits;
	uint64_t	began_ns;
	uint64_t	share;
};

static void say(struct mm *mm, bool bad, const char *fmt, ...) __printf(3, 4);
static void say(struct mm *mm, bool bad, const char *fmt, ...)
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
	say(sp->mm, true, "node %s: no label for space %u: %s; its pages will not be found again",
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

/* -- labels that are found ------------------------------------------------------- */

/* Where @id stands, or belongs. */
static unsigned int known_place(const struct recovery *rv, uint32_t id)
{
	unsigned int lo = 0, hi = rv->nr_known;

	while (lo < hi) {
		unsigned int mid = (lo + hi) / 2;

		if (rv->known[mid].id < id)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static struct mm_space *known_space(struct recovery *rv, uint32_t id)
{
	unsigned int i;

	if (rv->last.sp && rv->last.id == id)
		return rv->last.sp;
	i = known_place(rv, id);
	if (i == rv->nr_known || rv->known[i].id != id)
		return NULL;
	rv->last = rv->known[i];
	return rv->last.sp;
}

static int known_add(struct recovery *rv, uint32_t id, struct mm_space *sp)
{
	unsigned int i = known_place(rv, id);

	if (rv->nr_known == rv->max_known) {
		unsigned int max = rv->max_known ? 2 * rv->max_known : 16;
		struct known *k = realloc(rv->known, max * sizeof(*k));

		if (!k)
			return -ENOMEM;
		rv->known = k;
		rv->max_known = max;
	}
	memmove(&rv->known[i + 1], &rv->known[i],
		(rv->nr_known++ - i) * sizeof(*rv->known));
	rv->known[i] = (struct known){ .id = id, .sp = sp };
	return 0;
}

/* What a label says; @desc lies in its bytes. */
struct found {
	char		tenant[64];
	const uint8_t	*desc;
	size_t		desc_len;
};

static int label_decode(const uint8_t *bytes, size_t len, struct found *f,
			struct errmsg *e)
{
	struct space_label l;
	struct desc d;
	int err;

	if (len < sizeof(l))
		return errmsg_set(e, -EINVAL, "it has %zu bytes", len);
	memcpy(&l, bytes, sizeof(l));
	if (l.magic != LABEL_MAGIC || l.version != LABEL_VERSION)
		return errmsg_set(e, -EINVAL, "magic 0x%08x, version %u",
				  l.magic, l.version);
	if (!l.tenant_len || l.tenant_len >= sizeof(f->tenant) || !l.desc_len ||
	    sizeof(l) + l.tenant_len + (uint64_t)l.desc_len != len)
		return errmsg_set(e, -EINVAL, "lengths %u and %u do not add up",
				  l.tenant_len, l.desc_len);
	memset(f->tenant, 0, sizeof(f->tenant));
	memcpy(f->tenant, bytes + sizeof(l), l.tenant_len);
	if (strlen(f->tenant) != l.tenant_len)
		return errmsg_set(e, -EINVAL, "a tenant's name with a NUL");
	f->desc = bytes + sizeof(l) + l.tenant_len;
	f->desc_len = l.desc_len;
	err = desc_decode(f->desc, f->desc_len, &d, e);
	if (!err)
		desc_fini(&d);
	return err;
}

/* What an error of a label means for the node: -ENOENT: away with it. */
static int label_gone(int err)
{
	return err == -ENOMEM ? err : -ENOENT;
}

/* The space of @f, made if there is none. */
static int found_space(struct mm *mm, const struct found *f,
		       struct mm_space **ret, struct errmsg *e)
{
	int mode = KVMM_MODE_ON;
	uint8_t id[32];

	desc_space_id(f->desc, f->desc_len, f->tenant, id);
	*ret = space_find(mm, id);
	if (*ret)
		return 0;
	if (mm->ops->found)
		mode = mm->ops->found(mm->o.ops_arg, f->tenant);
	if (mode == -ENOENT)
		return errmsg_set(e, mode, "tenant %s is not in the configuration",
				  f->tenant);
	if (mode < 0)
		return errmsg_set(e, mode, "tenant %s: %s", f->tenant,
				  strerror(-mode));
	return space_found(mm, f->tenant, mode, f->desc, f->desc_len, ret, e);
}

static int label_take(struct mm_node *nd, uint32_t id, const void *bytes,
		      size_t len, struct errmsg *e)
{
	struct mm_space *sp;
	struct found f;
	int err;

	err = label_decode(bytes, len, &f, e);
	if (err)
		return label_gone(err);
	err = found_space(nd->mm, &f, &sp, e);
	if (err)
		return err;
	if (sp->labelled & BIT(nd->ix))
		return errmsg_set(e, -ENOENT, "its space has another one");
	err = known_add(nd->recovery, id, sp);
	if (err)
		return errmsg_set(e, err, "out of memory");
	sp->labelled |= BIT(nd->ix);
	sp->label[nd->ix] = id;
	page_reserve(sp, sp->nr_pages + nd->recovery->share);
	return 0;
}

/* Those that are in memory already are on the disk, too, for the most part. */
static void found_expect(struct node *n, uint64_t records, void *arg)
{
	struct mm_node *nd = arg;
	const struct mm_space *sp;

	list_for_each_entry(sp, &nd->mm->spaces, link)
		records -= min(records, sp->nr_pages);
	ahead_begin(nd->mm, &nd->mm->pages_ahead, &nd->mm->pages, records,
		    AHEAD_BYTES);
}

static void found_begin(struct node *n, uint64_t labels, uint64_t records,
			void *arg)
{
	struct mm_node *nd = arg;

	if (labels)
		nd->recovery->share = records / labels;
}

static int found_label(struct node *n, uint32_t id, const void *bytes,
		       size_t len, void *arg)
{
	struct mm_node *nd = arg;
	struct errmsg e = { "" };
	int err;

	if (!nd->recovery->began_ns)
		nd->recovery->began_ns = now_ns();
	err = label_take(nd, id, bytes, len, &e);
	if (err && err != -ENOENT) {
		if (nd->recovery->waits != id + UINT64_C(1))
			say(nd->mm, true, "node %s: space %u that was found has to wait: %.300s",
			    n->name, id, e.text);
		nd->recovery->waits = id + UINT64_C(1);
	} else if (err) {
		nd->recovery->refused++;
		say(nd->mm, true, "node %s: space %u that was found is given up: %.300s",
		    n->name, id, e.text);
	} else {
		nd->recovery->spaces++;
	}
	return err;
}

/* -- pages that are found -------------------------------------------------------- */

enum verdict { TAKEN, ORPHAN, NO_SPACE, BAD, OLD, NO_MEMORY };

static bool key_is_zero(const uint8_t key[32])
{
	static const uint8_t zero[32];

	return !memcmp(key, zero, sizeof(zero));
}

static void words(const uint8_t key[32], uint64_t w[4])
{
	memcpy(w, key, 32);
}

/* Does it say something that can be true? */
static bool meta_valid(const struct mm_space *sp, const struct mm_node *nd,
		       const struct node_record *rec,
		       const struct page_meta *m)
{
	const struct desc_group *g;

	if (m->group >= sp->desc.ngroups || m->format != FORMAT_RAW ||
	    (m->flags & ~(META_CRC | META_ROOT | META_BOUND)))
		return false;
	g = &sp->desc.group[m->group];
	if (!sp->pool[g->class_ix][nd->ix])
		return false;
	return m->raw_len == sp->desc.cls[g->class_ix].page_bytes &&
	       rec->len == m->raw_len;
}

/* Its place in the node's table of slots. */
static bool slot_take(struct page *pg, struct mm_node *nd,
		      const struct node_record *rec)
{
	struct copy *c = page_copy(pg, nd);

	c->slot = rec->slot;
	c->crc = rec->crc;
	return slot_link(pg, nd);
}

/* The record before this one was of the same page, and older. */
static enum verdict page_renew(struct page *pg, struct mm_node *nd,
			       const struct node_record *rec,
			       const struct page_meta *m)
{
	struct recovery *rv = nd->recovery;
	struct copy *c = page_copy(pg, nd);

	if (rec->slot.seq <= c->slot.seq)
		return OLD;
	if (rv->nr_stale == rv->max_stale) {
		unsigned int max = rv->max_stale ? 2 * rv->max_stale : 64;
		struct node_slot *s = realloc(rv->stale, max * sizeof(*s));

		if (!s)
			return NO_MEMORY;
		rv->stale = s;
		rv->max_stale = max;
	}
	rv->stale[rv->nr_stale++] = c->slot;
	nd->c.recover_old++;
	page_crc_agree(pg, m->flags & META_CRC, m->data_crc);
	slot_unlink(pg, nd);
	slot_take(pg, nd, rec);
	return TAKEN;
}

static struct page *page_make(struct mm_space *sp, const struct page_meta *m,
			      const uint64_t key[4], struct page *parent)
{
	uint8_t flags = 0;
	struct page *pg;

	if (m->flags & META_ROOT)
		flags |= PAGE_ROOT;
	if (m->flags & META_BOUND)
		flags |= PAGE_BOUND;
	pg = page_create(sp, m->group, key, parent, flags);
	if (!pg)
		return NULL;
	pg->pos = m->pos;
	pg->cost_us = m->cost_us;
	if (m->flags & META_CRC) {
		pg->crc = m->data_crc;
		pg->flags |= PAGE_CRC;
	}
	return pg;
}

/* Is the page that it hangs on here, as READY as it is itself? */
static bool parent_here(const struct page *pg, const struct mm_node *nd)
{
	return !page_bound(pg) || copy_good(page_copy(pg->parent, nd));
}

/* Pages of a chain were written one after the other: it is @last mostly. */
static struct page *parent_of(struct mm_space *sp, const struct page_meta *m,
			      struct page *last)
{
	uint64_t up[4];

	if (last && last->space == sp && last->group == m->group &&
	    !memcmp(last->key, m->parent, sizeof(m->parent)))
		return last;
	words(m->parent, up);
	return page_find(sp, m->group, up);
}

/* @last: the page of the record before; it is that of this one afterwards. */
static enum verdict page_take(struct mm_node *nd, const struct node_record *rec,
			      struct page **last)
{
	struct page *pg, *parent = NULL;
	struct page_meta m;
	struct mm_space *sp;
	uint64_t key[4];

	memcpy(&m, rec->meta, sizeof(m));
	sp = known_space(nd->recovery, m.label);
	if (!sp)
		return NO_SPACE;
	if (!meta_valid(sp, nd, rec, &m))
		return BAD;
	words(m.key, key);
	pg = page_find(sp, m.group, key);
	if (pg && page_copy(pg, nd)->state != COPY_NONE)
		return page_renew(pg, nd, rec, &m);
	if (!pg) {
		bool bound = sp->desc.group[m.group].rule == KVMM_FULL ||
			     (m.flags & META_BOUND);

		if (!(m.flags & META_ROOT) && !key_is_zero(m.parent)) {
			parent = parent_of(sp, &m, *last);
			if (bound && (!parent ||
				      !copy_good(page_copy(parent, nd))))
				return ORPHAN;
		}
		pg = page_make(sp, &m, key, parent);
		if (!pg)
			return NO_MEMORY;
	} else {
		if (!parent_here(pg, nd))
			return ORPHAN;
		page_crc_agree(pg, m.flags & META_CRC, m.data_crc);
	}
	if (!slot_take(pg, nd, rec)) {
		page_put(pg);
		return NO_MEMORY;
	}
	page_copy(pg, nd)->flags |= COPY_KEPT;
	copy_set_state(pg, nd, COPY_READY);
	*last = pg;
	return TAKEN;
}

static void prefetch(struct mm_node *nd, const struct node_record *rec)
{
	struct page_meta m;
	struct mm_space *sp;
	uint64_t key[4];

	memcpy(&m, rec->meta, sizeof(m));
	sp = known_space(nd->recovery, m.label);
	if (!sp)
		return;
	words(m.key, key);
	page_prefetch(sp, m.group, key);
	index_below_prefetch(sp, key, m.group);
	if (nd->slots)
		__builtin_prefetch(&nd->slots[slot_list_ix(nd, rec->slot.off)],
				   1);
}

static unsigned int found_records(struct node *n, const struct node_record *rec,
				  unsigned int nr, bool *taken, void *arg)
{
	struct mm_node *nd = arg;
	struct mm_counters *ct = &nd->c;
	struct page *last = NULL;
	unsigned int i;

	for (i = 0; i < nr; i++) {
		if (i + PREFETCH_AHEAD < nr)
			prefetch(nd, &rec[i + PREFETCH_AHEAD]);
		switch (page_take(nd, &rec[i], &last)) {
		case TAKEN:
			taken[i] = true;
			ct->pgrecover++;
			break;
		case ORPHAN:
			ct->recover_orphan++;
			break;
		case NO_SPACE:
			ct->recover_label++;
			break;
		case BAD:
			ct->recover_bad++;
			break;
		case OLD:
			ct->recover_old++;
			break;
		case NO_MEMORY:
			return i;
		}
	}
	return nr;
}

/* -- the beginning and the end --------------------------------------------------- */

static void recovery_free(struct mm_node *nd)
{
	struct recovery *rv = nd->recovery;

	if (!rv)
		return;
	free(rv->known);
	free(rv->stale);
	free(rv);
	nd->recovery = NULL;
}

static void found_all(struct node *n, int err, void *arg)
{
	struct mm_node *nd = arg;
	struct recovery *rv = nd->recovery;
	const struct mm_counters *ct = &nd->c;
	unsigned int i;

	if (!err || err == -ENOENT)
		keep_store(nd);
	aheads_end(nd->mm);
	if (!rv)
		return;
	for (i = 0; i < rv->nr_stale; i++)
		node_slot_free(n, &rv->stale[i]);
	if (err && err != -ENOENT)
		say(nd->mm, true, "node %s: what it holds could not be found again: %s",
		    n->name, strerror(-err));
	else if (rv->began_ns)
		say(nd->mm, rv->refused || ct->recover_orphan ||
		    ct->recover_bad,
		    "node %s: %llu pages of %u spaces found again in %llu ms; not taken: %llu of %u spaces given up, %llu without parent, %llu wrong, %llu old",
		    n->name, (unsigned long long)ct->pgrecover, rv->spaces,
		    (unsigned long long)((now_ns() - rv->began_ns) /
					 NSEC_PER_MSEC),
		    (unsigned long long)ct->recover_label, rv->refused,
		    (unsigned long long)ct->recover_orphan,
		    (unsigned long long)ct->recover_bad,
		    (unsigned long long)ct->recover_old);
	recovery_free(nd);
	nd->mm->next_spaces_ns = 0;
	nd->mm->next_estimate_ns = 0;	/* matches may hit at once */
}

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
