/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/node/nvme_block.h"

#include <string.h>

#include "ipc/base/bits.h"
#include "kernels/kernels.h"

void nvme_block_init(struct nvme_block *b)
{
	memset(b, 0, NVME_BLOCK);
}

void *nvme_block_add(struct nvme_block *b, enum nvme_ent_type type,
		     uint32_t bytes, uint32_t arg)
{
	struct nvme_ent *e = (void *)((char *)(b + 1) + b->bytes);

	bytes = (uint32_t)round_up(bytes, 8);
	if (bytes > nvme_block_left(b))
		return NULL;
	e->type = (uint8_t)type;
	e->bytes = (uint16_t)bytes;
	e->arg = arg;
	b->bytes = (uint16_t)(b->bytes + bytes);
	b->count++;
	return e;
}

/* As if nvme_block.crc were 0. */
static uint32_t block_crc(const struct nvme_block *b)
{
	static const uint32_t zero;
	const size_t at = offsetof(struct nvme_block, crc);
	uint32_t crc = kvmm_crc32c(0, b, at);

	crc = kvmm_crc32c(crc, &zero, sizeof(zero));
	return kvmm_crc32c(crc, (const char *)b + at + sizeof(zero),
			   NVME_BLOCK - at - sizeof(zero));
}

void nvme_block_seal(struct nvme_block *b, uint32_t kind,
		     const uint8_t uuid[16], uint64_t seq, uint64_t epoch)
{
	b->kind = kind;
	memcpy(b->uuid, uuid, sizeof(b->uuid));
	b->seq = seq;
	b->epoch = epoch;
	b->crc = block_crc(b);
}

bool nvme_block_good(const struct nvme_block *b, uint32_t kind,
		     const uint8_t uuid[16])
{
	return b->kind == kind && !memcmp(b->uuid, uuid, sizeof(b->uuid)) &&
	       b->bytes <= NVME_BLOCK_ROOM && b->crc == block_crc(b);
}

/* The least that an entry of a type has; 0 for a type that does not exist. */
static uint32_t ent_bytes(unsigned int type)
{
	static const uint32_t bytes[] = {
		[NVME_ENT_ADD]		= sizeof(struct nvme_ent_add),
		[NVME_ENT_DEL]		= sizeof(struct nvme_ent_slot),
		[NVME_ENT_LABEL]	= sizeof(struct nvme_ent_label),
		[NVME_ENT_LABEL_DEL]	= sizeof(struct nvme_ent),
		[NVME_ENT_BAD]		= sizeof(struct nvme_ent_slot),
		[NVME_ENT_ZEROED]	= sizeof(struct nvme_ent),
		[NVME_ENT_END]		= sizeof(struct nvme_ent_end),
	};

	return type < ARRAY_SIZE(bytes) ? bytes[type] : 0;
}

const struct nvme_ent *nvme_block_next(const struct nvme_block *b,
				       const struct nvme_ent *prev)
{
	const char *first = (const char *)(b + 1);
	const char *end = first + b->bytes;
	const char *at = prev ? (const char *)prev + prev->bytes : first;
	const struct nvme_ent *e = (const void *)at;
	uint32_t least;

	if (end - at < (ptrdiff_t)sizeof(*e) || e->bytes % 8 ||
	    e->bytes > end - at)
		return NULL;
	least = ent_bytes(e->type);
	return least && e->bytes >= least ? e : NULL;
}
