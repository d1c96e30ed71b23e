/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pin protocol, both sides in one process over one mapping, so that
 * ThreadSanitizer can follow it: what libkvmm matches and pins against what mm
 * publishes and reclaims. A page that is read is plain memory, so a reader that
 * is not ordered before the next writer is a race that the sanitizer reports;
 * without it a wrong byte tells.
 */
#include <stdio.h>

#include "tests/lib/pin_rig.h"
#include "tests/lib/proc.h"
#include "tests/lib/unit.h"

#define RACE_MS		(test_long() ? 60000u : 1500u)

static int setup(void **state)
{
	*state = pr_open();
	return 0;
}

static int teardown(void **state)
{
	pr_close(*state);
	return 0;
}

static void race(struct pin_rig *pr, bool shared)
{
	struct pin_race r = { .shared = shared, .ms = RACE_MS };

	pr_race(pr, test_seed(), &r);
	printf("# %llu published, %llu reclaimed, %llu hits, %llu misses, %llu pins met\n",
	       (unsigned long long)r.puts, (unsigned long long)r.drops,
	       (unsigned long long)r.hits, (unsigned long long)r.misses,
	       (unsigned long long)pr_pinned(pr));
	T_EQ(r.wrong, 0);
	/* they have really met */
	T_CHECK(r.hits > 1000 && r.misses > 100);
	T_CHECK(r.puts > 100 && r.drops > 100);
	pr_check(pr);
}

static void two_processes_read_what_is_reclaimed(void **state)
{
	race(*state, false);
}

static void two_threads_of_one_process_read_what_is_reclaimed(void **state)
{
	race(*state, true);
}

static void a_pinned_page_stays_and_an_unpinned_one_goes(void **state)
{
	struct pin_rig *pr = *state;
	struct kvmm_req *a = pr_req(pr, 0), *b = pr_req(pr, 1);
	struct kvmm_hit hit[PR_PAGES], other[PR_PAGES];
	uint64_t met = pr_pinned(pr);
	unsigned int i;

	pr_put(pr, 1);
	T_EQ(pr_match(pr, a, 1, hit), PR_PAGES);
	T_EQ(pr_match(pr, b, 1, other), PR_PAGES);
	T_CHECK(!pr_drop(pr, 1));
	T_CHECK(pr_pinned(pr) > met);
	pr_unpin(a);
	T_CHECK(!pr_drop(pr, 1));	/* the other one still reads */
	for (i = 0; i < PR_PAGES; i++) {
		T_EQ(hit[i].frame, other[i].frame);
		T_EQ(pr_wrong(pr, other[i].frame, 1, i), 0);
	}
	pr_unpin(b);
	T_CHECK(pr_drop(pr, 1));
	T_EQ(pr_match(pr, a, 1, hit), 0);
	pr_check(pr);
	pr_req_free(a);
	pr_req_free(b);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(
			a_pinned_page_stays_and_an_unpinned_one_goes,
			setup, teardown),
		cmocka_unit_test_setup_teardown(
			two_processes_read_what_is_reclaimed, setup, teardown),
		cmocka_unit_test_setup_teardown(
			two_threads_of_one_process_read_what_is_reclaimed,
			setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
