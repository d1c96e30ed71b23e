/* SPDX-License-Identifier: Apache-2.0 */
/* seq.h - a sequence and its pages; sched*.c and seq.c only */
#ifndef KVMM_TESTS_ENGINE_SEQ_H
#define KVMM_TESTS_ENGINE_SEQ_H

#include "ipc/base/list.h"
#include "tests/engine/sched.h"

enum seq_state {
	SEQ_WAITING,		/* holds nothing */
	SEQ_FETCHING,		/* pages come from below */
	SEQ_RUNNING,
	SEQ_FORKING,		/* tails are being copied for its samples */
};

/**
 * struct seq_group - its pages of one group
 * @table:	frame by page; 0: passed out of the window, or not yet there. LAST:
 *		[0] is the working state
 * @nb:		pages that have an entry
 * @npub:	pages that are somebody's to find or were refused: found, published
 * @nprivate:	of @npub those that are nobody else's: a sample cannot have them
 * @nkey:	keys known, from the sequence's start
 */
struct seq_group {
	int32_t		*table;
	struct kvmm_key	*key;
	uint32_t	cap;
	uint32_t	nb, npub, nprivate, nkey;
};

/**
 * struct seq - a sequence
 * @rq:		NULL while WAITING
 * @epoch:	of the daemon that @rq's frames are of
 * @tok:	prompt and what was generated; @ntok of them, at most max_tokens more
 *		than @nprompt
 * @ndone:	tokens whose KV is there
 * @launched:	tokens of the step under way
 * @nhit_told:	units the match found, not told to the ranks yet
 * @snap:	frame of the snapshot that the step under way takes; 0: none
 * @restore:	frame of the snapshot that it starts from; 0: none
 * @want:	place of its answer in the step under way + 1
 * @nfork:	samples that wait for the prompt (the first sequence of a request)
 * @children:	forks whose copies are not complete
 * @logits:	after the prompt, for the samples
 * @since_ns:	since when it has had no frames, or its samples no tails
 * @nops:	operations in flight
 */
struct seq {
	struct list	link;
	struct sched	*s;
	enum seq_state	state;
	struct kvmm_req	*rq;
	uint64_t	epoch;
	struct sched_req r;
	uint32_t	sample;
	uint32_t	*tok;
	uint32_t	ntok, nprompt;
	uint32_t	ndone, launched;
	struct seq_group g[KV_MAX_GROUPS];
	uint32_t	nhit_told;
	uint32_t	snap, restore;
	uint32_t	want;
	uint32_t	nfork, children;
	struct seq	*parent;
	float		*logits;
	bool		no_match;
	uint64_t	since_ns, arrive_ns, first_ns;
	uint64_t	digest;
	uint32_t	hit, fetched, computed, preempted;
	uint32_t	nops;
};

enum op_kind {
	OP_PUBLISH,
	OP_FETCH,
	OP_FORK,
};

/**
 * struct op - an operation in flight
 * @q:		NULL: its sequence does not want to know any more
 * @first, @n:	pages of @group (publish), units (fetch)
 * @snap:	publish of a state: its frame
 */
struct op {
	uint64_t	tag;
	enum op_kind	kind;
	struct seq	*q;
	uint32_t	group, first, n;
	kvmm_frame_t	snap;
};
#define MAX_OPS		1024

struct sched {
	const struct model *m;
	struct kv	*kv;
	struct team	*team;
	struct sched_opts o;
	void		(*done)(void *arg, const struct sched_done *d);
	void		*arg;
	struct list	waiting, running;
	uint32_t	nrunning;
	uint64_t	stuck_ns;	/* since when nothing runs and nothing begins */
	uint64_t	step;
	struct op	op[MAX_OPS];
	uint64_t	op_seq;
	struct sched_stats st;
};

/* seq.c */
struct seq *seq_create(struct sched *s, const struct sched_req *r,
		       uint32_t sample);
void seq_free(struct seq *q);
/* Keys of group @g for its first @n pages; tokens must be there. */
int seq_keys(struct seq *q, unsigned int g, uint32_t n);
/* Room for @n entries in @g's table. */
int seq_room(struct seq *q, unsigned int g, uint32_t n);
/* Frames for @n more tokens, and a snapshot if one is due; 0 or -EAGAIN. */
int seq_frames(struct seq *q, uint32_t n);
/* How many of its missing tokens a step may take, of @budget. */
uint32_t seq_chunk(const struct seq *q, uint32_t budget);
/* Somebody else's page: with --guard it cannot be written to from here. */
void seq_guard(struct sched *s, unsigned int g, kvmm_frame_t f);
/* Pages that no token to come looks back to go. */
void seq_forget(struct seq *q);
/* End its request; it holds nothing afterwards. */
void seq_drop(struct seq *q, int how);

/* sched_match.c */
/* Begin a waiting sequence: 0, -EAGAIN (not now), or -errno. */
int seq_admit(struct seq *q);
void fetch_done(struct op *op, const struct kvmm_done *d);

/* sched_pub.c */
void seq_publish(struct seq *q);
void publish_done(struct op *op, const struct kvmm_done *d);
/* Its prompt is computed: a sequence for each further sample, as far as can be. */
void seq_fork(struct seq *q);
void fork_done(struct op *op, const struct kvmm_done *d);

/* sched.c */
struct op *op_get(struct sched *s, enum op_kind kind, struct seq *q);
void op_put(struct op *op);
/* Answer sample @sample of @q's request with @err. */
void seq_refuse(const struct seq *q, uint32_t sample, int err);
/* Its first or next token from @logits; true: it is complete and gone. */
bool seq_answer(struct seq *q, const float *logits);

static inline bool seq_linear(const struct seq *q, unsigned int g)
{
	return q->s->kv->g[g].rule == KVMM_LAST;
}

#endif
