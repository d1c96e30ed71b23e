/* SPDX-License-Identifier: Apache-2.0 */
/* One mm_adopt(), for the files of its own only: see adopt.c. */
#ifndef KVMM_DAEMON_MM_ADOPT_H
#define KVMM_DAEMON_MM_ADOPT_H

#include "daemon/mm/keep.h"

/**
 * struct adopt_win - a window that there was
 * @kw:		its record; NULL: torn
 * @slot:	its place in the state
 * @ledger:	of it; mapped or not
 */
struct adopt_win {
	const struct keep_win *kw;
	uint32_t	slot;
	struct shm	ledger;
};

/**
 * struct adoption - what one mm_adopt() goes by
 * @client:	by place in the state
 * @win:	@nr_wins of them
 * @broken:	numbers of engines of which a member could not be adopted
 * @spoiled:	pools that are not to be adopted
 */
struct adoption {
	struct mm	*mm;
	struct mm_client *client[KEEP_CLIENTS];
	const struct keep_client *kc[KEEP_CLIENTS];
	struct adopt_win *win;
	unsigned int	nr_wins;
	uint32_t	broken[KEEP_CLIENTS];
	unsigned int	nr_broken;
	bool		spoiled[KVMM_MAX_SPACES][KVMM_MAX_CLASSES][KVMM_MAX_NODES];
};

/* -- adopt_client.c -------------------------------------------------------------- */

/* Clients and the ledgers of their windows; before there are spaces. */
void adopt_clients_take(struct adoption *a);
/* What they are attached to, and their windows. 0, -ENOMEM. */
int adopt_clients_bind(struct adoption *a);
/* All is there: who has lost what, what ends, and the server is told. */
void adopt_clients_finish(struct adoption *a);

#endif
