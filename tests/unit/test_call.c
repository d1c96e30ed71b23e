/* SPDX-License-Identifier: Apache-2.0 */
/* Messages that nobody asked for, and calls that wait for each other. */
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

#define FRAME	70u

static struct fk f;
static struct fc c;
static struct kvmm_done d;
static struct kvmm_key key;

static int setup(void **state)
{
	if (fk_start(&f, 1) || fc_open(&f, &c))
		return -1;
	key = fk_key(1, 0);
	fk_seal(&f, 0, &key, FK_FULL, FRAME, 1);
	return 0;
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

/* Poll until the connection has been made once more, if it was lost. */
static bool comes_again(void)
{
	struct kvmm_stats st = { .size = sizeof(st) };
	uint64_t deadline = deadline_in(5 * NSEC_PER_SEC);

	do {
		kvmm_poll(c.k, &d, 1);
		assert_int_equal(kvmm_stats(c.k, &st), 0);
		if (st.reconnects && st.connected)
			return true;
		poll(NULL, 0, 1);
	} while (!deadline_past(deadline));
	return false;
}

/* -- what cannot be taken ---------------------------------------------------------- */

static struct rlimit old_limit;
static int top;

/* No descriptor is free from here on; how long, is the test's business. */
static void no_descriptors(void)
{
	struct rlimit less;

	top = dup(0);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old_limit), 0);
	less = old_limit;
	less.rlim_cur = top;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &less), 0);
	close(top);
}

static void descriptors_again(void)
{
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old_limit), 0);
}

static void send_one(struct wire_hdr *h, int fd)
{
	assert_int_equal(sock_send(f.sock, h, &fd, 1), 0);
}

/* Read what is in the socket, whatever its schedule says. */
static void poll_socket(void)
{
	poll(NULL, 0, 2 * LIB_SOCK_CHECK_NS / NSEC_PER_MSEC);
	kvmm_poll(c.k, &d, 1);
}

static struct wire_peer peer_msg(const struct shm *s)
{
	return (struct wire_peer){
		.h = { .type = WIRE_PEER, .len = sizeof(struct wire_peer) },
		.space = FK_SPACE, .client = 7, .ledger_bytes = s->bytes,
	};
}

static struct shm peer_make(void)
{
	struct shm s = SHM_INIT;

	assert_int_equal(shm_create(&s, "peer", f.win[0].wl.bytes, 1), 0);
	memcpy(s.addr, f.win[0].w, sizeof(*f.win[0].w));
	return s;
}

/* A rank that has a window of which we do not know would fault on our hits. */
static void a_peer_that_cannot_be_taken_ends_the_connection(void **state)
{
	struct shm s = peer_make();
	struct wire_peer w = peer_msg(&s);

	assert_int_equal(fc_match(&c, &key), 1);
	no_descriptors();
	send_one(&w.h, s.ro_fd);
	poll_socket();
	descriptors_again();
	/* no hit is found that the peer may not have mapped */
	assert_int_equal(fc_match(&c, &key), 0);
	assert_true(comes_again());
	shm_fini(&s);
}

static void a_peer_that_makes_no_sense_ends_the_connection(void **state)
{
	struct shm s = peer_make();
	struct wire_peer w = peer_msg(&s);

	((struct window_ledger *)s.addr)->magic = 0;
	send_one(&w.h, s.ro_fd);
	poll_socket();
	assert_int_equal(fc_match(&c, &key), 0);
	assert_true(comes_again());
	shm_fini(&s);
}

/* With the old index every page that is made from now on would be a miss. */
static void an_index_that_cannot_be_taken_ends_the_connection(void **state)
{
	struct wire_index w = {
		.h = { .type = WIRE_INDEX, .len = sizeof(w) },
		.space = FK_SPACE, .bytes = f.index_shm.bytes,
	};

	no_descriptors();
	send_one(&w.h, f.index_shm.ro_fd);
	poll_socket();
	descriptors_again();
	assert_true(comes_again());
}

/* Without its word the engine's step would stand at 0 for ever. */
static void a_member_that_cannot_be_taken_ends_the_connection(void **state)
{
	struct wire_member w = {
		.h = { .type = WIRE_MEMBER, .len = sizeof(w) },
		.rank = 1, .world = 2, .ledger_bytes = f.ledger_shm.bytes,
	};

	no_descriptors();
	send_one(&w.h, f.ledger_shm.fd);
	poll_socket();
	descriptors_again();
	assert_true(comes_again());
}

/* It may come while a call waits for its answer, too. */
static void a_call_notices_it_as_well(void **state)
{
	struct shm s = peer_make();
	struct wire_peer w = peer_msg(&s);

	((struct window_ledger *)s.addr)->magic = 0;
	fk_extent_up(&f, 0, 2);
	send_one(&w.h, s.ro_fd);
	assert_int_equal(kvmm_win_sync(c.win[0], 0), -ENOTCONN);
	assert_true(comes_again());
	kvmm_req_end(c.rq, KVMM_ENDED, 0);
	c.rq = NULL;
	f.win[0].open = false;
	assert_int_equal(kvmm_win_sync(c.win[0], 0), 2);
	shm_fini(&s);
}

static void a_call_without_descriptors_notices_it(void **state)
{
	struct shm s = peer_make();
	struct wire_peer w = peer_msg(&s);
	int err;

	fk_extent_up(&f, 0, 2);
	no_descriptors();
	send_one(&w.h, s.ro_fd);
	err = kvmm_win_sync(c.win[0], 0);
	descriptors_again();
	assert_int_equal(err, -ENOTCONN);
	assert_true(comes_again());
	shm_fini(&s);
}

/* What a call that gave up was granted; nothing can be made of it here. */
static void a_late_window_without_descriptors_is_given_back(void **state)
{
	struct fk_win *w = &f.win[0];
	int i;

	kvmm_win_close(c.win[0]);
	f.stopped = true;
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]),
			 -ETIMEDOUT);
	f.stopped = false;
	for (i = 0; i < 1000 && w->opens < 2; i++)
		poll(NULL, 0, 1);
	poll(NULL, 0, 20);
	no_descriptors();
	poll_socket();
	descriptors_again();
	for (i = 0; i < 1000 && w->closes < 2; i++)
		poll(NULL, 0, 1);
	assert_int_equal(w->closes, 2);
	assert_int_equal(kvmm_win_open(c.sp, 0, 0, NULL, &c.win[0]), 0);
}

/* -- threads ----------------------------------------------------------------------- */

#define WAITERS	3
#define LONG_NS	(10 * NSEC_PER_SEC)

static void *call(void *arg)
{
	struct kvmm_desc desc = *fk_desc(1);
	struct kvmm_space *sp;

	desc.model = "other";
	assert_int_equal(kvmm_space_attach(arg, &desc, &sp), -ENOTCONN);
	return NULL;
}

/* One waits for the answer, the others for their turn: all are told. */
static void who_waits_for_a_call_is_told_of_the_loss(void **state)
{
	const struct kvmm_open_opts o = {
		.size = sizeof(o), .call_timeout_ns = LONG_NS,
	};
	pthread_t t[WAITERS];
	struct kvmm *k;
	uint64_t t0;
	int i;

	fk_hang_up(&f);
	assert_int_equal(kvmm_open(f.path, &o, &k), 0);
	f.stopped = true;
	for (i = 0; i < WAITERS; i++)
		assert_int_equal(pthread_create(&t[i], NULL, call, k), 0);
	poll(NULL, 0, 100);
	t0 = now_ns();
	fk_hang_up(&f);
	for (i = 0; i < WAITERS; i++)
		pthread_join(t[i], NULL);
	assert_true(now_ns() - t0 < LONG_NS / 2);
	kvmm_close(k);
	f.stopped = false;
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_peer_that_cannot_be_taken_ends_the_connection),
		T(a_peer_that_makes_no_sense_ends_the_connection),
		T(an_index_that_cannot_be_taken_ends_the_connection),
		T(a_member_that_cannot_be_taken_ends_the_connection),
		T(a_call_notices_it_as_well),
		T(a_call_without_descriptors_notices_it),
		T(a_late_window_without_descriptors_is_given_back),
		T(who_waits_for_a_call_is_told_of_the_loss),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
