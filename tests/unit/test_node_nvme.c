/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <sys/file.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "daemon/node/nvme_format.h"
#include "tests/lib/node.h"

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#define THREAD_SANITIZER 1	/* starts no threads in a forked child */
#else
#define THREAD_SANITIZER 0
#endif

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
			r.mem, 4096, "p");
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
		op_init(&op[i], NODE_READ, &slot, r.mem, 4096, "p");
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

/* ---- the file -------------------------------------------------------------- */

static void new_file_is_private_and_preallocated(void **state)
{
	char line[400];
	struct stat st;
	struct rig r;

	rig_init(&r);
	rig_make(&r);
	assert_int_equal(r.n->state, NODE_STARTING);
	rig_until(&r, r.n->state != NODE_STARTING);
	assert_int_equal(r.n->state, NODE_ONLINE);
	assert_int_equal(stat(r.path, &st), 0);
	assert_int_equal(st.st_size, r.o.bytes);
	assert_int_equal(st.st_mode & 0777, 0600);
	assert_int_equal(r.n->capacity, 32 * MIB);
	assert_int_equal(r.n->max_len, MIB);
	assert_non_null(strstr(r.n->why, "journal"));
	node_status(r.n, line, sizeof(line));
	assert_non_null(strstr(line, test_engine == NVME_ENGINE_URING ?
				     "io_uring" : "threads"));
	rig_fini(&r);
}

static void segments_are_zero_written_in_the_background(void **state)
{
	struct rig r;
	int fd;

	rig_init(&r);
	rig_open(&r);
	rig_until(&r, r.n->stats.zeroed_bytes == r.n->capacity);
	fd = open(r.path, O_RDONLY | O_CLOEXEC);
	assert_int_equal(lseek(fd, NVME_DATA_OFF, SEEK_HOLE),
			 (off_t)r.o.bytes);
	close(fd);
	rig_close(&r);

	/* a later start finds that out by itself */
	rig_open(&r);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.zeroed_bytes, r.n->capacity);
	rig_fini(&r);
}

static void store_starts_empty_with_fresh_sequence_numbers(void **state)
{
	struct node_slot a, b;
	struct rig r;

	rig_init(&r);
	rig_open(&r);
	assert_int_equal(node_slot_alloc(r.n, 4096, &a), 0);
	rig_close(&r);
	rig_open(&r);
	assert_int_equal(r.n->used, 0);
	assert_int_equal(node_slot_alloc(r.n, 4096, &b), 0);
	assert_true(b.seq > a.seq + 1000000);
	rig_fini(&r);
}

static void assert_open_fails(struct rig *r, const char *word)
{
	rig_make(r);
	rig_until(r, r->n->state != NODE_STARTING);
	assert_int_equal(r->n->state, NODE_FAILED);
	if (!strstr(r->n->why, word))
		print_message("# '%s' lacks '%s'\n", r->n->why, word);
	assert_non_null(strstr(r->n->why, word));
	rig_close(r);
}

/* Write @len bytes at @off of the file, made when missing. */
static void scribble(const struct rig *r, uint64_t off, const void *buf,
		     size_t len)
{
	int fd = open(r->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	assert_true(fd >= 0);
	assert_int_equal(pwrite(fd, buf, len, (off_t)off), (ssize_t)len);
	assert_int_equal(fsync(fd), 0);
	close(fd);
}

static void what_is_not_ours_is_refused_and_left_alone(void **state)
{
	uint32_t version = NVME_VERSION + 1;
	struct node_slot slot;
	struct stat st;
	char buf[8];
	struct rig r;
	int fd;

	rig_init(&r);
	scribble(&r, 0, "precious", 8);
	assert_open_fails(&r, "bytes");			/* another size */
	assert_int_equal(truncate(r.path, (off_t)r.o.bytes), 0);
	assert_open_fails(&r, "not a kvmm store");
	fd = open(r.path, O_RDONLY | O_CLOEXEC);
	assert_int_equal(read(fd, buf, 8), 8);
	assert_memory_equal(buf, "precious", 8);
	close(fd);
	assert_int_equal(unlink(r.path), 0);

	rig_open(&r);
	rig_close(&r);
	r.o.bytes += MIB;
	assert_open_fails(&r, "bytes");
	r.o.bytes -= MIB;
	scribble(&r, offsetof(struct nvme_super, version), &version, 4);
	assert_open_fails(&r, "version");
	version = NVME_VERSION;
	scribble(&r, offsetof(struct nvme_super, version), &version, 4);
	scribble(&r, offsetof(struct nvme_super, uuid), "x", 1);
	assert_open_fails(&r, "damaged");
	assert_int_equal(stat(r.path, &st), 0);

	/* a failed node answers, and everything it answers is no */
	rig_make(&r);
	rig_until(&r, r.n->state == NODE_FAILED);
	assert_int_equal(node_slot_alloc(r.n, 4096, &slot), -EIO);
	assert_false(node_writable(r.n));
	assert_int_equal(node_estimate_us(r.n, NODE_READ, 1), UINT32_MAX);
	rig_fini(&r);
}

static void preallocated_file_of_zeroes_is_taken(void **state)
{
	struct rig r;
	int fd;

	rig_init(&r);
	fd = open(r.path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_int_equal(ftruncate(fd, (off_t)r.o.bytes), 0);
	close(fd);
	rig_open(&r);
	rig_fini(&r);
}

static void impossible_places_are_told_by_name(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.path = "/nonexistent/kvmm";
	assert_open_fails(&r, "/nonexistent/kvmm");
	r.o.path = "/";
	assert_open_fails(&r, "/");
	r.o.path = "/dev/null";
	assert_open_fails(&r, "neither");
	r.o.path = r.path;
	r.o.bytes = MIB;
	r.o.seg_bytes = 0;
	assert_open_fails(&r, "too few");
	rig_fini(&r);
}

static void free_floor_is_kept(void **state)
{
	struct stat st;
	struct rig r;

	rig_init(&r);
	r.o.free_floor_pct = 100;
	assert_open_fails(&r, "free");
	assert_int_equal(stat(r.path, &st), -1);	/* nothing left behind */
	rig_fini(&r);
}

static void wrong_options_are_refused(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.seg_bytes = 3 * MIB;
	assert_int_equal(nvme_create(&r.o, r.pool, &r.n), -EINVAL);
	r.o.seg_bytes = 128 * MIB;
	assert_int_equal(nvme_create(&r.o, r.pool, &r.n), -EINVAL);
	r.o.seg_bytes = 0;
	r.o.path = "";
	assert_int_equal(nvme_create(&r.o, r.pool, &r.n), -EINVAL);
	r.o.path = r.path;
	r.o.name = "a name that is longer than a name of a node may be";
	assert_int_equal(nvme_create(&r.o, r.pool, &r.n), -EINVAL);
	r.n = NULL;
	rig_fini(&r);
}

static void second_daemon_waits_for_the_first(void **state)
{
	struct node *second;
	struct rig r;
	uint64_t end;

	rig_init(&r);
	rig_open(&r);
	assert_int_equal(nvme_create(&r.o, r.pool, &second), 0);
	end = deadline_in(150 * MSEC);
	while (!deadline_past(end)) {
		node_poll(second, 0);
		usleep(5000);
	}
	assert_int_equal(second->state, NODE_STARTING);
	assert_non_null(strstr(second->why, "locked"));
	rig_close(&r);
	r.n = second;
	rig_until(&r, r.n->state == NODE_ONLINE);
	rig_fini(&r);
}

static void waiting_for_the_lock_ends(void **state)
{
	struct rig r;
	int fd;

	rig_init(&r);
	rig_open(&r);
	rig_close(&r);
	fd = open(r.path, O_RDWR | O_CLOEXEC);
	assert_int_equal(flock(fd, LOCK_EX), 0);
	r.o.lock_wait_ns = 120 * MSEC;
	assert_open_fails(&r, "locked");
	close(fd);
	rig_open(&r);
	rig_fini(&r);
}

static void killed_owner_leaves_no_lock(void **state)
{
	int status, fds[2];
	struct rig r;
	pid_t pid;
	char c;

	rig_init(&r);
	rig_open(&r);
	rig_close(&r);
	assert_int_equal(pipe(fds), 0);
	pid = fork();
	if (!pid) {
		int fd = open(r.path, O_RDWR | O_CLOEXEC);

		if (flock(fd, LOCK_EX) || write(fds[1], "x", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	assert_int_equal(read(fds[0], &c, 1), 1);
	rig_make(&r);
	for (int i = 0; i < 10; i++)
		rig_poll(&r, 10);
	assert_int_equal(r.n->state, NODE_STARTING);
	kill(pid, SIGKILL);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	rig_until(&r, r.n->state == NODE_ONLINE);
	close(fds[0]);
	close(fds[1]);
	rig_fini(&r);
}

static void unlinked_file_goes_on_and_is_told(void **state)
{
	struct node_slot slot;
	char line[400];
	uint32_t crc;
	struct rig r;

	rig_init(&r);
	r.o.check_ns = 10 * MSEC;
	rig_open(&r);
	fill(r.mem, 65536, 5);
	assert_int_equal(op_write(&r, &slot, r.mem, 65536, "p", &crc), 0);
	assert_int_equal(unlink(r.path), 0);
	rig_until(&r, strstr(r.n->why, "unlinked"));
	assert_int_equal(r.n->state, NODE_ONLINE);
	node_status(r.n, line, sizeof(line));
	assert_non_null(strstr(line, "unlinked"));
	memset(r.mem, 0, 65536);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), 0);
	assert_filled(r.mem, 65536, 5);
	assert_int_equal(op_write(&r, &slot, r.mem, 65536, "q", &crc), 0);
	rig_fini(&r);
}

static void file_cut_short_while_serving_is_a_miss(void **state)
{
	struct node_slot slot;
	uint32_t crc;
	struct rig r;

	rig_init(&r);
	r.o.zero_bytes_s = 1;
	rig_open(&r);
	assert_int_equal(op_write(&r, &slot, r.mem, 65536, "p", &crc), 0);
	assert_int_equal(truncate(r.path, NVME_DATA_OFF), 0);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), -EIO);
	assert_int_equal(r.n->stats.dir[NODE_READ].nr_short, 1);
	rig_fini(&r);
}

static void page_cache_will_do_where_direct_io_will_not(void **state)
{
	struct node_slot slot;
	char line[400];
	uint32_t crc;
	struct rig r;

	rig_init(&r);
	r.o.buffered = true;
	rig_open(&r);
	node_status(r.n, line, sizeof(line));
	assert_non_null(strstr(line, "page cache"));
	fill(r.mem, 100000, 3);
	assert_int_equal(op_write(&r, &slot, r.mem, 100000, "p", &crc), 0);
	memset(r.mem, 0, 100000);
	assert_int_equal(op_read(&r, &slot, r.mem, 100000, "p", crc), 0);
	assert_filled(r.mem, 100000, 3);
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

/* ---- registered memory ----------------------------------------------------- */

static void registered_memory_is_used_and_let_go(void **state)
{
	struct node_slot slot;
	struct rig r;
	uint32_t crc;
	int err;

	rig_init(&r);
	rig_open(&r);
	err = node_buf_add(r.n, r.mem, 4 * MIB);
	if (test_engine == NVME_ENGINE_THREADS) {
		assert_int_equal(err, -EOPNOTSUPP);
		rig_fini(&r);
		return;
	}
	if (err == -EOPNOTSUPP || err == -ENOMEM) {
		print_message("# this host registers nothing: %d\n", err);
		rig_fini(&r);
		return;
	}
	assert_int_equal(err, 0);
	assert_int_equal(node_buf_add(r.n, r.mem + MIB, 4 * MIB), -EEXIST);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.fixed_bytes, 4 * MIB);
	fill(r.mem + MIB, 65536, 1);
	assert_int_equal(op_write(&r, &slot, r.mem + MIB, 65536, "p", &crc), 0);
	assert_int_equal(r.n->stats.fixed_ios, 1);
	memset(r.mem, 0, 65536);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), 0);
	assert_int_equal(r.n->stats.fixed_ios, 2);
	assert_filled(r.mem, 65536, 1);

	/* across its end, and outside: plain, and just as right */
	assert_int_equal(op_read(&r, &slot, r.mem + 4 * MIB - 4096, 65536, "p",
				 crc), 0);
	assert_filled(r.mem + 4 * MIB - 4096, 65536, 1);
	assert_int_equal(r.n->stats.fixed_ios, 2);
	node_buf_del(r.n, r.mem);
	node_buf_del(r.n, r.mem);
	assert_int_equal(op_read(&r, &slot, r.mem, 65536, "p", crc), 0);
	assert_int_equal(r.n->stats.fixed_ios, 2);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.fixed_bytes, 0);
	rig_fini(&r);
}

/* In a child without privileges; 0, or the line that failed. */
static int memlock_child(struct rig *r)
{
	struct rlimit lim = { 65536, 65536 };
	struct nvme_opts o = r->o;
	char line[400];
	struct node *n;

	if (setrlimit(RLIMIT_MEMLOCK, &lim) || setgid(65534) || setuid(65534))
		return __LINE__ % 200;
	o.path = "/nonexistent/kvmm";
	if (nvme_create(&o, r->pool, &n))
		return __LINE__ % 200;
	if (node_buf_add(n, r->mem, 4 * MIB) != -ENOMEM)
		return __LINE__ % 200;
	node_poll(n, 0);
	if (n->stats.plain_bytes != 4 * MIB || n->stats.fixed_bytes)
		return __LINE__ % 200;
	node_status(n, line, sizeof(line));
	node_buf_del(n, r->mem);
	node_poll(n, 0);
	return n->stats.plain_bytes ? __LINE__ % 200 : 0;
}

static void memlock_limit_is_no_failure(void **state)
{
	struct rig r;
	int status;
	pid_t pid;

	if (test_engine == NVME_ENGINE_THREADS || getuid() || THREAD_SANITIZER)
		skip();
	rig_init(&r);
	pid = fork();
	if (!pid)
		_exit(memlock_child(&r));
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	rig_fini(&r);
}

static void extent_made(struct extent *ext, int err, void *arg)
{
	struct extent **ret = arg;

	assert_int_equal(err, 0);
	*ret = ext;
}

static void extent_gone(struct extent *ext, int err, void *arg)
{
	assert_null(ext);
	assert_int_equal(err, 0);
	*(bool *)arg = true;
}

static void extents_of_a_paired_node_are_registered(void **state)
{
	struct host_opts ho = { .name = "dram0", .bytes = 16 * MIB,
				.numa = -1 };
	struct extent *ext = NULL;
	struct node_slot slot;
	struct node *host;
	bool gone = false;
	uint64_t end = deadline_in(PATIENCE_NS);
	struct rig r;
	struct op op;

	rig_init(&r);
	rig_open(&r);
	assert_int_equal(host_create(&ho, &host), 0);
	assert_int_equal(node_pair(r.n, host), -EINVAL);
	assert_int_equal(node_pair(host, r.n), 0);
	assert_int_equal(node_extent_get(host, 4 * MIB, 0, extent_made, &ext),
			 0);
	while (!ext && !deadline_past(end))
		node_poll(host, 0);
	assert_non_null(ext);
	rig_poll(&r, 0);
	if (test_engine == NVME_ENGINE_URING)
		assert_int_equal(r.n->stats.fixed_bytes +
				 r.n->stats.plain_bytes, 4 * MIB);

	/* busy with I/O: it cannot be given back */
	assert_int_equal(node_slot_alloc(r.n, MIB, &slot), 0);
	op_init(&op, NODE_WRITE, &slot, ext->addr, MIB, "p");
	assert_int_equal(node_submit(r.n, &op.io), 0);
	assert_int_equal(node_extent_put(ext, extent_gone, &gone), -EBUSY);
	rig_until(&r, op.nr_release);
	assert_int_equal(op.told, 0);
	assert_int_equal(r.n->stats.fixed_ios,
			 r.n->stats.fixed_bytes ? 1 : 0);

	assert_int_equal(node_extent_put(ext, extent_gone, &gone), 0);
	while (!gone && !deadline_past(end))
		node_poll(host, 0);
	assert_true(gone);
	rig_poll(&r, 0);
	assert_int_equal(r.n->stats.fixed_bytes, 0);
	assert_int_equal(host->used, 0);

	/* the block node may end first: the other forgets it */
	rig_close(&r);
	assert_null(host->paired[0]);
	ext = NULL;
	assert_int_equal(node_extent_get(host, 4 * MIB, 0, extent_made, &ext),
			 0);
	while (!ext && !deadline_past(end))
		node_poll(host, 0);
	assert_non_null(ext);
	assert_int_equal(node_extent_put(ext, NULL, NULL), 0);
	assert_int_equal(node_destroy(host, deadline_in(PATIENCE_NS)), 0);
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
		cmocka_unit_test(data_of_somebody_else_is_refused),
		cmocka_unit_test(predecessor_in_the_slot_is_found_out),
		cmocka_unit_test(damage_on_the_medium_is_a_miss),
		cmocka_unit_test(bad_requests_are_refused),
		cmocka_unit_test(full_queue_answers_again),
		cmocka_unit_test(queued_io_can_be_cancelled),
		cmocka_unit_test(demand_goes_before_the_rest),
		cmocka_unit_test(writeback_keeps_a_share),
		cmocka_unit_test(estimate_grows_with_length_and_queue),
		cmocka_unit_test(new_file_is_private_and_preallocated),
		cmocka_unit_test(segments_are_zero_written_in_the_background),
		cmocka_unit_test(store_starts_empty_with_fresh_sequence_numbers),
		cmocka_unit_test(what_is_not_ours_is_refused_and_left_alone),
		cmocka_unit_test(preallocated_file_of_zeroes_is_taken),
		cmocka_unit_test(impossible_places_are_told_by_name),
		cmocka_unit_test(free_floor_is_kept),
		cmocka_unit_test(wrong_options_are_refused),
		cmocka_unit_test(second_daemon_waits_for_the_first),
		cmocka_unit_test(waiting_for_the_lock_ends),
		cmocka_unit_test(killed_owner_leaves_no_lock),
		cmocka_unit_test(unlinked_file_goes_on_and_is_told),
		cmocka_unit_test(file_cut_short_while_serving_is_a_miss),
		cmocka_unit_test(page_cache_will_do_where_direct_io_will_not),
		cmocka_unit_test(full_store_says_so_and_names_a_victim),
		cmocka_unit_test(registered_memory_is_used_and_let_go),
		cmocka_unit_test(memlock_limit_is_no_failure),
		cmocka_unit_test(extents_of_a_paired_node_are_registered),
		cmocka_unit_test(destroy_ends_everything_exactly_once),
		cmocka_unit_test(destroy_right_after_creation),
		cmocka_unit_test(random_use_returns_what_was_written),
	};

	return run_on_both_engines(tests);
}
