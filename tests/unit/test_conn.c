/* SPDX-License-Identifier: Apache-2.0 */
/* Connections: opening, waking, losing the daemon, finding the next one. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ipc/base/fd.h"
#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

static struct fk f;
static struct fc c;
static struct kvmm_done d;
static struct kvmm_key key;
static struct kvmm_hit hit;
static struct kvmm_match m;

static int setup(void **state)
{
	struct ring_sqe sqe;

	if (fk_start(&f, 1) || fc_open(&f, &c))
		return -1;
	while (fk_take(&f, &sqe, NULL))
		;
	key = fk_key(1, 0);
	m.size = sizeof(m);
	return 0;
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

static int match(struct kvmm_req *rq)
{
	const struct kvmm_keys keys = { .k = &key, .n = 1 };
	int err = kvmm_match(rq, &keys, 1, 0, &hit, &m);

	return err ? err : (int)m.n_resident;
}

/* Poll until the call says @want; false: it did not in two seconds. */
static bool poll_until(int want)
{
	uint64_t deadline = deadline_in(2 * NSEC_PER_SEC);

	while (kvmm_poll(c.k, &d, 1) != want) {
		if (deadline_past(deadline))
			return false;
		poll(NULL, 0, 1);
	}
	return true;
}

static bool reconnected(uint64_t epoch)
{
	uint64_t deadline = deadline_in(2 * NSEC_PER_SEC);

	while (kvmm_epoch(c.k) != epoch) {
		kvmm_poll(c.k, &d, 0);
		if (deadline_past(deadline))
			return false;
		poll(NULL, 0, 1);
	}
	return true;
}

/* -- opening -------------------------------------------------------------------------- */

static void a_connection_knows_its_daemon(void **state)
{
	struct kvmm_info in = { .size = sizeof(in) };

	assert_int_equal(kvmm_info(c.k, &in), 0);
	assert_string_equal(in.tenant, "fake");
	assert_string_equal(in.daemon_version, "0.0.0");
	assert_string_equal(in.library_version, KVMM_VERSION_STRING);
	assert_int_equal(in.nr_nodes, 2);
	assert_string_equal(in.node[1].name, "nvme0");
	assert_int_equal(in.epoch, 1);
	assert_int_equal(kvmm_node_find(c.k, "nvme0"), 1);
	assert_int_equal(kvmm_node_find(c.k, "gpu0"), -ENOENT);
	assert_non_null(strstr(kvmm_error(c.k), "gpu0"));
}

static void an_older_callers_struct_is_filled_as_far_as_it_goes(void **state)
{
	union {
		struct kvmm_info in;
		uint8_t b[sizeof(struct kvmm_info)];
	} u;

	memset(&u, 0xaa, sizeof(u));
	u.in.size = 12;
	assert_int_equal(kvmm_info(c.k, &u.in), 0);
	assert_int_equal(u.in.size, 12);
	assert_int_equal(u.in.rights, KVMM_RW);
	assert_int_equal(u.b[12], 0xaa);
	u.in.size = 0;
	assert_int_equal(kvmm_info(c.k, &u.in), -EINVAL);
}

static void options_of_the_future_are_refused_only_if_set(void **state)
{
	struct {
		struct kvmm_open_opts o;
		uint64_t more;
	} big = { .o = { .size = sizeof(big) } };
	struct kvmm *k;

	fk_hang_up(&f);
	assert_int_equal(kvmm_open(f.path, &big.o, &k), 0);
	kvmm_close(k);
	big.more = 1;
	assert_int_equal(kvmm_open(f.path, &big.o, &k), -E2BIG);
	big.more = 0;
	big.o.flags = 1;
	assert_int_equal(kvmm_open(f.path, &big.o, &k), -EINVAL);
	big.o.size = 2;
	assert_int_equal(kvmm_open(f.path, &big.o, &k), -EINVAL);
}

static void nobody_there_is_said_and_leaks_nothing(void **state)
{
	struct kvmm_open_opts o = {
		.size = sizeof(o), .call_timeout_ns = 20 * NSEC_PER_MSEC,
	};
	int before = fd_count();
	struct kvmm *k;

	assert_int_equal(kvmm_open("/nonexistent/kvmm.sock", &o, &k),
			 -ENOTCONN);
	assert_non_null(strstr(kvmm_error(NULL), "/nonexistent/kvmm.sock"));
	/* it listens and does not answer */
	f.stopped = true;
	assert_int_equal(kvmm_open(f.path, &o, &k), -ETIMEDOUT);
	assert_int_equal(fd_count(), before);
	f.stopped = false;
}

static void the_environment_names_the_socket(void **state)
{
	struct kvmm *k;

	fk_hang_up(&f);
	setenv("KVMM_SOCKET", f.path, 1);
	assert_int_equal(kvmm_open(NULL, NULL, &k), 0);
	unsetenv("KVMM_SOCKET");
	kvmm_close(k);
}

static bool daemon_has_socket(void)
{
	bool has;

	pthread_mutex_lock(&f.lock);
	has = f.sock >= 0;
	pthread_mutex_unlock(&f.lock);
	return has;
}

static void descriptors_and_mappings_go_with_the_connection(void **state)
{
	int before, i;

	fc_close(&c);
	/* the daemon's end of this one may be open a moment longer, too */
	for (i = 0; i < 1000 && daemon_has_socket(); i++)
		poll(NULL, 0, 1);
	before = fd_count();
	for (i = 0; i < 3; i++) {
		f.win[0].open = false;
		assert_int_equal(fc_open(&f, &c), 0);
		fk_seal(&f, 0, &key, 0, 70, 1);
		assert_int_equal(match(c.rq), 1);
		c.rq = NULL;		/* the close ends it */
		fc_close(&c);
		assert_int_equal(fk_all_pins(&f, 0), 0);
	}
	/* the daemon's end of the socket may be open a moment longer */
	for (i = 0; i < 1000 && fd_count() != before; i++)
		poll(NULL, 0, 1);
	assert_int_equal(fd_count(), before);
	assert_int_equal(fc_open(&f, &c), 0);
}

/* -- waking ------------------------------------------------------------------------------ */

static bool readable(int ms)
{
	struct pollfd p = { .fd = kvmm_fd(c.k), .events = POLLIN };

	return poll(&p, 1, ms) == 1;
}

/* As an event loop does it: sleep, poll, sleep. */
static bool sleeps(void)
{
	uint64_t deadline = deadline_in(NSEC_PER_SEC);

	while (readable(0)) {
		if (deadline_past(deadline))
			return false;
		kvmm_poll(c.k, &d, 1);
	}
	return true;
}

static void who_sleeps_is_woken_by_a_completion(void **state)
{
	struct ring_sqe sqe;
	int i;

	for (i = 0; i < 3; i++) {
		assert_int_equal(kvmm_ping(c.k, i), 0);
		assert_true(sleeps());
		assert_true(fk_take(&f, &sqe, NULL));
		fk_answer(&f, &sqe, 0, NULL, 0);
		assert_true(readable(1000));
		assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
		assert_int_equal(d.op, KVMM_OP_PING);
		assert_int_equal(d.tag, i);
	}
}

static void who_is_awake_costs_the_daemon_no_system_call(void **state)
{
	struct ring_sqe sqe;
	int i;

	for (i = 0; i < 1000; i++) {
		assert_int_equal(kvmm_ping(c.k, i), 0);
		assert_true(fk_take(&f, &sqe, NULL));
		fk_answer(&f, &sqe, 0, NULL, 0);
		assert_int_not_equal(f.l->cq.armed, 2);
		assert_int_equal(kvmm_poll(c.k, &d, 1), 1);
	}
	/* and whoever sleeps now comes back at once */
	assert_true(readable(0));
}

/* A completion that comes between the last look and the sleep is not lost. */
static void a_completion_before_the_sleep_is_seen(void **state)
{
	struct ring_sqe sqe;
	int i;

	for (i = 0; i < 100; i++) {
		assert_int_equal(kvmm_ping(c.k, i), 0);
		assert_true(fk_take(&f, &sqe, NULL));
		if (i % 2)
			assert_true(sleeps());
		fk_answer(&f, &sqe, 0, NULL, 0);
		assert_true(readable(1000));
		assert_true(poll_until(1));
		assert_int_equal(d.tag, i);
	}
}

static void completions_are_told_as_many_as_asked_for(void **state)
{
	struct kvmm_done many[8];
	struct ring_sqe sqe;
	int i;

	for (i = 0; i < 20; i++)
		assert_int_equal(kvmm_ping(c.k, i), 0);
	while (fk_take(&f, &sqe, NULL))
		fk_answer(&f, &sqe, 0, NULL, 0);
	assert_int_equal(kvmm_poll(c.k, many, 8), 8);
	assert_int_equal(many[7].tag, 7);
	assert_int_equal(kvmm_poll(c.k, many, 8), 8);
	assert_int_equal(kvmm_poll(c.k, many, 8), 4);
	assert_int_equal(many[3].tag, 19);
	assert_int_equal(kvmm_poll(c.k, many, 8), 0);
}

/* -- losing it --------------------------------------------------------------------------- */

static void what_is_in_flight_ends_with_the_connection(void **state)
{
	struct ring_sqe sqe;

	assert_int_equal(kvmm_ping(c.k, 1), 0);
	assert_int_equal(kvmm_ping(c.k, 2), 0);
	/* what it said before it went counts */
	assert_true(fk_take(&f, &sqe, NULL));
	fk_answer(&f, &sqe, 0, NULL, 0);
	f.stopped = true;		/* and nobody takes us in again */
	fk_hang_up(&f);
	assert_true(readable(1000));
	assert_true(poll_until(1));
	assert_int_equal(d.tag, 1);
	assert_int_equal(d.result, 0);
	assert_true(poll_until(1));
	assert_int_equal(d.tag, 2);
	assert_int_equal(d.result, -ENOTCONN);
	assert_int_equal(kvmm_poll(c.k, &d, 1), -ENOTCONN);
	f.stopped = false;
}

static void without_a_daemon_calls_answer_at_once(void **state)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	struct kvmm_space *sp;
	struct kvmm_req *rq;
	kvmm_frame_t fr[2];

	fk_seal(&f, 0, &key, 0, 70, 1);
	assert_int_equal(match(c.rq), 1);
	fk_give(&f, 0, 80, 2);
	f.stopped = true;
	fk_hang_up(&f);
	assert_true(poll_until(-ENOTCONN));
	/* what was hit stays readable, frames at hand can be had */
	assert_non_null(kvmm_win_ptr(c.win[0], 0, 70));
	assert_int_equal(fk_pins(&f, 0, 70), 1);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 2, fr, 0), 0);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 2, fr, 0), -EAGAIN);
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &rq), 0);
	assert_int_equal(match(rq), 0);
	assert_int_equal(kvmm_req_end(rq, KVMM_ENDED, 0), 0);
	assert_int_equal(kvmm_ping(c.k, 1), -ENOTCONN);
	assert_int_equal(kvmm_cancel(c.k, 1), -ENOTCONN);
	assert_int_equal(kvmm_fetch(c.rq, 0, 1, 0, 0, 1), -ENOTCONN);
	assert_int_equal(kvmm_space_attach(c.k, fk_desc(1), &sp), -ENOTCONN);
	assert_int_equal(kvmm_reserve(c.sp, 0, 0, 1), -ENOTCONN);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 0);
	kvmm_stats(c.k, &st);
	assert_int_equal(st.connected, 0);
	/* it will be tried again */
	assert_true(kvmm_next_deadline(c.k) <
		    deadline_in(200 * NSEC_PER_MSEC));
	f.stopped = false;
}

static void the_next_daemon_is_found_and_attached_to(void **state)
{
	void *base = kvmm_win_base(c.win[0], 0);
	struct kvmm_stats st = { .size = sizeof(st) };
	struct kvmm_req *rq;
	kvmm_frame_t fr;
	struct kvmm_pub pub = { .flags = KVMM_PUB_ROOT };

	fk_seal(&f, 0, &key, 0, 70, 1);
	fk_give(&f, 0, 80, 1);
	assert_int_equal(match(c.rq), 1);
	assert_int_equal(kvmm_alloc(c.rq, 0, 0, 1, &fr, 0), 0);
	*(char *)kvmm_win_ptr(c.win[0], 0, 70) = 'x';
	kvmm_step_done(c.k, 5);
	fk_restart(&f);
	assert_true(reconnected(2));
	/* its step word goes on where the old one was */
	assert_int_equal(f.l->step, 5);
	/* the old request keeps what it has, and can do no more with it */
	assert_int_equal(*(char *)kvmm_win_ptr(c.win[0], 0, 70), 'x');
	pub.frame = fr;
	assert_int_equal(kvmm_publish(c.rq, 0, &pub, 1, 1), -ESTALE);
	assert_int_equal(kvmm_fetch(c.rq, 0, 1, 0, 0, 1), -ESTALE);
	fk_seal(&f, 0, &key, 0, 71, 1);
	assert_int_equal(match(c.rq), 0);
	/* a new one finds nothing, and is not in the way */
	assert_int_equal(kvmm_req_open(c.sp, 2, NULL, &rq), 0);
	assert_int_equal(match(rq), 0);
	assert_int_equal(kvmm_alloc(rq, 0, 0, 1, &fr, 0), -EAGAIN);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), -EBUSY);
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = rq;
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	assert_ptr_equal(kvmm_win_base(c.win[0], 0), base);
	assert_int_equal(*(char *)kvmm_win_ptr(c.win[0], 0, 71), 0);
	/* and now the very same request finds pages and frames */
	assert_int_equal(match(rq), 1);
	assert_int_equal(hit.frame, 71);
	fk_give(&f, 0, 90, 1);
	assert_int_equal(kvmm_alloc(rq, 0, 0, 1, &fr, 0), 0);
	assert_int_equal(fr, 90);
	kvmm_stats(c.k, &st);
	assert_int_equal(st.connected, 1);
	assert_int_equal(st.reconnects, 1);
	assert_int_equal(f.attaches, 2);
}

/* Many times over, with nothing held: nothing may pile up. */
static void daemons_may_come_and_go(void **state)
{
	int fds = 0, i;

	for (i = 0; i < 20; i++) {
		fk_restart(&f);
		assert_true(reconnected(i + 2));
		kvmm_req_end(c.rq, KVMM_ENDED, 0);
		assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
		assert_int_equal(kvmm_req_open(c.sp, i, NULL, &c.rq), 0);
		fk_seal(&f, 0, &key, 0, 70, 1);
		assert_int_equal(match(c.rq), 1);
		kvmm_poll(c.k, &d, 1);
		if (i == 2)
			fds = fd_count();
	}
	assert_int_equal(fd_count(), fds);
}

/* A step word that was handed out is written by a stream: it stays. */
/* Its completions are nonsense, whoever asks: once is at once, again is later. */
static void a_daemon_that_lies_is_not_dialled_all_the_time(void **state)
{
	uint64_t end = deadline_in(350 * NSEC_PER_MSEC);
	struct kvmm_done d;
	unsigned int before;

	pthread_mutex_lock(&f.lock);
	before = f.hellos;
	f.cq_tail += 16 * LEDGER_CQ_ENTRIES;
	f.l->cq.tail = f.cq_tail;
	pthread_mutex_unlock(&f.lock);
	while (!deadline_past(end)) {
		kvmm_poll(c.k, &d, 1);
		poll(NULL, 0, 1);
	}
	pthread_mutex_lock(&f.lock);
	assert_true(f.hellos > before);
	assert_true(f.hellos - before <= 6);
	pthread_mutex_unlock(&f.lock);
}

static void a_step_word_outlives_its_daemon(void **state)
{
	uint64_t *old = kvmm_step_word(c.k);

	*old = 3;
	fk_restart(&f);
	assert_true(reconnected(2));
	*old = 4;
	assert_ptr_not_equal(kvmm_step_word(c.k), old);
	assert_int_equal(kvmm_step_engine(c.k), 3);
	*kvmm_step_word(c.k) = 9;
	assert_int_equal(f.l->step, 9);
}

/* -- a daemon that is stopped ---------------------------------------------------------------- */

static void set_up_calls_give_up_in_time(void **state)
{
	uint64_t t0 = now_ns();
	struct kvmm_space *sp;
	struct kvmm_desc desc = *fk_desc(1);

	desc.model = "other";
	f.stopped = true;
	assert_int_equal(kvmm_space_attach(c.k, &desc, &sp), -ETIMEDOUT);
	assert_true(now_ns() - t0 >= FC_TIMEOUT_NS);
	assert_true(now_ns() - t0 < 4 * FC_TIMEOUT_NS);
	fk_extent_up(&f, 0, 2);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), -ETIMEDOUT);
	f.stopped = false;
	/* the late extents are dropped, and asked for again */
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	assert_non_null(kvmm_win_ptr(c.win[0], 0, 2 * FK_FPE));
}

/* What a call that gave up was granted is given back when the reply comes. */
static void a_late_window_is_given_back(void **state)
{
	struct fk_win *w = &f.win[0];

	kvmm_win_close(c.win[0]);
	assert_int_equal(w->closes, 1);
	f.stopped = true;
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]),
			 -ETIMEDOUT);
	f.stopped = false;
	poll(NULL, 0, 50);
	assert_int_equal(w->opens, 2);
	assert_true(w->open);
	/* the next call finds the late reply first */
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]), 0);
	assert_int_equal(w->closes, 2);
	assert_true(w->open);
}

static void a_late_attachment_is_given_back(void **state)
{
	struct kvmm_space *sp;
	int i;

	kvmm_space_detach(c.sp);
	c.rq = NULL;
	assert_int_equal(f.detaches, 1);
	f.stopped = true;
	assert_int_equal(kvmm_space_attach(c.k, fk_desc(1), &sp), -ETIMEDOUT);
	f.stopped = false;
	for (i = 0; i < 1000 && f.detaches < 2; i++) {
		kvmm_poll(c.k, &d, 1);
		poll(NULL, 0, 1);
	}
	assert_int_equal(f.detaches, 2);
	assert_int_equal(kvmm_space_attach(c.k, fk_desc(1), &sp), 0);
}

/* Without descriptors there is no window, on either side. */
static void a_window_that_cannot_be_taken_is_given_back(void **state)
{
	struct rlimit old, less;
	int top, err;

	kvmm_win_close(c.win[0]);
	top = dup(0);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	less = old;
	less.rlim_cur = top + 1;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &less), 0);
	err = kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	close(top);
	assert_int_equal(err, -EMFILE);
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]), 0);
	assert_int_equal(f.win[0].closes, 2);
}

static void closing_does_not_wait_for_ever(void **state)
{
	uint64_t t0 = now_ns();

	f.stopped = true;
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	kvmm_close(c.k);
	assert_true(now_ns() - t0 < 4 * FC_TIMEOUT_NS);
	f.stopped = false;
	fk_hang_up(&f);
	f.win[0].open = false;
	assert_int_equal(fc_open(&f, &c), 0);
}

/* -- windows -------------------------------------------------------------------------------- */

static struct {
	unsigned int up, down;
	char *last;
} seen;

static void on_extent(void *arg, void *ptr, size_t bytes, int up)
{
	assert_ptr_equal(arg, &seen);
	assert_int_equal(bytes, FK_FPE * FK_STRIDE);
	seen.last = ptr;
	/* mapped in both cases */
	*(volatile char *)ptr;
	if (up)
		seen.up++;
	else
		seen.down++;
}

static void extents_come_and_go_with_a_sync(void **state)
{
	const struct kvmm_win_opts o = {
		.size = sizeof(o), .on_extent = on_extent, .arg = &seen,
	};
	char *base;

	memset(&seen, 0, sizeof(seen));
	kvmm_win_close(c.win[0]);
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, &o, &c.win[0]), 0);
	assert_int_equal(seen.up, 1);
	base = kvmm_win_base(c.win[0], 0);
	assert_ptr_equal(kvmm_win_base(c.win[0], 1), base + 1024);
	assert_null(kvmm_win_base(c.win[0], 2));
	assert_int_equal(kvmm_win_stride(c.win[0], 1), FK_STRIDE);
	/* the null frame is ours, the rest of extent 0 is not there */
	memset(kvmm_win_ptr(c.win[0], 0, 0), 1, FK_STRIDE);
	assert_null(kvmm_win_ptr(c.win[0], 0, 1));
	assert_null(kvmm_win_ptr(c.win[0], 0, 2 * FK_FPE));
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 0);
	fk_extent_up(&f, 0, 2);
	fk_extent_up(&f, 0, 5);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 2);
	assert_int_equal(f.win[0].w->pins_off > 0, 1);
	assert_int_equal(*window_bitmap(f.win[0].w), 1 << 1 | 1 << 2 | 1 << 5);
	assert_ptr_equal(kvmm_win_ptr(c.win[0], 1, 5 * FK_FPE + 3),
			 base + (5 * FK_FPE + 3) * FK_STRIDE + 1024);
	assert_null(kvmm_win_ptr(c.win[0], 0, 3 * FK_FPE));
	fk_extent_down(&f, 0, 2);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 1);
	assert_int_equal(seen.down, 1);
	assert_ptr_equal(seen.last, base + 2 * FK_FPE * FK_STRIDE);
	assert_int_equal(*window_bitmap(f.win[0].w), 1 << 1 | 1 << 5);
	assert_null(kvmm_win_ptr(c.win[0], 0, 2 * FK_FPE));
	assert_null(kvmm_win_ptr(c.win[0], 0, UINT32_MAX));
	kvmm_win_close(c.win[0]);
	assert_int_equal(seen.down, 3);
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]), 0);
}

static void a_window_reserves_no_more_than_asked_for(void **state)
{
	const struct kvmm_win_opts o = {
		.size = sizeof(o), .max_frames = 2 * FK_FPE,
	};

	kvmm_win_close(c.win[0]);
	fk_extent_up(&f, 0, 2);
	fk_extent_up(&f, 0, 3);
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, &o, &c.win[0]), 0);
	assert_non_null(kvmm_win_ptr(c.win[0], 0, 2 * FK_FPE));
	assert_null(kvmm_win_ptr(c.win[0], 0, 3 * FK_FPE));
	/* a page there is not a hit here */
	fk_seal(&f, 0, &key, 0, 3 * FK_FPE, 1);
	assert_int_equal(match(c.rq), 0);
}

/* Another member's window: what it has not mapped is no hit for us. */
static void a_page_is_a_hit_where_the_peer_has_mapped_it(void **state)
{
	struct wire_peer w = {
		.h = { .type = WIRE_PEER, .len = sizeof(w) },
		.space = FK_SPACE, .client = 7,
	};
	struct shm peer = SHM_INIT;
	struct window_ledger *l;

	fk_seal(&f, 0, &key, 0, 70, 1);
	assert_int_equal(match(c.rq), 1);
	assert_int_equal(shm_create(&peer, "peer", f.win[0].wl.bytes, 1), 0);
	l = peer.addr;
	memcpy(l, f.win[0].w, sizeof(*l));
	w.ledger_bytes = peer.bytes;
	assert_int_equal(sock_send(f.sock, &w.h, &peer.ro_fd, 1), 0);
	while (match(c.rq))
		kvmm_poll(c.k, &d, 1);
	assert_int_equal(hit.state, KVMM_PENDING);
	assert_int_equal(m.sync_wanted, 1);
	/* ours to touch all the same */
	assert_non_null(kvmm_win_ptr(c.win[0], 0, 70));
	*window_bitmap(l) = 1 << 1;
	assert_int_equal(match(c.rq), 1);
	*window_bitmap(l) = 0;
	assert_int_equal(match(c.rq), 0);
	/* told twice it is one; and then it goes */
	assert_int_equal(sock_send(f.sock, &w.h, &peer.ro_fd, 1), 0);
	w.gone = 1;
	assert_int_equal(sock_send(f.sock, &w.h, NULL, 0), 0);
	while (!match(c.rq))
		kvmm_poll(c.k, &d, 1);
	shm_fini(&peer);
}

static void what_is_open_is_not_opened_again(void **state)
{
	struct kvmm_space *sp;
	struct kvmm_win *w;

	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &w), -EBUSY);
	assert_int_equal(kvmm_win_open(c.sp, 1, 0, NULL, &w), -EINVAL);
	assert_int_equal(kvmm_win_open(c.sp, 0, 1, NULL, &w), -EINVAL);
	assert_int_equal(kvmm_win_open(c.sp, 0, 9, NULL, &w), -EINVAL);
	assert_int_equal(kvmm_space_attach(c.k, fk_desc(1), &sp), -EBUSY);
}

/* -- fork ---------------------------------------------------------------------------------- */

static int in_child(void)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	const struct kvmm_keys keys = { .k = &key, .n = 1 };
	struct kvmm_req *rq;
	struct kvmm_pub pub = { .frame = 70 };
	struct kvmm_win *w;
	kvmm_frame_t fr;

	return kvmm_match(c.rq, &keys, 1, 0, &hit, &m) == -ECHILD &&
	       kvmm_peek(c.rq, &keys, 1, 0, &m) == -ECHILD &&
	       kvmm_alloc(c.rq, 0, 0, 1, &fr, 0) == -ECHILD &&
	       kvmm_free(c.rq, 0, 0, &fr, 1, 0) == -ECHILD &&
	       kvmm_publish(c.rq, 0, &pub, 1, 1) == -ECHILD &&
	       kvmm_fetch(c.rq, 0, 1, 0, 0, 1) == -ECHILD &&
	       kvmm_trim(c.rq, 0, 0) == -ECHILD &&
	       kvmm_req_open(c.sp, 1, NULL, &rq) == -ECHILD &&
	       kvmm_req_end(c.rq, 0, 0) == -ECHILD &&
	       kvmm_poll(c.k, &d, 1) == -ECHILD &&
	       kvmm_step_done(c.k, 1) == -ECHILD &&
	       kvmm_stats(c.k, &st) == -ECHILD &&
	       kvmm_mode(c.sp) == -ECHILD && kvmm_fd(c.k) == -ECHILD &&
	       kvmm_win_sync(c.win[0], 0) == -ECHILD &&
	       kvmm_win_open(c.sp, 0, 0, NULL, &w) == -ECHILD &&
	       kvmm_ping(c.k, 1) == -ECHILD && !kvmm_step_word(c.k) &&
	       !kvmm_win_ptr(c.win[0], 0, 70) &&
	       strstr(kvmm_error(c.k), "child");
}

static void a_child_is_told_and_disturbs_nobody(void **state)
{
	int status;
	pid_t pid;

	fk_seal(&f, 0, &key, 0, 70, 1);
	assert_int_equal(match(c.rq), 1);
	pid = fork();
	if (!pid) {
		int good = in_child();

		kvmm_close(c.k);
		_exit(good ? 0 : 1);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(match(c.rq), 1);
	assert_int_equal(fk_pins(&f, 0, 70), 1);
	assert_int_equal(kvmm_ping(c.k, 1), 0);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_connection_knows_its_daemon),
		T(an_older_callers_struct_is_filled_as_far_as_it_goes),
		T(options_of_the_future_are_refused_only_if_set),
		T(nobody_there_is_said_and_leaks_nothing),
		T(the_environment_names_the_socket),
		T(descriptors_and_mappings_go_with_the_connection),
		T(who_sleeps_is_woken_by_a_completion),
		T(who_is_awake_costs_the_daemon_no_system_call),
		T(a_completion_before_the_sleep_is_seen),
		T(completions_are_told_as_many_as_asked_for),
		T(what_is_in_flight_ends_with_the_connection),
		T(without_a_daemon_calls_answer_at_once),
		T(the_next_daemon_is_found_and_attached_to),
		T(daemons_may_come_and_go),
		T(a_daemon_that_lies_is_not_dialled_all_the_time),
		T(a_step_word_outlives_its_daemon),
		T(set_up_calls_give_up_in_time),
		T(a_late_window_is_given_back),
		T(a_late_attachment_is_given_back),
		T(a_window_that_cannot_be_taken_is_given_back),
		T(closing_does_not_wait_for_ever),
		T(extents_come_and_go_with_a_sync),
		T(a_window_reserves_no_more_than_asked_for),
		T(a_page_is_a_hit_where_the_peer_has_mapped_it),
		T(what_is_open_is_not_opened_again),
		T(a_child_is_told_and_disturbs_nobody),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
