/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An era that goes on: the daemon is another process, and all the rest is as it
 * was.
 *
 * A daemon that has taken over its predecessor's memory keeps its epoch, and with
 * that everything that was made under it: header, ledgers, frame tables, windows,
 * and the pins in them, which hold all along. So a client that comes again names
 * the ledger that it has; if the daemon has it, too, only the socket and the two
 * eventfds are new. They take the places of the old ones under the same numbers,
 * since other threads may be about to use those.
 *
 * The same goes for a daemon that is still the same one, when the connection to it
 * has ended without our being cut off.
 *
 * What was in flight has ended when the connection did. The daemon does nothing of
 * what was posted to its predecessor, but for frames that were given back; so when
 * it says that all is told (WIRE_RESUMED), the ring is empty and both sides begin
 * there. Windows and spaces that were closed here while nobody was there to be
 * told, or whose opening was never answered, are closed now.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

#define ASK_MAX		50		/* tries, which is five seconds at least */

bool kvmm_resume_ask(struct kvmm *k, struct wire_hello *h)
{
	const struct kvmm_era *e = kvmm_era_now(k);

	/* one that hangs up each time does not know what we ask for */
	if (!e || k->anew || kvmm_era_over(e) || k->asked >= ASK_MAX)
		return false;
	k->asked++;
	h->epoch = e->epoch;
	h->client = e->client;
	memcpy(h->secret, e->secret, sizeof(h->secret));
	return true;
}

/* Views of an attachment that are open, of all spaces in @e. */
static struct kvmm_att *att_of(const struct kvmm_space *sp,
			       const struct kvmm_era *e)
{
	struct kvmm_att *a = atomic_load_explicit(
			&((struct kvmm_space *)sp)->att, memory_order_relaxed);

	return a && a->era == e ? a : NULL;
}

static int swap_fd(int have, int fd)
{
	int err = fd < 0 ? -EPROTO : 0;

	if (!err && dup3(fd, have, O_CLOEXEC) < 0)
		err = -errno;
	close_fd(&fd);
	return err;
}

int kvmm_resume_begin(struct kvmm *k)
{
	const struct wire_welcome *w = (const struct wire_welcome *)k->msg->buf;
	struct kvmm_era *e = kvmm_era_now(k);
	struct kvmm_space *sp;
	struct kvmm_view *v;
	struct kvmm_att *a;
	int fd, i, err;

	if (!e || w->epoch != e->epoch || w->client != e->client ||
	    w->nr_nodes != e->info.nr_nodes)
		return -EPROTO;
	/* header and ledger: we have them mapped */
	for (i = 0; i < 2; i++) {
		fd = sock_msg_take_fd(k->msg);
		close_fd(&fd);
	}
	/* a former try may have got as far as that */
	kvmm_conn_unwatch(k, e->notify);
	err = swap_fd(e->doorbell, sock_msg_take_fd(k->msg));
	if (!err)
		err = swap_fd(e->notify, sock_msg_take_fd(k->msg));
	if (err)
		return err;
	list_for_each_entry(sp, &k->spaces, link) {
		a = att_of(sp, e);
		for (v = a ? a->views : NULL; v; v = v->next)
			kvmm_view_peers_stale(v);
	}
	k->adopted = w->flags & WIRE_WELCOME_ADOPTED;
	k->state = CONN_RESUME;
	return 0;
}

/* -- what both sides have --------------------------------------------------------- */

static bool take_bit(uint64_t *map, unsigned int bit)
{
	bool was = map[bit / 64] >> (bit % 64) & 1;

	map[bit / 64] &= ~(UINT64_C(1) << (bit % 64));
	return was;
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

/* Takes what we have out of @r; false: the daemon lacks something. */
static bool both_have(struct kvmm *k, const struct kvmm_era *e,
		      struct wire_resumed *r)
{
	struct kvmm_space *sp;
	struct kvmm_view *v;
	struct kvmm_att *a;
	unsigned int i;

	if (!r->joined != !k->joined)
		return false;
	list_for_each_entry(sp, &k->spaces, link) {
		a = att_of(sp, e);
		if (!a)
			continue;
		for (i = 0; i < r->nr_spaces && r->space[i] != a->ix; i++)
			;
		if (i == r->nr_spaces)
			return false;
		r->space[i] = r->space[--r->nr_spaces];
		for (v = a->views; v; v = v->next)
			if (v->no >= 64 * ARRAY_SIZE(r->win) ||
			    !take_bit(r->win, v->no))
				return false;
	}
	return true;
}

/* Windows first: a space is left without any. */
static void close_the_rest(struct kvmm *k, struct wire_resumed *r)
{
	unsigned int i;

	for (i = 0; i < 64 * ARRAY_SIZE(r->win); i++)
		if (take_bit(r->win, i))
			give_back(k, WIRE_WIN_CLOSE, (uint16_t)i);
	for (i = 0; i < r->nr_spaces; i++)
		give_back(k, WIRE_DETACH, r->space[i]);
}

/* A daemon that was told of our end has given our floors to others. */
static void reserve_again(struct kvmm *k, const struct kvmm_att *a)
{
	struct wire_reserve r = {
		.h	= { .type = WIRE_RESERVE, .len = sizeof(r) },
		.space	= a->ix,
	};
	unsigned int c, n;

	for (c = 0; c < KVMM_MAX_CLASSES; c++) {
		for (n = 0; n < KVMM_MAX_NODES; n++) {
			r.frames = atomic_load_explicit(&a->sp->reserved[c][n],
							memory_order_relaxed);
			if (!r.frames)
				continue;
			r.h.seq = ++k->seq;
			r.cls = (uint16_t)c;
			r.node = (uint16_t)n;
			/* kvmm_avail() says what came of it */
			sock_send(k->sock, &r.h, NULL, 0);
		}
	}
}

/* -- going on --------------------------------------------------------------------- */

static void ring_again(struct kvmm_era *e)
{
	kvmm_lock(&e->sq_lock);
	/* acquire: pairs with the daemon's release when it was done with it */
	e->arena_tail = atomic_load_explicit(&e->ledger->arena_head,
					     memory_order_acquire);
	/* release: whoever finds the ring in force finds it empty */
	atomic_store_explicit(&e->lost, false, memory_order_release);
	kvmm_unlock(&e->sq_lock);
}

static void views_again(struct kvmm *k, struct kvmm_era *e)
{
	struct kvmm_space *sp;
	struct kvmm_view *v;
	struct kvmm_att *a;

	list_for_each_entry(sp, &k->spaces, link) {
		a = att_of(sp, e);
		if (a)
			reserve_again(k, a);
		for (v = a ? a->views : NULL; v; v = v->next) {
			kvmm_view_peers_settle(k, v);
			kvmm_view_resumed(v, k->adopted);
		}
	}
}

int kvmm_resume_end(struct kvmm *k)
{
	struct kvmm_era *e = kvmm_era_now(k);
	struct wire_resumed r;
	uint64_t one = 1;
	int err;

	if (k->msg->len < sizeof(r))
		return -EPROTO;
	memcpy(&r, k->msg->buf, sizeof(r));
	if (r.h.type != WIRE_RESUMED || r.nr_spaces > ARRAY_SIZE(r.space) ||
	    !both_have(k, e, &r))
		return -EPROTO;
	err = kvmm_conn_watch(k, e->notify);
	if (err)
		return err;
	/* awake, as in enter_era() */
	atomic_store_explicit(&e->ledger->cq.armed, 0, memory_order_relaxed);
	if (write(e->notify, &one, sizeof(one)) != sizeof(one))
		return -errno;
	close_the_rest(k, &r);
	ring_again(e);
	kvmm_conn_up(k, e);
	views_again(k, e);
	stat_add(k, reconnects, 1);
	return 0;
}
