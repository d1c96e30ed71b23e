/* SPDX-License-Identifier: Apache-2.0 */
/* The medium is told of what is empty, and only of that. */
#include <sys/stat.h>

#include "daemon/node/nvme.h"
#include "tests/lib/node.h"

#define LEN	((uint32_t)MIB)		/* a slot is a segment */
#define N	16u

struct page {
	struct node_slot slot;
	uint32_t	crc;
};

static uint64_t file_bytes(const struct rig *r)
{
	struct stat st;

	assert_int_equal(stat(r->path, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

static void sparse_rig(struct rig *r, bool discard)
{
	rig_init(r);
	r->o.sparse = true;
	r->o.discard = discard;
	r->o.probe_ns = 20 * MSEC;
	rig_open(r);
	rig_until(r, r->n->stats.zeroed_bytes == r->n->capacity);
}

static void page_put(struct rig *r, struct page *p, uint64_t seed)
{
	fill(r->mem, LEN, seed);
	assert_int_equal(op_write(r, &p->slot, r->mem, LEN, "p", &p->crc), 0);
}

static void page_get(struct rig *r, const struct page *p, uint64_t seed)
{
	memset(r->mem, 0, LEN);
	assert_int_equal(op_read(r, &p->slot, r->mem, LEN, "p", p->crc), 0);
	assert_filled(r->mem, LEN, seed);
}

static void empty_segments_of_a_sparse_file_give_their_space_back(void **state)
{
	struct page p[N];
	struct rig r;
	uint64_t before;
	uint32_t i;

	sparse_rig(&r, true);
	for (i = 0; i < N; i++)
		page_put(&r, &p[i], i);
	/* what was zero-written and never used is let alone */
	assert_int_equal(r.n->stats.discarded_bytes, 0);
	before = file_bytes(&r);
	for (i = 0; i < N; i += 2)
		assert_int_equal(node_slot_free(r.n, &p[i].slot), 0);
	rig_until(&r, r.n->stats.discarded_bytes == N / 2 * MIB);
	assert_true(file_bytes(&r) <= before - N / 2 * MIB + MIB);
	for (i = 1; i < N; i += 2)
		page_get(&r, &p[i], i);
	/* and it is all there to be used again */
	for (i = 0; i < N; i += 2)
		page_put(&r, &p[i], 100 + i);
	for (i = 0; i < N; i += 2)
		page_get(&r, &p[i], 100 + i);
	rig_fini(&r);
}

static void nothing_is_discarded_unless_asked_for(void **state)
{
	struct page p;
	struct rig r;

	sparse_rig(&r, false);
	page_put(&r, &p, 1);
	assert_int_equal(node_slot_free(r.n, &p.slot), 0);
	for (int i = 0; i < 20; i++)
		rig_poll(&r, 5);
	assert_int_equal(r.n->stats.discarded_bytes, 0);
	rig_fini(&r);
}

static void a_preallocated_file_keeps_what_was_reserved(void **state)
{
	char line[500];
	struct page p;
	struct rig r;

	rig_init(&r);
	r.o.discard = true;
	rig_open(&r);
	if (to_nvme(r.n)->open.sparse) {
		print_message("# no preallocation here\n");
		rig_fini(&r);
		skip();
	}
	page_put(&r, &p, 1);
	assert_int_equal(node_slot_free(r.n, &p.slot), 0);
	for (int i = 0; i < 20; i++)
		rig_poll(&r, 5);
	assert_int_equal(r.n->stats.discarded_bytes, 0);
	assert_true(file_bytes(&r) >= r.o.bytes);
	node_status(r.n, line, sizeof(line));
	assert_non_null(strstr(line, "nothing is discarded"));
	rig_fini(&r);
}

/* The segment is nobody's while a worker has it, and the end waits for it. */
static void a_store_can_be_ended_while_it_discards(void **state)
{
	struct page p[N];
	struct rig r;
	uint32_t i;

	sparse_rig(&r, true);
	for (i = 0; i < N; i++)
		page_put(&r, &p[i], i);
	for (i = 0; i < N; i++)
		assert_int_equal(node_slot_free(r.n, &p[i].slot), 0);
	rig_until(&r, to_nvme(r.n)->discard.running ||
		      r.n->stats.discarded_bytes);
	assert_true(node_check(r.n));
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(
		empty_segments_of_a_sparse_file_give_their_space_back),
		cmocka_unit_test(nothing_is_discarded_unless_asked_for),
		cmocka_unit_test(a_preallocated_file_keeps_what_was_reserved),
		cmocka_unit_test(a_store_can_be_ended_while_it_discards),
	};

	return run_on_both_engines(tests);
}
