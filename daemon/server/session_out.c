/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a session sends: set-up messages, of which a client that does not read
 * can make only so many wait.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "daemon/server/server.h"
#include "ipc/base/fd.h"

#define SLOW_NS		(5 * NSEC_PER_SEC)	/* to read what waits */
#define OUT_MAX		1024
#define OUT_MAX_FDS	2048

void session_mail(struct session *ss)
{
	struct ledger *l = ss->ledger_shm.addr;

	/* release: pairs with kvmm_conn_run(), which then finds the message */
	if (l)
		atomic_fetch_add_explicit(&l->mail, 1, memory_order_release);
}

/* A message that the socket did not take; owns its descriptors. */
struct out_msg {
	struct list	link;
	unsigned int	nr_fds;
	int		fd[WIRE_MAX_FDS];
	_Alignas(16) uint8_t buf[];
};

static void out_free(struct session *ss, struct out_msg *m)
{
	ss->nr_out--;
	ss->out_fds -= m->nr_fds;
	list_del(&m->link);
	close_fds(m->fd, m->nr_fds);
	free(m);
}

void session_watch_sock(struct session *ss)
{
	/* hanging up is told in any case; an edge, since it is not read */
	uint32_t events = ss->nr_out	 ? EPOLLOUT | EPOLLET
			  : ss->ring.marked ? EPOLLET
					    : EPOLLIN;

	loop_mod(ss->server, &ss->sock, events);
}

/*
 * While something waits no request is read, so a client that does not read is
 * asked to wait by its own full socket. Writability alone is no signal: the
 * kernel also refuses while too many descriptors are in flight, hence the
 * retries by time.
 */
static int out_queue(struct session *ss, const struct wire_hdr *h,
		     const int *fds, unsigned int nr_fds)
{
	struct out_msg *m;
	unsigned int i;

	if (ss->nr_out >= OUT_MAX || ss->out_fds + nr_fds > OUT_MAX_FDS) {
		session_doom(ss, REJECT_SLOW, "%u messages wait for it",
			     ss->nr_out);
		return -ENOBUFS;
	}
	m = malloc(sizeof(*m) + h->len);
	if (!m)
		goto out_nomem;
	list_init(&m->link);
	memcpy(m->buf, h, h->len);
	m->nr_fds = nr_fds;
	for (i = 0; i < nr_fds; i++) {
		m->fd[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
		if (m->fd[i] < 0) {
			close_fds(m->fd, i);
			free(m);
			goto out_nomem;
		}
	}
	list_add_tail(&ss->out, &m->link);
	ss->nr_out++;
	ss->out_fds += nr_fds;
	if (ss->nr_out == 1) {
		uint64_t now = now_ns();

		ss->deadline_ns = now + SLOW_NS;
		ss->retry_ns = now + SESSION_RETRY_NS;
		sessions_arm(ss->server, ss->retry_ns);
		session_watch_sock(ss);
	}
	return 0;

out_nomem:
	session_doom(ss, REJECT_NOMEM, "no memory for a message");
	return -ENOMEM;
}

int session_send(struct session *ss, struct wire_hdr *h, const int *fds,
		 unsigned int nr_fds)
{
	int err;

	if (ss->sock.fd < 0 || ss->doom || ss->over)
		return -EPIPE;
	if (!ss->nr_out) {
		err = sock_send(ss->sock.fd, h, fds, nr_fds);
		if (!err) {
			session_mail(ss);
			return 0;
		}
		if (err != -EAGAIN) {
			session_over(ss);
			return err;
		}
	}
	return out_queue(ss, h, fds, nr_fds);
}

void session_flush(struct session *ss)
{
	struct out_msg *m;
	int err = 0;

	if (!ss->nr_out || ss->doom || ss->over)
		return;
	while ((m = list_first(&ss->out, struct out_msg, link))) {
		err = sock_send(ss->sock.fd, (struct wire_hdr *)m->buf, m->fd,
				m->nr_fds);
		if (err)
			break;
		session_mail(ss);
		out_free(ss, m);
		ss->deadline_ns = now_ns() + SLOW_NS;
	}
	if (!err)
		session_watch_sock(ss);
	else if (err != -EAGAIN)
		session_over(ss);
}

void wire_error_fill(struct wire_error *m, uint32_t seq, int err,
		       const char *sentence)
{
	*m = (struct wire_error){
		.h	= { .type = WIRE_ERROR, .len = sizeof(*m), .seq = seq },
		.err	= err,
	};
	snprintf(m->sentence, sizeof(m->sentence), "%s", sentence);
}

void session_send_error(struct session *ss, uint32_t seq, int err,
			const char *sentence)
{
	struct wire_error m;

	wire_error_fill(&m, seq, err, sentence);
	ss->told_off = !session_send(ss, &m.h, NULL, 0);
}

void session_out_drop(struct session *ss)
{
	struct out_msg *m;

	while ((m = list_first(&ss->out, struct out_msg, link)))
		out_free(ss, m);
}
