/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handover.pml - who holds a frame between the daemon's answer and the
 * client's pin (ipc/ring.h, struct ring_result).
 *
 *	daemon					client
 *	reference on f		(private)	tail		(acquire)
 *	entry: f		(plain)		entry: f
 *	tail			(seq_cst)	pins[f] += 1	(seq_cst RMW)
 *	...					head		(release)
 *	head			(acquire)	use f
 *	passed: reference dropped
 *
 * A completion is never stale, so the client does not look at the frame's word:
 * what the completion names is its own from the first moment. The daemon's
 * reference is dropped when it sees that head has passed the entry; the client's
 * increment came before that store of head, so whoever sums pins afterwards sees
 * it. Hence a rule for reclaim: between the sum of the pins and the decision it
 * takes no news of head (HEAD_LATE). The client's exit drops what it left.
 *
 * The client fetches pages; to bring one in, and under pressure at any time, the
 * daemon reclaims a frame that it believes to be unused and re-uses it.
 *
 * What must hold, besides frame.pml's ghosts:
 *	leaked_ref	all is quiet, the client has taken all completions or is
 *			gone, and a reference is left
 *
 * CRASH	the client gets SIGKILL at any step
 * CLOSE	its session closes at any time before that, and it goes on: it
 *		may take what is in the ring, so its references stay until exit
 * RECHECK	the client compares the frame's word with the completion's after
 *		its pin, and takes another word for a miss
 * Taken away on request:
 *	DROP_ON_POST	the reference ends when the completion is posted
 *	HEAD_FIRST	the client advances head, then pins
 *	HEAD_LATE	reclaim: sum of the pins, then head, then the decision
 *	DROP_AT_CLOSE	references end when the session closes; RECHECK makes
 *			that safe
 *	EXIT_KEEPS	exit ends the client's pins only
 *	POST_TO_GONE	a fetch that ends after its client makes a reference too
 */
#ifndef MAXRE
#define MAXRE 2
#endif
#ifndef N
#define N 2			/* fetches */
#endif
#ifndef BL
#define BL 4
#endif
#define NF	2
#define NK	3
#define D	1
#define NB	2
#define NW	1
#define TAIL	NM_FRAME
#define HEAD	(NM_FRAME + 1)
#define ENTRY(i)	(NM_FRAME + 2 + (i))
#define SAID(i)		(NM_FRAME + 2 + N + (i))	/* the READY word */
#define NM_EXTRA (2 + 2 * N)
#define NONE	255

bool using[NF];
bool killed, exited, gone;	/* the process; gone: the daemon knows */
bool closed;			/* its session, for the daemon */
#define USED(f)	using[f]

#include "frame.pml"

chan fetch = [1] of { byte };
byte ref[NF];			/* hand-over references */
byte entry[N];			/* the daemon's copy: frame of completion i */
byte posted, passed;		/* completions; those whose reference is dropped */
bool leaked_ref;

proctype wb()
{
end:	do
	:: flush(0)
	:: flush(1)
	od
}

proctype client()
{
	byte k, f, n;

	do
	:: n < N ->
		atomic {
			if
			:: k = 0
			:: k = 1
			:: k = 2
			fi;
			fetch!k
		};
#ifdef CLOSE
end:		/* for ever, if the session closed: deadlines are not modelled */
#endif
		mem[TAIL] > n;
		f = mem[ENTRY(n)];
		n++;
#ifdef HEAD_FIRST
		put(0, HEAD, n);
#endif
		if
		:: f != NONE ->
#ifdef RECHECK
			inc(0, PIN(0, f));
			d_step {
				if
				:: mem[WORD(f)] == mem[SAID(n - 1)] ->
					using[f] = 1
				:: else
				fi
			}
#else
			d_step {
				bn[0] == 0;
				mem[PIN(0, f)]++;
				using[f] = 1
			}
#endif
		:: else
		fi;
#ifndef HEAD_FIRST
		put(0, HEAD, n);
#endif
		if
		:: f != NONE && using[f] ->
			read_page(k, f);
			d_step { read_page(k, f); using[f] = 0 }
		:: else
		fi;
		if
		:: f != NONE -> put(0, PIN(0, f) + MINUS, 0)
		:: else
		fi;
		d_step { k = 0; f = 0 }
	:: else ->
		break
	od unless {
		killed
	}
}

#ifdef CRASH
proctype killer()
{
	if
	:: d_step { killed = 1; using[0] = 0; using[1] = 0 };
		bn[0] == 0;
		exited = 1
	:: skip
	fi
}
#endif

inline unref()
{
	d_step {
#ifndef DROP_ON_POST
		if
		:: entry[passed] != NONE -> ref[entry[passed]]--
		:: else
		fi;
#endif
		passed++
	}
}

/* The references of entries that head has passed. */
inline reap()
{
	do
	:: passed < mem[HEAD] ->
		unref()
	:: else ->
		break
	od
}

/* All references that are left. */
inline drop_refs()
{
	do
	:: passed < posted ->
		unref()
	:: else ->
		break
	od
}

/* Make frame @f free, or find that it is held: then @s != 0. */
inline reclaim(f, snap, s)
{
#ifdef HEAD_LATE
	isolate_and_sum(f, snap, s);
	reap();
	s = s + ref[f];
#else
	s = ref[f];
	if
	:: s == 0 -> isolate_and_sum(f, snap, s)
	:: else
	fi;
#endif
	if
	:: s == 0 -> drop(f)
	:: else -> put_back(f)
	fi
}

/* The filter: a frame that nobody seems to hold. */
#define MAYBE_FREE(f) \
	(sealed[f] && (!(list & 1) || mem[PIN(0, f)] == 0) && LOOSE(f))
#ifdef HEAD_LATE
#define LOOSE(f)	1
#else
#define LOOSE(f)	(ref[f] == 0)
#endif

/*
 * An operation may end after its client has: then nobody is there to take the
 * reference over, and none is made.
 */
inline post(f)
{
	d_step {
#ifndef DROP_ON_POST
		if
		:: f != NONE -> ref[f]++
		:: else
		fi;
#endif
		entry[posted] = f;
		posted++
	};
	put(D, ENTRY(posted - 1), f);
#ifdef RECHECK
	put(D, SAID(posted - 1), (f == NONE -> 0 : W(READY, gen[f])));
#endif
	xchg(D, TAIL, posted)
}

/*
 * A frame that holds page @k, or else (@s) one that may be reclaimed for it, or
 * else none: then the client recomputes.
 */
inline choose_frame(k, f, s)
{
	if
	:: sealed[0] && key[0] == k -> f = 0; s = 0
	:: sealed[1] && key[1] == k -> f = 1; s = 0
	:: else ->
		s = 1;
		if
		:: MAYBE_FREE(0) -> f = 0
		:: MAYBE_FREE(1) -> f = 1
		:: else -> f = NONE; s = 0
		fi
	fi
}

proctype daemon()
{
	byte k, f, s, snap;

end:	do
	:: fetch?k ->
retry:		atomic { choose_frame(k, f, s) };
		if
		:: s ->
			reclaim(f, snap, s);
			if
			:: s -> s = 0; goto retry
			:: else -> seal(f, k)
			fi
		:: else
		fi;
#ifdef POST_TO_GONE
		post(f);
#else
		if
		:: !gone && !closed -> post(f)
		:: else
		fi;
#endif
		d_step { k = 0; f = 0 }
	:: !closed && passed < mem[HEAD] ->
		reap()
#ifdef CLOSE
	:: !closed ->
		closed = 1;
#ifdef DROP_AT_CLOSE
		drop_refs()
#endif
#endif
	:: nre < MAXRE && (MAYBE_FREE(0) || MAYBE_FREE(1)) ->
		if
		:: MAYBE_FREE(0) -> f = 0
		:: MAYBE_FREE(1) -> f = 1
		:: else -> goto none
		fi;
		reclaim(f, snap, s);
		if
		:: s == 0 -> choose_key(k); seal(f, k)
		:: else
		fi;
none:		atomic { s = 0; k = 0; f = 0 }
	:: exited && !gone ->
		gone = 1;
		list = 0;
#ifndef EXIT_KEEPS
		drop_refs()
#endif
	od
}

proctype watch()
{
	timeout ->
	d_step {
		leaked_ref = (ref[0] != 0 || ref[1] != 0) && (!closed || gone);
		assert(!leaked_ref)
	}
}

init {
	atomic {
		boot_frame(0, 0);
		boot_frame(1, 1);
		list = 1;
		run watch();
#ifdef CRASH
		run killer();
#endif
		run wb();
		run daemon();
		run client()
	}
}
