/* SPDX-License-Identifier: Apache-2.0 */
/*
 * node_medium.h - a slot store whose medium is changed behind its back
 *
 * The store has been used by @before, and is opened again for @after: a test
 * damages what is in the file between the two. @super is its superblock.
 */
#ifndef KVMM_TESTS_LIB_NODE_MEDIUM_H
#define KVMM_TESTS_LIB_NODE_MEDIUM_H

#include "daemon/node/nvme.h"
#include "tests/lib/node_owner.h"

#define PER_BLOCK	31u	/* records in a block */

static struct owner before, after;
static struct nvme_super super;

/* ---- the file ------------------------------------------------------------------ */

static inline void peek(const struct rig *r, uint64_t off, void *buf,
			size_t len)
{
	assert_int_equal(pread(r->memfd, buf, len, (off_t)off), (ssize_t)len);
}

static inline void poke(const struct rig *r, uint64_t off, const void *buf,
			size_t len)
{
	assert_int_equal(pwrite(r->memfd, buf, len, (off_t)off), (ssize_t)len);
}

static inline void poke_random(const struct rig *r, uint64_t off, size_t len,
			       uint64_t seed)
{
	char *buf = malloc(len);

	assert_non_null(buf);
	fill(buf, (uint32_t)len, seed);
	poke(r, off, buf, len);
	free(buf);
}

static inline uint64_t journal_at(uint64_t seq)
{
	return super.journal_off +
	       seq % (super.journal_bytes / NVME_BLOCK) * NVME_BLOCK;
}

static inline uint64_t ckpt_at(int area, uint64_t block)
{
	return super.ckpt_off + (uint64_t)area * super.ckpt_bytes +
	       block * NVME_BLOCK;
}

static inline struct nvme_block *block_get(const struct rig *r, uint64_t off)
{
	static _Alignas(64) char buf[NVME_BLOCK];

	peek(r, off, buf, sizeof(buf));
	return (void *)buf;
}

/* As @b is now, with a right checksum. */
static inline void block_put(const struct rig *r, uint64_t off,
			     struct nvme_block *b)
{
	nvme_block_seal(b, b->kind, b->uuid, b->seq, b->epoch);
	poke(r, off, b, NVME_BLOCK);
}

/* ---- stores -------------------------------------------------------------------- */

static inline void scan_rig(struct rig *r)
{
	rig_init_memory(r);
	r->o.bytes = 6 * MIB;
	r->o.records = 800;
	owner_open(r, &before);
	super = to_nvme(r->n)->open.super;
}

/* A ring long enough that damage in its middle is not near its end. */
static inline void long_rig(struct rig *r)
{
	rig_init_memory(r);
	r->o.bytes = 40 * MIB;
	r->o.records = 8000;
	r->o.probe_ns = 20 * MSEC;
	owner_open(r, &before);
	super = to_nvme(r->n)->open.super;
}

/* @nr blocks of records, one group. */
static inline void add_blocks(struct rig *r, struct owner *o, unsigned int nr)
{
	for (unsigned int i = 0; i < nr * PER_BLOCK; i++)
		assert_int_equal(owner_add(r, o, 4096, (uint8_t)i, NULL), 0);
	assert_int_equal(owner_flush(r), 0);
}

/* Each record found must be one that was added: the same in every byte. */
static inline void assert_known(struct owner *found, struct owner *known)
{
	for (unsigned int i = 0; i < found->nr; i++) {
		uint64_t seq = found->rec[i].rec.slot.seq;
		bool same = false;

		for (unsigned int k = 0; k < known->nr && !same; k++)
			same = known->rec[k].rec.slot.seq == seq &&
			       !memcmp(&known->rec[k].rec, &found->rec[i].rec,
				       sizeof(struct node_record));
		assert_true(same);
	}
}

/* Until one more checkpoint is complete. */
static inline void make_ckpt(struct rig *r, struct owner *o)
{
	uint64_t was = r->n->stats.ckpts;
	uint64_t end = deadline_in(PATIENCE_NS);

	while (r->n->stats.ckpts == was && !deadline_past(end)) {
		if (!owner_add(r, o, 4096, 0, NULL))
			owner_free(r, &o->rec[--o->nr]);
		rig_poll(r, 0);
	}
	assert_int_equal(owner_flush(r), 0);
}

/* The journal is as long as it may be without a further one: the beginning of
 * the checkpoint before the last is written over. */
static inline void fill_half(struct rig *r, struct owner *o)
{
	const struct nvme_journal *j = &to_nvme(r->n)->journal;

	while (j->head - j->tail < j->nr_blocks / 2) {
		assert_int_equal(owner_add(r, o, 4096, 0, NULL), 0);
		owner_free(r, &o->rec[--o->nr]);
		assert_int_equal(owner_flush(r), 0);
	}
	assert_true(j->head - j->tail == j->nr_blocks / 2);
}

static inline int newest_area(struct rig *r)
{
	return to_nvme(r->n)->ckpt.area;
}

static inline void assert_refused(struct rig *r, const char *word)
{
	owner_init(&after);
	rig_make(r);
	node_set_owner(r->n, &after.ops);
	rig_until(r, r->n->state != NODE_STARTING);
	assert_int_equal(r->n->state, NODE_FAILED);
	if (!strstr(r->n->why, word))
		print_message("# '%s' lacks '%s'\n", r->n->why, word);
	assert_non_null(strstr(r->n->why, word));
	assert_int_equal(after.recovered, 1);
	assert_true(after.err < 0);
	rig_close(r);
}

/* As the operator wants it: refused, and made anew. */
static inline void assert_rebuilt(struct rig *r, const char *word)
{
	struct node_slot slot;

	assert_refused(r, word);
	r->o.rebuild = true;
	owner_open(r, &after);
	assert_int_equal(after.nr_found, 0);
	assert_non_null(strstr(r->n->why, word));
	/* the only segment may be on its way to be zeroes */
	while (node_slot_alloc(r->n, 4096, &slot) == -ENOSPC)
		rig_poll(r, 10);
	assert_int_equal(node_slot_free(r->n, &slot), 0);
	assert_int_equal(owner_add(r, &after, 4096, 0, NULL), 0);
	rig_close(r);
	r->o.rebuild = false;
	owner_open(r, &after);
	assert_int_equal(after.nr_found, 1);
	super = to_nvme(r->n)->open.super;
	rig_close(r);
}

#endif
