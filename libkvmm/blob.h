/* SPDX-License-Identifier: Apache-2.0 */
/* Blobs: blob.c, blob_map.c, span.c. */
#ifndef KVMM_LIBKVMM_BLOB_H
#define KVMM_LIBKVMM_BLOB_H

#include "ipc/blob.h"
#include "libkvmm/op.h"

/**
 * struct kvmm_span - where a blob's frames are seen one behind the other
 * @addr:	NULL: nowhere
 * @kind:	SPAN_*
 */
struct kvmm_span {
	uint8_t		*addr;
	size_t		bytes;
	uint8_t		kind;
};

#define SPAN_WINDOW	0	/* the window's own mapping */
#define SPAN_MAP	1	/* a second mapping of the same memory */
#define SPAN_COPY	2	/* memory of our own */

/* 0, -EAGAIN (a frame's extent is not mapped here), -ENOMEM. */
int kvmm_span_init(struct kvmm_span *s, const struct kvmm_view *v,
		   const uint32_t *frame, uint32_t n);
void kvmm_span_fini(struct kvmm_span *s);
/* A SPAN_COPY: between it and its first @n frames. */
void kvmm_span_in(struct kvmm_span *s, const struct kvmm_view *v,
		  const uint32_t *frame, uint32_t n);
int kvmm_span_out(const struct kvmm_span *s, const struct kvmm_view *v,
		  const uint32_t *frame, uint32_t n);

/*
 * What a blob is to its request. The handle is the user's while it is OPEN or
 * MAPPED; in the other states it is the request's own record.
 */
enum blob_state {
	BLOB_OPEN,		/* its frames are OPEN, and in the request's list */
	BLOB_COMMITTING,	/* and pinned: they are the operation's */
	BLOB_SEALED,		/* its pages are pinned; to be touched at the end */
	BLOB_MAPPED,		/* likewise */
	BLOB_PUT,		/* to be touched at the end */
	BLOB_FAILED,		/* a step may still write to its span */
};

/**
 * struct kvmm_blob - a blob, in one request
 * @link:	kvmm_req.blobs
 * @next:	kvmm_att.kept
 * @n:		chunks; @frame has as many
 * @nr_pins:	pins that it holds: on the first frames
 * @word:	of the head, if it is to be touched; else 0
 * @len:	bytes of data
 * @after:	COMMITTING: the step that writes it
 */
struct kvmm_blob {
	struct list	link;
	struct kvmm_blob *next;
	struct kvmm_req	*rq;
	struct kvmm_view *view;
	enum blob_state	state;
	uint16_t	group;
	uint32_t	n;
	uint32_t	*frame;
	uint32_t	nr_pins;
	uint64_t	word;
	uint64_t	len;
	uint64_t	after;
	uint8_t		key[KVMM_KEY_BYTES];
	uint8_t		parent[KVMM_KEY_BYTES];
	uint8_t		id[BLOB_ID_BYTES];
	struct kvmm_span span;
};

/* With room for @n frames; NULL when out of memory. */
struct kvmm_blob *kvmm_blob_alloc(struct kvmm_req *rq, struct kvmm_view *v,
				  unsigned int group, uint32_t n);
/* Memory and mapping; what it pins is somebody else's business. */
void kvmm_blob_free(struct kvmm_blob *b);
void kvmm_blob_key(const struct kvmm_blob *b, uint32_t chunk,
		   uint8_t key[KVMM_KEY_BYTES]);
/* May blobs live in @group, on @node? 0, or an error with its sentence. */
int kvmm_blob_group(const struct kvmm_req *rq, unsigned int group);
int kvmm_blob_node(const struct kvmm_req *rq, unsigned int node);

/* -- what a request does with all of its blobs; under its lock ----------------- */

uint32_t kvmm_blobs_pins(const struct kvmm_req *rq);
/* The record of @rq that ends with this frame, if there is one. */
const struct kvmm_blob *kvmm_blobs_find(const struct kvmm_req *rq,
					const struct kvmm_view *v,
					uint32_t frame, uint64_t word);
/* All but what is COMMITTING: unpin, unmap, forget. */
void kvmm_blobs_end(struct kvmm_req *rq);
/* As kvmm_att_read_until(): forget them, and leave pins and mappings alone. */
void kvmm_blobs_keep(struct kvmm_req *rq);

/* -- operations ------------------------------------------------------------------ */

void kvmm_blob_result(struct kvmm_job *op, const struct kvmm_op_part *part,
		      int err, const struct ring_result *res);
void kvmm_blob_fetched(struct kvmm_job *op, const struct kvmm_op_part *part,
		       int err, const struct ring_result *res);

#endif
