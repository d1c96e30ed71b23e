/* SPDX-License-Identifier: Apache-2.0 */
/* A slot store's file: made, refused, locked, lost. */
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "daemon/node/nvme.h"
#include "daemon/node/nvme_format.h"
#include "tests/lib/node.h"

static uint64_t data_off(const struct rig *r)
{
	return to_nvme(r->n)->open.super.data_off;
}

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
	assert_non_null(strstr(r.n->why, "empty"));
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
	assert_int_equal(lseek(fd, (off_t)data_off(&r), SEEK_HOLE),
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
	scribble(&r, offsetof(struct nvme_super, uuid), "xyz", 3);
	scribble(&r, NVME_SUPER2_OFF + 16, "xyz", 3);
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

/* A file of ours that lost its space, as one that was copied: still ours, and
 * where there is no room for the rest it is used as it is. */
static void holes_are_filled_or_the_floor_is_kept(void **state)
{
	struct stat st;
	struct rig r;
	uint64_t off;
	int fd;

	rig_init(&r);
	rig_open(&r);
	off = data_off(&r);
	rig_close(&r);
	fd = open(r.path, O_RDWR | O_CLOEXEC);
	assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE |
				   FALLOC_FL_KEEP_SIZE, (off_t)off, 16 * MIB), 0);
	assert_int_equal(fstat(fd, &st), 0);
	assert_true((uint64_t)st.st_blocks * 512 < r.o.bytes);
	r.o.free_floor_pct = 100;
	rig_open(&r);
	assert_false(node_writable(r.n));
	assert_true(r.n->stats.overcommit_bytes > 0);
	rig_close(&r);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_size, r.o.bytes);	/* as it was */
	assert_true((uint64_t)st.st_blocks * 512 < r.o.bytes);
	r.o.free_floor_pct = 0;
	rig_open(&r);
	assert_int_equal(fstat(fd, &st), 0);
	assert_true((uint64_t)st.st_blocks * 512 >= r.o.bytes);
	close(fd);
	rig_fini(&r);
}

/*
 * Space that is not reserved is taken by writes: they are off while the file
 * system has less free than it should, reads are not, and they come back.
 */
static void free_floor_is_kept_while_running(void **state)
{
	struct node_slot a, b;
	char line[500];
	uint32_t crc, other;
	struct stat st;
	struct rig r;

	rig_init(&r);
	r.o.sparse = true;
	r.o.free_floor_pct = 1;
	r.o.check_ns = 20 * MSEC;
	r.o.probe_ns = 20 * MSEC;
	rig_open(&r);
	assert_int_equal(stat(r.path, &st), 0);
	assert_int_equal(st.st_size, r.o.bytes);
	fill(r.mem, 4096, 1);
	assert_int_equal(op_write(&r, &a, r.mem, 4096, "a", &crc), 0);

	/* only an empty file system has that much free */
	to_nvme(r.n)->opts.free_floor_pct = 100;
	rig_until(&r, strstr(r.n->why, "free floor"));
	assert_int_equal(r.n->state, NODE_ONLINE);
	assert_false(node_writable(r.n));
	assert_int_equal(op_write(&r, &b, r.mem, 4096, "b", &other), -ENOSPC);
	node_status(r.n, line, sizeof(line));
	assert_non_null(strstr(line, "free floor is reached"));
	memset(r.mem, 0, 4096);
	assert_int_equal(op_read(&r, &a, r.mem, 4096, "a", crc), 0);
	assert_filled(r.mem, 4096, 1);

	to_nvme(r.n)->opts.free_floor_pct = 1;
	rig_until(&r, node_writable(r.n));
	assert_non_null(strstr(r.n->why, "free again"));
	assert_int_equal(op_write(&r, &b, r.mem, 4096, "b", &other), 0);
	rig_fini(&r);
}

/* Between two looks at the file system writes use up what the first one saw. */
static void writes_use_the_room_up_that_was_seen(void **state)
{
	struct node_slot slot[4];
	struct op op[4];
	struct rig r;
	int i;

	rig_init(&r);
	r.o.sparse = true;
	r.o.free_floor_pct = 1;
	r.o.zero_bytes_s = 1;
	r.o.check_ns = 60000 * MSEC;
	r.o.probe_ns = 200 * MSEC;
	rig_open(&r);
	rig_until(&r, r.n->stats.zeroed_bytes || !to_nvme(r.n)->nr_own);
	to_nvme(r.n)->room = 3 * 4096;
	for (i = 0; i < 4; i++) {
		assert_int_equal(node_slot_alloc(r.n, 4096, &slot[i]), 0);
		op_init(&op[i], NODE_WRITE, &slot[i], r.mem, 4096, "a");
		assert_int_equal(node_submit(r.n, &op[i].io), 0);
	}
	for (i = 0; i < 4; i++) {
		rig_until(&r, op[i].nr_release);
		assert_int_equal(op[i].told, i < 3 ? 0 : -ENOSPC);
	}
	assert_false(node_writable(r.n));
	/* the next look does not wait for its time */
	rig_until(&r, node_writable(r.n));
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
	assert_int_equal(truncate(r.path, (off_t)data_off(&r)), 0);
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(new_file_is_private_and_preallocated),
		cmocka_unit_test(segments_are_zero_written_in_the_background),
		cmocka_unit_test(store_starts_empty_with_fresh_sequence_numbers),
		cmocka_unit_test(what_is_not_ours_is_refused_and_left_alone),
		cmocka_unit_test(preallocated_file_of_zeroes_is_taken),
		cmocka_unit_test(impossible_places_are_told_by_name),
		cmocka_unit_test(free_floor_is_kept),
		cmocka_unit_test(holes_are_filled_or_the_floor_is_kept),
		cmocka_unit_test(free_floor_is_kept_while_running),
		cmocka_unit_test(writes_use_the_room_up_that_was_seen),
		cmocka_unit_test(wrong_options_are_refused),
		cmocka_unit_test(second_daemon_waits_for_the_first),
		cmocka_unit_test(waiting_for_the_lock_ends),
		cmocka_unit_test(killed_owner_leaves_no_lock),
		cmocka_unit_test(unlinked_file_goes_on_and_is_told),
		cmocka_unit_test(file_cut_short_while_serving_is_a_miss),
		cmocka_unit_test(page_cache_will_do_where_direct_io_will_not),
	};

	return run_on_both_engines(tests);
}
