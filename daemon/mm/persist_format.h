/* SPDX-License-Identifier: Apache-2.0 */
/*
 * persist_format.h - what mm keeps on block nodes: a page in the record of its
 * slot, a space in a label; little-endian, as the hosts are
 *
 * The node has its own part of it, see daemon/node/FORMAT.md. persist.c says what
 * it is for.
 */
#ifndef KVMM_DAEMON_MM_PERSIST_FORMAT_H
#define KVMM_DAEMON_MM_PERSIST_FORMAT_H

#include <assert.h>
#include <stdint.h>

#include "daemon/node/node.h"

#define LABEL_MAGIC	0x4c53564bu	/* "KVSL" */
#define LABEL_VERSION	1u
#define FORMAT_RAW	0u

#define META_CRC	1u		/* @data_crc holds */
#define META_ROOT	2u
#define META_BOUND	4u

/**
 * struct page_meta - a page, in the record of its slot; little-endian
 * @parent:	all zero for none
 * @label:	of the space, a number of the node's
 * @format:	FORMAT_RAW
 */
struct page_meta {
	uint8_t		key[32];
	uint8_t		parent[32];
	uint32_t	label;
	uint32_t	raw_len;
	uint32_t	pos;
	uint32_t	cost_us;
	uint32_t	data_crc;
	uint16_t	group;
	uint8_t		flags;		/* META_* */
	uint8_t		format;
	uint8_t		spare[8];
};
static_assert(sizeof(struct page_meta) == NODE_META_BYTES, "disk format");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "disk format");

/**
 * struct space_label - a space; the tenant's name and the descriptor's canonical
 * bytes follow
 */
struct space_label {
	uint32_t	magic;
	uint16_t	version;
	uint16_t	tenant_len;
	uint32_t	desc_len;
};
static_assert(sizeof(struct space_label) == 12, "disk format");

#endif
