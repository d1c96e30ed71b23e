/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools: the frames or slots of one class on one node, what they are made of, and
 * who is served when frames come. The extents that hold a memory pool's frames:
 * extent.c.
 */
#include <stdlib.h>
#include <sys/mman.h>

#include "daemon/mm/keep.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define MIN_PER_EXTENT	4u
#define DRY_NS		NSEC_PER_SEC	/* unused for longer: let it be */
#define RUN_NS		NSEC_PER_MSEC	/* between rounds while something waits */
#define RUN_IDLE_NS	(100 * NSEC_PER_MSEC)

/* -- geometry -------------------------------------------------------------- */

/*
 * At least four pages, at most an eighth of the node, so that a small node can
 * serve several classes and give something back.
 */
static uint64_t extent_frames(const struct mm_node *nd, uint64_t frame_bytes)
{
	uint64_t bytes = nd->extent_bytes;

	bytes = min(bytes, nd->node->capacity / 8);
	return max(bytes / frame_bytes, (uint64_t)MIN_PER_EXTENT);
}

/* A frame of a gang has a part for each rank. */
static int pool_parts(struct mm_pool *p, struct errmsg *e)
{
	uint32_t bytes = p->page_bytes;

	p->parts = 1;
	if (p->nd->gang) {
		p->parts = p->nd->gang;
		p->shape = shape_create(&p->space->desc.cls[p->cls], p->parts);
		if (!p->shape)
			return errmsg_set(e, -ENOMEM, "out of memory");
		bytes = p->shape->part_bytes;
	}
	p->stride = round_up(bytes, NODE_ALIGN);
	return 0;
}

static int pool_geometry(struct mm_pool *p, struct errmsg *e)
{
	struct mm_node *nd = p->nd;
	uint64_t frame_bytes = (uint64_t)p->parts * p->stride, per, frames;

	per = extent_frames(nd, frame_bytes);
	p->max_extents = max(nd->size_max, nd->node->capacity) /
			 (per * frame_bytes);
	frames = (p->max_extents + UINT64_C(1)) * per;
	if (!p->max_extents || frames > KVMM_MAX_FRAMES)
		return errmsg_set(e, -ENOSPC,
			"node %s: %llu bytes cannot hold an extent of %llu frames of %llu bytes",
			nd->node->name, (unsigned long long)nd->size_max,
			(unsigned long long)per,
			(unsigned long long)frame_bytes);
	p->per_extent = per;
	p->max_frames = frames;
	return 0;
}

/* -- life ------------------------------------------------------------------ */

static void pool_map(struct mm_pool *p, const struct keep_pool *h)
{
	char *base = p->record_shm.addr;

	p->owner = (_Atomic uint64_t *)(base + h->owner_off);
	p->record = (struct frame_record *)(base + h->record_off);
	p->table = p->table_shm.addr;
}

static int pool_shm(struct mm_pool *p, struct errmsg *e)
{
	struct frame_table *t;
	struct keep_pool h;
	int err;

	if (p->space->mm->adopting && !adopt_pool_shm(p)) {
		pool_map(p, p->record_shm.addr);
		p->adopted = true;
		return 0;
	}
	keep_pool_layout(p, &h);
	err = shm_create(&p->table_shm, "kvmm-frames",
			 frame_table_bytes(p->max_frames), 1);
	if (err)
		goto out;
	err = shm_create(&p->record_shm, "kvmm-records", h.bytes, 0);
	if (err)
		goto out;
	keep_pool_of(&h, keep_id_of(p->table_shm.fd));
	*(struct keep_pool *)p->record_shm.addr = h;
	pool_map(p, &h);
	t = p->table;
	t->magic = KVMM_MAGIC_TABLE;
	t->size = sizeof(*t);
	t->stride = p->stride;
	t->max_frames = p->max_frames;
	t->frames_per_extent = p->per_extent;
	t->extent_bytes = pool_part_bytes(p);
	keep_pool(p);
	return 0;
out:
	return errmsg_set(e, err, "frame table of %u frames: %s", p->max_frames,
			  strerror(-err));
}

/* Sized for the most frames there can ever be, backed where it is touched. */
static int pool_lazy(struct mm_pool *p, struct errmsg *e)
{
	size_t meta = (size_t)p->max_frames * sizeof(*p->meta);
	size_t stacks = (size_t)p->max_frames * sizeof(*p->free);
	char *m;

	p->extent = calloc(p->max_extents + 1, sizeof(*p->extent));
	p->free_map = calloc(BITMAP_WORDS(p->max_extents + 1),
			     sizeof(*p->free_map));
	if (!p->extent || !p->free_map)
		return errmsg_set(e, -ENOMEM, "out of memory");
	m = mmap(NULL, meta + stacks, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m == MAP_FAILED)
		return errmsg_set(e, -ENOMEM,
			"no address space for what %u frames need",
			p->max_frames);
	if (meta + stacks >= 2 * SHM_HUGE_BYTES)
		madvise(m, meta + stacks, MADV_HUGEPAGE);
	p->lazy_bytes = meta + stacks;
	p->meta = (struct frame_meta *)m;
	p->free = (uint32_t *)(m + meta);
	return 0;
}

static void pool_free(struct mm_pool *p)
{
	if (p->meta)
		munmap(p->meta, p->lazy_bytes);
	shm_fini(&p->table_shm);
	shm_fini(&p->record_shm);
	free(p->free_map);
	free(p->extent);
	free(p->shape);
	free(p);
}

int pool_create(struct mm_space *sp, unsigned int cls, struct mm_node *nd,
		struct errmsg *e)
{
	struct mm_pool *p = calloc(1, sizeof(*p));
	int err;

	if (!p)
		return errmsg_set(e, -ENOMEM, "out of memory");
	p->space = sp;
	p->cls = cls;
	p->nd = nd;
	p->page_bytes = sp->desc.cls[cls].page_bytes;
	p->table_shm = (struct shm)SHM_INIT;
	p->record_shm = (struct shm)SHM_INIT;
	list_init(&p->dirty);
	list_init(&p->windows);
	list_init(&p->refill_wait);
	list_init(&p->load_wait);
	if (nd->mem) {
		err = pool_parts(p, e);
		if (!err)
			err = pool_geometry(p, e);
		if (!err)
			err = pool_shm(p, e);
		if (!err)
			err = pool_lazy(p, e);
		if (err)
			goto out_free;
	}
	err = pool_policy_init(p, e);
	if (err)
		goto out_keep;
	list_add_tail(&nd->pools, &p->node_link);
	sp->pool[cls][nd->ix] = p;
	return 0;

out_keep:
	keep_pool_drop(p);
out_free:
	pool_free(p);
	return err;
}

void pool_destroy(struct mm_pool *p)
{
	if (p->nd->next_pool == p)
		p->nd->next_pool = NULL;
	evacuate_forget(p);
	if (p->space->mm->pin_pool == p)
		p->space->mm->pin_pool = NULL;
	pool_policy_fini(p);
	keep_pool_drop(p);
	list_del(&p->node_link);
	p->space->pool[p->cls][p->nd->ix] = NULL;
	pool_free(p);
}

/* -- waiting --------------------------------------------------------------- */

void pool_wants(struct mm_pool *p, uint32_t was, uint32_t is)
{
	p->want = p->want - was + is;
	if (!p->want)
		p->squeezed_ns = 0;
	else if (!p->squeezed_ns)
		p->squeezed_ns = max(p->space->mm->now_ns, (uint64_t)1);
}

/* -- feeding --------------------------------------------------------------- */

void pool_feed(struct mm_pool *p)
{
	struct mm_win *w, *tmp;

	if (p->feeding || !p->nr_free)
		return;
	p->feeding = true;
	if (!list_empty(&p->load_wait))
		fetch_frames_came(p);
	list_for_each_entry_safe(w, tmp, &p->refill_wait, refill_link)
		win_feed(w);
	p->feeding = false;
}

static uint32_t clip32(uint64_t x)
{
	return min(x, (uint64_t)UINT32_MAX);
}

void pool_publish_avail(struct mm_pool *p)
{
	struct frame_table *t = p->table;
	uint64_t free = p->nr_free > p->reserve ? p->nr_free - p->reserve : 0;
	uint64_t limit = p->nd->node->capacity / pool_extent_bytes(p) * p->per_extent;

	/* relaxed: numbers to go by, nothing hangs on their order */
	atomic_store_explicit(&t->nr_free, clip32(free + pool_room(p)),
			      memory_order_relaxed);
	atomic_store_explicit(&t->nr_clean, clip32(p->nr_pages - p->nr_dirty),
			      memory_order_relaxed);
	atomic_store_explicit(&t->nr_dirty, clip32(p->nr_dirty),
			      memory_order_relaxed);
	atomic_store_explicit(&t->nr_limit, clip32(limit),
			      memory_order_relaxed);
}

static bool pool_waits(const struct mm_pool *p)
{
	return !list_empty(&p->refill_wait) || !list_empty(&p->load_wait);
}

bool pool_runs_dry(const struct mm_pool *p)
{
	uint32_t few = max(p->wmark_low, p->per_extent / 4);

	return p->nr_extents && !p->extents_coming && p->nr_free < few &&
	       p->space->mm->now_ns - p->used_ns < DRY_NS && pool_room(p);
}

static bool pool_run(struct mm_pool *p)
{
	bool waits = pool_waits(p);

	if (p->ending)
		return true;
	/* free frames that nobody has mapped yet are no reason to grow */
	if ((waits && p->nr_free < p->reserve + p->want) || pool_runs_dry(p))
		pool_grow(p);
	if (waits)
		pool_feed(p);
	if (p->extents_going)
		extents_going_run(p);
	pool_count_pins(p);
	pool_publish_avail(p);
	return waits || p->extents_going;
}

uint64_t pools_run(struct mm *mm, uint64_t now_ns)
{
	bool busy = mm->pin_pool;
	unsigned int i;

	if (now_ns < mm->next_pools_ns)
		return mm->next_pools_ns;
	for (i = 0; i < mm->nr_nodes; i++) {
		struct mm_pool *p;

		if (!mm->node[i].mem)
			continue;
		list_for_each_entry(p, &mm->node[i].pools, node_link)
			busy |= pool_run(p);
	}
	mm->next_pools_ns = now_ns + (busy ? RUN_NS : RUN_IDLE_NS);
	return mm->next_pools_ns;
}
