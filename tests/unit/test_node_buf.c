/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that is registered for I/O. */
#include <sys/resource.h>
#include <sys/wait.h>

#include "tests/lib/node.h"

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define THREAD_SANITIZER 1	/* starts no threads in a forked child */
#else
#define THREAD_SANITIZER 0
#endif

static void registered_memory_is_used_and_let_go(void **state)
{
	struct node_slot slot;
	struct rig r;
	uint32_t crc;
	int err;

	rig_init(&r);
	rig_open(&r);
	err = node_buf_add(r.n, r.mem, 4 * MIB);
	if (test_engine == NVME_ENGINE_THREADS) {
		assert_int_equal(err, -EOPNOTSUPP);
		rig_fini(&r);
		return;
	}
	if (err == -EOPNOTSUPP || err == -ENOMEM) {
		print_message("# this host registers nothing: %d\n", err);
		rig_fini(&r);
		return;
	}
	assert_int_equal(err, 0);
	assert_int_equal(node_buf_add(r.n, r.mem + MIB, 4 * MIB), -EEXIST);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.fixed_bytes, 4 * MIB);
	fill(r.mem + MIB, 65536, 1);
	assert_int_equal(op_write(&r, &slot, r.mem + MIB, 65536, "p", &crc), 0);
	assert_int_equal(r.n->stats.fixed_ios, 1);
	memset(r.mem, 0, 65536);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), 0);
	assert_int_equal(r.n->stats.fixed_ios, 2);
	assert_filled(r.mem, 65536, 1);

	/* across its end, and outside: plain, and just as right */
	assert_int_equal(op_read(&r, &slot, r.mem + 4 * MIB - 4096, 65536, "p",
				 crc), 0);
	assert_filled(r.mem + 4 * MIB - 4096, 65536, 1);
	assert_int_equal(r.n->stats.fixed_ios, 2);
	node_buf_del(r.n, r.mem);
	node_buf_del(r.n, r.mem);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), 0);
	assert_int_equal(r.n->stats.fixed_ios, 2);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.fixed_bytes, 0);
	rig_fini(&r);
}

/* In a child without privileges; 0, or the line that failed. */
static int memlock_child(struct rig *r)
{
	struct rlimit lim = { 65536, 65536 };
	struct nvme_opts o = r->o;
	char line[400];
	struct node *n;

	if (setrlimit(RLIMIT_MEMLOCK, &lim) || setgid(65534) || setuid(65534))
		return __LINE__ % 200;
	o.path = "/nonexistent/kvmm";
	if (nvme_create(&o, r->pool, &n))
		return __LINE__ % 200;
	if (node_buf_add(n, r->mem, 4 * MIB) != -ENOMEM)
		return __LINE__ % 200;
	node_poll(n, 0);
	if (n->stats.plain_bytes != 4 * MIB || n->stats.fixed_bytes)
		return __LINE__ % 200;
	node_status(n, line, sizeof(line));
	node_buf_del(n, r->mem);
	node_poll(n, 0);
	return n->stats.plain_bytes ? __LINE__ % 200 : 0;
}

static void memlock_limit_is_no_failure(void **state)
{
	struct rig r;
	int status;
	pid_t pid;

	if (test_engine == NVME_ENGINE_THREADS || getuid() || THREAD_SANITIZER)
		skip();
	rig_init(&r);
	pid = fork();
	if (!pid)
		_exit(memlock_child(&r));
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	rig_fini(&r);
}

static void extent_made(struct extent *ext, int err, void *arg)
{
	struct extent **ret = arg;

	assert_int_equal(err, 0);
	*ret = ext;
}

static void extent_gone(struct extent *ext, int err, void *arg)
{
	assert_null(ext);
	assert_int_equal(err, 0);
	*(bool *)arg = true;
}

static void extents_of_a_paired_node_are_registered(void **state)
{
	struct host_opts ho = { .name = "dram0", .bytes = 16 * MIB,
				.numa = -1 };
	struct extent *ext = NULL;
	struct node_slot slot;
	struct node *host;
	bool gone = false;
	uint64_t end = deadline_in(PATIENCE_NS);
	struct rig r;
	struct op op;

	rig_init(&r);
	rig_open(&r);
	assert_int_equal(host_create(&ho, &host), 0);
	assert_int_equal(node_pair(r.n, host), -EINVAL);
	assert_int_equal(node_pair(host, r.n), 0);
	assert_int_equal(node_extent_get(host, 4 * MIB, 0, extent_made, &ext),
			 0);
	while (!ext && !deadline_past(end))
		node_poll(host, 0);
	assert_non_null(ext);
	rig_poll(&r, 0);
	if (test_engine == NVME_ENGINE_URING)
		assert_int_equal(r.n->stats.fixed_bytes +
				 r.n->stats.plain_bytes, 4 * MIB);

	/* busy with I/O: it cannot be given back */
	assert_int_equal(node_slot_alloc(r.n, MIB, &slot), 0);
	op_init(&op, NODE_WRITE, &slot, ext->addr, MIB, "p");
	assert_int_equal(node_submit(r.n, &op.io), 0);
	assert_int_equal(node_extent_put(ext, extent_gone, &gone), -EBUSY);
	rig_until(&r, op.nr_release);
	assert_int_equal(op.told, 0);
	assert_int_equal(r.n->stats.fixed_ios,
			 r.n->stats.fixed_bytes ? 1 : 0);

	assert_int_equal(node_extent_put(ext, extent_gone, &gone), 0);
	while (!gone && !deadline_past(end))
		node_poll(host, 0);
	assert_true(gone);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.fixed_bytes, 0);
	assert_int_equal(host->used, 0);

	/* the block node may end first: the other forgets it */
	rig_close(&r);
	assert_null(host->paired[0]);
	ext = NULL;
	assert_int_equal(node_extent_get(host, 4 * MIB, 0, extent_made, &ext),
			 0);
	while (!ext && !deadline_past(end))
		node_poll(host, 0);
	assert_non_null(ext);
	assert_int_equal(node_extent_put(ext, NULL, NULL), 0);
	assert_int_equal(node_destroy(host, deadline_in(PATIENCE_NS)), 0);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(registered_memory_is_used_and_let_go),
		cmocka_unit_test(memlock_limit_is_no_failure),
		cmocka_unit_test(extents_of_a_paired_node_are_registered),
	};

	return run_on_both_engines(tests);
}
