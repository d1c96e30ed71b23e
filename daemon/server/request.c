/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Control messages. A message that libkvmm could not have sent - an unknown
 * type, another length than its type has, a request before hello - ends the
 * connection. What a user may get wrong is answered by WIRE_ERROR with an errno
 * and a sentence.
 */
#include <errno.h>
#include <string.h>

#include "daemon/server/server.h"

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
	[WIRE_HELLO]	= { session_hello, WIRE_HELLO_SHORT, .open = true, .max_fds = 1 },
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
