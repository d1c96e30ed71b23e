/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a daemon leaves behind for the next one, in memory that outlives it.
 *
 * mm's objects live in the daemon's own memory and die with it. What must not
 * is in memfds that somebody else keeps (struct mm_keep_ops), each under a name:
 *
 *	mm			struct keep_state: clients and windows
 *	space.S			struct keep_space and the descriptor
 *	table.S.C.N		frame table (ipc/frame.h)
 *	record.S.C.N		struct keep_pool, extents, owners, frame records
 *	extent.S.C.N.NO		the extent of that number
 *	win.SLOT		window ledger
 *	block.I			a store that was open: keep_store.c
 *
 * S is the space's place in the header, C a class, N a node, SLOT a place in
 * struct keep_state. What a client is known by besides (its ledger, its pidfd)
 * is the server's to keep.
 *
 * A daemon dies between any two of its instructions, so everything here is
 * either written once, before anybody relies on it, or in two copies of which
 * the older one is overwritten, or a word that is stored whole. What does not
 * check out is given up: the piece that it is of, and never more.
 *
 * A name is where to look, and no more. Whoever keeps descriptors may be busy, or
 * full: then a name still stands for what was dropped when it is used again. So each
 * record has the inode of the memory that it speaks of (struct keep_id), and what
 * is found under the name must be that.
 *
 * What was given up is written down before it is forgotten (KEEP_PARTIAL,
 * KEEP_EXTENT_LOST), or the daemon after the next would not know that a client has
 * something mapped that is nothing any more.
 *
 * Frames. A READY frame has its record. An OPEN one has an owner: the window that
 * it was given to and the place in the magazine where it was, or was to be, put.
 * So a frame that was taken and never handed out is told from one that its client
 * holds: its place is not before the magazine's tail. One that was freed after a
 * step, and waits, says so (KEEP_FREED) and has the step in its record.
 *
 * Files: keep.c and keep_store.c write, adopt*.c read.
 */
#ifndef KVMM_DAEMON_MM_KEEP_H
#define KVMM_DAEMON_MM_KEEP_H

#include "daemon/mm/mm_types.h"

#define KEEP_CLIENTS	512u	/* more than live: some are dead and not gone */
#define KEEP_WINS	65536u
#define KEEP_NAME	64u	/* bytes of a name with its end */

#define KEEP_MAGIC_STATE UINT64_C(0x3250454b4d4d564b)	/* "KVMMKEP2" */
#define KEEP_MAGIC_SPACE UINT64_C(0x314350534d4d564b)	/* "KVMMSPC1" */
#define KEEP_MAGIC_POOL	UINT64_C(0x324c4f504d4d564b)	/* "KVMMPOL2" */

/**
 * struct keep_id - which memory it is, whatever it is called
 * @ino:	0: none
 */
struct keep_id {
	uint64_t	dev;
	uint64_t	ino;
};

/**
 * struct keep_tag - the end of each copy of a two-copy record
 * @seq:	the higher one holds; 0: never written
 * @crc:	CRC32C of all before it
 */
struct keep_tag {
	uint32_t	seq;
	uint32_t	crc;
};

#define KEEP_JOINED	1u	/* in an engine of a token, not one of its own */
#define KEEP_REPLACED	2u
#define KEEP_DYING	4u	/* its engine was: nothing new for it */
#define KEEP_EVICTED	8u	/* its engine was: its pins are void */
#define KEEP_PARTIAL	16u	/* has lost something: never goes on with it */

/**
 * struct keep_client - one copy of a client's record
 * @used:	0: the place is free
 * @no:		the server's number for it
 * @engine:	number of its engine
 * @space:	places in the header of the spaces that it is attached to
 * @server:	the server's own bytes
 */
struct keep_client {
	uint32_t	used;
	uint32_t	no;
	uint32_t	flags;		/* KEEP_* */
	uint32_t	engine;
	uint32_t	socket;
	uint32_t	rank, mflags, world;
	uint8_t		token[16];
	uint32_t	rights, mode;
	int32_t		pid;
	uint32_t	nr_spaces;
	uint8_t		space[8];
	char		name[32];
	uint8_t		server[MM_KEPT_BYTES];
	uint8_t		spare[16];
	struct keep_tag	tag;
};
static_assert(sizeof(struct keep_client) == 256, "adoption ABI");

#define KEEP_WIN_CLOSED	1u
#define KEEP_WIN_VOID	2u

/**
 * struct keep_win - one copy of a window's record
 * @client:	place of its client, plus one; 0: this place is free
 * @dev, @ledger_ino, @table_ino: its ledger, and the frame table that it is of;
 *		both are of the same kind of memory
 */
struct keep_win {
	uint32_t	client;
	uint16_t	no;
	uint16_t	space;
	uint8_t		cls, node;
	uint16_t	flags;		/* KEEP_WIN_* */
	uint32_t	rights;
	uint32_t	reserved;
	uint32_t	dev;
	uint64_t	synced_seq;
	uint64_t	ledger_bytes;
	uint64_t	ledger_ino;
	uint64_t	table_ino;
	struct keep_tag	tag;
};
static_assert(sizeof(struct keep_win) == 64, "adoption ABI");

#define KEEP_STORES	64u
#define KEEP_STORE_KNOWN	1u
#define KEEP_STORE_MORE	2u	/* there was one, and nobody knows which */

/**
 * struct keep_store - one copy of what is written down of a store
 * @used:	KEEP_STORE_*; 0: the place is free
 * @id, @born:	which one it is; @born is 0 where files have no time of birth
 * @name:	its node's
 */
struct keep_store {
	uint32_t	used;
	uint32_t	spare0;
	struct keep_id	id;
	uint64_t	born;
	char		name[24];
	struct keep_tag	tag;
};
static_assert(sizeof(struct keep_store) == 64, "adoption ABI");

/**
 * struct keep_live - words of the state that are stored whole
 * @space_ino:	inode of "space.S" for each space there is; 0: none
 */
struct keep_live {
	uint64_t	space_ino[KVMM_MAX_SPACES];
};

/**
 * struct keep_state - head of the memfd "mm"
 * @size:	sizeof(struct keep_state), where the clients are
 * @nr_clients, @nr_wins: places, two copies each; the windows follow, then
 *		KEEP_STORES pairs of struct keep_store and struct keep_live
 * @crc:	of all before it
 */
struct keep_state {
	uint64_t	magic;
	uint32_t	size;
	uint32_t	nr_clients;
	uint32_t	nr_wins;
	uint32_t	spare0[1018];
	uint32_t	crc;
};
static_assert(sizeof(struct keep_state) == 4096, "adoption ABI");

/** struct keep_space - head of "space.S"; @desc_len bytes follow, in @crc, too */
struct keep_space {
	uint64_t	magic;
	uint32_t	size;
	uint32_t	ix;
	uint8_t		id[32];
	char		tenant[64];
	uint32_t	desc_len;
	uint32_t	crc;
};
static_assert(sizeof(struct keep_space) == 120, "adoption ABI");

/**
 * struct keep_pool - head of "record.S.C.N"
 * @size:	sizeof(struct keep_pool), where struct keep_extent[] is
 * @owner_off:	where the owners are: one u64 a frame
 * @record_off:	where the frame records are
 * @state:	that has its windows
 * @table:	the frame table that they are of
 */
struct keep_pool {
	uint64_t	magic;
	uint32_t	size;
	uint32_t	ix, cls, node;
	uint8_t		space_id[32];
	char		node_name[32];
	uint32_t	page_bytes, stride, parts;
	uint32_t	per_extent, max_extents, max_frames;
	uint64_t	owner_off, record_off, bytes;
	struct keep_id	state, table;
	uint32_t	spare0[981];
	uint32_t	crc;
};
static_assert(sizeof(struct keep_pool) == 4096, "adoption ABI");

#define KEEP_EXTENT_LOST	1u	/* given up, and clients may have it mapped */

/**
 * struct keep_extent - an extent that the pool has
 * @id:		its node's; 0: there is none of this number
 * @down_seq:	0, or when windows were told to unmap it: nothing is in it
 * @mem:	its memory
 * @flags:	KEEP_EXTENT_*
 *
 * One copy: what is lost with it is an extent without a frame in use, since it is
 * written before there are any, and again when there are none any more.
 */
struct keep_extent {
	uint64_t	id;
	uint64_t	bytes;
	uint64_t	up_seq;
	uint64_t	down_seq;
	struct keep_id	mem;
	uint32_t	flags;
	uint32_t	spare0[2];
	uint32_t	crc;
};
static_assert(sizeof(struct keep_extent) == 64, "adoption ABI");

/* An OPEN frame's owner: window's place + 1, and place in the magazine. */
#define KEEP_FREED	(UINT64_C(1) << 63)

static inline uint64_t keep_owner(uint32_t handle, uint32_t pos)
{
	return (uint64_t)handle << 32 | pos;
}

static inline uint32_t keep_owner_handle(uint64_t owner)
{
	return owner >> 32 & 0x7fffffff;
}

/* The step that a KEEP_FREED frame waits for. */
static inline uint64_t *keep_freed_step(struct frame_record *r)
{
	return (uint64_t *)r->key;
}

/**
 * struct keep_held - a place for a store
 * @ks:		what is written there
 * @old:	the last daemon had it, and may have I/O under way on it
 * @fd:		that was kept; ours, without the lock; -1: none was
 */
struct keep_held {
	struct keep_store ks;
	bool		old;
	int		fd;
};

/**
 * struct keep - mm's side of it
 * @ops:	NULL: nothing is kept, and nothing of this is used
 * @clients, @wins: places taken, as bitmaps
 * @client, @win: of the state, two copies each
 * @live:	of the state
 * @holder:	while adopting: windows by their place; else NULL
 */
struct keep {
	const struct mm_keep_ops *ops;
	struct shm	shm;
	struct keep_client (*client)[2];
	struct keep_win	(*win)[2];
	struct keep_store (*store)[2];
	struct keep_live *live;
	struct keep_held held[KEEP_STORES];
	struct mm_win	**holder;
	uint64_t	clients[KEEP_CLIENTS / 64];
	uint64_t	wins[KEEP_WINS / 64];
};

/* -- keep.c ------------------------------------------------------------------ */

/* Make the state anew; 0, or the errno of its memory with the sentence. */
int keep_begin(struct mm *mm, struct errmsg *e);
void keep_end(struct mm *mm);
uint64_t keep_state_bytes(void);
uint32_t keep_state_crc(const struct keep_state *st);
/* The state's parts lie here. */
void keep_state_map(struct keep *k);
/* Which memory @fd is; all zero if that cannot be told. */
struct keep_id keep_id_of(int fd);
static inline bool keep_id_same(struct keep_id a, struct keep_id b)
{
	return a.ino && a.ino == b.ino && a.dev == b.dev;
}

/* A place for @c, -EUSERS. What it says from now on: keep_client(). */
int keep_client_take(struct mm_client *c);
void keep_client(struct mm_client *c);
void keep_client_drop(struct mm_client *c);
void keep_engine(struct mm_engine *e);
int keep_win_take(struct mm_win *w);
void keep_win(struct mm_win *w);
void keep_win_drop(struct mm_win *w);
void keep_space(struct mm_space *sp);
void keep_space_drop(struct mm_space *sp);
void keep_pool(struct mm_pool *p);
void keep_pool_drop(struct mm_pool *p);
/* An extent came or goes down: parked under its number. */
void keep_extent(struct mm_pool *p, const struct mm_extent *x);
void keep_extent_drop(struct mm_pool *p, uint32_t no);
/* It is lost, and its number is not to be used again yet. */
void keep_extent_lose(struct mm_pool *p, uint32_t no);

void keep_name_pool(const struct mm_pool *p, const char *what,
		    char name[KEEP_NAME]);
void keep_name_extent(const struct mm_pool *p, uint32_t no,
		      char name[KEEP_NAME]);

/* Where the parts of "record.S.C.N" lie for @p's geometry, in @p->head. */
void keep_pool_layout(const struct mm_pool *p, struct keep_pool *h);
uint32_t keep_pool_crc(const struct keep_pool *h);
/* Of which table they are. */
void keep_pool_of(struct keep_pool *h, struct keep_id table);
uint32_t keep_extent_crc(const struct keep_extent *x);

/*
 * Write the older one of two copies of @bytes; @to gets the payload of @from and
 * a tag. And read: which one holds, or NULL.
 */
void keep_put2(void *pair, const void *from, size_t bytes);
const void *keep_get2(const void *pair, size_t bytes);

/* A record that nothing could be made of: its place is free. */
void keep_client_forget(struct mm *mm, unsigned int i);
/* It has lost something; before that is forgotten. */
void keep_client_partial(struct mm *mm, unsigned int i);
void keep_win_forget(struct mm *mm, unsigned int i);

/* -- keep_store.c -------------------------------------------------------------- */

void keep_stores_init(struct keep *k);
/* @nd has opened its store: before any I/O between that and frames. */
void keep_store(struct mm_node *nd);
/* What the last daemon had open. */
void keep_stores_take(struct mm *mm);
/* Which one may still have I/O under way of a daemon that is dead; NULL: none. */
const char *keep_stores_busy(struct mm *mm);
void keep_stores_end(struct mm *mm);

/* -- adopt*.c ------------------------------------------------------------------ */

/* A piece is given up, and why; counted and told. */
void adopt_gave_up(struct mm *mm, const char *fmt, ...) __printf(2, 3);

/* It is not all there any more that @c had: written down, so that it stays known. */
void adopt_partial(struct mm_client *c);
/* Is all there that clients have pinned in @p? NULL, or why it is not. */
const char *adopt_pool_windows(const struct mm_pool *p);

/*
 * A memfd of the last daemon's, mapped; -ENOENT: there is none. @bytes: that it
 * must have; 0: any, for who looks at @s->bytes. Which one it is the caller asks.
 */
int adopt_shm(struct mm *mm, const char *name, uint64_t bytes, bool want_ro,
	      struct shm *s);

/*
 * pool_create() while there is something to adopt: table and records, if both are
 * there and say what @p says. 0; -ENOENT: there are none, or they were given up.
 */
int adopt_pool_shm(struct mm_pool *p);
/* Extents of @p; all are full until adopt_frames() says what is in them. */
void adopt_extents(struct mm_pool *p);
/*
 * Frames of all pools that were adopted: what they are, who has them; and the
 * pages in them. Of @share_pct of each pool's extents all that is good is kept,
 * of the others what is in use. 0, -ENOMEM.
 */
int adopt_frames(struct mm *mm, unsigned int share_pct, struct errmsg *e);

enum stray_kind {
	STRAY_IO,		/* the last daemon's I/O may write to it */
	STRAY_ORPHAN,		/* a good page whose parent is not here (yet) */
	STRAY_PINNED,		/* of no use, and pinned */
	NR_STRAYS
};

/*
 * A frame that is nobody's yet: LOADING without a page until it is decided. With
 * no memory to remember it, it stays so.
 */
void stray_add(struct mm_pool *p, uint32_t f, enum stray_kind kind);
/* All were added: decide what can be decided. */
void stray_begin(struct mm *mm);
/* More of them, as nodes and stores say. Returns when to come again. */
uint64_t adopt_run(struct mm *mm, uint64_t now_ns);
void adopt_fini(struct mm *mm);
/* What @r says, is it good for the word's generation? */
bool record_good(const struct mm_pool *p, const struct frame_record *r,
		 uint64_t gen);
uint8_t record_page_flags(const struct frame_record *r);
/* A page of @r's, as yet without copies; NULL: no memory. */
struct page *record_page(struct mm_space *sp, const struct frame_record *r,
			 struct page *parent);

/* -- helpers of the files that make these objects otherwise ------------------- */

/* space.c: with this place in the header; 0, -EPROTO, -ENOMEM with a sentence */
int space_adopt(struct mm *mm, uint32_t ix, const char *tenant,
		const uint8_t *bytes, size_t len, const uint8_t id[32],
		struct errmsg *e);
/* client.c: no engine yet, not connected */
struct mm_client *client_new(struct mm *mm, const struct mm_client_opts *o);
/* window.c: takes @ledger over on success */
uint64_t win_ledger_bytes(const struct mm_pool *p);
int win_adopt(struct mm_client *c, struct mm_pool *p, uint32_t keep,
	      const struct keep_win *kw, struct shm *ledger);
/* extent.c */
void extent_adopt(struct mm_pool *p, uint32_t no, struct extent *ext,
		  const struct keep_extent *kx);
void extent_lose(struct mm_pool *p, uint32_t no);
/* All of its frames were looked at, @nr_free of them are on its stack. */
void extent_adopted(struct mm_pool *p, uint32_t no, uint64_t down_seq);

#endif
