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
 * left no pin in it. The struct stays as long as an operation or an answer on
 * its way names it.
 *
 * Refill. A client that cannot serve an allocation from its magazine says how
 * much it wants; what is pushed is that, and some more for the next 10 ms at the
 * rate of late, as long as frames are plenty. Only frames of extents that every
 * member of the engine has mapped. What cannot be had at once is waited for
 * here, never by the client: it is woken when frames came.
 */
#include <stdlib.h>

#include "daemon/mm/mm_types.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define REFILL_MIN	64u		/* a stock, when frames are plenty */
#define REFILL_AHEAD_NS	(10 * NSEC_PER_MSEC)
#define REFILL_RATE_NS	NSEC_PER_MSEC	/* shorter times say nothing of a rate */

/* -- the ledger ------------------------------------------------------------- */

static int win_ledger_create(struct mm_win *w, struct errmsg *e)
{
	const struct mm_pool *p = w->pool;
	uint64_t bits = p->max_extents + UINT64_C(1);
	struct window_ledger *l;
	uint64_t bitmap, pins, mag, bytes;
	int err;

	w->mag_entries = roundup_pow2(p->max_frames);
	bitmap = sizeof(*l);
	pins = round_up(bitmap + BITMAP_WORDS(bits) * 8, 4096);
	mag = round_up(pins + (uint64_t)p->max_frames * 4, 4096);
	bytes = mag + (uint64_t)w->mag_entries * 4;
	err = shm_create(&w->ledger_shm, "kvmm-window", bytes, 0);
	if (err)
		return errmsg_set(e, err, "window ledger of %llu bytes: %s",
				  (unsigned long long)bytes, strerror(-err));

	w->wl = l = w->ledger_shm.addr;
	l->magic = KVMM_MAGIC_WINDOW;
	l->size = sizeof(*l);
	l->max_frames = p->max_frames;
	l->mag_entries = w->mag_entries;
	l->nr_extents = bits;
	l->bitmap_off = bitmap;
	l->pins_off = pins;
	l->mag_off = mag;
	l->bytes = bytes;
	w->bitmap = (_Atomic uint64_t *)((char *)l + bitmap);
	w->pins = (_Atomic uint32_t *)((char *)l + pins);
	w->mag = (_Atomic uint32_t *)((char *)l + mag);
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

static int win_check(struct mm_client *c, struct mm_space *sp,
		     unsigned int cls, unsigned int node, uint32_t rights,
		     struct errmsg *e)
{
	struct mm_win *w;

	if (!mm_space_attached(sp, c))
		return errmsg_set(e, -EINVAL, "the space is not attached");
	if (cls >= sp->desc.nclasses)
		return errmsg_set(e, -EINVAL, "class %u: the space has %u",
				  cls, sp->desc.nclasses);
	if (node >= sp->mm->nr_nodes || !sp->mm->node[node].mem)
		return errmsg_set(e, -EINVAL,
				  "node %u: there is none, or it cannot be mapped",
				  node);
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

/* Next to its engine's other windows: pool_count_pins() goes by that. */
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

/* -- ending ------------------------------------------------------------------- */

void win_leave_wait(struct mm_win *w)
{
	w->pool->want -= w->want;
	w->want = 0;
	list_del(&w->refill_link);
}

void win_void(struct mm_win *w)
{
	win_leave_wait(w);
	if (w->void_pins)
		return;
	w->void_pins = true;
	list_del(&w->pool_link);
}

void win_destroy(struct mm_win *w)
{
	win_void(w);
	list_del(&w->client_link);
	w->client->win[w->no] = NULL;
	shm_fini(&w->ledger_shm);
	free(w);
}

/* Frames of @w that are OPEN and only wait to be used or freed. */
static void win_free_open(struct mm_win *w)
{
	struct mm_pool *p = w->pool;
	uint32_t no, f, end;

	for (no = 1; no <= p->max_extents && w->nr_open; no++) {
		if (!p->extent[no].ext || !p->extent[no].nr_used)
			continue;
		f = no * p->per_extent;
		for (end = f + p->per_extent; f < end; f++) {
			const struct frame_meta *m = &p->meta[f];

			if (m->win == w && !m->flags && !m->refs)
				frame_put(p, f);
		}
	}
	pool_feed(p);
}

static bool win_has_pins(const struct mm_win *w)
{
	const struct mm_pool *p = w->pool;
	uint32_t no, f, end;

	for (no = 1; no <= p->max_extents; no++) {
		if (!p->extent[no].ext || !p->extent[no].nr_used)
			continue;
		f = no * p->per_extent;
		for (end = f + p->per_extent; f < end; f++)
			/* acquire: pairs with the client's release of a pin */
			if (atomic_load_explicit(&w->pins[f],
						 memory_order_acquire))
				return true;
	}
	return false;
}

void win_retire(struct mm_win *w)
{
	if (!w->closed || w->refs || w->client->exited)
		return;
	win_free_open(w);
	if (!w->nr_open && (w->void_pins || !win_has_pins(w)))
		win_destroy(w);
}

void mm_win_close(struct mm_win *w)
{
	if (w->closed)
		return;
	w->closed = true;
	win_leave_wait(w);
	win_retire(w);
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

uint16_t mm_win_no(const struct mm_win *w)
{
	return w->no;
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
	unsigned int n = 0;
	uint32_t no;

	*seq = now;
	if (have_seq <= w->told_seq)
		w->synced_seq = max(w->synced_seq, have_seq);
	for (no = 1; no <= p->max_extents && n < max; no++) {
		struct mm_extent *e = &p->extent[no];
		bool up = e->ext && !e->down_seq && e->up_seq > have_seq;
		bool down = e->ext && e->down_seq > have_seq &&
			    e->up_seq <= have_seq;

		if (!up && !down)
			continue;
		if (skip) {
			skip--;
			continue;
		}
		ch[n] = (struct mm_extent_change){
			.no = no, .up = up, .fd = -1,
		};
		if (up)
			ch[n].fd = extent_fd(e, w->rights);
		if (up && ch[n].fd < 0) {
			/* out of descriptors: asked for again, from the start */
			*seq = have_seq;
			return n;
		}
		n++;
	}
	w->told_seq = now;
	if (p->extents_going || !list_empty(&w->refill_link))
		w->engine->mm->next_pools_ns = 0;
	return n;
}

/* -- the magazine ------------------------------------------------------------------- */

uint64_t win_mapped(const struct mm_win *w, size_t i)
{
	uint64_t bits = UINT64_MAX;
	const struct mm_win *peer;

	/* acquire: pairs with the release of whoever mapped and set the bit */
	list_for_each_entry(peer, &w->pool->windows, pool_link)
		if (peer->engine == w->engine && !peer->closed &&
		    !peer->client->replaced)
			bits &= atomic_load_explicit(&peer->bitmap[i],
						     memory_order_acquire);
	return bits;
}

/* Frames that wait in the magazine; -EPROTO when the client's head is a lie. */
static int64_t magazine_fill(const struct mm_win *w)
{
	/* acquire: pairs with the client's release: it has read the places */
	uint32_t head = atomic_load_explicit(&w->wl->mag_head,
					     memory_order_acquire);
	uint32_t fill = w->mag_tail - head;

	return fill <= w->mag_entries ? (int64_t)fill : -EPROTO;
}

static void magazine_push(struct mm_win *w, const uint32_t *f, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		atomic_store_explicit(&w->mag[(w->mag_tail + i) &
					      (w->mag_entries - 1)], f[i],
				      memory_order_relaxed);
	w->mag_tail += n;
	/* release: pairs with the client's acquire; the places are there */
	atomic_store_explicit(&w->wl->mag_tail, w->mag_tail,
			      memory_order_release);
}

/* What others have a right to and do not hold yet. */
static uint64_t reserved_by_others(const struct mm_win *w)
{
	const struct mm_win *o;
	uint64_t sum = 0;

	list_for_each_entry(o, &w->pool->windows, pool_link)
		if (o->engine != w->engine && o->reserved > o->nr_open)
			sum += o->reserved - o->nr_open;
	return sum;
}

/* How many more OPEN frames @w may have at all. */
static uint64_t open_allowance(const struct mm_win *w)
{
	const struct mm_pool *p = w->pool;
	const struct mm *mm = p->space->mm;
	uint64_t frames = p->nd->node->capacity / p->stride;
	uint64_t most = frames, taken = p->nr_open + reserved_by_others(w);

	if (mm->o.pin_limit_pct)
		most = frames * mm->o.pin_limit_pct / 100;
	most = most > w->nr_open ? most - w->nr_open : 0;
	/* one's own reserve is a right, whatever the others hold */
	if (w->nr_open < w->reserved)
		return max(most, (uint64_t)w->reserved - w->nr_open);
	frames = frames > taken ? frames - taken : 0;
	return min(most, frames);
}

/* Hand out up to @n, keeping @keep free frames. Returns how many it was. */
static uint32_t win_give(struct mm_win *w, uint32_t n, uint32_t keep)
{
	struct mm_pool *p = w->pool;
	uint64_t allow = open_allowance(w);
	uint32_t f[256], given = 0;

	n = min((uint64_t)n, allow);
	if (p->nr_free <= keep)
		return 0;
	n = min(n, p->nr_free - keep);
	while (given < n) {
		uint32_t got = frame_take_open(p, w, f,
				min(n - given, (uint32_t)ARRAY_SIZE(f)));

		if (!got)
			break;
		magazine_push(w, f, got);
		given += got;
	}
	w->given_since += given;
	return given;
}

/* What the magazine should hold beyond the want, by the rate of late. */
static uint32_t refill_stock(struct mm_win *w, uint64_t now)
{
	const struct mm_pool *p = w->pool;
	uint64_t ns = max(now - w->last_refill_ns, REFILL_RATE_NS);
	uint64_t stock = 2 * w->given_since * REFILL_AHEAD_NS / ns;

	/* the last round's frames, over the time they lasted */
	w->last_refill_ns = now;
	w->given_since = 0;
	stock = max(stock, (uint64_t)REFILL_MIN);
	return min(stock, p->nr_frames / (uint64_t)16);
}

static void win_wait(struct mm_win *w, uint32_t n)
{
	struct mm_pool *p = w->pool;

	win_leave_wait(w);
	w->want = n;
	p->want += n;
	list_add_tail(&p->refill_wait, &w->refill_link);
	w->engine->mm->next_pools_ns = 0;
	w->engine->mm->next_reclaim_ns = 0;
}

/* What is clean goes at once; what must be written first is started. */
static void refill_reclaim(struct mm_pool *p, uint32_t n, uint64_t now)
{
	struct mm *mm = p->space->mm;
	struct reclaim_control rc = {
		.want		= n,
		.max_scan	= max(4 * n, 64u),
		.deadline_ns	= now + mm->o.direct_reclaim_ns,
		.direct		= true,
	};

	if (p->nr_pages)
		pool_reclaim(p, &rc);
}

/*
 * The client stores armed, then loads refills; here refills is stored, then
 * armed loaded: one of the two sees the other, and nobody sleeps on frames that
 * are there.
 */
static void refill_answered(struct mm_win *w)
{
	/* seq_cst: see above; and it releases what was pushed before it */
	atomic_store(&w->wl->refills, ++w->refills);
	w->engine->mm->ops->kick_client(w->client);
}

void mm_refill(struct mm_win *w, uint32_t n)
{
	struct mm_pool *p = w->pool;
	uint64_t now = now_ns();
	uint32_t stock, short_of;
	int64_t fill;

	if (w->closed || w->rights != KVMM_RW || engine_usable(w->engine))
		return;
	p->space->mm->now_ns = now;
	fill = magazine_fill(w);
	if (fill < 0) {
		client_evict(w->client, "magazine head beyond its tail");
		return;
	}
	n = min(n, p->max_frames);
	short_of = n > fill ? n - fill : 0;
	/* what it may not have, it need not wait for */
	short_of = min((uint64_t)short_of, open_allowance(w));
	stock = refill_stock(w, now);
	short_of -= win_give(w, short_of, p->reserve);
	/* frames that are there, but not mapped by it yet, need no more room */
	if (short_of && p->nr_free < p->reserve + short_of &&
	    pool_grow(p) == -ENOSPC) {
		refill_reclaim(p, short_of, now);
		short_of -= win_give(w, short_of, p->reserve);
	}
	if (short_of) {
		p->nd->c.allocstall++;
		win_wait(w, short_of);
	} else {
		win_leave_wait(w);
		fill = max(fill, (int64_t)n);
		if (stock > fill)
			win_give(w, stock - fill, p->wmark_low);
	}
	refill_answered(w);
}

void win_feed(struct mm_win *w)
{
	uint32_t got;

	if (!w->client->connected || w->closed || engine_usable(w->engine)) {
		win_leave_wait(w);
		return;
	}
	if (magazine_fill(w) < 0) {
		win_leave_wait(w);
		client_evict(w->client, "magazine head beyond its tail");
		return;
	}
	got = win_give(w, w->want, w->pool->reserve);
	if (!got)
		return;
	w->want -= got;
	w->pool->want -= got;
	if (!w->want)
		list_del(&w->refill_link);
	refill_answered(w);
}

/* -- frames that come back ------------------------------------------------------------ */

/* Frames that nobody else may get before a step. */
struct free_wait {
	struct step_wait sw;
	struct mm_pool	*pool;
	uint32_t	n;
	uint32_t	frame[];
};

static bool may_free(const struct mm_win *w, uint32_t f)
{
	const struct mm_pool *p = w->pool;
	const struct frame_meta *m = &p->meta[f];

	return frame_live(p, f) && f >= p->per_extent &&
	       frame_word_state(frame_word_of(p, f)) == FRAME_OPEN &&
	       m->owner == w->engine && !m->flags && !m->refs;
}

static void free_step(struct step_wait *sw, int err)
{
	struct free_wait *fw = container_of(sw, struct free_wait, sw);
	uint32_t i;

	/* a dead engine's frames go with the rest of what it holds */
	for (i = 0; i < fw->n; i++) {
		fw->pool->meta[fw->frame[i]].flags &= ~FMETA_FREE;
		if (!err)
			frame_put(fw->pool, fw->frame[i]);
	}
	if (!err)
		pool_feed(fw->pool);
	free(fw);
}

int mm_free(struct mm_win *w, const uint32_t *frame, uint32_t n, uint64_t after)
{
	struct mm_pool *p = w->pool;
	struct free_wait *fw;
	uint32_t i;

	fw = malloc(sizeof(*fw) + (size_t)n * sizeof(fw->frame[0]));
	if (!fw)
		return -ENOMEM;
	fw->sw.fn = free_step;
	fw->pool = p;
	for (i = 0; i < n; i++) {
		if (frame[i] >= p->max_frames || !may_free(w, frame[i]))
			goto out_undo;
		p->meta[frame[i]].flags |= FMETA_FREE;
		fw->frame[i] = frame[i];
	}
	fw->n = n;
	step_wait_add(w->engine, &fw->sw, after);
	return 0;

out_undo:
	while (i--)
		p->meta[frame[i]].flags &= ~FMETA_FREE;
	free(fw);
	return -EINVAL;
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

	if (cls >= sp->desc.nclasses || node >= sp->mm->nr_nodes)
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
	list_for_each_entry(o, &w->pool->windows, pool_link)
		if (o != w)
			sum += o->reserved;
	limit = w->pool->nd->node->capacity / w->pool->stride;
	if (frames && sum + frames + w->pool->reserve > limit) {
		most = biggest_holder(w);
		return errmsg_set(e, -ENOSPC,
			"%u frames of %llu: others have reserved %llu, most of them %s (process %d)",
			frames, (unsigned long long)limit,
			(unsigned long long)sum, most ? most->client->name : "nobody",
			most ? (int)most->client->o.pid : 0);
	}
	w->reserved = frames;
	return 0;
}
