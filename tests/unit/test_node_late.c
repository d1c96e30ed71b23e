/* SPDX-License-Identifier: Apache-2.0 */
/* A device that stalls: who is answered when, and what the kernel still has. */
#include "tests/lib/node_fault.h"

static void late_read_is_answered_now_and_released_later(void **state)
{
	struct node_slot slot;
	struct rig r;
	struct op op;
	uint64_t t;
	uint32_t crc;

	fault_rig(&r, 250, 20);
	crc = page_new(&r, &slot);
	memset(r.mem, 0, LEN);
	faults("nvme:read:" STALL ":n=1");
	op_init(&op, NODE_READ, &slot, r.mem, LEN, "p");
	op.io.crc = crc;
	t = now_ns();
	assert_int_equal(node_submit(r.n, &op.io), 0);
	rig_until(&r, op.nr_done);
	assert_int_equal(op.told, -ETIMEDOUT);
	assert_true(op.io.late);
	assert_true(op.done_ns - t >= 250 * MSEC);
	assert_true(op.done_ns - t < BEFORE_IT_ENDS);
	assert_int_equal(op.nr_release, 0);
	/* memory and slot are still the kernel's */
	assert_true(node_buf_busy(r.n, r.mem, LEN));
	assert_int_equal(r.n->stats.dir[NODE_READ].late, 1);
	assert_int_equal(r.n->stats.dir[NODE_READ].inflight, 1);
	rig_until(&r, op.nr_release);
	assert_int_equal(op.io.result, 0);	/* it arrived after all */
	assert_filled(r.mem, LEN, 1);
	assert_false(node_buf_busy(r.n, r.mem, LEN));
	assert_int_equal(r.n->state, NODE_ONLINE);	/* one miss only */
	rig_fini(&r);
}

static void callers_own_deadline_is_no_miss_of_the_device(void **state)
{
	struct node_slot slot;
	struct rig r;
	struct op op;
	uint64_t t;
	uint32_t crc;

	fault_rig(&r, 5000, 20);
	crc = page_new(&r, &slot);
	for (int i = 0; i < 5; i++) {
		faults("nvme:read:stall:ms=100:n=1");
		op_init(&op, NODE_READ, &slot, r.mem, LEN, "p");
		op.io.crc = crc;
		t = now_ns();
		op.io.deadline_ns = t + 10 * MSEC;
		assert_int_equal(node_submit(r.n, &op.io), 0);
		rig_until(&r, op.nr_done);
		assert_int_equal(op.told, -ETIMEDOUT);
		assert_true(op.done_ns >= t + 10 * MSEC);
		rig_until(&r, op.nr_release);
	}
	assert_int_equal(r.n->state, NODE_ONLINE);
	rig_fini(&r);
}

static void deadline_can_be_moved(void **state)
{
	struct node_slot slot;
	struct rig r;
	struct op op;
	uint64_t t;
	uint32_t crc;

	fault_rig(&r, 250, 20);
	crc = page_new(&r, &slot);
	faults("nvme:read:stall:ms=200:n=1");
	op_init(&op, NODE_READ, &slot, r.mem, LEN, "p");
	op.io.crc = crc;
	t = now_ns();
	op.io.deadline_ns = t + 20 * MSEC;
	assert_int_equal(node_submit(r.n, &op.io), 0);
	node_kick(r.n);
	node_io_deadline(&op.io, t + 70 * MSEC);
	rig_until(&r, op.nr_done);
	assert_true(op.done_ns >= t + 70 * MSEC);
	node_io_deadline(&op.io, t + 1000 * MSEC);	/* too late to matter */
	rig_until(&r, op.nr_release);
	rig_fini(&r);
}

static void queued_io_ends_at_its_deadline(void **state)
{
	struct node_slot slot;
	struct rig r;
	struct op stuck, a, b;
	uint64_t t;
	uint32_t crc;

	rig_init_memory(&r);
	r.o.depth = 1;
	r.o.zero_bytes_s = 1;
	r.o.queue_timeout_ns = 150 * MSEC;
	r.o.io_timeout_ns = 20000 * MSEC;
	rig_open(&r);
	crc = page_new(&r, &slot);
	faults("nvme:read:" STALL ":n=1");
	op_init(&stuck, NODE_READ, &slot, r.mem, LEN, "p");
	op_init(&a, NODE_READ, &slot, r.mem + MIB, LEN, "p");
	op_init(&b, NODE_READ, &slot, r.mem + 2 * MIB, LEN, "p");
	stuck.io.crc = a.io.crc = b.io.crc = crc;
	t = now_ns();
	a.io.deadline_ns = t + 30 * MSEC;
	assert_int_equal(node_submit(r.n, &stuck.io), 0);
	assert_int_equal(node_submit(r.n, &a.io), 0);
	assert_int_equal(node_submit(r.n, &b.io), 0);
	rig_until(&r, a.nr_done);
	assert_int_equal(a.told, -ETIMEDOUT);
	assert_int_equal(a.nr_release, 1);	/* nobody else had it */
	assert_false(a.io.late);
	assert_true(a.done_ns >= t + 30 * MSEC);
	rig_until(&r, b.nr_release);		/* by the node's own limit */
	assert_int_equal(b.told, -ETIMEDOUT);
	assert_int_equal(r.n->stats.dir[NODE_READ].expired, 2);
	assert_int_equal(stuck.nr_done, 0);
	rig_until(&r, stuck.nr_release);
	assert_int_equal(stuck.told, 0);
	rig_fini(&r);
}

static void stalled_device_goes_down_and_comes_back(void **state)
{
	enum { N = 12 };
	static struct op op[N];
	struct node_slot slot;
	struct rig r;
	uint64_t t;
	uint32_t crc;

	fault_rig(&r, 250, 20);
	crc = page_new(&r, &slot);
	faults("nvme:read:" STALL ";nvme:write:" STALL);
	t = now_ns();
	for (int i = 0; i < N; i++) {
		op_init(&op[i], NODE_READ, &slot, r.mem + i * MIB, LEN, "p");
		op[i].io.crc = crc;
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	for (int i = 0; i < N; i++)
		rig_until(&r, op[i].nr_done);
	assert_true(now_ns() - t < BEFORE_IT_ENDS);	/* nobody waited it out */
	assert_int_equal(r.n->state, NODE_FAILED);
	faults(NULL);
	for (int i = 0; i < N; i++)
		rig_until(&r, op[i].nr_release);
	assert_true(now_ns() - t >= STALL_NS);
	rig_until(&r, r.n->state == NODE_ONLINE);
	memset(r.mem, 0, LEN);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	assert_filled(r.mem, LEN, 1);
	rig_fini(&r);
}

static void late_write_keeps_its_slot_until_the_end(void **state)
{
	struct node_slot slot;
	struct rig r;
	struct op op;

	fault_rig(&r, 250, 20);
	fill(r.mem, LEN, 9);
	assert_int_equal(node_slot_alloc(r.n, LEN, &slot), 0);
	faults("nvme:write:" STALL ":n=1");
	op_init(&op, NODE_WRITE, &slot, r.mem, LEN, "p");
	assert_int_equal(node_submit(r.n, &op.io), 0);
	rig_until(&r, op.nr_done);
	assert_int_equal(op.told, -ETIMEDOUT);
	assert_int_equal(r.n->used, LEN);
	rig_until(&r, op.nr_release);
	assert_int_equal(op.io.result, 0);
	memset(r.mem, 0, LEN);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", op.io.crc), 0);
	assert_filled(r.mem, LEN, 9);
	rig_fini(&r);
}

static void destroy_waits_for_the_kernel_but_not_for_ever(void **state)
{
	struct node_slot slot;
	struct rig r;
	struct op op;
	uint64_t t;

	fault_rig(&r, 250, 20);
	assert_int_equal(node_slot_alloc(r.n, LEN, &slot), 0);
	faults("nvme:write:" STALL ":n=1");
	op_init(&op, NODE_WRITE, &slot, r.mem, LEN, "p");
	assert_int_equal(node_submit(r.n, &op.io), 0);
	node_kick(r.n);
	t = now_ns();
	assert_int_equal(node_destroy(r.n, deadline_in(50 * MSEC)),
			 -ETIMEDOUT);
	assert_true(now_ns() - t < BEFORE_IT_ENDS);
	assert_int_equal(op.nr_release, 0);
	/* the node still is, says no, and can be polled */
	assert_int_equal(r.n->state, NODE_OFFLINE);
	assert_int_equal(node_slot_alloc(r.n, LEN, &slot), -ESHUTDOWN);
	rig_poll(&r, 1);
	rig_close(&r);
	assert_int_equal(op.nr_release, 1);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(late_read_is_answered_now_and_released_later),
		cmocka_unit_test(callers_own_deadline_is_no_miss_of_the_device),
		cmocka_unit_test(deadline_can_be_moved),
		cmocka_unit_test(queued_io_ends_at_its_deadline),
		cmocka_unit_test(stalled_device_goes_down_and_comes_back),
		cmocka_unit_test(late_write_keeps_its_slot_until_the_end),
		cmocka_unit_test(destroy_waits_for_the_kernel_but_not_for_ever),
	};

	return run_on_both_engines(tests);
}
