/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "tests/lib/unit.h"

#include "daemon/mm/tier.h"
#include "tests/lib/mm_rig.h"
#include "ipc/base/bitmap.h"
#include "ipc/base/bits.h"
#include "ipc/base/clock.h"
#include "ipc/base/fd.h"

#define PAGE	16384

static struct rig rig;
static struct rig_client *a, *b;
static uint8_t buf[DESC_MAX_BYTES];
static struct errmsg e;

static int setup(void **state)
{
	mr_open(&rig, &(struct rig_opts){ .bytes = 8u << 20 });
	a = mr_client(&rig, 0, KVMM_RW);
	b = mr_client(&rig, 1, KVMM_RW);
	return 0;
}

static int teardown(void **state)
{
	mr_check(&rig);
	mr_close(&rig);
	return 0;
}

static int attach(struct rig_client *c, const char *name, uint32_t bytes,
		  uint32_t flags)
{
	struct rig_group g = { KVMM_FULL, bytes };

	return mm_attach(c->mc, buf, mr_desc(buf, name, &g, 1), flags,
			 &c->space, &e);
}

static void same_descriptor_is_the_same_space(void **state)
{
	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	assert_int_equal(attach(b, "m", PAGE, 0), 0);
	assert_ptr_equal(a->space, b->space);
	assert_ptr_equal(mm_space_get(rig.mm, mm_space_ix(a->space)), a->space);
	assert_int_equal(a->space->nr_clients, 2);
	/* again is once */
	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	assert_int_equal(a->space->nr_clients, 2);
	assert_int_equal(atomic_load(&rig.hdr->space[0].live), 1);
}

static void other_tenant_has_another_space(void **state)
{
	snprintf(b->mc->tenant, sizeof(b->mc->tenant), "other");
	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	assert_int_equal(attach(b, "m", PAGE, 0), 0);
	assert_ptr_not_equal(a->space, b->space);
	assert_memory_not_equal(mm_space_id(a->space), mm_space_id(b->space),
				32);
}

static void reader_makes_no_space(void **state)
{
	struct rig_client *ro = mr_client(&rig, 2, KVMM_RO);

	assert_int_equal(attach(ro, "m", PAGE, 0), -ENOENT);
	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	assert_int_equal(attach(ro, "m", PAGE, 0), 0);
}

static void must_join_names_the_field_that_differs(void **state)
{
	assert_int_equal(attach(b, "m", PAGE, KVMM_MUST_JOIN), 0);
	assert_int_equal(attach(a, "m", 2 * PAGE, KVMM_MUST_JOIN), -EPROTO);
	assert_non_null(strstr(e.text, "page_bytes"));
	assert_int_equal(attach(a, "m", PAGE, KVMM_MUST_JOIN), 0);
	assert_int_equal(attach(a, "m", PAGE, 0x10), -EINVAL);
}

static void members_must_describe_a_model_alike(void **state)
{
	mr_join(a, 1, 0, 2, 0);
	mr_join(b, 1, 1, 2, 0);
	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	assert_int_equal(attach(b, "m", 2 * PAGE, 0), -EPROTO);
	assert_non_null(strstr(e.text, "page_bytes"));
	assert_int_equal(attach(b, "another", 2 * PAGE, 0), 0);
	assert_int_equal(attach(b, "m", PAGE, 0), 0);
}

static void garbage_is_refused_with_a_sentence(void **state)
{
	memset(buf, 0xff, 100);
	assert_int_equal(mm_attach(a->mc, buf, 100, 0, &a->space, &e), -EINVAL);
	assert_true(e.text[0]);
	assert_int_equal(mm_attach(a->mc, buf, 0, 0, &a->space, &e), -EINVAL);
}

static void class_that_cannot_fit_is_refused_and_leaves_nothing(void **state)
{
	assert_int_equal(attach(a, "m", 16u << 20, 0), -ENOSPC);
	assert_true(e.text[0]);
	mr_settle(&rig);
	mr_run(&rig);
	assert_int_equal(rig.host->used, 0);
	assert_null(mm_space_get(rig.mm, 0));
	assert_int_equal(attach(a, "m", PAGE, 0), 0);
}

static bool all_given_back(void *arg)
{
	rig.mm->next_spaces_ns = 0;
	return !rig.mm->space[0];
}

static void space_ends_with_its_last_client_if_it_has_no_page(void **state)
{
	int fds = fd_count();

	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	mr_win(a, 0);
	mm_detach(a->mc, a->space);
	mr_until(&rig, all_given_back, NULL);
	mr_settle(&rig);
	assert_int_equal(rig.host->used, 0);
	assert_int_equal(fd_count(), fds);
	assert_int_equal(atomic_load(&rig.hdr->space[0].live), 0);
}

static void space_with_a_page_outlives_its_clients(void **state)
{
	uint64_t key[4];

	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	mr_win(a, 0);
	mr_put(a, 1, 0, 3);
	mr_exit(a);
	mr_settle(&rig);
	rig.mm->next_spaces_ns = 0;
	mr_run(&rig);
	assert_int_equal(attach(b, "m", PAGE, 0), 0);
	mr_key((uint8_t *)key, 1, 2);
	assert_non_null(page_find(b->space, 0, key));
}

static void mode_is_the_sockets_first_and_what_is_set_then(void **state)
{
	b->mc->o.mode = KVMM_MODE_OBSERVE;
	assert_int_equal(attach(b, "m", PAGE, 0), 0);
	assert_int_equal(atomic_load(&rig.hdr->space[0].mode),
			 KVMM_MODE_OBSERVE);
	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	assert_int_equal(mm_space_mode(a->space), KVMM_MODE_OBSERVE);
	mm_space_set_mode(a->space, KVMM_MODE_BYPASS);
	assert_int_equal(atomic_load(&rig.hdr->space[0].mode),
			 KVMM_MODE_BYPASS);
}

static void client_attaches_to_eight_spaces_at_most(void **state)
{
	char name[16];
	int i;

	for (i = 0; i < 8; i++) {
		snprintf(name, sizeof(name), "m%d", i);
		assert_int_equal(attach(a, name, 4096, 0), 0);
	}
	assert_int_equal(attach(a, "m9", 4096, 0), -EUSERS);
	mm_detach(a->mc, mm_space_get(rig.mm, 3));
	assert_int_equal(attach(a, "m9", 4096, 0), 0);
}

/* -- extents that go ------------------------------------------------------------ */

static struct mm_pool *two_extents(uint32_t *no)
{
	struct mm_pool *p;
	uint32_t f[200], n;

	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	mr_win(a, 0);
	p = a->win->pool;
	n = p->per_extent + 10;
	mr_alloc(a, f, n);
	assert_int_equal(mm_free(a->win, f, n, 0), 0);
	mr_settle(&rig);
	mr_sync(a);
	for (*no = p->max_extents; !p->extent[*no].ext; --*no)
		;
	assert_true(*no > 1);
	/* what is in the magazine goes back too */
	n = mr_pop(a, f, 200);
	if (n)
		assert_int_equal(mm_free(a->win, f, n, 0), 0);
	return p;
}

static void extent_goes_when_all_windows_have_unmapped_it(void **state)
{
	struct mm_extent_change ch[8];
	uint64_t used, seq;
	struct mm_pool *p;
	uint32_t no;

	p = two_extents(&no);
	used = rig.host->used;
	extent_close(p, no);
	assert_int_equal(p->extent[no].nr_used, 0);
	extent_down(p, no);
	mr_settle(&rig);
	assert_non_null(p->extent[no].ext);
	assert_int_equal(mm_win_sync(a->win, a->have_seq, 0, ch, 8, &seq), 1);
	assert_int_equal(ch[0].no, no);
	assert_false(ch[0].up);
	/* told is not done */
	rig.mm->next_pools_ns = 0;
	mr_run(&rig);
	assert_non_null(p->extent[no].ext);
	mr_sync(a);
	rig.mm->next_pools_ns = 0;
	mr_run(&rig);
	mr_settle(&rig);
	assert_null(p->extent[no].ext);
	assert_true(rig.host->used < used);
}

static void silent_holder_keeps_it_and_is_shown(void **state)
{
	uint64_t until;
	struct mm_pool *p;
	uint32_t no;

	/* attached, so that the space stays */
	assert_int_equal(attach(b, "m", PAGE, 0), 0);
	p = two_extents(&no);
	extent_close(p, no);
	extent_down(p, no);
	until = now_ns() + 80 * NSEC_PER_MSEC;
	while (now_ns() < until)
		mr_run(&rig);
	assert_true(p->extent[no].held);
	assert_true(win_holds(a->win, &p->extent[no]));
	mr_check(&rig);
	/* its exit is as good as its word */
	mr_exit(a);
	mr_settle(&rig);
	rig.mm->next_pools_ns = 0;
	mr_run(&rig);
	mr_settle(&rig);
	assert_null(p->extent[no].ext);
}

static void window_that_was_never_told_holds_nothing(void **state)
{
	struct mm_pool *p;
	uint32_t no;

	assert_int_equal(attach(b, "m", PAGE, 0), 0);
	p = two_extents(&no);
	assert_int_equal(mm_win_open(b->mc, b->space, 0, 0, 0, &b->win, &e), 0);
	extent_close(p, no);
	extent_down(p, no);
	mr_sync(a);
	rig.mm->next_pools_ns = 0;
	mr_run(&rig);
	mr_settle(&rig);
	assert_null(p->extent[no].ext);
}

static void number_of_a_gone_extent_is_new_to_everybody(void **state)
{
	struct mm_pool *p;
	uint32_t no, f[200];

	p = two_extents(&no);
	extent_close(p, no);
	extent_down(p, no);
	mr_sync(a);
	rig.mm->next_pools_ns = 0;
	mr_run(&rig);
	mr_settle(&rig);
	assert_null(p->extent[no].ext);
	assert_false(bitmap_shared_test(a->win->bitmap, no));
	mr_alloc(a, f, p->per_extent + 10);
	assert_non_null(p->extent[no].ext);
	assert_true(bitmap_shared_test(a->win->bitmap, no));
}

static bool second_class_has_frames(void *arg)
{
	uint32_t *f = arg;

	mr_sync(a);
	mr_sync(b);
	mm_refill(b->win, 4);
	return mr_pop(b, f, 4) == 4;
}

static void full_node_makes_room_for_another_class(void **state)
{
	uint32_t i, f[4], n;

	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	mr_win(a, 0);
	n = rig.host->capacity / PAGE;
	for (i = 0; i < 2 * n; i++)
		mr_put(a, i, 0, 1);
	assert_true(rig.host->used == rig.host->capacity);
	assert_int_equal(attach(b, "other", 2 * PAGE, 0), 0);
	mr_win(b, 0);
	mr_until(&rig, second_class_has_frames, f);
	/* new memory: nothing of the first class can be read in it */
	for (i = 0; i < 4; i++) {
		const uint8_t *p = frame_addr(b->win->pool, f[i]);
		uint32_t k;

		for (k = 0; k < 2 * PAGE; k++)
			assert_int_equal(p[k], 0);
	}
}

static void full_node_of_pins_refuses_another_class(void **state)
{
	struct mm_pool *p;
	uint32_t i, n;

	assert_int_equal(attach(a, "m", PAGE, 0), 0);
	mr_win(a, 0);
	p = a->win->pool;
	n = rig.host->capacity / PAGE;
	for (i = 0; i < 2 * n; i++)
		mr_put(a, i, 0, 1);
	for (i = p->per_extent; i < p->max_frames; i++)
		if (frame_live(p, i))
			mr_pin(a, i, 1);
	assert_int_equal(attach(b, "other", 2 * PAGE, 0), -ENOSPC);
	assert_true(e.text[0]);
}

/* Memory takes a while to give back; that is no I/O that is stuck. */
static void a_stop_that_has_no_time_left_says_what_for(void **state)
{
	mr_attach(a, "stop", PAGE);
	mr_settle(&rig);
	mr_check(&rig);
	assert_int_equal(mm_destroy(rig.mm, 0), -EBUSY);
	/* and the second, which has time, is the teardown's */
}

/* Pages until the pool of @c has @n extents. */
static struct mm_pool *fill_extents(struct rig_client *c, uint32_t n)
{
	struct mm_pool *p;
	uint32_t i;

	mr_win(c, 0);
	p = c->win->pool;
	for (i = 0; p->nr_extents < n; i++)
		mr_put(c, 1, i, i + 1);
	return p;
}

/* Both have half of the node, and use it; one of them waits for more. */
static void who_waits_long_takes_nothing_from_other_spaces(void **state)
{
	struct mm_pool *p, *q;

	snprintf(b->mc->tenant, sizeof(b->mc->tenant), "other");
	mr_attach(a, "m", PAGE);
	mr_attach(b, "m", PAGE);
	q = fill_extents(b, 4);
	p = fill_extents(a, 4);
	mr_settle(&rig);
	assert_int_equal(q->nr_extents, 4);
	assert_int_equal(pool_room(p), 0);
	rig.mm->now_ns = now_ns();
	p->squeezed_ns = rig.mm->now_ns - NSEC_PER_SEC;
	assert_int_equal(pool_grow(p), -ENOSPC);
	p->squeezed_ns = 0;
	assert_null(p->nd->evac);
}

/* A client that says nothing has an extent mapped: that is no room to wait for. */
static void what_a_stuck_client_holds_is_not_waited_for(void **state)
{
	struct rig_client *c = mr_client(&rig, 2, KVMM_RW);
	struct mm_pool *p, *q, *s;
	uint32_t no;

	mr_attach(a, "m", PAGE);
	mr_attach(b, "n", PAGE);
	mr_attach(c, "o", PAGE);
	q = fill_extents(b, 4);
	s = fill_extents(c, 3);
	p = fill_extents(a, 1);
	mr_settle(&rig);
	assert_int_equal(pool_room(p), 0);
	mr_sync(b);
	/* @b is stuck, and holds one of its four */
	rig.mm->now_ns = now_ns();
	assert_int_equal(pool_evacuate(q), 0);
	assert_true(node_room_comes(q->nd));
	for (no = 1; !q->extent[no].going; no++)
		;
	while (!q->extent[no].down_seq && q->nd->evac)
		evacuate_run(rig.mm, now_ns());
	assert_int_not_equal(q->extent[no].down_seq, 0);
	assert_true(node_room_comes(q->nd));
	rig.mm->now_ns = q->extent[no].down_ns;
	rig.mm->next_pools_ns = 0;
	pools_run(rig.mm, rig.mm->now_ns);
	assert_true(q->extent[no].held);
	assert_false(node_room_comes(q->nd));
	mr_check(&rig);
	/* another one gives room, not he once more */
	q->used_ns = 0;
	assert_int_equal(pool_grow(p), -ENOSPC);
	assert_non_null(p->nd->evac);
	assert_int_equal(q->extents_going, 1);
	assert_int_equal(s->extents_going, 1);
	/* he is back */
	mr_sync(b);
	mr_settle(&rig);
	mr_check(&rig);
	assert_int_equal(q->extents_held, 0);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(same_descriptor_is_the_same_space),
		T(other_tenant_has_another_space),
		T(reader_makes_no_space),
		T(must_join_names_the_field_that_differs),
		T(members_must_describe_a_model_alike),
		T(garbage_is_refused_with_a_sentence),
		T(class_that_cannot_fit_is_refused_and_leaves_nothing),
		T(space_ends_with_its_last_client_if_it_has_no_page),
		T(space_with_a_page_outlives_its_clients),
		T(mode_is_the_sockets_first_and_what_is_set_then),
		T(client_attaches_to_eight_spaces_at_most),
		T(extent_goes_when_all_windows_have_unmapped_it),
		T(silent_holder_keeps_it_and_is_shown),
		T(window_that_was_never_told_holds_nothing),
		T(number_of_a_gone_extent_is_new_to_everybody),
		T(full_node_makes_room_for_another_class),
		T(full_node_of_pins_refuses_another_class),
		T(a_stop_that_has_no_time_left_says_what_for),
		T(who_waits_long_takes_nothing_from_other_spaces),
		T(what_a_stuck_client_holds_is_not_waited_for),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
