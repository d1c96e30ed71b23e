/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who has pinned something for how long, from the request slots of the ledgers.
 *
 * The slots are the clients' own words: good enough for people, never asked
 * when something is reclaimed. A pin that is older than %PIN_OLD_NS is warned
 * of and never broken: its frames may be under a kernel that still reads.
 *
 * A ledger is sparse. Only pages of it that exist are looked at: reading the
 * others would make them exist.
 */
#include <errno.h>
#include <inttypes.h>
#include <unistd.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"

#define WATCH_NS	(60 * NSEC_PER_SEC)

static void look_at(const struct ledger_req *rq, uint32_t space,
		    struct pin_age *age)
{
	/* relaxed: the client may change any of them while we look */
	uint32_t in = atomic_load_explicit(&rq->space, memory_order_relaxed);
	uint64_t start;

	if (!atomic_load_explicit(&rq->state, memory_order_relaxed) ||
	    !atomic_load_explicit(&rq->nr_pins, memory_order_relaxed) ||
	    (space != PIN_ANY_SPACE && in != space))
		return;
	age->requests++;
	start = atomic_load_explicit(&rq->start_ns, memory_order_relaxed);
	if (start >= age->oldest_ns)
		return;
	age->oldest_ns = start;
	age->space = in;
	age->id = atomic_load_explicit(&rq->id, memory_order_relaxed);
	age->session = atomic_load_explicit(&rq->session,
					    memory_order_relaxed);
}

void session_pin_age(const struct session *ss, uint32_t space,
		     struct pin_age *age)
{
	const struct ledger_req *rq = ring_requests(ss);
	off_t base = (const char *)rq - (const char *)ss->ring.ledger;
	off_t end = base + LEDGER_REQ_SLOTS * (off_t)sizeof(*rq);
	off_t at, hole;

	*age = (struct pin_age){ .oldest_ns = UINT64_MAX };
	for (at = base; at < end; at = hole) {
		at = lseek(ss->ledger_shm.fd, at, SEEK_DATA);
		if (at < 0 || at >= end)
			return;
		hole = lseek(ss->ledger_shm.fd, at, SEEK_HOLE);
		hole = hole < 0 || hole > end ? end : hole;
		for (; at + (off_t)sizeof(*rq) <= hole; at += sizeof(*rq))
			look_at(&rq[(at - base) / (off_t)sizeof(*rq)], space,
				age);
	}
}

static void warn_old(struct session *ss, uint64_t now)
{
	struct pin_age age;

	session_pin_age(ss, PIN_ANY_SPACE, &age);
	if (!age.requests || age.oldest_ns > now ||
	    now - age.oldest_ns < PIN_OLD_NS) {
		ss->warned_req = 0;
		return;
	}
	if (ss->warned_req == age.oldest_ns)
		return;			/* once a request */
	ss->warned_req = age.oldest_ns;
	log_warn("client %u (%s, pid %d, tenant %s): request %" PRIu64
		 " of space %u has held pins for %" PRIu64 " min; they stay",
		 ss->no, ss->name, (int)ss->hello_pid, ss->via->cfg->tenant,
		 age.id, age.space,
		 (now - age.oldest_ns) / (60 * NSEC_PER_SEC));
}

uint64_t pins_watch(struct server *s, uint64_t now)
{
	struct session *ss;

	if (now < s->pins_due)
		return s->pins_due;
	s->pins_due = now + WATCH_NS;
	list_for_each_entry(ss, &s->sessions, link)
		if (ss->state == SESSION_LIVE || ss->state == SESSION_CLOSED)
			warn_old(ss, now);
	return s->nr_sessions ? s->pins_due : DEADLINE_NONE;
}
