/* SPDX-License-Identifier: Apache-2.0 */
/*
 * restart - how long kvmmd is away, and what is there when it is back
 *
 * 1 Mi pages of 4 KiB in DRAM, published by a client that stays attached and has
 * one chain pinned. kvmmd runs under its keeper. It is killed (SIGKILL), or
 * replaces itself in order (reexec); the gap is what the client sees, which does
 * nothing but poll: from the signal until a ping is answered by the next one. The
 * keeper's pause of 100 ms before it starts a daemon again is part of it.
 *
 * Then every chain is matched, and of each page the first bytes are compared.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "tests/bench/bench.h"

#define PAGE_BYTES	4096u
#define CHAIN		512u
#define NR_CHAINS	2048u
#define NR_PAGES	(CHAIN * NR_CHAINS)
#define NODE_BYTES	(UINT64_C(5) << 30)
#define WAIT_MS		30000
#define KILLS		2u		/* the keeper's pause grows */
#define REEXECS		3u

struct restart {
	struct bench	b;
	struct test_daemon kvmmd;
	struct bench_client c;
	struct kvmm_key	key[CHAIN];
	struct kvmm_hit	hit[CHAIN];
	kvmm_frame_t	frame[CHAIN];
	struct kvmm_req	*rq;		/* has chain 0 pinned */
	uint64_t	wrong;
};

static void chain_keys(struct restart *r, uint64_t chain)
{
	unsigned int i;

	for (i = 0; i < CHAIN; i++)
		bc_key(&r->c, chain * CHAIN + i, &r->key[i]);
}

static uint64_t mark(uint64_t chain, unsigned int i)
{
	return (chain * CHAIN + i) * UINT64_C(0x9e3779b97f4a7c15) + 1;
}

static void publish_chain(struct restart *r, uint64_t chain)
{
	struct kvmm_req *rq = bc_req(&r->c, chain);
	static struct kvmm_pub pub[CHAIN];
	unsigned int i;
	int n;

	n = bc_alloc(&r->c, rq, CHAIN, r->frame, WAIT_MS);
	if (n)
		bench_die(&r->b, "frames", n);
	chain_keys(r, chain);
	for (i = 0; i < CHAIN; i++) {
		pub[i] = (struct kvmm_pub){
			.key = r->key[i], .frame = r->frame[i], .pos = 16 * i,
		};
		if (i)
			pub[i].parent = r->key[i - 1];
		*(uint64_t *)kvmm_win_ptr(r->c.win, 0, r->frame[i]) =
			mark(chain, i);
	}
	n = bc_publish(&r->c, rq, pub, CHAIN);
	if (n != CHAIN)
		bench_die(&r->b, "publish", n);
	kvmm_req_end(rq, KVMM_ENDED, 0);
}

/* Pages that are there; those with other bytes are counted in @r->wrong. */
static uint64_t count_hits(struct restart *r)
{
	uint64_t chain, n = 0;
	unsigned int i, k;

	for (chain = 0; chain < NR_CHAINS; chain++) {
		struct kvmm_req *rq = bc_req(&r->c, chain);

		chain_keys(r, chain);
		k = bc_match(&r->c, rq, r->key, CHAIN, r->hit);
		for (i = 0; i < k; i++)
			r->wrong += *(uint64_t *)kvmm_win_ptr(r->c.win, 0,
							r->hit[i].frame) !=
				    mark(chain, i);
		n += k;
		kvmm_req_end(rq, KVMM_ENDED, 0);
	}
	return n;
}

/* Poll until a ping that was sent after the daemon went is answered. */
static double until_back(struct restart *r, uint64_t t0)
{
	uint64_t deadline = deadline_in(WAIT_MS * NSEC_PER_MSEC), tag = 0;
	struct kvmm_done d;
	bool lost = false;
	int n;

	for (;;) {
		n = kvmm_poll(r->c.k, &d, 1);
		lost |= n == -ENOTCONN;
		if (n == 1 && tag && d.tag == tag && !d.result)
			return (double)(now_ns() - t0) / NSEC_PER_MSEC;
		if (n == 1 && d.tag == tag)
			tag = 0;
		if (lost && !n && !tag && !kvmm_ping(r->c.k, ++r->c.tag))
			tag = r->c.tag;
		if (deadline_past(deadline))
			bench_die(&r->b, "kvmmd does not come back", -ETIMEDOUT);
		usleep(200);
	}
}

static double kill_once(struct restart *r)
{
	pid_t pid = td_kept(&r->kvmmd);
	uint64_t t0 = now_ns();

	if (pid < 0 || kill(pid, SIGKILL))
		bench_die(&r->b, "kill", pid);
	return until_back(r, t0);
}

static double reexec_once(struct restart *r)
{
	uint64_t t0 = now_ns();
	int err = td_admin(&r->kvmmd, "reexec", NULL);

	if (err)
		bench_die(&r->b, "reexec", err);
	return until_back(r, t0);
}

static double adopt_ms(struct restart *r)
{
	json_t *reply = NULL;
	double v;
	int err = td_admin(&r->kvmmd, "status", &reply);

	if (err)
		bench_die(&r->b, "status", err);
	v = json_number_value(json_object_get(json_object_get(reply, "adopted"),
					      "ms"));
	json_decref(reply);
	return v;
}

static double round_of(struct restart *r, const char *what,
		       double (*fn)(struct restart *r), uint64_t had,
		       double *kept)
{
	double gap = fn(r), share = (double)count_hits(r) / (double)had;

	bench_say("  %s: %.0f ms away, %.0f ms of it to adopt, %.4f of the hits kept",
		  what, gap, adopt_ms(r), share);
	*kept = share < *kept ? share : *kept;
	return gap;
}

int main(void)
{
	static struct restart r;
	struct td_opts o = {
		.dram_bytes = NODE_BYTES, .keep = true,
		.config = "{\"timeouts\": {\"crash_window\": \"0s\"}}",
	};
	double gap[KILLS], orderly[REEXECS], kept = 1, kept_orderly = 1;
	uint64_t had, chain;
	unsigned int i;

	bench_init(&r.b, "restart");
	bench_daemon(&r.b, &r.kvmmd, &o);
	bc_open(&r.c, &r.b, r.kvmmd.socket, PAGE_BYTES);
	bench_say("publishing %u pages", NR_PAGES);
	for (chain = 0; chain < NR_CHAINS; chain++)
		publish_chain(&r, chain);
	had = count_hits(&r);
	r.rq = bc_req(&r.c, 1);
	chain_keys(&r, 0);
	if (bc_match(&r.c, r.rq, r.key, CHAIN, r.hit) != CHAIN)
		bench_die(&r.b, "a chain is not resident", -ENOENT);

	for (i = 0; i < KILLS; i++)
		gap[i] = round_of(&r, "killed", kill_once, had, &kept);
	for (i = 0; i < REEXECS; i++)
		orderly[i] = round_of(&r, "re-executed", reexec_once, had,
				      &kept_orderly);
	kvmm_req_end(r.rq, KVMM_UNKNOWN, 0);
	bc_close(&r.c);

	bench_result(&r.b, "pages", (double)had);
	bench_result(&r.b, "gap_ms", bench_median(gap, KILLS));
	bench_result(&r.b, "gap_orderly_ms", bench_median(orderly, REEXECS));
	bench_result(&r.b, "adopt_ms", adopt_ms(&r));
	bench_result(&r.b, "dram_hits_kept", kept);
	bench_result(&r.b, "dram_hits_kept_orderly", kept_orderly);
	bench_result(&r.b, "wrong_pages", (double)r.wrong);
	bench_must(&r.b, "pages", (double)had, ">=", 0.99 * NR_PAGES);
	bench_must(&r.b, "gap_ms", bench_median(gap, KILLS), "<=", 1000);
	bench_must(&r.b, "gap_orderly_ms", bench_median(orderly, REEXECS), "<=",
		   1000);
	bench_must(&r.b, "dram_hits_kept", kept, ">=", 0.98);
	bench_must(&r.b, "dram_hits_kept_orderly", kept_orderly, ">=", 0.98);
	bench_must(&r.b, "wrong_pages", (double)r.wrong, "==", 0);
	return bench_finish(&r.b);
}
