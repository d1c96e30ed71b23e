/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ipc/base/err.h"
#include "tests/lib/unit.h"

static void sentence_is_written_and_the_error_returned(void **state)
{
	struct errmsg m = { "" };

	errno = EXDEV;
	assert_int_equal(errmsg_set(&m, -EINVAL, "size %d is odd", 7), -EINVAL);
	assert_string_equal(m.text, "size 7 is odd");
	assert_int_equal(errno, EXDEV);
	errmsg_clear(&m);
	assert_string_equal(m.text, "");
}

static void long_sentence_is_cut_and_terminated(void **state)
{
	struct {
		struct errmsg	m;
		char		guard;
	} s = { .guard = 'g' };

	errmsg_set(&s.m, -EINVAL, "%01000d", 1);
	assert_int_equal(strlen(s.m.text), sizeof(s.m.text) - 1);
	assert_int_equal(s.guard, 'g');
}

static void nobody_has_to_want_the_sentence(void **state)
{
	assert_int_equal(errmsg_set(NULL, -EPERM, "%s", "x"), -EPERM);
	errmsg_clear(NULL);
}

static void system_call_results_become_negative_errno(void **state)
{
	errno = ENOENT;
	assert_int_equal(ret_errno(-1), -ENOENT);
	assert_int_equal(ret_errno(12), 12);
}

static void errors_are_sorted_by_what_they_mean(void **state)
{
	assert_true(err_is_disconnect(-EPIPE));
	assert_true(err_is_disconnect(-ECONNRESET));
	assert_false(err_is_disconnect(-EAGAIN));
	assert_false(err_is_disconnect(0));
	assert_true(err_is_again(-EAGAIN));
	assert_true(err_is_again(-EINTR));
	assert_false(err_is_again(-EPIPE));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(sentence_is_written_and_the_error_returned),
		cmocka_unit_test(long_sentence_is_cut_and_terminated),
		cmocka_unit_test(nobody_has_to_want_the_sentence),
		cmocka_unit_test(system_call_results_become_negative_errno),
		cmocka_unit_test(errors_are_sorted_by_what_they_mean),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
