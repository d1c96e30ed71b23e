/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk.h - a slot store alone, and fio beside it
 *
 * fio reads and writes the very segments of the node's file, all of which were
 * written before, from and to the very same memory: another file, or another
 * piece of memory, may be half as quick, by where on the medium it lies. So what
 * is in the slots is not to be relied on. The node is driven by the bench's own
 * loop, as kvmmd drives it.
 */
#ifndef KVMM_TESTS_BENCH_DISK_H
#define KVMM_TESTS_BENCH_DISK_H

#include "daemon/node/node.h"
#include "tests/bench/bench.h"

#define DISK_WORKERS	"bench"		/* name of the threads of its pool */
#define DISK_SEG_BYTES	(8u << 20)
#define DISK_WAIT_NS	(60 * NSEC_PER_SEC)

/* Sizes of I/O that are measured, and how many of each are in flight. */
struct disk_size {
	const char	*name;
	uint32_t	bytes;
	uint32_t	depth;
};

#define DISK_NR_SIZES	3u

extern const struct disk_size disk_sizes[DISK_NR_SIZES];

/**
 * struct disk - store and fio
 * @bytes:	of the file
 * @segs_off:	where its segments begin
 * @mem:	buffers for disk_nr_ios() of any size: shared memory, which is @mem_fd,
 *		in huge pages where the kernel has them. In small ones how quick an
 *		I/O is depends on where they lie, by a factor of two and more
 * @n:		while it is open
 * @rest_ns:	how long fio's last run took beside its I/O
 */
struct disk {
	struct bench	*b;
	char		dir[256];
	char		path[300];
	uint64_t	bytes;
	uint64_t	segs_off;
	struct work_pool *pool;
	struct node	*n;
	int		epfd;
	int		mem_fd;
	char		*mem;
	size_t		mem_bytes;
	uint64_t	rest_ns;
};

/**
 * struct disk_share - what a block came to
 * @bytes_s:	throughput
 * @cpu_gb:	CPU seconds a gigabyte, with disk_kernel_ns()
 * @syncs_s:	blocks a second that were written beside
 */
struct disk_share {
	double		bytes_s;
	double		cpu_gb;
	double		syncs_s;
};

/** disk_init() - folder, workers, memory; exits when something fails */
void disk_init(struct disk *d, struct bench *b, uint64_t bytes);
void disk_fini(struct disk *d);

/** disk_nr_ios() - handed in at once: more than the depth, one is always to start */
uint32_t disk_nr_ios(const struct disk_size *s);

/**
 * disk_open() - make the store anew and have all of it written
 * @depth:	I/Os in flight that a caller is to have in direction @dir
 * @owner:	NULL: it remembers nothing
 */
void disk_open(struct disk *d, enum node_dir dir, uint32_t depth,
	       const struct node_owner *owner);
void disk_close(struct disk *d);

/** disk_turn() - one round of the loop; sleeps when there is nothing to do */
void disk_turn(struct disk *d);

/** disk_is_fn() - is a task of this name to be counted? */
typedef bool disk_is_fn(const char *name);

/**
 * disk_cpu_ns() - CPU time of some tasks so far
 * @tasks:	folder with one of each, as /proc
 */
uint64_t disk_cpu_ns(const char *tasks, disk_is_fn *is);

/**
 * disk_kernel_ns() - CPU time of the kernel's own threads that start I/Os, so far
 *
 * Requests that find the device's queue full are handed to it later, by one of
 * those. Who keeps the queue full has them do most of its work.
 */
uint64_t disk_kernel_ns(void);

/** disk_rest() - as long as fio rested: a share of a disk may be quicker then */
void disk_rest(const struct disk *d);

/**
 * disk_fio() - fio for @ns
 * @rw:		its word for the kind of I/O
 * @syncs_s:	blocks of 4 KiB a second that a second job writes with O_DSYNC to a
 *		small file beside, one after the other; 0: none
 */
struct disk_share disk_fio(struct disk *d, const char *rw, uint32_t block_bytes,
			   uint32_t depth, uint64_t ns, double syncs_s);

#endif
