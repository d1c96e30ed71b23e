/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What block nodes have found again after a restart: pages, and when that is over.
 *
 * What is found is closed under "parent of" (persist.c). It is checked all the
 * same: a page whose parent is not READY on this node is not taken (a journal may
 * have been damaged), nor are those that hang on it.
 *
 * Recovery. Labels come first and make spaces (recover_label.c), then records in
 * the order in which they were written, a slice at a time. A page may be there
 * already: published, or adopted from memory, since the daemon serves meanwhile;
 * then it gets this copy, too. Until the node is online nothing can be read from
 * it, nothing is written to it, and a match of what is only there is a miss. What
 * was found is as cold as can be, in the order in which it was written.
 *
 * A removal that a crash has lost may leave two records of one page: the newer
 * one holds, whoever the older slot belongs to now.
 *
 * What fails for lack of memory, or of room in a node that was made smaller, may be
 * other tomorrow: the node asks again until then, and keeps what it has.
 */
#include <stdlib.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/persist_format.h"
#include "daemon/mm/recover.h"

#define PREFETCH_AHEAD	8u
#define AHEAD_BYTES	((size_t)16 << 20)	/* some ms of a worker */

/* Those that are in memory already are on the disk, too, for the most part. */
void found_expect(struct node *n, uint64_t records, void *arg)
{
	struct mm_node *nd = arg;
	const struct mm_space *sp;

	list_for_each_entry(sp, &nd->mm->spaces, link)
		records -= min(records, sp->nr_pages);
	ahead_begin(nd->mm, &nd->mm->pages_ahead, &nd->mm->pages, records,
		    AHEAD_BYTES);
}

void found_begin(struct node *n, uint64_t labels, uint64_t records,
		 void *arg)
{
	struct mm_node *nd = arg;

	if (labels)
		nd->recovery->share = records / labels;
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
	sp = recovery_space(nd->recovery, m.label);
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
	sp = recovery_space(nd->recovery, m.label);
	if (!sp)
		return;
	words(m.key, key);
	page_prefetch(sp, m.group, key);
	index_below_prefetch(sp, key, m.group);
	if (nd->slots)
		__builtin_prefetch(&nd->slots[slot_list_ix(nd, rec->slot.off)],
				   1);
}

unsigned int found_records(struct node *n, const struct node_record *rec,
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

void recovery_free(struct mm_node *nd)
{
	struct recovery *rv = nd->recovery;

	if (!rv)
		return;
	free(rv->known);
	free(rv->stale);
	free(rv);
	nd->recovery = NULL;
}

void found_all(struct node *n, int err, void *arg)
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
		persist_say(nd->mm, true, "node %s: what it holds could not be found again: %s",
			    n->name, strerror(-err));
	else if (rv->began_ns)
		persist_say(nd->mm, rv->refused || ct->recover_orphan ||
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
