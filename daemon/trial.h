/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trial: would the program as it is installed now start with the configuration
 * as it is now? Asked of the program itself, in a process of its own, before
 * anything depends on the answer.
 */
#ifndef KVMM_DAEMON_TRIAL_H
#define KVMM_DAEMON_TRIAL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "ipc/base/err.h"

/**
 * struct trial - one of them
 * @pid:	0: none runs
 * @out:	reads what it says on stderr
 * @due_ns:	it is killed then
 * @text:	the begin of what it said, @len bytes
 */
struct trial {
	pid_t		pid;
	int		out;
	uint64_t	due_ns;
	char		text[256];
	size_t		len;
};

#define TRIAL_INIT { .out = -1 }

/**
 * trial_begin() - run `@binary --check`
 * @config:	what it is given with --config; NULL: nothing
 * Return: 0; -errno with a sentence: it cannot be run.
 */
int trial_begin(struct trial *t, const char *binary, const char *config,
		uint64_t deadline_ns, struct errmsg *e);

/**
 * trial_poll() - its verdict, if it has one; does not wait
 * Return: 0: it would start; -EAGAIN: not yet; -EINVAL: it would not; -ETIMEDOUT:
 * it does not answer, and was killed. The last two with a sentence.
 */
int trial_poll(struct trial *t, struct errmsg *e);

/** trial_end() - whatever it would say, nobody asks any more; fine if none runs */
void trial_end(struct trial *t);

#endif
