/* SPDX-License-Identifier: Apache-2.0 */
/*
 * many.h - a store with very many pages in it, for benches
 *
 * Records and a label as mm keeps them, written through the node, without the
 * pages' bytes: nobody reads those while a store is recovered. Chains of pages
 * are written some at a time, and then a quarter of them give way to others, so
 * that journal and checkpoint hold removals, and slots are not in order.
 */
#ifndef KVMM_TESTS_BENCH_MANY_H
#define KVMM_TESTS_BENCH_MANY_H

#include <stdint.h>

#include "daemon/node/node.h"
#include "tests/bench/bench.h"

#define MANY_PAGES	(1u << 20)
#define MANY_PAGE_BYTES	4096u
#define MANY_CHAIN	64u
#define MANY_BYTES	(UINT64_C(9) << 29)	/* half a GiB of it for metadata */

/** many_opts() - the node's options; the store is sparse */
void many_opts(struct nvme_opts *o, const char *path);

/** many_make() - make the store at @path; exits when that fails */
void many_make(struct bench *b, const char *path);

#endif
