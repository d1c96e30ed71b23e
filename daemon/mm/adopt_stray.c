/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames of the last daemon's that are nobody's yet.
 *
 *	STRAY_IO	until nothing of the last daemon's can land there any more:
 *			every store that it had says so (keep_store.c)
 *	STRAY_ORPHAN	until every block node says that it is past recovery: its
 *			parent may be found there. Then it is a page again, or goes;
 *			it goes, too, if that takes too long
 *	STRAY_PINNED	until its last pin is gone
 *
 * All are LOADING meanwhile: nobody can pin them any more, and what was pinned
 * before stays as it is. The record of an orphan is kept: a daemon that dies now
 * leaves to the next one what it was left.
 *
 * Which of two orphans is the other's parent only their records say; what numbers
 * they have is their publisher's own business. So before one is decided, the one
 * that it hangs on is, if that is an orphan, too; they are found by a hash that is
 * made once. There may be a million: they are decided in slices.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/tier.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define LOOK_NS		(10 * NSEC_PER_MSEC)
#define SLICE		2048u
#define ORPHAN_NS	(30 * NSEC_PER_SEC)	/* they wait, at most */

/**
 * struct stray - a frame
 * @f:		0: decided
 * @next:	orphan: the one that hangs on it and is to be decided next, plus one
 * @asked:	orphan: it is being decided
 */
struct stray {
	struct mm_pool	*pool;
	uint32_t	f;
	uint32_t	next;
	bool		asked;
};

struct strays {
	struct stray	*s;
	uint32_t	nr, cap;
	uint32_t	at;		/* the next one to look at */
};

/**
 * struct adopt - what is left to be adopted
 * @kind:	by enum stray_kind
 * @hash:	of orphans, by key: their places plus one; @hash_size is a power of
 *		two, 0: not made yet
 * @until_ns:	orphans wait for nodes
 */
struct adopt {
	struct strays	kind[NR_STRAYS];
	uint32_t	*hash;
	uint64_t	hash_size;
	uint64_t	until_ns;
	uint64_t	next_ns;
};

/* -- keeping them ------------------------------------------------------------------- */

static bool stray_room(struct strays *k)
{
	struct stray *more;
	uint32_t cap;

	if (k->nr < k->cap)
		return true;
	cap = k->cap ? 2 * k->cap : 1024;
	more = realloc(k->s, cap * sizeof(*more));
	if (!more)
		return false;
	k->s = more;
	k->cap = cap;
	return true;
}

/* With no memory to remember it, it stays LOADING. */
static void stray_note(struct mm *mm, struct mm_pool *p, uint32_t f,
		       enum stray_kind kind)
{
	struct strays *k;

	if (!mm->adopt)
		mm->adopt = calloc(1, sizeof(*mm->adopt));
	if (!mm->adopt)
		return;
	k = &mm->adopt->kind[kind];
	if (stray_room(k))
		k->s[k->nr++] = (struct stray){ .pool = p, .f = f };
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
	if (kind == STRAY_IO)
		mm->adopted.held++;
	stray_note(mm, p, f, kind);
}

/* Free, or waits for its last unpin. */
static void stray_let_go(struct mm *mm, struct stray *s)
{
	if (frame_pins(s->pool, s->f))
		stray_note(mm, s->pool, s->f, STRAY_PINNED);
	else
		frame_put(s->pool, s->f);
	s->f = 0;
}

/* -- orphans ------------------------------------------------------------------------ */

static const struct frame_record *record_of(const struct stray *s)
{
	return &s->pool->record[s->f];
}

static uint64_t key_hash(const struct mm_space *sp, uint16_t group,
			 const uint8_t key[32])
{
	uint64_t k[4];

	memcpy(k, key, sizeof(k));
	return key_mix(k, sp->mm->seed[0], sp->mm->seed[1], group);
}

static bool orphans_hash(struct adopt *a)
{
	const struct strays *k = &a->kind[STRAY_ORPHAN];
	uint64_t at;
	uint32_t i;

	if (a->hash_size)
		return true;
	a->hash_size = roundup_pow2(2 * (uint64_t)k->nr + 2);
	a->hash = calloc(a->hash_size, sizeof(*a->hash));
	if (!a->hash) {
		a->hash_size = 0;
		return false;
	}
	for (i = 0; i < k->nr; i++) {
		const struct frame_record *r = record_of(&k->s[i]);

		at = key_hash(k->s[i].pool->space, r->group, r->key);
		while (a->hash[at & (a->hash_size - 1)])
			at++;
		a->hash[at & (a->hash_size - 1)] = i + 1;
	}
	return true;
}

/* The orphan, not yet asked, that @s hangs on; NULL: none is. */
static struct stray *orphan_above(struct adopt *a, const struct stray *s)
{
	const struct frame_record *r = record_of(s), *up;
	struct strays *k = &a->kind[STRAY_ORPHAN];
	const struct mm_space *sp = s->pool->space;
	struct stray *t;
	uint64_t at;

	at = key_hash(sp, r->group, r->parent);
	for (; a->hash[at & (a->hash_size - 1)]; at++) {
		t = &k->s[a->hash[at & (a->hash_size - 1)] - 1];
		if (!t->f || t->asked || t->pool->space != sp)
			continue;
		up = record_of(t);
		if (up->group == r->group &&
		    !memcmp(up->key, r->parent, sizeof(up->key)))
			return t;
	}
	return NULL;
}

/* A page again: made, or with one more copy. */
static bool stray_revive(struct stray *s)
{
	struct mm_pool *p = s->pool;
	struct frame_meta *m = &p->meta[s->f];
	const struct frame_record *r = record_of(s);
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
	page_crc_agree(pg, r->flags & FRAME_REC_CRC, r->data_crc);
	m->flags = 0;
	m->page = pg;
	p->nr_loading--;
	c->frame = s->f;
	frame_word_set(p, s->f, frame_word(m->gen, FRAME_READY));
	copy_set_state(pg, p->nd, COPY_READY);
	sp->mm->adopted.frames++;
	s->f = 0;
	return true;
}

static void orphan_decide(struct mm *mm, struct stray *s)
{
	mm->adopted.waiting--;
	if (stray_revive(s))
		return;
	mm->adopted.lost++;
	stray_let_go(mm, s);
}

/*
 * @s, and before it what it hangs on, the topmost first. Returns how many: each
 * is asked once, so it costs as much as there are.
 */
static uint32_t orphan_ask(struct mm *mm, struct stray *s)
{
	struct strays *k = &mm->adopt->kind[STRAY_ORPHAN];
	struct stray *up;
	uint32_t n = 0, next;

	s->asked = true;
	s->next = 0;
	while ((up = orphan_above(mm->adopt, s))) {
		up->asked = true;
		up->next = (uint32_t)(s - k->s) + 1;
		s = up;
	}
	for (;; s = &k->s[next - 1]) {
		next = s->next;
		orphan_decide(mm, s);
		n++;
		if (!next)
			return n;
	}
}

static bool nodes_start(const struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++)
		if (!mm->node[i].mem &&
		    mm->node[i].node->state == NODE_STARTING)
			return true;
	return false;
}

/* -- deciding ----------------------------------------------------------------------- */

static void strays_end(struct strays *k)
{
	free(k->s);
	*k = (struct strays){ .s = NULL };
}

/* True: there is more to be done now. */
static bool orphans_run(struct mm *mm, uint64_t now_ns)
{
	struct adopt *a = mm->adopt;
	struct strays *k = &a->kind[STRAY_ORPHAN];
	uint32_t left = SLICE;

	if (!k->nr || (nodes_start(mm) && now_ns < a->until_ns) ||
	    !orphans_hash(a))
		return false;
	for (; k->at < k->nr && left; k->at++)
		if (k->s[k->at].f)
			left -= min(left, orphan_ask(mm, &k->s[k->at]));
	if (k->at < k->nr)
		return true;
	strays_end(k);
	free(a->hash);
	a->hash = NULL;
	a->hash_size = 0;
	return false;
}

static bool io_run(struct mm *mm)
{
	struct strays *k = &mm->adopt->kind[STRAY_IO];
	uint32_t left = SLICE;

	/* also with no such frame: a store that is over is not kept */
	if (keep_stores_busy(mm))
		return false;
	for (; k->at < k->nr && left; k->at++, left--) {
		mm->adopted.held--;
		stray_let_go(mm, &k->s[k->at]);
	}
	if (k->at < k->nr)
		return true;
	strays_end(k);
	return false;
}

/* One round over a part of those that were pinned when it was last their turn. */
static void pinned_run(struct mm *mm)
{
	struct strays *k = &mm->adopt->kind[STRAY_PINNED];
	uint32_t left = min(SLICE, k->nr);

	while (left--) {
		struct stray *s = &k->s[k->at < k->nr ? k->at : (k->at = 0)];

		if (frame_pins(s->pool, s->f)) {
			k->at++;
			continue;
		}
		frame_put(s->pool, s->f);
		*s = k->s[--k->nr];
	}
	if (!k->nr)
		strays_end(k);
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

static bool strays_run(struct mm *mm, uint64_t now_ns)
{
	struct adopt *a = mm->adopt;
	bool more = io_run(mm);

	more |= orphans_run(mm, now_ns);
	pinned_run(mm);
	if (a->kind[STRAY_IO].nr || a->kind[STRAY_ORPHAN].nr ||
	    a->kind[STRAY_PINNED].nr || keep_stores_busy(mm))
		return more;
	adopt_fini(mm);
	return false;
}

static void say_held(const struct mm *mm, const char *busy)
{
	char text[160];

	if (!mm->ops->said)
		return;
	snprintf(text, sizeof(text),
		 "I/O of the last kvmmd is not over on store %s: %llu frames are not used until it is",
		 busy, (unsigned long long)mm->adopted.held);
	mm->ops->said(mm->o.ops_arg, true, text);
}

void stray_begin(struct mm *mm)
{
	const char *busy = keep_stores_busy(mm);
	uint64_t now = now_ns();

	if (!mm->adopt && busy)
		mm->adopt = calloc(1, sizeof(*mm->adopt));
	if (!mm->adopt)
		return;
	mm->adopt->until_ns = now + ORPHAN_NS;
	if (busy && mm->adopted.held)
		say_held(mm, busy);
	while (mm->adopt && strays_run(mm, now))
		;
}

uint64_t adopt_run(struct mm *mm, uint64_t now_ns)
{
	uint64_t before;
	bool more;

	if (!mm->adopt || mm->stopping)
		return UINT64_MAX;
	if (now_ns < mm->adopt->next_ns)
		return mm->adopt->next_ns;
	before = mm->adopted.held + mm->adopted.waiting +
		 mm->adopt->kind[STRAY_PINNED].nr;
	more = strays_run(mm, now_ns);
	if (!mm->adopt || before != mm->adopted.held + mm->adopted.waiting +
				    mm->adopt->kind[STRAY_PINNED].nr)
		feed_pools(mm);
	if (!mm->adopt)
		return UINT64_MAX;
	mm->adopt->next_ns = more ? now_ns : now_ns + LOOK_NS;
	return mm->adopt->next_ns;
}

void adopt_fini(struct mm *mm)
{
	unsigned int i;

	if (!mm->adopt)
		return;
	for (i = 0; i < NR_STRAYS; i++)
		free(mm->adopt->kind[i].s);
	free(mm->adopt->hash);
	free(mm->adopt);
	mm->adopt = NULL;
}
