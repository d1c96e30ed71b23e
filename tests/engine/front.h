/* SPDX-License-Identifier: Apache-2.0 */
/*
 * front.h - where requests come from, beside stdin (serve.h): one prompt, or a
 * recorded load
 *
 * A trace (tests/data) tells which prompts share which beginnings, and no text:
 * each page of it becomes some tokens that follow from its number. So two
 * engines that are given the same trace ask for the same prompts.
 */
#ifndef KVMM_TESTS_ENGINE_FRONT_H
#define KVMM_TESTS_ENGINE_FRONT_H

#include "tests/engine/serve.h"

/**
 * struct front_opts - what to ask for
 * @prompt:	a text, or NULL
 * @trace:	a file of tests/data, or NULL
 * @limit:	requests of the trace; 0: all
 * @first, @every: of these, each @every-th beginning with @first; 0: all
 * @page_tokens: tokens that a page of the trace becomes; 16
 * @max_tokens:	to generate for each
 */
struct front_opts {
	const char	*prompt, *trace;
	uint32_t	limit, first, every;
	uint32_t	page_tokens;
	uint32_t	max_tokens;
};

/** front_run() - ask for all of it, until all is answered; 0 or -errno */
int front_run(const struct front_opts *o, const struct serve_ops *ops,
	      void *arg, uint32_t vocab);

#endif
