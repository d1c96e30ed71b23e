/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dm.h - the device mapper, for tests that run in a machine of their own
 *
 * And what it recorded: the target log-writes keeps on a second device every
 * write in the order in which a disk with a volatile cache has to have it. What
 * was not flushed comes with the flush behind it, and at the very end if there
 * was none; what was written through (FUA) comes when it was over. So each
 * beginning of such a log is what a power cut may leave.
 */
#ifndef KVMM_TESTS_LIB_DM_H
#define KVMM_TESTS_LIB_DM_H

#include <stdint.h>

#define DM_PATH(name)	"/dev/mapper/" name

/** dm_init() - once in main(): nobody waits for udev */
void dm_init(void);

/** dm_run() - a shell command, without its stderr; its wait status */
int dm_run(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/** dm_sh() - the same; the test fails if it does */
void dm_sh(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/** dm_create() - make device @name with this table of one line */
void dm_create(const char *name, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

/** dm_table() - exchange it under running I/O; what is held up is sent on */
void dm_table(const char *name, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

/** dm_remove() - what it held must be over */
void dm_remove(const char *name);

/** dm_mark() - a mark in the log of device @name: one word */
void dm_mark(const char *name, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

/** dm_zero() - the first @bytes of a device are zero */
void dm_zero(const char *path, uint64_t bytes);

/* -- logs ------------------------------------------------------------------------ */

enum {
	WLOG_FLUSH	= 1,
	WLOG_FUA	= 2,
	WLOG_DISCARD	= 4,
	WLOG_MARK	= 8,
};

/**
 * struct wlog_entry - one write
 * @off:	where, bytes
 * @len:	of it
 * @data:	what; of a mark: its text; NULL of what was discarded
 */
struct wlog_entry {
	uint64_t	off;
	uint64_t	len;
	uint32_t	flags;
	char		*data;
};

/**
 * struct wlog - a log
 */
struct wlog {
	struct wlog_entry *e;
	unsigned int	nr;
};

/** wlog_read() - of the device or file at @path; the test fails if it is none */
void wlog_read(struct wlog *l, const char *path);
/** wlog_free() - fine on zeroes */
void wlog_free(struct wlog *l);

/** wlog_apply() - do to an image of @bytes what entry @i did; nothing outside */
void wlog_apply(const struct wlog *l, unsigned int i, char *image,
		uint64_t bytes);

/** wlog_tear() - some sectors of it only: those of bits set in @luck, in turn */
void wlog_tear(const struct wlog *l, unsigned int i, char *image,
	       uint64_t bytes, uint64_t luck);

/** wlog_flush_after() - the next flush from @i on; @l->nr if there is none */
unsigned int wlog_flush_after(const struct wlog *l, unsigned int i);

#endif
