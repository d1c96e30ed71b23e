/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One engine: what an inference engine does with kvmm, without the inference.
 *
 * A loop of steps, as engines have. Up to NR_ACTIVE requests are worked on at
 * a time. A new one is matched; what was found is read where it lies; what
 * lies below is fetched, with a deadline; the rest is computed in chunks. A
 * step is launched: its chunks get frames and are published at once, with this
 * step as their fence. Then the device is busy for PAGE_NS a page, and only at
 * its end the bytes are written, in place, and the step is declared done: a
 * page that others could find earlier would be wrong in every byte. A request
 * whose publishes are all answered ends with its hint.
 *
 *	FETCHING -> COMPUTING -> DRAINING -> (ended)
 *
 * kvmmd may be stopped, slow or out of frames: then a fetch becomes a miss at
 * its deadline, and pages for which no frame came in time are computed in
 * private memory and not shared. The engine itself never stands still.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "tests/demo/engine.h"

#define PAGE_NS		NSEC_PER_MSEC	/* to compute a page: 0.5 M tokens/s */
#define FETCH_NS	(300 * NSEC_PER_MSEC)
#define PATIENT_NS	(3 * NSEC_PER_SEC)
#define PATIENT		4u		/* fetches */
#define FRAME_NS	(50 * NSEC_PER_MSEC)	/* wait for frames at most */
#define DRAIN_NS	(20 * NSEC_PER_SEC)	/* for publishes, at most */

static bool flag(const _Atomic uint32_t *f)
{
	/* acquire: pairs with the parent's release; a flag, not data */
	return atomic_load_explicit(f, memory_order_acquire) != 0;
}

void complain(struct engine *e, const char *what, int err)
{
	fprintf(stderr, "engine %u: %s: %s (%s)\n", e->me, what,
		strerror(-err), kvmm_error(e->k));
	count(&e->st->errors, 1);
}

/* ---- operations in flight ------------------------------------------------------ */

static struct op *op_get(struct engine *e, struct run *r)
{
	struct op *op = &e->op[++e->seq % NR_OPS];

	if (op->run)
		return NULL;	/* the oldest is still out: enough for now */
	op->run = r;
	op->tag = e->seq;
	op->start_ns = now_ns();
	op->stops = atomic_load_explicit(&e->sh->stops, memory_order_relaxed);
	return op;
}

/* How long it took, unless kvmmd was stopped meanwhile. */
static void op_time(struct engine *e, const struct op *op, struct hist *h)
{
	if (op->stops == atomic_load_explicit(&e->sh->stops,
					      memory_order_relaxed))
		hist_add(h, now_ns() - op->start_ns);
}

/* ---- a request's life ------------------------------------------------------------ */

static void run_end(struct engine *e, struct run *r)
{
	if (r->state == RUN_FETCHING || r->state == RUN_COMPUTING)
		e->nr_active--;
	/* What it read was read when it was admitted; see read_page(). */
	kvmm_req_end(r->rq, r->r->how, e->step - 1);
	count(&e->st->requests, 1);
	r->rq = NULL;
	r->state = RUN_FREE;
}

static void run_drain(struct engine *e, struct run *r)
{
	if (!r->inflight) {
		run_end(e, r);
		return;
	}
	e->nr_active--;
	r->state = RUN_DRAINING;
	r->since = now_ns();
}

static int run_match(struct engine *e, struct run *r, struct kvmm_match *m)
{
	struct kvmm_keys keys = { .k = r->key, .n = r->r->npages, .group = 0 };
	bool stopped = flag(&e->sh->stopped);
	uint64_t t = now_ns(), took;
	int err;

	memset(m, 0, sizeof(*m));
	m->size = sizeof(*m);
	err = kvmm_match(r->rq, &keys, 1, e->dram, r->hit, m);
	took = now_ns() - t;
	if (err)
		return err;
	count(&e->st->lookups, 1);
	count(&e->st->match_ns, took);
	if (stopped && flag(&e->sh->stopped)) {
		hist_add(&e->st->match_stopped, took);
		count(&e->st->stopped_lookups, 1);
		count(&e->st->stopped_hits, m->n_resident);
	} else {
		hist_add(&e->st->match, took);
	}
	return 0;
}

static void run_compute_next(struct run *r)
{
	r->state = RUN_COMPUTING;
	r->since = 0;
}

/*
 * As an engine has it, but for the first few: on a disk that takes a second for
 * everything it shows, too, that pages come back.
 */
static uint64_t fetch_ns(struct engine *e)
{
	return e->nr_fetches++ < PATIENT ? PATIENT_NS : FETCH_NS;
}

static void run_fetch(struct engine *e, struct run *r, uint32_t end)
{
	struct op *op = op_get(e, r);
	int err;

	r->fetch_end = end;
	if (!op) {
		run_compute_next(r);
		return;
	}
	op->first = r->have;
	op->n = end - r->have;
	err = kvmm_fetch(r->rq, r->have, end, e->dram,
			 op->start_ns + fetch_ns(e), op->tag);
	if (err) {
		op->run = NULL;
		if (err != -EAGAIN)
			complain(e, "fetch", err);
		run_compute_next(r);
		return;
	}
	r->state = RUN_FETCHING;
}

/* Take the next request of the slice. Return: false: not now. */
static bool admit(struct engine *e)
{
	const struct trace *t = &e->dm->trace;
	uint64_t next = read_count(&e->st->next);
	const struct request *rec = &t->req[next * NR_ENGINES + e->me];
	struct kvmm_hint hint = {
		.size = sizeof(hint),
		.session = rec->session,
	};
	struct kvmm_match m;
	struct run *r;
	uint32_t i;
	int err;

	for (r = e->run; r < e->run + NR_RUNS && r->state != RUN_FREE; r++)
		;
	if (r == e->run + NR_RUNS)
		return false;
	err = kvmm_req_open(e->sp, next * NR_ENGINES + e->me, &hint, &r->rq);
	if (err == -EAGAIN)
		return false;
	if (err) {
		complain(e, "request", err);
		count(&e->st->next, 1);
		return true;
	}
	r->r = rec;
	r->inflight = 0;
	for (i = 0; i < rec->npages; i++)
		kvmm_key_wrap(e->sp, &rec->page[i], sizeof(rec->page[i]),
			      &r->key[i]);
	count(&e->st->next, 1);
	count(&e->st->tokens, rec->tokens);
	count(&e->st->pages_asked, rec->npages);
	e->nr_active++;

	err = run_match(e, r, &m);
	if (!err && m.sync_wanted &&
	    kvmm_win_sync(e->win, e->step - 1) > 0)
		err = run_match(e, r, &m);
	if (err) {
		complain(e, "match", err);
		m.n_resident = m.n_load = 0;
	}
	for (i = 0; i < m.n_resident; i++)
		if (!read_page(e, r, i, r->hit[i].frame))
			break;
	r->have = i;
	count(&e->st->pages_dram, i);
	if (i == m.n_resident && m.n_load > m.n_resident)
		run_fetch(e, r, m.n_load);
	else
		run_compute_next(r);
	return true;
}

static void fetch_done(struct engine *e, struct op *op,
		       const struct kvmm_done *d)
{
	struct run *r = op->run;
	const struct kvmm_hit *hit = &r->hit[op->first];
	uint32_t i = 0, below = 0;

	if (r->state != RUN_FETCHING)
		return;
	op_time(e, op, &e->st->fetch);
	if (!d->result)
		while (i < d->n && i < op->n && !d->res[i].result &&
		       read_page(e, r, op->first + i, d->res[i].frame))
			below += hit[i++].state == KVMM_LOWER;
	r->have += i;
	count(&e->st->pages_below, below);
	count(&e->st->pages_coming, i - below);
	count(&e->st->pages_late, op->n - i);
	run_compute_next(r);
}

/* No frames came in time: the rest of @r is computed, but nobody else's. */
static void compute_private(struct engine *e, struct run *r)
{
	uint32_t left = r->r->npages - r->have;

	count(&e->st->pages_private, left);
	count(&e->st->pages_computed, left);
	e->busy_until += left * PAGE_NS;
	run_drain(e, r);
}

/* Frames for the next chunk. Return: 0, -EAGAIN: later, -ENOBUFS: never. */
static int take_frames(struct engine *e, struct run *r, kvmm_frame_t *f,
		       uint32_t n)
{
	int err = kvmm_alloc(r->rq, 0, e->dram, n, f, KVMM_EVICT_OK);
	uint64_t now;

	if (!err) {
		r->since = 0;
		return 0;
	}
	if (err != -EAGAIN) {
		complain(e, "alloc", err);
		return -ENOBUFS;
	}
	now = now_ns();
	if (!r->since)
		r->since = now;
	return now - r->since < FRAME_NS ? -EAGAIN : -ENOBUFS;
}

static int publish_chunk(struct engine *e, struct run *r, struct op *op)
{
	static const struct kvmm_key no_parent;
	struct kvmm_pub pub[CHUNK];
	uint32_t i;

	memset(pub, 0, sizeof(pub));
	for (i = 0; i < op->n; i++) {
		uint32_t pg = op->first + i;

		pub[i].key = r->key[pg];
		pub[i].parent = pg ? r->key[pg - 1] : no_parent;
		pub[i].frame = op->frame[i];
		pub[i].pos = pg * BLOCK_TOKENS;
		pub[i].cost_us = PAGE_NS / NSEC_PER_USEC;
		pub[i].after = e->step;
	}
	return kvmm_publish(r->rq, e->dram, pub, op->n, op->tag);
}

/* Launch the next chunk of @r in this step. Return: false: not now. */
static bool launch(struct engine *e, struct run *r)
{
	uint32_t left = r->r->npages - r->have;
	uint32_t n = left < CHUNK ? left : CHUNK;
	struct op *op;
	int err;

	if (!left) {
		run_drain(e, r);
		return true;
	}
	op = op_get(e, r);
	if (!op)
		return false;
	err = take_frames(e, r, op->frame, n);
	if (err) {
		op->run = NULL;
		if (err == -ENOBUFS)
			compute_private(e, r);
		return err == -ENOBUFS;
	}
	op->first = r->have;
	op->n = n;
	op->start_ns = 0;
	err = publish_chunk(e, r, op);
	if (err) {
		op->run = NULL;
		if (err != -EAGAIN)
			complain(e, "publish", err);
		count(&e->st->pages_refused, n);
	} else {
		r->inflight++;
		e->launched[e->nr_launched++] = op;
	}
	e->busy_until += n * PAGE_NS;
	count(&e->st->pages_computed, n);
	r->have += n;
	if (r->have == r->r->npages)
		run_drain(e, r);
	return true;
}

static bool launch_step(struct engine *e)
{
	bool any = false;
	struct run *r;

	for (r = e->run; r < e->run + NR_RUNS; r++)
		if (r->state == RUN_COMPUTING && e->nr_launched < NR_ACTIVE)
			any |= launch(e, r);
	/* Until here it was how long the step takes. */
	if (e->busy_until)
		e->busy_until += now_ns();
	return any;
}

/* The device is through: now the bytes are there. */
static void finish_step(struct engine *e)
{
	unsigned int i;
	uint32_t j;

	for (i = 0; i < e->nr_launched; i++) {
		struct op *op = e->launched[i];

		if (!op->run)
			continue;	/* answered already: refused */
		for (j = 0; j < op->n; j++)
			write_page(e, op->frame[j],
				   &op->run->key[op->first + j]);
		op->start_ns = now_ns();
		op->stops = atomic_load_explicit(&e->sh->stops,
						 memory_order_relaxed);
	}
	e->nr_launched = 0;
	e->busy_until = 0;
	kvmm_step_done(e->k, e->step);
	e->step++;
}

static void page_published(struct engine *e, struct run *r, struct op *op,
			   uint32_t i, const struct kvmm_result *res)
{
	switch (res->result) {
	case 0:
		count(&e->st->pages_published, 1);
		atomic_store_explicit(&e->sh->owner[r->r->page[op->first + i]],
				      e->me + 1, memory_order_relaxed);
		check_place(e, op->frame[i]);
		break;
	case -EEXIST:
		count(&e->st->pages_twice, 1);
		break;
	default:
		count(&e->st->pages_refused, 1);
	}
}

static void publish_done(struct engine *e, struct op *op,
			 const struct kvmm_done *d)
{
	struct run *r = op->run;
	uint32_t i;

	r->inflight--;
	if (d->result) {
		count(&e->st->pages_refused, op->n);
		return;
	}
	if (op->start_ns)
		op_time(e, op, &e->st->publish);
	for (i = 0; i < d->n && i < op->n; i++)
		page_published(e, r, op, i, &d->res[i]);
	if (e->dm->corrupt && !e->me)
		selftest_damage(e, r, op);
}

/* ---- the loop ---------------------------------------------------------------------- */

/* Return: completions taken, or -errno when kvmmd is gone. */
static int take_completions(struct engine *e)
{
	struct kvmm_done done[16];
	int n = kvmm_poll(e->k, done, 16), i;

	for (i = 0; i < n; i++) {
		struct op *op = &e->op[done[i].tag % NR_OPS];

		if (!op->run || op->tag != done[i].tag) {
			complain(e, "completion of nothing", -EPROTO);
			continue;
		}
		if (done[i].op == KVMM_OP_FETCH)
			fetch_done(e, op, &done[i]);
		else
			publish_done(e, op, &done[i]);
		op->run = NULL;
	}
	return n;
}

static bool work(struct engine *e)
{
	bool progress = false;
	struct run *r;

	if (e->busy_until && now_ns() >= e->busy_until) {
		finish_step(e);
		progress = true;
	}
	if (!e->busy_until)
		progress |= launch_step(e);
	for (r = e->run; r < e->run + NR_RUNS; r++) {
		if (r->state != RUN_DRAINING)
			continue;
		if (!r->inflight) {
			run_end(e, r);
			progress = true;
		} else if (r->since && now_ns() - r->since > DRAIN_NS) {
			complain(e, "publish was never answered", -ETIMEDOUT);
			r->since = 0;
		}
	}
	return progress;
}

static bool idle(const struct engine *e)
{
	const struct run *r;

	for (r = e->run; r < e->run + NR_RUNS; r++)
		if (r->state != RUN_FREE)
			return false;
	return true;
}

static void wait_a_little(struct engine *e)
{
	struct pollfd pfd = { .fd = kvmm_fd(e->k), .events = POLLIN };
	uint64_t until = kvmm_next_deadline(e->k), most = now_ns() + NSEC_PER_MSEC;
	struct timespec ts;

	if (e->busy_until && e->busy_until < most)
		most = e->busy_until;
	ts = ns_to_timespec(deadline_left(until < most ? until : most));

	ppoll(&pfd, 1, &ts, NULL);
}

static int serve(struct engine *e)
{
	size_t len = slice_len(&e->dm->trace, e->me);

	for (;;) {
		bool progress = false;
		bool more = read_count(&e->st->next) < len &&
			    !flag(&e->sh->quit);
		int n;

		while (more && e->nr_active < NR_ACTIVE && admit(e)) {
			progress = true;
			more = read_count(&e->st->next) < len;
		}
		progress |= work(e);
		kvmm_win_sync(e->win, e->step - 1);
		n = take_completions(e);
		if (n < 0) {
			complain(e, "kvmmd is gone", n);
			return n;
		}
		if (!more && idle(e))
			return 0;
		if (!progress && !n)
			wait_a_little(e);
	}
}

/* ---- set-up -------------------------------------------------------------------------- */

static int connect_all(struct engine *e)
{
	static const struct kvmm_seg segs[NR_SEGS] = {
		{ PAGE_BYTES / NR_SEGS, 64, 0, KVMM_SEG_K, KVMM_MIRROR },
		{ PAGE_BYTES / NR_SEGS, 64, 0, KVMM_SEG_V, KVMM_MIRROR },
	};
	static const struct kvmm_class cls = {
		.name = "kv", .page_bytes = PAGE_BYTES, .nsegs = NR_SEGS,
		.segs = segs,
	};
	static const struct kvmm_group group = {
		.class_ix = 0, .rule = KVMM_FULL, .block_tokens = BLOCK_TOKENS,
	};
	static const struct kvmm_desc desc = {
		.size = sizeof(desc), .model = "demo", .revision = "1",
		.kv_dtype = "u8", .scale_format = "", .layout = "kv",
		.abi_tag = "demo-1", .salt = "", .world = 1, .nclasses = 1,
		.ngroups = 1, .classes = &cls, .groups = &group,
	};
	struct kvmm_open_opts oo = { .size = sizeof(oo), .name = "demo" };
	struct kvmm_win_opts wo = {
		.size = sizeof(wo),
		.on_extent = places_on_extent,
		.arg = &e->places,
	};
	int err;

	err = kvmm_open(e->dm->socket, &oo, &e->k);
	if (err) {
		fprintf(stderr, "engine %u: %s: %s\n", e->me, e->dm->socket,
			strerror(-err));
		return err;
	}
	err = kvmm_space_attach(e->k, &desc, &e->sp);
	if (err)
		goto out;
	err = kvmm_node_find(e->k, "dram0");
	if (err < 0)
		goto out;
	e->dram = (kvmm_node_t)err;
	err = kvmm_win_open(e->sp, 0, e->dram, &wo, &e->win);
out:
	if (err)
		complain(e, "set-up", err);
	return err;
}

static int alloc_runs(struct engine *e)
{
	uint32_t max = e->dm->trace.max_pages;
	struct run *r;

	for (r = e->run; r < e->run + NR_RUNS; r++) {
		r->key = calloc(max, sizeof(*r->key));
		r->hit = calloc(max, sizeof(*r->hit));
		if (!r->key || !r->hit)
			return -ENOMEM;
	}
	return 0;
}

int engine_main(const struct demo *dm, unsigned int me)
{
	struct engine *e = calloc(1, sizeof(*e));
	struct run *r;
	int err = -ENOMEM;

	if (!e)
		return 1;
	e->dm = dm;
	e->sh = dm->sh;
	e->st = &dm->sh->engine[me];
	e->me = me;
	e->step = 1;
	if (!alloc_runs(e))
		err = connect_all(e);
	if (!err)
		err = serve(e);
	if (dm->corrupt && !me)
		selftest_read_back(e);
	if (e->win)
		kvmm_win_close(e->win);
	if (e->sp)
		kvmm_space_detach(e->sp);
	kvmm_close(e->k);
	for (r = e->run; r < e->run + NR_RUNS; r++) {
		free(r->key);
		free(r->hit);
	}
	free(e);
	return err ? 1 : 0;
}
