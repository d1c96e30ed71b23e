/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames of the last daemon's that are nobody's yet.
 *
 *	STRAY_IO	until every block node says that it is past recovery, and so
 *			has the lock that the last daemon's I/O held
 *	STRAY_ORPHAN	until then, too: its parent may be found there. Then it is a
 *			page again, or goes
 *	STRAY_PINNED	until its last pin is gone
 *
 * All are LOADING meanwhile: nobody can pin them any more, and what was pinned
 * before stays as it is. The record of an orphan is kept: a daemon that dies now
 * leaves to the next one what it was left.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/tier.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define LOOK_NS		(10 * NSEC_PER_MSEC)

struct stray {
	struct mm_pool	*pool;
	uint32_t	f;
	uint32_t	pos;
	enum stray_kind	kind;
};

/**
 * struct adopt - what is left to be adopted
 * @nr_pinned:	of them
 */
struct adopt {
	struct stray	*stray;
	uint64_t	nr, cap;
	uint64_t	next_ns;
};

static bool stray_room(struct mm *mm)
{
	struct adopt *a = mm->adopt;
	struct stray *more;
	uint64_t cap;

	if (!a)
		a = mm->adopt = calloc(1, sizeof(*a));
	if (!a)
		return false;
	if (a->nr < a->cap)
		return true;
	cap = a->cap ? 2 * a->cap : 1024;
	more = realloc(a->stray, cap * sizeof(*more));
	if (!more)
		return false;
	a->stray = more;
	a->cap = cap;
	return true;
}

void stray_add(struct mm_pool *p, uint32_t f, enum stray_kind kind)
{
	struct mm *mm = p->space->mm;
	struct frame_meta *m = &p->meta[f];

	frame_word_set(p, f, frame_word(m->gen, FRAME_LOADING));
	m->page = NULL;
	m->flags = FMETA_READ;
	p->nr_loading++;
	if (kind == STRAY_ORPHAN)
		mm->adopted.waiting++;
	if (stray_room(mm))
		mm->adopt->stray[mm->adopt->nr++] = (struct stray){
			.pool = p, .f = f, .kind = kind,
			.pos = p->record[f].pos,
		};
}

static void stray_free(struct stray *s)
{
	frame_put(s->pool, s->f);
	s->pool = NULL;
}

/* Free, or waits for its last unpin. */
static void stray_let_go(struct stray *s)
{
	if (frame_pins(s->pool, s->f))
		s->kind = STRAY_PINNED;
	else
		stray_free(s);
}

/* A page again: made, or with one more copy. */
static bool stray_revive(struct stray *s)
{
	struct mm_pool *p = s->pool;
	struct frame_meta *m = &p->meta[s->f];
	const struct frame_record *r = &p->record[s->f];
	struct mm_space *sp = p->space;
	struct page *pg, *parent;
	uint64_t key[4], up[4];
	struct copy *c;

	if (!record_good(p, r, m->gen))
		return false;
	memcpy(key, r->key, sizeof(key));
	memcpy(up, r->parent, sizeof(up));
	pg = page_find(sp, r->group, key);
	if (!pg) {
		parent = page_find(sp, r->group, up);
		if (!parent)
			return false;
		pg = record_page(sp, r, parent);
		if (!pg)
			return false;
	}
	if (page_copy(pg, p->nd)->state != COPY_NONE)
		return false;		/* it came otherwise meanwhile */
	c = copy_get(pg, p->nd);
	if (!c) {
		page_put(pg);
		return false;
	}
	m->flags = 0;
	m->page = pg;
	p->nr_loading--;
	c->frame = s->f;
	frame_word_set(p, s->f, frame_word(m->gen, FRAME_READY));
	copy_set_state(pg, p->nd, COPY_READY);
	sp->mm->adopted.frames++;
	s->pool = NULL;
	return true;
}

static void stray_decide(struct mm *mm, struct stray *s)
{
	switch (s->kind) {
	case STRAY_IO:
		/* or pinned and of no use, in the words of one before the last */
		stray_let_go(s);
		break;
	case STRAY_ORPHAN:
		mm->adopted.waiting--;
		if (stray_revive(s))
			break;
		mm->adopted.lost++;
		stray_let_go(s);
		break;
	case STRAY_PINNED:
		stray_let_go(s);
		break;
	}
}

/* Parents before their children. */
static int by_pos(const void *a, const void *b)
{
	const struct stray *x = a, *y = b;

	return x->pos < y->pos ? -1 : x->pos > y->pos;
}

/*
 * A node that has failed may have failed to get the lock: what its I/O may write
 * to stays where it is.
 */
static void nodes_ask(const struct mm *mm, bool *starting, bool *failed)
{
	unsigned int i;

	*starting = *failed = false;
	for (i = 0; i < mm->nr_nodes; i++) {
		if (mm->node[i].mem)
			continue;
		*starting |= mm->node[i].node->state == NODE_STARTING;
		*failed |= mm->node[i].node->state == NODE_FAILED;
	}
}

static void strays_pack(struct adopt *a)
{
	uint64_t i, n = 0;

	for (i = 0; i < a->nr; i++)
		if (a->stray[i].pool)
			a->stray[n++] = a->stray[i];
	a->nr = n;
}

static void feed_pools(struct mm *mm)
{
	struct mm_pool *p;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		if (mm->node[i].mem)
			list_for_each_entry(p, &mm->node[i].pools, node_link)
				pool_feed(p);
}

void stray_settle(struct mm *mm)
{
	struct adopt *a = mm->adopt;
	bool starting, failed;
	uint64_t i;

	if (!a)
		return;
	nodes_ask(mm, &starting, &failed);
	qsort(a->stray, a->nr, sizeof(*a->stray), by_pos);
	for (i = 0; i < a->nr; i++) {
		struct stray *s = &a->stray[i];

		if (s->kind != STRAY_PINNED &&
		    (starting || (failed && s->kind == STRAY_IO)))
			continue;
		stray_decide(mm, s);
	}
	strays_pack(a);
	if (!a->nr)
		adopt_fini(mm);
}

uint64_t adopt_run(struct mm *mm, uint64_t now_ns)
{
	struct adopt *a = mm->adopt;
	uint64_t before;

	if (!a || mm->stopping)
		return UINT64_MAX;
	if (now_ns < a->next_ns)
		return a->next_ns;
	a->next_ns = now_ns + LOOK_NS;
	before = a->nr;
	stray_settle(mm);
	if (!mm->adopt || mm->adopt->nr != before)
		feed_pools(mm);
	return mm->adopt ? mm->adopt->next_ns : now_ns;
}

void adopt_fini(struct mm *mm)
{
	if (mm->adopt)
		free(mm->adopt->stray);
	free(mm->adopt);
	mm->adopt = NULL;
}
