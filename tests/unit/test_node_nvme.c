/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=kvmm_crc32c */
#include <fcntl.h>

#include "kernels/kernels.h"
#include "tests/lib/node.h"

/* ---- data ------------------------------------------------------------------ */

static void what_is_written_is_read_back(void **state)
{
	static const uint32_t lens[] = { 1, 4095, 4096, 4097, 32768, 100000,
					 1048576 };
	struct node_slot slot[ARRAY_SIZE(lens)];
	uint32_t crc[ARRAY_SIZE(lens)];
	struct rig r;

	rig_init(&r);
	rig_open(&r);
	for (unsigned int i = 0; i < ARRAY_SIZE(lens); i++) {
		fill(r.mem, lens[i], i);
		assert_int_equal(op_write(&r, &slot[i], r.mem, lens[i], "page",
					  &crc[i]), 0);
	}
	for (unsigned int i = 0; i < ARRAY_SIZE(lens); i++) {
		memset(r.mem, 0xee, 2 * MIB);
		assert_int_equal(op_read(&r, &slot[i], r.mem, lens[i], "page",
					 crc[i]), 0);
		assert_filled(r.mem, lens[i], i);
		/* the rest of the last block moved too, nothing behind it */
		assert_int_equal(r.mem[round_up(lens[i], NODE_ALIGN)],
				 (char)0xee);
		assert_int_equal(node_slot_free(r.n, &slot[i]), 0);
	}
	assert_int_equal(r.n->used, 0);
	assert_int_equal(r.n->stats.dir[NODE_WRITE].ios, ARRAY_SIZE(lens));
	assert_int_equal(r.n->stats.dir[NODE_READ].ios, ARRAY_SIZE(lens));
	rig_fini(&r);
}

static void many_at_once_end_right(void **state)
{
	enum { N = 200, LEN = 65536 };
	static struct op op[N];
	static struct node_slot slot[N];
	static uint32_t crc[N];
	struct rig r;

	rig_init(&r);
	r.o.depth = 16;
	rig_open(&r);
	for (unsigned int i = 0; i < N; i++) {
		char *at = r.mem + i * LEN;

		fill(at, LEN, i);
		assert_int_equal(node_slot_alloc(r.n, LEN, &slot[i]), 0);
		op_init(&op[i], NODE_WRITE, &slot[i], at, LEN, "many");
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	for (unsigned int i = 0; i < N; i++) {
		rig_until(&r, op[i].nr_release);
		assert_true(r.n->stats.dir[NODE_WRITE].inflight <= 16);
		assert_int_equal(op[i].told, 0);
		crc[i] = op[i].io.crc;
	}
	memset(r.mem, 0, r.mem_bytes);
	for (unsigned int i = N; i-- > 0;) {
		op_init(&op[i], NODE_READ, &slot[i], r.mem + i * LEN, LEN,
			"many");
		op[i].io.crc = crc[i];
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	for (unsigned int i = 0; i < N; i++) {
		rig_until(&r, op[i].nr_release);
		assert_int_equal(op[i].told, 0);
		assert_filled(r.mem + i * LEN, LEN, i);
	}
	assert_int_equal(r.n->stats.dir[NODE_READ].queued_bytes, 0);
	rig_fini(&r);
}

static _Thread_local const struct node *fed;	/* of the loop's thread only */
static unsigned int nr_hungry, nr_fed;

uint32_t __real_kvmm_crc32c(uint32_t crc, const void *buf, size_t len);
uint32_t __wrap_kvmm_crc32c(uint32_t crc, const void *buf, size_t len);

uint32_t __wrap_kvmm_crc32c(uint32_t crc, const void *buf, size_t len)
{
	if (fed && len >= 4096) {
		const struct node_dir_stats *st = &fed->stats.dir[NODE_READ];

		if (st->queued && st->inflight < 4)
			nr_hungry++;
		else
			nr_fed++;
	}
	return __real_kvmm_crc32c(crc, buf, len);
}

static void the_device_gets_its_next_before_a_checksum(void **state)
{
	enum { N = 64, LEN = 16384 };
	static struct op op[N];
	struct node_slot slot;
	struct rig r;
	uint32_t crc;

	rig_init(&r);
	r.o.depth = 4;
	rig_open(&r);
	fill(r.mem, LEN, 1);
	assert_int_equal(op_write(&r, &slot, r.mem, LEN, "fed", &crc), 0);
	for (unsigned int i = 0; i < N; i++) {
		op_init(&op[i], NODE_READ, &slot, r.mem + i * LEN, LEN, "fed");
		op[i].io.crc = crc;
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	fed = r.n;
	nr_hungry = nr_fed = 0;
	for (unsigned int i = 0; i < N; i++) {
		rig_until(&r, op[i].nr_release);
		assert_int_equal(op[i].told, 0);
	}
	fed = NULL;
	assert_int_equal(nr_hungry, 0);
	assert_true(nr_fed > 0);
	rig_fini(&r);
}

static void data_of_somebody_else_is_refused(void **state)
{
	struct node_slot slot, other;
	uint32_t crc;
	struct rig r;

	rig_init(&r);
	rig_open(&r);
	fill(r.mem, 65536, 1);
	assert_int_equal(op_write(&r, &slot, r.mem, 65536, "alice", &crc), 0);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "mallory", crc),
			 -EBADMSG);
	other = slot;
	other.seq++;
	assert_int_equal(op_read(&r, &other, r.mem, 65536, "alice", crc),
			 -EBADMSG);
	assert_int_equal(op_read(&r, &slot, r.mem, 65535, "alice", crc),
			 -EBADMSG);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "alice", crc ^ 1),
			 -EBADMSG);
	assert_int_equal(r.n->stats.crc_bad, 4);
	rig_fini(&r);
}

static void predecessor_in_the_slot_is_found_out(void **state)
{
	struct node_slot first, second;
	uint32_t crc1, crc2;
	struct rig r;

	rig_init(&r);
	rig_open(&r);
	memset(r.mem, 1, MIB);
	assert_int_equal(op_write(&r, &first, r.mem, MIB, "p", &crc1), 0);
	assert_int_equal(node_slot_free(r.n, &first), 0);
	assert_int_equal(op_write(&r, &second, r.mem, MIB, "p", &crc2), 0);
	if (second.off == first.off)
		assert_int_not_equal(crc1, crc2);
	assert_int_equal(op_read(&r, &second, r.mem, MIB, "p", crc1),
			 -EBADMSG);
	rig_fini(&r);
}

/* Change one byte of the file behind the node's back. */
static void damage(const struct rig *r, uint64_t off)
{
	int fd = open(r->path, O_RDWR | O_CLOEXEC);
	char c;

	assert_true(fd >= 0);
	assert_int_equal(pread(fd, &c, 1, (off_t)off), 1);
	c ^= 0x10;
	assert_int_equal(pwrite(fd, &c, 1, (off_t)off), 1);
	assert_int_equal(fsync(fd), 0);
	close(fd);
}

static int read_damaged(struct rig *r)
{
	struct node_slot slot;
	uint32_t crc;
	int err;

	fill(r->mem, 65536, 1);
	assert_int_equal(op_write(r, &slot, r->mem, 65536, "p", &crc), 0);
	damage(r, slot.off + 40000);
	err = op_read(r, &slot, r->mem, 65536, "p", crc);
	assert_int_equal(node_slot_free(r->n, &slot), 0);
	return err;
}

static void damage_on_the_medium_is_a_miss(void **state)
{
	struct rig r;

	rig_init(&r);
	rig_open(&r);
	assert_int_equal(read_damaged(&r), -EBADMSG);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.crc_bad, 1);
	assert_int_equal(r.n->stats.bad_slots, 1);	/* quarantine */
	assert_int_equal(r.n->stats.bad_bytes, 65536);
	assert_int_equal(r.n->used, 0);
	rig_fini(&r);

	/* and without the check it would have been a hit */
	rig_init(&r);
	setenv("KVMM_BREAK", "crc", 1);
	rig_open(&r);
	unsetenv("KVMM_BREAK");
	assert_int_equal(read_damaged(&r), 0);
	rig_fini(&r);
}

static void bad_requests_are_refused(void **state)
{
	struct node_slot slot, x;
	struct rig r;
	struct op op;

	rig_init(&r);
	rig_open(&r);
	assert_int_equal(node_slot_alloc(r.n, 0, &slot), -EINVAL);
	assert_int_equal(node_slot_alloc(r.n, r.n->max_len + 1, &slot), -E2BIG);
	assert_int_equal(node_slot_alloc(r.n, 8192, &slot), 0);
	assert_int_equal(node_slot_bytes(r.n, &slot), 8192);

	op_init(&op, NODE_WRITE, &slot, r.mem + 8, 8192, "p");
	assert_int_equal(node_submit(r.n, &op.io), -EINVAL);
	op_init(&op, NODE_WRITE, &slot, r.mem, 8193, "p");
	assert_int_equal(node_submit(r.n, &op.io), -EINVAL);
	op_init(&op, NODE_WRITE, &slot, r.mem, 0, "p");
	assert_int_equal(node_submit(r.n, &op.io), -EINVAL);
	x = slot;
	x.off += 8192;
	op_init(&op, NODE_WRITE, &x, r.mem, 8192, "p");
	assert_int_equal(node_submit(r.n, &op.io), -EINVAL);
	op_init(&op, NODE_READ, &slot, r.mem, 8192, "p");
	op.io.deadline_ns = 1;
	assert_int_equal(node_submit(r.n, &op.io), -ETIMEDOUT);
	assert_int_equal(op.nr_done, 0);
	assert_int_equal(node_extent_get(r.n, 4096, 0, NULL, NULL),
			 -EOPNOTSUPP);
	rig_fini(&r);
}

/* ---- queues ---------------------------------------------------------------- */

static void full_queue_answers_again(void **state)
{
	struct node_slot slot;
	static struct op op[9];
	struct rig r;

	rig_init(&r);
	r.o.queue_max = 8;
	rig_open(&r);
	assert_int_equal(node_slot_alloc(r.n, 4096, &slot), 0);
	for (int i = 0; i < 9; i++) {
		op_init(&op[i], NODE_WRITE, &slot, r.mem, 4096, "p");
		assert_int_equal(node_submit(r.n, &op[i].io),
				 i < 8 ? 0 : -EAGAIN);
	}
	assert_int_equal(r.n->stats.dir[NODE_WRITE].refused, 1);
	for (int i = 0; i < 8; i++)
		rig_until(&r, op[i].nr_release);
	rig_fini(&r);
}

static void queued_io_can_be_cancelled(void **state)
{
	struct node_slot slot;
	struct op a, b;
	struct rig r;

	rig_init(&r);
	rig_open(&r);
	assert_int_equal(node_slot_alloc(r.n, 4096, &slot), 0);
	op_init(&a, NODE_WRITE, &slot, r.mem, 4096, "p");
	op_init(&b, NODE_WRITE, &slot, r.mem, 4096, "p");
	assert_int_equal(node_submit(r.n, &a.io), 0);
	assert_int_equal(node_submit(r.n, &b.io), 0);
	assert_true(node_buf_busy(r.n, r.mem + 4095, 1));
	assert_false(node_buf_busy(r.n, r.mem + 4096, 4096));
	assert_int_equal(node_io_cancel(&b.io), 0);
	assert_int_equal(node_io_cancel(&b.io), -EALREADY);
	assert_int_equal(b.nr_done, 0);		/* not from within the call */
	assert_true(node_buf_busy(r.n, r.mem, 4096));
	node_kick(r.n);
	assert_int_equal(node_io_cancel(&a.io), -EALREADY);
	rig_until(&r, b.nr_release && a.nr_release);
	assert_int_equal(b.told, -ECANCELED);
	assert_int_equal(a.told, 0);
	assert_int_equal(r.n->stats.dir[NODE_WRITE].cancelled, 1);
	assert_false(node_buf_busy(r.n, r.mem, r.mem_bytes));
	rig_fini(&r);
}

static void demand_goes_before_the_rest(void **state)
{
	struct node_slot slot;
	static struct op op[6];
	struct rig r;
	uint32_t crc;

	rig_init(&r);
	r.o.depth = 1;
	rig_open(&r);
	assert_int_equal(op_write(&r, &slot, r.mem, 4096, "p", &crc), 0);
	for (int i = 0; i < 6; i++) {
		op_init(&op[i], i < 2 ? NODE_WRITE : NODE_READ, &slot,
			r.mem + i * 4096, 4096, "p");
		op[i].io.crc = crc;
	}
	op[2].io.prio = NODE_PRIO_PREFETCH;
	op[3].io.prio = NODE_PRIO_PREFETCH;
	for (int i = 0; i < 6; i++)
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	node_io_raise(&op[3].io, NODE_PRIO_DEMAND);	/* behind 4 and 5 */
	for (int i = 0; i < 6; i++)
		rig_until(&r, op[i].nr_release);
	assert_true(op[4].done_ns < op[5].done_ns);
	assert_true(op[5].done_ns < op[3].done_ns);
	assert_true(op[3].done_ns < op[2].done_ns);
	assert_true(op[2].done_ns < op[0].done_ns);
	assert_true(op[0].done_ns < op[1].done_ns);
	rig_fini(&r);
}

static void writeback_keeps_a_share(void **state)
{
	enum { N = 40 };
	struct node_slot slot;
	static struct op op[N], wb;
	unsigned int before = 0;
	struct rig r;
	uint32_t crc;

	rig_init(&r);
	r.o.depth = 1;
	rig_open(&r);
	assert_int_equal(op_write(&r, &slot, r.mem, 4096, "p", &crc), 0);
	for (int i = 0; i < N; i++) {
		op_init(&op[i], NODE_READ, &slot, r.mem + i * 4096, 4096, "p");
		op[i].io.crc = crc;
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	op_init(&wb, NODE_WRITE, &slot, r.mem, 4096, "p");
	assert_int_equal(node_submit(r.n, &wb.io), 0);
	rig_until(&r, wb.nr_release);
	for (int i = 0; i < N; i++)
		before += op[i].nr_done;
	assert_true(before <= 10);
	for (int i = 0; i < N; i++)
		rig_until(&r, op[i].nr_release);
	rig_fini(&r);
}

static void estimate_grows_with_length_and_queue(void **state)
{
	enum { N = 64 };
	struct node_slot slot;
	static struct op op[N];
	uint32_t crc, idle, big;
	struct rig r;

	rig_init(&r);
	r.o.depth = 2;
	rig_make(&r);
	assert_int_equal(node_estimate_us(r.n, NODE_READ, 4096), UINT32_MAX);
	rig_until(&r, r.n->state == NODE_ONLINE);
	idle = node_estimate_us(r.n, NODE_READ, 65536);
	assert_true(idle > 0 && idle < 1000000);
	for (int i = 0; i < 8; i++) {
		assert_int_equal(op_write(&r, &slot, r.mem, 65536, "p", &crc),
				 0);
		assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), 0);
	}
	assert_true(r.n->stats.dir[NODE_READ].bytes_s > 0);
	assert_true(r.n->stats.dir[NODE_READ].lat_ns > 0);
	idle = node_estimate_us(r.n, NODE_READ, 65536);
	big = node_estimate_us(r.n, NODE_READ, 65536 * 64);
	assert_true(big > idle);
	for (int i = 0; i < N; i++) {
		op_init(&op[i], NODE_READ, &slot, r.mem + i * 65536, 65536,
			"p");
		op[i].io.crc = crc;
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	assert_true(node_estimate_us(r.n, NODE_READ, 65536) > idle);
	for (int i = 0; i < N; i++)
		rig_until(&r, op[i].nr_release);
	rig_fini(&r);
}

/* It is let wait by everybody: how long says nothing of those who are not. */
static void a_background_read_is_not_how_fast_the_device_is(void **state)
{
	struct node_slot slot;
	struct op op;
	uint32_t crc;
	uint64_t bytes_s;
	struct rig r;

	rig_init(&r);
	rig_open(&r);
	assert_int_equal(op_write(&r, &slot, r.mem, 65536, "p", &crc), 0);
	for (int i = 0; i < 4; i++)
		assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), 0);
	bytes_s = r.n->stats.dir[NODE_READ].bytes_s;
	assert_true(bytes_s > 0);
	for (int i = 0; i < 4; i++) {
		op_init(&op, NODE_READ, &slot, r.mem, 65536, "p");
		op.io.prio = NODE_PRIO_WRITEBACK;
		op.io.crc = crc;
		assert_int_equal(node_submit(r.n, &op.io), 0);
		rig_until(&r, op.nr_release);
		assert_int_equal(op.io.result, 0);
	}
	assert_int_equal(r.n->stats.dir[NODE_READ].bytes_s, bytes_s);
	rig_fini(&r);
}

/* ---- accounts -------------------------------------------------------------- */

static void full_store_says_so_and_names_a_victim(void **state)
{
	struct node_slot slot[32], small;
	struct node_range range;
	struct rig r;

	rig_init(&r);
	rig_open(&r);
	/* a segment that is being zero-written would be missing */
	rig_until(&r, r.n->stats.zeroed_bytes == r.n->capacity);
	for (int i = 0; i < 32; i++)
		assert_int_equal(node_slot_alloc(r.n, MIB, &slot[i]), 0);
	assert_int_equal(r.n->used, r.n->capacity);
	assert_int_equal(node_slot_alloc(r.n, 4096, &small), -ENOSPC);
	assert_int_equal(node_slot_victim(r.n, 4096, 0, &range), 0);
	for (int i = 0; i < 32; i++)
		if (slot[i].off >= range.off && slot[i].off < range.end)
			assert_int_equal(node_slot_free(r.n, &slot[i]), 0);
	assert_int_equal(node_slot_alloc(r.n, 4096, &small), 0);
	assert_int_equal(r.n->used, r.n->capacity - MIB + 4096);
	assert_int_equal(node_slot_free(r.n, &small), 0);
	assert_int_equal(node_slot_free(r.n, &small), -EINVAL);
	rig_fini(&r);
}

/* ---- the end --------------------------------------------------------------- */

static void destroy_ends_everything_exactly_once(void **state)
{
	enum { N = 50 };
	struct node_slot slot;
	static struct op op[N];
	struct rig r;
	int ok = 0;

	rig_init(&r);
	r.o.depth = 4;
	rig_open(&r);
	assert_int_equal(node_slot_alloc(r.n, MIB, &slot), 0);
	for (int i = 0; i < N; i++) {
		op_init(&op[i], NODE_WRITE, &slot, r.mem, MIB, "p");
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	node_kick(r.n);
	rig_close(&r);
	for (int i = 0; i < N; i++) {
		assert_int_equal(op[i].nr_done, 1);
		assert_int_equal(op[i].nr_release, 1);
		if (op[i].told)
			assert_int_equal(op[i].told, -ESHUTDOWN);
		ok += !op[i].told;
	}
	assert_true(ok >= 1 && ok <= 4);
	rig_fini(&r);
}

static void destroy_right_after_creation(void **state)
{
	struct rig r;

	rig_init(&r);
	rig_make(&r);
	rig_close(&r);
	rig_fini(&r);
}

/* ---- all together ---------------------------------------------------------- */

struct page {
	struct op	op;
	struct node_slot slot;
	uint64_t	seed;
	uint32_t	len;
	uint32_t	crc;
	bool		there;
	bool		busy;
	bool		reading;
	char		*mem;
};

static void random_use_returns_what_was_written(void **state)
{
	enum { N = 32 };
	static const uint32_t lens[] = { 4096, 5000, 65536, 262144, 500000 };
	unsigned int steps = test_long() ? 100000 : 3000;
	static struct page page[N];
	unsigned int hits = 0;
	struct rng rng;
	struct rig r;

	print_message("# seed %llu\n", (unsigned long long)test_seed());
	rng_seed(&rng, test_seed());
	memset(page, 0, sizeof(page));
	rig_init(&r);
	r.o.depth = 8;
	rig_open(&r);
	node_buf_add(r.n, r.mem, r.mem_bytes / 2);
	for (unsigned int i = 0; i < N; i++)
		page[i].mem = r.mem + i * 512 * 1024;
	for (unsigned int i = 0; i < steps; i++) {
		struct page *p = &page[rng_below(&rng, N)];

		if (p->busy) {
			rig_until(&r, p->op.nr_release);
			assert_int_equal(p->op.told, 0);
			p->busy = false;
			if (p->reading)
				assert_filled(p->mem, p->len, p->seed);
			else
				p->crc = p->op.io.crc;
			p->there = true;
			hits += p->reading;
		} else if (p->there && !rng_below(&rng, 4)) {
			assert_int_equal(node_slot_free(r.n, &p->slot), 0);
			p->there = false;
		} else if (p->there) {
			memset(p->mem, 0, p->len);
			op_init(&p->op, NODE_READ, &p->slot, p->mem, p->len,
				"rnd");
			p->op.io.crc = p->crc;
			assert_int_equal(node_submit(r.n, &p->op.io), 0);
			p->busy = p->reading = true;
		} else {
			p->len = lens[rng_below(&rng, ARRAY_SIZE(lens))];
			if (node_slot_alloc(r.n, p->len, &p->slot))
				continue;
			p->seed = rng_next(&rng);
			fill(p->mem, p->len, p->seed);
			op_init(&p->op, NODE_WRITE, &p->slot, p->mem, p->len,
				"rnd");
			assert_int_equal(node_submit(r.n, &p->op.io), 0);
			p->busy = true;
			p->reading = false;
		}
		if (!rng_below(&rng, 4))
			rig_poll(&r, 0);
	}
	assert_true(hits > steps / 10);
	assert_int_equal(r.n->stats.crc_bad, 0);
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(what_is_written_is_read_back),
		cmocka_unit_test(many_at_once_end_right),
		cmocka_unit_test(the_device_gets_its_next_before_a_checksum),
		cmocka_unit_test(data_of_somebody_else_is_refused),
		cmocka_unit_test(predecessor_in_the_slot_is_found_out),
		cmocka_unit_test(damage_on_the_medium_is_a_miss),
		cmocka_unit_test(bad_requests_are_refused),
		cmocka_unit_test(full_queue_answers_again),
		cmocka_unit_test(queued_io_can_be_cancelled),
		cmocka_unit_test(demand_goes_before_the_rest),
		cmocka_unit_test(writeback_keeps_a_share),
		cmocka_unit_test(estimate_grows_with_length_and_queue),
		cmocka_unit_test(a_background_read_is_not_how_fast_the_device_is),
		cmocka_unit_test(full_store_says_so_and_names_a_victim),
		cmocka_unit_test(destroy_ends_everything_exactly_once),
		cmocka_unit_test(destroy_right_after_creation),
		cmocka_unit_test(random_use_returns_what_was_written),
	};

	return run_on_all_engines(tests);
}
