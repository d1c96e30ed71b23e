/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.pml - reading an index line that is several words, and growing the
 * index (ipc/index.h).
 *
 *	daemon				client
 *	word0 = odd version		v = word0; odd: again
 *	key, fword, frame		key, fword, frame
 *	word0 = even version		word0 != v: again
 *
 * All stores of the daemon are release, all loads acquire: on x86 plain moves.
 * There is one line, and every page goes there: entering one pushes another
 * out, the worst a collision can do. A reader gives up after RETRIES (64 in C)
 * and calls it a miss, so a daemon that died in the middle stops nobody.
 *
 * The re-check of the frame's word does not make the version superfluous: a
 * line torn between two pages may name a READY frame with its right generation
 * - under the wrong key.
 *
 * GROW		once, the daemon makes a second index, fills it and announces
 *		its epoch; the first one stays as it was. A client reads whichever
 *		it has mapped.
 * Taken away on request:
 *	NO_VERSION	the reader does not look at word0 again
 *	NO_ODD		the writer goes from one even version to the next
 *	NO_GEN		the re-check leaves out the generation
 *	HAND_ON		the old index's memory becomes another space's index at
 *			once, without waiting for the clients to let go of it
 */
#ifndef NF
#define NF 2
#endif
#ifndef NK
#define NK 3
#endif
#ifndef MAXRE
#define MAXRE 2
#endif
#ifndef BL
#define BL 5
#endif
#define RETRIES 2
#define D	1
#define NB	2
#define NW	1
#ifdef GROW
#define NI 2
#else
#define NI 1
#endif

/* The line of index t: version and "used" in one word; then the rest. */
#define WORD0(t)	(NM_FRAME + 4 * (t))
#define KEY(t)		(NM_FRAME + 4 * (t) + 1)
#define FGEN(t)		(NM_FRAME + 4 * (t) + 2)
#define FRAME(t)	(NM_FRAME + 4 * (t) + 3)
#define EPOCH		(NM_FRAME + 4 * NI)
#define NM_EXTRA	(4 * NI + 1)

#define VER(v, used)	((v) * 2 + (used))
#define IS_USED(v)	((v) % 2)
#define IS_ODD(v)	(((v) / 2) % 2)

bool using[NF];
#define USED(f)	using[f]

#define OWN_INDEX
byte ver[NI];			/* the daemon's: version of the line */
byte held = 255;		/* page in the current index's line */
bit ix;				/* current index */

#include "frame.pml"

inline write_line(t, k, g, f)
{
#ifndef NO_ODD
	put(D, WORD0(t), VER(ver[t] + 1, 1));
#endif
	put(D, KEY(t), k);
	put(D, FGEN(t), g);
	put(D, FRAME(t), f);
	ver[t] = ver[t] + 2;
	put(D, WORD0(t), VER(ver[t], 1))
}

inline enter(k, f, g)
{
	write_line(ix, k, g, f);
	held = k
}

inline leave(k)
{
	if
	:: held == k ->
		ver[ix] = ver[ix] + 2;
		put(D, WORD0(ix), VER(ver[ix], 0));
		held = 255
	:: else
	fi
}

proctype wb()
{
end:	do
	:: flush(0)
	:: flush(1)
	od
}

proctype client()
{
	byte k, kk, g, f, w, v, n;
	bit t;

end:	do
	:: atomic {
			if
			:: k = 0
			:: k = 1
#if NK > 2
			:: k = 2
#endif
			fi;
#ifdef GROW
			if
			:: t = 0	/* the new one is not mapped yet */
			:: mem[EPOCH] -> t = 1
			fi
#endif
		};
again:		v = mem[WORD0(t)];
		if
		:: !IS_USED(v) -> goto miss
		:: IS_USED(v) && IS_ODD(v) -> goto retry
		:: else
		fi;
		kk = mem[KEY(t)];
		g = mem[FGEN(t)];
		f = mem[FRAME(t)];
#ifndef NO_VERSION
		if
		:: mem[WORD0(t)] != v -> goto retry
		:: else
		fi;
#endif
		if
		:: kk != k -> goto miss
		:: else
		fi;
		inc(0, PIN(0, f));
		d_step {
			w = mem[WORD(f)];
			if
			:: HIT(w, AT(f, g)) -> using[f] = 1
			:: else
			fi
		};
		if
		:: HIT(w, AT(f, g)) ->
			read_page(k, f);
			d_step { read_page(k, f); using[f] = 0 }
		:: else
		fi;
		put(0, PIN(0, f) + MINUS, 0);
		goto miss;
retry:		if
		:: n < RETRIES -> n++; goto again
		:: else
		fi;
miss:		atomic { k = 0; kk = 0; g = 0; f = 0; w = 0; v = 0; n = 0; t = 0 }
	od
}

proctype daemon()
{
	byte f, k, s, snap;

end:	do
	:: nre < MAXRE ->
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
#ifdef GROW
	:: ix == 0 ->
		ix = 1;
		held = 255;
		if
		:: enter(key[0], 0, gen[0])
		:: enter(key[1], 1, gen[1])
		fi;
		put(D, EPOCH, 1);
#ifdef HAND_ON
		/* there, key 0 is a page in frame 1 of another table */
		write_line(0, 0, gen[1], 1)
#endif
#endif
	od
}

init {
	atomic {
		boot_frame(0, 0);
		boot_frame(1, 1);
		d_step {
			mem[WORD0(0)] = VER(0, 1);
			mem[KEY(0)] = 0;
			held = 0
		};
		list = 1;
		run wb();
		run daemon();
		run client()
	}
}
