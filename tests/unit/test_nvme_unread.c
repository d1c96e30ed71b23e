/* SPDX-License-Identifier: Apache-2.0 */
/* What cannot be read now is not damaged: a store waits, and loses nothing. */
#include "tests/lib/node_medium.h"

static void fault_at(uint64_t off, uint64_t blocks)
{
	char spec[100];

	snprintf(spec, sizeof(spec), "nvme:openread:eio:off=%llu:len=%llu",
		 (unsigned long long)off,
		 (unsigned long long)(blocks * NVME_BLOCK));
	assert_int_equal(node_fault_set(spec, NULL, 0), 0);
}

/* With blocks that cannot be read it is not opened, and not touched, although it
 * may be rebuilt; then it is, with all that was in it. */
static void assert_waits(struct rig *r, uint64_t off, uint64_t blocks)
{
	char *was = malloc(r->o.bytes), *is = malloc(r->o.bytes);

	assert_non_null(was);
	assert_non_null(is);
	peek(r, 0, was, r->o.bytes);
	fault_at(off, blocks);
	r->o.rebuild = true;
	r->o.probe_ns = MSEC;
	owner_init(&after);
	rig_make(r);
	node_set_owner(r->n, &after.ops);
	rig_until(r, r->n->stats.open_fails >= 2);
	assert_non_null(strstr(r->n->why, "reading what"));
	assert_int_equal(after.recovered, 0);
	peek(r, 0, is, r->o.bytes);
	assert_memory_equal(is, was, r->o.bytes);
	node_fault_set(NULL, NULL, 0);
	rig_until(r, r->n->state == NODE_ONLINE);
	owners_equal(&after, &before);
	assert_int_equal(r->n->stats.recover_dropped, 0);
	rig_close(r);
	r->o.rebuild = false;
	free(was);
	free(is);
}

static void assert_does_without(struct rig *r, uint64_t off, uint64_t blocks)
{
	fault_at(off, blocks);
	owner_open(r, &after);
	assert_true(node_fault_hits() > 0);
	owners_equal(&after, &before);
	assert_int_equal(r->n->stats.recover_dropped, 0);
	node_fault_set(NULL, NULL, 0);
	rig_close(r);
}

static void journal_that_cannot_be_read_is_not_at_its_end(void **state)
{
	struct rig r;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	rig_close(&r);
	assert_waits(&r, journal_at(1), 1);
	assert_waits(&r, journal_at(3), 1);
	assert_waits(&r, super.journal_off, super.journal_bytes / NVME_BLOCK);
	rig_fini(&r);
}

/* Nor does a damaged block end it while what is behind cannot be asked. */
static void damage_before_what_cannot_be_read_is_no_end(void **state)
{
	struct rig r;

	long_rig(&r);
	for (int i = 0; i < 12; i++)
		add_blocks(&r, &before, 6);
	rig_close(&r);
	poke_random(&r, journal_at(10) + 100, 1, 3);
	fault_at(journal_at(64), 20);
	owner_init(&after);
	rig_make(&r);
	node_set_owner(r.n, &after.ops);
	rig_until(&r, r.n->stats.open_fails >= 2);
	node_fault_set(NULL, NULL, 0);
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_int_equal(after.nr_found, 71 * PER_BLOCK);
	assert_int_equal(r.n->stats.recover_dropped, 1);
	rig_fini(&r);
}

static void checkpoint_that_cannot_be_read_is_not_damaged(void **state)
{
	struct rig r;
	int area;

	scan_rig(&r);
	add_blocks(&r, &before, 4);
	make_ckpt(&r, &before);
	make_ckpt(&r, &before);
	area = newest_area(&r);
	rig_close(&r);
	/* the older one and the journal say all of it */
	assert_does_without(&r, ckpt_at(area, 0), 1);
	assert_does_without(&r, ckpt_at(area, 2), 1);
	assert_does_without(&r, ckpt_at(!area, 0), 1);
	assert_waits(&r, super.ckpt_off, 2 * super.ckpt_bytes / NVME_BLOCK);

	/* the older one is too old */
	owner_open(&r, &after);
	before = after;
	fill_half(&r, &before);
	rig_close(&r);
	assert_waits(&r, ckpt_at(area, 0), 1);
	assert_waits(&r, ckpt_at(area, 2), 1);
	assert_does_without(&r, ckpt_at(!area, 0), 1);
	rig_fini(&r);
}

/* Whatever fails at random while it is opened: it is opened in the end, and
 * nothing is missing. */
static void random_faults_while_opening_lose_nothing(void **state)
{
	unsigned int rounds = test_long() ? 400 : 30;
	struct rng rng;
	struct rig r;
	char spec[400];

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&rng, test_seed());
	scan_rig(&r);
	r.o.probe_ns = MSEC;
	r.o.rebuild = true;
	add_blocks(&r, &before, 4);
	make_ckpt(&r, &before);
	for (unsigned int i = 0; i < rounds; i++) {
		uint64_t s = rng_next(&rng) >> 8;

		if (!rng_below(&rng, 3))
			make_ckpt(&r, &before);
		rig_close(&r);
		snprintf(spec, sizeof(spec),
			 "nvme:openread:eio:p=%u:seed=%llu:n=40;nvme:openread:short:p=%u:seed=%llu:n=9;nvme:openwrite:eio:p=300:seed=%llu:n=3;nvme:openwrite:short:p=300:seed=%llu:n=2;nvme:openwrite:torn:p=200:seed=%llu:n=1",
			 (unsigned int)rng_below(&rng, 400),
			 (unsigned long long)s,
			 (unsigned int)rng_below(&rng, 200),
			 (unsigned long long)s + 1, (unsigned long long)s + 2,
			 (unsigned long long)s + 3, (unsigned long long)s + 4);
		assert_int_equal(node_fault_set(spec, NULL, 0), 0);
		owner_init(&after);
		rig_make(&r);
		node_set_owner(r.n, &after.ops);
		rig_until(&r, r.n->state == NODE_ONLINE);
		assert_int_equal(node_fault_set(NULL, NULL, 0), 0);
		owners_equal(&after, &before);
		assert_int_equal(r.n->stats.recover_dropped, 0);
		before = after;
	}
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(journal_that_cannot_be_read_is_not_at_its_end),
		cmocka_unit_test(damage_before_what_cannot_be_read_is_no_end),
		cmocka_unit_test(checkpoint_that_cannot_be_read_is_not_damaged),
		cmocka_unit_test(random_faults_while_opening_lose_nothing),
	};

	return run_on_both_engines(tests);
}
