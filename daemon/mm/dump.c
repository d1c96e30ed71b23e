/* SPDX-License-Identifier: Apache-2.0 */
/* What people and tests are shown of the memory manager. */
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bits.h"

/* -- nodes --------------------------------------------------------------------- */

unsigned int mm_nr_nodes(const struct mm *mm)
{
	return mm->nr_nodes;
}

/* Frames that were handed to a window and not yet taken by its client. */
static uint32_t win_magazine_fill(const struct mm_win *w)
{
	/* relaxed: for show; a head that lies is shown as nothing */
	uint32_t n = w->mag_tail - atomic_load_explicit(&w->wl->mag_head,
							memory_order_relaxed);

	return n <= w->mag_entries ? n : 0;
}

static void pool_stat(const struct mm_pool *p, struct mm_node_stat *st)
{
	const struct mm_win *w;

	st->frames += p->nr_frames;
	st->frames_free += p->nr_free;
	st->frames_open += p->nr_open;
	st->frames_loading += p->nr_loading;
	st->frames_quarantine += p->nr_quarantine;
	if (p->nd->mem) {
		st->frames_ready += p->nr_pages;
		st->pages_dirty += p->nr_dirty;
		st->pages_refused += p->nr_refused;
	}
	list_for_each_entry(w, &p->windows, pool_link)
		if (!w->closed)
			st->frames_magazine += win_magazine_fill(w);
}

void mm_node_stat(struct mm *mm, unsigned int node, struct mm_node_stat *st)
{
	struct mm_node *nd = &mm->node[node];
	const struct mm_pool *p;

	*st = (struct mm_node_stat){
		.node		= nd->node,
		.kind		= nd->kind,
		.below		= nd->below,
		.gang		= nd->gang,
		.bytes_extents	= nd->node->used,
		.bytes_pages	= nd->bytes_pages,
		.c		= nd->c,
	};
	list_for_each_entry(p, &nd->pools, node_link)
		pool_stat(p, st);
	if (!nd->mem)
		admit_stat(nd, st);
}

/* -- pins ------------------------------------------------------------------------ */

/* The pins of frames [@f, @end), which are of one extent. */
static void pins_sum(const struct mm_win *w, uint32_t f, uint32_t end,
		     struct mm_pin_info *pi)
{
	for (; f < end; f++) {
		/* relaxed: for show */
		uint32_t n = atomic_load_explicit(&w->pins[f],
						  memory_order_relaxed);

		pi->pins += n;
		pi->frames += n != 0;
	}
}

/* Looks at *@most words at most, and takes those off it. */
static void win_pins(const struct mm_win *w, uint64_t *most,
		     struct mm_pin_info *pi)
{
	const struct mm_pool *p = w->pool;
	uint32_t f = p->per_extent, end = 0, to;

	*pi = (struct mm_pin_info){
		.client	= w->client,
		.name	= w->client->name,
		.tenant	= w->client->tenant,
		.pid	= w->client->o.pid,
		.space	= p->space->ix,
		.cls	= p->cls,
		.node	= p->nd->ix,
		.exited	= w->client->exited,
	};
	for (; f < p->max_frames; f = to) {
		uint32_t no = f / p->per_extent;

		to = (no + 1) * p->per_extent;
		if (!p->extent[no].ext)
			continue;
		if (f >= end) {
			to = win_pins_next(w, f, &end);
			if (to != f)
				continue;
		}
		to = min(to, end);
		if (to - f > *most) {
			pi->partial = true;
			return;
		}
		*most -= to - f;
		pins_sum(w, f, to, pi);
	}
}

void mm_for_each_pin(struct mm *mm, uint64_t most,
		     void (*fn)(const struct mm_pin_info *pi, void *arg),
		     void *arg)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		const struct mm_pool *p;
		const struct mm_win *w;
		struct mm_pin_info pi;

		list_for_each_entry(p, &mm->node[i].pools, node_link) {
			list_for_each_entry(w, &p->windows, pool_link) {
				win_pins(w, &most, &pi);
				if (pi.pins || pi.partial)
					fn(&pi, arg);
			}
		}
	}
}

/* -- pages ------------------------------------------------------------------------- */

static const uint8_t shown_state[] = {
	[COPY_NONE] = 0, [COPY_LOADING] = 1, [COPY_WRITING] = 2,
	[COPY_READY] = 3,
};

static void page_info(const struct page *pg, struct mm_page_info *pi)
{
	const struct mm *mm = pg->space->mm;
	unsigned int i;

	memset(pi, 0, sizeof(*pi));
	memcpy(pi->key, pg->key, sizeof(pi->key));
	if (pg->parent)
		memcpy(pi->parent, pg->parent->key, sizeof(pi->parent));
	/* an orphan's parent is named by no page: whoever checks must see it */
	pi->has_parent = pg->parent || (pg->flags & PAGE_ORPHAN);
	pi->space = pg->space->ix;
	pi->group = pg->group;
	pi->raw_bytes = pg->raw_bytes;
	pi->pos = pg->pos;
	for (i = 0; i < mm->nr_nodes; i++) {
		const struct mm_node *nd = &mm->node[i];
		const struct copy *c = copy_at(pg, i);
		const struct mm_pool *p = page_pool(pg, nd);

		pi->copy[i].state = shown_state[c->state];
		if (c->state == COPY_NONE)
			continue;
		if (!nd->mem) {
			pi->copy[i].slot = c->slot.off;
			continue;
		}
		pi->copy[i].frame = c->frame;
		if (!c->frame)
			continue;	/* LOADING, waits for a frame */
		pi->copy[i].word = frame_word_of(p, c->frame);
		pi->copy[i].pins = min(frame_pins(p, c->frame),
				       (uint64_t)UINT32_MAX);
	}
}

/* Whatever hangs at one place of a space's table. */
static uint64_t show_place(const struct mm_space *sp, uint64_t at,
			   void (*fn)(const struct mm_page_info *pi, void *arg),
			   void *arg)
{
	const struct page *pg = sp->hash[at].first;
	struct mm_page_info pi;
	uint64_t n = 0;

	for (; pg; pg = pg->hnext) {
		/* nobody finds it, it only waits for its pins */
		if (pg->flags & PAGE_BAD)
			continue;
		page_info(pg, &pi);
		fn(&pi, arg);
		n++;
	}
	return n;
}

/* New spaces go to the end of the list, so that a walk meets them at last. */
int mm_walk_pages(struct mm *mm, struct mm_page_cursor *cur, uint64_t most,
		  void (*fn)(const struct mm_page_info *pi, void *arg),
		  void *arg)
{
	const struct mm_space *sp;
	bool begun = !cur->size;
	uint64_t n = 0;

	list_for_each_entry(sp, &mm->spaces, link) {
		if (!begun && sp->ix != cur->space)
			continue;
		if (!begun && (sp->hash_size != cur->size ||
			       cur->at > cur->size))
			return -ESTALE;
		if (begun) {
			cur->space = sp->ix;
			cur->size = sp->hash_size;
			cur->at = 0;
		}
		begun = true;
		for (; cur->at < sp->hash_size; cur->at++) {
			if (n >= most)
				return 1;
			n += show_place(sp, cur->at, fn, arg);
		}
	}
	return begun ? 0 : -ESTALE;
}

/* -- clients ------------------------------------------------------------------------- */

static void client_info(const struct mm_client *c, uint64_t *most,
			struct mm_client_info *ci)
{
	const struct mm_engine *e = c->engine;
	const struct mm_win *w;
	uint32_t no;

	*ci = (struct mm_client_info){
		.name		= c->name,
		.tenant		= c->tenant,
		.pid		= c->o.pid,
		.rank		= c->rank,
		.world		= e->world,
		.flags		= c->flags,
		.engine		= e->no,
		.rights		= c->o.rights,
		.socket		= c->o.socket,
		.state		= e->state,
		/* relaxed: for show */
		.step		= atomic_load_explicit(&c->ledger->step,
						       memory_order_relaxed),
		.connected	= c->connected,
		.exited		= c->exited,
	};
	list_for_each_entry(w, &c->windows, client_link) {
		const struct mm_pool *p = w->pool;
		struct mm_pin_info pi;

		ci->open_frames += w->nr_open;
		if (w->void_pins)
			continue;
		win_pins(w, most, &pi);
		ci->pins += pi.pins;
		ci->pins_partial |= pi.partial;
		for (no = 1; p->extents_going && no <= p->max_extents; no++)
			if (p->extent[no].held &&
			    win_holds(w, &p->extent[no]))
				ci->held_bytes += p->extent[no].ext->bytes;
	}
}

void mm_for_each_client(struct mm *mm, uint64_t most,
			void (*fn)(struct mm_client *c,
				   const struct mm_client_info *ci, void *arg),
			void *arg)
{
	struct mm_engine *e;
	struct mm_client *c;

	list_for_each_entry(e, &mm->engines, link) {
		list_for_each_entry(c, &e->members, engine_link) {
			struct mm_client_info ci;

			client_info(c, &most, &ci);
			fn(c, &ci, arg);
		}
	}
}

/* -- spaces --------------------------------------------------------------------------- */

static uint64_t pool_metadata(const struct mm_pool *p)
{
	uint64_t bytes = (uint64_t)p->nr_frames *
			 (sizeof(struct frame_record) +
			  sizeof(struct frame_meta) + 8 + 4);

	if (p->nd->mem)
		bytes += p->nr_pages * sizeof(struct copy);
	return bytes;
}

/* Bytes that are kept for the sake of the space's pages, beside the pages. */
static uint64_t space_metadata(const struct mm_space *sp)
{
	uint64_t bytes = sizeof(*sp) + sp->desc_len;
	unsigned int c, n;

	bytes += sp->nr_pages * page_bytes(sp->mm);
	bytes += sp->hash_size * sizeof(*sp->hash);
	if (sp->seen.ghost)
		bytes += GHOST_ENTRIES * sizeof(*sp->seen.ghost);
	/* keys are spread evenly: each line in a memory page of its own, at first */
	bytes += index_bytes(min(sp->index_used * INDEX_SPAN,
				 sp->index->nr_lines),
			     min(sp->below_used * INDEX_WORD_SPAN,
				 sp->index->nr_words));
	for (c = 0; c < sp->desc.nclasses; c++)
		for (n = 0; n < sp->mm->nr_nodes; n++)
			if (sp->pool[c][n])
				bytes += pool_metadata(sp->pool[c][n]);
	return bytes;
}

static void space_info(const struct mm_space *sp, struct mm_space_info *si)
{
	unsigned int c, n;

	*si = (struct mm_space_info){
		.ix		= sp->ix,
		.clients	= sp->nr_clients,
		.mode		= mm_space_mode(sp),
		.desc		= &sp->desc,
		.tenant		= sp->tenant,
		.pages		= sp->nr_pages,
		.index_lines	= sp->index->nr_lines,
		.index_used	= sp->index_used,
		.metadata_bytes	= space_metadata(sp),
		.asked		= sp->seen.asked,
		.ghost_asked	= sp->seen.ghost_asked,
		.ghost_hits	= sp->seen.ghost_hits,
		.ghost_pages	= sp->seen.ghost_pages,
	};
	memcpy(si->id, sp->id, sizeof(si->id));
	for (c = 0; c < sp->desc.nclasses; c++)
		for (n = 0; n < sp->mm->nr_nodes; n++)
			if (sp->pool[c][n])
				si->bytes[n] += sp->pool[c][n]->nr_pages *
						sp->pool[c][n]->page_bytes;
}

void mm_for_each_space(struct mm *mm,
		       void (*fn)(const struct mm_space_info *si, void *arg),
		       void *arg)
{
	const struct mm_space *sp;

	list_for_each_entry(sp, &mm->spaces, link) {
		struct mm_space_info si;

		if (sp->ending)
			continue;
		space_info(sp, &si);
		fn(&si, arg);
	}
}
