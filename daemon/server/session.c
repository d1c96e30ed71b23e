/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session is a client process, and its life is the process's, not the
 * socket's:
 *
 *	GREETING -> LIVE -> CLOSED -> EXITING -> GONE
 *	    |         \________________^
 *	    \-> GONE
 *
 * A closed socket ends what the client can ask for; what it has pinned stays
 * until its pidfd says that the process is gone, since it may still read. One
 * exception: a process that is an engine of one, and has closed all its windows
 * before it hung up, reads nothing any more and goes at once. So a process may open and close connections as often as it likes, while
 * one that keeps tearing them open is refused after %SESSION_MAX_OLD.
 *
 * Nothing is freed, and no socket is closed, in the middle of a round: who must
 * go is marked (session_doom(), over) and reaped at its end. So any function
 * here may be called from any callback.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define HELLO_NS	(2 * NSEC_PER_SEC)
#define MESSAGES	8	/* of one client a round */

static const struct {
	const char	*name;
	const char	*text;
} rejects[NR_REJECTS] = {
	[REJECT_NONE]		= { "none", "nothing" },
	[REJECT_HELLO_LATE]	= { "hello_late", "said no hello in 2 s" },
	[REJECT_IDENTITY]	= { "identity", "cannot be identified" },
	[REJECT_ABI]		= { "abi", "speaks another ABI" },
	[REJECT_FULL]		= { "full", "too many clients" },
	[REJECT_MSG_BAD]	= { "msg_bad", "sent what is not a message" },
	[REJECT_MSG_TYPE]	= { "msg_type", "sent a message out of place" },
	[REJECT_MSG_SHORT]	= { "msg_short", "sent a message of a wrong length" },
	[REJECT_SLOW]		= { "slow", "does not read its socket" },
	[REJECT_SQ_TAIL]	= { "sq_tail", "wrote an impossible submission tail" },
	[REJECT_CQ_HEAD]	= { "cq_head", "wrote an impossible completion head" },
	[REJECT_SQE_OP]		= { "sqe_op", "submitted an unknown operation" },
	[REJECT_SQE_ARRAY]	= { "sqe_array", "submitted an array out of bounds" },
	[REJECT_SQE_KEY]	= { "sqe_key", "asked in a group that is not there" },
	[REJECT_SQE_FRAME]	= { "sqe_frame", "freed a frame that is not its own" },
	[REJECT_NOTIFY]		= { "notify", "made its wake-up block" },
	[REJECT_LIMIT]		= { "limit", "is over a limit" },
	[REJECT_NOMEM]		= { "nomem", "the daemon is out of memory or descriptors" },
};

const char *reject_name(enum reject why)
{
	return rejects[why].name;
}

const char *reject_text(enum reject why)
{
	return rejects[why].text;
}

void server_reject(struct server *s, enum reject why)
{
	s->c.reject[why]++;
}

/* Hung up, or as good as: nobody is to blame. */
void session_over(struct session *ss)
{
	ss->over = true;
	ss->server->sessions_doomed = true;
}

void session_doom(struct session *ss, enum reject why, const char *fmt, ...)
{
	struct server *s = ss->server;
	va_list ap;

	if (ss->doom || ss->over || ss->state > SESSION_LIVE)
		return;
	ss->doom = why;
	va_start(ap, fmt);
	vsnprintf(ss->doom_text, sizeof(ss->doom_text), fmt, ap);
	va_end(ap);
	s->sessions_doomed = true;
	server_reject(s, why);
	if (log_pass(&s->reject_rate[why]))
		log_warn("client %u (%s, pid %d, tenant %s) %s: %s: disconnected",
			 ss->no, ss->name[0] ? ss->name : "no name",
			 (int)(ss->cred_pid ? ss->cred_pid : ss->hello_pid),
			 ss->via->cfg->tenant, reject_text(why), ss->doom_text);
}

/* -- members and indexes ------------------------------------------------------------- */

static int told_find(const struct session *ss, uint32_t no)
{
	unsigned int i;

	for (i = 0; i < ss->nr_told; i++)
		if (ss->told[i] == no)
			return (int)i;
	return -1;
}

void session_tell_member(struct session *ss, struct session *peer, bool gone)
{
	struct wire_member m = {
		.h	= { .type = WIRE_MEMBER, .len = sizeof(m) },
		.rank	= mm_client_rank(peer->mc),
		.flags	= mm_client_flags(peer->mc),
		.world	= mm_client_world(peer->mc),
		.gone	= gone,
		.ledger_bytes = peer->ledger_shm.bytes,
	};
	int at = told_find(ss, peer->no);

	/* mm tells of changes, a join of everybody: once is enough */
	if (ss->state != SESSION_LIVE || ss == peer || gone != (at >= 0))
		return;
	if (gone)
		ss->told[at] = ss->told[--ss->nr_told];
	else if (ss->nr_told < ARRAY_SIZE(ss->told))
		ss->told[ss->nr_told++] = peer->no;
	session_send(ss, &m.h, &peer->ledger_shm.ro_fd, gone ? 0 : 1);
}

static void tell_one(struct mm_client *peer, void *arg)
{
	session_tell_member(arg, mm_client_arg(peer), false);
}

void session_tell_members(struct session *ss)
{
	mm_client_members(ss->mc, tell_one, ss);
}

void session_tell_index(struct session *ss, struct mm_space *sp)
{
	const struct shm *ix = mm_space_index(sp);
	struct wire_index m = {
		.h	= { .type = WIRE_INDEX, .len = sizeof(m) },
		.space	= mm_space_ix(sp),
		.epoch	= mm_space_index_epoch(sp),
		.bytes	= ix->bytes,
	};
	unsigned int i;

	for (i = 0; i < ss->nr_spaces; i++) {
		if (ss->space[i] != sp || ss->space_epoch[i] == m.epoch)
			continue;
		ss->space_epoch[i] = m.epoch;
		session_send(ss, &m.h, &ix->ro_fd, 1);
	}
}

/* -- receiving ----------------------------------------------------------------------- */

/* What is left of a message's descriptors. */
static void drop_fds(struct session *ss, struct sock_msg *m)
{
	int fd;

	while ((fd = sock_msg_take_fd(m)) >= 0)
		foreign_close(fd, ss->via->ix);
}

/* A pidfd comes with hello, nothing with anything else. */
static int recv_one(struct session *ss, struct sock_msg *m)
{
	bool hello = ss->state == SESSION_GREETING;
	bool room = hello && foreign_room(ss->via->ix);
	int err = sock_recv_max(ss->sock.fd, m, room);

	/* that is what a hello with its pidfd is then, and others as well */
	return err == -EPROTO && hello && !room ? -ENFILE : err;
}

static void sock_ready(struct source *src, uint32_t events)
{
	struct session *ss = container_of(src, struct session, sock);
	struct sock_msg *m = &ss->server->msg;
	unsigned int i;

	if (events & EPOLLOUT)
		session_flush(ss);
	for (i = 0; i < MESSAGES && !ss->nr_out && !ss->ring.marked; i++) {
		int err;

		if (ss->doom || ss->over)
			return;
		err = recv_one(ss, m);
		if (err == -EAGAIN)
			return;
		if (err == -EPROTO)
			session_doom(ss, REJECT_MSG_BAD, "%s", "bad packet");
		else if (err == -EMFILE)
			session_doom(ss, REJECT_NOMEM, "out of descriptors");
		else if (err == -ENFILE)
			session_doom(ss, REJECT_NOMEM, "%u files that came "
				     "through its socket cannot be closed",
				     FOREIGN_CLOSERS);
		else if (err)
			session_over(ss);
		else
			session_request(ss, m);
		drop_fds(ss, m);
	}
	if (!(events & (EPOLLHUP | EPOLLERR)))
		return;
	if (ss->nr_out)
		session_over(ss);
	else if (ss->ring.marked)
		session_late(ss);	/* its ring ends with its socket */
}

/* Nobody reads the eventfd: an edge a write is all that is wanted. */
static void bell_ready(struct source *src, uint32_t events)
{
	struct session *ss = container_of(src, struct session, bell);

	ss->server->c.doorbells++;
	if (ss->state == SESSION_LIVE)
		mm_step_done(ss->mc);
}

static void pid_ready(struct source *src, uint32_t events)
{
	session_exited(container_of(src, struct session, pid));
}

/* -- the beginning -------------------------------------------------------------------- */

static void session_free(struct session *ss)
{
	list_del(&ss->link);
	ss->server->nr_sessions--;
	shm_fini(&ss->ledger_shm);
	close_fd(&ss->pidfd);
	free(ss);
}

/* Refuse before there is a session; the peer may or may not read it. */
static void refuse(struct server *s, int fd, enum reject why, int err,
		   const char *sentence)
{
	struct wire_error m;

	server_reject(s, why);
	if (log_pass(&s->reject_rate[why]))
		log_warn("connection refused: %s", sentence);
	wire_error_fill(&m, 0, err, sentence);
	sock_send(fd, &m.h, NULL, 0);
}

struct session *session_new(struct server *s, struct listener *via,
			    uint32_t no)
{
	struct session *ss = calloc(1, sizeof(*ss));

	if (!ss)
		return NULL;
	ss->server = s;
	ss->via = via;
	ss->no = no;
	ss->epoch = s->epoch;
	ss->state = SESSION_GREETING;
	ss->sock = ss->pid = ss->bell = (struct source)SOURCE_INIT;
	ss->sock.ready = sock_ready;
	ss->pid.ready = pid_ready;
	ss->bell.ready = bell_ready;
	ss->notify_fd = -1;
	ss->pidfd = -1;
	ss->ledger_shm = (struct shm)SHM_INIT;
	ss->watch_ix = -1;
	ss->since_ns = now_ns();
	list_init(&ss->out);
	list_init(&ss->ring.held);
	list_init(&ss->ring.backlog);
	list_add_tail(&s->sessions, &ss->link);
	s->nr_sessions++;
	return ss;
}

int session_create(struct server *s, struct listener *via, int fd,
		   struct session **ret)
{
	struct session *ss;
	int err;

	if (via->greeting >= LISTENER_MAX_GREETING) {
		refuse(s, fd, REJECT_FULL, -EUSERS,
		       "too many connections have not said hello yet");
		close(fd);
		return -EUSERS;
	}
	ss = session_new(s, via, ++s->session_seq);
	if (!ss) {
		close(fd);
		return -ENOMEM;
	}
	ss->deadline_ns = ss->since_ns + HELLO_NS;
	err = loop_add(s, &ss->sock, fd, EPOLLIN);
	if (err) {
		close(fd);
		session_free(ss);
		return err;
	}
	s->nr_greeting++;
	via->greeting++;
	via->sessions++;
	via->accepted++;
	s->c.accepted++;
	sessions_arm(s, ss->deadline_ns);
	if (ret)
		*ret = ss;
	return 0;
}

void session_welcomed(struct session *ss)
{
	struct server *s = ss->server;
	struct watch *w = &s->watch[s->nr_watch];

	ss->watch_ix = (int)s->nr_watch++;
	*w = (struct watch){
		.tail	= &ss->ring.ledger->sq.tail,
		.ss	= ss,
	};
	s->nr_greeting--;
	ss->via->greeting--;
	ss->state = SESSION_LIVE;
	sessions_arm(s, s->pins_due);
	log_info("client %u (%s, pid %d, uid %u) connected to %s%s", ss->no,
		 ss->name, (int)(ss->cred_pid ? ss->cred_pid : ss->hello_pid),
		 (unsigned int)ss->cred_uid, ss->via->cfg->name,
		 ss->foreign ? ", from another PID namespace" : "");
}

/* -- the end -------------------------------------------------------------------------- */

static void close_source(struct session *ss, struct source *src)
{
	int fd = src->fd;

	loop_del(ss->server, src);
	close_fd(&fd);
}

static void watch_remove(struct session *ss)
{
	struct server *s = ss->server;
	struct watch *last;

	if (ss->watch_ix < 0)
		return;
	last = &s->watch[--s->nr_watch];
	s->watch[ss->watch_ix] = *last;
	last->ss->watch_ix = ss->watch_ix;
	ss->watch_ix = -1;
}

static void session_done(void *arg)
{
	struct session *ss = arg;

	session_unkeep(ss);
	close_fd(&ss->pidfd);

	log_info("client %u (%s) is gone", ss->no, ss->name);
	ss->mc = NULL;
	ss->state = SESSION_GONE;
	ss->server->sessions_doomed = true;
	ss->server->c.exited++;
}

static void session_exit(struct session *ss)
{
	/* the descriptor is parked until mm is done with it: session_done() */
	ss->pidfd = ss->pid.fd;
	loop_del(ss->server, &ss->pid);
	ss->state = SESSION_EXITING;
	mm_client_exit(ss->mc, session_done, ss);
}

static void count_one(struct mm_client *peer, void *arg)
{
	++*(unsigned int *)arg;
}

/* Is it all there is of its engine, now and as far as it said? */
static bool session_alone(const struct session *ss)
{
	unsigned int n = 0;

	mm_client_members(ss->mc, count_one, &n);
	return !n && mm_client_world(ss->mc) <= 1;
}

/* The socket ends; @exited: so has the process. */
static void session_close(struct session *ss, bool exited)
{
	struct server *s = ss->server;
	bool alone;

	close_source(ss, &ss->sock);
	session_mail(ss);
	close_source(ss, &ss->bell);
	session_out_drop(ss);
	ss->via->sessions--;
	s->c.submissions += ss->ring.submissions;
	s->c.completions += ss->ring.completions;
	s->c.wakes += ss->ring.wakes;
	if (ss->state == SESSION_GREETING) {
		s->nr_greeting--;
		ss->via->greeting--;
		close_source(ss, &ss->pid);
		close_fd(&ss->notify_fd);
		ss->state = SESSION_GONE;
		s->sessions_doomed = true;
		return;
	}
	watch_remove(ss);
	ring_fini(ss);
	ss->state = SESSION_CLOSED;
	alone = session_alone(ss);
	mm_client_disconnect(ss->mc);
	close_fd(&ss->notify_fd);
	/* who was cut off has lost its right to go on */
	ss->resumable = !ss->doom;
	if (exited || (!ss->nr_wins && alone))
		session_exit(ss);
}

void session_exited(struct session *ss)
{
	if (ss->state == SESSION_GREETING || ss->state == SESSION_LIVE)
		session_close(ss, true);
	else if (ss->state == SESSION_CLOSED)
		session_exit(ss);
}

static void session_cut(struct session *ss)
{
	struct wire_error m;
	char text[WIRE_SENTENCE_BYTES];

	/* a hello that was refused has had its answer */
	if (ss->doom && !(ss->told_off && ss->state == SESSION_GREETING)) {
		snprintf(text, sizeof(text), "disconnected: %s: %.150s",
			 reject_text(ss->doom), ss->doom_text);
		wire_error_fill(&m, 0, -EPROTO, text);
		/* a last word for its log, if it still listens */
		sock_send(ss->sock.fd, &m.h, NULL, 0);
	}
	session_close(ss, false);
}

void sessions_reap(struct server *s)
{
	struct session *ss, *tmp;

	while (s->sessions_doomed) {
		/* ending one may wake or end others of its engine */
		s->sessions_doomed = false;
		list_for_each_entry_safe(ss, tmp, &s->sessions, link) {
			if ((ss->doom || ss->over) && ss->sock.fd >= 0)
				session_cut(ss);
			if (ss->state == SESSION_GONE)
				session_free(ss);
		}
	}
}

void sessions_close(struct server *s)
{
	struct session *ss, *tmp;

	list_for_each_entry_safe(ss, tmp, &s->sessions, link)
		if (ss->sock.fd >= 0)
			session_close(ss, false);
}

void sessions_free(struct server *s)
{
	struct session *ss;

	while ((ss = list_first(&s->sessions, struct session, link))) {
		close_source(ss, &ss->pid);
		session_free(ss);
	}
}

/* -- time ----------------------------------------------------------------------------- */

void sessions_arm(struct server *s, uint64_t deadline_ns)
{
	s->sessions_due = min(s->sessions_due, deadline_ns);
}

static uint64_t session_run(struct session *ss, uint64_t now)
{
	if (ss->sock.fd < 0 || ss->doom || ss->over)
		return DEADLINE_NONE;
	if (ss->nr_out && now >= ss->retry_ns) {
		session_flush(ss);
		ss->retry_ns = now + SESSION_RETRY_NS;
	}
	if (!ss->nr_out && ss->state != SESSION_GREETING)
		return DEADLINE_NONE;
	if (now >= ss->deadline_ns) {
		if (ss->nr_out)
			session_doom(ss, REJECT_SLOW, "%u messages wait for it",
				     ss->nr_out);
		else
			session_doom(ss, REJECT_HELLO_LATE, "silent");
		return DEADLINE_NONE;
	}
	return ss->nr_out ? min(ss->retry_ns, ss->deadline_ns)
			  : ss->deadline_ns;
}

uint64_t sessions_run(struct server *s, uint64_t now)
{
	uint64_t due = min(pins_watch(s, now), listeners_run(s, now));
	struct session *ss;

	list_for_each_entry(ss, &s->sessions, link)
		due = min(due, session_run(ss, now));
	return due;
}
