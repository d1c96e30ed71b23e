/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=fdatasync */
/*
 * Data is flushed while there is some, about once a second, and at the end; not
 * where the device does not look well.
 */
#include <stdatomic.h>

#include "daemon/node/fault.h"
#include "daemon/node/nvme.h"
#include "tests/lib/node_owner.h"

#define LEN	4096u

static _Atomic unsigned int nr_syncs;
static _Atomic int sync_err;
static struct owner own;

int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);

int __wrap_fdatasync(int fd)
{
	int err = atomic_load(&sync_err);

	atomic_fetch_add(&nr_syncs, 1);
	if (err) {
		errno = err;
		return -1;
	}
	return __real_fdatasync(fd);
}

static void flush_rig(struct rig *r)
{
	rig_init(r);
	r->o.zero_bytes_s = 1;
	atomic_store(&sync_err, 0);
	owner_open(r, &own);
	atomic_store(&nr_syncs, 0);	/* those of the superblock */
}

static void run_for(struct rig *r, uint64_t ns)
{
	uint64_t end = deadline_in(ns);

	while (!deadline_past(end))
		rig_poll(r, 20);
}

static void write_one(struct rig *r, unsigned int i)
{
	struct node_slot slot;
	uint32_t crc;

	fill(r->mem, LEN, i);
	assert_int_equal(op_write(r, &slot, r->mem, LEN, "flush", &crc), 0);
}

static void written_data_is_flushed(void **state)
{
	struct rig r;

	flush_rig(&r);
	write_one(&r, 1);
	rig_until(&r, r.n->stats.flushes == 1);
	assert_int_equal(atomic_load(&nr_syncs), 1);
	/* nothing new: nothing to do, and no reason to wake up */
	run_for(&r, 2 * NVME_FLUSH_NS);
	assert_int_equal(atomic_load(&nr_syncs), 1);
	rig_fini(&r);
	assert_int_equal(atomic_load(&nr_syncs), 1);
}

static void flushes_are_a_second_apart(void **state)
{
	struct rig r;
	uint64_t t0;

	flush_rig(&r);
	t0 = now_ns();
	for (unsigned int i = 0; now_ns() - t0 < 2500 * MSEC; i++) {
		write_one(&r, i);
		run_for(&r, 20 * MSEC);
	}
	assert_in_range(atomic_load(&nr_syncs), 2,
			1 + (now_ns() - t0) / NVME_FLUSH_NS);
	rig_fini(&r);
}

static void what_is_left_is_flushed_at_the_end(void **state)
{
	struct rig r;

	flush_rig(&r);
	write_one(&r, 1);
	rig_until(&r, r.n->stats.flushes == 1);
	write_one(&r, 2);
	rig_close(&r);
	assert_int_equal(atomic_load(&nr_syncs), 2);
	rig_fini(&r);
}

static void a_flush_that_fails_is_counted_and_given_up(void **state)
{
	struct rig r;

	flush_rig(&r);
	atomic_store(&sync_err, EIO);
	write_one(&r, 1);
	rig_until(&r, r.n->stats.flush_fails == 1);
	run_for(&r, 2 * NVME_FLUSH_NS);
	assert_int_equal(atomic_load(&nr_syncs), 1);
	assert_int_equal(r.n->stats.flushes, 0);
	assert_int_equal(r.n->state, NODE_ONLINE);
	rig_fini(&r);
}

/* Whoever is in the call cannot be killed. */
static void a_device_that_does_not_answer_is_not_asked_to_flush(void **state)
{
	struct node_slot slot;
	struct op op;
	struct rig r;

	flush_rig(&r);
	write_one(&r, 1);
	rig_until(&r, r.n->stats.flushes == 1);
	write_one(&r, 2);
	/* held, as far as anybody can see, by the device */
	assert_int_equal(node_slot_alloc(r.n, LEN, &slot), 0);
	op_init(&op, NODE_WRITE, &slot, r.mem, LEN, "flush");
	assert_int_equal(node_submit(r.n, &op.io), 0);
	assert_int_equal(node_fault_set("nvme:write:stall:ms=3000", NULL, 0),
			 0);
	run_for(&r, 2500 * MSEC);
	assert_int_equal(atomic_load(&nr_syncs), 1);
	rig_until(&r, op.nr_release);
	rig_until(&r, r.n->stats.flushes == 2);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(written_data_is_flushed),
		cmocka_unit_test(flushes_are_a_second_apart),
		cmocka_unit_test(what_is_left_is_flushed_at_the_end),
		cmocka_unit_test(a_flush_that_fails_is_counted_and_given_up),
		cmocka_unit_test(
			a_device_that_does_not_answer_is_not_asked_to_flush),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
