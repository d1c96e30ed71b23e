/* SPDX-License-Identifier: Apache-2.0 */
/* Misses in a row, a dead device, one that is full: what state a node is in. */
#include "tests/lib/node_fault.h"

static void misses_in_a_row_degrade_and_quiet_recovers(void **state)
{
	struct node_slot slot, other;
	struct rig r;
	uint32_t crc, crc2;
	uint64_t bad;

	fault_rig(&r, 20000, 20);
	crc = page_new(&r, &slot);
	faults("nvme:read:eio:n=2");
	for (int i = 0; i < 2; i++)
		assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc),
				 -EIO);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	faults("nvme:read:eio:n=2");
	for (int i = 0; i < 2; i++)
		assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc),
				 -EIO);
	/* four misses, but never three in a row */
	assert_int_equal(r.n->state, NODE_ONLINE);
	assert_true(node_writable(r.n));
	faults("nvme:read:eio:n=1");
	bad = now_ns();
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EIO);
	assert_int_equal(r.n->state, NODE_DEGRADED);
	assert_string_not_equal(r.n->why, "");

	/* reads go on, writes do not */
	assert_false(node_writable(r.n));
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	assert_int_equal(op_write(&r, &other, r.mem, LEN, "q", &crc2),
			 -EAGAIN);
	assert_int_equal(node_estimate_us(r.n, NODE_WRITE, LEN), UINT32_MAX);
	assert_true(node_estimate_us(r.n, NODE_READ, LEN) < UINT32_MAX);
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_true(now_ns() - bad >= 150 * MSEC);
	assert_true(r.n->stats.probes > 0);
	page_new(&r, &other);
	rig_fini(&r);
}

static void dead_device_fails_and_answers_at_once(void **state)
{
	enum { N = 20 };
	static struct op op[N];
	struct node_slot slot;
	struct rig r;
	uint64_t t;
	uint32_t crc;

	fault_rig(&r, 20000, 20);
	crc = page_new(&r, &slot);
	faults("nvme:read:eio;nvme:write:eio");
	for (int i = 0; i < N; i++) {
		op_init(&op[i], NODE_READ, &slot, r.mem, LEN, "p");
		op[i].io.crc = crc;
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	for (int i = 0; i < N; i++) {
		rig_until(&r, op[i].nr_release);
		assert_int_equal(op[i].told, -EIO);
	}
	assert_int_equal(r.n->state, NODE_FAILED);
	t = now_ns();
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EIO);
	assert_true(now_ns() - t < 50 * MSEC);
	assert_int_equal(node_slot_alloc(r.n, LEN, &slot), -EIO);

	/* it stays so while the probes fail, and comes back by itself */
	run_for(&r, 100 * MSEC);
	assert_int_equal(r.n->state, NODE_FAILED);
	faults(NULL);
	rig_until(&r, r.n->state != NODE_FAILED);
	assert_int_equal(r.n->state, NODE_DEGRADED);
	rig_until(&r, r.n->state == NODE_ONLINE);
	rig_fini(&r);
}

static void read_only_stops_writes_alone(void **state)
{
	struct node_slot slot, other;
	struct rig r;
	uint32_t crc, crc2;

	fault_rig(&r, 20000, 20);
	crc = page_new(&r, &slot);
	faults("nvme:write:erofs");
	assert_int_equal(op_write(&r, &other, r.mem, LEN, "q", &crc2), -EROFS);
	assert_int_equal(r.n->state, NODE_DEGRADED);
	assert_non_null(strstr(r.n->why, "read-only"));
	assert_int_equal(op_write(&r, &other, r.mem, LEN, "q", &crc2), -EROFS);
	run_for(&r, 200 * MSEC);
	assert_int_equal(r.n->state, NODE_DEGRADED);	/* probes agree */
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	faults(NULL);
	rig_until(&r, r.n->state == NODE_ONLINE);
	page_new(&r, &other);
	rig_fini(&r);
}

static void no_space_stops_writes_until_some_is_freed(void **state)
{
	struct node_slot slot, other;
	struct rig r;
	uint32_t crc, crc2;

	fault_rig(&r, 20000, 600);
	crc = page_new(&r, &slot);
	faults("nvme:write:enospc:n=1");
	assert_int_equal(op_write(&r, &other, r.mem, LEN, "q", &crc2),
			 -ENOSPC);
	assert_int_equal(r.n->state, NODE_ONLINE);
	assert_false(node_writable(r.n));
	assert_int_equal(op_write(&r, &slot, r.mem, LEN, "q", &crc2), -ENOSPC);
	assert_int_equal(r.n->stats.dir[NODE_WRITE].enospc, 1);
	assert_int_equal(r.n->stats.dir[NODE_WRITE].refused, 1);
	/* what had no room frees none: soon, but not in a circle */
	assert_int_equal(node_slot_free(r.n, &other), 0);
	assert_false(node_writable(r.n));
	run_for(&r, 150 * MSEC);
	assert_true(node_writable(r.n));
	assert_int_equal(r.n->stats.bad_slots, 0);
	page_new(&r, &other);

	/* or for a while */
	faults("nvme:write:enospc:n=1");
	assert_int_equal(op_write(&r, &other, r.mem, LEN, "q", &crc2),
			 -ENOSPC);
	assert_false(node_writable(r.n));
	run_for(&r, 650 * MSEC);
	assert_true(node_writable(r.n));
	page_new(&r, &other);
	(void)crc;
	rig_fini(&r);
}

/* The others would fail in the same way, each with a slot that is then freed. */
static void one_write_at_a_time_tries_a_full_device(void **state)
{
	struct node_slot slot[3], full;
	struct op op[2];
	uint32_t crc;
	struct rig r;
	int i;

	fault_rig(&r, 20000, 20000);
	page_new(&r, &slot[0]);
	for (i = 1; i < 3; i++)
		assert_int_equal(node_slot_alloc(r.n, LEN, &slot[i]), 0);
	faults("nvme:write:enospc:n=1");
	assert_int_equal(op_write(&r, &full, r.mem, LEN, "q", &crc), -ENOSPC);
	run_for(&r, 150 * MSEC);
	assert_int_equal(node_slot_free(r.n, &full), 0);
	assert_true(node_writable(r.n));
	faults("nvme:write:" STALL);
	op_init(&op[0], NODE_WRITE, &slot[1], r.mem, LEN, "q");
	assert_int_equal(node_submit(r.n, &op[0].io), 0);
	assert_int_equal(node_slot_free(r.n, &slot[0]), 0);
	op_init(&op[1], NODE_WRITE, &slot[2], r.mem, LEN, "q");
	assert_int_equal(node_submit(r.n, &op[1].io), -ENOSPC);
	/* it went well: then there is room */
	rig_until(&r, op[0].nr_release);
	assert_int_equal(op[0].told, 0);
	assert_int_equal(node_submit(r.n, &op[1].io), 0);
	faults(NULL);
	rig_until(&r, op[1].nr_release);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(misses_in_a_row_degrade_and_quiet_recovers),
		cmocka_unit_test(dead_device_fails_and_answers_at_once),
		cmocka_unit_test(read_only_stops_writes_alone),
		cmocka_unit_test(no_space_stops_writes_until_some_is_freed),
		cmocka_unit_test(one_write_at_a_time_tries_a_full_device),
	};

	return run_on_both_engines(tests);
}
