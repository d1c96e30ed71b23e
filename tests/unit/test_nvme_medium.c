/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a slot store does where its medium takes everything but what it has to
 * remember: a bad block in the ring or in a checkpoint's area, no space, a quota.
 */
#include "daemon/node/fault.h"
#include "daemon/node/nvme.h"
#include "tests/lib/node_owner.h"

static struct owner before, after;

/* An idle store with short times; nothing is written but what a test says. */
static void medium_rig(struct rig *r)
{
	rig_init_memory(r);
	r->o.probe_ns = 5 * MSEC;
	r->o.recover_ns = 150 * MSEC;
	r->o.zero_bytes_s = 1;
	owner_open(r, &before);
	for (int i = 0; i < 20; i++)
		rig_poll(r, 5);
}

static void run_for(struct rig *r, uint64_t ns)
{
	uint64_t end = deadline_in(ns);

	while (!deadline_past(end))
		rig_poll(r, 5);
}

/* @how happens to journal and checkpoint in @len bytes at @off. */
static void fault_at(const char *how, uint64_t off, uint64_t len)
{
	char rule[120], why[120] = "";

	snprintf(rule, sizeof(rule), "nvme:journal:%s:off=%llu:len=%llu", how,
		 (unsigned long long)off, (unsigned long long)len);
	node_fault_set(rule, why, sizeof(why));
	assert_string_equal(why, "");
}

/* Where block @seq of the journal lies. */
static uint64_t ring_place(const struct rig *r, uint64_t seq)
{
	const struct nvme *nv = to_nvme(r->n);

	return nv->open.super.journal_off +
	       seq % nv->journal.nr_blocks * NVME_BLOCK;
}

/* Have an entry lost, so that a checkpoint is needed at once. */
static void lose_entry(struct rig *r)
{
	uint64_t lost = r->n->stats.journal_lost;

	for (int i = 0; i < 6000 && r->n->stats.journal_lost == lost; i++) {
		if (owner_add(r, &before, 4096, 1, NULL))
			break;
		owner_free(r, &before.rec[--before.nr]);
	}
	assert_true(r->n->stats.journal_lost > lost);
}

static void reopen_and_compare(struct rig *r)
{
	rig_close(r);
	node_fault_set(NULL, NULL, 0);
	owner_open(r, &after);
	owners_equal(&after, &before);
	assert_int_equal(r->n->stats.recover_dropped, 0);
}

/* ---- the ring ---------------------------------------------------------------- */

static void bad_block_of_the_ring_is_got_over_by_an_idle_node(void **state)
{
	struct rig r;

	medium_rig(&r);
	fault_at("eio", ring_place(&r, to_nvme(r.n)->journal.head),
		 NVME_BLOCK);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	rig_until(&r, r.n->state == NODE_DEGRADED);
	rig_until(&r, node_writable(r.n));
	assert_true(r.n->stats.ckpts > 0);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(owner_flush(&r), 0);
	reopen_and_compare(&r);
	rig_fini(&r);
}

static void who_flushes_meanwhile_is_told(void **state)
{
	struct rig r;

	medium_rig(&r);
	fault_at("eio", ring_place(&r, to_nvme(r.n)->journal.head),
		 NVME_BLOCK);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	rig_until(&r, r.n->state == NODE_DEGRADED);
	assert_int_equal(owner_flush(&r), -EIO);
	assert_int_equal(r.n->state, NODE_DEGRADED);
	rig_fini(&r);
}

/* What was removed while the journal was given up must not come back. */
static void journal_given_up_is_tried_once_more_at_the_end(void **state)
{
	struct rig r;

	medium_rig(&r);
	for (int i = 0; i < 100; i++)
		assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(owner_flush(&r), 0);
	to_nvme(r.n)->opts.recover_ns = 3600 * NSEC_PER_SEC;
	fault_at("eio", ring_place(&r, to_nvme(r.n)->journal.head),
		 NVME_BLOCK);
	for (int i = 0; i < 100; i++)
		owner_free(&r, &before.rec[i]);
	rig_until(&r, r.n->state == NODE_DEGRADED);
	run_for(&r, 30 * MSEC);
	node_fault_set(NULL, NULL, 0);
	reopen_and_compare(&r);
	rig_fini(&r);
}

/* ---- checkpoints --------------------------------------------------------------- */

static void fail_checkpoints(struct rig *r)
{
	const struct nvme_super *sb = &to_nvme(r->n)->open.super;

	fault_at("eio", sb->ckpt_off, 2 * sb->ckpt_bytes);
}

static void failing_checkpoint_is_not_tried_in_a_circle(void **state)
{
	char line[500];
	struct rig r;

	medium_rig(&r);
	to_nvme(r.n)->opts.degrade_after = 1000000;
	assert_int_equal(node_fault_set("nvme:get:enomem:n=1", NULL, 0), 0);
	lose_entry(&r);
	fail_checkpoints(&r);
	rig_until(&r, r.n->stats.ckpt_fails == 3);
	node_status(r.n, line, sizeof(line));
	assert_non_null(strstr(line, "3 checkpoints in a row failed"));
	run_for(&r, 600 * MSEC);
	/* after 5, 10, 20 ms ...; without the doubling it would be some 120 */
	assert_in_range(r.n->stats.ckpt_fails, 5, 9);
	node_fault_set(NULL, NULL, 0);
	rig_until(&r, node_writable(r.n));
	node_status(r.n, line, sizeof(line));
	assert_null(strstr(line, "in a row failed"));
	reopen_and_compare(&r);
	rig_fini(&r);
}

static void who_waits_for_a_checkpoint_that_fails_is_told(void **state)
{
	struct rig r;

	medium_rig(&r);
	to_nvme(r.n)->opts.degrade_after = 1000000;
	assert_int_equal(node_fault_set("nvme:get:enomem:n=1", NULL, 0), 0);
	lose_entry(&r);
	fail_checkpoints(&r);
	assert_int_equal(owner_flush(&r), -EIO);
	rig_fini(&r);
}

/* Its space was taken when the store was made. */
static void checkpoint_needs_no_room_above_the_floor(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.sparse = true;
	r.o.check_ns = 10 * MSEC;
	r.o.probe_ns = 5 * MSEC;
	r.o.zero_bytes_s = 1;
	r.o.free_floor_pct = 1;
	owner_open(&r, &before);
	for (int i = 0; i < 100; i++)
		assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(owner_flush(&r), 0);
	if (to_nvme(r.n)->open.overcommit) {
		print_message("# space is not reserved here\n");
		rig_fini(&r);
		skip();
	}
	to_nvme(r.n)->opts.free_floor_pct = 100;
	rig_until(&r, !to_nvme(r.n)->room);
	/* an entry that has no memory while nothing can be written */
	assert_int_equal(node_fault_set("nvme:get:enomem:n=1", NULL, 0), 0);
	for (int i = 0; i < 100 && !r.n->stats.journal_lost; i++) {
		owner_free(&r, &before.rec[i]);
		assert_true(owner_flush(&r) <= 0);
	}
	assert_true(r.n->stats.journal_lost > 0);
	assert_false(node_writable(r.n));
	rig_until(&r, r.n->stats.ckpts);
	reopen_and_compare(&r);
	rig_fini(&r);
}

static bool (*collect_step)(struct node *n, uint64_t *cursor, void *arg);
static unsigned int collects, collects_in_all;

static bool collect_counted(struct node *n, uint64_t *cursor, void *arg)
{
	collects++;
	collects_in_all++;
	return collect_step(n, cursor, arg);
}

/* An entry was lost, so all must be said again, while it goes on changing. */
static void checkpoint_without_journal_is_collected_in_slices(void **state)
{
	unsigned int nr = 0;
	uint32_t id;
	struct rig r;
	int told;

	medium_rig(&r);
	before.step = 8;
	collect_step = before.ops.collect;
	before.ops.collect = collect_counted;
	collects = collects_in_all = 0;
	for (unsigned int i = 0; i < 3000; i++)
		assert_int_equal(owner_add(&r, &before, 4096, (uint8_t)i, NULL),
				 0);
	assert_int_equal(owner_flush(&r), 0);
	node_fault_set("nvme:get:enomem:n=1", NULL, 0);
	/* removals: they are what goes on while nothing can be added */
	while (!r.n->stats.journal_lost) {
		owner_free(&r, &before.rec[nr++]);
		node_record_flush(r.n, flush_told, &told);	/* a block */
	}
	while (!r.n->stats.ckpts && nr + 2 < before.nr) {
		collects = 0;
		node_poll(r.n, 0);
		assert_true(collects <= 1);
		/* in front of the owner's cursor, and behind it */
		owner_free(&r, &before.rec[nr++]);
		owner_free(&r, &before.rec[--before.nr]);
		if (nr % 16)
			continue;
		if (!before.label[nr / 16 % 40].used) {
			struct owned_label *l = &before.label[nr / 16 % 40];

			l->len = 100;
			memset(l->bytes, (int)nr, l->len);
			l->used = !node_label_put(r.n, l->bytes, l->len, &id);
			l->id = id;
		}
	}
	rig_until(&r, r.n->stats.ckpts);
	assert_true(collects_in_all > 100);
	print_message("# %u calls, %u records removed meanwhile\n",
		      collects_in_all, nr);
	assert_int_equal(owner_flush(&r), 0);
	reopen_and_compare(&r);
	rig_fini(&r);
}

/* ---- space ------------------------------------------------------------------- */

/* Nothing but zero-writing, and it has no space: not a sick device. */
static void idle_node_without_space(const char *fault)
{
	struct rig r;

	rig_init_memory(&r);
	r.o.probe_ns = 5 * MSEC;
	assert_int_equal(node_fault_set(fault, NULL, 0), 0);
	owner_open(&r, &before);
	run_for(&r, 200 * MSEC);
	assert_int_equal(r.n->state, NODE_ONLINE);
	assert_true(to_nvme(r.n)->health.full);
	assert_int_equal(to_nvme(r.n)->health.bad_row, 0);
	assert_int_equal(r.n->stats.zeroed_bytes, 0);
	node_fault_set(NULL, NULL, 0);
	rig_until(&r, r.n->stats.zeroed_bytes);
	assert_false(to_nvme(r.n)->health.full);
	rig_fini(&r);
}

static void idle_node_over_quota_is_not_sick(void **state)
{
	idle_node_without_space("nvme:write:enospc");
	idle_node_without_space("nvme:write:edquot");
	idle_node_without_space("nvme:write:efbig");
}

static void eperm_is_read_only(void **state)
{
	struct rig r;

	rig_init_memory(&r);
	r.o.probe_ns = 5 * MSEC;
	r.o.recover_ns = 50 * MSEC;
	assert_int_equal(node_fault_set("nvme:write:eperm", NULL, 0), 0);
	owner_open(&r, &before);
	rig_until(&r, r.n->state == NODE_DEGRADED);
	assert_non_null(strstr(r.n->why, "read-only"));
	assert_int_equal(to_nvme(r.n)->health.bad_row, 0);
	node_fault_set(NULL, NULL, 0);
	rig_until(&r, r.n->state == NODE_ONLINE);
	rig_fini(&r);
}

/* A node that was degraded for another reason gets well all the same. */
static void full_device_answers_probes(void **state)
{
	struct rig r;

	medium_rig(&r);
	assert_int_equal(node_fault_set("nvme:write:edquot", NULL, 0), 0);
	for (int i = 0; i < 3; i++)
		nvme_miss(to_nvme(r.n), "test", now_ns());
	assert_int_equal(r.n->state, NODE_DEGRADED);
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_true(to_nvme(r.n)->health.full);
	rig_fini(&r);
}

/* The look at the file system may not have seen them. */
static void own_writes_under_way_take_room(void **state)
{
	struct nvme *nv;
	struct rig r;

	rig_init(&r);
	r.o.sparse = true;
	r.o.free_floor_pct = 1;
	r.o.check_ns = 60 * NSEC_PER_SEC;
	assert_int_equal(node_fault_set("nvme:write:stall:ms=500", NULL, 0),
			 0);
	owner_open(&r, &before);
	nv = to_nvme(r.n);
	rig_until(&r, nv->zero.active && !nv->open.running);
	nv->open.next_ns = 0;
	nv->open.taken = 0;
	node_poll(r.n, 0);
	assert_int_equal(nv->open.taken, NVME_ZERO_BYTES);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(bad_block_of_the_ring_is_got_over_by_an_idle_node),
		cmocka_unit_test(who_flushes_meanwhile_is_told),
		cmocka_unit_test(journal_given_up_is_tried_once_more_at_the_end),
		cmocka_unit_test(failing_checkpoint_is_not_tried_in_a_circle),
		cmocka_unit_test(who_waits_for_a_checkpoint_that_fails_is_told),
		cmocka_unit_test(checkpoint_needs_no_room_above_the_floor),
		cmocka_unit_test(checkpoint_without_journal_is_collected_in_slices),
		cmocka_unit_test(idle_node_over_quota_is_not_sick),
		cmocka_unit_test(eperm_is_read_only),
		cmocka_unit_test(full_device_answers_probes),
		cmocka_unit_test(own_writes_under_way_take_room),
	};

	return run_on_both_engines(tests);
}
