/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon's log: one line a message to stderr, with the journal's priority
 * prefix where stderr is the journal. Who decides what to do about an error
 * logs it, once, with names and numbers; hot paths count instead. The library
 * and ipc/ never log.
 *
 * A line that stderr does not take at once (a pipe that nobody reads) is
 * dropped and counted: the event loop does not wait for its log.
 *
 * Context: any thread.
 */
#ifndef KVMM_DAEMON_LOG_H
#define KVMM_DAEMON_LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/bits.h"

/* The numbers are syslog's. */
enum log_level {
	LOG_LVL_ERR	= 3,
	LOG_LVL_WARN	= 4,
	LOG_LVL_NOTICE	= 5,
	LOG_LVL_INFO	= 6,
	LOG_LVL_DEBUG	= 7,
};

/**
 * log_init() - find out where stderr goes
 *
 * Before it is called the level is notice and lines carry "kvmmd: ".
 */
void log_init(void);

void log_set_level(enum log_level level);

/** log_level_parse() - "err", "warn", "notice", "info", "debug"; -EINVAL */
int log_level_parse(const char *name);
const char *log_level_name(enum log_level level);

/** log_lost() - lines dropped so far, since stderr did not take them */
uint64_t log_lost(void);

void log_print(enum log_level level, const char *fmt, ...) __printf(2, 3);

/**
 * struct log_rate - how often a message may come; zeroed: 5 in 10 s
 * @start_ns:	begin of the interval
 * @printed:	lines in it
 * @held:	lines held back since; told with the next one that passes
 */
struct log_rate {
	uint64_t	start_ns;
	uint32_t	printed;
	uint32_t	held;
};

/**
 * log_pass() - may this message be printed?
 * @r:	the message's own; the loop's thread only
 *
 * For what clients can cause as often as they like.
 */
bool log_pass(struct log_rate *r);

#define log_err(...)		log_print(LOG_LVL_ERR, __VA_ARGS__)
#define log_warn(...)		log_print(LOG_LVL_WARN, __VA_ARGS__)
#define log_notice(...)	log_print(LOG_LVL_NOTICE, __VA_ARGS__)
#define log_info(...)		log_print(LOG_LVL_INFO, __VA_ARGS__)
#define log_debug(...)		log_print(LOG_LVL_DEBUG, __VA_ARGS__)

#endif
