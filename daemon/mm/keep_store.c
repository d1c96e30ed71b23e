/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stores that I/O to and from frames may still be under way on.
 *
 * A daemon that was killed is gone; what it had the kernel read is not. While a
 * device stalls, a read of the dead one's may land in a frame any time, and the
 * frame must not be anybody else's by then. The file lock of the store is held by
 * the very description that the I/O goes through, and so until the last of it is
 * over: who gets the lock knows.
 *
 * Only whoever opens the same store would get it, and today's configuration may
 * lack that store, name another path, or find another file there. So each daemon
 * leaves with the state which stores it had open, and a second description of each,
 * without lock (node_store_fd()), as "block.I". The next one asks those:
 *
 *	lock had on it		nothing lands any more: forgotten
 *	its own node has it	the same
 *	neither			frames that were being read into stay where they are
 *
 * A store is known by its inode and its time of birth, for which the description
 * may be missing (nobody kept it): then only a node of ours that has opened that very
 * store can tell. If there is no place left to write one down, the last says so
 * (KEEP_STORE_MORE), and nobody will ever know; there are more places than anybody
 * has stores that stall.
 *
 * Asking never waits: LOCK_NB, and the lock is let go at once.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "daemon/mm/keep.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

void keep_stores_init(struct keep *k)
{
	unsigned int i;

	for (i = 0; i < KEEP_STORES; i++)
		k->held[i].fd = -1;
}

/* -- which one it is ---------------------------------------------------------------- */

static struct keep_store store_of(int fd, const char *name)
{
	struct keep_store ks = { .used = KEEP_STORE_KNOWN };
	struct statx sx;

	ks.id = keep_id_of(fd);
	snprintf(ks.name, sizeof(ks.name), "%s", name);
	if (!statx(fd, "", AT_EMPTY_PATH, STATX_BTIME, &sx) &&
	    (sx.stx_mask & STATX_BTIME))
		ks.born = (uint64_t)sx.stx_btime.tv_sec * NSEC_PER_SEC +
			  sx.stx_btime.tv_nsec;
	return ks;
}

static bool store_same(const struct keep_store *a, const struct keep_store *b)
{
	return keep_id_same(a->id, b->id) && a->born == b->born;
}

static void store_name(unsigned int i, char name[KEEP_NAME])
{
	snprintf(name, KEEP_NAME, "block.%u", i);
}

/* -- what is written down ------------------------------------------------------------- */

static void store_write(struct mm *mm, unsigned int i,
			const struct keep_store *ks)
{
	keep_put2(mm->keep->store[i], ks, sizeof(*ks));
}

static void store_forget(struct mm *mm, unsigned int i)
{
	const struct keep_store none = { .used = 0 };
	struct keep_held *h = &mm->keep->held[i];
	char name[KEEP_NAME];

	store_write(mm, i, &none);
	store_name(i, name);
	mm->keep->ops->drop(mm->o.ops_arg, name);
	mm_point();
	close_fd(&h->fd);
	*h = (struct keep_held){ .fd = -1 };
}

/* A place; the last one is for all that find none. */
static unsigned int store_place(const struct keep *k)
{
	unsigned int i;

	for (i = 0; i < KEEP_STORES - 1; i++)
		if (!k->held[i].ks.used)
			return i;
	return i;
}

void keep_store(struct mm_node *nd)
{
	struct mm *mm = nd->mm;
	struct keep *k = mm->keep;
	int fd = node_store_fd(nd->node);
	struct keep_store ks;
	char name[KEEP_NAME];
	unsigned int i;

	/* nothing of a store that cannot be waited for outlives this process */
	if (!k || !k->store || fd < 0)
		return;
	ks = store_of(fd, nd->node->name);
	for (i = 0; i < KEEP_STORES; i++)
		if (k->held[i].ks.used && store_same(&k->held[i].ks, &ks))
			break;
	if (i == KEEP_STORES) {
		i = store_place(k);
		if (i == KEEP_STORES - 1)
			ks = (struct keep_store){ .used = KEEP_STORE_MORE };
	}
	/* we have the lock: what the last daemon had under way is over */
	if (ks.used == KEEP_STORE_KNOWN)
		k->held[i].old = false;
	store_name(i, name);
	if (k->held[i].fd < 0 && ks.used == KEEP_STORE_KNOWN) {
		mm->keep->ops->put(mm->o.ops_arg, fd, name);
		mm_point();
	}
	if (!k->held[i].ks.used)
		store_write(mm, i, &ks);
	k->held[i].ks = ks;
}

/* -- what the last daemon had ----------------------------------------------------------- */

static void store_take(struct mm *mm, unsigned int i)
{
	struct keep_held *h = &mm->keep->held[i];
	const struct keep_store *ks;
	char name[KEEP_NAME];
	struct keep_store is;

	if (!mm->keep->store[i][0].tag.seq && !mm->keep->store[i][1].tag.seq)
		return;
	ks = keep_get2(mm->keep->store[i], sizeof(*ks));
	if (ks && !ks->used)
		return;
	h->old = true;
	h->ks = ks ? *ks : (struct keep_store){ .used = KEEP_STORE_MORE };
	h->ks.name[sizeof(h->ks.name) - 1] = '\0';
	store_name(i, name);
	h->fd = mm->keep->ops->take(mm->o.ops_arg, name);
	if (h->fd < 0)
		return;
	is = store_of(h->fd, "");
	if (ks && store_same(&is, ks))
		return;
	/* a name that somebody was too busy to forget */
	mm->keep->ops->drop(mm->o.ops_arg, name);
	close_fd(&h->fd);
}

void keep_stores_take(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < KEEP_STORES; i++)
		store_take(mm, i);
}

/* Does a node of ours have it, with the lock? */
static bool store_is_ours(const struct mm *mm, const struct keep_store *ks)
{
	struct keep_store is;
	unsigned int i;
	int fd;

	for (i = 0; i < mm->nr_nodes; i++) {
		fd = mm->node[i].mem ? -1 : node_store_fd(mm->node[i].node);
		if (fd < 0)
			continue;
		is = store_of(fd, "");
		if (store_same(&is, ks))
			return true;
	}
	return false;
}

static bool store_over(const struct mm *mm, const struct keep_held *h)
{
	if (h->ks.used == KEEP_STORE_MORE)
		return false;
	if (h->fd >= 0 && !flock(h->fd, LOCK_SH | LOCK_NB)) {
		flock(h->fd, LOCK_UN);
		return true;
	}
	return store_is_ours(mm, &h->ks);
}

const char *keep_stores_busy(struct mm *mm)
{
	const char *busy = NULL;
	unsigned int i;

	for (i = 0; mm->keep && i < KEEP_STORES; i++) {
		struct keep_held *h = &mm->keep->held[i];

		if (!h->old)
			continue;
		if (store_over(mm, h))
			store_forget(mm, i);
		else
			busy = h->ks.name[0] ? h->ks.name : "that nobody knows";
	}
	return busy;
}

void keep_stores_end(struct mm *mm)
{
	char name[KEEP_NAME];
	unsigned int i;

	for (i = 0; i < KEEP_STORES; i++) {
		struct keep_held *h = &mm->keep->held[i];

		if (h->ks.used) {
			store_name(i, name);
			mm->keep->ops->drop(mm->o.ops_arg, name);
		}
		close_fd(&h->fd);
	}
}
