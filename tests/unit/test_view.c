/* SPDX-License-Identifier: Apache-2.0 */
/* A window's shared memory, while who else writes it does so. */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "libkvmm/lib.h"
#include "tests/lib/fake_kvmmd.h"
#include "tests/lib/unit.h"

static struct fk f;
static struct fc c;

static int setup(void **state)
{
	return fk_start(&f, 1) || fc_open(&f, &c) ? -1 : 0;
}

static int teardown(void **state)
{
	fc_close(&c);
	fk_stop(&f);
	return 0;
}

/* -- the other members' ------------------------------------------------------ */

struct writer {
	volatile uint64_t *off;
	uint64_t	good;
	_Atomic bool	stop;
};

static void *write_offset(void *arg)
{
	struct writer *w = arg;

	while (!w->stop) {
		*w->off = UINT64_C(1) << 40;
		*w->off = w->good;
	}
	return NULL;
}

static const struct kvmm_peer *peer_of(const struct kvmm_att *a)
{
	return atomic_load(&((struct kvmm_att *)a)->view[0][0])->peer[0];
}

/*
 * Its ledger may be anything at any time. What is taken has been checked, not
 * what stood there a moment before.
 */
static void a_peer_that_writes_its_ledger_now_moves_no_bitmap(void **state)
{
	static struct sock_msg m;
	struct wire_peer *w = (struct wire_peer *)m.buf;
	struct writer wr = { .stop = false };
	struct window_ledger *l;
	unsigned int i, taken = 0, wrong = 0;
	struct shm s = SHM_INIT;
	pthread_t thread;

	assert_int_equal(shm_create(&s, "peer", f.win[0].wl.bytes, 1), 0);
	l = s.addr;
	memcpy(l, f.win[0].w, sizeof(*l));
	wr.off = &l->bitmap_off;
	wr.good = l->bitmap_off;
	assert_int_equal(pthread_create(&thread, NULL, write_offset, &wr), 0);
	for (i = 0; i < 2000; i++) {
		const struct kvmm_peer *p;

		*w = (struct wire_peer){
			.h = { .type = WIRE_PEER, .len = sizeof(*w) },
			.space = FK_SPACE, .client = 7,
			.ledger_bytes = s.bytes,
		};
		m.len = sizeof(*w);
		m.fd[0] = dup(s.ro_fd);
		m.nr_fds = 1;
		kvmm_lock(&c.k->lock);
		if (!kvmm_view_peer(c.k, &m)) {
			p = peer_of(c.sp->att);
			wrong += (char *)p->bitmap !=
				 (char *)p->shm.addr + wr.good;
			taken++;
		}
		kvmm_unlock(&c.k->lock);
	}
	wr.stop = true;
	pthread_join(thread, NULL);
	assert_int_equal(wrong, 0);
	assert_true(taken > 0);
	shm_fini(&s);
}

#define T(x) cmocka_unit_test_setup_teardown(x, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(a_peer_that_writes_its_ledger_now_moves_no_bitmap),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
