/* SPDX-License-Identifier: Apache-2.0 */
/* A model's KV tensor as kvmm memory; see kv.h. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/engine/kv.h"

#define KV_MAX_TOKENS	65536u		/* of a page, from snapshot to snapshot */
#define KV_MAX_OFF	256u		/* heads, window pages */
#define KV_MAX_PAGE	(UINT64_C(1) << 30)

static uint8_t rule_of(uint8_t kind)
{
	switch (kind) {
	case LAYER_WINDOW:
		return KVMM_WINDOW;
	case LAYER_LINEAR:
		return KVMM_LAST;
	default:
		return KVMM_FULL;
	}
}

/* ---- geometry -------------------------------------------------------------- */

/* Pages that the last @window positions can lie in, wherever they begin. */
static uint32_t window_pages(uint32_t window, uint32_t block)
{
	return (window + block - 2) / block + 1;
}

static void seg_add(struct kvmm_class *cls, struct kvmm_seg *s, uint32_t bytes,
		    unsigned int layer, uint8_t what, bool striped)
{
	*s = (struct kvmm_seg){
		.bytes	= bytes,
		.align	= 64,
		.layer	= layer,
		.what	= what,
		.shard	= striped ? KVMM_STRIPE : KVMM_MIRROR,
	};
	cls->page_bytes += bytes;
	cls->nsegs++;
}

static void layer_segs(struct kv *kv, struct kvmm_class *cls,
		       struct kvmm_seg *seg, unsigned int l)
{
	const struct model_config *c = kv->c;
	bool striped = model_kv_striped(c, l);
	uint32_t bytes = model_kv_bytes(c, l);

	kv->layer_seg[l] = cls->nsegs;
	if (c->kind[l] == LAYER_LINEAR) {
		seg_add(cls, &seg[cls->nsegs], bytes, l, KVMM_SEG_STATE, striped);
		return;
	}
	bytes *= kv->o.block_tokens;
	if (c->kind[l] == LAYER_MLA) {
		seg_add(cls, &seg[cls->nsegs], bytes, l, KVMM_SEG_KV, striped);
		return;
	}
	seg_add(cls, &seg[cls->nsegs], bytes, l, KVMM_SEG_K, striped);
	seg_add(cls, &seg[cls->nsegs], bytes, l, KVMM_SEG_V, striped);
}

static void group_add(struct kv *kv, uint8_t rule)
{
	const struct model_config *c = kv->c;
	unsigned int ix = kv->ngroups, l;
	struct kv_group *g = &kv->g[ix];
	struct kvmm_class *cls = &kv->cls[ix];
	struct kvmm_seg *seg = kv->seg + (size_t)ix * 2 * c->layers;

	for (l = 0; l < c->layers; l++) {
		if (rule_of(c->kind[l]) != rule)
			continue;
		kv->layer_group[l] = ix;
		layer_segs(kv, cls, seg, l);
	}
	if (!cls->nsegs)
		return;
	cls->name = rule == KVMM_FULL ? "full" :
		    rule == KVMM_WINDOW ? "window" : "state";
	cls->segs = seg;
	g->rule = rule;
	g->cls = ix;
	g->block_tokens = rule == KVMM_LAST ? kv->o.snap_tokens :
					      kv->o.block_tokens;
	if (rule == KVMM_WINDOW)
		g->window = window_pages(c->window, g->block_tokens) +
			    kv->o.window_off;
	kv->grp[ix] = (struct kvmm_group){
		.class_ix	= ix,
		.rule		= rule,
		.block_tokens	= g->block_tokens,
		.window_pages	= g->window,
	};
	if (g->block_tokens > kv->unit)
		kv->unit = g->block_tokens;
	kv->ngroups++;
}

/* A head that is not there, as an engine that reads a config.json wrong. */
static void miscount(struct kv *kv)
{
	const struct model_config *c = kv->c;
	uint32_t head = c->head_dim * 2 * kv->o.block_tokens;

	/* the class keeps its true sum */
	kv->seg[0].bytes += kv->o.heads_off * head;
}

/* All layers' rows of a page together: what follows from it fits in 32 bits. */
static bool too_large(const struct kv *kv)
{
	uint64_t bytes = 0;
	unsigned int l;

	if (kv->o.block_tokens > KV_MAX_TOKENS ||
	    kv->o.snap_tokens > KV_MAX_TOKENS ||
	    kv->o.heads_off > KV_MAX_OFF || kv->o.window_off > KV_MAX_OFF)
		return true;
	for (l = 0; l < kv->c->layers; l++)
		bytes += UINT64_C(2) * model_kv_bytes(kv->c, l) *
			 (kv->c->kind[l] == LAYER_LINEAR ? 1 :
							   kv->o.block_tokens);
	return bytes > KV_MAX_PAGE;
}

static int geometry(struct kv *kv)
{
	if (too_large(kv))
		return -EINVAL;
	kv->seg = calloc((size_t)KV_MAX_GROUPS * 2 * kv->c->layers,
			 sizeof(*kv->seg));
	if (!kv->seg)
		return -ENOMEM;
	group_add(kv, KVMM_FULL);
	group_add(kv, KVMM_WINDOW);
	group_add(kv, KVMM_LAST);
	if (kv->o.heads_off)
		miscount(kv);
	return kv->unit % kv->o.block_tokens ? -EINVAL : 0;
}

/* ---- opening ------------------------------------------------------------------- */

static int complain(const struct kv *kv, const char *what, int err)
{
	const char *why = kv->k ? kvmm_error(kv->k) : "";

	fprintf(stderr, "engine: %s: %s%s%s\n", what, strerror(-err),
		*why ? ": " : "", why);
	return err;
}

static int attach(struct kv *kv, const struct model *m)
{
	struct kvmm_desc d = {
		.size		= sizeof(d),
		.flags		= kv->o.flags,
		.model		= kv->c->name,
		.revision	= kv->o.revision,
		.kv_dtype	= kv->o.kv_dtype,
		.layout		= kv->o.layout,
		.abi_tag	= "kvmm-engine-1",
		.salt		= kv->o.salt,
		.world		= kv->o.world,
		.nclasses	= kv->ngroups,
		.ngroups	= kv->ngroups,
		.classes	= kv->cls,
		.groups		= kv->grp,
	};

	snprintf(kv->revision, sizeof(kv->revision), "%016" PRIx64,
		 model_fingerprint(m));
	if (!d.revision)
		d.revision = kv->revision;
	return kvmm_space_attach(kv->k, &d, &kv->sp);
}

static int windows(struct kv *kv)
{
	struct kvmm_win_opts wo = { .size = sizeof(wo) };
	unsigned int g;
	int err;

	for (g = 0; g < kv->ngroups; g++) {
		err = kvmm_win_open(kv->sp, kv->g[g].cls, kv->node, &wo,
				    &kv->g[g].win);
		if (err)
			return complain(kv, "window", err);
	}
	for (g = 0; kv->o.reserve && g < kv->ngroups; g++) {
		err = kvmm_reserve(kv->sp, kv->g[g].cls, kv->node,
				   kv->o.reserve);
		if (err)
			return complain(kv, "reserve", err);
	}
	return 0;
}

static bool is_gang(const struct kv *kv)
{
	struct kvmm_info in = { .size = sizeof(in) };

	return !kvmm_info(kv->k, &in) && in.node[kv->node].gang;
}

static void defaults(struct kv_opts *o)
{
	if (!o->node)
		o->node = "dram0";
	if (!o->block_tokens)
		o->block_tokens = 16;
	if (!o->snap_tokens)
		o->snap_tokens = 64;
	if (!o->kv_dtype)
		o->kv_dtype = "bf16";
	if (!o->layout)
		o->layout = "nhd";
	if (!o->world)
		o->world = 1;
}

int kv_open(struct kv *kv, const struct model *m, const struct kv_opts *o)
{
	struct kvmm_open_opts oo = { .size = sizeof(oo), .name = "kvmm-engine" };
	int err;

	memset(kv, 0, sizeof(*kv));
	kv->o = *o;
	kv->c = model_config_of(m);
	defaults(&kv->o);
	err = geometry(kv);
	if (err)
		return complain(kv, "geometry", err);
	err = kvmm_open(o->socket, &oo, &kv->k);
	if (err)
		return complain(kv, "open", err);
	if (o->engine)
		err = kvmm_join(kv->k, o->engine);
	if (err)
		return complain(kv, "join", err);
	err = kvmm_node_find(kv->k, kv->o.node);
	if (err < 0)
		return complain(kv, kv->o.node, err);
	kv->node = err;
	kv->apart = is_gang(kv);
	err = attach(kv, m);
	if (err)
		return complain(kv, "attach", err);
	err = windows(kv);
	kv->epoch = kvmm_epoch(kv->k);
	return err;
}

void kv_close(struct kv *kv)
{
	kvmm_close(kv->k);
	free(kv->seg);
	memset(kv, 0, sizeof(*kv));
}

/* ---- addresses ------------------------------------------------------------------- */

/* Bytes of a rank in a segment, and from rank to rank where all are mapped. */
static uint32_t part_of(const struct kv *kv, const struct kvmm_seg *s,
			uint32_t *bytes)
{
	*bytes = s->shard == KVMM_STRIPE ? s->bytes / kv->o.world : s->bytes;
	return s->shard == KVMM_STRIPE && !kv->apart ? *bytes : 0;
}

static uint8_t *seg_base(const struct kv *kv, unsigned int g, unsigned int seg,
			 uint32_t rank, size_t *stride)
{
	const struct kv_group *gr = &kv->g[g];
	uint32_t bytes;
	uint32_t part = part_of(kv, &kv->cls[gr->cls].segs[seg], &bytes);

	*stride = kvmm_win_stride(gr->win, seg);
	return (uint8_t *)kvmm_win_base(gr->win, seg) + (size_t)rank * part;
}

void kv_places(const struct kv *kv, struct fwd *f, uint32_t rank)
{
	unsigned int l;

	for (l = 0; l < kv->c->layers; l++) {
		unsigned int g = kv->layer_group[l];
		struct kv_place *p = &f->place[l];

		p->table_ix = g;
		p->block_tokens = kv->g[g].block_tokens;
		p->k = seg_base(kv, g, kv->layer_seg[l], rank, &p->k_stride);
		if (kv->c->kind[l] == LAYER_FULL ||
		    kv->c->kind[l] == LAYER_WINDOW)
			p->v = seg_base(kv, g, kv->layer_seg[l] + 1, rank,
					&p->v_stride);
	}
}

int kv_sync(struct kv *kv, uint64_t step)
{
	unsigned int g;
	int n;

	for (g = 0; g < kv->ngroups; g++) {
		n = kvmm_win_sync(kv->g[g].win, step);
		if (n < 0)
			return n;
	}
	kv->epoch = kvmm_epoch(kv->k);
	return 0;
}

void kv_copy(const struct kv *kv, unsigned int g, uint32_t rank, uint32_t from,
	     uint32_t to)
{
	const struct kvmm_class *cls = &kv->cls[kv->g[g].cls];
	uint32_t s, bytes;

	for (s = 0; s < cls->nsegs; s++) {
		size_t stride;
		uint8_t *base = seg_base(kv, g, s, rank, &stride);

		part_of(kv, &cls->segs[s], &bytes);
		memcpy(base + to * stride, base + from * stride, bytes);
	}
}

bool kv_mapped(const struct kv *kv, unsigned int g, kvmm_frame_t f)
{
	const struct kvmm_win *w = kv->g[g].win;

	return !kvmm_win_base(w, 0) || kvmm_win_ptr(w, 0, f);
}

int kv_protect(const struct kv *kv, unsigned int g, kvmm_frame_t f, bool ro)
{
	const struct kv_group *gr = &kv->g[g];
	size_t stride = kvmm_win_stride(gr->win, 0);
	uint8_t *at = kvmm_win_base(gr->win, 0);

	if (mprotect(at + f * stride, stride,
		     ro ? PROT_READ : PROT_READ | PROT_WRITE))
		return -errno;
	return 0;
}
