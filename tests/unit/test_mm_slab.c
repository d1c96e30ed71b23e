/* SPDX-License-Identifier: Apache-2.0 */
/* Many small things: each is its own, zeroed, and memory goes back. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/mm/slab.h"
#include "ipc/base/bits.h"
#include "tests/lib/unit.h"

#define SIZE	200u
#define MANY	50000u

static struct slabs s;
static uint8_t *got[MANY];

static int setup(void **state)
{
	slabs_init(&s, SIZE);
	return 0;
}

static int teardown(void **state)
{
	slabs_fini(&s);
	return 0;
}

static bool all_are(const uint8_t *p, uint8_t val)
{
	unsigned int i;

	for (i = 0; i < SIZE; i++)
		if (p[i] != val)
			return false;
	return true;
}

static void take(unsigned int n)
{
	unsigned int i;

	for (i = 0; i < n; i++) {
		got[i] = slab_get(&s);
		assert_non_null(got[i]);
		assert_true(all_are(got[i], 0));
		memset(got[i], (int)(i % 255 + 1), SIZE);
	}
	for (i = 0; i < n; i++)
		assert_true(all_are(got[i], (uint8_t)(i % 255 + 1)));
}

static void each_is_zeroed_and_its_own(void **state)
{
	unsigned int i;

	take(MANY);
	for (i = 0; i < MANY; i += 3)
		slab_put(&s, got[i]);
	for (i = 0; i < MANY; i += 3) {
		got[i] = slab_get(&s);
		assert_true(all_are(got[i], 0));
		memset(got[i], 7, SIZE);
	}
	for (i = 0; i < MANY; i++)
		assert_true(all_are(got[i], i % 3 ? (uint8_t)(i % 255 + 1) : 7));
}

static void what_was_put_is_handed_out_before_what_is_new(void **state)
{
	void *a = slab_get(&s), *b = slab_get(&s);

	slab_put(&s, a);
	assert_ptr_equal(slab_get(&s), a);
	slab_put(&s, b);
	assert_ptr_equal(slab_get(&s), b);
}

static void so_many_are_reserved_in_one_piece(void **state)
{
	uint64_t bytes;
	char *at;

	take(1000);
	assert_true(slabs_reserve(&s, MANY));
	at = s.at;
	bytes = s.bytes;
	assert_true((uint64_t)(s.end - at) >= (uint64_t)MANY * SIZE);
	/* what was left of the piece before is used, too */
	take(MANY);
	assert_int_equal(s.bytes, bytes);
	assert_true(s.at > at);
	assert_true(slabs_reserve(&s, 0));
	assert_false(slabs_reserve(&s, UINT64_MAX));
}

static bool resident(void *p)
{
	unsigned char vec;

	assert_int_equal(mincore(p, 4096, &vec), 0);
	return vec & 1;
}

static void what_is_not_used_goes_back(void **state)
{
	char *last;

	assert_true(slabs_reserve(&s, MANY));
	memset(s.at, 0xee, (size_t)(s.end - s.at));
	take(100);
	last = (char *)round_down((uintptr_t)s.end - 1, 4096);
	assert_true(resident(last));
	slabs_trim(&s);
	assert_false(resident(last));
	assert_true(resident((void *)round_down((uintptr_t)got[0], 4096)));
	assert_true(all_are(got[99], 100));
	take(MANY);
}

int main(void)
{
#define T(name)	cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(each_is_zeroed_and_its_own),
		T(what_was_put_is_handed_out_before_what_is_new),
		T(so_many_are_reserved_in_one_piece),
		T(what_is_not_used_goes_back),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
