/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_writes.h - what the kernel was really asked to write
 *
 * A test that is linked with KERNEL_WRITES_LINK sees each write and each flush
 * as it is handed to the kernel, whatever the code above believes to have asked
 * for: entries of io_uring's queue when it is submitted, calls of pwritev2(2),
 * pwrite(2) and fdatasync(2). For that its source has the line
 *
 * link: -Wl,--wrap=io_uring_submit,--wrap=pwritev2,--wrap=pwrite,--wrap=fdatasync
 *
 * as a comment of its own.
 */
#ifndef KVMM_TESTS_LIB_KERNEL_WRITES_H
#define KVMM_TESTS_LIB_KERNEL_WRITES_H

#include <stdbool.h>
#include <stdint.h>

/**
 * struct kernel_write - a write, or a flush
 * @flush:	fdatasync(2): of all before it
 * @dsync:	is on the medium when it ends
 * @over:	a call of pwrite(2), which ends before its caller flushes
 */
struct kernel_write {
	const void	*addr;
	uint64_t	off;
	uint64_t	len;
	bool		flush;
	bool		dsync;
	bool		over;
	bool		taken;
};

/** kernel_writes_reset() - forget all; any thread, as the others */
void kernel_writes_reset(void);

/** kernel_writes_get() - number @ix since then; false: there is none, or no more */
bool kernel_writes_get(uint64_t ix, struct kernel_write *w);

/**
 * kernel_writes_take() - the last write of @addr to @off that was not taken yet
 * @dsync:	was it to be on the medium when it ended, or flushed since?
 *
 * Return: was there one?
 */
bool kernel_writes_take(const void *addr, uint64_t off, bool *dsync);

#endif
