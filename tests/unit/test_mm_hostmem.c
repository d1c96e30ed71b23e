/* SPDX-License-Identifier: Apache-2.0 */
/* The host lacks memory: what is not in use goes back, and nothing grows. */
#include "ipc/base/clock.h"
#include "tests/lib/mm_rig.h"
#include "tests/lib/unit.h"

#define PAGE	4096u
#define CHAINS	6u
#define LEN	256u

static struct rig rig;
static uint64_t goal;

static bool down_to_goal(void *arg)
{
	struct rig *r = arg;

	return r->host->used <= goal;
}

static struct rig_client *filled(void)
{
	struct rig_client *c;
	uint32_t i;

	mr_open(&rig, &(struct rig_opts){ .bytes = 16 << 20,
					  .extent_bytes = 1 << 20 });
	c = mr_client(&rig, 0, KVMM_RW);
	mr_attach(c, "a", PAGE);
	mr_win(c, 0);
	for (i = 1; i <= CHAINS; i++)
		mr_put(c, i, 0, LEN);
	mr_check(&rig);
	return c;
}

static void extents_go_back_oldest_first(void **state)
{
	struct rig_client *c = filled();
	uint64_t had = rig.host->used;
	uint32_t frame = copy_at(mr_page(c, 1, 0), 0)->frame;

	assert_true(had >= 6u << 20);
	mr_pin(c, frame, 1);
	goal = had - (3 << 20);
	mm_host_short(rig.mm, 3 << 20);
	/* as its client would: what it is told to unmap it does */
	for (unsigned int i = 0; i < 200 && !down_to_goal(&rig); i++) {
		struct timespec ts = ns_to_timespec(NSEC_PER_MSEC);

		mr_run(&rig);
		mr_sync(c);
		nanosleep(&ts, NULL);
	}
	assert_true(down_to_goal(&rig));
	assert_true(mr_page(c, 1, 0));		/* pinned */
	assert_true(mr_page(c, CHAINS, 0));	/* the last ones */
	mr_check(&rig);
	mr_close(&rig);
}

static void nothing_grows_meanwhile(void **state)
{
	struct rig_client *c = filled();
	uint64_t had = rig.host->used;
	uint32_t i;

	mm_host_short(rig.mm, 1);
	goal = had;
	for (i = 20; i < 40; i++)
		mr_put(c, i, 0, LEN / 2);
	assert_true(rig.host->used <= had);
	/* a class of its own gets its first extent all the same */
	mr_attach(mr_client(&rig, 1, KVMM_RW), "b", 2 * PAGE);
	mr_win(&rig.client[1], 0);
	mr_put(&rig.client[1], 1, 0, 4);
	mm_host_short(rig.mm, 0);
	had = rig.host->used;
	for (i = 50; i < 70; i++)
		mr_put(c, i, 0, LEN);
	assert_true(rig.host->used > had);
	mr_check(&rig);
	mr_close(&rig);
}

static void pin_all(struct rig_client *c, int by)
{
	uint32_t i, at;

	for (i = 1; i <= CHAINS; i++)
		for (at = 0; at < LEN; at++)
			mr_pin(c, copy_at(mr_page(c, i, at), 0)->frame, by);
}

/* Each extent was looked at in vain: not again in each round of the loop. */
static void what_is_all_in_use_is_not_searched_all_the_time(void **state)
{
	struct rig_client *c = filled();
	struct mm_pool *p = c->win->pool;
	uint64_t looked, now;
	uint64_t had = rig.host->used;

	pin_all(c, 1);
	mm_host_short(rig.mm, 1 << 20);
	mr_run(&rig);
	looked = p->look_ns;
	assert_true(looked > rig.mm->now_ns);
	while ((now = now_ns()) < looked) {
		assert_true(mm_run(rig.mm, now) <= looked);
		assert_true(p->look_ns == looked);
	}
	pin_all(c, -1);
	goal = had - (1 << 20);
	for (unsigned int i = 0; i < 1000 && !down_to_goal(&rig); i++) {
		struct timespec ts = ns_to_timespec(NSEC_PER_MSEC);

		mr_run(&rig);
		mr_sync(c);
		nanosleep(&ts, NULL);
	}
	assert_true(down_to_goal(&rig));
	mr_check(&rig);
	mr_close(&rig);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(extents_go_back_oldest_first),
		cmocka_unit_test(nothing_grows_meanwhile),
		cmocka_unit_test(what_is_all_in_use_is_not_searched_all_the_time),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
