/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data kernels: what is done to page bytes, on the CPU and later on
 * devices, bit for bit the same. Nothing here knows what a page is, allocates,
 * or fails; which instructions are used is chosen once, when the program
 * starts, from what the CPU offers.
 */
#ifndef KVMM_KERNELS_H
#define KVMM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/**
 * kvmm_crc32c() - CRC-32C (Castagnoli), as of RFC 3720
 * @crc:	0 to begin, or what an earlier call returned to go on
 * @buf:	any alignment; may be NULL when @len is 0
 * @len:	bytes
 *
 * Context: any thread. Some 8 bytes a cycle with SSE4.2 and PCLMULQDQ.
 * Return: the checksum of all bytes so far.
 */
uint32_t kvmm_crc32c(uint32_t crc, const void *buf, size_t len);

/**
 * kvmm_copy_crc32c() - copy and checksum in one pass over the source
 * @dst:	@len bytes, must not overlap @src
 * @src:	any alignment; may be memory that others write: what is
 *		checksummed is exactly what was stored
 * @len:	bytes
 * @crc:	0 to begin, or what an earlier call returned
 *
 * Return: as kvmm_crc32c() over the bytes of @dst.
 */
uint32_t kvmm_copy_crc32c(void *restrict dst, const void *restrict src,
			  size_t len, uint32_t crc);

/**
 * kvmm_crc32c_combine() - the checksum of A followed by B from those of each
 * @crc_a:	of A
 * @crc_b:	of B, begun with 0
 * @len_b:	bytes in B; A's length does not matter
 *
 * Return: what kvmm_crc32c() over both would give. Takes some 50 ns for each
 * bit that is set in @len_b.
 */
uint32_t kvmm_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);

/* The name of the code in use, for status: "sse4.2+pclmul", "sse4.2", ... */
const char *kvmm_crc32c_path(void);

#ifdef KVMM_TEST_BUILD
/* Name of path @i, in use or not; NULL past the last. */
const char *kvmm_crc32c_path_name(unsigned int i);

/* Use that path from now on: 0, -ENOENT, or -ENOTSUP (not on this CPU). */
int kvmm_crc32c_force(const char *name);
#endif

#endif
