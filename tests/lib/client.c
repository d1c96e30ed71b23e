/* SPDX-License-Identifier: Apache-2.0 */
/* A client as tests use it; see client.h. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/clock.h"
#include "tests/lib/client.h"
#include "tests/lib/pattern.h"

#define ALL_FRAMES	64		/* written at a time */

/* -- opening ------------------------------------------------------------------- */

static const struct kvmm_group groups[] = {
	[TC_FULL] = { .class_ix = 0, .rule = KVMM_FULL, .block_tokens = 16 },
	[TC_WINDOW] = { .class_ix = 0, .rule = KVMM_WINDOW, .block_tokens = 16,
			.window_pages = TC_WINDOW_PAGES },
	[TC_LAST] = { .class_ix = 1, .rule = KVMM_LAST, .block_tokens = 16 },
};

const struct kvmm_desc *tc_desc(const struct tc_opts *o)
{
	static _Thread_local struct kvmm_seg seg[6];
	static _Thread_local struct kvmm_class cls[2];
	static _Thread_local struct kvmm_desc desc;
	uint32_t bytes = o && o->page_bytes ? o->page_bytes : TC_PAGE_BYTES;

	/* two halves, so that segments are really used */
	seg[0] = (struct kvmm_seg) { .bytes = bytes / 2, .align = 64,
		.what = KVMM_SEG_K, .shard = KVMM_MIRROR };
	seg[1] = (struct kvmm_seg) { .bytes = bytes - bytes / 2, .align = 64,
		.what = KVMM_SEG_V, .shard = KVMM_MIRROR };
	seg[2] = (struct kvmm_seg) { .bytes = bytes / 4, .align = 64,
		.what = KVMM_SEG_STATE, .shard = KVMM_MIRROR };
	cls[0] = (struct kvmm_class) { .name = "kv", .page_bytes = bytes,
		.nsegs = 2, .segs = seg };
	cls[1] = (struct kvmm_class) { .name = "state",
		.page_bytes = bytes / 4, .nsegs = 1, .segs = seg + 2 };
	desc = (struct kvmm_desc) {
		.size = sizeof(desc), .flags = o ? o->desc_flags : 0,
		.model = o && o->model ? o->model : "test", .revision = "1",
		.kv_dtype = "u8", .scale_format = "", .layout = "kv",
		.abi_tag = "test-1", .salt = "", .world = 1,
		.nclasses = o && o->hybrid ? 2 : 1,
		.ngroups = o && o->hybrid ? 3 : 1,
		.classes = cls, .groups = groups,
	};
	if (o && o->world > 1) {
		seg[3] = (struct kvmm_seg) { .bytes = bytes / 2, .align = 64,
			.what = KVMM_SEG_K, .shard = KVMM_STRIPE };
		seg[4] = (struct kvmm_seg) { .bytes = bytes / 4, .align = 64,
			.what = KVMM_SEG_KV, .shard = KVMM_MIRROR };
		seg[5] = (struct kvmm_seg) { .bytes = bytes / 4, .align = 64,
			.what = KVMM_SEG_V, .shard = KVMM_STRIPE };
		cls[0].nsegs = 3;
		cls[0].segs = seg + 3;
		desc.world = o->world;
	}
	return &desc;
}

static int open_windows(struct tc *c, const struct tc_opts *o,
			const struct kvmm_desc *d)
{
	struct kvmm_win_opts wo = { .size = sizeof(wo),
				    .rights = o ? o->rights : 0 };
	int err = kvmm_node_find(c->k, o && o->node ? o->node : "dram0");
	struct kvmm_info info = { .size = sizeof(info) };
	unsigned int i;

	if (err < 0)
		return err;
	c->node = (kvmm_node_t)err;
	T_OK(kvmm_info(c->k, &info));
	c->gang = info.node[err].gang;
	c->rank = o && o->engine ? o->engine->rank : 0;
	for (i = 0; i < d->nclasses; i++) {
		err = kvmm_win_open(c->sp, i, c->node, &wo, &c->win[i]);
		if (err)
			return err;
		c->nr_classes = i + 1;
		err = kvmm_win_sync(c->win[i], 0);
		if (err < 0)
			return err;
	}
	return 0;
}

int tc_try_open(struct tc *c, const char *socket, const struct tc_opts *o)
{
	struct kvmm_open_opts oo = { .size = sizeof(oo), .name = "test",
				     .call_timeout_ns = o ? o->timeout_ns : 0 };
	const struct kvmm_desc *d = tc_desc(o);
	unsigned int i;
	int err;

	memset(c, 0, sizeof(*c));
	for (i = 0; i < d->nclasses; i++)
		c->page_bytes[i] = d->classes[i].page_bytes;
	err = kvmm_open(socket, &oo, &c->k);
	if (err)
		return err;
	if (o && o->engine)
		err = kvmm_join(c->k, o->engine);
	if (!err)
		err = kvmm_space_attach(c->k, d, &c->sp);
	if (!err && !(o && o->no_window))
		err = open_windows(c, o, d);
	if (err)
		tc_close(c);
	return err;
}

void tc_open(struct tc *c, const char *socket, const struct tc_opts *o)
{
	T_OK(tc_try_open(c, socket, o));
}

void tc_close(struct tc *c)
{
	unsigned int i;

	if (!c->k)
		return;
	for (i = 0; i < c->nr_classes; i++)
		kvmm_win_close(c->win[i]);
	if (c->sp)
		kvmm_space_detach(c->sp);
	kvmm_close(c->k);
	memset(c, 0, sizeof(*c));
}

int tc_sync(struct tc *c, uint64_t step)
{
	unsigned int i;
	int sum = 0;

	for (i = 0; i < c->nr_classes; i++) {
		int n = kvmm_win_sync(c->win[i], step);

		T_OK(n);
		sum += n;
	}
	return sum;
}

struct kvmm_req *tc_req(struct tc *c, uint64_t id)
{
	struct kvmm_req *rq;

	T_OK(kvmm_req_open(c->sp, id, NULL, &rq));
	return rq;
}

void tc_end(struct kvmm_req *rq)
{
	T_OK(kvmm_req_end(rq, KVMM_ENDED, 0));
}

/* -- keys and bytes ------------------------------------------------------------ */

void tc_key(const struct tc *c, uint64_t chain, uint32_t i, unsigned int group,
	    struct kvmm_key *key)
{
	uint64_t name[3] = { chain, i, group };

	T_OK(kvmm_key_wrap(c->sp, name, sizeof(name), key));
}

void tc_keys(const struct tc *c, uint64_t chain, uint32_t n,
	     unsigned int group, struct kvmm_key *key)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		tc_key(c, chain, i, group, &key[i]);
}

/* A share of a segment of a page on a gang: where it is, here and in the page. */
struct share {
	void		*at;
	size_t		off, len;
};

/* The @i-th segment of the first class, see tc_desc(); false: there is none. */
static bool gang_share(struct tc *c, kvmm_frame_t f, unsigned int i,
		       struct share *s)
{
	size_t q = c->page_bytes[0] / 4;
	size_t at[] = { 0, 2 * q, 3 * q, 4 * q };

	if (i == 3)
		return false;
	s->at = kvmm_win_ptr(c->win[0], i, f);
	T_CHECK(s->at, "frame %u is not mapped", f);
	s->off = at[i];
	s->len = at[i + 1] - at[i];
	if (i == 1)
		return true;		/* the mirror */
	s->len /= c->gang;
	s->off += c->rank * s->len;
	return true;
}

static void gang_fill(struct tc *c, kvmm_frame_t f, const struct kvmm_key *key)
{
	uint8_t *page = malloc(c->page_bytes[0]);
	struct share s;
	unsigned int i;

	T_CHECK(page);
	pattern_fill(page, c->page_bytes[0], key);
	for (i = 0; gang_share(c, f, i, &s); i++)
		memcpy(s.at, page + s.off, s.len);
	free(page);
}

static size_t gang_wrong(struct tc *c, kvmm_frame_t f,
			 const struct kvmm_key *key)
{
	uint8_t *page = malloc(c->page_bytes[0]);
	struct share s;
	unsigned int i;
	size_t j, wrong = 0;

	T_CHECK(page);
	pattern_fill(page, c->page_bytes[0], key);
	for (i = 0; gang_share(c, f, i, &s); i++)
		for (j = 0; j < s.len; j++)
			wrong += ((uint8_t *)s.at)[j] != page[s.off + j];
	free(page);
	return wrong;
}

void tc_fill(struct tc *c, unsigned int cls, kvmm_frame_t f,
	     const struct kvmm_key *key)
{
	void *page;

	if (c->gang) {
		gang_fill(c, f, key);
		return;
	}
	page = kvmm_win_ptr(c->win[cls], 0, f);
	T_CHECK(page, "frame %u is not mapped", f);
	pattern_fill(page, c->page_bytes[cls], key);
}

size_t tc_wrong(struct tc *c, unsigned int cls, kvmm_frame_t f,
		const struct kvmm_key *key)
{
	const void *page;

	if (c->gang)
		return gang_wrong(c, f, key);
	page = kvmm_win_ptr(c->win[cls], 0, f);
	T_CHECK(page, "frame %u is not mapped", f);
	return pattern_check(page, c->page_bytes[cls], key);
}

/* -- completions --------------------------------------------------------------- */

/* Sleep until there is something to do, a millisecond at most. */
static void rest(struct tc *c)
{
	struct pollfd pfd = { .fd = kvmm_fd(c->k), .events = POLLIN };

	poll(&pfd, 1, 1);
}

bool tc_wait(struct tc *c, uint64_t tag, struct kvmm_done *d, unsigned int ms)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);

	for (;;) {
		int n = kvmm_poll(c->k, d, 1);

		if (n > 0 && d->tag == tag)
			return true;
		if (n > 0) {
			c->nr_stray++;
			continue;
		}
		if (deadline_past(deadline))
			return false;
		rest(c);
	}
}

void tc_poll(struct tc *c)
{
	struct kvmm_done d[16];
	int n;

	while ((n = kvmm_poll(c->k, d, 16)) > 0)
		c->nr_stray += (uint64_t)n;
}

void tc_ping(struct tc *c)
{
	uint64_t tag = ++c->tag;
	struct kvmm_done d;

	T_OK(kvmm_ping(c->k, tag));
	T_CHECK(tc_wait(c, tag, &d, TC_WAIT_MS));
	T_EQ(d.op, KVMM_OP_PING);
	T_EQ(d.result, 0);
}

/* -- frames and pages ------------------------------------------------------------ */

int tc_try_alloc(struct tc *c, struct kvmm_req *rq, unsigned int cls,
		 unsigned int n, kvmm_frame_t *f, unsigned int ms)
{
	uint64_t deadline = deadline_in(ms * NSEC_PER_MSEC);

	for (;;) {
		int err = kvmm_alloc(rq, cls, c->node, n, f, KVMM_EVICT_OK);

		if (err != -EAGAIN || deadline_past(deadline))
			return err;
		err = kvmm_win_sync(c->win[cls], 0);
		if (err < 0)
			return err;
		tc_poll(c);
		rest(c);
	}
}

void tc_alloc(struct tc *c, struct kvmm_req *rq, unsigned int cls,
	      unsigned int n, kvmm_frame_t *f)
{
	T_OK(tc_try_alloc(c, rq, cls, n, f, TC_WAIT_MS));
}

void tc_pub(const struct tc *c, struct kvmm_pub *pub, uint64_t chain,
	    uint32_t i, unsigned int group, kvmm_frame_t f, uint64_t after)
{
	*pub = (struct kvmm_pub) {
		.frame = f, .pos = i * 16, .group = (uint16_t)group,
		.after = after,
	};
	tc_key(c, chain, i, group, &pub->key);
	if (i)
		tc_key(c, chain, i - 1, group, &pub->parent);
}

struct kvmm_req *tc_post(struct tc *c, uint64_t chain, uint64_t after,
			 uint64_t *tag)
{
	struct kvmm_req *rq = tc_req(c, chain);
	struct kvmm_pub pub;
	kvmm_frame_t frame;

	tc_alloc(c, rq, 0, 1, &frame);
	tc_pub(c, &pub, chain, 0, TC_FULL, frame, after);
	tc_fill(c, 0, frame, &pub.key);
	*tag = ++c->tag;
	T_OK(kvmm_publish(rq, c->node, &pub, 1, *tag));
	return rq;
}

static unsigned int publish_some(struct tc *c, struct kvmm_req *rq,
				 uint64_t chain, uint32_t first, uint32_t n,
				 struct kvmm_result *res)
{
	kvmm_frame_t f[ALL_FRAMES];
	struct kvmm_pub pub[ALL_FRAMES];
	uint64_t tag = ++c->tag;
	struct kvmm_done d;
	unsigned int i, ok = 0;

	tc_alloc(c, rq, 0, n, f);
	for (i = 0; i < n; i++) {
		tc_pub(c, &pub[i], chain, first + i, TC_FULL, f[i], 0);
		tc_fill(c, 0, f[i], &pub[i].key);
	}
	T_OK(kvmm_publish(rq, c->node, pub, n, tag));
	T_CHECK(tc_wait(c, tag, &d, TC_WAIT_MS), "no answer to a publish");
	T_EQ(d.op, KVMM_OP_PUBLISH);
	if (d.result)
		return 0;
	T_EQ(d.n, n);
	for (i = 0; i < n; i++) {
		ok += !d.res[i].result || d.res[i].result == -EEXIST;
		if (res)
			res[i] = d.res[i];
	}
	return ok;
}

unsigned int tc_publish(struct tc *c, struct kvmm_req *rq, uint64_t chain,
			uint32_t first, uint32_t n, struct kvmm_result *res)
{
	unsigned int ok = 0;
	uint32_t i, some;

	for (i = 0; i < n; i += some) {
		some = n - i < ALL_FRAMES ? n - i : ALL_FRAMES;
		ok += publish_some(c, rq, chain, first + i, some,
				   res ? res + i : NULL);
	}
	return ok;
}

unsigned int tc_put(struct tc *c, uint64_t chain, uint32_t first, uint32_t n)
{
	struct kvmm_req *rq = tc_req(c, chain);
	unsigned int ok = tc_publish(c, rq, chain, first, n, NULL);

	tc_end(rq);
	return ok;
}

static struct kvmm_keys full_keys(struct tc *c, uint64_t chain, uint32_t n)
{
	static _Thread_local struct kvmm_key key[TC_MAX_CHAIN];

	T_CHECK(n <= TC_MAX_CHAIN);
	tc_keys(c, chain, n, TC_FULL, key);
	return (struct kvmm_keys) { .k = key, .n = n, .group = TC_FULL };
}

unsigned int tc_match_once(struct tc *c, struct kvmm_req *rq, uint64_t chain,
			   uint32_t n, struct kvmm_hit *hit,
			   struct kvmm_match *m)
{
	static _Thread_local struct kvmm_hit unused[TC_MAX_CHAIN];
	struct kvmm_keys keys = full_keys(c, chain, n);
	struct kvmm_match mine;

	if (!m)
		m = &mine;
	*m = (struct kvmm_match) { .size = sizeof(*m) };
	T_OK(kvmm_match(rq, &keys, 1, c->node, hit ? hit : unused, m));
	return m->n_resident;
}

unsigned int tc_match(struct tc *c, struct kvmm_req *rq, uint64_t chain,
		      uint32_t n, struct kvmm_hit *hit, struct kvmm_match *m)
{
	struct kvmm_match mine;
	unsigned int got;

	if (!m)
		m = &mine;
	got = tc_match_once(c, rq, chain, n, hit, m);
	if (m->sync_wanted && tc_sync(c, 0))
		got = tc_match_once(c, rq, chain, n, hit, m);
	return got;
}

unsigned int tc_peek(struct tc *c, struct kvmm_req *rq, uint64_t chain,
		     uint32_t n, struct kvmm_match *m)
{
	struct kvmm_keys keys = full_keys(c, chain, n);
	struct kvmm_match mine;

	if (!m)
		m = &mine;
	*m = (struct kvmm_match) { .size = sizeof(*m) };
	T_OK(kvmm_peek(rq, &keys, 1, c->node, m));
	return m->n_resident;
}

void tc_check(struct tc *c, uint64_t chain, const struct kvmm_hit *hit,
	      uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++) {
		struct kvmm_key key;
		size_t wrong;

		if (hit[i].state != KVMM_HIT)
			continue;
		tc_key(c, chain, i, TC_FULL, &key);
		wrong = tc_wrong(c, 0, hit[i].frame, &key);
		T_CHECK(!wrong, "chain %llu page %u frame %u: %zu bytes",
			(unsigned long long)chain, i, hit[i].frame, wrong);
	}
}

unsigned int tc_hits(struct tc *c, uint64_t chain, uint32_t n)
{
	static _Thread_local struct kvmm_hit hit[TC_MAX_CHAIN];
	struct kvmm_req *rq = tc_req(c, chain);
	unsigned int got = tc_match(c, rq, chain, n, hit, NULL);

	tc_check(c, chain, hit, got);
	tc_end(rq);
	return got;
}

/* -- from below ------------------------------------------------------------------ */

static void take_fetched(struct tc *c, uint64_t chain,
			 const struct kvmm_done *d, struct tc_got *got)
{
	struct kvmm_key key;
	uint32_t i;

	/* a completed fetch may lie in an extent that has just come */
	for (i = 0; !d->result && i < d->n; i++) {
		size_t wrong;

		if (d->res[i].result) {
			got->missed++;
			continue;
		}
		tc_key(c, chain, d->first + i, TC_FULL, &key);
		if (!kvmm_win_ptr(c->win[0], 0, d->res[i].frame))
			tc_sync(c, 0);
		wrong = tc_wrong(c, 0, d->res[i].frame, &key);
		T_CHECK(!wrong, "chain %llu page %u, fetched: %zu bytes",
			(unsigned long long)chain, d->first + i, wrong);
		got->fetched++;
	}
	if (d->result)
		got->missed += d->n;
}

struct tc_got tc_get(struct tc *c, uint64_t chain, uint32_t n,
		     unsigned int deadline_ms)
{
	static _Thread_local struct kvmm_hit hit[TC_MAX_CHAIN];
	struct kvmm_req *rq = tc_req(c, chain);
	struct tc_got got = { 0 };
	struct kvmm_match m;
	struct kvmm_done d;
	uint64_t tag = ++c->tag, t0;

	got.resident = tc_match(c, rq, chain, n, hit, &m);
	tc_check(c, chain, hit, got.resident);
	if (m.n_pages > got.resident) {
		t0 = now_ns();
		T_OK(kvmm_fetch(rq, got.resident, m.n_pages, c->node,
				deadline_in(deadline_ms * NSEC_PER_MSEC), tag));
		T_CHECK(tc_wait(c, tag, &d, deadline_ms + 1000),
			"a fetch is not answered by its deadline");
		got.ns = now_ns() - t0;
		T_EQ(d.op, KVMM_OP_FETCH);
		take_fetched(c, chain, &d, &got);
	}
	got.missed = n - got.resident - got.fetched;
	tc_end(rq);
	return got;
}
