/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine_child.h - the small inference engine (tests/engine/) as a child
 * process, for benches and the demo
 *
 *	struct engine_child e;
 *	const char *const args[] = { "-c", "gqa", NULL };
 *	int err = ec_start(&e, d.socket, args, 10000);
 *
 *	if (!err)
 *		err = ec_ask(&e, json_pack("{s:i, s:s}", "id", 1, "text", "..."));
 *	if (!err)
 *		err = ec_event(&e, "done", 10000, &answer);
 *	ec_end(&e);
 *
 * Requests and answers are those of tests/engine/serve.h. It dies with its
 * parent. Nothing here asserts or exits: a failure is an errno and a line on
 * stderr, where the engine's own words go, too. Every wait has a deadline.
 */
#ifndef KVMM_TESTS_LIB_ENGINE_CHILD_H
#define KVMM_TESTS_LIB_ENGINE_CHILD_H

#include <stddef.h>
#include <sys/types.h>

struct json_t;

/**
 * struct engine_child - one of them
 * @pid:	0 when there is none
 * @in, @out:	its stdin and stdout
 * @buf:	what it said so far, @len of @cap bytes
 */
struct engine_child {
	pid_t		pid;
	int		in, out;
	char		*buf;
	size_t		len, cap;
};

/**
 * ec_start() - start $KVMM_BUILD/engine and wait until it is ready
 * @e:		overwritten
 * @socket:	of kvmmd
 * @args:	further arguments, NULL-terminated
 * @ms:		how long that may take
 * Return: 0; -ETIMEDOUT; -ECHILD (it ended); -EINTR (a signal came). Nothing is
 * left of it then.
 */
int ec_start(struct engine_child *e, const char *socket,
	     const char *const *args, unsigned int ms);

/** ec_ask() - send a request, whose reference it takes; 0 or -errno */
int ec_ask(struct engine_child *e, struct json_t *req);

/**
 * ec_event() - the next event of this name; others are passed over
 * @o:	a new reference
 * Return: 0; -ETIMEDOUT; -ECHILD; -EINTR; -EPROTO (it complained).
 */
int ec_event(struct engine_child *e, const char *name, unsigned int ms,
	     struct json_t **o);

/** ec_end() - let it quit, or kill it; 0, or -ECHILD if it did not end well */
int ec_end(struct engine_child *e);

/** ec_kill() - SIGKILL and reap; fine twice and on zeroes */
void ec_kill(struct engine_child *e);

#endif
