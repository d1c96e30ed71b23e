/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Coming to rest without ending: nothing new is taken, what is under way comes
 * to its end. Afterwards the process may be replaced: no I/O of its writes to
 * memory that the next one uses, and what the store said is on the medium.
 *
 * Work of the pool (copies, checksums, making memory) is given time, too, but
 * does not stop it: what it works on is not published, and is freed by whoever
 * finds it.
 */
#include <errno.h>
#include <string.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"

#define NAP_NS		(200 * NSEC_PER_USEC)

static void flushed(int err, void *arg)
{
	struct server *s = arg;

	s->flushing--;
}

static bool node_moves(const struct node *n)
{
	const struct node_dir_stats *r = &n->stats.dir[NODE_READ];
	const struct node_dir_stats *w = &n->stats.dir[NODE_WRITE];

	return r->inflight || r->queued || w->inflight || w->queued;
}

static const struct node *moving(struct server *s)
{
	unsigned int i;

	for (i = 0; i < s->nr_nodes; i++)
		if (node_moves(s->node[i]))
			return s->node[i];
	return NULL;
}

/*
 * The rings are not swept and mm_run() is not called, so nothing begins that
 * does not follow from what has begun.
 */
static void drain_round(struct server *s)
{
	struct timespec ts = ns_to_timespec(NAP_NS);
	unsigned int i, n;

	n = work_poll(s->pool, 0);
	for (i = 0; i < s->nr_nodes; i++) {
		n += node_poll(s->node[i], 0);
		node_kick(s->node[i]);
	}
	if (!n)
		nanosleep(&ts, NULL);
}

/*
 * What ends meanwhile is only known when it has ended: so the stores are asked
 * when nothing is under way any more.
 */
int server_flush(struct server *s, uint64_t deadline_ns, struct errmsg *e)
{
	unsigned int i;

	for (i = 0; i < s->nr_nodes; i++)
		if (!node_record_flush(s->node[i], flushed, s))
			s->flushing++;
	while (s->flushing) {
		drain_round(s);
		if (s->flushing && deadline_past(deadline_ns))
			return errmsg_set(e, -ETIMEDOUT, "the store has not "
					  "written down what is in it");
	}
	return 0;
}

int server_drain(struct server *s, uint64_t deadline_ns, struct errmsg *e)
{
	const struct node *n;

	for (;;) {
		drain_round(s);
		n = moving(s);
		if (!n && !work_pending(s->pool))
			break;
		if (!deadline_past(deadline_ns))
			continue;
		if (n)
			return errmsg_set(e, -ETIMEDOUT, "I/O of node %s is "
					  "still under way", n->name);
		break;
	}
	return server_flush(s, deadline_ns, e);
}
