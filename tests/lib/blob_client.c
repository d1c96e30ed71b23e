/* SPDX-License-Identifier: Apache-2.0 */
/* Clients that save and restore blobs; see blob_client.h. */
#include <errno.h>
#include <string.h>

#include "ipc/base/clock.h"
#include "tests/lib/blob_client.h"
#include "tests/lib/pattern.h"
#include "tests/lib/unit.h"

const struct td_opts tb_tiers = {
	.dram_bytes = 16 * MIB, .nvme_bytes = 64 * MIB, .io_timeout = "5s",
	.config = "{\"timeouts\": {\"direct_reclaim\": \"1s\"}}",
};

/* -- a client ------------------------------------------------------------------- */

static const struct kvmm_seg seg = {
	.bytes = PAGE, .align = 64, .what = KVMM_SEG_STATE,
	.shard = KVMM_MIRROR,
};
const struct kvmm_class tb_cls = {
	.name = "state", .page_bytes = PAGE, .nsegs = 1, .segs = &seg,
};
static const struct kvmm_seg small_seg = {
	.bytes = 4096, .align = 64, .what = KVMM_SEG_STATE,
	.shard = KVMM_MIRROR,
};
const struct kvmm_class tb_small_cls = {
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
	.nclasses = 1, .ngroups = 3, .classes = &tb_cls, .groups = groups,
};

void tb_open_class(struct tc *c, const char *path, uint32_t rights,
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

void tb_open(struct tc *c, const char *path)
{
	tb_open_class(c, path, 0, &tb_cls);
}

struct tc tb_mine;
static const char *where;

static long child_open(void *shm, long a, long b)
{
	tb_open(&tb_mine, where);
	return 0;
}

void tb_child(struct fx *f, unsigned int i)
{
	where = f->d.socket;
	proc_start(&f->p[i]);
	T_OK(proc_call(&f->p[i], child_open, 0, 0));
}

/* -- a blob's name and its bytes -------------------------------------------------- */

struct kvmm_key tb_name(const struct tc *c, enum tb_group g, uint64_t name)
{
	struct kvmm_key key;

	tc_key(c, name, 0, g, &key);
	return key;
}

struct kvmm_key tb_bytes(uint64_t name, uint64_t len, uint64_t writer)
{
	const uint64_t w[4] = { name, len, writer, 1 };
	struct kvmm_key key;

	memcpy(key.b, w, sizeof(w));
	return key;
}

void tb_fill(void *p, uint64_t len, const struct kvmm_key *bytes)
{
	uint64_t word = pattern_seed(bytes);

	pattern_fill(p, len, bytes);
	memcpy((char *)p + len / 8 * 8, &word, len % 8);
}

size_t tb_wrong(const void *p, uint64_t len, const struct kvmm_key *bytes)
{
	uint64_t word = pattern_seed(bytes);

	return pattern_check(p, len, bytes) +
	       !!memcmp((const char *)p + len / 8 * 8, &word, len % 8);
}

/* -- saving ------------------------------------------------------------------------ */

int tb_begin(struct tc *c, struct kvmm_req *rq, enum tb_group g,
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

int tb_save_key(struct tc *c, struct kvmm_req *rq, enum tb_group g,
		const struct kvmm_key *key, const struct kvmm_key *parent,
		uint64_t len, const struct kvmm_key *bytes)
{
	uint64_t tag = ++c->tag;
	struct kvmm_blob *b;
	struct kvmm_done d;
	int err;

	err = tb_begin(c, rq, g, key, parent, len, &b);
	if (err)
		return err;
	tb_fill(kvmm_blob_ptr(b), len, bytes);
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

int tb_save(struct tc *c, enum tb_group g, uint64_t name, uint64_t len,
	    uint64_t writer)
{
	struct kvmm_key key = tb_name(c, g, name);
	struct kvmm_key bytes = tb_bytes(name, len, writer);
	struct kvmm_req *rq = tc_req(c, name);
	int err = tb_save_key(c, rq, g, &key, NULL, len, &bytes);

	tc_end(rq);
	return err;
}

bool tb_writes_rest(struct test_daemon *d)
{
	return !ta_node(d, "nvme0", "write.inflight") &&
	       !ta_node(d, "nvme0", "write.queued");
}

void tb_saved_slowly(struct fx *f, struct tc *c, unsigned int first,
		     unsigned int n, uint64_t len)
{
	unsigned int i;

	for (i = first; i < first + n; i++) {
		T_EQ(tb_save(c, STATE, i, len, 0), 0);
		T_WAIT(LONG_WAIT, tb_writes_rest(&f->d));
	}
}

/* -- restoring --------------------------------------------------------------------- */

unsigned int tb_match(struct tc *c, struct kvmm_req *rq, enum tb_group g,
		      uint64_t name, struct kvmm_match *m)
{
	struct kvmm_key key = tb_name(c, g, name);
	struct kvmm_keys keys = { .k = &key, .n = 1, .group = g };
	struct kvmm_hit hit;

	*m = (struct kvmm_match){ .size = sizeof(*m) };
	T_OK(kvmm_match(rq, &keys, 1, c->node, &hit, m));
	if (m->sync_wanted && tc_sync(c, 0))
		T_OK(kvmm_match(rq, &keys, 1, c->node, &hit, m));
	return m->n_pages;
}

enum tb_place tb_peek(struct tc *c, enum tb_group g, uint64_t name)
{
	struct kvmm_key key = tb_name(c, g, name);
	struct kvmm_keys keys = { .k = &key, .n = 1, .group = g };
	struct kvmm_match m = { .size = sizeof(m) };
	struct kvmm_req *rq = tc_req(c, name);

	T_OK(kvmm_peek(rq, &keys, 1, c->node, &m));
	tc_end(rq);
	return m.n_resident ? HERE : m.n_pages ? BELOW : NOWHERE;
}

int tb_map(struct tc *c, struct kvmm_req *rq, unsigned int page,
	   unsigned int ms, struct kvmm_blob **b)
{
	int err, tries = 3;

	do {
		err = kvmm_blob_map(rq, page, ms ?
				    deadline_in(ms * NSEC_PER_MSEC) : 0, b);
	} while (err == -EAGAIN && tries-- && tc_sync(c, 0));
	return err;
}

int tb_restore(struct tc *c, enum tb_group g, uint64_t name, uint64_t len,
	       uint64_t writer, unsigned int ms)
{
	struct kvmm_key bytes = tb_bytes(name, len, writer);
	struct kvmm_req *rq = tc_req(c, name);
	struct kvmm_blob *b = NULL;
	struct kvmm_match m;
	int err = -ENOENT;

	if (tb_match(c, rq, g, name, &m))
		err = tb_map(c, rq, 0, ms, &b);
	if (!err) {
		T_EQ(kvmm_blob_len(b), len);
		T_EQ(tb_wrong(kvmm_blob_ptr(b), len, &bytes), 0);
		if (name % 2)
			kvmm_blob_put(b);
	}
	tc_end(rq);
	return err;
}

long tb_child_save(void *shm, long name, long len)
{
	return tb_save(&tb_mine, name % 2 ? STATE : THING, (uint64_t)name,
		       (uint64_t)len, 0);
}

long tb_child_restore(void *shm, long name, long len)
{
	return tb_restore(&tb_mine, name % 2 ? STATE : THING, (uint64_t)name,
			  (uint64_t)len, 0, 5000);
}

void tb_all_quiet(struct fx *f)
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
