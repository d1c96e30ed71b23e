/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine.pml - an engine of two processes: references end when every member
 * has exited.
 *
 * The leader (processor 0, a scheduler) pins; it tells the worker (processor 1,
 * a rank) which frame to read in step n; the worker reads, then stores its step
 * word; the leader unpins when the step word has come to n (the `after` of
 * kvmm_req_end()). Each may get SIGKILL at any step, and the other goes on: a
 * worker reads to the end what it was told to, and may still have a job in its
 * queue. The pins all stand in the leader's window ledger.
 *
 * OPEN_FRAME: frame 1 is the engine's own, OPEN, and the worker writes into it as
 * long as it lives. It is nobody's again (QUARANTINE, then FREE) when every
 * member has exited.
 *
 * Taken away on request:
 *	LEADER_ONLY	references end when the leader has exited
 *	NO_AFTER	the leader unpins without waiting for the worker's step
 */
#ifndef MAXRE
#define MAXRE 2
#endif
#ifndef NK
#define NK 3
#endif
#ifndef BL
#define BL 4
#endif
#define NF	2
#define D	2
#define NB	3
#define NW	1
#define STEP	NM_FRAME	/* the worker's step word */
#define NM_EXTRA 1
#ifndef JOBS
#define JOBS	2		/* steps of the engine */
#endif

bool using[2 * NF];		/* member m uses frame f: using[m * NF + f] */
bool writing;			/* the worker may write into frame 1 */
bool killed[2], exited[2];
#define USED(f)	(using[f] || using[NF + (f)] || (writing && (f) == 1))

#include "frame.pml"

chan job = [1] of { byte, byte, byte };	/* page, frame, step */

proctype wb()
{
end:	do
	:: flush(0)
	:: atomic {
			flush(1);
			/* did that change a page that others may read? */
			if
			:: mem[WORD(1)] == W(READY, gen[1]) ->
				read_page(key[1], 1)
			:: else
			fi
		}
	:: flush(2)
	od
}

proctype leader()
{
	byte k, l, w, n;

end:	do
	:: n < JOBS ->
		n++;
		atomic {
			if
			:: mem[LINE(0)] != 0 -> k = 0
			:: mem[LINE(1)] != 0 -> k = 1
			:: mem[LINE(2)] != 0 -> k = 2
			fi;
			l = mem[LINE(k)]
		};
		inc(0, PIN(0, AT_FRAME(l)));
		d_step {
			w = mem[WORD(AT_FRAME(l))];
			if
			:: HIT(w, l) -> using[AT_FRAME(l)] = 1
			:: else
			fi
		};
		if
		:: HIT(w, l) ->
			/* launch step n, which reads the page */
			atomic {
				job!k, AT_FRAME(l), n;
				using[NF + AT_FRAME(l)] = !killed[1];
				using[AT_FRAME(l)] = 0
			};
#ifndef NO_AFTER
			mem[STEP] == n
#endif
		:: else
		fi;
		put(0, PIN(0, AT_FRAME(l)) + MINUS, 0);
		d_step { k = 0; l = 0; w = 0 }
	od unless {
		killed[0]
	}
}

proctype worker()
{
	byte k, f, n;

end:	do
	:: job?k, f, n ->
		read_page(k, f);
		d_step { read_page(k, f); using[NF + f] = 0 };
		put(1, STEP, n);	/* release: after the last read */
		d_step { k = 0; f = 0; n = 0 }
#ifdef OPEN_FRAME
	/* one store at a time is enough to come too late */
	:: writing && bn[1] == 0 -> put(1, DATA(1), HALF)
#endif
	od unless {
		killed[1]
	}
}

proctype killer(bit m)
{
	d_step {
		killed[m] = 1;
		using[m * NF] = 0;
		using[m * NF + 1] = 0;
		if
		:: m == 1 -> writing = 0
		:: else
		fi
	};
	bn[m] == 0;
	exited[m] = 1
}

/* The engine's references have ended. */
#ifdef LEADER_ONLY
#define GONE	exited[0]
#else
#define GONE	(exited[0] && exited[1])
#endif

proctype daemon()
{
	byte f, k, s, snap;
	bool gone;

end:	do
	:: nre < MAXRE && (sealed[0] || sealed[1]) ->
		if
		:: sealed[0] -> f = 0
		:: sealed[1] -> f = 1
		fi;
		isolate_and_sum(f, snap, s);
		if
		:: s == 0 -> drop(f); choose_key(k); seal(f, k)
		:: else -> put_back(f)
		fi;
		d_step { f = 0; k = 0; s = 0 }
	:: !gone && GONE ->
		gone = 1;
		list = 0;
#ifdef OPEN_FRAME
		d_step { freed_in_use = USED(1); assert(!freed_in_use) };
		choose_key(k);
		seal(1, k);
		k = 0
#endif
	od
}

init {
	atomic {
		boot_frame(0, 0);
#ifdef OPEN_FRAME
		d_step {
			mem[WORD(1)] = W(OPEN, 0);
			mem[DATA(1)] = HALF;
			writing = 1
		};
#else
		boot_frame(1, 1);
#endif
		list = 1;
		run killer(0);
		run killer(1);
		run wb();
		run daemon();
		run leader();
		run worker()
	}
}
