/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status of the whole: everything one wants to know at three in the
 * morning, in one reply.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/server/admin_json.h"
#include "daemon/server/config_words.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

struct field {
	const char	*name;
	size_t		off;
};

#define MM_FIELD(f)	{ #f, offsetof(struct mm_counters, f) }
#define DIR_FIELD(f)	{ #f, offsetof(struct node_dir_stats, f) }
#define NODE_FIELD(f)	{ #f, offsetof(struct node_stats, f) }

static const struct field counter_fields[] = {
	MM_FIELD(pgpublish), MM_FIELD(pgpublish_exist),
	MM_FIELD(pgpublish_stale), MM_FIELD(pgload), MM_FIELD(pgload_fail),
	MM_FIELD(pgload_late), MM_FIELD(pgdemote), MM_FIELD(pgdemote_fail),
	MM_FIELD(pgadmit), MM_FIELD(pgadmit_refused),
	MM_FIELD(pgadmit_budget),
	MM_FIELD(pgdrop), MM_FIELD(pgdrop_gone), MM_FIELD(pgdrop_orphan),
	MM_FIELD(pgscan_kreclaimd), MM_FIELD(pgscan_direct),
	MM_FIELD(pgsteal_kreclaimd), MM_FIELD(pgsteal_direct),
	MM_FIELD(isolate_pinned), MM_FIELD(allocstall), MM_FIELD(pgcrc_fail),
	MM_FIELD(pgbreach), MM_FIELD(pgreport), MM_FIELD(pgundo),
	MM_FIELD(wreck_lost), MM_FIELD(pgtouch),
	MM_FIELD(pgfork), MM_FIELD(stage_wait),
	MM_FIELD(fetch_shared), MM_FIELD(bytes_in), MM_FIELD(bytes_out),
	MM_FIELD(bytes_copied_shared), MM_FIELD(pgrecover),
	MM_FIELD(recover_orphan), MM_FIELD(recover_label),
	MM_FIELD(recover_bad), MM_FIELD(recover_old),
	MM_FIELD(pgscrub), MM_FIELD(pgscrub_bad),
};
/* A counter that is added must be shown. */
static_assert(ARRAY_SIZE(counter_fields) * sizeof(uint64_t) ==
	      sizeof(struct mm_counters), "all counters");

static const struct field dir_fields[] = {
	DIR_FIELD(ios), DIR_FIELD(bytes), DIR_FIELD(data_bytes),
	DIR_FIELD(late), DIR_FIELD(expired), DIR_FIELD(cancelled),
	DIR_FIELD(refused), DIR_FIELD(eio), DIR_FIELD(enodata),
	DIR_FIELD(erofs), DIR_FIELD(enospc), DIR_FIELD(nr_short),
	DIR_FIELD(other), DIR_FIELD(inflight), DIR_FIELD(queued),
	DIR_FIELD(queued_bytes), DIR_FIELD(bytes_s), DIR_FIELD(lat_ns),
};
static_assert(ARRAY_SIZE(dir_fields) * sizeof(uint64_t) ==
	      sizeof(struct node_dir_stats), "all counters");

static const struct field node_fields[] = {
	NODE_FIELD(crc_bad), NODE_FIELD(fixed_ios), NODE_FIELD(fixed_bytes),
	NODE_FIELD(plain_bytes), NODE_FIELD(bad_slots), NODE_FIELD(bad_bytes),
	NODE_FIELD(zeroed_bytes), NODE_FIELD(discarded_bytes),
	NODE_FIELD(flushes), NODE_FIELD(flush_fails),
	NODE_FIELD(extents), NODE_FIELD(huge_bytes),
	NODE_FIELD(probes),
	NODE_FIELD(journal_bytes), NODE_FIELD(journal_groups),
	NODE_FIELD(journal_fails), NODE_FIELD(journal_lost),
	NODE_FIELD(journal_used),
	NODE_FIELD(ckpt_bytes), NODE_FIELD(ckpts), NODE_FIELD(ckpt_fails),
	NODE_FIELD(open_fails), NODE_FIELD(overcommit_bytes),
	NODE_FIELD(recovered), NODE_FIELD(recover_dropped),
	NODE_FIELD(recover_bytes), NODE_FIELD(recover_ns),
};

static json_t *fields_json(const void *base, const struct field *f, size_t n)
{
	json_t *o = json_object();

	for (; n; n--, f++) {
		uint64_t v;

		memcpy(&v, (const char *)base + f->off, sizeof(v));
		json_object_set_new(o, f->name, json_u64(v));
	}
	return o;
}

/* -- nodes ------------------------------------------------------------------------------- */

static json_t *frames_json(const struct mm_node_stat *st)
{
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
			 "total", (json_int_t)st->frames,
			 "free", (json_int_t)st->frames_free,
			 "open", (json_int_t)st->frames_open,
			 "magazine", (json_int_t)st->frames_magazine,
			 "loading", (json_int_t)st->frames_loading,
			 "ready", (json_int_t)st->frames_ready,
			 "quarantine", (json_int_t)st->frames_quarantine);
}

static json_t *load_json(const struct kvmm_hdr_node *h)
{
	/* relaxed: figures for people, each by itself */
	return json_pack("{s:I, s:I, s:I}",
		"base_us", (json_int_t)atomic_load_explicit(&h->load_base_us,
						memory_order_relaxed),
		"ns_per_kib", (json_int_t)atomic_load_explicit(
					&h->load_ns_per_kib,
					memory_order_relaxed),
		"queue_us", (json_int_t)atomic_load_explicit(&h->queue_us,
						memory_order_relaxed));
}

static json_t *admission_json(const struct mm_node_stat *st)
{
	json_t *o = json_pack("{s:s, s:I}",
			      "policy", word_of(admission_words,
						st->second_touch),
			      "filter_bytes", (json_int_t)st->filter_bytes);

	json_object_set_new(o, "budget_day", st->budget_day ?
			    json_u64(st->budget_day) : json_null());
	json_object_set_new(o, "budget_left", st->budget_day ?
			    json_integer((json_int_t)st->budget_left) :
			    json_null());
	return o;
}

static json_t *node_json(struct server *s, unsigned int ix)
{
	struct mm_node_stat st;
	const struct node *n;
	char line[512] = "";
	json_t *o;

	mm_node_stat(s->mm, ix, &st);
	n = st.node;
	node_status(n, line, sizeof(line));
	o = json_pack("{s:s, s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I}",
		      "name", n->name,
		      "kind", word_of(kind_words, st.kind),
		      "state", node_state_name(n->state),
		      "why", n->why,
		      "line", line,
		      "capacity", (json_int_t)n->capacity,
		      "used", (json_int_t)n->used,
		      "size_max", (json_int_t)s->cfg.node[ix].size_max,
		      "bytes_extents", (json_int_t)st.bytes_extents,
		      "bytes_pages", (json_int_t)st.bytes_pages,
		      "pages_dirty", (json_int_t)st.pages_dirty);
	json_object_set_new(o, "pages_refused", json_u64(st.pages_refused));
	json_object_set_new(o, "gang", json_integer(st.gang));
	json_object_set_new(o, "below", st.below == KVMM_NODE_NONE
			    ? json_null()
			    : json_string(s->node[st.below]->name));
	json_object_set_new(o, "counters",
			    fields_json(&st.c, counter_fields,
					ARRAY_SIZE(counter_fields)));
	json_object_set_new(o, "node",
			    fields_json(&n->stats, node_fields,
					ARRAY_SIZE(node_fields)));
	json_object_set_new(o, "frames", frames_json(&st));
	if (n->kind == NODE_MEM)
		return o;
	json_object_set_new(o, "path", json_string(s->cfg.node[ix].path));
	json_object_set_new(o, "admission", admission_json(&st));
	json_object_set_new(o, "load", load_json(&s->hdr->node[ix]));
	json_object_set_new(o, "read",
			    fields_json(&n->stats.dir[NODE_READ], dir_fields,
					ARRAY_SIZE(dir_fields)));
	json_object_set_new(o, "write",
			    fields_json(&n->stats.dir[NODE_WRITE], dir_fields,
					ARRAY_SIZE(dir_fields)));
	return o;
}

/* -- sockets, sessions, rings -------------------------------------------------------------- */

static json_t *sockets_json(struct server *s)
{
	json_t *list = json_array();
	unsigned int i;

	for (i = 0; i < s->nr_listeners; i++) {
		const struct listener *l = &s->listener[i];

		json_array_append_new(list, json_pack(
			"{s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:I, s:b}",
			"name", l->cfg->name, "path", l->cfg->path,
			"tenant", l->cfg->tenant,
			"rights", word_of(right_words, l->cfg->rights),
			"mode", word_of(mode_words, l->cfg->mode),
			"clients", (int)l->sessions,
			"requests", (int)l->requests,
			"accepted", (json_int_t)l->accepted,
			"inherited", l->inherited));
	}
	return list;
}

struct totals {
	unsigned int	live, closed, exiting, own_user;
	uint64_t	submissions, completions, wakes, backlog, in_flight;
	uint64_t	ledger_bytes;
};

static void sessions_sum(struct server *s, struct totals *t)
{
	const struct session *ss;

	*t = (struct totals){
		.submissions = s->c.submissions,
		.completions = s->c.completions,
		.wakes = s->c.wakes,
	};
	list_for_each_entry(ss, &s->sessions, link) {
		t->ledger_bytes += ss->ledger_shm.bytes;
		t->closed += ss->state == SESSION_CLOSED;
		t->exiting += ss->state == SESSION_EXITING;
		if (ss->state != SESSION_LIVE)
			continue;
		t->live++;
		t->own_user += ss->cred_uid == geteuid();
		t->submissions += ss->ring.submissions;
		t->completions += ss->ring.completions;
		t->wakes += ss->ring.wakes;
		t->backlog += ss->ring.backlog_slots;
		t->in_flight += ss->ring.ops;
	}
}

static json_t *clients_json(struct server *s, const struct totals *t)
{
	return json_pack("{s:i, s:i, s:i, s:i, s:i, s:I, s:I}",
			 "connected", (int)t->live,
			 "greeting", (int)s->nr_greeting,
			 "closed", (int)t->closed,
			 "exiting", (int)t->exiting,
			 "max", (int)s->cfg.max_clients,
			 "accepted", (json_int_t)s->c.accepted,
			 "exited", (json_int_t)s->c.exited);
}

static json_t *rings_json(struct server *s, const struct totals *t)
{
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}",
			 "submissions", (json_int_t)t->submissions,
			 "completions", (json_int_t)t->completions,
			 "wakes", (json_int_t)t->wakes,
			 "doorbells", (json_int_t)s->c.doorbells,
			 "in_flight", (json_int_t)t->in_flight,
			 "backlog", (json_int_t)t->backlog,
			 "rounds", (json_int_t)s->c.rounds,
			 "sleeps", (json_int_t)s->c.sleeps);
}

static json_t *rejects_json(struct server *s)
{
	json_t *o = json_object();
	unsigned int i;

	for (i = REJECT_NONE + 1; i < NR_REJECTS; i++)
		json_object_set_new(o, reject_name(i),
				    json_u64(s->c.reject[i]));
	return o;
}

/* -- the process -------------------------------------------------------------------------- */

static uint64_t rss_bytes(void)
{
	unsigned long size, rss = 0;
	FILE *f = fopen("/proc/self/statm", "re");

	if (!f)
		return 0;
	if (fscanf(f, "%lu %lu", &size, &rss) != 2)
		rss = 0;
	fclose(f);
	return (uint64_t)rss * (uint64_t)sysconf(_SC_PAGESIZE);
}

static json_t *rlimit_json(int what)
{
	struct rlimit rl;

	if (getrlimit(what, &rl) < 0 || rl.rlim_cur == RLIM_INFINITY)
		return json_null();
	return json_u64(rl.rlim_cur);
}

/* -- over a restart -------------------------------------------------------------------------- */

static json_t *start_json(struct server *s)
{
	const struct ladder *l = s->ladder;

	return json_pack("{s:s, s:i, s:i, s:b, s:s}",
			 "step", ladder_name(l ? l->step : LADDER_ADOPT),
			 "unclean", l ? (int)l->unclean : 0,
			 "adopt_pct", l ? (int)l->adopt_pct : 100,
			 "oom", l && l->oom,
			 "why", l ? l->why : "");
}

static json_t *park_json(struct server *s)
{
	struct park_stat st;

	park_stat(s->park, &st);
	return json_pack("{s:s, s:b, s:i, s:i, s:i, s:i, s:i, s:i, s:I}",
			 "keeper", st.keeper, "enabled", st.enabled,
			 "held", (int)st.held, "parked", (int)st.parked,
			 "waiting", (int)st.waiting, "max", (int)st.max,
			 "inherited", (int)st.inherited,
			 "taken", (int)st.taken,
			 "failed", (json_int_t)st.failed);
}

static json_t *adopted_json(struct server *s)
{
	const struct mm_adopted *a = mm_last_adopted(s->mm);

	return json_pack("{s:b, s:I, s:i, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:i, s:I}",
			 "any", s->adopting,
			 "ms", (json_int_t)(s->adopt_ns / NSEC_PER_MSEC),
			 "clients", (int)a->clients,
			 "spaces", (int)a->spaces,
			 "windows", (int)a->windows,
			 "extents", (int)a->extents,
			 "pages", (json_int_t)a->frames,
			 "waiting", (json_int_t)a->waiting,
			 "open", (json_int_t)a->open,
			 "lost", (json_int_t)a->lost,
			 "held", (json_int_t)a->held,
			 "gave_up", (int)a->gave_up,
			 "resumed", (json_int_t)s->resumed);
}

/* -- the whole ------------------------------------------------------------------------------- */

struct space_sum {
	unsigned int	n;
	uint64_t	pages, metadata;
};

static void sum_space(const struct mm_space_info *si, void *arg)
{
	struct space_sum *sum = arg;

	sum->n++;
	sum->pages += si->pages;
	sum->metadata += si->metadata_bytes;
}

static void add_note(json_t *notes, const char *fmt, ...) __printf(2, 3);
static void add_note(json_t *notes, const char *fmt, ...)
{
	char buf[320];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(buf, sizeof(buf), fmt, ap);
	va_end(ap);
	json_array_append_new(notes, json_string(buf));
}

/* What an observed space would have had of a cache. */
static void note_observed(const struct mm_space_info *si, void *arg)
{
	if (si->mode == KVMM_MODE_OBSERVE && si->ghost_asked)
		add_note(arg, "space %u (%.64s) is observed: %" PRIu64 " of %"
			 PRIu64 " pages asked for would have hit (%.1f %%)",
			 si->ix, si->desc->model, si->ghost_hits,
			 si->ghost_asked,
			 100.0 * si->ghost_hits / si->ghost_asked);
}

/* What is out of the ordinary, in sentences. */
static json_t *notes_json(struct server *s, const struct totals *t)
{
	json_t *notes = json_array();
	char why[256];
	unsigned int i;

	for (i = 0; i < s->nr_nodes; i++)
		if (s->node[i]->state != NODE_ONLINE ||
		    (s->node[i]->kind == NODE_BLOCK && s->node[i]->why[0]))
			add_note(notes, "node %s is %s%s%s", s->node[i]->name,
				 node_state_name(s->node[i]->state),
				 s->node[i]->why[0] ? ": " : "",
				 s->node[i]->why);
	if (s->hostmem.lack)
		add_note(notes, "the host is short of memory: DRAM that is not in use goes back");
	if (s->ladder && s->ladder->why[0])
		add_note(notes, "%s", s->ladder->why);
	if (park_why(s->park, why, sizeof(why)))
		add_note(notes, "%s", why);
	if (s->reexec_why[0])
		add_note(notes, "the last re-exec was not done: %s",
			 s->reexec_why);
	if (t->own_user)
		add_note(notes, "%u client%s as this daemon's own user: in its "
			 "trust domain, they could write what is read-only to "
			 "others", t->own_user,
			 t->own_user == 1 ? " runs" : "s run");
	if (t->closed)
		add_note(notes, "%u process%s hung up and live%s on: what they "
			 "pinned stays until they exit", t->closed,
			 t->closed == 1 ? "" : "es", t->closed == 1 ? "s" : "");
	if (t->backlog)
		add_note(notes, "%" PRIu64 " completions wait for clients that "
			 "do not read theirs", t->backlog);
	mm_for_each_space(s->mm, note_observed, notes);
	if (log_lost())
		add_note(notes, "%" PRIu64 " log lines were lost: stderr did "
			 "not take them", log_lost());
#ifdef KVMM_TEST_BUILD
	add_note(notes, "this is a test build");
#endif
	return notes;
}

int cmd_status(struct server *s, const json_t *req, json_t *r,
	       struct errmsg *e)
{
	struct space_sum sum = { .n = 0 };
	json_t *nodes = json_array();
	struct totals t;
	char line[512];
	unsigned int i;

	server_status(s, line, sizeof(line));
	sessions_sum(s, &t);
	mm_for_each_space(s->mm, sum_space, &sum);
	for (i = 0; i < s->nr_nodes; i++)
		json_array_append_new(nodes, node_json(s, i));

	json_object_set_new(r, "version", json_string(KVMM_VERSION_STRING));
	json_object_set_new(r, "abi", json_integer(KVMM_ABI_VERSION));
	json_object_set_new(r, "pid", json_integer(getpid()));
	json_object_set_new(r, "epoch", json_hex(s->epoch));
	json_object_set_new(r, "uptime_ms", json_u64((now_ns() -
			    s->started_ns) / NSEC_PER_MSEC));
	json_object_set_new(r, "state", json_string(server_state(s)));
	json_object_set_new(r, "sentence", json_string(line));
	json_object_set_new(r, "config", json_string(s->config_path));
	json_object_set_new(r, "policy", json_string(s->cfg.policy));
	json_object_set_new(r, "nodes", nodes);
	json_object_set_new(r, "sockets", sockets_json(s));
	json_object_set_new(r, "clients", clients_json(s, &t));
	json_object_set_new(r, "spaces", json_pack("{s:i, s:i, s:I}",
			    "attached", (int)sum.n,
			    "max", (int)s->cfg.max_spaces,
			    "pages", (json_int_t)sum.pages));
	json_object_set_new(r, "rings", rings_json(s, &t));
	json_object_set_new(r, "rejects", rejects_json(s));
	json_object_set_new(r, "memory", json_pack("{s:I, s:I, s:I, s:I, s:I}",
			    "metadata", (json_int_t)(sum.metadata +
						     mm_kept_bytes(s->mm) +
						     mm_admit_bytes(s->mm)),
			    "bytes_per_page", (json_int_t)(sum.pages ?
					div_round_up(sum.metadata, sum.pages) :
					0),
			    "staging", (json_int_t)mm_stage_bytes(s->mm),
			    "ledgers_reserved", (json_int_t)t.ledger_bytes,
			    "rss", (json_int_t)rss_bytes()));
	json_object_set_new(r, "limits", json_pack("{s:i, s:o, s:o}",
			    "fds", fd_count(),
			    "fds_max", rlimit_json(RLIMIT_NOFILE),
			    "memlock", rlimit_json(RLIMIT_MEMLOCK)));
	json_object_set_new(r, "start", start_json(s));
	json_object_set_new(r, "park", park_json(s));
	json_object_set_new(r, "adopted", adopted_json(s));
	json_object_set_new(r, "host_memory",
			    json_pack("{s:I, s:I, s:I}",
				      "floor", (json_int_t)s->hostmem.floor,
				      "lack", (json_int_t)s->hostmem.lack,
				      "shortages",
				      (json_int_t)s->hostmem.shortages));
	json_object_set_new(r, "notes", notes_json(s, &t));
	return 0;
}
