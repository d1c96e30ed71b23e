/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme_scan.h - one reading of a store: what nvme_scan.c reads, nvme_found.c
 * believes or not
 */
#ifndef KVMM_DAEMON_NODE_NVME_SCAN_H
#define KVMM_DAEMON_NODE_NVME_SCAN_H

#include "daemon/node/nvme.h"

/**
 * struct seg_view - what the records say of a segment
 * @seq:	of the newest
 * @slot_bytes:	and its size, which goes for all; 0: there is none
 * @conflicts:	records of another size that were not removed
 * @place:	by slot: place in nvme_found.rec + 1
 */
struct seg_view {
	uint64_t	seq;
	uint32_t	slot_bytes;
	uint32_t	conflicts;
	uint32_t	*place;
};

/**
 * struct scan - one reading of a store
 * @ahead:	who reads
 * @buf:	what was read last
 * @bytes:	that were asked for so far
 * @seg:	by segment
 * @end_writer:	by area: who wrote the block with END
 * @writer:	who wrote the block of the journal that was read last
 * @gap:	the ring was written over where it would be needed: the checkpoint is
 *		older than what can be made up for
 * @wary:	the newest checkpoint may be one that is not whole
 * @blind:	and cannot be read
 * @gone:	why a block that matters could not be read; 0
 */
struct scan {
	struct nvme		*nv;
	const struct nvme_super	*sb;
	struct nvme_found	*f;
	struct nvme_ahead	*ahead;
	const char		*buf;
	uint64_t		bytes;
	struct seg_view		*seg;
	uint64_t		end_writer[2];
	uint64_t		writer;
	bool			gap;
	bool			wary;
	bool			blind;
	int			gone;
};

/* An empty table with room for what @end tells of. */
int nvme_found_begin(struct scan *sc, const struct nvme_ent_end *end);
/* What the entries of a good block say. */
int nvme_found_block(struct scan *sc, const struct nvme_block *b);
/* All was read: sort it. */
int nvme_found_finish(struct scan *sc);
/* The table's own memory, not what was found. */
void nvme_found_end(struct scan *sc);

#endif
