/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What mm's files call of each other, file by file; nobody outside daemon/mm
 * includes this. What they call of the tiers' is in tier.h.
 */
#ifndef KVMM_DAEMON_MM_MM_CALLS_H
#define KVMM_DAEMON_MM_MM_CALLS_H

#include "daemon/mm/mm_types.h"

/* What a page has where it has no copy; nobody writes to it. */
extern const struct copy copy_none;

static inline struct mm_node *page_node(const struct page *pg, unsigned int ix)
{
	return &pg->space->mm->node[ix];
}

/*
 * The copy of @pg on @nd. Where it has none, in memory: one that is NONE and not
 * to be written to.
 */
static inline struct copy *page_copy(const struct page *pg,
				     const struct mm_node *nd)
{
	char *at = (char *)(uintptr_t)pg + nd->copy_off;
	struct copy *c;

	if (!nd->mem)
		return (struct copy *)at;
	c = *(struct copy **)at;
	return c ? c : (struct copy *)(uintptr_t)&copy_none;
}

/* The same by the number of the node. */
static inline struct copy *copy_at(const struct page *pg, unsigned int ix)
{
	return page_copy(pg, page_node(pg, ix));
}

/* The page that @c, a copy on @nd, is part of. */
static inline struct page *copy_page(struct copy *c, const struct mm_node *nd)
{
	return nd->mem ? c->page : (struct page *)((char *)c - nd->copy_off);
}

/* READY, and not about to go. */
static inline bool copy_good(const struct copy *c)
{
	return c->state == COPY_READY && !(c->flags & COPY_DOOMED);
}

/* -- page.c: pages and their copies ---------------------------------------- */

/* Find a live page, one that is not PAGE_BAD. */
struct page *page_find(struct mm_space *sp, uint16_t group,
		       const uint64_t key[4]);
/* It will be looked for soon. */
void page_prefetch(const struct mm_space *sp, uint16_t group,
		   const uint64_t key[4]);
/* And when that is there: the first page that it may be. */
void page_prefetch_first(const struct mm_space *sp, uint16_t group,
			 const uint64_t key[4]);
/* So many will come: room in the hash. */
void page_reserve(struct mm_space *sp, uint64_t nr_pages);
/* A page without copies; entered in the hash and with its parent's children. */
struct page *page_create(struct mm_space *sp, uint16_t group,
			 const uint64_t key[4], struct page *parent,
			 uint8_t flags);
/*
 * Free it if it has no copy left. Children that it still has (those that are not
 * bound to it; a pinned BAD one) lose their parent; one that is bound and not
 * BAD becomes PAGE_ORPHAN.
 */
void page_put(struct page *pg);
/* Must @pg's parent be where @pg is? */
static inline bool page_bound(const struct page *pg)
{
	return (pg->flags & PAGE_BOUND) && pg->parent;
}
/*
 * It comes from elsewhere with what may be other bytes of the same meaning:
 * kernels are not all deterministic. A checksum that does not hold for all of its
 * copies would tell a breach where there is none.
 */
void page_crc_agree(struct page *pg, bool has, uint32_t crc);
/* BAD from now on: its index lines go, nobody finds it any more. */
void page_set_bad(struct page *pg);
/* Flags COPY_DOOMED: no source and no copy below any more; copies become dirty. */
void copy_doom(struct page *pg, struct mm_node *nd);
/* What a page without a copy in memory takes. */
size_t page_bytes(const struct mm *mm);
/* Where each node's copies are in a page. */
void page_layout(struct mm *mm);
/* A copy on a node of memory, made if there is none: NONE. NULL: no memory. */
struct copy *copy_get(struct page *pg, struct mm_node *nd);
/* It goes unless it is in use. */
void copy_put(struct page *pg, struct mm_node *nd);
/* What a page has where it has no copy; nobody writes to it. */
struct mm_pool *page_pool(const struct page *pg, const struct mm_node *nd);

/*
 * The only way a copy changes state: keeps nr_copies, children counts, pool
 * and node accounts, the policy and the index lines (the node's own line for
 * READY on a memory node, the BELOW line for READY on block nodes, and
 * INDEX_PENDING while something is LOADING) right. @frame or @slot are set
 * before; the policy's view is filled in when READY, except @flags and @uses,
 * which are zeroed when NONE. No index line of a BAD page is touched.
 */
void copy_set_state(struct page *pg, struct mm_node *nd, enum copy_state st);
/*
 * Has the page a READY copy, not COPY_DOOMED, on a node below @nd (so that it
 * can be dropped)?
 */
bool page_has_below(const struct page *pg, const struct mm_node *nd);
/* READY copy, not COPY_DOOMED, on the best node to load from, or NULL. */
struct mm_node *page_source(const struct page *pg, const struct mm_node *to);

/* -- ahead.c: memory that is touched before it is needed -------------------- */

/*
 * So many more of @s will be wanted: a worker touches their memory, @a_job bytes
 * at a time.
 */
void ahead_begin(struct mm *mm, struct mm_ahead *a, struct slabs *s,
		 uint64_t nr, size_t a_job);
/* All of @mem will be looked at, or written to, now. */
void ahead_map(const void *mem, size_t len, bool write);
/* All have come; what was not used is given back. */
void aheads_end(struct mm *mm);

/* -- persist.c: what block nodes are told, to find it again ------------------- */

/* The owner of each block node. */
int persist_init(struct mm *mm);
void persist_fini(struct mm *mm);
/* Before a page of @sp goes down to @nd: it can be found again there. */
int persist_label(struct mm_space *sp, struct mm_node *nd);
/* A copy on a block node is READY; its ancestors there were before. */
void persist_add(struct page *pg, struct mm_node *nd);
/* It is not to be found again, though its slot is still in use. */
void persist_del(struct page *pg, struct mm_node *nd);
/* Nothing is left of @sp on any node. */
void persist_space_end(struct mm_space *sp);
/* It may have pages that were not found yet. */
bool persist_waits(const struct mm_space *sp);

/* -- index.c: the writer of ipc/index.h -------------------------------------- */
int index_create(struct mm_space *sp, uint64_t nr_lines, uint64_t nr_words,
		 uint32_t epoch);
/* A new one of these sizes, neither less than now, with all that is in this. */
int index_grow(struct mm_space *sp, uint64_t nr_lines, uint64_t nr_words);
void index_destroy(struct mm_space *sp);
/*
 * So many pages will come at once: a worker has huge pages made for all of the
 * index meanwhile, which takes less than to fault it in, and makes each look cheaper.
 */
void index_expect(struct mm_space *sp, uint64_t nr_pages);
/* Waits for it, as long as that is worth it. */
void index_expected(struct mm_space *sp, uint64_t deadline_ns);
/* Insert or update; grows when it must; pushes out another page's line at last. */
void index_set(struct mm_space *sp, const struct page *pg, uint8_t node,
	       uint8_t flags, uint64_t fword, uint32_t frame);
/* The same for a page that has no line of that node. */
void index_add(struct mm_space *sp, const struct page *pg, uint8_t node,
	       uint8_t flags, uint64_t fword, uint32_t frame);
void index_prefetch(const struct mm_space *sp, const uint64_t key[4],
		    uint16_t group, uint8_t node);
void index_clear(struct mm_space *sp, const struct page *pg, uint8_t node);

/* -- index_below.c: the words of ipc/index.h ---------------------------------- */

/**
 * struct below - what the word of a page says
 * @nodes:	that cannot be mapped and have it
 * @pending:	a load is on its way
 * @source:	of @nodes, the one to load from
 */
struct below {
	uint64_t	nodes;
	bool		pending;
	uint8_t		source;
};

/* page.c: of @pg as it is */
struct below page_below(const struct page *pg);
/* Insert or update; grows when it must; pushes out another's word at last. */
void index_below_set(struct mm_space *sp, const struct page *pg,
		     const struct below *b);
/* The same for a page that has no word. */
void index_below_add(struct mm_space *sp, const struct page *pg,
		     const struct below *b);
void index_below_clear(struct mm_space *sp, const struct page *pg);
void index_below_prefetch(const struct mm_space *sp, const uint64_t key[4],
			  uint16_t group);
/* Fill the words of @ix, which is new, for all pages of @sp. */
void index_below_fill(struct mm_space *sp, struct index *ix);

/* -- frame.c: frames of a memory pool ---------------------------------------- */

enum frame_use {
	FRAME_FOR_OPEN,			/* leaves pool->reserve alone */
	FRAME_FOR_LOAD,			/* may take it */
};

/*
 * From the free stacks only; 0: none. The word turns to @st; a load sets
 * meta.page.
 */
uint32_t frame_take(struct mm_pool *p, enum frame_use use, enum frame_state st);
/* Up to @n OPEN frames for @w, of extents that its engine has mapped. */
uint32_t frame_take_open(struct mm_pool *p, struct mm_win *w, uint32_t *out,
			 uint32_t n);
/*
 * Back on the stack; the word turns FREE, the record is invalidated. The frame
 * is OPEN, LOADING, ISOLATED or QUARANTINE and has no reference; its page's
 * copy is NONE already. Feeds nobody: pool_feed() when all have been put.
 */
void frame_put(struct mm_pool *p, uint32_t f);
/*
 * Record, then word READY(g + 1), for @pg; then copy_set_state(READY). The
 * frame is OPEN or LOADING; copy.frame and meta.page are set here.
 */
void frame_seal(struct mm_pool *p, uint32_t f, struct page *pg);
/* OPEN, freed after @step: the next daemon is to know, if it comes to that. */
void frame_freed(struct mm_pool *p, uint32_t f, uint64_t step);
/* Its record is not to be believed any more. */
void frame_forget(struct mm_pool *p, uint32_t f);
/* Its word, whatever it was; adoption only. */
void frame_word_set(struct mm_pool *p, uint32_t f, uint64_t word);
/* A reference: the frame is neither isolated nor put while one is held. */
void frame_ref(struct mm_pool *p, uint32_t f);
void frame_unref(struct mm_pool *p, uint32_t f);
/* OPEN, its engine is dead: kept apart until it is zeroed. */
void frame_quarantine(struct mm_pool *p, uint32_t f);
/* Pins over all attached window ledgers, seq_cst. */
uint64_t frame_pins(const struct mm_pool *p, uint32_t f);
/* A rank's part of a frame, p->stride bytes; @rank < p->parts. */
void *frame_part(const struct mm_pool *p, uint32_t f, uint32_t rank);
/* All of it, where the pool is no gang's. */
static inline void *frame_addr(const struct mm_pool *p, uint32_t f)
{
	return frame_part(p, f, 0);
}
/* The first @len bytes of the page in @f, for whoever holds a reference. */
struct image frame_image(const struct mm_pool *p, uint32_t f, uint32_t len);
uint64_t frame_word_of(const struct mm_pool *p, uint32_t f);
/*
 * Isolate, sum, decide. No pin, no reference (of the frame or of the page's
 * copy): true; the copy has turned NONE (copy_set_state() is done in here), the
 * word stays ISOLATED, and the frame is the caller's: frame_put(), page_put().
 * Else false, and everything is as it was.
 */
bool frame_isolate(struct mm_pool *p, uint32_t f);
/* Pinned or referenced, by a plain look: worth isolating only if not. */
bool frame_busy(const struct mm_pool *p, uint32_t f);
static inline bool frame_live(const struct mm_pool *p, uint32_t f)
{
	return f < p->max_frames && p->extent[f / p->per_extent].ext;
}

/* -- extent.c: extents of a memory pool --------------------------------------- */
/*
 * An extent that is to go (evacuate.c): its free frames leave the stack, and
 * frame_put() does not put others of it there (nr_used still counts down); or
 * the way back.
 */
void extent_close(struct mm_pool *p, uint32_t no);
void extent_reopen(struct mm_pool *p, uint32_t no);
/* A closed one with nr_used == 0: tell the windows, give it to the node. */
void extent_down(struct mm_pool *p, uint32_t no);
/*
 * Room for more: ask the node for an extent when it has room. 0: one is coming;
 * -ENOSPC: the node is full, and what another class can give up is being
 * evacuated; -EAGAIN: an attempt failed a moment ago.
 */
int pool_grow(struct mm_pool *p);
/* Is memory of @p on its way back? What a client holds against its word is not. */
bool pool_gives(const struct mm_pool *p);
/* Is memory of some pool on its way back to @nd, though it is full now? */
bool node_room_comes(const struct mm_node *nd);
/* Frames that @p could still get from its node without any reclaim. */
uint64_t pool_room(const struct mm_pool *p);
/* Has @w been told of @x and not yet said that it unmapped it? */
bool win_holds(const struct mm_win *w, const struct mm_extent *x);
/* Those that were told to be unmapped: given back if nobody maps them any more. */
void extents_going_run(struct mm_pool *p);
/* True: all extents are back with the node, pool_destroy() may follow. */
bool pool_end(struct mm_pool *p);
/* The same whatever is in use, for mm_destroy(). */
bool pool_abandon(struct mm_pool *p);

/* -- pool.c: pools ------------------------------------------------------------- */
/* In use, few frames left, and room for more: populating takes its time. */
bool pool_runs_dry(const struct mm_pool *p);
/*
 * Somebody who waited for @was frames of @p waits for @is now; the only way @want
 * changes.
 */
void pool_wants(struct mm_pool *p, uint32_t was, uint32_t is);
/* For how long there has been somebody who waits for frames of @p. */
static inline uint64_t pool_squeezed(const struct mm_pool *p)
{
	uint64_t now = p->space->mm->now_ns;

	return p->squeezed_ns && now > p->squeezed_ns ? now - p->squeezed_ns : 0;
}
/* Frames came: serve load_wait (fetch_frames_came()), then refill_wait. */
void pool_feed(struct mm_pool *p);
/* Growth ahead of need, extents that go, waits to be fed, pins to be counted. */
uint64_t pools_run(struct mm *mm, uint64_t now_ns);
int pool_create(struct mm_space *sp, unsigned int cls, struct mm_node *nd,
		struct errmsg *e);
void pool_destroy(struct mm_pool *p);
void pool_publish_avail(struct mm_pool *p);

/* -- space.c, window.c, publish_wait.c ----------------------------------------- */
void space_free(struct mm_space *sp);
struct mm_space *space_find(struct mm *mm, const uint8_t id[32]);
/* Makes one that nobody is attached to; its first extents come with its first client. */
int space_found(struct mm *mm, const char *tenant, uint32_t mode,
		const uint8_t *bytes, size_t len, struct mm_space **ret,
		struct errmsg *e);
uint64_t spaces_run(struct mm *mm, uint64_t now_ns);
/* ghost.c: what was asked for, while observed and from one space to the next */
void ghost_keep(struct mm_space *sp);
void ghost_take(struct mm_space *sp);
void ghost_forget(struct mm *mm);
void ghost_publish(struct mm_space *sp, uint16_t group, const uint64_t key[4]);
/* Was it published before @asked_ms? */
bool ghost_known(const struct mm_space *sp, uint16_t group,
		 const uint64_t key[4], uint32_t asked_ms);
/* A want of @w that was not met is tried again; wakes its client. */
void win_feed(struct mm_win *w);
/* Word @i of the bitmap of extents that all members' windows have mapped. */
uint64_t win_mapped(const struct mm_win *w, size_t i);
/* Its pins end, and its waits. */
void win_void(struct mm_win *w);
/* Void, out of its client's hands, freed. */
void win_destroy(struct mm_win *w);
/* Closed: freed when nothing is left of it. */
void win_retire(struct mm_win *w);
/*
 * From frame @f on, the first whose pins exist as memory, and where that part
 * ends: the file is sparse, and reading the rest would make it exist.
 */
uint32_t win_pins_next(const struct mm_win *w, uint32_t f, uint32_t *end);
/* Closed windows of which something was left. */
uint64_t windows_run(struct mm *mm, uint64_t now_ns);
void win_leave_wait(struct mm_win *w);
/* It gets no frames any more: its wait ends, and what it has reserved. */
void win_give_up(struct mm_win *w);
/* What @c is still publishing fails with @err; it is answered. */
void publish_fail(struct mm_client *c, int err);
/* Entries whose turn has come. */
uint64_t publish_run(struct mm *mm, uint64_t now_ns);

/* -- engine.c, client.c, quarantine.c, pins.c ----------------------------------- */

/* Puts @op on its client's list. */
void mm_op_init(struct mm_op *op, struct mm_win *w, uint64_t tag, uint8_t kind,
		void (*cancel)(struct mm_op *op));
/* Takes @op off; the memory is the caller's. */
void mm_op_fini(struct mm_op *op);
/*
 * Answers @op if its client is still there; each @res[i].frame that is not 0
 * carries a reference (frame_ref()), which goes with the answer, or is dropped
 * here from @p when there is nobody to answer. mm_op_fini() is next.
 */
void mm_op_complete(struct mm_op *op, struct mm_pool *p, int32_t result,
		    uint32_t n, const struct ring_result *res);
/* May @e still get frames, seal and fetch? 0, -EOWNERDEAD. */
int engine_usable(const struct mm_engine *e);
void step_wait_del(struct mm_engine *e, struct step_wait *w);
/* Computes the engine's step anew. */
uint64_t engine_step(struct mm_engine *e);
/* @f is QUARANTINE and has no reference: zeroed on a worker, then put. */
void frame_zero(struct mm_pool *p, uint32_t f);
/* OPEN frames of @e in @p, which has ended: quarantine, zero, put. */
void pool_quarantine(struct mm_pool *p, struct mm_engine *e);
struct mm_engine *engine_create(struct mm *mm, uint32_t socket, uint32_t world);
void engine_free(struct mm_engine *e);
void engine_add(struct mm_engine *e, struct mm_client *c);
/* A member has exited, or it is evicted: what it waits for fails. */
void engine_dying(struct mm_engine *e);
/* All members have exited: nothing of it runs any more. */
void engine_end(struct mm_engine *e);
/* Windows, spaces, its place in the engine; the server may unmap its ledger. */
void client_free(struct mm_client *c);
/* More than it may: all members are disconnected, and their pins are void. */
void engine_evict(struct mm_engine *e, const char *why);
/* This one is to be disconnected; asked for once. */
void client_evict(struct mm_client *c, const char *why);
/* A load of @e has no frame of @p, waiting for one or not. */
void pool_starves(struct mm_pool *p, const struct mm_engine *e);
/* Count what engines pin in @p, a part a call; evicts who is over the limit. */
void pool_count_pins(struct mm_pool *p);
uint64_t engines_run(struct mm *mm, uint64_t now_ns);
void engines_fini(struct mm *mm);

/* Run @w->fn after @step of @e: at once (0) if it is done or @step is 0. */
void step_wait_add(struct mm_engine *e, struct step_wait *w, uint64_t step);
void engine_steps_poll(struct mm_engine *e);

/* -- policy.c ---------------------------------------------------------------- */
/* The pool's instance of the policy; before its first page, after its last. */
int pool_policy_init(struct mm_pool *p, struct errmsg *e);
void pool_policy_fini(struct mm_pool *p);

/* -- reclaim.c, writeback.c, fetch.c, evacuate.c, drop.c, touch.c --------------- */

/* What these keep in struct mm; before the first pool. */
void tier_init(struct mm *mm);
/* No new I/O; what can be taken back is. True: none is in flight any more. */
bool tier_stop(struct mm *mm);
void tier_fini(struct mm *mm);

/**
 * struct reclaim_control - one pass over a pool: wishes in, counts out
 */
struct reclaim_control {
	uint32_t	want;		/* frames or slots */
	uint32_t	max_scan;
	uint64_t	deadline_ns;
	bool		direct;		/* an allocation waits */
	bool		clean_only;
	uint32_t	scanned, freed, writing;
};
void pool_reclaim(struct mm_pool *p, struct reclaim_control *rc);
/* Watermark work of every pool that is due; returns when to come again. */
uint64_t reclaim_run(struct mm *mm, uint64_t now_ns);
/* Not admitted by the node below: it is no more, or its last use changes that. */
void admit_forget(struct mm_pool *p, struct copy *c);
/* What block nodes have of it, for people. */
void admit_stat(struct mm_node *lo, struct mm_node_stat *st);
/* Demote: write @pg and the ancestors it needs to the node below @nd. */
int page_writeback(struct page *pg, struct mm_node *nd, enum node_prio prio);
/* Drop @pg's copy on @nd; the last copy takes its descendants with it. */
void page_drop_copy(struct page *pg, struct mm_node *nd);
/* @pg goes: is what it was a part of any use without it? */
void wreck_note(const struct page *pg);
/* Drop some of what is not; true: there is more. */
bool wrecks_run(struct mm *mm);
/*
 * Drop everywhere, descendants below too; keeps pinned frames (not found).
 * Returns of how many pages.
 */
uint64_t page_drop_all(struct page *pg);
uint64_t fetch_run(struct mm *mm, uint64_t now_ns);
void fetch_frames_came(struct mm_pool *p);
/*
 * Somebody has @pg's bytes in a frame of his own: give a read up that is late or
 * that nobody waits for. True: the copy is NONE now, the read keeps its frame.
 */
bool fetch_abandon(struct page *pg, struct mm_node *nd);
/* Empty the extent of @p touched longest ago; 0 begun, -EBUSY, -ENOENT. */
int pool_evacuate(struct mm_pool *p);
/* @p is no more: nor is whatever was being emptied of it. */
void evacuate_forget(struct mm_pool *p);

/* The instance's policy. */
static inline const struct kvmm_policy_v0 *pool_policy(const struct mm_pool *p)
{
	return p->space->mm->o.policy;
}

#endif
