/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine_proc.h - the small inference engine (tests/engine/) as a child process,
 * and what its answers must be
 *
 *	struct ep e;
 *
 *	ep_start(&e, fx_path(f, 0), "-c", "gqa", NULL);
 *	ep_ask(&e, &(struct ep_req){ .id = 1, .text = "...", .max_tokens = 16 });
 *	ep_answers(&e, ans, 1);
 *	ep_expect(&ans[0], "gqa", &req);
 *	ep_quit(&e);
 *
 * All calls fail the test with a sentence; every wait has a deadline.
 */
#ifndef KVMM_TESTS_LIB_ENGINE_PROC_H
#define KVMM_TESTS_LIB_ENGINE_PROC_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define EP_MAX_TOKENS	64
#define EP_MAX_RANKS	8
#define EP_WAIT_MS	60000

/**
 * struct ep - an engine
 * @rank:	its rank processes; @nranks of them
 * @status:	wait status once it has ended
 * @err:	file that its stderr went to
 */
struct ep {
	pid_t		pid;
	int		in, out, err;
	pid_t		rank[EP_MAX_RANKS];
	unsigned int	nranks;
	int		status;
	char		*buf;
	size_t		len, cap;
};

/** struct ep_req - a request; as struct sched_req, with its prompt as text */
struct ep_req {
	uint64_t	id;
	const char	*text;
	uint32_t	max_tokens;
	uint32_t	n;
	double		temperature;
	uint64_t	seed;
};

/** struct ep_answer - a sample that came back; @err: 0, or -errno and @why */
struct ep_answer {
	uint64_t	id;
	uint32_t	sample;
	int		err;
	char		why[64];
	uint32_t	ntok;
	uint32_t	tok[EP_MAX_TOKENS];
	char		digest[20];
	uint32_t	prompt, hit, fetched, computed, preempted;
	double		ttft_ms, total_ms;
};

/** ep_start() - start it with these arguments and wait until it is ready */
void ep_start(struct ep *e, const char *socket, ...)
	__attribute__((sentinel));
/** ep_try_start() - the same; false: it ended, its last words are in @why */
bool ep_try_start(struct ep *e, char *why, size_t len, const char *socket, ...)
	__attribute__((sentinel));

/** ep_print() - let it run to its end, and what it has printed into @out */
void ep_print(char *out, size_t len, const char *socket, ...)
	__attribute__((sentinel));

void ep_ask(struct ep *e, const struct ep_req *r);
/** ep_cmd() - "preempt" and so on; @how may be NULL */
void ep_cmd(struct ep *e, const char *cmd, const char *how);

/** ep_say() - write these bytes to it, as they are */
void ep_say(struct ep *e, const char *bytes);
/** ep_complaint() - the sentence of its next error event, and of which request
 * it is; -1: it does not say */
int64_t ep_complaint(struct ep *e, char *why, size_t len);
/** ep_hang_up() - the end of its input */
void ep_hang_up(struct ep *e);

/** ep_answers() - wait for @n of them, in whatever order */
void ep_answers(struct ep *e, struct ep_answer *a, unsigned int n);
/** ep_try_answer() - false: none within @ms, or the engine has ended */
bool ep_try_answer(struct ep *e, struct ep_answer *a, unsigned int ms);

/** ep_stat() - one of its counters */
uint64_t ep_stat(struct ep *e, const char *name);

/** ep_quit() - let it end; its exit status must be 0 */
void ep_quit(struct ep *e);
/** ep_end() - how it ended by itself: exit status, or 128 + signal */
int ep_end(struct ep *e, unsigned int ms);
/** ep_kill() - SIGKILL and reap; fine twice and on zeroes */
void ep_kill(struct ep *e);

/**
 * ep_expect() - the answer is what the model says, token by token and logit by
 * logit
 * @shape:	of the model, with the weights of seed 1
 */
void ep_expect(const struct ep_answer *a, const char *shape,
	       const struct ep_req *r);

/** ep_is() - is it? */
bool ep_is(const struct ep_answer *a, const char *shape,
	   const struct ep_req *r);

/** ep_one() - ask, wait, expect; the answer */
struct ep_answer ep_one(struct ep *e, const char *shape,
			const struct ep_req *r);

/** ep_forget() - drop what ep_expect() has computed so far */
void ep_forget(void);

#endif
