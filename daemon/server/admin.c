/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The administration socket: newline-ended JSON objects over a Unix stream, one
 * reply a request, in order. Only its owner can open it (mode 0600). What
 * happens in a request is admin_cmd.c's.
 *
 * Nobody here can hold the loop up: a connection has one buffer for its request
 * and one reply on its way, each with a deadline, and there are few of them.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <jansson.h>
#include <kvmm/admin.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define MAX_CONNS	16
#define IDLE_NS		(60 * NSEC_PER_SEC)
#define REQUEST_NS	(5 * NSEC_PER_SEC)	/* to finish a line begun */
#define PAUSE_NS	(100 * NSEC_PER_MSEC)
#define REPLY_NS	(30 * NSEC_PER_SEC)	/* to take a reply */

/**
 * struct admin_conn - one connection
 * @in:		KVMM_ADMIN_MAX_REQUEST bytes, @in_len of them filled
 * @out:	the reply on its way, or NULL
 * @last:	close when @out is out: the peer ended, or broke a rule
 */
struct admin_conn {
	struct source	src;
	struct admin	*admin;
	struct list	link;
	char		*in, *out;
	size_t		in_len, out_len, out_pos;
	uint64_t	deadline_ns;
	bool		last, dead;
};

struct admin {
	struct server	*server;
	struct source	src;
	struct list	conns;
	unsigned int	nr_conns;
	int		spare_fd;
	uint64_t	paused_ns;
	char		path[CONFIG_SUN_PATH];
};

/* -- connections ------------------------------------------------------------------- */

static void conn_end(struct admin_conn *c)
{
	int fd = c->src.fd;

	loop_del(c->admin->server, &c->src);
	close_fd(&fd);
	c->dead = true;
}

static void conn_free(struct admin_conn *c)
{
	c->admin->nr_conns--;
	list_del(&c->link);
	free(c->in);
	free(c->out);
	free(c);
}

static const char no_memory[] =
	"{\"ok\": false, \"errno\": 12, \"error\": \"out of memory\"}\n";
static const char too_long[] =
	"{\"ok\": false, \"errno\": 90, \"error\": \"the reply is larger than "
	"64 MiB\"}\n";

/* Takes @reply over. */
static void conn_reply(struct admin_conn *c, json_t *reply)
{
	char *text = reply ? json_dumps(reply, JSON_COMPACT) : NULL;
	size_t len = text ? strlen(text) : 0;

	json_decref(reply);
	if (text && len + 1 <= KVMM_ADMIN_MAX_REPLY) {
		text[len++] = '\n';	/* in the NUL's place: a length goes along */
	} else {
		const char *why = text ? too_long : no_memory;

		free(text);
		text = strdup(why);
		len = text ? strlen(text) : 0;
	}
	if (!text) {
		conn_end(c);
		return;
	}
	c->out = text;
	c->out_len = len;
	c->out_pos = 0;
	c->deadline_ns = deadline_in(REPLY_NS);
}

static json_t *refusal(int err, const char *sentence)
{
	return json_pack("{s:b, s:i, s:s}", "ok", 0, "errno", -err,
			 "error", sentence);
}

static void conn_request(struct admin_conn *c, const char *line, size_t len)
{
	json_error_t je;
	json_t *req = json_loadb(line, len, JSON_REJECT_DUPLICATES, &je);
	char text[256];

	if (!json_is_object(req)) {
		snprintf(text, sizeof(text), "not a JSON object: %.180s",
			 req ? "another kind of value" : je.text);
		conn_reply(c, refusal(-EINVAL, text));
	} else {
		conn_reply(c, admin_execute(c->admin->server, req));
	}
	json_decref(req);
}

/* True when it is all out. */
static bool conn_write(struct admin_conn *c)
{
	while (c->out_pos < c->out_len) {
		ssize_t n = send(c->src.fd, c->out + c->out_pos,
				 c->out_len - c->out_pos,
				 MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno != EAGAIN)
			conn_end(c);
		if (n < 0)
			return false;
		c->out_pos += (size_t)n;
	}
	free(c->out);
	c->out = NULL;
	return true;
}

/* The next line that is complete; the bytes stay until it was answered. */
static bool conn_line(struct admin_conn *c)
{
	char *nl = memchr(c->in, '\n', c->in_len);
	size_t len;

	if (!nl) {
		if (c->in_len < KVMM_ADMIN_MAX_REQUEST)
			return false;
		conn_reply(c, refusal(-EMSGSIZE,
				      "the request is longer than 65536 bytes"));
		c->last = true;
		c->in_len = 0;
		return true;
	}
	len = (size_t)(nl - c->in);
	conn_request(c, c->in, len);
	c->in_len -= len + 1;
	memmove(c->in, nl + 1, c->in_len);
	return true;
}

static void conn_read(struct admin_conn *c)
{
	while (!c->last && c->in_len < KVMM_ADMIN_MAX_REQUEST) {
		ssize_t n = recv(c->src.fd, c->in + c->in_len,
				 KVMM_ADMIN_MAX_REQUEST - c->in_len,
				 MSG_DONTWAIT);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return;
		if (n <= 0) {
			c->last = true;
			return;
		}
		if (!c->in_len)
			c->deadline_ns = deadline_in(REQUEST_NS);
		c->in_len += (size_t)n;
	}
}

static void conn_ready(struct source *src, uint32_t events)
{
	struct admin_conn *c = container_of(src, struct admin_conn, src);
	struct server *s = c->admin->server;

	if (!c->out)
		conn_read(c);
	/* one request a round: the rings come first */
	if (c->out || conn_line(c)) {
		if (!c->dead && !conn_write(c) && !c->dead)
			loop_mod(s, &c->src, EPOLLOUT);
		if (c->dead || c->out)
			return;
	}
	if (c->in_len && memchr(c->in, '\n', c->in_len)) {
		loop_mod(s, &c->src, EPOLLOUT);	/* at once, for the next one */
		return;
	}
	if (c->last) {
		conn_end(c);
		return;
	}
	if (!c->in_len)
		c->deadline_ns = deadline_in(IDLE_NS);
	loop_mod(s, &c->src, EPOLLIN);
}

static void conn_accept(struct admin *a, int fd)
{
	static const char full[] = "{\"ok\": false, \"errno\": 87, \"error\": "
				   "\"too many administrators\"}\n";
	struct admin_conn *c = NULL;

	if (a->nr_conns < MAX_CONNS)
		c = calloc(1, sizeof(*c));
	if (c)
		c->in = malloc(KVMM_ADMIN_MAX_REQUEST);
	if (!c || !c->in) {
		send(fd, full, sizeof(full) - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
		goto out;
	}
	c->admin = a;
	c->src = (struct source){ .fd = -1, .ready = conn_ready };
	c->deadline_ns = deadline_in(IDLE_NS);
	if (loop_add(a->server, &c->src, fd, EPOLLIN))
		goto out;
	list_add_tail(&a->conns, &c->link);
	a->nr_conns++;
	return;

out:
	if (c)
		free(c->in);
	free(c);
	close(fd);
}

/*
 * When descriptors have run out, somebody will want to know why: one is kept in
 * reserve for that.
 */
static void admin_ready(struct source *src, uint32_t events)
{
	struct admin *a = container_of(src, struct admin, src);
	int fd = sock_accept(src->fd);

	if (fd == -EMFILE && a->spare_fd >= 0) {
		close_fd(&a->spare_fd);
		fd = sock_accept(src->fd);
	}
	if (fd >= 0) {
		conn_accept(a, fd);
		return;
	}
	if (fd == -EAGAIN)
		return;
	if (log_pass(&a->server->accept_rate))
		log_err("admin socket: accept: %s", strerror(-fd));
	a->paused_ns = deadline_in(PAUSE_NS);
	loop_mod(a->server, &a->src, 0);
}

uint64_t admin_run(struct admin *a, uint64_t now_ns)
{
	uint64_t due = DEADLINE_NONE;
	struct admin_conn *c, *tmp;

	list_for_each_entry_safe(c, tmp, &a->conns, link) {
		if (!c->dead && now_ns >= c->deadline_ns)
			conn_end(c);
		if (c->dead)
			conn_free(c);
		else
			due = min(due, c->deadline_ns);
	}
	if (a->spare_fd < 0 && !a->nr_conns)
		a->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (a->paused_ns && now_ns >= a->paused_ns) {
		a->paused_ns = 0;
		loop_mod(a->server, &a->src, EPOLLIN);
	}
	return a->paused_ns ? min(due, a->paused_ns) : due;
}

/* -- the socket ----------------------------------------------------------------------- */

/* Remove what a dead daemon left there: a socket that refuses, nothing else. */
static int remove_stale(const struct sockaddr_un *sa)
{
	struct stat st;
	int fd, err;

	if (lstat(sa->sun_path, &st) < 0)
		return errno == ENOENT ? 0 : -errno;
	if (!S_ISSOCK(st.st_mode))
		return -EADDRINUSE;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	err = connect(fd, (const void *)sa, sizeof(*sa)) < 0 ? -errno : 0;
	close(fd);
	if (err != -ECONNREFUSED)
		return -EADDRINUSE;
	return unlink(sa->sun_path) < 0 && errno != ENOENT ? -errno : 0;
}

static int admin_listen(const char *path)
{
	struct sockaddr_un sa = { .sun_family = AF_UNIX };
	int fd, err;

	memcpy(sa.sun_path, path, min(strlen(path) + 1, sizeof(sa.sun_path)));
	err = remove_stale(&sa);
	if (err)
		return err;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return -errno;
	/* bind() takes the mode from the socket: never open to others */
	if (fchmod(fd, 0600) < 0 || bind(fd, (void *)&sa, sizeof(sa)) < 0) {
		err = -errno;
		goto out_close;
	}
	if (chmod(path, 0600) < 0 || listen(fd, MAX_CONNS) < 0) {
		err = -errno;
		goto out_unlink;
	}
	return fd;

out_unlink:
	unlink(path);
out_close:
	close(fd);
	return err;
}

int admin_create(struct server *s, const char *path, struct admin **ret,
		 struct errmsg *e)
{
	struct admin *a = calloc(1, sizeof(*a));
	int fd, err;

	if (!a)
		return errmsg_set(e, -ENOMEM, "out of memory");
	a->server = s;
	a->src = (struct source){ .fd = -1, .ready = admin_ready };
	list_init(&a->conns);
	a->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	snprintf(a->path, sizeof(a->path), "%s", path);
	fd = admin_listen(path);
	err = fd < 0 ? fd : loop_add(s, &a->src, fd, EPOLLIN);
	if (err) {
		if (fd >= 0) {
			unlink(path);
			close(fd);
		}
		close_fd(&a->spare_fd);
		free(a);
		return errmsg_set(e, err, "admin socket %.108s: %s", path,
				  err == -EADDRINUSE
				  ? "somebody else serves there"
				  : strerror(-err));
	}
	*ret = a;
	return 0;
}

void admin_destroy(struct admin *a)
{
	struct admin_conn *c;
	int fd;

	if (!a)
		return;
	while ((c = list_first(&a->conns, struct admin_conn, link))) {
		if (!c->dead)
			conn_end(c);
		conn_free(c);
	}
	fd = a->src.fd;
	unlink(a->path);
	loop_del(a->server, &a->src);
	close_fd(&fd);
	close_fd(&a->spare_fd);
	free(a);
}
