/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A keyed 64-bit hash of a 32-byte key, for tables in shared memory: a table
 * needs the low bits to be even for any keys, SHA-256 values and counters
 * alike, in a few nanoseconds. It is no MAC: who knows the seed can collide.
 *
 * Built from 64x64->128-bit multiplications that fold the halves back over the
 * inputs (the trick of mum-hash and wyhash): two independent ones over the key,
 * one over their results. Folding back over the inputs keeps a zero factor from
 * wiping out the other one.
 */
#ifndef KVMM_BASE_MIX_H
#define KVMM_BASE_MIX_H

#include <stdint.h>

static inline uint64_t __mix_mum(uint64_t a, uint64_t b)
{
	unsigned __int128 p = (unsigned __int128)a * b;

	return a ^ b ^ (uint64_t)p ^ (uint64_t)(p >> 64);
}

/**
 * key_mix() - hash a 32-byte key
 * @k:		the key as four words
 * @seed0:	of the table, random
 * @seed1:	of the table, random
 * @tag:	what else names the entry, as a group number
 *
 * Return: 64 bits, all of them usable.
 */
static inline uint64_t key_mix(const uint64_t k[4], uint64_t seed0,
			       uint64_t seed1, uint32_t tag)
{
	uint64_t a = __mix_mum(k[0] ^ seed0, k[1] ^ UINT64_C(0xa0761d6478bd642f));
	uint64_t b = __mix_mum(k[2] ^ seed1, k[3] ^ UINT64_C(0xe7037ed1a0b428db));

	return __mix_mum(a ^ seed1 ^ UINT64_C(0x8ebc6af09c88c6e3),
			 b ^ (tag * UINT64_C(0x9e3779b97f4a7c15)) ^ seed0);
}

#endif
