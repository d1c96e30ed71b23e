/* SPDX-License-Identifier: Apache-2.0 */
/* mm_check() must notice what is wrong: each law is broken by hand. */
#include <string.h>

#include "tests/lib/unit.h"

#include "tests/lib/mm_rig.h"
#include "ipc/base/bitmap.h"

static struct rig rig;
static struct rig_client *a;
static struct mm_pool *pool;
static struct page *head, *tail;

static int setup(void **state)
{
	mr_open(&rig, &(struct rig_opts){ .bytes = 4u << 20 });
	a = mr_client(&rig, 0, KVMM_RW);
	mr_attach(a, "check", 16384);
	mr_win(a, 0);
	pool = a->win->pool;
	mr_put(a, 1, 0, 2);
	head = mr_page(a, 1, 0);
	tail = mr_page(a, 1, 1);
	mr_check(&rig);
	return 0;
}

/* Whatever was broken has been mended. */
static int teardown(void **state)
{
	mr_check(&rig);
	mr_close(&rig);
	return 0;
}

static void must_say(const char *what)
{
	struct errmsg e = { "" };

	assert_int_equal(mm_check(rig.mm, &e), -EUCLEAN);
	if (!strstr(e.text, what))
		fail_msg("\"%s\" does not speak of %s", e.text, what);
}

static void children_that_are_miscounted(void **state)
{
	head->nr_bound++;
	must_say("children");
	head->nr_bound--;
	copy_at(head, 0)->nr_bound--;
	must_say("children on node 0");
	copy_at(head, 0)->nr_bound++;
}

static void page_whose_parent_is_nowhere(void **state)
{
	tail->flags |= PAGE_ORPHAN;
	must_say("parent");
	tail->flags &= ~PAGE_ORPHAN;
}

static void broken_closure_is_seen(void **state)
{
	uint32_t f = copy_at(head, 0)->frame;

	/* the parent leaves before its child */
	assert_true(frame_isolate(pool, f));
	frame_put(pool, f);
	page_put(head);
	must_say("parent");
	assert_true(tail->flags & PAGE_ORPHAN);
	tail->flags &= ~PAGE_ORPHAN;
}

static void frame_in_the_wrong_state(void **state)
{
	uint32_t f = copy_at(head, 0)->frame;
	uint64_t w = frame_word_of(pool, f);

	atomic_store(&pool->table->word[f], w ^ FRAME_READY ^ FRAME_ISOLATED);
	must_say("frame");
	atomic_store(&pool->table->word[f], w);
}

static void record_that_is_torn(void **state)
{
	struct frame_record *r = &pool->record[copy_at(head, 0)->frame];

	r->pos ^= 1;
	must_say("record");
	r->pos ^= 1;
}

static void frame_that_is_free_twice(void **state)
{
	uint32_t *stack = &pool->free[pool->per_extent], was = stack[0];

	stack[0] = stack[1];
	must_say("free stack");
	stack[0] = was;
}

static void frame_that_is_lost(void **state)
{
	pool->extent[1].nr_free--;
	must_say("extent 1");
	pool->extent[1].nr_free++;
	pool->nr_free--;
	must_say("frames free");
	pool->nr_free++;
}

static void open_frame_of_nobody(void **state)
{
	struct frame_meta *m;
	uint32_t f;

	mr_alloc(a, &f, 1);
	m = &pool->meta[f];
	m->owner = NULL;
	must_say("OPEN");
	m->owner = a->mc->engine;
	a->mc->engine->nr_open++;
	must_say("engine");
	a->mc->engine->nr_open--;
}

static void target_of_a_copy_that_nobody_makes(void **state)
{
	uint32_t f;

	mr_alloc(a, &f, 1);
	pool->meta[f].flags |= FMETA_COPY;
	must_say("copied into");
	pool->meta[f].flags &= ~FMETA_COPY;
}

static void writes_and_buffers_that_are_miscounted(void **state)
{
	rig.mm->node[0].wb_ios++;
	must_say("writes");
	rig.mm->node[0].wb_ios--;
	rig.mm->node[0].wb_bytes++;
	must_say("writes");
	rig.mm->node[0].wb_bytes--;
	pool->nr_writing++;
	must_say("writes");
	pool->nr_writing--;
	rig.mm->stage.bytes++;
	must_say("buffers");
	rig.mm->stage.bytes--;
}

static void bytes_that_are_miscounted(void **state)
{
	rig.mm->node[0].bytes_pages++;
	must_say("bytes of pages");
	rig.mm->node[0].bytes_pages--;
}

static void dirty_page_that_is_not_listed(void **state)
{
	list_del(&copy_at(head, 0)->link);
	must_say("listed as clean");
	list_add_tail(&pool->dirty, &copy_at(head, 0)->link);
}

static void page_that_clients_cannot_find(void **state)
{
	uint64_t w = frame_word_of(pool, copy_at(head, 0)->frame);

	index_clear(a->space, head, 0);
	must_say("without a line");
	index_set(a->space, head, 0, INDEX_USED, w ^ 256, 1);
	must_say("another frame");
	index_set(a->space, head, 0, INDEX_USED, w, copy_at(head, 0)->frame);
}

static void line_of_a_page_that_is_not_there(void **state)
{
	struct page ghost = *head;

	memset(ghost.key, 0x77, sizeof(ghost.key));
	index_add(a->space, &ghost, 0, INDEX_USED, 1, 1);
	must_say("lines in use");
	index_clear(a->space, &ghost, 0);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(children_that_are_miscounted),
		T(page_whose_parent_is_nowhere),
		T(broken_closure_is_seen),
		T(frame_in_the_wrong_state),
		T(record_that_is_torn),
		T(frame_that_is_free_twice),
		T(frame_that_is_lost),
		T(open_frame_of_nobody),
		T(target_of_a_copy_that_nobody_makes),
		T(writes_and_buffers_that_are_miscounted),
		T(bytes_that_are_miscounted),
		T(dirty_page_that_is_not_listed),
		T(page_that_clients_cannot_find),
		T(line_of_a_page_that_is_not_there),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
