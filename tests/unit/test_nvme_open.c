/* SPDX-License-Identifier: Apache-2.0 */
/* link: -Wl,--wrap=flock,--wrap=fstatfs */
/*
 * A store that cannot be opened now is opened later, with all that is in it:
 * what fails for a while must not cost more than that while.
 */
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "daemon/node/nvme.h"
#include "tests/lib/node_owner.h"

static struct owner before, after;

/* ---- what the kernel says, as a test wants it ------------------------------- */

static void (*flock_first)(void);
static long fs_magic;

int __real_flock(int fd, int op);
int __wrap_flock(int fd, int op);
int __real_fstatfs(int fd, struct statfs *fs);
int __wrap_fstatfs(int fd, struct statfs *fs);

int __wrap_flock(int fd, int op)
{
	void (*fn)(void) = flock_first;

	flock_first = NULL;
	if (!fn)
		return __real_flock(fd, op);
	fn();
	errno = EWOULDBLOCK;
	return -1;
}

int __wrap_fstatfs(int fd, struct statfs *fs)
{
	int err = __real_fstatfs(fd, fs);

	if (!err && fs_magic)
		fs->f_type = fs_magic;
	return err;
}

/* ---- the rig ------------------------------------------------------------------ */

static void use(struct rig *r)
{
	r->o.bytes = 6 * MIB;
	r->o.records = 800;
	r->o.probe_ns = 20 * MSEC;
	owner_open(r, &before);
	for (unsigned int i = 0; i < 100; i++)
		assert_int_equal(owner_add(r, &before, 4096, (uint8_t)i, NULL),
				 0);
	assert_int_equal(owner_flush(r), 0);
	rig_close(r);
}

/* A store in memory, or in a file, with a hundred records; closed. */
static void used_rig(struct rig *r)
{
	rig_init_memory(r);
	use(r);
}

static void used_file_rig(struct rig *r)
{
	rig_init(r);
	use(r);
}

static void begin(struct rig *r)
{
	owner_init(&after);
	rig_make(r);
	node_set_owner(r->n, &after.ops);
}

static char *image_of(const struct rig *r)
{
	char *image = malloc(r->o.bytes);

	assert_non_null(image);
	assert_int_equal(pread(r->memfd, image, r->o.bytes, 0),
			 (ssize_t)r->o.bytes);
	return image;
}

static void assert_untouched(const struct rig *r, char *was)
{
	char *is = image_of(r);

	assert_memory_equal(is, was, r->o.bytes);
	free(is);
	free(was);
}

/* It fails, more than once, nobody is told that anything is lost, and with @word
 * why; then @heal, and all is there. */
static void assert_comes_back(struct rig *r, const char *word,
			      void (*heal)(struct rig *r))
{
	char line[500];

	begin(r);
	rig_until(r, r->n->stats.open_fails >= 3);
	assert_int_equal(r->n->state, NODE_FAILED);
	if (!strstr(r->n->why, word))
		print_message("# '%s' lacks '%s'\n", r->n->why, word);
	assert_non_null(strstr(r->n->why, word));
	assert_non_null(strstr(r->n->why, "tried again"));
	node_status(r->n, line, sizeof(line));
	assert_non_null(strstr(line, "without success"));
	assert_int_equal(after.recovered, 0);
	heal(r);
	rig_until(r, r->n->state == NODE_ONLINE);
	assert_int_equal(after.recovered, 1);
	assert_int_equal(after.err, 0);
	owners_equal(&after, &before);
	assert_int_equal(r->n->stats.recover_dropped, 0);
	assert_int_equal(owner_add(r, &after, 4096, 0, NULL), 0);
	assert_int_equal(owner_flush(r), 0);
	rig_close(r);
}

/* ---- tried again ---------------------------------------------------------------- */

static int lock_fd;

static void let_go(struct rig *r)
{
	close_fd(&lock_fd);
}

static void lock_that_is_had_late_is_taken(void **state)
{
	struct rig r;

	used_rig(&r);
	lock_fd = open(r.path, O_RDWR | O_CLOEXEC);
	assert_int_equal(__real_flock(lock_fd, LOCK_EX), 0);
	r.o.lock_wait_ns = 60 * MSEC;
	assert_comes_back(&r, "locked", let_go);
	rig_fini(&r);
}

static void faults_end(struct rig *r)
{
	assert_true(node_fault_hits() > 0);
	assert_int_equal(node_fault_set(NULL, NULL, 0), 0);
}

static void error_while_opening_passes(void **state)
{
	static const char *const faults[] = {
		"nvme:openread:eio", "nvme:openread:enodata",
		"nvme:openread:short", "nvme:openread:enomem",
		"nvme:openwrite:eio", "nvme:openwrite:enospc",
		"nvme:openwrite:short", "nvme:openwrite:erofs",
	};
	struct rig r;

	used_rig(&r);
	r.o.rebuild = true;	/* nothing of this is a reason */
	for (unsigned int i = 0; i < ARRAY_SIZE(faults); i++) {
		assert_int_equal(node_fault_set(faults[i], NULL, 0), 0);
		assert_comes_back(&r, "ing", faults_end);
		owner_open(&r, &before);
		rig_close(&r);
	}
	rig_fini(&r);
}

/* A device that answers nothing is not asked for each block in turn. */
static void dead_device_is_not_read_block_by_block(void **state)
{
	struct rig r;

	used_rig(&r);
	assert_int_equal(node_fault_set("nvme:openread:eio", NULL, 0), 0);
	begin(&r);
	rig_until(&r, r.n->stats.open_fails >= 2);
	assert_true(node_fault_hits() <= 3 * (r.n->stats.open_fails + 1));
	faults_end(&r);
	rig_until(&r, r.n->state == NODE_ONLINE);
	owners_equal(&after, &before);
	rig_close(&r);

	/* the superblocks and checkpoints answer, the journal does not */
	assert_int_equal(node_fault_set("nvme:openread:eio:off=1048576:len=524288",
					NULL, 0), 0);
	begin(&r);
	rig_until(&r, r.n->stats.open_fails >= 2);
	assert_true(node_fault_hits() <= 40 * (r.n->stats.open_fails + 1));
	rig_fini(&r);
}

static char folder[220];

static void make_folder(struct rig *r)
{
	char path[300];

	assert_int_equal(mkdir(folder, 0700), 0);
	snprintf(path, sizeof(path), "%s/store", folder);
	assert_int_equal(rename(r->path, path), 0);
}

static void file_system_that_comes_late_is_waited_for(void **state)
{
	char path[300];
	struct rig r;

	used_file_rig(&r);
	snprintf(folder, sizeof(folder), "%s.d", r.path);
	snprintf(path, sizeof(path), "%s/store", folder);
	r.o.path = path;
	assert_comes_back(&r, "No such file", make_folder);
	unlink(path);
	rmdir(folder);
	rig_fini(&r);
}

static void nothing_is_made_among_the_devices(void **state)
{
	struct stat st;
	char path[64];
	struct rig r;

	rig_init(&r);
	snprintf(path, sizeof(path), "/dev/kvmm-test-%d", (int)getpid());
	r.o.path = path;
	r.o.probe_ns = MSEC;
	begin(&r);
	rig_until(&r, r.n->stats.open_fails >= 2);
	assert_non_null(strstr(r.n->why, "no such device"));
	assert_int_equal(stat(path, &st), -1);
	rig_fini(&r);
}

static void store_that_is_refused_is_refused_once(void **state)
{
	struct rig r;

	used_rig(&r);
	r.o.bytes += MIB;
	begin(&r);
	rig_until(&r, r.n->state == NODE_FAILED);
	assert_int_equal(after.recovered, 1);
	assert_int_equal(after.err, -EUCLEAN);
	for (unsigned int i = 0; i < 10; i++)
		rig_poll(&r, 10);
	assert_int_equal(r.n->stats.open_fails, 1);
	rig_fini(&r);
}

static void end_while_it_is_tried_again(void **state)
{
	struct rig r;

	used_rig(&r);
	for (unsigned int i = 0; i < 20; i++) {
		assert_int_equal(node_fault_set("nvme:openread:eio:ms=2", NULL,
						0), 0);
		r.o.probe_ns = MSEC;
		begin(&r);
		for (unsigned int k = 0; k < i; k++)
			rig_poll(&r, 1);
		rig_close(&r);
	}
	rig_fini(&r);
}

/* Who leaves before the store is open does not have it emptied. */
static void end_of_the_owner_while_it_is_opened(void **state)
{
	struct rig r;

	used_rig(&r);
	lock_fd = open(r.path, O_RDWR | O_CLOEXEC);
	assert_int_equal(__real_flock(lock_fd, LOCK_EX), 0);
	begin(&r);
	rig_until(&r, strstr(r.n->why, "waiting"));
	node_set_owner(r.n, NULL);
	let_go(&r);
	rig_until(&r, r.n->capacity);
	assert_int_not_equal(r.n->state, NODE_ONLINE);
	assert_true(node_next_deadline(r.n) > now_ns());
	rig_close(&r);
	assert_int_equal(after.recovered, 0);

	owner_open(&r, &after);
	owners_equal(&after, &before);
	rig_fini(&r);
}

/* ---- a name is not a file --------------------------------------------------------- */

static const char *filled_path;

static void other_fills_it(void)
{
	assert_int_equal(truncate(filled_path, 12345), 0);
}

/* Somebody was faster to lock what was made here: it is his now. */
static void file_that_another_filled_is_not_removed(void **state)
{
	struct stat st;
	struct rig r;

	rig_init(&r);
	filled_path = r.path;
	flock_first = other_fills_it;
	begin(&r);
	rig_until(&r, r.n->state == NODE_FAILED);
	assert_non_null(strstr(r.n->why, "12345 bytes"));
	rig_close(&r);
	assert_int_equal(stat(r.path, &st), 0);
	assert_int_equal(st.st_size, 12345);
	rig_fini(&r);
}

/* A lock on a file that lost its name protects nothing. */
static void file_that_was_replaced_is_not_the_store(void **state)
{
	struct stat st, named;
	struct rig r;

	used_file_rig(&r);
	lock_fd = open(r.path, O_RDWR | O_CLOEXEC);
	assert_int_equal(__real_flock(lock_fd, LOCK_EX), 0);
	begin(&r);
	rig_until(&r, strstr(r.n->why, "locked"));
	assert_int_equal(unlink(r.path), 0);
	close_fd(&lock_fd);
	rig_until(&r, r.n->state == NODE_ONLINE);
	assert_int_equal(after.nr_found, 0);
	assert_int_equal(stat(r.path, &named), 0);
	assert_int_equal(fstat(to_nvme(r.n)->open.fd, &st), 0);
	assert_int_equal(st.st_ino, named.st_ino);
	rig_fini(&r);
}

/* ---- the first MiB ------------------------------------------------------------------ */

static void fault_at(uint64_t off, const char *what)
{
	char spec[100];

	snprintf(spec, sizeof(spec), "nvme:%s:off=%llu:len=4096", what,
		 (unsigned long long)off);
	assert_int_equal(node_fault_set(spec, NULL, 0), 0);
}

static void assert_opens(struct rig *r)
{
	owner_open(r, &after);
	assert_true(node_fault_hits() > 0);
	owners_equal(&after, &before);
	rig_close(r);
}

static void one_superblock_that_can_be_read_is_enough(void **state)
{
	char line[500];
	struct rig r;

	used_rig(&r);
	fault_at(0, "openread:enodata");
	assert_opens(&r);
	fault_at(NVME_SUPER2_OFF, "openread:eio");
	assert_opens(&r);
	fault_at(NVME_PROBE_OFF, "openread:eio");
	assert_opens(&r);
	fault_at(0, "openwrite:eio");
	assert_opens(&r);
	fault_at(NVME_SUPER2_OFF, "openwrite:enodata");
	owner_open(&r, &after);
	owners_equal(&after, &before);
	node_status(r.n, line, sizeof(line));
	assert_non_null(strstr(line, "only one superblock"));
	rig_fini(&r);
}

static void superblocks_that_cannot_be_read_are_not_damaged(void **state)
{
	struct rig r;
	char *was;

	used_rig(&r);
	r.o.rebuild = true;
	was = image_of(&r);
	assert_int_equal(node_fault_set("nvme:openread:eio:off=0:len=4096;nvme:openread:eio:off=1044480:len=4096",
					NULL, 0), 0);
	begin(&r);
	rig_until(&r, r.n->stats.open_fails >= 2);
	rig_close(&r);
	assert_untouched(&r, was);

	/* one of them cannot be read, and the other is not one */
	assert_int_equal(pwrite(r.memfd, "noise", 5, 0), 5);
	was = image_of(&r);
	fault_at(NVME_SUPER2_OFF, "openread:eio");
	begin(&r);
	rig_until(&r, r.n->stats.open_fails >= 2);
	faults_end(&r);
	rig_until(&r, r.n->state == NODE_ONLINE);
	owners_equal(&after, &before);
	rig_close(&r);
	free(was);
	rig_fini(&r);
}

static void what_cannot_be_read_is_not_all_zeroes(void **state)
{
	struct rig r;
	char *was;

	rig_init_memory(&r);
	r.o.probe_ns = MSEC;
	assert_int_equal(ftruncate(r.memfd, (off_t)r.o.bytes), 0);
	was = image_of(&r);
	fault_at(123 * NVME_BLOCK, "openread:eio");
	begin(&r);
	rig_until(&r, r.n->stats.open_fails >= 2);
	assert_untouched(&r, was);
	faults_end(&r);
	rig_until(&r, r.n->state == NODE_ONLINE);
	rig_fini(&r);
}

/* ---- space --------------------------------------------------------------------------- */

static void sparse_store_is_opened_without_room(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.sparse = true;
	use(&r);
	r.o.free_floor_pct = 100;
	owner_open(&r, &after);
	owners_equal(&after, &before);
	assert_false(node_writable(r.n));
	rig_close(&r);
	r.o.free_floor_pct = 0;
	owner_open(&r, &after);
	owners_equal(&after, &before);
	assert_true(node_writable(r.n));
	rig_fini(&r);
}

static void what_is_not_reserved_is_counted(void **state)
{
	char line[500];
	struct stat st;
	struct rig r;

	rig_init(&r);
	fs_magic = 0xef53;
	rig_open(&r);
	assert_int_equal(r.n->stats.overcommit_bytes, 0);
	rig_close(&r);
	fs_magic = 0x9123683e;
	rig_open(&r);
	assert_int_equal(r.n->stats.overcommit_bytes, r.o.bytes);
	node_status(r.n, line, sizeof(line));
	assert_non_null(strstr(line, "overcommitted: space is not reserved on btrfs"));
	rig_close(&r);
	fs_magic = 0xef53;
	assert_int_equal(unlink(r.path), 0);
	r.o.sparse = true;
	r.o.zero_bytes_s = 1;
	rig_open(&r);
	assert_int_equal(stat(r.path, &st), 0);
	assert_true(r.n->stats.overcommit_bytes > 0);
	assert_true(r.n->stats.overcommit_bytes <= r.o.bytes);
	fs_magic = 0;
	rig_fini(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(lock_that_is_had_late_is_taken),
		cmocka_unit_test(error_while_opening_passes),
		cmocka_unit_test(dead_device_is_not_read_block_by_block),
		cmocka_unit_test(file_system_that_comes_late_is_waited_for),
		cmocka_unit_test(nothing_is_made_among_the_devices),
		cmocka_unit_test(store_that_is_refused_is_refused_once),
		cmocka_unit_test(end_while_it_is_tried_again),
		cmocka_unit_test(end_of_the_owner_while_it_is_opened),
		cmocka_unit_test(file_that_another_filled_is_not_removed),
		cmocka_unit_test(file_that_was_replaced_is_not_the_store),
		cmocka_unit_test(one_superblock_that_can_be_read_is_enough),
		cmocka_unit_test(superblocks_that_cannot_be_read_are_not_damaged),
		cmocka_unit_test(what_cannot_be_read_is_not_all_zeroes),
		cmocka_unit_test(sparse_store_is_opened_without_room),
		cmocka_unit_test(what_is_not_reserved_is_counted),
	};

	return run_on_both_engines(tests);
}
