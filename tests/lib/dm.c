/* SPDX-License-Identifier: Apache-2.0 */
/* The device mapper and its logs; see dm.h. */
#include <endian.h>
#include <fcntl.h>
#include <linux/dm-ioctl.h>
#include <linux/fs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "ipc/base/bits.h"
#include "ipc/base/fd.h"
#include "tests/lib/dm.h"
#include "tests/lib/proc.h"

#define SECTOR		512u
#define LOG_MAGIC	UINT64_C(0x6a736677736872)

/* As the kernel writes them; each at the beginning of a sector of the log's. */
struct disk_super {
	uint64_t	magic;
	uint64_t	version;
	uint64_t	nr;
	uint32_t	sector;
} __attribute__((packed));

struct disk_entry {
	uint64_t	sector;
	uint64_t	nr_sectors;
	uint64_t	flags;
	uint64_t	data_len;
};

void dm_init(void)
{
	/* udev reads what it is told of, and what is slow keeps dmsetup waiting */
	setenv("DM_DISABLE_UDEV", "1", 1);
}

/* ---- devices ----------------------------------------------------------------- */

/* dmsetup has a sentence for each call about what dm_init() tells it of udev. */
static int run(const char *cmd)
{
	char quiet[1100];

	snprintf(quiet, sizeof(quiet), "( %s ) 2>/dev/null", cmd);
	return system(quiet);
}

int dm_run(const char *fmt, ...)
{
	char cmd[1024];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(cmd, sizeof(cmd), fmt, ap);
	va_end(ap);
	return run(cmd);
}

void dm_sh(const char *fmt, ...)
{
	char cmd[1024];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(cmd, sizeof(cmd), fmt, ap);
	va_end(ap);
	T_CHECK(!run(cmd), "%s", cmd);
}

void dm_create(const char *name, const char *fmt, ...)
{
	char table[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(table, sizeof(table), fmt, ap);
	va_end(ap);
	dm_sh("echo '%s' | dmsetup create %s", table, name);
}

void dm_table(const char *name, const char *fmt, ...)
{
	char table[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(table, sizeof(table), fmt, ap);
	va_end(ap);
	dm_sh("dmsetup suspend --noflush %s && echo '%s' | dmsetup load %s && "
	      "dmsetup resume %s", name, table, name, name);
}

void dm_remove(const char *name)
{
	dm_sh("dmsetup remove --retry %s", name);
}

void dm_mark(const char *name, const char *fmt, ...)
{
	union {
		struct dm_ioctl	io;
		char		bytes[1024];
	} u = { .io = {
		.version	= { DM_VERSION_MAJOR, 0, 0 },
		.data_size	= sizeof(u),
		.data_start	= sizeof(struct dm_ioctl),
	} };
	struct dm_target_msg *m = (void *)(u.bytes + u.io.data_start);
	size_t room = sizeof(u) - u.io.data_start - sizeof(*m) - 5;
	int fd = open("/dev/mapper/control", O_RDWR | O_CLOEXEC);
	va_list ap;

	T_CHECK(fd >= 0);
	snprintf(u.io.name, sizeof(u.io.name), "%s", name);
	memcpy(m->message, "mark ", 5);
	va_start(ap, fmt);
	vsnprintf(m->message + 5, room, fmt, ap);
	va_end(ap);
	T_EQ(ioctl(fd, DM_TARGET_MSG, &u), 0);
	close_fd(&fd);
}

void dm_zero(const char *path, uint64_t bytes)
{
	uint64_t range[2] = { 0, bytes };
	int fd = open(path, O_RDWR | O_CLOEXEC);

	T_CHECK(fd >= 0, "%s", path);
	T_EQ(ioctl(fd, BLKZEROOUT, range), 0);
	close_fd(&fd);
}

/* ---- logs -------------------------------------------------------------------- */

static void read_at(int fd, void *buf, uint64_t len, uint64_t off)
{
	uint64_t done = 0;

	while (done < len) {
		ssize_t n = pread(fd, (char *)buf + done, len - done,
				  (off_t)(off + done));

		T_CHECK(n > 0, "reading the log at %llu",
			(unsigned long long)(off + done));
		done += (uint64_t)n;
	}
}

/* Return: how long the entry at @at is in the log. */
static uint64_t read_entry(int fd, uint32_t sector, uint64_t at,
			   struct wlog_entry *e)
{
	struct disk_entry d;
	uint64_t data = at + sector, len;

	read_at(fd, &d, sizeof(d), at);
	e->off = le64toh(d.sector) * sector;
	e->len = le64toh(d.nr_sectors) * sector;
	e->flags = (uint32_t)le64toh(d.flags);
	len = e->flags & WLOG_DISCARD ? 0 : e->len;
	if (e->flags & WLOG_MARK) {
		data = at + sizeof(d);
		e->len = le64toh(d.data_len);
		T_CHECK(e->len < sector);
		len = 0;
	}
	e->data = NULL;
	if (e->flags & WLOG_MARK || len) {
		e->data = calloc(1, e->len + 1);
		T_CHECK(e->data != NULL);
		read_at(fd, e->data, e->len, data);
	}
	return sector + len;
}

void wlog_read(struct wlog *l, const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct disk_super s;
	uint64_t at;

	T_CHECK(fd >= 0, "%s", path);
	/* the kernel wrote it past the cache */
	ioctl(fd, BLKFLSBUF, 0);
	read_at(fd, &s, sizeof(s), 0);
	T_CHECK(le64toh(s.magic) == LOG_MAGIC, "%s is no log", path);
	l->nr = (unsigned int)le64toh(s.nr);
	l->e = calloc(l->nr + 1, sizeof(*l->e));
	T_CHECK(l->e != NULL);
	at = le32toh(s.sector);
	for (unsigned int i = 0; i < l->nr; i++)
		at += read_entry(fd, le32toh(s.sector), at, &l->e[i]);
	close_fd(&fd);
}

void wlog_free(struct wlog *l)
{
	for (unsigned int i = 0; i < l->nr; i++)
		free(l->e[i].data);
	free(l->e);
	memset(l, 0, sizeof(*l));
}

void wlog_tear(const struct wlog *l, unsigned int i, char *image,
	       uint64_t bytes, uint64_t luck)
{
	const struct wlog_entry *e = &l->e[i];
	uint64_t end = min(e->off + e->len, bytes);

	if (e->flags & WLOG_MARK)
		return;
	for (uint64_t at = e->off; at < end; at += SECTOR) {
		uint64_t nr = (at - e->off) / SECTOR;

		if (!(luck >> nr % 64 & 1))
			continue;
		if (e->data)
			memcpy(image + at, e->data + (at - e->off), SECTOR);
		else
			memset(image + at, 0, SECTOR);
	}
}

void wlog_apply(const struct wlog *l, unsigned int i, char *image,
		uint64_t bytes)
{
	wlog_tear(l, i, image, bytes, UINT64_MAX);
}

unsigned int wlog_flush_after(const struct wlog *l, unsigned int i)
{
	while (i < l->nr && !(l->e[i].flags & WLOG_FLUSH))
		i++;
	return i;
}
