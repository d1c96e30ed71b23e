/* SPDX-License-Identifier: Apache-2.0 */
/*
 * admin.h - questions to a kvmmd, as tests ask them
 *
 * Everything here fails the test when the daemon does not answer, or answers
 * something else than it should.
 */
#ifndef KVMM_TESTS_LIB_ADMIN_H
#define KVMM_TESTS_LIB_ADMIN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "tests/lib/daemon.h"

struct json_t;

/** ta_request() - one request; the reply is the caller's to json_decref() */
struct json_t *ta_request(struct test_daemon *d, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));

/** ta_counter() - a node's counter by its name in struct mm_counters */
uint64_t ta_counter(struct test_daemon *d, const char *node, const char *name);

/** ta_node() - a number of a node's, as "frames.open" */
uint64_t ta_node(struct test_daemon *d, const char *node, const char *path);

/** ta_pages() - pages of all spaces, wherever they are */
uint64_t ta_pages(struct test_daemon *d);

/**
 * ta_lost() - pages that are gone for good since kvmmd started, by its counters
 *
 * Of dram0 and nvme0: the last copy left, or what a page hung on did. At least
 * as many as are gone: an orphan counts for each of its copies, and where one
 * below goes while it stays above. So whoever finds fewer than were put, less
 * these, has found a page that was lost and not counted.
 */
uint64_t ta_lost(struct test_daemon *d);

/** ta_node_state() - "online", "degraded", "failed", "offline"; static memory */
const char *ta_node_state(struct test_daemon *d, const char *node);

/** ta_rejects() - how often a client was cut off for @reason; NULL = for any */
uint64_t ta_rejects(struct test_daemon *d, const char *reason);

/** ta_clients() - clients that kvmmd knows, those of closed sockets too */
unsigned int ta_clients(struct test_daemon *d);

/** ta_open() - OPEN frames of a process, or of all with 0, as its engine's */
uint64_t ta_open(struct test_daemon *d, pid_t pid);

/** ta_pins() - pins of a process, or of all with 0 */
uint64_t ta_pins(struct test_daemon *d, pid_t pid);

/** ta_in_hand() - frames of all nodes that are open, loading, in quarantine or
 * in a magazine */
uint64_t ta_in_hand(struct test_daemon *d);

/** ta_check() - every conservation law of mm, by its own account */
void ta_check(struct test_daemon *d);

/** ta_try_check() - the same; 0 or the errno, and the law in @why */
int ta_try_check(struct test_daemon *d, char *why, size_t len);

/** ta_mode() - set the mode of all spaces */
void ta_mode(struct test_daemon *d, const char *mode);

/** ta_fault() - replace the fault table; "" for none */
void ta_fault(struct test_daemon *d, const char *spec);

/** ta_baseline() - wait until nothing is pinned or in anybody's hands */
void ta_baseline(struct test_daemon *d, unsigned int ms);

#endif
