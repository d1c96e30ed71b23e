/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scrub: what lies on a block node is read now and then, so that a page that the
 * medium has lost is found before somebody waits for it, and with it whatever
 * hangs on it. One page at a time, in the order of their slots, at a rate that
 * nobody notices, and only while nobody else reads: a load that is on its way, or
 * a node that is not online, puts it off.
 *
 * A pass begins when mm does, since a restart is when a medium is most likely to
 * have lost something, and from then on once a day: more would only wear.
 *
 * A page whose bytes are not those that were written goes as one that a load found
 * to be bad (copy_judge()).
 */
#include <stdlib.h>

#include "daemon/mm/tier.h"

#define SCRUB_RETRY_NS	(20 * NSEC_PER_MSEC)	/* somebody else reads */
#define SCRUB_IDLE_NS	NSEC_PER_SEC		/* there is nothing to read */
#define SCRUB_PASS_NS	(24 * 3600 * NSEC_PER_SEC)
#define SCRUB_LISTS	4096u			/* looked at in one go */

/**
 * struct scrub - of a block node
 * @off:	slots from here on are next
 * @next_ns:	not before that
 * @pass_ns:	when this pass began; 0: none has
 * @pg:		what is being read, NULL: nothing is
 * @flying:	the I/O is handed in and not released
 */
struct scrub {
	struct mm_node	*nd;
	uint64_t	off;
	uint64_t	next_ns, pass_ns;
	struct page	*pg;
	struct stage	*stage;
	bool		flying;
	struct node_io	io;
	uint8_t		ident[PAGE_IDENT_BYTES];
};

/* -- which page is next ---------------------------------------------------------- */

/* The good copy of this list that begins first, at or behind @off. */
static struct copy *list_next(struct mm_node *nd, uint64_t list, uint64_t off)
{
	struct copy *c, *best = NULL;

	for (c = nd->slots[list]; c; c = c->slot_next)
		if (copy_good(c) && c->slot.off >= off &&
		    (!best || c->slot.off < best->slot.off))
			best = c;
	return best;
}

/* NULL: none in this slice; *@more: the pass is not over. */
static struct copy *scrub_next(struct scrub *sc, bool *more)
{
	struct mm_node *nd = sc->nd;
	uint64_t i = slot_list_ix(nd, sc->off), n = 0;
	struct copy *c;

	*more = true;
	for (; i < nd->nr_slot_lists; i++) {
		c = list_next(nd, i, sc->off);
		if (c)
			return c;
		if (++n == SCRUB_LISTS) {
			sc->off = (i + 1) * nd->slot_list_bytes;
			return NULL;
		}
	}
	*more = false;
	return NULL;
}

/* -- one page -------------------------------------------------------------------- */

static void scrub_done(struct node_io *io, int result)
{
	/* nobody waits for it */
}

static void scrub_release(struct node_io *io)
{
	struct scrub *sc = io->arg;
	struct mm_node *nd = sc->nd;
	struct page *pg = sc->pg;

	sc->flying = false;
	sc->pg = NULL;
	stage_put(nd->mm, sc->stage);
	sc->stage = NULL;
	if (!io->result || io->result == -EBADMSG)
		nd->c.pgscrub++;
	if (copy_judge(pg, nd, io->result))
		nd->c.pgscrub_bad++;
	copy_unref(pg, nd);
	flights_staged(nd->mm);
}

static int scrub_submit(struct scrub *sc, struct copy *c)
{
	struct mm_node *nd = sc->nd;
	struct page *pg = copy_page(c, nd);
	int err;

	sc->stage = stage_get(nd->mm, pg->raw_bytes, NODE_READ);
	if (!sc->stage)
		return -EAGAIN;
	page_ident(pg, sc->ident);
	sc->io = (struct node_io){
		.dir		= NODE_READ,
		.prio		= NODE_PRIO_WRITEBACK,
		.len		= pg->raw_bytes,
		.crc		= c->crc,
		.slot		= c->slot,
		.addr		= sc->stage->mem,
		.ident		= sc->ident,
		.ident_len	= sizeof(sc->ident),
		.done		= scrub_done,
		.release	= scrub_release,
		.arg		= sc,
	};
	err = node_submit(nd->node, &sc->io);
	if (err) {
		stage_put(nd->mm, sc->stage);
		sc->stage = NULL;
		return err;
	}
	sc->pg = pg;
	sc->flying = true;
	c->refs++;
	return 0;
}

/* -- in the background ----------------------------------------------------------- */

static bool others_read(const struct mm_node *nd)
{
	const struct node_dir_stats *st = &nd->node->stats.dir[NODE_READ];

	return !list_empty(&nd->mm->flights) || st->queued || st->inflight;
}

static uint64_t scrub_node(struct scrub *sc, uint64_t now)
{
	struct mm_node *nd = sc->nd;
	struct copy *c;
	uint32_t len;
	bool more;

	if (sc->flying)
		return UINT64_MAX;	/* its release is followed by a round */
	if (now < sc->next_ns)
		return sc->next_ns;
	if (!nd->slots || nd->recovery || nd->node->state != NODE_ONLINE) {
		sc->next_ns = now + SCRUB_IDLE_NS;
		return sc->next_ns;
	}
	sc->next_ns = now + SCRUB_RETRY_NS;
	if (others_read(nd))
		return sc->next_ns;
	if (!sc->pass_ns)
		sc->pass_ns = now;
	c = scrub_next(sc, &more);
	if (c) {
		len = copy_page(c, nd)->raw_bytes;
		sc->off = c->slot.off;
		if (!scrub_submit(sc, c)) {
			sc->off++;
			sc->next_ns = now + len * NSEC_PER_SEC /
					    nd->scrub_bytes_s;
		}
		return sc->next_ns;
	}
	if (!more) {
		sc->off = 0;
		sc->next_ns = max(sc->pass_ns + SCRUB_PASS_NS,
				  now + SCRUB_IDLE_NS);
		sc->pass_ns = 0;
	}
	return sc->next_ns;
}

uint64_t scrub_run(struct mm *mm, uint64_t now)
{
	uint64_t next = UINT64_MAX, at;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes && !mm->stopping; i++) {
		if (!mm->node[i].scrub)
			continue;
		at = scrub_node(mm->node[i].scrub, now);
		next = min(next, at);
	}
	return next;
}

/* Without memory there is no scrub, and nothing else is the worse for it. */
void scrub_init(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_node *nd = &mm->node[i];

		if (nd->mem || !nd->scrub_bytes_s)
			continue;
		nd->scrub = calloc(1, sizeof(*nd->scrub));
		if (nd->scrub)
			nd->scrub->nd = nd;
	}
}

bool scrub_stop(struct mm *mm)
{
	bool over = true;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		struct scrub *sc = mm->node[i].scrub;

		if (!sc || !sc->flying)
			continue;
		node_io_cancel(&sc->io);
		over = false;
	}
	return over;
}

void scrub_fini(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		free(mm->node[i].scrub);
		mm->node[i].scrub = NULL;
	}
}

void scrub_again(struct mm_node *nd)
{
	nd->scrub->off = 0;
	nd->scrub->next_ns = 0;
}

uint64_t scrubs_stage_bytes(const struct mm *mm)
{
	uint64_t sum = 0;
	unsigned int i;

	for (i = 0; i < mm->nr_nodes; i++) {
		const struct scrub *sc = mm->node[i].scrub;

		sum += sc && sc->stage ? sc->stage->bytes : 0;
	}
	return sum;
}
