/* SPDX-License-Identifier: Apache-2.0 */
/* What a slot store does when its device fails, and the faults themselves. */
#include "daemon/node/fault.h"
#include "tests/lib/node_fault.h"

/* ---- the table ------------------------------------------------------------- */

static void wrong_rules_are_refused_with_a_sentence(void **state)
{
	static const char *const bad[] = {
		"nvme", "nvme:write", "nvme:wrote:eio", "nvme:write:burn",
		"nvme:write:eio:x=1", "nvme:write:eio:n=", "nvme:read:eio:n=-1",
		"nvme:read:eio:n=1x", "nvme:read:stall:ms=99999999999",
		"nvme:read:eio:p=1001", "nvme:read:eio:p=", "nvme:read:eio:seed=x",
		"nvme:read:eio:len=0",
		"a name that is longer than any node's name:read:eio",
	};

	for (unsigned int i = 0; i < ARRAY_SIZE(bad); i++) {
		struct errmsg msg = { .text = "" };

		assert_int_equal(fault_set(bad[i], &msg), -EINVAL);
		assert_string_not_equal(msg.text, "");
	}
	assert_int_equal(fault_set(";;", NULL), 0);
	assert_int_equal(fault_set("", NULL), 0);
}

static void rules_skip_and_count(void **state)
{
	struct rig r;
	struct node_slot slot;
	uint32_t crc;

	fault_rig(&r, 20000, 20);
	crc = page_new(&r, &slot);
	faults("other:read:eio;nvme0:read:eio:skip=1:n=2");
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EIO);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EIO);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	assert_int_equal(node_fault_hits(), 2);
	rig_fini(&r);
}

static void rules_for_a_place_leave_others_alone(void **state)
{
	struct node_slot slot[2];
	uint32_t crc[2];
	char rule[80];
	struct rig r;

	fault_rig(&r, 20000, 20);
	crc[0] = page_new(&r, &slot[0]);
	crc[1] = page_new(&r, &slot[1]);
	snprintf(rule, sizeof(rule), "nvme:read:eio:off=%llu",
		 (unsigned long long)(slot[1].off + LEN - 1));
	faults(rule);
	assert_int_equal(op_read(&r, &slot[0], r.mem, LEN, "p", crc[0]), 0);
	assert_int_equal(op_read(&r, &slot[1], r.mem, LEN, "p", crc[1]), -EIO);
	snprintf(rule, sizeof(rule), "nvme:read:eio:off=%llu:len=4096",
		 (unsigned long long)(slot[1].off + LEN));
	faults(rule);
	assert_int_equal(op_read(&r, &slot[1], r.mem, LEN, "p", crc[1]), 0);
	rig_fini(&r);
}

/* Which of 200 reads fail, with a rule of chance? */
static void reads_by_chance(struct rig *r, const struct node_slot *slot,
			    uint32_t crc, const char *rule, bool *bad)
{
	faults(rule);
	for (int i = 0; i < 200; i++)
		bad[i] = op_read(r, slot, r->mem, LEN, "p", crc);
}

static void chance_has_a_seed(void **state)
{
	bool a[200], b[200], c[200];
	struct node_slot slot;
	unsigned int nr = 0;
	uint32_t crc;
	struct rig r;

	rig_init_memory(&r);
	r.o.degrade_after = r.o.fail_after = 1000000;
	rig_open(&r);
	crc = page_new(&r, &slot);
	reads_by_chance(&r, &slot, crc, "nvme:read:eio:p=300:seed=5", a);
	reads_by_chance(&r, &slot, crc, "nvme:read:eio:p=300:seed=5", b);
	reads_by_chance(&r, &slot, crc, "nvme:read:eio:p=300:seed=6", c);
	assert_memory_equal(a, b, sizeof(a));
	assert_memory_not_equal(a, c, sizeof(a));
	for (int i = 0; i < 200; i++)
		nr += a[i];
	assert_in_range(nr, 30, 90);
	reads_by_chance(&r, &slot, crc, "nvme:read:eio:p=0", a);
	for (int i = 0; i < 200; i++)
		assert_false(a[i]);
	rig_fini(&r);
}

static void reordered_writes_all_happen(void **state)
{
	enum { N = 16 };
	static struct op op[N];
	struct node_slot slot[N];
	bool mixed = false;
	struct rig r;

	fault_rig(&r, 20000, 20);
	faults("nvme:write:reorder:ms=60:seed=3");
	for (int i = 0; i < N; i++) {
		char *at = r.mem + (size_t)i * LEN;

		fill(at, LEN, 100u + (unsigned int)i);
		assert_int_equal(node_slot_alloc(r.n, LEN, &slot[i]), 0);
		op_init(&op[i], NODE_WRITE, &slot[i], at, LEN, "p");
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	for (int i = 0; i < N; i++) {
		rig_until(&r, op[i].nr_release);
		assert_int_equal(op[i].told, 0);
		mixed |= i && op[i].done_ns < op[i - 1].done_ns;
	}
	assert_true(mixed);
	faults(NULL);
	for (int i = 0; i < N; i++) {
		assert_int_equal(op_read(&r, &slot[i], r.mem, LEN, "p",
					 op[i].io.crc), 0);
		assert_filled(r.mem, LEN, 100u + (unsigned int)i);
	}
	rig_fini(&r);
}

/* ---- errors ---------------------------------------------------------------- */

static void failed_write_is_told_and_its_slot_kept_away(void **state)
{
	struct node_slot slot;
	struct rig r;
	uint32_t crc;

	fault_rig(&r, 20000, 20);
	faults("nvme:write:eio:n=1");
	assert_int_equal(op_write(&r, &slot, r.mem, LEN, "p", &crc), -EIO);
	assert_int_equal(r.n->stats.dir[NODE_WRITE].eio, 1);
	assert_int_equal(r.n->stats.dir[NODE_WRITE].ios, 0);
	assert_int_equal(node_slot_free(r.n, &slot), 0);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.bad_bytes, LEN);
	assert_int_equal(r.n->used, 0);
	assert_int_equal(r.n->state, NODE_ONLINE);
	page_new(&r, &slot);
	rig_fini(&r);
}

static void bad_slots_come_back_when_they_could_be_rewritten(void **state)
{
	struct node_slot slot;
	struct rig r;
	uint32_t crc;

	rig_init_memory(&r);
	rig_open(&r);
	faults("nvme:write:eio:n=1");
	assert_int_equal(op_write(&r, &slot, r.mem, LEN, "p", &crc), -EIO);
	assert_int_equal(node_slot_free(r.n, &slot), 0);
	rig_until(&r, r.n->stats.zeroed_bytes == r.n->capacity);
	assert_int_equal(r.n->stats.bad_slots, 0);
	rig_fini(&r);
}

static void enodata_is_a_media_error(void **state)
{
	struct node_slot slot;
	struct rig r;
	uint32_t crc;

	fault_rig(&r, 20000, 20);
	crc = page_new(&r, &slot);
	faults("nvme:read:enodata:n=1");
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EIO);
	assert_int_equal(r.n->stats.dir[NODE_READ].enodata, 1);
	assert_int_equal(node_slot_free(r.n, &slot), 0);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.bad_slots, 1);
	rig_fini(&r);
}

static void short_transfer_is_an_error(void **state)
{
	struct node_slot slot;
	struct rig r;
	uint32_t crc;

	fault_rig(&r, 20000, 20);
	crc = page_new(&r, &slot);
	faults("nvme:read:short:n=1;nvme:write:short:n=1");
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EIO);
	assert_int_equal(op_write(&r, &slot, r.mem, LEN, "p", &crc), -EIO);
	assert_int_equal(r.n->stats.dir[NODE_READ].nr_short, 1);
	assert_int_equal(r.n->stats.dir[NODE_WRITE].nr_short, 1);
	rig_fini(&r);
}

static int read_flipped(struct rig *r)
{
	struct node_slot slot;
	uint32_t crc = page_new(r, &slot);

	faults("nvme:read:flip:n=1");
	return op_read(r, &slot, r->mem, LEN, "p", crc);
}

static void flipped_bit_is_a_miss(void **state)
{
	struct rig r;

	fault_rig(&r, 20000, 20);
	assert_int_equal(read_flipped(&r), -EBADMSG);
	assert_int_equal(r.n->stats.crc_bad, 1);
	rig_fini(&r);

	/* and without the check it would have been a hit with a wrong byte */
	setenv("KVMM_BREAK", "crc", 1);
	fault_rig(&r, 20000, 20);
	unsetenv("KVMM_BREAK");
	assert_int_equal(read_flipped(&r), 0);
	assert_int_equal(node_fault_hits(), 1);
	rig_fini(&r);
}

static void write_that_never_happened_is_a_miss(void **state)
{
	struct node_slot slot;
	struct rig r;
	uint32_t crc;

	fault_rig(&r, 20000, 20);
	fill(r.mem, LEN, 2);
	faults("nvme:write:drop:n=1");
	assert_int_equal(op_write(&r, &slot, r.mem, LEN, "p", &crc), 0);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EBADMSG);
	rig_fini(&r);
}

static void torn_write_and_stale_read_are_misses(void **state)
{
	struct node_slot slot;
	uint32_t crc;
	struct rig r;

	fault_rig(&r, 60000, 20);
	faults("nvme:write:torn:n=1");
	crc = page_new(&r, &slot);		/* says that it is well */
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EBADMSG);
	faults("nvme:read:stale:n=1");
	crc = page_new(&r, &slot);
	memset(r.mem, 7, LEN);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EBADMSG);
	assert_int_equal(r.n->stats.crc_bad, 2);
	rig_fini(&r);
}

static void rules_can_change_while_serving(void **state)
{
	struct node_slot slot;
	struct rig r;
	uint32_t crc;

	fault_rig(&r, 20000, 20);
	crc = page_new(&r, &slot);
	faults("nvme:read:eio");
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), -EIO);
	faults(NULL);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	rig_fini(&r);
}

/*
 * Every fault at random, for a while: each I/O ends exactly once, nothing that
 * was told to be right is wrong, the accounts agree, and it all can be ended.
 */
static void random_faults_break_no_promise(void **state)
{
	enum { N = 24 };
	static const char *const spec[] = {
		"", "nvme:read:eio:n=3", "nvme:write:eio:n=2",
		"nvme:read:flip:n=2", "nvme:write:drop:n=3",
		"nvme:read:short:n=1;nvme:write:short:n=1",
		"nvme:read:stall:ms=90:n=4;nvme:write:stall:ms=90:n=4",
		"nvme:write:enospc:n=1", "nvme:write:erofs:n=1",
		"nvme:read:enodata:n=1",
	};
	static struct {
		struct op	op;
		struct node_slot slot;
		uint32_t	crc;
		uint64_t	seed;
		bool		there;
		bool		out;
	} page[N];
	unsigned int ios = test_long() ? 10000 : 300;
	unsigned int good = 0, bad = 0, started = 0;
	uint64_t end = deadline_in(PATIENCE_NS);
	struct rng rng;
	struct rig r;

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&rng, test_seed());
	memset(page, 0, sizeof(page));
	rig_init_memory(&r);
	r.o.io_timeout_ns = 50 * MSEC;
	r.o.probe_ns = 5 * MSEC;
	r.o.recover_ns = 20 * MSEC;
	r.o.depth = 6;
	rig_open(&r);
	rig_until(&r, r.n->stats.zeroed_bytes == r.n->capacity);
	while (started < ios && !deadline_past(end)) {
		unsigned int k = (unsigned int)rng_below(&rng, N);
		struct op *op = &page[k].op;
		char *mem = r.mem + k * LEN;

		if (!rng_below(&rng, 20))
			faults(spec[rng_below(&rng, ARRAY_SIZE(spec))]);
		if (page[k].out && op->nr_release) {
			page[k].out = false;
			if (op->io.dir == NODE_READ && !op->io.result)
				assert_filled(mem, LEN, page[k].seed);
			if (op->io.dir == NODE_WRITE)
				page[k].crc = op->io.crc;
			good += !op->io.result;
			bad += !!op->io.result;
			if (op->io.result) {
				assert_int_equal(node_slot_free(r.n,
							&page[k].slot), 0);
				page[k].there = false;
			}
		} else if (!page[k].out && page[k].there) {
			memset(mem, 0, LEN);
			op_init(op, NODE_READ, &page[k].slot, mem, LEN, "f");
			op->io.crc = page[k].crc;
			page[k].out = !node_submit(r.n, &op->io);
			started += page[k].out;
		} else if (!page[k].out &&
			   !node_slot_alloc(r.n, LEN, &page[k].slot)) {
			page[k].seed = rng_next(&rng);
			fill(mem, LEN, page[k].seed);
			op_init(op, NODE_WRITE, &page[k].slot, mem, LEN, "f");
			page[k].out = !node_submit(r.n, &op->io);
			page[k].there = page[k].out;
			started += page[k].out;
			if (!page[k].out)
				assert_int_equal(node_slot_free(r.n,
							&page[k].slot), 0);
		}
		if (!rng_below(&rng, 3))
			rig_poll(&r, 2);
	}
	print_message("# %u started, %u good, %u bad\n", started, good, bad);

	/* and when it is over, it is over */
	faults(NULL);
	for (unsigned int k = 0; k < N; k++)
		if (page[k].out)
			rig_until(&r, page[k].op.nr_release);
	rig_until(&r, r.n->state == NODE_ONLINE && node_writable(r.n));
	page_new(&r, &page[0].slot);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(wrong_rules_are_refused_with_a_sentence),
		cmocka_unit_test(rules_skip_and_count),
		cmocka_unit_test(rules_for_a_place_leave_others_alone),
		cmocka_unit_test(chance_has_a_seed),
		cmocka_unit_test(reordered_writes_all_happen),
		cmocka_unit_test(failed_write_is_told_and_its_slot_kept_away),
		cmocka_unit_test(
			bad_slots_come_back_when_they_could_be_rewritten),
		cmocka_unit_test(enodata_is_a_media_error),
		cmocka_unit_test(short_transfer_is_an_error),
		cmocka_unit_test(flipped_bit_is_a_miss),
		cmocka_unit_test(write_that_never_happened_is_a_miss),
		cmocka_unit_test(torn_write_and_stale_read_are_misses),
		cmocka_unit_test(rules_can_change_while_serving),
		cmocka_unit_test(random_faults_break_no_promise),
	};

	return run_on_both_engines(tests);
}
