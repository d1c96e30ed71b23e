/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_kvmmd.h - a daemon made by hand, for unit tests of libkvmm
 *
 * A thread answers the set-up messages; everything else is the test's: it
 * writes index lines and frame words, fills magazines, takes submissions and
 * posts completions, at the moment that it wants to look at. So every order of
 * events can be had, which a real kvmmd would go through too fast.
 *
 * One space, up to %FK_MAX_CLASSES classes, one mappable node (0, "dram0") and
 * one below it (1, "nvme0"). Extents are real memfds.
 */
#ifndef KVMM_TESTS_LIB_FAKE_KVMMD_H
#define KVMM_TESTS_LIB_FAKE_KVMMD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "ipc/frame.h"
#include "ipc/index.h"
#include "ipc/ledger.h"
#include "ipc/shm.h"
#include "ipc/sock.h"

#define FK_MAX_CLASSES	2
#define FK_EXTENTS	8		/* numbers 1 .. FK_EXTENTS - 1 */
#define FK_FPE		64		/* frames of an extent */
#define FK_FRAMES	(FK_EXTENTS * FK_FPE)
#define FK_STRIDE	4096
#define FK_MAG		512
#define FK_LINES	4096
#define FK_WORDS	4096
#define FK_SPACE	5		/* index of the space in the header */
#define FK_FIRST	FK_FPE		/* the lowest frame there is */

/* One class's window. */
struct fk_win {
	struct shm	table, wl;
	struct frame_table *t;
	struct window_ledger *w;
	int		extent[FK_EXTENTS];	/* fd, -1: not there */
	uint64_t	up[FK_EXTENTS], down[FK_EXTENTS];
	uint32_t	mag_tail;
	_Atomic unsigned int opens, closes, syncs, reserves;
	_Atomic uint32_t reserved;	/* frames of the last reserve */
	_Atomic bool	open;
};

/**
 * struct fk - the daemon
 * @stopped:	as after SIGSTOP: the socket is accepted and not read
 * @full:	no reserve is granted
 * @gang:	node 0 is one of so many parts; extents that come from now on
 *		have as many. @part_off and @win_flags go into WIRE_WINDOW
 * @attaches, @detaches: how often it was asked
 */
struct fk {
	char		path[108];
	int		listen_fd, sock;
	pthread_t	thread;
	pthread_mutex_t	lock;
	_Atomic bool	stop, stopped, full;
	_Atomic unsigned int attaches, detaches, hellos;
	uint64_t	epoch;
	struct shm	hdr_shm, ledger_shm, index_shm;
	struct kvmm_hdr	*hdr;
	struct ledger	*l;
	struct index	*ix;
	uint32_t	rights;
	uint8_t		gang;
	uint16_t	win_flags;
	uint64_t	part_off;
	int		bell, notify;
	uint32_t	sq_head, cq_tail, clients;
	uint64_t	arena_head;
	struct fk_win	win[FK_MAX_CLASSES];
	unsigned int	nr_classes;
};

/* Starts with extent 1 of each class there. 0 or -errno. */
int fk_start(struct fk *f, unsigned int nr_classes);
void fk_stop(struct fk *f);
/* Close the connection; memory stays as it is. */
void fk_hang_up(struct fk *f);
/* What a new daemon brings: an epoch, empty memory. Hangs up. */
void fk_restart(struct fk *f);

/* An extent comes, or must go. */
void fk_extent_up(struct fk *f, unsigned int cls, uint32_t no);
void fk_extent_down(struct fk *f, unsigned int cls, uint32_t no);

/* A page's line on node 0 and its frame's word; returns the word. */
uint64_t fk_seal(struct fk *f, unsigned int cls, const struct kvmm_key *key,
		 uint16_t group, uint32_t frame, uint64_t gen);
/* A line that says that the page is below. */
void fk_below(struct fk *f, const struct kvmm_key *key, uint16_t group,
	      uint8_t flags, uint32_t cost_us);
void fk_forget(struct fk *f, const struct kvmm_key *key, uint16_t group,
	       uint8_t node);
void fk_forget_below(struct fk *f, const struct kvmm_key *key, uint16_t group);
void fk_word(struct fk *f, unsigned int cls, uint32_t frame, uint64_t word);
uint32_t fk_pins(struct fk *f, unsigned int cls, uint32_t frame);
/* Sum over all frames of a class. */
uint32_t fk_all_pins(struct fk *f, unsigned int cls);
/* Frames [@first, @first + @n) into the magazine; and a refill answered. */
void fk_give(struct fk *f, unsigned int cls, uint32_t first, uint32_t n);

/* The next submission, with its array (NULL: none); false: the ring is empty. */
bool fk_take(struct fk *f, struct ring_sqe *sqe, const void **array);
/* Take until one of @op comes; false: there was none. */
bool fk_take_op(struct fk *f, uint8_t op, struct ring_sqe *sqe,
		const void **array);
void fk_answer(struct fk *f, const struct ring_sqe *sqe, int result,
	       const struct ring_result *res, uint32_t n);
/* Has the client rung since the last call? */
bool fk_rung(struct fk *f);

/* -- the client's side ---------------------------------------------------------- */

/**
 * struct fc - a connection to it with a space, windows on node 0 and a request
 */
struct fc {
	struct kvmm	*k;
	struct kvmm_space *sp;
	struct kvmm_win	*win[FK_MAX_CLASSES];
	struct kvmm_req	*rq;
};

/* Groups 0 FULL, 1 WINDOW(3), 2 LAST, 3 BLOB in class 0; with two classes also
 * 4 FULL of class 1, whose blocks are twice as long. */
#define FK_FULL		0
#define FK_WINDOW	1
#define FK_LAST		2
#define FK_BLOB		3
#define FK_FULL2	4
#define FK_WINDOW_PAGES	3

const struct kvmm_desc *fk_desc(unsigned int nr_classes);
/* What a call may take: long enough for a busy machine. */
#define FC_TIMEOUT_NS	(500 * NSEC_PER_MSEC)

/* 0 or -errno. */
int fc_open(struct fk *f, struct fc *c);
void fc_close(struct fc *c);
/* Match one key of group 0 on node 0: pages that are here, or -errno. */
int fc_match(struct fc *c, const struct kvmm_key *key);
/* Key number @i of sequence @seq. */
struct kvmm_key fk_key(uint32_t seq, uint32_t i);

#endif
