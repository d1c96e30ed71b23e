/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys. A chain is seeded by the space id, so that equal tokens in different
 * spaces have different keys, and each key names all tokens before it.
 */
#include <string.h>

#include "ipc/base/sha256.h"
#include "libkvmm/lib.h"

#define KEY_DOMAIN	"kvmm-key-1"
#define WRAP_DOMAIN	"kvmm-wrap-1"

/* Tokens are hashed as little-endian words, whatever this machine is. */
static void hash_tokens(struct sha256 *s, const uint32_t *tok, size_t n)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
	sha256_update(s, tok, n * sizeof(*tok));
#else
	size_t i;

	for (i = 0; i < n; i++)
		sha256_update_u32(s, tok[i]);
#endif
}

int kvmm_key_chain(const struct kvmm_space *sp, const struct kvmm_key *parent,
		   const uint32_t *tok, size_t n, unsigned int block,
		   const void *extra, size_t nextra, struct kvmm_key *out)
{
	const uint8_t *prev = parent ? parent->b : sp->id;
	size_t i, nkeys;

	if (!block || (n && !tok) || (nextra && !extra) ||
	    nextra > UINT32_MAX || n / block > INT32_MAX)
		return kvmm_fail(-EINVAL,
			"block %u, %zu tokens, %zu bytes of extra", block, n,
			nextra);
	nkeys = n / block;
	for (i = 0; i < nkeys; i++) {
		struct sha256 s;

		sha256_init(&s);
		sha256_update(&s, KEY_DOMAIN, sizeof(KEY_DOMAIN) - 1);
		sha256_update(&s, prev, KVMM_KEY_BYTES);
		sha256_update_u32(&s, block);
		hash_tokens(&s, tok + i * block, block);
		sha256_update_u32(&s, nextra);
		if (nextra)
			sha256_update(&s, extra, nextra);
		sha256_final(&s, out[i].b);
		prev = out[i].b;
	}
	return nkeys;
}

int kvmm_key_wrap(const struct kvmm_space *sp, const void *hash, size_t len,
		  struct kvmm_key *out)
{
	struct sha256 s;

	if (!hash || !len || len > UINT32_MAX)
		return kvmm_fail(-EINVAL, "a hash of %zu bytes", len);
	sha256_init(&s);
	sha256_update(&s, WRAP_DOMAIN, sizeof(WRAP_DOMAIN) - 1);
	sha256_update(&s, sp->id, sizeof(sp->id));
	sha256_update_u32(&s, len);
	sha256_update(&s, hash, len);
	sha256_final(&s, out->b);
	return 0;
}
