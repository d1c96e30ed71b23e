/* SPDX-License-Identifier: Apache-2.0 */
/* request.h - what a request may say, and one out of a JSON object */
#ifndef KVMM_TESTS_ENGINE_REQUEST_H
#define KVMM_TESTS_ENGINE_REQUEST_H

#include "tests/engine/sched.h"

struct json_t;

#define REQUEST_MAX_TOKENS	(1u << 20)	/* of a prompt, and of an answer */
#define REQUEST_MAX_SAMPLES	16u

/**
 * request_wrong() - may this be asked of a model with @vocab tokens?
 * Return: NULL: yes; else a sentence that begins with the field's name. Sums and
 * products of what it lets pass fit in 32 bits.
 */
const char *request_wrong(const struct sched_req *r, uint32_t vocab);

/**
 * request_read() - the fields of serve.h; one that is not there has its default
 * @tok:	@r's tokens, for the caller to free; NULL on failure
 * @why:	on failure a sentence that names the field, @len bytes at most
 * Return: 0, -EINVAL or -ENOMEM.
 */
int request_read(const struct json_t *o, uint32_t vocab, struct sched_req *r,
		 uint32_t **tok, char *why, size_t len);

/** text_tokens() - a text's bytes as tokens of @vocab; the caller frees *@tok */
int text_tokens(const char *text, uint32_t vocab, uint32_t **tok);

#endif
