/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection: opening, losing, reconnecting, closing.
 *
 *	DOWN -> HELLO -> (JOIN ->) UP -> DOWN
 *		     \-> RESUME -> UP
 *
 * kvmm_open() goes to UP at once or fails. Later the states are gone through by
 * kvmm_poll(), without blocking, at most one try every 100 ms. A daemon that has
 * taken over what its predecessor left goes on with the era (resume.c). Any other
 * is a new one: requests of the old era keep what they hold until they end, and
 * kvmm_win_sync() attaches again after that.
 *
 * In a child of fork() the page at kvmm.alive is zero (MADV_WIPEONFORK) and
 * every shared mapping is absent (MADV_DONTFORK): each call looks at the page
 * first. That costs a load, where getpid() would cost a system call.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"

#define DEFAULT_SOCKET	"/run/kvmm/default.sock"
#define GUARD_BYTES	4096

/* -- waking ourselves ---------------------------------------------------------- */

int kvmm_conn_watch(struct kvmm *k, int fd)
{
	struct epoll_event ev = { .events = EPOLLIN, .data.fd = fd };

	return epoll_ctl(k->epfd, EPOLL_CTL_ADD, fd, &ev) < 0 ? -errno : 0;
}

/* Its description may live on in the daemon: closing would not remove it. */
void kvmm_conn_unwatch(struct kvmm *k, int fd)
{
	epoll_ctl(k->epfd, EPOLL_CTL_DEL, fd, NULL);
}

void kvmm_kick(struct kvmm *k)
{
	uint64_t one = 1;

	/* acq_rel: pairs with the exchange in kvmm_poll() */
	if (!atomic_exchange_explicit(&k->kicked, true, memory_order_acq_rel) &&
	    write(k->wake, &one, sizeof(one)) != sizeof(one))
		return;			/* full: it is readable then */
}

/* -- handshake ----------------------------------------------------------------- */

static void drop_socket(struct kvmm *k)
{
	if (k->sock >= 0)
		kvmm_conn_unwatch(k, k->sock);
	close_fd(&k->sock);
}

static int say_hello(struct kvmm *k) __no_lock_check	/* open: nobody else has it */
{
	struct wire_hello h = {
		.h		= { .type = WIRE_HELLO, .len = WIRE_HELLO_SHORT },
		.abi_min	= KVMM_ABI_MIN,
		.abi_max	= KVMM_ABI_VERSION,
		.features	= KVMM_FEAT_NVME,
		.pid		= getpid(),
	};
	int pidfd, err;

	h.h.seq = ++k->seq;
	k->call_seq = h.h.seq;
	k->call_type = WIRE_HELLO;
	memcpy(h.name, k->name, sizeof(h.name));
	if (kvmm_resume_ask(k, &h))
		h.h.len = sizeof(h);
	/* without one (an old kernel, a filter) the daemon tries by itself */
	pidfd = fd_pidfd_open(getpid());
	err = sock_send(k->sock, &h.h, &pidfd, pidfd >= 0);
	close_fd(&pidfd);
	return err;
}

static int dial(struct kvmm *k)
{
	int err;

	k->sock = sock_connect(k->path);
	if (k->sock < 0) {
		err = k->sock;
		k->sock = -1;
		return err;
	}
	err = kvmm_conn_watch(k, k->sock);
	if (!err)
		err = say_hello(k);
	if (err)
		drop_socket(k);
	return err;
}

/* Fields of equal size, of which the other side may not have ended its own. */
static void copy_name(char *to, const char *from, size_t bytes)
{
	memcpy(to, from, bytes);
	to[bytes - 1] = '\0';
}

static void set_info(struct kvmm_info *in, const struct wire_welcome *w)
{
	uint32_t i;

	memset(in, 0, sizeof(*in));
	in->size = sizeof(*in);
	in->abi = w->abi;
	in->rights = w->rights;
	in->nr_nodes = w->nr_nodes;
	in->epoch = w->epoch;
	copy_name(in->tenant, w->tenant, sizeof(in->tenant));
	copy_name(in->daemon_version, w->version, sizeof(in->daemon_version));
	copy_name(in->library_version, KVMM_VERSION_STRING,
		  min(sizeof(in->library_version),
		      sizeof(KVMM_VERSION_STRING)));
	for (i = 0; i < w->nr_nodes; i++) {
		const struct wire_node *n = &w->node[i];

		copy_name(in->node[i].name, n->name, sizeof(n->name));
		in->node[i].kind = n->kind;
		in->node[i].below = n->below;
		in->node[i].gang = n->gang;
		in->node[i].size_bytes = n->size_bytes;
		in->node[i].extent_bytes = n->extent_bytes;
	}
}

/* The answer to hello is in k->msg. */
static int hear_welcome(struct kvmm *k, struct kvmm_era **ret)
{
	const struct wire_hdr *h = (const struct wire_hdr *)k->msg->buf;
	const struct wire_welcome *w = (const struct wire_welcome *)k->msg->buf;
	const struct wire_error *e = (const struct wire_error *)k->msg->buf;
	struct kvmm_era *era;
	int err;

	if (h->type == WIRE_ERROR && k->msg->len >= sizeof(*e))
		return kvmm_fail(e->err < 0 ? e->err : -EPROTO, "%.*s",
				 WIRE_SENTENCE_BYTES, e->sentence);
	if (h->type != WIRE_WELCOME || k->msg->len < sizeof(*w) ||
	    w->nr_nodes > KVMM_MAX_NODES ||
	    k->msg->len < sizeof(*w) + w->nr_nodes * sizeof(w->node[0]))
		return kvmm_fail(-EPROTO, "the daemon's welcome makes no sense");
	if (w->abi < KVMM_ABI_MIN || w->abi > KVMM_ABI_VERSION)
		return kvmm_fail(-EPROTO,
			"the daemon speaks ABI %u, this library %u to %u",
			w->abi, KVMM_ABI_MIN, KVMM_ABI_VERSION);
	err = kvmm_era_create(k, k->msg, &era);
	if (err)
		return err;
	set_info(&era->info, w);
	*ret = era;
	return 0;
}

/* -- eras ------------------------------------------------------------------------- */

void kvmm_conn_up(struct kvmm *k, struct kvmm_era *e)
{
	k->fd_ready = true;
	k->armed = false;
	/* another ledger, another count: look once, whatever it is */
	k->mail_seen = atomic_load_explicit(&e->ledger->mail,
					    memory_order_relaxed) - 1;
	k->state = CONN_UP;
	k->up_ns = now_ns();
	k->anew = false;
	k->asked = 0;
	atomic_store_explicit(&k->retry_ns, DEADLINE_NONE,
			      memory_order_relaxed);
}

/* From now on @e is the one. */
static int enter_era(struct kvmm *k, struct kvmm_era *e)
	__must_hold(&k->lock)
{
	struct kvmm_era *old = kvmm_era_now(k);
	uint64_t one = 1;
	int err;

	err = kvmm_conn_watch(k, e->notify);
	if (err)
		return err;
	/* awake means: readable, so that whoever sleeps comes back at once */
	if (write(e->notify, &one, sizeof(one)) != sizeof(one))
		return -errno;
	if (old)
		kvmm_step_carry(old, e);
	kvmm_conn_up(k, e);
	kvmm_era_succeed(k, old, e);
	if (old) {
		/* once more: a step may have been done in the meantime */
		kvmm_step_carry(old, e);
		kvmm_step_drop(old);
		if (!atomic_load(&e->older))
			kvmm_era_put(old);
		stat_add(k, reconnects, 1);
	}
	return 0;
}

static void try_later(struct kvmm *k, uint64_t now)
{
	drop_socket(k);
	kvmm_era_put(k->next);
	k->next = NULL;
	k->state = CONN_DOWN;
	atomic_store_explicit(&k->retry_ns, now + LIB_RECONNECT_NS,
			      memory_order_relaxed);
}

void kvmm_conn_lost(struct kvmm *k)
{
	struct kvmm_era *e = kvmm_era_now(k);
	uint64_t now = now_ns();

	if (k->state != CONN_UP)
		return;
	/* what the daemon said before it went is true */
	while (kvmm_cq_run(k, e, UINT32_MAX) &&
	       ring_pending(&e->ledger->cq, e->cq_head))
		;
	kvmm_conn_unwatch(k, e->notify);
	k->fd_ready = false;
	k->armed = false;
	kvmm_sq_stop(e);
	kvmm_ops_fail(e, -ENOTCONN);
	/* the first try may come at once, the second in 100 ms; whose welcome was
	 * not worth much is no first */
	try_later(k, now - k->up_ns < LIB_RECONNECT_NS ? now :
		     now - LIB_RECONNECT_NS);
	kvmm_kick(k);
}

static int join_again(struct kvmm *k)
{
	struct wire_join j = {
		.h	= { .type = WIRE_JOIN, .len = sizeof(j) },
		.rank	= k->engine.rank,
		.world	= k->engine.world,
		.flags	= k->engine.flags,
	};

	memcpy(j.token, k->engine.token, sizeof(j.token));
	j.h.seq = ++k->seq;
	k->call_seq = j.h.seq;
	k->call_type = WIRE_JOIN;
	k->state = CONN_JOIN;
	return sock_send(k->sock, &j.h, NULL, 0);
}

static void set_joined(struct kvmm *k, struct kvmm_era *e)
{
	e->flags = k->engine.flags;
	e->rank = k->engine.rank;
	e->world = k->engine.world;
	/* release: pairs with the acquire in kvmm_era_step() */
	atomic_store_explicit(&e->joined, true, memory_order_release);
}

void kvmm_conn_joined(struct kvmm *k)
{
	k->joined = true;
	set_joined(k, kvmm_era_now(k));
}

/* One message of a handshake under way; an error means: from the start. */
static int handshake(struct kvmm *k) __must_hold(&k->lock)
{
	const struct wire_hdr *h = (const struct wire_hdr *)k->msg->buf;
	const struct wire_welcome *w = (const struct wire_welcome *)k->msg->buf;
	int err;

	if (h->seq != k->call_seq)
		return kvmm_call_stray(k, k->msg, 0);
	if (k->state == CONN_RESUME)
		return kvmm_resume_end(k);
	if (k->state == CONN_HELLO && h->type == WIRE_WELCOME &&
	    k->msg->len >= sizeof(*w) && (w->flags & WIRE_WELCOME_RESUMED))
		return kvmm_resume_begin(k);
	if (k->state == CONN_HELLO) {
		err = hear_welcome(k, &k->next);
		if (err)
			return err;
		if (k->joined)
			return join_again(k);
	} else if (h->type != WIRE_OK) {
		return -EPROTO;
	} else {
		set_joined(k, k->next);
	}
	err = enter_era(k, k->next);
	if (!err)
		k->next = NULL;
	return err;
}

static void receive(struct kvmm *k, uint64_t now) __must_hold(&k->lock)
{
	int err;

	for (;;) {
		err = sock_recv(k->sock, k->msg);
		if (err == -EAGAIN)
			return;
		if (k->state == CONN_UP && (!err || err == -EMFILE))
			err = kvmm_call_stray(k, k->msg, err);
		else if (!err)
			err = handshake(k);
		sock_msg_close_fds(k->msg);
		if (!err)
			continue;
		if (k->state == CONN_UP) {
			kvmm_conn_lost(k);
			return;
		}
		/* what the daemon said of the era made no sense: without it then */
		if (err == -EPROTO)
			k->anew = true;
		try_later(k, now);
		return;
	}
}

void kvmm_conn_run(struct kvmm *k, uint64_t now)
{
	k->sock_checked_ns = now;
	if (k->state == CONN_UP)
		/* acquire: pairs with session_mail(); before the read */
		k->mail_seen = atomic_load_explicit(
				&kvmm_era_now(k)->ledger->mail,
				memory_order_acquire);
	if (k->state == CONN_DOWN) {
		if (now < atomic_load_explicit(&k->retry_ns,
					       memory_order_relaxed))
			return;
		if (dial(k)) {
			try_later(k, now);
			return;
		}
		k->state = CONN_HELLO;
		/* saturates: a user may want to wait for ever */
		atomic_store_explicit(&k->retry_ns,
				      deadline_in(k->call_timeout_ns),
				      memory_order_relaxed);
	}
	receive(k, now);
	if ((k->state == CONN_HELLO || k->state == CONN_JOIN ||
	     k->state == CONN_RESUME) &&
	    now >= atomic_load_explicit(&k->retry_ns, memory_order_relaxed))
		try_later(k, now);
}

/* -- open ----------------------------------------------------------------------------- */

static int guard_create(struct kvmm *k)
{
	_Atomic uint32_t *p = mmap(NULL, GUARD_BYTES, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		return -errno;
	if (madvise((void *)p, GUARD_BYTES, MADV_WIPEONFORK) < 0) {
		int err = -errno;

		munmap((void *)p, GUARD_BYTES);
		return err;
	}
	atomic_store_explicit(p, 1, memory_order_relaxed);
	k->alive = p;
	return 0;
}

static int open_init(struct kvmm *k, const char *path,
		     const struct kvmm_open_opts *o)
{
	int err;

	if (!path)
		path = getenv("KVMM_SOCKET");
	k->path = strdup(path && *path ? path : DEFAULT_SOCKET);
	k->msg = malloc(sizeof(*k->msg));
	k->scratch = malloc(KVMM_MAX_BATCH * sizeof(*k->scratch));
	if (!k->path || !k->msg || !k->scratch)
		return kvmm_fail(-ENOMEM, "out of memory");
	k->msg->nr_fds = 0;
	snprintf(k->name, sizeof(k->name), "%s",
		 o->name ? o->name : program_invocation_short_name);
	k->call_timeout_ns = o->call_timeout_ns ? o->call_timeout_ns :
						  LIB_CALL_TIMEOUT_NS;
	err = guard_create(k);
	if (err)
		return kvmm_fail(err, "no page that fork() wipes: %s",
				 strerror(-err));
	k->epfd = epoll_create1(EPOLL_CLOEXEC);
	k->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (k->epfd < 0 || k->wake < 0)
		return kvmm_fail(-errno, "no descriptors: %s", strerror(errno));
	err = kvmm_conn_watch(k, k->wake);
	return err ? kvmm_fail(err, "epoll: %s", strerror(-err)) : 0;
}

/* The daemon's queue of connections may be full for a moment. */
static int dial_until(struct kvmm *k, uint64_t deadline)
{
	const struct timespec pause = { .tv_nsec = 5 * NSEC_PER_MSEC };
	int err;

	for (;;) {
		err = dial(k);
		if (err != -EAGAIN)
			break;
		if (deadline_past(deadline))
			return kvmm_fail(-ETIMEDOUT,
				"the daemon at %s takes no connections",
				k->path);
		nanosleep(&pause, NULL);
	}
	if (err == -ENOTCONN)
		return kvmm_fail(err, "nobody listens at %s", k->path);
	if (err == -EPIPE)
		return kvmm_fail(-ENOTCONN, "the daemon at %s hung up", k->path);
	return err ? kvmm_fail(err, "%s: %s", k->path, strerror(-err)) : 0;
}

static int welcome_until(struct kvmm *k, uint64_t deadline)
{
	struct kvmm_era *e;
	int err;

	while ((err = sock_recv(k->sock, k->msg)) == -EAGAIN) {
		err = sock_wait(k->sock, POLLIN, deadline);
		if (err == -ETIMEDOUT)
			return kvmm_fail(err, "the daemon at %s does not answer",
					 k->path);
		if (err)
			break;
	}
	if (err == -EPIPE)
		return kvmm_fail(-ENOTCONN, "the daemon at %s hung up", k->path);
	if (err)
		return kvmm_fail(err, "the daemon's answer: %s", strerror(-err));
	err = hear_welcome(k, &e);
	sock_msg_close_fds(k->msg);
	if (err)
		return err;
	kvmm_lock(&k->lock);
	err = enter_era(k, e);
	kvmm_unlock(&k->lock);
	if (err)
		kvmm_era_put(e);
	return err ? kvmm_fail(err, "epoll: %s", strerror(-err)) : 0;
}

static struct kvmm *conn_new(void)
{
	struct kvmm *k = aligned_alloc(64, round_up(sizeof(*k), 64));

	if (!k)
		return NULL;
	memset(k, 0, sizeof(*k));
	k->sock = -1;
	k->epfd = -1;
	k->wake = -1;
	kvmm_mutex_init(&k->lock, LOCK_CLIENT);
	kvmm_mutex_init(&k->talk_lock, LOCK_TALK);
	kvmm_mutex_init(&k->ops_lock, LOCK_OPS);
	kvmm_cond_init(&k->cond);
	list_init(&k->spaces);
	list_init(&k->leaving);
	list_init(&k->done);
	list_init(&k->told);
	list_init(&k->ready);
	return k;
}

static void free_ops(struct kvmm *k, struct list *l)
{
	struct kvmm_job *op, *tmp;

	list_for_each_entry_safe(op, tmp, l, link) {
		list_del(&op->link);
		kvmm_op_recycle(k, op);
	}
}

static void conn_free(struct kvmm *k)
{
	struct kvmm_era *e;

	drop_socket(k);
	e = kvmm_era_now(k);
	if (e) {
		kvmm_conn_unwatch(k, e->notify);
		kvmm_era_forget(e);
	}
	close_fd(&k->epfd);
	close_fd(&k->wake);
	kvmm_era_put(k->next);
	kvmm_era_put(e);
	while ((e = k->word_eras)) {
		k->word_eras = e->next_out;
		kvmm_era_put(e);
	}
	free_ops(k, &k->done);
	free_ops(k, &k->told);
	free_ops(k, &k->ready);
	kvmm_op_free_all(k);
	kvmm_req_free_all(k);
	/* what is freed may let go of more */
	while (atomic_load(&k->dead) && !atomic_load(&k->readers))
		kvmm_reap(k);
	if (k->alive)
		munmap((void *)k->alive, GUARD_BYTES);
	kvmm_cond_fini(&k->cond);
	kvmm_mutex_fini(&k->lock);
	kvmm_mutex_fini(&k->talk_lock);
	kvmm_mutex_fini(&k->ops_lock);
	if (k->msg)
		sock_msg_close_fds(k->msg);
	free(k->msg);
	free(k->scratch);
	free(k->path);
	free(k);
}

int kvmm_open(const char *socket, const struct kvmm_open_opts *opts,
	      struct kvmm **ret)
{
	struct kvmm_open_opts o = { .size = sizeof(o) };
	uint64_t deadline;
	struct kvmm *k;
	int err = 0;

	if (opts)
		err = kvmm_opts_copy(&o, sizeof(o), opts, "kvmm_open_opts");
	if (err)
		return err;
	if (o.flags)
		return kvmm_fail(-EINVAL, "kvmm_open_opts.flags is 0x%x, not 0",
				 o.flags);
	k = conn_new();
	if (!k)
		return kvmm_fail(-ENOMEM, "out of memory");
	kvmm_breaks_init();
	err = open_init(k, socket, &o);
	if (err)
		goto out_free;
	deadline = deadline_in(k->call_timeout_ns);
	err = dial_until(k, deadline);
	if (!err)
		err = welcome_until(k, deadline);
	if (err)
		goto out_free;
	*ret = k;
	return 0;

out_free:
	conn_free(k);
	return err;
}

/* -- join ----------------------------------------------------------------------------- */

static int join_check(const struct kvmm *k, const struct kvmm_engine *e)
{
	if (!list_empty(&k->spaces))
		return kvmm_fail(-EBUSY, "join before attaching a space");
	if (e->flags & ~(KVMM_LEADER | KVMM_NO_STEP))
		return kvmm_fail(-EINVAL, "kvmm_engine.flags is 0x%x", e->flags);
	if (!e->world || e->world > KVMM_MAX_WORLD)
		return kvmm_fail(-EINVAL,
			"kvmm_engine.world is %u, allowed are 1 to %u",
			e->world, KVMM_MAX_WORLD);
	if (!(e->flags & KVMM_NO_STEP) && e->rank >= e->world)
		return kvmm_fail(-EINVAL, "rank %u of a world of %u", e->rank,
				 e->world);
	return 0;
}

int kvmm_join(struct kvmm *k, const struct kvmm_engine *e)
{
	struct wire_join j = { .h = { .type = WIRE_JOIN, .len = sizeof(j) } };
	struct kvmm_engine eng;
	uint64_t deadline;
	int err;

	err = kvmm_opts_copy(&eng, sizeof(eng), e, "kvmm_engine");
	if (err)
		return err;
	eng.size = sizeof(eng);
	err = kvmm_call_begin(k, &deadline);
	if (err)
		return err;
	err = join_check(k, &eng);
	if (err)
		goto out_end;
	memcpy(j.token, eng.token, sizeof(j.token));
	j.rank = eng.rank;
	j.world = eng.world;
	j.flags = eng.flags;
	/* a join that had timed out may have been granted since */
	k->join_seq = k->seq + 1;
	err = kvmm_call(k, &j.h, WIRE_OK, sizeof(struct wire_hdr), deadline);
	if (err == -EEXIST && k->joined &&
	    !memcmp(&k->engine, &eng, sizeof(eng)))
		err = 0;
	if (err != -ETIMEDOUT && err)
		goto out_end;
	k->engine = eng;
	if (!err)
		kvmm_conn_joined(k);
out_end:
	kvmm_call_end(k);
	return err;
}

/* -- close ---------------------------------------------------------------------------- */

/*
 * In a child: the descriptors are copies of ours, the mappings are not there,
 * and other threads may have been anywhere when it was forked. So only the
 * descriptors go.
 */
static void close_bells(struct kvmm_era *e)
{
	close_fd(&e->doorbell);
	close_fd(&e->notify);
}

static void close_in_child(struct kvmm *k)
{
	struct kvmm_era *e;

	close_fd(&k->sock);
	close_fd(&k->epfd);
	close_fd(&k->wake);
	/* seq_cst: nobody else is here */
	for (e = kvmm_era_now(k); e; e = atomic_load(&e->older))
		close_bells(e);
	for (e = k->word_eras; e; e = e->next_out)
		close_bells(e);
	if (k->next)
		close_bells(k->next);
}

void kvmm_close(struct kvmm *k)
{
	struct kvmm_space *sp, *tmp;
	uint64_t deadline;

	if (!k)
		return;
	if (kvmm_forked(k)) {
		close_in_child(k);
		return;
	}
	/* without a daemon there is nobody to take leave of */
	if (kvmm_call_begin(k, &deadline))
		deadline = 0;
	list_for_each_entry_safe(sp, tmp, &k->spaces, link)
		kvmm_space_leave(sp, deadline);
	if (deadline)
		kvmm_call_end(k);
	if (kvmm_era_now(k)) {
		kvmm_lock(&k->lock);
		kvmm_sq_stop(kvmm_era_now(k));
		kvmm_ops_fail(kvmm_era_now(k), -ENOTCONN);
		kvmm_step_drop(kvmm_era_now(k));
		kvmm_unlock(&k->lock);
	}
	conn_free(k);
}

int kvmm_fd(struct kvmm *k)
{
	return kvmm_forked(k) ? kvmm_fail_forked() : k->epfd;
}
