/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring_rig.h - a server and one client of it, for the tests of its side of the
 * rings
 *
 * Beside server_rig.h: each test has a server, @rig, and a client that has said
 * hello, @cl, or one with a window as well (RING_WIN_TEST()).
 */
#ifndef KVMM_TESTS_LIB_RING_RIG_H
#define KVMM_TESTS_LIB_RING_RIG_H

#include <errno.h>
#include <string.h>

#include <kvmm/kvmm.h>

#include "ipc/base/clock.h"
#include "tests/lib/server_rig.h"
#include "tests/lib/unit.h"

static struct server_rig rig;
static struct raw_client cl;

static inline int ring_setup(void **state)
{
	int err = srig_open(&rig, "\"spin_us\": 0");

	if (err)
		return err;
	assert_int_equal(rc_connect(&rig, 0, &cl), 0);
	rc_hello(&cl);
	return 0;
}

static inline int ring_setup_window(void **state)
{
	int err = ring_setup(state);

	if (err)
		return err;
	rc_attach(&cl);
	rc_win_open(&cl, KVMM_RW);
	return 0;
}

static inline int ring_teardown(void **state)
{
	rc_close(&cl);
	srig_close(&rig);
	return 0;
}

static inline struct session *session(void)
{
	return list_first(&rig.s->sessions, struct session, link);
}

/* It was closed by the test. */
static inline void no_client(void)
{
	cl = (struct raw_client){ .fd = -1, .doorbell = -1, .notify = -1,
				  .hdr = SHM_INIT, .ledger_shm = SHM_INIT,
				  .table = SHM_INIT, .wl_shm = SHM_INIT };
}

static inline void make_page(struct ring_pub *pub, uint32_t frame, uint8_t id)
{
	*pub = (struct ring_pub){ .frame = frame };
	memset(pub->key, id, sizeof(pub->key));
}

static inline void publish(struct raw_client *c, struct ring_pub *pub,
			   uint32_t n, uint64_t tag)
{
	struct ring_sqe e = {
		.op = RING_PUBLISH, .win = c->win,
		.space = (uint16_t)c->space, .n = n, .tag = tag,
	};

	rc_submit(c, &e, pub, n * sizeof(*pub));
}

static inline struct mm_space *space(void)
{
	return mm_space_get(rig.s->mm, cl.space);
}

static inline void asked_of(const struct mm_space_info *si, void *arg)
{
	*(uint64_t *)arg += si->asked;
}

static inline uint64_t asked(void)
{
	uint64_t n = 0;

	mm_for_each_space(rig.s->mm, asked_of, &n);
	return n;
}

static inline void submit_end(struct ring_key *key, uint32_t n)
{
	struct ring_sqe e = {
		.op = RING_END, .space = (uint16_t)cl.space, .nr_keys = n,
	};

	rc_submit(&cl, &e, key, n * sizeof(*key));
}

/* For cmocka's tables. */
#define RING_TEST(f)							\
	cmocka_unit_test_setup_teardown(f, ring_setup, ring_teardown)
#define RING_WIN_TEST(f)						\
	cmocka_unit_test_setup_teardown(f, ring_setup_window, ring_teardown)

#endif
