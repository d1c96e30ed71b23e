/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frame.pml - frames, pins and the index as every model of the hot path sees
 * them, and the daemon's moves on them (ipc/frame.h, ipc/index.h).
 *
 * A frame's word is one place of memory, state and generation together, as in
 * C: a compare is of the whole. A page's bytes are one place too: the key they
 * belong to, or HALF while they are being written. An index line is one place
 * here (frame and generation, 0 = no entry); how a reader gets a whole line
 * out of several words is index.pml's subject, which defines OWN_INDEX and its
 * own enter() and leave().
 *
 * Two ghosts say what may never happen, and every model asserts them:
 *	wrong_bytes	a client that holds a pin and saw the right READY word
 *			reads bytes of another page, or half a page
 *	freed_in_use	the daemon takes a frame for free while a client that
 *			has not exited uses it
 *
 * The daemon's own view (struct page, struct frame) is in gen[], key[] and
 * sealed[]: private memory, no barrier needed.
 *
 * The daemon's code picks victims whose pins it has read as zero. Here it
 * takes any READY frame: a filter that only reads takes behaviour away.
 *
 * The includer defines NF (frames), NK (keys), NW (window ledgers), D (the
 * daemon's processor), USED(f) (a client uses f), MAXRE (how often frames are
 * re-used, which bounds the model), NM_EXTRA (places of its own, from NM_FRAME
 * on), and what tso.pml wants besides NM.
 *
 * Taken away on request (each must make a model fail):
 *	NO_BUMP		READY again for other content without generation + 1
 *	SNAP_EARLY	the list of ledgers is read before ISOLATED is stored
 *	PLAIN_ISOLATE	ISOLATED is a release store, not an exchange
 */
#define FREE		0
#define OPEN		1
#define LOADING		2
#define READY		3
#define ISOLATED	4

#define W(st, g)	((g) * 8 + (st))
#define STATE(w)	((w) % 8)
#define GEN(w)		((w) / 8)

#define WORD(f)		(f)
#define DATA(f)		(NF + (f))
#define LINE(k)		(2 * NF + (k))
#define PIN(c, f)	(2 * NF + NK + (c) * NF + (f))
#define NM_FRAME	(2 * NF + NK + NW * NF)

#define HALF		255
#define BYTES(k)	((k) + 1)		/* what page k's bytes look like */

/* An index line: where the page is and which generation it had. */
#define AT(f, g)	(1 + (f) + (g) * NF)
#define AT_FRAME(l)	(((l) - 1) % NF)
#define AT_GEN(l)	(((l) - 1) / NF)

#ifndef NM_EXTRA
#define NM_EXTRA	0
#endif
#define NM		(NM_FRAME + NM_EXTRA)
#include "tso.pml"

byte list;			/* attached window ledgers, a bit each */
byte gen[NF];			/* generation of the last READY */
byte key[NF];			/* page in the frame */
bool sealed[NF];
byte nre;			/* re-uses so far */

bool wrong_bytes;
bool freed_in_use;

/* The client's re-check after its pin: the same READY word as the index said. */
#if defined(NO_GEN)
#define HIT(w, l)	(STATE(w) == READY)
#elif defined(NO_READY)
#define HIT(w, l)	(GEN(w) == AT_GEN(l))
#else
#define HIT(w, l)	((w) == W(READY, AT_GEN(l)))
#endif

/* adopt.pml has a record of every sealed frame. */
#ifndef OWN_RECORD
#define put_record(f, k, g) skip
#endif

#ifndef OWN_INDEX
inline enter(k, f, g)
{
	put(D, LINE(k), AT(f, g))
}

inline leave(k)
{
	put(D, LINE(k), 0)
}
#endif

inline read_page(k, f)
{
	d_step { wrong_bytes = mem[DATA(f)] != BYTES(k); assert(!wrong_bytes) }
}

/*
 * ISOLATED, list, sum of the pins: @s != 0 means that someone holds @f. The
 * list is loaded once, then one load per ledger, in any interleaving.
 * @snap: scratch for the list.
 */
inline isolate_and_sum(f, snap, s)
{
#ifdef SNAP_EARLY
	snap = list;
#endif
#ifdef PLAIN_ISOLATE
	put(D, WORD(f), W(ISOLATED, gen[f]));
#else
	xchg(D, WORD(f), W(ISOLATED, gen[f]));
#endif
#ifndef SNAP_EARLY
	snap = list;
#endif
	s = 0;
	if
	:: snap & 1 -> s = s + mem[PIN(0, f)]
	:: else
	fi;
#if NW > 1
	if
	:: snap & 2 -> s = s + mem[PIN(1, f)]
	:: else
	fi;
#endif
	snap = 0
}

/* Nobody holds @f: take it out of the index and free it. */
inline drop(f)
{
	d_step {
		freed_in_use = USED(f);
		assert(!freed_in_use);
		nre++;
		sealed[f] = 0
	};
	leave(key[f]);
	put(D, WORD(f), W(FREE, gen[f]))
}

/* Somebody holds @f: as it was. */
inline put_back(f)
{
	put(D, WORD(f), W(READY, gen[f]))
}

/*
 * Bring page @k into the free frame @f and seal it. The bytes come from the
 * daemon's own copy, whose stores may still be in its buffer when READY is
 * stored; a client that wrote them in place has drained its buffer long ago.
 */
inline seal(f, k)
{
	put(D, WORD(f), W(LOADING, gen[f]));
	put(D, DATA(f), HALF);
	put(D, DATA(f), BYTES(k));
	d_step {
		key[f] = k;
		sealed[f] = 1;
#ifndef NO_BUMP
		gen[f]++
#endif
	};
	put_record(f, k, gen[f]);
	put(D, WORD(f), W(READY, gen[f]));
	enter(k, f, gen[f])
}

inline boot_frame(f, k)
{
	d_step {
		mem[WORD(f)] = W(READY, 0);
		mem[DATA(f)] = BYTES(k);
		mem[LINE(k)] = AT(f, 0);
		key[f] = k;
		sealed[f] = 1
	}
}

#if NF > 1
#define absent(k)	(!(sealed[0] && key[0] == k) && !(sealed[1] && key[1] == k))
#else
#define absent(k)	(!(sealed[0] && key[0] == k))
#endif

/* Any key that is in no frame. */
inline choose_key(k)
{
	atomic {
		if
		:: absent(0) -> k = 0
		:: absent(1) -> k = 1
#if NK > 2
		:: absent(2) -> k = 2
#endif
		fi
	}
}
