/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node_fault.h - a slot store whose device does what a test says
 *
 * Beside node.h: each fault is injected between the node's queue and its
 * engine, on both engines.
 */
#ifndef KVMM_TESTS_LIB_NODE_FAULT_H
#define KVMM_TESTS_LIB_NODE_FAULT_H

#include "tests/lib/node.h"

#define LEN	65536u

/*
 * Times are short enough for the state machine to be walked through in a test,
 * and what a test compares lies far apart: the machine may be a busy one.
 */
#define STALL		"stall:ms=1200"
#define STALL_NS	(1200 * MSEC)
#define BEFORE_IT_ENDS	(1000 * MSEC)

static inline void fault_rig(struct rig *r, unsigned int timeout_ms,
			     unsigned int probe_ms)
{
	rig_init_memory(r);
	r->o.io_timeout_ns = timeout_ms * MSEC;
	r->o.probe_ns = probe_ms * MSEC;
	r->o.recover_ns = 150 * MSEC;
	r->o.zero_bytes_s = 1;		/* not in the way */
	rig_open(r);
	/* the one chunk that was started at once */
	for (int i = 0; i < 20; i++)
		rig_poll(r, 5);
}

static inline void faults(const char *spec)
{
	char why[200] = "";

	if (node_fault_set(spec, why, sizeof(why)))
		print_message("# %s\n", why);
	assert_string_equal(why, "");
}

/* A page that is on the medium, and its checksum. */
static inline uint32_t page_new(struct rig *r, struct node_slot *slot)
{
	uint32_t crc;

	fill(r->mem, LEN, 1);
	assert_int_equal(op_write(r, slot, r->mem, LEN, "p", &crc), 0);
	return crc;
}

static inline void run_for(struct rig *r, uint64_t ns)
{
	uint64_t end = deadline_in(ns);

	while (!deadline_past(end))
		rig_poll(r, 5);
}

#endif
