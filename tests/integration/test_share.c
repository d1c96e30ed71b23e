/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Processes share pages: what one publishes the others find in the same frame,
 * complete pages only, under the rules of their groups.
 */
#include <errno.h>
#include <signal.h>
#include <string.h>

#include "ipc/base/rand.h"
#include "kernels/kernels.h"
#include "tests/lib/fixture.h"
#include "tests/lib/pattern.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000

/* -- what one publishes the others find ----------------------------------------- */

static void published_pages_are_hit_by_another_process(void **state)
{
	struct fx *f = *state;
	uint32_t *theirs;
	struct kvmm_hit hit[40];
	struct kvmm_match m;
	struct kvmm_req *rq;
	long i;

	fx_start(f, NULL);
	fx_client(f, 0, 0, NULL);
	tc_open(&f->c[0], f->d.socket, NULL);
	T_EQ(proc_call(&f->p[0], fx_put, 1, 40), 40);

	rq = tc_req(&f->c[0], 1);
	T_EQ(tc_match(&f->c[0], rq, 1, 40, hit, &m), 40);
	T_EQ(m.n_pages, 40);
	tc_check(&f->c[0], 1, hit, 40);

	/* and it is the same frame in every process */
	T_EQ(proc_call(&f->p[0], fx_hold, 1, 40), 40);
	T_EQ(proc_call(&f->p[0], fx_frames, 0, 0), 40);
	theirs = f->p[0].shm;
	for (i = 0; i < 40; i++)
		T_EQ(theirs[i], hit[i].frame);
	T_EQ(proc_call(&f->p[0], fx_release, 0, 0), 0);
	tc_end(rq);
	T_EQ(ta_counter(&f->d, "dram0", "bytes_copied_shared"), 0);
	T_EQ(ta_counter(&f->d, "dram0", "pgpublish"), 40);
	proc_end(&f->p[0]);
	tc_close(&f->c[0]);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
	fx_stop(f);
}

static void a_longer_chain_hits_as_far_as_it_is_there(void **state)
{
	struct fx *f = *state;
	struct kvmm_match m;
	struct kvmm_hit hit[64];
	struct kvmm_req *rq;
	struct tc *c = &f->c[0];

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	T_EQ(tc_put(c, 1, 0, 10), 10);
	rq = tc_req(c, 2);
	T_EQ(tc_match(c, rq, 1, 64, hit, &m), 10);
	T_EQ(m.n_pages, 10);
	T_EQ(hit[9].state, KVMM_HIT);
	T_EQ(hit[10].state, KVMM_MISS);
	T_EQ(hit[63].state, KVMM_MISS);
	/* the request goes on where the match ended */
	T_EQ(tc_publish(c, rq, 1, 10, 20, NULL), 20);
	tc_end(rq);
	T_EQ(tc_hits(c, 1, 64), 30);
	T_EQ(tc_hits(c, 99, 64), 0);
	ta_check(&f->d);
}

static void a_peek_finds_the_same_and_pins_nothing(void **state)
{
	struct fx *f = *state;
	struct kvmm_req *rq;
	struct tc *c = &f->c[0];
	struct kvmm_match m;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, 12);
	rq = tc_req(c, 1);
	T_EQ(tc_peek(c, rq, 1, 20, &m), 12);
	T_EQ(m.n_pages, 12);
	T_EQ(ta_pins(&f->d, 0), 0);
	T_EQ(tc_match(c, rq, 1, 20, NULL, &m), 12);
	T_EQ(ta_pins(&f->d, 0), 12);
	/* a second match of the same request replaces the first */
	T_EQ(tc_match(c, rq, 1, 5, NULL, &m), 5);
	T_EQ(ta_pins(&f->d, 0), 5);
	T_OK(kvmm_trim(rq, 2, 0));
	T_EQ(ta_pins(&f->d, 0), 2);
	tc_end(rq);
	T_EQ(ta_pins(&f->d, 0), 0);
}

static void an_aborted_request_leaves_nothing(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	kvmm_frame_t frame[8];
	struct kvmm_key key;
	int i;

	fx_start(f, NULL);
	fx_client(f, 0, 0, NULL);
	tc_open(c, f->d.socket, NULL);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 8, frame);
	for (i = 0; i < 8; i++) {
		tc_key(c, 1, (uint32_t)i, TC_FULL, &key);
		tc_fill(c, 0, frame[i], &key);
	}
	tc_end(rq);
	tc_ping(c);
	T_EQ(proc_call(&f->p[0], fx_hits, 1, 8), 0);
	T_EQ(ta_counter(&f->d, "dram0", "pgpublish"), 0);
	T_EQ(ta_node(&f->d, "dram0", "frames.ready"), 0);
	tc_close(c);
	proc_end(&f->p[0]);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
}

/* -- a second publisher ------------------------------------------------------------ */

static void second_publisher_gets_the_canonical_frame(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_result first[8], second[8];
	struct kvmm_req *rq, *other;
	struct kvmm_key key;
	int i;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	rq = tc_req(c, 1);
	T_EQ(tc_publish(c, rq, 1, 0, 8, first), 8);
	tc_end(rq);

	tc_open(&f->c[1], f->d.socket, NULL);
	other = tc_req(&f->c[1], 2);
	T_EQ(tc_publish(&f->c[1], other, 1, 0, 8, second), 8);
	for (i = 0; i < 8; i++) {
		T_EQ(first[i].result, 0);
		T_EQ(second[i].result, -EEXIST);
		T_EQ(second[i].frame, first[i].frame);
		tc_key(c, 1, (uint32_t)i, TC_FULL, &key);
		T_EQ(tc_wrong(&f->c[1], 0, second[i].frame, &key), 0);
	}
	/* pinned for this request, its own frames are its own still */
	T_CHECK(ta_pins(&f->d, 0) >= 8);
	T_EQ(ta_counter(&f->d, "dram0", "pgpublish_exist"), 8);
	tc_end(other);
	T_EQ(ta_pins(&f->d, 0), 0);
	ta_check(&f->d);
}

static void a_page_is_found_only_after_its_step(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	struct kvmm_done d;
	uint64_t tag;

	fx_start(f, NULL);
	fx_client(f, 0, 0, NULL);
	tc_open(c, f->d.socket, NULL);
	rq = tc_post(c, 1, 5, &tag);
	tc_ping(c);
	T_EQ(proc_call(&f->p[0], fx_hits, 1, 1), 0);
	T_OK(kvmm_step_done(c->k, 4));
	tc_ping(c);
	T_EQ(proc_call(&f->p[0], fx_hits, 1, 1), 0);
	T_OK(kvmm_step_done(c->k, 5));
	T_CHECK(tc_wait(c, tag, &d, LONG_WAIT));
	T_EQ(d.result, 0);
	T_EQ(d.res[0].result, 0);
	T_EQ(proc_call(&f->p[0], fx_hits, 1, 1), 1);
	tc_end(rq);
}

static long post_in_child(void *shm, long chain, long after)
{
	uint64_t tag;

	tc_post(fx_c(), (uint64_t)chain, (uint64_t)after, &tag);
	tc_ping(fx_c());
	return 0;
}

static void second_publisher_waits_for_the_first(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0], *o = &f->c[1];
	struct kvmm_req *rq, *rq2;
	struct kvmm_done d;
	uint64_t tag, tag2;
	uint32_t frame;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_open(o, f->d.socket, NULL);
	rq = tc_post(c, 1, 3, &tag);
	tc_ping(c);
	rq2 = tc_post(o, 1, 0, &tag2);
	tc_ping(o);
	T_EQ(o->nr_stray, 0);		/* not answered yet */
	T_OK(kvmm_step_done(c->k, 3));
	T_CHECK(tc_wait(c, tag, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	frame = d.res[0].frame;
	T_CHECK(tc_wait(o, tag2, &d, LONG_WAIT));
	T_EQ(d.res[0].result, -EEXIST);
	T_EQ(d.res[0].frame, frame);
	tc_end(rq);
	tc_end(rq2);
	ta_check(&f->d);
}

static void second_publisher_takes_over_when_the_first_dies(void **state)
{
	struct fx *f = *state;
	struct tc *o = &f->c[1];
	struct kvmm_req *rq;
	struct kvmm_done d;
	uint64_t tag;

	fx_start(f, NULL);
	fx_client(f, 0, 0, NULL);
	tc_open(o, f->d.socket, NULL);
	proc_call(&f->p[0], post_in_child, 1, 3);
	rq = tc_post(o, 1, 0, &tag);
	tc_ping(o);
	T_EQ(o->nr_stray, 0);
	proc_signal(&f->p[0], SIGKILL);
	proc_reap(&f->p[0]);
	T_CHECK(tc_wait(o, tag, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	tc_end(rq);
	T_EQ(tc_hits(o, 1, 1), 1);
	tc_close(o);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
}

/* -- parents ----------------------------------------------------------------------- */

static void a_page_whose_parent_is_nowhere_is_refused(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	struct kvmm_pub pub[4];
	struct kvmm_result *res;
	kvmm_frame_t frame[4];
	struct kvmm_done d;
	uint64_t tag;
	int i;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 4, frame);
	for (i = 0; i < 4; i++) {
		tc_pub(c, &pub[i], 1, (uint32_t)i + 5, TC_FULL, frame[i], 0);
		tc_fill(c, 0, frame[i], &pub[i].key);
	}
	/* 5 has no parent, 6 and 7 hang on it, 8 is a root by its own word */
	pub[3].flags = KVMM_PUB_ROOT;
	tag = ++c->tag;
	T_OK(kvmm_publish(rq, c->node, pub, 4, tag));
	T_CHECK(tc_wait(c, tag, &d, LONG_WAIT));
	T_EQ(d.result, 0);
	res = (struct kvmm_result *)d.res;
	T_EQ(res[0].result, -ESTALE);
	T_EQ(res[1].result, -ESTALE);
	T_EQ(res[2].result, -ESTALE);
	T_EQ(res[3].result, 0);
	/* what was refused is mine still: it may be published again */
	tc_pub(c, &pub[0], 1, 0, TC_FULL, frame[0], 0);
	tc_fill(c, 0, frame[0], &pub[0].key);
	tag = ++c->tag;
	T_OK(kvmm_publish(rq, c->node, pub, 1, tag));
	T_CHECK(tc_wait(c, tag, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	tc_end(rq);
	T_EQ(tc_hits(c, 1, 9), 1);
	T_EQ(ta_counter(&f->d, "dram0", "pgpublish_stale"), 3);
	ta_check(&f->d);
}

static void a_wrong_checksum_is_refused(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	struct kvmm_pub pub;
	kvmm_frame_t frame;
	struct kvmm_done d;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 1, &frame);
	tc_pub(c, &pub, 1, 0, TC_FULL, frame, 0);
	tc_fill(c, 0, frame, &pub.key);
	pub.flags = KVMM_PUB_CRC;
	pub.crc = 0x12345678;
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 1));
	T_CHECK(tc_wait(c, 1, &d, LONG_WAIT));
	T_EQ(d.res[0].result, -EBADMSG);
	pub.crc = kvmm_crc32c(0, kvmm_win_ptr(c->win[0], 0, frame),
			      c->page_bytes[0]);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 2));
	T_CHECK(tc_wait(c, 2, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	tc_end(rq);
	ta_check(&f->d);
}

static void a_reported_page_goes_with_its_descendants(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_hit hit[10];
	struct kvmm_req *rq;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, NULL);
	tc_put(c, 1, 0, 10);
	rq = tc_req(c, 1);
	T_EQ(tc_match(c, rq, 1, 10, hit, NULL), 10);
	T_OK(kvmm_report(rq, 4, KVMM_BAD));
	tc_ping(c);
	/* not found any more, though it is pinned and stays readable here */
	T_EQ(tc_hits(c, 1, 10), 4);
	tc_check(c, 1, hit, 10);
	tc_end(rq);
	T_EQ(tc_hits(c, 1, 10), 4);
	T_CHECK(ta_counter(&f->d, "dram0", "pgreport") >= 1);
	T_EQ(tc_put(c, 1, 4, 6), 6);
	T_EQ(tc_hits(c, 1, 10), 10);
	ta_check(&f->d);
}

/* -- hybrid models ------------------------------------------------------------------ */

#define UNITS	12

/* Publish page @i of @group; parents are only asked for in FULL groups. */
static void put_page(struct tc *c, uint64_t chain, uint32_t i,
		     unsigned int group)
{
	unsigned int cls = group == TC_LAST;
	struct kvmm_req *rq = tc_req(c, chain);
	struct kvmm_pub pub;
	kvmm_frame_t frame;
	struct kvmm_done d;
	uint64_t tag = ++c->tag;

	tc_alloc(c, rq, cls, 1, &frame);
	tc_pub(c, &pub, chain, i, group, frame, 0);
	tc_fill(c, cls, frame, &pub.key);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, tag));
	T_CHECK(tc_wait(c, tag, &d, LONG_WAIT));
	T_EQ(d.result, 0);
	T_EQ(d.res[0].result, 0);
	tc_end(rq);
}

struct presence {
	bool page[3][UNITS];
};

static void put_random(struct tc *c, uint64_t chain, struct rng *r,
		       struct presence *p)
{
	uint32_t full = (uint32_t)rng_below(r, UNITS + 1), i;
	unsigned int g;

	memset(p, 0, sizeof(*p));
	for (i = 0; i < UNITS; i++) {
		p->page[TC_FULL][i] = i < full;
		p->page[TC_WINDOW][i] = rng_below(r, 4) != 0;
		p->page[TC_LAST][i] = rng_below(r, 3) == 0;
	}
	for (g = 0; g < 3; g++)
		for (i = 0; i < UNITS; i++)
			if (p->page[g][i])
				put_page(c, chain, i, g);
}

/* The rule as the design has it, in the plainest words. */
static bool usable(const struct presence *p, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		if (!p->page[TC_FULL][i])
			return false;
	for (i = n > TC_WINDOW_PAGES ? n - TC_WINDOW_PAGES : 0; i < n; i++)
		if (!p->page[TC_WINDOW][i])
			return false;
	return p->page[TC_LAST][n - 1];
}

static bool needed(unsigned int group, uint32_t i, uint32_t n)
{
	switch (group) {
	case TC_FULL:
		return i < n;
	case TC_WINDOW:
		return i < n && i + TC_WINDOW_PAGES >= n;
	default:
		return i + 1 == n;
	}
}

static void check_joint(struct fx *f, struct tc *c, uint64_t chain,
			const struct presence *p)
{
	static struct kvmm_key key[3][UNITS];
	struct kvmm_keys keys[3];
	struct kvmm_hit hit[3 * UNITS];
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_req *rq = tc_req(c, chain);
	unsigned int g, pins = 0;
	uint32_t i, n = 0;

	for (i = 1; i <= UNITS; i++)
		if (usable(p, i))
			n = i;
	for (g = 0; g < 3; g++) {
		tc_keys(c, chain, UNITS, g, key[g]);
		keys[g] = (struct kvmm_keys) { .k = key[g], .n = UNITS,
					       .group = (uint16_t)g };
	}
	T_OK(kvmm_match(rq, keys, 3, c->node, hit, &m));
	T_EQ(m.n_pages, n);
	T_EQ(m.n_resident, n);
	for (g = 0; g < 3; g++) {
		for (i = 0; i < UNITS; i++) {
			const struct kvmm_hit *h = &hit[g * UNITS + i];

			T_EQ(h->group, g);
			if (!needed(g, i, n))
				continue;
			T_EQ(h->state, KVMM_HIT);
			T_EQ(tc_wrong(c, g == TC_LAST, h->frame, &key[g][i]),
			     0);
			pins++;
		}
	}
	/* those are pinned and no others */
	T_EQ(ta_pins(&f->d, 0), pins);
	tc_end(rq);
	T_EQ(ta_pins(&f->d, 0), 0);
}

static void groups_agree_on_one_length(void **state)
{
	struct tc_opts o = { .hybrid = true, .page_bytes = 16384 };
	unsigned int i, rounds = test_long() ? 500 : 40;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct presence p;
	struct rng r;

	rng_seed(&r, test_seed());
	fx_start(f, NULL);
	tc_open(c, f->d.socket, &o);
	for (i = 0; i < rounds; i++) {
		put_random(c, i + 1, &r, &p);
		check_joint(f, c, i + 1, &p);
	}
	ta_check(&f->d);
}

/* -- sizes --------------------------------------------------------------------------- */

static void the_largest_batch_goes_through(void **state)
{
	static kvmm_frame_t frame[4097];
	static struct kvmm_pub pub[4097];
	static struct kvmm_hit hit[4096];
	struct tc_opts o = { .page_bytes = 4096 };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	struct kvmm_done d;
	uint32_t i;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, &o);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 4096, frame);
	frame[4096] = frame[0];
	for (i = 0; i < 4097; i++) {
		tc_pub(c, &pub[i], 1, i, TC_FULL, frame[i], 0);
		if (i < 4096)
			tc_fill(c, 0, frame[i], &pub[i].key);
	}
	T_EQ(kvmm_publish(rq, c->node, pub, 4097, 1), -EINVAL);
	T_EQ(kvmm_publish(rq, c->node, pub, 0, 1), -EINVAL);
	T_OK(kvmm_publish(rq, c->node, pub, 4096, 2));
	T_CHECK(tc_wait(c, 2, &d, LONG_WAIT));
	T_EQ(d.result, 0);
	T_EQ(d.n, 4096);
	for (i = 0; i < 4096; i++)
		T_EQ(d.res[i].result, 0);
	tc_end(rq);

	tc_open(&f->c[1], f->d.socket, &o);
	rq = tc_req(&f->c[1], 1);
	T_EQ(tc_match(&f->c[1], rq, 1, 4096, hit, NULL), 4096);
	tc_check(&f->c[1], 1, hit, 4096);
	T_EQ(ta_pins(&f->d, 0), 4096);
	tc_end(rq);
	ta_check(&f->d);
}

static int extents_up;

static void on_extent(void *arg, void *ptr, size_t bytes, int up)
{
	T_CHECK(ptr && bytes && arg == &extents_up);
	extents_up += up ? 1 : -1;
}

static void growth_comes_through_win_sync(void **state)
{
	struct td_opts o = { .dram_bytes = 64 * MIB };
	struct kvmm_win_opts wo = { .size = sizeof(wo), .on_extent = on_extent,
				    .arg = &extents_up };
	struct tc_opts no_win = { .no_window = true };
	struct fx *f = *state;
	struct tc *c = &f->c[0], *late = &f->c[1];
	struct kvmm_match m;
	struct kvmm_req *rq;
	void *base;

	extents_up = 0;
	fx_start(f, &o);
	tc_open(c, f->d.socket, NULL);
	tc_open(late, f->d.socket, &no_win);
	late->node = c->node;
	T_OK(kvmm_win_open(late->sp, 0, c->node, &wo, &late->win[0]));
	late->nr_classes = 1;
	tc_sync(late, 0);
	base = kvmm_win_base(late->win[0], 0);
	T_CHECK(base);
	/* the first one comes as soon as it is populated */
	T_WAIT(LONG_WAIT, tc_sync(late, 0) >= 0 && extents_up >= 1);

	/* more than fits into the first extents: kvmmd adds some */
	T_EQ(tc_put(c, 1, 0, 700), 700);
	rq = tc_req(late, 1);
	tc_match_once(late, rq, 1, 700, NULL, &m);
	if (m.n_resident < 700) {
		T_EQ(m.sync_wanted, 1);
		T_EQ(m.n_pages, 700);
		T_CHECK(tc_sync(late, 0) > 0);
	}
	T_EQ(tc_match_once(late, rq, 1, 700, NULL, &m), 700);
	T_CHECK(kvmm_win_base(late->win[0], 0) == base);
	tc_end(rq);
	T_EQ(tc_hits(late, 1, 700), 700);
	kvmm_win_close(late->win[0]);
	late->nr_classes = 0;
	T_EQ(extents_up, 0);
	ta_check(&f->d);
}

static void read_and_write_copy_pages(void **state)
{
	struct tc_opts o = { .page_bytes = 8192 };
	static _Alignas(8) uint8_t in[8192], out[8192];
	struct iovec iov[3] = {
		{ in, 100 }, { in + 100, 4000 }, { in + 4100, 8192 - 4100 },
	};
	struct iovec back = { out, sizeof(out) };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_req *rq;
	struct kvmm_pub pub;
	struct kvmm_done d;
	kvmm_frame_t frame;

	fx_start(f, NULL);
	tc_open(c, f->d.socket, &o);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 1, &frame);
	tc_pub(c, &pub, 1, 0, TC_FULL, frame, 0);
	pattern_fill(in, sizeof(in), &pub.key);
	T_EQ(kvmm_write(rq, 0, c->node, frame, iov, 3), 8192);
	T_EQ(kvmm_write(rq, 0, c->node, frame + 1, iov, 3), -EINVAL);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 1));
	T_CHECK(tc_wait(c, 1, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	tc_end(rq);
	rq = tc_req(c, 2);
	T_EQ(tc_match(c, rq, 1, 2, NULL, NULL), 1);
	T_EQ(kvmm_read(rq, 0, &back, 1), 8192);
	T_EQ(pattern_check(out, sizeof(out), &pub.key), 0);
	T_EQ(kvmm_read(rq, 1, &back, 1), -ENOENT);
	tc_end(rq);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(published_pages_are_hit_by_another_process),
		FX_TEST(a_longer_chain_hits_as_far_as_it_is_there),
		FX_TEST(a_peek_finds_the_same_and_pins_nothing),
		FX_TEST(an_aborted_request_leaves_nothing),
		FX_TEST(second_publisher_gets_the_canonical_frame),
		FX_TEST(a_page_is_found_only_after_its_step),
		FX_TEST(second_publisher_waits_for_the_first),
		FX_TEST(second_publisher_takes_over_when_the_first_dies),
		FX_TEST(a_page_whose_parent_is_nowhere_is_refused),
		FX_TEST(a_wrong_checksum_is_refused),
		FX_TEST(a_reported_page_goes_with_its_descendants),
		FX_TEST(groups_agree_on_one_length),
		FX_TEST(the_largest_batch_goes_through),
		FX_TEST(growth_comes_through_win_sync),
		FX_TEST(read_and_write_copy_pages),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
