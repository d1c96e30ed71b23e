/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients, the engines they are members of, steps, and death.
 *
 *   client	one process; ends when its pidfd says so. Its socket may close
 *		long before: then nobody answers it any more, but its pins and
 *		frames stay, since its kernels may still run
 *   engine	FORMING until all members with a step word have joined, ALIVE,
 *		DYING from the first exit on (or when it broke a limit); ended
 *		when the last member has exited
 *
 * A dying engine gets nothing new: what it waited for fails with -EOWNERDEAD.
 * What it holds stays until it has ended, because a member that still runs may
 * read it. Then its windows leave the lists that pins are summed over, and its
 * OPEN frames, which nobody else ever saw, go through quarantine: workers zero
 * them, and they are free.
 *
 * Steps. The engine's step is the minimum over the step words of its members,
 * 0 before all have joined, and never goes back here whatever a client stores.
 * Waiting is the Dekker pair of ipc/ledger.h: store step_wanted, load the steps
 * again, and only then wait.
 */
#include <stdlib.h>

#include "daemon/mm/mm_types.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"

#define STEP_POLL_NS	NSEC_PER_MSEC	/* step words that streams write */

/* -- steps ----------------------------------------------------------------- */

static bool steps(const struct mm_client *c)
{
	return !(c->flags & KVMM_NO_STEP) && !c->replaced;
}

uint64_t engine_step(struct mm_engine *e)
{
	uint64_t least = UINT64_MAX;
	struct mm_client *c;

	if (e->nr_stepping < e->world)
		return e->step;
	list_for_each_entry(c, &e->members, engine_link) {
		if (!steps(c))
			continue;
		/* seq_cst: pairs with the client's store, see above */
		least = min(least, (uint64_t)atomic_load_explicit(
				&c->ledger->step, memory_order_seq_cst));
	}
	e->step = max(e->step, least);
	return e->step;
}

static void wanted_publish(struct mm_engine *e, uint64_t step)
{
	struct mm_client *c;

	e->step_wanted = step;
	/* seq_cst: pairs with the client's load after it stored its step */
	list_for_each_entry(c, &e->members, engine_link)
		atomic_store_explicit(&c->ledger->step_wanted, step,
				      memory_order_seq_cst);
}

static void waiter_run(struct mm_engine *e, struct step_wait *w, int err)
{
	list_del(&w->link);
	e->mm->nr_step_waits--;
	w->fn(w, err);
}

void engine_steps_poll(struct mm_engine *e)
{
	for (;;) {
		struct step_wait *w;
		uint64_t want = UINT64_MAX;

		if (!list_empty(&e->waiters))
			engine_step(e);
		while ((w = list_first(&e->waiters, struct step_wait, link)) &&
		       w->step <= e->step)
			waiter_run(e, w, 0);
		if (w)
			want = w->step;
		if (want == e->step_wanted)
			return;
		/* and look again: a step may have come in between */
		wanted_publish(e, want);
	}
}

void step_wait_add(struct mm_engine *e, struct step_wait *w, uint64_t step)
{
	struct list *pos;

	list_init(&w->link);
	w->step = step;
	if (engine_usable(e)) {
		w->fn(w, -EOWNERDEAD);
		return;
	}
	if (step <= e->step) {
		w->fn(w, 0);
		return;
	}
	/* steps come in order, so this ends at once */
	for (pos = e->waiters.prev; pos != &e->waiters; pos = pos->prev)
		if (list_entry(pos, struct step_wait, link)->step <= step)
			break;
	list_add(pos, &w->link);
	e->mm->nr_step_waits++;
	if (step < e->step_wanted)
		engine_steps_poll(e);
}

void step_wait_del(struct mm_engine *e, struct step_wait *w)
{
	if (list_empty(&w->link))
		return;
	list_del(&w->link);
	e->mm->nr_step_waits--;
}

void mm_step_done(struct mm_client *c)
{
	engine_steps_poll(c->engine);
}

/* -- engines --------------------------------------------------------------- */

static struct mm_engine *engine_create(struct mm *mm, uint32_t socket,
				       uint32_t world)
{
	struct mm_engine *e = calloc(1, sizeof(*e));

	if (!e)
		return NULL;
	e->mm = mm;
	e->no = ++mm->engine_seq;
	e->socket = socket;
	e->world = world;
	e->step_wanted = UINT64_MAX;
	list_init(&e->members);
	list_init(&e->waiters);
	list_add_tail(&mm->engines, &e->link);
	return e;
}

static void engine_free(struct mm_engine *e)
{
	list_del(&e->link);
	free(e);
}

int engine_usable(const struct mm_engine *e)
{
	return e->state == ENGINE_DYING || e->ended ? -EOWNERDEAD : 0;
}

static void engine_set_state(struct mm_engine *e, enum ledger_engine_state st)
{
	struct mm_client *c;

	e->state = st;
	/* release: pairs with the client's acquire; world belongs to it */
	list_for_each_entry(c, &e->members, engine_link) {
		atomic_store_explicit(&c->ledger->engine_world, e->world,
				      memory_order_relaxed);
		atomic_store_explicit(&c->ledger->engine_state, st,
				      memory_order_release);
	}
}

static void engine_add(struct mm_engine *e, struct mm_client *c)
{
	c->engine = e;
	e->nr_members++;
	list_add_tail(&e->members, &c->engine_link);
	if (steps(c))
		e->nr_stepping++;
	/* relaxed: the client reads it after it got its reply */
	atomic_store_explicit(&c->ledger->step_wanted, e->step_wanted,
			      memory_order_relaxed);
	engine_set_state(e, e->nr_stepping >= e->world ? ENGINE_ALIVE :
							 ENGINE_FORMING);
}

static struct mm_engine *engine_find(struct mm *mm, uint32_t socket,
				     const uint8_t token[16])
{
	struct mm_engine *e;

	list_for_each_entry(e, &mm->engines, link)
		if (!e->anonymous && !e->ended && e->socket == socket &&
		    !memcmp(e->token, token, sizeof(e->token)))
			return e;
	return NULL;
}

/* Everything it waits for fails; what others wait for of it does, too. */
static void engine_fail_waits(struct mm_engine *e)
{
	struct mm_client *c;
	struct step_wait *w;
	struct mm_win *win;

	while ((w = list_first(&e->waiters, struct step_wait, link)))
		waiter_run(e, w, -EOWNERDEAD);
	wanted_publish(e, UINT64_MAX);
	list_for_each_entry(c, &e->members, engine_link) {
		publish_fail(c, -EOWNERDEAD);
		list_for_each_entry(win, &c->windows, client_link)
			win_leave_wait(win);
	}
}

static void engine_dying(struct mm_engine *e)
{
	struct mm_client *c;

	if (e->state == ENGINE_DYING)
		return;
	engine_set_state(e, ENGINE_DYING);
	engine_fail_waits(e);
	list_for_each_entry(c, &e->members, engine_link)
		if (c->connected)
			e->mm->ops->kick_client(c);
}

void engine_evict(struct mm_engine *e, const char *why)
{
	struct mm_client *c, *tmp;
	struct mm_win *w;

	e->evicted = true;
	engine_dying(e);
	list_for_each_entry(c, &e->members, engine_link)
		list_for_each_entry(w, &c->windows, client_link)
			win_void(w);
	list_for_each_entry_safe(c, tmp, &e->members, engine_link)
		client_evict(c, why);
}

/* -- zeroing ---------------------------------------------------------------- */

#define ZERO_JOB_FRAMES	1024u
#define ZERO_JOB_BYTES	(UINT64_C(32) << 20)	/* some 5 ms of one worker */

/* Frames of one pool that a worker zeroes. */
struct zero_job {
	struct work	work;
	struct mm_pool	*pool;
	uint32_t	n;
	uint32_t	stride;
	uint32_t	frame[ZERO_JOB_FRAMES];
	void		*addr[ZERO_JOB_FRAMES];
};

static void zero_fn(struct work *work)
{
	struct zero_job *j = container_of(work, struct zero_job, work);
	uint32_t i;

	for (i = 0; i < j->n; i++)
		memset(j->addr[i], 0, j->stride);
}

static void zero_done(struct work *work)
{
	struct zero_job *j = container_of(work, struct zero_job, work);
	struct mm_pool *p = j->pool;
	uint32_t i;

	p->space->mm->nr_jobs--;
	for (i = 0; i < j->n; i++)
		frame_put(p, j->frame[i]);
	free(j);
	pool_feed(p);
}

static void zero_submit(struct zero_job *j)
{
	struct mm *mm = j->pool->space->mm;

	mm->nr_jobs++;
	if (mm->o.pool) {
		work_submit(mm->o.pool, &j->work);
		return;
	}
	zero_fn(&j->work);
	zero_done(&j->work);
}

/* Adds @f to *@job and hands that over when it is full. */
static void zero_add(struct zero_job **job, struct mm_pool *p, uint32_t f)
{
	struct zero_job *j = *job;

	if (!j) {
		j = malloc(sizeof(*j));
		if (!j) {
			/* slow, but the frame is not lost */
			memset(frame_addr(p, f), 0, p->stride);
			frame_put(p, f);
			return;
		}
		memset(&j->work, 0, sizeof(j->work));
		j->work.fn = zero_fn;
		j->work.done = zero_done;
		j->pool = p;
		j->stride = p->stride;
		j->n = 0;
		*job = j;
	}
	p->meta[f].flags |= FMETA_ZERO;
	j->frame[j->n] = f;
	j->addr[j->n++] = frame_addr(p, f);
	if (j->n < ZERO_JOB_FRAMES &&
	    (uint64_t)j->n * p->stride < ZERO_JOB_BYTES)
		return;
	zero_submit(j);
	*job = NULL;
}

void frame_zero(struct mm_pool *p, uint32_t f)
{
	struct zero_job *job = NULL;

	zero_add(&job, p, f);
	if (job)
		zero_submit(job);
}

/* OPEN frames of @e in @p: nobody else knows them, nobody will finish them. */
static void pool_quarantine(struct mm_pool *p, struct mm_engine *e)
{
	struct zero_job *job = NULL;
	uint32_t no, f, end;

	for (no = 1; no <= p->max_extents && e->nr_open; no++) {
		if (!p->extent[no].ext || !p->extent[no].nr_used)
			continue;
		f = no * p->per_extent;
		for (end = f + p->per_extent; f < end; f++) {
			struct frame_meta *m = &p->meta[f];

			if (m->owner != e ||
			    frame_word_state(frame_word_of(p, f)) != FRAME_OPEN)
				continue;
			frame_quarantine(p, f);
			if (!m->refs)
				zero_add(&job, p, f);
		}
	}
	if (job)
		zero_submit(job);
}

/* -- clients ---------------------------------------------------------------- */

static void copy_str(char *dst, size_t size, const char *src)
{
	size_t n = src ? strnlen(src, size - 1) : 0;

	memcpy(dst, src ? src : "", n);
	dst[n] = '\0';
}

int mm_client_create(struct mm *mm, const struct mm_client_opts *o,
		     struct mm_client **ret)
{
	struct mm_client *c;
	struct mm_engine *e;

	if (!o->ledger || !o->ledger->addr)
		return -EINVAL;
	c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	e = engine_create(mm, o->socket, 1);
	if (!e) {
		free(c);
		return -ENOMEM;
	}
	e->anonymous = true;
	c->mm = mm;
	c->o = *o;
	copy_str(c->tenant, sizeof(c->tenant), o->tenant);
	copy_str(c->name, sizeof(c->name), o->name);
	c->o.tenant = c->tenant;
	c->o.name = c->name;
	c->ledger = o->ledger->addr;
	c->connected = true;
	list_init(&c->windows);
	list_init(&c->ops);
	engine_add(e, c);
	*ret = c;
	return 0;
}

void *mm_client_arg(const struct mm_client *c)
{
	return c->o.arg;
}

struct mm_engine *mm_client_engine(const struct mm_client *c)
{
	return c->engine;
}

uint32_t mm_client_rank(const struct mm_client *c)
{
	return c->rank;
}

uint32_t mm_client_flags(const struct mm_client *c)
{
	return c->flags;
}

uint32_t mm_client_world(const struct mm_client *c)
{
	return c->engine->world;
}

void mm_client_members(struct mm_client *c,
		       void (*fn)(struct mm_client *peer, void *arg),
		       void *arg)
{
	struct mm_client *peer;

	list_for_each_entry(peer, &c->engine->members, engine_link)
		if (peer != c && !peer->exited && !peer->replaced)
			fn(peer, arg);
}

void client_evict(struct mm_client *c, const char *why)
{
	if (c->evicted || !c->connected)
		return;
	c->evicted = true;
	c->mm->ops->evict_client(c, why);
}

/* -- joining ----------------------------------------------------------------- */

static int join_check(const struct mm_client *c, uint32_t rank, uint32_t world,
		      uint32_t flags, struct errmsg *e)
{
	if (flags & ~(KVMM_LEADER | KVMM_NO_STEP))
		return errmsg_set(e, -EINVAL, "flags: unknown bits 0x%x",
				  flags & ~(KVMM_LEADER | KVMM_NO_STEP));
	if (!world || world > KVMM_MAX_WORLD)
		return errmsg_set(e, -EINVAL, "world: %u, allowed are 1 to %u",
				  world, KVMM_MAX_WORLD);
	if (!(flags & KVMM_NO_STEP) && rank >= world)
		return errmsg_set(e, -EINVAL, "rank: %u, below world %u", rank,
				  world);
	if (c->joined || c->nr_spaces)
		return errmsg_set(e, -EBUSY, c->joined ?
			"this process is a member of an engine already" :
			"spaces are attached: join comes first");
	return 0;
}

/*
 * Who has the place already. The same process may take it again when its old
 * connection is closed: it came back, and its step word is the new one now.
 */
static int join_place(struct mm_engine *en, const struct mm_client *c,
		      uint32_t rank, uint32_t flags, struct mm_client **old,
		      struct errmsg *e)
{
	struct mm_client *m;

	list_for_each_entry(m, &en->members, engine_link) {
		bool rank_taken = !(flags & KVMM_NO_STEP) && steps(m) &&
				  m->rank == rank;
		bool leader_taken = (flags & m->flags & KVMM_LEADER) &&
				    !m->replaced;

		if (!rank_taken && !leader_taken)
			continue;
		if (!m->connected && m->o.pid == c->o.pid &&
		    m->flags == flags && m->rank == rank) {
			*old = m;
			continue;
		}
		return errmsg_set(e, -EEXIST, rank_taken ?
			"rank %u is taken by process %d" :
			"rank %u: process %d is the leader already",
			rank, (int)m->o.pid);
	}
	return 0;
}

int mm_client_join(struct mm_client *c, const uint8_t token[16],
		   uint32_t rank, uint32_t world, uint32_t flags,
		   struct errmsg *e)
{
	struct mm_engine *en, *alone = c->engine;
	struct mm_client *old = NULL, *peer;
	struct mm *mm = c->mm;
	int err;

	err = join_check(c, rank, world, flags, e);
	if (err)
		return err;
	en = engine_find(mm, c->o.socket, token);
	if (en && en->state == ENGINE_DYING)
		return errmsg_set(e, -EOWNERDEAD,
				  "a member of this engine has exited");
	if (en && en->world != world)
		return errmsg_set(e, -EPROTO,
				  "world: %u, the engine's other members say %u",
				  world, en->world);
	if (en) {
		err = join_place(en, c, rank, flags, &old, e);
		if (err)
			return err;
	} else {
		en = engine_create(mm, c->o.socket, world);
		if (!en)
			return errmsg_set(e, -ENOMEM, "out of memory");
		memcpy(en->token, token, sizeof(en->token));
	}

	if (old) {
		en->nr_stepping -= steps(old);
		old->replaced = true;
	}
	list_del(&c->engine_link);
	engine_free(alone);
	c->rank = rank;
	c->flags = flags;
	c->joined = true;
	engine_add(en, c);
	list_for_each_entry(peer, &en->members, engine_link)
		if (peer != c && peer->connected)
			mm->ops->member(peer, c, false);
	engine_steps_poll(en);
	return 0;
}

/* -- leaving ------------------------------------------------------------------ */

void mm_client_disconnect(struct mm_client *c)
{
	struct mm_win *w;
	struct mm_op *op;

	if (!c->connected)
		return;
	c->connected = false;
	/* all of them first: one that ends may let another one be answered */
	list_for_each_entry(op, &c->ops, link) {
		op->client = NULL;
		op->win->refs--;
		op->win = NULL;
	}
	while ((op = list_first(&c->ops, struct mm_op, link))) {
		list_del(&op->link);
		op->cancel(op);
	}
	list_for_each_entry(w, &c->windows, client_link) {
		win_leave_wait(w);
		if (mm_broken(c->mm, MM_BREAK_LEDGER))
			win_void(w);
	}
}

static void client_free(struct mm_client *c)
{
	struct mm_win *w;

	while ((w = list_first(&c->windows, struct mm_win, client_link)))
		win_destroy(w);
	while (c->nr_spaces)
		mm_detach(c, c->spaces[0]);
	list_del(&c->engine_link);
	if (c->exit_done)
		c->exit_done(c->exit_arg);
	free(c);
}

/* All members have exited: nothing of it runs any more. */
static void engine_end(struct mm_engine *e)
{
	struct mm_client *c, *tmp;
	struct mm_win *w;

	e->ended = true;
	list_for_each_entry(c, &e->members, engine_link)
		list_for_each_entry(w, &c->windows, client_link)
			win_void(w);
	list_for_each_entry(c, &e->members, engine_link)
		list_for_each_entry(w, &c->windows, client_link)
			if (e->nr_open)
				pool_quarantine(w->pool, e);
	list_for_each_entry_safe(c, tmp, &e->members, engine_link)
		client_free(c);
	if (!e->nr_open && !e->nr_quarantine)
		engine_free(e);
}

void mm_client_exit(struct mm_client *c, void (*done)(void *arg), void *arg)
{
	struct mm_engine *e = c->engine;
	struct mm_client *peer;

	mm_client_disconnect(c);
	c->exited = true;
	c->exit_done = done;
	c->exit_arg = arg;
	e->nr_exited++;
	engine_dying(e);
	if (e->nr_exited == e->nr_members) {
		engine_end(e);
		return;
	}
	list_for_each_entry(peer, &e->members, engine_link)
		if (peer->connected)
			e->mm->ops->member(peer, c, true);
}

/* -- operations ---------------------------------------------------------------- */

void mm_op_init(struct mm_op *op, struct mm_win *w, uint64_t tag, uint8_t kind,
		void (*cancel)(struct mm_op *op))
{
	op->client = w->client;
	op->win = w;
	op->tag = tag;
	op->op = kind;
	op->cancel = cancel;
	w->refs++;
	list_add_tail(&w->client->ops, &op->link);
}

void mm_op_fini(struct mm_op *op)
{
	struct mm_win *w = op->win;

	list_del(&op->link);
	op->client = NULL;
	op->win = NULL;
	if (!w)
		return;
	w->refs--;
	win_retire(w);
}

void mm_op_complete(struct mm_op *op, struct mm_pool *p, int32_t result,
		    uint32_t n, const struct ring_result *res)
{
	struct ring_cqe cqe = {
		.op = op->op, .result = result, .tag = op->tag, .n = n,
	};
	uint32_t i;

	if (!op->client) {
		for (i = 0; i < n; i++)
			if (res[i].frame)
				frame_unref(p, res[i].frame);
		return;
	}
	for (i = 0; i < n; i++)
		op->win->refs += res[i].frame != 0;
	p->space->mm->ops->complete(op->client, op->win, &cqe, res);
}

void mm_handover_put(struct mm_win *w, uint32_t frame)
{
	if (frame_live(w->pool, frame))
		frame_unref(w->pool, frame);
	if (w->refs)
		w->refs--;
	win_retire(w);
}

void mm_cancel(struct mm_client *c, uint64_t tag)
{
	struct mm_op *op;

	list_for_each_entry(op, &c->ops, link) {
		if (op->tag != tag)
			continue;
		op->cancel(op);
		return;
	}
}

/* -- too many pins ---------------------------------------------------------------- */

#define PIN_COUNT_NS	NSEC_PER_SEC	/* between two counts of a pool */
#define PIN_COUNT_LOADS	65536u		/* of pins, in one call */

static void pins_reset(struct mm_pool *p)
{
	struct mm_win *w;

	list_for_each_entry(w, &p->windows, pool_link)
		w->engine->scan_pinned = 0;
}

/* Distinct frames of an extent that each engine pins; its windows are adjacent. */
static uint32_t pins_count_extent(struct mm_pool *p, uint32_t no)
{
	uint32_t f = no * p->per_extent, end = f + p->per_extent, loads = 0;

	for (; f < end; f++) {
		struct mm_engine *seen = NULL;
		struct mm_win *w;

		list_for_each_entry(w, &p->windows, pool_link) {
			if (w->engine == seen)
				continue;
			loads++;
			/* relaxed: a count, nothing is reclaimed by it */
			if (!atomic_load_explicit(&w->pins[f],
						  memory_order_relaxed))
				continue;
			seen = w->engine;
			seen->scan_pinned++;
		}
	}
	return loads;
}

static void pins_judge(struct mm_pool *p)
{
	const struct mm *mm = p->space->mm;
	uint64_t limit = p->nd->node->capacity / p->stride *
			 mm->o.pin_limit_pct / 100;
	struct mm_win *w;

again:
	list_for_each_entry(w, &p->windows, pool_link) {
		if (w->engine->evicted || w->engine->scan_pinned <= limit)
			continue;
		engine_evict(w->engine, "more pinned frames than it may have");
		goto again;
	}
}

void pool_count_pins(struct mm_pool *p)
{
	struct mm *mm = p->space->mm;
	uint32_t loads = 0;

	if (!mm->o.pin_limit_pct || (mm->pin_pool && mm->pin_pool != p))
		return;
	if (!mm->pin_pool) {
		if (!p->want || mm->now_ns < p->pin_scan_ns)
			return;
		mm->pin_pool = p;
		p->pin_scan_at = 1;
		pins_reset(p);
	}
	for (; p->pin_scan_at <= p->max_extents; p->pin_scan_at++) {
		if (loads >= PIN_COUNT_LOADS)
			return;
		if (p->extent[p->pin_scan_at].ext)
			loads += pins_count_extent(p, p->pin_scan_at);
	}
	mm->pin_pool = NULL;
	p->pin_scan_at = 0;
	p->pin_scan_ns = mm->now_ns + PIN_COUNT_NS;
	pins_judge(p);
}

/* -- running ----------------------------------------------------------------------- */

uint64_t engines_run(struct mm *mm, uint64_t now_ns)
{
	struct mm_engine *e, *tmp;
	bool poll = mm->nr_step_waits && now_ns >= mm->next_step_poll_ns;

	list_for_each_entry_safe(e, tmp, &mm->engines, link) {
		if (poll && !list_empty(&e->waiters))
			engine_steps_poll(e);
		if (e->ended && !e->nr_open && !e->nr_quarantine)
			engine_free(e);
	}
	if (poll)
		mm->next_step_poll_ns = now_ns + STEP_POLL_NS;
	return mm->nr_step_waits ? mm->next_step_poll_ns : UINT64_MAX;
}

/* The end of the daemon: processes that still live are left without it. */
void engines_fini(struct mm *mm)
{
	struct mm_engine *e;
	struct mm_client *c;

	while ((e = list_first(&mm->engines, struct mm_engine, link))) {
		while ((c = list_first(&e->members, struct mm_client,
				       engine_link)))
			client_free(c);
		engine_free(e);
	}
}
