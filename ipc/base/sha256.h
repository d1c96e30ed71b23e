/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SHA-256 (FIPS 180-4), carried here because libkvmm may need libc only. Uses
 * the CPU's SHA instructions where it has them.
 */
#ifndef KVMM_BASE_SHA256_H
#define KVMM_BASE_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define SHA256_BYTES	32

/**
 * struct sha256 - a hash in progress; may be copied to fork it
 * @h:		the chaining value
 * @bytes:	hashed so far
 * @buf:	the block that is not full yet
 */
struct sha256 {
	uint32_t	h[8];
	uint64_t	bytes;
	uint8_t		buf[64];
};

void sha256_init(struct sha256 *s);
void sha256_update(struct sha256 *s, const void *data, size_t len);

/* Writes the digest; @s must be initialised again before its next use. */
void sha256_final(struct sha256 *s, uint8_t out[SHA256_BYTES]);

/* All at once. */
void sha256(const void *data, size_t len, uint8_t out[SHA256_BYTES]);

/* Fields with a length: what hashes of more than one field are made of. */
void sha256_update_u32(struct sha256 *s, uint32_t v);	/* little-endian */
void sha256_update_str(struct sha256 *s, const char *str); /* u32 length first */

#ifdef KVMM_TEST_BUILD
/* "sha-ni" or "portable"; the former is -ENOTSUP where the CPU has none. */
int sha256_force(const char *path);
#endif

#endif
