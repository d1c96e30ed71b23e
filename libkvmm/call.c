/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Set-up calls: one request, its reply, by a deadline.
 *
 * One at a time: who begins a call owns the socket, others wait for it by their
 * own deadline. No lock is held meanwhile, so that completions go on.
 *
 * A reply that comes after its call has given up may say that the daemon has
 * something for us that nobody here knows of: a window, an attachment. That is
 * given back, and its descriptors are closed.
 */
#include <poll.h>
#include <string.h>

#include "libkvmm/lib.h"

int kvmm_call_begin(struct kvmm *k, uint64_t *deadline)
{
	int err = 0;

	if (kvmm_forked(k))
		return kvmm_fail_forked();
	*deadline = deadline_in(k->call_timeout_ns);
	kvmm_lock(&k->lock);
	while (k->calling && !err)
		err = kvmm_cond_wait(&k->cond, &k->lock, *deadline);
	if (k->calling)
		err = kvmm_fail(-ETIMEDOUT, "another call is waiting");
	else if (k->state != CONN_UP)
		err = kvmm_fail(-ENOTCONN, "no daemon at %s", k->path);
	else
		err = 0;
	k->calling = k->calling || !err;
	kvmm_unlock(&k->lock);
	return err;
}

void kvmm_call_leave(struct kvmm *k, struct kvmm_leaving *l)
{
	uint64_t deadline = deadline_in(k->call_timeout_ns);
	bool mine;
	int err = 0;

	kvmm_lock(&k->lock);
	while (k->calling && !err)
		err = kvmm_cond_wait(&k->cond, &k->lock, deadline);
	mine = !k->calling;
	if (mine)
		k->calling = true;
	else
		list_add_tail(&k->leaving, &l->link);
	if (k->state != CONN_UP)
		deadline = 0;
	kvmm_unlock(&k->lock);
	if (!mine)
		return;
	l->fn(l, deadline);
	kvmm_call_end(k);
}

/*
 * Those who could not wait for this call to end. They are told to the daemon
 * and no answer is waited for: that would be this call's time.
 */
static void run_leaving(struct kvmm *k) __must_hold(&k->lock)
{
	struct errmsg said = *kvmm_errmsg();
	struct kvmm_leaving *l;

	while ((l = list_first(&k->leaving, struct kvmm_leaving, link))) {
		uint64_t deadline = k->state == CONN_UP ? now_ns() : 0;

		list_del(&l->link);
		kvmm_unlock(&k->lock);
		l->fn(l, deadline);
		kvmm_lock(&k->lock);
	}
	*kvmm_errmsg() = said;
}

void kvmm_call_end(struct kvmm *k)
{
	sock_msg_close_fds(k->msg);
	kvmm_lock(&k->lock);
	if (!list_empty(&k->leaving))
		run_leaving(k);
	k->calling = false;
	k->call_seq = 0;
	kvmm_reap(k);
	/* all of them: one that gives up would not pass it on */
	kvmm_cond_broadcast(&k->cond);
	kvmm_unlock(&k->lock);
}

/* -- replies that nobody waits for ------------------------------------------------ */

static bool attached_here(struct kvmm *k, uint32_t ix)
{
	struct kvmm_space *sp;

	list_for_each_entry(sp, &k->spaces, link) {
		struct kvmm_att *a = atomic_load_explicit(&sp->att,
						memory_order_relaxed);

		if (a && a->ix == ix && a->era == kvmm_era_now(k))
			return true;
	}
	return false;
}

static void give_back(struct kvmm *k, uint16_t type, uint16_t what)
{
	struct wire_win w = {
		.h	= { .type = type, .len = sizeof(w), .seq = ++k->seq },
		.win	= what,
	};

	/* a full socket: then the daemon keeps it until we are gone */
	sock_send(k->sock, &w.h, NULL, 0);
}

static void late_reply(struct kvmm *k, const struct sock_msg *m)
{
	const struct wire_hdr *h = (const struct wire_hdr *)m->buf;

	switch (h->type) {
	case WIRE_WINDOW:
		if (m->len < sizeof(struct wire_window))
			break;
		give_back(k, WIRE_WIN_CLOSE,
			  ((const struct wire_window *)m->buf)->win);
		/* the daemon has refused, or will, to open it twice */
		if (k->calling && k->call_seq && k->call_type == WIRE_WIN_OPEN)
			k->call_again = true;
		break;
	case WIRE_ATTACHED: {
		const struct wire_attached *a =
			(const struct wire_attached *)m->buf;

		/* an attach under way is answered with the same space */
		if (m->len >= sizeof(*a) && !attached_here(k, a->space) &&
		    !(k->calling && k->call_type == WIRE_ATTACH))
			give_back(k, WIRE_DETACH, a->space);
		break;
	}
	case WIRE_OK:
		if (k->join_seq && h->seq == k->join_seq)
			kvmm_conn_joined(k);
		break;
	}
}

static int unasked(struct kvmm *k, struct sock_msg *m, int err)
{
	const struct wire_hdr *h = (const struct wire_hdr *)m->buf;

	switch (h->type) {
	case WIRE_MEMBER:
		return err ? err : kvmm_era_member(k->next ? k->next :
						   kvmm_era_now(k), m);
	case WIRE_INDEX:
		return err ? err : kvmm_space_index(k, m);
	case WIRE_PEER:
		return err ? err : kvmm_view_peer(k, m);
	default:
		return 0;	/* of a newer daemon: none of our business */
	}
}

int kvmm_call_stray(struct kvmm *k, struct sock_msg *m, int err)
{
	const struct wire_hdr *h = (const struct wire_hdr *)m->buf;

	if (h->seq) {
		late_reply(k, m);
		err = 0;
	} else {
		err = unasked(k, m, err);
	}
	sock_msg_close_fds(m);
	return err;
}

/* -- the call --------------------------------------------------------------------- */

static int lost(struct kvmm *k)
{
	kvmm_lock(&k->lock);
	kvmm_conn_lost(k);
	kvmm_unlock(&k->lock);
	return kvmm_fail(-ENOTCONN, "the daemon at %s is gone", k->path);
}

static int timed_out(const struct kvmm *k)
{
	return kvmm_fail(-ETIMEDOUT, "the daemon at %s does not answer", k->path);
}

static int call_send(struct kvmm *k, struct wire_hdr *h, uint64_t deadline)
{
	int err;

	if (k->sock < 0)
		return kvmm_fail(-ENOTCONN, "no daemon at %s", k->path);
	h->seq = ++k->seq;
	k->call_seq = h->seq;
	k->call_type = h->type;
	k->call_again = false;
	for (;;) {
		err = sock_send(k->sock, h, NULL, 0);
		if (err != -EAGAIN)
			break;
		err = sock_wait(k->sock, POLLOUT, deadline);
		if (err)
			break;
	}
	if (err == -EPIPE)
		return lost(k);
	if (err == -ETIMEDOUT)
		return timed_out(k);
	return err ? kvmm_fail(err, "cannot send: %s", strerror(-err)) : 0;
}

static int call_reply(struct kvmm *k, uint16_t reply, size_t min_bytes)
{
	const struct wire_hdr *h = (const struct wire_hdr *)k->msg->buf;
	const struct wire_error *e = (const struct wire_error *)k->msg->buf;

	if (h->type == WIRE_ERROR && k->msg->len >= sizeof(*e))
		return kvmm_fail(e->err < 0 ? e->err : -EPROTO, "%.*s",
				 WIRE_SENTENCE_BYTES, e->sentence);
	if (h->type != reply || k->msg->len < min_bytes)
		return kvmm_fail(-EPROTO,
			"the daemon answered with message %u of %zu bytes",
			h->type, k->msg->len);
	return 0;
}

int kvmm_call_more(struct kvmm *k, uint16_t reply, size_t min_bytes,
		   uint64_t deadline)
{
	const struct wire_hdr *h = (const struct wire_hdr *)k->msg->buf;
	int err;

	for (;;) {
		sock_msg_close_fds(k->msg);
		if (k->call_again)
			return -EAGAIN;
		err = sock_recv(k->sock, k->msg);
		if (err == -EAGAIN) {
			err = sock_wait(k->sock, POLLIN, deadline);
			if (err == -ETIMEDOUT)
				return timed_out(k);
			if (!err)
				continue;
		}
		if (err == -EMFILE && h->seq == k->call_seq) {
			/* nothing can be made of what it grants */
			late_reply(k, k->msg);
			k->call_again = false;
			return kvmm_fail(err,
				"no descriptors left for the daemon's answer");
		}
		if (!err && h->seq == k->call_seq)
			return call_reply(k, reply, min_bytes);
		if (err && err != -EMFILE)
			return lost(k);
		if (kvmm_call_stray(k, k->msg, err))
			return lost(k);
	}
}

int kvmm_call(struct kvmm *k, struct wire_hdr *h, uint16_t reply,
	      size_t min_bytes, uint64_t deadline)
{
	int err;

	do {
		err = call_send(k, h, deadline);
		if (!err)
			err = kvmm_call_more(k, reply, min_bytes, deadline);
	} while (err == -EAGAIN && k->call_again);
	return err;
}
