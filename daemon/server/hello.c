/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hello: who may be a client, what is made for it, and the welcome that tells it
 * what there is. One that had a place with the last daemon may have it again:
 * resume.c.
 */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "daemon/server/server.h"
#include "ipc/base/fd.h"

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

void session_hello(struct session *ss, struct sock_msg *m)
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
