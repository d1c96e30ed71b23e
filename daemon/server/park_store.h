/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of the park: the table, and the messages to who keeps it. */
#ifndef KVMM_SERVER_PARK_STORE_H
#define KVMM_SERVER_PARK_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include "daemon/server/park.h"

/* Begins the names that are put; sockets of the manager's have none. */
#define PARK_SIGIL	'@'

/**
 * struct parked - one name
 * @name:	as the store knows it, with %PARK_SIGIL
 * @fd:		-1: only to be forgotten by the store
 * @found:	inherited and not taken: ours to close
 * @stored:	the store has it
 * @stale:	the store has something else under this name, that must go first
 */
struct parked {
	char	name[PARK_NAME + 1];
	int	fd;
	bool	found, stored, stale;
};

/**
 * struct park - the table, sorted by name
 * @sock:	to @to; -1: nobody keeps anything
 * @max:	descriptors that the store takes
 * @keeper:	`kvmmd --keep`, or 0 when it is systemd
 * @quiet_ns:	the store is busy: leave it alone until then
 * @retry_ns:	when to try again what it did not take
 * @behind:	there is something that it did not take
 * @nr_stored, @stored_bytes: entries that it has, and of their names, with
 *		separators and with those of the manager's sockets
 * @error:	why the last message was not taken; 0
 */
struct park {
	struct parked	**entry;
	unsigned int	nr, cap;
	int		sock;
	struct sockaddr_un to;
	socklen_t	to_len;
	unsigned int	max;
	pid_t		keeper;
	uint64_t	quiet_ns, retry_ns;
	bool		behind;
	unsigned int	nr_stored;
	size_t		stored_bytes;
	unsigned int	inherited, taken;
	uint64_t	failed;
	int		error;
};

/** store_open() - who keeps descriptors, by the environment */
void store_open(struct park *p);

/** store_is() - the store has @e, or has it no more */
void store_is(struct park *p, struct parked *e, bool stored);

/** store_lost() - nobody keeps descriptors, or not any more */
bool store_lost(const struct park *p);

/**
 * store_sync() - bring the store to what @e says, as far as it takes it
 * Return: 0 when it is; -errno and it was counted.
 */
int store_sync(struct park *p, struct parked *e);

/** store_inherit() - fill the empty table; 0 or -ENOMEM */
int store_inherit(struct park *p);

/** park_insert() - a new entry with a full name; NULL: no memory. park.c */
struct parked *park_insert(struct park *p, const char *name);
/** park_find() - by full name, or NULL */
struct parked *park_find(const struct park *p, const char *name);

#endif
