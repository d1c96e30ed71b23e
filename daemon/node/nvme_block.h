/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme_block.h - blocks of entries, as journal and checkpoints consist of
 *
 * A data structure only: no I/O, no lock. What is read is checked here, so that
 * who walks a block's entries meets none that leaves it.
 */
#ifndef KVMM_DAEMON_NODE_NVME_BLOCK_H
#define KVMM_DAEMON_NODE_NVME_BLOCK_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/node/nvme_format.h"

/* Longest part of a label that an entry can hold. */
#define NVME_LABEL_PART							\
	(NVME_BLOCK_ROOM - (uint32_t)sizeof(struct nvme_ent_label))

/** nvme_block_init() - an empty block */
void nvme_block_init(struct nvme_block *b);

/** nvme_block_left() - bytes of entries that still fit */
static inline uint32_t nvme_block_left(const struct nvme_block *b)
{
	return NVME_BLOCK_ROOM - b->bytes;
}

/**
 * nvme_block_add() - append an entry
 * @bytes:	its length with the head; rounded up to a multiple of 8
 *
 * Return: the entry, head filled in, the rest zero; NULL: it does not fit.
 */
void *nvme_block_add(struct nvme_block *b, enum nvme_ent_type type,
		     uint32_t bytes, uint32_t arg);

/** nvme_block_seal() - say what it is and sum it up; nothing can be added then */
void nvme_block_seal(struct nvme_block *b, uint32_t kind,
		     const uint8_t uuid[16], uint64_t seq, uint64_t epoch);

/** nvme_block_good() - is it one of that kind and store, and whole? */
bool nvme_block_good(const struct nvme_block *b, uint32_t kind,
		     const uint8_t uuid[16]);

/**
 * nvme_block_next() - walk the entries of a good block
 * @prev:	NULL for the first
 *
 * Return: the next entry, long enough for its type; NULL: that was the last.
 */
const struct nvme_ent *nvme_block_next(const struct nvme_block *b,
				       const struct nvme_ent *prev);

#endif
