/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvmmd does not answer: it is stopped (SIGSTOP). What needs shared memory only
 * goes on, what needs the daemon answers in time, and all continues after it
 * was let go. And a proof that the hot calls make no system call: a child that
 * would be killed by one.
 */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/clock.h"
#include "libkvmm/lib.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define CHAIN		24		/* pages */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* Rounds in half a second: a sanitizer takes its time over the pages' bytes. */
#define ENOUGH		(SANITIZED ? 3u : 50u)

/* -- hits go on ------------------------------------------------------------------- */

struct went_on {
	uint64_t matches, pages, peeks, allocs, publishes, steps;
};

/* Use everything that needs no daemon for @ms; @a: step to begin with. */
static long go_on(void *shm, long step, long ms)
{
	struct tc *c = fx_c();
	struct went_on *w = shm;
	uint64_t deadline = deadline_in((uint64_t)ms * NSEC_PER_MSEC);
	struct kvmm_hit hit[CHAIN];
	kvmm_frame_t frame[4];

	memset(w, 0, sizeof(*w));
	while (!deadline_past(deadline)) {
		struct kvmm_req *rq = tc_req(c, 7);

		T_EQ(tc_peek(c, rq, 1, CHAIN, NULL), CHAIN);
		w->peeks++;
		T_EQ(tc_match(c, rq, 1, CHAIN, hit, NULL), CHAIN);
		w->matches++;
		w->pages += CHAIN;
		tc_check(c, 1, hit, CHAIN);
		T_OK(kvmm_alloc(rq, 0, c->node, 4, frame, 0));
		T_OK(kvmm_free(rq, 0, c->node, frame, 4, 0));
		w->allocs++;
		T_OK(kvmm_step_done(c->k, (uint64_t)++step));
		w->steps++;
		tc_poll(c);
		T_OK(kvmm_trim(rq, 3, 0));
		tc_end(rq);
	}
	return step;
}

static long warm_up(void *shm, long a, long b)
{
	struct tc *c = fx_c();
	struct kvmm_req *rq = tc_req(c, 1);
	kvmm_frame_t frame[32];

	T_EQ(tc_put(c, 1, 0, CHAIN), CHAIN);
	tc_alloc(c, rq, 0, 32, frame);
	tc_end(rq);
	tc_ping(c);
	return 0;
}

static void hits_go_on_while_kvmmd_is_stopped(void **state)
{
	struct fx *f = *state;
	struct went_on *w;
	unsigned int i;
	long step;

	fx_start(f, NULL);
	fx_client(f, 0, 0, NULL);
	fx_client(f, 1, 0, NULL);
	proc_call(&f->p[0], warm_up, 0, 0);
	T_EQ(proc_call(&f->p[1], fx_hits, 1, CHAIN), CHAIN);
	proc_call(&f->p[1], warm_up, 0, 0);

	T_OK(td_pause(&f->d));
	proc_send(&f->p[0], go_on, 0, 500);
	proc_send(&f->p[1], go_on, 0, 500);
	step = proc_recv(&f->p[0]);
	proc_recv(&f->p[1]);
	for (i = 0; i < 2; i++) {
		w = f->p[i].shm;
		T_CHECK(w->matches > ENOUGH);
		T_CHECK(w->pages > ENOUGH * CHAIN);
		T_CHECK(w->peeks > ENOUGH && w->allocs > ENOUGH &&
			w->steps > ENOUGH);
	}
	T_OK(td_resume(&f->d));
	/* and after it */
	T_EQ(proc_call(&f->p[0], go_on, step, 100) > step, 1);
	T_EQ(proc_call(&f->p[0], fx_put, 2, 8), 8);
	T_EQ(proc_call(&f->p[1], fx_hits, 2, 8), 8);
	proc_end(&f->p[0]);
	proc_end(&f->p[1]);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
	fx_stop(f);
}

static void what_was_posted_meanwhile_is_done_afterwards(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_pub pub[8];
	kvmm_frame_t frame[8];
	struct kvmm_req *rq;
	struct kvmm_done d;
	uint64_t t0;
	uint32_t i;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 8, frame);
	for (i = 0; i < 8; i++) {
		tc_pub(c, &pub[i], 1, i, TC_FULL, frame[i], 1);
		tc_fill(c, 0, frame[i], &pub[i].key);
	}
	T_OK(td_pause(&f->d));
	T_OK(kvmm_publish(rq, c->node, pub, 8, 1));
	T_OK(kvmm_step_done(c->k, 1));
	t0 = now_ns();
	T_EQ(kvmm_poll(c->k, &d, 1), 0);
	T_CHECK(now_ns() - t0 < NSEC_PER_SEC);
	T_EQ(tc_hits(c, 1, 8), 0);	/* nothing is half visible */
	T_OK(td_resume(&f->d));
	T_CHECK(tc_wait(c, 1, &d, LONG_WAIT));
	T_EQ(d.result, 0);
	for (i = 0; i < 8; i++)
		T_EQ(d.res[i].result, 0);
	tc_end(rq);
	T_EQ(tc_hits(c, 1, 8), 8);
	ta_check(&f->d);
}

/* -- what needs the daemon answers in time -------------------------------------- */

#define CALL_NS		(200 * NSEC_PER_MSEC)

/* @call gives up, not before its time and not long after it. */
#define TIMES_OUT(call)							\
	do {								\
		uint64_t __t = now_ns();				\
									\
		T_EQ(call, -ETIMEDOUT);					\
		__t = now_ns() - __t;					\
		T_CHECK(__t >= CALL_NS * 9 / 10 && __t < 10 * CALL_NS);	\
	} while (0)

static void set_up_calls_time_out(void **state)
{
	struct tc_opts o = { .timeout_ns = CALL_NS };
	struct tc_opts other = { .timeout_ns = CALL_NS, .model = "other" };
	struct kvmm_open_opts oo = { .size = sizeof(oo),
				     .call_timeout_ns = CALL_NS };
	struct tc_opts no_win = { .timeout_ns = CALL_NS, .no_window = true };
	struct kvmm_win_opts wo = { .size = sizeof(wo) };
	struct kvmm_engine e = { .size = sizeof(e), .world = 1,
				 .token = "sixteen bytes!!" };
	struct fx *f = *state;
	struct kvmm_space *sp;
	struct kvmm_win *win;
	struct kvmm *k, *fresh;

	fx_start(f, NULL);
	tc_open(&f->c[0], f->d.socket, &o);
	tc_open(&f->c[1], f->d.socket, &no_win);
	T_OK(kvmm_open(f->d.socket, &oo, &fresh));
	/* the first extent has come, and no other one will */
	T_EQ(tc_put(&f->c[0], 2, 0, 1), 1);
	tc_sync(&f->c[0], 0);
	T_OK(td_pause(&f->d));
	TIMES_OUT(kvmm_open(f->d.socket, &oo, &k));
	TIMES_OUT(kvmm_join(fresh, &e));
	TIMES_OUT(kvmm_space_attach(f->c[0].k, tc_desc(&other), &sp));
	TIMES_OUT(kvmm_win_open(f->c[1].sp, 0, f->c[0].node, &wo, &win));
	TIMES_OUT(kvmm_reserve(f->c[0].sp, 0, f->c[0].node, 8));
	/* nothing has changed, so nothing is asked */
	T_EQ(tc_sync(&f->c[0], 0), 0);
	T_OK(td_resume(&f->d));

	/* what the late answers brought is undone, and the calls work */
	T_OK(kvmm_reserve(f->c[0].sp, 0, f->c[0].node, 8));
	T_OK(kvmm_space_attach(f->c[0].k, tc_desc(&other), &sp));
	kvmm_space_detach(sp);
	T_OK(kvmm_win_open(f->c[1].sp, 0, f->c[0].node, &wo, &f->c[1].win[0]));
	f->c[1].nr_classes = 1;
	f->c[1].node = f->c[0].node;
	tc_sync(&f->c[1], 0);
	T_EQ(tc_put(&f->c[0], 1, 0, 4), 4);
	T_EQ(tc_hits(&f->c[1], 1, 4), 4);
	kvmm_close(fresh);
	ta_check(&f->d);
}

static void closing_is_quick_while_kvmmd_is_stopped(void **state)
{
	struct tc_opts o = { .timeout_ns = CALL_NS };
	struct fx *f = *state;
	uint64_t t0;

	fx_start(f, NULL);
	tc_open(&f->c[0], f->d.socket, &o);
	tc_put(&f->c[0], 1, 0, 4);
	T_OK(td_pause(&f->d));
	t0 = now_ns();
	tc_close(&f->c[0]);
	T_CHECK(now_ns() - t0 < 10 * CALL_NS);
	T_OK(td_resume(&f->d));
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
	/* who left unseen took nothing along */
	tc_open(&f->c[0], f->d.socket, NULL);
	T_EQ(tc_hits(&f->c[0], 1, 4), 4);
}

static void a_late_fetch_is_a_miss_in_time(void **state)
{
	struct td_opts o = { .dram_bytes = 16 * MIB, .nvme_bytes = 128 * MIB };
	struct kvmm_stats st = { .size = sizeof(st) };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_match m;
	struct kvmm_req *rq;
	struct kvmm_done d;
	struct tc_got got;
	uint64_t t0, took;
	uint32_t here, i;

	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	here = fx_spill(c, 1, CHAIN, 100);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, CHAIN, NULL, &m), here);
	T_EQ(m.n_pages, CHAIN);
	T_OK(td_pause(&f->d));
	t0 = now_ns();
	T_OK(kvmm_fetch(rq, here, CHAIN, c->node,
			t0 + 100 * NSEC_PER_MSEC, 77));
	T_CHECK(kvmm_next_deadline(c->k) < t0 + 500 * NSEC_PER_MSEC);
	T_CHECK(tc_wait(c, 77, &d, 5000));
	took = now_ns() - t0;
	T_CHECK(took >= 99 * NSEC_PER_MSEC && took < NSEC_PER_SEC);
	T_CHECK(!d.result || d.result == -ETIMEDOUT);
	for (i = 0; !d.result && i < d.n; i++)
		T_EQ(d.res[i].result, -ENOENT);
	T_OK(kvmm_stats(c->k, &st));
	T_CHECK(st.late >= 1);
	tc_end(rq);
	T_OK(td_resume(&f->d));

	/* the real answer is dropped, and the next one is taken */
	tc_ping(c);
	c->nr_stray = 0;
	got = tc_get(c, 1, CHAIN, 5000);
	T_EQ(got.resident + got.fetched, CHAIN);
	T_EQ(c->nr_stray, 0);
	tc_close(c);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
}

/* -- no system call ------------------------------------------------------------------ */

/* Whatever is not in @allowed kills the process. */
static void forbid(const int *allowed, unsigned int n)
{
	struct sock_filter prog[64];
	struct sock_fprog fp = { .filter = prog };
	unsigned int i, at = 0;

	prog[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
			offsetof(struct seccomp_data, nr));
	for (i = 0; i < n; i++) {
		prog[at++] = (struct sock_filter)BPF_JUMP(
			BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)allowed[i], 0, 1);
		prog[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
			SECCOMP_RET_ALLOW);
	}
	prog[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
			SECCOMP_RET_KILL_PROCESS);
	fp.len = (unsigned short)at;
	T_OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	T_OK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &fp));
}

#define HOT_PUBLISH	24		/* rounds that publish, too */

/**
 * struct hot - what a child did under the filter
 * @breaches:	calls that answered something else than they should; the child
 *		cannot print
 */
struct hot {
	uint64_t matches, peeks, allocs, frees, publishes, steps, ends;
	uint64_t breaches, bells;
};

static uint64_t chain_of_round;		/* so that publishes are of new pages */

static void hot_round(struct hot *h, struct kvmm_keys *keys, bool publish)
{
	static uint64_t step;
	struct tc *c = fx_c();
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_hit hit[CHAIN];
	struct kvmm_req *rq;
	kvmm_frame_t frame[4];
	struct kvmm_pub pub;

	h->breaches += kvmm_req_open(c->sp, 1, NULL, &rq) != 0;
	h->breaches += kvmm_peek(rq, keys, 1, c->node, &m) != 0 ||
		       m.n_resident != CHAIN;
	h->peeks++;
	h->breaches += kvmm_match(rq, keys, 1, c->node, hit, &m) != 0 ||
		       m.n_resident != CHAIN;
	h->matches++;
	h->breaches += kvmm_alloc(rq, 0, c->node, 4, frame, 0) != 0;
	h->allocs++;
	if (publish) {
		tc_pub(c, &pub, ++chain_of_round, 0, TC_FULL, frame[0],
		       step + 1);
		tc_fill(c, 0, frame[0], &pub.key);
		h->breaches += kvmm_publish(rq, c->node, &pub, 1,
					    ++c->tag) != 0;
		h->publishes++;
	}
	h->breaches += kvmm_free(rq, 0, c->node, frame + publish,
				 4u - publish, step) != 0;
	h->frees++;
	h->breaches += kvmm_step_done(c->k, ++step) != 0;
	h->steps++;
	h->breaches += kvmm_trim(rq, 5, step) != 0;
	h->breaches += kvmm_req_end(rq, KVMM_CONTINUES, step) != 0;
	h->ends++;
}

static uint64_t bells(void)
{
	struct kvmm_stats st = { .size = sizeof(st) };

	T_OK(kvmm_stats(fx_c()->k, &st));
	return st.doorbells;
}

static void hot_rounds(struct hot *h, unsigned int n, unsigned int publish)
{
	struct kvmm_key key[CHAIN];
	struct kvmm_keys keys = { .k = key, .n = CHAIN };
	unsigned int i;

	tc_keys(fx_c(), 1, CHAIN, TC_FULL, key);
	for (i = 0; i < n; i++)
		hot_round(h, &keys, i < publish);
}

/* Once without the filter: arrays grow, the binder binds. */
static long rehearse(void *shm, long a, long b)
{
	struct tc *c = fx_c();
	struct hot h;
	unsigned int i;

	warm_up(shm, 0, 0);
	chain_of_round = 1000;
	for (i = 0; i < 4; i++) {
		/* a full magazine for what publishes */
		struct kvmm_req *rq = tc_req(c, 1);
		kvmm_frame_t frame[4 * HOT_PUBLISH];

		tc_alloc(c, rq, 0, 4 * HOT_PUBLISH, frame);
		tc_end(rq);
		memset(&h, 0, sizeof(h));
		hot_rounds(&h, 300, HOT_PUBLISH);
		T_EQ(h.breaches, 0);
		/* all answers before the next: what was used is recycled */
		tc_ping(c);
		tc_poll(c);
	}
	{
		struct kvmm_req *rq = tc_req(c, 1);
		kvmm_frame_t frame[4 * HOT_PUBLISH];

		tc_alloc(c, rq, 0, 4 * HOT_PUBLISH, frame);
		tc_end(rq);
		tc_ping(c);
		tc_poll(c);
	}
	return 0;
}

/* Keep it awake until told otherwise. */
static long ping_for(void *shm, long ms, long b)
{
	uint64_t deadline = deadline_in((uint64_t)ms * NSEC_PER_MSEC);
	volatile uint32_t *stop = shm;
	int flying = 0;

	/* few at a time: once it is stopped, the ring must not be full of them */
	while (!deadline_past(deadline) && !*stop) {
		struct kvmm_done d;
		int err = flying < 16 ? kvmm_ping(fx_c()->k, ++fx_c()->tag) :
					-EBUSY;

		T_CHECK(!err || err == -EAGAIN || err == -EBUSY);
		flying += !err;
		while (kvmm_poll(fx_c()->k, &d, 1) > 0)
			flying--;
	}
	return 0;
}

static long asleep(void *shm, long a, long b)
{
	return atomic_load(&kvmm_era_now(fx_c()->k)->hdr->sleeping);
}

static long hot_forbidden(void *shm, long rounds, long allow_write)
{
	static const int allowed[] = { SYS_exit_group, SYS_write };
	struct hot *h = shm;
	uint64_t before = bells();

	memset(h, 0, sizeof(*h));
	forbid(allowed, allow_write ? 2 : 1);
	hot_rounds(h, (unsigned int)rounds, HOT_PUBLISH);
	h->bells = bells() - before;
	_exit(0);
}

static long break_the_rule(void *shm, long a, long b)
{
	static const int allowed[] = { SYS_exit_group };

	forbid(allowed, 1);
	syscall(SYS_getppid);
	_exit(0);
}

/* Stop kvmmd while it is awake: then it stays that way. */
static void stop_it_awake(struct fx *f, struct proc *p)
{
	struct t_wait w = t_wait_begin(LONG_WAIT);

	for (;;) {
		memset(p->shm, 0, 64);
		proc_send(p, ping_for, 10000, 0);
		t_wait_more(&w);
		T_OK(td_pause(&f->d));
		*(volatile uint32_t *)p->shm = 1;
		proc_recv(p);
		if (!proc_call(p, asleep, 0, 0))
			return;
		T_OK(td_resume(&f->d));
		T_CHECK(t_wait_more(&w), "kvmmd is never awake");
	}
}

static void the_filter_kills(void **state)
{
	struct fx *f = *state;

	if (SANITIZED)
		skip();
	proc_start(&f->p[0]);
	proc_send(&f->p[0], break_the_rule, 0, 0);
	proc_reap(&f->p[0]);
	T_CHECK(WIFSIGNALED(f->p[0].status));
	T_EQ(WTERMSIG(f->p[0].status), SIGSYS);
}

static void expect_hot(struct proc *p, uint64_t rounds)
{
	struct hot *h = p->shm;

	T_EQ(p->status, 0);
	T_EQ(h->breaches, 0);
	T_EQ(h->matches, rounds);
	T_EQ(h->peeks, rounds);
	T_EQ(h->allocs, rounds);
	T_EQ(h->frees, rounds);
	T_EQ(h->ends, rounds);
	T_EQ(h->steps, rounds);
	T_EQ(h->publishes, HOT_PUBLISH);
}

static void hot_calls_make_no_system_call(void **state)
{
	struct td_opts o = { .dram_bytes = 64 * MIB,
			     .config = "{\"spin_us\": 1000}" };
	struct tc_opts co = { .page_bytes = 4096 };
	struct fx *f = *state;
	struct proc *p = &f->p[0];

	if (SANITIZED)
		skip();
	fx_start(f, &o);
	fx_client(f, 0, 0, &co);
	proc_call(p, rehearse, 0, 0);
	stop_it_awake(f, p);
	proc_send(p, hot_forbidden, 500, false);
	proc_reap(p);
	expect_hot(p, 500);
	T_EQ(((struct hot *)p->shm)->bells, 0);
	T_OK(td_resume(&f->d));
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
}

static void only_a_sleeping_kvmmd_costs_a_system_call(void **state)
{
	struct td_opts o = { .dram_bytes = 64 * MIB,
			     .config = "{\"spin_us\": 1000}" };
	struct tc_opts co = { .page_bytes = 4096 };
	struct fx *f = *state;
	struct proc *p = &f->p[0];

	if (SANITIZED)
		skip();
	fx_start(f, &o);
	fx_client(f, 0, 0, &co);
	proc_call(p, rehearse, 0, 0);
	/* it runs, and may fall asleep in between: then it is woken by write() */
	proc_send(p, hot_forbidden, 20000, true);
	proc_reap(p);
	expect_hot(p, 20000);
	T_CHECK(((struct hot *)p->shm)->bells < 20000);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(hits_go_on_while_kvmmd_is_stopped),
		FX_TEST(what_was_posted_meanwhile_is_done_afterwards),
		FX_TEST(set_up_calls_time_out),
		FX_TEST(closing_is_quick_while_kvmmd_is_stopped),
		FX_TEST(a_late_fetch_is_a_miss_in_time),
		FX_TEST(the_filter_kills),
		FX_TEST(hot_calls_make_no_system_call),
		FX_TEST(only_a_sleeping_kvmmd_costs_a_system_call),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
