/* SPDX-License-Identifier: Apache-2.0 */
/* The recorded requests; see replay.h. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "ipc/base/bits.h"
#include "tests/bench/replay.h"

#define CHUNK		32u
#define FRAME_MS	20000u
#define FETCH_NS	(20 * NSEC_PER_SEC)

/**
 * struct run - the request under way
 * @key, @hit:	of @q->npages pages
 * @have:	of them are there
 */
struct run {
	struct bench_client c;
	const struct trace *t;
	struct replay	*r;
	const struct request *q;
	struct kvmm_req	*rq;
	struct kvmm_key	*key;
	struct kvmm_hit	*hit;
	uint32_t	have;
};

/* Page @i of the request is there, in @frame. Are the bytes? */
static bool page_taken(struct run *u, uint32_t i, kvmm_frame_t frame,
		       enum replay_from from)
{
	const void *at = kvmm_win_ptr(u->c.win, 0, frame);
	uint32_t page = u->q->page[i];

	if (!at || memcmp(at, &u->key[i], sizeof(u->key[i]))) {
		u->r->wrong++;
		return false;
	}
	u->r->hits++;
	if (!u->r->fresh[page])
		u->r->from[&u->q->page[i] - u->t->page] = (uint8_t)from;
	u->have = i + 1;
	return true;
}

/* The completion with @tag; its results are valid until the next poll. */
static void wait_done(struct run *u, uint64_t tag, struct kvmm_done *d)
{
	uint64_t deadline = deadline_in(2 * FETCH_NS);
	struct pollfd p = { .fd = kvmm_fd(u->c.k), .events = POLLIN };
	int n;

	for (;;) {
		n = kvmm_poll(u->c.k, d, 1);
		if (n == 1 && d->tag == tag)
			return;
		if (n < 0 || deadline_past(deadline))
			bench_die(u->c.b, "a completion",
				  n < 0 ? n : -ETIMEDOUT);
		if (!n)
			poll(&p, 1, 1);
	}
}

static void fetch(struct run *u, uint32_t end)
{
	uint32_t first = u->have, i;
	uint64_t tag = ++u->c.tag;
	struct kvmm_done d;
	int err = kvmm_fetch(u->rq, first, end, u->c.node,
			     deadline_in(FETCH_NS), tag);

	if (err)
		bench_die(u->c.b, "a fetch", err);
	wait_done(u, tag, &d);
	if (kvmm_win_sync(u->c.win, 0) < 0)
		bench_die(u->c.b, "a window", -EIO);
	for (i = 0; i < d.n && !d.result && !d.res[i].result; i++)
		if (!page_taken(u, first + i, d.res[i].frame,
				u->hit[first + i].state == KVMM_LOWER ?
				REPLAY_BELOW : REPLAY_MEMORY))
			break;
	u->r->late += end - u->have;
}

static void publish(struct run *u)
{
	uint32_t n = min(u->q->npages - u->have, CHUNK), i;
	struct kvmm_pub pub[CHUNK];
	kvmm_frame_t f[CHUNK];
	int err = bc_alloc(&u->c, u->rq, n, f, FRAME_MS);

	if (err)
		bench_die(u->c.b, "frames", err);
	memset(pub, 0, sizeof(pub));
	for (i = 0; i < n; i++) {
		uint32_t pg = u->have + i;

		pub[i].key = u->key[pg];
		if (pg)
			pub[i].parent = u->key[pg - 1];
		pub[i].frame = f[i];
		pub[i].pos = pg;
		memcpy(kvmm_win_ptr(u->c.win, 0, f[i]), &u->key[pg],
		       sizeof(u->key[pg]));
		u->r->fresh[u->q->page[pg]] = 1;
	}
	err = bc_publish(&u->c, u->rq, pub, n);
	if (err < 0)
		bench_die(u->c.b, "a publish", err);
	u->have += n;
}

static void one_request(struct run *u, const struct request *q)
{
	struct kvmm_keys keys = { .k = u->key, .n = q->npages };
	struct kvmm_match m = { .size = sizeof(m) };
	uint32_t i;
	int err;

	u->q = q;
	u->have = 0;
	u->rq = bc_req(&u->c, (uint64_t)(q - u->t->req));
	for (i = 0; i < q->npages; i++)
		bc_key(&u->c, q->page[i], &u->key[i]);
	err = kvmm_match(u->rq, &keys, 1, u->c.node, u->hit, &m);
	if (!err && m.sync_wanted && kvmm_win_sync(u->c.win, 0) >= 0)
		err = kvmm_match(u->rq, &keys, 1, u->c.node, u->hit, &m);
	if (err)
		bench_die(u->c.b, "a match", err);
	for (i = 0; i < m.n_resident; i++)
		if (!page_taken(u, i, u->hit[i].frame, REPLAY_MEMORY))
			break;
	if (u->have == m.n_resident && m.n_pages > m.n_resident)
		fetch(u, m.n_pages);
	while (u->have < q->npages)
		publish(u);
	kvmm_req_end(u->rq, q->how, 0);
}

void replay_run(struct bench *b, const char *socket, const struct trace *t,
		struct replay *r)
{
	struct run u = { .t = t, .r = r };
	size_t i;

	memset(r, 0, sizeof(*r));
	r->from = calloc(t->page_len, 1);
	r->fresh = calloc(t->nr_pages, 1);
	u.key = calloc(t->max_pages, sizeof(*u.key));
	u.hit = calloc(t->max_pages, sizeof(*u.hit));
	if (!r->from || !r->fresh || !u.key || !u.hit)
		bench_die(b, "memory", -ENOMEM);
	bc_open(&u.c, b, socket, REPLAY_PAGE_BYTES);
	for (i = 0; i < t->nr; i++)
		one_request(&u, &t->req[i]);
	bc_close(&u.c);
	free(u.key);
	free(u.hit);
}

void replay_fini(struct replay *r)
{
	free(r->from);
	free(r->fresh);
	memset(r, 0, sizeof(*r));
}
