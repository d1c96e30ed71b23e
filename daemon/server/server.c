/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole: nodes, the memory manager, sockets; and what mm answers, brought
 * to the session that it is for.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/server/server.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

/* -- what mm answers ----------------------------------------------------------------- */

static void op_complete(struct mm_client *c, struct mm_win *win,
			const struct ring_cqe *cqe,
			const struct ring_result *res)
{
	struct session *ss = mm_client_arg(c);

	ring_completed(ss, cqe);
	ring_complete(ss, win, cqe, res);
}

static void op_index_grew(struct mm_space *sp)
{
	struct server *s = mm_space_arg(sp);
	struct session *ss;

	list_for_each_entry(ss, &s->sessions, link)
		if (ss->state == SESSION_LIVE)
			session_tell_index(ss, sp);
}

static void op_member(struct mm_client *c, struct mm_client *peer, bool gone)
{
	session_tell_member(mm_client_arg(c), mm_client_arg(peer), gone);
}

static void op_kick_client(struct mm_client *c)
{
	struct session *ss = mm_client_arg(c);

	if (ss->state == SESSION_LIVE)
		ring_kick(ss);
}

static void op_evict_client(struct mm_client *c, const char *why)
{
	session_doom(mm_client_arg(c), REJECT_LIMIT, "%s", why);
}

static void count_one(const struct mm_space_info *si, void *arg)
{
	++*(unsigned int *)arg;
}

/* A space that was on a disk is one of its tenant's first socket. */
static int op_found(void *arg, const char *tenant)
{
	struct server *s = arg;
	unsigned int i, n = 0;

	for (i = 0; i < s->cfg.nr_sockets; i++)
		if (!strcmp(s->cfg.socket[i].tenant, tenant))
			break;
	if (i == s->cfg.nr_sockets)
		return -ENOENT;
	mm_for_each_space(s->mm, count_one, &n);
	if (n >= s->cfg.max_spaces)
		return -EUSERS;
	return (int)s->cfg.socket[i].mode;
}

static void op_said(void *arg, bool bad, const char *sentence)
{
	log_print(bad ? LOG_LVL_WARN : LOG_LVL_NOTICE, "%s", sentence);
}

static const struct mm_ops server_mm_ops = {
	.complete	= op_complete,
	.index_grew	= op_index_grew,
	.member		= op_member,
	.kick_client	= op_kick_client,
	.evict_client	= op_evict_client,
	.found		= op_found,
	.said		= op_said,
};

/* -- nodes --------------------------------------------------------------------------- */

static void node_changed(struct node *n, enum node_state old)
{
	enum log_level lvl = n->state == NODE_ONLINE || n->state == old ||
			     n->state == NODE_OFFLINE ? LOG_LVL_NOTICE
						      : LOG_LVL_WARN;

	log_print(lvl, "node %s is %s%s%s", n->name, node_state_name(n->state),
		  n->why[0] ? ": " : "", n->why);
}

/* What woke the loop is done by every round anyway; workers' eventfd is read
 * by work_poll(), a node's descriptor by node_poll(). */
static void woken(struct source *src, uint32_t events)
{
}

static int node_make(struct server *s, unsigned int ix)
{
	const struct config_node *c = &s->cfg.node[ix];
	const struct host_opts host = {
		.name	= c->name,
		.id	= ix,
		.bytes	= c->bytes,
		.numa	= c->numa,
		.huge	= c->hugepages,
	};
	const struct nvme_opts nvme = {
		.name	= c->name,
		.path	= c->path,
		.id	= ix,
		.bytes	= c->bytes,
		.depth	= c->depth,
		.engine	= c->engine,
		.sqpoll	= c->sqpoll,
		.discard = c->discard,
		.io_timeout_ns = c->io_timeout_ns,
		.free_floor_pct = (uint32_t)max(c->free_floor_pct, 0),
		.rebuild = c->rebuild,
	};

	if (c->kind == KVMM_NODE_HOST)
		return host_create(&host, &s->node[ix]);
	return nvme_create(&nvme, s->pool, &s->node[ix]);
}

static int nodes_create(struct server *s, struct errmsg *e)
{
	unsigned int i;
	int err;

	for (i = 0; i < s->cfg.nr_nodes; i++) {
		struct node *n;

		err = node_make(s, i);
		if (err)
			return errmsg_set(e, err, "node %s: %s",
					  s->cfg.node[i].name, strerror(-err));
		s->nr_nodes++;
		n = s->node[i];
		n->on_state = node_changed;
		n->arg = s;
		s->node_src[i] = (struct source){ .fd = -1, .ready = woken };
		if (node_fd(n) < 0)
			continue;
		err = loop_add(s, &s->node_src[i], node_fd(n), EPOLLIN);
		if (err)
			return errmsg_set(e, err, "node %s: epoll: %s", n->name,
					  strerror(-err));
	}
	/*
	 * Extents of a host node are registered with the disk below it; a
	 * gang's are not what its pages are read into and written from.
	 */
	for (i = 0; i < s->nr_nodes; i++) {
		uint32_t below = s->cfg.node[i].below_ix;

		if (below == KVMM_NODE_NONE || s->cfg.node[i].gang)
			continue;
		err = node_pair(s->node[i], s->node[below]);
		if (err)
			return errmsg_set(e, err, "node %s: pairing with %s: %s",
					  s->node[i]->name,
					  s->node[below]->name, strerror(-err));
	}
	return 0;
}

/* Block nodes first: their I/O ends before the memory that it is on. */
static int nodes_destroy(struct server *s, uint64_t deadline)
{
	unsigned int pass, i;
	int err;

	for (pass = 0; pass < 2; pass++) {
		for (i = 0; i < s->nr_nodes; i++) {
			struct node *n = s->node[i];

			if (!n || (n->kind == NODE_BLOCK) == pass)
				continue;
			loop_del(s, &s->node_src[i]);
			err = node_destroy(n, deadline);
			if (err)
				return err;
			s->node[i] = NULL;
		}
	}
	s->nr_nodes = 0;
	return 0;
}

/* -- making --------------------------------------------------------------------------- */

static int header_create(struct server *s, struct errmsg *e)
{
	int err;

	if (!adopt_header(s))
		return 0;
	err = shm_create(&s->hdr_shm, "kvmm-header",
			     round_up(sizeof(struct kvmm_hdr), 4096), 1);

	if (err)
		return errmsg_set(e, err, "shared header: %s", strerror(-err));
	s->hdr = s->hdr_shm.addr;
	s->hdr->magic = KVMM_MAGIC_HDR;
	s->hdr->size = sizeof(struct kvmm_hdr);
	s->hdr->abi = KVMM_ABI_VERSION;
	s->hdr->epoch = s->epoch;
	park_put(s->park, s->hdr_shm.fd, "header");
	return 0;
}

/* Checksums and copies; one CPU is left to the loop. */
static unsigned int nr_workers(void)
{
	long n = sysconf(_SC_NPROCESSORS_ONLN) - 1;

	return (unsigned int)clamp(n, 1L, 4L);
}

static int pool_make(struct server *s, struct errmsg *e)
{
	int err = work_create("kvmm-work", nr_workers(), &s->pool);

	if (err)
		return errmsg_set(e, err, "worker threads: %s", strerror(-err));
	s->work_src = (struct source){ .fd = -1, .ready = woken };
	err = loop_add(s, &s->work_src, work_fd(s->pool), EPOLLIN);
	if (err)
		return errmsg_set(e, err, "epoll: %s", strerror(-err));
	return 0;
}

static int mm_make(struct server *s, struct errmsg *e)
{
	struct mm_opts o = {
		.hdr		= s->hdr,
		.pool		= s->pool,
		.ops		= &server_mm_ops,
		.ops_arg	= s,
		.keep		= server_keep_ops(s),
		.epoch		= s->epoch,
		.direct_reclaim_ns = s->cfg.direct_reclaim_ns,
		.fetch_ns	= s->cfg.fetch_ns,
		.shrink_ack_ns	= s->cfg.shrink_ack_ns,
		.pin_limit_pct	= s->cfg.pin_limit_pct,
		.nr_nodes	= s->nr_nodes,
	};
	unsigned int i;
	int err;

	err = mm_policy_load(s->cfg.policy, &o.policy, e);
	if (err)
		return err;
	for (i = 0; i < s->nr_nodes; i++)
		o.node[i] = (struct mm_node_opts){
			.node		= s->node[i],
			.kind		= (uint8_t)s->cfg.node[i].kind,
			.below		= (uint8_t)s->cfg.node[i].below_ix,
			.size_max	= s->cfg.node[i].size_max,
			.extent_bytes	= s->cfg.node[i].extent_bytes,
			.gang		= (uint8_t)s->cfg.node[i].gang,
			.scrub_bytes_s	= s->cfg.node[i].scrub_bytes_s,
			.second_touch	= s->cfg.node[i].second_touch,
			.day_permille	= s->cfg.node[i].day_permille,
		};
	return mm_create(&o, &s->mm, e);
}

static int sockets_make(struct server *s, struct errmsg *e)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < s->cfg.nr_sockets && !err; i++)
		err = listener_add(s, &s->cfg.socket[i], e);
	return err;
}

static int state_make(struct server *s, const struct server_opts *o,
		      struct errmsg *e)
{
	int err;

	if (o->state) {
		s->epoch = o->state->epoch;
		return 0;
	}
	err = state_open(s->cfg.state_dir, &s->own_state, e);
	s->epoch = s->own_state.epoch;
	return err;
}

static int server_make(struct server *s, const struct server_opts *o,
		       struct errmsg *e)
{
	int err;

	s->epfd = epoll_create1(EPOLL_CLOEXEC);
	if (s->epfd < 0)
		return errmsg_set(e, -errno, "epoll: %s", strerror(errno));
	err = guard_init(&s->guard);
	if (err)
		return errmsg_set(e, err, "timer: %s", strerror(-err));
	err = state_make(s, o, e);
	if (!err)
		err = header_create(s, e);
	if (!err)
		err = pool_make(s, e);
	if (!err)
		err = nodes_create(s, e);
	if (!err)
		err = mm_make(s, e);
	if (!err)
		err = admin_create(s, s->cfg.admin_socket, &s->admin, e);
	if (!err)
		err = sockets_make(s, e);
	return err;
}

/* There is something in the store that a later start can do more with. */
static bool inherited(const struct server *s)
{
	struct park_stat st;

	park_stat(s->park, &st);
	return st.enabled && st.inherited;
}

int server_create(const struct server_opts *o, struct server **ret,
		  struct errmsg *e)
{
	size_t bytes = round_up(sizeof(struct server), 64);
	struct server *s = aligned_alloc(64, bytes);
	unsigned int unclaimed;
	int err;

	if (!s)
		return errmsg_set(e, -ENOMEM, "out of memory");
	memset(s, 0, bytes);
	s->cfg = *o->cfg;
	snprintf(s->config_path, sizeof(s->config_path), "%s",
		 o->config_path ? o->config_path : "");
	s->epfd = -1;
	s->own_state = (struct state)STATE_INIT;
	s->park = o->park;
	s->ladder = o->ladder;
	s->hdr_shm = (struct shm)SHM_INIT;
	s->sessions_due = DEADLINE_NONE;
	s->started_ns = now_ns();
	list_init(&s->sessions);
	err = server_make(s, o, e);
	if (err && !inherited(s)) {
		server_destroy(s, deadline_in(NSEC_PER_SEC));
		return err;
	}
	if (!err) {
		hostmem_init(s);
		err = adopt_clients(s, e);
	}
	if (err)
		return err;	/* nothing is taken apart: a later one may have it */
	unclaimed = park_done(s->park);
	if (unclaimed)
		log_notice("%u descriptors of the last kvmmd are of no use: "
			   "closed", unclaimed);
	*ret = s;
	return 0;
}

/*
 * The end of I/O, and of what is known of it: from here on the process may end at
 * any time. It does where somebody keeps memory, and where that is so much that
 * the kernel is quicker.
 */
static int server_rest(struct server *s, uint64_t deadline_ns)
{
	struct errmsg e = { "" };
	int err = mm_drain(s->mm, deadline_ns);

	if (!err && server_flush(s, deadline_ns, &e))
		log_err("%s: the last pages written are not found again",
			e.text);
	return err;
}

int server_destroy(struct server *s, uint64_t deadline_ns)
{
	int err;

	listeners_close(s);
	admin_destroy(s->admin);
	s->admin = NULL;
	sessions_close(s);
	err = s->mm ? server_rest(s, deadline_ns) : 0;
	if (err)
		return err;
	/* whoever started us drops what is not to be found again */
	if (s->mm && park_enabled(s->park))
		return -EBUSY;
	err = mm_destroy(s->mm, deadline_ns);
	if (err)
		return err;
	s->mm = NULL;
	park_drop(s->park, "header");
	sessions_free(s);
	err = nodes_destroy(s, deadline_ns);
	if (err)
		return err;
	if (s->pool) {
		loop_del(s, &s->work_src);
		err = work_destroy(s->pool, deadline_ns);
		if (err)
			return err;
	}
	shm_fini(&s->hdr_shm);
	close_fd(&s->epfd);
	state_close(&s->own_state);
	guard_fini(&s->guard);
	free(s);
	return 0;
}

/* -- saying how it is -------------------------------------------------------------------- */

const char *server_state(const struct server *s)
{
	unsigned int i;

	for (i = 0; i < s->nr_nodes; i++)
		if (s->node[i]->state != NODE_ONLINE)
			return s->node[i]->state == NODE_STARTING ? "starting"
								  : "degraded";
	return "serving";
}

void server_status(struct server *s, char *buf, size_t len)
{
	unsigned int i, live = s->nr_watch;
	size_t n;

	n = (size_t)snprintf(buf, len, "%s, %u client%s", server_state(s), live,
			     live == 1 ? "" : "s");
	/* in front: it is why a service that runs does nothing */
	if (s->ladder && s->ladder->step >= LADDER_BYPASS)
		n = (size_t)snprintf(buf, len, "bypass: %s; %u clients",
				     s->ladder->why, live);
	for (i = 0; i < s->nr_nodes && n < len; i++) {
		const struct node *nd = s->node[i];

		n += (size_t)snprintf(buf + n, len - n,
				      ", %s %" PRIu64 " of %" PRIu64 " MiB%s%s",
				      nd->name, nd->used >> 20,
				      nd->capacity >> 20,
				      nd->state == NODE_ONLINE ? "" : " ",
				      nd->state == NODE_ONLINE ? ""
					: node_state_name(nd->state));
	}
}
