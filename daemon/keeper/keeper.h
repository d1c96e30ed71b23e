/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper: a small parent of the daemon that keeps its descriptors and starts
 * it again. For hosts without systemd, and for tests and benches; where there is
 * systemd, its fd store does the same.
 *
 * It plays the service manager's part: the daemon's $NOTIFY_SOCKET is its own,
 * FDSTORE=1 and FDSTOREREMOVE=1 fill and empty its store, and a daemon that is
 * started again finds what is in there as $LISTEN_FDS. It must be the last thing
 * on the host to die, so there is little in it: one thread, no memory but what
 * is in struct keeper, no file, and no message is believed that does not come
 * from its child.
 */
#ifndef KVMM_KEEPER_KEEPER_H
#define KVMM_KEEPER_KEEPER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#define KEEPER_MAX		8192	/* descriptors; no more than the park's */
#define KEEPER_NAME		72	/* bytes of a name, NUL included */
#define KEEPER_NAME_BYTES	(124u << 10) /* of all, in one environment string */
#define KEEPER_SOCKETS		64	/* of $LISTEN_FDS that it was started with */

/**
 * struct kept - one descriptor
 * @socket:	came with the keeper's own start: stays for ever
 */
struct kept {
	int	fd;
	bool	socket;
	char	name[KEEPER_NAME];
};

/**
 * struct keeper - all of it
 * @argv:	of the child
 * @child:	0: none runs
 * @sock:	$NOTIFY_SOCKET of the child, at @addr as the child is told
 * @up:		our own manager's, -1: none
 * @sigfd:	SIGCHLD, SIGTERM, SIGINT, SIGHUP
 * @sig_old:	mask that the child gets back
 * @max:	descriptors that we may have, but for a few of our own
 * @nr, @name_bytes: what is kept, in the order in which it came
 * @stop:	signal that asked for the end; 0
 * @kill_ns:	a child that was asked to end is killed then
 * @start_ns:	when to start it again; 0: it runs
 * @started_ns:	when the last one was started
 * @backoff_ns:	how long the next pause is
 * @ready:	the child has served
 * @ever:	some child has
 * @watchdog_ns: how often it must say that it lives, once it has served
 * @watch_ns:	it is taken for hung then
 * @hung:	it was, and was told to end
 * @watched:	our own manager wants to hear that often
 * @restarts:	starts after the first
 * @refused:	descriptors for which there was no room, or no name
 * @strangers:	messages of others than the child
 * @oom_adj:	our own oom_score_adj at start: the child gets it back
 * @oom:	oom_kill of our control group when the child was started
 * @ended:	how the last one ended, for the next
 */
struct keeper {
	char *const	*argv;
	pid_t		child;
	int		sock, up, sigfd;
	char		addr[sizeof(struct sockaddr_un)];
	unsigned char	sig_old[128];
	struct kept	kept[KEEPER_MAX];
	unsigned int	nr, max;
	size_t		name_bytes;
	int		stop;
	uint64_t	kill_ns, start_ns, started_ns, backoff_ns;
	bool		ready, ever;
	uint64_t	watchdog_ns, watch_ns;
	bool		hung, watched;
	unsigned int	restarts;
	uint64_t	refused, strangers;
	char		oom_adj[16];
	uint64_t	oom;
	char		ended[32];
};

/**
 * keeper_run() - start a daemon and keep it until it ends in order
 * @k:		zeroed; large, so not on a stack
 * @argv:	program and arguments; argv[0] is a path
 * Return: the exit status for the process, as the child's last one.
 */
int keeper_run(struct keeper *k, char *const *argv);

/* -- keeper_watch.c ------------------------------------------------------------ */

/** watch_open() - how long to wait, as our own manager waits for us */
void watch_open(struct keeper *k);
/** watch_begin() - a child was started */
void watch_begin(struct keeper *k);
/** watch_heard() - a line that the child said of itself */
void watch_heard(struct keeper *k, const char *line);
/** watch_run() - end a child that hangs */
void watch_run(struct keeper *k);
/** up_send() - say something to our own manager, if it listens now */
void up_send(const struct keeper *k, const char *text, size_t len);

/* -- keeper_store.c ------------------------------------------------------------ */

/** store_adopt() - take over $LISTEN_FDS that the keeper itself was given */
void store_adopt(struct keeper *k);
/** store_read() - take all messages that are there */
void store_read(struct keeper *k);
/** store_hand() - child: put what is kept on 3 and up, and say so; 0, -errno */
int store_hand(struct keeper *k);

/* -- keeper_child.c ------------------------------------------------------------ */

/** child_start() - fork and exec; 0 or -errno */
int child_start(struct keeper *k);
/** child_reap() - collect it if it ended; true and its wait status */
bool child_reap(struct keeper *k, int *status);

#endif
