/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvme_meta.h - what a slot store remembers: journal, labels, checkpoints, and
 * what was found at start-up; for the nvme_*.c files only
 *
 *	nvme_super.c	superblock: layout, check, making a store
 *	nvme_journal.c	entries on their way to the medium
 *	nvme_label.c	labels
 *	nvme_ckpt.c	checkpoints
 *	nvme_ahead.c	start-up: reading ahead
 *	nvme_scan.c	start-up, on a worker: what is on the medium?
 *	nvme_recover.c	start-up, on the loop: hand it to the owner
 *
 * FORMAT.md has the theory.
 */
#ifndef KVMM_DAEMON_NODE_NVME_META_H
#define KVMM_DAEMON_NODE_NVME_META_H

#include "daemon/node/nvme_block.h"
#include "ipc/base/err.h"
#include "ipc/base/list.h"

struct nvme;

/* A group is written this long after its first entry, or when it is full. */
#define NVME_GROUP_NS		(50 * NSEC_PER_MSEC)

/* No slots are given out while more blocks than this wait to be written. */
#define NVME_JOURNAL_BACKLOG	1024u

/* How much of a checkpoint is written at once. */
#define NVME_CKPT_BLOCKS	64u

/* After so many failures in a row a journal group is given up for a checkpoint
 * that makes it unnecessary. */
#define NVME_JOURNAL_TRIES	3u

/**
 * struct nvme_journal - entries on their way to the medium; nvme_journal.c
 * @chunks:	blocks not written yet, oldest first; @spare: some to use again
 * @open:	the block that is being filled, number @head; NULL: none yet
 * @nr_blocks:	length of the ring; 0: there is no journal
 * @head:	number of the next block to be filled
 * @done:	blocks below are on the medium, or not needed there
 * @sent:	end of the group under way
 * @due:	blocks below are to be written at once
 * @tail:	blocks below are not needed any more
 * @gap:	an entry was lost here for want of memory: nothing from here on
 *		may be written before a checkpoint; UINT64_MAX: none was
 * @first_ns:	when the first entry came that is not due; 0: there is none
 * @retry_ns:	not before this
 * @fails:	failures in a row
 * @io:		the group under way, if @active
 * @flushes:	who waits in node_record_flush()
 */
struct nvme_journal {
	struct list		chunks;
	struct list		spare;
	uint32_t		nr_spare;
	uint32_t		fails;
	struct nvme_block	*open;
	uint64_t		nr_blocks;
	uint64_t		head;
	uint64_t		done;
	uint64_t		sent;
	uint64_t		due;
	uint64_t		tail;
	uint64_t		gap;
	uint64_t		first_ns;
	uint64_t		retry_ns;
	struct node_io		io;
	bool			active;
	struct list		flushes;
};

/**
 * struct nvme_label - @len bytes
 * @have:	while a store is read: so many of them were there
 */
struct nvme_label {
	uint32_t	id;
	uint32_t	len;
	uint32_t	have;
	uint8_t		*bytes;
};

/**
 * struct nvme_labels - by number; nvme_label.c
 * @bytes:	what they take in a checkpoint
 * @next:	number of the next one; never used twice
 */
struct nvme_labels {
	struct nvme_label	*v;
	uint32_t		nr;
	uint32_t		max;
	uint64_t		bytes;
	uint32_t		next;
};

enum ckpt_stage {
	CKPT_IDLE,
	CKPT_LABELS,
	CKPT_RECORDS,
	CKPT_BAD,
	CKPT_LOG,		/* of the journal, what it cannot be written to */
	CKPT_WRITE,		/* all is collected, not all written */
	CKPT_JOURNAL,		/* waiting for the journal to be as far */
	CKPT_CLOSE,		/* the last block is to be written */
};

/**
 * struct nvme_ckpt - a checkpoint under way; nvme_ckpt.c
 * @area:	where the last complete one is
 * @number:	of this one, or the last that was begun
 * @whole:	has the journal's blocks in it: needs none of the ring
 * @again:	is of no use any more: begin anew
 * @failed:	no memory or room for it
 * @io_active:	a part is being written
 * @cursor:	the owner's, or the next label, or block of the journal
 * @from:	first block of the journal that has to be read after it
 * @until:	the journal has to be written up to here before it is valid
 * @buf:	@max blocks, of which @nr are complete and @out are written
 * @io_blocks:	length of the part being written
 * @written:	blocks of the area that are written
 * @nr_records:	collected
 * @next_ns:	when to write the next part
 * @retry_ns:	when to begin anew
 * @fails:	failures in a row
 */
struct nvme_ckpt {
	enum ckpt_stage		stage;
	int			area;
	bool			whole;
	bool			again;
	bool			failed;
	bool			io_active;
	uint64_t		number;
	uint64_t		cursor;
	uint64_t		from;
	uint64_t		until;
	char			*buf;
	uint32_t		max;
	uint32_t		nr;
	uint32_t		out;
	uint32_t		io_blocks;
	uint64_t		written;
	uint64_t		nr_records;
	uint64_t		next_ns;
	uint64_t		retry_ns;
	uint32_t		fails;
	struct node_io		io;
};

/**
 * struct nvme_found - what is on the medium; nvme_scan.c
 * @end:	the checkpoint's last block
 * @area:	where it is
 * @rec:	@nr records of @max; type NVME_ENT_NONE: deleted meanwhile
 * @order:	@nr_order places in @rec, by sequence number
 * @bad:	@nr_bad slots in quarantine
 * @labels:	those that are whole
 * @journal_end: the next block of the journal
 * @max_opens:	the highest that any block was written with
 * @next_seq:	above all sequence numbers seen
 * @dropped:	records that cannot be right
 * @bad_blocks:	blocks of the checkpoint that were damaged
 * @lost:	blocks in the middle of the journal that were
 * @bytes:	read
 * @next:	how many of @order were handed out
 * @next_label:	how many labels were
 * @taken:	how many records the owner took
 * @again_ns:	the owner could not take a label or a record: when to ask once
 *		more
 */
struct nvme_found {
	struct nvme_ent_end	end;
	int			area;
	struct nvme_ent_add	*rec;
	uint32_t		nr;
	uint32_t		max;
	uint32_t		*order;
	uint32_t		nr_order;
	struct nvme_ent_slot	*bad;
	uint32_t		nr_bad;
	uint32_t		max_bad;
	struct nvme_labels	labels;
	uint64_t		journal_end;
	uint64_t		max_opens;
	uint64_t		next_seq;
	uint64_t		dropped;
	uint64_t		bad_blocks;
	uint64_t		lost;
	uint64_t		bytes;
	uint64_t		start_ns;
	uint32_t		next;
	uint32_t		next_label;
	uint32_t		taken;
	uint64_t		again_ns;
};

/* nvme_super.c; on the worker */
void nvme_layout(struct nvme_super *sb, uint64_t records);
/*
 * Read and check the superblock. @buf has NVME_HEAD_BYTES; @fresh: the file was
 * empty. *@make: there is none, and one may be made.
 */
int nvme_super_read(struct nvme *nv, void *buf, uint64_t bytes, bool fresh,
		    bool *make);
/* Make a store; nvme_super_renew() has to follow. */
int nvme_super_make(struct nvme *nv, void *buf, uint64_t bytes);
/* Write it once more, with one more opening. */
int nvme_super_renew(struct nvme *nv, void *buf, bool made);

/* nvme_journal.c */
void nvme_journal_init(struct nvme *nv, uint64_t head, uint64_t tail);
void nvme_journal_fini(struct nvme *nv);
bool nvme_journal_room(const struct nvme *nv);
/* What status says where there is none; "" where there is. */
const char *nvme_journal_note(const struct nvme *nv);
bool nvme_journal_idle(const struct nvme *nv);
void nvme_journal_poll(struct nvme *nv, uint64_t now);
uint64_t nvme_journal_next(const struct nvme *nv);
bool nvme_journal_check(const struct nvme *nv);

/* The node ends: what had been given up may be written by now. */
void nvme_journal_last_try(struct nvme *nv);

/* There will be no checkpoint for some time: nobody waits for one. */
void nvme_journal_no_ckpt(struct nvme *nv);

/* Is a checkpoint wanted? @whole: one that needs nothing of the journal. */
bool nvme_journal_wants(const struct nvme *nv, bool *whole);

/* Close the open block; the number of the next one. */
uint64_t nvme_journal_mark(struct nvme *nv);

/* A block that is only in memory; NULL: there is no such one. */
const struct nvme_block *nvme_journal_block(const struct nvme *nv,
					    uint64_t seq);

/* A checkpoint is complete: nothing below @from is needed any more. */
void nvme_journal_trim(struct nvme *nv, uint64_t from, bool whole);

void nvme_log_add(struct nvme *nv, const struct node_record *rec,
		  uint32_t slot_bytes);
void nvme_log_slot(struct nvme *nv, enum nvme_ent_type type,
		   const struct node_slot *slot, uint32_t slot_bytes);
void nvme_log_zeroed(struct nvme *nv, uint32_t seg);
void nvme_log_label(struct nvme *nv, const struct nvme_label *l);
void nvme_log_label_del(struct nvme *nv, uint32_t id);
int nvme_record_flush(struct node *n, void (*fn)(int err, void *arg),
		      void *arg);

void nvme_ent_fill(struct nvme_ent_add *e, const struct node_record *rec);

/* nvme_label.c */
void nvme_labels_fini(struct nvme_labels *ls);
struct nvme_label *nvme_label_find(const struct nvme_labels *ls, uint32_t id);
int nvme_label_room(struct nvme_labels *ls, uint32_t id, uint32_t len,
		    struct nvme_label **ret);
void nvme_label_drop(struct nvme_labels *ls, uint32_t id);
uint64_t nvme_label_cost(uint32_t len);
int nvme_label_put(struct node *n, const void *bytes, size_t len,
		   uint32_t *id);
void nvme_label_del(struct node *n, uint32_t id);

/* nvme_ckpt.c */
void nvme_ckpt_fini(struct nvme *nv);
void nvme_ckpt_poll(struct nvme *nv, uint64_t now);
uint64_t nvme_ckpt_next(const struct nvme *nv);
/* What status says of those that fail; @buf stays empty where none does. */
void nvme_ckpt_note(const struct nvme *nv, char *buf, size_t len);
void nvme_record_again(struct node *n, const struct node_record *rec);

/* nvme_ahead.c; on the worker */
struct nvme_ahead;

/* Ranges have @max_blocks at most. */
int nvme_ahead_create(struct nvme *nv, uint64_t max_blocks,
		      struct nvme_ahead **ret);
/* NULL is fine. Waits for what is being read. */
void nvme_ahead_destroy(struct nvme_ahead *a);
/*
 * The @nr blocks at @off, valid until the next call; blocks that cannot be read are
 * zero. @next_nr at @next_off are what will be wanted then; 0: nobody knows.
 */
const char *nvme_ahead_read(struct nvme_ahead *a, uint64_t off, uint64_t nr,
			    uint64_t next_off, uint64_t next_nr);
/* Why block @ix of what was returned last could not be read; 0: it could. */
int nvme_ahead_gone(const struct nvme_ahead *a, uint64_t ix);

/* nvme_scan.c; on the worker */
int nvme_scan(struct nvme *nv, struct nvme_found **ret);
void nvme_found_free(struct nvme_found *f);

/* nvme_recover.c */
/* On the worker: about so many records will be found. */
void nvme_recover_expect(struct nvme *nv, uint64_t records);
void nvme_recover_start(struct nvme *nv);
bool nvme_recover_poll(struct nvme *nv);
uint64_t nvme_recover_next(const struct nvme *nv);

#endif
