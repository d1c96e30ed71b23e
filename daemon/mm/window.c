/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows: one client's view of a memory pool, its pins and its magazine.
 *
 * The window ledger is memory that the client writes. Where its parts lie is
 * computed here once and kept here; the offsets in it are for the client. What
 * is read of it: pins (summed, whatever they say), the bitmap of mapped extents,
 * and the magazine's head, which is judged before it is used.
 *
 * Life. The ledger is in the pool's list, where isolation looks for pins, before
 * the client gets its descriptor. It leaves the list when the engine has ended,
 * when the engine broke its limit, or when the client has closed the window and
 * no pin is left in it. The struct stays as long as an operation or an answer on
 * its way names it, or an OPEN frame: what is left of closed windows is looked
 * for in rounds, a part of a pool at a time.
 */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

/* What is left of closed windows is looked for so far in a round, so often. */
#define CLOSED_FRAMES	65536u
#define CLOSED_MORE_NS	NSEC_PER_MSEC
#define CLOSED_NS	(100 * NSEC_PER_MSEC)

/* -- the ledger ------------------------------------------------------------- */

/* Where its parts lie. */
struct win_layout {
	uint64_t	bits, bitmap, pins, mag, bytes;
	uint32_t	mag_entries;
};

static struct win_layout win_layout(const struct mm_pool *p)
{
	struct win_layout at = {
		.bits = p->max_extents + UINT64_C(1),
		.bitmap = sizeof(struct window_ledger),
		.mag_entries = roundup_pow2(p->max_frames),
	};

	at.pins = round_up(at.bitmap + BITMAP_WORDS(at.bits) * 8, 4096);
	at.mag = round_up(at.pins + (uint64_t)p->max_frames * 4, 4096);
	at.bytes = at.mag + (uint64_t)at.mag_entries * 4;
	return at;
}

uint64_t win_ledger_bytes(const struct mm_pool *p)
{
	return win_layout(p).bytes;
}

static void win_ledger_map(struct mm_win *w, const struct win_layout *at)
{
	char *base = w->ledger_shm.addr;

	w->mag_entries = at->mag_entries;
	w->wl = (struct window_ledger *)base;
	w->bitmap = (_Atomic uint64_t *)(base + at->bitmap);
	w->pins = (_Atomic uint32_t *)(base + at->pins);
	w->mag = (_Atomic uint32_t *)(base + at->mag);
}

static int win_ledger_create(struct mm_win *w, struct errmsg *e)
{
	const struct mm_pool *p = w->pool;
	const struct win_layout at = win_layout(p);
	struct window_ledger *l;
	int err;

	/* the other members of its engine look at its bitmap */
	err = shm_create(&w->ledger_shm, "kvmm-window", at.bytes,
			 !w->engine->anonymous);
	if (err)
		return errmsg_set(e, err, "window ledger of %llu bytes: %s",
				  (unsigned long long)at.bytes, strerror(-err));

	l = w->ledger_shm.addr;
	l->magic = KVMM_MAGIC_WINDOW;
	l->size = sizeof(*l);
	l->max_frames = p->max_frames;
	l->mag_entries = at.mag_entries;
	l->nr_extents = at.bits;
	l->bitmap_off = at.bitmap;
	l->pins_off = at.pins;
	l->mag_off = at.mag;
	l->bytes = at.bytes;
	win_ledger_map(w, &at);
	return 0;
}

/* -- opening ----------------------------------------------------------------- */

static int win_slot(struct mm_client *c)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(c->win); i++)
		if (!c->win[i])
			return i;
	return -ENOSPC;
}

/* The ranks of a gang are those of the engine, each with a part of its own. */
static int gang_check(const struct mm_client *c, const struct mm_space *sp,
		      const struct mm_node *nd, struct errmsg *e)
{
	if (!node_serves(nd, sp))
		return errmsg_set(e, -EINVAL,
			"node %s is a gang of %u, the space is for a world of %u",
			nd->node->name, nd->gang, sp->desc.world);
	if (!nd->gang || c->engine->world == nd->gang)
		return 0;
	if (c->engine->anonymous)
		return errmsg_set(e, -EINVAL,
			"node %s is a gang of %u: join an engine of that world first",
			nd->node->name, nd->gang);
	return errmsg_set(e, -EINVAL,
		"node %s is a gang of %u, the engine is of world %u",
		nd->node->name, nd->gang, c->engine->world);
}

static int win_check(struct mm_client *c, struct mm_space *sp,
		     unsigned int cls, unsigned int node, uint32_t rights,
		     struct errmsg *e)
{
	struct mm_win *w;
	int err;

	if (!mm_space_attached(sp, c))
		return errmsg_set(e, -EINVAL, "the space is not attached");
	if (cls >= sp->desc.nclasses)
		return errmsg_set(e, -EINVAL, "class %u: the space has %u",
				  cls, sp->desc.nclasses);
	if (node >= sp->mm->nr_nodes || !sp->mm->node[node].mem)
		return errmsg_set(e, -EINVAL,
				  "node %u: there is none, or it cannot be mapped",
				  node);
	err = gang_check(c, sp, &sp->mm->node[node], e);
	if (err)
		return err;
	if (rights != KVMM_RO && rights != KVMM_RW)
		return errmsg_set(e, -EINVAL, "rights: %u", rights);
	if (rights == KVMM_RW && c->o.rights != KVMM_RW)
		return errmsg_set(e, -EACCES, "the socket is read-only");
	if (engine_usable(c->engine))
		return errmsg_set(e, -EOWNERDEAD,
				  "a member of the engine has exited");
	list_for_each_entry(w, &c->windows, client_link)
		if (w->pool == sp->pool[cls][node] && !w->closed)
			return errmsg_set(e, -EBUSY,
				"class %u on node %u is open as window %u",
				cls, node, w->no);
	return 0;
}

/*
 * Next to its engine's other windows: pool_count_pins() goes by that. An engine
 * that is new to a pool whose pins are being counted has none there yet; what
 * its count says is of another pool.
 */
static void win_enlist(struct mm_win *w)
{
	struct mm_win *peer;

	list_for_each_entry(peer, &w->pool->windows, pool_link) {
		if (peer->engine != w->engine)
			continue;
		list_add(&peer->pool_link, &w->pool_link);
		return;
	}
	list_add_tail(&w->pool->windows, &w->pool_link);
	if (w->engine->mm->pin_pool == w->pool)
		w->engine->scan_pinned = 0;
}

int mm_win_open(struct mm_client *c, struct mm_space *sp, unsigned int cls,
		unsigned int node, uint32_t rights, struct mm_win **ret,
		struct errmsg *e)
{
	struct mm_win *w;
	int err, no;

	if (!rights)
		rights = c->o.rights;
	err = win_check(c, sp, cls, node, rights, e);
	if (err)
		return err;
	no = win_slot(c);
	if (no < 0)
		return errmsg_set(e, no, "%zu windows are open",
				  ARRAY_SIZE(c->win));
	w = calloc(1, sizeof(*w));
	if (!w)
		return errmsg_set(e, -ENOMEM, "out of memory");
	w->client = c;
	w->engine = c->engine;
	w->pool = sp->pool[cls][node];
	w->rights = rights;
	w->no = no;
	w->ledger_shm = (struct shm)SHM_INIT;
	list_init(&w->refill_link);
	list_init(&w->closed_link);
	err = win_ledger_create(w, e);
	if (err)
		goto out_free;
	if (!w->pool->nr_extents && pool_grow(w->pool) == -ENOSPC &&
	    !node_room_comes(w->pool->nd)) {
		err = errmsg_set(e, -ENOSPC,
			"node %s has no room for an extent of this class",
			w->pool->nd->node->name);
		goto out_ledger;
	}

	err = keep_win_take(w);
	if (err) {
		err = errmsg_set(e, err, "%u windows are open, of all clients",
				 KEEP_WINS);
		goto out_ledger;
	}

	c->win[no] = w;
	list_add_tail(&c->windows, &w->client_link);
	win_enlist(w);
	pool_publish_avail(w->pool);
	*ret = w;
	return 0;

out_ledger:
	shm_fini(&w->ledger_shm);
out_free:
	free(w);
	return err;
}

/*
 * Its cursors are what the ledger says that they are. Whoever wrote something else
 * there finds its own magazine in disorder.
 */
int win_adopt(struct mm_client *c, struct mm_pool *p, uint32_t keep,
	      const struct keep_win *kw, struct shm *ledger)
{
	const struct win_layout at = win_layout(p);
	struct mm_win *w = calloc(1, sizeof(*w));

	if (!w)
		return -ENOMEM;
	w->client = c;
	w->engine = c->engine;
	w->pool = p;
	w->keep = keep;
	w->rights = kw->rights;
	w->no = kw->no;
	w->reserved = kw->reserved;
	w->synced_seq = kw->synced_seq;
	/* relaxed: the daemon is the only writer */
	w->told_seq = atomic_load_explicit(&p->table->extent_seq,
					   memory_order_relaxed);
	w->ledger_shm = *ledger;
	*ledger = (struct shm)SHM_INIT;
	win_ledger_map(w, &at);
	w->mag_tail = atomic_load_explicit(&w->wl->mag_tail,
					   memory_order_relaxed);
	w->refills = atomic_load_explicit(&w->wl->refills,
					  memory_order_relaxed);
	list_init(&w->refill_link);
	list_init(&w->closed_link);
	list_init(&w->pool_link);
	bitmap_set(c->mm->keep->wins, keep - 1);
	c->mm->keep->holder[keep - 1] = w;
	c->win[w->no] = w;
	list_add_tail(&c->windows, &w->client_link);
	w->void_pins = kw->flags & KEEP_WIN_VOID;
	if (!w->void_pins)
		win_enlist(w);
	if (kw->flags & KEEP_WIN_CLOSED) {
		w->closed = true;
		w->open_at = 1;
		list_add_tail(&c->mm->closed, &w->closed_link);
	}
	return 0;
}

/* -- ending ------------------------------------------------------------------- */

void win_leave_wait(struct mm_win *w)
{
	pool_wants(w->pool, w->want, 0);
	w->want = 0;
	list_del(&w->refill_link);
}

void win_give_up(struct mm_win *w)
{
	win_leave_wait(w);
	w->reserved = 0;
}

void win_void(struct mm_win *w)
{
	win_give_up(w);
	if (w->void_pins)
		return;
	w->void_pins = true;
	list_del(&w->pool_link);
	keep_win(w);
}

void win_destroy(struct mm_win *w)
{
	win_void(w);
	list_del(&w->closed_link);
	list_del(&w->client_link);
	keep_win_drop(w);
	w->client->win[w->no] = NULL;
	shm_fini(&w->ledger_shm);
	free(w);
}

/*
 * Frames of @w that are OPEN and only wait to be used or freed. Those that wait
 * for a step, a publish or a worker are met again in the next round. True: none
 * is left.
 */
static bool win_free_open(struct mm_win *w, uint32_t *budget)
{
	struct mm_pool *p = w->pool;
	uint32_t f, end;

	for (; w->nr_open && w->open_at <= p->max_extents; w->open_at++) {
		const struct mm_extent *x = &p->extent[w->open_at];

		if (!x->ext || !x->nr_used)
			continue;
		if (!*budget)
			break;
		*budget -= min(*budget, p->per_extent);
		f = w->open_at * p->per_extent;
		for (end = f + p->per_extent; f < end; f++) {
			const struct frame_meta *m = &p->meta[f];

			if (m->win == w && !m->flags && !m->refs)
				frame_put(p, f);
		}
	}
	if (w->open_at > p->max_extents)
		w->open_at = 1;
	pool_feed(p);
	return !w->nr_open;
}

uint32_t win_pins_next(const struct mm_win *w, uint32_t f, uint32_t *end)
{
	off_t base = (const char *)w->pins - (const char *)w->wl, at;
	const uint32_t n = w->pool->max_frames;

	*end = n;
	at = lseek(w->ledger_shm.fd, base + (off_t)f * 4, SEEK_DATA);
	if (at < 0)
		return errno == ENXIO ? n : f;
	f = min((uint64_t)(at - base) / 4, (uint64_t)n);
	at = lseek(w->ledger_shm.fd, at, SEEK_HOLE);
	if (at >= 0)
		*end = min((uint64_t)(at - base) / 4, (uint64_t)n);
	return f;
}

static bool frame_in_use(const struct mm_pool *p, uint32_t f)
{
	return frame_live(p, f) && p->extent[f / p->per_extent].nr_used;
}

/*
 * Its client sets no pin any more: where there was none there will be none, and
 * one that is there is where to look next. True: all are gone.
 */
static bool win_unpinned(struct mm_win *w, uint32_t *budget)
{
	const struct mm_pool *p = w->pool;
	uint32_t end = 0;

	for (; w->pins_at < p->max_frames; w->pins_at++, --*budget) {
		if (w->pins_at >= end)
			w->pins_at = win_pins_next(w, w->pins_at, &end);
		if (w->pins_at >= end)
			break;
		if (!*budget)
			return false;
		/* acquire: pairs with the client's release of a pin */
		if (atomic_load_explicit(&w->pins[w->pins_at],
					 memory_order_acquire) &&
		    frame_in_use(p, w->pins_at))
			return false;
	}
	return true;
}

static void win_look(struct mm_win *w, uint32_t *budget)
{
	if (!w->closed || w->refs || w->client->exited)
		return;
	if (win_free_open(w, budget) &&
	    (w->void_pins || win_unpinned(w, budget)))
		win_destroy(w);
}

void win_retire(struct mm_win *w)
{
	uint32_t budget = CLOSED_FRAMES;

	win_look(w, &budget);
}

void mm_win_close(struct mm_win *w)
{
	if (w->closed)
		return;
	w->closed = true;
	w->open_at = 1;
	list_add_tail(&w->engine->mm->closed, &w->closed_link);
	win_give_up(w);
	keep_win(w);
	win_retire(w);
}

uint64_t windows_run(struct mm *mm, uint64_t now_ns)
{
	uint32_t budget = CLOSED_FRAMES;
	struct mm_win *w;
	struct list todo;

	if (list_empty(&mm->closed))
		return UINT64_MAX;
	if (now_ns < mm->next_closed_ns)
		return mm->next_closed_ns;
	list_init(&todo);
	list_splice_tail(&todo, &mm->closed);
	while (budget && (w = list_first(&todo, struct mm_win, closed_link))) {
		list_move_tail(&mm->closed, &w->closed_link);
		win_look(w, &budget);
	}
	/* whose turn did not come are the first of the next round */
	list_splice_tail(&todo, &mm->closed);
	list_splice_tail(&mm->closed, &todo);
	mm->next_closed_ns = now_ns + (budget ? CLOSED_NS : CLOSED_MORE_NS);
	return mm->next_closed_ns;
}

/* -- looking -------------------------------------------------------------------- */

const struct shm *mm_win_table(const struct mm_win *w)
{
	return &w->pool->table_shm;
}

const struct shm *mm_win_ledger(const struct mm_win *w)
{
	return &w->ledger_shm;
}

struct mm_space *mm_win_space(const struct mm_win *w)
{
	return w->pool->space;
}

uint32_t mm_win_rights(const struct mm_win *w)
{
	return w->rights;
}

unsigned int mm_win_cls(const struct mm_win *w)
{
	return w->pool->cls;
}

unsigned int mm_win_node(const struct mm_win *w)
{
	return w->pool->nd->ix;
}

uint16_t mm_win_no(const struct mm_win *w)
{
	return w->no;
}

bool mm_win_blind(const struct mm_win *w)
{
	return w->pool->nd->gang && (w->client->flags & KVMM_NO_STEP);
}

uint64_t mm_win_part(const struct mm_win *w)
{
	if (!w->pool->nd->gang || mm_win_blind(w))
		return 0;
	return w->client->rank * pool_part_bytes(w->pool);
}

struct mm_win *mm_win_get(struct mm_client *c, uint16_t no)
{
	struct mm_win *w = no < ARRAY_SIZE(c->win) ? c->win[no] : NULL;

	return w && !w->closed ? w : NULL;
}

/* -- extents that came and went --------------------------------------------------- */

/* The descriptor that @w's client may have of an extent, made once. */
static int extent_fd(struct mm_extent *e, uint32_t rights)
{
	int *fd = rights == KVMM_RW ? &e->rw_fd : &e->ro_fd;

	if (*fd < 0)
		*fd = rights == KVMM_RW ? extent_fd_rw(e->ext) :
					  extent_fd_ro(e->ext);
	return *fd;
}

unsigned int mm_win_sync(struct mm_win *w, uint64_t have_seq,
			 unsigned int skip, struct mm_extent_change *ch,
			 unsigned int max, uint64_t *seq)
{
	struct mm_pool *p = w->pool;
	/* relaxed: the daemon is the only writer */
	uint64_t now = atomic_load_explicit(&p->table->extent_seq,
					    memory_order_relaxed);
	uint64_t synced = w->synced_seq;
	unsigned int n = 0;
	uint32_t no;

	*seq = now;
	if (have_seq <= w->told_seq)
		w->synced_seq = max(w->synced_seq, have_seq);
	if (w->synced_seq != synced)
		keep_win(w);
	/* also when it ends early: what was told by then is held, win_holds() */
	w->told_seq = now;
	for (no = 1; no <= p->max_extents && n < max; no++) {
		struct mm_extent *e = &p->extent[no];
		bool up = e->ext && !e->down_seq && e->up_seq > have_seq;
		/* it came in an exchange that was not finished: its bit tells */
		bool down = e->ext && e->down_seq > have_seq &&
			    (e->up_seq <= have_seq ||
			     bitmap_shared_test(w->bitmap, no));

		if (!up && !down)
			continue;
		if (skip) {
			skip--;
			continue;
		}
		ch[n] = (struct mm_extent_change){
			.no = no, .up = up, .fd = -1,
		};
		if (up && !mm_win_blind(w))
			ch[n].fd = extent_fd(e, w->rights);
		if (up && !mm_win_blind(w) && ch[n].fd < 0) {
			/* out of descriptors: asked for again, from the start */
			*seq = have_seq;
			return n;
		}
		n++;
	}
	if (p->extents_going || !list_empty(&w->refill_link))
		w->engine->mm->next_pools_ns = 0;
	return n;
}

/* -- reserves --------------------------------------------------------------------------- */

static struct mm_win *biggest_holder(const struct mm_win *w)
{
	struct mm_win *o, *most = NULL;

	list_for_each_entry(o, &w->pool->windows, pool_link)
		if (o != w && (!most || o->reserved > most->reserved))
			most = o;
	return most && most->reserved ? most : NULL;
}

int mm_reserve(struct mm_client *c, struct mm_space *sp, unsigned int cls,
	       unsigned int node, uint32_t frames, struct errmsg *e)
{
	struct mm_win *w, *o, *most;
	uint64_t limit, sum = 0;

	if (cls >= sp->desc.nclasses || node >= sp->mm->nr_nodes ||
	    !sp->pool[cls][node])
		return errmsg_set(e, -EINVAL, "class %u on node %u: none", cls,
				  node);
	list_for_each_entry(w, &c->windows, client_link)
		if (w->pool == sp->pool[cls][node] && !w->closed)
			break;
	if (&w->client_link == &c->windows)
		return errmsg_set(e, -EINVAL,
				  "no window is open on class %u, node %u", cls,
				  node);
	if (w->rights != KVMM_RW)
		return errmsg_set(e, -EACCES, "the window is read-only");
	if (engine_usable(c->engine))
		return errmsg_set(e, -EOWNERDEAD,
				  "a member of the engine has exited");
	list_for_each_entry(o, &w->pool->windows, pool_link)
		if (o != w)
			sum += o->reserved;
	limit = pool_most_frames(w->pool);
	if (frames && sum + frames + w->pool->reserve > limit) {
		most = biggest_holder(w);
		return errmsg_set(e, -ENOSPC,
			"%u frames of %llu: others have reserved %llu, most of them %s (process %d)",
			frames, (unsigned long long)limit,
			(unsigned long long)sum, most ? most->client->name : "nobody",
			most ? (int)most->client->o.pid : 0);
	}
	w->reserved = frames;
	keep_win(w);
	return 0;
}
