/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node.h - a slot store in a temporary file, for the tests of daemon/node
 *
 * A struct rig has a pool of workers and a node on a file in $TMPDIR; a struct
 * op is an I/O that counts its callbacks and checks their order. Nothing here
 * is left behind: rig_fini() proves it by the open descriptors.
 */
#ifndef KVMM_TESTS_LIB_NODE_H
#define KVMM_TESTS_LIB_NODE_H

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/node/node.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"
#include "ipc/base/rand.h"
#include "tests/lib/unit.h"

#define MIB		(UINT64_C(1) << 20)
#define MSEC		NSEC_PER_MSEC
#define PATIENCE_NS	(60 * NSEC_PER_SEC)

/**
 * struct rig - a node under test
 * @o:		what rig_open() makes it from
 * @memfd:	the file, where it is in memory; -1
 * @mem:	memory for I/O, @mem_bytes of it
 * @fds:	open descriptors before
 */
struct rig {
	struct nvme_opts	o;
	struct work_pool	*pool;
	struct node		*n;
	char			path[200];
	int			memfd;
	char			*mem;
	uint64_t		mem_bytes;
	int			fds;
};

/**
 * struct op - an I/O and what became of it
 * @nr_done:	calls of done
 * @nr_release:	calls of release
 * @told:	what done was told
 * @done_ns:	when
 */
struct op {
	struct node_io	io;
	unsigned int	nr_done;
	unsigned int	nr_release;
	int		told;
	uint64_t	done_ns;
	char		ident[24];
};

/* The engine that this run of a test is about; set by the group's setup. */
static enum nvme_engine test_engine = NVME_ENGINE_URING;
static bool test_sqpoll;

static inline void rig_init(struct rig *r)
{
	const char *dir = getenv("TMPDIR");
	static unsigned int nr;

	memset(r, 0, sizeof(*r));
	assert_int_equal(node_fault_set(NULL, NULL, 0), 0);
	r->fds = fd_count();
	r->memfd = -1;
	snprintf(r->path, sizeof(r->path), "%s/kvmm-node-%d-%u",
		 dir ? dir : "/var/tmp", (int)getpid(), ++nr);
	assert_int_equal(work_create("test", 2, &r->pool), 0);
	r->mem_bytes = 16 * MIB;
	r->mem = mmap(NULL, r->mem_bytes, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(r->mem, MAP_FAILED);
	r->o.name = "nvme0";
	r->o.path = r->path;
	r->o.bytes = 38 * MIB;		/* 32 MiB of them are slots */
	r->o.seg_bytes = MIB;
	r->o.engine = test_engine;
	r->o.sqpoll = test_sqpoll;
	r->o.zero_bytes_s = UINT64_C(1) << 40;
	/* the disk is everybody's: slow is no failure but where a test says */
	r->o.io_timeout_ns = 20000 * MSEC;
	r->o.queue_timeout_ns = 60000 * MSEC;
}

/*
 * The file in memory: for tests about time, which a disk that others use would
 * make a lottery. Nothing of it is left in any folder.
 */
static inline void rig_init_memory(struct rig *r)
{
	rig_init(r);
	r->memfd = memfd_create("kvmm-test", MFD_CLOEXEC);
	assert_true(r->memfd >= 0);
	snprintf(r->path, sizeof(r->path), "/proc/self/fd/%d", r->memfd);
}

static inline void rig_poll(struct rig *r, int ms)
{
	struct pollfd p[2] = {
		{ .fd = node_fd(r->n), .events = POLLIN },
		{ .fd = work_fd(r->pool), .events = POLLIN },
	};
	int left;

	node_poll(r->n, 0);
	work_poll(r->pool, 0);
	node_kick(r->n);
	left = deadline_left_ms(node_next_deadline(r->n));
	if (!work_sleep(r->pool, true))
		poll(p, 2, min(left, ms));
	work_sleep(r->pool, false);
	node_poll(r->n, 0);
	work_poll(r->pool, 0);
	assert_true(node_check(r->n));
}

/* Poll until @cond holds; a test that waits in vain fails. */
#define rig_until(r, cond) do {						\
	uint64_t __end = deadline_in(PATIENCE_NS);			\
									\
	while (!(cond) && !deadline_past(__end))			\
		rig_poll(r, 100);					\
	assert_true(cond);						\
} while (0)

static inline void rig_make(struct rig *r)
{
	int err = nvme_create(&r->o, r->pool, &r->n);

	if (test_engine == NVME_ENGINE_URING &&
	    (err == -ENOSYS || err == -EPERM)) {
		print_message("# io_uring is refused here\n");
		skip();
	}
	assert_int_equal(err, 0);
}

static inline void rig_open(struct rig *r)
{
	rig_make(r);
	rig_until(r, r->n->state != NODE_STARTING);
	if (r->n->state != NODE_ONLINE)
		print_message("# %s\n", r->n->why);
	assert_int_equal(r->n->state, NODE_ONLINE);
}

static inline void rig_close(struct rig *r)
{
	assert_int_equal(node_destroy(r->n, deadline_in(PATIENCE_NS)), 0);
	r->n = NULL;
}

static inline void rig_fini(struct rig *r)
{
	if (r->n)
		rig_close(r);
	assert_int_equal(work_destroy(r->pool, deadline_in(PATIENCE_NS)), 0);
	munmap(r->mem, r->mem_bytes);
	if (r->memfd < 0)
		unlink(r->path);
	close_fd(&r->memfd);
	node_fault_set(NULL, NULL, 0);
	assert_int_equal(fd_count(), r->fds);
}

static inline void op_done(struct node_io *io, int result)
{
	struct op *op = container_of(io, struct op, io);

	assert_int_equal(op->nr_done, 0);
	assert_int_equal(op->nr_release, 0);
	op->nr_done++;
	op->told = result;
	op->done_ns = now_ns();
}

static inline void op_release(struct node_io *io)
{
	struct op *op = container_of(io, struct op, io);

	assert_int_equal(op->nr_done, 1);
	assert_int_equal(op->nr_release, 0);
	op->nr_release++;
	if (!io->late)
		assert_int_equal(io->result, op->told);
}

/* @id stands for the page's identity. */
static inline void op_init(struct op *op, enum node_dir dir,
			   const struct node_slot *slot, void *addr,
			   uint32_t len, const char *id)
{
	memset(op, 0, sizeof(*op));
	snprintf(op->ident, sizeof(op->ident), "%s", id);
	op->io.dir = dir;
	op->io.prio = dir == NODE_WRITE ? NODE_PRIO_WRITEBACK :
					  NODE_PRIO_DEMAND;
	op->io.slot = *slot;
	op->io.addr = addr;
	op->io.len = len;
	op->io.ident = op->ident;
	op->io.ident_len = (uint32_t)strlen(op->ident);
	op->io.done = op_done;
	op->io.release = op_release;
}

/* A fresh slot with @len bytes of @addr in it; returns the result. */
static inline int op_write(struct rig *r, struct node_slot *slot, void *addr,
			   uint32_t len, const char *id, uint32_t *crc)
{
	struct op op;
	int err;

	*crc = 0;
	assert_int_equal(node_slot_alloc(r->n, len, slot), 0);
	op_init(&op, NODE_WRITE, slot, addr, len, id);
	err = node_submit(r->n, &op.io);
	if (err)
		return err;
	rig_until(r, op.nr_release);
	*crc = op.io.crc;
	return op.told;
}

static inline int op_read(struct rig *r, const struct node_slot *slot,
			  void *addr, uint32_t len, const char *id,
			  uint32_t crc)
{
	struct op op;
	int err;

	op_init(&op, NODE_READ, slot, addr, len, id);
	op.io.crc = crc;
	err = node_submit(r->n, &op.io);
	if (err)
		return err;
	rig_until(r, op.nr_release);
	return op.told;
}

static inline void fill(void *addr, uint32_t len, uint64_t seed)
{
	struct rng rng;

	rng_seed(&rng, seed);
	rng_fill(&rng, addr, len);
}

static inline void assert_filled(const void *addr, uint32_t len, uint64_t seed)
{
	static unsigned char want[4 * MIB];

	assert_true(len <= sizeof(want));
	fill(want, len, seed);
	assert_memory_equal(addr, want, len);
}

/* Run @tests with io_uring's own thread, too, where there is one. */
#define run_on_all_engines(tests) ({					\
	int __err;							\
									\
	test_engine = NVME_ENGINE_URING;				\
	test_sqpoll = true;						\
	print_message("# io_uring with SQPOLL\n");			\
	__err = cmocka_run_group_tests_name("sqpoll", tests,		\
					    NULL, NULL);		\
	test_sqpoll = false;						\
	__err + run_on_both_engines(tests);				\
})

/* Run @tests once for each engine. */
#define run_on_both_engines(tests) ({					\
	int __failed = 0;						\
									\
	test_engine = NVME_ENGINE_URING;				\
	print_message("# io_uring\n");					\
	__failed = cmocka_run_group_tests_name("io_uring", tests,	\
					       NULL, NULL);		\
	test_engine = NVME_ENGINE_THREADS;				\
	print_message("# threads\n");					\
	__failed + cmocka_run_group_tests_name("threads", tests,	\
					       NULL, NULL);		\
})

#endif
