/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The park: descriptors that must outlive this process.
 *
 * Whatever a later daemon has to find again is parked under a name when it is
 * made and dropped when it is freed: the descriptor goes to who started us
 * (FDSTORE=1 over $NOTIFY_SOCKET: systemd's fd store, or `kvmmd --keep`), and
 * after a crash comes back among $LISTEN_FDS. A re-exec in place
 * (`kvmmctl daemon reexec`) brings the same descriptors by another way; who
 * takes them sees no difference.
 *
 *	start	park_create()
 *		park_next(), park_take()	what is wanted again
 *		park_done()			the rest is closed and forgotten
 *	serve	park_put(), park_drop(); park_run() now and then
 *
 * What was found says by its contents whether it is good; a name is only how it
 * is found. Names are short: all of them together go through one environment
 * string, of which Linux takes 128 KiB. A name that is put is made of printable
 * ASCII without ':', and stands for one descriptor. Do not park one open file
 * under two names: systemd keeps the first only.
 *
 * Parking never fails the work that it is for. What the store did not take (it
 * is full, busy, gone) is counted, said in status and tried again by park_run();
 * it is lost if the daemon ends before that. Where nobody keeps descriptors the
 * park only remembers what there is, for a re-exec.
 *
 * Every call takes NULL for a park that is not there.
 *
 * Context: the loop's thread.
 */
#ifndef KVMM_SERVER_PARK_H
#define KVMM_SERVER_PARK_H

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/bits.h"
#include "ipc/base/err.h"

#define PARK_NAME	70		/* bytes of a name, NUL included */
#define PARK_MAX	8192		/* descriptors; kvmmd.service says the same */
#define PARK_NAME_BYTES	(120u << 10)	/* of all names, separators included */

struct park;

/**
 * park_create() - see what was inherited, and who keeps descriptors
 * @ret:	the caller's: park_destroy()
 *
 * Takes $LISTEN_FDS or what a re-exec left, and removes them from the
 * environment. All descriptors are close-on-exec then. Once a process.
 * Return: 0 or -ENOMEM.
 */
int park_create(struct park **ret);

/** park_destroy() - close what was inherited and not taken; drops nothing */
void park_destroy(struct park *p);

/**
 * park_put() - park a descriptor under a name, now
 * @fd:		stays the caller's, who keeps it open until park_drop()
 * @fmt:	as printf(): the name, less than %PARK_NAME bytes. What was
 *		parked under it before is forgotten first
 * Return: 0: it is kept, or nobody keeps anything; -errno: it is not kept now
 * and will be tried again (-EAGAIN, -ENOSPC, -ECONNREFUSED ...), -EINVAL: not a
 * name, -ENOMEM. All are counted and none needs an answer.
 */
int park_put(struct park *p, int fd, const char *fmt, ...) __printf(3, 4);

/** park_drop() - forget a name; fine when there is no such */
void park_drop(struct park *p, const char *fmt, ...) __printf(2, 3);

/**
 * park_take() - start-up: what was inherited under a name
 *
 * It stays parked: park_drop() when it turns out to be no good, and then
 * close it.
 * Return: the descriptor, the caller's; -ENOENT: none, or it was taken.
 */
int park_take(struct park *p, const char *name);

/** park_has() - would park_take() find it? */
bool park_has(const struct park *p, const char *name);

/**
 * struct park_iter - a walk over what was inherited and is not taken
 * @name:	the current one; begin with PARK_ITER_INIT
 * @fd:		of it; park_take() makes it the caller's
 */
struct park_iter {
	char	name[PARK_NAME];
	int	fd;
};

#define PARK_ITER_INIT { .name = "", .fd = -1 }

/**
 * park_next() - step to the next name with a prefix, in strcmp() order
 *
 * Takes, puts and drops between two steps are fine.
 * Return: false at the end.
 */
bool park_next(const struct park *p, const char *prefix, struct park_iter *it);

/**
 * park_socket() - a listening socket of the manager's, by FileDescriptorName=
 * Return: the descriptor, the caller's; -ENOENT.
 */
int park_socket(struct park *p, const char *name);

/**
 * park_done() - the end of start-up: close and forget what nobody took
 * Return: how many descriptors that were.
 */
unsigned int park_done(struct park *p);

/**
 * park_run() - try again what the store did not take
 * Return: when to come again, DEADLINE_NONE when there is nothing to do.
 */
uint64_t park_run(struct park *p, uint64_t now_ns);

/** park_enabled() - does anybody keep descriptors? */
bool park_enabled(const struct park *p);

/**
 * struct park_stat - how it is
 * @keeper:	"systemd", "kvmmd --keep" or "nobody"
 * @enabled:	somebody does
 * @held:	names there are
 * @parked:	of them, known to the store
 * @waiting:	of them, not taken by the store yet, or to be removed from it
 * @max:	what the store takes
 * @inherited:	found at start; @taken of them
 * @failed:	messages that the store did not take so far
 */
struct park_stat {
	const char	*keeper;
	bool		enabled;
	unsigned int	held, parked, waiting, max;
	unsigned int	inherited, taken;
	uint64_t	failed;
};

void park_stat(const struct park *p, struct park_stat *st);

/**
 * park_why() - what an operator has to know, as a sentence
 * Return: true and the sentence; false: all is well.
 */
bool park_why(const struct park *p, char *buf, size_t len);

/** park_bytes() - memory in what was inherited and not taken */
uint64_t park_bytes(const struct park *p);

#define PARK_REEXEC_ENV "KVMM_REEXEC"	/* this process was re-executed */

/* -- a re-exec in place -------------------------------------------------------- */

/**
 * park_save() - make all that is held survive an execve() of this process
 *
 * Return: 0 or -errno. After an execve() that failed: park_unsave().
 */
int park_save(struct park *p);
void park_unsave(struct park *p);

#endif
