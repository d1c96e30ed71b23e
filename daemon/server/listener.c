/* SPDX-License-Identifier: Apache-2.0 */
/* Client sockets: listening, accepting, and what to do out of descriptors. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/server/server.h"
#include "ipc/base/fd.h"

#define PAUSE_NS	(100 * NSEC_PER_MSEC)
#define ACCEPTS		16	/* connections a socket and round */

static_assert(CONFIG_NAME + sizeof("sock/") - 1 <= PARK_NAME,
	      "a socket's name is parked as it is");

static void listener_pause(struct listener *l, int err)
{
	struct server *s = l->server;

	if (log_pass(&s->accept_rate))
		log_err("socket %s: accept: %s; trying again in 100 ms",
			l->cfg->name, strerror(-err));
	l->paused_ns = now_ns() + PAUSE_NS;
	loop_mod(s, &l->src, 0);
	sessions_arm(s, l->paused_ns);
}

static void listener_ready(struct source *src, uint32_t events)
{
	struct listener *l = container_of(src, struct listener, src);
	unsigned int i;

	for (i = 0; i < ACCEPTS; i++) {
		int fd = sock_accept(src->fd);

		if (fd == -EAGAIN)
			return;
		if (fd < 0) {
			/* it would stay readable: do not spin on it */
			listener_pause(l, fd);
			return;
		}
		session_create(l->server, l, fd, NULL);
	}
}

static bool listens(int fd)
{
	int type = 0, on = 0;
	socklen_t len = sizeof(type);

	return !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) &&
	       type == SOCK_SEQPACKET &&
	       !getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &len) && on &&
	       !set_nonblock(fd);
}

/* The manager's socket of this name, or -1. */
static int manager_socket(struct server *s, const struct config_socket *cfg)
{
	int fd = park_socket(s->park, cfg->name);

	if (fd < 0 || listens(fd))
		return max(fd, -1);
	log_warn("socket activation: \"%s\" is not a listening SOCK_SEQPACKET "
		 "socket: closed", cfg->name);
	close(fd);
	return -1;
}

/*
 * The last daemon's, or -1: who connected since waits in it. It is of use while
 * its file is where it should be.
 */
static int parked_socket(struct server *s, const struct config_socket *cfg)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	socklen_t len = sizeof(sa);
	char name[PARK_NAME];
	struct stat st;
	int fd;

	snprintf(name, sizeof(name), "sock/%s", cfg->name);
	fd = park_take(s->park, name);
	if (fd < 0)
		return -1;
	if (listens(fd) && !getsockname(fd, (struct sockaddr *)&sa, &len) &&
	    !strncmp(sa.sun_path, cfg->path, sizeof(sa.sun_path)) &&
	    !lstat(cfg->path, &st) && S_ISSOCK(st.st_mode) &&
	    !chmod(cfg->path, cfg->file_mode))
		return fd;
	park_drop(s->park, "%s", name);
	close(fd);
	return -1;
}

/* One of our own, that the next daemon will find. */
static int own_socket(struct server *s, const struct config_socket *cfg,
		      struct errmsg *e)
{
	int fd = parked_socket(s, cfg);

	if (fd >= 0)
		return fd;
	fd = sock_listen(cfg->path, cfg->file_mode);
	if (fd < 0)
		return errmsg_set(e, fd, "socket %.108s: %s", cfg->path,
				  fd == -EADDRINUSE
				  ? "somebody else serves there"
				  : strerror(-fd));
	park_put(s->park, fd, "sock/%s", cfg->name);
	return fd;
}

static void listener_close(struct server *s, const struct config_socket *cfg,
			   bool inherited, int fd)
{
	if (!inherited) {
		unlink(cfg->path);
		park_drop(s->park, "sock/%s", cfg->name);
	}
	close(fd);
}

int listener_add(struct server *s, const struct config_socket *cfg,
		 struct errmsg *e)
{
	struct listener *l = &s->listener[s->nr_listeners];
	int fd = manager_socket(s, cfg), err;
	bool inherited = fd >= 0;

	if (!inherited)
		fd = own_socket(s, cfg, e);
	if (fd < 0)
		return fd;
	*l = (struct listener){
		.src		= { .fd = -1, .ready = listener_ready },
		.server		= s,
		.ix		= s->nr_listeners,
		.cfg		= cfg,
		.inherited	= inherited,
	};
	err = loop_add(s, &l->src, fd, EPOLLIN);
	if (err) {
		listener_close(s, cfg, inherited, fd);
		return errmsg_set(e, err, "socket %.108s: epoll: %s", cfg->path,
				  strerror(-err));
	}
	s->nr_listeners++;
	return 0;
}

void listeners_close(struct server *s)
{
	unsigned int i;

	for (i = 0; i < s->nr_listeners; i++) {
		struct listener *l = &s->listener[i];
		int fd = l->src.fd;

		if (fd < 0)
			continue;
		loop_del(s, &l->src);
		listener_close(s, l->cfg, l->inherited, fd);
	}
}

uint64_t listeners_run(struct server *s, uint64_t now)
{
	uint64_t due = DEADLINE_NONE;
	unsigned int i;

	for (i = 0; i < s->nr_listeners; i++) {
		struct listener *l = &s->listener[i];

		if (l->paused_ns && now >= l->paused_ns) {
			l->paused_ns = 0;
			loop_mod(s, &l->src, EPOLLIN);
		}
		if (l->paused_ns)
			due = min(due, l->paused_ns);
	}
	return due;
}
