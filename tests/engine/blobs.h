/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blobs.h - the oracle as a server that keeps its state in kvmm
 *
 * An engine whose KV is its own and contiguous, as llama.cpp's: it cannot use
 * pages, but it can write out all of a sequence's state and read it back. It does
 * so at checkpoints along the prompt, as blobs of a LAST group: the deepest one
 * that a prompt has in common with any before it, in whatever process, is where
 * computing begins.
 *
 * Nothing of that changes a token: where there is no daemon, no checkpoint, no
 * frame, no time, or no sense in the bytes, the oracle computes.
 */
#ifndef KVMM_TESTS_ENGINE_BLOBS_H
#define KVMM_TESTS_ENGINE_BLOBS_H

#include "tests/engine/serve.h"

/**
 * struct blobs_opts - how; 0 and NULL: the default
 * @socket, @node, @revision, @salt: as in struct kv_opts
 * @step:	tokens from one place for a checkpoint to the next; 64. Engines
 *		that differ in this share nothing
 * @every:	save at every so many of these, and at the prompt's last; 1
 * @wait_ms:	how long a restore may take, and how long memory to save into is
 *		waited for; 1000
 */
struct blobs_opts {
	const char	*socket, *node, *revision, *salt;
	uint32_t	step, every;
	uint32_t	wait_ms;
};

struct blobs;

/**
 * blobs_create() - connect, attach, map
 * @m:		outlives it
 * @done:	called for each sample; &sched_done.hit is the tokens restored
 * Return: 0, or -errno with a sentence on stderr.
 */
int blobs_create(const struct model *m, const struct blobs_opts *o,
		 void (*done)(void *arg, const struct sched_done *d), void *arg,
		 struct blobs **ret);
void blobs_destroy(struct blobs *b);

extern const struct serve_ops blobs_ops;	/* of a struct blobs */

#endif
