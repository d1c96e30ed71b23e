/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control messages. A message that libkvmm could not have sent - an unknown
 * type, another length than its type has, a request before hello - ends the
 * connection. What a user may get wrong is answered by WIRE_ERROR with an errno
 * and a sentence.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define EXTENTS_MAX	WIRE_MAX_FDS	/* changes in one WIRE_EXTENTS */

static void reply_ok(struct session *ss, uint32_t seq, uint64_t value)
{
	struct wire_ok m = {
		.h	= { .type = WIRE_OK, .len = sizeof(m), .seq = seq },
		.value	= value,
	};

	session_send(ss, &m.h, NULL, 0);
}

static void reply_error(struct session *ss, uint32_t seq, int err,
			const struct errmsg *e)
{
	session_send_error(ss, seq, err,
			   e->text[0] ? e->text : strerror(-err));
}

/* -- hello ---------------------------------------------------------------------------- */

static void wire_node_fill(struct server *s, unsigned int ix,
			   struct wire_node *n)
{
	struct mm_node_stat st;

	mm_node_stat(s->mm, ix, &st);
	*n = (struct wire_node){
		.kind		= st.kind,
		.below		= st.below,
		.gang		= st.gang,
		.state		= (uint8_t)st.node->state,
		.size_bytes	= st.node->capacity,
		.extent_bytes	= s->cfg.node[ix].extent_bytes,
	};
	snprintf(n->name, sizeof(n->name), "%.15s", st.node->name);
}

int send_welcome(struct session *ss, uint32_t seq, int doorbell,
		 uint32_t flags)
{
	struct server *s = ss->server;
	size_t bytes = sizeof(struct wire_welcome) +
		       s->nr_nodes * sizeof(struct wire_node);
	_Alignas(16) uint8_t buf[sizeof(struct wire_welcome) +
				 KVMM_MAX_NODES * sizeof(struct wire_node)];
	struct wire_welcome *w = (void *)buf;
	const int fds[] = {
		s->hdr_shm.ro_fd, ss->ledger_shm.fd, doorbell, ss->notify_fd,
	};
	unsigned int i;

	memset(buf, 0, sizeof(buf));
	w->h = (struct wire_hdr){
		.type = WIRE_WELCOME, .len = (uint32_t)bytes, .seq = seq,
	};
	w->abi = ss->abi;
	w->client = ss->no;
	w->epoch = ss->epoch;
	snprintf(w->tenant, sizeof(w->tenant), "%s", ss->via->cfg->tenant);
	snprintf(w->version, sizeof(w->version), "%s", KVMM_VERSION_STRING);
	w->rights = ss->via->cfg->rights;
	w->nr_nodes = s->nr_nodes;
	w->max_requests = s->cfg.max_requests;
	w->flags = flags;
	for (i = 0; i < s->nr_nodes; i++) {
		wire_node_fill(s, i, &w->node[i]);
		if (w->node[i].kind == KVMM_NODE_NVME)
			w->features |= KVMM_FEAT_NVME;
	}
	return session_send(ss, &w->h, fds, ARRAY_SIZE(fds));
}

/* Its memory was not given back: the process lives, and may read on. */
static unsigned int nr_old(const struct session *ss)
{
	const struct session *o;
	unsigned int n = 0;

	list_for_each_entry(o, &ss->server->sessions, link)
		n += o->state == SESSION_CLOSED && o->via == ss->via &&
		     o->cred_uid == ss->cred_uid &&
		     o->cred_pid == ss->cred_pid &&
		     (o->cred_pid || o->hello_pid == ss->hello_pid);
	return n;
}

/*
 * Clients of one socket: the others keep a small share each, so that one tenant
 * cannot lock the rest out. Those that hung up and live on count, too.
 */
static bool socket_full(const struct session *ss)
{
	const struct server *s = ss->server;
	uint32_t share = min(s->cfg.max_clients / s->nr_listeners,
			     (uint32_t)LISTENER_SHARE);
	uint32_t most = s->cfg.max_clients - share * (s->nr_listeners - 1);
	const struct session *o;
	uint32_t n = 0;

	list_for_each_entry(o, &s->sessions, link)
		n += o->via == ss->via && o->state != SESSION_GREETING;
	return n >= most;
}

static enum reject hello_judge(struct session *ss, const struct wire_hello *h,
			       bool again, struct errmsg *e)
{
	struct server *s = ss->server;
	uint32_t top = min(h->abi_max, KVMM_ABI_VERSION);

	if (h->abi_min > h->abi_max || top < max(h->abi_min, KVMM_ABI_MIN)) {
		errmsg_set(e, -EPROTO, "kvmmd %s speaks ABI %u to %u, this "
			   "client %u to %u", KVMM_VERSION_STRING,
			   KVMM_ABI_MIN, KVMM_ABI_VERSION, h->abi_min,
			   h->abi_max);
		return REJECT_ABI;
	}
	ss->abi = top;
	if (again)
		return REJECT_NONE;
	if (s->nr_sessions - s->nr_greeting >= s->cfg.max_clients) {
		errmsg_set(e, -EUSERS, "there are %u clients already "
			   "(limits.max_clients)", s->cfg.max_clients);
		return REJECT_FULL;
	}
	if (socket_full(ss)) {
		errmsg_set(e, -EUSERS, "this socket has as many clients as it "
			   "may: the rest of limits.max_clients is for others");
		return REJECT_FULL;
	}
	return REJECT_NONE;
}

static int hello_errno(enum reject why)
{
	switch (why) {
	case REJECT_ABI:
		return -EPROTO;
	case REJECT_FULL:
		return -EUSERS;
	case REJECT_IDENTITY:
		return -EACCES;
	default:
		return -ENOMEM;
	}
}

/* Ledger, eventfds, mm's client. The session cleans up what is in it. */
static int hello_make(struct session *ss, int pidfd, int *doorbell)
{
	struct server *s = ss->server;
	const struct config_socket *via = ss->via->cfg;
	struct mm_client_opts o = {
		.tenant	= via->tenant,
		.name	= ss->name,
		.socket	= ss->via->ix,
		.rights	= via->rights,
		.mode	= via->mode,
		.pid	= ss->cred_pid ? ss->cred_pid : ss->hello_pid,
		.no	= ss->no,
		.ledger	= &ss->ledger_shm,
		.arg	= ss,
	};
	uint8_t kept[MM_KEPT_BYTES];
	int err;

	err = ring_init(ss);
	if (err)
		return err;
	ss->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	*doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (ss->notify_fd < 0 || *doorbell < 0) {
		err = -errno;
		close_fd(doorbell);
		return err;
	}
	err = loop_add(s, &ss->bell, *doorbell, EPOLLIN | EPOLLET);
	if (err) {
		close_fd(doorbell);
		return err;
	}
	err = loop_add(s, &ss->pid, pidfd, EPOLLIN);
	if (err)
		return err;
	session_keep(ss, pidfd, kept);
	o.kept = kept;
	err = mm_client_create(s->mm, &o, &ss->mc);
	if (err)
		session_unkeep(ss);
	return err;
}

/* It will stand in logs, in JSON and on terminals. */
static void take_name(struct session *ss, const struct wire_hello *h)
{
	size_t i;

	static_assert(sizeof(ss->name) > sizeof(h->name), "room for the end");
	for (i = 0; i < sizeof(h->name) && h->name[i]; i++)
		ss->name[i] = h->name[i] < 0x20 || h->name[i] > 0x7e
			      ? '?' : h->name[i];
	ss->name[i] = '\0';
}

static void do_hello(struct session *ss, struct sock_msg *m)
{
	const struct wire_hello *h = (const void *)m->buf;
	bool again = m->len == sizeof(*h) && h->client;
	struct errmsg e = { "" };
	enum reject why;
	int pidfd = -1, doorbell = -1, err;

	if (m->len != sizeof(*h) && m->len != WIRE_HELLO_SHORT) {
		session_doom(ss, REJECT_MSG_SHORT, "%zu bytes of type %u",
			     m->len, h->h.type);
		return;
	}
	take_name(ss, h);
	ss->hello_pid = (pid_t)h->pid;
	/* who comes again has its place already */
	why = hello_judge(ss, h, again, &e);
	if (why)
		goto refuse;
	why = REJECT_IDENTITY;
	pidfd = session_identify(ss, ss->sock.fd,
				 m->nr_fds ? m->fd[0] : -1, &e);
	if (pidfd < 0)
		goto refuse;
	if (again && session_resume(ss, h, pidfd)) {
		close_fd(&pidfd);
		return;
	}
	if (again)
		why = hello_judge(ss, h, false, &e);
	if (again && why)
		goto refuse;
	if (nr_old(ss) >= SESSION_MAX_OLD) {
		why = REJECT_FULL;
		errmsg_set(&e, 0, "this process still maps what %u earlier "
			   "connections gave it", SESSION_MAX_OLD);
		goto refuse;
	}
	err = hello_make(ss, pidfd, &doorbell);
	if (err) {
		why = REJECT_NOMEM;
		errmsg_set(&e, 0, "a new client: %s", strerror(-err));
		/* a pidfd that epoll has is the session's already */
		if (ss->pid.fd >= 0)
			pidfd = -1;
		goto refuse;
	}
	session_welcomed(ss);
	send_welcome(ss, h->h.seq, doorbell, 0);
	return;

refuse:
	close_fd(&pidfd);
	session_send_error(ss, h->h.seq, hello_errno(why), e.text);
	session_doom(ss, why, "%s", e.text);
}

/* -- engines and spaces ---------------------------------------------------------------- */

static void do_join(struct session *ss, struct sock_msg *m)
{
	const struct wire_join *j = (const void *)m->buf;
	struct errmsg e = { "" };
	int err;

	err = mm_client_join(ss->mc, j->token, j->rank, j->world, j->flags, &e);
	if (err) {
		reply_error(ss, j->h.seq, err, &e);
		return;
	}
	reply_ok(ss, j->h.seq, 0);
	session_tell_members(ss);
}

struct space_count {
	const uint8_t	*id;
	unsigned int	n;
	bool		found;
};

static void count_space(const struct mm_space_info *si, void *arg)
{
	struct space_count *c = arg;

	c->n++;
	c->found |= !memcmp(si->id, c->id, sizeof(si->id));
}

/* Would this attach make a space too many? */
static bool spaces_full(struct session *ss, const uint8_t *desc, size_t len)
{
	struct server *s = ss->server;
	struct space_count c = { .n = 0 };
	uint8_t id[32];

	if (s->cfg.max_spaces >= KVMM_MAX_SPACES)
		return false;		/* mm's own limit */
	desc_space_id(desc, len, ss->via->cfg->tenant, id);
	c.id = id;
	mm_for_each_space(s->mm, count_space, &c);
	return !c.found && c.n >= s->cfg.max_spaces;
}

static int attach(struct session *ss, const struct wire_attach *a,
		  struct mm_space **sp, struct errmsg *e)
{
	if (ss->nr_spaces >= SESSION_MAX_SPACES)
		return errmsg_set(e, -EUSERS, "a client attaches at most %u "
				  "spaces", SESSION_MAX_SPACES);
	if (spaces_full(ss, a->desc, a->desc_len))
		return errmsg_set(e, -EUSERS, "there are %u spaces already "
				  "(limits.max_spaces)",
				  ss->server->cfg.max_spaces);
	return mm_attach(ss->mc, a->desc, a->desc_len, a->flags, sp, e);
}

static void do_attach(struct session *ss, struct sock_msg *m)
{
	const struct wire_attach *a = (const void *)m->buf;
	struct errmsg e = { "" };
	struct mm_space *sp;
	struct wire_attached r;
	int err;

	if (m->len - sizeof(*a) != a->desc_len) {
		session_doom(ss, REJECT_MSG_SHORT,
			     "a descriptor of %u bytes in %zu", a->desc_len,
			     m->len);
		return;
	}
	err = attach(ss, a, &sp, &e);
	if (err) {
		reply_error(ss, a->h.seq, err, &e);
		return;
	}
	ss->space[ss->nr_spaces] = sp;
	ss->space_epoch[ss->nr_spaces++] = mm_space_index_epoch(sp);
	r = (struct wire_attached){
		.h		= { .type = WIRE_ATTACHED, .len = sizeof(r),
				    .seq = a->h.seq },
		.space		= mm_space_ix(sp),
		.index_epoch	= mm_space_index_epoch(sp),
		.index_bytes	= mm_space_index(sp)->bytes,
	};
	memcpy(r.id, mm_space_id(sp), sizeof(r.id));
	session_send(ss, &r.h, &mm_space_index(sp)->ro_fd, 1);
}

/* The place in ss->space of the space with this index in the header, or -1. */
static int space_find(const struct session *ss, uint32_t ix)
{
	unsigned int i;

	for (i = 0; i < ss->nr_spaces; i++)
		if (mm_space_ix(ss->space[i]) == ix)
			return (int)i;
	return -1;
}

static bool space_has_wins(const struct session *ss, const struct mm_space *sp)
{
	unsigned int i;

	for (i = 0; i < SESSION_MAX_WINS; i++)
		if (ss->win[i] && mm_win_space(ss->win[i]) == sp)
			return true;
	return false;
}

static const struct errmsg no_space = { "this client has no such space" };
static const struct errmsg no_window = { "this client has no such window" };

/*
 * Entries of the ring name windows and spaces by number, and a number that is
 * free is given again. So what frees one waits until the entries that were
 * posted before it are taken, in the rounds of the ring and as far as those go:
 * that may be long if the client does not take its answers.
 */
static void wait_for_ring(struct session *ss, const struct wire_win *r)
{
	ss->late = *r;
	if (ring_mark(ss))
		session_watch_sock(ss);
	else if (!ss->doom)
		session_late(ss);
}

static void leave_space(struct session *ss, const struct wire_win *r)
{
	int at = space_find(ss, r->win);

	mm_detach(ss->mc, ss->space[at]);
	ss->nr_spaces--;
	ss->space[at] = ss->space[ss->nr_spaces];
	ss->space_epoch[at] = ss->space_epoch[ss->nr_spaces];
	reply_ok(ss, r->h.seq, 0);
}

static void do_detach(struct session *ss, struct sock_msg *m)
{
	const struct wire_win *r = (const void *)m->buf;
	int at = space_find(ss, r->win);
	struct errmsg e = { "" };

	if (at < 0) {
		reply_error(ss, r->h.seq, -EINVAL, &no_space);
		return;
	}
	if (space_has_wins(ss, ss->space[at])) {
		errmsg_set(&e, 0, "the space has open windows");
		reply_error(ss, r->h.seq, -EBUSY, &e);
		return;
	}
	wait_for_ring(ss, r);
}

/* -- windows ----------------------------------------------------------------------------- */

static int win_open(struct session *ss, const struct wire_win_open *r,
		    struct mm_win **w, struct errmsg *e)
{
	int at = space_find(ss, r->space);
	uint32_t rights = r->rights ? r->rights : ss->via->cfg->rights;

	if (at < 0)
		return errmsg_set(e, -EINVAL, "%s", no_space.text);
	if (rights != KVMM_RO && rights != KVMM_RW)
		return errmsg_set(e, -EINVAL, "rights are 1 (ro) or 2 (rw)");
	if (rights == KVMM_RW && ss->via->cfg->rights == KVMM_RO)
		return errmsg_set(e, -EACCES, "this socket grants reading only");
	return mm_win_open(ss->mc, ss->space[at], r->cls, r->node, rights, w,
			   e);
}

static void do_win_open(struct session *ss, struct sock_msg *m)
{
	const struct wire_win_open *r = (const void *)m->buf;
	struct errmsg e = { "" };
	struct wire_window reply;
	struct mm_win *w;
	int err, fds[2];

	err = win_open(ss, r, &w, &e);
	if (!err && mm_win_no(w) >= SESSION_MAX_WINS) {
		mm_win_close(w);
		err = -EUSERS;
	}
	if (err) {
		reply_error(ss, r->h.seq, err, &e);
		return;
	}
	ss->win[mm_win_no(w)] = w;
	ss->nr_wins++;
	reply = (struct wire_window){
		.h		= { .type = WIRE_WINDOW, .len = sizeof(reply),
				    .seq = r->h.seq },
		.win		= mm_win_no(w),
		.table_bytes	= mm_win_table(w)->bytes,
		.ledger_bytes	= mm_win_ledger(w)->bytes,
		.flags		= mm_win_blind(w) ? WIRE_WINDOW_BLIND : 0,
		.part_off	= mm_win_part(w),
	};
	fds[0] = mm_win_table(w)->ro_fd;
	fds[1] = mm_win_ledger(w)->fd;
	session_send(ss, &reply.h, fds, 2);
	peers_opened(ss, w);
}

static struct mm_win *win_find(const struct session *ss,
			       const struct wire_win *r)
{
	return r->win < SESSION_MAX_WINS ? ss->win[r->win] : NULL;
}

static int send_extents(struct session *ss, uint32_t seq, uint64_t ext_seq,
			const struct mm_extent_change *ch, unsigned int n,
			bool more)
{
	_Alignas(16) uint8_t buf[sizeof(struct wire_extents) +
				 EXTENTS_MAX * sizeof(struct wire_extent)];
	struct wire_extents *r = (void *)buf;
	int fds[EXTENTS_MAX];
	unsigned int i, nr_fds = 0;

	memset(buf, 0, sizeof(*r));
	r->h.type = WIRE_EXTENTS;
	r->h.seq = seq;
	r->h.len = (uint32_t)(sizeof(*r) + n * sizeof(r->ext[0]));
	r->seq = ext_seq;
	r->n = n;
	r->more = more;
	for (i = 0; i < n; i++) {
		r->ext[i] = (struct wire_extent){ .no = ch[i].no,
						  .up = ch[i].up };
		if (ch[i].fd >= 0)
			fds[nr_fds++] = ch[i].fd;
	}
	return session_send(ss, &r->h, fds, nr_fds);
}

/*
 * All batches go out in one call: what the socket does not take waits in the
 * session's queue with descriptors of its own, so that nothing that changes
 * meanwhile can come between two batches of one exchange.
 */
static void do_win_sync(struct session *ss, struct sock_msg *m)
{
	const struct wire_win *r = (const void *)m->buf;
	struct mm_win *w = win_find(ss, r);
	struct mm_extent_change ch[EXTENTS_MAX];
	unsigned int skip = 0, n;
	uint64_t seq;

	if (!w) {
		reply_error(ss, r->h.seq, -EINVAL, &no_window);
		return;
	}
	do {
		n = mm_win_sync(w, r->have_seq, skip, ch, EXTENTS_MAX, &seq);
		skip += n;
		if (send_extents(ss, r->h.seq, seq, ch, n, n == EXTENTS_MAX))
			return;
	} while (n == EXTENTS_MAX);
}

static void close_window(struct session *ss, const struct wire_win *r)
{
	struct mm_win *w = win_find(ss, r);

	peers_closed(ss, w);
	ring_win_closed(ss, w);
	ss->win[r->win] = NULL;
	ss->nr_wins--;
	mm_win_close(w);
	reply_ok(ss, r->h.seq, 0);
}

static void do_win_close(struct session *ss, struct sock_msg *m)
{
	const struct wire_win *r = (const void *)m->buf;

	if (win_find(ss, r))
		wait_for_ring(ss, r);
	else
		reply_error(ss, r->h.seq, -EINVAL, &no_window);
}

void session_late(struct session *ss)
{
	bool waited = ss->ring.marked;

	ss->ring.marked = false;
	ss->server->dirty = true;
	if (ss->late.h.type == WIRE_WIN_CLOSE)
		close_window(ss, &ss->late);
	else
		leave_space(ss, &ss->late);
	if (waited)
		session_watch_sock(ss);
}

static void do_reserve(struct session *ss, struct sock_msg *m)
{
	const struct wire_reserve *r = (const void *)m->buf;
	int at = space_find(ss, r->space), err;
	struct errmsg e = { "" };

	if (at < 0) {
		reply_error(ss, r->h.seq, -EINVAL, &no_space);
		return;
	}
	err = mm_reserve(ss->mc, ss->space[at], r->cls, r->node, r->frames, &e);
	if (err)
		reply_error(ss, r->h.seq, err, &e);
	else
		reply_ok(ss, r->h.seq, 0);
}

/* -- which is which ------------------------------------------------------------------------ */

/**
 * struct request - one type of message
 * @bytes:	its length; with @open the least
 * @open:	variable data follows
 * @max_fds:	descriptors that may come with it
 */
static const struct request {
	void		(*fn)(struct session *ss, struct sock_msg *m);
	uint16_t	bytes;
	bool		open;
	uint8_t		max_fds;
} requests[] = {
	[WIRE_HELLO]	= { do_hello, WIRE_HELLO_SHORT, .open = true, .max_fds = 1 },
	[WIRE_JOIN]	= { do_join, sizeof(struct wire_join) },
	[WIRE_ATTACH]	= { do_attach, sizeof(struct wire_attach), .open = true },
	[WIRE_DETACH]	= { do_detach, sizeof(struct wire_win) },
	[WIRE_WIN_OPEN]	= { do_win_open, sizeof(struct wire_win_open) },
	[WIRE_WIN_SYNC]	= { do_win_sync, sizeof(struct wire_win) },
	[WIRE_WIN_CLOSE] = { do_win_close, sizeof(struct wire_win) },
	[WIRE_RESERVE]	= { do_reserve, sizeof(struct wire_reserve) },
};

void session_request(struct session *ss, struct sock_msg *m)
{
	const struct wire_hdr *h = (const void *)m->buf;
	const struct request *r;

	if (h->type >= ARRAY_SIZE(requests) || !requests[h->type].fn) {
		session_doom(ss, REJECT_MSG_TYPE, "type %u does not exist",
			     h->type);
		return;
	}
	r = &requests[h->type];
	if ((ss->state == SESSION_GREETING) != (h->type == WIRE_HELLO)) {
		session_doom(ss, REJECT_MSG_TYPE, "type %u %s hello", h->type,
			     ss->state == SESSION_GREETING ? "before"
							   : "is a second");
		return;
	}
	if (m->len < r->bytes || (!r->open && m->len > r->bytes)) {
		session_doom(ss, REJECT_MSG_SHORT, "%zu bytes of type %u",
			     m->len, h->type);
		return;
	}
	if (m->nr_fds > r->max_fds) {
		session_doom(ss, REJECT_MSG_BAD, "%u descriptors with type %u",
			     m->nr_fds, h->type);
		return;
	}
	ss->server->dirty = true;
	r->fn(ss, m);
}
