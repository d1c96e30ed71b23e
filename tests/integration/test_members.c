/* SPDX-License-Identifier: Apache-2.0 */
/* What the members of one engine know of each other, against a real kvmmd. */
#include <string.h>

#include "ipc/base/clock.h"
#include "tests/lib/fixture.h"
#include "tests/lib/unit.h"

#define PAGES		700	/* more than the first extents hold */
#define WAIT_MS		10000

static struct kvmm_engine member(uint32_t rank, uint32_t flags)
{
	struct kvmm_engine e = {
		.size = sizeof(e), .flags = flags, .rank = rank, .world = 2,
	};

	memset(e.token, 0x5a, sizeof(e.token));
	return e;
}

/* Two members and a stranger that fills the node. */
static void start(struct fx *f)
{
	struct kvmm_engine e0 = member(0, KVMM_LEADER), e1 = member(1, 0);
	struct tc_opts o0 = { .engine = &e0 }, o1 = { .engine = &e1 };
	struct td_opts o = { .dram_bytes = 64 * MIB };

	fx_start(f, &o);
	tc_open(&f->c[0], f->d.socket, &o0);
	tc_open(&f->c[1], f->d.socket, &o1);
	tc_open(&f->c[2], f->d.socket, NULL);
	T_EQ(tc_put(&f->c[2], 1, 0, PAGES), PAGES);
}

/* What the leader finds, having mapped all there is itself. */
static unsigned int leader_finds(struct fx *f, struct kvmm_match *m)
{
	struct kvmm_req *rq = tc_req(&f->c[0], 1);
	unsigned int n;

	tc_poll(&f->c[0]);
	tc_sync(&f->c[0], 0);
	n = tc_match_once(&f->c[0], rq, 1, PAGES, NULL, m);
	tc_end(rq);
	return n;
}

/* A rank that has not mapped an extent could not read the page. */
static void a_page_is_a_hit_where_all_members_have_mapped_it(void **state)
{
	struct fx *f = *state;
	struct kvmm_match m;

	start(f);
	T_CHECK(leader_finds(f, &m) < PAGES);
	T_EQ(m.n_pages, PAGES);
	T_EQ(m.sync_wanted, 1);
	/* a stranger is no member */
	T_EQ(tc_hits(&f->c[2], 1, PAGES), PAGES);
	T_CHECK(tc_sync(&f->c[1], 0) > 0);
	T_EQ(leader_finds(f, &m), PAGES);
	T_EQ(m.sync_wanted, 0);
	/* and the other way round: the leader has mapped all */
	T_EQ(tc_hits(&f->c[1], 1, PAGES), PAGES);
}

static void a_window_that_is_closed_counts_no_more(void **state)
{
	struct fx *f = *state;
	struct kvmm_match m;

	start(f);
	T_CHECK(leader_finds(f, &m) < PAGES);
	kvmm_win_close(f->c[1].win[0]);
	T_WAIT(WAIT_MS, leader_finds(f, &m) == PAGES);
	/* opened again it is mapped from the start */
	T_OK(kvmm_win_open(f->c[1].sp, 0, f->c[1].node, NULL,
			   &f->c[1].win[0]));
	T_EQ(leader_finds(f, &m), PAGES);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		FX_TEST(a_page_is_a_hit_where_all_members_have_mapped_it),
		FX_TEST(a_window_that_is_closed_counts_no_more),
	};

	fx_filter();
	return cmocka_run_group_tests(tests, NULL, NULL);
}
