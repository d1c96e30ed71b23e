/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For each thing that keeps pages right: what happens without it. Every scenario
 * is run twice, once with the protection left out (KVMM_BREAK, test builds
 * only), and then it must show a wrong byte or a broken law, and once as it is,
 * and then it must not. So a test that cannot fail is found out here.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "ipc/base/clock.h"
#include "libkvmm/lib.h"
#include "tests/lib/fixture.h"
#include "tests/lib/pin_rig.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000

/* -- pins against reclaim, in one process ------------------------------------------- */

/* Wrong bytes within @ms, or none. */
static uint64_t wrong_in_a_race(const char *what, unsigned int ms)
{
	struct pin_race r = { .ms = ms, .chains = 6 };
	struct pin_rig *pr = pr_open();

	pr_break(pr, what);
	pr_race(pr, test_seed(), &r);
	/* a reader that finds nothing reads nothing wrong */
	if (!*what)
		T_CHECK(r.hits > 1000 && r.puts > 100,
			"%llu pages read, %llu published",
			(unsigned long long)r.hits, (unsigned long long)r.puts);
	printf("# %s: %llu pages read, %llu published: %llu wrong\n",
	       *what ? what : "unbroken", (unsigned long long)r.hits,
	       (unsigned long long)r.puts, (unsigned long long)r.wrong);
	pr_close(pr);
	return r.wrong;
}

/*
 * The sanitizer would rightly report what these leave out, and orders what it
 * instruments: the race itself needs the bare machine.
 */
#ifdef __SANITIZE_THREAD__
#define NEEDS_BARE_CPU()	skip()
#else
#define NEEDS_BARE_CPU()	do { } while (0)
#endif

static void without_isolation_first_a_reader_is_robbed(void **state)
{
	NEEDS_BARE_CPU();
	T_CHECK(wrong_in_a_race("barrier", 60000) > 0);
}

static void without_an_atomic_pin_a_reader_is_robbed(void **state)
{
	NEEDS_BARE_CPU();
	T_CHECK(wrong_in_a_race("pinbarrier", 60000) > 0);
}

static void with_both_nobody_is(void **state)
{
	T_EQ(wrong_in_a_race("", test_long() ? 60000 : 4000), 0);
}

/* A lookup is old when it pins: the frame has become another page's. */
static unsigned int pins_what_was_reused(const char *what, size_t *wrong)
{
	struct pin_rig *pr = pr_open();
	struct kvmm_req *rq = pr_req(pr, 0);
	struct kvmm_hit hit[PR_PAGES];
	unsigned int n, i, chain;

	pr_break(pr, what);
	pr_put(pr, 1);
	T_EQ(pr_look(pr, rq, 1), PR_PAGES);
	T_CHECK(pr_drop(pr, 1));
	/* its frames, the last that were freed, are others' now */
	for (chain = 2; chain < 6; chain++)
		pr_put(pr, chain);
	n = pr_pin(rq, hit);
	for (i = 0, *wrong = 0; i < n; i++)
		*wrong += pr_wrong(pr, hit[i].frame, 1, i);
	pr_unpin(rq);
	pr_req_free(rq);
	pr_close(pr);
	return n;
}

static void without_generations_a_reused_frame_is_read(void **state)
{
	size_t wrong;

	T_CHECK(pins_what_was_reused("generation", &wrong) > 0);
	T_CHECK(wrong > 0);
	T_EQ(pins_what_was_reused("", &wrong), 0);
}

/* Reclaim has begun when the reader pins: what it reads is no page any more. */
static unsigned int pins_what_is_isolated(const char *what)
{
	struct pin_rig *pr = pr_open();
	struct kvmm_req *rq = pr_req(pr, 0);
	struct kvmm_hit hit[PR_PAGES];
	unsigned int n;

	pr_break(pr, what);
	pr_put(pr, 1);
	T_EQ(pr_look(pr, rq, 1), PR_PAGES);
	pr_isolate(pr, 1);
	n = pr_pin(rq, hit);
	pr_unpin(rq);
	pr_req_free(rq);
	pr_close(pr);
	return n;
}

static void without_the_state_an_isolated_frame_is_pinned(void **state)
{
	T_CHECK(pins_what_is_isolated("ready") > 0);
	T_EQ(pins_what_is_isolated(""), 0);
}

/* -- with a real kvmmd ------------------------------------------------------------------ */

static void start_broken(struct fx *f, const char *what,
			 const struct td_opts *more)
{
	static const char *env[2];
	static char text[64];
	struct td_opts o = *more;

	snprintf(text, sizeof(text), "KVMM_BREAK=%s", what);
	env[0] = text;
	o.env = env;
	fx_start(f, &o);
}

static void stop_broken(struct fx *f)
{
	unsigned int i;

	for (i = 0; i < FX_PROCS; i++)
		proc_kill(&f->p[i]);
	for (i = 0; i < 4; i++)
		tc_close(&f->c[i]);
	td_fini(&f->d);
}

/* A page is published before it is written; bytes wrong for another process. */
static long wrong_before_its_step(struct fx *f, const char *what)
{
	struct td_opts o = { .dram_bytes = 64 * MIB };
	struct tc *c = &f->c[0], *other = &f->c[1];
	struct kvmm_hit hit[1];
	struct kvmm_key key;
	struct kvmm_req *rq, *his;
	struct kvmm_pub pub;
	struct kvmm_done d;
	kvmm_frame_t frame;
	long wrong = 0;

	start_broken(f, what, &o);
	tc_open(c, f->d.socket, NULL);
	tc_open(other, f->d.socket, NULL);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 1, &frame);
	tc_pub(c, &pub, 1, 0, TC_FULL, frame, 1);
	/* the kernel of step 1 is still running */
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 1000));
	tc_ping(c);
	his = tc_req(other, 1);
	if (tc_match(other, his, 1, 1, hit, NULL)) {
		tc_key(other, 1, 0, TC_FULL, &key);
		wrong = (long)tc_wrong(other, 0, hit[0].frame, &key);
	}
	tc_end(his);
	tc_fill(c, 0, frame, &pub.key);
	T_OK(kvmm_step_done(c->k, 1));
	if (!*what)
		T_CHECK(tc_wait(c, 1000, &d, LONG_WAIT));
	T_EQ(tc_hits(other, 1, 1), 1);
	tc_end(rq);
	stop_broken(f);
	return wrong;
}

static void without_the_fence_unwritten_bytes_are_read(void **state)
{
	T_CHECK(wrong_before_its_step(*state, "fence") > 0);
	T_EQ(wrong_before_its_step(*state, ""), 0);
}

/* The connection ends and the process lives: as after a lost packet, a bug. */
static long lose_the_socket(void *shm, long a, long b)
{
	T_OK(shutdown(fx_c()->k->sock, SHUT_RDWR));
	return 0;
}

static long wrong_after_hang_up(struct fx *f, const char *what)
{
	struct td_opts o = { .dram_bytes = 16 * MIB };
	struct tc *c = &f->c[0];
	unsigned int i, there;
	long wrong;

	start_broken(f, what, &o);
	fx_client(f, 0, 0, NULL);
	tc_open(c, f->d.socket, NULL);
	T_EQ(proc_call(&f->p[0], fx_put, 1, 32), 32);
	T_EQ(proc_call(&f->p[0], fx_hold, 1, 32), 32);
	proc_call(&f->p[0], lose_the_socket, 0, 0);
	/* three times what DRAM holds */
	for (i = 0; i < 48; i++)
		T_EQ(tc_put(c, 100 + i, 0, 16), 16);
	wrong = proc_call(&f->p[0], fx_recheck, 1, 32);
	/* kept are the pages, not only their bytes, and what came last */
	if (!*what) {
		T_EQ(tc_hits(c, 1, 32), 32);
		for (i = 0, there = 0; i < 6; i++)
			there += tc_hits(c, 147 - i, 16);
		T_CHECK(there >= 6 * 16 * 9 / 10, "%u pages", there);
	}
	stop_broken(f);
	return wrong;
}

static void without_the_ledger_a_lost_socket_loses_pins(void **state)
{
	T_CHECK(wrong_after_hang_up(*state, "ledger") > 0);
	T_EQ(wrong_after_hang_up(*state, ""), 0);
}

/* Fetch a chain, and count instead of failing. */
static long wrong_bytes_of_fetch(struct tc *c, uint64_t chain, uint32_t n)
{
	struct kvmm_req *rq = tc_req(c, chain);
	struct kvmm_match m;
	struct kvmm_done d;
	long wrong = 0;
	uint32_t i;

	tc_match(c, rq, chain, n, NULL, &m);
	T_CHECK(m.n_pages > m.n_resident);
	T_OK(kvmm_fetch(rq, m.n_resident, m.n_pages, c->node, 0, 99));
	T_CHECK(tc_wait(c, 99, &d, LONG_WAIT));
	for (i = 0; !d.result && i < d.n; i++) {
		struct kvmm_key key;

		if (d.res[i].result)
			continue;
		tc_key(c, chain, d.first + i, TC_FULL, &key);
		if (!kvmm_win_ptr(c->win[0], 0, d.res[i].frame))
			tc_sync(c, 0);
		wrong += (long)tc_wrong(c, 0, d.res[i].frame, &key);
	}
	tc_end(rq);
	return wrong;
}

static long wrong_from_a_lying_disk(struct fx *f, const char *what)
{
	struct td_opts o = { .dram_bytes = 16 * MIB, .nvme_bytes = 128 * MIB };
	struct tc *c = &f->c[0];
	long wrong;

	start_broken(f, what, &o);
	tc_open(c, f->d.socket, NULL);
	fx_spill(c, 1, 16, 100);
	T_WAIT(LONG_WAIT, !ta_node(&f->d, "nvme0", "write.inflight"));
	ta_fault(&f->d, "nvme0:read:flip");
	wrong = wrong_bytes_of_fetch(c, 1, 16);
	if (!*what) {
		/* a miss is computed again, and that is served */
		ta_fault(&f->d, "");
		T_EQ(tc_put(c, 1, 0, 16), 16);
		T_EQ(tc_get(c, 1, 16, LONG_WAIT).missed, 0);
	}
	stop_broken(f);
	return wrong;
}

static void without_checksums_a_flipped_bit_is_read(void **state)
{
	T_CHECK(wrong_from_a_lying_disk(*state, "crc") > 0);
	T_EQ(wrong_from_a_lying_disk(*state, ""), 0);
}

/* Publish and die before the request ends: heads are colder than their tails. */
static long put_and_hold(void *shm, long first, long n)
{
	long i;

	for (i = 0; i < n; i++) {
		struct kvmm_req *rq = tc_req(fx_c(), (uint64_t)i);

		T_EQ(tc_publish(fx_c(), rq, (uint64_t)(first + i), 0, 16,
				NULL), 16);
	}
	return 0;
}

/* 0, or what the daemon says of its own laws. */
static int law_broken_under_pressure(struct fx *f, const char *what)
{
	struct td_opts o = { .dram_bytes = 16 * MIB };
	struct tc *c = &f->c[0];
	unsigned int i, there = 0;
	char why[256];
	int err = 0;

	start_broken(f, what, &o);
	fx_client(f, 0, 0, NULL);
	tc_open(c, f->d.socket, NULL);
	proc_call(&f->p[0], put_and_hold, 1, 8);
	proc_kill(&f->p[0]);
	T_WAIT(LONG_WAIT, !ta_pins(&f->d, 0));
	for (i = 0; i < 40 && !err; i++) {
		T_EQ(tc_put(c, 100 + i, 0, 8), 8);
		err = ta_try_check(&f->d, why, sizeof(why));
	}
	/* closed, and not for want of pages */
	if (!*what) {
		for (i = 0; i < 16; i++)
			there += tc_hits(c, 139 - i, 8);
		T_CHECK(there >= 16 * 8 * 9 / 10, "%u pages", there);
	}
	if (err)
		printf("# %s: %s\n", *what ? what : "unbroken", why);
	stop_broken(f);
	return err;
}

static void without_closure_tails_lose_their_heads(void **state)
{
	T_EQ(law_broken_under_pressure(*state, "closure"), -EUCLEAN);
	T_EQ(law_broken_under_pressure(*state, ""), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(without_isolation_first_a_reader_is_robbed),
		cmocka_unit_test(without_an_atomic_pin_a_reader_is_robbed),
		cmocka_unit_test(with_both_nobody_is),
		cmocka_unit_test(without_generations_a_reused_frame_is_read),
		cmocka_unit_test(without_the_state_an_isolated_frame_is_pinned),
		FX_TEST(without_the_fence_unwritten_bytes_are_read),
		FX_TEST(without_the_ledger_a_lost_socket_loses_pins),
		FX_TEST(without_checksums_a_flipped_bit_is_read),
		FX_TEST(without_closure_tails_lose_their_heads),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
