/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The start ladder: each unclean end of the daemon makes the next start trust
 * less of what the last one left.
 *
 *	1st		everything is adopted
 *	2nd in a while	the built-in policy, the configuration last confirmed
 *	3rd		and DRAM starts empty
 *	4th and later	and every space starts in bypass: it serves, and does not
 *			take part
 *
 * How long a while is the configuration says (crash_window, 10 minutes).
 *
 * After an OOM kill at most half of DRAM is adopted. An orderly stop begins
 * anew; so does a boot, of which nothing in memory is left.
 *
 * The count lies in the state folder, in "boot": a few lines of text, replaced
 * by rename. It says "running" while a daemon runs, so whoever finds that knows
 * that there was no orderly end.
 */
#ifndef KVMM_SERVER_LADDER_H
#define KVMM_SERVER_LADDER_H

#include <stdbool.h>
#include <stdint.h>

#include "ipc/base/err.h"

struct config;

#define LADDER_TIMES	8	/* as many are remembered */

enum ladder_step {
	LADDER_ADOPT,		/* all is adopted */
	LADDER_PLAIN,		/* built-in policy, confirmed configuration */
	LADDER_EMPTY,		/* nothing is adopted */
	LADDER_BYPASS,		/* and nothing is cached */
};

/**
 * struct ladder - how far this start may trust what it finds
 * @step:	the rung
 * @adopt_pct:	of DRAM, how much may be adopted at most: 100, 50 or 0
 * @unclean:	ends without order in the window
 * @oom:	the last one was an OOM kill
 * @why:	a sentence for status; "" when all is as usual
 * @dirfd:	the state folder; not owned
 * @boot:	of the kernel that runs
 * @time:	of the unclean ends in the window, oldest first, @nr_times
 */
struct ladder {
	enum ladder_step step;
	unsigned int	adopt_pct;
	unsigned int	unclean;
	bool		oom;
	char		why[200];
	int		dirfd;
	char		boot[64];
	uint64_t	time[LADDER_TIMES];
	unsigned int	nr_times;
};

/**
 * struct ladder_now - what a start knows
 * @boot:	boot id of the kernel
 * @now_s:	CLOCK_BOOTTIME, seconds
 * @window_s:	unclean ends that are older do not count; 0: none does
 * @ended:	how the last daemon ended, as its manager says: "oom-kill",
 *		"signal", "watchdog" ...; NULL or "": it does not say
 */
struct ladder_now {
	char		boot[64];
	uint64_t	now_s, window_s;
	const char	*ended;
};

/**
 * ladder_now() - as the machine and the environment say
 *
 * Consumes what `kvmmd --ended` or the keeper left.
 * @buf:	for @now->ended
 */
void ladder_now(struct ladder_now *now, const struct config *c, int dirfd,
		char *buf, size_t len);

/**
 * ladder_begin() - find the rung, and write down that a daemon runs
 * @dirfd:	the state folder, with its lock held; stays open until the end
 *
 * A file that cannot be read counts as one unclean end.
 * Return: 0; -errno: @l is good, and the file could not be written (the
 * sentence says so): the next start will know less.
 */
int ladder_begin(struct ladder *l, int dirfd, const struct ladder_now *now,
		 struct errmsg *e);

/**
 * ladder_end() - write down that this was an orderly end
 * @forget:	what was counted so far, too; false for a re-exec
 */
int ladder_end(struct ladder *l, bool forget);

/** ladder_again() - it did not end after all */
int ladder_again(struct ladder *l);

/** ladder_name() - "adopt", "plain", "empty", "bypass" */
const char *ladder_name(enum ladder_step step);

/**
 * ladder_ended() - `kvmmd --ended`: leave word of how a daemon ended
 * @dir:	the state folder
 * @result:	$SERVICE_RESULT
 */
int ladder_ended(const char *dir, const char *result);

#define LADDER_CONFIRMED "confirmed.json"

/**
 * ladder_confirm() - this configuration has served well: keep a copy
 * @c:	as it was read; the copy is %LADDER_CONFIRMED in the state folder
 */
int ladder_confirm(int dirfd, const struct config *c);

/**
 * ladder_apply() - take from a configuration what this step does without
 * Return: true when something was changed.
 */
bool ladder_apply(const struct ladder *l, struct config *c);

#endif
