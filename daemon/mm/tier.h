/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files that move pages between nodes share: reclaim.c, writeback.c,
 * fetch.c, evacuate.c, drop.c, touch.c, policy.c, admit.c.
 */
#ifndef KVMM_DAEMON_MM_TIER_H
#define KVMM_DAEMON_MM_TIER_H

#include "daemon/mm/mm_calls.h"
#include "ipc/base/clock.h"

/*
 * What one call does at most before the loop gets its turn again. Both guessed:
 * 64 pages keep a batch's I/O in one system call, 200 us are some ten wake-ups.
 */
#define TIER_BATCH		64u
#define TIER_SLICE_NS		(200 * NSEC_PER_USEC)

/* space id, group, key: whose data an I/O moves */
#define PAGE_IDENT_BYTES	66

/* The block node that pages of @nd are demoted to; NULL when there is none. */
static inline struct mm_node *node_lower(const struct mm_node *nd)
{
	struct mm_node *lo;

	if (!nd->mem || nd->below == KVMM_NODE_NONE)
		return NULL;
	lo = &nd->mm->node[nd->below];
	return lo->mem ? NULL : lo;
}

/* Has somebody written to it since it was published? @crc: of its data now. */
static inline bool page_breached(const struct page *pg, uint32_t crc)
{
	return (pg->flags & (PAGE_CRC | PAGE_BAD)) == PAGE_CRC &&
	       pg->crc != crc &&
	       !mm_broken(pg->space->mm, MM_BREAK_CRC);
}

void page_ident(const struct page *pg, uint8_t ident[PAGE_IDENT_BYTES]);

/* -- policy.c ---------------------------------------------------------------- */

typedef enum kvmm_policy_answer pool_offer_fn(struct mm_pool *p,
					      struct page *pg, void *arg);

/*
 * Let the pool's policy offer pages to @fn, best victims first, until @want
 * were taken or @max_scan offered. @fn may end @pg's copy in @p, of no other.
 * Returns how many were offered.
 */
uint32_t pool_select(struct mm_pool *p, uint32_t want, uint32_t max_scan,
		     pool_offer_fn *fn, void *arg);

/* -- reclaim.c --------------------------------------------------------------- */

/* May @pg's copy on the block node @nd go without loss to what hangs on it? */
bool slot_evictable(const struct page *pg, const struct mm_node *nd);
/* Drop a memory copy, a READY one below being its heir. False: it is held. */
bool copy_drop_clean(struct page *pg, struct mm_node *nd);
/*
 * Drop a memory copy with nothing below it: the last one only of a page that
 * none is bound to. False: it is held, or some are.
 */
bool copy_drop_last(struct page *pg, struct mm_node *nd);
/* Evict a leaf under @pg, and what becomes a leaf by that; at most @max. */
unsigned int tree_reclaim(struct page *pg, struct mm_node *nd,
			  unsigned int max);

/* -- drop.c ------------------------------------------------------------------ */

/*
 * The bytes in @pg's frame on @nd are not those that were published, by the
 * publisher's own checksum: it goes as on a consumer's verdict, and is counted.
 */
void page_drop_breach(struct page *pg, struct mm_node *nd);
/*
 * Take a memory copy away if nothing holds it: the frame is free afterwards,
 * the page too if that was its last copy. False: pinned or referenced.
 */
bool copy_evict(struct page *pg, struct mm_node *nd);
/* A block copy that nothing uses leaves its slot; the page may be gone then. */
void copy_release(struct page *pg, struct mm_node *nd);
/*
 * What the result of a read says about the copy that it was made from. True: it
 * is of no use and goes, with all that hangs on it there.
 */
bool copy_judge(struct page *pg, struct mm_node *nd, int result);
/* A user of a block copy is done with it; a doomed one goes with its last. */
void copy_unref(struct page *pg, struct mm_node *nd);
/*
 * @pg's copy on the block node @nd goes, and with it those of all descendants
 * there. Pages that are nowhere then take theirs with them.
 */
void copy_drop_tree(struct page *pg, struct mm_node *nd);
/*
 * Could copy_drop_tree() end all of it now, no page of it being in use, and no
 * page in memory lose its parent by it? Takes what it looked at from @budget;
 * more than that is a no.
 */
bool copy_tree_may_go(struct page *pg, struct mm_node *nd, uint32_t *budget);

/* -- slots.c ------------------------------------------------------------------ */

/* Room for one page of @pg's length on the block node @nd; see slot_room(). */
int slot_get(struct page *pg, struct mm_node *nd);
void slot_put(struct page *pg, struct mm_node *nd);
/* The list of nd->slots that a slot at @off is in. */
uint64_t slot_list_ix(const struct mm_node *nd, uint64_t off);
/* The copy's slot is set: into the node's table of slots; false: no memory. */
bool slot_link(struct page *pg, struct mm_node *nd);
void slot_unlink(struct page *pg, struct mm_node *nd);
/* Free a few slots of what a block pool needs least; returns how many. */
uint32_t slots_evict(struct mm_pool *p);

/* -- writeback.c -------------------------------------------------------------- */

/* The I/O of a write is over and its page's copy is doomed. */
bool wback_over(const struct copy *c);
void wback_free(struct copy *c);
/* Does the node below take pages now? */
bool node_takes(const struct mm_node *lo);
/* It has just refused a page that had been gathered for it: none of @p now. */
bool pool_pauses(const struct mm_pool *p, const struct mm_node *lo);
/* Is enough under way, to the node below or from this pool? */
bool pool_full_of_writes(const struct mm_pool *p, const struct mm_node *lo);
uint64_t writeback_run(struct mm *mm, uint64_t now);
/* Take back what has not been started. */
void writeback_stop(struct mm *mm);

/* -- admit.c ----------------------------------------------------------------- */

/* Is @pg, dirty on @nd, worth a write to @lo? Remembers that it was asked. */
bool admit_page(struct page *pg, struct mm_node *nd, struct mm_node *lo);
/* It was used once more. */
void admit_touch(struct mm_pool *p, struct copy *c);
/* Somebody asked for a page that is nowhere. */
void admit_asked(const struct mm_space *sp, uint16_t group,
		 const uint64_t key[4]);
/* May another page be written to @lo today? An ancestor may, a little longer. */
bool budget_left(struct mm_node *lo, bool ancestor);
void budget_charge(struct mm_node *lo, uint64_t bytes);
void admit_init(struct mm *mm);
void admit_fini(struct mm *mm);

/* -- scrub.c ----------------------------------------------------------------- */

uint64_t scrub_run(struct mm *mm, uint64_t now);
/* A pass begins now. */
void scrub_again(struct mm_node *nd);
/* Take back what has not been started. True: none is in flight any more. */
bool scrub_stop(struct mm *mm);
void scrub_init(struct mm *mm);
void scrub_fini(struct mm *mm);
uint64_t scrubs_stage_bytes(const struct mm *mm);

/* -- stage.c ----------------------------------------------------------------- */

/**
 * struct stage - a buffer for one page
 * @link:	in mm->stage.kept while nobody has it
 * @bytes:	of @mem, a multiple of NODE_ALIGN
 */
struct stage {
	struct list	link;
	void		*mem;
	size_t		bytes;
	enum node_dir	dir;
};

/* For a page of @len; NULL: too much is out, or there is no memory. */
struct stage *stage_get(struct mm *mm, uint32_t len, enum node_dir dir);
/* NULL is fine. Who waits is served by flights_staged(). */
void stage_put(struct mm *mm, struct stage *s);
uint64_t stage_run(struct mm *mm, uint64_t now);
void stage_init(struct mm *mm);
void stage_fini(struct mm *mm);
/* flight.c: a buffer came back. */
void flights_staged(struct mm *mm);
/* What reads and writes under way have of buffers, for mm_check(). */
uint64_t flights_stage_bytes(const struct mm *mm);
uint64_t wbacks_stage_bytes(const struct mm *mm);
/* Writes under way to a block node, and what of; from a pool. For mm_check(). */
uint32_t wbacks_to(const struct mm_node *lo, uint64_t *bytes);
uint32_t wbacks_from(const struct mm_pool *p);

/* -- check_io.c -------------------------------------------------------------- */
int check_io(const struct mm *mm, struct errmsg *e);

/* -- fetch.c ----------------------------------------------------------------- */

/* End what waits, take back what has not been started. */
void fetch_stop(struct mm *mm);

/* -- evacuate.c -------------------------------------------------------------- */
uint64_t evacuate_run(struct mm *mm, uint64_t now);

#endif
