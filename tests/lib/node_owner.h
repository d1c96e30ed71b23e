/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node_owner.h - who owns a slot store in the tests: remembers in a plain table
 * what the node should remember
 */
#ifndef KVMM_TESTS_LIB_NODE_OWNER_H
#define KVMM_TESTS_LIB_NODE_OWNER_H

#include "tests/lib/node.h"

#define OWNED_MAX	16384
#define LABELS_MAX	512

/**
 * struct owned - a record, ours or found
 * @used:	this entry is
 */
struct owned {
	struct node_record	rec;
	bool			used;
};

struct owned_label {
	uint32_t	id;
	uint32_t	len;
	uint8_t		bytes[256];
	bool		used;
};

/**
 * struct owner - what was said, or what was handed over
 * @step:	records handed to a checkpoint in one call
 * @refuse:	take no record whose meta[0] is this; -1: take all
 * @short_of:	have no memory for the record of this number; 0: for all
 * @refuse_label: the same for labels' first byte
 * @label_err:	what is said of these labels; 0: -ENOENT
 * @expected:	records that were announced before all else; 0: none were
 * @nr_found:	records handed over; @nr_labels_found likewise
 * @last_seq:	of the last one: they come in order
 * @recovered:	calls of recovered; @err: what it was told
 */
struct owner {
	struct node_owner	ops;
	struct owned		rec[OWNED_MAX];
	unsigned int		nr;
	struct owned_label	label[LABELS_MAX];
	unsigned int		step;
	int			refuse;
	unsigned int		short_of;
	int			refuse_label;
	int			label_err;
	unsigned int		nr_found;
	uint64_t		expected;
	unsigned int		nr_labels_found;
	uint64_t		last_seq;
	unsigned int		recovered;
	int			err;
};

static inline void owner_expect(struct node *n, uint64_t records, void *arg)
{
	struct owner *o = arg;

	assert_false(o->expected || o->nr_labels_found || o->nr_found);
	assert_int_not_equal(n->state, NODE_ONLINE);
	assert_true(records);
	o->expected = records;
}

static inline int owner_label(struct node *n, uint32_t id, const void *bytes,
			      size_t len, void *arg)
{
	struct owner *o = arg;

	assert_int_equal(o->nr_found, 0);
	assert_int_equal(n->state, NODE_STARTING);
	o->nr_labels_found++;
	assert_true(len && len <= NODE_LABEL_MAX);
	if (o->refuse_label == *(const uint8_t *)bytes)
		return o->label_err ? o->label_err : -ENOENT;
	for (unsigned int i = 0; i < LABELS_MAX; i++) {
		if (o->label[i].used)
			continue;
		o->label[i].used = true;
		o->label[i].id = id;
		o->label[i].len = (uint32_t)len;
		memcpy(o->label[i].bytes, bytes,
		       min(len, sizeof(o->label[i].bytes)));
		return 0;
	}
	return -ENOENT;
}

static inline struct owned *owner_place(struct owner *o)
{
	for (unsigned int i = 0; i < OWNED_MAX; i++)
		if (!o->rec[i].used)
			return &o->rec[i];
	assert_true(false);
	return NULL;
}

static inline unsigned int owner_records(struct node *n,
					 const struct node_record *rec,
					 unsigned int nr, bool *taken,
					 void *arg)
{
	struct owner *o = arg;

	assert_int_equal(n->state, NODE_STARTING);
	for (unsigned int i = 0; i < nr; i++) {
		if (o->short_of && o->nr_found + 1 == o->short_of)
			return i;
		assert_true(node_slot_bytes(n, &rec[i].slot) >= rec[i].len);
		assert_true(rec[i].slot.seq > o->last_seq);
		o->last_seq = rec[i].slot.seq;
		o->nr_found++;
		taken[i] = o->refuse != rec[i].meta[0];
		if (!taken[i])
			continue;
		assert_true(o->nr < OWNED_MAX);
		o->rec[o->nr].rec = rec[i];
		o->rec[o->nr++].used = true;
	}
	return nr;
}

static inline void owner_recovered(struct node *n, int err, void *arg)
{
	struct owner *o = arg;

	o->recovered++;
	o->err = err;
}

static inline bool owner_collect(struct node *n, uint64_t *cursor, void *arg)
{
	struct owner *o = arg;
	unsigned int left = o->step;

	while (*cursor < o->nr && left) {
		const struct owned *w = &o->rec[(*cursor)++];

		if (!w->used)
			continue;
		node_record_again(n, &w->rec);
		left--;
	}
	return *cursor >= o->nr;
}

static inline void owner_init(struct owner *o)
{
	memset(o, 0, sizeof(*o));
	o->ops.expect = owner_expect;
	o->ops.label = owner_label;
	o->ops.records = owner_records;
	o->ops.recovered = owner_recovered;
	o->ops.collect = owner_collect;
	o->ops.arg = o;
	o->step = 64;
	o->refuse = -1;
	o->refuse_label = -1;
}

/* Open the store for a fresh owner, who is then told what was in it. */
static inline void owner_open(struct rig *r, struct owner *o)
{
	owner_init(o);
	rig_make(r);
	node_set_owner(r->n, &o->ops);
	rig_until(r, r->n->state != NODE_STARTING);
	if (r->n->state != NODE_ONLINE)
		print_message("# %s\n", r->n->why);
	assert_int_equal(r->n->state, NODE_ONLINE);
	assert_int_equal(o->recovered, 1);
}

/* A slot with a record, without any data. */
static inline int owner_add(struct rig *r, struct owner *o, uint32_t len,
			    uint8_t mark, struct owned **ret)
{
	struct owned *w;
	int err;

	if (o->nr < OWNED_MAX)
		w = &o->rec[o->nr];
	else
		w = owner_place(o);
	err = node_slot_alloc(r->n, len, &w->rec.slot);
	if (err)
		return err;
	if (w == &o->rec[o->nr])
		o->nr++;
	w->used = true;
	w->rec.len = len;
	w->rec.crc = (uint32_t)w->rec.slot.seq * 7;
	memset(w->rec.meta, (int)w->rec.slot.seq, sizeof(w->rec.meta));
	w->rec.meta[0] = mark;
	node_record_add(r->n, &w->rec);
	if (ret)
		*ret = w;
	return 0;
}

static inline void owner_free(struct rig *r, struct owned *w)
{
	assert_true(w->used);
	w->used = false;
	assert_int_equal(node_slot_free(r->n, &w->rec.slot), 0);
}

static inline struct owned *owner_find(struct owner *o, uint64_t seq)
{
	for (unsigned int i = 0; i < o->nr; i++)
		if (o->rec[i].used && o->rec[i].rec.slot.seq == seq)
			return &o->rec[i];
	return NULL;
}

/* Does @o have exactly what @was has? */
static inline void owners_equal(struct owner *o, struct owner *was)
{
	unsigned int nr = 0, nr2 = 0;

	for (unsigned int i = 0; i < o->nr; i++)
		nr += o->rec[i].used;
	for (unsigned int i = 0; i < was->nr; i++) {
		const struct owned *w = &was->rec[i];
		const struct owned *x;

		if (!w->used)
			continue;
		nr2++;
		x = owner_find(o, w->rec.slot.seq);
		assert_non_null(x);
		assert_memory_equal(&x->rec, &w->rec, sizeof(w->rec));
	}
	assert_int_equal(nr, nr2);
	for (unsigned int i = 0; i < LABELS_MAX; i++) {
		const struct owned_label *a = &was->label[i];
		bool found = !a->used;

		for (unsigned int k = 0; k < LABELS_MAX && !found; k++)
			found = o->label[k].used && o->label[k].id == a->id &&
				o->label[k].len == a->len &&
				!memcmp(o->label[k].bytes, a->bytes,
					min(a->len, 256u));
		assert_true(found);
	}
}

static inline void flush_told(int err, void *arg)
{
	*(int *)arg = err;
}

/* What was said until now is on the medium; returns what it was told. */
static inline int owner_flush(struct rig *r)
{
	int told = 1;

	assert_int_equal(node_record_flush(r->n, flush_told, &told), 0);
	rig_until(r, told != 1);
	return told;
}

#endif
