/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The park's table: what is held under which name, and what the store has of it.
 *
 * An entry says what should be (a descriptor, or none) and what the store knows
 * (stored, stale). Every change tries to bring the two together at once; what
 * fails stays as it is and park_run() tries again. So a drop that the store did
 * not hear is not lost, either: its entry remains, without a descriptor, until
 * the store has forgotten the name.
 *
 *	fd	stored	stale
 *	held	yes	no	as it should be
 *	held	no	no	to be stored
 *	held	no	yes	to be removed, then stored: the name was reused
 *	none	no	yes	to be removed; then the entry goes
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/log.h"
#include "daemon/server/park_store.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define RETRY_NS	(5 * NSEC_PER_SEC)
#define RETRY_FAILS	8	/* then the store is left alone until the next time */

/* -- the table --------------------------------------------------------------------- */

/* The first entry that is not before @name. */
static unsigned int lower_bound(const struct park *p, const char *name)
{
	unsigned int lo = 0, hi = p->nr;

	while (lo < hi) {
		unsigned int mid = lo + (hi - lo) / 2;

		if (strcmp(p->entry[mid]->name, name) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

struct parked *park_find(const struct park *p, const char *name)
{
	unsigned int i = lower_bound(p, name);

	if (i < p->nr && !strcmp(p->entry[i]->name, name))
		return p->entry[i];
	return NULL;
}

struct parked *park_insert(struct park *p, const char *name)
{
	unsigned int i = lower_bound(p, name);
	struct parked *e;

	if (p->nr == p->cap) {
		unsigned int cap = max(64u, 2 * p->cap);
		void *mem = realloc(p->entry, cap * sizeof(p->entry[0]));

		if (!mem)
			return NULL;
		p->entry = mem;
		p->cap = cap;
	}
	e = calloc(1, sizeof(*e));
	if (!e)
		return NULL;
	snprintf(e->name, sizeof(e->name), "%s", name);
	e->fd = -1;
	memmove(p->entry + i + 1, p->entry + i,
		(p->nr - i) * sizeof(p->entry[0]));
	p->entry[i] = e;
	p->nr++;
	return e;
}

static void park_remove(struct park *p, struct parked *e)
{
	unsigned int i = lower_bound(p, e->name);

	memmove(p->entry + i, p->entry + i + 1,
		(p->nr - i - 1) * sizeof(p->entry[0]));
	p->nr--;
	free(e);
}

/* One step towards what should be; an entry that is of no use any more goes. */
static int entry_settle(struct park *p, struct parked *e)
{
	int err = store_sync(p, e);

	p->behind |= err != 0;
	if (e->fd < 0 && !e->stale)
		park_remove(p, e);
	return err;
}

/* What it stands for changes: the store's old one must go first. */
static void entry_set(struct park *p, struct parked *e, int fd)
{
	if (e->found)
		close_fd(&e->fd);
	e->found = false;
	e->stale |= e->stored;
	store_is(p, e, false);
	e->fd = fd;
}

/* -- names ----------------------------------------------------------------------------- */

/* The store's name for what @fmt says; false: not a name. */
static bool __printf(2, 0) name_make(char *name, const char *fmt, va_list ap)
{
	const char *c;
	int n;

	name[0] = PARK_SIGIL;
	n = vsnprintf(name + 1, PARK_NAME, fmt, ap);
	if (n <= 0 || n >= PARK_NAME)
		return false;
	for (c = name + 1; *c; c++)
		if (*c <= ' ' || *c >= 127 || *c == ':')
			return false;
	return true;
}

static struct parked *found(const struct park *p, const char *name)
{
	char full[PARK_NAME + 1];
	struct parked *e;

	if (!p || snprintf(full, sizeof(full), "%c%s", PARK_SIGIL, name) >=
	    (int)sizeof(full))
		return NULL;
	e = park_find(p, full);
	return e && e->found ? e : NULL;
}

/* -- life ------------------------------------------------------------------------------ */

int park_create(struct park **ret)
{
	struct park *p = calloc(1, sizeof(*p));
	int err;

	if (!p)
		return -ENOMEM;
	p->sock = -1;
	store_open(p);
	err = store_inherit(p);
	if (err) {
		park_destroy(p);
		return err;
	}
	*ret = p;
	return 0;
}

void park_destroy(struct park *p)
{
	unsigned int i;

	if (!p)
		return;
	for (i = 0; i < p->nr; i++) {
		if (p->entry[i]->found)
			close_fd(&p->entry[i]->fd);
		free(p->entry[i]);
	}
	free(p->entry);
	close_fd(&p->sock);
	free(p);
}

int park_put(struct park *p, int fd, const char *fmt, ...)
{
	char name[PARK_NAME + 1];
	struct parked *e;
	va_list ap;
	bool ok;

	va_start(ap, fmt);
	ok = name_make(name, fmt, ap);
	va_end(ap);
	if (!ok || fd < 0)
		return -EINVAL;
	if (!p)
		return 0;
	e = park_find(p, name);
	if (!e)
		e = park_insert(p, name);
	if (!e) {
		p->failed++;
		return -ENOMEM;
	}
	entry_set(p, e, fd);
	return entry_settle(p, e);
}

void park_drop(struct park *p, const char *fmt, ...)
{
	char name[PARK_NAME + 1];
	struct parked *e;
	va_list ap;
	bool ok;

	va_start(ap, fmt);
	ok = name_make(name, fmt, ap);
	va_end(ap);
	e = ok && p ? park_find(p, name) : NULL;
	if (!e)
		return;
	entry_set(p, e, -1);
	entry_settle(p, e);
}

/* -- what was inherited ---------------------------------------------------------------- */

static int take(struct park *p, struct parked *e)
{
	if (!e)
		return -ENOENT;
	e->found = false;
	p->taken++;
	return e->fd;
}

int park_take(struct park *p, const char *name)
{
	return take(p, found(p, name));
}

bool park_has(const struct park *p, const char *name)
{
	return found(p, name) != NULL;
}

int park_socket(struct park *p, const char *name)
{
	struct parked *e = NULL;

	if (p && name[0] != PARK_SIGIL)
		e = park_find(p, name);

	return take(p, e && e->found ? e : NULL);
}

bool park_next(const struct park *p, const char *prefix, struct park_iter *it)
{
	char from[PARK_NAME + 2];
	size_t len = strlen(prefix);
	unsigned int i;

	snprintf(from, sizeof(from), "%c%s", PARK_SIGIL,
		 it->name[0] ? it->name : prefix);
	for (i = p ? lower_bound(p, from) : 0; p && i < p->nr; i++) {
		const struct parked *e = p->entry[i];

		if (e->name[0] != PARK_SIGIL || strncmp(e->name + 1, prefix, len))
			break;
		if (!e->found || (it->name[0] && !strcmp(e->name, from)))
			continue;
		snprintf(it->name, sizeof(it->name), "%s", e->name + 1);
		it->fd = e->fd;
		return true;
	}
	it->fd = -1;
	return false;
}

unsigned int park_done(struct park *p)
{
	unsigned int i, n = 0;

	for (i = p ? p->nr : 0; i--;) {
		struct parked *e = p->entry[i];

		if (!e->found)
			continue;
		if (e->name[0] != PARK_SIGIL)
			log_warn("socket activation: no socket in the "
				 "configuration is called \"%s\"", e->name);
		else
			n++;
		entry_set(p, e, -1);
		entry_settle(p, e);
	}
	return n;
}

/* -- now and then ------------------------------------------------------------------------ */

uint64_t park_run(struct park *p, uint64_t now_ns)
{
	unsigned int i, failed = 0;

	if (!p || !p->behind || store_lost(p))
		return DEADLINE_NONE;
	if (now_ns < p->retry_ns)
		return p->retry_ns;
	p->retry_ns = now_ns + RETRY_NS;
	p->behind = false;
	/* removals first: they make room for what did not fit */
	for (i = p->nr; i--;)
		if (p->entry[i]->stale && entry_settle(p, p->entry[i]))
			failed++;
	for (i = p->nr; i--;) {
		struct parked *e = p->entry[i];

		if (e->stored || e->fd < 0 || e->name[0] != PARK_SIGIL)
			continue;
		if (failed < RETRY_FAILS && entry_settle(p, e))
			failed++;
		else if (failed >= RETRY_FAILS)
			p->behind = true;
	}
	return p->behind ? p->retry_ns : DEADLINE_NONE;
}

/* The description of a store, which is none, is for reading only. */
static bool is_memory(int fd)
{
	int fl = fcntl(fd, F_GETFL);

	return fl >= 0 && (fl & O_ACCMODE) == O_RDWR;
}

uint64_t park_bytes(const struct park *p)
{
	uint64_t bytes = 0;
	struct stat st;
	unsigned int i;

	for (i = 0; p && i < p->nr; i++)
		if (p->entry[i]->found && !fstat(p->entry[i]->fd, &st) &&
		    S_ISREG(st.st_mode) && is_memory(p->entry[i]->fd))
			bytes += (uint64_t)st.st_blocks * 512;
	return bytes;
}

/* -- saying how it is -------------------------------------------------------------------- */

bool park_enabled(const struct park *p)
{
	return p && !store_lost(p);
}

void park_stat(const struct park *p, struct park_stat *st)
{
	unsigned int i;

	*st = (struct park_stat){ .keeper = "nobody" };
	if (!p)
		return;
	*st = (struct park_stat){
		.enabled	= park_enabled(p),
		.max		= p->max,
		.inherited	= p->inherited,
		.taken		= p->taken,
		.failed		= p->failed,
	};
	st->keeper = !st->enabled ? "nobody"
				  : p->keeper ? "kvmmd --keep" : "systemd";
	for (i = 0; i < p->nr; i++) {
		const struct parked *e = p->entry[i];

		if (e->name[0] != PARK_SIGIL)
			continue;
		st->held += e->fd >= 0;
		st->parked += st->enabled && e->stored;
		st->waiting += st->enabled && (!e->stored || e->stale);
	}
}

bool park_why(const struct park *p, char *buf, size_t len)
{
	struct park_stat st;

	if (!p)
		return false;
	if (p->sock < 0) {
		snprintf(buf, len, "nothing is parked: a restart starts empty "
			 "(use systemd with FileDescriptorStoreMax=, or "
			 "kvmmd --keep)");
		return true;
	}
	if (store_lost(p)) {
		snprintf(buf, len, "the keeper is gone and nothing is parked any "
			 "more: a restart starts empty");
		return true;
	}
	if (!p->behind)
		return false;
	park_stat(p, &st);
	snprintf(buf, len, "%u of %u descriptors are not parked as they should "
		 "be: a crash now would lose what is in them (%s)", st.waiting,
		 st.held, strerror(-p->error));
	return st.waiting > 0;
}
