/* SPDX-License-Identifier: Apache-2.0 */
/*
 * leak.h - what a process holds, before and after
 *
 * Counts open descriptors (memfds among them), mappings and their kvmm part,
 * threads and children of a process, and files in /dev/shm, which belong to
 * nobody.
 */
#ifndef KVMM_TESTS_LIB_LEAK_H
#define KVMM_TESTS_LIB_LEAK_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define LEAK_KINDS	16
#define LEAK_NAME	32

/**
 * struct leak_kind - open descriptors that are called the same
 * @name:	what /proc says, without numbers; "" ends the list
 */
struct leak_kind {
	char	name[LEAK_NAME];
	long	n;
};

/**
 * struct leak - one look
 * @fds:	open descriptors
 * @memfds:	of them, memfds
 * @kind:	all of them, by kind, sorted; what does not fit is left out
 * @maps:	lines of /proc/PID/maps that are no heap, stack or library
 * @shm_maps:	of them, mappings of memfds
 * @threads:	of the process
 * @children:	of the process, zombies too
 * @dev_shm:	files in /dev/shm
 */
struct leak {
	long	fds;
	long	memfds;
	struct leak_kind kind[LEAK_KINDS];
	long	maps;
	long	shm_maps;
	long	threads;
	long	children;
	long	dev_shm;
};

/** leak_look() - at @pid; 0 is this process. 0 or -errno */
int leak_look(pid_t pid, struct leak *l);

/** leak_calm() - the same once nothing changes any more */
void leak_calm(pid_t pid, struct leak *l);

/** leak_same() - holds @now no more and no less than @then? Says what differs */
bool leak_same(const struct leak *then, const struct leak *now, char *why,
	       size_t len);

/** leak_settle() - wait until @pid holds what it held; fails the test if not */
void leak_settle(pid_t pid, const struct leak *then, unsigned int ms);

#endif
