/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trial: would the program as it is installed now start with the configuration
 * as it is now? Asked of the program itself, in a process of its own, before
 * anything depends on the answer.
 */
#ifndef KVMM_DAEMON_TRIAL_H
#define KVMM_DAEMON_TRIAL_H

#include <stdint.h>

#include "ipc/base/err.h"

/**
 * trial_run() - run `@binary --check` and wait for its verdict
 * @config:	what it is given with --config; NULL: nothing
 *
 * The caller's thread waits. Return: 0; -EINVAL: it refuses the configuration;
 * -ETIMEDOUT: it does not answer, and was killed; other -errno: it cannot be
 * run. All with a sentence.
 */
int trial_run(const char *binary, const char *config, uint64_t deadline_ns,
	      struct errmsg *e);

#endif
