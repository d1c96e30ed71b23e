/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=pread */
/*
 * Who is too late: the caller, the device, or we who did not look.
 */
#include <stdatomic.h>

#include "daemon/node/fault.h"
#include "daemon/node/nvme.h"
#include "tests/lib/node.h"

#define LEN	4096u

/* How long each pread(2) takes, in milliseconds. */
static _Atomic unsigned int pread_ms;

ssize_t __real_pread(int fd, void *buf, size_t len, off_t off);
ssize_t __wrap_pread(int fd, void *buf, size_t len, off_t off);

ssize_t __wrap_pread(int fd, void *buf, size_t len, off_t off)
{
	unsigned int ms = atomic_load_explicit(&pread_ms,
					       memory_order_relaxed);

	if (ms)
		usleep(ms * 1000);
	return __real_pread(fd, buf, len, off);
}

static void slow_preads(unsigned int ms)
{
	atomic_store_explicit(&pread_ms, ms, memory_order_relaxed);
}

static void time_rig(struct rig *r, unsigned int timeout_ms)
{
	rig_init_memory(r);
	r->o.io_timeout_ns = timeout_ms * MSEC;
	r->o.probe_ns = 60 * NSEC_PER_SEC;
	r->o.recover_ns = 60 * NSEC_PER_SEC;
	r->o.zero_bytes_s = 1;
}

static void settle(struct rig *r)
{
	for (int i = 0; i < 20; i++)
		rig_poll(r, 5);
}

static void page_new(struct rig *r, struct node_slot *slot, uint32_t *crc)
{
	fill(r->mem, LEN, 1);
	assert_int_equal(op_write(r, slot, r->mem, LEN, "p", crc), 0);
}

static void read_start(struct rig *r, struct op *op,
		       const struct node_slot *slot, uint32_t crc, void *addr,
		       uint64_t deadline_ns)
{
	op_init(op, NODE_READ, slot, addr, LEN, "p");
	op->io.crc = crc;
	op->io.deadline_ns = deadline_ns;
	assert_int_equal(node_submit(r->n, &op->io), 0);
}

/* A read that @fault makes take 50 ms, for a caller who has 5. */
static void late_read(struct rig *r, const struct node_slot *slot, uint32_t crc,
		      const char *fault)
{
	struct op op;

	assert_int_equal(node_fault_set(fault, NULL, 0), 0);
	read_start(r, &op, slot, crc, r->mem, now_ns() + 5 * MSEC);
	rig_until(r, op.nr_release);
	assert_int_equal(op.told, -ETIMEDOUT);
}

static void error_is_a_miss_although_nobody_waits_any_more(void **state)
{
	struct node_slot slot;
	uint32_t crc;
	struct rig r;

	time_rig(&r, 20000);
	rig_open(&r);
	page_new(&r, &slot, &crc);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(r.n->state, NODE_ONLINE);
		late_read(&r, &slot, crc, "nvme:read:eio:ms=50");
	}
	assert_int_equal(r.n->state, NODE_DEGRADED);
	rig_fini(&r);
}

static void good_read_is_one_although_nobody_waits_any_more(void **state)
{
	struct node_slot slot;
	uint32_t crc;
	struct rig r;

	time_rig(&r, 20000);
	rig_open(&r);
	page_new(&r, &slot, &crc);
	for (int i = 0; i < 4; i++) {
		assert_int_equal(node_fault_set("nvme:read:eio", NULL, 0), 0);
		assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc),
				 -EIO);
		late_read(&r, &slot, crc, "nvme:read:stall:ms=50");
	}
	assert_int_equal(r.n->state, NODE_ONLINE);
	rig_fini(&r);
}

/* What the device did not get done in time was a miss already. */
static void late_error_is_one_miss_only(void **state)
{
	struct node_slot slot;
	uint32_t crc;
	struct rig r;
	struct op op;

	time_rig(&r, 100);
	rig_open(&r);
	page_new(&r, &slot, &crc);
	assert_int_equal(node_fault_set("nvme:read:eio:ms=600", NULL, 0), 0);
	read_start(&r, &op, &slot, crc, r.mem, 0);
	rig_until(&r, op.nr_release);
	assert_int_equal(op.told, -ETIMEDOUT);
	assert_int_equal(to_nvme(r.n)->health.bad_row, 1);
	rig_fini(&r);
}

static void large_transfers_have_the_time_that_they_take(void **state)
{
	enum { N = 4, BIG = 8 << 20 };
	static struct op op[N];
	struct node_slot slot[N];
	struct rig r;

	time_rig(&r, 250);
	r.o.bytes = 80 * MIB;
	r.o.seg_bytes = BIG;
	rig_open(&r);
	settle(&r);
	assert_int_equal(node_fault_set("nvme:write:stall:ms=500", NULL, 0),
			 0);
	for (int i = 0; i < N; i++) {
		assert_int_equal(node_slot_alloc(r.n, BIG, &slot[i]), 0);
		op_init(&op[i], NODE_WRITE, &slot[i], r.mem + i % 2 * BIG, BIG,
			"p");
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	for (int i = 0; i < N; i++) {
		rig_until(&r, op[i].nr_release);
		assert_int_equal(op[i].told, 0);
	}
	assert_int_equal(to_nvme(r.n)->health.bad_row, 0);
	assert_int_equal(r.n->state, NODE_ONLINE);
	/* and no more: a device that does not answer is found out */
	assert_int_equal(node_fault_set("nvme:write:stall:ms=4000", NULL, 0),
			 0);
	op_init(&op[0], NODE_WRITE, &slot[0], r.mem, BIG, "p");
	assert_int_equal(node_submit(r.n, &op[0].io), 0);
	rig_until(&r, op[0].nr_done);
	assert_int_equal(op[0].told, -ETIMEDOUT);
	assert_int_equal(op[0].nr_release, 0);
	assert_int_equal(to_nvme(r.n)->health.bad_row, 1);
	node_fault_set(NULL, NULL, 0);
	rig_until(&r, op[0].nr_release);
	rig_fini(&r);
}

/* ---- the engine of threads --------------------------------------------------- */

static void waiting_for_a_thread_is_no_fault_of_the_device(void **state)
{
	enum { N = 12 };
	static struct op op[N];
	struct node_slot slot;
	uint32_t crc;
	struct rig r;

	if (test_engine != NVME_ENGINE_THREADS)
		skip();
	time_rig(&r, 250);
	r.o.threads = 2;
	rig_open(&r);
	page_new(&r, &slot, &crc);
	settle(&r);
	slow_preads(100);
	for (int i = 0; i < N; i++)
		read_start(&r, &op[i], &slot, crc, r.mem + i * LEN, 0);
	for (int i = 0; i < N; i++) {
		rig_until(&r, op[i].nr_release);
		assert_int_equal(op[i].told, 0);
	}
	slow_preads(0);
	assert_int_equal(to_nvme(r.n)->health.bad_row, 0);
	assert_int_equal(r.n->stats.dir[NODE_READ].late, 0);
	rig_fini(&r);
}

static void stuck_threads_are(void **state)
{
	enum { N = 12 };
	static struct op op[N];
	struct node_slot slot;
	uint32_t crc;
	struct rig r;
	uint64_t t;

	if (test_engine != NVME_ENGINE_THREADS)
		skip();
	time_rig(&r, 250);
	r.o.threads = 2;
	rig_open(&r);
	page_new(&r, &slot, &crc);
	settle(&r);
	slow_preads(4000);
	t = now_ns();
	for (int i = 0; i < N; i++)
		read_start(&r, &op[i], &slot, crc, r.mem + i * LEN, 0);
	for (int i = 0; i < N; i++) {
		rig_until(&r, op[i].nr_done);
		assert_int_equal(op[i].told, -ETIMEDOUT);
	}
	assert_true(now_ns() - t < 3000 * MSEC);
	assert_int_equal(r.n->state, NODE_FAILED);
	slow_preads(0);
	for (int i = 0; i < N; i++)
		rig_until(&r, op[i].nr_release);
	rig_fini(&r);
}

/* ---- ourselves --------------------------------------------------------------- */

/* All had ended long ago; the loop, stopped for a while, looks at some first. */
static void what_was_not_looked_at_is_not_late(void **state)
{
	enum { N = 600 };
	static struct op op[N];
	struct node_slot slot;
	uint32_t crc;
	struct rig r;

	time_rig(&r, 250);
	r.o.depth = 1024;
	rig_open(&r);
	page_new(&r, &slot, &crc);
	settle(&r);
	for (int i = 0; i < N; i++)
		read_start(&r, &op[i], &slot, crc, r.mem + i * LEN, 0);
	node_kick(r.n);
	usleep(700 * 1000);
	assert_int_equal(node_poll(r.n, 64) >= 64, true);
	assert_int_equal(r.n->stats.dir[NODE_READ].late, 0);
	for (int i = 0; i < N; i++) {
		while (!op[i].nr_release) {
			node_poll(r.n, 64);
			work_poll(r.pool, 0);
		}
		assert_int_equal(op[i].told, 0);
	}
	assert_int_equal(r.n->state, NODE_ONLINE);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(error_is_a_miss_although_nobody_waits_any_more),
		cmocka_unit_test(good_read_is_one_although_nobody_waits_any_more),
		cmocka_unit_test(late_error_is_one_miss_only),
		cmocka_unit_test(large_transfers_have_the_time_that_they_take),
		cmocka_unit_test(waiting_for_a_thread_is_no_fault_of_the_device),
		cmocka_unit_test(stuck_threads_are),
		cmocka_unit_test(what_was_not_looked_at_is_not_late),
	};

	return run_on_both_engines(tests);
}
