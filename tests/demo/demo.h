/* SPDX-License-Identifier: Apache-2.0 */
/*
 * demo.h - four engines, one kvmmd, one recorded load
 *
 * The parent (demo.c) starts kvmmd and the engines and lets accidents happen.
 * An engine (engine.c) replays every fourth request of the trace as a client
 * of kvmmd like any other, through the installed headers only. What is counted
 * lies in one area that all of them map, so that a killed engine's counters
 * survive it; report.c turns it into a table and a verdict.
 */
#ifndef KVMM_TESTS_DEMO_DEMO_H
#define KVMM_TESTS_DEMO_DEMO_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "tests/lib/trace.h"
#include "tests/lib/hist.h"

struct test_daemon;

#define NR_ENGINES	4
#define PAGE_BYTES	32768u		/* of two segments, K and V */
#define NR_SEGS		2
#define BLOCK_TOKENS	512u		/* of the traces in tests/data */

/**
 * struct engine_stats - what one engine counts, over all its incarnations
 *
 * Written by the engine alone (a dead one is never written by its successor
 * at the same time), read by the parent.
 */
struct engine_stats {
	_Atomic uint64_t next;		/* requests taken from the slice */
	_Atomic uint64_t requests;	/* ended */
	_Atomic uint64_t tokens;	/* asked for */
	_Atomic uint64_t lookups;	/* kvmm_match() calls */
	_Atomic uint64_t match_ns;	/* spent in them */
	_Atomic uint64_t pages_asked;
	_Atomic uint64_t pages_dram;	/* hit at once */
	_Atomic uint64_t pages_below;	/* hit in a node below, after a fetch */
	_Atomic uint64_t pages_coming;	/* were on their way here: a fetch waited */
	_Atomic uint64_t pages_cross;	/* of both: another engine published it */
	_Atomic uint64_t pages_late;	/* fetch asked for, not there in time */
	_Atomic uint64_t pages_computed;
	_Atomic uint64_t pages_published;
	_Atomic uint64_t pages_twice;	/* somebody was first */
	_Atomic uint64_t pages_refused;	/* publish said no */
	_Atomic uint64_t pages_private;	/* no frame in time: not cached */
	_Atomic uint64_t bytes_checked;
	_Atomic uint64_t wrong_bytes;
	_Atomic uint64_t wrong_pages;
	_Atomic uint64_t copied_bytes;	/* hits that were not the page itself */
	_Atomic uint64_t shared_bytes;	/* hits that were */
	_Atomic uint64_t stopped_lookups; /* while kvmmd was stopped */
	_Atomic uint64_t stopped_hits;	/* pages found by them */
	_Atomic uint64_t errors;	/* calls that failed as they must not */
	struct hist	match;
	struct hist	match_stopped;
	struct hist	fetch;
	struct hist	publish;
};

/**
 * struct shared - the area that parent and engines map
 * @stopped:	kvmmd is stopped now; @stops counts how often it was
 * @quit:	engines finish what they have begun and exit
 * @place:	per frame: where its memory lies, as the first engine that mapped
 *		it saw it (inode and file offset); 0 = nobody yet
 * @owner:	per page: who published it last, 1 + engine; 0 = nobody
 */
struct shared {
	_Atomic uint32_t stopped;
	_Atomic uint32_t stops;
	_Atomic uint32_t quit;
	struct engine_stats engine[NR_ENGINES];
	_Atomic uint64_t *place;
	uint32_t	nr_places;
	_Atomic uint8_t	*owner;
};

/**
 * struct demo - configuration, the same in all processes
 * @seed:	only the times of the accidents depend on it
 * @corrupt:	engine 0 damages some of its sealed pages: the check must see it
 */
struct demo {
	struct trace	trace;
	struct shared	*sh;
	const char	*socket;
	bool		corrupt;
};

/**
 * engine_main() - be engine @me; returns its exit status
 *
 * Called in a child process. Exits early when the parent says quit.
 */
int engine_main(const struct demo *dm, unsigned int me);

/* The share of a slice that engine @me replays: requests me, me + 4, ... */
static inline size_t slice_len(const struct trace *t, unsigned int me)
{
	return (t->nr + NR_ENGINES - 1 - me) / NR_ENGINES;
}

/* ---- places (place.c) ------------------------------------------------------- */

/**
 * struct places - which memory each mapped extent of this process is
 *
 * The proof that a hit is no copy: frame f is at the same offset of the same
 * file in every process.
 */
struct places {
	struct place_extent {
		uintptr_t	ptr;
		size_t		bytes;
		uint64_t	id;	/* of its first byte; see place_id() */
	}		ext[512];
	unsigned int	nr;
};

/* For struct kvmm_win_opts.on_extent; @arg is a struct places. */
void places_on_extent(void *arg, void *ptr, size_t bytes, int up);

/* Where @ptr's memory really is; 0 when it is in no extent. */
uint64_t places_find(const struct places *pl, const void *ptr);

/* ---- a text (text.c) ----------------------------------------------------- */

/**
 * struct generated - what an engine made of the prompt
 * @digest:	of the logits that the text was drawn from
 * @ttft_ms:	from the request to the first token
 * @hit:	tokens of the @prompt that it did not compute
 */
struct generated {
	char		text[80];
	char		digest[24];
	double		ttft_ms;
	uint32_t	prompt, hit;
};

/** text_twice() - have a text generated, and again; 0, -EINTR or -errno */
int text_twice(const char *socket, bool quick, struct generated g[2]);

void text_print(const struct generated g[2]);

/* ---- the end (report.c) ----------------------------------------------------- */

/**
 * struct outcome - what the parent found
 * @seconds:	of the replay
 * @killed, @paused: the accidents happened
 * @engines_ok:	all ended by themselves with status 0
 * @daemon_exit: of kvmmd after SIGTERM
 * @text:	the same one twice, the second time from hits
 * @leaked:	frames that nobody has and nobody can get, after all had left
 */
struct outcome {
	double		seconds;
	bool		killed;
	bool		paused;
	bool		engines_ok;
	bool		cut_short;
	int		daemon_exit;
	struct generated text[2];
	uint64_t	leaked;
	uint64_t	daemon_copied;
	uint64_t	dram_in, dram_out;
	uint64_t	nvme_in, nvme_out;
	char		why[256];
};

/** report_collect() - ask the daemon, with all engines gone; 0 or -errno */
int report_collect(struct test_daemon *d, struct outcome *o);

/** report_print() - the table; returns the exit status */
int report_print(const struct demo *dm, const struct outcome *o);

/** sum_stats() - one counter over all engines; @off = offsetof(...) */
uint64_t sum_stats(const struct shared *sh, size_t off);
#define SUM(sh, field)	sum_stats(sh, offsetof(struct engine_stats, field))

#endif
