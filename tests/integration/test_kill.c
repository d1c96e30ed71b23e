/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SIGKILL of members, at any moment and at every step of the protocol. A
 * member's references end when its whole engine is gone and not before; then
 * all of them, at once, and nobody else notices.
 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/fixture.h"
#include "tests/lib/leak.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define BACK_MS		5000		/* until nothing of a dead engine is left */
#define CHAINS		24		/* that the engines work on */
#define PAGES		16		/* of each */
#define HELD		1000		/* a chain that one reads all the time */
#define MAX_WORLD	3

/* 256 frames over 1,024 slots: there is always something on the move. */
static const struct td_opts small = {
	.dram_bytes = 16 * MIB, .nvme_bytes = 64 * MIB,
};

/**
 * struct common - what all processes of a test see
 * @step:	the engine's last launched one
 * @ops:	requests that each member has been through
 * @dying:	this member has heard that another one is gone
 * @wrong:	bytes, of all
 * @sealed:	pages of each chain that somebody heard were in the cache; they
 *		stay from engine to engine
 */
struct common {
	_Atomic uint64_t step;
	_Atomic uint64_t ops[MAX_WORLD];
	_Atomic uint32_t dying[MAX_WORLD];
	_Atomic uint64_t wrong;
	_Atomic uint64_t hits;
	_Atomic uint8_t	sealed[CHAINS + 1][PAGES];
};

static struct common *com;

static int make_common(void **state)
{
	com = mmap(NULL, sizeof(*com), PROT_READ | PROT_WRITE,
		   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	return com == MAP_FAILED ? -1 : 0;
}

static int drop_common(void **state)
{
	munmap(com, sizeof(*com));
	return 0;
}

/* -- a member at work ----------------------------------------------------------- */

#define POSTED	64			/* publishes that are remembered */

/**
 * struct member - one at work
 * @posted:	by tag, what its publishes were of
 */
struct member {
	struct tc	*c;
	struct rng	r;
	uint32_t	rank;
	struct kvmm_req	*rq;
	uint64_t	chain;
	struct kvmm_hit	hit[PAGES];
	struct {
		uint64_t tag, chain;
		uint32_t first;
	}		posted[POSTED];
};

/* Take one completion; what was published is from now on to be found. */
static bool take(struct member *m, struct kvmm_done *d)
{
	uint32_t first, i;
	uint64_t chain;

	if (kvmm_poll(m->c->k, d, 1) <= 0)
		return false;
	chain = m->posted[d->tag % POSTED].chain;
	first = m->posted[d->tag % POSTED].first;
	if (d->op != KVMM_OP_PUBLISH || d->result ||
	    m->posted[d->tag % POSTED].tag != d->tag)
		return true;
	for (i = 0; i < d->n; i++)
		if (!d->res[i].result || d->res[i].result == -EEXIST)
			atomic_store(&com->sealed[chain][first + i], 1);
	return true;
}

/* Anything but @err = 0 and what a member may hear is a failure. */
static bool heard(struct member *m, int err)
{
	if (!err || err == -EAGAIN)
		return !err;
	T_CHECK(err == -EOWNERDEAD, "rank %u: %s", m->rank, t_strerror(err));
	atomic_store(&com->dying[m->rank], 1);
	return false;
}

static void check_frames(struct member *m, uint64_t chain, uint32_t first,
			 uint32_t n, const struct kvmm_hit *hit)
{
	uint32_t i;

	for (i = 0; i < n; i++) {
		struct kvmm_key key;

		tc_key(m->c, chain, first + i, TC_FULL, &key);
		atomic_fetch_add(&com->wrong,
				 tc_wrong(m->c, 0, hit[i].frame, &key));
	}
	atomic_fetch_add(&com->hits, n);
}

static uint32_t find(struct member *m, struct kvmm_match *out)
{
	static struct kvmm_key key[PAGES];
	struct kvmm_keys keys = { .k = key, .n = PAGES, .group = TC_FULL };

	tc_keys(m->c, m->chain, PAGES, TC_FULL, key);
	*out = (struct kvmm_match) { .size = sizeof(*out) };
	if (!heard(m, kvmm_match(m->rq, &keys, 1, m->c->node, m->hit, out)))
		return 0;
	if (out->sync_wanted)
		kvmm_win_sync(m->c->win[0], atomic_load(&com->step));
	check_frames(m, m->chain, 0, out->n_resident, m->hit);
	return out->n_resident;
}

static bool wait_for(struct member *m, uint64_t tag, struct kvmm_done *d)
{
	struct t_wait w = t_wait_begin(1000);

	do {
		while (take(m, d))
			if (d->tag == tag)
				return true;
	} while (t_wait_more(&w));
	return false;
}

/* Bring what is below; whatever comes is right. */
static uint32_t load(struct member *m, uint32_t have, uint32_t all)
{
	uint64_t tag = ++m->c->tag;
	struct kvmm_done d;
	uint32_t i;

	if (!heard(m, kvmm_fetch(m->rq, have, all, m->c->node,
				 deadline_in(50 * NSEC_PER_MSEC), tag)))
		return have;
	if (!wait_for(m, tag, &d) || d.result)
		return have;
	for (i = 0; i < d.n && !d.res[i].result; i++) {
		struct kvmm_hit h = { .frame = d.res[i].frame };

		if (!kvmm_win_ptr(m->c->win[0], 0, h.frame))
			break;
		check_frames(m, m->chain, have + i, 1, &h);
	}
	return have + i;
}

static void store(struct member *m, uint32_t have)
{
	kvmm_frame_t frame[PAGES];
	struct kvmm_pub pub[PAGES];
	uint32_t n = PAGES - have, i;
	uint64_t after, tag;

	if (!n || !heard(m, tc_try_alloc(m->c, m->rq, 0, n, frame, 20)))
		return;
	after = atomic_load(&com->step) + 1;
	for (i = 0; i < n; i++) {
		tc_pub(m->c, &pub[i], m->chain, have + i, TC_FULL, frame[i],
		       after);
		tc_fill(m->c, 0, frame[i], &pub[i].key);
	}
	if (rng_below(&m->r, 8) == 0) {
		kvmm_free(m->rq, 0, m->c->node, frame, n, after);
		return;
	}
	tag = ++m->c->tag;
	m->posted[tag % POSTED].tag = tag;
	m->posted[tag % POSTED].chain = m->chain;
	m->posted[tag % POSTED].first = have;
	heard(m, kvmm_publish(m->rq, m->c->node, pub, n, tag));
	atomic_store(&com->step, after);
}

/* One request of the leader's. */
static void lead(struct member *m)
{
	struct kvmm_match out;
	struct kvmm_done d;
	uint32_t have;

	m->chain = 1 + rng_below(&m->r, CHAINS);
	m->rq = tc_req(m->c, m->chain);
	have = find(m, &out);
	if (out.n_pages > have)
		have = load(m, have, out.n_pages);
	store(m, have);
	kvmm_step_done(m->c->k, atomic_load(&com->step));
	while (take(m, &d))
		;
	T_OK(kvmm_req_end(m->rq, (int)rng_below(&m->r, 3),
			  atomic_load(&com->step)));
}

/* The others do their part of each step, and read. */
static void follow(struct member *m)
{
	struct kvmm_match out;

	kvmm_step_done(m->c->k, atomic_load(&com->step));
	/* the leader gets frames that all have mapped */
	kvmm_win_sync(m->c->win[0], atomic_load(&com->step));
	m->chain = 1 + rng_below(&m->r, CHAINS);
	m->rq = tc_req(m->c, m->chain);
	find(m, &out);
	tc_poll(m->c);
	T_OK(kvmm_req_end(m->rq, KVMM_ENDED, 0));
}

/* Work until killed, or until another member is; @a: rank, @b: seed. */
static long work(void *shm, long rank, long seed)
{
	struct member m = { .c = fx_c(), .rank = (uint32_t)rank };

	rng_seed(&m.r, (uint64_t)seed * MAX_WORLD + (uint64_t)rank);
	while (!atomic_load(&com->dying[rank])) {
		if (rank)
			follow(&m);
		else
			lead(&m);
		atomic_fetch_add(&com->ops[rank], 1);
	}
	return 0;
}

/* -- random moments ----------------------------------------------------------------- */

static struct kvmm_engine member_of(uint64_t round, uint32_t rank,
				    uint32_t world)
{
	struct kvmm_engine e = {
		.size = sizeof(e), .rank = rank, .world = world,
		.flags = rank ? 0 : KVMM_LEADER,
	};

	memcpy(e.token, &round, sizeof(round));
	return e;
}

static void start_engine(struct fx *f, uint64_t round, uint32_t world)
{
	static struct kvmm_engine e[MAX_WORLD];
	static struct tc_opts o[MAX_WORLD];
	uint32_t i;

	memset(com, 0, offsetof(struct common, sealed));
	for (i = 0; i < world; i++) {
		e[i] = member_of(round, i, world);
		o[i] = (struct tc_opts) { .engine = world > 1 ? &e[i] : NULL };
		fx_client(f, i, 0, &o[i]);
	}
	for (i = 0; i < world; i++)
		proc_send(&f->p[i], work, i, (long)round);
}

static bool all_work(uint32_t world, uint64_t least)
{
	uint32_t i;

	for (i = 0; i < world; i++)
		if (atomic_load(&com->ops[i]) < least)
			return false;
	return true;
}

/* Kill one member at a random moment, the others at once or after a while. */
static void kill_engine(struct fx *f, struct rng *r, uint32_t world)
{
	uint32_t first = (uint32_t)rng_below(r, world), i;
	struct timespec ts = ns_to_timespec(rng_below(r, 20 * NSEC_PER_MSEC));

	T_WAIT(LONG_WAIT, all_work(world, 3));
	nanosleep(&ts, NULL);
	proc_signal(&f->p[first], SIGKILL);
	proc_reap(&f->p[first]);
	T_EQ(WTERMSIG(f->p[first].status), SIGKILL);
	if (world > 1 && rng_below(r, 2)) {
		/* the others hear of it in time, and are fine */
		for (i = 0; i < world; i++)
			if (i != first)
				T_EQ(proc_recv(&f->p[i]), 0);
	}
	for (i = 0; i < world; i++)
		proc_kill(&f->p[i]);
}

/* All that is left is what the one idle client @p holds: its pins, its magazine. */
static void wait_back(struct fx *f, struct proc *p, uint64_t pins)
{
	struct t_wait w = t_wait_begin(BACK_MS);

	for (;;) {
		uint64_t all = ta_pins(&f->d, 0);
		uint64_t open = ta_node(&f->d, "dram0", "frames.open");
		uint64_t his = ta_open(&f->d, p->pid);
		uint64_t lost = ta_node(&f->d, "dram0", "frames.quarantine") +
				ta_node(&f->d, "dram0", "frames.loading");
		unsigned int clients = ta_clients(&f->d);

		if (clients == 1 && all == pins && open == his && !lost)
			return;
		T_CHECK(t_wait_more(&w),
			"%u clients, %llu pins, his are %llu, %llu open frames, his are %llu, %llu loading or in quarantine",
			clients, (unsigned long long)all,
			(unsigned long long)pins, (unsigned long long)open,
			(unsigned long long)his, (unsigned long long)lost);
	}
}

static long sync_windows(void *shm, long a, long b)
{
	return tc_sync(fx_c(), 0);
}

/* As many extents as it will ever have, so that they are no leak. */
static void fill_up(struct fx *f, struct proc *p)
{
	long i;

	fx_grow(f, 1);
	for (i = 0; i < 24; i++)
		T_EQ(proc_call(p, fx_put, 500 + i, 16), 16);
	proc_call(p, sync_windows, 0, 0);
}

static long get_all(void *shm, long chain, long n)
{
	struct tc_got got = tc_get(fx_c(), (uint64_t)chain, (uint32_t)n, 20000);

	return got.resident + got.fetched;
}

/*
 * Crash-safe is not empty. All chains together are less than the slots below,
 * so nothing had to make room: what was sealed is found, but for a tenth.
 */
static void nothing_sealed_is_lost(struct fx *f, struct proc *p)
{
	unsigned int sealed = 0, found = 0;
	long chain, n;

	for (chain = 1; chain <= CHAINS; chain++) {
		for (n = 0; n < PAGES; n++)
			if (!atomic_load(&com->sealed[chain][n]))
				break;
		sealed += (unsigned int)n;
		found += (unsigned int)(n ? proc_call(p, get_all, chain, n) : 0);
	}
	printf("# %u pages were sealed, %u are found\n", sealed, found);
	T_CHECK(sealed > CHAINS * PAGES / 4, "%u sealed", sealed);
	T_CHECK(found >= sealed * 9 / 10, "%u of %u sealed pages are left",
		found, sealed);
}

static void members_die_at_random_moments(void **state)
{
	unsigned int rounds = test_long() ? 100 : 10, i;
	uint64_t pins, total = 0, back = 0;
	struct fx *f = *state;
	struct leak before;
	struct rng r;

	rng_seed(&r, test_seed());
	fx_start(f, &small);
	/* somebody who has nothing to do with it */
	fx_client(f, 5, 0, NULL);
	fill_up(f, &f->p[5]);
	T_EQ(proc_call(&f->p[5], fx_put, HELD, 32), 32);
	T_EQ(proc_call(&f->p[5], fx_hold, HELD, 32), 32);
	pins = ta_pins(&f->d, 0);
	T_EQ(pins, 32);
	leak_calm(f->d.pid, &before);

	for (i = 0; i < rounds; i++) {
		uint32_t world = 1 + (uint32_t)rng_below(&r, MAX_WORLD);
		uint64_t t0;

		start_engine(f, i + 1, world);
		kill_engine(f, &r, world);
		t0 = now_ns();
		wait_back(f, &f->p[5], pins);
		back += now_ns() - t0;
		T_EQ(atomic_load(&com->wrong), 0);
		T_EQ(proc_call(&f->p[5], fx_recheck, HELD, 32), 0);
		total += atomic_load(&com->hits);
		ta_check(&f->d);
	}
	printf("# %u engines killed, %llu pages read, %llu us until they were gone\n",
	       rounds, (unsigned long long)total,
	       (unsigned long long)(back / rounds / 1000));
	T_CHECK(total > rounds);
	leak_settle(f->d.pid, &before, BACK_MS);
	nothing_sealed_is_lost(f, &f->p[5]);
	T_EQ(proc_call(&f->p[5], fx_release, 0, 0), 0);
	T_EQ(proc_call(&f->p[5], fx_hits, HELD, 32), 32);
	proc_end(&f->p[5]);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* -- named moments -------------------------------------------------------------------- */

enum moment {
	AFTER_OPEN, AFTER_ATTACH, AFTER_WIN_OPEN, AFTER_SYNC, AFTER_RESERVE,
	AFTER_REQ_OPEN, AFTER_MATCH, AFTER_FETCH_POSTED, AFTER_FETCH,
	AFTER_ALLOC, AFTER_FILL, AFTER_PUBLISH_POSTED, AFTER_PUBLISH_SEEN,
	AFTER_STEP, AFTER_PUBLISH, AFTER_FREE, AFTER_END_WITH_STEP,
	AFTER_TRIM, AFTER_REPORT, AFTER_WIN_CLOSE, AFTER_DETACH,
	NR_MOMENTS
};

static const char *walk_path;
static long walk_stop_at;

static void point(enum moment at)
{
	if (at == walk_stop_at)
		raise(SIGSTOP);
}

static void walk_write(struct tc *c, struct kvmm_req *rq, uint64_t chain)
{
	kvmm_frame_t frame[8], more[4];
	struct kvmm_pub pub[8];
	struct kvmm_done d;
	uint32_t i;

	tc_alloc(c, rq, 0, 8, frame);
	tc_alloc(c, rq, 0, 4, more);
	point(AFTER_ALLOC);
	for (i = 0; i < 8; i++) {
		tc_pub(c, &pub[i], chain, i, TC_FULL, frame[i], 5);
		tc_fill(c, 0, frame[i], &pub[i].key);
	}
	point(AFTER_FILL);
	T_OK(kvmm_publish(rq, c->node, pub, 8, 1));
	point(AFTER_PUBLISH_POSTED);
	tc_ping(c);
	point(AFTER_PUBLISH_SEEN);
	T_OK(kvmm_step_done(c->k, 5));
	point(AFTER_STEP);
	T_CHECK(tc_wait(c, 1, &d, LONG_WAIT));
	T_EQ(d.result, 0);
	point(AFTER_PUBLISH);
	T_OK(kvmm_free(rq, 0, c->node, more, 4, 9));
	point(AFTER_FREE);
}

/* All that a client can do, one call after the other; @a: where to stop. */
static long walk(void *shm, long stop_at, long chain)
{
	struct kvmm_open_opts oo = { .size = sizeof(oo) };
	struct kvmm_win_opts wo = { .size = sizeof(wo) };
	struct tc *c = fx_c();
	struct kvmm_hit hit[PAGES];
	struct kvmm_match m;
	struct kvmm_req *rq;
	struct kvmm_done d;

	walk_stop_at = stop_at;
	c->page_bytes[0] = TC_PAGE_BYTES;
	T_OK(kvmm_open(walk_path, &oo, &c->k));
	point(AFTER_OPEN);
	T_OK(kvmm_space_attach(c->k, tc_desc(NULL), &c->sp));
	point(AFTER_ATTACH);
	c->node = (kvmm_node_t)kvmm_node_find(c->k, "dram0");
	T_OK(kvmm_win_open(c->sp, 0, c->node, &wo, &c->win[0]));
	c->nr_classes = 1;
	point(AFTER_WIN_OPEN);
	tc_sync(c, 0);
	point(AFTER_SYNC);
	T_OK(kvmm_reserve(c->sp, 0, c->node, 16));
	point(AFTER_RESERVE);
	rq = tc_req(c, 1);
	point(AFTER_REQ_OPEN);
	tc_match(c, rq, 1, PAGES, hit, &m);
	point(AFTER_MATCH);
	if (m.n_pages > m.n_resident) {
		T_OK(kvmm_fetch(rq, m.n_resident, m.n_pages, c->node, 0, 2));
		point(AFTER_FETCH_POSTED);
		T_CHECK(tc_wait(c, 2, &d, LONG_WAIT));
	}
	point(AFTER_FETCH);
	walk_write(c, rq, (uint64_t)chain);
	T_OK(kvmm_trim(rq, 2, 9));
	point(AFTER_TRIM);
	T_OK(kvmm_report(rq, 0, KVMM_BAD));
	point(AFTER_REPORT);
	T_OK(kvmm_req_end(rq, KVMM_CONTINUES, 9));
	point(AFTER_END_WITH_STEP);
	T_OK(kvmm_step_done(c->k, 9));
	kvmm_win_close(c->win[0]);
	c->nr_classes = 0;
	point(AFTER_WIN_CLOSE);
	kvmm_space_detach(c->sp);
	point(AFTER_DETACH);
	return 0;
}

static long spill(void *shm, long chain, long n)
{
	static uint64_t filler = 10000;

	filler += 1000;
	return fx_spill(fx_c(), (uint64_t)chain, (uint32_t)n, filler);
}

static void a_member_dies_at_every_step_of_the_protocol(void **state)
{
	struct fx *f = *state;
	struct leak before;
	long at;

	fx_start(f, &small);
	walk_path = fx_path(f, 0);
	fx_client(f, 5, 0, NULL);
	fill_up(f, &f->p[5]);
	leak_calm(f->d.pid, &before);
	for (at = 0; at < NR_MOMENTS; at++) {
		struct proc *p = &f->p[0];
		long chain = 100 + at, sealed;

		/* something to match, and something to fetch */
		T_CHECK(proc_call(&f->p[5], spill, 1, PAGES) < PAGES);
		proc_start(p);
		proc_send(p, walk, at, chain);
		T_WAIT(LONG_WAIT, proc_stopped(p));
		proc_kill(p);
		T_WAIT(BACK_MS, !ta_pins(&f->d, 0) &&
			ta_clients(&f->d) == 1);
		T_WAIT(BACK_MS,
		       ta_node(&f->d, "dram0", "frames.quarantine") == 0);
		/* nothing before its step, and all of it afterwards */
		sealed = proc_call(&f->p[5], fx_hits, chain, 8);
		if (at < AFTER_ALLOC || at >= AFTER_PUBLISH)
			T_EQ(sealed, at >= AFTER_PUBLISH ? 8 : 0);
		else if (at < AFTER_STEP)
			T_EQ(sealed, 0);
		else
			T_CHECK(sealed == 0 || sealed == 8);
		ta_check(&f->d);
	}
	leak_settle(f->d.pid, &before, BACK_MS);
	proc_end(&f->p[5]);
	ta_baseline(&f->d, BACK_MS);
	fx_stop(f);
}

/* -- the leader alone ------------------------------------------------------------------ */

static long read_frames(void *shm, long chain, long n)
{
	const uint32_t *frame = shm;
	long i, wrong = 0;

	tc_sync(fx_c(), 0);
	for (i = 0; i < n; i++) {
		struct kvmm_key key;

		tc_key(fx_c(), (uint64_t)chain, (uint32_t)i, TC_FULL, &key);
		wrong += (long)tc_wrong(fx_c(), 0, frame[i], &key);
	}
	return wrong;
}

static long new_work(void *shm, long chain, long n)
{
	struct kvmm_req *rq = tc_req(fx_c(), 5);
	kvmm_frame_t frame;
	int err = kvmm_alloc(rq, 0, fx_c()->node, 1, &frame, 0);

	tc_end(rq);
	return err;
}

static void a_dead_leader_moves_no_frame_of_a_reader(void **state)
{
	struct kvmm_engine e[2] = { member_of(7, 0, 2), member_of(7, 1, 2) };
	struct tc_opts o[2] = { { .engine = &e[0] }, { .engine = &e[1] } };
	struct td_opts more = small;
	struct fx *f = *state;
	uint64_t pins;
	long found;
	int i;

	/* three magazines and 64 pages leave no room in the small one */
	more.dram_bytes = 32 * MIB;
	fx_start(f, &more);
	fx_client(f, 0, 0, &o[0]);
	fx_client(f, 1, 0, &o[1]);
	fx_client(f, 2, 0, NULL);
	T_EQ(proc_call(&f->p[2], fx_put, 1, 64), 64);
	/* a page is a hit only where the other one has mapped it, too */
	proc_call(&f->p[1], sync_windows, 0, 0);
	/* the leader matches, the other one reads by frame numbers; a hit is
	 * where both have mapped it */
	T_WAIT(LONG_WAIT, proc_call(&f->p[1], sync_windows, 0, 0) >= 0 &&
	       proc_call(&f->p[0], fx_hits, 1, 64) == 64);
	T_EQ(proc_call(&f->p[0], fx_hold, 1, 64), 64);
	T_EQ(proc_call(&f->p[0], fx_frames, 0, 0), 64);
	memcpy(f->p[1].shm, f->p[0].shm, 64 * sizeof(uint32_t));
	T_EQ(proc_call(&f->p[1], read_frames, 1, 64), 0);
	pins = ta_pins(&f->d, 0);
	T_EQ(pins, 64);

	proc_signal(&f->p[0], SIGKILL);
	proc_reap(&f->p[0]);
	T_WAIT(BACK_MS, proc_call(&f->p[1], new_work, 0, 0) == -EOWNERDEAD);
	/* twice what fits: everything that can go goes */
	for (i = 0; i < 64; i++)
		proc_call(&f->p[2], fx_put, 2000 + i, 16);
	T_EQ(ta_pins(&f->d, 0), pins);
	T_EQ(proc_call(&f->p[1], read_frames, 1, 64), 0);
	ta_check(&f->d);

	proc_signal(&f->p[1], SIGKILL);
	proc_reap(&f->p[1]);
	T_WAIT(BACK_MS, !ta_pins(&f->d, 0));
	/* the dead took nothing along: it is the oldest, and all but a tenth
	 * of it is to be had, here or from below */
	found = proc_call(&f->p[2], get_all, 1, 64);
	T_CHECK(found >= 64 * 9 / 10, "%ld of 64 pages", found);
	for (i = 0; i < 64; i++)
		proc_call(&f->p[2], fx_put, 3000 + i, 16);
	proc_end(&f->p[2]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
	fx_stop(f);
}

/* The first child publishes, while the other one maps what comes. */
static long put_by_engine(struct fx *f, long chain, long n)
{
	struct t_wait w = t_wait_begin(LONG_WAIT);

	proc_send(&f->p[0], fx_put, chain, n);
	while (!proc_answered(&f->p[0]) && t_wait_more(&w))
		proc_call(&f->p[1], sync_windows, 0, 0);
	return proc_recv(&f->p[0]);
}

static void a_new_engine_may_take_the_token_of_a_dead_one(void **state)
{
	struct kvmm_engine e[2] = { member_of(7, 0, 2), member_of(7, 1, 2) };
	struct tc_opts o[2] = { { .engine = &e[0] }, { .engine = &e[1] } };
	struct fx *f = *state;
	int round;

	fx_start(f, NULL);
	for (round = 0; round < 3; round++) {
		fx_client(f, 0, 0, &o[0]);
		fx_client(f, 1, 0, &o[1]);
		T_EQ(put_by_engine(f, round + 1, 4), 4);
		T_EQ(proc_call(&f->p[1], fx_hits, round + 1, 4), 4);
		proc_kill(&f->p[0]);
		T_WAIT(BACK_MS,
		       proc_call(&f->p[1], new_work, 0, 0) == -EOWNERDEAD);
		/* while it is dying its token lets nobody in */
		T_EQ(tc_try_open(&f->c[0], f->d.socket, &o[0]), -EOWNERDEAD);
		proc_kill(&f->p[1]);
		T_WAIT(BACK_MS, ta_clients(&f->d) == 0);
	}
	/* what each of them sealed is there for whoever comes */
	tc_open(&f->c[0], f->d.socket, NULL);
	for (round = 0; round < 3; round++)
		T_EQ(tc_hits(&f->c[0], (uint64_t)round + 1, 4), 4);
	tc_close(&f->c[0]);
	ta_baseline(&f->d, BACK_MS);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(members_die_at_random_moments),
		FX_TEST(a_member_dies_at_every_step_of_the_protocol),
		FX_TEST(a_dead_leader_moves_no_frame_of_a_reader),
		FX_TEST(a_new_engine_may_take_the_token_of_a_dead_one),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, make_common, drop_common);
}
