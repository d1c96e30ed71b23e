/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk.h - a slot store alone, and fio beside it
 *
 * Both have a file of the same size in the same folder, written before. The node
 * is driven by the bench's own loop, as kvmmd drives it.
 */
#ifndef KVMM_TESTS_BENCH_DISK_H
#define KVMM_TESTS_BENCH_DISK_H

#include "daemon/node/node.h"
#include "tests/bench/bench.h"

#define DISK_WORKERS	"bench"		/* name of the threads of its pool */
#define DISK_SEG_BYTES	(8u << 20)
#define DISK_WAIT_NS	(60 * NSEC_PER_SEC)

/**
 * struct disk - store and fio's file
 * @bytes:	of each file
 * @mem_fd:	buffers of both
 * @n:		while it is open
 * @rest_ns:	how long fio's last run took beside its I/O
 */
struct disk {
	struct bench	*b;
	char		dir[256];
	char		node_path[300];
	char		fio_path[300];
	uint64_t	bytes;
	struct work_pool *pool;
	struct node	*n;
	int		epfd;
	int		mem_fd;
	uint64_t	rest_ns;
};

/**
 * struct disk_share - what a block came to
 * @bytes_s:	throughput
 * @cpu_gb:	CPU seconds a gigabyte
 * @syncs_s:	blocks a second that were written beside
 */
struct disk_share {
	double		bytes_s;
	double		cpu_gb;
	double		syncs_s;
};

/** disk_init() - folder, workers, fio's file; exits when something fails */
void disk_init(struct disk *d, struct bench *b, uint64_t bytes);
void disk_fini(struct disk *d);

/**
 * disk_mem() - buffers for the node: shared memory in small pages, as kvmmd's
 *
 * Before disk_fio(), which uses the very same ones. How memory lies decides how
 * many segments an I/O is made of, and where a device is a host's file that is
 * most of its cost: another piece of memory of the same kind may be half as quick.
 */
void *disk_mem(struct disk *d, size_t bytes);

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
