/* SPDX-License-Identifier: Apache-2.0 */
/* Client sockets: listening, accepting, and what to do out of descriptors. */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "daemon/server/server.h"

#define PAUSE_NS	(100 * NSEC_PER_MSEC)
#define ACCEPTS		16	/* connections a socket and round */

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

int listener_add(struct server *s, const struct config_socket *cfg,
		 int inherited_fd, struct errmsg *e)
{
	struct listener *l = &s->listener[s->nr_listeners];
	int fd = inherited_fd, err;

	if (fd < 0) {
		fd = sock_listen(cfg->path, cfg->file_mode);
		if (fd < 0)
			return errmsg_set(e, fd, "socket %.108s: %s", cfg->path,
					  fd == -EADDRINUSE
					  ? "somebody else serves there"
					  : strerror(-fd));
	}
	*l = (struct listener){
		.src		= { .fd = -1, .ready = listener_ready },
		.server		= s,
		.ix		= s->nr_listeners,
		.cfg		= cfg,
		.inherited	= inherited_fd >= 0,
	};
	err = loop_add(s, &l->src, fd, EPOLLIN);
	if (err) {
		close(fd);
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
		if (!l->inherited)
			unlink(l->cfg->path);
		loop_del(s, &l->src);
		close(fd);
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
