/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Labels that block nodes have found again: the spaces that they stand for.
 *
 * A label that says nothing, or is of a tenant that is not in the configuration, is
 * deleted with all that belongs to it. What fails otherwise, for lack of memory,
 * may be other tomorrow: the node asks again until then, and keeps what it has.
 *
 * A space that was found and has no client lives while it has pages, as any other.
 * Labels of which nothing was found are deleted with their space.
 */
#include <stdlib.h>

#include "daemon/mm/persist_format.h"
#include "daemon/mm/recover.h"

/* Where @id stands, or belongs. */
static unsigned int known_place(const struct recovery *rv, uint32_t id)
{
	unsigned int lo = 0, hi = rv->nr_known;

	while (lo < hi) {
		unsigned int mid = (lo + hi) / 2;

		if (rv->known[mid].id < id)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

struct mm_space *recovery_space(struct recovery *rv, uint32_t id)
{
	unsigned int i;

	if (rv->last.sp && rv->last.id == id)
		return rv->last.sp;
	i = known_place(rv, id);
	if (i == rv->nr_known || rv->known[i].id != id)
		return NULL;
	rv->last = rv->known[i];
	return rv->last.sp;
}

static int known_add(struct recovery *rv, uint32_t id, struct mm_space *sp)
{
	unsigned int i = known_place(rv, id);

	if (rv->nr_known == rv->max_known) {
		unsigned int max = rv->max_known ? 2 * rv->max_known : 16;
		struct known *k = realloc(rv->known, max * sizeof(*k));

		if (!k)
			return -ENOMEM;
		rv->known = k;
		rv->max_known = max;
	}
	memmove(&rv->known[i + 1], &rv->known[i],
		(rv->nr_known++ - i) * sizeof(*rv->known));
	rv->known[i] = (struct known){ .id = id, .sp = sp };
	return 0;
}

/* What a label says; @desc lies in its bytes. */
struct found {
	char		tenant[64];
	const uint8_t	*desc;
	size_t		desc_len;
};

static int label_decode(const uint8_t *bytes, size_t len, struct found *f,
			struct errmsg *e)
{
	struct space_label l;
	struct desc d;
	int err;

	if (len < sizeof(l))
		return errmsg_set(e, -EINVAL, "it has %zu bytes", len);
	memcpy(&l, bytes, sizeof(l));
	if (l.magic != LABEL_MAGIC || l.version != LABEL_VERSION)
		return errmsg_set(e, -EINVAL, "magic 0x%08x, version %u",
				  l.magic, l.version);
	if (!l.tenant_len || l.tenant_len >= sizeof(f->tenant) || !l.desc_len ||
	    sizeof(l) + l.tenant_len + (uint64_t)l.desc_len != len)
		return errmsg_set(e, -EINVAL, "lengths %u and %u do not add up",
				  l.tenant_len, l.desc_len);
	memset(f->tenant, 0, sizeof(f->tenant));
	memcpy(f->tenant, bytes + sizeof(l), l.tenant_len);
	if (strlen(f->tenant) != l.tenant_len)
		return errmsg_set(e, -EINVAL, "a tenant's name with a NUL");
	f->desc = bytes + sizeof(l) + l.tenant_len;
	f->desc_len = l.desc_len;
	err = desc_decode(f->desc, f->desc_len, &d, e);
	if (!err)
		desc_fini(&d);
	return err;
}

/* What an error of a label means for the node: -ENOENT: away with it. */
static int label_gone(int err)
{
	return err == -ENOMEM ? err : -ENOENT;
}

/* The space of @f, made if there is none. */
static int found_space(struct mm *mm, const struct found *f,
		       struct mm_space **ret, struct errmsg *e)
{
	int mode = KVMM_MODE_ON;
	uint8_t id[32];

	desc_space_id(f->desc, f->desc_len, f->tenant, id);
	*ret = space_find(mm, id);
	if (*ret)
		return 0;
	if (mm->ops->found)
		mode = mm->ops->found(mm->o.ops_arg, f->tenant);
	if (mode == -ENOENT)
		return errmsg_set(e, mode, "tenant %s is not in the configuration",
				  f->tenant);
	if (mode < 0)
		return errmsg_set(e, mode, "tenant %s: %s", f->tenant,
				  strerror(-mode));
	return space_found(mm, f->tenant, mode, f->desc, f->desc_len, ret, e);
}

static int label_take(struct mm_node *nd, uint32_t id, const void *bytes,
		      size_t len, struct errmsg *e)
{
	struct mm_space *sp;
	struct found f;
	int err;

	err = label_decode(bytes, len, &f, e);
	if (err)
		return label_gone(err);
	err = found_space(nd->mm, &f, &sp, e);
	if (err)
		return err;
	if (sp->labelled & BIT(nd->ix))
		return errmsg_set(e, -ENOENT, "its space has another one");
	err = known_add(nd->recovery, id, sp);
	if (err)
		return errmsg_set(e, err, "out of memory");
	sp->labelled |= BIT(nd->ix);
	sp->label[nd->ix] = id;
	page_reserve(sp, sp->nr_pages + nd->recovery->share);
	return 0;
}

int found_label(struct node *n, uint32_t id, const void *bytes,
		size_t len, void *arg)
{
	struct mm_node *nd = arg;
	struct errmsg e = { "" };
	int err;

	if (!nd->recovery->began_ns)
		nd->recovery->began_ns = now_ns();
	err = label_take(nd, id, bytes, len, &e);
	if (err && err != -ENOENT) {
		if (nd->recovery->waits != id + UINT64_C(1))
			persist_say(nd->mm, true, "node %s: space %u that was found has to wait: %.300s",
				    n->name, id, e.text);
		nd->recovery->waits = id + UINT64_C(1);
	} else if (err) {
		nd->recovery->refused++;
		persist_say(nd->mm, true, "node %s: space %u that was found is given up: %.300s",
			    n->name, id, e.text);
	} else {
		nd->recovery->spaces++;
	}
	return err;
}
