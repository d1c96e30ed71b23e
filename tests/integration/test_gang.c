/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gangs, against a real kvmmd: two and four rank processes and a leader that
 * computes nothing. Pages are striped and mirrored; each rank writes and checks
 * its own part of a frame, and all speak of it by one number.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define CHAIN		8
#define WAIT_MS		20000

/* -- in the members ---------------------------------------------------------------- */

/* What leader and ranks tell each other, at the start of a child's memory. */
struct talk {
	uint32_t	n;
	kvmm_frame_t	frame[64];
};

static struct kvmm_req *rq;		/* the leader's */
static uint64_t posted;

static long sync_all(void *shm, long a, long b)
{
	tc_poll(fx_c());
	return tc_sync(fx_c(), 0);
}

/* Frames for @n pages; -EAGAIN: the ranks must map what has come. */
static long lead_alloc(void *shm, long chain, long n)
{
	struct talk *t = shm;

	if (!rq)
		rq = tc_req(fx_c(), (uint64_t)chain);
	t->n = (uint32_t)n;
	return tc_try_alloc(fx_c(), rq, 0, (unsigned int)n, t->frame, 50);
}

static long lead_publish(void *shm, long chain, long after)
{
	struct tc *c = fx_c();
	struct talk *t = shm;
	struct kvmm_pub pub[64];
	uint32_t i;

	for (i = 0; i < t->n; i++)
		tc_pub(c, &pub[i], (uint64_t)chain, i, TC_FULL, t->frame[i],
		       (uint64_t)after);
	posted = ++c->tag;
	return kvmm_publish(rq, c->node, pub, t->n, posted);
}

/* The answer within @ms: how many have @result; their frames. */
static long lead_answer(void *shm, long result, long ms)
{
	struct talk *t = shm;
	struct kvmm_done d;
	uint32_t i, n = 0;

	if (!tc_wait(fx_c(), posted, &d, (unsigned int)ms))
		return -ETIMEDOUT;
	if (d.result)
		return d.result;
	T_EQ(d.n, t->n);
	for (i = 0; i < d.n; i++) {
		n += d.res[i].result == result;
		t->frame[i] = d.res[i].frame;
	}
	return n;
}

/* Match, and fetch what lies below; pages that are pinned now, their frames. */
static long lead_find(void *shm, long chain, long n)
{
	struct tc *c = fx_c();
	struct talk *t = shm;
	struct kvmm_hit hit[64];
	struct kvmm_match m;
	struct kvmm_done d;
	uint32_t i;

	tc_poll(c);
	if (!rq)
		rq = tc_req(c, (uint64_t)chain);
	t->n = tc_match(c, rq, (uint64_t)chain, (uint32_t)n, hit, &m);
	for (i = 0; i < t->n; i++)
		t->frame[i] = hit[i].frame;
	if (m.n_pages == t->n)
		return t->n;
	T_OK(kvmm_fetch(rq, t->n, m.n_pages, c->node,
			deadline_in(10 * NSEC_PER_SEC), ++c->tag));
	T_CHECK(tc_wait(c, c->tag, &d, WAIT_MS));
	for (i = 0; i < d.n && !d.res[i].result; i++)
		t->frame[t->n++] = d.res[i].frame;
	return t->n;
}

static long lead_resident(void *shm, long chain, long n)
{
	struct kvmm_req *r = tc_req(fx_c(), (uint64_t)chain);
	long got;

	tc_poll(fx_c());
	got = tc_match(fx_c(), r, (uint64_t)chain, (uint32_t)n, NULL, NULL);
	tc_end(r);
	return got;
}

static long lead_end(void *shm, long a, long b)
{
	T_CHECK(rq);
	tc_end(rq);
	rq = NULL;
	return 0;
}

static long rank_fill(void *shm, long chain, long step)
{
	struct talk *t = shm;
	struct kvmm_key key;
	uint32_t i;

	tc_sync(fx_c(), 0);
	for (i = 0; i < t->n; i++) {
		tc_key(fx_c(), (uint64_t)chain, i, TC_FULL, &key);
		tc_fill(fx_c(), 0, t->frame[i], &key);
	}
	return kvmm_step_done(fx_c()->k, (uint64_t)step);
}

static long rank_wrong(void *shm, long chain, long b)
{
	struct talk *t = shm;
	struct kvmm_key key;
	long wrong = 0;
	uint32_t i;

	tc_sync(fx_c(), 0);
	for (i = 0; i < t->n; i++) {
		tc_key(fx_c(), (uint64_t)chain, i, TC_FULL, &key);
		wrong += (long)tc_wrong(fx_c(), 0, t->frame[i], &key);
	}
	return wrong;
}

/* -- an engine ---------------------------------------------------------------------- */

/**
 * struct eng - an engine of @world ranks, processes @first and on, and its leader
 */
struct eng {
	struct fx	*f;
	unsigned int	first, world;
	uint64_t	step;
};

static struct proc *leader(const struct eng *e)
{
	return &e->f->p[e->first + e->world];
}

static struct proc *rank(const struct eng *e, unsigned int i)
{
	return &e->f->p[e->first + i];
}

static struct eng eng_start(struct fx *f, unsigned int first,
			    unsigned int world, uint8_t token)
{
	struct eng e = { .f = f, .first = first, .world = world };
	struct kvmm_engine m = { .size = sizeof(m), .world = world };
	struct tc_opts o = { .world = (uint16_t)world, .node = "gang0",
			     .engine = &m };
	unsigned int i;

	memset(m.token, token, sizeof(m.token));
	for (i = 0; i < world; i++) {
		m.rank = i;
		fx_client(f, first + i, 0, &o);
	}
	m.rank = 0;
	m.flags = KVMM_LEADER | KVMM_NO_STEP;
	fx_client(f, first + world, 0, &o);
	return e;
}

/* What the leader said is what the ranks hear. */
static void tell(const struct eng *e)
{
	unsigned int i;

	for (i = 0; i < e->world; i++)
		memcpy(rank(e, i)->shm, leader(e)->shm, sizeof(struct talk));
}

static void eng_sync(const struct eng *e)
{
	unsigned int i;

	for (i = 0; i <= e->world; i++)
		proc_call(&e->f->p[e->first + i], sync_all, 0, 0);
}

static void eng_alloc(const struct eng *e, uint64_t chain, unsigned int n)
{
	struct t_wait w = t_wait_begin(WAIT_MS);
	long err;

	while ((err = proc_call(leader(e), lead_alloc, (long)chain, n))) {
		T_EQ(err, -EAGAIN);
		T_CHECK(t_wait_more(&w), "no frames");
		eng_sync(e);
	}
	tell(e);
}

/* Every rank writes its part and completes the step. */
static void eng_compute(struct eng *e, uint64_t chain)
{
	unsigned int i;

	e->step++;
	for (i = 0; i < e->world; i++)
		T_OK(proc_call(rank(e, i), rank_fill, (long)chain,
			       (long)e->step));
}

static void eng_put(struct eng *e, uint64_t chain, unsigned int n)
{
	eng_alloc(e, chain, n);
	T_OK(proc_call(leader(e), lead_publish, (long)chain,
		       (long)e->step + 1));
	eng_compute(e, chain);
	T_EQ(proc_call(leader(e), lead_answer, 0, WAIT_MS), n);
	proc_call(leader(e), lead_end, 0, 0);
}

/* Pages of a chain that are found or fetched; all parts are checked. */
static unsigned int eng_read(const struct eng *e, uint64_t chain,
			     unsigned int n)
{
	unsigned int i;
	long got;

	eng_sync(e);
	got = proc_call(leader(e), lead_find, (long)chain, n);
	T_OK(got);
	tell(e);
	for (i = 0; i < e->world; i++)
		T_EQ(proc_call(rank(e, i), rank_wrong, (long)chain, 0), 0);
	proc_call(leader(e), lead_end, 0, 0);
	return (unsigned int)got;
}

static void eng_end(const struct eng *e)
{
	unsigned int i;

	for (i = 0; i <= e->world; i++) {
		proc_call(&e->f->p[e->first + i], fx_close, 0, 0);
		proc_end(&e->f->p[e->first + i]);
	}
}

/* -- pages in parts ------------------------------------------------------------------ */

static struct td_opts opts(unsigned int world)
{
	return (struct td_opts) {
		.dram_bytes = 16 * MIB, .nvme_bytes = 128 * MIB,
		.gang = world, .gang_bytes = 32 * MIB, .io_timeout = "5s",
		.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
	};
}

/*
 * Every slot that is taken has its page: also what is only being gathered is over.
 * It says at the same time that a mirror is stored once: what is used is the
 * pages' own length.
 */
static bool writes_rest(struct test_daemon *d)
{
	return ta_node(d, "nvme0", "used") == ta_node(d, "nvme0", "bytes_pages");
}

/* A cache that is filled faster than it is written forgets; a tenth at most. */
#define MOST(got, of)	T_CHECK((got) >= (of) * 9 / 10, "%u of %u pages", got, of)

/* A hit, READY only once every rank has done its step; down and up again. */
static void share_and_spill(struct fx *f, unsigned int world)
{
	struct td_opts o = opts(world);
	unsigned int i, got = 0;
	struct eng a, b;

	fx_start(f, &o);
	a = eng_start(f, 0, world, 0xa);
	b = eng_start(f, world + 1, world, 0xb);
	eng_alloc(&a, 1, CHAIN);
	T_OK(proc_call(leader(&a), lead_publish, 1, 1));
	for (i = 0; i < world; i++) {
		T_EQ(proc_call(leader(&b), lead_resident, 1, CHAIN), 0);
		T_OK(proc_call(rank(&a, i), rank_fill, 1, 1));
	}
	a.step = 1;
	T_EQ(proc_call(leader(&a), lead_answer, 0, WAIT_MS), CHAIN);
	proc_call(leader(&a), lead_end, 0, 0);

	T_EQ(eng_read(&b, 1, CHAIN), CHAIN);
	T_EQ(ta_counter(&f->d, "gang0", "pgload"), 0);
	T_EQ(ta_counter(&f->d, "gang0", "bytes_copied_shared"), 0);

	/* more than the gang holds: some of it goes down, and comes back */
	for (i = 2; i < 80; i++) {
		eng_put(&a, i, CHAIN);
		T_WAIT(WAIT_MS, writes_rest(&f->d));
	}
	T_CHECK(ta_counter(&f->d, "gang0", "pgdemote") > 100);
	T_WAIT(WAIT_MS, writes_rest(&f->d));
	T_EQ(ta_node(&f->d, "nvme0", "bytes_pages") % TC_PAGE_BYTES, 0);
	for (i = 1; i < 80; i++)
		got += eng_read(&b, i, CHAIN);
	MOST(got, 79u * CHAIN);
	T_CHECK(ta_counter(&f->d, "gang0", "pgload") > 100);
	T_EQ(ta_counter(&f->d, "nvme0", "pgcrc_fail"), 0);
	ta_check(&f->d);
	eng_end(&a);
	eng_end(&b);
	ta_baseline(&f->d, WAIT_MS);
	ta_check(&f->d);
	fx_stop(f);
}

static void two_ranks_share_pages_spill_them_and_get_them_back(void **state)
{
	share_and_spill(*state, 2);
}

static void four_ranks_share_pages_spill_them_and_get_them_back(void **state)
{
	share_and_spill(*state, 4);
}

static void a_second_publisher_gets_the_first_ones_frames(void **state)
{
	struct fx *f = *state;
	struct td_opts o = opts(2);
	struct eng a, b;
	unsigned int i;

	fx_start(f, &o);
	a = eng_start(f, 0, 2, 0xa);
	b = eng_start(f, 3, 2, 0xb);
	eng_put(&a, 1, CHAIN);
	eng_alloc(&b, 1, CHAIN);
	T_OK(proc_call(leader(&b), lead_publish, 1, 1));
	eng_compute(&b, 1);
	T_EQ(proc_call(leader(&b), lead_answer, -EEXIST, WAIT_MS), CHAIN);
	tell(&b);
	for (i = 0; i < 2; i++)
		T_EQ(proc_call(rank(&b, i), rank_wrong, 1, 0), 0);
	proc_call(leader(&b), lead_end, 0, 0);
	eng_end(&a);
	eng_end(&b);
	ta_baseline(&f->d, WAIT_MS);
	ta_check(&f->d);
}

/* The others go on, and what was half written is nobody's. */
static void when_a_rank_dies_its_engine_ends_and_no_other(void **state)
{
	struct fx *f = *state;
	struct td_opts o = opts(2);
	struct t_wait w = t_wait_begin(WAIT_MS);
	struct eng a, b;
	long err;

	fx_start(f, &o);
	a = eng_start(f, 0, 2, 0xa);
	b = eng_start(f, 3, 2, 0xb);
	eng_put(&a, 1, CHAIN);
	eng_alloc(&a, 2, CHAIN);
	T_OK(proc_call(leader(&a), lead_publish, 2, 2));
	T_OK(proc_call(rank(&a, 0), rank_fill, 2, 2));
	proc_kill(rank(&a, 1));
	/* the page is not published, and nothing is any more */
	T_EQ(proc_call(leader(&a), lead_answer, -EOWNERDEAD, WAIT_MS), CHAIN);
	while ((err = proc_call(leader(&a), lead_alloc, 3, 1)) != -EOWNERDEAD)
		T_CHECK(t_wait_more(&w), "alloc: %ld", err);
	T_EQ(proc_call(leader(&b), lead_resident, 2, CHAIN), 0);
	T_EQ(eng_read(&b, 1, CHAIN), CHAIN);
	proc_kill(rank(&a, 0));
	proc_kill(leader(&a));
	T_WAIT(WAIT_MS, ta_clients(&f->d) == 3);
	eng_put(&b, 2, CHAIN);
	T_EQ(eng_read(&b, 2, CHAIN), CHAIN);
	eng_end(&b);
	ta_baseline(&f->d, WAIT_MS);
	ta_check(&f->d);
}

/* -- beside a plain node -------------------------------------------------------------- */

/* Below the gang a page is what it is anywhere: a whole one. */
static void a_plain_node_serves_what_a_gang_stored(void **state)
{
	struct fx *f = *state;
	struct td_opts o = opts(4);
	struct tc_opts plain = { .world = 4 };
	struct tc *c = &f->c[0];
	unsigned int i, got = 0;
	struct eng a;

	fx_start(f, &o);
	a = eng_start(f, 0, 4, 0xa);
	for (i = 1; i < 60; i++) {
		eng_put(&a, i, CHAIN);
		T_WAIT(WAIT_MS, writes_rest(&f->d));
	}
	/* alone, without an engine, in dram0 */
	tc_open(c, f->d.socket, &plain);
	T_EQ(c->gang, 0);
	for (i = 1; i < 60; i++)
		got += tc_get(c, i, CHAIN, 5000).fetched;
	T_CHECK(got > 100, "%u pages", got);
	/* and what it stores a gang reads, rank by rank */
	for (i = 100; i < 140; i++) {
		T_EQ(tc_put(c, i, 0, CHAIN), CHAIN);
		T_WAIT(WAIT_MS, writes_rest(&f->d));
	}
	for (i = 100, got = 0; i < 140; i++)
		got += eng_read(&a, i, CHAIN);
	T_CHECK(got > 40, "%u pages", got);
	tc_close(c);
	eng_end(&a);
	ta_baseline(&f->d, WAIT_MS);
	ta_check(&f->d);
}

/* -- what is refused -------------------------------------------------------------------- */

static void refused(struct fx *f, const struct tc_opts *o, const char *why)
{
	struct tc c;

	T_EQ(tc_try_open(&c, f->d.socket, o), -EINVAL);
	T_CHECK(strstr(kvmm_error(NULL), why), "%s", kvmm_error(NULL));
}

static void another_world_is_refused_with_a_sentence(void **state)
{
	struct fx *f = *state;
	struct td_opts o = opts(4);
	struct kvmm_engine two = { .size = sizeof(two), .world = 2,
				   .token = { 2 } };
	struct tc_opts t = { .world = 4, .node = "gang0" };

	fx_start(f, &o);
	refused(f, &t, "join an engine of that world first");
	t.engine = &two;
	refused(f, &t, "a gang of 4, the engine is of world 2");
	t.world = 2;
	refused(f, &t, "a gang of 4, the space is for a world of 2");
	t.world = 1;
	t.engine = NULL;
	refused(f, &t, "a gang of 4, the space is for a world of 1");
	/* dram0 serves any world */
	t.node = NULL;
	tc_open(&f->c[0], f->d.socket, &t);
	T_EQ(tc_put(&f->c[0], 1, 0, CHAIN), CHAIN);
	tc_close(&f->c[0]);
	ta_baseline(&f->d, WAIT_MS);
	ta_check(&f->d);
}

static void a_member_without_a_step_maps_nothing(void **state)
{
	struct fx *f = *state;
	struct td_opts o = opts(2);
	struct kvmm_engine m = { .size = sizeof(m), .world = 2,
				 .flags = KVMM_NO_STEP | KVMM_LEADER,
				 .token = { 7 } };
	struct tc_opts t = { .world = 2, .node = "gang0", .engine = &m };
	struct tc *lead = &f->c[0], *r0 = &f->c[1];
	struct kvmm_req *r;
	kvmm_frame_t frame;
	uint8_t byte = 0;
	struct iovec iov = { &byte, 1 };

	fx_start(f, &o);
	tc_open(lead, f->d.socket, &t);
	m.flags = 0;
	tc_open(r0, f->d.socket, &t);
	T_CHECK(!kvmm_win_base(lead->win[0], 0));
	T_CHECK(kvmm_win_base(r0->win[0], 0));
	T_EQ(kvmm_win_stride(lead->win[0], 0), kvmm_win_stride(r0->win[0], 0));
	/* a part, not a page: a half of the stripes and the mirror */
	T_EQ((uint8_t *)kvmm_win_base(r0->win[0], 1) -
	     (uint8_t *)kvmm_win_base(r0->win[0], 0), TC_PAGE_BYTES / 4);
	T_EQ((uint8_t *)kvmm_win_base(r0->win[0], 2) -
	     (uint8_t *)kvmm_win_base(r0->win[0], 0), TC_PAGE_BYTES / 2);
	r = tc_req(lead, 1);
	T_WAIT(WAIT_MS, (tc_poll(r0), tc_sync(r0, 0),
			 !tc_try_alloc(lead, r, 0, 1, &frame, 10)));
	T_CHECK(!kvmm_win_ptr(lead->win[0], 0, frame));
	T_CHECK(!kvmm_win_ptr(lead->win[0], 0, 0));
	T_CHECK(kvmm_win_ptr(r0->win[0], 0, frame));
	T_EQ(kvmm_write(r, 0, lead->node, frame, &iov, 1), -EINVAL);
	tc_end(r);
	/* a rank's own copy helpers are of its part */
	r = tc_req(r0, 2);
	T_WAIT(WAIT_MS, (tc_poll(lead), tc_sync(lead, 0),
			 !tc_try_alloc(r0, r, 0, 1, &frame, 10)));
	T_EQ(kvmm_write(r, 0, r0->node, frame, &iov, 1), 1);
	iov.iov_len = 5 * TC_PAGE_BYTES / 8 + 1;
	T_EQ(kvmm_write(r, 0, r0->node, frame, &iov, 1), -EINVAL);
	tc_end(r);
	tc_close(lead);
	tc_close(r0);
	ta_baseline(&f->d, WAIT_MS);
}

/* -- what is shown ------------------------------------------------------------------------ */

static void status_shows_gangs_and_their_buffers(void **state)
{
	struct fx *f = *state;
	struct td_opts o = opts(4);
	json_t *r;

	fx_start(f, &o);
	T_EQ(ta_node(&f->d, "gang0", "gang"), 4);
	T_EQ(ta_node(&f->d, "dram0", "gang"), 0);
	r = ta_request(&f->d, "{\"cmd\": \"status\"}");
	T_CHECK(json_is_integer(json_object_get(json_object_get(r, "memory"),
						"staging")));
	json_decref(r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(two_ranks_share_pages_spill_them_and_get_them_back),
		FX_TEST(four_ranks_share_pages_spill_them_and_get_them_back),
		FX_TEST(a_second_publisher_gets_the_first_ones_frames),
		FX_TEST(when_a_rank_dies_its_engine_ends_and_no_other),
		FX_TEST(a_plain_node_serves_what_a_gang_stored),
		FX_TEST(another_world_is_refused_with_a_sentence),
		FX_TEST(a_member_without_a_step_maps_nothing),
		FX_TEST(status_shows_gangs_and_their_buffers),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
