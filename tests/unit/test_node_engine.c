/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which engine moves the bytes, how it takes an I/O back, and what status says of
 * it: where io_uring or its thread is refused the store works all the same.
 * Refused it is by a seccomp filter, as containers have one, in a child: a filter
 * is for ever.
 */
#include <fcntl.h>
#include <liburing.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <semaphore.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "daemon/node/nvme.h"
#include "tests/lib/node.h"

#define LEN	65536u
#define CHILD	"KVMM_TEST_SECCOMP"

/* From now on io_uring_setup(2) fails with @err. */
static int refuse_io_uring(int err)
{
	struct sock_filter f[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
			 offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
		BPF_STMT(BPF_RET | BPF_K,
			 SECCOMP_RET_ERRNO | (err & SECCOMP_RET_DATA)),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { .len = ARRAY_SIZE(f), .filter = f };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog))
		return -errno;
	return 0;
}

/* Pages go down and come back, many at once, some of them odd. */
static void works(struct rig *r)
{
	enum { N = 64 };
	static struct op op[N];
	static struct node_slot slot[N];
	static uint32_t crc[N];
	uint32_t i;

	for (i = 0; i < N; i++) {
		uint32_t len = LEN - i * 1000;

		fill(r->mem + i * LEN, len, i);
		assert_int_equal(node_slot_alloc(r->n, len, &slot[i]), 0);
		op_init(&op[i], NODE_WRITE, &slot[i], r->mem + i * LEN, len,
			"p");
		assert_int_equal(node_submit(r->n, &op[i].io), 0);
	}
	for (i = 0; i < N; i++) {
		rig_until(r, op[i].nr_release);
		assert_int_equal(op[i].told, 0);
		crc[i] = op[i].io.crc;
	}
	memset(r->mem, 0, N * LEN);
	for (i = 0; i < N; i++) {
		op_init(&op[i], NODE_READ, &slot[i], r->mem + i * LEN,
			LEN - i * 1000, "p");
		op[i].io.crc = crc[i];
		assert_int_equal(node_submit(r->n, &op[i].io), 0);
	}
	for (i = 0; i < N; i++) {
		rig_until(r, op[i].nr_release);
		assert_int_equal(op[i].told, 0);
		assert_filled(r->mem + i * LEN, LEN - i * 1000, i);
	}
}

static bool status_says(const struct rig *r, const char *what)
{
	char line[500];

	node_status(r->n, line, sizeof(line));
	if (!strstr(line, what))
		print_message("# %s\n", line);
	return strstr(line, what);
}

/* -- in the child ------------------------------------------------------------------ */

static void threads_do_it_where_io_uring_is_refused(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.engine = NVME_ENGINE_AUTO;
	rig_open(&r);
	assert_true(status_says(&r, "threads (io_uring was refused)"));
	works(&r);
	rig_fini(&r);
}

static void io_uring_or_nothing_is_nothing(void **state)
{
	struct rig r;

	rig_init(&r);
	r.o.engine = NVME_ENGINE_URING;
	assert_int_equal(nvme_create(&r.o, r.pool, &r.n), -EPERM);
	r.n = NULL;
	rig_fini(&r);
}

static int child_main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(threads_do_it_where_io_uring_is_refused),
		cmocka_unit_test(io_uring_or_nothing_is_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}

/* -- here --------------------------------------------------------------------------- */

static void a_host_that_refuses_io_uring_is_served_by_threads(void **state)
{
	pid_t pid = fork();
	int status;

	assert_true(pid >= 0);
	if (!pid) {
		dup2(2, 1);		/* the results here are ours */
		setenv(CHILD, "1", 1);
		if (refuse_io_uring(EPERM))
			_exit(77);
		execl("/proc/self/exe", "refused", (char *)NULL);
		_exit(127);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
		print_message("# no seccomp filters here\n");
		skip();
	}
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

static void threads_that_were_asked_for_are_no_fallback(void **state)
{
	struct rig r;

	test_engine = NVME_ENGINE_THREADS;
	rig_init(&r);
	r.o.sqpoll = true;	/* which they know nothing of */
	rig_open(&r);
	assert_true(status_says(&r, "threads, "));
	works(&r);
	rig_fini(&r);
}

static void sqpoll_is_used_or_status_says_why_not(void **state)
{
	struct rig r;
	char line[500];

	test_engine = NVME_ENGINE_URING;
	rig_init(&r);
	r.o.sqpoll = true;
	rig_open(&r);
	node_status(r.n, line, sizeof(line));
	assert_true(strstr(line, "io_uring with SQPOLL") ||
		    strstr(line, "io_uring (no SQPOLL: "));
	works(&r);
	/* its thread sleeps after a while, and is woken */
	for (int i = 0; i < 3; i++) {
		struct timespec ts = { .tv_nsec = 50 * MSEC };

		nanosleep(&ts, NULL);
		works(&r);
		rig_close(&r);
		unlink(r.path);
		rig_open(&r);
	}
	rig_fini(&r);

	rig_init(&r);
	rig_open(&r);
	assert_true(status_says(&r, "io_uring, "));
	rig_fini(&r);
}

/* -- taking back --------------------------------------------------------------------- */

static void cancel_rig(struct rig *r, struct node_slot *slot, uint32_t *crc)
{
	rig_init_memory(r);
	r->o.io_timeout_ns = 200 * MSEC;
	r->o.queue_timeout_ns = 200 * MSEC;
	r->o.threads = 2;
	rig_open(r);
	rig_until(r, r->n->stats.zeroed_bytes == r->n->capacity);
	fill(r->mem, LEN, 1);
	assert_int_equal(op_write(r, slot, r->mem, LEN, "p", crc), 0);
}

/* A read that nobody does is told of at its deadline, and taken back then. */
static void taken_back(struct rig *r, const struct node_slot *slot,
		       uint32_t crc, unsigned int misses)
{
	struct op op;
	uint64_t t0 = now_ns();

	op_init(&op, NODE_READ, slot, r->mem, LEN, "p");
	op.io.crc = crc;
	assert_int_equal(node_submit(r->n, &op.io), 0);
	rig_until(r, op.nr_done);
	assert_int_equal(op.told, -ETIMEDOUT);
	assert_true(now_ns() - t0 >= 200 * MSEC);
	rig_until(r, op.nr_release);
	assert_true(op.io.late);
	assert_int_equal(op.io.result, -ECANCELED);
	assert_false(node_buf_busy(r->n, r->mem, LEN));
	assert_int_equal(r->n->stats.dir[NODE_READ].inflight, 0);
	assert_int_equal(to_nvme(r->n)->health.bad_row, misses);
}

/* The registered file is a pipe for once: a read of it lasts for ever. */
static void io_uring_takes_back_what_the_kernel_has(void **state)
{
	struct node_slot slot;
	int pipefd[2], fd;
	struct rig r;
	uint32_t crc;

	test_engine = NVME_ENGINE_URING;
	cancel_rig(&r, &slot, &crc);
	assert_int_equal(pipe2(pipefd, O_CLOEXEC), 0);
	/* the ring is the first thing in what the engine keeps */
	assert_int_equal(io_uring_register_files_update(
		to_nvme(r.n)->eng_data, 0, &pipefd[0], 1), 1);
	/* it was the device's miss all the same */
	taken_back(&r, &slot, crc, 1);
	fd = to_nvme(r.n)->fd;
	assert_int_equal(io_uring_register_files_update(
		to_nvme(r.n)->eng_data, 0, &fd, 1), 1);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	close(pipefd[0]);
	close(pipefd[1]);
	rig_fini(&r);
}

struct jam {
	struct work	work;
	sem_t		*go;
};

static void jam_work(struct work *w)
{
	struct jam *j = container_of(w, struct jam, work);

	while (sem_wait(j->go))
		;
}

static void jam_done(struct work *w)
{
}

/* All threads are busy: what none of them has taken up can be taken back. */
static void threads_take_back_what_none_has_begun(void **state)
{
	struct jam jam[3] = { 0 };
	struct node_slot slot;
	struct rig r;
	uint32_t crc;
	sem_t go;

	test_engine = NVME_ENGINE_THREADS;
	cancel_rig(&r, &slot, &crc);
	sem_init(&go, 0, 0);
	for (int i = 0; i < 3; i++) {
		jam[i].go = &go;
		jam[i].work.fn = jam_work;
		jam[i].work.done = jam_done;
		work_submit(to_nvme(r.n)->aux, &jam[i].work);
	}
	/* the device was not even asked */
	taken_back(&r, &slot, crc, 0);
	for (int i = 0; i < 3; i++)
		sem_post(&go);
	assert_int_equal(op_read(&r, &slot, r.mem, LEN, "p", crc), 0);
	rig_fini(&r);
	sem_destroy(&go);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(io_uring_takes_back_what_the_kernel_has),
		cmocka_unit_test(threads_take_back_what_none_has_begun),
		cmocka_unit_test(
			a_host_that_refuses_io_uring_is_served_by_threads),
		cmocka_unit_test(threads_that_were_asked_for_are_no_fallback),
		cmocka_unit_test(sqpoll_is_used_or_status_says_why_not),
	};

	if (getenv(CHILD))
		return child_main();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
