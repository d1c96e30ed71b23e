/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/fd.h"
#include "ipc/shm.h"
#include "tests/lib/unit.h"

#define BYTES	8192

static int before;

static int setup(void **state)
{
	before = fd_count();
	return 0;
}

static int teardown(void **state)
{
	return fd_count() == before ? 0 : -1;
}

static void created_memory_is_sized_sealed_and_private(void **state)
{
	struct shm s = SHM_INIT;
	struct stat st;
	int seals;

	assert_int_equal(shm_create(&s, "test", BYTES, 0), 0);
	assert_int_equal(s.ro_fd, -1);
	assert_int_equal(fstat(s.fd, &st), 0);
	assert_int_equal(st.st_size, BYTES);
	assert_int_equal(st.st_mode & 0777, 0400);
	seals = fcntl(s.fd, F_GET_SEALS);
	assert_true(seals & F_SEAL_SHRINK);
	assert_true(seals & F_SEAL_GROW);
	assert_true(seals & F_SEAL_SEAL);
	/* a daemon that takes over must be able to map and to punch it */
	assert_false(seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE));
	assert_int_equal(ftruncate(s.fd, BYTES / 2), -1);
	assert_int_equal(ftruncate(s.fd, BYTES * 2), -1);
	assert_true(fcntl(s.fd, F_GETFD) & FD_CLOEXEC);
	memset(s.addr, 1, BYTES);
	shm_fini(&s);
	shm_fini(&s);
	assert_null(s.addr);
}

static void the_read_only_description_cannot_write(void **state)
{
	struct shm s = SHM_INIT, r = SHM_INIT;

	assert_int_equal(shm_create(&s, "test", BYTES, 1), 0);
	strcpy(s.addr, "hello");
	assert_int_equal(shm_map_fd(&r, dup(s.ro_fd), BYTES, 0), 0);
	assert_string_equal(r.addr, "hello");
	assert_int_equal(mprotect(r.addr, BYTES, PROT_READ | PROT_WRITE), -1);
	shm_fini(&r);
	/* asked for writing it is no use, and closed */
	assert_int_equal(shm_map_fd(&r, dup(s.ro_fd), BYTES, 1), -EPROTO);
	assert_null(r.addr);
	shm_fini(&s);
}

static void what_could_kill_the_reader_is_refused(void **state)
{
	struct shm s = SHM_INIT, r = SHM_INIT;
	int fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_int_equal(ftruncate(fd, BYTES), 0);
	assert_int_equal(shm_map_fd(&r, fd, BYTES, 0), -EPROTO);
	fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	assert_int_equal(shm_map_fd(&r, fd, BYTES, 0), -EPROTO);
	assert_int_equal(shm_map_fd(&r, -1, BYTES, 0), -EBADF);
	assert_int_equal(shm_create(&s, "test", BYTES, 0), 0);
	assert_int_equal(shm_map_fd(&r, dup(s.fd), BYTES + 1, 0), -EPROTO);
	assert_int_equal(shm_map_fd(&r, dup(s.fd), 0, 0), -EPROTO);
	shm_fini(&s);
}

static void two_mappings_are_one_memory(void **state)
{
	struct shm s = SHM_INIT, w = SHM_INIT;

	assert_int_equal(shm_create(&s, "test", BYTES, 0), 0);
	assert_int_equal(shm_map_fd(&w, dup(s.fd), BYTES, 1), 0);
	strcpy(w.addr, "from the other side");
	assert_string_equal(s.addr, "from the other side");
	shm_fini(&w);
	shm_fini(&s);
}

static void a_child_does_not_have_the_mapping(void **state)
{
	struct shm s = SHM_INIT, r = SHM_INIT;
	int status;
	pid_t pid;

	assert_int_equal(shm_create(&s, "test", BYTES, 0), 0);
	assert_int_equal(shm_map_fd(&r, dup(s.fd), BYTES, 1), 0);
	pid = fork();
	if (!pid) {
		/* sanitizers' own handlers would make a story of it */
		signal(SIGSEGV, SIG_DFL);
		*(volatile char *)r.addr = 1;
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFSIGNALED(status));
	assert_int_equal(WTERMSIG(status), SIGSEGV);
	shm_fini(&r);
	shm_fini(&s);
}

static void no_bytes_is_an_error(void **state)
{
	struct shm s = SHM_INIT;

	assert_int_equal(shm_create(&s, "test", 0, 1), -EINVAL);
	assert_int_equal(s.fd, -1);
}

static long nr_maps(void)
{
#ifdef __SANITIZE_THREAD__
	return 0;		/* its shadow comes and goes with what it shadows */
#endif
	FILE *f = fopen("/proc/self/maps", "r");
	long n = 0;
	int c;

	assert_non_null(f);
	while ((c = fgetc(f)) != EOF)
		n += c == '\n';
	fclose(f);
	return n;
}

/* Large ones are mapped so that huge pages fit, and nothing is left around them. */
static void large_files_are_mapped_for_huge_pages(void **state)
{
	size_t sizes[] = { SHM_HUGE_BYTES, SHM_HUGE_BYTES + 1,
			   3 * SHM_HUGE_BYTES - 4096 };
	unsigned int i;

	for (i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		struct shm s = SHM_INIT, r = SHM_INIT;
		long maps = nr_maps();

		assert_int_equal(shm_create(&s, "test", sizes[i], 1), 0);
		assert_int_equal(shm_map_fd(&r, dup(s.ro_fd), sizes[i], 0), 0);
		assert_int_equal((uintptr_t)s.addr % SHM_HUGE_BYTES, 0);
		assert_int_equal((uintptr_t)r.addr % SHM_HUGE_BYTES, 0);
		((char *)s.addr)[sizes[i] - 1] = 7;
		assert_int_equal(((char *)r.addr)[sizes[i] - 1], 7);
		shm_fini(&r);
		shm_fini(&s);
		assert_int_equal(nr_maps(), maps);
	}
}

/*
 * Whether there are huge pages is the machine's business: what is in the file
 * stays as it was, whoever has it mapped, and only whole pieces are tried.
 */
static void huge_pages_change_nothing_that_can_be_seen(void **state)
{
	size_t bytes = 3 * SHM_HUGE_BYTES, i;
	struct shm s = SHM_INIT, r = SHM_INIT;
	int64_t n;

	assert_int_equal(shm_create(&s, "test", bytes, 1), 0);
	assert_int_equal(shm_map_fd(&r, dup(s.ro_fd), bytes, 0), 0);
	for (i = 0; i < bytes; i += 4096)
		((char *)s.addr)[i + i / 4096 % 4096] = (char)(i / 4096);
	n = shm_huge(s.fd, 4096, bytes - 4096);
	assert_true(n < 0 || n % (int64_t)SHM_HUGE_BYTES == 0);
	assert_true(n <= 2 * (int64_t)SHM_HUGE_BYTES);
	assert_int_equal(shm_huge(s.fd, 4096, SHM_HUGE_BYTES), 0);
	for (i = 0; i < bytes; i += 4096) {
		assert_int_equal(((char *)r.addr)[i + i / 4096 % 4096],
				 (char)(i / 4096));
		((char *)s.addr)[i] = 3;
		assert_int_equal(((char *)r.addr)[i], 3);
	}
	assert_true(shm_huge(-1, 0, bytes) < 0);
	shm_fini(&r);
	shm_fini(&s);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(created_memory_is_sized_sealed_and_private),
		T(the_read_only_description_cannot_write),
		T(what_could_kill_the_reader_is_refused),
		T(two_mappings_are_one_memory),
		T(a_child_does_not_have_the_mapping),
		T(no_bytes_is_an_error),
		T(large_files_are_mapped_for_huge_pages),
		T(huge_pages_change_nothing_that_can_be_seen),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
