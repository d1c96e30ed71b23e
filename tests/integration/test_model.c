/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations of several processes against a small reference.
 *
 * The reference knows of each page whether it may be in the cache (it was
 * published, and its step was done) and who has pinned it. So it knows what a
 * match may find, what it must find, which bytes must lie there, and how many
 * pins kvmmd must count. After each operation kvmmd checks its own laws, and its
 * dump is compared with the reference: every page was published by somebody,
 * its parent is there, on the block node too, pins and frames add up.
 *
 * Chains share prefixes. DRAM holds less than half of all pages, DRAM and NVMe
 * together not all of them. On the way reads come back flipped or not at all,
 * writes fail, clients are killed, and so is kvmmd.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/fixture.h"
#include "tests/lib/model.h"
#include "tests/lib/unit.h"

#define ENDING		256u		/* requests whose pins wait for a step */

/* -- the reference ---------------------------------------------------------------------- */

struct ref_req {
	bool	open;
	uint32_t id, chain;
	uint32_t n_pages;
	bool	matched[LEN];		/* pinned by its match, or a fetch */
	bool	stale[LEN];		/* so was a page of that name that is lost */
	uint8_t	published[LEN];		/* and by publishes */
};

struct ref_client {
	uint64_t step;
	struct ref_req req[REQS];
	/* @lost: a page of that name is lost since */
	struct { uint64_t tag, after; uint32_t id, r, chain, first, n;
		 bool lost[LEN]; } posted[POSTED];
	uint32_t nr_posted;
	/* ended, with publishes not answered: may keep what these seal */
	struct { uint32_t id, chain; uint16_t pins[LEN]; } late[ENDING];
	uint32_t nr_late;
	struct { uint64_t step; uint16_t pins[LEN]; uint32_t chain; }
		ending[ENDING];
	uint32_t nr_ending;
};

static struct ref_client ref[CLIENTS];
static uint32_t last_id;
/* answers about a page that is lost, or its successor: the next dump tells */
static struct { struct ref_req *q; uint32_t at, frame; } doubt[POSTED * LEN];
static uint32_t nr_doubt;
static uint64_t lost;			/* pinned pages, since the last restart */
/*
 * Be found by anybody. Also after a restart: what lay on NVMe may be found again,
 * none of it must be. A page that nobody has published yet may not, ever.
 */
static bool may[NODES];
static struct {
	uint64_t hits, fetched, sealed, exists, deaths, restarts, faults,
		 refused;
} seen;

/*
 * What kvmmd must count. With @more also what it may count: a publish that it
 * has sealed and whose answer is on its way carries the pin of its publisher,
 * and a request that has ended is over when its last publish is.
 */
static void count_pins(uint32_t pins[NODES], bool more)
{
	uint32_t c, r, i, e;

	memset(pins, 0, NODES * sizeof(pins[0]));
	for (c = 0; c < CLIENTS; c++) {
		for (r = 0; r < REQS; r++) {
			const struct ref_req *q = &ref[c].req[r];

			for (i = 0; q->open && i < LEN; i++)
				pins[node_of(q->chain, i)] +=
					q->matched[i] + q->published[i];
		}
		for (e = 0; e < ref[c].nr_ending; e++)
			for (i = 0; i < LEN; i++)
				pins[node_of(ref[c].ending[e].chain, i)] +=
					ref[c].ending[e].pins[i];
		for (e = 0; more && e < ref[c].nr_late; e++)
			for (i = 0; i < LEN; i++)
				pins[node_of(ref[c].late[e].chain, i)] +=
					ref[c].late[e].pins[i];
		for (e = 0; more && e < ref[c].nr_posted; e++)
			for (i = 0; ref[c].posted[e].after <= ref[c].step &&
				    i < ref[c].posted[e].n; i++)
				pins[node_of(ref[c].posted[e].chain,
					     ref[c].posted[e].first + i)]++;
	}
}

/* What happens goes to stderr: it is all there is to go by after a failure. */
static void say(const char *fmt, ...)
	__attribute__((format(printf, 1, 2)));

static void say(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	fputs("# ", stderr);
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
	va_end(ap);
}

/* Publishes whose step is done may be seen from now on. */
static void reveal(struct ref_client *rc)
{
	uint32_t p, i;

	for (p = 0; p < rc->nr_posted; p++)
		for (i = 0; rc->posted[p].after <= rc->step &&
			    i < rc->posted[p].n; i++)
			may[node_of(rc->posted[p].chain,
				    rc->posted[p].first + i)] = true;
}

static uint32_t in_flight(const struct ref_client *rc, uint32_t id)
{
	uint32_t p, n = 0;

	for (p = 0; p < rc->nr_posted; p++)
		n += rc->posted[p].id == id;
	return n;
}

/* Publish @p has an answer after its request's end. */
static void late_answer(struct ref_client *rc, uint32_t p,
			const struct answer *a)
{
	uint32_t e, i;

	for (e = 0; e < rc->nr_late && rc->late[e].id != rc->posted[p].id; e++)
		;
	if (e == rc->nr_late)
		return;
	for (i = 0; !a->result && i < a->n; i++)
		rc->late[e].pins[rc->posted[p].first + i] += !a->res[i].result;
	if (in_flight(rc, rc->posted[p].id) == 1)
		rc->late[e] = rc->late[--rc->nr_late];
}

/* By a publish. With @lost it may be a page that nobody finds any more. */
static void pinned(struct ref_req *q, uint32_t at, uint32_t frame, bool lost)
{
	if (!lost) {
		q->published[at]++;
		return;
	}
	doubt[nr_doubt].q = q;
	doubt[nr_doubt].at = at;
	doubt[nr_doubt++].frame = frame;
}

static void take_answer(struct ref_client *rc, const struct answer *a)
{
	uint32_t p, i;

	for (p = 0; p < rc->nr_posted && rc->posted[p].tag != a->tag; p++)
		;
	T_CHECK(p < rc->nr_posted, "an answer to nothing that was posted");
	say("client %u: answer %llu of request %u, chain %u pages %u + %u after %llu: %d",
	    (unsigned int)(rc - ref), (unsigned long long)a->tag,
	    rc->posted[p].r, rc->posted[p].chain, rc->posted[p].first,
	    rc->posted[p].n, (unsigned long long)rc->posted[p].after,
	    a->result);
	for (i = 0; !a->result && i < a->n; i++)
		if (a->res[i].result)
			say("  page %u: %d, frame %u", rc->posted[p].first + i,
			    a->res[i].result, a->res[i].frame);
	T_CHECK(a->result || a->n == rc->posted[p].n);
	for (i = 0; !a->result && i < a->n; i++) {
		int err = a->res[i].result;

		T_CHECK(!err || err == -EEXIST || err == -ESTALE ||
			err == -EAGAIN || err == -ECANCELED, "page %u: %d", i,
			err);
		if (!err)
			T_CHECK(rc->posted[p].after <= rc->step,
				"sealed before its step");
		seen.sealed += !err;
		seen.exists += err == -EEXIST;
		seen.refused += err && err != -EEXIST;
		if ((!err || err == -EEXIST) && a->res[i].frame &&
		    rc->posted[p].r < REQS)
			pinned(&rc->req[rc->posted[p].r],
			       rc->posted[p].first + i, a->res[i].frame,
			       rc->posted[p].lost[i]);
	}
	late_answer(rc, p, a);
	rc->posted[p] = rc->posted[--rc->nr_posted];
}

/* -- what kvmmd says ---------------------------------------------------------------------- */

static char hex_of[NODES][65];
static uint32_t by_name[NODES];

static int compare_names(const void *a, const void *b)
{
	return strcmp(hex_of[*(const uint32_t *)a],
		      hex_of[*(const uint32_t *)b]);
}

static int compare_name(const void *hex, const void *b)
{
	return strcmp(hex, hex_of[*(const uint32_t *)b]);
}

static void name_nodes(const struct tc *c)
{
	uint32_t n, i;

	for (n = 0; n < NODES; n++) {
		struct kvmm_key key;

		node_key(c, n, &key);
		for (i = 0; i < 32; i++)
			snprintf(hex_of[n] + 2 * i, 3, "%02x", key.b[i]);
		by_name[n] = n;
	}
	qsort(by_name, NODES, sizeof(by_name[0]), compare_names);
}

static uint32_t node_named(const char *hex)
{
	const uint32_t *n = bsearch(hex, by_name, NODES, sizeof(by_name[0]),
				    compare_name);

	T_CHECK(n, "a page that nobody published: %s", hex);
	return *n;
}

/**
 * struct dumped - a page, as the dump has it
 * @block:	0 none, 1 writing, 2 ready
 */
struct dumped {
	bool	there, ready;
	uint8_t	block;
	uint32_t frame, pins;
	char	parent[65];
};

static struct dumped dumped[NODES];

static void read_copy(struct dumped *d, json_t *copy, uint64_t count[2])
{
	const char *node = json_string_value(json_object_get(copy, "node"));
	const char *state = json_string_value(json_object_get(copy, "state"));
	bool ready = !strcmp(state, "ready");

	if (!strcmp(node, "nvme0")) {
		d->block = ready ? 2 : 1;
		count[1] += ready;
		return;
	}
	d->ready = ready;
	d->frame = (uint32_t)json_integer_value(json_object_get(copy, "frame"));
	d->pins = (uint32_t)json_integer_value(json_object_get(copy, "pins"));
	count[0] += ready;
}

static void read_pages(json_t *pages, uint64_t count[2])
{
	json_t *page, *copy;
	size_t i, j;

	memset(dumped, 0, sizeof(dumped));
	count[0] = count[1] = 0;
	json_array_foreach(pages, i, page) {
		uint32_t n = node_named(json_string_value(
					json_object_get(page, "key")));
		struct dumped *d = &dumped[n];
		const char *up = json_string_value(
					json_object_get(page, "parent"));

		T_CHECK(!d->there, "a page twice");
		T_CHECK(may[n], "chain %u page %u: it was never published",
			n / LEN, n % LEN);
		d->there = true;
		snprintf(d->parent, sizeof(d->parent), "%s", up ? up : "");
		json_array_foreach(json_object_get(page, "copies"), j, copy)
			read_copy(d, copy, count);
	}
}

static void check_closure(void)
{
	uint32_t n;

	for (n = 0; n < NODES; n++) {
		const struct dumped *d = &dumped[n], *up;
		uint32_t chain = n / LEN, i = n % LEN;

		if (!d->there || !i)
			continue;
		up = &dumped[node_of(chain, i - 1)];
		T_CHECK(!strcmp(d->parent, hex_of[node_of(chain, i - 1)]),
			"chain %u page %u: another parent", chain, i);
		T_CHECK(up->there, "chain %u page %u: its parent is gone",
			chain, i);
		T_CHECK(d->block != 2 || up->block == 2,
			"chain %u page %u lies below, its parent does not",
			chain, i);
	}
}

/* Who holds a page, as the reference has it; before a failure. */
static void explain(uint32_t n)
{
	uint32_t c, r, i, e;

	for (c = 0; c < CLIENTS; c++) {
		for (r = 0; r < REQS; r++) {
			const struct ref_req *q = &ref[c].req[r];

			for (i = 0; q->open && i < LEN; i++)
				if (node_of(q->chain, i) == n)
					fprintf(stderr, "client %u request %u: matched %u, published %u\n",
						c, r, q->matched[i],
						q->published[i]);
		}
		for (e = 0; e < ref[c].nr_ending; e++)
			for (i = 0; i < LEN; i++)
				if (node_of(ref[c].ending[e].chain, i) == n)
					fprintf(stderr, "client %u, until step %llu: %u\n",
						c, (unsigned long long)
						ref[c].ending[e].step,
						ref[c].ending[e].pins[i]);
		for (e = 0; e < ref[c].nr_posted; e++)
			for (i = 0; i < ref[c].posted[e].n; i++)
				if (node_of(ref[c].posted[e].chain,
					    ref[c].posted[e].first + i) == n)
					fprintf(stderr, "client %u request %u: posted, after %llu\n",
						c, ref[c].posted[e].r,
						(unsigned long long)
						ref[c].posted[e].after);
		fprintf(stderr, "client %u: step %llu\n", c,
			(unsigned long long)ref[c].step);
	}
}

/*
 * A read that failed takes the page's descendants with it, wherever they are. One
 * that is pinned keeps its frame, and nobody finds it any more: its pins are
 * those of no page.
 */
static void forget_pins(uint32_t n)
{
	uint32_t c, r, i, e;

	for (c = 0; c < CLIENTS; c++) {
		for (r = 0; r < REQS; r++) {
			struct ref_req *q = &ref[c].req[r];

			for (i = 0; q->open && i < LEN; i++)
				if (node_of(q->chain, i) == n) {
					q->stale[i] |= q->matched[i];
					q->matched[i] = false;
					q->published[i] = 0;
				}
		}
		for (e = 0; e < ref[c].nr_ending; e++)
			for (i = 0; i < LEN; i++)
				if (node_of(ref[c].ending[e].chain, i) == n)
					ref[c].ending[e].pins[i] = 0;
		for (e = 0; e < ref[c].nr_posted; e++)
			for (i = 0; i < ref[c].posted[e].n; i++)
				ref[c].posted[e].lost[i] |=
					node_of(ref[c].posted[e].chain,
						ref[c].posted[e].first + i) == n;
	}
	lost++;
}

/* Copies that turned out bad, and what went with them. */
static uint64_t losses(struct fx *f)
{
	return ta_counter(&f->d, "dram0", "pgload_fail") +
	       ta_counter(&f->d, "dram0", "pgdrop_orphan") +
	       ta_counter(&f->d, "nvme0", "pgdrop_orphan") +
	       ta_counter(&f->d, "nvme0", "pgcrc_fail");
}

/* A lost page that is pinned keeps its frame: no other has it meanwhile. */
static void settle_doubts(void)
{
	while (nr_doubt) {
		struct ref_req *q = doubt[--nr_doubt].q;
		uint32_t at = doubt[nr_doubt].at, n = node_of(q->chain, at);

		q->published[at] += dumped[n].ready &&
				    dumped[n].frame == doubt[nr_doubt].frame;
	}
}

static void check_pins(struct fx *f)
{
	static uint32_t least[NODES], most[NODES];
	uint32_t n;

	settle_doubts();
	count_pins(least, false);
	count_pins(most, true);
	for (n = 0; n < NODES; n++) {
		if (dumped[n].ready ? dumped[n].pins < least[n] ||
				      dumped[n].pins > most[n] :
				      least[n] != 0)
			explain(n);
		if (least[n] && !dumped[n].ready) {
			T_CHECK(n % LEN && losses(f),
				"chain %u page %u: %u pins, and it is not there",
				n / LEN, n % LEN, least[n]);
			say("chain %u page %u went with an ancestor", n / LEN,
			    n % LEN);
			forget_pins(n);
		}
		T_CHECK(!dumped[n].ready || (dumped[n].pins >= least[n] &&
					     dumped[n].pins <= most[n]),
			"chain %u page %u: %u to %u pins, kvmmd counts %u",
			n / LEN, n % LEN, least[n], most[n], dumped[n].pins);
	}
}

static void check_frames(void)
{
	static bool used[4096];
	uint32_t n;

	memset(used, 0, sizeof(used));
	for (n = 0; n < NODES; n++) {
		if (!dumped[n].frame)
			continue;
		T_CHECK(dumped[n].frame < 4096);
		T_CHECK(!used[dumped[n].frame], "frame %u holds two pages",
			dumped[n].frame);
		used[dumped[n].frame] = true;
	}
}

static uint64_t num(json_t *o, const char *name)
{
	return (uint64_t)json_integer_value(json_object_get(o, name));
}

static void check_accounts(json_t *nodes, const uint64_t count[2])
{
	json_t *node;
	size_t i;

	json_array_foreach(nodes, i, node) {
		bool block = !strcmp(json_string_value(json_object_get(node,
							"name")), "nvme0");

		/* what was lost and is pinned is still there, and not shown */
		T_CHECK(lost ? num(node, "bytes_pages") >=
			       count[block] * PAGE_BYTES :
			       num(node, "bytes_pages") ==
			       count[block] * PAGE_BYTES, "%llu pages of %llu",
			(unsigned long long)count[block],
			(unsigned long long)num(node, "bytes_pages") /
			PAGE_BYTES);
		T_CHECK(num(node, "used") <= num(node, "capacity"));
		if (block)
			continue;
		T_EQ(num(node, "frames_ready"),
		     num(node, "bytes_pages") / PAGE_BYTES);
		T_EQ(num(node, "frames"), num(node, "frames_free") +
		     num(node, "frames_open") + num(node, "frames_loading") +
		     num(node, "frames_ready") +
		     num(node, "frames_quarantine"));
	}
}

static void check_all(struct fx *f)
{
	json_t *dump;
	uint64_t count[2];

	ta_check(&f->d);
	dump = ta_request(&f->d, "{\"cmd\": \"dump\", \"max\": 20000}");
	/* in one piece, of one moment */
	T_CHECK(!json_object_get(dump, "next"), "too many pages");
	read_pages(json_object_get(dump, "pages"), count);
	check_closure();
	check_pins(f);
	check_frames();
	check_accounts(json_object_get(dump, "nodes"), count);
	json_decref(dump);
}

static const struct tc_opts small_pages = { .page_bytes = PAGE_BYTES };

/* -- operations ---------------------------------------------------------------------------- */

static struct rng rng;

static uint32_t roll(uint32_t n)
{
	return (uint32_t)rng_below(&rng, n);
}

static struct board *board(struct fx *f, uint32_t c)
{
	struct board *b = f->p[c].shm;

	b->step = ref[c].step;
	return b;
}

static void collect(struct fx *f, uint32_t c)
{
	struct board *b = board(f, c);
	uint32_t i;

	proc_call(&f->p[c], m_collect, 0, 0);
	for (i = 0; i < b->nr_answers; i++)
		take_answer(&ref[c], &b->answer[i]);
}

static void op_match(struct fx *f, uint32_t c, uint32_t r)
{
	static uint32_t pins[NODES];
	struct ref_req *q = &ref[c].req[r];
	struct board *b = board(f, c);
	uint32_t most = 0, least = 0, i;

	if (q->open)
		return;
	memset(q, 0, sizeof(*q));
	q->chain = b->chain = roll(roll(2) ? CHAINS : CHAINS / 4);
	while (most < LEN && may[node_of(q->chain, most)])
		most++;
	count_pins(pins, false);
	while (least < LEN && pins[node_of(q->chain, least)])
		least++;
	proc_call(&f->p[c], m_match, r, 0);
	say("  chain %u: %u here, %u anywhere", q->chain, b->n_resident,
	    b->n_pages);
	T_EQ(b->wrong, 0);
	T_CHECK(b->n_pages <= most, "chain %u: %u pages found, at most %u may be",
		q->chain, b->n_pages, most);
	T_CHECK(b->n_resident >= least,
		"chain %u: %u pages found, %u are pinned", q->chain,
		b->n_resident, least);
	T_CHECK(b->n_resident <= b->n_pages);
	q->open = true;
	q->id = ++last_id;
	q->n_pages = b->n_pages;
	for (i = 0; i < b->n_resident; i++)
		q->matched[i] = true;
	seen.hits += b->n_resident;
}

static void op_fetch(struct fx *f, uint32_t c, uint32_t r)
{
	static const uint32_t deadlines[] = { 0, 1, 50, 500, 2000 };
	struct ref_req *q = &ref[c].req[r];
	struct board *b = board(f, c);
	uint32_t first = 0, i;

	while (first < q->n_pages && q->matched[first])
		first++;
	if (!q->open || first >= q->n_pages)
		return;
	b->first = first;
	b->n = q->n_pages - first;
	b->deadline_ms = deadlines[roll(5)];
	proc_call(&f->p[c], m_fetch, r, 0);
	T_EQ(b->wrong, 0);
	for (i = 0; i < b->n; i++) {
		/* it keeps the pin that it has, and reads the frame that was */
		if (b->res[i].result || q->stale[first + i])
			continue;
		q->matched[first + i] = true;
		seen.fetched++;
	}
	say("  chain %u pages %u + %u within %u ms: %lld", q->chain, first,
	    b->n, b->deadline_ms, (long long)b->err);
}

static void op_publish(struct fx *f, uint32_t c, uint32_t r)
{
	struct ref_client *rc = &ref[c];
	struct ref_req *q = &rc->req[r];
	struct board *b = board(f, c);
	uint32_t first = 0;

	while (first < LEN && (q->matched[first] || q->published[first]))
		first++;
	if (!q->open || first == LEN || rc->nr_posted >= POSTED / 4)
		return;
	b->chain = q->chain;
	b->first = first;
	b->n = roll(2) ? LEN - first : 1 + roll(LEN - first);
	b->after = roll(2) ? 0 : rc->step + roll(3);
	proc_call(&f->p[c], m_publish, r, 0);
	T_CHECK(!b->err || b->err == -EAGAIN, "%lld", (long long)b->err);
	say("  %llu: chain %u pages %u + %u after %llu: %lld",
	    (unsigned long long)b->tag, q->chain, first, b->n,
	    (unsigned long long)b->after, (long long)b->err);
	if (b->err)
		return;
	rc->posted[rc->nr_posted].tag = b->tag;
	rc->posted[rc->nr_posted].after = b->after;
	rc->posted[rc->nr_posted].id = q->id;
	rc->posted[rc->nr_posted].r = r;
	rc->posted[rc->nr_posted].chain = q->chain;
	rc->posted[rc->nr_posted].first = first;
	memset(rc->posted[rc->nr_posted].lost, 0, LEN);
	rc->posted[rc->nr_posted++].n = b->n;
	reveal(rc);
}

static void op_waste(struct fx *f, uint32_t c, uint32_t r)
{
	struct board *b = board(f, c);

	if (!ref[c].req[r].open)
		return;
	b->n = 1 + roll(8);
	b->first = roll(b->n + 1);
	b->after = roll(2) ? 0 : ref[c].step + 1;
	proc_call(&f->p[c], m_waste, r, 0);
}

static void op_step(struct fx *f, uint32_t c, uint32_t r)
{
	struct ref_client *rc = &ref[c];
	uint32_t e;

	rc->step += 1 + roll(2);
	reveal(rc);
	for (e = 0; e < rc->nr_ending; )
		if (rc->ending[e].step <= rc->step)
			rc->ending[e] = rc->ending[--rc->nr_ending];
		else
			e++;
	proc_call(&f->p[c], m_step, (long)rc->step, 0);
}

static void op_trim(struct fx *f, uint32_t c, uint32_t r)
{
	struct ref_req *q = &ref[c].req[r];
	uint32_t n = roll(LEN), i;

	if (!q->open)
		return;
	proc_call(&f->p[c], m_trim, r, n);
	for (i = n; i < LEN; i++)
		q->matched[i] = q->stale[i] = false;
	if (n < q->n_pages)
		q->n_pages = n;
}

static void op_end(struct fx *f, uint32_t c, uint32_t r)
{
	struct ref_client *rc = &ref[c];
	struct ref_req *q = &rc->req[r];
	uint64_t after = roll(2) ? 0 : rc->step + roll(3);
	uint32_t i, p;

	if (!q->open || rc->nr_ending == ENDING || rc->nr_late == ENDING)
		return;
	/* with a publish in flight: that is done all the same */
	if (in_flight(rc, q->id)) {
		after = 0;
		memset(&rc->late[rc->nr_late], 0, sizeof(rc->late[0]));
		rc->late[rc->nr_late].id = q->id;
		rc->late[rc->nr_late++].chain = q->chain;
	}
	say("  chain %u after %llu", q->chain, (unsigned long long)after);
	proc_call(&f->p[c], m_end, r, (long)after);
	for (p = 0; p < rc->nr_posted; p++)
		if (rc->posted[p].r == r)
			rc->posted[p].r = REQS;
	if (after > rc->step) {
		rc->ending[rc->nr_ending].step = after;
		rc->ending[rc->nr_ending].chain = q->chain;
		for (i = 0; i < LEN; i++)
			rc->ending[rc->nr_ending].pins[i] =
				q->matched[i] + q->published[i];
		rc->nr_ending++;
	}
	memset(q, 0, sizeof(*q));
}

static void op_recheck(struct fx *f, uint32_t c, uint32_t r)
{
	T_EQ(proc_call(&f->p[c], m_recheck, 0, 0), 0);
}

static void op_kill(struct fx *f, uint32_t c, uint32_t r)
{
	proc_kill(&f->p[c]);
	memset(&ref[c], 0, sizeof(ref[c]));
	T_WAIT(LONG_WAIT, ta_clients(&f->d) == CLIENTS - 1);
	T_WAIT(LONG_WAIT, !ta_node(&f->d, "dram0", "frames.quarantine"));
	fx_client(f, c, 0, &small_pages);
	seen.deaths++;
}

static void op_fault(struct fx *f, uint32_t c, uint32_t r)
{
	static const char *const faults[] = {
		"nvme0:read:flip:n=1", "nvme0:read:eio:n=1",
		"nvme0:write:eio:n=1", "nvme0:write:drop:n=1",
		"nvme0:read:short:n=1", "nvme0:write:enospc:n=1",
		"nvme0:read:stall:ms=100:n=4", "nvme0:read:enodata:n=1",
		"nvme0:read:stale:n=1", "nvme0:write:torn:n=1",
		"nvme0:journal:eio:n=1", "nvme0:journal:torn:n=1",
		"nvme0:get:enomem:n=1", "nvme0:journal:eio:p=200:seed=",
		"nvme0:write:reorder:ms=5:seed=", "nvme0:read:reorder:ms=5:seed=",
		"nvme0:journal:reorder:ms=20:seed=", "",
	};
	const char *fault = faults[roll(sizeof(faults) / sizeof(faults[0]))];
	size_t len = strlen(fault);
	char rule[80];

	if (len && fault[len - 1] == '=')
		snprintf(rule, sizeof(rule), "%s%u", fault, roll(1000));
	else
		snprintf(rule, sizeof(rule), "%s", fault);
	ta_fault(&f->d, rule);
	seen.faults++;
}

static void op_mode(struct fx *f, uint32_t c, uint32_t r)
{
	struct ref_req *q = &ref[c].req[r];
	struct board *b = board(f, c);

	if (q->open)
		return;
	ta_mode(&f->d, "bypass");
	b->chain = roll(CHAINS);
	proc_call(&f->p[c], m_match, r, 0);
	T_EQ(b->n_pages, 0);
	b->first = 0;
	b->n = 1;
	b->after = 0;
	proc_call(&f->p[c], m_publish, r, 0);
	T_EQ(b->err, -EAGAIN);
	proc_call(&f->p[c], m_end, r, 0);
	ta_mode(&f->d, "on");
}

static void op_restart(struct fx *f, uint32_t c, uint32_t r)
{
	long epoch = proc_call(&f->p[0], m_epoch, 0, 0);
	uint32_t i;

	td_kill(&f->d);
	T_OK(td_start(&f->d));
	/* pins and what waited are gone; @may stays: see there */
	memset(ref, 0, sizeof(ref));
	lost = 0;
	for (i = 0; i < CLIENTS; i++)
		proc_call(&f->p[i], m_reborn, epoch, 0);
	/* a step word goes along with its process */
	for (i = 0; i < CLIENTS; i++) {
		ref[i].step = 1000 * (seen.restarts + 1);
		proc_call(&f->p[i], m_step, (long)ref[i].step, 0);
	}
	seen.restarts++;
}

static const struct {
	const char *name;
	void	(*fn)(struct fx *f, uint32_t c, uint32_t r);
	uint32_t weight;
} ops[] = {
	{ "match", op_match, 300 },
	{ "fetch", op_fetch, 150 },
	{ "publish", op_publish, 350 },
	{ "waste", op_waste, 20 },
	{ "step", op_step, 150 },
	{ "trim", op_trim, 20 },
	{ "end", op_end, 250 },
	{ "recheck", op_recheck, 40 },
	{ "kill", op_kill, 6 },
	{ "fault", op_fault, 15 },
	{ "mode", op_mode, 4 },
	{ "restart", op_restart, 1 },
};

static unsigned int pick_op(void)
{
	uint32_t sum = 0, at;
	unsigned int i;

	for (i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
		sum += ops[i].weight;
	at = roll(sum);
	for (i = 0; at >= ops[i].weight; i++)
		at -= ops[i].weight;
	return i;
}

/* Has it been about something? */
static bool enough(unsigned int steps)
{
	return seen.hits > steps / 2 && seen.sealed > steps / 4 && seen.fetched;
}

static void random_operations_agree_with_the_reference(void **state)
{
	struct td_opts o = { .dram_bytes = 4 * MIB, .nvme_bytes = 10 * MIB };
	unsigned int steps = test_long() ? 50000 : 1200, s;
	struct fx *f = *state;
	uint32_t c;

	printf("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&rng, test_seed());
	grow_tree(&rng);
	memset(ref, 0, sizeof(ref));
	memset(may, 0, sizeof(may));
	fx_start(f, &o);
	tc_open(&f->c[0], f->d.socket, &small_pages);
	name_nodes(&f->c[0]);
	tc_close(&f->c[0]);
	for (c = 0; c < CLIENTS; c++)
		fx_client(f, c, 0, &small_pages);
	for (s = 0; s < steps || (s < 4 * steps && !enough(steps)); s++) {
		unsigned int op = pick_op();
		uint32_t who = roll(CLIENTS), r = roll(REQS);

		say("%u: client %u request %u: %s", s, who, r, ops[op].name);
		ops[op].fn(f, who, r);
		for (c = 0; c < CLIENTS; c++)
			collect(f, c);
		check_all(f);
	}
	printf("# %llu hits, %llu fetched, %llu sealed, %llu there before, %llu refused, %llu deaths, %llu restarts, %llu faults\n",
	       (unsigned long long)seen.hits, (unsigned long long)seen.fetched,
	       (unsigned long long)seen.sealed,
	       (unsigned long long)seen.exists,
	       (unsigned long long)seen.refused,
	       (unsigned long long)seen.deaths,
	       (unsigned long long)seen.restarts,
	       (unsigned long long)seen.faults);
	T_CHECK(enough(steps), "%u steps were about too little", s);
	for (c = 0; c < CLIENTS; c++)
		proc_end(&f->p[c]);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
	fx_stop(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(random_operations_agree_with_the_reference),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}

