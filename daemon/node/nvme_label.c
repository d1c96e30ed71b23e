/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Labels: what many records share. They are few (one a space) and are kept in
 * memory, so that a checkpoint need not ask for them. Numbers are never used
 * again: a record that outlived its label by a crash then names nothing, and
 * not what somebody else said later.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/node/nvme.h"

#define LABELS_MAX	65536u

/* What a label takes in a checkpoint, at the worst. */
uint64_t nvme_label_cost(uint32_t len)
{
	return len + div_round_up(len, NVME_LABEL_PART) *
		     (sizeof(struct nvme_ent_label) + 8);
}

/* Place of @id, or where it belongs. */
static uint32_t label_place(const struct nvme_labels *ls, uint32_t id)
{
	uint32_t lo = 0, hi = ls->nr;

	while (lo < hi) {
		uint32_t mid = (lo + hi) / 2;

		if (ls->v[mid].id < id)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

struct nvme_label *nvme_label_find(const struct nvme_labels *ls, uint32_t id)
{
	uint32_t i = label_place(ls, id);

	return i < ls->nr && ls->v[i].id == id ? &ls->v[i] : NULL;
}

/* A place for @len bytes, not filled in; @id is a new one. */
int nvme_label_room(struct nvme_labels *ls, uint32_t id, uint32_t len,
		    struct nvme_label **ret)
{
	uint32_t i = label_place(ls, id);
	uint8_t *bytes;

	if (ls->nr == LABELS_MAX)
		return -ENOSPC;
	if (ls->nr == ls->max) {
		uint32_t max = ls->max ? 2 * ls->max : 16;
		struct nvme_label *v = realloc(ls->v, max * sizeof(*v));

		if (!v)
			return -ENOMEM;
		ls->v = v;
		ls->max = max;
	}
	bytes = malloc(len);
	if (!bytes)
		return -ENOMEM;
	memmove(&ls->v[i + 1], &ls->v[i], (ls->nr - i) * sizeof(*ls->v));
	ls->nr++;
	ls->bytes += nvme_label_cost(len);
	ls->v[i] = (struct nvme_label) {
		.id	= id,
		.len	= len,
		.bytes	= bytes,
	};
	if (id >= ls->next)
		ls->next = id + 1;
	*ret = &ls->v[i];
	return 0;
}

void nvme_label_drop(struct nvme_labels *ls, uint32_t id)
{
	struct nvme_label *l = nvme_label_find(ls, id);

	if (!l)
		return;
	ls->bytes -= nvme_label_cost(l->len);
	free(l->bytes);
	ls->nr--;
	memmove(l, l + 1, (size_t)(&ls->v[ls->nr] - l) * sizeof(*l));
}

void nvme_labels_fini(struct nvme_labels *ls)
{
	for (uint32_t i = 0; i < ls->nr; i++)
		free(ls->v[i].bytes);
	free(ls->v);
	memset(ls, 0, sizeof(*ls));
}

int nvme_label_put(struct node *n, const void *bytes, size_t len, uint32_t *id)
{
	struct nvme *nv = to_nvme(n);
	struct nvme_labels *ls = &nv->labels;
	struct nvme_label *l;
	int err;

	if (!n->owner)
		return -EOPNOTSUPP;
	if (!nv->journal.nr_blocks || !nvme_journal_room(nv))
		return -EAGAIN;
	if (ls->bytes + nvme_label_cost((uint32_t)len) >
	    nv->open.super.label_bytes || ls->next == UINT32_MAX)
		return -ENOSPC;
	err = nvme_label_room(ls, ls->next, (uint32_t)len, &l);
	if (err)
		return err;
	memcpy(l->bytes, bytes, len);
	nvme_log_label(nv, l);
	*id = l->id;
	return 0;
}

void nvme_label_del(struct node *n, uint32_t id)
{
	struct nvme *nv = to_nvme(n);

	if (!nvme_label_find(&nv->labels, id))
		return;
	nvme_label_drop(&nv->labels, id);
	nvme_log_label_del(nv, id);
}
