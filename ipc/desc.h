/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The canonical form of a space's descriptor: what is sent, compared and
 * hashed. Fields in struct order, integers little-endian, every string and
 * every array with a u32 length before it. Strings are UTF-8 without control
 * characters:
 *
 *   model revision kv_dtype scale_format layout abi_tag salt	(strings)
 *   u16 world
 *   u32 nclasses { name, u32 page_bytes, u32 nsegs
 *	{ u32 bytes, u32 align, u16 layer, u8 what, u8 shard } }
 *   u32 ngroups { u16 class_ix, u8 rule, u32 block_tokens, u32 window_pages }
 *
 * space id = SHA-256("kvmm-space-1", canonical form, u32 length, tenant).
 */
#ifndef KVMM_IPC_DESC_H
#define KVMM_IPC_DESC_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/abi.h"
#include "ipc/base/err.h"

#define DESC_MAX_BYTES	49152	/* fits a control message */

struct desc_seg {
	uint32_t bytes, align;
	uint16_t layer;
	uint8_t what, shard;
};

struct desc_class {
	char name[KVMM_MAX_STR];
	uint32_t page_bytes, nsegs;
	struct desc_seg *segs;
};

struct desc_group {
	uint16_t class_ix;
	uint8_t rule;
	uint32_t block_tokens, window_pages;
};

/**
 * struct desc - a decoded, validated descriptor
 *
 * Owns its segment arrays: desc_fini().
 */
struct desc {
	char model[KVMM_MAX_STR], revision[KVMM_MAX_STR];
	char kv_dtype[KVMM_MAX_STR], scale_format[KVMM_MAX_STR];
	char layout[KVMM_MAX_STR], abi_tag[KVMM_MAX_STR], salt[KVMM_MAX_STR];
	uint16_t world;
	uint32_t nclasses, ngroups;
	struct desc_class cls[KVMM_MAX_CLASSES];
	struct desc_group group[KVMM_MAX_GROUPS];
};

struct kvmm_desc;

/**
 * desc_encode() - public struct to canonical bytes; the library's side
 * @d:		the caller's; validated as far as desc_decode() would
 * @buf:	DESC_MAX_BYTES
 * Return: length, or -EINVAL / -E2BIG with a sentence that names the field.
 */
int desc_encode(const struct kvmm_desc *d, uint8_t *buf, struct errmsg *e);

/**
 * desc_decode() - canonical bytes to a validated descriptor; the daemon's side
 *
 * Checks everything: lengths, trailing bytes, counts, powers of two, rules,
 * that segments sum to page_bytes, that a stripe divides by world.
 * Return: 0, or -EINVAL / -ENOMEM with a sentence; @d needs no fini then.
 */
int desc_decode(const uint8_t *buf, size_t len, struct desc *d,
		struct errmsg *e);
void desc_fini(struct desc *d);

/**
 * desc_diff() - name the first field in which two descriptors differ
 * Return: field name as in struct kvmm_desc, or NULL when equal.
 */
const char *desc_diff(const struct desc *a, const struct desc *b);

/**
 * desc_part() - how a rank's part of a page lies in memory, on a gang
 * @off:	filled in: offset of each segment in the part; may be NULL
 *
 * In the order of the segments: of a stripe the equal share of one rank, of a
 * mirror all of it, each where its own alignment allows. The same for all
 * ranks; for a world of one it is the page itself.
 *
 * Return: bytes of the part. At most the page's, and a segment's largest
 * alignment for each segment more.
 */
uint32_t desc_part(const struct desc_class *c, uint32_t world, uint32_t *off);

/** desc_part_bytes() - of one segment */
uint32_t desc_part_bytes(const struct desc_seg *s, uint32_t world);

/** desc_space_id() - the identity of @buf under @tenant */
void desc_space_id(const uint8_t *buf, size_t len, const char *tenant,
		   uint8_t id[32]);

#endif
