/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pin.pml - find and pin without the daemon, against its reclaim.
 *
 *	client					daemon
 *	line = index[k]				word[f] = ISOLATED	(exchange)
 *	pins[f] += 1	(seq_cst RMW)		list of ledgers		(load)
 *	word[f] == line's READY word?		pins[f] of each		(load)
 *	use the page				all 0: drop, else READY again
 *	pins[f] -= 1	(release)
 *
 * A Dekker pair: either the client's increment is before the daemon's load of
 * it, or the daemon's exchange is before the client's load of the word. The
 * generation is what makes the word worth comparing: a frame that was dropped
 * and sealed for another page between the look into the index and the pin has
 * another word.
 *
 * A client whose re-check failed undoes the pin and looks at the line once more;
 * here that is another round of its loop, except in a batch, whose other pins
 * stay meanwhile.
 *
 * Clients look up for ever; the daemon reclaims and re-uses frames MAXRE times.
 *
 * Shapes:
 *	NC, NT		clients (a window ledger each), threads of each
 *	LOOKS		lookups of a thread; not given: for ever
 *	BATCH		a client pins two pages at once, and undoes from the
 *			first failure on
 *	FORK		a client that uses a page pins it once more for a child,
 *			looks at no word, and ends the parent: no barrier either,
 *			since each pin is counted until the next one is
 *	CRASH		client 0 gets SIGKILL at any step
 *	LATE		client 1 attaches at any time
 * Taken away on request, besides those of frame.pml:
 *	NO_BARRIER	the pin is atomic, but later loads may pass it
 *	PLAIN_PIN	the pin is load, add, store (with a barrier)
 *	NO_GEN, NO_READY  the re-check leaves out half of the word
 *	DROP_AT_EOF	the ledger goes when the socket closes, not at exit
 *	FD_FIRST	the client gets its ledger before the list has it
 *	FORK_LATE	the parent ends before the child has its pin
 *	TABLE_MOVE	the frame table grows into a new memfd, once
 */
#ifndef NC
#define NC 1
#endif
#ifndef NT
#define NT 1
#endif
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
#define BL 4
#endif
#define NP	(NC * NT)	/* client threads; thread p is of client p / NT */
#define D	NP
#define NB	(NP + 1)
#define NW	NC

#ifdef TABLE_MOVE
#define CUR	NM_FRAME		/* which table a client maps */
#define NEW(f)	(NM_FRAME + 1 + (f))	/* words of the new one */
#define NM_EXTRA (1 + NF)
#endif

bool using[NP * NF];		/* thread p uses frame f: using[p * NF + f] */
bool killed[NC], exited[NC], eof[NC];

#if NP == 1
#define USED(f)	using[f]
#elif NP == 2
#define USED(f)	(using[f] || using[NF + (f)])
#endif

#include "frame.pml"

proctype wb()
{
end:	do
	:: flush(0)
	:: flush(1)
#if NB > 2
	:: flush(2)
#endif
	od
}

inline pin(p, f)
{
#if defined(NO_BARRIER)
	put(p, PIN(p / NT, f) + PLUS, 0)
#elif defined(PLAIN_PIN)
	w = mem[PIN(p / NT, f)];
	xchg(p, PIN(p / NT, f), w + 1);
	w = 0
#else
	inc(p, PIN(p / NT, f))
#endif
}

inline unpin(p, f)
{
#ifdef PLAIN_PIN
	w = mem[PIN(p / NT, f)];
	xchg(p, PIN(p / NT, f), w - 1)
#else
	put(p, PIN(p / NT, f) + MINUS, 0)
#endif
}

/* Look into the index for any page that it has. */
inline look(k, l)
{
	atomic {
		if
		:: mem[LINE(0)] != 0 -> k = 0
		:: mem[LINE(1)] != 0 -> k = 1
#if NK > 2
		:: mem[LINE(2)] != 0 -> k = 2
#endif
		fi;
		l = mem[LINE(k)]
	}
}

/* Load the word; from here on the page is in use if it is the right one. */
inline check(p, l, w)
{
	d_step {
#ifdef TABLE_MOVE
		w = (tab -> mem[NEW(AT_FRAME(l))] : mem[WORD(AT_FRAME(l))]);
#else
		w = mem[WORD(AT_FRAME(l))];
#endif
		if
		:: HIT(w, l) -> using[(p) * NF + AT_FRAME(l)] = 1
		:: else
		fi
	}
}

#ifndef BATCH
proctype client(byte p)
{
	byte k, l, w;
#ifdef TABLE_MOVE
	bool tab;
#endif
#ifdef LOOKS
	byte n;
#endif

end:	do
#ifdef LOOKS
	:: n < LOOKS ->
		n++;
		look(k, l);
#else
	:: look(k, l);
#endif
#ifdef TABLE_MOVE
		tab = mem[CUR];
#endif
		pin(p, AT_FRAME(l));
		check(p, l, w);
		if
		:: HIT(w, l) ->
			read_page(k, AT_FRAME(l));
#ifdef FORK_LATE
			unpin(p, AT_FRAME(l));
			put(p, PIN(p / NT, AT_FRAME(l)) + PLUS, 0);
#elif defined(FORK)
			put(p, PIN(p / NT, AT_FRAME(l)) + PLUS, 0);
			unpin(p, AT_FRAME(l));
#endif
			d_step {
				read_page(k, AT_FRAME(l));
				using[p * NF + AT_FRAME(l)] = 0
			}
		:: else
		fi;
		unpin(p, AT_FRAME(l));
		d_step { k = 0; l = 0; w = 0 }
	od unless {
		killed[p / NT]
	}
}
#else
/* Take page @k back from the index after a failed check; @l = 0: it is gone. */
inline retry(p, k, l, w)
{
	unpin(p, AT_FRAME(l));
	l = mem[LINE(k)];
	if
	:: l != 0 ->
		pin(p, AT_FRAME(l));
		check(p, l, w);
		if
		:: HIT(w, l) -> skip
		:: else -> unpin(p, AT_FRAME(l)); l = 0
		fi
	:: else
	fi
}

/* The end of the request for one page: the last read, then the pin. */
inline finish(page, f, still)
{
	d_step { read_page(page, f); using[p * NF + f] = still };
	unpin(p, f)
}

/* l, l2 are 0 from where on a page is not pinned. */
proctype client(byte p)
{
	byte k, l, k2, l2, w;

end:	do
	:: look(k, l);
		look(k2, l2);
		pin(p, AT_FRAME(l));
		pin(p, AT_FRAME(l2));
		check(p, l, w);
		if
		:: HIT(w, l) -> skip
		:: else -> retry(p, k, l, w)
		fi;
		if
		:: l == 0 ->
			/* undo what was counted after the first that failed */
			unpin(p, AT_FRAME(l2));
			l2 = 0
		:: else ->
			read_page(k, AT_FRAME(l));
			check(p, l2, w);
			if
			:: HIT(w, l2) -> skip
			:: else -> retry(p, k2, l2, w)
			fi
		fi;
		if
		:: l2 != 0 ->
			read_page(k2, AT_FRAME(l2));
			finish(k2, AT_FRAME(l2), AT_FRAME(l) == AT_FRAME(l2))
		:: else
		fi;
		if
		:: l != 0 -> finish(k, AT_FRAME(l), 0)
		:: else
		fi;
		atomic { k = 0; l = 0; k2 = 0; l2 = 0; w = 0 }
	od unless {
		killed[p / NT]
	}
}
#endif

#ifdef CRASH
/*
 * The socket may close long before the process is gone. A process is gone when
 * its threads have stopped and their stores have drained; only then does its
 * pidfd become readable.
 */
proctype killer()
{
#ifdef DROP_AT_EOF
	eof[0] = 1;
#endif
	d_step {
		killed[0] = 1;
		using[0] = 0;
#if NF > 1
		using[1] = 0;
#endif
#if NT > 1
		using[NF] = 0;
#if NF > 1
		using[NF + 1] = 0;
#endif
#endif
	};
	bn[0] == 0;
#if NT > 1
	bn[1] == 0;
#endif
	exited[0] = 1
}
#endif

#ifdef LATE
proctype acceptor()
{
#ifdef FD_FIRST
	run client(1);
	list = list | 2
#else
	list = list | 2;	/* seq_cst store; then the reply goes out */
	run client(1)
#endif
}
#endif

proctype daemon()
{
	byte f, k, s, snap;
#ifdef TABLE_MOVE
	bool moved;
#endif

end:	do
	:: nre < MAXRE ->
		atomic {
			if
			:: f = 0
#if NF > 1
			:: f = 1
#endif
			fi
		};
#ifdef TABLE_MOVE
		if
		:: moved -> xchg(D, NEW(f), W(ISOLATED, gen[f]))
		:: else -> xchg(D, WORD(f), W(ISOLATED, gen[f]))
		fi;
		s = mem[PIN(0, f)];
		if
		:: s == 0 && !moved -> drop(f); choose_key(k); seal(f, k)
		:: s == 0 && moved ->
			/* the old table stays as it was: that is the bug */
			nre++;
			put(D, LINE(key[f]), 0);
			choose_key(k);
			put(D, DATA(f), HALF);
			put(D, DATA(f), BYTES(k));
			gen[f]++;
			put(D, NEW(f), W(READY, gen[f]));
			put(D, LINE(k), AT(f, gen[f]));
			key[f] = k
		:: else ->
			if
			:: moved -> put(D, NEW(f), W(READY, gen[f]))
			:: else -> put_back(f)
			fi
		fi;
#else
		isolate_and_sum(f, snap, s);
		if
		:: s == 0 -> drop(f); choose_key(k); seal(f, k)
		:: else -> put_back(f)
		fi;
#endif
		d_step { f = 0; k = 0; s = 0 }
#ifdef CRASH
	:: (list & 1) && exited[0] -> list = list & ~1
#endif
#ifdef DROP_AT_EOF
	:: (list & 1) && eof[0] -> list = list & ~1
#endif
#ifdef TABLE_MOVE
	:: !moved && bn[D] == 0 ->
		d_step {
			moved = 1;
			mem[NEW(0)] = mem[WORD(0)];
			mem[NEW(1)] = mem[WORD(1)]
		};
		put(D, CUR, 1)
#endif
	od
}

init {
	atomic {
		boot_frame(0, 0);
#if NF > 1
		boot_frame(1, 1);
#endif
#if NC > 1 && !defined(LATE)
		list = 3;
#else
		list = 1;
#endif
		run wb();
		run daemon();
		run client(0);
#ifdef LATE
		run acceptor();
#elif NP > 1
		run client(1);
#endif
#ifdef CRASH
		run killer();
#endif
	}
}
