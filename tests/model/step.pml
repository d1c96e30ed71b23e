/* SPDX-License-Identifier: Apache-2.0 */
/*
 * step.pml - a page becomes READY after every member's step, and the daemon
 * that waits for a step is woken.
 *
 *	member m, kvmm_step_done(n)		daemon, something waits for s
 *	its part of step n	(plain)		step_wanted[m] = s	(seq_cst)
 *	step[m] = n		(seq_cst)	step[m] of all		(seq_cst)
 *	step_wanted[m]		(seq_cst)	min >= s: READY, else sleep
 *	wanted <= n: ring
 *
 * Each ledger has a step word and a step_wanted. When a member rings and the
 * others are not there yet, the daemon goes to sleep again and the last one
 * rings it. RING_ONCE: a member rings only in the call that takes it across the
 * wanted step, which is enough.
 *
 * The publisher (the leader, in a thread of its own to allow any order) posts a
 * publish with after = n for each step, at any time from launch on. That the
 * submission itself wakes the daemon is ring.pml's subject; here it just does.
 *
 * What must hold:
 *	ready_too_early	READY while some member's part is not in memory
 *	lost_wakeup	all is quiet, a publish waits, and it need not: every
 *			member that is alive has done the step. All members do
 *			all steps, so at the end nothing may be left but what
 *			a death had refused. (The daemon's sleep is no valid end
 *			state, so that Spin reports it even without the ghost.)
 *
 * JOIN		member 1 joins at any time
 * CRASH	member 1 gets SIGKILL at any step; what waits is refused
 * NO_WATCH	leaves finding a lost wake-up to Spin's end states
 * Taken away on request:
 *	LEADER_ONLY	only member 0's step word counts
 *	SKIP_ABSENT	members that have not joined do not count
 *	SKIP_DEAD	members that have died do not count
 *	NO_REREAD	the step words are read before step_wanted is stored
 *	PLAIN_STEP	the step word is a release store
 *	PLAIN_WANTED	step_wanted is a release store
 */
#ifndef STEPS
#define STEPS 2
#endif
#ifndef BL
#define BL 3
#endif
#define D	2
#define NB	3
#define STEP(m)		(m)
#define WANTED(m)	(2 + (m))		/* 0: none (~0 in C) */
#define PART(n, m)	(4 + 2 * ((n) - 1) + (m))
#define NM		(4 + 2 * STEPS)

#include "tso.pml"

bool bell;			/* the daemon's epoll has something */
byte posted;			/* publishes 1 .. posted have been sent */
byte ready;			/* pages 1 .. ready are READY */
bool refused;			/* the engine is dying: the rest is refused */
bool joined = 1;		/* member 1 */
bool killed, exited;		/* member 1 */

bool ready_too_early;
bool lost_wakeup;

proctype wb()
{
end:	do
	:: flush(0)
	:: flush(1)
	:: flush(2)
	od
}

proctype member(byte m)
{
	byte n, w;

	do
	:: n < STEPS ->
		n++;
		put(m, PART(n, m), 1);
#ifdef PLAIN_STEP
		put(m, STEP(m), n);
#else
		xchg(m, STEP(m), n);
#endif
		w = mem[WANTED(m)];
		if
#ifdef RING_ONCE
		:: w == n -> bell = 1	/* n - 1 < w <= n */
#else
		:: w != 0 && w <= n -> bell = 1
#endif
		:: else
		fi;
		w = 0
	:: else ->
		break
	od unless {
		m == 1 && killed
	}
}

proctype publisher()
{
	do
	:: posted < STEPS -> d_step { posted++; bell = 1 }
	:: else -> break
	od
}

#ifdef CRASH
proctype killer()
{
	if
	:: killed = 1;
		bn[1] == 0;
		d_step { exited = 1; bell = 1 }
	:: skip
	fi
}
#endif

#ifdef JOIN
proctype joiner()
{
	/* the daemon itself does this, so it needs no order */
	d_step { joined = 1; bell = 1 };
	run member(1)
}
#endif

/* Lowest step word; 0 as long as somebody is missing. */
inline lowest(a, b)
{
	a = mem[STEP(0)];
#ifndef LEADER_ONLY
	b = mem[STEP(1)];
	if
#ifdef SKIP_ABSENT
	:: !joined -> skip
#else
	:: !joined -> a = 0
#endif
#ifdef SKIP_DEAD
	:: exited -> skip
#endif
	:: else -> a = (b < a -> b : a)
	fi;
	b = 0
#endif
}

inline want(m, n)
{
#ifdef PLAIN_WANTED
	put(D, WANTED(m), n)
#else
	xchg(D, WANTED(m), n)
#endif
}

proctype daemon()
{
	byte n, a, b;

	do
	:: bell ->
		bell = 0;
again:		n = posted;
#ifndef SKIP_DEAD
		if
		:: exited -> refused = 1; break
		:: else
		fi;
#endif
		lowest(a, b);
		do
		:: ready < n && ready < a ->
			d_step {
				ready++;
				ready_too_early = !mem[PART(ready, 0)] ||
						  !mem[PART(ready, 1)];
				assert(!ready_too_early)
			}
		:: else ->
			break
		od;
		if
		:: ready < n ->
			want(0, ready + 1);
			want(1, ready + 1);
#ifndef NO_REREAD
			lowest(a, b);
			if
			:: a > ready -> goto again
			:: else
			fi
#endif
		:: ready == STEPS ->
			break
		:: else ->
			put(D, WANTED(0), 0);
			put(D, WANTED(1), 0)
		fi;
		n = 0;
		a = 0
	od
}

#ifndef NO_WATCH
proctype watch()
{
	timeout ->
	d_step {
		lost_wakeup = ready < posted && !refused;
		assert(!lost_wakeup)
	}
}
#endif

init {
	atomic {
#ifndef NO_WATCH
		run watch();
#endif
		run wb();
		run publisher();
		run daemon();
		run member(0);
#ifdef JOIN
		joined = 0;
		run joiner();
#else
		run member(1);
#endif
#ifdef CRASH
		run killer();
#endif
	}
}
