/* SPDX-License-Identifier: Apache-2.0 */
/* A kvmmd and some children for each test; see fixture.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

void fx_filter(void)
{
	cmocka_set_test_filter(getenv("KVMM_TEST_ONLY"));
}

int fx_setup(void **state)
{
	struct fx *f = calloc(1, sizeof(*f));

	t_failed = false;
	*state = f;
	return f ? 0 : -1;
}

/* A daemon that is killed cannot say by its exit status what it has met. */
static bool sanitizer_spoke(const struct test_daemon *d)
{
	char line[512];
	bool found = false;
	FILE *log = d->dir[0] ? fopen(d->log, "re") : NULL;

	while (log && !found && fgets(line, sizeof(line), log))
		found = strstr(line, "Sanitizer") ||
			strstr(line, "runtime error:");
	if (found)
		fprintf(stderr, "%s", line);
	for (; found && fgets(line, sizeof(line), log); )
		fprintf(stderr, "%s", line);
	if (log)
		fclose(log);
	return found;
}

int fx_teardown(void **state)
{
	struct fx *f = *state;
	bool bad = sanitizer_spoke(&f->d);
	unsigned int i;

	if (t_failed)
		td_dump_log(&f->d);
	/* a stopped daemon would let every close wait for its time-out */
	if (f->d.paused)
		td_resume(&f->d);
	for (i = 0; i < FX_PROCS; i++)
		proc_kill(&f->p[i]);
	for (i = 0; i < 4; i++)
		tc_close(&f->c[i]);
	td_fini(&f->d);
	free(f);
	return bad ? -1 : 0;
}

void fx_start(struct fx *f, const struct td_opts *o)
{
	struct td_opts opts = { .dram_bytes = 64 * MIB };

	if (o)
		opts = *o;
	if (!opts.io_timeout)
		opts.io_timeout = "20s";
	T_OK(td_init(&f->d, &opts));
	T_OK(td_start(&f->d));
	if (opts.nvme_bytes)
		fx_online(&f->d);
}

void fx_online(struct test_daemon *d)
{
	T_WAIT(20000, !strcmp(ta_node_state(d, "nvme0"), "online"));
}

void fx_stop(struct fx *f)
{
	int rc = td_stop(&f->d);

	if (rc)
		td_dump_log(&f->d);
	T_EQ(rc, 0);
}

const char *fx_path(const struct fx *f, unsigned int i)
{
	static char path[TD_MAX_PATH * 2];

	if (!i)
		return f->d.socket;
	snprintf(path, sizeof(path), "%s/%s", f->d.dir,
		 f->d.opts.socket[i].name);
	return path;
}

static uint32_t resident(struct tc *c, uint64_t chain, uint32_t n,
			 uint32_t *anywhere)
{
	struct kvmm_req *rq = tc_req(c, chain);
	struct kvmm_match m;
	uint32_t got = tc_peek(c, rq, chain, n, &m);

	*anywhere = m.n_pages;
	tc_end(rq);
	return got;
}

/*
 * Slowly: a cache that is filled faster than it can be written forgets, and
 * then the chain is made once more.
 */
uint32_t fx_spill(struct tc *c, uint64_t chain, uint32_t n, uint64_t filler)
{
	struct t_wait w = t_wait_begin(TC_WAIT_MS);
	uint32_t here, all = 0;

	for (;;) {
		if (all < n)
			T_EQ(tc_put(c, chain, 0, n), n);
		here = resident(c, chain, n, &all);
		if (all == n && here < n)
			return here;
		tc_put(c, filler++, 0, 8);
		T_CHECK(t_wait_more(&w),
			"chain %llu does not spill: %u pages here, %u of %u somewhere",
			(unsigned long long)chain, here, all, n);
	}
}

/* -- in a child -------------------------------------------------------------------- */

static struct tc client;
static struct kvmm_req *held;
static struct kvmm_hit held_hit[TC_MAX_CHAIN];
static long nr_held;

struct tc *fx_c(void)
{
	return &client;
}

/* What tc_opts point to comes along with the fork. */
struct how {
	const char	*path;
	const struct tc_opts *o;
};
static struct how how;

static long open_client(void *shm, long a, long b)
{
	tc_open(&client, how.path, how.o);
	return 0;
}

void fx_client(struct fx *f, unsigned int i, unsigned int socket,
	       const struct tc_opts *o)
{
	how = (struct how) { .path = fx_path(f, socket), .o = o };
	proc_start(&f->p[i]);
	T_OK(proc_call(&f->p[i], open_client, 0, 0));
}

long fx_put(void *shm, long chain, long n)
{
	return tc_put(&client, (uint64_t)chain, 0, (uint32_t)n);
}

long fx_hits(void *shm, long chain, long n)
{
	return tc_hits(&client, (uint64_t)chain, (uint32_t)n);
}

long fx_close(void *shm, long a, long b)
{
	tc_close(&client);
	return 0;
}

long fx_hold(void *shm, long chain, long n)
{
	T_CHECK(!held);
	held = tc_req(&client, (uint64_t)chain);
	nr_held = tc_match(&client, held, (uint64_t)chain, (uint32_t)n,
			   held_hit, NULL);
	tc_check(&client, (uint64_t)chain, held_hit, (uint32_t)nr_held);
	return nr_held;
}

long fx_recheck(void *shm, long chain, long n)
{
	long i, wrong = 0;

	T_CHECK(held);
	for (i = 0; i < nr_held; i++) {
		struct kvmm_key key;

		tc_key(&client, (uint64_t)chain, (uint32_t)i, TC_FULL, &key);
		wrong += (long)tc_wrong(&client, 0, held_hit[i].frame, &key);
	}
	return wrong;
}

long fx_frames(void *shm, long a, long b)
{
	uint32_t *f = shm;
	long i;

	for (i = 0; i < nr_held; i++)
		f[i] = held_hit[i].frame;
	return nr_held;
}

static long take_frames(void *shm, long n, long b)
{
	static struct kvmm_req *rq;
	kvmm_frame_t frame[16];

	if (!rq)
		rq = tc_req(&client, 1);
	return tc_try_alloc(&client, rq, 0, (unsigned int)n, frame, 100);
}

void fx_grow(struct fx *f, unsigned int i)
{
	uint64_t all = ta_node(&f->d, "dram0", "capacity"), used;
	unsigned int clients = ta_clients(&f->d), n;
	struct t_wait w = t_wait_begin(TC_WAIT_MS);

	for (n = 0; n < FX_GROW; n++)
		fx_client(f, i + n, 0, NULL);
	while ((used = ta_node(&f->d, "dram0", "used")) < all) {
		T_CHECK(t_wait_more(&w), "%llu of %llu bytes are used",
			(unsigned long long)used, (unsigned long long)all);
		proc_call(&f->p[i + n++ % FX_GROW], take_frames, 16, 0);
	}
	for (n = 0; n < FX_GROW; n++)
		proc_kill(&f->p[i + n]);
	T_WAIT(TC_WAIT_MS, !ta_node(&f->d, "dram0", "frames.quarantine") &&
	       ta_clients(&f->d) == clients);
}

long fx_release(void *shm, long a, long b)
{
	T_CHECK(held);
	tc_end(held);
	held = NULL;
	nr_held = 0;
	return 0;
}
