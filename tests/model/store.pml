/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store.pml - reads of a daemon that is dead, on a store that today's
 * configuration may not have (daemon/mm/keep_store.c, daemon/mm/adopt_stray.c)
 *
 * One frame and two stores. Each daemon has one of the stores in its configuration,
 * or none, gets SIGKILL at any step, and another follows. What it had the kernel
 * read lands when the device likes: also when the daemon is long dead, and its
 * successor, too. The lock of a store is held by the description that its I/O goes
 * through: as long as its daemon lives, and then until the last of it is over.
 *
 * A daemon writes down which store it has open before the first read, and has a
 * description of it, without the lock, kept; whoever keeps it may have lost it. The
 * next one takes a frame that was being read into for free when each store that is
 * written down is over: the lock could be had on what was kept, or its own node has
 * it.
 *
 * wrong_bytes: a read lands in a frame that is somebody's page by then.
 *
 * Taken away on request:
 *	TODAY_ONLY	asks the nodes of today's configuration, as they are
 *	RECORD_LATE	written down after the first read has begun
 *	ANY_NAME	what is found under the name is taken for what was kept
 *	NOT_PASSED_ON	the one after the next does not get what it was left
 */
#ifndef DAEMONS
#define DAEMONS	4
#endif

#define FREE	0
#define LOADING	1
#define USED	2

byte frame;
byte lock[2];			/* the daemon whose description has it; 0: free */
bool pending[2];		/* a read of that one's is under way */
bool known[2];			/* written down */
bool kept[2];			/* its description is there */
byte now;			/* the daemon that lives */
bool killed;
bool wrong_bytes;

/* When the last read of a dead one is over its description goes. */
inline land(s)
{
	d_step {
		pending[s];
		wrong_bytes = frame == USED;
		assert(!wrong_bytes);
		pending[s] = 0;
		if
		:: lock[s] != now -> lock[s] = 0
		:: else
		fi
	}
}

proctype device()
{
end:	do
	:: land(0)
	:: land(1)
	od
}

inline die()
{
	d_step {
		if
		:: lock[0] == now && !pending[0] -> lock[0] = 0
		:: else
		fi;
		if
		:: lock[1] == now && !pending[1] -> lock[1] = 0
		:: else
		fi;
		now = 0
	}
}

#ifdef ANY_NAME
#define GOT(s)	(kept[s])
#else
#define GOT(s)	(kept[s] && lock[s] == 0)
#endif

/* The store that it opens: the lock, then what the next one is to find. */
inline open_store(s)
{
	atomic { lock[s] == 0 -> lock[s] = now };
	if
	:: kept[s] = 1
	:: skip			/* nobody keeps it */
	fi;
#ifndef RECORD_LATE
	known[s] = 1;
#endif
	d_step { old[s] = 0; open = 1 }
}

proctype daemon(byte n)
{
	byte s;
	bool has, open, mine, stray;
	bool old[2];

	atomic {
		now = n;
		killed = 0;
		if
		:: has = 1; s = 0
		:: has = 1; s = 1
		:: has = 0
		fi;
		stray = frame == LOADING;
		old[0] = known[0];
		old[1] = known[1];
#ifdef NOT_PASSED_ON
		known[0] = 0;
		known[1] = 0;
#endif
	};
end:	do
	:: has && !open -> open_store(s)
	:: atomic { open && frame == FREE ->
			frame = LOADING;
			mine = 1;
			pending[s] = 1
		}
#ifdef RECORD_LATE
		;
		known[s] = 1
#endif
	:: atomic { mine && !pending[s] -> frame = USED; mine = 0 }
	:: atomic { frame == FREE -> frame = USED }
	:: atomic { frame == USED -> frame = FREE }
	:: atomic { old[0] && GOT(0) -> old[0] = 0; known[0] = 0; kept[0] = 0 }
	:: atomic { old[1] && GOT(1) -> old[1] = 0; known[1] = 0; kept[1] = 0 }
#ifdef TODAY_ONLY
	:: atomic { stray && (!has || open) -> frame = FREE; stray = 0 }
#else
	:: atomic { stray && !old[0] && !old[1] -> frame = FREE; stray = 0 }
#endif
	od unless {
		killed
	}
}

init {
	byte n;

	run device();
	do
	:: n < DAEMONS ->
		n++;
		run daemon(n);
		(now == n);
end:		killed = 1;		/* at any step, or never */
		(_nr_pr == 2);
		die()
	:: else -> break
	od
}
