/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Blobs: state of any length under one key, in as many pages as it takes.
 *
 * The pages of a blob are its chunks. Chunk 0, the head, has the key that the
 * blob is asked for; it begins with this header, and the data follow in it and
 * in chunks 1, 2, ... The key of chunk i > 0 is made of the blob's key, of its
 * number i, and of @id, which is drawn anew for each blob that somebody writes:
 * two writers of one key have no page in common, so what one of them began and
 * the other ended can never be taken for one blob, whichever node holds what.
 *
 * The last chunk is published first. Each other one is bound to the chunk after
 * it (RING_PUB_BOUND), and the head comes last. So where the head is found all
 * of the blob is, on some node or other.
 */
#ifndef KVMM_IPC_BLOB_H
#define KVMM_IPC_BLOB_H

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "ipc/abi.h"
#include "ipc/base/sha256.h"

#define BLOB_MAGIC	0x424d564bu	/* "KVMB" */
#define BLOB_VERSION	1
#define BLOB_ID_BYTES	16
#define BLOB_MAX_CHUNKS	32768u
/* Chunks are mapped one behind the other. */
#define BLOB_ALIGN	4096u

/**
 * struct blob_hdr - how the head begins
 * @size:	sizeof(struct blob_hdr), and the offset of the data
 * @len:	bytes of data
 * @nchunks:	the least number that has room for @size + @len
 * @page_bytes:	of the class
 * @id:		of this writing of it
 * @check:	first bytes of SHA-256("kvmm-blob-1", key, what is before)
 * @spare:	0
 */
struct blob_hdr {
	uint32_t	magic;
	uint16_t	version;
	uint16_t	size;
	uint64_t	len;
	uint32_t	nchunks;
	uint32_t	page_bytes;
	uint8_t		id[BLOB_ID_BYTES];
	uint8_t		check[16];
	uint8_t		spare[8];
};
static_assert(sizeof(struct blob_hdr) == 64 &&
	      offsetof(struct blob_hdr, check) == 40, "blob format");

/* Chunks for @len bytes of data; 0: too long. @page_bytes is at least 64. */
static inline uint32_t blob_chunks(uint64_t len, uint32_t page_bytes)
{
	uint64_t most = (uint64_t)BLOB_MAX_CHUNKS * page_bytes;

	if (len > most - sizeof(struct blob_hdr))
		return 0;
	return (len + sizeof(struct blob_hdr) + page_bytes - 1) / page_bytes;
}

static inline void blob_hdr_sum(const struct blob_hdr *h,
				const uint8_t key[KVMM_KEY_BYTES],
				uint8_t sum[SHA256_BYTES])
{
	struct sha256 s;

	sha256_init(&s);
	sha256_update(&s, "kvmm-blob-1", 11);
	sha256_update(&s, key, KVMM_KEY_BYTES);
	sha256_update(&s, h, offsetof(struct blob_hdr, check));
	sha256_final(&s, sum);
}

static inline void blob_hdr_seal(struct blob_hdr *h,
				 const uint8_t key[KVMM_KEY_BYTES])
{
	uint8_t sum[SHA256_BYTES];

	blob_hdr_sum(h, key, sum);
	memcpy(h->check, sum, sizeof(h->check));
}

/*
 * May what it says be believed? @h is the reader's own copy. The bytes of a page
 * that is no blob, or of another key's, are not.
 */
static inline bool blob_hdr_good(const struct blob_hdr *h,
				 const uint8_t key[KVMM_KEY_BYTES],
				 uint32_t page_bytes)
{
	uint8_t sum[SHA256_BYTES];

	if (h->magic != BLOB_MAGIC || h->version != BLOB_VERSION ||
	    h->size != sizeof(*h) || h->page_bytes != page_bytes ||
	    !h->nchunks || h->nchunks != blob_chunks(h->len, page_bytes))
		return false;
	blob_hdr_sum(h, key, sum);
	return !memcmp(h->check, sum, sizeof(h->check));
}

/* The key of chunk @i > 0. */
static inline void blob_chunk_key(const uint8_t key[KVMM_KEY_BYTES],
				  const uint8_t id[BLOB_ID_BYTES], uint32_t i,
				  uint8_t out[KVMM_KEY_BYTES])
{
	struct sha256 s;

	sha256_init(&s);
	sha256_update(&s, "kvmm-chunk-1", 12);
	sha256_update(&s, key, KVMM_KEY_BYTES);
	sha256_update(&s, id, BLOB_ID_BYTES);
	sha256_update_u32(&s, i);
	sha256_final(&s, out);
}

#endif
