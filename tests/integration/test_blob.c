/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blobs between processes: written by one, read by another, down to NVMe and
 * back; by several writers at once; and with everything that can die on the way
 * dying on the way. What is mapped is right in every byte, or nothing is.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/rand.h"
#include "tests/lib/fixture.h"
#include "tests/lib/leak.h"
#include "tests/lib/pattern.h"
#include "tests/lib/unit.h"

#define LONG_WAIT	20000
#define PAGE		(64u << 10)
#define HEAD		64u
#define CHUNKS(len)	(((len) + HEAD + PAGE - 1) / PAGE)

enum group {
	STATE	= 0,			/* LAST: checkpoints of a sequence */
	THING	= 1,			/* BLOB */
	PAGES	= 2,			/* FULL, of the same class */
};
#define STEP	256			/* tokens from checkpoint to checkpoint */

/* 256 frames, and room for 1,024 pages below; patient, as in test_spill.c. */
static const struct td_opts tiers = {
	.dram_bytes = 16 * MIB, .nvme_bytes = 64 * MIB, .io_timeout = "5s",
	.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
};

/* -- a client ------------------------------------------------------------------- */

static const struct kvmm_seg seg = {
	.bytes = PAGE, .align = 64, .what = KVMM_SEG_STATE,
	.shard = KVMM_MIRROR,
};
static const struct kvmm_class cls = {
	.name = "state", .page_bytes = PAGE, .nsegs = 1, .segs = &seg,
};
/* More of these than one ring entry takes make a blob of some megabytes. */
static const struct kvmm_seg small_seg = {
	.bytes = 4096, .align = 64, .what = KVMM_SEG_STATE,
	.shard = KVMM_MIRROR,
};
static const struct kvmm_class small_cls = {
	.name = "small", .page_bytes = 4096, .nsegs = 1, .segs = &small_seg,
};
static const struct kvmm_group groups[] = {
	[STATE] = { .rule = KVMM_LAST, .block_tokens = STEP },
	[THING] = { .rule = KVMM_BLOB },
	[PAGES] = { .rule = KVMM_FULL, .block_tokens = 16 },
};
static const struct kvmm_desc desc = {
	.size = sizeof(desc), .model = "blobs", .revision = "1",
	.kv_dtype = "u8", .layout = "ctx", .abi_tag = "test-1", .world = 1,
	.nclasses = 1, .ngroups = 3, .classes = &cls, .groups = groups,
};

static void open_class(struct tc *c, const char *path, uint32_t rights,
		       const struct kvmm_class *class)
{
	struct kvmm_win_opts wo = { .size = sizeof(wo), .rights = rights };
	struct kvmm_desc d = desc;
	int node;

	d.classes = class;
	memset(c, 0, sizeof(*c));
	T_OK(kvmm_open(path, NULL, &c->k));
	T_OK(kvmm_space_attach(c->k, &d, &c->sp));
	node = kvmm_node_find(c->k, "dram0");
	T_OK(node);
	c->node = (kvmm_node_t)node;
	T_OK(kvmm_win_open(c->sp, 0, c->node, &wo, &c->win[0]));
	c->nr_classes = 1;
	c->page_bytes[0] = class->page_bytes;
	T_OK(kvmm_win_sync(c->win[0], 0));
}

static void open_client(struct tc *c, const char *path)
{
	open_class(c, path, 0, &cls);
}

/* In a child. */
static struct tc mine;
static const char *where;

static long child_open(void *shm, long a, long b)
{
	open_client(&mine, where);
	return 0;
}

static void child(struct fx *f, unsigned int i)
{
	where = f->d.socket;
	proc_start(&f->p[i]);
	T_OK(proc_call(&f->p[i], child_open, 0, 0));
}

/* -- a blob's name and its bytes -------------------------------------------------- */

static struct kvmm_key name_of(const struct tc *c, enum group g, uint64_t name)
{
	struct kvmm_key key;

	tc_key(c, name, 0, g, &key);
	return key;
}

/* Its bytes follow from its name, its length, and who wrote it. */
static struct kvmm_key bytes_of(uint64_t name, uint64_t len, uint64_t writer)
{
	const uint64_t w[4] = { name, len, writer, 1 };
	struct kvmm_key key;

	memcpy(key.b, w, sizeof(w));
	return key;
}

static void fill(void *p, uint64_t len, const struct kvmm_key *bytes)
{
	uint64_t word = pattern_seed(bytes);

	pattern_fill(p, len, bytes);
	memcpy((char *)p + len / 8 * 8, &word, len % 8);
}

static size_t wrong(const void *p, uint64_t len, const struct kvmm_key *bytes)
{
	uint64_t word = pattern_seed(bytes);

	return pattern_check(p, len, bytes) +
	       !!memcmp((const char *)p + len / 8 * 8, &word, len % 8);
}

/* -- saving ------------------------------------------------------------------------ */

/* Wait for frames as an engine does. */
static int begin(struct tc *c, struct kvmm_req *rq, enum group g,
		 const struct kvmm_key *key, const struct kvmm_key *parent,
		 uint64_t len, struct kvmm_blob **b)
{
	struct t_wait w = t_wait_begin(LONG_WAIT);
	int err;

	while ((err = kvmm_blob_begin(rq, g, c->node, key, parent, len, b)) ==
	       -EAGAIN && t_wait_more(&w)) {
		T_OK(kvmm_win_sync(c->win[0], 0));
		tc_poll(c);
	}
	return err;
}

/* Result of the commit, or why there was none. */
static int save_key(struct tc *c, struct kvmm_req *rq, enum group g,
		    const struct kvmm_key *key, const struct kvmm_key *parent,
		    uint64_t len, const struct kvmm_key *bytes)
{
	uint64_t tag = ++c->tag;
	struct kvmm_blob *b;
	struct kvmm_done d;
	int err;

	err = begin(c, rq, g, key, parent, len, &b);
	if (err)
		return err;
	fill(kvmm_blob_ptr(b), len, bytes);
	err = kvmm_blob_commit(b, len, 1000, 0, tag);
	if (err) {
		kvmm_blob_abort(b);
		return err;
	}
	T_CHECK(tc_wait(c, tag, &d, LONG_WAIT), "no answer to a commit");
	T_EQ(d.op, KVMM_OP_BLOB);
	T_EQ(d.n, 1);
	T_CHECK(d.res[0].result || d.res[0].frame);
	return d.res[0].result;
}

static int save(struct tc *c, enum group g, uint64_t name, uint64_t len,
		uint64_t writer)
{
	struct kvmm_key key = name_of(c, g, name);
	struct kvmm_key bytes = bytes_of(name, len, writer);
	struct kvmm_req *rq = tc_req(c, name);
	int err = save_key(c, rq, g, &key, NULL, len, &bytes);

	tc_end(rq);
	return err;
}

static bool writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

/* -- restoring --------------------------------------------------------------------- */

static unsigned int match(struct tc *c, struct kvmm_req *rq, enum group g,
			  uint64_t name, struct kvmm_match *m)
{
	struct kvmm_key key = name_of(c, g, name);
	struct kvmm_keys keys = { .k = &key, .n = 1, .group = g };
	struct kvmm_hit hit;

	*m = (struct kvmm_match){ .size = sizeof(*m) };
	T_OK(kvmm_match(rq, &keys, 1, c->node, &hit, m));
	if (m->sync_wanted && tc_sync(c, 0))
		T_OK(kvmm_match(rq, &keys, 1, c->node, &hit, m));
	return m->n_pages;
}

enum place {
	NOWHERE,
	BELOW,
	HERE,
};

/* Where is its head? Without using it. */
static enum place peek(struct tc *c, enum group g, uint64_t name)
{
	struct kvmm_key key = name_of(c, g, name);
	struct kvmm_keys keys = { .k = &key, .n = 1, .group = g };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_req *rq = tc_req(c, name);

	T_OK(kvmm_peek(rq, &keys, 1, c->node, &m));
	tc_end(rq);
	return m.n_resident ? HERE : m.n_pages ? BELOW : NOWHERE;
}

static int map(struct tc *c, struct kvmm_req *rq, unsigned int page,
	       unsigned int ms, struct kvmm_blob **b)
{
	int err, tries = 3;

	do {
		err = kvmm_blob_map(rq, page, ms ?
				    deadline_in(ms * NSEC_PER_MSEC) : 0, b);
	} while (err == -EAGAIN && tries-- && tc_sync(c, 0));
	return err;
}

/* 0: it is there and right in every byte; -ENOENT, ... */
static int restore(struct tc *c, enum group g, uint64_t name, uint64_t len,
		   uint64_t writer, unsigned int ms)
{
	struct kvmm_key bytes = bytes_of(name, len, writer);
	struct kvmm_req *rq = tc_req(c, name);
	struct kvmm_blob *b = NULL;
	struct kvmm_match m;
	int err = -ENOENT;

	if (match(c, rq, g, name, &m))
		err = map(c, rq, 0, ms, &b);
	if (!err) {
		T_EQ(kvmm_blob_len(b), len);
		T_EQ(wrong(kvmm_blob_ptr(b), len, &bytes), 0);
		if (name % 2)
			kvmm_blob_put(b);
	}
	tc_end(rq);
	return err;
}

static long child_save(void *shm, long name, long len)
{
	return save(&mine, name % 2 ? STATE : THING, (uint64_t)name,
		    (uint64_t)len, 0);
}

static long child_restore(void *shm, long name, long len)
{
	return restore(&mine, name % 2 ? STATE : THING, (uint64_t)name,
		       (uint64_t)len, 0, 5000);
}

static void all_quiet(struct fx *f)
{
	unsigned int i;

	for (i = 0; i < 4; i++)
		tc_close(&f->c[i]);
	for (i = 0; i < FX_PROCS; i++)
		if (f->p[i].pid)
			proc_end(&f->p[i]);
	ta_baseline(&f->d, LONG_WAIT);
	ta_check(&f->d);
}

/* -- one writes, another reads ---------------------------------------------------- */

static void a_blob_of_any_length_is_restored_by_another_process(void **state)
{
	static const long lens[] = {
		0, 1, PAGE - HEAD - 1, PAGE - HEAD, PAGE - HEAD + 1,
		3 * PAGE, 5 * MIB, 5 * MIB + 3,
	};
	struct fx *f = *state;
	uint64_t pages = 0;
	unsigned int i;
	long g;

	fx_start(f, NULL);
	child(f, 0);
	open_client(&f->c[0], f->d.socket);
	for (i = 0; i < ARRAY_SIZE(lens); i++) {
		for (g = 0; g < 2; g++) {
			long name = 2 * i + g;

			T_EQ(proc_call(&f->p[0], child_save, name, lens[i]), 0);
			T_EQ(restore(&f->c[0], g ? STATE : THING,
				     (uint64_t)name, (uint64_t)lens[i], 0,
				     1000), 0);
			pages += CHUNKS(lens[i]);
		}
		ta_check(&f->d);
	}
	T_EQ(ta_pages(&f->d), pages);
	/* nothing was copied, and nothing had to be asked for */
	T_EQ(ta_counter(&f->d, "dram0", "bytes_copied_shared"), 0);
	T_EQ(ta_counter(&f->d, "dram0", "pgload"), 0);
	/* a reader that may only read maps it, too */
	tc_close(&f->c[0]);
	open_class(&f->c[0], f->d.socket, KVMM_RO, &cls);
	T_EQ(restore(&f->c[0], STATE, 13, 5 * MIB, 0, 0), 0);
	all_quiet(f);
}

/*
 * Two ring entries, one operation; and down and up in as many. All of it has to
 * be below before its first page can leave, and a cache that is filled faster
 * than it can be written forgets: then it is saved once more.
 */
static void a_blob_may_have_more_pages_than_a_batch(void **state)
{
	const uint64_t len = 4200 * 4096 + 17;
	struct t_wait w = t_wait_begin(LONG_WAIT);
	struct td_opts o = tiers;
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	uint64_t filler = 100;
	enum place at;

	o.dram_bytes = 64 * MIB;
	o.nvme_bytes = 256 * MIB;
	fx_start(f, &o);
	open_class(c, f->d.socket, 0, &small_cls);
	T_EQ(save(c, STATE, 1, len, 0), 0);
	T_EQ(ta_pages(&f->d), 4201);
	ta_check(&f->d);
	T_EQ(save(c, STATE, 1, len, 1), -EEXIST);
	while ((at = peek(c, STATE, 1)) != BELOW) {
		T_CHECK(t_wait_more(&w), "it is at %d", at);
		if (at == NOWHERE)
			T_EQ(save(c, STATE, 1, len, 0), 0);
		T_EQ(save(c, THING, filler++, MIB, 0), 0);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	T_EQ(restore(c, STATE, 1, len, 0, 0), -EAGAIN);
	T_EQ(restore(c, STATE, 1, len, 0, 20000), 0);
	all_quiet(f);
}

/* The llama.cpp shape: a few checkpoints, the deepest one decides. */
static void the_deepest_checkpoint_is_found(void **state)
{
	static const unsigned int at[] = { 2, 5, 6, 9 };
	uint32_t tok[12 * STEP];
	struct kvmm_key key[12];
	struct kvmm_hit hit[12];
	struct kvmm_keys keys = { .k = key, .n = 12, .group = STATE };
	struct kvmm_match m = { .size = sizeof(m) };
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_blob *b;
	struct kvmm_req *rq;
	unsigned int i;

	fx_start(f, NULL);
	open_client(c, f->d.socket);
	for (i = 0; i < 12 * STEP; i++)
		tok[i] = i * 7;
	T_EQ(kvmm_key_chain(c->sp, NULL, tok, 12 * STEP, STEP, NULL, 0, key),
	     12);
	for (i = 0; i < 4; i++) {
		struct kvmm_key bytes = bytes_of(at[i], at[i] * PAGE, 0);

		rq = tc_req(c, i);
		T_EQ(save_key(c, rq, STATE, &key[at[i] - 1],
			      i ? &key[at[i - 1] - 1] : NULL, at[i] * PAGE,
			      &bytes), 0);
		tc_end(rq);
		ta_check(&f->d);
	}
	for (i = 12; i > 0; i--) {
		unsigned int deepest = i >= 9 ? 9 : i >= 6 ? 6 : i == 5 ? 5 :
				       i >= 2 ? 2 : 0;
		struct kvmm_key bytes = bytes_of(deepest, deepest * PAGE, 0);

		keys.n = i;
		rq = tc_req(c, i);
		T_OK(kvmm_match(rq, &keys, 1, c->node, hit, &m));
		T_EQ(m.n_pages, deepest);
		T_EQ(m.n_resident, deepest);
		if (deepest) {
			T_OK(map(c, rq, m.n_pages - 1, 1000, &b));
			T_EQ(kvmm_blob_len(b), deepest * PAGE);
			T_EQ(wrong(kvmm_blob_ptr(b), deepest * PAGE, &bytes),
			     0);
		}
		tc_end(rq);
	}
	/* one that is reported takes none of the others with it */
	keys.n = 12;
	rq = tc_req(c, 1);
	T_OK(kvmm_match(rq, &keys, 1, c->node, hit, &m));
	T_EQ(m.n_pages, 9);
	T_OK(kvmm_report(rq, m.n_pages - 1, KVMM_BAD));
	tc_ping(c);
	T_OK(kvmm_match(rq, &keys, 1, c->node, hit, &m));
	T_EQ(m.n_pages, 6);
	T_OK(map(c, rq, m.n_pages - 1, 1000, &b));
	tc_end(rq);
	all_quiet(f);
}

/* -- several writers ----------------------------------------------------------------- */

#define WRITERS	3
#define ROUNDS	20

/* Each writes other bytes, and another length. */
static long race_len(long name, long writer)
{
	return (2 + (name + writer) % WRITERS) * (long)PAGE + 8 * writer;
}

static long child_race(void *shm, long name, long writer)
{
	return save(&mine, STATE, (uint64_t)name,
		    (uint64_t)race_len(name, writer), (uint64_t)writer);
}

static void one_of_several_writers_wins_and_it_is_his_alone(void **state)
{
	struct fx *f = *state;
	uint64_t pages = 0;
	long name, w, won, err;

	fx_start(f, NULL);
	for (w = 0; w < WRITERS; w++)
		child(f, (unsigned int)w);
	open_client(&f->c[0], f->d.socket);
	for (name = 0; name < ROUNDS; name++) {
		for (w = 0; w < WRITERS; w++)
			proc_send(&f->p[w], child_race, name, w);
		for (w = 0, won = -1; w < WRITERS; w++) {
			err = proc_recv(&f->p[w]);
			if (!err) {
				T_EQ(won, -1);
				won = w;
			} else {
				T_EQ(err, -EEXIST);
			}
		}
		T_CHECK(won >= 0);
		T_EQ(restore(&f->c[0], STATE, (uint64_t)name,
			     (uint64_t)race_len(name, won), (uint64_t)won,
			     1000), 0);
		pages += CHUNKS((uint64_t)race_len(name, won));
	}
	/* of what the others wrote nothing is left */
	T_WAIT(LONG_WAIT, ta_pages(&f->d) == pages);
	ta_check(&f->d);
	all_quiet(f);
}

/* -- down and up ----------------------------------------------------------------------- */

#define MANY	24			/* of a megabyte: more than DRAM has */

static void saved_slowly(struct fx *f, struct tc *c, unsigned int first,
			 unsigned int n, uint64_t len)
{
	unsigned int i;

	for (i = first; i < first + n; i++) {
		T_EQ(save(c, STATE, i, len, 0), 0);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
}

static void blobs_go_down_and_come_up_whole(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, round;

	fx_start(f, &tiers);
	open_client(c, f->d.socket);
	child(f, 0);
	saved_slowly(f, c, 0, MANY, MIB);
	ta_check(&f->d);
	for (round = 0; round < 2; round++) {
		for (i = 0; i < MANY; i++) {
			T_EQ(restore(c, STATE, i, MIB, 0, 10000), 0);
			if (i % 2)
				T_EQ(proc_call(&f->p[0], child_restore, i,
					       MIB), 0);
			T_WAIT(LONG_WAIT, writes_rest(&f->d));
		}
		ta_check(&f->d);
	}
	T_CHECK(ta_counter(&f->d, "dram0", "pgload") > MANY * 8);
	T_EQ(ta_counter(&f->d, "dram0", "pgcrc_fail"), 0);
	all_quiet(f);
}

/* Any number of pages of any blob are missing: it is there or it is not. */
static void without_time_a_blob_is_whole_or_not_mapped(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, had = 0;

	fx_start(f, &tiers);
	open_client(c, f->d.socket);
	saved_slowly(f, c, 0, MANY, MIB);
	for (i = 0; i < MANY; i++) {
		int err = restore(c, STATE, i, MIB, 0, 0);

		T_CHECK(!err || err == -EAGAIN, "%s", t_strerror(err));
		had += !err;
	}
	T_CHECK(had && had < MANY, "%u of %u", had, MANY);
	all_quiet(f);
}

static void a_part_that_is_bad_below_is_the_end_of_all_of_it(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, bad = MANY, gone = 0;
	struct kvmm_match m;
	struct kvmm_req *rq;

	fx_start(f, &tiers);
	open_client(c, f->d.socket);
	saved_slowly(f, c, 0, MANY, MIB);
	/* the third read from now on: in the middle of a blob, most likely */
	ta_fault(&f->d, "nvme0:read:flip:n=1:skip=3");
	for (i = 0; i < MANY; i++) {
		int err = restore(c, STATE, i, MIB, 0, 10000);

		T_CHECK(!err || err == -ENOENT, "%s", t_strerror(err));
		if (err) {
			bad = i;
			gone++;
			break;
		}
	}
	ta_fault(&f->d, "");
	T_EQ(gone, 1);
	ta_check(&f->d);
	rq = tc_req(c, 1);
	T_EQ(match(c, rq, STATE, bad, &m), 0);
	tc_end(rq);
	/* it may be computed and saved again, and the others are there */
	T_EQ(save(c, STATE, bad, MIB, 0), 0);
	for (i = 0; i < MANY; i++) {
		T_EQ(restore(c, STATE, i, MIB, 0, 10000), 0);
		T_WAIT(LONG_WAIT, writes_rest(&f->d));
	}
	all_quiet(f);
}

static void a_slow_disk_is_late_in_time(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	unsigned int i, late = 0;

	fx_start(f, &tiers);
	open_client(c, f->d.socket);
	saved_slowly(f, c, 0, MANY, MIB);
	ta_fault(&f->d, "nvme0:read:stall:ms=400");
	for (i = 0; i < 4 && !late; i++) {
		uint64_t t0 = now_ns();
		int err = restore(c, STATE, i, MIB, 0, 100);

		T_CHECK(!err || err == -ETIMEDOUT, "%s", t_strerror(err));
		T_CHECK(now_ns() - t0 < 1000 * NSEC_PER_MSEC);
		late += err != 0;
	}
	T_CHECK(late);
	ta_fault(&f->d, "");
	/* what was late has arrived, or is read again */
	T_EQ(restore(c, STATE, i - 1, MIB, 0, 10000), 0);
	all_quiet(f);
}

/* -- what is no blob ---------------------------------------------------------------------- */

static void a_plain_page_is_never_taken_for_a_blob(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_pub pub = { .group = STATE };
	struct kvmm_blob *b;
	struct kvmm_match m;
	struct kvmm_done d;
	struct kvmm_req *rq;

	fx_start(f, NULL);
	open_client(c, f->d.socket);
	rq = tc_req(c, 1);
	tc_alloc(c, rq, 0, 1, &pub.frame);
	pub.key = name_of(c, STATE, 1);
	tc_fill(c, 0, pub.frame, &pub.key);
	T_OK(kvmm_publish(rq, c->node, &pub, 1, 9));
	T_CHECK(tc_wait(c, 9, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	T_EQ(match(c, rq, STATE, 1, &m), 1);
	T_EQ(map(c, rq, 0, 1000, &b), -EBADMSG);
	/* and a page of a FULL group is none by its rule */
	T_EQ(match(c, rq, PAGES, 1, &m), 0);
	T_EQ(map(c, rq, 0, 1000, &b), -EINVAL);
	tc_end(rq);
	T_EQ(save(c, STATE, 1, PAGE, 0), -EEXIST);
	all_quiet(f);
}

static void a_reported_blob_is_gone_whole_and_its_reader_keeps_it(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0], *o = &f->c[1];
	struct kvmm_key bytes = bytes_of(7, MIB, 0);
	struct kvmm_req *rq, *other;
	struct kvmm_blob *b;
	struct kvmm_match m;

	fx_start(f, NULL);
	open_client(c, f->d.socket);
	open_client(o, f->d.socket);
	T_EQ(save(c, STATE, 7, MIB, 0), 0);
	rq = tc_req(c, 1);
	T_EQ(match(c, rq, STATE, 7, &m), 1);
	T_OK(map(c, rq, 0, 1000, &b));
	other = tc_req(o, 2);
	T_EQ(match(o, other, STATE, 7, &m), 1);
	T_OK(kvmm_report(other, 0, KVMM_BAD));
	tc_ping(o);
	T_EQ(restore(o, STATE, 7, MIB, 0, 1000), -ENOENT);
	tc_end(other);
	ta_check(&f->d);
	T_EQ(wrong(kvmm_blob_ptr(b), MIB, &bytes), 0);
	/* somebody else may save it anew meanwhile */
	T_EQ(save(o, STATE, 7, 2 * MIB, 3), 0);
	T_EQ(wrong(kvmm_blob_ptr(b), MIB, &bytes), 0);
	tc_end(rq);
	T_EQ(restore(c, STATE, 7, 2 * MIB, 3, 1000), 0);
	T_WAIT(LONG_WAIT, ta_pages(&f->d) == CHUNKS(2 * MIB));
	all_quiet(f);
}

static void modes_are_kept(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_key key, bytes = bytes_of(3, MIB, 0);
	struct kvmm_blob *b;
	struct kvmm_done d;
	struct kvmm_req *rq;

	fx_start(f, NULL);
	open_client(c, f->d.socket);
	T_EQ(save(c, STATE, 1, MIB, 0), 0);
	ta_mode(&f->d, "bypass");
	T_EQ(restore(c, STATE, 1, MIB, 0, 1000), -ENOENT);
	T_EQ(save(c, STATE, 2, MIB, 0), -EAGAIN);
	ta_mode(&f->d, "readonly");
	T_EQ(restore(c, STATE, 1, MIB, 0, 1000), 0);
	T_EQ(save(c, STATE, 2, MIB, 0), -EROFS);
	ta_mode(&f->d, "observe");
	T_EQ(restore(c, STATE, 1, MIB, 0, 1000), -ENOENT);
	key = name_of(c, STATE, 3);
	rq = tc_req(c, 3);
	T_OK(begin(c, rq, STATE, &key, NULL, MIB, &b));
	fill(kvmm_blob_ptr(b), MIB, &bytes);
	T_OK(kvmm_blob_commit(b, MIB, 0, 0, 99));
	T_CHECK(tc_wait(c, 99, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	T_EQ(d.res[0].frame, 0);
	tc_end(rq);
	ta_mode(&f->d, "on");
	T_EQ(restore(c, STATE, 1, MIB, 0, 1000), 0);
	T_EQ(restore(c, STATE, 3, MIB, 0, 1000), -ENOENT);
	T_EQ(ta_pages(&f->d), CHUNKS(MIB));
	all_quiet(f);
}

/* -- who dies ----------------------------------------------------------------------------- */

static long child_begin(void *shm, long name, long len)
{
	struct kvmm_key key = name_of(&mine, STATE, (uint64_t)name);
	struct kvmm_req *rq = tc_req(&mine, 1);
	struct kvmm_blob *b;

	T_OK(begin(&mine, rq, STATE, &key, NULL, (uint64_t)len, &b));
	memset(kvmm_blob_ptr(b), 0x55, (size_t)len);
	return 0;
}

/* Committed, but for a step that is never done. */
static long child_half_commit(void *shm, long name, long len)
{
	struct kvmm_key key = name_of(&mine, STATE, (uint64_t)name);
	struct kvmm_req *rq = tc_req(&mine, 1);
	struct kvmm_blob *b;

	T_OK(begin(&mine, rq, STATE, &key, NULL, (uint64_t)len, &b));
	T_OK(kvmm_blob_commit(b, (uint64_t)len, 0, 5, 1));
	tc_ping(&mine);
	return 0;
}

static void nothing_is_left_of(struct fx *f, proc_fn fn)
{
	child(f, 0);
	T_EQ(proc_call(&f->p[0], fn, 1, MIB), 0);
	proc_signal(&f->p[0], SIGKILL);
	proc_reap(&f->p[0]);
	T_EQ(restore(&f->c[0], STATE, 1, MIB, 0, 100), -ENOENT);
	T_WAIT(LONG_WAIT, !ta_pages(&f->d));
	ta_check(&f->d);
}

static void a_writer_that_dies_leaves_nothing(void **state)
{
	struct fx *f = *state;

	fx_start(f, NULL);
	open_client(&f->c[0], f->d.socket);
	nothing_is_left_of(f, child_begin);
	nothing_is_left_of(f, child_half_commit);
	T_EQ(save(&f->c[0], STATE, 1, MIB, 0), 0);
	T_EQ(restore(&f->c[0], STATE, 1, MIB, 0, 100), 0);
	all_quiet(f);
}

static void a_second_writer_takes_over_when_the_first_dies(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_key key, bytes = bytes_of(1, 2 * PAGE, 4);
	struct kvmm_blob *b;
	struct kvmm_done d;
	struct kvmm_req *rq;

	fx_start(f, NULL);
	open_client(c, f->d.socket);
	child(f, 0);
	T_EQ(proc_call(&f->p[0], child_half_commit, 1, MIB), 0);
	key = name_of(c, STATE, 1);
	rq = tc_req(c, 1);
	T_OK(begin(c, rq, STATE, &key, NULL, 2 * PAGE, &b));
	fill(kvmm_blob_ptr(b), 2 * PAGE, &bytes);
	T_OK(kvmm_blob_commit(b, 2 * PAGE, 0, 0, 8));
	tc_ping(c);
	T_EQ(c->nr_stray, 0);		/* it waits for the first's step */
	proc_signal(&f->p[0], SIGKILL);
	proc_reap(&f->p[0]);
	T_CHECK(tc_wait(c, 8, &d, LONG_WAIT));
	T_EQ(d.res[0].result, 0);
	tc_end(rq);
	T_EQ(restore(c, STATE, 1, 2 * PAGE, 4, 100), 0);
	all_quiet(f);
}

static long child_map(void *shm, long name, long len)
{
	struct kvmm_req *rq = tc_req(&mine, 1);
	struct kvmm_blob *b;
	struct kvmm_match m;

	if (match(&mine, rq, STATE, (uint64_t)name, &m) != 1)
		return -ENOENT;
	return map(&mine, rq, 0, 1000, &b);
}

static void a_reader_that_dies_lets_go(void **state)
{
	struct fx *f = *state;

	fx_start(f, NULL);
	open_client(&f->c[0], f->d.socket);
	T_EQ(save(&f->c[0], STATE, 1, MIB, 0), 0);
	child(f, 0);
	T_EQ(proc_call(&f->p[0], child_map, 1, MIB), 0);
	T_EQ(ta_pins(&f->d, 0), CHUNKS(MIB) + 1);
	proc_signal(&f->p[0], SIGKILL);
	proc_reap(&f->p[0]);
	T_WAIT(LONG_WAIT, !ta_pins(&f->d, 0));
	T_EQ(restore(&f->c[0], STATE, 1, MIB, 0, 100), 0);
	all_quiet(f);
}

static void what_is_mapped_outlives_the_daemon(void **state)
{
	struct fx *f = *state;
	struct tc *c = &f->c[0];
	struct kvmm_key bytes = bytes_of(1, MIB, 0);
	struct kvmm_blob *b;
	struct kvmm_match m;
	struct kvmm_req *rq;

	fx_start(f, NULL);
	open_client(c, f->d.socket);
	T_EQ(save(c, STATE, 1, MIB, 0), 0);
	rq = tc_req(c, 1);
	T_EQ(match(c, rq, STATE, 1, &m), 1);
	T_OK(map(c, rq, 0, 1000, &b));
	td_kill(&f->d);
	T_EQ(wrong(kvmm_blob_ptr(b), MIB, &bytes), 0);
	T_OK(td_start(&f->d));
	T_WAIT(LONG_WAIT, (tc_poll(c), kvmm_win_sync(c->win[0], 0) == -EBUSY));
	T_EQ(wrong(kvmm_blob_ptr(b), MIB, &bytes), 0);
	tc_end(rq);
	T_WAIT(LONG_WAIT, (tc_poll(c), kvmm_win_sync(c->win[0], 0) >= 0));
	T_EQ(restore(c, STATE, 1, MIB, 0, 100), -ENOENT);
	T_EQ(save(c, STATE, 1, MIB, 0), 0);
	T_EQ(restore(c, STATE, 1, MIB, 0, 100), 0);
	all_quiet(f);
}

/* A blob that has to be read, on a disk that takes ten seconds. */
static long child_map_slow(void *shm, long name, long ms)
{
	struct kvmm_req *rq = tc_req(&mine, 1);
	struct kvmm_blob *b;
	struct kvmm_match m;
	int err = -ENOENT;

	if (match(&mine, rq, STATE, (uint64_t)name, &m))
		err = kvmm_blob_map(rq, 0, deadline_in((uint64_t)ms *
						       NSEC_PER_MSEC), &b);
	tc_end(rq);
	return err;
}

/* The name of a blob of which something lies below only. */
static unsigned int one_below(struct tc *c, unsigned int n)
{
	unsigned int i;

	for (i = 0; i < n; i++)
		if (restore(c, STATE, i, MIB, 0, 0) == -EAGAIN)
			return i;
	T_CHECK(0, "nothing is below");
	return 0;
}

static void who_waits_is_told_that_the_daemon_is_gone(void **state)
{
	struct fx *f = *state;
	unsigned int name;
	uint64_t t0;

	fx_start(f, &tiers);
	open_client(&f->c[0], f->d.socket);
	saved_slowly(f, &f->c[0], 0, MANY, MIB);
	name = one_below(&f->c[0], MANY);
	ta_fault(&f->d, "nvme0:read:stall:ms=4000");
	child(f, 0);
	/* a daemon that is stopped: late, and in time */
	T_OK(td_pause(&f->d));
	t0 = now_ns();
	T_EQ(proc_call(&f->p[0], child_map_slow, name, 200), -ETIMEDOUT);
	T_CHECK(now_ns() - t0 < 2 * NSEC_PER_SEC);
	T_OK(td_resume(&f->d));
	/* and one that dies */
	proc_send(&f->p[0], child_map_slow, name, 20000);
	usleep(200000);
	T_CHECK(!proc_answered(&f->p[0]));
	td_kill(&f->d);
	t0 = now_ns();
	T_EQ(proc_recv(&f->p[0]), -ENOTCONN);
	T_CHECK(now_ns() - t0 < 2 * NSEC_PER_SEC);
}

/* -- all of it -------------------------------------------------------------------------------- */

#define NAMES	12
#define LEN(n)	((uint64_t)((n) % 5 * 100000 + (n)))

/* Saves, restores, aborts, reports, for a while; returns what was restored. */
static long child_work(void *shm, long seed, long ms)
{
	uint64_t deadline = deadline_in((uint64_t)ms * NSEC_PER_MSEC);
	struct rng r;
	long had = 0;

	rng_seed(&r, (uint64_t)seed);
	while (!deadline_past(deadline)) {
		uint64_t name = rng_below(&r, NAMES), len = LEN(name);
		struct kvmm_key key = name_of(&mine, STATE, name);
		struct kvmm_key bytes = bytes_of(name, len, 0);
		struct kvmm_req *rq = tc_req(&mine, name);
		struct kvmm_blob *b;
		struct kvmm_match m;
		int err;

		if (match(&mine, rq, STATE, name, &m)) {
			err = map(&mine, rq, 0, 1000, &b);
			if (!err && wrong(kvmm_blob_ptr(b), len, &bytes))
				return -EILSEQ;
			had += !err;
			if (!rng_below(&r, 20))
				T_OK(kvmm_report(rq, 0, KVMM_BAD));
		} else {
			err = save_key(&mine, rq, STATE, &key, NULL, len,
				       &bytes);
			T_CHECK(!err || err == -EEXIST || err == -EAGAIN,
				"%s", t_strerror(err));
		}
		if (!rng_below(&r, 10) &&
		    !kvmm_blob_begin(rq, THING, mine.node, &key, NULL,
				     3 * PAGE, &b) && rng_below(&r, 2))
			kvmm_blob_abort(b);
		tc_end(rq);
	}
	return had;
}

static void many_at_work_and_some_dying_leave_the_laws_standing(void **state)
{
	unsigned int rounds = test_long() ? 40 : 6, i, w;
	struct fx *f = *state;
	long had = 0;

	fx_start(f, &tiers);
	open_client(&f->c[0], f->d.socket);
	for (i = 0; i < rounds; i++) {
		for (w = 0; w < 3; w++) {
			child(f, w);
			proc_send(&f->p[w], child_work,
				  (long)test_seed() + i * 3 + w, 400);
		}
		usleep(100000 + i * 20000);
		ta_check(&f->d);
		proc_signal(&f->p[0], SIGKILL);
		proc_reap(&f->p[0]);
		for (w = 1; w < 3; w++) {
			long n = proc_recv(&f->p[w]);

			T_OK(n);
			had += n;
			proc_end(&f->p[w]);
		}
		ta_check(&f->d);
	}
	T_CHECK(had > 10 * (long)rounds, "%ld", had);
	all_quiet(f);
}

static void lives_with_blobs_leave_nothing(void **state)
{
	unsigned int rounds = test_long() ? 300 : 30, i;
	struct leak mine_then, daemons;
	struct fx *f = *state;

	fx_start(f, NULL);
	open_client(&f->c[0], f->d.socket);
	for (i = 0; i < rounds + 3; i++) {
		struct tc *c = &f->c[1];
		struct kvmm_blob *b;
		struct kvmm_key key;
		struct kvmm_match m;
		struct kvmm_req *rq;

		if (i == 3) {
			leak_calm(f->d.pid, &daemons);
			T_OK(leak_look(0, &mine_then));
		}
		open_client(c, f->d.socket);
		T_EQ(save(c, STATE, i % 4, 5 * PAGE, 0), i < 4 ? 0 : -EEXIST);
		T_EQ(restore(c, STATE, i % 4, 5 * PAGE, 0, 1000), 0);
		rq = tc_req(c, 1);
		T_EQ(match(c, rq, STATE, i % 4, &m), 1);
		T_OK(map(c, rq, 0, 0, &b));
		key = name_of(c, THING, i);
		T_OK(begin(c, rq, THING, &key, NULL, 7 * PAGE, &b));
		/* left open: kvmm_close() ends it */
		tc_close(c);
	}
	leak_settle(0, &mine_then, 1000);
	leak_settle(f->d.pid, &daemons, LONG_WAIT);
	all_quiet(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(a_blob_of_any_length_is_restored_by_another_process),
		FX_TEST(a_blob_may_have_more_pages_than_a_batch),
		FX_TEST(the_deepest_checkpoint_is_found),
		FX_TEST(one_of_several_writers_wins_and_it_is_his_alone),
		FX_TEST(blobs_go_down_and_come_up_whole),
		FX_TEST(without_time_a_blob_is_whole_or_not_mapped),
		FX_TEST(a_part_that_is_bad_below_is_the_end_of_all_of_it),
		FX_TEST(a_slow_disk_is_late_in_time),
		FX_TEST(a_plain_page_is_never_taken_for_a_blob),
		FX_TEST(a_reported_blob_is_gone_whole_and_its_reader_keeps_it),
		FX_TEST(modes_are_kept),
		FX_TEST(a_writer_that_dies_leaves_nothing),
		FX_TEST(a_second_writer_takes_over_when_the_first_dies),
		FX_TEST(a_reader_that_dies_lets_go),
		FX_TEST(what_is_mapped_outlives_the_daemon),
		FX_TEST(who_waits_is_told_that_the_daemon_is_gone),
		FX_TEST(many_at_work_and_some_dying_leave_the_laws_standing),
		FX_TEST(lives_with_blobs_leave_nothing),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
