/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients of the last daemon's, and how they come again.
 *
 * A client is known to the next daemon by what was parked for it: its ledger and
 * its pidfd, as "client.N.ledger" and "client.N.pid", and a few bytes with mm's own
 * record. From these comes a session without a socket: its process may live, and
 * if it does not its pidfd says so at once. Then the client connects and says in
 * its hello which it was, with the secret that only its ledger has: it goes on, in
 * the same ledger, with the same windows and pins. So does one whose connection to
 * this daemon has ended without anybody's fault. One that has lost something (a
 * pool that was given up) is not taken back: it becomes a new client, and what it
 * was goes with its process.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

/* What the server wants to know of a client; lies in mm's record of it. */
struct session_kept {
	char		socket[64];
	uint64_t	secret[2];
	uint32_t	abi;
	int32_t		cred_pid, hello_pid;
	uint32_t	cred_uid;
	uint64_t	epoch;		/* that it was welcomed in */
	uint64_t	ledger_ino;
	uint8_t		foreign;
	uint8_t		spare[15];
};
static_assert(sizeof(struct session_kept) == MM_KEPT_BYTES, "adoption ABI");
static_assert(sizeof(((struct config_socket *)0)->name) <= 64,
	      "a socket's name fits");

/* -- keeping --------------------------------------------------------------------- */

/* Which memory it is, whatever it is called. */
static uint64_t fd_ino(int fd)
{
	struct stat st;

	return fstat(fd, &st) < 0 ? 0 : st.st_ino;
}

void session_keep(struct session *ss, int pidfd, uint8_t kept[MM_KEPT_BYTES])
{
	struct session_kept k = {
		.abi		= ss->abi,
		.cred_pid	= ss->cred_pid,
		.hello_pid	= ss->hello_pid,
		.cred_uid	= ss->cred_uid,
		.epoch		= ss->epoch,
		.ledger_ino	= fd_ino(ss->ledger_shm.fd),
		.foreign	= ss->foreign,
	};

	snprintf(k.socket, sizeof(k.socket), "%s", ss->via->cfg->name);
	memcpy(k.secret, ss->secret, sizeof(k.secret));
	memcpy(kept, &k, sizeof(k));
	park_put(ss->server->park, ss->ledger_shm.fd, "client.%u.ledger",
		 ss->no);
	park_put(ss->server->park, pidfd, "client.%u.pid", ss->no);
}

void session_unkeep(struct session *ss)
{
	park_drop(ss->server->park, "client.%u.ledger", ss->no);
	park_drop(ss->server->park, "client.%u.pid", ss->no);
}

static int keep_put(void *arg, int fd, const char *name)
{
	struct server *s = arg;

	return park_put(s->park, fd, "%s", name);
}

static void keep_drop(void *arg, const char *name)
{
	struct server *s = arg;

	park_drop(s->park, "%s", name);
}

static int keep_take(void *arg, const char *name)
{
	struct server *s = arg;

	return s->adopting ? park_take(s->park, name) : -ENOENT;
}

/*
 * Ranks tell by the epoch whether what they were told is of the memory that they
 * have. So where a part of it is new, whoever begins anew gets another one; who goes
 * on with all that it had keeps its own. It is in the header before anything is
 * forgotten by which a later daemon could see why.
 */
static void epoch_renew(struct server *s)
{
	if (!s->adopting || s->epoch == s->own_epoch)
		return;
	s->epoch = s->hdr->epoch = s->own_epoch;
	log_notice("not all of the last daemon's memory is there: clients that begin anew do so in epoch %016llx",
		   (unsigned long long)s->epoch);
}

static void keep_gave_up(void *arg, const char *sentence)
{
	epoch_renew(arg);
	log_warn("adopting: %s", sentence);
}

/* -- the header ------------------------------------------------------------------ */

static bool header_good(const struct kvmm_hdr *h)
{
	return h->magic == KVMM_MAGIC_HDR && h->size == sizeof(*h) &&
	       h->abi == KVMM_ABI_VERSION && h->epoch;
}

/*
 * A name that was dropped may still be there, for whoever keeps it was busy, and
 * would stand for what it stood for: no client gets the number of one that was.
 */
static void sessions_skip(struct server *s)
{
	struct park_iter it = PARK_ITER_INIT;
	unsigned int no;

	while (park_next(s->park, "client.", &it))
		if (sscanf(it.name, "client.%u.", &no) == 1)
			s->session_seq = max(s->session_seq, no);
}

int adopt_header(struct server *s)
{
	size_t bytes = round_up(sizeof(struct kvmm_hdr), 4096);
	int fd;

	sessions_skip(s);
	if (s->ladder && !s->ladder->adopt_pct)
		return -ENOENT;
	fd = park_take(s->park, "header");
	if (fd < 0)
		return -ENOENT;
	if (shm_adopt(&s->hdr_shm, fd, bytes, 1)) {
		log_warn("adopting: the header is not what it should be: starting empty");
	} else if (!header_good(s->hdr_shm.addr)) {
		log_warn("adopting: the header is of another kvmmd: starting empty");
		shm_fini(&s->hdr_shm);
	} else {
		s->hdr = s->hdr_shm.addr;
		s->own_epoch = s->epoch;
		s->epoch = s->hdr->epoch;
		s->adopting = true;
		return 0;
	}
	park_drop(s->park, "header");
	return -ENOENT;
}

/* -- sessions without a socket ---------------------------------------------------- */

static struct listener *listener_named(struct server *s, const char *name)
{
	unsigned int i;

	for (i = 0; i < s->nr_listeners; i++)
		if (!strcmp(s->listener[i].cfg->name, name))
			return &s->listener[i];
	return NULL;
}

static int take_fd_of(struct server *s, uint32_t no, const char *what)
{
	char name[PARK_NAME];

	snprintf(name, sizeof(name), "client.%u.%s", no, what);
	return park_take(s->park, name);
}

static int session_take(struct session *ss, uint64_t ledger_ino)
{
	struct server *s = ss->server;
	int fd, err;

	fd = take_fd_of(s, ss->no, "ledger");
	if (fd < 0)
		return fd;
	err = shm_adopt(&ss->ledger_shm, fd, ring_bytes(), 1);
	if (err)
		return err;
	if (fd_ino(ss->ledger_shm.fd) != ledger_ino)
		return -ESTALE;
	fd = take_fd_of(s, ss->no, "pid");
	if (fd < 0)
		return fd;
	if (!fd_is_pidfd(fd)) {
		close_fd(&fd);
		return -EPROTO;
	}
	err = loop_add(s, &ss->pid, fd, EPOLLIN);
	if (err) {
		close_fd(&fd);
		return err;
	}
	ring_adopt(ss);
	return 0;
}

static void session_forget(struct session *ss)
{
	int fd = ss->pid.fd;

	loop_del(ss->server, &ss->pid);
	session_unkeep(ss);
	close_fd(&fd);
	ss->state = SESSION_GONE;
	ss->server->sessions_doomed = true;
}

static int keep_client(void *arg, const struct mm_kept_client *kc,
		       struct mm_client_opts *o)
{
	struct server *s = arg;
	struct session_kept k;
	struct listener *via;
	struct session *ss;
	int err;

	memcpy(&k, kc->bytes, sizeof(k));
	k.socket[sizeof(k.socket) - 1] = '\0';
	via = listener_named(s, k.socket);
	if (!via)
		return -ENOENT;
	ss = session_new(s, via, kc->no);
	if (!ss)
		return -ENOMEM;
	ss->state = SESSION_CLOSED;
	ss->abi = k.abi;
	ss->cred_pid = k.cred_pid;
	ss->hello_pid = k.hello_pid;
	ss->cred_uid = k.cred_uid;
	ss->foreign = k.foreign;
	ss->epoch = k.epoch;
	memcpy(ss->secret, k.secret, sizeof(ss->secret));
	snprintf(ss->name, sizeof(ss->name), "%s", kc->name);
	s->session_seq = max(s->session_seq, kc->no);
	err = session_take(ss, k.ledger_ino);
	if (err) {
		session_forget(ss);
		return err;
	}
	o->tenant = via->cfg->tenant;
	o->socket = via->ix;
	o->rights = via->cfg->rights;
	o->mode = via->cfg->mode;
	o->ledger = &ss->ledger_shm;
	o->arg = ss;
	return 0;
}

static void keep_adopted(void *arg, struct mm_client *c, bool whole)
{
	struct session *ss = mm_client_arg(c);

	ss->mc = c;
	ss->resumable = whole;
	ss->adopted = true;
	if (whole)
		return;
	epoch_renew(ss->server);
	log_warn("client %u (%s) has lost a part of what it had: it will begin anew",
		 ss->no, ss->name);
}

static const struct mm_keep_ops keep_ops = {
	.put		= keep_put,
	.drop		= keep_drop,
	.take		= keep_take,
	.client		= keep_client,
	.adopted	= keep_adopted,
	.gave_up	= keep_gave_up,
};

const struct mm_keep_ops *server_keep_ops(const struct server *s)
{
	return s->park ? &keep_ops : NULL;
}

static void restore_win(struct mm_win *w, void *arg)
{
	struct session *ss = arg;

	if (mm_win_no(w) >= SESSION_MAX_WINS)
		return;
	ss->win[mm_win_no(w)] = w;
	ss->nr_wins++;
}

static void restore_wins(struct session *ss)
{
	memset(ss->win, 0, sizeof(ss->win));
	ss->nr_wins = 0;
	mm_client_windows(ss->mc, restore_win, ss);
}

/*
 * What the last daemon was to take back it is asked for again, now that no frame
 * has been handed out. For whom mm had no memory there is nothing to come back to.
 */
static void sessions_settle(struct server *s)
{
	struct session *ss;

	list_for_each_entry(ss, &s->sessions, link) {
		if (ss->state != SESSION_CLOSED)
			continue;
		if (!ss->mc) {
			session_forget(ss);
			continue;
		}
		restore_wins(ss);
		if (ring_resume(ss))
			ss->resumable = false;
	}
}

int adopt_clients(struct server *s, struct errmsg *e)
{
	struct mm_adopted *ad = &s->adopted;
	uint64_t began = now_ns();
	int err;

	err = mm_adopt(s->mm, s->ladder ? s->ladder->adopt_pct : 100, ad, e);
	if (err)
		return err;
	sessions_settle(s);
	s->adopt_ns = now_ns() - began;
	if (s->adopting)
		log_notice("adopted %u client%s, %u space%s, %u extent%s, %llu page%s in %llu ms; %llu wait for a node, %llu lost, %u piece%s given up",
			   ad->clients, ad->clients == 1 ? "" : "s", ad->spaces,
			   ad->spaces == 1 ? "" : "s", ad->extents,
			   ad->extents == 1 ? "" : "s",
			   (unsigned long long)ad->frames,
			   ad->frames == 1 ? "" : "s",
			   (unsigned long long)(s->adopt_ns / NSEC_PER_MSEC),
			   (unsigned long long)ad->waiting,
			   (unsigned long long)ad->lost, ad->gave_up,
			   ad->gave_up == 1 ? "" : "s");
	return 0;
}

/* -- coming again ---------------------------------------------------------------- */

/* The session that @h means, if it is @ss's process's to go on with. */
static struct session *resume_find(const struct session *ss,
				   const struct wire_hello *h)
{
	struct session *o;

	list_for_each_entry(o, &ss->server->sessions, link)
		if (o->no == h->client)
			break;
	if (&o->link == &ss->server->sessions ||
	    (o->state != SESSION_LIVE &&
	     !(o->state == SESSION_CLOSED && o->resumable)) ||
	    h->epoch != o->epoch ||
	    memcmp(o->secret, h->secret, sizeof(o->secret)))
		return NULL;
	/* of a foreign process its secret says enough, for it has no number */
	if (o->via != ss->via || o->cred_uid != ss->cred_uid ||
	    o->cred_pid != ss->cred_pid)
		return NULL;
	return o;
}

/* The connection becomes @o's. */
static int resume_move(struct session *ss, struct session *o, int *doorbell)
{
	struct server *s = ss->server;
	int fd = ss->sock.fd, err;

	o->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	*doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (o->notify_fd < 0 || *doorbell < 0) {
		err = -errno;
		close_fd(doorbell);
		goto out_notify;
	}
	err = loop_add(s, &o->bell, *doorbell, EPOLLIN | EPOLLET);
	if (err) {
		close_fd(doorbell);
		goto out_notify;
	}
	loop_del(s, &ss->sock);
	err = loop_add(s, &o->sock, fd, EPOLLIN);
	if (!err)
		return 0;
	/* it had a place in there a moment ago */
	loop_add(s, &ss->sock, fd, EPOLLIN);
	loop_del(s, &o->bell);
	close_fd(doorbell);
out_notify:
	close_fd(&o->notify_fd);
	return err;
}

static void resume_tell(struct session *ss, uint32_t seq)
{
	struct wire_resumed m = {
		.h	= { .type = WIRE_RESUMED, .len = sizeof(m), .seq = seq },
		.joined	= mm_client_joined(ss->mc),
		.nr_spaces = ss->nr_spaces,
	};
	unsigned int i;

	session_tell_members(ss);
	for (i = 0; i < ss->nr_spaces; i++) {
		session_tell_index(ss, ss->space[i]);
		m.space[i] = (uint16_t)mm_space_ix(ss->space[i]);
	}
	for (i = 0; i < SESSION_MAX_WINS; i++) {
		if (!ss->win[i])
			continue;
		peers_opened(ss, ss->win[i]);
		m.win[i / 64] |= BIT(i % 64);
	}
	session_send(ss, &m.h, NULL, 0);
}

bool session_resume(struct session *ss, const struct wire_hello *h, int pidfd)
{
	struct session *o = resume_find(ss, h);
	struct server *s = ss->server;
	int doorbell, err;

	/* its own process has exited, whoever speaks now */
	if (!o || fd_pidfd_dead(o->pid.fd) > 0)
		return false;
	if (o->state == SESSION_LIVE) {
		/* it has hung up there, and we have not got to that */
		session_send_error(ss, h->h.seq, -EAGAIN,
				   "the former connection is not closed yet");
		session_over(ss);
		return true;
	}
	o->resumable = false;
	restore_wins(o);
	err = ring_resume(o);
	if (!err)
		err = mm_client_back(o->mc);
	if (!err) {
		err = resume_move(ss, o, &doorbell);
		if (err)
			mm_client_disconnect(o->mc);
	}
	if (err) {
		log_warn("client %u (%s) cannot go on: %s", o->no, o->name,
			 strerror(-err));
		return false;
	}
	ss->state = SESSION_GONE;
	s->sessions_doomed = true;
	o->hello_pid = ss->hello_pid;
	o->over = o->told_off = false;
	o->doom = REJECT_NONE;
	o->ring.marked = false;
	o->nr_told = 0;
	o->nr_spaces = mm_client_spaces(o->mc, o->space, SESSION_MAX_SPACES);
	memset(o->space_epoch, 0, sizeof(o->space_epoch));
	session_welcomed(o);
	s->watch[o->watch_ix].head = o->ring.sq_head;
	s->resumed++;
	send_welcome(o, h->h.seq, doorbell, WIRE_WELCOME_RESUMED |
		     (o->adopted ? WIRE_WELCOME_ADOPTED : 0));
	resume_tell(o, h->h.seq);
	mm_step_done(o->mc);
	return true;
}
