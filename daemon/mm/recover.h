/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finding again what block nodes hold: between persist.c, recover.c and
 * recover_label.c, for these only.
 */
#ifndef KVMM_DAEMON_MM_RECOVER_H
#define KVMM_DAEMON_MM_RECOVER_H

#include "daemon/mm/tier.h"

/* A label that was found, and the space that it stands for. */
struct known {
	uint32_t	id;
	struct mm_space	*sp;
};

/**
 * struct recovery - finding again, while it lasts
 * @known:	@nr_known labels by number
 * @last:	the one that was looked for last
 * @stale:	slots of which a newer one was found: free when all is over
 * @refused:	labels that were not taken
 * @waits:	the one that could not be taken yet, plus one; it was told
 * @share:	records for each label, if they have the same
 */
struct recovery {
	struct known	*known;
	unsigned int	nr_known, max_known;
	struct known	last;
	struct node_slot *stale;
	unsigned int	nr_stale, max_stale;
	unsigned int	spaces, refused;
	uint64_t	waits;
	uint64_t	began_ns;
	uint64_t	share;
};

/* -- persist.c --------------------------------------------------------------- */

/* A sentence for the log; @bad: something is lost, or has to wait. */
void persist_say(struct mm *mm, bool bad, const char *fmt, ...)
	__printf(3, 4);

/* -- recover_label.c --------------------------------------------------------- */

/* The space that a label stands for; NULL: it was not taken. */
struct mm_space *recovery_space(struct recovery *rv, uint32_t id);
int found_label(struct node *n, uint32_t id, const void *bytes, size_t len,
		void *arg);

/* -- recover.c: the rest of struct node_owner's recovery ---------------------- */

void found_expect(struct node *n, uint64_t records, void *arg);
void found_begin(struct node *n, uint64_t labels, uint64_t records, void *arg);
unsigned int found_records(struct node *n, const struct node_record *rec,
			   unsigned int nr, bool *taken, void *arg);
void found_all(struct node *n, int err, void *arg);
/* @nd finds nothing any more. */
void recovery_free(struct mm_node *nd);

#endif
