/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tso.pml - shared memory as x86 shows it: one memory, and a store buffer in
 * front of it for every processor (every thread or process of a model).
 *
 * What C11 becomes here:
 *
 *	atomic_store(relaxed, release), plain store	put()	waits in the buffer
 *	atomic_store(seq_cst), atomic_exchange		xchg()	buffer drained first
 *	atomic_fetch_add(seq_cst)			inc()	buffer drained first
 *	atomic_load of any order			load(), or mem[] directly
 *							where the processor has
 *							not stored to that place
 *
 * A buffer drains in order, at any moment: a process `wb` of each model does
 * it with flush(). So a load may pass an older store to another place, and
 * nothing else is ever out of order.
 *
 * A buffered entry may also be an increment or a decrement (PLUS, MINUS).
 * x86 has no such thing, since its locked instructions drain; ARM has
 * (LDADDL): an update that is atomic, but that later loads may pass. Unpin is
 * written so (release decrement), and so is the pin whose barrier was taken
 * away, so that what fails then is the missing order and not lost updates.
 *
 * The includer defines NM (places), NB (processors), BL (entries a buffer).
 * A full buffer makes the processor wait, which only takes behaviour away;
 * BL is at least the longest run of put() between two drains wherever the
 * state space allows it.
 */
byte mem[NM];
byte bn[NB];			/* entries in the buffer */
byte ba[NB * BL];		/* place, + PLUS or MINUS */
byte bv[NB * BL];		/* value */
hidden byte bi;

#define PLUS	64
#define MINUS	128

/* The oldest entry of processor @p reaches memory. */
inline flush(p)
{
	d_step {
		bn[p] > 0;
		if
		:: ba[(p) * BL] >= MINUS ->
			mem[ba[(p) * BL] - MINUS]--
		:: ba[(p) * BL] >= PLUS && ba[(p) * BL] < MINUS ->
			mem[ba[(p) * BL] - PLUS]++
		:: else ->
			mem[ba[(p) * BL]] = bv[(p) * BL]
		fi;
		bn[p]--;
		bi = 0;
		do
		:: bi < bn[p] ->
			ba[(p) * BL + bi] = ba[(p) * BL + bi + 1];
			bv[(p) * BL + bi] = bv[(p) * BL + bi + 1];
			bi++
		:: else ->
			break
		od;
		ba[(p) * BL + bi] = 0;
		bv[(p) * BL + bi] = 0;
		bi = 0
	}
}

/* Plain, relaxed or release store; or a buffered update: put(p, a + MINUS, 0). */
inline put(p, a, v)
{
	d_step {
		bn[p] < BL;
		ba[(p) * BL + bn[p]] = a;
		bv[(p) * BL + bn[p]] = v;
		bn[p]++
	}
}

/* seq_cst store or exchange: the buffer is empty before, and nothing waits after. */
inline xchg(p, a, v)
{
	d_step { bn[p] == 0; mem[a] = v }
}

/* seq_cst atomic_fetch_add(1). */
inline inc(p, a)
{
	d_step { bn[p] == 0; mem[a]++ }
}

/* Load by a processor that may have stored to @a itself: newest own store wins. */
inline load(p, a, out)
{
	d_step {
		out = mem[a];
		bi = 0;
		do
		:: bi < bn[p] ->
			if
			:: ba[(p) * BL + bi] == a -> out = bv[(p) * BL + bi]
			:: ba[(p) * BL + bi] == a + PLUS -> out++
			:: ba[(p) * BL + bi] == a + MINUS -> out--
			:: else -> skip
			fi;
			bi++
		:: else ->
			break
		od;
		bi = 0
	}
}
