/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme_format.h - what a slot store looks like on the medium
 *
 *	0	superblock, 4 KiB
 *	4 KiB	scratch block: probes of a sick device write and read it
 *	1 MiB	segments, to the end; the rest that fills no segment is unused
 *
 * Slots carry no header: what belongs to a page, its checksum above all, is
 * kept by who owns the page. All numbers are little-endian, as the hosts are.
 */
#ifndef KVMM_DAEMON_NODE_NVME_FORMAT_H
#define KVMM_DAEMON_NODE_NVME_FORMAT_H

#include <assert.h>
#include <stdint.h>

#define NVME_MAGIC		"kvmmslot"
#define NVME_VERSION		1u

#define NVME_SUPER_BYTES	4096u
#define NVME_PROBE_OFF		4096u
#define NVME_DATA_OFF		(1u << 20)

#define NVME_SEG_MIN		(1u << 20)
#define NVME_SEG_MAX		(64u << 20)

/* Where a store's first sequence number lies: opens << NVME_SEQ_SHIFT. */
#define NVME_SEQ_SHIFT		40

/**
 * struct nvme_super - the superblock; the rest of its 4 KiB is zero
 * @magic:	NVME_MAGIC
 * @version:	NVME_VERSION; another one is refused
 * @seg_bytes:	of one segment
 * @uuid:	random, of this store
 * @bytes:	size of the store
 * @data_off:	where segments begin
 * @opens:	how often it was opened: makes sequence numbers unique
 * @crc:	CRC32C of what is before it
 */
struct nvme_super {
	char		magic[8];
	uint32_t	version;
	uint32_t	seg_bytes;
	uint8_t		uuid[16];
	uint64_t	bytes;
	uint64_t	data_off;
	uint64_t	opens;
	uint32_t	reserved;
	uint32_t	crc;
};

static_assert(sizeof(struct nvme_super) == 64, "on-medium format");

/* What an I/O's identity is followed by in its checksum. */
struct nvme_ident_tail {
	uint64_t	seq;
	uint32_t	len;
} __attribute__((packed));

static_assert(sizeof(struct nvme_ident_tail) == 12, "on-medium format");

#endif
