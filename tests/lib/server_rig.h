/* SPDX-License-Identifier: Apache-2.0 */
/*
 * server_rig.h - a server in the test's own process, and clients that speak to
 * it without libkvmm: byte by byte, right or wrong
 *
 * The server runs only inside srig_*() and rc_*() calls, so a test decides what it sees.
 * Functions end the test (cmocka) when something is not as it must be; those of
 * fuzz targets (srig_open(), srig_pump(), rc_connect()) return errors.
 */
#ifndef KVMM_TESTS_SERVER_RIG_H
#define KVMM_TESTS_SERVER_RIG_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/server/server.h"
#include "ipc/ledger.h"
#include "ipc/sock.h"
#include "ipc/wire.h"

#define SRIG_SOCKETS	2	/* 0: tenant demo, rw; 1: tenant demo, ro */
#define SRIG_PAGE	4096u

struct server_rig {
	char		dir[128];
	struct config	cfg;
	struct server	*s;
};

/**
 * srig_open() - a folder, a configuration, a server
 * @more:	JSON members for the configuration, as "\"spin_us\": 0"; or NULL
 * Return: 0 or -errno with a line on stderr.
 */
int srig_open(struct server_rig *r, const char *more);
/** srig_open_sized() - the same with a node of memory of @size, as "64MiB" */
int srig_open_sized(struct server_rig *r, const char *size, const char *more);
void srig_close(struct server_rig *r);

/** srig_pump() - some rounds without sleeping */
void srig_pump(struct server_rig *r);

/** srig_reject() - how often so far */
uint64_t srig_reject(const struct server_rig *r, enum reject why);

/** srig_sessions() - in any state */
unsigned int srig_sessions(const struct server_rig *r);

/**
 * struct raw_client - one connection
 * @fd:		its socket
 * @seq:	of the last request
 * @m:		the last message received
 */
struct raw_client {
	struct server_rig *rig;
	int		fd;
	uint32_t	seq;
	struct sock_msg	*m;
	struct shm	hdr, ledger_shm;
	struct ledger	*l;
	struct ring_sqe	*sq;		/* where they are, as told at hello */
	struct ring_cqe	*cq;
	uint8_t		*arena;
	uint32_t	sq_entries, cq_entries, arena_bytes;
	int		doorbell, notify;
	uint32_t	sq_tail, cq_head;
	uint64_t	arena_tail;
	uint32_t	no;
	uint32_t	space;
	uint16_t	win;
	struct shm	table, wl_shm;
	struct window_ledger *wl;
};

int rc_connect(struct server_rig *r, unsigned int socket, struct raw_client *c);
void rc_close(struct raw_client *c);

/* Send @h with @fds; fills seq in. 0 or -errno. */
int rc_send(struct raw_client *c, struct wire_hdr *h, const int *fds,
	    unsigned int nr_fds);
/*
 * Pump until a message is there, at most 2 s: 0, -ETIMEDOUT, -EPIPE. The last
 * one's descriptors are closed.
 */
int rc_recv(struct raw_client *c);
/* The same, and it must be of this type. */
void rc_expect(struct raw_client *c, uint16_t type);
/* An error with this errno, and a sentence that contains @text. */
void rc_expect_error(struct raw_client *c, int err, const char *text);
/* The daemon hangs up (after any last word), having counted @why. */
void rc_expect_cut(struct raw_client *c, enum reject why);

/* The steps of a well-behaved client; each ends the test if it fails. */
void rc_hello(struct raw_client *c);
/*
 * Hang up, connect again and say who it was. The flags of the welcome: without
 * %WIRE_WELCOME_RESUMED the connection is another client's, and only good to be
 * closed.
 */
uint32_t rc_hello_again(struct raw_client *c);
/* The first half of that: nothing is waited for. */
void rc_come_again(struct raw_client *c);
void rc_attach(struct raw_client *c);
void rc_win_open(struct raw_client *c, uint32_t rights);
/* Map what came up in its bitmap, as a client does after WIN_SYNC. */
void rc_win_sync(struct raw_client *c);
/* Refill until @n frames are in the magazine; take them. */
void rc_alloc(struct raw_client *c, uint32_t *frames, unsigned int n);

/* A descriptor of one class of 4 KiB pages, one FULL group. */
size_t rc_desc(uint8_t *buf);

/* Put an entry into the ring; @array of @bytes goes into the arena. */
void rc_submit(struct raw_client *c, struct ring_sqe *e, const void *array,
	       uint32_t bytes);
/* Pump until a completion is there; its head, and the results of its pages. */
void rc_complete(struct raw_client *c, struct ring_cqe *cqe,
		 struct ring_result *res, unsigned int max);
/* Is one there? Does not advance. */
bool rc_pending(const struct raw_client *c);
/* Tell the daemon that all up to here was taken. */
void rc_advance(struct raw_client *c);

#endif
