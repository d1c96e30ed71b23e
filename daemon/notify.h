/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words for who started us: sd_notify(3)'s, but that nothing waits. A manager
 * that does not read fills its queue within seconds, and libsystemd's call would
 * then hold the event loop for as long as that lasts.
 */
#ifndef KVMM_DAEMON_NOTIFY_H
#define KVMM_DAEMON_NOTIFY_H

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/un.h>

/**
 * notify_address() - what $NOTIFY_SOCKET names: a path, or "@" and an abstract one
 * Return: bytes of @sa; 0: not a place that one can send to.
 */
socklen_t notify_address(struct sockaddr_un *sa, const char *path);

/**
 * struct notify - the way there
 * @sock:	-1: nobody listens
 */
struct notify {
	int			sock;
	struct sockaddr_un	to;
	socklen_t		to_len;
};

#define NOTIFY_INIT { .sock = -1 }

/** notify_open() - by the environment; false: nobody listens */
bool notify_open(struct notify *n);
void notify_close(struct notify *n);

/**
 * notify_say() - one message, lines of NAME=VALUE
 * Return: 0: it is on its way, or nobody listens; -EAGAIN: not now; -errno.
 */
int notify_say(const struct notify *n, const char *text);

#endif
