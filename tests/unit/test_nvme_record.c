/* SPDX-License-Identifier: Apache-2.0 */
/* What a slot store remembers across a restart. */
#include "daemon/node/nvme.h"
#include "tests/lib/node_owner.h"

static struct owner before, after;

static void empty_store_has_nothing_to_tell(void **state)
{
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	assert_int_equal(before.err, -ENOENT);
	assert_int_equal(before.nr_found, 0);
	assert_true(node_persistent(r.n));
	rig_fini(&r);
}

static void records_are_found_again_in_order(void **state)
{
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	for (unsigned int i = 0; i < 1000; i++)
		assert_int_equal(owner_add(&r, &before, 4096 * (1 + i % 3),
					   (uint8_t)i, NULL), 0);
	for (unsigned int i = 0; i < 1000; i += 7)
		owner_free(&r, &before.rec[i]);
	rig_poll(&r, 0);
	assert_true(r.n->used > 0);
	after.nr = (unsigned int)(r.n->used / 4096);
	rig_close(&r);		/* orderly: nothing is lost */

	unsigned int blocks = after.nr;

	owner_open(&r, &after);
	assert_int_equal(after.err, 0);
	owners_equal(&after, &before);
	assert_int_equal(r.n->used, (uint64_t)blocks * 4096);
	assert_int_equal(r.n->stats.recovered, after.nr);
	assert_int_equal(r.n->stats.recover_dropped, 0);
	assert_true(r.n->stats.recover_ns > 0);

	/* and again, with changes on both sides of the restart */
	owner_free(&r, &after.rec[3]);
	assert_int_equal(owner_add(&r, &after, 8192, 1, NULL), 0);
	rig_close(&r);
	before = after;
	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_fini(&r);
}

static void data_of_a_record_is_read_with_its_checksum(void **state)
{
	struct node_slot slot;
	struct node_record rec = { .len = 100000 };
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	fill(r.mem, 100000, 3);
	assert_int_equal(op_write(&r, &slot, r.mem, 100000, "page", &rec.crc),
			 0);
	rec.slot = slot;
	node_record_add(r.n, &rec);
	rig_close(&r);
	owner_open(&r, &after);
	assert_int_equal(after.nr, 1);
	memset(r.mem, 0, 100000);
	assert_int_equal(op_read(&r, &after.rec[0].rec.slot, r.mem, 100000,
				 "page", after.rec[0].rec.crc), 0);
	assert_filled(r.mem, 100000, 3);
	rig_fini(&r);
}

static void what_the_owner_does_not_take_is_free(void **state)
{
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	for (unsigned int i = 0; i < 600; i++)
		assert_int_equal(owner_add(&r, &before, 4096, i % 2, NULL), 0);
	rig_close(&r);
	owner_init(&after);
	rig_make(&r);
	after.refuse = 1;
	node_set_owner(r.n, &after.ops);
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_int_equal(after.nr_found, 600);
	assert_int_equal(r.n->used, 300 * 4096);
	assert_int_equal(r.n->stats.recovered, 300);
	rig_close(&r);
	owner_open(&r, &after);		/* and does not come back */
	assert_int_equal(after.nr_found, 300);
	rig_fini(&r);
}

static void labels_are_found_before_records(void **state)
{
	static uint8_t big[NODE_LABEL_MAX];
	uint32_t id[3];
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	memset(big, 'b', sizeof(big));
	assert_int_equal(node_label_put(r.n, "a label", 8, &id[0]), 0);
	assert_int_equal(node_label_put(r.n, big, sizeof(big), &id[1]), 0);
	assert_int_equal(node_label_put(r.n, "gone", 5, &id[2]), 0);
	assert_int_equal(node_label_put(r.n, big, sizeof(big) + 1, &id[2]),
			 -E2BIG);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	node_label_del(r.n, id[2]);
	rig_close(&r);
	owner_open(&r, &after);
	assert_int_equal(after.nr_labels_found, 2);
	assert_int_equal(after.label[0].id, id[0]);
	assert_string_equal((char *)after.label[0].bytes, "a label");
	assert_int_equal(after.label[1].id, id[1]);
	assert_int_equal(after.label[1].len, sizeof(big));

	/* numbers are not used again */
	assert_int_equal(node_label_put(r.n, "new", 4, &id[0]), 0);
	assert_true(id[0] > id[2]);
	rig_close(&r);

	/* one that is refused is deleted */
	owner_init(&after);
	rig_make(&r);
	after.refuse_label = 'b';
	node_set_owner(r.n, &after.ops);
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_int_equal(after.nr_labels_found, 3);
	rig_close(&r);
	owner_open(&r, &after);
	assert_int_equal(after.nr_labels_found, 2);
	rig_fini(&r);
}

static void label_that_cannot_be_taken_now_is_asked_for_again(void **state)
{
	struct owned_label *l = &after.label[0];
	struct rig r;
	uint32_t id;

	rig_init(&r);
	owner_open(&r, &before);
	assert_int_equal(node_label_put(r.n, "a label", 8, &id), 0);
	assert_int_equal(node_label_put(r.n, "busy", 5, &id), 0);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	rig_close(&r);

	owner_init(&after);
	rig_make(&r);
	after.refuse_label = 'b';
	after.label_err = -ENOMEM;
	node_set_owner(r.n, &after.ops);
	rig_until(&r, after.nr_labels_found == 3);
	assert_int_equal(r.n->state, NODE_STARTING);
	assert_non_null(strstr(r.n->why, "cannot be taken"));
	assert_true(node_next_deadline(r.n) > now_ns());
	/* it dies meanwhile: nothing was deleted */
	rig_close(&r);

	owner_init(&after);
	rig_make(&r);
	after.refuse_label = 'b';
	after.label_err = -ENOMEM;
	node_set_owner(r.n, &after.ops);
	rig_until(&r, after.nr_labels_found == 2);
	after.refuse_label = -1;
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_int_equal(after.nr_found, 1);
	assert_true(l[0].used && l[1].used);
	assert_int_equal(l[1].id, id);
	rig_fini(&r);
}

/* Neither it nor those behind it are lost, whether kvmmd lives on or not. */
static void record_that_cannot_be_taken_now_is_handed_over_again(void **state)
{
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	for (unsigned int i = 0; i < 40; i++)
		assert_int_equal(owner_add(&r, &before, 4096, i % 2, NULL), 0);
	rig_close(&r);

	owner_init(&after);
	rig_make(&r);
	after.short_of = 15;
	node_set_owner(r.n, &after.ops);
	rig_until(&r, strstr(r.n->why, "record 14 cannot be taken"));
	assert_int_equal(r.n->state, NODE_STARTING);
	assert_true(node_next_deadline(r.n) > now_ns());
	assert_int_equal(r.n->used, after.nr * 4096u);
	rig_close(&r);

	owner_init(&after);
	rig_make(&r);
	after.short_of = 15;
	after.refuse = 1;
	node_set_owner(r.n, &after.ops);
	rig_until(&r, strstr(r.n->why, "record 14 cannot be taken"));
	after.short_of = 0;
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_int_equal(after.nr_found, 40);
	assert_int_equal(after.nr, 20);
	assert_int_equal(r.n->stats.recovered, 20);
	assert_int_equal(r.n->stats.recover_dropped, 0);
	assert_int_equal(r.n->used, 20 * 4096u);
	rig_fini(&r);
}

static void labels_have_a_limit(void **state)
{
	static uint8_t big[NODE_LABEL_MAX];
	unsigned int nr = 0;
	uint32_t id;
	struct rig r;
	int err;

	rig_init(&r);
	owner_open(&r, &before);
	memset(big, 'c', sizeof(big));
	while (!(err = node_label_put(r.n, big, 30000, &id)))
		nr++;
	assert_int_equal(err, -ENOSPC);
	assert_true(nr >= 2);
	rig_close(&r);
	owner_open(&r, &after);
	assert_int_equal(after.nr_labels_found, nr);
	rig_fini(&r);
}

static void removed_record_does_not_come_back(void **state)
{
	struct owned *w = NULL;
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	assert_int_equal(owner_add(&r, &before, 4096, 0, &w), 0);
	assert_int_equal(owner_flush(&r), 0);
	node_record_del(r.n, &w->rec.slot);
	node_record_del(r.n, &w->rec.slot);	/* no effect */
	assert_int_equal(node_slot_bytes(r.n, &w->rec.slot), 4096);
	owner_free(&r, w);
	rig_close(&r);
	owner_open(&r, &after);
	assert_int_equal(after.nr_found, 0);
	assert_int_equal(r.n->used, 0);
	rig_fini(&r);
}

static void quarantine_is_kept(void **state)
{
	struct node_slot slot, keep;
	uint32_t crc;
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	assert_int_equal(node_slot_alloc(r.n, 65536, &keep), 0);
	assert_int_equal(node_fault_set("nvme:write:eio:n=1", NULL, 0), 0);
	assert_int_equal(op_write(&r, &slot, r.mem, 65536, "p", &crc), -EIO);
	node_record_add(r.n, &(struct node_record){ .slot = keep,
						    .len = 65536 });
	assert_int_equal(node_slot_free(r.n, &slot), 0);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.bad_slots, 1);
	rig_close(&r);
	owner_open(&r, &after);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.bad_slots, 1);
	assert_int_equal(r.n->stats.bad_bytes, 65536);
	assert_int_equal(r.n->used, 65536);

	/* written anew as a whole it is well, and stays so */
	owner_free(&r, &after.rec[0]);
	rig_until(&r, !r.n->stats.bad_slots);
	rig_close(&r);
	owner_open(&r, &after);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.bad_slots, 0);
	rig_fini(&r);
}

static void without_an_owner_it_starts_empty(void **state)
{
	uint32_t id;
	struct rig r;

	rig_init(&r);
	owner_open(&r, &before);
	assert_int_equal(owner_add(&r, &before, 4096, 0, NULL), 0);
	rig_close(&r);
	rig_open(&r);
	assert_false(node_persistent(r.n));
	assert_int_equal(r.n->used, 0);
	assert_int_equal(node_label_put(r.n, "x", 1, &id), -EOPNOTSUPP);
	assert_int_equal(node_record_flush(r.n, flush_told, &id), -EOPNOTSUPP);
	rig_close(&r);
	owner_open(&r, &after);		/* what was there is void */
	assert_int_equal(after.nr_found, 0);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(empty_store_has_nothing_to_tell),
		cmocka_unit_test(records_are_found_again_in_order),
		cmocka_unit_test(data_of_a_record_is_read_with_its_checksum),
		cmocka_unit_test(what_the_owner_does_not_take_is_free),
		cmocka_unit_test(labels_are_found_before_records),
		cmocka_unit_test(label_that_cannot_be_taken_now_is_asked_for_again),
		cmocka_unit_test(record_that_cannot_be_taken_now_is_handed_over_again),
		cmocka_unit_test(labels_have_a_limit),
		cmocka_unit_test(removed_record_does_not_come_back),
		cmocka_unit_test(quarantine_is_kept),
		cmocka_unit_test(without_an_owner_it_starts_empty),
	};

	return run_on_both_engines(tests);
}
