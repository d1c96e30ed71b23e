/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Taking over what the last daemon left: spaces, engines, clients, windows.
 *
 * It is found by name (keep.h) and believed for its contents, if it is the memory
 * that its record means. Order matters:
 *
 *	1. the state; what it says of clients and windows
 *	2. clients, their engines; the windows' ledgers: a pool of which one is
 *	   missing, or is not as it should be, is not adopted, since nobody could
 *	   say what is pinned there (adopt_client.c)
 *	3. spaces, pools (adopt_pool.c)
 *	4. windows: from here on pins count. Then extents
 *	5. frames, and the pages in them (adopt_frames.c)
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/mm/adopt.h"
#include "daemon/mm/mm_calls.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/fd.h"
#include "kernels/kernels.h"

void adopt_gave_up(struct mm *mm, const char *fmt, ...)
{
	char text[256];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	mm->adopted.gave_up++;
	if (mm->keep->ops->gave_up)
		mm->keep->ops->gave_up(mm->o.ops_arg, text);
}

static uint64_t fd_bytes(int fd)
{
	struct stat st;

	return fstat(fd, &st) || st.st_size < 0 ? 0 : (uint64_t)st.st_size;
}

static int take(struct mm *mm, const char *name)
{
	return mm->keep->ops->take(mm->o.ops_arg, name);
}

int adopt_shm(struct mm *mm, const char *name, uint64_t bytes, bool want_ro,
	      struct shm *s)
{
	int fd = take(mm, name), err;

	if (fd < 0)
		return fd;
	if (!bytes)
		bytes = fd_bytes(fd);
	err = shm_adopt(s, fd, bytes, want_ro);
	if (err)
		adopt_gave_up(mm, "%s is no memory of %llu bytes that kvmmd made: %s",
			      name, (unsigned long long)bytes, strerror(-err));
	return err;
}

/* -- the state ------------------------------------------------------------------- */

static bool state_good(const struct keep_state *st)
{
	return st->magic == KEEP_MAGIC_STATE && st->size == sizeof(*st) &&
	       st->nr_clients == KEEP_CLIENTS && st->nr_wins == KEEP_WINS &&
	       st->crc == keep_state_crc(st);
}

/* Did a daemon before this one have something? */
static bool header_used(const struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < KVMM_MAX_SPACES; i++)
		/* relaxed: whoever wrote it is dead */
		if (atomic_load_explicit(&mm->hdr->space[i].live,
					 memory_order_relaxed))
			return true;
	return false;
}

/* 0: it is there; -ENOENT: there is none that is good. */
static int state_take(struct mm *mm)
{
	struct keep *k = mm->keep;
	int err;

	err = adopt_shm(mm, "mm", keep_state_bytes(), false, &k->shm);
	if (err == -ENOENT && header_used(mm))
		adopt_gave_up(mm, "nobody kept the state of the last daemon: nothing is adopted");
	if (err)
		return -ENOENT;
	if (state_good(k->shm.addr)) {
		keep_state_map(k);
		return 0;
	}
	adopt_gave_up(mm, "the state of the last daemon is not what it should be: nothing is adopted");
	shm_fini(&k->shm);
	return -ENOENT;
}

/* -- spaces ---------------------------------------------------------------------- */

static bool space_good(const struct keep_space *ks, uint64_t bytes, uint32_t ix)
{
	return bytes >= sizeof(*ks) && ks->magic == KEEP_MAGIC_SPACE &&
	       ks->size == sizeof(*ks) && ks->ix == ix &&
	       ks->desc_len <= bytes - sizeof(*ks) &&
	       memchr(ks->tenant, 0, sizeof(ks->tenant)) &&
	       ks->crc == kvmm_crc32c(kvmm_crc32c(0, ks,
					offsetof(struct keep_space, crc)),
				      ks + 1, ks->desc_len);
}

static int space_take(struct adoption *a, uint32_t ix, struct errmsg *e)
{
	struct mm *mm = a->mm;
	const struct keep_space *ks;
	struct shm s = SHM_INIT;
	char name[KEEP_NAME];
	uint8_t id[32];
	int fd, err;

	snprintf(name, sizeof(name), "space.%u", ix);
	fd = take(mm, name);
	if (fd < 0)
		return 0;
	if (keep_id_of(fd).ino != mm->keep->live->space_ino[ix]) {
		/* 0: it had ended, and all that is missing is that this was heard */
		if (mm->keep->live->space_ino[ix])
			adopt_gave_up(mm, "what was kept as space %u is another one",
				      ix);
		mm->keep->ops->drop(mm->o.ops_arg, name);
		close(fd);
		return 0;
	}
	err = shm_adopt(&s, fd, fd_bytes(fd), false);
	ks = s.addr;
	if (!err && !space_good(ks, s.bytes, ix))
		err = -EPROTO;
	if (!err) {
		desc_space_id((const uint8_t *)(ks + 1), ks->desc_len,
			      ks->tenant, id);
		err = memcmp(id, ks->id, sizeof(id)) ? -EPROTO :
		      space_adopt(mm, ix, ks->tenant, (const uint8_t *)(ks + 1),
				  ks->desc_len, ks->id, e);
	}
	if (err && err != -ENOMEM)
		adopt_gave_up(mm, "space %u cannot be adopted: %s", ix,
			      e->text[0] ? e->text : strerror(-err));
	if (!err) {
		mm->adopted.spaces++;
		mm->space[ix]->keep_shm = s;
		return 0;
	}
	mm->keep->ops->drop(mm->o.ops_arg, name);
	shm_fini(&s);
	return err == -ENOMEM ? err : 0;
}

/* What the header says of spaces that nobody has any more. */
static void spaces_not_there(struct mm *mm)
{
	unsigned int i;

	for (i = 0; i < KVMM_MAX_SPACES; i++)
		if (!mm->space[i])
			/* release: pairs with the acquire of whoever lists them */
			atomic_store_explicit(&mm->hdr->space[i].live, 0,
					      memory_order_release);
}

/* -- all of it ------------------------------------------------------------------- */

static int adopt_all(struct adoption *a, unsigned int share_pct,
		     struct errmsg *e)
{
	struct mm *mm = a->mm;
	struct mm_pool *p;
	unsigned int i;
	int err;

	/*
	 * Clients first: a window of one that is not there spoils its pool. They
	 * are attached and get windows when spaces and pools exist.
	 */
	adopt_clients_take(a);
	for (i = 0; i < KVMM_MAX_SPACES; i++) {
		err = space_take(a, i, e);
		if (err)
			return err;
	}
	spaces_not_there(mm);
	err = adopt_clients_bind(a);
	if (err)
		return errmsg_set(e, err, "out of memory");
	for (i = 0; i < mm->nr_nodes; i++)
		list_for_each_entry(p, &mm->node[i].pools, node_link)
			if (p->adopted)
				adopt_extents(p);
	err = adopt_frames(mm, share_pct, e);
	if (!err)
		adopt_clients_finish(a);
	return err;
}

static int adopt_begin(struct mm *mm, struct adoption **ret)
{
	struct adoption *a = calloc(1, sizeof(*a));

	if (!a)
		return -ENOMEM;
	a->mm = mm;
	a->win = calloc(KEEP_WINS, sizeof(*a->win));
	mm->keep->holder = calloc(KEEP_WINS, sizeof(*mm->keep->holder));
	mm->adoption = a;
	mm->adopting = true;
	*ret = a;
	return a->win && mm->keep->holder ? 0 : -ENOMEM;
}

static void adopt_end(struct adoption *a)
{
	struct mm *mm = a->mm;
	unsigned int i;

	for (i = 0; i < a->nr_wins; i++)
		shm_fini(&a->win[i].ledger);
	free(a->win);
	free(mm->keep->holder);
	mm->keep->holder = NULL;
	mm->adoption = NULL;
	mm->adopting = false;
	free(a);
}

int mm_adopt(struct mm *mm, unsigned int share_pct, struct mm_adopted *ad,
	     struct errmsg *e)
{
	struct adoption *a = NULL;
	unsigned int i;
	int err;

	if (!mm->keep)
		return 0;
	e->text[0] = '\0';
	err = state_take(mm);
	if (err) {
		spaces_not_there(mm);
		mm->keep->ops->drop(mm->o.ops_arg, "mm");
		err = keep_begin(mm, e);
		goto out;
	}
	keep_stores_take(mm);
	err = adopt_begin(mm, &a);
	if (err)
		errmsg_set(e, err, "out of memory");
	else
		err = adopt_all(a, share_pct, e);
	if (a)
		adopt_end(a);
out:
	/* those that had something to find say so when they have found it */
	for (i = 0; i < mm->nr_nodes && !err; i++)
		if (!mm->node[i].mem && !mm->node[i].recovery)
			keep_store(&mm->node[i]);
	*ad = mm->adopted;
	return err;
}

const struct mm_adopted *mm_last_adopted(const struct mm *mm)
{
	return &mm->adopted;
}
