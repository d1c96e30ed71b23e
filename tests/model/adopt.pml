/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt.pml - the daemon gets SIGKILL at any step, and a new one adopts what is
 * there while clients go on (frame words, records, ledgers; ipc/frame.h,
 * struct frame_record).
 *
 * A frame's record (page and generation) is written before its word turns
 * READY. The new daemon waits until the old one has exited, takes the ledgers,
 * then looks at each frame:
 *
 *	READY, record of that generation	kept
 *	ISOLATED, record of that generation	the old one died between its
 *						exchange and its decision; a
 *						client may hold the frame: READY
 *						again, as if a pin had been found
 *	else					FREE
 *
 * (Where a record is bad the code does what else frees a frame: exchange, sum, and
 * LOADING until the last unpin. A record that is good is what is modelled here.)
 *
 * The generation goes on from the word. The index is filled from what was kept;
 * lines of the old one that name other frames stay as they were, as they do in
 * the mappings of clients.
 *
 * The code: daemon/mm/adopt_frames.c. Its clients keep their windows, as this one
 * does.
 *
 * Taken away on request:
 *	NO_LEDGERS	ledgers come only when their client attaches again
 *	FREE_ISOLATED	an ISOLATED frame is freed as in flight
 *	GEN_RESET	generations of free frames start at 0 again
 *	RECORD_LATE	the record is written after READY
 */
#ifndef MAXRE
#define MAXRE 2
#endif
#ifndef BL
#define BL 5
#endif
#define NF	2
#define NK	3
#define D	1
#define NB	2
#define NW	1
#define RECORD(f)	(NM_FRAME + (f))
#define NM_EXTRA NF
#define REC(k, g)	(1 + (k) + (g) * NK)
#define REC_KEY(r)	(((r) - 1) % NK)
#define REC_GEN(r)	(((r) - 1) / NK)

bool using[NF];
bool killed;			/* the first daemon */
#define USED(f)	using[f]

#define OWN_RECORD
#include "frame.pml"

inline put_record(f, k, g)
{
#ifdef RECORD_LATE
	skip
#else
	put(D, RECORD(f), REC(k, g))
#endif
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
	byte k, l, w;

end:	do
	:: atomic {
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
			read_page(k, AT_FRAME(l));
			d_step { read_page(k, AT_FRAME(l)); using[AT_FRAME(l)] = 0 }
		:: else
		fi;
		put(0, PIN(0, AT_FRAME(l)) + MINUS, 0);
		d_step { k = 0; l = 0; w = 0 }
	od
}

inline reclaim_once(f, k, s, snap)
{
	if
	:: sealed[0] -> f = 0
	:: sealed[1] -> f = 1
	fi;
	isolate_and_sum(f, snap, s);
	if
	:: s == 0 ->
		drop(f);
		choose_key(k);
		seal(f, k);
#ifdef RECORD_LATE
		put(D, RECORD(f), REC(k, gen[f]))
#endif
	:: else ->
		put_back(f)
	fi;
	d_step { f = 0; k = 0; s = 0 }
}

/* A frame that was empty when the first daemon died. */
inline fill(f, k)
{
	nre++;
	choose_key(k);
	seal(f, k);
	k = 0
}

inline adopt(f, r, s, snap)
{
	d_step {
		s = mem[WORD(f)];
		r = mem[RECORD(f)];
		gen[f] = GEN(s);
		s = STATE(s)
	};
	if
	:: (s == READY || s == ISOLATED) && r != 0 && REC_GEN(r) == gen[f] ->
		d_step { key[f] = REC_KEY(r); sealed[f] = 1 };
		if
		:: s == ISOLATED ->
#ifdef FREE_ISOLATED
			drop(f)
#else
			put_back(f);
			enter(key[f], f, gen[f])
#endif
		:: else ->
			enter(key[f], f, gen[f])
		fi
	:: else ->
		d_step {
			freed_in_use = USED(f);
			assert(!freed_in_use);
#ifdef GEN_RESET
			gen[f] = 0
#endif
		};
		put(D, WORD(f), W(FREE, gen[f]))
	fi;
	s = 0;
	r = 0
}

proctype second()
{
	byte f, k, s, snap;

	/* the lock on the store, the old one's pidfd */
	killed && bn[D] == 0;
	d_step {
		sealed[0] = 0;
		sealed[1] = 0;
#ifdef NO_LEDGERS
		list = 0
#endif
	};
	adopt(0, k, s, snap);
	adopt(1, k, s, snap);
end:	do
	:: nre < MAXRE && (sealed[0] || sealed[1]) ->
		reclaim_once(f, k, s, snap)
	:: nre < MAXRE && !sealed[0] -> fill(0, k)
	:: nre < MAXRE && !sealed[1] -> fill(1, k)
#ifdef NO_LEDGERS
	:: list == 0 -> list = 1
#endif
	od
}

proctype first()
{
	byte f, k, s, snap;

end:	do
	:: nre < MAXRE ->
		reclaim_once(f, k, s, snap)
	od unless {
		killed
	}
}

init {
	atomic {
		boot_frame(0, 0);
		boot_frame(1, 1);
		mem[RECORD(0)] = REC(0, 0);
		mem[RECORD(1)] = REC(1, 0);
		list = 1;
		run second();
		run wb();
		run first();
		run client()
	};
end:	killed = 1			/* at any step, or never */
}
