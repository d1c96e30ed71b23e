/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring.pml - sleep flags of the rings: nobody sleeps on a full ring
 * (ipc/ring.h, struct kvmm_hdr.sleeping in ipc/abi.h).
 *
 * SUBMIT: NC clients, a submission ring and a doorbell eventfd each, and one
 * flag for all of them in the header, which clients cannot write.
 *
 *	client				daemon, all rings empty
 *	entry		(plain)		sleeping = 1		(seq_cst)
 *	tail		(seq_cst)	tail of every ring	(seq_cst)
 *	sleeping == 1: write doorbell	all still empty: epoll_wait
 *					sleeping = 0; read the doorbells
 *
 * Otherwise (completions): the client's flag stands in its ledger.
 *
 *	daemon				client, ring empty
 *	entry		(plain)		armed = 1		(seq_cst)
 *	tail		(seq_cst)	tail			(seq_cst)
 *	armed == 1 and exchange		still empty: poll
 *	  (armed, 2) gave 1:		exchange (armed, 0) gave not 0:
 *	  write eventfd			  read eventfd (never blocks)
 *
 * The flag turned to 2 tells only that a write of the eventfd has been decided
 * on. The client may see the 2 and read nothing, and the write comes
 * afterwards: the eventfd is then readable once too often. So the client reads
 * the eventfd whenever it had armed, whether it finds 1 or 2; if it did so for
 * 2 only, that left-over write would make every poll return at once until the
 * next completion (DRAIN_ON_2).
 *
 * There are no timers here, although every wait in C has a deadline: a lost
 * wake-up must be seen as one, not as a delay.
 *
 * What must hold:
 *	lost_wakeup	all is quiet, and an entry is in a ring. (The sleeps are
 *			no valid end states either.)
 *	stale_entry	a consumer reads an entry before it was written
 *	busy_wait	a poll returns although nothing was written since the
 *			one before
 *
 * Taken away on request:
 *	NO_REREAD	sleep right after the flag is set
 *	PLAIN_TAIL	tail is a release store
 *	PLAIN_FLAG	the flag is a release store
 *	TAIL_FIRST	the entry is written after the tail
 *	FLAG_FIRST	the producer looks at the flag before it stores tail
 */
#ifndef N
#define N 3			/* entries a producer sends */
#endif
#ifndef BL
#define BL 3
#endif

bool lost_wakeup, stale_entry, busy_wait;

#ifdef SUBMIT
/* ---- submissions -------------------------------------------------------- */
#define NC	2
#define D	2
#define NB	3
#define SLEEPING	0
#define TAIL(c)		(1 + (c))
#define ENTRY(c, i)	(3 + (c) * N + (i) - 1)
#define NM		(3 + NC * N)
#include "tso.pml"

bool bell[NC];			/* doorbell eventfd readable */
byte head[NC];			/* the daemon's */

proctype wb()
{
end:	do
	:: flush(0)
	:: flush(1)
	:: flush(2)
	od
}

proctype client(byte c)
{
	byte i;
	bit s;

	do
	:: i < N ->
		i++;
#ifdef FLAG_FIRST
		s = mem[SLEEPING];
#endif
#ifndef TAIL_FIRST
		put(c, ENTRY(c, i), i);
#endif
#ifdef PLAIN_TAIL
		put(c, TAIL(c), i);
#else
		xchg(c, TAIL(c), i);
#endif
#ifdef TAIL_FIRST
		put(c, ENTRY(c, i), i);
#endif
#ifndef FLAG_FIRST
		s = mem[SLEEPING];
#endif
		if
		:: s -> bell[c] = 1
		:: else
		fi;
		s = 0
	:: else ->
		break
	od
}

/* Take what ring @c has. */
inline consume(c, t)
{
	t = mem[TAIL(c)];
	do
	:: head[c] < t ->
		d_step {
			head[c]++;
			stale_entry = mem[ENTRY(c, head[c])] != head[c];
			assert(!stale_entry)
		}
	:: else ->
		break
	od;
	t = 0
}

proctype daemon()
{
	byte t;

	do
	:: consume(0, t);
		consume(1, t);
		if
		:: head[0] == N && head[1] == N -> break
		:: else
		fi;
#ifdef PLAIN_FLAG
		put(D, SLEEPING, 1);
#else
		xchg(D, SLEEPING, 1);
#endif
#ifndef NO_REREAD
		if
		:: mem[TAIL(0)] != head[0] -> goto awake
		:: else
		fi;
		if
		:: mem[TAIL(1)] != head[1] -> goto awake
		:: else
		fi;
#endif
		bell[0] || bell[1];		/* epoll_wait */
awake:		put(D, SLEEPING, 0);
		bell[0] = 0;
		bell[1] = 0
	od
}

#define LEFT	(mem[TAIL(0)] != head[0] || mem[TAIL(1)] != head[1])

#else
/* ---- completions -------------------------------------------------------- */
#define D	1
#define NB	2
#define ARMED		0
#define TAIL		1
#define ENTRY(i)	(2 + (i) - 1)
#define NM		(2 + N)
#include "tso.pml"

bool event;			/* eventfd readable */
bool written;			/* ghost: since the last poll that returned */
byte got;			/* entries the client has taken */

proctype wb()
{
end:	do
	:: flush(0)
	:: flush(1)
	od
}

proctype daemon()
{
	byte i, old;

	do
	:: i < N ->
		i++;
#ifdef FLAG_FIRST
		old = mem[ARMED];
#endif
#ifndef TAIL_FIRST
		put(D, ENTRY(i), i);
#endif
#ifdef PLAIN_TAIL
		put(D, TAIL, i);
#else
		xchg(D, TAIL, i);
#endif
#ifdef TAIL_FIRST
		put(D, ENTRY(i), i);
#endif
#ifndef FLAG_FIRST
		old = mem[ARMED];
#endif
		if
		:: old == 1 ->
			d_step {
				bn[D] == 0;
				old = mem[ARMED];
				mem[ARMED] = 2
			};
			if
			:: old == 1 -> d_step { event = 1; written = 1 }
			:: else
			fi
		:: else
		fi;
		old = 0
	:: else ->
		break
	od
}

proctype client()
{
	byte t, old;

	do
	:: t = mem[TAIL];
		do
		:: got < t ->
			d_step {
				got++;
				stale_entry = mem[ENTRY(got)] != got;
				assert(!stale_entry)
			}
		:: else ->
			break
		od;
		t = 0;
		if
		:: got == N -> break
		:: else
		fi;
#ifdef PLAIN_FLAG
		put(0, ARMED, 1);
#else
		xchg(0, ARMED, 1);
#endif
#ifndef NO_REREAD
		if
		:: mem[TAIL] != got -> goto awake
		:: else
		fi;
#endif
		d_step {
			event;			/* poll */
			busy_wait = !written;
			assert(!busy_wait);
			written = 0
		};
awake:		atomic {
			bn[0] == 0;
			old = mem[ARMED];
			mem[ARMED] = 0
		};
		if
#ifdef DRAIN_ON_2
		:: old == 2 -> event = 0
#else
		:: old != 0 -> event = 0
#endif
		:: else
		fi;
		old = 0
	od
}

#define LEFT	(mem[TAIL] != got)
#endif

proctype watch()
{
	timeout ->
	d_step { lost_wakeup = LEFT; assert(!lost_wakeup) }
}

init {
	atomic {
#ifndef NO_WATCH
		run watch();
#endif
		run wb();
		run daemon();
#ifdef SUBMIT
		run client(0);
		run client(1)
#else
		run client()
#endif
	}
}
