/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control messages with file descriptors over SOCK_SEQPACKET.
 *
 * Every received descriptor is close-on-exec and is either handed to the caller
 * or closed, on every path.
 */
#ifndef KVMM_IPC_SOCK_H
#define KVMM_IPC_SOCK_H

#include <stddef.h>
#include <stdint.h>

#include "ipc/wire.h"

/**
 * struct sock_msg - one received message
 * @buf:	aligned; @len bytes of it are valid
 * @fd:		@nr_fds descriptors, the receiver's: sock_msg_close_fds(), or
 *		sock_msg_take_fd() one by one
 */
struct sock_msg {
	_Alignas(16) uint8_t buf[WIRE_MAX_BYTES];
	size_t		len;
	unsigned int	nr_fds;
	int		fd[WIRE_MAX_FDS];
};

/**
 * sock_listen() - bind and listen at @path, replacing a stale socket
 * @mode:	file mode of the socket
 * Return: fd, or -errno (-EADDRINUSE when somebody answers there).
 */
int sock_listen(const char *path, unsigned int mode);

/** sock_connect() - Return: non-blocking fd; -ENOTCONN when nobody listens, -errno */
int sock_connect(const char *path);

/** sock_accept() - Return: non-blocking, close-on-exec fd; -EAGAIN; -errno */
int sock_accept(int listen_fd);

/**
 * sock_send() - send one message; never blocks
 * @h:		whole message, @h->len bytes; magic and nr_fds are filled in here
 * @fds:	stay the caller's
 * Return: 0, -EAGAIN (the peer does not read), -EPIPE, -E2BIG.
 */
int sock_send(int fd, struct wire_hdr *h, const int *fds, unsigned int nr_fds);

/**
 * sock_recv() - receive one message; never blocks
 *
 * Truncated data or descriptors, a wrong magic, or a length that does not match
 * the packet: -EPROTO, and every descriptor that came is closed. -EMFILE: the
 * message is there, its descriptors are not.
 * Return: 0, -EAGAIN, -EPIPE (peer closed), -EPROTO, -EMFILE.
 */
int sock_recv(int fd, struct sock_msg *m);

/**
 * sock_recv_max() - the same for at most @max_fds descriptors
 *
 * What more the peer sent is dropped in the kernel and never becomes ours to
 * close: closing a descriptor of the peer's making may block (FUSE). On error
 * what came stays in @m, the caller's to close.
 */
int sock_recv_max(int fd, struct sock_msg *m, unsigned int max_fds);

/** sock_wait() - poll for @events until @deadline_ns; 0, -ETIMEDOUT, -EPIPE */
int sock_wait(int fd, short events, uint64_t deadline_ns);

/** sock_msg_take_fd() - the next descriptor becomes the caller's; -1: none */
int sock_msg_take_fd(struct sock_msg *m);
void sock_msg_close_fds(struct sock_msg *m);

#endif
