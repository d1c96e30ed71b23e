/* SPDX-License-Identifier: Apache-2.0 */
/* The journal and its checkpoints: what they cost, and what when they fail. */
#include "daemon/node/nvme.h"
#include "tests/lib/node_owner.h"

static struct owner before, after;

/* Add and remove until @nr checkpoints are complete. */
static void churn(struct rig *r, struct owner *o, uint64_t nr)
{
	uint64_t end = deadline_in(PATIENCE_NS);
	struct rng rng;

	rng_seed(&rng, test_seed());
	while (r->n->stats.ckpts < nr && !deadline_past(end)) {
		for (unsigned int i = 0; i < 200; i++) {
			unsigned int k = (unsigned int)rng_below(&rng, 4000);
			struct owned *w = &o->rec[k];

			if (k < o->nr && w->used) {
				owner_free(r, w);
			} else if (k < o->nr) {
				unsigned int top = o->nr;

				o->nr = k;	/* reuse its place */
				owner_add(r, o, 4096, (uint8_t)k, NULL);
				o->nr = top;
			} else {
				owner_add(r, o, 4096, (uint8_t)k, NULL);
			}
		}
		rig_poll(r, 1);
	}
	assert_true(r->n->stats.ckpts >= nr);
}

static void checkpoints_free_the_journal(void **state)
{
	uint64_t ring;
	struct rig r;

	rig_init(&r);
	r.o.records = 4096;
	owner_open(&r, &before);
	ring = to_nvme(r.n)->open.super.journal_bytes;
	churn(&r, &before, 5);
	assert_true(r.n->stats.journal_bytes > ring);
	assert_true(r.n->stats.journal_used <= ring);
	assert_true(r.n->stats.ckpt_bytes > 0);
	rig_close(&r);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	assert_int_equal(r.n->stats.recover_dropped, 0);
	rig_fini(&r);
}

static void entry_without_memory_is_made_up_for(void **state)
{
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	for (unsigned int i = 0; i < 500; i++)
		assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(owner_flush(&r), 0);
	assert_int_equal(node_fault_set("nvme:get:enomem:n=3", NULL, 0), 0);
	for (unsigned int i = 0; i < 500; i++)
		owner_free(&r, &before.rec[i]);
	for (unsigned int i = 0; i < 3000 && !r.n->stats.journal_lost; i++)
		owner_add(&r, &before, 4096, 1, NULL);
	assert_true(r.n->stats.journal_lost > 0);
	assert_int_equal(owner_flush(&r), 0);	/* by a checkpoint */
	assert_true(r.n->stats.ckpts > 0);
	rig_close(&r);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_fini(&r);
}

static void journal_that_fails_is_told_and_tried_again(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.probe_ns = 10 * MSEC;
	owner_open(&r, &before);
	assert_int_equal(node_fault_set("nvme:journal:eio:n=2", NULL, 0), 0);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(owner_flush(&r), -EIO);
	assert_int_equal(node_slot_alloc(r.n, 4096,
					 &(struct node_slot){ 0 }), -EAGAIN);
	assert_false(node_writable(r.n));
	rig_until(&r, node_writable(r.n));
	assert_int_equal(r.n->stats.journal_fails, 2);
	assert_int_equal(owner_flush(&r), 0);
	rig_close(&r);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_fini(&r);
}

/* The medium said that it had a group, and had half of it. */
static void torn_group_leaves_its_beginning(void **state)
{
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	assert_int_equal(node_fault_set("nvme:journal:torn:n=1", NULL, 0), 0);
	for (unsigned int i = 0; i < 31 * 8; i++)
		assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(owner_flush(&r), 0);
	rig_close(&r);
	owner_open(&r, &after);
	assert_int_equal(after.nr, 31 * 4);
	for (unsigned int i = 0; i < after.nr; i++)
		assert_memory_equal(&after.rec[i].rec, &before.rec[i].rec,
				    sizeof(struct node_record));
	rig_fini(&r);
}

static void stalled_journal_holds_nobody_up(void **state)
{
	struct node_slot slot;
	uint32_t crc;
	int told = 1;
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	assert_int_equal(node_fault_set("nvme:journal:stall:ms=1500:n=1", NULL,
					0), 0);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(node_record_flush(r.n, flush_told, &told), 0);
	rig_poll(&r, 0);
	fill(r.mem, 65536, 1);
	assert_int_equal(op_write(&r, &slot, r.mem, 65536, "p", &crc), 0);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), 0);
	assert_int_equal(told, 1);
	rig_until(&r, told != 1);
	assert_int_equal(told, 0);
	rig_fini(&r);
}

static void node_ends_although_its_journal_is_refused(void **state)
{
	int told = 1;
	struct rig r;

	rig_init(&r);
	r.o.probe_ns = 5 * MSEC;
	owner_open(&r, &before);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(node_fault_set("nvme:journal:eio", NULL, 0), 0);
	assert_int_equal(node_record_flush(r.n, flush_told, &told), 0);
	rig_close(&r);
	assert_true(told < 0);
	assert_int_equal(node_fault_set(NULL, NULL, 0), 0);
	owner_open(&r, &after);
	assert_int_equal(after.nr, 0);
	rig_fini(&r);
}

static void power_cut_makes_no_device_sick(void **state)
{
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	/* records of what is not there */
	for (unsigned int i = 0; i < 20; i++)
		assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	rig_close(&r);
	owner_open(&r, &after);
	for (unsigned int i = 0; i < 20; i++) {
		const struct node_record *rec = &after.rec[i].rec;

		assert_int_equal(op_read(&r, &rec->slot, r.mem, rec->len, "p",
					 rec->crc), -EBADMSG);
		owner_free(&r, &after.rec[i]);
	}
	rig_poll(&r, 0);
	assert_int_equal(r.n->state, NODE_ONLINE);
	assert_int_equal(r.n->stats.crc_bad, 20);
	assert_int_equal(r.n->stats.bad_slots, 0);
	rig_fini(&r);
}

static void journal_that_is_well_hides_no_failing_reads(void **state)
{
	struct node_slot slot[3];
	uint32_t crc[3];
	struct rig r;

	rig_init(&r);
	r.o.probe_ns = 60 * NSEC_PER_SEC;
	r.o.zero_bytes_s = 1;
	owner_open(&r, &before);
	for (int i = 0; i < 3; i++)
		assert_int_equal(op_write(&r, &slot[i], r.mem, 4096, "p",
					  &crc[i]), 0);
	assert_int_equal(node_fault_set("nvme:read:eio", NULL, 0), 0);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(op_read(&r, &slot[i], r.mem, 4096, "p",
					 crc[i]), -EIO);
		assert_int_equal(node_slot_free(r.n, &slot[i]), 0);
		assert_int_equal(owner_flush(&r), 0);
	}
	assert_int_equal(r.n->state, NODE_DEGRADED);
	rig_fini(&r);
}

static void records_have_a_limit(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.records = 100;
	owner_open(&r, &before);
	for (unsigned int i = 0; i < 100; i++)
		assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), -ENOSPC);
	owner_free(&r, &before.rec[0]);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	rig_fini(&r);
}

static void writes_pause_while_the_journal_is_behind(void **state)
{
	unsigned int nr = 0;
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	assert_int_equal(node_fault_set("nvme:journal:stall:ms=300:n=1", NULL,
					0), 0);
	/* half of what a ring of this size has is soon there */
	while (!owner_add(&r, &before, 4096, 0, NULL)) {
		owner_free(&r, &before.rec[before.nr - 1]);
		before.nr--;
		nr++;
	}
	assert_true(nr > 1000);
	assert_false(node_writable(r.n));
	rig_until(&r, node_writable(r.n));
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	rig_close(&r);
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_fini(&r);
}

static bool refused_once;

/* The medium can be written again before all is handed over. */
static unsigned int slow_records(struct node *n, const struct node_record *rec,
				 unsigned int nr, bool *taken, void *arg)
{
	usleep(60000);
	if (node_fault_hits()) {
		refused_once = true;
		node_fault_set(NULL, NULL, 0);
	}
	return owner_records(n, rec, nr, taken, arg);
}

/* A medium that refused to be written before the node was online. */
static void read_only_while_starting_is_not_for_good(void **state)
{
	struct node_slot slot;
	uint32_t crc;
	struct rig r;

	rig_init_memory(&r);
	r.o.probe_ns = 20 * MSEC;
	r.o.recover_ns = 50 * MSEC;
	owner_open(&r, &before);
	for (unsigned int i = 0; i < 2500; i++)
		assert_int_equal(owner_add(&r, &before, 4096, i % 2, NULL), 0);
	assert_int_equal(owner_flush(&r), 0);
	rig_close(&r);

	refused_once = false;
	assert_int_equal(node_fault_set("nvme:journal:erofs", NULL, 0), 0);
	owner_init(&after);
	after.ops.records = slow_records;
	after.refuse = 1;
	rig_make(&r);
	node_set_owner(r.n, &after.ops);
	rig_until(&r, r.n->state != NODE_STARTING);
	assert_int_equal(after.recovered, 1);
	assert_true(refused_once);
	rig_until(&r, node_writable(r.n));
	assert_int_equal(op_write(&r, &slot, r.mem, 4096, "a", &crc), 0);
	rig_fini(&r);
}

/* What had to be dropped is counted once, and blocks are no pages. */
static void sentence_tells_how_many_pages_were_dropped(void **state)
{
	struct rig r;

	rig_init_memory(&r);
	owner_open(&r, &before);
	for (unsigned int i = 0; i < 20; i++)
		assert_int_equal(owner_add(&r, &before, 4096, i % 2, NULL), 0);
	assert_int_equal(owner_flush(&r), 0);
	rig_close(&r);
	owner_init(&after);
	after.refuse = 1;
	rig_make(&r);
	node_set_owner(r.n, &after.ops);
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_non_null(strstr(r.n->why, "10 pages were found again, 10 had to be dropped"));
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(checkpoints_free_the_journal),
		cmocka_unit_test(entry_without_memory_is_made_up_for),
		cmocka_unit_test(journal_that_fails_is_told_and_tried_again),
		cmocka_unit_test(torn_group_leaves_its_beginning),
		cmocka_unit_test(stalled_journal_holds_nobody_up),
		cmocka_unit_test(node_ends_although_its_journal_is_refused),
		cmocka_unit_test(power_cut_makes_no_device_sick),
		cmocka_unit_test(journal_that_is_well_hides_no_failing_reads),
		cmocka_unit_test(records_have_a_limit),
		cmocka_unit_test(read_only_while_starting_is_not_for_good),
		cmocka_unit_test(sentence_tells_how_many_pages_were_dropped),
		cmocka_unit_test(writes_pause_while_the_journal_is_behind),
	};

	return run_on_both_engines(tests);
}
