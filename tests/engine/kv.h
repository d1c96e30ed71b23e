/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv.h - a model's KV tensor as kvmm memory
 *
 * One group of pages per kind of layer that the model has: FULL (and MLA)
 * layers share one, sliding-window layers another, linear layers a third with a
 * LAST rule, whose pages are snapshots of the state. Each group has a class of
 * its own, whose segments are the layers' K and V; a segment is a plane of
 * block_tokens rows. Layer l finds row p of a sequence in its own segment of
 * frame table[p / block_tokens].
 *
 * Every member of an engine opens the same space and windows with this; which
 * requests there are is the scheduler's alone.
 */
#ifndef KVMM_TESTS_ENGINE_KV_H
#define KVMM_TESTS_ENGINE_KV_H

#include <kvmm/kvmm.h>

#include "tests/engine/model.h"

#define KV_MAX_GROUPS	3

/**
 * struct kv_opts - what the KV memory should be like; 0 and NULL: the default
 * @socket:	of kvmmd
 * @node:	name of the node; "dram0"
 * @block_tokens: tokens of a page; 16
 * @snap_tokens: a linear model's state is kept at multiples of this; 64. A
 *		multiple of @block_tokens
 * @revision, @salt, @kv_dtype, @layout: of the descriptor; NULL: derived from
 *		the model, "", "bf16", "nhd"
 * @flags:	of the descriptor
 * @heads_off, @window_off: for tests: count so many KV heads or window pages more
 *		than there are
 * @reserve:	frames of each class that this engine must be able to have
 * @world:	ranks that a page is sharded over; 1
 * @engine:	join it before attaching; NULL: an engine of one
 */
struct kv_opts {
	const char	*socket;
	const char	*node;
	uint32_t	block_tokens;
	uint32_t	snap_tokens;
	const char	*revision, *salt, *kv_dtype, *layout;
	uint32_t	flags;
	uint32_t	heads_off, window_off;
	uint32_t	reserve;
	uint32_t	world;
	const struct kvmm_engine *engine;
};

/**
 * struct kv_group - pages of one kind of layer
 * @rule:	enum kvmm_rule
 * @block_tokens: tokens of a page; of a LAST group, from snapshot to snapshot
 * @window:	WINDOW: pages that a position may look back into
 * @cls:	class and
 * @win:	window of its frames
 */
struct kv_group {
	uint8_t		rule;
	uint32_t	block_tokens;
	uint32_t	window;
	unsigned int	cls;
	struct kvmm_win	*win;
};

/**
 * struct kv - an engine member's KV memory
 * @apart:	the node is a gang: each rank maps its own part of a page
 * @epoch:	of the daemon whose frames are mapped
 * @layer_group, @layer_seg: where a layer's rows are: group, and the first of its
 *		segments there
 * @unit:	tokens of the unit that lengths count (all groups' blocks)
 */
struct kv {
	struct kvmm	*k;
	struct kvmm_space *sp;
	kvmm_node_t	node;
	bool		apart;
	uint64_t	epoch;
	struct kv_opts	o;
	const struct model_config *c;
	unsigned int	ngroups;
	struct kv_group	g[KV_MAX_GROUPS];
	uint32_t	unit;
	uint8_t		layer_group[MODEL_MAX_LAYERS];
	uint32_t	layer_seg[MODEL_MAX_LAYERS];
	struct kvmm_class cls[KV_MAX_GROUPS];
	struct kvmm_group grp[KV_MAX_GROUPS];
	struct kvmm_seg	*seg;
	char		revision[32];
};

/**
 * kv_open() - connect, join, attach, map
 * Return: 0, or -errno with a sentence on stderr. kv_close() in any case.
 */
int kv_open(struct kv *kv, const struct model *m, const struct kv_opts *o);
void kv_close(struct kv *kv);

/** kv_places() - tell @f where rank @rank's rows are */
void kv_places(const struct kv *kv, struct fwd *f, uint32_t rank);

/**
 * kv_sync() - map what came, give up what goes, after @step
 *
 * After a change of daemon: map the new one's, once nothing uses the old one's.
 * Return: 0, -EBUSY (something does), or -errno.
 */
int kv_sync(struct kv *kv, uint64_t step);

/** kv_copy() - this rank's bytes of page @from of group @g to page @to */
void kv_copy(const struct kv *kv, unsigned int g, uint32_t rank, uint32_t from,
	     uint32_t to);

/** kv_mapped() - can this process touch it? True where it maps nothing at all */
bool kv_mapped(const struct kv *kv, unsigned int g, kvmm_frame_t f);

/** kv_protect() - make this process's mapping of a frame PROT_READ, or not */
int kv_protect(const struct kv *kv, unsigned int g, kvmm_frame_t f, bool ro);

#endif
