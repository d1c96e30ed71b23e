/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/log.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ipc/base/clock.h"

#define RATE_LINES	5
#define RATE_NS		(10 * NSEC_PER_SEC)

/*
 * The only state of the daemon that is not in an object: there is one stderr.
 * Set before threads start, but for the level, which may change later.
 */
static _Atomic int max_level = LOG_LVL_NOTICE;
static bool to_journal;
static _Atomic uint64_t nr_lost;

static const char *const level_names[] = {
	[LOG_LVL_ERR]		= "err",
	[LOG_LVL_WARN]		= "warn",
	[LOG_LVL_NOTICE]	= "notice",
	[LOG_LVL_INFO]		= "info",
	[LOG_LVL_DEBUG]		= "debug",
};

/* systemd names the journal's stream by device and inode; others may not. */
static bool stderr_is_journal(void)
{
	const char *env = getenv("JOURNAL_STREAM");
	unsigned long long dev, ino;
	struct stat st;

	if (!env || sscanf(env, "%llu:%llu", &dev, &ino) != 2)
		return false;
	return !fstat(STDERR_FILENO, &st) && st.st_dev == dev &&
	       st.st_ino == ino;
}

void log_init(void)
{
	to_journal = stderr_is_journal();
}

void log_set_level(enum log_level level)
{
	atomic_store_explicit(&max_level, level, memory_order_relaxed);
}

int log_level_parse(const char *name)
{
	unsigned int i;

	for (i = LOG_LVL_ERR; i < ARRAY_SIZE(level_names); i++)
		if (!strcmp(name, level_names[i]))
			return i;
	return -EINVAL;
}

const char *log_level_name(enum log_level level)
{
	return level_names[level];
}

uint64_t log_lost(void)
{
	return atomic_load_explicit(&nr_lost, memory_order_relaxed);
}

static bool writable(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLOUT };

	return poll(&p, 1, 0) == 1 && (p.revents & POLLOUT);
}

void log_print(enum log_level level, const char *fmt, ...)
{
	char line[1024];
	va_list ap;
	int n, m, saved = errno;

	if ((int)level > atomic_load_explicit(&max_level, memory_order_relaxed))
		return;
	if (to_journal)
		n = snprintf(line, sizeof(line), "<%d>", (int)level);
	else
		n = snprintf(line, sizeof(line), "kvmmd: %s%s",
			     level <= LOG_LVL_WARN ? level_names[level] : "",
			     level <= LOG_LVL_WARN ? ": " : "");
	va_start(ap, fmt);
	m = vsnprintf(line + n, sizeof(line) - (size_t)n - 1, fmt, ap);
	va_end(ap);
	if (m > 0)
		n += min(m, (int)sizeof(line) - n - 2);
	if (line[n - 1] != '\n')
		line[n++] = '\n';
	/* one write a line: lines of several threads do not mix */
	if (!writable(STDERR_FILENO) ||
	    write(STDERR_FILENO, line, (size_t)n) != n)
		atomic_fetch_add_explicit(&nr_lost, 1, memory_order_relaxed);
	errno = saved;
}

bool log_pass(struct log_rate *r)
{
	uint64_t now = now_ns();

	if (!r->start_ns || now - r->start_ns > RATE_NS) {
		if (r->held)
			log_print(LOG_LVL_NOTICE,
				  "%u more lines like the next were held back",
				  r->held);
		*r = (struct log_rate){ .start_ns = now };
	}
	if (r->printed >= RATE_LINES) {
		r->held++;
		return false;
	}
	r->printed++;
	return true;
}
