/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blob_client.h - clients that save and restore blobs, here and in children
 *
 * Everything asserts.
 */
#ifndef KVMM_TESTS_LIB_BLOB_CLIENT_H
#define KVMM_TESTS_LIB_BLOB_CLIENT_H

#include "tests/lib/fixture.h"

#define LONG_WAIT	20000
#define PAGE		(64u << 10)
#define HEAD		64u
#define CHUNKS(len)	(((len) + HEAD + PAGE - 1) / PAGE)

enum tb_group {
	STATE	= 0,			/* LAST: checkpoints of a sequence */
	THING	= 1,			/* BLOB */
	PAGES	= 2,			/* FULL, of the same class */
};
#define STEP	256			/* tokens from checkpoint to checkpoint */
#define MANY	24			/* of a megabyte: more than DRAM has */

/* Of a blob. */
enum tb_place {
	NOWHERE,
	BELOW,
	HERE,
};

/* 256 frames, and room for 1,024 pages below; patient, as in test_spill.c. */
extern const struct td_opts tb_tiers;
/* More of these than one ring entry takes make a blob of some megabytes. */
extern const struct kvmm_class tb_small_cls;
extern const struct kvmm_class tb_cls;
/* In a child. */
extern struct tc tb_mine;

/** tb_open_class() - with pages of @class */
void tb_open_class(struct tc *c, const char *path, uint32_t rights,
		   const struct kvmm_class *class);
/** tb_open() - with pages of %PAGE */
void tb_open(struct tc *c, const char *path);
/** tb_child() - a process that opens %tb_mine */
void tb_child(struct fx *f, unsigned int i);
/** tb_name() - a blob's key */
struct kvmm_key tb_name(const struct tc *c, enum tb_group g, uint64_t name);
/** tb_bytes() - its bytes follow from its name, its length, and who wrote it */
struct kvmm_key tb_bytes(uint64_t name, uint64_t len, uint64_t writer);
/** tb_fill() - write them */
void tb_fill(void *p, uint64_t len, const struct kvmm_key *bytes);
/** tb_wrong() - 0: they are all there */
size_t tb_wrong(const void *p, uint64_t len, const struct kvmm_key *bytes);
/** tb_begin() - kvmm_blob_begin() that waits for frames as an engine does */
int tb_begin(struct tc *c, struct kvmm_req *rq, enum tb_group g,
	     const struct kvmm_key *key, const struct kvmm_key *parent,
	     uint64_t len, struct kvmm_blob **b);
/** tb_save_key() - the commit's result, or why there was none */
int tb_save_key(struct tc *c, struct kvmm_req *rq, enum tb_group g,
		const struct kvmm_key *key, const struct kvmm_key *parent,
		uint64_t len, const struct kvmm_key *bytes);
/** tb_save() - the same, in a request of its own */
int tb_save(struct tc *c, enum tb_group g, uint64_t name, uint64_t len,
	    uint64_t writer);
/** tb_writes_rest() - nothing is on its way to NVMe */
bool tb_writes_rest(struct test_daemon *d);
/** tb_saved_slowly() - @n blobs, each of them below before the next */
void tb_saved_slowly(struct fx *f, struct tc *c, unsigned int first,
		     unsigned int n, uint64_t len);
/** tb_match() - pages found */
unsigned int tb_match(struct tc *c, struct kvmm_req *rq, enum tb_group g,
		      uint64_t name, struct kvmm_match *m);
/** tb_peek() - where is its head? Without using it */
enum tb_place tb_peek(struct tc *c, enum tb_group g, uint64_t name);
/** tb_map() - kvmm_blob_map() that maps what came */
int tb_map(struct tc *c, struct kvmm_req *rq, unsigned int page,
	   unsigned int ms, struct kvmm_blob **b);
/** tb_restore() - 0: it is there and right in every byte; -ENOENT, ... */
int tb_restore(struct tc *c, enum tb_group g, uint64_t name, uint64_t len,
	       uint64_t writer, unsigned int ms);
/** tb_child_save() - tb_save() in a child */
long tb_child_save(void *shm, long name, long len);
/** tb_child_restore() - tb_restore() in a child */
long tb_child_restore(void *shm, long name, long len);
/** tb_all_quiet() - all clients and children end; nothing is left of them */
void tb_all_quiet(struct fx *f);

#endif
