/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.h - measuring against a floor, and saying what must hold
 *
 * A bench measures a subject and a floor, which is what a hostile reviewer
 * would write in its place: the same work without kvmm. Both are run in the
 * same process in turns (floor, subject, subject, floor; then the other way
 * round), so that what changes on the machine changes both; a ratio is the
 * median over rounds of paired ratios. Floor against floor of the same rounds
 * is the noise: a ratio is known no better than that.
 *
 * Progress goes to stderr; the last line of stdout is one JSON object:
 *	{"bench": ..., "machine": {...}, "results": {...}, "must": [...]}
 */
#ifndef KVMM_TESTS_BENCH_BENCH_H
#define KVMM_TESTS_BENCH_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "tests/lib/daemon.h"

struct json_t;

/* -- the account -------------------------------------------------------------- */

struct bench {
	const char	*name;
	struct json_t	*results;
	struct json_t	*must;
	bool		failed;
	struct test_daemon *kvmmd;	/* ended by bench_die(), may be NULL */
};

/** bench_init() - begin */
void bench_init(struct bench *b, const char *name);

/** bench_result() - add a number to the results */
void bench_result(struct bench *b, const char *key, double value);
void bench_result_text(struct bench *b, const char *key, const char *text);

/**
 * bench_must() - a limit, and whether @value keeps it
 * @op: "<=", ">=" or "=="
 */
void bench_must(struct bench *b, const char *what, double value,
		const char *op, double limit);

/** bench_finish() - print the line; returns the exit status: 1 if a must failed */
int bench_finish(struct bench *b);

/** bench_say() - progress, to stderr */
void bench_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/** bench_die() - it could not be measured: say why, end the daemon, exit 2 */
void bench_die(struct bench *b, const char *what, int err)
	__attribute__((noreturn));

/* -- rounds ------------------------------------------------------------------- */

#define BENCH_ROUNDS	9
#define BENCH_MAX	64

/* Runs one block and returns what is compared, as ns per page. */
typedef double (*bench_fn)(void *arg);

/**
 * struct bench_ratio - subject against floor
 * @subject, @floor:	medians over all blocks
 * @ratio:	median over rounds of (S1 + S2) / (F1 + F2)
 * @noise:	median over rounds of the larger of F1 / F2 and F2 / F1
 */
struct bench_ratio {
	double		subject;
	double		floor;
	double		ratio;
	double		noise;
};

/** bench_abba() - @rounds rounds, each two blocks of both; one block to warm up */
void bench_abba(const char *what, unsigned int rounds, bench_fn subject,
		bench_fn floor, void *arg, struct bench_ratio *r);

/*
 * CPU time of this thread. For work that never sleeps and makes no system call:
 * a busy neighbour then costs its share of the caches, but not the CPU that it
 * took from us.
 */
static inline uint64_t bench_cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * NSEC_PER_SEC + (uint64_t)ts.tv_nsec;
}

/** bench_median() - sorts @v */
double bench_median(double *v, size_t n);

/**
 * bench_count_syscalls() - system calls that @loop makes: each is counted and
 * answered -EAGAIN, and not made
 * @prepare:	called first, in a child process in which a connection of the
 *		parent's is of no use: it opens its own. Both return 0 when all
 *		went well
 *
 * Exits when the child fails, or when the trap does not see a system call that
 * is made to try it.
 */
double bench_count_syscalls(struct bench *b, int (*prepare)(void *arg),
			    int (*loop)(void *arg), void *arg);

/* -- a daemon and a client ------------------------------------------------------- */

/** bench_daemon() - start kvmmd (exit when that fails) and end it with the bench */
void bench_daemon(struct bench *b, struct test_daemon *d,
		  const struct td_opts *o);

/**
 * struct bench_client - a connection with one space of one class
 * @node:	dram0, or what bc_open_on() was told
 */
struct bench_client {
	struct bench	*b;
	struct kvmm	*k;
	struct kvmm_space *sp;
	struct kvmm_win	*win;
	kvmm_node_t	node;
	uint32_t	page_bytes;
	uint64_t	tag;
};

/** bc_open() - connect, attach, open a window; exits when that fails */
void bc_open(struct bench_client *c, struct bench *b, const char *socket,
	     uint32_t page_bytes);
void bc_open_on(struct bench_client *c, struct bench *b, const char *socket,
		uint32_t page_bytes, const char *node);
void bc_close(struct bench_client *c);

struct kvmm_req *bc_req(struct bench_client *c, uint64_t id);

/** bc_alloc() - kvmm_alloc() that waits, and maps what comes; 0 or -errno */
int bc_alloc(struct bench_client *c, struct kvmm_req *rq, unsigned int n,
	     kvmm_frame_t *f, unsigned int timeout_ms);

/** bc_key() - the key of page @i of this bench's own numbering */
void bc_key(struct bench_client *c, uint64_t i, struct kvmm_key *key);

/**
 * bc_publish() - publish and wait for the answers
 * Return: pages that were sealed; -errno.
 */
int bc_publish(struct bench_client *c, struct kvmm_req *rq,
	       const struct kvmm_pub *pub, unsigned int n);

#define BC_PUT_MAX	32

/**
 * bc_put() - pages [@first, @first + @n) as a chain, in a request of their own
 * @n:		at most %BC_PUT_MAX
 * @key:	@n keys are written to it; may be NULL
 * Return: 0; -EIO: not all of them were new; -errno.
 */
int bc_put(struct bench_client *c, uint64_t first, unsigned int n,
	   struct kvmm_key *key);

/** bc_match() - kvmm_match() of one group; exits on an error; n_resident */
unsigned int bc_match(struct bench_client *c, struct kvmm_req *rq,
		      const struct kvmm_key *key, unsigned int n,
		      struct kvmm_hit *hit);

/** bc_counter() - a counter of dram0 by name, from the daemon's status */
uint64_t bc_counter(struct bench *b, const char *name);

/** bench_shm() - shared zeroed memory, 4 KiB pages; exits on failure */
void *bench_shm(struct bench *b, size_t bytes);
/** bench_shm_huge() - huge pages for it, as kvmmd has for an index; if there are */
bool bench_shm_huge(void *p, size_t bytes);

/* xorshift64*: fast, good enough to shuffle with. */
static inline uint64_t bench_rand(uint64_t *state)
{
	uint64_t x = *state;

	x ^= x >> 12;
	x ^= x << 25;
	x ^= x >> 27;
	*state = x;
	return x * UINT64_C(0x2545f4914f6cdd1d);
}

#endif
