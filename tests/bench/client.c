/* SPDX-License-Identifier: Apache-2.0 */
/* A daemon and a client for benches; see bench.h. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <jansson.h>

#include "ipc/shm.h"
#include "tests/bench/bench.h"

#define PUBLISH_MS	10000

void bench_daemon(struct bench *b, struct test_daemon *d,
		  const struct td_opts *o)
{
	struct td_opts opts = *o;
	int err;

	if (!opts.binary && !getenv("KVMMD"))
		opts.binary = "build/kvmmd";
	err = td_init(d, &opts);
	if (err)
		bench_die(b, "configuration of kvmmd", err);
	b->kvmmd = d;
	err = td_start(d);
	if (err)
		bench_die(b, "start of kvmmd", err);
}

static void die(struct bench_client *c, const char *what, int err)
	__attribute__((noreturn));

static void die(struct bench_client *c, const char *what, int err)
{
	if (c->k && *kvmm_error(c->k))
		bench_say("%s", kvmm_error(c->k));
	bench_die(c->b, what, err);
}

void bc_open(struct bench_client *c, struct bench *b, const char *socket,
	     uint32_t page_bytes)
{
	bc_open_on(c, b, socket, page_bytes, "dram0");
}

void bc_open_on(struct bench_client *c, struct bench *b, const char *socket,
		uint32_t page_bytes, const char *node)
{
	struct kvmm_seg seg = {
		.bytes = page_bytes, .align = 64, .what = KVMM_SEG_KV,
		.shard = KVMM_MIRROR,
	};
	struct kvmm_class cls = {
		.name = "kv", .page_bytes = page_bytes, .nsegs = 1,
		.segs = &seg,
	};
	struct kvmm_group group = { .rule = KVMM_FULL, .block_tokens = 16 };
	struct kvmm_desc desc = {
		.size = sizeof(desc), .model = "bench", .revision = "1",
		.kv_dtype = "u8", .scale_format = "", .layout = "kv",
		.abi_tag = "bench-1", .salt = "", .world = 1, .nclasses = 1,
		.ngroups = 1, .classes = &cls, .groups = &group,
	};
	struct kvmm_open_opts oo = { .size = sizeof(oo), .name = "bench" };
	struct kvmm_win_opts wo = { .size = sizeof(wo) };
	int err;

	memset(c, 0, sizeof(*c));
	c->b = b;
	c->page_bytes = page_bytes;
	err = kvmm_open(socket, &oo, &c->k);
	if (err)
		die(c, "kvmm_open", err);
	err = kvmm_space_attach(c->k, &desc, &c->sp);
	if (err)
		die(c, "kvmm_space_attach", err);
	err = kvmm_node_find(c->k, node);
	if (err < 0)
		die(c, "kvmm_node_find", err);
	c->node = (kvmm_node_t)err;
	err = kvmm_win_open(c->sp, 0, c->node, &wo, &c->win);
	if (err)
		die(c, "kvmm_win_open", err);
	err = kvmm_win_sync(c->win, 0);
	if (err < 0)
		die(c, "kvmm_win_sync", err);
}

void bc_close(struct bench_client *c)
{
	kvmm_win_close(c->win);
	kvmm_space_detach(c->sp);
	kvmm_close(c->k);
	memset(c, 0, sizeof(*c));
}

struct kvmm_req *bc_req(struct bench_client *c, uint64_t id)
{
	struct kvmm_req *rq;
	int err = kvmm_req_open(c->sp, id, NULL, &rq);

	if (err)
		die(c, "kvmm_req_open", err);
	return rq;
}

void bc_key(struct bench_client *c, uint64_t i, struct kvmm_key *key)
{
	kvmm_key_wrap(c->sp, &i, sizeof(i), key);
}

/* Sleep until there is something to do, a millisecond at most. */
static void bc_wait(struct bench_client *c)
{
	struct pollfd pfd = { .fd = kvmm_fd(c->k), .events = POLLIN };

	poll(&pfd, 1, 1);
}

int bc_alloc(struct bench_client *c, struct kvmm_req *rq, unsigned int n,
	     kvmm_frame_t *f, unsigned int timeout_ms)
{
	uint64_t deadline = deadline_in(timeout_ms * NSEC_PER_MSEC);
	struct kvmm_done done;

	for (;;) {
		int err = kvmm_alloc(rq, 0, c->node, n, f, KVMM_EVICT_OK);

		if (err != -EAGAIN || deadline_past(deadline))
			return err;
		err = kvmm_win_sync(c->win, 0);
		if (err < 0)
			return err;
		if (!err && !kvmm_poll(c->k, &done, 1))
			bc_wait(c);
	}
}

int bc_publish(struct bench_client *c, struct kvmm_req *rq,
	       const struct kvmm_pub *pub, unsigned int n)
{
	uint64_t deadline = deadline_in(PUBLISH_MS * NSEC_PER_MSEC);
	uint64_t tag = ++c->tag;
	struct kvmm_done d;
	unsigned int i, ok = 0;
	int err;

	while ((err = kvmm_publish(rq, c->node, pub, n, tag)) == -EAGAIN) {
		if (deadline_past(deadline))
			return -ETIMEDOUT;
		bc_wait(c);
	}
	if (err)
		return err;
	for (;;) {
		err = kvmm_poll(c->k, &d, 1);
		if (err < 0)
			return err;
		if (err && d.tag == tag)
			break;
		if (deadline_past(deadline))
			return -ETIMEDOUT;
		if (!err)
			bc_wait(c);
	}
	if (d.result)
		return d.result;
	for (i = 0; i < d.n; i++)
		ok += !d.res[i].result;
	return (int)ok;
}

int bc_put(struct bench_client *c, uint64_t first, unsigned int n,
	   struct kvmm_key *key)
{
	struct kvmm_req *rq = bc_req(c, first);
	struct kvmm_pub pub[BC_PUT_MAX];
	kvmm_frame_t f[BC_PUT_MAX];
	unsigned int i;
	int err = bc_alloc(c, rq, n, f, PUBLISH_MS);

	memset(pub, 0, n * sizeof(*pub));
	for (i = 0; i < n && !err; i++) {
		bc_key(c, first + i, &pub[i].key);
		if (i)
			pub[i].parent = pub[i - 1].key;
		if (key)
			key[i] = pub[i].key;
		pub[i].frame = f[i];
		memset(kvmm_win_ptr(c->win, 0, f[i]), (int)first,
		       c->page_bytes);
	}
	if (!err)
		err = bc_publish(c, rq, pub, n);
	kvmm_req_end(rq, KVMM_ENDED, 0);
	return err < 0 ? err : err == (int)n ? 0 : -EIO;
}

unsigned int bc_match(struct bench_client *c, struct kvmm_req *rq,
		      const struct kvmm_key *key, unsigned int n,
		      struct kvmm_hit *hit)
{
	struct kvmm_keys keys = { .k = key, .n = n };
	struct kvmm_match m = { .size = sizeof(m) };
	int err = kvmm_match(rq, &keys, 1, c->node, hit, &m);

	if (err)
		die(c, "kvmm_match", err);
	return m.n_resident;
}

uint64_t bc_counter(struct bench *b, const char *name)
{
	json_t *status, *node;
	uint64_t v = 0;
	size_t i;
	int err = td_admin(b->kvmmd, "status", &status);

	if (err)
		bench_die(b, "status of kvmmd", err);
	json_array_foreach(json_object_get(status, "nodes"), i, node) {
		const char *n = json_string_value(json_object_get(node, "name"));

		if (n && !strcmp(n, "dram0"))
			v = (uint64_t)json_integer_value(json_object_get(
				json_object_get(node, "counters"), name));
	}
	json_decref(status);
	return v;
}

void *bench_shm(struct bench *b, size_t bytes)
{
	size_t room = bytes + SHM_HUGE_BYTES;
	int fd = memfd_create("bench", MFD_CLOEXEC);
	uintptr_t at;
	void *p;

	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		bench_die(b, "memory", -errno);
	p = mmap(NULL, room, PROT_NONE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		bench_die(b, "memory", -errno);
	at = ((uintptr_t)p + SHM_HUGE_BYTES - 1) & ~(SHM_HUGE_BYTES - 1);
	p = mmap((void *)at, bytes, PROT_READ | PROT_WRITE,
		 MAP_SHARED | MAP_POPULATE | MAP_FIXED, fd, 0);
	if (p == MAP_FAILED)
		bench_die(b, "memory", -errno);
	close(fd);
	return p;
}

bool bench_shm_huge(void *p, size_t bytes)
{
	return !madvise(p, bytes & ~(SHM_HUGE_BYTES - 1), MADV_COLLAPSE);
}
