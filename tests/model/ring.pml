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
 * Otherwise (completions): the client's flag stands in its ledger, and its
 * eventfd in the epoll that the application waits on (libkvmm/poll.c).
 *
 *	daemon				client, ring empty
 *	entry		(plain)		drain the eventfd, if it has a count
 *	tail		(seq_cst)	armed = 1		(seq_cst)
 *	armed == 1:	(seq_cst)	tail			(seq_cst)
 *	  write eventfd			still empty: the application may wait
 *	  armed = 2	(seq_cst)
 *
 * Armed at 2 tells the client that the eventfd has a count which it must drain
 * before it sleeps the next time. So the write comes before the 2. The other
 * way round (KICK_LATE) a client that was awake by chance sees the 2, drains
 * nothing and arms again; then the write comes, for which no 2 will ever be
 * seen, and every wait of the application returns at once until the next
 * completion.
 *
 * There are no timers here, although every wait in C has a deadline: a lost
 * wake-up must be seen as one, not as a delay.
 *
 * What must hold:
 *	lost_wakeup	all is quiet, and an entry is in a ring. (The sleeps are
 *			no valid end states either.)
 *	stale_entry	a consumer reads an entry before it was written
 *	busy_wait	kvmm_poll() found nothing and let the application wait;
 *			the wait returns, although the daemon did nothing since
 *
 * Taken away on request:
 *	NO_REREAD	sleep right after the flag is set
 *	PLAIN_TAIL	tail is a release store
 *	PLAIN_FLAG	the flag is a release store
 *	TAIL_FIRST	the entry is written after the tail
 *	FLAG_FIRST	the producer looks at the flag before it stores tail
 *	KICK_LATE	armed = 2 first, the eventfd's write after it
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

bool event = 1;			/* eventfd has a count; so it starts */
bool news = 1;			/* ghost: a kick's step since the last look at armed */
bool kicking;			/* ghost: the daemon is between its two steps */
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
#ifdef KICK_LATE
			xchg(D, ARMED, 2);
			d_step { event = 1; news = 1 }
#else
			d_step { event = 1; news = 1; kicking = 1 };
			d_step { bn[D] == 0; mem[ARMED] = 2; news = 1; kicking = 0 }
#endif
		:: else
		fi;
		old = 0
	:: else ->
		break
	od
}

/* The application: waits or not, and polls. */
proctype client()
{
	byte t, n;
	bool armed, count = 1;		/* kvmm.armed, kvmm.fd_ready */
	bool idle, spins;

	do
	:: if
		:: spins = 1
		:: spins = 0
		fi;
		d_step {
			spins || event;		/* epoll_wait */
			busy_wait = !spins && idle && !news && !kicking;
			assert(!busy_wait);
			idle = 0
		};
turn:		atomic {
			news = 0;
			if
			:: armed && mem[ARMED] == 2 ->
				armed = 0;
				count = 1;
				put(0, ARMED, 0)
			:: else
			fi
		};
		t = mem[TAIL];
		do
		:: got < t ->
			d_step {
				got++;
				n = 1;
				stale_entry = mem[ENTRY(got)] != got;
				assert(!stale_entry)
			}
		:: else ->
			break
		od;
		t = 0;
		if
		:: got == N -> break
		:: got < N && n -> n = 0	/* the caller has something */
		:: else ->
			if
			:: count -> d_step { event = 0; count = 0 }
			:: else
			fi;
			if
			:: !armed ->
				armed = 1;
#ifdef PLAIN_FLAG
				put(0, ARMED, 1)
#else
				xchg(0, ARMED, 1)
#endif
			:: else
			fi;
#ifndef NO_REREAD
			if
			:: mem[TAIL] != got -> goto turn
			:: else
			fi;
#endif
			idle = 1
		fi
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
