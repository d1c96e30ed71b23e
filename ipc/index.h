/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index of a space: from (key, group) to the frame on a node, or to the
 * fact that the page lives somewhere below. Readers need no lock, no system
 * call and no trust: a line is 64 bytes guarded by a version, and whatever it
 * says about a frame is checked against the frame's word after pinning.
 *
 * Shape. Lines stand in buckets of four (256 bytes). A page has two candidate
 * buckets in one span of 4 KiB, and in each the hash names one line: its home
 * and its other line. The writer keeps nearly every page in one of these two, so
 * that a reader of many pages can fetch them ahead of time; one span, since in a
 * large table the page walk is most of what a look costs, and a second look must
 * not cost another. What finds no place there stands elsewhere in the two
 * buckets. Probing goes round the first bucket from the home line,
 * then round the second from the other line: at most %INDEX_PROBES lines, so
 * nobody who chooses keys can make a reader walk. The same page has one line per
 * mappable node that holds it (@node = the node).
 *
 * Below. As soon as a node that cannot be mapped holds a page, or a load of it is
 * on its way, it has a word in a second table behind the lines. Pages there are
 * many more than those in memory, and whoever finds one asks the daemon for it
 * next, so little has to be said and a mistake costs a miss: a tag of the hash
 * stands for the key, and one word is read whole without a version. Eight words
 * are a bucket, one cache line; a page's word is in one of two buckets of the same
 * memory page, of which each follows from the other and the tag.
 *
 * Versions. word0 holds a 32-bit version, odd while the daemon writes. A writer
 * stores word0 odd, then the other words with release, then word0 even with
 * release. A reader loads word0, the words, each with acquire, then word0
 * again: if it saw any word of a later write, it also sees that write's word0.
 * No fence is needed, so that ThreadSanitizer can follow. A reader retries an
 * odd or changing line %INDEX_RETRIES times (the daemon may have died in the
 * middle) and then takes it for a miss.
 *
 * Hash. key_mix() with a per-space seed. The seed is readable to the clients of
 * the space, so collisions can be made by its own writers; all they buy is that
 * pages of their own space are pushed out.
 *
 * Growth. A larger index is a new memfd with a new epoch. The old one stays
 * readable for whoever mapped it, frozen: its entries age into misses.
 */
#ifndef KVMM_IPC_INDEX_H
#define KVMM_IPC_INDEX_H

#include <stdbool.h>
#include <string.h>

#include "ipc/abi.h"
#include "ipc/base/bits.h"
#include "ipc/base/mix.h"

#define INDEX_BUCKET		4	/* lines a bucket */
#define INDEX_PROBES		(2 * INDEX_BUCKET)
#define INDEX_SPAN		64	/* lines in one memory page */
#define INDEX_RETRIES		64
#define INDEX_NODE_BELOW	0xff	/* the hash of a word's */
#define INDEX_WORDS		8	/* a bucket of them */
#define INDEX_WORD_SPAN		512	/* words in one memory page */

/* flags of a line, and of a word */
#define INDEX_USED		1u
#define INDEX_PENDING		2u	/* word: a load is on its way */

/**
 * struct index_line - one entry
 * @word0:	version (low 32 bits), group (16), node (8), flags (8)
 * @key:	the page's key, as four little-endian words
 * @fword:	the frame's word as it must be for a hit
 * @frame:	low half: frame number; high half: cost_us, what recomputing the
 *		page costs
 * @aux:	low half: pos, first token's position; high half: raw bytes
 */
struct index_line {
	_Atomic uint64_t	word0;
	_Atomic uint64_t	key[4];
	_Atomic uint64_t	fword;
	_Atomic uint64_t	frame;
	_Atomic uint64_t	aux;
};
static_assert(sizeof(struct index_line) == 64, "shm ABI");

/**
 * struct index - head of an index memfd
 * @magic:	%KVMM_MAGIC_INDEX; changes with the hash, too: a reader that looks
 *		for pages where they are not would only miss
 * @size:	sizeof(struct index), and the offset of the lines
 * @epoch:	which of the space's indexes this is; starts at 1
 * @nr_lines:	a multiple of %INDEX_SPAN
 * @seed:	of the hash
 * @nr_words:	behind the lines; a multiple of %INDEX_WORD_SPAN, 0: none
 */
struct index {
	uint64_t		magic;
	uint32_t		size;
	uint32_t		epoch;
	uint64_t		nr_lines;
	uint64_t		seed[2];
	uint64_t		nr_words;
	uint64_t		spare[506];
	struct index_line	line[];
};
static_assert(sizeof(struct index) == 4096, "shm ABI");

static inline uint64_t index_bytes(uint64_t nr_lines, uint64_t nr_words)
{
	return sizeof(struct index) + nr_lines * sizeof(struct index_line) +
	       nr_words * sizeof(uint64_t);
}

/**
 * struct index_hash - where a page's lines may be
 * @home:	home line
 * @other:	its line in the second bucket
 */
struct index_hash {
	uint64_t home;
	uint64_t other;
};

static inline struct index_hash index_hash(uint64_t nr_lines,
					   const uint64_t seed[2],
					   const uint64_t key[4],
					   uint16_t group, uint8_t node)
{
	uint64_t h = key_mix(key, seed[0], seed[1],
			     (uint32_t)group << 8 | node);
	/* the high bits name the span, the low ones the lines in it */
	uint64_t span = (unsigned __int128)h * (nr_lines / INDEX_SPAN) >> 64;
	uint64_t home = span * INDEX_SPAN + h % INDEX_SPAN;
	uint64_t away = h / INDEX_SPAN % INDEX_SPAN;

	if (away < INDEX_BUCKET)
		away += INDEX_BUCKET;
	return (struct index_hash){ .home = home, .other = home ^ away };
}

/* The i-th line to probe, 0 <= i < INDEX_PROBES. */
static inline uint64_t index_probe(struct index_hash h, unsigned int i)
{
	uint64_t at = i < INDEX_BUCKET ? h.home : h.other;

	return (at & ~(uint64_t)(INDEX_BUCKET - 1)) |
	       ((at + i) & (INDEX_BUCKET - 1));
}

static inline uint64_t index_word0(uint32_t version, uint16_t group,
				   uint8_t node, uint8_t flags)
{
	return (uint64_t)version | (uint64_t)group << 32 |
	       (uint64_t)node << 48 | (uint64_t)flags << 56;
}

/*
 * What a reader takes out of a line. Of a word: @fword are the nodes that have it,
 * a bit each, @frame is the one to load from; @pos and @raw_bytes are 0.
 */
struct index_hit {
	uint64_t	fword;
	uint32_t	frame;
	uint32_t	cost_us;
	uint32_t	pos;
	uint32_t	raw_bytes;
	uint8_t		flags;
};

/*
 * Read one line. True if it is the wanted one and was read whole.
 * Pairs with index_write() of the daemon (daemon/mm/index.c): word0 and the
 * other words are acquire here and release there.
 */
static inline bool index_read_line(const struct index_line *l,
				   const uint64_t key[4], uint16_t group,
				   uint8_t node, struct index_hit *hit)
{
	uint64_t want = (uint64_t)group << 32 | (uint64_t)node << 48 |
			(uint64_t)INDEX_USED << 56;
	unsigned int i;

	for (i = 0; i < INDEX_RETRIES; i++) {
		uint64_t w = atomic_load_explicit(&l->word0,
						  memory_order_acquire);
		uint64_t fr, aux, differ;

		if (unlikely(w & 1))
			continue;	/* being written */
		if (unlikely((w & UINT64_C(0x01ffffff00000000)) != want))
			return false;
		differ = atomic_load_explicit(&l->key[0], memory_order_acquire)
				^ key[0];
		differ |= atomic_load_explicit(&l->key[1], memory_order_acquire)
				^ key[1];
		differ |= atomic_load_explicit(&l->key[2], memory_order_acquire)
				^ key[2];
		differ |= atomic_load_explicit(&l->key[3], memory_order_acquire)
				^ key[3];
		hit->fword = atomic_load_explicit(&l->fword,
						  memory_order_acquire);
		fr = atomic_load_explicit(&l->frame, memory_order_acquire);
		aux = atomic_load_explicit(&l->aux, memory_order_acquire);
		if (unlikely(atomic_load_explicit(&l->word0,
						  memory_order_relaxed) != w))
			continue;
		hit->frame = (uint32_t)fr;
		hit->cost_us = fr >> 32;
		hit->pos = (uint32_t)aux;
		hit->raw_bytes = aux >> 32;
		hit->flags = w >> 56;
		return !differ;
	}
	return false;
}

/* Find (key, group) on @node. At most INDEX_PROBES lines. */
static inline bool index_find(const struct index *ix,
			      struct index_hash h, const uint64_t key[4],
			      uint16_t group, uint8_t node,
			      struct index_hit *hit)
{
	unsigned int i;

	for (i = 0; i < INDEX_PROBES; i++)
		if (index_read_line(&ix->line[index_probe(h, i)], key, group,
				    node, hit))
			return true;
	return false;
}

/* -- words: what is below -------------------------------------------------------- */

/*
 * A word: flags (2), nodes (16), the node to load from (4), cost (12), tag (30).
 * The cost is a number of 7 bits shifted by one of 5, rounded down.
 */
#define INDEX_TAG_BITS		30
#define INDEX_TAG_SHIFT		(64 - INDEX_TAG_BITS)
static_assert(KVMM_MAX_NODES <= 16, "a bit and a number of four bits for each");

static inline uint64_t index_cost_pack(uint32_t us)
{
	unsigned int shift = 0;

	while (us >> shift > 127)
		shift++;
	return us >> shift | shift << 7;
}

static inline uint32_t index_cost_unpack(uint64_t cost)
{
	return (uint32_t)(cost & 127) << (cost >> 7 & 31);
}

static inline uint64_t index_word(uint32_t tag, uint8_t flags, uint16_t nodes,
				  uint8_t source, uint32_t cost_us)
{
	return (uint64_t)flags | (uint64_t)nodes << 2 |
	       (uint64_t)(source & 15) << 18 | index_cost_pack(cost_us) << 22 |
	       (uint64_t)tag << INDEX_TAG_SHIFT;
}

/**
 * struct index_below - where a page's word may be
 * @home:	first word of a bucket
 * @other:	of the other one
 * @tag:	what it must show
 */
struct index_below {
	uint64_t home;
	uint64_t other;
	uint32_t tag;
};

/* The other bucket of a word with @tag that is in the one at @bucket. */
static inline uint64_t index_below_other(uint64_t bucket, uint32_t tag)
{
	return bucket ^ (1 + tag % (INDEX_WORD_SPAN / INDEX_WORDS - 1)) *
			INDEX_WORDS;
}

static inline struct index_below index_below(uint64_t nr_words,
					     const uint64_t seed[2],
					     const uint64_t key[4],
					     uint16_t group)
{
	uint64_t h = key_mix(key, seed[0], seed[1],
			     (uint32_t)group << 8 | INDEX_NODE_BELOW);
	/* the high bits name the span, the low ones the bucket and the tag */
	uint64_t span = (unsigned __int128)h * (nr_words / INDEX_WORD_SPAN) >>
			64;
	uint64_t home = span * INDEX_WORD_SPAN + h % INDEX_WORD_SPAN /
			INDEX_WORDS * INDEX_WORDS;
	uint32_t tag = h >> 9 & (((uint32_t)1 << INDEX_TAG_BITS) - 1);

	return (struct index_below){
		.home = home, .other = index_below_other(home, tag), .tag = tag,
	};
}

static inline const _Atomic uint64_t *index_words(const struct index *ix,
						  uint64_t nr_lines)
{
	return (const _Atomic uint64_t *)&ix->line[nr_lines];
}

/* Find a page below. At most two buckets. */
static inline bool index_find_below(const _Atomic uint64_t *words,
				    struct index_below h,
				    struct index_hit *hit)
{
	unsigned int i;

	for (i = 0; i < 2 * INDEX_WORDS; i++) {
		uint64_t at = i < INDEX_WORDS ? h.home : h.other;
		/* relaxed: all that it says is in this one word */
		uint64_t w = atomic_load_explicit(&words[at + i % INDEX_WORDS],
						  memory_order_relaxed);

		if (!(w & INDEX_USED) || w >> INDEX_TAG_SHIFT != h.tag)
			continue;
		*hit = (struct index_hit){
			.fword		= w >> 2 & 0xffff,
			.frame		= w >> 18 & 15,
			.cost_us	= index_cost_unpack(w >> 22 & 0xfff),
			.flags		= w & 3,
		};
		return true;
	}
	return false;
}

/* The same for whoever made @ix, and believes what it says of itself. */
static inline bool index_look_below(const struct index *ix,
				    const uint64_t key[4], uint16_t group,
				    struct index_hit *hit)
{
	return ix->nr_words &&
	       index_find_below(index_words(ix, ix->nr_lines),
				index_below(ix->nr_words, ix->seed, key, group),
				hit);
}

#endif
