/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/node/node.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "tests/lib/unit.h"

#define PATIENCE_NS	(20 * NSEC_PER_SEC)
#define MIB		(UINT64_C(1) << 20)

struct answer {
	struct extent	*ext;
	int		err;
	unsigned int	nr;
};

static void got(struct extent *ext, int err, void *arg)
{
	struct answer *a = arg;

	a->ext = ext;
	a->err = err;
	a->nr++;
}

static struct node *host_new(uint64_t bytes, bool huge)
{
	struct host_opts o = {
		.name = "dram0", .bytes = bytes, .numa = -1, .huge = huge,
	};
	struct node *n;

	assert_int_equal(node_fault_set(NULL, NULL, 0), 0);
	assert_int_equal(host_create(&o, &n), 0);
	return n;
}

static void wait_for(struct node *n, struct answer *a, unsigned int nr)
{
	uint64_t end = deadline_in(PATIENCE_NS);

	while (a->nr < nr && !deadline_past(end)) {
		struct pollfd p = { .fd = node_fd(n), .events = POLLIN };

		if (!node_poll(n, 0))
			poll(&p, 1, 100);
	}
	assert_int_equal(a->nr, nr);
}

static struct extent *extent_new(struct node *n, uint64_t bytes, uint32_t flags)
{
	struct answer a = { .nr = 0 };

	assert_int_equal(node_extent_get(n, bytes, flags, got, &a), 0);
	wait_for(n, &a, 1);
	assert_int_equal(a.err, 0);
	assert_non_null(a.ext);
	return a.ext;
}

static void extent_drop(struct node *n, struct extent *e)
{
	struct answer a = { .nr = 0 };

	assert_int_equal(node_extent_put(e, got, &a), 0);
	wait_for(n, &a, 1);
	assert_int_equal(a.err, 0);
}

static void end(struct node *n)
{
	assert_true(node_check(n));
	assert_int_equal(node_destroy(n, deadline_in(PATIENCE_NS)), 0);
}

static uint64_t resident(const void *addr, uint64_t bytes)
{
	static unsigned char vec[16384];
	uint64_t n = bytes / 4096, sum = 0;

	assert_true(n <= sizeof(vec));
	assert_int_equal(mincore((void *)addr, bytes, vec), 0);
	for (uint64_t i = 0; i < n; i++)
		sum += vec[i] & 1;
	return sum * 4096;
}

static void extent_is_populated_zero_and_writable(void **state)
{
	struct node *n = host_new(64 * MIB, false);
	struct extent *e = extent_new(n, 32 * MIB, 0);
	const uint64_t *w = e->addr;

	assert_int_equal(resident(e->addr, e->bytes), e->bytes);
	for (uint64_t i = 0; i < e->bytes / 8; i += 64)
		assert_int_equal(w[i], 0);
	memset(e->addr, 1, e->bytes);
	extent_drop(n, e);
	end(n);
}

static void capacity_is_exact_and_hard(void **state)
{
	struct node *n = host_new(8 * MIB, false);
	struct answer a = { .nr = 0 };
	struct extent *e, *f;

	assert_int_equal(node_extent_get(n, 8 * MIB + 4096, 0, got, &a),
			 -ENOSPC);
	assert_int_equal(node_extent_get(n, 8 * MIB, 0, got, &a), 0);
	assert_int_equal(n->used, 8 * MIB);	/* charged from the call on */
	assert_int_equal(node_extent_get(n, 4096, 0, got, &a), -ENOSPC);
	wait_for(n, &a, 1);
	e = a.ext;
	assert_int_equal(node_extent_put(e, got, &a), 0);
	wait_for(n, &a, 2);
	assert_int_equal(n->used, 0);		/* credited when gone */
	e = extent_new(n, 4 * MIB, 0);
	f = extent_new(n, 4 * MIB, 0);
	assert_int_equal(n->used, 8 * MIB);
	assert_int_not_equal(e->id, f->id);
	assert_int_equal(n->stats.extents, 2);
	extent_drop(n, f);
	extent_drop(n, e);
	assert_int_equal(n->used, 0);
	end(n);
}

static void nothing_is_populated_at_creation(void **state)
{
	uint64_t start = now_ns();
	struct node *n = host_new(UINT64_C(1) << 44, false);	/* 16 TiB */

	assert_true(now_ns() - start < NSEC_PER_SEC);
	assert_int_equal(n->state, NODE_ONLINE);
	end(n);
}

static void bad_requests_are_refused(void **state)
{
	struct node *n = host_new(8 * MIB, false);
	struct answer a = { .nr = 0 };
	struct node_slot slot;

	assert_int_equal(node_extent_get(n, 0, 0, got, &a), -EINVAL);
	assert_int_equal(node_extent_get(n, 100, 0, got, &a), -EINVAL);
	assert_int_equal(node_extent_get(n, 4096, 0x80, got, &a), -EINVAL);
	assert_int_equal(node_extent_get(n, 4096, 0, NULL, NULL), -EINVAL);
	assert_int_equal(node_slot_alloc(n, 4096, &slot), -EOPNOTSUPP);
	assert_int_equal(n->used, 0);
	end(n);
}

static void extent_is_sealed_but_stays_writable_for_the_daemon(void **state)
{
	struct node *n = host_new(8 * MIB, false);
	struct extent *e = extent_new(n, 4 * MIB, 0);
	int seals = fcntl(e->fd, F_GET_SEALS);
	struct stat st;
	void *p;

	assert_int_equal(seals & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
			 F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
	assert_int_equal(seals & F_SEAL_WRITE, 0);
#ifdef F_SEAL_FUTURE_WRITE
	assert_int_equal(seals & F_SEAL_FUTURE_WRITE, 0);
#endif
	assert_int_equal(fstat(e->fd, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0400);
	assert_int_equal(ftruncate(e->fd, 0), -1);
	assert_int_equal(ftruncate(e->fd, 8 * MIB), -1);
	assert_int_equal(fcntl(e->fd, F_ADD_SEALS, F_SEAL_WRITE), -1);

	/* as a restarted daemon would */
	p = mmap(NULL, e->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, e->fd, 0);
	assert_ptr_not_equal(p, MAP_FAILED);
	*(char *)p = 7;
	assert_int_equal(*(char *)e->addr, 7);
	munmap(p, e->bytes);
	extent_drop(n, e);
	end(n);
}

/* In a child of another user: 0, or the number of the breach. */
static int attack(int fd)
{
	char path[40];
	void *p;

	if (setgid(65534) || setuid(65534))
		return 100;
	p = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		return 1;	/* reading is granted */
	if (!mprotect(p, 4096, PROT_READ | PROT_WRITE))
		return 2;
	if (mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED)
		return 3;
	if (pwrite(fd, "x", 1, 0) >= 0)
		return 4;
	if (!fchmod(fd, 0666))
		return 5;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	if (open(path, O_RDWR) >= 0)
		return 6;
	if (!fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
		       4096))
		return 7;
	if (!ftruncate(fd, 0))
		return 8;
	return 0;
}

static void read_only_description_resists_another_user(void **state)
{
	struct node *n;
	struct extent *e;
	int status, fd;
	pid_t pid;

	if (getuid()) {
		print_message("# not root: no other user to be\n");
		skip();
	}
	n = host_new(8 * MIB, false);
	e = extent_new(n, 4 * MIB, 0);
	fd = extent_fd_ro(e);
	assert_true(fd >= 0);
	assert_int_equal(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
	assert_int_equal(fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
	pid = fork();
	if (!pid)
		_exit(attack(fd));
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	close(fd);
	extent_drop(n, e);
	end(n);
}

static void writer_sees_and_is_seen(void **state)
{
	struct node *n = host_new(8 * MIB, false);
	struct extent *e = extent_new(n, 4 * MIB, 0);
	int fd = extent_fd_rw(e);
	char *p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	assert_ptr_not_equal(p, MAP_FAILED);
	p[5] = 'k';
	assert_int_equal(((char *)e->addr)[5], 'k');
	munmap(p, 4096);
	close(fd);
	extent_drop(n, e);
	end(n);
}

static void memory_is_gone_for_who_keeps_a_mapping(void **state)
{
	struct node *n = host_new(8 * MIB, false);
	struct extent *e = extent_new(n, 4 * MIB, 0);
	int fd = extent_fd_ro(e);
	struct stat st;
	char *p = mmap(NULL, 4 * MIB, PROT_READ, MAP_SHARED, fd, 0);

	memset(e->addr, 'x', 4 * MIB);
	assert_int_equal(p[MIB], 'x');
	extent_drop(n, e);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_blocks, 0);
	assert_int_equal(p[MIB], 0);
	munmap(p, 4 * MIB);
	close(fd);
	end(n);
}

static void hugepages_are_taken_only_when_there_are_some(void **state)
{
	struct node *n = host_new(16 * MIB, true);
	struct extent *e = extent_new(n, 4 * MIB, EXTENT_HUGE);
	struct extent *odd = extent_new(n, MIB, EXTENT_HUGE);
	char line[200];

	/* whichever it was: it works and is told truthfully */
	memset(e->addr, 1, e->bytes);
	assert_int_equal(n->stats.huge_bytes,
			 e->flags & EXTENT_HUGE ? e->bytes : 0);
	assert_int_equal(odd->flags & EXTENT_HUGE, 0);
	node_status(n, line, sizeof(line));
	assert_non_null(strstr(line, "hugepages"));
	extent_drop(n, odd);
	extent_drop(n, e);
	assert_int_equal(n->stats.huge_bytes, 0);
	end(n);
}

static void failure_to_make_one_is_answered_and_uncharged(void **state)
{
	struct node *n = host_new(16 * MIB, false);
	struct answer a = { .nr = 0 };
	int fds = fd_count();

	assert_int_equal(node_fault_set("host:get:enomem:n=1", NULL, 0), 0);
	assert_int_equal(node_extent_get(n, 4 * MIB, 0, got, &a), 0);
	wait_for(n, &a, 1);
	assert_int_equal(a.err, -ENOMEM);
	assert_null(a.ext);
	assert_int_equal(n->used, 0);
	assert_int_equal(fd_count(), fds);
	extent_drop(n, extent_new(n, 4 * MIB, 0));
	end(n);
}

static void destroy_refuses_while_extents_exist(void **state)
{
	struct node *n = host_new(16 * MIB, false);
	struct extent *e = extent_new(n, 4 * MIB, 0);

	assert_int_equal(node_destroy(n, deadline_in(PATIENCE_NS)), -EBUSY);
	assert_int_equal(n->state, NODE_ONLINE);
	extent_drop(n, e);
	end(n);
}

static void destroy_answers_what_is_still_coming(void **state)
{
	struct node *n = host_new(UINT64_C(4) << 30, false);
	struct answer a = { .nr = 0 };
	int fds = fd_count() - 1;	/* its eventfd */

	assert_int_equal(node_fault_set("host:get:stall:ms=60000:n=1", NULL,
					0), 0);
	for (int i = 0; i < 3; i++)
		assert_int_equal(node_extent_get(n, 32 * MIB, 0, got, &a), 0);
	end(n);
	assert_int_equal(a.nr, 3);
	assert_int_equal(a.err, -ESHUTDOWN);
	assert_null(a.ext);
	assert_int_equal(fd_count(), fds);
}

static void nothing_is_left_open(void **state)
{
	int fds = fd_count();
	struct node *n = host_new(16 * MIB, false);

	extent_drop(n, extent_new(n, 4 * MIB, 0));
	end(n);
	assert_int_equal(fd_count(), fds);
}

static void numa_preference_does_no_harm(void **state)
{
	struct host_opts o = {
		.name = "dram0", .bytes = 8 * MIB, .numa = 0,
	};
	struct node *n;

	assert_int_equal(host_create(&o, &n), 0);
	extent_drop(n, extent_new(n, 4 * MIB, 0));
	end(n);
	o.numa = -2;
	assert_int_equal(host_create(&o, &n), -EINVAL);
	o.numa = -1;
	o.name = "";
	assert_int_equal(host_create(&o, &n), -EINVAL);
}

/* -- taken over from a daemon before ---------------------------------------- */

static void adopted_extent_holds_what_was_in_it(void **state)
{
	struct node *a = host_new(64 * MIB, false), *b;
	struct extent *e = extent_new(a, 4 * MIB, 0), *f = NULL;
	int fds = fd_count(), fd = extent_fd_rw(e);
	uint64_t id = e->id;

	assert_true(fd >= 0);
	memset((char *)e->addr + MIB, 0x5a, 4096);
	b = host_new(64 * MIB, false);
	assert_int_equal(node_extent_adopt(b, fd, 4 * MIB, id, &f), 0);
	assert_int_equal(b->used, 4 * MIB);
	assert_int_equal(b->stats.extents, 1);
	assert_int_equal(((char *)f->addr)[MIB + 17], 0x5a);
	assert_int_equal(f->id, id);
	/* at once, while it may be being registered */
	extent_drop(b, f);
	assert_int_equal(b->used, 0);
	assert_int_equal(((char *)e->addr)[MIB + 17], 0);	/* punched */
	f = extent_new(b, MIB, 0);
	assert_true(f->id > id);
	extent_drop(b, f);
	assert_int_equal(node_destroy(b, deadline_in(PATIENCE_NS)), 0);
	extent_drop(a, e);
	assert_int_equal(node_destroy(a, deadline_in(PATIENCE_NS)), 0);
	assert_true(fd_count() < fds);
}

/* A memfd of @bytes with @seals. */
static int some_memfd(uint64_t bytes, int seals)
{
	int fd = memfd_create("some", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

static void what_is_no_extent_is_not_adopted(void **state)
{
	const int all = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
	struct node *n = host_new(8 * MIB, false);
	int before = fd_count();
	struct extent *e = NULL;

	assert_int_equal(node_extent_adopt(n, some_memfd(MIB, all), 2 * MIB, 1,
					   &e), -EPROTO);
	assert_int_equal(node_extent_adopt(n, some_memfd(MIB, F_SEAL_SHRINK),
					   MIB, 1, &e), -EPROTO);
	assert_int_equal(node_extent_adopt(n, some_memfd(MIB, all |
						F_SEAL_FUTURE_WRITE),
					   MIB, 1, &e), -EPROTO);
	assert_int_equal(node_extent_adopt(n, open("/dev/zero", O_RDWR), MIB, 1,
					   &e), -EPROTO);
	assert_int_equal(node_extent_adopt(n, some_memfd(16 * MIB, all),
					   16 * MIB, 1, &e), -ENOSPC);
	assert_int_equal(node_extent_adopt(n, some_memfd(MIB, all), 17, 1, &e),
			 -EINVAL);
	assert_null(e);
	assert_int_equal(n->used, 0);
	assert_int_equal(fd_count(), before);
	assert_int_equal(node_destroy(n, deadline_in(PATIENCE_NS)), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(adopted_extent_holds_what_was_in_it),
		cmocka_unit_test(what_is_no_extent_is_not_adopted),
		cmocka_unit_test(extent_is_populated_zero_and_writable),
		cmocka_unit_test(capacity_is_exact_and_hard),
		cmocka_unit_test(nothing_is_populated_at_creation),
		cmocka_unit_test(bad_requests_are_refused),
		cmocka_unit_test(
			extent_is_sealed_but_stays_writable_for_the_daemon),
		cmocka_unit_test(read_only_description_resists_another_user),
		cmocka_unit_test(writer_sees_and_is_seen),
		cmocka_unit_test(memory_is_gone_for_who_keeps_a_mapping),
		cmocka_unit_test(hugepages_are_taken_only_when_there_are_some),
		cmocka_unit_test(failure_to_make_one_is_answered_and_uncharged),
		cmocka_unit_test(destroy_refuses_while_extents_exist),
		cmocka_unit_test(destroy_answers_what_is_still_coming),
		cmocka_unit_test(nothing_is_left_open),
		cmocka_unit_test(numa_preference_does_no_harm),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
