/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a kvmmd: signals, the service manager, what was parked, the start
 * ladder, and the loop.
 */
#ifndef KVMM_DAEMON_PROCESS_H
#define KVMM_DAEMON_PROCESS_H

#include "daemon/server/config.h"
#include "daemon/server/park.h"

/**
 * struct process_opts - what a kvmmd is started with
 * @park:	what was inherited; stays the caller's
 * @cfg:	resolved; the ladder may change it
 * @config_path: where it was read; "" for the built-in defaults
 * @load:	reads and resolves another configuration file
 * @given_path:	as it is named on the command line, or NULL
 * @binary:	to be executed when an administrator wants that
 * @argv:	of this process
 */
struct process_opts {
	struct park	*park;
	struct config	*cfg;
	const char	*config_path;
	int		(*load)(const char *path, const struct park *park,
				struct config *c, struct errmsg *e);
	const char	*given_path;
	const char	*binary;
	char		**argv;
};

/**
 * process_run() - serve until a signal says otherwise
 *
 * May not return: after an execve() in place, and where what is left is the
 * kernel's to clean up.
 * Return: the exit status.
 */
int process_run(const struct process_opts *o);

#endif
