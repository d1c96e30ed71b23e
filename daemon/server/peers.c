/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows of an engine's members. A frame number that one member finds is used
 * by all of them, so it must lie in an extent that all have mapped. Each says
 * so in the bitmap of its window ledger, and gets the others' read-only.
 */
#include "daemon/server/server.h"

struct peers {
	struct session	*ss;
	struct mm_win	*win;
	bool		gone;
};

/* Tell @to of window @w, which @of has. */
static void tell(struct session *to, const struct session *of,
		 const struct mm_win *w, bool gone)
{
	const struct shm *ledger = mm_win_ledger(w);
	struct wire_peer m = {
		.h	= { .type = WIRE_PEER, .len = sizeof(m) },
		.space	= mm_space_ix(mm_win_space(w)),
		.cls	= (uint16_t)mm_win_cls(w),
		.node	= (uint16_t)mm_win_node(w),
		.client	= of->no,
		.gone	= gone,
		.ledger_bytes = ledger->bytes,
	};

	if (to->state == SESSION_LIVE && (gone || ledger->ro_fd >= 0))
		session_send(to, &m.h, &ledger->ro_fd, gone ? 0 : 1);
}

static bool same_window(const struct mm_win *a, const struct mm_win *b)
{
	return mm_win_space(a) == mm_win_space(b) &&
	       mm_win_cls(a) == mm_win_cls(b) &&
	       mm_win_node(a) == mm_win_node(b);
}

static void with_peer(struct mm_client *c, void *arg)
{
	struct peers *p = arg;
	struct session *peer = mm_client_arg(c);
	unsigned int i;

	for (i = 0; i < SESSION_MAX_WINS && peer->nr_wins; i++) {
		struct mm_win *w = peer->win[i];

		if (!w || !same_window(w, p->win))
			continue;
		tell(peer, p->ss, p->win, p->gone);
		if (!p->gone)
			tell(p->ss, peer, w, false);
	}
}

void peers_opened(struct session *ss, struct mm_win *w)
{
	struct peers p = { .ss = ss, .win = w };

	mm_client_members(ss->mc, with_peer, &p);
}

void peers_closed(struct session *ss, struct mm_win *w)
{
	struct peers p = { .ss = ss, .win = w, .gone = true };

	mm_client_members(ss->mc, with_peer, &p);
}
